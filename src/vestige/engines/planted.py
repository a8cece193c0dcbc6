"""How is one run audited? Made-up canaries among its examples, each there by a coin, and the sum of its releases.

A canary is a row that no person owns: it has no input, only a gradient far beyond every bound along a direction of its
own. It is sampled, clipped and noised like any other row; where its coin kept it out, it adds exactly nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from vestige.engines.reference import add_clipped
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, GradientEngine, Parameters, Transform
from vestige.mechanism.examples import Draw, Source

LARGE = 1e4
"""The norm of a canary's gradient: the clip has to cut it."""
SUPPORT = 4096
"""Coordinates that a canary's direction touches, at most."""
TOGETHER = 64
"""Canaries whose gradients are formed at once."""


def check_count(count: int) -> None:
    if count < 8:
        raise ValueError(f"audit={count} must be 8 canaries at least; a thousand show something")


class Canaries:
    """The canaries of one run: directions and coins follow from one key, scores from the sum of what was released."""

    def __init__(self, count: int, layout: Layout, device: torch.device, key: int | None = None, rows: int = 1) -> None:
        """`rows`: how many each canary has, all of one gradient, where a canary is a user whose rows are sampled."""
        check_count(count)
        self.rows = rows
        self.count, self._layout, self._device = count, layout, device
        self._start(secrets.randbits(62) if key is None else key)
        self.summed = torch.zeros(layout.size, dtype=torch.float64, device=device)
        """Releases, each over the variance of its noise: post-processing of what is published."""

    def _start(self, key: int) -> None:
        self.key = key
        coins = torch.rand(self.count, generator=torch.Generator().manual_seed(key)) < 0.5
        self.included = coins

    def to(self, device: torch.device) -> None:
        """Go where the model has gone."""
        self._device, self.summed = device, self.summed.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"key": self.key, "summed": self.summed.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._start(saved["key"])
        self.summed = saved["summed"].to(self._device, copy=True)

    def direction(self, number: int) -> tuple[Tensor, Tensor]:
        """The coordinates that a canary's gradient touches, and its unit vector there: plus or minus one value."""
        random, size = torch.Generator().manual_seed((self.key + 1 + number) % 2**63), self._layout.size
        touched = torch.randint(size, (min(size, SUPPORT),), generator=random).unique()
        signs = torch.randint(2, touched.shape, generator=random) * 2.0 - 1.0
        return touched.to(self._device), (signs / len(touched) ** 0.5).to(self._device)

    def gradients(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The gradients of these canaries, by parameter: [canaries, ...]."""
        rows = torch.zeros(len(numbers), self._layout.size, device=self._device)
        for row, number in zip(rows, numbers, strict=True):
            touched, unit = self.direction(number)
            row[touched] = LARGE * unit
        return self._layout.views(rows)

    def add(self, numbers: Tensor, clip: Clip, into: Tensor) -> Tensor:
        """Clip the gradients of those of these canaries that are there, and add them; the norms that they had."""
        there = numbers.cpu()
        there = there[self.included[there]]
        norms = [into.new_zeros(0, self._layout.groups, dtype=torch.float64)]
        for part in there.split(TOGETHER) if len(there) else ():
            norms.append(add_clipped(self.gradients(part.tolist()), clip, self._layout, into))
        return torch.cat(norms)

    def observe(self, released: Tensor, std: float | Tensor) -> None:
        """Keep the sum of the releases: one more, and the deviation of its noise."""
        self.summed += released.double() / (std.double() if isinstance(std, Tensor) else std) ** 2

    def scores(self) -> list[float]:
        """Each canary's product with the sum of the releases: larger where it is likelier to have been there."""
        found = []
        for number in range(self.count):
            touched, unit = self.direction(number)
            found.append(float(self.summed[touched] @ unit.double()))
        return found


class CanaryBatch(list[Tensor]):
    """The numbers of canaries, in the place of a batch of examples."""


class PlantedExamples:
    """SENSITIVE: examples and, after the last of them, canaries."""

    def __init__(self, examples: Source, canaries: Canaries) -> None:
        self._examples, self._canaries = examples, canaries
        self.device = examples.device
        self._people = examples.population
        self.population = examples.population + canaries.count * canaries.rows

    def blank(self) -> Batch:
        return self._examples.blank()

    def parts(self, rows: Tensor, most: int) -> Sequence[Tensor]:
        people = list(self._examples.parts(rows[rows < self._people], most))
        planted = rows[rows >= self._people].split(most)
        both = zip_longest(people, planted, fillvalue=rows[:0])
        return [torch.cat(pair) for pair in both]

    def ahead(self, draw: Draw) -> Callable[[int, Tensor], list[Batch]]:
        def people(index: int) -> tuple[Sequence[Tensor], int | None]:
            parts, seed = draw(index)
            return [rows[rows < self._people] for rows in parts], seed

        fetch = self._examples.ahead(people)

        def both(index: int, rows: Tensor) -> list[Batch]:
            planted = (rows[rows >= self._people] - self._people) // self._canaries.rows
            return [*fetch(index, rows[rows < self._people]), CanaryBatch([planted])]

        return both

    def fetch(self, rows: Tensor) -> list[Batch]:
        return self._examples.fetch(rows)


class PlantedEngine:
    """An engine that also takes batches of canaries: their gradients are clipped and added as the reference engine does
    with those that it computed."""

    def __init__(self, engine: GradientEngine, canaries: Canaries) -> None:
        self._engine, self._canaries = engine, canaries

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if not isinstance(batch, CanaryBatch):
            return self._engine(batch, parameters, clip, into, transform)
        return self._canaries.add(batch[0], clip, into)
