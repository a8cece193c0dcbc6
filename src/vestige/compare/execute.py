"""How does a planned run become a record? Alone, or stacked with others of its kind; a failure is a record too."""

from __future__ import annotations

import copy
import json
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import isfinite
from typing import Any

import torch

from vestige import accounting, tasks
from vestige.checks import accounted_multiplier
from vestige.compare import stacked
from vestige.compare.comparison import VALIDATION, VALIDATION_CURVE, VERSION, Record, Run
from vestige.layout import Layout
from vestige.methods.base import Method
from vestige.methods.registry import build
from vestige.optim.probes import Here, Probe
from vestige.questions import Question
from vestige.randomness.correlated import Noise
from vestige.randomness.schedules import Schedule
from vestige.training import planning
from vestige.training.job import Job, complete, start
from vestige.training.loop import Record as Step
from vestige.training.run import Training

SPLIT = 20260101
"""Seed of the split into training and validation: one split for every method, budget and seed."""
PICTURES = 40
"""Points at which the memory's own quantities are kept."""
LARGEST_PICTURE = 64


@dataclass(frozen=True)
class Place:
    """Where this process works: its device, its copies of the data, and whether it may stack runs."""

    device: str = "cpu"
    data: Mapping[str, str | None] = field(default_factory=dict)
    stack: bool = True
    memory: int = 2 << 30
    """Bytes that a stack may take."""


def perform(runs: Sequence[Run], place: Place) -> Iterator[Record]:
    """A record of every run: one alone, several as a stack. What goes wrong is recorded and stops nothing else."""
    if len(runs) == 1 or not place.stack:
        for run in runs:
            yield _guarded(run, place)
        return
    left = {run.id: run for run in runs}
    size = 0
    try:
        for record in _together(runs, place):
            del left[record["id"]]
            yield record
    except Exception as error:  # of the stack, or of one run in it: whose, the runs say by themselves
        size = max(1, len(left) // 2) if memory_ran_out(error) else 1
    # Only here, where the error is gone, is what the stack held given back.
    rest = list(left.values())
    for first in range(0, len(rest), max(1, size)):
        yield from perform(rest[first : first + size], place)


def stackable(run: Run, place: Place) -> tuple[Any, ...] | None:
    """What runs of one stack have in common, or None if this run must be made alone."""
    if not place.stack or run.physical_batch is not None or run.task not in tasks.names():
        return None
    if not _covered(run.task, place.data.get(run.task), run.method, json.dumps(dict(run.options))):
        return None
    return (run.task, run.holdout, run.sample_rate, run.steps, run.delta, run.evaluations, run.reproducible)


@lru_cache(maxsize=1024)
def _covered(task: str, data: str | None, method: str, options: str) -> bool:
    try:
        loaded = _initial(task, data, 0)
        return stacked.why_not(loaded.model, loaded.loss, build(method, **json.loads(options))) is None
    except Exception:
        return False  # it will fail alone, with its own line


def room(place: Place) -> int:
    """Bytes that a stack may take here and now."""
    return int(0.6 * torch.cuda.mem_get_info()[0]) if place.device.startswith("cuda") else place.memory


def footprint(run: Run, place: Place) -> int:
    """Bytes that this run takes in a stack."""
    options = json.dumps(dict(run.options))
    return _footprint(run.task, place.data.get(run.task), run.method, options, run.sample_rate, run.steps)


@lru_cache(maxsize=1024)
def _footprint(task: str, data: str | None, method: str, options: str, rate: float, steps: int) -> int:
    loaded = _initial(task, data, 0)
    return stacked.footprint(loaded.model, build(method, **json.loads(options)), rate, len(loaded.train[1]), steps)


def failure(run: Run, error: str) -> Record:
    return {"version": VERSION, "id": run.id, "run": run.to_json(), "status": "failed", "error": error}


def memory_ran_out(error: BaseException) -> bool:
    """On a CPU torch raises no error of its own for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: BaseException) -> str:
    """One line for a record: the library's own words for a mistake, the kind of error for anything else."""
    line = " ".join(str(error).split())[:500]
    if memory_ran_out(error):
        return f"does not fit in memory: give --physical-batch, fewer --workers or a smaller task ({line[:120]})"
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def _guarded(run: Run, place: Place) -> Record:
    try:
        return _alone(run, place)
    except Exception as error:  # whatever a method, a task or the machine does: the rest go on
        return failure(run, explain(error))


# --- tasks -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _initial(task: str, data: str | None, seed: int) -> tasks.Task:
    """The task with the initial weights of a seed; a named task's data are kept once, whatever the seed."""
    loaded = tasks.load(task, data, seed)
    if task in tasks.names() and seed != 0:
        first = _initial(task, data, 0)
        return replace(loaded, train=first.train, test=first.test)
    return loaded


def examples(task: str, place: Place) -> int | None:
    """How many a named task trains on here; a user's own task may make them anew each time."""
    return len(_initial(task, place.data.get(task), 0).train[1]) if task in tasks.names() else None


def _task(run: Run, place: Place) -> tasks.Task:
    """The run's task with weights of its own. With a holdout it is trained on a part of the training data and judged on
    the rest, so that tuning never sees the test set."""
    data = place.data.get(run.task)
    loaded = _initial(run.task, data, run.seed)
    if run.holdout:
        named = run.task in tasks.names()
        train, test = _held_out(run.task, data, 0 if named else run.seed, run.holdout)
        loaded = replace(loaded, train=train, test=test)
    return replace(loaded, model=copy.deepcopy(loaded.model))


@lru_cache(maxsize=2)
def _held_out(
    task: str, data: str | None, seed: int, share: float
) -> tuple[tasks.LabelledTensors, tasks.LabelledTensors]:
    inputs, targets = _initial(task, data, seed).train
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(SPLIT))
    count = round(share * len(targets))
    if not 0 < count < len(targets):
        raise ValueError(f"validation={share} leaves nothing to train or to judge on: {len(targets)} examples")
    held, kept = order[:count], order[count:]
    return (inputs[kept], targets[kept]), (inputs[held], targets[held])


# --- alone -----------------------------------------------------------------------------------------------------------


def _job(run: Run, place: Place) -> Job:
    return Job(
        task=run.task,
        method=run.method,
        options=dict(run.options),
        data=place.data.get(run.task),
        sample_rate=run.sample_rate,
        steps=run.steps,
        delta=run.delta,
        lr=run.lr if run.lr is not None else "auto",
        physical_batch=run.physical_batch,
        seed=run.seed,
        reproducible=run.reproducible,
        device=place.device,
        evaluate_every=_between_looks(run),
        **{run.budget.kind: run.budget.value},  # type: ignore[arg-type]
    )


def _between_looks(run: Run) -> int:
    """Steps from one look at the test set to the next. Without looks, beyond the last step: it is touched once then."""
    return -(-run.steps // run.evaluations) if run.evaluations else run.steps + 1


def _alone(run: Run, place: Place) -> Record:
    job, task = _job(run, place), _task(run, place)
    loaded, training = start(job, None, task=task)
    if run.lr is None and run.factor != 1.0:
        job = replace(job, lr=run.factor * training.plan.lr)
        loaded, training = start(job, None, task=task)
    curve: list[list[float | None]] = []
    pictures: dict[str, list[Any]] = {}
    every = max(1, run.steps // PICTURES)

    def watch(training: Training, record: Step, accuracy: float | None) -> bool:
        if accuracy is not None:
            curve.append([record.step + 1, accuracy, record.epsilon])
        if record.step % every == 0:
            _picture(pictures, record.step, record.diagnostics)
        return True

    _forget_peak(place)
    result = complete(job, loaded, training, watch)
    promise = training.guarantee()
    made = {key: value for key, value in result.items() if key not in ("task", "method", "seed", "run")}
    made |= {"assumptions": list(promise.assumptions), "charged": _charged(training.ledger.spent)}
    return _record(run, {**made, **training.terms}, curve, pictures, 1, _peak(place))


def _picture(pictures: dict[str, list[Any]], step: int, diagnostics: Mapping[str, Any]) -> None:
    for name, value in diagnostics.items():
        shown = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(shown, int | float) or (isinstance(shown, list) and len(shown) <= LARGEST_PICTURE):
            pictures.setdefault(name, []).append([step, _rounded(shown)])


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, int | float) and isfinite(value) else None


def _charged(spent: Mapping[Question, int]) -> list[dict[str, Any]]:
    return [{**question.to_json(), "count": count} for question, count in spent.items()]


def _record(
    run: Run, result: Mapping[str, Any], curve: list[Any], pictures: dict[str, list[Any]], together: int, memory: float
) -> Record:
    made = {"version": VERSION, "id": run.id, "run": run.to_json(), "status": "done", **result}
    made |= {"curve": curve, "pictures": pictures, "stacked": together, "memory_mb": round(memory, 1)}
    if run.stage == "tuning":
        made |= {VALIDATION: made.pop("accuracy"), VALIDATION_CURVE: made.pop("curve")}
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in made.items()}


def _forget_peak(place: Place) -> None:
    if place.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _peak(place: Place) -> float:
    """Peak megabytes: of the device during the run, or of this process so far."""
    if place.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- together --------------------------------------------------------------------------------------------------------


def _together(runs: Sequence[Run], place: Place) -> Iterator[Record]:
    ready: list[tuple[Run, tasks.Task, planning.Plan, stacked.StackedRun]] = []
    for run in runs:
        try:
            ready.append(_prepared(run, place))
        except Exception as error:
            if memory_ran_out(error):
                raise
            yield failure(run, explain(error))
    if not ready:
        return
    device = torch.device(place.device)
    task, first = ready[0][1], ready[0][0]
    _forget_peak(place)
    begin = time.perf_counter()
    chosen = [each[3] for each in ready]
    stack = stacked.Stack(chosen, task.train, sample_rate=first.sample_rate, steps=first.steps, device=device)
    curves: list[list[Any]] = [[] for _ in ready]
    pictures: list[dict[str, list[Any]]] = [{} for _ in ready]
    judge = _between_looks(first)
    every = max(1, first.steps // PICTURES)
    for done in stack.train():
        if done % judge == 0:
            shown = zip(ready, curves, stack.accuracies(task.test), stack.progress(), strict=True)
            for (run, _, plan, _), curve, share, progress in shown:
                curve.append([done, share, _so_far(run, plan, progress.asked)])
        if (done - 1) % every == 0:
            for picture, progress in zip(pictures, stack.progress(), strict=True):
                _picture(picture, done - 1, progress.diagnostics)
    final = stack.accuracies(task.test)
    seconds = (time.perf_counter() - begin) / len(ready)
    memory = _peak(place) / (len(ready) if device.type == "cuda" else 1)
    for index, ((run, _, plan, made), progress) in enumerate(zip(ready, stack.progress(), strict=True)):
        result = {
            "accuracy": final[index],
            **_statement(run, plan, made.method, progress.asked, stack.expected_batch, _groups(made)),
            "steps": stack.step,
            "seconds": round(seconds, 4),
            "stopped": "finished",
        }
        last = Step(stack.step - 1, progress.diagnostics).to_json()
        result |= {key: value for key, value in last.items() if key in progress.diagnostics}
        yield _record(run, result, curves[index], pictures[index], len(ready), memory)


def _prepared(run: Run, place: Place) -> tuple[Run, tasks.Task, planning.Plan, stacked.StackedRun]:
    task = _task(run, place)
    method = build(run.method, **run.options)
    layout = Layout.of(task.model, method.grouping)
    if run.budget.kind == "paper_sigma":
        groups = planning.paper_groups(method, layout)
        multiplier = accounted_multiplier(run.budget.value, method.memory.fresh_share, groups)
    elif run.budget.kind == "noise_multiplier":
        multiplier = run.budget.value
    else:
        multiplier = _calibrated(_asking(method), run.budget.value, run.sample_rate, run.steps, run.delta)
    request = planning.Request(
        sample_rate=run.sample_rate,
        steps=run.steps,
        delta=run.delta,
        epsilon=run.budget.value if run.budget.kind == "epsilon" else None,
        noise_multiplier=multiplier,
        lr=run.lr if run.lr is not None else "auto",
    )
    plan = planning.plan(task.model, layout, method, len(task.train[1]), request)
    if run.lr is None and run.factor != 1.0:
        plan = replace(plan, lr=run.factor * plan.lr, lr_reason=f"{run.factor:g} times {plan.lr_reason}")
    method.noise.sampling(run.sample_rate)  # refuses a rate that it cannot serve
    seed = run.seed if run.reproducible else None
    made = stacked.StackedRun(task.model, method, multiplier, plan.lr, seed)
    stacked.check_noise(made, run.sample_rate * len(task.train[1]))
    return run, task, plan, made


def _asking(method: Method) -> tuple[Probe, Schedule, Noise]:
    """The parts of a method that decide its price; probes that ask what `Here` asks are one."""
    alike = all(method.probe.questions(0.5, z) == Here().questions(0.5, z) for z in (1.0, 2.0))
    return Here() if alike and method.probe.period(0.5) == 1 else method.probe, method.schedule, method.noise


@lru_cache(maxsize=256)
def _calibrated(asking: tuple[Probe, Schedule, Noise], epsilon: float, rate: float, steps: int, delta: float) -> float:
    """The noise for a budget: methods that ask alike share one search."""
    probe, schedule, noise = asking
    method = Method(name="any that asks alike", probe=probe, schedule=schedule, noise=noise)
    return accounting.calibrate(partial(planning.questions, method, rate, steps=steps), epsilon, delta)


@lru_cache(maxsize=4096)
def _guarantee(
    asked: tuple[tuple[Question, int], ...], delta: float, noise: str, sampling: str
) -> accounting.Guarantee:
    return accounting.guarantee(dict(asked), delta, accounting.Facts(noise=noise, sampling=sampling))


@lru_cache(maxsize=65536)
def _odometer(asked: tuple[tuple[Question, int], ...], delta: float) -> float:
    return accounting.epsilon(dict(asked), delta, "rdp")


def _so_far(run: Run, plan: planning.Plan, asked: Counter[Question]) -> float | None:
    if run.reproducible:
        return None
    spent = _odometer(tuple(asked.items()), run.delta)
    return spent if plan.epsilon is None else min(spent, plan.epsilon)


def _groups(run: stacked.StackedRun) -> int:
    return Layout.of(run.model, run.method.grouping).groups


def _statement(
    run: Run, plan: planning.Plan, method: Method, asked: Counter[Question], expected_batch: float, groups: int
) -> dict[str, Any]:
    """The same words about a stacked run as `jobs.statement` finds for one alone."""
    noise = "seeded" if run.reproducible else "secret"
    terms = {"noise": noise, "sampling": method.noise.sampling(run.sample_rate).kind}
    promise = _guarantee(tuple(asked.items()), run.delta, **terms)
    return {
        "epsilon": promise.epsilon,
        "delta": promise.delta,
        "accountant": promise.accountant,
        "epsilon_rdp": promise.epsilon_rdp if promise.epsilon is not None else None,
        "budget": plan.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "expected_batch": expected_batch,
        "groups": groups,
        "lr": plan.lr,
        "lr_reason": plan.lr_reason,
        "asked": sum(asked.values()),
        "adjacency": promise.adjacency,
        "reasons": list(promise.reasons),
        "epsilon_if_noise_were_secret": promise.epsilon_if_noise_were_secret,
        "assumptions": list(promise.assumptions),
        "charged": _charged(asked),
        **terms,
        "schedule": "fixed",
        "nonprivate_outputs": False,
    }
