"""Is the gradient asked where the method says: at the top of an ascent, or of the examples that matter?"""

from math import sqrt

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from method_runs import Spy, curator_of, flat, gradients_at
from vestige.layout import Layout
from vestige.methods.registry import make_method
from vestige.optim.gradient_query_points import Importance
from vestige.priced_questions import SampledGaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson
from vestige.training.loop import Asking, TrainingState

# --- sharpness -------------------------------------------------------------------------------------------------------


def test_dp_sat_asks_where_the_last_release_points_and_asks_once():
    model, data = make_toy()
    spy, asked = Spy(), []
    method = make_method("dp-sat", rho=0.5)
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
    method = make_method("dp-sat", rho=0.5, along="move")
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
    method = make_method("dp-sam", rho=0.4, ascent=ascent)
    method.probe.ask(Asking(curator, method, method.clip, 1.0, 0), point, {})
    assert asked == [SampledGaussian(0.5, 1.0)] * questions
    assert np.concatenate(spy.noises).std() == pytest.approx(noise, rel=0.1)
    assert np.concatenate(spy.noises).std() != pytest.approx(noise * 1.4, rel=0.1)  # the test can tell them apart
    assert len({each.tobytes() for each in spy.noises}) == len(spy.noises)  # each answer has noise of its own
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


@pytest.mark.slow
def test_importance_sampling_is_unbiased_and_every_contribution_has_one_norm():
    model, data = make_toy(examples=40)
    clip, boost, rate = 0.8, 2.0, 0.25
    norms = np.linalg.norm(example_gradients(model, *data), axis=1)
    target = clip_and_sum(example_gradients(model, *data), clip) / 40
    spy = Spy()
    curator = curator_of(model, data, rate=rate, spy=spy)
    point = {name: p.detach() for name, p in model.named_parameters()}
    method = make_method("dp-is", clip=clip, boost=boost)
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
