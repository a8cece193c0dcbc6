"""How does an answer leave? Gaussian noise, the one door out, and where randomness comes from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vestige.devices import triton_available
from vestige.randomness.release import BoundedSum

PAIRS = 16384
"""Pairs of coordinates drawn at once on a CPU, few enough to stay near it. Reproducible runs depend on it."""


def fill_normal(into: Tensor, stream: np.random.Generator) -> Tensor:
    """Standard normal numbers in a float32 tensor on the CPU, by Box-Muller: twice as fast as NumPy's ziggurat.

    The radius is a double of 53 bits, so it reaches sqrt(106 log 2) = 8.57; torch's own, of 24, stops at 5.8.
    """
    flat = into.view(-1).numpy()
    for first in range(0, len(flat), 2 * PAIRS):
        chunk = flat[first : first + 2 * PAIRS]
        pairs = -(-len(chunk) // 2)
        square = np.log(1 - stream.random(pairs))
        square *= -2
        radius = np.sqrt(square, out=square).astype(np.float32)
        angle = stream.random(pairs, dtype=np.float32)
        angle *= np.float32(2 * np.pi)
        np.multiply(radius, np.cos(angle), out=chunk[:pairs])
        rest = len(chunk) - pairs
        np.multiply(radius[:rest], np.sin(angle[:rest]), out=chunk[pairs:])
    return into


def normal(size: int, stream: np.random.Generator, device: torch.device) -> Tensor:
    """Standard normal float32 coordinates, drawn on the device where they are needed."""
    if device.type == "cpu":
        return fill_normal(torch.empty(size), stream)
    seed = int(stream.integers(2**63))
    if device.type == "cuda" and triton_available():
        from vestige.randomness import triton_gaussian

        return triton_gaussian.normal(size, seed, device)
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)


def add_noise(
    sensitive: BoundedSum, multiplier: float, stream: np.random.Generator, *, nonprivate_keep: bool = False
) -> tuple[float | Tensor, Tensor | None]:
    """Add independent noise to a bounded sum, in place and once: its standard deviation per coordinate, and the noise
    if asked for.

    On a GPU it is drawn, scaled and added in one pass over the sum; that pass stays apart from the memory's, so that
    a sum leaves through one door (correlated noise, through `correlated`).

    Formal guarantees: afterwards `sensitive.total` is the answer of a Gaussian mechanism with noise multiplier
    `multiplier`, for ideal real-valued Gaussian noise whose key stays secret.
    """
    total, std = sensitive.total, sensitive.sensitivity * multiplier
    if total.is_cuda and total.dtype == torch.float32 and triton_available():
        from vestige.randomness import triton_gaussian

        return std, triton_gaussian.add_normal(total, std, int(stream.integers(2**63)), nonprivate_keep)
    noise = normal(total.shape[-1], stream, total.device).mul_(std)
    total.add_(noise)
    return std, noise if nonprivate_keep else None
