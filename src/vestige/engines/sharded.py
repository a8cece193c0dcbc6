"""How are the gradients of a sharded model computed? By the fast engine, on whole parameters.

They are put together for the length of a question.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vestige.engines.bookkeeping import BookKeeping
from vestige.mechanism.clipping import Batch, Clip, Parameters, Transform
from vestige.mechanism.gradient_transforms import terms_of
from vestige.processes.parameter_shards import ShardedSum, Shards


class Sharded:
    """An engine whose points are this process's rows of them.

    `meet` puts the whole ones together, before the batches of a question; a call then has no messages but those of the
    sum that it adds to.
    """

    def __init__(self, engine: BookKeeping, shards: Shards) -> None:
        self._engine, self._shards = engine, shards
        self._points: list[tuple[Parameters, Parameters]] = []

    def meet(self, point: Parameters, transform: Transform | None, blank: Batch) -> None:
        """Together: the whole parameters at all points that a question is about."""
        terms = terms_of(transform, point, blank)
        local = [point] if terms is None else [term.point for term in terms]
        self._points = [(each, self._shards.whole(each)) for each in local]

    def part(self) -> None:
        """The question is answered: free the whole parameters."""
        self._points = []

    def __call__(
        self,
        batch: Batch,
        parameters: Parameters,
        clip: Clip,
        into: Tensor | ShardedSum,
        transform: Transform | None = None,
    ) -> Tensor:
        terms = terms_of(transform, parameters, batch)
        if terms is None:
            return self._engine(batch, self._points[0][1], clip, into, transform)
        wholes = [whole for _, whole in self._points]
        terms = [replace(term, point=whole) for term, whole in zip(terms, wholes, strict=True)]
        return self._engine(batch, wholes[0], clip, into, transform, terms)
