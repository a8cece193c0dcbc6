"""What did the questions cost together? Epsilon of a history, by loss distributions or by Renyi divergences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import floor, inf, log, log2

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.pld import Composed, LossMasses
from vestige.accounting.profiles import connect_dots
from vestige.accounting.theorems import History, curves, occasions, theorem_for, total_curve
from vestige.checks import check_delta
from vestige.lazy_scipy import brentq
from vestige.priced_questions import GroupedGaussian, Question, SampledGaussian

FINE, COARSE = 2e-5, 16e-5
"""Steps of the loss grid relative to epsilon: reported numbers use the fine one, searches start with the coarse."""


SLACK = 1e-6
"""The part of delta that may go to what rounding could hide, before losses are composed again nearer to epsilon."""
MANY = 8
"""Histories of more distinct questions than this are priced on the coarse grid."""


HOPELESS, HOPELESS_ONCE = 1e5, 400.0
"""Epsilons, of a history and of one question, beyond which only the Renyi bound is given: grids would overflow."""


DISTINCT = 64
"""More distinct multipliers than this at one rate are rounded down to so many before a loss distribution is built."""


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
    return by_renyi if accountant == "rdp" else epsilon_by_distribution(history, delta, FINE)


def epsilon_by_distribution(history: History, delta: float, fineness: float) -> float:
    """By loss distributions on a grid of this fineness. The last results are kept: noise that was calibrated is priced
    again by the budget that it is for, and by the statement of its cost."""
    return _by_distribution(tuple(sorted(history.items(), key=repr)), delta, fineness)


@lru_cache(maxsize=256)
def _by_distribution(asked_for: tuple[tuple[Question, int], ...], delta: float, fineness: float) -> float:
    history = dict(asked_for)
    by_renyi = rdp.tight_epsilon(total_curve(history), delta)
    asked = occasions(history)
    largest = largest_loss(asked)
    if by_renyi == 0.0 or by_renyi > HOPELESS or largest > HOPELESS_ONCE:
        return by_renyi
    interval = grid_step(max(by_renyi, largest), COARSE if len(asked) > MANY else fineness)
    best = by_renyi
    for _ in range(4):
        try:
            losses = loss_distribution(history, interval, best)
        except OverflowError:
            return best
        best = min(best, epsilon_of(losses, delta, guess=best))
        # Far below its target a composed distribution is still an upper bound, but a loose one.
        if best == 0.0 or max(each.slack(best) for each in losses) < SLACK * delta:
            break
    return best


def largest_loss(asked: History) -> float:
    """The largest loss of a single question is about this; a much finer grid gains nothing."""
    return max((rdp.classic_epsilon(curve, 1e-20) for curve in curves(asked).values()), default=0.0)


def epsilon_of(losses: Sequence[Composed], delta: float, guess: float) -> float:
    """The smallest epsilon whose delta is no larger in either direction, to eight digits from above."""

    def surplus(loss: float) -> float:
        return log(max(max(each.delta(loss) for each in losses), 1e-300) / delta)

    if surplus(guess) > 0:
        return inf
    least = next((loss for loss in (0.75 * guess, 0.0) if surplus(loss) > 0), None)
    if least is None:
        return 0.0
    result = brentq(surplus, least, guess, xtol=1e-8 * guess, rtol=1e-8)
    while not surplus(result) <= 0:
        result += 1e-8 * guess
    return result


def grid_step(scale: float, fineness: float) -> float:
    """A step for losses of this size: a power of two, so that grids nest and coarser is never below finer."""
    return float(2.0 ** floor(log2(scale * fineness)))


def loss_distribution(
    history: History, interval: float, target: float, *, reached: bool = False
) -> tuple[Composed, Composed]:
    """The loss distributions of a whole history, removing an example and adding one, from above and most exact at
    losses near the target; with `reached`, near one that losses of that direction reach. The history must cost
    something."""
    asked = _fewer(occasions(history))
    costly = {question for question, curve in curves(asked).items() if curve[-1] > 0}
    both = [(_single(question, interval), count) for question, count in asked.items() if question in costly]
    remove, add = ([(pair[way], count) for pair, count in both] for way in (0, 1))
    targets = [min(target, interval * _highest(parts) / 2) if reached else target for parts in (remove, add)]
    return Composed(remove, interval, targets[0]), Composed(add, interval, targets[1])


def _highest(parts: Sequence[tuple[LossMasses, int]]) -> int:
    """The largest finite loss, in steps; one at least."""
    return max(1, sum(count * (part.lowest + len(part.masses) - 1) for part, count in parts))


@lru_cache(maxsize=128)
def _single(question: Question, interval: float) -> tuple[LossMasses, LossMasses]:
    profile = theorem_for(question).profile(question)
    return LossMasses(*connect_dots(profile, interval)), LossMasses(*connect_dots(profile.reversed, interval))


def _fewer(asked: Mapping[Question, int]) -> Mapping[Question, int]:
    """At most `DISTINCT` multipliers per rate, by rounding multipliers down: less noise never costs less."""
    by_rate: dict[Question, list[SampledGaussian | GroupedGaussian]] = {}
    for question in asked:
        if isinstance(question, SampledGaussian | GroupedGaussian):
            by_rate.setdefault(replace(question, multiplier=1.0), []).append(question)
    stands_for: dict[Question, Question] = {}
    for alike in by_rate.values():
        if len(alike) > DISTINCT:
            known = sorted(question.multiplier for question in alike)
            levels = np.array(known)[np.arange(DISTINCT) * len(known) // DISTINCT]
            for question in alike:
                level = levels[np.searchsorted(levels, question.multiplier, side="right") - 1]
                stands_for[question] = replace(question, multiplier=float(level))
    fewer: Counter[Question] = Counter()
    for question, count in asked.items():
        fewer[stands_for.get(question, question)] += count
    return fewer
