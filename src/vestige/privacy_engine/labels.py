"""How does `model(**batch).loss` become private? The model's own loss is recognised, and taken of every example.

The loss of an example is what the model computes of that example alone. Which of the usual losses that is, is tried on
made-up examples, so nothing need be known of the model's class. A loss that is none of them (with a router's balance,
say) is left as the model gave it: it can be looked at, but not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from vestige.engines.rehearsal.rehearsing import endings, left_as_found, made_up
from vestige.mechanism.losses.model_losses import AVERAGED, IGNORED, IGNORED_PIXEL, MODEL_LOSSES, ModelLoss, Tensors
from vestige.privacy_engine.calls import Call
from vestige.privacy_engine.outputs import by_rows

LABELS = ("labels", "start_positions", "end_positions")
DIVISORS = ("num_items_in_batch",)
"""What callers divide a loss by: everyone's tokens."""
TRIALS, SHORTEST = 3, 4
OTHER_LABELS = 3


@dataclass(frozen=True)
class Labelled:
    """A call with labels whose loss is known."""

    loss: ModelLoss
    dropped: bool
    """Whether the model needs the labels for its loss only; they are then kept from it."""
    tokens: int | None

    def given(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is called with."""
        gone = (*DIVISORS, *LABELS) if self.dropped else DIVISORS
        return {name: value for name, value in kwargs.items() if name not in gone}

    def with_loss(self, outputs: Any, labels: Tensors) -> Any:
        """The outputs as the model returns them, with the mean of the examples' losses in front."""
        others = {name: value for name, value in outputs.items() if name != "loss"}
        averaged = None
        if self.loss in AVERAGED:
            averaged = sum(part[0].numel() for name, part in others.items() if name.endswith("logits"))
        loss = by_rows(self.loss(others, labels, self.tokens), averaged)
        return type(outputs)(**{"loss": loss, **others})


class Labels:
    """What is known of a module's calls with labels."""

    def __init__(self, module: nn.Module, tokens: int | None) -> None:
        self._module, self._tokens = module, tokens
        self._known: dict[Any, Labelled | None] = {}

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Labelled | None, dict[str, Tensor]]:
        """The loss that a call asks for, if it has labels and their loss is known, and the labels."""
        labels = {name: kwargs[name] for name in LABELS if isinstance(kwargs.get(name), Tensor)}
        if not labels:
            return None, {}
        call = Call(*tree_flatten((args, dict(kwargs))))
        key = (self._module.training, call.kind)
        if key not in self._known:
            self._known[key] = self._recognised(args, kwargs, labels)
        return self._known[key], labels

    def _recognised(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Mapping[str, Tensor]
    ) -> Labelled | None:
        found = (self._recognised_by(args, kwargs, labels, ending) for ending in endings(self._module))
        return next((each for each in found if each is not None), None)

    def _recognised_by(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Mapping[str, Tensor], ending: int | None
    ) -> Labelled | None:
        """By made-up sequences that end with a token."""
        known = dict(MODEL_LOSSES)
        kept = {name: value for name, value in kwargs.items() if name not in DIVISORS}
        with left_as_found(self._module), torch.no_grad():
            for trial in range(TRIALS):
                alone, single = _made_up_call(args, kept, labels, trial, ending)
                try:
                    outputs = self._module(*single[0], **single[1])
                except Exception:  # a model that refuses such numbers says so when it is tried out itself
                    return None
                if not isinstance(outputs, Mapping) or not _is_number(outputs.get("loss")):
                    return None
                known = {name: loss for name, loss in known.items() if _agrees(loss, outputs, alone)}
                if len(known) != 1:
                    continue
                for number in range(OTHER_LABELS):  # a weight of a class, say, shows with labels of that class
                    others = _other_labels(outputs, alone, number)
                    try:
                        again = self._module(*single[0], **{**single[1], **others})
                    except Exception:
                        return None
                    known = {name: loss for name, loss in known.items() if _agrees(loss, again, others)}
            if len(known) != 1:
                return None
            (loss,) = known.values()
            return Labelled(loss, self._only_for_the_loss(args, kept, labels, ending), self._tokens)

    def _only_for_the_loss(self, args: Any, kwargs: Any, labels: Mapping[str, Tensor], ending: int | None) -> bool:
        """Whether the other outputs are the same without labels."""
        alone, (inputs, named) = _made_up_call(args, kwargs, labels, 0, ending)
        found = []
        for given in (named, {name: value for name, value in named.items() if name not in alone}):
            torch.manual_seed(0)
            try:
                outputs = self._module(*inputs, **given)
            except Exception:  # a model that cannot be called without its labels
                return False
            found.append({k: v for k, v in outputs.items() if isinstance(v, Tensor) and k != "loss"})
        one, other = found
        return one.keys() == other.keys() and all(
            one[name].shape == other[name].shape  # what a decoder reads may be made of the labels
            and torch.allclose(one[name].float(), other[name].float(), rtol=1e-4, atol=1e-5)
            for name in one
        )


def _made_up_call(
    args: Any, kwargs: Any, labels: Mapping[str, Tensor], trial: int, ending: int | None
) -> tuple[dict[str, Tensor], tuple[Any, dict[str, Any]]]:
    """One made-up example in the form of a call; of its labels some are ignored, where there are several."""
    first = next(iter(labels.values()))
    rows, length = len(first), first.shape[1] if first.dim() > 1 and not first.is_floating_point() else 0

    def one(value: Any, seed: int, ending: int | None = None) -> Any:
        if not (isinstance(value, Tensor) and value.dim() and len(value) == rows):
            return value
        blank = value[:0]
        if 0 < length < SHORTEST and value.dim() > 1 and value.shape[1] == length:
            blank = value.new_zeros(0, SHORTEST, *value.shape[2:])  # one token has none after it
        return made_up([blank], 1, seed, value.device, ending=ending)[0]

    named = {
        name: one(value, 7 * trial + place, ending if name == "input_ids" else None)
        for place, (name, value) in enumerate(kwargs.items())
    }
    for name in labels:
        if trial and named[name].dim() > 1 and not named[name].is_floating_point():
            named[name][:, trial::3] = IGNORED if named[name].dim() == 2 else IGNORED_PIXEL
    alone = {name: named[name] for name in labels}
    return alone, (tuple(one(value, 7 * trial + 50 + place) for place, value in enumerate(args)), named)


def _other_labels(outputs: Mapping[str, Any], labels: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The same labels, of other classes that the outputs have; and other numbers than between 0 and 1."""
    logits, changed = outputs.get("logits"), dict(labels)
    for name, label in labels.items():
        if label.is_floating_point():
            changed[name] = label * (3.0 - 7.0 * number) - number
        elif name == "labels" and isinstance(logits, Tensor) and logits.dim() > 1:
            classes = logits.shape[1] if label.dim() == 3 else logits.shape[-1]
            other = (
                torch.arange(label.numel(), device=label.device).reshape(label.shape) + 1 + number * (classes // 3 + 1)
            )
            changed[name] = torch.where(label >= 0, other % classes, label).to(label.dtype)
    return changed


def _agrees(loss: ModelLoss, outputs: Mapping[str, Any], labels: Tensors) -> bool:
    try:
        found = loss({k: v for k, v in outputs.items() if isinstance(v, Tensor)}, labels, None)
    except (ValueError, KeyError, RuntimeError, IndexError):
        return False
    return bool(torch.isclose(found[0].float(), outputs["loss"].float(), rtol=1e-2 if _rough(outputs) else 1e-4))


def _rough(outputs: Mapping[str, Any]) -> bool:
    return any(isinstance(v, Tensor) and v.dtype in (torch.bfloat16, torch.float16) for v in outputs.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.dim() < 2
