"""How does a matrix move in all its directions alike? Along its orthogonalised momentum: Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vestige.checks import require

NEWTON_SCHULZ = (15 / 8, -10 / 8, 3 / 8)
"""The first terms of 1 / sqrt(x) around x = 1: an iteration Y <- (a + b YY' + c (YY')^2) Y that leads every singular
value in (0, 1] to 1, the small ones growing by 15/8 each time."""


class HybridMuon(Optimizer):
    """Muon for weights of two or more dimensions, Adam or plain momentum for the rest.

    A weight, with its further dimensions flattened to a matrix, moves along the orthogonalised momentum
    m <- momentum m + gradient, times sqrt(larger side): about `lr` per coordinate, as Adam moves the others. Without
    iterations it moves along the momentum itself.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        iterations: int = 5,
        rest: Literal["adam", "sgd"] = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        require("momentum", momentum, 0 <= momentum < 1, "lie in [0, 1)")
        require("iterations", iterations, isinstance(iterations, int) and iterations >= 0, "be a whole number from 0")
        require("rest", rest, rest in ("adam", "sgd"), "be adam or sgd")
        options = {"momentum": momentum, "iterations": iterations, "rest": rest, "betas": betas, "eps": eps}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 2 and group["rest"] == "adam":
                    _adam(p, group, self.state[p])
                    continue
                direction = _with_momentum(p, group["momentum"], self.state[p])
                if p.dim() >= 2 and group["iterations"]:
                    direction = orthogonalised(direction.flatten(1), group["iterations"]).view_as(p)
                p.add_(direction, alpha=-group["lr"])
        return loss


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """The matrix with its singular values led to 1 by Newton-Schulz, times the root of its larger side."""
    rows, columns = matrix.shape
    wide = matrix if rows <= columns else matrix.T
    y = wide / torch.linalg.matrix_norm(wide).clamp(min=1e-30)
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return (y if rows <= columns else y.T) * max(rows, columns) ** 0.5


def _with_momentum(p: Tensor, momentum: float, state: dict[str, Any]) -> Tensor:
    assert p.grad is not None
    if not momentum:
        return p.grad
    if not state:
        state["momentum"] = torch.zeros_like(p)
    state["momentum"].mul_(momentum).add_(p.grad)
    return state["momentum"]  # type: ignore[no-any-return]


def _adam(p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
    if not state:
        state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    assert p.grad is not None
    beta1, beta2 = group["betas"]
    state["step"] += 1
    count = float(state["step"])
    state["exp_avg"].lerp_(p.grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
    scale = (state["exp_avg_sq"].sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
    p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**count))
