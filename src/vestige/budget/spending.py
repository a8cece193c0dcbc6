"""How does a run spend from a book? It reserves its plan, charges before it asks, and gives the rest back.

`attach` is all that a command needs: it finds the book, checks whose rows they are, reserves, and lets the run's ledger
charge the book before each question.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vestige.accounting.guarantees import Facts, reasons_against
from vestige.accounting.ledger import Ledger
from vestige.accounting.theorems import History
from vestige.budget import prices
from vestige.budget.book import Book
from vestige.budget.identity import Hashes, RowSet, fingerprint, hashes_of, read_key, require_rows
from vestige.priced_questions import BudgetSpent, ExponentialMechanism, Question
from vestige.units import Users

VARIABLE = "VESTIGE_BUDGET"
BLOCKS = 8
"""A plan is charged in about so many parts, each before the first of its questions: a kill loses one part at most."""
AHEAD = 256
"""The most questions that are charged ahead where there is no plan, or beyond it."""

Candidates = Sequence[tuple[str, Hashes]]
"""Several readings of the same rows, such as a file's columns and what a task makes of them: each with its hashes."""


@dataclass(frozen=True)
class Provenance:
    """Where a run's rows come from, for the book to recognise them. Nothing is read unless there is a book."""

    data: object = None
    """The rows or columns that will be asked about."""
    read: Callable[[bytes], Candidates] | None = None
    """Hashes, under a key, what our own command has read them from; then `data` are known to be made of that."""
    of_file: Callable[[str, bytes], Candidates] | None = None
    """Hashes the rows of a file, for what an account says its data are derived from."""


@dataclass(frozen=True)
class Account:
    """Which book a run is charged to, and how: `budget=Account("people.book", derived_from="people.csv")`."""

    book: str | Path
    derived_from: str | Path | None = None
    """The file that the data were made of, where their rows are features or tokens of the book's rows."""
    slot: str | None = None
    """Of a book of slots: which one."""
    reservation: str | None = None
    """One that was made by `vestige budget reserve`."""
    rows_per_user: int | None = None
    """Of a run about rows in a book of users: the most rows that one user has."""
    person: str | None = None
    user_column: str | None = None
    """Of a book of users: the column that names them. Runs by another column are refused."""
    key: str | Path | None = None
    """The path of the data's key, if it is not the book's."""
    source: Provenance | None = None
    """Set by commands, which know what they read the data from."""


Budget = Account | str | Path | bool | None
"""A book, or BOOK#RESERVATION; None: that of VESTIGE_BUDGET, if it is set; False: none, since another account pays."""


def account_of(budget: Budget) -> Account | None:
    """The account that an argument, or else the environment, names.

    >>> account_of("people.book#r3-a1b2c3").reservation
    'r3-a1b2c3'
    """
    if budget is False:
        return None
    if budget is None:
        named = os.environ.get(VARIABLE, "").strip()
        return account_of(named) if named else None
    if isinstance(budget, Account):
        return budget
    if isinstance(budget, str | Path) and str(budget):
        book, _, reservation = str(budget).partition("#")
        return Account(book, reservation=reservation or None)
    raise ValueError(f"budget={budget!r} must be the file of a book, or vestige.budget.Account(...)")


def of_users(budget: Budget, user_column: str | None) -> Budget:
    """The same account, by the column that names the users of a run, unless it says which."""
    found = account_of(budget)
    if found is None or found.user_column is not None:
        return budget
    return replace(found, user_column=user_column)


class Spending:
    """A run's account while it runs. Its ledger calls `charge` before each question is answered."""

    def __init__(
        self,
        book: Book,
        account: Account,
        plan: History,
        purpose: str,
        users: Users | None,
        run: str,
        before: History,
        spent: History,
    ) -> None:
        """`before`, in the book's questions, was charged under another name and is asked here once more; `spent` is
        what a resumed run has asked. All that is kept here is in the book's questions."""
        self.book, self.account, self.purpose, self.run = book, account, purpose, run
        self._users = users
        self._spent = self._for_book(spent)
        self._before = Counter(before) - self._spent
        self._plan = self._for_book(plan) - self._before
        self.reservation: str | None = None
        self._part = ""
        self._asked: Counter[Question] = Counter()
        self._charged: Counter[Question] = Counter()
        self._process = os.getpid()

    def _for_book(self, asks: History) -> Counter[Question]:
        return prices.for_unit(asks, self._users, self.book.terms.unit, self.account.rows_per_user)

    def reserve(self, path: Path | None, rows: str | None = None, part: str = "") -> None:
        """Reserve the plan, less what was spent of it before, or continue with what this run, or a person, reserved."""
        self._part = part
        facts: dict[str, object] = {"run": self.run, **({} if path is None else {"path": str(path.resolve().parent)})}
        if rows is not None:
            facts["rows"] = rows
        if self._users is not None and self.account.user_column is not None:
            facts["user_column"] = self.account.user_column
        if self.account.rows_per_user is not None:
            facts["rows_per_user"] = self.account.rows_per_user
        unpaid = self._unpaid_choices()
        if unpaid:
            facts["answers"] = list(unpaid)
        choices = Counter(unpaid.values())
        book = self.book
        mine = (each for each in book.state.open.values() if each.facts.get("run") == self.run)
        held = next((each for each in mine if each.part in ("", part)), None)
        if held is not None and book.take_over(held.id, facts):
            self.reservation, self._asked, self._charged = held.id, Counter(held.charged), Counter(held.charged)
        else:
            plan = self._plan - self._spent + choices
            by_hand, slot, person = self.account.reservation, self.account.slot, self.account.person
            if by_hand is not None and not self._spent:
                self.reservation = book.use(by_hand, plan, purpose=self.purpose, facts=facts, part=part)
            else:
                self.reservation = book.reserve(
                    plan, purpose=self.purpose, by=person, slot=slot, part=part, facts=facts
                )
        if choices:
            book.charge(self.reservation, choices)

    def _unpaid_choices(self) -> dict[str, Question]:
        """The choices of bounds on users' rows that this run was given and the book was not charged for, by name."""
        if self._users is None or not self._users.choices:
            return {}
        choices = {answer: ExponentialMechanism(epsilon) for answer, epsilon in self._users.choices}
        made, _ = Book(self.book.path, whole=True).listed()
        return {
            answer: question
            for answer, question in choices.items()
            if not any(each.pays_for(answer, question) for each in made)
        }

    def charge(self, question: Question, ledger: tuple[int, str]) -> None:
        """Make sure that a question is in the book before it is asked; `BudgetSpent` where it is not admitted."""
        if os.getpid() != self._process:
            raise ValueError(
                "budget: a process forked from the one that reserved asks; charge each run in its own process"
            )
        [asked] = self._for_book({question: 1})
        if self._before[asked] > 0:
            self._before[asked] -= 1
            return
        if self.reservation is None:  # it was finished, and is resumed
            self._plan, self._asked, self._charged = Counter(), Counter(), Counter()
            self.reserve(None, part=self._part)
        if self._asked[asked] >= self._charged[asked]:
            self._charge_block(asked, ledger)
        self._asked[asked] += 1

    def _charge_block(self, asked: Question, ledger: tuple[int, str]) -> None:
        assert self.reservation is not None
        plan = self._plan
        left = plan - self._charged
        if isinstance(asked, prices.WHOLE):  # one mechanism over many steps, charged whole; a resumed one begins anew
            like = [count for each, count in plan.items() if type(each) is type(asked)]
            block = Counter[Question]({asked: max([1, *like])})
        elif left[asked]:
            size = -(-sum(plan.values()) // BLOCKS)
            block = Counter[Question]({asked: min(size, left[asked])})
            for each, count in left.items():
                if each != asked and size > sum(block.values()) and not isinstance(each, prices.WHOLE):
                    block[each] = min(count, size - sum(block.values()))
        else:
            block = Counter[Question]({asked: max(1, min(AHEAD, sum(self._asked.values()) // BLOCKS))})
        try:
            self.book.charge(self.reservation, block, ledger)
        except BudgetSpent:
            if sum(block.values()) == 1 or left[asked] or isinstance(asked, prices.WHOLE):
                raise
            block = Counter[Question]({asked: 1})
            self.book.charge(self.reservation, block, ledger)
        self._charged += block

    def finish(self, ledger: tuple[int, str] | None = None) -> None:
        """The run has asked all that it will ask: what it did not ask comes back."""
        atexit.unregister(self.finish)
        if self.reservation is not None and os.getpid() == self._process:
            self.book.close(self.reservation, self._charged - self._asked, ledger)
            self.reservation = None

    def pause(self, ledger: tuple[int, str]) -> None:
        """The run is interrupted, and may be resumed: what was charged ahead is reserved again."""
        if self.reservation is not None and os.getpid() == self._process:
            self.book.settle(self.reservation, self._charged - self._asked, ledger)
            self._charged = prices.with_whole(self._asked, self._charged)


def attach(
    ledger: Ledger,
    budget: Budget,
    planned: History,
    *,
    purpose: str,
    source: Provenance,
    beside: Sequence[Provenance] = (),
    facts: Facts | None = None,
    run: str | None = None,
    spent: History | None = None,
    paid: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Charge a run's ledger to a book: reserve `planned` now, charge before each question, refund at `ledger.finish`.

    Nothing happens where `budget` is None and VESTIGE_BUDGET is not set. `facts` are those of the run's guarantee: a
    run without one is refused; a bound on users' rows that was chosen for it is charged at once, unless the book was
    charged for it before. `beside` are further rows that it asks about. A resumed run gives its `run` and what it has
    `spent`; `paid` is what this returned for questions that were charged before and are asked in this ledger, too.
    Returns what the ledger's first row is to say about the book, under "budget".
    """
    account = account_of(budget)
    if account is None:
        return None
    book = Book(account.book)
    if facts is not None:
        _require_priced(planned, facts)
    known = [require_identity(book, account, each) for each in (source, *beside)]
    part = known[0].part if len({each.part for each in known}) == 1 else ""
    users = None if facts is None else facts.users
    if users is not None and account.user_column is not None:
        _require_same_users(book, account.user_column)
    before, name = _charged_before(book, paid), run or secrets.token_hex(8)
    spending = Spending(book, account, planned, purpose, users, name, before, spent or {})
    spending.reserve(ledger.path, known[0].rows, part)
    ledger.spending = spending
    if ledger.path is None:  # such a run cannot be resumed
        atexit.register(spending.finish)
    entry = {"book": book.state.id, "run": spending.run}
    return {**entry, "paid": paid["run"]} if paid is not None and paid["book"] == entry["book"] else entry


def _require_same_users(book: Book, column: str) -> None:
    """Refuse users of another column than the runs before: what hides one visit does not hide a patient."""
    made, _ = Book(book.path, whole=True).listed()
    first = next((each.facts["user_column"] for each in made if "user_column" in each.facts), column)
    if first != column:
        raise ValueError(
            f"user_column={column!r}: the runs that {book.path} was charged for hid all rows of one {first!r}; name "
            f"the users by the column {first!r}, or keep another book for {column!r}"
        )


def _charged_before(book: Book, paid: Mapping[str, str] | None) -> Counter[Question]:
    """What was asked and charged to this book under another name; nothing where that was another book."""
    if paid is None or paid["book"] != book.state.id:
        return Counter()
    made, _ = Book(book.path, whole=True).listed()
    return sum((each.counted for each in made if each.facts.get("run") == paid["run"]), Counter[Question]())


def continued(begun: Mapping[str, Any], budget: Budget) -> str | None:
    """The name of a resumed run, in the book that it was begun with; ValueError where that is another, or none."""
    entry, account = begun.get("budget"), account_of(budget)
    if entry is None and account is None:
        return None
    if entry is None:
        raise ValueError(
            f"budget={str(account and account.book)!r}: the run was begun without a book; finish it without one "
            "(budget=False), and enter what it spent by hand: vestige budget enter"
        )
    if account is None:
        raise ValueError(f"budget=None: the run is charged to the book {entry['book']}; give that book to go on")
    if Book(account.book).state.id != entry["book"]:
        raise ValueError(f"budget={str(account.book)!r} is not the book {entry['book']} that the run was begun with")
    return str(entry["run"])


def pay(
    budget: Budget,
    runs: Sequence[tuple[History, int]],
    *,
    purpose: str,
    source: Provenance,
    facts: Mapping[str, object] | None = None,
    close: bool = True,
) -> str | None:
    """Charge several runs, each what it asks and how often it is made, at once and before the first: a sweep, an audit.

    Returns the id of the reservation, or None where there is no book. Nothing comes back; without `close` the
    reservation stays open, charged in full, for a process that continues the runs.
    """
    account = account_of(budget)
    if account is None:
        return None
    book = Book(account.book)
    known = require_identity(book, account, source)
    paid: Counter[Question] = Counter()
    for asks, times in runs:
        each = prices.for_unit(asks, None, book.terms.unit, account.rows_per_user)
        paid.update(prices.repeated(each, times, paid))
    told = {**(facts or {}), **({} if known.rows is None else {"rows": known.rows})}
    name = book.reserve(
        paid, purpose=purpose, by=account.person, slot=account.slot, part=known.part, facts=told, held=close
    )
    book.charge(name, paid)
    if close:
        book.close(name)
    return name


def _require_priced(planned: History, facts: Facts) -> None:
    """Refuse a run for which no epsilon holds: a book would count it as something."""
    reasons = reasons_against(planned, facts)
    if reasons:
        raise ValueError(
            f"budget: no epsilon holds for this run, so no book can count it: {'; '.join(reasons)}. Leave that out, or "
            "run it on data that need no protection, with budget=False"
        )


@dataclass(frozen=True)
class Known:
    """Which of a book's rows a run is about."""

    rows: str | None = None
    """In words; None where the book knows none."""
    part: str = ""
    """The one that they all lie in, or ""."""


def require_identity(book: Book, account: Account, source: Provenance) -> Known:
    """Refuse rows that are not the book's; otherwise say which of them they are."""
    told = book.terms.data
    if not told.get("root"):
        return Known()
    source = account.source or source
    key = key_of(book, account)
    known = RowSet.read(rows_file(book.path), told["root"], told["rows"])
    if account.derived_from is not None:
        if source.of_file is None:
            raise ValueError(f"derived_from={str(account.derived_from)!r} cannot be read here")
        found = source.of_file(str(account.derived_from), key)
    elif source.read is not None:
        found = source.read(key)
    else:
        found = [] if source.data is None else [("data", hashes_of(source.data, key))]
    made_of = "made of " if account.derived_from is not None else ""
    said, part = require_rows(known, found, str(book.path))
    return Known(made_of + said, "" if part is None else book.terms.parts[part])


def key_of(book: Book, account: Account | None = None) -> bytes:
    """The key of the data, from the book's path, the book's folder, or the account's path."""
    told = book.terms.data
    named = account.key if account is not None else None
    places = (
        [Path(named)]
        if named is not None
        else [Path(told["key_file"]), book.path.with_name(Path(told["key_file"]).name)]
    )
    place = next((each for each in places if each.is_file()), places[0])
    key = read_key(place)
    if fingerprint(key) != told["key"]:
        raise ValueError(f"key={str(place)!r} is not the key that {book.path} was opened with")
    return key


def rows_file(book: Path) -> Path:
    """The path of the hashes of a book's rows."""
    return book.with_name(book.name + ".rows")
