"""How do our own kernels run, whatever modes and settings are on around them?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

unseen_by_functions = torch._C.DisableTorchFunction
"""Inside, sizes and storages of tensors are read without `TrackedFunctions`: its calls cost more than the reads."""
AS_IT_IS = nullcontext()


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is followed: for views of parameters, where what follows is labelled by the caller, and for sums
    over examples, which a clip has bounded."""
    if RECORDERS.on:
        with unseen_by_functions(), _disable_current_modes(), RECORDERS.on[-1]:
            yield
        return
    with unseen_by_functions(), torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        yield


class Recorders(threading.local):
    """What records the operators of this thread, also those that are not followed."""

    def __init__(self) -> None:
        self.on: list[TorchDispatchMode] = []


RECORDERS = Recorders()


def unrecorded() -> AbstractContextManager[object]:
    """Inside, what is made is not made anew in a replay."""
    return _disable_current_modes() if RECORDERS.on else AS_IT_IS


@contextmanager
def recording(recorder: TorchDispatchMode) -> Iterator[None]:
    RECORDERS.on.append(recorder)
    try:
        with recorder:
            yield
    finally:
        RECORDERS.on.pop()


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Norms and sums are float32 whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else AS_IT_IS
