"""Is the exponential mechanism priced as it costs? Against enumeration, closed forms and zCDP."""

import numpy as np
import pytest
from scipy.special import logsumexp, softmax
from scipy.stats import binom

from vestige import accounting
from vestige.accounting import rdp
from vestige.accounting.composition import loss_distribution
from vestige.accounting.profiles import connect_dots, exponential_mechanism
from vestige.priced_questions import ExponentialMechanism, Gaussian, Question


def neighbours(epsilon, outcomes=6, seeds=200):
    """Output distributions of the mechanism on two neighbouring datasets: scores move by 1 at most."""
    random = np.random.default_rng(0)
    for _ in range(seeds):
        scores = random.normal(0, 3, outcomes)
        moved = scores + random.choice([-1.0, 0.0, 1.0], outcomes)
        yield softmax(epsilon * scores / 2), softmax(epsilon * moved / 2)


@pytest.mark.parametrize("epsilon", [0.05, 0.7, 3.0])
def test_no_pair_of_neighbours_is_further_apart_than_the_profile_says_and_one_comes_close(epsilon):
    losses = np.linspace(0, epsilon, 21)
    heights = exponential_mechanism(epsilon).remove(losses)
    closest = np.zeros(len(losses))
    for first, second in neighbours(epsilon):
        found = np.maximum(first[None] - np.exp(losses)[:, None] * second, 0).sum(axis=1)
        assert (found <= heights + 1e-12).all()
        closest = np.maximum(closest, found)
    assert closest[0] > 0.6 * heights[0]


@pytest.mark.parametrize("epsilon", [1e-4, 0.005, 0.05, 0.7, 3.0, 40.0, 500.0])
def test_renyi_divergences_are_those_of_the_worst_two_point_distribution(epsilon):
    curve = rdp.exponential_mechanism([epsilon])[0]
    assert (curve <= rdp.ORDERS * epsilon**2 / 8 * (1 + 1e-12)).all()
    assert (curve <= epsilon).all()
    if epsilon <= 40:
        tops = np.linspace(1e-9, epsilon * (1 - 1e-9), 2001)
        share = -np.expm1(tops - epsilon) / -np.expm1(-epsilon)
        for order in (1.5, 4.0, 32.0):
            place = int(np.abs(rdp.ORDERS - order).argmin())
            a = rdp.ORDERS[place]
            logs = np.logaddexp(
                np.log(share) + (a - 1) * tops, np.log1p(-np.minimum(share, 1 - 1e-16)) + (a - 1) * (tops - epsilon)
            )
            assert curve[place] == pytest.approx(logs.max() / (a - 1), rel=2e-3)
            assert curve[place] >= logs.max() / (a - 1) * (1 - 1e-7) - 1e-13


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_renyi_divergences_bound_those_of_neighbours(epsilon):
    curve = rdp.exponential_mechanism([epsilon])[0]
    for first, second in neighbours(epsilon, seeds=50):
        for place in range(0, len(rdp.ORDERS), 10):
            order = rdp.ORDERS[place]
            moment = logsumexp(order * np.log(first) + (1 - order) * np.log(second)) / (order - 1)
            assert moment <= curve[place] + 1e-12


def test_its_loss_distribution_is_one_and_holds_the_profile():
    lowest, masses, infinite = connect_dots(exponential_mechanism(1.0), 0.001)
    assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-9)
    places = (lowest + np.arange(len(masses))) * 0.001
    for loss in (0.0, 0.3, 0.9):
        found = (masses * np.maximum(-np.expm1(loss - places), 0)).sum() + infinite
        assert found == pytest.approx(float(exponential_mechanism(1.0).remove(np.array(loss))), rel=1e-2, abs=1e-5)


def test_composition_is_at_most_zcdp_and_at_least_what_neighbours_show():
    """Twenty adaptive choices: no more than their zero-concentrated bound, no less than one pair that is repeated."""
    question = ExponentialMechanism(0.5)
    total = accounting.epsilon({question: 20}, 1e-5)
    rho = 20 * 0.5**2 / 8
    assert total <= rho + 2 * np.sqrt(rho * np.log(1e5))
    # Randomised response of the same range, 20 times: a binomial.
    top = 0.25
    share = (np.exp(0.5) - np.exp(top)) / np.expm1(0.5)
    loss = np.arange(21) * top + np.arange(20, -1, -1) * (top - 0.5)
    delta = (binom.pmf(np.arange(21), 20, share) * np.maximum(-np.expm1(total - loss), 0)).sum()
    assert delta <= 1e-5
    assert total < 1.5 * loss[binom.sf(np.arange(21), 20, share) > 1e-5].max()


def test_one_choice_alone_costs_its_epsilon():
    assert 0.99 < accounting.epsilon({ExponentialMechanism(1.0): 1}, 1e-9) <= 1.0
    assert accounting.epsilon({ExponentialMechanism(0.0): 3}, 1e-9) == 0.0


def test_its_price_holds_beside_any_sampling_that_has_a_theorem():
    asked = {ExponentialMechanism(0.1): 3, Gaussian(10.0): 1}
    known = accounting.guarantee(asked, 1e-5, accounting.Facts(sampling="every-example"))
    assert known.epsilon is not None
    assert known.meaning.replacing_by == "theorem"
    assert known.epsilon < known.meaning.epsilon_replacing <= 2.3 * known.epsilon
    assert accounting.guarantee(asked, 1e-5, accounting.Facts(sampling="poisson")).epsilon == known.epsilon
    assert accounting.guarantee(asked, 1e-5, accounting.Facts(sampling="shuffled")).epsilon is None


def test_it_is_written_and_read_again():
    question = ExponentialMechanism(0.25)
    assert Question.from_json(question.to_json()) == question
    with pytest.raises(ValueError, match="choice_epsilon=-1"):
        ExponentialMechanism(-1.0)


def test_both_directions_cost_the_same():
    remove, add = loss_distribution({ExponentialMechanism(0.5): 4}, 0.0005, 1.0)
    assert remove.delta(0.7) == pytest.approx(add.delta(0.7), rel=1e-6)
