"""Is every question priced by its theorem: answers on one sample together, correlated noise once per cycle?"""

from math import ceil, exp, inf

import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from histories import DELTA, steps
from vestige.accounting import epsilon
from vestige.checks import accounted_multiplier
from vestige.mechanism.adaptive_clipping import Counted
from vestige.priced_questions import CyclicGaussian, Gaussian, SampledGaussian


@pytest.mark.parametrize(("groups", "memory", "published"), [(3, 1.0, 77.8), (21, 0.9, 1246.0)])
def test_groups_on_one_sample_are_whitened(groups, memory, published):
    multiplier = accounted_multiplier(1.1, memory, groups)
    assert multiplier == pytest.approx(1.1 / memory / groups**0.5)
    assert accounted_multiplier(2.0) == 2.0
    assert epsilon(steps(multiplier), DELTA) == pytest.approx(published, rel=1.5e-3)


def test_one_sample_for_two_answers_costs_more_than_two_samples():
    one, both = SampledGaussian(0.04, 1.1), SampledGaussian(0.04, accounted_multiplier(1.1, groups=2))
    assert epsilon({one: 2500}, DELTA) == pytest.approx(12.0, abs=0.05)
    assert epsilon({both: 2500}, DELTA) == pytest.approx(24.9, abs=0.05)
    assert epsilon({one: 5000}, DELTA) == pytest.approx(18.3, abs=0.05)


def test_a_whitened_quantile_costs_little():
    joint = (1.1**-2 + 20.0**-2) ** -0.5
    assert Counted(1.0, count_noise=10.0).gradient_multiplier(joint, 200.0) == pytest.approx(1.1)
    assert Counted(1.0, count_noise=inf).gradient_multiplier(3.0, 200.0) == 3.0
    assert epsilon(steps(joint), DELTA) == pytest.approx(21.19, abs=0.01)


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (1.0, 10), (30.0, 500), (0.2, 1)])
@pytest.mark.nightly("1.0-10", "0.2-1")
def test_without_sampling_the_closed_form(multiplier, count):
    mu = count**0.5 / multiplier

    def delta_at(loss: float) -> float:  # Balle & Wang 2018
        return float(ndtr(mu / 2 - loss / mu) - exp(loss) * ndtr(-mu / 2 - loss / mu))

    exact = brentq(lambda loss: delta_at(loss) - DELTA, 0, 100)
    for question in (Gaussian(multiplier), SampledGaussian(1.0, multiplier)):
        assert exact * (1 - 1e-9) <= epsilon({question: count}, DELTA) <= exact * 1.0005


def test_correlated_noise_charges_an_example_once_per_cycle():
    for count in (1, 7, 8, 9):
        cyclic = {CyclicGaussian(0.2, 1.5, 4): count}
        assert epsilon(cyclic, DELTA, "rdp") == epsilon({SampledGaussian(0.2, 1.5): ceil(count / 4)}, DELTA, "rdp")
    plain = {SampledGaussian(0.2, 1.5): 50}
    assert epsilon({CyclicGaussian(0.2, 1.5, 1): 50}, DELTA) == epsilon(plain, DELTA)
