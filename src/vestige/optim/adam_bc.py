"""What does Adam divide by when it knows the noise? The second moment without the noise's share (DP-AdamBC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

AUTO_FLOOR = 0.1
"""The least second moment over the variance of the noise, where no number is given."""


class AdamBC(Optimizer):
    """Adam with the variance of the noise taken out of its second moment (Tang, Shpilevskiy & Lecuyer, AAAI 2024).

    theta -= lr * m / sqrt(max(v - Phi, floor)), with m, v and Phi averaged and bias-corrected alike. Phi is the
    variance of the noise in each coordinate of the gradient; `hear` is told it before every step, so that it follows
    schedules, clips and memories. There is no other constant in the denominator. `weight_decay` is decoupled. The
    floor is a number, or "auto": a tenth of Phi, which keeps the step's size independent of the scale of the noise.
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
        """The standard deviation of the noise in the gradient of this step: one number, or one per coordinate, flat; or
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
            state["noise"] = 0.0  # a number where the noise is, since load_state_dict would round a tensor to float32
        beta1, beta2 = group["betas"]
        state["step"] += 1
        count = float(state["step"])
        state["exp_avg"].lerp_(p.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        state["noise"] = beta2 * state["noise"] + (1 - beta2) * phi
        mean = state["exp_avg"] / (1 - beta1**count)
        # The bias correction comes first, so that what is taken out is the noise's share of an unbiased moment.
        noise = state["noise"] / (1 - beta2**count)
        noise = noise.to(p.dtype) if isinstance(noise, Tensor) else noise
        second = state["exp_avg_sq"] / (1 - beta2**count) - noise
        floor = AUTO_FLOOR * noise if group["floor"] == "auto" else group["floor"]
        if group["weight_decay"]:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(mean / second.clamp_(min=floor).sqrt_(), alpha=-group["lr"])
