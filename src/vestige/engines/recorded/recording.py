"""How is work on a GPU recorded, and at which sizes of a batch?

A recording has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes, and a padding row
is treated as what the engine already knows how to leave out, an example without a usable gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil, floor, sqrt
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

SECONDS = 40.0
"""How long recording ahead may take; a size that was not reached is padded to the next one."""
MOST_SIZES = 16
"""Sizes at which a step is recorded ahead."""
MOST_FORMS, PATIENCE = 4, 8
"""Forms of batches for which sizes are recorded ahead, and how often a further one is met before it is: sequences may
have any length."""
DEVIATIONS = 3
"""So far from its mean, in standard deviations, a sample is still of a recorded size; one in a thousand is not."""


def recorded(work: Callable[[], object], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """The GPU's part of some work, to be replayed; nothing is run."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    spare, stream = generator.clone_state(), torch.cuda.current_stream(device)
    # cuBLAS keeps a workspace for each stream. The recording's own must not outlive its memory pool, and the one that
    # it replaces would lie idle.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
    except RuntimeError:
        # A recording that breaks off leaves the generator unusable, its own stream the current one, and, before torch
        # 2.12, the allocator in the belief that it goes on, so that no cached memory is ever given back.
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


def device_draws(device: torch.device) -> Tensor:
    """The state of the generator that draws there."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def restore_device_draws(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def nothing_to_draw_again() -> Iterator[None]:
    """Inside, and in this thread, checkpointing does not ask a GPU's generator for its state, which would end a
    recording: for models that draw nothing there."""
    asked = checkpoint.get_device_states
    if not hasattr(asked, "asked"):

        def states(*given: object) -> tuple[list[int], list[Tensor]]:
            return ([], []) if getattr(_quiet, "on", False) else asked(*given)

        states.asked = asked  # type: ignore[attr-defined]
        checkpoint.get_device_states = states
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = False


_quiet = local()
"""In which threads nothing is drawn again."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees while a step is recorded, an older recording above all, would break it off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def sizes_of(population: int, rate: float, part: int | None = None) -> list[int]:
    """The sizes to record for Poisson samples that are taken whole, or in parts of at most so many: largest first."""
    mean, deviation = population * rate, sqrt(population * rate * (1 - rate))
    low, high = max(1, floor(mean - DEVIATIONS * deviation)), min(population, ceil(mean + DEVIATIONS * deviation))
    if part is not None and part < high:
        low, high = 1, part  # what is left over of a sample is as likely to be small as large
    step = ceil((high - low + 1) / MOST_SIZES)
    return list(range(high, low - 1, -step))
