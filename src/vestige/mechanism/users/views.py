"""How are the rows of one user clipped once? A user is an example, and its rows are the views whose mean is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vestige.mechanism.clipping import Batch, Clip, GradientEngine, Parameters, Transform
from vestige.mechanism.examples import Draw, Examples
from vestige.mechanism.gradient_transforms import Linear, Term, one_after
from vestige.mechanism.users.ownership import Ownership, RowsOfEach
from vestige.randomness.keys import Randomness


class UserBatch(list[Tensor]):
    """A batch of users who have the same number of rows, more than one: [users, rows, ...]."""


@dataclass(frozen=True)
class Mean(Linear):
    """The mean gradient of a user's rows.

    Formal guarantees: a user contributes one vector, clipped after averaging, whatever the number of rows.
    """

    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        return [Term(1.0, point, [part.flatten(0, 1) for part in batch], batch[0].shape[1])]


class UserEngine:
    """An engine that also takes batches of users: the mean of each one's rows is clipped."""

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if not isinstance(batch, UserBatch):  # one row each, as any example
            return self._engine(batch, parameters, clip, into, transform)
        return self._engine(batch, parameters, clip, into, one_after(transform, Mean()))


class UserExamples:
    """SENSITIVE: users, each with all of its rows or with `cap` of them, drawn anew for every question.

    A part of a sample is a set of users, never of rows, so that the rows of a user are never clipped apart. Users with
    equally many rows are put together: no row is padded or computed without need.
    """

    def __init__(self, examples: Examples, owned: Ownership, cap: int | None, randomness: Randomness) -> None:
        self._examples, chosen = examples, RowsOfEach(owned, cap, randomness)
        self.device, self.form, self.population = examples.device, examples.form, owned.users
        self._rows, self.parts, self.numbers = chosen.rows, chosen.parts, chosen.numbers

    def blank(self) -> Batch:
        return self._examples.blank()

    def fetch(self, rows: Tensor) -> list[Batch]:
        return self._examples.fetch(rows)

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]:
        def rows_of(index: int) -> tuple[Sequence[Tensor], int | None]:
            parts, seed = draw(index)
            return [rows.flatten() for part in parts for rows in self._rows(index, part)], seed

        fetch = self._examples.ahead(rows_of)

        def batches(index: int, users: Tensor) -> list[Batch]:
            together = self._rows(index, users)
            return [batch for rows in together for batch in self._stacked(rows, fetch(index, rows.flatten()))]

        return batches

    def _stacked(self, rows: Tensor, found: list[Batch]) -> list[Batch]:
        """Fetched rows as batches of users."""
        users, count = rows.shape
        if count == 1:
            return found
        if len(found) == 1:
            return [UserBatch(part.unflatten(0, (users, count)) for part in found[0])]
        raise ValueError(
            "sample='users': rows of users differ in shape, and a user's rows are averaged in one batch of one shape; "
            "give a collate_fn that pads to one length, or sample='rows'"
        )


class KeptExamples:
    """SENSITIVE: some of the examples, in their order: those that stay when every user's rows are bounded."""

    def __init__(self, examples: Examples, kept: np.ndarray) -> None:
        self._examples, self._kept = examples, torch.from_numpy(kept)
        self.device, self.form, self.population = examples.device, examples.form, len(kept)

    def blank(self) -> Batch:
        return self._examples.blank()

    def parts(self, rows: Tensor, most: int) -> Sequence[Tensor]:
        return self._examples.parts(rows, most)

    def fetch(self, rows: Tensor) -> list[Batch]:
        return self._examples.fetch(self._kept[rows])

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]:
        def kept(index: int) -> tuple[Sequence[Tensor], int | None]:
            parts, seed = draw(index)
            return [self._kept[rows] for rows in parts], seed

        fetch = self._examples.ahead(kept)
        return lambda index, rows: fetch(index, self._kept[rows])
