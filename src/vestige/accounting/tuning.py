"""What does choosing the best of several runs cost? All of them; less if their number is random and one is released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, expm1, inf, log

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.composition import epsilon
from vestige.accounting.theorems import History, total_curve
from vestige.checks import check_delta, check_number
from vestige.lazy_scipy import brentq
from vestige.priced_questions import CyclicGaussian, Question

MOST_RUNS = 1e100
"""Expected runs of a search; more have no stopping probability that is a number."""


def composed_epsilon(runs: Iterable[History], delta: float) -> float:
    """The epsilon of several runs on the same data, such as all trials of a search and the run that follows.

    Formal guarantees: releasing all of these runs, and whatever is chosen by them or by public data, is (epsilon,
    delta)-differentially private for adding or removing one example, also where the settings of later runs follow from
    earlier ones, as long as the questions of each are fixed. The loss distributions of all questions are composed.
    """
    asked: Counter[Question] = Counter()
    for run in runs:
        for question, count in run.items():
            # A cycle that one run leaves unfinished is not finished by the next: an example may be in both.
            bands = question.bands if isinstance(question, CyclicGaussian) else 1
            asked[question] += -(-count // bands) * bands
    return epsilon(asked, delta)


def tuned_epsilon(
    history: History | Sequence[History],
    delta: float,
    expected_runs: float,
    shape: float = 1.0,
    repeats: int = 1,
    final_runs: int = 0,
) -> float:
    """The epsilon of the best of a random number of runs, each of which asks `history`, or any of several histories.

    The number of runs is drawn before the search from a truncated negative binomial distribution with mean
    `expected_runs`: `shape` 1 is geometric, 0 logarithmic. Only the best run is released. A setting that is judged by
    the mean of several trainings is one run of as many `repeats`: each of them looks at the data. `final_runs` are
    made afterwards with the setting that won, and released too.

    Formal guarantees: Papernot & Steinke 2022, Theorem 2, for the pointwise largest of the runs' Renyi curves, and
    composition. A number of runs fixed in advance is not covered: `composed_epsilon` prices it.
    """
    check_delta(delta)
    check_number("expected_runs", expected_runs)
    if not 1 <= expected_runs <= MOST_RUNS:
        raise ValueError(f"expected_runs={expected_runs} must lie between 1 and {MOST_RUNS:g}")
    if not 0 <= shape < inf:
        raise ValueError(f"shape={shape} must be a number, zero or more: 0 is logarithmic, 1 geometric")
    for name, value, least in (("repeats", repeats, 1), ("final_runs", final_runs, 0)):
        if not (isinstance(value, int) and value >= least):
            raise ValueError(f"{name}={value} must be a whole number from {least} up")
    histories = [history] if isinstance(history, Mapping) else list(history)
    if not histories:
        raise ValueError("history=[] is empty: a run asks at least one history")
    single = np.max([total_curve(each) for each in histories], axis=0)
    curve, orders = repeats * single, rdp.ORDERS
    if not curve.any():
        return 0.0
    stop = stopping_probability(expected_runs, shape)
    # The theorem holds for every second order; the least is taken.
    selection = (1 + shape) * np.min((1 - 1 / orders) * curve - log(stop) / orders)
    chosen = curve + selection + log(expected_runs) / (orders - 1)
    return rdp.tight_epsilon(chosen + final_runs * single, delta)


def stopping_probability(expected_runs: float, shape: float) -> float:
    """The parameter of the truncated negative binomial distribution that has this mean."""

    def mean(log_stop: float) -> float:
        stop = exp(log_stop)
        spread = -log_stop if shape == 0 else -expm1(shape * log_stop) / shape
        return (1 - stop) / (stop * spread) if stop < 1 else 1.0

    if expected_runs == 1:
        return 1.0
    lowest = -2 * log(expected_runs) - 5
    return exp(brentq(lambda log_stop: mean(log_stop) - expected_runs, lowest, -1e-12, xtol=1e-13))
