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
from vestige.losses import LossDifference, Scores
from vestige.noise import Randomness, Release, draw_noise
from vestige.questions import BudgetSpent, Question, SampledGaussian, Trial
from vestige.sampling import Sampling

__all__ = ["Ask", "BudgetSpent", "Curator", "Data", "Witness"]

Data = Sequence[Tensor] | Dataset[Sequence[Tensor]]
Witness = Callable[[Tensor, Tensor], None]


class Ask(Protocol):
    def __call__(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        """Record a question, durably, before its answer exists; or raise `BudgetSpent` and record nothing."""
        ...


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
        losses: Scores | None = None,
        right: Scores | None = None,
        nonprivate_witness: Witness | None = None,
    ) -> None:
        self._losses, self._right = losses, right
        self._fetch, self.population = _fetcher(data, device)
        self._engine, self._layout, self._device = engine, layout, device
        self._sampling, self._randomness, self._ask = sampling, randomness, ask
        self._physical_batch = physical_batch
        self._nonprivate_witness = nonprivate_witness
        self.expected_batch = sampling.rate * self.population
        self.asked = 0
        self._priced: tuple[Clip, float | Tensor, float] | None = None
        """Gradients asked so far: the index of the next one's streams."""
        self.compared = 0
        """Comparisons of two models asked so far; their streams are their own, so they never shift a gradient's."""
        self._trial: Trial | None = None
        self._due: list[Question] = []
        self.nonprivate_broken_examples = torch.zeros((), dtype=torch.long, device=device)

    @property
    def rate(self) -> float:
        """The probability that an example joins a gradient's sample."""
        return self._sampling.rate

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
        self._charge(SampledGaussian(self._sampling.rate, multiplier), step=step, part=part, sensitivity=ceiling)
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
    def trial(self, question: Trial | None) -> Iterator[None]:
        """Charge the questions asked inside as one trial, when the first of them comes and before it is answered.

        None charges each by itself. A question that is not the trial's own is refused.
        """
        self._trial, self._due = question, _questions_of(question) if question is not None else []
        try:
            yield
        finally:
            self._trial, self._due = None, []

    def _charge(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        if self._trial is None:
            self._ask(question, step=step, part=part, sensitivity=sensitivity)
            return
        if question != self._due.pop(0):
            raise AssertionError(f"{question} is not what is due in {self._trial}")
        if len(self._due) == 1:
            self._ask(self._trial, step=step, part=0, sensitivity=sensitivity)

    def loss_difference(
        self, before: Parameters, after: Parameters, change: LossDifference, *, step: int, part: int = 1
    ) -> float:
        """By how much the mean loss changes from one model to another, both on one fresh sample; bounded and noised.

        An empty sample counts as no change; it is noised and charged like any other.

        Formal guarantees: see `LossDifference`. Inside `trial` only what that trial releases may be used.
        """
        assert self._losses is not None, "this curator was not given a loss to compare"
        self._charge(change.question, step=step, part=part, sensitivity=change.sensitivity)
        rows, noise = self._comparison(change.rate)
        return change.of(self._scores(self._losses, rows, before), self._scores(self._losses, rows, after)) + (
            change.noise_std * noise
        )

    def count_difference(
        self, before: Parameters, after: Parameters, *, rate: float, multiplier: float, step: int, part: int
    ) -> float:
        """How many more examples of a fresh sample the second model gets right, noised, over the expected sample size.

        Formal guarantees: one Poisson-subsampled Gaussian mechanism: each example contributes -1, 0 or 1.
        """
        assert self._right is not None, "this curator was not given answers to count"
        self._charge(SampledGaussian(rate, multiplier), step=step, part=part, sensitivity=1.0)
        rows, noise = self._comparison(rate)
        gained = self._scores(self._right, rows, after).sum() - self._scores(self._right, rows, before).sum()
        return (float(gained) + multiplier * noise) / (rate * self.population)

    def coin(self, sides: int) -> int:
        """A fair choice that looks at nothing; at most one for each comparison."""
        return int(self._randomness.stream("coin", self.compared).integers(sides))

    def _comparison(self, rate: float) -> tuple[Tensor, float]:
        """The sample of the next comparison, and its noise."""
        index = self.compared
        self.compared += 1
        joined = self._randomness.stream("comparison sample", index).random(self.population) < rate
        return torch.from_numpy(joined.nonzero()[0]), self._randomness.stream("comparison noise", index).normal()

    def _scores(self, scores: Scores, rows: Tensor, parameters: Parameters) -> Tensor:
        if len(rows) == 0:
            return torch.zeros(0, device=self._device)
        return torch.cat([scores(self._fetch(part), parameters) for part in self._parts(rows)])

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


def _questions_of(trial: Trial) -> list[Question]:
    candidate = SampledGaussian(trial.rate, trial.multiplier)
    return [candidate, SampledGaussian(trial.validation_rate, trial.validation_multiplier)]


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
