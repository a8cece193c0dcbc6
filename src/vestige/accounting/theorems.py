"""Which theorem prices which question? One table, and the Renyi curves that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vestige.accounting import accept_reject, rdp
from vestige.accounting.profiles import (
    Profile,
    exponential_mechanism,
    randomized_response,
    replaced_gaussian,
    sampled_gaussian,
)
from vestige.accounting.rdp import Array
from vestige.accounting.samplings import allocation, rows_of_users, truncation
from vestige.priced_questions import (
    AllocatedGaussian,
    CyclicGaussian,
    ExponentialMechanism,
    Gaussian,
    GroupedGaussian,
    PureLoss,
    Question,
    SampledGaussian,
    Trial,
    TruncatedGaussian,
)

History = Mapping[Question, int]
"""How often each question was asked."""


REMEMBERED = 10_000
"""Renyi curves kept for the next reading."""


@dataclass(frozen=True)
class Theorem:
    """How a kind of question is priced, and who proved it."""

    citation: str
    profile: Callable[[Any], Profile]
    """The hockey-stick profile of one occasion."""
    curves: Callable[[Sequence[Any]], Array]
    """The Renyi divergences of one occasion at `rdp.ORDERS`: [questions, orders]."""
    occasions: Callable[[Any, int], int] = lambda question, count: count
    """On how many occasions at most one example takes part, when the question is asked `count` times."""
    replacing: Callable[[Any], Profile] | None = None
    """The profile of one occasion where an example is replaced by another; None where no theorem gives it."""
    replacing_curves: Callable[[Sequence[Any]], Array] | None = None
    """The Renyi divergences for that; None where no theorem gives them."""


THEOREMS: dict[type[Question], Theorem] = {
    SampledGaussian: Theorem(
        "Zhu, Dong & Wang 2022 (dominating pair, both directions); Mironov, Talwar & Zhang 2019 (Renyi)",
        lambda question: sampled_gaussian(question.rate, question.multiplier),
        lambda questions: rdp.curves([q.rate for q in questions], [q.multiplier for q in questions]),
        replacing=lambda question: replaced_gaussian(question.rate, question.multiplier),
        replacing_curves=lambda questions: rdp.replaced_curves(
            [q.rate for q in questions], [q.multiplier for q in questions]
        ),
    ),
    Gaussian: Theorem(
        "Balle & Wang 2018; adaptive queries under a fixed strategy matrix: Denisov et al. 2022",
        lambda question: sampled_gaussian(1.0, question.multiplier),
        lambda questions: rdp.curves([1.0] * len(questions), [q.multiplier for q in questions]),
        replacing=lambda question: replaced_gaussian(1.0, question.multiplier),
        replacing_curves=lambda questions: rdp.replaced_curves(
            [1.0] * len(questions), [q.multiplier for q in questions]
        ),
    ),
    ExponentialMechanism: Theorem(
        "Dong, Durfee & Rogers 2020 (bounded range); a convex profile has a dominating pair: Zhu, Dong & Wang 2022",
        lambda question: exponential_mechanism(question.choice_epsilon),
        lambda questions: rdp.exponential_mechanism([q.choice_epsilon for q in questions]),
        replacing=lambda question: exponential_mechanism(2 * question.choice_epsilon),  # a score moves by twice as much
        replacing_curves=lambda questions: rdp.exponential_mechanism([2 * q.choice_epsilon for q in questions]),
    ),
    # Steps t and t + bands are independent given the strategy's bands, and one example belongs to one part.
    CyclicGaussian: Theorem(
        "Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization",
        lambda question: sampled_gaussian(question.rate, question.multiplier),
        lambda questions: rdp.curves([q.rate for q in questions], [q.multiplier for q in questions]),
        lambda question, count: -(-count // question.bands),
        lambda question: replaced_gaussian(question.rate, question.multiplier),  # it takes the other's place in a part
        lambda questions: rdp.replaced_curves([q.rate for q in questions], [q.multiplier for q in questions]),
    ),
    AllocatedGaussian: Theorem(
        "Chua et al. 2024, Balls-and-Bins Sampling (dominating pair); Feldman & Shenfeld 2026; docs/sampling.md",
        allocation.profile,
        allocation.curves,
    ),
    TruncatedGaussian: Theorem(
        "Ganesh 2025 (2508.15089); docs/sampling.md",
        truncation.profile,
        truncation.curves,
    ),
    GroupedGaussian: Theorem(
        "Choquette-Choo et al. 2023 (2310.15526), Corollary 4.7; Charles et al. 2024 (2407.07737); docs/users.md",
        rows_of_users.profile,
        rows_of_users.curves,
    ),
    Trial: Theorem(
        "docs/theorems.md 4; a convex profile has a dominating pair: Zhu, Dong & Wang 2022",
        accept_reject.profile,
        accept_reject.curves,
    ),
    PureLoss: Theorem(
        "Kairouz, Oh & Viswanath 2015 (randomized response dominates every pure mechanism)",
        lambda question: randomized_response(question.epsilon),
        lambda questions: rdp.pure_curves([q.epsilon for q in questions]),
        replacing=lambda question: randomized_response(2 * question.epsilon),  # a group of two
        replacing_curves=lambda questions: rdp.pure_curves([2 * q.epsilon for q in questions]),
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


def total_curve(history: History) -> Array:
    """The Renyi curve of a history: the sum of its occasions' (Mironov 2017, Proposition 1)."""
    asked = occasions(history)
    each = curves(asked)
    return sum((count * each[question] for question, count in asked.items()), np.zeros(len(rdp.ORDERS)))
