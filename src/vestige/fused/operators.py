"""How do our own kernels become operators of torch? Modes then see each as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("vestige", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function an operator of ours, which the tracker sees as one call. Those of `torch.library.custom_op`
    import the compiler of torch at their first call, which takes seconds."""

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.define(schema)
        LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return install
