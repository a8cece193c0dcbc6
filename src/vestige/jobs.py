"""How does a named task become a finished run? A job is a value: it can be written down, resumed and repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vestige import tasks
from vestige.api import Training, train
from vestige.method import Method, build
from vestige.rules import named
from vestige.run_folder import RunFolder
from vestige.training import Record, accuracy

Watch = Callable[[Training, Record, float | None], bool]
"""Sees every record, with the accuracy on public test data when it was measured; False stops the run cleanly."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One private run of a task, as asked for."""

    task: str
    method: str = "fo-dp-sgd"
    options: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    sample_rate: float = 0.05
    steps: int = 200
    delta: float = 1e-5
    epsilon: float | None = None
    noise_multiplier: float | None = None
    paper_sigma: float | None = None
    lr: float | Literal["auto"] = "auto"
    optimizer: str | None = None
    sampling: str = "poisson"
    engine: str = "reference"
    physical_batch: int | None = None
    seed: int = 0
    reproducible: bool = False
    device: str = "cpu"
    evaluate_every: int | None = None
    nonprivate_transcript: str | None = None


def method_of(job: Job) -> Method:
    method = build(job.method, **job.options)
    if job.optimizer is None:
        return method
    if "momentum" in job.options and job.optimizer.lower() != "sgd":
        raise ValueError(f"momentum={job.options['momentum']} belongs to sgd, not to the optimizer {job.optimizer}")
    return replace(method, rule=named(job.optimizer, method.rule.options if job.optimizer.lower() == "sgd" else {}))


def start(
    job: Job, out: Path | None, *, resume: bool = False, task: tasks.Task | None = None
) -> tuple[tasks.Task, Training]:
    """Load the task (unless it is given) and prepare its training; nothing is asked of the data yet."""
    method = method_of(job)
    multiplier = job.noise_multiplier
    if job.paper_sigma is not None:
        if multiplier is not None:
            raise ValueError(f"paper_sigma={job.paper_sigma} and noise_multiplier={multiplier}: give one of them")
        if not job.paper_sigma > 0:
            raise ValueError(f"paper_sigma={job.paper_sigma} must be positive")
        multiplier = job.paper_sigma / method.memory.fresh_share
    task = task or tasks.load(job.task, job.data, job.seed)
    try:
        task.model.to(job.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={job.device!r} cannot be used: {error}") from error
    training = train(
        task.model,
        task.loss,
        task.train,
        method=method,
        sample_rate=job.sample_rate,
        steps=job.steps,
        delta=job.delta,
        epsilon=job.epsilon,
        noise_multiplier=multiplier,
        lr=job.lr,
        sampling=job.sampling,
        engine=job.engine,
        physical_batch=job.physical_batch,
        reproducible=job.seed if job.reproducible else None,
        out=out,
        resume=resume,
        request={"job": asdict(job)},
        nonprivate_transcript=job.nonprivate_transcript,
    )
    return task, training


def execute(job: Job, out: Path | None, watch: Watch | None = None, *, resume: bool = False) -> dict[str, Any]:
    """Run a job to its end, or to the end of its budget, and return its result; with `out`, it is all on disk too."""
    task, training = start(job, out, resume=resume)
    return complete(job, task, training, watch)


def complete(job: Job, task: tasks.Task, training: Training, watch: Watch | None = None) -> dict[str, Any]:
    """Consume a prepared training: evaluate on the public test set now and then, and write the result."""
    every = job.evaluate_every or max(1, job.steps // 20)
    begin = time.perf_counter()
    interrupted = False
    record: Record | None = None
    for record in training:
        seen = None
        if (record.step + 1) % every == 0:
            seen = training.log["accuracy"] = accuracy(task.model, task.test)
        if watch is not None and not watch(training, record, seen):
            interrupted = True
            break
    seconds = time.perf_counter() - begin
    result = {
        "task": job.task,
        "method": job.method,
        "accuracy": accuracy(task.model, task.test),
        **statement(training),
        "steps": training.state.step,
        "seed": job.seed,
        "seconds": round(seconds, 3),
        "stopped": _why(training, interrupted),
        "run": str(training.folder.path) if training.folder else None,
    }
    if record is not None:
        result |= {key: float(value) for key, value in record.diagnostics.items() if value.dim() == 0}
    if interrupted:
        training.ledger.close()
    else:
        training.finish(result)
    return result


def statement(training: Training) -> dict[str, Any]:
    """The guarantee and the public facts it rests on, in plain keys."""
    promise = training.guarantee()
    facts: dict[str, Any] = {
        "epsilon": promise.epsilon,
        "delta": promise.delta,
        "accountant": promise.accountant,
        "epsilon_rdp": promise.epsilon_rdp if promise.epsilon is not None else None,
        "budget": training.plan.epsilon,
        "noise_multiplier": training.plan.noise_multiplier,
        "sample_rate": training.plan.sample_rate,
        "expected_batch": training.expected_batch,
        "lr": training.plan.lr,
        "lr_reason": training.plan.lr_reason,
        "asked": sum(training.ledger.spent.values()),
        "adjacency": promise.adjacency,
    }
    if promise.epsilon is None:
        facts["reasons"] = list(promise.reasons)
    if promise.epsilon_if_noise_were_secret is not None:
        facts["epsilon_if_noise_were_secret"] = promise.epsilon_if_noise_were_secret
    return facts


def _why(training: Training, interrupted: bool) -> str:
    if interrupted:
        return "interrupted"
    return "finished" if training.state.step >= training.plan.steps else "budget"


def load(folder: RunFolder) -> Job:
    """The job that a run folder was started with."""
    request = folder.request()
    if "job" not in request:
        raise ValueError(
            f"{str(folder.path)!r} was started from Python: resume it there, with the same call and resume=True"
        )
    return Job(**request["job"])


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
