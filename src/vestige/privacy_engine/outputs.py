"""What does the user make of the outputs? A loss whose divisor no example decides: recognised, mended, or assumed.

A private step takes each example's gradient from what comes back to its row of the outputs. That is the gradient of its
own loss only if the loss of the batch is a sum or mean of the examples' losses. torch's own losses are recognised by
their graph, before the backward pass runs. Of a weighted mean, or one that ignores some targets, the divisor is the sum
of everyone's weights: it is replaced by a public one. Of any other scalar it is taken for granted that each row has a
say in its own loss only, and that assumption is part of the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from vestige.engines.per_example.expressions import Tap
from vestige.privacy_engine.undivided import MEAN, NLL, by_row, ignored_by, undivided

POINTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
        "SoftMarginLoss", "KlDiv",
    )
)  # fmt: skip
"""Losses whose mean is over all numbers, whatever they are."""
LOSSES = POINTWISE | NLL.keys()
SCALARS = LOSSES | {"MeanBackward0", "SumBackward0"}
KEEPING = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Sigmoid", "ToCopy")
) | {"SqueezeBackward1", "CloneBackward0"}
"""Operations that leave examples side by side, if they leave them on the first axis."""
OF_ROWS = "vestige: the mean of losses of rows"
LEAF = "torch::autograd::AccumulateGrad"
FARTHEST = 500
"""Nodes of a graph that are looked at."""


@dataclass(frozen=True)
class Reduction:
    """How a loss of a batch was made of its examples' losses.

    What comes back to a row of the outputs, times `factor`, is the gradient of its own loss; `factor` None is that of
    what the user says. `kind` is "mean" or "sum", where that was recognised. Where it is `undivided`, that gradient is
    what comes back.
    """

    divisor: Tensor | None = None
    """The sum of everyone's weights, where the loss was divided by that."""
    kind: str | None = None
    public: Tensor | float | None = None
    """What the sum of everyone's weights is replaced by, for one row or for each."""
    undivided: bool = False
    averaged: int | None = None
    """Over how many numbers of a row it is a mean, where that is a number for all rows."""
    seen: bool = False
    """Whether it was seen that a row of the outputs has a say in its own loss only."""

    @property
    def factor(self) -> Tensor | None:
        return None if self.divisor is None else self.divisor / self.public  # type: ignore[operator]


UNKNOWN = Reduction()


class End(torch.autograd.Function):
    """The outputs of a private model as the user gets them: in float32, with rows that lead back to their examples.

    What comes back to a row is brought to the scale of its own loss before the model's backward pass: one over the
    number of rows, rounded further on, would move everyone's gradient when one example joins. Mostly that was done at
    the reduction (`undivided`); here it is done where somebody else waits for what comes back too.
    """

    @staticmethod
    def forward(
        ctx: Any, reached: Callable[[Reduction], Any], anchor: Tensor, rows: int, said: str, *outputs: Tensor
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
        goes_on = ctx.reached(reduction)
        factor = 1 if reduction.undivided else reduction.factor
        if factor is None:
            factor = ctx.rows if ctx.said == "mean" else 1
        whole = signals if type(factor) is int and factor == 1 else [by_row(signal, factor) for signal in signals]
        back = [signal.to(dtype) for signal, dtype in zip(whole, ctx.types, strict=True)]
        if goes_on is None:
            return (None, None, None, None, *back)
        goes_on(back)
        return (None, None, None, None, *[None] * len(back))


class Rowless(torch.autograd.Function):
    """An output of a private model that is not its examples', row by row: it can be looked at, but not trained on."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor) -> Any:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        raise ValueError(
            "the loss uses an output of the model that has no row for each example, such as a loss of the whole batch "
            "that the model computed itself and that is none of the usual: compute the loss from the outputs that have "
            "(the logits, say). The usual ones are known where labels are given by name and outputs come by name"
        )


def watch_backward_passes() -> None:
    """See every backward pass before it runs: afterwards the graph has let go of what it saved.

    Those through private models run in the thread that asks for them: of a small model's step, to wake torch's own
    thread for a GPU and to be woken by it is a third, and a recorded pass leaves it next to nothing to do.
    """
    original = getattr(torch.autograd, "_engine_run_backward", None)
    if original is None or getattr(original, "marks", False):
        return

    def run(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        starts = [each.grad_fn for each in t_outputs if isinstance(each, Tensor) and each.grad_fn is not None]
        asked = len(args) != 4 or bool(args[2]) or len(args[3]) > 0  # for gradients of gradients, or of something else
        handles: list[Any] = []
        private = False
        try:
            for start in starts:
                found = mark(start, alone=len(starts) == 1 and not asked)
                private, handles = private or found is not None, handles + (found or [])
            with torch.autograd.set_multithreading_enabled(False) if private else nullcontext():
                return original(t_outputs, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    run.marks = True  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def mark(top: Any, alone: bool = False) -> list[Any] | None:
    """Leave at the ends of private models that a loss leads to how the loss was reduced; None if it leads to none.

    If the backward pass is `alone` and leads nowhere else, the reductions are made not to divide, until the handles
    that are returned are removed.
    """
    if (usual := _of_classes(top)) is not None:
        usual.reduction = Reduction(top._saved_total_weight, "mean", 1.0, alone, None, True)
        return [undivided(top, usual.rows, 1.0)] if alone else []
    below = Walks()
    ends: dict[Any, list[Any]] = {end: [] for end in below[top][0]}
    if not ends:
        return None
    top = _itself(top)
    nodes = _reductions(top)
    for node in nodes:
        for end in below[node][0]:
            ends.setdefault(end, []).append(node)
    first = next(iter(ends))
    same = all(own == nodes and (end.rows, end.said) == (first.rows, "mean") for end, own in ends.items())
    whole = alone and same and _ends_here(top, nodes, below)
    for end, own in ends.items():
        averaged = next((share for share in (_averaged(node, end.rows) for node in own) if share is not None), None)
        found, seen = _reduction(top, own, end.rows, below), _seen(top, end.rows, below)
        end.reduction = Reduction(found.divisor, found.kind, found.public, whole, averaged, seen)
    return [undivided(node, first.rows, first.reduction.public) for node in nodes] if whole else []


def _of_classes(top: Any) -> Any | None:
    """The end that a mean cross entropy of classes leads to, one for each row and all of one weight. Most losses are
    that, and of it the walks below would find out nothing else."""
    if top.name() != "NllLossBackward0" or top._saved_reduction != MEAN or top._saved_weight is not None:
        return None
    between = top.next_functions[0][0]
    if between is None or between.name() != "LogSoftmaxBackward0":
        return None
    end: Any = between.next_functions[0][0]
    ours = type(end) is End._backward_cls  # type: ignore[attr-defined]
    if not ours or end.said != "mean" or top._saved_target.numel() != end.rows:
        return None
    return end if _keeps_rows(between, end.rows) else None


def _itself(top: Any) -> Any:
    """The loss before it was divided by one, as trainers do that could add up the gradients of several batches."""
    if top.name() not in ("DivBackward0", "MulBackward0") or top.next_functions[1][0] is not None:
        return top
    by = top._saved_other
    number = by is not None and by.dim() == 0 and by.device.type == "cpu" and by.dtype in (torch.int64, torch.float64)
    return _itself(top.next_functions[0][0]) if number and by == 1 else top


def _ends_here(top: Any, nodes: list[Any], below: Walks) -> bool:
    """Whether a backward pass leads to private models only, and through one reduction on each way."""
    passed = below[top][1]
    later = {each for node in nodes for each in below[node][1] if each is not node}
    return len(passed) < FARTHEST and not any(each.name() == LEAF for each in passed) and later.isdisjoint(nodes)


def _reduction(top: Any, nodes: list[Any], rows: int, below: Walks) -> Reduction:
    if not nodes:
        return UNKNOWN
    means = [node for node in nodes if node.name() in NLL and node._saved_reduction == MEAN]
    if nodes == [top]:
        return _of_node(top, rows, below)
    if nodes == means and len(means) == 1:
        return _of_likelihood(means[0], rows, None, below)
    if any(node._saved_weight is not None for node in means):
        raise ValueError(
            "the loss is made of a weighted mean and of more: the sum of the weights, which is everyone's, cannot be "
            "told from the rest. Take the losses by `criterion = privacy_engine.criterion(loss)`, which divides by a "
            "public number"
        )
    return UNKNOWN


def _averaged(node: Any, rows: int) -> int | None:
    """How many numbers of a row a mean is over, if it is one that does not look at them."""
    if OF_ROWS in node.metadata:
        return node.metadata[OF_ROWS]  # type: ignore[no-any-return]
    if node.name() == "MeanBackward0":
        return int(node._saved_self_sym_numel) // rows
    if node.name() in POINTWISE and node._saved_reduction == MEAN:
        return int(node._saved_self.numel()) // rows
    return None


def _of_node(node: Any, rows: int, below: Walks) -> Reduction:
    """Where the loss is nothing but one of torch's reductions."""
    name = node.name()
    if name in ("MeanBackward0", "SumBackward0"):
        return Reduction(None, "mean" if name == "MeanBackward0" else "sum")
    if name not in LOSSES:
        return UNKNOWN
    kind = "mean" if node._saved_reduction == MEAN else "sum"
    return _of_likelihood(node, rows, kind, below) if name in NLL and kind == "mean" else Reduction(None, kind)


def _of_likelihood(node: Any, rows: int, kind: str | None, below: Walks) -> Reduction:
    """What was divided by, the sum of the weights of the targets that count, over what a row is divided by instead: as
    many as it has itself, times the mean weight of a class.

    Where the rows cannot be followed to the targets, that is as many targets as each row has, counted or not.
    """
    weight, target = node._saved_weight, node._saved_target
    if weight is None and target.numel() == rows:  # a row has one target, and where that is ignored, nothing comes back
        return Reduction(node._saved_total_weight, kind, 1.0)
    between = [each for each in below[node][1] if each is not node and type(each) is not End._backward_cls]  # type: ignore[attr-defined]
    if all(_keeps_rows(each, rows) for each in between):
        public = (target != ignored_by(node)).reshape(rows, -1).sum(dim=1).clamp(min=1).to(node._saved_self.dtype)
    else:
        public = target.numel() / rows
    public = public if weight is None else public * weight.mean()
    return Reduction(node._saved_total_weight, kind, public)


def of_rows(criterion: Callable[..., Tensor], counts: bool = True) -> Callable[..., Tensor]:
    """A criterion that takes the mean of losses of single rows, each by a function of torch's: nothing need be assumed
    of it, where it is given the outputs themselves. One that `counts` is a mean over the targets that count, others are
    over all numbers of a row."""

    def taken(outputs: Any, targets: Tensor) -> Tensor:
        value = criterion(outputs, targets)
        if value.grad_fn is not None and _themselves(outputs):
            value.grad_fn.metadata[OF_ROWS] = None if counts else _numbers(outputs)  # type: ignore[index]
        return value

    return taken


def by_rows(losses: Tensor, averaged: int | None) -> Tensor:
    """The mean of losses that were taken of single rows, each a mean over so many numbers, if that is one for all."""
    value = losses.mean()
    if value.grad_fn is not None:
        value.grad_fn.metadata[OF_ROWS] = averaged  # type: ignore[index]
    return value


def _numbers(outputs: Any) -> int:
    """How many numbers a row of the outputs has."""
    return sum(leaf[0].numel() for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and len(leaf))


def _themselves(outputs: Any) -> bool:
    """Whether these are outputs of private models, row by row, and nothing was made of several rows before."""
    for leaf in tree_flatten(outputs)[0]:
        if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
            continue
        ends, passed = _below(leaf.grad_fn)
        between = [node for node in passed if type(node) is not End._backward_cls]  # type: ignore[attr-defined]
        if len(ends) != 1 or leaf._backward_hooks or not all(_keeps_rows(node, ends[0].rows) for node in between):
            return False
    return True


def _seen(top: Any, rows: int, below: Walks) -> bool:
    """Whether a loss is one of torch's reductions of the rows, or of torch's losses of them, and of nothing else."""
    between = [node for node in below[top][1] if node is not top and type(node) is not End._backward_cls]  # type: ignore[attr-defined]
    known = top.name() in SCALARS and all(node.name() in LOSSES or _keeps_rows(node, rows) for node in between)
    return known or OF_ROWS in top.metadata


def _keeps_rows(node: Any, rows: int) -> bool:
    """Whether each row of the outputs stays by itself."""
    name, shape = node.name(), node._input_metadata[0].shape
    first = (0, 2**64 - len(shape))  # the first axis, also counted from the last; torch tells it without its sign
    if name == "LogSoftmaxBackward0":
        return node._saved_dim % 2**64 not in first and shape[0] % rows == 0
    if name == "TransposeBackward0":
        return not any(dim % 2**64 in first for dim in (node._saved_dim0, node._saved_dim1))
    if name == "PermuteBackward0":
        return bool(node._saved_dims[0] == 0)
    if name == "SliceBackward0":
        return node._saved_dim % 2**64 not in first
    return name in KEEPING and len(shape) > 0 and shape[0] % rows == 0


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


class Walks(dict[Any, tuple[list[Any], list[Any]]]):
    """What lies below each node of a graph that was asked for, looked up once."""

    def __missing__(self, start: Any) -> tuple[list[Any], list[Any]]:
        found = self[start] = _below(start)
        return found


def _below(start: Any) -> tuple[list[Any], list[Any]]:
    """The ends of private models that a backward pass from this node reaches, and all nodes on the way.

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
    return found, queue
