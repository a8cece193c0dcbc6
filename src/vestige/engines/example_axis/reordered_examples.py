"""What is an example's own after the examples were put in another order? Its entries, until they are back in place.

Sequences of unequal length are packed: sorted by length, cut at their ends, laid one step after the other. The order
depends on all examples, but each entry is still a function of one. Two kinds of mixed labels remember which:

- `Permuted`: entry r of an axis belongs to example owners[r]. All entries are there: a slice of them would be a choice
  among examples that others decide, and is mixed.
- `Positions`: the tensor holds these positions, as `sort` gives them.
- `Joined`: the tensor stands for what a mask chooses of each row, joined to one long row.
- `Steps`: the tensor holds the number of sequences that have not ended, for each step.

Only the operators below know them. To all others, and in every view, they are mixed values like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from vestige.engines.example_axis.indexed_entries import VALUES, indices_of
from vestige.engines.example_axis.labels import Label, Mixed, Rows, Tracker, mixed, users_line
from vestige.engines.example_axis.operator_calls import Op
from vestige.engines.per_example.execution import unseen

NOBODY = Rows(0, 1, 1, 0)
WHY = "puts examples in another order"
MOVES = ("index_select", "index", "_unsafe_index", "index_add", "index_put", "_index_put_impl")


@dataclass(frozen=True)
class Ordered(Mixed):
    @classmethod
    def made(cls, operator: str, **known: Any) -> Self:
        """What an operator has made, with what is known of it."""
        return cls(operator, users_line(), **{"why": WHY, **known})

    def plain(self) -> Mixed:
        return Mixed(self.operator, self.where, self.why, self.unknown)


@dataclass(frozen=True)
class Permuted(Ordered):
    """Entry r of the axis of `rows` belongs to example owners[r] of its batch."""

    rows: Rows = NOBODY
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packed(Permuted):
    """The same, with one entry for each step of each sequence: its size depends on all lengths."""


@dataclass(frozen=True)
class Positions(Ordered):
    """The tensor holds these positions."""

    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Joined(Ordered):
    """The tensor stands for what was chosen of each row. It has as many numbers as there were before: how many were
    chosen would be shown by its size."""

    padded: Tensor = field(default_factory=lambda: torch.zeros(0), compare=False)
    """What was chosen of each row at the beginning of the row, and the rest of it behind."""


@dataclass(frozen=True)
class Steps(Ordered):
    """The tensor holds, for each step, the number of packed sequences that have not ended; they were padded to
    `width`."""

    width: int = 0


def size_tells(tracker: Tracker, tensor: Tensor) -> Mixed | None:
    """The label of a tensor whose size may be that of packed sequences: it is packed, or made of what was."""
    label = tracker.labels.get(tensor) if tracker.packed and tensor.dim() else None
    tells = isinstance(label, Packed | Steps) or (isinstance(label, Mixed) and not isinstance(label, Ordered))
    return label if tells else None  # type: ignore[return-value]


def arranged(operator: str, rows: Rows, owners: Sequence[int]) -> Rows | Permuted:
    """The label of entries of these owners along the axis of `rows`: rows again if each is in its place."""
    if tuple(owners) == tuple(range(rows.count)):
        return rows
    return Permuted.made(operator, rows=rows, owners=tuple(owners))


def owners_of(label: Label | None, axis: int, size: int) -> tuple[Rows, tuple[int, ...]] | None:
    """Whose the entries of an axis are, if each is one example's and all are there."""
    if isinstance(label, Permuted) and label.rows.axis == axis and len(label.owners) == size:
        return label.rows, label.owners
    plain = isinstance(label, Rows) and (label.axis, label.inner, label.first) == (axis, 1, 0)
    if plain and label.count == size:  # type: ignore[union-attr]
        return label, tuple(range(size))  # type: ignore[return-value]
    return None


def order_of(tracker: Tracker, index: Any, size: int) -> tuple[int, ...] | None:
    """The permutation of so many entries that an index is."""
    if (
        tracker.captured
        or not isinstance(index, Tensor)
        or index.dim() != 1
        or len(index) != size
        or index.dtype == torch.bool
    ):
        return None
    label = tracker.labels.get(index)
    if isinstance(label, Positions):
        return label.order
    if label is not None or index.device.type != "cpu" or index.is_floating_point():
        return None
    with unseen():
        order = tuple(index.tolist())
    return order if sorted(order) == list(range(size)) else None


def sorted_examples(op: Op) -> Any:
    """`sort` of one number for each example, on a CPU: lengths of sequences, whose order is then known."""
    label, given = op.label("self"), op["self"]
    if op.tracker.captured or not isinstance(label, Rows):
        return None
    if given.dim() == 1 and given.device.type == "cpu" and not given.is_floating_point():
        owned = owners_of(label, 0, len(given))
        if owned is not None:
            with unseen():
                order = tuple(op.found[1].tolist())
            return [arranged("sort", owned[0], order), Positions.made(op.name, order=order)]
    return None


def moved(op: Op) -> Label | None:
    """The label that an operator gives which puts examples in another order, or back in place; None if it does not."""
    name = op.name.rstrip("_")
    get = op.tracker.labels.get
    if name in ("_to_copy", "clone"):
        return get(op["self"])
    if name == "scatter" and isinstance(op.given.get("src"), Tensor):
        return _inverse(op)
    if name in MOVES:
        return _reordered(op)
    if torch.Tag.pointwise in op.func.tags:
        return _in_one_order(op)
    return None


def _reordered(op: Op) -> Label | None:
    """Entries that are picked by an index that is a permutation, or put into public places by it."""
    written = next((op[name] for name in VALUES if isinstance(op.given.get(name), Tensor)), None)
    table, given = op["self"], op["self"] if written is None else written
    (dim, index), *others = (each for each in enumerate(indices_of(op, max(1, table.dim()))) if each[1] is not None)
    if others or given.shape != table.shape or (written is not None and op.tracker.labels.get(table) is not None):
        return None
    owned = owners_of(op.tracker.labels.get(given), dim, given.shape[dim])
    order = order_of(op.tracker, index, given.shape[dim]) if owned is not None else None
    if owned is None or order is None:
        return None
    rows, owners = owned
    if written is None:
        return arranged(op.name, rows, [owners[place] for place in order])
    return arranged(op.name, rows, [owner for _, owner in sorted(zip(order, owners, strict=True))])


def _inverse(op: Op) -> Label | None:
    """Where each position has gone: `empty.scatter_(0, positions, arange)`."""
    positions, source = op.tracker.labels.get(op["index"]), op["src"]
    whole = source.dim() == 1 and source.stride(0) == 1 and op.tracker.labels.counts(source, len(source))
    if not isinstance(positions, Positions) or not whole or not len(source) == len(positions.order) == len(op["self"]):
        return None
    back = [place for _, place in sorted(zip(positions.order, range(len(source)), strict=True))]
    return replace(positions, order=tuple(back))


def _in_one_order(op: Op) -> Label | None:
    """Numbers in the same place, of examples in the same order."""
    labels = [label for _, label in op.labelled]  # type: ignore[misc]
    first = labels[0]
    same = isinstance(first, Permuted) and all(
        isinstance(each, Permuted) and (each.rows, each.owners) == (first.rows, first.owners) for each in labels
    )
    shaped = isinstance(op.found, Tensor) and all(tensor.shape == op.found.shape for tensor, _ in op.labelled)
    return first if same and shaped else None


def joined_by_mask(tracker: Tracker, given: Tensor, mask: Tensor) -> Tensor | None:
    """`masked_select` of one row of whole numbers for each example, as targets of a CTC loss are joined; None of any
    other."""
    label = tracker.labels.get(given)
    known = isinstance(label, Rows) and (label.axis, label.inner, label.first, label.count) == (0, 1, 0, len(given))
    if not known or given.dim() != 2 or given.is_floating_point() or given.shape != mask.shape:
        return None
    if tracker.labels.get(mask) not in (label, None):
        return None
    padded = given.gather(1, mask.logical_not().to(torch.uint8).sort(dim=1, stable=True).indices)
    with unseen():
        found = padded.flatten().clone()
    joined = Joined.made("masked_select", why="joins what is chosen of several examples", unknown=True, padded=padded)
    tracker.labels.set(found, joined)
    return found


# --- packed sequences -------------------------------------------------------------------------------------------------


class _Moved(torch.autograd.Function):
    """Entries [steps of examples] are packed, or padded again; labels are those that are given."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, tracker: Tracker, move: _Move) -> Tensor:  # type: ignore[override]
        ctx.tracker, ctx.move = tracker, move
        with unseen():
            found = move.packed(given) if move.packing else move.padded(given)
        tracker.labels.set(found, move.after)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        tracker, move = ctx.tracker, ctx.move
        label = tracker.labels.get(gradient)
        with unseen():
            found = move.padded(gradient, 0.0) if move.packing else move.packed(gradient)
        if label is not None:
            same = owned(label) == owned(move.after)
            tracker.labels.set(found, move.before if same else mixed("a backward pass", "mixes packed examples"))
        return found, None, None


def owned(label: Label) -> Any:
    return (label.rows, label.owners) if isinstance(label, Permuted) else label


@dataclass(frozen=True)
class _Move:
    packing: bool
    before: Label
    after: Label
    places: Tensor
    """Of each packed entry, in the padded sequences with their first two axes as one."""
    shape: tuple[int, int]
    padding: float = 0.0

    def packed(self, padded: Tensor) -> Tensor:
        return padded.flatten(0, 1)[self.places]

    def padded(self, packed: Tensor, padding: float | None = None) -> Tensor:
        filled = packed.new_full((self.shape[0] * self.shape[1], *packed.shape[1:]), padding or self.padding)
        filled[self.places] = packed
        return filled.unflatten(0, self.shape)


def _places(lengths: Sequence[int], steps: int, batch_first: bool, device: torch.device) -> Tensor:
    count = len(lengths)
    flat = [
        row * steps + step if batch_first else step * count + row
        for step in range(max(lengths))
        for row, length in enumerate(lengths)
        if length > step
    ]
    return torch.tensor(flat, device=device)


def pack(tracker: Tracker, given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor] | None:
    """`_pack_padded_sequence` of sequences that are sorted by length; None if their owners are not known."""
    if tracker.captured:
        return None
    axis = 0 if batch_first else 1
    before, measured = tracker.labels.get(given), tracker.labels.get(lengths)
    found = owners_of(before, axis, given.shape[axis])
    known = owners_of(measured, 0, len(lengths)) if measured is not None else None
    if found is None or before is None or (measured is not None and (known is None or known[1] != found[1])):
        return None
    rows, owners = found
    if known is not None and known[0].batch != rows.batch:
        return None
    with unseen():
        ends: list[int] = lengths.tolist()
        if any(later > sooner for later, sooner in zip(ends[1:], ends, strict=False)) or ends[-1] < 1:
            return None  # torch says what is wrong
        places = _places(ends, given.shape[1 - axis], batch_first, given.device)
        sizes = torch.tensor([sum(end > step for end in ends) for step in range(ends[0])])
    held = [owner for step in range(ends[0]) for owner, end in zip(owners, ends, strict=True) if end > step]
    label = Packed.made("pack_padded_sequence", rows=rows.at(0), owners=tuple(held))
    shape = (given.shape[0], given.shape[1])
    data: Tensor = _Moved.apply(given, tracker, _Move(True, before, label, places, shape))  # type: ignore[no-untyped-call]
    tracker.labels.set(sizes, Steps.made("pack_padded_sequence", width=given.shape[1 - axis]))
    tracker.packed = True
    return data, sizes


def pad(
    tracker: Tracker, data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor] | None:
    """`_pad_packed_sequence`; None if the owners are not known. Where torch would pad to the longest, which decides for
    all sequences what follows from padding, they are as wide as they were before they were packed."""
    before, steps = tracker.labels.get(data), tracker.labels.get(sizes)
    if not isinstance(before, Permuted) or before.rows.axis or not isinstance(steps, Steps):
        return None
    with unseen():
        going: list[int] = sizes.tolist()
    count, rows = going[0], before.rows
    ends = [sum(size > row for size in going) for row in range(count)]
    owners = before.owners[:count]
    held = tuple(owner for step in range(len(going)) for owner, end in zip(owners, ends, strict=True) if end > step)
    if held != before.owners or total < len(going):
        return None
    total = steps.width if total == len(going) else total
    axis = 0 if batch_first else 1
    with unseen():
        places = _places(ends, total, batch_first, data.device)
        lengths = torch.tensor(ends)
    after = arranged("pad_packed_sequence", rows.at(axis), owners)
    shape = (count, total) if batch_first else (total, count)
    padded: Tensor = _Moved.apply(data, tracker, _Move(False, before, after, places, shape, padding))  # type: ignore[no-untyped-call]
    tracker.labels.set(lengths, arranged("pad_packed_sequence", rows.at(0), owners))
    return padded, lengths
