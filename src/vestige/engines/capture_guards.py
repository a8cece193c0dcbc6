"""What must stay as it is for a captured pass to be the same pass? Modes, numbers, functions and places of the module.

What a forward pass decides in Python is frozen in a CUDA graph. So what the module and the loss hold in Python is part
of what a graph is known by (`state_fingerprint`), and a module that draws random numbers on the host is captured only
if they decide nothing. Numbers that are drawn on the GPU are drawn anew in every replay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from vestige.engines.example_axis.labels import Tracker, tensors_in
from vestige.layout import modules_of
from vestige.randomness.generator_states import draws_kept, host_draws

NUMBERS = frozenset({bool, int, float, str, torch.dtype, torch.device})
OWN = frozenset(vars(nn.Module()))
"""What every module holds."""
PLAIN = NUMBERS | frozenset({type(None), FunctionType, BuiltinFunctionType, MethodType})
SEEN = PLAIN | {partial, Tensor, nn.Parameter}
EVERYWHERE = (
    *(hooks._global_forward_hooks, hooks._global_forward_pre_hooks),
    *(hooks._global_backward_hooks, hooks._global_backward_pre_hooks),
)
"""Hooks of every module there is."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its own."""
LEAST, MOST = 0.0, 1.0 - 2.0**-24
"""The least and the largest number that `torch.rand` draws."""


class NotCapturable(Exception):
    """The pass draws on the host, waits for the GPU, or changes its module."""


def require_same_on_any_draw(run: Callable[[], object], tracker: Tracker) -> None:
    """Raise `NotCapturable` if what a pass draws on the host decides which operators run: the least and the largest
    number stand for all (a layer that is skipped with probability zero)."""
    before, seen = host_draws(), []
    with draws_kept():
        try:
            for number in (LEAST, MOST):
                tracker.draw, tracker.sequence = number, []
                run()
                seen.append(tracker.sequence)
        finally:
            tracker.draw = tracker.sequence = None
        python = host_draws()[1:] == before[1:]
    if not python or seen[0] != seen[1]:
        raise NotCapturable("the model draws random numbers on the host that decide what it computes")


def state_fingerprint(
    model: nn.Module,
    loss: Callable[..., Any] | None = None,
    modules: Sequence[nn.Module] | None = None,
    known: KnownModules | None = None,
) -> tuple[Hashable, ...]:
    """Modes, numbers, functions and hooks of every module, and the addresses of its tensors: a graph captured under
    other ones is another pass. Of the loss also what it closes over, its defaults and the globals it names.

    Of whatever else a module holds (a configuration, a dictionary) the numbers are seen, and so are those that its
    forward pass names; what is deeper is not. `modules` are the model's, where they are known already; `known` is what
    its owner keeps of them from time to time, so that only what has changed is looked at again.
    """
    own = _of_modules(modules_of(model) if modules is None else modules, {} if known is None else known)
    return (*own, *(() if loss is None else _of_callable(loss, 3)))


class Facts(NamedTuple):
    """What is known of a module as long as its attributes are the same objects."""

    names: tuple[str, ...]
    attributes: tuple[Any, ...]
    plain: tuple[Hashable, ...]
    """Values that do not change."""
    others: tuple[Any, ...]
    """Functions with arguments, and tensors that are no buffers."""
    held: tuple[Any, ...]
    """Configurations, dictionaries and the like."""

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Facts:
        kinds = [(key, value, type(value)) for key, value in attributes.items() if key != "forward"]
        plain = tuple(value for _, value, kind in kinds if kind in PLAIN)
        others = tuple(value for _, value, kind in kinds if kind in SEEN and kind not in PLAIN)
        held = tuple(value for key, value, kind in kinds if kind not in SEEN and key not in OWN)
        return cls(tuple(attributes), tuple(attributes.values()), plain, others, held)

    def hold(self, attributes: Mapping[str, Any]) -> bool:
        same = len(attributes) == len(self.names) and all(map(is_, attributes.values(), self.attributes))
        return same and tuple(attributes) == self.names

    @property
    def may_be_kept(self) -> bool:
        """Whether no tensor would stay alive by it: a module may keep activations for a while."""
        return not tensors_in((self.others, self.held))


KnownModules = MutableMapping[nn.Module, Facts]


def _of_modules(modules: Sequence[nn.Module], known: KnownModules) -> list[Hashable]:
    found: list[Any] = [tuple(hooks) for hooks in EVERYWHERE]
    held: dict[int, Any] = {}
    last: list[Any] = []
    for module in modules:
        attributes = vars(module)
        facts = known.get(module)
        if facts is None or not facts.hold(attributes):
            known.pop(module, None)
            facts = Facts.of(attributes)
            if facts.may_be_kept:
                known[module] = facts
        found += (type(module), facts.plain)
        for name in HOOKS:  # the keys, which are never reused
            if attributes[name]:
                found.append((name, *attributes[name]))
        if "forward" in attributes:  # a loop's calls put theirs there for a while
            value = attributes["forward"]
            last.append(value if type(value) in PLAIN else _known(value) if type(value) in SEEN else id(value))
        if facts.others:
            found += map(_known, facts.others)
        for value in facts.held:
            held[id(value)] = value  # often the same for many modules
        for store in (attributes["_parameters"], attributes["_buffers"]):
            if store:
                found += [None if tensor is None else _place(tensor) for tensor in store.values()]
    found += last
    for value in held.values():
        found += _numbers(value)
    for kind in {type(module): None for module in modules}:
        names, variables = _named(kind.forward)
        found += (kind.forward, *(variables.get(name) for name in names))
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
    """A function with some of its arguments by what it is made of; a tensor that is no buffer by its address and, on
    the host, from where it is copied at capture only, by its version too."""
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
        yield from _of_modules(modules_of(thing), {})
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
