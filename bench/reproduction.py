"""What must be run to judge a paper on private memory? All of it as one pool: each run once.

    python bench/reproduction.py --data DATA --out runs/reproduction --device cuda --hands 3 --alone 10 --limit 420
    python bench/reproduction.py --data DATA --out runs/reproduction --render docs/results [--also FOLDER ...]
    python bench/reproduction.py --paper sma --data DATA --out runs/sma --device cuda --hands 3 --alone 10

FO-DP-SGD (`--paper fo`), in this order: SVHN and CIFAR-100 tuned at the paper's budget, the paper's tables and figures
(presets share most of their runs, so these are made together), and the study of the automatic rate. SMA-DP-SGD
(`--paper sma`): its tables and figures but the one of runtimes. `--hands` processes train stacks and convolutional
networks on the device; `--alone` processes train the rest on the CPU, one thread each. Stopped at the limit or killed,
what is finished is on record, and the same command continues. `--render` makes a folder per comparison and preset under
OUT (for `vestige report`), and writes reproduction-tables.md, learning-rate.md and learning-rate.svg, or sma-tables.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import arena
import learning_rate
from vestige.compare import aggregate_results, paper_presets, run_grid, runner
from vestige.compare.execute_run import Machine, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Specification
from vestige.compare.statistics import paired, summarise
from vestige.files import write_json
from vestige.run_records import Run, RunRecord, completed, failed

FIRST = ["fo-rates", "fo-fig3", "fo-fig4", "fo-fig2", "fo-fig5", "fo-fig6", "fo-fig8", "fo-alpha"]
REST = ["fo-table3", "fo-fig7", "fo-fig1"]
"""With rivals that may have to be trained alone."""
SIGMA, EQUAL = paper_presets.find("fo-table3").full.budgets
"""The paper's own terms, and one epsilon for all."""
SMA = ["sma-table2", "sma-fig3", "sma-table3", "sma-fig2", "sma-fig5", "sma-fig4"]
PAGE = {"fo": "reproduction-tables.md", "sma": "sma-tables.md"}
HEAD = {
    "fo": (
        "# Tables of the reproduction",
        "",
        "```",
        "python bench/reproduction.py --data DATA --out runs/reproduction --render docs/results",
        "```",
        "",
    ),
    "sma": (
        "# Tables of SMA-DP-SGD's reproduction",
        "",
        "```",
        "python bench/reproduction.py --paper sma --data DATA --out runs/sma --device cuda --hands 3 --alone 10",
        "python bench/reproduction.py --paper sma --data DATA --out runs/sma --render docs/results",
        "```",
        "",
        "DATA holds the first 500 training and 200 test images of each class. The paper gives neither sigma nor",
        "rate: both are FO-DP-SGD's, 1.1 and 0.8 (given). As many seeds as in the paper, three (one of the ResNet-18):",
        "too few for the exact test to tell anything apart, whatever was found.",
        "",
    ),
}
LEGEND = (
    "Test accuracy in percent with its 95% interval over seeds; what is told apart is so by the exact test of",
    "docs/compare.md over all rows of a table.",
    "",
)
STAGES = {"first": (0, 1), "stage 1": (1, 5), "stage 2": (5, 10), "stage 3": (10, 15), "stage 4": (15, 20)}
"""The convolutions of a ResNet-18 by stage; the last group is the classifier."""


class Part:
    """Runs wanted for one purpose: a comparison, a preset or a study (of which only the tuning runs are made)."""

    def __init__(
        self,
        name: str,
        specification: Specification,
        kind: str,
        only: Callable[[Run], bool] = lambda run: True,
        twins: Mapping[str, Run] | None = None,
    ) -> None:
        self.name, self.specification, self.kind, self._only = name, specification, kind, only
        self._twins = twins or {}
        self._grid = run_grid.grid_of(specification)
        self._fixed = dict(self._named({})) if kind != "comparison" else None

    def wanted(self, records: Mapping[str, RunRecord]) -> dict[str, Run]:
        """Every run that can be named now, by id: final runs of a tuned row once its grid is on record."""
        return self._fixed if self._fixed is not None else dict(self._named(records))

    def _named(self, records: Mapping[str, RunRecord]) -> Iterator[tuple[str, Run]]:
        needed = list(run_grid.tuning_runs(self.specification, self._grid))
        if self.kind != "study":
            needed += run_grid.final_runs(self.specification, self._grid, records)
        needed = [run if run.id in records else self._twins.get(run.id, run) for run in needed]
        yield from ((run.id, run) for run in needed if self._only(run))


def _ours(run: Run) -> bool:
    return run.method in ("dp-sgd", "fo-dp-sgd")


def _printed(run: Run) -> bool:
    """What stands beside printed figures: the paper's sigma, and its rate where it gives one."""
    return run.budget == SIGMA and run.stage == ("given" if _ours(run) else "auto")


def _telling(run: Run) -> bool:
    """All but the paper's rate at the one epsilon, which is neither the paper's own terms nor a good rate."""
    return (run.stage, run.budget) != ("given", EQUAL)


def parts(data: str | None, small: bool, paper: str = "fo") -> list[Part]:
    """Everything of a paper, the most wanted first. A part may come twice: first what matters of it."""
    if paper == "sma":
        return [Part(name, paper_presets.find(name).specification(data, small=small), "preset") for name in SMA]
    shown = {name: paper_presets.find(name).specification(data, small=small) for name in (*FIRST, *REST)}
    # A run that some figure wants with its curve is the same run: it is made once, with it.
    curves = Part("fo-fig1", shown["fo-fig1"], "preset").wanted({}).values()
    twins = {replace(run, evaluations=0).id: run for run in curves}
    tuned = {name: arena.SHOWN[name].specification(data, small) for name in ("svhn", "cifar100")}
    made = [Part(name, each, "comparison", twins=twins) for name, each in tuned.items()]
    made += [Part(name, shown[name], "preset", _telling) for name in FIRST]
    made += [
        Part("fo-fig7", shown["fo-fig7"], "preset", _ours),
        Part("fo-table3", shown["fo-table3"], "preset", _printed),
    ]
    made += [Part(name, study, "study") for name, study in learning_rate.studies(data, small).items()]
    return made + [Part(name, shown[name], "preset") for name in (*FIRST, *REST)]


# --- the pool --------------------------------------------------------------------------------------------------------


def due(plan: Sequence[Part], records: Mapping[str, RunRecord]) -> dict[str, Run]:
    """What is wanted and not on record, each run once, in order."""
    return {key: run for part in plan for key, run in part.wanted(records).items() if key not in records}


def fill(arguments: argparse.Namespace, alone: bool, until: float) -> None:
    """Make the runs of one kind with a pool of processes, until none is left or the time is over.

    Those of `alone` are the fully connected networks that cannot be stacked, on the CPU; the others are the rest.
    """
    home, plan = learning_rate.pooled(arguments.out), parts(arguments.data, arguments.small, arguments.paper)
    data = {problem.task: problem.data for part in plan for problem in part.specification.problems}
    there = Machine(arguments.device, data)

    def wanted(records: Mapping[str, RunRecord]) -> list[Run]:
        left = due(plan, records).values() if time.time() < until else ()
        return [run for run in left if (run.task.endswith("-mlp") and stackable(run, there) is None) == alone]

    machine = replace(there, device="cpu", stack=False) if alone else there
    while time.time() < until and due(plan, home.records()):
        runner.make(home, machine, arguments.alone if alone else arguments.hands, wanted)
        time.sleep(2)  # the rest is the other pool's, or waits for the tuning of its row


def make(arguments: argparse.Namespace) -> None:
    home, until = learning_rate.pooled(arguments.out), time.time() + arguments.limit
    runner.LARGEST_STACK = arguments.largest
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers are stopped too
    begin = shown = time.time()
    kinds = [alone for alone, count in ((False, arguments.hands), (True, arguments.alone)) if count]
    pools = [threading.Thread(target=fill, args=(arguments, alone, until), daemon=True) for alone in kinds]
    for pool in pools:
        pool.start()
    try:
        while any(pool.is_alive() for pool in pools) and time.time() < until:
            time.sleep(1)
            if time.time() - shown > 20:
                shown = time.time()
                print(f"{shown - begin:.0f} s: {len(list(home.runs.glob('*.json')))} runs on record", flush=True)
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
    records = home.records()
    print(f"{time.time() - begin:.0f} s: {len(records)} runs on record", flush=True)
    for part in parts(arguments.data, arguments.small, arguments.paper):
        wanted = part.wanted(records)
        found = [records[key] for key in wanted if key in records]
        errors = Counter(record.error for record in failed(found))
        print(f"{part.name}: {len(found)} of {len(wanted)}", *errors.items(), flush=True)


# --- what they say ---------------------------------------------------------------------------------------------------


def render(arguments: argparse.Namespace) -> None:
    """Folders for `vestige report`, and the tables that the documents quote."""
    pool = learning_rate.pooled(arguments.out).records()
    lines = [*HEAD[arguments.paper], *LEGEND]
    tuning: list[RunRecord] = []
    for part in {each.name: each for each in parts(arguments.data, arguments.small, arguments.paper)}.values():
        records = [pool[key] for key in part.wanted(pool) if key in pool]
        if not records:
            continue
        tuning += records
        if part.kind == "study":
            continue
        home = ComparisonFolder(arguments.out / part.name)
        home.create(part.specification)
        for record in records:
            home.write(record)
        if part.kind == "preset":
            write_json(home.path / "preset.json", {"preset": part.name, "small": arguments.small})
        what = paper_presets.find(part.name).what if part.kind == "preset" else "tuned at the paper's budget"
        total = run_grid.total(part.specification, run_grid.grid_of(part.specification))
        lines += [f"## {part.name}: {what}", "", f"{len(records)} of {total} runs.", ""]
        lines += _gap(records) if part.name == "fo-rates" else _tables(records, part.specification)
        if part.kind == "preset" and part.name != "fo-rates":
            lines += _beside(paper_presets.find(part.name), records)
        if part.name == "sma-fig4":
            lines += _by_stage(records)
    tuning += [record for folder in arguments.also for record in ComparisonFolder(folder).records().values()]
    arguments.render.mkdir(parents=True, exist_ok=True)
    (arguments.render / PAGE[arguments.paper]).write_text("\n".join(lines))
    rows = learning_rate.losses(tuning) if arguments.paper == "fo" else []
    if rows:
        learning_rate.write(rows, arguments.render)


def _tables(records: Sequence[RunRecord], specification: Specification) -> list[str]:
    """One table per task: a row per contender, a column per budget and kind of rate."""
    rows = aggregate_results.rows(records, specification.baseline)
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        columns = sorted({(row["budget"], row["rate"]) for row in mine}, reverse=True)
        found = {(row["method"], row["budget"], row["rate"]): row for row in mine}
        heads = " | ".join(f"{budget}, {rate}" for budget, rate in columns)
        lines += [f"| {task} | {heads} |", "|---" * (1 + len(columns)) + "|"]
        for contender in specification.contenders:
            cells = [_cell(found.get((contender.label, *column)), specification.baseline) for column in columns]
            if any(cell != "-" for cell in cells):
                lines.append(f"| {contender.label} | " + " | ".join(cells) + " |")
        lines.append("")
    marked = [f"- {row['method']} on {row['task']} ({row['rate']}): {row['sentence']}" for row in rows if _apart(row)]
    return [*lines, *(marked or ["Nothing can be told from the baseline."]), ""]


def _beside(preset: paper_presets.Preset, records: Sequence[RunRecord]) -> list[str]:
    """The printed figures beside ours, on the paper's own terms and off them."""
    rows = paper_presets.beside(preset, records)
    if not rows:
        return []
    lines = ["| | printed | ours | ours, lr auto | ours, lr auto, one epsilon |", "|---|---|---|---|---|"]
    for row, printed in zip(rows, preset.printed, strict=True):
        values = [row[key] for key in ("printed", "ours", "ours_at_auto", "ours_at_equal_epsilon")]
        scale, digits = (100, 1) if printed.quantity == "accuracy" else (1, 4)
        shown = " | ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values)
        lines.append(f"| {row['quantity']} | {shown} |")
    return [*lines, ""]


def _by_stage(records: Sequence[RunRecord]) -> list[str]:
    """Exponents and tempering of a ResNet-18's stages, at the beginning, in the middle and at the end of each run."""
    lines = ["| rate, diagnostic, step | " + " | ".join(STAGES) + " | classifier |", "|---" * (2 + len(STAGES)) + "|"]
    for record in completed(records):
        for key in ("exponent", "tempering"):
            series = [(step, value) for step, value in record.pictures[key] if isinstance(value, list)]
            for step, value in (series[0], series[len(series) // 2], series[-1]):
                groups = [value[first:last] for first, last in STAGES.values()] + [value[-1:]]
                lines.append(f"| {record.run.stage}, {key}, {step} | " + " | ".join(map(_mean, groups)) + " |")
    return [*lines, ""]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else "none"


def _apart(row: Mapping[str, Any]) -> bool:
    return str(row["sentence"]).startswith(("better", "worse"))


def _cell(row: Mapping[str, Any] | None, baseline: str) -> str:
    if row is None or row["mean"] is None:
        return "-"
    half = f" ± {100 * (row['high'] - row['mean']):.1f}" if row["high"] is not None else ""
    mark = (" ▲" if row["difference"] > 0 else " ▼") if row["method"] != baseline and _apart(row) else ""
    spent = (
        f" (ε {row['epsilon']:.3g})" if row["epsilon"] is not None and not row["budget"].startswith("epsilon") else ""
    )
    return f"{100 * row['mean']:.1f}{half}{mark}{spent}"


def _gap(records: Sequence[RunRecord]) -> list[str]:
    """Beta 0.9 against beta 1 at one sigma and one learning rate, for each rate: last and best of the run."""
    values: dict[tuple[float, str], dict[int, tuple[float, float]]] = {}
    for record in completed(records):
        run = record.run
        beta = run.label.split(",")[0]
        best = max(point[1] for point in record.curve) if record.curve else record.accuracy
        values.setdefault((run.lr, beta), {})[run.seed] = (record.accuracy, best)
    lines = [
        "| learning rate | beta 1 | beta 0.9 | difference, paired | best epoch, beta 1 | beta 0.9 |",
        "|---|---|---|---|---|---|",
    ]
    for rate in sorted({key[0] for key in values}):
        plain, memory = values.get((rate, "fo beta 1.00"), {}), values.get((rate, "fo beta 0.90"), {})
        if not plain or not memory:
            continue
        last = [{seed: pair[0] for seed, pair in found.items()} for found in (plain, memory)]
        peak = [summarise([pair[1] for pair in found.values()]).mean for found in (plain, memory)]
        between = paired(last[1], last[0])
        told = "-" if between is None else f"{100 * between.mean:+.1f}"
        if between is not None and between.low is not None and between.high is not None:
            told += f" ({100 * between.low:+.1f} to {100 * between.high:+.1f})"
        means = [100 * summarise(list(each.values())).mean for each in last]
        lines.append(
            f"| {rate:g} | {means[0]:.1f} | {means[1]:.1f} | {told} | {100 * peak[0]:.1f} | {100 * peak[1]:.1f} |"
        )
    return [*lines, "", "The paper prints 32.4 and 36.5, a difference of +4.1, at 0.8.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--paper", default="fo", choices=list(PAGE), help="FO-DP-SGD or SMA-DP-SGD")
    parser.add_argument("--data", required=True, help="folder with the datasets")
    parser.add_argument("--out", type=Path, help="folder of the pool (default: runs/reproduction or runs/sma)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hands", type=int, default=1, help="processes that train stacks")
    parser.add_argument("--alone", type=int, default=1, help="processes that train, on the CPU, what cannot be stacked")
    parser.add_argument("--largest", type=int, default=200, help="runs in a stack, at most")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no batch is begun")
    parser.add_argument("--small", action="store_true", help="a rehearsal of everything, with next to no steps")
    parser.add_argument("--render", type=Path, help="run nothing: write folders, tables and plot from what is there")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="comparisons whose tuning the study takes in")
    arguments = parser.parse_args()
    arguments.out = arguments.out or Path("runs", "sma" if arguments.paper == "sma" else "reproduction")
    if arguments.render is None:
        make(arguments)
    else:
        render(arguments)


if __name__ == "__main__":
    main()
