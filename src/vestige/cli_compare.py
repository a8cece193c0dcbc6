"""What can be done with many runs from a terminal? compare, report, presets, reproduce."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from vestige.cli_mistakes import INTERRUPTED, refuse_others
from vestige.cli_terminal import Json, answers, notes, print_json

Workers = Annotated[int | None, typer.Option(help="Processes (default: one per core, one in all on a GPU).")]
Engine = Annotated[str, typer.Option(help="local (processes) or ray (a Ray cluster).")]
Stacking = Annotated[str, typer.Option(help="auto: train runs that fit together as one stack; off: one after another.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: cuda if there is one).")]
Address = Annotated[str | None, typer.Option(help="Address of the Ray cluster (default: a local one).")]


# --- compare ---------------------------------------------------------------------------------------------------------


WHERE = ("engine", "ray_address", "workers", "stack", "device", "as_json")
"""Options that say where runs are made, and go with any comparison."""


def compare(
    context: typer.Context,
    task: Annotated[list[str] | None, typer.Option(help="A task of `vestige tasks`; repeat for several.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME:option=value,...; repeat for several; all: every method there is."),
    ] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="Budget; repeat for several.")] = None,
    noise_multiplier: Annotated[list[float] | None, typer.Option(help="Accounted noise instead of a budget.")] = None,
    paper_sigma: Annotated[list[float] | None, typer.Option(help="The sigma of the methods' papers.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder (or file) with the tasks' data.")] = None,
    seeds: Annotated[int, typer.Option(help="Final runs per row, each with a fresh seed.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of every run.")] = 200,
    sample_rate: Annotated[float, typer.Option(help="Probability q that an example joins a step.")] = 0.05,
    delta: Annotated[float, typer.Option(help="Allowed failure probability, below 1/N.")] = 1e-5,
    factors: Annotated[
        str | None, typer.Option(help="Grid of rates, as multiples of the automatic one (default: 1/8 ... 8).")
    ] = None,
    lrs: Annotated[str | None, typer.Option(help="Grid of rates as numbers, instead of --factors.")] = None,
    tune: Annotated[list[str] | None, typer.Option(help="Tune an option too: beta=0.8,0.9 (repeatable).")] = None,
    tuning_seeds: Annotated[int, typer.Option(help="Runs per trial of the grid.")] = 1,
    validation: Annotated[float, typer.Option(help="Share of the training data held out while tuning.")] = 0.2,
    lr: Annotated[float | None, typer.Option(help="Add rows at this rate, untuned.")] = None,
    rates: Annotated[str | None, typer.Option(help="Kinds of rows: tuned,auto,given (default: tuned,auto).")] = None,
    baseline: Annotated[str, typer.Option(help="The method that others are compared with.")] = "dp-sgd",
    evaluations: Annotated[
        int, typer.Option(help="Looks at the test set during a final run, for curves; 0: only at its end.")
    ] = 0,
    physical_batch: Annotated[int | None, typer.Option(help="Split samples into parts of this size.")] = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Fix noise and sampling. Protects nobody: for tests.")
    ] = False,
    engine: Engine = "local",
    ray_address: Address = None,
    workers: Workers = None,
    stack: Stacking = "auto",
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the comparison (default: runs/compare-TIME).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue (or help with) the comparison in this folder.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="With --resume: try failed runs again.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small comparison on digits, in about a minute.")] = False,
    as_json: Json = False,
) -> None:
    """Which private optimizer is best at this budget, and is the difference real?

    Every method is tuned over the same grid, on a part of the training data held out for it, then run on fresh seeds;
    beside it stands the same method at the automatic rate. Noise is calibrated so that all spend the same epsilon.

    Examples:

        vestige compare --quick

        vestige compare --task cifar10-mlp --data cifar10.npz --epsilon 1 --epsilon 3 --method dp-sgd --method fo-dp-sgd

        vestige compare --resume runs/compare-20260101-120000
    """
    from vestige.comparison import FACTORS, Budget, Contender, Problem, Specification
    from vestige.comparison_folder import ComparisonFolder

    if resume is not None:
        allowed = ("resume", "retry", "data", *WHERE)
        refuse_others(context, allowed, "a comparison continues with the options it was started with")
        folder = ComparisonFolder(resume)
        agreed = folder.specification()
        if retry:
            notes.print(f"trying {folder.forget_failures()} failed runs again", markup=False)
        elsewhere = {problem.task: data for problem in agreed.problems} if data is not None else {}
        _finish(_fill(resume, agreed, engine, ray_address, workers, stack, device, as_json, elsewhere), as_json)
        return
    if retry:
        raise ValueError("--retry goes with --resume FOLDER: it tries the failed runs of a comparison again")
    budgets = [Budget("epsilon", value) for value in epsilon or ()]
    budgets += [Budget("noise_multiplier", value) for value in noise_multiplier or ()]
    budgets += [Budget("paper_sigma", value) for value in paper_sigma or ()]
    if quick:
        refuse_others(
            context, ("quick", "out", *WHERE), "--quick is one fixed comparison; leave --quick out for your own"
        )
        specification = quick_specification()
    else:
        kinds = tuple(rates.split(",")) if rates else (("tuned", "auto", "given") if lr else ("tuned", "auto"))
        specification = Specification(
            problems=tuple(Problem(name, data) for name in task or ["digits-mlp"]),
            contenders=tuple(
                Contender(label, name, options, lr) for label, name, options in contenders(method or ["all"])
            ),
            budgets=tuple(budgets or [Budget("epsilon", 3.0)]),
            seeds=tuple(range(_positive("seeds", seeds))),
            steps=steps,
            sample_rate=sample_rate,
            delta=delta,
            rates=kinds,  # type: ignore[arg-type]
            factors=_numbers("factors", factors) if factors is not None else FACTORS,
            learning_rates=_numbers("lrs", lrs) if lrs is not None else (),
            tune=dict(_grid(each) for each in tune or ()),
            tuning_seeds=tuple(range(1000, 1000 + _positive("tuning_seeds", tuning_seeds))),
            validation=validation,
            lr=lr,
            baseline=baseline,
            evaluations=evaluations,
            reproducible=reproducible,
            physical_batch=physical_batch,
        )
    _check_tasks(specification)
    _check_names(specification)
    path = out or Path("runs") / f"{'quick' if quick else 'compare'}-{time.strftime('%Y%m%d-%H%M%S')}"
    _finish(_fill(path, specification, engine, ray_address, workers, stack, device, as_json), as_json)


def quick_specification() -> Any:
    from vestige.comparison import Budget, Contender, Problem, Specification

    names = ["dp-sgd", "dp-sgd:momentum=0.9", "fo-dp-sgd", "post-fm", "uniform-memory", "exponential-memory"]
    return Specification(
        problems=(Problem("digits-mlp"),),
        contenders=tuple(Contender(label, name, options) for label, name, options in contenders(names)),
        budgets=(Budget("epsilon", 1.0), Budget("epsilon", 3.0), Budget("epsilon", 8.0)),
        steps=200,
        sample_rate=0.05,
    )


def contenders(words: Sequence[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """NAME or NAME:option=value,... as (label, name, options); `all` is every method, and DP-SGD with momentum."""
    from vestige.registry import METHODS, build, nearest

    found: list[tuple[str, str, dict[str, Any]]] = []
    for word in words:
        if word == "all":
            found += [(name, name, {}) for name in METHODS]
            found.insert(1, ("dp-sgd:momentum=0.9", "dp-sgd", {"momentum": 0.9}))
            continue
        name, _, rest = word.partition(":")
        if name not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {known}, or all")
        options = dict(_option(part) for part in re.split(r",(?![^\[]*\])", rest) if part)
        build(name, **options)  # an option that no run could use is refused before there is a folder
        found.append((word, name, options))
    return found


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"method={text!r} is not option=value, as in fo-dp-sgd:beta=0.8,window=4")
    return key.strip().replace("-", "_"), _value(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def _grid(text: str) -> tuple[str, tuple[Any, ...]]:
    key, _, values = text.partition("=")
    grid = tuple(_value(part) for part in values.split(",") if part.strip())
    if not grid:
        raise ValueError(f"tune={text!r} is an empty grid; give option=value,value,...")
    return key.strip().replace("-", "_"), grid


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{name}={text!r} must be numbers with commas between them") from None
    if not values:
        raise ValueError(f"{name}={text!r} is an empty grid; give numbers with commas between them")
    return values


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}={value} must be a whole number from 1 up")
    return value


def _check_tasks(specification: Any) -> None:
    """A task that no run could load is refused before there is a folder."""
    from vestige import tasks

    for problem in specification.problems:
        tasks.check(problem.task, problem.data)


def _check_names(specification: Any) -> None:
    """Names of methods and options that would be passed over in silence."""
    from vestige.registry import METHODS, nearest

    labels = [contender.label for contender in specification.contenders]
    if specification.baseline not in ("dp-sgd", *labels):  # the usual baseline may be left out
        name = specification.baseline
        raise ValueError(f"baseline={name!r} is not compared{nearest(name, labels)}; choose from {', '.join(labels)}")
    known = {option for contender in specification.contenders for option in METHODS[contender.method].options}
    for option in specification.tune:
        if option not in known:
            raise ValueError(
                f"tune={option!r} is an option of none of the methods{nearest(option, known)}; "
                f"choose from {', '.join(sorted(known))}"
            )


def _fill(
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
    from vestige import experiments
    from vestige.jobs import check_device, default_device
    from vestige.performing import Place

    if stack not in ("auto", "off"):
        raise ValueError(f"stack={stack!r} must be auto or off")
    if address is not None and engine != "ray":
        raise ValueError(f"ray_address={address!r} goes with --engine ray")
    where = device or default_device()
    check_device(where)
    usual = 1 if where != "cpu" or alone else max(1, os.cpu_count() or 1)
    hands = workers if workers is not None else usual
    place = Place(where, data or {}, stack == "auto" and not alone)
    try:
        with progress(not as_json) as watch:
            return experiments.compare(
                path, specification, place=place, engine=engine, workers=hands, address=address, watch=watch
            )
    except KeyboardInterrupt:
        notes.print(f"interrupted; continue with: vestige compare --resume {path}", markup=False)
        sys.exit(INTERRUPTED)


def _finish(home: Any, as_json: bool) -> None:
    summary = summarised(home)
    if as_json:
        print_json(summary)
    else:
        show(summary)
        answers.print(f"written to {home.path}; for the whole story: vestige report {home.path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def summarised(home: Any) -> dict[str, Any]:
    """Everything the terminal and the report say about a comparison, from its records alone."""
    from vestige import comparison, experiments

    specification, records = home.specification(), home.records()
    grid = experiments.grid_of(specification)
    return {
        "folder": str(home.path),
        "total": comparison.total(specification, grid),
        "done": sum(record["status"] == "done" for record in records.values()),
        "baseline": specification.baseline,
        "rows": comparison.rows(records.values(), specification.baseline),
        "choices": comparison.choices(specification, grid, records),
        "prices": experiments.prices(home) if "tuned" in specification.rates else [],
        "failed": [
            {"id": record["id"], "error": record["error"], **_which(record)}
            for record in records.values()
            if record["status"] == "failed"
        ],
        "unreadable": dict(home.unreadable),
    }


def _which(record: dict[str, Any]) -> dict[str, Any]:
    return {key: record["run"][key] for key in ("task", "label", "stage", "seed")}


def show(summary: dict[str, Any]) -> None:
    """One table per task and budget: each method tuned and at the automatic rate, and what may be said of it."""
    sections: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in summary["rows"]:
        sections.setdefault((row["task"], row["budget"]), {}).setdefault(row["method"], {})[row["rate"]] = row
    for (task, budget), methods in sections.items():
        kinds = [kind for kind in ("tuned", "auto", "given") if any(kind in each for each in methods.values())]
        table = Table("method", *(f"{kind} rate" for kind in kinds))
        table.title, table.title_justify = f"{task} at {budget}", "left"
        for method, found in methods.items():
            table.add_row(method, *(_cell(found.get(kind)) for kind in kinds))
        answers.print(table)
    answers.print(
        f"test accuracy in percent ± its 95% interval; ▲ better, ▼ worse than {summary['baseline']} (paired by "
        "seed, Holm); "
        f"unmarked: not distinguishable",
        markup=False,
    )
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
        notes.print(f"left out: runs/{name} cannot be read ({why}); its run is made again on --resume", markup=False)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["mean"] is None:
        return "-"
    half = f" ± {100 * (row['high'] - row['mean']):.1f}" if row["high"] is not None else ""
    mark = {"better": " ▲", "worse": " ▼"}.get(row["sentence"].split()[0], "")
    if row["epsilon"] is None:
        spent = " (no epsilon)"
    else:
        spent = "" if row["budget"].startswith("epsilon") else f", epsilon {row['epsilon']:.3g}"
    return f"{100 * row['mean']:.1f}{half}{mark}{spent}"


def price_lines(prices: Sequence[dict[str, Any]]) -> list[str]:
    """The price of tuning, once per budget; where methods differ in it, once for each kind, with their names."""
    kinds: dict[tuple[str, Any, Any], list[dict[str, Any]]] = {}
    for row in sorted(prices, key=lambda each: each["epsilon_one_run"] or 0.0):
        if row["epsilon_one_run"] is not None:
            charged = row["epsilon_best_of_trials"]
            rounded = None if charged is None else round(charged, 1)
            kinds.setdefault((row["budget"], row["trials"], rounded), []).append(row)
    several = {budget for budget, count in Counter(budget for budget, _, _ in kinds).items() if count > 1}
    return [_price_line(rows, named=budget in several) for (budget, _, _), rows in kinds.items()]


def _price_line(rows: Sequence[dict[str, Any]], named: bool) -> str:
    row, charged = rows[0], rows[0]["epsilon_best_of_trials"]
    cost = "has no proven price" if charged is None else f"costs epsilon {charged:.3g}"
    whose = f" ({', '.join(dict.fromkeys(each['method'] for each in rows))})" if named else ""
    return (
        f"price of tuning at {row['budget']}{whose}: uncharged, as in the tuned rows, epsilon "
        f"{row['epsilon_one_run']:.3g}; keeping the best of a random number of trials with mean {row['trials']} {cost} "
        "(Papernot & Steinke 2022, with public validation data); the automatic rate costs nothing"
    )


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


# --- report ----------------------------------------------------------------------------------------------------------


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="The page (default: FOLDER/report.html).")] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write every figure here, as SVG and PNG.")] = None,
    title: Annotated[str | None, typer.Option(help="Headline of the page.")] = None,
) -> None:
    """Write one self-contained HTML page about a comparison: it opens from disk, without a network.

    Example:

        vestige report runs/compare-20260101-120000 --figures figures
    """
    write_report(folder, out, figures, title)


def write_report(folder: Path, out: Path | None, figures: Path | None, title: str | None) -> Path:
    from vestige import report as page
    from vestige.comparison_folder import ComparisonFolder
    from vestige.files import make_folder

    home = ComparisonFolder(folder)
    specification = home.specification()
    records = list(home.records().values())
    if not records:
        raise ValueError(f"{str(folder)!r} holds no finished run yet: make some with vestige compare --resume {folder}")
    summary = summarised(home)
    content = {
        "title": title or "Private optimizers at one budget",
        "specification": specification.to_json(),
        "summary": {**summary, "price_lines": price_lines(summary["prices"])},
        "records": records,
        "paper": _paper(folder, records),
    }
    path = out or folder / "report.html"
    make_folder(path.parent)
    if figures is not None:
        make_folder(figures, "figures")
    path.write_text(page.page(content), encoding="utf-8")
    answers.print(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB)", markup=False)
    if figures is not None:
        for line in page.export(content, figures):
            answers.print(line, markup=False)
    return path


def _paper(folder: Path, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What a paper printed beside ours, if the folder was made by `vestige reproduce`."""
    from vestige import presets as known
    from vestige.files import read_json

    if not (folder / "preset.json").exists():
        return None
    made = read_json(folder / "preset.json")
    preset = known.find(made["preset"])
    return {
        "title": f"{preset.paper}: {preset.what}",
        "beside": known.beside(preset, records),
        "notes": list(preset.notes),
        "small": made["small"],
    }


# --- presets ---------------------------------------------------------------------------------------------------------


def presets(as_json: Json = False) -> None:
    """List the tables and figures of the papers that `vestige reproduce` makes again."""
    from vestige.presets import PRESETS

    if as_json:
        rows = [{"name": p.name, "what": p.what, "paper": p.paper, "missing": p.missing()} for p in PRESETS.values()]
        print_json({"presets": rows})
        return
    table = Table("preset", "what the paper shows", "paper", "state")
    for preset in PRESETS.values():
        missing = preset.missing()
        table.add_row(preset.name, preset.what, preset.paper, f"without {', '.join(missing)}" if missing else "ready")
    answers.print(table)


def reproduce(
    name: Annotated[str, typer.Argument(help="A preset of `vestige presets`.")],
    data: Annotated[str | None, typer.Option(help="Folder with the datasets.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Few steps and seeds, to see that it works.")] = False,
    engine: Engine = "local",
    ray_address: Address = None,
    workers: Workers = None,
    stack: Stacking = "auto",
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Folder (default: runs/NAME or runs/NAME-small).")] = None,
    as_json: Json = False,
) -> None:
    """Make a table or figure of a paper again, and set ours beside the printed one.

    Started again, it continues where it was.

    Examples:

        vestige reproduce fo-table3 --data data/

        vestige reproduce fo-fig2 --data data/ --small
    """
    from vestige import presets as known
    from vestige.comparison_folder import ComparisonFolder
    from vestige.files import write_json

    preset = known.find(name)
    specification = preset.specification(data, small=small)
    _check_tasks(specification)
    path = out or Path("runs") / (f"{name}-small" if small else name)
    ComparisonFolder(path).create(specification)
    write_json(path / "preset.json", {"preset": name, "small": small})
    # Seconds mean something only for runs that have the machine to themselves.
    home = _fill(path, specification, engine, ray_address, workers, stack, device, as_json, alone=preset.timed)
    summary = summarised(home)
    beside = known.beside(preset, list(home.records().values()))
    if as_json:
        print_json({**summary, "preset": name, "small": small, "beside": beside, "notes": list(preset.notes)})
    else:
        show(summary)
        _show_paper(preset, beside, small)
        answers.print(f"written to {path}; for the whole story: vestige report {path}", markup=False)
    if summary["done"] == 0:
        sys.exit(1)


def _show_paper(preset: Any, beside: Sequence[dict[str, Any]], small: bool) -> None:
    """The printed figures beside ours, and what the paper left unsaid."""
    if beside:
        table = Table("quantity", "printed", "ours", "difference", "ours, lr auto", "ours, lr auto, one epsilon")
        table.title, table.title_justify = f"{preset.paper}: {preset.what}", "left"
        for row in beside:
            table.add_row(*(value if isinstance(value, str) else _plain(value) for value in row.values()))
        answers.print(table)
    for line in preset.notes:
        answers.print(f"assumed: {line}", markup=False)
    missing = preset.missing()
    if missing:
        answers.print(f"left out, because this version has no such method: {', '.join(missing)}", markup=False)
    if small:
        answers.print("small: too few steps and seeds to compare with the paper", markup=False)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
