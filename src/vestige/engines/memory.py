"""How much memory has a machine left, and how much does a call take of it?"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vestige.engines.module_snapshot import left_as_found


@dataclass(frozen=True)
class DeviceMemory:
    """What a machine has left, and what a call takes of it at most: bytes; infinitely many if it did not fit."""

    free: Callable[[], float]
    taken_by: Callable[[Callable[[], object]], float]


def memory_of(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        return DeviceMemory(lambda: _free_on_gpu(device), lambda call: _taken_on_gpu(call, device))
    if device.type == "cpu" and Path("/proc/self/clear_refs").exists():
        return DeviceMemory(_free_on_linux, _taken_on_linux)
    raise ValueError(
        f"max_physical_batch_size='auto': nobody counts the memory of {device.type} on this system: give a number"
    )  # fmt: skip


def _free_on_gpu(device: torch.device) -> float:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _taken_on_gpu(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if not _fitted(call):
        gc.collect()
        torch.cuda.empty_cache()
        return inf
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _free_on_linux() -> float:
    """What the system could give, or what is left to this container."""
    left = [_status("/proc/meminfo", "MemAvailable")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with_limit, in_use = Path("/sys/fs/cgroup") / limit, Path("/sys/fs/cgroup") / used
        if with_limit.exists() and with_limit.read_text().strip() != "max":
            left.append(int(with_limit.read_text()) - int(in_use.read_text()))
    return min(left)


def _taken_on_linux(call: Callable[[], object]) -> float:
    """The tensors that are alive at the peak; or more, if resident memory grows by more.

    Libraries allocate behind torch's back, so resident memory is looked at too. Alone it would not do: an allocator
    that keeps what was freed hands it out again, and resident memory does not grow.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("/proc/self/status", "VmRSS")
    with TensorMemory() as tensors:
        fitted = _fitted(call)
    return max(tensors.peak, _status("/proc/self/status", "VmHWM") - before) if fitted else inf


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations create and that are still alive, and keeps their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.alive:
            self.alive[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self._now -= self.alive.pop(address, 0)


def _status(file: str, key: str) -> int:
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])


def _fitted(call: Callable[[], object]) -> bool:
    try:
        call()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError as problem:
        if "alloc" not in str(problem).lower() and "out of memory" not in str(problem).lower():
            raise
        return False
    return True


@contextmanager
def tried_out(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model is left as it was found, the memory is freed, and no warning is shown."""
    try:
        with left_as_found(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
