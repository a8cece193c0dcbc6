"""How do two models compare on the data? Noised differences of losses and of correct answers, on fresh samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import Batch, Parameters
from vestige.mechanism.examples import Examples
from vestige.mechanism.losses.loss_difference import LossDifference, Scores
from vestige.priced_questions import SampledGaussian, Trial
from vestige.processes.group import ALONE, Processes
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import noised
from vestige.randomness.sampling import joined
from vestige.randomness.streams import Stream

Fetch = Callable[[int, Tensor], list[Batch]]


class Comparisons:
    """The curator's answers to questions about two models, which gates and decays ask."""

    def __init__(
        self,
        examples: Examples,
        randomness: Randomness,
        charges: Charges,
        losses: Scores,
        right: Scores,
        physical_batch: int | None = None,
        group: Processes = ALONE,
        whole: Callable[[Parameters], Parameters] = lambda point: point,
    ) -> None:
        """`whole` puts parameters together, where processes have parts of them."""
        self._group, self._whole = group, whole
        self._examples, self._randomness, self._charges = examples, randomness, charges
        self._losses, self._right = losses, right
        self.physical_batch = physical_batch
        self.asked = 0
        """Comparisons asked so far; they have random streams of their own, so they never shift a gradient's."""
        self._fetch: Fetch | None = None

    def trial(self, question: Trial | None) -> AbstractContextManager[None]:
        return self._charges.trial(question)

    def loss_difference(
        self, before: Parameters, after: Parameters, change: LossDifference, *, step: int, part: int = 1
    ) -> float:
        """By how much the mean loss changes from one model to another, both on one fresh sample; bounded and noised.

        An empty sample counts as no change; it is noised and charged like any other.

        Formal guarantees: see `LossDifference`. Inside `trial` only what that trial releases may be used.
        """
        self._charges.charge(change.question, step=step, part=part, sensitivity=change.sensitivity)
        rows, stream = self._sample(change.rate)
        scores = self._scores(self._losses, rows, before, after)
        found = change.within(*(float(each) for each in self._group.total(change.sums(*scores))))
        return noised(found, change.noise_std, stream)

    def count_difference(
        self, before: Parameters, after: Parameters, *, rate: float, multiplier: float, step: int, part: int
    ) -> float:
        """How many more examples of a fresh sample the second model gets right, noised, over the expected sample size.

        Formal guarantees: one Poisson-subsampled Gaussian mechanism: each example contributes -1, 0 or 1.
        """
        self._charges.charge(SampledGaussian(rate, multiplier), step=step, part=part, sensitivity=1.0)
        rows, stream = self._sample(rate)
        old, new = self._scores(self._right, rows, before, after)
        more = float(self._group.total(new.sum() - old.sum()))
        return noised(more, multiplier, stream) / (rate * self._examples.population)

    def coin(self, sides: int) -> int:
        """A uniform choice that does not depend on the data; at most one for each comparison."""
        return int(self._randomness.stream("coin", self.asked).integers(sides))

    def _sample(self, rate: float) -> tuple[Tensor, Stream]:
        """The sample of the next comparison, and the stream of its noise."""
        index = self.asked
        self.asked += 1
        if self._fetch is None:
            self._fetch = self._examples.ahead(partial(self._foreseen, rate))
        return self._drawn(rate, index), self._randomness.stream("comparison noise", index)

    def _drawn(self, rate: float, index: int) -> Tensor:
        stream = self._randomness.stream("comparison sample", index)
        return self._group.own(torch.from_numpy(joined(self._examples.population, rate, stream)))

    def _foreseen(self, rate: float, index: int) -> tuple[Sequence[Tensor], int | None]:
        """The sample of a comparison at this rate, in parts, and a seed for its reader in a reproducible run."""
        return self._parts(self._drawn(rate, index)), self._randomness.seed("comparison rows", index)

    def _parts(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(self.physical_batch or len(rows)) if len(rows) else ()

    def _scores(self, scores: Scores, rows: Tensor, *models: Parameters) -> list[Tensor]:
        """SENSITIVE: each model's score of every row, all on the same examples, which are fetched once."""
        assert self._fetch is not None
        models = tuple(self._whole(model) for model in models)
        if len(rows) == 0:
            return [torch.zeros(0, device=self._examples.device) for _ in models]
        fetched = (self._fetch(self.asked - 1, part) for part in self._parts(rows))
        batches = (batch for group in fetched for batch in group)
        seen = zip(*([scores(batch, model) for model in models] for batch in batches), strict=True)
        return [torch.cat(parts) for parts in seen]
