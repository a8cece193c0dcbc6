"""What does a model decide by a number that it draws on the host? Which layer to skip, say: both ways are tried."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

LEAST, LARGEST = 0.0, 1 - 2**-24
"""Of what `torch.rand` draws in float32."""


def unsaid_draws() -> tuple[Any, bytes, int]:
    """The states of Python's generator and of NumPy's, from which a forward pass may draw and torch not know."""
    numpy = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return random.getstate(), numpy["key"].tobytes(), numpy["pos"]


class Drawn(TorchFunctionMode):
    """Inside, a single number that `torch.rand` would draw on the host is this one, and none is drawn."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number, self.met = number, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is torch.rand and _single(args, named) and _on_host(named) and named.get("generator") is None:
            self.met = True
            kept = {name: value for name, value in named.items() if name not in ("generator", "requires_grad")}
            made = torch.zeros(*args, **kept).fill_(self._number)
            return made.requires_grad_() if named.get("requires_grad") else made
        return function(*args, **named)


def _single(args: Any, named: Any) -> bool:
    """Whether one number is asked for: however its shape is said."""
    sizes = args or (named.get("size", ()),)
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    return prod(sizes) == 1


def _on_host(named: Any) -> bool:
    return torch.device(named.get("device") or torch.get_default_device()).type == "cpu"
