"""What can an attacker do at most? The whole curve of detections against false alarms, by loss distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vestige.accounting.composition import (
    COARSE,
    epsilon_by_distribution,
    grid_step,
    largest_loss,
    loss_distribution,
)
from vestige.accounting.lower_bounds.bounds_from_scores import deltas_of_mu
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History, occasions

POINTS = 1001
"""Epsilons at which a curve is held."""
IDEAL = 1e-3
"""The share of delta that is added for noise which is not quite ideal (`guarantees.LARGEST_LOSS`)."""
FINER = 4
LARGEST_MU, LARGEST_EPSILON = 100.0, 200.0
"""Beyond these there is no protection, and only epsilon and delta are used."""


@dataclass(frozen=True)
class Tradeoff:
    """Deltas of a history at epsilons from 0 up, from above, where an example is removed and where one is added.

    Formal guarantees: `detection(a)` bounds the detections of every attacker with a share `a` of false alarms, who
    distinguishes data with an example from data without it; `area()` bounds the area under every attacker's ROC.
    """

    epsilons: Array
    removing: Array
    """sup over events of Pr[with] - e^epsilon Pr[without]."""
    adding: Array

    @property
    def deltas(self) -> Array:
        return np.maximum(self.removing, self.adding)

    def detection(self, alarms: Array) -> Array:
        """The most detections (TPR) at each share of false alarms (FPR)."""
        alarms = np.asarray(alarms, dtype=np.float64)[..., None]
        above = self.removing + np.exp(np.minimum(self.epsilons, 500.0)) * alarms
        # The same promise about guessing "absent": 1 - FPR <= delta + e^epsilon (1 - TPR).
        below = 1 - np.exp(-self.epsilons) * np.maximum(1 - alarms - self.adding, 0.0)
        return np.asarray(np.minimum(1.0, np.minimum(above, below).min(axis=-1)))

    @property
    def promise(self) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """What is promised about guessing that the example is there, and about guessing that it is not."""
        return self.detection, Tradeoff(self.epsilons, self.adding, self.removing).detection

    def area(self) -> float:
        """The largest area under a ROC, to four digits."""
        small = np.geomspace(1e-6, 0.5, 400)
        alarms = np.concatenate([[0.0], small, 1 - small[-2::-1], [1.0]])
        found = self.detection(alarms)
        return min(1.0, float(((found[1:] + found[:-1]) / 2) @ np.diff(alarms)))

    def mu(self) -> float:
        """The smallest mu whose Gaussian mechanism has deltas at least as large, between the held epsilons too."""
        # A profile is convex in e^epsilon, so its chords lie above it. On each small interval, a delta is at most that
        # of the left end, and the Gaussian's at least that of the right end.
        fine = np.linspace(self.epsilons[0], self.epsilons[-1], FINER * len(self.epsilons))
        left = np.interp(np.exp(fine - fine[-1]), np.exp(self.epsilons - fine[-1]), self.deltas)[:-1]
        right = fine[1:]
        low, high = np.full(len(left), 1e-9), np.full(len(left), LARGEST_MU)
        for _ in range(45):
            middle = np.sqrt(low * high)
            enough = deltas_of_mu(middle, right) >= left
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return float(high.max())


def tradeoff(history: History, delta: float, epsilon: float | None = None) -> Tradeoff:
    """The deltas of a history from epsilon 0 to the one at `delta`, by loss distributions.

    Formal guarantees: each is an upper bound, in both directions.
    """
    epsilon = epsilon_by_distribution(history, delta, COARSE) if epsilon is None else epsilon
    if epsilon == 0.0:
        return Tradeoff(np.zeros(2), np.full(2, delta * (1 + IDEAL)), np.full(2, delta * (1 + IDEAL)))
    claimed = of_one_pair(epsilon, delta)
    if epsilon > LARGEST_EPSILON:
        return claimed
    try:
        interval = grid_step(max(epsilon, largest_loss(occasions(history))), COARSE)
        losses = loss_distribution(history, interval, 0.3 * epsilon, reached=True)
    except OverflowError:
        return claimed
    found = np.array([[each.delta(loss) for loss in claimed.epsilons] for each in losses])
    found = np.minimum(found + IDEAL * delta, claimed.deltas)
    # At epsilon 0 both are the total variation, and neither rises.
    removing, adding = np.minimum(found, found[:, 0].min())
    return Tradeoff(claimed.epsilons, removing, adding)


def of_one_pair(epsilon: float, delta: float) -> Tradeoff:
    """What (epsilon, delta) alone says at smaller epsilons e: (e^epsilon - e^e + delta (1 + e^e)) / (1 + e^epsilon)."""
    held = np.linspace(0.0, epsilon, POINTS)
    gap = -np.expm1(held - epsilon) + delta * (1 + IDEAL) * (np.exp(-epsilon) + np.exp(held - epsilon))
    bound = np.asarray(gap / (1 + np.exp(-epsilon)))
    return Tradeoff(held, bound, bound)
