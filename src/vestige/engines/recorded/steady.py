"""What must stay as it is for a recorded step to be the same step? Modes, numbers, functions, places, and chance.

What a model's forward pass decides in Python (which layer to skip, say) is frozen in a recording. So a model that draws
random numbers on the host is never recorded, unless they decide nothing (a layer is skipped with a chance of zero), nor
one that changes itself; and what the model and the loss hold in Python (`standing`) is part of what is recorded.
Numbers that are drawn on the GPU itself are drawn anew in every replay, and Python cannot decide by them without
waiting for them, which ends a recording.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from vestige.devices import seed_draws
from vestige.engines.rehearsal.drawn import LARGEST, LEAST, Drawn, unsaid_draws
from vestige.engines.rehearsal.ways import NUMBERS, Way
from vestige.layout import modules_of


class Unsteady(Exception):
    """The model draws random numbers on the host, or is not after a pass what it was before."""


def host_draws() -> tuple[Any, ...]:
    """The state of every generator on the host that a forward pass may draw from without saying so."""
    return torch.get_rng_state().numpy().tobytes(), *unsaid_draws()


def restore_host_draws(states: tuple[Any, ...]) -> None:
    cpu, python, key, position = states
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    random.setstate(python)
    np.random.set_state(cast(Any, ("MT19937", np.frombuffer(key, dtype=np.uint32), position)))  # noqa: NPY002


def require_steady(
    run: Callable[[], Any], model: nn.Module, left: Tensor, loss: Callable[..., Any] | None = None
) -> Any:
    """What `run` gives; what it computes is `left`. Raises `Unsteady`, and has drawn nothing on the host, if the model
    lets itself be decided by what it draws there, or changes."""
    before, kept = host_draws(), standing(model, loss)
    found = run()
    if host_draws() != before:
        restore_host_draws(before)
        if not _idle(run, left):
            raise Unsteady
    if standing(model, loss) != kept:
        raise Unsteady
    return found


def _idle(run: Callable[[], Any], left: Tensor) -> bool:
    """Whether the numbers between 0 and 1 that are drawn on the host decide nothing: the least and the largest stand
    for them, and the same operations must give the same."""
    seen = []
    with torch.random.fork_rng([left.device] if left.is_cuda else []):
        for number in (LEAST, LARGEST):
            seed_draws(left.device, 0)
            before = host_draws()
            with Drawn(number), Way() as way:
                run()
            if host_draws() != before:  # otherwise than by torch.rand
                restore_host_draws(before)
                return False
            seen.append(([function for function, *_ in way.steps], left.clone()))
    (functions, least), (others, most) = seen
    return functions == others and bool((most - least).norm() <= 1e-2 * least.norm())


OWN = frozenset(vars(nn.Module()))
"""What every module holds."""
PLAIN = NUMBERS | frozenset({type(None), FunctionType, BuiltinFunctionType, MethodType})
SEEN = PLAIN | {partial, Tensor, nn.Parameter}
EVERYWHERE = (
    *(hooks._global_forward_hooks, hooks._global_forward_pre_hooks),
    *(hooks._global_backward_hooks, hooks._global_backward_pre_hooks),
)
"""Hooks of every module there is."""


def standing(
    model: nn.Module, loss: Callable[..., Any] | None = None, modules: Sequence[nn.Module] | None = None
) -> tuple[Hashable, ...]:
    """Modes, numbers, functions and hooks of every module, and where its tensors lie: a step recorded under other
    ones is another step. Of the loss also what it closes over, its defaults and the globals it names.

    Of whatever else a module holds (a configuration, a dictionary) the numbers are seen, and so are those that its
    forward pass names; what is deeper is not. `modules` are the model's, where they are known already.
    """
    own = _of_modules(modules_of(model) if modules is None else modules)
    return (*own, *(() if loss is None else _of_callable(loss, 3)))


def _of_modules(modules: Sequence[nn.Module]) -> list[Hashable]:
    found: list[Any] = [tuple(hooks) for hooks in EVERYWHERE]
    held: dict[int, Any] = {}
    for module in modules:
        kind = type(module)  # of hooks the keys, which are never reused
        found += (kind, kind.forward, tuple(module._forward_hooks), tuple(module._forward_pre_hooks))
        found += (tuple(module._backward_hooks), tuple(module._backward_pre_hooks))
        for key, value in vars(module).items():
            if type(value) in SEEN:
                found.append(value if type(value) in PLAIN else _known(value))
            elif key not in OWN:
                held[id(value)] = value  # often the same for many modules
        for store in (module._parameters, module._buffers):
            if store:
                found += [None if tensor is None else _place(tensor) for tensor in store.values()]
    for value in held.values():
        found += _numbers(value)
    for kind in {type(module): None for module in modules}:
        names, variables = _named(kind.forward)
        found += [variables.get(name) for name in names]
    return found


def _numbers(value: Any) -> list[Hashable]:
    """Of something that a module holds."""
    if isinstance(value, (tuple, list)):
        return [each for each in value if type(each) in NUMBERS]
    if isinstance(value, (nn.Module, ModuleType, type)):
        return []
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return [each for each in held.values() if type(each) in NUMBERS]


@lru_cache(maxsize=1024)
def _named(function: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Numbers outside that a function names, and where they are."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return (), {}
    variables = inner.__globals__
    return tuple(name for name in inner.__code__.co_names if type(variables.get(name)) in NUMBERS), variables


def _known(value: Any) -> Hashable:
    """A function with some of its arguments by what it is made of; a tensor that is no buffer by where it lies, and on
    the host, from where it is sent when a pass is recorded and not again, also by how often it was written to."""
    if isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords, *value.keywords.values())
        return tuple(each if type(each) in PLAIN else id(each) for each in parts)
    place = _place(value)
    return (place, value._version) if value.device.type == "cpu" and not value.is_inference() else place


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)


def _plain(values: Iterable[Any]) -> list[Hashable]:
    return [value if type(value) in PLAIN else _known(value) for value in values if type(value) in SEEN]


def _of_callable(thing: Any, depth: int) -> Iterator[Hashable]:
    if isinstance(thing, nn.Module):
        yield from _of_modules(modules_of(thing))
        return
    held = list(_held(thing))
    yield from _plain(held)
    for value in held if depth else ():
        if type(value) not in SEEN or isinstance(value, FunctionType | MethodType | partial):
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
