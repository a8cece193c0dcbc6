"""Along which axis does a loss take its classes? Along the last one, where a GPU's softmax is fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.fused.token_losses import fuses, token_losses

PLAIN = {
    **{"weight": None, "ignore_index": -100, "reduction": "none", "label_smoothing": 0.0},
    **{"size_average": None, "reduce": None},
}
"""Options of a cross entropy that the fused one knows; it ignores any one target."""


def classes_last(
    function: Callable[..., Tensor], input: Tensor, target: Tensor, *further: Any, **options: Any
) -> Tensor:
    """The same loss. Classes that lie side by side are made the last axis: along any other a GPU's softmax has one
    thread for all classes of a position."""
    if input.dim() < 3 or input.stride(1) != 1 or input.shape[1] == 1 or target.dim() != input.dim() - 1:
        return _of_rows(function, input, target, *further, **options)
    found = _of_rows(function, input.movedim(1, -1).flatten(0, -2), target.flatten(), *further, **options)
    return found.view(target.shape) if options.get("reduction") == "none" else found


def _of_rows(function: Callable[..., Tensor], input: Tensor, target: Tensor, *further: Any, **options: Any) -> Tensor:
    """Each token's own cross entropy is taken without storing the probabilities of its classes, where that is so."""
    asked = {"reduction": "mean", **options, "ignore_index": -100}
    plain = function is F.cross_entropy and not further and asked.items() <= PLAIN.items()
    shaped = input.dim() == 2 and target.dim() == 1 and len(input) == len(target) > 0
    if not plain or not shaped or target.is_floating_point() or not fuses(input):
        return function(input, target, *further, **options)
    found = token_losses(input, target, options.get("ignore_index", -100))
    return found if torch.is_autocast_enabled(input.device.type) else found.to(input.dtype)
