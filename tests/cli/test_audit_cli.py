"""Does `vestige audit` say what it found, and fail where the accountant is contradicted?"""

import json

import pytest

import faults
from vestige.cli.main import app

COMMON = ["--runs", "400", "--steps", "4", "--sample-rate", "0.5", "--examples", "4", "--delta", "1e-3", "--lr", "0.01"]


def called(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        app(list(words))
    return ended.value.code or 0, capsys.readouterr()


def test_an_audit_prints_both_bounds(capsys):
    code, said = called(capsys, "audit", "--noise-multiplier", "1", *COMMON, "--confidence", "0.9999")
    assert code == 0
    assert "epsilon is at least" in said.out
    assert "at most" in said.out
    assert "no contradiction" in said.out
    assert "not private" not in said.err


def test_an_audit_as_json_and_a_fault(capsys, monkeypatch):
    words = ["audit", "--noise-multiplier", "1", *COMMON, "--json", "--confidence", "0.999"]
    code, said = called(capsys, *words)
    found = json.loads(said.out)
    assert code == 0
    assert found["epsilon_lower_bound"] <= found["epsilon"]
    assert found["confidence"] == 0.999
    faults.looser_clip(monkeypatch)
    code, said = called(capsys, *words)
    assert code == 1
    assert json.loads(said.out)["contradicts"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit"], "--epsilon"),
        (["audit", "--epsilon", "3", "--canary", "yellow"], "--canary="),
        (["audit", "--epsilon", "3", "--sees", "nothing"], "--sees="),
        (["audit", "--epsilon", "3", "--sees", "loss"], "--sees="),
        (["audit", "--epsilon", "3", "--runs", "2"], "--runs=2"),
        (["audit", "--epsilon", "3", "--data", "x.npz"], "--data="),
        (["audit", "--membership", "magic", "--epsilon", "3"], "--membership="),
        (["audit", "--membership", "all"], "--epsilon"),
        (["audit", "--membership", "all", "--epsilon", "3", "--canary", "blank"], "--canary cannot be given"),
        (["audit", "--epsilon", "3", "--targets", "2"], "--targets cannot be given"),
        (["audit", "nowhere", "--epsilon", "3"], "--epsilon cannot be given"),
        (["audit", "nowhere"], "no finished run"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    code, printed = called(capsys, *words)
    assert code == 2
    assert said in printed.err


def test_training_with_canaries(capsys, tmp_path):
    out = str(tmp_path / "run")
    flags = ["--task", "digits-mlp", "--method", "dp-sgd", "--noise-multiplier", "1", "--steps", "5"]
    code, said = called(capsys, "train", *flags, "--audit", "40", "--out", out)
    assert code == 0
    assert "40 made-up rows" in said.err
    assert "epsilon is at least" in " ".join(said.out.split())
    code, said = called(capsys, "audit", out, "--json")
    assert code == 0
    assert json.loads(said.out)["canaries"] == 40


MEMBERSHIP = ["--membership", "loss,lira", "--shadows", "4", "--targets", "2", "--examples", "40", "--steps", "5"]


def test_an_inference_of_membership_is_printed_and_says_whom_it_trained_on(capsys):
    code, said = called(capsys, "audit", "--method", "non-private", *MEMBERSHIP)
    assert code == 0
    assert "2 targets, 4 shadow models, 20 members each, 5 steps" in said.out
    assert "lira-offline" not in said.out
    assert "changes whom models are trained on" in said.err
    code, said = called(capsys, "audit", "--task", "stand-in", "--epsilon", "2", *MEMBERSHIP, "--json")
    found = json.loads(said.out)
    assert code == 0
    assert said.err == ""
    assert found["epsilon"] <= 2
    assert set(found["attacks"]) == {"loss", "lira"}
    assert 0 <= found["attacks"]["lira"]["area"]["low"] <= found["attacks"]["lira"]["area"]["estimate"]
