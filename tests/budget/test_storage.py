"""Is a book durable, exclusive and tamper-evident?"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vestige.accounting import rdp
from vestige.budget import Book, BookError, storage, terms, usual
from vestige.budget.book import TOTAL_EVERY, State
from vestige.budget.summary import described
from vestige.priced_questions import BudgetSpent, Gaussian

RUN = usual(0.01, 1.2, 1000)


def spend(book, asks=RUN, **more):
    name = book.reserve(asks, purpose="test", **more)
    book.charge(name, asks)
    book.close(name)
    return name


def test_what_others_reserved_and_what_is_closed_count(tmp_path):
    book = Book.create(tmp_path / "book", terms(1.467, 1e-5, expect=RUN))
    other = Book(book.path)
    name = book.reserve(RUN, purpose="first", held=False)
    with pytest.raises(BudgetSpent, match="1 of them still open"):
        other.reserve(RUN, purpose="second")
    book.charge(name, RUN)
    book.close(name)
    assert book.reading().epsilon_spent == pytest.approx(1.467, rel=0.01)
    assert Book(book.path).affords(RUN) == 0
    with pytest.raises(BudgetSpent, match="does not hold this run"):
        book.reserve(RUN, purpose="third")


def test_nobody_else_holds_a_book_while_it_is_written(tmp_path):
    book = Book.create(tmp_path / "book", terms(1.467, 1e-5, expect=RUN))
    with storage.BookFile(book.path).exclusive(), book.path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


# --- two processes ----------------------------------------------------------------------------------------------------


def racer(barrier, queue, paths):
    assert "torch" not in sys.modules
    run = usual(0.01, 1.2, 1000)
    for path in paths:
        book = Book(path)
        barrier.wait()
        try:
            queue.put((path, book.reserve(run, purpose="race")))
        except BudgetSpent:
            queue.put((path, None))
        barrier.wait()


def race(folder, trials):
    """How many of two processes got the last reservation, in each trial."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    paths = [folder / f"book{trial}" for trial in range(trials)]
    for path in paths:
        Book.create(path, terms(1.467, 1e-5, expect=RUN))
    racers = [context.Process(target=racer, args=(barrier, queue, paths)) for _ in range(2)]
    for each in racers:
        each.start()
    answers = [queue.get(timeout=300) for _ in range(2 * trials)]
    for each in racers:
        each.join(timeout=60)
        assert each.exitcode == 0
    return [sum(name is not None for path, name in answers if path == each) for each in paths]


def test_of_two_processes_one_gets_the_last_reservation(tmp_path):
    assert race(tmp_path, 10) == [1] * 10


@pytest.mark.slow
def test_of_two_processes_one_gets_the_last_reservation_a_thousand_times(tmp_path):
    assert race(tmp_path, 1000) == [1] * 1000


# --- kill -9 at every write -------------------------------------------------------------------------------------------


def killed_at(path, number, half):
    """A process that reserves, charges twice and closes, killed at its write or sync of this number. Returns how often
    it was told that a charge is durable, or None where it was not killed."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        left = number
        real_write, real_sync = os.write, os.fsync

        def at_each_call():
            nonlocal left
            left -= 1
            return left < 0

        def write(handle, line):
            if at_each_call():
                real_write(handle, line[: len(line) // 2] if half else b"")
                os.kill(os.getpid(), signal.SIGKILL)
            return real_write(handle, line)

        def sync(handle):
            if at_each_call():
                os.kill(os.getpid(), signal.SIGKILL)
            real_sync(handle)

        storage.os.write, storage.os.fsync = write, sync
        book = Book(path)
        name = book.reserve(RUN, purpose="doomed")
        part = usual(0.01, 1.2, 500)
        for _ in range(2):
            book.charge(name, part)
            real_write(tell, b".")
        book.close(name)
        os._exit(0)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    durable = len(os.read(told, 10))
    os.close(told)
    return durable if os.WIFSIGNALED(status) else None


@pytest.mark.parametrize("half", [False, True], ids=["before the write", "inside the write"])
@pytest.mark.everyday("before the write")
def test_a_kill_at_every_write_gives_nothing_back(tmp_path, half):
    path = tmp_path / "book"
    Book.create(path, terms(20, 1e-5, expect=RUN))
    spent = number = 0
    while (durable := killed_at(path, number, half)) is not None:
        book = Book(path, whole=True)
        found = [each for each in book.state.reservations.values() if each.purpose == "doomed"]
        charged = sum(found[-1].charged.values()) if found and number else 0
        assert charged >= 500 * durable, "what was told to be durable is there"
        assert book.reading().epsilon_spent >= spent
        spent = book.reading().epsilon_spent
        book.charge(book.reserve(usual(0.01, 1.2, 1), purpose="next"), usual(0.01, 1.2, 1))  # and the book goes on
        number += 1
    assert number == 8, "a write and a sync for each of four rows"
    assert not path.read_bytes().count(b"\n\n")


def test_what_a_dead_process_reserved_and_never_charged_is_freed_for_the_next(tmp_path):
    path = tmp_path / "book"
    Book.create(path, terms(2.063, 1e-5, expect=RUN))
    assert killed_at(path, 4, False) == 1  # half a run is charged, a whole one reserved
    book = Book(path)
    [dead] = book.state.open.values()
    spend(book, usual(0.01, 1.2, 1400))
    assert dead.why == "its process ended"
    assert dead.asked == usual(0.01, 1.2, 500)
    with pytest.raises(BudgetSpent):
        book.reserve(RUN, purpose="too much")


# --- edits ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(book):
    spend(book)
    spend(book)
    book.enter(0.1, 0.0, "a query elsewhere")
    book.grant("ann", 1.0)
    return book


def test_any_edit_of_any_row_is_refused(written):
    lines = written.path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    for number, line in enumerate(lines):
        for place in (10, len(line) // 2, len(line) - 40):
            other = line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]
            written.path.write_bytes(b"".join([*lines[:number], other, *lines[number + 1 :]]))
            with pytest.raises(BookError):
                Book(written.path)


def test_a_row_removed_repeated_or_swapped_is_refused(written):
    lines = written.path.read_bytes().splitlines(keepends=True)
    for edited in (
        [*lines[:3], *lines[4:]],
        [*lines[:4], *lines[3:]],
        [*lines[:3], lines[4], lines[3], *lines[5:]],
        lines[1:],
    ):
        written.path.write_bytes(b"".join(edited))
        with pytest.raises(BookError):
            Book(written.path)


def test_an_edit_that_hashes_anew_breaks_the_chain(written):
    lines = written.path.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    del row["hash"]
    row["asks"][0][1] = 1
    lines[2], _ = storage.sealed(row)
    written.path.write_bytes(b"".join(lines))
    with pytest.raises(BookError, match="line 4: does not follow"):
        Book(written.path)


def test_a_book_that_was_cut_while_it_is_used_is_refused(written):
    text = written.path.read_bytes()
    written.path.write_bytes(b"".join(text.splitlines(keepends=True)[:-2]))
    with pytest.raises(BookError, match="gone: cut or replaced"):
        written.reserve(RUN, purpose="more")
    assert len(written.path.read_bytes()) < len(text), "nothing was appended"


def test_a_torn_last_line_is_left_out_and_then_overwritten(written):
    whole = written.path.read_bytes()
    for torn in (b'{"row":"cha', b"x", whole.splitlines(keepends=True)[-1][:-1]):
        written.path.write_bytes(whole + torn)
        assert Book(written.path).reading() == Book(written.path).reading()
        again = Book(written.path)
        assert again.head == written.head
        again.grant("bob", 1.0)
        assert written.path.read_bytes().startswith(whole)
        Book(written.path)


def test_a_book_is_made_once_and_read_by_its_owner_alone(book):
    before = book.path.read_bytes()
    with pytest.raises(ValueError, match="exists; a book is never opened twice"):
        Book.create(book.path, terms(1, 1e-5))
    assert book.path.read_bytes() == before
    assert book.path.stat().st_mode & 0o077 == 0
    assert [each.name for each in book.path.parent.iterdir()] == ["book"]


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "no book"), (b"hello\n", "no row of a book"), (b"{}\n", "no row")]
)
def test_another_file_is_no_book(tmp_path, content, problem):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BookError, match=problem):
        Book(path)


def test_a_book_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no such file; make it with vestige budget open"):
        Book(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a folder"):
        Book(tmp_path)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path, monkeypatch, book, kind):
    monkeypatch.setattr(storage, "file_system", lambda folder: kind)
    with pytest.raises(ValueError, match=f"network file system \\({kind}\\)"):
        Book.create(tmp_path / "other", terms(1, 1e-5))
    with pytest.raises(ValueError, match="keep it on a local disk"):
        book.reserve(RUN, purpose="run")
    assert not (tmp_path / "other").exists()


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(tmp_path):
    assert storage.file_system(Path("/proc/self")) == "proc"
    assert storage.file_system(tmp_path) not in ("", "proc")
    assert storage._by_mount(Path("/proc/self").resolve().parent) in ("proc", "")


def test_a_full_disk_spends_nothing(book, monkeypatch):
    name = book.reserve(RUN, purpose="run")
    before = book.path.read_bytes()
    real = os.write
    monkeypatch.setattr(storage.os, "write", lambda handle, line: real(handle, line[:20]))
    with pytest.raises(OSError, match="nothing was spent, free space first"):
        book.charge(name, RUN)
    monkeypatch.undo()
    assert book.path.read_bytes() == before
    book.charge(name, RUN)


def long_book(path, runs):
    """Each run with noise of its own, eight charges and a refund, and the sums that a writer leaves."""
    Book.create(path, terms(1e4, 1e-5))
    state, file = State(), storage.BookFile(path)
    for row in file.new_rows():
        state.take(row)
    text = path.read_bytes()
    running = hashlib.sha256(text)
    with path.open("ab") as handle:

        def put(row):
            whole = {"seq": file.count, "previous": file.head, "at": "2026-01-01T00:00:00+00:00", **row}
            line, file.head = storage.sealed(whole)
            file.count += 1
            handle.write(line)
            running.update(line)
            state.take(whole)

        for number in range(runs):
            name, question = f"r{number}", Gaussian(300.0 + number).to_json()
            put({"row": "reserve", "id": name, "by": "ann", "purpose": "train", "plan": [[question, 800]]})
            for _ in range(8):
                put({"row": "charge", "id": name, "asks": [[question, 100]]})
            put({"row": "close", "id": name, "asked": [[question, 799]], "why": "finished"})
            if state.since_total >= TOTAL_EVERY:
                put({**state.totals(), "prefix": running.hexdigest()})
    curves = (799 * rdp.ORDERS / (2 * (300.0 + number) ** 2) for number in range(runs))
    return sum(curves, np.zeros(len(rdp.ORDERS)))


@pytest.mark.parametrize("runs", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_runs_open_in_a_second(tmp_path, runs):
    path = tmp_path / "book"
    total = long_book(path, runs)
    begin = time.process_time()
    book = Book(path)
    reading = book.reading()
    found = described(book, 20)
    assert time.process_time() - begin < runs / 10_000
    assert (book.state.made, len(found["runs"])) == (runs, 20)
    assert book.state.filter().reading(total) == pytest.approx(reading.epsilon_spent, rel=1e-9)


def test_an_edit_before_a_sum_is_found_though_it_is_not_read(tmp_path):
    path = tmp_path / "book"
    long_book(path, 120)
    text = path.read_bytes()
    assert text.count(b'"row":"total"') == 1
    place = text.index(b'"asked":[[{"kind":"gaussian","multiplier":350.0},799') + 49
    assert text[place : place + 3] == b"799"
    path.write_bytes(text[:place] + b"1" + text[place + 1 :])
    with pytest.raises(BookError, match="its hash does not match its content"):
        Book(path)


def test_a_sum_is_written_now_and_then_and_read_as_the_whole_is(tmp_path, monkeypatch):
    monkeypatch.setattr("vestige.budget.book.TOTAL_EVERY", 5)
    book = Book.create(tmp_path / "book", terms(20, 1e-5, expect=RUN))
    held = book.reserve(RUN, purpose="long", by="bob", facts={"run": "runs/a"})
    book.charge(held, usual(0.01, 1.2, 10), ledger=(3, "abc"))
    for _ in range(4):
        spend(book, by="ann")
    book.enter(0.2, 1e-8, "elsewhere")
    book.grant("bob", 5)
    book.grant("ann", 20)
    spend(book, by="ann")
    assert book.path.read_bytes().count(b'"row":"total"') >= 2
    short, whole = Book(book.path), Book(book.path, whole=True)
    assert short.head == whole.head == book.head
    assert short.reading().epsilon_spent == pytest.approx(whole.reading().epsilon_spent, rel=1e-12)
    assert (short.state.open, short.state.grants, short.state.made) == (whole.state.open, whole.state.grants, 6)
    assert short.state.external_delta_left == whole.state.external_delta_left < book.terms.external_delta
    short.charge(held, usual(0.01, 1.2, 10))
    book.refresh()
    assert sum(book.state.open[held].charged.values()) == 20
