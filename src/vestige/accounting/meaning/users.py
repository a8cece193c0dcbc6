"""What does a run cost a person who has several rows? By the mixture of their number, or by group privacy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import expm1, inf

from vestige.accounting.composition import COARSE, FINE, epsilon_by_distribution
from vestige.accounting.guarantees import LARGEST_LOSS, Facts, Guarantee, guarantee
from vestige.accounting.theorems import History
from vestige.assumptions import Stated
from vestige.checks import check_steps
from vestige.lazy_scipy import brentq
from vestige.priced_questions import Question
from vestige.units import Users

LARGEST_EPSILON = 500.0
"""The largest epsilon of a group; beyond it there is no protection."""


def history_of_user(history: History, users: Users) -> History | None:
    """What a history of questions about sampled rows is for a user; None where no theorem says."""
    found: Counter[Question] = Counter()
    for question, count in history.items():
        asked = users.question(question)
        if asked is None:
            return None
        found[asked] += count
    return found


def group_epsilon(history: History, delta: float, rows: int) -> float:
    """Epsilon for a group of so many rows: that of one row at a smaller delta, so many times.

    Formal guarantees: an upper bound. From row to row along the group, E_{e^(k e)}(P_0, P_k) is at most delta(e) times
    1 + e^e + ... + e^((k-1) e), where delta(e) is the curve of one row.
    """
    if rows == 1:
        return epsilon_by_distribution(history, delta, FINE)

    def missing(once: float) -> float:
        """By how much `once` is less than the epsilon of a row at the delta that is left to each row of the group."""
        shared = expm1(rows * once) / expm1(once) if once > 0 else rows
        return epsilon_by_distribution(history, delta / shared, COARSE) - once

    low = epsilon_by_distribution(history, delta, COARSE)
    below = missing(low)
    if below <= 0:
        return rows * low
    high = low + 2 * below
    while rows * high < LARGEST_EPSILON and (above := missing(high)) > 0:
        low, below, high = high, above, high + 2 * above
    if rows * high >= LARGEST_EPSILON:
        return inf
    high = brentq(missing, low, high, rtol=1e-4) * (1 + 2e-4)
    return rows * high if missing(high) <= 0 else inf


def guarantee_of_user(history: History, delta: float, facts: Facts, rows: int) -> Guarantee:
    """What a run about rows means for a person who has at most so many of them.

    Formal guarantees: as `guarantee`, for adding or removing all of that person's rows: by the mixture of the number of
    rows that join where samples are Poisson ones, otherwise by group privacy of the whole run's curve.
    """
    check_steps(rows, "rows_per_user")
    if facts.users is not None:
        raise ValueError(
            f"rows_per_user={rows}: this run's guarantee is for a user already ({facts.users.adjacency}); leave it out"
        )
    if facts.selection_delta and rows > 1:
        raise ValueError(
            f"rows_per_user={rows}: words were shown by a threshold, whose delta is for a word of one row alone, and "
            "somebody with several has no price here; ask with candidates, a public list of words"
        )
    alone = guarantee(history, delta, facts)
    users = Users(rows_per_user=rows)
    if alone.epsilon is None:
        return replace(alone, adjacency=users.adjacency)
    if facts.schedule == "filtered":
        raise ValueError(
            f"rows_per_user={rows}: of a run whose questions followed from earlier answers only the filter's epsilon "
            "is proved, at one delta, and group privacy needs a smaller one; train with users= for one about users"
        )
    mixed = history_of_user(history, users)
    if mixed is not None:
        return guarantee(mixed, delta, replace(facts, users=users))
    whose = Stated("unit", "assumed", users.assumption, True)
    found = group_epsilon(history, (1 - LARGEST_LOSS) * delta, rows)
    shown, reasons = (found, ()) if found < inf else (None, ("group privacy gives no finite epsilon at this delta",))
    return replace(
        alone,
        epsilon=shown,
        epsilon_rdp=shown,
        accountant=f"group privacy of {rows} rows",
        reasons=reasons,
        assumptions=tuple(whose if each.name == "unit" else each for each in alone.assumptions),
        adjacency=users.adjacency,
        asked=None,
    )
