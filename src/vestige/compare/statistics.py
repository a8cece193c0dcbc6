"""Is the difference real? Means, Student-t intervals, an exact paired test and Holm's correction, of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
ALPHA = 0.05
"""The largest probability of any false claim."""
ROUNDING = 1e-9
"""Mean differences closer than this are one, rounded differently."""
COUNTED = 32
"""Up to so many pairs every exchange is counted; of more, `DRAWN` at random."""
DRAWN = 2**17 - 1


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
    """A setting minus the baseline, seed by seed. One pair has no spread: `low`, `high` and `p` are None."""

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


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The mean difference over the seeds that both have, its Student-t interval and `exchange_p`; None without any."""
    gaps = [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]
    if not gaps:
        return None
    total = summarise(gaps)
    p = exchange_p(gaps) if total.count > 1 else None
    return Difference(total.count, total.mean, total.low, total.high, p)


def exchange_p(gaps: Sequence[float]) -> float:
    """The share of all ways to exchange the two of some pairs that give a mean difference at least as large.

    Formal guarantees: where both of a pair have the same distribution, or any two whose difference is symmetric about
    zero, the probability of a p of at most alpha is at most alpha, whatever that distribution (Fisher 1935; for drawn
    exchanges Phipson & Smyth 2010). So two pairs never give less than 1/2, and five never less than 1/16.
    """
    sizes = np.abs(np.asarray(gaps, dtype=float))
    least = abs(float(np.sum(gaps))) - ROUNDING * len(sizes)
    if least <= 0:
        return 1.0
    if len(sizes) > COUNTED:
        return _drawn_p(sizes, least)
    # Every sum of signs is one of the first half plus one of the second: the halves are listed, the pairs only counted.
    half = len(sizes) // 2
    first, second = _signed_sums(sizes[:half]), np.sort(_signed_sums(sizes[half:]))
    above = len(second) - np.searchsorted(second, least - first, side="left")
    return float(2 * above.sum() / (len(first) * len(second)))  # as many are as far below zero


def _drawn_p(sizes: np.ndarray, least: float) -> float:
    """The same share of `DRAWN` exchanges and of none, from one fixed stream: the same records give the same p."""
    generator, found = np.random.default_rng(0), 1
    for start in range(0, DRAWN, 4096):
        signs = generator.integers(0, 2, (min(4096, DRAWN - start), len(sizes)))
        found += int(np.count_nonzero(np.abs((2 * signs - 1) @ sizes) >= least))
    return found / (1 + DRAWN)


def _signed_sums(sizes: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums - size, sums + size])
    return sums


def seeds_to_tell(rows: int) -> int:
    """The least number of seeds with which one of so many tested rows can be told apart, however large its difference.

    >>> [seeds_to_tell(rows) for rows in (1, 2, 30, 184)]
    [6, 7, 11, 13]
    """
    seeds = 2
    while not tells(seeds, rows):
        seeds += 1
    return seeds


def tells(seeds: int, rows: int) -> bool:
    """Whether the least p that so many pairs can have stays below 5% after Holm over the rows."""
    least = 2.0 ** (1 - seeds) if seeds <= COUNTED else 1 / (1 + DRAWN)
    return rows * least < ALPHA


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


def sentence(baseline: str, budget: str, difference: Difference | None, adjusted: float | None, rows: int) -> str:
    """The conclusion of one row, in words, where so many rows were tested together."""
    if difference is None:
        return f"no run of {baseline} at {budget} to compare with"
    points = 100 * difference.mean
    if difference.p is None or adjusted is None:
        return f"{points:+.2f} points against {baseline} at {budget}, from one seed: nothing can be said"
    interval = _interval(difference)
    if adjusted < ALPHA:
        word = "better" if points > 0 else "worse"
        by = f"by {abs(points):.2f} points ({interval}, p = {adjusted:.2g} after Holm)"
        return f"{word} than {baseline} at {budget} {by}"
    if not tells(difference.pairs, rows):
        return (
            f"too few seeds to tell it from {baseline} at {budget}: {difference.pairs}, and {rows} "
            f"{'rows need' if rows > 1 else 'row needs'} {seeds_to_tell(rows)} ({points:+.2f} points, {interval})"
        )
    return f"not distinguishable from {baseline} at {budget}"


def untested(baseline: str, budget: str, difference: Difference) -> str:
    """The conclusion of a tuned row whose seeds all run at a rate that was chosen once."""
    interval = f" ({_interval(difference)} at the rates that won)" if difference.low is not None else ""
    return (
        f"{100 * difference.mean:+.2f} points against {baseline} at {budget}{interval}; not tested: one choice of the "
        "rate serves every seed, and its luck is in no interval"
    )


def _interval(difference: Difference) -> str:
    assert difference.low is not None
    assert difference.high is not None
    return f"95% interval {100 * difference.low:+.2f} to {100 * difference.high:+.2f}"


def _quantile(count: int) -> float:
    return float(stdtrit(count - 1, (1 + LEVEL) / 2))
