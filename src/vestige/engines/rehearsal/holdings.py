"""What does a model hold? Its parameters, buffers and counters, to see what a pass on made-up examples changed and
to undo it.

Values are compared, not counts of writes: what is written by way of `.data` is counted nowhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

Place = tuple[dict[str, Any], str]
"""A dictionary of a module's, and the key there."""


class Holdings:
    """What a model held when this was made; the copies lie in the host's memory."""

    def __init__(self, model: nn.Module, buffers_only: bool = False) -> None:
        self._model, self._buffers_only = model, buffers_only
        self._then = {name: (store[key], _copied(store[key])) for name, (store, key) in self._places().items()}
        self._counts = [(module, _numbers(module)) for module in model.modules()]

    def _places(self) -> dict[str, Place]:
        return _places(self._model, self._buffers_only)

    def changed(self) -> set[str]:
        """What is another tensor now, or holds something else, or is new."""
        now = self._places()
        same = {name for name, (store, key) in now.items() if name in self._then and self._as_it_was(name, store[key])}
        return (now.keys() | self._then.keys()) - same

    def _as_it_was(self, name: str, tensor: Tensor) -> bool:
        before, copy = self._then[name]
        return tensor is before and equal(tensor.detach(), copy.to(tensor.device))

    def restore_counts(self) -> None:
        """Put back the numbers that modules hold in Python, as counters do. What is set once stays: a flag, say that
        hooks are in place, goes with what was done then."""
        for module, numbers in self._counts:
            vars(module).update(numbers)

    def restore(self, names: Collection[str]) -> None:
        """Put these back as they were; what was not there goes."""
        now = self._places()
        for name in names:
            if name not in self._then:
                store, key = now[name]
                del store[key]
            elif name in now:
                store, key = now[name]
                store[key], copy = self._then[name]
                if not self._as_it_was(name, store[key]):
                    _write(store[key], copy)


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {key: value for key, value in vars(module).items() if type(value) in (int, float)}


def describe(model: nn.Module, name: str) -> str:
    owner, _, key = name.rpartition(".")
    return f"{'parameter' if key in model.get_submodule(owner)._parameters else 'buffer'} {name!r}"


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are the same; NaN is the same as NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _places(model: nn.Module, buffers_only: bool = False) -> dict[str, Place]:
    return {
        f"{prefix}.{key}" if prefix else key: (store, key)
        for prefix, module in model.named_modules()
        for store in ((module._buffers,) if buffers_only else (module._parameters, module._buffers))
        for key, tensor in store.items()
        if isinstance(tensor, Tensor)
    }


def _write(tensor: Tensor, numbers: Tensor) -> None:
    """Where it lies, if they fit there: recordings know it by its place."""
    if tensor.shape == numbers.shape and tensor.dtype == numbers.dtype:
        tensor.data.copy_(numbers)
    else:
        tensor.data = numbers.to(tensor.device, copy=True)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def current(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Copies of some of what a model holds now, as far as it is there."""
    places = _places(model)
    return {name: places[name][0][places[name][1]].detach().clone() for name in names if name in places}


def buffers(model: nn.Module) -> set[str]:
    return {name for name, (store, key) in _places(model).items() if not isinstance(store[key], nn.Parameter)}
