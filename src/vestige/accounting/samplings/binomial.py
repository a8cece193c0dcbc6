"""How likely do so many of very many rows join? Binomial probabilities that keep their digits for any number of rows.

Differences of log-factorials lose all digits where there are 10^12 rows, and library routines take whole numbers of 32
bits. Here a probability is Stirling's formula with its error term and two deviances, none of which cancels (Loader
2000); a tail is a sum of such probabilities.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln, xlog1py, xlogy

from vestige.accounting.rdp import Array

ROUNDING = 1e-8
"""By how much a tail may be wrong, relative to itself: several times what was found up to 10^12 rows."""
BLOCK = 1 << 16
"""Terms of a tail that are added at once."""


def log_probabilities(counts: Array, trials: int, rate: float) -> Array:
    """log Pr[X = count] where each of `trials` rows joins with probability `rate`, strictly between 0 and 1."""
    x, n = np.asarray(counts, dtype=np.float64), float(trials)
    inside = (x > 0) & (x < n)
    ends = np.where(x <= 0, xlog1py(n, -rate), xlogy(n, rate))
    x = np.where(inside, x, n / 2)
    # Of those that joined, and as many are missing from those that did not; from the smaller of both expectations.
    excess = x - n * rate if rate <= 0.5 else n * (1 - rate) - (n - x)
    exponent = _stirling(np.array(n)) - _stirling(x) - _stirling(n - x)
    exponent = exponent - _deviance(excess, n * rate) - _deviance(-excess, n * (1 - rate))
    return np.where(inside, exponent - 0.5 * np.log(2 * np.pi * x * ((n - x) / n)), ends)


def tail(most: int, trials: int, rate: float) -> float:
    """Pr[X > most], wrong by `ROUNDING` of itself at most."""
    if most >= trials or rate == 0:
        return 0.0
    if most < 0 or rate == 1:
        return 1.0
    if most + 1 > trials * rate:
        return _sum(most + 1, trials, rate, 1)
    return 1 - _sum(most, trials, rate, -1)


def _sum(first: int, trials: int, rate: float, direction: int) -> float:
    """Of `first` and all numbers on that side of it, which fall off from there on."""
    found, last = 0.0, trials if direction > 0 else 0
    while (last - first) * direction >= 0:
        counts = first + direction * np.arange(min(BLOCK, abs(last - first) + 1), dtype=np.float64)
        terms = np.exp(log_probabilities(counts, trials, rate))
        found += float(terms.sum())
        if terms[-1] <= 1e-18 * found:
            break
        first += direction * BLOCK
    return found


def _stirling(x: Array) -> Array:
    """By how much log(x!) exceeds Stirling's formula."""
    small, y = np.minimum(x, 16.0), np.maximum(x, 16.0)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / y**2) / y**2) / y**2) / y**2) / y
    exact = gammaln(small + 1) - (small + 0.5) * np.log(small) + small - 0.5 * np.log(2 * np.pi)
    return np.asarray(np.where(x < 16, exact, series))


def _deviance(excess: Array, mean: float) -> Array:
    """x log(x / mean) - x + mean, for x = mean + excess."""
    share = excess / mean
    return np.asarray(mean * (xlog1py(1 + share, share) - share))
