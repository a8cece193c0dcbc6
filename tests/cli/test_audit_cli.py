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


def test_the_page_of_audits_shows_both_bounds_and_the_curves(capsys, tmp_path):
    first, second = str(tmp_path / "made" / "a.json"), str(tmp_path / "b.json")
    code, said = called(
        capsys, "audit", "--noise-multiplier", "1", *COMMON, "--confidence", "0.9999", "--out", first
    )  # fmt: skip
    assert code == 0
    assert f"wrote {first}" in said.err
    found = json.loads((tmp_path / "made" / "a.json").read_text())
    assert found["roc"][0] == [0, 0]
    assert found["roc"][-1] == [1, 1]
    assert len(found["roc"]) < 110
    alarms, allowed = zip(*found["roc_allowed"], strict=True)
    assert alarms[0] == 0
    assert allowed[-1] == 1
    one = {"run": "this loop", "method": "dp-sgd", "epsilon": 2.0, "delta": 1e-5, "canaries": 40, "confidence": 0.95}
    (tmp_path / "b.json").write_text(json.dumps({**one, "epsilon_lower_bound": 2.5, "contradicts": True}))
    code, said = called(capsys, "report", first, second, "--out", str(tmp_path / "p.html"), "--title", "Ours")
    assert (code, said.err) == (0, "")
    page = (tmp_path / "p.html").read_text()
    assert "<h1>Ours</h1>" in page
    assert f"epsilon is at least {found['epsilon_lower_bound']:.3g} (0.9999 confidence)" in page
    assert f"at most {found['epsilon']:.4g} (accountant, not verified)" in page
    assert "In 1 of 2 audits the attack found more than the guarantee allows" in page
    assert page.count("<figure") == 3
    called(capsys, "report", first)
    page = (tmp_path / "made" / "audit.html").read_text()
    assert "found no more than the guarantee allows; such a test can uncover a fault" in page
    (tmp_path / "b.json").write_text("{}")
    code, said = called(capsys, "report", second)
    assert code == 2
    assert "is no result of an audit" in said.err
    code, said = called(capsys, "report", first, str(tmp_path))
    assert code == 2
    assert "give one folder" in said.err
