"""May one more question be asked? An odometer, a budget for a fixed plan, a filter for one that adapts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf, log

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.composition import COARSE, FINE, epsilon, epsilon_by_distribution
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History, curves, occasions, theorem_for, total_curve
from vestige.checks import check_delta, check_epsilon
from vestige.priced_questions import Question

PlannedQuestions = History | Sequence[tuple[Question, int]]
"""What will be asked: a history, or runs (question, count) in the order in which they will be asked."""


REMEMBERED = 64
"""Curves that an odometer caches."""


class Odometer:
    """What has been spent so far, by Renyi accounting: cheap enough to read at every step."""

    def __init__(self, history: History | None = None) -> None:
        self.history: Counter[Question] = Counter()
        self._total = np.zeros(len(rdp.ORDERS))
        self._pending: Counter[Question] = Counter()
        self._occasions: dict[Question, int] = {}
        self._curves: dict[Question, Array] = {}
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
        new = [question for question in self._pending if question not in self._curves]
        if new:
            if len(self._curves) > REMEMBERED:  # a schedule asks another question at every step
                self._curves, new = {}, list(self._pending)
            self._curves |= curves(new)
        for question, count in self._pending.items():
            before = self._occasions.get(question, 0)
            self.history[question] += count
            after = occasions({question: self.history[question]}).get(question, 0)
            self._occasions[question] = after
            if after > before:
                self._total = self._total + (after - before) * self._curves[question]
        self._pending.clear()


class Budget:
    """May one more question be asked? The plan is certified once; what lies inside it is then allowed without work.

    Formal guarantees: every history whose questions were all allowed costs at most `epsilon` at `delta`, provided that
    the questions' parameters did not depend on the answers (see `RenyiFilter` otherwise). A part of a certified
    history costs no more than the whole, because the rest may be forgotten (post-processing).
    """

    def __init__(self, epsilon: float, delta: float, planned: PlannedQuestions) -> None:
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
            return lambda steps: epsilon_by_distribution(prefix(steps), self.delta, fineness)

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
        return epsilon_by_distribution(history, self.delta, fineness) <= self.epsilon


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


def _runs(planned: PlannedQuestions) -> list[tuple[Question, int]]:
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

    def __init__(self, epsilon: float, delta: float, planned: PlannedQuestions, weight: float = 0.9) -> None:
        check_delta(delta)
        check_epsilon(epsilon)
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


class FilteredBudget:
    """A Renyi filter with the interface of a ledger: it records spending and decides about the next question.

    `expected` are the questions of a step at the start; they choose, before the first answer, the order it is best at.
    """

    def __init__(self, epsilon: float, delta: float, expected: History) -> None:
        self._filter = RenyiFilter(epsilon, delta, expected)

    def allows(self, spent: History, question: Question) -> bool:
        self.admit(spent)
        return self._filter.allows(question)

    def admit(self, spent: History) -> None:
        """Take in what was spent; ValueError if it would not all have been allowed. The total decides, not the order:
        an order whose budget holds the total holds every part of it."""
        for question, count in (Counter(spent) - self._filter.history).items():
            for _ in range(count):
                self._filter.spend(question)


class Reserving:
    """A budget that keeps back what one last question costs, until that is asked."""

    def __init__(self, budget: Budget | FilteredBudget, last: Question) -> None:
        self._budget, self._last, self._kept = budget, last, False

    def allows(self, spent: History, question: Question) -> bool:
        if spent.get(self._last, 0):
            return self._budget.allows(spent, question)
        if question == self._last:  # after a step that was allowed with it, it is paid for
            return self._kept or self._budget.allows(spent, question)
        allowed = self._budget.allows({**spent, self._last: 1}, question)
        self._kept = self._kept or allowed
        return allowed


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
