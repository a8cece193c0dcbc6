"""How is a sum released so that its last bits reveal nothing? As whole steps of a public lattice, noise included.

The sum is rounded to the lattice, and a rounded Gaussian is added in integers. For an integer k, k + round(N) is
round(k + N): this is post-processing of the Gaussian mechanism on the rounded sum, whatever the data. Data and noise
never meet in a floating-point addition.
"""

from __future__ import annotations

from itertools import repeat
from math import ceil, log2, sqrt

import numpy as np
import torch
from torch import Tensor

from vestige.randomness import rounded_gaussian
from vestige.randomness.rounded_gaussian import STEPS
from vestige.randomness.streams import SecretStream, Stream
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tf32 import triton_available

ROUNDING = 2.0**-10
"""By how much more than its sensitivity a sum may move by rounding in float32; noise is made larger by as much."""
AT_ONCE = 1 << 16
"""Coordinates whose noise is added at once: few enough to stay near the processor."""


def charged(multiplier: float | Tensor, size: int) -> float | Tensor:
    """The noise multiplier that pays for rounding too: neighbouring sums of `size` coordinates, rounded to the lattice,
    differ by at most one step more in each."""
    return multiplier * (1 + ROUNDING + 1.01 * sqrt(size) * multiplier * 2.0**-STEPS)


def coarseness(multiplier: float) -> int:
    """Where there is next to no noise, steps are so many powers of two larger, so that sums stay within 64 bits. To
    round noise once more, to a coarser lattice that the sum lies on, is post-processing."""
    return max(0, ceil(-log2(multiplier)))


def add_noise(
    sensitive: BoundedSum, multiplier: float, stream: Stream, *, nonprivate_keep: bool = False
) -> tuple[float | Tensor, Tensor | None]:
    """Round a bounded sum to the lattice and add rounded noise, in place and once: the standard deviation per
    coordinate, and the noise if asked for.

    Formal guarantees: afterwards `sensitive.total` follows from the answer of a Gaussian mechanism with noise
    multiplier `multiplier`, but for a total variation of `rounded_gaussian.DISTANCE` per coordinate.
    """
    total, more = sensitive.total, coarseness(multiplier)
    std = sensitive.sensitivity * charged(multiplier, sensitive.size)
    noise = add_steps(total, std * 2.0 ** (more - STEPS), stream, more, nonprivate_keep=nonprivate_keep)
    return std, noise


def spacing_of(sensitive: BoundedSum, multiplier: float) -> float | Tensor:
    """The size of a step of the lattice that `add_noise` rounds to."""
    steps = 2.0 ** (coarseness(multiplier) - STEPS)
    return sensitive.sensitivity * charged(multiplier, sensitive.size) * steps


def rounded(total: Tensor, spacing: float | Tensor) -> Tensor:
    """SENSITIVE: a sum in whole steps. Integers add up exactly, in any order and over any number of processes."""
    return total.double().div(spacing).round().long()


def add_noise_to_steps(
    steps: Tensor, sensitive: BoundedSum, multiplier: float, stream: Stream
) -> tuple[Tensor, float | Tensor]:
    """`add_noise` for a sum that is in whole steps already, or a part of one: what is released, and the standard
    deviation per coordinate. `sensitive` says of which coordinates, and their sensitivities.

    Formal guarantees: as `add_noise`, for a sum of parts each of which was rounded to the lattice by itself, if adding
    or removing an example changes one of them.
    """
    more, spacing = coarseness(multiplier), spacing_of(sensitive, multiplier)
    cut, device = sensitive.cut, steps.device
    whole = cut is not None and cut.common
    count = cut.size if whole and cut is not None else len(steps)
    if steps.is_cuda and triton_available():
        from vestige.randomness import triton_lattice

        noise = _coarser(triton_lattice.draw(count, stream, device).long(), more)  # whole numbers, as float64
    else:
        noise = _drawn(torch.Size((count,)), stream, more).to(device)
    if whole and cut is not None:
        noise = cut.of(noise)
    return ((steps + noise).double() * spacing).float(), spacing * 2.0 ** (STEPS - more)


def add_steps(
    total: Tensor, spacing: float | Tensor, stream: Stream, more: int = 0, *, nonprivate_keep: bool = False
) -> Tensor | None:
    """The same for steps of this size: one for all coordinates, one for each, or one for each row."""
    if total.is_cuda and triton_available():
        from vestige.randomness import triton_lattice

        return triton_lattice.add(total, spacing, stream, more, keep=nonprivate_keep)
    steps = _drawn(total.shape, stream, more).to(total.device)
    spaced = isinstance(spacing, Tensor) and spacing.dim()
    sizes = spacing.expand(total.shape).reshape(-1).split(AT_ONCE) if spaced else repeat(spacing)  # type: ignore[union-attr]
    for part, own, size in zip(total.view(-1).split(AT_ONCE), steps.view(-1).split(AT_ONCE), sizes, strict=False):
        exact = part.double()
        whole = exact.div_(size).round_().long().add_(own)
        part.copy_(exact.copy_(whole).mul_(size))
    return (steps * spacing).to(total.dtype) if nonprivate_keep else None


def prepare(device: torch.device) -> None:
    """Compile what adds noise on a GPU, ahead of the first step: seconds, once for a machine."""
    if device.type == "cuda" and triton_available():
        add_steps(torch.zeros(1, device=device), 1.0, SecretStream(bytes(32)))


def noised(value: float, deviation: float, stream: Stream) -> float:
    """A number that one example moves by its sensitivity at most, with noise of this deviation: the same for one
    coordinate, of a noise multiplier near one or above."""
    spacing = deviation * (1 + ROUNDING) * 2.0**-STEPS
    return (round(value / spacing) + steps_of_one(stream)) * spacing


def steps_of_one(stream: Stream) -> int:
    """Noise of a deviation of 2^STEPS for one number, which the host has."""
    return int(rounded_gaussian.draw(1, stream)[0])


def _drawn(shape: torch.Size, stream: Stream, more: int) -> Tensor:
    steps = torch.from_numpy(np.ascontiguousarray(rounded_gaussian.draw(shape.numel(), stream)))
    return _coarser(steps, more).view(shape)


def _coarser(steps: Tensor, more: int) -> Tensor:
    """The same noise on a lattice whose steps are so many powers of two larger."""
    shift = min(more, 62)
    return (steps + (1 << (shift - 1))) >> shift if shift else steps
