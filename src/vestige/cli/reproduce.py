"""How is a paper's table reproduced from the terminal? `vestige presets` and `vestige reproduce`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vestige.cli.progress import (
    AddressFlag,
    DeviceFlag,
    EngineFlag,
    Execution,
    StackFlag,
    WorkersFlag,
    check_tasks,
    make_runs,
    show,
)
from vestige.cli.terminal import Json, print_json, stdout


def presets(as_json: Json = False) -> None:
    """List the tables and figures of the papers that `vestige reproduce` makes again."""
    from vestige.compare.presets import PRESETS

    if as_json:
        rows = [{"name": p.name, "what": p.what, "paper": p.paper, "missing": p.missing()} for p in PRESETS.values()]
        print_json({"presets": rows})
        return
    table = Table("preset", "what the paper shows", "paper", "state")
    for preset in PRESETS.values():
        missing = preset.missing()
        table.add_row(preset.name, preset.what, preset.paper, f"without {', '.join(missing)}" if missing else "ready")
    stdout.print(table)


def reproduce(
    name: Annotated[str, typer.Argument(help="A preset of `vestige presets`.")],
    data: Annotated[str | None, typer.Option(help="Folder with the datasets.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Few steps and seeds, to see that it works.")] = False,
    engine: EngineFlag = "local",
    ray_address: AddressFlag = None,
    workers: WorkersFlag = None,
    stack: StackFlag = "auto",
    device: DeviceFlag = None,
    out: Annotated[Path | None, typer.Option(help="Folder (default: runs/NAME or runs/NAME-small).")] = None,
    as_json: Json = False,
) -> None:
    """Make a table or figure of a paper again, and set ours beside the printed one.

    Started again, it continues where it was.

    Examples:

        vestige reproduce fo-table3 --data data/

        vestige reproduce fo-fig2 --data data/ --small
    """
    from vestige.compare import presets as known
    from vestige.compare.folder import ComparisonFolder
    from vestige.compare.summary import summarised
    from vestige.files import write_json

    preset = known.find(name)
    specification = preset.specification(data, small=small)
    check_tasks(specification)
    execution = Execution(engine, ray_address, workers, stack, device, alone=preset.timed)
    execution.check()
    path = out or Path("runs") / (f"{name}-small" if small else name)
    ComparisonFolder(path).create(specification)
    write_json(path / "preset.json", {"preset": name, "small": small})
    folder = make_runs(path, specification, execution, visible=not as_json)
    summary = summarised(folder)
    beside = known.beside(preset, folder.records().values())
    if as_json:
        print_json({**summary, "preset": name, "small": small, "beside": beside, "notes": list(preset.notes)})
    else:
        show(summary)
        _show_paper(preset, beside, small)
        stdout.print(f"written to {path}; for the whole story: vestige report {path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def _show_paper(preset: Any, beside: Sequence[dict[str, Any]], small: bool) -> None:
    """Print the paper's values beside ours, and what the paper does not specify."""
    if beside:
        table = Table("quantity", "printed", "ours", "difference", "ours, lr auto", "ours, lr auto, one epsilon")
        table.title, table.title_justify = f"{preset.paper}: {preset.what}", "left"
        for row in beside:
            table.add_row(*(value if isinstance(value, str) else _plain(value) for value in row.values()))
        stdout.print(table)
    for line in preset.notes:
        stdout.print(f"assumed: {line}", markup=False)
    missing = preset.missing()
    if missing:
        stdout.print(f"left out, because this version has no such method: {', '.join(missing)}", markup=False)
    if small:
        stdout.print("small: too few steps and seeds to compare with the paper", markup=False)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
