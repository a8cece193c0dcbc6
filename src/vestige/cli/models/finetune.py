"""How is a language model fine-tuned from the terminal? `vestige finetune`: a checkpoint, a file of texts, a budget."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vestige.cli.dataclass_flags import named_alike, with_flags
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
from vestige.cli.terminal import Json, dated_folder, graceful_stop, print_json, stderr, stdout, step_progress

if TYPE_CHECKING:
    from vestige.finetuning.job import FineTuning
    from vestige.run_records import RunResult
    from vestige.training.loop import Record
    from vestige.training.run import Training


@dataclass(frozen=True, kw_only=True)
class FineTuneFlags:
    """The flags of `vestige finetune`."""

    model: Annotated[
        str | None, typer.Option(help="Folder of a Hugging Face checkpoint with its tokenizer; its code is not run.")
    ] = None
    data: Annotated[str | None, typer.Option(help="FILE.jsonl, .csv or .parquet; a row is an example.")] = None
    test: Annotated[
        str | None, typer.Option(help="A file with the same columns that needs no protection, to judge the model by.")
    ] = None
    text_column: Annotated[str, typer.Option(help="The column of texts.")] = "text"
    label_column: Annotated[str | None, typer.Option(help="The column of labels (without: --task causal-lm).")] = None
    labels: Annotated[
        str | None,
        typer.Option(
            help="The labels that may occur, 'neg,pos': public, and never read off the data. "
            "[default: those of the checkpoint; 0 and 1 where it has none]"
        ),
    ] = None
    task: Annotated[
        str | None, typer.Option(help="classification or causal-lm (default: as there is a label column or not).")
    ] = None
    max_length: Annotated[
        int, typer.Option(help="Tokens of an example: all are cut or padded to this length, which is public.")
    ] = 128
    tokens_per_example: Annotated[
        int | None,
        typer.Option(help="causal-lm: divide an example's loss by this number instead of its own number of tokens."),
    ] = None
    pad_token: Annotated[
        str | None, typer.Option(help="The token to pad with, where the tokenizer has none: '<|endoftext|>', say.")
    ] = None
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank (LoRA) and a head; without it, the whole model.")
    ] = None
    lora_targets: Annotated[
        str | None, typer.Option(help="Modules to adapt, 'q_proj,v_proj' (default: peft's choice for the model).")
    ] = None
    freeze: Annotated[
        str | None, typer.Option(help="Leave parameters as they are, by patterns: `transformer.wte*;*.h.0.*`.")
    ] = None
    method: Annotated[str, typer.Option(help="How: a method of `vestige methods`.")] = "dp-adamw"
    epsilon: EpsilonFlag = None
    delta: DeltaFlag = 1e-5
    noise_multiplier: NoiseMultiplierFlag = None
    batch: Annotated[
        int | None, typer.Option("--batch-size", help="Expected number of examples in a step. [default: 256, or all]")
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Expected passes over the data. [default: 3]")] = None
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of --epochs.")] = None
    lr: Annotated[
        str | None,
        typer.Option(
            help="Learning rate [default for Adam: 0.001 with --lora, 0.0001 without]; auto is made for training from "
            "scratch, and far too large here."
        ),
    ] = None
    balance: BalanceFlag = None
    physical_batch: PhysicalBatchFlag = None
    num_workers: Annotated[int, typer.Option(help="Processes that read the next samples; 0: this one.")] = 0
    user_column: UserColumnFlag = None
    sample: SampleFlag = "rows"
    rows_per_user: RowsPerUserFlag = None
    cap: CapFlag = None
    sampling: SamplingFlag = "poisson"
    max_batch: MaxBatchFlag = None
    secure_mode: SecureModeFlag = True
    cuda_graphs: CudaGraphsFlag = True
    engine: EngineFlag = "bookkeeping"
    seed: SeedFlag = 0
    reproducible: ReproducibleFlag = False
    budget: BudgetFlag = None
    derived_from: DerivedFlag = None
    slot: SlotFlag = None
    device: DeviceFlag = None
    out: Annotated[Path | None, typer.Option(help="Folder for the run (default: runs/MODEL-METHOD-TIME).")] = None
    resume: ResumeFlag = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only: no plan, no progress.")] = False
    as_json: Json = False


@with_method_options
@with_flags(FineTuneFlags)
def finetune(context: typer.Context, flags: FineTuneFlags, **method_options: object) -> None:
    """Fine-tune a language model of yours privately, on a file of texts.

    The run's folder is that of `vestige train`, with `adapter/` (or `model/`) as Hugging Face saves it, and a model
    card in it. A row of the file is what is protected; its number of rows, --labels and --max-length are public.

    Examples:

        vestige finetune --model gpt2 --data reviews.jsonl --label-column label --labels neg,pos --pad-token
        '<|endoftext|>' --lora 8 --epsilon 8 --out my-run

        vestige finetune --model llama --data letters.csv --text-column body --lora 16 --epsilon 8 --max-length 512

        vestige finetune --resume my-run
    """
    from vestige.finetuning.job import FineTuning, complete, load, start
    from vestige.tf32 import default_device

    if flags.resume is not None:
        there: dict[str, object] = {"data": flags.data, "test": flags.test, "device": flags.device}
        there |= {
            "physical_batch": part_size(flags.physical_batch),
            "num_workers": flags.num_workers,
            "budget": flags.budget,
        }
        job = continued(context, flags.resume, ("resume", "quiet", "as_json"), load, there)
    else:
        if flags.model is None or flags.data is None:
            raise ValueError(
                "model=None: give a checkpoint's folder" if flags.model is None else "data=None: give a file"
            )
        chosen = {**method_options, "balance": flags.balance}
        settings = named_alike(flags, FineTuning) | {
            "labels": _several(flags.labels),
            "lora_targets": _several(flags.lora_targets),
            "options": {name: value for name, value in chosen.items() if value is not None},
            "lr": None if flags.lr is None else learning_rate(flags.lr),
            "rows_per_user": most_rows(flags.rows_per_user),
            "cap": most_rows(flags.cap, "cap"),
            "noise": arithmetic(flags.secure_mode),
            "engine": engine_of(flags.engine, flags.cuda_graphs),
            "physical_batch": part_size(flags.physical_batch),
            "device": flags.device or default_device(),
        }
        job = FineTuning(**settings)
    path = flags.resume or flags.out or dated_folder(f"{Path(job.model).name}-{job.method}")
    checkpoint, public, training = start(job, path, resume=flags.resume is not None)
    if not flags.quiet:
        _announce(job, training)
    pace = Pace(training.expected_batch * job.max_length)
    with step_progress(not (flags.as_json or flags.quiet)) as bar, graceful_stop() as stopping:
        show = bar(job.aim, training.plan.steps)

        def on_record(record: Record) -> bool:
            pace.count()
            show(record.step + 1, f"{pace.tokens:,.0f} tokens/s", record.epsilon, training.plan.epsilon)
            return not stopping()

        result = complete(job, checkpoint, public, training, on_record)
    saved = None if result.stopped == "interrupted" else str(path / checkpoint.kind)
    if flags.as_json:
        print_json({**result.to_json(), "saved": saved, "padded_tokens_per_second": round(pace.tokens, 1)})
    else:
        _summarise(result, saved, pace)
    leave_if_interrupted(result, "finetune", path)


def _several(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(","))


class Pace:
    """Tokens per second, as a sample of the expected size has them, padded to the public length: how many were written,
    and by how many, is private. The first step, which prepares the others, is left out."""

    def __init__(self, each: float) -> None:
        self._each, self._begin, self.tokens = each, 0.0, 0.0
        self._steps = -1

    def count(self) -> None:
        self._steps += 1
        if self._steps == 0:
            self._begin = time.perf_counter()
        else:
            self.tokens = self._steps * self._each / (time.perf_counter() - self._begin)


def _announce(job: FineTuning, training: Training) -> None:
    """Print on standard error what was chosen and what is not private."""
    plan, trained = training.plan, training.layout.size
    whole = sum(parameter.numel() for parameter in training.model.parameters())
    stderr.print(
        f"{job.method} on {Path(job.model).name} for {job.aim}: {trained:,} of {whole:,} parameters, noise multiplier "
        f"{plan.noise_multiplier:.4g}, rate {plan.sample_rate:.4g}, {plan.steps} steps, delta {plan.delta:g}, learning "
        f"rate {plan.lr:.4g}",
        markup=False,
    )
    warn_of(job)


def _summarise(result: RunResult, saved: str | None, pace: Pace) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    if result.accuracy is not None:
        table.add_row("test accuracy", f"{result.accuracy:.1%}")
    if result.perplexity is not None:
        table.add_row("test perplexity", f"{result.perplexity:.4g}")
    add_privacy(table, result.statement, result.assumptions)
    table.add_row("steps", f"{result.steps} ({result.stopped})")
    table.add_row("padded tokens", f"{pace.tokens:,.0f} a second")
    table.add_row("written to", str(result.run))
    if saved is not None:
        table.add_row("to load", f"{saved} (its README.md is a model card)")
    stdout.print(table)
