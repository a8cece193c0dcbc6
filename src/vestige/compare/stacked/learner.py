"""How do many runs remember and move at once? The same memories and torch optimizers, along a leading axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters
from vestige.mechanism.noise import Release
from vestige.methods.base import Method
from vestige.optim import averaging
from vestige.optim.memory import Blend, Filtered, KnowsNoise, Memory, State
from vestige.optim.rules import AdamBC


@dataclass(frozen=True)
class StackedRun:
    """One run of a stack: everything in which runs may differ. `model` is trained in place."""

    model: nn.Module
    method: Method
    noise_multiplier: float
    lr: float
    seed: int | None = None
    """Makes this run's noise and sampling those of `train(..., reproducible=seed)`: such a run protects nobody."""


def for_each(state: dict[str, Any], runs: int) -> dict[str, Any]:
    """A part's state with a leading axis of runs in every tensor; what is public and alike in all stays as it is."""
    return {
        name: value.expand(runs, *value.shape).clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def alike(values: Sequence[Any]) -> list[slice]:
    """The stretches of equal values."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(values)], strict=True)]


def layout_of(run: StackedRun) -> Layout:
    return Layout.of(run.model, run.method.grouping)


@dataclass(frozen=True)
class Remembering:
    """`memory.Blend` for many runs at once: the algebra of its `step`, in batched products over one window each."""

    memory: Blend

    @property
    def _follows_trend(self) -> bool:
        return self.memory.kernel.smoothing is not None and self.memory.window > 1

    def init(self, layout: Layout, device: torch.device) -> State:
        depth = self.memory.window - 1
        state: State = {"count": 0, "past": torch.zeros(depth, layout.size, device=device)}
        if self._follows_trend:
            state["squares"] = torch.zeros(depth, dtype=torch.float64, device=device)
            state["trend"] = torch.zeros(layout.size, device=device)
        return state

    def step(self, release: Release, state: State, parameters: Parameters) -> Filtered:
        fresh, share, past, count = release.total, self.memory.share, state["past"], state["count"]
        depth = past.shape[-2]
        filled = min(count, depth)
        blend, seen = fresh * share, {}
        if filled:
            lags = (count - 1 - torch.arange(filled, device=fresh.device)) % depth + 1
            trend_norm, distances = self._compare(state, filled)
            noise_norms = cast(Tensor, release.noise_std).squeeze(-1) * (
                fresh.shape[-1] ** 0.5 * self.memory.fresh_share
            )
            weigh = cast(Callable[..., tuple[Tensor, Tensor]], self.memory.kernel.weigh)
            weights, confidence = weigh(lags.double(), distances, trend_norm, noise_norms)
            weights = weights.expand(len(fresh), filled)
            recalled = torch.bmm(weights.to(fresh.dtype).unsqueeze(1), past[:, :filled]).squeeze(1)
            blend.add_(recalled, alpha=1 - share)
            seen = {"weights": weights[:, torch.argsort(lags)], "effective_depth": (weights * lags).sum(-1)}
            if self._follows_trend:
                seen |= {"confidence": confidence, "trend_norm": trend_norm}
        if depth:
            self._remember(blend if self.memory.remembers == "blend" else fresh, state)
        return Filtered(blend, state, seen)

    def _compare(self, state: State, filled: int) -> tuple[Tensor, Tensor]:
        past = state["past"]
        if not self._follows_trend:
            nothing = torch.zeros(len(past), dtype=torch.float64, device=past.device)
            return nothing, nothing.unsqueeze(1).expand(-1, filled)
        trend = state["trend"]
        square = torch.linalg.vector_norm(trend, dim=-1).double().square()
        products = torch.bmm(past[:, :filled], trend.unsqueeze(2)).squeeze(2).double()
        distances = (state["squares"][:, :filled] - 2 * products + square.unsqueeze(1)).clamp(min=0).sqrt()
        return square.sqrt(), distances

    def _remember(self, kept: Tensor, state: State) -> None:
        slot = state["count"] % state["past"].shape[-2]
        state["past"][:, slot] = kept
        if self._follows_trend:
            state["squares"][:, slot] = torch.linalg.vector_norm(kept, dim=-1).double().square()
            smoothing = self.memory.kernel.smoothing
            assert smoothing is not None
            state["trend"].lerp_(kept, smoothing if state["count"] else 1.0)
        state["count"] += 1


class Moving:
    """One torch optimizer for the rows of `parameters`, each with a learning rate of its own.

    The optimizer moves a displacement that starts each step at zero, at rate 1. What it decides is in proportion to the
    rate, so the rows move by their own rates times it. Weight decay looks at the parameters themselves: that is done
    here.
    """

    def __init__(self, method: Method, parameters: Tensor, lr: Tensor) -> None:
        self.parameters, self.lr, options = parameters, lr, dict(method.rule.options)
        adam = method.rule.optimizer in (torch.optim.Adam, torch.optim.AdamW)
        if adam and parameters.device.type in ("cpu", "cuda") and not {"foreach", "fused"} & options.keys():
            options["fused"] = True  # one pass over the moments in place of ten
        self._displacement = nn.Parameter(torch.zeros_like(parameters), requires_grad=False)
        self.optimizer = replace(method.rule, options=options).build([self._displacement], 1.0)
        group = self.optimizer.param_groups[0]
        self.decay, group["weight_decay"] = group["weight_decay"], 0.0
        self.decoupled = isinstance(self.optimizer, AdamBC | torch.optim.AdamW)
        plain = all(not value for name, value in group.items() if name in ("momentum", "nesterov", "maximize"))
        if isinstance(self.optimizer, torch.optim.SGD) and plain:
            self._displacement = nn.Parameter(parameters.new_zeros(0), requires_grad=False)  # the gradient is the move

    def step(self, gradient: Tensor, pace: Tensor | None) -> None:
        """Move on a gradient, which is used up."""
        lr = self.lr if pace is None else self.lr * pace
        if self.decay and self.decoupled:
            self.parameters.mul_((1 - lr * self.decay).float())
        elif self.decay:
            gradient.add_(self.parameters, alpha=self.decay)
        if not self._displacement.numel():
            self.parameters.addcmul_(gradient, lr.float(), value=-1)
            return
        self._displacement.grad = gradient
        self.optimizer.step()
        self.parameters.addcmul_(self._displacement, lr.float())
        self._displacement.zero_()


class Learning:
    """Remembering and moving for the runs `part` of an asking, which share a memory, a rule and an average."""

    def __init__(self, runs: Sequence[StackedRun], part: slice, parameters: Tensor) -> None:
        method, device = runs[0].method, parameters.device
        self.part, self.layout = part, layout_of(runs[0])
        self.memory: Memory | Remembering = method.memory
        if isinstance(self.memory, Blend):
            self.memory = Remembering(self.memory)
        self.state = for_each(self.memory.init(self.layout, device), len(runs))
        lr = torch.tensor([run.lr for run in runs], dtype=torch.float64, device=device).unsqueeze(1)
        self.moving = Moving(method, parameters, lr)
        self.kind, self.average = method.average, {"mean": parameters.clone()} if method.average.copies else {}
        self._point = self.layout.views(parameters)
        self.seen: dict[str, Tensor] = {}

    def step(self, release: Release, pace: Tensor | None, step: int) -> None:
        direction, self.state, self.seen = self.memory.step(release, self.state, self._point)
        if isinstance(self.moving.optimizer, AdamBC):
            knowing = cast(KnowsNoise, self.memory)  # Method refuses any other beside AdamBC
            self.moving.optimizer.hear(knowing.noise_std(release, self.state) / release.expected_batch)
        self.moving.step(direction.mul_(1 / release.expected_batch), pace)
        averaging.update(self.kind, self.average, self.layout, self._point, step)
