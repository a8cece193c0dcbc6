"""What may be said about a run? An epsilon with its assumptions, or the reasons why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, inf

from vestige.accounting.composition import epsilon
from vestige.accounting.meaning.meaning import Meaning, meaning
from vestige.accounting.theorems import History
from vestige.checks import check_delta
from vestige.questions import (
    AllocatedGaussian,
    CyclicGaussian,
    Gaussian,
    GroupedGaussian,
    Question,
    SampledGaussian,
    Trial,
    TruncatedGaussian,
)
from vestige.units import Users

ADJACENCY = "add/remove one example"

ARITHMETICS = {
    "lattice": "rounding in float32 moves a sum by less than 1/1024 of an example's bound, which is charged",
    "float32": "the noise is ideal: floating-point Gaussians, added in floating point, stand in for real ones",
}
"""What is assumed of noise that is added in integers, and of noise that is not."""

ONE_ROW = "one example is one row; a person with several rows is protected less"
"""Not said where users are named."""

ASSUMPTIONS = (
    ARITHMETICS["lattice"],
    "the random numbers are secret and not used twice",
    "the expected batch size and the size of the dataset are public",
    "hyper-parameters are public, or the search for them was priced separately (tuned_epsilon)",
    "the number of steps did not depend on the answers beyond the plan that is priced",
    ONE_ROW,
)


OPAQUE_LOSS = (
    "the loss of a batch is the mean (or the sum, as was said) of its examples' losses, each computed from that "
    "example's outputs alone, with a divisor that no example decides"
)


PADDED = (
    "an example's loss does not depend on how far its batch was padded: what lies behind its own end is masked in the "
    "model, and ignored in the loss"
)
ROWS_APART = (
    "every process reads the same rows in the same order: where they are read one by one, some drawn at random were "
    "compared, and not all"
)
NEGLECTED = "at so large an epsilon, that the noise is drawn to within 2^-96 of the ideal one is neglected"

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
    opaque_loss: bool = False
    """Whether a loss of a user's own loop was met whose divisor could not be recognised."""
    padded: bool = False
    """Whether examples were padded to the longest of their batch, in a user's own loop."""
    rows_apart: bool = False
    """Whether several processes each read their rows one by one."""
    users: Users | None = None
    """Whose presence is hidden: all rows of a user; None: one row."""


@dataclass(frozen=True)
class Guarantee:
    """What may be printed about a run: an epsilon with its assumptions, or the reasons why there is none."""

    epsilon: float | None
    delta: float
    accountant: str
    epsilon_rdp: float | None
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ASSUMPTIONS
    adjacency: str = ADJACENCY
    epsilon_if_noise_were_secret: float | None = None
    asked: tuple[tuple[Question, int], ...] | None = field(default=None, compare=False, repr=False)
    """What was asked, and how often."""

    @property
    def unit(self) -> str:
        """Whose presence is hidden: "example" or "user"."""
        return "example" if self.adjacency == ADJACENCY else "user"

    @cached_property
    def meaning(self) -> Meaning | None:
        """What the epsilon means for an attacker; None where there is none. Computed when first read."""
        if self.epsilon is None or self.asked is None:
            return None
        by_filter = self.epsilon if self.accountant == "renyi filter" else None
        return meaning(dict(self.asked), self.delta, filtered=by_filter)


SAMPLING: dict[str, tuple[type[Question], ...]] = {
    "poisson": (SampledGaussian, Gaussian, GroupedGaussian, Trial),
    "cyclic-poisson": (CyclicGaussian, Gaussian),
    "every-example": (Gaussian,),
    "allocation": (AllocatedGaussian, Gaussian),
    "truncated": (TruncatedGaussian, Gaussian),
}
"""Which questions a way of sampling answers as their theorems suppose."""


def guarantee(history: History, delta: float, facts: Facts) -> Guarantee:
    """What may be said about a run that asked `history` under `facts`. Without a theorem there is no epsilon.

    Formal guarantees: where `epsilon` is a number, the run is (epsilon, delta)-differentially private under the listed
    assumptions; for a filtered run it is the filter's, whatever was spent.
    """
    check_delta(delta)
    if facts.arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic={facts.arithmetic!r} is unknown; choose from {', '.join(ARITHMETICS)}")
    reasons = (*_reasons_but_noise(history, facts), *_reasons_of_noise(facts))
    if _reasons_but_noise(history, facts):
        return Guarantee(None, delta, "none", None, reasons)
    by_renyi = epsilon(history, delta, "rdp")
    filtered = facts.schedule == "filtered"
    lost = _lost(by_renyi, history, facts)
    neglected = lost > LARGEST_LOSS * delta
    spent = facts.filter_epsilon if filtered else epsilon(history, delta if neglected else delta - lost)
    broken: tuple[str, ...] = ()
    if spent is not None and by_renyi < inf and filtered and by_renyi > spent:
        broken = (f"the questions cost {by_renyi:.4g}, so no filter of epsilon {spent:.4g} allowed them",)
    if by_renyi == inf:
        broken = (*broken, "a question was answered without noise, so no epsilon is finite")
    reasons = (*reasons, *broken)
    # What a filtered run happened to spend depends on the data: only the filter's own epsilon is proved, by Renyi.
    proved = spent if filtered and not broken else by_renyi
    held = (
        (OPAQUE_LOSS, facts.opaque_loss),
        (PADDED, facts.padded),
        (ROWS_APART, facts.rows_apart),
        (NEGLECTED, neglected),
    )
    further = [text for text, holds in held if holds]
    whose = ONE_ROW if facts.users is None else facts.users.assumption
    assumptions = (ARITHMETICS[facts.arithmetic], *ASSUMPTIONS[1:-1], whose, *further)
    accountant = "renyi filter" if filtered else "pld"
    result = Guarantee(spent, delta, accountant, proved, reasons, assumptions, asked=tuple(history.items()))
    if facts.users is not None:
        result = replace(result, adjacency=facts.users.adjacency)
    if not reasons:
        return result
    return replace(result, epsilon=None, epsilon_if_noise_were_secret=None if broken else spent)


def _lost(spent: float, history: History, facts: Facts) -> float:
    """What delta loses to noise that is drawn to within `DISTANCE` of the ideal: (1 + e^epsilon) times that distance,
    over all numbers of all answers; a question may have two."""
    if facts.arithmetic != "lattice":
        return 0.0
    answers = sum(count * getattr(question, "steps", 1) for question, count in history.items())
    numbers = 2 * answers * facts.coordinates
    return (1 + exp(min(spent, 500.0))) * DISTANCE * numbers


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
        if not (fits or isinstance(question, Gaussian)):
            return [f"{type(question).__name__} questions were not charged for users with {users.rows_per_user} rows"]
    return []


def _reasons_but_noise(history: History, facts: Facts) -> tuple[str, ...]:
    reasons = []
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
