"""Does the quantile clip find its quantile at the price of one question, and is automatic clipping its formula?"""

import numpy as np
import pytest
import torch
from torch import nn

from conftest import example_gradients, make_toy
from method_runs import Spy, curator_of
from vestige.engines.reference import add_clipped
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import Automatic, Counted, Quantile
from vestige.priced_questions import SampledGaussian


def test_the_quantile_clip_finds_the_quantile():
    rng = np.random.default_rng(3)
    clip, state = Quantile(0.1, 0.8, 0.2), {"bound": 0.1}
    for _ in range(400):
        norms = rng.lognormal(0.5, 0.7, size=200)
        fraction = (norms <= state["bound"]).mean() + rng.normal() * 10 / 200
        state = clip.learn(min(1, max(0, fraction)), state)
    assert state["bound"] == pytest.approx(np.exp(0.5 + 0.7 * 0.8416), rel=0.1)


def test_the_joint_release_costs_the_accounted_multiplier_and_no_more():
    clip = Counted(1.0, 10.0)
    gradient = clip.gradient_multiplier(1.1, 200)
    assert gradient == pytest.approx(1.1017, abs=1e-4)  # the spec's example
    assert (gradient**-2 + 20.0**-2) ** -0.5 == pytest.approx(1.1, rel=1e-12)
    with pytest.raises(ValueError, match=r"count_noise=0\.5"):
        Counted(1.0, 0.5).gradient_multiplier(1.1, 200)


def test_the_ledger_records_the_combined_multiplier_and_the_noise_is_larger():
    asked, spy = [], Spy()
    model, data = make_toy(features=60)
    curator = curator_of(model, data, spy=spy, asked=asked)
    point = {name: p.detach() for name, p in model.named_parameters()}
    for step in range(20):
        curator.gradient(point, Counted(1.0, 1.0), 1.5, step=step)
    assert set(asked) == {SampledGaussian(1.0, 1.5)}
    noise = np.concatenate(spy.noises[1::2])
    assert noise.std() == pytest.approx((1.5**-2 - 2.0**-2) ** -0.5, rel=0.03)
    assert noise.std() != pytest.approx(1.5, rel=0.03)


def test_the_released_fraction_is_the_centred_count_over_the_public_batch():
    spy = Spy()
    model, data = make_toy()
    rows = np.linalg.norm(example_gradients(model, *data), axis=1)
    bound = float(np.sort(rows)[40]) * 1.0001
    point = {name: p.detach() for name, p in model.named_parameters()}
    release = curator_of(model, data, spy=spy).gradient(point, Counted(bound, 3.0), 1.0, step=0)
    count, noise = spy.sums[0][0], spy.noises[0][0]
    assert count == 41 - 30  # 41 of 60 unclipped, each minus one half
    assert release.unclipped == pytest.approx(min(1, max(0, (count + noise) / 60 + 0.5)))
    fewer = Spy()
    curator_of(model, (data[0][:-1], data[1][:-1]), spy=fewer).gradient(point, Counted(bound, 3.0), 1.0, step=0)
    assert abs(count - fewer.sums[0][0]) == 0.5


def test_automatic_clipping_is_its_formula():
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0], [torch.inf, 1.0]])
    into = torch.zeros(2)
    layout = Layout.of(nn.Linear(2, 1, bias=False))
    add_clipped({"weight": rows[:, None, :]}, Automatic(2.0, 0.01), layout, into)
    expected = 2 * np.array([3, 4]) / 5.01 + 2 * np.array([0.03, 0.04]) / 0.06
    np.testing.assert_allclose(into, expected, rtol=1e-6)
