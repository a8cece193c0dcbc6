"""Do DP-MicroAdam, DP-Muon and GeoClip follow their equations, step by step in float64, and is GeoClip's clip priced?"""

import io
from dataclasses import replace
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
import torch

import vestige
from conftest import example_gradients, make_toy
from method_runs import LOSS, Spy, flat, run
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import FLOOR, Geometric, Scaled
from vestige.mechanism.clipping import weights
from vestige.mechanism.groups import Layers
from vestige.methods.registry import make_method
from vestige.optim.optimizers.micro_adam import MicroAdam
from vestige.optim.optimizers.muon import HybridMuon, orthogonalised
from vestige.priced_questions import SampledGaussian
from vestige.randomness.sum_and_release_types import Release


def witnessed(method, **changes):
    """The points of a run and the mean gradients that were released on the way, in float64."""
    training, spy = run(method, **changes), Spy()
    training.curator._nonprivate_witness = spy
    points = [flat(training.model).double().numpy()]
    for _ in training:
        points.append(flat(training.model).double().numpy())
    means = [(total + noise) / training.expected_batch for total, noise in zip(spy.sums, spy.noises, strict=True)]
    return points, means, training


def split(vector):
    """The parameters of the toy model, in order."""
    return np.split(vector, np.cumsum([35, 7, 21])), [(7, 5), (7,), (3, 7), (3,)]


# --- DP-MicroAdam ----------------------------------------------------------------------------------------------------


def test_micro_adam_is_its_equations():
    lr, beta1, beta2, density, window = 0.02, 0.8, 0.95, 0.2, 3
    options = {"beta1": beta1, "beta2": beta2, "density": density, "window": window}
    points, means, _ = witnessed(make_method("dp-micro-adam", **options), steps=8, lr=lr)
    at, errors, past = points[0], [0.0] * 4, [[] for _ in range(4)]
    for t, mean in enumerate(means, start=1):
        moved = []
        for i, (p, g) in enumerate(zip(split(at)[0], split(mean)[0], strict=True)):
            whole = g + errors[i]
            kept = np.argsort(-abs(whole))[: max(1, round(density * len(g)))]
            sparse = np.zeros_like(whole)
            sparse[kept] = whole[kept]
            errors[i] = whole - sparse
            past[i] = [sparse, *past[i]][:window]
            m = sum((1 - beta1) * beta1**age * each for age, each in enumerate(past[i])) / (1 - beta1**t)
            v = sum((1 - beta2) * beta2**age * each**2 for age, each in enumerate(past[i])) / (1 - beta2**t)
            moved.append(p - lr * m / (np.sqrt(v) + 1e-8))
        at = np.concatenate(moved)
        np.testing.assert_allclose(at, points[t], atol=2e-6)


def test_what_micro_adam_leaves_out_comes_later():
    """Error feedback loses nothing: gradients so far are what entered the windows and what still waits."""
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer, total, entered = MicroAdam([p], lr=0.1, density=0.05, window=4), torch.zeros(40), torch.zeros(40)
    for step in range(12):
        p.grad = torch.randn(40, generator=torch.Generator().manual_seed(step))
        total += p.grad
        optimizer.step()
        entered.index_add_(0, optimizer.state[p]["places"][step % 4], optimizer.state[p]["values"][step % 4])
    torch.testing.assert_close(entered + optimizer.state[p]["error"], total)
    assert int((p != 0).sum()) <= 24


def test_the_places_of_micro_adam_survive_a_checkpoint_as_whole_numbers():
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = MicroAdam([p], lr=0.1, density=0.4, window=2)
    p.grad = torch.arange(5.0)
    optimizer.step()
    optimizer.state[p]["places"][1] = 2**24 + 1  # float32 has no such number
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = MicroAdam([p], lr=0.1, density=0.4, window=2)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.state[p]["places"], optimizer.state[p]["places"])
    assert other.state[p]["places"].dtype == torch.long


# --- DP-Muon ---------------------------------------------------------------------------------------------------------


def by_svd(matrix, iterations):
    """Newton-Schulz acts on the singular values alone: the same polynomial on each, in float64."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(iterations):
        values = (15 * values - 10 * values**3 + 3 * values**5) / 8
    return left @ np.diag(values) @ right * sqrt(max(matrix.shape))


def test_muon_is_its_equations():
    lr, momentum = 0.01, 0.7
    points, means, _ = witnessed(make_method("dp-muon", momentum=momentum, iterations=4), steps=6, lr=lr)
    at, kept, first, second = points[0], [0.0] * 4, [0.0] * 4, [0.0] * 4
    for t, mean in enumerate(means, start=1):
        moved = []
        for i, (p, g, shape) in enumerate(zip(split(at)[0], split(mean)[0], split(at)[1], strict=True)):
            if len(shape) == 2:
                kept[i] = momentum * kept[i] + g
                moved.append(p - lr * by_svd(kept[i].reshape(shape), 4).ravel())
                continue
            first[i], second[i] = 0.9 * first[i] + 0.1 * g, 0.999 * second[i] + 0.001 * g**2
            scale = np.sqrt(second[i] / (1 - 0.999**t)) + 1e-8
            moved.append(p - lr * first[i] / (1 - 0.9**t) / scale)
        at = np.concatenate(moved)
        np.testing.assert_allclose(at, points[t], atol=5e-6)


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (12, 12)])
def test_an_orthogonalised_matrix_has_singular_values_of_one_size(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-4
    found = orthogonalised(matrix, 12) / max(shape) ** 0.5
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.ones(min(shape)), atol=1e-3, rtol=0)
    size = orthogonalised(matrix, 5).square().mean().sqrt()
    assert 0.8 < size < 1.01  # a coordinate moves by about the learning rate
    assert not orthogonalised(torch.zeros(shape), 5).any()


def test_a_convolution_is_a_matrix_to_muon():
    p = torch.nn.Parameter(torch.zeros(4, 3, 2, 2))
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    HybridMuon([p], lr=1.0, momentum=0.0).step()
    torch.testing.assert_close(-p.detach().flatten(1), orthogonalised(p.grad.flatten(1), 5))


def test_what_the_noise_alone_does_to_muon_is_what_its_rate_supposes():
    """The walk of pure noise, over lr sqrt(steps) per coordinate: the gain that lr='auto' divides by."""
    rule = make_method("dp-muon", momentum=0.9).rule
    p, generator = torch.nn.Parameter(torch.zeros(20, 60)), torch.Generator().manual_seed(0)
    optimizer = rule.build([p], 1.0)
    for _ in range(400):
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    walked = float(p.detach().square().mean().sqrt()) / 400**0.5
    assert walked == pytest.approx(rule.gain, rel=0.2)
    assert rule.scale_free


# --- GeoClip ---------------------------------------------------------------------------------------------------------


def scales_by_hand(releases, stds, sizes, speed, spread):
    """The scales of every step, in float64 and group by group."""
    moments, scales, found = np.zeros(2), np.ones(2), []
    bounds = np.cumsum([0, *sizes])
    for t, release in enumerate(releases):
        found.append(scales)
        noise = (stds[t] * scales) ** 2
        seen = [np.mean(release[a:b] ** 2) for a, b in pairwise(bounds)]
        moments = (1 - speed) * moments + speed * (np.array(seen) - noise)
        raw = np.maximum(moments / (1 - (1 - speed) ** (t + 1)), FLOOR * noise) ** 0.25
        raw = raw * np.sqrt(sum(sizes) / (sizes @ raw**2))
        raw = np.clip(raw, 1 / spread, spread)
        scales = raw * np.sqrt(sum(sizes) / (sizes @ raw**2))
    return found


def test_geoclip_is_its_equations_one_example_at_a_time():
    """Every un-noised sum is that of the gradients clipped in the geometry of the releases before it."""
    model, data = make_toy()
    sizes, noise, clip = np.array([42, 24]), 0.3, 0.5
    method = make_method("geoclip", clip=clip, speed=0.4, spread=3.0)
    points, means, training = witnessed(method, steps=6, rate=1.0, noise=noise, lr=0.2, data=data)
    releases = [mean * training.expected_batch for mean in means]
    scales = scales_by_hand(releases, [noise * clip] * 6, sizes, 0.4, 3.0)
    assert max(abs(scales[-1] - 1)) > 0.05, "nothing was learned: nothing is tested"
    spy = Spy()
    again = run(method, steps=6, rate=1.0, noise=noise, lr=0.2, data=data)
    again.curator._nonprivate_witness = spy
    list(again)
    for t in range(6):
        torch.nn.utils.vector_to_parameters(torch.as_tensor(points[t], dtype=torch.float32), model.parameters())
        rows = example_gradients(model, *data)
        each = np.repeat(scales[t], sizes)
        norms = np.linalg.norm(rows / each, axis=1)
        expected = (rows * np.minimum(1, clip / norms)[:, None]).sum(0)
        np.testing.assert_allclose(spy.sums[t], expected, atol=2e-4)
    assert training.ledger.spent == {SampledGaussian(1.0, noise): 6}  # one Gaussian a step, whatever the geometry


def test_the_noise_of_geoclip_is_that_of_its_geometry_and_has_dp_sgds_energy():
    model, data = make_toy(features=400)
    layout = Layout.of(model, Layers())
    clip = Scaled(2.0, (0.5, 3.0))
    sensitivity = clip.sensitivity(layout)
    assert sensitivity[0] == 1.0
    assert sensitivity[-1] == 6.0
    release = Release(torch.randn(layout.size) * layout.expand(torch.tensor([1.0, 9.0])), 0.5, 10.0)
    learned = Geometric(1.0, 1.0).heard(release, layout, Geometric().init())
    sizes = np.array(layout.group_sizes)
    assert sizes @ np.array(learned["scales"]) ** 2 == pytest.approx(layout.size)
    assert learned["scales"][1] / learned["scales"][0] == pytest.approx((80.75 / 0.75) ** 0.25, rel=0.2)
    spy = Spy()
    training = vestige.train(
        model, LOSS, data, method=replace(make_method("geoclip"), clip=Fixed()), sample_rate=0.5, steps=3,
        noise_multiplier=2.0, delta=1e-5, lr=0.01, reproducible=1,
    )  # fmt: skip
    training.curator._nonprivate_witness = spy
    list(training)
    noise = np.concatenate([each[: sizes[0]] for each in spy.noises])
    assert noise.std() == pytest.approx(2.0 * 0.5, rel=0.05)
    assert np.concatenate([each[sizes[0] :] for each in spy.noises]).std() == pytest.approx(2.0 * 3.0, rel=0.25)


class Fixed(Geometric):
    def now(self, state):
        return Scaled(self.bound, (0.5, 3.0))


def test_no_example_leaves_the_ball_of_its_geometry():
    norms = torch.tensor([[3.0, 0.1], [0.1, 30.0], [0.2, 0.2]], dtype=torch.float64)
    clip = Scaled(1.0, (0.5, 3.0))
    found = torch.linalg.vector_norm(weights(clip, norms) * norms / torch.tensor([0.5, 3.0]), dim=1)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, sqrt(0.16 + 0.04 / 9)], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dp-micro-adam", {"density": 0.0}, "density=0.0 must lie in"),
        ("dp-micro-adam", {"window": 0}, "window=0 must be a whole number"),
        ("dp-micro-adam", {"beta1": 1.0}, "beta1=1.0 must lie in"),
        ("dp-muon", {"momentum": 1.0}, "momentum=1.0 must lie in"),
        ("dp-muon", {"iterations": -1}, "iterations=-1 must be"),
        ("dp-muon", {"rest": "none"}, "rest=none must be adam or sgd"),
        ("geoclip", {"speed": 2.0}, "speed=2.0 must lie in"),
        ("geoclip", {"spread": 0.5}, "spread=0.5 must be at least 1"),
        ("geoclip", {"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be positive"),
    ],
)
def test_wrong_options_are_refused_by_their_names(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_method(name, **options)
