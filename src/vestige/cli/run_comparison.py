"""How are the runs of a comparison made from the terminal? With a live progress bar, and tables at the end."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from vestige.cli.errors import INTERRUPTED
from vestige.cli.terminal import print_json, sigterm_as_ctrl_c, stderr, stdout

if TYPE_CHECKING:  # a command that only prints its help need not import torch
    from vestige.budget.spending import Budget
    from vestige.compare.folder import ComparisonFolder
    from vestige.compare.runner import OnProgress, Status
    from vestige.compare.specification import Specification

WorkersFlag = Annotated[int | None, typer.Option(help="Processes (default: one per core, one in all on a GPU).")]
EngineFlag = Annotated[str, typer.Option(help="local (processes) or ray (a Ray cluster).")]
StackFlag = Annotated[
    str, typer.Option(help="auto: train runs that fit together as one stack; off: one after another.")
]
DeviceFlag = Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")]
AddressFlag = Annotated[str | None, typer.Option(help="Address of the Ray cluster (default: a local one).")]


@dataclass(frozen=True)
class Execution:
    """Where and how runs are executed, as given by the flags."""

    engine: str = "local"
    address: str | None = None
    workers: int | None = None
    stack: str = "auto"
    device: str | None = None
    alone: bool = False
    """Whether runs are made one at a time: only then are their measured seconds meaningful."""

    def check(self) -> None:
        """Refuse impossible settings; called before the folder is created."""
        if self.stack not in ("auto", "off"):
            raise ValueError(f"stack={self.stack!r} must be auto or off")
        if self.engine not in ("local", "ray"):
            raise ValueError(f"engine={self.engine!r} is unknown; choose local or ray")
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"ray_address={self.address!r} goes with --engine ray")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers} must be a whole number from 1 up")
        if self.alone and (self.engine != "local" or (self.workers or 1) > 1):
            raise ValueError("this preset times its runs, one after another here: leave --workers and --engine out")


def check_tasks(specification: Specification, elsewhere: str | None = None) -> None:
    """Refuse a task that cannot be loaded here before a folder is created or failed runs are recorded."""
    from vestige import tasks

    for problem in specification.problems:
        tasks.check(problem.task, elsewhere or problem.data)


def make_runs(
    path: Path,
    specification: Specification | None,
    execution: Execution,
    *,
    visible: bool,
    data: dict[str, str] | None = None,
    budget: Budget = None,
) -> ComparisonFolder:
    """Make the runs of a comparison that have no record in its folder yet."""
    from vestige.compare import runner
    from vestige.compare.execute_run import Machine
    from vestige.tf32 import check_device, default_device

    execution.check()
    device = execution.device or default_device()
    check_device(device)
    usual = 1 if device != "cpu" or execution.alone else max(1, os.cpu_count() or 1)
    machine = Machine(device, data or {}, execution.stack == "auto" and not execution.alone)
    try:
        with sigterm_as_ctrl_c() as raise_if_asked, run_progress(visible) as show:

            def on_progress(status: Status) -> None:
                raise_if_asked()
                show(status)

            return runner.compare(
                path,
                specification,
                machine=machine,
                engine=execution.engine,
                workers=execution.workers if execution.workers is not None else usual,
                address=execution.address,
                budget=budget,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        stderr.print(f"interrupted; continue with: vestige compare --resume {path}", markup=False)
        sys.exit(INTERRUPTED)


@contextmanager
def run_progress(visible: bool) -> Iterator[OnProgress]:
    """A live line on standard error: runs done, time left, and the best row so far."""
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=stderr, disable=not (visible and stderr.is_terminal)) as shown:
        line = shown.add_task("runs", total=None, left="", best="")

        def on_progress(status: Status) -> None:
            left = (
                ""
                if status.seconds_left is None
                else f"{int(status.seconds_left // 60)}:{int(status.seconds_left % 60):02d} left"
            )
            failed = f", {status.failed} failed" if status.failed else ""
            best = f"best so far: {status.best}" if status.best else ""
            shown.update(line, completed=status.done, total=status.total, left=left + failed, best=best)

        yield on_progress


def finish(folder: ComparisonFolder, as_json: bool) -> None:
    """Print the results of a comparison; exit code 1 if no run completed."""
    from vestige.compare.summary import summarised

    summary = summarised(folder)
    if as_json:
        print_json(summary)
    else:
        show(summary)
        stdout.print(f"written to {folder.path}; for the whole story: vestige report {folder.path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def show(summary: dict[str, Any]) -> None:
    """Print a table per task and budget (each method tuned and at the automatic rate), then differences and costs."""
    from vestige.compare.summary import price_lines

    sections: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    tested = any(_verdict(row) for row in summary["rows"])
    for row in summary["rows"]:
        sections.setdefault((row["task"], row["budget"]), {}).setdefault(row["method"], {})[row["rate"]] = row
    for (task, budget), methods in sections.items():
        kinds = [kind for kind in ("tuned", "auto", "given") if any(kind in each for each in methods.values())]
        table = Table("method", *(f"{kind} rate" for kind in kinds))
        table.title, table.title_justify = f"{task} at {budget}", "left"
        for method, found in methods.items():
            table.add_row(method, *(_cell(found.get(kind), tested) for kind in kinds))
        stdout.print(table)
    stdout.print(f"test accuracy in percent ± its 95% interval; {_marks(summary)}", markup=False)
    for row in summary["rows"]:
        if row["sentence"].startswith(("better", "worse")):
            stdout.print(f"{row['method']} on {row['task']} ({row['rate']}): {row['sentence']}", markup=False)
    for line in price_lines(summary["prices"]):
        stdout.print(line, markup=False)
    edges = Counter((row["method"], row["budget"], row["task"]) for row in summary["choices"] if row["at_edge"])
    chosen = Counter((row["method"], row["budget"], row["task"]) for row in summary["choices"])
    for (method, budget, task), count in edges.items():
        if 2 * count > chosen[method, budget, task]:
            often = f" in {count} of {chosen[method, budget, task]} choices" if chosen[method, budget, task] > 1 else ""
            stderr.print(
                f"note: the best rate of {method} at {budget} on {task} lies at the edge of the grid{often}: give a "
                "wider one",
                markup=False,
            )
    lines = Counter(f"{each['label']} on {each['task']}: {each['error']}" for each in summary["failed"])
    for line, count in lines.items():
        stderr.print(f"failed ({count} runs): {line}", markup=False)
    for name, why in summary["unreadable"].items():
        stderr.print(f"left out: runs/{name} ({why})", markup=False)


def _marks(summary: dict[str, Any]) -> str:
    """What the marks in the tables mean, or why there are none."""
    baseline, rows = summary["baseline"], summary["rows"]
    others = [row for row in rows if row["method"] != baseline and row["mean"] is not None]
    if not any(row["method"] == baseline and row["mean"] is not None for row in rows):
        return f"nothing is tested, because no run of the baseline {baseline} is here; --baseline names another"
    if not any(_verdict(row) for row in others):
        if not summary["tested"]:
            return "nothing is tested: that takes another method and several seeds of each, with a choice for each seed"
        return (
            f"too few seeds to tell anything apart: {summary['tested']} rows take {summary['seeds_to_tell']} (exact "
            "paired test, Holm)"
        )
    rest = "; ?: not tested" if any(_verdict(row) is None for row in others) else ""
    return (
        f"▲ better, ▼ worse than {baseline} (exact test paired by seed, Holm over {summary['tested']} rows); unmarked: "
        f"not distinguishable{rest}"
    )


def _verdict(row: dict[str, Any]) -> str | None:
    """The first word of a row that was tested with seeds enough."""
    word = str(row["sentence"].split()[0])
    return word if word in ("better", "worse", "not") else None


def _cell(row: dict[str, Any] | None, tested: bool) -> str:
    if row is None or row["mean"] is None:
        return "-"
    half = f" ± {100 * (row['high'] - row['mean']):.1f}" if row["high"] is not None else ""
    mark = {"better": " ▲", "worse": " ▼", "not": "", "the": ""}.get(row["sentence"].split()[0], " ?" if tested else "")
    if row["epsilon"] is None:
        spent = " (no epsilon)"
    else:
        spent = "" if row["budget"].startswith("epsilon") else f", epsilon {row['epsilon']:.3g}"
    return f"{100 * row['mean']:.1f}{half}{mark}{spent}"
