"""Where do recordings work? In memory of their own, which may be lent while none of them is in use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def pool_for(owner: object, device: torch.device) -> Any:
    """Memory for recordings, which is there for as long as its owner is, or a recording in it."""
    pool, index = torch.cuda.graph_pool_handle(), device.index or 0
    if _can_lend():
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        torch._C._cuda_endAllocateToPool(index, pool)
        weakref.finalize(owner, torch._C._cuda_releasePool, index, pool).atexit = False
    return pool


def _can_lend() -> bool:
    """Whether torch lets work that is not recorded lie in the memory of recordings."""
    known = hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
    return known and torch.cuda.get_allocator_backend() == "native"


def give_back(device: torch.device) -> None:
    """What nobody needs any more; of cuBLAS too, whose workspaces would be missed where they are freed later."""
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes that somebody holds there."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def lent(pool: Any, device: torch.device) -> Iterator[None]:
    """Inside, work is done in the memory of recordings, none of which may be in use: on their stream, or there would be
    none for it."""
    stream, index = torch.cuda.graph.default_capture_stream, device.index or 0
    if stream is None or not _can_lend():
        yield
        return
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
    try:
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.cuda.synchronize(device)
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        torch._C._cuda_clearCublasWorkspaces()
