"""How far apart can one question push two answers, in Renyi divergence? Curves of the sampled Gaussian, vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import log, pi, sqrt

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

Array = npt.NDArray[np.float64]

FRACTIONAL_ORDERS: Array = 1 + np.concatenate(
    [np.geomspace(0.01, 0.5, 24, endpoint=False), np.arange(0.5, 3, 0.05), np.geomspace(3, 10.5, 24)]
)
"""Fine where training with small noise has its optimum (about 2.2 at epsilon 18, 1.02 at epsilon 1500)."""
INTEGER_ORDERS: Array = np.array(
    [*range(12, 33), *range(34, 65, 2), *range(72, 129, 8), *range(160, 257, 32), 384, 512, 1024.0]
)
ORDERS: Array = np.concatenate([FRACTIONAL_ORDERS, INTEGER_ORDERS])

SMALLEST_QUADRATURE_MULTIPLIER = 0.02
"""Below it a quadrature needs too many points; log-convexity bounds the curve from the integer orders instead."""
QUADRATURE_DIGITS = 33.0
"""Nats of relative accuracy asked of the quadrature: exp(-33) = 5e-15."""
SMALLEST_CHOICE, LARGEST_CHOICE = 0.01, 300.0
"""Epsilons of one choice outside which simpler bounds are as good, and nothing cancels or overflows."""
LARGEST_BLOCK = 500_000
"""Numbers held at once; larger requests are computed in pieces."""


def log_sum(logs: Array) -> float:
    """The logarithm of the sum of exponentials of a vector: scipy's `logsumexp` to the last digit, several times as
    fast, and most of what a price takes."""
    top = logs.max()
    if not np.isfinite(top):
        return float(logsumexp(logs))
    others = logs - top
    highest = others == 0.0
    count = np.count_nonzero(highest)
    np.exp(others, out=others)  # a second array would take as long to fill
    others[highest] = 0.0
    return float(np.log1p(others.sum() / count) + np.log(float(count)) + top)


def curves(rates: Sequence[float], multipliers: Sequence[float]) -> Array:
    """Renyi divergence at `ORDERS` of each sampled Gaussian (rate, multiplier): [questions, orders].

    Formal guarantees: of the two directions, mixture against noise is the larger (Mironov, Talwar & Zhang 2019),
    so this one curve covers adding and removing an example.
    """
    rate, multiplier = np.asarray(rates, dtype=float), np.asarray(multipliers, dtype=float)
    result = np.zeros((len(rate), len(ORDERS)))
    result[(rate > 0) & (multiplier == 0)] = np.inf
    plain = (rate == 1) & (multiplier > 0)
    result[plain] = ORDERS / (2 * multiplier[plain, None] ** 2)
    sampled = (rate > 0) & (rate < 1) & (multiplier > 0) & np.isfinite(multiplier)
    if sampled.any():
        without_sampling = ORDERS / (2 * multiplier[sampled, None] ** 2)
        result[sampled] = np.clip(_sampled(rate[sampled], multiplier[sampled]), 0.0, without_sampling)
    assert not np.isnan(result).any(), "a Renyi curve is not a number"
    return result


def pure_curves(epsilons: Sequence[float]) -> Array:
    """Renyi divergence at `ORDERS` of randomized response with each epsilon: [questions, orders]. Every epsilon-private
    answer has at most that one's."""
    epsilon = np.asarray(epsilons, dtype=float)[:, None]
    truly, falsely = -np.log1p(np.exp(-epsilon)), -epsilon - np.log1p(np.exp(-epsilon))
    moments = np.logaddexp(ORDERS * truly + (1 - ORDERS) * falsely, ORDERS * falsely + (1 - ORDERS) * truly)
    rounding = 4e-16 * (1 + ORDERS * epsilon)
    return np.asarray(np.clip((moments + rounding) / (ORDERS - 1), 0.0, epsilon))


def replaced_curves(rates: Sequence[float], multipliers: Sequence[float]) -> Array:
    """As `curves`, where an example is replaced by another: (1 - q) N(0, s^2) + q N(1, s^2) against (1 - q) N(0, s^2) +
    q N(-1, s^2), the worst pair (`profiles.replaced_gaussian`).

    By the trapezoidal rule up to order 64, and never above two Gaussians at distance 2, which bounds the others.
    """
    result = np.stack(
        [2 * ORDERS / multiplier**2 if multiplier else np.full(len(ORDERS), np.inf) for multiplier in multipliers]
    )
    for place, (rate, multiplier) in enumerate(zip(rates, multipliers, strict=True)):
        if rate == 0 or multiplier == np.inf:
            result[place] = 0.0
        elif rate < 1 and multiplier >= 0.2:
            step = min(multiplier / 8, multiplier**2 / 16)
            for column in np.flatnonzero(ORDERS <= 64):
                order = ORDERS[column]
                points = np.arange(-12 * multiplier, 2 * order + 12 * multiplier, step)
                up, down = (
                    np.logaddexp(np.log1p(-rate), np.log(rate) + (sign * points - 0.5) / multiplier**2)
                    for sign in (1, -1)
                )
                density = np.log(step) - points**2 / (2 * multiplier**2) - np.log(multiplier * sqrt(2 * pi))
                moment = log_sum(density + order * up + (1 - order) * down)
                result[place, column] = min(result[place, column], max(0.0, moment + 1e-13) / (order - 1))
    return result


def _sampled(rate: Array, multiplier: Array) -> Array:
    """The curves for 0 < rate < 1 and finite positive multipliers."""
    log_moments = np.empty((len(rate), len(ORDERS)))
    log_moments[:, len(FRACTIONAL_ORDERS) :] = integer_log_moments(rate, multiplier, INTEGER_ORDERS)
    tiny = multiplier < SMALLEST_QUADRATURE_MULTIPLIER
    if tiny.any():
        log_moments[tiny, : len(FRACTIONAL_ORDERS)] = _chord_log_moments(rate[tiny], multiplier[tiny])
    # One grid serves a whole block, so a block holds multipliers within a factor of about 1.2 of each other.
    block = np.round(np.log(np.clip(multiplier, None, 4.0)) * 5)
    for label in np.unique(block[~tiny]):
        members = np.flatnonzero((block == label) & ~tiny)
        log_moments[members, : len(FRACTIONAL_ORDERS)] = quadrature_log_moments(rate[members], multiplier[members])
    return log_moments / (ORDERS - 1)


def integer_log_moments(rate: Array, multiplier: Array, orders: Array) -> Array:
    """log E[likelihood ratio ** order] for integer orders, exactly (Mironov, Talwar & Zhang 2019, section 3.3).

    The binomial weights sum to one, so the moment is 1 + sum_k weight_k (exp((k^2 - k) / 2 multiplier^2) - 1): every
    term is positive and nothing cancels, however small the rate.
    """
    terms, order, choose, starts = _binomial_table(tuple(orders))
    result = np.empty((len(rate), len(orders)))
    for part in np.array_split(np.arange(len(rate)), 1 + len(rate) * len(terms) // LARGEST_BLOCK):
        q, exponent = rate[part, None], (terms**2 - terms) / (2 * multiplier[part, None] ** 2)
        excess = exponent + np.log(-np.expm1(-exponent))  # log(expm1(exponent)), which would overflow
        logs = choose + terms * np.log(q) + (order - terms) * np.log1p(-q) + excess
        largest = np.maximum.reduceat(logs, starts, axis=1)
        spread = np.exp(logs - np.repeat(largest, (orders - 1).astype(int), axis=1))
        result[part] = np.logaddexp(0.0, largest + np.log(np.add.reduceat(spread, starts, axis=1)))
    return result


@cache
def _binomial_table(orders: tuple[float, ...]) -> tuple[Array, Array, Array, npt.NDArray[np.int64]]:
    """The terms 2..order of every order in one row, their order and log binomial coefficient, and where each begins."""
    lengths = np.array(orders, dtype=np.int64) - 1
    terms = np.concatenate([np.arange(2.0, order + 1) for order in orders])
    order = np.repeat(orders, lengths)
    choose = gammaln(order + 1) - gammaln(terms + 1) - gammaln(order - terms + 1)
    return terms, order, choose, np.cumsum(lengths) - lengths


def quadrature_log_moments(rate: Array, multiplier: Array) -> Array:
    """log E[f ** order], f = 1 - q + q exp(x/s - 1/2s^2), x standard normal, by the trapezoidal rule.

    The integrand is analytic in the strip |Im x| < pi s, where |f(x + iy)| <= f(x), so the rule's relative error is at
    most 2 exp(d^2/2 - 2 pi d / step) for every d <= pi s (Trefethen & Weideman 2014, Theorem 5.1). Its mass lies within
    `reach` of [0, order/s]: f^a <= 2^(a-1) ((1-q)^a + (q e^..)^a), two normal densities around 0 and order/s.
    """
    smallest, top = float(multiplier.min()), FRACTIONAL_ORDERS[-1]
    depth = min(pi * smallest, 4.0)
    step = 2 * pi * depth / (QUADRATURE_DIGITS + depth**2 / 2)
    reach = sqrt(2 * (QUADRATURE_DIGITS + top * log(2)))
    points = np.arange(-reach, reach + top / smallest + step, step)
    log_weights = log(step) - points**2 / 2 - log(2 * pi) / 2
    result = np.empty((len(rate), len(FRACTIONAL_ORDERS)))
    pieces = 1 + result.size * len(points) // LARGEST_BLOCK
    for part in np.array_split(np.arange(len(rate)), min(pieces, len(rate))):
        exponent = points / multiplier[part, None] - 1 / (2 * multiplier[part, None] ** 2)
        log_ratio = np.logaddexp(np.log1p(-rate[part, None]), np.log(rate[part, None]) + exponent)
        move = rate[part, None] * np.expm1(np.minimum(exponent, 700))
        excess = _excess_in_logs if top * log_ratio.max() > 600 else _excess
        result[part] = excess(move[:, None], log_ratio[:, None], log_weights)
    return result


# E f = 1, so E f^a - 1 = E[f^a - 1 - a (f - 1)]: the subtraction is done pointwise, where every term is positive and
# nothing is lost, however small the rate. `move` is f - 1 and `log_ratio` is log f: [questions, 1, points].


def _excess(move: Array, log_ratio: Array, log_weights: Array) -> Array:
    """log E f^a for moments well within the range of a float."""
    return np.asarray(np.log1p(_excess_power(move, log_ratio) @ np.exp(log_weights)))


def _excess_power(move: Array, log_ratio: Array) -> Array:
    """f^a - 1 - a (f - 1), by its series where f is near 1."""
    order = FRACTIONAL_ORDERS[:, None]
    series = order * (order - 1) / 2 * move**2 * (1 + (order - 2) / 3 * move * (1 + (order - 3) / 4 * move))
    return np.where(np.abs(move) < 1e-4, series, np.expm1(order * log_ratio) - order * move)


def _excess_in_logs(move: Array, log_ratio: Array, log_weights: Array) -> Array:
    """The same where f^a may overflow: far out, f^a - 1 - a (f - 1) = f^a (1 - a f^(1-a) + (a-1) f^-a)."""
    order, far = FRACTIONAL_ORDERS[:, None], log_ratio > 20
    near = _excess_power(np.where(far, 0.0, move), np.where(far, 0.0, log_ratio))
    distant = np.where(far, log_ratio, 20.0)
    share = np.log1p((order - 1) * np.exp(-order * distant) - order * np.exp(-(order - 1) * distant))
    with np.errstate(divide="ignore"):
        logs = np.where(far, order * distant + share, np.log(near))
    return np.logaddexp(0.0, logsumexp(logs + log_weights, axis=-1))


def _chord_log_moments(rate: Array, multiplier: Array) -> Array:
    """An upper bound at fractional orders: log E[f ** order] is convex in the order, so its chords lie above it."""
    integers = np.arange(2.0, np.ceil(FRACTIONAL_ORDERS[-1]) + 1)
    heights = np.column_stack([np.zeros(len(rate)), integer_log_moments(rate, multiplier, integers)])
    return np.stack([np.interp(FRACTIONAL_ORDERS, [1.0, *integers], height) for height in heights])


def exponential_mechanism(epsilons: Sequence[float]) -> Array:
    """Renyi divergence at `ORDERS` of choices whose losses lie in an interval of length `epsilon`: [choices, orders].

    The largest over the two-point distributions of `profiles.exponential_mechanism`: with x = e^t the moment is x^(a-1)
    (A - B x) / (e^epsilon - 1), where A = e^epsilon - e^(-(a-1) epsilon) and B = 1 - e^(-(a-1) epsilon), and it is
    largest at x = (a-1) A / (a B).
    """
    result = np.zeros((len(epsilons), len(ORDERS)))
    for row, epsilon in zip(result, epsilons, strict=True):
        simple = np.minimum(ORDERS * epsilon**2 / 8, epsilon)  # Cesar & Rogers 2021
        if not SMALLEST_CHOICE < epsilon < LARGEST_CHOICE:
            row[:] = simple
        else:
            shrunk = -np.expm1(-(ORDERS - 1) * epsilon)
            grown = np.expm1(epsilon) + shrunk
            log_x = np.clip(np.log1p(-1 / ORDERS) + np.log(grown) - np.log(shrunk), 0.0, epsilon)
            log_moment = (ORDERS - 1) * log_x + np.log(grown - shrunk * np.exp(log_x)) - np.log(np.expm1(epsilon))
            row[:] = np.clip(log_moment / (ORDERS - 1), 0.0, simple)
    return result


def tight_epsilon(curve: Array, delta: float) -> float:
    """The epsilon of a Renyi curve at `ORDERS` (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    if delta**2 + np.expm1(-curve.min()) > 0:  # delta <= sqrt(1 - exp(-KL)), Bretagnolle & Huber 1978
        return 0.0
    return float(np.maximum(np.min(curve + CONVERSION - _price_of(delta)), 0.0))  # keeps NaN, unlike max()


@lru_cache(maxsize=64)
def _price_of(delta: float) -> Array:
    return log(delta) / (ORDERS - 1)


def classic_epsilon(curve: Array, delta: float) -> float:
    """The looser conversion that papers report (Mironov 2017, Proposition 3)."""
    return float(np.maximum(np.min(curve - log(delta) / (ORDERS - 1)), 0.0))


CONVERSION: Array = np.log1p(-1 / ORDERS) - np.log(ORDERS) / (ORDERS - 1)
