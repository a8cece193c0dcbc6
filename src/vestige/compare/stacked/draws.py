"""How are samples and noise drawn for many runs at once? Each run has random streams of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.randomness import lattice
from vestige.randomness.gaussian import normal
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import CyclicPoisson, Sampling, tossed_on

BLOCK, LARGEST_BLOCK = 16, 1 << 25
"""Questions whose samples are drawn together, so that the host waits for the device once per block; and the most coin
flips that a block may hold."""


class Draws:
    """Poisson samples and standard normal noise for runs with the same sampling, question by question.

    Runs with a seed get the same streams as when made alone. Secret runs share one key, drawn from the operating system
    for these draws only: their samples and noise are different parts of one stream, so they are independent.
    """

    def __init__(
        self,
        seeds: Sequence[int | None],
        population: int,
        sampling: Sampling,
        device: torch.device,
        questions: int | None = None,
    ) -> None:
        self.population, self.sampling, self.device, self.runs = population, sampling, device, len(seeds)
        self._alone = [Randomness.reproducible(seed) for seed in seeds if seed is not None]
        if self._alone and len(self._alone) != len(seeds):
            raise ValueError("seed: give every run of a stack a seed, or none")
        self._secret = Randomness.secret()
        self._questions = questions
        self._bands = sampling.bands if isinstance(sampling, CyclicPoisson) else 1
        self._turn = self._turns() if self._bands > 1 and not self._alone else None
        self._first, self._block = 0, []  # type: tuple[int, list[tuple[Tensor, Tensor]]]

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """The sample of question `index`; questions come in order."""
        if index >= self._first + len(self._block):
            left = BLOCK if self._questions is None else self._questions - index
            largest = LARGEST_BLOCK // (self.runs * self.population)
            self._first, self._block = index, self.samples(index, max(1, min(BLOCK, left, largest)))
        return self._block[index - self._first]

    def samples(self, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """For each question: indices [runs, widest sample] and which of them are real; no drawn example is dropped."""
        joined = self._joined(first, count)
        counts = joined.sum(-1)
        widths = counts.amax(-1).clamp(min=1).tolist()  # the one wait for the device in a block
        step, run, row = joined.nonzero(as_tuple=True)
        starts = counts.flatten().cumsum(0) - counts.flatten()
        place = torch.arange(len(row), device=self.device) - starts[step * self.runs + run]
        padded = torch.zeros(count, self.runs, max(widths), dtype=torch.long, device=self.device)
        padded[step, run, place] = row
        real = torch.arange(max(widths), device=self.device) < counts.unsqueeze(-1)
        return [(padded[i, :, :width], real[i, :, :width]) for i, width in enumerate(widths)]

    def _joined(self, first: int, count: int) -> Tensor:
        if self._alone:
            joined = torch.zeros(count, self.runs, self.population, dtype=torch.bool)
            for i in range(count):
                for run, randomness in enumerate(self._alone):
                    joined[i, run, self.sampling.draw(self.population, first + i, randomness)] = True
            return joined.to(self.device)
        joined = self._tosses(first, (count, self.runs, self.population))
        if self._turn is not None:
            turns = torch.arange(first, first + count, device=self.device) % self._bands
            joined &= self._turn == turns[:, None, None]
        return joined

    def _tosses(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """Who joins, of all examples: exactly at the rate, on the device where it is needed."""
        stream, rate = self._secret.stream("sample", first), min(1.0, self.sampling.rate * self._bands)
        return tossed_on(self.device, shape, rate, stream)

    def _turns(self) -> Tensor:
        """Each example's part, for each run: drawn once, example by example, as `CyclicPoisson` does."""
        drawn = self._secret.stream("part", 0).integers(self._bands, size=(self.runs, self.population))
        return torch.from_numpy(drawn).to(self.device)

    def noise(self, purpose: str, index: int, into: Tensor) -> Tensor:
        """Standard normal noise for every run, [runs, size], written into the given tensor."""
        if self._alone:
            for run, randomness in enumerate(self._alone):
                into[run] = normal(into.shape[-1], randomness.stream(purpose, index), self.device)
            return into
        into.view(-1).copy_(normal(into.numel(), self._secret.stream(purpose, index), self.device))
        return into

    def add_noise(self, purpose: str, index: int, total: Tensor, spacing: Tensor) -> None:
        """Lattice noise for every run, [runs, size], in steps of its own size, [runs, 1]."""
        if not self._alone:
            lattice.add_steps(total, spacing, self._secret.stream(purpose, index))
            return
        for run, (randomness, each) in enumerate(zip(self._alone, spacing.flatten().tolist(), strict=True)):
            lattice.add_steps(total[run], each, randomness.stream(purpose, index))

    def steps(self, purpose: str, index: int) -> Tensor:
        """One number of steps for every run, [runs, 1] in float64: noise of a deviation of 2^STEPS."""
        if self._alone:  # a run by itself draws it on the host, whatever its device
            each = [lattice.steps_of_one(randomness.stream(purpose, index)) for randomness in self._alone]
            return torch.tensor(each, dtype=torch.float64).unsqueeze(1).to(self.device)
        found = torch.zeros(self.runs, 1, dtype=torch.float64, device=self.device)
        self.add_noise(purpose, index, found, torch.ones_like(found))
        return found
