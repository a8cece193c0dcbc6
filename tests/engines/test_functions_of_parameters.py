"""Is each example's gradient right through any function of parameters? Random ones, against autograd of each example.

What reaches a function of parameters on the way back is a sum over the examples, of which each one's part is known; what
its operators make of that sum is each one's part again, also through views that are written to.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.engines.bookkeeping import BookKeeping
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

EXAMPLES, LARGEST = 5, 3000


def with_an_entry(x: Tensor, y: Tensor) -> Tensor:
    found = x.clone()
    found[..., 0] = y.flatten()[0]
    return found


def changed_through_views(x: Tensor, y: Tensor) -> Tensor:
    found = x.clone()
    found[1:].mul_(2.0)
    found.view(-1)[:3].zero_()
    return found


def filled_in_parts(x: Tensor, y: Tensor) -> Tensor:
    found = x.new_zeros(4, 4)
    found[:, :2] = x.reshape(-1)[:8].view(4, 2)
    found[0] += y.flatten()[:4]
    return found


def changed_across(x: Tensor, y: Tensor) -> Tensor:
    found = x * 1.0
    found.mT.add_(y.mean())
    found.diagonal(dim1=-2, dim2=-1).mul_(3.0)
    return found


def put(x: Tensor, y: Tensor) -> Tensor:
    found = x.new_zeros(6, *x.shape[1:])
    return found.index_put_((torch.tensor([0, 2, 2, 5][: len(x)]),), x[:4], accumulate=True)[:4]


class OfParameters(nn.Module):
    """A weight that is made of parameters by operators that its seed draws; square ones, so that no shape tells rows from
    columns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, generator = seed, torch.Generator().manual_seed(seed)
        shapes = ((4, 4), (4, 4), (4,), (4, 1), (2, 4, 4), (4, 4, 3))
        self.own = nn.ParameterList([nn.Parameter(torch.rand(shape, generator=generator) - 0.5) for shape in shapes])
        self.register_buffer("fixed", torch.rand(4, 4, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        draw, pool = random.Random(self.seed), [*self.own, self.fixed]
        given = len(pool)
        for _ in range(draw.randrange(3, 9)):
            one, other = draw.choice(pool[-6:] + pool[:3]), draw.choice(pool)
            made = self.made(draw, one, other)
            try:
                found = made[draw.randrange(len(made))](one)
            except (RuntimeError, IndexError, ValueError, TypeError):  # torch's, about shapes
                continue
            if found.is_floating_point() and 0 < found.numel() < LARGEST and found.dim() < 6:
                pool.append(found)
        output = torch.zeros(())
        for weight in [each for each in pool[given:][-3:] if each.requires_grad] or [self.own[0]]:
            flat = weight.reshape(-1)
            if len(flat) >= 16:
                output = output + torch.tanh(F.linear(x, flat[:16].view(4, 4)))
            else:
                output = output + x * flat.mean() + x @ F.pad(flat, (0, 16 - len(flat))).view(4, 4).mT
            if weight.dim() == 3 and weight.shape[1] == 4 and weight.shape[2] <= 5:
                output = output + F.conv1d(x[:, :, None].expand(-1, -1, 5), weight).mean((1, 2))[:, None]
        return output

    def made(self, draw: random.Random, one: Tensor, y: Tensor) -> list[Callable[[Tensor], Tensor]]:
        d, e, at = draw.randrange(max(1, one.dim())), draw.randrange(max(1, one.dim())), draw.random()
        vector, kernel, square, some = self.own[2], self.own[5], self.fixed, torch.tensor([1, 0, 1])
        return [
            *(lambda x, f=f: f(x, y) for f in (torch.add, torch.mul, torch.matmul, torch.rsub, torch.outer, F.linear)),
            *(lambda x, f=f: f(x, y) for f in (with_an_entry, changed_through_views, filled_in_parts, changed_across)),
            *(lambda x, f=f: f(x, d) for f in (torch.sum, torch.cumsum, torch.softmax, F.glu, torch.prod)),
            *(torch.tanh, torch.neg, torch.exp, torch.sum, torch.triu, torch.squeeze, torch.flatten, torch.diag_embed),
            lambda x: put(x, y),
            lambda x: x / (x.norm(dim=d, keepdim=True) + 0.1),
            lambda x: x - x.mean(dim=d, keepdim=True),
            lambda x: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 0.1) * self.own[3],
            lambda x: F.batch_norm(x[None], None, None, y[:, 0], training=True)[0],
            lambda x: x.var(dim=d, keepdim=True) * y,
            lambda x: x * x.std(),
            lambda x: F.normalize(x, dim=d),
            lambda x: x.renorm(2, 0, 0.3),
            lambda x: F.layer_norm(x, x.shape[-1:], vector),
            lambda x: x.transpose(d, e),
            lambda x: x.movedim(d, e).contiguous(),
            lambda x: x.flip(d).roll(1, e),
            lambda x: x.select(d, int(at * x.shape[d])),
            lambda x: x.narrow(d, 1, x.shape[d] - 1),
            lambda x: x.chunk(2, d)[1],
            lambda x: x.unbind(d)[0],
            lambda x: x.expand(3, *x.shape),
            lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
            lambda x: x.reshape(2, -1),
            lambda x: x.reshape(-1, 4)[:4],
            lambda x: x.diagonal(dim1=-2, dim2=-1),
            lambda x: torch.cat([x, y], d),
            lambda x: torch.stack([x, y], d),
            lambda x: torch.where(square > 0, x, y),
            lambda x: x.masked_fill(square > 0, 0.0),
            lambda x: x.clamp(min=-0.2),
            lambda x: x[:, torch.tensor([1, 0, 3])],
            lambda x: x[some],
            lambda x: x.index_select(d, some),
            lambda x: x.gather(d, torch.zeros_like(x, dtype=torch.long)),
            lambda x: x.sort(d)[0],
            lambda x: F.embedding(torch.tensor([[0, 1], [3, 1]]), x),
            lambda x: F.pad(x, (1, 2)),
            lambda x: F.conv1d(x[None], kernel),
            lambda x: torch.einsum("ij,kj->ik", x, y),
            lambda x: torch.baddbmm(x, self.own[4], self.own[4]),
            lambda x: torch.addmm(square, x, y),
            lambda x: torch.fft.fft(x).real + torch.fft.fft(y).imag,
            lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y).conj(), n=x.shape[-1]),
            lambda x: torch.linalg.solve(square + 3 * torch.eye(4), x),
            lambda x: torch.linalg.inv(x @ x.mT + torch.eye(4)),
            lambda x: x.double().to(square.dtype),
            lambda x: x.detach() * y,
        ]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def of_each_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Each example's gradient, by autograd of its own loss."""
    parameters, rows = list(model.parameters()), []
    for each in loss(model(x), y):
        found = torch.autograd.grad(each, parameters, retain_graph=True, allow_unused=True)
        own = (torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))
        rows.append(torch.cat([one.flatten() for one in own]))
    return torch.stack(rows).double()


def near(found: Tensor, norms: Tensor) -> bool:
    return bool(((found - norms).abs() <= 2e-3 * norms.clamp(min=1e-3 * float(norms.max()))).all())


def outcome(seed: int) -> str:
    model, generator = OfParameters(seed), torch.Generator().manual_seed(seed + 10**6)
    x, y = (torch.randn(EXAMPLES, 4, generator=generator) for _ in range(2))
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    alone = of_each_alone(model, x, y)
    norms = alone.norm(dim=1)
    if not norms.isfinite().all() or not 0 < norms.max() < 1e4:
        return "none"
    bound = 0.7 * float(norms.median()) + 1e-9
    want = (alone * (bound / norms.clamp(min=bound))[:, None]).sum(0)
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = engine([x, y], {name: p.detach() for name, p in parameters.items()}, Flat(bound), into)[:, 0]
    if engine._left:
        return "one by one"
    off = (into.double() - want).norm() <= 2e-3 * max(float(want.norm()), 1e-6 * float(norms.max()))
    if near(got, norms) and off:
        return "right"
    exact = of_each_alone(model.double(), x.double(), y.double()).norm(dim=1)
    return f"wrong: {seed}" if near(norms, exact) else "none"  # all of it cancels: float32 knows no gradient


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(80, 6000), marks=pytest.mark.slow)], ids=len)
def test_functions_of_parameters(seeds):
    outcomes = Counter(map(outcome, seeds))
    assert not [each for each in outcomes if each.startswith("wrong")], outcomes
    assert outcomes["right"] > 0.7 * len(seeds), outcomes
    assert outcomes["one by one"] < 0.05 * len(seeds), outcomes


class Clipped(torch.autograd.Function):
    """A backward pass that is not linear in what comes back."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class Penalised(torch.autograd.Function):
    """One that adds something public."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * ctx.saved_tensors[0]


class Counted(torch.autograd.Function):
    """One that looks at what comes back."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2.0 if float(gradient.sum()) > 0 else 1.0)


@pytest.mark.parametrize("function", [Clipped, Penalised, Counted])
def test_what_is_not_linear_in_a_sum_is_left_to_one_example_at_a_time(function):
    """Of the gradient of one example each of them is that example's."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, function.apply(self.weight))

    model = Through()
    x, y = torch.randn(EXAMPLES, 4), torch.randn(EXAMPLES, 3)
    layout = Layout.of(model)
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size)
    with pytest.warns(UserWarning, match="not linear in a sum over the batch|looks at a value of the examples"):
        engine([x, y], {"weight": model.weight.detach()}, Flat(1e6), into)
    rows = [
        torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), model.weight)[0] for i in range(EXAMPLES)
    ]
    torch.testing.assert_close(into.view(3, 4), torch.stack(rows).sum(0), rtol=1e-4, atol=1e-5)


LOWER = torch.ones(4, 4).tril(-1) > 0


def into_places(weight: Tensor) -> Tensor:
    found = torch.zeros(4, 4)
    found[LOWER] = weight.flatten()[:6]
    return found + found.mT


class Made(nn.Module):
    """A layer whose weight a function makes of a parameter, before another one."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: float = 0.5) -> None:
        super().__init__()
        self.function, generator = function, torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(scale * torch.randn(4, 4, generator=generator))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) @ self.function(self.weight)))


def clipped_sum_and_engine(model: nn.Module) -> tuple[Tensor, Tensor, BookKeeping]:
    """One example at a time, and what the engine says; with the engine."""
    x, y = torch.randn(EXAMPLES, 4), torch.randn(EXAMPLES, 4)
    layout = Layout.of(model)
    alone = of_each_alone(model, x, y)
    norms = alone.norm(dim=1)
    bound = 0.7 * float(norms.median())
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size)
    engine([x, y], {name: p.detach() for name, p in layout.parameters(model).items()}, Flat(bound), into)
    return (alone * (bound / norms.clamp(min=bound))[:, None]).sum(0), into.double(), engine


@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0])
@pytest.mark.parametrize(
    "function",
    [
        torch.matrix_exp, torch.linalg.matrix_exp, Tensor.matrix_exp, lambda w: torch.matrix_exp(w - w.mT),
        lambda w: torch.linalg.cross(w[:, :3], w[:3].mT) @ w[:3],
        lambda w: F.pad(w[LOWER], (0, 10)).view(4, 4), lambda w: F.pad(w[:, LOWER[3]], (0, 1)), lambda w: into_places(w),
    ],
    ids=["matrix_exp", "of linalg", "of tensors", "orthogonal", "cross", "by mask", "columns by mask", "into a mask"],
)  # fmt: skip
def test_functions_that_random_programs_do_not_draw(function, scale):
    want, found, engine = clipped_sum_and_engine(Made(function, scale))
    assert not engine._left
    assert (found - want).norm() <= 1e-4 * want.norm()


def test_what_a_backward_pass_has_not_come_to_is_not_taken_for_something_that_a_model_keeps():
    """Autograd leaves it in a queue where the pass fails: the layer before the function waits then."""
    with pytest.warns(UserWarning, match="looks at a value of the examples"):
        want, found, _ = clipped_sum_and_engine(Made(Counted.apply))
    assert (found - want).norm() <= 1e-4 * want.norm()
