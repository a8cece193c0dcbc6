"""Do functions of parameters keep gradients exact, factored and unreplayed, however a layer is spelled?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from engine_checks import close, square, token_loss
from other_models import exact
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.per_example import gradient_maps
from vestige.engines.per_example.gradient_forms import (
    Deferred,
    Dense,
    Gradient,
    Lookup,
    Outer,
    Parts,
    Place,
    Routed,
    Tied,
    Within,
    change,
    combine,
)
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

WIDTH = 6


class Spelled(nn.Module):
    """A layer [examples, 5, 6] -> [examples, 5, 6] written by hand, between two linear ones."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 + 0.3 * torch.randn(shape)))

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.first(input)))).mean(dim=1))


LAYERS = {
    # RMSNorm, LayerScale and parameters of one number
    "rms norm": (lambda m, x: m.a * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()), {"a": (6,)}),
    "rms norm of one plus": (
        lambda m, x: (x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))) * (1.0 + m.a.float()),
        {"a": (6,)},
    ),
    "rms norm by a norm": (lambda m, x: x / x.norm(dim=-1, keepdim=True) * 6**0.5 * m.a, {"a": (6,)}),
    "F.rms_norm": (lambda m, x: F.rms_norm(x, (6,), m.a), {"a": (6,)}),
    "layer scale": (lambda m, x: x + m.a.view(1, 1, -1) * torch.tanh(x), {"a": (6,)}),
    "one number": (lambda m, x: m.a * x + m.b, {"a": (), "b": ()}),
    "temperature": (lambda m, x: x / m.a.exp(), {"a": ()}),
    "temperature below": (lambda m, x: x / (m.a.abs() + 0.1), {"a": (1,)}),
    "gem pooling": (lambda m, x: x.abs().clamp(min=1e-3).pow(m.a).mean(1, keepdim=True).pow(1 / m.a), {"a": (1,)}),
    "a power": (lambda m, x: m.a**x, {"a": (6,)}),
    "where": (lambda m, x: torch.where(x > 0, x, m.a[None, None]), {"a": (6,)}),
    "blend": (lambda m, x: torch.lerp(x, x.flip(-1), m.a.sigmoid()), {"a": (6,)}),
    "prelu": (lambda m, x: F.prelu(x, m.a) + F.prelu(x.transpose(1, 2), m.b).transpose(1, 2), {"a": (1,), "b": (6,)}),
    # products
    "matmul": (lambda m, x: x @ m.a, {"a": (6, 6)}),
    "of a transpose": (lambda m, x: x @ m.a.t() + F.linear(x, m.a.T), {"a": (6, 6)}),
    "vector": (lambda m, x: x * (x @ m.a)[..., None] + x * torch.matmul(x, m.b).unsqueeze(-1), {"a": (6,), "b": (6,)}),
    "convolution's weight": (lambda m, x: F.linear(x, m.a.squeeze(-1).squeeze(-1)), {"a": (6, 6, 1, 1)}),
    "chunks": (lambda m, x: sum(F.linear(x, part) for part in m.a.chunk(3)), {"a": (18, 6)}),
    "columns": (lambda m, x: sum(F.linear(x[..., :3], part) for part in m.a.split(3, dim=1)), {"a": (6, 6)}),
    "overlapping rows": (lambda m, x: F.linear(x, m.a[:6]) + F.linear(x, m.a[2:]), {"a": (8, 6)}),
    "flattened": (lambda m, x: F.linear(x, m.a.flatten(1)) + m.b.reshape(6), {"a": (6, 2, 3), "b": (2, 3)}),
    "joined": (
        lambda m, x: F.linear(x, torch.cat([m.a, m.b]), torch.cat([m.c, torch.zeros(3, dtype=x.dtype)])),
        {"a": (2, 6), "b": (4, 6), "c": (3,)},
    ),
    "joined columns": (lambda m, x: x @ torch.cat([m.a, m.b], dim=1), {"a": (6, 2), "b": (6, 4)}),
    "stacked": (
        lambda m, x: torch.einsum("nti,sij->nstj", x, torch.stack([m.a, m.b])).sum(1),
        {"a": (6, 6), "b": (6, 6)},
    ),
    "merged adapters": (
        lambda m, x: F.linear(x, m.c.detach() + 2 * (m.a @ m.b)),
        {"a": (6, 2), "b": (2, 6), "c": (6, 6)},
    ),
    "scaled rows": (lambda m, x: F.linear(x, m.a * torch.arange(1.0, 7.0, dtype=x.dtype)[:, None]), {"a": (6, 6)}),
    "heads": (
        lambda m, x: torch.einsum("...hd,hdo->...o", torch.einsum("nti,ihd->nthd", x, m.a).tanh(), m.b),
        {"a": (6, 2, 3), "b": (2, 3, 6)},
    ),
    "heads first": (lambda m, x: torch.einsum("bti,hid->bhtd", x, m.a).sum(1), {"a": (2, 6, 6)}),
    "a map for each place": (lambda m, x: torch.bmm(x.transpose(0, 1), m.a).transpose(0, 1), {"a": (5, 6, 6)}),
    "added to a map": (
        lambda m, x: torch.baddbmm(x.transpose(0, 1), x.transpose(0, 1), m.a).transpose(0, 1),
        {"a": (5, 6, 6)},
    ),
    "a map and a bias for each place": (
        lambda m, x: torch.baddbmm(m.b[:, None], x.transpose(0, 1), m.a).transpose(0, 1),
        {"a": (5, 6, 6), "b": (5, 6)},
    ),
    "an affine map in one call": (lambda m, x: torch.addcmul(m.b, m.a, x), {"a": (6,), "b": (1, 1, 6)}),
    "divided and added": (lambda m, x: torch.addcdiv(x, m.b, m.a, value=0.5), {"a": (6,), "b": (5, 1)}),
    "between two": (lambda m, x: torch.lerp(x, x.flip(1), m.a), {"a": (6,)}),
    "typed as a parameter is": (lambda m, x: x.type_as(m.a) * m.a, {"a": (5, 6)}),
    "turned, repeated and viewed": (
        lambda m, x: x + m.a.t().unsqueeze(0).repeat(len(x), 1, 1).view(len(x) * 5, 6).view(len(x), 5, 6),
        {"a": (6, 5)},
    ),
    "matmul of a stack": (lambda m, x: (x[:, None] @ m.a).sum(1), {"a": (3, 6, 6)}),
    "bilinear": (lambda m, x: F.bilinear(x, x.flip(1), m.a, m.b), {"a": (6, 6, 6), "b": (6,)}),
    # tables
    "a bias by distance": (
        lambda m, x: (x @ x.mT + m.a[(torch.arange(5)[:, None] - torch.arange(5)).abs()].permute(2, 0, 1)[:1]) @ x,
        {"a": (5, 2)},
    ),
    "rows by number": (lambda m, x: x + m.a[torch.arange(5)[None].repeat(len(x), 1)], {"a": (5, 6)}),
    "maps by number": (
        lambda m, x: (m.a[(x[..., 0] > 0).long()] @ x[..., None]).squeeze(-1),
        {"a": (2, 6, 6)},
    ),
}


def spelled(name: str) -> nn.Module:
    layer, shapes = LAYERS[name]
    torch.manual_seed(3)
    model = Spelled(**shapes)
    if name == "merged adapters":
        model.c.requires_grad_(False)
    type_of = type(name, (Spelled,), {"layer": lambda self, x: layer(self, x)})
    model.__class__ = type_of
    return model


class BiasOfANetwork(Spelled):
    """Distances are made a bias by a small network, which activates in place: Swin V2's."""

    def layer(self, input: Tensor) -> Tensor:
        places = torch.arange(5.0, dtype=input.dtype)
        table = torch.stack([places[:, None] - places, (places[:, None] - places).abs()], dim=-1)
        hidden = F.relu(F.linear(table, self.a, self.b), inplace=True)
        return (input @ input.mT + F.linear(hidden, self.c).squeeze(-1).sigmoid()) @ input


def test_a_network_of_constants_may_activate_in_place():
    torch.manual_seed(4)
    model = BiasOfANetwork(a=(8, 2), b=(8,), c=(1, 8))
    exact(model, (torch.randn(4, 5, WIDTH), torch.randn(4, 2)), square, replayed=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_however_they_are_spelled(name):
    exact(spelled(name), (torch.randn(4, 5, WIDTH), torch.randn(4, 2)), square)


def test_a_matrix_that_becomes_one_number(monkeypatch):
    monkeypatch.setitem(LAYERS, "norms", (lambda m, x: x * m.a.norm() + 0.1 * m.a.square().sum(), {"a": (6, 6)}))
    exact(spelled("norms"), (torch.randn(4, 5, WIDTH), torch.randn(4, 2)), square, replayed=True)


class Convolutions(nn.Module):
    """Depthwise, grouped, transposed and dilated ones, one of given lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 8, 3, groups=2)
        self.turned = nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1)
        self.normed = weight_norm(nn.Conv2d(4, 4, 3, dilation=2), dim=0)
        self.head = weight_norm(nn.Linear(4, 2))

    def forward(self, input: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.depthwise(input))))
        return self.head(torch.tanh(self.normed(torch.tanh(self.turned(x)))).mean(dim=(2, 3)))


def test_convolutions_and_weight_norms():
    torch.manual_seed(4)
    exact(Convolutions(), (torch.randn(4, 4, 6, 6), torch.randn(4, 2)), square)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_weight_norm_along_any_axis_and_a_few_examples_at_a_time(dim, monkeypatch):
    torch.manual_seed(5)
    model = nn.Sequential(weight_norm(nn.Conv1d(3, 4, 3), dim=dim), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    batch = (torch.randn(5, 3, 6), torch.randn(5, 2))
    exact(model, batch, square)
    monkeypatch.setattr(gradient_maps, "LARGEST", 80)
    exact(model, batch, square)


class Adapted(nn.Module):
    """DoRA with a gradient through the norms too: the frozen weight is large, what is trained is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(width, 2))
        self.size = nn.Parameter(torch.rand(width, 1) + 1)

    def forward(self, input: Tensor) -> Tensor:
        merged = self.weight + 0.5 * (self.up @ self.down)
        return F.linear(input, self.size * merged / merged.norm(dim=1, keepdim=True)).mean(dim=1)[:, :2]


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that anything makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function._schema.name.endswith(("expand", "as_strided")):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_a_gradient_through_the_norms_of_a_large_frozen_weight_stays_small(monkeypatch):
    torch.manual_seed(6)
    width, examples = 40, 16
    model, batch = Adapted(width), (torch.randn(examples, 3, width), torch.randn(examples, 2))
    exact(model, batch, square, replayed=True)
    monkeypatch.setattr(gradient_maps, "LARGEST", 2 * width * width)
    exact(model, batch, square, replayed=True)
    engine = BookKeeping(model, square, layout := Layout.of(model))
    parameters = layout.parameters(model)
    with Largest() as largest:
        engine(batch, {name: p.detach() for name, p in parameters.items()}, Flat(1.0), torch.zeros(layout.size))
    assert not engine._left
    assert largest.numbers <= examples * 3 * width + 2 * width * width < examples * width * width


class TiedHead(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.tokens(tokens)), self.tokens.weight)


def test_a_large_vocabulary_that_is_tied_is_never_there_once_for_each_example():
    torch.manual_seed(8)
    words, width, positions, examples = 800, 32, 6, 8
    model = TiedHead(words, width)
    batch = (torch.randint(words, (examples, positions)), torch.randint(words, (examples, positions)))
    exact(model, batch, token_loss)
    engine = BookKeeping(model, token_loss, layout := Layout.of(model))
    parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    with Largest() as largest:
        engine(batch, parameters, Flat(1.0), torch.zeros(layout.size))
    assert largest.numbers <= examples * positions * words < examples * words * width


# --- the forms themselves ---------------------------------------------------------------------------------------------


def gradients() -> dict[str, tuple[Gradient, tuple[int, ...]]]:
    torch.manual_seed(7)
    outer = Outer(torch.randn(3, 4, 5), torch.randn(3, 4, 2))
    lookup = Lookup(torch.randint(5, (3, 4)), torch.randn(3, 4, 2), 5)
    routed = Routed(torch.randint(3, (3, 7)), torch.randn(3, 7, 4), torch.randn(3, 7, 2), 3)
    rows, columns = Place((5, 2), (2, 1), 4), Place((2, 5), (1, 2), 14)
    return {
        "routed": (routed, (3, 4, 2)),
        "within": (Within(outer, rows, (9, 2)), (9, 2)),
        "turned": (Within(Outer(outer.right, outer.left), columns, (12, 2)), (12, 2)),
        "dense, turned": (Within(Dense(torch.randn(3, 2, 5)), columns, (12, 2)), (12, 2)),
        "parts": (combine([Within(outer, rows, (14, 2)), Within(lookup, Place((5, 2), (2, 1), 14), (14, 2))]), (14, 2)),
        "same place": (combine([Within(outer, rows, (9, 2)), Within(lookup, rows, (9, 2))]), (9, 2)),
        "overlapping": (
            combine([Within(outer, rows, (9, 2)), Within(lookup, Place((5, 2), (2, 1), 6), (9, 2))]),
            (9, 2),
        ),
        "deferred": (Deferred(outer, lambda dense: 2 * dense.flatten(1), 2), (10,)),
    }


@pytest.mark.parametrize("name", gradients())
def test_norms_and_sums_of_a_form_are_those_of_its_gradients(name):
    gradient, shape = gradients()[name]
    dense = gradient.dense()
    assert dense.shape == (3, *shape)
    close(gradient.norms(2.0**-23), dense.flatten(1).norm(dim=1))
    into, factors = torch.ones(shape), torch.rand(3)
    gradient.add(into, factors)
    close(into - 1, torch.einsum("n,n...->...", factors, dense), 1e-5)
    close(change(gradient, lambda tensor: tensor[1:]).dense(), dense[1:])


def test_places_that_share_nothing_stay_apart_and_one_place_is_one():
    assert isinstance(gradients()["parts"][0], Parts)
    assert isinstance(gradients()["same place"][0].of, Tied)
    assert isinstance(gradients()["overlapping"][0], Dense)
    left, right = Place((4, 2), (4, 1), 0), Place((4, 2), (4, 1), 2)  # columns, which lie between each other
    assert isinstance(combine([Within(Dense(torch.randn(3, 4, 2)), p, (4, 4)) for p in (left, right)]), Parts)


def test_a_number_that_is_in_a_view_twice_is_no_view():
    base = torch.arange(12.0).view(3, 4)
    assert Place.of_view(base.t()[1:], base) == Place((3, 3), (1, 4), 1)
    assert Place.of_view(base[0].expand(2, 4), base) is None
    assert Place.of_view(base.flatten().unfold(0, 4, 2), base) is None


def test_a_matrix_used_step_by_step_is_materialised_where_that_is_smaller():
    """A recurrent layer's: 80 uses of one position each are a sum over 80 positions."""
    few, many = (
        [Outer(torch.randn(3, 1, 8, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)) for _ in range(n)]
        for n in (2, 80)
    )
    for uses, kind in ((few, Outer), (many, Dense)):
        joined = combine(uses)
        assert isinstance(joined, kind)
        torch.testing.assert_close(joined.dense(), sum(use.dense() for use in uses), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(joined.norms(1e-16), joined.dense().flatten(1).norm(dim=1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("height", [1, 2, 4, 7])
def test_a_table_no_longer_than_what_was_read_is_materialised(height):
    torch.manual_seed(0)
    index, rows = torch.randint(height, (3, 5)), torch.randn(3, 5, 6)
    expected = torch.zeros(3, height, 6).scatter_add_(1, index[:, :, None].expand(3, 5, 6), rows)
    found = combine([Lookup(index, rows, height)])
    assert isinstance(found, Dense) == (height <= 5)
    assert torch.allclose(found.dense(), expected, atol=1e-6)
    assert torch.allclose(found.norms(1e-7), expected.flatten(1).norm(dim=1), rtol=1e-5)
