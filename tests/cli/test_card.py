"""Does a card say what the ledger proves, and no more?"""

import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import TRAIN, as_json
from commands import vestige as command
from conftest import make_toy
from vestige.integrations.model_card import _upwards


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "run"
    assert command(*TRAIN, "--out", folder)[0] == 0
    return folder


def private_loop(ledger, steps=3, **options):
    model, data = make_toy()
    engine = vestige.PrivacyEngine(ledger=ledger, **options)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=0.7,
        data_loader=DataLoader(TensorDataset(*data), batch_size=12),
    )  # fmt: skip
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine


def test_the_card_of_a_run_states_what_verify_computes(run, tmp_path):
    verdict = as_json("verify", run)
    code, page, error = command("card", run)
    assert (code, error) == (0, "")
    assert page == vestige.model_card(run)
    stated = float(re.search(r"\*\*epsilon ([\d.]+) at delta 1e-05\*\*", page)[1])
    assert verdict["epsilon"] <= stated < verdict["epsilon"] * 1.001
    for words in (
        "one row of the training data, of 1,437",
        "20 times a sum over a Poisson sample",
        "rate 0.05",
        "added in integers on a public lattice",
        "| Steps | 20 of 20 planned; 20 questions charged |",
        "| Expected batch | 71.85 rows |",
        "| Method | dp-sgd (clip=1.0, ",
        "privacy loss distributions",
        "runs to choose hyper-parameters included",
        "| Random numbers are secret | checked (drawn from the operating system",
        "| Nothing was fitted to the rows beforehand | assumed |",
        (run / "ledger.jsonl").read_text().splitlines()[-1][-66:-2],
        "`vestige verify RUN`",
    ):
        assert words in page, words
    assert not page.startswith("---")
    assert command("card", run, "--out", tmp_path / "card.md") == (0, "", "")
    assert (tmp_path / "card.md").read_text() == page
    assert command("report", run)[:2] == (0, f"wrote {run / 'report.md'}\n")
    assert (run / "report.md").read_text() == page
    assert as_json("verify", run)["unchecked"] == []
    assert "cannot be given too" in command("report", run, "--title", "mine")[2]


def test_the_report_of_a_loop_is_its_card_too(tmp_path):
    private_loop(tmp_path / "ledger.jsonl")
    assert command("report", tmp_path)[0] == 2
    assert command("report", tmp_path, "--delta", "1e-3")[0] == 0
    assert (tmp_path / "report.md").read_text() == vestige.model_card(tmp_path / "ledger.jsonl", delta=1e-3)


def test_without_an_epsilon_the_card_says_why(tmp_path):
    command(*TRAIN, "--reproducible", "--out", tmp_path / "run")
    page = vestige.model_card(tmp_path / "run")
    assert "**No epsilon holds for this model**: the noise was drawn from a known seed" in page
    assert "Epsilon would be 7.99" in page
    assert "| Random numbers are secret | assumed (the noise was drawn from a known seed" in page
    assert "Epsilon, delta" not in page


def test_a_run_that_is_not_finished_has_a_card_of_what_it_cost_so_far(tmp_path):
    model, data = make_toy()
    given = {"method": "dp-sgd", "epsilon": 3, "delta": 1e-3, "sample_rate": 0.2, "steps": 9}
    training = vestige.train(model, torch.nn.functional.cross_entropy, data, **given, out=tmp_path / "run")
    for record in training:
        if record.step == 3:
            break
    training.ledger.close()
    page = vestige.model_card(tmp_path / "run")
    assert "This run is not finished, and this is no statement about a model" in page
    assert "This model" not in page
    assert "| Steps | 4 of 9 planned; 4 questions charged |" in page


def test_a_ledger_that_was_edited_has_no_card(tmp_path):
    command(*TRAIN, "--out", tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"step": 7', '"step": 8'))
    code, out, error = command("card", tmp_path / "run")
    assert (code, out) == (1, "")
    assert error.startswith("vestige: NOT VERIFIED: ")


def test_the_ledger_of_a_loop_has_a_card_at_a_given_delta(tmp_path):
    ledger = tmp_path / "loop.jsonl"
    engine = private_loop(ledger)
    page = vestige.model_card(ledger, delta=1e-3)
    stated = float(re.search(r"\*\*epsilon ([\d.]+) at delta 0.001\*\*", page)[1])
    assert engine.get_epsilon(1e-3) <= stated < engine.get_epsilon(1e-3) * 1.001
    for words in (
        "3 times a sum over a Poisson sample",
        "| Steps | 3; 3 questions charged |",
        "| The loss is per example | checked (every operator from the loader",
        "| Padding is ignored | not needed (torch's collation",
        "dp-sgd (clip=Flat(bound=0.7)",
    ):
        assert words in page, words
    assert command("card", ledger, "--delta", "1e-3")[1] == page
    code, _, error = command("card", ledger)
    assert code == 2
    assert error.startswith("vestige: --delta is missing: the ledger of a training loop does not say it")
    assert "is not below 1/N" in command("card", ledger, "--delta", "0.5")[2]


def test_the_card_of_an_audited_run_says_what_its_canaries_show(tmp_path):
    model, data = make_toy()
    given = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-3, "sample_rate": 0.2, "steps": 4}
    training = vestige.train(
        model, torch.nn.functional.cross_entropy, data, **given, audit=40, out=tmp_path / "run"
    )  # fmt: skip
    for _ in training:
        pass
    page, found = vestige.model_card(tmp_path / "run"), training.result().audit
    assert "one row of the training data, of 60 (" in page
    assert "| Audit | 40 made-up rows were planted" in page
    assert f"epsilon is at least {found.epsilon_lower_bound:.3g} (95% confidence)" in page
    private_loop(tmp_path / "loop.jsonl", audit=40)
    page = vestige.model_card(tmp_path / "loop.jsonl", delta=1e-3)
    assert "of 60 (" in page
    assert "| Audit | 40 made-up rows were planted, each by a coin, and are counted in the expected batch |" in page
    assert "| Expected batch | 20 rows |" in page


def test_what_is_no_run_is_said_to_be_none(run, tmp_path):
    code, _, error = command("card", tmp_path)
    assert (code, error) == (2, f"vestige: '{tmp_path}' is no run: there is no ledger (ledger.jsonl) in it\n")
    assert "--delta=1e-06 cannot be given too" in command("card", run, "--delta", "1e-6")[2]


def test_statistics_have_no_card(tmp_path):
    ledger = tmp_path / "statistics.jsonl"
    vestige.private_statistics(torch.rand(50, 1).numpy(), means={0: (0, 1)}, epsilon=1, delta=1e-5, ledger=ledger)
    code, _, error = command("card", ledger)
    assert code == 2
    assert "is the ledger of statistics: there is no model to make a card of" in error


def test_a_printed_epsilon_is_never_below_the_true_one():
    for epsilon in (7.99231, 3.0, 0.0123456, 17.4400001, 123456.7, 1e-9):
        assert epsilon <= float(f"{_upwards(epsilon):g}") < epsilon * 1.0011
    assert _upwards(0.0) == 0
