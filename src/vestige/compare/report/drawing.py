"""How is a figure drawn? As SVG by our own code, without a library, or as PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING

from vestige.compare.report.html import text
from vestige.compare.report.series_looks import KEY, Look, line, look_of, mark, outline, sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float, float | None, float | None]
"""x, y, and the ends of the interval around y."""

WIDTH, HEIGHT = 560, 350
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
ROW, NAMES = 17, 172
"""Height of a row (in a legend too), and width of its name in a figure of rows."""
FEW, SOME = 12, 8
"""A line of up to FEW points has a mark with its value at each; a longer one has about SOME marks, to be told apart."""


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    hollow: bool = False


@dataclass(frozen=True)
class Figure:
    """A panel of lines, dots or rows; `names` decides each series' colour, the same in every figure.

    In a figure of rows, each series is one point with its interval along x, on a line of its own.
    """

    key: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    kind: str = "line"
    log_x: bool = False
    categories: tuple[str, ...] = ()
    """The labels of x = 0, 1, 2, ... where x is categorical."""
    percent: bool = False


def svg(figure: Figure, order: Sequence[str], standalone: bool = False) -> str:
    """The figure as SVG: for the page, whose style has the colours, or for a file, with plain colours and a legend."""
    looks = [look_of(series.name, order, index, standalone) for index, series in enumerate(figure.series)]
    height, parts = _lying(figure, looks) if figure.kind == "rows" else (HEIGHT, _upright(figure, looks))
    if standalone and figure.kind != "rows":
        height, legend = _legend(figure, looks)
        parts += legend
    alone = (
        f' width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12" fill="#222">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(figure.title)}"{alone if standalone else ">"}{"".join(parts)}</svg>'
    )


def _legend(figure: Figure, looks: Sequence[Look]) -> tuple[int, list[str]]:
    """The names of all series, in columns below the plot, and the height of the figure with them."""
    wide = KEY[0] + 14 + 6.2 * max(len(series.name) for series in figure.series)
    columns = max(1, int((WIDTH - 2 * RIGHT) / wide))
    parts = []
    for index, (series, look) in enumerate(zip(figure.series, looks, strict=True)):
        x, y = RIGHT + wide * (index % columns), HEIGHT + ROW * (index // columns + 0.5)
        words = f'<text x="{x + KEY[0] + 4:.1f}" y="{y + 4:.1f}" font-size="11">{text(series.name)}</text>'
        parts.append(sample(look, x, y, figure.kind == "line") + words)
    return HEIGHT + ROW * -(-len(looks) // columns) + RIGHT, parts


def _upright(figure: Figure, looks: Sequence[Look]) -> list[str]:
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
    for index, (series, look) in enumerate(zip(figure.series, looks, strict=True)):
        parts.append(_group(series.name, look, "".join(_MARKS[figure.kind](figure, index, axes, look))))
    return parts


def _group(name: str, look: Look, marks: str) -> str:
    return f'<g class="s c{look.colour}" data-series="{text(name)}">{marks}</g>'


def _lying(figure: Figure, looks: Sequence[Look]) -> tuple[int, list[str]]:
    """Names on the left, intervals beside them, and a line at zero where the axis has one."""
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

    parts = [_title(figure, RIGHT)]
    for tick in ticks:
        x = place(tick)
        parts.append(_rule("axis" if tick == 0 else "grid", x, x, TOP, base))
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{_number(tick, figure.percent)}</text>')
    middle = (NAMES + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{base + 34}" text-anchor="middle">{text(figure.x)}</text>')
    for index, (series, look) in enumerate(zip(figure.series, looks, strict=True)):
        y, marks = TOP + ROW * (index + 0.5), ""
        for _, value, start, stop in series.points:
            if start is not None and stop is not None:
                marks += _bar(look, f"M{place(start):.1f} {y:.1f}H{place(stop):.1f}")
            words = _interval(figure, series.name, value, start, stop)
            marks += mark(look, place(value), y, 4, words, series.hollow)
        name = f'<text x="{NAMES - 10}" y="{y + 4:.1f}" text-anchor="end">{text(series.name)}</text>'
        parts.append(_group(series.name, look, name + marks))
    return base + BOTTOM, parts


def _interval(figure: Figure, name: str, value: float, low: float | None, high: float | None) -> str:
    words = f"{name}: {_number(value, figure.percent)}"
    if low is None or high is None:
        return words
    return f"{words} ({_number(low, figure.percent)} to {_number(high, figure.percent)})"


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


def _title(figure: Figure, x: float) -> str:
    return f'<text class="title" font-weight="600" font-size="13" x="{x}" y="18">{text(figure.title)}</text>'


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    """A line of the grid or an axis; on the page, its style sheet overrides the colour that a file needs."""
    colour = {"grid": "#e4e4e4", "axis": "#999"}[kind]
    return f'<line class="{kind}" stroke="{colour}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _frame(figure: Figure, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]) -> str:
    base = HEIGHT - BOTTOM
    parts = [_title(figure, LEFT)]
    for y, label in y_ticks:
        parts.append(_rule("grid", LEFT, WIDTH - RIGHT, y, y))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    crowded = len(x_ticks) * max((len(label) for _, label in x_ticks), default=0) * 7 > WIDTH - LEFT - RIGHT
    for index, (x, label) in enumerate(x_ticks):
        if not crowded or index % 2 == 0:
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{text(label)}</text>')
    parts.append(_rule("axis", LEFT, WIDTH - RIGHT, base, base))
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


def _bar(look: Look, path: str) -> str:
    """An interval, which is never dashed."""
    return line(replace(look, dash=""), path, 1.6)


def _dots(figure: Figure, index: int, axes: _Axes, look: Look) -> Iterator[str]:
    series = figure.series[index]
    width = 0.72 * (WIDTH - LEFT - RIGHT) / max(1, len(figure.categories))
    shift = width * ((index + 0.5) / len(figure.series) - 0.5)
    for x, y, low, high in series.points:
        px = axes.x(x) + shift
        if low is not None and high is not None:
            ends = f"M{px - 3:.1f} {axes.y(low):.1f}h6M{px - 3:.1f} {axes.y(high):.1f}h6"
            yield _bar(look, f"M{px:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}{ends}")
        yield mark(look, px, axes.y(y), 4, _interval(figure, series.name, y, low, high))


def _line(figure: Figure, index: int, axes: _Axes, look: Look) -> Iterator[str]:
    series = figure.series[index]
    places = [(axes.x(x), axes.y(y), y) for x, y, _, _ in series.points if isfinite(y)]
    if not places:
        return
    yield line(look, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places), 1.9, series.name)
    if len(places) <= FEW:
        for x, y, value in places:
            yield mark(look, x, y, 3, f"{series.name}: {_number(value, figure.percent)}")
    else:
        shapes = "".join(outline(look, x, y, 3) for x, y, _ in places[_marked(index, len(places))])
        yield f'<path d="{shapes}" style="fill:{look.ink}"/>'


def _marked(index: int, count: int) -> slice:
    """Which points of a line have a mark: where possible, other ones than in the neighbouring series."""
    step = -(-count // SOME) if count > FEW else 1
    return slice(index % step, None, step)


_MARKS = {"dots": _dots, "line": _line}
INCHES, LETTER = 6.4, 0.05
"""Width of a PNG and of a letter of its legend."""


def png(figure: Figure, order: Sequence[str], path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    count, rows = len(figure.series), figure.kind == "rows"
    columns = max(1, int(INCHES / (0.55 + LETTER * max(len(series.name) for series in figure.series))))
    below = 0.0 if rows else 0.13 * -(-count // columns)
    size = (INCHES, max(4.0, 1.0 + 0.13 * count) if rows else 4.0 + below)
    canvas, axes = pyplot.subplots(figsize=size, dpi=200, layout="constrained")
    for index, series in enumerate(figure.series):
        _PNG_MARKS[figure.kind](axes, figure, index, look_of(series.name, order, index, literal=True))
    if rows:
        axes.set_yticks(range(count), [series.name for series in figure.series], fontsize=6)
        axes.invert_yaxis()
        if not figure.log_x:
            axes.axvline(0.0, color="#999", linewidth=0.8, zorder=0)
    elif figure.categories:
        axes.set_xticks(range(len(figure.categories)), figure.categories)
    if figure.log_x:
        axes.set_xscale("log")
    if figure.percent:
        (axes.xaxis if rows else axes.yaxis).set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel=figure.x, ylabel=figure.y)
    canvas.suptitle(figure.title, fontsize=10)
    if not rows:
        canvas.legend(loc="outside lower center", ncols=columns, fontsize=6, handlelength=4, frameon=False)
    canvas.savefig(path)
    pyplot.close(canvas)


def _png_row(axes: Axes, figure: Figure, index: int, look: Look) -> None:
    series = figure.series[index]
    for _, value, low, high in series.points:
        ends = [[value - low], [high - value]] if low is not None and high is not None else None
        inside = look.paper if series.hollow else look.ink
        axes.errorbar([value], [index], xerr=ends, fmt=look.shape, markersize=4, color=look.ink, markerfacecolor=inside)


def _png_dots(axes: Axes, figure: Figure, index: int, look: Look) -> None:
    points = figure.series[index].points
    shift = 0.7 * ((index + 0.5) / len(figure.series) - 0.5)
    spread = [
        [y - low if low is not None else 0.0 for _, y, low, _ in points],
        [high - y if high is not None else 0.0 for _, y, _, high in points],
    ]
    xs, ys = [p[0] + shift for p in points], [p[1] for p in points]
    name = figure.series[index].name
    axes.errorbar(xs, ys, yerr=spread, fmt=look.shape, markersize=4, capsize=2, color=look.ink, label=name)


def _png_line(axes: Axes, figure: Figure, index: int, look: Look) -> None:
    series = figure.series[index]
    marked = _marked(index, len(series.points))
    axes.plot(
        [p[0] for p in series.points],
        [p[1] for p in series.points],
        color=look.ink,
        label=series.name,
        linestyle=(0, [float(part) / 2 for part in look.dash.split()]) if look.dash else "-",
        linewidth=1.5,
        marker=look.shape,
        markersize=3.5,
        markevery=(marked.start, marked.step),
    )


_PNG_MARKS = {"dots": _png_dots, "line": _png_line, "rows": _png_row}
