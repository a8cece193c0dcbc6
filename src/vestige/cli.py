"""What can be done from a terminal? train, account, verify, doctor: thin layers over the library."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vestige import cli_compare
from vestige.cli_compare import refuse_others

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train PyTorch models with differential privacy, with optimizers that remember past private releases.",
)
notes = Console(stderr=True, highlight=False, soft_wrap=True)
answers = Console(highlight=False, soft_wrap=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]


def main() -> None:
    """The `vestige` command: a user's mistake ends with one line on standard error and exit code 2."""
    try:
        app()
    except ValueError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    line = re.sub(r"^([a-z_]+)=", lambda match: "--" + match[1].replace("_", "-") + "=", " ".join(message.split()))
    print(f"vestige: {line}", file=sys.stderr)
    sys.exit(code)


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, allow_nan=False))


# --- train -----------------------------------------------------------------------------------------------------------


def train(
    context: typer.Context,
    task: Annotated[
        str, typer.Option(help="What to train: a task of `vestige tasks`, or FILE.py:FUNCTION.")
    ] = "digits-mlp",
    method: Annotated[str, typer.Option(help="How: a method of `vestige methods`.")] = "fo-dp-sgd",
    data: Annotated[str | None, typer.Option(help="FILE.npz or folder with the task's data.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget: the noise follows from it.")] = None,
    delta: Annotated[float, typer.Option(help="Allowed failure probability, below 1/N.")] = 1e-5,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Accounted noise multiplier: epsilon follows from it.")
    ] = None,
    paper_sigma: Annotated[
        float | None, typer.Option(help="The sigma of the method's paper (for FO-DP-SGD, beta times ours).")
    ] = None,
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")] = 0.05,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            "--trials",
            help="Number of steps; for a selective method, of trials, kept or not. "
            "[default: as many as --epsilon affords where the noise is given too, otherwise 200]",
        ),
    ] = None,
    lr: Annotated[str, typer.Option(help="Learning rate, or auto: chosen without looking at data.")] = "auto",
    optimizer: Annotated[
        str | None, typer.Option(help="Any torch.optim optimizer, by name (default: the method's own).")
    ] = None,
    average: Annotated[
        str | None, typer.Option(help="Evaluate and keep an average of the parameters: ema, polyak or last.")
    ] = None,
    augment: Annotated[
        int | None, typer.Option(help="Average the gradients of this many views of each image before clipping.")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Clip by group: layers, or patterns of parameter names 'conv*;*'; flat: all as one."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="How groups split the clip: even, or relative bounds 1,1,2.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(help="How groups share the noise: equal, isotropic or least-noise.")
    ] = None,
    physical_batch: Annotated[
        str | None, typer.Option(help="Split each sampled batch into parts of this size; auto: the largest that fits.")
    ] = None,
    sampling: Annotated[str, typer.Option(help="poisson; shuffled trains too but has no epsilon.")] = "poisson",
    engine: Annotated[
        str,
        typer.Option(
            help="bookkeeping (fast), unrecorded (without CUDA graphs) or reference (one by one); same results."
        ),
    ] = "bookkeeping",
    seed: Annotated[
        int, typer.Option(help="Fixes public randomness only: initial weights. Never noise or sampling.")
    ] = 0,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fix noise and sampling too. Protects nobody: for tests.")
    ] = False,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations on the public test set.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run (default: runs/TASK-METHOD-TIME).")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the interrupted run in this folder; takes no other option.")
    ] = None,
    normalise: Annotated[
        str, typer.Option(help="Of scattering features: group (asks nothing), or private (noised moments, charged).")
    ] = "group",
    moments_noise: Annotated[float, typer.Option(help="Noise multiplier of each private moment.")] = 8.0,
    moments_bound: Annotated[float, typer.Option(help="Largest norm of one example's moments.")] = 2.5,
    log_to: Annotated[
        list[str] | None,
        typer.Option(help="Also log releases to tensorboard:FOLDER, mlflow:URI or wandb:PROJECT; repeatable."),
    ] = None,
    nonprivate_logs: Annotated[
        bool, typer.Option("--nonprivate-logs", help="VOIDS THE GUARANTEE: log quantities without noise there too.")
    ] = False,
    nonprivate_transcript: Annotated[
        Path | None, typer.Option(help="VOIDS THE GUARANTEE: write raw clipped sums and noise to this FILE.npz.")
    ] = None,
    as_json: Json = False,
    **method_options: Any,
) -> None:
    """Train a model privately.

    Examples:

        vestige train --task digits-mlp --method fo-dp-sgd --epsilon 8 --steps 200

        vestige train --task cifar10-mlp --data cifar10.npz --noise-multiplier 1.22 --sample-rate 0.04 --steps 6250

        vestige train --resume runs/digits-mlp-fo-dp-sgd-20260101-120000
    """
    from vestige import sinks
    from vestige.jobs import Job, complete, default_device, load, start
    from vestige.run_folder import RunFolder

    if resume is not None:
        refuse_others(context, ("resume", "as_json"), "a run continues with the options it was started with")
        folder = RunFolder(resume)
        job = load(folder)
        if folder.result() is not None:
            raise ValueError(f"resume={str(resume)!r} is already finished; verify it with: vestige verify {resume}")
    else:
        job = Job(
            task=task,
            method=method,
            options={key: value for key, value in method_options.items() if value is not None},
            data=data,
            sample_rate=sample_rate,
            steps=steps,
            delta=delta,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            paper_sigma=paper_sigma,
            lr=_lr(lr),
            optimizer=optimizer,
            average=average,
            augment=augment,
            groups=groups,
            split=split,
            share=share,
            sampling=sampling,
            engine=engine,
            physical_batch=_physical_batch(physical_batch),
            seed=seed,
            reproducible=reproducible,
            device=device or default_device(),
            evaluate_every=evaluate_every,
            normalise=normalise,
            moments_noise=moments_noise,
            moments_bound=moments_bound,
            nonprivate_transcript=str(nonprivate_transcript) if nonprivate_transcript else None,
            nonprivate_logs=nonprivate_logs,
        )
    sinks.check(log_to or [])
    path = resume or out or Path("runs") / f"{Path(task).stem}-{method}-{time.strftime('%Y%m%d-%H%M%S')}"
    loaded, training = start(job, path, resume=resume is not None)
    _announce(job, training)
    with _progress(not as_json) as bar, _graceful() as asked_to_stop, sinks.opened(log_to or [], path.name) as logs:
        show = bar(job.method, training.plan.steps)

        def watch(training: Any, record: Any, accuracy: float | None) -> bool:
            show(record.step + 1, accuracy, record.epsilon, training.plan.epsilon)
            for log in logs:
                extra = sinks.nonprivate(training) if job.nonprivate_logs else {}
                log.log(record.step, {**sinks.released(record.to_json(), accuracy), **extra})
            return not asked_to_stop()

        result = complete(job, loaded, training, watch)
    if as_json:
        _print_json(result)
    else:
        _summarise(result)
    if result["stopped"] == "interrupted":
        notes.print(
            f"interrupted after step {result['steps']}; continue with: vestige train --resume {path}", markup=False
        )
        sys.exit(130)


def _lr(text: str) -> Any:
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"lr={text!r} must be a number or 'auto'") from None


def _physical_batch(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"physical_batch={text!r} must be a whole number from 1 up, or 'auto'") from None


def _announce(job: Any, training: Any) -> None:
    """Say, on standard error, what was chosen and what is not private."""
    plan = training.plan
    notes.print(
        f"{job.method} on {job.task}: noise multiplier {plan.noise_multiplier:.4g}, rate {plan.sample_rate:g}, "
        f"{plan.steps} steps, delta {plan.delta:g}",
        markup=False,
    )
    notes.print(plan.lr_reason, markup=False)
    if job.physical_batch == "auto":
        notes.print(f"physical batch {training.physical_batch}: the most that fits, or that a sample has", markup=False)
    if job.reproducible:
        notes.print(
            "NOT PRIVATE: --reproducible makes the noise predictable, and predictable noise protects nobody",
            markup=False,
        )
    if job.nonprivate_transcript:
        notes.print("NOT PRIVATE: --nonprivate-transcript writes raw sums; the guarantee is void", markup=False)
    if job.nonprivate_logs:
        notes.print("NOT PRIVATE: --nonprivate-logs logs numbers without noise; the guarantee is void", markup=False)
    if job.sampling != "poisson":
        notes.print(f"NO EPSILON: no theorem covers {job.sampling} sampling", markup=False)


def _summarise(result: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("test accuracy", f"{result['accuracy']:.1%}")
    if result["epsilon"] is not None:
        table.add_row(
            "privacy",
            f"epsilon {result['epsilon']:.4g} at delta {result['delta']:g} ({result['accountant']}; "
            f"by Renyi {result['epsilon_rdp']:.4g})",
        )
    else:
        table.add_row("privacy", "none: " + "; ".join(result["reasons"]))
    if "epsilon_if_noise_were_secret" in result:
        table.add_row("", f"epsilon would be {result['epsilon_if_noise_were_secret']:.4g} if the noise were secret")
    table.add_row("steps", f"{result['steps']} ({result['stopped']})")
    if "trials" in result:
        table.add_row(
            "trials",
            f"{result['trials']}: {result['accepted']} accepted, {result['rejected']} rejected, {result['updates']} "
            f"updates, {result['degraded']} of them degraded",
        )
        table.add_row("published claim", f"{result['published_claim_epsilon']:.4g}: refuted, see docs/selective.md")
    table.add_row("learning rate", f"{result['lr']:.4g}")
    table.add_row("written to", str(result["run"]))
    answers.print(table)


# The options of every registered method become options of `train`, so that a new method needs no word here.
def _with_method_options(function: Callable[..., None]) -> Callable[..., None]:
    from vestige.method import METHODS

    found: dict[str, dict[str, inspect.Parameter]] = {}
    for entry in METHODS.values():
        for name, parameter in entry.options.items():
            found.setdefault(name, {})[entry.name] = parameter
    signature = inspect.signature(function, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, users in found.items():
        annotation, _ = _option_of(next(iter(users.values())))
        flag = f"--{name.replace('_', '-')}"
        off = f"/--no-{flag[2:]}" if bool in get_args(annotation) else ""
        option = typer.Option(flag + off, help=_help_of(users, len(METHODS)), rich_help_panel="Method")
        kept.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, option]
            )
        )

    def command(**arguments: Any) -> None:
        function(**arguments)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__signature__ = signature.replace(parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in kept}
    return command


def _help_of(users: dict[str, inspect.Parameter], methods: int) -> str:
    """What an option means and where it starts, told apart for the methods in which these differ."""
    meanings: dict[str, list[str]] = {}
    defaults: dict[str, list[str]] = {}
    for method, parameter in users.items():
        meanings.setdefault(_option_of(parameter)[1], []).append(method)
        default = parameter.default
        defaults.setdefault("none" if default is None else str(default), []).append(method)
    if len(meanings) == 1 and len(users) == methods:
        words = next(iter(meanings))
    else:
        words = "; ".join(f"{meaning} ({', '.join(whose)})" for meaning, whose in meanings.items())
    usual, *others = sorted(defaults, key=lambda value: -len(defaults[value]))
    exceptions = "".join(f"; {value} for {', '.join(defaults[value])}" for value in others)
    return f"{words} [default: {usual}{exceptions}]"


def _option_of(parameter: inspect.Parameter) -> tuple[Any, str]:
    """The command line's type for a method's option (text where Python takes several types), and its help."""
    kind, words = parameter.annotation, ""
    if get_origin(kind) is Annotated:
        kind, words = get_args(kind)[:2]
    present = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (Union, UnionType) and len(present) == 1:
        kind = present[0]
    known = kind in (int, float, bool, str) or get_origin(kind) is tuple
    return (kind if known else str) | None, words


app.command("train")(_with_method_options(train))


# --- account ---------------------------------------------------------------------------------------------------------


@app.command()
def account(
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")],
    steps: Annotated[int, typer.Option("--steps", "--trials", help="Number of steps, or of trials.")],
    delta: Annotated[float, typer.Option(help="Allowed failure probability.")] = 1e-5,
    noise_multiplier: Annotated[float | None, typer.Option(help="Accounted noise multiplier: gives epsilon.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget: gives the noise multiplier.")] = None,
    paper_sigma: Annotated[
        float | None, typer.Option(help="The sigma of a memory method's paper; with --beta, gives epsilon.")
    ] = None,
    beta: Annotated[float, typer.Option(help="Share of the fresh gradient, with --paper-sigma.")] = 1.0,
    groups: Annotated[
        int | None, typer.Option(help="Clipped in this many groups: --paper-sigma is then each group's own.")
    ] = None,
    accountant: Annotated[str, typer.Option(help="pld (tight, what is reported) or rdp (fast).")] = "pld",
    sampling: Annotated[str, typer.Option(help="How batches are drawn; only poisson has a price.")] = "poisson",
    method: Annotated[
        str | None, typer.Option(help="dpsur or dpsgd-br: price trials.", rich_help_panel="Selective methods")
    ] = None,
    accounting_by: Annotated[
        str,
        typer.Option(
            "--accounting",
            help="trial-level: each trial is one question whose reject bit and accepted candidate are public "
            "(dominating pair; dpsgd-br also shows its noisy loss). every-trial: one gradient and one loss question a "
            "trial, charged in full; the fallback. published: accepted updates only, which is refuted and no epsilon.",
            rich_help_panel="Selective methods",
        ),
    ] = "trial-level",
    accepted: Annotated[
        int | None, typer.Option(help="Updates applied, for the published claim.", rich_help_panel="Selective methods")
    ] = None,
    sigma_t: Annotated[
        float | None, typer.Option(help="Noise multiplier of the gradient.", rich_help_panel="Selective methods")
    ] = None,
    validation_rate: Annotated[
        float | None, typer.Option(help="Chance to join a loss test.", rich_help_panel="Selective methods")
    ] = None,
    sigma_v: Annotated[
        float | None, typer.Option(help="Noise multiplier of the loss test.", rich_help_panel="Selective methods")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Accept below this many clip bounds.", rich_help_panel="Selective methods")
    ] = None,
    as_json: Json = False,
) -> None:
    """Price a plan without training: epsilon from noise, or noise from epsilon.

    Examples:

        vestige account --sample-rate 0.04 --noise-multiplier 1.2222 --steps 6250 --delta 1e-5

        vestige account --sample-rate 0.04 --epsilon 3 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250

        vestige account --sample-rate 0.04 --paper-sigma 1.1 --beta 0.9 --steps 6250 --groups 21

        vestige account --method dpsur --trials 2914 --accepted 1246 --sample-rate 0.01707 --sigma-t 3 \\
            --validation-rate 0.00427 --sigma-v 1.37 --threshold -1.5 --accounting trial-level
    """
    if method is not None:
        facts = {
            "sample_rate": sample_rate,
            "sigma_t": sigma_t if sigma_t is not None else noise_multiplier,
            "validation_rate": validation_rate,
            "sigma_v": sigma_v,
            "threshold": threshold,
        }
        _account_trials({"method": method, "trials": steps, "delta": delta, **facts}, accepted, accounting_by, as_json)
        return
    from vestige import accounting, planning
    from vestige.questions import SampledGaussian
    from vestige.sampling import check_rate

    check_rate(sample_rate)
    planning.check_steps(steps)
    planning.check_delta(delta)
    if accountant not in ("pld", "rdp"):
        raise ValueError(f"accountant={accountant!r} must be pld or rdp")
    if sampling != "poisson":
        reasons = accounting.guarantee({}, delta, accounting.Facts(sampling=sampling)).reasons
        raise ValueError(f"sampling={sampling!r} has no price: {'; '.join(reasons)}")
    given = [
        name
        for name, value in (("noise-multiplier", noise_multiplier), ("epsilon", epsilon), ("paper-sigma", paper_sigma))
        if value is not None
    ]
    if len(given) != 1:
        raise ValueError(
            "give exactly one of --noise-multiplier, --epsilon and --paper-sigma, not "
            + (" and ".join(f"--{name}" for name in given) or "none")
        )
    if groups is not None and groups < 1:
        raise ValueError(f"groups={groups} must be a whole number from 1 up")
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta} must lie in (0, 1]")
    if beta != 1 and paper_sigma is None:
        raise ValueError(f"beta={beta} rescales --paper-sigma only: the accounted multiplier already contains it")
    if epsilon is not None:
        noise_multiplier = accounting.calibrate(
            lambda z: {SampledGaussian(sample_rate, z): steps}, epsilon, delta, accountant
        )
    elif paper_sigma is not None:
        noise_multiplier = planning.accounted_multiplier(paper_sigma, beta, groups or 1)
    assert noise_multiplier is not None
    planning.check_multiplier(noise_multiplier)
    history: accounting.History = {SampledGaussian(sample_rate, noise_multiplier): steps}
    spent = accounting.epsilon(history, delta, accountant)
    result = {
        "epsilon": spent,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "accountant": accountant,
        "epsilon_rdp": accounting.epsilon(history, delta, "rdp"),
        "adjacency": "add/remove one example",
        "sampling": "poisson",
    }
    if groups is not None:
        # What one group's ratio of noise to bound would cost if it were the whole release: drawn in papers, but one
        # example is in every group at once, so it bounds nothing.
        marginal: accounting.History = {SampledGaussian(sample_rate, noise_multiplier * groups**0.5): steps}
        result |= {
            "groups": groups,
            "nonguarantee_marginal_epsilon": accounting.epsilon(marginal, delta, accountant),
        }
    if as_json:
        _print_json(result)
        return
    answers.print(f"epsilon {spent:.4f} at delta {delta:g} ({accountant}; by Renyi {result['epsilon_rdp']:.4f})")
    answers.print(
        f"noise multiplier {noise_multiplier:.6g}, {steps} steps, Poisson rate {sample_rate:g}, add/remove one example"
    )
    if groups is not None:
        answers.print(
            f"{groups} groups on one sample, priced jointly "
            f"(nonguarantee_marginal_epsilon {result['nonguarantee_marginal_epsilon']:.4f}: no guarantee)"
        )


def _account_trials(facts: dict[str, Any], accepted: int | None, accounting_by: str, as_json: bool) -> None:
    from vestige.trial_prices import Trials, check_selective, price

    check_selective(facts["method"])
    missing = [name for name, value in facts.items() if value is None]
    if missing:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in facts)
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: {facts['method']} is priced from {words}")
    result = price(Trials(**facts, accepted=accepted), accounting_by)
    if as_json:
        _print_json(result)
        return
    if "epsilon" in result:
        answers.print(
            f"epsilon {result['epsilon']:.4f} at delta {result['delta']:g} ({accounting_by}, {result['trials']} "
            f"trials; by Renyi {result['epsilon_rdp']:.4f})"
        )
    if "published_claim_epsilon" in result:
        claim = result["published_claim_epsilon"]
        answers.print(f"published claim {claim:.4f} for {accepted} accepted updates: refuted, not a guarantee")


# --- verify ----------------------------------------------------------------------------------------------------------


@app.command()
def verify(run: Annotated[Path, typer.Argument(help="The run's folder.")], as_json: Json = False) -> None:
    """Recompute a run's epsilon from its ledger alone; fail on any edit, gap or reuse of a step (exit code 1).

    Example:

        vestige verify runs/digits-mlp-fo-dp-sgd-20260101-120000
    """
    from vestige.ledger import LedgerError
    from vestige.verification import verify as check

    try:
        verdict = check(run)
    except LedgerError as error:
        if as_json:
            _print_json({"verified": False, "reason": str(error)})
        _fail(f"NOT VERIFIED: {error}", 1)
        return
    if as_json:
        _print_json(verdict.to_json())
        return
    promise = verdict.guarantee
    answers.print(
        f"verified: {verdict.asked} charged questions in {verdict.attempts} attempt(s), {verdict.rows} chained rows",
        markup=False,
    )
    if promise.epsilon is not None:
        answers.print(
            f"epsilon {promise.epsilon:.4f} at delta {promise.delta:g} ({promise.accountant}; by Renyi "
            f"{promise.epsilon_rdp:.4f}), {promise.adjacency}"
        )
    else:
        answers.print("no epsilon: " + "; ".join(promise.reasons), markup=False)


# --- doctor ----------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    task: Annotated[
        str,
        typer.Argument(help="A task of `vestige tasks`, or FILE.py:FUNCTION returning (model, loss, data or loader)."),
    ],
    data: Annotated[str | None, typer.Option(help="FILE.npz or folder with the task's data.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    parity: Annotated[
        bool, typer.Option("--parity", help="Also prove, on one batch, that the fast engine equals the reference.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Examples in that batch.")] = 64,
    physical_batch: Annotated[
        str | None, typer.Option(help="auto: also find how many examples fit in memory at once.")
    ] = None,
    sample_rate: Annotated[float, typer.Option(help="Sampling rate whose samples are to fit, for that.")] = 0.05,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")] = None,
    as_json: Json = False,
) -> None:
    """Examine a model and its data before training; name what is at fault (exit code 1 if anything is).

    What it prints is computed from your data without noise: it is for you, not for publication.

    Examples:

        vestige doctor digits-mlp

        vestige doctor my_project.py:make --parity --physical-batch auto
    """
    from vestige import tasks
    from vestige.doctor import examine, first_examples, largest_batch
    from vestige.jobs import default_device
    from vestige.parity import compare_engines

    if batch < 1:
        raise ValueError(f"batch={batch} must be a whole number from 1 up")
    if physical_batch not in (None, "auto"):
        raise ValueError(f"physical_batch={physical_batch!r} must be 'auto' here: it is what the doctor looks for")
    model, loss, examples = tasks.subject(task, data, seed)
    model.to(device or default_device())
    findings = examine(model, loss, examples)
    wrong = any(finding.level == "error" for finding in findings)
    result: dict[str, Any] = {"healthy": not wrong, "findings": [vars(finding) for finding in findings]}
    if parity and not wrong:
        agreement = compare_engines(model, loss, first_examples(examples, batch))
        result["parity"] = agreement.to_json()
        wrong = not agreement.agrees
    if physical_batch and result["healthy"]:
        result["physical_batch"] = largest_batch(model, loss, examples, sample_rate)
    if as_json:
        _print_json(result)
    else:
        _print_diagnosis(task, result)
    if wrong:
        sys.exit(1)


def _print_diagnosis(task: str, result: dict[str, Any]) -> None:
    for finding in result["findings"]:
        answers.print(f"{finding['level']}: {finding['where']}: {finding['what']}", markup=False)
    if not result["findings"]:
        answers.print(f"{task}: nothing found; every example has a gradient of its own", markup=False)
    if "parity" in result:
        _print_parity(result["parity"])
    if "physical_batch" in result:
        answers.print(f"physical batch: {result['physical_batch']}", markup=False)


def _print_parity(parity: dict[str, Any]) -> None:
    word = "agree" if parity["agrees"] else "DISAGREE"
    answers.print(
        f"the engines {word} on {parity['examples']} examples; relative error of each clipped sum:", markup=False
    )
    for name, error in parity["errors"].items():
        answers.print(f"  {name}: {error:.1e}", markup=False)
    for name, cost in parity["engines"].items():
        memory = "" if cost["peak_mib"] is None else f", {cost['peak_mib']:.0f} MiB at most"
        answers.print(f"{name}: {cost['seconds'] * 1e3:.2f} ms a batch{memory}", markup=False)


# --- lists -----------------------------------------------------------------------------------------------------------


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method: print its page, with the BibTeX of its paper.")] = None,
    as_json: Json = False,
) -> None:
    """List the private optimizers, or describe one.

    Examples:

        vestige methods

        vestige methods dp-sat
    """
    from vestige import catalogue

    if name is not None:
        row = catalogue.row(name)
        if as_json:
            _print_json(row)
        else:
            answers.print(catalogue.page(name), markup=False)
        return
    rows = catalogue.rows()
    if as_json:
        _print_json({"methods": rows})
        return
    table = Table("method", "what it does", "privacy", "copies")
    for row in rows:
        table.add_row(row["name"], row["summary"], row["privacy"], f"{row['copies']:g}")
    answers.print(table)
    answers.print(
        "copies: extra state, in copies of the parameters. Options, price, reference and BibTeX: vestige methods NAME"
    )


@app.command("tasks")
def list_tasks(as_json: Json = False) -> None:
    """List the tasks: datasets with their models."""
    from vestige import tasks

    if as_json:
        _print_json({"tasks": tasks.describe()})
        return
    table = Table("task", "dataset", "model", "data")
    for row in tasks.describe():
        words = (str(row[key]) for key in ("name", "dataset", "model"))
        table.add_row(*words, "--data" if row["needs_data"] else "included")
    answers.print(table)


# --- what a terminal shows -------------------------------------------------------------------------------------------


@contextmanager
def _progress(
    visible: bool,
) -> Iterator[Callable[[str, int], Callable[[int, float | None, float | None, float | None], None]]]:
    """A live bar on standard error: steps, accuracy on public data, spent epsilon and the budget."""
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TextColumn("{task.fields[spent]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, disable=not (visible and notes.is_terminal)) as progress:

        def bar(title: str, total: int) -> Callable[[int, float | None, float | None, float | None], None]:
            line = progress.add_task(title, total=total, accuracy="", spent="")

            def show(done: int, accuracy: float | None, spent: float | None, budget: float | None) -> None:
                fields = {"spent": _spent(spent, budget)}
                if accuracy is not None:
                    fields["accuracy"] = f"accuracy {accuracy:.1%}"
                progress.update(line, completed=done, **fields)  # type: ignore[arg-type]

            return show

        yield bar


def _spent(spent: float | None, budget: float | None) -> str:
    if spent is None:
        return "no epsilon"
    return f"epsilon {spent:.2f}" + (f" of {budget:g}" if budget is not None else "")


@contextmanager
def _graceful() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (or SIGTERM) once: finish the step, save, stop. Twice: stop at once."""
    stop = False

    def ask(number: int, frame: object) -> None:
        nonlocal stop
        if stop:
            os._exit(130)
        stop = True
        notes.print("stopping after this step (again: at once)", markup=False)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


cli_compare.register(app)

if __name__ == "__main__":
    main()
