"""What about the data can be seen to break an assumption? Objects of the pipeline alone: no row is read.

A fitted transformer, a row that is there twice, the rest of a split: each is said once, and written beside the
assumption that it concerns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

Doubt = tuple[str, str]
"""The name of an assumption, and what was seen."""
LOOKED_AT = 100_000
"""Rows of a list that are looked at for the same object twice."""


def doubts(data: Any) -> list[Doubt]:
    """What is seen, of a dataset and of those that it is made of."""
    return list(dict.fromkeys(_of(data.dataset if isinstance(data, DataLoader) else data)))


def tell(found: list[Doubt]) -> None:
    for name, what in found:
        way = {
            "nothing_fitted": "fit it to public rows, or ask by vestige.private_statistics, which is charged",
            "one_example_per_row": "one example is then protected less; name users=, or leave the copies out",
            "public_evaluation": "rows that were split off are private too: evaluate privately (evaluate='private')",
        }[name]
        warnings.warn(f"data: {what}; {way}", stacklevel=4)


def _of(data: Any) -> Iterator[Doubt]:
    if isinstance(data, ConcatDataset):
        if len({id(each) for each in data.datasets}) < len(data.datasets):
            yield "one_example_per_row", "a ConcatDataset holds one dataset twice"
        for each in data.datasets:
            yield from _of(each)
    elif isinstance(data, Subset):
        indices = list(data.indices)
        if len(set(indices)) < len(indices):
            yield "one_example_per_row", "a Subset holds one row several times"
        if len(set(indices)) < len(data.dataset):  # type: ignore[arg-type]
            yield "public_evaluation", "a Subset leaves out rows of its dataset, as random_split does"
        yield from _of(data.dataset)
    elif isinstance(data, list) and len({id(row) for row in data[:LOOKED_AT]}) < len(data[:LOOKED_AT]):
        yield "one_example_per_row", "a list holds one row several times"
    if isinstance(data, Dataset):
        yield from _fitted(data)


def _fitted(data: Any) -> Iterator[Doubt]:
    """Transformers of scikit-learn that a dataset keeps, once they were fitted."""
    for part in (each for value in vars(data).values() for each in (value if isinstance(value, list) else [value])):
        kind = type(part)
        if kind.__module__.startswith("sklearn.") and hasattr(part, "transform"):
            steps = [step for _, step in getattr(part, "steps", ())] or [part]
            if any(name.endswith("_") and not name.startswith("_") for step in steps for name in vars(step)):
                yield "nothing_fitted", f"the dataset holds a fitted {kind.__name__} of scikit-learn"
