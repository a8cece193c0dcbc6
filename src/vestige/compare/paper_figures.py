"""Which figures does a paper print? Ours on its own axes: epochs, epsilon spent, budgets, or settings side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vestige import accounting
from vestige.compare.report.drawing import Figure, Point, Series
from vestige.compare.report.figures import by_component
from vestige.compare.report.labels import STAGES, Content, budget_of
from vestige.compare.statistics import summarise
from vestige.priced_questions import SampledGaussian

ONE_LAYER = "epsilon of one layer, by sigma / beta (no guarantee)"
AXES = {
    "epoch": "epoch",
    "epsilon": "epsilon spent so far",
    "marginal epsilon": ONE_LAYER,
    "accuracy": "test accuracy",
    "best": "best test accuracy on the way",
    "updates": "updates",
    "trials": "trials",
}
PERCENT = ("accuracy", "best")
Drawn = Mapping[str, Any]
"""One of a preset's `figures`: x (epoch, epsilon, marginal epsilon, budget or setting), y (one, or several of a
setting; components: those of a ResNet-18), and `panels`, if each word of the labels has a panel of its own."""


def paper_figures(figures: Iterable[Drawn], content: Content) -> Iterator[Figure]:
    """The `figures` of a preset from the records of a comparison that was made from it, on the paper's own terms."""
    for drawn in figures:
        if drawn["y"] == "components":
            yield from _components(content)
        else:
            yield from {"setting": _side_by_side, "budget": _by_budget}.get(drawn["x"], _lines)(content, drawn)


def _components(content: Content) -> Iterator[Figure]:
    """Exponents and tempering of a ResNet-18 over epochs."""
    rate = content["records"][0]["run"]["sample_rate"]
    for figure in by_component(content, rate, "epoch"):
        yield replace(figure, key=f"paper-{figure.key}")


Place = tuple[str, str, str, str]
"""The task, budget, stage and panel of a figure."""


def _finals(content: Content) -> Iterator[Mapping[str, Any]]:
    """Final runs that ended, at budgets of the paper's kind: that of the first."""
    kind = content["specification"]["budgets"][0]["kind"]
    for record in content["records"]:
        run = record["run"]
        if record["status"] == "done" and run["stage"] in STAGES and run["budget"]["kind"] == kind:
            yield record


def _panel(label: str, drawn: Drawn) -> tuple[str, str]:
    """The panel of a label and its name there: "beta 0.9, C 1" is beta 0.9 in "C 1", and "p 0.5" is 0.5 in "p"."""
    if not drawn.get("panels"):
        return "", label
    if ", " in label:
        name, _, panel = label.partition(", ")
        return panel, name
    panel, _, name = label.rpartition(" ")
    return panel, name


def _lines(content: Content, drawn: Drawn) -> Iterator[Figure]:
    """Means over the seeds, along the way: by epoch or by epsilon."""
    cells: dict[Place, dict[str, dict[float, list[float]]]] = {}
    for record in _finals(content):
        run = record["run"]
        panel, name = _panel(run["label"], drawn)
        for point in record.get("curve") or ():
            x, y = (_read(record, point, drawn[axis]) for axis in ("x", "y"))
            if x is not None and y is not None:
                by_name = cells.setdefault((run["task"], budget_of(run), run["stage"], panel), {})
                by_name.setdefault(name, {}).setdefault(x, []).append(y)
    for where, found in cells.items():
        series = (
            Series(name, tuple((x, sum(ys) / len(ys), None, None) for x, ys in sorted(points.items())))
            for name, points in found.items()
        )
        yield _figure(drawn, where, AXES[drawn["x"]], drawn["y"], series)


def _read(record: Mapping[str, Any], point: Sequence[Any], quantity: str) -> float | None:
    """A quantity of one evaluation: (step, accuracy, epsilon, ...)."""
    if quantity == "epoch":
        return float(point[0]) * float(record["run"]["sample_rate"])
    if quantity == "marginal epsilon":
        groups = record.get("groups") or 1
        one = float(record["noise_multiplier"]) * groups**0.5
        return _marginal(record["run"]["sample_rate"], one, int(point[0]), record["run"]["delta"])
    value = point[{"accuracy": 1, "epsilon": 2}[quantity]]
    return None if value is None else float(value)


@lru_cache(maxsize=4096)
def _marginal(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """What one layer would cost if it were released alone: the paper's diagnostic, no guarantee."""
    return accounting.epsilon({SampledGaussian(rate, multiplier): steps}, delta, "rdp")


def _by_budget(content: Content, drawn: Drawn) -> Iterator[Figure]:
    """What runs reached at each epsilon."""
    cells: dict[Place, dict[str, dict[float, list[float]]]] = {}
    for record in _finals(content):
        run, value = record["run"], record.get(drawn["y"])
        if value is not None:
            by_name = cells.setdefault((run["task"], "", run["stage"], ""), {})
            by_name.setdefault(run["label"], {}).setdefault(run["budget"]["value"], []).append(value)
    for where, found in cells.items():
        series = (Series(name, tuple(_points(points))) for name, points in found.items())
        yield _figure(drawn, where, "epsilon", drawn["y"], series)


def _points(by_x: Mapping[float, Sequence[float]]) -> Iterator[Point]:
    for x, values in sorted(by_x.items()):
        total = summarise(values)
        yield x, total.mean, total.low, total.high


def _side_by_side(content: Content, drawn: Drawn) -> Iterator[Figure]:
    """What each setting reached: quantities in percent in one figure, every other one in its own."""
    wanted = [drawn["y"]] if isinstance(drawn["y"], str) else list(drawn["y"])
    shares, others = [y for y in wanted if y in PERCENT], [y for y in wanted if y not in PERCENT]
    labels = [each["label"] for each in content["specification"]["contenders"]]
    cells: dict[Place, dict[str, list[Mapping[str, Any]]]] = {}
    for record in _finals(content):
        run = record["run"]
        where = run["task"], budget_of(run), run["stage"], _panel(run["label"], drawn)[0]
        cells.setdefault(where, {}).setdefault(run["label"], []).append(record)
    for together in ([shares] if shares else []) + [[each] for each in others]:
        for where, found in cells.items():
            members = [label for label in labels if _panel(label, drawn)[0] == where[-1]]
            series = [
                Series(AXES[quantity], tuple(_dots(members, found, quantity)))
                for quantity in together
            ]  # fmt: skip
            names = tuple(_panel(label, drawn)[1] for label in members)
            yield _figure(drawn, where, where[-1] or "setting", together[0], series, names)


def _reached(record: Mapping[str, Any], quantity: str) -> float | None:
    if quantity != "best":
        return record.get(quantity)
    seen = [point[1] for point in record.get("curve") or () if point[1] is not None]
    return max(record["accuracy"], *seen) if seen else None


def _dots(members: Sequence[str], found: Mapping[str, Sequence[Mapping[str, Any]]], quantity: str) -> Iterator[Point]:
    for place, label in enumerate(members):
        known = (_reached(record, quantity) for record in found.get(label, ()))
        values = [value for value in known if value is not None]
        if values:
            total = summarise(values)
            yield float(place), total.mean, total.low, total.high


def _figure(
    drawn: Drawn, where: Place, x: str, quantity: str, series: Iterable[Series], categories: tuple[str, ...] = ()
) -> Figure:
    task, budget, stage, panel = where
    title = f"{task}{f', {panel}' if panel else ''}{f' at {budget}' if budget else ''}, {STAGES[stage]}: "
    return Figure(
        f"paper-{drawn['x']}-{quantity}-{task}-{budget}-{panel}-{stage}",
        f"{title}{AXES[quantity]} by {drawn['x']}",
        x,
        AXES[quantity],
        tuple(each for each in series if each.points),
        "dots" if categories else "line",
        categories=categories,
        percent=quantity in PERCENT,
    )
