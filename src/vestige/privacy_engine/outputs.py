"""What does the user make of the outputs? A loss whose divisor no example decides: recognised, mended, or assumed.

A private step takes each example's gradient from what comes back to its row of the outputs. That is the gradient of its
own loss only if the loss of the batch is a sum or mean of the examples' losses. torch's own losses are recognised by
their graph, before the backward pass runs. Of a weighted mean, or one that ignores some targets, the divisor is the sum
of everyone's weights: it is replaced by a public one. Any other scalar is taken for what the user says it is, and that
assumption is part of the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vestige.engines.per_example.expressions import Tap

MEAN, SUM = 1, 2
POINTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
        "SoftMarginLoss", "KlDiv",
    )
)  # fmt: skip
"""Losses whose mean is over all numbers, whatever they are."""
NLL = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
FARTHEST = 500
"""Nodes of a graph that are looked at."""


@dataclass(frozen=True)
class Reduction:
    """How a loss of a batch was made of its examples' losses.

    What comes back to a row of the outputs, times `factor`, is the gradient of its own loss; `factor` None is that of
    what the user says. `kind` is "mean" or "sum", where that was recognised.
    """

    factor: Tensor | None = None
    kind: str | None = None


UNKNOWN = Reduction()


class End(torch.autograd.Function):
    """The outputs of a private model as the user gets them: in float32, with rows that lead back to their examples.

    What comes back to a row is brought to the scale of its own loss here, in float32 and before the model's backward
    pass: one over the number of rows, rounded into a shorter type further on, would move everyone's gradient when one
    example joins.
    """

    @staticmethod
    def forward(
        ctx: Any, reached: Callable[[Reduction], None], anchor: Tensor, rows: int, said: str, *outputs: Tensor
    ) -> Any:
        ctx.reached, ctx.rows, ctx.said = reached, rows, said
        ctx.types = [output.dtype for output in outputs]
        return tuple(output.detach().float() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        reduction: Reduction = getattr(ctx, "reduction", UNKNOWN)
        if reduction.kind not in (None, ctx.said):
            raise ValueError(
                f"loss_reduction={ctx.said!r}, but the loss is a {reduction.kind} over the batch: "
                f"say loss_reduction={reduction.kind!r}"
            )
        ctx.reached(reduction)
        said = ctx.rows if ctx.said == "mean" else 1
        factor = said if reduction.factor is None else reduction.factor
        back = [(signal * factor).to(dtype) for signal, dtype in zip(signals, ctx.types, strict=True)]
        return (None, None, None, None, *back)


def watch_backward_passes() -> None:
    """See every backward pass before it runs: afterwards the graph has let go of what it saved."""
    original = getattr(torch.autograd, "_engine_run_backward", None)
    if original is None or getattr(original, "marks", False):
        return

    def run(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in t_outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                mark(output.grad_fn)
        return original(t_outputs, *args, **kwargs)

    run.marks = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def mark(top: Any) -> None:
    """Leave at the ends of private models that a loss leads to how the loss was reduced."""
    ends: dict[Any, list[Any]] = {end: [] for end in _ends(top)}
    if not ends:
        return
    for node in _reductions(top):
        for end in _ends(node):
            ends.setdefault(end, []).append(node)
    for end, nodes in ends.items():
        end.reduction = _reduction(top, nodes, end.rows)


def _reduction(top: Any, nodes: list[Any], rows: int) -> Reduction:
    if not nodes:
        return UNKNOWN
    means = [node for node in nodes if node.name() in NLL and node._saved_reduction == MEAN]
    if nodes == [top]:
        return _of_node(top, rows)
    if nodes == means and len(means) == 1:
        return Reduction(_divisor(means[0], rows))
    if any(node._saved_weight is not None for node in means):
        raise ValueError(
            "the loss is made of a weighted mean and of more: the sum of the weights, which is everyone's, cannot be "
            "told from the rest. Take the losses by `criterion = privacy_engine.criterion(loss)`, which divides by a "
            "public number"
        )
    return UNKNOWN


def _of_node(node: Any, rows: int) -> Reduction:
    """Where the loss is nothing but one of torch's reductions."""
    name = node.name()
    if name in ("MeanBackward0", "SumBackward0"):
        return Reduction(None, "mean" if name == "MeanBackward0" else "sum")
    if name not in NLL | POINTWISE:
        return UNKNOWN
    kind = "mean" if node._saved_reduction == MEAN else "sum"
    return Reduction(_divisor(node, rows) if name in NLL and kind == "mean" else None, kind)


def _divisor(node: Any, rows: int) -> Tensor:
    """What was divided by, the sum of the weights of the targets that count, over what is public: the mean weight of a
    class, times as many targets as a row has."""
    weight, targets = node._saved_weight, node._saved_target.numel()
    public = targets / rows if weight is None else targets / rows * weight.mean()
    return node._saved_total_weight / public  # type: ignore[no-any-return]


def _reductions(top: Any) -> list[Any]:
    """The nodes that make a number of many, nearest to the loss."""
    found, seen, queue = [], {top}, [top]
    for node in queue:
        after = [each for each, _ in node.next_functions if each is not None]
        scalars = [each for each in after if all(len(one.shape) == 0 for one in each._input_metadata)]
        if len(scalars) < len(after):
            found.append(node)
        fresh = [each for each in scalars if each not in seen]
        seen.update(fresh)
        queue += fresh if len(queue) < FARTHEST else []
    return found


def _ends(start: Any) -> list[Any]:
    """The ends of private models that a backward pass from this node reaches.

    One that enters a private model elsewhere, by something that a hook caught inside, is refused.
    """
    found, seen, queue = [], {start}, [start]
    for node in queue:
        if type(node) is End._backward_cls:  # type: ignore[attr-defined]
            found.append(node)
            continue
        if type(node) is Tap._backward_cls and not node.record.inside:  # type: ignore[attr-defined]
            raise ValueError(
                "the loss uses something from inside the private model that is not one of its outputs: return it from "
                "the model's forward, with a row for each example"
            )
        fresh = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(fresh)
        queue += fresh if len(queue) < FARTHEST else []
    return found
