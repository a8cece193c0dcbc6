"""What is known of a window of past vectors? Which row is how old, and how far each lies from their running trend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ring:
    """A window of past vectors, newest over oldest, and the numbers that compare it with its running trend."""

    past: Tensor
    """[depth, d] in any float type; `count % depth` is the slot of the oldest row, written next."""
    count: int
    """How many vectors were ever remembered."""
    trend: Tensor | None = None
    """[d] in float32, where there is a trend; then both of the following are there too, in float64."""
    squares: Tensor | None = None
    """[depth]: each row's inner product with itself."""
    products: Tensor | None = None
    """[depth + 1]: the trend's inner product with each row, then with itself."""

    @property
    def slot(self) -> int:
        return self.count % len(self.past)

    @property
    def filled(self) -> int:
        return min(self.count, len(self.past))

    @property
    def slots(self) -> Tensor:
        """The slots of lags 1, 2, ... A view: it costs no kernel."""
        first = len(self.past) - self.slot
        return _falling(len(self.past), self.past.device)[first : first + self.filled]

    @property
    def lags(self) -> Tensor:
        return _rising(len(self.past), self.past.device)[: self.filled]

    def compared(self) -> tuple[Tensor, Tensor]:
        """The norm of the trend, and the distance from it of each row by lag, by |a|^2 - 2ab + |b|^2: numbers only."""
        assert self.squares is not None
        assert self.products is not None
        square = self.products[-1]
        apart = torch.sub(self.squares, self.products[:-1], alpha=2)[self.slots] + square
        return square.clamp(min=0).sqrt(), apart.clamp(min=0).sqrt()


@cache
def _falling(depth: int, device: torch.device) -> Tensor:
    """depth - 1, ..., 0 twice over: walking back from any slot of the ring is a stretch of it."""
    return torch.arange(depth - 1, -1, -1, device=device).repeat(2)


@cache
def _rising(depth: int, device: torch.device) -> Tensor:
    return torch.arange(1, depth + 1, dtype=torch.float64, device=device)
