"""Can a run's epsilon be believed? Recomputed from its ledger alone, then held against the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vestige import accounting
from vestige.accounting.budgets import FilteredBudget
from vestige.accounting.ledger import LedgerError, read
from vestige.questions import Question
from vestige.training.run_folder import RunFolder

FACTS = tuple(each.name for each in fields(accounting.Facts))


@dataclass(frozen=True)
class Verdict:
    guarantee: accounting.Guarantee
    asked: int
    attempts: int
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {
            "verified": True,
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "accountant": self.guarantee.accountant,
            "epsilon_rdp": self.guarantee.epsilon_rdp,
            "epsilon_if_noise_were_secret": self.guarantee.epsilon_if_noise_were_secret,
            "reasons": list(self.guarantee.reasons),
            "asked": self.asked,
            "attempts": self.attempts,
            "rows": self.rows,
        }


def verify(path: str | Path) -> Verdict:
    """Recompute a run's guarantee from its ledger; raise `LedgerError` at the first thing that does not hold."""
    folder = RunFolder(path)
    if not folder.path.is_dir():
        raise ValueError(f"{str(path)!r} is not a run: there is no such folder")
    if not (folder.ledger.exists() or (folder.path / "run.json").exists()):
        raise ValueError(f"{str(path)!r} holds neither a run (run.json, ledger.jsonl) nor a comparison (spec.json)")
    history = read(folder.ledger)
    facts = history.facts
    seeded = facts["noise"] == "seeded"
    spent = history.spent(replays_are_free=seeded)
    try:
        promise = reprice(spent, facts["delta"], facts)
    except ValueError as error:
        raise LedgerError(f"{folder.ledger}: {error}") from error
    if folder.checkpoint.exists():
        saved = folder.load_checkpoint()
        _contains(folder.ledger, history.heads, saved["ledger_rows"], saved["ledger_head"], "the checkpoint")
    result = folder.result()
    if result is not None:
        _contains(folder.ledger, history.heads, result["ledger"]["rows"], result["ledger"]["head"], "the result")
        if result["ledger"]["rows"] != history.rows:
            raise LedgerError(
                f"{folder.ledger}: {history.rows} rows, but the result was written after {result['ledger']['rows']}"
            )
        for key in ("epsilon", "epsilon_if_noise_were_secret"):
            _same(key, result.get(key), getattr(promise, key))
    return Verdict(promise, sum(spent.values()), history.attempts, history.rows)


def reprice(spent: accounting.History, delta: float, terms: Mapping[str, Any]) -> accounting.Guarantee:
    """The guarantee of what was charged, under the terms that a ledger or a record states (`Training.terms`).

    A filtered run's epsilon is the filter's: every question is held against the filter that the terms describe, and
    ValueError says what it would have refused.
    """
    known = {key: terms[key] for key in FACTS if key in terms}
    if terms.get("schedule") == "filtered":
        expected = {Question.from_json(row): 1 for row in terms["filter_expects"]}
        try:
            FilteredBudget(terms["filter_epsilon"], delta, expected).admit(spent)
        except ValueError as error:
            raise ValueError(f"asks what its filter refuses: {error}") from error
    return accounting.guarantee(spent, delta, accounting.Facts(**known))


def _contains(ledger: Path, heads: list[str], rows: int, head: str, what: str) -> None:
    if heads[rows - 1 : rows] != [head]:
        raise LedgerError(f"{ledger}: does not contain the {rows} rows that {what} was written after: cut or replaced")


def _same(key: str, written: float | None, recomputed: float | None) -> None:
    if (written is None) != (recomputed is None):
        raise LedgerError(f"result.json says {key} {written}, the ledger says {recomputed}")
    if written is not None and recomputed is not None and abs(written - recomputed) > 1e-6 * max(1.0, recomputed):
        raise LedgerError(f"result.json says {key} {written:.6g}, the ledger says {recomputed:.6g}")
