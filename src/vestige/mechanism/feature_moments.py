"""How are features standardised privately? By two noised moments, asked for before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vestige.priced_questions import Gaussian, Question


class FirstSums(Protocol):
    """Sums of bounded rows over all examples, which a run asks for before its first step; its repr is public."""

    @property
    def multiplier(self) -> float: ...

    @property
    def bounds(self) -> tuple[float, ...]:
        """By how much one example moves each of the sums, at most: each is a question."""
        ...

    @property
    def questions(self) -> tuple[Question, ...]: ...

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        """SENSITIVE: the sums over a batch, [sums, ...]."""
        ...

    def receive(self, model: nn.Module, totals: Tensor, count: float) -> None:
        """Make use of the noised sums over so many examples: post-processing."""
        ...


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
            raise ValueError(f"multiplier={self.multiplier} must be positive")
        if not min(self.bounds) > 0:
            raise ValueError(f"bounds={min(self.bounds)} must be positive: it bounds one example's influence")

    @property
    def questions(self) -> tuple[Question, ...]:
        return (Gaussian(self.multiplier),) * 2

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        """SENSITIVE: the bounded sums over a batch, [2, channels]."""
        return channel_moments(batch[0], self.bounds)[0]

    def receive(self, model: nn.Module, totals: Tensor, count: float) -> None:
        fill(model, totals, count)


def with_moments(model: nn.Module) -> nn.Module:
    """The model with a place for released moments instead of its data-free normalisation of inputs."""
    modules = list(model) if isinstance(model, nn.Sequential) else []
    first = modules[0] if modules else None
    if not isinstance(first, nn.GroupNorm):
        raise ValueError(
            "normalise='private' replaces the normalisation of scattering features: use a task of *-hf, or an "
            "nn.Sequential that begins with a GroupNorm"
        )
    unknown = torch.zeros(first.num_channels)
    return nn.Sequential(Standardise(unknown, unknown + 1), *modules[1:])


def fill(model: nn.Module, totals: Tensor, count: float) -> None:
    """Put released moments into the place that `with_moments` made: post-processing."""
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], Standardise)
    known = Standardise.from_moments(totals, count)
    model[0].mean.copy_(known.mean)
    model[0].variance.copy_(known.variance)


class Standardise(nn.Module):
    """Channels shifted and scaled by fixed statistics: those of a private release, or public ones."""

    mean: Tensor
    variance: Tensor

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean[:, None, None].float())
        self.register_buffer("variance", variance[:, None, None].float())

    @classmethod
    def from_moments(cls, totals: Tensor, count: float) -> Standardise:
        """From noised `channel_moments` and the public expected number of examples: post-processing."""
        mean, second = totals / count
        return cls(mean, (second - mean.square()).clamp(min=0.0))

    def forward(self, features: Tensor) -> Tensor:
        # a channel whose noised variance is not positive cannot be trusted: it is left out
        scaled = (features - self.mean) * torch.rsqrt(self.variance + 1e-5)
        return torch.where(self.variance > 0, scaled, 0.0)


def channel_moments(features: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, tuple[float, float]]:
    """SENSITIVE: sums over examples of each channel's mean and mean square, [2, channels], and their sensitivities.

    `features` is [examples, channels, height, width]; each example's two vectors are scaled to norm at most `bounds`,
    public constants. An example that is not finite contributes nothing.

    Formal guarantees: adding or removing one example moves row k by at most `bounds[k]` in the 2-norm, so noise of
    standard deviation `z * bounds[k]` on row k makes each row a Gaussian mechanism with noise multiplier z, and both
    together one with z / sqrt(2). The sums must be noised before anything is computed from them.
    """
    if min(bounds) <= 0:
        raise ValueError(f"bounds={bounds} must be positive: they bound one example's influence")
    moments = torch.stack([features.double().mean((-2, -1)), features.double().square().mean((-2, -1))])
    norms = torch.linalg.vector_norm(moments, dim=-1, keepdim=True)
    usable = norms.isfinite().all(dim=0, keepdim=True)
    factors = (torch.tensor(bounds, dtype=norms.dtype, device=norms.device)[:, None, None] / norms).clamp(max=1.0)
    return torch.where(usable, moments * factors, 0.0).sum(dim=1), bounds
