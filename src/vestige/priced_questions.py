"""What can the curator be asked? A question is a query as its public parameters describe it; `accounting` prices it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import inf
from numbers import Integral
from typing import Any, ClassVar

from vestige.checks import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER, check_number, python_number, require

LARGEST_GROUP = 10_000
"""Rows of one user in a step whose number is followed one by one."""

LARGEST_POPULATION = 10**12
"""Rows that binomial numbers are computed of (`accounting.samplings.binomial`)."""


class BudgetSpent(Exception):
    """The next question would exceed the budget, so it was neither charged nor answered."""


def require_countable(name: str, rows: int) -> None:
    require(name, rows, rows <= LARGEST_POPULATION, f"be at most {LARGEST_POPULATION:g}: more rows are not priced")


@dataclass(frozen=True)
class Question:
    """The public facts of one question that decide its price. Subclasses register under `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Question]]] = {}

    def __init_subclass__(cls) -> None:
        Question.kinds[cls.kind] = cls

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, python_number(getattr(self, each.name))
            object.__setattr__(self, name, value)
            if each.type == "float":
                check_number(name, value, finite=False)
            elif each.type == "str":
                require(name, value, isinstance(value, str), "be text")
            elif each.type == "int" or (each.type == "int | None" and value is not None):
                whole = isinstance(value, Integral) and not isinstance(value, bool)
                require(name, value, whole, "be a whole number")
            if name.endswith("rate") and not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be a probability: the chance that one example is included")
            if name.endswith("multiplier") and not value >= 0:
                raise ValueError(f"{name}={value} must not be negative: it is noise over sensitivity")
            if (
                name.endswith("multiplier")
                and 0 < value < inf
                and not SMALLEST_MULTIPLIER <= value <= LARGEST_MULTIPLIER
            ):
                raise ValueError(
                    f"{name}={value} must lie between {SMALLEST_MULTIPLIER:g} and {LARGEST_MULTIPLIER:g}, or be 0"
                )

    def during(self, attempt: int) -> Question:
        """The question as it counts when it is asked after so many resumptions with fresh noise."""
        return self

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, **vars(self)}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Question:
        """A question as `to_json` wrote it; ValueError where the row is none."""
        kind = row.get("kind") if isinstance(row, dict) else None
        cls = Question.kinds.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise ValueError(f"unknown kind of question {kind!r}; known: {', '.join(Question.kinds)}")
        for each in fields(cls):
            if each.name not in row and each.default is MISSING:
                raise ValueError(f"{each.name!r} is missing")
        return cls(**{each.name: row[each.name] for each in fields(cls) if each.name in row})


@dataclass(frozen=True)
class SampledGaussian(Question):
    """A sum over a Poisson sample, noised: `multiplier` is noise over sensitivity, `rate` the inclusion probability."""

    kind: ClassVar[str] = "sampled-gaussian"
    rate: float
    multiplier: float


@dataclass(frozen=True)
class Gaussian(Question):
    """A noised sum of bounded terms over every example. A whole tree of noised sums is one such question: its
    `multiplier` is the noise of a node over the norm of the vector of nodes that one example affects."""

    kind: ClassVar[str] = "gaussian"
    multiplier: float


@dataclass(frozen=True)
class ExponentialMechanism(Question):
    """A choice among public candidates by a score that every example moves by at most its sensitivity: each candidate
    is drawn with probability proportional to exp(`choice_epsilon` score / (2 sensitivity)). Only the choice is seen."""

    kind: ClassVar[str] = "exponential-mechanism"
    choice_epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.choice_epsilon <= LARGEST_MULTIPLIER:
            raise ValueError(f"choice_epsilon={self.choice_epsilon} must lie between 0 and {LARGEST_MULTIPLIER:g}")


@dataclass(frozen=True)
class CyclicGaussian(Question):
    """One step of noise correlated over `bands` steps. The data are split once into `bands` parts, and step t takes a
    Poisson sample of part t mod bands with inclusion probability `rate`; `multiplier` is noise over the largest column
    norm of the strategy. Where the noise is correlated over more steps than that, `rate` is 1 (no amplification) and
    `multiplier` is noise over the strategy's largest sensitivity per square root of an example's participations.

    A process that resumes a run has neither the past noise nor the parts, which were never written down: it splits the
    data anew and begins the strategy again, as mechanism number `mechanism`. Its steps add up by themselves: no step of
    one mechanism takes the place of a step of another."""

    kind: ClassVar[str] = "cyclic-gaussian"
    rate: float
    multiplier: float
    bands: int
    mechanism: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bands < 1:
            raise ValueError(f"bands={self.bands} must be at least 1; 1 is plain Poisson sampling")
        if self.mechanism < 0:
            raise ValueError(f"mechanism={self.mechanism} must be 0 or more: it counts what was begun before it")

    def during(self, attempt: int) -> CyclicGaussian:
        return replace(self, mechanism=attempt)

    def to_json(self) -> dict[str, object]:
        row = super().to_json()
        return row if self.mechanism else {key: value for key, value in row.items() if key != "mechanism"}


@dataclass(frozen=True)
class AllocatedGaussian(Question):
    """A whole epoch of noised sums: every example is put into one of its `steps`, uniformly and independently of the
    others, and `multiplier` is the noise of each sum over its sensitivity. It is asked when the epoch begins."""

    kind: ClassVar[str] = "allocated-gaussian"
    steps: int
    multiplier: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.steps, int) and self.steps >= 1):
            raise ValueError(f"steps={self.steps} must be a whole number, at least 1: those of an epoch")
        require("steps", self.steps, self.steps <= LARGEST_POPULATION, f"be at most {LARGEST_POPULATION:g} in an epoch")


@dataclass(frozen=True)
class TruncatedGaussian(Question):
    """A noised sum over a Poisson sample of `population` examples at `rate`, of which at most `most` are kept: where
    more have joined, so many of them are chosen uniformly."""

    kind: ClassVar[str] = "truncated-gaussian"
    rate: float
    multiplier: float
    most: int
    population: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("most", "population"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ValueError(f"{name}={getattr(self, name)} must be a whole number, at least 1")
        require_countable("population", self.population)


@dataclass(frozen=True)
class GroupedGaussian(Question):
    """A noised sum over a Poisson sample of rows at `rate`, as it counts for a user who has at most `group` rows, each
    of which is clipped by itself: `multiplier` is noise over one row's bound. With `cap`, at most so many of a user's
    rows are kept in a step, drawn uniformly from those of that user that joined."""

    kind: ClassVar[str] = "grouped-gaussian"
    rate: float
    multiplier: float
    group: int
    cap: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("rows_per_user", self.group), ("cap", self.cap)):
            if not (value is None and name == "cap") and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}={value} must be a whole number, at least 1")
        require_countable("rows_per_user", self.group)
        if self.most > LARGEST_GROUP:
            raise ValueError(
                f"rows_per_user={self.group}: rows of one user are priced up to {LARGEST_GROUP} in a step; bound them, "
                "or give cap, or sample='users'"
            )

    @property
    def most(self) -> int:
        """The most rows of one user in a step."""
        return self.group if self.cap is None else min(self.cap, self.group)

    def to_json(self) -> dict[str, object]:
        row = super().to_json()
        return row if self.cap is not None else {key: value for key, value in row.items() if key != "cap"}


@dataclass(frozen=True)
class Trial(Question):
    """A candidate update and a noisy test of it on a fresh sample; of a rejected one only the rejection is released.

    The candidate is a sampled Gaussian (`rate`, `multiplier`). The test statistic is clipped to a range, noised with
    `validation_multiplier` times its sensitivity, and accepted below `threshold`, counted in halves of the range from
    its middle. `half_range` is half the range over the sensitivity: 1/2 where a mean is clipped, since one example can
    then cross the whole range; more for a sum of clipped terms. `releases` is "y" (an accepted candidate) or "yz" (and
    its noisy statistic).
    """

    kind: ClassVar[str] = "trial"
    rate: float
    multiplier: float
    validation_rate: float
    validation_multiplier: float
    threshold: float
    releases: str = "y"
    half_range: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.releases not in ("y", "yz"):
            raise ValueError(
                f'releases={self.releases!r} must be "y" (the candidate) or "yz" (and its noisy statistic)'
            )
        if not self.half_range >= 0.5:
            raise ValueError(
                f"half_range={self.half_range} must be at least 1/2: no example changes the statistic by more than its "
                "range"
            )
        if self.releases == "yz" and self.half_range != 0.5:
            raise ValueError(
                f'half_range={self.half_range} has no theorem with releases="yz"; release "y" or clip the mean'
            )


@dataclass(frozen=True)
class PureLoss(Question):
    """An answer of a mechanism outside Vestige of which only its `epsilon` is known, with delta 0: Laplace noise, the
    exponential mechanism, a query of another tool."""

    kind: ClassVar[str] = "pure-loss"
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.epsilon < inf:
            raise ValueError(f"epsilon={self.epsilon} must be a number, zero or more: the loss of one answer")


def new_answer() -> str:
    """The name of an answer, drawn when it is asked: another answer to the same question has another one."""
    return secrets.token_hex(8)


ANSWERS = {"statistics": ("answer", "private_statistics"), "users": ("choices", "private_bound")}
"""Facts of a run that come from answers it was given: where they name these, and what was called for them."""


def answers_first(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The facts of a run in the order in which they are compared: others follow from the answers."""
    return sorted(facts.items(), key=lambda fact: fact[0] not in ANSWERS)


def require_same_answers(fact: str, was: Any, now: Any) -> Any:
    """The fact that a run was begun with, to be compared with that of the call that resumes it; ValueError where the
    same was asked anew. Until 0.3 runs did not name the answers that they were given."""
    where, asked = ANSWERS.get(fact, ("", ""))
    if not isinstance(was, Mapping) or not isinstance(now, Mapping) or was.get(where) == now.get(where):
        return was
    if where not in was:
        return {**was, where: now[where]}
    raise ValueError(
        f"resume: the run was begun with another answer of {asked}; keep what that call returned (pickle), and resume "
        "with it. What was asked again has cost its own epsilon besides"
    )
