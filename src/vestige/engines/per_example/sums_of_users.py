"""How is a user with several rows clipped once? By the norm of the sum of the rows' gradients, each user's apart.

Only the norm needs a user's rows together: with the factor that follows from it every row is added by itself, as rows
are that are users of their own. So a pass, and its CUDA graph, is about rows, however they are distributed over users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod, sqrt

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
from vestige.tf32 import MARGIN, convolves_in_tf32, multiplies_in_tf32

MOST_BLANK = 4
"""Norms of users with unequal numbers of rows are taken of at most so many times as many rows as there are."""


@dataclass(frozen=True)
class RowCounts:
    """PUBLIC: how many users take part with so many rows each."""

    users: Mapping[int, int]

    @cached_property
    def _places(self) -> dict[int, int]:
        """What `places` has found: every step asks it of several sizes."""
        return {}

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
        if rows not in self._places:
            likely, spread = rows / self.mean, self.mean_square / self.mean**2 - 1
            most = min(rows // min(self.users), sum(self.users.values()))
            self._places[rows] = (
                rows // self.most if self.equal else min(ceil(likely + 3 * sqrt(likely * spread)), most)
            )
        return self._places[rows]

    def whole(self, rows: int) -> int:
        """So many rows, or a few more: room for whole users where all have the same number."""
        return -(-rows // self.most) * self.most if self.equal else rows

    def even(self, rows: int) -> bool:
        """Whether the norms of users among so many rows take no more than a few times the work of the rows' own."""
        return self.places(rows) * self.most <= MOST_BLANK * rows


@dataclass(frozen=True)
class UserRows:
    """Which rows of a batch are whose: a user's lie side by side, in the order of the users, from the first row on.
    Rows after those of the last user belong to no user.

    Formal guarantees: a row is in the sum of one user at most, and rows of no user are in none, whatever they are.
    """

    counts: Tensor
    """How many rows each user has: [users], whole numbers on the device of the rows; 0 for an absent user."""
    rows: int
    most: int
    equal: bool
    """Whether every present user has `most`."""

    @cached_property
    def _ends(self) -> Tensor:
        return self.counts.cumsum(0)

    @cached_property
    def _owners(self) -> Tensor:
        """The user of each row; the number of users for rows of no user."""
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
    def _segments(self) -> kernels.Segments:
        return kernels.Segments(self._ends - self.counts, self.counts, self.most, self.rows)

    def _together(self, tensor: Tensor) -> Tensor:
        """[rows, ...] as [users, most, ...], zero where a user has fewer. Where all have as many, nothing is moved:
        what lies in the place of a user who is not there is not blank."""
        users = len(self.counts)
        if self.equal:
            return tensor[: users * self.most].unflatten(0, (users, self.most))
        return self._segments.padded(tensor)

    def _joined(self, tensor: Tensor) -> Tensor:
        """[rows, positions, ...] as [users, most * positions, ...]."""
        return self._together(tensor).flatten(1, 2)

    def summed(self, gradient: Gradient) -> Gradient:
        """The gradients of users: materialised, where that is no larger than what their rows' are made of. What is
        clipped is then the sum as it was rounded, and no norm need cover how it would round again."""
        if isinstance(gradient, Within):
            inside = self.summed(gradient.of)
            return RowsOfUsers(gradient, self) if isinstance(inside, RowsOfUsers) else replace(gradient, of=inside)
        found: Tensor | None = None
        if isinstance(gradient, Dense):
            sums, norms = self._sums_and_norms(gradient.value)
            return Dense(sums) if norms is None else Measured(sums, (norms,))
        if isinstance(gradient, Outer) and self.equal and len(self.counts):
            positions, out, width = self.most * gradient.left.shape[1], gradient.left.shape[2], gradient.right.shape[2]
            if positions > 1 and out * width <= positions * (out + width):
                found = self._outer(gradient).dense()
        elif isinstance(gradient, Patches) and (self.equal or gradient._fuses()) and len(self.counts):
            numbers = gradient.image.numel() + gradient.signal.numel()
            if 4 * prod(gradient.shape) * len(self.counts) <= 5 * numbers:
                found = self._convolved(gradient, keep=True)[0]
        return RowsOfUsers(gradient, self) if found is None else Dense(found)

    def _sums(self, value: Tensor) -> Tensor:
        return self._sums_and_norms(value)[0]

    def _sums_and_norms(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.equal and not kernels.can_fuse(value):
            return self._together(wide(value)).sum(dim=1), None
        return kernels.segment_sums(value, self._segments)

    def norms(self, gradient: Gradient, unit: float) -> Tensor:
        """2-norms of the sums of the users' rows, [users]. They bound what `gradient.add` makes of a user, however much
        the rows cancel; of who is not there they are any number."""
        if isinstance(gradient, Within):
            return self.norms(gradient.of, unit)
        if isinstance(gradient, Parts):
            return torch.linalg.vector_norm(torch.stack([self.norms(each, unit) for each in gradient.parts]), dim=0)
        if isinstance(gradient, Outer):
            margin = MARGIN if multiplies_in_tf32(gradient.left) else 0.0
            if self.equal:
                return self._outer(gradient).norms(unit)
            return kernels.outer_norms(gradient.left, gradient.right, unit, margin, self._segments)[0]
        if isinstance(gradient, Lookup):
            return self._lookup(gradient).norms(unit)
        if isinstance(gradient, Tied):
            return Tied(self._lookup(gradient.lookup), self._outer(gradient.outer)).norms(unit)
        if isinstance(gradient, Patches):
            lengths = self._sums(gradient._lengths())
            norms = self._convolved(gradient, keep=False)[1]
            return _covering(norms, lengths, unit, convolves_in_tf32(gradient.image))
        assert isinstance(gradient, Dense), "others are made dense before"
        lengths = self._sums(gradient.norms())
        norms = Dense(self._sums(gradient.value)).norms()
        return _covering(norms, lengths, unit, multiplies_in_tf32(gradient.value))

    def _outer(self, gradient: Outer) -> Outer:
        return Outer(self._joined(gradient.left), self._joined(gradient.right))

    def _lookup(self, gradient: Lookup) -> Lookup:
        return Lookup(self._joined(gradient.index), self._joined(gradient.rows), gradient.height)

    def _convolved(self, gradient: Patches, keep: bool) -> tuple[Tensor, Tensor]:
        """The gradients of users, if kept, or else their norms."""
        if self.equal or not gradient._fuses() or (not keep and self._of_pixels(gradient)):
            found = _views(gradient, self._together(gradient.image), self._together(gradient.signal))
            return (found.dense(), found.signal) if keep else (found.signal, found._norms())
        gradients, squares = gradient._fused(keep, self._segments)
        return gradients, squares.sqrt()

    def _of_pixels(self, gradient: Patches) -> bool:
        """Whether inner products of pixels cost less, of a user with the most rows, even where rows are copied."""
        one = _views(gradient, gradient.image[: self.most][None], gradient.signal[: self.most][None])
        return one._ghost_cost() < one._direct_cost()


def _views(gradient: Patches, image: Tensor, signal: Tensor) -> Patches:
    """Of images [users, rows, ...], where a row may itself be several of the convolution's batch."""
    if gradient._has_rows():
        image, signal = image.flatten(1, 2), signal.flatten(1, 2)
    return Patches(image, signal, gradient.geometry)


@dataclass(frozen=True)
class Measured(Dense):
    """Materialised, with norms that were found on the way, as long as nothing is blanked."""

    known: tuple[Tensor]

    def norms(self, unit: float = 0.0) -> Tensor:
        """Of some examples in float64, whose norms overflow float32, anew."""
        return self.known[0] if self.value.dtype == torch.float32 else super().norms()


@dataclass(frozen=True)
class RowsOfUsers:
    """The gradients of users by those of their rows, which are added with the factor of their user each."""

    of: Gradient
    users: UserRows

    def norms(self, unit: float) -> Tensor:
        return self.users.norms(self.of, unit)

    def add(self, into: Tensor, factors: Tensor) -> None:
        """Of rows: what they are is the same for all parameters (`UserRows.of_rows`)."""
        self.of.add(into, factors)

    def dense(self) -> Tensor:
        return self.users._sums(self.of.dense())


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
