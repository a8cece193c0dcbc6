"""Are private statistics about right, bounded in what a row can change, charged, and counted in a run's epsilon?"""

import importlib.util
import pickle
from collections import Counter
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import ndtr as normal
from torch import nn

import vestige
from vestige import accounting
from vestige.accounting.ledger import Ledger, LedgerError, read
from vestige.accounting.meaning.users import guarantee_of_user
from vestige.priced_questions import ExponentialMechanism, Gaussian, SampledGaussian
from vestige.training.persistence import begun as begun_with
from vestige.training.persistence import check_same
from vestige.training.run_folder import RunFolder
from vestige.training.verify import facts_of, reprice, verify

LOSS = nn.functional.cross_entropy
ROWS = np.random.default_rng(0).normal([3.0, -20.0], [1.0, 5.0], size=(4000, 2))
BOUNDS = {0: (-5.0, 11.0), 1: (-60.0, 20.0)}


def test_means_deviations_quantiles_and_counts_are_about_right():
    data = {"x": ROWS[:, 0], "label": ["a"] * 1000 + ["b"] * 2900 + ["c"] * 100}
    found = vestige.private_statistics(
        data, means={"x": (-5, 11)}, quantiles={"x": (-5, 11, (0.75, 0.25))}, classes={"label": ["a", "b", "z"]},
        epsilon=2, delta=1e-6,
    )  # fmt: skip
    assert found.means["x"] == pytest.approx(3, abs=0.2)
    assert found.deviations["x"] == pytest.approx(1, rel=0.3)
    assert np.allclose(found.quantiles["x"], np.quantile(ROWS[:, 0], [0.25, 0.75]), atol=0.25)
    assert list(found.counts["label"]) == ["a", "b", "z"]
    assert list(found.counts["label"].values()) == pytest.approx([1000, 2900, 0], abs=60)
    assert found.guarantee().epsilon <= 2
    assert found.guarantee().epsilon > 1.99


def test_counts_and_means_are_noised_as_priced():
    labels = list(range(400))
    found = vestige.private_statistics(
        {"label": labels * 50}, classes={"label": labels}, noise_multiplier=5.0, delta=1e-6
    )  # fmt: skip
    assert np.std(list(found.counts["label"].values())) == pytest.approx(5.0, rel=0.15)
    found = vestige.private_statistics(np.zeros((100, 400)), means=(-1, 1), noise_multiplier=0.05, delta=1e-6)
    deviation = 0.05 * np.sqrt(1.25 * 400) / 100
    assert np.std(list(found.means.values())) == pytest.approx(deviation, rel=0.15)


def test_they_cost_what_their_theorems_say():
    found = vestige.private_statistics(
        ROWS, means=BOUNDS, quantiles={0: (-5, 11, (0.5, 0.9))}, noise_multiplier=4.0, delta=1e-6
    )
    asked = {Gaussian(4.0): 1, ExponentialMechanism(0.125): 2}
    assert Counter(found.questions) == asked
    assert found.guarantee().epsilon == accounting.epsilon(asked, 1e-6)
    assert found.guarantee().assumption("nothing_fitted").status == "assumed"
    assert found.guarantee().assumption("bad_rows").status == "assumed"  # a text among numbers ends the call


@pytest.mark.parametrize("row", [[-5.0, -60.0], [11.0, 20.0], [1e300, -1e300], [3.0, -20.0], [np.nan, np.inf]])
def test_a_row_moves_the_sums_by_their_sensitivity_at_most(row):
    """With next to no noise, of rows and of the same rows with a blank in place of one; as a vector of z and z^2."""

    def sums(data):
        found = vestige.private_statistics(data, means=BOUNDS, noise_multiplier=1e-6, delta=1e-6, reproducible=1)
        z = [(found.means[c] - low) / (high - low) * 2 - 1 for c, (low, high) in BOUNDS.items()]
        v = [(2 * found.deviations[c] / (high - low)) ** 2 for c, (low, high) in BOUNDS.items()]
        return np.array([*z, *(each + mean**2 for each, mean in zip(v, z, strict=True))]) * len(data)

    with_it, without = np.vstack([ROWS[:50], row]), np.vstack([ROWS[:50], [np.nan, np.nan]])
    moved = sums(with_it) - sums(without)
    assert np.linalg.norm(moved[:2]) <= np.sqrt(2) + 1e-3
    assert np.linalg.norm(moved) <= np.sqrt(1.25 * 2) + 1e-3


def test_the_bound_of_a_rows_part():
    z = np.linspace(-1, 1, 10001)
    assert (z**2 + (z**2 - 0.5) ** 2).max() == pytest.approx(1.25)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_counts_for_so_many_words_at_most(seed):
    """A row of every candidate moves only `words_per_row` of the counts: the order of frequent words stays."""
    texts = ["b"] * 60 + ["a"] * 55 + ["c d e f g h i j"] * 40
    wanted = vestige.Vocabulary(size=2, words_per_row=1, candidates=list("abcdefghij"))
    found = vestige.private_statistics(
        {"text": texts}, vocabulary={"text": wanted}, noise_multiplier=1e-3, delta=1e-3, reproducible=seed
    )
    assert found.words["text"] == ("b", "a")
    long = vestige.private_statistics(
        {"text": ["j i h g"] * 100}, vocabulary={"text": wanted}, noise_multiplier=1e-3, delta=1e-3, reproducible=seed
    )
    assert long.words["text"][0] == "j"


def test_a_word_of_one_row_is_shown_as_rarely_as_its_delta_says():
    """At a delta of 0.05, of 400 selections; without the threshold it would be in all of them."""
    texts = ["common word"] * 300 + ["secret"]
    wanted = vestige.Vocabulary(size=10, words_per_row=2, delta=0.05)
    shown = 0
    for seed in range(400):
        found = _selected(texts, wanted, seed)
        shown += "secret" in found
        assert "common" in found
    assert shown <= 400 * 0.05 + 4 * np.sqrt(400 * 0.05)


def _selected(texts, wanted, seed):
    from vestige.randomness.keys import Randomness
    from vestige.training.private_statistics import _words

    return _words("t", texts, wanted).answer(1.0, Randomness.reproducible(seed).stream("words", 0))["words"]["t"]


def test_a_thresholds_delta_is_a_part_of_delta_and_no_run_takes_it():
    wanted = vestige.Vocabulary(size=10, delta=1e-7)
    found = vestige.private_statistics({"t": ["a b"] * 500}, vocabulary={"t": wanted}, noise_multiplier=2.0, delta=1e-6)
    assert found.guarantee().delta == 1e-6
    assert found.guarantee().epsilon == accounting.epsilon({Gaussian(2.0): 1}, 1e-6 - 1e-7)
    data = torch.randn(500, 2), torch.randint(2, (500,))
    with pytest.raises(ValueError, match="a delta of its own"):
        vestige.train(nn.Linear(2, 2), LOSS, data, epsilon=1, delta=1e-5, sample_rate=0.1, steps=2, statistics=found)


def test_a_ledger_of_a_threshold_is_verified_with_its_delta(tmp_path):
    """Against the closed form of a Gaussian mechanism. What a threshold shows of somebody with several rows has no
    price: a word that is in all of them passes far more often than one that is in a single row."""
    ledger = tmp_path / "asked" / "ledger.jsonl"
    ledger.parent.mkdir()
    wanted = {"t": vestige.Vocabulary(size=10, delta=9e-6)}
    vestige.private_statistics({"t": ["a b"] * 500}, vocabulary=wanted, noise_multiplier=3, delta=1e-5, ledger=ledger)
    checked = verify(ledger.parent)

    def missing(epsilon, mu=1 / 3):
        return normal(mu / 2 - epsilon / mu) - exp(epsilon) * normal(-mu / 2 - epsilon / mu) - (1e-5 - 9e-6)

    assert checked.guarantee.delta == 1e-5
    assert checked.guarantee.epsilon == pytest.approx(brentq(missing, 0, 10), rel=1e-4)
    assert checked.guarantee.meaning is None, "an attacker sees the words, too"
    terms = {**read(ledger).facts, "selection_delta": 1e-5}
    assert "words were shown by thresholds" in reprice(read(ledger).asks, 1e-5, terms).reasons[0]
    assert guarantee_of_user(read(ledger).asks, 1e-5, facts_of(read(ledger).facts), 1).epsilon is not None
    with pytest.raises(ValueError, match=r"rows_per_user=2: .* shown by a threshold"):
        guarantee_of_user(read(ledger).asks, 1e-5, facts_of(read(ledger).facts), 2)


def test_a_run_counts_them_and_its_ledger_verifies(tmp_path):
    x, y = torch.tensor(ROWS, dtype=torch.float32), torch.tensor(ROWS[:, 0] > 3).long()
    found = vestige.private_statistics(x, means=BOUNDS, epsilon=0.5, delta=1e-5, ledger=tmp_path / "statistics.jsonl")
    assert read(tmp_path / "statistics.jsonl").asks == Counter(found.questions)
    given = {"method": "dp-sgd", "epsilon": 2, "delta": 1e-5, "sample_rate": 0.05, "steps": 20}
    training = vestige.train(
        nn.Linear(2, 2), LOSS, (found.scaled(x), y), **given, statistics=found, out=tmp_path / "run"
    )
    for _ in training:
        pass
    assert not Counter(found.questions) - training.ledger.spent
    assert 1.99 < training.guarantee().epsilon <= 2
    alone = training.ledger.spent - Counter(found.questions)
    assert accounting.epsilon(alone, 1e-5) < 1.99  # the steps got more noise, to pay for them
    assert verify(tmp_path / "run").guarantee.epsilon == training.guarantee().epsilon


GIVEN = {"delta": 1e-5, "sample_rate": 0.05, "steps": 4, "lr": 0.1}


def begun(found, **options):
    x, y = torch.tensor(ROWS, dtype=torch.float32), torch.tensor(ROWS[:, 0] > 3).long()
    return vestige.train(nn.Linear(2, 2), LOSS, (found.scaled(x), y), **GIVEN | options, statistics=found)


@pytest.mark.parametrize("evaluate", [None, "private"])
def test_a_budget_that_does_not_hold_them_is_refused(tmp_path, evaluate):
    found = vestige.private_statistics(
        ROWS, means=BOUNDS, quantiles={0: (-5, 11, (0.5,))}, noise_multiplier=1.0, delta=1e-5
    )
    cost = accounting.epsilon(Counter(found.questions), 1e-5)
    for epsilon in (1.0, cost - 0.02):
        with pytest.raises(ValueError, match=f"statistics: they have cost epsilon {cost:.4g}") as error:
            begun(found, epsilon=epsilon, noise_multiplier=8.0, evaluate=evaluate, out=tmp_path / "run")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()
    training = begun(found, epsilon=cost + 0.5, noise_multiplier=8.0, evaluate=evaluate, out=tmp_path / "run")
    assert training.ledger.spent == Counter(found.questions)  # before its first step: they were answered
    assert training.guarantee().epsilon == pytest.approx(cost, rel=1e-3)


def test_a_ledger_that_does_not_charge_them_fails_verification(tmp_path):
    found = vestige.private_statistics(ROWS, means=BOUNDS, noise_multiplier=2.0, delta=1e-5)
    begun(found, noise_multiplier=8.0, out=tmp_path / "run").run()
    path = tmp_path / "run" / "ledger.jsonl"
    facts = read(path).facts
    (tmp_path / "cut").mkdir()
    ledger = Ledger(tmp_path / "cut" / "ledger.jsonl")
    ledger.open({key: value for key, value in facts.items() if key != "version"})
    ledger.ask(SampledGaussian(0.05, 8.0), step=0, part=0, sensitivity=1.0)
    ledger.close()
    with pytest.raises(LedgerError, match="begun with statistics that asked"):
        verify(tmp_path / "cut", unfinished=True)
    assert verify(tmp_path / "run").guarantee.epsilon > 1


def test_a_run_is_resumed_with_the_answer_that_it_was_begun_with(tmp_path):
    """The same questions asked again are other answers, which a run that charges them once would not count."""
    asked = {"means": BOUNDS, "noise_multiplier": 4.0, "delta": 1e-5}
    found = vestige.private_statistics(ROWS, **asked)
    next(iter(begun(found, noise_multiplier=8.0, out=tmp_path / "run")))
    with pytest.raises(ValueError, match="begun with another answer of private_statistics") as error:
        begun(vestige.private_statistics(ROWS, **asked), noise_multiplier=8.0, out=tmp_path / "run", resume=True)
    assert "\n" not in str(error.value)
    kept = pickle.loads(pickle.dumps(found))
    training = begun(kept, noise_multiplier=8.0, out=tmp_path / "run", resume=True)
    training.run()
    assert training.ledger.spent[Gaussian(4.0)] == 1
    assert verify(tmp_path / "run").guarantee.epsilon == training.guarantee().epsilon


def test_a_run_that_did_not_name_its_answers_is_resumed_as_before(tmp_path):
    found = vestige.private_statistics(ROWS, means=BOUNDS, noise_multiplier=4.0, delta=1e-5)
    next(iter(begun(found, noise_multiplier=8.0, out=tmp_path / "run")))
    public = begun_with(RunFolder(tmp_path / "run"))
    earlier = {key: value for key, value in public["statistics"].items() if key != "answer"}
    check_same({**public, "statistics": earlier}, public)
    with pytest.raises(ValueError, match="statistics is"):
        check_same({**public, "statistics": {**earlier, "rows": 3}}, public)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing was asked for"),
        ({"means": (5, 5)}, r"the bounds \(5, 5\) must rise"),
        ({"means": (-1e308, 1e308)}, "too far apart for a float"),
        ({"means": (0, 10**400)}, "no float is as large"),
        ({"means": 3}, "give public bounds"),
        ({"quantiles": {0: (0, 1)}}, r"give public bounds and shares \(low, high, \(0.25, 0.5\)\), not \(0, 1\)"),
        ({"quantiles": {0: (-1e308, 1e308, (0.5,))}}, "too far apart for a float"),
        ({"quantiles": [0.5]}, "must be a dictionary: what is asked, by column"),
        ({"vocabulary": {0: ["a"]}}, "give a vestige.Vocabulary, not"),
        ({"classes": {0: [[1], [2]]}}, "two or more different values"),
        ({"means": {"age": (0, 1)}}, "'age' is none of 0, 1"),
        ({"quantiles": {0: (0, 1, (1.5,))}}, "must lie between 0 and 1"),
        ({"classes": {0: [1]}}, "two or more different values"),
        ({"means": (0, 1), "epsilon": None}, "give epsilon, or noise_multiplier"),
        ({"means": (0, 1), "delta": 0.5}, "is not below 1/N"),
    ],
)
def test_mistakes_are_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        vestige.private_statistics(ROWS, **{"epsilon": 1.0, "delta": 1e-6, **given})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "asked"),
    [
        (np.full((100, 3), 0.5), {"means": {"x": (0, 1)}}),
        (torch.full((100, 3), 0.5), {"quantiles": {"x": (0, 1, (0.5,))}}),
        ([[0.5, 0.5]] * 100, {"means": {"x": (0, 1)}}),
        ([[0.5]] * 100, {"quantiles": {"x": (0, 1, (0.5,))}}),
        ([["a", "b"]] * 100, {"classes": {"x": ["a", "b"]}}),
        (np.full((100, 2), "a"), {"classes": {"x": ["a", "b"]}}),
        ([["a", "b"]] * 100, {"vocabulary": {"x": vestige.Vocabulary(2, candidates=("a", "b"))}}),
    ],
)
def test_a_column_has_one_value_for_each_row(column, asked, tmp_path):
    """Several values of a row in one column would move a sum by more than its sensitivity."""
    with pytest.raises(ValueError, match=r"column 'x' .* one value") as error:
        vestige.private_statistics({"x": column}, **asked, epsilon=1, delta=1e-6, ledger=tmp_path / "asked.jsonl")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "asked.jsonl").exists()


def test_columns_of_one_name_are_refused():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.full((100, 3), 0.5), columns=["x", "y", "x"])
    with pytest.raises(ValueError, match="several columns are named 'x'"):
        vestige.private_statistics(frame, means={"x": (0, 1)}, epsilon=1, delta=1e-6)


def test_words_need_candidates_or_a_delta():
    with pytest.raises(ValueError, match="tells which they are"):
        vestige.Vocabulary(size=3)


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [20.0, 40.0, None] * 500, "work": ["a", "b", "a"] * 500})
    found = vestige.private_statistics(
        frame, means={"age": (0, 100)}, classes={"work": ["a", "b"]}, epsilon=2, delta=1e-6
    )
    assert found.counts["work"]["a"] == pytest.approx(1000, abs=60)


PIPELINES = Path(__file__).parents[2] / "examples" / "private_pipelines.py"


@pytest.mark.parametrize("name", ["scaler", "weights", pytest.param("vocabulary", marks=pytest.mark.slow)])
@pytest.mark.everyday("weights")
def test_a_pipeline_with_private_statistics_is_as_good_as_the_leaking_one(name):
    spec = importlib.util.spec_from_file_location("private_pipelines", PIPELINES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    accuracy, promise = getattr(module, name)()
    leaking, _ = getattr(module, name)(private=False)
    assert promise.epsilon <= module.EPSILON
    assert any(isinstance(question, Gaussian) for question, _ in promise.asked)
    assert accuracy > leaking - 0.08
