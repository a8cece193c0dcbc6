"""Which ways may a model go by what it is given? It may look at a mask, and go another where nothing is hidden.

Made-up whole numbers are zeros and ones, others lie between. Here they are varied: all ones, all zeros, one or the
other in every place, bytes as large as they can be. What a pass runs tells whether that is another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOGETHER = 4
"""So many inputs of whole numbers are varied in every combination; more only one by one and all at once."""
NUMBERS = frozenset({bool, int, float, str})
"""Kinds of plain values, names among them."""

Vary = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Way(TorchDispatchMode):
    """Keeps in `steps` which operations are run, and with which plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        self.steps.append((function, *map(_plain, args), *map(_plain, named.values())))
        return function(*args, **named)


def _plain(given: Any) -> Any:
    """An argument, if it is plain, or what is plain in a list."""
    if type(given) in NUMBERS:
        return given
    return [each for each in given if type(each) in NUMBERS] if isinstance(given, list | tuple) else None


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "either": torch.round,
    "bytes": lambda part: part * 255,
}


def variations(rows: Sequence[Tensor]) -> Iterator[Vary]:
    """Ways to vary rows like these."""
    whole = [place for place, part in enumerate(rows) if not part.is_floating_point()]
    single = [((place,), value) for place in whole for value in ("ones", "zeros")]
    single += [((place,), "bytes") for place in whole if rows[place].dtype == torch.uint8]
    others = [place for place in range(len(rows)) if place not in whole]
    single += [((place,), value) for place in others for value in ("ones", "zeros", "either", "bytes")]
    sizes = range(2, len(whole) + 1) if len(whole) <= TOGETHER else range(len(whole), len(whole) + 1)
    several = chain.from_iterable(combinations(whole, size) for size in sizes)
    for places, value in (*single, *((places, value) for places in several for value in ("ones", "zeros"))):
        yield partial(_varied, places, VALUES[value])


def _varied(places: Sequence[int], value: Callable[[Tensor], Tensor], rows: Sequence[Tensor]) -> Sequence[Tensor]:
    return [value(part) if place in places else part for place, part in enumerate(rows)]
