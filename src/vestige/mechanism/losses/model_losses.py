"""Which losses do language models compute of their own outputs? Those of tokens, taken of every example by itself.

Of tokens it is the mean over an example's own tokens, those that are not ignored, or their sum over a public number of
tokens: never over everybody's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from vestige.fused.token_losses import fuses, token_losses
from vestige.mechanism.losses.criteria import likelihood

IGNORED = -100
Tensors = Mapping[str, Tensor]


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
    losses = losses_of(logits.flatten(0, 1), target.flatten(), IGNORED)
    counted = (target != IGNORED).sum(dim=1).clamp(min=1) if tokens is None else tokens
    return losses.view(target.shape).sum(dim=1) / counted


def losses_of(scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross entropy of each token, [tokens], of its scores, [tokens, classes]; 0 for what is ignored."""
    if fuses(scores):
        return token_losses(scores, targets, ignored)
    return likelihood(F.cross_entropy, scores.float(), targets, ignore_index=ignored)


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError(
            "the labels do not fit the model's outputs in shape or type: see what the collate function made"
        )
