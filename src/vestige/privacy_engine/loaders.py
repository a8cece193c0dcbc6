"""How does a DataLoader draw private samples? Whole or in parts, with workers, and safe to leave at any time."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data import default_collate as torch_collate

from vestige.privacy_engine.parts import Part, Parts
from vestige.processes.group import ALONE, Processes
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Sampling


class PrivateBatches(Sampler[list[int]]):
    """Index lists of samples, each split into parts of at most `physical_batch`; an empty draw is one part.

    With random allocation every pass over the loader is an epoch with an allocation of its own: one that was left early
    is over. Every part is announced as it is drawn, in the process that draws: no other library that rebuilds the
    loader around this sampler can lose it.

    `planted` canaries are further rows of the population: they join by the same law and the same stream, and are
    announced with the last part of a draw, since no batch holds them.
    """

    poisson = True

    def __init__(
        self,
        population: int,
        sampling: Sampling,
        randomness: Randomness,
        steps: int,
        physical_batch: int | None,
        parts: Parts,
        planted: int = 0,
        group: Processes = ALONE,
    ) -> None:
        self._group = group
        self.population, self._sampling, self.steps, self.physical_batch = population, sampling, steps, physical_batch
        self._randomness, self._draws, self.parts, self._planted = randomness, 0, parts, planted
        parts.restart = self._restart

    def _restart(self, draw: int) -> None:
        assert self._randomness.predictable, "a secret sample is never handed out twice"
        self._draws = draw

    @property
    def rate(self) -> float:
        """As it is priced: it cannot be set."""
        return self._sampling.rate

    @property
    def batch_size(self) -> int:
        """The expected one."""
        return max(1, round(self.rate * self.population))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.parts.forget()
        self._draws += -self._draws % self._sampling.period
        for _ in range(self.steps):
            draw = self._draws
            self._draws += 1
            everyone = self._sampling.draw(self.population + self._planted, draw, self._randomness)
            joined, planted = self._group.own(everyone).tolist(), tuple[int, ...]()
            if self._planted:
                planted = tuple(row - self.population for row in joined if row >= self.population)
                joined = [row for row in joined if row < self.population]
            size = self.physical_batch or max(1, len(joined))
            pieces = [joined[i : i + size] for i in range(0, len(joined), size)] or [[]]
            for number, piece in enumerate(pieces):
                last = number == len(pieces) - 1
                self.parts.announce(Part(draw, number, last, len(piece), planted if last else ()))
                yield piece


class PrivateLoader(DataLoader[Any]):
    """A loader over private samples that tells when it hands one out: workers fetch others meanwhile."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches: Any = self.batch_sampler
        with batches.parts.handed_out() as hand_out:
            for batch in super().__iter__():
                hand_out()
                yield batch


def draws_per_epoch(rate: float) -> int:
    """How many samples of its rate a pass over a dataset is."""
    return max(1, round(1 / rate))


def private_loader(
    loader: DataLoader[Any],
    sampling: Sampling,
    randomness: Randomness,
    physical_batch: int | None,
    parts: Parts,
    planted: int = 0,
    group: Processes = ALONE,
    ending: int | None = None,
) -> DataLoader[Any]:
    """The user's loader with private samples instead of its own batches; everything else as it was. Of several
    processes each gets its own examples of every draw. `ending` is a token that sequences may have to end with."""
    dataset: Any = loader.dataset
    steps = draws_per_epoch(sampling.rate)
    batches = PrivateBatches(len(dataset), sampling, randomness, steps, physical_batch, parts, planted, group)
    made: DataLoader[Any] = PrivateLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=CollateEmpty(dataset, loader.collate_fn or torch_collate, ending),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    if hasattr(loader, "base_dataloader") or (group.several and _accelerated()):
        made = _prepared(made)
    if group.several:  # each process has its own rows of a draw: nobody deals out draws
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


class CollateEmpty:
    """Collates an empty sample into one made-up row: an example lends its shapes, and nothing else of it is kept."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[Any], Any], ending: int | None = None) -> None:
        self.dataset, self.collate, self.ending = dataset, collate, ending

    def __call__(self, rows: Any) -> Any:
        if not _empty(rows):
            return self.collate(rows)
        several = getattr(self.dataset, "__getitems__", None)
        made = made_up_row(self.collate(several([0]) if several else [self.dataset[0]]))
        ids = made.get("input_ids") if isinstance(made, Mapping) else None
        if self.ending is not None and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1]:
            ids[:, -1] = self.ending
        return made


def _empty(rows: Any) -> bool:
    """Whether nothing was fetched: no rows, or, of a dataset that fetches several as one, tensors of none."""
    if isinstance(rows, list):
        return not rows
    first = next(iter(rows.values() if type(rows) is dict else rows), None) if type(rows) in (dict, tuple) else None
    if isinstance(first, Tensor) and first.ndim and len(first):
        return False
    leaves = tree_leaves(dict(rows) if isinstance(rows, Mapping) else rows)
    parts = [part for part in leaves if isinstance(part, Tensor | np.ndarray) and part.ndim]
    return bool(parts) and all(len(part) == 0 for part in parts)


def made_up_row(batch: Any, name: str = "") -> Any:
    """A batch of the same shapes without anything of its examples: zeros, and ones where masks are. What it cannot look
    into is refused: it would be handed out as it is."""
    if isinstance(batch, Tensor):
        return torch.ones_like(batch) if "mask" in name else torch.zeros_like(batch)
    if isinstance(batch, np.ndarray):
        return np.ones_like(batch) if "mask" in name else np.zeros_like(batch)
    if isinstance(batch, MutableMapping):  # a tokenizer's too
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = made_up_row(value, str(key))
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(made_up_row(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(made_up_row(value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        other: Any = copy.copy(batch)  # type: ignore[arg-type]
        for each in dataclasses.fields(batch):
            object.__setattr__(other, each.name, made_up_row(getattr(batch, each.name), each.name))
        return other
    if batch is None or isinstance(batch, str | bytes | int | float | bool):
        return None if batch is None else type(batch)()
    raise ValueError(
        f"nobody is in this sample, and of what the loader's collate_fn makes, a {type(batch).__name__}, no row can be "
        "made up: let it return tensors, arrays, numbers and texts in lists, tuples, dicts or dataclasses"
    )
