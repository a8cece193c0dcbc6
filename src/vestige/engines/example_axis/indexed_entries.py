"""Which entries of a table does an operator read or write? Each such operator reads `table[indices]`, or writes there.

An axis of the table that has no index is whole: entry r along it is entry r of the table. So it is along the other axes
of what is gathered or scattered, and along an index that is 0, 1, 2, ... Only there may rows of a table be read or
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.engines.example_axis.labels import Label, Mixed, Rows
from vestige.engines.example_axis.operator_calls import Op
from vestige.engines.per_example.execution import unseen

VALUES = ("values", "src", "source")
"""What operators call what they write."""
BY_MASK = "chooses entries by a mask"
ELSEWHERE = "puts rows in places that are not their own"


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def indices_of(op: Op, rank: int) -> list[Any]:
    """One for each of the first axes of a table: a tensor, or None where an axis is whole."""
    given = op["indices"] if "indices" in op.given else op["index"]
    if not isinstance(given, Tensor):
        return list(given)
    return [*[None] * (op["dim"] % rank if "dim" in op.given else 0), given]


def as_numbers(indices: Sequence[Any]) -> list[Any]:
    """The same indices, with the places that a mask chooses instead of the mask."""
    return [part for each in indices for part in (each.nonzero().unbind(1) if is_mask(each) else (each,))]


class Entries:
    """`table[indices]`, of a table of this shape, whose masks are public."""

    def __init__(self, op: Op, table: Sequence[int]) -> None:
        self.op, self.table, given = op, table, indices_of(op, max(1, len(table)))
        self.masked = any(map(is_mask, given))
        numbers = as_numbers(given)
        self.indices: dict[int, Tensor] = {place: each for place, each in enumerate(numbers) if each is not None}
        """By the axis of the table that each is for."""
        self.shape = torch.broadcast_shapes(*(index.shape for index in self.indices.values()))
        places = list(self.indices)
        adjacent = places == list(range(places[0], places[-1] + 1))
        whole: list[int | None] = [axis for axis in range(len(table)) if axis not in self.indices]
        self.start = places[0] if adjacent else 0
        """Where the axes of the indices begin in what is read or written."""
        self.axes = [*whole[: self.start], *[None] * len(self.shape), *whole[self.start :]]
        """Which axis of the table each of its axes is; None: one of the indices."""
        self.sizes = [
            *table[: self.start],
            *self.shape,
            *(table[axis] for axis in whole[self.start :] if axis is not None),
        ]
        self.along = op.name.startswith(("gather", "scatter"))
        """Whether the index is as long as the entries, whose other axes are those of the table."""
        if self.along:
            self.start, self.sizes = 0, list(self.shape)
            self.axes = [None if axis in places else axis for axis in range(len(self.shape))]

    def where(self, axis: int) -> int | None:
        """Along which axis of what is read or written entry r is entry r of this axis of the table, if along one."""
        if axis not in self.indices:
            return self.axes.index(axis)
        index, size = self.indices[axis], self.table[axis]
        steps = [(place, step) for place, step in enumerate(index.stride()) if index.shape[place] > 1 and step]
        if len(steps) != 1 or index.shape[steps[0][0]] != size or index.is_floating_point():
            return None
        place, step = steps[0]
        counts = self.op.tracker.labels.counts(index, size, step)
        return self.start + place + len(self.shape) - index.dim() if counts else None

    def own_parts(self, label: Rows) -> Rows | None:
        """The label of the table, where one public index leads what is written of each example to parts of its own, as
        in memory of windows that overlap."""
        (axis, index), *others = self.indices.items()
        labels, numbers = self.op.tracker.labels, not (index.is_floating_point() or is_mask(index))
        if others or index.dim() != 1 or label.axis != self.start or label.first or not numbers or not len(index):
            return None
        if labels.get(index) is not None or (index.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        with unseen():
            places = index % self.table[axis]
            owners = torch.arange(len(index), device=index.device) // label.inner % label.count
            of_second = places[owners == 1]
            unit = int(of_second.min()) if len(of_second) else self.table[axis]
            own = (
                unit
                and not self.table[axis] % (unit * label.count)
                and torch.equal(places // unit % label.count, owners)
            )
        return Rows(axis, unit, label.count, label.batch) if own else None

    def label_of_indices(self) -> Label | None:
        found: list[Label | None] = []
        for index in self.indices.values():
            label = self.op.tracker.labels.get(index)
            if isinstance(label, Rows):
                label = self.op.broadcast_one(index, label, self.shape)
                label = label if isinstance(label, Mixed) else label.at(self.start + label.axis)
            found.append(label)
        return self.op.meet(*found)


def read_entries(op: Op) -> Label | None:
    """The label of `table[indices]`."""
    name = "weight" if "weight" in op.given else "self"
    entries, own = Entries(op, op[name].shape), op.label(name)
    label = entries.label_of_indices()
    if own is not None:
        where = entries.where(own.axis)
        label = op.mixed("picks rows of other examples") if where is None else op.meet(label, own.at(where))
    return op.mixed(BY_MASK, unknown=True) if entries.masked and isinstance(label, Mixed) else label


def written_entries(op: Op) -> Label | None:
    """The label of a table after something was put into `table[indices]`: values must come to the rows that they are
    of."""
    own, table = op.label("self"), op["self"]
    name = next((each for each in VALUES if isinstance(op.given.get(each), Tensor)), "")
    given, masks = op.label(name), [each for each in indices_of(op, max(1, table.dim())) if is_mask(each)]
    if masks and len(op["indices"]) == 1 and op["values"].numel() == 1 and given is None:  # as masked_fill does
        label = op.meet(own, mask := op.tracker.labels.get(masks[0]))
        return label if not isinstance(label, Rows) or label.axis < masks[0].dim() or mask is None else op.mixed()
    if any(op.tracker.labels.get(each) is not None for each in masks):
        return op.mixed(BY_MASK, unknown=True)
    entries = Entries(op, table.shape)
    label = op.meet(entries.label_of_indices(), given and op.broadcast_one(op[name], given, entries.sizes))
    if isinstance(label, Rows):
        homes = range(table.dim()) if own is None else (own.axis,)
        home = next((axis for axis in homes if entries.where(axis) == label.axis), None)
        there = entries.own_parts(label) if home is None else label.at(home)
        label = op.mixed(ELSEWHERE) if there is None else op.meet(own, there)
    if entries.masked and isinstance(label, Mixed):
        return op.mixed(BY_MASK, unknown=True)
    return own if label is None else label
