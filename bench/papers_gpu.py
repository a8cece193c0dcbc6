"""What must still be run to judge the three papers, in which order, and how long does it take? All of it, resumable.

    python bench/papers_gpu.py plan --out runs/papers
    python bench/papers_gpu.py run --data DATA --out runs/papers --minutes 25 [--device cuda] [--only sma-table2 ...]

`plan` prints every piece with its runs, seconds and priority, and what is done. `run` makes them in that order:
SMA-DP-SGD and DPSGD-BR as printed, then FO-DP-SGD's tables, then figures, then scans; in each, what can be stacked
first. Each run is made once, whichever pieces want it, in stacks of at most `--largest` (minutes each); killed or out
of time, what is finished is on record and the same command goes on. Runs that are timed are made one by one, in a pool
of their own. After every stack OUT/results.json has a row for each run, which is all that `bench/papers_docs.py` needs.
DATA is a folder with cifar10.npz (whole, or cifar10_7k.npz), cifar100 and svhn (likewise), mnist.npz,
fashion_mnist.npz and imdb.jsonl.gz.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vestige.compare import presets, runs
from vestige.compare.execute import Machine, perform, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.files import write_json
from vestige.records import CompletedRun, Run, completed

SEEDS = 13
"""So many that our exact test can tell the rows of one table apart."""
STACKED = ("mlp",)
"""The models of tasks whose runs are stacked."""


def _own(run: Run) -> bool:
    return run.method in ("fo-dp-sgd", "dp-sgd") or run.method.startswith("sma")


def _paper(run: Run) -> bool:
    """The paper's own sigma and learning rate."""
    return run.budget.kind == "paper_sigma" and run.stage == "given"


def _all(run: Run) -> bool:
    return True


@dataclass(frozen=True)
class Piece:
    """Runs of one preset that are made together."""

    preset: str
    priority: int
    what: str
    only: Callable[[Run], bool] = _all
    seeds: int = SEEDS

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.what}"

    def wanted(self) -> list[Run]:
        """Its runs; those that can be stacked first."""
        specification = presets.find(self.preset).specification(None, seeds=self.seeds)
        found = [run for run in runs.due(specification, runs.grid_of(specification), {}) if self.only(run)]
        return sorted(found, key=seconds)


PIECES = (
    Piece("sma-table2", 1, "SMA-DP-SGD and DP-SGD on the paper's terms", lambda run: _own(run) and _paper(run)),
    Piece("sma-table2", 1, "SMA-DP-SGD and DP-SGD, the rest", _own),
    Piece("sma-table3", 1, "depths by interval", _paper, 3),
    Piece("sma-table4", 1, "runtime", lambda run: run.label in ("dp-sgd", "sma 2-6", "sma 2-6 epoch"), 3),
    Piece("sma-schedule", 1, "a spectrum at every step against one an epoch"),
    Piece("sma-clip", 1, "C for each layer against C / sqrt(G)"),
    Piece("fo-table3", 2, "FO-DP-SGD and DP-SGD on the paper's terms", lambda run: _own(run) and _paper(run)),
    Piece("fo-table3", 2, "FO-DP-SGD and DP-SGD, the rest", _own),
    Piece("fo-rates", 2, "seven learning rates"),
    Piece("fo-table3", 2, "the rivals that stack", lambda run: run.method != "dp-is"),
    Piece("fo-fig2", 3, "five betas, three datasets", lambda run: run.stage == "given" or run.budget.kind == "epsilon"),
    Piece("fo-fig5", 3, "before and after the noise"),
    Piece("fo-fig4", 3, "memory depth"),
    Piece("fo-fig8", 3, "memory designs"),
    Piece("fo-alpha", 3, "fractional orders"),
    Piece("sma-fig3", 3, "four betas"),
    Piece("sma-shuffled", 3, "shuffled spectra"),
    Piece("sma-alpha", 3, "fractional orders"),
    Piece("sma-window", 3, "windows"),
    Piece("br-fig4", 3, "buffers 1 to 4", lambda run: run.stage == "given", 2),
    Piece("br-decay", 3, "decay and batch of the loss test", lambda run: run.stage == "given", 1),
    Piece("fo-fig1", 3, "three datasets, rivals that stack", lambda run: run.method != "dp-is"),
    Piece("sma-fig2", 3, "three datasets, rivals that stack", lambda run: run.method != "dp-is"),
    Piece("fo-scan", 4, "lambda, tau, gamma, kappa, zeta", _all, 5),
    Piece("fo-fig7", 4, "clips, rivals that stack", lambda run: run.method != "dp-is"),
    Piece("sma-fig4", 4, "spectra of a ResNet-18", _all, 1),
    Piece("fo-table1", 4, "runtime", _all, 3),
    Piece("sma-table4", 4, "runtime of the rivals", _all, 3),
    Piece("br-fig7", 4, "buffer and decay", lambda run: run.stage == "given", 1),
    Piece("br-fig5", 4, "updates at epsilon 1", lambda run: run.stage == "given", 1),
    Piece("br-fig8", 4, "T_max, p and k", lambda run: run.stage == "given", 1),
    Piece("br-table2", 4, "accuracy at epsilon 1 to 4", lambda run: run.stage == "given", 1),
    Piece("fo-fig1", 4, "DP-IS", lambda run: run.method == "dp-is", 3),
)


def seconds(run: Run) -> float:
    """About how long a run takes on one H200, its share of a stack; the first runs say how far this is off."""
    if not run.task.endswith(STACKED):
        return 60.0 if "resnet" in run.task else 120.0
    if run.method in ("dp-is", "dp-micro-adam", "dp-muon", "geoclip"):
        return alone(run)
    return (0.5 if run.method == "sma-dp-sgd" else 0.15) * run.steps / 6250


def alone(run: Run) -> float:
    """The same for a run that is not stacked."""
    return (60.0 if run.method == "sma-dp-sgd" else 25.0) * run.steps / 6250


def timed(piece: Piece) -> bool:
    return presets.find(piece.preset).timed


def pool_of(piece: Piece, out: Path) -> ComparisonFolder:
    return ComparisonFolder(out / "timed" if timed(piece) else out)


def due(piece: Piece, records: Mapping[str, Any]) -> list[Run]:
    """What is not on record; a run with a curve serves for the same one without."""
    made = {record.run.without_curve.id for record in records.values()}
    return [run for run in piece.wanted() if run.without_curve.id not in made]


def batches(waiting: Sequence[Run], machine: Machine, largest: int, alone: bool) -> Iterator[list[Run]]:
    """Runs to be made together: stacks of those that have enough in common, or one at a time."""
    by_key: dict[Any, list[Run]] = {}
    for run in waiting:
        key = None if alone else stackable(run, machine)
        if key is None:
            yield [run]
        else:
            by_key.setdefault((key, run.method), []).append(run)
    for stack in by_key.values():
        for first in range(0, len(stack), largest):
            yield stack[first : first + largest]


def run(arguments: argparse.Namespace) -> None:
    until = time.time() + 60 * arguments.minutes
    for piece in chosen(arguments):
        pool = pool_of(piece, arguments.out)
        pool.create_pool()
        waiting = due(piece, pool.records())
        missing = {each.task for each in waiting if not _readable(each.task, arguments.data)}
        data = {each.task: str(arguments.data) for each in waiting}
        machine = Machine(arguments.device, data)
        waiting = [each for each in waiting if each.task not in missing]
        print(
            f"{piece.name}: {len(waiting)} runs to make" + (f", without {sorted(missing)}" if missing else ""),
            flush=True,
        )
        for batch in sorted(batches(waiting, machine, arguments.largest, timed(piece)), key=lambda each: -len(each)):
            if time.time() > until:
                print("out of time: the same command goes on", flush=True)
                return
            begin = time.time()
            for record in perform(batch, machine):
                pool.write(record)
            print(f"  {len(batch)} runs in {time.time() - begin:.0f} s ({batch[0]})", flush=True)
            found = [*rows(arguments.out), *rows(arguments.out / "timed")]
            write_json(arguments.out / "results.json", {"device": _device(arguments.device), "rows": found})


def _readable(task: str, data: Path) -> bool:
    stem = {"fmnist": "fashion_mnist"}.get(task.partition("-")[0], task.partition("-")[0])
    return any(data.glob(f"{stem}*"))


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"


def rows(out: Path) -> list[dict[str, Any]]:
    """One row for each run on record: what it was and what it reached."""
    return [_row(record) for record in completed(ComparisonFolder(out).records().values())]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _row(record: CompletedRun) -> dict[str, Any]:
    made, curve = record.run, record.curve or ()
    best = max([record.score, *(float(point[1]) for point in curve if point[1] is not None)])
    row = {
        "id": made.without_curve.id if record.stacked > 1 or curve else f"timed {made.id}",
        "task": made.task, "label": made.label, "method": made.method, "options": dict(made.options),
        "budget": str(made.budget), "stage": made.stage, "seed": made.seed, "steps": record.steps,
        "accuracy": record.score, "best": best, "epsilon": record.statement.epsilon, "lr": record.statement.lr,
        "seconds": record.seconds, "stacked": record.stacked,
        "curve": [[step, _short(score), _short(spent)] for step, score, spent in curve] if _paper(made) else [],
    }  # fmt: skip
    means = {}
    for name in ("effective_depth", "memory_ratio"):
        series = [value for _, value in record.pictures.get(name, ()) if isinstance(value, float | int)]
        if series:
            means[name] = sum(series) / len(series)
    if record.selection is not None:
        means |= {"trials": record.selection.trials, "updates": record.selection.updates}
    return {**row, **means}


def chosen(arguments: argparse.Namespace) -> list[Piece]:
    known = [piece for piece in PIECES if piece.preset in presets.PRESETS]
    unknown = [name for name in arguments.only or () if name not in {piece.preset for piece in known}]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: choose from {', '.join(dict.fromkeys(p.preset for p in known))}")
    return [piece for piece in known if not arguments.only or piece.preset in arguments.only]


def plan(arguments: argparse.Namespace) -> None:
    print("\n".join(planned(chosen(arguments), arguments.out)))


def planned(pieces: Sequence[Piece], out: Path | None, done: Collection[str] = ()) -> list[str]:
    """Every piece as a row of a table: runs that no earlier piece has, seconds, and how many are done: on record in
    OUT, or among the rows `done`."""
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    lines = [
        "| priority | piece | runs | seeds | done | seconds left on an H200 (estimate) |",
        "|---|---|---|---|---|---|",
    ]
    for piece in pieces:
        records = {} if out is None else pool_of(piece, out).records()
        made, known = {record.run.without_curve.id for record in records.values()}, seen[timed(piece)]
        made |= {each.removeprefix("timed ") for each in done if each.startswith("timed ") == timed(piece)}
        new = {each.without_curve.id: each for each in piece.wanted() if each.without_curve.id not in known}
        known.update(new)
        left = sum(alone(each) if timed(piece) else seconds(each) for key, each in new.items() if key not in made)
        there, what = sum(key in made for key in new), f"`{piece.preset}`: {piece.what}"
        lines.append(f"| {piece.priority} | {what} | {len(new)} | {piece.seeds} | {there} | {left:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("do", choices=["plan", "run"])
    parser.add_argument("--data", type=Path, help="folder with the datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--minutes", type=float, default=10.0, help="no stack is begun after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=int, default=256, help="runs in a stack, at most")
    parser.add_argument("--only", nargs="*", help="only pieces of these presets")
    arguments = parser.parse_args()
    if arguments.do == "plan":
        plan(arguments)
        return
    if arguments.data is None or not arguments.data.is_dir():
        raise SystemExit(f"--data {arguments.data}: give the folder that holds the datasets")
    run(arguments)


if __name__ == "__main__":
    main()
