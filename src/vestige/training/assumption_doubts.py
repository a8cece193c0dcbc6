"""What about the data can be seen to break an assumption? Objects of the pipeline alone: no row is read.

A fitted transformer, a repeated row, the remainder of a split: each is reported once, and recorded with the
assumption that it concerns. Training data that are evaluated on are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

Doubt = tuple[str, str]
"""The name of an assumption, and what was seen."""
LOOKED_AT = 100_000
"""Rows of a list that are looked at for the same object twice."""
FEW = 100
"""A list or a dictionary of a dataset's with more entries holds rows, and not transformers."""
Places = npt.NDArray[np.int64]
"""Where each row lies, [rows, 2]: what it is a part of, and its place there."""
PLAIN = int | float | str | bytes | None
"""Rows of a list that may be one object without being one example."""


def doubts(data: object) -> list[Doubt]:
    """What is seen, of a dataset and of those that it is made of."""
    return list(dict.fromkeys(_of(data.dataset if isinstance(data, DataLoader) else data)))


def tell(found: list[Doubt]) -> None:
    for name, what in found:
        way = {
            "nothing_fitted": "fit it to public rows, or ask by vestige.private_statistics, which is charged",
            "one_example_per_row": "one example is then less protected; name users=, or leave the copies out",
            "public_evaluation": "rows that were split off are private too: evaluate privately (evaluate='private')",
        }[name]
        warnings.warn(f"data: {what}; {way}", stacklevel=4)


def _of(data: object, within: tuple[int, ...] = ()) -> Iterator[Doubt]:
    """Of a dataset and of those that it holds; `within` are those that hold it."""
    if isinstance(data, ConcatDataset):
        if _overlap(data):
            yield "one_example_per_row", "a ConcatDataset holds one dataset twice, or one row of it"
    elif isinstance(data, Subset):
        indices = list(data.indices)
        if len(set(indices)) < len(indices):
            yield "one_example_per_row", "a Subset holds one row several times"
        if len(set(indices)) < len(data.dataset):  # type: ignore[arg-type]
            yield "public_evaluation", "a Subset leaves out rows of its dataset, as random_split does"
    elif isinstance(data, list):
        rows = [id(row) for row in data[:LOOKED_AT] if not isinstance(row, PLAIN)]
        if len(set(rows)) < len(rows):
            yield "one_example_per_row", "a list holds one row several times"
    if isinstance(data, Dataset) and id(data) not in within:
        for part in _parts(data):
            yield from _of(part, (*within, id(data))) if isinstance(part, Dataset) else _fitted(part)


def _overlap(data: ConcatDataset[object]) -> bool:
    """Whether a row is in two of the datasets."""
    return _one_in_several(map(places, data.datasets))


def _parts(data: object) -> Iterator[object]:
    """What a dataset holds, in lists and dictionaries too, and the owners of methods that it holds (`transform`)."""
    for value in vars(data).values():
        held = [value]
        if isinstance(value, list | tuple | dict) and len(value) <= FEW:
            held = list(value.values() if isinstance(value, dict) else value)
        for each in held:
            each = each.func if isinstance(each, partial) else each
            yield getattr(each, "__self__", each)


def _fitted(part: object) -> Iterator[Doubt]:
    """A transformer of scikit-learn, once it was fitted."""
    kind = type(part)
    if kind.__module__.startswith("sklearn.") and hasattr(part, "transform"):
        steps = [step for _, step in getattr(part, "steps", ())] or [part]
        learned = (name for step in steps for name in getattr(step, "__dict__", {}))
        if any(name.endswith("_") and not name.startswith("_") for name in learned):
            yield "nothing_fitted", f"the dataset holds a fitted {kind.__name__} of scikit-learn"


# --- which row is which -----------------------------------------------------------------------------------------------


def refuse_training_data(given: object, training: object, name: str) -> None:
    """Refuse data for an evaluation, or for a schedule, that hold a row of the training data: figures on it are
    computed without noise. A copy is not found."""
    rows = _rows_of(training)
    for each in map(_rows_of, given.values() if isinstance(given, Mapping) else [given]):
        if each is None or rows is None:
            continue
        whole = each is rows or _fingerprint(each) == _fingerprint(rows) is not None
        if whole or hold_one_row(each, rows):
            raise ValueError(
                f"{name} is the training data{'' if whole else ', or holds rows of them'}: losses and metrics of them "
                "have no noise. Give data that are public, or whose owners agreed, or ask by evaluate='private'"
            )


def _rows_of(data: object) -> object:
    return data.dataset if isinstance(data, DataLoader) else data


def _fingerprint(data: object) -> object:
    """That of a dataset of Hugging Face, which tables that are equal share."""
    return getattr(data, "_fingerprint", None)


def hold_one_row(first: object, second: object) -> bool:
    """Whether a row of one is a row of the other, as far as objects and memory show it."""
    return _one_in_several(map(places, (first, second)))


def _one_in_several(parts: Iterable[Places]) -> bool:
    each = np.concatenate([_distinct(part) for part in parts])
    return len(_distinct(each)) < len(each)


def _distinct(found: Places) -> Places:
    """Each place once: `np.unique` of pairs takes twenty times as long."""
    ordered = found[np.lexsort(found.T)]
    return ordered[np.append(True, (ordered[1:] != ordered[:-1]).any(1))[: len(ordered)]]


def places(data: Any) -> Places:
    """Where each row of some data lies: of columns in memory, where the first of them has it."""
    if isinstance(data, Subset):
        return places(data.dataset)[np.array(list(data.indices), dtype=np.int64)]
    if isinstance(data, ConcatDataset):
        return np.concatenate([np.empty((0, 2), np.int64), *map(places, data.datasets)])
    columns = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(columns, Mapping):
        columns = tuple(columns.values())
    if isinstance(columns, tuple) and columns and isinstance(columns[0], Tensor | np.ndarray):
        columns = columns[0]
    if isinstance(columns, Tensor | np.ndarray):
        return _in_memory(columns)
    if isinstance(columns, list):
        return _pairs([(1, id(row)) for row in columns if not isinstance(row, PLAIN)])
    rows = np.arange(len(data) if hasattr(data, "__len__") else 1)
    return np.stack([np.full_like(rows, id(data)), rows], axis=1)


def _pairs(found: list[tuple[int, int]]) -> Places:
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _in_memory(column: Tensor | npt.NDArray[Any]) -> Places:
    """The address of each row of a tensor or an array, and the device that it is on."""
    if isinstance(column, np.ndarray):
        device, begin, step = 0, column.__array_interface__["data"][0], column.strides[0] if column.ndim else 0
    elif column.layout is not torch.strided or column.is_meta:
        return _pairs([(id(column), row) for row in range(len(column))])
    else:
        device = 0 if column.device.type == "cpu" else 2 + (column.device.index or 0)
        begin, step = column.data_ptr(), column.stride(0) * column.element_size() if column.dim() else 0
    rows = begin + step * np.arange(len(column) if column.ndim else 1, dtype=np.int64)
    return np.stack([np.full_like(rows, device), rows], axis=1)
