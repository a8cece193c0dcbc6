"""Does a command survive Ctrl-C, and take its workers with it?"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from commands import started, vestige
from vestige.cli.run_comparison import Execution, make_runs
from vestige.cli.terminal import sigterm_as_ctrl_c
from vestige.compare.runner import Status
from vestige.training.job import complete, load, start
from vestige.training.run_folder import RunFolder


@pytest.fixture(autouse=True)
def heard():
    """A shell lets what it starts in the background ignore Ctrl-C; here it is heard, by children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_and_a_second_command_continues(tmp_path):
    run = tmp_path / "run"
    process = started(
        "train",
        "--task",
        "digits-mlp",
        "--noise-multiplier",
        "4",
        "--sample-rate",
        "0.05",
        "--steps",
        "4000",
        "--out",
        run,
    )
    ledger = run / "ledger.jsonl"
    deadline = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_text().count("\n") > 30) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "vestige train --resume" in error
    asked = ledger.read_text().count('"row": "ask"')
    assert torch.load(run / "checkpoint.pt", weights_only=True)["state"]["step"] == asked
    code, _, error = vestige("train", "--resume", run, "--steps", "3")
    assert code == 2
    assert "--steps cannot be given too" in error
    again, seen = load(RunFolder(run)), []
    task, training = start(again, run, resume=True)
    complete(again, task, training, lambda training, record, accuracy: seen.append(record.step) or len(seen) < 3)
    assert seen[0] == asked


@pytest.mark.slow
def test_sigterm_is_ctrl_c(tmp_path):
    run, deadline = tmp_path / "run", time.monotonic() + 120
    words = ("--noise-multiplier", "4", "--sample-rate", "0.05", "--steps", "4000", "--out", run, "--json")
    process, ledger = started("train", "--task", "digits-mlp", *words), run / "ledger.jsonl"
    while not (ledger.exists() and ledger.read_text().count('"row": "ask"') > 10) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    result = json.loads(process.communicate(timeout=60)[0])
    assert result["stopped"] == "interrupted"
    assert result["steps"] == ledger.read_text().count('"row": "ask"') > 10


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_comparison_with_the_way_to_continue(tmp_path, workers):
    folder = tmp_path / "comparison"
    process = started(
        "compare",
        "--method",
        "dp-sgd",
        "--steps",
        "3000",
        "--workers",
        workers,
        "--out",
        folder,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5 if workers == 1 else 8)  # the pool starts, and its workers are in the middle of a run
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    out, error = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # a shell reports 130 for both
    assert out == ""
    assert error == f"interrupted; continue with: vestige compare --resume {folder}\n"


@pytest.mark.parametrize("moment", [0.3, 1.5])
@pytest.mark.slow
def test_ctrl_c_while_workers_load_says_no_more_than_that(tmp_path, moment):
    """In a spawned process the import of torch takes a second or two; Ctrl-C in it used to print its traceback."""
    folder = tmp_path / "comparison"
    words = ("compare", "--method", "dp-sgd", "--steps", "3000", "--workers", 2, "--out", folder)
    process = started(*words, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (folder / "spec.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert (out, error) == ("", f"interrupted; continue with: vestige compare --resume {folder}\n")


@pytest.mark.slow
def test_a_comparison_that_is_told_to_end_takes_its_workers_with_it(tmp_path):
    folder = tmp_path / "comparison"
    process = started("compare", "--method", "dp-sgd", "--steps", "3000", "--workers", 2, "--out", folder)
    deadline = time.monotonic() + 120
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.exists() or len(workers := children.read_text().split()) < 3:  # and the resource tracker
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, f"interrupted; continue with: vestige compare --resume {folder}\n")
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_in_a_destructor_is_not_lost(capfd):
    class Held:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # here it is raised, and here Python cannot pass it on

    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        held = Held()
        del held
        for _ in range(100):
            time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_an_interrupt_that_somebody_swallowed_is_raised_once_more():
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c() as raise_if_asked:
        raise_if_asked()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            pass
        raise_if_asked()


def test_a_comparison_whose_interrupt_was_swallowed_ends_after_its_batch(monkeypatch, tmp_path, capsys):
    def swallowing(path, specification, *, on_progress, **rest):
        on_progress(Status(0, 0, 2, None, ""))
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException:
            pass
        on_progress(Status(1, 0, 2, None, ""))

    monkeypatch.setattr("vestige.compare.runner.compare", swallowing)
    with pytest.raises(SystemExit) as left:
        make_runs(tmp_path, None, Execution(workers=1, device="cpu"), visible=False)
    assert left.value.code == 130
    assert "vestige compare --resume" in capsys.readouterr().err


def test_other_errors_in_a_destructor_are_reported_as_ever(monkeypatch):
    class Held:
        def __del__(self):
            raise OSError("gone")

    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: reported.append(unraisable.exc_type))
    with sigterm_as_ctrl_c():
        Held()
    assert reported == [OSError]


TASK = """
import torch
from torch import nn

def task(data):
    x, y = torch.load(data)
    return nn.Linear(4, 2), nn.functional.cross_entropy, (x[20:], y[20:]), (x[:20], y[:20])
"""


def test_a_run_goes_on_where_its_data_lie_elsewhere(tmp_path):
    """On another machine: another path and other parts, the same run and the same ledger."""
    torch.manual_seed(0)
    here, there, fewer = (tmp_path / name for name in ("here.pt", "there.pt", "fewer.pt"))
    torch.save((torch.randn(100, 4), torch.randint(2, (100,))), here)
    (tmp_path / "mine.py").write_text(TASK)
    options = ["--task", f"{tmp_path / 'mine.py'}:task", "--epsilon", 3, "--delta", 1e-3, "--sample-rate", 0.3]
    options += ["--steps", 8, "--reproducible", "--data", here]
    assert vestige("train", *options, "--out", tmp_path / "whole")[0] == 0

    run = tmp_path / "run"
    job = load(RunFolder(tmp_path / "whole"))
    task, training = start(job, run)
    complete(job, task, training, lambda training, record, accuracy: record.step < 3)
    x, y = torch.load(here)
    here.rename(there)
    torch.save((x[:90], y[:90]), fewer)
    code, _, error = vestige("train", "--resume", run, "--trust")
    assert code == 2
    assert "here.pt" in error
    for given, message in (
        (["--data", fewer], "population is 70 now but was 80"),
        (["--data", there, "--lr", 1], "--lr cannot be given too"),
    ):
        code, _, error = vestige("train", "--resume", run, "--trust", *given)
        assert code == 2
        assert message in error
    code, _, error = vestige(
        "train", "--resume", run, "--trust", "--data", there, "--max-physical-batch-size", 7, "--device", "cpu"
    )
    assert code == 0, error
    assert vestige("verify", run)[0] == 0
    models = [torch.load(folder / "model.pt", weights_only=True) for folder in (tmp_path / "whole", run)]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-6, atol=1e-7)
