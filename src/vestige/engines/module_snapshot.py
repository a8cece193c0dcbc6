"""What does a module hold, and how is it put back after a pass that was only tried out?

Values are compared, not counts of writes: what is written by way of `.data` is counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engines.per_example.execution import unseen
from vestige.randomness.generator_states import draws_kept

PLAIN = (bool, int, float, str, type(None))


class ModuleSnapshot:
    """The parameters, buffers and plain attributes of a module when this was made; the copies lie in the host's memory.
    Without `parameters`, those are left alone."""

    def __init__(self, model: nn.Module, parameters: bool = True) -> None:
        stores: list[dict[str, Any]] = [module._buffers for module in model.modules()]
        if parameters:
            stores += [module._parameters for module in model.modules()]
        self._stores = [(store, {key: (held, _copied(held)) for key, held in store.items()}) for store in stores]
        self._attributes = [(module, set(vars(module)), _plain(module)) for module in model.modules()]

    def restore(self) -> None:
        for store, before in self._stores:
            for key in store.keys() - before.keys():
                del store[key]
            for key, (held, copy) in before.items():
                store[key] = held
                if held is not None and copy is not None and not _equal(held.detach(), copy.to(held.device)):
                    held.data.copy_(copy)
        for module, names, plain in self._attributes:
            for name in vars(module).keys() - names:
                del vars(module)[name]
            vars(module).update(plain)


def _copied(held: Tensor | None) -> Tensor | None:
    return None if held is None else held.detach().to("cpu", copy=True)


def _plain(module: nn.Module) -> dict[str, object]:
    return {key: value for key, value in vars(module).items() if type(value) in PLAIN}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; NaN is the same as NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def left_as_found(model: nn.Module, parameters: bool = True) -> Iterator[None]:
    """Inside, passes leave no trace: no random number is spent, no buffer or parameter changed, no pass counted."""
    held = ModuleSnapshot(model, parameters)
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        with draws_kept(*devices):
            yield
    finally:
        held.restore()


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Inside, passes are made beside the loop's own: what they write to buffers is taken back. The copies lie beside
    the buffers, so that nobody waits for them."""
    with unseen(), torch.no_grad():
        held = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers() if not buffer.is_inference()]
    try:
        yield
    finally:
        with unseen(), torch.no_grad():
            for buffer, copy, version in held:
                if buffer._version != version:
                    buffer.copy_(copy)
