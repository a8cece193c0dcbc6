"""How are the rows of one user clipped once? A user is an example, and its rows are the views whose mean is clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vestige.mechanism.clipping import Batch, Clip, GradientEngine, Parameters, Transform
from vestige.mechanism.examples import Draw, Examples
from vestige.mechanism.gradient_transforms import Mean, UnequalMean, one_after
from vestige.mechanism.users.ownership import Ownership, RowsOfEach
from vestige.randomness.keys import Randomness


class UserBatch(list[Tensor]):
    """A batch of users who have the same number of rows, more than one: [users, rows, ...]."""


class UnequalUsers(list[Tensor]):
    """A batch of users who may have different numbers of rows, [rows, ...]: so many users with so many rows each, one
    after another."""

    def __init__(self, rows: Batch, numbers: Sequence[tuple[int, int]]) -> None:
        super().__init__(rows)
        self.numbers = tuple(numbers)


class UserEngine:
    """An engine that also takes batches of users: the mean of each one's rows is clipped."""

    def __init__(self, engine: GradientEngine, unequal: bool = False) -> None:
        """`unequal`: whether the engine takes users with different numbers of rows at once."""
        self._engine, self._unequal = engine, unequal

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if isinstance(batch, UnequalUsers):
            mean = UnequalMean(batch.numbers)
            if self._unequal and transform is None:
                return self._engine(batch, parameters, clip, into, mean)
            parts = mean.alike(batch)
            found = [self._engine(part, parameters, clip, into, one_after(transform, each)) for part, each in parts]
            return torch.cat(found)
        if not isinstance(batch, UserBatch):  # one row each, as any example
            return self._engine(batch, parameters, clip, into, transform)
        return self._engine(batch, parameters, clip, into, one_after(transform, Mean()))


class UserExamples:
    """SENSITIVE: users, each with all of its rows or with `cap` of them, drawn anew for every question.

    A part of a sample is a set of users, never of rows, so that the rows of a user are never clipped apart.
    """

    def __init__(self, examples: Examples, owned: Ownership, cap: int | None, randomness: Randomness) -> None:
        self._examples, chosen = examples, RowsOfEach(owned, cap, randomness)
        self.device, self.form, self.population = examples.device, examples.form, owned.users
        self._together, self.parts, self.numbers = chosen.together, chosen.parts, chosen.numbers

    def blank(self) -> Batch:
        return self._examples.blank()

    def fetch(self, rows: Tensor) -> list[Batch]:
        return self._examples.fetch(rows)

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]:
        def rows_of(index: int) -> tuple[Sequence[Tensor], int | None]:
            parts, seed = draw(index)
            return [self._together(index, part)[0] for part in parts], seed

        fetch = self._examples.ahead(rows_of)

        def batches(index: int, users: Tensor) -> list[Batch]:
            rows, numbers = self._together(index, users)
            return self._stacked(numbers, fetch(index, rows))

        return batches

    def _stacked(self, numbers: Sequence[tuple[int, int]], found: list[Batch]) -> list[Batch]:
        """Fetched rows as batches of users."""
        if all(count == 1 for _, count in numbers):
            return found
        if len(found) == 1 and len(self.numbers) == 1:
            return [UserBatch(part.view(*numbers[0], *part.shape[1:]) for part in found[0])]
        if len(found) == 1:
            return [UnequalUsers(found[0], numbers)]
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
