"""Does a book hold what its runs asked? Every admission is decided again, and every run's ledger is held against it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vestige.accounting.ledger import LedgerError, LedgerHistory, read
from vestige.accounting.odometers_and_filters import within
from vestige.budget import prices
from vestige.budget.book import Book, Reading, Reservation, State, Terms
from vestige.budget.filters import SlotPlan
from vestige.budget.storage import BookError, BookFile, Row
from vestige.priced_questions import ExponentialMechanism, PureLoss, Question
from vestige.units import Users

ROUNDING = 1e-9
"""By how much sums of prices may differ from one machine to another, relative to themselves."""


@dataclass(frozen=True)
class Verdict:
    """What was checked."""

    reading: Reading
    head: str
    rows: int
    runs: int
    """Ledgers that were held against the book."""
    without_ledger: tuple[str, ...] = ()
    """Entries that left no ledger, or are entries by hand: they count as the book says."""
    unchecked: tuple[str, ...] = ()
    """Runs whose ledgers were not given."""

    def to_json(self) -> dict[str, object]:
        return {
            "verified": True,
            "head": self.head,
            "rows": self.rows,
            "runs": self.runs,
            "without_ledger": list(self.without_ledger),
            "unchecked": list(self.unchecked),
            "epsilon": self.reading.epsilon,
            "delta": self.reading.delta,
            "epsilon_spent": self.reading.epsilon_spent,
        }


def verify(path: str | Path, runs: Sequence[str | Path] = (), head: str | None = None) -> Verdict:
    """Check a book, and the runs that were charged to it; `BookError` at the first contradiction.

    Of the book: the chain of its rows, that every reservation and charge was admitted by the filter or the slots as
    they were fixed at its opening, and its sums. With `runs`, folders or ledgers: each was charged to this book, before
    each answer and for all that it asked; none is missing, and none is there twice. `head` is a hash that was published
    when the book ended with it: a book that was rolled back, or forked before it, does not contain it.
    """
    path = Path(path)
    file = BookFile(path, whole=True)
    rows = file.new_rows()
    if head is not None:
        _require_head(path, head)
    state = State(whole=True)
    for number, row in enumerate(rows, 1):
        try:
            _check_admitted(state, row)
            state.take(row)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BookError(f"{path}, line {number}: {error}") from error
    columns = sorted({str(each.facts.get("user_column", "")) for each in state.reservations.values()} - {""})
    if len(columns) > 1:
        raise BookError(f"{path}: its runs hid users of several columns, {', '.join(columns)}: no user is all of them")
    made = [each for each in state.reservations.values() if each.charged]
    with_ledger = {each.id for each in made if "path" in each.facts}
    seen: set[str] = set()
    for run in runs:
        seen |= _check_run(path, state, Path(run), seen)
    missing = sorted(with_ledger - seen)
    if runs and missing:
        held = state.reservations[missing[0]]
        raise BookError(
            f"{path}: {held.id} ({held.purpose}, {held.person}) was charged, and its run is missing: give "
            f"{held.facts['path']}, too"
        )
    reading = state.reading()
    if max(reading.epsilon_spent, reading.epsilon_reserved) > reading.epsilon * (1 + ROUNDING):
        raise BookError(f"{path}: epsilon {reading.epsilon_spent:.4f} is spent, beyond the book's {reading.epsilon:g}")
    entries = [f"{each.note} ({each.person})" for each in state.externals]
    without = [f"{each.id} ({each.purpose}, {each.person})" for each in made if each.id not in with_ledger | seen]
    return Verdict(reading, file.head, file.count, len(runs), (*without, *entries), tuple(missing))


def _require_head(path: Path, head: str) -> None:
    wanted = head.strip().lower().encode()
    if len(wanted) < 16:
        raise ValueError(f"head={head!r} must be a hash, or 16 or more of its first digits")
    if not any(line[-66:-2].startswith(wanted) for line in path.read_bytes().split(b"\n")):
        raise BookError(f"{path} does not contain the row {head[:16]}...: it was rolled back, cut or forked before it")


# --- the book by itself -----------------------------------------------------------------------------------------------


def _check_admitted(state: State, row: Row) -> None:
    """Decide again what a row records."""
    kind = row.get("row")
    if kind == "reserve" and row["plan"]:
        _require_admitted(state, prices.from_json(row["plan"]), row.get("slot"), row.get("part", ""), 0.0)
    elif kind == "enter":
        asks = Counter[Question]({PureLoss(row["epsilon"]): 1})
        _require_admitted(state, asks, row.get("slot"), row.get("part", ""), row["delta"])
    elif kind == "charge":
        held = state.open.get(row["id"])
        asks = prices.from_json(row["asks"])
        if held is not None and held.slot is not None:
            if not prices.fits(held.charged + asks, state.book_terms.slots[held.slot].asks):
                raise BookError(f"{held.id} was charged more than its slot allows")
        elif held is not None and (beyond := (held.charged + asks) - (held.plan | held.charged)):
            _require_admitted(state, beyond, None, held.part, 0.0)
    elif kind == "total":
        _check_total(state, row)
    elif kind == "open" and (told := Terms.from_json(row)).slots:
        cost = SlotPlan(told.slots, told.delta, told.adjacency).epsilon()
        if cost > told.epsilon * (1 + ROUNDING):
            raise BookError(f"the slots cost {cost:.4f} together, beyond epsilon {told.epsilon:g}")


def _require_admitted(state: State, asks: Counter[Question], slot: int | None, part: str, delta: float) -> None:
    told = state.book_terms
    if told.mode == "slots":
        if slot is None or slot in state.slot_plan().used:
            raise BookError("a slot is used twice, or none is named")
        chosen = told.slots[slot]
        if delta > chosen.delta or not prices.fits(asks, chosen.asks):
            raise BookError(f"what was admitted does not fit the slot {chosen.name!r}")
        return
    curves = state.curves(reserved=True, part=part)
    reading = state.filter().highest(curves, prices.total([asks], told.adjacency))
    if reading > told.epsilon * (1 + ROUNDING):
        raise BookError(f"what was admitted makes the reading {reading:.4f}, beyond epsilon {told.epsilon:g}")
    if delta > state.external_delta_left * (1 + ROUNDING):
        raise BookError("the deltas of entries by hand are more than was set aside for them")


def _check_total(state: State, row: Row) -> None:
    """A sum must be that of the rows before it."""
    ours = state.totals()
    for name in ("runs", "grants", "slots", "assumes", "open"):
        if ours[name] != row[name]:
            raise BookError(f"a sum says {name} {row[name]}, and the rows before it {ours[name]}")
    if not np.isclose(ours["external_delta"], row["external_delta"], rtol=ROUNDING, atol=0.0):
        raise BookError("a sum has another delta for entries by hand than the rows before it")
    theirs = {(name, part): curve for name, part, curve in row["sums"]}
    if theirs.keys() != state.sums().keys() or not all(
        np.allclose(curve, theirs[names], rtol=ROUNDING, atol=0.0) for names, curve in state.sums().items()
    ):
        raise BookError("a sum is not that of the rows before it")


# --- the runs ---------------------------------------------------------------------------------------------------------


def _check_run(book: Path, state: State, run: Path, seen: set[str]) -> set[str]:
    """Hold a run's ledger against the book; the reservations that are its own."""
    if (run / "budget.json").exists():
        return _check_comparison(book, state, run, seen)
    ledger = run / "ledger.jsonl" if run.is_dir() else run
    if not ledger.is_file():
        raise ValueError(f"runs: {str(run)!r} is no run: there is no ledger (ledger.jsonl) in it")
    try:
        history = read(ledger)
    except LedgerError as error:
        raise BookError(str(error)) from error
    entry = history.facts.get("budget")
    if entry is None:
        raise BookError(f"{run}: this run was not charged to any book")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("book", "run")):
        raise BookError(f"{run}: its ledger does not say which book it was charged to, and as what")
    if entry["book"] != state.id:
        raise BookError(f"{run}: this run was charged to the book {entry['book']}, not to {state.id} ({book})")
    own = [each for each in state.reservations.values() if each.facts.get("run") == entry["run"]]
    if not own:
        raise BookError(f"{book}: nothing was charged for {run}: rows were cut from the book, or it was forked")
    if {each.id for each in own} & seen:
        raise BookError(f"{run}: this run is counted twice: another of the given ones has the same entry {own[0].id}")
    before = [each for each in state.reservations.values() if each.facts.get("run") == entry.get("paid", "")]
    _check_charges(run, state, history, own, before, _asks(ledger))
    return {each.id for each in own}


def _asks(ledger: Path) -> list[tuple[int, Question]]:
    """The questions of a ledger that was checked, and how many rows there are before each."""
    found = []
    for place, line in enumerate(ledger.read_bytes().splitlines()):
        row = json.loads(line)
        if row["row"] == "ask":
            found.append((place, Question.from_json(row).during(row["attempt"])))
    return found


def _check_charges(
    run: Path,
    state: State,
    history: LedgerHistory,
    own: Sequence[Reservation],
    before: Sequence[Reservation],
    asks: Sequence[tuple[int, Question]],
) -> None:
    """Every charge was written at a place of this ledger, and every question was charged before it was asked; what
    was charged `before` for statistics that several runs may use has a ledger of its own."""
    for each in own:
        for rows, head in (*each.heads, *([each.ledger_end] if each.ledger_end else [])):
            if history.heads[rows - 1 : rows] != [head]:
                raise BookError(f"{run}: its ledger is not the one that was charged under {each.id}: cut or replaced")
    rows_per_user = next((each.facts["rows_per_user"] for each in own if "rows_per_user" in each.facts), None)
    users = None if history.facts.get("users") is None else Users.from_json(history.facts["users"])
    unit = state.book_terms.unit
    for answer, epsilon in () if users is None else users.choices:
        choice = ExponentialMechanism(epsilon)
        if not any(each.pays_for(answer, choice) for each in state.reservations.values()):
            raise BookError(f"{run}: the choice of its bound on users' rows, at epsilon {epsilon:g}, was not charged")
    counted = sum((each.counted for each in (*own, *before)), Counter[Question]())
    waiting = sorted((block for each in own for block in each.blocks), key=lambda block: -block[0])
    asked, charged = Counter[Question](), sum((each.counted for each in before), Counter[Question]())
    for place, question in asks:
        while waiting and waiting[-1][0] <= place:
            charged.update(waiting.pop()[1])
        [(same, _)] = prices.for_unit({question: 1}, users, unit, rows_per_user).items()
        asked[same] += 1
        if asked[same] > charged[same]:
            raise BookError(
                f"{run}, line {place + 1}: {same!r} was asked {asked[same]} times, and charged {charged[same]} before"
            )
    if not within(asked, counted):
        raise BookError(f"{run}: the book counts less than this run asked")


def _check_comparison(book: Path, state: State, folder: Path, seen: set[str]) -> set[str]:
    """A comparison was charged as a whole: its records must not have been charged more."""
    entry = json.loads((folder / "budget.json").read_text())
    if entry["book"] != state.id:
        raise BookError(
            f"{folder}: this comparison was charged to the book {entry['book']}, not to {state.id} ({book})"
        )
    own = [state.reservations.get(name) for name in entry["reservations"]]
    if not own or None in own:
        raise BookError(f"{book}: nothing was charged for {folder}: rows were cut from the book, or it was forked")
    held = [each for each in own if each is not None]
    if {each.id for each in held} & seen:
        raise BookError(f"{folder}: this comparison is counted twice")
    asked: Counter[Question] = Counter()
    for path in sorted((folder / "runs").glob("*.json")):
        for row in json.loads(path.read_text()).get("charged") or ():
            count = row["count"]
            asked[Question.from_json({key: value for key, value in row.items() if key != "count"})] += count
    counted = sum((prices.as_pairs(each.counted) for each in held), Counter[Question]())
    if not within(prices.as_pairs(asked), counted):
        raise BookError(f"{folder}: its records were charged more than the book counts under {held[0].id}")
    return {each.id for each in held}


@dataclass
class Replay:
    """A book's reading over time."""

    points: list[tuple[str, float, float]] = field(default_factory=list)

    @staticmethod
    def of(book: Book) -> Replay:
        """After each row that changes it: when, what was spent, and what was spent or reserved."""
        state, found = State(whole=True), Replay()
        for row in BookFile(book.path, whole=True).new_rows():
            state.take(row)
            if row["row"] in ("open", "reserve", "close", "enter"):
                reading = state.reading()
                found.points.append((row["at"], reading.epsilon_spent, reading.epsilon_reserved))
        return found
