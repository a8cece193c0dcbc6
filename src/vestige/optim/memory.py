"""What do past releases add to the fresh one? Causal filters over releases; none of them may see data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from vestige.checks import require
from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters
from vestige.optim.window import Ring, at_once, fused, recall, tempered
from vestige.randomness.sum_and_release_types import Release

MemoryState = dict[str, Any]
"""Tensors and integers only, so that it can be checkpointed and rewound."""
HISTORIES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Filtered(NamedTuple):
    """The direction to step on (in the scale of a sum), the memory after it, and diagnostics (all from releases).

    The direction may be a view of the memory: valid until the next step, and never to be written to.
    """

    direction: Tensor
    state: MemoryState
    diagnostics: dict[str, Tensor]


class Memory(Protocol):
    stackable: bool
    """Whether it works along the last axis, so that it can filter a stack of runs at once."""
    shardable: bool
    """Whether processes that have parts of a release each can filter them; it then completes its sums over coordinates
    by `Release.totalled`."""
    knows_noise: bool
    """Whether it can compute how much noise its direction carries, for rules that use it."""

    def init(self, layout: Layout, device: torch.device) -> MemoryState: ...

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        """Filter one release, given the parameters where it was taken. The given state may be updated in place."""
        ...

    @property
    def fresh_share(self) -> float:
        """The factor of the fresh sum in the paper's own release: its sigma is this times the accounted one."""
        ...

    @property
    def steady_gain(self) -> float:
        """The filter's gain on a constant input."""
        ...

    @property
    def copies(self) -> float:
        """Extra state, in copies of the parameters."""
        ...

    def noise_std(self, release: Release, state: MemoryState) -> float | Tensor:
        """The standard deviation per coordinate of the noise in the direction, after the step that filtered this
        release; only where `knows_noise`."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A memory that can begin a step before its release is there."""

    def prepare(self, state: MemoryState, parameters: Parameters, sample_rate: float) -> None:
        """Start to compute what the next step needs of the parameters, which stay as they are until it is made."""
        ...


def unknown_noise(self: object, release: Release, state: MemoryState) -> float | Tensor:
    raise AssertionError("this memory does not know the noise in its direction; Method refuses rules that ask")


@dataclass(frozen=True)
class Identity:
    """No memory: plain DP-SGD."""

    stackable = knows_noise = shardable = True
    fresh_share = 1.0
    steady_gain = 1.0
    copies = 0.0

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        return {}

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        return Filtered(release.total, state, {})

    def noise_std(self, release: Release, state: MemoryState) -> float | Tensor:
        return release.noise_std


class Kernel(Protocol):
    """How much each past release weighs. Weights are positive and sum to one."""

    @property
    def smoothing(self) -> float | None:
        """The weight of the newest vector in the running trend; None if the kernel needs no trend."""
        ...

    @property
    def weigh_fused(self) -> Callable[[Ring, float], tuple[Tensor, Tensor, Tensor, Tensor]] | None:
        """`weigh` from the ring of a single run, where that can be had at once (see `at_once`): the weights, their mean
        lag, the confidence and the norm of the trend."""
        ...

    def weigh(
        self, lags: Tensor, distances: Tensor, trend_norm: Tensor, noise_norm: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights over the lags (last axis), and the confidence in the trend.

        `distances` are the norms of (past - trend), `noise_norm` that of the noise in one remembered release.
        """
        ...

    def in_unit(self, unit: float) -> Kernel:
        """The same kernel over vectors that are `unit` times as long."""
        ...


def _without_lengths(self: Kernel, unit: float) -> Kernel:
    """For a kernel that has no length of its own."""
    return self


@dataclass(frozen=True)
class UniformWeights:
    """Equal weights (the ablation of FO-DP-SGD's equation 24)."""

    smoothing = weigh_fused = None
    in_unit = _without_lengths

    def weigh(
        self, lags: Tensor, distances: Tensor, trend_norm: Tensor, noise_norm: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.full_like(lags, 1.0) / lags.shape[-1], torch.zeros_like(trend_norm)


@dataclass(frozen=True)
class ExponentialWeights:
    """Geometric weights decay**(lag - 1) (the ablation of FO-DP-SGD's equation 26)."""

    decay: float = 0.8
    smoothing = weigh_fused = None
    in_unit = _without_lengths

    def __post_init__(self) -> None:
        require("decay", self.decay, 0 < self.decay < 1, "lie in (0, 1)")

    def weigh(
        self, lags: Tensor, distances: Tensor, trend_norm: Tensor, noise_norm: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        raw = self.decay ** (lags - 1)
        return raw / raw.sum(-1, keepdim=True), torch.zeros_like(trend_norm)


@dataclass(frozen=True)
class FractionalWeights:
    """The tempered power law of FO-DP-SGD (equations 4 to 8): (lag+1)^(order-1) * exp(-(tempering) * lag).

    The tempering is `baseline + confidence * inconsistency * distance`, where distance compares a past release with
    the running trend and confidence compares the trend with `floor`. `floor="auto"` is the norm that pure noise would
    give the trend, so that confidence says whether the trend stands out from its own noise.
    """

    order: float = 0.8
    baseline: float = 0.01
    inconsistency: float = 0.1
    smallest_scale: float = 1e-6
    floor: float | Literal["auto"] = "auto"
    smoothing: float = 0.2

    def __post_init__(self) -> None:
        require("order", self.order, 0 < self.order <= 1, "lie in (0, 1]")
        require("baseline", self.baseline, self.baseline >= 0, "be at least 0")
        require("inconsistency", self.inconsistency, self.inconsistency >= 0, "be at least 0")
        require("smallest_scale", self.smallest_scale, self.smallest_scale > 0, "be positive")
        require("smoothing", self.smoothing, 0 < self.smoothing <= 1, "lie in (0, 1]")
        if self.floor != "auto":
            require(
                "floor", self.floor, isinstance(self.floor, int | float) and self.floor > 0, "be positive or 'auto'"
            )

    def weigh(
        self, lags: Tensor, distances: Tensor, trend_norm: Tensor, noise_norm: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        floor = self._floor(noise_norm)
        confidence = trend_norm / (trend_norm + floor).clamp(min=1e-300)
        pull = confidence * self.inconsistency / (trend_norm.clamp(min=self.smallest_scale) + 1e-12)
        prior = torch.sub((self.order - 1) * torch.log1p(lags), lags, alpha=self.baseline)
        return torch.softmax(torch.addcmul(prior, pull[..., None] * distances, lags, value=-1), dim=-1), confidence

    def weigh_fused(self, ring: Ring, noise_norm: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Kernel.weigh_fused`: one launch on a GPU, a few numbers in Python on a CPU."""
        floor = float(self._floor(noise_norm))
        constants = self.order, self.baseline, self.inconsistency, self.smallest_scale, floor
        if not fused(ring):
            return tempered(ring, *map(float, constants))
        from vestige.optim import triton_recall

        return triton_recall.tempered(ring, *map(float, constants))

    def in_unit(self, unit: float) -> FractionalWeights:
        floor = self.floor if self.floor == "auto" else self.floor * unit
        return replace(self, smallest_scale=self.smallest_scale * unit, floor=floor)

    def _floor(self, noise_norm: float | Tensor) -> float | Tensor:
        return noise_norm * (self.smoothing / (2 - self.smoothing)) ** 0.5 if self.floor == "auto" else self.floor


@dataclass(frozen=True)
class Blend:
    """fresh_weight * fresh + (1 - fresh_weight) * (weighted mean of the last `window - 1` remembered vectors).

    What is remembered decides the filter: the blends themselves (a recursive filter: FO-DP-SGD), or the fresh releases
    (a finite one: Post-FM). At fresh_weight 1 the output is the fresh release, bit for bit. FO-DP-SGD compares sums,
    Post-FM mean gradients (equation 13), so that the lengths its kernel is given are those of means.

    A step reads the window once (see `recall`): its weights come from inner products that the last step computed.
    `history="bfloat16"` keeps the window in half the bytes; the trend, the direction and all sums stay in float32.

    With `final_weight` the fresh weight goes there from `fresh_weight`, by the same amount after each of `epochs`
    epochs. Which weight a step has follows from its number alone.

    Formal guarantees: none needed, with or without a schedule. The noise that was priced is in the fresh release, and
    what is made of it, by a weight that is public, is post-processing.
    """

    kernel: Kernel = field(default_factory=FractionalWeights)
    fresh_weight: float = 0.9
    window: int = 8
    remembers: Literal["blend", "fresh"] = "blend"
    history: Literal["float32", "bfloat16"] = "float32"
    final_weight: float | None = None
    epochs: int = 100
    stackable = shardable = True
    knows_noise = False
    noise_std = unknown_noise

    def __post_init__(self) -> None:
        require("fresh_weight", self.fresh_weight, 0 < self.fresh_weight <= 1, "lie in (0, 1]")
        if self.final_weight is not None:
            require("final_weight", self.final_weight, 0 < self.final_weight <= 1, "lie in (0, 1]")
            if self.window == 1:
                raise ValueError(
                    f"final_weight={self.final_weight} without a window only scales steps: give a window of 2 or more, "
                    "or a learning rate schedule"
                )
        require("epochs", self.epochs, isinstance(self.epochs, int) and self.epochs >= 1, "be a whole number from 1 up")
        require("window", self.window, isinstance(self.window, int) and self.window >= 1, "be a whole number from 1 up")
        require("history", self.history, self.history in HISTORIES, f"be {' or '.join(HISTORIES)}")

    @property
    def fresh_share(self) -> float:
        """Of a schedule the smallest; `share_at` has that of a step."""
        least = min(self.fresh_weight, 1.0 if self.final_weight is None else self.final_weight)
        return least if self.remembers == "blend" else 1.0

    def share_at(self, step: int, sample_rate: float) -> float:
        return self.weight_at(step, sample_rate) if self.remembers == "blend" else 1.0

    def weight_at(self, step: int, sample_rate: float) -> float:
        """The fresh weight of a step."""
        if self.final_weight is None:
            return self.fresh_weight
        done = min(1.0, step // max(1, round(1 / sample_rate)) / self.epochs)
        return self.fresh_weight + done * (self.final_weight - self.fresh_weight)

    @property
    def steady_gain(self) -> float:
        return 1.0 if self.window > 1 else self.fresh_weight

    @property
    def copies(self) -> float:
        if self.window == 1:
            return 0.0
        rows = (self.window - 1) * HISTORIES[self.history].itemsize / 4
        return rows + self._follows_trend + (not self._steps_on_a_row)

    @property
    def _follows_trend(self) -> bool:
        return self.kernel.smoothing is not None

    @property
    def _steps_on_a_row(self) -> bool:
        """Whether the remembered vector is the direction itself, bit for bit: then it is written once."""
        return self.remembers == "blend" and self.history == "float32"

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        depth = self.window - 1
        if not depth:
            return {}
        zeros = partial(torch.zeros, device=device)
        # On a GPU rows are padded to a multiple of 64 numbers, so that loads are vectorised whatever the size.
        width = layout.size if device.type == "cpu" else -(-layout.size // 64) * 64
        state: MemoryState = {"count": 0, "past": zeros(depth, width, dtype=HISTORIES[self.history])}
        if not self._steps_on_a_row:
            state["blend"] = zeros(layout.size)
        if self._follows_trend:
            state["trend"] = zeros(layout.size)
            state["squares"] = zeros(depth, dtype=torch.float64)
            state["products"] = zeros(depth + 1, dtype=torch.float64)
        return state

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        fresh = release.total
        if self.window == 1:
            return Filtered(fresh * self.fresh_weight, state, {})
        past = state["past"][..., : fresh.shape[-1]]
        totalled = None if release.divided is None else release.divided.total
        ring = Ring(past, state["count"], state.get("trend"), state.get("squares"), state.get("products"), totalled)
        share = self.weight_at(ring.count, release.sample_rate)
        weights, seen = self._weigh(release, ring, self.share_at(ring.count, release.sample_rate))
        if self.final_weight is not None:
            seen["fresh_weight"] = torch.tensor(share, dtype=torch.float64).expand(fresh.shape[:-1])
        blend = past[..., ring.slot, :] if self._steps_on_a_row else state["blend"]
        pace = (self.kernel.smoothing or 0.0) if ring.count else 1.0
        memory_share = recall(ring, fresh, weights, blend, share, pace, fresh if self.remembers == "fresh" else blend)
        state["count"] += 1
        return Filtered(blend, state, {**seen, "memory_share": memory_share} if ring.count else {})

    def _weigh(self, release: Release, ring: Ring, share: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights over the lags 1, 2, ..., and their diagnostics."""
        lead = ring.past.shape[:-2]
        if not self._follows_trend:
            lags, nothing = ring.lags, torch.zeros(lead, dtype=torch.float64, device=ring.past.device)
            weights, _ = self.kernel.weigh(lags, nothing[..., None], nothing, 0.0)
            weights = weights.expand(*lead, len(lags))
            return weights, {"weights": weights, "effective_depth": weights @ lags}
        noise_norm = release.noise_norm * share
        kernel = self.kernel if self.remembers == "blend" else self.kernel.in_unit(release.expected_batch)
        if at_once(ring) and kernel.weigh_fused is not None and isinstance(noise_norm, float):
            weights, depth, confidence, trend_norm = kernel.weigh_fused(ring, noise_norm)
        else:
            trend_norm, distances = ring.compared()
            weights, confidence = kernel.weigh(ring.lags, distances, trend_norm, noise_norm)
            depth = weights @ ring.lags
        numbers = {"confidence": confidence, "trend_norm": trend_norm}
        return weights, {"weights": weights, "effective_depth": depth, **numbers}
