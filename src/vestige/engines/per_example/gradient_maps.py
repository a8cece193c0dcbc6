"""What does a linear map of a gradient make of each example's part? In factored form, where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from vestige.engines.per_example.filter_maps import FilterMap
from vestige.engines.per_example.gradient_forms import (
    Deferred,
    Dense,
    Gradient,
    Lookup,
    Outer,
    Patches,
    Place,
    Within,
    contiguous_strides,
    examples_of,
    wide,
)

LARGEST = 1 << 26
"""Numbers that a piece of work may hold, where parts must be materialised."""


def reshaped(gradient: Gradient, before: Sequence[int], after: Sequence[int]) -> Gradient:
    """The same numbers in their order, as another shape."""
    before, after = tuple(before), tuple(after)
    if before == after:
        return gradient
    if isinstance(gradient, Dense):
        return Dense(gradient.value.reshape(len(gradient.value), *after))
    if isinstance(gradient, FilterMap):
        return replace(gradient, shape=after)
    if not isinstance(gradient, Within):
        return Within(gradient, whole(before), after)
    return gradient.of if gradient.place == whole(after) else replace(gradient, shape=after)


def whole(shape: Sequence[int]) -> Place:
    return Place(tuple(shape), contiguous_strides(shape))


def rearranged(gradient: Gradient, before: Sequence[int], order: Sequence[int]) -> Gradient:
    """With its axes in another order."""
    if list(order) == sorted(order):
        return gradient
    if isinstance(gradient, Outer):
        return Outer(gradient.right, gradient.left)
    back = partial(torch.permute, dims=(0, *(1 + axis for axis in order)))
    if isinstance(gradient, Dense):
        return Dense(back(gradient.value))
    within = gradient if isinstance(gradient, Within) else Within(gradient, whole(before), tuple(before))
    place, after = _rearranged_place(within.place, before, order), tuple(before[axis] for axis in order)
    if place is None or isinstance(gradient, FilterMap):
        return carried(gradient, back, prod(before), 0)
    return within.of if place == whole(after) else Within(within.of, place, after)


def _rearranged_place(place: Place, before: Sequence[int], order: Sequence[int]) -> Place | None:
    """The place of a factored form after its axes were permuted; None unless it covers all numbers."""
    if prod(place.size) != prod(before) or not place.contiguous or place.offset:
        return None
    base = torch.empty([before[axis] for axis in order], device="meta")
    back = base.permute([list(order).index(axis) for axis in range(len(order))])
    try:
        return Place.of_view(back.view(place.size), base)
    except RuntimeError:
        return None


def placed(gradient: Gradient, region: Place, after: Sequence[int]) -> Gradient:
    """The gradient of a part of something, as one of all of it."""
    if region == whole(after):
        return gradient
    if isinstance(gradient, Within) and region.contiguous:
        inner = replace(gradient.place, offset=gradient.place.offset + region.offset)
        return Within(gradient.of, inner, tuple(after))
    if not region.contiguous and _has_places(gradient):  # which are those of contiguous memory
        gradient = Dense(wide(gradient.dense()))
    return Within(gradient, region, tuple(after))


def _has_places(gradient: Gradient) -> bool:
    """Whether it, or a part of it, is of some numbers only."""
    held = (getattr(gradient, field.name) for field in fields(gradient))  # type: ignore[arg-type]
    inside = (each for value in held for each in (value if isinstance(value, tuple) else (value,)))
    return isinstance(gradient, Within) or any(_has_places(each) for each in inside if hasattr(each, "norms"))


def times(gradient: Gradient, factor: float | Tensor) -> Gradient:
    """By one number."""
    if isinstance(gradient, Outer):
        return Outer(wide(gradient.left) * factor, gradient.right)
    if isinstance(gradient, Lookup):
        return replace(gradient, rows=wide(gradient.rows) * factor)
    if isinstance(gradient, Patches):
        return replace(gradient, signal=wide(gradient.signal) * factor)
    if isinstance(gradient, Within):
        return replace(gradient, of=times(gradient.of, factor))
    if isinstance(gradient, FilterMap):
        own, ups = (tuple(one * factor for one in some) for some in (gradient.own, gradient.ups))
        return replace(gradient, own=own, ups=ups)
    if isinstance(gradient, Dense):
        return Dense(wide(gradient.value) * factor)
    return carried(
        gradient, lambda dense: wide(dense) * factor, gradient.chunk if isinstance(gradient, Deferred) else 1, 0
    )


def carried(gradient: Gradient, back: Callable[[Tensor], Tensor], numbers: int, fewer: int) -> Gradient:
    """What `back` makes of a gradient: an example has so many numbers before, and so many after. Where all of them
    would be too many, a few examples at a time; and where what is made would be, later."""
    examples = examples_of(gradient)
    if examples * max(numbers, fewer) <= LARGEST:
        return Dense(back(gradient.dense()))
    later = Deferred(gradient, back, max(1, LARGEST // max(numbers, fewer)))
    return Dense(later.dense()) if 0 < examples * fewer <= LARGEST else later


def added(one: Sequence[Gradient], other: Sequence[Gradient]) -> tuple[Gradient, ...]:
    """Gradients that add up. Materialised ones are added, and maps of one gradient; factored ones are kept: they may be
    joined in the end."""
    maps: list[FilterMap] = []
    bases = [use.of for use in (*one, *other) if isinstance(use, FilterMap)]
    both = [
        FilterMap.start(use, use.value.shape[1:])
        if isinstance(use, Dense) and any(use is each for each in bases)
        else use
        for use in (*one, *other)
    ]
    for use in both:
        if isinstance(use, FilterMap):
            same = next(
                (place for place, each in enumerate(maps) if each.of is use.of and each.shape == use.shape), None
            )
            if same is None:
                maps.append(use)
            else:
                maps[same] = maps[same].plus(use)
    dense = [wide(use.value) for use in both if isinstance(use, Dense)]
    rest = (use for use in both if not isinstance(use, Dense | FilterMap))
    total = [torch.stack(dense).sum(dim=0)] if len(dense) > 1 else dense
    return (*maps, *rest, *map(Dense, total))
