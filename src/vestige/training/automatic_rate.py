"""Which learning rate needs no tuning? A rule that sees no data, so it costs no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from vestige.layout import Layout

LARGEST = 2.0**63
"""The square of this and of what is above is not a float32."""
WALK = 3.0
"""How far the noise alone may walk, in norms of the initial weights; the best value was 1.8 to 4.8 in 38 settings.

Where steps are balanced the norm is that of what is trained in the weights' place, and the best was 1.4 to 4 in 168
settings, the larger ones on SVHN."""


@dataclass(frozen=True)
class AutoRate:
    """The chosen rate, with the public numbers it was computed from."""

    lr: float
    weight_norm: float
    noise_norm: float
    steps: int
    gain: float
    scale_free: bool
    walk: float
    balanced: bool = False

    def __str__(self) -> str:
        walk = f"sqrt({self.steps} steps)" if self.walk == sqrt(self.steps) else f"walk {self.walk:.4g}"
        norms, start = WALK, "|V0|" if self.balanced else "|W0|"
        if self.scale_free:
            return (
                f"lr auto: {norms:g} * {start} / (sqrt(d) * {walk} * gain), {start} = {self.weight_norm:.4g}, "
                f"sqrt(d) = {self.noise_norm:.4g}, gain = {self.gain:.3g} -> {self.lr:.4g}"
            )
        return (
            f"lr auto: {norms:g} * {start} / (noise * {walk} * gain), {start} = {self.weight_norm:.4g}, "
            f"noise of a mean gradient = {self.noise_norm:.4g}, gain = {self.gain:.3g} -> {self.lr:.4g}"
        )


def auto_rate(
    *,
    weight_norm: float,
    noise_norm: float,
    size: int,
    steps: int,
    gain: float,
    scale_free: bool,
    walk: float | None = None,
    balanced: bool = False,
) -> AutoRate:
    """The rate at which the noise alone walks `WALK` norms of the initial weights in `steps` steps; where steps are
    `balanced`, norms of V0 = W0 / a.

    `noise_norm` is the norm of the noise in one mean gradient, nu * sqrt(d); `gain` is how much the memory and the rule
    amplify a constant gradient; `walk` is how many steps' worth of noise adds up, sqrt(steps) unless the noise changes
    or is correlated. A scale-free rule (Adam) moves every coordinate by about lr whatever the noise.
    """
    per_step = (sqrt(size) if scale_free else noise_norm) * gain
    if per_step <= 0:
        raise ValueError("lr='auto' needs noise to balance against: the noise multiplier is 0; give lr a number")
    length = sqrt(steps) if walk is None or scale_free else walk
    lr = WALK * weight_norm / (per_step * length)
    noise = sqrt(size) if scale_free else noise_norm
    return AutoRate(lr, weight_norm, noise, steps, gain, scale_free, length, balanced)


def initial_weight_norm(model: nn.Module, layout: Layout) -> float:
    """The norm of the trainable weights of two or more dimensions, W / a where steps are balanced; biases and the gains
    of norm layers don't count."""
    parameters = layout.parameters(model)
    each = [(parameters[s.name].detach(), s.scale) for s in layout.segments if len(s.shape) >= 2]
    squares = [(torch.linalg.vector_norm(weight, dtype=torch.float64) / scale).square() for weight, scale in each]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    if norm == 0:
        raise ValueError(
            "lr='auto' measures steps against the initial weights, and these are all zero; give lr a number"
        )
    if not norm < LARGEST:
        raise ValueError(
            f"lr='auto' measures steps against the initial weights, whose norm is {norm:.3g}: that is more than "
            "float32 can train; initialise them, or load them again"
        )
    return norm
