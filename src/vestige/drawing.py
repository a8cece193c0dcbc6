"""How is a figure drawn? As SVG by hand, which needs nothing, or as PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

from vestige.markup import text

Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of the interval around y."""

COLOURS = ("#3a3a3a", "#1f6fb4", "#d1601f", "#2b8a4b", "#a83a8f", "#b8860b", "#0b8a94", "#c2334d", "#6a55b8", "#7a5230")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
PAINT = "stroke:var(--c);fill:none"
WIDTH, HEIGHT = 560, 350
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46


ROW, NAMES = 17, 172
"""Height of a row and width of its name, in a figure of rows."""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    hollow: bool = False


@dataclass(frozen=True)
class Figure:
    """A panel of lines, dots or rows; `names` decides each series' colour, the same in every figure.

    Rows lie on their side: each series has one point, its interval along x, and stands on a line of its own.
    """

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


def svg(figure: Figure, order: Sequence[str], standalone: bool = False) -> str:
    """The figure as SVG: colours come from the page's style, or are written in for a file of its own."""
    height, parts = _lying(figure, order) if figure.kind == "rows" else (HEIGHT, _upright(figure, order))
    colours = "".join(f".c{i}{{--c:{colour}}}" for i, colour in enumerate(COLOURS))
    style = (
        f"<style>text{{font:12px sans-serif;fill:#222}}.axis{{stroke:#999}}.grid{{stroke:#e4e4e4}}"
        f".title{{font-weight:600;font-size:13px}}{colours}</style>"
        if standalone
        else ""
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>' if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(figure.title)}">{style}{ground}{"".join(parts)}</svg>'
    )


def _upright(figure: Figure, order: Sequence[str]) -> list[str]:
    values = [v for s in figure.series for p in s.points for v in (p[1], p[2], p[3]) if v is not None and isfinite(v)]
    xs = [p[0] for s in figure.series for p in s.points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    y_ticks = _ticks(low, high)
    scale_x, x_ticks = _x_axis(figure, xs)
    bottom, top = min(low, y_ticks[0]), max(high, y_ticks[-1])

    def scale_y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (top - value) / ((top - bottom) or 1.0)

    axes = _Axes(scale_x, scale_y, bottom)
    parts = [_frame(figure, x_ticks, [(scale_y(t), _number(t, figure.percent)) for t in y_ticks])]
    for index, series in enumerate(figure.series):
        colour, dash = style_of(series.name, order, index)
        marks = "".join(_MARKS[figure.kind](figure, index, axes, dash))
        parts.append(_group(series.name, colour, marks))
    return parts


def _group(name: str, colour: int, marks: str) -> str:
    return f'<g class="s c{colour}" data-series="{text(name)}">{marks}</g>'


def _lying(figure: Figure, order: Sequence[str]) -> tuple[int, list[str]]:
    """Names on the left, intervals beside them, a line at zero where zero has a place."""
    ends = [v for s in figure.series for p in s.points for v in p[1:] if v is not None and isfinite(v)]
    if figure.log_x:
        ticks = [10.0**power for power in range(floor(log10(min(ends))), ceil(log10(max(ends))) + 1)]
    else:
        ticks = _ticks(min([0.0, *ends]), max([0.0, *ends]))
    at: Callable[[float], float] = log10 if figure.log_x else float
    low, high = at(min([*ends, ticks[0]])), at(max([*ends, ticks[-1]]))
    base = TOP + ROW * len(figure.series)

    def place(value: float) -> float:
        return NAMES + (WIDTH - RIGHT - 8 - NAMES) * (at(value) - low) / ((high - low) or 1.0)

    parts = [f'<text class="title" x="{RIGHT}" y="18">{text(figure.title)}</text>']
    for tick in ticks:
        x, mark = place(tick), "axis" if tick == 0 else "grid"
        parts.append(f'<line class="{mark}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_number(tick, figure.percent)}</text>')
    middle = (NAMES + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{base + 34}" text-anchor="middle">{text(figure.x)}</text>')
    for index, series in enumerate(figure.series):
        y, marks = TOP + ROW * (index + 0.5), ""
        for _, value, start, stop in series.points:
            if start is not None and stop is not None:
                line = f"M{place(start):.1f} {y:.1f}H{place(stop):.1f}"
                marks += f'<path d="{line}" style="{PAINT}" stroke-width="1.8"/>'
            marks += _circle(place(value), y, 4, _interval(figure, series.name, value, start, stop), series.hollow)
        name = f'<text x="{NAMES - 10}" y="{y + 4:.1f}" text-anchor="end">{text(series.name)}</text>'
        parts.append(_group(series.name, style_of(series.name, order, index)[0], name + marks))
    return base + BOTTOM, parts


def _interval(figure: Figure, name: str, value: float, low: float | None, high: float | None) -> str:
    words = f"{name}: {_number(value, figure.percent)}"
    if low is None or high is None:
        return words
    return f"{words} ({_number(low, figure.percent)} to {_number(high, figure.percent)})"


def style_of(name: str, order: Sequence[str], index: int) -> tuple[int, str]:
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
    parts = [f'<text class="title" x="{LEFT}" y="18">{text(figure.title)}</text>']
    for y, label in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    crowded = len(x_ticks) * max((len(label) for _, label in x_ticks), default=0) * 7 > WIDTH - LEFT - RIGHT
    for index, (x, label) in enumerate(x_ticks):
        if not crowded or index % 2 == 0:
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{text(label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{text(figure.x)}</text>')
    y = (TOP + base) / 2
    parts.append(f'<text transform="translate(14 {y:.0f}) rotate(-90)" text-anchor="middle">{text(figure.y)}</text>')
    return "".join(parts)


@dataclass(frozen=True)
class _Axes:
    x: Callable[[float], float]
    y: Callable[[float], float]
    bottom: float


def _dots(figure: Figure, index: int, axes: _Axes, dash: str) -> Iterator[str]:
    series = figure.series[index]
    room = 0.72 * (WIDTH - LEFT - RIGHT) / max(1, len(figure.categories))
    shift = room * ((index + 0.5) / len(figure.series) - 0.5)
    for x, y, low, high in series.points:
        px = axes.x(x) + shift
        if low is not None and high is not None:
            yield (
                f'<path d="M{px:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}M{px - 3:.1f} {axes.y(low):.1f}h6'
                f'M{px - 3:.1f} {axes.y(high):.1f}h6" style="{PAINT}" stroke-width="1.6"/>'
            )
        yield _circle(px, axes.y(y), 4, _interval(figure, series.name, y, low, high))


def _line(figure: Figure, index: int, axes: _Axes, dash: str) -> Iterator[str]:
    series = figure.series[index]
    path = "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y, _, _ in series.points if isfinite(y))
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    yield f'<path d="M{path}" style="{PAINT}" stroke-width="1.9"{dashes}><title>{text(series.name)}</title></path>'
    if len(series.points) <= 12:
        for x, y, _, _ in series.points:
            yield _circle(axes.x(x), axes.y(y), 3, f"{series.name}: {_number(y, figure.percent)}")


def _circle(x: float, y: float, radius: int, words: str, hollow: bool = False) -> str:
    paint = "fill:var(--paper,#fff);stroke:var(--c);stroke-width:1.8" if hollow else "fill:var(--c)"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="{paint}"><title>{text(words)}</title></circle>'


_MARKS = {"dots": _dots, "line": _line}


def png(figure: Figure, order: Sequence[str], path: Path) -> None:
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=200)
    count = len(figure.series)
    for index, series in enumerate(figure.series):
        colour, dash = style_of(series.name, order, index)
        xs, ys = [p[0] for p in series.points], [p[1] for p in series.points]
        paint: dict[str, Any] = {"color": COLOURS[colour], "label": series.name}
        if figure.kind == "rows":
            _png_row(axes, index, series, COLOURS[colour])
        elif figure.kind == "dots":
            shift = 0.7 * ((index + 0.5) / count - 0.5)
            spread = [
                [p[1] - p[2] if p[2] is not None else 0.0 for p in series.points],
                [p[3] - p[1] if p[3] is not None else 0.0 for p in series.points],
            ]
            axes.errorbar([x + shift for x in xs], ys, yerr=spread, fmt="o", markersize=4, capsize=2, **paint)
        else:
            axes.plot(xs, ys, linestyle="--" if dash else "-", linewidth=1.5, **paint)
    if figure.kind == "rows":
        axes.set_yticks(range(count), [series.name for series in figure.series], fontsize=6)
        axes.invert_yaxis()
        if not figure.log_x:
            axes.axvline(0.0, color="#999", linewidth=0.8, zorder=0)
    elif figure.categories:
        axes.set_xticks(range(len(figure.categories)), figure.categories)
    if figure.log_x:
        axes.set_xscale("log")
    axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
    if figure.kind != "rows":
        axes.legend(fontsize=6)
    canvas.tight_layout()
    canvas.savefig(path)
    pyplot.close(canvas)


def _png_row(axes: Any, index: int, series: Series, colour: str) -> None:
    for _, value, low, high in series.points:
        ends = [[value - low], [high - value]] if low is not None and high is not None else None
        inside = "white" if series.hollow else colour
        axes.errorbar([value], [index], xerr=ends, fmt="o", markersize=4, color=colour, markerfacecolor=inside)
