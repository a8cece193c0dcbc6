"""What does the data say, in bounded and noised form? The only room that holds data; it counts every question."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from vestige.clipping import BoundedSum, Clip, Engine, Parameters, Transform
from vestige.layout import Layout
from vestige.noise import Randomness, Release, draw_noise
from vestige.questions import Question, SampledGaussian
from vestige.sampling import Sampling

Data = Sequence[Tensor] | Dataset[Sequence[Tensor]]
Witness = Callable[[Tensor, Tensor], None]


class Ask(Protocol):
    def __call__(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        """Record a question, durably, before its answer exists; or raise `BudgetSpent` and record nothing."""
        ...


class BudgetSpent(Exception):
    """The next question would exceed the budget, so it was not asked."""


class Curator:
    """Holds the examples and answers bounded questions about them.

    `nonprivate_witness`, when given, sees every clipped sum and every noise vector: the guarantee is void.
    """

    def __init__(
        self,
        data: Data,
        engine: Engine,
        layout: Layout,
        sampling: Sampling,
        randomness: Randomness,
        ask: Ask,
        *,
        device: torch.device,
        physical_batch: int | None = None,
        nonprivate_witness: Witness | None = None,
    ) -> None:
        self._fetch, self.population = _fetcher(data, device)
        self._engine, self._layout, self._device = engine, layout, device
        self._sampling, self._randomness, self._ask = sampling, randomness, ask
        self._physical_batch = physical_batch
        self._nonprivate_witness = nonprivate_witness
        self.expected_batch = sampling.rate * self.population
        self.asked = 0
        self._priced: tuple[Clip, float | Tensor, float] | None = None
        self.nonprivate_broken_examples = torch.zeros((), dtype=torch.long, device=device)

    def gradient(
        self,
        parameters: Parameters,
        clip: Clip,
        multiplier: float,
        *,
        step: int,
        part: int = 0,
        transform: Transform | None = None,
    ) -> Release:
        """A noised sum of clipped gradients over a fresh sample; `part` numbers the questions of one step.

        An empty sample is noised and charged like any other. The divisor is the public `expected_batch`.

        Formal guarantees: one Poisson-subsampled Gaussian mechanism with the sampling's rate and this multiplier.
        """
        sensitivity, ceiling = self._sensitivity(clip)
        self._ask(SampledGaussian(self._sampling.rate, multiplier), step=step, part=part, sensitivity=ceiling)
        index = self.asked
        self.asked += 1

        total = torch.zeros(self._layout.size, device=self._device)
        broken = torch.zeros((), dtype=torch.long, device=self._device)
        with self._model_randomness(index):
            for rows in self._parts(self._sampling.draw(self.population, index, self._randomness)):
                norms = self._engine(self._fetch(rows), parameters, clip, total, transform)
                broken += norms.isinf().any(dim=1).sum()
        self.nonprivate_broken_examples += broken
        bounded = BoundedSum(total, sensitivity)
        noise, std = draw_noise(bounded, multiplier, self._randomness.stream("noise", index))
        if self._nonprivate_witness is not None:
            self._nonprivate_witness(total.clone(), noise)
        return Release(total.add_(noise), std, self.expected_batch, sample_rate=self._sampling.rate)

    def _sensitivity(self, clip: Clip) -> tuple[float | Tensor, float]:
        """The clip's sensitivity, on the device, and its largest value; kept while the clip stays the same."""
        if self._priced is None or self._priced[0] is not clip:
            sensitivity = clip.sensitivity(self._layout)
            if isinstance(sensitivity, Tensor):
                self._priced = clip, sensitivity.to(self._device), float(sensitivity.max())
            else:
                self._priced = clip, sensitivity, sensitivity
        return self._priced[1:]

    @contextlib.contextmanager
    def _model_randomness(self, index: int) -> Iterator[None]:
        """Dropout and the like draw from torch's global generator, which a reproducible run must fix too."""
        if not self._randomness.predictable:
            yield
            return
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(self._randomness.stream("model", index).integers(2**63)))
            yield

    def _parts(self, indices: Tensor) -> Sequence[Tensor]:
        if self._physical_batch is None or len(indices) == 0:
            return [indices]
        return indices.split(self._physical_batch)


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
