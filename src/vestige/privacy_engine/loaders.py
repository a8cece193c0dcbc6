"""How does a DataLoader draw Poisson samples? Whole or in parts, with workers, and safe to leave at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson


@dataclass(frozen=True)
class Part:
    """Which part of which draw a physical batch is."""

    draw: int
    number: int
    last: bool
    size: int


class PoissonBatches(Sampler[list[int]]):
    """Index lists of Poisson samples, each split into parts of at most `physical_batch`; an empty draw is one part."""

    poisson = True

    def __init__(
        self, population: int, rate: float, randomness: Randomness, steps: int, physical_batch: int | None
    ) -> None:
        self.population, self.rate, self.steps, self.physical_batch = population, rate, steps, physical_batch
        self._randomness, self._draws = randomness, 0
        self.parts: list[Part] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        # A fresh list for each pass over the loader: parts of a pass that was broken off are forgotten with it.
        self.parts = parts = []
        for _ in range(self.steps):
            draw = self._draws
            self._draws += 1
            joined = Poisson(self.rate).draw(self.population, draw, self._randomness).tolist()
            size = self.physical_batch or max(1, len(joined))
            pieces = [joined[i : i + size] for i in range(0, len(joined), size)] or [[]]
            for number, piece in enumerate(pieces):
                parts.append(Part(draw, number, number == len(pieces) - 1, len(piece)))
                yield piece


class PrivateLoader(DataLoader[Any]):
    """A DataLoader over Poisson samples that says which part of which draw it has just handed out."""

    on_part: Callable[[Part], None]

    def __iter__(self) -> Any:
        batches = super().__iter__()
        sampler: Any = self.batch_sampler

        def announced() -> Iterator[Any]:
            for position, batch in enumerate(batches):
                # Workers run ahead of the loop, so the part is looked up by position, not taken from the sampler's end.
                self.on_part(sampler.parts[position])
                yield batch

        return announced()


def private_loader(
    loader: DataLoader[Any],
    rate: float,
    randomness: Randomness,
    physical_batch: int | None,
    on_part: Callable[[Part], None],
) -> PrivateLoader:
    """The user's loader with Poisson samples at `rate` instead of its own batches; everything else as it was."""
    dataset: Any = loader.dataset
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError("data_loader has a DistributedSampler: private training runs on one process here")
    batches = PoissonBatches(len(dataset), rate, randomness, max(1, round(1 / rate)), physical_batch)
    private = PrivateLoader(
        dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=CollateEmpty(dataset, loader.collate_fn or default_collate),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    private.on_part = on_part
    return private


class CollateEmpty:
    """Collates an empty sample into tensors with no rows: one example lends its shapes and is dropped."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __call__(self, rows: list[Any]) -> Any:
        return self.collate(rows) if rows else _none_of(self.collate([self.dataset[0]]))


def _none_of(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _none_of(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_none_of(value) for value in batch)
    return batch[:0]
