"""How is work on a GPU recorded, to be replayed by one launch? As a CUDA graph, whose inputs keep their addresses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


def can_record(into: Tensor) -> bool:
    return into.is_cuda and not torch.cuda.is_current_stream_capturing()


def recorded(work: Callable[[], object], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """The GPU's part of some work, to be replayed; nothing is run."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    spare = generator.clone_state()
    # cuBLAS keeps a workspace for each stream. The recording's own must not outlive its memory pool, and the one that
    # it replaces would lie idle.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
    except RuntimeError:
        # A recording that breaks off leaves the generator unusable, and, before torch 2.12, the allocator in the belief
        # that it goes on, so that no cached memory is ever given back.
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


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
