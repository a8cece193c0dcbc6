"""Are made-up rows made of noised answers alone, at the price that is stated, and are they of any use?"""

import json
import re
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch

import vestige
from commands import as_json
from commands import vestige as command
from vestige import accounting
from vestige.accounting.ledger import LedgerError, read
from vestige.priced_questions import BudgetSpent, ExponentialMechanism, Gaussian
from vestige.randomness.keys import Randomness
from vestige.synthesis import quality
from vestige.synthesis.curator import InFile, InMemory, TableCurator
from vestige.synthesis.evolution import EvolutionPlan, evolved, varied
from vestige.synthesis.marginals import MarginalsPlan, fit, fitted, marginals, simplex
from vestige.synthesis.schema import columns_of, read_table
from vestige.synthesis.tables import TableRun, TableSynthesis
from vestige.training.verify import verify

COLUMNS = "age=18..80;work=office|field;pay=0.0..9000.0"


def people(count=1500, seed=0):
    random = np.random.default_rng(seed)
    office = random.random(count) < 0.4
    age = np.clip(random.normal(30 + 20 * office, 6), 18, 80).astype(int)
    return {
        "age": age.tolist(),
        "work": np.where(office, "office", "field").tolist(),
        "pay": (100.0 * age + random.normal(0, 300, count)).tolist(),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("people") / "people.csv"
    rows = people()
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def curator(rows, columns, charged=None, **settings):
    def ask(question, *, step, part, sensitivity):
        if charged is not None:
            charged.append((question, step, sensitivity))

    sizes = [column.cells for column in columns]
    return TableCurator(rows, sizes, ask, Randomness.reproducible(0), InMemory(), **settings)


# --- the schema -------------------------------------------------------------------------------------------------------


def test_columns_are_what_is_declared_and_nothing_of_the_rows():
    columns = columns_of("age=18..80;work?=office|field;pay=0.0..9000.0", bins=8)
    rows = read_table({"age": [18, 80, 500], "work": ["field", "", None], "pay": [0, 8999.0, -5]}, columns)
    assert [column.cells for column in columns] == [8, 3, 8]
    assert rows.tolist() == [[0, 1, 0], [7, 2, 7], [7, 2, 0]]
    values = columns[0].decode(np.array([0, 7] * 200), np.random.default_rng(0))
    assert all(isinstance(value, int) and 18 <= value <= 80 for value in values)
    assert min(values) == 18
    assert max(values) == 80
    assert columns[1].decode(np.array([0, 2]), np.random.default_rng(0)) == ["office", None]


def test_a_value_falls_into_the_cell_that_gives_it_back():
    (age,) = columns_of("age=0..10", bins=4)
    for value in range(11):
        cell = int(age.encode([value])[0])
        assert any(age.decode(np.array([cell]), np.random.default_rng(seed)) == [value] for seed in range(60))


def test_a_public_file_declares_columns_too(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"age": [18, 80], "work?": ["office", "field"]}))
    assert columns_of(str(path)) == columns_of("age=18..80;work?=office|field")


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("", "none is named"),
        ("age", "must be NAME=LOW..HIGH"),
        ("age=5..5", "to a larger one"),
        ("age=a..b", "from a number"),
        ("work=a", "one category"),
        ("work=a|a", "each category once"),
        ("age=1..2;age=1..3", "named twice"),
        ({"age": 5}, "pair of bounds"),
        ("age=18..99999999999999999999999", "must have bounds from -9007199254740992"),
        ({"age": (0, 10**400)}, "must have bounds from -9007199254740992"),
        ("age=-1e308..1e308", "must have bounds from -1e[+]300 to 1e[+]300"),
        ("age=0.0..inf", "must have bounds from"),
        ("age=0.0..nan", "must have bounds from"),
        ("nowhere.json", "cannot be read"),
    ],
)
def test_columns_that_are_none_are_refused(declared, words):
    with pytest.raises(ValueError, match=words):
        columns_of(declared)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["secret"], "row 1 of the data is no number"),
        (["nan"], "row 1 of the data is no number"),
        ([10**400], "row 1 of the data is no number"),
        ([""], r"declare that it may: 'age\?=...'"),
    ],
)
def test_a_value_without_a_cell_is_named_by_its_place_and_never_shown(values, words):
    with pytest.raises(ValueError, match=words) as error:
        read_table({"age": values}, columns_of("age=1..5"))
    assert "secret" not in str(error.value)


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_adding_a_row_moves_counts_votes_and_scores_by_what_is_charged():
    """Exactly, without noise: the sensitivity that each question states is the largest move."""
    columns = columns_of(COLUMNS, bins=5)
    rows = read_table(people(300), columns)
    exact = 1e-9

    def answers(table):
        charged = []
        held = curator(table, columns, charged)
        own = [np.arange(cells) for cells in held.sizes]
        one = np.concatenate([c.ravel() for c in held.counts([(0,), (1,), (2,)], own, exact)])
        two = np.concatenate([c.ravel() for c in held.counts([(0, 1), (1, 2)], own, exact)])
        vectors = [torch.from_numpy(column.vectors()) for column in columns]
        points = torch.rand(40, sum(v.shape[1] for v in vectors), generator=torch.Generator().manual_seed(0))
        votes = held.votes(points, vectors, exact)
        guesses = [np.full(cells, 1 / cells) for cells in held.sizes]
        held.population = 300
        scores = np.array(list(held.pair_errors(own, guesses).values()))
        return (one, two, votes), scores, [sensitivity for _, _, sensitivity in charged]

    before, scores_before, sensitivities = answers(rows)
    assert before[2].sum() == pytest.approx(300, abs=1e-3)
    for row in range(0, 300, 60):
        after, scores_after, _ = answers(np.delete(rows, row, axis=0))
        for first, second, sensitivity in zip(before, after, sensitivities, strict=True):
            assert np.linalg.norm(first - second) == pytest.approx(sensitivity, abs=1e-4)
        assert np.abs(scores_before - scores_after).max() <= 1 + 1e-9


def test_the_noise_is_what_was_priced():
    columns = columns_of("a=x|y;b=x|y")
    held = curator(np.zeros((10, 2), dtype=np.int64), columns)
    own = [np.arange(2)] * 2
    found = np.concatenate([np.concatenate(held.counts([(0,), (1,)], own, 3.0)) for _ in range(500)])
    noise = found - np.tile([10, 0, 10, 0], 500)
    assert noise.std() == pytest.approx(3.0 * np.sqrt(2), rel=0.06)


def test_votes_and_right_answers_are_noised_as_priced():
    held = curator(np.zeros((400, 2), dtype=np.int64), columns_of("a=x|y;b=x|y"))
    points, vectors = torch.arange(2000.0)[:, None].expand(-1, 2), [torch.zeros(2, 1)] * 2
    votes = held.votes(points, vectors, 3.0)
    assert votes[1:].std() == pytest.approx(3.0, rel=0.06)
    assert votes[0] == pytest.approx(400, abs=20)
    shares = [held.right_answers(lambda rows: np.arange(400) % 2, 0, 3.0) for _ in range(500)]
    assert np.std(shares) == pytest.approx(3.0 / 400, rel=0.15)


def test_a_question_that_was_refused_is_not_answered():
    def refuse(question, *, step, part, sensitivity):
        raise BudgetSpent("the budget is spent")

    held = TableCurator(np.zeros((9, 2), dtype=np.int64), [2, 2], refuse, Randomness.reproducible(0), InMemory())
    looked = []
    for ask in (
        lambda: held.right_answers(lambda rows: looked.append(rows) or rows[:, 0], 0, 1.0),
        lambda: held.choice(lambda: looked.append("scores") or [1.0, 2.0], 1.0),
    ):
        with pytest.raises(BudgetSpent):
            ask()
    assert not looked, "rows were looked at before that was paid"
    assert held.step == 0


@pytest.mark.parametrize("method", ["marginals", "evolution"])
def test_a_run_asks_what_it_planned_and_costs_at_most_its_budget(method):
    columns = columns_of(COLUMNS)
    plan = MarginalsPlan(3, 4.0) if method == "marginals" else EvolutionPlan(4.0, 3)
    charged = []
    held = curator(read_table(people(), columns), columns, charged)
    if method == "marginals":
        fitted(held, plan)
    else:
        evolved(held, plan, columns, np.random.default_rng(0))
    assert Counter(question for question, _, _ in charged) == Counter(dict(plan.questions()))
    assert [step for _, step, _ in charged] == list(range(len(charged)))
    if method == "marginals":
        # By Renyi divergences of order a, all of it is one Gaussian question of the plan's multiplier: a / 2 m^2.
        total = sum(
            count * (1 / (2 * q.multiplier**2) if isinstance(q, Gaussian) else q.choice_epsilon**2 / 8)
            for q, count in plan.questions()
        )
        assert total == pytest.approx(1 / (2 * 4.0**2))


# --- what is made of it -----------------------------------------------------------------------------------------------


def test_belief_propagation_gives_the_marginals_of_the_whole_distribution():
    random = np.random.default_rng(0)
    nodes = [random.normal(size=k) for k in (2, 3, 4, 2)]
    edges = {(0, 1): random.normal(size=(2, 3)), (1, 2): random.normal(size=(3, 4))}
    found, pairs = marginals(nodes, edges, [(0, None), (1, 0), (2, 1), (3, None)])
    logs = nodes[0][:, None, None, None] + nodes[1][:, None, None] + nodes[2][:, None] + nodes[3]
    logs = logs + edges[0, 1][:, :, None, None] + edges[1, 2][None, :, :, None]
    whole = np.exp(logs) / np.exp(logs).sum()
    for place, share in enumerate(found):
        np.testing.assert_allclose(share, whole.sum(axis=tuple(a for a in range(4) if a != place)))
    np.testing.assert_allclose(pairs[0, 1], whole.sum(axis=(2, 3)))
    np.testing.assert_allclose(pairs[1, 2], whole.sum(axis=(0, 3)))


def test_a_fit_to_exact_counts_gives_them_back():
    random = np.random.default_rng(1)
    joint = random.random((3, 4)) + 0.1
    joint /= joint.sum()
    counted = [1000 * joint.sum(axis=1), 1000 * joint.sum(axis=0)]
    nodes, pairs = fit(counted, [np.ones(3), np.ones(4)], {(0, 1): 1000 * joint}, 1.0, 1000)
    np.testing.assert_allclose(pairs[0, 1], joint, atol=2e-3)
    np.testing.assert_allclose(nodes[0], joint.sum(axis=1), atol=2e-3)


def test_the_simplex_is_the_nearest_point():
    counts = np.array([5.0, -2.0, 1.0, 0.5])
    near = simplex(counts, 4.0)
    assert near.sum() == pytest.approx(4.0)
    assert near.min() >= 0
    for other in np.random.default_rng(0).dirichlet(np.ones(4), 200) * 4:
        assert np.linalg.norm(counts - near) <= np.linalg.norm(counts - other) + 1e-9


def test_with_next_to_no_noise_rows_are_those_of_the_table():
    columns = columns_of(COLUMNS, bins=8)
    rows = read_table(people(), columns)
    made = fitted(curator(rows, columns), MarginalsPlan(3, 0.02)).sample(3000, np.random.default_rng(0))
    assert quality.variation(made, rows, columns, (0,)) < 0.03
    assert quality.variation(made, rows, columns, (0, 1)) < 0.06
    grown = evolved(curator(rows, columns), EvolutionPlan(0.05, 6), columns, np.random.default_rng(0))
    assert quality.variation(grown.sample(3000, np.random.default_rng(0)), rows, columns, (0, 1)) < 0.25


def test_what_is_charged_does_not_follow_from_answers(monkeypatch):
    """Where no pair is chosen, columns are counted again."""
    monkeypatch.setattr("vestige.synthesis.curator.choose", lambda *_: 0)
    columns = columns_of("a=x|y;b=x|y;c=x|y")
    rows, plan, charged = np.zeros((60, 3), dtype=np.int64), MarginalsPlan(3, 4.0), []
    found = fitted(curator(rows, columns, charged), plan)
    assert not found.edges
    assert Counter(question for question, _, _ in charged) == Counter(dict(plan.questions()))
    assert [sensitivity for _, _, sensitivity in charged][-1] == pytest.approx(3**0.5)
    exact = fitted(curator(rows + np.array([0, 1, 0]), columns), MarginalsPlan(3, 1e-6))
    assert [nodes.round(3).tolist() for nodes in exact.nodes] == [[1, 0], [0, 1], [1, 0]]


def test_columns_that_tell_nothing_of_each_other_are_not_paired():
    words = [f"w{place}" for place in range(30)]
    columns = columns_of({"a": words, "b": words, "c": words})
    random = np.random.default_rng(0)
    first = random.integers(0, 30, 20_000)
    rows = np.column_stack([first, first, random.integers(0, 30, 20_000)])
    found = fitted(curator(rows, columns), MarginalsPlan(3, 30.0))
    assert list(found.edges) == [(0, 1)]


def test_variations_stay_within_the_columns():
    columns = columns_of("age?=18..80;work=office|field")
    shares = [np.full(column.cells, 1 / column.cells) for column in columns]
    rows = np.zeros((500, 2), dtype=np.int64)
    for share in (0.0, 0.3, 1.0):
        found = varied(rows, columns, shares, share, np.random.default_rng(0))
        assert (found[:, 0] < columns[0].cells).all()
        assert (found[:, 1] < 2).all()
        assert (found != rows).any() == (share > 0)


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["marginals", "evolution"])
@pytest.mark.everyday("marginals")
def test_a_synthesis_verifies_has_a_card_and_a_page_and_is_of_use(method, file, tmp_path):
    out = tmp_path / "synth"
    made = vestige.synthesize(
        file, columns=COLUMNS, epsilon=1, delta=1e-5, samples=700, method=method, test=people(400, 1),
        label_column="work", out=out, bins=10,
    )  # fmt: skip
    assert 0.99 < made.guarantee.epsilon <= 1.0
    assert made.quality["test_accuracy"] > 0.8
    assert made.quality["column_error"] < 0.35
    lines = (out / "data.csv").read_text().splitlines()
    assert lines[0] == "age,work,pay"
    assert len(lines) == 701
    assert all(re.fullmatch(r"\d+,(office|field),[\d.e+]+", line) for line in lines[1:])
    verdict = verify(out)
    assert verdict.finished
    assert verdict.unchecked == ()
    assert verdict.guarantee.epsilon == made.guarantee.epsilon
    history = read(out / "ledger.jsonl")
    assert accounting.epsilon(history.asks, 1e-5) == pytest.approx(made.guarantee.epsilon, rel=1e-6)
    if method == "marginals":
        assert sum(n for q, n in history.asks.items() if isinstance(q, ExponentialMechanism)) == 2
    assert "made with differential privacy: **epsilon" in (out / "README.md").read_text()
    for name in ("README.md", "report.html", "synthesis.json"):
        assert "seconds" not in (out / name).read_text()
    assert "Columns" in (out / "report.html").read_text()
    (out / "data.csv").write_text("\n".join([*lines[:-1], "33,office,1"]) + "\n")
    with pytest.raises(LedgerError, match="is not what the run left"):
        verify(out)


def test_a_card_that_was_edited_does_not_verify(tmp_path):
    out = tmp_path / "synth"
    vestige.synthesize(people(300), columns=COLUMNS, epsilon=1, delta=1e-5, out=out)
    assert "attack it by --membership synthetic" in command("audit", out)[2]
    card = out / "README.md"
    text = card.read_text()
    assert command("verify", out)[0] == 0
    card.write_text(text.replace("made-up rows", "rows of people who agreed"))
    code, _, said = command("verify", out)
    assert code
    assert "says something else than synthesis.json" in said
    card.write_text(text.replace("# synth", "# Made-up people"))
    assert command("verify", out)[0] == 0


@pytest.mark.parametrize(
    "declared",
    [
        "t=1700000000.0..1700086400.0",
        "t=1234567.0..1234571.0",
        "t=0.1234567..0.1234569",
        "t=-2.5..1e300",
        "t=0.0..1e-9",
    ],
)
def test_numbers_have_digits_enough_to_stay_in_their_cells(declared):
    (column,) = columns_of(declared)
    cells = np.repeat(np.arange(column.cells), 200)
    values = column.decode(cells, np.random.default_rng(0))
    assert all(column.low <= value <= column.high for value in values)
    assert (column.encode(values) != cells).mean() < 0.01
    assert len(set(values)) > 1000


class Ambiguous:
    """As pandas' NA, which is neither equal to anything nor not."""

    def __ne__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


def test_what_is_missing_is_missing_in_whatever_form():
    (column,) = columns_of("a?=1..9")
    missing = [None, "", " ", float("nan"), Decimal("sNaN"), Ambiguous()]
    assert column.encode(missing).tolist() == [9] * len(missing)
    with pytest.raises(ValueError, match="row 1 of the data is no number"):
        column.encode([np.zeros(2)])
    (word,) = columns_of({"a": [True, False]})
    assert word.encode([np.True_, np.False_]).tolist() == [0, 1]
    (number,) = columns_of({"a": [0, 1, 2]})
    assert number.encode([2.0, 0]).tolist() == [2, 0]
    (floats,) = columns_of({"a": [1.0, 2.0, 3.0]})
    assert floats.encode(["1.0", 3.0]).tolist() == [0, 2]
    (mixed,) = columns_of({"a": [0, 1, "other"]})
    assert mixed.encode(["other", 1]).tolist() == [2, 1]


def test_a_record_that_claims_less_than_its_ledger_does_not_verify(tmp_path):
    out = tmp_path / "synth"
    vestige.synthesize(people(300), columns=COLUMNS, epsilon=1, delta=1e-5, out=out)
    path = out / "synthesis.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "epsilon": 0.5}))
    with pytest.raises(LedgerError, match="synthesis.json says epsilon 0.5"):
        verify(out)


def test_an_interrupted_run_resumes_without_asking_again_and_one_that_lost_an_answer_is_refused(file, tmp_path):
    def job(**more):
        return TableSynthesis(data=str(file), columns=COLUMNS, epsilon=1, method="evolution", **more)

    out = tmp_path / "synth"
    assert TableRun(job(), out).complete(lambda done, of: done < 2) is None
    made = vestige.synthesize(file, columns=COLUMNS, epsilon=1, method="evolution", out=out, resume=True)
    assert made.asked == 9
    assert verify(out).attempts == 2
    lost = tmp_path / "lost"
    assert TableRun(job(), lost).complete(lambda done, of: done < 2) is None
    (lost / "answers.pt").unlink()
    rows = (lost / "ledger.jsonl").read_text()
    words = "question 1 of 9 was charged, and its answer is lost: .* this one has cost epsilon 0[.]"
    with pytest.raises(ValueError, match=words):
        vestige.synthesize(file, columns=COLUMNS, epsilon=1, method="evolution", out=lost, resume=True)
    code, out, error = command("synthesize", "--resume", lost)
    assert (code, out) == (2, "")
    assert "Begin another synthesis, in a new folder" in error
    assert (lost / "ledger.jsonl").read_text() == rows


def test_a_run_that_was_killed_before_its_seal_is_sealed_when_it_resumes(file, tmp_path, monkeypatch):
    from vestige.accounting.ledger import Ledger

    def killed(self, files):
        raise KeyboardInterrupt

    given = {"columns": COLUMNS, "epsilon": 1, "out": tmp_path / "synth"}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            vestige.synthesize(file, **given)
    assert (tmp_path / "synth" / "synthesis.json").exists()
    assert not verify(tmp_path / "synth", unfinished=True).finished
    vestige.synthesize(file, **given, resume=True)
    assert verify(tmp_path / "synth").finished
    with pytest.raises(ValueError, match="is already finished"):
        vestige.synthesize(file, **given, resume=True)


OWNED = {"age": [20, 30, 40, 50] * 50, "work": ["a", "b"] * 100, "who": [row // 4 for row in range(200)]}
OF_USERS = {"user_column": "who", "rows_per_user": 4}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, OF_USERS),
        (OF_USERS, {}),
        ({}, {"reproducible": True}),
        ({}, {"label_column": "work", "evaluate": "private"}),
    ],
)
def test_a_run_is_resumed_for_whom_and_as_it_was_begun(first, then, tmp_path):
    """What was answered before was noised for rows: it says nothing about users."""
    asked = {"data": OWNED, "columns": {"age": (0, 60), "work": ["a", "b"]}, "epsilon": 1.0, "delta": 1e-4}
    begun = TableRun(TableSynthesis(**asked, **first), tmp_path / "run")
    assert begun.complete(lambda done, of: done < 1) is None
    with pytest.raises(ValueError, match="is not what it was when the run began"):
        vestige.synthesize(**asked, **then, out=tmp_path / "run", resume=True)
    assert vestige.synthesize(**asked, **first, out=tmp_path / "run", resume=True).guarantee.epsilon <= 1.0


def test_users_of_a_data_frame_are_named_by_a_column_and_none_may_be_missing():
    pandas = pytest.importorskip("pandas")
    asked = {"columns": {"age": (0, 60), "work": ["a", "b"]}, "epsilon": 1.0, "delta": 1e-4, **OF_USERS}
    assert vestige.synthesize(pandas.DataFrame(OWNED), **asked).guarantee.unit == "user"
    frame = pandas.DataFrame({**OWNED, "who": [None, *OWNED["who"][1:]]})
    with pytest.raises(ValueError, match="row 0 has no user"):
        vestige.synthesize(frame, **asked)


def test_public_chance_of_a_resumed_run_is_that_of_its_beginning(tmp_path):
    out, settings = tmp_path / "synth", {"columns": COLUMNS, "epsilon": 1.0, "method": "evolution", "seed": 3}
    job = TableSynthesis(data=people(300), **settings)
    assert TableRun(job, out).complete(lambda done, of: done < 3) is None
    with pytest.raises(ValueError, match="seed is not what it was when the run began, 3"):
        TableRun(replace(job, seed=4), out, resume=True)
    assert TableRun(replace(job, seed=None), out, resume=True).complete() is not None


def test_a_request_that_was_edited_is_not_resumed(tmp_path):
    asked = {"data": OWNED, "columns": {"age": (0, 60), "work": ["a", "b"]}, "epsilon": 1.0, "delta": 1e-4}
    begun = TableRun(TableSynthesis(**asked, **OF_USERS), tmp_path / "run")
    assert begun.complete(lambda done, of: done < 1) is None
    request = json.loads((tmp_path / "run" / "run.json").read_text())
    del request["public"]["users"]
    request["public"]["adjacency"] = "zero-out one row"
    (tmp_path / "run" / "run.json").write_text(json.dumps(request))
    with pytest.raises(ValueError, match="but the ledger was opened with"):
        vestige.synthesize(**asked, out=tmp_path / "run", resume=True)


def test_answers_of_a_resumed_run_are_those_that_were_kept(tmp_path):
    kept = InFile(tmp_path / "answers.pt")
    kept.keep(0, torch.tensor([1.5]))
    again = InFile(tmp_path / "answers.pt")
    assert len(again) == 1
    assert again.known(0).tolist() == [1.5]
    assert again.known(1) is None


def test_a_private_evaluation_is_charged_and_near_the_truth():
    rows = people(4000)
    made = vestige.synthesize(
        rows, columns=COLUMNS, epsilon=4, delta=1e-5, label_column="work", evaluate="private", bins=8
    )
    assert made.asked == 5
    assert made.quality["private_accuracy"] == pytest.approx(0.95, abs=0.06)
    error = made.quality["private_accuracy_error"]
    assert 0 < error < 0.01
    people_of_four = vestige.synthesize(
        {**rows, "who": [row // 4 for row in range(4000)]}, columns=COLUMNS, epsilon=4, delta=1e-5, bins=8,
        label_column="work", evaluate="private", user_column="who", rows_per_user=4,
    )  # fmt: skip
    assert people_of_four.quality["private_accuracy_error"] == pytest.approx(4 * error, rel=0.01)


def test_a_reproducible_run_repeats_and_has_no_epsilon():
    settings = {"columns": COLUMNS, "epsilon": 1, "delta": 1e-5, "seed": 4, "reproducible": True, "samples": 20}
    first, second = (vestige.synthesize(people(300), **settings) for _ in range(2))
    assert first.rows == second.rows
    assert first.guarantee.epsilon is None
    secret = vestige.synthesize(people(300), **{**settings, "reproducible": False})
    assert secret.rows != first.rows


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"columns": None}, "columns=None"),
        ({"epsilon": None}, "epsilon=None"),
        ({"method": "mst"}, "method='mst' is unknown"),
        ({"iterations": 4}, "goes with method='evolution'"),
        ({"label_column": "pay"}, "no column of categories"),
        ({"evaluate": "private"}, "label_column=None"),
        ({"evaluate": "public"}, "must be 'private'"),
        ({"delta": 0.01}, "is not below 1/N"),
        ({"samples": 0}, "samples=0"),
        ({"speed": 3}, "speed=3 is unknown"),
        ({"columns": "years=1..3"}, "no such column"),
        ({"columns": 5}, "columns: give"),
        ({"columns": ["age", "work"]}, "columns: give"),
        ({"columns": {1: (0, 1)}}, "the name 1 must be text"),
        ({"columns": {"age": [18, "x"]}}, "categories of one kind"),
        ({"columns": {"age": [18, None]}}, "categories of one kind"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(given, words):
    settings = {"columns": COLUMNS, "epsilon": 1.0, "delta": 1e-5, **given}
    with pytest.raises(ValueError, match=words):
        vestige.synthesize(people(300), **{key: value for key, value in settings.items() if value is not None})


def test_a_line_with_more_fields_than_columns_is_refused(tmp_path):
    """A comma without quotes moves what follows it into the next column."""
    path = tmp_path / "people.csv"
    path.write_text("age,work\n" + "30,office\n" * 300 + "30,office,field\n")
    with pytest.raises(ValueError, match="row 301 has more fields than there are columns"):
        vestige.synthesize(path, columns="age=18..80;work=office|field", epsilon=1, delta=1e-5)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_leave_in_the_form_that_they_came_in(suffix, tmp_path):
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(people(300)), tmp_path / "people.parquet")
    else:
        rows = people(300)
        lines = (json.dumps(dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True))
        (tmp_path / "people.jsonl").write_text("\n".join(lines))
    out = tmp_path / "synth"
    made = vestige.synthesize(tmp_path / f"people{suffix}", columns=COLUMNS, epsilon=1, delta=1e-5, samples=30, out=out)
    assert verify(out).finished
    again = read_table(str(out / f"data{suffix}"), columns_of(COLUMNS))
    assert len(again) == made.count == 30


def test_the_command_makes_rows_and_its_errors_are_one_line(file, tmp_path):
    out = tmp_path / "synth"
    base = ["synthesize", "--data", str(file), "--columns", COLUMNS, "--epsilon", "1"]
    said = as_json(*base, "--samples", "50", "--out", out)
    assert said["samples"] == 50
    assert said["epsilon"] <= 1
    assert command("verify", out)[0] == 0
    for flags, words in (
        (["--columns", "ages=1..3"], "no such column"),
        (["--method", "mst"], "--method='mst' is unknown"),
        (["--out", out], "already holds a run"),
        (["--test", file], "is the training data"),
    ):
        code, _, error = command(*base, *flags)
        assert code == 2
        assert words in error
        assert error.count("\n") == 1
    assert "already finished" in command("synthesize", "--resume", out)[2]


def test_a_synthesis_is_not_resumed_by_the_command_of_another_run(file, tmp_path):
    vestige.synthesize(file, columns=COLUMNS, epsilon=1, delta=1e-5, samples=9, out=tmp_path / "synth")
    code, _, error = command("train", "--resume", tmp_path / "synth")
    assert (code, f"is a synthesis: vestige synthesize --resume {tmp_path / 'synth'}" in error) == (2, True)


@pytest.mark.parametrize("kind", ["a copy", "other order", "other ends of lines"])
def test_a_copy_of_the_data_is_no_test(file, tmp_path, kind):
    head, *lines = file.read_text().splitlines()
    copy = tmp_path / "copy.csv"
    copy.write_text({
        "a copy": file.read_text(),
        "other order": "\n".join([head, *reversed(lines)]),
        "other ends of lines": "\r\n".join([head, "", *lines]),
    }[kind])  # fmt: skip
    base = ["synthesize", "--columns", COLUMNS, "--epsilon", "1", "--samples", "20", "--out", tmp_path / "synth"]
    code, out, error = command(*base, "--data", file, "--test", copy)
    assert (code, out, "is the training data" in error) == (2, "", True)
    assert not (tmp_path / "synth").exists()


def test_the_same_rows_in_memory_are_no_test():
    rows = people(300)
    other = {name: values[::-1] for name, values in rows.items()}
    with pytest.raises(ValueError, match="test: these rows are the data"):
        vestige.synthesize(rows, columns=COLUMNS, epsilon=1, delta=1e-5, test=other)
    assert vestige.synthesize(rows, columns=COLUMNS, epsilon=1, delta=1e-5, test=people(300, seed=1)).count == 300


def test_a_book_pays_for_a_synthesis_and_refuses_the_one_too_many(file, tmp_path):
    book = tmp_path / "people.book"
    opened = command(
        "budget", "open", book, "--data", file, "--epsilon", "1.3", "--delta", "1e-5", "--key", tmp_path / "k"
    )
    assert opened[0] == 0, opened[2]
    base = ["synthesize", "--data", file, "--columns", COLUMNS, "--epsilon", "1", "--samples", "20", "--budget", book]
    said = as_json(*base, "--out", tmp_path / "first")
    assert read(tmp_path / "first" / "ledger.jsonl").facts["budget"]["run"]
    assert command("verify", tmp_path / "first")[0] == 0
    spent = as_json("budget", "show", book)
    assert said["epsilon"] <= 1
    code, _, error = command(*base, "--out", tmp_path / "second")
    assert code != 0
    assert "book" in error
    assert not (tmp_path / "second").exists()
    assert as_json("budget", "show", book) == spent
    other = tmp_path / "others.csv"
    other.write_text(file.read_text().replace("office", "field"))
    changed = [*base[:1], "--data", other, *base[3:], "--out", tmp_path / "third"]
    assert command(*changed)[0] == 2
    changed[changed.index("--epsilon") + 1] = "0.2"
    assert command(*changed)[0] == 2
    assert as_json(*changed, "--derived-from", file)["epsilon"] <= 0.2  # made of its rows
    without = [each for each in changed if each not in ("--budget", book)]
    assert "is about a book" in command(*without, "--derived-from", file)[2]


def test_all_rows_of_a_user_are_hidden_together(tmp_path):
    rows = {**people(600), "patient": [place // 6 for place in range(600)]}
    out = tmp_path / "synth"
    settings = {"columns": COLUMNS, "epsilon": 1, "delta": 1e-5, "user_column": "patient", "rows_per_user": 2}
    made = vestige.synthesize(rows, **settings, out=out)
    assert made.guarantee.unit == "user"
    assert verify(out).guarantee.adjacency == made.guarantee.adjacency
    history = read(out / "ledger.jsonl")
    assert history.facts["population"] == 200  # two of six rows of each patient
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    asked = [line["sensitivity"] for line in lines if line["row"] == "ask"]
    assert asked[:3] == pytest.approx([2 * np.sqrt(3), 2, 2])
    assert asked[3:] in ([], [2.0], [2 * np.sqrt(2)])  # counts of the pairs that were chosen: none, one or two
    assert "one user" in (out / "README.md").read_text()
    for wrong, words in (({"rows_per_user": None}, "rows_per_user=None"), ({"user_column": "age"}, "is among")):
        with pytest.raises(ValueError, match=words):
            vestige.synthesize(rows, **{**settings, **wrong})


def test_a_finished_table_has_a_price_for_people_with_several_rows(tmp_path):
    out = tmp_path / "synth"
    vestige.synthesize(people(300), columns=COLUMNS, epsilon=1, delta=1e-5, out=out)
    told = verify(out, rows_per_user=2).for_user
    asked = read(out / "ledger.jsonl").asks
    doubled = {
        Gaussian(q.multiplier / 2) if isinstance(q, Gaussian) else ExponentialMechanism(2 * q.choice_epsilon): count
        for q, count in asked.items()
    }
    assert told.epsilon == pytest.approx(accounting.epsilon(doubled, 1e-5), rel=1e-3)
