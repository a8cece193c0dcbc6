"""Does an example's gradient move with the examples beside it? What runs on the way back alone may look at them: a
backward pass of somebody's own, hooks, activations that are recomputed or kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.engines.rehearsal.calm import Calm

Rows = Sequence[Tensor]
Gradients = Callable[[Rows, Tensor, int], Mapping[str, Tensor]]
"""Of a batch and of what comes back to its outputs: the gradients of the example in this place, by parameter."""
Pair = tuple[float, float]


@dataclass(frozen=True)
class Company:
    """What stands before and behind an example: other examples, and what comes back to them, so many times."""

    inputs: Pair = (1.0, 1.0)
    signals: Pair = (1.0, 1.0)

    def beside(self, part: Tensor, other: Tensor) -> Tensor:
        """The middle of three rows between the first and the last of another three."""
        found = torch.stack([other[0], part[1], other[2]])
        return _times(found, self.inputs) if part.is_floating_point() else found

    def coming(self, signals: Tensor) -> Tensor:
        return _times(signals.clone(), self.signals)


HUGE, MISSING = (-1e3, 1e3), (torch.inf, torch.nan)
COMPANIES = (
    Company(),
    Company(inputs=HUGE),
    Company(inputs=(1e30, -1e30)),
    Company(inputs=MISSING),
    Company(signals=HUGE),
    Company(signals=MISSING),
)


@dataclass(frozen=True)
class Moved:
    """A parameter whose gradient moves with others, if one does, and whether all of them do so slightly."""

    name: str | None
    slight: bool


def moved(
    gradients: Gradients,
    three: Rows,
    others: Sequence[Rows],
    signals: Tensor,
    draws_on_the_host: bool,
    tolerance: float,
    kinks: float,
) -> Moved:
    """Whether the middle example's gradients move with what is beside it, how many that are, and in which place; by
    `others` for each company, or for the first alone."""
    slightly: str | None = None
    for now, alone in _pairs(gradients, three, others, signals, draws_on_the_host, kinks):
        for name, off, size in _differences(now, alone):
            if not off <= kinks * size:
                return Moved(name, slight=False)
            if not off <= tolerance * size:
                slightly = slightly or name
    return Moved(slightly, slight=True)


def _differences(now: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """How far each parameter's gradient is from what it was, and how large that was; next to nothing counts as some."""
    sizes = {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in alone.items()}
    least = 1e-3 * max(sizes.values(), default=0.0)
    for name in dict.fromkeys((*alone, *now)):  # a parameter that has no gradient has one of zeros
        there = [each[name] for each in (now, alone) if name in each]
        off = float(torch.linalg.vector_norm(there[0] - there[1] if len(there) == 2 else there[0]))
        yield name, off, sizes.get(name, 0.0) + least


def _pairs(
    gradients: Gradients, three: Rows, others: Sequence[Rows], signals: Tensor, draws_on_the_host: bool, kinks: float
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """The middle example's gradients in some company, and as they are in the first."""
    alone = gradients(three, signals, 1)
    scaled = any(part.is_floating_point() for part in three)
    for company, other in zip(COMPANIES[: len(others)], others, strict=True):
        if scaled or company.inputs == (1.0, 1.0):
            rows = [company.beside(part, another) for part, another in zip(three, other, strict=True)]
            try:
                now = gradients(rows, company.coming(signals), 1)
            except Exception:
                continue  # a model may refuse such numbers
            yield now, alone
    if len(others) < len(COMPANIES):
        return
    with Calm():
        calm, again = gradients(three, signals, 1), gradients(three, signals, 1)
        if all(off <= kinks * size for _, off, size in _differences(again, calm)):  # chance has no say indeed
            yield _otherwise(gradients, three, others[0], signals, lambda part: part[:2], 1), calm
            if not draws_on_the_host:
                yield _otherwise(gradients, three, others[0], signals, lambda part: part.roll(1, 0), 2), calm


def _otherwise(
    gradients: Gradients, three: Rows, other: Rows, signals: Tensor, arranged: Callable[[Tensor], Tensor], place: int
) -> Mapping[str, Tensor]:
    """The middle example's gradients where the rows are arranged otherwise and it comes to lie in this place; beside
    huge ones, if the model takes them."""
    huge = Company(inputs=HUGE, signals=(-1.0, -1.0))
    rows = [arranged(huge.beside(part, another)) for part, another in zip(three, other, strict=True)]
    try:
        return gradients(rows, arranged(huge.coming(signals)), place)
    except Exception:
        return gradients([arranged(part) for part in three], arranged(signals), place)


def _times(rows: Tensor, pair: Pair) -> Tensor:
    for place, factor in zip((0, 2), pair, strict=True):
        rows[place] *= factor
    return rows
