"""What must be seen before it reaches the dispatcher? Losses over the batch, and reads that dispatch nothing.

- A loss of torch's own over rows is taken of each example by itself: a mean over targets that count becomes each
  example's mean over its own, so that no divisor is everybody's. Inside a model, what it returns as its loss then has a
  number for each example; in a loop, the loss is their mean.
- A function of torch's that is given values of the examples, and passes them to no operator, reads them: `tolist`,
  `numpy`, `torch.tensor` of a list of them. What such functions show is not followed. Facts about a tensor are not its
  values (`FACTS`), and some functions take no more of an argument than its shape or type (`LIKE_THE_SECOND`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import ceil, inf, log2, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from vestige.engines.example_axis import argument_checks, reordered_examples
from vestige.engines.example_axis.labels import (
    Label,
    NotApart,
    Read,
    Rows,
    Tracker,
    asked_by_user,
    in_transform,
    mixed,
    tensors_in,
    top_hooks,
    users_line,
)
from vestige.engines.per_example import kernels
from vestige.engines.per_example.execution import AS_IT_IS, unseen, unseen_by_functions
from vestige.engines.per_example.fused_group_norm import group_norm
from vestige.fused.class_axis import classes_last

CLASSES = (F.cross_entropy, F.nll_loss)
NUMBERS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.kl_div, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.hinge_embedding_loss),
    *(F.multilabel_soft_margin_loss, F.margin_ranking_loss, F.triplet_margin_loss, F.cosine_embedding_loss),
    *(F.multi_margin_loss, F.multilabel_margin_loss, F.triplet_margin_with_distance_loss, F.ctc_loss),
)
ONE_BY_ONE = (
    "`vestige.train` runs such a model one example at a time; a rule for your own layer: docs/adding-a-layer.md"
)
UNSAID = "(not looked at)"
"""What stands in the words of an error for a value of the examples."""
LEGACY = ("size_average", "reduce")
READS = (
    *(Tensor.tolist, Tensor.numpy, Tensor.__repr__, Tensor.__array__, Tensor.__format__, Tensor.__deepcopy__),
    *(Tensor.__dlpack__, Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.untyped_storage, Tensor.storage),
    *(Tensor.apply_, Tensor.map_, Tensor.map2_),
)
"""Some of them give back what they were given, or memory that is followed."""
FACTS = (
    "size dim ndimension stride numel nelement element_size storage_offset is_contiguous is_complex is_floating_point "
    "is_signed is_inference is_conj is_neg is_pinned is_shared is_coalesced is_same_size is_set_to get_device type "
    "has_names register_hook register_post_accumulate_grad_hook __len__ __hash__ dim_order sparse_dim dense_dim "
    "result_type can_cast is_distributed _is_view _is_zerotensor qscheme cudnn_is_acceptable _use_cudnn_ctc_loss "
    "_use_cudnn_rnn_flatten_weight storage_type module_load retain_grad requires_grad_ is_storage is_tensor "
    "__set__ __delete__"
)
"""Functions that look at no value."""
PLAIN = ((), (Tensor,), (Tensor, Tensor))
"""Types of a call that no tensor subclass of another library handles."""
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The tracker sees what is passed to them."""
EXPOSING = frozenset((Tensor.__cuda_array_interface__.__get__,))  # type: ignore[attr-defined]
"""Attributes that are no facts."""
LIKE_THE_SECOND = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
"""Functions that take the values of their first argument alone, and the shape or the type of others."""
LIKE_THE_FIRST = frozenset(("new_tensor", "new"))
"""Those that take no more than the type of their first argument."""
_FACTS = frozenset(FACTS.split())


Handler = Callable[["TrackedFunctions", Any, Any, dict[str, Any]], Any]


class TrackedFunctions(TorchFunctionMode):
    """Is on together with a tracker. `inside` a model, reduced losses have a number for each example."""

    def __init__(self, tracker: Tracker, inside: bool, tokens: int | None = None) -> None:
        super().__init__()
        self.tracker, self.inside, self.tokens = tracker, inside, tokens

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks, tracker, kwargs = top_hooks(True), self.tracker, kwargs or {}
        if tracker.labels.zeros and getattr(function, "__name__", "") in SHOWING:
            tracker.labels.zeros.clear()  # exposed memory may be written to without an operator
        for each in args:
            if type(each) in (ReadNumber, ReadCount):
                raise ValueError(
                    f"a value of the examples that was read at {each.where} is used again at {users_line()}: no noise "
                    "covers what follows from it. Compute with tensors, row by row, or with public numbers"
                )
        if tracker.reduced if self.inside else tracker.kept and tracker.labels.turn is None:
            args, kwargs = self._as_numbers(function, args, kwargs)
        handler = HANDLERS.get(function)
        alone = hooks is None or _seen(hooks[0])
        with AS_IT_IS if alone else saved_tensors_hooks(partial(_under, self, hooks[0]), hooks[1]):
            if handler is not None:
                return handler(self, function, args, kwargs)
            return self.watched(function, types, args, kwargs)

    def _as_numbers(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments, where a loss over the batch is the number that it is to the model, unless the function is
        called in the model and only does arithmetic with it: then it stays a number for each example."""
        tracker = self.tracker
        given = [each for each in tensors_in((args, kwargs)) if not in_transform(each)]
        if not any(tracker.reduction(each) is not None for each in given):
            return args, kwargs
        in_place = function.__name__.endswith("_") and not function.__name__.endswith("__")
        own = in_place and tracker.reduction(args[0]) is not None
        if in_place == own and "out" not in kwargs and self._stays_by_example(function, given, args):
            return args, kwargs
        if own:
            raise NotApart(mixed(function.__name__, "changes a reduction over the batch in place"))
        differentiated = function in GRADIENTS or function is Tensor.backward

        def number(each: Any) -> Any:
            known = tracker.reduction(each) if isinstance(each, Tensor) and not in_transform(each) else None
            label = None if known is None else tracker.labels.get(each)
            return each if known is None else reduced(each, label, "sum" if differentiated else known)

        return tree_map(number, (args, kwargs))

    def _stays_by_example(self, function: Any, given: Sequence[Tensor], args: Any) -> bool:
        """Whether a function does no more than arithmetic with losses over the batch, and public numbers. A sum that is
        scaled may be divided by the number of rows, which cannot be distinguished from other numbers."""
        name = _called(function)
        if not self.inside or name not in ARITHMETIC:
            return False
        with unseen_by_functions():
            kinds = [self.tracker.reduction(each) for each in given]
            labels = [self.tracker.labels.get(each) for each in given]
            public = all(
                each.numel() == 1 and label is None
                for each, label, kind in zip(given, labels, kinds, strict=True)
                if kind is None
            )
        batches = {label.batch for label in labels if isinstance(label, Rows)}  # a model may have kept earlier ones
        sums = kinds.count("sum")
        scaled = name.strip("_") in SCALING and sums == 1 and (None in kinds or len(kinds) < len(args))
        return public and len(batches) <= 1 and not scaled and not (name == "stack" and None in kinds)

    def watched(self, function: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The function's result. What it is given of the examples, and passes to no operator, it has read."""
        tracker, name = self.tracker, function.__name__
        if tracker.packed and _tells_of_lengths(tracker, function, args) and asked_by_user():
            tracker.note_read(Read(name.strip("_"), users_line()))
        if name in _FACTS or (name == "__get__" and function not in EXPOSING) or isinstance(function, OPERATORS):
            return function(*args, **kwargs)
        foreign = None if types in PLAIN else next(filter(_has_functions, types), None)
        if foreign is not None and torch._C._is_torch_function_enabled():
            with self:
                return foreign.__torch_function__(function, types, args, kwargs)
        given = args[:1] if name in LIKE_THE_SECOND else args[1:] if name in LIKE_THE_FIRST else args
        labels = tracker.labels
        with unseen_by_functions():
            places = labels.memories((given, kwargs) if kwargs else given)
        if not places or (getattr(function, "__module__", None) or "").startswith("vestige."):
            return function(*args, **kwargs)
        outer, labels.taken = labels.taken, set()
        try:
            found = function(*args, **kwargs)
            missing = [place for place in places if place not in labels.taken]
            if missing:
                with unseen_by_functions():
                    returned = labels.memories((found,))
                missing = [place for place in missing if place not in returned]
        finally:
            labels.taken = None if outer is None else outer | labels.taken
        if missing:
            tracker.note_read(Read(name.strip("_"), users_line()))
        return found


def _under(mode: TrackedFunctions, function: Any, *args: Any) -> Any:
    with mode:
        return function(*args)


def _seen(pack: Any) -> bool:
    """Whether a hook of saved tensors is torch's own, or has the mode on: an operator that saves calls it without."""
    ours = isinstance(pack, partial) and pack.func is _under
    return ours or (getattr(pack, "__module__", None) or "").startswith("torch.")


SHOWING = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage"))
"""Functions that expose a tensor's memory."""
SIZES = frozenset((
    "size", "numel", "nelement", "__len__", "is_same_size", "shape", "nbytes", "stride", "storage_offset", "__iter__",
    "unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit",
))  # fmt: skip
"""What follows from how many entries a tensor has, and functions that give as many tensors."""


def _called(function: Any) -> str:
    """The name of a function, or of the attribute that is asked for."""
    return str(function.__self__.__name__ if function.__name__ == "__get__" else function.__name__)


def _tells_of_lengths(tracker: Tracker, function: Any, args: Any) -> bool:
    """Whether this may show how long packed sequences are together: the size of what is packed, or made of it."""
    if _called(function) not in SIZES:
        return False
    given = isinstance(args[0], Tensor) and not in_transform(args[0])
    return given and reordered_examples.size_tells(tracker, args[0]) is not None


@cache
def _has_functions(kind: Any) -> bool:
    """Whether a tensor subclass has a `__torch_function__` of its own."""
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    ordinary = getattr(Tensor.__torch_function__, "__func__", Tensor.__torch_function__)
    return own not in (ordinary, torch._C._disabled_torch_function_impl)


class ReadNumber(float):
    """A number that Python read of the examples. It may be printed; in a computation of tensors it is refused."""

    where = ""


class ReadCount(int):
    """The same, of a whole number."""

    where = ""


def read_number(value: Any, where: str) -> Any:
    if type(value) not in (int, float):
        return value
    made = ReadNumber(value) if isinstance(value, float) else ReadCount(value)
    made.where = where
    return made


def _arithmetic(kind: type, name: str) -> Any:
    def method(self: Any, *others: Any) -> Any:
        return read_number(getattr(kind, name)(self, *others), self.where)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _kind, _number in ((float, ReadNumber), (int, ReadCount)):
        setattr(_number, f"__{_name}__", _arithmetic(_kind, f"__{_name}__"))
        setattr(_number, f"__r{_name}__", _arithmetic(_kind, f"__r{_name}__"))
for _name in ("neg", "abs", "round"):
    for _kind, _number in ((float, ReadNumber), (int, ReadCount)):
        setattr(_number, f"__{_name}__", _arithmetic(_kind, f"__{_name}__"))


def _loss(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Each example's own loss, or the mean of them."""
    if function is F.ctc_loss:
        args, kwargs = _padded_targets(mode, args, kwargs)
    distance = kwargs.get("distance_function")
    if distance is not None:  # the user's own: what it reads is to be seen
        kwargs = {**kwargs, "distance_function": partial(_under, mode, distance)}
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "sum") or any(kwargs.get(name) is not None for name in LEGACY):
        return function(*args, **kwargs)
    computed = partial(classes_last, function) if function in CLASSES else function
    given = (*args, *kwargs.values())
    if not mode.tracker.labels.any_of([each for each in given if isinstance(each, Tensor) and not in_transform(each)]):
        return computed(*args, **kwargs)
    each = computed(*args, **{**kwargs, "reduction": "none"})
    own = mode.tracker.labels.get(each)
    losses = by_example(each, own) if isinstance(own, Rows) and own.axis >= 0 else None
    if losses is None:
        return function(*args, **kwargs)
    assert isinstance(own, Rows)
    if reduction == "mean":
        losses = _averaged(mode, function, args, kwargs, each, losses, own)
    if mode.inside:
        mode.tracker.mark_reduced(losses, reduction)
        return losses
    whole = losses.mean() if reduction == "mean" else losses.sum()
    if whole.grad_fn is not None:
        whole.grad_fn.metadata[REDUCED] = reduction  # type: ignore[index]
    return whole


def _over_all(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A sum or mean over the whole of a tensor, which inside a model is a loss, or what one is divided by: each
    example's own."""
    losses = _added_up(mode, args, kwargs) if mode.inside else None
    if losses is None:
        return mode.watched(function, (), args, kwargs)
    tensor, tracker = args[0], mode.tracker
    known = tracker.reduction(tensor)
    if function.__name__ == "mean":
        numbers = tensor.numel() // len(losses)
        if known is None:
            tracker.averaged.add(numbers)
        losses = losses / numbers
    elif losses is tensor:
        losses = losses.clone()  # rows themselves are not reduced
    tracker.mark_reduced(losses, known or function.__name__)
    return losses


def _in_checkpoint() -> bool:
    """Whether what runs will be computed again, or is, in a backward pass, where a number is a number."""
    hooks = top_hooks(True)
    pack = None if hooks is None else hooks[0].args[1] if getattr(hooks[0], "func", None) is _under else hooks[0]
    return (getattr(pack, "__module__", None) or "") == "torch.utils.checkpoint"


def _added_up(mode: TrackedFunctions, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The sum over all that belongs to each example, if it is one over all axes."""
    tensor, *dims = args or (None,)
    if not isinstance(tensor, Tensor) or in_transform(tensor) or not tensor.dim() or _in_checkpoint():
        return None
    label, along = mode.tracker.labels.get(tensor), dims[0] if dims else kwargs.get("dim")
    if len(dims) > 1 or kwargs.keys() - {"dim"} or not isinstance(label, Rows) or label.axis < 0 or label.first:
        return None
    axes = range(tensor.dim()) if along is None else along if isinstance(along, list | tuple) else [along]
    if len({axis % tensor.dim() for axis in axes if isinstance(axis, int)}) < tensor.dim():
        return None
    return None if tensor.shape[label.axis] % (label.count * label.inner) else by_example(tensor, label)


def reduced(losses: Tensor, label: Label | None, kind: str | None) -> Tensor:
    """The number, or the numbers, that a model would have made of a loss that has a number for each example."""
    if kind is None or not isinstance(label, Rows) or label.axis < 0:
        return losses
    with unseen_by_functions():  # else it would be another loss
        return losses.sum(label.axis) if kind == "sum" else losses.mean(label.axis)


_METHODS = "add radd sub rsub mul rmul truediv rtruediv div rdiv neg pow add_ sub_ mul_ div_"
_FUNCTIONS = (
    "exp log log1p sqrt square abs clamp clamp_min sum mean stack clone detach to float double type true_divide"
)
_ATTRIBUTES = "requires_grad grad_fn dtype device is_leaf is_floating_point is_complex"
SCALING = frozenset(("mul", "rmul", "truediv", "rtruediv", "div", "rdiv", "true_divide"))
ARITHMETIC = frozenset(f"__{name}__" for name in _METHODS.split()).union(
    *(names.split() for names in (_METHODS, _FUNCTIONS, _ATTRIBUTES))
)
"""Functions that take a number for each example where they would have taken one, and give such numbers."""
REDUCED = "vestige: how a loss is reduced over the batch"
KEEPS_REDUCTION = ("AddBackward0", "SubBackward0", "MulBackward0", "NegBackward0")
"""What a sum over the batch may go through and still be one; divided, it is what the user divides it by."""


def reductions_of(losses: Sequence[Tensor]) -> set[str]:
    """How torch's own losses were reduced of which these are made, without a division."""
    waiting, seen, found = [each.grad_fn for each in losses], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = node.metadata.get(REDUCED)  # type: ignore[attr-defined]
        if kind is not None:
            found.add(kind)
        elif node.name() in KEEPS_REDUCTION:
            waiting += [each for each, _ in node.next_functions]
    return found


def _padded_targets(mode: TrackedFunctions, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `ctc_loss` is given, with a row of targets for each example where they were joined."""

    def padded(each: Any) -> Any:
        label = mode.tracker.labels.get(each) if isinstance(each, Tensor) and not in_transform(each) else None
        return label.padded.clamp(min=0) if isinstance(label, reordered_examples.Joined) else each

    return tuple(map(padded, args)), {name: padded(each) for name, each in kwargs.items()}


def by_example(each: Tensor, label: Rows) -> Tensor | None:
    """The sum over all numbers of an example, of all examples or of those of a slice; None if they lie otherwise."""
    moved = each if label.axis == 0 else each.movedim(label.axis, 0)
    if label.inner == 1 and len(moved) <= label.count - label.first:
        return moved.flatten(1).sum(1) if moved.dim() > 1 else moved
    if label.first or len(moved) % (label.count * label.inner):
        return None
    shaped = moved.reshape(-1, label.count, label.inner, *moved.shape[1:])
    return shaped.sum(dim=[place for place in range(shaped.dim()) if place != 1])


def _averaged(
    mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any], each: Tensor, losses: Tensor, own: Rows
) -> Tensor:
    """Over how many numbers an example's loss is a mean: those of its targets that count, or all."""
    if function is F.ctc_loss:
        lengths = args[3] if len(args) > 3 else kwargs["target_lengths"]
        return losses / torch.as_tensor(lengths, device=losses.device).clamp(min=1)
    if function not in CLASSES:
        mode.tracker.averaged.add(each.numel() // len(losses))
        return losses / (each.numel() // len(losses))
    target = args[1] if len(args) > 1 else kwargs["target"]
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    per_target = each.numel() // len(losses)
    if not target.is_floating_point() and per_target > 1:
        counted = target != kwargs.get("ignore_index", -100)
        count = by_example(counted, mode.tracker.labels.get(counted) or own).clamp(min=1)  # type: ignore[arg-type, union-attr]
        losses = losses / count if mode.tokens is None else losses / mode.tokens
    elif per_target > 1:
        losses = losses / per_target
    return losses if weight is None else losses / weight.mean()


def _read(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tracker = mode.tracker
    with unseen_by_functions():
        read = tracker.labels.memories(args)
    if not read:
        return function(*args, **kwargs)
    if function is Tensor.__format__ and argument_checks.is_message():
        return UNSAID
    tracker.note_read(Read(function.__name__.strip("_"), users_line()))
    with unseen():
        return function(*args, **kwargs)


def _item(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if mode.inside or in_transform(args[0]) or mode.tracker.labels.get(args[0]) is None:
        return function(*args, **kwargs)
    return read_number(function(*args, **kwargs), users_line())


def _backward(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With the mode on, which torch takes off for what it calls: hooks and functions of the user's run then."""
    named = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | kwargs
    with mode:
        return torch.autograd.backward(args[0], named.pop("gradient", None), **named)


def _engine(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The same of `torch.autograd.backward` and `grad`, which ask no mode where all they are given are edges."""
    named = dict(zip(("tensors", "inputs"), args, strict=False)) | kwargs
    tensors, inputs, key = named.pop("tensors"), named.pop("inputs"), GRADIENTS[function]
    given = named.pop(key)
    given = [None] * len(tensors) if given is None else [given] if isinstance(given, Tensor) else given
    with unseen_by_functions():
        reached = [each for each in (*tensors, *(inputs or ())) if isinstance(each, Tensor)]
        odd = named.get("is_grads_batched") or named.get("materialize_grads") or any(map(in_transform, reached))
        if odd or not all(e.requires_grad for e in reached):
            return function(*args, **kwargs)
        mode.tracker.reductions |= reductions_of([each for each in tensors if isinstance(each, Tensor)])
        outputs, ends = (
            [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in some or ()]
            for some in (tensors, inputs)
        )
        ones = (own is None and isinstance(each, Tensor) for each, own in zip(tensors, given, strict=True))
        given = [torch.ones_like(each) if one else own for each, own, one in zip(tensors, given, ones, strict=True)]
    try:
        with mode:
            return function(outputs, inputs=None if inputs is None else ends, **{key: given}, **named)
    except NotApart as problem:
        if mode.inside:
            raise
        raise ValueError(f"this backward pass cannot be made private: {problem}. {ONE_BY_ONE}") from None


GRADIENTS = {torch.autograd.backward: "grad_tensors", torch.autograd.grad: "grad_outputs"}


def _one_hot(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Without looking whether all indices are in range."""
    index = args[0] if args else kwargs["tensor"]
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if classes < 0 or in_transform(index) or mode.tracker.labels.get(index) is None:
        return function(*args, **kwargs)
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).long()


def _reordered(make: Callable[..., Any]) -> Handler:
    """By a function that knows whose the entries are afterwards, where it does."""

    def handler(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = None if kwargs or in_transform(args[0]) else make(mode, *args)
        return mode.watched(function, (), args, kwargs) if found is None else found

    return handler


def _select(mode: TrackedFunctions, given: Tensor, mask: Tensor) -> Tensor | None:
    """Inside a model, where the size of what a mask chooses depends on the examples."""
    plain = mode.inside and mode.tracker.strict and not in_transform(mask)
    return reordered_examples.joined_by_mask(mode.tracker, given, mask) if plain else None


def _pad_examples(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`pad_sequence` of examples in their order, each a tensor of its own."""
    given = args[0]
    labels = [mode.tracker.labels.get(each) for each in given if isinstance(each, Tensor) and not in_transform(each)]
    first = labels[0] if labels else None
    whole = isinstance(first, Rows) and labels == [Rows(-1, 1, first.count, first.batch, n) for n in range(first.count)]
    if not whole or any(each.requires_grad for each in given):
        return function(*args, **kwargs)
    with unseen():
        found = function(*args, **kwargs)
    batch_first = args[1] if len(args) > 1 else kwargs.get("batch_first", False)
    mode.tracker.labels.set(found, Rows(0 if batch_first else 1, 1, first.count, first.batch))  # type: ignore[union-attr]
    return found


def _set_by_mask(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One value for all entries that a mask chooses, or each row's own one after the other, without choosing entries by
    what the mask holds."""
    into, mask, value = args
    one = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == into.shape[: mask.dim()]
    if not one or not isinstance(value, Tensor) or in_transform(into):
        return mode.watched(function, (), args, kwargs)
    where = mask.reshape(*mask.shape, *[1] * (into.dim() - mask.dim()))
    if value.dim() <= into.dim() - mask.dim():
        into.copy_(torch.where(where, value.to(into.dtype), into))
        return None
    parts = value.shape[1:] == into.shape[mask.dim() :] and (len(value) > 1 or len(into) == 1)  # or it is broadcast
    found = _scattered(mode, into, where, value.to(into.dtype)) if parts else None
    return mode.watched(function, (), args, kwargs) if found is None else (into.copy_(found), None)[1]


def _scattered(mode: TrackedFunctions, given: Tensor, mask: Tensor, source: Tensor) -> Tensor | None:
    """`masked_scatter` of each row's own numbers into the places that a mask chooses in it: as torch does where every
    row has as many as its mask takes. Where a row has fewer, its last ones are taken again, and no other row's."""
    if not mode.inside or any(map(in_transform, (mask, source))) or mask.dim() != given.dim() or not source.numel():
        return None
    label, rows, chosen = (mode.tracker.labels.get(each) for each in (source, given, mask))
    if not isinstance(label, Rows) or not isinstance(rows, Rows) or not isinstance(chosen, Rows | None):
        return None
    one = Rows(0, 1, len(given), rows.batch)
    before = max(label.axis, 0)
    ordered = source.shape[: before + 1] == (*[1] * before, label.count * label.inner) and not label.first
    if rows != one or chosen not in (one, None) or label[2:4] != one[2:4] or not ordered or source.dtype != given.dtype:
        return None
    if any(size not in (1, own) for size, own in zip(mask.shape, given.shape, strict=True)):
        return None  # `given` would be broadcast
    whole, axis = mask.expand(given.shape), given.dim()
    while axis > 1 and (whole.stride(axis - 1) == 0 or whole.shape[axis - 1] == 1):
        axis -= 1  # an entry of the mask is for so many numbers
    width = prod(given.shape[axis:])
    if source.numel() // len(given) % width:
        axis, width = given.dim(), 1
    own = source.reshape(len(given), -1, width)
    first: Any = (..., *[0] * (given.dim() - axis))
    taken = whole[first].reshape(len(given), -1)
    places = (taken.cumsum(1) - 1).clamp(min=0, max=own.shape[1] - 1)
    found = own.gather(1, places[:, :, None].expand(-1, -1, width))
    return torch.where(whole, found.view(given.shape), given)


def _bilinear(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """By products of matrices, which have rules."""
    given = dict(zip(("input1", "input2", "weight", "bias"), args, strict=False)) | kwargs
    found = torch.einsum("...i,oij,...j->...o", given["input1"], given["weight"], given["input2"])
    return found if given.get("bias") is None else found + given["bias"]


def _matrix_exp(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of a matrix of parameters, by products: torch's own gradient is no linear operator's."""
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    if not mode.inside or in_transform(given) or not given.requires_grad or mode.tracker.labels.get(given) is not None:
        return mode.watched(function, (), args, kwargs)
    with unseen():
        norm = float(torch.linalg.matrix_norm(given.detach(), ord=1).amax()) if given.numel() else 0.0
    halvings = max(0, ceil(log2(norm))) if 0 < norm < inf else 0
    one = torch.eye(given.shape[-1], dtype=given.dtype, device=given.device)
    found, step = one, given / 2**halvings
    for degree in range(18, 0, -1):  # at a norm of one, what is left out is less than 1e-16
        found = one + step @ found / degree
    for _ in range(halvings):
        found = found @ found
    return found


def _distances(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of examples to points that are learned, by operators whose gradients are each example's; torch computes large
    ones by products of matrices, which are."""
    given = dict(zip(("x1", "x2", "p", "compute_mode"), args, strict=False)) | kwargs
    one, other, power, how = given["x1"], given["x2"], given.get("p", 2.0), given.get("compute_mode")
    many = max(one.shape[-2], other.shape[-2]) > 25 and how != "donot_use_mm_for_euclid_dist"
    by_products = power == 2 and (many or how == "use_mm_for_euclid_dist")
    if by_products or in_transform(one) or in_transform(other):
        return mode.watched(function, (), args, kwargs)
    known = [mode.tracker.labels.get(each) is not None for each in (one, other)]
    learned = [each.requires_grad and not own for each, own in zip((one, other), known, strict=True)]
    if not any(known) or not any(learned):
        return mode.watched(function, (), args, kwargs)
    return torch.linalg.vector_norm(one.unsqueeze(-2) - other.unsqueeze(-3), power, -1)


def _group_norm(mode: TrackedFunctions, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As one operator, where there are kernels for it; also of an instance norm, each of whose channels is a group."""
    names = "input num_groups weight bias eps"
    if function is F.instance_norm:
        names = "input running_mean running_var weight bias use_input_stats momentum eps"
    defaults = {"weight": None, "bias": None, "eps": 1e-5, "use_input_stats": True}
    given = defaults | dict(zip(names.split(), args, strict=False)) | kwargs
    input = given["input"]
    groups = given.get("num_groups", input.shape[1])
    plain = mode.inside and not in_transform(input) and given["use_input_stats"] and given.get("running_mean") is None
    if plain and kernels.can_fuse_group_norm(input, groups):
        return group_norm(input, groups, given["weight"], given["bias"], given["eps"])
    return function(*args, **kwargs)


HANDLERS: dict[Any, Handler] = {
    **{function: _loss for function in (*CLASSES, *NUMBERS)},
    **{function: _read for function in READS},
    **{function: _over_all for function in (torch.sum, torch.mean, Tensor.sum, Tensor.mean)},
    Tensor.item: _item,
    Tensor.backward: _backward,
    torch.autograd.backward: _engine,
    torch.autograd.grad: _engine,
    Tensor.__setitem__: _set_by_mask,
    F.bilinear: _bilinear,
    torch.cdist: _distances,
    **dict.fromkeys((torch.matrix_exp, torch.linalg.matrix_exp, Tensor.matrix_exp), _matrix_exp),
    F.group_norm: _group_norm,
    F.instance_norm: _group_norm,
    **dict.fromkeys((Tensor.masked_select, torch.masked_select), _reordered(_select)),
    **dict.fromkeys((Tensor.masked_scatter, torch.masked_scatter), _reordered(_scattered)),
    F.one_hot: _one_hot,
    torch._C._nn.one_hot: _one_hot,
    torch._C._nn.pad_sequence: _pad_examples,
    torch._VF._pack_padded_sequence: _reordered(lambda mode, *args: reordered_examples.pack(mode.tracker, *args)),  # type: ignore[attr-defined]
    torch._VF._pad_packed_sequence: _reordered(lambda mode, *args: reordered_examples.pad(mode.tracker, *args)),  # type: ignore[attr-defined]
}
