"""Does a kink hide what is compared? Where two ways to a number round differently, a ReLU may let it through in one
only, and gradients differ by far more than rounding. With smooth functions in their place they don't."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

KINKED = frozenset(
    {
        *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.hardtanh, F.hardswish, F.hardsigmoid),
        *(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    }
)


class Smooth(TorchFunctionMode):
    """Inside, activations with kinks are softplus."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in KINKED:
            return F.softplus(args[0] if args else kwargs["input"])
        return function(*args, **(kwargs or {}))
