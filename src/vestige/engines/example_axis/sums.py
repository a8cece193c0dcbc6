"""What is a parameter's gradient before it is a number? A sum over the examples, of which each one's part is known.

In a backward pass, an operator that adds up what belongs to different examples (a product that contracts their axis, a
sum along it, the gradient of a table) does not run. Its output stands for the sum: its label, `Summed`, has each
example's part in factored form. Linear operators that come after it are applied to the parts (`linear_operators`);
whatever else is made of it is mixed.

So no layer of a model need be known: what reaches a parameter is its gradient, example by example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from vestige.engines.example_axis.indexed_entries import Entries, indices_of, is_mask
from vestige.engines.example_axis.labels import (
    Labelled,
    Rows,
    SumCell,
    Summed,
    Tracker,
    covers,
    one_example,
    written_by,
)
from vestige.engines.example_axis.operator_calls import Args, Kwargs, Op, axes_of, new_form, transformable
from vestige.engines.per_example import kernels
from vestige.engines.per_example.execution import unseen_by_functions
from vestige.engines.per_example.gradient_forms import (
    Dense,
    Geometry,
    Gradient,
    Lookup,
    Patches,
    Routed,
    change,
    cheaper,
    product,
    wide,
)
from vestige.engines.per_example.gradient_maps import reshaped, times


@dataclass(frozen=True)
class OfOne:
    """The part of one example, whose label it has."""

    value: Tensor
    label: Rows


Uses = tuple[Gradient, ...]
Parts = Sequence[Sequence[Gradient | OfOne]]
"""Of each output, what all adds up."""
Found = tuple[Rows, Parts] | tuple[Rows, Parts, Tensor] | None
"""The label of what an operator adds up, and each example's parts of its outputs; and the gradient of its input, if
that is known with them. None if it does not add up examples, or if that is not known."""


def own_rows(label: Rows, tensor: Tensor) -> Uses:
    """Of a gradient with entries of its own for every example, or of one alone, each one's part: zero in others'."""
    if label.axis < 0:
        return complete([OfOne(tensor[None], label)])
    every = torch.arange(label.count, device=tensor.device)
    places = torch.arange(tensor.shape[label.axis], device=tensor.device)
    owners = (places // label.inner + label.first) % label.count
    mine = owners == every[:, None]
    shape = [1] * tensor.dim()
    shape[label.axis] = len(places)
    return (Dense(torch.where(mine.view(label.count, *shape), tensor, 0)),)


# --- what an operator adds up -----------------------------------------------------------------------------------------


def by_example(label: Rows, tensor: Tensor) -> Tensor:
    """[examples, positions, ...], the other axes in their order; zeros where only some examples are there."""
    moved = tensor.movedim(label.axis, 0) if label.axis else tensor
    if label.first or len(moved) < label.count:
        every = moved.new_zeros(label.count, *moved.shape[1:])
        every[label.first : label.first + len(moved)] = moved
        moved = every
    if len(moved) == label.count * label.inner:
        return moved.unflatten(0, (label.count, label.inner))
    return moved.unflatten(0, (-1, label.count, label.inner)).transpose(0, 1).flatten(1, 2)


def alone(label: Rows, tensor: Tensor) -> Tensor:
    """[examples, ...]: each example's part of the tensor, with all of its axes in place."""
    return by_example(label, tensor).movedim(1, 1 + label.axis)


def folded(label: Rows, tensor: Tensor) -> Tensor:
    """The axis of examples first, and all rows of an example next to each other."""
    in_order = label.axis == 0 and not label.first and len(tensor) == label.count * label.inner
    return tensor if in_order else by_example(label, tensor).flatten(0, 1)


def whole(label: Any, tensor: Tensor) -> bool:
    """Whether a tensor has all examples of its batch, each with as many rows; or a slice of them, with one row each."""
    if not isinstance(label, Rows) or label.axis < 0:
        return False
    size = tensor.shape[label.axis]
    if label.first or size < label.count:
        return label.inner == 1 and label.first + size <= label.count
    return not size % (label.inner * label.count)


def meeting(op: Op, *operands: tuple[str, int]) -> Rows | None:
    """The label of arguments that have examples along these axes, as if that were the first axis; None if one has them
    elsewhere, or none has them."""
    found: Rows | None = None
    for name, axis in operands:
        label = op.label(name)
        if label is None:
            continue
        if label.axis != axis or not whole(label, op[name]) or (found is not None and label.at(0) != found):
            return None
        found = label.at(0)
    return found


def laid(tracker: Tracker, rows: Tensor) -> Tensor:
    """The tensor, or a copy as a GPU's matrix products read it faster: a signal has two, for weight and input."""
    if rows.device.type not in kernels.ALIGNED or not rows.is_contiguous():
        return kernels.in_rows(rows)
    storage, known = rows.untyped_storage(), tracker.labels.laid
    same = known is not None and known[0].cdata == storage._cdata and known[1] == rows._version
    if known is None or not same or known[2].numel() != rows.numel():
        made = kernels.aligned(rows)
        if made is rows:
            return rows
        known = tracker.labels.laid = StorageWeakRef(storage), rows._version, made
    return known[2].view(rows.shape)


def of_matrices(op: Op) -> Found:
    """`self` [m, k] times `mat2` [k, n], or stacks of them, where k counts the examples."""
    left, right, rank = op["self"], op["mat2"], op["self"].dim()
    rows = meeting(op, ("self", rank - 1), ("mat2", rank - 2))
    if rows is None:
        return None
    first, second = by_example(rows.at(rank - 1), left), by_example(rows.at(rank - 2), right)
    if rank == 2:
        return rows, [(product(laid(op.tracker, first), laid(op.tracker, second)),)]
    shape = (len(left), left.shape[1], right.shape[2])
    if len(left) == 1:
        one = product(kernels.in_rows(first.squeeze(2)), kernels.in_rows(second.squeeze(2)))
        return rows, [(reshaped(one, shape[1:], shape),)]
    return rows, [(Dense(torch.einsum("epbm,epbn->ebmn", wide(first), wide(second))),)]


def of_vectors(op: Op) -> Found:
    """A matrix or a vector times a vector that counts the examples."""
    name = "vec" if "vec" in op.given else "tensor"
    rows = meeting(op, ("self", op["self"].dim() - 1), (name, 0))
    if rows is None:
        return None
    first, second = by_example(rows.at(op["self"].dim() - 1), op["self"]), by_example(rows, op[name])
    return rows, [(Dense(torch.einsum("ep...,ep->e...", wide(first), wide(second))),)]


def of_axes(op: Op) -> Found:
    """A sum along axes of which one counts the examples."""
    label, tensor = op.label("self"), op["self"]
    if label is None or not whole(label, tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    dims = axes_of(op.given.get("dim"), tensor.dim())
    if label.axis not in dims:
        return None
    each = alone(label, tensor)
    over = [1 + dim for dim in dims if dim != label.axis or each.shape[1 + dim] != 1]
    total = wide(each).sum(dim=over, keepdim=True) if over else each
    return label, [(Dense(total.reshape(label.count, *reduced_shape(op))),)]


def reduced_shape(op: Op) -> list[int]:
    tensor, kept = op["self"], bool(op.given.get("keepdim"))
    dims = axes_of(op.given.get("dim"), tensor.dim())
    return [1 if place in dims else size for place, size in enumerate(tensor.shape) if kept or place not in dims]


def of_convolution(op: Op) -> Found:
    """Weight and bias of a convolution. Of a transposed one, what is the image is the gradient of the output."""
    label = meeting(op, ("grad_output", 0), ("input", 0))
    if label is None or not op.public("weight"):
        return None
    signal, image, rank = folded(label, op["grad_output"]), folded(label, op["input"]), op["weight"].dim() - 2
    sizes = [tuple(op[name]) if len(op[name]) == rank else tuple(op[name]) * rank for name in PLACES]
    geometry = Geometry(tuple(op["weight"].shape[2:]), sizes[0], sizes[1], sizes[2], op["groups"])
    first, second = (signal, image) if op["transposed"] else (image, signal)
    weights: Uses = (patches(first, second, geometry, label.count),) if op["output_mask"][1] else ()
    return label, [weights, (Dense(_per_channel(signal, label.count)),) if op["output_mask"][2] else ()]


PLACES = ("stride", "padding", "dilation")


def patches(image: Tensor, signal: Tensor, geometry: Geometry, examples: int) -> Gradient:
    if len(signal) != examples:  # views of each, or the model folded another axis into that of rows
        image, signal = image.unflatten(0, (examples, -1)), signal.unflatten(0, (examples, -1))
    return cheaper(Patches(image, signal, geometry))


def _per_channel(signal: Tensor, examples: int) -> Tensor:
    full = torch.promote_types(signal.dtype, torch.float32)
    return signal[..., None].flatten(2).sum(dim=2, dtype=full).view(examples, -1, signal.shape[1]).sum(dim=1)


def of_layer_norm(op: Op) -> Found:
    label, shape = _normed(op, "grad_out", "input", "mean", "rstd"), op["normalized_shape"]
    if label is None:
        return None
    rows, own = (label.count, -1, prod(shape)), (label.count, *shape)
    inside, signal = (by_example(label, op[name]).reshape(rows) for name in ("input", "grad_out"))
    statistics = (by_example(label, op[name]).flatten(1) for name in ("mean", "rstd"))
    weights, biases = kernels.layer_norm_sums(inside, signal, *statistics)
    return label, [(Dense(weights.view(own)),), (Dense(biases.view(own)),)]


def of_rms_norm(op: Op) -> Found:
    label, shape = _normed(op, "grad_out", "input", "rstd"), op["normalized_shape"]
    if label is None:
        return None
    each = by_example(label, wide(op["input"]) * op["rstd"] * op["grad_out"])
    return label, [(Dense(each.reshape(label.count, -1, *shape).sum(dim=1)),)]


def _normed(op: Op, *names: str) -> Rows | None:
    """The label of all these, where examples are along an axis before those that are normalised."""
    label, before = op.meet(*map(op.label, names)), op["input"].dim() - len(op["normalized_shape"])
    plain = isinstance(label, Rows) and label.axis < before and op.public("weight", "bias")
    return label if plain and whole(label, op["input"]) else None  # type: ignore[return-value]


def of_group_norm(op: Op) -> Found:
    """With the axis of rows folded into the channels, torch's own backward gives one gradient for each."""
    label = meeting(op, *((name, 0) for name in ("grad_out", "input", "mean", "rstd")))
    if label is None or not op.public("weight"):
        return None
    signal, inside, mean, scale = (folded(label, wide(op[name])) for name in ("grad_out", "input", "mean", "rstd"))
    channels, size, rows = op["C"], op["HxW"], len(signal)
    flat = (1, rows * channels, size)
    tensors = (signal.reshape(flat), inside.reshape(flat), mean.reshape(1, -1), scale.reshape(1, -1))
    ones = inside.new_ones(rows * channels)
    sizes = (1, rows * channels, size, mean.numel(), [False, True, False])
    weights = torch.ops.aten.native_group_norm_backward(*tensors, ones, *sizes)[1]
    biases = _per_channel(signal.reshape(rows, channels, size), label.count)
    return label, [(Dense(weights.view(label.count, -1, channels).sum(dim=1)),), (Dense(biases),)]


def of_fused_group_norm(op: Op) -> Found:
    """One kernel gives all three gradients."""
    label = meeting(op, *((name, 0) for name in ("signal", "input", "mean", "scale")))
    if label is None or not op.public("weight"):
        return None
    back, *sums = kernels.group_norm_backward(
        op["input"], op["signal"], op["mean"], op["scale"], op["weight"], op["groups"]
    )
    parts = (folded(label, each).view(label.count, -1, each.shape[1]).sum(dim=1) for each in sums)
    return label, [(Dense(part),) for part in parts], back.to(op["input"].dtype)


def of_batch_norm(op: Op) -> Found:
    """By statistics that are public."""
    label = meeting(op, ("grad_out", 0), ("input", 0))
    if label is None or op["train"] or not op.public("weight", "running_mean", "running_var"):
        return None
    shape = (1, -1, *[1] * (op["input"].dim() - 2))
    scale = (op["running_var"] + op["eps"]).rsqrt().view(shape)
    each = (op["input"] - op["running_mean"].view(shape)) * scale * op["grad_out"]
    return label, [(Dense(_per_channel(folded(label, part), label.count)),) for part in (each, op["grad_out"])]


def of_entries(op: Op) -> Found:
    """Values that are added up in entries of something public, such as the gradient of a table that was read."""
    values, label, entries = added_in_entries(op)
    if entries is None or label is None or not whole(label, values) or list(values.shape) != entries.sizes:
        return None
    if entries.axes[label.axis] is not None or entries.label_of_indices() not in (None, label):
        return None
    at = label.at(label.axis - entries.start)
    indices = [alone(at, each.expand(entries.shape)) for each in entries.indices.values()]
    return label, [(put(op, entries, indices, alone(label, values)),)]


VALUES = {"embedding_dense_backward": "grad_output", "index_add": "source", "scatter_add": "src"}
"""What operators call what they add up in entries of a table, if not `values`."""


def added_in_entries(op: Op) -> tuple[Tensor, Rows | None, Entries | None]:
    """Values that an operator adds up in entries of something public, their label, and the entries; None if it does
    something else with them."""
    name = VALUES.get(op.name.rstrip("_"), "values")
    table = (op["num_weights"], op["grad_output"].shape[-1]) if name == "grad_output" else op["self"].shape
    odd = not op.given.get("accumulate", True) or op.given.get("scale_grad_by_freq") or not op.public("self")
    masks = [each for each in indices_of(op, max(1, len(table))) if is_mask(each)]
    odd = odd or any(op.tracker.labels.get(each) is not None for each in masks)
    return op[name], op.label(name), None if odd else Entries(op, table)


def put(op: Op, entries: Entries, indices: Sequence[Tensor], values: Tensor) -> Gradient:
    """Each example's values [examples, ...] added up in a table of zeros, by indices [examples or 1, ...]."""
    places = [each.to(values.device) for each in indices]
    if entries.along:
        zeros, dim = wide(values).new_zeros(len(values), *entries.table), next(iter(entries.indices))
        return Dense(zeros.scatter_add_(1 + dim, places[0].expand_as(values), wide(values)))
    rank, start = len(entries.shape), 1 + entries.start
    rows = values.movedim(list(range(start, start + rank)), list(range(1, 1 + rank))).flatten(1, rank)
    places = [each.flatten(1) for each in places]
    order = [*entries.indices, *(axis for axis in entries.axes if axis is not None)]
    sizes = [entries.table[axis] for axis in order]
    if len(places) == 1:
        place, width = places[0] % sizes[0], prod(sizes[1:])
        rows = rows.reshape(len(rows), -1, width)
        if 0 <= op.given.get("padding_idx", -1) < sizes[0]:  # a row of the table that has no gradient
            rows = rows.masked_fill((place == op["padding_idx"])[:, :, None], 0.0)
        found = reshaped(Lookup(place.expand(len(rows), -1), rows, sizes[0]), (sizes[0], width), sizes)
    else:
        examples = torch.arange(len(rows), device=rows.device)[:, None]
        found = Dense(wide(rows).new_zeros(len(rows), *sizes).index_put_((examples, *places), wide(rows), True))
    found = found if op.given.get("alpha", 1) == 1 else times(found, op["alpha"])
    if order == sorted(order):
        return found
    return Dense(found.dense().permute(0, *(1 + order.index(axis) for axis in range(len(order)))))


def of_experts(op: Op) -> Found:
    """The weights of a mixture of experts' product."""
    label = meeting(op, *((name, 0) for name in ("signal", "input", "index")))
    if label is None:
        return None
    index, left, right = (by_example(label, op[name]) for name in ("index", "signal", "input"))
    found = Routed(index, left, right, op["experts"])
    small = op["experts"] * left.shape[2] * right.shape[2] <= left.shape[1] * (left.shape[2] + right.shape[2])
    return label, [(Dense(found.dense()) if small else found,)]


def of_single_examples(op: Op) -> Found:
    """What is each one example's: the gradients of a layer that takes the examples in turn."""
    labels = [(op[name], op.label(name)) for name in ("self", "other")]
    one, other = (None if label is None else one_example(tensor, label) for tensor, label in labels)
    if one is None or other is None or one == other or op["self"].shape != op["other"].shape or op["alpha"] != 1:
        return None
    return one, [(OfOne(op["self"][None], one), OfOne(op["other"][None], other))]


def complete(uses: Sequence[Gradient | OfOne]) -> Uses:
    """Parts of single examples put together."""
    single = [use for use in uses if isinstance(use, OfOne)]
    if not single:
        return tuple(uses)  # type: ignore[arg-type]
    value = single[0].value.new_zeros(single[0].label.count, *single[0].value.shape[1:])
    for use in single:
        value[use.label.first] += use.value[0]
    return (*(use for use in uses if not isinstance(use, OfOne)), Dense(value))


ADDS_UP: dict[Callable[[Op], Found], str] = {
    of_matrices: "mm bmm",
    of_vectors: "mv dot",
    of_axes: "sum",
    of_entries: "embedding_dense_backward index_add index_add_ scatter_add scatter_add_ index_put index_put_ "
    "_index_put_impl_ _unsafe_index_put",
    of_convolution: "convolution_backward",
    of_layer_norm: "native_layer_norm_backward",
    of_rms_norm: "_fused_rms_norm_backward",
    of_group_norm: "native_group_norm_backward",
    of_fused_group_norm: "fused_group_norm_backward",
    of_batch_norm: "native_batch_norm_backward",
    of_experts: "routed_weights",
    of_single_examples: "add add_",
}
PARTS = {name: parts for parts, names in ADDS_UP.items() for name in names.split()}


def added_up(
    parts: Callable[[Op], Found], tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled
) -> Any:
    """The outputs of an operator of a backward pass, where those that add up what belongs to different examples stand
    for sums; None if it adds up nothing, or if that is not known."""
    if any(
        not isinstance(label, Rows) or (label.axis < 0 and parts is not of_single_examples) for _, label in labelled
    ):
        return None
    if func._schema.is_mutable:
        return _written(parts, tracker, func, args, kwargs)
    with unseen_by_functions():
        if any(isinstance(each, Tensor) and (each.is_conj() or each.is_neg()) for each in args):
            args = [_resolved(tracker, each) if isinstance(each, Tensor) else each for each in args]
            labelled = tracker.labels.among(args, kwargs)
        op = Op(tracker, func, args, kwargs, labelled, None)
        made = parts(op)
        return None if made is None else _outputs(op, *made)


def _written(
    parts: Callable[[Op], Found], tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs
) -> Tensor | None:
    """A sum as something new, and a copy of it where it is to be."""
    form, (into,) = new_form(func), written_by(func, args, kwargs)
    if not isinstance(form, OpOverload):
        return None
    rest = {name: each for name, each in kwargs.items() if each is not into}
    found = added_up(parts, tracker, form, args, rest, tracker.labels.among(args, rest))
    if found is None:
        return None
    with tracker:
        if into.shape != found.shape and not into.numel():
            into.resize_(found.shape)
        return into.copy_(found)  # type: ignore[no-any-return]


def _resolved(tracker: Tracker, tensor: Tensor) -> Tensor:
    """With its numbers conjugated, where that was left for later."""
    label = tracker.labels.get(tensor)
    with transformable():
        found = tensor.resolve_conj().resolve_neg()
    if label is not None and found is not tensor:
        tracker.labels.set(found, label)
    return found


def _outputs(op: Op, label: Rows, uses: Parts, back: Tensor | None = None) -> Any:
    """`back` is the gradient of the input, where it was made with the others."""
    tracker, like = op.tracker, op.labelled[0][0]
    cells = [SumCell([_kept(tracker, part) for part in each], label.count, label.batch) for each in uses]
    if "output_mask" not in op.given:
        return tracker.stand_in(like, shape_of(op), Summed(cells[0]))
    mask: Sequence[bool] = op["output_mask"]
    found: list[Tensor | None] = [None] * len(mask)
    if mask[0]:
        only = [True, *[False] * (len(mask) - 1)]
        given: Tensor = op.func(**{**op.given, "output_mask": only})[0] if back is None else back
        tracker.labels.set(given, label)
        found[0] = given
    for place, cell in enumerate(cells, start=1):
        if mask[place]:
            weight = op.given.get("weight")
            shape = weight.shape if place == 1 and weight is not None else complete(cell.uses)[0].dense().shape[1:]
            found[place] = tracker.stand_in(like, shape, Summed(cell))
    return tuple(found)


def _kept(tracker: Tracker, part: Gradient | OfOne) -> Gradient | OfOne:
    """Until it is clipped. A saved activation knows the graph that it came from, at whose ends parameters wait for what
    is made of it."""

    def kept(factor: Tensor) -> Tensor:
        tracker.labels.hold(factor, tracker)
        return factor.detach()

    return OfOne(kept(part.value), part.label) if isinstance(part, OfOne) else change(part, kept)


def fill(tracker: Tracker, into: Tensor, uses: Sequence[Gradient | OfOne], of: Rows | SumCell) -> bool:
    """Let a tensor that is all of its memory be a sum; whether that can be."""
    if not covers(into) or not into.is_contiguous():
        return False
    flat = [reshaped(use, into.shape, (into.numel(),)) for use in complete(uses)]
    tracker.labels.fill(into, SumCell(flat, of.count, of.batch))
    return True


def shape_of(op: Op) -> Sequence[int]:
    """Of the output."""
    if op.name in ("mm", "bmm"):
        return (*op["self"].shape[:-1], op["mat2"].shape[-1])
    if op.name == "where":
        return torch.broadcast_shapes(*(op[name].shape for name in ("condition", "self", "other")))
    if op.name == "embedding_dense_backward":
        return op["num_weights"], op["grad_output"].shape[-1]
    return reduced_shape(op) if op.name == "sum" else on_meta(op.func, op.given).shape


def on_meta(func: OpOverload, given: Mapping[str, Any]) -> Any:
    """What an operator would give, without numbers."""

    def meta(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.to("meta")
        if isinstance(each, list | tuple):
            return type(each)(map(meta, each))
        return torch.device("meta") if isinstance(each, torch.device) else each

    return func(**{name: meta(each) for name, each in given.items()})
