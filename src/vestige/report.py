"""What does a comparison look like? Records to figures, tables and one HTML page that needs no network."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any

Content = Mapping[str, Any]
Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of the interval around y."""

COLOURS = ("#3a3a3a", "#1f6fb4", "#d1601f", "#2b8a4b", "#a83a8f", "#b8860b", "#0b8a94", "#c2334d", "#6a55b8", "#7a5230")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
STAGES = {"tuned": "tuned rate", "auto": "automatic rate", "given": "given rate"}
WIDTH, HEIGHT = 560, 350
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Figure:
    """A panel of lines, bars or dots; `names` decides each series' colour, the same in every figure."""

    key: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: str = "line"
    log_x: bool = False
    categories: tuple[str, ...] = ()
    """The labels of x = 0, 1, 2, ... where x is no number."""
    percent: bool = False


# --- from records to figures -----------------------------------------------------------------------------------------


def figures(content: Content) -> list[Figure]:
    """Every figure that the records can fill."""
    makers: list[Callable[[Content], Iterable[Figure]]] = [
        _accuracy_by_budget,
        _accuracy_by_step,
        _accuracy_by_epsilon,
        _accuracy_by_rate,
        _costs,
        _weights_by_lag,
        _pictures,
    ]
    return [figure for make in makers for figure in make(content) if figure.series]


def _names(content: Content) -> list[str]:
    """The methods in the order of the specification, the baseline first."""
    labels = [each["label"] for each in content["specification"]["contenders"]]
    baseline = content["specification"]["baseline"]
    return sorted(labels, key=lambda label: label != baseline)


def _tasks(content: Content) -> list[str]:
    return [problem["task"] for problem in content["specification"]["problems"]]


def _accuracy_by_budget(content: Content) -> Iterable[Figure]:
    rows = [row for row in content["summary"]["rows"] if row["mean"] is not None]
    for task in _tasks(content):
        for rate, words in STAGES.items():
            chosen = [row for row in rows if row["task"] == task and row["rate"] == rate]
            budgets = sorted({(row["budget_value"], row["budget"]) for row in chosen})
            place = {budget: float(index) for index, (_, budget) in enumerate(budgets)}
            series = [
                Series(
                    name,
                    tuple(
                        sorted(
                            (place[row["budget"]], row["mean"], row["low"], row["high"])
                            for row in chosen
                            if row["method"] == name
                        )
                    ),
                )
                for name in _names(content)
            ]
            yield Figure(
                f"accuracy-{task}-{rate}",
                f"{task}, {words}: accuracy at each budget",
                "budget",
                "test accuracy",
                _filled(series),
                "dots",
                categories=tuple(budget for _, budget in budgets),
                percent=True,
            )


def _filled(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple(each for each in series if each.points)


def _accuracy_by_step(content: Content) -> Iterable[Figure]:
    """Means over runs: of final runs where they were watched, otherwise of the tuning runs that won."""
    winners = {
        (row["task"], row["budget"], row["method"]): (row["lr"], row["factor"], row["options"])
        for row in content["summary"]["choices"]
    }
    by_cell: dict[tuple[str, str, str], dict[str, list[list[Any]]]] = {}
    for record in content["records"]:
        run = record["run"]
        curve = record.get("curve") or record.get("nonprivate_validation_curve")
        if record["status"] != "done" or not curve:
            continue
        budget = _budget(run)
        if run["stage"] == "tuning":
            lr, factor, options = winners.get((run["task"], budget, run["label"]), (None, None, None))
            if (run["lr"], run["factor"] if run["lr"] is None else None) != (lr, factor):
                continue
            if any(run["options"].get(key) != value for key, value in (options or {}).items()):
                continue
        key = (run["task"], budget, run["stage"])
        by_cell.setdefault(key, {}).setdefault(run["label"], []).append(curve)
    for (task, budget, stage), found in sorted(by_cell.items()):
        where = "validation accuracy" if stage == "tuning" else f"{STAGES[stage]}, test accuracy"
        series = [Series(name, _mean_curve(found[name])) for name in _names(content) if name in found]
        title = f"{task} at {budget}: {where} by step"
        yield Figure(_slug(f"steps-{task}-{budget}-{stage}"), title, "step", "accuracy", _filled(series), percent=True)


def _accuracy_by_epsilon(content: Content) -> Iterable[Figure]:
    """The curves of final runs against what they had spent by then, as papers like to draw them."""
    cells: dict[tuple[str, str, str], dict[str, dict[float, list[float]]]] = {}
    for record in content["records"]:
        run = record["run"]
        for _, accuracy, spent in record.get("curve") or ():
            if spent is not None and run["stage"] in STAGES:
                by_method = cells.setdefault((run["task"], _budget(run), run["stage"]), {})
                by_method.setdefault(run["label"], {}).setdefault(spent, []).append(accuracy)
    for (task, budget, stage), found in sorted(cells.items()):
        series = [
            Series(name, tuple((e, sum(v) / len(v), None, None) for e, v in sorted(found[name].items())))
            for name in _names(content)
            if name in found
        ]
        title = f"{task} at {budget}: {STAGES[stage]}, test accuracy by epsilon"
        key = _slug(f"spent-{task}-{budget}-{stage}")
        yield Figure(key, title, "epsilon spent so far", "accuracy", _filled(series), percent=True)


def _mean_curve(curves: Sequence[Sequence[Sequence[Any]]]) -> tuple[Point, ...]:
    by_step: dict[float, list[float]] = {}
    for curve in curves:
        for point in curve:
            by_step.setdefault(float(point[0]), []).append(point[1])
    return tuple((step, sum(values) / len(values), None, None) for step, values in sorted(by_step.items()))


def _accuracy_by_rate(content: Content) -> Iterable[Figure]:
    cells: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
    for record in content["records"]:
        run = record["run"]
        if run["stage"] == "tuning" and record["status"] == "done":
            rate = run["lr"] if run["lr"] is not None else run["factor"]
            by_method = cells.setdefault((run["task"], _budget(run)), {}).setdefault(run["label"], {})
            by_method.setdefault(float(rate), []).append(record["nonprivate_validation_accuracy"])
    absolute = bool(content["specification"]["learning_rates"])
    for (task, budget), found in sorted(cells.items()):
        series = [
            Series(name, tuple((rate, max(values), None, None) for rate, values in sorted(found[name].items())))
            for name in _names(content)
            if name in found
        ]
        label = "learning rate" if absolute else "learning rate, as a multiple of the automatic one"
        title = f"{task} at {budget}: validation accuracy over the grid"
        yield Figure(
            _slug(f"rates-{task}-{budget}"),
            title,
            label,
            "validation accuracy",
            _filled(series),
            log_x=True,
            percent=True,
        )


def _costs(content: Content) -> Iterable[Figure]:
    for key, title, label in (
        ("seconds", "time of one run", "seconds"),
        ("memory_mb", "peak memory", "megabytes"),
    ):
        for task in _tasks(content):
            means: dict[str, list[float]] = {}
            for row in content["summary"]["rows"]:
                if row["task"] == task and row[key] is not None:
                    means.setdefault(row["method"], []).append(row[key])
            names = [name for name in _names(content) if name in means]
            series = [
                Series(name, ((float(index), sum(means[name]) / len(means[name]), None, None),))
                for index, name in enumerate(names)
            ]
            yield Figure(
                _slug(f"{key}-{task}"), f"{task}: {title}", "", label, tuple(series), "bars", categories=tuple(names)
            )


def _last_finals(content: Content) -> dict[tuple[str, str], Mapping[str, Any]]:
    """One final run per task and method, at the largest budget: whose memory is shown."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    stages = {"auto": 0, "tuned": 1, "given": 2}
    finals = [r for r in content["records"] if r["status"] == "done" and r["run"]["stage"] in stages and r["pictures"]]
    for record in sorted(
        finals, key=lambda r: (r["run"]["budget"]["value"], stages[r["run"]["stage"]], -r["run"]["seed"])
    ):
        found[(record["run"]["task"], record["run"]["label"])] = record
    return found


def _weights_by_lag(content: Content) -> Iterable[Figure]:
    runs = _last_finals(content)
    for task in _tasks(content):
        series = []
        for name in _names(content):
            weights = runs.get((task, name), {}).get("pictures", {}).get("weights")
            if weights and isinstance(weights[-1][1], list):
                points = tuple((float(lag), value, None, None) for lag, value in enumerate(weights[-1][1], 1))
                series.append(Series(name, points))
        title = f"{task}: how much each past release weighs at the end"
        yield Figure(_slug(f"weights-{task}"), title, "lag (steps ago)", "weight in the memory", tuple(series))


PICTURES = {
    "effective_depth": "mean lag of the memory",
    "confidence": "confidence in the trend",
    "memory_share": "share of the memory in the step",
    "trend_norm": "norm of the trend",
}


def _pictures(content: Content) -> Iterable[Figure]:
    """Whatever else the methods showed over time: one line per method, or one per layer."""
    runs = _last_finals(content)
    for task in _tasks(content):
        keys = dict.fromkeys(
            key
            for (where, _), record in runs.items()
            if where == task
            for key in record["pictures"]
            if key != "weights"
        )
        for key in keys:
            series: list[Series] = []
            for name in _names(content):
                values = runs.get((task, name), {}).get("pictures", {}).get(key) or []
                series += _lines(name, values)
            words = PICTURES.get(key, key.replace("_", " "))
            yield Figure(_slug(f"{key}-{task}"), f"{task}: {words} over time", "step", words, _filled(series))


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


def _budget(run: Mapping[str, Any]) -> str:
    names = {"epsilon": "epsilon", "paper_sigma": "the paper's sigma", "noise_multiplier": "noise multiplier"}
    return f"{names[run['budget']['kind']]} {run['budget']['value']:g}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- SVG -------------------------------------------------------------------------------------------------------------


def svg(figure: Figure, order: Sequence[str], standalone: bool = False) -> str:
    """The figure as SVG: colours come from the page's style, or are written in for a file of its own."""
    values = [v for s in figure.series for p in s.points for v in (p[1], p[2], p[3]) if v is not None and isfinite(v)]
    xs = [p[0] for s in figure.series for p in s.points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if figure.kind == "bars":
        low = 0.0
    y_ticks = _ticks(low, high)
    scale_x, x_ticks = _x_axis(figure, xs)
    bottom, top = min(low, y_ticks[0]), max(high, y_ticks[-1])

    def scale_y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - value) / ((top - bottom) or 1.0)

    parts = [_frame(figure, x_ticks, [(scale_y(t), _number(t, figure.percent)) for t in y_ticks])]
    for index, series in enumerate(figure.series):
        parts.append(_marks(figure, series, _style(series.name, order, index), index, scale_x, scale_y, bottom))
    colours = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(COLOURS))
    style = (
        f"<style>text{{font:12px sans-serif;fill:#222}}.axis{{stroke:#999}}.grid{{stroke:#e4e4e4}}"
        f".title{{font-weight:600;font-size:13px}}{colours}</style>"
        if standalone
        else ""
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_text(figure.title)}">{style}{ground}{"".join(parts)}</svg>'
    )


def _style(name: str, order: Sequence[str], index: int) -> tuple[int, str]:
    """Colour and dash of a series: by the method's place in the order, so that it looks the same everywhere."""
    place = order.index(name) if name in order else len(order) + index
    return place % len(COLOURS), DASHES[(place // len(COLOURS)) % len(DASHES)]


def _x_axis(figure: Figure, xs: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    span = WIDTH - LEFT - RIGHT
    if figure.categories:
        step = span / len(figure.categories)
        places = [(LEFT + step * (index + 0.5), label) for index, label in enumerate(figure.categories)]
        return (lambda x: LEFT + step * (x + 0.5)), places
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if figure.log_x and low > 0:
        from_, to = log10(low), log10(high)
        ends = [v for v in dict.fromkeys(sorted(xs))]
        shown = ends if len(ends) <= 9 else ends[:: -(-len(ends) // 9)]
        width = (to - from_) or 1.0
        place = lambda x: LEFT + 8 + (span - 16) * (log10(x) - from_) / width  # noqa: E731
        return place, [(place(v), f"{v:.3g}") for v in shown]
    ticks = _ticks(low, high)
    width = (high - low) or 1.0
    linear = lambda x: LEFT + 8 + (span - 16) * (x - low) / width  # noqa: E731
    return linear, [(linear(t), _number(t, False)) for t in ticks if low <= t <= high]


def _ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers around [low, high]."""
    if not high > low:
        high, low = high + (abs(high) or 1.0) * 0.1, low - (abs(low) or 1.0) * 0.1
    raw = (high - low) / wanted
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    first = floor(low / step)
    ticks = [first * step]
    while ticks[-1] < high - 1e-9 * step:
        ticks.append((first + len(ticks)) * step)
    return ticks


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.4g}%" if percent else f"{value:.6g}" if abs(value) < 1e5 else f"{value:.2g}"


def _frame(figure: Figure, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> str:
    base = HEIGHT - BOTTOM
    parts = [f'<text class="title" x="{LEFT}" y="18">{_text(figure.title)}</text>']
    for y, label in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    crowded = len(x_ticks) * max((len(label) for _, label in x_ticks), default=0) * 7 > WIDTH - LEFT - RIGHT
    for index, (x, label) in enumerate(x_ticks):
        if crowded and figure.kind != "bars":
            if index % 2:
                continue
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_text(label)}</text>')
        elif crowded:
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{index + 1}</text>')
        else:
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_text(label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{_text(figure.x)}</text>')
    y = (TOP + base) / 2
    parts.append(f'<text transform="translate(14 {y:.0f}) rotate(-90)" text-anchor="middle">{_text(figure.y)}</text>')
    return "".join(parts)


def _marks(
    figure: Figure,
    series: Series,
    style: tuple[int, str],
    index: int,
    scale_x: Callable[[float], float],
    scale_y: Callable[[float], float],
    bottom: float,
) -> str:
    colour, dash = style
    paint = "stroke:var(--c);fill:none"
    parts = [f'<g class="s c{colour}" data-series="{_text(series.name)}">']
    count = len(figure.series)
    if figure.kind == "bars":
        width = 0.62 * (WIDTH - LEFT - RIGHT) / max(1, len(figure.categories))
        for x, y, _, _ in series.points:
            top, left = scale_y(y), scale_x(x) - width / 2
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{scale_y(bottom) - top:.1f}" '
                f'style="fill:var(--c)"><title>{_text(series.name)}: {y:.4g} {_text(figure.y)}</title></rect>'
            )
    elif figure.kind == "dots":
        room = 0.72 * (WIDTH - LEFT - RIGHT) / max(1, len(figure.categories))
        shift = room * ((index + 0.5) / count - 0.5)
        for x, y, low, high in series.points:
            px, py = scale_x(x) + shift, scale_y(y)
            words = f"{series.name}: {_number(y, figure.percent)}"
            if low is not None and high is not None:
                words += f" ({_number(low, figure.percent)} to {_number(high, figure.percent)})"
                parts.append(
                    f'<path d="M{px:.1f} {scale_y(low):.1f}V{scale_y(high):.1f}M{px - 3:.1f} {scale_y(low):.1f}h6'
                    f'M{px - 3:.1f} {scale_y(high):.1f}h6" style="{paint}" stroke-width="1.6"/>'
                )
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" '
                f'style="fill:var(--c)"><title>{_text(words)}</title></circle>'
            )
    else:
        path = "L".join(f"{scale_x(x):.1f} {scale_y(y):.1f}" for x, y, _, _ in series.points if isfinite(y))
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<path d="M{path}" style="{paint}" stroke-width="1.9"{dashes}><title>{_text(series.name)}</title></path>'
        )
        if len(series.points) <= 12:
            for x, y, _, _ in series.points:
                parts.append(
                    f'<circle cx="{scale_x(x):.1f}" cy="{scale_y(y):.1f}" r="3" style="fill:var(--c)">'
                    f"<title>{_text(series.name)}: {_number(y, figure.percent)}</title></circle>"
                )
    return "".join(parts) + "</g>"


def _text(value: object) -> str:
    return html.escape(str(value))


# --- the page --------------------------------------------------------------------------------------------------------


def page(content: Content) -> str:
    """One HTML file with everything in it: style, figures, tables, and the few lines of script that sort them."""
    order = _names(content)
    drawn = figures(content)
    groups = {
        "accuracy": [f for f in drawn if f.key.startswith("accuracy-")],
        "steps": [f for f in drawn if f.key.startswith(("steps-", "spent-"))],
        "rates": [f for f in drawn if f.key.startswith("rates-")],
        "costs": [f for f in drawn if f.kind == "bars"],
    }
    memory = [f for f in drawn if not any(f in group for group in groups.values())]
    sections = [
        ("result", "What was found", _findings(content)),
        *([("paper", "Beside the paper", _beside(content["paper"]))] if content.get("paper") else []),
        (
            "accuracy",
            "Accuracy at each budget",
            _panels(groups["accuracy"], order) + _table("rows", _row_table(content)),
        ),
        ("tuning", "Tuning and its price", _tuning(content) + _panels(groups["rates"], order)),
        ("steps", "Accuracy by step", _step_words(content) + _panels(groups["steps"], order)),
        ("costs", "Time and memory", _cost_words(content) + _panels(groups["costs"], order)),
        ("memory", "What the memories did", _panels(memory, order) or "<p>No method here has a memory to show.</p>"),
        ("privacy", "Privacy, in plain words", _privacy(content)),
        ("runs", "Every run", _table("runs", _run_table(content)) + _problems(content)),
    ]
    links = "".join(f'<a href="#{key}">{_text(title)}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{_text(title)}</h2>{inner}</section>' for key, title, inner in sections)
    chips = "".join(
        f'<button class="chip c{_style(name, order, 0)[0]}" data-series="{_text(name)}" aria-pressed="true">'
        f"<i></i>{_text(name)}</button>"
        for name in order
    )
    asset = resources.files("vestige") / "data"
    style, script = (asset / "report.css").read_text(), (asset / "report.js").read_text()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{_text(content["title"])}</title><style>{style}</style></head>'
        f"<body><header><h1>{_text(content['title'])}</h1>{_facts(content)}<nav>{links}</nav>"
        f'<div class="chips" role="group" aria-label="methods shown">{chips}</div></header><main>{body}</main>'
        f"<footer>Written by vestige from {len(content['records'])} records. Every figure and table on this page is "
        f"computed from them; nothing is loaded from anywhere.</footer><script>{script}</script></body></html>"
    )


def _facts(content: Content) -> str:
    summary, specification = content["summary"], content["specification"]
    budgets = ", ".join(_budget({"budget": budget}) for budget in specification["budgets"])
    facts = [
        f"{summary['done']} of {summary['total']} runs",
        f"{len(specification['contenders'])} methods",
        ", ".join(_tasks(content)),
        budgets,
        f"{len(specification['seeds'])} seeds",
        f"delta {specification['delta']:g}",
    ]
    return '<p class="facts">' + "".join(f"<span>{_text(fact)}</span>" for fact in facts) + "</p>"


def _findings(content: Content) -> str:
    """The conclusion in words: who can be told apart from the baseline, and who cannot."""
    baseline = content["summary"]["baseline"]
    lines = []
    rows = content["summary"]["rows"]
    for task in _tasks(content):
        for budget in dict.fromkeys(row["budget"] for row in rows if row["task"] == task):
            for rate, words in STAGES.items():
                chosen = [r for r in rows if (r["task"], r["budget"], r["rate"]) == (task, budget, rate)]
                others = [row for row in chosen if row["method"] != baseline and row["mean"] is not None]
                if not chosen:
                    continue
                lines.append(_finding(task, budget, words, others, baseline, chosen))
    note = (
        "<p class='note'>Intervals are Student-t at 95% over seeds. Differences are paired by seed and "
        "corrected by Holm "
        "over all rows of one task and kind of rate. Not distinguishable does not mean equal: it means that these runs "
        "cannot tell.</p>"
    )
    if not lines:
        lines = [f"<li>Nothing can be compared with {_text(baseline)} yet.</li>"]
    return f"<ul class='findings'>{''.join(lines)}</ul>{note}"


def _finding(task: str, budget: str, words: str, others: Sequence[Any], baseline: str, chosen: Sequence[Any]) -> str:
    apart = [row for row in others if row["sentence"].startswith(("better", "worse"))]
    base = next((row for row in chosen if row["method"] == baseline and row["mean"] is not None), None)
    start = f"<b>{_text(task)}, {_text(budget)}, {words}.</b> "
    if base is not None:
        start += f"{_text(baseline)} reaches {base['mean']:.1%}. "
    told = "; ".join(f"{_text(row['method'])} is {_text(row['sentence'].split(' (95')[0])}" for row in apart)
    same = [row["method"] for row in others if row["sentence"].startswith("not distinguishable")]
    rest = ""
    if same:
        verb = "is" if len(same) == 1 else "are"
        rest = f"{_text(', '.join(same))} {verb} not distinguishable from {_text(baseline)}."
    broken = [row["method"] for row in chosen if row["mean"] is None]
    if broken:
        rest += f" Every run of {_text(', '.join(broken))} failed; the table says why."
    return f"<li>{start}{told + '. ' if told else ''}{rest}</li>"


def _beside(paper: Mapping[str, Any]) -> str:
    """What the paper printed and what we found, and what had to be assumed."""
    words = f"<p>{_text(paper['title'])}.</p>"
    if paper["small"]:
        words += "<p><b>Made with --small: too few steps and seeds to compare with the paper.</b></p>"
    rows = [{key.replace("_", " "): value for key, value in row.items()} for row in paper["beside"]]
    table = _table("paper", rows) or "<p>The paper prints no numbers here, only curves.</p>"
    notes = "".join(f"<li>{_text(note)}</li>" for note in paper["notes"])
    return f"{words}{table}<h3>What the paper left unsaid, and what was assumed</h3><ul>{notes}</ul>"


def _panels(drawn: Sequence[Figure], order: Sequence[str]) -> str:
    if not drawn:
        return ""
    return (
        '<div class="panels">'
        + "".join(
            f'<figure id="figure-{figure.key}">{svg(figure, order)}{_numbered(figure)}{_legend(figure, order)}</figure>'
            for figure in drawn
        )
        + "</div>"
    )


def _numbered(figure: Figure) -> str:
    """Bars whose names do not fit are numbered; the names stand below."""
    if figure.kind != "bars":
        return ""
    names = "".join(f"<li>{_text(name)}</li>" for name in figure.categories)
    return f"<figcaption><ol>{names}</ol></figcaption>"


def _legend(figure: Figure, order: Sequence[str]) -> str:
    """Names of the series that are no methods, such as layers; methods are named once, at the top of the page."""
    keys = [
        f'<span class="c{_style(series.name, order, index)[0]}"><i></i>{_text(series.name)}</span>'
        for index, series in enumerate(figure.series)
        if series.name not in order
    ]
    return f'<figcaption class="keys">{"".join(keys)}</figcaption>' if keys else ""


def _tuning(content: Content) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in content["summary"]["price_lines"])
    choices = [
        {
            "task": row["task"],
            "budget": row["budget"],
            "method": row["method"],
            "winning rate": row["lr"] if row["lr"] is not None else f"{row['factor']:g} x auto",
            "other options": ", ".join(f"{key}={value}" for key, value in row["options"].items()) or "-",
            "validation accuracy": row["validation_accuracy"],
            "trials": row["trials"],
            "at the edge of the grid": "yes" if row["at_edge"] else "no",
        }
        for row in content["summary"]["choices"]
    ]
    if not choices:
        return "<p>Nothing was tuned.</p>"
    share = content["specification"]["validation"]
    words = (
        f"<p>Every method had the same number of trials over the same range of rates, judged on {share:.0%} of the "
        "training data held out for it; the test set was not looked at. The tuned rows treat the chosen rate "
        "as public: "
        f"the price of having looked is stated here and is not in their epsilon.</p>"
    )
    return f"{words}<ul>{lines}</ul>" + _table("choices", choices)


def _step_words(content: Content) -> str:
    if content["specification"]["evaluations"]:
        return "<p>Means over the final runs, on the test set; nothing was chosen by these curves.</p>"
    if content["summary"]["choices"]:
        return (
            "<p>The trials that won, on the data held out for tuning: final runs look at the test set once, "
            "at their end.</p>"
        )
    return "<p>No run was watched on its way.</p>"


def _cost_words(content: Content) -> str:
    most = max((record.get("stacked", 1) for record in content["records"]), default=1)
    if most <= 1:
        return "<p>Means over final runs, each alone in its process.</p>"
    return (
        f"<p>Means over final runs. Up to {most} runs were trained together as one stack: a stacked run's time "
        "is its share "
        f"of the stack's, and on a CPU its memory is that of the whole process, so compare only runs made alike.</p>"
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _row_table(content: Content) -> list[dict[str, Any]]:
    return [
        {
            "task": row["task"],
            "budget": row["budget"],
            "rate": row["rate"],
            "method": row["method"],
            "accuracy": row["mean"],
            "in words": row["sentence"],
            "sd": row["sd"],
            "low": row["low"],
            "high": row["high"],
            "seeds": row["count"],
            "failed": len(row["failed"]),
            "epsilon": row["epsilon"],
            "noise multiplier": row["noise_multiplier"],
            "learning rate": row["lr"],
            "difference": row["difference"] if row["method"] != content["summary"]["baseline"] else None,
            "p (Holm)": row["p_holm"] if row["method"] != content["summary"]["baseline"] else None,
            "its runs": " ".join(name[:8] for name in row["runs"]),
        }
        for row in content["summary"]["rows"]
    ]


def _run_table(content: Content) -> list[dict[str, Any]]:
    made = []
    for record in content["records"]:
        run = record["run"]
        made.append(
            {
                "run": record["id"][:8],
                "task": run["task"],
                "method": run["label"],
                "stage": run["stage"],
                "budget": _budget(run),
                "seed": run["seed"],
                "learning rate": record.get("lr"),
                "accuracy": record.get("accuracy"),
                "nonprivate validation accuracy": record.get("nonprivate_validation_accuracy"),
                "epsilon": record.get("epsilon"),
                "noise multiplier": record.get("noise_multiplier"),
                "questions": record.get("asked"),
                "seconds": record.get("seconds"),
                "state": record["status"] if record["status"] == "done" else f"failed: {record['error']}",
            }
        )
    return made


def _table(key: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table that sorts by a click on its head, filters by typing, and downloads as CSV."""
    if not rows:
        return ""
    columns = list(rows[0])
    numeric = {c for c in columns if all(isinstance(row[c], int | float) or row[c] is None for row in rows)}
    head = "".join(
        f'<th scope="col"{" class=n" if column in numeric else ""}><button>{_text(column)}</button></th>'
        for column in columns
    )
    body = "".join("<tr>" + "".join(_td(row[c], c in numeric) for c in columns) + "</tr>" for row in rows)
    return (
        f'<div class="tools"><input type="search" placeholder="filter rows" aria-label="filter rows" '
        f'data-table="table-{key}"><button class="csv" data-table="table-{key}" data-name="{key}.csv">CSV</button>'
        f'<span class="count"></span></div><div class="scroll"><table id="table-{key}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _td(value: Any, numeric: bool) -> str:
    if value is None:
        return "<td data-v=''>-</td>"
    if isinstance(value, float):
        return f'<td class="n" data-v="{value!r}">{value:.4g}</td>'
    kind = " class=n" if numeric else " class=w" if len(str(value)) > 60 else ""
    return f'<td{kind} data-v="{_text(value)}">{_text(value)}</td>'


# --- privacy ---------------------------------------------------------------------------------------------------------


def _privacy(content: Content) -> str:
    """For a reader who answers for the data: what is promised, to whom, on which assumptions, and what is not."""
    done = [record for record in content["records"] if record["status"] == "done"]
    if not done:
        return "<p>No run finished, so nothing is promised.</p>"

    def seen(key: str) -> str:
        return _text(", ".join(dict.fromkeys(str(record.get(key)) for record in done)))

    without = [record for record in done if record["epsilon"] is None]
    facts = [
        (
            "The promise",
            "Whoever sees one finished model, and everything released on the way to it, learns almost the same "
            'about a person\'s example as if that example had not been in the data. Epsilon says how much "almost" '
            "leaves open (0 is nothing; each step of about 1 multiplies what may be inferred by e), delta how "
            "often it may "
            "fail.",
        ),
        ("Neighbouring data", f"{seen('adjacency')}: the promise is for each example's presence or absence."),
        (
            "Unit",
            "One row of the data. A person who contributed several rows is protected less; see the notes of the task.",
        ),
        (
            "Sampler",
            f"{seen('sampling')}: at every step each example joins by its own coin flip, as the theorems assume.",
        ),
        ("Accountant", f"{seen('accountant')}; epsilon is an upper bound, rounded upwards."),
        ("Delta", seen("delta")),
        (
            "Noise",
            f"{seen('noise')}; its keys were drawn from the operating system and never written down."
            if all(record["noise"] == "secret" for record in done)
            else f"{seen('noise')}: some runs drew predictable noise for testing; those protect nobody and have "
            "no epsilon.",
        ),
    ]
    listed = "".join(f"<dt>{_text(term)}</dt><dd>{words}</dd>" for term, words in facts)
    assumptions = dict.fromkeys(line for record in done for line in record.get("assumptions", ()))
    reasons = dict.fromkeys(line for record in without for line in record.get("reasons", ()))
    parts = [f"<dl>{listed}</dl><h3>It rests on these assumptions</h3><ul>"]
    parts += [f"<li>{_text(line)}</li>" for line in assumptions]
    parts.append("</ul><h3>What was charged</h3>" + _table("charged", _charged(done)))
    parts.append(
        "<h3>What is not private, or not covered</h3><ul>"
        + "".join(f"<li>{line}</li>" for line in _limits(content, done))
    )
    if without:
        words = "; ".join(_text(reason) for reason in reasons) or "no theorem covers them"
        parts.append(f"<li><b>{len(without)} runs have no epsilon at all:</b> {words}.</li>")
    return "".join(parts) + "</ul>"


def _charged(done: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for record in done:
        run = record["run"]
        asked = "; ".join(
            f"{row['count']} x {row['kind']} ("
            + ", ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
                if k not in ("kind", "count")
            )
            + ")"
            for row in record["charged"]
        )
        key = f"{run['task']}|{_budget(run)}|{run['label']}|{asked}"
        row = kinds.setdefault(
            key,
            {
                "task": run["task"],
                "method": run["label"],
                "budget": _budget(run),
                "questions asked of the data in one run": asked,
                "epsilon": record["epsilon"],
                "runs": 0,
            },
        )
        row["runs"] += 1
    return list(kinds.values())


def _limits(content: Content, done: Sequence[Mapping[str, Any]]) -> list[str]:
    tuned = [record for record in done if record["run"]["stage"] == "tuning"]
    lines = [
        f"Each epsilon is that of <b>one</b> run released alone. This page shows {len(done)} runs on the same data: "
        "publishing several of them, or this page itself where the data are private, costs more than any one "
        "row says.",
        "Test accuracies are computed without noise on the test set, which is taken to be public.",
    ]
    if tuned:
        lines.append(
            "Validation accuracies come from held-out training data without noise, and the tuned rates were chosen by "
            "them: that choice is not in the epsilon of the tuned rows (see the price of tuning). The "
            "automatic rate uses "
            "public numbers only."
        )
    watched = content["specification"]["evaluations"]
    if watched:
        lines.append(
            f"The test set was looked at {watched} times during each final run, for the curves; nothing was "
            "chosen by it."
        )
    else:
        lines.append("The test set was touched once per final run, at its end.")
    lines.append("Model structure, number of steps, sampling rate, expected batch size and clipping bound are public.")
    return lines


def _problems(content: Content) -> str:
    failed, torn = content["summary"]["failed"], content["summary"]["unreadable"]
    parts = []
    if failed:
        parts.append(f"<h3>{len(failed)} runs failed</h3>" + _table("failed", failed))
    if torn:
        rows = [{"file": name, "why it was left out": why} for name, why in torn.items()]
        parts.append("<h3>Records that could not be read</h3>" + _table("torn", rows))
    return "".join(parts)


# --- files for papers ------------------------------------------------------------------------------------------------


def export(content: Content, folder: Path) -> list[str]:
    """Every figure as SVG and, where matplotlib is installed, as PNG; what was written, line by line."""
    folder.mkdir(parents=True, exist_ok=True)
    order, drawn = _names(content), figures(content)
    for figure in drawn:
        (folder / f"{figure.key}.svg").write_text(svg(figure, order, standalone=True), encoding="utf-8")
    lines = [f"wrote {len(drawn)} figures to {folder} as SVG"]
    try:
        import matplotlib
    except ImportError:
        return [*lines, "no PNG: matplotlib is missing; pip install 'vestige[report]'"]
    matplotlib.use("Agg")
    for figure in drawn:
        _png(figure, order, folder / f"{figure.key}.png")
    return [*lines, f"wrote {len(drawn)} figures to {folder} as PNG"]


def _png(figure: Figure, order: Sequence[str], path: Path) -> None:
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=200)
    count = len(figure.series)
    for index, series in enumerate(figure.series):
        colour, dash = _style(series.name, order, index)
        xs, ys = [p[0] for p in series.points], [p[1] for p in series.points]
        paint: dict[str, Any] = {"color": COLOURS[colour], "label": series.name}
        if figure.kind == "bars":
            axes.bar(xs, ys, **paint)
        elif figure.kind == "dots":
            shift = 0.7 * ((index + 0.5) / count - 0.5)
            spread = [
                [p[1] - p[2] if p[2] is not None else 0.0 for p in series.points],
                [p[3] - p[1] if p[3] is not None else 0.0 for p in series.points],
            ]
            axes.errorbar([x + shift for x in xs], ys, yerr=spread, fmt="o", markersize=4, capsize=2, **paint)
        else:
            axes.plot(xs, ys, linestyle="--" if dash else "-", linewidth=1.5, **paint)
    if figure.categories:
        axes.set_xticks(range(len(figure.categories)), figure.categories, rotation=30 if figure.kind == "bars" else 0)
    if figure.log_x:
        axes.set_xscale("log")
    axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
    if figure.kind != "bars":
        axes.legend(fontsize=6)
    canvas.tight_layout()
    canvas.savefig(path)
    pyplot.close(canvas)
