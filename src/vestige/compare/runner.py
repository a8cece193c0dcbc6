"""How are many runs made? From a folder, by processes or a Ray cluster; killed and started again, nothing is lost."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from vestige import accounting
from vestige.compare import comparison
from vestige.compare.comparison import Record, Run, Specification
from vestige.compare.execute import Place, examples, explain, failure, footprint, perform, room, stackable
from vestige.compare.folder import ATTEMPTS, ComparisonFolder
from vestige.compare.processes import dismiss, hire
from vestige.methods.registry import METHODS
from vestige.questions import Question

PAUSE = 0.3
"""Seconds between two looks at the folder."""
LARGEST_STACK = 256
"""Runs trained together at most: they are on record when the last step is done, so a kill loses them all."""


@dataclass(frozen=True)
class Status:
    """What a progress display shows."""

    done: int
    failed: int
    total: int
    seconds_left: float | None
    best: str


Watch = Callable[[Status], None]


def compare(
    folder: str | Path,
    specification: Specification | None = None,
    *,
    place: Place | None = None,
    engine: str = "local",
    workers: int = 1,
    address: str | None = None,
    watch: Watch | None = None,
) -> ComparisonFolder:
    """Make every run of a comparison that is not on record yet; without a specification, continue the folder's own.

    Formal guarantees: each record states the guarantee of its own run, released alone. Publishing several runs, or
    choosing by them, costs more: `prices` says how much the choice of a learning rate does.
    """
    home = ComparisonFolder(folder)
    if specification is not None:
        home.create(specification)
    agreed = home.specification()
    _check_methods(agreed)
    problems = (*agreed.problems, *(specification.problems if specification is not None else ()))
    data = {problem.task: problem.data for problem in problems if problem.data is not None}
    place = place or Place()
    place = replace(place, data={**data, **place.data})
    _check_data(home, place)
    meter = Meter(home, watch)
    if engine == "local":
        _by_processes(home, place, workers, meter)
    elif engine == "ray":
        _by_ray(home, place, workers, address, meter)
    else:
        raise ValueError(f"engine={engine!r} is unknown; choose local or ray")
    meter.show()
    return home


def grid_of(specification: Specification) -> dict[str, list[comparison.Trial]]:
    return comparison.trials(specification, {name: entry.options for name, entry in METHODS.items()})


def settled(home: ComparisonFolder) -> list[Record]:
    """The folder's records, final runs at a rate that no longer wins marked as superseded."""
    specification = home.specification()
    return comparison.settled(specification, grid_of(specification), home.records())


def prices(home: ComparisonFolder) -> list[dict[str, Any]]:
    """What tuning costs with and without charging it, by the Papernot-Steinke bound."""
    specification = home.specification()
    return comparison.tuning_prices(specification, grid_of(specification), home.records(), _tuned_price)


def _tuned_price(charged: Sequence[Sequence[dict[str, Any]]], delta: float, trials: int, repeats: int) -> float | None:
    """The epsilon of the rate chosen by so many trials, and of one final run with it."""
    asked = {json.dumps(rows, sort_keys=True): rows for rows in charged}
    histories = [{Question.from_json(row): row["count"] for row in rows} for rows in asked.values()]
    try:
        return accounting.tuned_epsilon(histories, delta, trials, repeats=repeats, final_runs=1)
    except ValueError:
        return None  # a question without a Renyi curve has no such bound


def _check_data(home: ComparisonFolder, place: Place) -> None:
    """Records made here would stand beside those on record: both must be of as many examples."""
    counted: dict[str, float] = {}
    for record in home.records().values():
        if record["status"] == "done" and not record["run"]["holdout"]:
            counted[record["run"]["task"]] = record["expected_batch"] / record["run"]["sample_rate"]
    for task, there in counted.items():
        here = examples(task, place)
        if here is not None and round(there) != here:
            raise ValueError(
                f"data={place.data.get(task)!r} holds {here} training examples of {task}, and the runs on record in "
                f"{str(home.path)!r} were made of {round(there)}: give --data the same data, or start another folder"
            )


def _check_methods(specification: Specification) -> None:
    for contender in specification.contenders:
        if contender.method not in METHODS:
            raise ValueError(
                f"methods={contender.method!r} is unknown; choose from {', '.join(METHODS)} (or: all of them, 'all')"
            )


class Meter:
    """Counts what is on record, guesses the time left, and tells the watcher."""

    def __init__(self, home: ComparisonFolder, watch: Watch | None) -> None:
        self.home, self.watch = home, watch
        self.specification = home.specification()
        self.grid = grid_of(self.specification)
        self.total = comparison.total(self.specification, self.grid)
        self._begin, self._before = time.monotonic(), len(home.records())

    def show(self) -> None:
        if self.watch is None:
            return
        records = self.home.records()
        settled = comparison.settled(self.specification, self.grid, records)
        standing = sum(record["run"]["stage"] != comparison.SUPERSEDED for record in settled)
        made = len(records) - self._before
        left = max(0, self.total - standing)
        seconds = (time.monotonic() - self._begin) / made * left if made else None
        failed = sum(record["status"] == "failed" for record in records.values())
        self.watch(Status(standing, failed, self.total, seconds, self._best(settled)))

    def _best(self, settled: list[Record]) -> str:
        """The best final row of the last task and largest budget that has one."""
        rows = [row for row in comparison.rows(settled, self.specification.baseline) if row["mean"] is not None]
        if not rows:
            return ""
        last = max(rows, key=lambda row: (row["budget_value"], row["mean"]))
        return f"{last['method']} ({last['rate']}) {last['mean']:.1%} at {last['budget']}, {last['task']}"


# --- processes -------------------------------------------------------------------------------------------------------


def work(
    home: ComparisonFolder,
    place: Place,
    workers: int = 1,
    after: Callable[[], None] | None = None,
    due: Callable[[dict[str, Record]], list[Run]] | None = None,
) -> None:
    """Make runs until none is left; several processes or machines may do so in one folder at once.

    `due` names the runs wanted, given those on record: the folder's own comparison unless it is said otherwise.
    """
    wanted = due or _own(home)
    while True:
        waiting = wanted(home.records())
        if not waiting:
            return
        batch = _claimed(home, waiting, place, workers)
        if not batch:
            time.sleep(PAUSE)  # the rest is in other hands
            continue
        try:
            home.begin(batch)
            with home.alive(batch):
                for record in perform(batch, place):
                    home.keep(record)
        finally:
            for run in batch:
                home.release(run)
        if after is not None:
            after()


def _own(home: ComparisonFolder) -> Callable[[dict[str, Record]], list[Run]]:
    specification = home.specification()
    grid = grid_of(specification)
    return lambda records: comparison.due(specification, grid, records)


def _claimed(home: ComparisonFolder, waiting: Sequence[Run], place: Place, workers: int) -> list[Run]:
    """The next run that nobody has claimed, and as many others as may be stacked on it.

    Runs whose process died come last: what really kills it holds nothing up, and what does not is not hit again.
    """
    batch: list[Run] = []
    common, most, free = None, 1, 0
    taken = home.claimed()
    for run in sorted(_by_method(waiting), key=lambda run: run.id in taken):
        if batch and (common is None or len(batch) >= most or free <= 0):
            break
        key = stackable(run, place) if not batch or run.task == batch[0].task else None
        if batch and key != common:
            continue
        deaths = home.claim(run, beside=len(batch))
        if deaths is None:
            continue
        if deaths >= ATTEMPTS:
            line = f"its process died {deaths} times while making it alone (killed, or out of memory)"
            home.keep(failure(run, f"{line}; --resume FOLDER --retry tries again"))
            home.release(run)
            continue
        if run.id in home.records():  # finished between our look and our claim
            home.release(run)
            continue
        batch.append(run)
        if len(batch) == 1 and key is not None:
            common, alike = key, sum(stackable(other, place) == key for other in waiting)
            most, free = min(LARGEST_STACK, -(-alike // workers)), room(place)
        most = min(most, home.largest_stack(run) or most)
        if common is not None:
            free -= footprint(run, place)
    return batch


def _by_method(runs: Sequence[Run]) -> list[Run]:
    """The same runs, those of one method side by side: a stack steps once for each kind in it."""
    met = {method: place for place, method in enumerate(dict.fromkeys(run.method for run in runs))}
    return sorted(runs, key=lambda run: met[run.method])


def _by_processes(home: ComparisonFolder, place: Place, workers: int, meter: Meter) -> None:
    if workers < 1:
        raise ValueError(f"workers={workers} must be a whole number from 1 up")
    if workers == 1:
        work(home, place, after=meter.show)
        return
    threads = max(1, (os.cpu_count() or workers) // workers)
    hands: list[BaseProcess] = []
    deaths = 0
    try:
        hands += (hire(_worker, str(home.path), place, workers, threads) for _ in range(workers))
        while any(process.is_alive() for process in hands):
            time.sleep(PAUSE)
            meter.show()
            for index, process in enumerate(hands):
                if not process.is_alive() and process.exitcode and deaths < 20 * workers:
                    deaths += 1
                    hands[index] = hire(_worker, str(home.path), place, workers, threads)
    finally:
        dismiss(hands)
    if any(process.exitcode for process in hands):
        raise OSError("the worker processes keep dying; what they finished is on record: run the command again")


def _worker(path: str, place: Place, workers: int, threads: int) -> None:
    torch.set_num_threads(threads)
    work(ComparisonFolder(path), place, workers)


# --- Ray -------------------------------------------------------------------------------------------------------------


def _by_ray(home: ComparisonFolder, place: Place, workers: int, address: str | None, meter: Meter) -> None:
    """Send the runs to a Ray cluster. Only this process writes to the folder, so the nodes need not share a disk."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ValueError("engine='ray' needs Ray: pip install 'vestige[ray]'") from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False, configure_logging=False)
    needs = {"num_cpus": 1, "num_gpus": 1 if place.device.startswith("cuda") else 0}
    # A run is repeated elsewhere when its node dies: its record was never written, so nothing was released.
    remote = ray.remote(max_retries=ATTEMPTS, **needs)(_perform_there)
    held: list[Run] = []
    try:
        with home.alive(held):
            _send(home, place, max(1, workers), meter, ray, remote, held)
    finally:
        for run in held:
            home.release(run)


def _send(
    home: ComparisonFolder, place: Place, slots: int, meter: Meter, ray: Any, remote: Any, held: list[Run]
) -> None:
    """Keep the cluster busy until nothing is left; `held` are the runs that are claimed meanwhile."""
    wanted = _own(home)
    under_way: dict[Any, list[Run]] = {}
    while True:
        busy = {run.id for run in held}
        waiting = [run for run in wanted(home.records()) if run.id not in busy]
        while waiting and len(under_way) < 2 * slots:
            batch = _claimed(home, waiting, place, max(2, slots))
            if not batch:
                break
            held += batch
            under_way[remote.remote(batch, place)] = batch
            taken = {run.id for run in batch}
            waiting = [run for run in waiting if run.id not in taken]
        if not under_way:
            if not waiting:
                return
            time.sleep(PAUSE)
            continue
        ready, _ = ray.wait(list(under_way), timeout=2.0)
        for reference in ready:
            batch = under_way.pop(reference)
            for record in _fetched(ray, reference, batch):
                home.keep(record)
            for run in batch:
                home.release(run)
                held.remove(run)
        meter.show()


def _perform_there(runs: Sequence[Run], place: Place) -> list[Record]:
    return list(perform(runs, place))


def _fetched(ray: Any, reference: Any, batch: Sequence[Run]) -> list[Record]:
    try:
        records: list[Record] = ray.get(reference)
    except Exception as error:  # the node died too often, or the cluster cannot run it at all
        return [failure(run, explain(error)) for run in batch]
    return records
