"""How does a group norm run where one kernel gives the gradients of its input, weight and bias? As an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.engines.per_example import kernels
from vestige.fused.operators import LIBRARY, operator


def group_norm(input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Numbers in half precision are read as they are under autocast, where torch would copy them to float32 first."""
    full = torch.is_autocast_enabled(input.device.type)
    gain = input.new_ones(input.shape[1], dtype=torch.float32) if weight is None else weight
    found: Tensor = torch.ops.vestige.fused_group_norm(input, gain, bias, groups, eps, full)[0]
    return found


@operator(
    "fused_group_norm(Tensor input, Tensor weight, Tensor? bias, int groups, float eps, bool full) "
    "-> (Tensor, Tensor, Tensor)"
)
def _forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, groups: int, eps: float, full: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.group_norm(input, weight, bias, groups, eps, torch.float32 if full else input.dtype)


@operator(
    "fused_group_norm_backward(Tensor signal, Tensor input, Tensor mean, Tensor scale, Tensor weight, int groups, "
    "bool[] output_mask) -> (Tensor, Tensor, Tensor)"
)
def _backward(
    signal: Tensor,
    input: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    back, weights, biases = kernels.group_norm_backward(input, signal, mean, scale, weight, groups)
    return back.to(input.dtype), weights.sum(dim=0), biases.sum(dim=0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output[1:], inputs[1])
    ctx.groups = inputs[3]


def _back(ctx: Any, signal: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    made = torch.ops.vestige.fused_group_norm_backward(signal, *ctx.saved_tensors, ctx.groups, wanted)
    return (*(each if asked else None for each, asked in zip(made, wanted, strict=True)), None, None, None)


torch.library.register_autograd("vestige::fused_group_norm", _back, setup_context=_save, lib=LIBRARY)
