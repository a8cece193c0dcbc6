"""Where do random numbers come from? One key a run, and a stream for each purpose and index."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

import numpy as np


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
