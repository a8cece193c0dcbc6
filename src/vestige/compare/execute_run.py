"""How does a planned run become a record? Trained alone, or stacked with others like it; a failure is a record too."""

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
from vestige.assumptions import Stated
from vestige.checks import accounted_multiplier
from vestige.compare import stacked
from vestige.methods.base import Method
from vestige.methods.registry import as_given, make_method
from vestige.optim.gradient_query_points import Here, Probe
from vestige.priced_questions import Question
from vestige.randomness.correlated import Noise
from vestige.randomness.noise_schedules import Schedule
from vestige.run_records import CompletedRun, FailedRun, PrivacyTarget, Run, RunRecord, Terms
from vestige.training import planning
from vestige.training.assumption_doubts import refuse_training_data
from vestige.training.job import Job, complete, start
from vestige.training.loop import Record as Step
from vestige.training.results import known_of_a_run, last_diagnostics, statement
from vestige.training.run import Training
from vestige.training.verify import reprice

VALIDATION_SPLIT = 20260101
"""Seed of the split into training and validation: one split for every method, budget and seed."""
SERIES_POINTS = 40
"""About how many points of each diagnostic are kept over a run."""
LARGEST_DIAGNOSTIC = 64
"""The most numbers that one point of a series may have."""


@dataclass(frozen=True)
class Machine:
    """Where this process trains: its device, its copies of the data, and whether it may stack runs."""

    device: str = "cpu"
    data: Mapping[str, str | None] = field(default_factory=dict)
    stack: bool = True
    memory: int = 2 << 30
    """Bytes that a stack on a CPU may take."""

    @property
    def has_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def available_memory(self) -> int:
        """Bytes that a stack may take here and now."""
        return int(0.6 * torch.cuda.mem_get_info()[0]) if self.has_gpu else self.memory


def perform(runs: Sequence[Run], machine: Machine) -> Iterator[RunRecord]:
    """Yield a record of every run: one alone, several as a stack. An error is recorded and does not stop the others."""
    if len(runs) == 1 or not machine.stack:
        for run in runs:
            yield _alone_or_failed(run, machine)
        return
    left = {run.id: run for run in runs}
    size = 0
    try:
        for record in _stacked(runs, machine):
            del left[record.id]
            yield record
    except Exception as error:  # of the stack, or of one run in it: making them apart shows which
        size = max(1, len(left) // 2) if memory_ran_out(error) else 1
    # Only here, after the error and its traceback were deleted, is the stack's memory free again.
    rest = list(left.values())
    for first in range(0, len(rest), max(1, size)):
        yield from perform(rest[first : first + size], machine)


def stackable(run: Run, machine: Machine) -> tuple[object, ...] | None:
    """What runs of one stack have in common, or None if this run must be made alone."""
    if not machine.stack or run.physical_batch is not None or run.task not in tasks.names():
        return None
    if run.sampling != "poisson":
        return None
    if not _can_stack(_source(run, machine), run.method, json.dumps(dict(run.options)), run.sample_rate):
        return None
    common = (run.task, run.subset, run.holdout, run.sample_rate, run.steps, run.delta)
    return (*common, run.evaluations, run.reproducible)


@lru_cache(maxsize=1024)
def _can_stack(source: Source, method: str, options: str, rate: float) -> bool:
    try:
        loaded = _initial(source, 0)
        built, expected = make_method(method, **as_given(json.loads(options))), rate * len(loaded.train[1])
        return stacked.why_not(loaded.model, loaded.loss, built, expected_batch=expected) is None
    except Exception:
        return False  # made alone, it fails with its own message


def memory_in_stack(run: Run, machine: Machine) -> int:
    """Bytes that this run takes in a stack."""
    options = json.dumps(dict(run.options))
    return _memory_in_stack(_source(run, machine), run.method, options, _length(run), run.budget)


def _length(run: Run) -> planning.Request:
    return planning.Request(sample_rate=run.sample_rate, steps=run.steps, delta=run.delta)


@lru_cache(maxsize=1024)
def _memory_in_stack(source: Source, method: str, options: str, length: planning.Request, budget: PrivacyTarget) -> int:
    loaded = _initial(source, 0)
    noise = None if budget.kind == "epsilon" else budget.value
    given = replace(length, epsilon=budget.amount("epsilon"), noise_multiplier=noise)
    built = planning.settled(make_method(method, **as_given(json.loads(options))), given)
    assert length.steps is not None
    return stacked.footprint(loaded.model, built, length.sample_rate, len(loaded.train[1]), length.steps)


def memory_ran_out(error: BaseException) -> bool:
    """Whether memory ran out; on a CPU torch raises no error of its own for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def explain(error: BaseException) -> str:
    """One line for a record: the library's own message for a mistake, the kind of error for anything else."""
    line = " ".join(str(error).split())[:500]
    if memory_ran_out(error):
        return f"does not fit in memory: give --physical-batch, fewer --workers or a smaller task ({line[:120]})"
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def _alone_or_failed(run: Run, machine: Machine) -> RunRecord:
    try:
        return _alone(run, machine)
    except Exception as error:  # whatever a method, a task or the machine raises: the other runs continue
        return FailedRun(run, explain(error))


# --- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where the examples of a task come from on this machine, and how many are cut from them (None: all are taken)."""

    task: str
    data: str | None
    subset: tuple[int, int] | None = None

    @property
    def named(self) -> bool:
        """Whether it is one of our own tasks, whose data are the same at every seed."""
        return self.task in tasks.names()


def _source(run: Run, machine: Machine) -> Source:
    return Source(run.task, machine.data.get(run.task), run.subset)


@lru_cache(maxsize=64)
def _initial(source: Source, seed: int) -> tasks.Task:
    """The task with the initial weights of a seed; a named task's data are read once, whatever the seed."""
    if source.named and seed != 0:
        return tasks.reinitialised(_initial(source, 0), seed)
    task = tasks.load(source.task, source.data, seed, subset=source.subset)
    refuse_training_data(task.test, task.train, f"task={source.task!r}: its test set")
    return task


def task_of(source: Source) -> tasks.Task:
    """The task, with the initial weights of seed 0; it is read once."""
    return _initial(source, 0)


def examples(task: str, machine: Machine, subset: tuple[int, int] | None = None) -> int | None:
    """The number of training examples of a named task; None for a user's own, which may make them anew each time."""
    source = Source(task, machine.data.get(task), subset)
    return len(task_of(source).train[1]) if source.named else None


def _task(run: Run, machine: Machine) -> tasks.Task:
    """The run's task with weights of its own. With a holdout it is trained on a part of the training data and evaluated
    on the rest, so that tuning never sees the test set."""
    source = _source(run, machine)
    loaded = _initial(source, run.seed)
    if run.holdout:
        train, test = _held_out(source, 0 if source.named else run.seed, run.holdout)
        loaded = replace(loaded, train=train, test=test)
    return replace(loaded, model=copy.deepcopy(loaded.model))


@lru_cache(maxsize=2)
def _held_out(source: Source, seed: int, share: float) -> tuple[tasks.LabelledTensors, tasks.LabelledTensors]:
    inputs, targets = _initial(source, seed).train
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(VALIDATION_SPLIT))
    count = round(share * len(targets))
    if not 0 < count < len(targets):
        raise ValueError(f"validation={share} leaves nothing to train or to evaluate on: {len(targets)} examples")
    held, kept = order[:count], order[count:]
    return (inputs[kept], targets[kept]), (inputs[held], targets[held])


# --- what a run shows on its way -------------------------------------------------------------------------------------


def _evaluation_interval(run: Run) -> int:
    """Steps between evaluations. Without any, beyond the last step: the test set is then used once, at the end."""
    return -(-run.steps // run.evaluations) if run.evaluations else run.steps + 1


def _series_interval(run: Run) -> int:
    return max(1, run.steps // SERIES_POINTS)


@dataclass(frozen=True)
class _Trace:
    """The evaluations of a run and the series of its diagnostics, as they come."""

    run: Run
    curve: list[tuple[float | None, ...]] = field(default_factory=list)
    series: dict[str, list[object]] = field(default_factory=dict)

    def evaluated(self, steps: int, score: float, epsilon: float | None, loss: float) -> None:
        self.curve.append((steps, score, epsilon, loss if isfinite(loss) else None))

    def showed(self, step: int, diagnostics: Mapping[str, object]) -> None:
        for name, value in diagnostics.items():
            shown = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(shown, int | float) or (isinstance(shown, list) and len(shown) <= LARGEST_DIAGNOSTIC):
                self.series.setdefault(name, []).append([step, _rounded(shown)])

    def scored(self, score: float) -> dict[str, Any]:
        """The final score and the curve, under the names they have in this run's record."""
        tuning = self.run.stage == "tuning"
        names = ("nonprivate_validation_accuracy", "nonprivate_validation_curve") if tuning else ("accuracy", "curve")
        return dict(zip(names, (score, tuple(self.curve)), strict=True))


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, int | float) and isfinite(value) else None


def _charged(asked: Mapping[Question, int]) -> tuple[dict[str, object], ...]:
    return tuple({**question.to_json(), "count": count} for question, count in asked.items())


def _reset_peak_memory(machine: Machine) -> None:
    if machine.has_gpu:
        torch.cuda.reset_peak_memory_stats()


def _peak_memory(machine: Machine) -> float:
    """Peak megabytes: of the device during the run, or of this process so far."""
    if machine.has_gpu:
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def asked_by(run: Run, machine: Machine) -> accounting.History:
    """What a run will ask, all of it known beforehand; ValueError where questions follow from earlier answers."""
    if stackable(run, machine) is not None:
        each = _prepared(run, machine)
        return planning.questions(
            each.member.method, each.plan.sample_rate, each.plan.noise_multiplier, each.plan.steps
        )
    _, training = start(_job(run, machine), None, task=_task(run, machine), budget=False)
    if training.method.gate.adaptive:
        raise ValueError(
            f"budget: what {run.method} asks follows from earlier answers, so it cannot be charged before it is made; "
            "leave it out of the comparison"
        )
    return training.planned


# --- alone -----------------------------------------------------------------------------------------------------------


def _job(run: Run, machine: Machine) -> Job:
    return Job(
        task=run.task,
        method=run.method,
        options=as_given(run.options),
        data=machine.data.get(run.task),
        sample_rate=run.sample_rate,
        steps=run.steps,
        delta=run.delta,
        epsilon=run.budget.amount("epsilon"),
        noise_multiplier=run.budget.amount("noise_multiplier"),
        paper_sigma=run.budget.amount("paper_sigma"),
        lr=run.lr if run.lr is not None else "auto",
        physical_batch=run.physical_batch,
        sampling=run.sampling,
        seed=run.seed,
        reproducible=run.reproducible,
        device=machine.device,
        evaluate_every=_evaluation_interval(run),
    )


def _alone(run: Run, machine: Machine) -> CompletedRun:
    job, task = _job(run, machine), _task(run, machine)
    loaded, training = start(job, None, task=task, budget=False)  # the whole comparison is paid for
    if run.lr is None and run.factor != 1.0:
        job = replace(job, lr=run.factor * training.plan.lr)
        loaded, training = start(job, None, task=task, budget=False)
    trace = _Trace(run)

    def on_record(training: Training, step: Step, accuracy: float | None) -> bool:
        if accuracy is not None:
            trace.evaluated(step.step + 1, accuracy, step.epsilon, training.log["test_loss"])
        if step.step % _series_interval(run) == 0:
            trace.showed(step.step, step.diagnostics)
        return True

    _reset_peak_memory(machine)
    result = complete(job, loaded, training, on_record)
    assert result.accuracy is not None
    return CompletedRun(
        run=run,
        **trace.scored(result.accuracy),
        statement=result.statement,
        selection=result.selection,
        steps=result.steps,
        seconds=result.nonprivate_seconds,
        stopped=result.stopped,
        diagnostics=result.diagnostics,
        assumptions=training.guarantee().listed,
        charged=_charged(training.ledger.spent),
        terms=Terms.from_json(training.terms),
        pictures=trace.series,
        stacked=1,
        memory_mb=round(_peak_memory(machine), 1),
    )


# --- stacked ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """A run with everything that its stack needs."""

    run: Run
    task: tasks.Task
    plan: planning.Plan
    member: stacked.StackedRun
    terms: Terms
    groups: int


def _stacked(runs: Sequence[Run], machine: Machine) -> Iterator[RunRecord]:
    ready: list[_Prepared] = []
    for run in runs:
        try:
            ready.append(_prepared(run, machine))
        except Exception as error:
            if memory_ran_out(error):
                raise
            yield FailedRun(run, explain(error))
    if not ready:
        return
    device = torch.device(machine.device)
    first, task = ready[0].run, ready[0].task
    _reset_peak_memory(machine)
    begin = time.perf_counter()
    members = [each.member for each in ready]
    stack = stacked.Stack(members, task.train, sample_rate=first.sample_rate, steps=first.steps, device=device)
    traces = [_Trace(each.run) for each in ready]
    for done in stack.train():
        if done % _evaluation_interval(first) == 0:
            seen = stack.evaluate(task.test)
            for each, trace, (score, loss), progress in zip(ready, traces, seen, stack.progress(), strict=True):
                trace.evaluated(done, score, _spent_so_far(each, progress.asked), loss)
        if (done - 1) % _series_interval(first) == 0:
            for trace, progress in zip(traces, stack.progress(), strict=True):
                trace.showed(done - 1, progress.diagnostics)
    final = stack.evaluate(task.test)
    seconds = (time.perf_counter() - begin) / len(ready)
    memory = _peak_memory(machine) / (len(ready) if device.type == "cuda" else 1)
    for each, trace, (score, _), progress in zip(ready, traces, final, stack.progress(), strict=True):
        promise = _guarantee(tuple(progress.asked.items()), each.run.delta, each.terms)
        asked, batch = sum(progress.asked.values()), stack.expected_batch
        yield CompletedRun(
            run=each.run,
            **trace.scored(score),
            statement=statement(promise, each.plan, expected_batch=batch, groups=each.groups, asked=asked),
            steps=stack.step,
            seconds=round(seconds, 4),
            stopped="finished",
            diagnostics=last_diagnostics(Step(stack.step - 1, progress.diagnostics)),
            assumptions=promise.listed,
            charged=_charged(progress.asked),
            terms=each.terms,
            pictures=trace.series,
            stacked=len(ready),
            memory_mb=round(memory, 1),
        )


def _prepared(run: Run, machine: Machine) -> _Prepared:
    task = _task(run, machine)
    method = make_method(run.method, **as_given(run.options))
    layout = method.layout(task.model)
    length = replace(_length(run), epsilon=run.budget.amount("epsilon"))
    if run.budget.kind == "paper_sigma":
        groups = planning.paper_groups(method, layout)
        multiplier = accounted_multiplier(run.budget.value, method.memory.fresh_share, groups)
        method = planning.settled(method, replace(length, noise_multiplier=multiplier))
    elif run.budget.kind == "noise_multiplier":
        multiplier = run.budget.value
        method = planning.settled(method, replace(length, noise_multiplier=multiplier))
    else:
        method = planning.settled(method, length)
        multiplier = _calibrated(_asking(method), run.budget.value, run.sample_rate, run.steps, run.delta)
    request = replace(length, noise_multiplier=multiplier, lr=run.lr if run.lr is not None else "auto")
    plan = planning.plan(task.model, layout, method, len(task.train[1]), request)
    if run.lr is None and run.factor != 1.0:
        plan = replace(plan, lr=run.factor * plan.lr, lr_reason=f"{run.factor:g} times {plan.lr_reason}")
    sampling = method.noise.sampling(run.sample_rate).kind  # refuses a rate that it cannot sample at
    terms = Terms(
        sampling=sampling,
        noise="seeded" if run.reproducible else "secret",
        arithmetic=method.noise.start(run.sample_rate, run.steps).arithmetic,
        coordinates=layout.size,
    )
    seed = run.seed if run.reproducible else None
    member = stacked.StackedRun(task.model, method, multiplier, plan.lr, seed)
    stacked.check_noise(member, run.sample_rate * len(task.train[1]))
    return _Prepared(run, task, plan, member, terms, layout.groups)


def _asking(method: Method) -> tuple[Probe, Schedule, Noise]:
    """The parts of a method that decide its price; a probe that asks what `Here` asks becomes `Here`."""
    alike = all(method.probe.questions(0.5, z) == Here().questions(0.5, z) for z in (1.0, 2.0))
    return Here() if alike and method.probe.period(0.5) == 1 else method.probe, method.schedule, method.noise


@lru_cache(maxsize=256)
def _calibrated(asking: tuple[Probe, Schedule, Noise], epsilon: float, rate: float, steps: int, delta: float) -> float:
    """The noise multiplier for a budget; methods with the same questions share one search."""
    probe, schedule, noise = asking
    method = Method(name="any that asks alike", probe=probe, schedule=schedule, noise=noise)
    return accounting.calibrate(partial(planning.questions, method, rate, steps=steps), epsilon, delta)


@lru_cache(maxsize=4096)
def _guarantee(asked: tuple[tuple[Question, int], ...], delta: float, terms: Terms) -> accounting.Guarantee:
    known = known_of_a_run(accounting.Facts(sampling=terms.sampling, noise=terms.noise))
    known.append(Stated("fixed_steps", "checked", "all planned steps were taken"))
    return reprice(dict(asked), delta, terms.to_json(), {each.name: replace(each, recorded=True) for each in known})


@lru_cache(maxsize=65536)
def _odometer(asked: tuple[tuple[Question, int], ...], delta: float) -> float:
    return accounting.epsilon(dict(asked), delta, "rdp")


def _spent_so_far(prepared: _Prepared, asked: Counter[Question]) -> float | None:
    if prepared.run.reproducible:
        return None
    spent = _odometer(tuple(asked.items()), prepared.run.delta)
    return spent if prepared.plan.epsilon is None else min(spent, prepared.plan.epsilon)
