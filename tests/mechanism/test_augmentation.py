"""Are the views of an example flips and crops, clipped together as one?"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import vestige
from method_runs import LOSS, flat, run
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.registry import make_method


def images(count=12):
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 3))
    return model, (torch.randn(count, 1, 8, 8, generator=generator), torch.randint(3, (count,), generator=generator))


def test_identical_copies_change_nothing():
    plain, (x, y) = images()
    layout = Layout.of(plain)
    point = {name: p.detach() for name, p in plain.named_parameters()}
    sums = []
    for transform in (None, Augment(4, padding=0, flip=False)):
        into = torch.zeros(layout.size)
        Reference(plain, LOSS, layout)((x, y), point, Flat(0.5), into, transform)
        sums.append(into)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-6)


def test_views_are_flips_and_crops_and_an_example_with_many_is_still_clipped_once():
    image = torch.arange(64.0).view(1, 8, 8)
    padded = nn.functional.pad(image, (2,) * 4)
    possible = {
        tuple(v[:, i : i + 8, j : j + 8].ravel().tolist())
        for v in (padded, padded.flip(-1))
        for i in range(5)
        for j in range(5)
    }
    views = {tuple(Augment(1, padding=2).view(image).ravel().tolist()) for _ in range(200)}
    assert views <= possible
    assert len(views) > 25
    model, (x, y) = images(1)
    layout = Layout.of(model)
    into = torch.zeros(layout.size)
    point = {name: p.detach() for name, p in model.named_parameters()}
    Reference(model, LOSS, layout)((100 * x, y), point, Flat(0.5), into, Augment(8))
    assert float(into.norm()) == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ValueError, match="flips and crops images"):
        list(run(Method(name="x", augment=Augment(2))))


def test_every_view_is_of_its_own_example_with_coins_of_its_own():
    images = torch.arange(1.0, 6.0).view(5, 1, 1, 1) * torch.arange(1.0, 65.0).view(1, 1, 8, 8)
    labels = torch.arange(5)
    torch.manual_seed(3)
    (term,) = Augment(40, padding=2).terms({}, (images, labels))
    assert torch.equal(term.batch[1], labels.repeat_interleave(40))
    views = term.batch[0].unflatten(0, (5, 40))
    for own, image in zip(views, images, strict=True):
        assert set(own.unique().tolist()) <= {0.0, *image.unique().tolist()}
        assert len({tuple(view.ravel().tolist()) for view in own}) > 15
    assert len({tuple((own[0] / image.max()).ravel().tolist()) for own, image in zip(views, images, strict=True)}) > 1


def test_the_fast_engine_and_the_reference_draw_the_same_views():
    model, batch = images(6)
    layout = Layout.of(model)
    point, sums = {name: p.detach() for name, p in model.named_parameters()}, []
    for engine in (Reference, BookKeeping):
        for _ in range(2):
            torch.manual_seed(9)
            into = torch.zeros(layout.size)
            engine(model, LOSS, layout)(batch, point, Flat(0.5), into, Augment(4))
            sums.append(into)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[2], sums[3])
    torch.testing.assert_close(sums[2], sums[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dp-sgd", "disk"])
def test_training_with_views_needs_no_reference_engine(name, monkeypatch):
    options = {"extrapolation": "0.5"} if name == "disk" else {}
    method = replace(make_method(name, **options), augment=Augment(3))

    def trained(engine):
        model, data = images(20)
        limits = {"sample_rate": 0.4, "steps": 4, "noise_multiplier": 1.0, "delta": 1e-5, "lr": 0.1}
        list(vestige.train(model, LOSS, data, method=method, reproducible=4, engine=engine, **limits))
        return flat(model)

    want = trained("reference")
    monkeypatch.setattr(Reference, "__call__", lambda *_: pytest.fail("the reference engine was called"))
    torch.testing.assert_close(trained("bookkeeping"), want, rtol=1e-4, atol=1e-5)
