"""What gives random numbers? A cipher in counter mode where they must be secret, NumPy where they must repeat."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

BLOCK, KEY = 16, 32
"""Bytes of a block of AES."""
FROM_ZERO = modes.CTR(bytes(BLOCK))


class Stream(Protocol):
    """Uniform random numbers, drawn one after the other."""

    def words(self, count: int) -> np.ndarray:
        """Integers of 64 bits."""
        ...

    def random(self, shape: object) -> np.ndarray:
        """Numbers in [0, 1), multiples of 2^-53."""
        ...

    def integers(self, high: int, size: object = None) -> Any:
        """Integers from 0 to high - 1."""
        ...

    def permutation(self, count: int) -> np.ndarray: ...


class SecretStream:
    """AES-256 in counter mode: without the key these numbers cannot be distinguished from uniform ones.

    One key is used for one stream, from counter 0 on. Of the 64 bytes that a stream begins with, which are as secret as
    the run's own key, half are that key, and half are its first four words: those that draw elsewhere, on a GPU, need
    no more.
    """

    def __init__(self, seed: bytes) -> None:
        self._key: bytes | None = seed[:KEY]
        self._first = seed[KEY:]
        self._cipher: Any = None
        """Made with the first numbers, after which the key is dropped: a sample of everyone draws none."""

    def __repr__(self) -> str:
        return "SecretStream()"

    def __reduce__(self) -> Any:
        raise TypeError("a secret stream is neither copied nor written: its numbers would be drawn twice")

    def words(self, count: int) -> np.ndarray:
        first, self._first = self._first, b""
        if first and 8 * count <= len(first):
            return np.frombuffer(bytearray(first[: 8 * count]), dtype=np.uint64)
        if self._key is not None:
            self._cipher, self._key = Cipher(algorithms.AES(self._key), FROM_ZERO).encryptor(), None
        # Encrypting zeros leaves the key stream itself. The room for one more block is what OpenSSL wants.
        drawn = np.empty(8 * count + BLOCK - 1, dtype=np.uint8)
        self._cipher.update_into(bytes(8 * count), drawn.data)
        return drawn[: 8 * count].view(np.uint64)

    def random(self, shape: Any) -> np.ndarray:
        count = int(np.prod(shape))
        return ((self.words(count) >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def integers(self, high: int, size: Any = None) -> object:
        count = 1 if size is None else int(np.prod(size))
        most = 2**64 - 2**64 % high  # beyond it, the first remainders would be likelier than the last
        drawn = self.words(count)
        while len(wrong := np.nonzero(drawn > np.uint64(most - 1))[0]):
            drawn[wrong] = self.words(len(wrong))
        found = (drawn % np.uint64(high) if high < 2**64 else drawn).astype(np.int64)
        return int(found[0]) if size is None else found.reshape(size)

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self.words(count), kind="stable")


class SeededStream:
    """The same from NumPy's PCG64-DXSM: predictable, for runs that must repeat."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def words(self, count: int) -> np.ndarray:
        return self._generator.integers(2**64, size=count, dtype=np.uint64)

    def random(self, shape: Any) -> np.ndarray:
        return self._generator.random(shape)

    def integers(self, high: int, size: Any = None) -> object:
        return self._generator.integers(high, size=size)

    def permutation(self, count: int) -> np.ndarray:
        return self._generator.permutation(count)
