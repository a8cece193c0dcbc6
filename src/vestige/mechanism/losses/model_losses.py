"""Which losses do models compute of their own outputs? The usual ones, each taken of every example by itself.

Of tokens it is the mean over an example's own tokens, those that are not ignored, or their sum over a public number of
tokens: never over everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.mechanism.losses.criteria import likelihood
from vestige.mechanism.losses.tokens import token_losses

IGNORED, IGNORED_PIXEL = -100, 255
Tensors = Mapping[str, Tensor]
ModelLoss = Callable[[Tensors, Tensors, int | None], Tensor]
"""Each example's loss, [examples], of the model's outputs, its labels and a public number of tokens, if one was given.

Raises ValueError where outputs and labels are not of its kind.
"""


def next_token(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    """Of a causal language model: each position predicts the token after it. What comes before the first, a prompt
    that is learned, has labels of its own."""
    logits, target = outputs["logits"], labels["labels"]
    _require(target.dim() == 2 and logits.dim() == 3 and logits.shape[1] >= target.shape[1])
    before = logits.shape[1] - target.shape[1]
    return each_token(outputs, {"labels": F.pad(target, (before, 1), value=IGNORED)[:, 1:]}, tokens)


def each_token(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    """Of a masked language model, a decoder or a tagger: each position is to say its own label."""
    logits, target = outputs["logits"], labels["labels"]
    _require(logits.dim() == 3 and logits.shape[:2] == target.shape and not target.is_floating_point())
    losses = token_losses(logits.flatten(0, 1), target.flatten(), IGNORED)
    counted = (target != IGNORED).sum(dim=1).clamp(min=1) if tokens is None else tokens
    return losses.view(target.shape).sum(dim=1) / counted


def each_pixel(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    """Of a segmentation: each pixel of the labels is to say its class, by scores that are drawn out to their size."""
    logits, target = outputs["logits"], labels["labels"]
    _require(logits.dim() == 4 and target.dim() == 3 and not target.is_floating_point())
    drawn_out = F.interpolate(logits.float(), size=target.shape[1:], mode="bilinear", align_corners=False)
    scores = drawn_out.permute(0, 2, 3, 1).flatten(0, 2)
    losses = likelihood(F.cross_entropy, scores, target.flatten(), ignore_index=IGNORED_PIXEL)
    counted = (target != IGNORED_PIXEL).flatten(1).sum(dim=1).clamp(min=1)
    return losses.view(len(target), -1).sum(dim=1) / counted


def one_class(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    logits, target = outputs["logits"], labels["labels"]
    _require(logits.dim() == 2 and target.numel() == len(logits) and not target.is_floating_point())
    return likelihood(F.cross_entropy, logits.float(), target.flatten(), ignore_index=IGNORED)


def numbers(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    """The squared error of a regression."""
    logits, target = outputs["logits"], labels["labels"]
    _require(target.is_floating_point() and logits.numel() == target.numel())
    return (logits.reshape(len(logits), -1) - target.reshape(len(logits), -1)).square().mean(dim=1)


def several_classes(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    logits, target = outputs["logits"], labels["labels"]
    _require(target.is_floating_point() and logits.shape == target.shape)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").flatten(1).mean(dim=1)


def span(outputs: Tensors, labels: Tensors, tokens: int | None) -> Tensor:
    """Of an answer in a text: where it starts and where it ends."""
    ends = []
    for end in ("start", "end"):
        logits, target = outputs[f"{end}_logits"], labels[f"{end}_positions"].flatten()
        outside = logits.shape[1]
        losses = F.cross_entropy(logits, target.clamp(0, outside), ignore_index=outside, reduction="none")
        ends.append(losses)
    return torch.stack(ends).mean(dim=0)


MODEL_LOSSES: dict[str, ModelLoss] = {
    "next token": next_token,
    "each token": each_token,
    "each pixel": each_pixel,
    "one class": one_class,
    "numbers": numbers,
    "several classes": several_classes,
    "span": span,
}


AVERAGED = (numbers, several_classes, span)
"""Those in which every number of an example's outputs has a say, padding too."""


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError(
            "the labels do not fit the model's outputs in shape or type: see what the collate function made"
        )
