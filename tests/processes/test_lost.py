"""What if a process is lost? The others end, nothing is forgotten, and any number of processes resumes the run."""

import random
import time

import pytest
import torch

import process_gang
from process_gang import Failed, Gang
from vestige.accounting.ledger import read

TOLERANCE = 5e-6


def asks(folder):
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b'"row": "ask"') if path.exists() else 0


def weights(folder):
    return torch.cat([each.ravel() for each in torch.load(folder / "model.pt").values()])


def kill_and_resume(tmp_path, kind, kills, steps=50):
    """Kill one of two processes so many times, each after some further steps; then let the run finish."""
    out, choice, method = tmp_path / "run", random.Random(kills), "fo-dp-sgd"
    options = {"kind": kind, "out": str(out), "steps": steps, "computed": str(tmp_path / "computed"), "pause": 0.01}
    before = 0
    for number in range(kills):
        gang = Gang(2, limit=30)
        try:
            gang.send(process_gang.train, method, resume=number > 0, **options)
            wanted, end = before + choice.randint(1, 6), time.monotonic() + 60
            while asks(out) < wanted and time.monotonic() < end:
                time.sleep(0.005)
            victim = choice.randrange(2)
            gang.processes[victim].kill()
            left = gang.answers()[1 - victim]
            assert isinstance(left, Failed), left
            assert left.kind == "Lost", left
            assert "resume from the last checkpoint" in left.message
        finally:
            gang.close()
        history = read(out / "ledger.jsonl", repair=True)
        assert sum(history.asks.values()) >= before
        before = sum(history.asks.values())
        for rank in range(2):
            log = tmp_path / f"computed-{rank}"
            computed = log.read_text().count("computed") if log.exists() else 0
            assert computed <= before, "an answer was computed that was not charged"
    gang = Gang(2)
    try:
        found = gang(process_gang.train, method, resume=True, **options)
    finally:
        gang.close()
    assert not isinstance(found[0], Failed), found[0]
    process_gang.train(method, out=str(tmp_path / "alone"), steps=steps)
    assert torch.allclose(weights(out), weights(tmp_path / "alone"), atol=TOLERANCE)
    assert asks(out) >= asks(tmp_path / "alone") == steps


@pytest.mark.slow
def test_killed_processes_end_the_run_and_it_resumes(tmp_path):
    kill_and_resume(tmp_path, "replicated", kills=2, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_twenty_killed_processes(tmp_path, kind):
    kill_and_resume(tmp_path, kind, kills=20, steps=150)


@pytest.mark.slow
def test_a_process_that_leaves_early_does_not_hang_the_others():
    gang = Gang(2, limit=3)
    try:
        first, second = gang(process_gang.train, each=[{}, {"stop": 2}])
    finally:
        gang.close()
    assert len(second["path"]) == 3
    assert isinstance(first, Failed)
    assert first.kind == "Lost"
    assert "VESTIGE_PROCESS_TIMEOUT" in first.message


@pytest.mark.slow
def test_another_number_of_processes_resumes(two, tmp_path):
    """From two processes to one, and on to two."""
    wanted = process_gang.train("sma-dp-sgd", steps=18)
    options = {"out": str(tmp_path / "run"), "steps": 18}
    two(process_gang.train, "sma-dp-sgd", stop=5, **options)
    process_gang.train("sma-dp-sgd", stop=11, resume=True, **options)
    found = two(process_gang.train, "sma-dp-sgd", resume=True, **options)
    assert not isinstance(found[0], Failed), found[0]
    assert torch.allclose(found[0]["path"][-1], wanted["path"][-1], atol=TOLERANCE)
    assert torch.equal(found[0]["path"], found[1]["path"])


@pytest.mark.parametrize("method", ["sma-dp-sgd", "dp-adamw"])
@pytest.mark.nightly("dp-adamw")
def test_a_sharded_run_resumes(two, tmp_path, method):
    wanted = process_gang.train(method, steps=10)
    options = {"out": str(tmp_path / "run"), "steps": 10, "kind": "sharded"}
    two(process_gang.train, method, stop=4, **options)
    found = two(process_gang.train, method, resume=True, **options)
    assert not isinstance(found[0], Failed), found[0]
    assert torch.allclose(found[0]["path"][-1], wanted["path"][-1], atol=TOLERANCE)
    assert torch.allclose(weights(tmp_path / "run"), wanted["path"][-1], atol=TOLERANCE)
    assert len(list((tmp_path / "run").glob("checkpoint-rows-*"))) == 1
    refused = two(process_gang.train, method, resume=True, **{**options, "kind": "replicated"})
    assert all("sharded by fully_shard when the run began" in each.message for each in refused)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fo-dp-sgd", "dpsur", "disk", "dp-bandmf"])
def test_a_sharded_run_resumes_on_four_processes(two, four, tmp_path, method):
    wanted = process_gang.train(method, steps=18)
    options = {"out": str(tmp_path / "run"), "steps": 18, "kind": "sharded"}
    two(process_gang.train, method, stop=7, **options)
    found = four(process_gang.train, method, resume=True, **options)
    assert not isinstance(found[0], Failed), found[0]
    assert torch.allclose(found[0]["path"][-1], wanted["path"][-1], atol=TOLERANCE)


def test_a_folder_that_is_taken_is_refused_by_all(two, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("of somebody else's")
    for answer in two(process_gang.train, out=str(tmp_path / "run")):
        assert isinstance(answer, Failed)
        assert "is not an empty folder" in answer.message
