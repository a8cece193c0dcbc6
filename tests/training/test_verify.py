"""Does a folder verify only if all that is in it is what the run left?"""

import json
import shutil

import pytest
import torch
from torch import nn

import vestige
from commands import vestige as command
from conftest import make_toy
from vestige.accounting.ledger import GENESIS, LedgerError, _seal
from vestige.training.verify import verify


def start(out, **options):
    model, data = make_toy()
    options = {"epsilon": 4.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 12} | options
    return vestige.train(model, nn.functional.cross_entropy, data, out=out, **options)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    for _ in start(out):
        pass
    return out


@pytest.fixture
def finished(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def test_a_run_from_python_is_finished_when_its_loop_ends(finished):
    verdict = verify(finished)
    assert (verdict.finished, verdict.unchecked, verdict.asked) == (True, (), 12)
    code, out, error = command("verify", finished)
    assert (code, error) == (0, "")
    assert "not finished" not in out
    assert "unchecked" not in out


FIELDS = {
    "epsilon": 1.0, "delta": 1e-7, "accountant": "rdp", "epsilon_rdp": 1.0, "budget": 1.0, "noise_multiplier": 9.0,
    "sample_rate": 0.01, "expected_batch": 1.0, "groups": 7, "lr": 1.0, "lr_reason": "", "asked": 3,
    "adjacency": "replace one example", "reasons": ["none"], "epsilon_if_noise_were_secret": 1.0,
    "method": "fo-dp-sgd", "steps": 11,
}  # fmt: skip


@pytest.mark.parametrize("key", FIELDS)
def test_every_field_of_the_result_follows_from_the_ledger(finished, key):
    """Even if whoever changed it could seal the file anew."""
    result = json.loads((finished / "result.json").read_text())
    (finished / "result.json").write_text(json.dumps({**result, key: FIELDS[key]}))
    reseal(finished)
    with pytest.raises(LedgerError, match="result.json says"):
        verify(finished)


@pytest.mark.parametrize("key", ["stopped", "run"])
def test_what_the_ledger_does_not_know_is_sealed(finished, key):
    result = json.loads((finished / "result.json").read_text())
    (finished / "result.json").write_text(json.dumps({**result, key: "else"}))
    with pytest.raises(LedgerError, match="result.json is not what the run left"):
        verify(finished)


@pytest.mark.parametrize("name", ["model.pt", "checkpoint.pt"])
def test_foreign_weights_are_found(finished, name):
    content = torch.load(finished / name)
    weights = content if name == "model.pt" else content["state"]["model"]
    next(iter(weights.values())).add_(1)
    torch.save(content, finished / name)
    with pytest.raises(LedgerError, match=f"{name} is not what the run left"):
        verify(finished)


@pytest.mark.parametrize("name", ["model.pt", "checkpoint.pt", "result.json", "records.jsonl", "run.json"])
def test_a_missing_file_is_found(finished, name):
    (finished / name).unlink()
    with pytest.raises(LedgerError, match=f"{name} is missing"):
        verify(finished)


def test_a_ledger_cut_short_is_no_finished_run(finished):
    rows = (finished / "ledger.jsonl").read_text().splitlines(keepends=True)
    (finished / "ledger.jsonl").write_text("".join(rows[:10]))
    (finished / "result.json").unlink()
    (finished / "checkpoint.pt").unlink()
    with pytest.raises(LedgerError, match="rows were cut from the ledger"):
        verify(finished)
    for words in (("verify", "--unfinished"), ("card",), ("report",)):
        code, out, error = command(words[0], finished, *words[1:])
        assert (code, out, "records.jsonl has step" in error) == (1, "", True)
    (finished / "records.jsonl").unlink()
    code, out, error = command("card", finished)
    assert (code, out, "model.pt is there, which a run writes when it ends" in error) == (1, "", True)
    (finished / "model.pt").unlink()
    with pytest.raises(LedgerError, match="this run is not finished"):
        verify(finished)
    code, out, error = command("verify", finished, "--unfinished")
    assert code == 0
    assert "this run is not finished" in out
    assert "This model" not in command("card", finished)[1]


@pytest.mark.parametrize("when", ["before the next question", "before the result"])
def test_a_run_that_was_killed_verifies_as_unfinished_and_can_be_resumed(tmp_path, monkeypatch, when):
    from vestige.training import run_folder

    out, saved = tmp_path / "run", tmp_path / "saved"
    if when == "before the result":
        kept = run_folder.write_json
        monkeypatch.setattr(
            run_folder,
            "write_json",
            lambda path, content: shutil.copytree(out, saved) if path.stem == "result" else kept(path, content),
        )
        for _ in start(out):
            pass
        monkeypatch.undo()
        assert (saved / "model.pt").exists()
        assert not (saved / "result.json").exists()
    else:
        training = start(out)
        for record in training:
            if record.step == 4:
                break
        training.ledger.close()
        shutil.copytree(out, saved)
    assert not verify(saved, unfinished=True).finished
    assert "This model" not in command("card", saved)[1]
    for _ in start(saved, resume=True):
        pass
    assert verify(saved).finished


def test_a_run_that_was_left_says_what_it_cost_so_far(tmp_path):
    for record in start(tmp_path / "run"):
        if record.step == 4:
            break
    with pytest.raises(LedgerError, match="not finished"):
        verify(tmp_path / "run")
    verdict = verify(tmp_path / "run", unfinished=True)
    assert (verdict.finished, verdict.asked) == (False, 5)
    assert verdict.guarantee.epsilon < 4.0
    for _ in start(tmp_path / "run", resume=True):
        pass
    assert verify(tmp_path / "run").finished


def test_a_run_may_be_declared_finished_early(tmp_path):
    training = start(tmp_path / "run")
    next(iter(training))
    training.finish()
    assert verify(tmp_path / "run").asked == 1


def test_what_is_put_beside_a_run_is_named_as_unchecked(finished):
    (finished / "notes.txt").write_text("mine")
    assert verify(finished).unchecked == ("notes.txt",)
    assert "unchecked" in command("verify", finished)[1]


def reseal(folder):
    """What a careful forger would do: fix the hashes of the files, and of the rows that hold them."""
    from vestige.training.run_folder import RunFolder

    head, out = GENESIS, []
    for line in (folder / "ledger.jsonl").read_text().splitlines():
        row = {key: value for key, value in json.loads(line).items() if key != "hash"} | {"previous": head}
        if row["row"] == "finish":
            row["files"] = RunFolder(folder).hashes()
        head = _seal(row)
        out.append(json.dumps({**row, "hash": head}) + "\n")
    (folder / "ledger.jsonl").write_text("".join(out))
