"""Which functions of parameters alone are there, and how does a gradient go back through each of them?

In factored form where there is one: through views, products, scalings and joints of matrices. Through other functions
it is materialised, for a few examples at a time where all of them would be large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from vestige.engines.per_example.gradient_forms import (
    Deferred,
    Dense,
    Gradient,
    Lookup,
    Outer,
    Place,
    Within,
    combine,
    contiguous_strides,
    examples_of,
    wide,
)
from vestige.engines.per_example.parameter_expressions import (
    LARGEST,
    Environment,
    Expression,
    Operand,
    descend,
    quietly,
    value_of,
    valued,
)


@dataclass(frozen=True, eq=False)
class View:
    """The same numbers or some of them, each once, in another shape; a factored gradient stays factored."""

    of: Expression
    function: Callable[[Tensor], Tensor]
    root: Expression
    """Whose numbers they are, in a contiguous tensor of this shape and in this place there."""
    shape: tuple[int, ...]
    place: Place

    @property
    def names(self) -> tuple[str, ...]:
        return self.root.names

    def value(self, environment: Environment) -> Tensor:
        return self.function(valued(self.of, environment))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        if self.place == Place(self.shape, contiguous_strides(self.shape)):
            return descend(self.root, gradient, environment)
        if isinstance(gradient, Outer) and self.place == Place(self.shape[::-1], (1, self.shape[-1])):
            return descend(self.root, Outer(gradient.right, gradient.left), environment)
        if isinstance(gradient, Within):
            if not self.place.contiguous:
                gradient = Dense(gradient.dense())
            else:
                inner = replace(gradient.place, offset=gradient.place.offset + self.place.offset)
                return descend(self.root, Within(gradient.of, inner, self.shape), environment)
        return descend(self.root, Within(gradient, self.place, self.shape), environment)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table that no example chooses, such as an embedding of positions."""

    of: Expression
    index: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return self.of.names

    def value(self, environment: Environment) -> Tensor:
        return torch.nn.functional.embedding(self.index, valued(self.of, environment))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        rows = gradient.dense()
        rows = rows.reshape(len(rows), -1, rows.shape[-1])
        index = self.index.reshape(1, -1).expand(len(rows), -1)
        return descend(self.of, Lookup(index, rows, len(valued(self.of, environment))), environment)


@dataclass(frozen=True, eq=False)
class Joined:
    """Several expressions side by side along an axis, or stacked along a new one."""

    of: tuple[Expression | Tensor, ...]
    """A tensor is a constant among them."""
    function: Callable[..., Tensor]
    axis: int
    stacked: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self._expressions())

    def _expressions(self) -> list[Expression]:
        return [each for each in self.of if not isinstance(each, Tensor)]

    def value(self, environment: Environment) -> Tensor:
        return self.function(*(valued(each, environment) for each in self._expressions()))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        """By the slices that come from each; factors are cut along their own axis."""
        sizes = [1 if self.stacked else _valued(each, environment).shape[self.axis] for each in self.of]
        if isinstance(gradient, Outer) and not self.stacked:
            left, right = gradient.left, gradient.right
            if self.axis == 0:
                cut: list[Gradient] = [Outer(part, right) for part in left.split(sizes, dim=2)]
            else:
                cut = [Outer(left, part) for part in right.split(sizes, dim=2)]
        else:
            slices = gradient.dense().split(sizes, dim=1 + self.axis)
            cut = [Dense(part.squeeze(1 + self.axis) if self.stacked else part) for part in slices]
        pairs = [(each, part) for each, part in zip(self.of, cut, strict=True) if not isinstance(each, Tensor)]
        return _added(descend(each, part, environment) for each, part in pairs)


@dataclass(frozen=True, eq=False)
class Product:
    """The product of two matrices, either of which may be a constant: adapters that are merged into a weight."""

    left: Expression | Tensor
    right: Expression | Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return _names(each for each in (self.left, self.right) if not isinstance(each, Tensor))

    def value(self, environment: Environment) -> Tensor:
        return _valued(self.left, environment) @ _valued(self.right, environment)

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        left, right = wide(_valued(self.left, environment)), wide(_valued(self.right, environment))
        found: list[dict[str, Gradient]] = []
        if isinstance(gradient, Outer):
            one, other = wide(gradient.left), wide(gradient.right)
            if not isinstance(self.left, Tensor):
                found.append(descend(self.left, Outer(one, other @ right.t()), environment))
            if not isinstance(self.right, Tensor):
                found.append(descend(self.right, Outer(one @ left, other), environment))
            return _added(found)
        numbers = left.shape[0] * right.shape[1]
        if not isinstance(self.left, Tensor):
            back = carried(gradient, lambda dense: wide(dense) @ right.t(), numbers, left.numel())
            found.append(descend(self.left, back, environment))
        if not isinstance(self.right, Tensor):
            back = carried(gradient, lambda dense: left.t() @ wide(dense), numbers, right.numel())
            found.append(descend(self.right, back, environment))
        return _added(found)


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A function of numbers in the same place, broadcast; each number's gradient is its own times a derivative."""

    of: tuple[Expression, ...]
    function: Callable[..., Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.of)

    def value(self, environment: Environment) -> Tensor:
        return self.function(*(valued(each, environment) for each in self.of))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        values = [valued(each, environment) for each in self.of]
        shape = torch.broadcast_shapes(self.function(*values).shape)
        with torch.enable_grad():
            leaves = [value.expand(shape).detach().requires_grad_() for value in values]
            output = self.function(*leaves)
            slopes = torch.autograd.grad(output, leaves, torch.ones_like(output))
        found = []
        for each, value, slope in zip(self.of, values, slopes, strict=True):
            back = partial(_slope_times, slope, value.shape)
            found.append(descend(each, carried(gradient, back, slope.numel(), value.numel()), environment))
        return _added(found)


def _slope_times(slope: Tensor, shape: Sequence[int], dense: Tensor) -> Tensor:
    return _summed(wide(dense) * slope, shape)


def _summed(dense: Tensor, shape: Sequence[int]) -> Tensor:
    """[examples, *shape], summed over what was broadcast."""
    extra = dense.dim() - 1 - len(shape)
    over = [*range(1, 1 + extra), *(1 + extra + i for i, n in enumerate(shape) if n == 1 != dense.shape[1 + extra + i])]
    return (dense.sum(dim=over) if over else dense).reshape(len(dense), *shape)


@dataclass(frozen=True, eq=False)
class Scaled:
    """An expression of two axes times numbers that no parameter makes: one for all, for each row or for each column.

    A factored gradient stays factored.
    """

    of: Expression
    factor: float | Tensor
    function: Callable[..., Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return self.of.names

    def value(self, environment: Environment) -> Tensor:
        return self.function(valued(self.of, environment))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        factor = self.factor
        if not isinstance(gradient, Outer):
            numbers = valued(self.of, environment).numel()
            return descend(
                self.of, carried(gradient, lambda dense: wide(dense) * factor, numbers, numbers), environment
            )
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            number = factor if not isinstance(factor, Tensor) else factor.reshape(())
            return descend(self.of, Outer(wide(gradient.left) * number, gradient.right), environment)
        if factor.dim() == 2 and factor.shape[1] == 1:
            return descend(self.of, Outer(wide(gradient.left) * factor[:, 0], gradient.right), environment)
        return descend(self.of, Outer(gradient.left, wide(gradient.right) * factor.reshape(-1)), environment)


@dataclass(frozen=True, eq=False)
class WeightNorm:
    """A weight of given length and direction, along every axis but one: `torch.nn.utils.parametrizations.weight_norm`.

    A gradient is carried over a few examples at a time where all of them would be large.
    """

    direction: Expression
    length: Expression
    axis: int

    @property
    def names(self) -> tuple[str, ...]:
        return _names((self.direction, self.length))

    def value(self, environment: Environment) -> Tensor:
        return torch._weight_norm(valued(self.direction, environment), valued(self.length, environment), self.axis)

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        direction, length = valued(self.direction, environment), valued(self.length, environment)
        over = [place for place in range(direction.dim()) if place != self.axis]
        size = torch.linalg.vector_norm(direction, dim=over, keepdim=True) if over else direction.abs()
        unit = direction / size
        behind = [1 + place for place in over]

        def along(dense: Tensor) -> Tensor:
            return (wide(dense) * unit).sum(dim=behind, keepdim=True) if behind else wide(dense) * unit

        def across(dense: Tensor) -> Tensor:
            return (wide(dense) - along(dense) * unit) * (length / size)

        return _added(
            (
                descend(self.direction, carried(gradient, across, direction.numel(), direction.numel()), environment),
                descend(self.length, carried(gradient, along, direction.numel(), length.numel()), environment),
            )
        )


@dataclass(frozen=True, eq=False)
class Derived:
    """Any other function of parameters alone; its per-example gradients are materialised and pulled back."""

    of: tuple[Expression, ...]
    function: Callable[..., Tensor]
    same: bool = False
    """Whether it only casts, copies or shifts one expression, whose gradient is then its own."""
    form: Expression | None = None
    """A shorter way back, where there is one."""
    name: str = ""
    shape: tuple[int, ...] = ()
    """The name of its outermost function, and the shape of its value."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return _names(self.of)

    def value(self, environment: Environment) -> Tensor:
        return self.function(*(valued(each, environment) for each in self.of))

    def pull(self, gradient: Gradient, environment: Environment) -> dict[str, Gradient]:
        if self.form is not None:
            return self.form.pull(gradient, environment)
        if self.same:
            return descend(self.of[0], gradient, environment)
        values = [valued(each, environment).detach() for each in self.of]
        result, back = vjp(self.function, *values)[:2]

        def pulled(place: int, dense: Tensor) -> Tensor:
            with quietly():
                found: Tensor = vmap(lambda each: back(each)[place])(dense.to(result.dtype))
            return found

        found = []
        for place, (each, value) in enumerate(zip(self.of, values, strict=True)):
            carried_on = carried(gradient, partial(pulled, place), result.numel(), value.numel())
            found.append(descend(each, carried_on, environment))
        return _added(found)


def carried(gradient: Gradient, back: Callable[[Tensor], Tensor], numbers: int, fewer: int) -> Gradient:
    """What `back` makes of a gradient: an example has so many numbers before, and so many after. Where all of them
    would be too many, a few examples at a time; and where what is made would be, later."""
    examples = examples_of(gradient)
    if examples * max(numbers, fewer) <= LARGEST:
        return Dense(back(gradient.dense()))
    later = Deferred(gradient, back, max(1, LARGEST // max(numbers, fewer)))
    return Dense(later.dense()) if examples * fewer <= LARGEST else later


def _names(expressions: Iterable[Expression]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in expressions for name in each.names))


def _valued(each: Expression | Tensor, environment: Environment) -> Tensor:
    return each if isinstance(each, Tensor) else valued(each, environment)


def _added(found: Iterable[Mapping[str, Gradient]]) -> dict[str, Gradient]:
    """Gradients that reach a parameter on several ways add up."""
    uses: dict[str, list[Gradient]] = {}
    for each in found:
        for name, gradient in each.items():
            uses.setdefault(name, []).append(gradient)
    return {name: combine(gradients) for name, gradients in uses.items()}


# --- which one it is --------------------------------------------------------------------------------------------------

COPIES = frozenset(
    {"to", "type", "float", "bfloat16", "half", "double", "clone", "contiguous", "type_as", "cpu", "cuda"}
)
ELEMENTWISE = frozenset(
    {
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "reciprocal"),
        *(
            "exp",
            "log",
            "log1p",
            "expm1",
            "sqrt",
            "rsqrt",
            "square",
            "pow",
            "abs",
            "sin",
            "cos",
            "erf",
            "lerp",
            "where",
        ),
        *("tanh", "sigmoid", "logsigmoid", "softplus", "relu", "gelu", "silu", "elu", "leaky_relu"),
        *("clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "expand", "expand_as", "broadcast_to"),
        *(
            "__add__",
            "__radd__",
            "__sub__",
            "__rsub__",
            "__mul__",
            "__rmul__",
            "__truediv__",
            "__rtruediv__",
            "__rdiv__",
        ),
        *("__neg__", "__pow__", "__rpow__", "__abs__"),
    }
)
SHIFTS = frozenset({"add", "sub", "subtract", "__add__", "__radd__", "__sub__"})
SCALES = frozenset({"mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"})


def expressed(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """What a function of parameters alone gives, flat: an operand in place of every tensor of numbers; and its tree."""
    leaves, spec = tree_flatten((list(args), dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, Operand))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Operand)]
    operands = [leaves[place] for place in places]

    def outputs_of(*values: Tensor) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, values, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        return tree_flatten(function(*args, **kwargs))[0]

    plain = tree_unflatten([value_of(leaf) for leaf in leaves], spec)
    found, shape = tree_flatten(function(*plain[0], **plain[1]))
    for place, leaf in enumerate(found):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            one = partial(_output, outputs_of, place)
            form = _form(name, one, operands, args, kwargs, leaf)
            parents = tuple(operand.expression for operand in operands)
            made = Derived(parents, one, form=form, name=name, shape=tuple(leaf.shape))
            found[place] = Operand(made, leaf)
    return found, shape


def _output(outputs_of: Callable[..., list[Any]], place: int, *values: Tensor) -> Any:
    return outputs_of(*values)[place]


def _form(
    name: str,
    function: Callable[..., Tensor],
    operands: Sequence[Operand],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Tensor,
) -> Expression:
    parents = tuple(operand.expression for operand in operands)
    if name in COPIES:
        return Derived(parents, function, same=True)
    if len(operands) == 1:
        found = _view(operands[0], function, result) or _of_one(name, function, operands[0], args, kwargs, result)
        if found is not None:
            return found
    if name in ("matmul", "mm", "__matmul__", "linear"):
        product = _product(name, args, kwargs)
        if product is not None:
            return product
    if name == "_weight_norm" and len(operands) == 2:
        axis = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        if axis != -1:
            return WeightNorm(parents[0], parents[1], axis)
        return Derived(parents, function)
    if name in ("cat", "concat", "concatenate", "stack", "vstack") and isinstance(args[0], list | tuple):
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        stacked = name == "stack"
        if name != "vstack" or all(operand.value.dim() > 1 for operand in operands):
            parts = tuple(each.expression if isinstance(each, Operand) else each for each in args[0])
            return Joined(parts, function, axis % result.dim(), stacked)
    if name in ELEMENTWISE:
        return Elementwise(parents, function)
    return Derived(parents, function)


def _view(operand: Operand, function: Callable[..., Tensor], result: Tensor) -> View | None:
    """A result that lies in the storage of what it was made of."""
    value = operand.value
    if not value.numel() or result.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return None
    place = Place.of_view(result, value)
    if place is None:
        return None
    before = operand.expression
    form = before.form if isinstance(before, Derived) else None
    if isinstance(form, View):
        place = replace(place, offset=place.offset + form.place.offset)
        return View(before, function, form.root, form.shape, place)
    return View(before, function, before, tuple(value.shape), place) if value.is_contiguous() else None


def _of_one(
    name: str,
    function: Callable[..., Tensor],
    operand: Operand,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Tensor,
) -> Expression | None:
    """A short form of a function of one expression and constants."""
    value, others = operand.value, [each for each in args if each is not operand]
    table = value.dim() == 2 and result.shape[-1:] == value.shape[1:]
    if name == "embedding" and isinstance(args[0], Tensor) and table:
        return Rows(operand.expression, args[0])
    if name == "__getitem__" and args[0] is operand and table and _whole_numbers(args[1]):
        return Rows(operand.expression, args[1].to(value.device) % len(value))  # it may lie on the host
    if name == "index_select" and table and args[0] is operand and args[1] in (0, -2):
        return Rows(operand.expression, args[2])
    if len(args) != 2 or kwargs or len(others) != 1 or result.shape != value.shape:
        return None
    if name in SHIFTS and args[0] is operand:
        return Derived((operand.expression,), function, same=True)
    other = others[0]
    if name in ("add", "__add__", "__radd__"):
        return Derived((operand.expression,), function, same=True)
    if name in SCALES and (args[0] is operand or "mul" in name) and value.dim() == 2:
        along = not isinstance(other, Tensor) or other.numel() == 1 or value.numel() != other.numel()
        if along:
            return Scaled(operand.expression, 1 / other if "div" in name else other, function)
    return None


def _whole_numbers(index: Any) -> bool:
    return isinstance(index, Tensor) and not index.is_floating_point() and index.dtype not in (torch.bool, torch.uint8)


def _product(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    if len(args) != 2 or kwargs or any(value_of(each).dim() != 2 for each in args):
        return None
    left, right = (each.expression if isinstance(each, Operand) else each.detach() for each in args)
    if name != "linear":
        return Product(left, right)
    if isinstance(right, Tensor):
        return Product(left, right.t())
    shape = tuple(args[1].value.shape)
    turned = View(right, Tensor.t, right, shape, Place(shape[::-1], (1, shape[1])))
    return Product(left, turned)
