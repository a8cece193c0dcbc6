"""May one more run be admitted? A Renyi filter with weights fixed at the start, or slots fixed at the start.

A filter that composes loss distributions along an adaptive path is no filter: what is asked may follow from earlier
answers, and then the composed distribution is not the one that holds (docs/budget.md). Renyi sums are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, log
from typing import Any

import numpy as np

from vestige import accounting
from vestige.accounting import rdp
from vestige.accounting.meaning.replacing import replacing
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History
from vestige.budget import prices
from vestige.checks import check_number, check_share_of_delta, check_steps, require, require_line
from vestige.priced_questions import Gaussian, PureLoss, Question, SampledGaussian

NEARLY = 0.96
"""Without a plan, the lowest order is favoured at which nearly as many Gaussian questions fit as at any: sampled ones,
whose price explodes at high orders, lose little there."""
WEIGHT = 0.9
"""The share of delta for the favoured order."""


@dataclass(frozen=True)
class Weights:
    """How delta is divided among orders: fixed before the first answer, and part of the book."""

    orders: tuple[float, ...]
    weights: tuple[float, ...]
    favoured: float

    @staticmethod
    def choose(
        epsilon: float, delta: float, planned: History | None, adjacency: str, weight: float = WEIGHT
    ) -> Weights:
        """`weight` for the order at which most copies of the plan fit, the rest spread evenly."""
        check_number("weight", weight)
        require("weight", weight, 0 < weight < 1, "lie between 0 and 1: the share of delta for the favoured order")
        budgets = epsilon - rdp.CONVERSION + log(delta) / (rdp.ORDERS - 1)
        curve = rdp.ORDERS if planned is None else prices.total([planned], adjacency)
        with np.errstate(divide="ignore", invalid="ignore"):
            copies = np.nan_to_num(budgets / curve, nan=-inf, posinf=inf)
        if not np.isfinite(curve).any():
            raise ValueError("expect: no epsilon holds for such a run; give it noise")
        if not np.isfinite(copies.max()):
            raise ValueError("expect: such a run costs nothing; give its sample rate, noise multiplier and steps")
        chosen = int(np.argmax(copies >= (1.0 if planned is not None else NEARLY) * copies.max()))
        weights = np.full(len(rdp.ORDERS), (1 - weight) / (len(rdp.ORDERS) - 1))
        weights[chosen] = weight
        return Weights(tuple(rdp.ORDERS.tolist()), tuple(weights.tolist()), float(rdp.ORDERS[chosen]))

    def to_json(self) -> dict[str, object]:
        return {"orders": list(self.orders), "weights": list(self.weights), "favoured": self.favoured}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Weights:
        found = Weights(tuple(row["orders"]), tuple(row["weights"]), row["favoured"])
        if len(found.orders) != len(found.weights) or not set(found.orders) <= set(rdp.ORDERS.tolist()):
            raise ValueError("the book weights orders that this version does not compute: use the one that opened it")
        if not 0 < sum(found.weights) <= 1 + 1e-9 or min(found.weights) < 0:
            raise ValueError("the book's weights do not add up to one")
        return found


class RenyiFilter:
    """Admits questions while, at some order, their Renyi divergence stays within that order's budget.

    The budget of order a is epsilon - log((a-1)/a) + (log(weight_a delta) + log a) / (a-1).

    Formal guarantees: everything that was admitted is (epsilon, delta)-private together, whatever depended on earlier
    answers: which questions were asked, by whom, in which order, at the same time or not, and when it ended
    (docs/theorems.md 5; interleaved mechanisms: Lyu 2022, Haney et al. 2023).
    """

    def __init__(self, weights: Weights, epsilon: float, delta: float) -> None:
        places = {order: place for place, order in enumerate(rdp.ORDERS.tolist())}
        self._places = [places[order] for order in weights.orders]
        orders = np.array(weights.orders)
        with np.errstate(divide="ignore"):
            self._prices = rdp.CONVERSION[self._places] - (np.log(weights.weights) + log(delta)) / (orders - 1)
        self.epsilon = epsilon

    def admits(self, curve: Array) -> bool:
        return self.reading(curve) <= self.epsilon

    def highest(self, curves: Sequence[Array], more: Array | float = 0.0) -> float:
        """The reading of the part of the rows that reads highest, with `more` asked about each of them."""
        return max(self.reading(curve + more) for curve in curves)

    def reading(self, curve: Array) -> float:
        """The epsilon of the smallest filter with these weights that would have admitted so much. It depends on the
        answers, so it is no guarantee: that is the filter's own epsilon."""
        if not curve.any():
            return 0.0
        return max(0.0, float(np.min(curve[self._places] + self._prices)))


@dataclass(frozen=True)
class Slot:
    """A run that may be made once, whatever else happens: all that it may ask, fixed when the book is opened."""

    name: str
    asks: Counter[Question]
    delta: float = 0.0
    """Of a mechanism outside Vestige: its own delta."""

    def __post_init__(self) -> None:
        require_line("slots: name", self.name)
        check_share_of_delta(f"slots: delta of {self.name!r}", self.delta)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "asks": prices.to_json(self.asks), **({"delta": self.delta} if self.delta else {})}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Slot:
        return Slot(row["name"], prices.from_json(row["asks"]), row.get("delta", 0.0))


def slots_of(content: object) -> list[Slot]:
    """The slots that a user's file names: each a run by sample_rate, noise_multiplier and steps, by questions, or by
    the epsilon and delta of a mechanism outside Vestige; `times` repeats it."""
    if not isinstance(content, list) or not content:
        raise ValueError('slots: the file must hold a list of slots, [{"name": "nightly", "sample_rate": 0.01, ...}]')
    found: list[Slot] = []
    for number, row in enumerate(content, 1):
        if not isinstance(row, dict):
            raise ValueError(f"slots: number {number} is not an object with named fields")
        row = dict(row)
        name, times = row.pop("name", f"slot {number}"), row.pop("times", 1)
        check_steps(times, f"slots: times of {name!r}")
        try:
            asks, delta = _asks(row)
        except ValueError as error:
            raise ValueError(f"slots: {name!r}: {error}") from error
        found += [Slot(name if times == 1 else f"{name} {turn}", asks, delta) for turn in range(1, times + 1)]
    if len({slot.name for slot in found}) != len(found):
        raise ValueError("slots: two have the same name; give each its own")
    return found


def _asks(row: dict[str, Any]) -> tuple[Counter[Question], float]:
    if set(row) == {"sample_rate", "noise_multiplier", "steps"}:
        check_steps(row["steps"])
        return Counter({SampledGaussian(row["sample_rate"], row["noise_multiplier"]): row["steps"]}), 0.0
    if set(row) in ({"epsilon"}, {"epsilon", "delta"}):
        return Counter({PureLoss(row["epsilon"]): 1}), row.get("delta", 0.0)
    if set(row) == {"questions"} and isinstance(row["questions"], list):
        asks: Counter[Question] = Counter()
        for each in row["questions"]:
            question, count = Question.from_json(each), each.get("count", 1)
            if inf in vars(question).values():
                raise ValueError(f"{question!r} must have finite numbers: with infinite noise nothing is asked")
            check_steps(count, "count")
            asks[question] += count
        return asks, 0.0
    raise ValueError(
        f"it has {', '.join(sorted(row)) or 'nothing'}; give sample_rate, noise_multiplier and steps, or "
        "questions, or epsilon and delta"
    )


@dataclass
class SlotPlan:
    """Slots composed by their loss distributions.

    Formal guarantees: every choice of which slot is used when, by what was answered so far, is (epsilon, delta)-private
    in all. Proof by induction over the set of unused slots: the first choice is made before its answer, for every
    answer the rest is dominated by the product of the other slots, and dominating pairs compose adaptively (Zhu, Dong &
    Wang 2022; interleaved: Vadhan & Zhang 2023). What is not used is never asked: post-processing of its answer.
    """

    slots: Sequence[Slot]
    delta: float
    adjacency: str
    used: set[int] = field(default_factory=set)

    def epsilon(self) -> float:
        return self.epsilon_of(range(len(self.slots)))

    def epsilon_of(self, places: Iterable[int]) -> float:
        chosen = [self.slots[place] for place in sorted(places)]
        left = self.delta - sum(slot.delta for slot in chosen)
        if left <= 0:
            return inf
        pairs: Counter[Question] = Counter()
        for slot in chosen:
            pairs.update(prices.as_pairs(slot.asks))
        return _composed(tuple(sorted(pairs.items(), key=repr)), left, self.adjacency)

    def smallest_fitting(self, run: History, delta: float, name: str | None) -> int | None:
        """The cheapest unused slot that a run fits; by name, that one."""
        fitting = [
            place
            for place, slot in enumerate(self.slots)
            if place not in self.used
            and (name is None or slot.name == name)
            and delta <= slot.delta
            and prices.fits(run, slot.asks)
        ]
        return min(fitting, key=lambda place: (self.epsilon_of([place]), place), default=None)


@lru_cache(maxsize=256)
def _composed(pairs: tuple[tuple[Question, int], ...], delta: float, adjacency: str) -> float:
    history = dict(pairs)
    if not history:
        return 0.0
    found = accounting.epsilon(history, delta)
    if adjacency == "replace":
        replaced, _ = replacing(history, delta, found)
        return inf if replaced is None else replaced
    return found


def usual(sample_rate: float, noise_multiplier: float, steps: int) -> Counter[Question]:
    """A run of noised gradients, as a plan."""
    check_steps(steps)
    if sample_rate == 1:
        return Counter({Gaussian(noise_multiplier): steps})
    return Counter({SampledGaussian(sample_rate, noise_multiplier): steps})
