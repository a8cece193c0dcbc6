"""How are features brought to one scale without giving them away? Two noised moments, asked before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vestige.models import Standardise, channel_moments
from vestige.questions import Gaussian, Question


@dataclass(frozen=True)
class PrivateMoments:
    """Each channel's mean and mean square over all examples, clipped per example and noised, as DPSGD-HF asks them.

    `bounds` are public constants: the norms to which one example's vectors of means and mean squares are scaled.

    Formal guarantees: two Gaussian mechanisms with noise multiplier `multiplier`, charged before step 0.
    """

    multiplier: float = 8.0
    bounds: tuple[float, float] = (2.5, 2.5)

    def __post_init__(self) -> None:
        if not self.multiplier > 0:
            raise ValueError(f"moments_noise={self.multiplier} must be positive")
        if not min(self.bounds) > 0:
            raise ValueError(f"moments_bound={min(self.bounds)} must be positive: it bounds one example's influence")

    @property
    def questions(self) -> tuple[Question, ...]:
        return (Gaussian(self.multiplier),) * 2

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        """SENSITIVE: the bounded sums over a batch, [2, channels]."""
        return channel_moments(batch[0], self.bounds)[0]


def with_moments(model: nn.Module) -> nn.Module:
    """The model with room for released moments where it had a data-free normalisation of its inputs."""
    modules = list(model) if isinstance(model, nn.Sequential) else []
    first = modules[0] if modules else None
    if not isinstance(first, nn.GroupNorm):
        raise ValueError("normalise='private' replaces the normalisation of scattering features: use a task of *-hf")
    unknown = torch.zeros(first.num_channels)
    return nn.Sequential(Standardise(unknown, unknown + 1), *modules[1:])


def fill(model: nn.Module, totals: Tensor, count: float) -> None:
    """Put released moments where `with_moments` left room: post-processing."""
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], Standardise)
    known = Standardise.from_moments(totals, count)
    model[0].mean.copy_(known.mean)
    model[0].variance.copy_(known.variance)
