"""What must still be run to judge the three papers, in which order, and how long does it take? All of it, resumable.

    python bench/papers_gpu.py plan --out runs/papers
    python bench/papers_gpu.py times --data DATA --out runs/papers [--rounds 8]
    python bench/papers_gpu.py run --data DATA --out runs/papers --minutes 10 [--workers 6] [--only sma-table2 ...]

`plan` prints every piece with its runs, seconds and priority, and what is done. `run` prints that too, then times a
step of every method of the papers' runtime tables, and makes the runs in the order of the table: SMA-DP-SGD and
DPSGD-BR as printed, then FO-DP-SGD's tables, then figures, then scans. Models are tiny and a step waits for launches,
so runs are stacked (up to `--largest`), and `--workers` processes share the device. Each run is made once, whichever
pieces want it. No stack is begun that would not end in time, and after `--minutes` everything ends; what is finished is
on record, and the same command goes on; `--have FILE` leaves out runs whose rows are in it. OUT/results.json has a row
for each run, which is all that `bench/papers_docs.py` needs; it is written every ten seconds. `times` takes the step
times alone.

DATA is a folder with cifar10_7k.npz (or the whole cifar10.npz), cifar100 and svhn (likewise), mnist.npz,
fashion_mnist.npz and imdb.jsonl.gz; or the .images.zip of bench/papers_data.py in their place. Pieces whose data are
not there are left out, and the plan says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import papers_rows
from vestige.compare import execute_run, paper_presets, run_grid
from vestige.compare.execute_run import Machine, perform, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.compare.report.figures import COMPONENTS
from vestige.files import read_json, write_json
from vestige.optim.spectral import tail_exponent
from vestige.run_records import CompletedRun, FailedRun, Run, completed
from vestige.training.job import start

SEEDS = 13
"""So many that our exact test can tell the rows of one table apart."""
FILES = {
    "cifar10": ("cifar10.npz", "cifar10_7k.npz"),
    "cifar100": ("cifar100.npz", "cifar100_7k.npz"),
    "svhn": ("svhn.npz", "svhn_7k.npz"),
    "mnist": ("mnist.npz",),
    "fmnist": ("fashion_mnist.npz",),
    "imdb": ("imdb.jsonl.gz",),
}
EPOCH = 25
"""Steps that are timed together."""


def _own(run: Run) -> bool:
    return run.method in ("fo-dp-sgd", "dp-sgd") or run.method.startswith("sma")


def _paper(run: Run) -> bool:
    """The paper's own sigma and learning rate."""
    return run.budget.kind == "paper_sigma" and run.stage == "given"


def _equal(run: Run) -> bool:
    """One epsilon for all methods, at the automatic rate."""
    return run.budget.kind == "epsilon" and run.stage == "auto"


def _both(run: Run) -> bool:
    return _paper(run) or _equal(run)


def _given(run: Run) -> bool:
    return run.stage == "given"


def _stacks(run: Run) -> bool:
    return run.method != "dp-is"


@dataclass(frozen=True)
class Piece:
    """Runs of one preset that are made together."""

    preset: str
    priority: int
    what: str
    only: Callable[[Run], bool]
    seeds: int = SEEDS
    steps: int | None = None
    """Only so many steps, with an evaluation every ten: the beginning of runs whose noise and rate are given."""

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.what}"

    def wanted(self) -> list[Run]:
        specification = paper_presets.find(self.preset).specification(None, seeds=self.seeds)
        if self.steps is not None:
            specification = replace(specification, steps=self.steps, evaluations=self.steps // 10)
        return [run for run in run_grid.due(specification, run_grid.grid_of(specification), {}) if self.only(run)]


def _at(epsilon: float) -> Callable[[Run], bool]:
    return lambda run: run.stage == "given" and run.budget.value == epsilon


PIECES = (
    Piece("sma-table2", 1, "SMA-DP-SGD and DP-SGD on the paper's terms", lambda run: _own(run) and _paper(run)),
    Piece("sma-table3", 1, "depths by interval", _paper, 3),
    Piece("br-table4", 1, "the printed parameters at epsilon 1", _given, 2),
    Piece("br-fig4", 1, "buffers 1 to 4", _given, 2),
    Piece("sma-table2", 1, "SMA-DP-SGD and DP-SGD at one epsilon", lambda run: _own(run) and _equal(run)),
    Piece("sma-clip", 1, "C for each layer against C / sqrt(G)", _paper),
    Piece("sma-schedule", 1, "a spectrum at every step against one an epoch", _paper),
    Piece("fo-table3", 2, "FO-DP-SGD and DP-SGD", lambda run: _own(run) and _both(run)),
    Piece("fo-table3", 2, "the rivals that stack", lambda run: _stacks(run) and (_both(run) or run.stage == "auto")),
    Piece("fo-fig2", 3, "the first twenty epochs of five betas, three datasets", _paper, steps=500),
    Piece("fo-fig5", 3, "the first twenty epochs before and after the noise", _paper, steps=500),
    Piece("sma-fig3", 3, "the first twenty epochs of four betas", _paper, steps=500),
    Piece("fo-fig2", 3, "five betas, three datasets", _paper),
    Piece("fo-fig5", 3, "before and after the noise", _paper),
    Piece("fo-fig8", 3, "memory designs", _paper),
    Piece("fo-fig4", 3, "memory depth", _paper),
    Piece("fo-alpha", 3, "fractional orders", _paper),
    Piece("sma-fig3", 3, "four betas", _paper),
    Piece("sma-shuffled", 3, "shuffled spectra", _paper),
    Piece("sma-alpha", 3, "fractional orders", _paper),
    Piece("sma-window", 3, "windows", _paper),
    Piece("sma-fig2", 3, "three datasets, SMA-DP-SGD and DP-SGD", lambda run: _own(run) and _paper(run)),
    Piece("fo-scan", 4, "lambda, tau, gamma, kappa, zeta", _both),
    Piece("br-decay", 4, "decay and batch of the loss test", _given, 2),
    Piece("br-table2", 4, "the field at epsilon 1", _at(1.0), 2),
    Piece("br-table2-hf", 4, "DPSGD-HF at epsilon 1", lambda run: run.method == "dp-sgd" and _at(1.0)(run), 2),
    Piece("fo-fig1", 4, "three datasets, rivals that stack", lambda run: _stacks(run) and _paper(run)),
    Piece("fo-fig2", 4, "five betas, three datasets, at one epsilon", _equal),
    Piece("fo-rates", 4, "seven learning rates", _given),
    Piece("fo-fig4", 4, "memory depth, at one epsilon", _equal),
    Piece("fo-fig8", 4, "memory designs, at one epsilon", _equal),
    Piece("sma-clip", 4, "C for each layer, at one epsilon", _equal),
    Piece("sma-shuffled", 4, "shuffled spectra, at one epsilon", _equal),
    Piece("br-fig7", 4, "buffer and decay", _given, 1),
    Piece("br-fig8", 4, "T_max, p and k", _given, 1),
    Piece("br-fig5", 4, "updates at epsilon 1", _given, 1),
    Piece("sma-fig2", 4, "three datasets, rivals that stack", lambda run: _stacks(run) and _paper(run)),
    Piece("fo-fig7", 4, "clips, rivals that stack", lambda run: _stacks(run) and _given(run)),
    Piece("sma-fig4", 4, "spectra of a ResNet-18", _given, 1),
    Piece("br-table2", 4, "accuracy at epsilon 2 to 4", _given, 1),
    Piece("br-fig6", 4, "accuracy against epsilon", _given, 1),
    Piece("fo-table3", 4, "DP-IS", lambda run: not _stacks(run) and _both(run), 3),
)


# --- how long a run takes --------------------------------------------------------------------------------------------

TRIALS = {"mnist-ts": 20.0, "fmnist-ts": 30.0, "cifar10-ts": 90.0, "imdb-lstm": 150.0, "cifar10-resnet18": 60.0}
TRIALS |= {"mnist-hf": 25.0, "fmnist-hf": 40.0, "cifar10-hf": 120.0}
"""Seconds of a run of these tasks on one H200, guessed before the first was made; the runs correct it."""


def seconds(run: Run) -> float:
    """About how long a run takes on one H200: its share of a stack, or alone."""
    if run.task in TRIALS:
        return TRIALS[run.task]
    if run.method == "dp-is":
        return 25.0 * run.steps / 6250
    return (0.4 if run.method.startswith("sma") else 0.15) * run.steps / 6250


def stack_seconds(batch: Sequence[Run]) -> float:
    """The same for runs that are made together, each kind of which is a step of its own."""
    if len(batch) == 1:
        return seconds(batch[0])
    kinds = len({run.label for run in batch})
    return (6.0 + 2.0 * kinds) * batch[0].steps / 6250 + sum(map(seconds, batch))


# --- data ------------------------------------------------------------------------------------------------------------


def unpacked(data: Path, out: Path) -> Path:
    """DATA, or a folder in OUT with the images that were packed there and links to the rest."""
    packed = sorted(data.glob("*.images.zip"))
    if not packed:
        return data
    from papers_data import SUFFIX, unpack

    here = out / "data"
    here.mkdir(parents=True, exist_ok=True)
    for file in packed:
        if not (here / f"{file.name.removesuffix(SUFFIX)}.npz").exists():
            unpack(file, here)
    for file in (*data.glob("*.npz"), *data.glob("*.jsonl.gz")):
        if not (here / file.name).exists():
            (here / file.name).symlink_to(file.resolve())
    return here


def readable(piece: Piece, task: str, data: Path) -> bool:
    """Whether the data of a task are there: whole, where the protocol takes them whole."""
    names = FILES.get(task.partition("-")[0], ())
    file = next((data / name for name in names if (data / name).exists()), None)
    whole = paper_presets.find(piece.preset).whole.get(task)
    if file is None or whole is None or file.suffix != ".npz":
        return file is not None
    with np.load(file) as arrays:
        return (len(arrays["y_train"]), len(arrays["y_test"])) == whole


# --- spectra of a stack ----------------------------------------------------------------------------------------------


class Batched:
    """`spectrum.Background` for a stack: all Gram matrices are padded to one size and decomposed by one call where the
    weights lie. Zeros are below the floor of the fit, so padding adds nothing to it."""

    def __init__(
        self, weights: Sequence[Tensor], convention: tail_exponent.Convention, floor: float = tail_exponent.FLOOR
    ):
        grams = tail_exponent._grams([tail_exponent._matrices(weight, convention) for weight in weights])
        longest = max(gram.shape[-1] for gram in grams)
        by_size: dict[int, list[int]] = {}
        for index, gram in enumerate(grams):
            by_size.setdefault(gram.shape[-1], []).append(index)
        parts = []
        for size, members in by_size.items():
            parts.append(torch.nn.functional.pad(torch.cat([grams[i] for i in members]), [0, longest - size] * 2))
        order = torch.tensor([index for members in by_size.values() for index in members]).argsort()
        values = tail_exponent._eigenvalues(torch.cat(parts)).clamp(min=0.0)
        self._found = tail_exponent._fit(values, floor)[order.to(values.device)]

    def go_on(self) -> None:
        pass

    def result(self) -> Tensor:
        return self._found


def solver(device: str, runs_: int = SEEDS) -> str:
    """Whether the CPU's threads or the device find the spectra of a stack faster, here and now."""
    if not device.startswith("cuda"):
        return "threads"
    shapes = ((64, 3072), (32, 64), (10, 32))
    weights = [0.05 * torch.randn(shape, device=device) for shape in shapes for _ in range(runs_)]
    spent = {}
    for name, kind in (("threads", tail_exponent.Background), ("device", Batched)):
        for turn in range(4):
            if turn == 1:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            kind(weights, "flatten").result().sum().item()
        spent[name] = (time.perf_counter() - begin) / 3
    print(
        f"  spectra of {runs_} runs: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in spent.items()), flush=True
    )
    return min(spent, key=lambda name: spent[name])


# --- the runs --------------------------------------------------------------------------------------------------------


def due(piece: Piece, records: Mapping[str, Any]) -> list[Run]:
    """What is not on record; a run with a curve serves for the same one without."""
    made = {record.run.without_curve.id for record in records.values()}
    return [run for run in piece.wanted() if run.without_curve.id not in made]


def batches(waiting: Sequence[Run], machine: Machine, largest: int) -> Iterator[list[Run]]:
    """Runs to be made together: stacks of those that have enough in common, the same methods side by side, or one at a
    time. Spectra are found by the CPU, so that runs with and without them are in stacks of their own, and those with
    them in smaller ones, for more cores."""
    by_key: dict[Any, list[Run]] = {}
    singles = []
    for run in waiting:
        key = stackable(run, machine)
        if key is None:
            singles.append([run])
        else:
            by_key.setdefault((key, run.method.startswith("sma")), []).append(run)
    for (_, spectral), stack in by_key.items():
        count = -(-len(stack) // (max(1, largest // 3) if spectral else largest))
        size = -(-len(stack) // count)
        alike = sorted(stack, key=lambda run: (run.method, run.label))
        for first in range(0, len(stack), size):
            yield alike[first : first + size]
    yield from singles


@dataclass
class Progress:
    """The batches that wait, in order, and how far the estimates of each kind were off."""

    waiting: list[list[Run]]
    until: float
    factors: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def kind(batch: Sequence[Run]) -> str:
        alone = batch[0].task if len(batch) == 1 else "stack"
        return f"{alone} sma" if batch[0].method.startswith("sma") else alone

    def next(self, stacks_only: bool = False) -> list[Run] | None:
        """The first that can end in time."""
        left = self.until - time.time()
        for place, batch in enumerate(self.waiting):
            fits = stack_seconds(batch) * self.factors.get(self.kind(batch), 1.0) < left
            if fits and (len(batch) > 1 or not stacks_only):
                return self.waiting.pop(place)
        return None

    def took(self, batch: Sequence[Run], spent: float) -> None:
        off, before = spent / stack_seconds(batch), self.factors.get(self.kind(batch))
        self.factors[self.kind(batch)] = off if before is None else 0.5 * (before + off)


def make(batch: Sequence[Run], machine: Machine, pool: ComparisonFolder, found: str | None) -> list[str]:
    """Make the runs of a batch and write their records; the errors of those that failed."""
    errors = []
    stacked_on_device = found == "device" and len(batch) > 1 and batch[0].method.startswith("sma")
    with _spectra_on_device() if stacked_on_device else nullcontext():
        for record in perform(batch, machine):
            pool.write(record)
            if isinstance(record, FailedRun):
                errors.append(f"{record.run}: {record.error}")
    return errors


def _spectra_on_device() -> AbstractContextManager[Any]:
    return mock.patch.object(tail_exponent, "Background", Batched)


def serve(connection: Connection, out: Path, machine: Machine, threads: int) -> None:
    """A worker: makes the batches that it is sent until it is sent None."""
    torch.set_num_threads(threads)
    pool, found = ComparisonFolder(out), None
    while (batch := connection.recv()) is not None:
        begin = time.time()
        if found is None and batch[0].method.startswith("sma"):
            found = solver(machine.device)
        errors = make(batch, machine, pool, found)
        connection.send((time.time() - begin, found, errors))


def run(arguments: argparse.Namespace) -> None:
    begin, until = time.time(), time.time() + 60 * arguments.minutes
    data, pool = unpacked(arguments.data, arguments.out), ComparisonFolder(arguments.out)
    pool.create_pool()
    pool.remove_failures()
    pieces = chosen(arguments)
    print("\n".join(planned(pieces, arguments.out, data=data)), flush=True)
    if arguments.times:
        timed(arguments, data, min(until, time.time() + arguments.times))
    waiting: list[list[Run]] = []
    seen = {row["id"] for row in papers_rows.read(arguments.have)["rows"]} if arguments.have else set()
    machine = Machine(arguments.device, {task: str(data) for task in {r.task for p in pieces for r in p.wanted()}})
    for _, group in groupby(pieces, key=lambda piece: piece.priority):
        alike: list[Run] = []
        for piece in group:
            new = [each for each in due(piece, pool.records()) if each.without_curve.id not in seen]
            alike += (each for each in new if readable(piece, each.task, data))
            seen |= {each.without_curve.id for each in new}
        waiting += batches(alike, machine, arguments.largest)
    progress = Progress(waiting, until)
    print(f"{sum(map(len, waiting))} runs in {len(waiting)} stacks, from {time.time() - begin:.0f} s on", flush=True)
    if arguments.workers > 1:
        by_workers(arguments, progress, machine, pool, begin)
    else:
        alone(arguments, progress, machine, pool, begin)
    left = sum(map(len, progress.waiting))
    write(arguments, pool)
    print(f"{time.time() - begin:.0f} s; {left} runs are left: the same command goes on", flush=True)


def alone(arguments: Any, progress: Progress, machine: Machine, pool: ComparisonFolder, begin: float) -> None:
    found = None
    while (batch := progress.next()) is not None:
        start_ = time.time()
        if found is None and batch[0].method.startswith("sma"):
            found = solver(machine.device)
        errors = make(batch, machine, pool, found)
        progress.took(batch, time.time() - start_)
        tell(batch, time.time() - begin, time.time() - start_, errors)
        write(arguments, pool)


def by_workers(arguments: Any, progress: Progress, machine: Machine, pool: ComparisonFolder, begin: float) -> None:
    """Hand batches to processes that share the device; at the end of the time they are ended, whatever they do.

    At most half of the processes make single runs, which wait for launches while stacks fill the device.
    """
    context = multiprocessing.get_context("spawn")
    threads = 1 + max(1, (os.cpu_count() or 1) // arguments.workers)  # only stacks of SMA-DP-SGD use more than one
    idle, busy, written = [], {}, time.time()  # type: list[Any], dict[Any, tuple[list[Run], float]], float
    processes = []
    for _ in range(arguments.workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, arguments.out, machine, threads), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        idle.append(ours)
    try:
        while time.time() < progress.until:
            while idle:
                singles = sum(len(batch) == 1 for batch, _ in busy.values())
                batch = progress.next(stacks_only=2 * singles >= arguments.workers) or progress.next()
                if batch is None:
                    break
                connection = idle.pop(0)
                connection.send(batch)
                busy[connection] = batch, time.time()
            if not busy:
                break
            for connection in wait(list(busy), timeout=1.0):
                batch, _ = busy.pop(connection)
                try:
                    spent, _, errors = connection.recv()
                except EOFError:
                    print(f"  a worker died with {len(batch)} runs ({batch[0]})", flush=True)
                    continue
                progress.took(batch, spent)
                tell(batch, time.time() - begin, spent, errors)
                idle.append(connection)
            if time.time() - written > 10:
                write(arguments, pool)
                written = time.time()
        progress.waiting += [batch for batch, _ in busy.values()]
        for connection in idle:
            connection.send(None)
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()


def tell(batch: Sequence[Run], now: float, spent: float, errors: Sequence[str]) -> None:
    print(f"  {now:.0f} s: {len(batch)} runs in {spent:.1f} s ({batch[0]})", flush=True)
    for line in errors[:2]:
        print(f"    failed ({len(errors)}): {line}", flush=True)


def write(arguments: Any, pool: ComparisonFolder) -> None:
    """OUT/results.json: all that `bench/papers_docs.py` needs."""
    times = arguments.out / "times.json"
    content = {
        "device": _device(arguments.device),
        "rows": [_row(record) for record in completed(pool.records().values())],
        "times": read_json(times) if times.exists() else None,
    }
    write_json(arguments.out / "results.json", content)


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _thinned(curve: Sequence[tuple[float | None, ...]]) -> list[tuple[float | None, ...]]:
    """Of a run that was evaluated after every epoch the first twenty, where accuracy rises, and every fifth."""
    return [point for place, point in enumerate(curve, 1) if len(curve) <= 50 or place <= 20 or place % 5 == 0]


def _row(record: CompletedRun) -> dict[str, Any]:
    """What a run was and what it reached."""
    made, curve = record.run, record.curve or ()
    row = {
        "id": made.without_curve.id,
        "task": made.task, "label": made.label, "method": made.method, "options": dict(made.options),
        "budget": str(made.budget), "stage": made.stage, "seed": made.seed, "steps": record.steps,
        "accuracy": record.score, "best": record.best, "epsilon": record.statement.epsilon,
        "lr": record.statement.lr, "seconds": record.seconds, "stacked": record.stacked,
        "curve": [[point[0], *map(_short, point[1:])] for point in _thinned(curve)] if _paper(made) else [],
    }  # fmt: skip
    means: dict[str, Any] = {}
    for name in ("effective_depth", "memory_ratio"):
        series = [value for _, value in record.pictures.get(name, ()) if isinstance(value, float | int)]
        if series:
            means[name] = sum(series) / len(series)
    components = _by_component(record)
    if components:
        means["components"] = components
    if record.selection is not None:
        means |= {"trials": record.selection.trials, "updates": record.selection.updates}
        means |= {"accepted": record.selection.accepted}
    return {**row, **means}


def _by_component(record: CompletedRun) -> dict[str, list[float]]:
    """Exponent and tempering of each component of a ResNet-18: means over its layers and over training."""
    found = {}
    for name, members in COMPONENTS.items() if record.run.task.endswith("-resnet18") else ():
        pair = []
        for key in ("exponent", "tempering"):
            values = [value[i] for _, value in record.pictures.get(key, ()) for i in members if value[i] is not None]
            pair += [sum(values) / len(values)] if values else []
        if len(pair) == 2:
            found[name] = pair
    return found


# --- the times of a step ---------------------------------------------------------------------------------------------


def timed(arguments: argparse.Namespace, data: Path, until: float) -> None:
    """Time a step of every method of the papers' runtime tables, in a process of its own that is ended in time."""
    if not (data / "cifar10_7k.npz").exists() and not (data / "cifar10.npz").exists():
        return
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=time_steps, args=(arguments.device, str(data), arguments.out, arguments.rounds))
    process.start()
    process.join(max(1.0, until - time.time()))
    if process.is_alive():
        print("  the step times were not finished", flush=True)
        process.kill()


def time_steps(device: str, data: str, out: Path, rounds: int) -> None:
    """Seconds of an epoch (25 steps) of each method, in turn, so that what else the machine does falls on all."""
    wanted: dict[str, Run] = {}
    for name in ("sma-table4", "fo-table1"):
        specification = paper_presets.find(name).specification(None, seeds=1)
        for each in run_grid.due(specification, run_grid.grid_of(specification), {}):
            wanted.setdefault(each.label, each)
    machine = Machine(device, {each.task: data for each in wanted.values()})
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    steps: dict[str, Iterator[Any]] = {}
    for label, each in wanted.items():
        task = execute_run._task(each, machine)
        steps[label] = iter(start(execute_run._job(each, machine), None, task=task, budget=False)[1].steps())
    spent: dict[str, list[float]] = {label: [] for label in steps}
    labels = list(steps)
    for turn in range(rounds + 2):
        for label in labels[turn % len(labels) :] + labels[: turn % len(labels)]:
            synchronize()
            begin = time.perf_counter()
            for _ in islice(steps[label], EPOCH):
                pass
            synchronize()
            if turn > 1:  # the first two are rehearsals
                spent[label].append(time.perf_counter() - begin)
        if turn > 1:
            plain = spent["dp-sgd"]
            rows = [
                {
                    "label": label,
                    "step_ms": 1e3 * statistics.median(mine) / EPOCH,
                    "ratio": statistics.median(a / b for a, b in zip(mine, plain, strict=True)),
                    "least": min(a / b for a, b in zip(mine, plain, strict=True)),
                    "most": max(a / b for a, b in zip(mine, plain, strict=True)),
                    "rounds": len(mine),
                }
                for label, mine in spent.items()
            ]
            where = {"device": _device(device), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
            write_json(out / "times.json", {**where, "rows": rows})
    print("  step times: " + ", ".join(f"{row['label']} {row['ratio']:.2f}" for row in rows), flush=True)


# --- the plan --------------------------------------------------------------------------------------------------------


def chosen(arguments: argparse.Namespace) -> list[Piece]:
    unknown = [name for name in arguments.only or () if name not in {piece.preset for piece in PIECES}]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: choose from {', '.join(dict.fromkeys(p.preset for p in PIECES))}")
    return [piece for piece in PIECES if not arguments.only or piece.preset in arguments.only]


def planned(
    pieces: Sequence[Piece], out: Path | None, done: Collection[str] = (), data: Path | None = None
) -> list[str]:
    """Every piece as a row of a table: runs that no earlier piece has, seconds, and how many are done: on record in
    OUT, or among the rows `done`."""
    lines = [
        "| priority | piece | runs | seeds | done | seconds left on an H200 (estimate) |",
        "|---|---|---|---|---|---|",
    ]
    records = {} if out is None else ComparisonFolder(out).records()
    made, known = {*done, *(record.run.without_curve.id for record in records.values())}, set[str]()
    for piece in pieces:
        new = {each.without_curve.id: each for each in piece.wanted() if each.without_curve.id not in known}
        known.update(new)
        left = sum(seconds(each) for key, each in new.items() if key not in made)
        there, what = sum(key in made for key in new), f"`{piece.preset}`: {piece.what}"
        absent = sorted({t for t in {e.task for e in new.values()} if data and not readable(piece, t, data)})
        what += f" (without {', '.join(absent)})" if absent else ""
        lines.append(f"| {piece.priority} | {what} | {len(new)} | {piece.seeds} | {there} | {left:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("do", choices=["plan", "run", "times"])
    parser.add_argument("--data", type=Path, help="folder with the datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--minutes", type=float, default=10.0, help="everything ends after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6, help="processes that share the device")
    parser.add_argument("--largest", type=int, default=200, help="runs in a stack, at most")
    parser.add_argument("--times", type=float, default=75.0, help="seconds for the times of a step, at most; 0: none")
    parser.add_argument("--rounds", type=int, default=8, help="epochs of each method that are timed")
    parser.add_argument("--have", type=Path, help="rows that need not be made again (docs/results/papers.json)")
    parser.add_argument("--only", nargs="*", help="only pieces of these presets")
    arguments = parser.parse_args()
    if arguments.do == "plan":
        print("\n".join(planned(chosen(arguments), arguments.out, data=arguments.data)))
        return
    if arguments.data is None or not arguments.data.is_dir():
        raise SystemExit(f"--data {arguments.data}: give the folder that holds the datasets")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.do == "times":
        timed(arguments, unpacked(arguments.data, arguments.out), time.time() + arguments.times)
        write(arguments, ComparisonFolder(arguments.out))
        return
    run(arguments)


if __name__ == "__main__":
    main()
