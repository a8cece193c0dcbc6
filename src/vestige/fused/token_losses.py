"""How is the cross entropy of many tokens computed without storing their probabilities? By fused kernels on a GPU.

torch's cross entropy saves the log-probabilities and allocates two more tensors of that size in the backward pass; for
a language model these are most of a step's memory. Here two numbers are saved per token, its largest logit and the
log-sum-exp relative to it, and the gradient is written once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.fused.operators import LIBRARY, operator
from vestige.tf32 import triton_available

WIDE = 1024
"""Classes from which on the probabilities are worth leaving out."""


def fuses(scores: Tensor) -> bool:
    """Whether the kernels take such scores, [tokens, classes]."""
    wide = scores.is_cuda and scores.shape[1] >= WIDE and scores.dtype != torch.float64
    return wide and triton_available() and not torch._C._are_functorch_transforms_active()


def token_losses(scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross entropy of each token in float32, [tokens], of its scores, [tokens, classes]; 0 for what is ignored."""
    found: Tensor = torch.ops.vestige.token_losses(scores.contiguous(), targets, ignored)[0]
    return found


@operator("token_losses(Tensor scores, Tensor targets, int ignored) -> (Tensor, Tensor, Tensor, Tensor)")
def _forward(scores: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from vestige.fused import triton_tokens

    counts, targets = targets != ignored, targets.long()
    most, rest = triton_tokens.log_totals(scores)
    own = scores.gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)  # stops at what is no class
    losses = torch.where(counts, (most - own.float()) + rest, 0.0)
    return losses, torch.where(counts, targets, -1), most, rest


@operator("token_losses_backward(Tensor signal, Tensor scores, Tensor targets, Tensor most, Tensor rest) -> Tensor")
def _backward(signal: Tensor, scores: Tensor, targets: Tensor, most: Tensor, rest: Tensor) -> Tensor:
    from vestige.fused import triton_tokens

    return triton_tokens.gradients(scores, targets, most, rest, signal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])


def _back(ctx: Any, signal: Tensor, *_: object) -> tuple[Tensor, None, None]:
    if not torch.is_grad_enabled():
        return torch.ops.vestige.token_losses_backward(signal, *ctx.saved_tensors), None, None
    scores, targets = ctx.saved_tensors[:2]  # a gradient that is differentiated again
    shares = scores.float().softmax(dim=1) - F.one_hot(targets.clamp(min=0), scores.shape[1])
    return (shares * (signal * (targets >= 0))[:, None]).to(scores.dtype), None, None


torch.library.register_autograd("vestige::token_losses", _back, setup_context=_save, lib=LIBRARY)
