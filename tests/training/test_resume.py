"""Killed at any instant: does a run continue exactly, and does what was spent stay spent?"""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from vestige import files
from vestige.accounting.ledger import LedgerError, read
from vestige.training.persistence import saver
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
STEPS = 150
COMMON = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": STEPS, "lr": 0.05}


def method():
    return vestige.fo_dp_sgd(momentum=0.5, window=5)


def start(out, resume=False, data=None, **changes):
    model, toy = make_toy()
    return vestige.train(model, LOSS, data or toy, method=method(), out=out, resume=resume, **{**COMMON, **changes})


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def child(out, resume, changes):
    torch.set_num_threads(1)
    for _ in start(out, resume, **changes):
        time.sleep(0.001)
    os._exit(0)


def run_and_kill(out, seconds, changes):
    resume = (out / "run.json").exists()
    process = multiprocessing.get_context("fork").Process(target=child, args=(out, resume, changes))
    process.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.is_alive():
        time.sleep(0.002)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def charged(out):
    path = out / "ledger.jsonl"
    try:
        return sum(read(path).asks.values())
    except LedgerError as error:
        assert "torn" in str(error) or "empty" in str(error)
        return None


@pytest.mark.parametrize("reproducible", [pytest.param(True, marks=pytest.mark.slow), False])
def test_killed_many_times_at_random(tmp_path, reproducible):
    changes = {"reproducible": 7} if reproducible else {}
    out, dice, spent = tmp_path / "run", random.Random(1), 0
    kills = 0
    list(start(None, steps=2))  # torch's lazy imports, so that the children don't spend their lives on them
    for _ in range(6):
        run_and_kill(out, dice.uniform(0.02, 0.6), changes)
        if (out / "ledger.jsonl").exists() and (now := charged(out)) is not None:
            assert now >= spent
            spent = now
            kills += 1
    assert kills >= 2
    resumed = start(out, resume=True, **changes)
    for _ in resumed:
        pass
    assert resumed.state.step == STEPS
    assert verify(out).asked == sum(resumed.ledger.spent.values())
    steps = [json.loads(line)["step"] for line in (out / "records.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS))
    if reproducible:
        alone = start(None, **changes)
        for _ in alone:
            pass
        assert torch.equal(flat(resumed.model), flat(alone.model))
        assert sum(resumed.ledger.spent.values()) == STEPS
        assert torch.equal(resumed.state.learner.memory["past"], alone.state.learner.memory["past"])
    else:
        assert sum(resumed.ledger.spent.values()) == sum(read(out / "ledger.jsonl").asks.values()) >= STEPS


@pytest.mark.parametrize("left", [["run.json"], ["run.json", "ledger.jsonl"]])
@pytest.mark.everyday("left1")
def test_killed_before_the_first_question_it_begins_anew(tmp_path, left):
    training = start(tmp_path / "run")
    training.ledger.close()
    for path in (tmp_path / "run").iterdir():
        if path.name not in left:
            path.unlink()
    again = start(tmp_path / "run", resume=True)
    assert len(list(again)) == STEPS


@pytest.mark.slow
def test_killed_inside_the_first_write_the_folder_is_still_free(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.123.new").write_text("{")
    assert len(list(start(tmp_path / "run"))) == STEPS


def test_a_ledger_without_its_checkpoint_is_not_begun_anew(tmp_path):
    part_way(tmp_path / "run", 5)
    (tmp_path / "run" / "checkpoint.pt").unlink()
    with pytest.raises(LedgerError, match="no checkpoint beside it"):
        start(tmp_path / "run", resume=True)


def part_way(out, steps, **changes):
    training = start(out, **changes)
    for record in training:
        if record.step + 1 == steps:
            break
    training.ledger.close()
    return training


def test_breaking_out_of_the_loop_loses_nothing(tmp_path):
    first = part_way(tmp_path / "run", 40)
    again = start(tmp_path / "run", resume=True)
    assert again.state.step == 40
    assert torch.equal(flat(again.model), flat(first.model))
    assert sum(again.ledger.spent.values()) == 40


@pytest.mark.parametrize("factor", [1.01, 0.0])
def test_an_automatic_rate_is_that_of_the_beginning(tmp_path, factor):
    """Another machine sums the norm of the weights in another order, and weights may come from elsewhere."""
    model, toy = make_toy()
    arguments = {**COMMON, "lr": "auto", "steps": 6, "out": tmp_path / "run"}
    training = vestige.train(model, LOSS, toy, method=method(), **arguments)
    next(iter(training))
    training.ledger.close()
    elsewhere, _ = make_toy()
    with torch.no_grad():
        for parameter in elsewhere.parameters():
            parameter.mul_(factor)
    resumed = vestige.train(elsewhere, LOSS, toy, method=method(), resume=True, **arguments)
    assert (resumed.plan.lr, resumed.plan.lr_reason) == (training.plan.lr, training.plan.lr_reason)
    assert len(list(resumed)) == 5
    assert verify(tmp_path / "run").finished


def test_no_rate_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lr=None: give a number, or 'auto'"):
        start(tmp_path / "run", lr=None)


def test_a_rate_that_was_given_is_not_replaced_by_an_automatic_one(tmp_path):
    next(iter(start(tmp_path / "run", steps=6)))
    with pytest.raises(ValueError, match="resume: lr is .* now but was 0.05"):
        start(tmp_path / "run", resume=True, steps=6, lr="auto")


@pytest.mark.parametrize(
    ("key", "value"), [("lr", 5.0), ("lr", float("nan")), ("lr", None), ("noise_multiplier", 0.1), ("population", 1)]
)
def test_what_a_run_was_begun_with_is_sealed_in_its_ledger(tmp_path, key, value):
    training = start(tmp_path / "run", steps=6, lr="auto")
    next(iter(training))
    training.ledger.close()
    path = tmp_path / "run" / "run.json"
    request = json.loads(path.read_text())
    request["public"][key] = value
    path.write_text(json.dumps(request))
    with pytest.raises(ValueError, match=f"run.json: {key} is .* but the ledger was opened with"):
        start(tmp_path / "run", resume=True, steps=6, lr="auto")
    del request["public"]
    path.write_text(json.dumps(request))
    with pytest.raises(ValueError, match="does not say what the run was begun with"):
        start(tmp_path / "run", resume=True, steps=6, lr="auto")


def test_noise_is_never_met_again_after_a_resume(tmp_path):
    """Two continuations of one checkpoint on different data: their releases must not differ by the data alone."""
    import shutil

    part_way(tmp_path / "run", 10)
    shutil.copytree(tmp_path / "run", tmp_path / "fork")
    releases = []
    for folder in ("run", "fork"):
        training = start(tmp_path / folder, resume=True)
        next(iter(training))
        releases.append(training.state.learner.memory["past"].clone())
    assert not torch.allclose(*releases, atol=1e-2)


@pytest.mark.slow
def test_a_redone_step_is_charged_again_and_the_budget_holds(tmp_path):
    changes = {"noise_multiplier": None, "epsilon": 5.0}
    out = tmp_path / "run"
    training = start(out, **changes)
    records = iter(training)
    for _ in range(30):
        next(records)
    saved = (out / "checkpoint.pt").read_bytes()
    for _ in range(20):
        next(records)
    records.close()
    training.ledger.close()
    (out / "checkpoint.pt").write_bytes(saved)  # as if killed before the later checkpoints
    resumed = start(out, resume=True, **changes)
    begun = resumed.state.step
    assert sum(resumed.ledger.spent.values()) == 50 > begun
    for _ in resumed:
        pass
    assert resumed.guarantee().epsilon <= 5.0
    assert resumed.state.step < STEPS, "the budget must run out before the plan does"


def test_a_checkpoint_holds_releases_only(tmp_path):
    witnessed = []
    model, data = make_toy()
    training = vestige.train(
        model, LOSS, data, method=method(), out=tmp_path / "run", reproducible=1, **{**COMMON, "steps": 6}
    )
    training.curator._nonprivate_witness = lambda total, noise: witnessed.extend([total, noise.clone()])
    points = []
    for _ in training:
        points.append({k: v.clone() for k, v in model.state_dict().items()})
    raw = [row for point in points for row in _gradients_at(point, data)]
    secrets = [*witnessed, *raw, *(_clip(row) for row in raw)]
    tensors = list(_tensors(files.read_tensors(tmp_path / "run" / "checkpoint.pt")))
    rows = [row for tensor in tensors for row in (tensor if tensor.dim() == 2 else tensor.reshape(1, -1))]
    assert any(row.numel() == secrets[0].numel() for row in rows)
    for row in rows:
        for secret in secrets:
            if row.numel() == secret.numel():
                assert (row.double() - secret.double()).norm() > 1e-3 * secret.double().norm()
    assert "entropy" not in str(files.read_tensors(tmp_path / "run" / "checkpoint.pt").keys())


def _gradients_at(point, data):
    model, _ = make_toy()
    model.load_state_dict(point)
    return list(torch.from_numpy(example_gradients(model, data[0][:10], data[1][:10])))


def _clip(row):
    return torch.from_numpy(clip_and_sum(row.numpy()[None], 1.0))


def _tensors(content):
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _tensors(value)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    out = tmp_path / "run"
    part_way(out, 20)
    saved = (out / "checkpoint.pt").read_bytes()

    def full(path, content):
        path.write_bytes(bytes(content)[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_bytes", full)
    with pytest.raises(OSError, match=r"No space left.*intact"):
        resumed = start(out, resume=True)
        saver(resumed, resumed.folder)()
    assert (out / "checkpoint.pt").read_bytes() == saved
    assert not list(out.glob(".*new"))
    monkeypatch.undo()
    assert start(out, resume=True).state.step == 20


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: (out / "checkpoint.pt").write_bytes(b"torn"), "torn or not a checkpoint"),
        (lambda out: (out / "ledger.jsonl").unlink(), "cannot read the ledger"),
        (lambda out: (out / "run.json").unlink(), "no run.json"),
        (lambda out: (out / "run.json").write_text("{"), "not JSON"),
        (lambda out: (out / "run.json").write_text("[]"), "holds a list"),
        (
            lambda out: (out / "ledger.jsonl").write_text(
                "".join((out / "ledger.jsonl").read_text().splitlines(True)[:5])
            ),
            "cut or replaced",
        ),
    ],
)
def test_a_spoilt_folder_is_refused_clearly(tmp_path, spoil, message):
    part_way(tmp_path / "run", 20)
    spoil(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        start(tmp_path / "run", resume=True)


@pytest.mark.parametrize("swapped", [("checkpoint.pt",), ("ledger.jsonl",), ("checkpoint.pt", "ledger.jsonl"), ()])
@pytest.mark.nightly("swapped1")
def test_what_was_asked_is_not_forgotten_by_files_of_another_run_of_the_same_settings(tmp_path, swapped):
    """Nor where the ledger and the checkpoint are lost: the records say how far the run went."""
    part_way(tmp_path / "other", 5)
    part_way(tmp_path / "run", 9)
    for name in ("checkpoint.pt", "ledger.jsonl"):
        if name in swapped:
            (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
        elif not swapped:
            (tmp_path / "run" / name).unlink()
    with pytest.raises(LedgerError, match="cut or replaced|it is another run's"):
        start(tmp_path / "run", resume=True)


def test_another_run_is_not_overwritten_nor_continued_with_other_settings(tmp_path):
    part_way(tmp_path / "run", 5)
    with pytest.raises(ValueError, match="already holds a run"):
        start(tmp_path / "run")
    with pytest.raises(ValueError, match="lr is 0.5 now but was 0.05"):
        start(tmp_path / "run", resume=True, lr=0.5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="not an empty folder"):
        start(tmp_path / "other")


def test_every_optimizer_and_memory_state_comes_back(tmp_path):
    from dataclasses import replace

    from vestige.optim.rules import Rule

    adam = replace(vestige.post_fm(), rule=Rule(torch.optim.AdamW, {"weight_decay": 0.1}))
    runs = []
    for interrupted in (False, True):
        model, data = make_toy()
        begin = partial(vestige.train, model, LOSS, data, method=adam, reproducible=3, **{**COMMON, "steps": 20})
        out = tmp_path / str(interrupted)
        training = begin(out=out)
        for record in training:
            if interrupted and record.step == 8:
                break
        if interrupted:
            training.ledger.close()
            model, data = make_toy(seed=0)
            training = vestige.train(
                model, LOSS, data, method=adam, reproducible=3, out=out, resume=True, **{**COMMON, "steps": 20}
            )
            for _ in training:
                pass
        runs.append(flat(training.model))
    np.testing.assert_array_equal(runs[0].numpy(), runs[1].numpy())


def test_what_is_written_lies_on_the_cpu_and_says_what_it_said(tmp_path, monkeypatch):
    """So that it loads on a machine without the device that it was trained on."""
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor + 1)  # as if it came from elsewhere
    whole = {"step": 3, "milestones": Counter({5: 2, 9: 1}), "pair": (1, "a")}
    files.write_tensors(tmp_path / "file.pt", {"state": {"model": state}, "rows": [torch.zeros(2)], **whole})
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert {name: found[name] for name in whole} == whole
    assert torch.equal(found["rows"][0], torch.ones(2))
    for name, value in state.items():
        assert torch.equal(found["state"]["model"][name], value + 1)
    assert found["state"]["model"]._metadata == state._metadata
