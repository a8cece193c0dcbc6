"""Which engine bounds each example? By name; all of them answer alike, to rounding."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import GradientEngine, Loss

ENGINES: dict[str, Callable[[nn.Module, Loss, Layout], GradientEngine]] = {
    "bookkeeping": Captured,
    "unrecorded": BookKeeping,
    "reference": Reference,
}


def engine_by_name(name: str) -> Callable[[nn.Module, Loss, Layout], GradientEngine]:
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is unknown; choose from {', '.join(ENGINES)}")
    return ENGINES[name]
