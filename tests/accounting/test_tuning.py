"""Does choosing the best of several runs cost what the theorem says?"""

from math import inf, nan

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from histories import DELTA, steps
from vestige.accounting import composed_epsilon, epsilon, rdp, theorems, tuned_epsilon, tuning
from vestige.priced_questions import CyclicGaussian, Gaussian, SampledGaussian


@pytest.mark.parametrize(
    ("base", "geometric", "logarithmic", "hundred"),
    [(1.0, 2.31, 1.91, 2.28), (3.0, 6.18, 5.29, 6.27), (8.0, 13.8, 12.5, 14.8)],
)
def test_price_of_a_search(base, geometric, logarithmic, hundred):
    history = steps({1.0: 11.844, 3.0: 4.4728, 8.0: 2.0338}[base])
    assert tuned_epsilon(history, DELTA, 10, 1) == pytest.approx(geometric, rel=5e-3)
    assert tuned_epsilon(history, DELTA, 10, 0) == pytest.approx(logarithmic, rel=5e-3)
    assert tuned_epsilon(history, DELTA, 100, 0) == pytest.approx(hundred, rel=5e-3)


def test_price_of_a_search_equals_dp_accounting():
    history, orders = steps(4.0), rdp.INTEGER_ORDERS  # its fractional orders are looser than ours
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.04, GaussianDpEvent(4.0)), 6250)
    for mean, shape in [(10, 1), (10, 0), (7.5, 0.5)]:
        accountant = RdpAccountant(orders=list(orders))
        accountant.compose(RepeatAndSelectDpEvent(run, mean, shape))
        curve = theorems.total_curve(history)[len(rdp.FRACTIONAL_ORDERS) :]
        stop = tuning.stopping_probability(mean, shape)
        selection = (1 + shape) * np.min((1 - 1 / orders) * curve - np.log(stop) / orders)
        ours = curve + selection + np.log(mean) / (orders - 1)
        np.testing.assert_allclose(accountant.rdp, np.minimum.accumulate(ours[::-1])[::-1], rtol=1e-6)
        assert tuned_epsilon(history, DELTA, mean, shape) <= accountant.get_epsilon(DELTA) + 1e-9


def test_a_trial_of_several_runs_costs_what_the_search_over_so_long_a_run_costs():
    single, triple = steps(4.0), {question: 3 * count for question, count in steps(4.0).items()}
    assert tuned_epsilon(single, DELTA, 7, repeats=3) == pytest.approx(tuned_epsilon(triple, DELTA, 7), rel=1e-9)
    # A cycle that a run leaves unfinished is not finished by the next run: both pay for it.
    cycle = {CyclicGaussian(1.0, 4.0, 25): 30}
    joined = {question: 2 * count for question, count in cycle.items()}
    assert tuned_epsilon(cycle, DELTA, 7, repeats=2) > tuned_epsilon(joined, DELTA, 7)
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.04, GaussianDpEvent(4.0)), 3 * 6250)
    accountant = RdpAccountant()
    accountant.compose(RepeatAndSelectDpEvent(run, 7, 1))
    ours, theirs = tuned_epsilon(single, DELTA, 7, repeats=3), accountant.get_epsilon(DELTA)
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours <= theirs + 1e-9
    assert ours > 1.5 * tuned_epsilon(single, DELTA, 7)


def test_a_search_of_one_run_by_the_geometric_law_still_costs_and_more_runs_cost_more():
    history = steps(4.0)
    prices = [tuned_epsilon(history, DELTA, mean) for mean in (1, 2, 10, 100)]
    assert prices == sorted(prices)
    assert prices[0] >= epsilon(history, DELTA, "rdp")
    assert tuned_epsilon({}, DELTA, 10) == 0


@pytest.mark.slow
def test_runs_that_were_all_made_cost_their_composition():
    """Subsampled, by dp_accounting's own loss distributions; on whole data, by the closed form of one Gaussian."""
    made = [{SampledGaussian(0.05, 2.0): 200}, {SampledGaussian(0.05, 2.5): 200}, {SampledGaussian(0.05, 2.0): 150}]
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for (question, count), *_ in (run.items() for run in made):
        accountant.compose(PoissonSampledDpEvent(question.rate, GaussianDpEvent(question.multiplier)), count)
    ours, theirs = composed_epsilon(made, DELTA), accountant.get_epsilon(DELTA)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours == epsilon({SampledGaussian(0.05, 2.0): 350, SampledGaussian(0.05, 2.5): 200}, DELTA)
    whole = composed_epsilon([{Gaussian(3.0): 1}] * 9, DELTA)
    assert whole == pytest.approx(epsilon({Gaussian(1.0): 1}, DELTA), rel=1e-4)
    assert composed_epsilon([], DELTA) == composed_epsilon([{}, {}], DELTA) == 0


@pytest.mark.slow
def test_a_cycle_that_one_run_leaves_unfinished_is_not_finished_by_the_next():
    run = {CyclicGaussian(1.0, 4.0, 25): 30}  # an example is in two of its rounds at most
    assert composed_epsilon([run] * 3, DELTA) == pytest.approx(epsilon({Gaussian(4.0): 6}, DELTA), rel=1e-4)
    assert composed_epsilon([run] * 3, DELTA) > epsilon({CyclicGaussian(1.0, 4.0, 25): 90}, DELTA)
    assert composed_epsilon([run], DELTA) == pytest.approx(epsilon(run, DELTA), rel=1e-9)


@pytest.mark.parametrize("expected_runs", [inf, nan, 1e300, 0.5, "x"])
def test_a_number_of_runs_that_is_none_is_refused(expected_runs):
    with pytest.raises(ValueError, match="expected_runs=.* must"):
        tuned_epsilon({Gaussian(1.0): 1}, 1e-5, expected_runs)
