"""Where do a private model and the user's loss meet? At the model's outputs, whose rows lead back to their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Signals = Sequence[Tensor | None]
"""What comes back to outputs: None to those that the loss does not use."""
Reached = Callable[[Signals], Signals]


class End(torch.autograd.Function):
    """The outputs of a private model as the user gets them: in float32. `reached` checks the gradients of the
    outputs, and gives those that are passed on to the model."""

    @staticmethod
    def forward(ctx: Any, reached: Reached, anchor: Tensor, *outputs: Tensor) -> Any:  # type: ignore[override]
        ctx.reached = reached
        ctx.set_materialize_grads(False)  # of logits beside a loss, say, zeros would be large
        return tuple((each if each.is_complex() else each.float()).detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor | None) -> Any:
        return None, None, *ctx.reached(signals)


class NotPerExample(torch.autograd.Function):
    """An output of a private model that is not its examples', row by row: it can be looked at, but not trained on."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, why: str) -> Any:
        ctx.why = why
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        raise ValueError(
            f"the loss uses an output of the model that has no row for each example ({ctx.why}): compute the loss from "
            "outputs that have, such as the logits"
        )
