"""Does every rule say whose numbers an operator gives? Each is held against moving one example.

Every operator is run with any of its arguments labelled, along any axis. Then one example's entries become others: only
entries that the label attributes to that example may have changed. All axes are equally long, so that the examples
are as many as anything else; and an example may have several entries, side by side or in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.engines.example_axis import labels as example_axis
from vestige.engines.example_axis import rules as operator_rules
from vestige.engines.example_axis.labels import Labels, Mixed, Rows, SumCell, Summed, Tracker
from vestige.engines.example_axis.rules import Op, ruled
from vestige.engines.per_example import recurrence_operator  # noqa: F401  (its operators)
from vestige.engines.per_example.gradient_forms import Dense

aten = torch.ops.aten
SIZES = ((2, 2, 1), (3, 3, 1), (2, 4, 2))
"""Examples, length of every axis, and how many entries side by side an example has."""
GATES = {"LSTM": 4, "RNN_TANH": 1}
OTHER_GATES = {"GRU": 3, "RNN_RELU": 1}


class Call(NamedTuple):
    """An operator as it is called. Arguments: "f" floats, "s" floats in a single row, "i" indices, "b" a mask; and their
    ranks."""

    run: Callable[..., Any]
    arguments: str
    backward: bool = False


def over_dims(function: Callable[..., Any], rank: int = 3, **given: Any) -> Iterator[Call]:
    for dim in range(-1, rank):
        yield Call(lambda x, d=dim: function(x, dim=d, **given), f"f{rank}")


def calls() -> dict[str, list[Call]]:
    made: dict[str, list[Call]] = {}
    reductions = (torch.sum, torch.mean, torch.amax, torch.prod, torch.var, torch.std, torch.logsumexp, torch.argmax)
    reductions += (torch.all, torch.any, torch.median, torch.linalg.vector_norm, torch.nansum, torch.aminmax)
    for function in reductions:
        name = function.__name__
        made[name] = [call for keep in (False, True) for call in over_dims(function, keepdim=keep)]
        if function not in (torch.prod, torch.argmax, torch.all, torch.any, torch.median, torch.aminmax):
            made[name] += [Call(lambda x, f=function, d=d: f(x, dim=d), "f3") for d in ((0, 1), (1, 2), (0, -1))]
    made["count_nonzero"], made["kthvalue"] = list(over_dims(torch.count_nonzero)), list(over_dims(torch.kthvalue, k=1))
    for function in (torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod, torch.cummax, torch.logcumsumexp):
        made[function.__name__] = [call._replace(backward=True) for call in over_dims(function)]
    made["sort"], made["topk"] = list(over_dims(torch.sort)), list(over_dims(torch.topk, k=1))
    made["flip"] = [Call(lambda x, d=d: torch.flip(x, (d,)), "f3") for d in range(3)]
    made["roll"] = [Call(lambda x, d=d: torch.roll(x, 1, d), "f3") for d in range(3)]
    made["fft"] = [Call(lambda x, d=d: torch.fft.rfft(x, dim=d), "f3") for d in range(3)]
    made["glu"] = [Call(lambda x, d=d: F.glu(torch.cat([x, x], d), d), "f3", True) for d in range(3)]
    binary = (torch.mul, lambda x, y: torch.where(x > 0.5, x, y))
    shapes = ("f3 f3", "f3 f2", "f3 f1", "f2 s2")
    made["pointwise"] = [Call(each, shape, True) for each in binary for shape in shapes]
    made["masked_fill"] = [Call(lambda x, m: x.masked_fill(m, 0.5), shape) for shape in ("f3 b3", "f3 b1")]
    made["in place"] = [
        Call(lambda x, y: x.clone().copy_(y), "f3 f2"),
        Call(lambda x, y: x.clone().mul_(y), "f3 f2"),
        Call(lambda x: torch.zeros_like(x).fill_(x.flatten()[0]), "f2"),
        Call(lambda x, y: torch.zeros_like(x).fill_(y[0, 0]), "f2 f2"),
        Call(lambda x, y: x.clone().bernoulli_((y > 0.8).to(x.dtype)), "f2 f2"),
        Call(lambda x: x.clone().abs_(), "f3", True),
        Call(lambda x, y: x.clone().gt_(y), "f3 f2"),
        Call(lambda x, y: x.clone().xlogy_(y), "f3 f2"),
        Call(lambda x, y: torch.floor_divide(x, y), "f3 f2"),
        Call(lambda x, y: torch.rsub(x, y), "f3 f2"),
    ]
    made["written through a view"] = [
        Call(lambda x, y: _written(x, lambda z: z[:, 0].copy_(y)), "f3 f2"),
        Call(lambda x, y: _written(x, lambda z: z[0].copy_(y)), "f3 f2"),
        Call(lambda x, y: _written(x, lambda z: z[..., 0].copy_(y)), "f3 f2"),
        Call(lambda x, y: _written(torch.zeros_like(x), lambda z: z.transpose(0, 1)[1].copy_(y)), "f3 f2"),
    ]
    made["views"] = [
        Call(each, "f3")
        for each in (
            lambda x: x.transpose(0, 1).clone(),
            lambda x: x.reshape(-1, x.shape[-1]).clone(),
            lambda x: x.flatten().clone(),
            lambda x: x[:, 0].clone(),
            lambda x: x[0:1].clone(),
            lambda x: x[1].clone(),
            lambda x: x[::2].clone(),
            lambda x: x.unsqueeze(1).clone(),
            lambda x: x.permute(2, 0, 1).reshape(len(x), -1).clone(),
            lambda x: x.unfold(1, 2, 1).clone(),
            lambda x: x.diagonal().clone(),
            lambda x: x[:1].expand(len(x), -1, -1).clone(),
        )
    ]
    made["cat"] = [Call(lambda x, y, d=d: torch.cat([x, y], d), "f3 f3", True) for d in range(-1, 3)]
    made["cat"] += [Call(lambda x, d=d: torch.cat([x[:1], x], d), "f3") for d in range(1)]
    made["cat"] += [Call(lambda x, n=n: torch.cat([x[:n], x[n:]]), "f3", True) for n in (1, 2)]
    made["cat"] += [Call(lambda x: torch.cat([x[1:], x[:1]]), "f3"), Call(lambda x: torch.cat([x[:2], x[1:]]), "f3")]
    made["stack"] = [Call(lambda x, y, d=d: torch.stack([x, y], d), "f2 f2", True) for d in range(-1, 3)]
    made["stack"] += [
        Call(lambda x: torch.stack(list(x.unbind(0))), "f2"),
        Call(lambda x: torch.stack([x[1], x[0]]), "f2"),
    ]
    made["pad"] = [Call(lambda x, p=p: F.pad(x, p), "f3", True) for p in ((1, 0), (0, 0, 1, 1), (0, 0, 0, 0, 1, 0))]
    made["repeat"] = [Call(lambda x, c=c: x.repeat(*c), "f3") for c in ((1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 1, 1, 1))]
    made["products"] = [
        Call(torch.mm, "f2 f2", True),
        Call(torch.bmm, "f3 f3", True),
        Call(torch.mv, "f2 f1", True),
        Call(torch.dot, "f1 f1"),
        Call(torch.addmm, "f2 f2 f2", True),
        Call(torch.addmm, "f1 f2 f2"),
        Call(torch.baddbmm, "f3 f3 f3"),
        Call(torch.addbmm, "f2 f3 f3"),
        Call(torch.addmv, "f1 f2 f1"),
        Call(torch.matmul, "f3 f2", True),
        Call(F.linear, "f3 f2 f1", True),
    ]
    made["cdist"] = [Call(lambda x, y: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"), r, True)
                     for r in ("f2 f2", "f3 f3", "f3 f2")]  # fmt: skip
    made["cdist"] += [Call(lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"), r, True)
                      for r in ("f2 f2", "f3 f3", "f3 f2")]  # fmt: skip
    made["rot90"] = [Call(lambda x, d=d: torch.rot90(x, 1, d), "f3", True) for d in ((0, 1), (1, 2), (-1, 1))]
    made["isin"] = [Call(torch.isin, "i2 i1"), Call(torch.isin, "i1 i2")]
    made["isin"] += [Call(lambda x: torch.isin(x, torch.arange(100, 200), assume_unique=True), "i2")]
    for split in (torch.unsafe_split, torch.unsafe_split_with_sizes, torch.split_with_sizes_copy):
        made[split.__name__] = [
            Call(lambda x, f=split, d=d: f(x, 1 if f is torch.unsafe_split else [1, x.shape[d] - 1], d), "f3")
            for d in range(3)
        ]
    made["convolution"] = [
        Call(lambda x, w, b: F.conv1d(x, w, b, padding=1), "f3 f3 f1", True),
        Call(lambda x, w: F.conv_transpose1d(x, w), "f3 f3", True),
        Call(lambda x, w: F.conv1d(x, w[:, :1], groups=len(x)), "f3 f3"),
        Call(lambda x, w: F.conv1d(x, w), "f2 f3"),
    ]
    made["norms"] = [
        Call(lambda x, w, b: F.layer_norm(x, x.shape[2:], w, b), "f3 f1 f1", True),
        Call(lambda x: F.layer_norm(x, x.shape[1:]), "f3", True),
        Call(lambda x, w: F.rms_norm(x, x.shape[2:], w), "f3 f1", True),
        Call(lambda x, w, b: F.group_norm(x, 1, w, b), "f3 f1 f1", True),
        Call(lambda x, w: F.batch_norm(x, None, None, w, None, True), "f3 f1", True),
        Call(lambda x, m, v, w: F.batch_norm(x, m, v, w, None, False), "f3 f1 f1 f1"),
        Call(lambda x: F.instance_norm(x), "f3", True),
        Call(lambda x: torch.native_group_norm(x, None, None, 1, x[0].numel(), len(x), 1, 1e-5)[0], "f3"),
        Call(lambda x: torch.native_group_norm(x, None, None, len(x), len(x), len(x), 1, 1e-5)[0], "f3"),
    ]
    made["of one image or of several"] = [Call(lambda x: torch.multinomial(x, 1), shape) for shape in ("f1", "f2")] + [
        Call(lambda x: F.channel_shuffle(torch.cat([x, x], 1), 2), "f4"),
        Call(lambda x: F.channel_shuffle(torch.cat([x, x], 0), len(x)), "f4"),
        Call(lambda x: F.channel_shuffle(x[:, None], 1), "f4"),
        Call(lambda x: F.fold(x.flatten(-2)[..., None], x.shape[-2:], x.shape[-2:]), "f3"),
        Call(lambda x: F.fold(x[0].flatten()[:, None], x.shape[1:], x.shape[1:]), "f3"),
        Call(lambda x: F.max_unpool2d(x, torch.arange(x[0].numel()).view(x[0].shape).expand(x.shape), 1), "f3"),
        Call(lambda x: F.multi_margin_loss(x[:, 0], torch.tensor(0), reduction="none"), "f2"),
        Call(lambda x: F.pixel_shuffle(x.repeat(4, 1, 1), 2), "f3"),
        Call(lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), "f4"),
        Call(lambda x: F.group_norm(x, 1), "f2"),
        Call(lambda x, w: F.conv2d(x, w), "f3 f4"),
        Call(lambda x, w: F.conv2d(x, w), "f4 f4"),
    ]
    made["renorm"] = [Call(lambda x, d=d: torch.renorm(x, 2, d, 0.1), "f3") for d in range(3)]
    made["pools"] = [
        Call(lambda x: F.max_pool1d(x, 2), "f3", True),
        Call(lambda x: F.avg_pool2d(x, 2), "f3", True),
        Call(lambda x: F.adaptive_max_pool2d(x, 1), "f3", True),
        Call(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), "f3", True),
        Call(lambda x: F.pad(x, (1, 1), mode="reflect"), "f3", True),
        Call(lambda x: F.unfold(x, 2), "f3"),
        Call(lambda x: F.unfold(x, (1, 1)), "f3"),
        Call(lambda x: torch.tril(x), "f3", True),
    ]
    made["matrices"] = [
        Call(torch.linalg.inv, "f3", True),
        Call(torch.linalg.solve, "f3 f3", True),
        Call(torch.linalg.solve, "f2 f1"),
        Call(lambda x: torch.linalg.solve(torch.eye(x.shape[1]).to(x) * 2, x), "f3", True),
        Call(lambda x: torch.linalg.solve(torch.eye(len(x)).to(x) * 2, x), "f2"),
        Call(lambda x: torch.ops.aten._linalg_solve_ex(torch.eye(x.shape[1]).to(x) * 2, x), "f3"),
        Call(torch.linalg.det, "f3", True),
        Call(torch.linalg.pinv, "f3"),
        Call(torch.linalg.eigvals, "f3"),
        Call(lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x @ x.mT + torch.eye(len(x)).to(x))), "f3", True),
        Call(torch.linalg.householder_product, "f3 f2"),
        Call(lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y), "f3 f3", True),
        Call(lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y), "f3 f2"),
        Call(lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y), "f2 f3"),
        Call(lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x))[1], "f3"),
        Call(torch.linalg.solve, "f3 f2"),
        Call(torch.linalg.det, "f3"),
        Call(lambda x, y: torch.linalg.solve_triangular(x.tril(), y, upper=False), "f3 f3"),
        Call(lambda x, y: torch.linalg.solve_triangular(x.tril(), y, upper=False), "f3 f2"),
        Call(lambda x, y: torch.linalg.solve_triangular(x[:1].tril(), y, upper=False), "f3 f3"),
        Call(lambda x, y: torch.linalg.solve_triangular(x.tril(), y[:1], upper=False), "f3 f3"),
        Call(lambda x, y: torch.linalg.solve(x, y[:1]), "f3 f3"),
    ]
    made["cross"] = [
        Call(lambda x, y, d=d: torch.linalg.cross(x, y, dim=d), "f3 f3") for d in range(3)
    ]  # of three entries only
    diagonals = [{}, {"dim1": 0, "dim2": 1}, {"dim1": 0, "dim2": 2}, {"dim1": 2, "dim2": 1}, {"offset": 1}]
    made["diagonal"] = [Call(lambda x, d=d: torch.diagonal(x, **d), "f3", True) for d in diagonals]
    made["diagonal"] += [Call(lambda x, d=d: torch.diag_embed(x, **d), "f2", True) for d in diagonals]
    made["diagonal"] += [
        Call(lambda x, y, d=d: torch.diagonal_scatter(x, y, **d), "f3 f2", True) for d in diagonals if "offset" not in d
    ]
    made["cross"] += [Call(lambda x, y: torch.linalg.cross(x[:, None], y[:1, None]), "f3 f3")]
    made["attention"] = [
        Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "f3 f3 f3", True),
        Call(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), "f3 f3", True),
        Call(lambda q, m: F.scaled_dot_product_attention(q, q, q, m[:1]), "f3 f3"),
    ]
    made["losses"] = [Call(lambda x, y, r=r: aten.mse_loss(x, y, r), "f2 f2", True) for r in range(3)]
    made["losses"] += [
        Call(lambda x, y, r=r: aten.multi_margin_loss(x, y, 1, 1, None, r), shape)
        for r in range(3)
        for shape in ("f2 i1",)
    ]
    made["losses"] += [
        Call(lambda x, y, w: F.nll_loss(x, y, w, reduction="none"), shape, True) for shape in ("f2 i1 f1", "f3 i2 f1")
    ]
    made["losses"] += [Call(lambda x, y: F.nll_loss(x, y), "f2 i1", True)]
    made["embedding"] = [Call(F.embedding, "i2 f2"), Call(torch.take, "f2 i2")]
    made["gather"] = [Call(lambda x, i, d=d: torch.gather(x, d, i), "f3 i3", True) for d in range(-1, 3)]
    made["gather"] += [Call(lambda x, i: torch.gather(x, 1, i[:1]), "f3 i3")]
    made["scatter"] = [Call(lambda x, i, y, d=d: x.scatter(d, i % 1, y), "f3 i3 f3") for d in range(3)]
    made["scatter_add"] = [Call(lambda x, i, y, d=d: x.scatter_add(d, i, y), "f2 i2 f2") for d in range(2)]
    made["index_select"] = [Call(lambda x, i, d=d: torch.index_select(x, d, i), "f3 i1", True) for d in range(3)]
    made["index_add"] = [Call(lambda x, i, y, d=d: x.index_add(d, i, y), "f2 i1 f2") for d in range(2)]
    made["index_fill"] = [Call(lambda x, i, y, d=d: x.index_fill(d, i, y[0]), "f2 i1 f1") for d in range(2)]
    made["index_reduce"] = [Call(lambda x, i, y, d=d: x.index_reduce(d, i, y, "prod"), "f2 i1 f2") for d in range(2)]
    made["index"] = [
        Call(each, shape, True)
        for each in (
            lambda x, i: x[i],
            lambda x, i: x[:, i],
            lambda x, i: x[torch.arange(len(x)), i],
            lambda x, i: x[torch.arange(len(x))[:, None], i],
            lambda x, i: x[:, torch.arange(len(x)), i],
            lambda x, i: x[i, :, i],
            lambda x, i: x[torch.arange(len(x)).add_(1).remainder_(len(x)), i],
        )
        for shape in ("f3 i1", "f3 i2")
    ]
    made["index_put"] = [
        Call(each, "f2 i1 f1")
        for each in (
            lambda x, i, y: _written(x, lambda z: z.index_put_((torch.arange(len(x)), i), y)),
            lambda x, i, y: _written(torch.zeros_like(x), lambda z: z.index_put_((torch.arange(len(x)), i), y)),
            lambda x, i, y: _written(
                torch.zeros(x.shape, dtype=x.dtype), lambda z: z.index_put_((torch.arange(len(x)), i), y)
            ),
            lambda x, i, y: _written(x, lambda z: z.index_put_((i,), y[:, None])),
            lambda x, i, y: _written(torch.zeros(x.shape, dtype=x.dtype), lambda z: z.index_put_((i,), y)),
            lambda x, i, y: _written(x, lambda z: z.index_put_((i % 1,), y)),
            lambda x, i, y: _written(x, lambda z: z.masked_fill_(y > 0.8, 0)),
            lambda x, i, y: _written(x, lambda z: z.__setitem__(y > 0.8, 0)),
            lambda x, i, y: _written(x, lambda z: z.index_put_((torch.arange(len(x)), i), y[:1])),
        )
    ]
    made["index_put"] += [
        Call(
            lambda x, y, n=n: _written(x, lambda z: z.__setitem__((slice(None), torch.tensor([0, 1])), y[:n, :2])),
            "f2 f2",
        )
        for n in (None, 1)
    ]
    made["parts"] = [Call(lambda x, y, d=d: torch.select_scatter(x, y, d, 0), "f3 f2") for d in range(3)] + [
        Call(lambda x, y, d=d: torch.slice_scatter(x, y, d), "f3 f3") for d in range(3)
    ]
    made["parts"] += [Call(lambda x: x[:, 1:] * 2, "f3", True), Call(lambda x: x.select(2, 0) * 2, "f3", True)]
    made["parts"] += [Call(lambda x, d=d: x.unfold(d, 2, 1) * 2, "f3", True) for d in range(3)]
    slices: list[Any] = [slice(1, None), (slice(None), slice(1, None)), (slice(None), slice(None), slice(1, None))]
    slices += [(slice(None), slice(0)), (slice(None), slice(None, None, 2)), (slice(None), 0), (..., 1), 1]
    made["writes to parts"] = [
        Call(lambda x, at=at: _written(torch.zeros(x.shape, dtype=x.dtype), lambda z: z.__setitem__(at, x[at])), "f3")
        for at in slices
    ]
    made["writes to parts"] += [
        Call(lambda x, y, at=at: _written(x, lambda z: z.__setitem__(at, y[at])), "f3 f3") for at in slices
    ]
    made["recurrence"] = [
        Call(lambda x, h, w, k=k, n=n: _steps(k, n, x, h, None, w)[0], "f4 f3 f3") for k, n in GATES.items()
    ]
    made["recurrence, other gates"] = [
        Call(lambda x, h, w, k=k, n=n: _steps(k, n, x, h, None, w)[0], "f4 f3 f3") for k, n in OTHER_GATES.items()
    ]
    made["recurrence"] += [
        Call(lambda x, b, w: _steps("GRU", 3, x, None, None, w, bias=b.repeat(1, 3))[0], "f4 f2 f3"),
        Call(lambda x, m, w: _steps("RNN_TANH", 1, x, None, None, w, going=m[..., :1])[0], "f4 b4 f3"),
        Call(lambda x, c, p: _steps("LSTM", 4, x, None, c, p, projection=p)[1], "f4 f3 f3"),
        Call(lambda x, h, w: _steps("RNN_TANH", 1, x, h[:, :1], None, w)[0], "f4 f3 f3"),  # nothing is broadcast
    ]
    made["recurrence, backward"] = [
        Call(lambda y, x, w, k=k, n=n: _steps_back(k, n, y, None, x, w), "f4 f4 f3") for k, n in GATES.items()
    ]
    made["recurrence, other gates"] += [
        Call(lambda y, x, w, k=k, n=n: _steps_back(k, n, y, None, x, w), "f4 f4 f3") for k, n in OTHER_GATES.items()
    ]
    made["recurrence, backward"] += [
        Call(lambda y, c, x: _steps_back("LSTM", 4, y, c, x, torch.ones_like(x[0]).fill_(0.1)), "f4 f3 f4"),
        Call(lambda y, m, w: _steps_back("GRU", 3, y, None, torch.ones_like(y), w, going=m[..., :1]), "f4 b4 f3"),
        Call(lambda y, x, p: _steps_back("LSTM", 4, y, None, x, p, projection=p), "f4 f4 f3"),
    ]
    made["recurrent layers"] = [Call(lambda x, b=b: _frozen(x.shape[-1], b)(x.float())[0], "f3") for b in (False, True)]
    made["searchsorted"] = [Call(lambda e, x: torch.searchsorted(e.sort(-1)[0], x), "f2 f2")]
    made["searchsorted"] += [Call(lambda e, x: torch.bucketize(x, e), "f1 f2")]
    return made


def _written(into: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    made = into.clone()
    write(made)
    return made


def _steps(mode: str, gates: int, x: Tensor, h: Any, c: Any, w: Tensor, **given: Any) -> list[Tensor]:
    """A recurrent layer over [steps, directions, rows, width], with as many gates as its mode has."""
    options = (given.get("bias"), given.get("projection"), given.get("going"))
    return torch.ops.vestige.recurrence(mode, torch.cat([x] * gates, -1), h, c, torch.cat([w] * gates, 1), *options)


def _steps_back(mode: str, gates: int, y: Tensor, last: Any, x: Tensor, w: Tensor, **given: Any) -> list[Tensor]:
    """What comes back, of gradients of all states and of the last cells."""
    options = (given.get("projection"), given.get("going"))
    saved = _steps(mode, gates, x, None, None, w, **given)
    found = torch.ops.vestige.recurrence_backward(mode, y, last, torch.cat([w] * gates, 1), *options, saved)
    return list(found)


@cache
def _frozen(width: int, batch_first: bool) -> torch.nn.LSTM:
    return torch.nn.LSTM(width, 2, batch_first=batch_first).requires_grad_(False)


CALLS = calls()


# --- one example is moved ---------------------------------------------------------------------------------------------


def argument(kind: str, size: int) -> Tensor:
    rank = int(kind[1])
    shape = (1, size) if kind[0] == "s" else (size,) * rank
    if kind[0] == "i":
        return torch.randint(0, size, shape)
    values = torch.rand(shape, dtype=torch.float64) + 0.2
    return values > 0.7 if kind[0] == "b" else values


def moved(tensor: Tensor, axis: int, example: int, examples: int, inner: int, like: str) -> Tensor:
    """With other entries of one example."""
    belongs = (torch.arange(tensor.shape[axis]) // inner) % examples == example
    shape = [-1 if place == axis else 1 for place in range(tensor.dim())]
    return torch.where(belongs.view(shape), argument(like, tensor.shape[-1]).view_as(tensor), tensor)


def outputs_of(call: Call, given: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    if not call.backward:
        found = call.run(*given)
        return [each for each in (found if isinstance(found, tuple | list) else (found,)) if isinstance(each, Tensor)]
    floats = [each for each in given if each.is_floating_point()]
    with torch.enable_grad():
        for each in floats:
            each.requires_grad_()
        made = call.run(*given)
        first = made[0] if isinstance(made, tuple | list) else made
        seed = torch.rand(first.shape, dtype=first.dtype)
        back = torch.autograd.grad(first, floats, seed, allow_unused=True)
    return [first.detach(), *(each for each in back if each is not None)]


def changes(one: Tensor, other: Tensor) -> Tensor:
    if one.shape != other.shape:
        return torch.ones(one.shape, dtype=torch.bool)
    if one.is_floating_point() or one.is_complex():
        return ~torch.isclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    return one != other


def wrongs(name: str, rows: list[int] | None = None, every_size: bool = False) -> Iterator[str]:
    """Entries that change with an example that they are not said to depend on. `rows` counts outputs that are rows."""
    for place, call in enumerate(CALLS[name]):
        kinds = call.arguments.split()
        for examples, size, inner in SIZES if every_size else sizes(name, len(kinds)):
            for axes in product(*([None, *range(int(kind[1]))] for kind in kinds)):
                if any(axis is not None for axis in axes):
                    problem = wrong(call, kinds, axes, examples, size, inner, rows)
                    if problem is not None:
                        yield f"{name} {place} of {kinds} along {axes}, {examples} examples of {size}: {problem}"


def sizes(name: str, arguments: int) -> tuple[tuple[int, int, int], ...]:
    """Those of every day: of many arguments there are many pairs of axes."""
    if name.startswith("recurrence"):
        return SIZES[:1]
    return SIZES[1:2] if name == "cross" or arguments > 2 else SIZES[1:]


def wrong(call: Call, kinds: list[str], axes: Any, examples: int, size: int, inner: int, rows: Any) -> str | None:
    torch.manual_seed(size + len(kinds))
    given = [argument(kind, size) for kind in kinds]
    if any(axis is not None and part.shape[axis] != size for axis, part in zip(axes, given, strict=True)):
        return None
    tracker, own = Tracker(strict=False), [part.clone() for part in given]
    for part, axis in zip(own, axes, strict=True):
        if axis is not None:
            tracker.labels.set(part, Rows(axis, inner, examples, 1))
    try:
        with tracker:
            found = outputs_of(call, own)
    except (RuntimeError, IndexError):  # not of such shapes
        return None
    labels = [tracker.labels.get(each) for each in found]
    if all(isinstance(label, Mixed) for label in labels) or tracker.reads:
        return None
    if rows is not None:
        rows.append(sum(isinstance(label, Rows) for label in labels))
    for example in {0, examples - 1}:
        changed = [
            part.clone() if axis is None else moved(part, axis, example, examples, inner, kind)
            for part, axis, kind in zip(given, axes, kinds, strict=True)
        ]
        for each, other, label in zip(found, outputs_of(call, changed), labels, strict=True):
            if not isinstance(label, Mixed) and bool((changes(each, other) & ~allowed(each, label, example)).any()):
                return f"example {example} moves what is {label}"
    return None


def allowed(tensor: Tensor, label: Rows | None, example: int) -> Tensor:
    if label is None:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    if label.axis < 0:
        return torch.full(tensor.shape, label.first == example)
    belongs = (torch.arange(tensor.shape[label.axis]) // label.inner + label.first) % label.count == example
    return belongs.view([-1 if place == label.axis else 1 for place in range(tensor.dim())]).expand(tensor.shape)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.nightly(
    "mean",
    "amax",
    "prod",
    "var",
    "std",
    "logsumexp",
    "argmax",
    "all",
    "any",
    "median",
    "linalg_vector_norm",
    "nansum",
    "aminmax",
    "count_nonzero",
    "kthvalue",
    "log_softmax",
    "cumprod",
    "cummax",
    "logcumsumexp",
    "topk",
    "flip",
    "roll",
    "fft",
    "glu",
    "pointwise",
    "masked_fill",
    "in place",
    "cat",
    "stack",
    "pad",
    "pools",
    "matrices",
    "scatter",
    "scatter_add",
    "index_add",
    "index_fill",
    "index_reduce",
    "recurrence, other gates",
)
def test_an_example_moves_only_what_is_said_to_be_its_own(name):
    rows: list[int] = []
    assert not list(wrongs(name, rows))
    assert sum(rows), "a rule that calls everything mixed says nothing"


COMPOSED = [
    Call(each, "f2 f2")
    for each in (
        lambda x, y: x.t().reshape(-1),
        lambda x, y: x.t().contiguous(),
        lambda x, y: x.t().to(torch.float32),
        lambda x, y: x.adjoint().ravel(),
        lambda x, y: torch.max(torch.ones_like(y), y),
        lambda x, y: torch.min(x, y),
        lambda x, y: F.prelu(x[:, :, None].expand(-1, -1, len(x)), y[:, 0]),
        lambda x, y: x.softmax(0),
        lambda x, y: F.linear(x, y),
        lambda x, y: torch.where(x > 0.7),
    )
]


@pytest.mark.parametrize("name", [*CALLS, "composed"])
@pytest.mark.everyday("composed")
def test_an_operator_that_autograd_does_not_take_apart_moves_no_more(name, monkeypatch):
    """In `torch.inference_mode` a `reshape` that copies, or a `max` of two tensors, is one operator."""
    monkeypatch.setitem(CALLS, "composed", COMPOSED)
    monkeypatch.setitem(CALLS, name, [call._replace(backward=False) for call in CALLS[name]])
    with torch.inference_mode():
        assert not list(wrongs(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_and_so_it_does_at_every_size(name):
    assert not list(wrongs(name, every_size=True))


def _attending(queries: Tensor, others: Tensor) -> Tensor:
    """Attention over the axis before the last, with one head."""
    return F.scaled_dot_product_attention(queries[:, None], others[:, None], others[:, None])


@pytest.mark.parametrize(
    "combine",
    [torch.add, torch.bmm, lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, y], 1), _attending],
)
def test_rows_of_two_batches_are_not_each_others(combine):
    tracker, one, other = Tracker(strict=False), torch.rand(3, 3, 3), torch.rand(3, 3, 3)
    tracker.label_rows(one, 3, 1)
    tracker.label_rows(other, 3, 2)
    with tracker:
        found = combine(one, other)
        own = combine(one, one)
    assert "rows of different batches" in str(tracker.labels.get(found))
    assert isinstance(tracker.labels.get(own), Rows)


@pytest.mark.parametrize(
    "combine",
    [
        torch.add,
        lambda one, other: torch.cat([one, other]),
        lambda one, other: torch.where(torch.tensor([True, False, True]), one, other),
        lambda one, other: one[:2].copy_(other[:2]),
    ],
)
def test_sums_over_two_batches_are_no_sum_over_one(combine):
    tracker, sums = Tracker(strict=False), []
    with tracker:
        for batch in (1, 1, 2):
            cell = SumCell([Dense(torch.rand(4, 3, 3))], 4, batch)
            sums.append(tracker.stand_in(torch.empty(0), (3, 3), Summed(cell)))
        assert isinstance(tracker.labels.get(combine(sums[0], sums[1])), Summed)
        assert isinstance(tracker.labels.get(combine(sums[0], sums[2])), Mixed)


@pytest.mark.parametrize(
    "spread",
    [
        lambda x, y: torch.addmm(y[0, 0], x[:, 0], torch.rand(3, 3)),  # as many examples as columns
        lambda x, y: torch.addmm(x[:1, 0], x[:, 0], torch.rand(3, 3)),
        lambda x, y: torch.baddbmm(y[0], x, x),
        lambda x, y: x.clone().index_put_((torch.arange(3),), y[0]),
        lambda x, y: x.clone().index_put_((torch.arange(3),), y[:1]),
        lambda x, y: _written(x, lambda z: z.__setitem__((slice(None), torch.tensor([0, 1])), y[0, :2])),
        lambda x, y: torch.linalg.solve(x, y[:1]),
        lambda x, y: torch.rand(3, 3)[(x[:, 0, 0] > 2).long(), (y[:1, 0, 0] > 2).long()],
        lambda x, y: _attending(x.movedim(0, 1), y.movedim(0, 1)),
        lambda x, y: x.gather(1, (y[:, :1, 0] > 2).long()[:1].expand(3, 3)[..., None]),
        lambda x, y: x.masked_fill(x > 0.5, y[0, 0, 0]),
    ],
)
def test_one_example_is_not_spread_over_the_others(spread):
    tracker, x, y = Tracker(strict=False), torch.rand(3, 3, 3), torch.rand(3, 3, 3)
    for each in (x, y):
        tracker.label_rows(each, 3, 1)
    with tracker:
        found = spread(x, y)
    assert isinstance(tracker.labels.get(found), Mixed)


@pytest.mark.parametrize(
    ("parts", "own"),
    [
        (lambda x: [x[:2], x[2:]], True),
        (lambda x: x.split(2), True),
        (lambda x: [x[:2], x[2:3], x[3:]], True),
        (lambda x: [x[2:], x[:2]], False),
        (lambda x: [x[:3], x[2:]], False),
        (lambda x: [x[:2], x[3:]], False),
    ],
)
def test_parts_of_a_batch_in_their_order_are_the_batch(parts, own):
    tracker, x = Tracker(strict=False), torch.rand(5, 3)
    tracker.label_rows(x, 5, 1)
    with tracker:
        found = torch.cat([part * 2 for part in parts(x)])
    label = tracker.labels.get(found)
    assert label == Rows(0, 1, 5, 1) if own else isinstance(label, Mixed)


# --- and the measure sees a rule that says too little -----------------------------------------------------------------

LOOSE: dict[str, tuple[str, Callable[[Op], Any]]] = {
    "sum": ("sum", lambda op: op.label("self")),
    "softmax": ("_softmax", lambda op: op.label("self")),
    "cat": ("cat", lambda op: next(filter(None, map(op.tracker.labels.get, op["tensors"])), None)),
    "products": ("mm", lambda op: op.label("self") or op.label("mat2")),
    "gather": ("gather", lambda op: op.label("self") or op.label("index")),
    "index_select": ("index_select", lambda op: op.label("self") or op.label("index")),
    "cross": ("linalg_cross", lambda op: op.label("self")),
    "roll": ("roll", lambda op: op.label("self")),
    "norms": ("native_layer_norm", lambda op: [op.label("input")] * 3),
    "convolution": ("convolution", lambda op: op.label("input")),
    "matrices": ("linalg_inv_ex", lambda op: [op.label("A"), None]),
    "embedding": ("embedding", lambda op: op.label("indices")),
    "index_add": ("index_add", lambda op: op.label("self")),
    "recurrence": ("recurrence", lambda op: op.label("entering")),
    "recurrence, backward": ("recurrence_backward", lambda op: _at_rows(op, op.label("signal"))),
}


def _at_rows(op: Op, label: Rows | None) -> list[Rows | None]:
    return [None if label is None else label.at(each.dim() - 2) for each in op.found]


@pytest.mark.parametrize("name", LOOSE)
def test_a_rule_that_says_too_little_is_seen(name, monkeypatch):
    operator, labeller = LOOSE[name]
    monkeypatch.setitem(operator_rules._BY_NAME, operator, ruled(labeller))
    monkeypatch.setattr(example_axis, "_RULES", {})
    assert next(wrongs(name), None) is not None


def test_an_operator_that_is_not_listed_is_never_taken_to_be_harmless():
    tracker, x = Tracker(strict=False), torch.rand(3, 4)
    tracker.label_rows(x, 3, 1)
    with tracker:
        found = torch.addbmm(torch.zeros(4, 4), x[:, :, None], x[:, None, :])
    label = tracker.labels.get(found)
    assert isinstance(label, Mixed)
    assert label.unknown
    assert "test_operator_rules.py" in label.where


PLACES = {
    "backwards": (lambda row, entry: 3 * row + 2 - entry, Rows(0, 3, 4, 1)),
    "one upon the other": (lambda row, entry: 3 * row + 0 * entry, Rows(0, 3, 4, 1)),
    "entries first": (lambda row, entry: 4 * entry + row, Rows(0, 1, 4, 1)),
    "shifted": (lambda row, entry: (3 * row + entry + 1) % 12, None),
    "one in another's": (lambda row, entry: torch.where((row == 3) & (entry == 2), 0, 3 * row + entry), None),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_public_index_may_lead_each_row_to_a_part_of_its_own(name):
    """As where windows that overlap are added up in the memory that they are of."""
    tracker, flat = Tracker(Labels()), torch.ones(12)
    tracker.labels.set(flat, Rows(0, 3, 4, 1))
    places, expected = PLACES[name]
    index = places(torch.arange(4)[:, None], torch.arange(3)).flatten()
    with tracker:
        found = tracker.labels.get(torch.zeros(12).index_add_(0, index, flat))
    assert isinstance(found, Mixed) if expected is None else found == expected
