"""What has been spent on a dataset, and who may spend more? `vestige budget`: open, show, reserve, verify, ..."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from vestige.cli.errors import FlagCommand
from vestige.cli.terminal import Json, print_json, stderr, stdout, verified

if TYPE_CHECKING:
    from vestige.budget import Book
    from vestige.budget.identity import Hashes

budget = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown")
"""One book for one dataset: what all runs together have spent."""

BookArgument = Annotated[Path, typer.Argument(help="The file of the book.")]
Person = Annotated[
    str | None, typer.Option("--person", help="Who: a label in the book. [default: VESTIGE_PERSON, or the login]")
]

PartFlag = Annotated[str, typer.Option("--part", help="Of a book with --part-by: the one part that it is about.")]


@budget.callback()
def _about() -> None:
    """Keep one budget for a dataset: what all runs on it may spend together, and what they have spent.

    Examples:

        vestige budget open people.book --data people.csv --epsilon 8 --delta 1e-6

        vestige train --recipe tabular --data people.csv --epsilon 2 --budget people.book ...

        vestige budget show people.book
    """


@budget.command("open", cls=FlagCommand)
def open_(
    book: BookArgument,
    epsilon: Annotated[float, typer.Option(help="What all runs together may spend.")],
    delta: Annotated[float, typer.Option(help="At which delta; well below 1 / rows.")],
    data: Annotated[
        str | None, typer.Option(help="The rows: a .csv, .jsonl, .parquet or .npz, or a folder with --task.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task of `vestige tasks`, whose training rows they are.")] = None,
    unit: Annotated[str, typer.Option(help="What is protected: row, or user (all rows of one).")] = "row",
    adjacency: Annotated[
        str, typer.Option(help="Neighbours: zero-out (one there, or its place blank), or replace (one by another).")
    ] = "zero-out",
    slots: Annotated[
        Path | None,
        typer.Option(help="FILE.json with all runs that may ever be made; cheaper, and nothing else may be asked."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(help="A usual run, RATE,NOISE,STEPS: it chooses the order that delta favours. Public."),
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Share of delta for that order. [default: 0.9]")] = None,
    part_by: Annotated[
        str | None,
        typer.Option(help="A column whose values are public: a run on rows of one value costs the others nothing."),
    ] = None,
    external_share: Annotated[
        float | None, typer.Option(help="Share of delta for entries by hand that have one. [default: 0.01]")
    ] = None,
    another: Annotated[
        bool, typer.Option("--another", help="These rows have a book already: what two books promise adds up.")
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="File of the key that rows are hashed with. [default: beside the data]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Open a book for a dataset. All of these settings are fixed from then on.

    Examples:

        vestige budget open people.book --data people.csv --epsilon 8 --delta 1e-6 --expect 0.01,1.2,1000

        vestige budget open digits.book --task digits-mlp --epsilon 8 --delta 1e-5 --slots slots.json

        vestige budget open visits.book --data visits.csv --epsilon 4 --delta 1e-6 --part-by year
    """
    from vestige.budget import Book, slots_of, terms
    from vestige.budget.identity import RowSet, fingerprint, make_key, note_book
    from vestige.budget.spending import rows_file
    from vestige.checks import check_delta
    from vestige.files import read_json
    from vestige.tasks import of_task, parts_of

    if data is None and task is None:
        raise ValueError("data=None: give the rows that the book is about, or a task")
    if book.exists():
        raise ValueError(f"book={str(book)!r} exists; a book is never opened twice: give another name")
    chosen = () if slots is None else tuple(slots_of(read_json(slots)))
    told: dict[str, Any] = {"unit": unit, "adjacency": adjacency, "slots": chosen, "expect": _expected(expect)}
    told |= {"weight": weight, "external_share": external_share}
    parts = None if part_by is None else parts_of(data, task, part_by)
    told["parts"] = () if parts is None else tuple(dict.fromkeys(sorted(parts)))
    terms(epsilon, delta, **told)
    place = key or Path(f"{data}.key" if data is not None and Path(data).is_file() else f"{book}.key")
    secret = make_key(place)
    found = of_task(task, data, secret)[-1 if task is not None else 0][1]
    check_delta(delta, len(found))
    if not another:
        _require_first(place, found)
    rows = RowSet.of(found, None if parts is None else [told["parts"].index(each) for each in parts])
    identity = {
        "name": Path(data).name if data is not None else task,
        "rows": len(found),
        "root": rows.root,
        "key": fingerprint(secret),
        "key_file": str(place.resolve()),
        **({} if part_by is None else {"part_by": part_by}),
    }
    made = Book.create(book, terms(epsilon, delta, data=identity, **told))
    rows.write(rows_file(book))
    note_book(place, book)
    _show(made.path, as_json)


def _require_first(key: Path, hashes: Hashes) -> None:
    """Refuse a second book for rows that have one: who opens another begins to count anew."""
    import numpy as np

    from vestige.budget.identity import books_of
    from vestige.budget.spending import rows_file

    for name in books_of(key):
        rows = rows_file(Path(name))
        if not rows.exists() or np.isin(np.fromfile(rows, "<u8", rows.stat().st_size // 8), hashes).any():
            raise ValueError(
                f"data: these rows have a book already, {name} (says {key}): use that one; another one begins to count "
                "anew, and what both promise adds up (--another)"
            )


def _expected(text: str | None) -> object:
    from vestige.budget import usual

    if text is None:
        return None
    parts = text.split(",")
    try:
        rate, noise, steps = float(parts[0]), float(parts[1]), int(parts[2])
    except (ValueError, IndexError):
        raise ValueError(f"expect={text!r} must be RATE,NOISE,STEPS of a usual run, such as 0.01,1.2,1000") from None
    if len(parts) != 3:
        raise ValueError(f"expect={text!r} must be RATE,NOISE,STEPS of a usual run, such as 0.01,1.2,1000")
    return usual(rate, noise, steps)


@budget.command("show", cls=FlagCommand)
def show(
    book: BookArgument,
    last: Annotated[int, typer.Option(min=0, help="List so many runs that were made last, and those open.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="List every run.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is spent, by whom, and what is left.

    Example:

        vestige budget show people.book --json
    """
    _show(book, as_json, None if every else last)


def _show(path: Path, as_json: bool, last: int | None = 20) -> None:
    from vestige.budget import Book
    from vestige.budget.summary import described

    found = described(Book(path), last)
    if as_json:
        print_json(found)
        return
    stdout.print(
        f"{found['guarantee']}\n{found['epsilon_spent']:.3f} of {found['epsilon']:g} spent"
        + (f", {found['epsilon_reserved']:.3f} with what is reserved" if found["epsilon_reserved"] else "")
        + f" ({found['epsilon_spent_is']})",
        markup=False,
    )
    if "filter" in found:
        chosen = found["filter"]
        stdout.print(
            f"Renyi filter: {chosen['weight']:.2g} of delta on order {chosen['favoured_order']:.3g}, the rest on "
            f"{chosen['other_orders']} others, fixed when the book was opened; delta left for entries by hand: "
            f"{found['external_delta']['left']:.3g}",
            markup=False,
        )
    else:
        free = sum(slot["state"] == "free" for slot in found["slots"])
        stdout.print(f"{free} of {len(found['slots'])} slots are free", markup=False)
    for part in found.get("parts", ()):
        stdout.print(
            f"part {part['part']}: {part['epsilon_spent']:.3f} spent, {part['epsilon_reserved']:.3f} with what is "
            "reserved",
            markup=False,
        )
    data = found["data"]
    stdout.print(f"{data['rows']} rows of {data['name']}; key: {data['key_file']}; head: {found['head']}", markup=False)
    if found["runs"] or found["external"]:
        table = Table("run", "person", "what", "when", "counted", "alone", "state")
        for run in found["runs"]:
            cells = (run["id"], escape(run["person"]), escape(run["purpose"]), run["at"][:16].replace("T", " "))
            table.add_row(*cells, f"{run['counted']:,}", f"{run['epsilon_alone']:.3f}", run["state"])
        for each in found["external"]:
            cells = ("by hand", escape(each["person"]), escape(each["note"]), each["at"][:16].replace("T", " "))
            table.add_row(*cells, "1", f"{each['epsilon']:.3f}", "")
        stdout.print(table)
    if len(found["runs"]) < found["made"]:
        stdout.print(f"{len(found['runs'])} of {found['made']} runs; --all lists every one", markup=False)


@budget.command("reserve", cls=FlagCommand)
def reserve(
    book: BookArgument,
    sample_rate: Annotated[float, typer.Option(help="Probability that a row joins a step.")],
    noise_multiplier: Annotated[float, typer.Option(help="Accounted noise of each step.")],
    steps: Annotated[int, typer.Option(help="Steps of the run.")],
    runs: Annotated[int, typer.Option(help="So many such runs.")] = 1,
    purpose: Annotated[str, typer.Option(help="What for, in words.")] = "reserved by hand",
    slot: Annotated[str | None, typer.Option(help="Of a book of slots: which one.")] = None,
    part: PartFlag = "",
    person: Person = None,
    as_json: Json = False,
) -> None:
    """Set budget aside for a run that will be made later, with --budget BOOK#RESERVATION.

    Example:

        vestige budget reserve people.book --sample-rate 0.01 --noise-multiplier 1.2 --steps 1000 --person ann
    """
    from vestige.budget import Book, usual
    from vestige.budget.prices import repeated
    from vestige.checks import check_steps

    check_steps(runs, "runs")
    opened = Book(book)
    plan = repeated(usual(sample_rate, noise_multiplier, steps), runs, {})
    name = opened.reserve(plan, purpose=purpose, by=person, slot=slot, part=part, held=False)
    _done(opened, {"reservation": name}, f"reserved as {name}; use it with --budget {book}#{name}", as_json)


@budget.command("release", cls=FlagCommand)
def release(
    book: BookArgument,
    reservation: Annotated[str, typer.Argument(help="Its id, as `show` has it.")],
    as_json: Json = False,
) -> None:
    """Close a reservation: what was not charged comes back. A run that still holds it can ask nothing more under it.

    Example:

        vestige budget release people.book r3-a1b2c3
    """
    from vestige.budget import Book

    opened = Book(book)
    if reservation not in opened.state.open:
        raise ValueError(f"reservation={reservation!r} is not open in {book}: vestige budget show {book}")
    opened.close(reservation, why="released by hand")
    _done(opened, {"reservation": reservation}, f"released {reservation}", as_json)


@budget.command("enter", cls=FlagCommand)
def enter(
    book: BookArgument,
    epsilon: Annotated[float, typer.Option(help="What was spent elsewhere on the same rows.")],
    note: Annotated[str, typer.Option(help="On what, in words.")],
    delta: Annotated[float, typer.Option(help="Its delta, out of what the book set aside for such entries.")] = 0.0,
    part: PartFlag = "",
    person: Person = None,
    as_json: Json = False,
) -> None:
    """Enter by hand what another tool spent: any answer that is (epsilon, delta)-private for the book's unit.

    Example:

        vestige budget enter people.book --epsilon 0.1 --note "OpenDP: a count of visits"
    """
    from vestige.budget import Book

    opened = Book(book)
    opened.enter(epsilon, delta, note, by=person, part=part)
    _done(opened, {"entered": epsilon}, f"entered {epsilon:g}", as_json)


@budget.command("grant", cls=FlagCommand)
def grant(
    book: BookArgument,
    person: Annotated[str, typer.Argument(help="Who may spend: the name that their entries are written under.")],
    epsilon: Annotated[float, typer.Option(help="Up to which reading of their own; 0 takes the grant away.")],
    as_json: Json = False,
) -> None:
    """Let a person spend up to a part of the budget. Once there is a grant, only people with a grant may spend.

    Example:

        vestige budget grant people.book ann --epsilon 3
    """
    from vestige.budget import Book

    opened = Book(book)
    opened.grant(person, epsilon)
    _done(opened, {"person": person, "granted": epsilon}, f"{person} may spend up to {epsilon:g}", as_json)


def _done(opened: Book, what: dict[str, object], line: str, as_json: bool) -> None:
    reading = opened.reading()
    if as_json:
        print_json(
            {
                **what,
                "epsilon_spent": reading.epsilon_spent,
                "epsilon_reserved": reading.epsilon_reserved,
                "head": opened.head,
            }
        )
        return
    stdout.print(
        f"{line}; {reading.epsilon_spent:.3f} of {reading.epsilon:g} spent, {reading.epsilon_reserved:.3f} with what "
        "is reserved",
        markup=False,
    )


@budget.command("verify", cls=FlagCommand)
def verify(
    book: BookArgument,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders (or ledgers) of all runs that were charged to it.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="A hash that was published when the book ended with it (`show`): finds roll-backs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a book against itself and against the runs' ledgers; an edit, cut or fork fails (exit code 1).

    Without runs, the chain of its rows, every admission and every sum are checked. With them, each was charged for all
    that it asked, before it asked; a run that is missing, or there twice, fails.

    Example:

        vestige budget verify people.book runs/* --head 3f2a...
    """
    from vestige.budget.storage import BookError
    from vestige.budget.verify import verify as check

    with verified(BookError, as_json):
        verdict = check(book, runs or (), head)
    if as_json:
        print_json(verdict.to_json())
        return
    stdout.print(
        f"verified: {verdict.rows} chained rows, {verdict.runs} ledgers; {verdict.reading.epsilon_spent:.3f} of "
        f"{verdict.reading.epsilon:g} spent; head {verdict.head}",
        markup=False,
    )
    if verdict.without_ledger:
        stdout.print(f"counted as the book says, without a ledger: {', '.join(verdict.without_ledger)}", markup=False)
    if verdict.unchecked:
        stdout.print(
            f"not held against their ledgers: {', '.join(verdict.unchecked)}; give their folders", markup=False
        )
    if head is None:
        stdout.print("a roll-back of the whole file shows against a published head only: --head", markup=False)


@budget.command("export", cls=FlagCommand)
def export(
    book: BookArgument,
    nist: Annotated[
        bool, typer.Option("--nist", help="Markdown under the headings of NIST SP 800-226, not a registry's entry.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Print what may be published: an entry for a registry of deployments (JSON), or NIST's headings (Markdown).

    Hashes of rows, the key, paths and people's names are left out.

    Example:

        vestige budget export people.book --nist --out people.md
    """
    from vestige.budget import Book, summary

    opened = Book(book, whole=True)
    if nist and not as_json:
        content = summary.nist(opened)
    else:
        import json

        entry = {"nist": summary.nist(opened)} if nist else summary.registry(opened)
        content = json.dumps(entry, indent=None if as_json else 2, allow_nan=False) + "\n"
    if out is None:
        print(content, end="")
        return
    out.write_text(content, encoding="utf-8")
    stderr.print(f"wrote {out}", markup=False)


@budget.command("report", cls=FlagCommand)
def report(
    book: BookArgument,
    out: Annotated[Path | None, typer.Option(help="The page to write. [default: BOOK.html]")] = None,
    title: Annotated[str | None, typer.Option(help="Its title.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page about a book (HTML): what is left, who spent what, over time.

    Example:

        vestige budget report people.book --out people.html
    """
    from vestige.budget import Book
    from vestige.cli.books.page import page

    path = out or book.with_name(book.name + ".html")
    path.write_text(page(Book(book, whole=True), title), encoding="utf-8")
    if as_json:
        print_json({"page": str(path)})
    else:
        stdout.print(f"wrote {path}", markup=False)
