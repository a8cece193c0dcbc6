"""Which options do all commands that train one model have? Each is defined once, with its help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vestige.cli.terminal import LARGEST_SEED

EpsilonFlag = Annotated[float | None, typer.Option(help="Privacy budget: the noise follows from it.")]
DeltaFlag = Annotated[float, typer.Option(help="Allowed failure probability, below 1/N.")]
NoiseMultiplierFlag = Annotated[float | None, typer.Option(help="Accounted noise multiplier: epsilon follows from it.")]
PhysicalBatchFlag = Annotated[
    str | None,
    typer.Option(
        "--max-physical-batch-size",
        help="Split each sampled batch into parts of this size; auto: the largest that fits.",
    ),
]
BalanceFlag = Annotated[
    str | None,
    typer.Option(
        help="Steps of each layer: plain (the same noise in all), or relative (the same share of its initial weights)."
    ),
]
SamplingFlag = Annotated[
    str,
    typer.Option(
        help="poisson; allocation (each example once an epoch, in a step drawn uniformly: cheaper over few epochs); "
        "truncated (poisson, at most --max-batch kept); shuffled trains too but has no epsilon."
    ),
]
MaxBatchFlag = Annotated[int | None, typer.Option(help="Most examples that a truncated sample keeps.")]
SecureModeFlag = Annotated[
    bool,
    typer.Option(
        "--secure-mode/--no-secure-mode",
        help="Add noise in integers, whose last bit tells nothing, or in float32, which rests on one more assumption.",
    ),
]
EngineFlag = Annotated[
    str, typer.Option(help="bookkeeping (fast), or reference (one by one); same results.", hidden=True)
]
CudaGraphsFlag = Annotated[
    bool, typer.Option("--cuda-graphs/--no-cuda-graphs", help="On a GPU, capture steps as CUDA graphs; same results.")
]
SeedFlag = Annotated[
    int,
    typer.Option(
        help="Fixes public randomness only: initial weights. Never noise or sampling.", min=0, max=LARGEST_SEED
    ),
]
ReproducibleFlag = Annotated[
    bool, typer.Option("--reproducible", help="Fix noise and sampling too. Protects nobody: for tests.")
]
DeviceFlag = Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")]
ResumeFlag = Annotated[
    Path | None,
    typer.Option(help="Continue the interrupted run in this folder; may be combined with --data and --device."),
]


DerivedFlag = Annotated[
    str | None,
    typer.Option(
        help="The file whose rows the data were made of, where the book cannot know them by their own.",
        rich_help_panel="Budget of the dataset",
    ),
]
BudgetFlag = Annotated[
    str | None,
    typer.Option(
        help="The book of the dataset (`vestige budget open`), or BOOK#RESERVATION: charged before each question.",
        envvar="VESTIGE_BUDGET",
        rich_help_panel="Budget of the dataset",
    ),
]
SlotFlag = Annotated[
    str | None, typer.Option(help="Of a book of slots: which one.", rich_help_panel="Budget of the dataset")
]
UserColumnFlag = Annotated[
    str | None,
    typer.Option(
        help="The column that names whose each row is (of a FILE.npz: an array): all rows of one user are hidden.",
        rich_help_panel="Users",
    ),
]
SampleFlag = Annotated[
    str,
    typer.Option(
        help="rows (each joins and is clipped by itself), or users (the mean of one's rows is clipped once).",
        rich_help_panel="Users",
    ),
]
RowsPerUserFlag = Annotated[
    str | None,
    typer.Option(
        help="Of sampled rows, the most of one user: a number, median, or a folder of `vestige bound` "
        "[default: all that anybody has].",
        rich_help_panel="Users",
    ),
]
CapFlag = Annotated[
    str | None,
    typer.Option(
        help="The most rows of one user in one step: a number, or a folder of `vestige bound`.", rich_help_panel="Users"
    ),
]


PANELS = {
    "Model and data": "standardise prior features head_steps head_lr bfloat16 seed normalise moments_noise "
    "moments_bound max_length tokens_per_example pad_token lora lora_targets freeze num_workers",
    "Steps": "lr optimizer average augment groups split share balance",
    "Sampling and noise": "sampling max_batch secure_mode paper_sigma reproducible",
    "Evaluation and logs": "test evaluate_every evaluate evaluate_error audit log_to nonprivate_logs "
    "nonprivate_transcript quiet",
    "Machine": "physical_batch cuda_graphs device resume trust",
}
"""The help panel of each option of commands that train, unless the option names one itself."""


def grouped(parameters: Sequence[Any]) -> None:
    """Sort a command's options into panels, so that each fits a screen."""
    places = {name: panel for panel, names in PANELS.items() for name in names.split()}
    for each in parameters:
        if getattr(each, "rich_help_panel", None) is None and each.name in places:
            each.rich_help_panel = places[each.name]


def most_rows(text: str | None, name: str = "rows_per_user") -> int | str | None:
    """The most rows of one user that a flag asks for; a folder stays as it is named."""
    if text is None or (text, name) == ("median", "rows_per_user") or (Path(text) / "bound.json").is_file():
        return text
    try:
        return int(text)
    except ValueError:
        other = ", 'median'" if name == "rows_per_user" else ""
        raise ValueError(f"{name}={text!r} must be a whole number{other}, or a folder of `vestige bound`") from None


def arithmetic(secure_mode: bool) -> str:
    """What run folders call it."""
    return "lattice" if secure_mode else "float32"


def engine_of(engine: str, cuda_graphs: bool) -> str:
    """What run folders call it."""
    return engine if cuda_graphs or engine != "bookkeeping" else "unrecorded"


def learning_rate(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"lr={text!r} must be a number or 'auto'") from None


def part_size(text: str | None) -> int | Literal["auto"] | None:
    """The physical batch that a flag asks for."""
    if text is None or text == "auto":
        return None if text is None else "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"max_physical_batch_size={text!r} must be a whole number from 1 up, or 'auto'") from None
