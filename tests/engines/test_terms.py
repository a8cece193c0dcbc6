"""Are an example's views, and its gradients at several points, one vector in the fast engine, clipped once?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engine_checks
from engine_checks import PerGroup, alternating, clipped, close, one_at_a_time, square, targets
from vestige.engines import bookkeeping
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis.sums import patches
from vestige.engines.per_example.gradient_forms import Dense, Geometry, Patches
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Flat
from vestige.mechanism.gradient_transforms import Linear, Term, one_after
from vestige.optim.gradient_query_points import Forecast
from vestige.tasks.models import StandardisedConv2d
from vestige.tf32 import without_tf32


@dataclass(frozen=True)
class Rolled(Linear):
    """Views that need no coin: what is given first, rolled along its last axis by 0, 1, 2, ... places."""

    copies: int

    def terms(self, point, batch) -> list[Term]:
        seen = torch.stack([batch[0].roll(k, dims=-1) for k in range(self.copies)], dim=1).flatten(0, 1)
        rest = [part.repeat_interleave(self.copies, dim=0) for part in batch[1:]]
        return [Term(1.0, point, [seen, *rest], self.copies)]


class Swapped(nn.Module):
    """Folds positions into the batch axis with the examples of one position side by side."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 2)

    def forward(self, input: Tensor) -> Tensor:
        positions = self.layer(input.transpose(0, 1).flatten(0, 1)).flatten(1)
        return self.head(torch.tanh(positions.unflatten(0, (-1, len(input))).mean(dim=0)))


class Unruled(nn.Module):
    """Parameters in functions that have no rule, of examples on the second axis too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.power, self.head = (
            nn.Parameter(torch.randn(4, 3)),
            nn.Parameter(torch.rand(3)),
            nn.Linear(3, 2),
        )

    def forward(self, input: Tensor) -> Tensor:
        x = torch.einsum("ib,ij->jb", input.t(), self.mix)
        return self.head(torch.tanh(x.t().abs() + 0.5) ** self.power)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9)), nn.Linear(9, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, input, use_reentrant=False))


def standardised() -> nn.Module:
    layers = [StandardisedConv2d(2, 8, 3), nn.ReLU(), nn.GroupNorm(2, 8), StandardisedConv2d(8, 12, 3, stride=2)]
    return nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))


def wide_cnn() -> nn.Module:
    """Few positions and many channels: no convolution is materialised."""
    return nn.Sequential(
        nn.Conv2d(2, 24, 3, padding=1), nn.Tanh(), nn.Conv2d(24, 32, 3), nn.Flatten(), nn.Linear(32, 3)
    )


def classes(examples: int) -> Tensor:
    return torch.randint(0, 3, (examples,))


MODELS = {
    **engine_checks.MODELS,
    "wide cnn": (wide_cnn, lambda n: torch.randn(n, 2, 3, 3), F.cross_entropy, classes),
    "standardised": (standardised, lambda n: torch.randn(n, 2, 6, 6), F.cross_entropy, classes),
    "swapped linear": (lambda: Swapped(nn.Linear(4, 6)), lambda n: torch.randn(n, 3, 4), square, targets),
    "swapped conv": (lambda: Swapped(nn.Conv1d(2, 3, 3)), lambda n: torch.randn(n, 3, 2, 4), square, targets),
    "no rule": (Unruled, lambda n: torch.randn(n, 4), square, targets),
    "checkpointed": (Checkpointed, lambda n: torch.randn(n, 4), square, targets),
}


def sample(name: str, examples: int = 5, grouping=None):
    """A model, its layout and a batch, in float64."""
    torch.manual_seed(3)
    make, inputs, loss, labels = MODELS[name]
    batch = [part.double() if part.is_floating_point() else part for part in (inputs(examples), labels(examples))]
    model = make()
    layout = Layout.of(model, grouping)  # which takes no other numbers than a release has
    return model.double(), layout, batch, loss


def point_of(layout: Layout, model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in layout.parameters(model).items()}


def beside(point: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(4)
    return {name: p + 0.1 * torch.randn_like(p) for name, p in point.items()}


def exact(model, loss, layout, terms) -> Tensor:
    """Each example's vector, one view at a time."""
    each = (t.weight * one_at_a_time(model, loss, layout, t.batch, t.point).unflatten(0, (-1, t.views)) for t in terms)
    return sum(rows.mean(dim=1) for rows in each)


def answer(engine, batch, point, clip, layout, transform, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    into = torch.zeros(layout.size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return into, engine(batch, point, clip, into, transform)


TRANSFORMS = {
    "views": lambda point: Rolled(3),
    "two points": lambda point: Forecast(beside(point), 0.4),
    "an extrapolation": lambda point: Forecast(beside(point), -1.5),
    "views at two points": lambda point: one_after(Rolled(2), Forecast(beside(point), 1.7)),
    "views of views": lambda point: one_after(Rolled(2), Rolled(2)),
}


@pytest.mark.parametrize(("transform", "grouped"), [*((each, False) for each in TRANSFORMS), ("views", True)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.nightly(
    "tokens-views-False",
    "tokens-two points-False",
    "tokens-an extrapolation-False",
    "tokens-views at two points-False",
    "tokens-views of views-False",
    "tokens-views-True",
    "language-views at two points-False",
    "standardised-views-False",
    "standardised-two points-False",
    "standardised-an extrapolation-False",
    "standardised-views at two points-False",
    "standardised-views of views-False",
    "standardised-views-True",
    "checkpointed-views at two points-False",
)
def test_one_vector_of_each_example_clipped_once(name, transform, grouped):
    model, layout, batch, loss = sample(name, grouping=alternating if grouped else None)
    point = point_of(layout, model)
    made = TRANSFORMS[transform](point)
    rows = exact(model, loss, layout, made.terms(point, batch))
    clip = PerGroup((0.05, 0.3)) if grouped else Flat(rows.norm(dim=1).median().item())
    want, want_norms = clipped(rows, clip, layout)
    engine = BookKeeping(model, loss, layout)
    engine.reference = None  # which is not needed
    got, norms = answer(engine, batch, point, clip, layout, made)
    close(got, want, 1e-8)
    close(norms, want_norms, 1e-8)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "wide cnn", "language"])
def test_the_reference_takes_the_same_vector(name, transform):
    model, layout, batch, loss = sample(name)
    point = point_of(layout, model)
    made = TRANSFORMS[transform](point)
    engines = BookKeeping(model, loss, layout), Reference(model, loss, layout)
    (got, norms), (want, want_norms) = (answer(each, batch, point, Flat(0.1), layout, made) for each in engines)
    close(got, want, 1e-8)
    close(norms, want_norms, 1e-8)


def test_a_convolution_keeps_its_views_apart_where_gradients_would_be_large():
    image, signal = torch.randn(6, 24, 3, 3), torch.randn(6, 32, 1, 1)
    geometry = Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1)
    found = patches(image, signal, geometry, 2)
    assert isinstance(found, Patches)
    assert found.rows == 3
    assert isinstance(patches(*(part.repeat(40, 1, 1, 1) for part in (image, signal)), geometry, 2), Dense)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 4, "dilation": 2, "padding": 2}])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.nightly("3-options2")
def test_views_of_a_convolution_by_every_way(rank, options):
    torch.manual_seed(5)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](8, 12, 2, **options).double()
    image = torch.randn(6, 8, *[5] * rank).double()
    signal = torch.randn_like(layer(image))
    geometry = Geometry(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    alone = Patches(image, signal, geometry)
    views = Patches(image.unflatten(0, (2, 3)), signal.unflatten(0, (2, 3)), geometry)
    want = alone.dense().unflatten(0, (2, 3)).sum(dim=1)
    close(views.dense(), want, 1e-12)
    close(views._ghost_squares().sqrt(), want.flatten(1).norm(dim=1), 1e-12)
    close(views.norms(2.0**-52), want.flatten(1).norm(dim=1), 1e-12)
    close(views._lengths(), alone._lengths().view(2, 3).sum(dim=1), 1e-12)
    into, factors = torch.zeros_like(want[0]), torch.tensor([0.5, -2.0]).double()
    views.add(into, factors)
    close(into, torch.einsum("i,i...->...", factors, want), 1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn", "wide cnn", "tokens", "language"])
def test_one_view_is_the_example_bit_for_bit(name):
    model, layout, batch, loss = sample(name)
    model, batch = model.float(), [part.float() if part.is_floating_point() else part for part in batch]
    point, engine = point_of(layout, model), BookKeeping(model, loss, layout)
    same = Augment(1, padding=0, flip=False) if "cnn" in name or name == "tokens" else Rolled(1)
    want = answer(engine, batch, point, Flat(0.1), layout, None, torch.float32)
    got = answer(engine, batch, point, Flat(0.1), layout, same, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_clip_of_each_view_would_be_noticed(monkeypatch):
    """What the tests above rest on: views clipped one by one and then averaged are another sum."""
    original = BookKeeping.gradients_of

    def one_by_one(self, term):
        return original(self, replace(term, views=1))

    def averaged(gradients, clip, layout, into, examples, users=None):
        add = torch.zeros_like(into)
        norms = weighted(gradients, clip, layout, add, 3 * examples)
        into += add / 3
        return norms.view(examples, 3, -1).mean(dim=1)

    weighted = bookkeeping.add_weighted
    monkeypatch.setattr(BookKeeping, "gradients_of", one_by_one)
    monkeypatch.setattr(bookkeeping, "add_weighted", averaged)
    with pytest.raises(AssertionError, match="not close"):
        test_one_vector_of_each_example_clipped_once("mlp", "views", grouped=False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["cnn", "wide cnn", "standardised", "tokens"])
@pytest.mark.everyday(
    "cnn-views-nan",
    "cnn-views-inf",
    "cnn-two points-inf",
    "cnn-an extrapolation-nan",
    "cnn-an extrapolation-inf",
    "cnn-views at two points-inf",
    "cnn-views of views-nan",
    "cnn-views of views-inf",
    "wide cnn-views-nan",
    "wide cnn-views-inf",
    "wide cnn-two points-nan",
    "wide cnn-two points-inf",
    "wide cnn-an extrapolation-nan",
    "wide cnn-an extrapolation-inf",
    "wide cnn-views at two points-nan",
    "wide cnn-views at two points-inf",
    "wide cnn-views of views-nan",
    "wide cnn-views of views-inf",
    "tokens-views-inf",
    "tokens-views of views-nan",
)
def test_a_broken_example_is_dropped_with_all_its_views(name, transform, value):
    model, layout, batch, loss = sample(name)
    batch[0][2].view(-1)[0] = value
    point, engine = point_of(layout, model), BookKeeping(model, loss, layout)
    made, kept = TRANSFORMS[transform](point), [0, 1, 3, 4]
    got, norms = answer(engine, batch, point, Flat(0.1), layout, made)
    want, want_norms = answer(engine, [part[kept] for part in batch], point, Flat(0.1), layout, made)
    assert norms[2].isinf().all()
    close(got, want, 1e-8)
    close(norms[kept], want_norms, 1e-8)


class OneBroken(Rolled):
    """The last view of the first example is not finite."""

    def terms(self, point, batch):
        (term,) = super().terms(point, batch)
        term.batch[0][self.copies - 1].view(-1)[0] = torch.nan
        return [term]


def test_one_broken_view_takes_its_example_along_and_no_other():
    model, layout, batch, loss = sample("cnn")
    point, engine = point_of(layout, model), BookKeeping(model, loss, layout)
    got, norms = answer(engine, batch, point, Flat(0.1), layout, OneBroken(3))
    want, want_norms = answer(engine, [part[1:] for part in batch], point, Flat(0.1), layout, Rolled(3))
    assert norms.isinf().squeeze(1).tolist() == [True, False, False, False, False]
    close(got, want, 1e-8)
    close(norms[1:], want_norms, 1e-8)


@dataclass(frozen=True)
class Opposite(Linear):
    """Views whose gradients cancel but for their last bits: the second signal is the first's negative."""

    def terms(self, point, batch):
        inputs, weight, rest = batch
        close_by = inputs * (1 + 1e-7 * torch.randn_like(inputs))
        seen = torch.stack([inputs, close_by], dim=1).flatten(0, 1)
        signs = torch.stack([weight, -weight], dim=1).flatten(0, 1)
        return [Term(1.0, point, [seen, signs, rest.repeat_interleave(2, dim=0)], 2)]


class Weighted(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor, weight: Tensor) -> Tensor:
        return (self.layer(input) * weight).flatten(1).sum(dim=1)


@pytest.mark.parametrize(
    ("layer", "inside", "outside"),
    [
        (nn.Linear(40, 30, bias=False), (40,), (30,)),
        (nn.Linear(40, 30, bias=False), (5, 40), (5, 30)),
        (nn.Conv2d(16, 40, 3, bias=False), (16, 4, 4), (40, 2, 2)),
        (nn.Conv2d(2, 4, 3, bias=False), (2, 9, 9), (4, 7, 7)),
    ],
)
def test_views_that_cancel_lift_no_share_over_the_bound(layer, inside, outside):
    torch.manual_seed(6)
    layout = Layout.of(model := Weighted(layer))
    engine = BookKeeping(model, lambda output, target: output.sum() + 0 * target.sum(), layout)
    bound = 1e-9
    for _ in range(20):
        batch = [300 * torch.randn(1, *inside), 50 * torch.randn(1, *outside), torch.zeros(1)]
        into = torch.zeros(layout.size)
        engine(batch, point_of(layout, model), Flat(bound), into, Opposite())
        assert into.double().norm() <= bound * (1 + 1e-5)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["cnn", "wide cnn", "standardised"])
@pytest.mark.everyday(
    "cnn-False-cpu",
    "cnn-False-cuda",
    "cnn-True-cuda",
    "wide cnn-False-cuda",
    "wide cnn-True-cuda",
    "standardised-False-cuda",
    "standardised-True-cuda",
)
def test_channels_side_by_side(name, half, device):
    """However images and weights lie: against one example at a time, contiguous and in float64."""
    model, layout, batch, loss = sample(name, 16)
    point = point_of(layout, model)
    want, want_norms = clipped(exact(model, loss, layout, Rolled(3).terms(point, batch)), Flat(0.1), layout)
    model = model.float().to(device, memory_format=torch.channels_last)
    batch = [batch[0].float().to(device, memory_format=torch.channels_last), batch[1].to(device)]
    parameters, engine = layout.parameters(model), BookKeeping(model, loss, layout)
    into, tolerance = torch.zeros(layout.size, device=device), 0.1 if half else 1e-4
    with torch.autocast(device, torch.bfloat16, enabled=half), without_tf32():
        norms = engine(batch, parameters, Flat(0.1), into, Rolled(3))
        close(into.cpu().double(), want, tolerance)
        close(norms.cpu(), want_norms, tolerance / 2)
        into.zero_()
        one = engine([part[:1] for part in batch], parameters, Flat(1e-3), into, Rolled(3))
    assert one.item() > 1e-3
    assert abs(into.norm().item() / 1e-3 - 1) < 2e-3, "one clipped example lies on the sphere"


def test_a_transform_that_is_no_sum_is_left_to_the_reference():
    model, layout, batch, loss = sample("mlp")
    point = point_of(layout, model)

    def squared(field):
        return lambda p, *example: {name: g.square() for name, g in field(p, *example).items()}

    made = one_after(Rolled(2), squared)
    rows = exact(model, loss, layout, Rolled(2).terms(point, batch)).square()
    want, want_norms = clipped(rows, Flat(0.1), layout)
    got, norms = answer(BookKeeping(model, loss, layout), batch, point, Flat(0.1), layout, made)
    close(got, want, 1e-8)
    close(norms, want_norms, 1e-8)
