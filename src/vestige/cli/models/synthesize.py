"""How is data that may be shared made from the terminal? `vestige synthesize`: a file, a budget, made-up rows."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vestige.assumptions import lines
from vestige.cli.errors import INTERRUPTED, given, refuse_others
from vestige.cli.models.flags import DeltaFlag, DeviceFlag, EpsilonFlag, ReproducibleFlag, ResumeFlag
from vestige.cli.models.said import NOT_PRIVATE
from vestige.cli.terminal import LARGEST_SEED, Json, graceful_stop, meant, print_json, stderr, stdout, step_progress


def synthesize(
    context: typer.Context,
    data: Annotated[str | None, typer.Option(help="FILE.csv, .jsonl or .parquet; a row is what is protected.")] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Rows: public bounds and categories, 'age=18..80;work=office|field' or a FILE.json of them; bounds "
            "without a decimal point are whole numbers, 'age?=...' may be missing. Never read off the data."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Rows: marginals (noised counts over a tree of pairs) or evolution (noised votes).")
    ] = "marginals",
    bins: Annotated[int, typer.Option(help="Rows: cells of a column of numbers.")] = 20,
    iterations: Annotated[int | None, typer.Option(help="Rows, evolution: how often rows vote. [default: 8]")] = None,
    label_column: Annotated[
        str | None, typer.Option(help="The column that a classifier of the made-up rows is judged by.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="A file with the same columns that needs no protection, to judge quality by.")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(help="private: ask, in the same budget, how right that classifier is about the private rows."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="How many are made. [default: as many as there are rows]")] = None,
    epsilon: EpsilonFlag = None,
    delta: DeltaFlag = 1e-5,
    seed: Annotated[
        int | None,
        typer.Option(help="Fixes public chance, such as which rows are drawn; never noise.", min=0, max=LARGEST_SEED),
    ] = None,
    reproducible: ReproducibleFlag = False,
    device: DeviceFlag = None,
    out: Annotated[Path | None, typer.Option(help="Folder for what is made (default: runs/synth-TIME).")] = None,
    resume: ResumeFlag = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only: no plan, no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Make rows that may be shared, of private ones.

    The folder has the made-up rows in the form that the private ones came in (`data.csv`), `ledger.jsonl`, a page with
    plots (`report.html`) and a card (`README.md`). `vestige verify` recomputes epsilon.

    Examples:

        vestige synthesize --data people.csv --columns 'age=18..80;work=office|field' --epsilon 1 --samples 1000 --out
        synth

        vestige synthesize --data people.parquet --columns schema.json --epsilon 3 --method evolution --label-column
        work --test public.parquet

        vestige synthesize --resume synth
    """
    from vestige.devices import default_device
    from vestige.synthesis.tables import TableRun, TableSynthesis, load
    from vestige.training.run_folder import RunFolder

    if resume is not None:
        why = "a run continues with the options it was started with"
        refuse_others(context, ("resume", "quiet", "as_json", "data", "device"), why)
        job: Any = load(RunFolder(resume))
        there = {name: value for name, value in (("data", data), ("device", device)) if given(context, name)}
        job = replace(job, **there)
    else:
        if data is None or columns is None or epsilon is None:
            wanted = {"data": data, "columns": columns, "epsilon": epsilon}
            raise ValueError(f"{next(name for name, value in wanted.items() if value is None)}=None: give it, too")
        job = TableSynthesis(
            data=data,
            columns=columns,
            epsilon=epsilon,
            delta=delta,
            samples=samples,
            method=method,
            bins=bins,
            iterations=iterations,
            label_column=label_column,
            test=test,
            evaluate=evaluate,
            seed=seed,
            reproducible=reproducible,
            device=device or default_device(),
        )
    path = resume or out or Path("runs") / f"synth-{time.strftime('%Y%m%d-%H%M%S')}"
    run = TableRun(job, path, resume=resume is not None)
    if not quiet:
        stderr.print(
            f"{job.method}: {run.curator.population:,} rows of {len(run.columns)} columns, noise multiplier "
            f"{run.plan.method.multiplier:.4g}, {sum(n for _, n in run.plan.runs())} questions, delta {job.delta:g}",
            markup=False,
        )
        if job.reproducible:
            stderr.print(NOT_PRIVATE, markup=False)
    with step_progress(not (as_json or quiet)) as bar, graceful_stop() as stopping:
        show = bar(job.method, sum(count for _, count in run.plan.runs()))

        def on_step(done: int, of: int) -> bool:
            show(done, "questions", None if job.reproducible else job.epsilon, job.epsilon)
            return not stopping()

        made = run.complete(on_step)
    if made is None:
        stderr.print(f"interrupted; continue with: vestige synthesize --resume {path}", markup=False)
        sys.exit(INTERRUPTED)
    if as_json:
        print_json(made.to_json())
    else:
        summarise(made)


def summarise(made: Any) -> None:
    from vestige.synthesis.output import QUALITY

    promise = made.guarantee
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("made", f"{made.count:,} {made.kind} by {made.method}")
    if promise.epsilon is not None:
        table.add_row("privacy", f"epsilon {promise.epsilon:.4g} at delta {promise.delta:g} ({promise.accountant})")
        for line in meant(vars(promise.meaning)):
            table.add_row("", line)
    else:
        table.add_row("privacy", "none: " + "; ".join(promise.reasons))
    for line in lines(promise.listed):
        table.add_row("", line)
    for name, value in made.quality.items():
        table.add_row(name.replace("_", " "), f"{value:.4g} ({QUALITY.get(name, name)})")
    table.add_row("seconds", f"{made.seconds:g}")
    table.add_row("written to", str(made.out))
    stdout.print(table)
