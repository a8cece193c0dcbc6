"""What is one example's gradient of one parameter before it is a tensor: how long is it, and how is it summed?

A layer's input and the gradient of its output determine every example's parameter gradient. Kept in that factored form,
its norm and a weighted sum over examples are often far cheaper than the gradients themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, reduce
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.engines.per_example import kernels
from vestige.tf32 import MARGIN, convolves_in_tf32, multiplies_in_tf32, products_in_tf32


class Gradient(Protocol):
    """The gradients of one parameter for every example of a batch; the example axis comes first in every field."""

    def norms(self, unit: float) -> Tensor:
        """2-norms, [examples], float32 or wider; infinite or NaN where a number is, or where float32 overflows.

        Where terms of an example cancel, they bound what `add` makes of it in numbers of this rounding unit.
        """
        ...

    def add(self, into: Tensor, factors: Tensor) -> None:
        """Add sum_i factors[i] * gradient_i to `into`, which has the parameter's shape."""
        ...

    def dense(self) -> Tensor:
        """The gradients themselves, [examples, *shape]."""
        ...


AnyGradient = TypeVar("AnyGradient", bound=Gradient)


def change(gradient: AnyGradient, function: Callable[[Tensor], Tensor]) -> AnyGradient:
    """The same form with `function` applied to each of its tensors (to select or to blank examples)."""
    changed: dict[str, Any] = {}
    for field in fields(gradient):  # type: ignore[arg-type]
        value = getattr(gradient, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = function(value)
        elif hasattr(value, "norms"):
            changed[field.name] = change(value, function)
        elif isinstance(value, tuple) and any(hasattr(each, "norms") for each in value):
            changed[field.name] = tuple(change(each, function) for each in value)
    return replace(gradient, **changed)  # type: ignore[type-var]


def examples_of(gradient: Gradient) -> int:
    sizes: list[int] = []
    change(gradient, lambda tensor: sizes.append(len(tensor)) or tensor)  # type: ignore[func-returns-value]
    return sizes[0]


@dataclass(frozen=True)
class Dense:
    """Materialised: [examples, *shape]."""

    value: Tensor

    def norms(self, unit: float = 0.0) -> Tensor:
        return torch.linalg.vector_norm(self._rows(), dim=1)

    def add(self, into: Tensor, factors: Tensor) -> None:
        order = memory_order(self.value)
        if into.is_contiguous() and order == list(range(1, self.value.dim())):
            into.view(-1).addmv_(self._rows().t(), factors)
        else:
            total = (factors @ self._rows()).view([self.value.shape[axis] for axis in order])
            into.add_(total.permute([order.index(axis) for axis in range(1, self.value.dim())]))

    def dense(self) -> Tensor:
        return self.value

    def _rows(self) -> Tensor:
        """The numbers of each example, as they lie in memory."""
        value = wide(self.value)
        if not self.value.is_contiguous():
            value = value.permute(0, *memory_order(self.value))
        return value.reshape(len(value), prod(value.shape[1:]))


def memory_order(value: Tensor) -> list[int]:
    """The axes of an example, from the one whose neighbours lie farthest apart to the one where they are next."""
    axes = range(1, value.dim())
    return list(axes) if value.is_contiguous() else sorted(axes, key=lambda axis: -value.stride()[axis])


@dataclass(frozen=True)
class Outer:
    """A sum over positions of outer products: left [examples, positions, out], right [examples, positions, in]."""

    left: Tensor
    right: Tensor

    def norms(self, unit: float) -> Tensor:
        return self.norms_and_lengths(unit)[0]

    def norms_and_lengths(self, unit: float) -> tuple[Tensor, Tensor]:
        if self.left.shape[1] == 1:
            left, right = Dense(self.left).norms(), Dense(self.right).norms()
            norms = kernels.where_held(left * right, left.square(), right.square())
            return norms, norms
        return kernels.outer_norms(self.left, self.right, unit, MARGIN if multiplies_in_tf32(self.left) else 0.0)

    def add(self, into: Tensor, factors: Tensor) -> None:
        left, right, weights = wide(self.left), wide(self.right), factors[:, None, None]
        if left.shape[2] <= right.shape[2]:  # the factors go onto the narrower side
            left = left * weights
        else:
            right = right * weights
        kernels.add_product(into, left.flatten(0, 1), right.flatten(0, 1))

    def dense(self) -> Tensor:
        return torch.bmm(wide(self.left).transpose(1, 2), wide(self.right))


@dataclass(frozen=True)
class Lookup:
    """Rows of a table: index [examples, positions], rows [examples, positions, width]."""

    index: Tensor
    rows: Tensor
    height: int

    @property
    def short(self) -> bool:
        """Whether the table is no larger than what was read of it, and few numbers say which row was read."""
        return self.height <= min(self.rows.shape[1], self.rows.shape[2])

    def norms(self, unit: float) -> Tensor:
        if self.index.shape[1] == 1:
            return Dense(self.rows).norms()
        return kernels.at_most_hidden(Dense(self._merged()).norms(), self.lengths(), unit)

    def lengths(self) -> Tensor:
        return torch.linalg.vector_norm(wide(self.rows), dim=2).sum(dim=1)

    def _merged(self) -> Tensor:
        """Positions of one example that read the same row of the table share a gradient: add them up first."""
        examples, positions = self.index.shape
        ordered, order = self.index.sort(dim=1)
        rank = torch.zeros_like(self.index)
        rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(dim=1)
        slot = torch.empty_like(rank).scatter_(1, order, rank)
        slot += positions * torch.arange(examples, device=slot.device)[:, None]
        rows = wide(self.rows).flatten(0, 1)
        return torch.zeros_like(rows).index_add_(0, slot.flatten(), rows).view(examples, positions, -1)

    def add(self, into: Tensor, factors: Tensor) -> None:
        into.index_add_(0, self.index.flatten(), (wide(self.rows) * factors[:, None, None]).flatten(0, 1))

    def dense(self) -> Tensor:
        rows = wide(self.rows)
        if self.short:  # adding many numbers in one place, a GPU would wait for each
            chosen = self.index[:, None, :] == torch.arange(self.height, device=rows.device)[:, None]
            with products_in_tf32(False):
                return torch.bmm(chosen.to(rows.dtype), rows)
        table = rows.new_zeros(len(rows), self.height, rows.shape[2])
        return table.scatter_add_(1, self.index[:, :, None].expand_as(rows), rows)


@dataclass(frozen=True)
class Tied:
    """A table that is both looked up and multiplied by, as an embedding tied to a language model's head."""

    lookup: Lookup
    outer: Outer

    def norms(self, unit: float) -> Tensor:
        left, right = wide(self.outer.left), wide(self.outer.right)
        read = left.gather(2, self.lookup.index[:, None, :].expand(-1, left.shape[1], -1))  # [examples, outer, lookup]
        cross = (read * torch.bmm(right, wide(self.lookup.rows).transpose(1, 2))).sum(dim=(1, 2))
        norms, length = self.outer.norms_and_lengths(unit)
        squares = self.lookup.norms(unit).double().square() + norms.double().square() + 2 * cross.double()
        lengths = self.lookup.lengths() + length
        found = kernels.bounded(squares.to(lengths.dtype), lengths, unit)
        return found + MARGIN * length if multiplies_in_tf32(right) else found

    def add(self, into: Tensor, factors: Tensor) -> None:
        self.lookup.add(into, factors)
        self.outer.add(into, factors)

    def dense(self) -> Tensor:
        return self.lookup.dense() + self.outer.dense()


@dataclass(frozen=True)
class Routed:
    """Outer products into a stack of matrices, each into the one that its position was sent to: index [examples,
    positions], left [examples, positions, out], right [examples, positions, in], as a mixture of experts has them."""

    index: Tensor
    left: Tensor
    right: Tensor
    height: int

    def norms(self, unit: float) -> Tensor:
        chunk = max(1, 2**24 // self.index.shape[1] ** 2)
        parts = zip(*(each.split(chunk) for each in (self.index, self.left, self.right)), strict=True)
        return torch.cat([Routed(index, left, right, self.height)._norms(unit) for index, left, right in parts])

    def _norms(self, unit: float) -> Tensor:
        left, right = wide(self.left), wide(self.right)
        apart = self.index[:, :, None] != self.index[:, None, :]
        first = torch.bmm(left, left.transpose(1, 2)).masked_fill_(apart, 0.0)
        squares, lengths = kernels.gram_squares(first, torch.bmm(right, right.transpose(1, 2)))
        return kernels.bounded(squares, lengths, unit, MARGIN if multiplies_in_tf32(self.left) else 0.0)

    def add(self, into: Tensor, factors: Tensor) -> None:
        order = self.index.flatten().argsort()
        counts = self.index.flatten().bincount(minlength=self.height).tolist()
        left = (wide(self.left) * factors[:, None, None]).flatten(0, 1)[order].split(counts)
        right = wide(self.right).flatten(0, 1)[order].split(counts)
        for place, one, other in zip(into, left, right, strict=True):
            place.addmm_(one.t(), other)

    def dense(self) -> Tensor:
        chosen = F.one_hot(self.index, self.height).to(wide(self.left).dtype)
        return torch.einsum("nte,nto,nti->neoi", chosen, wide(self.left), wide(self.right))


@dataclass(frozen=True)
class Place:
    """The layout of a view within a contiguous tensor, with no number twice."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of_view(cls, view: Tensor, base: Tensor) -> Place | None:
        """The layout of a view within its base; None if a number is in it more than once."""
        usual = contiguous_strides(view.shape)
        stride = tuple(s if n > 1 else u for n, s, u in zip(view.shape, view.stride(), usual, strict=True))
        reach = 0
        for step, size in sorted((s, n) for n, s in zip(view.shape, stride, strict=True) if n > 1):
            if step <= reach:
                return None
            reach += (size - 1) * step
        return cls(tuple(view.shape), stride, int(view.storage_offset() - base.storage_offset()))

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True)) + 1

    @property
    def contiguous(self) -> bool:
        return self.stride == contiguous_strides(self.size)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(size[place + 1 :]) for place in range(len(size)))


@dataclass(frozen=True)
class Within:
    """A gradient of some of a parameter's numbers, or of all in another shape; the others have none."""

    of: Gradient
    place: Place
    shape: tuple[int, ...]

    def norms(self, unit: float) -> Tensor:
        return self.of.norms(unit)

    def add(self, into: Tensor, factors: Tensor) -> None:
        self.of.add(self.place.of(into), factors)

    def dense(self) -> Tensor:
        dense = self.of.dense()
        whole = dense.new_zeros(len(dense), *self.shape)
        steps = (prod(self.shape), *self.place.stride)
        whole.as_strided((len(dense), *self.place.size), steps, self.place.offset).copy_(dense)
        return whole


@dataclass(frozen=True)
class Parts:
    """Gradients of different numbers of one parameter, each within its place."""

    parts: tuple[Gradient, ...]

    def norms(self, unit: float) -> Tensor:
        return torch.linalg.vector_norm(torch.stack([part.norms(unit) for part in self.parts]), dim=0)

    def add(self, into: Tensor, factors: Tensor) -> None:
        for part in self.parts:
            part.add(into, factors)

    def dense(self) -> Tensor:
        return torch.stack([part.dense() for part in self.parts]).sum(dim=0)


@dataclass(frozen=True)
class Deferred:
    """A gradient that is made of another one's numbers by `back`, for a few examples at a time and for each use anew:
    all of them at once would not fit."""

    of: Gradient
    back: Callable[[Tensor], Tensor]
    chunk: int

    def norms(self, unit: float) -> Tensor:
        return torch.cat([Dense(self.back(part.dense())).norms() for part in self._pieces()])

    def add(self, into: Tensor, factors: Tensor) -> None:
        for part, few in zip(self._pieces(), factors.split(self.chunk), strict=True):
            Dense(self.back(part.dense())).add(into, few)

    def dense(self) -> Tensor:
        return torch.cat([self.back(part.dense()) for part in self._pieces()])

    def _pieces(self) -> list[Gradient]:
        cuts = [slice(start, start + self.chunk) for start in range(0, examples_of(self.of), self.chunk)]
        return [change(self.of, itemgetter(cut)) for cut in cuts]


@dataclass(frozen=True)
class Geometry:
    """The shape of a convolution: everything but its numbers. `padding` is the same on both sides, with zeros."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Patches:
    """A convolution's weight: image [examples, in, *space], signal [examples, out, *positions].

    Where an example is several rows of the convolution's batch, they have an axis of their own after the examples'.
    """

    image: Tensor
    signal: Tensor
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:
        rank = len(self.geometry.kernel)
        return (self.signal.shape[~rank], self.image.shape[~rank] // self.geometry.groups, *self.geometry.kernel)

    @property
    def rows(self) -> int:
        """Rows of the convolution's batch to an example."""
        return self.image.shape[1] if self._has_rows() else 1

    @property
    def positions(self) -> int:
        """Of all rows of an example."""
        return self.rows * self.signal.shape[-len(self.geometry.kernel) :].numel()

    def _has_rows(self) -> bool:
        return self.image.dim() == len(self.geometry.kernel) + 3

    def _flat(self, tensor: Tensor) -> Tensor:
        """[rows of all examples, channels, ...], as a convolution takes it."""
        return wide(tensor.flatten(0, 1) if self._has_rows() else tensor)

    def _by_group(self, tensor: Tensor) -> Tensor:
        """[examples * groups, channels of a group, rows, ...], of [rows of all examples, channels, ...]."""
        apart = tensor.unflatten(1, (self.geometry.groups, -1)).unflatten(0, (-1, self.rows))
        return apart.movedim(1, 3).flatten(0, 1)

    def norms(self, unit: float) -> Tensor:
        lengths = self._lengths()
        norms = kernels.at_most_hidden(self._norms(), lengths, unit)
        return norms + MARGIN * lengths if convolves_in_tf32(self.image) else norms

    def _lengths(self) -> Tensor:
        """The sum over positions of the norms of the outer products that the gradient is the sum of: [examples]."""
        groups, kernel = self.geometry.groups, self.geometry.kernel
        outputs = torch.linalg.vector_norm(self._flat(self.signal).unflatten(1, (groups, -1)), dim=2)
        pixels = torch.linalg.vector_norm(self._flat(self.image).unflatten(1, (groups, -1)), dim=2).square()
        g, ones = self.geometry, pixels.new_ones(groups, 1, *kernel)
        arguments = (None, g.stride, g.padding, g.dilation, False, [0] * len(kernel), groups)
        patches = torch.ops.aten.convolution(pixels, ones, *arguments).sqrt()
        return (outputs * patches).view(len(self.image), -1).sum(dim=1)

    def _norms(self) -> Tensor:
        if self._ghost_cost() < self._direct_cost():
            return self._ghost_squares().sqrt()
        if self._fuses():
            return self._fused(keep=False)[1].sqrt()
        parts = self._parts(prod(self.shape) + prod(self.shape[1:]) * self.positions)
        return torch.cat([Dense(part.dense()).norms() for part in parts])

    def _ghost_cost(self) -> int:
        """Multiplications per example, counting a number moved to or from memory as several."""
        positions, pixels = self.positions, self.rows * self._padded_size()
        moved = pixels**2 + sum(3 * (size - 1) for size in self.geometry.kernel) * positions * pixels + 4 * positions**2
        products = pixels**2 * self.shape[1] * self.geometry.groups + positions**2 * self.shape[0]
        return products + _move_cost(self.image) * moved * self.geometry.groups

    def _direct_cost(self) -> int:
        positions, size = self.positions, prod(self.shape)
        if self._fuses():
            return 2 * positions * size
        columns = prod(self.shape[1:]) * self.geometry.groups * positions
        return positions * size + 2 * _move_cost(self.image) * (columns + size)

    def _fuses(self) -> bool:
        row = (self.image[:, 0], self.signal[:, 0]) if self._has_rows() else (self.image, self.signal)
        return kernels.can_fuse_convolution(*row, self.geometry.groups)

    def _fused(self, keep: bool, segments: kernels.Segments | None = None) -> tuple[Tensor, Tensor]:
        shape: Any = tuple(vars(self.geometry).values())
        image, signal = (each.flatten(0, 1) if self._has_rows() else each for each in (self.image, self.signal))
        return kernels.convolution_gradients(image, signal, shape, keep, self.rows, segments)

    def _padded_size(self) -> int:
        space = self.image.shape[-len(self.geometry.kernel) :]
        return prod(size + 2 * p for size, p in zip(space, self.geometry.padding, strict=True))

    def _ghost_squares(self) -> Tensor:
        """From inner products of pixels, never of patches: patches overlap, so theirs are sums of few pixels' ones."""
        examples, groups = len(self.image), self.geometry.groups
        image, signal = self._padded(), self._flat(self.signal)
        space, positions = image.shape[2:], signal.shape[2:]
        pixels, outputs = self._by_group(image).flatten(2), self._by_group(signal).flatten(2)
        inner = torch.bmm(pixels.transpose(1, 2), pixels).view(-1, self.rows, *space, self.rows, *space)
        for axis, size in enumerate(positions):
            inner = self._window_sum(inner, axis, size)
        inner = inner.reshape(len(pixels), self.positions, self.positions)
        squares, lengths = kernels.gram_squares(inner, torch.bmm(outputs.transpose(1, 2), outputs))
        return kernels.norms_of(squares, lengths).view(examples, groups).square().sum(dim=1)

    def _window_sum(self, inner: Tensor, axis: int, size: int) -> Tensor:
        """Sum, over a kernel's offsets along one axis, the inner products of the two pixels at that offset."""
        step, gap = self.geometry.stride[axis], self.geometry.dilation[axis]
        terms = []
        for offset in range(self.geometry.kernel[axis]):
            index: list[slice] = [slice(None)] * inner.dim()
            both = slice(offset * gap, offset * gap + (size - 1) * step + 1, step)
            index[2 + axis] = index[3 + axis + len(self.geometry.kernel)] = both
            terms.append(inner[tuple(index)])
        return reduce(Tensor.add, terms)

    def _padded(self) -> Tensor:
        return F.pad(self._flat(self.image), [p for p in reversed(self.geometry.padding) for _ in range(2)])

    def add(self, into: Tensor, factors: Tensor) -> None:
        g = self.geometry
        image = self._flat(self.image)
        signal = self._flat(wide(self.signal) * factors.view(-1, *([1] * (self.signal.dim() - 1))))
        weight = image.new_empty(1).expand(self.shape)  # only its shape is read
        arguments = (None, g.stride, g.padding, g.dilation, False, [0] * len(g.stride), g.groups, [False, True, False])
        into.add_(torch.ops.aten.convolution_backward(signal, image, weight, *arguments)[1])

    def dense(self) -> Tensor:
        if self._fuses():
            return self._fused(keep=True)[0]
        parts = self._parts(prod(self.shape[1:]) * self.geometry.groups * self.positions)
        out = wide(self.image[:0]).new_empty(len(self.image), *self.shape)
        for part, place in zip(parts, out.split([len(part.image) for part in parts]), strict=True):
            part._materialise(place)
        return out

    def _parts(self, each: int) -> list[Patches]:
        """The batch in pieces whose working memory, `each` numbers an example, stays small."""
        chunk = max(1, (2**27 if self.image.is_cuda else 2**21) // each)
        pieces = zip(self.image.split(chunk), self.signal.split(chunk), strict=True)
        return [Patches(image, signal, self.geometry) for image, signal in pieces]

    def _materialise(self, out: Tensor) -> None:
        g = self.geometry
        windows = self._padded()
        for axis, (size, step, gap) in enumerate(zip(g.kernel, g.stride, g.dilation, strict=True)):
            windows = windows.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
        rank, blocks = len(g.kernel), len(self.image) * g.groups
        windows = self._by_group(windows)  # [blocks, channels of a group, rows, *positions, *kernel]
        windows = windows.permute(0, 1, *range(3 + rank, 3 + 2 * rank), *range(2, 3 + rank))
        columns = windows.reshape(blocks, -1, self.positions)
        signal = self._by_group(self._flat(self.signal)).reshape(blocks, -1, self.positions)
        torch.bmm(signal, columns.transpose(1, 2), out=out.view(blocks, -1, columns.shape[1]))


def _move_cost(tensor: Tensor) -> int:
    """How many multiplications take as long as moving one number (two CPU cores; an H200 in TF32)."""
    return 60 if tensor.is_cuda else 10


def combine(uses: Sequence[Gradient]) -> Gradient:
    """One gradient of a parameter used several times in a pass: an example's uses add up before its norm is taken."""
    if len(uses) == 1:
        return _of_table(uses[0]) if isinstance(uses[0], Lookup) else uses[0]
    alike = _joined_patches(uses)
    if alike is not None:
        return alike
    places: dict[Place | None, list[Gradient]] = {}
    for use in uses:
        places.setdefault(use.place if isinstance(use, Within) else None, []).append(use)
    if len(places) > 1:
        parts = tuple(combine(each) for each in places.values())
        if None not in places and _disjoint(tuple(places)):  # type: ignore[arg-type]
            return Parts(parts)
        return Dense(torch.stack([part.dense() for part in parts]).sum(dim=0))
    if isinstance(uses[0], Within):
        return replace(uses[0], of=combine([use.of for use in uses if isinstance(use, Within)]))
    lookups = [use for use in uses if isinstance(use, Lookup)]
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(lookups) + len(outers) < len(uses):
        return Dense(torch.stack([use.dense() for use in uses]).sum(dim=0))
    if lookups:
        lookup = replace(lookups[0], index=_joined(u.index for u in lookups), rows=_joined(u.rows for u in lookups))
        return Tied(lookup, _joined_outer(outers)) if outers else _of_table(lookup)
    joined = _joined_outer(outers)
    return product(joined.left, joined.right)


def product(left: Tensor, right: Tensor) -> Gradient:
    """A sum over positions of outer products; materialised where that is no larger than its factors.

    With T positions, T*out*in multiplications in all, against as many for the sum alone and T*T*(out+in) more for the
    norm from inner products.
    """
    outer = Outer(left, right)
    positions, out, width = left.shape[1], left.shape[2], right.shape[2]
    return Dense(outer.dense()) if positions > 1 and out * width <= positions * (out + width) else outer


def _of_table(lookup: Lookup) -> Gradient:
    return Dense(lookup.dense()) if lookup.short else lookup


def cheaper(patches: Patches) -> Gradient:
    """Materialised where that is hardly larger than what it is made of."""
    size = 4 * prod(patches.shape) * len(patches.image)
    return Dense(patches.dense()) if size <= 5 * (patches.image.numel() + patches.signal.numel()) else patches


def _joined_patches(uses: Sequence[Gradient]) -> Gradient | None:
    """Convolutions of one geometry, of images of one size: their rows lie side by side; None for anything else."""
    patches = [use for use in uses if isinstance(use, Patches)]
    rank = len(patches[0].geometry.kernel) if patches else 0
    if len(patches) < len(uses) or len({(use.geometry, use.image.shape[~rank:]) for use in patches}) > 1:
        return None
    images = (use.image if use._has_rows() else use.image[:, None] for use in patches)
    signals = (use.signal if use._has_rows() else use.signal[:, None] for use in patches)
    return cheaper(Patches(_joined(images), _joined(signals), patches[0].geometry))


@lru_cache(maxsize=256)
def _disjoint(places: tuple[Place, ...]) -> bool:
    """Whether no number lies in two of these places."""
    ordered = sorted(places, key=lambda place: place.offset)
    if all(one.end <= other.offset for one, other in pairwise(ordered)):
        return True
    taken = torch.zeros(max(place.end for place in places), dtype=torch.int32)
    for place in places:
        place.of(taken).add_(1)
    return int(taken.max()) <= 1


def _joined_outer(outers: Sequence[Outer]) -> Outer:
    return Outer(_joined(use.left for use in outers), _joined(use.right for use in outers))


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    found = list(tensors)
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


def differentiable(value: object) -> TypeGuard[Tensor]:
    """Whether gradients can come back to it: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def wide(tensor: Tensor) -> Tensor:
    """At least float32, whatever autocast made of it."""
    return tensor.float() if tensor.element_size() < 4 else tensor
