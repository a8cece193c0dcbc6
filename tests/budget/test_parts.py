"""Do disjoint parts of the rows spend side by side, and is nobody's row charged less than it was asked about?"""

from functools import cache
from math import exp, inf

import pytest

from commands import as_json, vestige
from vestige.accounting.ledger import Ledger
from vestige.budget import Book, BookError, attach, terms, usual
from vestige.budget.storage import sealed
from vestige.budget.verify import verify
from vestige.priced_questions import BudgetSpent, Gaussian
from vestige.tasks import source_of

RUN = usual(0.01, 1.2, 1000)
EPSILON, DELTA = 1.0, 0.05


def outcomes(answer):
    """(probability, privacy loss) of each outcome of the worst answer of this (epsilon, delta)."""
    epsilon, delta = answer
    truly = exp(epsilon) / (1 + exp(epsilon))
    return [(delta, inf), ((1 - delta) * truly, epsilon), ((1 - delta) * (1 - truly), -epsilon)]


@pytest.fixture
def parted(tmp_path):
    """Holds two runs on each row."""
    return Book.create(tmp_path / "book", terms(2.063, 1e-5, expect=RUN, parts=("north", "south")))


def spend(book, part="", runs=1):
    for _ in range(runs):
        name = book.reserve(RUN, purpose="run", part=part)
        book.charge(name, RUN)
        book.close(name)


def test_parts_spend_side_by_side_and_the_whole_spends_from_each(parted):
    spend(parted, "north", 2)
    assert (parted.affords(RUN, "north"), parted.affords(RUN, "south"), parted.affords(RUN)) == (0, 2, 0)
    with pytest.raises(BudgetSpent, match=r"\(part 'north'\) does not hold this run"):
        spend(parted, "north")
    with pytest.raises(BudgetSpent, match="does not hold this run"):
        spend(parted)
    spend(parted, "south")
    assert parted.reading().epsilon_spent <= 2.063
    again = Book(parted.path, whole=True)
    assert again.reading() == parted.reading()
    assert verify(parted.path).reading == parted.reading()


def test_what_is_asked_of_all_rows_counts_for_each_part(parted):
    spend(parted)
    spend(parted, "south")
    assert [parted.affords(RUN, part) for part in ("north", "south", "")] == [1, 0, 0]
    with pytest.raises(BudgetSpent):
        spend(parted, "south")
    parted.enter(0.01, 0.0, "a count of the north", part="north")
    with pytest.raises(BudgetSpent):
        parted.enter(5.0, 0.0, "too much for the north", part="north")


def test_no_adversary_learns_more_about_a_row_of_a_part_than_the_book_says(tmp_path):
    """All strategies of three questions, each about the row's own part, the other or both, enumerated exactly."""
    told = terms(EPSILON, DELTA, external_share=0.5, parts=("mine", "other"))
    menu = [(answer, part) for answer in ((0.6, 0.0), (0.0, DELTA / 2)) for part in ("mine", "other", "")]

    @cache
    def admitted(asked):
        book = Book.create(tmp_path / "-".join(str(menu.index(each)) for each in asked), told)
        try:
            for (epsilon, delta), part in asked:
                book.enter(epsilon, delta, "a query", part=part)
        except BudgetSpent:
            return False
        return True

    @cache
    def worst(asked, loss):
        best = max(0.0, 1 - exp(EPSILON - loss))
        for each in menu if len(asked) < 3 else ():
            following = tuple(sorted((*asked, each)))
            if admitted(following):
                answers = [(1.0, 0.0)] if each[1] == "other" else outcomes(each[0])
                best = max(best, sum(p * worst(following, round(loss + more, 12)) for p, more in answers if p))
        return best

    assert 0 < worst((), 0.0) <= DELTA
    assert admitted((((0.6, 0.0), "mine"), ((0.6, 0.0), "other")))


def test_parts_survive_a_sum_and_forged_ones_are_found(parted, monkeypatch):
    monkeypatch.setattr("vestige.budget.book.TOTAL_EVERY", 3)
    spend(parted, "north", 2)
    short = Book(parted.path)
    assert b'"row":"total"' in parted.path.read_bytes()
    assert [short.affords(RUN, part) for part in ("north", "south")] == [0, 2]
    verify(parted.path)
    line, _ = sealed({"seq": short._file.count, "previous": short.head, "row": "enter", "by": "eve", "note": "", "at": "",
                      "epsilon": 0.1, "delta": 0.0, "part": "nowhere"})  # fmt: skip
    with parted.path.open("ab") as file:
        file.write(line)
    with pytest.raises(BookError, match="no part 'nowhere'"):
        Book(parted.path)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"unit": "user"}, "one user may have rows in several parts"),
        ({"adjacency": "replace"}, "may lie in another part"),
        ({"parts": ("a", "a")}, "two have the same name"),
    ],
)
def test_parts_that_one_unit_may_share_are_refused(more, problem):
    with pytest.raises(ValueError, match=problem):
        terms(1.0, 1e-5, **{"parts": ("a", "b"), **more})


def test_by_the_command_a_run_on_rows_of_one_part_is_charged_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{number},{number % 7 / 10},{('north', 'south')[number % 2]},{number % 3 % 2}" for number in range(60)]
    for name, kept in (("all", rows), ("north", rows[::2]), ("mixed", rows[:9])):
        (tmp_path / f"{name}.csv").write_text("a,b,place,y\n" + "\n".join(kept) + "\n")
    opened = ("budget", "open", "b", "--data", "all.csv", "--epsilon", 6, "--delta", 1e-5)
    found = as_json(*opened, "--part-by", "place")
    assert [each["part"] for each in found["parts"]] == ["north", "south"]
    for name in ("north", "mixed"):
        ledger = Ledger(tmp_path / f"{name}.jsonl")
        source = source_of(None, f"{name}.csv")
        entry = attach(ledger, "b", {Gaussian(9.0): 1}, purpose="train", source=source)
        ledger.open({"noise": "secret", "budget": entry})
        ledger.ask(Gaussian(9.0), step=0, part=0, sensitivity=1.0)
        ledger.finish({})
    found = as_json("budget", "show", "b")
    assert [(run["part"], run["rows"]) for run in found["runs"]] == [("north", "30 rows"), (None, "9 rows")]
    north, south = (each["epsilon_spent"] for each in found["parts"])
    assert north > south > 0
    assert found["epsilon_spent"] == north
    assert as_json("budget", "verify", "b", "north.jsonl", "mixed.jsonl")["runs"] == 2
    assert as_json("budget", "reserve", "b", "--sample-rate", 0.01, "--noise-multiplier", 3, "--steps", 5,
                   "--part", "south")["epsilon_spent"] == north  # fmt: skip
    for words, problem in (
        ((*opened[:2], "c", *opened[3:], "--part-by", "plaice"), "is no column"),
        (("budget", "enter", "b", "--epsilon", 0.1, "--note", "x", "--part", "east"), "its parts are north, south"),
    ):
        code, _, error = vestige(*words)
        assert (code, problem in error, error.count("\n")) == (2, True, 1), error
