"""How are many runs made? By a pool of processes or a Ray cluster, into a folder; a kill loses no recorded run."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from vestige.budget.spending import Budget
from vestige.compare import aggregate_results, run_grid
from vestige.compare.execute_run import Machine, examples, explain, memory_in_stack, perform, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.compare.payment import paid
from vestige.compare.specification import Specification
from vestige.methods.registry import ALIASES, METHODS
from vestige.processes.torchrun import require_alone
from vestige.run_records import FailedRun, Run, RunRecord, completed, failed

SHOWN_EVERY = 0.3
"""Seconds between two updates of the progress display."""
LARGEST_STACK = 256
"""The most runs trained together: they are recorded only after the last step, so a kill loses them all."""
ATTEMPTS = 3
"""A run is recorded as failed after its process died this many times while it made that run alone."""
SMALLER = 4
"""A stack whose process died is made again in this many parts."""


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
    if workers < 1:
        raise ValueError(f"workers={workers} must be a whole number from 1 up")
    with folder.locked(), paid(folder, agreed, machine, budget):
        meter = Meter(folder, on_progress)
        due = _due_of(folder)
        if engine == "ray":
            _by_ray(folder, machine, workers, address, due, meter.show)
        else:
            make(folder, machine, workers, due, meter.show)
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
        self.grid = run_grid.grid_of(self.specification)
        self.total = run_grid.total(self.specification, self.grid)
        self._begin, self._before = time.monotonic(), len(folder.records())

    def show(self) -> None:
        if self.on_progress is None:
            return
        records = self.folder.records()
        gone = run_grid.superseded(self.specification, self.grid, records)
        standing = [record for record in records.values() if record.id not in gone]
        made = len(records) - self._before
        left = max(0, self.total - len(standing))
        seconds = (time.monotonic() - self._begin) / made * left if made else None
        broken = len(failed(records.values()))
        self.on_progress(Status(len(standing), broken, self.total, seconds, self._best(standing)))

    def _best(self, records: Sequence[RunRecord]) -> str:
        """The best final row of the last task and largest budget that has one."""
        rows = [row for row in aggregate_results.rows(records, self.specification.baseline) if row["mean"] is not None]
        if not rows:
            return ""
        last = max(rows, key=lambda row: (row["budget_value"], row["mean"]))
        return f"{last['method']} ({last['rate']}) {last['mean']:.1%} at {last['budget']}, {last['task']}"


# --- one process, or a pool of them ----------------------------------------------------------------------------------

Records = list[RunRecord]


def make(
    folder: ComparisonFolder, machine: Machine, workers: int, due: DueRuns, after: Callable[[], None] | None = None
) -> None:
    """Make runs until none is due: in this process, or with several `workers` in a pool. `after` is called as records
    are written. A worker that dies takes no other run with it; Ctrl-C ends all workers."""
    if workers == 1:
        _dispatch(folder, machine, Slots(1, 1, lambda batch: _made_here(batch, machine)), due, after)
        return
    pool = _Pool(workers, machine)
    try:
        _dispatch(folder, machine, Slots(workers, workers, pool.submit), due, after)
    finally:
        pool.end()


def _made_here(batch: Sequence[Run], machine: Machine) -> Future[Records]:
    made: Future[Records] = Future()
    made.set_result(list(perform(batch, machine)))
    return made


class _Pool:
    """Worker processes of `concurrent.futures`, replaced where one of them died."""

    def __init__(self, workers: int, machine: Machine) -> None:
        self.workers, self.machine = workers, machine
        self._others = multiprocessing.active_children()
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, batch: Sequence[Run]) -> Future[Records]:
        threads = max(1, (os.cpu_count() or self.workers) // self.workers)
        with _ctrl_c_blocked():  # a worker process is started here
            if self._executor is not None:
                with contextlib.suppress(BrokenProcessPool):
                    return self._executor.submit(_perform_all, batch, self.machine)
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.workers, context, _start_worker, (threads,))
            return self._executor.submit(_perform_all, batch, self.machine)

    def end(self) -> None:
        """End the workers, also those in the middle of a run: what they have not finished is not on record."""
        for process in multiprocessing.active_children():
            if process not in self._others:
                process.terminate()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a worker whose parent was killed; it would wait for runs for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


def _perform_all(batch: Sequence[Run], machine: Machine) -> Records:
    return list(perform(batch, machine))


# --- Ray -------------------------------------------------------------------------------------------------------------


def _by_ray(
    folder: ComparisonFolder,
    machine: Machine,
    workers: int,
    address: str | None,
    due: DueRuns,
    after: Callable[[], None],
) -> None:
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
    slots = Slots(2 * workers, max(2, workers), lambda batch: remote.remote(batch, machine).future())
    _dispatch(folder, machine, slots, due, after)


# --- what is made next -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Where batches are made: how many at once, among how many equal runs are divided, and how one is begun."""

    count: int
    share: int
    submit: Callable[[list[Run]], Future[Records]]


@dataclass
class _Deaths:
    """Which runs may have ended their process, by their ids."""

    alone: Counter[str] = field(default_factory=Counter)
    """How often, while it was made alone and nothing else was."""
    largest: dict[str, int] = field(default_factory=dict)
    """The largest stack in which to make a run again."""
    number: int = 0
    suspects: set[str] = field(default_factory=set)
    """Those that were being made when a worker died: they are made last, with nothing else under way."""

    def note(self, batches: Sequence[Sequence[Run]]) -> Iterator[FailedRun]:
        """A worker died, and with it all batches under way; one that was alone is known to be the cause."""
        self.number += 1
        self.suspects.update(run.id for batch in batches for run in batch)
        if len(batches) > 1:
            return
        (batch,) = batches
        if len(batch) > 1:
            self.largest.update((run.id, -(-len(batch) // SMALLER)) for run in batch)
            return
        (run,) = batch
        self.alone[run.id] += 1
        if self.alone[run.id] >= ATTEMPTS:
            line = f"its process died {ATTEMPTS} times while making it alone (killed, or out of memory)"
            yield FailedRun(run, f"{line}; --resume FOLDER --retry tries again")


def _due_of(folder: ComparisonFolder) -> DueRuns:
    specification = folder.specification()
    grid = run_grid.grid_of(specification)
    return lambda records: run_grid.due(specification, grid, records)


def _dispatch(
    folder: ComparisonFolder, machine: Machine, slots: Slots, due: DueRuns, after: Callable[[], None] | None
) -> None:
    """Keep the slots busy until no run is due, and write down what comes back."""
    under_way: dict[Future[Records], list[Run]] = {}
    deaths, wanted = _Deaths(), due(folder.records())
    while True:
        busy = {run.id for batch in under_way.values() for run in batch}
        waiting = [run for run in wanted if run.id not in busy]
        while waiting and len(under_way) < slots.count and not busy & deaths.suspects:
            batch = next_batch(waiting, machine, slots.share, deaths)
            if under_way and batch[0].id in deaths.suspects:
                break
            under_way[slots.submit(batch)] = batch
            taken = {run.id for run in batch}
            busy |= taken
            waiting = [run for run in waiting if run.id not in taken]
        if not under_way:
            return
        done, _ = wait(under_way, timeout=SHOWN_EVERY, return_when=FIRST_COMPLETED)
        if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
            wait(under_way)  # none of them comes back
            done = set(under_way)
            lost = [batch for future, batch in under_way.items() if future.exception() is not None]
            for hopeless in deaths.note(lost):
                folder.write(hopeless)
            if deaths.number > 20 * slots.count:
                raise OSError("the worker processes keep dying; what they finished is on record: run the command again")
        for future in done:
            batch, error = under_way.pop(future), future.exception()
            if error is None:
                records: Sequence[RunRecord] = future.result()
            elif isinstance(error, BrokenProcessPool):
                records = ()
            else:  # a node died too often, or the cluster cannot run it at all
                records = [FailedRun(run, explain(error)) for run in batch]
            for record in records:
                folder.write(record)
        if done:
            wanted = due(folder.records())
        if after is not None:
            after()


def next_batch(waiting: Sequence[Run], machine: Machine, share: int, deaths: _Deaths | None = None) -> list[Run]:
    """The next run, and as many others as may be stacked with it; equal runs are divided into `share` stacks.

    Runs that were under way when a worker died come last: one that ends its process then delays no other.
    """
    known = deaths or _Deaths()
    first, *others = sorted(_by_method(waiting), key=lambda run: run.id in known.suspects)
    key = stackable(first, machine)
    if key is None:
        return [first]
    alike = [run for run in others if run.task == first.task and stackable(run, machine) == key]
    most = min(LARGEST_STACK, -(-(1 + len(alike)) // share), known.largest.get(first.id, LARGEST_STACK))
    batch, free = [first], machine.available_memory() - memory_in_stack(first, machine)
    for run in alike:
        most = min(most, known.largest.get(run.id, most)) if run.id in known.suspects else most
        if len(batch) >= most or free <= 0 or (run.id in known.suspects) != (first.id in known.suspects):
            break
        batch.append(run)
        free -= memory_in_stack(run, machine)
    return batch


def _by_method(waiting: Sequence[Run]) -> list[Run]:
    """The same runs, grouped by method: a stack makes one update for each kind of method in it."""
    met = {method: place for place, method in enumerate(dict.fromkeys(run.method for run in waiting))}
    return sorted(waiting, key=lambda run: met[run.method])
