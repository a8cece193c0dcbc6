"""What do several processes refuse? In one line, all of them, and without anybody waiting for ever."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import process_gang
import vestige
from loops import private
from vestige.accounting.ledger import LedgerError
from vestige.cli.errors import SECONDS_FOR_PROCESS_0, fail
from vestige.priced_questions import BudgetSpent
from vestige.processes.distributed_setup import unwrapped
from vestige.processes.group import _portable

DATA = torch.randn(40, 6), torch.randint(3, (40,))

APART = {
    "steps": ([{"steps": 12}, {"steps": 13}], "steps is 13 in process 1 and 12 in process 0"),
    "noise": ([{"noise_multiplier": 1.0}, {"noise_multiplier": 1.1}], "noise_multiplier is 1.1 in process 1"),
    "examples": ([{"examples": 60}, {"examples": 61}], "the number of examples is 61 in process 1"),
    "the data": ([{"data_seed": 0}, {"data_seed": 5}], "their examples are not the same"),
    "two rows": ([{}, {"arrange": "exchanged"}], "their examples are not the same, or not in the same order"),
    "a list": ([{"arrange": "list"}, {"arrange": "reversed list"}], "not in the same order"),
    "rows": ([{"arrange": "read"}, {"arrange": "read from another row on"}], "not in the same order"),
    "the loss": ([{}, {"loss": process_gang.squared}], "the loss is"),
    "bfloat16": ([{}, {"bfloat16": True}], "bfloat16 is true in process 1 and false in process 0"),
    "seed": ([{"reproducible": 1}, {"reproducible": 2}], "reproducible is 2 in process 1"),
    "method": ([{"method": "dp-sgd"}, {"method": "disk"}], "method is"),
    "one is wrong": ([{}, {"sample_rate": 2.0}], "sample_rate=2.0"),
}


@pytest.mark.parametrize("case", APART)
def test_processes_that_disagree(two, case):
    each, words = APART[case]
    found = two(process_gang.train, each=each)
    for answer in found:
        assert isinstance(answer, process_gang.Failed), answer
        assert answer.kind == "ValueError"
        assert words in answer.message
        assert "\n" not in answer.message
    assert not isinstance(two(process_gang.train)[0], process_gang.Failed)  # the group is as good as before


LOOPS = {
    "seeds": ([{"reproducible": 1}, {"reproducible": 2}], "reproducible is"),
    "rates": ([{}, {"lr": 0.5}], '"lr": 0.5'),
    "two rows": ([{}, {"arrange": "exchanged"}], "their examples are not the same, or not in the same order"),
    "rows": ([{"arrange": "read"}, {"arrange": "read from another row on"}], "not in the same order"),
    "ledgers": ([{}, {"ledger": "/nowhere/ledger.jsonl"}], "ledger is"),
    "a sampler": ([{"sampler": process_gang.distributed_sampler}] * 2, "batch_size is that of all processes together"),
    "sharded": ([{}, {"kind": "sharded"}], "sharded is true in process 1 and false in process 0"),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops_that_disagree(two, case):
    each, words = LOOPS[case]
    for answer in two(process_gang.loop, each=each):
        assert isinstance(answer, process_gang.Failed), answer
        assert answer.kind == "ValueError"
        assert words in answer.message


@pytest.mark.parametrize(
    ("task", "words"),
    [(process_gang.tensor_parallel, "parallelism"), (process_gang.two_dimensions, "a mesh of 2 dimensions")],
)
def test_other_parallelism(two, task, words):
    for answer in two(task):
        assert isinstance(answer, process_gang.Failed)
        assert answer.kind == "ValueError", answer
        assert words in answer.message


SHARDED = {
    "dp-muon": "its rule (HybridMuon) needs whole tensors",
    "dp-micro-adam": "its rule (MicroAdam) needs whole tensors",
    "geoclip": "its clip (Geometric) needs whole tensors",
    "dp-sat": "its probe (AgainstLastRelease) needs whole tensors",
}


@pytest.mark.parametrize("method", SHARDED)
def test_methods_that_need_whole_tensors(two, method):
    for answer in two(process_gang.train, method, kind="sharded"):
        assert isinstance(answer, process_gang.Failed)
        assert SHARDED[method] in answer.message


@pytest.mark.parametrize("options", [{"audit": 8}, {"engine": "reference"}])
def test_what_sharded_models_do_without(two, options):
    for answer in two(process_gang.train, kind="sharded", **options):
        assert isinstance(answer, process_gang.Failed)
        assert f"{next(iter(options))}: not for a sharded model" in answer.message


def test_canaries_of_several_processes_are_the_same(two):
    found = two(process_gang.train, audit=16, reproducible=None)
    assert torch.equal(found[0]["path"], found[1]["path"])


def test_replicas_that_come_apart(two):
    for answer in two(process_gang.train, each=[{}, {"drift": 1e-6}]):
        assert isinstance(answer, process_gang.Failed)
        assert "their models are not the same after step 1" in answer.message


def test_replicas_that_come_apart_at_the_end(two):
    """After the last step that is compared on the way."""
    for answer in two(process_gang.train, each=[{}, {"drift": 1e-6, "late": 10}], steps=13):
        assert isinstance(answer, process_gang.Failed)
        assert "their models are not the same after step 12" in answer.message


def test_rows_that_are_read_one_by_one_are_an_assumption(two):
    """Augmented as they are read, they are the same rows still."""
    assert two(process_gang.assumption, name="processes", arrange="read") == ["assumed"] * 2
    assert two(process_gang.assumption, name="processes") == ["checked"] * 2


def test_an_error_says_nothing_of_the_rows(two):
    """Two comparisons of the same rows have other keys, and no message has either hash."""
    first, second = (two(process_gang.train, each=[{}, {"arrange": "exchanged"}])[0].message for _ in range(2))
    assert first == second
    assert not any(letters.isdigit() and len(letters) > 4 for letters in first.split())


def test_processes_at_different_steps(two):
    for answer in two(process_gang.ask_apart):
        assert isinstance(answer, process_gang.Failed)
        assert answer.kind == "ValueError"
        assert "process 1 is about to ask something else than process 0" in answer.message


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [unwrapped, lambda model: private(model, DATA)])
def test_data_parallel(way):
    with pytest.raises(ValueError, match="one process for each GPU, by torchrun"):
        way(nn.DataParallel(nn.Linear(6, 3)))


def train(model):
    return vestige.train(
        model, nn.functional.cross_entropy, DATA, method="dp-sgd", noise_multiplier=1.0, delta=1e-3, sample_rate=0.5,
        steps=4,
    )  # fmt: skip


def test_processes_that_join_later_are_refused_at_the_next_step(monkeypatch):
    records = iter(train(nn.Linear(6, 3)))
    next(records)
    model = nn.Linear(6, 3)
    optimizer, loader = private(model, DATA)[2:]
    x, y = next(iter(loader))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="began in one process"):
        next(records)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="began in one process"):
        optimizer.step()


def test_a_launch_of_one_process_trains(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(list(train(nn.Linear(6, 3)))) == 4


def test_a_launch_without_an_address(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="start the processes by torchrun, or unset these"):
        train(nn.Linear(6, 3))


def test_a_transcript_that_is_no_path():
    with pytest.raises(ValueError, match="nonprivate_transcript=True must be the path"):
        vestige.train(nn.Linear(6, 3), nn.functional.cross_entropy, DATA, nonprivate_transcript=True, sample_rate=0.5,
                      steps=2, noise_multiplier=1.0, delta=1e-3)  # fmt: skip


def test_other_commands_run_in_one_process():
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "vestige", "methods"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "vestige methods runs in one process" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_is_reported_by_process_0_and_by_another_only_where_that_one_goes_on(rank, monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("time.sleep", waited.append)  # torchrun ends process 1 here, when process 0 has failed
    with pytest.raises(SystemExit) as left:
        fail("no such file", 2)
    assert left.value.code == 2
    assert waited == [SECONDS_FOR_PROCESS_0] * rank
    assert capsys.readouterr().err == ("vestige: no such file\n", "vestige (process 1): no such file\n")[rank]


def test_what_process_0_may_not_spend_the_others_may_not_either():
    for error in (BudgetSpent("the book does not hold this run"), ValueError("steps=0"), LedgerError("row 3")):
        found = _portable(error)
        assert (type(found), str(found)) == (type(error), str(error))
    assert type(_portable(KeyError("x"))) is RuntimeError


def test_a_time_limit_that_is_none(monkeypatch):
    from vestige.processes.group import time_limit

    monkeypatch.setenv("VESTIGE_PROCESS_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="VESTIGE_PROCESS_TIMEOUT='soon'"):
        time_limit()
