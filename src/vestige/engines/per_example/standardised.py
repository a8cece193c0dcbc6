"""How is the gradient of a standardised weight pulled back? Through the few numbers that each of its filters has.

A weight that is used as h(w, s), number by number, where every filter has its own s_1, ..., s_r (a mean, a spread, a
gain), is pulled back by

    dh/dw * g + sum_k ds_k/dw <dh/ds_k, g>

filter by filter. That is the same for every example, so a sum over examples is pulled back once, after it was taken;
and a norm follows from g's inner products with 2r fixed tensors, all of them made in one pass over g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import vjp, vmap

from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import Dense, Gradient, Place, contiguous_strides, memory_order, wide
from vestige.engines.per_example.parameter_expressions import Expression, Pulled, Whole, quietly
from vestige.engines.per_example.parameter_functions import ELEMENTWISE, Derived, View, by_vjp

OVER_A_FILTER = frozenset({"var_mean", "std_mean", "var", "std", "mean", "sum", "norm", "linalg_vector_norm"})


@dataclass(frozen=True)
class WayBack:
    """dh/dw, then for each scale dh/ds_k and ds_k/dw, number by number: the same for every example."""

    own: Tensor
    slopes: tuple[Tensor, ...]
    moves: tuple[Tensor, ...]

    def of(self, dense: Tensor) -> Tensor:
        """What a gradient [examples, filters, ...] is pulled back to."""
        flat = dense.flatten(2)
        slopes, moves = (torch.stack([each.flatten(1) for each in some]) for some in (self.slopes, self.moves))
        inner = torch.bmm(flat.transpose(0, 1), slopes.permute(1, 2, 0).to(flat.dtype))  # [filters, examples, scales]
        pulled = flat * self.own.flatten(1)
        pulled.transpose(0, 1).baddbmm_(inner, moves.transpose(0, 1).to(flat.dtype))
        return pulled.view_as(dense)

    def products(self, dense: Tensor) -> Tensor:
        """Of every filter |own g|^2 and |g|^2, then <dh/ds_k, g>, then <own ds_k/dw, g>: [examples, filters, 2 + 2r].

        What is fixed is multiplied in the gradient's own precision: what cancels must be the same here and there.
        """
        own, *others = (each.to(dense.dtype) for each in (self.own, *self.slopes, *self.moves))
        fixed = torch.stack([own, *others[: len(self.slopes)], *(own * each for each in others[len(self.slopes) :])])
        order = memory_order(dense)
        there = fixed.permute(0, *order).flatten(2)  # a filter's numbers as they lie in the gradient
        return kernels.filter_products(dense.permute(0, *order).flatten(2), there)


@dataclass(frozen=True)
class PulledBack:
    """The gradient of a standardised weight, from that of what was made of it."""

    of: Dense
    products: Tensor
    way: WayBack

    def norms(self, unit: float) -> Tensor:
        again = self.of.value.dtype == torch.float64  # what overflowed float32 may be a number there
        products = self.way.products(self.of.value) if again else self.products.double()
        scales = len(self.way.slopes)
        squares, lengths = products[:, :, 0], products[:, :, :2].sqrt()
        inner, across = products[:, :, 2:].split(scales, dim=2)
        slopes, moves = (
            torch.stack([e.flatten(1) for e in s], dim=1).double() for s in (self.way.slopes, self.way.moves)
        )
        moved = (inner[:, :, :, None] * (moves @ moves.mT)).sum(dim=2)
        squares = squares + (inner * (2 * across + moved)).sum(dim=2)
        # However small an inner product is, it was summed from terms as large as its factors.
        at_most = torch.linalg.vector_norm(slopes, dim=2) * torch.linalg.vector_norm(moves, dim=2)
        lengths = torch.linalg.vector_norm(lengths[:, :, 0] + lengths[:, :, 1] * at_most.sum(dim=1), dim=1)
        rounding = 32 * torch.finfo(self.of.value.dtype).eps
        norms = kernels.norms_of(squares.sum(dim=1), lengths, rounding)
        return kernels.at_most_hidden(norms, lengths, unit)

    def add(self, into: Tensor, factors: Tensor) -> None:
        total = self.of.value.new_zeros(self.of.value.shape[1:])
        self.of.add(total, factors)
        into.add_(self.way.of(total[None])[0])

    def dense(self) -> Tensor:
        return self.way.of(self.of.value)


@dataclass(frozen=True, eq=False)
class Standardised:
    """A weight as h(w, s): see above."""

    whole: Derived
    weight: Whole
    scales: tuple[Expression, ...]

    def back(self, gradient: Gradient) -> Pulled:
        way = self._way_back()
        dense = wide(gradient.dense()).to(wide(self.weight.value).dtype)
        products = way.products(dense)
        yield self.weight, PulledBack(Dense(dense), products, way)
        yield from self._of_others(products[:, :, 2 : 2 + len(self.scales)])

    def _way_back(self) -> WayBack:
        weight = self.weight.value

        def used(weight: Tensor, *scales: Tensor) -> Tensor:
            return _recomputed(self.whole, {self.weight: weight, **dict(zip(self.scales, scales, strict=True))})

        output, back = vjp(used, weight, *(scale.value.expand_as(weight) for scale in self.scales))[:2]
        moves = []
        for scale in self.scales:
            value, home = vjp(lambda w, scale=scale: _recomputed(scale, {self.weight: w}), weight)[:2]
            moves.append(home(torch.ones_like(value))[0])
        own, *slopes = back(torch.ones_like(output))
        return WayBack(own, tuple(slopes), tuple(moves))

    def _of_others(self, inner: Tensor) -> Pulled:
        """The gradients of what else the scales are made of, gains, from those of the scales."""
        others = [each for each in self.whole.parameters if each != self.weight]
        if not others:
            return

        def scales(*own: Tensor) -> tuple[Tensor, ...]:
            return tuple(_recomputed(scale, dict(zip(others, own, strict=True))) for scale in self.scales)

        values, back = vjp(scales, *(each.value for each in others))[:2]
        signals = tuple(each.reshape(-1, *v.shape) for each, v in zip(inner.unbind(2), values, strict=True))
        with quietly():
            found = vmap(lambda *each: back(each))(*signals)
        yield from zip(others, map(Dense, found), strict=True)


def _recomputed(expression: Expression, given: Mapping[Expression, Tensor]) -> Tensor:
    """The value of an expression, where some of what it is made of has these values."""
    if expression in given:
        return given[expression]
    if isinstance(expression, Derived):
        return expression.function(*(_recomputed(each, given) for each in expression.of))
    return expression.value


def standardised(whole: Derived) -> Derived:
    """The same expression with the shorter way back, where it has one."""
    scales: dict[Expression, None] = {}
    weights: set[Whole] = set()
    shape = whole.value.shape
    if len(shape) < 2 or not _split(whole, shape, weights, scales) or len(weights) != 1 or not scales:
        return whole
    (weight,) = weights
    if not all(_filter_by_filter(scale, weight, shape) for scale in scales):
        return whole
    return replace(whole, pull=Standardised(whole, weight, tuple(scales)).back)


def batch_normed(
    weight: Whole,
    shape: tuple[int, ...],
    output: Tensor,
    gain: Expression | Tensor | None,
    bias: Expression | Tensor | None,
    eps: float,
) -> Derived:
    """A weight of this shape, standardised by F.batch_norm, whose `output` is [1, filters, ...]."""
    rest, each = tuple(range(1, len(shape))), (shape[0], *[1] * (len(shape) - 1))

    def of_filters(function: Callable[[Tensor], Tensor], of: Expression) -> Derived:
        return Derived(function(of.value), (of,), function, by_vjp((of,), function))

    scales = [
        of_filters(lambda w: w.mean(dim=rest, keepdim=True), weight),
        of_filters(lambda w: w.var(dim=rest, correction=0, keepdim=True), weight),
    ]
    fixed: list[Tensor | None] = []
    for other in (gain, bias):
        fixed.append(other.view(each) if isinstance(other, Tensor) else None)
        if isinstance(other, Expression):
            scales.append(of_filters(lambda numbers: numbers.view(each), other))

    def used(weight: Tensor, mean: Tensor, variance: Tensor, *learned: Tensor) -> Tensor:
        more = iter(learned)
        found = (weight - mean) * torch.rsqrt(variance + eps)
        found = found if gain is None else found * (next(more) if fixed[0] is None else fixed[0])
        return found if bias is None else found + (next(more) if fixed[1] is None else fixed[1])

    made = Derived(output.view(shape), of := (weight, *scales), used, by_vjp(of, used))
    whole = replace(made, pull=Standardised(made, weight, tuple(scales)).back)
    seen = tuple(output.shape)
    view = View(whole, shape, Place(seen, contiguous_strides(seen)))
    return Derived(output, (whole,), lambda made: made.view(seen), view.back, view)


def _split(node: Expression, shape: torch.Size, weights: set[Whole], scales: dict[Expression, None]) -> bool:
    """Find the weight and the scales that an expression of this shape is made of, number by number."""
    if isinstance(node, Whole) and node.value.shape == shape:
        weights.add(node)
        return True
    if not isinstance(node, Derived):
        return False
    if node.value.shape == (shape[0], *[1] * (len(shape) - 1)) != shape:
        scales[node] = None
        return True
    by_number = node.name in ELEMENTWISE and node.value.shape == shape
    return by_number and all(_split(each, shape, weights, scales) for each in node.of)


def _filter_by_filter(node: Expression, weight: Whole, shape: torch.Size) -> bool:
    """Whether each filter's part of an expression is made of that filter of the weight alone."""
    if weight not in node.parameters or isinstance(node, Whole):
        return True
    own = node.value.shape
    if not isinstance(node, Derived) or len(own) != len(shape) or own[0] != shape[0]:
        return False
    reduced = node.name in OVER_A_FILTER and set(own[1:]) == {1}
    return (reduced or node.name in ELEMENTWISE) and all(_filter_by_filter(n, weight, shape) for n in node.of)
