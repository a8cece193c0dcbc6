"""Where do random numbers come from? One key a run, and a stream for each purpose and index."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from vestige.randomness.streams import SecretStream, SeededStream, Stream

_forked = 0
"""What a forked process adds to every secret key: its parent's streams are its parent's alone."""


def _rekey() -> None:
    global _forked
    _forked = secrets.randbits(256)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rekey)


class HoldsKey:
    """Refuses to be copied, pickled or sent to another process: two that draw from one key draw the same noise, and the
    difference of their releases is the data. Processes of one run share their key by `Randomness.shared`."""

    def __reduce_ex__(self, protocol: object) -> Any:
        raise ValueError(
            f"{type(self).__name__} holds the secret key of a private run, which must not exist twice: two releases "
            "with the same noise show the data. Make a new one where it is needed, in the process that trains"
        )


@dataclass(frozen=True)
class Randomness(HoldsKey):
    """Streams of random numbers, one for each purpose and index, all grown from one key.

    `secret()` draws the key from the operating system; it lives in this process alone: a resumed run never meets its
    old noise again, and a forked process has another key. `reproducible(seed)` makes every stream predictable, and the
    run is not private.
    """

    entropy: int
    predictable: bool
    process: int = 0

    @classmethod
    def secret(cls) -> Randomness:
        return cls(secrets.randbits(256), predictable=False, process=_forked)

    @classmethod
    def shared(cls, entropy: int) -> Randomness:
        """The secret key of a group of processes: every one of them grows the same streams from it."""
        return cls(entropy, predictable=False, process=_forked)

    @classmethod
    def reproducible(cls, seed: int) -> Randomness:
        return cls(seed, predictable=True)

    def __reduce_ex__(self, protocol: object) -> Any:
        if not self.predictable:
            return super().__reduce_ex__(protocol)
        return Randomness.reproducible, (self.entropy,)

    def __repr__(self) -> str:
        return f"Randomness({'predictable' if self.predictable else 'secret'})"

    @property
    def moved(self) -> bool:
        """Whether this is a copy of a secret key in a forked process, which must not use the key itself."""
        return not self.predictable and self.process != _forked

    def stream(self, purpose: str, index: int, *, continues: bool = False) -> Stream:
        """The stream of a purpose and an index. One that `continues` earlier draws of the same run has no meaning after
        a fork, where the key is another one."""
        if self.predictable:
            label = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4])
            seed = np.random.SeedSequence(self.entropy, spawn_key=(label, index))
            return SeededStream(np.random.Generator(np.random.PCG64DXSM(seed)))
        if continues and self.moved:
            raise ValueError(
                "this run began in a parent process, and its noise or its parts of the data go on from step to step: "
                "it cannot be continued after a fork, so start it in the process that trains"
            )
        master = (self.entropy ^ _forked if self.moved else self.entropy).to_bytes(32)
        return SecretStream(hashlib.blake2b(f"{purpose}/{index}".encode(), key=master, digest_size=64).digest())

    def seed(self, purpose: str, index: int) -> int | None:
        """32 bits for a generator that is not ours, where a run must repeat; the key of a secret run is never passed
        on."""
        return int(self.stream(purpose, index).integers(2**32)) if self.predictable else None
