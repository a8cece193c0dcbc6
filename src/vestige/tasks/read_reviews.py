"""How are reviews read? Texts from lines of JSON or the original folders, as hashed words in order, or as a bag."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vestige.tasks.readers_common import LabelledTensors, existing, first, where

BUCKETS, LENGTH = 20_000, 80
BAG = 4096
"""Numbers of a bag of words."""
LABELS = {"neg": 0, "pos": 1}


def read_reviews(path: Path | None) -> tuple[LabelledTensors, LabelledTensors]:
    """Both splits as token numbers [N, LENGTH] and labels (1 is positive)."""
    return _read(path, lambda text: torch.tensor(_tokens(text)))


def read_bags(path: Path | None) -> tuple[LabelledTensors, LabelledTensors]:
    """Both splits as bags of all their words [N, BAG], of length 1 each, and labels (1 is positive)."""
    return _read(path, bag_of_words)


def whole_reviews(path: Path | None) -> tuple[list[str], list[int]]:
    """The training reviews and their labels as read from the file."""
    found = [(text, label) for split, text, label in _reviews(existing(path)) if split == "train"]
    return [text for text, _ in found], [label for _, label in found]


def bag_of_words(text: str, size: int = BAG) -> Tensor:
    """Which words a text has: each adds +1 or -1, by its hash, to one of `size` numbers, whose norm is then made 1.

    Formal guarantees: a function of this text alone; no vocabulary or frequency is learned from others.
    """
    if not (isinstance(size, int) and size >= 1):
        raise ValueError(f"size={size} must be a whole number from 1 up: how many numbers a text becomes")
    hashes = np.fromiter({_hash(word) for word in _words(text)}, np.int64)
    bag = torch.from_numpy(np.bincount((hashes >> 1) % size, 1.0 - 2.0 * (hashes & 1), size)).float()
    return bag / bag.norm().clamp(min=1.0)


def _read(path: Path | None, become: Callable[[str], Tensor]) -> tuple[LabelledTensors, LabelledTensors]:
    reviews: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for split, text, label in _reviews(existing(path)):
        reviews[split].append((text, label))
    for split, found in reviews.items():
        if not found:
            raise ValueError(f"{where(path)}: no review has split {split!r}; give at least one")
    train, test = (
        (torch.stack([become(text) for text, _ in found]), torch.tensor([label for _, label in found]))
        for found in reviews.values()
    )
    return train, test


def _reviews(path: Path) -> Iterator[tuple[str, str, int]]:
    if path.is_file():
        return _from_lines(path)
    file = first(path / "imdb.jsonl.gz", path / "imdb.jsonl")
    if file is not None:
        return _from_lines(file)
    if (path / "train" / "pos").is_dir():
        return _from_texts(path)
    raise ValueError(
        f"{where(path)}: the folder holds neither imdb.jsonl.gz nor the original train/pos; give one of these"
    )


def _from_lines(path: Path) -> Iterator[tuple[str, str, int]]:
    """One JSON object per line, with `split`, `text` and `label`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _from_line(line, f"{where(path)}: line {number}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{where(path)}: not a readable .jsonl or .jsonl.gz file; give one review per line") from error


def _from_line(line: str, place: str) -> tuple[str, str, int]:
    try:
        review = json.loads(line)
        split, text, label = review["split"], review["text"], review["label"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} is not a JSON object with 'split', 'text' and 'label'; give one per line") from error
    if split not in ("train", "test") or not isinstance(text, str):
        raise ValueError(f"{place} has split {split!r}; give 'train' or 'test', and a text")
    if label not in LABELS.values():
        raise ValueError(f"{place} has label {label!r}; this task's labels are 0 to 1")
    return split, text, int(label)


def _from_texts(folder: Path) -> Iterator[tuple[str, str, int]]:
    """The original folders: train/pos/*.txt and so on."""
    for split in ("train", "test"):
        for name, label in LABELS.items():
            for file in sorted((folder / split / name).glob("*.txt")):
                yield split, file.read_text(encoding="utf-8"), label


def _tokens(text: str) -> list[int]:
    """The review's first words as numbers, padded with zeros.

    A vocabulary learned from the reviews would itself be a release; a fixed hash of each word asks the data nothing.
    """
    numbers = [1 + _hash(word) % (BUCKETS - 1) for word in islice(_words(text), LENGTH)]
    return numbers + [0] * (LENGTH - len(numbers))


def _words(text: str) -> Iterator[str]:
    return (found.group() for found in re.finditer(r"[a-z0-9']+", text.replace("<br />", " ").lower()))


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return zlib.crc32(word.encode())
