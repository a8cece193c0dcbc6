"""What is a trainable parameter inside a pass? An expression: the parameter itself, or a function of parameters alone.

A use combines expressions with examples: it runs on plain values, and its output is tapped, so that the backward pass
hands us the gradient of the output. A rule makes each example's gradient of the expression of that, and the expression
pulls it back to its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vestige.engines.per_example.gradients import Gradient
from vestige.engines.per_example.kernels import aligned

Environment = Mapping[str, Tensor]
"""The parameters' values by name."""
LARGEST = 1 << 26
"""Numbers that a piece of work may hold, where per-example gradients must be materialised."""


class Expression(Protocol):
    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that it is made of."""
        ...

    def value(self, environment: Environment) -> Tensor: ...

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        """Each example's gradients of the parameters, from those of the expression."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter itself."""

    names: tuple[str]

    def value(self, environment: Environment) -> Tensor:
        return environment[self.names[0]]

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        return {self.names[0]: gradient}


@dataclass(frozen=True, eq=False)
class Operand:
    """An expression among the arguments of a function, with its value."""

    expression: Expression
    value: Tensor
    ways: int = 1
    """How many ways lead from it to parameters: so often a gradient is pulled back."""


def value_of(argument: Any) -> Any:
    return argument.value if isinstance(argument, Operand) else argument


@dataclass(frozen=True)
class Axis:
    """Where the examples are in a tensor: along which axis, which they may share with positions.

    Where it is shared, the positions of one example lie side by side, or (`minor`) the examples of one position do.
    """

    place: int = 0
    minor: bool = False
    views: int = 1
    """How many rows of a batch, side by side, are views of one example: to each example, so many more positions."""

    def first(self, tensor: Tensor, examples: int) -> Tensor:
        """[examples, positions, ...], the other axes in their order."""
        moved = tensor.movedim(self.place, 0) if self.place else tensor
        if self.minor:
            return moved.unflatten(0, (-1, examples, self.views)).transpose(0, 1).flatten(1, 2)
        return moved.unflatten(0, (examples, -1))

    def alone(self, tensor: Tensor, examples: int) -> Tensor:
        """[examples, ...]: each example's part of the tensor, with all of its axes in place."""
        return self.first(tensor, examples).movedim(1, 1 + self.place)

    def owners(self, tensor: Tensor, examples: int) -> Tensor:
        """Whose each place along the axis is, in a shape that goes with the tensor's."""
        size = tensor.shape[self.place]
        places = torch.arange(size, device=tensor.device)
        found = places // self.views % examples if self.minor else places // (size // examples)
        return found.reshape(-1, *[1] * (tensor.dim() - 1 - self.place))

    def confined(self, tensor: Tensor, examples: int, example: int) -> bool:
        """Whether only this example's part of the tensor is not zero."""
        if tensor.dim() <= self.place or tensor.shape[self.place] % examples:
            return False
        others = [each for each in range(examples) if each != example]
        return not bool(self.first(tensor, examples)[others].count_nonzero())


@dataclass(frozen=True)
class Kind:
    """What a rehearsal found out about a use of parameters and examples: where the examples are."""

    outputs: tuple[Axis, ...] = (Axis(),)
    operands: tuple[Axis | None, ...] = ()
    """Of the other tensors among its arguments: None where they hold no examples."""
    rows: tuple[int, ...] = field(default=(), compare=False)
    """How many rows of each output an example has, where the inputs have the rehearsed shapes; empty if unknown."""

    def seen(self, views: int) -> Kind:
        """The same, where each example is so many rows of the batch."""
        if views == 1:
            return self
        outputs = tuple(replace(axis, views=views) for axis in self.outputs)
        return Kind(outputs, tuple(axis and replace(axis, views=views) for axis in self.operands))


Key = tuple[str, tuple[str, ...], int]
"""A use in a pass: the function, the parameters it takes, and how many such uses came before it."""
Kinds = Mapping[Key, Kind | None]
"""What is known of the uses of a model: None where there are no examples in it, so that it is an expression again.

Place -1 stands for every further use of a function and parameters whose known uses are all alike: of a longer sequence.
"""


@dataclass
class Observation:
    """What a rehearsal sees of one use: the shapes of its outputs and operands, and the gradients of its outputs."""

    outputs: list[tuple[int, ...]]
    operands: list[tuple[int, ...]]
    signals: list[Tensor] = field(default_factory=list)


@dataclass
class Pass:
    """One forward pass, and what its backward passes bring: `deliver` takes the gradients of a use as it is reached."""

    examples: int
    environment: Environment
    kinds: Kinds
    deliver: Callable[[Mapping[str, Gradient]], None]
    observed: dict[Key, Observation] | None = None
    """In a rehearsal: what is seen of each use, for the first time or again."""
    counts: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    recounts: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    doubt: str | None = None
    """Why the pass, though it ran, cannot be used."""
    recomputes: bool = False
    """Whether activations are recomputed in the backward pass (checkpointing), where uses must be seen again."""
    kept_elsewhere: bool = False
    """Whether somebody other than torch's checkpointing has hooks on what is saved."""
    usual: bool = False
    """Whether the inputs have the shapes that were rehearsed: an example then has as many rows as it had there."""
    inside: bool = True
    """Whether the engine itself runs the pass; not if its user does."""
    going_back: bool = False
    """Whether the backward pass is under way: a use seen now is one that is recomputed, and has been counted."""
    views: int = 1
    """Rows of the batch to an example."""
    holders: dict[int, list[weakref.ref[Tensor]]] = field(default_factory=dict)
    """Functions of parameters that are alive, by the memory in which they lie."""

    def hold(self, tensor: Tensor) -> None:
        self.holders.setdefault(_memory(tensor), []).append(weakref.ref(tensor))

    def held(self, tensor: Tensor) -> list[Tensor]:
        """What lies in the same memory."""
        place = _memory(tensor)
        alive = [each for each in (ref() for ref in self.holders.get(place, ())) if each is not None]
        return [each for each in alive if _memory(each) == place] if place else []

    def require_count(self) -> None:
        """A forward pass is over. Where the uses of one function and its parameters are not all alike, the place of a
        use tells which it is: so there must be as many as were rehearsed."""
        if self.observed is not None or self.going_back:
            return
        for use, count in self.counts.items():
            if count == 1 and (*use, 1) not in self.kinds:
                continue
            rehearsed: list[Kind | None] = []
            while (*use, len(rehearsed)) in self.kinds:
                rehearsed.append(self.kinds[*use, len(rehearsed)])
            if count != len(rehearsed) and any(kind != rehearsed[0] for kind in rehearsed):
                names = ", ".join(use[1])
                self.doubt = self.doubt or f"{use[0]} of {names} is not used as often as in the rehearsal"

    def key(self, function: str, names: tuple[str, ...]) -> Key:
        use = function, names
        if self.going_back:  # in their order again, as far as they are recomputed together
            place = self.recounts.get(use, 0)
            self.recounts[use] = place + 1
            return *use, place % self.counts.get(use, 1)
        place = self.counts.get(use, 0)
        self.counts[use] = place + 1
        return *use, place


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


Pulled = Iterator[tuple[Operand, Gradient]]
Settle = Callable[[Kind, int, Sequence[Tensor], Sequence[Tensor]], Pulled]
"""Makes per-example gradients of (kind, examples, what was saved, gradients of the outputs)."""


class Tap(torch.autograd.Function):
    """An identity that hands what was saved and the gradients of its outputs to `record`."""

    @staticmethod
    def forward(ctx: Any, record: Any, anchor: Tensor, count: int, *tensors: Tensor) -> Any:
        # The anchor requires a gradient and never gets one: it only makes the outputs part of the graph.
        ctx.record = record
        ctx.save_for_backward(*tensors[count:])
        # Detached, the outputs are no views in autograd's eyes: an in-place activation may follow.
        return tensors[0].detach() if count == 1 else tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        if ctx.record.multiplies:
            signals = tuple(map(aligned, signals))
        ctx.record(saved, signals)
        return (None, None, None, *signals, *[None] * len(saved))


ANCHOR = torch.zeros((), requires_grad=True)
PRODUCTS = frozenset({"linear", "matmul", "addmm"})


def tapped(now: Pass, key: Key, kind: Kind, outputs: Sequence[Tensor], saved: Sequence[Tensor], settle: Settle) -> Any:
    """The outputs of a use as the model goes on with them; what comes back to them is settled and delivered."""
    if not torch.is_grad_enabled():
        return outputs[0] if len(outputs) == 1 else outputs  # nothing comes back, as in ordinary training
    problem = _unfit(now, kind, outputs)
    if problem is not None:
        now.doubt = now.doubt or f"{key[0]} of {', '.join(key[1])} {problem}"
        return outputs[0] if len(outputs) == 1 else outputs
    if recomputed():
        now.recomputes, now.kept_elsewhere = True, now.kept_elsewhere or not _by_checkpointing()

    def record(saved: Sequence[Tensor], signals: Sequence[Tensor]) -> None:
        """What a backward pass through this use leaves."""
        if now.observed is not None and key in now.observed:
            now.observed[key].signals += signals
            return
        with torch.no_grad(), full_precision(signals[0]):
            for operand, gradient in settle(kind.seen(now.views), now.examples, saved, signals):
                now.deliver(operand.expression.pull(gradient, now.environment))

    record.inside = now.inside  # type: ignore[attr-defined]
    record.multiplies = key[0] in PRODUCTS  # type: ignore[attr-defined]
    return Tap.apply(record, ANCHOR, len(outputs), *outputs, *saved)


def _unfit(now: Pass, kind: Kind, outputs: Sequence[Tensor]) -> str | None:
    if now.observed is None and not now.going_back:
        rows = kind.rows if now.usual and kind.rows else (None,) * len(outputs)
        for output, axis, usual in zip(outputs, kind.outputs, rows, strict=True):
            size = output.shape[axis.place] if output.dim() > axis.place else 0
            examples = now.examples * now.views
            if size == 0 or size % examples or (usual is not None and size != usual * examples):
                return "did not give every example as many rows as every other"
    return None


_top_hooks: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def recomputed() -> bool:
    """Whether somebody has hooks on saved tensors, as activation checkpointing has; torch tells from 2.8 on."""
    return _top_hooks is None or _top_hooks(True) is not None


def _by_checkpointing() -> bool:
    hooks: Any = None if _top_hooks is None else _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def full_precision(tensor: Tensor) -> Any:
    """Norms and sums are float32 whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's word on operations that vmap takes one by one: nobody could do anything about it."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", None)
    if switch is None:
        yield
        return
    switch(False)
    try:
        yield
    finally:
        switch(True)


class _Nothing:
    def __enter__(self) -> None:
        """A context that changes nothing, cheaper than contextlib's."""

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


_AS_IT_IS = _Nothing()
