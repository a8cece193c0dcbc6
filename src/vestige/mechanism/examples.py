"""Where are the examples, and how is a sample of them fetched? Tensors on the device, or any dataset with indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from vestige.mechanism.bad_rows import Admissible
from vestige.mechanism.clipping import Batch
from vestige.mechanism.loading import Ahead, Loading, Rows, Target, fields_of, form_of, labels_of, tensor_of
from vestige.mechanism.text_padding import LABELS, PaddedAlone, TextPadding, shortest_on_gpu
from vestige.processes import data_fingerprints

Data = Any
"""Tensors or arrays (inputs..., targets), or by name in a dictionary; or anything with rows that are such tuples or
dictionaries: a list, a map-style dataset, one of Hugging Face, or a DataLoader, whose sampler is replaced."""
Draw = Callable[[int], tuple[Sequence[Tensor], int | None]]
"""The sample of a question, in parts, and a seed for workers; see `Ahead`."""
IN_PROCESS = Loading()


class Source(Protocol):
    """SENSITIVE: what samples are drawn from, by index: examples, or users with their rows."""

    @property
    def population(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def blank(self) -> Batch: ...

    def parts(self, rows: Tensor, most: int) -> Sequence[Tensor]:
        """A sample in parts that are computed one after the other."""
        ...

    def fetch(self, rows: Tensor) -> list[Batch]: ...

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]: ...


class Examples:
    """SENSITIVE: the examples themselves, fetched by index onto a device, in batches of examples of one shape."""

    def __init__(self, data: Data, device: torch.device, loading: Loading = IN_PROCESS, target: Target = None) -> None:
        self.device, self._loading, self._ahead = device, loading, list[Ahead]()
        self._rows: Rows | None = None
        self._columns: list[Tensor] = []
        self.shielded = False
        self._admissible: Admissible | None = None
        self._valid: Tensor | None = None
        """Which rows have a label that the loss takes; None where all have."""
        columns = _columns(data)
        if columns is None:
            self._rows = Rows(_dataset(data), loading.collate_fn, target)
            self.form, self.population = self._rows.form, self._rows.population
            return
        if loading.collate_fn is not None:
            raise ValueError("collate_fn is for rows that are read one by one: data are whole tensors, so leave it out")
        self.form = form_of(columns, target)
        named = zip(labels_of(self.form, len(columns)), fields_of(columns, self.form), strict=True)
        self._columns = [tensor_of(*each).to(device) for each in named]
        counts = {len(column) if column.dim() else 0 for column in self._columns}
        if len(counts) != 1:
            raise ValueError(f"data: the tensors hold {sorted(counts)} examples; inputs and targets must agree")
        self.population = counts.pop()

    def nonprivate_hash(self, key: bytes) -> int:
        """Identifies these examples, in this order: all rows of tensors, some of those read one by one."""
        if self._rows is None:
            return data_fingerprints.nonprivate_hash_of_columns(self._columns, key)
        return data_fingerprints.nonprivate_hash_of_dataset(self._rows.dataset, key)

    def shield(self, admissible: Admissible) -> None:
        """From now on, rows that cannot be read, or whose labels the loss cannot take, are left out of every batch."""
        self.shielded = True
        if self._rows is not None:
            self._rows.shielded, self._admissible = True, admissible
            return
        valid = admissible(self._columns[-1].cpu())
        self._valid = None if bool(valid.all()) else valid

    def pad_texts(self, padding: TextPadding) -> None:
        """From now on, texts that are read one by one are padded to a few lengths, each by its own."""
        assert self._rows is not None
        assert self.form.names is not None
        self._rows.pad(PaddedAlone(padding, (*self.form.names, *self.form.further, LABELS)))

    def expect(self, rows: float) -> None:
        """About so many rows are read together."""
        if self._rows is not None and self._rows.padding is not None and self.device.type == "cuda":
            self._rows.pad(replace(self._rows.padding, shortest=shortest_on_gpu(rows)))

    @property
    def pads(self) -> bool:
        """Whether texts are padded."""
        return self._rows is not None and self._rows.padding is not None

    @property
    def read_one_by_one(self) -> bool:
        return self._rows is not None

    @property
    def collates(self) -> bool:
        """Whether a `collate_fn` of the user's makes tensors of an example."""
        return self._loading.collate_fn is not None

    def blank(self) -> Batch:
        """Tensors without rows, which carry only the shapes and dtypes of the examples."""
        return self.fetch(torch.zeros(0, dtype=torch.long))[0]

    def parts(self, rows: Tensor, most: int) -> Sequence[Tensor]:
        """A sample in parts that are computed one after the other."""
        return [rows] if len(rows) <= most else rows.split(most)

    def fetch(self, rows: Tensor) -> list[Batch]:
        """These examples, read now."""
        if self._rows is None:
            rows = rows if self._valid is None else rows[self._valid[rows.cpu()].to(rows.device)]
            # These rows are never written to, so nothing need wait for the copy; a step that waits for the last one's
            # end is launched late.
            here = rows.to(self.device, non_blocking=True)
            return [[column[here] for column in self._columns]]
        return self._on_device(self._rows.groups(rows.tolist()))

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]:
        """A way to fetch a part of the sample of a question, by the question's number, read ahead where workers do."""
        if self._rows is None:
            return lambda index, rows: self.fetch(rows)
        reading = Ahead(self._rows, self._loading, draw)
        self._ahead.append(reading)
        return lambda index, rows: self._on_device(reading.take(index, rows))

    def close(self) -> None:
        """End all workers; the next fetch starts others."""
        for reading in self._ahead:
            reading.close()

    def _on_device(self, groups: list[list[Tensor]]) -> list[Batch]:
        if self._admissible is not None:
            groups = [_kept(group, self._admissible(group[-1])) for group in groups]
        return [[part.to(self.device, non_blocking=True) for part in group] for group in groups]


def _kept(group: list[Tensor], valid: Tensor) -> list[Tensor]:
    return group if bool(valid.all()) else [part[valid] for part in group]


def _columns(data: Data) -> Any:
    """Data that are whole columns, as a tuple or a dictionary; None where they are rows."""
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, Mapping) and all(isinstance(column, Tensor | np.ndarray | list) for column in data.values()):
        return data
    if isinstance(data, list) and not (data and all(isinstance(column, Tensor | np.ndarray) for column in data)):
        return None
    return data if isinstance(data, tuple | list) else None


def _dataset(data: Data) -> object:
    if isinstance(data, DataLoader):
        return data.dataset
    if isinstance(data, Mapping):
        raise ValueError(f"data is a dictionary of {', '.join(map(str, data))}: choose one, such as data['train']")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(
            f"data is a {type(data).__name__}: a Poisson sample needs examples with indices: tensors, a list or a "
            "dataset with __len__ and __getitem__"
        )
    return data
