"""What may a careless or a malicious person try around a book? Each attempt costs what it asks, or is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import as_json, vestige
from vestige.accounting.ledger import Ledger
from vestige.budget import Book, BookError, attach, slots_of, storage, terms, usual
from vestige.budget.spending import Provenance
from vestige.budget.verify import verify
from vestige.priced_questions import BudgetSpent, Gaussian

QUESTION = Gaussian(20.0)
RUN = usual(0.01, 1.2, 1000)


@pytest.fixture
def people(tmp_path, monkeypatch):
    """A file of rows, and a book for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("a,b\n" + "".join(f"{n},{n % 7}\n" for n in range(50)))
    as_json("budget", "open", "people.book", "--data", "people.csv", "--epsilon", 3, "--delta", 1e-5)
    return tmp_path


def begun(book, path, asked, planned=80):
    """A run that has asked so much, and stands still."""
    ledger = Ledger(path)
    entry = attach(ledger, book.path, {QUESTION: planned}, purpose="run", source=Provenance())
    ledger.open({"noise": "secret", "budget": entry})
    ask(ledger, range(asked))
    return ledger, entry["run"]


def ask(ledger, steps):
    for step in steps:
        ledger.ask(QUESTION, step=step, part=0, sensitivity=1.0)


def gone_on(book, path, run, asked):
    """Another process that goes on with a run."""
    ledger = Ledger(path)
    ledger.resume(asked)
    spent = {QUESTION: asked}
    attach(ledger, book.path, {QUESTION: 80}, purpose="run", source=Provenance(), run=run, spent=spent)
    return ledger


# --- a run's folder that was copied -----------------------------------------------------------------------------------


def test_two_copies_of_a_run_that_both_go_on_are_both_charged(book, tmp_path):
    ledger, run = begun(book, tmp_path / "one.jsonl", 10)
    ledger.close()
    shutil.copy(tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    one, two = (gone_on(book, tmp_path / f"{name}.jsonl", run, 10) for name in ("one", "two"))
    ask(two, range(10, 22))
    ask(one, range(10, 15))
    one.finish({})
    [held] = Book(book.path, whole=True).state.reservations.values()
    assert held.asked[QUESTION] >= 10 + 12 + 5, "what the other copy asked does not come back"
    with pytest.raises(BudgetSpent, match="was closed, so nothing more may be asked"):
        ask(two, range(22, 60))
    two.close()
    with pytest.raises(BookError, match="cut or replaced|counted twice"):
        verify(book.path, [tmp_path / "one.jsonl", tmp_path / "two.jsonl"])


def test_a_forked_process_cannot_ask_under_its_parents_reservation(book, tmp_path):
    ledger, _ = begun(book, None, 3)
    before = book.path.read_bytes()
    child = os.fork()
    if child == 0:
        try:
            ask(ledger, range(3, 4))
        except ValueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert book.path.read_bytes() == before


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_exchanged_under_a_waiting_process_is_not_written(book, tmp_path, monkeypatch):
    """An editor, or a restored copy, replaces the file between opening it and having its lock."""
    shutil.copy(book.path, tmp_path / "copy")
    real = storage.fcntl.flock

    def exchanged(handle, kind):
        real(handle, kind)
        if (tmp_path / "copy").exists():
            os.replace(tmp_path / "copy", book.path)

    monkeypatch.setattr(storage.fcntl, "flock", exchanged)
    with pytest.raises(BookError, match="was replaced by another file just now"):
        book.reserve(RUN, purpose="run")


def rewritten(path, change):
    """The book with its rows changed, and all hashes made anew: what somebody who knows the format would do."""
    rows, head, lines = [json.loads(line) for line in path.read_bytes().splitlines()], storage.GENESIS, []
    for number, row in enumerate(change(rows)):
        line, head = storage.sealed({**{k: v for k, v in row.items() if k != "hash"}, "seq": number, "previous": head})
        lines.append(line)
    path.write_bytes(b"".join(lines))


def less(rows):
    next(row for row in rows if row["row"] == "charge")["asks"][0][1] = 1
    return rows


def negative(rows):
    row = next(row for row in rows if row["row"] == "charge")
    return [*rows[:-1], {**row, "asks": [[row["asks"][0][0], -900]]}, rows[-1]]


def without_charge(rows):
    return [row for row in rows if row["row"] != "charge"]


@pytest.mark.parametrize("change", [less, negative, without_charge])
def test_a_charge_that_was_lowered_with_all_hashes_made_anew_is_found(book, tmp_path, change):
    ledger, _ = begun(book, tmp_path / "run.jsonl", 80)
    ledger.finish({})
    head = Book(book.path).head
    verify(book.path, [tmp_path / "run.jsonl"], head)
    rewritten(book.path, change)
    with pytest.raises(BookError):
        verify(book.path, [tmp_path / "run.jsonl"])
    rewritten(book.path, lambda rows: rows[:2])
    verify(book.path)  # by itself it is a book
    with pytest.raises(BookError):
        verify(book.path, [tmp_path / "run.jsonl"])
    with pytest.raises(BookError, match="rolled back, cut or forked"):
        verify(book.path, head=head)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: [rows[0], {**rows[1], "plan": 3}],
        lambda rows: [rows[0], {k: v for k, v in rows[1].items() if k != "id"}],
        lambda rows: [rows[0], {**rows[1], "plan": [[{"kind": "gaussian", "multiplier": "x"}, 1]]}],
        lambda rows: [{**rows[0], "epsilon": 1e9, "unit": "planet"}],
        lambda rows: [{k: v for k, v in rows[0].items() if k != "filter"}, *rows[1:]],
    ],
)
def test_rows_of_another_form_are_refused_by_a_reason(book, change):
    book.reserve(RUN, purpose="run")
    rewritten(book.path, change)
    for read in (lambda: Book(book.path).reading(), lambda: verify(book.path)):
        with pytest.raises(BookError):
            read()


@pytest.mark.parametrize("entry", [{}, "x", {"book": 3, "run": "x"}, {"book": "b"}, None])
def test_a_ledger_that_does_not_say_its_book_is_one_line(book, tmp_path, entry):
    ledger = Ledger(tmp_path / "run.jsonl")
    ledger.open({"noise": "secret", "budget": entry})
    ledger.close()
    with pytest.raises(BookError, match="was not charged to any book|does not say which book"):
        verify(book.path, [tmp_path / "run.jsonl"])


def test_slots_that_were_made_larger_than_the_books_epsilon_are_found(tmp_path):
    slots = tuple(slots_of([{"name": "night", "sample_rate": 0.01, "noise_multiplier": 1.2, "steps": 1000}]))
    book = Book.create(tmp_path / "slots", terms(1.3, 1e-5, slots=slots))
    verify(book.path)
    rewritten(book.path, lambda rows: [{**rows[0], "slots": [{"name": "x", "asks": [[QUESTION.to_json(), 4000]]}]}])
    with pytest.raises(BookError, match="the slots cost .* beyond epsilon 1.3"):
        verify(book.path)


@pytest.mark.slow
def test_who_may_not_write_a_book_may_not_spend(book, tmp_path):
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to be somebody else")
    program = "from vestige.budget import *; Book('book').reserve(usual(0.01, 1.2, 10), purpose='x')"
    somebody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder.name.startswith(("pytest", "test")):
            folder.chmod(0o755)
    for mode, problem in ((0o600, "cannot be read"), (0o644, "cannot be written")):
        book.path.chmod(mode)
        found = subprocess.run(somebody, cwd=tmp_path, env=environment, capture_output=True, text=True)
        if "No module" in found.stderr or "Permission denied: '/" in found.stderr:
            pytest.skip("another user cannot read this installation")
        assert found.returncode == 1
        assert problem in found.stderr
    assert book.affords(RUN) == 5


@pytest.mark.parametrize("kind", ["fuse", "fuse.rclone", "fuse.glusterfs", "virtiofs", "macfuse"])
def test_a_file_system_that_is_not_known_to_keep_to_a_disk_is_refused(book, monkeypatch, kind):
    monkeypatch.setattr(storage, "file_system", lambda folder: kind)
    with pytest.raises(ValueError, match="network file system"):
        book.reserve(RUN, purpose="run")
    monkeypatch.setattr(storage, "file_system", lambda folder: "fuse.fuse-overlayfs")
    book.reserve(RUN, purpose="run")


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_second_book_for_the_same_rows_is_not_opened_unseen(people):
    again = ("budget", "open", "second.book", "--data", "people.csv", "--epsilon", 3, "--delta", 1e-5)
    code, _, error = vestige(*again)
    assert (code, "these rows have a book already" in error, error.count("\n")) == (2, True, 1)
    (people / "people.book").unlink()
    (people / "people.book.rows").unlink()
    assert vestige(*again)[0] == 2, "nor where the first was thrown away"
    as_json(*again, "--another")
    other = "".join(f"{n + 1000},{n}\n" for n in range(50))
    (people / "others.csv").write_text("a,b\n" + other)
    opened = ("budget", "open", "third.book", "--data", "others.csv", "--epsilon", 3, "--delta", 1e-5)
    assert vestige(*opened, "--key", "people.csv.key")[0] == 2, "the first is gone, so nobody knows"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("enter", "people.book", "--epsilon", "nan", "--note", "x"), "--epsilon=nan"),
        (("enter", "people.book", "--epsilon", "inf", "--note", "x"), "--epsilon=inf"),
        (("enter", "people.book", "--epsilon", 0.1, "--note", "two\nlines"), "one line of printable text"),
        (("enter", "people.book", "--epsilon", 0.1, "--note", "\x1b[31mred"), "one line of printable text"),
        (("grant", "people.book", "ann", "--epsilon", "nan"), "--epsilon=nan"),
        (("reserve", "people.book", "--sample-rate", 0.1, "--noise-multiplier", 0, "--steps", 3), "0% of such a run"),
        (("reserve", "people.book", "--sample-rate", 0.1, "--noise-multiplier", 1, "--steps", 10**14), "0% of such"),
        (("open", "b", "--data", "people.csv", "--epsilon", "nan", "--delta", 1e-5), "--epsilon=nan"),
        (("open", "b", "--data", "people.csv", "--epsilon", 1, "--delta", 1e-5, "--expect", "0.1,0,9"), "give it noise"),
        (("open", "no/b", "--data", "people.csv", "--epsilon", 1, "--delta", 1e-5, "--another"), "there is no folder"),
    ],
)  # fmt: skip
def test_numbers_and_words_that_nobody_means_are_one_line(people, words, problem):
    before = (people / "people.book").read_bytes()
    code, _, error = vestige("budget", *words)
    assert code in (1, 2)
    assert problem in error
    assert error.count("\n") == 1
    assert (people / "people.book").read_bytes() == before


def test_words_with_marks_in_them_are_shown_as_they_are(people):
    as_json("budget", "enter", "people.book", "--epsilon", 0.1, "--note", "a [/bold] note", "--person", "[ann]")
    code, out, _ = vestige("budget", "show", "people.book")
    assert code == 0
    assert "[/bold]" in out
    assert "[ann]" in out


def test_show_lists_the_last_runs_and_those_open_without_reading_all(people):
    book = Book("people.book")
    first = book.reserve({QUESTION: 1}, purpose="waits", held=False)
    for number in range(6):
        name = book.reserve({QUESTION: 1}, purpose=f"run {number}", by=("ann", "bob")[number % 2])
        book.charge(name, {QUESTION: 1})
        book.close(name)
    book.enter(0.01, 0.0, "a count", by="cy")
    short, every = (as_json("budget", "show", "people.book", *words) for words in (("--last", 3), ("--all",)))
    assert [run["purpose"] for run in short["runs"]] == ["waits", "run 4", "run 5"]
    assert [run["purpose"] for run in every["runs"]] == ["waits", *(f"run {number}" for number in range(6))]
    assert short["runs"][1:] == every["runs"][-2:]
    assert short["people"] == every["people"]
    assert {each["person"]: each["runs"] for each in short["people"]}.items() >= {"ann": 3, "bob": 3, "cy": 0}.items()
    assert "4 of 7 runs; --all lists every one" in vestige("budget", "show", "people.book", "--last", 4)[1]
    assert first in [run["id"] for run in short["runs"]]
