"""How do votes become rows? Private evolution: candidates vary, and private rows vote for the nearest of them.

As Tab-PE (2606.08259), with three choices of ours: the first candidates are drawn from noised counts of every column;
there are only so many candidates that their votes stand out of the noise; and what has won is drawn from in proportion
to its votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from vestige.priced_questions import Gaussian, Question
from vestige.synthesis.curator import Counts, TableCurator, embedded
from vestige.synthesis.marginals import simplex
from vestige.synthesis.schema import Codes, Column

ITERATIONS = 8
COLUMNS_SHARE = 0.2
"""Of the budget, in squares of mu, for the counts that the first candidates are drawn from."""
FEWEST, MOST = 32, 4000
"""Candidates that stay after a vote."""
CHILDREN = 3
"""Variations of each candidate that stays; the candidate itself is voted on, too."""
FIRST_SHARE, LAST_SHARE = 0.6, 0.08
"""The share of columns that a variation draws anew: in the first iteration, and in the last."""


@dataclass(frozen=True)
class EvolutionPlan:
    """The public numbers of a run: all follow from one noise multiplier, the number of rows and of iterations."""

    multiplier: float
    iterations: int = ITERATIONS

    @property
    def column_multiplier(self) -> float:
        return self.multiplier / sqrt(COLUMNS_SHARE)

    @property
    def vote_multiplier(self) -> float:
        return self.multiplier * sqrt(self.iterations / (1 - COLUMNS_SHARE))

    def questions(self) -> list[tuple[Question, int]]:
        return [(Gaussian(self.column_multiplier), 1), (Gaussian(self.vote_multiplier), self.iterations)]

    def parents(self, population: float) -> int:
        """So many that a parent has votes of about twice their noise."""
        return int(min(MOST, max(FEWEST, population / (2 * self.vote_multiplier))))


@dataclass(frozen=True)
class Evolved:
    """The last candidates and their noised votes: a release."""

    candidates: Codes
    votes: Counts
    columns: tuple[Column, ...]
    shares: list[Counts]

    def sample(self, count: int, random: np.random.Generator) -> Codes:
        """Rows, drawn by votes and varied a little, so that none is repeated more often than chance has it."""
        rows = self.candidates[random.choice(len(self.candidates), count, p=self.votes / self.votes.sum())]
        return varied(rows, self.columns, self.shares, LAST_SHARE / 2, random)


def evolved(
    curator: TableCurator, plan: EvolutionPlan, columns: tuple[Column, ...], random: np.random.Generator
) -> Evolved:
    """Ask for votes, again and again.

    Formal guarantees: candidates follow from earlier answers and from public chance alone.
    """
    own = [np.arange(cells) for cells in curator.sizes]
    counted = curator.counts([(column,) for column in range(len(columns))], own, plan.column_multiplier)
    shares = [_positive(each, curator.population) for each in counted]
    vectors = [torch.from_numpy(column.vectors()) for column in columns]
    kept = plan.parents(curator.population / curator.rows_per_unit)
    first = [random.choice(len(share), kept * (1 + CHILDREN), p=share) for share in shares]
    candidates, votes = np.column_stack(first).astype(np.int64), np.ones(0)
    for turn in range(plan.iterations):
        if turn:
            parents = _survivors(candidates, votes, kept, random)
            share = FIRST_SHARE * (LAST_SHARE / FIRST_SHARE) ** (turn / max(1, plan.iterations - 1))
            children = varied(np.repeat(parents, CHILDREN, axis=0), columns, shares, share, random)
            candidates = np.concatenate([parents, children])
        candidates = np.unique(candidates, axis=0)
        points = embedded(torch.from_numpy(candidates), vectors)
        # Votes below the noise count as none: the many candidates without any would outweigh the rest together.
        noisy = curator.votes(points, vectors, plan.vote_multiplier)
        votes = np.maximum(noisy - curator.rows_per_unit * plan.vote_multiplier, 0.0)
        votes = votes if votes.sum() > 0 else np.ones(len(candidates))
    return Evolved(candidates, votes, columns, shares)


def _survivors(candidates: Codes, votes: Counts, kept: int, random: np.random.Generator) -> Codes:
    """Those with most votes; where fewer have any, all of these."""
    best = np.argsort(-votes + 1e-9 * random.random(len(votes)))[:kept]
    return candidates[best[votes[best] > 0]]


def _positive(counts: Counts, population: int) -> Counts:
    shares = simplex(counts, population) + 0.5  # no cell is impossible
    return shares / shares.sum()


def varied(
    rows: Codes, columns: Sequence[Column], shares: Sequence[Counts], share: float, random: np.random.Generator
) -> Codes:
    """Rows of which this share of the columns is drawn anew: categories from their column's shares, numbers near what
    they were, within this share of the range."""
    found = rows.copy()
    for place, column in enumerate(columns):
        drawn = random.choice(column.cells, len(rows), p=shares[place])
        if column.is_number:
            reach = max(1, round(share * column.bins))
            near = np.clip(rows[:, place] + random.integers(-reach, reach + 1, len(rows)), 0, column.bins - 1)
            missing = (rows[:, place] == column.bins) | (drawn == column.bins)
            drawn = np.where(missing, drawn, near)
        found[:, place] = np.where(random.random(len(rows)) < share, drawn, rows[:, place])
    return found
