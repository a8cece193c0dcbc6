"""What does a run cost in a book? Renyi curves of what it asks, for the book's unit and for its neighbours.

Each run is priced by itself: a strategy of correlated noise spans one run, and occasions of two are not rounded as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History, curves, occasions, theorem_for
from vestige.questions import CyclicGaussian, Gaussian, GroupedGaussian, PureLoss, Question, SampledGaussian

ADJACENCIES = {
    "add-remove": "add or remove one",
    "replace": "replace one by another",
}
WHOLE = (CyclicGaussian,)
"""Questions that are one mechanism over many steps: charged as a whole when the first step is asked."""


def curve_of(question: Question, adjacency: str) -> Array:
    """The Renyi curve of one occasion at `rdp.ORDERS`."""
    if adjacency == "add-remove":
        return curves([question])[question]
    return _replacing(question)


@lru_cache(maxsize=4096)
def _replacing(question: Question) -> Array:
    found = theorem_for(question).replacing_curves
    if found is None:
        raise ValueError(
            f"adjacency='replace': no theorem prices {type(question).__name__} where one is replaced by another; use a "
            "book of adjacency add-remove"
        )
    return np.asarray(found([question])[0])


def total(runs: Iterable[History], adjacency: str) -> Array:
    """The Renyi curve of several runs: the sum over all occasions (Mironov 2017, Proposition 1)."""
    counted: Counter[Question] = Counter()
    for run in runs:
        counted.update(occasions(run))
    result = np.zeros(len(rdp.ORDERS))
    for question, count in counted.items():
        if count:
            result = result + count * curve_of(question, adjacency)
    return result


def as_pairs(run: History) -> Counter[Question]:
    """What a run asks, occasion by occasion, as questions whose order and grouping no longer matter: sampled Gaussians
    in the place of steps of correlated noise, and of Gaussians."""
    found: Counter[Question] = Counter()
    for question, count in occasions(run).items():
        if isinstance(question, CyclicGaussian):
            found[SampledGaussian(question.rate, question.multiplier)] += count
        elif isinstance(question, Gaussian):
            found[SampledGaussian(1.0, question.multiplier)] += count
        else:
            found[question] += count
    return found


def dominates(larger: Question, smaller: Question) -> bool:
    """Whether every distinction that an answer to `smaller` allows an answer to `larger` allows too.

    A sampled Gaussian of a lower rate is a mixture of one of a higher rate and of no answer at all, and divergences are
    jointly convex; more noise is post-processing.
    """
    if larger == smaller:
        return True
    if type(larger) is not type(smaller):
        return False
    if isinstance(larger, PureLoss) and isinstance(smaller, PureLoss):
        return smaller.epsilon <= larger.epsilon
    if isinstance(larger, SampledGaussian) and isinstance(smaller, SampledGaussian):
        return smaller.rate <= larger.rate and smaller.multiplier >= larger.multiplier
    known, asked = vars(larger), vars(smaller)
    rest = {key for key in known if key != "multiplier"}
    noisier = "multiplier" in known and asked["multiplier"] >= known["multiplier"]
    return noisier and type(larger).__name__ in NOISIER and all(known[key] == asked[key] for key in rest)


NOISIER = ("AllocatedGaussian", "TruncatedGaussian")
"""Other kinds of question whose answer with more noise is a post-processing of the one with less."""


def fits(run: History, slot: History) -> bool:
    """Whether each occasion of a run has an occasion of the slot, of its own, that dominates it."""
    free = as_pairs(slot)
    asked = sorted(as_pairs(run).items(), key=lambda item: -_size(item[0]))
    for question, count in asked:
        for larger in sorted(free, key=_size):
            if count and free[larger] and dominates(larger, question):
                taken = min(count, free[larger])
                free[larger] -= taken
                count -= taken
        if count:
            return False
    return True


def _size(question: Question) -> float:
    """To try the cheapest of a slot's questions first."""
    return float(curves([question])[question][-1])


def for_unit(run: History, own: str, wanted: str, rows_of_a_unit: int | None) -> Counter[Question]:
    """A run's questions as they count for the book's unit.

    A run that protects rows says, in a book of users, what it costs somebody who has up to `rows_of_a_unit` of them: a
    Gaussian's sensitivity is so many times larger. A run that protects users protects each of their rows, too.
    """
    if own == wanted or wanted == "row":
        return Counter(run)
    if rows_of_a_unit is None:
        raise ValueError(
            f"unit={own!r}: this run protects one {own} at a time, and the book protects one {wanted}; train with the "
            f"{wanted}s named, or say how many rows one {wanted} has at most"
        )
    if own != "row":
        raise ValueError(f"unit={own!r}: no theorem turns its price into one for the book's unit, {wanted}")
    return Counter({_grouped(question, rows_of_a_unit): count for question, count in run.items()})


def _grouped(question: Question, rows: int) -> Question:
    """The question as it is for somebody with up to so many rows."""
    if rows == 1:
        return question
    if isinstance(question, Gaussian):
        return Gaussian(question.multiplier / rows)
    if isinstance(question, PureLoss):
        return PureLoss(question.epsilon * rows)
    if isinstance(question, SampledGaussian):
        return GroupedGaussian(question.rate, question.multiplier, rows)
    raise ValueError(
        f"unit='row': no theorem prices {type(question).__name__} for somebody with {rows} rows; train with the users "
        "named, or keep a book of rows"
    )


def to_json(history: Mapping[Question, int]) -> list[list[object]]:
    return [[question.to_json(), count] for question, count in history.items() if count]


_READ: dict[str, Question] = {}


def from_json(rows: Iterable[tuple[dict[str, object], int]]) -> Counter[Question]:
    """Questions and their counts, as a book holds them."""
    found: Counter[Question] = Counter()
    for row, count in rows:
        key = repr(row)
        if key not in _READ:
            _READ[key] = Question.from_json(row)
        found[_READ[key]] += count
    return found
