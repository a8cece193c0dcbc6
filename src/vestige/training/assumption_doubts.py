"""What about the data can be seen to break an assumption? Objects of the pipeline alone: no row is read.

A fitted transformer, a repeated row, the remainder of a split: each is reported once, and recorded with the
assumption that it concerns.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

Doubt = tuple[str, str]
"""The name of an assumption, and what was seen."""
LOOKED_AT = 100_000
"""Rows of a list that are looked at for the same object twice."""
FEW = 100
"""A list or a dictionary of a dataset's with more entries holds rows, and not transformers."""


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
        rows = [id(row) for row in data[:LOOKED_AT] if not isinstance(row, int | float | str | bytes | None)]
        if len(set(rows)) < len(rows):
            yield "one_example_per_row", "a list holds one row several times"
    if isinstance(data, Dataset) and id(data) not in within:
        for part in _parts(data):
            yield from _of(part, (*within, id(data))) if isinstance(part, Dataset) else _fitted(part)


def _overlap(data: ConcatDataset[object]) -> bool:
    """Whether a row is in two of the datasets: by what they are subsets of, or by the memory of their tensors."""
    taken: dict[Hashable, set[int]] = {}
    for each in data.datasets:
        indices: Any = None
        while isinstance(each, Subset):
            indices = each.indices if indices is None else [each.indices[place] for place in indices]
            each = each.dataset
        key: Hashable = id(each)
        if isinstance(each, TensorDataset):
            key = tuple((tensor.data_ptr(), tensor.shape) for tensor in each.tensors)
        rows = set(range(len(each)) if indices is None else indices)  # type: ignore[arg-type]
        if not rows.isdisjoint(taken.setdefault(key, set())):
            return True
        taken[key] |= rows
    return False


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
