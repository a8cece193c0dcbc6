"""What does an epoch cost in which every example is used in one of its steps, drawn uniformly? Random allocation.

Without the example the epoch's releases are noise alone; with it, one of them, unknown which, is shifted. The ratio of
the two densities is the mean T of `steps` independent log-normal numbers, and the profile is what options on T are
worth: E (T - c)_+ to remove the example, c E (1/c - T)_+ to add it. Both are convex in T, so every number that is above
T in the convex order gives a bound from above, in both directions. Splitting the mass between two points of a grid onto
these points, with the same mean, moves a number up in that order, and so does adding independent numbers that were
moved up. That is all that happens here: log-normal numbers are put on a geometric grid, and added by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, expm1, floor, inf, log, sqrt

import numpy as np
from scipy.special import log_ndtr, ndtri

from vestige.accounting.profiles import DEEPEST, Profile, sampled_gaussian
from vestige.accounting.rdp import ORDERS, Array, log_sum
from vestige.priced_questions import AllocatedGaussian

MOST_CELLS = 6000
"""Longest grid: an addition takes so many squared operations. A coarser one is a looser bound, and still one."""
CELL_ROUNDING, SUM_ROUNDING = 1e-14, 2.0**-52
"""By how much the masses of a cell may be wrong relative to themselves, and by how much one more term makes a sum."""
NEARLY_ABSENT = 1e6
"""Up to so many times what is negligible a probability of zero is not followed through sums, but charged."""
SHIFT = 1e-12
"""More than rounding may move the logarithm of a point of the grid."""
DROWNED = 100.0
"""With more noise than this times the sensitivity, Renyi curves are those of an example whose step is known: a grid
would be long, and deltas do not need them."""
NOISELESS = 0.06
"""Less noise than this times the sensitivity hides nothing, and no grid could hold the losses: priced as if every step
saw the example."""


@dataclass(frozen=True)
class Sum:
    """A random number on the points e^(place step), at zero, and (as `lost` of its mean) at infinity."""

    step: float
    lowest: int
    masses: Array
    zero: float = 0.0
    lost: float = 0.0

    @property
    def logs(self) -> Array:
        return np.asarray((self.lowest + np.arange(len(self.masses))) * self.step, dtype=np.float64)

    def plus(self, other: Sum, negligible: float) -> Sum:
        """The sum with an independent number on the same grid; every sum is split between the points around it, and
        mass that is negligible at either end is moved off the grid.

        On a geometric grid the sum of two points lies as far above the lower one as their distance says: one shift and
        one share serve all pairs of one distance.
        """
        a, b = self.masses, other.masses
        shift = other.lowest - self.lowest
        distances = shift + np.arange(1 - len(a), len(b))
        above = np.logaddexp(0.0, distances * self.step)
        whole = np.floor(above / self.step).astype(np.int64)
        share = np.clip(np.expm1(above - whole * self.step) / expm1(self.step), 0.0, 1.0)
        first = min(self.lowest, other.lowest)
        last = max(self.lowest + len(a), other.lowest + len(b)) + ceil(log(2) / self.step) + 2
        found = np.zeros(last - first)
        for distance, up, part in zip((distances - shift).tolist(), whole.tolist(), share.tolist(), strict=True):
            start, end = max(0, -distance), min(len(a), len(b) - distance)
            both = a[start:end] * b[start + distance : end + distance]
            place = self.lowest - first + start + up
            higher = part * both
            found[place + 1 : place + 1 + len(both)] += higher
            found[place : place + len(both)] += both - higher
        zero, lost = self.zero * other.zero, self.lost + other.lost
        for one, absent in ((self, other.zero), (other, self.zero)):
            if absent > NEARLY_ABSENT * negligible:
                found[one.lowest - first : one.lowest - first + len(one.masses)] += absent * one.masses
            elif absent:  # far below all other sums: moved to zero and to infinity, so that the grid stays short
                zero += absent * float(one.masses.sum())
                lost += absent * float(one.masses @ np.exp(one.logs))
        return Sum(self.step, first, found, zero, lost)._trimmed(negligible)

    def _trimmed(self, negligible: float) -> Sum:
        """Without negligible ends: the lower is split between zero and the first point kept, the upper is lost."""
        points = np.exp(self.logs)
        means = self.masses * points
        start = int(np.searchsorted(np.cumsum(self.masses), negligible, side="right"))
        end = len(means) - int(np.searchsorted(np.cumsum(means[::-1]), negligible, side="right"))
        masses = self.masses[start:end].copy()
        raised = float(means[:start].sum() / points[start])
        masses[0] += raised
        zero = self.zero + max(0.0, float(self.masses[:start].sum()) - raised)
        return Sum(self.step, self.lowest + start, masses, zero, self.lost + float(means[end:].sum()))


def log_normal(shift: float, step: float, shallowest: float, deepest: float) -> Sum:
    """e^(shift Z - shift^2 / 2) for a normal Z from `shallowest` on, split onto the grid.

    Below, the mass is split between zero and the first point. Beyond `deepest` (deviations from the mean of the side
    that has the example) it is lost.
    """
    lowest = floor((-shallowest * shift - shift**2 / 2) / step)
    highest = ceil((deepest * shift + shift**2 / 2) / step)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    inner = step * (nodes + 1) / 2
    places = lowest + np.arange(highest - lowest)
    normal = (places[:, None] * step + inner) / shift + shift / 2
    density = np.exp(-(normal**2) / 2) / sqrt(2 * np.pi) * weights * step / 2 / shift
    higher = density @ (np.expm1(inner) / expm1(step))
    lower = density @ (np.exp(inner) * np.expm1(step - inner) / expm1(step))
    masses = np.concatenate([lower, [0.0]]) + np.concatenate([[0.0], higher])
    below, first = float(np.exp(log_ndtr(lowest * step / shift + shift / 2))), exp(lowest * step)
    raised = float(np.exp(log_ndtr(lowest * step / shift - shift / 2))) / first
    masses[0] += raised
    beyond = float(np.exp(log_ndtr(shift / 2 - highest * step / shift)))
    return Sum(step, lowest, masses, max(0.0, below - raised), beyond)


@dataclass(frozen=True)
class Grid:
    """How finely and how far log-normal numbers are followed."""

    fineness: float
    """Steps of the grid in standard deviations of the sum's logarithm."""
    deepest: float
    """Standard deviations of noise followed into the tails."""
    negligible: float
    """Mass at either end of a sum's grid that is moved off it: to zero, or to an infinite loss; both are charged."""
    zero: float
    """The largest probability that all numbers are below the grid, where mass is split between zero and its end."""


FOR_DELTAS = Grid(0.04, DEEPEST, 1e-30, 1e-26)
"""Splitting then adds about 0.1% to the variance of the sum."""
FOR_MOMENTS = Grid(0.12, 20.0, 0.0, 1e-100)
"""Moments need deeper tails than deltas do; beyond these they are bounded in closed form."""


@lru_cache(maxsize=32)
def likelihood_ratio(steps: int, multiplier: float, grid: Grid) -> tuple[Sum, float]:
    """The sum of `steps` log-normal numbers, from above in the convex order, and by how much its masses may be wrong
    relative to themselves."""
    shift = 1 / multiplier
    width = 2 * grid.deepest * shift + shift**2
    step = max(min(grid.fineness * shift / sqrt(steps), 0.05), width / MOST_CELLS)
    # What is nearly zero must be small beside a deviation of the sum, too.
    fine = (-log(step * sqrt(steps)) - shift**2 / 2) / shift
    shallowest = min(grid.deepest, max(-float(ndtri(grid.zero ** (1 / steps))), fine, 1.0))
    power = log_normal(shift, step, shallowest, grid.deepest)
    total: Sum | None = None
    left = steps
    while True:
        if left % 2:
            total = power if total is None else total.plus(power, grid.negligible)
        left //= 2
        if not left:
            assert total is not None
            return total, steps * (CELL_ROUNDING + 2 * SUM_ROUNDING * len(power.masses))
        power = power.plus(power, grid.negligible)


def profile(question: AllocatedGaussian) -> Profile:
    """The hockey-stick profile of an epoch.

    Formal guarantees: dominates the epoch's releases for adding or removing one example's contribution, provided that
    each example's step is drawn uniformly and independently, afresh for each epoch, and stays secret; later steps may
    depend on earlier releases (Chua et al. 2024, 2410.06266; Feldman & Shenfeld 2026, 2602.17284).
    """
    steps, multiplier = question.steps, question.multiplier
    if steps == 1 or multiplier < NOISELESS:
        return sampled_gaussian(1.0, multiplier)
    found, wrong = likelihood_ratio(steps, multiplier, FOR_DELTAS)
    logs = found.logs - log(steps)
    points = np.exp(logs)
    zero, lost = found.zero, found.lost / steps
    gaps = np.diff(points)
    # E (T - c)_+ and E (c - T)_+ at the points: both are sums of positive terms, and straight lines in between.
    above = np.cumsum(found.masses[::-1])[::-1]
    calls = np.concatenate([np.cumsum((gaps * above[1:])[::-1])[::-1], [0.0]])
    below = zero + np.cumsum(found.masses)
    puts = zero * points[0] + np.concatenate([[0.0], np.cumsum(gaps * below[:-1])])
    mean = float(found.masses @ points)

    def remove(loss: Array) -> Array:
        strike = np.exp(loss - SHIFT)
        inside = np.interp(strike, points, calls)
        under = np.maximum(mean - strike * float(above[0]), 0.0)
        return (1 + wrong) * (lost + np.where(strike < points[0], under, inside))

    def add(loss: Array) -> Array:
        strike = np.exp(SHIFT - loss)
        inside = np.interp(strike, points, puts)
        return (1 + wrong) * np.exp(loss) * np.where(strike < points[0], zero * strike, inside)

    return Profile(remove, add, max(float(logs[-1]), 0.0), max(-float(logs[0]), 0.0))


def curves(questions: Sequence[AllocatedGaussian]) -> Array:
    """Renyi curves of epochs, at most those of epochs in which the adversary knows the example's step.

    Formal guarantees: an upper bound at every order, for adding and removing an example.
    """
    return np.stack([_curve(question.steps, question.multiplier) for question in questions])


def _curve(steps: int, multiplier: float) -> Array:
    if multiplier == 0:
        return np.full(len(ORDERS), inf)
    known = ORDERS / (2 * multiplier**2)  # T is a mean, and its moments are at most those of its terms
    if steps == 1 or not NOISELESS <= multiplier <= DROWNED:
        return known
    found, wrong = likelihood_ratio(steps, multiplier, FOR_MOMENTS)
    logs = found.logs - log(steps)
    with np.errstate(divide="ignore"):
        weights = np.log(found.masses)
    both = np.maximum(_removing(logs, weights, multiplier), _adding(logs, weights, found.zero, steps, multiplier))
    return np.asarray(np.minimum(known, (both + wrong) / (ORDERS - 1)))


def _removing(logs: Array, weights: Array, multiplier: float) -> Array:
    """log E T^a: the norm of T is at most that of what is on the grid and that of what is beyond it (Minkowski)."""
    shift = 1 / multiplier
    inside = np.array([log_sum(weights + order * logs) for order in ORDERS])
    beyond = ORDERS * (ORDERS - 1) * shift**2 / 2 + log_ndtr((ORDERS - 1) * shift - FOR_MOMENTS.deepest)
    return np.asarray(ORDERS * np.logaddexp(inside / ORDERS, beyond / ORDERS))


def _adding(logs: Array, weights: Array, zero: float, steps: int, multiplier: float) -> Array:
    """log E T^(1-a). Below the grid the power is replaced by its tangent, which stays convex; the rest, which is there
    alone, is bounded by the terms' geometric mean, which is below T and log-normal."""
    shift, powers, least = 1 / multiplier, ORDERS - 1, float(logs[0])
    inside = np.array([log_sum(weights - power * logs) for power in powers])
    tangent = log(max(zero, 1e-300)) - powers * least + np.log1p(powers)
    deviation = shift / sqrt(steps)
    below = powers * shift**2 / 2 + (powers * deviation) ** 2 / 2
    below = below + log_ndtr((least + shift**2 / 2) / deviation + powers * deviation)
    return np.asarray(np.logaddexp(np.logaddexp(inside, tangent), below))
