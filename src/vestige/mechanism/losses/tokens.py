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
from torch.autograd.function import once_differentiable

from vestige.mechanism.losses.criteria import likelihood
from vestige.tf32 import triton_available

WIDE = 1024
"""Classes from which on the probabilities are worth leaving out."""


def token_losses(scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross entropy of each token, [tokens], of its scores, [tokens, classes]; 0 for what is ignored."""
    wide = scores.is_cuda and scores.shape[1] >= WIDE and scores.dtype != torch.float64
    if wide and triton_available() and not torch._C._are_functorch_transforms_active():
        return TokenLosses.apply(scores.contiguous(), targets, ignored)  # type: ignore[no-any-return]
    return likelihood(F.cross_entropy, scores.float(), targets, ignore_index=ignored)


class TokenLosses(torch.autograd.Function):
    """`F.cross_entropy`, which keeps of a token's probabilities two numbers."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
        from vestige.mechanism.losses import triton_tokens

        counts, targets = targets != ignored, targets.long()
        most, rest = triton_tokens.log_totals(scores)
        own = scores.gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)  # stops at what is no class
        ctx.save_for_backward(scores, torch.where(counts, targets, -1), most, rest)
        return torch.where(counts, (most - own.float()) + rest, 0.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, signal: Tensor) -> object:
        from vestige.mechanism.losses import triton_tokens

        scores, targets, most, rest = ctx.saved_tensors
        return triton_tokens.gradients(scores, targets, most, rest, signal), None, None
