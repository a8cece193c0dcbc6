"""How do noised marginals become rows? A tree of pairs of columns, the distribution that fits it, and samples.

The method is MST (McKenna, Miklau & Sheldon 2021): counts of every column, a tree of pairs chosen one after the other
by how wrong independence is, counts of those pairs, and the tree-shaped distribution nearest to all of them. Two things
are ours: a pair's score has what its own noise would cost taken off (as in AIM), and a round may choose no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sqrt

import numpy as np

from vestige.priced_questions import ExponentialMechanism, Gaussian, Question
from vestige.synthesis.curator import Counts, TableCurator
from vestige.synthesis.schema import Codes

SHARES = {"columns": 0.25, "tree": 0.15, "pairs": 0.6}
"""Of the budget, counted in squares of mu: public, and chosen before any data."""
RARE = 3.0
"""Cells with fewer rows than so many deviations of their noise are merged into one."""
NOISE_COST = 0.25
"""The share of a pair's own noise, in rows, that is taken off its score: the fit removes most of that noise. Chosen on
public tables, bench/synthesize_tables.py's: with all of it, pairs with a label of ten classes are never chosen."""
ROUNDS = 1000
"""Of the fit, at most."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class MarginalsPlan:
    """The public numbers of a run over so many columns; all follow from one noise multiplier."""

    columns: int
    multiplier: float
    """That of a single Gaussian question of the same cost, by Renyi divergences."""

    @property
    def column_multiplier(self) -> float:
        return self.multiplier / sqrt(SHARES["columns"])

    @property
    def pair_multiplier(self) -> float:
        return self.multiplier / sqrt(SHARES["pairs"])

    @property
    def choice_epsilon(self) -> float:
        return 2 * sqrt(SHARES["tree"] / max(1, self.columns - 1)) / self.multiplier

    def questions(self) -> list[tuple[Question, int]]:
        if self.columns == 1:
            return [(Gaussian(self.column_multiplier), 1)]
        return [
            (Gaussian(self.column_multiplier), 1),
            (ExponentialMechanism(self.choice_epsilon), self.columns - 1),
            (Gaussian(self.pair_multiplier), 1),
        ]


@dataclass(frozen=True)
class Fitted:
    """A tree-shaped distribution over merged cells, and how cells were merged: releases and what follows from them."""

    nodes: list[Counts]
    """Each column's shares of its merged cells."""
    edges: dict[Edge, Counts]
    """Each pair's shares."""
    maps: list[Codes]
    columns: list[Counts]
    """Each column's shares of its own cells, by its own counts."""

    def sample(self, count: int, random: np.random.Generator) -> Codes:
        """Rows, as cells of the columns."""
        merged = np.zeros((count, len(self.nodes)), dtype=np.int64)
        for column, parent in _walk(len(self.nodes), self.edges):
            if parent is None:
                merged[:, column] = _drawn(self.nodes[column], count, random)
                continue
            pair = self.edges[column, parent].T if (column, parent) in self.edges else self.edges[parent, column]
            for cell in range(len(pair)):
                rows = np.flatnonzero(merged[:, parent] == cell)
                if len(rows):
                    merged[rows, column] = _drawn(_shares(pair[cell]), len(rows), random)
        return np.column_stack([self._unmerged(column, merged[:, column], random) for column in range(len(self.nodes))])

    def _unmerged(self, column: int, cells: Codes, random: np.random.Generator) -> Codes:
        mapping, shares = self.maps[column], self.columns[column]
        found = np.empty(len(cells), dtype=np.int64)
        for cell in range(len(self.nodes[column])):
            own, rows = np.flatnonzero(mapping == cell), np.flatnonzero(cells == cell)
            found[rows] = own[_drawn(_shares(shares[own]), len(rows), random)]
        return found


def fitted(curator: TableCurator, plan: MarginalsPlan) -> Fitted:
    """Ask for marginals, and fit a distribution to the answers.

    Formal guarantees: everything here but the curator's answers is post-processing of them.
    """
    size, population = plan.columns, curator.population
    alone = [(column,) for column in range(size)]
    own = [np.arange(cells) for cells in curator.sizes]
    noise = curator.rows_per_unit * plan.column_multiplier * sqrt(size)
    counted = curator.counts(alone, own, plan.column_multiplier)
    shares = [simplex(each, population) / population for each in counted]
    maps = [_merging(each, RARE * noise) for each in counted]
    counted = [merged(mapping, each) for mapping, each in zip(maps, counted, strict=True)]
    guesses = [merged(mapping, each) for mapping, each in zip(maps, shares, strict=True)]
    # A merged cell's noise is that of several.
    deviations = [noise * np.sqrt(np.bincount(mapping)) for mapping in maps]
    edges = _tree(curator, plan, maps, guesses)
    tables: dict[Edge, Counts] = {}
    if edges:
        tables = dict(zip(edges, curator.counts(edges, maps, plan.pair_multiplier), strict=True))
    elif size > 1:  # the question is asked either way: what is charged must not follow from answers
        again = curator.counts(alone, maps, plan.pair_multiplier)
        other = curator.rows_per_unit * plan.pair_multiplier * sqrt(size)
        shares_of_it = [each**2 / (each**2 + other**2) for each in deviations]
        both = zip(shares_of_it, counted, again, strict=True)
        counted = [(1 - share) * first + share * second for share, first, second in both]
        deviations = [np.sqrt(1 - share) * each for share, each in zip(shares_of_it, deviations, strict=True)]
    spread = curator.rows_per_unit * plan.pair_multiplier * sqrt(max(1, len(edges)))
    nodes, pairs = fit(counted, deviations, tables, spread, population)
    return Fitted(nodes, pairs, maps, shares)


def merged(mapping: Codes, counts: Counts) -> Counts:
    """The counts of merged cells."""
    return np.bincount(mapping, weights=counts).astype(np.float64)


def _merging(counts: Counts, least: float) -> Codes:
    """The merged cell of each cell: those with few rows share the last one, if there are two of them."""
    rare = counts < least
    if rare.sum() < 2:
        return np.arange(len(counts))
    mapping = np.cumsum(~rare) - 1
    mapping[rare] = (~rare).sum()
    return mapping.astype(np.int64)


def _tree(curator: TableCurator, plan: MarginalsPlan, maps: Sequence[Codes], guesses: Sequence[Counts]) -> list[Edge]:
    """Pairs that connect columns without a circle, chosen one after the other; a round may choose none."""
    errors: dict[Edge, float] = {}
    part, chosen = list(range(plan.columns)), []
    cost = NOISE_COST * curator.rows_per_unit * sqrt(2 / pi) * plan.pair_multiplier * sqrt(max(1, plan.columns - 1))
    every = [(left, right) for left in range(plan.columns) for right in range(left + 1, plan.columns)]
    for _ in range(plan.columns - 1):
        left_over = [(left, right) for left, right in every if part[left] != part[right]]

        def scores(candidates: Sequence[Edge] = left_over) -> list[float]:
            if not errors:
                errors.update(curator.pair_errors(maps, guesses))
            return [0.0, *(errors[e] - cost * len(guesses[e[0]]) * len(guesses[e[1]]) for e in candidates)]

        place = curator.choice(scores, plan.choice_epsilon)
        if place:
            edge = left_over[place - 1]
            chosen.append(edge)
            part = [part[edge[0]] if each == part[edge[1]] else each for each in part]
    return chosen


# --- the fit ----------------------------------------------------------------------------------------------------------


def fit(
    counted: Sequence[Counts],
    deviations: Sequence[Counts],
    tables: dict[Edge, Counts],
    spread: float,
    population: int,
    rounds: int = ROUNDS,
) -> tuple[list[Counts], dict[Edge, Counts]]:
    """The distribution of a forest that is nearest to noised counts, each by its noise: mirror descent on its
    log-potentials, marginals by belief propagation (McKenna, Sheldon & Miklau 2019)."""
    node_logs = [np.zeros(len(each)) for each in counted]
    edge_logs = {edge: np.zeros(table.shape) for edge, table in tables.items()}
    walk = _walk(len(counted), tables)

    def loss(nodes: list[Counts], pairs: dict[Edge, Counts]) -> float:
        alone = sum(
            float((((population * p - y) / s) ** 2).sum()) for p, y, s in zip(nodes, counted, deviations, strict=True)
        )
        return (alone + sum(float(((population * pairs[e] - tables[e]) ** 2).sum()) / spread**2 for e in tables)) / 2

    nodes, pairs = marginals(node_logs, edge_logs, walk)
    now, step = loss(nodes, pairs), 1.0 / max(1.0, population**2 / spread**2) * 50
    for _ in range(rounds):
        node_slopes = [
            population * (population * p - y) / s**2 for p, y, s in zip(nodes, counted, deviations, strict=True)
        ]
        edge_slopes = {e: population * (population * pairs[e] - tables[e]) / spread**2 for e in tables}
        for _ in range(30):
            tried_nodes = [logs - step * slope for logs, slope in zip(node_logs, node_slopes, strict=True)]
            tried_edges = {e: edge_logs[e] - step * edge_slopes[e] for e in tables}
            new_nodes, new_pairs = marginals(tried_nodes, tried_edges, walk)
            gain = sum(float(((p - q) * g).sum()) for p, q, g in zip(nodes, new_nodes, node_slopes, strict=True))
            gain += sum(float(((pairs[e] - new_pairs[e]) * edge_slopes[e]).sum()) for e in tables)
            then = loss(new_nodes, new_pairs)
            if now - then >= 0.5 * gain:
                break
            step /= 2
        done = now - then < 1e-6 * now
        node_logs, edge_logs, nodes, pairs, now = tried_nodes, tried_edges, new_nodes, new_pairs, then
        if done:
            break
        step *= 1.3
    return nodes, pairs


Walk = list[tuple[int, int | None]]
"""Columns from the roots on, each with its parent."""


def _walk(size: int, edges: dict[Edge, Counts]) -> Walk:
    neighbours: list[list[int]] = [[] for _ in range(size)]
    for left, right in edges:
        neighbours[left].append(right)
        neighbours[right].append(left)
    walk: Walk = []
    seen: set[int] = set()
    for root in range(size):
        waiting: Walk = [] if root in seen else [(root, None)]
        while waiting:
            column, parent = waiting.pop()
            seen.add(column)
            walk.append((column, parent))
            waiting += [(other, column) for other in neighbours[column] if other not in seen]
    return walk


def marginals(
    node_logs: Sequence[Counts], edge_logs: dict[Edge, Counts], walk: Walk
) -> tuple[list[Counts], dict[Edge, Counts]]:
    """The shares of each column and pair under log-potentials on a forest, by belief propagation."""

    def between(parent: int, column: int) -> Counts:
        return edge_logs[parent, column] if (parent, column) in edge_logs else edge_logs[column, parent].T

    below = [np.array(logs) for logs in node_logs]
    upward: dict[int, Counts] = {}
    for column, parent in reversed(walk):
        if parent is not None:
            upward[column] = logsumexp(between(parent, column) + below[column], axis=1)
            below[parent] = below[parent] + upward[column]
    whole = list(below)
    pairs: dict[Edge, Counts] = {}
    for column, parent in walk:
        if parent is None:
            continue
        joint = (whole[parent] - upward[column])[:, None] + between(parent, column) + below[column]
        whole[column] = logsumexp(joint, axis=0)
        shares = np.exp(joint - logsumexp(joint))
        if (parent, column) in edge_logs:
            pairs[parent, column] = shares
        else:
            pairs[column, parent] = shares.T
    return [np.exp(each - logsumexp(each)) for each in whole], pairs


def logsumexp(logs: Counts, axis: int | None = None) -> Counts:
    """scipy's, without its checks, which take most of the time of small tables."""
    most = logs.max(axis=axis, keepdims=True)
    return np.asarray(np.log(np.exp(logs - most).sum(axis=axis)) + most.squeeze(axis))


# --- small things -----------------------------------------------------------------------------------------------------


def simplex(counts: Counts, total: float) -> Counts:
    """The nearest counts that are not negative and add up to the total."""
    falling = np.sort(counts)[::-1]
    surplus = (np.cumsum(falling) - total) / np.arange(1, len(counts) + 1)
    kept = np.flatnonzero(falling > surplus)[-1]
    return np.maximum(counts - surplus[kept], 0.0)


def _shares(weights: Counts) -> Counts:
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))


def _drawn(shares: Counts, count: int, random: np.random.Generator) -> Codes:
    """So many cells, each as often as its share says, to within one: less chance than drawing each by itself."""
    places = (random.random() + np.arange(count)) / max(1, count)
    return random.permutation(np.searchsorted(np.cumsum(shares)[:-1], places, side="right"))
