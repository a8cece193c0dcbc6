"""Which parameters are evaluated and kept? The last ones, or an average of all: free, since it is post-processing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vestige.layout import Layout

AverageState = dict[str, Any]


class Average(Protocol):
    @property
    def copies(self) -> float:
        """Extra state, in copies of the parameters."""
        ...

    def weight(self, step: int) -> float:
        """How far the average moves towards the parameters after step `step` (counted from 0)."""
        ...


@dataclass(frozen=True)
class Last:
    """No average: the parameters as they are."""

    copies = 0.0

    def weight(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class ExponentialAverage:
    """An exponential moving average with warm-up: its decay is min(decay, (1 + t) / (10 + t)) (De et al. 2022)."""

    decay: float = 0.999
    copies = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay} must lie in [0, 1)")

    def weight(self, step: int) -> float:
        return 1 - min(self.decay, (1 + step) / (10 + step))


@dataclass(frozen=True)
class Polyak:
    """The plain mean of the parameters after every step from the first on (Polyak & Juditsky 1992)."""

    copies = 1.0

    def weight(self, step: int) -> float:
        return 1 / (step + 1)


AVERAGES: dict[str, Average] = {"last": Last(), "ema": ExponentialAverage(), "polyak": Polyak()}


def named(average: str) -> Average:
    """An average as the command line names it; `ema:0.9999` is one with that decay."""
    name, colon, decay = average.partition(":")
    if name == "ema" and colon:
        try:
            return ExponentialAverage(float(decay))
        except ValueError:
            raise ValueError(f"average={average!r}: the decay must be a number in [0, 1), such as ema:0.9999") from None
    if average not in AVERAGES:
        raise ValueError(f"average={average!r} is unknown; choose from {', '.join(AVERAGES)}")
    return AVERAGES[average]


def start(
    average: Average, layout: Layout, parameters: Mapping[str, Tensor], lead: tuple[int, ...] = ()
) -> AverageState:
    """The average before the first step: the initial parameters, [*lead, size]."""
    return {"mean": layout.pack(parameters, lead)} if average.copies else {}


@torch.no_grad()
def update(average: Average, state: AverageState, layout: Layout, parameters: Mapping[str, Tensor], step: int) -> None:
    """Move the average, in place, towards the parameters after a step."""
    if state:
        weight = average.weight(step)
        for name, mean in layout.views(state["mean"]).items():
            mean.lerp_(parameters[name].detach(), weight)
