"""What does a step of a torch optimizer cost besides its arithmetic? Less than torch's own: the same operations, alone.

A step of `torch.optim.SGD` or `AdamW` on a GPU is a few kernels, and ten times as long in Python: hooks, a profiler's
record, and all of it once more for each group of parameters. Balanced steps have a learning rate for each constant, and
would pay that for each of them. `Moves` calls the same operations of torch with the same numbers, for all constants at
once, where the optimizer is one of torch's own and nothing hooks its step; elsewhere it leaves the step to the
optimizer. What is moved is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torchs

Scales = Mapping[int, float]
"""The constants of balanced steps, by the id of the parameter."""
WITHOUT: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum", "weight_decay", "nesterov", "maximize", "differentiable", "fused"),
    Adam: ("weight_decay", "amsgrad", "maximize", "capturable", "differentiable", "fused"),
    AdamW: ("amsgrad", "maximize", "capturable", "differentiable", "fused"),
}
"""Options that leave a step to the optimizer, where they are set."""

SMALL = 1 << 20
"""Numbers that take a GPU less time to read once more than to start another kernel."""


class Moves:
    """Steps of an optimizer, under the constants of balanced steps where there are some (`balanced`)."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], object] | None = None) -> None:
        """`step` is the optimizer's own where another has taken its place."""
        self._optimizer, self._own = optimizer, step
        self._sorted: dict[int, Sorted] = {}

    def step(self, scales: Scales | None = None) -> None:
        groups = self._directly(scales)
        if groups is None:
            with balanced(self._optimizer, scales):
                (self._own or self._optimizer.step)()
            return
        move = _sgd if type(self._optimizer) is SGD else self._adam
        with torch.no_grad():
            for group, members in groups:
                move(group, members)

    def _directly(self, scales: Scales | None) -> list[tuple[dict[str, object], Sorted]] | None:
        """The groups of parameters; None if the step is the optimizer's."""
        optimizer, kind = self._optimizer, type(self._optimizer)
        options = WITHOUT.get(kind)
        if options is None or self._watched():
            return None
        found = []
        for number, group in enumerate(optimizer.param_groups):
            members = self._sorted.get(number)
            if members is None or not members.still(group, scales):
                members = self._sorted[number] = Sorted(group, scales)
            # The first step of Adam is torch's, which makes its state; on a CPU its operations are other ones.
            ready = kind is SGD or (members.together and self._begun(members.params))
            if not (ready and members.alike and type(group["lr"]) is float):
                return None
            for option in options:
                if group[option]:
                    return None
            for p in members.params:
                if p.grad is None:
                    return None
            found.append((group, members))
        return found

    def _begun(self, params: Sequence[Tensor]) -> bool:
        state = self._optimizer.state
        return all(p in state and "step" in state[p] and state[p]["step"].is_cpu for p in params)

    def _watched(self) -> bool:
        """Whether the optimizer's own step is hooked: by a scheduler, a hook, a profiler, a scaler."""
        optimizer, own = self._optimizer, self._own
        patched = (
            "step" in vars(optimizer) if own is None else getattr(own, "__func__", None) is not type(optimizer).step
        )
        return bool(
            patched
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torchs._global_optimizer_pre_hooks
            or torchs._global_optimizer_post_hooks
            or getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
            or torch._C._autograd._profiler_enabled()
        )

    def _adam(self, group: dict[str, Any], members: Sorted) -> None:
        """`torch.optim.adam._multi_tensor_adam`, each parameter at a rate of its own."""
        params, rates = members.params, [group["lr"] * scale for scale in members.scales]
        state, (beta1, beta2) = [self._optimizer.state[p] for p in params], group["betas"]
        grads: Any = [p.grad for p in params]
        first, second = [each["exp_avg"] for each in state], [each["exp_avg_sq"] for each in state]
        steps = [each["step"] for each in state]
        torch._foreach_add_(steps, members.one, alpha=1.0)
        if group["weight_decay"]:
            decays = [group["weight_decay"] / scale for scale in members.scales]
            torch._foreach_mul_(params, [1 - rate * decay for rate, decay in zip(rates, decays, strict=True)])
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        counts = [step.item() for step in steps]
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(below, group["eps"])
        sizes = [(rate / (1 - beta1**count)) * -1 for rate, count in zip(rates, counts, strict=True)]
        torch._foreach_addcdiv_(params, first, below, sizes)


def _sgd(group: dict[str, Any], members: Sorted) -> None:
    if members.ones:
        given: Any = [p.grad for p in members.params]
        rates = [-(group["lr"] * scale) for scale in members.scales]
        torch._foreach_addcmul_(members.params, given, members.ones, rates)
        return
    for scale, params in members.by_scale:
        rate = -(group["lr"] * scale)
        if members.together:
            grads: Any = [p.grad for p in params]
            torch._foreach_add_(params, grads, alpha=rate)
        else:
            for p in params:
                p.add_(p.grad, alpha=rate)  # type: ignore[arg-type]


class Sorted:
    """The parameters of a group, by their constants."""

    def __init__(self, group: dict[str, Any], scales: Scales | None) -> None:
        self._constants = scales
        self.params: list[Tensor] = list(group["params"])
        self.scales = [1.0 if scales is None else scales.get(id(p), 1.0) for p in self.params]
        self.by_scale: list[tuple[float, list[Tensor]]] = [
            (scale, [p for p, own in zip(self.params, self.scales, strict=True) if own == scale])
            for scale in sorted(set(self.scales))
        ]
        self.alike = len({(p.device, p.dtype, torch.is_complex(p)) for p in self.params}) == 1
        self.together = _foreach(group)
        self.one = torch.tensor(1.0)
        few = sum(p.numel() for p in self.params) <= SMALL
        launches = self.together and len(self.by_scale) > 1 and few and self.params[0].is_cuda
        self.ones = [torch.ones_like(p) for p in self.params] if launches else []
        """Factors of 1: with them one launch, and no other of torch, moves each parameter at a rate of its own."""

    def still(self, group: dict[str, Any], scales: Scales | None) -> bool:
        """Whether this is the group as it is now."""
        members: Sequence[Tensor] = group["params"]
        same = scales is self._constants or scales == self._constants
        return same and len(members) == len(self.params) and all(map(is_, members, self.params))


def _foreach(group: dict[str, Any]) -> bool:
    """Whether torch takes the parameters of a group together, as it does on a GPU."""
    if group["foreach"] is not None or group["fused"] is not None:
        return bool(group["foreach"])
    _, together = torchs._default_to_fused_or_foreach(group["params"], group["differentiable"], use_fused=False)
    return bool(together)


UNSCALED = nullcontext()


def balanced(optimizer: Optimizer, scales: Scales | None) -> AbstractContextManager[None]:
    """Inside, the optimizer moves W = a V as it would move V by gradients with respect to V: V -= lr * u is
    W -= (a lr) * u, and the decay of V, lr * weight_decay * V or weight_decay * V in its gradient, is one of
    weight_decay / a at the rate a lr. `scales` are the constants by the id of the parameter.

    The optimizer's own groups, which schedulers and checkpoints know, are outside as they were.
    """
    return UNSCALED if scales is None else _balanced(optimizer, scales)


@contextmanager
def _balanced(optimizer: Optimizer, scales: Scales) -> Iterator[None]:
    kept = optimizer.param_groups
    # AdamBC takes the noise of all coordinates in their order; elsewhere fewer groups are fewer kernels.
    in_order = hasattr(optimizer, "hear")
    optimizer.param_groups = [part for group in kept for part in _parts(group, scales, in_order)]
    try:
        yield
    finally:
        optimizer.param_groups = kept


def _parts(group: dict[str, Any], scales: Scales, in_order: bool) -> Iterator[dict[str, object]]:
    """A group divided by the constants of its parameters."""

    def scale_of(parameter: Tensor) -> float:
        return scales.get(id(parameter), 1.0)

    members = group["params"] if in_order else sorted(group["params"], key=scale_of)
    for scale, same in groupby(members, scale_of):
        decay = {"weight_decay": group["weight_decay"] / scale} if "weight_decay" in group else {}
        yield {**group, "params": list(same), "lr": group["lr"] * scale, **decay}
