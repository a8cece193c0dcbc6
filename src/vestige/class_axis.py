"""Along which axis does a loss take its classes? Along the last one, where a GPU's softmax is fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def classes_last(
    function: Callable[..., Tensor], input: Tensor, target: Tensor, *further: Any, **options: Any
) -> Tensor:
    """The same loss. Classes that lie side by side are made the last axis: along any other a GPU's softmax has one
    thread for all classes of a position."""
    if input.dim() < 3 or input.stride(1) != 1 or input.shape[1] == 1 or target.dim() != input.dim() - 1:
        return function(input, target, *further, **options)
    found = function(input.movedim(1, -1).flatten(0, -2), target.flatten(), *further, **options)
    return found.view(target.shape) if options.get("reduction") == "none" else found
