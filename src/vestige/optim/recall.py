"""How is a window of past vectors read once per step? One pass that mixes, remembers and compares: fused on a GPU."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor

from vestige.devices import triton_available
from vestige.optim.window import Ring

HOT = 2**19
"""So many numbers of a window stay near enough to a CPU to be read twice: a stretch of columns is cut to that."""
MOST_ROWS = 128
"""A GPU program holds its columns of every row in registers; a longer window is left to plain PyTorch."""


def recall(
    ring: Ring, fresh: Tensor, weights: Tensor, blend: Tensor, share: float, pace: float, keep: Tensor
) -> Tensor:
    """Write share * fresh + (1 - share) * (weights over the lags) into `blend`, and remember `keep`: one pass.

    `keep` is `fresh` or `blend`, and `blend` may be the ring's next row itself. The trend moves by `pace` towards what
    is kept, and the ring's numbers become those of the new window and the new trend. They are computed, in this same
    pass, from the vectors as they are stored; none is carried over, so no rounding error outlives its step.

    Returns |(1 - share) * recalled| / |blend|, how much of the blend is memory. The caller counts.
    """
    if fused(ring):
        from vestige.optim import triton_recall

        return triton_recall.recall(ring, fresh, weights, blend, share, pace, keep is fresh)
    return plain_recall(ring, fresh, weights, blend, share, pace, keep)


def fused(ring: Ring) -> bool:
    return ring.past.is_cuda and len(ring.past) <= MOST_ROWS and triton_available()


def plain_recall(
    ring: Ring, fresh: Tensor, weights: Tensor, blend: Tensor, share: float, pace: float, keep: Tensor
) -> Tensor:
    """The same, a stretch of columns at a time: what was just read is still in the cache when it is read again."""
    by_slot = weights[ring.slots].to(fresh.dtype)
    width = max(2**14, HOT // len(ring.past))
    scratch = fresh.new_empty(min(width, len(fresh)))
    trends = ring.trend.split(width) if ring.trend is not None else repeat(None)
    scalars, products = [], []
    for rows, trend, new, mixed, kept in zip(
        ring.past.split(width, dim=1), trends, fresh.split(width), blend.split(width), keep.split(width), strict=False
    ):
        window, recalled = rows.to(new.dtype), scratch[: len(new)]
        torch.mv(window[: ring.filled].t(), by_slot, out=recalled)
        torch.lerp(recalled, new, share, out=mixed)
        square = mixed @ mixed
        scalars += [recalled @ recalled, square]
        written = rows[ring.slot]
        if written.data_ptr() != kept.data_ptr():
            window[ring.slot] = written.copy_(kept)
            square = window[ring.slot] @ window[ring.slot]
        if trend is not None:
            trend.lerp_(kept, pace)
            scalars += [square, trend @ trend]
            products.append(torch.mv(window, trend))
    numbers = torch.stack(scalars).view(-1, 4 if products else 2).sum(0, dtype=torch.float64)
    if ring.squares is not None and ring.products is not None:
        ring.squares[ring.slot] = numbers[2]
        ring.products[-1] = numbers[3]
        torch.sum(torch.stack(products), 0, dtype=torch.float64, out=ring.products[:-1])
    return (1 - share) * (numbers[0] / numbers[1].clamp(min=1e-300)).sqrt()
