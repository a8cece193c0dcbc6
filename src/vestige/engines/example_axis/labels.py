"""Which axis of a tensor counts the examples? Every tensor of a pass has a label, and one rule per operator moves it.

A label says which example each number of a tensor depends on:

- no label: public. It depends on no example: parameters, buffers, constants, positions, random draws.
- `Rows`: entry r of one axis belongs to example (r // inner + first) % count, and depends on that example alone.
- `Mixed`: it depends on several examples, or on an operator that has no rule. It remembers where that came about.

Labels belong to memory, not to Python objects: a storage is cut into units of equal length that belong to the examples
in turn, so that every view of it has a label without a rule of its own, and what is written through a view is known of
the whole. Labels of earlier batches stay for as long as their memory is alive: rows of another batch are not this row's
own.

Formal guarantees: if every operator of a pass has a sound rule (`rules`), then a tensor labelled `Rows` is a
function of public values and, for each entry, of that entry's example. Backward passes run under the same rules.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vestige.engines.per_example.execution import AS_IT_IS, unseen, unseen_by_functions
from vestige.engines.per_example.gradient_forms import Place

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes of a tensor; its strides and its offset in its storage, in bytes."""
OUTSIDE = tuple(os.path.dirname(module.__file__ or "") for module in (torch, sys.modules["vestige"]))
"""Folders whose lines are never the user's."""


class Rows(NamedTuple):
    """Entry r of `axis` belongs to example (r // inner + first) % count of a batch; if axis is -1, all of it belongs to
    example `first`."""

    axis: int
    inner: int
    count: int  # type: ignore[assignment]
    batch: int
    first: int = 0

    def at(self, axis: int) -> Rows:
        return self if axis == self.axis else Rows(axis, *self[1:])


@dataclass(frozen=True)
class Mixed:
    """A value that depends on several examples."""

    operator: str
    where: str
    """File and line of the first call outside torch and this package."""
    why: str = "mixes examples"
    unknown: bool = False
    """Whether that is not known: the operator has no rule, or shows values to Python."""

    def __str__(self) -> str:
        return f"{self.operator} at {self.where} {self.why}"

    def plain(self) -> Mixed:
        """What is made of it by an operator that knows no more of it."""
        return self


class SumCell:
    """SENSITIVE: memory that a backward pass would fill with a sum over all examples of a batch: each one's part of it,
    in factored form (`sums`). `uses` are gradients that all add up."""

    __slots__ = ("batch", "count", "known", "mixed", "uses")

    def __init__(self, uses: Sequence[Any], count: int, batch: int) -> None:
        self.uses, self.count, self.batch = uses, count, batch
        self.known: dict[tuple[ViewCall, ...], Any] = {}
        """The parts of views, until it is written to."""
        self.mixed: Mixed | None = None
        """What was written to it, if that was no sum of the examples' parts."""


@dataclass(frozen=True, eq=False)
class ViewCall:
    """An operator that gives another name to some numbers of a tensor: its arguments after the tensor, which of its
    outputs, and the shapes before and after."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    before: tuple[int, ...]
    after: tuple[int, ...]
    number: int | None = None

    def on(self, tensor: Tensor) -> Tensor:
        found: Any = self.func(tensor, *self.args, **self.kwargs)
        return found if self.number is None else found[self.number]  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Summed:
    """A view of a sum over the examples. Its tensor holds no numbers."""

    cell: SumCell
    views: tuple[ViewCall, ...] = ()


Label = Rows | Mixed | Summed
Labelled = list[tuple[Tensor, Label]]
"""Tensors that depend on examples, with their labels."""


class NotApart(ValueError):
    """A value that must be one example's own is not, or (`unknown`) cannot be proved to be."""

    def __init__(self, problem: str | Mixed, unknown: bool = False) -> None:
        super().__init__(str(problem))
        self.unknown = problem.unknown if isinstance(problem, Mixed) else unknown


class Region(NamedTuple):
    """The number at address a of a storage belongs to example ((a - start) // unit) % count."""

    start: int
    unit: int
    count: int  # type: ignore[assignment]
    batch: int

    def rows(self, geometry: Geometry) -> Rows | None:
        """The label of a view with this geometry; None if its examples do not lie along one axis."""
        sizes, strides, offset = geometry
        start, unit, count, batch = self
        period = unit * count
        first, within = divmod(offset - start, unit)
        axis, inner, reach = -1, 1, unit
        for place in sorted(range(len(sizes)), key=strides.__getitem__):
            size, stride = sizes[place], strides[place]
            if size == 1:
                if stride == unit and axis < 0 and (count == 1 or _none_wider(sizes, strides, unit, period)):
                    axis, inner = place, 1
                continue
            if stride == 0 or stride % period == 0 or within + stride * (size - 1) < reach:
                within += stride * (size - 1) if stride % period else 0
                continue
            if axis >= 0 and sizes[axis] > 1:
                return None
            if stride == unit:
                axis, inner = place, 1
            elif unit % stride == 0 and within < stride and size % (unit // stride) == 0:
                axis, inner, reach = place, unit // stride, stride  # other axes stay inside one of its entries
            else:
                return None
        if axis < 0 and count == 1 and sizes:
            axis, inner = 0, max(1, sizes[0])  # of one example alone: every axis is its own
        return Rows(axis, inner, count, batch, first % count)


def _none_wider(sizes: Sequence[int], strides: Sequence[int], unit: int, period: int) -> bool:
    """Whether no axis of more than one entry crosses units: then an axis of one entry holds the examples."""
    return not any(n > 1 and s and s % period and s * (n - 1) >= unit for n, s in zip(sizes, strides, strict=True))


OUT_OF_ORDER = "takes entries of several examples out of their order"


class Pieces(NamedTuple):
    """Parts of a storage that single examples were written to, one after the other; the rest of it is public."""

    count: int  # type: ignore[assignment]
    batch: int
    spans: tuple[tuple[int, int, int], ...] = ()
    """Of each write: the example, and the addresses of the first and the last byte."""

    def label(self, view: View) -> Rows | Mixed | None:
        """The label of a view that has a row for each example, if nothing was written to another one's row, or that
        shows one example at most."""
        first, last = _extent(view)
        spans = [each for each in self.spans if first <= each[2] and each[1] <= last]
        if not spans or 0 in view[0]:
            return None
        (sizes, strides, _), examples = _in_bytes(view), {example for example, _, _ in spans}
        if sizes and sizes[0] == self.count:
            unit, row = strides[0], _extent((sizes[1:], view[1][1:], 0, view[3]))
            places = [((start - first) // unit, (stop - first) // unit, each) for each, start, stop in spans]
            if row[1] < unit and all(here == there == example for here, there, example in places):
                return Rows(0, 1, self.count, self.batch)
        if len(examples) == 1:
            return Rows(-1, 1, self.count, self.batch, examples.pop())
        return mixed("a view", OUT_OF_ORDER, unknown=not sizes or sizes[0] != self.count)

    def with_write(self, example: int, view: View) -> Pieces:
        return self._replace(spans=(*self.spans, (example, *_extent(view))))


View = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Which part of its storage a tensor is: its sizes, strides and offset, counted in entries, and the bytes of an
entry."""


def _extent(view: View) -> tuple[int, int]:
    """The addresses of the first and the last byte of a view."""
    sizes, strides, offset, width = view
    last = offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return width * offset, width * last + width - 1


class Memory:
    """What is known of one storage, by the label of one view of it."""

    reduction: str | None = None
    """How a model would have reduced what has a number for each example here, by "mean" or "sum": a loss."""

    def __init__(self, storage: UntypedStorage, view: View, label: Label) -> None:
        self.ref = StorageWeakRef(storage)
        """Keeps the storage's address from being used again while its label is kept."""
        self.known: dict[View, Label] = {view: label}
        """Labels of views; of those that no region describes, the only place where they are kept."""

    @cached_property
    def region(self) -> Region | Pieces | SumCell | Mixed | None:
        """What the label of the first view says of the whole storage: found when another view is asked for."""
        view, label = next(iter(self.known.items()))
        if isinstance(label, Summed):
            return mixed("a view", "is of a sum over the batch")
        return label.plain() if isinstance(label, Mixed) else _region(label, _in_bytes(view))


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors in lists, tuples and dictionaries."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = list(given.values())
    return [one for each in given for one in tensors_in(each)] if isinstance(given, list | tuple) else []


def view_of(tensor: Tensor) -> View:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.element_size()  # type: ignore[return-value]


def _in_bytes(view: View) -> Geometry:
    sizes, strides, offset, width = view
    return sizes, tuple([width * step for step in strides]), width * offset


def _region(label: Rows, geometry: Geometry) -> Region | None:
    """The region of which a view with this geometry has this label; None if there is none."""
    sizes, strides, offset = geometry
    if label.axis < 0:
        unit = max(1, offset + sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True)) + 64)
        return Region(-label.first * unit, unit, label.count, label.batch)
    unit = strides[label.axis] * label.inner
    if not unit:
        return None
    for start in (offset - offset % unit, offset):  # what lies before a part in its unit is that example's, too
        region = Region(start - label.first * unit, unit, label.count, label.batch)
        if 0 in sizes or region.rows(geometry) == label:
            return region
    return None


def covers(tensor: Tensor) -> bool:
    """Whether a tensor has every number of its storage, each once."""
    size = tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size() == size and Place.of_view(tensor, tensor) is not None


@cache
def has_own_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of a class are memory, rather than made of other tensors that operators are passed on to."""
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


in_transform: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of vmap's or grad's, which has no memory of its own."""
STRIDED = torch.strided


def untransformed(tensor: Tensor) -> Tensor:
    """What a tensor of vmap's or grad's is made of."""
    while in_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


UNFOLLOWED = "is made of examples and cannot be followed: use an ordinary tensor"


WITHOUT_TENSORS = frozenset((int, float, bool, str, type(None), slice, torch.Size, torch.dtype, torch.device))
"""Types of arguments that hold none."""


class Labels:
    """The labels of all memory that depends on examples."""

    def __init__(self) -> None:
        self._memory: dict[int, Memory] = {}
        self.identity: dict[int, StorageWeakRef] = {}
        """Storages that hold 0, 1, 2, ...: an index by them, entry by entry, is the identity."""
        self.zeros: dict[int, StorageWeakRef] = {}
        """Storages that are all zeros: during a capture their values cannot be read."""
        self.trackers: list[Tracker] = []
        """Those that are on and share these labels: one of them applies the rules."""
        self.turn: Tracker | None = None
        """That one: the one whose model is called, or the first that meets an operator."""
        self.sums: dict[int, Memory] = {}
        """Of sums over the examples, whose parts are large: freed as soon as the memory is."""
        self.held: dict[int, tuple[StorageWeakRef, Tracker, tuple[int, int]]] = {}
        """Memory that parts of sums are made of until they are clipped; in whose passes, how many bytes it has, and
        where."""
        self.laid: tuple[StorageWeakRef, int, Tensor] | None = None
        """A storage of long rows of odd width, its version, and the same rows as matrix products read them faster."""
        self.taken: set[int] | None = None
        """Storages of examples that operators were given since this was set to an empty set."""

    def get(self, tensor: Tensor) -> Label | None:
        with unseen_by_functions():
            return self._found(tensor)

    def among(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Labelled:
        """The arguments of an operator that depend on examples, lists of them included."""
        found: Labelled = []
        with unseen_by_functions():
            for each in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(each, Tensor):
                    label = self._found(each)
                    if label is not None:
                        found.append((each, label))
                elif type(each) in (list, tuple):
                    found += self.among(each, {})
        return found

    def memories(self, given: Iterable[Any]) -> list[int]:
        """What says of tensors that depend on examples where their numbers are, in lists and dictionaries too: what is
        made of them by a transform is theirs. Quicker than `among`."""
        found: list[int] = []
        for each in given:
            if isinstance(each, Tensor):
                tensor = untransformed(each) if in_transform(each) else each
                own = tensor.layout is STRIDED and has_own_memory(type(tensor))
                place = tensor.untyped_storage()._cdata if own else id(tensor)
                if place in self._memory if own else self._found(tensor) is not None:
                    found.append(place)
            elif isinstance(each, list | tuple):
                found += self.memories(each)
            elif isinstance(each, dict):
                found += self.memories(each.values())
        return found

    def any_of(self, given: Iterable[Any]) -> bool:
        """Whether one of these is, or has inside, a tensor that depends on examples; quicker than `memories`."""
        memory = self._memory
        if not memory:
            return False
        with unseen_by_functions():
            for each in given:
                kind = type(each)
                if kind is Tensor or kind is Parameter:
                    try:
                        found = each.untyped_storage()._cdata in memory
                    except RuntimeError:  # a sparse tensor, or one of a transform
                        found = bool(self.memories((each,)))
                else:
                    found = kind not in WITHOUT_TENSORS and bool(self.memories((each,)))
                if found:
                    return True
        return False

    def _found(self, tensor: Tensor) -> Label | None:
        if in_transform(tensor):
            raise NotApart(mixed("a transform of torch.func", "is not followed", unknown=True))
        if not has_own_memory(type(tensor)):
            return self._of_parts(tensor)
        storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
        memory = None if storage is None else self._memory.get(storage._cdata)
        if memory is None or storage is None:  # a sparse tensor of examples is refused where it is made
            return None
        if not storage.nbytes() and tensor.numel():
            raise NotApart(mixed("resize_ of a storage", "took away what a tensor of the examples holds"))
        view = view_of(tensor)
        found = memory.known.get(view)
        if found is None:
            region = memory.region
            if isinstance(region, SumCell):
                numbers = tensor.untyped_storage().nbytes() // view[3]
                found = Summed(region, (ViewCall(AS_STRIDED, view[:3], {}, (numbers,), view[0]),))
            elif isinstance(region, Pieces):
                found = region.label(view)
            elif isinstance(region, Mixed):
                found = region
            elif 0 in view[0]:
                return None  # it has no numbers
            else:
                found = region and region.rows(_in_bytes(view))
                found = found or mixed("a view", OUT_OF_ORDER)
            if found is not None:
                memory.known[view] = found
        return found

    def fills(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory of its own that is filled with sums, rather than stands for one."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return memory is not None and isinstance(vars(memory).get("region"), SumCell)  # where `fill` has put it

    def fill(self, tensor: Tensor, cell: SumCell) -> None:
        """The memory of a tensor is a sum over the examples."""
        self.no_longer_known([tensor])
        storage, view = tensor.untyped_storage(), view_of(tensor)
        self._memory[storage._cdata] = memory = Memory(storage, view, Summed(cell))
        memory.region, memory.known = cell, {}
        self.sums[storage._cdata] = memory

    def _of_parts(self, wrapper: Tensor) -> Label | None:
        """A tensor that is made of others, such as a nested one, is public if they all are."""
        flatten = getattr(wrapper, "__tensor_flatten__", None)
        parts = [getattr(wrapper, name) for name in flatten()[0]] if flatten is not None else []
        if flatten is None or any(isinstance(part, Tensor) and self._found(part) is not None for part in parts):
            return mixed(f"a {type(wrapper).__name__}", UNFOLLOWED, unknown=True)
        return None

    def set(self, tensor: Tensor, label: Label) -> None:
        """Label memory that is new."""
        with unseen_by_functions():
            if tensor.layout != torch.strided or tensor.is_nested or not has_own_memory(type(tensor)):
                raise NotApart(mixed("a sparse or nested tensor", UNFOLLOWED, unknown=True))
            storage, view = tensor.untyped_storage(), view_of(tensor)
            if isinstance(label, Rows) and label.axis >= len(view[0]):
                raise IndexError(f"a rule gives examples along axis {label.axis} of a tensor of {len(view[0])} axes")
            self._memory[storage._cdata] = memory = Memory(storage, view, label)
        if isinstance(label, Summed):
            self._forget_sums()
            self.sums[storage._cdata] = memory

    def _forget_sums(self) -> None:
        """Remove sums whose memory is freed."""
        for key in [key for key, each in self.sums.items() if each.ref.expired()]:
            over = self.sums.pop(key)
            if self._memory.get(key) is over:
                del self._memory[key]

    def write(self, tensor: Tensor, label: Label | None) -> None:
        """Something with this label was written to a tensor; its storage may hold more than that."""
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        whole = covers(tensor)
        if not whole and isinstance(label, Rows) and label.axis < 0 and self.takes(tensor, label):
            held = memory.region if memory is not None else Pieces(label.count, label.batch)
            assert isinstance(held, Pieces)
            if memory is None:
                memory = self._memory[storage._cdata] = Memory(storage, view_of(tensor), label)
            memory.region, memory.known = held.with_write(label.first, view_of(tensor)), {}
            return
        if whole or memory is None:
            if isinstance(label, Rows) and Place.of_view(tensor, tensor) is None:
                label = mixed("a write", "puts several examples in one place")
            if label is not None:
                self.set(tensor, label)
            elif memory is not None:
                del self._memory[storage._cdata]
            return
        if label is None or (isinstance(label, Rows) and label == self.get(tensor)):
            return
        where = label.plain() if isinstance(label, Mixed) else mixed("a write", "puts examples beside others")
        memory.region, memory.known = where, {}

    def takes(self, tensor: Tensor, label: Rows) -> bool:
        """Whether one example may be written to a part of the tensor's storage: it holds public values, or others' of
        the same batch."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        held = None if memory is None else memory.region
        return memory is None or (isinstance(held, Pieces) and held[:2] == (label.count, label.batch))

    def counts(self, index: Tensor, size: int, step: int = 1) -> bool:
        """Whether a public tensor is 0, 1, 2, ... in steps; while a pass is captured, only where it was made so."""
        known = index.untyped_storage()._cdata in self.identity and not index.storage_offset() and step == 1
        if index.is_cuda and (known or torch.cuda.is_current_stream_capturing()):
            return known
        with unseen():
            first = index.as_strided((size,), (step,))
            return torch.equal(first, torch.arange(size, dtype=index.dtype, device=index.device))

    def no_longer_known(self, written: Sequence[Tensor]) -> None:
        """What held 0, 1, 2, ..., or zeros, was written to. Raises `NotApart` if gradients are still made of it."""
        for tensor in written:
            storage = tensor.untyped_storage()._cdata
            if storage in self.held:
                raise NotApart(
                    mixed(
                        "a write",
                        "changes what gradients are made of until the step, so write there after it",
                        unknown=True,
                    )
                )
            self.identity.pop(storage, None)
            self.zeros.pop(storage, None)

    def know_zeros(self, tensor: Tensor) -> None:
        """A tensor was filled with zeros."""
        with unseen_by_functions():
            if tensor.layout == torch.strided and has_own_memory(type(tensor)) and covers(tensor):
                storage = tensor.untyped_storage()
                self.zeros[storage._cdata] = StorageWeakRef(storage)

    def hold(self, factor: Tensor, tracker: Tracker) -> None:
        """A gradient that is still to be clipped is made of this: it must stay as it is, also where it is public."""
        storage = factor.untyped_storage()
        if storage._cdata not in self.held:
            self.held[storage._cdata] = StorageWeakRef(storage), tracker, _placed(storage)

    def require_held(self, tracker: Tracker) -> None:
        """Raise `NotApart` if some of what its parts of sums are made of was taken away by its storage, which no
        operator does."""
        for ref, owner, before in self.held.values():
            storage = UntypedStorage._new_with_weak_ptr(ref.cdata) if owner is tracker else None  # type: ignore[attr-defined]
            if storage is not None and _placed(storage) != before:
                raise NotApart(
                    "the storage of an input or an activation was resized before the step (untyped_storage().resize_), "
                    "and gradients are still made of what lay there: do so after the step"
                )

    def let_go(self, tracker: Tracker) -> None:
        """What was made of its passes is clipped, or given up."""
        self.held = {key: each for key, each in self.held.items() if each[1] is not tracker}

    def zero(self, value: Tensor | complex) -> bool:
        """Whether something public is zero, as far as that can be asked."""
        if not isinstance(value, Tensor):
            return value == 0
        with unseen():
            if value.untyped_storage()._cdata in self.zeros:
                return True
            return not (value.is_cuda and torch.cuda.is_current_stream_capturing()) and not bool(value.any())

    def prune(self) -> None:
        """Remove labels of memory that is freed."""
        self.laid = None
        self._forget_sums()
        for sum_ in self.sums.values():  # of a pass that is over: autograd still holds some where one broke off
            sum_.region, sum_.known = mixed("a sum over the batch", "was kept from an earlier pass"), {}
        self._memory = {key: each for key, each in self._memory.items() if not each.ref.expired()}
        for known in (self.identity, self.zeros):
            for key in [key for key, each in known.items() if each.expired()]:
                del known[key]

    def alive(self, besides: Sequence[Tensor] = ()) -> bool:
        """Whether memory that depends on examples is still referenced, besides that of these tensors. Stand-ins for
        sums do not count: they have no numbers."""
        self.prune()
        return not self._memory.keys() - self.sums.keys() <= {each.untyped_storage()._cdata for each in besides}

    @contextmanager
    def nothing_kept(self, otherwise: Exception) -> Iterator[None]:
        """Raise `otherwise` if memory of examples that is made inside is still held afterwards."""
        self.prune()
        before = self._memory.keys() - self.sums.keys()
        yield
        for collected in (False, True):
            self.prune()
            if self._memory.keys() - self.sums.keys() <= before:
                return
            if not collected:
                gc.collect()
        raise otherwise


def _placed(storage: UntypedStorage) -> tuple[int, int]:
    return storage.nbytes(), storage.data_ptr()


def mixed(operator: str, why: str = "mixes examples", unknown: bool = False) -> Mixed:
    return Mixed(operator, users_line(), why, unknown)


ASKING = ("before_dispatch.py", "torch/overrides.py", "torch/_tensor.py")
"""Files through which a fact about a tensor is asked for."""


def asked_by_user() -> bool:
    """Whether code that is neither torch's nor ours asks for a fact about a tensor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(ASKING):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(OUTSIDE)


def users_line() -> str:
    """The nearest line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OUTSIDE) and not file.startswith("<"):
            return f"{os.path.join(*file.split(os.sep)[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "a backward pass"


@dataclass(frozen=True)
class Read:
    """A value of an example that Python looked at."""

    operator: str
    where: str


SPARED = ("transformers/masking_utils.py", "transformers/modeling_utils.py")
"""Files whose questions about a mask only skip work, or warn: both answers give the same numbers, so "no" is
answered."""


def spared() -> bool:
    """Whether the value is asked for in a place where the answer makes no difference to the result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OUTSIDE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(SPARED)


class Tracker(TorchDispatchMode):
    """Follows the labels of all tensors through the operators that run inside.

    `reads` lists what Python looked at. With `strict`, a look raises `NotApart`: inside a model it would decide for
    everybody.
    """

    def __init__(self, labels: Labels | None = None, strict: bool = True) -> None:
        super().__init__()
        self.labels, self.strict = labels or Labels(), strict
        self.reads: list[Read] = []
        self.averaged: set[int] = set()
        """Over how many numbers of an example means were taken."""
        self.reductions: set[str] = set()
        """How losses of a loop were reduced over the batch."""
        self.reduced = False
        """Whether a model has reduced something over the batch (`Memory.reduction`) since its forward pass began, or
        has kept what it reduced before."""
        self.kept: list[StorageWeakRef] = []
        """The memory of what models have reduced, as long as it is referenced."""
        self.draw: float | None = None
        """What is drawn on the host in place of a number between 0 and 1, to see whether that decides anything."""
        self.sequence: list[Any] | None = None
        """The operators that have run since this was set to an empty list."""
        self.answer: bool | None = None
        """What is answered where a question only skips work (`SPARED`); None: the truth."""
        self.captured = False
        """Whether what runs is to be replayed for other examples: nothing may follow from their values then."""
        self.kept_elsewhere = False
        """Whether activations of what is captured go through hooks other than those of torch's checkpointing."""
        self.spans: list[tuple[float, float]] = []
        """Which nodes of autograd's graph are those of a private pass, by their numbers: sums over the examples that
        their backward passes make are kept apart, for gradients of parameters."""
        self.packed = False
        """Whether sequences have been packed: sizes of packed tensors depend on the examples."""
        self.unknown: Mixed | None = None
        """The last operator without a rule that was given examples."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares a wrapper around every operator: private passes are never compiled."""
        return False

    def label_rows(self, tensor: Tensor, count: int, batch: int, inner: int = 1) -> None:
        """The tensor's first axis counts the examples, each with `inner` rows side by side."""
        self.labels.set(tensor, Rows(0, inner, count, batch))

    @property
    def adds_up(self) -> bool:
        """Whether the node of a backward pass that runs now is one of a private pass."""
        node = torch._C._current_autograd_node() if self.spans else None
        return node is not None and any(first <= node._sequence_nr() < last for first, last in self.spans)

    def keeps_reductions(self) -> bool:
        """Whether something that a model has reduced is still held."""
        self.kept = [each for each in self.kept if not each.expired()]
        return bool(self.kept)

    def reduction(self, tensor: Tensor) -> str | None:
        """How a model would have reduced this."""
        if not self.kept or tensor.layout != STRIDED or not has_own_memory(type(tensor)):
            return None
        with unseen_by_functions():
            memory = self.labels._memory.get(tensor.untyped_storage()._cdata)
        return None if memory is None else memory.reduction

    def mark_reduced(self, tensor: Tensor, reduction: str) -> None:
        """In place of one number for the batch the tensor has one for each example."""
        self.reduced = True
        with unseen_by_functions():
            memory = self.labels._memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.reduction = reduction
            self.kept.append(memory.ref)

    def rows(self, tensor: Tensor) -> Rows | None:
        """The label of a tensor that may be public or rows. Raises `NotApart`."""
        label = self.labels.get(tensor)
        if isinstance(label, Summed):
            raise NotApart("a sum over the batch is used as if it had rows")
        if isinstance(label, Mixed):
            raise NotApart(label)
        return label

    def require_rows(self, tensor: Tensor, count: int, batch: int, inner: int = 1) -> None:
        """Raise `NotApart` unless a tensor is public, or has the examples of a batch on its first axis, in their
        order."""
        label = self.rows(tensor)
        if label is not None and label.batch != batch:
            raise NotApart("the result is about rows of another batch")
        if label is not None and label != Rows(0, inner, count, batch):
            raise NotApart("the result does not have the rows of this batch, in their order")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One of the trackers that are on applies the rules."""
        if self.captured and not self.kept_elsewhere:
            self.kept_elsewhere = kept_elsewhere()
        labels, kwargs = self.labels, kwargs or {}
        turn = labels.turn
        # What a kernel calls was seen above; other operators call functions of the user's, which are followed.
        with unseen_by_functions() if isinstance(func, OpOverload) else AS_IT_IS:
            if len(labels.trackers) < 2:
                return self._followed(func, args, kwargs)
            if turn is not None and turn is not self:
                return func(*args, **kwargs)
            labels.turn = self
            try:
                return self._followed(func, args, kwargs)
            finally:
                labels.turn = turn

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.sequence is not None:
            self.sequence.append(func)
            if self.draw is not None and func is RAND and torch.device(kwargs.get("device") or "cpu").type == "cpu":
                return func(*args, **kwargs).fill_(self.draw)
        labelled = self.labels.among(args, kwargs)
        if self.labels.taken is not None:
            with unseen_by_functions():
                self.labels.taken.update(self.labels.memories((args, kwargs)))
        if not labelled and isinstance(func, OpOverload):  # others take functions, which may hold examples
            return self.public(func, args, kwargs)
        if self.labels.sums and any(type(label) is Summed for _, label in labelled):
            return _linear[0](self, func, args, kwargs, labelled)
        rule = rule_of(func)
        if labelled and rule.of_one_example and (label := of_one_example(labelled)) is not None:
            found = cleared(func, args, kwargs)
            outputs = found if isinstance(found, tuple | list) else (found,)
            return self.finish(func, found, [label] * len(outputs), args, kwargs)
        return rule.apply(self, func, args, kwargs, labelled)

    def public(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator whose output depends on no example."""
        found = cleared(func, args, kwargs)
        if func is ARANGE or (func is FROM and args[0] == 0):
            storage = found.untyped_storage()
            self.labels.identity[storage._cdata] = StorageWeakRef(storage)
        elif isinstance(func, OpOverload) and func._schema.is_mutable:
            self.labels.no_longer_known(written_by(func, args, kwargs))
        if self.spans and (func in ZEROS or (func in FILLED and args[FILLED[func]] == 0)):
            self.labels.know_zeros(found)
        return found

    def stand_in(self, like: Tensor, shape: Sequence[int], label: Summed, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor without numbers for a sum over the examples."""
        made = like.new_empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype)
        if made.numel():
            made.as_strided((1,), (1,)).zero_()  # a read of it must not show what the memory held before
        self.labels.set(made, label)
        return made

    # --- what rules use -----------------------------------------------------------------------------------------------

    def finish(self, func: Any, found: Any, labels: Sequence[Label | None], args: Any, kwargs: Any) -> Any:
        """Label what an operator gave: one label for each of its outputs."""
        outputs = found if type(found) in (tuple, list) else (found,)
        written = written_by(func, args, kwargs)
        with unseen_by_functions():
            reduction = self._reduction_of(func, args) if self.reduced else None
            held = self._write(written, labels[0], args) if written else ()
            for tensor, label in zip(outputs, labels, strict=True):
                if label is None or not isinstance(tensor, Tensor):
                    continue
                if not held or tensor.untyped_storage()._cdata not in held:
                    self.labels.set(tensor, label)
            if reduction is not None:
                for each in tensors_in(outputs):
                    self.mark_reduced(each, reduction)
        return found

    def _reduction_of(self, func: Any, args: Any) -> str | None:
        """What is made of reduced losses alone is one, too."""
        given = [each for each in tensors_in(args) if each.dim() and self.labels.get(each) is not None]
        kinds = [kind for kind in map(self.reduction, given) if kind is not None]
        if not kinds or len(kinds) < len(given):
            return None
        if len(kinds) > 1 and func.overloadpacket.__name__ in ("div", "div_"):
            return "mean"  # over numbers that are each example's own
        return "mean" if "mean" in kinds else kinds[0]

    def _write(self, written: Sequence[Tensor], label: Label | None, args: Any) -> set[int]:
        """The storages of what was written, which have new labels."""
        self.labels.no_longer_known(written)
        for tensor in written:
            self.labels.write(tensor, self._beside_reads(tensor, label, args))
        return {tensor.untyped_storage()._cdata for tensor in written}

    def _beside_reads(self, written: Tensor, label: Label | None, args: Any) -> Label | None:
        """The label of what was written. Where another argument is a view of the same memory, some of it may have been
        read after it was written: that is harmless only if it belongs to the same examples before and after."""
        if not isinstance(label, Rows) or label == self.labels.get(written):
            return label
        storage, view = written.untyped_storage()._cdata, view_of(written)
        for each in args:
            if not isinstance(each, Tensor) or each.layout != torch.strided:
                continue
            if each.untyped_storage()._cdata == storage and view_of(each) != view:
                return mixed("a write", "reads examples from where it puts others")
        return label

    def read(self, func: Any) -> None:
        """An operator shows Python a value of an example."""
        self.note_read(Read(str(func).removeprefix("aten.").split(".")[0].strip("_"), users_line()))

    def note_read(self, seen: Read) -> None:
        for each in self.labels.trackers or (self,):
            if seen not in each.reads:
                each.reads.append(seen)
        if (self.labels.turn or self).strict:
            raise NotApart(f"{seen.operator} at {seen.where} looks at a value of the examples", unknown=True)


AS_STRIDED = torch.ops.aten.as_strided.default
ARANGE, FROM = torch.ops.aten.arange.default, torch.ops.aten.arange.start
RAND = torch.ops.aten.rand.default
ZEROS = frozenset(getattr(torch.ops.aten, name).default for name in ("zeros", "zeros_like", "new_zeros", "zero_"))
FILLED = {torch.ops.aten.scalar_tensor.default: 0, torch.ops.aten.full.default: 1, torch.ops.aten.fill_.Scalar: 1}
"""Which of their arguments they fill a tensor with."""
UNINITIALISED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
    for overload in getattr(torch.ops.aten, name).overloads()
)
"""What they give may be memory that held an example, so it is filled."""
RESIZED = frozenset((torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default))
"""So is what these add at the end."""


def cleared(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives, with zeros in memory that it has not filled."""
    if func in UNINITIALISED:
        return func(*args, **kwargs).zero_()
    if func not in RESIZED:
        return func(*args, **kwargs)
    storage: UntypedStorage = args[0].untyped_storage()
    end, found = storage.nbytes(), func(*args, **kwargs)
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[end:].zero_()
    return found


@dataclass(frozen=True)
class Rule:
    """What an operator does to labels."""

    apply: Callable[[Tracker, Any, Any, Any, Labelled], Any]
    """(tracker, operator, args, kwargs, those of them with labels) -> what the operator gives, labelled."""
    of_one_example: bool = True
    """Whether its outputs are new values: of one example alone, they are that example's."""


_linear: list[Callable[..., Any]] = []
_RULES: dict[Any, Rule] = {}
_find_rule: list[Callable[[Any], Rule]] = []


def rule_of(func: Any) -> Rule:
    found = _RULES.get(func)
    if found is None:
        found = _RULES[func] = _find_rule[0](func)
    return found


def install_rules(find: Callable[[Any], Rule], linear: Callable[..., Any]) -> None:
    """`find` gives the rule of an operator; one without a rule gives mixed labels. `linear` applies operators to
    sums over the examples."""
    _find_rule[:], _linear[:] = [find], [linear]
    _RULES.clear()


top_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
"""The hooks of saved tensors that are on; not known before torch 2.8."""


def kept_elsewhere() -> bool:
    """Whether saved tensors have hooks other than those of torch's checkpointing."""
    hooks = top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint"


_WRITES: dict[Any, tuple[tuple[int, str], ...]] = {}


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes to, by its schema."""
    places = _WRITES.get(func)
    if places is None:
        arguments = func._schema.arguments if isinstance(func, OpOverload) else ()
        places = _WRITES[func] = tuple(
            (-1 if each.kwarg_only else place, each.name)
            for place, each in enumerate(arguments)
            if each.alias_info is not None and each.alias_info.is_write
        )
    if not places:
        return []
    given = [args[place] if 0 <= place < len(args) else kwargs.get(name) for place, name in places]
    return [one for each in given for one in (each if isinstance(each, list | tuple) else (each,)) if one is not None]


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, the modes that are on now are off, and others may be put on."""
    with _disable_current_modes():
        held = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        try:
            yield
        finally:
            for mode in reversed(held):
                _push_mode(mode)


def first_mixed(labels: Iterable[Label | None]) -> Mixed | None:
    for label in labels:
        if isinstance(label, Mixed):
            return label
    return None


def of_one_example(labelled: Labelled) -> Rows | None:
    """The label of a function of one example alone, whatever the operator: that example's. A slice of one row beside
    others of its example is that."""
    first = labelled[0][1]
    if len(labelled) == 1:
        return first if isinstance(first, Rows) and first.axis < 0 else None
    if not any(isinstance(label, Rows) and label.axis < 0 for _, label in labelled):
        return None
    return of_slices_of_one(labelled)


def of_slices_of_one(labelled: Labelled) -> Rows | None:
    """The label of a function of slices of one example."""
    found = [one_example(*each) for each in labelled]
    return found[0] if all(each == found[0] for each in found) else None


def one_example(tensor: Tensor, label: Label) -> Rows | None:
    """The label of one example alone, where all of the tensor belongs to one."""
    if not isinstance(label, Rows) or (label.axis >= 0 and tensor.shape[label.axis] != 1):
        return None
    return label if label.axis < 0 else Rows(-1, 1, label.count, label.batch, label.first)
