"""Which engine bounds each example? By name; all of them answer alike, to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured
from vestige.engines.reference import Reference
from vestige.mechanism.clipping import Batch, Clip, GradientEngine, Parameters, Transform

ENGINES: dict[str, type[Captured] | type[BookKeeping] | type[Reference]] = {
    "bookkeeping": Captured,
    "unrecorded": BookKeeping,
    "reference": Reference,
}


def engine_by_name(name: str) -> type[Captured] | type[BookKeeping] | type[Reference]:
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is unknown; choose from {', '.join(ENGINES)}")
    return ENGINES[name]


class InBfloat16:
    """An engine whose model runs in bfloat16, as torch's autocast has it; norms and sums stay in float32.

    Formal guarantees: those of the engine: what is clipped is the gradient that the rounded passes give, and its norm
    and its share of the sum are computed from the same numbers.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        # Without the cache of rounded weights: a recorded step must round them anew.
        with torch.autocast(into.device.type, torch.bfloat16, cache_enabled=False):
            return self._engine(batch, parameters, clip, into, transform)
