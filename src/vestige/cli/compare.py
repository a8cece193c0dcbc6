"""How are methods compared from the terminal? `vestige compare` turns its flags into a specification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vestige.checks import check_steps
from vestige.cli.dataclass_flags import with_flags
from vestige.cli.errors import refuse_if_given, refuse_others, require_trust
from vestige.cli.models.flags import DerivedFlag
from vestige.cli.run_comparison import (
    AddressFlag,
    DeviceFlag,
    EngineFlag,
    Execution,
    StackFlag,
    WorkersFlag,
    check_tasks,
    finish,
    make_runs,
)
from vestige.cli.terminal import Json, Trust, dated_folder, stderr
from vestige.compare.arguments import contenders, grids, numbers, try_to_build

if TYPE_CHECKING:
    from vestige.compare.specification import Specification

EXECUTION = ("engine", "ray_address", "workers", "stack", "device", "as_json")
"""Options of how runs are executed: they may be given with any comparison."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """The flags of `vestige compare`."""

    task: Annotated[list[str] | None, typer.Option(help="A task of `vestige tasks`; repeat for several.")] = None
    method: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:option=value,...; repeat for several; all: every method there is."),
    ] = None
    epsilon: Annotated[list[float] | None, typer.Option(help="Budget; repeat for several.")] = None
    noise_multiplier: Annotated[list[float] | None, typer.Option(help="Accounted noise instead of a budget.")] = None
    paper_sigma: Annotated[list[float] | None, typer.Option(help="The sigma of the methods' papers.")] = None
    data: Annotated[str | None, typer.Option(help="Folder (or file) with the tasks' data.")] = None
    seeds: Annotated[
        int | None,
        typer.Option(help="Final runs per row, each with a fresh seed (default: as many as a test of all rows takes)."),
    ] = None
    steps: Annotated[int, typer.Option(help="Steps of every run.")] = 200
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")] = 0.05
    delta: Annotated[float, typer.Option(help="Allowed failure probability, below 1/N.")] = 1e-5
    factors: Annotated[
        str | None, typer.Option(help="Grid of rates, as multiples of the automatic one (default: 1/8 ... 8).")
    ] = None
    lrs: Annotated[str | None, typer.Option(help="Grid of rates as numbers, instead of --factors.")] = None
    tune: Annotated[list[str] | None, typer.Option(help="Tune an option too: beta=0.8,0.9 (repeatable).")] = None
    tuning_seeds: Annotated[int, typer.Option(help="Runs per trial of the grid.")] = 1
    choose_once: Annotated[
        bool,
        typer.Option("--choose-once", help="Choose each rate once for all seeds: fewer trials, tuned rows not tested."),
    ] = False
    validation: Annotated[float, typer.Option(help="Share of the training data held out while tuning.")] = 0.2
    lr: Annotated[float | None, typer.Option(help="Add rows at this rate, untuned.")] = None
    rates: Annotated[str | None, typer.Option(help="Kinds of rows: tuned,auto,given (default: tuned,auto).")] = None
    baseline: Annotated[str, typer.Option(help="The method that others are compared with.")] = "dp-sgd"
    evaluations: Annotated[
        int, typer.Option(help="Evaluations on the test set during a final run, for curves; 0: only at its end.")
    ] = 0
    physical_batch: Annotated[
        int | None, typer.Option("--max-physical-batch-size", help="Split samples into parts of this size.")
    ] = None
    sampling: Annotated[
        str, typer.Option(help="poisson; or allocation: each example once an epoch. Such runs are made one by one.")
    ] = "poisson"
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fix noise and sampling. Protects nobody: for tests.")
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            help="The book of the dataset (`vestige budget open`): all runs are charged before the first of them.",
            envvar="VESTIGE_BUDGET",
        ),
    ] = None
    derived_from: DerivedFlag = None
    engine: EngineFlag = "local"
    ray_address: AddressFlag = None
    workers: WorkersFlag = None
    stack: StackFlag = "auto"
    device: DeviceFlag = None
    out: Annotated[Path | None, typer.Option(help="Folder of the comparison (default: runs/compare-TIME).")] = None
    resume: Annotated[Path | None, typer.Option(help="Continue (or help with) the comparison in this folder.")] = None
    retry: Annotated[bool, typer.Option("--retry", help="With --resume: try failed runs again.")] = False
    trust: Trust = False
    quick: Annotated[bool, typer.Option("--quick", help="A small comparison on digits, in a minute or two.")] = False
    as_json: Json = False


@with_flags(CompareFlags)
def compare(context: typer.Context, flags: CompareFlags) -> None:
    """Which private optimizer is best at this budget, and is the difference real?

    Every method is tuned over the same grid, on a part of the training data held out for it, anew for every final run,
    so that the luck of the choice is in the intervals; the same method at the automatic rate is shown, too. Noise is
    calibrated so that all spend the same epsilon.

    Examples:

        vestige compare --quick

        vestige compare --task cifar10-mlp --data cifar10.npz --epsilon 1 --epsilon 3 --method dp-sgd --method fo-dp-sgd

        vestige compare --resume runs/compare-20260101-120000
    """
    from vestige.budget.spending import account_of
    from vestige.compare import paper_presets as known
    from vestige.compare.folder import ComparisonFolder

    execution = Execution(flags.engine, flags.ray_address, flags.workers, flags.stack, flags.device)
    account = account_of(flags.budget)
    if account is None and flags.derived_from is not None:
        raise ValueError(f"derived_from={flags.derived_from!r} is about a book: give budget=BOOK, too")
    paying = account and replace(account, derived_from=flags.derived_from)
    if flags.resume is not None:
        allowed = ("resume", "retry", "trust", "data", "budget", "derived_from", *EXECUTION)
        refuse_others(context, allowed, "a comparison continues with the options it was started with")
        folder = ComparisonFolder(flags.resume)
        agreed = folder.specification()
        require_trust(flags.resume, [problem.task for problem in agreed.problems], flags.trust)
        elsewhere = {problem.task: flags.data for problem in agreed.problems} if flags.data is not None else {}
        check_tasks(agreed, flags.data)
        if flags.retry:
            stderr.print(f"trying {len(folder.remove_failures())} failed runs again", markup=False)
        execution = replace(execution, alone=known.timed_in(flags.resume))
        finish(
            make_runs(flags.resume, agreed, execution, visible=not flags.as_json, data=elsewhere, budget=paying),
            flags.as_json,
        )
        return
    refuse_if_given(context, ("trust",), "it goes with --resume FOLDER")
    if flags.retry:
        raise ValueError("--retry goes with --resume FOLDER: it tries the failed runs of a comparison again")
    if flags.quick:
        refuse_others(
            context,
            ("quick", "out", "budget", *EXECUTION),
            "--quick is one fixed comparison; leave --quick out for your own",
        )
        specification = quick_specification()
    else:
        specification = _asked_specification(context, flags)
    check_tasks(specification)
    _check_names(specification)
    path = flags.out or dated_folder("quick" if flags.quick else "compare")
    finish(make_runs(path, specification, execution, visible=not flags.as_json, budget=paying), flags.as_json)


def _asked_specification(context: typer.Context, flags: CompareFlags) -> Specification:
    """The comparison that the flags ask for."""
    from vestige.compare.specification import FACTORS, Contender, Problem, Specification
    from vestige.compare.statistics import seeds_to_tell
    from vestige.run_records import PrivacyTarget

    budgets = [PrivacyTarget("epsilon", value) for value in flags.epsilon or ()]
    budgets += [PrivacyTarget("noise_multiplier", value) for value in flags.noise_multiplier or ()]
    budgets += [PrivacyTarget("paper_sigma", value) for value in flags.paper_sigma or ()]
    budgets = budgets or [PrivacyTarget("epsilon", 3.0)]
    check_steps(flags.tuning_seeds, "tuning_seeds")
    kinds = (
        tuple(flags.rates.split(","))
        if flags.rates
        else (("tuned", "auto", "given") if flags.lr else ("tuned", "auto"))
    )
    _check_flags(context, kinds, flags.lrs)
    problems = tuple(Problem(name, flags.data) for name in flags.task or ["digits-mlp"])
    compared = tuple(
        Contender(label, name, options, flags.lr) for label, name, options in contenders(flags.method or ["all"])
    )
    tested = sum(not (flags.choose_once and kind == "tuned") for kind in kinds)
    pairs = max(1, len(problems) * len(budgets) * tested * (len(compared) - 1))
    count = seeds_to_tell(pairs) if flags.seeds is None else flags.seeds
    check_steps(count, "seeds")
    return Specification(
        problems=problems,
        contenders=compared,
        budgets=tuple(budgets),
        seeds=tuple(range(count)),
        steps=flags.steps,
        sample_rate=flags.sample_rate,
        delta=flags.delta,
        rates=kinds,  # type: ignore[arg-type]
        factors=numbers("factors", flags.factors) if flags.factors is not None else FACTORS,
        learning_rates=numbers("lrs", flags.lrs) if flags.lrs is not None else (),
        tune=grids(flags.tune or ()),
        tuning_seeds=tuple(range(1000, 1000 + flags.tuning_seeds)),
        choose="once" if flags.choose_once else "each seed",
        validation=flags.validation,
        lr=flags.lr,
        baseline=flags.baseline,
        evaluations=flags.evaluations,
        reproducible=flags.reproducible,
        physical_batch=flags.physical_batch,
        sampling=flags.sampling,  # type: ignore[arg-type]
    )


def quick_specification() -> Specification:
    from vestige.compare.specification import Contender, Problem, Specification
    from vestige.run_records import PrivacyTarget

    names = ["dp-sgd", "dp-sgd:momentum=0.9", "fo-dp-sgd", "uniform-memory"]
    return Specification(
        problems=(Problem("digits-mlp"),),
        contenders=tuple(Contender(label, name, options) for label, name, options in contenders(names)),
        budgets=tuple(PrivacyTarget("epsilon", value) for value in (1.0, 8.0)),
        seeds=tuple(range(9)),  # twelve rows are tested, and eight seeds could not tell any of them apart
        steps=200,
        sample_rate=0.05,
        factors=(0.25, 0.5, 1.0, 2.0),
    )


def _check_flags(context: typer.Context, kinds: tuple[str, ...], lrs: str | None) -> None:
    """Refuse flags that would be silently ignored."""
    if lrs is not None:
        refuse_if_given(context, ("factors",), "--lrs is a grid of rates already")
    if "tuned" not in kinds:
        words = ("factors", "lrs", "tune", "tuning_seeds", "choose_once", "validation")
        refuse_if_given(context, words, f"--rates {','.join(kinds)} tunes nothing")
    if "given" not in kinds:
        refuse_if_given(context, ("lr",), f"--rates {','.join(kinds)} has no rows at a given rate")


def _check_names(specification: Specification) -> None:
    """Refuse names and values of methods and options that no run could use or that would be silently ignored."""
    from vestige.methods.registry import find, nearest

    labels = [contender.label for contender in specification.contenders]
    if specification.baseline not in ("dp-sgd", *labels):  # the usual baseline may be left out
        name = specification.baseline
        raise ValueError(f"baseline={name!r} is not compared{nearest(name, labels)}; choose from {', '.join(labels)}")
    known = {option for contender in specification.contenders for option in find(contender.method).options}
    for option in specification.tune:
        if option not in known:
            raise ValueError(
                f"tune={option!r} is an option of none of the methods{nearest(option, known)}; "
                f"choose from {', '.join(sorted(known))}"
            )
    for contender in specification.contenders:
        for option, values in specification.tune.items():
            if option in find(contender.method).options and option not in contender.options:
                for value in values:
                    options = {**contender.options, option: value}
                    try_to_build(f"tune={option}={value!r}", contender.method, options)
