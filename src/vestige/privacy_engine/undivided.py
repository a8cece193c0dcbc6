"""How does each example's own loss come back, though the user took the mean? Reductions are made not to divide.

A number divided by the size of the batch, and multiplied by it again, is rounded differently in a batch of another
size. Where a gradient is a small sum of large terms, that turns the gradients of everyone when one example joins. So
what comes back to a reduction goes on undivided: a mean as the sum that it is made of, times a number in which no
example has a say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.engines.per_example.expressions import full_precision

MEAN, SUM = 1, 2
NLL = {
    "NllLossBackward0": torch.ops.aten.nll_loss_backward,
    "NllLoss2DBackward0": torch.ops.aten.nll_loss2d_backward,
}
SUMS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "MseLossBackward0": (F.mse_loss, ()),
    "SmoothL1LossBackward0": (F.smooth_l1_loss, ("beta",)),
    "HuberLossBackward0": (F.huber_loss, ("delta",)),
    "SoftMarginLossBackward0": (F.soft_margin_loss, ()),
    "BinaryCrossEntropyBackward0": (F.binary_cross_entropy, ("weight",)),
    "BinaryCrossEntropyWithLogitsBackward0": (F.binary_cross_entropy_with_logits, ("weight", "pos_weight")),
}
"""Torch's losses that are a mean over all numbers, and their options."""
DIGITS = 2**16
"""To how many places a number is rounded that the user has divided by the size of the batch."""

Signals = Sequence[Tensor | None]


def undivided(node: Any, rows: int, public: Tensor | float | None) -> Any:
    """Let what comes back through a reduction be `rows` times as large; of a negative log likelihood whose divisor is
    everyone's, let it be divided by a public number instead. Returns the handle that ends it."""
    name = node.name()
    if name == "MeanBackward0":
        share = node._saved_self_sym_numel / rows
        return node.register_hook(lambda signals, back: (_times(back[0], 1 / share).expand_as(signals[0]),))
    if name in NLL and node._saved_reduction == MEAN:
        share = node._saved_total_weight / rows if public is None else public
        return node.register_hook(_likelihood(node, share))
    if name in SUMS and node._saved_reduction == MEAN:
        return node.register_hook(_summed(node, node._saved_self.numel() / rows))
    return node.register_prehook(lambda back: tuple(None if each is None else _whole(each, rows) for each in back))


def _times(back: Tensor, factor: Tensor | float) -> Tensor:
    return (back.double() * factor).to(back.dtype)


def _whole(back: Tensor, rows: int) -> Tensor:
    """What the user has divided by the number of rows, most likely, before it was divided: to fewer places, so that
    rounding leaves no trace."""
    digits, exponent = torch.frexp(back.double() * rows)
    return torch.ldexp((digits * DIGITS).round() / DIGITS, exponent).to(back.dtype)


def ignored_by(node: Any) -> int:
    """The target that a negative log likelihood leaves out; torch tells it without its sign."""
    return int((node._saved_ignore_index + 2**63) % 2**64 - 2**63)


def by_row(tensor: Tensor, factor: Tensor | float) -> Tensor:
    """Each row, or the rows of each example that lie side by side, times its own factor; or all times one."""
    if not isinstance(factor, Tensor) or factor.dim() == 0:
        return tensor * factor
    return (tensor.reshape(len(factor), -1) * factor[:, None]).view_as(tensor)


def _likelihood(node: Any, share: Tensor | float) -> Callable[[Signals, Signals], Signals]:
    of = node._saved_self, node._saved_target, node._saved_weight, SUM, ignored_by(node)
    total, backward = node._saved_total_weight, NLL[node.name()]
    each = 1 / share if isinstance(share, Tensor) and share.dim() > 0 else None
    whole = type(share) is float and share == 1

    def hook(signals: Signals, back: Signals) -> Signals:
        assert back[0] is not None
        if each is not None:
            found = backward(back[0], *of, total)  # nobody else's, and as large as a vocabulary times a batch
            found.view(len(each), -1).mul_(each[:, None])
            return (found,)
        into = back[0] if whole else _times(back[0], 1 / share)
        return (backward(into, *of, total),)

    return hook


def _summed(node: Any, share: float) -> Callable[[Signals, Signals], Signals]:
    function, options = SUMS[node.name()]
    named = {name: getattr(node, f"_saved_{name}") for name in options}
    saved = node._saved_self, node._saved_target

    def hook(signals: Signals, back: Signals) -> Signals:
        assert back[0] is not None
        with torch.enable_grad(), full_precision(back[0]):
            wanted = [
                part.detach().requires_grad_(each is not None) for part, each in zip(saved, signals, strict=False)
            ]
            total = function(*wanted, *saved[len(wanted) :], **named, reduction="sum")
            leaves = [part for part in wanted if part.requires_grad]
            found = iter(torch.autograd.grad(total, leaves, _times(back[0], 1 / share)))
        return tuple(next(found) if part.requires_grad else None for part in wanted)

    return hook
