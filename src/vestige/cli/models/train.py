"""How is a model trained from the terminal? `vestige train`: flags become a job, and a job becomes a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vestige.cli.dataclass_flags import named_alike, with_flags
from vestige.cli.errors import given, refuse_if_given, require_trust
from vestige.cli.models.flags import (
    BalanceFlag,
    BudgetFlag,
    CapFlag,
    CudaGraphsFlag,
    DeltaFlag,
    DerivedFlag,
    DeviceFlag,
    EngineFlag,
    EpsilonFlag,
    MaxBatchFlag,
    NoiseMultiplierFlag,
    PhysicalBatchFlag,
    ReproducibleFlag,
    ResumeFlag,
    RowsPerUserFlag,
    SampleFlag,
    SamplingFlag,
    SecureModeFlag,
    SeedFlag,
    SlotFlag,
    UserColumnFlag,
    arithmetic,
    engine_of,
    learning_rate,
    most_rows,
    part_size,
)
from vestige.cli.models.messages import add_privacy, continued, leave_if_interrupted, warn_of
from vestige.cli.models.method_flags import with_method_options
from vestige.cli.terminal import Json, Trust, dated_folder, graceful_stop, print_json, stderr, stdout, step_progress

if TYPE_CHECKING:
    from vestige.run_records import RunResult
    from vestige.training.job import Job
    from vestige.training.loop import Record
    from vestige.training.nonprivate_transcript import Transcript
    from vestige.training.run import Training
    from vestige.units import Users


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The flags of `vestige train`."""

    task: Annotated[str, typer.Option(help="What to train: a task of `vestige tasks`, or FILE.py:FUNCTION.")] = (
        "digits-mlp"
    )
    recipe: Annotated[
        str | None,
        typer.Option(help="Settings of `vestige recipes`: all but those that are given, at --epsilon."),
    ] = None
    method: Annotated[str, typer.Option(help="How: a method of `vestige methods`.")] = "dp-sgd"
    data: Annotated[str | None, typer.Option(help="FILE.npz or folder with the task's data.")] = None
    epsilon: EpsilonFlag = None
    delta: DeltaFlag = 1e-5
    noise_multiplier: NoiseMultiplierFlag = None
    paper_sigma: Annotated[
        float | None, typer.Option(help="The sigma of the method's paper (for FO-DP-SGD, beta times ours).")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(help="Expected number of examples in a step, instead of --sample-rate.")
    ] = None
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")] = 0.05
    epochs: Annotated[int | None, typer.Option(help="Expected passes over the data, instead of --steps.")] = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            "--trials",
            help="Number of steps; for a selective method, of trials, kept or not. "
            "[default: as many as --epsilon affords where the noise is given too, otherwise 200]",
        ),
    ] = None
    lr: Annotated[str, typer.Option(help="Learning rate, or auto: chosen without looking at data.")] = "auto"
    optimizer: Annotated[
        str | None, typer.Option(help="Any torch.optim optimizer, by name (default: the method's own).")
    ] = None
    average: Annotated[
        str | None,
        typer.Option(help="Evaluate and keep an average of the parameters: ema, ema:0.9999, polyak or last."),
    ] = None
    augment: Annotated[
        int | None, typer.Option(help="Average the gradients of this many views of each image before clipping.")
    ] = None
    groups: Annotated[
        str | None,
        typer.Option(help="Clip by group: layers, or patterns of parameter names 'conv*;*'; flat: all as one."),
    ] = None
    split: Annotated[str | None, typer.Option(help="How groups split the clip: even, or relative bounds 1,1,2.")] = None
    share: Annotated[str | None, typer.Option(help="How groups share the noise: equal, isotropic or least-noise.")] = (
        None
    )
    balance: BalanceFlag = None
    standardise: Annotated[
        bool, typer.Option("--standardise", help="Scale each image by its own mean and deviation: asks nothing.")
    ] = False
    prior: Annotated[str | None, typer.Option(help="Start from these weights: a file of `vestige prior make`.")] = None
    features: Annotated[
        str | None,
        typer.Option(
            help="Tasks *-features: a frozen public encoder, as a file of `vestige prior make` or the folder of a "
            "Hugging Face vision model."
        ),
    ] = None
    head_steps: Annotated[int, typer.Option(help="So many steps for the last layer alone, before all are trained.")] = 0
    head_lr: Annotated[float | None, typer.Option(help="Learning rate of these steps (default: --lr).")] = None
    columns: Annotated[
        str | None,
        typer.Option(
            help="Of a table: 'age=0..100;work=office|field', bounds and categories that are public, not read off the "
            "rows.",
            rich_help_panel="Tables",
        ),
    ] = None
    label_column: Annotated[str | None, typer.Option(help="The column to predict.", rich_help_panel="Tables")] = None
    labels: Annotated[
        str | None, typer.Option(help="The labels that may occur, 'no,yes': public.", rich_help_panel="Tables")
    ] = None
    test: Annotated[
        str | None,
        typer.Option(help="A table that needs no protection, to judge the model by.", rich_help_panel="Tables"),
    ] = None
    user_column: UserColumnFlag = None
    sample: SampleFlag = "rows"
    rows_per_user: RowsPerUserFlag = None
    cap: CapFlag = None
    physical_batch: PhysicalBatchFlag = None
    sampling: SamplingFlag = "poisson"
    max_batch: MaxBatchFlag = None
    secure_mode: SecureModeFlag = True
    cuda_graphs: CudaGraphsFlag = True
    engine: EngineFlag = "bookkeeping"
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Run the model under autocast; norms, sums and noise stay float32.")
    ] = False
    seed: SeedFlag = 0
    reproducible: ReproducibleFlag = False
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations on the public test set.")] = None
    evaluate: Annotated[
        str,
        typer.Option(
            help="On what: public (the test set), or private (the training examples: one noised count, charged)."
        ),
    ] = "public"
    evaluate_error: Annotated[float, typer.Option(help="Standard error of the private accuracy.")] = 0.01
    audit: Annotated[
        int | None,
        typer.Option(
            help="Plant so many made-up canaries, each by a coin, and say how large epsilon is at least. The more, the "
            "more they show; they take part in sums and change nobody's row."
        ),
    ] = None
    budget: BudgetFlag = None
    derived_from: DerivedFlag = None
    slot: SlotFlag = None
    device: DeviceFlag = None
    out: Annotated[Path | None, typer.Option(help="Folder for the run (default: runs/TASK-METHOD-TIME).")] = None
    resume: ResumeFlag = None
    trust: Trust = False
    normalise: Annotated[
        str, typer.Option(help="Of scattering features: group (asks nothing), or private (noised moments, charged).")
    ] = "group"
    moments_noise: Annotated[float, typer.Option(help="Noise multiplier of each private moment.")] = 8.0
    moments_bound: Annotated[float, typer.Option(help="Largest norm of one example's moments.")] = 2.5
    log_to: Annotated[
        list[str] | None,
        typer.Option(help="Also log releases to tensorboard:FOLDER, mlflow:URI or wandb:PROJECT; repeatable."),
    ] = None
    nonprivate_logs: Annotated[
        bool, typer.Option("--nonprivate-logs", help="VOIDS THE GUARANTEE: log quantities without noise there too.")
    ] = False
    nonprivate_transcript: Annotated[
        Path | None, typer.Option(help="VOIDS THE GUARANTEE: write raw clipped sums and noise to this FILE.npz.")
    ] = None
    as_json: Json = False


@with_method_options
@with_flags(TrainFlags)
def train(context: typer.Context, flags: TrainFlags, **method_options: object) -> None:
    """Train a model privately.

    Examples:

        vestige train --task digits-mlp --epsilon 8 --batch-size 128 --epochs 10

        vestige train --recipe fmnist-ts --epsilon 3 --data fashion_mnist.npz

        vestige train --recipe tabular --epsilon 3 --data people.csv --test public.csv --columns
        'age=0..100;work=office|field' --label-column rich --labels no,yes

        vestige train --task svhn-mlp --data svhn.npz --user-column image_train --rows-per-user 2 --epsilon 8

        vestige train --task cifar10-mlp --data cifar10.npz --noise-multiplier 1.22 --sample-rate 0.04 --steps 6250

        vestige train --resume runs/digits-mlp-dp-sgd-20260101-120000
    """
    from vestige.training import loggers
    from vestige.training.job import complete, start

    job = _job_of(context, flags, method_options)
    if flags.nonprivate_logs and not flags.log_to:
        raise ValueError("--nonprivate-logs goes with --log-to: it voids the guarantee, and there is nowhere to log")
    loggers.check(flags.log_to or [])
    path = flags.resume or flags.out or dated_folder(job.recipe or f"{Path(job.task).stem}-{job.method}")
    loaded, training = start(job, path, resume=flags.resume is not None)
    _announce(job, training)
    with (
        step_progress(not flags.as_json) as bar,
        graceful_stop() as stopping,
        loggers.opened(flags.log_to or [], path.name) as logs,
    ):
        show = bar(job.method, training.plan.steps)

        def on_record(training: Training, record: Record, accuracy: float | None) -> bool:
            note = None if accuracy is None else f"accuracy {accuracy:.1%}"
            show(record.step + 1, note, record.epsilon, training.plan.epsilon)
            for log in logs:
                extra = loggers.nonprivate(training) if job.nonprivate_logs else {}
                log.log(record.step, {**loggers.released(record.to_json(), accuracy), **extra})
            return not stopping()

        result = complete(job, loaded, training, on_record)
    if training.transcript is not None:
        _show_split(training.transcript)
    if flags.as_json:
        print_json(result.to_json())
    else:
        _summarise(result)
    leave_if_interrupted(result, "train", path)


def _job_of(context: typer.Context, flags: TrainFlags, method_options: dict[str, object]) -> Job:
    """The job that the flags ask for, or that of the run to resume."""
    from vestige.tf32 import default_device
    from vestige.training.job import Job, load

    if flags.resume is not None:
        there = {
            "data": flags.data,
            "features": flags.features,
            "device": flags.device,
            "physical_batch": part_size(flags.physical_batch),
        }
        there |= {"budget": flags.budget}
        job = continued(context, flags.resume, ("resume", "trust", "log_to", "as_json"), load, there)
        require_trust(flags.resume, [job.task], flags.trust)
        return job
    refuse_if_given(context, ("trust",), "it goes with --resume FOLDER")
    _refuse_table(context, flags.recipe, flags.task)
    for one, other in (("batch_size", "sample_rate"), ("epochs", "steps")):
        if given(context, one) and given(context, other):
            raise ValueError(f"{one} and {other}: give one of them")
    settings = named_alike(flags, Job) | {
        "options": {key: value for key, value in method_options.items() if value is not None},
        "lr": learning_rate(flags.lr),
        "table": _table(flags.columns, flags.label_column, flags.labels, flags.test),
        "rows_per_user": most_rows(flags.rows_per_user),
        "cap": most_rows(flags.cap, "cap"),
        "noise": arithmetic(flags.secure_mode),
        "engine": engine_of(flags.engine, flags.cuda_graphs),
        "physical_batch": part_size(flags.physical_batch),
        "device": flags.device or default_device(),
        "nonprivate_transcript": str(flags.nonprivate_transcript) if flags.nonprivate_transcript else None,
    }
    return Job(**(settings if flags.recipe is None else _by_recipe(context, flags.recipe, settings)))


def _by_recipe(context: typer.Context, name: str, settings: dict[str, Any]) -> dict[str, object]:
    """A job's settings: the recipe's, but for what was given on the command line."""
    from vestige.methods.registry import SOLVERS
    from vestige.recipes import find

    recipe = find(name)
    if settings["epsilon"] is None:
        raise ValueError(f"epsilon=None: the steps of {name} follow from it, and so does the noise")
    said = {key for key in settings if given(context, key)}
    if recipe.task is not None and "task" in said:
        raise ValueError(f"task={settings['task']!r} cannot be given too: {name} is a recipe for {recipe.task}")
    if recipe.task is None and recipe.needs != "columns" and "task" not in said:
        raise ValueError(f"task=None: {name} is a recipe for a task of yours; give FILE.py:FUNCTION")
    key = {"columns": "table"}.get(recipe.needs or "", recipe.needs)
    if key is not None and settings[key] is None:
        raise ValueError(f"{recipe.needs}=None: {name} needs it; see vestige recipes {name}")
    found = recipe.settings(settings["epsilon"])
    solver = {found["method"], settings["method"]} & SOLVERS.keys()
    if "method" in said and solver and found["method"] != settings["method"]:
        raise ValueError(
            f"method={settings['method']!r} cannot be given too: {solver.pop()} solves in one step, and the other "
            f"settings of {name} are for {found['method']}"
        )
    options = {**found.pop("options"), **settings["options"]} if "method" not in said else settings["options"]
    instead = {"steps"} if "epochs" in said else set()
    chosen = {key: value for key, value in found.items() if key not in said | instead}
    if recipe.needs == "columns":
        chosen["task"] = "table"
    return {**settings, **chosen, "options": options, "recipe": name}


def _refuse_table(context: typer.Context, name: str | None, task: str) -> None:
    """Refuse the options of a table beside a recipe or a task that is none: they would be ignored, or decide."""
    from vestige.recipes import find

    if name is not None and find(name).needs != "columns":
        refuse_if_given(context, TABLE, f"{name} is a recipe for {find(name).kind}, not for a table; leave it out")
    elif name is None and given(context, "task"):
        refuse_if_given(context, TABLE, f"--task={task} is no table; leave one of them out, or take --recipe tabular")


TABLE = ("columns", "label_column", "labels", "test")


def _table(
    columns: str | None, label_column: str | None, labels: str | None, test: str | None
) -> dict[str, object] | None:
    given = {"columns": columns, "label_column": label_column, "labels": labels}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and test is None:
        return None
    if missing or labels is None:
        raise ValueError(f"{missing[0]}=None: a table needs columns, a column of labels and the labels that may occur")
    return {**given, "labels": [word.strip() for word in labels.split(",")], "test": test}


def _announce(job: Job, training: Training) -> None:
    """Print on standard error what was chosen and what is not private."""
    plan = training.plan
    stderr.print(
        f"{job.method} on {job.task}: noise multiplier {plan.noise_multiplier:.4g}, rate {plan.sample_rate:g}, "
        f"{plan.steps} steps, delta {plan.delta:g}",
        markup=False,
    )
    if training.users is not None:
        stderr.print(_of_users(training.users), markup=False)
    if plan.noise_strategy is not None:
        stderr.print(f"noise correlated over steps: {plan.noise_strategy}", markup=False)
    stderr.print(plan.lr_reason, markup=False)
    if job.physical_batch == "auto":
        stderr.print(
            f"physical batch {training.physical_batch}: the most that fits, or that a sample has", markup=False
        )
    warn_of(job)
    if training.guarantee().assumption("bad_rows").status == "checked":
        stderr.print(
            "rows that cannot be read or computed, or whose label the loss cannot take, contribute nothing, and no "
            "message names them; vestige doctor shows them to their owner",
            markup=False,
        )
    if job.audit:
        stderr.print(
            f"audit: {job.audit} made-up rows are planted, each by a coin; nobody's row is copied or left out, and "
            "sums are divided by as many rows more",
            markup=False,
        )
    if job.nonprivate_transcript:
        stderr.print("NOT PRIVATE: --nonprivate-transcript writes raw sums; the guarantee is void", markup=False)
    if job.nonprivate_logs:
        stderr.print("NOT PRIVATE: --nonprivate-logs logs numbers without noise; the guarantee is void", markup=False)


def _show_split(transcript: Transcript) -> None:
    """Print what releases were made of, where they hold a memory."""
    norms = transcript.mean_split()
    if norms:
        said = ", ".join(f"{name.replace('_', ' ')} {norm:.4g}" for name, norm in norms.items())
        stderr.print(f"NOT PRIVATE: norms of a release's parts, mean over steps: {said}", markup=False)


def _of_users(users: Users) -> str:
    if users.sample == "users":
        rows = "all rows" if users.cap is None else f"up to {users.cap} rows"
        return f"{users.users} users, of whom a step draws some: the mean of {rows} of each is clipped once"
    most = "" if users.cap is None else f", at most {users.cap} of them in a step"
    return f"{users.users} users, each with at most {users.rows_per_user} rows{most}; rows beyond are left out by coins"


def _summarise(result: RunResult) -> None:
    stated, selection = result.statement, result.selection
    table = Table(show_header=False, box=None, pad_edge=False)
    if result.accuracy is not None:
        table.add_row("test accuracy", f"{result.accuracy:.1%}")
    elif result.private_accuracy is not None:
        error = result.private_accuracy_error
        table.add_row("private accuracy", f"{result.private_accuracy:.1%} ± {error:.1%} of the training examples")
    else:
        table.add_row("private accuracy", "not asked: the run was interrupted, or its budget was spent")
    add_privacy(table, stated, result.assumptions)
    if result.audit is not None:
        found = result.audit
        table.add_row(
            "audit",
            f"epsilon is at least {found.epsilon_lower_bound:.3g} ({found.confidence:.0%}: {found.right} of "
            f"{found.guesses} guesses about {found.canaries} canaries were right)"
            + ("" if stated.epsilon is None else f", at most {stated.epsilon:.4g}"),
        )
    table.add_row("steps", f"{result.steps} ({result.stopped})")
    if selection is not None:
        table.add_row(
            "trials",
            f"{selection.trials}: {selection.accepted} accepted, {selection.rejected} rejected, {selection.updates} "
            f"updates, {selection.degraded} of them degraded",
        )
        table.add_row("published claim", f"{selection.published_claim_epsilon:.4g}: refuted, see docs/selective.md")
    table.add_row("learning rate", f"{stated.lr:.4g}")
    table.add_row("written to", str(result.run))
    stdout.print(table)
