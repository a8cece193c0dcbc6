"""Can a comparison's epsilons be believed? Each is recomputed from its charges, which are checked against its run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from vestige.accounting import Guarantee, History, epsilon, within
from vestige.checks import accounted_multiplier
from vestige.compare.folder import ComparisonFolder
from vestige.mechanism.groups import PerGroup
from vestige.methods.base import Method
from vestige.methods.registry import as_given, make_method
from vestige.priced_questions import Question
from vestige.randomness.sampling import Sampling
from vestige.run_records import CompletedRun, PrivacyTarget, completed
from vestige.training.planning import Request, questions, sampling_of, settled
from vestige.training.verify import reprice

LEAST_SPENT = 0.99
"""Noise is fitted to a budget to 0.1%: a run that costs less than this share of it had other noise."""
EARLIER_DEFAULTS = {"dp-bandmf": {"bands": 4}}
"""Defaults until 0.3: a record stores the options that its run was given, and no others."""


@dataclass(frozen=True)
class ComparisonVerdict:
    """How many records were verified, and what is wrong with each of the others."""

    verified: int
    failed_runs: int
    """Runs that ended in an error; no model of theirs was kept."""
    wrong: dict[str, str]
    largest_epsilon: float | None
    """Of one run, released alone."""

    def to_json(self) -> dict[str, object]:
        return {
            "verified": not self.wrong,
            "runs": self.verified,
            "failed_runs": self.failed_runs,
            "wrong": self.wrong,
            "largest_epsilon": self.largest_epsilon,
        }


def verify_comparison(path: str | Path) -> ComparisonVerdict:
    """Recompute the epsilon of every record from its charges, and check both against the run that it describes.

    Formal guarantees: a verified record is named by the hash of its run. It states the epsilon, within the run's
    budget, of the questions that the run asks with its noise, and that noise follows from the budget. A run that
    stopped early lists the steps it made, and the next would have exceeded its budget; under a filter the questions
    follow from answers, and its epsilon bounds them whatever they were. Not verified are the number of examples and
    that nothing else was asked: a record is not hash-chained as a ledger is.
    """
    folder = ComparisonFolder(path)
    folder.specification()
    records = folder.records()
    done = completed(records.values())
    faults = {record.id: _fault(record) for record in done}
    wrong = {**folder.unreadable, **{name: fault for name, fault in faults.items() if fault is not None}}
    stated = [record.statement.epsilon for record in done if faults[record.id] is None]
    spent = [each for each in stated if each is not None]
    return ComparisonVerdict(len(stated), len(records) - len(done), wrong, max(spent, default=None))


def _fault(record: CompletedRun) -> str | None:
    """What is wrong with a record, or None."""
    try:
        run, terms, stated = record.run, record.terms, record.statement
        asked = sum(row["count"] for row in record.charged)
        if asked != stated.asked:
            return f"says that {stated.asked} questions were asked, and lists {asked}"
        if (terms.noise == "seeded") != run.reproducible:
            return f"says that its noise was {terms.noise}, which is not so of the run that it describes"
        cost = _cost(json.dumps(record.charged), run.delta, json.dumps(terms.to_json()))
        wrong = _misstated(record, cost) or _excess(run.budget, cost.epsilon) or _contradiction(record, cost)
        return wrong or _understated(record, cost)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        return f"cannot be priced: {type(error).__name__}: {error}"


def _misstated(record: CompletedRun, cost: Guarantee) -> str | None:
    for key in ("epsilon", "epsilon_if_noise_were_secret"):
        stated, found = getattr(record.statement, key), getattr(cost, key)
        if not (stated == found if stated is None or found is None else abs(stated - found) <= 1e-6 * max(1.0, found)):
            return f"states {key.replace('_', ' ')} {stated}, its charges cost {found}"
    return None


def _understated(record: CompletedRun, cost: Guarantee) -> str | None:
    """What a record says that its epsilon means, and it means more; or None. Earlier versions said nothing of it."""
    if record.statement.attacker_accuracy is not None and cost.meaning is not None:
        for key in ("attacker_accuracy", "detection_at_1_percent", "gaussian_mu", "epsilon_replacing"):
            stated, found = getattr(record.statement, key), getattr(cost.meaning, key)
            if (stated or 0.0) < (found or 0.0) * (1 - 1e-6):
                return f"states {key.replace('_', ' ')} {stated}, its charges allow {found}"
    return None


def _excess(budget: PrivacyTarget, cost: float | None) -> str | None:
    most = budget.amount("epsilon")
    over = most is not None and cost is not None and cost > most
    return f"costs epsilon {cost}, more than its budget of {most:g}" if over else None


@lru_cache(maxsize=4096)
def _cost(charged: str, delta: float, terms: str) -> Guarantee:
    """The guarantee of a run's charges; runs with the same charges are priced once."""
    spent = {Question.from_json(row): row["count"] for row in json.loads(charged)}
    return reprice(spent, delta, json.loads(terms))


# --- against the run -------------------------------------------------------------------------------------------------


def _contradiction(record: CompletedRun, cost: Guarantee) -> str | None:
    """What a record states or charges that the run it describes cannot have, or None."""
    run, stated = record.run, record.statement
    methods = _methods(record)
    rate = _drawn(record, methods[0]).rate if run.sampling == "allocation" else run.sample_rate
    fixed = {"delta": run.delta, "sample_rate": rate, "budget": run.budget.amount("epsilon")}
    for key, value in fixed.items():
        if getattr(stated, key) != value:
            return f"states {key} {getattr(stated, key)}, the run that it describes has {value}"
    contradictions = [_of_method(record, method, rate, cost) for method in methods]
    return contradictions[0] if all(contradictions) else None


def _methods(record: CompletedRun) -> list[Method]:
    """The method of a record's run; and as an earlier version would have built it, where a default has changed."""
    run, stated = record.run, record.statement
    length = Request(
        sample_rate=run.sample_rate,
        steps=run.steps,
        delta=run.delta,
        epsilon=run.budget.amount("epsilon"),
        noise_multiplier=stated.noise_multiplier,
    )
    options: list[dict[str, object]] = [dict(run.options)]
    if run.method in EARLIER_DEFAULTS:
        options.append({**EARLIER_DEFAULTS[run.method], **run.options})
    return [settled(make_method(run.method, **as_given(each)), length) for each in options]


def _drawn(record: CompletedRun, method: Method) -> Sampling:
    """How its samples are drawn."""
    run = record.run
    request = Request(sample_rate=run.sample_rate, delta=run.delta, sampling=run.sampling)
    return sampling_of(method, request, 1)  # only a truncated sample depends on the population


def _of_method(record: CompletedRun, method: Method, rate: float, cost: Guarantee) -> str | None:
    run, stated, drawn = record.run, record.statement, _drawn(record, method)
    method = replace(method, gate=method.gate.at(round(stated.expected_batch / rate)))
    if record.terms.sampling != drawn.kind:
        return f"says that its sampling was {record.terms.sampling}, that of {run.method} is {drawn.kind}"
    schedule = "filtered" if method.gate.adaptive else "fixed"
    if record.terms.schedule != schedule:
        return f"says that its questions were {record.terms.schedule}, those of {run.method} are {schedule}"
    asking = partial(questions, method, rate, stated.noise_multiplier, sampling=drawn)
    charges = _filter_contradiction if method.gate.adaptive else _charge_contradiction
    return charges(record, asking) or _noise_contradiction(record, method, cost)


def _noise_contradiction(record: CompletedRun, method: Method, cost: Guarantee) -> str | None:
    """How a record's noise differs from what its run's budget, paper's sigma or method's options fix, or None."""
    budget, stated, fixed = record.run.budget, record.statement.noise_multiplier, method.noise_multiplier
    if budget.kind == "noise_multiplier":
        fixed = budget.value
    elif budget.kind == "paper_sigma":
        groups = record.statement.groups if isinstance(method.clip, PerGroup) else 1
        if groups is None:
            return None  # a record of an earlier version, which did not store how many groups shared the sigma
        fixed = accounted_multiplier(budget.value, method.memory.fresh_share, groups)
    if fixed is not None:
        same = abs(stated - fixed) <= 1e-9 * fixed
        return None if same else f"states noise multiplier {stated}, the run that it describes has {fixed}"
    spent = cost.epsilon if cost.epsilon is not None else cost.epsilon_if_noise_were_secret
    if spent is not None and spent < LEAST_SPENT * budget.value:
        return f"costs epsilon {spent}, less than noise that was fitted to its budget of {budget.value:g}"
    return None


def _charge_contradiction(record: CompletedRun, asking: Callable[[int], History]) -> str | None:
    """How a record's charges differ from `asking` for its steps, where questions are fixed in advance; or None."""
    run, spent, steps = record.run, record.history, record.steps
    if record.stopped == "budget":
        whole = asking(steps + 1)
        if not (steps < run.steps and within(asking(steps), spent) and within(spent, whole)):
            return f"lists other questions than {steps} of the {run.steps} steps of {run.method} ask"
        if run.budget.kind != "epsilon" or epsilon(whole, run.delta) <= run.budget.value:
            return f"says that it stopped for its budget, which would have paid for step {steps + 1}"
        return None
    if (record.stopped, steps) != ("finished", run.steps):
        return f"says that it {record.stopped} after {steps} steps, the run that it describes has {run.steps}"
    return None if spent == asking(steps) else f"lists other questions than {steps} steps of {run.method} ask"


def _filter_contradiction(record: CompletedRun, asking: Callable[[int], History]) -> str | None:
    """How a filter's terms differ from its run's, or None: then what was asked under it costs at most its epsilon."""
    run, terms, steps = record.run, record.terms, record.steps
    if terms.filter_epsilon != run.budget.value:
        return f"states a filter of epsilon {terms.filter_epsilon}, its budget is {run.budget.value:g}"
    if {Question.from_json(dict(row)) for row in terms.filter_expects or ()} != set(asking(run.steps)):
        return f"states a filter that expects other questions than {run.method} asks"
    if steps > run.steps or (record.stopped == "finished") != (steps == run.steps):
        return f"says that it {record.stopped} after {steps} steps, the run that it describes has {run.steps}"
    asked, each = record.statement.asked, sum(asking(1).values())
    if asked < steps * each:
        return f"lists {asked} questions, {steps} steps of {run.method} ask {steps * each} at least"
    return None
