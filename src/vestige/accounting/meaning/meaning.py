"""What does an epsilon mean? The best attacker's chances, the nearest Gaussian mechanism, and replacing an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vestige.accounting.composition import COARSE, epsilon_by_distribution
from vestige.accounting.meaning.replacing import replacing
from vestige.accounting.meaning.tradeoff import LARGEST_MU, Tradeoff, of_one_pair, tradeoff
from vestige.accounting.theorems import History
from vestige.priced_questions import Question

ALARMS = 0.01
"""The share of false alarms at which detection is stated."""


@dataclass(frozen=True)
class Meaning:
    """What an attacker who sees every release, and knows all other examples, can do at most: each an upper bound."""

    attacker_accuracy: float
    """The share of right guesses about one example's presence, at even odds: (1 + total variation) / 2."""
    detection_at_1_percent: float
    """The share of present examples that are detected (TPR) where one in a hundred absent ones is (FPR)."""
    gaussian_mu: float | None
    """The smallest mu of a Gaussian mechanism (shift over noise) that is no more private at any epsilon whose delta is
    at least the stated one. None where only an epsilon and a delta are known."""
    epsilon_replacing: float | None
    """Epsilon, at the same delta, for replacing one example by another, where `epsilon` is for adding or removing."""
    replacing_by: str
    """How that is known: "theorem", or "group of two" (removing one and adding one), or "none"."""


def meaning(history: History, delta: float, *, filtered: float | None = None) -> Meaning:
    """What a history's guarantee means; of a Renyi filter only its epsilon is known, which is given as `filtered`."""
    if filtered is not None:
        return Meaning(*_chances(of_one_pair(filtered, delta)), None, None, "none")
    return _meaning(tuple(sorted(history.items(), key=repr)), delta)


@lru_cache(maxsize=256)
def _meaning(asked: Sequence[tuple[Question, int]], delta: float) -> Meaning:
    history = dict(asked)
    epsilon = epsilon_by_distribution(history, delta, COARSE)
    curve = tradeoff(history, delta, epsilon)
    mu = curve.mu()
    return Meaning(*_chances(curve), mu if mu < LARGEST_MU else None, *replacing(history, delta, epsilon))


def _chances(curve: Tradeoff) -> tuple[float, float]:
    return (1 + min(1.0, float(curve.deltas[0]))) / 2, float(curve.detection(np.array(ALARMS)))
