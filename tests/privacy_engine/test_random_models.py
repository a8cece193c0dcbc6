"""Is the clipped sum right for models that nobody wrote by hand? Random forward passes against one example at a time.

A model draws its operators from its seed: what is made of parameters alone, of examples and of both is used again, in
any order. A loop refuses it, or its step is that of each example's own gradient, clipped and summed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import clip_and_sum
from loops import BOUND, flat, moved, plain, private, unwatched

WIDTH, LARGEST = 4, 4000


class NoRows(Exception):
    """The program of a model has no output with a row for each example."""


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, generator = seed, torch.Generator().manual_seed(seed)
        self.w, self.b, self.e, self.c = (
            nn.Parameter(torch.rand(shape, generator=generator) - 0.5)
            for shape in ((WIDTH, WIDTH), (WIDTH,), (6, WIDTH), (WIDTH, WIDTH, 3))
        )
        self.register_buffer("fixed", torch.rand(WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        draw, rows = random.Random(self.seed), len(x)
        pool = [x, x, self.w, self.b, self.e, self.fixed]
        given = len(pool)
        for _ in range(draw.randrange(3, 10)):
            made = self.made(draw, rows, draw.choice(pool), draw.choice(pool))
            place, kind = draw.random(), draw.randrange(len(made))
            try:
                found = made[kind](place)
            except (RuntimeError, IndexError, ValueError) as problem:
                if type(problem) not in (RuntimeError, IndexError, ValueError):
                    raise  # it is not torch's about shapes
                if "private" in str(problem):
                    raise
                continue
            if found.numel() < LARGEST and found.dim() < 6:
                pool.append(found)
        outputs = [each for each in pool[given:] if each.dim() and len(each) == rows]
        if not outputs:
            raise NoRows
        return torch.stack([each.reshape(rows, -1).mean(1) for each in outputs[-2:]] + [0 * x.flatten(1).sum(1)]).sum(0)

    def made(self, draw: random.Random, rows: int, x: Tensor, y: Tensor) -> list[Callable[[float], Tensor]]:
        d = draw.randrange(max(1, x.dim()))
        other, three = draw.randrange(max(1, x.dim())), x.dim() == y.dim() == 3

        def shifted(_: float) -> Tensor:
            found = x.clone()
            found[..., 1:] = y[..., :-1]
            return found

        def column(at: float) -> Tensor:
            found = torch.zeros(rows, WIDTH)
            found[:, int(at * WIDTH)] = x[:, 0]
            return found

        def table(at: float) -> Tensor:
            return F.embedding((x.detach().abs() * 5).long().clamp(max=5), self.e)

        return [
            lambda _: F.linear(x, self.w, self.b),
            lambda _: x @ self.w,
            lambda _: x + y,
            lambda _: x * y,
            lambda _: x @ y.transpose(-1, -2),
            lambda _: F.layer_norm(x, x.shape[-1:], self.b, self.fixed),
            lambda _: F.group_norm(x, 2, self.b) if x.dim() > 1 else F.rms_norm(x, x.shape[-1:], self.b),
            table,
            lambda _: x.softmax(d),
            lambda _: x.transpose(d, other),
            lambda _: x.flatten(min(d, other), max(d, other)),
            lambda _: x.sum(d),
            lambda _: x.cumsum(d),
            lambda _: torch.tanh(x),
            lambda _: F.conv1d(x if x.dim() == 3 else x.unsqueeze(0), self.c, padding=1),
            lambda _: x.unsqueeze(d),
            lambda _: x.expand(rows, *x.shape) if x.dim() < 3 else x.mean(d),
            lambda _: torch.cat([x, y], d),
            lambda _: torch.stack([x, y], d),
            shifted,
            column,
            lambda _: torch.einsum("...i,ij->...j", x, self.w),
            lambda _: x.flip(d),
            lambda _: x.roll(1, d),
            lambda at: x.select(d, int(at * x.shape[d])),
            lambda _: x.narrow(d, 1, x.shape[d] - 1),
            lambda _: F.scaled_dot_product_attention(x, y, x),
            lambda _: torch.where(y > 0, x, y),
            lambda _: x.reshape(-1, WIDTH),
            lambda _: x.reshape(rows, -1),
            lambda _: x.reshape(rows, -1, WIDTH),
            lambda _: torch.bmm(x, y) if three else x * 2,
            lambda _: x.repeat(2, *[1] * (x.dim() - 1)),
            lambda _: self.e[1:3] + x.mean(-1, keepdim=True),
            lambda _: F.linear(F.linear(self.b, self.w), self.w) + x,
            lambda _: x / (x.norm(dim=d, keepdim=True) + 1e-3),
            lambda _: self.w[(x.detach().abs() * 3).long().clamp(max=3)[..., 0]],
            lambda _: x @ F.normalize(self.w, dim=d % 2),
        ]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


@unwatched()
def clipped(model: nn.Module, x: Tensor, y: Tensor):
    """The clipped sum of the gradients of rows."""
    outputs, parameters, rows = model(x), list(model.parameters()), []
    if not outputs.requires_grad:
        return np.zeros(flat(model).shape)
    for row in range(len(x)):
        found = torch.autograd.grad((outputs[row] - y[row]).square(), parameters, retain_graph=True, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        rows.append(torch.cat([g.ravel() for g in grads]))
    return clip_and_sum(torch.stack(rows).double().numpy(), BOUND)


@unwatched()
def depends_on_others(model: nn.Module, x: Tensor) -> bool:
    """Whether an output of the model is about rows other than its own."""
    before = model(x)
    for row in range(len(x)):
        other = x.clone()
        other[row] += 0.37
        changed = (model(other) - before).abs() > 1e-5 * before.abs().clamp(min=1)
        changed[row] = False
        if changed.any():
            return True
    return False


def outcome(seed: int) -> str:
    draw, generator = random.Random(seed + 99), torch.Generator().manual_seed(seed)
    shape = (draw.choice([1, 2, 3, 4, 6]), WIDTH) if draw.random() < 0.7 else (WIDTH,)
    data = torch.rand(24, *shape, generator=generator) - 0.3, torch.rand(24, generator=generator)
    model = RandomModel(seed)
    try:
        found = torch.autograd.grad(loss(model, data[0][:5], data[1][:5]), list(model.parameters()), allow_unused=True)
    except (NoRows, RuntimeError):  # not a model
        return "none"
    if all(each is None for each in found):
        return "none"
    own = plain(model)
    steps, model, optimizer, loader = private(model, data, batch=6)
    x, y = next(iter(loader))
    if len(x) == 2 and torch.equal(x[0], x[1]):  # one example and a blank row
        return "none"
    before = flat(model)
    try:
        outputs = loss(model, x, y)
        if not outputs.requires_grad:  # with so many rows the program goes another way
            return "none"
        outputs.backward()
        optimizer.step()
    except (ValueError, NoRows, TypeError):
        return "refused"
    got = moved(before, flat(model), 6)
    want = clipped(own, x, y)
    near = abs(got - want).max() < 1e-2 * max(abs(want).max(), 1e-2)
    return "right" if near and not depends_on_others(own, x) else f"wrong: {seed}"


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)], ids=len)
def test_a_random_model_is_refused_or_its_step_is_right(seeds):
    outcomes = Counter(map(outcome, seeds))
    assert not [each for each in outcomes if each.startswith("wrong")]
    assert outcomes["right"] > 0.15 * len(seeds)
