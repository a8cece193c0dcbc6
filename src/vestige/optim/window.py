"""How are past vectors kept and read? A ring buffer along the last axis but one, read once per step.

One run and a stack of runs share the code: any axes in front of [depth, size] are runs. On a GPU a fused kernel reads
the window of a single run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from math import exp, log1p, sqrt
from typing import Any

import torch
from torch import Tensor

from vestige.tf32 import triton_available

CACHED = 2**21
"""Numbers that stay in a CPU's cache between two reads: a window is read in blocks of columns of this size."""
MOST_ROWS = 128
"""The fused kernel holds its columns of every row in registers; a longer window is left to plain PyTorch."""


@dataclass(frozen=True)
class Ring:
    """A window of past vectors, the newest written over the oldest, and inner products with their running trend."""

    past: Tensor
    """[..., depth, size] in any float type; row `count % depth` is the oldest, written next."""
    count: int
    """How many vectors were ever remembered."""
    trend: Tensor | None = None
    """[..., size] in float32, where there is a trend; then both of the following are there too, in float64."""
    squares: Tensor | None = None
    """[..., depth]: each row's inner product with itself."""
    products: Tensor | None = None
    """[..., depth + 1]: the trend's inner product with each row, then with itself."""
    totalled: Callable[[Tensor], Tensor] | None = None
    """Completes sums over coordinates, where these are a part of the coordinates."""

    @property
    def depth(self) -> int:
        return self.past.shape[-2]

    @property
    def slot(self) -> int:
        """The row that is written next."""
        return self.count % self.depth

    @property
    def filled(self) -> int:
        return min(self.count, self.depth)

    @property
    def slots(self) -> Tensor:
        """The rows of lags 1, 2, ... A view: it launches no kernel."""
        first = self.depth - self.slot
        return _falling(self.depth, self.past.device)[first : first + self.filled]

    @property
    def lags(self) -> Tensor:
        return rising(self.depth, self.past.device)[: self.filled]

    def compared(self) -> tuple[Tensor, Tensor]:
        """The norm of the trend, [...], and the distance from it of each row by lag, [..., filled].

        By |a|^2 - 2ab + |b|^2, from inner products that the last step computed: no vector is read.
        """
        assert self.squares is not None
        assert self.products is not None
        square = self.products[..., -1]
        apart = torch.sub(self.squares, self.products[..., :-1], alpha=2)[..., self.slots] + square[..., None]
        return square.clamp(min=0).sqrt(), apart.clamp(min=0).sqrt()


@cache
def _falling(depth: int, device: torch.device) -> Tensor:
    """depth - 1, ..., 0 twice over: the rows in order of lag, from any row of the ring, are a slice of it."""
    return torch.arange(depth - 1, -1, -1, device=device).repeat(2)


@cache
def rising(depth: int, device: torch.device) -> Tensor:
    """The lags 1, 2, ..., depth, in float64. Never to be written to."""
    return torch.arange(1, depth + 1, dtype=torch.float64, device=device)


def weighted_sum(rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of the rows, each times its weight: [..., rows, size] and [..., rows] -> [..., size]."""
    if rows.dim() == 2:
        return torch.mv(rows.t(), weights, out=out)
    found = (weights.unsqueeze(-2) @ rows).squeeze(-2)
    return found if out is None else out.copy_(found)


def inner_products(rows: Tensor, vector: Tensor) -> Tensor:
    """Each row's inner product with a vector: [..., rows, size] and [..., size] -> [..., rows]."""
    return torch.mv(rows, vector) if rows.dim() == 2 else (rows @ vector.unsqueeze(-1)).squeeze(-1)


def dot(one: Tensor, other: Tensor) -> float | Tensor:
    """Inner products along the last axis, to be added up in float64: on a CPU one is cheapest as a Python number."""
    if one.dim() > 1:
        return torch.linalg.vecdot(one, other).double()
    found = torch.dot(one, other)
    return found.double() if one.is_cuda else found.item()


def recall(
    ring: Ring, fresh: Tensor, weights: Tensor, blend: Tensor, fresh_weight: float, pace: float, keep: Tensor
) -> Tensor:
    """Write fresh_weight * fresh + (1 - fresh_weight) * (weighted past) into `blend`, and remember `keep`: one pass.

    `keep` is `fresh` or `blend`, and `blend` may be the ring's next row itself. The trend moves by `pace` towards what
    is kept, and the ring's inner products become those of the new window and the new trend. They are computed, in this
    same pass, from the vectors as they are stored; none is carried over, so no rounding error outlives its step.

    Returns |(1 - fresh_weight) * recalled| / |blend|, how much of the blend is memory. The caller advances the count.
    """
    if fused(ring):
        from vestige.optim import triton_recall

        return triton_recall.recall(ring, fresh, weights, blend, fresh_weight, pace, keep is fresh)
    return plain_recall(ring, fresh, weights, blend, fresh_weight, pace, keep)


def fused(ring: Ring) -> bool:
    return (
        ring.totalled is None
        and ring.past.is_cuda
        and ring.past.dim() == 2
        and ring.depth <= MOST_ROWS
        and triton_available()
    )


def at_once(ring: Ring) -> bool:
    """Whether the numbers of a single run can be read: on a CPU, or for a fused kernel."""
    return fused(ring) or (ring.past.dim() == 2 and ring.past.device.type == "cpu")


def plain_recall(
    ring: Ring, fresh: Tensor, weights: Tensor, blend: Tensor, fresh_weight: float, pace: float, keep: Tensor
) -> Tensor:
    """The same, a block of columns at a time: what was just read is still in the cache when it is read again."""
    by_slot = weights.index_select(-1, ring.slots).to(fresh.dtype)
    slot, filled, width = ring.slot, ring.filled, _block(ring)
    scratch = fresh.new_empty(*fresh.shape[:-1], min(width, fresh.shape[-1]))
    recalled_square = blend_square = kept_square = trend_square = 0.0  # type: float | Tensor
    products: list[Tensor] = []
    for rows, new, mixed, kept, trend in _blocks(width, ring.past, fresh, blend, keep, ring.trend):
        window, recalled = rows.to(new.dtype), _first(scratch, -1, new.shape[-1])
        weighted_sum(_first(window, -2, filled), by_slot, out=recalled)
        torch.lerp(recalled, new, fresh_weight, out=mixed)
        recalled_square, square = recalled_square + dot(recalled, recalled), dot(mixed, mixed)
        blend_square = blend_square + square
        written = rows[..., slot, :]
        if written.data_ptr() != kept.data_ptr():
            window[..., slot, :] = written.copy_(kept)
            square = dot(window[..., slot, :], window[..., slot, :])
        if trend is not None:
            trend.lerp_(kept, pace)
            kept_square, trend_square = kept_square + square, trend_square + dot(trend, trend)
            products.append(inner_products(window, trend))
    inner: Any = 0.0
    if products:
        inner = products[0] if len(products) == 1 else sum(each.double() for each in products)
    if ring.totalled is not None:
        found = [recalled_square, blend_square, kept_square, trend_square]
        numbers = torch.stack([torch.as_tensor(each, dtype=torch.float64).cpu() for each in found])
        others = inner.double().cpu() if products else numbers[:0]
        numbers = ring.totalled(torch.cat([numbers, others])).to(fresh.device)
        recalled_square, blend_square, kept_square, trend_square = numbers[:4].unbind()
        inner = numbers[4:]
    if ring.squares is not None and ring.products is not None:
        ring.squares[..., slot] = kept_square
        ring.products[..., -1] = trend_square
        ring.products[..., :-1] = inner
    share = (1 - fresh_weight) * (recalled_square / (blend_square + 1e-300)) ** 0.5
    return torch.as_tensor(share, dtype=torch.float64)


def _first(tensor: Tensor, axis: int, count: int) -> Tensor:
    """The first so many along an axis: the tensor itself, without another view, if these are all."""
    return tensor if tensor.shape[axis] == count else tensor.narrow(axis, 0, count)


def _blocks(width: int, *parts: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Blocks of columns of each of them, side by side; None where there is None."""
    size = next(part.shape[-1] for part in parts if part is not None)
    if size <= width:
        yield parts
        return
    yield from zip(*(repeat(None) if part is None else part.split(width, dim=-1) for part in parts), strict=False)


def tempered(
    ring: Ring, order: float, baseline: float, inconsistency: float, smallest_scale: float, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`triton_recall.tempered` on a CPU: a few numbers cost less in Python than an operation of torch for each."""
    assert ring.squares is not None
    assert ring.products is not None
    squares, (*products, square) = ring.squares.tolist(), ring.products.tolist()
    square = max(square, 0.0)
    norm = sqrt(square)
    confidence = norm / max(norm + floor, 1e-300)
    pull = confidence * inconsistency / (max(norm, smallest_scale) + 1e-12)
    scores, count, depth = [], ring.count, ring.depth
    for lag in range(1, ring.filled + 1):
        row = (count - lag) % depth
        distance = sqrt(max(squares[row] - 2 * products[row] + square, 0.0))
        scores.append((order - 1) * log1p(lag) - baseline * lag - pull * distance * lag)
    top = max(scores, default=0.0)
    raw = [exp(score - top) for score in scores]
    total = sum(raw)
    mean_lag = sum(lag * each for lag, each in enumerate(raw, 1)) / max(total, 1e-300)
    shown = torch.tensor([*(each / total for each in raw), mean_lag, confidence, norm], dtype=torch.float64)
    return shown[: len(raw)], shown[-3], shown[-2], shown[-1]


def _block(ring: Ring) -> int:
    """Columns that are read together: all of them on a GPU, where each block would need its own kernel launches."""
    if ring.past.is_cuda:
        return ring.past.shape[-1]
    return max(2**14, CACHED // ring.past.shape[:-1].numel())
