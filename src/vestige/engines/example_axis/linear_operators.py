"""What does an operator make of a sum over the examples? If it is linear, it is applied to each example's part.

A label names the memory of a sum and which part of it a tensor shows (`Summed`): views are computed when needed, and
a write through one is a write to the whole. An operator that is not known to be linear, or that puts something
public beside a sum, gives mixed values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from vestige.engines.example_axis.indexed_entries import as_numbers
from vestige.engines.example_axis.labels import (
    AS_STRIDED,
    Label,
    Labelled,
    Mixed,
    NotApart,
    SumCell,
    Summed,
    Tracker,
    ViewCall,
    covers,
    mixed,
    one_example,
    rule_of,
    written_by,
)
from vestige.engines.example_axis.operator_calls import (
    Args,
    Kwargs,
    Op,
    axes_of,
    creates,
    outputs_of,
    transformable,
    written_anew,
)
from vestige.engines.example_axis.sums import (
    OfOne,
    Uses,
    added_in_entries,
    complete,
    fill,
    on_meta,
    put,
    reduced_shape,
    shape_of,
)
from vestige.engines.per_example import gradient_maps
from vestige.engines.per_example.execution import unseen_by_functions
from vestige.engines.per_example.filter_maps import FilterMap
from vestige.engines.per_example.gradient_forms import (
    Deferred,
    Dense,
    Gradient,
    Outer,
    Patches,
    Place,
    combine,
    wide,
)
from vestige.engines.per_example.gradient_maps import (
    added,
    carried,
    placed,
    rearranged,
    reshaped,
    times,
)

SAME_NUMBERS = "view _unsafe_view _reshape_alias unsqueeze squeeze clone detach alias _to_copy lift_fresh contiguous"
ORDERS = "t transpose permute swapaxes swapdims"
LINEAR = (
    "expand select as_strided diagonal diag_embed tril triu flip roll cumsum index index_select gather "
    "constant_pad_nd split split_with_sizes unbind repeat trace _fft_r2c _fft_c2c _fft_c2r real imag view_as_real "
    "view_as_complex _conj _neg_view _conj_physical resolve_conj convolution linalg_solve_triangular linalg_lu_solve "
    "cholesky_solve upsample_bilinear2d upsample_bicubic2d upsample_nearest2d avg_pool2d _adaptive_avg_pool2d unfold "
    "im2col col2im mv dot scatter scatter_add linalg_cross"
)
"""Operators that are linear in one argument while the others stay; so are those of backward passes in a gradient."""
GRADIENTS = ("signal", "grad_output", "grad_out", "grad", "grad_w", "gradOutput", "grad_in")
"""What backward operators call it."""
OTHER_NUMBERS = frozenset(["_to_copy", "_fft_r2c", "_fft_c2r", "real", "imag", "view_as_real", "view_as_complex"])
"""Operators whose output is of another type than their input."""
LINEAR_IN = {
    "linalg_solve_triangular": ("B",),
    "linalg_lu_solve": ("B",),
    "cholesky_solve": ("self",),
    "convolution": ("input", "weight"),
}
"""Of operators that are not linear in every argument, or add something public: in which they are."""
_PUTS = ("index_put", "index_add", "_index_put_impl", "_unsafe_index_put")
COPY = torch.ops.aten.copy_.default
FEW = 8
"""Uses that an operator is applied to each by itself, where adding them up first would take too much memory."""
Made = Sequence[tuple[Gradient, Sequence[int]] | None] | None
"""Parts and shape of each output; None for one that is not there, or if the operator is not known to be linear."""


def linear(tracker: Tracker, func: Any, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """What an operator makes of sums over the examples."""
    if isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags:
        with unseen_by_functions():
            return _viewed_in_place(tracker, func, args, kwargs, labelled)
    found = written_anew(tracker, func, args, kwargs)
    if found is not None:
        return found
    with unseen_by_functions():
        if func is COPY and covers(args[0]):  # whatever was there
            labelled = [each for each in labelled if each[0] is not args[0]]
        if isinstance(func, OpOverload) and not any(isinstance(label, Mixed) for _, label in labelled):
            try:
                if _is_view(func):
                    found = _view(tracker, func, args, kwargs, labelled)
                else:
                    found = _made_of(Op(tracker, func, args, kwargs, labelled, None))
            except (RuntimeError, IndexError):  # where an operator does not run on meta tensors
                found = None
        if found is not None:
            _hold(tracker, args, kwargs, labelled, found)
            return found
        first = next((label for _, label in labelled if isinstance(label, Mixed)), None)
        name = str(func).removeprefix("aten.").split(".")[0]
        label = first.plain() if first else mixed(name, "is not linear in a sum over the batch", unknown=True)
        written = written_by(func, args, kwargs)
        if isinstance(func, OpOverload) and _is_view(func):
            raise NotApart(label)  # what is written through it would be lost
        for each in written:
            own = tracker.labels.get(each)
            if isinstance(own, Summed):
                own.cell.mixed = label  # whatever other names it has
            tracker.labels.set(each, label)
    if written:  # without running: what stands for a sum has no memory to write to
        return written[0] if func._schema.returns else None
    return rule_of(func).apply(tracker, func, args, kwargs, [(tensor, label) for tensor, _ in labelled])


def _hold(tracker: Tracker, args: Args, kwargs: Kwargs, labelled: Labelled, found: Any) -> None:
    """Parts that are made later are made of public operands as they are now: those are not written to until then."""
    labels = [tracker.labels.get(each) for each in outputs_of(found) if isinstance(each, Tensor)]
    if any(isinstance(use, Deferred) for label in labels if isinstance(label, Summed) for use in label.cell.uses):
        of_examples = [each for each, _ in labelled]
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not any(each is other for other in of_examples):
                tracker.labels.hold(each, tracker)


# --- views ------------------------------------------------------------------------------------------------------------


@cache
def _is_view(func: OpOverload) -> bool:
    return not func._schema.is_mutable and any(each.alias_info is not None for each in func._schema.returns)


def _view(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """Another name for some of the numbers; of memory that is filled with sums, an ordinary view."""
    tensor, label = labelled[0]
    if tracker.labels.fills(tensor):
        return func(*args, **kwargs)
    if len(labelled) > 1 or not isinstance(label, Summed) or args[0] is not tensor:
        return None
    if func is AS_STRIDED and any(step == 0 and size > 1 for size, step in zip(args[1], args[2], strict=True)):
        return None  # by strides that were asked of what stands for a sum, which has none
    before = tuple(tensor.shape)
    shown = func(torch.empty(before, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    several = isinstance(shown, tuple | list)
    found = []
    for number, each in enumerate(shown if several else [shown]):
        call = ViewCall(func, tuple(args[1:]), kwargs, before, tuple(each.shape), number if several else None)
        part = Summed(label.cell, (*label.views, call))
        found.append(tracker.stand_in(tensor, each.shape, part, dtype=each.dtype))
    return found if several else found[0]


def _viewed_in_place(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """A tensor that shows its numbers in another way from now on."""
    tensor, label = labelled[0]
    name = func.overloadpacket.__name__.removesuffix("_")
    form = getattr(getattr(torch.ops.aten, name), func._overloadname)
    if len(labelled) > 1 or not isinstance(label, Summed) or not _is_view(form) or name == "as_strided":
        raise NotApart(mixed(func.overloadpacket.__name__, "changes the memory of a sum over the batch", unknown=True))
    before, alone = tuple(tensor.shape), not tracker.labels.fills(tensor)
    func(*args, **kwargs)
    if alone:
        call = ViewCall(form, tuple(args[1:]), kwargs, before, tuple(tensor.shape))
        tracker.labels.set(tensor, Summed(label.cell, (*label.views, call)))
    return tensor


def uses_of(label: Summed) -> Uses:
    """Each example's part of what a tensor shows of a sum."""
    cell = label.cell
    if cell.mixed is not None:
        raise NotApart(cell.mixed)
    if label.views not in cell.known:
        uses = complete(cell.uses)
        for call in label.views:
            uses = tuple(_part(call, use) for use in uses)
        cell.known[label.views] = uses
    found: Uses = cell.known[label.views]
    return found


def _part(call: ViewCall, use: Gradient) -> Gradient:
    name = call.func.overloadpacket.__name__
    if name in SAME_NUMBERS.split():
        return reshaped(use, call.before, call.after)
    if name in ORDERS.split():
        rank = len(call.before)
        order = torch.empty([2 + axis for axis in range(rank)], device="meta")
        return rearranged(use, call.before, [size - 2 for size in call.on(order).shape])
    if name == "slice" and isinstance(use, Outer):
        sides = [use.left, use.right]
        dim = (call.args[0] if call.args else 0) % 2
        sides[dim] = torch.ops.aten.slice(sides[dim], 2, *call.args[1:])
        return Outer(*sides)
    if isinstance(use, FilterMap) and not use.own and use.shape[0] == use.filters == prod(call.before) == call.after[0]:
        return FilterMap(use.of, (), use.downs, use.ups, use.filters, call.after)  # expanded
    return carried(use, partial(_mapped, call.on), prod(call.before), prod(call.after))


def _mapped(function: Callable[..., Tensor], *dense: Tensor) -> Tensor:
    """A function of each example's part by itself."""
    with transformable():
        found: Tensor = vmap(function)(*(each.contiguous() for each in dense))
        return found.resolve_conj().resolve_neg()  # not seen to where a mode handles an operator


# --- writes -----------------------------------------------------------------------------------------------------------


def _write(label: Summed, uses: Uses) -> None:
    """Put something else in the place of what a tensor shows of a sum."""
    cell = label.cell
    if label.views:

        def put(whole: Tensor, part: Tensor) -> Tensor:
            found = whole.clone()
            reduce(lambda shown, call: call.on(shown), label.views, found).copy_(part)
            return found

        pair = combine(complete(cell.uses)).dense(), combine(uses).dense()
        uses = (Dense(_mapped(put, *pair)),)
    cell.uses = uses
    cell.known.clear()


def _copied(op: Op) -> Any:
    """A sum into memory that is zero, or into a part of another sum; or zeros into a part of a sum."""
    into, source, labels = op["self"], op["src"], op.tracker.labels
    label, own = labels.get(source), labels.get(into)
    if into.shape != source.shape or into.layout != torch.strided:
        return None
    if isinstance(own, Summed):
        if isinstance(label, Summed):
            _write(own, uses_of(label))
        elif label is None and labels.zero(source):
            _write(own, tuple(times(use, 0.0) for use in uses_of(own)))
        else:
            return None
        return into
    if not isinstance(label, Summed) or (own is not None and not covers(into)):
        return None
    whole = into.new_empty(0).set_(into.untyped_storage())
    if not covers(into) and not labels.zero(whole):
        return None
    if not covers(into) or not into.is_contiguous():
        dense = combine(uses_of(label)).dense()
        fill(op.tracker, whole, [Dense(dense.new_zeros(len(dense), len(whole)))], label.cell)
        own = labels.get(into)
        assert isinstance(own, Summed)
        _write(own, uses_of(label))
        return into
    return into if fill(op.tracker, into, uses_of(label), label.cell) else None


# --- operators --------------------------------------------------------------------------------------------------------


def _made_of(op: Op) -> Any:
    name, about = op.name.rstrip("_"), [label.cell if isinstance(label, Summed) else label for _, label in op.labelled]
    if len({(each.count, each.batch) for each in about}) > 1:
        return None
    if name in ("add", "sub"):
        return _added(op)
    if name in ("cat", "stack"):
        return _joined(op)
    if name == "where":
        return _chosen(op)
    if creates(name):
        return op.tracker.public(op.func, (), op.given)
    if name == "copy":
        return _copied(op)
    tensor, label = op.labelled[0]
    if len(op.labelled) != 1 or not isinstance(label, Summed):
        return None
    backward = "backward" in name and any(op.given.get(each) is tensor for each in GRADIENTS)
    rule = RULES.get(name) or (_one_by_one if name in _LINEAR or backward else None)
    made = None if rule is None else _of_each(rule, op, tensor, label)
    if made is None:
        return None
    dtype = on_meta(op.func, op.given).dtype if name in OTHER_NUMBERS else None
    found = [each and _stand_in(op.tracker, tensor, each[1], each[0], label.cell, dtype) for each in made]
    returns = op.func._schema.returns
    if len(returns) == 1 and isinstance(returns[0].type, torch.ListType):
        return found
    return tuple(found) if len(returns) > 1 else found[0]


def _stand_in(
    tracker: Tracker, like: Tensor, shape: Sequence[int], uses: Uses, of: SumCell, dtype: torch.dtype | None = None
) -> Tensor:
    return tracker.stand_in(like, shape, Summed(SumCell(uses, of.count, of.batch)), dtype)


class Linear:
    """A call of an operator that is linear in a sum over the examples, of which these are each one's parts."""

    def __init__(self, op: Op, tensor: Tensor, label: Summed, parts: Gradient) -> None:
        self.op, self.tensor, self.label, self.parts = op, tensor, label, parts
        self.name, self.shape = op.name.rstrip("_"), tuple(tensor.shape)

    def by_filter(self) -> FilterMap | None:
        """The parts as what a linear map of each filter takes; None where they are materialised, and small."""
        if isinstance(self.parts, FilterMap):
            return self.parts
        large = isinstance(self.parts, Outer | Patches) or (isinstance(self.parts, Dense) and len(self.shape) > 2)
        if not large or self.shape[0] < 2:
            return None
        found, cell = FilterMap.start(self.parts, self.shape), self.label.cell
        if not self.label.views and len(cell.uses) == 1 and found.of is not self.parts:
            cell.uses = (found.of,)  # materialised once
            cell.known.clear()
        return found

    def mapped(self, back: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Gradient:
        """By a function of the parts of several examples."""
        return carried(self.parts, back, prod(self.shape), prod(shape))


def _of_each(
    rule: Callable[[Linear], Made], op: Op, tensor: Tensor, label: Summed
) -> list[tuple[Uses, Sequence[int]] | None] | None:
    """What a rule makes of all uses: of each output its parts, and its shape."""
    uses = uses_of(label)
    if len(uses) > FEW or (len(uses) > 1 and label.cell.count * tensor.numel() <= gradient_maps.LARGEST):
        uses = (combine(uses),)
    made = [rule(Linear(op, tensor, label, use)) for use in uses]
    if any(each is None for each in made):
        return None
    outputs = zip(*(each for each in made if each is not None), strict=True)
    return [None if each[0] is None else (tuple(one[0] for one in each), each[0][1]) for each in outputs]


def _one_by_one(call: Linear) -> Made:
    """Any operator that is linear in one argument, of each example's part by itself."""
    op, func = call.op, call.op.func
    place = next(name for name, each in op.given.items() if each is call.tensor)
    if not _no_constant(call, place):
        return None
    own = func.namespace == "vestige"  # an operator of ours, which is not to be transformed
    given = op.given
    if "indices" in given and isinstance(given["indices"], list | tuple):
        given = {**given, "indices": as_numbers(given["indices"])}
    shapes = func(**given) if own else on_meta(func, given)
    outputs = list(shapes) if isinstance(shapes, tuple | list) else [shapes]

    def one(number: int, part: Tensor) -> Tensor:
        found = func(**{**given, place: part})
        return found[number] if isinstance(found, tuple | list) else found

    def back(number: int, dense: Tensor) -> Tensor:
        dense = dense if dense.is_complex() else dense.to(call.tensor.dtype)
        return torch.stack([one(number, part) for part in dense]) if own else _mapped(partial(one, number), dense)

    return [
        None if each is None else (call.mapped(partial(back, number), each.shape), tuple(each.shape))
        for number, each in enumerate(outputs)
    ]


def _no_constant(call: Linear, place: str) -> bool:
    """Whether the operator puts nothing public beside what it makes of the sum."""
    op, name = call.op, call.name
    if name in ("masked_fill", "constant_pad_nd"):
        return op.tracker.labels.zero(op["value"])
    if name in LINEAR_IN:
        return place in LINEAR_IN[name] and op.given.get("bias") is None
    if name in _PUTS or name in ("scatter", "scatter_add"):
        return place != "self" and op.tracker.labels.zero(op["self"])
    return name not in ("index", "index_select", "gather") or place == "self"


def _same(call: Linear) -> Made:
    shape = tuple(call.op["size"]) if call.name == "_unsafe_view" else call.shape
    return [(reshaped(call.parts, call.shape, shape), shape)]


def _nothing(call: Linear) -> Made:
    """Zeros in its place."""
    nothing = call.name == "zero" or call.op.tracker.labels.zero(call.op["value"])
    return [(times(call.parts, 0.0), call.shape)] if nothing else None


def _negative(call: Linear) -> Made:
    return [(times(call.parts, -1.0), call.shape)]


def _scaled(call: Linear) -> Made:
    op, parts = call.op, call.parts
    other = op["other"] if op["self"] is call.tensor else op["self"]
    if call.name == "div":
        if other is not op["other"] or op.given.get("rounding_mode") is not None:
            return None
        other = 1 / other
    if not isinstance(other, Tensor) or (other.numel() == 1 and other.dim() <= len(call.shape)):
        return [(times(parts, other.reshape(()) if isinstance(other, Tensor) else other), call.shape)]
    shape = tuple(torch.broadcast_shapes(call.shape, other.shape))
    if isinstance(parts, Outer) and shape == call.shape and other.shape in (shape[1:], (1, *shape[1:])):
        return [(Outer(parts.left, wide(parts.right) * other.reshape(-1)), shape)]
    mapped = None if other.is_complex() or call.tensor.is_complex() else call.by_filter()
    first = (len(shape), shape[:1]) == (len(call.shape), call.shape[:1]) and call.shape[:1] == (
        getattr(mapped, "filters", -1),
    )
    if mapped is not None and (shape == call.shape or (first and not mapped.own)):
        return [(mapped.scaled(other, shape), shape)]
    rank = len(shape) - len(call.shape)

    def back(dense: Tensor) -> Tensor:
        return wide(dense.reshape(len(dense), *[1] * rank, *dense.shape[1:])) * other

    return [(call.mapped(back, shape), shape)]


def _reduced(call: Linear) -> Made:
    """A sum, or a mean."""
    shape = reduced_shape(call.op)
    dims = axes_of(call.op.given.get("dim"), len(call.shape)) if call.shape else set()
    count = prod(call.shape[dim] for dim in dims) if call.name == "mean" else 1
    kept = [dim for dim, size in enumerate(call.shape) if dim not in dims and size > 1]
    mapped = call.by_filter() if dims and kept == [0] and not call.tensor.is_complex() else None
    if mapped is not None and mapped.filters == call.shape[0]:
        return [(times(mapped.summed(shape), 1 / count), shape)]
    over = [1 + dim for dim in dims]

    def back(dense: Tensor) -> Tensor:
        return (wide(dense).sum(dim=over) if over else dense).reshape(len(dense), *shape) / count

    return [(call.mapped(back, shape), shape)]


def _masked(call: Linear) -> Made:
    """Without some numbers."""
    mask, zero = call.op["mask"], call.op.tracker.labels.zero
    if not isinstance(call.parts, FilterMap) or not zero(call.op["value"]) or mask.shape != call.tensor.shape:
        return _one_by_one(call)
    return [(call.parts.scaled((~mask).to(torch.float32), call.shape), call.shape)]


def _multiplied(call: Linear) -> Made:
    """A product of matrices with a public one."""
    left, right, parts = wide(call.op["self"]), wide(call.op["mat2"]), call.parts
    first, shape = call.op["self"] is call.tensor, (*left.shape[:-1], right.shape[-1])
    if left.dim() == 2 and isinstance(parts, Outer):
        turned = (
            Outer(parts.left, wide(parts.right) @ right) if first else Outer(wide(parts.left) @ left.t(), parts.right)
        )
        return [(turned, shape)]
    if left.dim() == 2 and isinstance(parts, Dense) and left.shape[1] < min(shape):  # a factor of few columns
        each = wide(parts.value)
        few = (right if first else left.t()).clone()  # not an alias of a tensor that may change
        of_few = (each.mT, few.expand(len(each), -1, -1)) if first else (few.expand(len(each), -1, -1), each)
        return [(Outer(*of_few), shape)]
    return [(call.mapped(lambda dense: wide(dense) @ right if first else left @ wide(dense), shape), shape)]


def _sliced(call: Linear) -> Made:
    """The gradient of a part, within zeros."""
    op, sizes = call.op, tuple(call.op["input_sizes"])
    whole = torch.empty(sizes, device="meta")
    if call.name == "select_backward":
        view = whole.select(op["dim"], op["index"])
    else:
        view = torch.ops.aten.slice(whole, op["dim"], op["start"], op["end"], op["step"])
    region = Place.of_view(view, whole)
    return None if region is None else [(placed(call.parts, region, sizes), sizes)]


def _in_entries(call: Linear) -> Made:
    """Added up in entries of a table that no example chooses, such as an embedding of positions."""
    op = call.op
    values, _, entries = added_in_entries(op)
    if entries is None:
        return None
    table = tuple(entries.table)
    if values is not call.tensor or list(call.shape) != entries.sizes or not _no_constant(call, ""):
        return _one_by_one(call)
    indices = [each.expand(entries.shape)[None] for each in entries.indices.values()]
    return [(put(op, entries, indices, call.parts.dense()), table)]


def _weight_norm(call: Linear) -> Made:
    """A weight of given length and direction, along every axis but one."""
    direction, length, axis = call.op["saved_v"], call.op["saved_g"], call.op["dim"]
    over = [place for place in range(direction.dim()) if place != axis]
    size = torch.linalg.vector_norm(direction, dim=over, keepdim=True) if over else direction.abs()
    unit, behind = direction / size, [1 + place for place in over]

    def along(dense: Tensor) -> Tensor:
        return (wide(dense) * unit).sum(dim=behind, keepdim=True) if behind else wide(dense) * unit

    def across(dense: Tensor) -> Tensor:
        return (wide(dense) - along(dense) * unit) * (length / size)

    return [(call.mapped(across, direction.shape), direction.shape), (call.mapped(along, length.shape), length.shape)]


def _batch_normed(call: Linear) -> Made:
    """A weight that is standardised by batch norm, as one example whose channels are its filters."""
    op, shape = call.op, call.shape
    if op["grad_out"] is not call.tensor or not op["train"] or shape[0] != 1 or shape[1] < 2:
        return None
    filters, numbers, each = shape[1], prod(shape[2:]), (shape[1], *[1] * (len(shape) - 2))
    parts = reshaped(call.parts, shape, shape[1:])
    given = parts if isinstance(parts, FilterMap) else FilterMap.start(parts, shape[1:])
    mean, scale = (op[name].view(each) for name in ("save_mean", "save_invstd"))
    standard = (op["input"][0] - mean) * scale
    total, along = given.summed(each), given.scaled(standard, shape[1:]).summed(each)
    gain = scale if op["weight"] is None else scale * op["weight"].view(each)
    ones = torch.ones_like(standard) / -numbers
    back = given.plus(total.scaled(ones, shape[1:])).plus(along.scaled(standard / -numbers, shape[1:]))
    found = [(back.scaled(gain, shape[1:]), shape), (along, (filters,)), (total, (filters,))]
    outputs = [(reshaped(parts, (), after), after) for parts, after in found]
    return [each if wanted else None for each, wanted in zip(outputs, op["output_mask"], strict=True)]


def _added(op: Op) -> Any:
    """Several sums added up; or parts of single examples to one."""
    one, other, alpha = op["self"], op["other"], op.given.get("alpha", 1) * (-1 if op.name.startswith("sub") else 1)
    labels = op.tracker.labels
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    first, second = (_as_sum(each, labels.get(each)) for each in (one, other))
    if first is None and isinstance(second, Summed) and labels.zero(one):
        first = Summed(SumCell((), second.cell.count, second.cell.batch))
    if second is None and isinstance(first, Summed) and labels.zero(other):
        second = Summed(SumCell((), first.cell.count, first.cell.batch))
    if not isinstance(first, Summed) or not isinstance(second, Summed) or one.shape != other.shape:
        return None
    uses = uses_of(second) if alpha == 1 else tuple(times(use, alpha) for use in uses_of(second))
    both = added(uses_of(first), uses)
    return _stand_in(op.tracker, one, one.shape, both, first.cell)


def _as_sum(tensor: Tensor, label: Label | None) -> Label | None:
    """What is one example's, as a sum of which the others have no part."""
    own = None if label is None or isinstance(label, Summed) else one_example(tensor, label)
    return label if own is None else Summed(SumCell((OfOne(tensor[None], own),), own.count, own.batch))


def _chosen(op: Op) -> Any:
    """By a public condition, of sums and of what is zero."""
    mask, cell, shape = op["condition"], None, tuple(shape_of(op))
    uses: Uses = ()
    for given, here in ((op["self"], mask), (op["other"], ~mask)):
        label = op.tracker.labels.get(given)
        if isinstance(label, Summed):
            cell, rank = label.cell, len(shape) - given.dim()

            def back(dense: Tensor, here: Tensor = here, rank: int = rank) -> Tensor:
                kept = torch.where(here, dense.reshape(len(dense), *[1] * rank, *dense.shape[1:]), 0)
                return kept.expand(len(dense), *shape)

            alike = here.shape == given.shape == shape
            kept = (
                use.scaled(here.to(torch.float32), shape)
                if alike and isinstance(use, FilterMap)
                else carried(use, back, given.numel(), prod(shape))
                for use in uses_of(label)
            )
            uses = added(uses, tuple(kept))
        elif label is not None or not op.tracker.labels.zero(given):
            return None
    if cell is None or op.tracker.labels.get(mask) is not None:
        return None
    return _stand_in(op.tracker, op.labelled[0][0], shape, uses, cell)


def _joined(op: Op) -> Any:
    """Side by side, or one upon the other."""
    tensors, shape, stacked = op["tensors"], tuple(shape_of(op)), op.name == "stack"
    dim, start, uses = op.given.get("dim", 0) % len(shape), 0, []
    labels, cell = [op.tracker.labels.get(each) for each in tensors], None
    whole = torch.empty(shape, device="meta")
    for each, label in zip(tensors, labels, strict=True):
        if isinstance(label, Summed):
            part = whole.select(dim, start) if stacked else whole.narrow(dim, start, each.shape[dim])
            region = Place.of_view(part, whole)
            assert region is not None
            uses += [placed(use, region, shape) for use in uses_of(label)]
            cell = label.cell
        elif label is not None or not op.tracker.labels.zero(each):
            return None
        start += 1 if stacked else each.shape[dim] if each.dim() == len(shape) else 0
    return None if cell is None else _stand_in(op.tracker, op.labelled[0][0], shape, tuple(uses), cell)


RULES: dict[str, Callable[[Linear], Made]] = {
    **dict.fromkeys(SAME_NUMBERS.split(), _same),
    **dict.fromkeys(("mul", "div"), _scaled),
    **dict.fromkeys(("mm", "bmm"), _multiplied),
    **dict.fromkeys(("slice_backward", "select_backward"), _sliced),
    **dict.fromkeys(("zero", "fill"), _nothing),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(_PUTS, _in_entries),
    "neg": _negative,
    "masked_fill": _masked,
    "native_batch_norm_backward": _batch_normed,
    "embedding_dense_backward": _in_entries,
    "_weight_norm_interface_backward": _weight_norm,
}
_LINEAR = frozenset(LINEAR.split())
