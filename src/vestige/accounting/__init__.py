"""What did the questions cost together? A table of theorems; epsilon, calibration, budgets and guarantees from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import ceil, exp, expm1, floor, inf, log, log2, sqrt
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.optimize import brentq

from vestige.accounting import rdp, trials
from vestige.accounting.pld import Profile, connect_dots, sampled_gaussian
from vestige.accounting.rdp import Array
from vestige.questions import CyclicGaussian, Gaussian, Question, SampledGaussian, Trial

History = Mapping[Question, int]
"""How often each question was asked."""

Plan = History | Sequence[tuple[Question, int]]
"""What will be asked: a history, or runs (question, count) in the order in which they will be asked."""

FINE, COARSE = 2e-5, 16e-5
"""Steps of the loss grid relative to epsilon: reported numbers use the fine one, searches start with the coarse."""
LARGEST_MULTIPLIER = 1e6
MANY = 8
"""Histories of more distinct questions than this are priced on the coarse grid."""
HOPELESS, HOPELESS_ONCE = 1e5, 400.0
"""Epsilons, of a history and of one question, that protect nobody: the Renyi bound is given, grids would overflow."""
REMEMBERED = 10_000
"""Renyi curves kept for the next reading."""
DISTINCT = 64
"""More distinct multipliers than this at one rate are rounded down to so many before a loss distribution is built."""


# --- the table of theorems -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theorem:
    """How a kind of question is priced, and who proved it."""

    citation: str
    profile: Callable[[Any], Profile]
    """The hockey-stick profile of one occasion."""
    curves: Callable[[Sequence[Any]], Array]
    """The Renyi divergences of one occasion at `renyi.ORDERS`: [questions, orders]."""
    occasions: Callable[[Any, int], int] = lambda question, count: count
    """On how many occasions at most one example takes part, when the question is asked `count` times."""


THEOREMS: dict[type[Question], Theorem] = {
    SampledGaussian: Theorem(
        "Zhu, Dong & Wang 2022 (dominating pair, both directions); Mironov, Talwar & Zhang 2019 (Renyi)",
        lambda question: sampled_gaussian(question.rate, question.multiplier),
        lambda questions: rdp.curves([q.rate for q in questions], [q.multiplier for q in questions]),
    ),
    Gaussian: Theorem(
        "Balle & Wang 2018; adaptive queries under a fixed strategy matrix: Denisov et al. 2022",
        lambda question: sampled_gaussian(1.0, question.multiplier),
        lambda questions: rdp.curves([1.0] * len(questions), [q.multiplier for q in questions]),
    ),
    # Steps t and t + bands are independent given the strategy's bands, and one example belongs to one part.
    CyclicGaussian: Theorem(
        "Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization",
        lambda question: sampled_gaussian(question.rate, question.multiplier),
        lambda questions: rdp.curves([q.rate for q in questions], [q.multiplier for q in questions]),
        lambda question, count: -(-count // question.bands),
    ),
    Trial: Theorem(
        "docs/theorems.md 4; a convex profile has a dominating pair: Zhu, Dong & Wang 2022",
        trials.profile,
        trials.curves,
    ),
}


def theorem_for(question: Question) -> Theorem:
    """The theorem that prices a question; a kind without one is refused by name."""
    theorem = THEOREMS.get(type(question))
    if theorem is None:
        known = ", ".join(sorted(kind.__name__ for kind in THEOREMS))
        raise ValueError(f"no theorem prices {question!r}; known kinds: {known}. Register one in accounting.THEOREMS")
    return theorem


def occasions(history: History) -> dict[Question, int]:
    """How often each question touches one example, without the questions that were never asked."""
    result = {}
    for question, count in history.items():
        if count < 0 or count != int(count):
            raise ValueError(f"count={count} of {question!r} must be a whole number, zero or more")
        if count:
            result[question] = theorem_for(question).occasions(question, int(count))
    return result


_CURVES: dict[Question, Array] = {}


def curves(questions: Iterable[Question]) -> dict[Question, Array]:
    """The Renyi curve of one occasion of each question. New ones are computed kind by kind, each kind in one call."""
    wanted = dict.fromkeys(questions)
    known = {question: _CURVES[question] for question in wanted if question in _CURVES}
    missing = [question for question in wanted if question not in known]
    if len(_CURVES) > REMEMBERED:
        _CURVES.clear()
    for kind in dict.fromkeys(type(question) for question in missing):
        alike = [question for question in missing if type(question) is kind]
        known |= dict(zip(alike, theorem_for(alike[0]).curves(alike), strict=True))
    _CURVES.update((question, known[question]) for question in missing)
    return known


# --- epsilon ---------------------------------------------------------------------------------------------------------


def epsilon(history: History, delta: float, accountant: str = "pld") -> float:
    """The epsilon of a history at `delta`: by loss distributions ("pld", what is reported) or Renyi ("rdp", faster).

    >>> round(epsilon({SampledGaussian(rate=0.04, multiplier=1.2222): 6250}, delta=1e-5), 2)
    17.44

    Formal guarantees: asking these questions, in any order fixed in advance, is (epsilon, delta)-differentially private
    for adding or removing one example; both accountants round upwards (Doroshenko et al. 2022; Canonne et al. 2020).
    """
    check_delta(delta)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f'accountant={accountant!r} must be "pld" or "rdp"')
    by_renyi = rdp.tight_epsilon(total_curve(history), delta)
    return by_renyi if accountant == "rdp" else _epsilon_by_distribution(history, delta, FINE)


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie between 0 and 1; take one well below 1 / examples, such as 1e-5")


def total_curve(history: History) -> Array:
    """The Renyi curve of a history: the sum of its occasions' (Mironov 2017, Proposition 1)."""
    asked = occasions(history)
    each = curves(asked)
    return sum((count * each[question] for question, count in asked.items()), np.zeros(len(rdp.ORDERS)))


def _epsilon_by_distribution(history: History, delta: float, fineness: float) -> float:
    by_renyi = rdp.tight_epsilon(total_curve(history), delta)
    asked = occasions(history)
    # The largest loss of a single question is about this; a grid much finer than that helps nobody.
    largest = max((rdp.classic_epsilon(curve, 1e-20) for curve in curves(asked).values()), default=0.0)
    if by_renyi == 0.0 or by_renyi > HOPELESS or largest > HOPELESS_ONCE:
        return by_renyi
    interval = grid_step(max(by_renyi, largest), COARSE if len(asked) > MANY else fineness)
    return _epsilon_of(loss_distribution(history, interval), delta, guess=by_renyi)


def _epsilon_of(losses: PrivacyLossDistribution, delta: float, guess: float) -> float:
    """The smallest epsilon whose delta is no larger, to eight digits from above; dp_accounting's own search is slow."""

    def surplus(loss: float) -> float:
        return log(max(float(losses.get_delta_for_epsilon(loss)), 1e-300) / delta)

    while surplus(guess) > 0:
        guess *= 2
    least = next((loss for loss in (0.75 * guess, 0.0) if surplus(loss) > 0), None)
    if least is None:
        return 0.0
    result = float(brentq(surplus, least, guess, xtol=1e-8 * guess, rtol=1e-8))
    while not surplus(result) <= 0:
        result += 1e-8 * guess
    return result


def grid_step(scale: float, fineness: float) -> float:
    """A step for losses of this size: a power of two, so that grids nest and coarser is never below finer."""
    return float(2.0 ** floor(log2(scale * fineness)))


def loss_distribution(history: History, interval: float) -> PrivacyLossDistribution:
    """The loss distribution of a whole history, from above. The history must cost something."""
    asked = _fewer(occasions(history))
    costly = {question for question, curve in curves(asked).items() if curve[-1] > 0}
    parts = [_single(question, interval).self_compose(count) for question, count in asked.items() if question in costly]
    return reduce(lambda left, right: left.compose(right), parts)


@lru_cache(maxsize=128)
def _single(question: Question, interval: float) -> PrivacyLossDistribution:
    profile = theorem_for(question).profile(question)
    remove, add = (
        DensePLDPmf(interval, lowest, masses, infinite, True)
        for lowest, masses, infinite in (connect_dots(profile, interval), connect_dots(profile.reversed, interval))
    )
    return PrivacyLossDistribution(remove, add)


def _fewer(asked: Mapping[Question, int]) -> Mapping[Question, int]:
    """At most `DISTINCT` multipliers per rate, by rounding multipliers down: less noise never costs less."""
    by_rate: dict[float, list[SampledGaussian]] = {}
    for question in asked:
        if isinstance(question, SampledGaussian):
            by_rate.setdefault(question.rate, []).append(question)
    stands_for: dict[Question, Question] = {}
    for rate, alike in by_rate.items():
        if len(alike) > DISTINCT:
            known = sorted(question.multiplier for question in alike)
            levels = np.array(known)[np.arange(DISTINCT) * len(known) // DISTINCT]
            for question in alike:
                level = levels[np.searchsorted(levels, question.multiplier, side="right") - 1]
                stands_for[question] = SampledGaussian(rate, float(level))
    fewer: Counter[Question] = Counter()
    for question, count in asked.items():
        fewer[stands_for.get(question, question)] += count
    return fewer


# --- calibration -----------------------------------------------------------------------------------------------------


def calibrate(history_of: Callable[[float], History], epsilon: float, delta: float, accountant: str = "pld") -> float:
    """The smallest noise multiplier for which `history_of(multiplier)` costs at most `epsilon`, to 0.1% of epsilon.

    Formal guarantees: the history at the returned multiplier was priced, and costs at most `epsilon`.
    """
    check_delta(delta)
    if not 0 < epsilon < inf:
        raise ValueError(f"epsilon={epsilon} must be positive and finite")
    search = _Calibration(history_of, epsilon, delta)
    if accountant == "rdp":
        return search.solve(search.by_renyi, *search.bracket(search.by_renyi))
    if accountant != "pld":
        raise ValueError(f'accountant={accountant!r} must be "pld" or "rdp"')
    coarse = search.by_distribution(COARSE)
    low, high = search.bracket(coarse)
    near = search.solve(coarse, low, high)
    # The coarse grid is never below the fine one and at most about 0.02% above it, so this is usually one evaluation.
    return search.solve(search.by_distribution(FINE), low, high, start=near)


@dataclass(frozen=True)
class _Calibration:
    """One search: cost falls with the multiplier, nearly as a power law, so secants in log-log coordinates converge."""

    history_of: Callable[[float], History]
    target: float
    delta: float

    def by_renyi(self, multiplier: float) -> float:
        return epsilon(self.history_of(multiplier), self.delta, "rdp")

    def by_distribution(self, fineness: float) -> Callable[[float], float]:
        def cost(multiplier: float) -> float:
            return _epsilon_by_distribution(self.history_of(multiplier), self.delta, fineness)

        return cost

    def bracket(self, cost: Callable[[float], float]) -> tuple[float, float]:
        """Multipliers between which the target lies, found by the Renyi accountant and held against `cost`."""
        high = 1.0
        while self.by_renyi(high) > self.target and high < LARGEST_MULTIPLIER:
            high *= 2
        if high >= LARGEST_MULTIPLIER and (floor_cost := cost(high)) > self.target:
            raise ValueError(
                f"epsilon={self.target} cannot be reached: with a noise multiplier of {high:.0f} the plan still costs "
                f"{floor_cost:.4g}; ask fewer questions whose noise is fixed, or allow a larger epsilon"
            )
        low = high / 2
        while self.by_renyi(low) <= self.target or cost(low) <= self.target:
            low /= 2
            if low < 1 / LARGEST_MULTIPLIER:
                raise ValueError(
                    f"epsilon={self.target} is met with next to no noise: the plan asks nothing, or its cost does not "
                    "depend on the multiplier; there is nothing to calibrate"
                )
        return low, high

    def solve(self, cost: Callable[[float], float], low: float, high: float, start: float | None = None) -> float:
        """A multiplier in (low, high] with cost within [0.999, 1] of the target; `cost` must fall below it at high."""
        least, most = 0.999 * self.target, self.target
        known: list[tuple[float, float]] = []
        trial = start or sqrt(low * high)
        for _ in range(100):
            price = cost(trial)
            if least <= price <= most:
                return trial
            low, high = (trial, high) if price > most else (low, trial)
            known = [*known, (trial, price)][-2:]
            trial = self._next(known, low, high)
            if high / low < 1 + 1e-9:  # a fixed cost makes the curve flat just below the target
                return high
        raise AssertionError(f"no multiplier found between {low} and {high}")

    def _next(self, known: list[tuple[float, float]], low: float, high: float) -> float:
        aim, middle = log(0.9996 * self.target), sqrt(low * high)
        slope = -1.0
        if len(known) == 2 and all(0 < price < inf for _, price in known):
            (x0, y0), (x1, y1) = ((log(x), log(y)) for x, y in known)
            slope = (y1 - y0) / (x1 - x0) if x1 != x0 else -1.0
        multiplier, price = known[-1]
        if not 0 < price < inf or slope >= 0:
            return middle
        guess = exp(min(log(multiplier) + (aim - log(price)) / slope, log(high)))
        return guess if low < guess < high else middle


# --- other prices ----------------------------------------------------------------------------------------------------


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
    composition. A number of runs fixed in advance is not covered: price it as so many copies of the history.
    """
    check_delta(delta)
    if not expected_runs >= 1:
        raise ValueError(f"expected_runs={expected_runs} must be at least 1")
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


def published_claim_epsilon(
    accepted: int, rate: float, multiplier: float, validation_rate: float, validation_multiplier: float, delta: float
) -> float:
    """What the papers on selective updates claim: the Renyi total of the accepted trials alone.

    Formal guarantees: none. Rejected trials are not free (docs/theorems.md 3): this is for comparison with
    published tables, and never an epsilon of ours. Price trials as `Trial` questions.
    """
    return epsilon(
        {
            SampledGaussian(rate, multiplier): accepted,
            SampledGaussian(validation_rate, validation_multiplier): accepted,
        },
        delta,
        "rdp",
    )


# --- while training --------------------------------------------------------------------------------------------------


class Odometer:
    """What has been spent so far, by Renyi accounting: cheap enough to read at every step."""

    def __init__(self, history: History | None = None) -> None:
        self.history: Counter[Question] = Counter()
        self._total = np.zeros(len(rdp.ORDERS))
        self._pending: Counter[Question] = Counter()
        self.add_many(history or {})

    def add(self, question: Question, count: int = 1) -> None:
        """Count a question. Its curve, if new, is computed at the next reading, with all others still missing."""
        self._pending[question] += count

    def add_many(self, history: History) -> None:
        for question, count in history.items():
            self.add(question, count)

    def epsilon(self, delta: float) -> float:
        """The epsilon of everything added so far, as `epsilon(history, delta, "rdp")`."""
        check_delta(delta)
        if self._pending:
            self._settle()
        return rdp.tight_epsilon(self._total, delta)

    def _settle(self) -> None:
        each = curves(self._pending)
        for question, count in self._pending.items():
            before = occasions({question: self.history[question]}).get(question, 0)
            self.history[question] += count
            after = occasions({question: self.history[question]}).get(question, 0)
            if after > before:
                self._total = self._total + (after - before) * each[question]
        self._pending.clear()


class Budget:
    """May one more question be asked? The plan is certified once; what lies inside it is then allowed without work.

    Formal guarantees: every history whose questions were all allowed costs at most `epsilon` at `delta`, provided that
    the questions' parameters did not depend on the answers (see `RenyiFilter` otherwise). A part of a certified
    history costs no more than the whole, because the rest may be forgotten (post-processing).
    """

    def __init__(self, epsilon: float, delta: float, planned: Plan) -> None:
        check_delta(delta)
        if not epsilon >= 0:
            raise ValueError(f"epsilon={epsilon} must not be negative: it is the most that may be spent")
        self.epsilon, self.delta = epsilon, delta
        runs = _runs(planned)
        self.planned = history_of_runs(runs)
        self.certified = self._longest_prefix(runs)
        self._ahead: History = {}

    @property
    def fits(self) -> bool:
        """Whether the whole plan is within the budget."""
        return within(self.planned, self.certified)

    def allows(self, spent: History, question: Question) -> bool:
        """Whether asking `question` after `spent` keeps the total within the budget."""
        for known in (self.certified, self._ahead):
            if spent.get(question, 0) < known.get(question, 0) and within(spent, known):
                return True
        wanted = history_of_runs([*spent.items(), (question, 1)])
        if not (self._affords(wanted, COARSE) or self._affords(wanted, FINE)):
            return False
        # Outside the plan: certify some more of the same as well, so that the next questions are free again.
        larger = (_grown(wanted, share) for share in (1, 1 / 4, 1 / 16, 1 / 64, 1 / 256))
        self._ahead = next((history for history in larger if self._affords(history, COARSE)), wanted)
        return True

    def _longest_prefix(self, runs: Sequence[tuple[Question, int]]) -> History:
        """The longest prefix of the runs that is within the budget."""

        def prefix(steps: int) -> History:
            return history_of_runs(first(runs, steps))

        def cost(fineness: float) -> Callable[[int], float]:
            return lambda steps: _epsilon_by_distribution(prefix(steps), self.delta, fineness)

        total = sum(count for _, count in runs)
        if self._affords(prefix(total), FINE):
            return prefix(total)
        fits = _largest(0, total, lambda steps: epsilon(prefix(steps), self.delta, "rdp"), self.epsilon)
        fits = _largest(fits, total, cost(COARSE), self.epsilon)
        # The coarse grid is at most about 0.02% above the fine one, so few steps are left to gain.
        return prefix(_largest(fits, min(total, fits + fits // 1000 + 2), cost(FINE), self.epsilon))

    def _affords(self, history: History, fineness: float) -> bool:
        if epsilon(history, self.delta, "rdp") <= self.epsilon:
            return True
        return _epsilon_by_distribution(history, self.delta, fineness) <= self.epsilon


def _largest(low: int, high: int, cost: Callable[[int], float], most: float) -> int:
    """The largest number in [low, high) whose cost, which rises nearly as a power, is at most `most`; `low` if none."""
    below, above = cost(low), cost(high)
    while high - low > 1:
        middle = (low + high) // 2
        if 0 < below < most < above < inf and low > 0:
            middle = int(low * (high / low) ** (log(most / below) / log(above / below)))
            middle = min(max(middle, low + 1), high - 1)
        price = cost(middle)
        low, below, high, above = (middle, price, high, above) if price <= most else (low, below, middle, price)
    return low


def _grown(history: History, share: float) -> History:
    """Every count larger by this share, and by one at least."""
    return {question: count + ceil(count * share) for question, count in history.items()}


def _runs(planned: Plan) -> list[tuple[Question, int]]:
    return list(planned.items() if isinstance(planned, Mapping) else planned)


def first(runs: Sequence[tuple[Question, int]], steps: int) -> list[tuple[Question, int]]:
    """The first `steps` questions of the runs."""
    taken: list[tuple[Question, int]] = []
    for question, count in runs:
        taken.append((question, min(count, steps)))
        steps -= taken[-1][1]
    return taken


def history_of_runs(runs: Iterable[tuple[Question, int]]) -> History:
    """Runs of questions, added up."""
    history: Counter[Question] = Counter()
    for question, count in runs:
        if count:
            history[question] += count
    return history


def within(part: History, whole: History) -> bool:
    """Whether no question was asked more often in `part` than in `whole`."""
    return all(count <= whole.get(question, 0) for question, count in part.items())


NEARLY = 0.96
"""The share of its questions that a filter gives up to bear noise that shrinks."""


class RenyiFilter:
    """May one more question be asked, when its parameters were chosen from earlier answers? Several orders at once.

    The budget of order a is epsilon - log((a-1)/a) + (log(weight_a delta) + log a) / (a-1). A question is allowed if at
    some order the spent Renyi divergence then stays within that order's budget.

    Formal guarantees: a run whose every question was allowed is (epsilon, delta)-differentially private, even if rates,
    multipliers and the stopping time depend on earlier answers: exp((a-1)(loss - spent)) is a supermartingale, and the
    first order within its budget at the end has delta at most weight_a delta (docs/theorems.md 5; one order is
    Feldman & Zrnic 2021). Orders and weights are fixed before the first question.
    """

    def __init__(self, epsilon: float, delta: float, planned: Plan, weight: float = 0.9) -> None:
        check_delta(delta)
        if not 0 < epsilon < inf:
            raise ValueError(f"epsilon={epsilon} must be positive and finite")
        if not 0 < weight < 1:
            raise ValueError(f"weight={weight} must lie between 0 and 1: the share of delta for the planned order")
        self.epsilon, self.delta = epsilon, delta
        self.planned_order = _best_order(history_of_runs(_runs(planned)), epsilon, delta)
        self.weights = np.full(len(rdp.ORDERS), (1 - weight) / (len(rdp.ORDERS) - 1))
        self.weights[self.planned_order == rdp.ORDERS] = weight
        self.budgets = epsilon - rdp.CONVERSION + (np.log(self.weights) + log(delta)) / (rdp.ORDERS - 1)
        self.history: Counter[Question] = Counter()
        self._spent = np.zeros(len(rdp.ORDERS))

    def allows(self, question: Question) -> bool:
        return bool(np.any(self._spent + self._curve(question) <= self.budgets))

    def spend(self, question: Question) -> None:
        """Charge a question that is about to be asked; one that is not allowed is refused."""
        if not self.allows(question):
            raise ValueError(f"{question!r} would exceed epsilon={self.epsilon} at delta={self.delta}; stop here")
        self._spent = self._spent + self._curve(question)
        self.history[question] += 1

    def _curve(self, question: Question) -> Array:
        if theorem_for(question).occasions(question, 2) != 2:
            raise ValueError(
                f"{question!r} has no filter: its price supposes a strategy fixed in advance; use a Budget"
            )
        return curves([question])[question]


def _best_order(planned: History, epsilon: float, delta: float) -> float:
    """The lowest order at which nearly as many copies of the plan fit as at any.

    Adaptive noise decays more often than it grows, and less noise moves the best order down: a lower one loses little,
    while above the best one the price of a sampled question soon explodes.
    """
    budgets = epsilon - rdp.CONVERSION + log(delta) / (rdp.ORDERS - 1)
    curve = total_curve(planned)
    if not curve.any():
        raise ValueError(
            f"planned={dict(planned)} costs nothing; give the questions that are expected, to choose an order"
        )
    copies = budgets / curve
    return float(rdp.ORDERS[np.argmax(copies >= NEARLY * copies.max())])


# --- what may be said ------------------------------------------------------------------------------------------------

ASSUMPTIONS = (
    "the noise is ideal: floating-point Gaussians stand in for real ones",
    "the random numbers are secret and not used twice",
    "the expected batch size and the size of the dataset are public",
    "hyper-parameters are public, or the search for them was priced separately (tuned_epsilon)",
    "the number of steps did not depend on the answers beyond the plan that is priced",
    "one example is one row; a person with several rows is protected less",
)


@dataclass(frozen=True)
class Facts:
    """What decides whether the questions' price is a guarantee about this run."""

    sampling: str = "poisson"
    """ "poisson", "cyclic-poisson", "every-example", or what has no theorem here, such as "shuffled"."""
    noise: str = "secret"
    """ "secret" or "seeded"."""
    examples_independent: bool = True
    """False where one example's gradient depends on another's, as with batch normalisation."""
    schedule: str = "fixed"
    """ "fixed" in advance, "filtered" by a RenyiFilter with `filter_epsilon`, or "data-dependent"."""
    nonprivate_outputs: bool = False
    """Whether anything computed from data without noise was written where the guarantee's reader may see it."""
    filter_epsilon: float | None = None


@dataclass(frozen=True)
class Guarantee:
    """What may be printed about a run: an epsilon with its assumptions, or the reasons why there is none."""

    epsilon: float | None
    delta: float
    accountant: str
    epsilon_rdp: float | None
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ASSUMPTIONS
    adjacency: str = "add/remove one example"
    epsilon_if_noise_were_secret: float | None = None


SAMPLING: dict[str, tuple[type[Question], ...]] = {
    "poisson": (SampledGaussian, Gaussian, Trial),
    "cyclic-poisson": (CyclicGaussian, Gaussian),
    "every-example": (Gaussian,),
}
"""Which questions a way of sampling answers as their theorems suppose."""


def guarantee(history: History, delta: float, facts: Facts) -> Guarantee:
    """What may be said about a run that asked `history` under `facts`. Without a theorem there is no epsilon.

    Formal guarantees: where `epsilon` is a number, the run is (epsilon, delta)-differentially private under the listed
    assumptions; for a filtered run it is the filter's, whatever was spent.
    """
    check_delta(delta)
    reasons = (*_reasons_but_noise(history, facts), *_reasons_of_noise(facts))
    if _reasons_but_noise(history, facts):
        return Guarantee(None, delta, "none", None, reasons)
    by_renyi = epsilon(history, delta, "rdp")
    filtered = facts.schedule == "filtered"
    spent = facts.filter_epsilon if filtered else epsilon(history, delta)
    broken: tuple[str, ...] = ()
    if spent is not None and by_renyi < inf and filtered and by_renyi > spent:
        broken = (f"the questions cost {by_renyi:.4g}, so no filter of epsilon {spent:.4g} allowed them",)
    if by_renyi == inf:
        broken = (*broken, "a question was answered without noise, so no epsilon is finite")
    reasons = (*reasons, *broken)
    # What a filtered run happened to spend depends on the data: only the filter's own epsilon is proved, by Renyi.
    proved = spent if filtered and not broken else by_renyi
    result = Guarantee(spent, delta, "renyi filter" if filtered else "pld", proved, reasons)
    if not reasons:
        return result
    return replace(result, epsilon=None, epsilon_if_noise_were_secret=None if broken else spent)


def _reasons_of_noise(facts: Facts) -> tuple[str, ...]:
    if facts.noise == "secret":
        return ()
    if facts.noise == "seeded":
        return ("the noise was drawn from a known seed, so anyone who has the seed can subtract it",)
    return (f"noise={facts.noise!r} is neither secret nor seeded, and nothing is proved about it",)


def _reasons_but_noise(history: History, facts: Facts) -> tuple[str, ...]:
    reasons = []
    if facts.sampling not in SAMPLING:
        reasons.append(
            f"batches were drawn by {facts.sampling} sampling, for which the Poisson price is not an upper bound"
        )
    else:
        for kind in dict.fromkeys(type(question) for question, count in history.items() if count):
            if not issubclass(kind, SAMPLING[facts.sampling]):
                reasons.append(f"no theorem prices {kind.__name__} questions under {facts.sampling} sampling")
    if not facts.examples_independent:
        reasons.append(
            "one example's gradient depended on others in the batch, so clipping does not bound its influence"
        )
    if facts.schedule == "data-dependent":
        reasons.append("the questions' parameters depended on the data without a Renyi filter")
    elif facts.schedule == "filtered" and facts.filter_epsilon is None:
        reasons.append("the schedule was filtered but the filter's epsilon is missing")
    elif facts.schedule not in ("fixed", "filtered"):
        reasons.append(f"schedule={facts.schedule!r} is neither fixed nor filtered, and nothing is proved about it")
    if facts.nonprivate_outputs:
        reasons.append("values computed from data without noise were written out")
    return tuple(reasons)
