"""Which guarantee does a run have? An epsilon with its assumptions, or the reasons why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import exp, inf
from types import MappingProxyType

from vestige.accounting.composition import epsilon
from vestige.accounting.meaning.meaning import Meaning, meaning
from vestige.accounting.theorems import History
from vestige.assumptions import ADJACENCY, Stated, lines, stated
from vestige.checks import check_delta
from vestige.priced_questions import (
    AllocatedGaussian,
    CyclicGaussian,
    ExponentialMechanism,
    Gaussian,
    GroupedGaussian,
    Question,
    SampledGaussian,
    Trial,
    TruncatedGaussian,
)
from vestige.units import Users

ARITHMETICS = {
    "lattice": (
        Stated("noise", "checked", "added in integers on a public lattice; its distance from the ideal is in delta"),
        Stated("rounding", "assumed", "noise was made larger by as much, so epsilon covers it"),
    ),
    "float32": (
        Stated("noise", "assumed", "added in floating point: float32 Gaussians stand in for ideal ones"),
        Stated("rounding", "assumed", "nothing is charged for it, since noise was added in floating point"),
    ),
}
"""What follows for the noise from the numbers that it was added in."""
NEGLECTED = Stated("noise", "assumed", "at so large an epsilon its distance of 2^-96 from the ideal is neglected")
SEEDED = Stated("key", "assumed", "the noise was drawn from a known seed: no epsilon is stated")
FILTERED = Stated("fixed_steps", "not needed", "a filter bounds epsilon whatever the answers were")

DISTANCE = 2.0**-96
"""The total variation of a number of lattice noise from the rounded Gaussian, at most (`rounded_gaussian.DISTANCE`)."""
LARGEST_LOSS = 1e-3
"""The share of delta that noise which is not quite ideal may cost."""


@dataclass(frozen=True)
class Facts:
    """What decides whether the questions' price is a guarantee about this run."""

    sampling: str = "poisson"
    """ "poisson", "cyclic-poisson", "allocation", "truncated", "every-example", or what has no theorem here, such as
    "shuffled"."""
    noise: str = "secret"
    """ "secret" or "seeded"."""
    arithmetic: str = "lattice"
    """ "lattice" or "float32": in which numbers noise was added."""
    coordinates: int = 0
    """How many numbers an answer has, at most."""
    examples_independent: bool = True
    """False where one example's gradient depends on another's, as with batch normalisation."""
    schedule: str = "fixed"
    """ "fixed" in advance, "filtered" by a RenyiFilter with `filter_epsilon`, or "data-dependent"."""
    nonprivate_outputs: bool = False
    """Whether anything computed from data without noise was written where the guarantee's reader may see it."""
    filter_epsilon: float | None = None
    users: Users | None = None
    """Whose presence is hidden: all rows of a user; None: one row."""
    selection_delta: float = 0.0
    """Of delta, with what probability a threshold shows a word of one row alone: what was asked has the rest of it."""


@dataclass(frozen=True, repr=False)
class Guarantee:
    """What may be printed about a run: an epsilon with its assumptions, or the reasons why there is none."""

    epsilon: float | None
    delta: float
    accountant: str
    epsilon_rdp: float | None
    reasons: tuple[str, ...] = ()
    assumptions: tuple[Stated, ...] = stated({})
    """The whole closed list: what was checked, what is assumed, what this run had no need of."""
    adjacency: str = ADJACENCY
    epsilon_if_noise_were_secret: float | None = None
    asked: tuple[tuple[Question, int], ...] | None = field(default=None, compare=False, repr=False)
    """What was asked, and how often."""

    @property
    def unit(self) -> str:
        """Whose presence is hidden: "example" or "user"."""
        return "example" if self.adjacency == ADJACENCY else "user"

    def assumption(self, name: str) -> Stated:
        """The status of one assumption of `vestige.assumptions.ASSUMPTIONS`."""
        return next(each for each in self.assumptions if each.name == name)

    @property
    def headline(self) -> str:
        """Epsilon, or why there is none, in one line."""
        if self.epsilon is None:
            return f"no epsilon: {'; '.join(self.reasons)}"
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.accountant}), {self.adjacency}"

    def __str__(self) -> str:
        """Epsilon, or why there is none, and every assumption."""
        return "\n".join((self.headline, *lines(self.listed)))

    def __repr__(self) -> str:
        counts = Counter(each.status for each in self.assumptions)
        found = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"<Guarantee: {self.headline}; assumptions: {found}>"

    def _repr_html_(self) -> str:
        """As notebooks show it: the headline, and a table of the assumptions."""
        rows = "".join(
            f"<tr><td>{escape(each.name)}</td><td>{escape(each.status)}</td>"
            f"<td style='text-align:left'>{escape(each.sentence)}{escape(f' ({each.detail})' if each.detail else '')}"
            "</td></tr>"
            for each in self.assumptions
        )
        return f"<p><b>{escape(self.headline)}</b></p><table>{rows}</table>"

    @property
    def listed(self) -> tuple[dict[str, object], ...]:
        """The assumptions as JSON writes them."""
        return tuple(each.to_json() for each in self.assumptions)

    @cached_property
    def meaning(self) -> Meaning | None:
        """What the epsilon means for an attacker; None where there is none. Computed when first read."""
        if self.epsilon is None or self.asked is None:
            return None
        by_filter = self.epsilon if self.accountant == "renyi filter" else None
        return meaning(dict(self.asked), self.delta, filtered=by_filter)


SAMPLING: dict[str, tuple[type[Question], ...]] = {
    "poisson": (SampledGaussian, GroupedGaussian, Trial, Gaussian, ExponentialMechanism),
    "cyclic-poisson": (CyclicGaussian, Gaussian, ExponentialMechanism),
    "every-example": (Gaussian, ExponentialMechanism),
    "allocation": (AllocatedGaussian, Gaussian, ExponentialMechanism),
    "truncated": (TruncatedGaussian, Gaussian, ExponentialMechanism),
}
"""Which questions a way of sampling answers as their theorems suppose."""


def guarantee(
    history: History, delta: float, facts: Facts, recorded: Mapping[str, Stated] = MappingProxyType({})
) -> Guarantee:
    """The guarantee of a run that asked `history` under `facts`. Without a theorem there is no epsilon.

    `recorded` is what its ledger says about assumptions; those that it does not name count as assumed.

    Formal guarantees: where `epsilon` is a number, the run is (epsilon, delta)-differentially private under the listed
    assumptions; for a filtered run it is the filter's, whatever was spent.
    """
    check_delta(delta)
    if facts.arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic={facts.arithmetic!r} is unknown; choose from {', '.join(ARITHMETICS)}")
    reasons = (*_reasons_but_noise(history, delta, facts), *_reasons_of_noise(facts))
    if _reasons_but_noise(history, delta, facts):
        return Guarantee(None, delta, "none", None, reasons, _assumptions(facts, recorded, neglected=False))
    left = delta - facts.selection_delta
    by_renyi = epsilon(history, left, "rdp")
    filtered = facts.schedule == "filtered"
    lost = _lost(by_renyi, history, facts)
    neglected = lost > LARGEST_LOSS * left
    spent = facts.filter_epsilon if filtered else epsilon(history, left if neglected else left - lost)
    broken: tuple[str, ...] = ()
    if spent is not None and by_renyi < inf and filtered and by_renyi > spent:
        broken = (f"the questions cost {by_renyi:.4g}, so no filter of epsilon {spent:.4g} allowed them",)
    if by_renyi == inf:
        broken = (*broken, "a question was answered without noise, so no epsilon is finite")
    reasons = (*reasons, *broken)
    # What a filtered run happened to spend depends on the data: only the filter's own epsilon is proved, by Renyi.
    proved = spent if filtered and not broken else by_renyi
    assumptions = _assumptions(facts, recorded, neglected)
    accountant = "renyi filter" if filtered else "pld"
    asked = None if facts.selection_delta else tuple(history.items())
    result = Guarantee(spent, delta, accountant, proved, reasons, assumptions, asked=asked)
    if facts.users is not None:
        result = replace(result, adjacency=facts.users.adjacency)
        if facts.users.choice_epsilon:
            result = _with_choice(result, facts.users.choice_epsilon)
            spent = result.epsilon
    if not reasons:
        return result
    return replace(result, epsilon=None, epsilon_if_noise_were_secret=None if broken else spent)


def _with_choice(alone: Guarantee, chosen: float) -> Guarantee:
    """With the question by which the bound on a user's rows was chosen. What was asked afterwards follows from its
    answer, so the epsilons are added: given any answer the rest is (epsilon, delta)-private, and no answer is more than
    e^chosen times as likely without the user."""
    assert alone.epsilon is not None
    assert alone.epsilon_rdp is not None
    accountant = f"{alone.accountant}, and {chosen:g} for the choice of the bound"
    both, by_renyi = alone.epsilon + chosen, alone.epsilon_rdp + chosen
    return replace(alone, epsilon=both, epsilon_rdp=by_renyi, accountant=accountant, asked=None)


def _assumptions(facts: Facts, recorded: Mapping[str, Stated], neglected: bool) -> tuple[Stated, ...]:
    """The closed list: what was recorded, and what follows from the facts and the price."""
    held = ((NEGLECTED, neglected), (SEEDED, facts.noise != "secret"), (FILTERED, facts.schedule == "filtered"))
    if facts.users is not None:
        recorded = {**recorded, "unit": Stated("unit", "assumed", facts.users.assumption, True)}
    return stated(recorded, (*ARITHMETICS[facts.arithmetic], *(each for each, holds in held if holds)))


def _lost(spent: float, history: History, facts: Facts) -> float:
    """What delta loses to noise that is drawn to within `DISTANCE` of the ideal: (1 + e^epsilon) times that distance,
    over all numbers of all answers; a question may have two."""
    if facts.arithmetic != "lattice":
        return 0.0
    answers = sum(count * getattr(question, "steps", 1) for question, count in history.items())
    numbers = 2 * answers * facts.coordinates
    return (1 + exp(min(spent, 500.0))) * DISTANCE * numbers


def reasons_against(history: History, facts: Facts) -> tuple[str, ...]:
    """Why no epsilon holds for such questions under these facts; nothing where one does."""
    return (*_reasons_but_noise(history, 1.0, facts), *_reasons_of_noise(facts))


def _reasons_of_noise(facts: Facts) -> tuple[str, ...]:
    if facts.noise == "secret":
        return ()
    if facts.noise == "seeded":
        return ("the noise was drawn from a known seed, so anyone who has the seed can subtract it",)
    return (f"noise={facts.noise!r} is neither secret nor seeded, and nothing is proved about it",)


def _reasons_of_users(history: History, facts: Facts) -> list[str]:
    """Where rows are sampled, a question must have been charged as it counts for a user with several of them; where no
    users are named, nothing is known of a question about several rows."""
    users = facts.users
    if users is None:
        grouped = any(isinstance(question, GroupedGaussian) for question in history)
        return ["rows were charged as those of users, but no users are named"] if grouped else []
    if users.sample == "users" or users.rows_per_user == 1:
        return []
    for question in history:
        fits = isinstance(question, GroupedGaussian) and (question.group, question.cap) == (
            users.rows_per_user,
            users.cap,
        )
        if not (fits or isinstance(question, Gaussian | ExponentialMechanism)):
            return [f"{type(question).__name__} questions were not charged for users with {users.rows_per_user} rows"]
    return []


def _reasons_but_noise(history: History, delta: float, facts: Facts) -> tuple[str, ...]:
    reasons = []
    if facts.selection_delta and not facts.selection_delta < delta:
        reasons.append(f"words were shown by thresholds, which alone cost a delta of {facts.selection_delta:g}")
    if facts.sampling not in SAMPLING:
        reasons.append(
            f"batches were drawn by {facts.sampling} sampling, for which the Poisson price is not an upper bound"
        )
    else:
        for kind in dict.fromkeys(type(question) for question, count in history.items() if count):
            if not issubclass(kind, SAMPLING[facts.sampling]):
                reasons.append(f"no theorem prices {kind.__name__} questions under {facts.sampling} sampling")
    reasons += _reasons_of_users(history, facts)
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
