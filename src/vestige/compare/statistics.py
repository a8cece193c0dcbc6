"""Is the difference real? Means, Student-t intervals, paired differences and Holm's correction, from plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, sqrt

from scipy.stats import t as student

LEVEL = 0.95
ROUNDING = 1e-9
"""Accuracies closer than this are one accuracy, rounded differently."""


@dataclass(frozen=True)
class Summary:
    """A summary of several runs of one setting. With one run there is no spread: `sd`, `low` and `high` are None."""

    count: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """A setting minus the baseline, seed by seed. With fewer than two pairs nothing can be tested: `p` is None."""

    pairs: int
    mean: float
    low: float | None
    high: float | None
    p: float | None


def summarise(values: Sequence[float]) -> Summary:
    """Mean, sample standard deviation and the two-sided Student-t interval of the mean."""
    if not values:
        raise ValueError("values=[] must hold at least one number")
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Summary(1, mean, None, None, None)
    sd = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    half = _quantile(len(values)) * sd / sqrt(len(values))
    return Summary(len(values), mean, sd, mean - half, mean + half)


def paired(values: Mapping[int, float], baseline: Mapping[int, float], resolution: float = 0.0) -> Difference | None:
    """The paired t-test over the seeds that both have; None if they share no seed.

    Accuracies are whole numbers of test examples, so a few of them agree by chance: differences count as spread by at
    least half a `resolution`, the least step between two accuracies. Without that, tables of two or three seeds
    would find differences where there are none.
    """
    gaps = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not gaps:
        return None
    total = summarise(gaps)
    if total.sd is None:
        return Difference(1, total.mean, None, None, None)
    error = max(total.sd, resolution / 2) / sqrt(total.count)
    # Without any spread the null hypothesis is certainly true (all zero) or certainly false.
    statistic = abs(total.mean) / error if error > 0 else (0.0 if total.mean == 0 else inf)
    p = 2 * float(student.sf(statistic, total.count - 1)) if isfinite(statistic) else 0.0
    half = _quantile(total.count) * error
    return Difference(total.count, total.mean, total.mean - half, total.mean + half, p)


def least_step(values: Iterable[float]) -> float:
    """The smallest difference between two of these that are not equal; 0 if all are."""
    ordered = sorted(set(values))
    return min((after - before for before, after in pairwise(ordered) if after - before > ROUNDING), default=0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Holm 1979): below 0.05 means real at a 5% chance of any false claim in the family.

    Formal guarantees: the probability that any true null hypothesis of the family is adjusted below alpha is at most
    alpha, whatever the dependence between the tests.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def sentence(baseline: str, budget: str, difference: Difference | None, adjusted: float | None) -> str:
    """The conclusion of one row, in words."""
    if difference is None:
        return f"no run of {baseline} at {budget} to compare with"
    points = 100 * difference.mean
    if difference.p is None or adjusted is None:
        return f"{points:+.2f} points against {baseline} at {budget}, from one seed: nothing can be said"
    if adjusted >= 1 - LEVEL:
        return f"not distinguishable from {baseline} at {budget}"
    assert difference.low is not None
    assert difference.high is not None
    word = "better" if points > 0 else "worse"
    return (
        f"{word} than {baseline} at {budget} by {abs(points):.2f} points "
        f"(95% interval {100 * difference.low:+.2f} to {100 * difference.high:+.2f}, p = {adjusted:.2g} after Holm)"
    )


def _quantile(count: int) -> float:
    return float(student.ppf((1 + LEVEL) / 2, count - 1))
