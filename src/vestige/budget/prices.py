"""What does a run cost in a book? Renyi curves of what it asks, for the book's unit and for its neighbours.

Each run is priced by itself: a strategy of correlated noise spans one run, and occasions of two are not rounded as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.meaning.users import history_of_user
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History, curves, occasions, theorem_for
from vestige.priced_questions import CyclicGaussian, Gaussian, PureLoss, Question, SampledGaussian
from vestige.units import Users

ADJACENCIES = {
    "zero-out": "leaving out one {unit} (zero-out: its place is blank, and the number of rows is public)",
    "replace": "replacing one {unit} by another",
}
"""Which change of the data each kind of book is about, in words; the prices of "zero-out" hold for adding or removing a
{unit}, too."""
WHOLE = (CyclicGaussian,)
"""Questions that are one mechanism over many steps: charged as a whole when the first step is asked."""


def curve_of(question: Question, adjacency: str) -> Array:
    """The Renyi curve of one occasion at `rdp.ORDERS`."""
    if adjacency == "zero-out":
        return curves([question])[question]
    assert adjacency == "replace", adjacency
    return _replacing(question)


@lru_cache(maxsize=4096)
def _replacing(question: Question) -> Array:
    found = theorem_for(question).replacing_curves
    if found is None:
        raise ValueError(
            f"adjacency='replace': no theorem prices {type(question).__name__} where one is replaced by another; use a "
            "book of adjacency zero-out"
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


def for_unit(run: History, users: Users | None, unit: str, rows_per_user: int | None) -> Counter[Question]:
    """A run's questions as they count for the book's unit.

    A run that protects rows says, in a book of users, what it costs a person who has up to `rows_per_user` of them. The
    other way has no price: a user's clipped mean may move by twice its bound when one of the rows is taken away.
    """
    if unit == "row" and users is not None:
        raise ValueError(
            "budget: this run protects users, and the book rows: taking one row from a user is neither adding nor "
            "removing that user; keep a book of users (vestige budget open --unit user)"
        )
    if unit == "row" or users is not None:
        return Counter(run)
    if rows_per_user is None:
        raise ValueError(
            "rows_per_user=None: this run protects rows, and the book users; name the users, or say how many rows one "
            "user has at most"
        )
    found = history_of_user(run, Users(rows_per_user=rows_per_user))
    if found is None:
        kinds = ", ".join(sorted({type(question).__name__ for question in run}))
        raise ValueError(
            f"rows_per_user={rows_per_user}: no theorem prices {kinds} for somebody with several rows; use Poisson "
            "samples, or keep a book of rows"
        )
    return Counter(found)


def with_whole(asked: History, charged: History) -> Counter[Question]:
    """What was asked; of a mechanism over many steps that was begun, all that was charged."""
    found = Counter(asked)
    for question, count in charged.items():
        if isinstance(question, WHOLE):
            found[question] = count
    return found


def repeated(run: History, times: int, beside: History) -> Counter[Question]:
    """A run made several times, beside others. A strategy of correlated noise is another one each time."""
    found: Counter[Question] = Counter()
    for question, count in run.items():
        if isinstance(question, CyclicGaussian):
            others = sum(isinstance(each, CyclicGaussian) for each in beside)
            found.update({replace(question, mechanism=others + turn): count for turn in range(times)})
        else:
            found[question] += times * count
    return found


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
        if type(count) is not int or count < 1:  # one below zero would give back what others spent
            raise ValueError(f"a question was asked {count!r} times, which nobody writes")
        found[_READ[key]] += count
    return found
