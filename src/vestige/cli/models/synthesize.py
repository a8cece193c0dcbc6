"""How is data that may be shared made from the terminal? `vestige synthesize`: a file, a budget, made-up data."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vestige.assumptions import lines
from vestige.cli.dataclass_flags import with_flags
from vestige.cli.errors import INTERRUPTED, given, refuse_if_given, refuse_others
from vestige.cli.models.flags import (
    BudgetFlag,
    CudaGraphsFlag,
    DeltaFlag,
    DerivedFlag,
    DeviceFlag,
    EngineFlag,
    EpsilonFlag,
    PhysicalBatchFlag,
    ReproducibleFlag,
    ResumeFlag,
    SlotFlag,
    UserColumnFlag,
    engine_of,
    part_size,
)
from vestige.cli.models.messages import NOT_PRIVATE
from vestige.cli.terminal import (
    LARGEST_SEED,
    Json,
    dated_folder,
    graceful_stop,
    meant,
    print_json,
    stderr,
    stdout,
    step_progress,
)

if TYPE_CHECKING:
    from vestige.synthesis.output import Synthesis
    from vestige.synthesis.tables import TableSynthesis
    from vestige.synthesis.texts import TextSynthesis
    from vestige.training.loop import Record

OF_ROWS = ("columns", "bins", "iterations", "evaluate")
OF_TEXTS: tuple[str, ...] = (
    "text_column",
    "labels",
    "label_shares",
    "max_length",
    "pad_token",
    "lora",
)
OF_TEXTS += (
    "lora_targets",
    "batch",
    "epochs",
    "steps",
    "lr",
    "physical_batch",
    "engine",
    "cuda_graphs",
    "bfloat16",
    "audit",
)
OF_TEXTS += ("temperature", "top_p", "guidance", "sampling_batch")


@dataclass(frozen=True, kw_only=True)
class SynthesizeFlags:
    """The flags of `vestige synthesize`."""

    data: Annotated[str | None, typer.Option(help="FILE.csv, .jsonl or .parquet; a row is what is protected.")] = None
    columns: Annotated[
        str | None,
        typer.Option(
            help="Rows: public bounds and categories, 'age=18..80;work=office|field' or a FILE.json of them; bounds "
            "without a decimal point are whole numbers, 'age?=...' may be missing. Never read off the data."
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help="Rows: marginals (noised counts over a tree of pairs; the default) or evolution (noised votes). "
            "Texts: a method of `vestige methods`. [default: dp-adamw]"
        ),
    ] = None
    bins: Annotated[int, typer.Option(help="Rows: cells of a column of numbers.")] = 20
    iterations: Annotated[int | None, typer.Option(help="Rows, evolution: how often rows vote. [default: 8]")] = None
    model: Annotated[
        str | None, typer.Option(help="Texts: folder of a Hugging Face language model; its code is not run.")
    ] = None
    text_column: Annotated[str, typer.Option(help="Texts: their column.")] = "text"
    label_column: Annotated[
        str | None, typer.Option(help="Texts: the column of labels. Rows: the one that a classifier is judged by.")
    ] = None
    labels: Annotated[
        str | None, typer.Option(help="Texts: the labels that may occur, 'neg,pos': public, never read off the data.")
    ] = None
    label_shares: Annotated[
        str | None,
        typer.Option(help="Texts: public shares of the labels, '1,1'. [default: one noised count of each, charged]"),
    ] = None
    user_column: UserColumnFlag = None
    rows_per_user: Annotated[
        int | None, typer.Option(help="The most rows of one user that are used.", rich_help_panel="Users")
    ] = None
    max_length: Annotated[int, typer.Option(help="Texts: tokens of a text with its label, at most.")] = 128
    pad_token: Annotated[
        str | None, typer.Option(help="Texts: the token to pad with, where the tokenizer has none: '<|endoftext|>'.")
    ] = None
    lora: Annotated[int | None, typer.Option(help="Texts: train adapters of this rank; else the whole model.")] = None
    lora_targets: Annotated[str | None, typer.Option(help="Texts: modules to adapt, 'q_proj,v_proj'.")] = None
    batch: Annotated[
        int | None, typer.Option("--batch-size", help="Texts: expected texts of a step. [default: 1024, or all]")
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Texts: expected passes. [default: 10]")] = None
    steps: Annotated[int | None, typer.Option(help="Texts: number of steps, instead of --epochs.")] = None
    lr: Annotated[float | None, typer.Option(help="Texts: learning rate. [default: 0.001 with --lora, or 0.0001]")] = (
        None
    )
    physical_batch: PhysicalBatchFlag = None
    cuda_graphs: CudaGraphsFlag = True
    engine: EngineFlag = "bookkeeping"
    bfloat16: Annotated[bool, typer.Option("--bfloat16", help="Texts: train under torch's autocast.")] = False
    audit: Annotated[
        int | None, typer.Option(help="Texts: plant so many canaries in the training run; `vestige audit` reads them.")
    ] = None
    temperature: Annotated[float, typer.Option(help="Texts: of the sampling.")] = 1.0
    top_p: Annotated[float, typer.Option(help="Texts: sample among the likeliest tokens with this share.")] = 0.95
    guidance: Annotated[
        float, typer.Option(help="Texts: draw away from what the other labels would give; 0 does not, 2 is a lot.")
    ] = 0.0
    sampling_batch: Annotated[int, typer.Option(help="Texts: how many are written at once.")] = 256
    test: Annotated[
        str | None, typer.Option(help="A file with the same columns that needs no protection, to judge quality by.")
    ] = None
    evaluate: Annotated[
        str | None,
        typer.Option(help="Rows: private: ask, in the same budget, how right a classifier is about the private rows."),
    ] = None
    samples: Annotated[int | None, typer.Option(help="How many are made. [default for rows: as many as given]")] = None
    epsilon: EpsilonFlag = None
    delta: DeltaFlag = 1e-5
    seed: Annotated[
        int | None,
        typer.Option(help="Fixes public chance, such as which rows are drawn; never noise.", min=0, max=LARGEST_SEED),
    ] = None
    reproducible: ReproducibleFlag = False
    device: DeviceFlag = None
    budget: BudgetFlag = None
    derived_from: DerivedFlag = None
    slot: SlotFlag = None
    out: Annotated[Path | None, typer.Option(help="Folder for what is made (default: runs/synth-TIME).")] = None
    resume: ResumeFlag = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only: no plan, no progress.")] = False
    as_json: Json = False


@with_flags(SynthesizeFlags)
def synthesize(context: typer.Context, flags: SynthesizeFlags) -> None:
    """Make rows or texts that may be shared, of private ones.

    The folder has what was made in the form that the private data came in (`data.csv`, `data.jsonl`), `ledger.jsonl`, a
    page with plots (`report.html`) and a card (`README.md`); of texts also the adapter or model that wrote them.
    `vestige verify` recomputes epsilon.

    Examples:

        vestige synthesize --data people.csv --columns 'age=18..80;work=office|field' --epsilon 1 --samples 1000 --out
        synth

        vestige synthesize --data people.parquet --columns schema.json --epsilon 3 --method evolution --label-column
        work --test public.parquet

        vestige synthesize --model gpt2 --data reviews.jsonl --label-column label --labels neg,pos --lora 16 --epsilon 8
        --samples 20000 --pad-token '<|endoftext|>' --out synth

        vestige synthesize --resume synth
    """
    from vestige.synthesis.tables import TableSynthesis
    from vestige.tf32 import default_device

    where = flags.device or default_device()
    path = flags.resume or flags.out or dated_folder("synth")
    job: TableSynthesis | TextSynthesis
    if flags.resume is not None:
        job = _continued(context, flags.resume, {"data": flags.data, "device": flags.device, "budget": flags.budget})
    else:
        job = _job_of(context, flags, where)
    how = (path, flags.resume is not None, flags.quiet, flags.as_json)
    made = _rows(job, *how) if isinstance(job, TableSynthesis) else _texts(job, *how)
    if made is None:
        stderr.print(f"interrupted; continue with: vestige synthesize --resume {path}", markup=False)
        sys.exit(INTERRUPTED)
    if flags.as_json:
        print_json(made.to_json())
    else:
        _summarise(made)


def _job_of(context: typer.Context, flags: SynthesizeFlags, where: str) -> TableSynthesis | TextSynthesis:
    """The job that the flags ask for: rows by --columns, or texts by --model."""
    from vestige.synthesis.tables import TableSynthesis

    if flags.model is not None and flags.columns is not None:
        raise ValueError(
            f"model={flags.model!r} and columns={flags.columns!r}: give one of them, for texts or for rows"
        )
    if flags.model is None and flags.columns is None:
        raise ValueError("columns=None: give the columns of a table, or a model for texts")
    wanted = {
        "data": flags.data,
        "epsilon": flags.epsilon,
        **({} if flags.model is None else {"samples": flags.samples}),
    }
    for name, value in wanted.items():
        if value is None:
            raise ValueError(f"{name}=None: give it, too")
    refuse_if_given(
        context,
        OF_TEXTS if flags.model is None else OF_ROWS,
        f"it is of {'texts' if flags.model is None else 'rows'}",
    )
    shared: dict[str, Any] = {
        "data": flags.data,
        "epsilon": flags.epsilon,
        "delta": flags.delta,
        "samples": flags.samples,
        "test": flags.test,
    }
    shared |= {"label_column": flags.label_column, "reproducible": flags.reproducible, "device": where}
    shared |= {
        "budget": flags.budget,
        "derived_from": flags.derived_from,
        "slot": flags.slot,
        "user_column": flags.user_column,
        "rows_per_user": flags.rows_per_user,
    }
    if flags.model is None:
        own: dict[str, Any] = {
            "columns": flags.columns,
            "method": flags.method or "marginals",
            "bins": flags.bins,
            "seed": flags.seed,
        }
        return TableSynthesis(**shared, **own, iterations=flags.iterations, evaluate=flags.evaluate)
    from vestige.synthesis.texts import TextSynthesis

    return TextSynthesis(
        **shared,
        model=flags.model,
        method=flags.method or "dp-adamw",
        text_column=flags.text_column,
        labels=_several(flags.labels),
        label_shares=_numbers(flags.label_shares),
        max_length=flags.max_length,
        pad_token=flags.pad_token,
        lora=flags.lora,
        lora_targets=_several(flags.lora_targets),
        batch=flags.batch,
        epochs=flags.epochs,
        steps=flags.steps,
        lr=flags.lr,
        physical_batch=part_size(flags.physical_batch),
        engine=engine_of(flags.engine, flags.cuda_graphs),
        bfloat16=flags.bfloat16,
        audit=flags.audit,
        temperature=flags.temperature,
        top_p=flags.top_p,
        guidance=flags.guidance,
        sampling_batch=flags.sampling_batch,
        seed=flags.seed or 0,
    )


def _continued(context: typer.Context, resume: Path, elsewhere: dict[str, object]) -> TableSynthesis | TextSynthesis:
    """The job of an interrupted synthesis, with its data elsewhere or on another device, if that is given."""
    from vestige.synthesis import tables, texts
    from vestige.training.run_folder import RunFolder

    why = "a run continues with the options it was started with"
    refuse_others(context, ("resume", "quiet", "as_json", *elsewhere), why)
    folder = RunFolder(resume)
    if (resume / "synthesis.json").exists() and folder.ledger.exists() and b'"finish"' in folder.ledger.read_bytes():
        raise ValueError(f"resume={str(resume)!r} is already finished; verify it with: vestige verify {resume}")
    kind = texts if "model" in folder.request().get("synthesize", {}) else tables
    there = {name: value for name, value in elsewhere.items() if given(context, name)}
    return replace(kind.load(folder), **there)  # type: ignore[attr-defined]


def _rows(job: TableSynthesis, path: Path, resume: bool, quiet: bool, as_json: bool) -> Synthesis | None:
    from vestige.synthesis.tables import TableRun

    run = TableRun(job, path, resume=resume)
    questions = sum(count for _, count in run.plan.runs())
    if not quiet:
        _announce(
            job,
            f"{job.method}: {run.curator.population:,} rows of {len(run.columns)} columns, noise multiplier "
            f"{run.plan.method.multiplier:.4g}, {questions} questions, delta {job.delta:g}",
        )
    with step_progress(not (as_json or quiet)) as bar, graceful_stop() as stopping:
        show = bar(job.method, questions)

        def on_step(done: int, of: int) -> bool:
            show(done, "questions", None if job.reproducible else job.epsilon, job.epsilon)
            return not stopping()

        return run.complete(on_step)


def _texts(job: TextSynthesis, path: Path, resume: bool, quiet: bool, as_json: bool) -> Synthesis | None:
    from vestige.synthesis.texts import TextRun

    run = TextRun(job, path, resume=resume)
    plan = run.training.plan
    if not quiet:
        _announce(
            job,
            f"{job.method} on {Path(job.model).name}: {run.training.layout.size:,} parameters, noise multiplier "
            f"{plan.noise_multiplier:.4g}, rate {plan.sample_rate:.4g}, {plan.steps} steps, delta {plan.delta:g}; then "
            f"{job.samples:,} texts of at most {job.max_length} tokens",
        )
    with step_progress(not (as_json or quiet)) as bar, graceful_stop() as stopping:
        train, write = bar("training", plan.steps), bar("writing", job.samples)

        def on_record(record: Record) -> bool:
            train(record.step + 1, "steps", record.epsilon, plan.epsilon)
            return not stopping()

        def on_batch(made: int, of: int, pace: float) -> bool:
            write(made, f"{pace:,.0f} tokens/s", run.training.spent(), plan.epsilon)
            return not stopping()

        return run.complete(on_record, on_batch)


def _announce(job: TableSynthesis | TextSynthesis, plan: str) -> None:
    stderr.print(plan, markup=False)
    if job.reproducible:
        stderr.print(NOT_PRIVATE, markup=False)


def _several(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


def _numbers(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"label_shares={text!r} must be numbers, '0.5,0.5'") from None


def _summarise(made: Synthesis) -> None:
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
    table.add_row("seconds", f"{made.nonprivate_seconds:g} (not private: keep it to yourself)")
    table.add_row("written to", str(made.out))
    stdout.print(table)
