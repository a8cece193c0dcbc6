"""How are many runs made? From a folder, by worker processes or a Ray cluster; a kill loses no recorded run."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from vestige.budget.account import Budget
from vestige.compare import runs, tables
from vestige.compare.claims import ATTEMPTS
from vestige.compare.execute import Machine, examples, explain, memory_in_stack, perform, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.compare.payment import paid
from vestige.compare.specification import Specification
from vestige.methods.registry import ALIASES, METHODS
from vestige.processes.launch import require_alone
from vestige.records import FailedRun, Run, RunRecord, completed, failed

POLL = 0.3
"""Seconds between two reads of the folder."""
LARGEST_STACK = 256
"""The most runs trained together: they are recorded only after the last step, so a kill loses them all."""


@dataclass(frozen=True)
class Status:
    """What a progress display shows."""

    done: int
    failed: int
    total: int
    seconds_left: float | None
    best: str


OnProgress = Callable[[Status], None]
DueRuns = Callable[[Mapping[str, RunRecord]], list[Run]]
"""The runs to make, given those on record."""


def compare(
    path: str | Path,
    specification: Specification | None = None,
    *,
    machine: Machine | None = None,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    budget: Budget = None,
    on_progress: OnProgress | None = None,
) -> ComparisonFolder:
    """Make every run of a comparison that is not on record yet; without a specification, continue the folder's own.

    All runs that are not on record are charged at once, before the first of them, to the book that `budget` or
    VESTIGE_BUDGET names.

    Formal guarantees: each record states the guarantee of its own run, released alone. Publishing several runs, or
    choosing by them, costs more: `tables.tuning_prices` says how much the trials that a learning rate was chosen by do.
    """
    require_alone("a comparison")
    folder = ComparisonFolder(path)
    if specification is not None:
        folder.create(specification)
    agreed = folder.specification()
    _check_methods(agreed)
    problems = (*agreed.problems, *(specification.problems if specification is not None else ()))
    data = {problem.task: problem.data for problem in problems if problem.data is not None}
    machine = machine or Machine()
    machine = replace(machine, data={**data, **machine.data})
    _check_data(folder, machine)
    if engine not in ("local", "ray"):
        raise ValueError(f"engine={engine!r} is unknown; choose local or ray")
    with paid(folder, agreed, machine, budget):
        meter = Meter(folder, on_progress)
        if engine == "local":
            _by_processes(folder, machine, workers, meter)
        else:
            _by_ray(folder, machine, workers, address, meter)
    meter.show()
    return folder


def _check_data(folder: ComparisonFolder, machine: Machine) -> None:
    """Refuse data with another number of examples than the folder's records, which share tables with the new ones."""
    counted: dict[str, float] = {}
    subset = folder.specification().subset
    for record in completed(folder.records().values()):
        if not record.run.holdout:
            counted[record.run.task] = record.statement.expected_batch / record.run.sample_rate
    for task, there in counted.items():
        here = examples(task, machine, subset)
        if here is not None and round(there) != here:
            raise ValueError(
                f"data={machine.data.get(task)!r} holds {here} training examples of {task}, and the runs on record in "
                f"{str(folder.path)!r} were made of {round(there)}: give --data the same data, or start another folder"
            )


def _check_methods(specification: Specification) -> None:
    for contender in specification.contenders:
        if contender.method not in (*METHODS, *ALIASES):
            raise ValueError(
                f"methods={contender.method!r} is unknown; choose from {', '.join(METHODS)} (or: all of them, 'all')"
            )


class Meter:
    """Counts the records, estimates the time left, and reports both."""

    def __init__(self, folder: ComparisonFolder, on_progress: OnProgress | None) -> None:
        self.folder, self.on_progress = folder, on_progress
        self.specification = folder.specification()
        self.grid = runs.grid_of(self.specification)
        self.total = runs.total(self.specification, self.grid)
        self._begin, self._before = time.monotonic(), len(folder.records())

    def show(self) -> None:
        if self.on_progress is None:
            return
        records = self.folder.records()
        gone = runs.superseded(self.specification, self.grid, records)
        standing = [record for record in records.values() if record.id not in gone]
        made = len(records) - self._before
        left = max(0, self.total - len(standing))
        seconds = (time.monotonic() - self._begin) / made * left if made else None
        broken = len(failed(records.values()))
        self.on_progress(Status(len(standing), broken, self.total, seconds, self._best(standing)))

    def _best(self, records: Sequence[RunRecord]) -> str:
        """The best final row of the last task and largest budget that has one."""
        rows = [row for row in tables.rows(records, self.specification.baseline) if row["mean"] is not None]
        if not rows:
            return ""
        last = max(rows, key=lambda row: (row["budget_value"], row["mean"]))
        return f"{last['method']} ({last['rate']}) {last['mean']:.1%} at {last['budget']}, {last['task']}"


# --- one process -----------------------------------------------------------------------------------------------------


def work(
    folder: ComparisonFolder,
    machine: Machine,
    workers: int = 1,
    after: Callable[[], None] | None = None,
    due: DueRuns | None = None,
) -> None:
    """Make runs until none is left; several processes or machines may do so in one folder at once.

    `due` lists the runs to make: by default, those of the folder's own comparison.
    """
    wanted = due or _due_of(folder)
    while True:
        waiting = wanted(folder.records())
        if not waiting:
            return
        batch = _claim_batch(folder, waiting, machine, workers)
        if not batch:
            time.sleep(POLL)  # other processes have claimed the rest
            continue
        try:
            folder.claims.begin(batch)
            with folder.claims.kept_alive(batch):
                for record in perform(batch, machine):
                    folder.write(record)
        finally:
            for run in batch:
                folder.claims.release(run)
        if after is not None:
            after()


def _due_of(folder: ComparisonFolder) -> DueRuns:
    specification = folder.specification()
    grid = runs.grid_of(specification)
    return lambda records: runs.due(specification, grid, records)


def _claim_batch(folder: ComparisonFolder, waiting: Sequence[Run], machine: Machine, workers: int) -> list[Run]:
    """Claim the next run that no process has claimed, and as many others as may be stacked with it.

    Runs whose process died come last: one that kills its process then delays no other run and takes none down with it.
    """
    batch: list[Run] = []
    common, most, free = None, 1, 0
    taken = folder.claims.claimed()
    for run in sorted(_by_method(waiting), key=lambda run: run.id in taken):
        if batch and (common is None or len(batch) >= most or free <= 0):
            break
        key = stackable(run, machine) if not batch or run.task == batch[0].task else None
        if batch and key != common:
            continue
        deaths = folder.claims.claim(run, beside=len(batch))
        if deaths is None:
            continue
        if deaths >= ATTEMPTS:
            line = f"its process died {deaths} times while making it alone (killed, or out of memory)"
            folder.write(FailedRun(run, f"{line}; --resume FOLDER --retry tries again"))
            folder.claims.release(run)
            continue
        if run.id in folder.records():  # finished after we read the folder and before our claim
            folder.claims.release(run)
            continue
        batch.append(run)
        if len(batch) == 1 and key is not None:
            common, alike = key, sum(stackable(other, machine) == key for other in waiting)
            most, free = min(LARGEST_STACK, -(-alike // workers)), machine.available_memory()
        most = min(most, folder.claims.largest_stack(run) or most)
        if common is not None:
            free -= memory_in_stack(run, machine)
    return batch


def _by_method(waiting: Sequence[Run]) -> list[Run]:
    """The same runs, grouped by method: a stack makes one update for each kind of method in it."""
    met = {method: place for place, method in enumerate(dict.fromkeys(run.method for run in waiting))}
    return sorted(waiting, key=lambda run: met[run.method])


# --- worker processes ------------------------------------------------------------------------------------------------


def _by_processes(folder: ComparisonFolder, machine: Machine, workers: int, meter: Meter) -> None:
    if workers < 1:
        raise ValueError(f"workers={workers} must be a whole number from 1 up")
    if workers == 1:
        work(folder, machine, after=meter.show)
        return
    threads = max(1, (os.cpu_count() or workers) // workers)
    processes: list[BaseProcess] = []
    deaths = 0
    try:
        processes += (start_worker(_worker, str(folder.path), machine, workers, threads) for _ in range(workers))
        while any(process.is_alive() for process in processes):
            time.sleep(POLL)
            meter.show()
            for index, process in enumerate(processes):
                if not process.is_alive() and process.exitcode and deaths < 20 * workers:
                    deaths += 1
                    processes[index] = start_worker(_worker, str(folder.path), machine, workers, threads)
    finally:
        stop_workers(processes)
    if any(process.exitcode for process in processes):
        raise OSError("the worker processes keep dying; what they finished is on record: run the command again")


def _worker(path: str, machine: Machine, workers: int, threads: int) -> None:
    torch.set_num_threads(threads)
    work(ComparisonFolder(path), machine, workers)


def start_worker(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a worker process. It ignores Ctrl-C, which is for its parent to handle; terminated, it releases its claims
    and prints nothing."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_worker, args=(target, *arguments), daemon=True)
    with _ctrl_c_blocked():
        process.start()
    return process


def stop_workers(processes: Sequence[BaseProcess]) -> None:
    """Terminate the processes that still run, and wait for all."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join()


def _run_worker(target: Callable[..., None], *arguments: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    target(*arguments)


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """A process started inside inherits the blocked SIGINT, even while it imports torch; here it is only delayed."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # the first process would start it, and starting it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- Ray -------------------------------------------------------------------------------------------------------------


def _by_ray(folder: ComparisonFolder, machine: Machine, workers: int, address: str | None, meter: Meter) -> None:
    """Send the runs to a Ray cluster. Only this process writes to the folder, so the nodes need not share a disk."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ValueError("engine='ray' needs Ray: pip install 'vestige[ray]'") from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False, configure_logging=False)
    needs = {"num_cpus": 1, "num_gpus": 1 if machine.has_gpu else 0}
    # A run is repeated elsewhere when its node dies: its record was never written, so nothing was released.
    remote = ray.remote(max_retries=ATTEMPTS, **needs)(_perform_all)
    held: list[Run] = []
    try:
        with folder.claims.kept_alive(held):
            _dispatch(folder, machine, max(1, workers), meter, ray, remote, held)
    finally:
        for run in held:
            folder.claims.release(run)


def _dispatch(
    folder: ComparisonFolder, machine: Machine, slots: int, meter: Meter, ray: Any, remote: Any, held: list[Run]
) -> None:
    """Keep the cluster busy until no run is left; `held` are the runs claimed meanwhile."""
    wanted = _due_of(folder)
    under_way: dict[Any, list[Run]] = {}
    while True:
        busy = {run.id for run in held}
        waiting = [run for run in wanted(folder.records()) if run.id not in busy]
        while waiting and len(under_way) < 2 * slots:
            batch = _claim_batch(folder, waiting, machine, max(2, slots))
            if not batch:
                break
            held += batch
            under_way[remote.remote(batch, machine)] = batch
            taken = {run.id for run in batch}
            waiting = [run for run in waiting if run.id not in taken]
        if not under_way:
            if not waiting:
                return
            time.sleep(POLL)
            continue
        ready, _ = ray.wait(list(under_way), timeout=2.0)
        for reference in ready:
            batch = under_way.pop(reference)
            for record in _fetched(ray, reference, batch):
                folder.write(record)
            for run in batch:
                folder.claims.release(run)
                held.remove(run)
        meter.show()


def _perform_all(batch: Sequence[Run], machine: Machine) -> list[RunRecord]:
    return list(perform(batch, machine))


def _fetched(ray: Any, reference: Any, batch: Sequence[Run]) -> list[RunRecord]:
    try:
        records: list[RunRecord] = ray.get(reference)
    except Exception as error:  # the node died too often, or the cluster cannot run it at all
        return [FailedRun(run, explain(error)) for run in batch]
    return records
