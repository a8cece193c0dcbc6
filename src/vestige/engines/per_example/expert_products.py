"""How are the positions of a batch multiplied by the weights of the expert that each was sent to? One operator, and one
for its backward pass: inside, rows of all examples are sorted by their experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.fused.operators import LIBRARY, operator


def routed(input: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """weight[index[row]] @ input[row] for every row, with weight [experts, out, in]: a mixture of experts' product."""
    return torch.ops.vestige.routed(input, weight, index)  # type: ignore[no-any-return]


@operator("routed(Tensor input, Tensor weight, Tensor index) -> Tensor")
def _product(input: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    order, counts = index.argsort(), index.bincount(minlength=len(weight)).tolist()
    rows = input[order].split(counts)
    sorted_rows = torch.cat([F.linear(some, matrix) for some, matrix in zip(rows, weight, strict=True)])
    return sorted_rows[order.argsort()]


@operator("routed_weights(Tensor signal, Tensor input, Tensor index, int experts) -> Tensor")
def _of_weights(signal: Tensor, input: Tensor, index: Tensor, experts: int) -> Tensor:
    """The gradient of the weights."""
    order, counts = index.argsort(), index.bincount(minlength=experts).tolist()
    parts = zip(signal[order].split(counts), input[order].split(counts), strict=True)
    return torch.stack([left.t() @ right for left, right in parts])


@torch.library.register_fake("vestige::routed_weights", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(signal: Tensor, input: Tensor, index: Tensor, experts: int) -> Tensor:
    return signal.new_empty(experts, signal.shape[1], input.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, signal: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    input, weight, index = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (
        routed(signal, weight.mT, index) if wanted[0] else None,
        torch.ops.vestige.routed_weights(signal, input, index, len(weight)) if wanted[1] else None,
        None,
    )


torch.library.register_autograd("vestige::routed", _back, setup_context=_save, lib=LIBRARY)
