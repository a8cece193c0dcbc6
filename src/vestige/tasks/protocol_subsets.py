"""Which rows of a whole dataset does a paper's protocol take? The first ones of each class, in the file's order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vestige.tasks.readers_common import LabelledTensors


class Rows(NamedTuple):
    """The rows that were taken, ascending, and of how many: training and test."""

    train: Tensor
    test: Tensor
    of: tuple[int, int]

    def __str__(self) -> str:
        parts = []
        for name, rows, whole in zip(("training", "test"), (self.train, self.test), self.of, strict=True):
            parts.append(f"{len(rows):,} of {whole:,} {name} rows ({int(rows[0]):,} to {int(rows[-1]):,})")
        return ", ".join(parts)


def cut(
    train: LabelledTensors, test: LabelledTensors, sizes: tuple[int, int], classes: int, place: str
) -> tuple[LabelledTensors, LabelledTensors, Rows]:
    """The first `sizes` training and test examples, as many of each class, in the order of the file."""
    taken = [
        _first_of_each_class(labels, size, classes, f"{place}: {name}")
        for name, (_, labels), size in zip(("training", "test"), (train, test), sizes, strict=True)
    ]
    (x_train, y_train), (x_test, y_test) = train, test
    rows = Rows(taken[0], taken[1], (len(y_train), len(y_test)))
    return (x_train[rows.train], y_train[rows.train]), (x_test[rows.test], y_test[rows.test]), rows


def _first_of_each_class(labels: Tensor, size: int, classes: int, place: str) -> Tensor:
    if size % classes:
        raise ValueError(f"subset={size} is no multiple of the {classes} classes: give each class as many")
    each = size // classes
    rows = [(labels == label).nonzero().flatten()[:each] for label in range(classes)]
    short = [label for label, found in enumerate(rows) if len(found) < each]
    if short:
        raise ValueError(
            f"{place} rows hold {len(rows[short[0]])} of class {short[0]}, and the protocol takes the first {each} of "
            "each class: give the whole dataset"
        )
    return torch.cat(rows).sort().values
