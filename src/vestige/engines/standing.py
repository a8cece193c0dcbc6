"""What does a recorded step take for granted? What its model and loss held in Python when it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

PLAIN = frozenset({bool, int, float, str, type(None), FunctionType, BuiltinFunctionType})
SEEN = PLAIN | {Tensor, nn.Parameter}


def standing(model: nn.Module, loss: Callable[..., Any]) -> tuple[Hashable, ...]:
    """Modes, numbers, functions and hooks of every module, and where its tensors lie: a step recorded under other
    ones is another step. Of the loss also what it closes over, its defaults and the globals it names.

    What is deeper (a list in a module, a variable that the forward pass of a module names) is not seen.
    """
    return (*_of_module(model), *_of_callable(loss, 3))


def _of_module(model: nn.Module) -> list[Hashable]:
    found: list[Any] = []
    modules, met = [model], {id(model)}
    for module in modules:  # which grows meanwhile; asked at every step, so faster than model.modules()
        found += (type(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        found += _plain(vars(module).values())
        found += [None if t is None else t.data_ptr() for t in module._parameters.values()]
        found += [None if t is None else t.data_ptr() for t in module._buffers.values()]
        for child in module._modules.values():
            if child is not None and id(child) not in met:
                met.add(id(child))
                modules.append(child)
    return found


def _plain(values: Iterable[Any]) -> list[Hashable]:
    return [value if type(value) in PLAIN else value.data_ptr() for value in values if type(value) in SEEN]


def _of_callable(thing: Any, depth: int) -> Iterator[Hashable]:
    if isinstance(thing, nn.Module):
        yield from _of_module(thing)
        return
    held = list(_held(thing))
    yield from _plain(held)
    for value in held if depth else ():
        if type(value) not in SEEN or isinstance(value, FunctionType):
            yield from _of_callable(value, depth - 1)


def _held(thing: Any) -> Iterator[Any]:
    if isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, FunctionType):
        yield from (_content(cell) for cell in thing.__closure__ or ())
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        if (thing.__module__ or "").partition(".")[0] != "torch":
            named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
            yield from (value for value in named if type(value) in SEEN and not isinstance(value, FunctionType))
    elif not isinstance(thing, type | ModuleType):
        yield from getattr(thing, "__dict__", {}).values()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
