"""What does replacing one example by another cost? By the worst pair for that, or as removing and adding."""

from __future__ import annotations

from math import exp, inf

from vestige.accounting.composition import (
    COARSE,
    HOPELESS,
    epsilon_by_distribution,
    epsilon_of,
    grid_step,
    largest_loss,
)
from vestige.accounting.meaning.tradeoff import LARGEST_EPSILON
from vestige.accounting.pld import Composed, LossMasses
from vestige.accounting.profiles import connect_dots
from vestige.accounting.theorems import History, occasions, theorem_for
from vestige.priced_questions import Question

LEAST = 1e-3
"""Where the search for an epsilon begins at least: smaller ones need not be exact."""


def replacing(history: History, delta: float, epsilon: float) -> tuple[float | None, str]:
    """Epsilon for replacing one example by another, where it is `epsilon` for adding or removing; and how it is known.

    Formal guarantees: an upper bound: by the dominating pair of replacing (`profiles.replaced_gaussian`) where every
    question has one; otherwise by way of the data without either example, which costs twice epsilon at a delta that is
    1 + e^epsilon times smaller.
    """
    asked = {question: count for question, count in occasions(history).items() if _costs(question)}
    if not asked:
        return 0.0, "theorem"
    if epsilon > LARGEST_EPSILON:
        return None, "none"
    try:
        if all(theorem_for(question).replacing is not None for question in asked):
            return _by_theorem(asked, delta, 2 * epsilon), "theorem"
        found = _by_group(history, delta, epsilon)
    except OverflowError:
        return None, "none"
    return (found, "group of two") if found < inf else (None, "none")


def _costs(question: Question) -> bool:
    return bool(theorem_for(question).curves([question])[0][-1] > 0)


def _by_theorem(asked: History, delta: float, guess: float) -> float:
    guess, largest = max(guess, LEAST), 2 * largest_loss(asked)
    while guess < HOPELESS:
        interval = grid_step(max(guess, largest), COARSE)
        parts = []
        for question, count in asked.items():
            profile = theorem_for(question).replacing
            assert profile is not None
            parts.append((LossMasses(*connect_dots(profile(question), interval)), count))
        composed = Composed(parts, interval, guess)
        if composed.delta(guess) <= delta:
            return epsilon_of([composed], delta, guess)
        guess *= 1.5
    raise OverflowError("no epsilon for replacing an example was found")


def _by_group(history: History, delta: float, once: float) -> float:
    for _ in range(20):
        part = delta / (1 + exp(min(once, 500.0)))
        found = epsilon_by_distribution(history, part, COARSE)
        if found <= once:
            return 2 * found
        once = 1.02 * found
    return inf
