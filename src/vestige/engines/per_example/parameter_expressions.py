"""What is a trainable parameter inside a pass? An expression: the parameter itself, or a function of parameters alone.

A use combines expressions with examples: it runs on plain values, and its output is tapped, so that the backward pass
hands us the gradient of the output. A rule makes each example's gradient of the expression of that, and the expression
pulls it back to its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vestige.engines.example_axis.labels import NotApart, Tracker, untracked
from vestige.engines.per_example.gradient_forms import Gradient, combine
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


class Values(dict[str, Tensor]):
    """The parameters' values in a pass, the values of functions of them, and gradients of those that wait.

    A function of parameters may reach others on many ways (through residual layers, say). Its gradients are added up
    before they are pulled back, once, when nothing that was made of it waits any more.
    """

    def __init__(self, values: Environment) -> None:
        super().__init__(values)
        self.known: dict[Expression, Tensor] = {}
        self.waiting: dict[Expression, list[Gradient]] = {}

    def pull(self, expression: Expression, gradient: Gradient) -> dict[str, Gradient]:
        """The gradients of parameters that this gives at once: of a parameter itself, or of a part of it."""
        if isinstance(expression, Whole):
            return {expression.names[0]: gradient}
        if depth(expression) == 1:
            return expression.pull(gradient, self)
        self.waiting.setdefault(expression, []).append(gradient)
        return {}

    def settled(self) -> Iterator[dict[str, Gradient]]:
        """Pull back all that waits."""
        while self.waiting:
            expression = max(self.waiting, key=depth)
            yield expression.pull(combine(self.waiting.pop(expression)), self)


def depth(expression: Expression) -> int:
    """How many functions lie between an expression and its parameters, at most."""
    known: int | None = expression.__dict__.get("_depth")
    if known is None:
        form = getattr(expression, "form", None)
        parts = [form] if form is not None else [value for key, value in vars(expression).items() if key != "_depth"]
        below = [
            one for each in parts for one in (each if isinstance(each, tuple) else (each,)) if hasattr(one, "pull")
        ]
        known = 0 if isinstance(expression, Whole) else (form is None) + max(map(depth, below), default=0)
        expression.__dict__["_depth"] = known
    return known


def descend(expression: Expression, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
    """Pull a gradient back through what an expression was made of."""
    if isinstance(environment, Values):
        return environment.pull(expression, gradient)
    return expression.pull(gradient, environment)


def valued(expression: Expression, environment: Environment) -> Tensor:
    known = environment.known.get(expression) if isinstance(environment, Values) else None
    return expression.value(environment) if known is None else known


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


def value_of(argument: Any) -> Any:
    return argument.value if isinstance(argument, Operand) else argument


@dataclass(frozen=True)
class Axis:
    """Where the examples are in a tensor: entry r of axis `place` belongs to example (r // inner) % examples."""

    place: int = 0
    inner: int = 1

    def first(self, tensor: Tensor, examples: int) -> Tensor:
        """[examples, positions, ...], the other axes in their order."""
        moved = tensor.movedim(self.place, 0) if self.place else tensor
        if len(moved) == examples * self.inner:
            return moved.unflatten(0, (examples, self.inner))
        return moved.unflatten(0, (-1, examples, self.inner)).transpose(0, 1).flatten(1, 2)

    def alone(self, tensor: Tensor, examples: int) -> Tensor:
        """[examples, ...]: each example's part of the tensor, with all of its axes in place."""
        return self.first(tensor, examples).movedim(1, 1 + self.place)

    def in_order(self, tensor: Tensor, examples: int) -> bool:
        """Whether the first axis is the examples', and all rows of one lie side by side."""
        return self.place == 0 and len(tensor) == examples * self.inner


@dataclass(frozen=True)
class Kind:
    """Where the examples are in a use of parameters and examples: from the labels of its tensors."""

    outputs: tuple[Axis, ...] = (Axis(),)
    operands: tuple[Axis | None, ...] = ()
    """Of the other tensors among its arguments: None where they hold no examples."""


@dataclass
class Pass:
    """One forward pass, and what its backward passes bring: `deliver` takes the gradients of a use as it is reached."""

    examples: int
    environment: Environment
    tracker: Tracker
    deliver: Callable[[Mapping[str, Gradient]], None]
    recomputes: bool = False
    """Whether activations are recomputed in the backward pass (checkpointing), where uses must be seen again."""
    kept_elsewhere: bool = False
    """Whether somebody other than torch's checkpointing has hooks on what is saved."""
    inside: bool = True
    """Whether the engine itself runs the pass; not if its user does."""
    like: Tensor | None = None
    """What a parameter is to have its rows like, where that is known."""
    holders: dict[int, list[weakref.ref[Tensor]]] = field(default_factory=dict)
    """Functions of parameters that are alive, by the memory in which they lie."""

    def __post_init__(self) -> None:
        self.environment = Values(self.environment)

    def settle(self) -> None:
        """A backward pass is over: pull back what waits."""
        with untracked(), torch.no_grad():
            for found in self.environment.settled():  # type: ignore[attr-defined]
                self.deliver(found)

    def axis(self, tensor: Tensor) -> Axis | None:
        """Where the examples are in a tensor; None if it is public. Raises `NotApart` where they are mixed."""
        label = self.tracker.rows(tensor)
        if label is None:
            return None
        if label.count != self.examples or label.first or tensor.shape[label.axis] % (label.inner * label.count):
            raise NotApart("a use of parameters is about some rows of the batch only")
        return Axis(label.axis, label.inner)

    def kind(self, outputs: Sequence[Tensor], operands: Sequence[Tensor] = ()) -> Kind | None:
        """Where the examples are in a use; None if it is about parameters and public values alone."""
        found = [self.axis(each) for each in outputs]
        if all(each is None for each in found):
            return None
        if any(each is None for each in found):
            raise NotApart("a use of parameters has outputs with and without examples")
        return Kind(tuple(found), tuple(self.axis(each) for each in operands))  # type: ignore[arg-type]

    def promote(self, value: Tensor, output: Tensor) -> None:
        """A parameter that was spread along an axis of as many entries as there are examples is given to each."""
        label = None if self.like is None else self.tracker.rows(self.like)
        if label is not None and self.like is not None and output.shape[label.axis] == self.like.shape[label.axis]:
            self.tracker.labels.set(output, label)
            return
        rank = output.dim() - value.dim()
        spread = [p for p, size in enumerate(output.shape) if size > 1 and (p < rank or value.shape[p - rank] != size)]
        for several in (False, True):  # one entry for each example, or as many for each
            for place in spread:
                inner, left = divmod(output.shape[place], self.examples)
                if not left and (inner == 1 or several):
                    self.tracker.promote(output, place, inner)
                    return

    def require_own(self, axis: Axis, signal: Tensor) -> None:
        """What comes back to a row must be public or that row's own. Raises `NotApart`."""
        label = self.tracker.rows(signal)
        if label is not None and (label.axis, label.inner, label.first) != (axis.place, axis.inner, 0):
            raise NotApart("what comes back to a use of parameters is not its row's own gradient")

    def hold(self, tensor: Tensor) -> None:
        self.holders.setdefault(_memory(tensor), []).append(weakref.ref(tensor))

    def held(self, tensor: Tensor) -> list[Tensor]:
        """What lies in the same memory."""
        place = _memory(tensor)
        alive = [each for each in (ref() for ref in self.holders.get(place, ())) if each is not None]
        return [each for each in alive if _memory(each) == place] if place else []


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
PRODUCTS = frozenset({"linear", "known_linear", "matmul", "addmm"})


def tapped(now: Pass, name: str, kind: Kind, outputs: Sequence[Tensor], saved: Sequence[Tensor], settle: Settle) -> Any:
    """The outputs of a use as the model goes on with them; what comes back to them is settled and delivered."""
    if not torch.is_grad_enabled():
        return outputs[0] if len(outputs) == 1 else outputs  # nothing comes back, as in ordinary training
    if recomputed():
        now.recomputes, now.kept_elsewhere = True, now.kept_elsewhere or not _by_checkpointing()

    def record(saved: Sequence[Tensor], signals: Sequence[Tensor]) -> None:
        """What a backward pass through this use leaves."""
        for axis, signal in zip(kind.outputs, signals, strict=True):
            now.require_own(axis, signal)
        with untracked(), torch.no_grad(), full_precision(signals[0]):
            try:
                for operand, gradient in settle(kind, now.examples, saved, signals):
                    now.deliver(descend(operand.expression, gradient, now.environment))
            except TypeError as problem:
                raise NotApart(f"{name}: {problem}", unknown=True) from None

    record.inside = now.inside  # type: ignore[attr-defined]
    record.multiplies = name in PRODUCTS  # type: ignore[attr-defined]
    return Tap.apply(record, ANCHOR, len(outputs), *outputs, *saved)


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
