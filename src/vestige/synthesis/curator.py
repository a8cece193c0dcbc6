"""Who answers questions about a private table? Its curator: each question is charged before its answer exists.

Whatever is computed from rows before noise stays in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.files import read_tensors, write_tensors
from vestige.mechanism.charges import Ask
from vestige.priced_questions import ExponentialMechanism, Gaussian, Question
from vestige.randomness.exponential_mechanism import choose
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import add_noise
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.synthesis.schema import Codes

Counts = npt.NDArray[np.float64]
Labels = Callable[[Codes], npt.NDArray[np.int64]]
AT_ONCE = 1 << 25
"""Distances that are held at once."""


class Interrupted(Exception):
    """The caller has asked to stop."""


class Answers(Protocol):
    """Where answers are kept, so that an interrupted run need not ask again."""

    def known(self, step: int) -> object: ...

    def keep(self, step: int, answer: object) -> None: ...


class InMemory:
    """Answers of a run that leaves nothing behind."""

    def known(self, step: int) -> object:
        return None

    def keep(self, step: int, answer: object) -> None:
        pass


class InFile:
    """Answers in a file, written after each: releases only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: list[object] = read_tensors(path)["answers"] if path.exists() else []

    def __len__(self) -> int:
        return len(self._answers)

    def known(self, step: int) -> object:
        return self._answers[step] if step < len(self._answers) else None

    def keep(self, step: int, answer: object) -> None:
        assert step == len(self._answers)
        self._answers.append(answer)
        write_tensors(self._path, {"answers": self._answers})


class TableCurator:
    """SENSITIVE: holds the rows of a table, as cells; gives noised counts and noisy choices."""

    def __init__(
        self,
        rows: Codes,
        sizes: Sequence[int],
        ask: Ask,
        randomness: Randomness,
        answers: Answers,
        device: str = "cpu",
        rows_per_unit: int = 1,
    ) -> None:
        """`rows_per_unit` is the most rows of one user, where users are protected: all of them together move an answer
        by so many times what one of them does."""
        self.rows_per_unit = rows_per_unit
        self._rows, self.sizes = rows, tuple(sizes)
        self.population = len(rows)
        """Public, as everywhere: what was declared about the data."""
        self._ask, self._randomness, self._answers, self._device = ask, randomness, answers, device
        self.step = 0
        """How many questions were answered."""
        self.on_answer: Callable[[int], bool] = lambda done: True
        """Called with how many; False interrupts, between two questions."""

    def counts(self, groups: Sequence[tuple[int, ...]], maps: Sequence[Codes], multiplier: float) -> list[Counts]:
        """How many rows are in each cell of these groups of columns, noised: one question about all of them. `maps` is
        how each column's cells are merged.

        Formal guarantees: one Gaussian mechanism with this multiplier. A row is in one cell of each group, so adding or
        removing it moves all counts together by sqrt(groups) in the 2-norm.
        """
        sizes = [int(each.max()) + 1 for each in maps]
        shapes = [tuple(sizes[column] for column in group) for group in groups]
        sensitivity = self.rows_per_unit * sqrt(len(groups))

        def answer() -> Tensor:
            merged = self._merged(maps)
            parts = [_table(merged, group, shape) for group, shape in zip(groups, shapes, strict=True)]
            return self._noised(np.concatenate([part.ravel() for part in parts]), sensitivity, multiplier)

        found = self._answered(Gaussian(multiplier), sensitivity, answer).numpy()
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(found, ends), shapes, strict=True)]

    def pair_errors(self, maps: Sequence[Codes], guesses: Sequence[Counts]) -> dict[tuple[int, int], float]:
        """SENSITIVE: for `choice` alone. How wrong it is, in rows, to take each two columns for independent: the L1
        distance of their table of counts from the product of `guesses`, which are public shares."""
        merged, found = self._merged(maps), {}
        for left in range(len(guesses)):
            for right in range(left + 1, len(guesses)):
                shape = (len(guesses[left]), len(guesses[right]))
                expected = self.population * np.outer(guesses[left], guesses[right])
                found[left, right] = float(np.abs(_table(merged, (left, right), shape) - expected).sum())
        return found

    def choice(self, scores: Callable[[], Sequence[float]], epsilon: float) -> int:
        """The place of one of several candidates, drawn by scores that are computed from the rows once that was paid.

        Formal guarantees: the exponential mechanism with this epsilon, if adding or removing a row moves every score by
        1 at most: an L1 distance from counts does.
        """

        def answer() -> int:
            return choose(scores(), self.rows_per_unit, epsilon, self._randomness.stream("choice", self.step))

        return int(self._answered(ExponentialMechanism(epsilon), self.rows_per_unit, answer))

    def votes(self, candidates: Tensor, vectors: Sequence[Tensor], multiplier: float) -> Counts:
        """How many rows have each candidate for their nearest, noised. Candidates are points, [candidates, width].

        Formal guarantees: one Gaussian mechanism with this multiplier: a row has one vote.
        """

        def answer() -> Tensor:
            rows = torch.from_numpy(self._rows)
            counts = np.zeros(len(candidates))
            points = candidates.to(self._device)
            for part in rows.split(max(1, AT_ONCE // max(1, candidates.numel()))):
                own = embedded(part, vectors).to(self._device)
                nearest = torch.cdist(own, points, p=1).argmin(dim=1).cpu().numpy()
                counts += np.bincount(nearest, minlength=len(candidates))
            return self._noised(counts, self.rows_per_unit, multiplier)

        return np.asarray(self._answered(Gaussian(multiplier), self.rows_per_unit, answer).numpy())

    def right_answers(self, predict: Labels, label: int, multiplier: float) -> float:
        """The share of rows whose cell of column `label` is what `predict` says of the others, noised.

        Formal guarantees: one Gaussian mechanism with this multiplier: a row moves the count by 1 at most.
        """

        def answer() -> Tensor:
            right = float((predict(self._rows) == self._rows[:, label]).sum())
            return self._noised(np.array([right]), self.rows_per_unit, multiplier)

        count = float(self._answered(Gaussian(multiplier), self.rows_per_unit, answer)[0])
        return min(1.0, max(0.0, count / self.population))

    def _answered(self, question: Question, sensitivity: float, answer: Callable[[], object]) -> Any:
        """The answer, from before an interruption or charged and computed now."""
        found = self._answers.known(self.step)
        if found is None:
            self._ask(question, step=self.step, part=0, sensitivity=sensitivity)
            found = answer()
            self._answers.keep(self.step, found)
        self.step += 1
        if not self.on_answer(self.step):
            raise Interrupted
        return found

    def _noised(self, counts: Counts, sensitivity: float, multiplier: float) -> Tensor:
        total = torch.from_numpy(counts.astype(np.float64))
        add_noise(BoundedSum(total, sensitivity), multiplier, self._randomness.stream("counts", self.step))
        return total

    def _merged(self, maps: Sequence[Codes]) -> Codes:
        return np.column_stack([mapping[self._rows[:, column]] for column, mapping in enumerate(maps)])


def _table(rows: Codes, group: Sequence[int], shape: Sequence[int]) -> Counts:
    """The counts of these columns' cells."""
    flat = np.ravel_multi_index(tuple(rows[:, column] for column in group), tuple(shape))
    return np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape).astype(np.float64)


def embedded(rows: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """Rows as points: the vectors of their cells, one after the other."""
    return torch.cat([points[rows[:, column]] for column, points in enumerate(vectors)], dim=1)
