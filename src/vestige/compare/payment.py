"""Who pays for a comparison? The book of its dataset: for all runs at once, before the first of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vestige import tasks
from vestige.accounting import History
from vestige.budget.book import Book
from vestige.budget.person_and_process import has_ended, this_process
from vestige.budget.spending import Account, Budget, Provenance, account_of, pay
from vestige.compare import run_grid
from vestige.compare.execute_run import Machine, asked_by
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Specification
from vestige.files import read_json, write_json

HELD_OUT = "held-out rows, by which rates were chosen without noise, count as public"


@contextmanager
def paid(folder: ComparisonFolder, specification: Specification, machine: Machine, budget: Budget) -> Iterator[None]:
    """Charge every run that is not on record, and then let them be made.

    What was charged before is not charged again where a session of this folder ended with the records that are there
    now: a run that was cut off left nothing. A folder that was copied, whose records were taken away, whose session was
    killed, or that was finished, makes further runs for a further price.
    """
    account = account_of(budget)
    if account is None:
        yield
        return
    book, file = Book(account.book), folder.path / "budget.json"
    entry: dict[str, Any] = read_json(file) if file.exists() else {"book": book.state.id, "reservations": []}
    if entry["book"] != book.state.id:
        raise ValueError(f"budget={str(account.book)!r} is not the book that {folder.path} was charged to")
    if not entry["reservations"] and folder.records():
        raise ValueError(
            f"budget={str(account.book)!r}: the comparison {str(folder.path)!r} was begun without a book; finish it "
            "without one, and enter what it spent by hand: vestige budget enter"
        )
    due = _due(folder, specification, machine)
    if due and not _goes_on(book, folder, entry["reservations"]):
        name = _pay(account, folder, specification, machine, due)
        for earlier in entry["reservations"]:
            book.close(earlier)
        entry["reservations"].append(name)
        write_json(file, entry)
    if not entry["reservations"]:
        yield
        return
    last = entry["reservations"][-1]
    book.note(last, {"session": this_process(), "on_record": None})
    try:
        yield
    finally:
        if _due(folder, specification, machine):
            book.note(last, {"session": None, "on_record": _on_record(folder)})
        else:
            book.close(last)


def _due(folder: ComparisonFolder, specification: Specification, machine: Machine) -> list[tuple[History, int]]:
    """What the runs ask that are not on record, and how many ask it."""
    asked = run_grid.all_runs(specification, folder.records(), lambda run: frozenset(asked_by(run, machine).items()))
    return [(dict(each), count) for each, count in asked.items()]


def _on_record(folder: ComparisonFolder) -> str:
    return hashlib.sha256(" ".join(sorted(folder.records())).encode()).hexdigest()


def _goes_on(book: Book, folder: ComparisonFolder, reservations: list[str]) -> bool:
    """Whether what was charged last covers the runs that are not on record."""
    held = book.state.open.get(reservations[-1]) if reservations else None
    if held is None or held.facts.get("path") != str(folder.path.resolve()):
        return False
    session: dict[str, object] | None = held.facts.get("session")
    if session is not None:
        return not has_ended(session)  # another process makes runs of this folder now
    return held.facts.get("on_record") == _on_record(folder)


def _pay(
    account: Account,
    folder: ComparisonFolder,
    specification: Specification,
    machine: Machine,
    due: list[tuple[History, int]],
) -> str:
    if specification.reproducible:
        raise ValueError("budget: reproducible runs protect nobody, so no book can count them; leave one of them out")
    sources = {(each.task, machine.data.get(each.task)) for each in specification.problems}
    if len(sources) > 1:
        raise ValueError("budget: a book is about one dataset, and this compares on several tasks; compare on one")
    [(task, data)] = sources
    name = pay(
        account,
        due,
        purpose=f"compare {len(specification.contenders)} methods, {sum(count for _, count in due)} runs",
        source=tasks.source_of(task, data) or Provenance(data=tasks.load(task, data).train, of_file=tasks.of_file),
        facts={"path": str(folder.path.resolve()), **({"assumes": HELD_OUT} if "tuned" in specification.rates else {})},
        close=False,
    )
    assert name is not None
    return name
