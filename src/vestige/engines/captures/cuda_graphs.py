"""How is work captured as a CUDA graph, while it is proved? And what may a captured pass not do?

In a capture nothing can be sent to the GPU, so what was sent before is given again. What the host makes of numbers that
no example has a say in (tables of positions, say) is the same every time; where it is not, the pass is not captured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.engines.captures.capture_guards import NotCapturable, require_same_on_any_draw
from vestige.engines.captures.operator_graph import without_collection
from vestige.engines.example_axis.labels import Tracker
from vestige.engines.per_example.execution import RECORDERS, unseen
from vestige.randomness.generator_states import host_draws, restore_host_draws
from vestige.tf32 import tf32_convolutions, tf32_products

aten = torch.ops.aten
INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)
Sent = list[tuple[Tensor, Tensor]]
"""Tensors of the host, and what was made of them on the GPU, in their order."""


class HostTransfers(TorchDispatchMode):
    """Inside, what goes to a device is kept in `sent`, or (`given`) is what was kept before. Raises `NotCapturable` if
    that is something else."""

    def __init__(self, device: torch.device, sent: Sent, given: bool = False) -> None:
        super().__init__()
        self._kind, self._sent, self._given, self._next = device.type, sent, given, iter(sent)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is aten._to_copy.default and self._goes(args[0], named.get("device")):
            return self._over(args[0], lambda: function(*args, **named))
        if function is aten.copy_.default and self._goes(args[1], args[0].device):
            args = (args[0], self._over(args[1], lambda: args[1].to(args[0].device)), *args[2:])
        elif function in INDEXING and args[0].device.type == self._kind:
            args = (args[0], [self._index(each, args[0].device) for each in args[1]], *args[2:])
        return function(*args, **named)

    def _goes(self, tensor: Tensor, to: torch.device | None) -> bool:
        return to is not None and torch.device(to).type == self._kind and tensor.device.type == "cpu" != self._kind

    def _index(self, each: Tensor | None, device: torch.device) -> Tensor | None:
        if each is None or not self._goes(each, device):
            return each
        return self._over(each, lambda: each.to(device))

    def _over(self, tensor: Tensor, send: Callable[[], Tensor]) -> Tensor:
        if not self._given:
            self._sent.append((tensor.clone(), send()))
            return self._sent[-1][1].clone()
        before, there = next(self._next, (None, None))
        if before is None or there is None or before.dtype != tensor.dtype or not torch.equal(before, tensor):
            raise NotCapturable("the pass sends the GPU something else than before")
        return there.clone()


def capturable(device: torch.device) -> bool:
    if device.type == "cpu":
        return not RECORDERS.on
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def captured(work: Callable[[], object], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """The GPU's part of some work, to be replayed; nothing is run."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    spare, stream = generator.clone_state(), torch.cuda.current_stream(device)
    # cuBLAS keeps a workspace for each stream. The graph's own must not outlive its memory pool, and the one that it
    # replaces would lie idle.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with without_collection(), torch.cuda.graph(graph, pool=pool):
            work()
    except BaseException:
        # A capture that breaks off leaves the generator unusable, its own stream the current one, and, before torch
        # 2.12, the allocator in the belief that it goes on, so that no cached memory is ever given back.
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


def capture_proved(
    capture: Callable[[], object], run: Callable[[], object], device: torch.device, tracker: Tracker
) -> None:
    """Capture work while it is proved. Where that does not work at once it is run before, proved too: kernels are then
    loaded, and what is sent to the device is known. Raises where that cannot be."""
    sent, before = Sent(), host_draws()
    with suppress(NotCapturable, RuntimeError), HostTransfers(device, sent, given=True):
        capture()
        return
    with HostTransfers(device, sent):
        run()
    if device.type == "cuda" and host_draws() != before:
        restore_host_draws(before)
        require_same_on_any_draw(run, tracker)
    give_back(device)
    with HostTransfers(device, sent, given=True):
        capture()


@contextmanager
def as_captured(tracker: Tracker, full: bool) -> Iterator[None]:
    """As a pass is followed that is to be captured. Where no mask leaves anything out (`full`), a model that asks
    whether it is captured hears that it is not: transformers' models then look at the mask, which is answered, and skip
    work."""
    asked = torch.cuda.is_current_stream_capturing
    tracker.answer, tracker.captured, tracker.kept_elsewhere, tracker.exposed = full, True, False, False
    if full:
        torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        tracker.answer, tracker.captured = None, False


def require_unexposed(tracker: Tracker, device: torch.device) -> None:
    """Raise `NotCapturable` if a pass on a CPU may have written to memory without an operator, as NumPy does."""
    if tracker.exposed and device.type == "cpu":
        raise NotCapturable("the pass takes the memory of a tensor out of torch")


def is_full(mask: Tensor) -> bool:
    """Whether a mask leaves nothing out: models then skip work, with the same result."""
    with unseen():
        return bool((mask == 1).all())


def new_pool() -> Any:
    """Memory for graphs."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


def give_back(device: torch.device) -> None:
    """What nobody needs any more; of cuBLAS too, whose workspaces would be missed where they are freed later."""
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def precision(device: torch.device) -> tuple[Hashable, ...]:
    """What a graph takes for granted of torch's settings."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return tf32_products(), tf32_convolutions(), autocast, torch.get_default_dtype()


def fill_rows(buffer: Tensor, rows: Tensor) -> None:
    """Put rows into a buffer; further ones are copies of the first, so that predicates over all keep their value."""
    count = len(rows)
    buffer[:count].copy_(rows)
    if count < len(buffer):
        buffer[count:].copy_(buffer[:1].expand(len(buffer) - count, *buffer.shape[1:]))
