"""What leaves through a sink: released quantities only, unless the user gives the guarantee up."""

import json
import sys
import types

import pytest
from typer.testing import CliRunner

from vestige.cli import main
from vestige.training import loggers

BASE = [
    "train",
    "--task",
    "digits-mlp",
    "--noise-multiplier",
    "1.0",
    "--steps",
    "4",
    "--evaluate-every",
    "2",
    "--json",
    "--method",
    "fo-dp-sgd",
]


class Fake:
    """Keeps what it is given."""

    NEEDS = ("json", "json")
    made: list = []  # noqa: RUF012

    def __init__(self, place, name):
        self.place, self.rows, self.closed = place, [], False
        Fake.made.append(self)

    def log(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    Fake.made = []
    monkeypatch.setitem(loggers.SINKS, "tensorboard", Fake)
    return Fake


def test_a_run_logs_releases_and_keeps_its_guarantee(fake, tmp_path):
    made = CliRunner().invoke(main.app, [*BASE, "--out", str(tmp_path / "r"), "--log-to", "tensorboard:board"])
    assert made.exit_code == 0, made.output
    (sink,) = fake.made
    assert sink.place == "board"
    assert sink.closed
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3]
    assert "accuracy" in sink.rows[1][1]
    assert "accuracy" not in sink.rows[0][1]
    names = {name for _, values in sink.rows for name in values}
    assert {"epsilon", "effective_depth", "weights/0"} <= names
    assert not any(name.startswith("nonprivate") for name in names)
    assert json.loads(made.stdout)["epsilon"] is not None


def test_a_run_that_is_continued_may_log_again(fake, tmp_path, monkeypatch):
    def breaks(self, step, values):
        raise RuntimeError("the board is gone")

    monkeypatch.setattr(fake, "log", breaks)
    words = ["--log-to", "tensorboard:board"]
    assert CliRunner().invoke(main.app, [*BASE, "--out", str(tmp_path / "r"), *words]).exit_code != 0
    monkeypatch.undo()
    monkeypatch.setitem(loggers.SINKS, "tensorboard", Fake)
    made = CliRunner().invoke(main.app, ["train", "--resume", str(tmp_path / "r"), "--json", *words])
    assert made.exit_code == 0, made.output
    assert fake.made[-1].rows[-1][0] == 3


def test_nonprivate_logs_void_the_guarantee(fake, tmp_path):
    arguments = [*BASE, "--out", str(tmp_path / "r"), "--log-to", "tensorboard:board", "--nonprivate-logs"]
    made = CliRunner().invoke(main.app, arguments)
    assert made.exit_code == 0, made.output
    assert all("nonprivate_broken_examples" in values for _, values in fake.made[0].rows)
    result = json.loads(made.stdout.strip().splitlines()[-1])
    assert result["epsilon"] is None
    assert any("without noise" in reason for reason in result["reasons"])
    checked = CliRunner().invoke(main.app, ["verify", str(tmp_path / "r"), "--json"])
    assert json.loads(checked.stdout)["epsilon"] is None


def test_released_drops_what_is_not():
    row = {"step": 3, "epsilon": 1.5, "nonprivate_x": 1.0, "w": [1, 2], "long": [0.0] * 100, "word": "a", "none": None}
    assert loggers.released(row, 0.5) == {"epsilon": 1.5, "w/0": 1.0, "w/1": 2.0, "accuracy": 0.5}


def test_sinks_close_even_when_training_fails(fake):
    def fail():
        with loggers.opened(["tensorboard:a"], "run"):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        fail()
    assert fake.made[0].closed


def test_a_place_that_cannot_be_opened_is_said_in_one_line(monkeypatch):
    class Broken(Fake):
        def __init__(self, place, name):
            raise OSError("no such place\nand more")

    monkeypatch.setitem(loggers.SINKS, "mlflow", Broken)
    with pytest.raises(ValueError, match=r"log_to='mlflow:x' cannot be opened: no such place$"):
        loggers.open_sink("mlflow:x", "run")


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "paper:x", ""])
def test_a_place_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="log_to="):
        loggers.open_sink(text, "run")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        loggers.open_sink("wandb:project", "run")


def test_mlflow_and_wandb_are_called_as_they_document(monkeypatch):
    calls = []
    mlflow = types.SimpleNamespace(
        set_tracking_uri=lambda uri: calls.append(("uri", uri)),
        start_run=lambda run_name: calls.append(("start", run_name)),
        log_metrics=lambda values, step: calls.append(("log", values, step)),
        end_run=lambda: calls.append(("end",)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    sink = loggers.open_sink("mlflow:http://localhost:5000", "run")
    sink.log(2, {"epsilon": 1.0})
    sink.close()
    assert calls == [("uri", "http://localhost:5000"), ("start", "run"), ("log", {"epsilon": 1.0}, 2), ("end",)]
    seen = {}
    run = types.SimpleNamespace(log=lambda v, step: seen.update(v, step=step), finish=lambda: seen.update(done=True))
    wandb = types.SimpleNamespace(
        Settings=lambda **options: options, init=lambda **options: seen.update(options) or run
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = loggers.open_sink("wandb:mine", "run")
    sink.log(1, {"epsilon": 2.0})
    sink.close()
    assert seen["project"] == "mine"
    assert seen["settings"] == {
        "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "disable_code": True,
        "disable_git": True,
    }  # fmt: skip
    assert seen["epsilon"] == 2.0
    assert seen["done"]


def test_real_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = loggers.open_sink(f"tensorboard:{tmp_path}", "run")
    for step in range(3):
        sink.log(step, {"epsilon": float(step)})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("epsilon")] == [0.0, 1.0, 2.0]


def test_real_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{tmp_path / 'runs.db'}"
    made = CliRunner().invoke(main.app, [*BASE, "--out", str(tmp_path / "r"), "--log-to", f"mlflow:{address}"])
    assert made.exit_code == 0, made.output
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(address)
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "epsilon")] == [0, 1, 2, 3]
    assert not any(name.startswith("nonprivate") for name in run.data.metrics)


def test_real_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = CliRunner().invoke(main.app, [*BASE, "--out", str(tmp_path / "r"), "--log-to", "wandb:project"])
    assert made.exit_code == 0, made.output
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = kept.read_bytes()
    assert b"epsilon" in written
    assert not list(kept.parent.glob("files/*"))
    assert b"nonprivate" not in written
