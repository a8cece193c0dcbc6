"""How does a DataLoader draw private samples? Whole or in parts, with workers, and safe to leave at any time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler, default_collate

from vestige.engines.audit_canaries import Canaries
from vestige.mechanism.loading import RowByRow, reads_lists
from vestige.mechanism.users.loaders_of_users import LoaderOfUsers
from vestige.mechanism.users.ownership import RowsOfEach
from vestige.privacy_engine.microbatch_queue import Microbatch, MicrobatchQueue
from vestige.processes.group import Processes
from vestige.randomness.keys import HoldsKey, Randomness
from vestige.randomness.sampling import Sampling


class PrivateBatches(HoldsKey, Sampler[list[int]]):
    """Index lists of samples, each split into parts of at most `physical_batch`; an empty draw is one part.

    With random allocation every pass over the loader is an epoch with an allocation of its own: one that was left early
    is not resumed. Every part is announced as it is drawn, in the process that draws: no other library that rebuilds
    the loader around this sampler can lose it.

    Canaries are further rows of the population: they join by the same law and the same stream. In a batch each is
    carried by a copy of a row of its draw (of row 0 in one without), whose gradient it replaces.

    Where the population are `users`, a part has all rows of its users, side by side: no user's rows are split over
    physical batches or processes.
    """

    poisson = True

    def __init__(
        self,
        population: int,
        sampling: Sampling,
        randomness: Randomness,
        steps: int,
        physical_batch: int | None,
        parts: MicrobatchQueue,
        canaries: Canaries | None,
        group: Processes,
        users: RowsOfEach | None,
    ) -> None:
        self._group, self._users = group, users
        self.population, self._sampling, self.steps, self.physical_batch = population, sampling, steps, physical_batch
        self._randomness, self.parts, self._canaries = randomness, parts, canaries

    @property
    def rate(self) -> float:
        """As it is priced: it cannot be set."""
        return self._sampling.rate

    @property
    def batch_size(self) -> int:
        """The expected one."""
        each = 1.0 if self._users is None else self._users.mean
        return max(1, round(self.rate * self.population * each))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.parts.forget()
        self.parts.draws += -self.parts.draws % self._sampling.period
        for _ in range(self.steps):
            draw = self.parts.draws
            self.parts.draws += 1
            if self._users is not None:
                yield from self._of_users(draw, self._users)
                continue
            canaries, there, planted = self._canaries, [], 0
            everyone = self._sampling.draw(
                self.population + (0 if canaries is None else canaries.count), draw, self._randomness
            )
            people = joined = self._group.own(everyone).tolist()
            if canaries is not None:
                there, planted = canaries.present(people, self.population), int((everyone >= self.population).sum())
                people = [row for row in people if row < self.population]
                joined = people + [people[0] if people else 0] * len(there)
            size = self.physical_batch or max(1, len(joined))
            starts = range(0, len(joined), size) or range(1)
            for number, start in enumerate(starts):
                piece = joined[start : start + size]
                few = there[max(0, start - len(people)) : max(0, start + size - len(people))]
                part = Microbatch(draw, number, number == len(starts) - 1, len(piece), tuple(few), planted)
                self.parts.announce(part)
                yield piece + [piece[0] if piece else 0] * (part.rows - len(piece))

    def _of_users(self, draw: int, users: RowsOfEach) -> Iterator[list[int]]:
        own = self._group.own(self._sampling.draw(self.population, draw, self._randomness))
        parts = [own] if self.physical_batch is None else users.parts(own, self.physical_batch)
        for number, few in enumerate(parts):
            found, counts = users.together(draw, few)
            rows = found.tolist()
            part = Microbatch(draw, number, number == len(parts) - 1, len(rows), users=tuple(counts))
            self.parts.announce(part)
            yield rows + [rows[0] if rows else 0] * (part.rows - len(rows))


class Labelling:
    """A collate_fn whose batches are labelled where no `PrivateLoader` hands them out: other libraries that rebuild a
    loader keep its collate_fn."""

    def __init__(self, collate: Callable[[Any], Any], parts: MicrobatchQueue) -> None:
        self._collate, self._parts = collate, parts

    def __call__(self, rows: Any) -> Any:
        own = self._collate is not default_collate
        batch = self._parts.tracking.collate(self._collate, rows) if own else self._collate(rows)
        self._parts.collated(batch)
        return batch


class PrivateLoader(DataLoader[Any]):
    """A loader over private samples that announces each batch when it yields it: workers fetch others meanwhile."""

    collates: Callable[[Any], Any]
    """As it was made private."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.collate_fn is not self.collates:
            raise ValueError(
                "collate_fn of the private loader was replaced, and what it makes of several rows would not be "
                "followed: give it to the DataLoader that make_private takes"
            )
        batches: Any = self.batch_sampler
        with batches.parts.handed_out() as hand_out:
            for batch in super().__iter__():
                hand_out(batch)
                yield batch
                batches.parts.pause()


def draws_per_epoch(rate: float) -> int:
    """How many samples of its rate a pass over a dataset is."""
    return max(1, round(1 / rate))


def private_loader(
    loader: DataLoader[Any],
    sampling: Sampling,
    randomness: Randomness,
    physical_batch: int | None,
    parts: MicrobatchQueue,
    canaries: Canaries | None,
    group: Processes,
    owned: LoaderOfUsers,
) -> DataLoader[Any]:
    """The user's loader with private samples instead of its own batches; everything else as it was. Of several
    processes each gets its own examples of every draw."""
    dataset: Any = loader.dataset
    steps, users = draws_per_epoch(sampling.rate), owned.rows_of_each(randomness)
    batches = PrivateBatches(
        owned.population, sampling, randomness, steps, physical_batch, parts, canaries, group, users
    )
    private = PrivateLoader(
        RowByRow(dataset) if reads_lists(dataset) else dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn if loader.num_workers else Labelling(loader.collate_fn, parts),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    private.collates = private.collate_fn
    made: DataLoader[Any] = private
    if hasattr(loader, "base_dataloader") or (group.several and _accelerated()):
        made = _prepared(made)
    if group.several:  # each process has its own rows of a draw: Accelerate must not distribute draws
        made._is_accelerate_prepared = True  # type: ignore[attr-defined]
    return made


def _accelerated() -> bool:
    """Whether there is an Accelerator, which may prepare the loader later."""
    accelerate = sys.modules.get("accelerate.state")
    return accelerate is not None and bool(accelerate.PartialState._shared_state)


def _prepared(loader: DataLoader[Any]) -> DataLoader[Any]:
    """As Accelerate prepares a loader for one process: batches come to its device, and all of them."""
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import PartialState

    return prepare_data_loader(loader, PartialState().device, num_processes=1, process_index=0, put_on_device=True)
