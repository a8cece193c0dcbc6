"""What does a rule see of an operator's call? Arguments by name, what it gave, and the labels of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from vestige.engines.example_axis.labels import Label, Labelled, Mixed, Rows, Summed, Tracker, mixed, written_by
from vestige.vmap_fallback import quietly

Args = Sequence[Any]
Kwargs = dict[str, Any]
"""What an operator is given."""


class Op:
    """One call of an operator: its arguments by name, what it gave, and the labels of its tensors."""

    __slots__ = ("_args", "_given", "_kwargs", "found", "func", "labelled", "outputs", "tracker")

    def __init__(
        self, tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled, found: Any
    ) -> None:
        self.tracker, self.func, self.found, self.outputs = tracker, func, found, outputs_of(found)
        self.labelled: list[tuple[Tensor, Any]] = labelled
        """The arguments with a label, lists of them included. A rule sees no mixed ones."""
        self._args, self._kwargs = args, kwargs
        self._given: dict[str, Any] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Its arguments by name."""
        if self._given is None:
            names, defaults = _arguments(self.func)
            self._given = {**defaults, **dict(zip(names, self._args, strict=False)), **self._kwargs}
        return self._given

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def label(self, name: str) -> Rows | None:
        """Of an argument that is public or rows: mixed ones never get here."""
        tensor = self.given.get(name)
        if tensor is not None:
            for each, label in self.labelled:
                if each is tensor:
                    return label  # type: ignore[no-any-return]
        return None

    def mixed(self, why: str = "mixes examples", unknown: bool = False) -> Mixed:
        return mixed(self.name, why, unknown)

    def public(self, *names: str) -> bool:
        """Whether none of these arguments depends on an example: weights, statistics, tables."""
        return all(self.label(name) is None for name in names)

    def meet(self, *labels: Label | None) -> Label | None:
        """One label for all: they must be the same."""
        found: Rows | None = None
        for label in labels:
            if isinstance(label, Mixed):
                return label
            if isinstance(label, Summed):
                return self.mixed("combines a sum over the batch with its rows")
            if label is not None and label.axis < 0:
                return self.mixed("combines one example with others")
            if label is None or label == found or (found is not None and _of_one(found, label)):
                continue
            if found is not None:
                return self.mixed(difference(found, label))
            found = label
        return found

    def off(self, label: Label | None, dims: Collection[int]) -> Label | None:
        """The label, unless these axes, along which numbers are combined, are the examples'."""
        return self.mixed() if isinstance(label, Rows) and label.axis in dims else label

    def broadcast(self, shape: Sequence[int], names: Collection[str] | None = None) -> Label | None:
        """The label of a function of numbers in the same place, of all arguments or of these."""
        chosen = None if names is None else [self.given.get(name) for name in names]
        if chosen is None and len(self.labelled) == 1:
            tensor, only = self.labelled[0]
            if tensor.shape == shape:
                return only  # type: ignore[no-any-return]
        return self.meet(*(
            self.broadcast_one(tensor, label, shape)
            for tensor, label in self.labelled
            if chosen is None or any(tensor is each for each in chosen)
        ))  # fmt: skip

    def broadcast_one(self, tensor: Tensor, label: Rows, shape: Sequence[int]) -> Rows | Mixed:
        """The label of a tensor that is broadcast to a shape: rows stay where they are, none becomes several."""
        axis = label.axis + len(shape) - tensor.dim()
        if tensor.shape[label.axis] < shape[axis] and label.count > 1:
            return self.mixed("spreads one example over the others")
        return label.at(axis)


def _of_one(one: Rows, other: Rows) -> bool:
    """Whether both are of the only example of the same batch, along whichever axis."""
    return one.count == other.count == 1 and one.batch == other.batch


def difference(one: Rows, other: Rows) -> str:
    if one.batch != other.batch:
        return "combines rows of different batches"
    return "combines rows of different examples"


@cache
def _arguments(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the arguments in the schema, and their defaults."""
    arguments = func._schema.arguments
    defaults = {each.name: each.default_value if each.has_default_value() else None for each in arguments}
    return tuple(defaults), defaults


def axes_of(given: Any, rank: int) -> set[int]:
    """The axes that an operator's `dim` names: all where it names none."""
    several = isinstance(given, list | tuple)
    if given is None or (several and not given):
        return set(range(rank))
    return {each % max(rank, 1) for each in (given if several else [given])}


def creates(name: str) -> bool:
    """Whether an operator makes a new tensor of the shape or the type of another one, whatever its numbers."""
    return name.startswith("new_") or name.endswith("_like")


def outputs_of(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple | list) else (found,)


def _plus(one: Any, other: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Where a factor is zero, what it multiplies is not looked at."""
    scaled = other if alpha == 1 else other * alpha
    return scaled if beta == 0 else scaled + (one if beta == 1 else one * beta)


ADDED_TO: dict[str, Callable[..., Tensor]] = {
    "addmm": lambda self, mat1, mat2, beta=1, alpha=1: _plus(self, torch.mm(mat1, mat2), beta, alpha),
    "addmv": lambda self, mat, vec, beta=1, alpha=1: _plus(self, torch.mv(mat, vec), beta, alpha),
    "baddbmm": lambda self, batch1, batch2, beta=1, alpha=1: _plus(self, torch.bmm(batch1, batch2), beta, alpha),
    "addbmm": lambda self, batch1, batch2, beta=1, alpha=1: _plus(
        self, torch.mm(batch1.transpose(0, 1).flatten(1), batch2.flatten(0, 1)), beta, alpha
    ),
    "addr": lambda self, vec1, vec2, beta=1, alpha=1: _plus(self, vec1[:, None] * vec2, beta, alpha),
    "addcmul": lambda self, tensor1, tensor2, value=1: _plus(self, tensor1 * tensor2, 1, value),
    "addcdiv": lambda self, tensor1, tensor2, value=1: _plus(self, tensor1 / tensor2, 1, value),
    "lerp": lambda self, end, weight: self + (end - self) * weight,
}
"""Operators of a product and a sum: what each of them makes of sums over the examples is known."""


@cache
def new_form(func: Any) -> Callable[..., Any] | None:
    """What an operator writes, as something new; None if it writes nothing, or to several tensors."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    name, arguments = func.overloadpacket.__name__.rstrip("_"), func._schema.arguments
    if name in ADDED_TO:
        return ADDED_TO[name]
    written = [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if len(written) != 1 or name == "copy" or torch.Tag.inplace_view in func.tags:
        return None
    given = [(each.name, str(each.type)) for each in arguments if not (each is written[0] and each.kwarg_only)]
    packet = getattr(torch.ops.aten, name, None)
    forms = [] if packet is None else [getattr(packet, form) for form in packet.overloads()]
    for form in forms:
        if not form._schema.is_mutable and [(e.name, str(e.type)) for e in form._schema.arguments] == given:
            return form  # type: ignore[no-any-return]
    return None


def written_anew(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """An operator that writes, as one that makes something new and a copy of that: so no rule of sums need know of
    writes. None if it is no such operator."""
    form = new_form(func)
    if form is None:
        return None
    written = written_by(func, args, kwargs)
    names = [each.name for each in func._schema.arguments if each.kwarg_only and each.alias_info is not None]
    with tracker:
        found = form(*args, **{name: each for name, each in kwargs.items() if name not in names})
        if not written:
            return found
        for into, new in zip(written, outputs_of(found), strict=True):
            if names and into.shape != new.shape and not into.numel():
                into.resize_(new.shape)
            into.copy_(new)
        return written[0] if func._schema.returns else None


TOP = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def transformable() -> Iterator[None]:
    """Inside, functions may be transformed (vmap), which they may not where a mode handles an operator."""
    with torch._C._ForceDispatchKeyGuard(*TOP), torch._C._DisableTorchDispatch(), quietly(), torch.no_grad():  # type: ignore[attr-defined]
        yield
