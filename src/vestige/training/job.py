"""How does a named task become a finished run? A job is a value: it can be stored, resumed and repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from vestige import assumptions, tasks
from vestige import layerwise_scaling as balances
from vestige.budget.spending import Budget, account_of, of_users
from vestige.checks import accounted_multiplier, check_epsilon, check_steps, renamed, secure_mode
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Flat
from vestige.mechanism.feature_moments import PrivateMoments, with_moments
from vestige.mechanism.groups import HeadFirst, HeadLast, named_grouping, named_split
from vestige.mechanism.private_evaluation import PrivateEvaluation
from vestige.methods.base import Method, by_group
from vestige.methods.registry import as_given, make_method, moved_by
from vestige.optim import averaging
from vestige.processes.distributed_setup import processes
from vestige.run_records import RunResult
from vestige.tasks.features import encoders, starting_weights
from vestige.tasks.models import lay_out
from vestige.tf32 import check_device
from vestige.training.assumption_doubts import refuse_training_data
from vestige.training.loop import Record, evaluate
from vestige.training.persistence import CHANGED_DEFAULTS, NEWER_OPTIONS, begun
from vestige.training.planning import paper_groups
from vestige.training.private_statistics import given_bound
from vestige.training.run import Training, train
from vestige.training.run_folder import RunFolder

OnRecord = Callable[[Training, Record, float | None], bool]
"""Called with every step's record, and the accuracy on public test data when it was measured; False stops the run."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One private run of a task, as requested."""

    task: str
    recipe: str | None = None
    """The recipe that the settings come from, where they do."""
    method: str = "dp-sgd"
    options: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    batch_size: int | None = None
    """In the place of the rate."""
    sample_rate: float = 0.05
    epochs: int | None = None
    steps: int | None = None
    delta: float = 1e-5
    epsilon: float | None = None
    noise_multiplier: float | None = None
    paper_sigma: float | None = None
    lr: float | Literal["auto"] = "auto"
    optimizer: str | None = None
    average: str | None = None
    augment: int | None = None
    groups: str | None = None
    split: str | None = None
    share: str | None = None
    balance: str | None = None
    standardise: bool = False
    prior: str | None = None
    features: str | None = None
    head_steps: int = 0
    head_lr: float | None = None
    table: dict[str, Any] | None = None
    """Of a task that is a table: its `columns`, `label_column`, `labels` and public `test`."""
    user_column: str | None = None
    """Whose each row is: a column of the table, or an array of the FILE.npz."""
    sample: str = "rows"
    rows_per_user: int | str | None = None
    cap: int | str | None = None
    sampling: str = "poisson"
    max_batch: int | None = None
    noise: str = "lattice"
    engine: str = "bookkeeping"
    bfloat16: bool = False
    physical_batch: int | Literal["auto"] | None = None
    seed: int = 0
    reproducible: bool = False
    device: str = "cpu"
    evaluate_every: int | None = None
    evaluate: str = "public"
    evaluate_error: float = 0.01
    normalise: str = "group"
    moments_noise: float = 8.0
    moments_bound: float = 2.5
    audit: int | None = None
    budget: str | None = None
    """The book that pays; None: that of VESTIGE_BUDGET, if it is set."""
    derived_from: str | None = None
    slot: str | None = None
    nonprivate_transcript: str | None = None
    nonprivate_logs: bool = False


def method_of(job: Job) -> Method:
    method = _divided(make_method(job.method, **job.options), job)
    if job.balance is not None:
        method = replace(method, balance=balances.named(job.balance))
    if job.average is not None:
        method = replace(method, average=averaging.named(job.average))
    if job.augment is not None:
        with renamed({"copies": "augment"}):
            method = replace(method, augment=Augment(job.augment))
    if job.head_steps:
        method = _head_first(method, job)
    elif job.head_lr is not None:
        raise ValueError(f"head_lr={job.head_lr} is the rate of the head's own steps: give head_steps, or leave it out")
    return method if job.optimizer is None else moved_by(method, job.optimizer, job.options)


def _head_first(method: Method, job: Job) -> Method:
    """The method with its first steps for the head alone."""
    if not isinstance(method.clip, Flat) or method.grouping is not None:
        raise ValueError(
            f"head_steps={job.head_steps} needs one flat clip, which {method.name} has not: take dp-sgd, say"
        )
    if method.rule.optimizer is not torch.optim.SGD or (job.optimizer or "sgd").lower() != "sgd":
        raise ValueError(
            f"head_steps={job.head_steps} goes with SGD: others ({job.optimizer or method.name}) move what is not "
            "asked as far as what is; take dp-sgd, or a method that ends in SGD"
        )
    if job.steps is not None and job.head_steps > job.steps:
        raise ValueError(f"head_steps={job.head_steps} must be at most steps={job.steps}")
    if job.head_lr is not None and not job.head_lr > 0:
        raise ValueError(f"head_lr={job.head_lr} must be positive: it is a learning rate")
    if job.head_lr is not None and job.lr == "auto":
        raise ValueError(f"head_lr={job.head_lr} goes with a number for lr: give both")
    pace = 1.0 if job.head_lr is None or job.lr == "auto" else job.head_lr / job.lr
    with renamed({"steps": "head_steps", "head_pace": "head_lr"}):
        clip = HeadFirst(method.clip.bound, job.head_steps, pace)
    return replace(method, clip=clip, grouping=HeadLast())


def _divided(method: Method, job: Job) -> Method:
    """Apply the job's groups, split and share to a method that may have its own."""
    if job.groups is None and job.split is None and job.share is None:
        return method
    grouping = method.grouping if job.groups is None else named_grouping(job.groups)
    if grouping is None and (job.split is not None or job.share is not None):
        name, value = ("share", job.share) if job.share is not None else ("split", job.split)
        raise ValueError(f"{name}={value!r} needs groups to share between: give groups='layers' or patterns")
    split = None if job.split is None else named_split(job.split)
    return by_group(method, grouping, split, job.share or "equal")  # type: ignore[arg-type]


def account(job: Job) -> Budget:
    """Which book pays for a job; one of our own tasks is known by what it was read from."""
    found = account_of(job.budget)
    if found is None:
        for name in ("derived_from", "slot"):
            if getattr(job, name) is not None:
                raise ValueError(f"{name}={getattr(job, name)!r} is about a book: give budget=BOOK, too")
        return None
    table = job.task if job.table is None else None
    found = replace(found, derived_from=job.derived_from, slot=job.slot, source=tasks.source_of(table, job.data))
    return of_users(found, job.user_column)


def start(
    job: Job, out: Path | None, *, resume: bool = False, task: tasks.Task | None = None, budget: Budget = None
) -> tuple[tasks.Task, Training]:
    """Load the task (unless it is given) and prepare its training; no question is asked yet. `budget` is another
    account than the job's own: `False` where it is paid for already."""
    _check(job)
    method = method_of(job)
    multiplier = job.noise_multiplier
    if job.paper_sigma is not None and multiplier is not None:
        raise ValueError(f"paper_sigma={job.paper_sigma} and noise_multiplier={multiplier}: give one of them")
    ours = task is None and ".py:" not in job.task
    task = task or _loaded(job)
    if job.evaluate == "public":
        refuse_training_data(task.test, task.train, f"task={job.task!r}: its test set")
    beginning: dict[str, object] = {}
    if job.features is not None:
        identity = encoders.identity_of(Path(job.features))
        if resume and out is not None and RunFolder(out).request().get("features", identity) != identity:
            raise ValueError(f"features={job.features!r} is another encoder than the one that this run began with")
        beginning = {"features": identity}
    if job.prior is not None and not resume:  # a resumed run has its weights from its checkpoint
        prior = starting_weights.read(job.prior)
        starting_weights.start_from(task.model, prior)
        beginning |= {"prior": {**prior.statement, "network": prior.network, "sha256": prior.content}}
    if method.augment is not None:
        with renamed({"copies": "augment"}):
            method.augment.check(tuple(task.train[0].shape[1:]))
    moments = _moments(job)
    if moments is not None:
        task = replace(task, model=with_moments(task.model))
    if job.paper_sigma is not None:
        groups = paper_groups(method, method.layout(task.model))
        multiplier = accounted_multiplier(job.paper_sigma, method.memory.fresh_share, groups)
    processes(job.device)
    check_device(job.device)
    lay_out(task.model, job.device, beside=ours and job.bfloat16 and job.device.startswith("cuda"))
    training = train(
        task.model,
        task.loss,
        task.train,
        method=method,
        batch_size=job.batch_size,
        sample_rate=None if job.batch_size is not None else job.sample_rate,
        epochs=job.epochs,
        steps=job.steps,
        delta=job.delta,
        epsilon=job.epsilon,
        noise_multiplier=multiplier,
        lr=job.lr,
        sampling=job.sampling,
        max_batch=job.max_batch,
        users=_users(job, task),
        sample=job.sample,  # type: ignore[arg-type]
        rows_per_user=given_bound(job.rows_per_user),  # type: ignore[arg-type]
        cap=given_bound(job.cap),  # type: ignore[arg-type]
        secure_mode=secure_mode(job.noise),
        cuda_graphs=job.engine != "unrecorded",
        engine="bookkeeping" if job.engine == "unrecorded" else job.engine,
        bfloat16=job.bfloat16,
        max_physical_batch_size=job.physical_batch,
        reproducible=job.seed if job.reproducible else None,
        out=out,
        resume=resume,
        request={
            "job": {**asdict(job), "options": {key: _written(value) for key, value in job.options.items()}},
            **beginning,
        },
        validation_data=_public_examples(job, method),
        normalise=moments,
        evaluate=_evaluation(job),
        audit=job.audit,
        budget=account(job) if budget is None else budget,
        nonprivate_transcript=job.nonprivate_transcript,
        nonprivate_logs=job.nonprivate_logs,
    )
    return task, training


def _users(job: Job, task: tasks.Task) -> object:
    """Whose each training row is."""
    if job.user_column is None:
        for name, usual in (("sample", "rows"), ("rows_per_user", None), ("cap", None)):
            if getattr(job, name) != usual:
                raise ValueError(f"{name}={getattr(job, name)} is about users: give user_column, too")
        return None
    if ".py:" in job.task:
        raise ValueError(
            f"user_column={job.user_column!r} is for a table or a FILE.npz, and {job.task} makes its own rows; in "
            "Python: vestige.train(users=...)"
        )
    return tasks.users_of(job.data, job.user_column, len(task.train[1]))


def _loaded(job: Job) -> tasks.Task:
    if job.table is None:
        return tasks.load(job.task, job.data, job.seed, standardise=job.standardise, features=job.features)
    if job.data is None:
        raise ValueError("data=None: give the table, a file .csv, .jsonl or .parquet")
    if job.table["test"] is None and job.evaluate == "public":
        raise ValueError(
            "test=None: without a public table to judge the model by, give evaluate='private' (one charged question)"
        )
    return tasks.load_table(job.data, seed=job.seed, **job.table)


def complete(job: Job, task: tasks.Task, training: Training, on_record: OnRecord | None = None) -> RunResult:
    """Run a prepared training to its end: evaluate on the public test set now and then, and write the result."""
    every = job.evaluate_every or max(1, training.plan.steps // 20)
    if job.evaluate == "private" and training.settings.public is None:
        how = "the model is judged by one charged question about private rows"
        assumptions.record(training.ledger, "public_evaluation", "not needed", how)
    elif job.evaluate == "public":
        how = "the model was evaluated on the test set of its task, without noise"
        assumptions.record(training.ledger, "public_evaluation", "assumed", how)
    begin = time.perf_counter()
    interrupted = False
    for record in training.steps():
        seen = None
        if job.evaluate == "public" and (record.step + 1) % every == 0:
            with training.averaged():
                seen, loss = evaluate(task.model, task.test, task.loss)
            training.log |= {"accuracy": seen, "test_loss": loss}
        wanted = on_record is None or on_record(training, record, seen)
        if training.group.any(not wanted):  # any of them was interrupted
            interrupted = True
            break
    seconds = time.perf_counter() - begin
    final = None
    if job.evaluate == "public":
        with training.averaged():
            final, _ = evaluate(task.model, task.test, task.loss)
    result = training.result(
        task=job.task,
        accuracy=final,
        seed=job.seed,
        nonprivate_seconds=round(seconds, 3),
        **({"stopped": "interrupted"} if interrupted else {}),
    )
    if interrupted:
        training.ledger.close()
    else:
        training.finish(result)
    return result


def _evaluation(job: Job) -> PrivateEvaluation | None:
    if job.evaluate not in ("public", "private"):
        raise ValueError(
            f"evaluate={job.evaluate!r} must be public (on the test set) or private (one charged question)"
        )
    if job.evaluate == "private" and job.evaluate_every is not None:
        raise ValueError("evaluate='private' asks once, after the last step: leave evaluate_every out")
    with renamed({"error": "evaluate_error"}):
        return PrivateEvaluation(job.evaluate_error) if job.evaluate == "private" else None


def _moments(job: Job) -> PrivateMoments | None:
    if job.normalise not in ("group", "private"):
        raise ValueError(f"normalise={job.normalise!r} must be group (asks nothing) or private (two charged questions)")
    if job.normalise == "group":
        return None
    with renamed({"multiplier": "moments_noise", "bounds": "moments_bound"}):
        return PrivateMoments(job.moments_noise, (job.moments_bound,) * 2)


def _public_examples(job: Job, method: Method) -> tuple[Any, Any] | None:
    """The examples that a schedule may look at without noise: declared public by the user who named their file."""
    file = method.gate.public_file
    if file is None:
        return None
    if job.data is not None and Path(file).resolve() == Path(job.data).resolve():
        raise ValueError(
            f"progress='public:{file}' is the task's own data: its test examples would both steer and judge the run"
        )
    try:
        return tasks.load(job.task, file, job.seed, standardise=job.standardise, features=job.features).test
    except ValueError as error:
        raise ValueError(f"progress='public:{file}' holds no examples of task {job.task}: {error}") from error


def load(folder: RunFolder) -> Job:
    """The job that a run folder was started with."""
    request = folder.request()
    if "finetune" in request:
        raise ValueError(f"{str(folder.path)!r} is a run of vestige finetune: vestige finetune --resume {folder.path}")
    if "synthesize" in request:
        raise ValueError(f"{str(folder.path)!r} is a synthesis: vestige synthesize --resume {folder.path}")
    if "job" not in request:
        raise ValueError(
            f"{str(folder.path)!r} was started from Python: continue it there, by the same call with `resume=True`"
        )
    job, method = request["job"], begun(folder)["method"]
    begun_with = {} if isinstance(method, str) else method["options"]
    options = {key: value for key, value in NEWER_OPTIONS.get(job["method"], {}).items() if key not in begun_with}
    options |= {key: begun_with[key] for key in CHANGED_DEFAULTS.get(job["method"], ()) if key in begun_with}
    options |= {key: inf if value == "inf" else value for key, value in job["options"].items()}
    unknown = job.keys() - {each.name for each in fields(Job)}
    if unknown:
        raise ValueError(
            f"{folder.path / 'run.json'}: the job has {', '.join(sorted(unknown))}, which this version does not know: "
            "resume it with the version that began it, or restore the file"
        )
    return Job(**{**job, "options": as_given(options)})


def _written(option: object) -> object:
    """JSON has no infinity, which is a threshold that accepts everything."""
    return "inf" if option == inf else option


def _check(job: Job) -> None:
    if job.epsilon is not None:
        check_epsilon(job.epsilon)
    """Refuse mistakes that would otherwise show only after the steps."""
    if job.evaluate_every is not None:
        check_steps(job.evaluate_every, "evaluate_every")
    file = job.nonprivate_transcript
    if file is not None and not Path(file).parent.is_dir():
        raise ValueError(f"nonprivate_transcript={file!r} cannot be written: there is no folder {Path(file).parent}")
