"""How are the parameters updated? By torch.optim optimizers, with what each implies for the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from vestige.optim.optimizers.micro_adam import MicroAdam
from vestige.optim.optimizers.muon import HybridMuon

AUTO_FLOOR = 0.1
"""The floor of AdamBC's second moment where it is "auto", in units of the noise variance."""


class AdamBC(Optimizer):
    """Adam with the variance of the noise taken out of its second moment (Tang, Shpilevskiy & Lecuyer, AAAI 2024).

    theta -= lr * m / sqrt(max(v - Phi, floor)), with m, v and Phi averaged and bias-corrected alike. Phi is the
    variance of the noise in each coordinate of the gradient; `hear` sets it before every step, so that it follows
    schedules, clipping bounds and memories. There is no other constant in the denominator. `weight_decay` is decoupled.
    The floor is a number, or "auto": a tenth of Phi, which keeps the step size independent of the scale of the noise.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float | Literal["auto"] = "auto",
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must lie in [0, 1)")
        if floor != "auto" and not floor > 0:
            raise ValueError(f"floor={floor} must be positive, or 'auto': the least second moment that is divided by")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay} must not be negative")
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay})
        self._noise_std: float | Tensor | None = None

    def hear(self, noise_std: float | Tensor) -> None:
        """Set the standard deviation of the noise in this step's gradient: one number, or one per coordinate, flat; or
        a matrix that broadcasts against the one parameter, such as a number for each of its rows."""
        self._noise_std = noise_std

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._noise_std is None:
            raise ValueError("AdamBC does not know the noise in the gradient: call hear(noise_std) before each step")
        loss = closure() if closure is not None else None
        place = 0
        for group in self.param_groups:
            for p in group["params"]:
                phi = self._variance(place, p)
                place += p.numel()
                if p.grad is not None:
                    self._move(p, group, self.state[p], phi)
        self._noise_std = None
        return loss

    def _variance(self, start: int, p: Tensor) -> float | Tensor:
        if isinstance(self._noise_std, Tensor) and self._noise_std.dim() == 1:
            return self._noise_std[start : start + p.numel()].view_as(p).square()
        assert self._noise_std is not None
        return self._noise_std**2

    @staticmethod
    def _move(p: Tensor, group: dict[str, Any], state: dict[str, Any], phi: float | Tensor) -> None:
        if not state:
            state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state["noise"] = 0.0  # stays a number if the noise is one: load_state_dict would round a tensor to float32
        beta1, beta2 = group["betas"]
        state["step"] += 1
        count = float(state["step"])
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        state["noise"] = beta2 * state["noise"] + (1 - beta2) * phi
        mean = state["exp_avg"] / (1 - beta1**count)
        # The bias correction comes first, so that the noise variance is subtracted from an unbiased moment.
        noise = state["noise"] / (1 - beta2**count)
        noise = noise.to(p.dtype) if isinstance(noise, Tensor) else noise
        second = state["exp_avg_sq"] / (1 - beta2**count) - noise
        floor = AUTO_FLOOR * noise if group["floor"] == "auto" else group["floor"]
        if group["weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(mean / second.clamp_(min=floor).sqrt_(), alpha=-group["lr"])


SCALE_FREE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "MicroAdam")
"""Optimizers that move each coordinate by about the learning rate, whatever the size of the gradient."""


PROPORTIONAL = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Muon", "AdamBC")
"""Optimizers that see gradients and weight_decay * parameters alone, and move in proportion to the learning rate."""


@dataclass(frozen=True)
class Rule:
    """Any torch.optim optimizer, with its options."""

    optimizer: type[Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Rule({', '.join([self.name, *(f'{name}={value!r}' for name, value in self.options.items())])})"

    def build(self, parameters: Iterable[nn.Parameter] | list[dict[str, object]], lr: float) -> Optimizer:
        """The optimizer of these parameters, or groups of them as torch has them."""
        try:
            return self.optimizer(parameters, lr=lr, **self.options)  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(f"optimizer {self.optimizer.__name__} refused its options: {error}") from error

    @property
    def name(self) -> str:
        return self.optimizer.__name__

    @property
    def scale_free(self) -> bool:
        if self.optimizer is HybridMuon:
            return bool(self.options.get("iterations", 5)) and self.options.get("rest", "adam") == "adam"
        return self.name in SCALE_FREE or (self.optimizer is AdamBC and self._floor == "auto")

    @property
    def _floor(self) -> Any:
        return self.options.get("floor", "auto")

    @property
    def hears_noise(self) -> bool:
        """Whether the optimizer needs the noise in each gradient."""
        return issubclass(self.optimizer, AdamBC)

    @property
    def stackable(self) -> bool:
        """Whether it updates each coordinate independently, in proportion to the learning rate."""
        return self.optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, AdamBC)

    @property
    def shardable(self) -> bool:
        """Whether it updates each coordinate by itself, so that processes can each update their own."""
        return self.balances and self.name != "Muon"

    @property
    def balances(self) -> bool:
        """Whether it can move W = a V as it would move V: at `a` times the rate, with 1 / a of the weight decay."""
        own = self.optimizer is AdamBC or getattr(torch.optim, self.name, None) is self.optimizer
        return own and self.name in PROPORTIONAL

    @property
    def fusible(self) -> bool:
        """Whether torch has a fused version: one pass over its state."""
        return self.optimizer in (torch.optim.Adam, torch.optim.AdamW)

    @property
    def decoupled_decay(self) -> bool:
        """Whether weight decay acts on the parameters, not through the gradient."""
        return self.optimizer in (torch.optim.AdamW, AdamBC)

    @property
    def plain(self) -> bool:
        """Whether the update is the gradient times the learning rate."""
        return self.optimizer is torch.optim.SGD and not any(map(self.options.get, ("momentum", "maximize")))

    @property
    def copies(self) -> float | None:
        """Extra state, in copies of the parameters; None if unknown."""
        if self.optimizer is torch.optim.SGD:
            return 1.0 if self.options.get("momentum") else 0.0
        if self.optimizer is HybridMuon:  # of a model whose parameters are nearly all in matrices
            return 1.0 if self.options.get("momentum", 0.95) else 0.0
        if self.optimizer is MicroAdam:  # the error, and of every sparse gradient values and places
            return 1.0 + 2 * self.options.get("density", 0.01) * self.options.get("window", 10)
        return {"AdamBC": 2.0, "Adam": 2.0, "AdamW": 2.0, "NAdam": 2.0, "RAdam": 2.0, "Adagrad": 1.0}.get(self.name)

    @property
    def gain(self) -> float | None:
        """How far a constant unit gradient moves the parameters per step, over the learning rate; None if unknown."""
        if self.optimizer is AdamBC:
            # Where noise dominates, what is left of the second moment is the floor (in units of the noise if "auto").
            return float(AUTO_FLOOR if self._floor == "auto" else self._floor) ** -0.5
        if self.optimizer is HybridMuon:
            momentum = self.options.get("momentum", 0.95)
            if not self.scale_free:
                return None if self.options.get("iterations", 5) else 1 / (1 - momentum)
            # A step has one length whatever the momentum, but with momentum steps agree with those before, and what
            # the noise alone does adds up to sqrt((1 + momentum) / (1 - momentum)) as much.
            return float(((1 + momentum) / (1 - momentum)) ** 0.5)
        if self.scale_free:
            return 1.0
        if self.optimizer is not torch.optim.SGD:
            return None
        return (1 - self.options.get("dampening", 0.0)) / (1 - self.options.get("momentum", 0.0))


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Rule:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")
    return Rule(torch.optim.SGD, {"momentum": momentum, "weight_decay": weight_decay})


OPTIMIZERS: dict[str, type[Optimizer]] = {"adambc": AdamBC, "microadam": MicroAdam, "hybridmuon": HybridMuon} | {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, Optimizer)
    and kind is not Optimizer
    and name not in ("LBFGS", "SparseAdam")
}


def named(optimizer: str, options: Mapping[str, object]) -> Rule:
    """A rule by the optimizer's name, as the command line gives it."""
    kind = OPTIMIZERS.get(optimizer.lower())
    if kind is None:
        raise ValueError(f"optimizer={optimizer!r} is unknown; choose from {', '.join(sorted(OPTIMIZERS))}")
    return Rule(kind, dict(options))


Scheduling = Callable[[Optimizer], LRScheduler]


def scheduled(optimizer: Optimizer, scheduling: Scheduling | None) -> LRScheduler | None:
    """The learning-rate scheduler that a user asks for: a function of the optimizer makes it."""
    if scheduling is None:
        return None
    example = "such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)"
    if isinstance(scheduling, LRScheduler) or not callable(scheduling):
        kind = type(scheduling).__name__
        raise ValueError(f"lr_scheduler is a {kind}: give a function that makes one of the optimizer, {example}")
    made = scheduling(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            "lr_scheduler makes a ReduceLROnPlateau, which needs a loss, and a loss of the data is not released; give "
            "one that follows the steps"
        )
    if not isinstance(made, LRScheduler) or made.optimizer is not optimizer:
        raise ValueError(
            f"lr_scheduler makes a {type(made).__name__}: it must make a scheduler of the optimizer that it is given, "
            f"{example}"
        )
    return made


def grouped(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]) -> list[dict[str, object]]:
    """A user's parameter groups, as torch has them; every trainable parameter must be in one of them, once."""
    names, left, found = {id(p): name for name, p in parameters.items()}, dict(parameters), []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param_groups[{number}] must be a dictionary with 'params', as in torch.optim")
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for parameter in members:
            name = names.get(id(parameter))
            if name is None and parameter.requires_grad:
                raise ValueError(
                    f"param_groups[{number}] has a parameter of shape {tuple(parameter.shape)} that the model has not: "
                    "nothing would train it"
                )
            if name is not None and left.pop(name, None) is None:
                raise ValueError(f"param_groups[{number}] has parameter {name!r} once more: one group for each")
        found.append({**group, "params": [p for p in members if id(p) in names]})
    if left:
        raise ValueError(
            f"param_groups leave out parameter {next(iter(left))!r}: put it into a group, or freeze it with "
            "requires_grad_(False)"
        )
    return [group for group in found if group["params"]]
