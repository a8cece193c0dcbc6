"""Have two processes the same examples, in the same order? Keyed hashes show it, and reveal nothing else.

The key is drawn for one comparison and forgotten, so a hash reveals nothing about a row without it.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from vestige.randomness.generator_states import draws_kept, seed_all_draws

COMPARED = 64
"""Rows that are compared where they are read one by one, drawn at random."""
AT_ONCE = 1 << 24
"""Bytes of a tensor that are hashed at once."""
BITS = 63


def nonprivate_hash_of_dataset(dataset: Any, key: bytes) -> int:
    """SENSITIVE until it is keyed: of all rows of whole tensors, and of `COMPARED` rows of anything else.

    One that cannot be read counts as such: that a run did not begin would show that it is there. Where none of them can
    be read, that is an error.
    """
    if isinstance(dataset, TensorDataset):
        return nonprivate_hash_of_columns(dataset.tensors, key)
    count = len(dataset)
    rows = random.Random(key).sample(range(count), min(count, COMPARED))
    found = _begun(key)
    problem: Exception | None = None
    unreadable = 0
    with draws_kept():  # rows that are augmented as they are read are augmented alike
        seed_all_draws(torch.device("cpu"), int.from_bytes(key[:4]))
        for row in rows:
            try:
                _feed(found, dataset[row])
            except Exception as error:  # whatever a user's dataset raises
                problem, unreadable = error, unreadable + 1
                found.update(b"unreadable")
    if problem is not None and unreadable == len(rows):
        raise problem
    return _ended(found)


def nonprivate_hash_of_columns(columns: Sequence[Tensor], key: bytes) -> int:
    """SENSITIVE until it is keyed: of all rows."""
    found = _begun(key)
    for column in columns:
        _feed(found, column)
    return _ended(found)


def _begun(key: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(key=key, digest_size=8)


def _ended(found: hashlib.blake2b) -> int:
    return int(int.from_bytes(found.digest()) >> (64 - BITS))


def _feed(found: hashlib.blake2b, value: object) -> None:
    """Whatever a row may be made of."""
    found.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, Tensor):
        found.update(f"{tuple(value.shape)}{value.dtype}".encode())
        flat = value.detach().reshape(-1)
        for part in flat.split(max(1, AT_ONCE // max(1, value.element_size()))):
            found.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        found.update(f"{value.shape}{value.dtype}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            _feed(found, name)
            _feed(found, value[name])
    elif isinstance(value, list | tuple):
        found.update(str(len(value)).encode())
        for each in value:
            _feed(found, each)
    elif isinstance(value, str | int | float | bytes | None):
        text = value if isinstance(value, bytes) else repr(value).encode()
        found.update(str(len(text)).encode() + b"\0" + text)
    else:
        found.update(pickle.dumps(value))
