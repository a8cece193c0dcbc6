"""Which engine bounds each example? By name; all of them answer alike, to rounding."""

from __future__ import annotations

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.recorded.cuda_graphs import Captured
from vestige.engines.reference import Reference

ENGINES: dict[str, type[Captured] | type[BookKeeping] | type[Reference]] = {
    "bookkeeping": Captured,
    "unrecorded": BookKeeping,
    "reference": Reference,
}


def engine_by_name(name: str) -> type[Captured] | type[BookKeeping] | type[Reference]:
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is unknown; choose from {', '.join(ENGINES)}")
    return ENGINES[name]
