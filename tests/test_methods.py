"""Is each method the one its paper describes? The deciding test of each, against oracles that share no code with it."""

import json
import subprocess
import sys
import time
from math import exp, sqrt

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import nn

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from vestige import accounting
from vestige.engines.reference import Reference, add_clipped
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import Automatic, Counted, Paced, Quantile
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import Flat
from vestige.mechanism.curator import Curator
from vestige.mechanism.examples import Examples
from vestige.methods.base import Method
from vestige.methods.registry import METHODS, build
from vestige.optim import averaging
from vestige.optim.filters import SECOND_ORDER, LowPass, SelfTuning, Smoothed
from vestige.optim.probes import AlongLastStep, Importance
from vestige.optim.rules import AdamBC
from vestige.questions import CyclicGaussian, SampledGaussian
from vestige.randomness import correlated, schedules
from vestige.randomness.keys import Randomness
from vestige.randomness.release import Release
from vestige.randomness.sampling import CyclicPoisson, Poisson
from vestige.training import planning
from vestige.training.loop import Asking, TrainingState

LOSS = nn.functional.cross_entropy


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def run(method, *, steps=5, rate=0.3, noise=1.0, lr=0.3, data=None, **changes):
    model, toy = make_toy()
    limits = {"sample_rate": rate, "steps": steps, "noise_multiplier": noise, "delta": 1e-5, "lr": lr}
    return vestige.train(model, LOSS, data or toy, method=method, reproducible=4, **limits, **changes)


class Spy:
    """A witness that keeps every un-noised sum and every noise vector."""

    def __init__(self):
        self.sums, self.noises = [], []

    def __call__(self, total, noise):
        self.sums.append(total.double().numpy())
        self.noises.append(noise.double().numpy().copy())


def curator_of(model, data, *, rate=1.0, spy=None, asked=None, sampling=None, seed=1):
    layout = Layout.of(model)
    return Curator(
        Examples(data, torch.device("cpu")),
        Reference(model, LOSS, layout),
        layout,
        sampling or Poisson(rate),
        Randomness.reproducible(seed),
        Charges((lambda question, **_: asked.append(question)) if asked is not None else (lambda *_, **__: None)),
        nonprivate_witness=spy,
    )


def gradients_at(model, vector, data):
    """Per-example gradients in float64 at a flat parameter vector."""
    clone = make_toy()[0]
    nn.utils.vector_to_parameters(torch.as_tensor(vector, dtype=torch.float32), clone.parameters())
    return example_gradients(clone, *data)


# --- Adam ------------------------------------------------------------------------------------------------------------


def adam_bc(gradients, stds, lr, betas, floor, decay=0.0, start=1.0):
    """The equations in float64: Phi averaged like v, both bias-corrected, the floor under their difference."""
    theta, m, v, phi = np.full(gradients.shape[1], start), 0.0, 0.0, 0.0
    for t, (g, s) in enumerate(zip(gradients, stds, strict=True), start=1):
        m, v, phi = (
            betas[0] * m + (1 - betas[0]) * g,
            betas[1] * v + (1 - betas[1]) * g**2,
            betas[1] * phi + (1 - betas[1]) * s**2,
        )
        corrected = v / (1 - betas[1] ** t) - phi / (1 - betas[1] ** t)
        theta = theta * (1 - lr * decay) - lr * m / (1 - betas[0] ** t) / np.sqrt(np.maximum(corrected, floor))
    return theta


@pytest.mark.parametrize("per_coordinate", [False, True])
def test_adam_bc_is_its_equations_while_the_noise_changes(per_coordinate):
    rng = np.random.default_rng(0)
    gradients, stds = rng.normal(size=(40, 12)) * 0.3, np.geomspace(0.5, 0.1, 40)
    p = nn.Parameter(torch.ones(12))
    optimizer = AdamBC([p], lr=0.01, floor=1e-4, weight_decay=0.1)
    for g, s in zip(gradients, stds, strict=True):
        p.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.hear(torch.full((12,), s) if per_coordinate else float(s))
        optimizer.step()
    expected = adam_bc(gradients, stds, 0.01, (0.9, 0.999), 1e-4, decay=0.1)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=2e-4)


def test_adam_bc_recovers_the_signal_and_on_pure_noise_divides_by_its_floor():
    rng = np.random.default_rng(1)
    p = nn.Parameter(torch.zeros(2000))
    optimizer = AdamBC([p], lr=0.0 + 1e-9, floor=1e-8)
    signal = torch.cat([torch.full((1000,), 0.5), torch.zeros(1000)])
    for _ in range(3000):
        p.grad = signal + torch.tensor(rng.normal(size=2000), dtype=torch.float32)
        optimizer.hear(1.0)
        optimizer.step()
    state = optimizer.state[p]
    left = state["exp_avg_sq"] / (1 - 0.999**3000) - state["noise"] / (1 - 0.999**3000)
    assert left[:1000].mean() == pytest.approx(0.25, abs=0.01)
    assert left[1000:].mean() == pytest.approx(0.0, abs=0.01)


def test_adam_bc_without_noise_is_adam_with_the_floor_inside_the_root():
    gradients = np.random.default_rng(2).normal(size=(30, 5))
    p = nn.Parameter(torch.zeros(5))
    optimizer = AdamBC([p], lr=0.1, floor=1e-6)
    for g in gradients:
        p.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.hear(0.0)
        optimizer.step()
    np.testing.assert_allclose(
        p.detach().numpy(), adam_bc(gradients, np.zeros(30), 0.1, (0.9, 0.999), 1e-6, start=0.0), rtol=1e-3, atol=1e-5
    )


def test_adam_bc_hears_the_noise_that_was_really_added():
    heard = []
    method = Method(
        name="mixed", rule=build("dp-adambc").rule, schedule=schedules.ExponentialDecay(0.5), clip=Flat(0.7)
    )
    training = run(method, steps=7)
    training.state.optimizer.hear = heard.append  # the test listens in
    training.state.optimizer.step = lambda: None
    list(training)
    batch = 0.3 * 60
    expected = [2.0**-0 * 0.7 * 0.5 ** int(t * 0.3 + 1e-9) / batch for t in range(7)]
    np.testing.assert_allclose(heard, expected, rtol=1e-12)


def test_adam_bc_refuses_a_memory_that_hides_its_noise():
    with pytest.raises(ValueError, match="must know the noise"):
        Method(name="x", memory=build("fo-dp-sgd").memory, rule=build("dp-adambc").rule)


def test_decoupled_decay_shrinks_by_its_own_amount_when_nothing_else_moves():
    model, data = make_toy()
    before = flat(model)
    zero = (data[0], data[1])
    training = vestige.train(
        model, lambda out, _: out.sum() * 0, zero, method=build("dp-adamw", weight_decay=0.1), sample_rate=0.3, steps=1,
        noise_multiplier=1e-30, delta=1e-5, lr=0.5, reproducible=1,
    )  # fmt: skip
    list(training)
    np.testing.assert_allclose(flat(model), before * (1 - 0.5 * 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedules.LinearDecay(0.25), [1, 0.75, 0.5, 0.25, 0.1]),
        (schedules.TimeDecay(1.0), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        (schedules.StepDecay(0.5, 2), [1, 1, 0.5, 0.5, 0.25]),
        (schedules.ExponentialDecay(0.9), [0.9**e for e in range(5)]),
    ],
)
def test_schedules_are_their_formulas_and_each_step_pays_and_gets_its_level(schedule, expected):
    np.testing.assert_allclose([schedule.factor(e) for e in range(5)], expected)
    method = Method(name="x", schedule=schedule)
    spy = Spy()
    model, data = make_toy(features=60)
    training = vestige.train(
        model,
        LOSS,
        data,
        method=method,
        sample_rate=0.5,
        steps=10,
        noise_multiplier=3.0,
        delta=1e-5,
        lr=0.1,
        reproducible=1,
    )
    training.curator._nonprivate_witness = spy
    list(training)
    levels = np.repeat(expected, 2) * 3.0
    assert [q.multiplier for q in training.ledger.spent.elements()] == pytest.approx(list(levels))
    measured = [noise.std() for noise in spy.noises]
    np.testing.assert_allclose(measured, levels, rtol=0.15)  # 450 coordinates: 3.3% each
    assert any(abs(m / (1.5 * l) - 1) > 0.15 for m, l in zip(measured, levels, strict=True))


@pytest.mark.slow
def test_a_thousand_noise_levels_are_planned_in_seconds():
    method = Method(name="x", schedule=schedules.ExponentialDecay(0.999))
    begin = time.perf_counter()
    z = accounting.calibrate(lambda z: planning.questions(method, 0.02, z, 50_000), 3.0, 1e-5)
    history = planning.questions(method, 0.02, z, 50_000)
    assert len(history) == 1000
    assert accounting.epsilon(history, 1e-5) <= 3.0
    assert time.perf_counter() - begin < 120


# --- clips -----------------------------------------------------------------------------------------------------------


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


def test_the_pace_of_dp_adam_ac_follows_the_released_fraction():
    clip = Paced(Quantile(3.0, 0.8, 0.2, lowest=0.1, highest=10.0))
    state = clip.init()
    assert clip.learn(0.8, state) == {"bound": 3.0, "pace": 1.0}  # in range: constant
    assert clip.learn(0.95, state)["pace"] == pytest.approx(1.01)
    assert clip.learn(0.5, state)["pace"] == pytest.approx(0.995)
    assert clip.learn(0.5, state)["bound"] == pytest.approx(3 * exp(0.06))
    for _ in range(1000):
        state = clip.learn(1.0, state)
    assert state == {"bound": 0.1, "pace": 2.0}


def test_the_learning_rate_really_follows_the_pace():
    training = run(build("dp-adam-ac", quantile_noise=1.0), steps=6, lr=0.01)
    for _ in training:
        pass
    assert training.state.clip["pace"] != 1.0
    assert training.state.optimizer.param_groups[0]["lr"] != 0.01


def test_automatic_clipping_is_its_formula():
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0], [torch.inf, 1.0]])
    into = torch.zeros(2)
    layout = Layout.of(nn.Linear(2, 1, bias=False))
    add_clipped({"weight": rows[:, None, :]}, Automatic(2.0, 0.01), layout, into)
    expected = 2 * np.array([3, 4]) / 5.01 + 2 * np.array([0.03, 0.04]) / 0.06
    np.testing.assert_allclose(into, expected, rtol=1e-6)


# --- sharpness -------------------------------------------------------------------------------------------------------


def test_dp_sat_asks_where_the_last_release_points_and_asks_once():
    model, data = make_toy()
    spy, asked = Spy(), []
    method = build("dp-sat", rho=0.5)
    state = TrainingState(model, method, Layout.of(model), 0.3)
    curator = curator_of(model, data, spy=spy, asked=asked)
    points = []
    for _ in range(3):
        points.append(flat(model).double().numpy())
        vestige.training.loop.step(state, method, curator, 1.0)
    assert len(asked) == 3
    last = None
    for theta, total, noise in zip(points, spy.sums, spy.noises, strict=True):
        climb = 0 if last is None else 0.5 * last / np.linalg.norm(last)
        np.testing.assert_allclose(total, clip_and_sum(gradients_at(model, theta + climb, data), 1.0), atol=2e-5)
        last = total + noise
    assert np.abs(points[2] - points[1]).max() > 0


def test_the_momentum_form_of_dp_sat_climbs_back_along_the_last_move():
    model, data = make_toy()
    spy = Spy()
    method = build("dp-sat", rho=0.5, along="move")
    state = TrainingState(model, method, Layout.of(model), 0.3)
    curator = curator_of(model, data, spy=spy)
    points = []
    for _ in range(3):
        points.append(flat(model).double().numpy())
        vestige.training.loop.step(state, method, curator, 1.0)
    back = points[1] - points[2]
    at = points[2] + 0.5 * back / np.linalg.norm(back)
    np.testing.assert_allclose(spy.sums[2], clip_and_sum(gradients_at(model, at, data), 1.0), atol=2e-5)


@pytest.mark.parametrize(("ascent", "questions", "noise"), [("fresh", 2, 1.0), ("same", 1, sqrt(2)), ("own", 1, 1.0)])
def test_dp_sam_asks_at_the_top_of_its_ascent_at_its_own_price(ascent, questions, noise):
    model, data = make_toy(features=60)
    spy, asked = Spy(), []
    curator = curator_of(model, data, spy=spy, asked=asked, rate=0.5)
    point = {name: p.detach() for name, p in model.named_parameters()}
    method = build("dp-sam", rho=0.4, ascent=ascent)
    method.probe.ask(Asking(curator, method, method.clip, 1.0, 0), point, {})
    assert asked == [SampledGaussian(0.5, 1.0)] * questions
    assert np.concatenate(spy.noises).std() == pytest.approx(noise, rel=0.1)
    assert np.concatenate(spy.noises).std() != pytest.approx(noise * 1.4, rel=0.1)  # the test can tell them apart
    theta = flat(model).double().numpy()
    samples = [Poisson(0.5).draw(60, index, Randomness.reproducible(1)) for index in range(2)]
    who = samples[0] if ascent != "fresh" else samples[1]
    chosen = (data[0][who], data[1][who])

    def gradients(at, rows):
        clone = make_toy(features=60)[0]
        nn.utils.vector_to_parameters(torch.as_tensor(at, dtype=torch.float32), clone.parameters())
        return example_gradients(clone, *rows)

    if ascent == "own":
        own = gradients(theta, chosen)
        rows = np.stack(
            [
                gradients(theta + 0.4 * g / np.linalg.norm(g), (chosen[0][i : i + 1], chosen[1][i : i + 1]))[0]
                for i, g in enumerate(own)
            ]
        )
    else:
        first = spy.sums[0] + spy.noises[0]
        rows = gradients(theta + 0.4 * first / np.linalg.norm(first), chosen)
    np.testing.assert_allclose(spy.sums[-1], clip_and_sum(rows, 1.0), atol=5e-5)


# --- importance sampling ---------------------------------------------------------------------------------------------


def test_importance_sampling_is_unbiased_and_every_contribution_has_one_norm():
    model, data = make_toy(examples=40)
    clip, boost, rate = 0.8, 2.0, 0.25
    norms = np.linalg.norm(example_gradients(model, *data), axis=1)
    target = clip_and_sum(example_gradients(model, *data), clip) / 40
    spy = Spy()
    curator = curator_of(model, data, rate=rate, spy=spy)
    point = {name: p.detach() for name, p in model.named_parameters()}
    method = build("dp-is", clip=clip, boost=boost)
    total = np.zeros_like(target)
    rounds = 500
    norm_sum = float(np.minimum(norms, clip).sum())
    smallest = clip * 40 / boost
    norm_sum = max(norm_sum, smallest)
    for step in range(rounds):
        state = {"step": 1, "norm_sum": norm_sum}  # a refresh is not due: K is public
        method.probe.ask(Asking(curator, method, method.clip, 1.0, step), point, state)
        total += spy.sums[-1]
    spread = np.std(np.stack(spy.sums), axis=0) / (rate * 40) / sqrt(rounds)
    error = (total / rounds / (rate * 40) - target) / spread
    assert np.abs(error).max() < 4.5
    assert np.sqrt((error**2).mean()) < 1.5
    alone = curator_of(model, (data[0][:1], data[1][:1]), rate=1.0, spy=spy)
    spy.sums.clear()
    for step in range(30):
        method.probe.ask(Asking(alone, method, method.clip, 1.0, step), point, {"step": 1, "norm_sum": clip})
    lengths = np.array([np.linalg.norm(s) for s in spy.sums])
    np.testing.assert_allclose(lengths[lengths > 0], clip, rtol=1e-5)  # K / N with one example
    assert (lengths > 0).any()


def test_the_normaliser_is_an_estimate_of_the_sum_of_norms_and_is_charged():
    model, data = make_toy()
    asked = []
    curator = curator_of(model, data, rate=0.5, asked=asked)
    point = {name: p.detach() for name, p in model.named_parameters()}
    truth = np.minimum(np.linalg.norm(example_gradients(model, *data), axis=1), 0.9).sum()
    seen = [curator.norms(point, 0.9, 2.0, step=s) for s in range(100)]
    assert set(asked) == {SampledGaussian(0.5, 2.0)}
    assert np.mean(seen) == pytest.approx(truth, abs=4 * np.std(seen) / 10)
    probe = Importance(1.0, 2.0, 5.0)
    assert probe.questions(0.1, 1.0, 0) == (SampledGaussian(0.1, 5.0), SampledGaussian(0.2, 1.0))
    assert probe.questions(0.1, 1.0, 3) == (SampledGaussian(0.2, 1.0),)


# --- filters ---------------------------------------------------------------------------------------------------------


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
    method = build("disk", kappa=0.5, extrapolation=0.7)
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


# --- correlated noise ------------------------------------------------------------------------------------------------


def dense(noise, rate, steps):
    """The matrix from fresh noise to the noise of each step, column by column."""
    columns = []
    for k in range(steps):
        stream = noise.start(rate, steps)
        columns.append(
            [float(stream.next(torch.tensor([1.0 if t == k else 0.0], dtype=torch.float64))) for t in range(steps)]
        )
    return np.array(columns).T


@pytest.mark.parametrize("noise", [correlated.Banded(4), correlated.Buffered(2), correlated.Tree(2)])
def test_correlated_noise_is_its_matrix_and_its_errors_and_gains_are_as_computed(noise):
    steps, rate = 48, 0.25
    matrix = dense(noise, rate, steps)
    stream = noise.start(rate, steps)
    np.testing.assert_allclose([stream.gain(t) for t in range(steps)], np.linalg.norm(matrix, axis=1), rtol=1e-6)
    prefix = np.linalg.norm(np.tril(np.ones((steps, steps))) @ matrix, axis=1) ** 2
    assert noise.walk(rate, steps) > 0
    if isinstance(noise, correlated.Banded):
        c = correlated.banded_coefficients(4, steps)
        strategy = sum(np.diag(np.full(steps - k, c[k]), -k) for k in range(4))
        np.testing.assert_allclose(strategy @ matrix, np.eye(steps), atol=1e-8)  # C (C^-1 Z) = Z
        np.testing.assert_allclose(prefix, correlated.prefix_variances(c, steps), rtol=1e-6)
        assert np.linalg.norm(c) == pytest.approx(1.0)
        assert prefix.mean() < np.arange(1, steps + 1).mean()  # better than white noise
    if isinstance(noise, correlated.Buffered):
        scales, decays = correlated.buffered_coefficients(2, steps, 4)
        column = np.array(
            [1.0] + [sum(s * d ** (k - 1) for s, d in zip(scales, decays, strict=True)) for k in range(1, steps)]
        )
        strategy = sum(np.diag(np.full(steps - k, column[k]), -k) for k in range(steps))
        np.testing.assert_allclose(strategy @ matrix, np.eye(steps), atol=1e-7)
        for visits in range(1, 13):  # every prefix of an example's visits, every part
            for first in range(4):
                touched = strategy[:, first : first + 4 * visits : 4].sum(1)
                assert touched @ touched <= visits * stream.scale**2 * (1 + 1e-9)
    if isinstance(noise, correlated.Tree):
        np.testing.assert_allclose(prefix, correlated.tree_variances(8, steps))


def test_the_noise_of_a_tree_is_one_node_per_binary_digit():
    stream = correlated.Tree(1).start(1 / 64, 64)
    total = 0.0
    for t in range(1, 64):
        total += float(stream.next(torch.ones(1)))
        assert total == t.bit_count()


def test_the_sensitivity_of_a_tree_counts_visits_in_nodes():
    assert correlated.tree_per_visit(64, 1) == 7  # one visit, at the first leaf: levels 0 to 6
    nodes = [(t - (t & -t), t) for t in range(1, 9)]
    for visits, expected in (((0,), 4), ((0, 4), None)):
        counts = [sum(a <= v < b for v in visits) for a, b in nodes]
        if expected:
            assert sum(c * c for c in counts) == expected
        assert sum(c * c for c in counts) / len(visits) <= correlated.tree_per_visit(4, 2)


def test_cyclic_sampling_takes_parts_in_turn_and_one_band_is_poisson():
    randomness = Randomness.reproducible(0)
    sampling = CyclicPoisson(0.2, 4)
    samples = [set(sampling.draw(2000, t, randomness).tolist()) for t in range(8)]
    for t in range(8):
        for s in range(t):
            assert bool(samples[t] & samples[s]) == (t % 4 == s % 4)
    assert np.mean([len(s) for s in samples]) == pytest.approx(400, rel=0.1)
    assert torch.equal(CyclicPoisson(0.3, 1).draw(500, 3, randomness), Poisson(0.3).draw(500, 3, randomness))
    with pytest.raises(ValueError, match="at most 3 bands"):
        CyclicPoisson(0.3, 4)


def test_a_correlated_run_has_an_epsilon_and_a_ledger_of_cyclic_questions():
    model, data = make_toy()
    training = vestige.train(
        model, LOSS, data, method="dp-bandmf", sample_rate=0.2, steps=10, noise_multiplier=2.0, delta=1e-5, lr=0.1
    )
    list(training)
    assert training.ledger.spent == {CyclicGaussian(0.8, 2.0, 4): 10}
    expected = accounting.epsilon({SampledGaussian(0.8, 2.0): 3}, 1e-5)
    assert training.guarantee().epsilon == pytest.approx(expected, rel=1e-6)


def test_past_noise_is_in_no_checkpoint_and_a_secret_correlated_run_does_not_resume(tmp_path):
    spy = Spy()
    model, data = make_toy()
    changes = {"sample_rate": 0.2, "steps": 8, "noise_multiplier": 2.0, "delta": 1e-5, "lr": 0.1}
    training = vestige.train(model, LOSS, data, method="dp-blt", out=tmp_path / "run", **changes)
    training.curator._nonprivate_witness = spy
    for position, _ in enumerate(training):
        if position == 4:
            break
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)

    def tensors(part):
        if isinstance(part, torch.Tensor):
            yield part
        for value in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ():
            yield from tensors(value)

    kept = [t.double().ravel().numpy() for t in tensors(saved) if t.numel() >= 20]
    for secret in spy.noises + spy.sums:
        for tensor in kept:
            piece = secret[: len(tensor)] if len(tensor) <= len(secret) else None
            if piece is not None and np.linalg.norm(tensor) > 0:
                assert abs(piece @ tensor) < 0.98 * np.linalg.norm(piece) * np.linalg.norm(tensor)
    with pytest.raises(ValueError, match="past noise would uncover past sums"):
        vestige.train(make_toy()[0], LOSS, data, method="dp-blt", out=tmp_path / "run", resume=True, **changes)


@pytest.mark.parametrize(
    "parts",
    [
        {"clip": Quantile()},
        {"schedule": schedules.ExponentialDecay()},
        {"probe": build("dp-sam").probe},
        {"probe": build("dp-is").probe},
    ],
)
def test_correlated_noise_without_a_theorem_is_refused(parts):
    with pytest.raises(ValueError, match="correlated noise has a theorem"):
        Method(name="x", noise=correlated.Banded(), **parts)


# --- recipes any method can take -------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [averaging.ExponentialAverage(0.9), averaging.Polyak()])
def test_the_average_is_its_formula_and_is_what_is_evaluated_and_kept(average, tmp_path):
    method = Method(name="dp-sgd", average=average)
    training = run(method, steps=12, out=tmp_path / "run")
    mean, after = flat(training.model).double().numpy(), []
    for t, _ in enumerate(training):
        after.append(flat(training.model).double().numpy())
        decay = min(0.9, (1 + t) / (10 + t)) if isinstance(average, averaging.ExponentialAverage) else t / (t + 1)
        mean = decay * mean + (1 - decay) * after[-1]
    with training.averaged():
        np.testing.assert_allclose(flat(training.model), mean, rtol=1e-5, atol=1e-6)
    assert np.array_equal(flat(training.model).double().numpy(), after[-1])
    training.finish({"accuracy": None})
    kept = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    np.testing.assert_allclose(torch.cat([v.ravel() for v in kept.values()]), mean, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("name", ["dp-sam", "dp-is", "dp-quantile", "adp-adamw", "dp-blt", "dp-adam-ac"])
def test_a_loop_of_ones_own_refuses_what_it_cannot_answer_as_priced(name):
    from torch.utils.data import DataLoader, TensorDataset

    model, data = make_toy()
    with pytest.raises(ValueError, match=r"use vestige\.train"):
        vestige.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), method=name, noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(*data), batch_size=6), max_grad_norm=1.0,
        )  # fmt: skip


# --- the command line ------------------------------------------------------------------------------------------------


def vestige_command(*words):
    return subprocess.run(
        [sys.executable, "-m", "vestige.cli.main", *words], capture_output=True, text=True, check=False
    )


def test_the_table_and_the_pages_say_what_the_registry_knows():
    table = json.loads(vestige_command("methods", "--json").stdout)["methods"]
    assert [row["name"] for row in table] == list(METHODS)
    for row in table:
        assert row["bibtex"].startswith("@"), row["name"]
        assert {"parts", "defaults", "releases", "price", "privacy", "copies", "neutral", "reference"} <= row.keys()
    page = vestige_command("methods", "dp-is").stdout
    for words in ("importance", "SGM(boost q, z)", "@inproceedings", "--boost"):
        assert words.lower() in page.lower()
    wrong = vestige_command("methods", "dp-satt")
    assert wrong.returncode == 2
    assert "did you mean 'dp-sat'" in wrong.stderr


def test_one_option_has_one_type_whichever_method_takes_it():
    types = {}
    for entry in METHODS.values():
        for name, option in entry.options.items():
            kind = option.annotation.__origin__ if hasattr(option.annotation, "__metadata__") else option.annotation
            assert types.setdefault(name, kind) == kind, f"{entry.name}: --{name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_from_the_command_line_with_its_defaults(name, tmp_path):
    words = f"train --task digits-mlp --method {name} --epsilon 8 --delta 1e-5 --sample-rate 0.1 --steps 30 --json"
    done = vestige_command(*words.split(), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["epsilon"] <= 8
    assert result["accuracy"] > 0.15
    verdict = json.loads(vestige_command("verify", str(tmp_path / "run"), "--json").stdout)
    assert verdict["verified"]
    assert verdict["epsilon"] == pytest.approx(result["epsilon"])
