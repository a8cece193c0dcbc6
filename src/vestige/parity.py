"""Do the engines agree on this model and batch, and what does each cost? Answered by running them side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vestige.clipping import Flat, Loss, Parameters
from vestige.engines import ENGINES
from vestige.layout import Layout

TOLERANCE = 1e-3
"""Largest relative error of a parameter's clipped sum: float32 sums in another order, TF32 where it is on."""
REPETITIONS = 3


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mib: float | None
    """Memory that one call allocates at most; counted on a GPU only."""


@dataclass(frozen=True)
class Parity:
    """Each parameter's relative error against the reference engine, and each engine's cost. Computed without noise."""

    errors: dict[str, float]
    costs: dict[str, Cost]
    examples: int

    @property
    def agrees(self) -> bool:
        return max(self.errors.values()) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        costs = {name: asdict(cost) for name, cost in self.costs.items()}
        return {"agrees": self.agrees, "examples": self.examples, "errors": self.errors, "engines": costs}


def compare_engines(model: nn.Module, loss: Loss, batch: Sequence[Tensor]) -> Parity:
    """Run every engine on one batch, with a bound that clips about half of the examples."""
    layout = Layout.of(model)
    parameters: Parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    device = next(iter(parameters.values())).device
    batch = [part.to(device) for part in batch]
    scratch = torch.zeros(layout.size, device=device)
    norms = ENGINES["reference"](model, loss, layout)(batch, parameters, Flat(1.0), scratch)
    usable = norms[norms.isfinite()]
    clip = Flat(max(float(usable.median()) if len(usable) else 1.0, 1e-12))
    totals, costs = {}, {}
    for name, make in ENGINES.items():
        engine = make(model, loss, layout)
        totals[name] = torch.zeros(layout.size, device=device)
        engine(batch, parameters, clip, totals[name])
        costs[name] = _cost(lambda engine=engine: engine(batch, parameters, clip, scratch), device)  # type: ignore[misc]
    expected = layout.views(totals["reference"].double())
    found = layout.views(totals["bookkeeping"].double())
    # A parameter whose true gradient is zero is measured against the whole gradient.
    whole = float(totals["reference"].double().norm().clamp(min=1e-30))
    errors = {
        name: float((found[name] - expected[name]).norm()) / max(float(expected[name].norm()), 1e-6 * whole)
        for name in expected
    }
    return Parity(errors, costs, len(batch[0]))


def _cost(call: Any, device: torch.device) -> Cost:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    for _ in range(REPETITIONS):
        call()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / REPETITIONS
    return Cost(seconds, (torch.cuda.max_memory_allocated(device) - before) / 2**20 if on_gpu else None)
