"""How does the noise change from epoch to epoch? Public schedules; each step pays its own level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    def factor(self, epoch: int) -> float:
        """The noise multiplier of an epoch (counted from 0) over the first one's; positive."""
        ...


@dataclass(frozen=True)
class Constant:
    """The same noise at every step."""

    def factor(self, epoch: int) -> float:
        return 1.0


@dataclass(frozen=True)
class LinearDecay:
    """Falls by `drop` of the first level each epoch, down to `floor` of it."""

    drop: float = 0.01
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not self.drop >= 0:
            raise ValueError(f"drop={self.drop} of a linear schedule must not be negative")
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor={self.floor} must lie in (0, 1]: noise must stay positive")

    def factor(self, epoch: int) -> float:
        return max(self.floor, 1 - self.drop * epoch)


@dataclass(frozen=True)
class TimeDecay:
    """1 / (1 + drop * epoch)."""

    drop: float = 0.01

    def __post_init__(self) -> None:
        if not self.drop >= 0:
            raise ValueError(f"drop={self.drop} of a time schedule must not be negative")

    def factor(self, epoch: int) -> float:
        return 1 / (1 + self.drop * epoch)


@dataclass(frozen=True)
class StepDecay:
    """Multiplied by `ratio` every `every` epochs."""

    ratio: float = 0.9
    every: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} of a step schedule must lie in (0, 1]")
        if not (isinstance(self.every, int) and self.every >= 1):
            raise ValueError(f"every={self.every} must be a whole number of epochs from 1 up")

    def factor(self, epoch: int) -> float:
        return float(self.ratio ** (epoch // self.every))


@dataclass(frozen=True)
class ExponentialDecay:
    """Multiplied by `ratio` every epoch."""

    ratio: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} of an exponential schedule must lie in (0, 1]")

    def factor(self, epoch: int) -> float:
        return float(self.ratio**epoch)


def epoch_of(step: int, rate: float) -> int:
    """The epoch a step belongs to: one epoch is 1 / rate steps, on average one visit to each example."""
    return int(step * rate + 1e-9)


def level(schedule: Schedule, multiplier: float, step: int, rate: float) -> float:
    """The noise multiplier of one step; training and planning both read it here, so they agree to the last bit."""
    return multiplier * schedule.factor(epoch_of(step, rate))
