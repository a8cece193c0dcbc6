"""Which functions of parameters alone are there, and how does a gradient go back through each of them?

In factored form where there is one: through views, products, scalings and joints of matrices. Through other functions
it is materialised, for a few examples at a time where all of them would be large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeGuard

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.example_axis.labels import unseen_by_functions
from vestige.engines.per_example.gradient_forms import (
    Deferred,
    Dense,
    Gradient,
    Lookup,
    Outer,
    Place,
    Within,
    contiguous_strides,
    examples_of,
    wide,
)
from vestige.engines.per_example.parameter_expressions import (
    LARGEST,
    Arguments,
    Expression,
    Named,
    Pulled,
    Whole,
    quietly,
    value_of,
)

Back = Callable[[Gradient], Pulled]
"""From each example's gradients of what a function gives to those of what it was made of."""
Function = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Derived(Expression):
    """A function of parameters alone."""

    value: Tensor
    of: tuple[Expression, ...]
    function: Function
    """The value, of the values of what it is made of."""
    pull: Back
    view: View | None = None
    """Where its numbers are those of another expression."""
    name: str = ""
    """Of its outermost function."""

    @cached_property
    def parameters(self) -> tuple[Whole, ...]:
        return tuple(dict.fromkeys(one for each in self.of for one in each.parameters))

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return 1 + max(each.depth for each in (self.of if self.view is None else (self.view.root,)))

    def back(self, gradient: Gradient) -> Pulled:
        return self.pull(gradient)


def unchanged(of: Expression) -> Back:
    """Of a cast, a copy or a shift."""
    return lambda gradient: iter([(of, gradient)])


@dataclass(frozen=True)
class View:
    """The same numbers or some of them, each once, in another shape; a factored gradient stays factored."""

    root: Expression
    """Whose numbers they are, in a contiguous tensor of this shape and in this place there."""
    shape: tuple[int, ...]
    place: Place

    def back(self, gradient: Gradient) -> Pulled:
        if self.place == Place(self.shape, contiguous_strides(self.shape)):
            yield self.root, gradient
        elif isinstance(gradient, Outer) and self.place == Place(self.shape[::-1], (1, self.shape[-1])):
            yield self.root, Outer(gradient.right, gradient.left)
        elif isinstance(gradient, Within) and self.place.contiguous:
            inner = replace(gradient.place, offset=gradient.place.offset + self.place.offset)
            yield self.root, Within(gradient.of, inner, self.shape)
        else:
            own = Dense(gradient.dense()) if isinstance(gradient, Within) else gradient
            yield self.root, Within(own, self.place, self.shape)


def rows_of(table: Expression, index: Tensor, unused: int | None = None) -> Back:
    """Of rows of a table that no example chooses, such as an embedding of positions; one of them may have no gradient
    (`padding_idx`)."""

    def back(gradient: Gradient) -> Pulled:
        rows = gradient.dense()
        rows = rows.reshape(len(rows), -1, rows.shape[-1])
        if unused is not None:
            rows = rows.masked_fill((index == unused % len(table.value)).view(-1, 1), 0.0)
        yield table, Lookup(index.reshape(1, -1).expand(len(rows), -1), rows, len(table.value))

    return back


def joined(parts: Sequence[Expression | Tensor], axis: int, stacked: bool) -> Back:
    """Of several expressions and constants side by side along an axis, or stacked along a new one: the slices that come
    from each; factors are cut along their own axis."""
    if not stacked:  # torch leaves out empty vectors, whatever the axis
        parts = [each for each in parts if value_of(each).shape != (0,)]
    sizes = [1 if stacked else value_of(each).shape[axis] for each in parts]

    def back(gradient: Gradient) -> Pulled:
        cut: list[Gradient]
        if isinstance(gradient, Outer) and not stacked:
            left, right = gradient.left, gradient.right
            if axis == 0:
                cut = [Outer(part, right) for part in left.split(sizes, dim=2)]
            else:
                cut = [Outer(left, part) for part in right.split(sizes, dim=2)]
        else:
            slices = gradient.dense().split(sizes, dim=1 + axis)
            cut = [Dense(part.squeeze(1 + axis) if stacked else part) for part in slices]
        for each, part in zip(parts, cut, strict=True):
            if isinstance(each, Expression):
                yield each, part

    return back


def product(first: Expression | Tensor, second: Expression | Tensor, transposed: bool) -> Back:
    """Of the product of two matrices, either of which may be a constant: adapters that are merged into a weight. The
    second may be `transposed` first."""

    def back(gradient: Gradient) -> Pulled:
        left, right = wide(value_of(first)), wide(value_of(second))
        right = right.t() if transposed else right
        numbers = left.shape[0] * right.shape[1]
        if isinstance(first, Expression):
            if isinstance(gradient, Outer):
                yield first, Outer(wide(gradient.left), wide(gradient.right) @ right.t())
            else:
                yield first, carried(gradient, lambda dense: wide(dense) @ right.t(), numbers, left.numel())
        if isinstance(second, Expression):
            if isinstance(gradient, Outer):
                one, other = wide(gradient.left) @ left, wide(gradient.right)
                yield second, Outer(other, one) if transposed else Outer(one, other)
            elif transposed:
                yield second, carried(gradient, lambda dense: wide(dense).mT @ left, numbers, right.numel())
            else:
                yield second, carried(gradient, lambda dense: left.t() @ wide(dense), numbers, right.numel())

    return back


def elementwise(of: Sequence[Expression], function: Function, shape: Sequence[int]) -> Back:
    """Of numbers in the same place, broadcast; each number's gradient is its own times a derivative."""

    def back(gradient: Gradient) -> Pulled:
        with torch.enable_grad():
            leaves = [each.value.expand(shape).detach().requires_grad_() for each in of]
            output = function(*leaves)
            slopes = torch.autograd.grad(output, leaves, torch.ones_like(output))
        for each, slope in zip(of, slopes, strict=True):
            times = partial(_slope_times, slope, each.value.shape)
            yield each, carried(gradient, times, slope.numel(), each.value.numel())

    return back


def _slope_times(slope: Tensor, shape: Sequence[int], dense: Tensor) -> Tensor:
    """[examples, *shape], summed over what was broadcast."""
    found = wide(dense) * slope
    extra = found.dim() - 1 - len(shape)
    over = [*range(1, 1 + extra), *(1 + extra + i for i, n in enumerate(shape) if n == 1 != found.shape[1 + extra + i])]
    return (found.sum(dim=over) if over else found).reshape(len(found), *shape)


def scaled(of: Expression, factor: float | Tensor) -> Back:
    """Of an expression of two axes times numbers that no parameter makes: one for all, for each row or for each column.
    A factored gradient stays factored."""

    def back(gradient: Gradient) -> Pulled:
        if not isinstance(gradient, Outer):
            yield of, carried(gradient, lambda dense: wide(dense) * factor, of.value.numel(), of.value.numel())
        elif not isinstance(factor, Tensor) or factor.numel() == 1:
            number = factor.reshape(()) if isinstance(factor, Tensor) else factor
            yield of, Outer(wide(gradient.left) * number, gradient.right)
        elif factor.dim() == 2 and factor.shape[1] == 1:
            yield of, Outer(wide(gradient.left) * factor[:, 0], gradient.right)
        else:
            yield of, Outer(gradient.left, wide(gradient.right) * factor.reshape(-1))

    return back


def weight_norm(direction: Expression, length: Expression, axis: int) -> Back:
    """Of a weight of given length and direction, along every axis but one (torch's `weight_norm`), for a few examples
    at a time where all of them would be large."""

    def back(gradient: Gradient) -> Pulled:
        over = [place for place in range(direction.value.dim()) if place != axis]
        size = torch.linalg.vector_norm(direction.value, dim=over, keepdim=True) if over else direction.value.abs()
        unit, behind = direction.value / size, [1 + place for place in over]

        def along(dense: Tensor) -> Tensor:
            return (wide(dense) * unit).sum(dim=behind, keepdim=True) if behind else wide(dense) * unit

        def across(dense: Tensor) -> Tensor:
            return (wide(dense) - along(dense) * unit) * (length.value / size)

        yield direction, carried(gradient, across, unit.numel(), unit.numel())
        yield length, carried(gradient, along, unit.numel(), length.value.numel())

    return back


def by_vjp(of: Sequence[Expression], function: Function) -> Back:
    """Of any other function: materialised, and pulled back by torch."""

    def back(gradient: Gradient) -> Pulled:
        result, each_back = vjp(function, *(each.value for each in of))[:2]

        def pulled(place: int, dense: Tensor) -> Tensor:
            with quietly():
                found: Tensor = vmap(lambda each: each_back(each)[place])(dense.to(result.dtype))
            return found

        for place, each in enumerate(of):
            yield each, carried(gradient, partial(pulled, place), result.numel(), each.value.numel())

    return back


def carried(gradient: Gradient, back: Callable[[Tensor], Tensor], numbers: int, fewer: int) -> Gradient:
    """What `back` makes of a gradient: an example has so many numbers before, and so many after. Where all of them
    would be too many, a few examples at a time; and where what is made would be, later."""
    examples = examples_of(gradient)
    if examples * max(numbers, fewer) <= LARGEST:
        return Dense(back(gradient.dense()))
    later = Deferred(gradient, back, max(1, LARGEST // max(numbers, fewer)))
    return Dense(later.dense()) if examples * fewer <= LARGEST else later


# --- which one it is --------------------------------------------------------------------------------------------------

# Functions by their names without underscores: `add`, `radd` and `truediv` are operators of Python's, too.
COPIES = {"to", "type", "float", "bfloat16", "half", "double", "clone", "contiguous", "type_as", "cpu", "cuda"}
SHIFTS = {"add", "radd", "sub", "subtract"}
SCALES = {"mul", "rmul", "multiply", "div", "divide", "true_divide", "truediv"}
ELEMENTWISE = SHIFTS | SCALES
ELEMENTWISE |= {"rsub", "rtruediv", "rdiv", "neg", "negative", "reciprocal", "pow", "rpow", "abs", "lerp", "where"}
ELEMENTWISE |= {"exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "sin", "cos", "erf", "tanh", "sigmoid"}
ELEMENTWISE |= {"logsigmoid", "softplus", "relu", "gelu", "silu", "elu", "leaky_relu", "clamp", "clip", "clamp_min"}
ELEMENTWISE |= {"clamp_max", "maximum", "minimum", "expand", "expand_as", "broadcast_to"}


def expressed(
    function: Callable[..., object], name: str, args: Arguments, kwargs: Named
) -> tuple[list[object], TreeSpec]:
    """What a function of parameters alone gives, flat: an expression in place of every tensor of numbers; and its
    tree."""
    leaves, spec = tree_flatten((list(args), dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, Expression))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Expression)]
    of = tuple(leaves[place] for place in places)

    def outputs_of(*values: Tensor) -> tuple[list[object], TreeSpec]:
        filled = list(leaves)
        for place, tensor in zip(places, values, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return tree_flatten(function(*args, **kwargs))

    found, shape = outputs_of(*(each.value for each in of))
    for place, leaf in enumerate(found):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            one = partial(lambda place, *values: outputs_of(*values)[0][place], place)
            found[place] = _derived(name.strip("_"), one, of, args, kwargs, leaf.detach())
    return found, shape


def _derived(
    name: str,
    function: Function,
    of: tuple[Expression, ...],
    args: Arguments,
    kwargs: Named,
    result: Tensor,
) -> Derived:
    view = _view(of[0], result) if len(of) == 1 and name not in COPIES else None
    if view is not None:
        return Derived(result, of, function, view.back, view, name)
    back = _short(name, of, args, kwargs, result)
    if back is None:
        back = elementwise(of, function, result.shape) if name in ELEMENTWISE else by_vjp(of, function)
    return Derived(result, of, function, back, name=name)


def _view(before: Expression, result: Tensor) -> View | None:
    """A result that lies in the storage of what it was made of."""
    value = before.value
    with unseen_by_functions():
        apart = result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    if apart or not value.numel():
        return None
    place = Place.of_view(result, value)
    if place is None:
        return None
    if isinstance(before, Derived) and before.view is not None:
        return replace(before.view, place=replace(place, offset=place.offset + before.view.place.offset))
    return View(before, tuple(value.shape), place) if value.is_contiguous() else None


def _short(name: str, of: tuple[Expression, ...], args: Arguments, kwargs: Named, result: Tensor) -> Back | None:
    """The way back that is shorter than any function's, if there is one."""
    if name in COPIES:
        return unchanged(of[0])
    found = _of_one(name, of[0], args, kwargs, result) if len(of) == 1 else None
    if found is not None:
        return found
    if name in ("matmul", "mm", "linear") and len(args) == 2 and not kwargs:
        left, right = (each if isinstance(each, Expression) else each.detach() for each in args)
        if value_of(left).dim() == value_of(right).dim() == 2:
            return product(left, right, transposed=name == "linear")
    if name == "weight_norm" and len(of) == 2:
        axis = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        return weight_norm(of[0], of[1], axis) if axis != -1 else None
    if name in ("cat", "concat", "concatenate", "stack", "vstack") and isinstance(args[0], list | tuple):
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if name != "vstack" or all(each.value.dim() > 1 for each in of):
            return joined(args[0], axis % result.dim(), name == "stack")
    return None


def _of_one(name: str, of: Expression, args: Arguments, kwargs: Named, result: Tensor) -> Back | None:
    """Of a function of one expression and constants."""
    value, others = of.value, [each for each in args if each is not of]
    table = value.dim() == 2 and result.shape[-1:] == value.shape[1:]
    if name == "embedding" and isinstance(args[0], Tensor) and table:
        return rows_of(of, args[0], args[2] if len(args) > 2 else kwargs.get("padding_idx"))
    if name == "getitem" and args[0] is of and table and whole_numbers(args[1]):
        return rows_of(of, args[1].to(value.device) % len(value))  # it may lie on the host
    if name == "index_select" and table and args[0] is of and args[1] in (0, -2):
        return rows_of(of, args[2])
    if len(args) != 2 or kwargs or len(others) != 1 or result.shape != value.shape:
        return None
    if (name in SHIFTS and args[0] is of) or name in ("add", "radd"):
        return unchanged(of)
    other = others[0]
    along = not isinstance(other, Tensor) or other.numel() == 1 or value.numel() != other.numel()
    if along and name in SCALES and (args[0] is of or "mul" in name) and value.dim() == 2:
        return scaled(of, 1 / other if "div" in name else other)
    return None


def whole_numbers(index: object) -> TypeGuard[Tensor]:
    return isinstance(index, Tensor) and not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)
