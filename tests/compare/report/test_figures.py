"""Does every figure show what was recorded, and stand alone as a file?"""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from comparisons import MANY, one_cell
from vestige.compare.report import drawing, figures, series_looks
from vestige.compare.report import page as report
from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.tasks import models


def test_figures_are_wellformed_and_cover_what_was_recorded(content, tmp_path, monkeypatch):
    drawn = {figure.key: figure for figure in figures.figures(content)}
    for start in (
        "difference-",
        "accuracy-",
        "steps-",
        "rates-",
        "seconds-",
        "memory-mb-",
        "weights-",
        "effective-depth-",
    ):
        assert any(key.startswith(start) for key in drawn), start
    kinds, png = set(), report.png

    def one_of_a_kind(figure, order, path):  # every night all of them
        path.touch() if figure.kind in kinds else png(figure, order, path)
        kinds.add(figure.kind)

    monkeypatch.setattr(report, "png", one_of_a_kind)
    lines = report.export(content, tmp_path)
    for key in drawn:
        tree = ElementTree.fromstring((tmp_path / f"{key}.svg").read_text())
        assert tree.tag.endswith("svg")
        numbers = re.findall(r'(?:cx|cy|x|y|d)="([^"]*)"', (tmp_path / f"{key}.svg").read_text())
        assert not any("nan" in number or "inf" in number for number in numbers)
    if "PNG" in lines[-1] and "no PNG" not in lines[-1]:
        assert {path.stem for path in tmp_path.glob("*.png")} == set(drawn)


@pytest.mark.slow
def test_a_task_named_by_a_path_has_figures_too(content, tmp_path):
    """Every key is the name of a file, and two tasks whose names look alike in one keep their own."""

    def renamed(task):
        mine = [{**r, "run": {**r["run"], "task": task}} for r in content["records"]]
        return mine, [{**row, "task": task} for row in content["summary"]["rows"]]

    tasks = ["sub/my.py:make", "sub/my py:Make", "/deep" * 80 + "/my.py:make"]
    made = [renamed(task) for task in tasks]
    summary = {**content["summary"], "rows": [row for _, rows in made for row in rows], "choices": []}
    specification = {**content["specification"], "problems": [{"task": task} for task in tasks]}
    records = [record for mine, _ in made for record in mine]
    theirs = {**content, "specification": specification, "summary": summary, "records": records}
    drawn = figures.figures(theirs)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", figure.key) and len(figure.key) < 150 for figure in drawn)
    report.export(theirs, tmp_path / "f")
    assert {path.stem for path in (tmp_path / "f").glob("*.svg")} == {figure.key for figure in drawn}
    assert len(list((tmp_path / "f").glob("*.svg"))) == len(drawn)
    assert len({figure.title for figure in drawn}) == len(drawn)


def of_many(kind, count=30):
    """A figure in which each of many methods has a series."""
    points = tuple((float(x), 0.1 * x, 0.1 * x - 0.01, 0.1 * x + 0.01) for x in range(2 if kind == "dots" else count))
    series = tuple(drawing.Series(name, points[: 1 if kind == "rows" else None]) for name in MANY)
    return drawing.Figure("k", "t", "x", "y", series, kind, categories=("a", "b") if kind == "dots" else ())


@pytest.mark.parametrize(("kind", "count"), [("dots", 2), ("line", 30), ("line", 7), ("rows", 1)])
def test_a_figure_in_a_file_needs_no_style_sheet_and_names_its_methods_below_the_plot(kind, count):
    figure = of_many(kind, count)
    drawn = drawing.svg(figure, MANY, standalone=True)
    assert "var(" not in drawn
    assert "<style" not in drawn
    assert 'class="c0"' not in drawn
    for colour in series_looks.COLOURS:
        assert f"fill:{colour}" in drawn
        assert f"stroke:{colour}" in drawn
    tree = ElementTree.fromstring(drawn)
    words = {e.text: e for e in tree.iter() if e.tag.endswith("text")}
    assert set(MANY) <= set(words)
    height = float(tree.get("viewBox").split()[3])
    assert all(float(words[name].get("y")) < height for name in MANY)
    if kind != "rows":
        assert min(float(words[name].get("y")) for name in MANY) > float(words["x"].get("y"))
    on_the_page = drawing.svg(figure, MANY)
    assert "fill:var(--c)" in on_the_page
    assert not any(colour in on_the_page for colour in series_looks.COLOURS)


def test_many_methods_look_apart_everywhere_and_hollow_still_means_not_told_apart(content):
    seen = [series_looks.look_of(name, MANY) for name in MANY]
    assert len(MANY) > 2 * len(series_looks.COLOURS)
    assert len({(look.colour, look.shape) for look in seen}) == len(MANY)
    assert len({(look.colour, look.dash) for look in seen}) == len(MANY)
    shapes = {re.sub(r"M[^a-z]*", "", series_looks.outline(look, 50, 50, 4)) for look in seen}
    assert len(shapes) == len({look.shape for look in seen}) == 3
    for look in seen:
        for hollow in (True, False):
            assert ("stroke" in series_looks.mark(look, 1, 1, 4, "", hollow)) == hollow
        assert ("stroke-dasharray" in series_looks.sample(look, 0, 0)) == (look.shape != "o")
    contenders = [{"label": name} for name in (*MANY, "fo", "bad")]
    page = report.page({**content, "specification": {**content["specification"], "contenders": contenders}})
    chips = re.findall(r'<button class="chip c(\d)".*?(<svg.*?</svg>)', page)
    assert [key for _, key in chips[: len(MANY)]] == [series_looks.key(look) for look in seen]
    assert len(set(chips)) == len(contenders)


@pytest.mark.parametrize("kind", ["dots", "line"])
@pytest.mark.everyday("line")
def test_the_legend_of_a_png_lies_below_its_plot(kind, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    drawing.png(of_many(kind), MANY, tmp_path / "f.png")
    monkeypatch.undo()
    (canvas,) = kept
    (legend,), (axes,) = canvas.legends, canvas.axes
    assert [each.get_text() for each in legend.get_texts()] == MANY
    assert legend.get_window_extent().y1 <= axes.get_tightbbox().y0
    assert legend.get_window_extent().x0 >= 0
    assert axes.get_window_extent().height > 0.5 * canvas.bbox.height
    drawn = axes.lines if kind == "line" else [bars[0] for bars in axes.containers]
    assert [each.get_marker() for each in drawn] == [series_looks.look_of(name, MANY).shape for name in MANY]
    pyplot.close(canvas)


def test_differences_lie_where_they_belong_and_are_hollow_where_nothing_can_be_told():
    found = {"a": (-0.02, -0.03, -0.01, "worse"), "b": (0.01, -0.01, 0.03, "not distinguishable"),
             "c": (0.04, 0.03, 0.05, "better")}  # fmt: skip
    content = one_cell(found)
    (figure,) = figures._differences(content)
    assert [series.name for series in figure.series] == ["c", "b", "a"]
    tree = ElementTree.fromstring(drawing.svg(figure, ["dp-sgd", "a", "b", "c"]))
    groups = {group.get("data-series"): group for group in tree.iter() if group.get("data-series")}
    assert set(groups) == set(found)
    zero = float(next(e for e in tree.iter() if e.tag.endswith("line") and e.get("class") == "axis").get("x1"))
    scale = []
    for name, (middle, low, high, word) in found.items():
        circle = next(e for e in groups[name] if e.tag.endswith("circle"))
        start, _, stop = re.fullmatch(r"M([\d.]+) ([\d.]+)H([\d.]+)", next(
            e.get("d") for e in groups[name] if e.tag.endswith("path"))).groups()  # fmt: skip
        scale += [(float(circle.get("cx")) - zero) / middle]
        scale += [(float(start) - zero) / low, (float(stop) - zero) / high]
        assert ("stroke" in circle.get("style")) == (word == "not distinguishable")
    assert scale == pytest.approx([scale[0]] * 9, rel=0.02)


def test_costs_far_apart_stand_a_decade_to_a_step():
    rows = [{"task": "t", "method": f"m{i}", "seconds": 10.0**i, "memory_mb": 100.0 + i} for i in range(4)]
    labels = [{"label": row["method"]} for row in rows]
    content = {
        "summary": {"rows": rows},
        "specification": {"problems": [{"task": "t"}], "contenders": labels, "baseline": "m0"},
    }
    seconds, memory = figures._costs(content)
    assert (seconds.log_x, memory.log_x) == (True, False)
    for figure in (seconds, memory):
        tree = ElementTree.fromstring(drawing.svg(figure, ["m0", "m1", "m2", "m3"]))
        places = [float(e.get("cx")) for e in tree.iter() if e.tag.endswith("circle")]
        assert np.diff(places) == pytest.approx([places[1] - places[0]] * 3, rel=0.05)


def test_ticks_are_round_and_enclose():
    for low, high in ((0.123, 0.987), (0.0, 1e-7), (5.0, 5.0), (-3.0, 40.0), (1e4, 9e5)):
        ticks = drawing._ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high - 1e-12
        assert 2 <= len(ticks) <= 12


def test_accuracy_against_the_epsilon_spent_so_far():
    def record(label, curve):
        run = {"task": "t", "label": label, "stage": "given", "budget": {"kind": "epsilon", "value": 8.0}}
        return {"status": "done", "run": run, "curve": curve}

    records = [record("a", [[10, 0.2, 1.0], [20, 0.4, 2.0]]), record("a", [[10, 0.4, 1.0], [20, 0.6, 2.0]])]
    records.append(record("b", [[10, 0.1, None]]))  # a reproducible run has no epsilon to be drawn at
    contenders = [{"label": "a"}, {"label": "b"}]
    content = {"records": records, "specification": {"contenders": contenders, "baseline": "a"}}
    (figure,) = figures._accuracy_by_epsilon(content)
    (series,) = figure.series
    assert [point[:2] for point in series.points] == [(1.0, pytest.approx(0.3)), (2.0, pytest.approx(0.5))]


def test_loss_and_epsilon_by_step_are_means_over_runs():
    def record(label, curve, stage="given"):
        run = {"task": "t", "label": label, "stage": stage, "budget": {"kind": "epsilon", "value": 8.0}}
        return {"status": "done", "run": run, "curve": curve}

    records = [record("a", [[10, 0.2, 1.0, 2.0], [20, 0.4, 2.0, 1.0]]), record("a", [[10, 0.4, 1.0, 3.0]])]
    records += [record("b", [[10, 0.1, None]]), record("a", [[10, 0.1, 9.0, 9.0]], "superseded")]
    contenders = [{"label": "a"}, {"label": "b"}]
    content = {"records": records, "specification": {"contenders": contenders, "baseline": "a"}}
    (losses,), (spent,) = figures._loss_by_step(content), figures._epsilon_by_step(content)
    assert [point[:2] for point in losses.series[0].points] == [(10.0, 2.5), (20.0, 1.0)]
    assert [point[:2] for point in spent.series[0].points] == [(10.0, 1.0), (20.0, 2.0)]
    assert len(losses.series) == len(spent.series) == 1  # an old record has no loss, a reproducible run no epsilon


def test_components_of_a_resnet_are_means_over_their_layers():
    """Figure 4 of SMA-DP-SGD; which layers a component has is read off the network itself."""
    layout = Layout.of(models.resnet18(10), Layers())
    owners = {}
    for segment in layout.segments:
        owners.setdefault(segment.name.partition(".")[0], set()).add(segment.group)
    assert [set(members) for members in figures.COMPONENTS.values()] == list(owners.values())
    run = {
        "task": "cifar10-resnet18",
        "label": "sma",
        "stage": "given",
        "seed": 0,
        "budget": {"kind": "epsilon", "value": 8.0},
    }
    values = [None, *(float(i) for i in range(1, 21))]
    record = {"status": "done", "run": run, "pictures": {"exponent": [[0, values]], "tempering": [[0, [0.5] * 21]]}}
    exponent, tempering = figures.by_component({"records": [record]})
    drawn = {series.name: series.points[0][:2] for series in exponent.series}
    assert drawn == {
        "stage 1": (0.0, 2.5), "stage 2": (0.0, 7.0), "stage 3": (0.0, 12.0), "stage 4": (0.0, 17.0), "head": (0.0, 20.0)
    }  # fmt: skip
    assert len(tempering.series) == 6
    small = {**record, "run": {**run, "task": "cifar10-mlp"}}
    assert not list(figures.by_component({"records": [small]}))


def test_panels_stand_in_the_order_of_their_budgets(content):
    def titles(figures):
        return [figure.title.split(":")[0] for figure in figures]

    run = next(r for r in content["records"] if r["run"]["stage"] == "tuning" and r["status"] == "done")
    budgets = [{"kind": "epsilon", "value": value} for value in (17.4, 3.0, 1.0, 8.0)]
    records = [{**run, "run": {**run["run"], "budget": budget}} for budget in budgets]
    found = titles(figures._accuracy_by_rate({**content, "records": records}))
    assert found == [f"{run['run']['task']} at epsilon {value}" for value in ("1", "3", "8", "17.4")]
