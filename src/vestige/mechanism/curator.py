"""What does the data say, in bounded and noised form? Sums of clipped gradients over samples, charged and noised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import centred_count, unclipped_fraction
from vestige.mechanism.bad_rows import lost_for_good
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import (
    LARGEST_SUM,
    Batch,
    Clip,
    Flat,
    GradientEngine,
    Parameters,
    RunningSum,
    Transform,
    Without,
    sensitivity_on,
)
from vestige.mechanism.comparisons import Comparisons
from vestige.mechanism.examples import Source
from vestige.priced_questions import Gaussian, Question, SampledGaussian
from vestige.processes.parameter_shards import ShardedSum
from vestige.processes.sums import BY_ITSELF, ShardedSums, Sums
from vestige.randomness import lattice
from vestige.randomness.correlated import Independent, NoiseSequence
from vestige.randomness.generator_states import seed_draws
from vestige.randomness.keys import HoldsKey, Randomness
from vestige.randomness.sampling import Poisson, Sampling
from vestige.randomness.sum_and_release_types import BoundedSum, Release

Witness = Callable[[Tensor, Tensor], None]
UNCOUNTED = 1 << 16
"""About how many norms are kept before the infinite ones are counted."""


def _failing(batch: Batch, attempt: Callable[[Batch], object]) -> list[int]:
    """SENSITIVE: the rows of a batch that cannot be computed, found by halving it."""
    count = len(batch[0])
    try:
        attempt(batch)
        return []
    except Exception as error:  # whatever a user's model raises on a row
        if lost_for_good(error):
            raise
    if count < 2:
        return list(range(count))
    half = count // 2
    first, second = ([part[where] for part in batch] for where in (slice(half), slice(half, None)))
    return [*_failing(first, attempt), *(half + place for place in _failing(second, attempt))]


@dataclass(frozen=True)
class Answer:
    """A release with the public facts of its question: what an attacker who sees every release knows of it."""

    release: Release
    index: int
    """The question's number; two answers on one sample share it."""
    rate: float
    parameters: Parameters
    clip: Clip
    transform: Transform | None


class Curator(HoldsKey):
    """Holds the examples and answers bounded questions about them.

    `nonprivate_witness`, when given, sees every clipped sum and every noise vector: the guarantee is void.
    """

    def __init__(
        self,
        examples: Source,
        engine: GradientEngine,
        layout: Layout,
        sampling: Sampling,
        randomness: Randomness,
        charges: Charges,
        *,
        physical_batch: int | None = None,
        nonprivate_witness: Witness | None = None,
        noise: NoiseSequence | None = None,
        comparisons: Comparisons | None = None,
        sums: Sums = BY_ITSELF,
    ) -> None:
        """`sums` adds up and noises what the processes of a group have summed, each over its own examples; all of them
        ask the same questions in the same order."""
        self._sums, self._group = sums, sums.group
        self.comparisons = comparisons
        """Answers about two models, for gates and decays."""
        self._examples, self.population, self._device = examples, examples.population, examples.device
        self._engine, self._layout, self._sampling = engine, layout, sampling
        self._randomness, self._charges = randomness, charges
        self._fetch = examples.ahead(self._foreseen)
        self.physical_batch = physical_batch
        self._nonprivate_witness = nonprivate_witness
        self.expected_batch = sampling.rate * self.population
        self._noise: NoiseSequence = noise if noise is not None else Independent()
        self._priced: tuple[Clip, float | Tensor, float] | None = None
        self.observer: Callable[[Answer], None] | None = None
        """Called with every release, for audits: releases and public facts only."""
        self.tried_out: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        """Inside, passes leave the model as it was."""
        self.shielded = False
        """Whether a row that fails contributes nothing: made-up rows have shown that the program is sound."""
        self.asked = 0
        """Gradients asked so far: the index of the next one's streams."""
        self._begun: int | None = None
        """The epoch that this process has charged last, where a question is about an epoch."""
        self._broken = torch.zeros((), dtype=torch.long, device=self._device)
        self._uncounted: list[Tensor] = []

    @property
    def nonprivate_broken_examples(self) -> Tensor:
        """How many sampled examples had a gradient that was not finite."""
        if self._uncounted:
            self._broken += torch.cat(self._uncounted).isinf().any(dim=1).sum()
            self._uncounted = []
        return self._broken

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
        then: Callable[[Release], Parameters] | None = None,
        question: Question | None = None,
        boost: float = 1.0,
    ) -> Release:
        """A noised sum of clipped gradients over a fresh sample; `part` numbers the questions of one step.

        An empty sample is noised and charged like any other. The divisor is the public `expected_batch`. `then`
        computes, from the first sum, the point of a second one over the same sample; `boost` multiplies the sampling
        rate; `question` is what a run with correlated noise asks.

        Formal guarantees: one Poisson-subsampled Gaussian mechanism with the sampling's rate and this multiplier,
        however many answers it has: together they whiten to one shift (Gaussian queries on one sample compose by the
        sum of squared inverse multipliers, and all of them are charged before the first is answered). With correlated
        noise, one step of the mechanism that `question` names; with another sampling, what that makes of the question
        (`Sampling.question`).
        """
        _, ceiling = self._sensitivity(clip)
        assert boost == 1 or self._sampling.kind == "poisson", "planning refuses importance sampling under others"
        rate = min(1.0, self._sampling.rate * boost)
        index = self._numbered(question or SampledGaussian(rate, multiplier), step, part, ceiling)
        clip = clip.drawn(partial(self._randomness.stream, self._own("thin"), index))
        sampling = self._sampling if boost == 1 else Poisson(rate)
        sample = self._group.own(sampling.draw(self.population, index, self._randomness))
        shown = partial(self._shown, index, rate, clip, transform)
        if then is None:
            return shown(parameters, self._answer(sample, parameters, clip, multiplier, transform, index))
        assert clip.count_deviation(multiplier, self.expected_batch) == inf, (
            "Method refuses to count twice on one sample"
        )
        each = multiplier * sqrt(2)
        first = shown(parameters, self._answer(sample, parameters, clip, each, transform, index))
        second = then(first)
        return shown(second, self._answer(sample, second, clip, each, transform, index, again="-again"))

    def _shown(
        self, index: int, rate: float, clip: Clip, transform: Transform | None, point: Parameters, release: Release
    ) -> Release:
        if self.observer is not None:
            self.observer(Answer(release, index, rate, point, clip, transform))
        return release

    def norms(self, parameters: Parameters, bound: float, multiplier: float, *, step: int, part: int = 0) -> float:
        """A noised estimate of the sum of min(norm, bound) over all examples, from a fresh sample.

        Formal guarantees: one Poisson-subsampled Gaussian mechanism with the sampling's rate and this multiplier.
        """
        index = self._numbered(SampledGaussian(self._sampling.rate, multiplier), step, part, bound)
        sample = self._group.own(self._sampling.draw(self.population, index, self._randomness))
        _, norms = self._sum(sample, parameters, Flat(bound), None, index, multiplier)
        whole = torch.linalg.vector_norm(norms, dim=1)
        total = float(self._group.total(torch.where(whole.isfinite(), whole.clamp(max=bound), 0.0).sum()))
        return self._noised("norms", index, total, multiplier * bound) / self._sampling.rate

    def continue_noise(self, anew: Callable[[], NoiseSequence]) -> None:
        """After a resume: the noise that correlated noise depends on, which no checkpoint holds.

        A reproducible run draws it again. One with secret noise begins a new sequence, over parts of the data that are
        drawn anew: a second mechanism.

        Formal guarantees: given the releases so far, the steps from here on are a mechanism with fresh noise and fresh
        parts, and compose with the earlier ones as such (`CyclicGaussian.during`).
        """
        if not self._noise.keeps:
            return
        if not self._randomness.predictable:
            self._noise = anew()
            return
        for index in range(self.asked):
            self._noise.replay(self._sums.replayed(self._layout.size, self._randomness, index, self._device))

    @property
    def arithmetic(self) -> str:
        """In which numbers noise is added to sums."""
        return self._noise.arithmetic

    @property
    def held_noise(self) -> int:
        """How many vectors of past noise are kept."""
        return self._noise.held()

    def _numbered(self, question: Question, step: int, part: int, sensitivity: float) -> int:
        """Charge a question about gradients and number it; the number selects its random streams.

        Where one is about a whole epoch, it is charged at the first gradient that this process takes of it: no other
        process knows the epoch's allocation, so one that continues it draws, and charges, another.
        """
        period = self._sampling.period
        epoch, place = divmod(self.asked, period)
        if period == 1 or epoch != self._begun:
            priced = self._sampling.question(question)
            self._charges.charge(priced, step=step - place, part=part, sensitivity=sensitivity)
            self._begun = epoch
        self.asked += 1
        return self.asked - 1

    def _sum(
        self,
        sample: Tensor,
        parameters: Parameters,
        clip: Clip,
        transform: Transform | None,
        index: int,
        multiplier: float,
    ) -> tuple[Tensor, Tensor]:
        """SENSITIVE: the clipped sum over a sample, and every example's norms; of a sharded model, this process's rows
        of the sum over all processes."""
        batches = (batch for rows in self._parts(sample) for batch in self._fetch(index, rows))
        with self._model_randomness(index):
            if isinstance(self._sums, ShardedSums):
                running: Any = self._sums.sum(self._noise, self._sensitivity(clip)[0], multiplier, self._device)
                seen = self._in_step(batches, parameters, clip, running, transform)
            else:
                running, seen = self._in_batches(batches, sample, index, parameters, clip, transform)
        norms = seen[0] if len(seen) == 1 else torch.cat(seen)
        self._uncounted.append(norms)
        if len(self._uncounted) * norms.numel() > UNCOUNTED:  # a few launches, which many steps share
            _ = self.nonprivate_broken_examples
        return running.total(), norms

    def _in_batches(
        self,
        batches: Iterator[Batch],
        sample: Tensor,
        index: int,
        parameters: Parameters,
        clip: Clip,
        transform: Transform | None,
    ) -> tuple[RunningSum, list[Tensor]]:
        """The sum over a sample by batches; where one fails and rows are shielded, without those that fail alone."""
        precision, size = getattr(self._engine, "sums_in", torch.float32), self._layout.size
        running = RunningSum(size, self._device, precision)
        try:
            seen = [self._engine(batch, parameters, clip, running.place(len(batch[0])), transform) for batch in batches]
            return running, seen
        except Exception as error:  # whatever a user's model raises: one row must not decide when training stops
            if not self.shielded or lost_for_good(error):
                raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        running, seen = RunningSum(size, self._device, precision), []
        for rows in self._parts(sample):
            for batch in self._fetched(index, rows):
                scratch = torch.zeros(size, dtype=precision, device=self._device)

                def attempt(some: Batch, clip: Clip = clip, into: Tensor = scratch) -> Tensor:
                    return self._engine(some, parameters, clip, into, transform)

                with self.tried_out():
                    failing = _failing(batch, attempt)
                left = self._without(batch, failing, clip, attempt, running) if len(batch[0]) else None
                seen += [] if left is None else [left]
        none = torch.zeros((0, self._layout.groups), dtype=torch.float64, device=self._device)
        return running, seen or [none]

    def _fetched(self, index: int, rows: Tensor) -> list[Batch]:
        """Those that can be read."""
        try:
            return self._fetch(index, rows)
        except Exception as error:  # whatever a user's dataset raises
            if lost_for_good(error):
                raise
        return [] if len(rows) < 2 else [batch for row in rows.split(1) for batch in self._fetched(index, row)]

    def _without(
        self, batch: Batch, failing: list[int], clip: Clip, attempt: Callable[..., Tensor], running: RunningSum
    ) -> Tensor:
        """The sum over a batch in which a row that can be computed stands in for those that cannot, at weight zero: the
        batch stays as large as it is without an error. Norms are infinite for those that fail."""
        count = len(batch[0])
        kept = torch.ones(count, dtype=torch.bool, device=self._device)
        kept[failing] = False
        norms = torch.full((count, self._layout.groups), inf, dtype=torch.float64, device=self._device)
        if len(failing) == count:
            return norms
        whole = batch
        if failing:
            stand_in = int(kept.int().argmax())
            whole = [part.clone() for part in batch]
            for part in whole:
                part[failing] = part[stand_in].clone()
        try:
            found = attempt(whole, Without(clip, kept) if failing else clip, running.place(count))
            return torch.where(kept[:, None], found, norms)
        except Exception as error:  # too large as a whole, say
            if lost_for_good(error):
                raise
        for place in kept.nonzero().flatten().tolist():
            alone = [part[place : place + 1] for part in batch]
            norms[place] = attempt(alone, clip, running.place(1))[0]
        return norms

    def _in_step(
        self,
        batches: Iterator[Batch],
        parameters: Parameters,
        clip: Clip,
        running: ShardedSum,
        transform: Transform | None,
    ) -> list[Tensor]:
        """Together: every process's batches, as many rounds as the one with the most of them has."""
        engine, shards = self._engine, self._sums.shards  # type: ignore[attr-defined]
        seen = [torch.zeros(0, self._layout.groups, dtype=torch.float64, device=self._device)]
        with shards.filled():
            engine.meet(parameters, transform, self._examples.blank())  # type: ignore[attr-defined]
            while True:
                batch = next(batches, None)
                empty = batch is None or not len(batch[0])
                if not self._group.any(batch is not None):
                    break
                if empty or batch is None:
                    running.nothing()
                else:
                    seen.append(engine(batch, parameters, clip, running.place(len(batch[0])), transform))  # type: ignore[arg-type]
            engine.part()  # type: ignore[attr-defined]
        return seen

    def _answer(
        self,
        sample: Tensor,
        parameters: Parameters,
        clip: Clip,
        multiplier: float,
        transform: Transform | None,
        index: int,
        again: str = "",
    ) -> Release:
        whole, multiplier = multiplier, clip.gradient_multiplier(multiplier, self.expected_batch)
        total, norms = self._sum(sample, parameters, clip, transform, index, multiplier)
        unclipped = self._unclipped(clip, norms, whole, index)
        witness, sensitivity = self._nonprivate_witness, self._sensitivity(clip)[0]
        before = total if witness is None else total.clone()
        released, std, noise = self._sums.noised(
            total,
            sensitivity,
            self._noise,
            multiplier,
            self._randomness,
            "noise" + again,
            index,
            nonprivate_keep=witness is not None,
        )
        if witness is not None:
            assert noise is not None
            witness(before, noise)
        divided = self._sums if isinstance(self._sums, ShardedSums) else None
        return Release(released, std, self.expected_batch, self._sampling.rate, unclipped, divided)

    def _own(self, purpose: str) -> str:
        """A stream of this process: what it draws is about its own examples."""
        return f"{purpose}/{self._group.rank}" if self._group.rank else purpose

    def _unclipped(self, clip: Clip, norms: Tensor, multiplier: float, index: int) -> float | None:
        """The fraction of unclipped examples, from a noised centred count over the public batch size."""
        deviation = clip.count_deviation(multiplier, self.expected_batch)
        if deviation == inf:
            return None
        assert clip.flat_bound is not None
        count = float(self._group.total(centred_count(clip.flat_bound, norms)))
        return float(unclipped_fraction(self._noised("count", index, count, deviation), self.expected_batch))

    def _noised(self, purpose: str, index: int, value: float, deviation: float) -> float:
        """A number with noise of this deviation."""
        found = lattice.noised(value, deviation, self._randomness.stream(purpose, index))
        if self._nonprivate_witness is not None:
            self._nonprivate_witness(torch.tensor([value]), torch.tensor([found - value]))
        return found

    def _sensitivity(self, clip: Clip) -> tuple[float | Tensor, float]:
        """As `sensitivity_on`; cached while the clip stays the same."""
        if self._priced is None or self._priced[0] is not clip:
            self._priced = clip, *sensitivity_on(self._device, clip, self._layout)
        return self._priced[1:]

    def sums(
        self, bounded: Callable[[Sequence[Tensor]], Tensor], bounds: Sequence[float], multiplier: float, *, step: int
    ) -> Tensor:
        """Sums of bounded rows over all examples, noised row by row: [rows, ...]; each row is a question.

        Formal guarantees: as many Gaussian mechanisms with this multiplier as there are rows, if one example moves row
        k of `bounded` by at most `bounds[k]` in the 2-norm.
        """
        for part, bound in enumerate(bounds):
            self._charges.charge(Gaussian(multiplier), step=step, part=part, sensitivity=bound)
        everyone = self._group.own(torch.arange(self.population))
        rows_at_once = everyone.split(self.physical_batch or 4096) if len(everyone) else [everyone]
        batches = (batch for rows in rows_at_once for batch in self._examples.fetch(rows))
        totals = self._group.total(torch.stack([bounded(batch) for batch in batches]).sum(dim=0).double().cpu())
        for part, bound in enumerate(bounds):
            lattice.add_noise(BoundedSum(totals[part], bound), multiplier, self._randomness.stream("sums", part))
        return totals

    def _foreseen(self, index: int) -> tuple[Sequence[Tensor], int | None]:
        """The sample that question number `index` will most likely be about, in parts, and a seed for its reader
        in a reproducible run."""
        sample = self._group.own(self._sampling.draw(self.population, index, self._randomness))
        return self._parts(sample), self._randomness.seed(self._own("rows"), index)

    @contextlib.contextmanager
    def _model_randomness(self, index: int) -> Iterator[None]:
        """Dropout and the like draw from torch's global generator, which a reproducible run must fix too."""
        if not self._randomness.predictable:
            yield
            return
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            seed_draws(self._device, int(self._randomness.stream(self._own("model"), index).integers(2**63)))
            yield

    def _parts(self, indices: Tensor) -> Sequence[Tensor]:
        return self._examples.parts(indices, min(self.physical_batch or LARGEST_SUM, LARGEST_SUM))
