"""Do the engines agree on this model and batch, and what does each cost? Answered by running them side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engines.memory import memory_of
from vestige.engines.registry import ENGINES
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat, Loss, Parameters

TOLERANCE = 1e-3
"""Largest relative error of a parameter's clipped sum: float32 sums in another order, TF32 where it is on."""
REPETITIONS = 3


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mib: float | None
    """Memory that a first call takes at most; None where it cannot be measured."""


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
        seconds = _seconds(lambda engine=engine: engine(batch, parameters, clip, scratch), device)  # type: ignore[misc]
        another = make(model, loss, layout)  # a replayed step would not show what its recording works in
        costs[name] = Cost(seconds, _peak(lambda engine=another: engine(batch, parameters, clip, scratch), device))  # type: ignore[misc]
    expected = layout.views(totals["reference"].double())
    found = layout.views(totals["bookkeeping"].double())
    # A parameter whose true gradient is zero is measured against the whole gradient.
    whole = float(totals["reference"].double().norm().clamp(min=1e-30))
    errors = {
        name: float((found[name] - expected[name]).norm()) / max(float(expected[name].norm()), 1e-6 * whole)
        for name in expected
    }
    return Parity(errors, costs, len(batch[0]))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    for _ in range(REPETITIONS):
        call()
    wait()
    return (time.perf_counter() - begin) / REPETITIONS


def _peak(call: Callable[[], object], device: torch.device) -> float | None:
    try:
        memory = memory_of(device)
    except ValueError:
        return None
    return memory.taken_by(call) / 2**20
