"""How does an answer leave? Gaussian noise, the one door out, and where randomness comes from."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vestige.devices import triton_available
from vestige.mechanism.clipping import BoundedSum


@dataclass(frozen=True)
class Release:
    """A noised sum: safe to log, keep and step on. `expected_batch` is the public divisor that makes it a mean."""

    total: Tensor
    noise_std: float | Tensor
    expected_batch: float
    sample_rate: float = 1.0
    """The probability with which an example took part: an epoch is 1 / sample_rate releases."""
    unclipped: float | None = None
    """The noised fraction of examples that the clip left alone, where the clip counts them."""

    @property
    def noise_norm(self) -> float | Tensor:
        """The root mean square norm of the noise in `total`, [...]; on the device, where the deviations are."""
        size = self.total.shape[-1]
        if not isinstance(self.noise_std, Tensor):
            return float(self.noise_std * size**0.5)
        if self.noise_std.shape[-1] == size:
            return torch.linalg.vector_norm(self.noise_std, dim=-1)
        return self.noise_std.squeeze(-1) * size**0.5  # one deviation for all coordinates of each run


@dataclass(frozen=True)
class Randomness:
    """Streams of random numbers, one for each purpose and index, all grown from one key.

    `secret()` draws the key from the operating system; it lives in this process alone, so a resumed run never meets
    its old noise again. `reproducible(seed)` makes every stream predictable, and the run protects nobody.
    """

    entropy: int
    predictable: bool

    @classmethod
    def secret(cls) -> Randomness:
        return cls(secrets.randbits(256), predictable=False)

    @classmethod
    def reproducible(cls, seed: int) -> Randomness:
        return cls(seed, predictable=True)

    def __repr__(self) -> str:
        return f"Randomness({'predictable' if self.predictable else 'secret'})"

    def stream(self, purpose: str, index: int) -> np.random.Generator:
        label = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4])
        key = np.random.SeedSequence(self.entropy, spawn_key=(label, index))
        return np.random.Generator(np.random.PCG64DXSM(key))


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
        from vestige.mechanism import triton_noise

        return triton_noise.normal(size, seed, device)
    return torch.randn(size, generator=torch.Generator(device).manual_seed(seed), device=device)


def add_noise(
    sensitive: BoundedSum, multiplier: float, stream: np.random.Generator, *, nonprivate_keep: bool = False
) -> tuple[float | Tensor, Tensor | None]:
    """Add independent noise to a bounded sum, in place and once: its standard deviation per coordinate, and the noise
    if asked for.

    On a GPU it is drawn, scaled and added in one pass over the sum; that pass stays apart from the memory's, so that
    a sum leaves through one door (correlated noise, through `correlated_noise`).

    Formal guarantees: afterwards `sensitive.total` is the answer of a Gaussian mechanism with noise multiplier
    `multiplier`, for ideal real-valued Gaussian noise whose key stays secret.
    """
    total, std = sensitive.total, sensitive.sensitivity * multiplier
    if total.is_cuda and triton_available():
        from vestige.mechanism import triton_noise

        return std, triton_noise.add_normal(total, std, int(stream.integers(2**63)), nonprivate_keep)
    noise = normal(total.shape[-1], stream, total.device).mul_(std)
    total.add_(noise)
    return std, noise if nonprivate_keep else None
