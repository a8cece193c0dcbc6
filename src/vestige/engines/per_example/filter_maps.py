"""How long is a gradient after a linear map that treats each filter by itself, and how is it summed?

A weight that is standardised, or normed to a length, passes its gradient g back as

    own * g + sum_k up_k <down_k, g>

filter by filter: its first axis counts the filters, and <,> adds up what belongs to one. That is the same for every
example, so a sum over examples is mapped once, after it was taken; and a norm follows from g's inner products with
fixed tensors, all of them made in one pass over g.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod

import torch
from torch import Tensor

from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import Dense, Gradient, Outer, memory_order, wide


@dataclass(frozen=True)
class FilterMap:
    """See above: `own` is [filters, numbers or 1], or nothing; `downs` are [filters, numbers] each; `ups` [filters, n
    or 1], where n is how many numbers of each filter the result has."""

    of: Outer | Dense
    own: tuple[Tensor, ...]
    downs: tuple[Tensor, ...]
    ups: tuple[Tensor, ...]
    filters: int
    shape: tuple[int, ...]
    """Of the result, whose numbers lie filter by filter."""

    @classmethod
    def start(cls, gradient: Gradient, shape: Sequence[int]) -> FilterMap:
        """The gradient as it is. An outer product stays one; anything else is materialised."""
        as_is = isinstance(gradient, Outer) or (isinstance(gradient, Dense) and gradient.value.element_size() > 2)
        of: Outer | Dense = gradient if as_is else Dense(wide(gradient.dense()))  # type: ignore[assignment]
        like = of.left if isinstance(of, Outer) else of.value
        return cls(of, (wide(like).new_ones(shape[0], 1),), (), (), shape[0], tuple(shape))

    # --- what operators make of it ------------------------------------------------------------------------------------

    def scaled(self, factor: Tensor, shape: Sequence[int]) -> FilterMap:
        """Times numbers, broadcast to a shape."""
        each = wide(factor).expand(*shape).reshape(self.filters, -1)
        by_filter = factor.dim() == len(shape) and factor.shape[1:].numel() == 1 and shape[0] == self.filters
        alike = factor.numel() == 1 or by_filter
        each = each[:, :1] if alike else each
        own, ups = (tuple(one * each for one in some) for some in (self.own, self.ups))
        return replace(self, own=own, ups=ups, shape=tuple(shape))

    def summed(self, shape: Sequence[int]) -> FilterMap:
        """The sum of each filter's numbers."""
        count = self._numbers
        ups = tuple(up.sum(dim=1, keepdim=True) * (count // up.shape[1]) for up in self.ups)
        ones = (one.new_ones(self.filters, 1) for one in self.own)
        downs = (one.expand(-1, count) for one in self.own)
        return FilterMap(self.of, (), (*self.downs, *downs), (*ups, *ones), self.filters, tuple(shape))

    def plus(self, other: FilterMap) -> FilterMap:
        """Of the same gradient."""
        own = (
            (sum((*self.own, *other.own), start=self.own[0].new_zeros(1)),)
            if self.own and other.own
            else self.own or other.own
        )
        return replace(self, own=own, downs=(*self.downs, *other.downs), ups=(*self.ups, *other.ups))

    @property
    def _numbers(self) -> int:
        """Of a filter, in the result."""
        return prod(self.shape) // self.filters

    # --- as a gradient ------------------------------------------------------------------------------------------------

    def _of(self, dense: Tensor) -> Tensor:
        """What gradients [examples, filters, numbers] are mapped to."""
        found = dense * self.own[0] if self.own else None
        for down, up in zip(self.downs, self.ups, strict=True):
            inner = (dense * down).sum(dim=2, keepdim=True)
            found = inner * up if found is None else found.addcmul_(inner, up)
        assert found is not None
        return found.expand(-1, -1, self._numbers).reshape(len(dense), *self.shape)

    def dense(self) -> Tensor:
        if not self.own:
            terms = (inner[:, :, None] * up for inner, up in zip(self._inner, self.ups, strict=True))
            found = reduce(torch.add, terms)
            return found.expand(-1, -1, self._numbers).reshape(len(found), *self.shape)
        dense = self.of.dense()
        return self._of(dense.reshape(len(dense), self.filters, -1))

    @cached_property
    def _inner(self) -> Sequence[Tensor]:
        """<down_k, g>: [examples, filters] each."""
        if not isinstance(self.of, Outer):
            none = torch.zeros_like(self.downs[0])
            return self._products_with(self.of.dense(), (none, *self.downs))[:, :, 2:].unbind(2)
        left, right = wide(self.of.left), wide(self.of.right)
        return [(left * (right @ down.t())).sum(dim=1) for down in self.downs]

    def add(self, into: Tensor, factors: Tensor) -> None:
        of = self.of
        shape = (self.filters, of.right.shape[2]) if isinstance(of, Outer) else of.value.shape[1:]
        total = into.new_zeros(shape)
        self.of.add(total, factors)
        into.add_(self._of(total.reshape(1, self.filters, -1))[0])

    def norms(self, unit: float) -> Tensor:
        squares, whole, inner, across = self._products()
        downs = torch.stack([each.norm(dim=1) for each in self.downs], dim=1) if self.downs else inner.new_zeros(1, 0)
        ups = [up.expand(-1, self._numbers).double() for up in self.ups]
        for k, up in enumerate(ups):
            moved = sum(
                (inner[:, :, k2] * (other * up).sum(dim=1) for k2, other in enumerate(ups)), 2 * across[:, :, k]
            )
            squares = squares + inner[:, :, k] * moved
        # However small an inner product is, it was summed from terms as large as its factors.
        at_most = sum((down * up.norm(dim=1) for down, up in zip(downs.double().unbind(1), ups, strict=True)), 0.0)
        lengths = torch.linalg.vector_norm(whole[0] + whole[1] * at_most, dim=1)
        rounding = 32 * torch.finfo(torch.float64 if self._wide else torch.float32).eps
        norms = kernels.norms_of(squares.sum(dim=1), lengths, rounding)
        return kernels.at_most_hidden(norms, lengths, unit)

    @property
    def _wide(self) -> bool:
        return (self.of.left if isinstance(self.of, Outer) else self.of.value).dtype == torch.float64

    def _products(self) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Of every filter |own g|^2; |own g| and |g|; <down_k, g>; and <own up_k, g>: [examples, filters, ...]."""
        count = len(self.downs)
        if isinstance(self.of, Outer) and all(one.shape[1] == 1 for one in self.own):
            left, right = self.of.left.double(), self.of.right.double()
            gram = (torch.bmm(torch.bmm(right, right.mT), left) * left).sum(dim=1).clamp(min=0.0)
            own = self.own[0][:, 0].double() if self.own else gram.new_zeros(self.filters)
            along = [each.double() for each in self._inner]
            turned = [own * (left * (right @ up.expand(-1, right.shape[2]).double().t())).sum(dim=1) for up in self.ups]
            inner, across = (
                torch.stack(some, dim=2) if count else gram.new_zeros(*gram.shape, 0) for some in (along, turned)
            )
            return gram * own.square(), (gram.sqrt() * own.abs(), gram.sqrt()), inner, across
        dense = self.of.dense()
        own = (self.own[0] if self.own else dense.new_zeros(self.filters, 1)).to(dense.dtype)
        turned = [own * up.to(dense.dtype) for up in self.ups]
        products = self._products_with(dense, (own, *self.downs, *turned)).double()
        lengths = products[:, :, :2].sqrt()
        inner, across = products[:, :, 2 : 2 + count], products[:, :, 2 + count :]
        return products[:, :, 0], (lengths[:, :, 0], lengths[:, :, 1]), inner, across

    def _products_with(self, dense: Tensor, fixed: Sequence[Tensor]) -> Tensor:
        """See `kernels.filter_products`, of gradients and of what is the same for every example."""
        order = memory_order(dense)  # a filter's numbers as they lie in the gradient
        flat = dense.permute(0, *order).reshape(len(dense), self.filters, -1) if order[0] == 1 else dense.flatten(2)

        def lie(each: Tensor) -> Tensor:
            whole = each.to(dense.dtype).expand(-1, flat.shape[2]).reshape(dense.shape[1:])
            return (whole.permute([axis - 1 for axis in order]) if order[0] == 1 else whole).reshape(self.filters, -1)

        return kernels.filter_products(flat, torch.stack([lie(each) for each in fixed]))
