"""What is reported when a run ends? Its privacy statement and what its method did: all public or released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import exp, log
from typing import Any

from vestige import accounting
from vestige.accounting.lower_bounds.bounds_from_scores import one_run_bound
from vestige.assumptions import IN_ONE_THREAD, Stated
from vestige.engines.audit_canaries import Canaries
from vestige.methods.base import Method
from vestige.priced_questions import Question, SampledGaussian
from vestige.run_records import Audited, Selection, Statement
from vestige.training.loop import Record
from vestige.training.planning import Plan


def statement(
    promise: accounting.Guarantee, plan: Plan, *, expected_batch: float, groups: int, asked: int
) -> Statement:
    """The guarantee and the public facts it rests on, for a run alone or in a stack."""
    return Statement(
        epsilon=promise.epsilon,
        delta=promise.delta,
        accountant=promise.accountant,
        epsilon_rdp=promise.epsilon_rdp if promise.epsilon is not None else None,
        budget=plan.epsilon,
        noise_multiplier=plan.noise_multiplier,
        sample_rate=plan.sample_rate,
        expected_batch=expected_batch,
        groups=groups,
        lr=plan.lr,
        lr_reason=plan.lr_reason,
        asked=asked,
        adjacency=promise.adjacency,
        reasons=promise.reasons,
        epsilon_if_noise_were_secret=promise.epsilon_if_noise_were_secret,
        **meant(promise),
    )


AUDIT_CONFIDENCE = 0.95
OVERSAMPLED = 1e-4
"""Canaries that are drawn so often with less than this probability contradict the priced rate: many draws are seen."""
PLANTED = (
    "nobody's row was changed, left out or counted twice for it; about half of the canaries were in the sums as "
    "made-up rows, and the public divisor counts them all"
)
"""What planting changes for the people in the data."""


def audited(canaries: Canaries, delta: float) -> Audited:
    """How large epsilon is at least, by the canaries of one run: the better of the bounds by two scores.

    Formal guarantees: with probability 0.95 over coins, samples and noise, `epsilon_lower_bound` is at most the run's
    epsilon at `delta` (Steinke, Nasr & Jagielski 2023, each score with half the error). It is computed from releases
    and made-up rows alone.
    """
    scores, each = canaries.scores(), 1 - (1 - AUDIT_CONFIDENCE) / 2
    bounds = [one_run_bound(score, canaries.included.numpy(), delta, each) for score in scores]
    found = max(bounds, key=lambda bound: bound.epsilon)
    return Audited(
        canaries=found.canaries,
        guesses=found.guesses,
        right=found.right,
        epsilon_lower_bound=found.epsilon,
        confidence=AUDIT_CONFIDENCE,
    )


@dataclass(frozen=True)
class Joined:
    """How often canaries were drawn in a loop, beside the rate that was priced. They are made up: it may be shown."""

    joined: int
    chances: int
    """Draws times canaries, there or not."""
    rate: float

    @property
    def p_value(self) -> float:
        """How likely so many are, at most, if each draw takes each canary with the priced rate or less.

        Formal guarantees: Chernoff's bound, which holds for independent draws, for one place in each epoch (less spread
        at the same mean) and where samples are cut to a size (fewer of an independent draw).
        """
        share = self.joined / self.chances if self.chances else 0.0
        if share <= self.rate:
            return 1.0
        rest = (1 - share) * log((1 - share) / (1 - self.rate)) if share < 1 else 0.0
        return exp(-self.chances * (share * log(share / self.rate) + rest))


@dataclass(frozen=True)
class OneRun:
    """The audit of a finished run, and its guarantee."""

    run: str
    method: str
    audited: Audited
    epsilon: float | None
    """The accountant's; None where no epsilon holds."""
    delta: float
    assumptions: tuple[Mapping[str, object], ...] = ()
    joined: Joined | None = None
    """Of a loop."""

    @property
    def oversampled(self) -> bool:
        """Whether canaries were drawn more often than was priced."""
        return self.joined is not None and self.joined.p_value < OVERSAMPLED

    @property
    def contradicts(self) -> bool:
        """Two tests: of epsilon, wrong with probability 1 - confidence at most, and of the rate at which rows join,
        wrong with probability `OVERSAMPLED` at most."""
        found = self.epsilon is not None and self.audited.epsilon_lower_bound > self.epsilon
        return found or (self.epsilon is not None and self.oversampled)

    def to_json(self) -> dict[str, object]:
        facts = {"run": self.run, "method": self.method, "epsilon": self.epsilon, "delta": self.delta}
        drawn = {} if self.joined is None else {"drawn": {**asdict(self.joined), "p_value": self.joined.p_value}}
        listed = list(self.assumptions)
        return {**facts, **asdict(self.audited), **drawn, "contradicts": self.contradicts, "assumptions": listed}

    def lines(self) -> list[str]:
        found = self.audited
        most = "no epsilon holds for it" if self.epsilon is None else f"at most {self.epsilon:.4g} (accountant)"
        lines = [
            f"{self.run}: {self.method}, {found.canaries} canaries, each there by a coin; {found.right} of "
            f"{found.guesses} guesses were right",
            f"epsilon is at least {found.epsilon_lower_bound:.3g} ({found.confidence:.0%} confidence) and {most} at "
            f"delta {self.delta:g}",
        ]
        if self.joined is not None and self.joined.chances:
            share = self.joined.joined / self.joined.chances
            lines.append(f"canaries joined {share:.4g} of the draws, where {self.joined.rate:.4g} was priced")
        lines.append(PLANTED)
        if self.contradicts:
            why = "rows are drawn more often than was priced: " if self.oversampled else ""
            wrong = OVERSAMPLED if self.oversampled else 1 - found.confidence
            chance = f"or this is one of the {wrong:.2g} of runs in which the test fails"
            lines.append(f"CONTRADICTION: {why}the accountant's epsilon is wrong for this run, {chance}")
        return lines


ALIKE = (
    "every operator is followed; rows of one shape are computed together, and how many they are, or how many such "
    "groups there are, decides nothing in the model"
)


def known_of_a_run(
    facts: accounting.Facts, processes: int = 1, read_one_by_one: bool = False, collates: bool = False
) -> list[Stated]:
    """What `vestige.train` checks by its construction, and what it assumes, of the assumptions of every guarantee."""
    found = [
        Stated("unit", "assumed", "a row is a unit of its own"),
        Stated("adjacency", "checked", "a blank row keeps its place in the samples; the number of rows is public"),
        Stated("rows_apart", "checked", f"every operator of every pass is followed{IN_ONE_THREAD}"),
        Stated("loss_per_example", "checked", "the loss is taken of one example at a time"),
        Stated("padding", "checked", "every example is collated and padded by itself"),
        Stated("divisor", "checked", "sums are divided by the sampling rate times the number of rows"),
        Stated("processes", "not needed", "one process"),
    ]
    if read_one_by_one:
        found[2] = Stated("rows_apart", "assumed", ALIKE)
    if collates:
        found[4] = Stated("padding", "assumed", "a collate_fn of your own keeps nothing of one example for the next")
    if facts.users is not None:
        found[0] = Stated("unit", "assumed", facts.users.assumption)
        found[1] = Stated("adjacency", "checked", "blank rows keep their places; who owns which row is public")
        if facts.users.sample == "users":
            found[5] = Stated("divisor", "checked", "sums are divided by the sampling rate times the number of users")
    if facts.sampling != "shuffled":
        found.append(Stated("sampling", "checked", f"{facts.sampling}, drawn here from the secret key"))
    if facts.noise == "secret":
        found.append(Stated("key", "checked", "drawn from the operating system for this run, and never written"))
    if processes > 1:
        how = "all rows were compared"
        if read_one_by_one:
            how = "rows are read one by one: some drawn at random were compared, and not all"
        found[6] = Stated("processes", "assumed" if read_one_by_one else "checked", how)
    return found


def meant(promise: accounting.Guarantee) -> dict[str, Any]:
    """What the promise means, as fields of a statement."""
    return {} if promise.meaning is None else asdict(promise.meaning)


def last_diagnostics(record: Record) -> dict[str, object]:
    return {key: value for key, value in record.to_json().items() if key in record.diagnostics}


def selection(method: Method, counts: dict[str, Any], plan: Plan) -> Selection | None:
    """What a selective method did, by its gate's counts, and what its paper would claim for it; None for the others."""
    test = method.gate.tests
    if test is None or test.rate is None:
        return None
    claimed: Counter[Question] = Counter()
    for gradient, loss, count in counts["updates"]:  # two noise multipliers, and how many updates had them
        claimed[SampledGaussian(plan.sample_rate, gradient)] += count
        claimed[SampledGaussian(test.rate, loss)] += count
    return Selection(
        trials=counts["accepted"] + counts["rejected"],
        accepted=counts["accepted"],
        rejected=counts["rejected"],
        updates=sum(count for *_, count in counts["updates"]),
        degraded=counts["degraded"],
        accounting=test.accounting,
        published_claim_epsilon=accounting.epsilon(claimed, plan.delta, "rdp"),
    )
