"""What signal do noisy releases carry? Linear filters, and a Kalman filter that knows the noise and finds its gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters
from vestige.optim.memory import Filtered, MemoryState
from vestige.randomness.sum_and_release_types import Release


@dataclass(frozen=True)
class LowPass:
    """A linear filter with bias correction (DOPPLER): sum_k a_k m_(t-k) = sum_k b_k y_(t-k), and then m_t / c_t.

    c_t is the filter's response to a constant 1, so a constant passes unchanged from the first step on. `feedback` is
    a_1, a_2, ...; `forward` is b_0, b_1, ... With no feedback and forward (1,) the output is the release, bit for bit.
    """

    feedback: tuple[float, ...] = (-0.9,)
    forward: tuple[float, ...] = (0.1,)
    stackable = knows_noise = shardable = True
    fresh_share = 1.0
    steady_gain = 1.0

    def __post_init__(self) -> None:
        if not self.forward or self.forward[0] == 0:
            raise ValueError(f"forward={self.forward} must begin with a coefficient other than 0")
        if sum(self.forward) == 0:
            raise ValueError(f"forward={self.forward} sums to 0: the filter removes a constant gradient")

    @property
    def copies(self) -> float:
        return max(len(self.feedback), len(self.forward) - 1)

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        order = int(self.copies)
        # One row per delay; then the same filter's response to a constant and to an impulse, and the impulse's energy.
        return {
            "delays": torch.zeros(order, layout.size, device=device),
            "constant": [0.0] * order,
            "impulse": [0.0] * order,
            "energy": 0.0,
            "gain": 1.0,
            "count": 0,
        }

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        correction, state["constant"] = self._advance(1.0, state["constant"])
        response, state["impulse"] = self._advance(0.0 if state["count"] else 1.0, state["impulse"])
        state["energy"] += response**2
        state["count"] += 1
        state["gain"] = state["energy"] ** 0.5 / abs(correction)
        filtered, delays = self._advance(release.total, state["delays"].unbind(-2))
        for kept, value in zip(state["delays"].unbind(-2), delays, strict=True):
            kept.copy_(value)
        return Filtered(filtered / correction, state, {})

    def noise_std(self, release: Release, state: MemoryState) -> float | Tensor:
        """Exact for constant noise; where it changes slowly, its newest size is taken for all that is averaged."""
        return release.noise_std * state["gain"]

    def _advance(self, fresh: Any, delays: Sequence[object]) -> tuple[Any, list[Any]]:
        """One step of the transposed direct form II, which needs the fewest delays; for numbers and vectors alike."""
        out = self.forward[0] * fresh
        if not delays:
            return out, []
        out = out + delays[0]
        values: list[object] = [*delays[1:], 0.0]
        for k, scale in enumerate(self.forward[1:]):
            values[k] = values[k] + scale * fresh
        for k, scale in enumerate(self.feedback):
            values[k] = values[k] - scale * out
        return out, values


SECOND_ORDER = LowPass((-1.98342955, 0.98549544), (1.6332e-4, 3.2665e-4, 1.6332e-4))
"""The narrow second-order filter of the authors' code: it averages about a hundred steps."""


@dataclass(frozen=True)
class Smoothed:
    """m_t = (1 - gain) m_(t-1) + gain y_t, starting from the first release: the filter of DiSK."""

    gain: float = 0.7
    stackable = knows_noise = shardable = True
    fresh_share = 1.0
    steady_gain = 1.0
    copies = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain={self.gain} must lie in (0, 1]: the share of the fresh release")

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        return {"mean": torch.zeros(layout.size, device=device), "variance": 0.0, "count": 0}

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        gain = self.gain if state["count"] else 1.0
        state["mean"].lerp_(release.total, gain)
        state["variance"] = (1 - gain) ** 2 * state["variance"] + gain**2 * _mean_square(release)
        state["count"] += 1
        return Filtered(state["mean"].clone(), state, {})

    def noise_std(self, release: Release, state: MemoryState) -> float | Tensor:
        return release.noise_std * (state["variance"] / (_mean_square(release) + 1e-300)) ** 0.5


@dataclass(frozen=True)
class SelfTuning:
    """A Kalman filter that knows the noise of its releases and learns from them how fast the signal moves.

    The model, per `scope` (the whole vector, or each parameter tensor): x_t = x_(t-1) + w_t, y_t = x_t + v_t, with v of
    the known variance R of the release's noise and w of unknown variance Q per coordinate. The prediction of y_t is
    off by e_t, E|e_t|^2 / d = m_t + R, and the error m_t obeys m_(t+1) = (1 - K_t)^2 m_t + K_t^2 R + Q whatever the
    gains K_t were. So Q is the mean of

        (|e_(t+1)|^2/d - R) - (1 - K_t)^2 (|e_t|^2/d - R) - K_t^2 R,

    an unbiased estimate at every step and an accurate one, because d is large. No weight, order or window is chosen;
    `horizon` only bounds how many steps back Q is averaged, since it may change. Without noise the gain is 1: the
    output is the releases themselves.
    """

    scope: Literal["whole", "tensor"] = "whole"
    horizon: int = 100
    stackable = knows_noise = True
    shardable = False
    fresh_share = 1.0
    steady_gain = 1.0
    copies = 1.0

    def __post_init__(self) -> None:
        if self.scope not in ("whole", "tensor"):
            raise ValueError(f"scope={self.scope!r} must be 'whole' or 'tensor'")
        if not (isinstance(self.horizon, int) and self.horizon >= 2):
            raise ValueError(f"horizon={self.horizon} must be a whole number of steps from 2 up")

    def init(self, layout: Layout, device: torch.device) -> MemoryState:
        lengths = [s.stop - s.start for s in layout.segments] if self.scope == "tensor" else [layout.size]
        zeros = torch.zeros(len(lengths), dtype=torch.float64, device=device)
        return {
            "lengths": lengths,
            "count": 0,
            "mean": torch.zeros(layout.size, device=device),
            "error": zeros.clone(),  # model variance of the estimate, per coordinate
            "excess": zeros.clone(),  # |e|^2 / d - R of the last step
            "gain": zeros.clone(),
            "speed": zeros.clone(),  # Q before it is clamped at 0
            "noise": zeros.clone(),  # variance of the noise in the estimate
        }

    def step(self, release: Release, state: MemoryState, parameters: Parameters) -> Filtered:
        pieces = release.total.split(state["lengths"], dim=-1)
        variance = _variances(release, state)
        if state["count"] == 0:
            state["mean"].copy_(release.total)
            state["error"], state["noise"], state["gain"] = variance, variance, torch.ones_like(variance)
            state["excess"] = torch.zeros_like(variance)  # there is no prediction before the first release
        else:
            self._correct(pieces, variance, state)
        state["count"] += 1
        diagnostics = {"gain": state["gain"].mean(-1), "speed": state["speed"].clamp(min=0).mean(-1)}
        return Filtered(state["mean"].clone(), state, diagnostics)

    def noise_std(self, release: Release, state: MemoryState) -> float | Tensor:
        return _expand(state["noise"].sqrt(), state)

    def _correct(self, pieces: tuple[Tensor, ...], variance: Tensor, state: MemoryState) -> None:
        means = state["mean"].split(state["lengths"], dim=-1)
        errors = [torch.linalg.vector_norm(y - x, dim=-1).double() for y, x in zip(pieces, means, strict=True)]
        squares = [e.square() / length for e, length in zip(errors, state["lengths"], strict=True)]
        excess = torch.stack(squares, dim=-1) - variance
        last = state["gain"]
        seen = excess - (1 - last).square() * state["excess"] - last.square() * variance
        state["speed"] = torch.lerp(state["speed"], seen, 1 / min(state["count"], self.horizon))
        state["excess"] = excess
        predicted = state["error"] + state["speed"].clamp(min=0)
        gain = torch.where(variance > 0, predicted / (predicted + variance), 1.0)
        for x, y, k in zip(means, pieces, gain.to(means[0].dtype).split(1, dim=-1), strict=True):
            x.lerp_(y, k)
        state["gain"], state["error"] = gain, (1 - gain) * predicted
        state["noise"] = (1 - gain).square() * state["noise"] + gain.square() * variance


def _mean_square(release: Release) -> float | Tensor:
    std = release.noise_std
    if not isinstance(std, Tensor):
        return float(std) ** 2
    if release.divided is not None:
        return release.totalled(std.double().square().sum(-1, keepdim=True)) / release.divided.size
    return std.double().square().mean(-1, keepdim=True)


def _variances(release: Release, state: MemoryState) -> Tensor:
    """The noise variance per coordinate, averaged over each scope."""
    std = release.noise_std
    if isinstance(std, Tensor) and std.shape[-1] == release.total.shape[-1]:
        pieces = std.split(state["lengths"], dim=-1)
        return torch.stack([piece.double().square().mean(-1) for piece in pieces], dim=-1)
    return torch.zeros_like(state["error"]) + std**2


def _expand(per_scope: Tensor, state: MemoryState) -> float | Tensor:
    if per_scope.shape == (1,):
        return float(per_scope)
    lengths = torch.tensor(state["lengths"], device=per_scope.device)
    return per_scope.float().repeat_interleave(lengths, dim=-1) if len(lengths) > 1 else per_scope
