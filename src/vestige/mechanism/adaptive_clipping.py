"""Which bound suits the gradients? Clips that follow what was released: quantiles, normalisation, importance."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import exp, inf
from typing import Literal

import torch
from torch import Tensor

from vestige.checks import check_bound
from vestige.layout import Layout
from vestige.mechanism.clipping import Clip, ClipState, Coins, FixedClip, Value, within
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import Release


@dataclass(frozen=True)
class Automatic(FixedClip):
    """Every gradient is rescaled to norm just below `bound`: bound / (norm + stability) (Bu et al. 2023, AUTO-S).

    Formal guarantees: adding or removing one example moves the sum by less than `bound` in the 2-norm.
    """

    bound: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if not self.stability >= 0:
            raise ValueError(f"stability={self.stability} must not be negative")

    def factors(self, norms: Tensor) -> Tensor:
        whole = torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
        return torch.where(whole > 0, self.bound / (whole + self.stability), 0.0).expand_as(norms)

    def sensitivity(self, layout: Layout) -> float:
        return self.bound

    def with_bound(self, bound: float) -> Automatic:
        return replace(self, bound=bound)

    @property
    def recording(self) -> Hashable:
        return self


# --- clips that learn ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted(FixedClip):
    """A flat clip that also counts, on the same sample, its unclipped examples: 1[norm <= bound] - 1/2 each.

    `count_noise` is the standard deviation of the count's noise in examples; "auto" is a twentieth of the expected
    batch (Andrew et al. 2021), but at least twice the noise multiplier, so that the gradient's noise grows by 3% at
    most. Infinite noise means that nothing is counted.

    Formal guarantees: one example moves the sum by at most `bound` and the centred count by 1/2, both on one sample, so
    the joint release has multiplier z with z^-2 = gradient_multiplier^-2 + (2 count_noise)^-2.
    """

    bound: Value
    count_noise: float | Literal["auto"] = "auto"

    def factors(self, norms: Tensor) -> Tensor:
        return within(self.bound, norms)

    def sensitivity(self, layout: Layout) -> Value:
        return self.bound

    def count_deviation(self, multiplier: float, expected_batch: float) -> float:
        return max(expected_batch / 20, 2 * multiplier) if self.count_noise == "auto" else self.count_noise

    def gradient_multiplier(self, multiplier: float, expected_batch: float) -> float:
        """The gradient's own noise multiplier when the joint release has this one."""
        deviation = self.count_deviation(multiplier, expected_batch)
        if deviation == inf or multiplier == 0:
            return multiplier
        if not 2 * deviation > multiplier:
            raise ValueError(
                f"count_noise={deviation} must exceed half the noise multiplier {multiplier:.4g}: the count alone "
                "would cost more than the step may"
            )
        return float((multiplier**-2 - (2 * deviation) ** -2) ** -0.5)

    @property
    def recording(self) -> Hashable:
        return "flat"

    @property
    def flat_bound(self) -> Value:
        return self.bound


def centred_count(bound: Value, norms: Tensor) -> Tensor:
    """SENSITIVE: the number of examples within a flat bound minus half of all, [..., examples, groups] -> [...].

    Non-finite ones contribute zero, as in the sum.
    """
    whole = torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
    return torch.where(whole.isfinite(), (whole <= bound).double() - 0.5, 0.0).sum(dim=(-2, -1))


def unclipped_fraction(noised_count: Value, expected_batch: float) -> Value:
    """The fraction of unclipped examples, from the noised centred count and public numbers."""
    return _clamped(noised_count / expected_batch + 0.5, 0.0, 1.0)


@dataclass(frozen=True)
class Quantile(FixedClip):
    """The bound moves towards the `target` quantile of the norms: bound *= exp(-speed * (fraction - target)).

    The fraction of examples left unclipped is released with noise (Andrew et al. 2021; see `Counted`). With
    `steady_steps` the learning rate is divided by the bound's growth, so that a step keeps its length; without it, the
    rate is constant, as published.
    """

    start: float = 0.1
    target: float = 0.5
    speed: float = 0.2
    count_noise: float | Literal["auto"] = "auto"
    lowest: float = 1e-6
    highest: float = 1e6
    steady_steps: bool = True
    adaptive = True

    def __post_init__(self) -> None:
        check_bound(self.lowest, "lowest")
        check_bound(self.highest, "highest")
        if not self.lowest <= self.start <= self.highest:
            raise ValueError(f"start={self.start} must be positive and lie in [{self.lowest}, {self.highest}]")
        if not 0 < self.target < 1:
            raise ValueError(f"target={self.target} must lie in (0, 1): the fraction of examples to leave unclipped")
        if not self.speed >= 0:
            raise ValueError(f"speed={self.speed} must not be negative")
        if self.count_noise != "auto" and not self.count_noise > 0:
            raise ValueError(f"count_noise={self.count_noise} must be positive, or 'auto'")

    def factors(self, norms: Tensor) -> Tensor:
        return within(self.start, norms)

    def sensitivity(self, layout: Layout) -> float:
        """That of the initial bound; later bounds are in the state."""
        return self.start

    def init(self) -> ClipState:
        return {"bound": self.start}

    def now(self, state: ClipState) -> Clip:
        return Counted(state["bound"], self.count_noise)

    def pace(self, state: ClipState) -> Value:
        return self.start / state["bound"] if self.steady_steps else 1.0

    def learn(self, fraction: Value | None, state: ClipState) -> ClipState:
        if fraction is None:
            return state
        moved = state["bound"] * _exp(-self.speed * (fraction - self.target))
        return {**state, "bound": _clamped(moved, self.lowest, self.highest)}

    def shown(self, state: ClipState) -> dict[str, Value]:
        return {"clip": state["bound"]}


@dataclass(frozen=True)
class Paced(FixedClip):
    """A quantile clip whose released fraction also steers the learning rate (DP-Adam-AC in its valid form).

    If a smaller fraction than `few` is clipped the rate grows by 1%, if a larger one than `many` it shrinks by 0.5%,
    within [slowest, fastest].
    """

    clip: Quantile
    few: float = 0.1
    many: float = 0.3
    slowest: float = 0.1
    fastest: float = 2.0
    adaptive = True

    def factors(self, norms: Tensor) -> Tensor:
        return self.clip.factors(norms)

    def sensitivity(self, layout: Layout) -> float:
        return self.clip.sensitivity(layout)

    def init(self) -> ClipState:
        return {**self.clip.init(), "pace": 1.0}

    def now(self, state: ClipState) -> Clip:
        return self.clip.now(state)

    def pace(self, state: ClipState) -> Value:
        return state["pace"]  # type: ignore[no-any-return]

    def learn(self, fraction: Value | None, state: ClipState) -> ClipState:
        state = self.clip.learn(fraction, state)
        if fraction is None:
            return state
        clipped, pace = 1 - fraction, state["pace"]
        slower = _chosen(clipped > self.many, _clamped(pace * 0.995, self.slowest, self.fastest), pace)
        faster = _clamped(pace * 1.01, self.slowest, self.fastest)
        return {**state, "pace": _chosen(clipped < self.few, faster, slower)}

    def shown(self, state: ClipState) -> dict[str, Value]:
        return self.clip.shown(state)


# --- geometry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(FixedClip):
    """Each example's gradient, its groups divided by their `scales`, is scaled to norm at most `bound`.

    Formal guarantees: adding or removing one example moves the sum, divided by the scales, by at most `bound` in the
    2-norm. Noise of z * bound * scale on the coordinates of each group is noise of z * bound on that: one Gaussian
    mechanism with multiplier z. The scales are public: they follow from earlier releases.
    """

    bound: float
    scales: tuple[float, ...] = ()
    """One for each group; none: all are 1, and this is a flat clip."""

    def factors(self, norms: Tensor) -> Tensor:
        return within(self.bound, norms / norms.new_tensor(self.scales) if self.scales else norms)

    def sensitivity(self, layout: Layout) -> float | Tensor:
        if not self.scales:
            return self.bound
        return layout.expand(self.bound * torch.tensor(self.scales, dtype=torch.float64)).float()


@dataclass(frozen=True)
class Geometric(FixedClip):
    """Scales that follow the releases (GeoClip, Gilani et al. 2025, with one scale per group and no centre).

    s_g is proportional to (E|g_g|^2 / d_g)^(1/4), which minimises the noise, sum_g d_g s_g^2, at a given expected norm
    of the scaled gradient. The moment is a running mean of |release|^2 less the noise's own share, and at least
    `FLOOR` of that: where no signal shows, scales drift back to one another. They are normalised so that the noise has
    the energy of flat clipping at `bound`.
    """

    bound: float = 1.0
    smoothing: float = 0.1
    spread: float = 10.0
    adaptive = True
    stackable = shardable = False

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing={self.smoothing} must lie in [0, 1]")
        if not 1 <= self.spread < inf:
            raise ValueError(f"spread={self.spread} must be at least 1")

    def factors(self, norms: Tensor) -> Tensor:
        return within(self.bound, norms)

    def sensitivity(self, layout: Layout) -> float:
        """That of the first step; later ones follow from the state."""
        return self.bound

    def init(self) -> ClipState:
        return {"steps": 0, "moments": [], "scales": []}

    def now(self, state: ClipState) -> Clip:
        return Scaled(self.bound, tuple(state["scales"]))

    def heard(self, release: Release, layout: Layout, state: ClipState) -> ClipState:
        if not self.smoothing or layout.groups == 1:
            return state
        noise = release.noise_std
        variance = noise.square() if isinstance(noise, Tensor) else release.total.new_tensor(noise**2)
        squares = torch.stack([release.total.square(), variance.expand_as(release.total)]).double()
        sizes = torch.tensor(layout.group_sizes, dtype=torch.float64)
        seen, own = (layout.summed(squares).cpu() / sizes).unbind()
        before = torch.tensor(state["moments"] or [0.0] * layout.groups, dtype=torch.float64)
        moments = before.lerp(seen - own, self.smoothing)
        unbiased = moments / (1 - (1 - self.smoothing) ** (state["steps"] + 1))
        scales = self._normalised(torch.maximum(unbiased, FLOOR * own) ** 0.25, sizes)
        scales = self._normalised(scales.clamp(1 / self.spread, self.spread), sizes)
        return {"steps": state["steps"] + 1, "moments": moments.tolist(), "scales": scales.tolist()}

    @staticmethod
    def _normalised(scales: Tensor, sizes: Tensor) -> Tensor:
        return scales * (sizes.sum() / (sizes @ scales.square())).sqrt()

    def with_bound(self, bound: float) -> Geometric:
        return replace(self, bound=bound)


FLOOR = 0.01
"""The least second moment of a layer, in units of the noise's."""


# Arithmetic that torch and Python write differently: on one number, or on one for each run of a stack.


def _exp(value: Value) -> Value:
    return value.exp() if isinstance(value, Tensor) else exp(value)


def _clamped(value: Value, low: float, high: float) -> Value:
    return value.clamp(low, high) if isinstance(value, Tensor) else min(high, max(low, value))


def _chosen(holds: bool | Tensor, then: Value, otherwise: Value) -> Value:
    return torch.where(holds, then, otherwise) if isinstance(holds, Tensor) else (then if holds else otherwise)


# --- importance sampling ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thinned(FixedClip):
    """Candidates stay with probability `keep * min(norm, bound)` and then contribute a vector of norm exactly `scale`.

    Formal guarantees: given `keep` and `scale`, which are public, an example affects only its own presence. It is
    present with probability at most the candidates' rate, and moves the sum by `scale` or not at all.
    """

    bound: float
    keep: float
    scale: float
    coins: Stream | None = None
    stackable = shardable = False

    def drawn(self, coins: Coins) -> Thinned:
        return replace(self, coins=coins())

    def factors(self, norms: Tensor) -> Tensor:
        assert self.coins is not None, "a thinned clip is drawn by the curator"
        whole = torch.linalg.vector_norm(norms, dim=1, keepdim=True)
        tosses = torch.from_numpy(self.coins.random((len(norms), 1))).to(whole.device)
        stays = tosses < self.keep * whole.clamp(max=self.bound)
        return torch.where(stays & (whole > 0), self.scale / whole, 0.0).expand_as(norms)

    def sensitivity(self, layout: Layout) -> float:
        return self.scale
