"""Which figures does a report have? Every one that the records of the comparison can fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from vestige.compare.report.drawing import Figure, Point, Series
from vestige.compare.report.labels import STAGES, Content, budget_of, names, tasks


def figures(content: Content) -> list[Figure]:
    """Every figure that the records can fill."""
    makers: list[Callable[[Content], Iterable[Figure]]] = [
        _of_the_paper,
        _differences,
        _accuracy_by_budget,
        _accuracy_by_step,
        _loss_by_step,
        _accuracy_by_epsilon,
        _epsilon_by_step,
        _accuracy_by_rate,
        _costs,
        _weights_by_lag,
        by_component,
        _diagnostics_over_time,
    ]
    return _named_apart(figure for make in makers for figure in make(content) if figure.series)


LONGEST = 120
"""The most letters of a figure's key, which is also a file name: file systems allow 255."""


def _named_apart(drawn: Iterable[Figure]) -> list[Figure]:
    """Figures with keys that are file names on any system; of two that would be the same, one gets a number."""
    named: dict[str, Figure] = {}
    for figure in drawn:
        slug = re.sub(r"[^a-z0-9]+", "-", figure.key.lower())[:LONGEST].strip("-")
        tries = (slug if turn == 1 else f"{slug}-{turn}" for turn in count(1))
        key = next(each for each in tries if each not in named)
        named[key] = replace(figure, key=key)
    return list(named.values())


Curves = dict[str, dict[float, list[float]]]
"""By method, the values of all runs at each x."""


def _differences(content: Content) -> Iterable[Figure]:
    """Every method against the baseline, the best on top; hollow where these runs cannot tell them apart."""
    baseline = content["summary"]["baseline"]
    tested = [row for row in content["summary"]["rows"] if row["difference_low"] is not None]
    cells = {(row["task"], row["budget_value"], row["budget"], list(STAGES).index(row["rate"])) for row in tested}
    for task, _, budget, stage in sorted(cells):
        rate = list(STAGES)[stage]
        rows = [r for r in tested if (r["task"], r["budget"], r["rate"]) == (task, budget, rate)]
        series = tuple(
            Series(
                row["method"],
                ((0.0, row["difference"], row["difference_low"], row["difference_high"]),),
                hollow=not row["sentence"].startswith(("better", "worse")),
            )
            for row in sorted(rows, key=lambda row: -row["difference"])
            if row["method"] != baseline
        )
        title = f"{task} at {budget}, {STAGES[rate]}: difference from {baseline}"
        axis = "difference in test accuracy, 95% interval"
        yield Figure(f"difference-{task}-{budget}-{rate}", title, axis, "", series, "rows", percent=True)


def _accuracy_by_budget(content: Content) -> Iterable[Figure]:
    rows = [row for row in content["summary"]["rows"] if row["mean"] is not None]
    for task in tasks(content):
        for rate, words in STAGES.items():
            chosen = [row for row in rows if row["task"] == task and row["rate"] == rate]
            budgets = [budget for _, budget in sorted({(row["budget_value"], row["budget"]) for row in chosen})]
            points: dict[str, list[Point]] = {name: [] for name in names(content)}
            for row in chosen:
                points[row["method"]].append(
                    (float(budgets.index(row["budget"])), row["mean"], row["low"], row["high"])
                )
            yield Figure(
                f"accuracy-{task}-{rate}",
                f"{task}, {words}: accuracy at each budget",
                "budget",
                "test accuracy",
                _filled(Series(name, tuple(sorted(found))) for name, found in points.items()),
                "dots",
                categories=tuple(budgets),
                percent=True,
            )


Cells = dict[tuple[str, ...], Curves]
"""The curves of each task, budget and, where they have one, stage."""


def _in_order(cells: Cells) -> Iterable[tuple[tuple[str, ...], Curves]]:
    """By task, then by the budget's number, then by the rest of the key."""
    return sorted(cells.items(), key=lambda cell: (cell[0][0], float(cell[0][1].split()[-1]), cell[0]))


def _filled(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple(each for each in series if each.points)


def _drawn(content: Content, found: Curves, of: Callable[[Sequence[float]], float]) -> tuple[Series, ...]:
    return _filled(
        Series(name, tuple((x, of(values), None, None) for x, values in sorted(found[name].items())))
        for name in names(content)
        if name in found
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _accuracy_by_step(content: Content) -> Iterable[Figure]:
    """Means over runs: of final runs where they have curves, otherwise of the tuning runs that won."""
    winners: dict[tuple[str, str, str, int], tuple[Any, ...]] = {}
    for row in content["summary"]["choices"]:
        for seed in row["tuning_seeds"]:
            winners[row["task"], row["budget"], row["method"], seed] = row["lr"], row["factor"], row["options"]
    cells: Cells = {}
    for record in content["records"]:
        run = record["run"]
        curve = record.get("curve") or record.get("nonprivate_validation_curve")
        if record["status"] != "done" or not curve or run["stage"] not in (*STAGES, "tuning"):
            continue
        budget = budget_of(run)
        if run["stage"] == "tuning":
            key = run["task"], budget, run["label"], run["seed"]
            lr, factor, options = winners.get(key, (None, None, None))
            if (run["lr"], run["factor"] if run["lr"] is None else None) != (lr, factor):
                continue
            if any(run["options"].get(key) != value for key, value in (options or {}).items()):
                continue
        by_step = cells.setdefault((run["task"], budget, run["stage"]), {}).setdefault(run["label"], {})
        for step, accuracy, *_ in curve:
            by_step.setdefault(float(step), []).append(accuracy)
    for (task, budget, stage), found in _in_order(cells):
        where = "validation accuracy" if stage == "tuning" else f"{STAGES[stage]}, test accuracy"
        series, title = _drawn(content, found, _mean), f"{task} at {budget}: {where} by step"
        yield Figure(f"steps-{task}-{budget}-{stage}", title, "step", "accuracy", series, percent=True)


def _accuracy_by_epsilon(content: Content) -> Iterable[Figure]:
    """The curves of final runs against the epsilon spent by then, as papers often plot them."""
    cells: Cells = {}
    for record in content["records"]:
        run = record["run"]
        for _, accuracy, spent, *_ in record.get("curve") or ():
            if spent is not None and run["stage"] in STAGES:
                by_method = cells.setdefault((run["task"], budget_of(run), run["stage"]), {})
                by_method.setdefault(run["label"], {}).setdefault(spent, []).append(accuracy)
    for (task, budget, stage), found in _in_order(cells):
        series, title = _drawn(content, found, _mean), f"{task} at {budget}: {STAGES[stage]}, test accuracy by epsilon"
        key = f"spent-{task}-{budget}-{stage}"
        yield Figure(key, title, "epsilon spent so far", "accuracy", series, percent=True)


def _loss_by_step(content: Content) -> Iterable[Figure]:
    """The test loss of final runs on their way."""
    for (task, budget, stage), found in _in_order(_watched(content, 3)):
        series, title = _drawn(content, found, _mean), f"{task} at {budget}: {STAGES[stage]}, test loss by step"
        yield Figure(f"loss-{task}-{budget}-{stage}", title, "step", "test loss", series)


def _epsilon_by_step(content: Content) -> Iterable[Figure]:
    """What final runs had spent at each step."""
    for (task, budget, stage), found in _in_order(_watched(content, 2)):
        series, title = _drawn(content, found, _mean), f"{task} at {budget}: {STAGES[stage]}, epsilon by step"
        yield Figure(f"epsilon-{task}-{budget}-{stage}", title, "step", "epsilon spent so far", series)


def _watched(content: Content, place: int) -> Cells:
    """One number of each point of the final runs' curves, by step."""
    cells: Cells = {}
    for record in content["records"]:
        run = record["run"]
        for point in record.get("curve") or ():
            if len(point) > place and point[place] is not None and run["stage"] in STAGES:
                by_method = cells.setdefault((run["task"], budget_of(run), run["stage"]), {})
                by_method.setdefault(run["label"], {}).setdefault(float(point[0]), []).append(point[place])
    return cells


def _accuracy_by_rate(content: Content) -> Iterable[Figure]:
    """Means over the runs of a trial; where further options are tuned, those of the best."""
    trials: dict[tuple[str, ...], dict[str, dict[float, dict[str, list[float]]]]] = {}
    for record in content["records"]:
        run = record["run"]
        if run["stage"] == "tuning" and record["status"] == "done":
            rate = run["lr"] if run["lr"] is not None else run["factor"]
            by_method = trials.setdefault((run["task"], budget_of(run)), {})
            by_point = by_method.setdefault(run["label"], {}).setdefault(float(rate), {})
            by_point.setdefault(repr(run["options"]), []).append(record["nonprivate_validation_accuracy"])
    absolute = bool(content["specification"]["learning_rates"])
    label = "learning rate" if absolute else "learning rate, as a multiple of the automatic one"
    cells: Cells = {
        where: {
            name: {rate: [max(map(_mean, points.values()))] for rate, points in by_rate.items()}
            for name, by_rate in by_method.items()
        }
        for where, by_method in trials.items()
    }
    for (task, budget), found in _in_order(cells):
        series, title = _drawn(content, found, _mean), f"{task} at {budget}: validation accuracy over the grid"
        key = f"rates-{task}-{budget}"
        yield Figure(key, title, label, "validation accuracy", series, log_x=True, percent=True)


WIDE = 20
"""Costs that differ by more than this are drawn on a logarithmic axis."""


def _costs(content: Content) -> Iterable[Figure]:
    for key, title, label in (
        ("seconds", "time of one run", "seconds"),
        ("memory_mb", "peak memory", "megabytes"),
    ):
        for task in tasks(content):
            found: dict[str, list[float]] = {}
            for row in content["summary"]["rows"]:
                if row["task"] == task and row[key] is not None:
                    found.setdefault(row["method"], []).append(row[key])
            means = {name: _mean(found[name]) for name in names(content) if name in found}
            series = tuple(Series(name, ((0.0, mean, None, None),)) for name, mean in means.items())
            wide = bool(means) and max(means.values()) > WIDE * min(means.values()) > 0
            yield Figure(f"{key}-{task}", f"{task}: {title}", label, "", series, "rows", log_x=wide)


def _last_finals(content: Content) -> dict[tuple[str, str], Mapping[str, Any]]:
    """One final run per task and method, at the largest budget: the one whose diagnostics are shown."""
    found: dict[tuple[str, str], Mapping[str, object]] = {}
    stages = {"auto": 0, "tuned": 1, "given": 2}
    finals = [r for r in content["records"] if r["status"] == "done" and r["run"]["stage"] in stages and r["pictures"]]
    for record in sorted(
        finals, key=lambda r: (r["run"]["budget"]["value"], stages[r["run"]["stage"]], -r["run"]["seed"])
    ):
        found[(record["run"]["task"], record["run"]["label"])] = record
    return found


def _weights_by_lag(content: Content) -> Iterable[Figure]:
    runs = _last_finals(content)
    for task in tasks(content):
        series = []
        for name in names(content):
            weights = runs.get((task, name), {}).get("pictures", {}).get("weights")
            if weights and isinstance(weights[-1][1], list):
                points = tuple((float(lag), value, None, None) for lag, value in enumerate(weights[-1][1], 1))
                series.append(Series(name, points))
        title = f"{task}: how much each past release weighs at the end"
        yield Figure(f"weights-{task}", title, "lag (steps ago)", "weight in the memory", tuple(series))


TITLES = {
    "effective_depth": "mean lag of the memory",
    "confidence": "confidence in the trend",
    "memory_share": "share of the memory in the step",
    "trend_norm": "norm of the trend",
}


def _diagnostics_over_time(content: Content) -> Iterable[Figure]:
    """Every other diagnostic of the methods: one line per method, or one per layer."""
    runs = _last_finals(content)
    for task in tasks(content):
        keys = dict.fromkeys(
            key
            for (where, _), record in runs.items()
            if where == task
            for key in record["pictures"]
            if key != "weights"
        )
        for key in keys:
            series: list[Series] = []
            for name in names(content):
                values = runs.get((task, name), {}).get("pictures", {}).get(key) or []
                series += _lines(name, values)
            words = TITLES.get(key, key.replace("_", " "))
            yield Figure(f"{key}-{task}", f"{task}: {words} over time", "step", words, _filled(series))


COMPONENTS = {
    "stem": range(0, 1),
    "stage 1": range(1, 5),
    "stage 2": range(5, 10),
    "stage 3": range(10, 15),
    "stage 4": range(15, 20),
    "head": range(20, 21),
}
"""The layers of each component of our ResNet-18, by the number of their group."""


def _of_the_paper(content: Content) -> Iterable[Figure]:
    """What the paper draws, if the comparison was made from a preset."""
    drawn: Iterable[Figure] = (content.get("paper") or {}).get("figures", ())
    return drawn


def by_component(content: Content, unit: float = 1.0, axis: str = "step") -> Iterable[Figure]:
    """Exponents and tempering of SMA-DP-SGD as means over the layers of each component of a ResNet-18, as its paper's
    Figure 4 has them; a layer without an exponent is left out of the mean. A step is so many `unit`s of the axis."""
    layers = sum(map(len, COMPONENTS.values()))
    for (task, name), record in _last_finals(content).items():
        for key in ("exponent", "tempering") if task.endswith("-resnet18") else ():
            values = [(step, value) for step, value in record["pictures"].get(key, ()) if len(value) == layers]
            series = []
            for component, members in COMPONENTS.items():
                known = [(step, [value[i] for i in members if value[i] is not None]) for step, value in values]
                points = tuple((step * unit, _mean(found), None, None) for step, found in known if found)
                series.append(Series(component, points))
            title = f"{task}, {name}: {key} by component over time"
            yield Figure(f"component-{key}-{task}-{name}", title, axis, f"mean {key}", _filled(series))


def _lines(name: str, values: Sequence[Sequence[Any]]) -> list[Series]:
    scalars = [(float(step), float(value), None, None) for step, value in values if isinstance(value, int | float)]
    if scalars:
        return [Series(name, tuple(scalars))]
    widths = [len(value) for _, value in values if isinstance(value, list)]
    made = []
    for index in range(min(max(widths, default=0), 24)):
        points = tuple(
            (float(step), float(value[index]), None, None)
            for step, value in values
            if isinstance(value, list) and len(value) > index and isinstance(value[index], int | float)
        )
        made.append(Series(f"{name}, layer {index + 1}", points))
    return made
