"""What must stay as it is for a captured pass to be the same pass? Modes, numbers, functions and places of the module.

What a forward pass decides in Python is frozen in a CUDA graph. So what the module and the loss hold in Python is part
of what a graph is known by (`state_fingerprint`), and a module that draws random numbers on the host is captured only
if they decide nothing. Numbers that are drawn on the GPU are drawn anew in every replay.
"""

from __future__ import annotations

import dis
import gc
import io
import pickle
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from vestige.engines.example_axis.labels import Tracker, tensors_in
from vestige.engines.per_example.execution import unseen_by_functions
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
MACHINERY = frozenset(("torch", "vestige", "logging"))
"""Packages in whose objects and functions nothing is looked for."""
REFERENCES = (nn.Module, ModuleType, type, FunctionType, MethodType, BuiltinFunctionType)
GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
INSTALLED = "-packages"
"""In the paths of what is installed, which stays as it is."""
LARGEST = 2**16
"""Bytes that something may take that Python holds; what takes more is known as the object that it is."""
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
    tensors: list[Tensor] | None = None,
) -> tuple[Hashable, ...]:
    """Modes, numbers, functions and hooks of every module, and the places of its tensors: a graph captured under other
    ones is another pass. Of the loss also what it closes over, its defaults and the globals it names.

    Whatever else a module holds (a configuration, a generator of random numbers) is known by how it would be pickled,
    where it can be and is not large. `modules` are the model's, where they are known already; `known` is what its
    owner keeps of them from time to time, so that only what has changed is looked at again. To `tensors` are added
    those that modules hold but for their parameters and buffers.
    """
    found = _of_modules(modules_of(model) if modules is None else modules, {} if known is None else known, tensors)
    return (*found, *(() if loss is None else _of_callable(loss, 3)))


class Facts(NamedTuple):
    """What is known of a module as long as its attributes are the same objects."""

    names: tuple[str, ...]
    attributes: tuple[Any, ...]
    plain: tuple[Hashable, ...]
    """Values that do not change."""
    kinds: tuple[type, ...]
    """Theirs: 1, 1.0 and True are equal."""
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
        return cls(tuple(attributes), tuple(attributes.values()), plain, tuple(map(type, plain)), others, held)

    def hold(self, attributes: Mapping[str, Any]) -> bool:
        same = len(attributes) == len(self.names) and all(map(is_, attributes.values(), self.attributes))
        return same and tuple(attributes) == self.names

    @property
    def may_be_kept(self) -> bool:
        """Whether no tensor would stay alive by it: a module may keep activations for a while."""
        return not tensors_in((self.others, self.held))


KnownModules = MutableMapping[nn.Module, Facts]


def _of_modules(
    modules: Sequence[nn.Module], known: KnownModules, tensors: list[Tensor] | None = None, nested: bool = False
) -> list[Hashable]:
    found: list[Any] = [tuple(hooks) for hooks in EVERYWHERE]
    held: dict[int, Any] = {}
    places: dict[int, int] = {}
    last: list[Any] = []
    inside = [] if tensors is None else tensors
    for module in modules:
        attributes = vars(module)
        facts = known.get(module)
        if facts is None or not facts.hold(attributes):
            known.pop(module, None)
            facts = Facts.of(attributes)
            if facts.may_be_kept:
                known[module] = facts
        found += (type(module), facts.plain, facts.kinds, *map(id, attributes["_modules"].values()))
        for name in HOOKS:  # the keys, which are never reused
            if attributes[name]:
                found.append((name, *attributes[name]))
        if "forward" in attributes:  # a loop's calls put theirs there for a while
            value = attributes["forward"]
            last.append(value if type(value) in PLAIN else _known(value) if type(value) in SEEN else id(value))
        if facts.others:
            found += map(_known, facts.others)
            inside += tensors_in(facts.others)
            parts = [each for each in facts.others if isinstance(each, partial)]
            inside += tensors_in([(*each.args, *each.keywords.values()) for each in parts])
        for value in facts.held:
            held[id(value)] = value  # often the same for many modules
            found.append(places.setdefault(id(value), len(places)))
        for store in (attributes["_parameters"], attributes["_buffers"]):
            if store:
                found += [None if tensor is None else _place(tensor) for tensor in store.values()]
                if nested:  # else they are looked at by their owner
                    inside += [tensor for tensor in store.values() if tensor is not None]
    found += last
    found += [held_state(value, inside, nested) for value in held.values()]
    for base in {type(module): None for module in modules}:
        found += (base.forward, *(_of_class(kind) for kind in base.__mro__ if not _installed(kind)))
    return found


def _of_class(kind: type) -> Hashable:
    """The numbers and functions of a class, if it is the user's own: what is installed stays as it is."""
    if _installed(kind):
        return kind
    return tuple(value if type(value) in PLAIN else id(value) for value in vars(kind).values())


@lru_cache(maxsize=4096)
def _installed(kind: Any) -> bool:
    file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or ""
    return kind is object or _package(kind) in MACHINERY or INSTALLED in file


def held_state(value: Any, tensors: list[Tensor], nested: bool = False) -> Hashable:
    """By what something that Python holds is known; its tensors are added to `tensors`. `nested`: it is held by a
    module that something else holds, of which the modules that it holds are not looked at."""
    pickler = _Pickler(tensors, nested)
    try:
        pickler.dump(value)
    except Exception:  # its own, of whatever cannot be pickled or is large
        inside = list(value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values())
        there = tensors_in(inside)
        tensors += there
        return id(value), *(each for each in inside if type(each) in NUMBERS), *map(_known, there)
    return pickler.file.getvalue()


class _Small(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > LARGEST:
            raise ValueError("large")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Tensors, modules and functions by where they are."""

    def __init__(self, tensors: list[Tensor], nested: bool) -> None:
        self.file, self.tensors, self.nested = _Small(), tensors, nested
        super().__init__(self.file, 5)

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return id, (_known(value),)
        if kind is torch.Size:
            return id, (tuple(value),)
        if issubclass(kind, nn.Module) and not self.nested:
            return id, (tuple(_of_modules(modules_of(value), {}, self.tensors, nested=True)),)
        machinery = _package(kind) in MACHINERY and kind not in NUMBERS
        if (isinstance(value, REFERENCES) or machinery) and value is not id:
            there = tensors_in(list(getattr(value, "__dict__", {}).values())) if machinery else []
            self.tensors += there
            return id, (id(value), getattr(value, "training", None), tuple(map(_known, there)))
        return NotImplemented


class NamesRead:
    """What the user's functions name that were called in a pass: what these globals, and variables of functions around
    them, hold is part of what the pass's graph is known by.

    It is empty until a pass has been `watched`.
    """

    def __init__(self) -> None:
        self._functions: set[CodeType] = set()
        self._places: dict[tuple[int, str | int], dict[str, Any] | ref[FunctionType]] = {}
        """Where something is kept: by the name of a global, or the number of a variable around a function."""

    def state(self, tensors: list[Tensor] | None = None) -> tuple[Hashable, ...]:
        return tuple(_state_of(_value(place, name), tensors) for (_, name), place in self._places.items())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, functions are noted, unless another profiler is at work."""
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._note)
        collecting = gc.isenabled()
        gc.disable()  # its callbacks are not the pass's
        try:
            yield
        finally:
            sys.setprofile(None)
            if collecting:
                gc.enable()
        for key, place in [*self._places.items()]:
            if isinstance(place, ref) and place() is None:  # a function of the pass
                del self._places[key]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or code in self._functions:
            return
        self._functions.add(code)
        package = str(variables.get("__name__")).partition(".")[0]
        if INSTALLED in code.co_filename or package in MACHINERY or package in sys.stdlib_module_names:
            return
        with unseen_by_functions():
            for name in {each.argval for each in dis.get_instructions(code) if each.opname in GLOBALS}:
                if name[:2] != "__":
                    self._add(variables, name)
            if any(_may_change(frame.f_locals.get(name)) for name in code.co_freevars):
                for function in gc.get_referrers(code):
                    if isinstance(function, FunctionType):
                        for number in range(len(function.__closure__ or ())):
                            self._add(ref(function), number)

    def _add(self, place: dict[str, Any] | ref[FunctionType], name: str | int) -> None:
        with suppress(Exception):  # whatever a user's object raises that is only looked at
            if _may_change(_value(place, name)):
                self._places.setdefault((id(place), name), place)


def _value(place: dict[str, Any] | ref[FunctionType], name: str | int) -> Any:
    if isinstance(place, dict):
        return place.get(cast(str, name))
    function = place()
    return None if function is None else _content((function.__closure__ or ())[cast(int, name)])


def _state_of(value: Any, tensors: list[Tensor] | None = None) -> Hashable:
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, ModuleType):
        return tuple((type(each), each) for each in vars(value).values() if type(each) in NUMBERS)
    return (type(value), value) if type(value) in NUMBERS else held_state(value, [] if tensors is None else tensors)


def _may_change(value: Any) -> bool:
    """Whether something may be, or hold, another number later, and is no part of a library's machinery."""
    if isinstance(value, type):
        return _package(value) not in MACHINERY | sys.stdlib_module_names
    if isinstance(value, ModuleType):  # a user's own, such as one of settings
        name, file = value.__name__.partition(".")[0], getattr(value, "__file__", None) or ""
        return not (name in MACHINERY or name in sys.stdlib_module_names or INSTALLED in file)
    if value is None or isinstance(value, (Tensor, nn.Module)) or type(value) in NUMBERS:
        return True
    return not isinstance(value, REFERENCES) and _package(type(value)) not in MACHINERY


def _package(kind: type[Any]) -> str:
    return str(kind.__module__).partition(".")[0]


def _known(value: Any) -> Hashable:
    """A function with some of its arguments by what it is made of; a tensor that is no buffer by its address and, on
    the host, from where it is copied at capture only, by its version too."""
    if isinstance(value, partial):
        parts = (value.func, *value.args, *value.keywords, *value.keywords.values())
        return tuple(each if type(each) in PLAIN else id(each) for each in parts)
    place = _place(value)
    return (place, value._version) if value.device.type == "cpu" and not value.is_inference() else place


def _place(tensor: Tensor) -> Hashable:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, *tensor.shape, *tensor.stride()


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
        if type(value) not in SEEN and not isinstance(value, (nn.Module, ModuleType)):
            yield _state_of(value)


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
