"""How is a paper's table reproduced from the terminal? `vestige presets` and `vestige reproduce`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vestige.cli.errors import refuse_if_given
from vestige.cli.run_comparison import (
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
from vestige.cli.terminal import Json, graceful_stop, print_json, stdout, step_progress

if TYPE_CHECKING:
    from vestige.audit.published_epsilons import Study
    from vestige.compare.paper_presets import Preset
    from vestige.compare.specification import Specification

EXECUTION = ("engine", "ray_address", "workers", "stack", "seeds", "reproducible")
"""Options of presets that are made of runs."""


def presets(as_json: Json = False) -> None:
    """List the tables and figures of the papers that `vestige reproduce` makes again."""
    from vestige.audit import dpsgd_br_table3 as table3
    from vestige.audit.published_epsilons import READINGS, READINGS_WHAT, STUDIES
    from vestige.compare import dpsgd_br_figure1 as figure1
    from vestige.compare.paper_presets import PRESETS

    rows: list[dict[str, Any]]
    rows = [{"name": p.name, "what": p.what, "paper": p.paper, "missing": p.missing()} for p in PRESETS.values()]
    rows.append({"name": table3.NAME, "what": table3.WHAT, "paper": table3.PAPER, "missing": []})
    rows += [{"name": s.name, "what": s.what, "paper": s.paper, "missing": []} for s in STUDIES.values()]
    rows.append({"name": READINGS, "what": READINGS_WHAT, "paper": table3.PAPER, "missing": []})
    rows.append({"name": figure1.NAME, "what": figure1.WHAT, "paper": figure1.PAPER, "missing": []})
    if as_json:
        print_json({"presets": rows})
        return
    table = Table("preset", "what the paper shows", "paper", "state")
    for row in rows:
        missing = row["missing"]
        table.add_row(row["name"], row["what"], row["paper"], f"without {', '.join(missing)}" if missing else "ready")
    stdout.print(table)


def reproduce(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A preset of `vestige presets`.")],
    data: Annotated[str | None, typer.Option(help="Folder with the datasets.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Few steps and seeds, to see that it works.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Seeds of each run (default: as many as the paper's).")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fix noise and sampling. Protects nobody: for tests.")
    ] = False,
    engine: EngineFlag = "local",
    ray_address: AddressFlag = None,
    workers: WorkersFlag = None,
    stack: StackFlag = "auto",
    device: DeviceFlag = None,
    out: Annotated[Path | None, typer.Option(help="Folder (default: runs/NAME or runs/NAME-small).")] = None,
    as_json: Json = False,
) -> None:
    """Make a table or figure of a paper again, and set ours beside the printed one.

    The preset is the paper's protocol: it cuts the examples that the protocol takes from a whole dataset, and says
    which rows these are. Started again, it continues where it was.

    Examples:

        vestige reproduce fo-table3 --data data/

        vestige reproduce fo-fig2 --data data/ --small

        vestige reproduce br-table3 --small

        vestige reproduce br-lower-bound
    """
    from vestige.audit import dpsgd_br_table3 as table3
    from vestige.audit.published_epsilons import READINGS, STUDIES
    from vestige.compare import dpsgd_br_figure1 as figure1
    from vestige.compare import paper_presets as known
    from vestige.compare.folder import ComparisonFolder
    from vestige.compare.summary import summarised
    from vestige.files import write_json

    if name in STUDIES or name == READINGS:
        why = f"{name} is computed from the paper's settings, without data or runs"
        refuse_if_given(context, (*EXECUTION, "data", "small", "device", "out"), why)
        if name == READINGS:
            _readings(as_json)
        else:
            _lower_bounds(STUDIES[name], as_json)
        return
    path = out or Path("runs") / (f"{name}-small" if small else name)
    if name == figure1.NAME:
        why = f"{name} trains on the bundled digits, one run after another, in this process"
        refuse_if_given(context, (*(each for each in EXECUTION if each != "seeds"), "data", "device"), why)
        _landscape(small, seeds, path, as_json)
        return
    if name == table3.NAME:
        why = f"{name} trains its shadow models one after another, in this process"
        refuse_if_given(context, EXECUTION, why)
        _membership(data, small, device, path, as_json)
        return
    preset = known.find(name)
    specification = preset.specification(data, small=small, seeds=seeds, reproducible=reproducible)
    check_tasks(specification)
    execution = Execution(engine, ray_address, workers, stack, device, alone=preset.timed)
    execution.check()
    taken = known.taken(preset, specification, small)
    assumed = preset.assumed(specification, small)
    ComparisonFolder(path).create(specification)
    write_json(path / "preset.json", {"preset": name, "small": small, "assumed": assumed, "taken": taken})
    if not as_json:
        for each in taken.values():
            stdout.print(f"rows: {each['line']}", markup=False)
    folder = make_runs(path, specification, execution, visible=not as_json)
    summary = summarised(folder)
    beside = known.beside(preset, folder.records().values())
    if preset.nonprivate_epochs:
        beside += _without_privacy(preset, specification, small, device, path)
    if as_json:
        facts = {"preset": name, "small": small, "beside": beside, "notes": assumed, "taken": taken}
        print_json({**summary, **facts})
    else:
        show(summary)
        _show_paper(preset, beside, assumed)
        stdout.print(f"written to {path}; for the whole story: vestige report {path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def _without_privacy(
    preset: Preset, specification: Specification, small: bool, device: str | None, path: Path
) -> list[dict[str, object]]:
    """NOT PRIVATE: each dataset's column without privacy, beside the printed one; made once, and kept."""
    import copy

    from vestige.audit.inference import NON_PRIVATE, nonprivate_fit
    from vestige.compare.execute_run import Source, task_of
    from vestige.compare.paper_presets import published
    from vestige.files import read_json, write_json
    from vestige.tf32 import default_device
    from vestige.training.loop import accuracy

    file = path / "nonprivate.json"
    found: dict[str, float] = read_json(file) if file.exists() else {}
    printed, rows = published()["dpsgd_br"]["table2_accuracy_percent"], []
    for problem in specification.problems:
        if problem.task not in found:
            task = task_of(Source(problem.task, problem.data, specification.subset))
            model, rate = copy.deepcopy(task.model).to(device or default_device()), 0.01
            steps = 3 if small else round(preset.nonprivate_epochs / rate)
            nonprivate_fit(model, task.loss, task.train, rate, steps, "auto", 0)
            found[problem.task] = 100 * accuracy(model, task.test)
            write_json(file, found)
        name, ours = problem.task.partition("-")[0], found[problem.task]
        row = {"quantity": f"{name}, {NON_PRIVATE}", "printed": printed[name][NON_PRIVATE], "ours": ours}
        rows.append({**row, "difference": ours - row["printed"], "ours_at_auto": None, "ours_at_equal_epsilon": None})
    return rows


def _lower_bounds(study: Study, as_json: bool) -> None:
    """Print the epsilon that an adversary proves at a paper's own settings, beside the paper's claim."""
    from vestige.compare.paper_presets import published

    rows = []
    table = Table("dataset", "updates", "claimed", "at least", "at least, if all were kept", "verdict")
    table.title, table.title_justify = f"{study.paper}: {study.what}", "left"
    for row in study.rows(published()):
        rows.append(row)
        numbers = (f"{row[key]:.3f}" for key in ("claimed", "epsilon", "without_rejection"))
        table.add_row(
            str(row["dataset"]), str(row["updates"]), *numbers, "refuted" if row["refuted"] else "not refuted"
        )
    if as_json:
        print_json({"preset": study.name, "paper": study.paper, "rows": rows, "notes": list(study.notes)})
        return
    stdout.print(table)
    for line in study.notes:
        stdout.print(f"assumed: {line}", markup=False)


def _readings(as_json: bool) -> None:
    """Print what DPSGD-BR's accounting allows by decay and batch of the loss test, and what Figure 4 may count."""
    from vestige.audit import dpsgd_br_table3 as table3
    from vestige.audit import published_epsilons as epsilons
    from vestige.compare.paper_presets import published

    rows = list(epsilons.readings(published()))
    if as_json:
        print_json(
            {
                "preset": epsilons.READINGS,
                "paper": table3.PAPER,
                "rows": rows,
                "notes": epsilons.READINGS_NOTES,
            }
        )
        return
    table = Table("dataset", "batch of the loss test", "decay", "updates", "Figure 4, buffer 1", "its count may be of")
    table.title, table.title_justify = f"{table3.PAPER}: {epsilons.READINGS_WHAT}", "left"
    for row in rows:
        decay = f"{row['decay']:g}" + (", fast" if row["fast"] else "")
        printed = ["-" if row[key] is None else str(row[key]) for key in ("printed", "agrees")]
        table.add_row(row["dataset"], str(row["validation_batch"]), decay, str(row["updates"]), *printed)
    stdout.print(table)
    for line in epsilons.READINGS_NOTES:
        stdout.print(f"assumed: {line}", markup=False)


def _landscape(small: bool, seeds: int | None, path: Path, as_json: bool) -> None:
    """Walk each method over the loss, seed by seed; every line is written when it is done."""
    from vestige.checks import check_steps
    from vestige.compare import dpsgd_br_figure1 as figure1
    from vestige.files import make_folder, read_json, write_json

    count = seeds if seeds is not None else 2 if small else figure1.Study.seeds
    check_steps(count, "seeds")
    study = figure1.Study(steps=10 if small else figure1.Study.steps, seeds=count)
    make_folder(path)
    file = path / "paths.json"
    rows = list(read_json(file)["rows"]) if file.exists() else []
    done = {(row["label"], row["seed"]) for row in rows}
    with step_progress(not as_json) as bar, graceful_stop() as stopping:
        show = bar("runs", count * len(figure1.LABELS))
        for seed in range(count):
            wanted = [label for label in figure1.LABELS if (label, seed) not in done]
            if seed == 0 and not (path / "paths.svg").exists():
                wanted, rows = list(figure1.LABELS), [row for row in rows if row["seed"] != 0]
            walked = {}
            for label in wanted:
                walked[label], row = figure1.walk(study, label, seed)
                rows.append(row)
                write_json(file, {"rows": rows})
                show(len(rows), label, None, None)
                if stopping():
                    raise KeyboardInterrupt
            if seed == 0 and walked:
                (path / "paths.svg").write_text(figure1.svg(figure1.drawn(walked)))
    found = figure1.compared(rows)
    if as_json:
        print_json({"preset": figure1.NAME, "rows": rows, "compared": found, "notes": list(figure1.NOTES)})
        return
    table = Table("method", "quantity", "less DP-SGD's", "95%", "p", "seeds")
    table.title, table.title_justify = f"{figure1.PAPER}: {figure1.WHAT}", "left"
    for each in found:
        interval = "-" if each["low"] is None else f"{each['low']:+.3f} to {each['high']:+.3f}"
        numbers = (f"{each['difference']:+.3f}", interval, _plain(each["p"]), str(each["seeds"]))
        table.add_row(each["label"], each["quantity"], *numbers)
    stdout.print(table)
    for line in figure1.NOTES:
        stdout.print(f"assumed: {line}", markup=False)
    stdout.print(f"written to {path}: paths.json, and paths.svg of the first seed", markup=False)


def _membership(data: str | None, small: bool, device: str | None, path: Path, as_json: bool) -> None:
    """Who was trained on: every line is written when it is done, and only the missing ones are made."""
    from vestige import tasks
    from vestige.audit import dpsgd_br_table3 as table3
    from vestige.compare.paper_presets import published
    from vestige.files import make_folder, read_json, write_json
    from vestige.tf32 import check_device, default_device

    study, printed = table3.small(data) if small else table3.Study(), published()["dpsgd_br"]
    tasks.check(study.task, data)
    where = device or default_device()
    check_device(where)
    make_folder(path)
    file = path / "membership.json"
    lines = list(read_json(file)["lines"]) if file.exists() else []
    if any(line["study"] != study.to_json() for line in lines):
        raise ValueError(f"out={str(path)!r} holds a study of other settings: choose another folder")
    done = {(line["name"], line["budget"]) for line in lines}
    with step_progress(not as_json) as bar, graceful_stop() as stopping:
        for case in study.cases():
            if case in done:
                continue
            label = case[0] if case[1] is None else f"{case[0]}, epsilon {case[1]}"
            show_models = bar(label, study.shadows + study.targets)

            def on_models(models: int, show_models: Any = show_models) -> bool:
                show_models(models, "shadow models" if models < study.shadows else "targets", None, None)
                if stopping():
                    raise KeyboardInterrupt  # a line with fewer targets than the others would not be of this table
                return True

            lines.append(study.infer(case, printed, data, where, on_models))
            write_json(file, {"lines": lines})
    rows = table3.beside(lines, printed)
    if as_json:
        print_json(
            {
                "preset": table3.NAME,
                "small": small,
                "nonprivate": True,
                "beside": rows,
                "notes": list(table3.NOTES),
            }
        )
        return
    table = Table("attack", "method", "epsilon", "printed", "ours", "95%")
    table.title, table.title_justify = f"{table3.PAPER}: {table3.WHAT}; ours on {study.task}", "left"
    for row in rows:
        area = row["area"]
        ours, interval = f"{area['estimate']:.3f}", f"{area['low']:.3f} to {area['high']:.3f}"
        table.add_row(row["attack"], row["method"], _plain(row["epsilon"]), _plain(row["printed"]), ours, interval)
    stdout.print(table)
    for each in lines:
        budget = "without privacy" if each["budget"] is None else f"{each['name']}, epsilon {each['budget']}"
        right = [each[f"nonprivate_accuracy_of_{who}"] for who in ("members", "others")]
        stdout.print(f"{budget}: right about {right[0]:.1%} of members and {right[1]:.1%} of others", markup=False)
    for line in table3.NOTES:
        stdout.print(f"assumed: {line}", markup=False)
    if small:
        stdout.print(f"small: ours are of {study.task}, not of whole CIFAR-10, with few shadow models", markup=False)
    stdout.print(f"written to {path}; trained on these images again and again: not private", markup=False)


def _show_paper(preset: Preset, beside: Sequence[dict[str, Any]], assumed: Sequence[str]) -> None:
    """Print the paper's values beside ours, and all that was assumed."""
    if beside:
        table = Table("quantity", "printed", "ours", "difference", "ours, lr auto", "ours, lr auto, one epsilon")
        table.title, table.title_justify = f"{preset.paper}: {preset.what}", "left"
        for row in beside:
            table.add_row(*(value if isinstance(value, str) else _plain(value) for value in row.values()))
        stdout.print(table)
    for line in assumed:
        stdout.print(f"assumed: {line}", markup=False)
    missing = preset.missing()
    if missing:
        stdout.print(f"left out, because this version has no such method: {', '.join(missing)}", markup=False)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
