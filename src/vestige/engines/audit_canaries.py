"""How is one run audited? Made-up canaries among its examples, each there by a coin, and the sum of its releases.

A canary is a row that no person owns: it has no input of its own, only a gradient far beyond every bound along a
direction of its own. It is sampled, clipped and noised like any other row; where its coin kept it out, it adds exactly
nothing. In a user's loop it takes the place of a row's gradient after the user's own backward pass and before the clip,
so a clip that is missing there shows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from vestige.engines.bookkeeping import add_weighted
from vestige.engines.per_example.gradient_forms import Gradient, change
from vestige.engines.per_example.kernels import blanked
from vestige.engines.reference import Reference, add_clipped
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
    if not isinstance(count, int) or count < 8:
        raise ValueError(f"audit={count!r} must be a whole number of canaries, 8 at least; a thousand show something")


@dataclass(frozen=True)
class Planted:
    """A parameter's gradients for examples of which some are canaries: those have `values` at the places `index` of the
    flat parameter, [examples, places], where all others have zeros, and nothing in `of`."""

    of: Gradient | None
    index: Tensor
    values: Tensor
    shape: tuple[int, ...]

    def norms(self, unit: float) -> Tensor:
        own = torch.linalg.vector_norm(self.values, dim=1)
        return own if self.of is None else torch.where(own > 0, own, self.of.norms(unit))

    def add(self, into: Tensor, factors: Tensor) -> None:
        if self.of is not None:
            self.of.add(into, factors)
        there = self.values.any(dim=1)
        shares = self.values[there].to(into.dtype) * factors[there, None]
        into.view(-1).index_add_(0, self.index[there].flatten(), shares.flatten())

    def dense(self) -> Tensor:
        rows = self.values.new_zeros(len(self.values), prod(self.shape)).scatter_add_(1, self.index, self.values)
        whole = rows.view(-1, *self.shape)
        return whole if self.of is None else whole + self.of.dense()


class Canaries:
    """The canaries of one run: directions and coins follow from one key, scores from sums of what was released."""

    def __init__(self, count: int, layout: Layout, device: torch.device, key: int | None = None, rows: int = 1) -> None:
        """`rows`: how many each canary has, all of one gradient, where a canary is a user whose rows are sampled."""
        check_count(count)
        self.rows = rows
        self.count, self._layout, self._device = count, layout, device
        self._start(secrets.randbits(62) if key is None else key)
        self.summed = torch.zeros(layout.size, dtype=torch.float64, device=device)
        """Releases, each over the variance of its noise: post-processing of what is published."""
        self.differences = torch.zeros_like(self.summed)
        """Of every two releases the second less the first, added up: noise that was used twice is not in it."""
        self._first: Tensor | None = None
        self.joined = self.chances = 0
        """How often canaries were in a draw of a loop, and how often they could have been, there or not."""
        self._counted: int | None = None

    def _start(self, key: int) -> None:
        self.key = key
        coins = torch.rand(self.count, generator=torch.Generator().manual_seed(key)) < 0.5
        self.included = coins

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        self._device, self.summed, self.differences = device, self.summed.to(device), self.differences.to(device)
        self._first = None if self._first is None else self._first.to(device)

    def state_dict(self) -> dict[str, Any]:
        seen = {"summed": self.summed.clone(), "differences": self.differences.clone()}
        return {"key": self.key, **seen, "joined": self.joined, "chances": self.chances}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Of a version before 0.3 differences and counts begin anew."""
        self._start(saved["key"])
        self.summed = saved["summed"].to(self._device, copy=True)
        differences = saved.get("differences", torch.zeros_like(self.summed))
        self.differences, self._first = differences.to(self._device, copy=True), None
        self.joined, self.chances, self._counted = saved.get("joined", 0), saved.get("chances", 0), None

    def present(self, rows: Sequence[int], people: int) -> list[int]:
        """The numbers of those canaries among rows of the population, after so many people, whose coins let them in."""
        return [row - people for row in rows if row >= people and self.included[row - people]]

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

    def replaced(
        self, gradients: Mapping[str, Gradient], numbers: Sequence[int], first: int, examples: int
    ) -> dict[str, Gradient]:
        """SENSITIVE: gradients of so many examples in which those from place `first` on are these canaries',
        in place of what those rows had."""
        place = torch.arange(examples, device=self._device)
        carriers = (place >= first) & (place < first + len(numbers))
        directions = [self.direction(number) for number in numbers]
        found: dict[str, Gradient] = {}
        for s in self._layout.segments:
            inside = [(touched >= s.start) & (touched < s.stop) for touched, _ in directions]
            width = max((int(own.sum()) for own in inside), default=0)
            index = torch.zeros(examples, width, dtype=torch.long, device=self._device)
            values = torch.zeros(examples, width, device=self._device)
            for row, ((touched, unit), own) in enumerate(zip(directions, inside, strict=True), first):
                places = touched[own] - s.start
                index[row, : len(places)], values[row, : len(places)] = places, LARGE * unit[own]
            of = gradients.get(s.name)
            of = None if of is None else change(of, lambda tensor: blanked(tensor, carriers))
            found[s.name] = Planted(of, index, values, s.shape)
        return found

    def add(self, numbers: Tensor, clip: Clip, into: Tensor, by_reference: bool = True) -> Tensor:
        """Clip the gradients of those of these canaries that are there, and add them, as the reference engine does or
        as book-keeping does; the norms that they had."""
        there = numbers.cpu()
        there = there[self.included[there]]
        norms = [into.new_zeros(0, self._layout.groups, dtype=torch.float64)]
        for part in there.split(TOGETHER) if len(there) else ():
            if by_reference:
                norms.append(add_clipped(self.gradients(part.tolist()), clip, self._layout, into))
            else:
                rows = self.replaced({}, part.tolist(), 0, len(part))
                norms.append(add_weighted(rows, clip, self._layout, into, len(part)))
        return torch.cat(norms)

    def note(self, draw: int, joined: int) -> None:
        """Note a draw of a loop, once: how many canaries joined it, there or not."""
        if draw != self._counted:
            self.joined, self.chances, self._counted = self.joined + joined, self.chances + self.count, draw

    def observe(self, released: Tensor, std: float | Tensor) -> None:
        """Keep sums of the releases: one more, and the deviation of its noise."""
        weighed = released.double() / (std.double() if isinstance(std, Tensor) else std) ** 2
        self.summed += weighed
        if self._first is None:
            self._first = weighed
        else:
            self.differences += weighed - self._first
            self._first = None

    def scores(self) -> tuple[list[float], list[float]]:
        """Two for each canary, both larger where it is likelier to have been there: its product with the sum of the
        releases, and the size of that with the differences of pairs, in which noise used twice cancels."""
        sums, differences = [], []
        for number in range(self.count):
            touched, unit = self.direction(number)
            sums.append(float(self.summed[touched] @ unit.double()))
            differences.append(abs(float(self.differences[touched] @ unit.double())))
        return sums, differences


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
    """An engine that also takes batches of canaries: their gradients are clipped and added by what clips and adds those
    that the engine computed."""

    def __init__(self, engine: GradientEngine, canaries: Canaries) -> None:
        self._engine, self._canaries = engine, canaries

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if not isinstance(batch, CanaryBatch):
            return self._engine(batch, parameters, clip, into, transform)
        return self._canaries.add(batch[0], clip, into, isinstance(self._engine, Reference))
