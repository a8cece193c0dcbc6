"""How is every use of a trainable parameter seen? The parameter is a proxy that every function of torch calls first.

Modules need not be known for that: an RMSNorm, a LayerScale or a tied head is recognised by what it computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.example_axis.labels import Rows
from vestige.engines.per_example.gradient_forms import Dense, Place, contiguous_strides
from vestige.engines.per_example.parameter_expressions import (
    LARGEST,
    Arguments,
    Axis,
    Expression,
    Named,
    Pass,
    Pulled,
    Whole,
    quietly,
    tapped,
    value_of,
)
from vestige.engines.per_example.parameter_functions import ELEMENTWISE, Derived, expressed
from vestige.engines.per_example.rules import RULES, Ruled
from vestige.engines.per_example.standardised import batch_normed, standardised

CUT = frozenset({"detach", "data", "grad", "item", "tolist", "numpy", "retain_grad"})
"""What is read of a parameter without its gradient."""

GIVEN = frozenset({Tensor.expand, Tensor.repeat, torch.broadcast_to, Tensor.expand_as})
"""Functions by which a parameter is given to each example."""
SAME_ROWS = frozenset({F.group_norm, F.instance_norm})
"""Functions whose output has its rows where the input has them."""
WRITES = (Tensor.__setitem__, Tensor.index_put_)
IN_PLACE = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__idiv__": "div"}


Function = Callable[..., Any]
"""A function of torch's."""


class UnsupportedUse(Exception):
    """A parameter is used in a way that cannot be watched."""


class TrackedParameter(Tensor):
    """A trainable parameter, or a function of parameters alone, inside a watched pass."""

    followed = True
    expression: Expression
    now: Pass
    part_of: tuple[TrackedParameter, Any] | None = None
    """Whose part it is, and which."""

    def becomes(self, other: object) -> None:
        """It was changed in place, and so was what it is a part of."""
        if not isinstance(other, TrackedParameter):
            raise UnsupportedUse(f"something of each example is written into a function of {self.expression.names[0]}")
        parts, made = self._parts(), other
        if self.part_of is not None:
            whole, index = self.part_of
            self._holds(other)  # so that the whole may be changed
            whole.becomes(_written(whole, index, other))
            made = cast(TrackedParameter, whole[index])
        self._holds(made)
        for part in parts:
            assert part.part_of is not None
            part._holds(cast(TrackedParameter, part.part_of[0][part.part_of[1]]))

    def _holds(self, other: TrackedParameter) -> None:
        self.expression = other.expression
        with torch._C.DisableTorchFunctionSubclass():
            self.set_(other.expression.value)  # type: ignore[call-overload]
        self.now.hold(self)

    def _parts(self) -> list[TrackedParameter]:
        """The parts of it that are alive, and their parts. Other views of it would not change with it, and are
        refused."""
        mine = [self, *self._wholes()]
        found: list[tuple[int, TrackedParameter]] = []
        for each in self.now.held(self):
            other = cast(TrackedParameter, each)
            wholes = other._wholes()
            if any(other is one for one in mine) or any(other is one for _, one in found):
                continue
            if not any(whole is one for whole in wholes for one in mine):
                raise UnsupportedUse(
                    f"a function of {self.expression.names[0]} is changed in place, and something else is a "
                    "view of it: change what is used, or a copy"
                )
            if any(whole is self for whole in wholes):
                found.append((len(wholes), other))
        return [part for _, part in sorted(found, key=itemgetter(0))]

    def _wholes(self) -> list[TrackedParameter]:
        """What it is a part of, and what that is."""
        return [] if self.part_of is None else [self.part_of[0], *self.part_of[0]._wholes()]

    @classmethod
    def of(cls, expression: Expression, now: Pass) -> TrackedParameter:
        made: TrackedParameter = Tensor._make_subclass(cls, expression.value, require_grad=False)
        made.expression, made.now = expression, now
        if not isinstance(expression, Whole):
            now.hold(made)
        return made

    @classmethod
    def __torch_function__(
        cls, function: Function, types: object, args: Arguments = (), kwargs: Named | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], TrackedParameter) else None
        if function is F.scaled_dot_product_attention:
            args, kwargs = _given_to_each(args, kwargs)
            if not any(isinstance(each, TrackedParameter) for each in (*args, *kwargs.values())):
                return function(*args, **kwargs)
        elif function is F.batch_norm:
            made = _standardising(*args, **kwargs)
            if made is not None:
                return made
        elif function is F.dropout:
            return _dropped(*args, **kwargs)
        elif function is F.embedding:
            _require_plain(*args, **kwargs)
        elif function in WRITES and first is None and len(args) == 3 and isinstance(args[2], TrackedParameter):
            _put(*args)
            return args[0] if function is Tensor.index_put_ else None
        name = _name(function)
        if name in IN_PLACE or name in MADE_ANEW or (name.endswith("_") and not name.endswith("__")):
            return _changed_in_place(name, *args, **kwargs)
        made = _use(function, args, kwargs)
        if function is Tensor.__getitem__ and first is not None and isinstance(made, TrackedParameter):
            made.part_of = (first, args[1]) if _plainly(args[1]) else None
        return made


def _given_to_each(args: Arguments, kwargs: Named) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of attention, such as a bias by distance that parameters make: each example gets a copy of its own,
    where its gradient is seen."""
    others = [
        each
        for each in (*args, *kwargs.values())
        if isinstance(each, Tensor) and not isinstance(each, TrackedParameter)
    ]

    def given(each: Any) -> Any:
        if not isinstance(each, TrackedParameter) or not others or each.dim() != others[0].dim():
            return each
        anew = _made_anew(each.expression, each.now, others[0], 0)
        return _spread(each, others[0], 0) if anew is None else anew

    return [given(each) for each in args], {key: given(each) for key, each in kwargs.items()}


def _spread(each: TrackedParameter, like: Tensor, axis: int) -> Any:
    """A copy for every entry of an axis of another tensor, whose examples it is given to."""
    sizes = [like.shape[place] if place == axis else -1 for place in range(each.dim())]
    return _use(Tensor.expand, (each, *sizes), {}, like=like)


def _made_anew(expression: Expression, now: Pass, like: Tensor, axis: int) -> Tensor | None:
    """A function of parameters and public numbers that has an entry of its own for every row, made of a copy of the
    parameters for every row: a bias by distance with a mask for each window of each image. As a function of parameters,
    every example would have a gradient of all rows, zero in all rows but its own. None if it is anything else."""
    shape = expression.value.shape
    if not isinstance(expression, Derived) or expression.name not in ELEMENTWISE:
        return None
    if len(shape) != like.dim() or shape[axis] == 1 or shape[axis] != like.shape[axis]:
        return None
    if any(each.value.dim() != len(shape) or each.value.shape[axis] != 1 for each in expression.of):
        return None
    copies = [_spread(TrackedParameter.of(each, now), like, axis) for each in expression.of]
    return None if any(isinstance(each, TrackedParameter) for each in copies) else expression.function(*copies)


def _own_rows(argument: Any, now: Pass, like: Tensor) -> Any:
    """The argument; or, of an expression with an entry for every row of another tensor, what is made anew of it."""
    label = now.tracker.labels.get(like)
    if not isinstance(argument, Expression) or not isinstance(label, Rows) or label.axis < 0:
        return argument
    anew = _made_anew(argument, now, like, label.axis)
    return argument if anew is None else anew


def _standardising(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> TrackedParameter | None:
    """A weight that is standardised by batch norm, as one example whose channels are its filters; None for any other
    use of batch norm."""
    expression = input.expression if isinstance(input, TrackedParameter) else None
    view = expression.view if isinstance(expression, Derived) else None
    if expression is None or view is None or not training or running_mean is not None or running_var is not None:
        return None
    now = cast(TrackedParameter, input).now
    shape, root = tuple(input.shape), view.root
    if not isinstance(root, Whole) or view.place != Place(shape, contiguous_strides(shape)):
        return None
    gains = [each.expression if isinstance(each, TrackedParameter) else each for each in (weight, bias)]
    others = [one for each in gains if isinstance(each, Expression) for one in each.parameters]
    if any(isinstance(each, Tensor) and now.tracker.labels.get(each) is not None for each in gains):
        return None
    if shape[:2] != (1, view.shape[0]) or prod(shape) != prod(view.shape) or root in others:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        gain, shift = map(value_of, gains)
        output = F.batch_norm(expression.value, None, None, gain, shift, True, momentum, eps)
        return TrackedParameter.of(batch_normed(root, view.shape, output, gains[0], gains[1], eps), now)


def _dropped(input: TrackedParameter, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A function of parameters with numbers left out, the same for all examples: drawn once, as they are needed on the
    way back too. In place it would change what the function was made of."""
    return input * F.dropout(torch.ones_like(input.expression.value), p, training) if training and p else input


def _require_plain(
    input: object,
    weight: TrackedParameter,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    if max_norm is not None or scale_grad_by_freq:
        raise UnsupportedUse(
            f"embedding of {', '.join(weight.expression.names)}: max_norm and scale_grad_by_freq make examples depend "
            "on each other: leave them out"
        )


def _put(into: Tensor, index: Any, given: TrackedParameter) -> None:
    """Parameters written into places of something that examples may have, such as masked stretches of sound: from a
    copy for each place, where its gradient is seen."""
    part = _plainly(index)  # else by numbers or a mask: as many places as these choose
    shape = into[index].shape if part else into.shape
    if given.dim() > len(shape):
        raise UnsupportedUse(f"a function of {given.expression.names[0]} is written into something smaller")
    try:
        everywhere = _use(Tensor.expand, (given, *shape), {}, like=into[index] if part else into)
    except RuntimeError:
        raise UnsupportedUse(
            f"a function of {given.expression.names[0]} is written by indices into a tensor of no examples "
            "(as OFT and FourierFT do): use LoRA, or build that tensor without writing into it (torch.scatter)"
        ) from None
    if isinstance(everywhere, TrackedParameter):
        raise UnsupportedUse(f"a function of {given.expression.names[0]} is written into a tensor of no examples")
    if isinstance(index, Tensor) and index.dtype == torch.bool:  # without choosing entries by what the mask holds
        mask = index.reshape(*index.shape, *[1] * (into.dim() - index.dim()))
        into.copy_(torch.where(mask, everywhere, into))
        return
    into[index] = everywhere if part else everywhere[index]


def _use(function: Function, args: Arguments, kwargs: Named, like: Tensor | None = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        name = _name(function)
        watched: list[TrackedParameter] = []
        others: list[Tensor] = []
        args = tuple(_opened(argument, watched, others) for argument in args)
        kwargs = {key: _opened(argument, watched, others) for key, argument in kwargs.items()}
        now = watched[0].now
        if kwargs.get("inplace") and isinstance(args[0], Expression):  # what it was made of is needed as it was
            kwargs["inplace"] = False
        if name in ("view_as", "reshape_as", "type_as"):  # of the other, a shape or a type is read, and no number
            args, kwargs, others = (args[0], *_plain(args[1:])), _plain(kwargs), []
            if not isinstance(args[0], Expression):
                return function(*args, **kwargs)
        if name in CUT or not torch.is_grad_enabled():
            require_no_function()
            return function(*_plain(args), **_plain(kwargs))
        if name == "requires_grad":
            return True
        apart = next((each for each in others if now.tracker.labels.get(each) is not None), None)
        if function not in GIVEN and apart is None:
            return _of_parameters(function, name, args, kwargs, now)
        if apart is not None and any(isinstance(each, Derived) for each in args):
            args = tuple(_own_rows(each, now, apart) for each in args)
            if not any(isinstance(each, Expression) for each in (*args, *kwargs.values())):
                return function(*args, **kwargs)
        ruled = _ruled(function, name, watched, args, kwargs)
        if ruled is None:
            return _without_rule(function, name, args, kwargs, now)
        output, saved, settle = ruled
        if function in GIVEN:
            now.promote(args[0].value, output, like)
        elif function in SAME_ROWS and isinstance(args[0], Tensor):
            now.tracker.label_like(output, args[0])  # of a kernel of our own, whose inside is not followed
        axes = now.axes((output,))
        if not axes:
            return _of_parameters(function, name, args, kwargs, now)
        return tapped(now, name, axes, (output,), saved, settle)[0]


def require_no_function() -> None:
    """The backward pass of an autograd.Function is not tracked: the gradient of a parameter inside would be lost.
    Reentrant checkpointing is such a function, too."""
    frame: FrameType | None = sys._getframe(1) if not torch.is_grad_enabled() else None
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "forward" and file.endswith("torch/utils/checkpoint.py"):
            raise UnsupportedUse("activations are checkpointed with use_reentrant=True: say use_reentrant=False")
        if name == "apply" and file.endswith("torch/autograd/function.py"):
            raise UnsupportedUse(
                "a parameter is given to an autograd.Function: give its module a rule (docs/adding-a-layer.md)"
            )
        frame = frame.f_back


def _ruled(function: Function, name: str, watched: Sequence[TrackedParameter], args: Arguments, kwargs: Named) -> Ruled:
    try:
        return RULES[function](*args, **kwargs) if function in RULES else None
    except TypeError as problem:
        names = dict.fromkeys(name for each in watched for name in each.expression.names)
        raise UnsupportedUse(f"{name} of {', '.join(names)}: {problem}") from problem


def _plainly(index: object) -> bool:
    """Whether what is chosen so is a part of the tensor itself, not a copy."""
    each = index if type(index) is tuple else (index,)
    return all(one is None or one is Ellipsis or type(one) in (int, slice) for one in each)


def _changed_in_place(name: str, changed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What a function gives that changes its first argument in place. It is made anew: what was changed is needed as it
    was, for a backward pass."""
    tracked = changed if isinstance(changed, TrackedParameter) else None
    anew: object = MADE_ANEW.get(name) or getattr(Tensor, IN_PLACE.get(name, name[:-1]), None)
    root = None if tracked is None else tracked.expression
    if isinstance(root, Derived) and root.view is not None:
        root = root.view.root
    if not callable(anew) or isinstance(root, Whole):
        raise UnsupportedUse(f"{name} changes {'a tensor' if root is None else root.names[0]} in place")
    if tracked is None:
        before = changed if anew in (Tensor.add, Tensor.sub) else changed.clone()
        return changed.copy_(anew(before, *args, **kwargs))
    tracked.becomes(anew(tracked, *args, **kwargs))
    return tracked


def _written(whole: Tensor, index: Any, part: Tensor) -> Tensor:
    """A copy, with something else in a part of it."""
    if has_torch_function((whole, part)):
        return handle_torch_function(_written, (whole, part), whole, index, part)
    made = whole.clone()
    made[index] = part
    return made


MADE_ANEW = {"zero_": torch.zeros_like, "fill_": torch.full_like, "__setitem__": _written}


def _name(function: Function) -> str:
    """A function's name, or a property's."""
    name: str = function.__name__
    return getattr(function, "__self__").__name__ if name == "__get__" else name  # noqa: B009


def _opened(argument: Any, watched: list[TrackedParameter], others: list[Tensor]) -> Any:
    """With expressions in place of tracked parameters, which are listed; and so are other tensors."""
    if isinstance(argument, TrackedParameter):
        watched.append(argument)
        return argument.expression
    if type(argument) in (list, tuple):
        return type(argument)(_opened(each, watched, others) for each in argument)
    if isinstance(argument, Tensor):
        others.append(argument)
    return argument


def _plain(argument: Any) -> Any:
    """With values in place of expressions."""
    if type(argument) in (list, tuple):
        return type(argument)(_plain(each) for each in argument)
    if type(argument) is dict:
        return {key: _plain(each) for key, each in argument.items()}
    return value_of(argument)


def _without_rule(function: Function, name: str, args: Arguments, kwargs: Named, now: Pass) -> Any:
    leaves, spec = tree_flatten((list(args), kwargs), is_leaf=lambda leaf: isinstance(leaf, Expression))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    result = function(*_plain(args), **_plain(kwargs))
    found, shape = tree_flatten(result)
    outputs = [place for place, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not outputs:
        return result
    axes, saved = now.axes([found[place] for place in outputs]), [leaves[place] for place in tensors]
    if not axes:
        return _of_parameters(function, name, args, kwargs, now)
    held = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # tensors are saved, and freed
    settle = partial(_settle, function, held, spec, tensors, outputs, axes, [now.axis(each) for each in saved])
    cut = [found[place].clone() for place in outputs]
    for place, tensor in zip(outputs, tapped(now, name, axes, cut, saved, settle), strict=True):
        found[place] = tensor
    return tree_unflatten(found, shape)


def _settle(
    function: Function,
    leaves: list[Any],
    spec: TreeSpec,
    tensors: list[int],
    outputs: list[int],
    axes: Sequence[Axis],
    others_axes: Sequence[Axis | None],
    _: Axis,
    saved: Sequence[Tensor],
    *signals: Tensor,
) -> Pulled:
    """Any function: its own derivative, taken of one example at a time."""
    operands = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Expression)]
    values = [leaves[place].value for place in operands]

    def outputs_of(others: Sequence[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, tensor in (*zip(tensors, others, strict=True), *zip(operands, values, strict=True)):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        try:
            found = tree_flatten(function(*args, **kwargs))[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            if "randomness" in str(problem):  # what it draws would be drawn anew
                raise UnsupportedUse(
                    f"{_name(function)} draws random numbers, which would be others on the way back: set the dropout "
                    "in it to 0"
                ) from None
            raise TypeError(f"does not take one example by itself: {str(problem).splitlines()[0]}") from None
        return tuple(found[place] for place in outputs)

    def pulled(others: Sequence[Tensor], signals: Sequence[Tensor]) -> tuple[Tensor, ...]:
        back: Callable[..., tuple[Tensor, ...]] = vjp(partial(outputs_of, others), *values)[1]
        try:
            return back(tuple(signals))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:  # outputs of another shape than an example's signal
            raise TypeError(f"does not take one example by itself: {str(problem).splitlines()[0]}") from None

    chunk = max(1, LARGEST // max(1, sum(each.numel() for each in values)))
    others = [t if axis is None else axis.alone(t) for t, axis in zip(saved, others_axes, strict=True)]
    back = [axis.alone(signal) for axis, signal in zip(axes, signals, strict=True)]
    with quietly():
        each = vmap(pulled, in_dims=([None if axis is None else 0 for axis in others_axes], 0), chunk_size=chunk)
        found = each(others, back)
    for place, gradients in zip(operands, found, strict=True):
        yield leaves[place], Dense(gradients)


def _of_parameters(function: Function, name: str, args: Arguments, kwargs: Named, now: Pass) -> Any:
    """A function of parameters alone: each tensor that it gives is tracked again."""
    found, shape = expressed(function, name, args, kwargs)
    for place, leaf in enumerate(found):
        if isinstance(leaf, Derived):
            found[place] = TrackedParameter.of(standardised(leaf), now)
    return tree_unflatten(found, shape)
