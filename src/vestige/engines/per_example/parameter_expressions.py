"""What is a trainable parameter inside a pass? An expression: the parameter itself, or a function of parameters alone.

A use combines expressions with examples: it runs on plain values, and its output is tapped, so that the backward pass
hands us the gradient of the output. A rule makes each example's gradient of the expression of that, and the expression
pulls it back to its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from vestige.engines.example_axis.labels import NotApart, Tracker, unseen, unseen_by_functions
from vestige.engines.per_example.gradient_forms import Gradient, combine
from vestige.engines.per_example.kernels import aligned

Environment = Mapping[str, Tensor]
"""The parameters' values by name."""
Arguments = Sequence[Any]
Named = Mapping[str, Any]
"""Arguments of a function of torch's, with expressions in place of tracked parameters."""
LARGEST = 1 << 26
"""Numbers that a piece of work may hold, where per-example gradients must be materialised."""


class Expression:
    """A trainable parameter inside a pass, or a function of parameters alone (`parameter_functions.Derived`)."""

    value: Tensor
    depth: int
    """How many functions are between it and its parameters, at most."""

    @property
    def parameters(self) -> tuple[Whole, ...]:
        """The parameters that it is made of."""
        raise NotImplementedError

    def back(self, gradient: Gradient) -> Pulled:
        """Each example's gradients of what it was made of, from those of the expression."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.parameters)


@dataclass(frozen=True)
class Whole(Expression):
    """A parameter itself: the same one, wherever it is met in a pass."""

    name: str
    value: Tensor = field(compare=False)
    depth = 0

    @property
    def parameters(self) -> tuple[Whole, ...]:
        return (self,)


Pulled = Iterator[tuple[Expression, Gradient]]
Settle = Callable[..., Pulled]
"""Makes per-example gradients of (axis of the first output, what was saved, gradients of the outputs)."""
T = TypeVar("T")


def value_of(argument: T | Expression) -> T | Tensor:
    return argument.value if isinstance(argument, Expression) else argument


def pulled_back(waiting: dict[Expression, list[Gradient]]) -> dict[str, Gradient]:
    """The gradients of parameters, from those of expressions.

    A function of parameters may reach others on many ways (through residual layers, say): its gradients are added up
    before they are pulled back, once, when nothing that was made of it waits any more.
    """
    found: dict[str, Gradient] = {}
    while waiting:
        expression = max(waiting, key=lambda each: each.depth)
        gradient = combine(waiting.pop(expression))
        if isinstance(expression, Whole):
            found[expression.name] = gradient
            continue
        for each, part in expression.back(gradient):
            waiting.setdefault(each, []).append(part)
    return found


@dataclass(frozen=True)
class Axis:
    """Where the examples are in a tensor: entry r of axis `place` belongs to example (r // inner) % examples."""

    place: int
    inner: int
    examples: int

    def first(self, tensor: Tensor) -> Tensor:
        """[examples, positions, ...], the other axes in their order."""
        moved = tensor.movedim(self.place, 0) if self.place else tensor
        if len(moved) == self.examples * self.inner:
            return moved.unflatten(0, (self.examples, self.inner))
        return moved.unflatten(0, (-1, self.examples, self.inner)).transpose(0, 1).flatten(1, 2)

    def alone(self, tensor: Tensor) -> Tensor:
        """[examples, ...]: each example's part of the tensor, with all of its axes in place."""
        return self.first(tensor).movedim(1, 1 + self.place)

    def folded(self, tensor: Tensor) -> Tensor:
        """The axis of examples first, and all rows of an example next to each other."""
        in_order = self.place == 0 and len(tensor) == self.examples * self.inner
        return tensor if in_order else self.first(tensor).flatten(0, 1)


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
    """Whether saved tensors have hooks other than those of torch's checkpointing."""
    waiting: dict[Expression, list[Gradient]] = field(default_factory=dict)
    """Gradients of functions of functions of parameters, which are pulled back when a backward pass is over."""
    holders: dict[int, list[weakref.ref[Tensor]]] = field(default_factory=dict)
    """Functions of parameters that are alive, by the memory in which they lie."""

    def pull(self, expression: Expression, gradient: Gradient) -> None:
        """What a use leaves: of a parameter, or of a function of parameters, at once."""
        if expression.depth <= 1:
            self.deliver(pulled_back({expression: [gradient]}))
        else:
            self.waiting.setdefault(expression, []).append(gradient)
            self.deliver({})  # who takes gradients refuses a backward pass that is not of this forward pass

    def settle(self) -> None:
        """A backward pass is over: pull back what waits."""
        with unseen(), torch.no_grad():
            if self.waiting:
                self.deliver(pulled_back(self.waiting))

    def axis(self, tensor: Tensor) -> Axis | None:
        """Where the examples are in a tensor; None if it is public. Raises `NotApart` where they are mixed."""
        label = self.tracker.rows(tensor)
        if label is None:
            return None
        if label.count != self.examples or label.first or tensor.shape[label.axis] % (label.inner * label.count):
            raise NotApart("a use of parameters is about some rows of the batch only", unknown=True)
        return Axis(label.axis, label.inner, label.count)

    def axes(self, outputs: Sequence[Tensor]) -> tuple[Axis, ...]:
        """Where the examples are in the outputs of a use; empty if it is about parameters and public values alone."""
        found = [self.axis(each) for each in outputs]
        apart = tuple(each for each in found if each is not None)
        if apart and len(apart) < len(found):
            raise NotApart("a use of parameters has outputs with and without examples")
        return apart

    def promote(self, value: Tensor, output: Tensor, like: Tensor | None = None) -> None:
        """A parameter that was spread along an axis of as many entries as there are examples is given to each: along
        the axis of `like`, where that is known."""
        label = None if like is None else self.tracker.rows(like)
        if label is not None and like is not None and output.shape[label.axis] == like.shape[label.axis]:
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
    with unseen_by_functions():
        return tensor.untyped_storage().data_ptr()


class _TapContext(FunctionCtx):
    """What a tap keeps for its backward pass."""

    record: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    multiplies: bool
    saved_tensors: tuple[Tensor, ...]


class Tap(torch.autograd.Function):
    """An identity that hands what was saved and the gradients of its outputs to `record`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _TapContext,
        record: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
        multiplies: bool,
        anchor: Tensor,
        count: int,
        *tensors: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        # The anchor requires a gradient and never gets one: it only makes the outputs part of the graph.
        ctx.record, ctx.multiplies = record, multiplies
        ctx.save_for_backward(*tensors[count:])
        # Detached, the outputs are no views in autograd's eyes: an in-place activation may follow.
        return tensors[0].detach() if count == 1 else tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: _TapContext, *signals: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        if ctx.multiplies:
            signals = tuple(map(aligned, signals))
        ctx.record(saved, signals)
        return (None, None, None, None, *signals, *[None] * len(saved))


ANCHOR = torch.zeros((), requires_grad=True)
PRODUCTS = frozenset({"linear", "known_linear", "matmul", "addmm"})


def tapped(
    now: Pass, name: str, axes: Sequence[Axis], outputs: Sequence[Tensor], saved: Sequence[Tensor], settle: Settle
) -> Sequence[Tensor]:
    """The outputs of a use, tapped: gradients that come back to them are settled and delivered."""
    if not torch.is_grad_enabled():
        return outputs  # nothing comes back, as in ordinary training
    if recomputed():
        now.recomputes, now.kept_elsewhere = True, now.kept_elsewhere or not _by_checkpointing()

    def record(saved: Sequence[Tensor], signals: Sequence[Tensor]) -> None:
        """What a backward pass through this use leaves."""
        for axis, signal in zip(axes, signals, strict=True):
            now.require_own(axis, signal)
        with unseen(), torch.no_grad(), full_precision(signals[0]):
            try:
                for expression, gradient in settle(axes[0], saved, *signals):
                    now.pull(expression, gradient)
            except TypeError as problem:
                raise NotApart(f"{name}: {problem}", unknown=True) from None

    found = Tap.apply(record, name in PRODUCTS, ANCHOR, len(outputs), *outputs, *saved)
    return (found,) if isinstance(found, Tensor) else found


_top_hooks: Callable[[bool], object] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def recomputed() -> bool:
    """Whether saved tensors have hooks, as of activation checkpointing; unknown, so assumed, before torch 2.8."""
    return _top_hooks is None or _top_hooks(True) is not None


def _by_checkpointing() -> bool:
    hooks = None if _top_hooks is None else _top_hooks(True)
    return isinstance(hooks, tuple) and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


_AS_IT_IS = nullcontext()


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Norms and sums are float32 whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _AS_IT_IS


@contextmanager
def quietly() -> Iterator[None]:
    """Silences vmap's fallback warning."""
    switch = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", bool)
    switch(False)
    try:
        yield
    finally:
        switch(True)
