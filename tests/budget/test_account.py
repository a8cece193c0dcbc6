"""Is every question in the book before it is asked, and does what was not asked come back?"""

import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from vestige.accounting.ledger import Ledger
from vestige.budget import Account, Book, BookError, attach, pay, terms, usual
from vestige.budget.book import State
from vestige.budget.identity import RowSet, fingerprint, hashes_of, make_key
from vestige.budget.prices import total
from vestige.budget.spending import BLOCKS, Provenance, Spending, account_of, rows_file
from vestige.budget.summary import USERS, described
from vestige.budget.verify import verify
from vestige.methods.registry import METHODS
from vestige.priced_questions import (
    BudgetSpent,
    CyclicGaussian,
    ExponentialMechanism,
    Gaussian,
    GroupedGaussian,
    SampledGaussian,
)
from vestige.units import Users

X = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()
STEP = SampledGaussian(0.05, 2.0)


def book_on(folder, data=None, epsilon=8.0, **more):
    """A book, of some rows if they are given."""
    identity = {}
    if data is not None:
        key = make_key(folder / "data.key")
        rows = RowSet.of(hashes_of(data, key))
        rows.write(rows_file(folder / "book"))
        identity = {"name": "data", "rows": len(rows.hashes), "root": rows.root, "key": fingerprint(key)}
        identity["key_file"] = str(folder / "data.key")
    return Book.create(folder / "book", terms(epsilon, 1e-5, data=identity, **more))


def train(book, data=(X, Y), **more):
    settings = {"method": "dp-sgd", "noise_multiplier": 2.0, "delta": 1e-5, "sample_rate": 0.05, "steps": 24, "lr": 0.1}
    return vestige.train(nn.Linear(6, 2), nn.functional.cross_entropy, data, budget=book, **{**settings, **more})


def whole(book):
    return Book(book.path, whole=True)


# --- vestige.train ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [None, "run"])
def test_a_run_is_charged_in_blocks_before_it_asks_and_closed_with_what_it_asked(tmp_path, out):
    book = book_on(tmp_path, (X, Y))
    training = train(book.path, out=None if out is None else tmp_path / out)
    book.refresh()
    [held] = book.state.open.values()
    assert held.plan == Counter({STEP: 24})
    assert not held.charged
    for record in training:
        book.refresh()
        held = next(iter(book.state.open.values()))
        assert held.charged[STEP] >= record.step + 1, "in the book before it is asked"
        assert held.charged[STEP] <= record.step + 1 + -(-24 // BLOCKS)
    [held] = whole(book).state.reservations.values()
    assert (held.asked, held.why, held.facts["rows"]) == (Counter({STEP: 24}), "finished", "all rows")
    if out is not None:
        assert verify(book.path, [tmp_path / out]).runs == 1


def test_what_was_not_asked_comes_back_when_a_run_ends_early(tmp_path):
    book = book_on(tmp_path)
    training = train(book.path)
    for record in training:
        if record.step == 4:
            break
    training.finish()
    [held] = whole(book).state.reservations.values()
    assert held.asked == Counter({STEP: 5})
    assert held.charged == Counter({STEP: 6})


def test_a_run_that_does_not_fit_writes_nothing(tmp_path):
    book = book_on(tmp_path, epsilon=0.6)
    with pytest.raises(
        BudgetSpent,
        match=r"does not hold this run: epsilon 0.6 .* what is left affords \d+ of its 24 steps, or all of it with [\d.]+ times the noise",
    ):
        train(book.path, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not whole(book).state.reservations


def test_a_folder_that_is_taken_gives_the_reservation_back(tmp_path):
    book = book_on(tmp_path)
    for _ in train(book.path, out=tmp_path / "run"):
        pass
    with pytest.raises(ValueError, match="run"):
        train(book.path, out=tmp_path / "run")
    assert not whole(book).state.open


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"reproducible": 3}, "known seed"),
        ({"sampling": "shuffled"}, "shuffled sampling"),
        ({"nonprivate_logs": True}, "without noise"),
    ],
)
def test_a_run_without_an_epsilon_is_refused(tmp_path, settings, reason):
    book = book_on(tmp_path)
    with pytest.raises(ValueError, match=f"no epsilon holds for this run, so no book can count it: .*{reason}"):
        train(book.path, **settings)


def test_the_environment_names_a_book_and_false_leaves_it_out(tmp_path, monkeypatch):
    book = book_on(tmp_path)
    monkeypatch.setenv("VESTIGE_BUDGET", str(book.path))
    monkeypatch.setenv("VESTIGE_PERSON", "ann")
    for _ in train(None, steps=3):
        pass
    for _ in train(False, steps=3):
        pass
    [held] = whole(book).state.reservations.values()
    assert held.person == "ann"
    with pytest.raises(ValueError, match="budget=3 must be the file of a book"):
        train(3)


def test_moments_and_a_private_evaluation_are_charged_too(tmp_path):
    book = book_on(tmp_path, (X, Y))
    for _ in train(book.path, evaluate="private"):
        pass
    [held] = whole(book).state.reservations.values()
    assert held.asked == Counter({STEP: 24, Gaussian(0.01 * 400): 1})
    others = (X[:10] + 1, Y[:10])
    with pytest.raises(ValueError, match="none of 10 rows are those"):
        train(book.path, evaluate=vestige.PrivateEvaluation(0.1, on=others))


def test_correlated_noise_is_charged_whole(tmp_path):
    book = book_on(tmp_path)
    training = train(book.path, method=vestige.make_method("dp-bandmf", bands=4), steps=24)
    next(iter(training))
    book.refresh()
    [held] = book.state.open.values()
    [(question, count)] = held.charged.items()
    assert isinstance(question, CyclicGaussian)
    assert count == 24
    training.ledger.close()
    [held] = whole(book).state.reservations.values()
    assert held.asked == Counter({question: 24})


def test_allocation_is_charged_by_whole_epochs(tmp_path):
    book = book_on(tmp_path)
    training = train(book.path, sampling="allocation", steps=40)
    next(iter(training))
    training.ledger.close()
    [held] = whole(book).state.reservations.values()
    [(question, count)] = held.asked.items()
    assert (question.kind, question.steps, count) == ("allocated-gaussian", 20, 1)


@pytest.mark.slow
def test_noise_that_follows_answers_is_charged_question_by_question(tmp_path):
    book = book_on(tmp_path, epsilon=20.0)
    method = next(built for name in METHODS if (built := vestige.make_method(name)).gate.adaptive)
    training = train(book.path, method=method, epsilon=8, noise_multiplier=None, steps=4)
    for _ in training:
        pass
    [held] = whole(book).state.reservations.values()
    assert not held.plan
    assert held.asked == held.charged == training.ledger.spent


# --- whose rows -------------------------------------------------------------------------------------------------------


def test_rows_of_others_are_refused_and_a_part_is_not(tmp_path):
    book = book_on(tmp_path, (X, Y))
    for _ in train(book.path, (X[:300], Y[:300]), steps=2):
        pass
    [held] = whole(book).state.reservations.values()
    assert held.facts["rows"] == "300 rows"
    with pytest.raises(ValueError, match="none of 400 rows are those"):
        train(book.path, (2 * X, Y))
    np.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    for _ in train(Account(book.path, derived_from=tmp_path / "data.npz"), (2 * X, Y), steps=2):
        pass
    assert list(whole(book).state.reservations.values())[-1].facts["rows"] == "made of all rows"


def test_the_key_may_move_with_the_data_and_must_be_the_same(tmp_path):
    book = book_on(tmp_path, (X, Y))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data.key").rename(tmp_path / "elsewhere" / "data.key")
    with pytest.raises(ValueError, match="it lies with the data, key=FILE"):
        train(book.path)
    train(Account(book.path, key=tmp_path / "elsewhere" / "data.key")).ledger.close()
    make_key(tmp_path / "data.key")
    with pytest.raises(ValueError, match="is not the key that"):
        train(book.path)


# --- killed, and resumed ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch, vestige
from torch import nn
folder = sys.argv[1]
X = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)); Y = (X.sum(dim=1) > 0).long()
training = vestige.train(nn.Linear(6, 2), nn.functional.cross_entropy, (X, Y), method="dp-sgd", noise_multiplier=2.0,
    delta=1e-5, sample_rate=0.05, steps=24, lr=0.1, out=folder + "/run", budget=folder + "/book",
    resume=len(sys.argv) > 2)
for record in training:
    if record.step == 9 and len(sys.argv) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_under_its_reservation(tmp_path):
    book = book_on(tmp_path)
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    book.refresh()
    [held] = book.state.open.values()
    assert held.charged == Counter({STEP: 12})
    spent = book.reading().epsilon_spent
    with pytest.raises(ValueError, match="budget=None: the run is charged to the book"):
        train(None, out=tmp_path / "run", resume=True)
    for _ in train(book.path, out=tmp_path / "run", resume=True):
        pass
    [held] = whole(book).state.reservations.values()
    assert held.why == "finished"
    assert held.asked[STEP] >= 24
    assert whole(book).reading().epsilon_spent >= spent
    verify(book.path, [tmp_path / "run"])


def test_a_run_whose_reservation_was_freed_reserves_again(tmp_path):
    book = book_on(tmp_path)
    training = train(book.path, out=tmp_path / "run")
    for record in training.steps():
        if record.step == 9:
            break
    book.refresh()
    [held] = book.state.open.values()
    assert held.charged[STEP] == 12
    training.ledger.close()
    book.refresh()
    [first] = book.state.open
    assert book.state.open[first].charged[STEP] == 10, "what was charged ahead is only reserved again"
    assert book.state.open[first].plan[STEP] == 24
    book.close(first, why="released by hand")
    with pytest.raises(BudgetSpent, match="was closed, so nothing more may be asked"):
        training.ledger.spending.book.charge(first, {STEP: 1})
    for _ in train(book.path, out=tmp_path / "run", resume=True):
        pass
    both = list(whole(book).state.reservations.values())
    assert [each.why for each in both] == ["released by hand", "finished"]
    assert both[1].plan[STEP] <= 24 - 9
    verify(book.path, [tmp_path / "run"])


def test_a_run_cannot_change_its_book(tmp_path):
    training = train(False, out=tmp_path / "run")
    next(training.steps())
    training.ledger.close()
    book = book_on(tmp_path)
    with pytest.raises(ValueError, match="begun without a book"):
        train(book.path, out=tmp_path / "run", resume=True)


# --- loops ------------------------------------------------------------------------------------------------------------


def loop(book, steps=6, **more):
    model = nn.Linear(6, 2)
    engine = vestige.PrivacyEngine(**{key: more.pop(key) for key in ("ledger", "reproducible") if key in more})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=20)
    common = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": loader,
        "max_grad_norm": 1.0,
        "budget": book,
        **more,
    }
    make = engine.make_private_with_epsilon if "target_epsilon" in more else engine.make_private
    model, optimizer, loader = make(**common)
    taken = 0
    while taken < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    return engine


def test_a_loop_with_a_target_reserves_its_plan_and_one_without_is_charged_as_it_goes(tmp_path):
    book = book_on(tmp_path, (X, Y))
    engine = loop(book.path, target_epsilon=3.0, target_delta=1e-5, epochs=1)
    book.refresh()
    [held] = book.state.open.values()
    assert sum(held.plan.values()) == 20
    assert 6 <= sum(held.charged.values()) <= 9
    engine._ledger.close()
    assert not whole(book).state.open
    engine = loop(book.path, noise_multiplier=2.0, steps=12)
    book.refresh()
    [held] = book.state.open.values()
    assert not held.plan
    assert held.charged[STEP] >= 12
    engine._ledger.close()
    assert list(whole(book).state.reservations.values())[-1].asked == Counter({STEP: 12})


def test_a_loop_is_stopped_where_the_book_ends(tmp_path):
    book = book_on(tmp_path, epsilon=0.7)
    with pytest.raises(BudgetSpent, match="does not hold this run"):
        loop(book.path, noise_multiplier=2.0, steps=80)
    assert whole(book).reading().epsilon_spent <= 0.7
    with pytest.raises(ValueError, match="no epsilon holds for this run"):
        loop(book.path, noise_multiplier=2.0, poisson_sampling=False)


# --- units ------------------------------------------------------------------------------------------------------------


def test_rows_are_entered_for_users_and_users_never_for_rows(tmp_path):
    book = book_on(tmp_path, unit="user", epsilon=20.0)
    with pytest.raises(ValueError, match="this run protects rows, and the book users"):
        train(book.path)
    for _ in train(Account(book.path, rows_per_user=3), out=tmp_path / "run"):
        pass
    [held] = whole(book).state.reservations.values()
    assert held.asked == Counter({GroupedGaussian(0.05, 2.0, 3): 24})
    verify(book.path, [tmp_path / "run"])
    rows = Book.create(tmp_path / "rows", terms(8, 1e-5))
    spent = Ledger(None)
    with pytest.raises(ValueError, match="this run protects users, and the book rows"):
        attach(
            spent,
            rows.path,
            {STEP: 3},
            purpose="x",
            source=Provenance(),
            facts=vestige.accounting.Facts(users=Users(sample="users")),
        )


def test_the_choice_of_a_bound_is_charged_once_by_the_first_run_that_is_given_it(tmp_path):
    book = book_on(tmp_path, unit="user", epsilon=20.0)
    owners = np.arange(400) // 4
    chosen = vestige.private_bound(owners, epsilon=0.5, largest=8)
    choice, settings = ExponentialMechanism(0.5), {"users": owners, "rows_per_user": chosen}
    for number in (1, 2):
        train(book.path, **settings, out=tmp_path / f"run{number}").run()
    loop(book.path, noise_multiplier=2.0, steps=1, **settings).close()
    first, second, third = whole(book).state.reservations.values()
    assert [each.asked[choice] for each in (first, second, third)] == [1, 0, 0]
    asked = first.asked + second.asked + third.asked
    assert whole(book).reading().epsilon_spent == book.state.filter().reading(total([asked], "zero-out"))
    assert verify(book.path, [tmp_path / "run1", tmp_path / "run2"]).runs == 2
    paid = vestige.private_bound(owners, epsilon=0.5, largest=8, budget=book.path)
    train(book.path, users=owners, rows_per_user=paid, cap=chosen, steps=2).run()
    assert list(whole(book).state.reservations.values())[-1].asked[choice] == 0
    elsewhere = Book.create(tmp_path / "elsewhere", terms(8, 1e-5, unit="user"))
    train(elsewhere.path, **settings, steps=2).run()
    assert [each.asked[choice] for each in whole(elsewhere).state.reservations.values()] == [1], "another book has not"


def test_a_book_that_does_not_hold_the_choice_refuses_the_run(tmp_path):
    book = book_on(tmp_path, unit="user", epsilon=2.0)
    owners = np.arange(400) // 4
    chosen = vestige.private_bound(owners, epsilon=2.1, largest=8)
    with pytest.raises(BudgetSpent, match="does not hold this run"):
        train(book.path, users=owners, rows_per_user=chosen, steps=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_verification_finds_a_choice_that_was_not_charged(tmp_path, monkeypatch):
    book = book_on(tmp_path, unit="user")
    owners = np.arange(400) // 4
    chosen = vestige.private_bound(owners, epsilon=0.5, largest=8)
    with monkeypatch.context() as patched:
        patched.setattr(Spending, "_unpaid_choices", lambda self: {})
        train(book.path, users=owners, rows_per_user=chosen, steps=2, out=tmp_path / "run").run()
    with pytest.raises(BookError, match="the choice of its bound on users' rows, at epsilon 0.5, was not charged"):
        verify(book.path, [tmp_path / "run"])


def test_the_users_of_a_book_are_those_of_one_column(tmp_path):
    """What hides one visit does not hide a patient, who has several."""
    book = book_on(tmp_path, unit="user")
    visits = {"input": X, "label": Y, "patient": np.arange(400) // 4, "visit": np.arange(400)}

    def by(column, **more):
        data = {name: each for name, each in visits.items() if name in ("input", "label", column)}
        train(
            more.pop("budget", book.path), data=data, users=column, target="label", sample="users", steps=2, **more
        ).run()

    by("patient", out=tmp_path / "run")
    with pytest.raises(ValueError, match="hid all rows of one 'patient'") as error:
        by("visit")
    assert "\n" not in str(error.value)
    by("patient")
    train(Account(book.path, user_column="patient"), users=visits["patient"], sample="users", steps=2).run()
    with pytest.raises(ValueError, match="hid all rows of one 'patient'"):
        vestige.private_bound(visits["visit"], epsilon=0.1, budget=Account(book.path, user_column="visit"))
    assert USERS in described(book)["assumes"]
    assert USERS not in described(Book.create(tmp_path / "rows", terms(8, 1e-5)))["assumes"]
    assert verify(book.path, [tmp_path / "run"]).runs == 1


def test_verification_finds_runs_by_several_columns_of_users(tmp_path):
    """Two first runs that began at one time do not see each other."""
    book = book_on(tmp_path, unit="user")
    for column in ("patient", "visit"):
        book.reserve({STEP: 1}, purpose="x", facts={"user_column": column})
    with pytest.raises(BookError, match="several columns, patient, visit"):
        verify(book.path)


# --- other commands ---------------------------------------------------------------------------------------------------


def test_one_call_is_all_that_a_command_needs(tmp_path):
    book = book_on(tmp_path, (X, Y))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    entry = attach(ledger, str(book.path), {Gaussian(5.0): 2}, purpose="synthesize", source=Provenance(data=(X, Y)))
    ledger.open({"noise": "secret", "budget": entry})
    ledger.ask(Gaussian(5.0), step=0, part=0, sensitivity=1.0)
    ledger.finish({})
    [held] = whole(book).state.reservations.values()
    assert (held.purpose, held.asked) == ("synthesize", Counter({Gaussian(5.0): 1}))
    verify(book.path, [tmp_path / "ledger.jsonl"])
    assert attach(Ledger(None), None, {}, purpose="x", source=Provenance()) is None


def test_a_sweep_is_paid_at_once(tmp_path):
    book = book_on(tmp_path)
    cyclic = CyclicGaussian(0.1, 5.0, bands=4)
    name = pay(book.path, [({STEP: 10}, 3), ({cyclic: 5}, 2)], purpose="sweep", source=Provenance())
    held = whole(book).state.reservations[name]
    assert held.asked[STEP] == 30
    assert sorted((each.mechanism, count) for each, count in held.asked.items() if each.kind == cyclic.kind) == [
        (0, 5),
        (1, 5),
    ]
    with pytest.raises(BudgetSpent):
        pay(book.path, [({STEP: 100_000}, 1)], purpose="too large", source=Provenance())
    assert pay(None, [], purpose="x", source=Provenance()) is None


def test_a_reservation_made_by_hand_is_used_by_name(tmp_path):
    book = book_on(tmp_path)
    name = book.reserve(usual(0.05, 2.0, 24), purpose="for ann", by="ann", held=False)
    assert account_of(f"{book.path}#{name}") == Account(str(book.path), reservation=name)
    with pytest.raises(ValueError, match="does not hold this run: it fits with at most the rate"):
        train(f"{book.path}#{name}", noise_multiplier=1.9)
    for _ in train(f"{book.path}#{name}", noise_multiplier=2.5, steps=20):
        pass
    by_hand, used = whole(book).state.reservations.values()
    assert (by_hand.why, sum(by_hand.asked.values())) == ("used by a run", 0)
    assert (used.person, used.why, used.asked) == ("ann", "finished", usual(0.05, 2.5, 20))
    with pytest.raises(ValueError, match="is not open in"):
        train(f"{book.path}#{name}")
    running = book.reserve(usual(0.05, 2.0, 24), purpose="a run")
    with pytest.raises(ValueError, match="is a run's"):
        train(f"{book.path}#{running}")


def test_a_grant_limits_a_person(tmp_path, monkeypatch):
    book = book_on(tmp_path)
    book.grant("ann", 1.0)
    with pytest.raises(BudgetSpent, match="bob has no grant"):
        train(Account(book.path, person="bob"))
    with pytest.raises(BudgetSpent, match=r"ann was granted 1 of .* this would make it"):
        train(Account(book.path, person="ann"))
    book.grant("ann", 3.0)
    train(Account(book.path, person="ann")).ledger.close()
    with pytest.raises(ValueError, match="epsilon=9 must lie between 0 and the book's 8"):
        book.grant("ann", 9)


# --- verification -----------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    book = book_on(tmp_path)
    for number in (1, 2):
        for _ in train(book.path, out=tmp_path / f"run{number}", steps=6):
            pass
    return tmp_path


def runs(folder):
    return [folder / "run1", folder / "run2"]


def test_verification_finds_runs_that_are_missing_twice_or_of_others(kept):
    assert verify(kept / "book", runs(kept)).runs == 2
    assert len(verify(kept / "book").unchecked) == 2
    with pytest.raises(BookError, match="its run is missing"):
        verify(kept / "book", runs(kept)[:1])
    with pytest.raises(BookError, match="counted twice"):
        verify(kept / "book", [*runs(kept), kept / "run1"])
    for _ in train(False, out=kept / "outside", steps=3):
        pass
    with pytest.raises(BookError, match="not charged to any book"):
        verify(kept / "book", [*runs(kept), kept / "outside"])
    other = Book.create(kept / "other", terms(8, 1e-5))
    with pytest.raises(BookError, match="was charged to the book"):
        verify(other.path, runs(kept))
    with pytest.raises(ValueError, match="there is no ledger"):
        verify(kept / "book", [kept])


def test_verification_finds_a_cut_a_fork_and_a_roll_back(kept):
    text = (kept / "book").read_bytes()
    head = Book(kept / "book").head
    assert verify(kept / "book", runs(kept), head).head == head
    lines = text.splitlines(keepends=True)
    (kept / "book").write_bytes(b"".join(lines[:-1]))  # a valid prefix, and the last run is not closed in it
    with pytest.raises(BookError, match="rolled back, cut or forked"):
        verify(kept / "book", runs(kept), head)
    second = next(number for number, line in enumerate(lines) if b'"reserve"' in line and number > 2)
    (kept / "book").write_bytes(b"".join(lines[:second]))
    with pytest.raises(
        BookError, match="nothing was charged for .*run2: rows were cut from the book, or it was forked"
    ):
        verify(kept / "book", runs(kept))
    forked = Book(kept / "book")
    forked.charge(forked.reserve(usual(0.05, 2.0, 6), purpose="train dp-sgd"), usual(0.05, 2.0, 6))
    with pytest.raises(BookError, match="or it was forked"):
        verify(kept / "book", runs(kept))
    with pytest.raises(ValueError, match="head='abc' must be a hash"):
        verify(kept / "book", head="abc")


def test_verification_finds_a_run_that_asked_more_than_was_charged(kept):
    """A process that asks without charging: its ledger is whole, and says more than the book."""
    path = kept / "run1" / "ledger.jsonl"
    ledger = Ledger(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))  # without the last row, which says that it is finished
    ledger.resume(6)
    ledger.ask(STEP, step=6, part=0, sensitivity=1.0)
    ledger.close()
    with pytest.raises(BookError, match="cut or replaced|was asked 7 times, and charged 6 before"):
        verify(kept / "book", runs(kept))


def test_verification_decides_every_admission_again(tmp_path, monkeypatch):
    book = book_on(tmp_path, epsilon=1.0)
    monkeypatch.setattr("vestige.budget.book.Writer.admit", lambda *_: None)
    book.reserve(usual(0.05, 2.0, 1000), purpose="smuggled")
    monkeypatch.undo()
    with pytest.raises(BookError, match="what was admitted makes the reading .* beyond epsilon 1"):
        verify(book.path)


def test_verification_adds_sums_up_again(tmp_path, monkeypatch):
    monkeypatch.setattr("vestige.budget.book.TOTAL_EVERY", 4)
    book = book_on(tmp_path)
    for _ in range(4):
        name = book.reserve({STEP: 3}, purpose="x")
        book.charge(name, {STEP: 3})
        book.close(name)
    verify(book.path)
    assert b'"row":"total"' in book.path.read_bytes()
    true = State.totals
    monkeypatch.setattr(State, "totals", lambda self: {**true(self), "sums": {}})
    for _ in range(2):
        name = book.reserve({STEP: 3}, purpose="x")
        book.charge(name, {STEP: 3})
        book.close(name)
    monkeypatch.undo()
    with pytest.raises(BookError, match="a sum is not that of the rows before it"):
        verify(book.path)


def test_verification_finds_a_question_that_was_asked_past_the_book(tmp_path):
    book = book_on(tmp_path)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    entry = attach(ledger, str(book.path), {Gaussian(9.0): 1}, purpose="x", source=Provenance())
    ledger.open({"noise": "secret", "budget": entry})
    ledger.ask(Gaussian(9.0), step=0, part=0, sensitivity=1.0)
    verify(book.path, [tmp_path / "ledger.jsonl"])
    ledger.spending = None
    ledger.ask(Gaussian(9.0), step=1, part=0, sensitivity=1.0)
    with pytest.raises(BookError, match="line 3: .* was asked 2 times, and charged 1 before"):
        verify(book.path, [tmp_path / "ledger.jsonl"])


# --- private statistics -----------------------------------------------------------------------------------------------


def test_statistics_are_charged_before_they_are_answered_and_runs_that_use_them_are_not_charged_again(tmp_path):
    book = book_on(tmp_path, (X, Y))
    np.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    made_of = Account(book.path, derived_from=tmp_path / "data.npz")
    with pytest.raises(ValueError, match="none of 400 rows are those"):
        vestige.private_statistics(X, means=(-5, 5), noise_multiplier=30.0, budget=book.path)
    found = vestige.private_statistics(
        X, means=(-5, 5), noise_multiplier=30.0, budget=made_of, ledger=tmp_path / "ledger.jsonl"
    )
    [held] = whole(book).state.reservations.values()
    assert (held.asked, held.why, held.purpose) == (Counter({Gaussian(30.0): 1}), "finished", "1 statistics")
    for number in (1, 2):
        for _ in train(book.path, statistics=found, steps=6, out=tmp_path / f"run{number}"):
            pass
    one, *others = whole(book).state.reservations.values()
    assert [each.asked for each in others] == [Counter({STEP: 6})] * 2
    runs_of = [tmp_path / name for name in ("ledger.jsonl", "run1", "run2")]
    assert verify(book.path, runs_of).runs == 3
    with pytest.raises(BookError, match="its run is missing"):
        verify(book.path, runs_of[1:])
    elsewhere = Book.create(tmp_path / "elsewhere", terms(8, 1e-5))
    train(elsewhere.path, statistics=found, steps=6).ledger.close()
    assert Gaussian(30.0) in next(iter(whole(elsewhere).state.reservations.values())).plan, "another book has not"


def test_credit_for_statistics_about_rows_in_a_book_of_users(tmp_path):
    """Somebody with four rows pays four times the noise of a row: what was charged for the statistics is credited to
    them alone, and not to a question about rows that has by itself the noise that was charged."""
    book = book_on(tmp_path, unit="user", epsilon=50.0)
    people = Account(book.path, rows_per_user=4)
    found = vestige.private_statistics(
        X, means=(-5, 5), noise_multiplier=8.0, budget=people, ledger=tmp_path / "ledger.jsonl"
    )
    asked = {"evaluate": vestige.PrivateEvaluation(2.0 / len(X)), "steps": 2, "noise_multiplier": 20.0}
    for _ in train(people, statistics=found, out=tmp_path / "run", **asked):
        pass
    first, second = whole(book).state.reservations.values()
    assert first.asked == Counter({Gaussian(2.0): 1})
    assert second.asked == Counter({GroupedGaussian(0.05, 20.0, 4): 2, Gaussian(0.5): 1})
    assert verify(book.path, [tmp_path / "ledger.jsonl", tmp_path / "run"]).runs == 2


def test_credit_for_statistics_is_used_once(tmp_path):
    """A run that goes on has asked its statistics before: the same question about something else is charged."""
    book = book_on(tmp_path)
    ledger = Ledger(None)
    paid = attach(ledger, book.path, {Gaussian(9.0): 1}, purpose="statistics", source=Provenance())
    ledger.open({"noise": "secret"})
    ledger.ask(Gaussian(9.0), step=0, part=0, sensitivity=1.0)
    ledger.finish({})
    for spent, counted in ((None, 1), ({Gaussian(9.0): 1}, 2)):
        run = Ledger(None)
        attach(run, book.path, {Gaussian(9.0): 2}, purpose="run", source=Provenance(), paid=paid, spent=spent)
        run.open({"noise": "secret"})
        for step in range(2):
            run.ask(Gaussian(9.0), step=step, part=0, sensitivity=1.0)
        run.finish({})
        assert list(whole(book).state.reservations.values())[-1].asked[Gaussian(9.0)] == counted
