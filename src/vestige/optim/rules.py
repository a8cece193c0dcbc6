"""How do the parameters move on a direction? torch.optim, and what its optimizers mean for the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vestige.optim.adam_bc import AUTO_FLOOR, AdamBC

SCALE_FREE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")
"""Optimizers that move each coordinate by about the learning rate, whatever the size of the gradient."""


@dataclass(frozen=True)
class Rule:
    """Any torch.optim optimizer, with its options."""

    optimizer: type[Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
        try:
            return self.optimizer(parameters, lr=lr, **self.options)  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"optimizer {self.optimizer.__name__} refused its options: {error}") from error

    @property
    def name(self) -> str:
        return self.optimizer.__name__

    @property
    def scale_free(self) -> bool:
        return self.name in SCALE_FREE or (self.optimizer is AdamBC and self._floor == "auto")

    @property
    def _floor(self) -> Any:
        return self.options.get("floor", "auto")

    @property
    def hears_noise(self) -> bool:
        """Whether the optimizer must be told the noise in each gradient."""
        return self.optimizer is AdamBC

    @property
    def copies(self) -> float | None:
        """Extra state, in copies of the parameters; None if unknown."""
        if self.optimizer is torch.optim.SGD:
            return 1.0 if self.options.get("momentum") else 0.0
        return {"AdamBC": 2.0, "Adam": 2.0, "AdamW": 2.0, "NAdam": 2.0, "RAdam": 2.0, "Adagrad": 1.0}.get(self.name)

    @property
    def gain(self) -> float | None:
        """How far a constant unit gradient moves the parameters per step, over the learning rate; None if unknown."""
        if self.optimizer is AdamBC:
            # Where noise dominates, what is left of the second moment is the floor (in units of the noise if "auto").
            return float(AUTO_FLOOR if self._floor == "auto" else self._floor) ** -0.5
        if self.scale_free:
            return 1.0
        if self.optimizer is not torch.optim.SGD:
            return None
        return (1 - self.options.get("dampening", 0.0)) / (1 - self.options.get("momentum", 0.0))


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Rule:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")
    return Rule(torch.optim.SGD, {"momentum": momentum, "weight_decay": weight_decay})


OPTIMIZERS: dict[str, type[Optimizer]] = {"adambc": AdamBC} | {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and kind is not Optimizer
    and name not in ("LBFGS", "SparseAdam")
}


def named(optimizer: str, options: Mapping[str, Any]) -> Rule:
    """A rule by the optimizer's name, as the command line gives it."""
    kind = OPTIMIZERS.get(optimizer.lower())
    if kind is None:
        raise ValueError(f"optimizer={optimizer!r} is unknown; choose from {', '.join(sorted(OPTIMIZERS))}")
    return Rule(kind, dict(options))
