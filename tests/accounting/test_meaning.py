"""Do the numbers beside an epsilon bound the best attacker, and what replacing an example costs?"""

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy.special import ndtr, ndtri

from vestige.accounting import Facts, guarantee, meaning, tradeoff
from vestige.accounting.lower_bounds.bounds_from_scores import delta_of_mu
from vestige.accounting.profiles import replaced_gaussian
from vestige.priced_questions import CyclicGaussian, Gaussian, SampledGaussian, Trial

DELTA = 1e-5


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_a_gaussian_mechanism_means_its_closed_forms(mu):
    found = meaning({Gaussian(1 / mu): 1}, DELTA)
    assert found.attacker_accuracy == pytest.approx(ndtr(mu / 2), rel=1e-4)
    assert found.detection_at_1_percent == pytest.approx(ndtr(ndtri(0.01) + mu), rel=1e-3)
    assert found.gaussian_mu == pytest.approx(mu, rel=2e-3)
    assert found.attacker_accuracy >= ndtr(mu / 2)
    assert found.detection_at_1_percent >= ndtr(ndtri(0.01) + mu)
    assert found.gaussian_mu >= mu


def sampled(rate, multiplier, steps, relation="ADD_OR_REMOVE_ONE"):
    relation = getattr(dp_accounting.NeighboringRelation, relation)
    one = oracle.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, neighboring_relation=relation, value_discretization_interval=3e-4
    )
    return one.self_compose(steps)


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [(0.05, 1.0, 100), (0.01, 0.7, 1000), (0.5, 2.0, 10)])
@pytest.mark.everyday("0.5-2.0-10")
def test_sampled_steps_mean_what_another_accountant_finds(rate, multiplier, steps):
    whole = sampled(rate, multiplier, steps)
    found = meaning({SampledGaussian(rate, multiplier): steps}, DELTA)
    assert found.attacker_accuracy == pytest.approx((1 + whole.get_delta_for_epsilon(0.0)) / 2, rel=5e-4)
    losses = np.linspace(0, 4, 200)
    best = min(d + np.exp(e) * 0.01 for e, d in zip(losses, whole.get_delta_for_epsilon(losses), strict=True))
    assert found.detection_at_1_percent == pytest.approx(best, rel=2e-3)
    assert found.replacing_by == "theorem"
    by_other = sampled(rate, multiplier, steps, "REPLACE_ONE").get_epsilon_for_delta(DELTA)
    assert found.epsilon_replacing == pytest.approx(by_other, rel=1e-3)


def test_mu_bounds_the_whole_curve_down_to_delta():
    history = {SampledGaussian(0.05, 1.0): 100}
    curve, mu = tradeoff(history, DELTA), meaning(history, DELTA).gaussian_mu
    losses = np.linspace(0, curve.epsilons[-1], 77)
    whole = sampled(0.05, 1.0, 100)
    gaussian = ndtr(mu / 2 - losses / mu) - np.exp(losses) * ndtr(-mu / 2 - losses / mu)
    assert (np.array(whole.get_delta_for_epsilon(losses)) <= gaussian * (1 + 1e-3)).all()
    smaller = 0.99 * mu
    gaussian = ndtr(smaller / 2 - losses / smaller) - np.exp(losses) * ndtr(-smaller / 2 - losses / smaller)
    assert (np.array(whole.get_delta_for_epsilon(losses)) > gaussian).any()


def test_a_curve_bounds_detection_from_both_sides():
    curve = tradeoff({Gaussian(1.0): 1}, DELTA)
    alarms = np.array([0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
    best = ndtr(ndtri(np.clip(alarms, 1e-300, 1 - 1e-16)) + 1)
    assert (curve.detection(alarms) >= best - 1e-12).all()
    assert curve.detection(alarms)[1:] == pytest.approx(best[1:], rel=1e-3)


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_the_worst_pair_of_replacing_is_the_antipodal_one(rate):
    """Against other pairs of unit vectors in the plane, by numerical integration."""
    step, noise, loss = 0.04, 0.8, 0.7
    x, y = np.meshgrid(np.arange(-7, 7, step), np.arange(-7, 7, step))

    def density(g):
        at = [np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * noise**2)) for a, b in ((0, 0), g)]
        return ((1 - rate) * at[0] + rate * at[1]) / (2 * np.pi * noise**2)

    bound = float(replaced_gaussian(rate, noise).remove(np.array([loss]))[0])
    found = {}
    for angle in (np.pi, 2.5, 1.5, 0.5):
        other = (np.cos(angle), np.sin(angle))
        found[angle] = (density((1, 0)) - np.exp(loss) * density(other)).clip(0).sum() * step**2
    assert found[np.pi] == pytest.approx(bound, rel=2e-3)
    assert max(found.values()) <= bound * (1 + 2e-3)


def test_without_a_theorem_replacing_is_a_group_of_two():
    trial = Trial(0.02, 3.0, 0.005, 1.4, -1.5)
    found = meaning({trial: 200}, DELTA)
    assert found.replacing_by == "group of two"
    once = guarantee({trial: 200}, DELTA, Facts()).epsilon
    assert found.epsilon_replacing > 2 * once
    # The bound for a group is looser than the theorem, where there is one.
    from vestige.accounting.meaning.replacing import _by_group

    history = {SampledGaussian(0.05, 1.0): 100}
    assert _by_group(history, DELTA, 3.5) > meaning(history, DELTA).epsilon_replacing
    # By way of the data without either example: delta once, and once more e^epsilon times.
    half = _by_group({Gaussian(2.0): 1}, DELTA, 2.0) / 2
    assert 0.9 * DELTA < delta_of_mu(1 / 2.0, half) * (1 + np.exp(half)) <= DELTA


def test_a_filter_means_what_its_epsilon_alone_says():
    history = {SampledGaussian(0.05, 1.0): 10}
    promise = guarantee(history, DELTA, Facts(schedule="filtered", filter_epsilon=4.0))
    assert promise.meaning.attacker_accuracy == pytest.approx(np.exp(4) / (1 + np.exp(4)), rel=1e-4)
    assert promise.meaning.gaussian_mu is None
    assert promise.meaning.epsilon_replacing is None


def test_what_costs_nothing_means_nothing_and_what_has_no_epsilon_means_none():
    assert meaning({}, DELTA).attacker_accuracy == pytest.approx(0.5, abs=1e-5)
    assert meaning({}, DELTA).epsilon_replacing == 0
    assert guarantee({Gaussian(1.0): 1}, DELTA, Facts(sampling="shuffled")).meaning is None
    assert meaning({SampledGaussian(0.05, 0.02): 100}, DELTA).attacker_accuracy == 1
    assert meaning({CyclicGaussian(0.1, 1.0, 8): 80}, DELTA).replacing_by == "theorem"


@pytest.mark.parametrize(("rate", "multiplier"), [(0.1, 1.0), (0.5, 1.0), (0.05, 0.5)])
def test_one_sampled_step_means_its_total_variation(rate, multiplier):
    """Adding an example has no loss above -log(1 - rate): far below epsilon, where the other direction's are."""
    right = 0.5 + rate * (ndtr(0.5 / multiplier) - 0.5)
    found = meaning({SampledGaussian(rate, multiplier): 1}, DELTA)
    assert right <= found.attacker_accuracy <= right + 1e-4
    curve = tradeoff({SampledGaussian(rate, multiplier): 1}, DELTA)
    assert curve.adding[0] == curve.removing[0]
    assert found.gaussian_mu < 2


def test_adding_costs_no_more_than_removing_where_steps_are_few():
    curve = tradeoff({SampledGaussian(0.05, 0.5149): 10}, DELTA)
    assert (curve.adding <= 1.01 * curve.removing + 1e-6).all()


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "delta"), [(1e-5, 0.8, 1, 1e-5), (1e-3, 0.5, 1, 1e-3), (1e-6, 1.0, 10, 1e-5)]
)
def test_next_to_nothing_means_next_to_nothing_and_takes_no_memory(rate, multiplier, steps, delta):
    found = meaning({SampledGaussian(rate, multiplier): steps}, delta)
    assert found.epsilon_replacing == 0.0
    assert found.attacker_accuracy <= 0.5 + delta
