"""What is reported when a run ends? Its privacy statement and what its method did: all public or released."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from vestige import accounting
from vestige.accounting.lower_bounds.bounds import one_run_bound
from vestige.engines.planted import Canaries
from vestige.methods.base import Method
from vestige.questions import Question, SampledGaussian
from vestige.records import Audited, Selection, Statement
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


def audited(canaries: Canaries, delta: float) -> Audited:
    """How large epsilon is at least, by the canaries of one run.

    Formal guarantees: with probability 0.95 over coins, samples and noise, `epsilon_lower_bound` is at most the run's
    epsilon at `delta` (Steinke, Nasr & Jagielski 2023). It is computed from releases and made-up rows alone.
    """
    found = one_run_bound(canaries.scores(), canaries.included.numpy(), delta, AUDIT_CONFIDENCE)
    return Audited(
        canaries=found.canaries,
        guesses=found.guesses,
        right=found.right,
        epsilon_lower_bound=found.epsilon,
        confidence=found.confidence,
    )


def meant(promise: accounting.Guarantee) -> dict[str, Any]:
    """What the promise means, as fields of a statement."""
    return {} if promise.meaning is None else asdict(promise.meaning)


def last_diagnostics(record: Record) -> dict[str, Any]:
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
