"""Where else can a run be logged? TensorBoard, MLflow, Weights & Biases: released quantities unless asked for more."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

LARGEST = 64
"""Vectors longer than this are not logged coordinate by coordinate."""


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """`tensorboard:FOLDER`, by torch's own writer."""

    NEEDS = ("torch.utils.tensorboard", "tensorboard")

    def __init__(self, folder: str, name: str) -> None:
        self._writer: Any = _need(*self.NEEDS).SummaryWriter(folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """`mlflow:TRACKING-URI`, one MLflow run per run."""

    NEEDS = ("mlflow", "mlflow")

    def __init__(self, address: str, name: str) -> None:
        self._mlflow: Any = _need(*self.NEEDS)
        self._mlflow.set_tracking_uri(address)
        self._mlflow.start_run(run_name=name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WeightsAndBiases:
    """`wandb:PROJECT`, without uploading code, system metrics or what is installed."""

    NEEDS = ("wandb", "wandb")

    def __init__(self, project: str, name: str) -> None:
        wandb = _need(*self.NEEDS)
        # Only what `log` is given is uploaded.
        settings = wandb.Settings(
            x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, disable_code=True, disable_git=True
        )
        self._run: Any = wandb.init(project=project, name=name, settings=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Any] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"log_to={package!r} needs a package: pip install {package}") from error


def check(texts: Sequence[str]) -> None:
    """Refuse, before a run begins, what is not KIND:PLACE (such as tensorboard:runs/board) or lacks its package."""
    for text in texts:
        kind, _, place = text.partition(":")
        if kind not in SINKS or not place:
            raise ValueError(f"log_to={text!r} must be KIND:PLACE with a kind of {', '.join(SINKS)}")
        _need(*SINKS[kind].NEEDS)


def open_sink(text: str, name: str) -> Sink:
    check([text])
    kind, _, place = text.partition(":")
    try:
        sink: Sink = SINKS[kind](place, name)
    except Exception as error:  # each package has its own
        raise ValueError(
            f"log_to={text!r} cannot be opened: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    return sink


@contextmanager
def opened(texts: Sequence[str], name: str) -> Iterator[list[Sink]]:
    """Open several sinks, and close all of them whatever happens."""
    with ExitStack() as stack:
        sinks = []
        for text in texts:
            sinks.append(open_sink(text, name))
            stack.callback(sinks[-1].close)
        yield sinks


def released(record: Mapping[str, object], accuracy: float | None = None) -> dict[str, float]:
    """The numbers of one step's record that may be shown anywhere: releases and public facts.

    Formal guarantees: post-processing of the run's releases, and accuracy on public test data; nothing else.
    """
    values: dict[str, float] = {}
    for key, value in record.items():
        if key == "step" or key.startswith("nonprivate"):
            continue
        if isinstance(value, int | float):
            values[key] = float(value)
        elif isinstance(value, list) and len(value) <= LARGEST:
            values |= {f"{key}/{i}": float(each) for i, each in enumerate(value) if isinstance(each, int | float)}
    if accuracy is not None:
        values["accuracy"] = accuracy
    return values


def nonprivate(training: Any) -> dict[str, float]:
    """NOT PRIVATE: computed from data without noise. Logging it voids the guarantee."""
    return {"nonprivate_broken_examples": float(training.nonprivate_broken_examples)}
