"""What is one example's loss? The batch loss of a batch of one, with a divisor that no example decides.

A weighted mean over a single target is the target's loss whatever its weight, and a mean over no target is NaN. So
torch's losses with class weights or ignored targets are taken apart: an example's loss is weighted by its class's
weight over the mean weight of a class, and ignored targets add nothing: of several targets it is the mean over those
that count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from vestige.fused.class_axis import classes_last
from vestige.vmap_fallback import quietly

BatchLoss = Callable[..., Tensor]
"""A loss of a batch: (outputs, targets) -> a number, or one for each example."""
Targets = Tensor | tuple[Tensor, ...]
"""What a loss is given beside the outputs: one tensor, or several, each an argument."""
MODULES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
}
NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")
"""How such models are called."""
CONSTANTS = (bool, int, float, str)
FIELDS = ("weight", "ignore_index", "reduction", "label_smoothing")


@dataclass(frozen=True)
class Form:
    """How the tensors of a batch reach the model and the loss: one argument each, and the last is the target; or by
    name, where the examples have names."""

    names: tuple[str, ...] | None = None
    target: str | None = None
    further: tuple[str, ...] = ()
    """What else the loss is given of an example, such as its weight; in a batch it lies before the target."""

    def split(self, batch: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Targets]:
        """Arguments and keyword arguments of the model, and the targets."""
        *inputs, target = batch
        targets: Targets = target
        if self.further:
            targets = (target, *inputs[-len(self.further) :])
            inputs = inputs[: -len(self.further)]
        if self.names is None:
            return tuple(inputs), {}, targets
        return (), dict(zip(self.names, inputs, strict=True)), targets


BY_PLACE = Form()


class NotByExample(Tensor):
    """Stands, in what a loss is given, for an output that has no row for each example: it may be passed on, and whoever
    looks at it or computes with it gets the error."""

    problem: Exception

    @classmethod
    def of(cls, problem: Exception) -> NotByExample:
        with torch._C.DisableTorchFunction():
            found: NotByExample = Tensor._make_subclass(cls, torch.empty(0))
        found.problem = problem
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).problem


def has_rows(output: object) -> bool:
    """Whether an output is a tensor with a row for each example."""
    return isinstance(output, Tensor) and not isinstance(output, NotByExample)


def example_losses(loss: BatchLoss, outputs: Any, targets: Targets) -> Tensor:
    """The loss of each example, [examples]; outputs and targets have the examples on their first axis.

    Where a model returns its logits beside other things, torch's own losses are given the logits.
    """
    if isinstance(targets, tuple):
        return _taken_apart(loss, outputs, targets)
    outputs, known = scored(loss, outputs, targets), _known(loss)
    if known is not None and isinstance(outputs, Tensor) and outputs.dim() >= 2:
        return _by_class(*known, outputs, targets)
    return _taken_apart(loss, outputs, (targets,))


def scored(loss: BatchLoss, outputs: Any, targets: Tensor) -> Any:
    """What a loss is given of a model's outputs: the logits, where it is one of torch's and they are not tensors."""
    if isinstance(outputs, Tensor) or not of_torch(loss) or not isinstance(getattr(outputs, "logits", None), Tensor):
        return outputs
    logits: Tensor = outputs.logits
    classes_last = logits.dim() > 2 and logits.shape[:-1] == targets.shape
    return logits.movedim(-1, 1) if classes_last else logits  # torch's losses have the classes second


def _taken_apart(loss: BatchLoss, outputs: object, targets: tuple[Tensor, ...]) -> Tensor:
    """The loss of every batch of one example."""
    if len(targets[0]) == 1:
        return loss(outputs, *targets).sum()[None]
    leaves, shape = tree_flatten(outputs)
    if len(leaves) == 1 and leaves[0] is outputs and hasattr(outputs, "__dict__") and not isinstance(outputs, Tensor):

        def opened(fields: dict[str, Any], *targets: Tensor) -> Tensor:
            made = copy.copy(outputs)
            vars(made).update(fields)
            return loss(made, *targets)

        return _taken_apart(opened, dict(vars(outputs)), targets)
    if not any(map(has_rows, leaves)):
        raise ValueError(
            f"the model returns a {type(outputs).__name__}, which cannot be taken apart into examples: return tensors, "
            "or tuples or dictionaries of them"
        )
    kept = [
        leaf if isinstance(leaf, (*CONSTANTS, NotByExample)) else None for leaf in leaves
    ]  # a cache, say, is everybody's

    def one(*rows: Tensor) -> Tensor:
        own_targets, given = rows[: len(targets)], iter(rows[len(targets) :])
        own = [next(given).unsqueeze(0) if has_rows(leaf) else kept[i] for i, leaf in enumerate(leaves)]
        return loss(tree_unflatten(own, shape), *(target.unsqueeze(0) for target in own_targets)).sum()

    each = (*targets, *filter(has_rows, leaves))
    try:
        with quietly():
            return vmap(one, randomness="different")(*each)
    except RuntimeError as problem:
        if "vmap" not in str(problem):
            raise
    return torch.stack([one(*row) for row in zip(*each, strict=True)])  # a loss that looks at its numbers


def batch_mean(loss: BatchLoss) -> BatchLoss:
    """The mean of the examples' own losses over the rows of a batch. Targets are tensors, one or several, or tuples
    and dictionaries of them."""

    def mean(outputs: object, *targets: object) -> Tensor:
        if len(targets) == 1 and isinstance(targets[0], Tensor):
            return example_losses(loss, outputs, targets[0]).mean()
        leaves, shape = tree_flatten(targets)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def opened(outputs: object, *rows: Tensor) -> Tensor:
            filled = list(leaves)
            for place, row in zip(places, rows, strict=True):
                filled[place] = row
            return loss(outputs, *tree_unflatten(filled, shape))

        return example_losses(opened, outputs, tuple(leaves[place] for place in places)).mean()

    return mean


def of_torch(loss: object) -> bool:
    """Whether a loss is one of torch's own, which sees what it is given and nothing else."""
    loss = loss.func if isinstance(loss, partial) else loss
    return (type(loss) if isinstance(loss, nn.Module) else loss).__module__ in ("torch.nn.modules.loss", F.__name__)


def check_targets(loss: object, count: int) -> None:
    """Refuse several targets for a loss of torch's, whose further arguments are something else."""
    if count > 1 and of_torch(loss):
        raise ValueError(
            f"target: torch's losses take one target, and a row has {count}: give a function of them, such as "
            "lambda outputs, label, weight: weight * torch.nn.functional.cross_entropy(outputs, label)"
        )


def counts_targets(loss: object) -> bool:
    """Whether a loss of several targets is a mean over those that count, however many there are."""
    return _known(loss) is not None


def check_shifted(model: nn.Module, loss: object) -> None:
    """Refuse to score a Hugging Face model of the next token by a loss that would compare each token with itself."""
    name = type(model).__name__
    if name.endswith(NEXT_TOKEN) and of_torch(loss):
        raise ValueError(
            f"loss: {name} predicts the next token, and torch's loss would compare its outputs with the tokens "
            "themselves: give one that shifts, such as lambda outputs, labels: torch.nn.functional.cross_entropy("
            "outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:])"
        )


def _known(loss: Any) -> tuple[Callable[..., Tensor], dict[str, object]] | None:
    """One of torch's classification losses, and its options; None for any other."""
    if type(loss) in MODULES:
        return MODULES[type(loss)], {name: getattr(loss, name) for name in FIELDS if hasattr(loss, name)}
    if isinstance(loss, partial) and loss.func in MODULES.values() and not loss.args:
        return loss.func, dict(loss.keywords)
    return (loss, {}) if loss in MODULES.values() else None


def _by_class(function: Callable[..., Tensor], options: dict[str, Any], outputs: Tensor, targets: Tensor) -> Tensor:
    options = {key: value for key, value in options.items() if key in FIELDS}
    reduction, weight = options.pop("reduction", "mean"), options.get("weight")
    each = likelihood(function, outputs, targets, **options).flatten(1 if outputs.dim() > 2 else 0)
    if reduction != "mean":
        return each if each.dim() == 1 else each.sum(dim=1)
    if each.dim() > 1:
        each = each.sum(dim=1) / _counted(targets, each, options.get("ignore_index", -100))
    return each if weight is None else each / weight.mean()


def likelihood(function: Callable[..., Tensor], outputs: Tensor, targets: Tensor, **options: object) -> Tensor:
    """Every target's own loss. A target that is no class is refused without being named: it is private."""
    try:
        return classes_last(function, outputs, targets, **options, reduction="none")
    except IndexError:
        pass
    raise ValueError(
        f"a target lies outside the model's {outputs.shape[1]} classes, numbered from 0: see how the labels were made"
    )


def _counted(targets: Tensor, losses: Tensor, ignored: int) -> Tensor | int:
    """How many targets an example has that count: its own number, whatever it was padded to."""
    if targets.is_floating_point():
        return losses.shape[1]
    return (targets != ignored).flatten(1).sum(dim=1).clamp(min=1)
