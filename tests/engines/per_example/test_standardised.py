"""Is the gradient of a standardised weight what autograd makes of it, as a map of each filter where it is one?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp

from engine_checks import silent, targets
from other_models import nothing_replayed
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis import tracked_model
from vestige.engines.example_axis.labels import Labels, Tracker
from vestige.engines.example_axis.tracked_model import EVERYWHERE
from vestige.engines.per_example.filter_maps import FilterMap
from vestige.engines.per_example.gradient_forms import Dense
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat
from vestige.mechanism.gradient_transforms import terms_of
from vestige.tasks.models import StandardisedConv2d

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


SHORT, LONG = [only_a_gain, weight_norm, by_hand], [centred, over_all, over_inputs, neighbours]


class Made(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(6, 2, 3, 3)), nn.Parameter(0.5 + torch.rand(6))
        self.make, self.head = make, nn.Linear(6, 2)

    def forward(self, input: Tensor) -> Tensor:
        images = F.conv2d(input, self.make(self.weight, self.gain), padding=1)
        return self.head(torch.tanh(images).mean(dim=(2, 3)))


@pytest.mark.parametrize("make", [*SHORT, *LONG])
def test_weights_of_every_make(make):
    torch.manual_seed(31)
    model, batch = Made(make), (torch.randn(4, 2, 5, 5), targets(4))
    silent(model, batch, shift=True)
    layout = Layout.of(model)
    terms = terms_of(None, {name: p.detach() for name, p in layout.parameters(model).items()}, batch)
    forms = BookKeeping(model, F.cross_entropy, layout).gradients_of(terms[0])["weight"]
    assert any(isinstance(form, FilterMap) for form in forms) or make not in SHORT
    assert len(forms) == 1 or make not in SHORT


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
    downs, ups = ([each.flatten(1) for each in some] for some in ((-scale * ones, apart), moves))
    found = FilterMap(Dense(laid), (scale.view(8, 1),), tuple(downs), tuple(ups), 8, (8, 3, 3, 3))
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


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_standardised_weight_stays_one_map_of_its_filters(kernel, monkeypatch):
    """Gradients as large as all examples' weights are read for norms and sums, and never copied or added up."""
    torch.manual_seed(1)
    model = nn.Sequential(StandardisedConv2d(8, 8, kernel), nn.Flatten(), nn.Linear(8 * 36, 2))
    kinds = []
    combine = tracked_model.combine
    monkeypatch.setattr(
        tracked_model, "combine", lambda uses: kinds.append([type(each) for each in uses]) or combine(uses)
    )
    layout = Layout.of(model)
    engine = BookKeeping(model, F.cross_entropy, layout)
    engine([torch.randn(5, 8, 6, 6), targets(5, 2)], layout.parameters(model), Flat(0.1), torch.zeros(layout.size))
    assert [FilterMap] in kinds
    assert not any(len(each) > 1 for each in kinds)


def test_what_is_zero_is_known_without_looking(monkeypatch):
    """While a pass is captured nobody can look."""
    torch.manual_seed(1)
    model = nn.Sequential(StandardisedConv2d(3, 8, 3), Biased(), nn.Flatten(), nn.Linear(8 * 36, 2))
    layout = Layout.of(model)
    zero, any_of, asked, looked = Labels.zero, Tensor.any, [], []

    def noted(labels, value):
        asked.append(value)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "any", lambda tensor: looked.append(tensor) or any_of(tensor))
            return zero(labels, value)

    monkeypatch.setattr(Labels, "zero", noted)
    engine = BookKeeping(model, F.cross_entropy, layout)
    engine([torch.randn(5, 3, 6, 6), targets(5, 2)], layout.parameters(model), Flat(0.1), torch.zeros(layout.size))
    assert any(isinstance(value, Tensor) for value in asked)
    assert not looked


@pytest.mark.parametrize("write", ["add_", "in place", "through a view", "out"])
def test_what_was_written_to_is_not_known_to_be_zero(write):
    tracker = Tracker()
    tracker.spans = [EVERYWHERE]
    with tracker:
        zeros = torch.zeros(4)
        assert tracker.labels.zeros
        if write == "add_":
            zeros.add_(1)
        elif write == "in place":
            zeros[1] = 2.0
        elif write == "through a view":
            zeros.view(2, 2)[0].fill_(1.0)
        else:
            torch.ones(4, out=zeros)
        assert not tracker.labels.zero(zeros)
        assert tracker.labels.zero(zeros.zero_())
        zeros[2:].fill_(0.0)
        assert tracker.labels.zero(zeros)


class Biased(nn.Module):
    """A table of biases that are read by a public index, as between positions, and clamped."""

    def __init__(self):
        super().__init__()
        self.table, index = nn.Parameter(torch.randn(4)), torch.arange(36).reshape(6, 6) % 4
        self.register_buffer("index", index)

    def forward(self, x):
        return x + F.pad(self.table[self.index].clamp(min=-1.0), (0, 2))[:, :6]
