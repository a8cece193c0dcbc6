"""Who is asked? Each step's sample of examples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import frexp, prod
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from vestige.checks import check_rate, check_steps
from vestige.priced_questions import AllocatedGaussian, Question, SampledGaussian, TruncatedGaussian
from vestige.randomness import binomial
from vestige.randomness.keys import Randomness
from vestige.randomness.streams import Stream
from vestige.tf32 import triton_available
from vestige.units import Users

DENSE = 1 / 32
"""Above this rate every row is tossed for: that is cheaper than sorting so many of them."""


class Sampling(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def rate(self) -> float: ...

    @property
    def period(self) -> int:
        """How many steps one question is about: it is asked at the first of them."""
        ...

    def question(self, asked: Question) -> Question:
        """What the question of a Poisson sample is under this sampling."""
        ...

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        """The indices asked by question number `index`."""
        ...


class _StepByStep:
    """Every step's sample is a question of its own."""

    period: ClassVar[int] = 1

    def question(self, asked: Question) -> Question:
        return asked


@dataclass(frozen=True)
class Poisson(_StepByStep):
    """Every example joins independently with probability `rate`: the sampling that amplification theorems assume.

    Formal guarantees: exactly so, for the rate as float64 holds it, if the stream's words are uniform: see `joined`.
    """

    kind: ClassVar[str] = "poisson"
    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        return torch.from_numpy(joined(population, self.rate, randomness.stream("sample", index)))


def joined(population: int, rate: float, stream: Stream) -> np.ndarray:
    """Which of so many rows join, each independently with probability `rate`: their indices, in order.

    Rows that join rarely are not tossed for one by one: how many join is binomial, and which ones is uniform, so a draw
    costs what the sample costs, however many rows there are. Which way is taken depends on the rate alone.

    Formal guarantees: each set S of rows has exactly the probability rate^|S| (1 - rate)^(population - |S|). Binomial
    numbers and the tosses are exact (`binomial.draw`, `tossed`), and given its size every set is as likely.
    """
    if rate >= 1:
        return np.arange(population)
    if rate > DENSE:
        return tossed((population,), rate, stream).nonzero()[0]
    return places(population, binomial.draw(population, rate, stream), stream)


def places(population: int, count: int, stream: Stream) -> np.ndarray:
    """`count` different rows, every set of them as likely as any other.

    As many are drawn as are missing, until none is. No row is treated otherwise than another, so renaming the rows does
    not change the law of the set: it is uniform.
    """
    found = np.zeros(0, dtype=np.int64)
    while len(found) < count:
        rows = np.sort(np.concatenate([found, stream.integers(population, size=count - len(found))]))
        found = rows[np.diff(rows, prepend=-1) > 0]
    return found


def tossed(shape: tuple[int, ...], rate: float, stream: Stream) -> np.ndarray:
    """A toss for each place, true with probability `rate`, exactly."""
    if rate >= 1:
        return np.ones(shape, dtype=bool)
    share, exponent = frexp(rate)
    if exponent > -12:  # then the rate is a whole number of 2^-64
        return (stream.words(prod(shape)) < np.uint64(int(rate * 2.0**64))).reshape(shape)
    found = stream.random(shape) < share  # the share is a whole number of 2^-53, as are these
    for bits in _fifties(-exponent):
        found &= stream.random(shape) < 2.0**-bits
    return found


def tossed_on(device: torch.device, shape: tuple[int, ...], rate: float, stream: Stream) -> Tensor:
    """The same on the device where it is needed."""
    if device.type != "cuda" or not triton_available() or rate >= 1:
        return torch.from_numpy(tossed(shape, rate, stream)).to(device)
    from vestige.randomness.triton_lattice import uniform

    share, exponent = frexp(rate)
    found = uniform(prod(shape), stream, device) < share
    for bits in _fifties(-exponent):
        found &= uniform(prod(shape), stream, device) < 2.0**-bits
    return found.view(shape)


def _fifties(bits: int) -> list[int]:
    """So many bits in parts that one uniform number of 53 bits has."""
    return [min(53, bits - taken) for taken in range(0, bits, 53)]


@dataclass(frozen=True)
class CyclicPoisson(_StepByStep):
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
        stream = randomness.stream("sample", index)
        if self.bands == 1:
            return torch.from_numpy(joined(population, self.rate, stream))
        members = parts(population, self.bands, randomness, randomness.moved)[index % self.bands]
        return torch.from_numpy(members[joined(len(members), min(1.0, self.rate * self.bands), stream)])


@lru_cache(maxsize=4)
def parts(
    population: int, bands: int, randomness: Randomness, moved: bool, purpose: str = "part", index: int = 0
) -> list[np.ndarray]:
    """The members of each part. Each example's part is its own toss, so that other examples keep theirs when one is
    added or removed. A key that moved into a forked process is another one, and has no parts."""
    part = randomness.stream(purpose, index, continues=True).integers(bands, size=population)
    order = np.argsort(part, kind="stable")
    return np.split(order, np.cumsum(np.bincount(part, minlength=bands))[:-1])


@dataclass(frozen=True)
class Allocation:
    """Every epoch, each example is put into one of its `period` steps: every example is used once an epoch.

    An epoch is one question, asked at its first step. Which step an example is in is known to this process alone: a run
    that is continued by another draws the rest of its epoch from an allocation of its own, and asks again.

    Formal guarantees: each example's step is uniform and independent of the other examples' and epochs'.
    """

    kind: ClassVar[str] = "allocation"
    period: int

    def __post_init__(self) -> None:
        check_steps(self.period, "steps_per_epoch")

    @property
    def rate(self) -> float:
        return 1 / self.period

    def question(self, asked: Question) -> Question:
        return AllocatedGaussian(self.period, asked.multiplier) if isinstance(asked, SampledGaussian) else asked

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        epoch, place = divmod(index, self.period)
        moved = randomness.moved
        return torch.from_numpy(parts(population, self.period, randomness, moved, "allocation", epoch)[place])


@dataclass(frozen=True)
class Truncated(_StepByStep):
    """A Poisson sample of which at most `most` examples are kept, drawn uniformly from those that joined.

    Formal guarantees: given who joined, every set of `most` of them is as likely.
    """

    kind: ClassVar[str] = "truncated"
    rate: float
    most: int
    population: int

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_steps(self.most, "max_batch")

    def question(self, asked: Question) -> Question:
        if not isinstance(asked, SampledGaussian):
            return asked
        return TruncatedGaussian(asked.rate, asked.multiplier, self.most, self.population)

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        assert population == self.population, "a truncated sample is priced for the size of its dataset"
        found = joined(population, self.rate, randomness.stream("sample", index))
        if len(found) > self.most:
            found = found[places(len(found), self.most, randomness.stream("kept", index))]
        return torch.from_numpy(found)


@dataclass(frozen=True)
class Shuffled(_StepByStep):
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


@dataclass(frozen=True, eq=False)
class RowsOfUsers(_StepByStep):
    """A Poisson sample of rows that belong to users, of each of whom it keeps at most `users.cap` rows, drawn uniformly
    from that user's own rows that joined.

    Formal guarantees: which rows of a user are kept does not depend on other users'.
    """

    kind: ClassVar[str] = "poisson"
    tossed: Poisson
    users: Users
    owners: np.ndarray
    """The owner of each row; not used without a cap."""

    @property
    def rate(self) -> float:
        return self.tossed.rate

    def question(self, asked: Question) -> Question:
        found = self.users.question(asked)
        assert found is not None, "planning refuses questions that have no theorem for users"
        return found

    def draw(self, population: int, index: int, randomness: Randomness) -> Tensor:
        rows = self.tossed.draw(population, index, randomness)
        if self.users.cap is None:
            return rows
        coins = randomness.stream("kept", index).permutation(len(rows))
        return rows[torch.from_numpy(np.sort(first_of_each(self.owners[rows.numpy()], coins, self.users.cap)))]


def first_of_each(owners: np.ndarray, coins: np.ndarray, most: int) -> np.ndarray:
    """The places of the first `most` of each owner, in the order of the coins."""
    order = np.lexsort((coins, owners))
    ranked = owners[order]
    begins = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(ranked) else np.zeros(0, dtype=bool)
    place = np.arange(len(ranked))
    rank = place - np.maximum.accumulate(np.where(begins, place, 0))
    return np.asarray(order[rank < most])


SAMPLINGS = ("poisson", "allocation", "truncated", "shuffled")


def sampling_by_name(name: str, rate: float, population: int, max_batch: int | None = None) -> Sampling:
    """The sampling that a user names; an epoch of an allocation has 1 / rate steps, rounded."""
    if name not in SAMPLINGS:
        raise ValueError(f"sampling={name!r} is unknown; choose from {', '.join(SAMPLINGS)}")
    if (max_batch is not None) != (name == "truncated"):
        raise ValueError(
            f"max_batch={max_batch} with sampling={name!r}: sampling='truncated' keeps at most so many examples of a "
            "sample, and needs it; leave it out elsewhere"
        )
    check_rate(rate)
    if name == "allocation":
        return Allocation(max(1, round(1 / rate)))
    if max_batch is not None:
        return Truncated(rate, max_batch, population)
    return Poisson(rate) if name == "poisson" else Shuffled(rate)
