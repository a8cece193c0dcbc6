"""What does a pass send to the GPU? In a capture nothing can be sent, so what was sent before is given again.

What the host makes of numbers that no example has a say in (tables of positions, say) is the same every time; where it
is not, the pass is not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.engines.capture_guards import NotCapturable

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
