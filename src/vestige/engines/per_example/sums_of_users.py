"""How is a user with several rows clipped once? By the norm of the sum of the rows' gradients, each user's apart.

Only the norm needs a user's rows together: with the factor that follows from it every row is added by itself, as rows
are that are users of their own. So a pass, and what is captured of it, is about rows, whoever owns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt

import torch
from torch import Tensor

from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import (
    Dense,
    Gradient,
    Lookup,
    Outer,
    Parts,
    Patches,
    Tied,
    Within,
    wide,
)
from vestige.tf32 import MARGIN, multiplies_in_tf32

MOST_BLANK = 4
"""Norms of users with unequal numbers of rows are taken of at most so many times as many rows as there are."""


@dataclass(frozen=True)
class RowCounts:
    """PUBLIC: how many users take part with so many rows each."""

    users: Mapping[int, int]

    @property
    def most(self) -> int:
        return max(self.users)

    @property
    def equal(self) -> bool:
        return len(self.users) == 1

    @cached_property
    def mean(self) -> float:
        return sum(rows * users for rows, users in self.users.items()) / sum(self.users.values())

    @cached_property
    def mean_square(self) -> float:
        return sum(rows**2 * users for rows, users in self.users.items()) / sum(self.users.values())

    def places(self, rows: int) -> int:
        """For how many users there is room among so many rows, if not exceptionally many have exceptionally few."""
        if self.equal:
            return rows // self.most
        likely, spread = rows / self.mean, self.mean_square / self.mean**2 - 1
        return min(ceil(likely + 3 * sqrt(likely * spread)), rows // min(self.users), sum(self.users.values()))

    def whole(self, rows: int) -> int:
        """So many rows, or a few more: room for whole users where all have the same number."""
        return -(-rows // self.most) * self.most if self.equal else rows

    def even(self, rows: int) -> bool:
        """Whether the norms of users among so many rows take no more than a few times the work of the rows' own."""
        return self.places(rows) * self.most <= MOST_BLANK * rows


@dataclass(frozen=True)
class UserRows:
    """Which rows of a batch are whose: a user's lie side by side, in the order of the users, from the first row on.
    Rows after those of the last user are nobody's.

    Formal guarantees: a row is in the sum of one user at most, and nobody's rows are in none, whatever they are.
    """

    counts: Tensor
    """How many rows each user has: [users], whole numbers on the device of the rows; none where nobody is."""
    rows: int
    most: int
    equal: bool
    """Whether whoever is there has `most`."""

    @cached_property
    def _ends(self) -> Tensor:
        return self.counts.cumsum(0)

    @cached_property
    def _owners(self) -> Tensor:
        """Whose each row is; a number beyond the last user's: nobody's."""
        places = torch.arange(self.rows, device=self.counts.device)
        return torch.searchsorted(self._ends, places, right=True)

    def of_rows(self, values: Tensor, nobody: float | bool) -> Tensor:
        """What was found of users, [..., users], for the rows of each: [..., rows]."""
        last = values.new_full((*values.shape[:-1], 1), nobody)
        return torch.cat([values, last], dim=-1)[..., self._owners]

    def among(self, chosen: Tensor) -> UserRows:
        """Of a batch with the rows of some users alone, [users] of truth values."""
        counts = self.counts[chosen]
        return UserRows(counts, int(counts.sum()), self.most, self.equal)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        turn = torch.arange(self.most, device=self.counts.device)
        index = (self._ends - self.counts)[:, None] + turn
        return index.clamp(max=self.rows - 1).flatten(), turn >= self.counts[:, None]

    def _together(self, tensor: Tensor) -> Tensor:
        """[rows, ...] as [users, most, ...], zero where a user has fewer. Where all have as many, nothing is moved:
        what lies in the place of a user who is not there is not blank."""
        users = len(self.counts)
        if self.equal:
            return tensor[: users * self.most].unflatten(0, (users, self.most))
        index, absent = self._index
        found = tensor.index_select(0, index).unflatten(0, (users, self.most))
        return found.masked_fill_(absent.view(*absent.shape, *[1] * (tensor.dim() - 1)), 0)

    def _joined(self, tensor: Tensor) -> Tensor:
        """[rows, positions, ...] as [users, most * positions, ...]."""
        return self._together(tensor).flatten(1, 2)

    def norms(self, gradient: Gradient, unit: float) -> Tensor:
        """2-norms of the sums of the users' rows, [users]. They bound what `gradient.add` makes of a user, however much
        the rows cancel; of who is not there they are any number."""
        if isinstance(gradient, Within):
            return self.norms(gradient.of, unit)
        if isinstance(gradient, Parts):
            return torch.linalg.vector_norm(torch.stack([self.norms(each, unit) for each in gradient.parts]), dim=0)
        if isinstance(gradient, Outer):
            return self._outer_norms(self._outer(gradient), unit)
        if isinstance(gradient, Lookup):
            return self._lookup(gradient).norms(unit)
        if isinstance(gradient, Tied):
            return Tied(self._lookup(gradient.lookup), self._outer(gradient.outer)).norms(unit)
        if isinstance(gradient, Patches):
            return self._patches_norms(gradient, unit)
        assert isinstance(gradient, Dense), "others are made dense before"
        each = self._together(wide(gradient.value))
        lengths = torch.linalg.vector_norm(each.flatten(2) if each.dim() > 2 else each[:, :, None], dim=2).sum(dim=1)
        return _covering(Dense(each.sum(dim=1)).norms(), lengths, unit, multiplies_in_tf32(each))

    def _outer(self, gradient: Outer) -> Outer:
        return Outer(self._joined(gradient.left), self._joined(gradient.right))

    def _lookup(self, gradient: Lookup) -> Lookup:
        return Lookup(self._joined(gradient.index), self._joined(gradient.rows), gradient.height)

    def _outer_norms(self, joined: Outer, unit: float) -> Tensor:
        positions, out, width = joined.left.shape[1], joined.left.shape[2], joined.right.shape[2]
        if positions == 1 or out * width > positions * (out + width):
            return joined.norms(unit)
        sizes = [torch.linalg.vector_norm(wide(each), dim=2) for each in (joined.left, joined.right)]
        lengths = torch.linalg.vecdot(*sizes)
        return _covering(Dense(joined.dense()).norms(), lengths, unit, multiplies_in_tf32(joined.left))

    def _patches_norms(self, gradient: Patches, unit: float) -> Tensor:
        image, signal = self._together(gradient.image), self._together(gradient.signal)
        if gradient._has_rows():
            image, signal = image.flatten(1, 2), signal.flatten(1, 2)
        return Patches(image, signal, gradient.geometry).norms(unit)


def _covering(norms: Tensor, lengths: Tensor, unit: float, tf32: bool) -> Tensor:
    """Norms of sums that are taken again with weights: with what rounding can hide of terms of these lengths."""
    found = kernels.at_most_hidden(norms, lengths, unit)
    return found + MARGIN * lengths if tf32 else found


def summable(gradient: Gradient) -> Gradient:
    """The gradient in a form whose rows `UserRows` can sum: materialised, if it has none."""
    if isinstance(gradient, Within):
        return Within(summable(gradient.of), gradient.place, gradient.shape)
    if isinstance(gradient, Parts):
        return Parts(tuple(summable(each) for each in gradient.parts))
    return gradient if isinstance(gradient, Dense | Outer | Lookup | Tied | Patches) else Dense(gradient.dense())
