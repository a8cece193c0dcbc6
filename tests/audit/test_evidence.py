"""Is the attack the best one, and is the canary an example like any other? Against closed forms and one run alone."""

import numpy as np
import pytest
import torch
from torch import nn

from vestige.audit.canaries import LARGE, make_canary, planted_gradient
from vestige.audit.canary_likelihood_ratio import Evidence, noise_matrix
from vestige.audit.made_up_task import stand_in
from vestige.audit.stacked import AuditedStack
from vestige.compare.stacked import Stack, StackedRun
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.methods.registry import make_method
from vestige.randomness.correlated import White


def test_scores_are_log_likelihood_ratios():
    random, q, std = np.random.default_rng(0), 0.3, 1.7
    share = torch.tensor([0.6, 0.8, 0.0])
    answers = random.normal(0, std, (5, 3))
    evidence, expected = Evidence(q), 0.0
    for index, x in enumerate(answers):
        evidence.add(index, torch.tensor(x), share, std)
        inside = np.exp(-((x - share.numpy()) ** 2).sum() / (2 * std**2))
        outside = np.exp(-(x**2).sum() / (2 * std**2))
        expected += np.log((1 - q) + q * inside / outside)
    assert float(evidence.scores(White(), 5, correlated=False)) == pytest.approx(expected)


def test_two_answers_on_one_sample_share_their_coin():
    evidence, share = Evidence(0.3), torch.tensor([1.0])
    evidence.add(0, torch.tensor([0.2]), share, 1.0)
    evidence.add(0, torch.tensor([0.9]), share, 1.0)
    exponent = (0.2 - 0.5) + (0.9 - 0.5)
    assert float(evidence.scores(White(), 1, correlated=False)) == pytest.approx(np.log(0.7 + 0.3 * np.exp(exponent)))
    evidence.forget(0)
    assert evidence.scores(White(), 1, correlated=False).shape == (0,)


def test_correlated_noise_is_whitened():
    noise = make_method("dp-blt").noise
    matrix = noise_matrix(noise.start(0.5, 6), 6)
    assert torch.allclose(matrix, matrix.tril())
    assert not torch.allclose(matrix, torch.eye(6).double())
    covariance = matrix @ matrix.t()
    evidence = Evidence(0.5)
    values = torch.randn(6, dtype=torch.float64)
    for step, value in enumerate(values):
        # noise of each step: its own deviation; a share of norm 2
        evidence.add(step, 2 * value.view(1), torch.tensor([2.0]), 2 * covariance[step, step].sqrt())
    expected = torch.linalg.solve(covariance, torch.ones(6, dtype=torch.float64)) @ values
    assert float(evidence.scores(noise, 6, correlated=True)) == pytest.approx(float(expected))


def test_a_planted_gradient_is_large_in_every_group_and_foreign_to_the_others():
    task = stand_in(30)
    model = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4))
    layout = Layout.of(model, Layers())
    vector = planted_gradient(model, layout, task.train[0], torch.Generator().manual_seed(0))
    norms = [
        sum(float(vector[s.start : s.stop].square().sum()) for s in layout.segments if s.group == group) ** 0.5
        for group in range(layout.groups)
    ]
    assert norms == pytest.approx([LARGE] * layout.groups, rel=1e-4)
    # the first layer's part is orthogonal to every gradient of the data
    point = {name: p.detach() for name, p in model.named_parameters()}
    flat = Layout.of(model)
    engine = Reference(model, nn.functional.cross_entropy, flat)
    first = vector.clone()
    first[flat.segments[0].stop :] = 0
    for row in range(5):
        into = torch.zeros(flat.size)
        engine([part[row : row + 1] for part in task.train], point, make_method("dp-sgd").clip, into)
        assert abs(float(into @ first)) < 1e-3 * LARGE * float(into.norm())


def made(kind, present, seeds):
    task = stand_in(6)
    method = make_method("dp-sgd")
    model = task.model
    canary = make_canary(kind, model, Layout.of(model), task.train, task.test, 0)
    data = tuple(torch.cat(pair) for pair in zip(task.train, (canary.inputs, canary.target), strict=True))
    members = [StackedRun(model, method, 1.0, 0.1, seed=seed) for seed in seeds]
    stack = AuditedStack(members, data, sample_rate=0.5, steps=3, device=torch.device("cpu"))
    stack.plant(canary, present)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in stack.train():
        pass
    model.load_state_dict(state)
    return stack, data, method, model


def test_a_canary_by_its_input_is_an_example_like_any_other():
    """Where it is present, the runs are bit for bit those of an ordinary stack with one more row."""
    stack, data, method, model = made("blank", [True, True], [1, 2])
    plain = Stack(
        [StackedRun(model, method, 1.0, 0.1, seed=seed) for seed in (1, 2)],
        data, sample_rate=0.5, steps=3, device=torch.device("cpu"),
    )  # fmt: skip
    for _ in plain.train():
        pass
    assert torch.equal(stack.parameters, plain.parameters)


def test_where_it_is_absent_its_row_adds_nothing():
    stack, data, method, model = made("blank", [False, True], [2, 2])
    assert not torch.equal(stack.parameters[0], stack.parameters[1])
    task = stand_in(6)
    broken = (torch.cat([task.train[0], torch.full((1, 16), torch.nan)]), data[1])
    plain = Stack(
        [StackedRun(task.model, method, 1.0, 0.1, seed=2)], broken, sample_rate=0.5, steps=3, device=torch.device("cpu")
    )
    for _ in plain.train():
        pass
    assert torch.equal(stack.parameters[0], plain.parameters[0])


@pytest.mark.parametrize("kind", ["mislabelled", "blank"])
def test_canaries_by_input_are_made_of_public_examples(kind):
    task = stand_in(10)
    canary = make_canary(kind, task.model, Layout.of(task.model), task.train, task.test, 3)
    same = (task.train[0] == canary.inputs).all(dim=1)
    assert not same.any()
    if kind == "mislabelled":
        twin = (task.test[0] == canary.inputs).all(dim=1)
        assert (task.test[1][twin] != canary.target).all()
    with pytest.raises(ValueError, match="canary='odd'"):
        make_canary("odd", task.model, Layout.of(task.model), task.train, task.test, 0)
