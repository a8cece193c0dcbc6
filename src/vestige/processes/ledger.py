"""How do several processes keep one ledger? Process 0 writes it, durably, before any of them computes an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from vestige.accounting.ledger import Budget, Ledger, LedgerHistory, read
from vestige.assumptions import ASSUMPTIONS, STATUSES, Stated, Status, merged
from vestige.priced_questions import BudgetSpent, Question
from vestige.processes.group import Processes, digest


class SharedLedger(Ledger):
    """The ledger of a group: a file in process 0, and in the others a copy in memory.

    Every question is one round of messages: what each process is about to ask, and process 0's verdict. Where they are
    about to ask different things none of them continues. What they know about assumptions is sent along, and is written
    after the question: of what they know differently, the weakest.
    """

    def __init__(
        self, group: Processes, path: Path | None, budget: Budget | None = None, *, replays_are_free: bool = False
    ) -> None:
        super().__init__(path if group.rank == 0 else None, budget, replays_are_free=replays_are_free)
        self._group = group
        self._unwritten: dict[str, Stated] = {}
        """What this process knows about assumptions and has not sent to the others."""

    def open(self, facts: Mapping[str, object]) -> None:
        if self._group.rank == 0:
            self._group.first(lambda: super(SharedLedger, self).open(facts))
        else:
            self._group.first(lambda: None)
            super().open(facts)

    def hold(self) -> None:
        self._group.first(lambda: super(SharedLedger, self).hold())

    def claim(self) -> LedgerHistory:
        return self._group.first(self._claimed)

    def _claimed(self) -> LedgerHistory:
        if self._file is None:
            Ledger.hold(self)
        assert self.path is not None
        return read(self.path, repair=True)

    def ask(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        """Charge one question in all processes, or raise `BudgetSpent` in all of them."""
        asked = digest(step, part, sensitivity, question.to_json(), self.attempt, self.rows)
        problem: Exception | None = None
        if self._group.rank == 0:
            try:
                super().ask(question, step=step, part=part, sensitivity=sensitivity)
            except (BudgetSpent, ValueError, OSError) as error:
                problem = error
        verdict = {type(None): 0, BudgetSpent: 1}.get(type(problem), 2)
        known = digest([(each.name, each.status, each.detail) for each in self._unwritten.values()])
        told = self._group.told(asked, verdict, known, _packed(self._unwritten.values()))
        if problem is not None:
            raise problem
        if told[0][1] == 1:
            raise BudgetSpent("the budget is spent: process 0 says so, and nothing was asked or moved")
        if told[0][1] == 2:
            raise OSError("process 0 could not write the ledger: nothing was asked")
        if any(other != asked for other, *_ in told):
            apart = [rank for rank, (other, *_) in enumerate(told) if other != told[0][0]]
            raise ValueError(
                f"process {apart[0]} is about to ask something else than process 0 (step {step} here): the processes "
                "have come apart, so none of them goes on. Every process must take the same steps"
            )
        if self._group.rank != 0:
            budget, self.budget = self.budget, None  # process 0 has decided
            try:
                super().ask(question, step=step, part=part, sensitivity=sensitivity)
            finally:
                self.budget = budget
        if any(other != known for _, _, other, _ in told):
            weakest = [max(codes) for codes in zip(*(_unpacked(packed) for *_, packed in told), strict=True)]
            self._unwritten = {
                name: Stated(name, STATUSES[code - 1], "", True)
                for name, code in zip(ASSUMPTIONS, weakest, strict=True)
                if code
            }
        self._write_assumptions()

    def assume(self, name: str, status: Status, detail: str) -> None:
        before = self.assumptions.get(name)
        after = merged(before, Stated(name, status, detail, True))
        if after != before:
            self.assumptions[name] = self._unwritten[name] = after

    def settle(self) -> None:
        self._write_assumptions()

    def _write_assumptions(self) -> None:
        for each in self._unwritten.values():
            self._append({"row": "assumption", "name": each.name, "status": each.status, "detail": each.detail})
            self.assumptions[each.name] = merged(self.assumptions.get(each.name), each)
        self._unwritten = {}

    def finish(self, files: Mapping[str, str]) -> None:
        if self._group.rank == 0:
            super().finish(files)


def _packed(assumptions: Iterable[Stated]) -> int:
    """Two bits for each assumption of the list: nothing new, or its status."""
    places = {name: place for place, name in enumerate(ASSUMPTIONS)}
    return sum((STATUSES.index(each.status) + 1) << (2 * places[each.name]) for each in assumptions)


def _unpacked(packed: int) -> list[int]:
    return [(packed >> (2 * place)) & 3 for place in range(len(ASSUMPTIONS))]


def ledger_of(group: Processes, path: Path | None, *, replays_are_free: bool = False) -> Ledger:
    """The ledger of these processes."""
    if not group.several:
        return Ledger(path, replays_are_free=replays_are_free)
    return SharedLedger(group, path, replays_are_free=replays_are_free)
