"""What does the host see of a pass? Numbers that it waits for, and by which a model may decide."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """Keeps in `numbers` what the host saw inside, in its order; of `nonzero` how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (aten._local_scalar_dense.default, aten.equal.default):
            self.numbers.append(found)
        elif function is aten.nonzero.default:
            self.numbers.append(len(found))
        return found
