"""What has been spent on one dataset, by all runs together? A book: reservations, charges and refunds, in one file."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.odometers_and_filters import within
from vestige.accounting.rdp import Array
from vestige.accounting.theorems import History
from vestige.budget import prices
from vestige.budget.filters import RenyiFilter, Slot, SlotPlan, Weights
from vestige.budget.person_and_process import has_ended, person, this_process
from vestige.budget.storage import Appending, BookError, BookFile, Row
from vestige.checks import check_delta, check_epsilon, check_number, check_share_of_delta, require, require_line
from vestige.priced_questions import BudgetSpent, Gaussian, PureLoss, Question, SampledGaussian

VERSION = 1
UNITS = ("row", "user")
EXTERNAL_SHARE = 0.01
"""The share of delta that is set aside for entries by hand, unless another is given."""
MOST_NOISE = 20.0
"""A refusal suggests up to so many times the noise."""
TOTAL_EVERY = 1000
"""Rows between two that hold the sum of all before them, so that a long book opens without reading all of it."""


@dataclass(frozen=True)
class Terms:
    """What is fixed when a book is opened."""

    epsilon: float
    delta: float
    unit: str = "row"
    adjacency: str = "zero-out"
    external_delta: float = 0.0
    """Set aside for the deltas of entries by hand."""
    weights: Weights | None = None
    slots: tuple[Slot, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """The identity of the rows: how many, the hash of all their hashes, and the key's fingerprint."""
    parts: tuple[str, ...] = ()
    """Disjoint parts of the rows, by a public property of each row: what is asked about one costs no other anything."""

    @property
    def mode(self) -> str:
        return "slots" if self.slots else "filter"

    def to_json(self) -> Row:
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "mode": self.mode,
            "external_delta": self.external_delta,
            "data": dict(self.data),
            **({"filter": self.weights.to_json()} if self.weights is not None else {}),
            **({"slots": [slot.to_json() for slot in self.slots]} if self.slots else {}),
            **({"parts": list(self.parts)} if self.parts else {}),
        }

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Terms:
        if row["unit"] not in UNITS or row["adjacency"] not in prices.ADJACENCIES:
            raise BookError(f"the book protects {row['unit']!r} by {row['adjacency']!r}: another version wrote it")
        if ("filter" in row) == bool(row.get("slots")) or not 0 <= row["external_delta"] < row["delta"] < 1:
            raise BookError("the book's first row does not say how delta is divided, or by slots")
        return Terms(
            epsilon=row["epsilon"],
            delta=row["delta"],
            unit=row["unit"],
            adjacency=row["adjacency"],
            external_delta=row["external_delta"],
            weights=Weights.from_json(row["filter"]) if "filter" in row else None,
            slots=tuple(Slot.from_json(each) for each in row.get("slots", ())),
            data=row["data"],
            parts=tuple(row.get("parts", ())),
        )


def terms(
    epsilon: float,
    delta: float,
    *,
    unit: str = "row",
    adjacency: str = "zero-out",
    expect: History | None = None,
    slots: tuple[Slot, ...] = (),
    external_share: float | None = None,
    weight: float | None = None,
    data: Mapping[str, object] | None = None,
    parts: Sequence[str] = (),
) -> Terms:
    """The terms of a new book, checked. `expect` is what a usual run asks: it chooses the order that is favoured.
    `parts` are names of disjoint parts of the rows, by a property of each row that is public."""
    check_epsilon(epsilon)
    check_delta(delta)
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} must be one of {', '.join(UNITS)}: what the book protects one of")
    if adjacency not in prices.ADJACENCIES:
        raise ValueError(f"adjacency={adjacency!r} must be one of {', '.join(prices.ADJACENCIES)}")
    _check_parts(parts, unit, adjacency, bool(slots))
    if slots:
        for name, value in (("expect", expect), ("external_share", external_share), ("weight", weight)):
            if value is not None:
                raise ValueError(f"{name}: a book of slots has all that it may be asked in its slots; leave it out")
        plan = SlotPlan(slots, delta, adjacency)
        cost = plan.epsilon()
        if not cost <= epsilon:
            raise ValueError(
                f"epsilon={epsilon} does not hold the slots: together they cost {cost:.4f} at delta={delta:g}; allow "
                "more, or take fewer or noisier slots"
            )
        return Terms(epsilon, delta, unit, adjacency, 0.0, None, slots, data or {})
    share = EXTERNAL_SHARE if external_share is None else external_share
    check_number("external_share", share)
    require("external_share", share, 0 <= share < 1, "lie in [0, 1): the share of delta for entries by hand")
    aside = share * delta
    weights = Weights.choose(
        epsilon, delta - aside, expect, adjacency, **({} if weight is None else {"weight": weight})
    )
    return Terms(epsilon, delta, unit, adjacency, aside, weights, (), data or {}, tuple(parts))


def _check_parts(parts: Sequence[str], unit: str, adjacency: str, slots: bool) -> None:
    """Refuse parts where one unit may be in two of them."""
    if not parts:
        return
    if unit != "row":
        raise ValueError(f"parts with unit={unit!r}: one {unit} may have rows in several parts; leave the parts out")
    if adjacency != "zero-out":
        raise ValueError(
            f"parts with adjacency={adjacency!r}: the row that replaces another may lie in another part; leave one out"
        )
    if slots:
        raise ValueError("parts: a book of slots has all that it may be asked in its slots; leave the parts out")
    if len(set(parts)) < len(parts) or not all(parts):
        raise ValueError("parts: two have the same name, or one has none; give each its own")


@dataclass
class Reservation:
    """What a run may ask, and what of it was charged before it was asked."""

    id: str
    person: str
    purpose: str
    at: str
    plan: Counter[Question]
    holder: dict[str, object] | None
    slot: int | None = None
    part: str = ""
    """Of the rows, the one that it is about; "" is all of them."""
    facts: dict[str, Any] = field(default_factory=dict)
    charged: Counter[Question] = field(default_factory=Counter)
    heads: list[tuple[int, str]] = field(default_factory=list)
    """The run's ledger at each charge: its number of rows, and the hash of the last."""
    blocks: list[tuple[int, Counter[Question]]] = field(default_factory=list, compare=False)
    """Each charge, and how many rows the run's ledger had then; of a whole reading only."""
    asked: Counter[Question] | None = None
    """What was asked in all, once it is closed."""
    closed_at: str | None = None
    why: str | None = None
    ledger_end: tuple[int, str] | None = None

    @property
    def counted(self) -> Counter[Question]:
        """What it counts for: all that is reserved or charged, until it is closed."""
        return self.asked if self.asked is not None else self.plan | self.charged

    @property
    def left(self) -> Counter[Question]:
        return self.plan - self.charged

    def pays_for(self, answer: str, question: Question) -> bool:
        """Whether it was charged for an answer, by its name: for asking it, or for the run that it was first given."""
        named = answer == self.facts.get("run") or answer in self.facts.get("answers", ())
        return named and (self.charged if self.asked is None else self.asked)[question] > 0

    def take(self, row: Row, blocks: bool = False) -> None:
        """Take in a row about it; with `blocks` each charge is kept, too."""
        kind = row["row"]
        if kind == "reserve":  # a resumed run
            self.plan.update(prices.from_json(row["plan"]))
            self.holder, self.facts = row.get("holder"), {**self.facts, **row.get("facts", {})}
        elif kind == "charge":
            asks = prices.from_json(row["asks"])
            self.charged.update(asks)
            if blocks:
                self.blocks.append((row["ledger"][0] if row.get("ledger") else 0, asks))
            if row.get("ledger"):
                self.heads.append((row["ledger"][0], row["ledger"][1]))
        else:
            asked = prices.from_json(row["asked"])
            if not within(asked, self.charged):
                raise BookError(f"{self.id} has a {kind!r} row with more than was charged")
            if kind == "close":
                self.asked, self.closed_at, self.why = asked, row["at"], row["why"]
                self.ledger_end = (row["ledger"][0], row["ledger"][1]) if row.get("ledger") else None
                return
            if blocks:  # a run pauses: what it charged ahead and did not ask is only reserved again
                ahead = Counter(self.charged)
                ahead.subtract(asked)
                self.blocks.append((row["ledger"][0], Counter({each: -count for each, count in ahead.items()})))
            self.charged = asked

    def to_json(self) -> Row:
        """As it is while it is open."""
        return {
            "id": self.id,
            "by": self.person,
            "purpose": self.purpose,
            "at": self.at,
            "plan": prices.to_json(self.plan),
            "holder": self.holder,
            "slot": self.slot,
            "part": self.part,
            "facts": self.facts,
            "charged": prices.to_json(self.charged),
            "heads": [list(each) for each in self.heads],
        }

    @staticmethod
    def from_json(row: Row) -> Reservation:
        return Reservation(
            id=row["id"],
            person=row["by"],
            purpose=row["purpose"],
            at=row["at"],
            plan=prices.from_json(row["plan"]),
            holder=row.get("holder"),
            slot=row.get("slot"),
            part=row.get("part", ""),
            facts=row.get("facts", {}),
            charged=prices.from_json(row.get("charged", ())),
            heads=[(rows, head) for rows, head in row.get("heads", ())],
        )


@dataclass(frozen=True)
class External:
    """An entry by hand: what a mechanism outside Vestige spent."""

    person: str
    note: str
    at: str
    epsilon: float
    delta: float
    slot: int | None = None
    part: str = ""

    def __post_init__(self) -> None:
        check_share_of_delta("delta", self.delta)

    @staticmethod
    def from_json(row: Row) -> External:
        told = (row["by"], row["note"], row["at"], row["epsilon"], row["delta"])
        return External(*told, row.get("slot"), row.get("part", ""))


@dataclass(frozen=True)
class Reading:
    """What a book says about itself."""

    epsilon: float
    delta: float
    mode: str
    epsilon_spent: float
    """An odometer's reading: of what was charged. The guarantee is `epsilon`, whatever it reads."""
    epsilon_reserved: float
    """The reading if all that is reserved were asked."""
    external_delta_left: float
    slots_left: int | None = None


class State:
    """A book's rows, taken in one by one; with `whole` every run is kept, otherwise those open and sums of the rest."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.terms: Terms | None = None
        self.id, self.opened_at, self.opened_by = "", "", ""
        self.reservations: dict[str, Reservation] = {}
        """Of a whole reading, all of them."""
        self.open: dict[str, Reservation] = {}
        self.externals: list[External] = []
        self.grants: dict[str, float] = {}
        self.runs: Counter[str] = Counter()
        """Reservations by person."""
        self.assumes: dict[str, None] = {}
        """What single runs assumed, in their order."""
        self.since_total = 0
        self.external_delta = 0.0
        self.spent_slots: set[int] = set()
        """Slots of closed runs that asked something, and of entries by hand."""
        self._closed: list[tuple[str, str, Counter[Question]]] = []
        """Closed runs that are in no sum yet, each with its person and part."""
        self._sums: dict[tuple[str, str], Array] = {}
        """Of closed runs and entries by hand, the Renyi curves by person and part."""

    @property
    def made(self) -> int:
        return self.runs.total()

    def take(self, row: Row) -> None:
        kind = row.get("row")
        self.since_total += 1
        if kind == "open":
            if row.get("version") != VERSION or self.terms is not None:
                raise BookError(f"the book is of version {row.get('version')}, not {VERSION}, or opened twice")
            self.terms, self.id = Terms.from_json(row), row["book"]
            self.opened_at, self.opened_by = row["at"], row["by"]
        elif self.terms is None:
            raise BookError(f"a book begins with an 'open' row, not {kind!r}")
        elif kind == "reserve":
            self._reserve(row)
        elif kind in ("charge", "settle"):
            self._held(row).take(row, self.whole)
        elif kind == "close":
            self._close(row)
        elif kind == "enter":
            entry = External.from_json(row)
            self._require_part(entry.part)
            self.externals += [entry] if self.whole else []
            self.external_delta += entry.delta
            self.spent_slots |= set() if entry.slot is None else {entry.slot}
            self._closed.append((entry.person, entry.part, Counter({PureLoss(entry.epsilon): 1})))
        elif kind == "grant":
            self.grants[row["person"]] = row["epsilon"]
        elif kind == "total":
            self._total(row)
        else:
            raise BookError(f"unknown row {kind!r}: another version wrote it")

    def _require_part(self, part: str) -> None:
        if part and part not in self.book_terms.parts:
            raise BookError(f"the book has no part {part!r}")

    def _held(self, row: Row) -> Reservation:
        held = self.open.get(row["id"])
        if held is None:
            raise BookError(f"reservation {row['id']!r} is not open, and has a {row['row']!r} row")
        return held

    def _reserve(self, row: Row) -> None:
        if row["id"] in self.open:
            self.open[row["id"]].take(row)
            return
        if row["id"] in self.reservations:
            raise BookError(f"reservation {row['id']!r} was closed, and is opened again")
        made = Reservation.from_json(row)
        self._require_part(made.part)
        self.runs[made.person] += 1
        if made.facts.get("assumes"):
            self.assumes.setdefault(made.facts["assumes"])
        self.open[made.id] = made
        if self.whole:
            self.reservations[made.id] = made

    def _close(self, row: Row) -> None:
        held = self._held(row)
        held.take(row)
        del self.open[held.id]
        if held.slot is not None and held.charged:
            self.spent_slots.add(held.slot)
        self._closed.append((held.person, held.part, held.counted))

    def totals(self) -> Row:
        """All that later decisions need of the rows so far."""
        return {
            "row": "total",
            "sums": [[*names, curve.tolist()] for names, curve in self.sums().items()],
            "open": [held.to_json() for held in self.open.values()],
            "grants": self.grants,
            "runs": dict(self.runs),
            "assumes": list(self.assumes),
            "external_delta": self.external_delta,
            "slots": sorted(self.spent_slots),
        }

    def _total(self, row: Row) -> None:
        self.since_total = 0
        if self.whole:  # all rows are here: `verify` compares
            return
        self._sums, self._closed = {(name, part): np.array(curve) for name, part, curve in row["sums"]}, []
        self.open = {each["id"]: Reservation.from_json(each) for each in row["open"]}
        self.grants, self.runs = dict(row["grants"]), Counter(row["runs"])
        self.assumes = dict.fromkeys(row["assumes"])
        self.external_delta, self.spent_slots = row["external_delta"], set(row["slots"])

    # --- what it amounts to -------------------------------------------------------------------------------------------

    @property
    def book_terms(self) -> Terms:
        assert self.terms is not None
        return self.terms

    def sums(self) -> dict[tuple[str, str], Array]:
        """The Renyi curves of all that is closed, by person and part."""
        runs: dict[tuple[str, str], list[Counter[Question]]] = {}
        for name, part, asked in self._closed:
            runs.setdefault((name, part), []).append(asked)
        for names, histories in runs.items():
            curve = prices.total(histories, self.book_terms.adjacency)
            self._sums[names] = self._sums.get(names, np.zeros(len(rdp.ORDERS))) + curve
        self._closed = []
        return self._sums

    def parts(self, part: str = "") -> tuple[str, ...]:
        """The parts whose rows a question about `part` is about: it alone, or all; without parts the rows are one."""
        return (part,) if part else self.book_terms.parts or ("",)

    def curve(self, *, reserved: bool, of: str | None = None, part: str = "") -> Array:
        """The Renyi curve of all that was charged, and reserved, for a row of a part; of one person or of all.

        What was asked about other parts has the same answers with and without that row, so it adds nothing.
        """
        found = np.zeros(len(rdp.ORDERS))
        for (name, about), each in self.sums().items():
            if of in (None, name) and about in ("", part):
                found = found + each
        held = [each for each in self.open.values() if of in (None, each.person) and each.part in ("", part)]
        runs = [each.counted if reserved else each.charged for each in held]
        return found + prices.total(runs, self.book_terms.adjacency)

    def curves(self, *, reserved: bool, of: str | None = None, part: str = "") -> list[Array]:
        """The curve of each part that a question about `part` is about."""
        return [self.curve(reserved=reserved, of=of, part=each) for each in self.parts(part)]

    def filter(self) -> RenyiFilter:
        told = self.book_terms
        assert told.weights is not None
        return RenyiFilter(told.weights, told.epsilon, told.delta - told.external_delta)

    def slot_plan(self) -> SlotPlan:
        told = self.book_terms
        used = {each.slot for each in self.open.values() if each.slot is not None}
        return SlotPlan(told.slots, told.delta, told.adjacency, used | self.spent_slots)

    def reading(self) -> Reading:
        told = self.book_terms
        if told.mode == "slots":
            plan = self.slot_plan()
            asked = {each.slot for each in self.open.values() if each.slot is not None and each.charged}
            spent, reserved = plan.epsilon_of(asked | self.spent_slots), plan.epsilon_of(plan.used)
            return Reading(told.epsilon, told.delta, "slots", spent, reserved, 0.0, len(told.slots) - len(plan.used))
        meter = self.filter()
        spent, reserved = (meter.highest(self.curves(reserved=each)) for each in (False, True))
        return Reading(told.epsilon, told.delta, "filter", spent, reserved, self.external_delta_left)

    @property
    def external_delta_left(self) -> float:
        return max(0.0, self.book_terms.external_delta - self.external_delta)


class Book:
    """A book that is open: read it, reserve in it, charge, refund.

    Formal guarantees: all that was answered after a charge of this book is (epsilon, delta)-private together, for
    leaving out one unit of the data (or replacing one, as the book says), whichever runs asked and whatever depended on
    earlier answers. Each charge is on disk before its answer exists; a crash never gives anything back.
    """

    def __init__(self, path: str | Path, *, whole: bool = False) -> None:
        """Read a book that is there. Every byte is checked; with `whole` every run is also kept, to be listed."""
        self.path = Path(path)
        self._file = BookFile(self.path, whole)
        self.state = State(whole)
        self.refresh()

    @staticmethod
    def create(path: str | Path, told: Terms) -> Book:
        """Open a new book; a file that is there already is left alone."""
        row = {
            "row": "open",
            "version": VERSION,
            "book": secrets.token_hex(8),
            "at": now(),
            "by": person(),
            **told.to_json(),
        }
        BookFile(Path(path)).create(row)
        return Book(path)

    @property
    def head(self) -> str:
        """The hash of the last row: publish it, and no earlier copy of the book can pass for this one."""
        return self._file.head

    @property
    def terms(self) -> Terms:
        return self.state.book_terms

    def refresh(self) -> None:
        """Take in what other processes have written."""
        self._take(self._file.new_rows())

    def _take(self, rows: Sequence[Row]) -> None:
        for row in rows:
            try:
                self.state.take(row)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                place = f"{self.path}, row {row.get('seq')}"
                raise BookError(f"{place} is none that this version writes: {error}") from error

    def reading(self) -> Reading:
        return self.state.reading()

    def listed(self, last: int | None = None) -> tuple[list[Reservation], list[External]]:
        """Runs and entries by hand, in their order; `last`: so many runs that were reserved last, and those open."""
        if self.state.whole:
            return list(self.state.reservations.values()), self.state.externals
        left = inf if last is None else last
        made: dict[str, Reservation] = {}
        entries: list[External] = []

        def enough(row: Row) -> bool:
            nonlocal left
            left -= row["row"] in ("reserve", "enter") and "by" in row
            return left <= 0

        for row in self._file.last_rows(enough):
            if row["row"] == "reserve" and "by" in row:
                made[row["id"]] = Reservation.from_json(row)
            elif row["row"] == "enter":
                entries.append(External.from_json(row))
            elif row.get("id") in made:
                made[row["id"]].take(row)
        older = [each for name, each in self.state.open.items() if name not in made]
        return [*older, *made.values()], entries

    @contextmanager
    def _held(self) -> Iterator[Writer]:
        """The book, held by this process alone, with all rows of others taken in."""
        with self._file.exclusive() as file:
            self._take(file.rows)
            yield Writer(self, file)

    # --- spending -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        plan: History,
        *,
        purpose: str,
        by: str | None = None,
        slot: str | None = None,
        part: str = "",
        facts: Mapping[str, object] | None = None,
        held: bool = True,
    ) -> str:
        """Set aside what a run may ask; `BudgetSpent` where it does not fit beside all that is spent and reserved.

        With `held` it belongs to this process: when that has ended, what was not charged is freed for other runs.
        """
        who, wanted = by or person(), Counter(plan)
        require_line("purpose", purpose)
        require_line("person", who)
        with self._held() as writer:
            place = writer.admit(wanted, who, slot, part)
            return writer.reserve(wanted, who, purpose, place, part, facts, held)

    def use(self, name: str, plan: History, *, purpose: str, facts: Mapping[str, object], part: str = "") -> str:
        """Make a run's own reservation of one that was made by hand, in which it fits: with at most its rate and steps
        and at least its noise. What the run does not need comes back."""
        wanted = Counter(plan)
        with self._held() as writer:
            by_hand = self.state.open.get(name)
            if by_hand is None:
                raise ValueError(f"reservation={name!r} is not open in {self.path}: vestige budget show {self.path}")
            if by_hand.holder is not None or by_hand.charged:
                raise ValueError(f"reservation={name!r} is a run's: resume that run, or reserve another")
            if not prices.fits(wanted, by_hand.plan):
                raise ValueError(
                    f"reservation={name!r} does not hold this run: it fits with at most the rate and steps, and at "
                    "least the noise, that were reserved"
                )
            if by_hand.part not in ("", part):
                raise ValueError(f"reservation={name!r} is about the part {by_hand.part!r} alone, and this run is not")
            writer.close(by_hand, None, None, "used by a run")
            return writer.reserve(wanted, by_hand.person, purpose, by_hand.slot, part, facts, True)

    def note(self, name: str, facts: Mapping[str, object]) -> None:
        """Write down something about a reservation that is open."""
        with self._held() as writer:
            if name in self.state.open:
                holder = self.state.open[name].holder
                writer.write({"row": "reserve", "id": name, "plan": [], "holder": holder, "facts": dict(facts)})

    def take_over(self, name: str, facts: Mapping[str, object] | None = None) -> bool:
        """Continue a reservation in this process, as a resumed run does; False where it was closed."""
        with self._held() as writer:
            if name not in self.state.open:
                return False
            writer.write(
                {"row": "reserve", "id": name, "plan": [], "holder": this_process(), "facts": dict(facts or {})}
            )
        return True

    def charge(self, name: str, asks: History, ledger: tuple[int, str] | None = None) -> None:
        """Record what is about to be asked, durably: within its reservation, or beyond it where that is admitted."""
        with self._held() as writer:
            held = self.state.open.get(name)
            if held is None:
                raise BudgetSpent(
                    f"reservation {name} of {self.path} was closed, so nothing more may be asked under it: resume the "
                    "run, which reserves again"
                )
            beyond = (held.charged + Counter(asks)) - (held.plan | held.charged)
            if beyond:
                writer.admit_more(held, beyond, held.charged + Counter(asks))
            row = {"row": "charge", "id": name, "asks": prices.to_json(asks)}
            writer.write(row if ledger is None else {**row, "ledger": list(ledger)})

    def settle(self, name: str, unasked: History, ledger: tuple[int, str]) -> None:
        """Say, by the process that charged it, what of that was not asked: it is only reserved again."""
        with self._held() as writer:
            held = self.state.open.get(name)
            if held is not None:
                final = prices.with_whole(held.charged - Counter(unasked), held.charged)
                if final != held.charged:
                    row = {"row": "settle", "id": name, "asked": prices.to_json(final), "ledger": list(ledger)}
                    writer.write(row)

    def close(
        self, name: str, unasked: History | None = None, ledger: tuple[int, str] | None = None, why: str = "finished"
    ) -> None:
        """End a reservation: what was not charged comes back; of what was charged, `unasked`, too.

        `unasked` is for the process that charged it, which knows. Where another has taken the reservation over (a copy
        of the run's folder was resumed), what that one charged stays.
        """
        with self._held() as writer:
            held = self.state.open.get(name)
            if held is not None:
                writer.close(held, unasked, ledger, why)

    def enter(self, epsilon: float, delta: float, note: str, by: str | None = None, part: str = "") -> None:
        """Enter by hand what was spent elsewhere on the same data: any (epsilon, delta)-private answer.

        Formal guarantees: with probability 1 - delta such an answer is epsilon-private (Kairouz, Oh & Viswanath 2015):
        its Renyi curve is that of randomized response, and the deltas add up to no more than was set aside for them.
        """
        check_number("epsilon", epsilon)
        require("epsilon", epsilon, epsilon >= 0, "not be negative")
        check_share_of_delta("delta", delta)
        who, asks = by or person(), Counter[Question]({PureLoss(float(epsilon)): 1})
        require_line("note", note)
        require_line("person", who)
        with self._held() as writer:
            place = writer.admit(asks, who, None, part, delta)
            row: Row = {"row": "enter", "by": who, "note": note, "epsilon": float(epsilon), "delta": float(delta)}
            writer.write({**row, **({} if place is None else {"slot": place}), **({"part": part} if part else {})})

    def grant(self, who: str, epsilon: float, by: str | None = None) -> None:
        """Let a person spend up to a reading of `epsilon`. Once there is a grant, only people with a grant may
        spend."""
        check_number("epsilon", epsilon)
        require(
            "epsilon",
            epsilon,
            0 <= epsilon <= self.terms.epsilon,
            f"lie between 0 and the book's {self.terms.epsilon:g}",
        )
        require_line("person", who)
        with self._held() as writer:
            writer.write({"row": "grant", "person": who, "epsilon": float(epsilon), "by": by or person()})

    def affords(self, plan: History, part: str = "") -> int:
        """How many runs like this one may still be made, about a part of the rows or about all."""
        if self.terms.mode == "slots":
            slots = self.state.slot_plan()
            found = 0
            while (place := slots.smallest_fitting(plan, 0.0, None)) is not None:
                slots.used.add(place)
                found += 1
            return found
        curves, meter = self.state.curves(reserved=True, part=part), self.state.filter()
        each = prices.total([plan], self.terms.adjacency)
        if not each.any():
            return 0
        low, high = 0, 1
        while meter.highest(curves, high * each) <= meter.epsilon:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if meter.highest(curves, middle * each) <= meter.epsilon else (low, middle)
        return low


class Writer:
    """A book while it is held: decisions and the rows that record them."""

    def __init__(self, book: Book, file: Appending) -> None:
        self._book, self._file = book, file
        self._state = book.state

    def write(self, row: Row) -> None:
        self._state.take(self._file.append({"at": now(), **row}))

    def reserve(
        self,
        plan: Counter[Question],
        who: str,
        purpose: str,
        slot: int | None,
        part: str,
        facts: Mapping[str, object] | None,
        held: bool,
    ) -> str:
        """Write a reservation that was admitted; its id."""
        name = f"r{self._state.made + 1}-{secrets.token_hex(3)}"
        self.write(
            {
                "row": "reserve",
                "id": name,
                "by": who,
                "purpose": purpose,
                "plan": prices.to_json(plan),
                **({"holder": this_process()} if held else {}),
                **({} if slot is None else {"slot": slot}),
                **({"part": part} if part else {}),
                **({} if facts is None else {"facts": dict(facts)}),
            }
        )
        return name

    def close(self, held: Reservation, unasked: History | None, ledger: tuple[int, str] | None, why: str) -> None:
        final = prices.with_whole(held.charged - Counter(unasked or {}), held.charged)
        row: Row = {"row": "close", "id": held.id, "asked": prices.to_json(final), "why": why}
        self.write(row if ledger is None else {**row, "ledger": list(ledger)})
        if self._state.since_total >= TOTAL_EVERY:
            self.write({**self._state.totals(), "prefix": self._file.hash_so_far()})

    def admit(self, plan: Counter[Question], who: str, slot: str | None, part: str, delta: float = 0.0) -> int | None:
        """Whether a plan fits; in a book of slots, which one it takes. `BudgetSpent` says what is left."""
        told = self._book.terms
        if part and part not in told.parts:
            there = f"its parts are {', '.join(told.parts)}" if told.parts else "it has no parts; leave it out"
            raise ValueError(f"part={part!r} is none of {self._book.path}: {there}")
        if told.mode == "slots":
            place = self._state.slot_plan().smallest_fitting(plan, delta, slot)
            if place is None and self._free_what_ended():
                place = self._state.slot_plan().smallest_fitting(plan, delta, slot)
            if place is None:
                raise BudgetSpent(self._no_slot(slot))
            self._check_grant(plan, who, part)
            return place
        if slot is not None:
            raise ValueError(f"slot={slot!r}: {self._book.path} is a book without slots; leave it out")
        if delta > self._state.external_delta_left:
            raise BudgetSpent(
                f"delta={delta:g} is more than the {self._state.external_delta_left:.3g} that are left of what "
                f"{self._book.path} set aside for entries by hand when it was opened (--external-share)"
            )
        self._check_grant(plan, who, part)
        self._require_room(plan, part)
        return None

    def admit_more(self, held: Reservation, beyond: Counter[Question], in_all: Counter[Question]) -> None:
        """Whether a run may ask more than it reserved."""
        if self._book.terms.mode == "slots":
            assert held.slot is not None
            slot = self._book.terms.slots[held.slot]
            if not prices.fits(in_all, slot.asks):
                raise BudgetSpent(f"this run would ask more than its slot {slot.name!r} of {self._book.path} allows")
            return
        self._check_grant(beyond, held.person, held.part)
        self._require_room(beyond, held.part)

    def _require_room(self, plan: Counter[Question], part: str) -> None:
        state = self._state
        wanted, meter = prices.total([plan], self._book.terms.adjacency), state.filter()
        if meter.highest(state.curves(reserved=True, part=part), wanted) <= meter.epsilon:
            return
        if self._free_what_ended() and (meter.highest(state.curves(reserved=True, part=part), wanted) <= meter.epsilon):
            return
        raise BudgetSpent(refusal(self._book, plan, part))

    def _check_grant(self, plan: Counter[Question], who: str, part: str) -> None:
        state = self._state
        if not state.grants:
            return
        if not state.grants.get(who):
            raise BudgetSpent(
                f"{who} has no grant in {self._book.path}: vestige budget grant {self._book.path} {who} --epsilon E"
            )
        if self._book.terms.mode == "slots":  # which run each of them is was fixed when the book was opened
            return
        curves, wanted = (
            state.curves(reserved=True, of=who, part=part),
            prices.total([plan], self._book.terms.adjacency),
        )
        spent, then = (state.filter().highest(curves, more) for more in (0.0, wanted))
        if then > state.grants[who]:
            raise BudgetSpent(
                f"{who} was granted {state.grants[who]:g} of {self._book.path} and has spent or reserved {spent:.3f}: "
                f"this would make it {then:.3f}"
            )

    def _free_what_ended(self) -> bool:
        """Close the reservations of processes that have ended. What they charged stays: each charge was written before
        its answer, so nothing beyond it was answered."""
        ended = [held for held in self._state.open.values() if held.holder and has_ended(held.holder)]
        for held in ended:
            self.close(held, None, None, "its process ended")
        return bool(ended)

    def _no_slot(self, slot: str | None) -> str:
        told, plan = self._book.terms, self._state.slot_plan()
        free = [each.name for place, each in enumerate(told.slots) if place not in plan.used]
        wanted = "" if slot is None else f" {slot!r}"
        return (
            f"no free slot{wanted} of {self._book.path} holds this run: {len(free)} of {len(told.slots)} are free"
            + (f" ({', '.join(free[:5])}{', ...' if len(free) > 5 else ''})" if free else "")
            + "; a run fits a slot of at least its rate and steps and at most its noise"
        )


def refusal(book: Book, plan: History, part: str = "") -> str:
    """One line: why a run does not fit, what is left, and what that would afford."""
    state, told, meter = book.state, book.terms, book.state.filter()
    curves, each = state.curves(reserved=True, part=part), prices.total([plan], told.adjacency)
    before, then = meter.highest(curves), meter.highest(curves, each)
    share = _largest(lambda share: meter.highest(curves, share * each) <= told.epsilon)
    steps = {type(question): count for question, count in plan.items()}
    part_of_it = int(share * max(steps.values())) if len(steps) == 1 else 0
    instead = f"{part_of_it} of its {max(steps.values())} steps" if part_of_it else f"{share:.0%} of such a run"
    if noisier := _noisier(
        plan, lambda asks: meter.highest(curves, prices.total([asks], told.adjacency)), told.epsilon
    ):
        instead += f", or all of it with {noisier:.3g} times the noise"
    waiting = f", {len(state.open)} of them still open" if state.open else ""
    of_part = f" (part {part!r})" if part else ""
    return (
        f"the budget of {book.path}{of_part} does not hold this run: epsilon {told.epsilon:g} at delta {told.delta:g}, "
        f"{before:.3f} spent or reserved by {state.made} runs{waiting}, {max(0.0, told.epsilon - before):.3f} left; "
        f"{then:.3f} with this one; what is left affords {instead}"
    )


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest share in [0, 1] at which something holds that holds below it, too."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _noisier(plan: History, reading: Callable[[Counter[Question]], float], epsilon: float) -> float | None:
    """How many times the noise would make a plan fit, rounded up to a hundredth; None where none does, or the plan has
    questions of other kinds."""
    if not all(isinstance(question, SampledGaussian | Gaussian) for question in plan):
        return None

    def fits(times: float) -> bool:
        asks: Counter[Question] = Counter()
        for question, count in plan.items():
            assert isinstance(question, SampledGaussian | Gaussian)
            asks[replace(question, multiplier=times * question.multiplier)] += count
        return reading(asks) <= epsilon

    if not plan or not fits(MOST_NOISE):
        return None
    share = _largest(lambda share: not fits(1 + share * (MOST_NOISE - 1)))
    return ceil(100 * (1 + share * (MOST_NOISE - 1)) + 1) / 100


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
