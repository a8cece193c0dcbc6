"""How does a release become an update? Through memory, optimizer and average: the half of a method after the noise.

`vestige.train`, a user's own loop and a stack of runs share this one step; what differs is who moves the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters, Value
from vestige.optim import averaging
from vestige.optim.averaging import Average
from vestige.optim.memory import Memory, MemoryState, Prepares
from vestige.optim.optimizers.foreach_step import Moves
from vestige.optim.rules import Rule
from vestige.randomness.sum_and_release_types import Release


class Mover(Protocol):
    """Moves the parameters along a mean gradient."""

    gradient: Tensor
    """Where the mean gradient of a step is written, [..., size]."""

    def step(self, pace: Value) -> None:
        """Update the parameters by `gradient`, at the learning rate times `pace`."""
        ...

    def hear(self, noise_std: float | Tensor) -> None:
        """Set the standard deviation of the noise in `gradient`, for a rule that uses it."""
        ...


class Learner:
    """The half of a method that sees only releases: memory, rule and average."""

    def __init__(
        self, memory: Memory, rule: Rule, average: Average, layout: Layout, point: Mapping[str, Tensor], mover: Mover
    ) -> None:
        self._memory, self._rule, self._average, self.layout = memory, rule, average, layout
        self._point, self.mover = dict(point), mover
        lead = mover.gradient.shape[:-1]
        self.memory = for_each(memory.init(layout, mover.gradient.device), lead)
        self.average = averaging.start(average, layout, self._point, lead)

    def prepare(self, point: Parameters, sample_rate: float) -> None:
        """Start what the next step needs of the parameters alone, while the release taken there is being computed."""
        if isinstance(self._memory, Prepares):
            self._memory.prepare(self.memory, point, sample_rate)

    def step(self, release: Release, point: Parameters, pace: Value, number: int) -> dict[str, Tensor]:
        """Update on the release of step `number`, taken at `point`; returns its diagnostics."""
        direction, self.memory, seen = self._memory.step(release, self.memory, point)
        torch.mul(direction, 1 / release.expected_batch, out=self.mover.gradient)
        if self._rule.hears_noise:
            self.mover.hear(self._memory.noise_std(release, self.memory) / release.expected_batch)
        self.mover.step(pace)
        averaging.update(self._average, self.average, self.layout, self._point, number)
        return seen


class OptimizerMover:
    """Moves the parameters of a layout by a torch optimizer; its groups' learning rates are those at pace 1, which a
    scheduler changes from step to step."""

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
    ):
        self.optimizer, self.scheduler = optimizer, scheduler
        self._rates: list[object] = [group["lr"] for group in optimizer.param_groups]
        self.gradient = torch.zeros(layout.size, device=next(iter(parameters.values())).device)
        for name, view in layout.views(self.gradient).items():
            parameters[name].grad = view
        self._scales, self._moves = scales_of(layout, parameters), Moves(optimizer)

    def step(self, pace: Value) -> None:
        rates = self._rates if self.scheduler is None else self.scheduler.get_last_lr()
        self._set(rates, float(pace))
        self._moves.step(self._scales)
        if self.scheduler is not None:
            self._set(rates, 1.0)  # it continues from its own rates
            self.scheduler.step()

    def _set(self, rates: Sequence[Any], pace: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * pace

    def hear(self, noise_std: float | Tensor) -> None:
        self.optimizer.hear(noise_std)  # type: ignore[attr-defined]


def scales_of(layout: Layout, parameters: Mapping[str, Tensor]) -> dict[int, float] | None:
    """The constants of balanced steps by the id of the parameter; None where all are 1."""
    constants = layout.constants
    return None if constants is None else {id(parameters[name]): scale for name, scale in constants.items()}


def for_each(state: MemoryState, lead: tuple[int, ...]) -> MemoryState:
    """A component's state with axes of runs in front of every tensor; other values are public, and one for all runs."""
    return {
        name: value.expand(*lead, *value.shape).clone() if lead and isinstance(value, Tensor) else value
        for name, value in state.items()
    }
