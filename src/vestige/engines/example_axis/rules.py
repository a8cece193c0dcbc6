"""What does each operator do to the examples? One rule each: from the labels of its arguments to those of its outputs.

A rule says where the example axis goes, or that the operator mixes examples. Views need no rule (labels belong to
memory), pointwise operators are known by torch's tag, and an operator that is not listed here gives a label that says
so: it is never taken to be harmless.

Rules are grouped by what they look at: axes that must not be the examples' (reductions, softmax, sorting), axes that
are contracted (products), and operators that take each entry of the first axis by itself (convolutions, attention).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from vestige.engines.example_axis import argument_checks
from vestige.engines.example_axis.indexed_entries import is_mask, read_entries, written_entries
from vestige.engines.example_axis.labels import (
    Label,
    Labelled,
    Mixed,
    Read,
    Rows,
    Rule,
    Tracker,
    cleared,
    first_mixed,
    install_rules,
    mixed,
    of_one_example,
    of_slices_of_one,
    one_example,
    spared,
    users_line,
)
from vestige.engines.example_axis.linear_operators import linear
from vestige.engines.example_axis.operator_calls import (
    ADDED_TO,
    Args,
    Kwargs,
    Op,
    axes_of,
    creates,
    difference,
    outputs_of,
    written_anew,
)
from vestige.engines.example_axis.reordered_examples import moved, size_tells, sorted_examples
from vestige.engines.example_axis.sums import PARTS, Found, added_up, laid, of_entries
from vestige.engines.per_example import kernels
from vestige.engines.per_example.execution import unseen_by_functions

Given = Label | None | list[Label | None]
Labeller = Callable[[Op], Given]
"""From a call of an operator to the label of its output, or of each of its outputs."""
Run = Callable[[Tracker, OpOverload, Args, Kwargs], Any]
"""Runs an operator."""


def ruled(labeller: Labeller, run: Run | None = None) -> Rule:
    """The rule of an operator whose labels `labeller` makes of those of its arguments. What is made of mixed values is
    mixed."""

    def rule(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
        found = func(*args, **kwargs) if run is None else run(tracker, func, args, kwargs)
        with unseen_by_functions():
            op = Op(tracker, func, args, kwargs, labelled, found)
            arguments = [label for _, label in labelled]
            problem = first_mixed(arguments)
            given: Given
            if problem is not None:
                given = problem.plain()
            elif labeller not in OF_SINGLE_EXAMPLES and any(
                isinstance(each, Rows) and each.axis < 0 for each in arguments
            ):
                given = op.mixed("combines one example with others")
            else:
                given = labeller(op)
            if isinstance(given, Mixed):
                given = moved(op) or given
            outputs = op.outputs
            labels = given if isinstance(given, list) else [given] * len(outputs)
            if problem is None and first_mixed(labels) is not None:
                if _of_a_batch_of_one(arguments):
                    labels = [_whole(each, arguments[0]) for each in outputs]
                elif (own := of_slices_of_one(labelled)) is not None:
                    labels = [own] * len(outputs)
            tracker.finish(func, found, labels, args, kwargs)
        return found

    return Rule(rule)


def _of_a_batch_of_one(labels: Sequence[Label]) -> bool:
    batches = {(label.count, label.batch) for label in labels if isinstance(label, Rows)}
    return len(batches) == 1 and batches.pop()[0] == 1


def _whole(found: Any, label: Label) -> Label | None:
    """Whatever is made of the only example of a batch is that example's."""
    if not isinstance(found, Tensor) or not isinstance(label, Rows):
        return None
    return Rows(0, max(1, len(found)), 1, label.batch) if found.dim() else Rows(-1, 1, 1, label.batch)


def unlabelled(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """Views, whose labels belong to their memory, and operators that look at shapes alone."""
    return func(*args, **kwargs)


def unknown(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    found = cleared(func, args, kwargs)
    label = tracker.unknown = mixed(str(func).removeprefix("aten."), "is an operator without a rule", unknown=True)
    return tracker.finish(func, found, [label] * len(outputs_of(found)), args, kwargs)


def foreign(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """An operator of another library may be Python that reads values of its arguments, whatever it returns."""
    tracker.note_read(Read(f"{str(func).rpartition('.')[0]}, an operator of another library,", users_line()))
    return unknown(tracker, func, args, kwargs, labelled)


def drawn(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """How many random numbers are drawn, and so what others draw later, depends on values. An example that runs alone
    has a seed of its own, so that no later draw depends on it; a generator of the user's has not."""
    label = of_one_example(labelled)
    if label is not None and not any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
        found = func(*args, **kwargs)
        return tracker.finish(func, found, [label] * len(outputs_of(found)), args, kwargs)
    tracker.read(func)
    return unknown(tracker, func, args, kwargs, labelled)


def taken_apart(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """An operator that torch computes by others: each of these has its rule."""
    with tracker:
        return func._op_dk(COMPOSITE, *args, **kwargs)


def unraised(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """An operator that only raises an error if values are wrong, which would depend on examples: it is skipped."""


def read(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """Python looks at a value, or at a size that depends on values. Where that is noted and not refused, what is made
    of one example alone is that example's."""
    if func is torch.ops.aten._local_scalar_dense.default:
        if spared():
            return func(*args, **kwargs) if tracker.answer is None else tracker.answer
        if (well := argument_checks.answer()) is not None:
            return well
    tracker.read(func)
    found = func(*args, **kwargs)
    own = of_slices_of_one(labelled)
    label = own or mixed(func.overloadpacket.__name__, "has a size that depends on the examples", unknown=True)
    return tracker.finish(func, found, [label] * len(outputs_of(found)), args, kwargs)


# --- numbers in the same place ----------------------------------------------------------------------------------------


def pointwise(op: Op) -> Given:
    return [op.broadcast(each.shape) if isinstance(each, Tensor) else None for each in op.outputs]


def copied(op: Op) -> Label | None:
    return op.broadcast(op["self"].shape, ["src"])


def overwritten(op: Op) -> Label | None:
    """Filled with a number, or with draws of chances that may be rows; earlier values are overwritten."""
    return op.broadcast(op["self"].shape, ["value", "p"])


def loss(op: Op) -> Given:
    """A loss of numbers in the same place: rows without a reduction, everybody's with one."""
    if op["reduction"] == 0:
        return pointwise(op)
    label = op.broadcast(op["self"].shape, ["self", "target"])
    if op["reduction"] == 1 and isinstance(label, Rows):
        op.tracker.averaged.add(op["self"].numel() // label.count)
    return op.mixed("is a reduction over the batch")


def nll(op: Op) -> Given:
    """[rows, classes, ...] and targets [rows, ...]."""
    label = _of_targets(op)
    if op["reduction"] == 0 or not isinstance(label, Rows):
        return [label, label if isinstance(label, Mixed) else None]
    return op.mixed("is a reduction over the batch")


def _of_targets(op: Op) -> Label | None:
    label = op.meet(op.label("self"), op.label("target"))
    apart = not isinstance(label, Rows) or (label.axis == 0 and op["self"].dim() > 1)
    return label if apart and op.public("weight") else op.mixed()


def nll_backward(op: Op) -> Given:
    """A gradient for every target, or one for all; a mean divides by everybody's weights, which is a mixed argument."""
    return op.meet(_of_targets(op), op.label("grad_output"))


def of_tokens(op: Op) -> Given:
    """[tokens, classes], and tensors of a number for each token."""
    label = op.meet(*(label for _, label in op.labelled))
    return label if not isinstance(label, Rows) or label.axis == 0 else op.mixed()


def connectionist(op: Op) -> Given:
    """Connectionist temporal classification of [time, rows, classes]; targets [rows, length]."""
    label = op.label("log_probs")
    targets = op.label("targets")
    padded = label is not None and label.axis == 1 and label.inner == 1 and op["targets"].dim() == 2
    others = (targets, op.label("input_lengths"), op.label("target_lengths"))
    if not padded or label is None or any(each is not None and each != label.at(0) for each in others):
        return op.mixed("is not known of targets that are joined", unknown=True)
    if op.name == "_ctc_loss_backward":
        own = op.label("grad")
        return label if own is None or own == label.at(0) else op.mixed()
    return [label.at(0), label.at(0)]


# --- along axes -------------------------------------------------------------------------------------------------------


def reduced(op: Op) -> Given:
    """A reduction over some axes."""
    label, tensor = op.label("self"), op["self"]
    if label is None:
        return None
    dims = axes_of(op.given.get("dim"), tensor.dim())
    if label.axis in dims and _alone(tensor, label):
        return label.at(-1)
    if label.axis in dims:
        if op.func.overloadpacket is torch.ops.aten.mean:
            op.tracker.averaged.add(tensor.numel() // label.count)
        return op.mixed("is a reduction over the batch")
    if op.given.get("keepdim"):
        return label
    return label.at(label.axis - sum(dim < label.axis for dim in dims))


def along(op: Op) -> Given:
    """Numbers along an axis are combined, and the axis stays; backward too, of several tensors of one rank."""
    rows = op.labelled
    dims = op["dims"] if "dims" in op.given else op.given.get("dim")
    return op.off(op.meet(*(label for _, label in rows)), axes_of(dims, rows[0][0].dim()))


def sorted_along(op: Op) -> Given:
    return sorted_examples(op) or along(op)


def apart(op: Op, axes: int) -> Given:
    """Each entry of the first so many axes is taken by itself, of all tensors that have examples."""
    rows = op.labelled
    given, label = rows[0][0], op.meet(*(label for _, label in rows))
    if not isinstance(label, Rows):
        return label
    if label.axis >= axes or not op.public("weight", "bias", "input_bias", "hidden_bias"):
        return op.mixed()
    if len({each.shape[label.axis] for each, _ in rows}) > 1:
        return op.mixed("spreads one example over the others")

    def kept(found: Any) -> Label | None:
        if not isinstance(found, Tensor) or not found.numel():
            return None
        same = found.dim() > label.axis and found.shape[label.axis] == given.shape[label.axis]
        return label if same else op.mixed()

    return [kept(each) for each in op.outputs]


def first_axis(op: Op) -> Given:
    return apart(op, 1) if max(each.dim() for each, _ in op.labelled) > 1 else op.mixed()


def last_axes(count: int) -> Labeller:
    """Each entry of the axes before the last `count` ones is taken by itself: pools, triangles, matrix functions."""

    def labeller(op: Op) -> Given:
        ranks = {each.dim() for each, _ in op.labelled}
        rank = min(ranks)
        if len(ranks) > 1:
            return op.mixed("is not known of tensors of different ranks", unknown=True)
        if any(isinstance(each, Tensor) and each.dim() > rank for each in op.given.values()):
            return op.mixed("spreads one example over the others")
        return apart(op, rank - count)

    return labeller


VECTORS = {
    "_linalg_solve_ex": "B",
    "linalg_lu_solve": "pivots",
    "lu_unpack": "LU_pivots",
    "linalg_householder_product": "tau",
}
"""Of functions of matrices, the argument that may be a vector beside each matrix."""


def matrices(op: Op) -> Given:
    """Each matrix of a stack is taken by itself, with its vector."""
    first = op.labelled[0][0] if op.name != "_linalg_solve_ex" else op["A"]
    vector = op[VECTORS[op.name]]
    beside = vector.dim() == first.dim() - 1 and vector.shape == first.shape[:-1]
    if not beside or all(each is vector for each, _ in op.labelled):
        found = last_axes(2)(op)
        factored = op.name == "_linalg_solve_ex" and op.public("A")  # what comes with the solution is of A alone
        return [found[0], None, None, None] if factored and isinstance(found, list) else found
    others = [each for each in op.given.values() if isinstance(each, Tensor) and each is not vector]
    return apart(op, first.dim() - 2) if {each.dim() for each in others} == {first.dim()} else op.mixed(unknown=True)


def diagonal(op: Op) -> Given:
    """A diagonal of two axes that are not the examples' is taken, or put into zeros or into something else."""
    whole = op["self"] if op.name == "diagonal_scatter" else op.found
    rank = whole.dim()
    one, other = op["dim1"] % rank, op["dim2"] % rank
    free = [place for place in range(rank) if place not in (one, other)]
    found: list[Label | None] = []
    for tensor, label in op.labelled:
        if tensor.dim() == rank:
            found.append(op.off(label, {one, other}))
        else:
            found.append(label.at(free[label.axis]) if label.axis < len(free) else op.mixed())
    return op.meet(*found)


def cross(op: Op) -> Given:
    made = last_axes(2)(op)
    return op.off(made[0], axes_of(op["dim"], op.found.dim())) if isinstance(made, list) else made


def group_norm(op: Op) -> Given:
    """Each row of [rows, channels, ...] by itself, if the sizes that the operator is given are those of its input."""
    rows = len(op["input"])
    as_told = "N" not in op.given or (op["N"] == rows and rows * op["C"] * op["HxW"] == op["input"].numel())
    return first_axis(op) if as_told else op.mixed()


def layer_norm(op: Op) -> Given:
    return last_axes(len(op["normalized_shape"]))(op)


def of_input(labeller: Labeller) -> Labeller:
    """Gradients of the input, then those of weight and bias, which are sums over the batch."""

    def backward(op: Op) -> Given:
        made = labeller(op)
        first = made[0] if isinstance(made, list) else made
        return [first] + [op.mixed("is a sum over the batch")] * (len(op.found) - 1)

    return backward


def padded(op: Op) -> Given:
    label, pad = op.label("self"), op["pad"]
    if label is None:
        return None
    behind = 2 * (op["self"].dim() - 1 - label.axis)
    return label if not any(pad[behind : behind + 2]) else op.mixed()


def repeated(op: Op) -> Given:
    label, counts = op.label("self"), op["repeats"]
    if label is None:
        return None
    axis = label.axis + len(counts) - op["self"].dim()
    whole = op["self"].shape[label.axis] % (label.inner * label.count) == 0 and label.first == 0
    return label.at(axis) if counts[axis] == 1 or whole else op.mixed()


def _one_after_the_other(op: Op, tensors: Sequence[Tensor], dim: int, inner: int) -> Rows | None:
    """Tensors of single examples, all of them in their order, side by side."""
    labels = [op.tracker.labels.get(each) for each in tensors]
    alone = [
        label.at(-1)
        for each, label in zip(tensors, labels, strict=True)
        if isinstance(label, Rows) and _alone(each, label)
    ]
    if not alone or len(alone) != len(labels) or len(alone) != alone[0].count:
        return None
    in_order = all(label == alone[0]._replace(first=place) for place, label in enumerate(alone))
    return Rows(dim, inner, alone[0].count, alone[0].batch) if in_order else None


def _consecutive(op: Op, tensors: Sequence[Tensor], dim: int) -> Rows | None:
    """Parts of a batch, each of several examples, in the order that they have in it."""
    labels = [op.tracker.labels.get(each) for each in tensors]
    first = labels[0] if labels else None
    if not isinstance(first, Rows) or (first.axis, first.inner) != (dim, 1):
        return None
    following = first.first
    for each, label in zip(tensors, labels, strict=True):
        if label != first._replace(first=following):
            return None
        following += each.shape[dim]
    return first if following <= first.count else None


def _alone(tensor: Tensor, label: Rows) -> bool:
    """Whether all of a tensor belongs to one example of several."""
    return label.axis < 0 or (label.count > 1 and tensor.shape[label.axis] <= label.inner)


def joined(op: Op) -> Given:
    """`cat` along another axis keeps rows; along the examples' own, whole batches follow each other."""
    tensors, dim = op["tensors"], op.given.get("dim", 0)
    sizes = {each.shape[dim] for each in tensors if each.dim() > 1 or len(each)}
    alone = _one_after_the_other(op, tensors, dim % op.found.dim(), next(iter(sizes), 1)) if len(sizes) == 1 else None
    if alone is not None:
        return alone
    filled = [each for each in tensors if each.dim() > 1 or len(each)]
    parts = _consecutive(op, filled, dim % op.found.dim())
    if parts is not None:
        return parts
    label = op.meet(*map(op.tracker.labels.get, filled))
    if not isinstance(label, Rows) or dim % op.found.dim() != label.axis:
        return label
    cycle = label.inner * label.count
    return label if label.first == 0 and all(t.shape[label.axis] % cycle == 0 for t in filled[:-1]) else op.mixed()


def parted(op: Op) -> Given:
    """Parts along another axis than the examples'."""
    return [op.off(op.label("self"), axes_of(op.given.get("dim", 0), op["self"].dim()))] * len(op.outputs)


def stacked(op: Op) -> Given:
    dim = op.given.get("dim", 0) % op.found.dim()
    alone = _one_after_the_other(op, op["tensors"], dim, 1)
    if alone is not None:
        return alone
    label = op.meet(*map(op.tracker.labels.get, op["tensors"]))
    return label.at(label.axis + (dim <= label.axis)) if isinstance(label, Rows) else label


# --- products ---------------------------------------------------------------------------------------------------------


def _product(op: Op, one: Rows | None, other: Rows | None, ranks: tuple[int, int]) -> Label | None:
    """Of matrices, or of stacks of them: only axes that are not contracted may be the examples'."""
    left, right = ranks
    if one is not None and other is not None:
        both = op.meet(one, other)
        stacks = isinstance(both, Rows) and one.axis < left - 2 and other.axis < right - 2
        return both if stacks else op.mixed() if not isinstance(both, Mixed) else both
    if one is not None:
        return one if one.axis != left - 1 else op.mixed()
    if other is not None:
        contracted = other.axis == max(right - 2, 0)
        if contracted:
            return op.mixed()
        return other.at(left - 1) if other.axis == right - 1 else other
    return None


def multiplied(op: Op) -> Given:
    first, second = ("mat1", "mat2") if "mat1" in op.given else ("self", "mat2")
    if "batch1" in op.given:
        first, second = "batch1", "batch2"
    elif "vec" in op.given:
        first, second = ("mat" if "mat" in op.given else "self"), "vec"
    elif "tensor" in op.given:
        first, second = "self", "tensor"
    one, other = op.label(first), op.label(second)
    label = _product(op, one, other, (op[first].dim(), op[second].dim()))
    if first == "self" or isinstance(label, Mixed):
        return label
    added = op.label("self")  # what is added to the product, broadcast
    return label if added is None else op.meet(label, op.broadcast_one(op["self"], added, op.found.shape))


def outer_distances(op: Op) -> Given:
    one, other = op.label("x1"), op.label("x2")
    rank = op["x1"].dim()
    if op["x2"].dim() != rank:
        return op.mixed()
    if one is not None and other is None:
        kept = one.axis <= rank - 2 and op.found.shape[one.axis] == op["x1"].shape[one.axis]
        return one if kept else op.mixed()
    if one is None and other is not None and other.axis == rank - 2:
        return other.at(rank - 1)
    label = op.meet(one, other)
    if not isinstance(label, Rows):
        return label
    apart = label.axis < rank - 2 and op["x1"].shape[label.axis] == op["x2"].shape[label.axis]
    return label if apart else op.mixed()


def distances_backward(op: Op) -> Given:
    """The gradient of the first argument of `outer_distances`, by those of all distances of its rows."""
    rows, rank = op.labelled, op["x1"].dim()
    label = op.meet(*(label for _, label in rows))
    if not isinstance(label, Rows):
        return label
    sizes = {each.shape[label.axis] for each, _ in rows}
    stacks = label.axis < rank - 2 or (label.axis == rank - 2 and op.public("x2"))
    same = len(sizes) == 1 and all(each.dim() == rank for each, _ in rows) and op.found.shape[label.axis] in sizes
    return label if stacks and same else op.mixed()


# --- layers -----------------------------------------------------------------------------------------------------------


def batch_norm(op: Op) -> Given:
    """By statistics of the batch only where each example has channels of its own, as in an instance norm."""
    label = op.label("input")
    training = op.given.get("training", op.given.get("train", True))
    if not op.public("weight", "bias", "running_mean", "running_var"):
        return op.mixed()
    if label is None or (not training and label.axis != 1):
        apart: Label | None = label
        statistics: Label | None = None
    elif label.axis == 1 and training and op.given.get("running_mean") is None:
        apart, statistics = label, label.at(0)
    else:
        apart = statistics = op.mixed("normalises by statistics of the batch")
        for name in ("running_mean", "running_var"):  # written to, which some schemas omit
            if isinstance(op.given.get(name), Tensor):
                op.tracker.labels.write(op[name], statistics)
    return [apart, *[statistics] * (len(op.found) - 1)] if isinstance(op.found, tuple) else apart


def batch_norm_backward(op: Op) -> Given:
    first = "grad_out" if "grad_out" in op.given else "grad_output"
    label = op.meet(op.label(first), op.label("input"))
    if not op.public("running_mean", "running_var"):
        return op.mixed()
    if isinstance(label, Rows) and (label.axis == 1) is not bool(op.given.get("train", True)):
        return op.mixed("normalises by statistics of the batch")
    channels = label.at(0) if isinstance(label, Rows) and label.axis == 1 else op.mixed("is a sum over the batch")
    return [label, channels, channels][: len(op.found)]


def attention(op: Op) -> Given:
    """Queries, keys, values, masks and what comes back: each entry of the first axis by itself."""
    label: Rows | None = None
    rows = op["query"].shape[0]
    for each, own in op.labelled:
        if own.axis or each.dim() < 3 or len(each) != rows:
            return op.mixed()
        if label is not None and own != label:
            return op.mixed(difference(label, own))
        label = own

    def labelled(each: Any) -> Label | None:
        if not isinstance(each, Tensor) or not each.is_floating_point() or not each.numel():
            return None  # sizes, and the state of the generator
        return label if each.dim() > 2 and len(each) == rows else op.mixed("is a sum over the batch")

    return [labelled(each) for each in op.found]


def recurrent(op: Op) -> Given:
    """A frozen recurrent layer over [time, examples, width], or batch first; states are [layers, examples, width]."""
    label = op.label("input")
    first = bool(op["batch_first"]) and op.name == "_cudnn_rnn"  # oneDNN is given time first, whatever batch_first is
    states = {"hx", "cx", "hx_", "cx_"} & set(op.given)
    others = [name for name in op.given if name not in (*states, "input", "weight")]
    tables = op.given.get("weight") or ()
    apart = op.public(*others) and all(op.tracker.labels.get(each) is None for each in tables)
    if label is None or label.axis != (0 if first else 1) or not apart or op.given.get("batch_sizes"):
        return op.mixed()
    if any(op.label(name) not in (None, label.at(1)) for name in states):
        return op.mixed()
    made: list[Label | None] = [label]
    made += [label.at(1) if isinstance(each, Tensor) and each.dim() == 3 else op.mixed() for each in op.found[1:3]]
    return made + [op.mixed() if isinstance(each, Tensor) else None for each in op.found[3:]]


def recurrence(op: Op) -> Given:
    """All steps of a layer over [steps, directions, rows, width], and back; states are [directions, rows, width]."""
    label = op.meet(*(own.at(own.axis + 4 - each.dim()) if own.axis >= 0 else own for each, own in op.labelled))
    if not op.public("weight", "bias", "projection") or (isinstance(label, Rows) and label.axis != 2):
        return op.mixed()
    return [label.at(each.dim() - 2) for each in op.found] if isinstance(label, Rows) else label


# --- gathers and scatters ---------------------------------------------------------------------------------------------


def looked_up(tables: str, index: str) -> Labeller:
    """Entries of tables that are public, by indices, or by numbers, of any rank."""
    return lambda op: op.label(index) if op.public(*tables.split()) else op.mixed()


def member(op: Op) -> Given:
    """Whether elements are among public ones; with `assume_unique` they are compared with each other."""
    return op.mixed() if op.given.get("assume_unique") else looked_up("test_elements", "elements")(op)


def indexed(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    if any(is_mask(each) and tracker.labels.get(each) is not None for each in args[1]):
        return read(
            tracker, func, args, kwargs, labelled
        )  # how much is chosen depends on values, be they of one example
    label = of_one_example(labelled)
    if label is not None:
        return tracker.finish(func, func(*args, **kwargs), [label], args, kwargs)
    return _BY_READING.apply(tracker, func, args, kwargs, labelled)


def sliced_backward(op: Op) -> Given:
    """The gradient of a part, within zeros of the shape of the whole."""
    label = op.label("grad_output") if "grad_output" in op.given else op.label("grad_in")
    if label is None:
        return None
    sizes, rank = op["input_sizes"], len(op["input_sizes"])
    dim = op["dim"] % rank
    if label.axis not in (dim, rank):
        return label
    start, step = op.given.get("start") or 0, op.given.get("step")
    start += sizes[dim] if start < 0 else 0
    in_place = label.axis == dim and step == 1 and (label.inner, label.first, label.count) == (1, start, sizes[dim])
    return label._replace(first=0) if in_place else op.mixed()


def select_backward(op: Op) -> Given:
    label, sizes = op.label("grad_output"), op["input_sizes"]
    if label is None:
        return None
    dim, index = op["dim"] % len(sizes), op["index"]
    own = one_example(op["grad_output"], label)
    row = dim == 0 or sizes[0] != 1  # not a column of a batch of one, of which there may be as many
    if own is not None and row and (sizes[dim], index % sizes[dim]) == (own.count, own.first):
        return own._replace(axis=dim, first=0)  # one example's gradient, in its row
    return label.at(label.axis + (dim <= label.axis)) if label.axis >= 0 else label


def put_in(op: Op) -> Given:
    """A part of a tensor is replaced, along another axis than the examples'."""
    dim, given = op["dim"] % op["self"].dim(), op.label("src")
    if given is not None:
        given = given.at(given.axis + (op.name == "select_scatter" and dim <= given.axis))
    return op.off(op.meet(op.label("self"), given), {dim})


def renormed(op: Op) -> Given:
    label = op.label("self")
    return label if label is None or label.axis == op["dim"] % op["self"].dim() else op.mixed()


OF_SINGLE_EXAMPLES: tuple[Labeller, ...] = (joined, stacked, select_backward)
"""Rules that know what to do with tensors of which each is one example's."""

# --- which operator has which rule ------------------------------------------------------------------------------------

TABLE: dict[Labeller, str] = {
    pointwise: "native_dropout native_dropout_backward _fused_dropout rrelu_with_noise_backward bernoulli normal "
    "_to_copy polar complex fill masked_fill where floor_divide rsub nan_to_num gelu hardswish hardsigmoid "
    "_conj_physical _prelu_kernel _prelu_kernel_backward elu_backward leaky_relu_backward hardtanh_backward "
    "log_sigmoid_forward log_sigmoid_backward softplus_backward hardswish_backward hardsigmoid_backward "
    "hardshrink_backward softshrink_backward mish_backward logit_backward mse_loss_backward smooth_l1_loss_backward "
    "huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward",
    copied: "copy_ copy",
    overwritten: "fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_",
    loss: "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss binary_cross_entropy_with_logits",
    nll: "nll_loss_forward nll_loss2d_forward",
    nll_backward: "nll_loss_backward nll_loss2d_backward",
    of_tokens: "token_losses token_losses_backward",
    connectionist: "_ctc_loss _ctc_loss_backward",
    reduced: "sum mean amax amin max min prod any all var var_mean std std_mean logsumexp argmax argmin norm median "
    "nanmedian linalg_vector_norm kthvalue mode count_nonzero nansum aminmax",
    along: "_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp topk flip roll rot90 glu _fft_r2c _fft_c2r "
    "_fft_c2c _safe_softmax _softmax_backward_data _log_softmax_backward_data glu_backward",
    sorted_along: "sort",
    last_axes(
        1
    ): "reflection_pad1d replication_pad1d reflection_pad1d_backward replication_pad1d_backward upsample_linear1d "
    "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d_backward upsample_nearest1d_backward",
    last_axes(2): "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d_backward "
    "max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward reflection_pad2d "
    "replication_pad2d reflection_pad2d_backward replication_pad2d_backward upsample_bilinear2d upsample_nearest2d "
    "upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "upsample_bilinear2d_backward upsample_nearest2d_backward upsample_bicubic2d_backward "
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward _upsample_nearest_exact2d_backward triu tril "
    "linalg_inv_ex linalg_cholesky_ex _linalg_det _linalg_slogdet _linalg_svd linalg_qr _linalg_eigh linalg_pinv "
    "linalg_eig cholesky_inverse "
    "linalg_matrix_exp linalg_solve_triangular cholesky_solve linalg_lu_factor_ex",
    matrices: " ".join(VECTORS),
    diagonal: "diagonal_backward diag_embed diagonal_scatter",
    cross: "linalg_cross",
    last_axes(3): "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d_backward "
    "max_pool3d_with_indices_backward _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward upsample_trilinear3d "
    "upsample_nearest3d upsample_trilinear3d_backward upsample_nearest3d_backward pixel_shuffle pixel_unshuffle "
    "reflection_pad3d replication_pad3d",
    first_axis: "multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
    "multilabel_margin_loss_backward channel_shuffle im2col col2im "
    "grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward "
    "affine_grid_generator multinomial max_unpool2d max_unpool3d routed "
    "routed_weights _thnn_fused_lstm_cell _thnn_fused_gru_cell convolution _convolution mkldnn_convolution "
    "cudnn_convolution convolution_overrideable _slow_conv2d_forward",
    padded: "constant_pad_nd",
    repeated: "repeat",
    joined: "cat",
    stacked: "stack",
    multiplied: "mm addmm bmm baddbmm mv addmv dot addmm_",
    outer_distances: "_cdist_forward _euclidean_dist",
    distances_backward: "_cdist_backward",
    group_norm: "native_group_norm fused_group_norm",
    of_input(first_axis): "convolution_backward",
    of_input(group_norm): "native_group_norm_backward fused_group_norm_backward",
    layer_norm: "native_layer_norm _fused_rms_norm",
    of_input(layer_norm): "native_layer_norm_backward _fused_rms_norm_backward",
    batch_norm: "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update",
    batch_norm_backward: "native_batch_norm_backward cudnn_batch_norm_backward",
    attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward",
    recurrent: "mkldnn_rnn_layer _cudnn_rnn",
    recurrence: "recurrence recurrence_backward",
    looked_up("self", "index"): "take",
    looked_up("boundaries", "self"): "bucketize",
    looked_up("sorted_sequence sorter", "self"): "searchsorted",
    member: "isin",
    parted: "unsafe_split unsafe_split_with_sizes split_with_sizes_copy",
    read_entries: "embedding gather index_select index _unsafe_index",
    written_entries: "scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce index_put "
    "_index_put_impl_ _unsafe_index_put",
    sliced_backward: "slice_backward unfold_backward",
    select_backward: "select_backward",
    put_in: "slice_scatter select_scatter",
    renormed: "renorm",
}
SHAPES = (
    "as_strided transpose squeeze unsqueeze t swapaxes swapdims detach "
    "is_same_size _fused_sdp_choice _unsafe_view _reshape_alias lift_fresh record_stream _has_same_storage_numel "
    "_assert_tensor_metadata is_pinned dim numel size stride sym_size sym_stride sym_numel sym_storage_offset "
    "_nested_tensor_size set_data _version output_nr"
)
"""Operators that look at shapes alone, or give another name to the same memory."""
READS = "histc masked_scatter _pack_padded_sequence"
"""Operators that look at values, beside those that torch says have an output of a size that depends on them."""


def new(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """A new public tensor, in the shape or of the type of another one."""
    found = tracker.public(func, args, kwargs)
    tells = size_tells(tracker, args[0]) if "_like" in func.overloadpacket.__name__ else None
    return found if tells is None else tracker.finish(func, found, [tells.plain()], args, kwargs)


def copied_into(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
    """`copy_`: also of one example into its place among others."""
    label = tracker.labels.get(args[1])
    if not isinstance(label, Rows) or label.axis >= 0 or not tracker.labels.takes(args[0], label):
        return _COPY.apply(tracker, func, args, kwargs, labelled)
    return tracker.finish(func, func(*args, **kwargs), [label], args, kwargs)


def product_in_parts(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """`mm` and `addmm`, where a GPU is faster in parts."""
    *added, left, right = args
    if kwargs or right.device.type not in kernels.ALIGNED:
        return func(*args, **kwargs)
    with unseen_by_functions():
        found = kernels.multiply(laid(tracker, left), right)
        if found is None:
            return func(*args, **kwargs)
        return found + added[0] if added else found.contiguous()


_COPY = ruled(copied)
_BY_READING = ruled(read_entries)
_BY_NAME: dict[str, Rule] = {name: ruled(rule) for rule, names in TABLE.items() for name in names.split()}
VIEW, UNKNOWN, SIZED = Rule(unlabelled, of_one_example=False), Rule(unknown), Rule(read, of_one_example=False)
NEW = Rule(new, of_one_example=False)
DRAWN, FOREIGN = Rule(drawn, of_one_example=False), Rule(foreign, of_one_example=False)
COMPOSED = Rule(taken_apart, of_one_example=False)
COMPOSITE, KERNELS = torch._C.DispatchKey.CompositeImplicitAutograd, ("CPU", "CUDA")
_SHAPES = frozenset(SHAPES.split())
_BY_NAME |= {name: VIEW for name in _SHAPES}
_BY_NAME |= {name: SIZED for name in READS.split()}
_BY_NAME["copy_"] = Rule(copied_into)
_BY_NAME |= {name: ruled(multiplied, product_in_parts) for name in ("mm", "addmm")}
_BY_NAME["_linalg_check_errors"] = Rule(unraised, of_one_example=False)
_BY_NAME["select_backward"] = Rule(_BY_NAME["select_backward"].apply, of_one_example=False)
_BY_NAME |= {name: Rule(indexed, of_one_example=False) for name in ("index", "_unsafe_index")}


def _composed(name: str) -> bool:
    """Whether an operator is made of others on every device. Autograd takes such operators apart before they get here;
    tensors of `torch.inference_mode` know no autograd."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, COMPOSITE.name) and not any(has(name, each) for each in KERNELS)


def find_rule(func: OpOverload) -> Rule:
    """The rule of an operator of ATen: made of others, listed by name, a view by its schema, or pointwise by torch's
    tag. Those that take functions (`torch.cond`) have none."""
    if not isinstance(func, OpOverload):
        return UNKNOWN
    if func.namespace not in ("aten", "prims", "prim", "vestige"):
        return FOREIGN
    name = func.overloadpacket.__name__
    if name not in _SHAPES and _composed(func.name()):
        return COMPOSED
    rule = _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_")) or _unlisted(func, name)
    if name.removesuffix("_") in ADDED_TO:
        return added_to(rule)
    return adding_up(PARTS[name], rule) if name in PARTS else rule


def _unlisted(func: OpOverload, name: str) -> Rule:
    if creates(name):
        return NEW
    schema = func._schema
    returned = [each for each in schema.returns if each.alias_info is not None]
    if returned and not any(
        each.alias_info.is_write for each in (*schema.returns, *schema.arguments) if each.alias_info
    ):
        return VIEW
    forms = [getattr(func.overloadpacket, form) for form in func.overloadpacket.overloads()]  # some have no tags
    if any(torch.Tag.dynamic_output_shape in each.tags for each in forms):
        return SIZED
    if not any("Tensor" in str(each.type) for each in schema.returns):
        return SIZED
    new = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), func._overloadname, func)
    tags = (*func.tags, *new.tags)  # not all forms in place are tagged as those that give new tensors are
    if torch.Tag.nondeterministic_seeded in tags:
        return DRAWN
    return ruled(pointwise) if torch.Tag.pointwise in tags else UNKNOWN


def adding_up(parts: Callable[[Op], Found], rule: Rule) -> Rule:
    """The rule of an operator that may add up what belongs to different examples, in a backward pass."""

    def apply(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
        if not tracker.adds_up or (parts is of_entries and _home(tracker, func, args, kwargs, labelled)):
            return rule.apply(tracker, func, args, kwargs, labelled)
        found = added_up(parts, tracker, func, args, kwargs, labelled)
        return rule.apply(tracker, func, args, kwargs, labelled) if found is None else found

    return Rule(apply, rule.of_one_example)


def added_to(rule: Rule) -> Rule:
    """The rule of an operator that may add up examples as one of those that it is composed of, in a backward pass."""

    def apply(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> Any:
        found = written_anew(tracker, func, args, kwargs) if tracker.adds_up else None
        return rule.apply(tracker, func, args, kwargs, labelled) if found is None else found

    return Rule(apply, rule.of_one_example)


def _home(tracker: Tracker, func: OpOverload, args: Args, kwargs: Kwargs, labelled: Labelled) -> bool:
    """Whether an operator puts rows in their own places: then they are no sum."""
    if "self" not in (op := Op(tracker, func, args, kwargs, labelled, None)).given:
        return False
    with unseen_by_functions():
        return first_mixed(label for _, label in labelled) is None and isinstance(written_entries(op), Rows)


install_rules(find_rule, linear)
