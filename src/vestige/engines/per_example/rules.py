"""Which form do the gradients of a parameter take where a function uses it? One rule per function that has a short cut.

A rule runs the function on plain values and says what to save, and how to make each example's gradients of that and of
the gradient of the output. A function without a rule is differentiated one example at a time (`uses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import (
    Dense,
    Geometry,
    Gradient,
    Lookup,
    Patches,
    Place,
    Routed,
    Within,
    cheaper,
    contiguous_strides,
    product,
    wide,
)
from vestige.engines.per_example.parameter_expressions import Axis, Expression, Pulled, Settle, value_of
from vestige.engines.per_example.parameter_functions import whole_numbers

Ruled = tuple[Tensor, tuple[Tensor, ...], Settle] | None
"""The output, what is saved, and how gradients are made of it; None where the rule does not apply."""
Rule = Callable[..., Ruled]
Operand = Tensor | Expression
Sizes = int | Sequence[int]


def _rows(axis: Axis, tensor: Tensor) -> Tensor:
    """[examples, positions, width], of a tensor whose last axis is the width."""
    found = axis.first(tensor)
    return found.reshape(axis.examples, -1, found.shape[-1])


# --- products ---------------------------------------------------------------------------------------------------------


def linear(input: Operand, weight: Operand, bias: Operand | None = None) -> Ruled:
    if isinstance(input, Expression):
        return None
    return _affine(kernels.linear(input, value_of(weight), value_of(bias)), input, weight, bias)


def known_linear(output: Tensor, input: Tensor, weight: Operand, bias: Operand | None = None) -> Tensor:
    """`output`, taken for F.linear(input, weight, bias) by the rule: of a map inside a loop that has run already, whose
    backward pass hands this the gradient. Only of rows, and of parameters of which one is tracked."""
    if has_torch_function((weight, bias)):
        return handle_torch_function(known_linear, (weight, bias), output, input, weight, bias)  # type: ignore[no-any-return]
    raise TypeError("a linear map inside a loop without examples: its gradient would be lost")


def _affine(output: Tensor, input: Tensor, weight: Operand, bias: Operand | None = None, turned: bool = False) -> Ruled:
    """`output` is F.linear(input, weight, bias), or of a weight that is `turned`."""

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        rows = kernels.in_rows(_rows(axis, signal))  # once, for norms and sums
        if isinstance(weight, Expression):
            inside = _rows(axis, saved[0])
            yield weight, product(inside, rows) if turned else product(rows, inside)
        if isinstance(bias, Expression) and bias.value.shape == rows.shape[2:]:
            yield bias, Dense(rows[:, 0] if rows.shape[1] == 1 else wide(rows).sum(dim=1))
        elif isinstance(bias, Expression):
            yield bias, Dense(_broadcast(bias, axis, wide(signal)))

    return output, (input,) if isinstance(weight, Expression) else (), settle


def matmul(input: Operand, other: Operand) -> Ruled:
    """input @ other, where the second is a matrix of parameters."""
    if isinstance(input, Expression) or not isinstance(other, Expression) or other.value.dim() != 2 or input.dim() < 2:
        return _stacked_matmul(input, other)
    return _affine(input @ other.value, input, other, turned=True)


def addmm(input: Operand, mat1: Operand, mat2: Operand, *, beta: float = 1, alpha: float = 1) -> Ruled:
    if isinstance(mat1, Expression) or not isinstance(input, Expression) or beta != 1 or alpha != 1:
        return None
    return _affine(torch.addmm(input.value, mat1, value_of(mat2)), mat1, mat2, input, turned=True)


def _stacked_matmul(input: Operand, other: Operand) -> Ruled:
    """Where one side is a vector of parameters, or a stack of matrices of them."""
    one, two = value_of(input).dim(), value_of(other).dim()
    if isinstance(input, Expression) == isinstance(other, Expression) or max(one, two) > 8:
        return None
    stack = "ABCDEF"[: max(one, two, 2) - 2]
    first = "k" if one == 1 else stack[len(stack) - (one - 2) :] + "ik"
    second = "k" if two == 1 else stack[len(stack) - (two - 2) :] + "kj"
    output = stack + ("i" if one > 1 else "") + ("j" if two > 1 else "")
    return einsum(f"{first},{second}->{output}", input, other)


def baddbmm(input: Operand, batch1: Operand, batch2: Operand, *, beta: float = 1, alpha: float = 1) -> Ruled:
    return None if beta != 1 or alpha != 1 else _shifted(_stacked_matmul(batch1, batch2), input)


def bilinear(input1: Operand, input2: Operand, weight: Operand, bias: Operand | None = None) -> Ruled:
    if isinstance(input1, Expression) or isinstance(input2, Expression) or not isinstance(weight, Expression):
        return None
    return _shifted(einsum("...i,oij,...j->...o", input1, weight, input2), bias)


def _shifted(product: Ruled, bias: Operand | None) -> Ruled:
    """A product with something added to it: numbers, parameters, or nothing."""
    if product is None or bias is None:
        return product
    output, saved, of_product = product

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        yield from of_product(axis, saved, signal)
        if isinstance(bias, Expression):
            yield bias, Dense(_broadcast(bias, axis, wide(signal)))

    return output + value_of(bias), saved, settle


def _in_own_part(each: Tensor, axis: int) -> Tensor:
    """Gradients [examples, ..., positions, ...] of what was expanded over the batch: an example's part is not zero."""
    count, moved = len(each), each.movedim(axis, 1)
    whole = moved.new_zeros(count, count, *moved.shape[1:])
    every = torch.arange(count, device=each.device)
    whole[every, every] = moved
    return whole.flatten(1, 2).movedim(1, axis)


def einsum(equation: object, *operands: Any) -> Ruled:
    """Any product in which one factor is made of parameters: its gradient is the product of the others and of the
    gradient of the output, an example's by itself."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    labelled = _labels(equation, [value_of(each) for each in operands])
    unbroadcast = None if labelled is None else _unbroadcast(operands, labelled[0])
    if labelled is None or unbroadcast is None:
        return None
    (operands, inputs), output = unbroadcast, labelled[1]
    pairs = list(zip(operands, inputs, strict=True))
    mine = [(each, labels) for each, labels in pairs if isinstance(each, Expression)]
    others = [(each, labels) for each, labels in pairs if isinstance(each, Tensor)]
    if len(mine) != 1:
        return None
    (parameter, own), theirs = mine[0], [labels for _, labels in others]  # `settle` holds no factors: they are saved
    if len(set(own)) < len(own) or not set(own) <= set(output).union(*theirs):
        return None

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        label, parts, names = output[axis.place], [], []
        expanded = label in own and parameter.value.shape[own.index(label)] != 1  # over the batch, each its own part
        wanted = own if expanded else own.replace(label, "")  # else there is but one, given to each example
        for tensor, labels in zip((*saved, signal), (*theirs, output), strict=True):
            tensor = wide(tensor)
            if label in labels:  # [examples, positions, the others]: the positions take the label's place
                place = labels.index(label)
                tensor = replace(axis, place=place).alone(tensor)
                labels = "Z" + labels
            parts.append(tensor)
            names.append(labels)
        if len(parts) == 2 and wanted == own and not expanded:
            found = _product_of(parts, names, own)
            if found is not None:
                yield parameter, found
                return
        dense = torch.einsum(f"{','.join(names)}->Z{wanted}", *parts)
        if expanded:
            dense = _in_own_part(dense, 1 + own.index(label))
        yield parameter, Dense(dense.reshape(axis.examples, *parameter.value.shape))

    found = torch.einsum(f"{','.join(inputs)}->{output}", *map(value_of, operands))
    return found, tuple(each for each, _ in others), settle


def _product_of(parts: Sequence[Tensor], names: Sequence[str], own: str) -> Gradient | None:
    """The factored form, where the parameter's axes are first all of one factor and then all of the other."""
    for first, second in ((0, 1), (1, 0)):
        cut = sum(label in names[first] and label not in names[second] for label in own)
        rows, columns = own[:cut], own[cut:]
        alone = all(label in names[first] and label not in names[second] for label in rows)
        if not alone or not all(label in names[second] and label not in names[first] for label in columns):
            continue
        both = sorted(set(names[first] + names[second]) - set("Z" + own))
        if any(label not in names[0] or label not in names[1] for label in both) or not (rows and columns):
            return None
        left, right = (
            parts[one].permute([names[one].index(label) for label in ("Z", *both, *ending)])
            .flatten(1 + len(both))
            .reshape(len(parts[one]), -1, prod(parts[one].shape[names[one].index(label)] for label in ending))
            for one, ending in ((first, rows), (second, columns))
        )  # fmt: skip
        found, size = product(left, right), dict(zip("".join(names), _sizes(parts), strict=True))
        shape = tuple(size[label] for label in own)
        if isinstance(found, Dense):
            return Dense(found.value.view(len(left), *shape))
        flat = (left.shape[2], right.shape[2])
        return found if len(own) == 2 else Within(found, Place(flat, contiguous_strides(flat)), shape)
    return None


def _sizes(parts: Sequence[Tensor]) -> list[int]:
    return [size for part in parts for size in part.shape]


def _labels(equation: object, values: Sequence[Tensor]) -> tuple[list[str], str] | None:
    """The axes of every factor and of the output, one letter each; None where the equation is of another form."""
    if not isinstance(equation, str) or "->" not in equation or any(each in equation for each in "XYZ"):
        return None
    left, output = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    widest = max((v.dim() - len(i) + 3 for i, v in zip(inputs, values, strict=True) if "..." in i), default=0)
    dots = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVW" if letter not in equation][:widest]
    filled = []
    for labels, value in zip(inputs, values, strict=True):
        extra = value.dim() - len(labels) + 3
        filled.append(labels.replace("...", "".join(dots[len(dots) - extra :] if extra > 0 else [])))
    return filled, output.replace("...", "".join(dots))


def _unbroadcast(operands: Sequence[Operand], inputs: Sequence[str]) -> tuple[tuple[Operand, ...], list[str]] | None:
    """Without the axes of one place along which a factor without parameters is broadcast."""
    sizes: dict[str, int] = {}
    for each, labels in zip(operands, inputs, strict=True):
        for label, size in zip(labels, value_of(each).shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 0))
    factors: list[Operand] = []
    found = []
    for each, labels in zip(operands, inputs, strict=True):
        shape = value_of(each).shape
        over = [place for place, label in enumerate(labels) if shape[place] != sizes[label]]
        if over and isinstance(each, Expression):
            return None
        factors.append(each.squeeze(over) if over and isinstance(each, Tensor) else each)
        found.append("".join(label for place, label in enumerate(labels) if place not in over))
    return tuple(factors), found


def routed(input: Tensor, weight: Operand, index: Tensor) -> Tensor:
    """weight[index[row]] @ input[row] for every row, with weight [experts, out, in]: a mixture of experts' product."""
    if has_torch_function((weight,)):
        return handle_torch_function(routed, (weight,), input, weight, index)  # type: ignore[no-any-return]
    return _routed_product(input, weight, index)


@torch.library.custom_op(
    "vestige::routed", mutates_args=(), schema="(Tensor input, Tensor weight, Tensor index) -> Tensor"
)
def _routed_product(input: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """An operator of its own, with a rule of its own: inside, rows of all examples are sorted by their experts."""
    order, counts = index.argsort(), index.bincount(minlength=len(weight)).tolist()
    rows = input[order].split(counts)
    sorted_rows = torch.cat([F.linear(some, matrix) for some, matrix in zip(rows, weight, strict=True)])
    return sorted_rows[order.argsort()]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _back(ctx: Any, signal: Tensor) -> tuple[Tensor, None, None]:
    weight, index = ctx.saved_tensors
    return _routed_product(signal, weight.mT, index), None, None


_routed_product.register_autograd(_back, setup_context=_save)


def _routed(input: Tensor, weight: Expression, index: Tensor) -> Ruled:
    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        left, right = _rows(axis, signal), _rows(axis, saved[0])
        found = Routed(axis.first(saved[1]).flatten(1), left, right, len(weight.value))
        small = prod(weight.value.shape) <= left.shape[1] * (left.shape[2] + right.shape[2])
        yield weight, Dense(found.dense()) if small else found

    return routed(input, weight.value, index), (input, index), settle


# --- convolutions -----------------------------------------------------------------------------------------------------


def convolution(
    rank: int,
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Ruled:
    if isinstance(input, Expression) or input.dim() != rank + 2:
        return None
    stride, dilation, kernel = _tuple(stride, rank), _tuple(dilation, rank), tuple(value_of(weight).shape[2:])
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        input = F.pad(input, [side for size in reversed(whole) for side in (size // 2, size - size // 2)])
    around = (0,) * rank if isinstance(padding, str) else _tuple(padding, rank)
    function = partial((F.conv1d, F.conv2d, F.conv3d)[rank - 1], groups=groups)
    geometry = Geometry(kernel, stride, around, dilation, groups)
    return _convolved(function, input, weight, bias, geometry, transposed=False)


def transposed_convolution(
    rank: int,
    input: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Ruled:
    """The way back of a convolution: what is its image there is the gradient of the output here."""
    if isinstance(input, Expression) or input.dim() != rank + 2:
        return None
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    stride, padding, dilation = _tuple(stride, rank), _tuple(padding, rank), _tuple(dilation, rank)
    geometry = Geometry(tuple(value_of(weight).shape[2:]), stride, padding, dilation, groups)
    function = partial(function, output_padding=_tuple(output_padding, rank), groups=groups)
    return _convolved(function, input, weight, bias, geometry, transposed=True)


def _convolved(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Operand,
    bias: Operand | None,
    geometry: Geometry,
    transposed: bool,
) -> Ruled:
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        # As autocast will: the gradient is made of the numbers that were convolved, and no more of them is kept.
        input = input.to(torch.get_autocast_dtype(device))
    sizes = {"stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation}
    output = function(input, value_of(weight), value_of(bias), **sizes)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        signal = axis.folded(signal)
        if isinstance(weight, Expression):
            image = axis.folded(saved[0])
            yield weight, patches(*((signal, image) if transposed else (image, signal)), geometry, axis.examples)
        if isinstance(bias, Expression):
            yield bias, Dense(_per_channel(signal, axis.examples))

    return output, (input,) if isinstance(weight, Expression) else (), settle


def patches(image: Tensor, signal: Tensor, geometry: Geometry, examples: int) -> Gradient:
    if len(signal) != examples:  # views of each, or the model folded another axis into the batch axis
        image, signal = image.unflatten(0, (examples, -1)), signal.unflatten(0, (examples, -1))
    return cheaper(Patches(image, signal, geometry))


def _tuple(value: Sizes, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _per_channel(signal: Tensor, examples: int) -> Tensor:
    full = torch.promote_types(signal.dtype, torch.float32)
    return signal[..., None].flatten(2).sum(dim=2, dtype=full).view(examples, -1, signal.shape[1]).sum(dim=1)


# --- tables -----------------------------------------------------------------------------------------------------------


def embedding(input: Tensor, weight: Expression, padding_idx: int | None = None, *_: object, **__: object) -> Ruled:
    table: Tensor = weight.value
    unused = None if padding_idx is None else padding_idx % len(table)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        index, rows = axis.first(saved[0]).flatten(1), _rows(axis, signal)
        if unused is not None:
            rows = rows.masked_fill((index == unused)[:, :, None], 0.0)
        yield weight, Lookup(index, rows, len(table))

    return F.embedding(input, table), (input,), settle


def select(input: Operand, index: object) -> Ruled:
    """Rows of a parameter of any shape, by a tensor of their numbers."""
    if not isinstance(input, Expression):
        return None
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if not whole_numbers(index) or index.dim() == 0 or not input.value.dim():
        return None
    value = input.value
    flat = (len(value), value[0].numel())

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        rows = axis.first(signal).reshape(axis.examples, -1, flat[1])
        found = Lookup(axis.first(saved[0]).flatten(1), rows, flat[0])
        whole = Place(flat, contiguous_strides(flat))
        yield input, found if value.dim() == 2 else Within(found, whole, tuple(value.shape))

    return value[index], (index.to(value.device) % flat[0],), settle


# --- norms ------------------------------------------------------------------------------------------------------------


def layer_norm(
    input: Operand,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
) -> Ruled:
    if isinstance(input, Expression):
        return None
    shape = tuple(normalized_shape)
    input = wide(input)
    output, *statistics = torch.native_layer_norm(input, shape, value_of(weight), value_of(bias), eps)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        rows, own = (axis.examples, -1, prod(shape)), (axis.examples, *shape)
        signal = axis.first(signal).reshape(rows)
        if not isinstance(weight, Expression):
            assert isinstance(bias, Expression)
            yield bias, Dense(wide(signal).sum(dim=1).view(own))
            return
        others = [axis.first(each).flatten(1) for each in saved[1:]]
        weights, biases = kernels.layer_norm_sums(axis.first(saved[0]).reshape(rows), signal, *others)
        yield weight, Dense(weights.view(own))
        if isinstance(bias, Expression):
            yield bias, Dense(biases.view(own))

    return output, (input, *statistics) if isinstance(weight, Expression) else (), settle


def rms_norm(
    input: Operand, normalized_shape: Sequence[int], weight: Operand | None = None, eps: float | None = None
) -> Ruled:
    if isinstance(input, Expression) or not isinstance(weight, Expression):
        return None
    shape = list(normalized_shape)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        standard = F.rms_norm(wide(saved[0]), shape, eps=eps) * signal
        yield weight, Dense(axis.first(standard).reshape(axis.examples, -1, *shape).sum(dim=1))

    return F.rms_norm(input, shape, weight.value, eps), (input,), settle


def group_norm(
    input: Operand, num_groups: int, weight: Operand | None = None, bias: Operand | None = None, eps: float = 1e-5
) -> Ruled:
    """With the batch axis folded into the channels, torch's own backward gives one gradient per example."""
    if isinstance(input, Expression):
        return None
    if kernels.can_fuse_group_norm(input, num_groups):
        return _fused_group_norm(input, num_groups, weight, bias, eps)
    input = wide(input).contiguous()
    rows, channels, *space = input.shape
    sizes = (rows, channels, prod(space), num_groups, eps)
    output, mean, scale = torch.native_group_norm(input, value_of(weight), value_of(bias), *sizes)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        signal = axis.folded(wide(signal)).contiguous()
        if isinstance(weight, Expression):
            inside, mean, scale = (axis.folded(each) for each in saved)
            folded, size = len(signal) * channels, prod(space)
            ones, flat = inside.new_ones(folded), (1, folded, size)
            tensors = (signal.view(flat), inside.reshape(flat), mean.reshape(1, -1), scale.reshape(1, -1), ones)
            weights = torch.ops.aten.native_group_norm_backward(
                *tensors, 1, folded, size, mean.numel(), [False, True, False]
            )[1]
            yield weight, Dense(weights.view(axis.examples, -1, channels).sum(dim=1))
        if isinstance(bias, Expression):
            yield bias, Dense(_per_channel(signal, axis.examples))

    return output, (input, mean, scale) if isinstance(weight, Expression) else (), settle


def _fused_group_norm(input: Tensor, groups: int, weight: Operand | None, bias: Operand | None, eps: float) -> Ruled:
    """The same where one kernel gives all three gradients: the input's waits for the layer's own backward."""
    waiting: list[Tensor] = []
    output, mean, scale = _GroupNorm.apply(input, value_of(weight), value_of(bias), groups, eps, waiting)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        inside, mean, scale, gain = saved
        back, weights, biases = kernels.group_norm_backward(inside, signal, mean, scale, gain, groups)
        waiting[:] = [back]
        for operand, rows in ((weight, weights), (bias, biases)):
            if isinstance(operand, Expression):
                yield operand, Dense(axis.folded(rows).view(axis.examples, -1, rows.shape[1]).sum(dim=1))

    gain = mean.new_ones(input.shape[1]) if weight is None else value_of(weight).detach()
    return output, (input, mean, scale, gain), settle


class _GroupNorm(torch.autograd.Function):
    """A group norm that passes back what is `waiting`, or torch's own gradient where nothing is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        waiting: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, channels, *space = input.shape
        sizes = (rows, channels, prod(space), groups)
        ctx.sizes, ctx.waiting = sizes, waiting
        full = torch.is_autocast_enabled(input.device.type)  # in float32 then, as torch's own
        dtype = torch.float32 if full else input.dtype
        output, mean, scale = kernels.group_norm(input, weight, bias, groups, eps, dtype)
        ctx.save_for_backward(input, mean, scale, *(() if weight is None else (weight,)))
        ctx.mark_non_differentiable(mean, scale)
        return output, mean, scale

    @staticmethod
    def backward(ctx: Any, signal: Tensor, *_: object) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, mean, scale, *weight = ctx.saved_tensors
        if ctx.waiting:
            back = ctx.waiting.pop()
        else:
            gain = wide(weight[0]) if weight else None
            tensors = (wide(signal).contiguous(), wide(input).contiguous(), wide(mean), wide(scale), gain)
            back = torch.ops.aten.native_group_norm_backward(*tensors, *ctx.sizes, [True, False, False])[0]
        return back.to(input.dtype), None, None, None, None, None


def instance_norm(
    input: Operand,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Operand | None = None,
    bias: Operand | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Ruled:
    if isinstance(input, Expression) or not use_input_stats or running_mean is not None:
        return None
    return group_norm(input, input.shape[1], weight, bias, eps)


# --- one number at a time ---------------------------------------------------------------------------------------------


def multiply(input: Operand, other: Operand) -> Ruled:
    one, parameter = (other, input) if isinstance(input, Expression) else (input, other)
    if isinstance(one, Expression) or not isinstance(parameter, Expression):
        return None

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        yield parameter, Dense(_broadcast(parameter, axis, wide(signal) * saved[0]))

    return one * parameter.value, (one,), settle


def add(input: Operand, other: Operand, *, alpha: float = 1) -> Ruled:
    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        for parameter, factor in ((input, 1), (other, alpha)):
            if isinstance(parameter, Expression):
                found = _broadcast(parameter, axis, wide(signal))
                yield parameter, Dense(found if factor == 1 else found * factor)

    return torch.add(value_of(input), value_of(other), alpha=alpha), (), settle


def subtract(input: Operand, other: Operand, *, alpha: float = 1) -> Ruled:
    return add(input, other, alpha=-alpha)


def elementwise(function: Callable[..., Tensor], *args: Any, **named: Any) -> Ruled:
    """Any function of numbers in the same place: its derivative by what is broadcast, then summed for each example."""
    everything = (*args, *named.values())
    if not all(isinstance(each, Expression | Tensor | int | float | str | None) for each in everything):
        return None
    tensors = [place for place, each in enumerate(everything) if isinstance(each, Tensor)]
    operands = [place for place, each in enumerate(everything) if isinstance(each, Expression)]
    held: list[Any] = [None if isinstance(each, Tensor) else each for each in everything]  # tensors are saved, freed
    count, names = len(args), tuple(named)

    def run(filled: Sequence[Any]) -> Tensor:
        return function(*filled[:count], **dict(zip(names, filled[count:], strict=True)))

    output = run([value_of(each) for each in everything])
    shape = output.shape

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        filled: list[Any] = list(held)
        for place, tensor in zip(tensors, saved, strict=True):
            filled[place] = tensor
        leaves = [held[place].value.expand(shape).detach() for place in operands]
        with torch.enable_grad():
            for place, leaf in zip(operands, leaves, strict=True):
                filled[place] = leaf.requires_grad_()
            found = torch.autograd.grad(run(filled), leaves, signal)
        for place, gradient in zip(operands, found, strict=True):
            yield held[place], Dense(_broadcast(held[place], axis, wide(gradient)))

    return output, tuple(everything[place] for place in tensors), settle


def prelu(input: Operand, weight: Operand) -> Ruled:
    """One slope for all, or for each channel, which is the second axis."""
    if isinstance(input, Expression) or not isinstance(weight, Expression):
        return None
    rank = input.dim() - 2
    output = F.prelu(input, weight.value)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        below = wide(signal) * saved[0].clamp(max=0.0)
        if weight.value.numel() == 1 or rank < 0:
            yield weight, Dense(_broadcast(weight, axis, below))
        else:
            yield weight, Dense(_per_channel(axis.folded(below), axis.examples))

    return output, (input,), settle


def expand(input: Operand, *sizes: Any, **named: Any) -> Ruled:
    """A parameter given to each example: a class token."""
    if not isinstance(input, Expression):
        return None

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        yield input, Dense(_broadcast(input, axis, wide(signal)))

    return input.value.expand(*sizes, **named).clone(memory_format=torch.contiguous_format), (), settle


def repeat(input: Operand, *counts: Any) -> Ruled:
    """A parameter given to each example, once or several times: along with its heads, say."""
    if not isinstance(input, Expression):
        return None
    counts = tuple(counts[0]) if len(counts) == 1 and not isinstance(counts[0], int) else counts
    shape = (1,) * (len(counts) - input.value.dim()) + tuple(input.value.shape)

    def settle(axis: Axis, saved: Sequence[Tensor], signal: Tensor) -> Pulled:
        rows, own = axis.alone(wide(signal)), shape[axis.place]
        if rows.shape[1 + axis.place] % own or (axis.inner == 1 and own > 1):
            raise TypeError(f"a parameter of shape {tuple(input.value.shape)} holds something of each example")
        for place, size in enumerate(shape):
            rows = rows.unflatten(1 + place, (-1, size)).sum(dim=1 + place)
        yield input, Dense(rows.reshape(axis.examples, *input.value.shape))

    return input.value.repeat(*counts), (), settle


def _broadcast(parameter: Expression, axis: Axis, signal: Tensor) -> Tensor:
    """Each example's gradient of what was broadcast to the shape of the signal: [examples, *shape]."""
    examples, shape = axis.examples, (1,) * (signal.dim() - parameter.value.dim()) + tuple(parameter.value.shape)
    own = shape[axis.place]
    if own != 1:  # it has entries of its own for every example, whose gradients are the others' zeros
        owners = torch.arange(own, device=signal.device) // axis.inner % examples
        apart = owners == torch.arange(examples, device=signal.device)[:, None]
        each = torch.where(
            apart.view(examples, *[1] * axis.place, own, *[1] * (signal.dim() - axis.place - 1)), signal, 0
        )
        over = [1 + place for place, size in enumerate(shape) if size == 1 and signal.shape[place] != 1]
        return (each.sum(dim=over) if over else each).reshape(examples, *parameter.value.shape)
    rest = [size for place, size in enumerate(shape) if place != axis.place]
    rows = axis.first(signal)
    over = [1, *(2 + place for place, size in enumerate(rest) if size == 1 and rows.shape[2 + place] != 1)]
    return rows.sum(dim=over).reshape(examples, *parameter.value.shape)


def _torch(*names: str) -> list[Any]:
    """The functions of these names, of torch and of tensors."""
    places = [(place, name) for name in names for place in (torch, Tensor)]
    return [getattr(place, name) for place, name in places if hasattr(place, name)]


RULES: dict[Any, Rule] = {
    F.linear: linear,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    Tensor.expand: expand,
    Tensor.repeat: repeat,
    torch.broadcast_to: lambda input, size: expand(input, *size),
    Tensor.expand_as: lambda input, other: expand(input, *value_of(other).shape),
    F.bilinear: bilinear,
    F.prelu: prelu,
    torch.prelu: prelu,
    torch.einsum: einsum,
    Tensor.__getitem__: select,
    routed: _routed,
    known_linear: _affine,
    Tensor.__rpow__: lambda input, other: elementwise(torch.pow, other, input),
    Tensor.__rsub__: lambda input, other: subtract(other, input),
    Tensor.__rtruediv__: lambda input, other: elementwise(torch.div, other, input),
}
RULES |= {function: matmul for function in _torch("matmul", "mm", "__matmul__")}
RULES |= {function: _stacked_matmul for function in _torch("bmm", "mv")}
RULES |= {function: baddbmm for function in _torch("baddbmm")}
RULES |= {
    function: lambda input, dim, index: select(input, index) if dim == 0 else None
    for function in _torch("index_select")
}
RULES |= {function: partial(elementwise, torch.pow) for function in _torch("pow", "__pow__")}
RULES |= {function: partial(elementwise, torch.addcmul) for function in _torch("addcmul")}
RULES |= {function: partial(elementwise, torch.addcdiv) for function in _torch("addcdiv")}
RULES |= {function: partial(elementwise, torch.lerp) for function in _torch("lerp")}
RULES |= {getattr(torch, name): partial(elementwise, getattr(torch, name)) for name in ("maximum", "minimum", "where")}
RULES |= {function: addmm for function in _torch("addmm")}
RULES |= {function: multiply for function in _torch("mul", "multiply", "__mul__", "__rmul__")}
RULES |= {function: add for function in _torch("add", "__add__", "__radd__")}
RULES |= {function: subtract for function in _torch("sub", "subtract", "__sub__")}
RULES |= {
    function: partial(elementwise, torch.div) for function in _torch("div", "divide", "true_divide", "__truediv__")
}
RULES |= {getattr(F, f"conv{rank}d"): partial(convolution, rank) for rank in (1, 2, 3)}
RULES |= {getattr(F, f"conv_transpose{rank}d"): partial(transposed_convolution, rank) for rank in (1, 2, 3)}
