"""How do our own kernels run, whatever modes and settings are on around them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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


LIBRARY = torch.library.Library("vestige", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function an operator of ours, which the tracker sees as one call. Those of `torch.library.custom_op`
    import the compiler of torch at their first call, which takes seconds."""

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(schema)
        LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return install
