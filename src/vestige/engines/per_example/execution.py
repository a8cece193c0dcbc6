"""How do our own kernels run, whatever modes and settings are on around them?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

unseen_by_functions = torch._C.DisableTorchFunction
"""Inside, sizes and storages of tensors are read without `TrackedFunctions`: its calls cost more than the reads."""
AS_IT_IS = nullcontext()


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is followed: for views of parameters, where what follows is labelled by the caller, and for sums
    over examples, which a clip has bounded."""
    with unseen_by_functions(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        yield


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Norms and sums are float32 whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else AS_IT_IS
