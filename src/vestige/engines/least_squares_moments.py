"""What does least squares ask of each example? Its second moments, one vector of known norm, clipped and summed.

An example with the row x before a linear head, and with the class c of k, contributes

    v = (x x', x y') / sqrt(1 + |y|^2),    y = one-hot(c) - 1/k,    |y|^2 = 1 - 1/k,

whose norm is |x| sqrt(|x|^2 + |y|^2) / sqrt(1 + |y|^2): at most 1 for rows of norm at most 1. So nothing is computed
one example at a time, and the clipped sum is two products of matrices. Clipping scales both parts alike: a longer row
is an example of less weight, in a problem that is still one of least squares.

All of x x' is asked for, though it is symmetric. The mean of the noised matrix and its transpose has exactly the law of
an upper triangle whose entries off the diagonal were weighted by sqrt(2) and mirrored: the norm of x x' is the same,
and so is the variance of every entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.checks import RowsNotApart
from vestige.engines.example_axis.labels import Labels, NotApart, Tracker
from vestige.engines.example_axis.tracked_model import require_unwritten
from vestige.layout import Layout, Segment
from vestige.mechanism.clipping import Batch, Clip, Parameters, Transform, usable_norms, weights


def head_of(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """What makes the rows, and the linear head that is solved for: all that is trained of the model."""
    parts = list(model) if type(model) is nn.Sequential else [model]
    head = parts[-1] if parts else None
    if type(head) is not nn.Linear:
        raise ValueError(
            f"model: least squares solves for a linear head, and this is {type(model).__name__} without one; give "
            "nn.Linear(numbers, classes, bias=False), or nn.Sequential of frozen modules that ends in it"
        )
    if head.bias is not None:
        raise ValueError(
            "model: the linear head has a bias, which least squares does not solve for: take bias=False, and a "
            "constant among its inputs where an intercept is wanted"
        )
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise ValueError("model: a module has a forward hook, which least squares would pass by: remove it")
    rows = nn.Sequential(*parts[:-1])
    for name, parameter in rows.named_parameters():
        if parameter.requires_grad:
            raise ValueError(
                f"model: parameter {name!r} is before the linear head, and least squares trains the head alone: "
                "call requires_grad_(False) on it, or train by another method"
            )
    if not head.weight.requires_grad:
        raise ValueError("model: the weight of the linear head is frozen, and least squares solves for it")
    return rows, head


def layout_of(model: nn.Module) -> Layout:
    """The segments of the two parts of a sum of second moments."""
    _, head = head_of(model)
    rows, classes = head.in_features, head.out_features
    second = Segment("second_moments", 0, (rows, rows))
    return Layout((second, Segment("cross_moments", second.stop, (rows, classes))))


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_labels(blank: Sequence[Tensor]) -> None:
    """Refuse examples that are not an input and the number of a class, before anything is asked; `blank` has no row."""
    if len(blank) != 2:
        raise ValueError(f"data: least squares takes inputs and labels, and these examples have {len(blank)} fields")
    if blank[1].dim() != 1 or blank[1].dtype not in WHOLE:
        raise ValueError(
            f"data: least squares takes the number of a class for a label, not {blank[1].dtype} of shape "
            f"{list(blank[1].shape[1:])} an example; give whole numbers"
        )


class SecondMoments:
    """Sums of clipped second moments, as an engine sums clipped gradients.

    Formal guarantees: adding or removing one example moves the sum by at most the clip's bound in the 2-norm, to
    rounding in float64: that the modules before the head make each row of its own example is proved. A row that is
    not finite, and a label that is none of the classes, contribute exactly zero.
    """

    sums_in = torch.float64
    """All examples are in one sum, in one order: in float32 its rounding would add up."""

    def __init__(self, model: nn.Module) -> None:
        self._rows, self._head = head_of(model)
        self._labels, self._batches = Labels(), 0

    def _own_rows(self, inputs: Tensor) -> Tensor:
        """What the modules before the head make of each example. Raises ValueError where that is not proved."""
        tracker, inputs = Tracker(self._labels), inputs.clone()
        self._batches += 1
        tracker.label_rows(inputs, len(inputs), self._batches)
        try:
            with tracker:
                rows: Tensor = self._rows(inputs)
            tracker.require_rows(rows, len(inputs), self._batches)
        except NotApart as problem:
            raise RowsNotApart(f"the model before its head mixes examples: {problem}") from None
        require_unwritten(self._rows, self._labels, {})
        self._labels.prune()
        return rows

    @torch.no_grad()
    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        """Add the clipped vectors of a batch to `into`; their norms, as of `GradientEngine`. Products are in float64:
        the squares of a row all add up, and TF32 would round their sum by more than is charged."""
        assert transform is None, "planning refuses what transforms gradients"
        inputs, labels = batch
        width, classes = self._head.in_features, self._head.out_features
        if len(inputs) == 0:
            return into.new_zeros(0, 1, dtype=torch.float64)
        rows = self._own_rows(inputs).double()
        labels = labels.long()  # a narrower type would wrap the number of classes
        known = (labels >= 0) & (labels < classes)
        targets = functional.one_hot(torch.where(known, labels, 0), classes).double() - 1 / classes
        spread = 1 - 1 / classes
        lengths = rows.square().sum(dim=1)
        squares = torch.where(known, lengths * (lengths + spread) / (1 + spread), torch.inf)
        norms = usable_norms(squares[:, None])
        rows = torch.where(norms.isfinite(), rows, 0.0)
        weighted = rows * (weights(clip, norms) / sqrt(1 + spread))
        second = width * width
        into[:second].view(width, width).add_(weighted.t() @ rows)
        into[second:].view(width, classes).add_(weighted.t() @ targets)
        return norms
