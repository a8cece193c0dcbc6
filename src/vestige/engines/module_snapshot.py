"""What does a module hold, and how is it put back after a pass that was only tried out?

Values are compared, not counts of writes: what is written by way of `.data` is counted nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ModuleSnapshot:
    """The parameters, buffers and counters of a module when this was made; the copies lie in the host's memory."""

    def __init__(self, model: nn.Module) -> None:
        stores: list[dict[str, Any]] = [
            store for module in model.modules() for store in (module._parameters, module._buffers)
        ]
        self._stores = [(store, {key: (held, _copied(held)) for key, held in store.items()}) for store in stores]
        self._counts = [(module, _numbers(module)) for module in model.modules()]

    def restore(self) -> None:
        for store, before in self._stores:
            for key in store.keys() - before.keys():
                del store[key]
            for key, (held, copy) in before.items():
                store[key] = held
                if held is not None and copy is not None and not _equal(held.detach(), copy.to(held.device)):
                    held.data.copy_(copy)
        for module, numbers in self._counts:
            vars(module).update(numbers)


def _copied(held: Tensor | None) -> Tensor | None:
    return None if held is None else held.detach().to("cpu", copy=True)


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {key: value for key, value in vars(module).items() if type(value) in (int, float)}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; NaN is the same as NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Inside, passes leave no trace: no random number is spent, no buffer or parameter changed, no pass counted."""
    held = ModuleSnapshot(model)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        held.restore()
