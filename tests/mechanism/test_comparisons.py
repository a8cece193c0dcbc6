"""Are two models compared on one fresh sample, within bounds whatever the losses are, noised and charged first?"""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binomtest, kstest
from torch import nn

from selective_runs import LOSS, at, curator_of
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import Flat
from vestige.mechanism.comparisons import Comparisons
from vestige.mechanism.examples import Examples
from vestige.mechanism.losses.loss_difference import LossDifference, losses_of, right_answers
from vestige.priced_questions import BudgetSpent, SampledGaussian, Trial
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson

# --- the question about losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_acceptance_frequencies_are_the_normal_tails(sign):
    curator, sigma, threshold, bound = curator_of([sign] * 50), 1.3, -1.0, 1e-3
    change = LossDifference(0.9, sigma, bound, 45)
    answers = np.array([curator.comparisons.loss_difference(at(0), at(1), change, step=i) for i in range(1500)])
    accepted = int((answers < threshold * bound).sum())

    def tail(multiplier):
        return float(ndtr((threshold - sign) / (2 * multiplier)))

    assert tail(sigma) == pytest.approx({-1: 0.5, 1: 0.221}[sign], abs=1e-3)  # DPSUR's own figures
    assert binomtest(accepted, 1500, tail(sigma)).pvalue > 1e-3
    assert kstest(answers / bound, "norm", (sign, 2 * sigma)).pvalue > 1e-3
    for wrong in (2 / 3 * sigma, 3 / 2 * sigma):
        assert kstest(answers / bound, "norm", (sign, 2 * wrong)).pvalue < 1e-6


def test_an_outlier_carries_the_mean_from_end_to_end_and_no_further():
    change = LossDifference(1.0, 1.0, 1e-3, 50)
    before, after = torch.zeros(51), torch.ones(51)
    assert change.of(before[:50], after[:50]) == 1e-3
    after[50] = -1e6
    assert change.of(before, after) == -1e-3
    assert change.sensitivity == 2e-3
    assert change.noise_std == 2e-3


def test_the_per_example_form_against_one_at_a_time():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=30), rng.normal(size=30)
    change = LossDifference(0.5, 1.5, 10.0, 25.0, each=0.3)
    expected = sum(np.clip(b - a, -0.3, 0.3) for a, b in zip(before, after, strict=True)) / 25.0
    assert change.of(torch.tensor(before), torch.tensor(after)) == pytest.approx(expected, rel=1e-12)
    assert change.sensitivity == pytest.approx(0.3 / 25)
    for i in range(30):  # leaving one out moves it by at most the sensitivity
        keep = np.arange(30) != i
        one_less = change.of(torch.tensor(before[keep]), torch.tensor(after[keep]))
        assert abs(one_less - expected) <= change.sensitivity * (1 + 1e-12)
    narrow = replace(change, bound=1e-3)
    assert narrow.of(torch.tensor(before), torch.tensor(after)) == np.clip(expected, -1e-3, 1e-3)
    assert narrow.sensitivity == 2e-3  # the range bounds it better than the clip does


@pytest.mark.parametrize("each", [None, 0.1])
@pytest.mark.parametrize("broken", [nan, inf, -inf, 3e38])
def test_losses_that_are_not_finite_stay_within_bounds(each, broken):
    change = LossDifference(0.5, 1.0, 1e-3, 4.0, each)
    losses = torch.tensor([0.0, broken, 1.0])
    for before, after in ((losses, torch.zeros(3)), (torch.zeros(3), losses), (losses, losses)):
        assert abs(change.of(before, after)) <= 1e-3


def test_an_empty_sample_is_no_change_but_noised_and_charged():
    asked = []
    curator = curator_of([1.0] * 3, ask=lambda question, **place: asked.append((question, place)))
    change = LossDifference(1e-12, 1.0, 1e-3, 1e-9)
    answers = np.array([curator.comparisons.loss_difference(at(0), at(1), change, step=i) for i in range(300)])
    assert len(asked) == 300
    assert asked[7] == (SampledGaussian(1e-12, 1.0), {"step": 7, "part": 1, "sensitivity": 2e-3})
    assert kstest(answers / 2e-3, "norm").pvalue > 1e-3


def test_both_models_are_measured_on_the_same_sample_and_without_dropout():
    """Equal models must give exactly no change, whoever is sampled; then only the noise is left."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator))
    losses, parameters = losses_of(model, LOSS), {k: v.detach() for k, v in model.named_parameters()}
    assert torch.equal(losses(data, parameters), losses(data, parameters))
    assert model.training
    assert model[1].training
    expected = LOSS(
        torch.func.functional_call(model[0], {"weight": parameters["0.weight"], "bias": parameters["0.bias"]}, data[0]),
        data[1],
        reduction="none",
    )
    torch.testing.assert_close(losses(data, parameters), expected)


def test_comparison_samples_are_poisson_and_independent_of_the_gradients():
    curator = curator_of([1.0] * 200)
    sizes = np.array([len(curator.comparisons._sample(0.3)[0]) for _ in range(500)])
    assert abs(sizes.mean() - 60) < 4 * np.sqrt(42 / 500)
    assert 42 * 0.75 < sizes.var() < 42 * 1.3
    gradient_sample = Poisson(0.3).draw(200, 0, Randomness.reproducible(0))
    assert not torch.equal(gradient_sample, curator_of([1.0] * 200).comparisons._sample(0.3)[0])


def test_the_noisy_count_counts():
    model = nn.Linear(2, 2, bias=False)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 2, generator=generator)
    targets = (inputs[:, 1] > inputs[:, 0]).long()
    asked = []
    examples = Examples((inputs, targets), torch.device("cpu"))
    charges = Charges(lambda q, **k: asked.append(q))
    scores = losses_of(model, LOSS), right_answers(model)
    comparisons = Comparisons(examples, Randomness.reproducible(0), charges, *scores)
    right, wrong = {"weight": torch.eye(2)}, {"weight": -torch.eye(2)}
    gains = [comparisons.count_difference(wrong, right, rate=0.5, multiplier=10.0, step=i, part=1) for i in range(400)]
    # the mean is 1; sampling gives sqrt(400 * 0.25) = 10 examples of deviation, the noise another 10, over 200
    assert np.mean(gains) == pytest.approx(1.0, abs=4 * np.sqrt(200) / 200 / 20)
    assert np.std(gains) == pytest.approx(np.sqrt(200) / 200, rel=0.15)
    assert asked == [SampledGaussian(0.5, 10.0)] * 400


# --- who pays --------------------------------------------------------------------------------------------------------


def test_a_trial_is_charged_as_one_question_before_anything_is_answered():
    asked = []

    def ask(question, **place):
        asked.append(question)
        raise BudgetSpent

    curator = curator_of([1.0] * 10, ask=ask)
    curator._engine = lambda *a, **k: pytest.fail("the data was touched before the trial was charged")
    trial = Trial(0.5, 2.0, 0.3, 1.0, -1.0)
    with pytest.raises(BudgetSpent), curator.comparisons.trial(trial):
        curator.gradient(at(0), Flat(1.0), 2.0, step=0)
    assert asked == [trial]
    assert curator.asked == curator.comparisons.asked == 0


def test_a_trial_covers_its_own_questions_only():
    curator = curator_of([1.0] * 10)
    with (
        pytest.raises(AssertionError, match="not what is due"),
        curator.comparisons.trial(Trial(0.5, 2.0, 0.3, 1.0, -1.0)),
    ):
        curator.gradient(at(0), Flat(1.0), 1.9, step=0)
