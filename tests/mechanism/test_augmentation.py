"""Are the views of an example flips and crops, clipped together as one?"""

import pytest
import torch
from torch import nn

from method_runs import LOSS, run
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method


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
