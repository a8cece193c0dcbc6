"""How do many runs learn at once? The same learner and torch optimizers, along a leading axis of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vestige.layout import Layout
from vestige.mechanism.clipping import Value
from vestige.methods.base import Method
from vestige.optim.learner import Learner
from vestige.optim.rules import Rule
from vestige.randomness.sum_and_release_types import Release


@dataclass(frozen=True)
class StackedRun:
    """One run of a stack: everything in which runs may differ. `model` is trained in place."""

    model: nn.Module
    method: Method
    noise_multiplier: float
    lr: float
    seed: int | None = None
    """Makes this run's noise and sampling those of `train(..., reproducible=seed)`: such a run is not private."""


def alike(values: Sequence[object]) -> list[slice]:
    """Slices of consecutive equal values."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(values)], strict=True)]


def layout_of(run: StackedRun) -> Layout:
    return run.method.layout(run.model)


def scales_of(runs: Sequence[StackedRun], device: torch.device) -> dict[str, Tensor] | None:
    """The constants of balanced steps, of each run by the name of the parameter, [runs, 1, ...]; None where all are 1.
    Runs begin with weights of their own, so each has its own constants."""
    layouts = [layout_of(run) for run in runs]
    if all(layout.constants is None for layout in layouts):
        return None
    each = [layout.constants_of_all for layout in layouts]
    return {
        segment.name: torch.tensor([mine[segment.name] for mine in each], device=device).view(
            -1, *(1 for _ in segment.shape)
        )
        for segment in layouts[0].segments
    }


class StackedMover:
    """One torch optimizer for the rows of `parameters`, each with a learning rate of its own.

    The optimizer updates a displacement that starts each step at zero, at rate 1. Its update is proportional to the
    rate, so each row moves by its own rate times it. Weight decay depends on the parameters themselves, so it is
    applied here.
    """

    def __init__(self, rule: Rule, parameters: Tensor, lr: Tensor, scales: Tensor | None = None) -> None:
        """`scales` are the constants of balanced steps, [runs, size]."""
        self.parameters, self.lr, self.scales, options = parameters, lr, scales, dict(rule.options)
        if rule.fusible and parameters.device.type in ("cpu", "cuda") and not {"foreach", "fused"} & options.keys():
            options["fused"] = True  # one pass over the moments instead of ten
        self.gradient = torch.zeros_like(parameters)
        self._displacement = nn.Parameter(torch.zeros_like(parameters), requires_grad=False)
        self.optimizer = replace(rule, options=options).build([self._displacement], 1.0)
        group = self.optimizer.param_groups[0]
        self.decay, group["weight_decay"] = group["weight_decay"], 0.0
        self.decoupled = rule.decoupled_decay
        if rule.plain:
            self._displacement = nn.Parameter(parameters.new_zeros(0), requires_grad=False)  # plain SGD needs none

    def step(self, pace: Value) -> None:
        lr = self.lr * pace
        if self.decay and self.decoupled:
            self.parameters.mul_((1 - lr * self.decay).float())
        elif self.decay:
            trained = self.parameters if self.scales is None else self.parameters / self.scales
            self.gradient.add_(trained, alpha=self.decay)
        if not self._displacement.numel():
            self.parameters.addcmul_(self._scaled(self.gradient), lr.float(), value=-1)
            return
        self._displacement.grad = self.gradient
        self.optimizer.step()
        self.parameters.addcmul_(self._scaled(self._displacement), lr.float())
        self._displacement.zero_()

    def _scaled(self, moves: Tensor) -> Tensor:
        """What W = a V moves by where V moves by this."""
        return moves if self.scales is None else moves * self.scales

    def hear(self, noise_std: float | Tensor) -> None:
        self.optimizer.hear(noise_std)  # type: ignore[attr-defined]


class StackedLearner:
    """A learner for the runs `part` of a curator, which share a memory, a rule and an average."""

    def __init__(self, runs: Sequence[StackedRun], part: slice, parameters: Tensor) -> None:
        method, layout = runs[0].method, layout_of(runs[0])
        self.part, self._point = part, layout.views(parameters)
        lr = torch.tensor([run.lr for run in runs], dtype=torch.float64, device=parameters.device).unsqueeze(1)
        scales, flat = scales_of(runs, parameters.device), None
        if scales is not None:
            flat = layout.pack({name: scales[name].expand_as(view) for name, view in self._point.items()}, (len(runs),))
        mover = StackedMover(method.rule, parameters, lr, flat)
        self.learner = Learner(method.memory, method.rule, method.average, layout, self._point, mover)
        self.seen: dict[str, Tensor] = {}

    def prepare(self, sample_rate: float) -> None:
        self.learner.prepare(self._point, sample_rate)

    def step(self, release: Release, pace: Value, number: int) -> None:
        self.seen = self.learner.step(release, self._point, pace, number)
