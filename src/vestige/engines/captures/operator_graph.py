"""How does a pass shed its Python on a CPU? Its operators are recorded while they are followed, and run again later.

An operator graph is to a CPU what a CUDA graph is to a GPU: the operators of a pass with their arguments, of which
tensors that the pass made are made anew. What runs again is what was proved, on inputs of the same sizes, and gives the
same numbers, bit for bit. It takes for granted what `capture_guards` watches. Where a truth value or a whole number was
looked at, as whether a norm overflowed, a replay looks again: `GuardFailed` says that it is another one now.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.engines.captures.capture_guards import NamesRead, NotCapturable
from vestige.engines.example_axis.labels import WITHOUT_TENSORS, Labels, without_modes, written_by
from vestige.engines.per_example import execution
from vestige.randomness.generator_states import host_draws

aten = torch.ops.aten
AS_STRIDED, INDEX, LIFT = aten.as_strided.default, aten.index.Tensor, aten.lift_fresh.default
REFUSED = frozenset(("set_", "resize_", "resize_as_", "set_data", "_pack_padded_sequence", "_assert_async"))
"""Operators that give a tensor other memory, or whose sizes follow from values without torch's saying so."""
MASKS = (torch.bool, torch.uint8)
TRIES = 3
"""How often a pass is recorded until what it was given from outside has been seen before."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python's garbage collector does not run: much is made that stays, and what it frees while a CUDA graph is
    captured, an older graph above all, would break the capture off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class GuardFailed(Exception):
    """A value that decided something when the graph was recorded is another one now."""


class Made(NamedTuple):
    """A tensor that a graph makes: its number, and that of its storage."""

    number: int
    storage: int


class Held(NamedTuple):
    """A tensor that was there before."""

    number: int


Place = Made | Held


class SaveDraws(NamedTuple):
    """Here the state of the random generator is one to which it is set later."""

    number: int


class RestoreDraws(NamedTuple):
    """Here the generator was set to an earlier state, as checkpointing does to draw the same again."""

    number: int


class Kind(NamedTuple):
    """What is to be known of an operator."""

    run: Any
    """What is called in a replay."""
    draws: bool
    sized: bool
    """Whether the sizes of what it gives may follow from values."""
    writes: bool
    aliases: bool
    """Whether its outputs may lie in the memory of its arguments."""
    reshapes: bool
    """Whether it gives a tensor another shape in place. In a replay it gives another tensor."""


class Call(NamedTuple):
    """An operator with its arguments, in which places stand for tensors."""

    run: Any
    args: list[Any]
    kwargs: dict[str, Any]
    given: list[Place]
    """The tensors among its arguments."""
    makes: list[Made | None]
    """Its outputs; None for one that was there before."""
    alone: bool
    """Whether it gives one tensor, and no list of them."""
    changed: list[int]
    """The storages that it makes or writes to."""
    kept: bool
    """Whether it runs whatever follows from it: it draws, writes to what was there before, or is a guard."""
    expected: int | None
    """What it must give, if it is a guard."""


Entry = Call | SaveDraws | RestoreDraws


class Outside:
    """What passes of a model were given and did not make: memory, and constants made of Python's numbers."""

    def __init__(self) -> None:
        self._known: dict[Hashable, StorageWeakRef] = {}
        """By address, or by value. As long as they are here, no other storage has their addresses."""

    def note(self, tensor: Tensor, constant: bool) -> bool:
        """Whether an earlier pass was given it, too."""
        storage = tensor.untyped_storage()
        value = tensor.dtype, tensor.shape, tensor.numpy(force=True).tobytes() if constant else b""
        key: Hashable = value if constant else storage._cdata
        known = key in self._known
        self._known.setdefault(key, StorageWeakRef(storage))
        return known


Values = dict[Any, Tensor]
"""SENSITIVE: what a graph has made for a later one."""
Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


@cache
def kind_of(func: Any) -> Kind:
    """Raises `NotCapturable` of an operator that cannot be run from a list."""
    name = func.overloadpacket.__name__ if isinstance(func, OpOverload) else str(func)
    reshapes = isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags
    run = getattr(getattr(aten, name.removesuffix("_"), None), func._overloadname, None) if reshapes else func
    if not isinstance(run, OpOverload) or name in REFUSED:
        raise NotCapturable(f"{name} cannot be run from a list of operators")
    arguments, tags = func._schema.arguments, func.tags
    return Kind(
        run=run._op,
        draws=torch.Tag.nondeterministic_seeded in tags,
        sized=torch.Tag.dynamic_output_shape in tags,
        writes=not reshapes and any(each.alias_info is not None and each.alias_info.is_write for each in arguments),
        aliases=any(each.alias_info is not None for each in func._schema.returns) or func.namespace != "aten",
        reshapes=reshapes,
    )


class GraphMemory:
    """The graphs of one pass, in their order, and what is known of the tensors that they make."""

    def __init__(self, outside: Outside, own: list[Tensor], labels: Labels, names: NamesRead) -> None:
        """`outside` and `names` are those of all passes of the model; `own` are tensors that this one has from its
        owner."""
        self.graphs: list[OperatorGraph] = []
        self.names = names
        self.known, self.own, self._outside, self._labels, self._tries = False, own, outside, labels, 0
        self.refused = False
        """Whether a pass that was recorded cannot be replayed; it counts, but no other is to be recorded."""
        self.given: Collection[int] = ()
        """The addresses of storages that it was given from outside, but for its owner's, once it is complete."""
        self.forget()

    def forget(self) -> None:
        """Its graphs are recorded anew."""
        for graph in self.graphs:
            graph.forget()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """By the addresses of storages that were made while graphs were recorded: their numbers. As long as they are
        here, no other storage has their addresses."""
        self.tensors: dict[int, dict[Geometry, Made]] = {}
        """Of each of these storages the tensors that lie in it."""
        self.count = 0
        """Of these tensors."""
        self.objects: dict[int, tuple[weakref.ref[Tensor], Place]] = {}
        """Places of Python's tensors that are alive."""
        self.states: dict[bytes, int] = {}
        """States of the random generator that were met, and their numbers."""

    def complete(self) -> bool:
        """Whether all graphs are recorded and can be replayed; else the pass is recorded, again if need be: what it was
        given from outside must have been given to another pass of the model, too. What is made for each pass by other
        means than operators would be that of the first one for ever; if such is met again and again, it is refused. To
        be asked when the last graph has been recorded."""
        if self.known or not all(graph.recorded for graph in self.graphs):
            return self.known
        own = {each.untyped_storage()._cdata for each in self.own}
        held = {each.untyped_storage()._cdata: each for graph in self.graphs for each in graph.held}
        constants = set[int]().union(*(graph.constants for graph in self.graphs))
        seen = []
        for address, each in held.items():
            if address not in own:
                seen.append(self._outside.note(each, address in constants))
        if all(seen):
            self.given, self.known = held.keys() - own - constants, True
            self.storages, self.tensors, self.objects, self.states = {}, {}, {}, {}
            return True
        self._tries += 1
        self.refused = self._tries >= TRIES
        self.forget()
        return False

    def makes(self, tensor: Tensor) -> bool:
        """Whether graphs that are being recorded make the memory of a tensor."""
        return tensor.untyped_storage()._cdata in self.storages

    @property
    def usable(self) -> bool:
        """Whether the pass may be recorded or replayed: no examples are in what it is given from outside."""
        return not self.refused and self._labels.addresses().isdisjoint(self.given)

    def require_public(self, held: Sequence[Tensor]) -> None:
        """Raise `NotCapturable` if a pass has put something of its examples where others find it."""
        own = {each.untyped_storage()._cdata for each in self.own}
        there = {each.untyped_storage()._cdata for each in held} - own
        if not there.isdisjoint(self._labels.addresses()):
            raise NotCapturable("the pass writes something of the examples to memory that was there before")

    @without_collection()
    def compile(self) -> None:
        """What graphs make for each other is known once all are recorded."""
        tensors, storages, states = set[Made](), set[int](), set[int]()
        for graph in reversed(self.graphs):
            later = set(tensors)
            entries = _needed(graph.entries, tensors, storages, states)
            before, made = set[Made](), set[Made]()
            for each in entries:
                if isinstance(each, Call):
                    before.update(place for place in each.given if isinstance(place, Made) and place not in made)
                    made.update(place for place in each.makes if place is not None)
            given = [(each, each not in later or each in made) for each in sorted(before)]
            graph.run = _runnable(graph.held, entries, given, sorted(made & later))
            graph.entries = []


class OperatorGraph:
    """Some work, which is recorded when it is first done, and run from its operators from then on.

    Formal guarantees: a replay applies the operators that were recorded, in their order, to what the tensors that were
    there before hold now, or raises.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        memory.graphs.append(self)
        self.forget()

    def forget(self) -> None:
        self.entries: list[Entry] = []
        self.held: list[Tensor] = []
        self.constants: set[int] = set()
        """Storages that the pass has made of Python's numbers."""
        self.run: Callable[[Values], None] | None = None
        self.recorded = False
        self._held: dict[tuple[int, Geometry], Held] = {}
        self._draws, self._drawing = b"", False

    def replay(self, work: Callable[[], object], values: Values) -> None:
        """Do some work, that which was recorded; `values` are what graphs make for later ones of the pass. Raises
        `NotCapturable` where it cannot be run again, and `GuardFailed`."""
        state = torch.get_rng_state() if self._drawing or not self._memory.known else None
        try:
            if not self._memory.known:
                self._record(work)
                return
            if self.run is None:
                self._memory.compile()
            assert self.run is not None
            with execution.unseen(), torch.no_grad():
                self.run(values)
        except BaseException:
            values.clear()
            if state is not None:  # what takes its place draws the same
                torch.set_rng_state(state)
            raise

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(self, work: Callable[[], object]) -> None:
        self.forget()
        python = host_draws()[1:]
        self._save_draws()
        done = False
        try:
            recording = execution.recording(Recorder(self))
            with self._memory.names.watched(), without_collection(), without_modes(), recording:
                torch.empty(0)
                assert self._memory.storages, "operators are seen where they are recorded"
                work()
                done = True
            self._meet_draws()
            if host_draws()[1:] != python:
                raise NotCapturable("the pass draws random numbers on the host")
            if not self._memory.names.settled:
                raise NotCapturable("the pass changes a variable that it reads")
            self._memory.require_public(self.held)
            self.recorded = True
        except NotCapturable:
            if not done:
                raise
            self._memory.refused = True  # the work is done, and nothing is to be done twice

    def _save_draws(self) -> None:
        self._draws = torch.get_rng_state().numpy().tobytes()
        known = self._memory.states
        if self._draws not in known:
            known[self._draws] = len(known)
            self.entries.append(SaveDraws(known[self._draws]))

    def _meet_draws(self) -> None:
        """If the generator was set since the last operator that drew, it is to an earlier state."""
        state = torch.get_rng_state().numpy().tobytes()
        if state == self._draws:
            return
        number = self._memory.states.get(state)
        if number is None:
            raise NotCapturable("the pass seeds the generator of random numbers")
        self.entries.append(RestoreDraws(number))

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind.draws:
            self._meet_draws()
            self._drawing = True
        given: list[Place] = []
        places = [each if type(each) in WITHOUT_TENSORS else self._placed(each, given) for each in args]
        named = {name: self._placed(each, given) for name, each in kwargs.items()} if kwargs else kwargs
        if kind.sized and not (func is INDEX and all(each.dtype not in MASKS for each in args[1] if each is not None)):
            raise NotCapturable(f"{func.overloadpacket.__name__} looks at values")
        changed, outside = list[int](), False
        for each in written_by(func, args, kwargs) if kind.writes else ():
            known = self._memory.storages.get(each.untyped_storage()._cdata)
            if known is None:
                outside = True
            else:
                changed.append(known[1])
        if func is LIFT:
            self.constants.add(args[0].untyped_storage()._cdata)
        found = func(*args, **kwargs)
        alone, makes, expected = isinstance(found, Tensor), [], None
        if alone or type(found) in (tuple, list):
            before = _storages_of([*args, *kwargs.values()]) if kind.aliases else ()
            for each in (found,) if alone else found:
                makes.append(None if each is None else self._output(each, before, changed))
            if kind.reshapes and makes == [None]:
                raise NotCapturable("something that was there before is given another shape")
        elif isinstance(found, bool | int) and given:
            expected = found
        elif given:
            raise NotCapturable(f"{func.overloadpacket.__name__} looks at values")
        kept = kind.draws or outside or expected is not None
        if changed or kept or any(makes):  # others are views of what was there before
            self.entries.append(Call(kind.run, places, named, given, makes, alone, changed, kept, expected))
        if kind.draws:
            self._save_draws()
        return found

    def _output(self, tensor: Tensor, before: Sequence[int], changed: list[int]) -> Made | None:
        """Its place, if it does not lie in memory that was there before; memory that is new counts as changed."""
        if not isinstance(tensor, Tensor):
            raise NotCapturable("an operator gives something else than tensors")
        storage, memory = _storage(tensor), self._memory
        known = memory.storages.get(storage._cdata)
        if known is None:
            if storage._cdata in before:
                return None
            known = memory.storages[storage._cdata] = StorageWeakRef(storage), len(memory.storages)
            memory.tensors[known[1]] = {}
            changed.append(known[1])
        return self._name(tensor, known[1])

    def _name(self, tensor: Tensor, storage: int) -> Made:
        """A new number for a tensor, or that of one that is the same."""
        memory, geometry = self._memory, _geometry(tensor)
        there = memory.tensors[storage]
        place = there.get(geometry)
        if place is None:
            place = there[geometry] = Made(memory.count, storage)
            memory.count += 1
        memory.objects[id(tensor)] = weakref.ref(tensor), place
        return place

    def _placed(self, value: Any, given: list[Place]) -> Any:
        """An argument with places for its tensors, which are added to those `given`."""
        kind = type(value)
        if kind is list or kind is tuple:
            return [self._placed(each, given) for each in value]
        if not isinstance(value, Tensor):
            return value
        known = self._memory.objects.get(id(value))
        place = self._place(value) if known is None or known[0]() is not value else known[1]
        given.append(place)
        return place

    def _place(self, tensor: Tensor) -> Place:
        memory, storage = self._memory, _storage(tensor)
        known, geometry = memory.storages.get(storage._cdata), _geometry(tensor)
        if known is None:
            place = self._held.get((storage._cdata, geometry))
            if place is None:
                place = self._held[storage._cdata, geometry] = Held(len(self.held))
                self.held.append(tensor.detach())  # without autograd's graph, which holds the pass
            return place
        there = memory.tensors[known[1]]
        if geometry not in there:  # of this memory autograd has made another tensor, without an operator
            first, other = next(iter(there.items()))
            if first[0] != geometry[0]:
                raise NotCapturable("a tensor of another type in the same memory")
            made = self._name(tensor, known[1])
            args = [other, *map(list, geometry[1:3]), geometry[3]]
            self.entries.append(Call(AS_STRIDED._op, args, {}, [other], [made], True, [], False, None))
        return there[geometry]


def _storages_of(args: Sequence[Any]) -> list[int]:
    """The addresses of the storages of tensors."""
    found: list[int] = []
    for each in args:
        if isinstance(each, Tensor):
            found.append(each.untyped_storage()._cdata)
        elif type(each) in (list, tuple):
            found += _storages_of(each)
    return found


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    if tensor.layout != torch.strided:
        raise NotCapturable("a sparse tensor")
    return tensor.untyped_storage()


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


class Recorder(TorchDispatchMode):
    """Adds every operator to a graph, and runs it."""

    def __init__(self, graph: OperatorGraph) -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.graph.record_call(func, args, kwargs or {})


# --- from a list of operators to a function ---------------------------------------------------------------------------


def _needed(entries: Sequence[Entry], tensors: set[Made], storages: set[int], states: set[int]) -> list[Entry]:
    """The entries without which these tensors, what lies in these storages, these states of the generator, or what was
    there before would be another; the sets are then what is needed from before."""
    found: list[Entry] = []
    for each in reversed(entries):
        if type(each) is RestoreDraws:
            states.add(each.number)
        elif type(each) is SaveDraws:
            if each.number not in states:
                continue
        elif each.kept or not tensors.isdisjoint(each.makes) or not storages.isdisjoint(each.changed):
            tensors.difference_update(each.makes)
            tensors.update(place for place in each.given if type(place) is Made)
            storages.update(place.storage for place in (*each.given, *each.makes) if type(place) is Made)
        else:
            continue
        found.append(each)
    return found[::-1]


def _runnable(
    held: Sequence[Tensor], entries: Sequence[Entry], given: Sequence[tuple[Made, bool]], last: Sequence[Made]
) -> Callable[[Values], None]:
    """The entries as a function of what earlier graphs have made: `given`, of which some is needed no longer. What is
    `last` is for later ones."""
    names: dict[Made, str] = {}
    functions: list[Any] = []
    constants: list[Any] = []
    lines = ["def run(functions, constants, held, values):"]

    def written(value: Any) -> str:
        kind = type(value)
        if kind is Made:
            return names.setdefault(value, f"v{len(names)}")
        if kind is Held:
            return f"held[{value.number}]"
        if kind is list and any(type(each) is Made or type(each) is Held for each in value):
            return f"[{', '.join(map(written, value))}]"
        if value is None or value is True or value is False:
            return str(value)
        constants.append(tuple(value) if kind is list else value)
        return f"constants[{len(constants) - 1}]"

    lines += [f"  {written(each)} = values.{'pop' if over else '__getitem__'}({each.number})" for each, over in given]
    ends: dict[Made, int] = {}
    for place, entry in enumerate(entries):
        if isinstance(entry, Call):
            for each in (*entry.given, *entry.makes):
                if type(each) is Made:
                    ends[each] = place
    ends |= dict.fromkeys(last, len(entries))
    over: dict[int, list[Made]] = {}
    for made, place in ends.items():
        over.setdefault(place, []).append(made)
    for place, entry in enumerate(entries):
        if not isinstance(entry, Call):
            state = f"values['draws', {entry.number}]"
            lines.append(f"  {state} = get()" if isinstance(entry, SaveDraws) else f"  set({state})")
            continue
        arguments = [*map(written, entry.args), *(f"{name}={written(each)}" for name, each in entry.kwargs.items())]
        call = f"functions[{len(functions)}]({', '.join(arguments)})"
        functions.append(entry.run)
        left = ["_" if each is None else written(each) for each in entry.makes]
        if entry.expected is not None:
            lines.append(f"  if {call} != {written(entry.expected)}: raise GuardFailed")
        elif set(left) <= {"_"}:
            lines.append(f"  {call}")
        else:
            lines.append(f"  {left[0] if entry.alone else '[' + ', '.join(left) + ']'} = {call}")
        if place in over:
            lines.append(f"  {' = '.join(map(written, over[place]))} = None")
    lines += [f"  values[{each.number}] = {written(each)}" for each in last]
    space: dict[str, Any] = {"GuardFailed": GuardFailed, "get": torch.get_rng_state, "set": torch.set_rng_state}
    exec(_compiled("\n".join([*lines, "  return"])), space)
    run, operators, fixed, there = space["run"], tuple(functions), tuple(constants), tuple(held)
    return lambda values: run(operators, fixed, there, values)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    """Passes of other sizes mostly have the same source."""
    return compile(source, "<operator graph>", "exec")
