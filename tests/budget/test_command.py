"""Does `vestige budget` keep a book as a team needs it?"""

import json
import re
import shutil
from pathlib import Path

import pytest

from commands import as_json, vestige
from vestige.accounting.ledger import Ledger
from vestige.budget import Book, attach, pay, slots_of, terms, usual
from vestige.cli.books.page import page
from vestige.compare.execute_run import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.compare.payment import paid
from vestige.files import read_json
from vestige.tasks import source_of

TRAIN = ("train", "--task", "digits-mlp", "--method", "dp-sgd", "--sample-rate", 0.05, "--steps", 10)
COMPARE = ("compare", "--task", "digits-mlp", "--method", "dp-sgd", "--sample-rate", 0.05, "--steps", 5, "--seeds", 1,
           "--rates", "tuned", "--factors", "0.5,1", "--workers", 1)  # fmt: skip


@pytest.fixture
def digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = as_json("budget", "open", "digits.book", "--task", "digits-mlp", "--epsilon", 3, "--delta", 1e-5)
    assert (found["epsilon_spent"], found["data"]["rows"], found["mode"]) == (0.0, 1437, "filter")
    assert found["filter"]["weight"] == 0.9
    return tmp_path


def test_a_team_spends_together_and_the_sixth_run_is_refused(digits, monkeypatch):
    """As the whole thing below does with trained models: runs, a sweep and an audit, by what they charge."""
    book, run = Book("digits.book"), usual(0.05, 1.5, 10)
    source = source_of("digits-mlp", None)
    for number, person in enumerate(["ann", "bob", "cy", "ann", "bob"]):
        monkeypatch.setenv("VESTIGE_PERSON", person)
        ledger = Ledger(digits / f"{number}.jsonl")
        entry = attach(ledger, "digits.book", run, purpose="train dp-sgd", source=source)
        ledger.open({"noise": "secret", "budget": entry})
        for step in range(10):
            ledger.ask(next(iter(run)), step=step, part=0, sensitivity=1.0)
        ledger.finish({})
    pay("digits.book", [(usual(0.05, 2.0, 5), 3)], purpose="compare 1 methods, 3 runs", source=source)
    pay("digits.book", [(usual(0.05, 12.0, 2), 8)], purpose="audit dp-sgd", source=source)
    code, _, error = vestige(*TRAIN, "--epsilon", 2, "--out", "run6", "--budget", "digits.book")
    assert (code, error.count("\n")) == (1, 1)
    assert re.search(r"epsilon 3 at delta 1e-05, \d\.\d+ spent .* left; .* affords \d+ of its 10 steps, or all", error)
    assert not (digits / "run6").exists()
    verdict = as_json("budget", "verify", "digits.book", *(f"{number}.jsonl" for number in range(5)))
    assert (verdict["runs"], len(verdict["without_ledger"])) == (5, 2)
    found = as_json("budget", "show", "digits.book")
    assert {each["person"]: each["runs"] for each in found["people"]} == {"ann": 2, "bob": 4, "cy": 1}
    book.refresh()
    assert book.reading().epsilon_spent == found["epsilon_spent"] <= 3
    assert "Who spent it" in page(Book("digits.book", whole=True))


@pytest.mark.slow
def test_three_people_five_runs_a_sweep_and_an_audit_and_the_sixth_run_is_refused(digits, monkeypatch):
    monkeypatch.setenv("VESTIGE_BUDGET", "digits.book")

    def by(person, *words, code=0):
        monkeypatch.setenv("VESTIGE_PERSON", person)
        found = vestige(*words)
        assert found[0] == code, found
        return found

    for number, person in enumerate(["ann", "bob", "cy", "ann", "bob"], 1):
        by(person, *TRAIN, "--noise-multiplier", 1.5, "--seed", number, "--out", f"run{number}")
    by("cy", *COMPARE, "--noise-multiplier", 2, "--out", "sweep")
    by("ann", "audit", "--task", "digits-mlp", "--noise-multiplier", 12, "--runs", 8, "--steps", 2, "--examples", 20)
    by("bob", "budget", "enter", "digits.book", "--epsilon", 0.1, "--note", "a count, with another tool")
    code, _, error = by("cy", *TRAIN, "--epsilon", 2, "--out", "run6", code=1)
    assert error.count("\n") == 1
    assert re.search(
        r"does not hold this run: epsilon 3 at delta 1e-05, \d\.\d+ spent .* \d\.\d+ left; .* affords \d+ of its 10 steps",
        error,
    )
    assert not (digits / "run6").exists()

    found = as_json("budget", "show", "digits.book")
    assert found["epsilon_spent"] == found["epsilon_reserved"] <= 3
    assert {each["person"]: each["runs"] for each in found["people"]} == {"ann": 3, "bob": 2, "cy": 2}
    assert [run["purpose"].split()[0] for run in found["runs"]] == ["train"] * 5 + ["compare", "audit"]
    assert {run["state"] for run in found["runs"]} == {"finished"}
    assert {run["rows"] for run in found["runs"]} == {"all rows"}
    sweep = found["runs"][5]
    assert (sweep["purpose"], sweep["counted"]) == ("compare 1 methods, 3 runs", 15)
    assert any("held-out rows" in line for line in found["assumes"])
    assert found["external"][0]["epsilon"] == 0.1

    runs = [f"run{number}" for number in range(1, 6)]
    head = found["head"]
    verdict = as_json("budget", "verify", "digits.book", *runs, "sweep", "--head", head)
    assert (verdict["verified"], verdict["runs"], verdict["unchecked"]) == (True, 6, [])
    assert len(verdict["without_ledger"]) == 2
    code, _, error = vestige("budget", "verify", "digits.book", *runs)
    assert code == 1
    assert "its run is missing: give" in error
    by("cy", *COMPARE[:1], "--resume", "sweep")  # paid for already: nothing is charged again
    assert as_json("budget", "show", "digits.book")["head"] == head

    code, out, _ = vestige("budget", "report", "digits.book")
    assert code == 0
    html = (digits / "digits.book.html").read_text()
    for word in ("ann", "bob", "cy", "run", "a count, with another tool", "the budget, 3", found["head"]):
        assert word in html
    assert "http" not in html.replace("http://www.w3.org", "")

    book = Book("digits.book", whole=True)
    secrets = [book.terms.data["root"], book.terms.data["key"], str(digits), "bob"]
    for words in (("--json",), ("--nist",)):
        code, out, _ = vestige("budget", "export", "digits.book", *words)
        assert code == 0
        assert not [secret for secret in secrets if secret in out]
    entry = as_json("budget", "export", "digits.book")
    assert (entry["privacy_guarantee"]["epsilon"], entry["accounting"]["runs"]) == (3, 7)
    assert "sampled-gaussian" in entry["accounting"]["mechanisms"]
    for heading in (
        "Privacy parameter",
        "Unit of privacy",
        "Trust model",
        "Utility and bias",
        "Data collection exposure",
    ):
        assert f"## {heading}" in vestige("budget", "export", "digits.book", "--nist")[1]


@pytest.mark.parametrize(
    ("runs", "epsilon"),
    [
        (1, 1.467),
        pytest.param(2, 2.063, marks=pytest.mark.slow),
        (5, 3.341),
        pytest.param(10, 4.890, marks=pytest.mark.slow),
    ],
)
def test_the_table_of_the_specification_by_the_command(tmp_path, monkeypatch, runs, epsilon):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("x\n" + "".join(f"{number}\n" for number in range(50)))
    plan = ("--sample-rate", 0.01, "--noise-multiplier", 1.2, "--steps", 1000)
    as_json(
        "budget",
        "open",
        "b",
        "--data",
        "people.csv",
        "--epsilon",
        epsilon,
        "--delta",
        1e-5,
        "--expect",
        "0.01,1.2,1000",
    )
    for _ in range(runs):
        as_json("budget", "reserve", "b", *plan)
    code, _, error = vestige("budget", "reserve", "b", *plan)
    assert code == 1
    assert f"spent or reserved by {runs} runs" in error


def test_reserve_release_grant_and_slots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in range(50)))
    (tmp_path / "slots.json").write_text(
        json.dumps([{"name": "night", "sample_rate": 0.01, "noise_multiplier": 1.2, "steps": 1000, "times": 2}])
    )
    opened = (
        "budget",
        "open",
        "b",
        "--data",
        "people.jsonl",
        "--epsilon",
        1.9,
        "--delta",
        1e-5,
        "--slots",
        "slots.json",
    )
    found = as_json(*opened)
    assert [slot["name"] for slot in found["slots"]] == ["night 1", "night 2"]
    plan = ("--sample-rate", 0.01, "--noise-multiplier", 1.5, "--steps", 500)
    first = as_json("budget", "reserve", "b", *plan)["reservation"]
    as_json("budget", "reserve", "b", *plan, "--slot", "night 2")
    assert vestige("budget", "reserve", "b", *plan)[0] == 1
    assert "0 of 2 slots are free" in vestige("budget", "show", "b")[1]
    as_json("budget", "release", "b", first)
    as_json("budget", "grant", "b", "ann", "--epsilon", 1)
    code, _, error = vestige("budget", "reserve", "b", *plan, "--person", "bob")
    assert (code, "bob has no grant" in error) == (1, True)
    as_json("budget", "reserve", "b", *plan, "--person", "ann")
    assert as_json("budget", "verify", "b")["verified"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("open", "b", "--epsilon", 1, "--delta", 1e-5), "--data is missing"),
        (("open", "b", "--epsilon", 1, "--delta", 1e-5, "--data", "gone.csv"), "gone.csv"),
        (("open", "b", "--epsilon", 1, "--delta", 0.5, "--data", "people.csv"), "is not below 1/N"),
        (("open", "b", "--epsilon", -1, "--delta", 1e-5, "--data", "people.csv"), "--epsilon=-1"),
        (("open", "b", "--epsilon", 1, "--delta", 1e-5, "--data", "people.csv", "--unit", "house"), "--unit='house'"),
        (("open", "b", "--epsilon", 1, "--delta", 1e-5, "--data", "people.csv", "--expect", "1,2"), "--expect='1,2' must be"),
        (("open", "b", "--epsilon", 1, "--delta", 1e-5, "--task", "digits-mpl"), "digits-mpl"),
        (("show", "gone"), "no such file"),
        (("show", "people.csv"), "no row of a book"),
        (("release", "there", "r9"), "is not open in"),
        (("verify", "there", "nowhere"), "is no run"),
        (("grant", "there", "ann", "--epsilon", 9), "must lie between 0 and"),
        (("enter", "there", "--epsilon", -1, "--note", "x"), "must not be negative"),
        (("frobnicate",), "No such command"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("x\n1\n2\n3\n")
    Book.create("there", terms(2, 1e-5))
    code, out, error = vestige("budget", *words)
    assert code in (1, 2)
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_what_a_book_cannot_count_is_refused_by_other_commands(digits, monkeypatch):
    for words, problem in (
        (("audit", "--membership", "loss", "--method", "dp-sgd", "--epsilon", 3, "--budget", "digits.book"), "without noise"),
        ((*COMPARE, "--epsilon", 1, "--reproducible", "--budget", "digits.book"), "reproducible runs protect nobody"),
        ((*TRAIN, "--epsilon", 1, "--reproducible", "--budget", "digits.book"), "no epsilon holds"),
        ((*TRAIN, "--epsilon", 1, "--slot", "x"), "--slot='x' is about a book"),
        ((*COMPARE, "--epsilon", 1, "--derived-from", "x"), "--derived-from='x' is about a book"),
        ((*COMPARE, "--epsilon", 1, "--derived-from", "gone.csv", "--budget", "digits.book"), "there is no such file"),
        ((*TRAIN, "--epsilon", 1, "--slot", "x", "--budget", "digits.book"), "is a book without slots"),
    ):  # fmt: skip
        code, _, error = vestige(*words)
        assert code == 2, error
        assert problem in error
    assert not as_json("budget", "show", "digits.book")["runs"]


def test_a_page_of_an_empty_book_and_of_slots(tmp_path):
    book = Book.create(tmp_path / "b", terms(2, 1e-5))
    assert "Nobody has spent anything yet" in page(Book(book.path, whole=True))


def test_the_page_of_the_documentation_says_what_happens(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "budget.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    exec(code, {})
    assert capsys.readouterr().out == "5 0.0\n"
    [slots] = re.findall(r"```json\n(.*?)```", text, flags=re.S)
    assert [slot.name for slot in slots_of(json.loads(slots))][-2:] == ["nightly 5", "count"]


# --- a comparison and its book ----------------------------------------------------------------------------------------


@pytest.fixture
def swept(digits):
    """A comparison of two runs, charged."""
    words = ("--task", "digits-mlp", "--method", "dp-sgd", "--noise-multiplier", 4, "--sample-rate", 0.05, "--steps", 2)
    code, _, error = vestige(
        "compare", *words, "--seeds", 2, "--rates", "auto", "--workers", 1, "--budget", "digits.book", "--out", "sweep"
    )
    assert code == 0, error
    return digits


def charged():
    return [run["counted"] for run in as_json("budget", "show", "digits.book")["runs"]]


def resume(folder):
    found = vestige("compare", "--resume", folder, "--workers", 1, "--budget", "digits.book")
    assert found[0] == 0, found


@pytest.mark.slow
def test_runs_of_a_comparison_that_are_made_once_more_are_charged_once_more(swept):
    """Records taken away after they were read, a copied folder, a killed session: each would be a free second answer."""
    assert charged() == [4]
    resume("sweep")
    assert charged() == [4], "all are on record"
    shutil.copytree("sweep", "copy")
    first, second = sorted((swept / "sweep" / "runs").glob("*.json"))
    first.unlink()
    resume("sweep")
    assert charged() == [4, 2], "it was finished, so another run costs"
    assert as_json("budget", "verify", "digits.book", "sweep")["runs"] == 1
    next((swept / "copy" / "runs").glob("*.json")).unlink()
    resume("copy")
    assert charged() == [4, 2, 2]
    code, _, error = vestige("budget", "verify", "digits.book", "sweep", "copy")
    assert (code, "counted twice" in error) == (1, True)


@pytest.mark.slow
def test_a_comparison_that_was_interrupted_goes_on_for_what_it_paid(swept, monkeypatch):
    [held] = Book("digits.book", whole=True).state.reservations.values()
    ComparisonFolder("again").create(ComparisonFolder("sweep").specification())

    def session(made, error):
        """Write so many records, and end by an error."""
        folder = ComparisonFolder("again")
        with pytest.raises(error), paid(folder, folder.specification(), Machine(), "digits.book"):
            for path in sorted((swept / "sweep" / "runs").glob("*.json"))[:made]:
                shutil.copy(path, swept / "again" / "runs")
            raise error

    session(1, KeyboardInterrupt)
    assert charged() == [4, 4]
    session(1, KeyboardInterrupt)
    assert charged() == [4, 4], "interrupted, it goes on for what was paid"
    next((swept / "again" / "runs").glob("*.json")).unlink()
    session(0, KeyboardInterrupt)
    assert charged() == [4, 4, 4], "a record was taken away, and the run is made again"
    monkeypatch.setattr("vestige.compare.payment.has_ended", lambda holder: True)
    book = Book("digits.book")
    book.note(read_json(Path("again/budget.json"))["reservations"][-1], {"session": held.holder or {"pid": 1}})
    session(0, KeyboardInterrupt)
    assert charged() == [4, 4, 4, 4], "killed: nobody knows what it made"
    assert len(Book("digits.book").state.open) == 1


@pytest.mark.slow
def test_a_comparison_that_was_begun_without_a_book_stays_without_one(swept):
    (swept / "sweep" / "budget.json").unlink()
    code, _, error = vestige("compare", "--resume", "sweep", "--budget", "digits.book")
    assert (code, "was begun without a book" in error) == (2, True)
