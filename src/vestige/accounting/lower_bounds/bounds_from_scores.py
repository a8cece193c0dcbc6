"""Which epsilon do an attack's scores prove wrong? Lower bounds on epsilon, each with its confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, isnan, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtrc, gammaln, log_ndtr, nctdtrinc, ndtr, stdtrit

from vestige.accounting.lower_bounds.roc_and_confidence_intervals import (
    Array,
    check_confidence,
    highest_rate,
    lowest_rate,
    scores_of,
)
from vestige.checks import check_delta, require
from vestige.lazy_scipy import brentq

THRESHOLDS = 128
"""How many thresholds are tried on the scores that choose one."""
LARGEST = 100.0
"""Epsilons beyond this are not told apart."""

Curve = Callable[[Array], Array]
"""The most that a share of false alarms allows of detections, at each of them."""
Promise = tuple[Curve, Curve]
"""An accountant's: for guessing "inside" (TPR by FPR), and for guessing "outside" (TNR by FNR). They differ where
adding an example has another curve than removing one, as with sampling."""


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ValueError(f"delta={delta} must lie in [0, 1): the one that epsilon is claimed with, such as 1e-5")


# --- thousands of runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThresholdBound:
    """What one threshold, fixed on other runs, proves about the runs it was tried on."""

    epsilon: float
    """Epsilon is at least this, with the confidence below."""
    delta: float
    confidence: float
    threshold: float
    guesses: str
    """Which side was guessed: "inside" at or above the threshold, or "outside" below it."""
    detected: float
    """The guess's share among those it is right about, from below."""
    false_alarms: float
    """Its share among those it is wrong about, from above."""
    runs: int
    """How many runs were scored; as many more, at most one fewer or more, fixed the threshold."""
    broken_by: float | None = None
    """By how much `detected` exceeds what a promised curve allows at `false_alarms`; negative where it does not."""

    @property
    def breaks_promise(self) -> bool:
        """Whether the promised curve is wrong, with this confidence."""
        return self.broken_by is not None and self.broken_by > 0


def epsilon_lower_bound(
    inside: ArrayLike,
    outside: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    promise: Promise | None = None,
) -> ThresholdBound:
    """Epsilon from below, from scores of independent runs with the canary and without it; larger means "with".

    Every other run chooses a threshold, and whether to guess "inside" above it or "outside" below it; the remaining
    runs are scored. The order of the scores must not depend on them. With `promise`, the curves that an accountant
    promises (`accounting.tradeoff(...).promise`), the threshold is chosen to break it: a test of the whole curve sees
    far smaller faults than epsilon at a small delta does.

    Formal guarantees: if the runs are (epsilon, delta)-differentially private, `epsilon` of the result is at most that
    with probability at least `confidence`, and `breaks_promise` of a true promise is True with probability at most 1 -
    `confidence`: whatever the scores' distributions (Clopper-Pearson bounds on two rates, at half the error each).
    """
    _check_delta(delta)
    check_confidence(confidence)
    a, b = scores_of(inside, "inside", 4), scores_of(outside, "outside", 4)
    epsilon, margin, chosen = threshold_bounds(a[None], b[None], delta, confidence, promise)
    guessed = "inside" if chosen.above[0] else "outside"
    low, high = float(chosen.detected[0]), float(chosen.false_alarms[0])
    broken = None if promise is None else float(margin[0])
    runs = len(a[1::2]) + len(b[1::2])
    threshold = float(chosen.thresholds[0])
    return ThresholdBound(float(epsilon[0]), delta, confidence, threshold, guessed, low, high, runs, broken)


def area_lower_bound(inside: ArrayLike, outside: ArrayLike, delta: float, confidence: float = 0.95) -> float:
    """Epsilon from below, from how often a run with the canary scores above one without it: in disjoint pairs, in the
    order of the scores, which must not depend on them.

    Formal guarantees: if the runs are (epsilon, delta)-differentially private, the result is at most epsilon with
    probability at least `confidence`, whatever the scores' distributions. No test of such a pair of distributions has
    an ROC of more area than e^epsilon / (1 + e^epsilon) + delta, that is the chance that a pair is in order, and the
    number of pairs in order has the exact lower bound of Clopper and Pearson. Ties count against it.
    """
    _check_delta(delta)
    check_confidence(confidence)
    a, b = scores_of(inside, "inside", 4), scores_of(outside, "outside", 4)
    pairs = min(len(a), len(b))
    area = float(lowest_rate(int((a[:pairs] > b[:pairs]).sum()), pairs, 1 - confidence)) - delta
    return float(np.log(area / (1 - area))) if 0.5 < area < 1 else 0.0


def best_lower_bound(
    inside: ArrayLike, outside: ArrayLike, delta: float, confidence: float = 0.95
) -> tuple[float, str, ThresholdBound]:
    """The better of two bounds, which it is ("threshold" or "area"), and the one by a threshold with its rates.

    Formal guarantees: as theirs, with this confidence: each is taken with half the error, so that choosing the better
    costs nothing more.
    """
    each = 1 - (1 - confidence) / 2
    threshold = epsilon_lower_bound(inside, outside, delta, each)
    area = area_lower_bound(inside, outside, delta, each)
    return (area, "area", threshold) if area > threshold.epsilon else (threshold.epsilon, "threshold", threshold)


@dataclass(frozen=True)
class Chosen:
    """Thresholds, one for each repetition, and the rates found with them."""

    thresholds: Array
    above: Array
    detected: Array
    false_alarms: Array


def threshold_bounds(
    inside: Array, outside: Array, delta: float, confidence: float, promise: Promise | None = None
) -> tuple[Array, Array, Chosen]:
    """`epsilon_lower_bound` for many repetitions at once, [repetitions, runs]: epsilons, margins over the promise."""
    alpha = (1 - confidence) / 2
    rows = np.arange(len(inside))
    choosing = np.sort(inside[:, ::2]), np.sort(outside[:, ::2])
    pooled = np.sort(np.concatenate(choosing, axis=1))
    places = np.unique(np.round(np.linspace(0, pooled.shape[1] - 1, THRESHOLDS)).astype(int))
    tried = pooled[:, places]
    rates = _rates(*choosing, tried, alpha)
    curves = (None, None) if promise is None else promise
    # [repetitions, thresholds, 2]
    gains = np.stack([_gain(*pair, delta, curve) for pair, curve in zip(rates, curves, strict=True)], axis=-1)
    best = gains.reshape(len(rows), -1).argmax(axis=1)
    threshold, above = tried[rows, best // 2], best % 2 == 0
    tested = np.sort(inside[:, 1::2]), np.sort(outside[:, 1::2])
    detected, alarms = (
        np.where(above, up[:, 0], down[:, 0])
        for up, down in zip(*_rates(*tested, threshold[:, None], alpha), strict=True)
    )
    margin = np.full(len(rows), -inf)
    if promise is not None:
        margin = detected - np.where(above, promise[0](alarms), promise[1](alarms))
    return _epsilon(detected, alarms, delta), margin, Chosen(threshold, above, detected, alarms)


def _rates(inside: Array, outside: Array, tried: Array, alpha: float) -> tuple[tuple[Array, Array], ...]:
    """(detected from below, false alarms from above) for guessing "inside" at or above each threshold, and "outside"
    below it."""
    many, few = inside.shape[1], outside.shape[1]
    hits = many - _below(inside, tried)
    alarms = few - _below(outside, tried)
    up = lowest_rate(hits, many, alpha), highest_rate(alarms, few, alpha)
    down = lowest_rate(few - alarms, few, alpha), highest_rate(many - hits, many, alpha)
    return up, down


def _below(ordered: Array, tried: Array) -> Array:
    """How many of each row's ordered values lie below each of its thresholds."""
    return np.stack([np.searchsorted(row, each, side="left") for row, each in zip(ordered, tried, strict=True)])


def _epsilon(detected: Array, alarms: Array, delta: float) -> Array:
    with np.errstate(divide="ignore"):
        return np.clip(np.log(np.maximum(detected - delta, 0.0) / alarms), 0.0, LARGEST)


def _gain(detected: Array, alarms: Array, delta: float, curve: Curve | None) -> Array:
    """What a threshold is chosen by. Where no epsilon is positive, the nearest one is best."""
    if curve is not None:
        return detected - curve(alarms)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(detected - delta, 1e-300) / alarms)


# --- a Gaussian fit --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianFit:
    """Two normal distributions of one width, `mu` widths apart, fitted to the scores. An ESTIMATE: nothing proves that
    scores are normal, unless the mechanism is a Gaussian one whose scores are a linear function of its releases."""

    mu: float
    mu_low: float
    """mu is at least this with the confidence below, if the scores are normal with one width."""
    epsilon: float
    """The epsilon of the fitted mu."""
    epsilon_low: float
    """The epsilon of `mu_low`."""
    delta: float
    confidence: float


def gaussian_fit(inside: ArrayLike, outside: ArrayLike, delta: float, confidence: float = 0.95) -> GaussianFit:
    """The mu of the Gaussian mechanism whose best attack would score like this, and its epsilon.

    The bound inverts the test of mu by the difference of means over the pooled deviation (non-central t).

    Formal guarantees: none about a mechanism whose scores are not normal: it is an estimate. For normal scores of one
    width, `mu_low` exceeds the truth with probability at most 1 - `confidence`.
    """
    check_delta(delta)
    check_confidence(confidence)
    a, b = scores_of(inside, "inside"), scores_of(outside, "outside")
    mu, low = (float(each[0]) for each in mu_bounds(a[None], b[None], confidence))
    return GaussianFit(mu, low, epsilon_of_mu(mu, delta), epsilon_of_mu(low, delta), delta, confidence)


def mu_bounds(inside: Array, outside: Array, confidence: float) -> tuple[Array, Array]:
    """Fitted mu and its lower bound, for many repetitions at once, [repetitions, runs]; not below zero."""
    many, few = inside.shape[1], outside.shape[1]
    freedom = many + few - 2
    spread = ((many - 1) * inside.var(axis=1, ddof=1) + (few - 1) * outside.var(axis=1, ddof=1)) / freedom
    gap = inside.mean(axis=1) - outside.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = np.where(gap == 0, 0.0, gap / np.sqrt(spread))
    # The studentised difference of means is non-central t: its largest centre below which it would be too large.
    width = sqrt(1 / many + 1 / few)
    found = np.minimum(mu / width, LARGEST / width)
    with np.errstate(invalid="ignore"):
        low = np.where(found > stdtrit(freedom, confidence), nctdtrinc(freedom, confidence, found) * width, 0.0)
    return np.maximum(mu, 0.0), np.maximum(low, 0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The epsilon of a Gaussian mechanism with shift `mu` in units of its noise (Balle & Wang 2018).

    >>> round(epsilon_of_mu(1.0, 1e-5), 4)
    4.3772
    """
    check_delta(delta)
    require("mu", mu, not isnan(mu), "be a number")
    if mu <= 0 or delta_of_mu(mu, 0.0) <= delta:
        return 0.0
    if mu > sqrt(LARGEST):
        return LARGEST
    return brentq(lambda loss: log(max(delta_of_mu(mu, loss), 1e-300) / delta), 0.0, 3 * LARGEST, xtol=1e-10)


def delta_of_mu(mu: float, epsilon: float) -> float:
    """The delta of a Gaussian mechanism with shift `mu`, at epsilon."""
    return float(deltas_of_mu(np.asarray(mu), np.asarray(epsilon)))


def deltas_of_mu(mu: Array, epsilon: Array) -> Array:
    """The same for arrays of shifts and epsilons (Balle & Wang 2018)."""
    with np.errstate(over="ignore"):
        return np.asarray(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneRunBound:
    """What one run with many canaries, each in or out by its own coin, proves."""

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int


def one_run_bound(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    guesses: int | Sequence[int] | None = None,
) -> OneRunBound:
    """Epsilon from below, from one run: guess that the k/2 canaries of highest score were in and the k/2 lowest out.

    `included` are the coins, fair and independent. `guesses` is k, or several k, over which the error is divided: they
    must be chosen before the coins are read. Unless given, they are all canaries, a half of them, a quarter and so on.
    Equal scores are put in an order that does not depend on the one in which they are given.

    Formal guarantees: if the run is (epsilon, delta)-differentially private for adding or removing one canary,
    `epsilon` of the result is at most that with probability at least `confidence` (Steinke, Nasr & Jagielski 2023,
    Theorem 5.2, and a union over the k).
    """
    _check_delta(delta)
    check_confidence(confidence)
    score, coin = scores_of(scores, "scores"), _coins(included)
    if coin.shape != score.shape:
        raise ValueError(f"included: {coin.shape} coins for {score.shape} scores; give one for each canary")
    count = len(score)
    tried = _guesses(count, guesses)
    drawn = np.random.default_rng(0).permutation(count)  # among equal scores, not the order in which they were given
    order = drawn[np.argsort(-score[drawn], kind="stable")]
    best = OneRunBound(0.0, delta, confidence, count, tried[0], 0)
    for k in tried:
        right = int(coin[order[: k // 2]].sum() + (~coin[order[count - k // 2 :]]).sum())
        made = 2 * (k // 2)
        low = one_run_epsilon(count, made, right, delta, 1 - (1 - confidence) / len(tried))
        if low > best.epsilon or best.right == 0:
            best = OneRunBound(low, delta, confidence, count, made, right)
    return best


def _coins(included: ArrayLike) -> Array:
    coins = np.asarray(included)
    if coins.dtype != bool and not (coins.dtype.kind in "iuf" and np.isin(coins, (0, 1)).all()):
        raise ValueError("included: coins must be True or False, or 1 or 0")
    return coins.astype(bool)


def _guesses(count: int, asked: int | Sequence[int] | None) -> list[int]:
    if asked is None:
        return [count >> halvings for halvings in range(6) if count >> halvings >= 8] or [count]
    tried: list[Any] = [asked] if np.ndim(asked) == 0 else list(asked)  # type: ignore[arg-type]
    if not tried:
        raise ValueError("guesses=[] is empty: give how many canaries to guess about, or leave it out")
    for k in tried:
        if not (isinstance(k, int | np.integer) and 2 <= k <= count):
            raise ValueError(f"guesses={k} must be from 2 to the number of canaries, {count}")
    return tried


@lru_cache(maxsize=4096)
def one_run_epsilon(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The largest epsilon that `right` of `guesses` guesses about `canaries` coins exclude (Steinke et al. 2023)."""
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"right={right}, guesses={guesses}, canaries={canaries}: each must be at most the next")
    alpha = 1 - confidence
    if one_run_p_value(canaries, guesses, right, 0.0, delta) > alpha:
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST and one_run_p_value(canaries, guesses, right, high, delta) <= alpha:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if one_run_p_value(canaries, guesses, right, middle, delta) <= alpha else (low, middle)
        )
    return low


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are, at most, in any (epsilon, delta)-private run: Steinke et al., Theorem 5.2:
    Pr[Binomial >= v] + 2 m delta max over i of Pr[v - i <= Binomial < v] / i, with chance e^epsilon/(1 + e^epsilon)."""
    chance = 1 / (1 + exp(-epsilon))
    beta = 1.0 if right == 0 else float(bdtrc(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return beta
    steps = np.arange(1, right + 1)
    between = np.cumsum(_binomial(right - steps, guesses, epsilon))
    return min(1.0, beta + 2 * canaries * delta * float((between / steps).max()))


def _binomial(hits: Array, tries: int, epsilon: float) -> Array:
    """Binomial probabilities for a chance of e^epsilon / (1 + e^epsilon)."""
    ways = gammaln(tries + 1) - gammaln(hits + 1) - gammaln(tries - hits + 1)
    return np.asarray(np.exp(ways - hits * np.log1p(exp(-epsilon)) - (tries - hits) * np.logaddexp(0.0, epsilon)))
