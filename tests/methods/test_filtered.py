"""Are DOPPLER and DiSK linear filters as printed, and does the Kalman memory find the best gain by itself?"""

from math import sqrt

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import nn

import vestige
from conftest import clip_and_sum, make_toy
from method_runs import Spy, curator_of, flat, gradients_at
from vestige.layout import Layout
from vestige.methods.registry import make_method
from vestige.optim.filters import SECOND_ORDER, LowPass, SelfTuning, Smoothed
from vestige.optim.gradient_query_points import AlongLastStep
from vestige.randomness.sum_and_release_types import Release
from vestige.training.loop import TrainingState


def layout_of(size):
    return Layout.of(nn.Linear(size, 1, bias=False))


def feed(memory, inputs, std=1.0):
    layout = layout_of(inputs.shape[1])
    state = memory.init(layout, torch.device("cpu"))
    outputs, last = [], None
    for row in inputs:
        last = Release(torch.tensor(row, dtype=torch.float32), std, 1.0)
        direction, state, _ = memory.step(last, state, {})
        outputs.append(direction.double().numpy().copy())
    return np.stack(outputs), state, memory.noise_std(last, state)


@pytest.mark.parametrize("memory", [LowPass(), SECOND_ORDER, LowPass((-0.5, 0.1), (0.3, 0.2, 0.05, 0.02))])
def test_doppler_is_a_linear_filter_that_passes_constants(memory):
    rng = np.random.default_rng(4)
    inputs = rng.normal(size=(60, 3))
    outputs, _, std = feed(memory, inputs)
    a, b = [1.0, *memory.feedback], list(memory.forward)
    correction = lfilter(b, a, np.ones(60))
    np.testing.assert_allclose(outputs, lfilter(b, a, inputs, axis=0) / correction[:, None], rtol=1e-3, atol=1e-4)
    constant, _, _ = feed(memory, np.full((60, 3), 2.5))
    np.testing.assert_allclose(constant, 2.5, rtol=1e-4)
    impulse = lfilter(b, a, np.eye(60)[0])
    assert std == pytest.approx(np.sqrt((impulse**2).sum()) / correction[-1], rel=1e-6)


def test_disk_on_a_quadratic_without_noise_follows_the_exact_gradient():
    kappa, gamma = 0.7, 0.5
    weight = (1 - kappa) / (kappa * gamma)
    rng = np.random.default_rng(5)
    curvature = rng.normal(size=(4, 4))
    curvature = curvature @ curvature.T
    probe, memory, layout = AlongLastStep(gamma, weight), Smoothed(kappa), layout_of(4)
    device = torch.device("cpu")
    look, kept = probe.init(layout, device), memory.init(layout, device)

    def gradient(at):
        field = lambda parameters: {"weight": parameters["weight"] @ torch.tensor(curvature, dtype=torch.float32)}
        answer = (at.transform(field) if at.transform else field)(at.point)
        return Release(answer["weight"].ravel(), 0.0, 1.0)

    theta = torch.tensor(rng.normal(size=(1, 4)), dtype=torch.float32)
    for _ in range(6):
        release, look = probe.ask(gradient, {"weight": theta}, look)
        direction, kept, _ = memory.step(release, kept, {})
        np.testing.assert_allclose(
            direction, (theta @ torch.tensor(curvature, dtype=torch.float32)).ravel(), rtol=1e-4, atol=1e-5
        )
        theta = theta - 0.05 * direction.view(1, 4)


def test_disk_combines_before_it_clips():
    model, data = make_toy()
    spy = Spy()
    method = make_method("disk", kappa=0.5, extrapolation=0.7)
    weight = 0.5 / (0.5 * 0.7)
    state = TrainingState(model, method, Layout.of(model), 2.0)
    curator = curator_of(model, data, spy=spy)
    points = []
    for _ in range(2):
        points.append(flat(model).double().numpy())
        vestige.training.loop.step(state, method, curator, 1.0)
    near = gradients_at(model, points[1], data)
    far = gradients_at(model, points[1] + 0.7 * (points[1] - points[0]), data)
    np.testing.assert_allclose(spy.sums[1], clip_and_sum(weight * far + (1 - weight) * near, 1.0), atol=5e-5)
    apart = weight * clip_and_sum(far, 1.0) + (1 - weight) * clip_and_sum(near, 1.0)
    assert np.abs(spy.sums[1] - apart).max() > 1e-3


# --- the Kalman memory -----------------------------------------------------------------------------------------------


def best_gain(speed, noise):
    ratio = speed / noise
    return (-ratio + sqrt(ratio**2 + 4 * ratio)) / 2


@pytest.mark.parametrize("ratio", [1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.nightly("0.01", "0.1")
def test_the_kalman_memory_finds_the_optimal_gain(ratio):
    rng = np.random.default_rng(6)
    size, steps = 4000, 400
    signal = np.cumsum(rng.normal(size=(steps, size)) * sqrt(ratio), axis=0) + 5
    outputs, state, std = feed(SelfTuning(), signal + rng.normal(size=(steps, size)))
    gain = float(state["gain"])
    assert gain == pytest.approx(best_gain(ratio, 1.0), rel=0.25)
    error = ((outputs[-100:] - signal[-100:]) ** 2).mean()
    assert error == pytest.approx(best_gain(ratio, 1.0), rel=0.15)  # the Kalman filter's own error is K R
    assert 0 < std < 1.0
    for other in (0.2, 5.0):  # a filter with the wrong gain is worse: the test can tell
        fixed = min(1.0, other * best_gain(ratio, 1.0))
        wrong = lfilter([fixed], [1, -(1 - fixed)], signal + rng.normal(size=(steps, size)), axis=0)
        assert ((wrong[-100:] - signal[-100:]) ** 2).mean() > error


def test_the_kalman_memory_averages_a_constant_and_follows_a_jump():
    rng = np.random.default_rng(7)
    signal = np.concatenate([np.zeros((100, 3000)), np.full((60, 3000), 3.0)])
    outputs, _, _ = feed(SelfTuning(), signal + rng.normal(size=signal.shape))
    assert ((outputs[90:100]) ** 2).mean() < 0.05
    assert ((outputs[-10:] - 3) ** 2).mean() < 1.0


def test_without_noise_the_kalman_memory_is_the_identity_bit_for_bit():
    inputs = np.random.default_rng(8).normal(size=(20, 50)).astype(np.float32)
    outputs, _, std = feed(SelfTuning(), inputs, std=0.0)
    assert np.array_equal(outputs.astype(np.float32), inputs)
    assert std == 0.0


def test_the_kalman_memory_may_have_a_gain_for_every_tensor():
    model = nn.Sequential(nn.Linear(60, 60, bias=False), nn.Linear(60, 60, bias=False))
    layout, memory = Layout.of(model), SelfTuning("tensor")
    state = memory.init(layout, torch.device("cpu"))
    rng = np.random.default_rng(9)
    moving = np.zeros(7200)
    for _ in range(200):
        moving[:3600] += rng.normal(size=3600)
        memory.step(Release(torch.tensor(moving + rng.normal(size=7200), dtype=torch.float32), 1.0, 1.0), state, {})
    fast, slow = state["gain"].tolist()
    assert fast == pytest.approx(best_gain(1.0, 1.0), rel=0.2)
    assert slow < 0.1
