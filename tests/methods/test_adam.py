"""Are AdamBC, decoupled decay, noise schedules and the pace of DP-Adam-AC their equations?"""

import time
from math import exp

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from conftest import make_toy
from method_runs import LOSS, Spy, flat, run
from vestige import accounting
from vestige.mechanism.adaptive_clipping import Paced, Quantile
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.optim.rules import AdamBC
from vestige.randomness import noise_schedules
from vestige.randomness.lattice import charged
from vestige.training import planning


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


@pytest.mark.slow
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
        name="mixed", rule=make_method("dp-adambc").rule, schedule=noise_schedules.ExponentialDecay(0.5), clip=Flat(0.7)
    )
    training = run(method, steps=7)
    training.state.optimizer.hear = heard.append  # the test listens in
    training.state.optimizer.step = lambda: None
    list(training)
    batch = 0.3 * 60
    size = training.layout.size
    expected = [0.7 * charged(0.5 ** int(t * 0.3 + 1e-9), size) / batch for t in range(7)]
    np.testing.assert_allclose(heard, expected, rtol=1e-12)


def test_adam_bc_refuses_a_memory_that_hides_its_noise():
    with pytest.raises(ValueError, match="must know the noise"):
        Method(name="x", memory=make_method("fo-dp-sgd").memory, rule=make_method("dp-adambc").rule)


def test_decoupled_decay_shrinks_by_its_own_amount_when_nothing_else_moves():
    model, data = make_toy()
    before = flat(model)
    zero = (data[0], data[1])
    training = vestige.train(
        model, lambda out, _: out.sum() * 0, zero, method=make_method("dp-adamw", weight_decay=0.1), sample_rate=0.3, steps=1,
        noise_multiplier=1e-30, delta=1e-5, lr=0.5, reproducible=1,
    )  # fmt: skip
    list(training)
    np.testing.assert_allclose(flat(model), before * (1 - 0.5 * 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (noise_schedules.LinearDecay(0.25), [1, 0.75, 0.5, 0.25, 0.1]),
        (noise_schedules.TimeDecay(1.0), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        (noise_schedules.StepDecay(0.5, 2), [1, 1, 0.5, 0.5, 0.25]),
        (noise_schedules.ExponentialDecay(0.9), [0.9**e for e in range(5)]),
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
    method = Method(name="x", schedule=noise_schedules.ExponentialDecay(0.999))
    begin = time.perf_counter()
    z = accounting.calibrate(lambda z: planning.questions(method, 0.02, z, 50_000), 3.0, 1e-5)
    history = planning.questions(method, 0.02, z, 50_000)
    assert len(history) == 1000
    assert accounting.epsilon(history, 1e-5) <= 3.0
    assert time.perf_counter() - begin < 120


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
    training = run(make_method("dp-adam-ac", quantile_noise=1.0), steps=6, lr=0.01)
    for _ in training:
        pass
    assert training.state.clip["pace"] != 1.0
    assert training.state.optimizer.param_groups[0]["lr"] != 0.01
