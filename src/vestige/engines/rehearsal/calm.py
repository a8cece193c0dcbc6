"""What does a model do when chance has no say? Every draw gives the same number, so that batches can be compared.

A model draws other numbers for two examples than for three, though from the same seed. Only draws that are spread over
a tensor are made the same; an order that is drawn, of examples perhaps, stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LEVEL = 0.5
"""What a number between 0 and 1 is, and a normal one."""
FILLED = {"rand": LEVEL, "randn": LEVEL, "uniform": LEVEL, "normal": LEVEL, "bernoulli": 1.0, "exponential": LEVEL}
"""By the names of torch's operations, without `_like` and `_`."""
DROPOUTS = frozenset({"dropout_p", "p"})


class Calm(TorchDispatchMode):
    """Inside, nothing is dropped and every drawn number is the same."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if "attention" in name:  # on its way back too, which draws the same again
            return function(*_undropped(function, args), **{k: 0.0 if k in DROPOUTS else v for k, v in kwargs.items()})
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        found = function(*args, **kwargs)
        level = FILLED.get(name.removesuffix("_").removesuffix("_like"))
        return found if level is None else found.fill_(level)


class InOrder(TorchDispatchMode):
    """Inside, numbers are drawn in the order of their places, however a tensor lies in memory: the same are left out of
    the same activations in another layout."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in function.tags and args and isinstance(args[0], Tensor)
        if not drawn or args[0].is_contiguous():
            return function(*args, **kwargs)
        straight = function(args[0].contiguous(), *args[1:], **kwargs)
        return args[0].copy_(straight) if function._schema.name.endswith("_") else straight


def _undropped(function: Any, args: Sequence[Any]) -> list[Any]:
    names = [argument.name for argument in function._schema.arguments]
    return [0.0 if name in DROPOUTS else each for name, each in zip(names, args, strict=False)]
