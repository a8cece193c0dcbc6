"""Who is asked? Each step's sample of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from vestige.checks import check_rate
from vestige.randomness.keys import Randomness


class Sampling(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def rate(self) -> float: ...

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        """The indices asked by question number `index`."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Every example joins independently with probability `rate`: the sampling that amplification theorems assume."""

    kind: ClassVar[str] = "poisson"
    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        joined = randomness.stream("sample", index).random(population) < self.rate
        return torch.from_numpy(joined.nonzero()[0])


@dataclass(frozen=True)
class CyclicPoisson:
    """Every example belongs to one of `bands` parts, drawn once; question t takes a Poisson sample of part t mod bands.

    `rate` is the share of all examples in a sample, so members of the part in turn join with probability rate * bands.
    With one band this is `Poisson`, draw for draw.
    """

    kind: ClassVar[str] = "cyclic-poisson"
    rate: float
    bands: int

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.rate * self.bands > 1 + 1e-9:
            raise ValueError(
                f"sample_rate={self.rate} times {self.bands} bands exceeds 1: a part holds too few examples for such a "
                f"sample; use at most {int(1 / self.rate + 1e-9)} bands, or a smaller rate"
            )

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        joined = randomness.stream("sample", index).random(population) < self.rate * self.bands
        if self.bands > 1:
            # Each example's part is its own toss, so that other examples keep theirs when one is added or removed.
            part = randomness.stream("part", 0, continues=True).integers(self.bands, size=population)
            joined &= part == index % self.bands
        return torch.from_numpy(joined.nonzero()[0])


@dataclass(frozen=True)
class Shuffled:
    """Fixed-size batches of a fresh permutation each epoch, as ordinary loaders give. No epsilon is known to hold."""

    kind: ClassVar[str] = "shuffled"
    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        size = max(1, round(self.rate * population))
        epoch, place = divmod(index, max(1, population // size))
        order = randomness.stream("shuffle", epoch).permutation(population)
        return torch.from_numpy(order[place * size : (place + 1) * size])


SAMPLINGS: dict[str, type[Poisson] | type[Shuffled]] = {"poisson": Poisson, "shuffled": Shuffled}
