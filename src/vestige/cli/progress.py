"""How does a terminal fill a comparison's folder, and show what came out?"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from vestige.cli.errors import INTERRUPTED
from vestige.cli.terminal import answers, ctrl_c_also_by_sigterm, notes, print_json
from vestige.compare.summary import price_lines, summarised

Workers = Annotated[int | None, typer.Option(help="Processes (default: one per core, one in all on a GPU).")]
Engine = Annotated[str, typer.Option(help="local (processes) or ray (a Ray cluster).")]
Stacking = Annotated[str, typer.Option(help="auto: train runs that fit together as one stack; off: one after another.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")]
Address = Annotated[str | None, typer.Option(help="Address of the Ray cluster (default: a local one).")]


def check_tasks(specification: Any, elsewhere: str | None = None) -> None:
    """A task that no run could load here is refused before there is a folder, or a record that says so."""
    from vestige import tasks

    for problem in specification.problems:
        tasks.check(problem.task, elsewhere or problem.data)


def check_place(engine: str, address: str | None, workers: int | None, stack: str, alone: bool) -> None:
    """Where runs are made, checked before there is a folder."""
    if stack not in ("auto", "off"):
        raise ValueError(f"stack={stack!r} must be auto or off")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine={engine!r} is unknown; choose local or ray")
    if address is not None and engine != "ray":
        raise ValueError(f"ray_address={address!r} goes with --engine ray")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be a whole number from 1 up")
    if alone and (engine != "local" or (workers or 1) > 1):
        raise ValueError("this preset times its runs, one after another here: leave --workers and --engine out")


def fill(
    path: Path,
    specification: Any,
    engine: str,
    address: str | None,
    workers: int | None,
    stack: str,
    device: str | None,
    as_json: bool,
    data: dict[str, str] | None = None,
    alone: bool = False,
) -> Any:
    """Make the runs of a comparison's folder that are not on record; `alone` gives each run the machine to itself."""
    from vestige.compare import runner
    from vestige.compare.execute import Place
    from vestige.devices import check_device, default_device

    check_place(engine, address, workers, stack, alone)
    where = device or default_device()
    check_device(where)
    usual = 1 if where != "cpu" or alone else max(1, os.cpu_count() or 1)
    hands = workers if workers is not None else usual
    place = Place(where, data or {}, stack == "auto" and not alone)
    try:
        with ctrl_c_also_by_sigterm(), progress(not as_json) as watch:
            return runner.compare(
                path, specification, place=place, engine=engine, workers=hands, address=address, watch=watch
            )
    except KeyboardInterrupt:
        notes.print(f"interrupted; continue with: vestige compare --resume {path}", markup=False)
        sys.exit(INTERRUPTED)


@contextmanager
def progress(visible: bool) -> Iterator[Any]:
    """A live line on standard error: runs done, time left, and the best row so far."""
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=notes, disable=not (visible and notes.is_terminal)) as shown:
        line = shown.add_task("runs", total=None, left="", best="")

        def watch(status: Any) -> None:
            left = (
                ""
                if status.seconds_left is None
                else f"{int(status.seconds_left // 60)}:{int(status.seconds_left % 60):02d} left"
            )
            failed = f", {status.failed} failed" if status.failed else ""
            best = f"best so far: {status.best}" if status.best else ""
            shown.update(line, completed=status.done, total=status.total, left=left + failed, best=best)

        yield watch


def finish(home: Any, as_json: bool) -> None:
    summary = summarised(home)
    if as_json:
        print_json(summary)
    else:
        show(summary)
        answers.print(f"written to {home.path}; for the whole story: vestige report {home.path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def show(summary: dict[str, Any]) -> None:
    """One table per task and budget: each method tuned and at the automatic rate, and what may be said of it."""
    sections: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    tested = any(row["p_holm"] is not None for row in summary["rows"])
    for row in summary["rows"]:
        sections.setdefault((row["task"], row["budget"]), {}).setdefault(row["method"], {})[row["rate"]] = row
    for (task, budget), methods in sections.items():
        kinds = [kind for kind in ("tuned", "auto", "given") if any(kind in each for each in methods.values())]
        table = Table("method", *(f"{kind} rate" for kind in kinds))
        table.title, table.title_justify = f"{task} at {budget}", "left"
        for method, found in methods.items():
            table.add_row(method, *(_cell(found.get(kind), tested) for kind in kinds))
        answers.print(table)
    answers.print(f"test accuracy in percent ± its 95% interval; {_marks(summary)}", markup=False)
    for row in summary["rows"]:
        if row["sentence"].startswith(("better", "worse")):
            answers.print(f"{row['method']} on {row['task']} ({row['rate']}): {row['sentence']}", markup=False)
    for line in price_lines(summary["prices"]):
        answers.print(line, markup=False)
    for row in summary["choices"]:
        if row["at_edge"]:
            notes.print(
                f"note: the best rate of {row['method']} at {row['budget']} on {row['task']} lies at the edge of the "
                f"grid: give a wider one",
                markup=False,
            )
    lines = Counter(f"{each['label']} on {each['task']}: {each['error']}" for each in summary["failed"])
    for line, count in lines.items():
        notes.print(f"failed ({count} runs): {line}", markup=False)
    for name, why in summary["unreadable"].items():
        notes.print(f"left out: runs/{name} ({why})", markup=False)


def _marks(summary: dict[str, Any]) -> str:
    """What the marks say, or why there are none."""
    baseline, rows = summary["baseline"], summary["rows"]
    if any(row["p_holm"] is not None for row in rows):
        untested = any(row["p_holm"] is None and row["method"] != baseline and row["mean"] is not None for row in rows)
        rest = "; ?: not tested" if untested else ""
        return f"▲ better, ▼ worse than {baseline} (paired by seed, Holm); unmarked: not distinguishable{rest}"
    if not any(row["method"] == baseline and row["mean"] is not None for row in rows):
        return f"nothing is tested, because no run of the baseline {baseline} is here; --baseline names another"
    return "nothing is tested: that takes another method, and two seeds of each or more"


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
