"""Are the moments of scattering features bounded, noised, charged, and asked once?"""

import json

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

import vestige
from conftest import make_toy
from vestige import accounting
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.charges import Charges
from vestige.mechanism.curator import Curator
from vestige.mechanism.examples import Examples
from vestige.mechanism.feature_moments import PrivateMoments, Standardise, with_moments
from vestige.priced_questions import Gaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson
from vestige.tasks.models import scattering_linear
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
MOMENTS = PrivateMoments(8.0, (3.0, 3.0))


def features(examples=80, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 27, 3, 3, generator=generator) * 0.5 + torch.linspace(-1, 1, 27)[:, None, None]
    return x, torch.randint(4, (examples,), generator=generator)


def train(out=None, moments=MOMENTS, **changes):
    torch.manual_seed(1)
    model = with_moments(scattering_linear(27, 3, 4))
    settings = {"sample_rate": 0.2, "steps": 12, "delta": 1e-5, "lr": 0.1, "epsilon": 4.0, **changes}
    return vestige.train(model, LOSS, features(), method=vestige.dp_sgd(), normalise=moments, out=out, **settings)


def test_sums_are_bounded_and_noised_with_the_stated_deviation():
    x, y = features(400)
    model, _ = make_toy()
    asked, noises, moments = [], [], PrivateMoments(8.0, (1.5, 0.7))
    exact = torch.zeros(2, 27, dtype=torch.float64)
    for example in x.double():  # one at a time
        mean, square = example.mean((1, 2)), example.square().mean((1, 2))
        for row, vector, bound in zip(exact, (mean, square), moments.bounds, strict=True):
            row += vector * min(1.0, bound / float(vector.norm()))
    for seed in range(40):
        layout = Layout.of(model)
        curator = Curator(
            Examples((x, y), torch.device("cpu")), Reference(model, LOSS, layout), layout, Poisson(0.5),
            Randomness.reproducible(seed), Charges(lambda question, **place: asked.append((question, place))),
        )  # fmt: skip
        totals = curator.sums(moments.of, moments.bounds, moments.multiplier, step=-1)
        noises.append((totals - exact) / torch.tensor(moments.bounds, dtype=torch.float64)[:, None])
    noise = np.concatenate([n.numpy().ravel() for n in noises])
    assert kstest(noise, "norm", (0, 8.0)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert kstest(noise, "norm", (0, 8.0 * wrong)).pvalue < 1e-6
    assert asked[:2] == [
        (Gaussian(8.0), {"step": -1, "part": 0, "sensitivity": 1.5}),
        (Gaussian(8.0), {"step": -1, "part": 1, "sensitivity": 0.7}),
    ]


def test_the_moments_are_part_of_the_budget_and_of_the_ledger(tmp_path):
    training = train(tmp_path / "run")
    plain = vestige.train(
        scattering_linear(27, 3, 4), LOSS, features(), method=vestige.dp_sgd(), sample_rate=0.2, steps=12, delta=1e-5,
        lr=0.1, epsilon=4.0,
    )  # fmt: skip
    assert training.plan.noise_multiplier > plain.plan.noise_multiplier
    assert len(list(training)) == 12
    assert training.ledger.spent[Gaussian(8.0)] == 2
    promise = training.guarantee()
    assert 3.99 < promise.epsilon <= 4.0
    assert promise.epsilon == pytest.approx(accounting.epsilon(training.ledger.spent, 1e-5))
    training.finish()
    assert verify(tmp_path / "run").guarantee.epsilon == pytest.approx(promise.epsilon)
    rows = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [(r["step"], r["part"]) for r in [row for row in rows if "step" in row][:3]] == [(-1, 0), (-1, 1), (0, 0)]


def test_with_little_noise_the_features_become_standard():
    training = train(moments=PrivateMoments(1e-6, (100.0, 100.0)), epsilon=None, noise_multiplier=1.0)
    next(iter(training))
    x, _ = features()
    normal = training.model[0](x)
    assert isinstance(training.model[0], Standardise)
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(27), atol=1e-3, rtol=0)
    torch.testing.assert_close(normal.var((0, 2, 3), correction=0), torch.ones(27), atol=1e-3, rtol=0)


def test_a_resumed_run_does_not_ask_again(tmp_path):
    reproducible = {"epsilon": None, "noise_multiplier": 1.0, "reproducible": 5}
    whole = train(**reproducible)
    list(whole)
    part = train(tmp_path / "run", **reproducible)
    for record in part:
        if record.step == 5:
            break
    part.ledger.close()
    again = train(tmp_path / "run", resume=True, **reproducible)
    list(again)
    for one, other in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert again.ledger.spent[Gaussian(8.0)] == 2


def test_other_models_are_refused_by_name():
    with pytest.raises(ValueError, match=r"use a task of \*-hf"):
        with_moments(make_toy()[0])
