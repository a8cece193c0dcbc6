"""Do several processes make the run of one through other libraries, and `vestige finetune`? One sample, one ledger."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

import process_bridges
from checkpoints import checkpoint, rows
from process_gang import Failed
from vestige.training.verify import verify


def asked(ledger):
    """The questions that a ledger's file holds."""
    return sum(json.loads(line)["row"] == "ask" for line in ledger.read_text().splitlines())


def together(answers):
    """The answers of all processes, which are the same model."""
    for answer in answers:
        assert not isinstance(answer, Failed), answer
    assert torch.equal(answers[0]["weights"], answers[1]["weights"])
    return answers[0]


def same(found, alone):
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
    assert found["epsilon"] == alone["epsilon"]
    assert found["asked"] == alone["asked"]


# --- vestige finetune -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from vestige.finetuning.job import FineTuning

    made = tmp_path_factory.mktemp("made")
    checkpoint(made / "lm")
    return FineTuning(
        model=str(made / "lm"), data=str(rows(made / "reviews.jsonl")), test=str(rows(made / "test.jsonl", 7)),
        label_column="label", labels=("neg", "pos"), lora=2, noise_multiplier=1.0, delta=1e-3, batch=10, steps=4,
        max_length=16, reproducible=True, seed=3, lr=0.01,
    )  # fmt: skip


@pytest.mark.parametrize("aim", ["classification", pytest.param("causal-lm", marks=pytest.mark.slow)])
def test_finetuning_by_two_processes_is_that_of_one(two, job, tmp_path, aim):
    changes = {} if aim == "classification" else {"label_column": None, "labels": None}
    alone = process_bridges.finetuned(job, tmp_path / "one", **changes)
    found = together(two(process_bridges.finetuned, job, tmp_path / "two", **changes))
    same(found, alone)
    assert found["quality"] == pytest.approx(alone["quality"], rel=1e-5)
    assert asked(tmp_path / "two" / "ledger.jsonl") == 4

    def left(run):
        return sorted(path.relative_to(tmp_path / run).as_posix() for path in (tmp_path / run).rglob("*"))

    assert left("two") == left("one")
    from commands import as_json

    assert as_json("verify", tmp_path / "two")["unchecked"] == []


@pytest.mark.slow
def test_finetuning_that_one_of_two_processes_interrupts_goes_on_in_one(two, job, tmp_path):
    alone = process_bridges.finetuned(job, tmp_path / "one")
    each = [{"stop": None}, {"stop": 1}]
    halted = together(two(process_bridges.finetuned, job, tmp_path / "two", each=each))
    assert (halted["stopped"], halted["asked"]) == ("interrupted", 2)
    assert not (tmp_path / "two" / "adapter").exists()
    same(process_bridges.finetuned(None, tmp_path / "two", resume=True), alone)


APART = {
    "a setting": ([{}, {"tokens_per_example": 9}], "tokens_per_example is 9 in process 1"),
    "a column": ([{}, {"max_length": 16, "text_column": "label"}], "text_column is"),
    "the texts": ([{}, {"reverse": True}], "their examples are not the same, or not in the same order"),
}


@pytest.mark.parametrize("case", APART)
def test_finetuning_by_processes_that_disagree(two, job, tmp_path, case):
    each, words = APART[case]
    changes = {"label_column": None, "labels": None}
    for answer in two(process_bridges.finetuned, job, tmp_path / "run", each=each, **changes):
        assert isinstance(answer, Failed), answer
        assert answer.kind == "ValueError"
        assert words in answer.message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_speaks_once(job, tmp_path):
    command = ["finetune", "--model", job.model, "--data", job.data, "--max-length", "16", "--batch-size", "10", "--steps",
               "2", "--epsilon", "8", "--delta", "1e-3", "--lora", "2", "--out", tmp_path / "run"]  # fmt: skip
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vestige"]
    done = subprocess.run(
        [*launch, *map(str, command), "--json"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert 7 < result["epsilon"] <= 8
    assert result["asked"] == asked(tmp_path / "run" / "ledger.jsonl") == 2
    assert done.stderr.count("noise multiplier") == 1
    assert (tmp_path / "run" / "adapter" / "README.md").is_file()


# --- Accelerate -------------------------------------------------------------------------------------------------------

ORDERS = ("prepare, make_private", "make_private, prepare")
MORE = [(ORDERS[0], 4), (ORDERS[1], None)]


@pytest.fixture
def accelerate():
    """Accelerate keeps its state for the whole process."""
    library = pytest.importorskip("accelerate")
    yield library
    library.state.AcceleratorState._reset_state(True)
    library.state.GradientState._reset_state()


@pytest.mark.parametrize(
    ("order", "physical"),
    [(ORDERS[0], None), (ORDERS[1], 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_accelerate_with_two_processes_is_that_with_one(two, accelerate, order, physical):
    alone = process_bridges.accelerated(order, several=False)
    answers = two(process_bridges.accelerated, order, physical=physical, buffer=True, loading={"split_batches": True})
    found = together(answers)
    same(found, alone)
    assert found["asked"] == found["steps"] == 10
    rows = torch.cat([answer["rows"] for answer in answers])
    drawn, handed_out = (Counter(each.sum(dim=1).tolist()) for each in (alone["rows"], rows))
    assert not drawn - handed_out  # beside them, rows of weight zero: of each part two are handed out at least


ACCELERATED = {
    "accumulation": ({"gradient_accumulation_steps": 2}, ORDERS, "gradient_accumulation_steps=2"),
    "dispatching": ({"loading": {"dispatch_batches": True}}, ORDERS[:1], "dispatch_batches=True lets process 0 read"),
}


@pytest.mark.parametrize("case", ACCELERATED)
def test_what_accelerate_cannot_do(two, accelerate, case):
    options, orders, words = ACCELERATED[case]
    for order in orders:
        for answer in two(process_bridges.accelerated, order, **options):
            assert isinstance(answer, Failed), answer
            assert (answer.kind, answer.message.count("\n")) == ("ValueError", 0)
            assert words in answer.message


def test_models_that_accelerate_divides(monkeypatch, accelerate):
    from vestige.privacy_engine.microbatch_queue import require_known_processes

    accelerate.Accelerator(cpu=True)
    monkeypatch.setitem(accelerate.state.PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match="Accelerate runs 2 processes, and 1 train together"):
        require_known_processes()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setitem(accelerate.state.AcceleratorState._shared_state, "distributed_type", "FSDP")
    with pytest.raises(ValueError, match="2 processes by FSDP: a private loop with it trains replicas"):
        require_known_processes()


# --- Hugging Face's Trainer -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trainer_with_two_processes_is_that_with_one(two, accelerate, tmp_path):
    """Three examples of a device, two times, by two processes: samples of twelve."""
    pytest.importorskip("transformers")
    alone = process_bridges.tuned(tmp_path / "one", several=False)
    found = together(two(process_bridges.tuned, tmp_path / "two"))
    same(found, alone)
    assert found["rate"] == 12 / 60
    assert found["asked"] == asked(tmp_path / "two" / "ledger.jsonl") == 4
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert found["logged"] == alone["logged"]
    for run in ("one", "two"):
        assert (tmp_path / run / "checkpoint-4" / "vestige.pt").is_file()
        assert (tmp_path / run / "privacy.json").is_file()
        assert verify(tmp_path / run).asked == 4


@pytest.mark.slow
def test_a_trainer_goes_on_in_two_processes(two, accelerate, tmp_path):
    """Steps that the checkpoint does not know of stay charged."""
    pytest.importorskip("transformers")
    together(two(process_bridges.tuned, tmp_path / "two", reproducible=None))
    found = together(
        two(process_bridges.tuned, tmp_path / "two", resume=str(tmp_path / "two" / "checkpoint-2"), reproducible=None)
    )
    assert found["asked"] == asked(tmp_path / "two" / "ledger.jsonl") == 6


# --- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["self", pytest.param("net", marks=pytest.mark.slow)])
def test_lightning_with_two_processes_is_that_with_one(two, tmp_path, calls):
    pytest.importorskip("lightning.pytorch")
    alone = process_bridges.lightning(several=False, calls=calls)
    found = together(two(process_bridges.lightning, calls=calls, ledger=tmp_path / "ledger.jsonl"))
    same(found, alone)
    assert found["asked"] == found["steps"] == asked(tmp_path / "ledger.jsonl") == 10
    assert found["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_lightning_goes_on_in_two_processes(two, tmp_path):
    pytest.importorskip("lightning.pytorch")
    saved, ledger = tmp_path / "saved.ckpt", tmp_path / "ledger.jsonl"
    together(two(process_bridges.lightning, epochs=1, ledger=ledger, checkpoint=saved))
    found = together(two(process_bridges.lightning, epochs=2, ledger=ledger, resume=saved))
    assert (found["steps"], found["asked"], asked(ledger)) == (10, 10, 10)


def test_parts_in_several_processes_of_lightning(two):
    pytest.importorskip("lightning.pytorch")
    for answer in two(process_bridges.lightning, max_physical_batch_size=4):
        assert isinstance(answer, Failed), answer
        assert (answer.kind, answer.message.count("\n")) == ("ValueError", 0), answer
        assert "max_physical_batch_size=4" in answer.message


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [("ddp_fork", 2, "forked or spawned"), ("ddp_spawn", 2, "forked or spawned"), ("ddp", 1, "not by DDPStrategy")],
)
def test_strategies_of_lightning(strategy, devices, words):
    pl = pytest.importorskip("lightning.pytorch")
    from vestige.integrations.lightning import _require_one_mechanism

    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, devices=devices, logger=False)
    with pytest.raises(ValueError, match=words):
        _require_one_mechanism(trainer, pl.LightningModule())


@pytest.mark.slow
def test_lightning_starts_processes_itself(tmp_path):
    pytest.importorskip("lightning.pytorch")
    script = tmp_path / "fit.py"
    script.write_text(
        "import json, pathlib, torch, process_bridges\n"
        f"found = process_bridges.lightning(ledger=pathlib.Path({str(tmp_path / 'ledger.jsonl')!r}))\n"
        "if torch.distributed.get_rank() == 0: print(json.dumps([found['asked'], found['weights'].tolist()]))\n"
    )
    path = os.pathsep.join([*sys.path, os.path.dirname(process_bridges.__file__)])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    count, weights = json.loads(done.stdout.splitlines()[-1])
    assert count == asked(tmp_path / "ledger.jsonl") == 10
    alone = process_bridges.lightning(several=False)
    torch.testing.assert_close(torch.tensor(weights), alone["weights"], rtol=1e-4, atol=1e-5)
