"""Can a run's epsilon be believed? It is recomputed from the ledger alone; the other files are checked against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vestige import accounting
from vestige.accounting.ledger import LedgerError, LedgerHistory, read
from vestige.accounting.odometers_and_filters import FilteredBudget
from vestige.assumptions import EARLIER_ADJACENCY, Stated
from vestige.checks import check_delta
from vestige.files import read_json
from vestige.priced_questions import Question
from vestige.run_records import RunResult, Statement
from vestige.training.results import meant
from vestige.training.run_folder import RunFolder
from vestige.units import Users

FACTS = tuple(each.name for each in fields(accounting.Facts))


@dataclass(frozen=True)
class Verdict:
    guarantee: accounting.Guarantee
    asked: int
    attempts: int
    rows: int
    finished: bool
    unchecked: tuple[str, ...] = ()
    """Files that the ledger says nothing about: older versions did not seal them."""
    for_user: accounting.Guarantee | None = None
    """What the run means for a person with several rows, where that was asked."""

    def to_json(self) -> dict[str, object]:
        return {
            "verified": True,
            "finished": self.finished,
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "accountant": self.guarantee.accountant,
            "epsilon_rdp": self.guarantee.epsilon_rdp,
            **meant(self.guarantee),
            "epsilon_if_noise_were_secret": self.guarantee.epsilon_if_noise_were_secret,
            "reasons": list(self.guarantee.reasons),
            "assumptions": list(self.guarantee.listed),
            "asked": self.asked,
            "attempts": self.attempts,
            "rows": self.rows,
            "unchecked": list(self.unchecked),
            "adjacency": self.guarantee.adjacency,
            **({} if self.for_user is None else {"user": _in_short(self.for_user)}),
        }


def _in_short(promise: accounting.Guarantee) -> dict[str, object]:
    return {
        "epsilon": promise.epsilon,
        "delta": promise.delta,
        "accountant": promise.accountant,
        "adjacency": promise.adjacency,
        "reasons": list(promise.reasons),
        **meant(promise),
    }


def verify(path: str | Path, *, unfinished: bool = False, rows_per_user: int | None = None) -> Verdict:
    """Recompute a run's guarantee from its ledger, and check every file of its folder against it; raise `LedgerError`
    at the first contradiction.

    A run that is not finished is refused, unless `unfinished` asks for its cost so far: nothing in its folder could
    distinguish it from a longer one whose ledger was cut. `rows_per_user` also asks what the run means for a person who
    has at most so many rows.
    """
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise ValueError(f"{str(path)!r} is not a run: there is no such folder")
    if not (folder.ledger.exists() or (folder.path / "run.json").exists()):
        raise ValueError(f"{str(path)!r} holds neither a run (run.json, ledger.jsonl) nor a comparison (spec.json)")
    history = read(folder.ledger)
    if "delta" not in history.facts:
        raise ValueError(
            f"{str(folder.ledger)!r} names no delta to state an epsilon at: make_private(target_delta=...)"
        )
    history.require(folder.ledger, "noise", "sampling", "population")
    spent = history.spent(replays_are_free=history.facts["noise"] == "seeded")
    try:
        check_delta(history.facts["delta"], history.facts["population"])
        _check_statistics(history.facts, spent)
        promise = reprice(spent, history.facts["delta"], history.facts, history.assumptions)
    except ValueError as error:
        raise LedgerError(f"{folder.ledger}: {error}") from error
    if folder.checkpoint.exists():
        saved = folder.load_checkpoint()
        _contains(folder.ledger, history.heads, saved["ledger_rows"], saved["ledger_head"], "the checkpoint")
    result = folder.result()
    if result is not None:
        _check_result(folder, history, result, promise, sum(spent.values()))
    synthesis = folder.path / "synthesis.json"
    if synthesis.exists():
        _same("epsilon", read_json(synthesis).get("epsilon"), promise.epsilon, synthesis.name)
    finished, unchecked = _check_files(folder, history, result is not None)
    _check_steps(folder, history, finished)
    if not finished and not unfinished:
        raise LedgerError(
            f"{str(path)!r}: this run is not finished, so nothing tells whether rows were cut from its ledger; resume "
            "it, or see what it cost so far with --unfinished"
        )
    for_user = None
    if rows_per_user is not None:
        for_user = accounting.guarantee_of_user(spent, promise.delta, facts_of(history.facts), rows_per_user)
    return Verdict(promise, sum(spent.values()), history.attempts, history.rows, finished, unchecked, for_user)


def _check_statistics(facts: Mapping[str, Any], spent: accounting.History) -> None:
    """The statistics that a run was begun with must be among its asks: they were answered."""
    for row in facts["statistics"]["questions"] if "statistics" in facts else ():
        question = Question.from_json(row)
        if spent.get(question, 0) < row["count"]:
            raise ValueError(
                f"it was begun with statistics that asked {question!r} {row['count']} times, and its rows charge "
                f"{spent.get(question, 0)} of them"
            )


def _check_files(folder: RunFolder, history: LedgerHistory, has_result: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether the run is finished, and which files the ledger says nothing about."""
    there = folder.hashes()
    if history.files is None:
        older = history.facts["version"] == 1 and has_result
        return older, tuple(there)
    for name, sealed in history.files.items():
        if name not in there:
            raise LedgerError(f"{folder.path / name} is missing: the run left it when it finished")
        if there[name] != sealed:
            raise LedgerError(f"{folder.path / name} is not what the run left: its hash is not the one in the ledger")
    return True, tuple(name for name in there if name not in history.files)


def _check_steps(folder: RunFolder, history: LedgerHistory, finished: bool) -> None:
    """Records and weights must not be there without the questions that they follow from.

    A question is in the ledger before its step has a record, and the end of the steps (the assumption `fixed_steps`)
    before the weights are written: a run that was killed at any time passes. Loops of one's own write weights when they
    like."""
    folder.require_asked(history.last_step)
    weights, ended = folder.path / "model.pt", finished or "fixed_steps" in history.assumptions
    if weights.exists() and not ended and (folder.path / "run.json").exists():
        raise LedgerError(
            f"{weights} is there, which a run writes when it ends, and its ledger has no end: rows were cut from it, "
            "or the run was declared finished early and killed meanwhile; resume it"
        )


def _check_result(
    folder: RunFolder, history: LedgerHistory, content: object, promise: accounting.Guarantee, asked: int
) -> None:
    """Check everything in the result that follows from the ledger."""
    try:
        result = RunResult.from_json(content)
    except ValueError as error:
        raise LedgerError(f"{folder.path / 'result.json'}: {error}") from error
    if result.ledger is None:
        raise LedgerError(f"{folder.path / 'result.json'} does not say after which row of the ledger it was written")
    _contains(folder.ledger, history.heads, result.ledger.rows, result.ledger.head, "the result")
    asked_since = history.rows - result.ledger.rows - (history.files is not None)
    if asked_since:
        raise LedgerError(
            f"{folder.ledger}: {history.rows} rows, but the result was written after {result.ledger.rows}"
        )
    facts, said = history.facts, result.statement
    history.require(folder.ledger, "sample_rate", "epsilon", "noise_multiplier", "groups", "steps", "method")
    history.require(folder.ledger, "lr", "lr_reason", "adjacency")
    rate = facts["sample_rate"]
    expected = Statement(
        epsilon=promise.epsilon,
        delta=facts["delta"],
        accountant=promise.accountant,
        epsilon_rdp=promise.epsilon_rdp if promise.epsilon is not None else None,
        budget=facts["epsilon"],
        noise_multiplier=facts["noise_multiplier"],
        sample_rate=rate,
        expected_batch=rate * facts["population"],
        groups=len(facts["groups"]),
        lr=facts["lr"],
        lr_reason=facts["lr_reason"],
        asked=asked,
        adjacency=facts["adjacency"] if said.adjacency == EARLIER_ADJACENCY else promise.adjacency,
        reasons=promise.reasons,
        epsilon_if_noise_were_secret=promise.epsilon_if_noise_were_secret,
        **(meant(promise) if said.attacker_accuracy is not None else {}),
    )
    for each in fields(Statement):
        _same(each.name, getattr(said, each.name), getattr(expected, each.name))
    if facts["version"] > 2 or history.assumptions:
        _check_assumptions(result, promise)
    method = facts["method"]
    if isinstance(method, dict):
        _same("method", result.method, method["name"])
    if result.steps > facts["steps"] or (result.stopped == "finished" and result.steps != facts["steps"]):
        raise LedgerError(f"result.json says {result.steps} steps, the ledger planned {facts['steps']}")


def _check_assumptions(result: RunResult, promise: accounting.Guarantee) -> None:
    """The result must say of each assumption what the ledger does; sentences may be another version's."""
    said = {each["name"]: (each["status"], each["detail"]) for each in result.assumptions}
    for each in promise.assumptions:
        if each.recorded or each.name in said:
            _same(f"of the assumption {each.name}", said.get(each.name), (each.status, each.detail))


def reprice(
    spent: accounting.History,
    delta: float,
    terms: Mapping[str, Any],
    recorded: Mapping[str, Stated] = MappingProxyType({}),
) -> accounting.Guarantee:
    """The guarantee of what was charged, under the terms that a ledger or a record states (`Training.terms`), with what
    it recorded about assumptions.

    A filtered run's epsilon is the filter's: every question is checked against the filter that the terms describe, and
    ValueError says what it would have refused.
    """
    if terms.get("schedule") == "filtered":
        expected = {Question.from_json(row): 1 for row in terms["filter_expects"]}
        try:
            FilteredBudget(terms["filter_epsilon"], delta, expected).admit(spent)
        except ValueError as error:
            raise ValueError(f"asks what its filter refuses: {error}") from error
    return accounting.guarantee(spent, delta, facts_of(terms), recorded)


def facts_of(terms: Mapping[str, Any]) -> accounting.Facts:
    """What the terms of a ledger or a record say about the run."""
    known = {"arithmetic": "float32"} | {key: terms[key] for key in FACTS if key in terms}  # what 0.1 had
    if known.get("users") is not None:
        known["users"] = Users.from_json(known["users"])
    return accounting.Facts(**known)


def _contains(ledger: Path, heads: list[str], rows: int, head: str, what: str) -> None:
    if heads[rows - 1 : rows] != [head]:
        raise LedgerError(f"{ledger}: does not contain the {rows} rows that {what} was written after: cut or replaced")


def _same(key: str, written: object, expected: object, file: str = "result.json") -> None:
    """Refuse another value than expected; a number may differ by the rounding of another version or machine."""
    if isinstance(written, float | int) and isinstance(expected, float | int):
        right = abs(written - expected) <= 1e-6 * max(1.0, abs(expected))
    else:
        right = written == expected
    if not right:
        raise LedgerError(f"{file} says {key} {written}, the ledger says {expected}")
