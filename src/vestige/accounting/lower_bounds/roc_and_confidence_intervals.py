"""How often does an attack succeed, and how sure is that? Rates and areas with intervals of confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betaincinv, ndtri, stdtrit

Array = NDArray[Any]


@dataclass(frozen=True)
class Interval:
    """An estimate between two ends, which hold the truth with this confidence."""

    estimate: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.estimate:.3g} ({self.low:.3g} to {self.high:.3g}, {self.confidence:.4g})"


def check_confidence(confidence: float) -> None:
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 1/2 and 1, such as 0.95")


def scores_of(scores: ArrayLike, name: str, least: int = 2) -> Array:
    """Scores as an array of doubles; too few, or one that is not a number, are refused by name."""
    found = np.asarray(scores, dtype=np.float64)
    if found.ndim != 1 or len(found) < least:
        raise ValueError(f"{name}: {found.shape} scores are too few: give a list of at least {least}")
    if np.isnan(found).any():
        raise ValueError(f"{name}: {int(np.isnan(found).sum())} scores are not numbers; leave no run out, score it")
    return found


def lowest_rate(hits: ArrayLike, tries: ArrayLike, alpha: float) -> Array:
    """The exact lower bound on a probability that fails with probability at most alpha (Clopper & Pearson 1934)."""
    hits, tries = np.asarray(hits, dtype=np.float64), np.asarray(tries, dtype=np.float64)
    return np.where(hits > 0, betaincinv(np.maximum(hits, 1e-9), tries - hits + 1, alpha), 0.0)


def highest_rate(hits: ArrayLike, tries: ArrayLike, alpha: float) -> Array:
    """The exact upper bound on a probability that fails with probability at most alpha."""
    return 1 - lowest_rate(np.asarray(tries) - np.asarray(hits), tries, alpha)


def clopper_pearson(hits: int, tries: int, confidence: float = 0.95) -> Interval:
    """A probability from `hits` in `tries`, between exact ends.

    >>> print(clopper_pearson(3, 100))
    0.03 (0.00623 to 0.0852, 0.95)
    """
    check_confidence(confidence)
    if not 0 <= hits <= tries or tries < 1:
        raise ValueError(f"hits={hits} must be a count from 0 to tries={tries}, and tries at least 1")
    alpha = (1 - confidence) / 2
    low, high = lowest_rate(hits, tries, alpha), highest_rate(hits, tries, alpha)
    return Interval(hits / tries, float(low), float(high), confidence)


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """The mean of independent values, between the ends of Student's t: exact where they are normal.

    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2 (-0.484 to 4.48, 0.95)
    """
    check_confidence(confidence)
    found = scores_of(values, "values")
    quantile = float(stdtrit(len(found) - 1, (1 + confidence) / 2))
    mean, reach = float(found.mean()), quantile * float(found.std(ddof=1)) / len(found) ** 0.5
    return Interval(mean, mean - reach, mean + reach, confidence)


def area_under_curve(inside: ArrayLike, outside: ArrayLike, confidence: float = 0.95) -> Interval:
    """The chance that a score of a run with the canary exceeds one without it, ties counted half: the ROC's area.

    The ends are DeLong's (1988), on the logit scale, with a normal quantile: approximate, for a hundred scores or more;
    where every score of one side exceeds all of the other, the far end is the exact one of Clopper and Pearson for the
    smaller side.
    """
    from scipy.stats import rankdata  # half a second, which pricing alone does not need

    check_confidence(confidence)
    a, b = scores_of(inside, "inside"), scores_of(outside, "outside")
    ranks = rankdata(np.concatenate([a, b]))
    # Placements: which share of the other side each score exceeds.
    above_a = (ranks[: len(a)] - rankdata(a)) / len(b)
    above_b = (ranks[len(a) :] - rankdata(b)) / len(a)
    area = float(above_a.mean())
    deviation = float(np.sqrt(above_a.var(ddof=1) / len(a) + above_b.var(ddof=1) / len(b)))
    quantile = float(ndtri((1 + confidence) / 2))
    if area in (0.0, 1.0) or deviation == 0.0:
        fewer = min(len(a), len(b))
        exact = clopper_pearson(round(area * fewer), fewer, confidence)
        return Interval(area, exact.low, exact.high, confidence)
    centre, reach = np.log(area / (1 - area)), quantile * deviation / (area * (1 - area))
    low, high = 1 / (1 + np.exp(-np.array([centre - reach, centre + reach])))
    return Interval(area, float(low), float(high), confidence)


def roc(inside: ArrayLike, outside: ArrayLike, points: int = 100) -> list[tuple[float, float]]:
    """The attacker's ROC, thinned: shares of false alarms and of detections, from (0, 0) to (1, 1)."""
    a, b = scores_of(inside, "inside"), np.sort(scores_of(outside, "outside"))[::-1]
    places = np.unique(np.linspace(0, len(b) - 1, min(points, len(b))).round().astype(int))
    found = [(0.0, 0.0), *((float((b > t).mean()), float((a > t).mean())) for t in b[places]), (1.0, 1.0)]
    return [(round(alarms, 6), round(detected, 6)) for alarms, detected in dict.fromkeys(found)]


def rate_of_detection(inside: ArrayLike, outside: ArrayLike, false_alarms: float, confidence: float = 0.95) -> Interval:
    """The share of canaries that are detected (TPR) where a share `false_alarms` of absent ones is (FPR).

    Formal guarantees: the ends hold the truth with this confidence, whatever the scores' distributions. A quantile of
    the scores outside lies between two order statistics of theirs, and at each of these thresholds, which the scores
    inside know nothing of, the share above has an exact interval. Too few scores outside give a low end of zero.
    """
    check_confidence(confidence)
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms={false_alarms} must lie between 0 and 1, such as 0.01")
    a, b = scores_of(inside, "inside"), np.sort(scores_of(outside, "outside"))[::-1]
    alpha = (1 - confidence) / 4  # two ends, each by a threshold and a share
    below = bdtr(np.arange(-1, len(b)), len(b), false_alarms)  # Pr[fewer than k false alarms], k = 0 .. n
    below[0] = 0.0
    # At the k-th largest score the rate of false alarms is at most `false_alarms`, unless fewer than k exceed the
    # quantile; at or above it, unless k or more do.
    strict = int(np.searchsorted(below, alpha, side="right")) - 1
    loose = int(np.searchsorted(below, 1 - alpha, side="left"))
    low = 0.0
    if strict >= 1:
        low = float(lowest_rate((a > b[strict - 1]).sum(), len(a), alpha))
    high = 1.0
    if loose < len(b):
        high = float(highest_rate((a >= b[loose]).sum(), len(a), alpha))
    quantile = b[min(len(b) - 1, int(false_alarms * len(b)))]
    estimate = float((a > quantile).mean())
    return Interval(min(max(estimate, low), high), low, high, confidence)
