"""Can a comparison's epsilons be believed? Each is recomputed from what its record says was charged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vestige.comparison import Budget, Record, Run
from vestige.comparison_folder import ComparisonFolder
from vestige.questions import Question
from vestige.verification import TERMS, reprice


@dataclass(frozen=True)
class ComparisonVerdict:
    """How many runs hold what they state, and what is wrong with each of the others."""

    verified: int
    failed_runs: int
    """Runs that ended in an error; no model of theirs was kept."""
    wrong: dict[str, str]
    largest_epsilon: float | None
    """Of one run, released alone."""

    def to_json(self) -> dict[str, Any]:
        return {
            "verified": not self.wrong,
            "runs": self.verified,
            "failed_runs": self.failed_runs,
            "wrong": self.wrong,
            "largest_epsilon": self.largest_epsilon,
        }


def verify_comparison(path: str | Path) -> ComparisonVerdict:
    """Price every record of a comparison anew, from its charges alone.

    Formal guarantees: a verified record states the epsilon of the questions it lists, within its budget, for the run
    that its name is the hash of. That nothing else was asked rests on the program that wrote it: a record is not
    chained as a ledger is.
    """
    home = ComparisonFolder(path)
    home.specification()
    records = home.records()
    done = [record for record in records.values() if record["status"] == "done"]
    found = {record["id"]: _fault(record) for record in done}
    wrong = {**home.unreadable, **{name: fault for name, fault in found.items() if fault is not None}}
    spent = [record["epsilon"] for record in done if found[record["id"]] is None and record["epsilon"] is not None]
    right = sum(fault is None for fault in found.values())
    return ComparisonVerdict(right, len(records) - len(done), wrong, max(spent, default=None))


def _fault(record: Record) -> str | None:
    """What does not hold in a record, or None."""
    try:
        run = Run(**{**record["run"], "budget": Budget(**record["run"]["budget"])})
        asked = sum(row["count"] for row in record["charged"])
        if run.id != record["id"]:
            return "its name is not the hash of the run that it describes"
        if asked != record["asked"]:
            return f"says that {record['asked']} questions were asked, and lists {asked}"
        if (record["noise"] == "seeded") != run.reproducible:
            return f"says that its noise was {record['noise']}, which is not so of the run that it describes"
        terms = {key: record[key] for key in TERMS if key in record}
        cost = _cost(json.dumps(record["charged"]), run.delta, json.dumps(terms))
        return _gap(record["epsilon"], cost) or _excess(run.budget, cost)
    except (KeyError, TypeError, ValueError) as error:
        return f"cannot be priced: {type(error).__name__}: {error}"


def _gap(stated: float | None, cost: float | None) -> str | None:
    same = stated == cost if stated is None or cost is None else abs(stated - cost) <= 1e-6 * max(1.0, cost)
    return None if same else f"states epsilon {stated}, its charges cost {cost}"


def _excess(budget: Budget, cost: float | None) -> str | None:
    over = budget.kind == "epsilon" and cost is not None and cost > budget.value
    return f"costs epsilon {cost}, more than its budget of {budget.value:g}" if over else None


@lru_cache(maxsize=4096)
def _cost(charged: str, delta: float, terms: str) -> float | None:
    """Runs that asked alike are priced once."""
    spent = {Question.from_json(row): row["count"] for row in json.loads(charged)}
    return reprice(spent, delta, json.loads(terms)).epsilon
