"""The page in a real browser: drawn, sortable, filterable, silent and offline; and its numbers against the records."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from vestige import accounting
from vestige.cli import main
from vestige.cli import report as cli_report
from vestige.cli.report import write_report
from vestige.cli.reproduce import reproduce
from vestige.compare import comparison, presets, runner
from vestige.compare.arguments import contenders
from vestige.compare.comparison import Budget, Contender, Problem, Specification
from vestige.compare.folder import ComparisonFolder
from vestige.compare.report import drawing, figures, style
from vestige.compare.report import page as report
from vestige.compare.report import privacy as report_privacy
from vestige.compare.report.privacy import privacy
from vestige.compare.summary import price_lines, summarised
from vestige.methods.registry import METHODS
from vestige.questions import SampledGaussian

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SMALL = Specification(
    problems=(Problem("digits-mlp"),),
    contenders=(
        Contender("dp-sgd", "dp-sgd"),
        Contender("fo", "fo-dp-sgd"),
        Contender("bad", "fo-dp-sgd", {"beta": 9}),
    ),
    budgets=(Budget("noise_multiplier", 1.0), Budget("noise_multiplier", 2.0)),
    seeds=(0, 1, 2),
    steps=8,
    factors=(0.5, 1.0),
)
MANY = ["dp-sgd", *(name for name in METHODS if name != "dp-sgd"), "dp-sgd:groups=layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = runner.compare(tmp_path_factory.mktemp("comparison") / "c", SMALL)
    return home.path


@pytest.fixture(scope="module")
def content(folder):
    home = ComparisonFolder(folder)
    summary = summarised(home)
    summary["price_lines"] = price_lines(summary["prices"])
    records = list(home.records().values())
    return {"title": "A <test> & more", "specification": SMALL.to_json(), "summary": summary, "records": records}


def test_the_page_is_one_small_file_that_asks_nobody(content):
    page = report.page(content)
    assert len(page.encode()) < 5_000_000
    assert "A &lt;test&gt; &amp; more" in page
    outside = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)
    assert set(outside) <= {"data:,"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", page)


def enlarged(content, tasks=3, budgets=4, seeds=10, factors=7):
    """Copies of real records for every method, with names, ids and all the digits of their own."""
    numbers = np.random.default_rng(0)
    done = [record for record in content["records"] if record["status"] == "done"]
    patterns = {stage: next(r for r in done if r["run"]["stage"] == stage) for stage in ("tuning", "tuned", "auto")}
    stages = [("tuning", 1000, 2.0**k) for k in range(factors)]
    stages += [(stage, seed, 1.0) for stage in ("tuned", "auto") for seed in range(seeds)]
    names, cells = [f"task-{i}" for i in range(tasks)], [{"kind": "epsilon", "value": 2.0**i} for i in range(budgets)]
    records = []
    for task, label, budget, (stage, seed, factor) in product(names, MANY, cells, stages):
        record, chance = patterns[stage], numbers.random(5).tolist()
        run = {**record["run"], "task": task, "label": label, "budget": budget, "seed": seed, "factor": factor}
        score = "accuracy" if stage != "tuning" else "nonprivate_validation_accuracy"
        found = dict(zip(("epsilon", "noise_multiplier", "lr", "seconds", score), chance, strict=True))
        if stage == "tuning":
            found["nonprivate_validation_curve"] = [[50 * k, *numbers.random(2).tolist()] for k in range(1, 21)]
        records.append({**record, **found, "id": numbers.bytes(10).hex(), "run": run})
    (choice, *_), (price, *_) = content["summary"]["choices"], content["summary"]["prices"]
    where = [
        {"task": task, "budget": f"epsilon {budget['value']:g}", "method": label}
        for task, label, budget in product(names, MANY, cells)
    ]
    summary = {
        **content["summary"],
        "rows": comparison.rows(records, "dp-sgd"),
        "choices": [{**choice, **each, "factor": 1.0} for each in where],
        "prices": [{**price, **each} for each in where],
        "failed": [],
    }
    specification = {
        **content["specification"],
        "problems": [{"task": task} for task in names],
        "contenders": [{"label": label} for label in MANY],
        "budgets": cells,
    }
    return {**content, "specification": specification, "summary": summary, "records": records}


def test_a_large_comparison_is_a_page_below_five_megabytes_and_loses_nothing(content):
    large = enlarged(content)
    assert len(large["records"]) > 8400
    page = report.page(large)
    assert 1_000_000 < len(page.encode()) < 4_500_000
    body = re.search(r'<table id="table-runs".*?<tbody>(.*?)</tbody>', page).group(1)
    rows = [re.findall(r"<td([^>]*)>([^<]*)", row) for row in body.split("<tr>")[1:]]
    wanted = report._run_table(large)
    assert len(rows) == len(wanted)
    for cells, row in zip(rows, wanted, strict=True):
        for (kind, shown), value in zip(cells, row.values(), strict=True):
            exact = kind.partition("data-v")[2].lstrip("=") if "data-v" in kind else shown
            assert (
                (float(exact) == value)
                if isinstance(value, float)
                else (exact == ("" if value is None else str(value)))
            )


def test_a_page_that_is_too_large_is_said_to_be(folder, tmp_path, monkeypatch):
    def told():
        return CliRunner().invoke(main.app, ["report", str(folder), "--out", str(tmp_path / "r.html")]).stdout

    assert "more than" not in told()
    monkeypatch.setattr(cli_report, "LARGE", 50_000)
    assert "MB, more than the 0.05 MB a page should have" in " ".join(told().split())


def test_a_superseded_run_is_listed_and_in_no_row_and_no_curve(content):
    records = [
        {**each, "run": {**each["run"], "stage": "superseded"}, "curve": [[4, 0.123, 0.5]]}
        if each["run"]["stage"] == "tuned" and each["status"] == "done"
        else each
        for each in content["records"]
    ]
    marked = {**content, "records": records}
    assert {row["stage"] for row in report._run_table(marked)} == {"tuning", "auto", "superseded"}
    assert {row["rate"] for row in comparison.rows(records, "dp-sgd") if row["mean"] is not None} == {"auto"}
    drawn = [figure for figure in figures.figures(marked) if figure.key.startswith(("steps-", "spent-"))]
    assert drawn
    assert all(0.123 not in point for figure in drawn for series in figure.series for point in series.points)


def test_every_number_has_its_run_and_comes_from_the_records(content):
    rows = report._row_table(content)
    by_id = {record["id"][:8]: record for record in content["records"]}
    for row in rows:
        values = [by_id[name]["accuracy"] for name in row["its runs"].split()]
        assert len(values) == row["seeds"]
        if values:
            assert row["accuracy"] == pytest.approx(sum(values) / len(values))
    assert len(report._run_table(content)) == len(content["records"])


def test_a_score_on_private_examples_is_never_called_accuracy(content):
    trials = [r for r in content["records"] if r["run"]["stage"] == "tuning" and r["status"] == "done"]
    assert trials
    for record in trials:
        assert not {"accuracy", "curve"} & set(record)
        assert 0 <= record["nonprivate_validation_accuracy"] <= 1
    assert all("accuracy" in r for r in content["records"] if r["run"]["stage"] != "tuning" and r["status"] == "done")


def test_the_privacy_section_says_what_an_officer_asks(content):
    words = privacy(content)
    for needed in ("add/remove one example", "One row of the data", "poisson", "pld", "sampled-gaussian", "1e-05"):
        assert needed in words
    assert "released alone" in words
    assert "Validation accuracies" in words
    for line in content["records"][0]["assumptions"] if content["records"][0]["status"] == "done" else ():
        assert line in words.replace("&#x27;", "'")
    seeded = [
        {**record, "epsilon": None, "noise": "seeded", "reasons": ["known seed"]} for record in content["records"]
    ]
    assert "known seed" in privacy({**content, "records": seeded})
    assert "None. No run on this page has an epsilon" in privacy({**content, "records": seeded})
    assert "It rests on these assumptions" not in privacy({**content, "records": seeded})
    cyclic = [
        {**each, "sampling": "cyclic-poisson"} if each["status"] == "done" else each for each in content["records"]
    ]
    words = privacy({**content, "records": [*content["records"], *cyclic]})
    assert "poisson: at every step each example joins by its own coin flip" in words
    assert "cyclic-poisson: the data are split once into parts that take turns" in words
    watched = [{**each, "curve": [[1, 0.5, 1.0]] * 7} if "curve" in each else each for each in content["records"]]
    assert "looked at up to 7 times during a final run" in privacy({**content, "records": watched})


def test_a_bill_of_many_questions_is_told_as_a_range():
    def asked(*multipliers):
        rows = [{"kind": "sampled-gaussian", "rate": 0.04, "multiplier": z, "count": 25} for z in multipliers]
        run = {"task": "t", "label": "m", "budget": {"kind": "epsilon", "value": 3.0}}
        (row,) = report_privacy._charged([{"run": run, "epsilon": 2.9, "charged": rows}] * 2)
        assert row["runs"] == 2
        return row["questions asked of the data in one run"]

    assert asked(2.0) == "25 x sampled-gaussian (rate 0.04, multiplier 2)"
    assert asked(2.0, 1.0).count("25 x") == 2
    many = asked(*(12.5 * 0.99**i for i in range(100)))
    assert many == "2500 x sampled-gaussian with 100 different numbers (rate 0.04, multiplier 4.622 to 12.5)"


def test_figures_are_wellformed_and_cover_what_was_recorded(content, tmp_path):
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
    lines = report.export(content, tmp_path)
    for key in drawn:
        tree = ElementTree.fromstring((tmp_path / f"{key}.svg").read_text())
        assert tree.tag.endswith("svg")
        numbers = re.findall(r'(?:cx|cy|x|y|d)="([^"]*)"', (tmp_path / f"{key}.svg").read_text())
        assert not any("nan" in number or "inf" in number for number in numbers)
    if "PNG" in lines[-1] and "no PNG" not in lines[-1]:
        assert {path.stem for path in tmp_path.glob("*.png")} == set(drawn)


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
    for colour in style.COLOURS:
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
    assert not any(colour in on_the_page for colour in style.COLOURS)


def test_many_methods_look_apart_everywhere_and_hollow_still_means_not_told_apart(content):
    seen = [style.look_of(name, MANY) for name in MANY]
    assert len(MANY) > 2 * len(style.COLOURS)
    assert len({(look.colour, look.shape) for look in seen}) == len(MANY)
    assert len({(look.colour, look.dash) for look in seen}) == len(MANY)
    shapes = {re.sub(r"M[^a-z]*", "", style.outline(look, 50, 50, 4)) for look in seen}
    assert len(shapes) == len({look.shape for look in seen}) == 3
    for look in seen:
        for hollow in (True, False):
            assert ("stroke" in style.mark(look, 1, 1, 4, "", hollow)) == hollow
        assert ("stroke-dasharray" in style.sample(look, 0, 0)) == (look.shape != "o")
    contenders = [{"label": name} for name in (*MANY, "fo", "bad")]
    page = report.page({**content, "specification": {**content["specification"], "contenders": contenders}})
    chips = re.findall(r'<button class="chip c(\d)".*?(<svg.*?</svg>)', page)
    assert [key for _, key in chips[: len(MANY)]] == [style.key(look) for look in seen]
    assert len(set(chips)) == len(contenders)


@pytest.mark.parametrize("kind", ["dots", "line"])
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
    assert [each.get_marker() for each in drawn] == [style.look_of(name, MANY).shape for name in MANY]
    pyplot.close(canvas)


def compared(differences):
    """A comparison of one cell: by method its difference from dp-sgd, the ends of its interval, and the verdict."""
    rows = [
        {
            "task": "t",
            "budget": "epsilon 3",
            "budget_value": 3.0,
            "rate": "auto",
            "method": name,
            "mean": 0.5 + middle,
            "difference": middle,
            "difference_low": low,
            "difference_high": high,
            "sentence": f"{word} from dp-sgd at epsilon 3",
        }
        for name, (middle, low, high, word) in {"dp-sgd": (0.0, 0.0, 0.0, "the baseline"), **differences}.items()
    ]
    labels = [{"label": row["method"]} for row in rows]
    problems = {"problems": [{"task": "t"}], "contenders": labels, "baseline": "dp-sgd"}
    return {"summary": {"baseline": "dp-sgd", "rows": rows}, "specification": problems, "records": []}


def test_differences_lie_where_they_belong_and_are_hollow_where_nothing_can_be_told():
    found = {"a": (-0.02, -0.03, -0.01, "worse"), "b": (0.01, -0.01, 0.03, "not distinguishable"),
             "c": (0.04, 0.03, 0.05, "better")}  # fmt: skip
    content = compared(found)
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


def test_many_methods_that_cannot_be_told_apart_are_counted_and_named_on_request():
    same = {f"method-{i}": (0.001 * i, -0.01, 0.01, "not distinguishable") for i in range(8)}
    words = report._findings(compared({**same, "bad": (-0.1, -0.11, -0.09, "worse")}))
    assert "8 methods are not distinguishable from dp-sgd</summary>" in words
    assert all(name in words for name in same)
    assert "No method is shown to be better. Worse than dp-sgd: bad by 10.0 points." in words
    both = report._findings(compared({"good": (0.1, 0.09, 0.11, "better"), "bad": (-0.1, -0.11, -0.09, "worse")}))
    assert "Better than dp-sgd: good by 10.0 points. Worse than dp-sgd: bad by 10.0 points." in both
    few = report._findings(compared(dict(list(same.items())[:2])))
    assert "method-0, method-1 are not distinguishable from dp-sgd." in few


def test_the_page_says_how_many_trials_each_method_had(content):
    assert "Every method had the same number of trials" in report._tuning(content)
    first, *rest = content["summary"]["choices"]
    uneven = {**content["summary"], "choices": [{**first, "trials": 5}, *rest]}
    assert "Every method had 2 to 5 trials" in report._tuning({**content, "summary": uneven})


def test_methods_whose_tuning_costs_more_than_others_are_named():
    row = {"task": "t", "budget": "epsilon 3", "trials": 7, "runs_per_trial": 1, "epsilon_one_run": 2.99}
    same = [{**row, "method": name, "epsilon_with_tuning": 5.8} for name in ("a", "b")]
    (line,) = price_lines(same)
    assert line.startswith("price of tuning at epsilon 3: uncharged")
    assert "epsilon 2.99; choosing by the best of a random number of trials with mean 7 and one final run" in line
    assert "together cost epsilon 5.8 (" in line
    (line,) = price_lines([{**each, "runs_per_trial": 3} for each in same])
    assert "with mean 7, of 3 runs each, and one final run together cost epsilon 5.8 (" in line
    dearer, unproven = ({**row, "method": "c", "epsilon_with_tuning": charged} for charged in (6.1, None))
    (line,) = price_lines([*same, dearer])
    assert "cost epsilon 5.8 to 6.1" in line
    (line,) = price_lines([*same, {**same[0], "method": "d", "trials": 8, "epsilon_one_run": 4.0}])
    assert "epsilon 2.99 to 4;" in line
    assert "mean 7 to 8 " in line
    assert price_lines([{**same[0], "epsilon_one_run": None}]) == []
    (line,) = price_lines([{**same[0], "epsilon_with_tuning": 5.801}])
    assert "together cost epsilon 5.81 (" in line, "a bound is rounded upwards"
    lines = price_lines([*same, unproven])
    assert [line.split(":")[0] for line in lines] == [
        "price of tuning at epsilon 3",
        "price of tuning at epsilon 3 (c)",
    ]
    assert "have no proven price" in lines[1]
    (line,) = price_lines([unproven])
    assert line.startswith("price of tuning at epsilon 3: uncharged")


def test_ticks_are_round_and_enclose():
    for low, high in ((0.123, 0.987), (0.0, 1e-7), (5.0, 5.0), (-3.0, 40.0), (1e4, 9e5)):
        ticks = drawing._ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high - 1e-12
        assert 2 <= len(ticks) <= 12


def test_commands(folder, tmp_path):
    run = CliRunner()
    made = run.invoke(
        main.app, ["report", str(folder), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "f")]
    )
    assert made.exit_code == 0, made.output
    assert (tmp_path / "r.html").stat().st_size > 10_000
    assert list((tmp_path / "f").glob("*.svg"))
    (tmp_path / "empty").mkdir()
    assert "holds no comparison" in run.invoke(main.app, ["report", str(tmp_path / "empty")]).stderr
    ComparisonFolder(tmp_path / "new").create(SMALL)
    assert "no finished run" in run.invoke(main.app, ["report", str(tmp_path / "new")]).stderr
    again = run.invoke(main.app, ["compare", "--resume", str(folder), "--json", "--workers", "1"])
    summary = json.loads(again.stdout)
    assert summary["done"] == 2 * 2 * (2 + 3 + 3)
    assert {row["label"] for row in summary["failed"]} == {"bad"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "dp-sdg"], "did you mean 'dp-sgd'"),
        (["--method", "dp-sgd:clip"], "option=value"),
        (["--lrs", ""], "empty grid"),
        (["--factors", "1,two"], "must be numbers"),
        (["--tune", "beta="], "empty grid"),
        (["--seeds", "0"], "seeds=0"),
        (["--epsilon", "-3"], "epsilon=-3"),
        (["--stack", "high"], "stack='high'"),
        (["--engine", "moon"], "engine='moon'"),
        (["--rates", "given"], "lr is missing"),
        (["--resume", "/nonexistent"], "holds no comparison"),
        (["--retry"], "--retry goes with --resume"),
        (["--method", "dp-sgd:foo=1"], "foo=1 is not an option of dp-sgd"),
        (["--method", "dp-quantile:groups=layers"], "dp-quantile clips by Quantile, which cannot be split in groups"),
        (["--method", "dp-sgd:groups=;"], "must be layers, flat, or patterns"),
        (["--steps", "0"], "--steps=0"),
        (["--sample-rate", "2"], "--sample-rate=2.0"),
        (["--delta", "-1"], "--delta=-1.0"),
        (["--factors", "0,1"], "--factors=0,1 must all be positive"),
        (["--lrs", "-0.1"], "--lrs=-0.1 must all be positive"),
        (["--lr", "-1"], "--lr=-1.0"),
        (["--evaluations", "-1"], "--evaluations=-1"),
        (["--physical-batch", "0"], "--physical-batch=0"),
        (["--tune", "beeta=1,2"], "--tune='beeta' is an option of none of the methods (did you mean 'beta'?)"),
        (["--baseline", "dp-sdg"], "--baseline='dp-sdg' is not compared (did you mean 'dp-sgd'?)"),
        (["--device", "moon"], "--device='moon' cannot be used"),
        (["--ray-address", "here"], "--ray-address='here' goes with --engine ray"),
        (["--epsilon", "much", "--epsilon", "1"], "'--epsilon': 'much', '1'"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, words, tmp_path):
    options = [] if "--resume" in arguments else ["--out", str(tmp_path / "c"), "--workers", "1"]
    made = CliRunner().invoke(main.app, ["compare", *options, *arguments])
    assert made.exit_code == 2
    assert words in made.stderr
    assert made.stderr.count("\n") == 1
    assert not list((tmp_path / "c" / "runs").glob("*")) if (tmp_path / "c").exists() else True


def test_contenders_on_the_command_line():
    found = contenders(["fo-dp-sgd:beta=0.8,window=4", "dp-sgd"])
    assert found == [("fo-dp-sgd:beta=0.8,window=4", "fo-dp-sgd", {"beta": 0.8, "window": 4}), ("dp-sgd", "dp-sgd", {})]
    everything = contenders(["all"])
    assert {name for _, name, _ in everything} == set(METHODS)
    assert len({label for label, _, _ in everything}) == len(everything)


# --- presets ---------------------------------------------------------------------------------------------------------


def test_every_table_and_figure_is_there_and_its_methods_take_its_options():
    names = set(presets.PRESETS)
    assert {f"fo-table{i}" for i in (1, 2, 3)} | {f"fo-fig{i}" for i in range(1, 9)} <= names
    assert {"sma-table2", "sma-table3", "sma-table4", "sma-fig2", "sma-fig3", "sma-fig4", "sma-fig5"} <= names
    assert {"br-table2", "br-table4", "br-fig4", "br-fig5", "br-fig6", "br-fig7", "br-fig8"} <= names
    for preset in presets.PRESETS.values():
        assert preset.notes
        whole = preset.make()
        labels = {contender.label for contender in whole.contenders}
        assert {printed.label for printed in preset.printed} <= labels
        for contender in whole.contenders:
            if contender.method in METHODS:
                METHODS[contender.method].make(**contender.options)
        if all(contender.method not in METHODS for contender in whole.contenders):
            with pytest.raises(ValueError, match="no such method"):
                preset.specification(None)
            continue
        full, small = preset.specification(None), preset.specification(None, small=True)
        assert small.problems[0].settings["steps"] < full.steps
        assert full.baseline in {contender.label for contender in full.contenders}


def test_the_printed_figures_are_the_papers():
    finals = {printed.label: printed.value for printed in presets.find("fo-table3").printed}
    assert finals["fo beta 0.90"] == 0.3654
    assert finals["fo beta 1.00"] == 0.3241
    br = {printed.name: printed.value for printed in presets.find("br-table2").printed}
    assert br["cifar10, epsilon 3, dpsgd-br"] == 71.52
    with pytest.raises(ValueError, match="did you mean 'fo-table3'"):
        presets.find("fo-tabel3")


def test_ours_stands_beside_the_printed(content):
    preset = replace(
        presets.find("fo-table3"),
        printed=(
            presets.Printed("a", 0.5, "dp-sgd"),
            presets.Printed("b", 50.0, "dp-sgd", "accuracy in percent", "digits-mlp", Budget("noise_multiplier", 1.0)),
            presets.Printed("c", 1.0, "nobody"),
        ),
    )
    records = [r for r in content["records"] if r["run"]["stage"] == "auto" and r["run"]["label"] == "dp-sgd"]
    rows = presets.beside(preset, content["records"])
    mean = sum(record["accuracy"] for record in records) / len(records)
    assert rows[0]["ours_at_auto"] == pytest.approx(mean)
    assert rows[0]["ours"] is None
    loud = [100 * record["accuracy"] for record in records if record["run"]["budget"]["value"] == 1.0]
    assert rows[1]["ours_at_auto"] == pytest.approx(sum(loud) / 3)
    assert rows[2]["ours_at_auto"] is None
    ratio = replace(
        preset,
        printed=(
            presets.Printed("x", 1.0, "dp-sgd", "relative seconds"),
            presets.Printed("y", 1.02, "fo", "relative seconds"),
        ),
    )
    assert presets.beside(ratio, content["records"])[0]["ours_at_auto"] == pytest.approx(1.0)


def test_the_papers_terms_and_one_epsilon_are_never_mixed():
    """Accuracy 0.1 at the paper's sigma and rate, 0.2 there at auto, 0.3 at the one epsilon: each in its own column."""
    preset = presets.find("fo-table3")

    def record(budget, stage, accuracy):
        run = {"task": "cifar10-mlp", "label": "fo beta 0.90", "stage": stage, "budget": budget}
        return {"status": "done", "run": run, "accuracy": accuracy, "pictures": {}}

    sigma, epsilon = {"kind": "paper_sigma", "value": 1.1}, {"kind": "epsilon", "value": 17.4}
    records = [record(sigma, "given", 0.1), record(sigma, "auto", 0.2), record(epsilon, "auto", 0.3)]
    records.append(record(epsilon, "given", 0.4))
    row = next(row for row in presets.beside(preset, records) if row["printed"] == 0.3654)
    assert (row["ours"], row["ours_at_auto"], row["ours_at_equal_epsilon"]) == (0.1, 0.2, 0.3)
    rivals = [{**each, "run": {**each["run"], "label": "dp-adam"}} for each in records]
    row = next(row for row in presets.beside(preset, rivals) if row["printed"] == 0.2438)
    assert row["ours"] == 0.2  # the paper gives no rate for dp-adam


@pytest.mark.parametrize("name", [f"fo-fig{i}" for i in (1, 2, 3, 4, 5, 6, 8)] + ["fo-table3", "fo-alpha"])
def test_accuracies_are_compared_at_one_sigma_and_at_one_epsilon(name):
    budgets = presets.find(name).make().budgets
    assert [budget.kind for budget in budgets] == ["paper_sigma", "epsilon"]
    spent = accounting.epsilon({SampledGaussian(0.04, budgets[0].value / 0.9): 6250}, 1e-5)
    assert budgets[1].value == pytest.approx(spent, abs=0.05)


def test_runs_that_are_timed_are_made_alone(tmp_path, monkeypatch):
    seen = {}

    def watch(path, specification, *, place, workers, **_):
        seen[path.name] = (place.stack, workers)
        raise ValueError("enough seen")

    monkeypatch.setattr(runner, "compare", watch)
    for name in ("fo-table2", "fo-fig8"):
        with pytest.raises(ValueError, match="enough seen"):
            reproduce(name, data=str(tmp_path), small=True, device="cpu", out=tmp_path / name)
    assert seen["fo-table2"] == (False, 1)
    assert seen["fo-fig8"][0] is True


def test_the_report_of_a_reproduction_sets_the_paper_beside_it(folder, tmp_path):
    copied = tmp_path / "again"
    shutil.copytree(folder, copied)
    (copied / "preset.json").write_text('{"preset": "fo-table3", "small": true}')
    page = write_report(copied, None, None, None).read_text()
    for words in ('id="paper"', "0.3654", "Made with --small", presets.find("fo-table3").notes[1]):
        assert words in page
    assert 'id="paper"' not in write_report(folder, tmp_path / "plain.html", None, None).read_text()


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


# --- a real browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        profile = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(str(profile), executable_path=chromium, args=FLAGS)
        yield context
        context.close()


def test_in_a_browser(browser, content, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report.page(content), encoding="utf-8")
    page = browser.new_page()
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())

    assert page.locator("figure > svg").count() == len(figures.figures(content))
    boxes = page.eval_on_selector_all("figure > svg", "all => all.map(s => s.getBoundingClientRect().height)")
    assert min(boxes) > 60
    marks = page.eval_on_selector_all("g.s", "all => all.map(g => g.getBBox().width + g.getBBox().height)")
    assert min(marks) > 0

    table = page.locator("#table-runs")
    column = page.locator("#table-runs th").all_text_contents().index("accuracy")
    head = table.locator("th").nth(column).locator("button")

    def values():
        return page.eval_on_selector_all(
            "#table-runs tbody tr:not(.hidden)", f"rows => rows.map(r => r.cells[{column}].dataset.v)"
        )

    head.click()
    rising = [float(value) for value in values() if value]
    assert rising == sorted(rising)
    head.click()
    falling = [float(value) for value in values() if value]
    assert falling == sorted(rising, reverse=True)
    assert values()[-1] == ""  # failed runs have no accuracy and stay at the end

    search = page.locator("input[data-table=table-runs]")
    search.fill("fo tuned")
    assert 0 < len(values()) < len(content["records"])
    assert all("tuned" in text for text in page.locator("#table-runs tbody tr:not(.hidden)").all_text_contents())
    with page.expect_download() as waiting:
        page.locator(".csv[data-table=table-runs]").click()
    saved = tmp_path / "runs.csv"
    waiting.value.save_as(saved)
    with open(saved, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["accuracy"] for row in rows] == values()
    records = {row["run"]: row for row in report._run_table(content)}
    for row in rows:
        for name, value in records[row["run"]].items():
            exact = float(row[name]) if isinstance(value, float) else row[name]
            assert exact == (value if isinstance(value, float) else "" if value is None else str(value))
    search.fill("no such thing")
    assert values() == []

    chip = page.locator(".chip[data-series=fo]")
    chip.click()
    assert page.locator("g.s[data-series=fo]:visible").count() == 0
    assert page.locator("g.s[data-series=dp-sgd]:visible").count() > 0
    chip.click()
    assert page.locator("g.s[data-series=fo]:visible").count() > 0

    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests
    page.close()


def test_methods_named_on_request_always_stand_on_a_line_of_their_own(browser, content, tmp_path):
    same = {f"method-{i}": (0.001 * i, -0.01, 0.01, "not distinguishable") for i in range(8)}
    path = tmp_path / "report.html"
    words = report._findings(compared(same)) + report._findings(
        compared({**same, "bad": (-0.1, -0.11, -0.09, "worse")})
    )
    path.write_text(report.page(content).replace("</main>", f"<div id='here'>{words}</div></main>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        places = page.eval_on_selector_all(
            "#here details",
            """all => all.map(each => {
                const before = document.createRange();
                before.setStart(each.parentElement, 0);
                before.setEndBefore(each);
                const [own, whole] = [each.getBoundingClientRect(), each.parentElement.getBoundingClientRect()];
                return [own.left - whole.left, own.top - before.getBoundingClientRect().bottom];
            })""",
        )
        assert len(places) == 2
        assert all(left == pytest.approx(0, abs=1) and above > -4 for left, above in places)
    page.close()


def test_panels_stand_in_the_order_of_their_budgets(content):
    def titles(figures):
        return [figure.title.split(":")[0] for figure in figures]

    run = next(r for r in content["records"] if r["run"]["stage"] == "tuning" and r["status"] == "done")
    budgets = [{"kind": "epsilon", "value": value} for value in (17.4, 3.0, 1.0, 8.0)]
    records = [{**run, "run": {**run["run"], "budget": budget}} for budget in budgets]
    found = titles(figures._accuracy_by_rate({**content, "records": records}))
    assert found == [f"{run['run']['task']} at epsilon {value}" for value in ("1", "3", "8", "17.4")]
