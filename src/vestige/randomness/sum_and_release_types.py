"""What is a sum before and after its noise? Sensitive, then safe to keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Which coordinates of a vector of `size` this process has, where it is divided among several."""

    places: tuple[tuple[int, int], ...]
    """From where to where, in order; what reaches beyond the end is padding."""
    size: int
    common: bool = False
    """Whether noise is drawn for the whole vector, and cut: in a run that repeats it does not depend on how many
    processes there are. Elsewhere each draws its own part, from a stream of its own."""

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.places)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a vector; padding is zero."""
        parts = [whole[start : min(stop, self.size)] for start, stop in self.places]
        missing = len(self) - sum(map(len, parts))
        return torch.cat([*parts, whole.new_zeros(missing)]) if missing or len(parts) != 1 else parts[0]


@dataclass(frozen=True)
class BoundedSum:
    """SENSITIVE: a sum over examples before noise. Only clipping, noise and the curator ever see one.

    `sensitivity` is a float for one ball, or one value per coordinate for a product of balls: noise of standard
    deviation `z * sensitivity` makes the release a Gaussian mechanism with noise multiplier `z`.
    """

    total: Tensor
    sensitivity: float | Tensor
    cut: Cut | None = None
    """Of which coordinates, where this is a part of a sum; then of the sensitivities as well."""

    @property
    def size(self) -> int:
        """The number of coordinates of the whole sum."""
        return self.total.shape[-1] if self.cut is None else self.cut.size


class Divided(Protocol):
    """A release of which each process has a part. All of them call it, in the same order."""

    @property
    def size(self) -> int:
        """The number of coordinates of the whole."""
        ...

    def total(self, numbers: Tensor) -> Tensor:
        """The numbers of all processes added up."""
        ...

    def mine(self, number: int) -> bool:
        """Whether the work with this number is this process's."""
        ...

    def one_by_one(self, point: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Whole parameters, one after the other, from those parts of them that each process has."""
        ...


@dataclass(frozen=True)
class Release:
    """A noised sum: safe to log, keep and step on. `expected_batch` is the public divisor that makes it a mean."""

    total: Tensor
    noise_std: float | Tensor
    expected_batch: float
    sample_rate: float = 1.0
    """The probability with which an example took part: an epoch is 1 / sample_rate releases."""
    unclipped: float | None = None
    """The noised fraction of examples that the clip left alone, where the clip counts them."""
    divided: Divided | None = None
    """Whose part this is, where processes have parts of a release; None where it is whole."""

    def totalled(self, sums: Tensor) -> Tensor:
        """Sums over coordinates, from those over this process's coordinates."""
        return sums if self.divided is None else self.divided.total(sums)

    @property
    def noise_norm(self) -> float | Tensor:
        """The root mean square norm of the noise in `total`, [...]; on the device, where the deviations are."""
        size = self.total.shape[-1] if self.divided is None else self.divided.size
        if not isinstance(self.noise_std, Tensor):
            return float(self.noise_std * size**0.5)
        if self.divided is not None:
            return self.totalled(self.noise_std.double().square().sum()).sqrt()
        if self.noise_std.shape[-1] == size:
            return torch.linalg.vector_norm(self.noise_std, dim=-1)
        return self.noise_std.squeeze(-1) * size**0.5  # one deviation for all coordinates of each run
