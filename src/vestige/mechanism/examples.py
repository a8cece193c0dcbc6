"""Where are the examples, and how is a sample of them fetched? Tensors, or any map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

Data = Sequence[Tensor] | Dataset[Sequence[Tensor]]


class Examples:
    """SENSITIVE: the examples themselves, fetched by index onto a device."""

    def __init__(self, data: Data, device: torch.device) -> None:
        self.device = device
        self.fetch, self.population = _fetcher(data, device)

    def blank(self) -> Sequence[Tensor]:
        """Tensors without rows, which carry only the shapes and dtypes of the examples."""
        return self.fetch(torch.zeros(0, dtype=torch.long))


def _fetcher(data: Data, device: torch.device) -> tuple[Callable[[Tensor], Sequence[Tensor]], int]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset):
        dataset = data
        count = len(dataset)  # type: ignore[arg-type]

        def collate(indices: Tensor) -> Sequence[Tensor]:
            # An empty sample still needs tensors of the right shape, so one example lends its shape and is dropped.
            rows = [dataset[int(i)] for i in indices] or [dataset[0]]
            return [part[: len(indices)].to(device) for part in default_collate(rows)]

        return collate, count
    tensors = [part.to(device) for part in data]
    counts = {len(part) for part in tensors}
    if len(counts) != 1:
        raise ValueError(f"data: the tensors hold {sorted(counts)} examples; inputs and targets must agree")
    return lambda indices: [part[indices.to(device)] for part in tensors], counts.pop()
