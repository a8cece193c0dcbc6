"""Is the gradient of a standardised weight pulled back as autograd does it, by the short way where there is one?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp
from torch.utils._python_dispatch import TorchDispatchMode

from engine_checks import silent, targets
from other_models import nothing_replayed
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.per_example import uses
from vestige.engines.per_example.gradient_forms import Dense
from vestige.engines.per_example.parameter_functions import Derived
from vestige.engines.per_example.standardised import PulledBack, WayBack, standardised
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

EACH = (1, 2, 3)


def centred(weight: Tensor, gain: Tensor) -> Tensor:
    return weight - weight.mean(dim=EACH, keepdim=True)


def only_a_gain(weight: Tensor, gain: Tensor) -> Tensor:
    return gain.view(-1, 1, 1, 1) * weight


def weight_norm(weight: Tensor, gain: Tensor) -> Tensor:
    return weight / torch.linalg.vector_norm(weight, dim=EACH, keepdim=True) * gain[:, None, None, None]


def by_hand(weight: Tensor, gain: Tensor) -> Tensor:
    """Every operation by itself, and the weight inside a scale once more."""
    inside = weight - weight.mean(dim=EACH, keepdim=True)
    spread = (inside**2).mean(dim=EACH, keepdim=True)
    return (gain[:, None, None, None] * inside / torch.sqrt(spread + 1e-3)) ** 3 + weight


def over_all(weight: Tensor, gain: Tensor) -> Tensor:
    """A scale that all filters share."""
    return weight / weight.norm() * gain[:, None, None, None]


def over_inputs(weight: Tensor, gain: Tensor) -> Tensor:
    """A mean over the filters: the wrong axis."""
    return weight - weight.mean(dim=0, keepdim=True)


def neighbours(weight: Tensor, gain: Tensor) -> Tensor:
    """Each filter is scaled by another one's spread."""
    return weight * weight.std(dim=EACH, keepdim=True).flip(0)


SHORT, LONG = [centred, only_a_gain, weight_norm, by_hand], [over_all, over_inputs, neighbours]


class Made(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(0.5 + torch.rand(6))
        self.make, self.head = make, nn.Linear(6, 2)

    def forward(self, input: Tensor) -> Tensor:
        images = F.conv2d(input, self.make(self.weight, self.gain), padding=1)
        return self.head(torch.tanh(images).mean(dim=(2, 3)))


@pytest.mark.parametrize("make", [*SHORT, *LONG])
def test_weights_of_every_make(make, monkeypatch):
    torch.manual_seed(31)
    shortened: list[bool] = []

    def seen(given: Derived) -> Derived:
        made = standardised(given)
        shortened.append(made is not given)
        return made

    monkeypatch.setattr(uses, "standardised", seen)
    silent(Made(make), (torch.randn(4, 2, 5, 5), targets(4)), shift=True)
    assert shortened[-1] == (make in SHORT)


def by_batch_norm(weight: Tensor, gain: Tensor) -> Tensor:
    """As timm and transformers have it: the filters are the channels of one example."""
    flat = weight.reshape(1, len(weight), -1)
    return F.batch_norm(flat, None, None, weight=0.5 * gain, training=True, eps=1e-3).reshape_as(weight)


def in_single_operations(weight: Tensor, gain: Tensor) -> Tensor:
    variance, mean = torch.var_mean(weight, dim=EACH, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(variance + 1e-3) * (0.5 * gain).view(-1, 1, 1, 1)


def gained_by_a_neighbour(weight: Tensor, gain: Tensor) -> Tensor:
    """Batch norm, with gains that are other filters' spreads: not filter by filter."""
    flat = weight.reshape(1, len(weight), -1)
    gain = gain * flat[0].std(dim=1).flip(0)
    return F.batch_norm(flat, None, None, weight=gain, training=True, eps=1e-3).view_as(weight)


def test_gains_that_are_made_of_the_weight_take_the_long_way():
    torch.manual_seed(35)
    silent(Made(gained_by_a_neighbour), (torch.randn(4, 2, 5, 5), targets(4)), shift=True)


def test_batch_norm_of_a_weight_is_taken_in_single_operations():
    batch, found = (torch.randn(4, 2, 5, 5), targets(4)), []
    for make in (by_batch_norm, in_single_operations):
        torch.manual_seed(34)
        model = Made(make)
        layout = Layout.of(model)
        parameters = {name: parameter.detach() for name, parameter in layout.parameters(model).items()}
        with nothing_replayed():
            silent(model, batch, shift=True)
            norms = BookKeeping(model, F.cross_entropy, layout)(
                batch, parameters, Flat(0.1), into := torch.zeros(layout.size)
            )
        found.append((norms, into))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)


def test_a_linear_weight_and_one_used_twice():
    torch.manual_seed(32)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gain = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4, 1))

        def forward(self, input: Tensor) -> Tensor:
            weight = (self.weight - self.weight.mean(dim=1, keepdim=True)) * (2 * self.gain)
            return F.linear(torch.tanh(F.linear(input, weight)), weight)

    silent(Twice(), (torch.randn(5, 4), targets(5, 4)))
    silent(Twice(), (torch.randn(5, 3, 4), torch.randn(5, 3, 4)))


class Written(TorchDispatchMode):
    """Counts operations that write as many numbers as this, or more."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() >= self.numbers and not function.is_view:
            self.count += 1
        return result


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 1, 3, 4, 2)])
@pytest.mark.parametrize("share", [1.0, 0.1, 1e-3, 0.0])
def test_norms_and_sums_of_what_is_pulled_back(order, share):
    """Against autograd in float64, also where nearly all of a gradient is projected away, and however it lies."""
    torch.manual_seed(34)
    weight = torch.randn(8, 3, 3, 3)

    def used(w: Tensor) -> Tensor:
        spread, middle = torch.var_mean(w, dim=EACH, keepdim=True)
        return (w - middle) * (spread + 1e-4).rsqrt()

    value = share * torch.randn(5, 8, 3, 3, 3) + used(weight) * torch.randn(5, 8, 1, 1, 1) + torch.randn(5, 8, 1, 1, 1)
    back = vjp(used, weight.double())[1]
    want = torch.stack([back(each)[0] for each in value.double()])
    laid = value.permute(order).contiguous().permute([order.index(axis) for axis in range(5)])
    spread, middle = torch.var_mean(weight, dim=EACH, keepdim=True)
    scale, apart, ones = (spread + 1e-4).rsqrt(), weight - middle, torch.ones_like(weight)
    moves = (ones / 27, -(scale**3) * apart / 26)  # of the mean and of the scale, by hand
    way = WayBack(scale * ones, (-scale * ones, apart), moves)
    found = PulledBack(Dense(laid), way.products(laid), way)
    torch.testing.assert_close(found.dense().double(), want, rtol=1e-3, atol=2e-6)
    exact, unit = want.flatten(1).norm(dim=1), torch.finfo(torch.float32).eps
    norms = found.norms(unit)
    assert (norms >= exact * (1 - 1e-5)).all()
    if share >= 0.1:
        torch.testing.assert_close(norms.double(), exact, rtol=3e-2 if share < 1 else 1e-5, atol=0.0)
    factors, total = torch.rand(5), torch.zeros(8, 3, 3, 3)
    found.add(total, factors)
    torch.testing.assert_close(total.double(), torch.einsum("n,n...->...", factors.double(), want), rtol=0, atol=5e-6)


class Bright(nn.Conv2d):
    """Standardised, summed up: the loss is linear in the weight that is convolved with."""

    def forward(self, input: Tensor) -> Tensor:
        spread, middle = torch.var_mean(self.weight, dim=EACH, keepdim=True, correction=0)
        images = F.conv2d(input, (self.weight - middle) / torch.sqrt(spread + 1e-4))
        return images.mean(dim=(2, 3)) @ torch.tensor([1.0, -0.5, 0.3, 0.8])


@pytest.mark.parametrize("scale", [1.0, 1e15, 1e18, 1e19])
@pytest.mark.parametrize("apart", [1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("seed", [0, 2])
def test_an_example_that_is_projected_away_stays_within_its_bound(scale, apart, seed):
    """Images of nearly one colour, some so bright that the squares of their gradients overflow float32."""
    torch.manual_seed(seed)
    model = Bright(3, 4, 3, bias=False)
    layout = Layout.of(model)
    batch = scale * (1 + apart * torch.randn(1, 3, 7, 7)), torch.zeros(1)
    engine, into = BookKeeping(model, lambda output, target: output - target, layout), torch.zeros(layout.size)
    norms = engine(batch, layout.parameters(model), Flat(0.5e-6 * min(scale, 1e6)), into)
    assert norms.isfinite().all()
    assert 0 < into.double().norm() <= 0.5e-6 * min(scale, 1e6) * (1 + 1e-4)
