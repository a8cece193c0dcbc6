"""How do the sums of several processes become one noised sum? Added up part by part, each noised once by its owner.

Each process clips the gradients of its own examples and adds them up. Of the total each gets one part (a
reduce-scatter), adds the noise of its coordinates, and gives the noised part to the others (an all-gather). With
lattice noise what is added up are integers, so the total does not depend on the order of the processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.processes.group import ALONE, Processes
from vestige.processes.parameter_shards import ShardedSum, Shards
from vestige.randomness import lattice
from vestige.randomness.correlated import NoiseSequence
from vestige.randomness.gaussian import normal
from vestige.randomness.keys import Randomness
from vestige.randomness.streams import Stream
from vestige.randomness.sum_and_release_types import BoundedSum, Cut


@dataclass(frozen=True)
class Sums:
    """Makes releases of the sums of a group's processes."""

    group: Processes = ALONE

    def noised(
        self,
        total: Tensor,
        sensitivity: float | Tensor,
        noise: NoiseSequence,
        multiplier: float,
        randomness: Randomness,
        purpose: str,
        index: int,
        *,
        nonprivate_keep: bool = False,
    ) -> tuple[Tensor, float | Tensor, Tensor | None]:
        """Together: the noised sum, the standard deviation per coordinate, and the noise if asked for. `total` is this
        process's own sum, and is used up.

        Formal guarantees: the answer of `noise` to the sum over all processes. An example is in the sum of one process
        alone, so with lattice noise one of the integers that are added up changes, by as much as in one process. Noise
        is drawn once for every coordinate: by its owner, from a stream that no other process draws from; or, in a run
        that repeats, from one stream of which each owner keeps its part.
        """
        if not self.group.several:
            stream = randomness.stream(purpose, index, continues=noise.keeps)
            std, kept = noise.add(BoundedSum(total, sensitivity), multiplier, stream, nonprivate_keep=nonprivate_keep)
            return total.float(), std, kept
        assert not nonprivate_keep, "whoever asks for raw sums trains in one process"
        size = len(total)
        cut = self.cut(size, randomness)
        sensitivity_here = cut.of(sensitivity) if isinstance(sensitivity, Tensor) else sensitivity
        stream = self._stream(randomness, purpose, index, noise.keeps)
        if noise.arithmetic == "lattice":
            steps = lattice.rounded(total, lattice.spacing_of(BoundedSum(total, sensitivity), multiplier))
            mine = self.group.scattered(padded(steps, self.group.size))
            noised, _ = lattice.add_noise_to_steps(mine, BoundedSum(mine, sensitivity_here, cut), multiplier, stream)
            std = sensitivity * lattice.charged(multiplier, size)
        else:
            noised = self.group.scattered(padded(total.float(), self.group.size))
            own, _ = noise.add(BoundedSum(noised, sensitivity_here, cut), multiplier, stream)
            std = self.group.joined(own)[:size] if isinstance(own, Tensor) else own
        return self.group.joined(noised)[:size], std, None

    def cut(self, size: int, randomness: Randomness) -> Cut:
        """Which coordinates this process adds noise to."""
        each = -(-size // self.group.size)
        first = self.group.rank * each
        return Cut(((first, first + each),), size, common=randomness.predictable)

    def replayed(self, size: int, randomness: Randomness, index: int, device: torch.device) -> Tensor:
        """The fresh unit noise of an earlier step of a run that repeats, of the coordinates that this process has."""
        whole = normal(size, randomness.stream("noise", index), device)
        return self.cut(size, randomness).of(whole) if self.group.several else whole

    def _stream(self, randomness: Randomness, purpose: str, index: int, continues: bool) -> Stream:
        own = purpose if randomness.predictable else f"{purpose}/{self.group.rank}"
        return randomness.stream(own, index, continues=continues)


BY_ITSELF = Sums()
"""Of one process alone."""


def padded(vector: Tensor, multiple: int) -> Tensor:
    """The vector with zeros at its end, so that its length is such a multiple."""
    missing = -len(vector) % multiple
    if not missing:
        return vector
    longer = vector.new_zeros(len(vector) + missing)
    longer[: len(vector)] = vector
    return longer


@dataclass(frozen=True)
class ShardedSums(Sums):
    """Makes this process's parts of releases, of a sum whose parts the processes have already."""

    shards: Shards | None = None

    def noised(
        self,
        total: Tensor,
        sensitivity: float | Tensor,
        noise: NoiseSequence,
        multiplier: float,
        randomness: Randomness,
        purpose: str,
        index: int,
        *,
        nonprivate_keep: bool = False,
    ) -> tuple[Tensor, float | Tensor, Tensor | None]:
        """This process's part of the noised sum, and the standard deviation of its coordinates. `total` is its part of
        the sum over all processes, in steps of the lattice or as numbers, and is used up.

        Formal guarantees: as `Sums.noised`. The parts of a sum are rounded `FINER` than the lattice and the total to
        it, so that neighbouring totals differ by at most 1.01 steps more than their sums, which is what is charged, for
        the number of parts given there.
        """
        assert not nonprivate_keep, "whoever asks for raw sums trains in one process"
        cut = self.cut(0, randomness)
        here = cut.of(sensitivity) if isinstance(sensitivity, Tensor) else sensitivity
        stream = self._stream(randomness, purpose, index, noise.keeps)
        if noise.arithmetic == "lattice":
            return *lattice.add_noise_to_steps(total, BoundedSum(total, here, cut), multiplier, stream), None
        std, _ = noise.add(BoundedSum(total, here, cut), multiplier, stream)
        return total, std, None

    def cut(self, size: int, randomness: Randomness) -> Cut:
        assert self.shards is not None
        return self.shards.cut(common=randomness.predictable)

    def sum(
        self, noise: NoiseSequence, sensitivity: float | Tensor, multiplier: float, device: torch.device
    ) -> ShardedSum:
        """Where the gradients of a question are put, which is noised so."""
        assert self.shards is not None
        whole = BoundedSum(torch.zeros(0), sensitivity, self.shards.cut(common=False))
        exact = noise.arithmetic == "lattice"
        return ShardedSum(self.shards, lattice.spacing_of(whole, multiplier) if exact else None, device)

    # --- of what a release is a part ---

    @property
    def size(self) -> int:
        assert self.shards is not None
        return self.shards.size

    def total(self, numbers: Tensor) -> Tensor:
        return self.group.total(numbers)

    def mine(self, number: int) -> bool:
        return number % self.group.size == self.group.rank

    def one_by_one(self, point: Mapping[str, Tensor]) -> Iterator[Tensor]:
        assert self.shards is not None
        return self.shards.one_by_one(point)
