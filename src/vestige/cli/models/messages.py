"""What do all commands that train one model print? What is not private, what was spent, how to resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.markup import escape
from rich.table import Table

from vestige.assumptions import lines
from vestige.cli.errors import INTERRUPTED, given, refuse_others
from vestige.cli.terminal import meant, stderr

if TYPE_CHECKING:
    from vestige.finetuning.job import FineTuning
    from vestige.run_records import RunResult, Statement
    from vestige.training.job import Job
    from vestige.training.run_folder import RunFolder

J = TypeVar("J", "Job", "FineTuning")
NOT_PRIVATE = "NOT PRIVATE: --reproducible makes the noise predictable, and predictable noise protects nobody"


def continued(
    context: typer.Context,
    resume: Path,
    others: tuple[str, ...],
    load: Callable[[RunFolder], J],
    elsewhere: Mapping[str, Any],
) -> J:
    """The job of an interrupted run. Only `others` may be combined with --resume, and `elsewhere`: the device, the
    physical batch size and the paths of the same data."""
    from vestige.training.run_folder import RunFolder

    refuse_others(context, (*others, *elsewhere), "a run continues with the options it was started with")
    folder = RunFolder(resume)
    job = load(folder)
    if folder.result() is not None:
        raise ValueError(f"resume={str(resume)!r} is already finished; verify it with: vestige verify {resume}")
    return replace(job, **{name: value for name, value in elsewhere.items() if given(context, name)})


def warn_of(job: Job | FineTuning) -> None:
    """Print on standard error what of a job is not private, or has no epsilon."""
    if job.reproducible:
        stderr.print(NOT_PRIVATE, markup=False)
    if job.sampling == "shuffled":
        stderr.print(f"NO EPSILON: no theorem covers {job.sampling} sampling", markup=False)


def add_privacy(table: Table, stated: Statement, assumptions: Sequence[Mapping[str, object]]) -> None:
    """The rows on privacy of a summary, with every assumption."""
    if stated.epsilon is not None:
        table.add_row(
            "privacy",
            f"epsilon {stated.epsilon:.4g} at delta {stated.delta:g} ({stated.accountant}; "
            f"by Renyi {stated.epsilon_rdp:.4g})",
        )
        for line in meant(vars(stated), "user" if "user" in stated.adjacency else "example"):
            table.add_row("", line)
    else:
        table.add_row("privacy", "none: " + "; ".join(stated.reasons))
    if stated.epsilon_if_noise_were_secret is not None:
        table.add_row("", f"epsilon would be {stated.epsilon_if_noise_were_secret:.4g} if the noise were secret")
    table.add_row("neighbours", stated.adjacency)
    for line in lines(assumptions):
        status, _, words = line.partition(": ")
        table.add_row(status, escape(words))


def leave_if_interrupted(result: RunResult, command: str, path: Path) -> None:
    if result.stopped == "interrupted":
        stderr.print(
            f"interrupted after step {result.steps}; continue with: vestige {command} --resume {path}", markup=False
        )
        sys.exit(INTERRUPTED)
