"""Where do a private model and the user's loss meet? At the model's outputs, whose rows lead back to their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Back = Callable[[Sequence[Tensor]], None]
Factor = int | Tensor
Relabel = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Reached = Callable[[Sequence[Tensor]], Back | None]


class End(torch.autograd.Function):
    """The outputs of a private model as the user gets them: in float32, with rows that lead back to their examples.

    What comes back to a row is multiplied by the number of rows where the loss is a mean: that is the gradient of the
    row's own loss. Where a user is an example, it is divided by the number of the user's rows, too: `factors` has a
    number for each output, or a tensor of its rows. `reached` checks what came back, and says what goes on with it if
    that is not this graph; `relabel` says whose rows those are.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, reached: Reached, relabel: Relabel, anchor: Tensor, factors: Sequence[Factor], *outputs: Tensor
    ) -> Any:
        ctx.reached, ctx.relabel, ctx.factors = reached, relabel, factors
        ctx.types = [output.dtype for output in outputs]
        return tuple((each if each.is_complex() else each.float()).detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        goes_on = ctx.reached(signals)
        back = []
        for signal, factor, dtype in zip(signals, ctx.factors, ctx.types, strict=True):
            whole = signal if isinstance(factor, int) and factor == 1 else signal * factor
            back.append(whole.to(dtype))
        back = ctx.relabel(back)
        if goes_on is None:
            return (None, None, None, None, *back)
        goes_on(back)
        return (None, None, None, None, *[None] * len(back))


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
