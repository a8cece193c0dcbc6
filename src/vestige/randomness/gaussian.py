"""How does noise look in floating point? Standard normal numbers, and sums that they are added to as they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vestige.randomness import rounded_gaussian
from vestige.randomness.rounded_gaussian import STEPS
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tf32 import triton_available

PAIRS = 16384
"""Pairs of coordinates drawn at once on a CPU, few enough to stay near it. Reproducible runs depend on it."""


def fill_normal(into: Tensor, stream: Stream) -> Tensor:
    """Standard normal numbers in a float32 tensor on the CPU, by Box-Muller: twice as fast as NumPy's ziggurat.

    The radius comes of 53 bits, so it reaches sqrt(106 log 2) = 8.57; torch's own, of 24, stops at 5.8. So does the
    angle: with 24 bits, pairs of numbers would lie on a grid that can be seen.
    """
    flat = into.view(-1).numpy()
    for first in range(0, len(flat), 2 * PAIRS):
        chunk = flat[first : first + 2 * PAIRS]
        pairs = -(-len(chunk) // 2)
        square = np.log(1 - stream.random(pairs))
        square *= -2
        radius = np.sqrt(square, out=square)
        angle = stream.random(pairs)
        angle *= 2 * np.pi
        chunk[:pairs] = radius * np.cos(angle)
        rest = len(chunk) - pairs
        chunk[pairs:] = radius[:rest] * np.sin(angle[:rest])
    return into


def normal_part(sensitive: BoundedSum, stream: Stream) -> Tensor:
    """`normal` for the coordinates of a sum, or of a part of one."""
    cut, device = sensitive.cut, sensitive.total.device
    if cut is not None and cut.common:
        return cut.of(normal(cut.size, stream, device))
    return normal(sensitive.total.shape[-1], stream, device)


def normal(size: int, stream: Stream, device: torch.device) -> Tensor:
    """Standard normal float32 coordinates, drawn on the device where they are needed, by `rounded_gaussian`."""
    if device.type == "cuda" and triton_available():
        from vestige.randomness import triton_lattice

        return (triton_lattice.draw(size, stream, device) * 2.0**-STEPS).float()
    return torch.from_numpy((rounded_gaussian.draw(size, stream) * 2.0**-STEPS).astype(np.float32)).to(device)


def add_noise(
    sensitive: BoundedSum, multiplier: float, stream: Stream, *, nonprivate_keep: bool = False
) -> tuple[float | Tensor, Tensor | None]:
    """Add independent noise to a bounded sum, in place and once: its standard deviation per coordinate, and the noise
    if asked for. On a GPU it is drawn, scaled and added in one pass over the sum.

    Formal guarantees: afterwards `sensitive.total` is the answer of a Gaussian mechanism with noise multiplier
    `multiplier`, for ideal real-valued Gaussian noise whose key stays secret. Floats are not real numbers: which sums a
    result can be reached from shows in its last bits (see `lattice`).
    """
    total, std, cut = sensitive.total, sensitive.sensitivity * multiplier, sensitive.cut
    if cut is not None and cut.common:
        whole = torch.zeros(cut.size, dtype=total.dtype, device=total.device)
        add_noise(BoundedSum(whole, 1.0), 1.0, stream)
        noise = cut.of(whole).mul_(std)
        total.add_(noise)
        return std, noise if nonprivate_keep else None
    if total.is_cuda and total.dtype == torch.float32 and triton_available():
        from vestige.randomness import triton_gaussian

        return std, triton_gaussian.add_normal(total, std, int(stream.integers(2**63)), nonprivate_keep)
    noise = fill_normal(torch.empty(total.shape), stream).to(total.device).mul_(std)
    total.add_(noise)
    return std, noise if nonprivate_keep else None
