"""How does Adam move with a tenth of its moments? From the largest entries of the last few gradients: MicroAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vestige.checks import require


class MicroAdam(Optimizer):
    """Adam whose moments are rebuilt at every step from a window of sparse gradients (Modoranu et al. 2024).

    a = gradient + error; the largest `density` of the entries of each parameter's a go into the window, the rest is the
    next error. Over the last `window` sparse gradients, each `age` steps old,

        m = (1 - beta1) sum beta1^age g,    v = (1 - beta2) sum beta2^age g^2

    are Adam's moments with the older gradients left out; bias correction and update are Adam's. The error is kept in
    float32: the paper's 4 bits save memory and change nothing else.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        density: float = 0.01,
        window: int = 10,
        eps: float = 1e-8,
    ) -> None:
        for number, beta in enumerate(betas, start=1):
            require(f"beta{number}", beta, 0 <= beta < 1, "lie in [0, 1)")
        require("density", density, 0 < density <= 1, "lie in (0, 1]: the share of a gradient that is kept")
        require("window", window, isinstance(window, int) and window >= 1, "be a whole number from 1 up")
        super().__init__(params, {"lr": lr, "betas": betas, "density": density, "window": window, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _keep(p, group, self.state[p])
                    _move(p, group, self.state[p])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch makes every state of a parameter its type, in which large whole numbers are not exact.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[p]["places"] = state_dict["state"][number]["places"].to(p.device)


def _keep(p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    """Put the largest entries of gradient and error into the window, and the others into the error."""
    assert p.grad is not None
    count = max(1, round(group["density"] * p.numel()))
    if not state:
        state["step"] = torch.zeros(())
        state["error"] = torch.zeros_like(p).flatten()
        state["values"] = torch.zeros(group["window"], count, device=p.device)
        state["places"] = torch.zeros(group["window"], count, dtype=torch.long, device=p.device)
    slot = int(state["step"]) % group["window"]
    state["step"] += 1
    whole = state["error"].add_(p.grad.flatten())
    places = whole.abs().topk(count, sorted=False).indices
    state["places"][slot] = places
    state["values"][slot] = whole[places]
    whole[places] = 0.0


def _move(p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    count, (beta1, beta2), window = int(state["step"]), group["betas"], group["window"]
    first, second = torch.zeros_like(state["error"]), torch.zeros_like(state["error"])
    for number in range(max(0, count - window), count):  # oldest first: the recursion of Adam, bit for bit
        dense = torch.zeros_like(first)
        dense[state["places"][number % window]] = state["values"][number % window]
        first.lerp_(dense, 1 - beta1)
        second.mul_(beta2).addcmul_(dense, dense, value=1 - beta2)
    scale = second.sqrt_().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    p.view(-1).addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**count))
