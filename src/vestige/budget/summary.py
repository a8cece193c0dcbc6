"""What does a book say? Its terms, its reading, who spent what; for a table, a registry, or under NIST's headings.

What leaves the house (`export`) has no hash of any row, no key and no path.
"""

from __future__ import annotations

from typing import Any

from vestige.accounting import rdp
from vestige.budget import prices
from vestige.budget.book import Book, Reservation
from vestige.budget.filters import Slot
from vestige.budget.person_and_process import has_ended

ODOMETER = "an odometer's reading, which depends on the answers: the guarantee is the book's epsilon"
ASSUMES = (
    "every run on these rows is charged here: the book sees no run that was started without it",
    "one row of the book is one unit; the same person in another file, or under another name, is not recognised",
    "what our commands make of the rows, and what is declared to be derived from them, is made row by row",
    "entries by hand cost what they say",
)
PARTS = (
    "which part a row lies in, the parts' names and their sizes are public, and a run that is charged to one part read "
    "nothing of the others"
)
USERS = "all runs name the same users: the name of the column is compared, and ids that were given without one are not"


def described(book: Book, last: int | None = None) -> dict[str, Any]:
    """All of a book but for its rows' hashes; of its runs, the `last` ones and those open, or every one."""
    state, told, reading = book.state, book.terms, book.reading()
    made, entries = book.listed(last)
    runs = [_run(book, each) for each in made]
    people = sorted(set(state.runs) | {person for person, _ in state.sums()} | set(state.grants))
    return {
        "book": state.id,
        "path": str(book.path),
        "head": book.head,
        "opened": {"at": state.opened_at, "by": state.opened_by},
        "data": {key: told.data.get(key) for key in ("name", "rows", "key_file")},
        "epsilon": told.epsilon,
        "delta": told.delta,
        "unit": told.unit,
        "adjacency": told.adjacency,
        "neighbours": prices.ADJACENCIES[told.adjacency].format(unit=told.unit),
        "guarantee": guarantee(book),
        "mode": told.mode,
        "epsilon_spent": reading.epsilon_spent,
        "epsilon_spent_is": ODOMETER,
        "epsilon_reserved": reading.epsilon_reserved,
        "external_delta": {"set_aside": told.external_delta, "left": reading.external_delta_left},
        **({"filter": _filter(book)} if told.weights is not None else {}),
        **({"slots": [_slot(book, place, slot) for place, slot in enumerate(told.slots)]} if told.slots else {}),
        **({"parts": [_part(book, name) for name in told.parts]} if told.parts else {}),
        "grants": dict(state.grants),
        "people": [_person(book, name) for name in people],
        "made": state.made,
        "runs": runs,
        "external": [
            {"person": each.person, "note": each.note, "at": each.at, "epsilon": each.epsilon, "delta": each.delta}
            for each in entries
        ],
        "assumes": [
            *ASSUMES,
            *([PARTS] if told.parts else []),
            *([USERS] if told.unit == "user" else []),
            *state.assumes,
        ],
    }


def guarantee(book: Book) -> str:
    told = book.terms
    return (
        f"all that is charged to this book, together, is ({told.epsilon:g}, {told.delta:g})-differentially private for "
        f"{prices.ADJACENCIES[told.adjacency].format(unit=told.unit)}"
    )


def _filter(book: Book) -> dict[str, object]:
    weights = book.terms.weights
    assert weights is not None
    return {
        "favoured_order": weights.favoured,
        "weight": max(weights.weights),
        "other_orders": len(weights.orders) - 1,
        "fixed": "when the book was opened",
    }


def _slot(book: Book, place: int, slot: Slot) -> dict[str, object]:
    used = next((each.id for each in book.state.open.values() if each.slot == place), None)
    done = place in book.state.spent_slots
    asks = [f"{count} x {question!r}" for question, count in slot.asks.items()]
    return {"name": slot.name, "state": "used" if done else "reserved" if used else "free", "asks": asks}


def _run(book: Book, held: Reservation) -> dict[str, object]:
    curve = prices.total([held.counted], book.terms.adjacency)
    closed = held.closed_at is not None
    state = held.why if closed else "its process ended" if has_ended(held.holder) else "open"
    return {
        "id": held.id,
        "person": held.person,
        "purpose": held.purpose,
        "at": held.at,
        "state": state,
        "closed_at": held.closed_at,
        "reserved": sum(held.plan.values()),
        "charged": sum(held.charged.values()),
        "counted": sum(held.counted.values()),
        "epsilon_alone": rdp.tight_epsilon(curve, book.terms.delta),
        "slot": None if held.slot is None else book.terms.slots[held.slot].name,
        "part": held.part or None,
        "rows": held.facts.get("rows"),
        "path": held.facts.get("path"),
        "assumes": held.facts.get("assumes"),
    }


def _part(book: Book, name: str) -> dict[str, object]:
    state, meter = book.state, book.state.filter()
    spent, reserved = (meter.reading(state.curve(reserved=each, part=name)) for each in (False, True))
    return {"part": name, "epsilon_spent": spent, "epsilon_reserved": reserved}


def _person(book: Book, name: str) -> dict[str, object]:
    state = book.state
    spent = None
    if book.terms.weights is not None:
        spent = state.filter().highest(state.curves(reserved=True, of=name))
    return {"person": name, "runs": state.runs[name], "epsilon_reading": spent, "granted": state.grants.get(name)}


# --- what leaves the house --------------------------------------------------------------------------------------------


def registry(book: Book) -> dict[str, Any]:
    """An entry for a registry of deployments: what its third tier asks for, as far as a book knows it."""
    told, state = book.terms, book.state
    kinds = sorted({question.kind for each in state.reservations.values() for question in each.counted})
    return {
        "tier": 3,
        "deployment": {
            "data_curator": None,
            "intended_use": None,
            "data_product": f"{state.made} trained models, audits or statistics of one dataset",
            "data": told.data.get("name"),
            "publication_date": None,
            "begun": state.opened_at,
        },
        "privacy_guarantee": {
            "flavor": "(epsilon, delta)-differential privacy",
            "epsilon": told.epsilon,
            "delta": told.delta,
            "privacy_unit": told.unit,
            "neighbours": prices.ADJACENCIES[told.adjacency].format(unit=told.unit),
            "data_domain": "rows of one dataset",
            "unprotected_quantities": ["the number of rows", "the sampling rates and numbers of steps of all runs"],
            "deployment_model": "central: a trusted curator holds the rows",
        },
        "accounting": {
            "composition": _composition(book),
            "post_processing": "everything that was computed from released answers alone",
            "mechanisms": kinds + (["external"] if state.externals else []),
            "runs": state.made,
            "entries_by_hand": len(state.externals),
            "epsilon_spent": book.reading().epsilon_spent,
            "epsilon_spent_is": ODOMETER,
        },
        "implementation": {
            "library": "vestige",
            "record": "append-only and hash-chained; each charge is on disk before its answer exists",
            "head": book.head,
            "assumptions": described(book)["assumes"],
            "rationale": None,
        },
        "to_fill_in": [
            "deployment.data_curator",
            "deployment.intended_use",
            "deployment.publication_date",
            "implementation.rationale",
        ],
    }


def _composition(book: Book) -> str:
    if book.terms.mode == "slots":
        return (
            "slots fixed in advance, composed by privacy loss distributions; which is used when may depend on answers"
        )
    return (
        "a Renyi filter over many orders, with weights fixed in advance (docs/theorems.md 5): questions, their order "
        "and their number may depend on answers"
    )


def nist(book: Book) -> str:
    """The book under the headings of NIST SP 800-226, as Markdown."""
    told, found = book.terms, described(book)
    reading = book.reading()
    kinds = ", ".join(registry(book)["accounting"]["mechanisms"]) or "none yet"
    lines = [
        f"# {told.data.get('name') or 'A dataset'}: evaluation of a differential privacy guarantee",
        "",
        "## Privacy parameter",
        f"Epsilon {told.epsilon:g} at delta {told.delta:g}: {found['guarantee']}. "
        f"So far {reading.epsilon_spent:.3f} is spent: {ODOMETER}.",
        "",
        "## Unit of privacy",
        f"One {told.unit}; neighbouring datasets: {prices.ADJACENCIES[told.adjacency].format(unit=told.unit)}.",
        "",
        "## Algorithms, correctness and composition",
        f"Mechanisms: {kinds}. Composition: {_composition(book)}. {book.state.made} runs and "
        f"{len(book.state.externals)} entries by hand. `vestige budget verify` recomputes every price from the runs' "
        "ledgers.",
        "",
        "## Utility and bias",
        "A book does not know what the models are for. Fill in how their error was measured, and for which groups.",
        "",
        "## Trust model",
        "Central: a trusted curator holds the rows, and whoever may write the book's file may spend. Names in the book "
        "are labels, not proofs of identity.",
        "",
        "## Security, side channels and implementation",
        f"The book is append-only and hash-chained; its last row is `{book.head}`. Each charge is on disk before its "
        "answer exists. What a run assumes about noise, timing and arithmetic is in its own ledger and card.",
        "",
        "## Data collection exposure",
        "The book holds keyed hashes of rows, which this export leaves out. Rows are read where they lie.",
        "",
        "## Assumptions",
        *(f"- {line}" for line in found["assumes"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
