"""What is clipped of an example, where it is not its gradient at the parameters? A transform of the gradient.

Those that are weighted sums of gradients say of which (`Linear`): an engine need not take them one example at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from vestige.layerwise_scaling import Scales, inner, outer
from vestige.mechanism.clipping import Batch, Field, Parameters, Transform


@dataclass(frozen=True)
class Term:
    """`weight` times the mean gradient of an example's views, at `point`.

    The rows of `batch` are the views, those of one example side by side: [examples * views, ...].
    """

    weight: float
    point: Parameters
    batch: Batch
    views: int = 1
    counts: Tensor | None = None
    """Where examples have unequal numbers of views: how many each has, up to `views`; other rows are padding."""


class Linear(ABC):
    """A transform that gives each example a weighted sum of gradients: at several points, of several views.

    Formal guarantees: a view is computed from its own example and fresh random numbers alone, so the sum is one vector
    of one example, whose clip bounds its influence.
    """

    @abstractmethod
    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        """What is added up, for a batch of examples whose gradients are asked at `point`."""

    def __call__(self, field: Field) -> Field:
        def total(parameters: Parameters, *example: Tensor) -> Parameters:
            terms = self.terms(parameters, [part.unsqueeze(0) for part in example])
            first, *others = ((term.weight, _mean(field, term)) for term in terms)
            found = {name: first[0] * gradient for name, gradient in first[1].items()}
            for weight, gradients in others:
                found = {name: found[name] + weight * gradient for name, gradient in gradients.items()}
            return found

        return total


def _mean(field: Field, term: Term) -> Parameters:
    """The mean gradient of one example's views."""
    if term.views == 1:
        return field(term.point, *(part.squeeze(0) for part in term.batch))
    views = vmap(partial(field, term.point), randomness="different")(*term.batch)
    return {name: gradient.mean(0) for name, gradient in views.items()}


@dataclass(frozen=True)
class Mean(Linear):
    """The mean gradient of an example's rows: [examples, rows, ...].

    Formal guarantees: an example contributes one vector, clipped after averaging, whatever the number of rows.
    """

    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        return [Term(1.0, point, [part.flatten(0, 1) for part in batch], batch[0].shape[1])]


@dataclass(frozen=True)
class UnequalMean(Linear):
    """The same of unequal numbers of rows: so many examples with so many rows each, one after another. It is for a
    whole batch, by an engine that knows it; others take `alike` parts."""

    numbers: tuple[tuple[int, int], ...]

    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        examples, rows = zip(*self.numbers, strict=True)
        counts = torch.from_numpy(np.array(rows).repeat(examples)).to(batch[0].device, non_blocking=True)
        return [Term(1.0, point, batch, max(rows), counts)]

    def alike(self, batch: Batch) -> Iterator[tuple[Batch, Transform]]:
        """Batches of examples with the same number of rows, each with the transform for it."""
        first = 0
        for examples, rows in self.numbers:
            part = [each[first : first + examples * rows].unflatten(0, (examples, rows)) for each in batch]
            yield part, Mean()
            first += examples * rows


@dataclass(frozen=True)
class _Nested(Linear):
    inner: Linear
    outer: Linear

    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        pairs = (
            (outer, inner)
            for outer in self.outer.terms(point, batch)
            for inner in self.inner.terms(outer.point, outer.batch)
        )
        return [
            Term(outer.weight * inner.weight, inner.point, inner.batch, outer.views * inner.views)
            for outer, inner in pairs
        ]


def one_after(first: Transform | None, second: Transform | None) -> Transform | None:
    """The composition of both transforms, either of which may be None."""
    if first is None or second is None:
        return first or second
    if isinstance(first, Linear) and isinstance(second, Linear):
        return _Nested(first, second)
    return lambda field: second(first(field))


@dataclass(frozen=True)
class _Scaled(Linear):
    transform: Linear
    scales: Scales

    def terms(self, point: Parameters, batch: Batch) -> Sequence[Term]:
        found = self.transform.terms(inner(point, self.scales), batch)
        return [replace(term, point=outer(term.point, self.scales)) for term in found]


def scaled(transform: Transform, scales: Scales) -> Transform:
    """A transform of gradients with respect to V as one of gradients with respect to W = a V (see `layerwise_scaling`);
    an engine with these constants multiplies what comes out by a."""
    if isinstance(transform, Linear):
        return _Scaled(transform, scales)

    def of(field: Field) -> Field:
        def balanced(point: Parameters, *example: Tensor) -> Parameters:
            return outer(field(outer(point, scales), *example), scales)

        changed = transform(balanced)
        return lambda point, *example: inner(changed(inner(point, scales), *example), scales)

    return of


def terms_of(transform: Transform | None, point: Parameters, batch: Batch) -> Sequence[Term] | None:
    """Of which gradients each example's vector is the sum; None where it is no such sum."""
    if transform is None:
        return [Term(1.0, point, batch)]
    return transform.terms(point, batch) if isinstance(transform, Linear) else None


def only_mean(terms: Sequence[Term]) -> Term | None:
    """The one term where there is no other and no weight: an ordinary gradient, or the mean over views."""
    return terms[0] if len(terms) == 1 and terms[0].weight == 1 else None
