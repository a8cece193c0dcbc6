"""Which function runs when a module is called? The one in the slot where `module.compile()` puts a compiled graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class CallInterceptor:
    """Answers calls of a module, by a `__call__` of its own, in the place of a compiled form."""

    owner: Any
    """Whose module it is."""
    compiled: Callable[..., object] | None
    """The compiled form, for calls that are not private."""
    dynamo: bool
    """Whether the compiler, which could trace this call, has been imported."""
    privately: Callable[..., object]
    """How a private call runs: the compiler looks away."""


def install_interceptor(
    module: nn.Module, kind: type[CallInterceptor], owner: object, private_call: Callable[..., object]
) -> None:
    """Calls of the module come to `kind` first, also where it was compiled since, or the compiler was loaded."""
    found: Any = module._compiled_call_impl
    known, dynamo = isinstance(found, kind), "torch._dynamo" in sys.modules
    if not known or found.dynamo != dynamo:
        privately = torch.compiler.disable(private_call) if dynamo else private_call
        made = kind(owner, found.compiled if known else found, dynamo, privately)
        module._compiled_call_impl = made  # type: ignore[assignment]
