"""What was asked, and in which order? An append-only, hash-chained record, written before each answer exists."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from vestige.assumptions import Stated, Status, check, merged
from vestige.checks import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from vestige.files import lock
from vestige.priced_questions import BudgetSpent, Question
from vestige.units import Users

GENESIS = "0" * 64
VERSION = 3
READABLE = (1, 2, 3)
"""Version 1 had no `finish` rows, version 2 no `assumption` rows."""


class LedgerError(ValueError):
    """The ledger cannot be trusted, and why."""


class Budget(Protocol):
    def allows(self, spent: Mapping[Question, int], question: Question) -> bool: ...


class Spending(Protocol):
    """An account in a book that several runs share (`vestige.budget.spending`)."""

    def charge(self, question: Question, ledger: tuple[int, str]) -> None:
        """Record a question in the book, durably, or raise `BudgetSpent` and record nothing."""
        ...

    def finish(self, ledger: tuple[int, str] | None = None) -> None:
        """Say that nothing more will be asked."""
        ...

    def pause(self, ledger: tuple[int, str]) -> None:
        """Say that this process asks nothing more."""
        ...


_held: WeakValueDictionary[Path, Ledger] = WeakValueDictionary()
"""The ledgers that this process writes."""


def _let_go() -> None:
    """A forked process, one that reads data above all, must not keep the file locked when its parent is killed."""
    for ledger in list(_held.values()):
        ledger.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _whole(least: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**62


def _number(low: float, high: float) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _method(value: Any) -> bool:
    named = isinstance(value, dict) and _text(value.get("name")) and isinstance(value.get("options"), dict)
    return _text(value) or (named and isinstance(value.get("parts", {}), dict))


def _hashes(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for pair in value.items() for each in pair)


def _questions(value: object) -> bool:
    try:
        return isinstance(value, list) and all(Question.from_json(row) for row in value)
    except ValueError:
        return False


def _statistics(value: Any) -> bool:
    """What a run says of statistics that were asked before it: rows of questions, each with its count."""
    asked = value.get("questions") if isinstance(value, dict) else None
    return _questions(asked) and all(_whole(1)(row.get("count")) for row in asked)  # type: ignore[union-attr]


def _users(value: Any) -> bool:
    try:
        return value is None or bool(Users.from_json(value))
    except (ValueError, TypeError, AttributeError):
        return False


FORMS: dict[str, dict[str, Callable[[object], bool]]] = {
    "open": {
        "population": _whole(1),
        "canaries": _whole(1),
        "coordinates": _whole(0),
        "steps": _whole(1),
        "sample_rate": _number(0, 1),
        "delta": _number(0, 1),
        "selection_delta": _number(0, 1),
        "noise_multiplier": _number(SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER),
        "sampling": _text,
        "noise": _text,
        "arithmetic": _text,
        "schedule": _text,
        "filter_epsilon": _number(0, inf),
        "filter_expects": _questions,
        "users": _users,
        "groups": lambda value: isinstance(value, list),
        "synthesis": _text,
        "nonprivate_outputs": lambda value: isinstance(value, bool),
        "method": _method,
        "statistics": _statistics,
        "answer": _text,
        "name": _text,
    },
    "ask": {"step": _whole(-1), "part": _whole(0), "attempt": _whole(0), "kind": _text},
    "resume": {"from_step": _whole(0), "attempt": _whole(0)},
    "finish": {"files": _hashes},
}
"""What rows hold, and what it must look like; an `open` row has some of it, the others all."""


DIFFERING = re.compile(r'"\\u0000(seq|previous|step)"')
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _seal(row: Mapping[str, object]) -> str:
    return hashlib.sha256(_canonical(row).encode()).hexdigest()


class Ledger:
    """The charging side: asks are checked against the budget, made durable, and only then allowed to be answered.

    Rows: one `open` (the public facts of the run, and a name drawn for it), then per question one `ask` (its step, and
    its place among that step's questions), and an `assumption` when something new is known about one; each continuation
    after an interruption adds a `resume`, the end of the run a `finish` with the hashes of what it left. Every row
    holds the hash of the row before it. With `path=None` the ledger lives in memory; a file is written by one process
    at a time.
    """

    def __init__(self, path: Path | None, budget: Budget | None = None, *, replays_are_free: bool = False) -> None:
        self.path, self.budget = path, budget
        self.spending: Spending | None = None
        """The book that is charged before this ledger, if there is one."""
        self.replays_are_free = replays_are_free
        self.head, self.rows, self.attempt = GENESIS, 0, 0
        self.spent: Counter[Question] = Counter()
        self.assumptions: dict[str, Stated] = {}
        """What is known about each assumption (`vestige.assumptions`); the others count as assumed."""
        self._paid: set[tuple[int, int]] = set()
        self._file: int | None = None
        self._process = os.getpid()
        self._like: tuple[Question, tuple[object, ...], list[str]] | None = None
        """What was asked last, and its row in pieces, between which the names of what differs stand."""

    def __del__(self) -> None:
        self.close()

    def open(self, facts: Mapping[str, object]) -> None:
        """Start a new ledger with the public facts of the run."""
        if self.path is not None:
            try:
                self._hold(os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                raise ValueError(f"{self.path} exists: it is another run's; resume it, or give a new file") from None
        # Two runs of the same settings ask the same: by their names, no row of one fits into the other's chain.
        name = {} if self.path is None or self.replays_are_free else {"name": secrets.token_hex(8)}
        try:
            self._append({"row": "open", "version": VERSION, **name, **facts})
        except OSError:
            self._let_go_of_file()
            if self.path is not None:
                self.path.unlink()  # it holds nothing, and would be taken for a run's
            raise

    def hold(self) -> None:
        """Hold the ledger of an interrupted run, so that no other process continues it too."""
        assert self.path is not None
        if self._file is None:
            if (before := _held.get(self.path.resolve())) is not None:
                before.close()  # this process continues from here
            try:
                self._hold(0)
            except FileNotFoundError as error:
                raise LedgerError(f"cannot read the ledger {self.path}: {error.strerror}") from error

    def claim(self) -> LedgerHistory:
        """Hold the ledger of an interrupted run, and read it.

        A torn last line is cut off: the process died inside the write, before the answer to that question could exist.
        """
        assert self.path is not None
        self.hold()
        return read(self.path, repair=True)

    def resume(self, from_step: int) -> None:
        """Continue an interrupted ledger: everything already asked stays charged."""
        history = self.claim()
        self.head, self.rows, self.attempt = history.head, history.rows, history.attempts
        self.spent, self._paid = history.spent(self.replays_are_free), set(history.paid)
        self.assumptions = dict(history.assumptions)
        self._append({"row": "resume", "from_step": from_step, "attempt": self.attempt})

    def rewind(self, from_step: int) -> None:
        """Go back to an earlier step in the same process; everything already asked stays charged."""
        self.attempt += 1
        self._append({"row": "resume", "from_step": from_step, "attempt": self.attempt})

    def ask(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        """Charge one question, durably; or raise `BudgetSpent` and charge nothing."""
        free = self.replays_are_free and (step, part) in self._paid
        asked = question
        if not self.replays_are_free:
            question = question.during(self.attempt)
        if self.budget is not None and not free and not self.budget.allows(self.spent, question):
            raise BudgetSpent(
                f"the budget is spent: {sum(self.spent.values())} questions were asked, and one more would exceed it. "
                "Nothing was asked or moved; stop training here (`except vestige.BudgetSpent: break`)"
            )
        if self.spending is not None and not free:
            self.spending.charge(question, (self.rows, self.head))
        if self.path is None:
            self._follow(asked, step, part, sensitivity)
        else:
            self._append(self._row(asked, step, part, sensitivity))
        if not free:
            self.spent[question] += 1
        if self.replays_are_free:
            self._paid.add((step, part))

    def assume(self, name: str, status: Status, detail: str) -> None:
        """Write down what is known about an assumption, if it is new; call `vestige.assumptions.record`."""
        before = self.assumptions.get(name)
        after = merged(before, Stated(name, status, detail, True))
        if after != before:
            self._append({"row": "assumption", "name": name, "status": status, "detail": detail})
            self.assumptions[name] = after

    def settle(self) -> None:
        """After the last question, where all processes know the same: nothing waits to be written."""

    def finish(self, files: Mapping[str, str]) -> None:
        """Say that the run is finished, and what it left: the hash of each file by its name."""
        self._append({"row": "finish", "files": dict(files)})
        if self.spending is not None:
            self.spending.finish((self.rows, self.head))

    def close(self) -> None:
        try:
            if self.spending is not None and self.path is None:
                self.spending.finish()  # a ledger in memory cannot be continued
            elif self.spending is not None and self._file is not None:
                self.spending.pause((self.rows, self.head))
        finally:
            self._let_go_of_file()

    def _let_go_of_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _hold(self, flags: int) -> None:
        assert self.path is not None
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
        try:
            lock(self._file, self.path)
        except BaseException:
            self.close()
            raise
        _held[self.path.resolve()] = self
        self._process = os.getpid()

    def _writable(self) -> int | None:
        if self.path is not None and os.getpid() != self._process:
            raise LedgerError(f"{self.path} is written by the process that opened it, not by one forked from it")
        if self.path is not None and self._file is None:
            raise LedgerError(
                f"{self.path} is closed: the run ended, or was continued by a later call; nothing was asked"
            )
        return self._file

    def _row(self, question: Question, step: int | str, part: int, sensitivity: float) -> dict[str, object]:
        place = {"row": "ask", "step": step, "part": part, "attempt": self.attempt}
        return {**place, "sensitivity": sensitivity, **question.to_json()}

    def _follow(self, question: Question, step: int, part: int, sensitivity: float) -> None:
        """As `_append` does where nothing is written: rows that ask the same differ in their place alone."""
        asked = part, self.attempt, repr(sensitivity)
        if self._like is None or self._like[0] is not question or self._like[1] != asked:
            row = {"seq": "\0seq", "previous": "\0previous", **self._row(question, "\0step", part, sensitivity)}
            self._like = question, asked, DIFFERING.split(_canonical(row))
        values = {"seq": str(self.rows), "previous": f'"{self.head}"', "step": str(step)}
        text = "".join([values[piece] if number % 2 else piece for number, piece in enumerate(self._like[2])])
        self.head, self.rows = hashlib.sha256(text.encode()).hexdigest(), self.rows + 1

    def _append(self, row: dict[str, object]) -> None:
        row = {"seq": self.rows, "previous": self.head, **row}
        seal, file = _seal(row), self._writable()
        if file is not None:
            line = json.dumps({**row, "hash": seal}).encode() + b"\n"
            size = os.fstat(file).st_size
            try:
                if os.write(file, line) != len(line):
                    raise OSError("short write")
                os.fdatasync(file) if hasattr(os, "fdatasync") else os.fsync(file)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)
                raise OSError(
                    f"cannot write the ledger {self.path}: {error}; nothing was asked, free space and resume"
                ) from error
        self.head, self.rows = seal, self.rows + 1


@dataclass
class LedgerHistory:
    """A ledger as read back and checked."""

    facts: dict[str, Any]
    heads: list[str] = field(default_factory=list)
    attempts: int = 1
    files: dict[str, str] | None = None
    """What the run left when it finished; None where it did not."""
    asks: Counter[Question] = field(default_factory=Counter)
    paid: dict[tuple[int, int], Question] = field(default_factory=dict)
    last_step: int = -1
    """The last step that was asked about; where questions are about epochs, the last of its epoch."""
    assumptions: dict[str, Stated] = field(default_factory=dict)
    """What was recorded about each assumption."""

    def require(self, path: Path, *names: str) -> None:
        """Refuse a ledger whose first row does not say what is needed of it."""
        for name in names:
            if name not in self.facts:
                raise LedgerError(f"{path}, line 1: the fact {name!r} is missing")

    @property
    def head(self) -> str:
        return self.heads[-1] if self.heads else GENESIS

    @property
    def rows(self) -> int:
        return len(self.heads)

    def spent(self, replays_are_free: bool) -> Counter[Question]:
        """What was charged: every ask, a resumed strategy as a mechanism of its own; or, where replays give the
        identical release, each step once."""
        if not replays_are_free:
            return Counter(self.asks)
        return Counter(self.paid.values())


def read(path: Path, *, repair: bool = False) -> LedgerHistory:
    """Read and check a ledger; any edit, gap or reuse of a step raises `LedgerError` naming the line."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"cannot read the ledger {path}: {error.strerror}") from error
    if text and not text.endswith(b"\n"):
        if not repair:
            raise LedgerError(f"{path}: the last line is torn (a crash in mid-write); resuming the run cuts it off")
        whole = text.rfind(b"\n") + 1
        os.truncate(path, whole)
        text = text[:whole]
    history: LedgerHistory | None = None
    due = {(-1, 0), (0, 0)}  # what is asked before the first step is step -1
    begins = range(0)  # the steps besides, with which an epoch may begin
    epoch = 1
    for number, row in enumerate(_rows(path, text), start=1):
        _check_chain(path, number, row, history)
        _check_form(path, number, row)
        if history is None:
            if row.get("row") != "open":
                raise LedgerError(f"{path}, line 1: a ledger begins with an 'open' row, not {row.get('row')!r}")
            if row.get("version") not in READABLE:
                raise LedgerError(
                    f"{path}: ledger version {row.get('version')!r} is not {VERSION}; use the vestige that wrote it"
                )
            if row.get("schedule") == "filtered":
                for name in ("filter_epsilon", "filter_expects"):
                    if name not in row:
                        raise LedgerError(f"{path}, line 1: the fact {name!r} of a filtered run is missing")
            history = LedgerHistory({k: v for k, v in row.items() if k not in ("seq", "previous", "hash", "row")})
        elif row.get("row") == "resume":
            if row.get("attempt") != history.attempts or not 0 <= row["from_step"] <= history.last_step + 1:
                raise LedgerError(f"{path}, line {number}: a resume from step {row['from_step']} that cannot follow")
            history.attempts += 1
            history.files = None
            due, begins = {(row["from_step"], 0)} | ({(-1, 0)} if row["from_step"] == 0 else set()), range(0)
            if epoch > 1:  # a run that is continued inside an epoch asks for the whole of it again
                due.add((row["from_step"] - row["from_step"] % epoch, 0))
        elif row.get("row") == "finish":
            history.files = dict(row["files"])  # the last one counts: a finished run may be saved again
        elif history.files is not None:
            raise LedgerError(f"{path}, line {number}: a row after the run had finished")
        elif row.get("row") == "assumption":
            try:
                check(row.get("name"), row.get("status"), row.get("detail"))
            except ValueError as error:
                raise LedgerError(f"{path}, line {number}: {error}") from error
            known = Stated(row["name"], row["status"], row["detail"], True)
            history.assumptions[known.name] = merged(history.assumptions.get(known.name), known)
        elif row.get("row") == "ask":
            place = (row["step"], row["part"])
            follows = place in due or (place[0] in begins and place[1] == 0)
            if row["attempt"] != history.attempts - 1 or not follows:
                places = sorted(due) or [(begins[0], 0), (begins[-1], 0)]
                wanted = " or ".join(f"step {step}, part {part}" for step, part in places)
                raise LedgerError(
                    f"{path}, line {number}: step {place[0]}, part {place[1]} where {wanted} was due: a gap or a reuse"
                )
            question = _question(path, number, row)
            history.asks[question.during(row["attempt"])] += 1
            history.paid[place] = question
            epoch = getattr(question, "steps", 1)  # a question about a whole epoch is due again when that has ended
            history.last_step = max(history.last_step, place[0] + epoch - 1)
            due, begins = {(place[0], place[1] + 1), (place[0] + 1, 0)}, range(0)
            if epoch > 1:
                due, begins = set(), range(place[0] + 1, place[0] + epoch + 1)
        else:
            raise LedgerError(f"{path}, line {number}: unknown row {row.get('row')!r}")
        history.heads.append(row["hash"])
    if history is None:
        raise LedgerError(f"{path}: the ledger is empty")
    return history


def _rows(path: Path, text: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LedgerError(f"{path}, line {number}: not JSON ({error})") from error
        except RecursionError:
            row = None
        if row is None or not _nested_within(row, DEEPEST):
            raise LedgerError(
                f"{path}, line {number}: not a row, or lists and objects are nested deeper than {DEEPEST}"
            )
        if not isinstance(row, dict):
            raise LedgerError(f"{path}, line {number}: not a ledger row")
        yield row


DEEPEST = 32
"""Lists and objects inside each other in a row; no run writes more."""


def _nested_within(value: object, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (most > 0 and all(_nested_within(each, most - 1) for each in inner))


def _check_form(path: Path, number: int, row: dict[str, object]) -> None:
    for name, fits in FORMS.get(str(row.get("row")), {}).items():
        if name not in row and row["row"] != "open":
            raise LedgerError(f"{path}, line {number}: {name!r} is missing")
        if name in row and not fits(row[name]):
            shown = repr(row[name])
            shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
            raise LedgerError(f"{path}, line {number}: {name} is {shown}, which no run writes")


def _question(path: Path, number: int, row: dict[str, object]) -> Question:
    if row.get("multiplier") == inf:
        raise LedgerError(f"{path}, line {number}: multiplier is inf, which no run writes")
    try:
        return Question.from_json(row)
    except ValueError as error:
        raise LedgerError(f"{path}, line {number}: {' '.join(str(error).split())}") from error


def _check_chain(path: Path, number: int, row: dict[str, object], history: LedgerHistory | None) -> None:
    head = history.head if history else GENESIS
    if row.get("seq") != number - 1:
        raise LedgerError(f"{path}, line {number}: sequence number {row.get('seq')} where {number - 1} was due: a gap")
    if row.get("previous") != head:
        raise LedgerError(f"{path}, line {number}: does not follow the line before it: edited, removed or reordered")
    if row.get("hash") != _seal({k: v for k, v in row.items() if k != "hash"}):
        raise LedgerError(f"{path}, line {number}: its hash does not match its content: edited")
