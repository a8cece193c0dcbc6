"""What does a series look like? The same colour, shape and dash in every figure, on the page and in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vestige.compare.report.html import text

COLOURS = ("#3a3a3a", "#1f6fb4", "#d1601f", "#2b8a4b", "#a83a8f", "#b8860b", "#0b8a94", "#c2334d", "#6a55b8", "#7a5230")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "13 3")
SHAPES = ("o", "s", "D", "^", "v")
"""Circle, square, diamond and two triangles, by matplotlib's names; ten series in a row share one."""
KEY = (30, 12)
"""Width and height of a series' key: a piece of its line with one mark on it."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn; `ink` and `paper` are CSS variables on the page, and plain colours in a file."""

    colour: int
    shape: str
    dash: str
    ink: str
    paper: str


def look_of(name: str, order: Sequence[str], index: int = 0, literal: bool = False) -> Look:
    """By the method's place in the order, so that it looks the same everywhere; other series come after all methods."""
    turn, colour = divmod(order.index(name) if name in order else len(order) + index, len(COLOURS))
    ink, paper = (COLOURS[colour], "#fff") if literal else ("var(--c)", "var(--paper,#fff)")
    return Look(colour, SHAPES[turn % len(SHAPES)], DASHES[turn % len(DASHES)], ink, paper)


def mark(look: Look, x: float, y: float, radius: float, words: str, hollow: bool = False) -> str:
    """One point, with a tooltip."""
    paint = f"fill:{look.paper};stroke:{look.ink};stroke-width:1.8" if hollow else f"fill:{look.ink}"
    if look.shape == "o":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" style="{paint}"><title>{text(words)}</title></circle>'
    return f'<path d="{outline(look, x, y, radius)}" style="{paint}"><title>{text(words)}</title></path>'


def outline(look: Look, x: float, y: float, radius: float) -> str:
    """The shape as SVG path data; all shapes have about the same area."""
    r = radius
    if look.shape == "o":
        return f"M{x - r:.1f} {y:.1f}a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0z"
    if look.shape == "s":
        return f"M{x - 0.9 * r:.1f} {y - 0.9 * r:.1f}h{1.8 * r:g}v{1.8 * r:g}h{-1.8 * r:g}z"
    if look.shape == "D":
        d = 1.25 * r
        return f"M{x:.1f} {y - d:.1f}l{d:g} {d:g} {-d:g} {d:g} {-d:g} {-d:g}z"
    down = 1 if look.shape == "^" else -1
    return f"M{x:.1f} {y - 1.25 * down * r:.1f}l{1.2 * r:g} {2.1 * down * r:g}h{-2.4 * r:g}z"


def line(look: Look, path: str, width: float, words: str = "") -> str:
    dashes = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    end = f"><title>{text(words)}</title></path>" if words else "/>"
    return f'<path d="{path}" style="stroke:{look.ink};fill:none" stroke-width="{width:g}"{dashes}{end}'


def sample(look: Look, x: float, y: float, lined: bool = True) -> str:
    """A mark, on a piece of the series' line if it has one, starting at x."""
    piece = line(look, f"M{x:.1f} {y:.1f}h{KEY[0]}", 1.9) if lined else ""
    return f'{piece}<path d="{outline(look, x + KEY[0] / 2, y, 4)}" style="fill:{look.ink}"/>'


def key(look: Look) -> str:
    """The sample as an image of its own, beside a name on the page."""
    width, height = KEY
    return f'<svg class="key" viewBox="0 0 {width} {height}" aria-hidden="true">{sample(look, 0, height / 2)}</svg>'
