"""Is a truncated Poisson sample priced from above? Against the worst case itself, and another library."""

from itertools import product
from math import comb, exp, pi, sqrt

import dp_accounting
import numpy as np
import pytest

from histories import DELTA
from vestige.accounting import epsilon
from vestige.accounting.samplings.truncation import crowding, profile
from vestige.priced_questions import SampledGaussian, TruncatedGaussian


def sums(population, rate, most, others, own):
    """Every value of the sum with its probability, where the others contribute `others` each and the example `own`."""
    chances = {}
    for joined, here in product(range(population), (0, 1)):
        count = comb(population - 1, joined) * rate ** (joined + here) * (1 - rate) ** (population - joined - here)
        room = min(most, joined + here)
        kept = here * room / max(1, joined + here)
        for mine, chance in ((1, kept), (0, 1 - kept)):
            if chance:
                value = mine * own + (room - mine) * others
                chances[value] = chances.get(value, 0.0) + count * chance
    return chances


@pytest.mark.parametrize(("rate", "most"), [(0.4, 3), (0.9, 1)])
def test_the_worst_case_costs_at_most_its_price(rate, most):
    population, multiplier = 6, 0.8
    grid = np.linspace(-20, 20, 40_001)

    def density(chances):
        bells = [chance * np.exp(-(((grid - value) / multiplier) ** 2) / 2) for value, chance in chances.items()]
        return sum(bells) / (multiplier * sqrt(2 * pi))

    priced = profile(TruncatedGaussian(rate, multiplier, most, population))
    for others, own in ((-1, 1), (0, 1), (1, -1), (1, 1)):
        kept = sums(population, rate, most, others, own)
        assert sum(kept.values()) == pytest.approx(1)
        p, q = density(kept), density(_without(population, rate, most, others))
        for loss in (0.0, 0.3, 1.0, 2.0):
            for one, other, bound in ((p, q, priced.remove), (q, p, priced.add)):
                exact = float(np.maximum(one - exp(loss) * other, 0).sum() * (grid[1] - grid[0]))
                assert exact <= float(bound(np.array([loss]))[0]) + 1e-9


def _without(population, rate, most, others):
    chances = {}
    for joined in range(population):
        chance = comb(population - 1, joined) * rate**joined * (1 - rate) ** (population - 1 - joined)
        value = min(most, joined) * others
        chances[value] = chances.get(value, 0.0) + chance
    return chances


@pytest.mark.slow
@pytest.mark.parametrize(("population", "rate", "most", "multiplier", "steps"), [(10_000, 0.01, 130, 1.0, 50)])
def test_below_the_bound_of_another_library_and_above_poisson(population, rate, most, multiplier, steps):
    other = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(population, rate, most, multiplier)
    theirs = other.compose(event, steps).get_epsilon(DELTA)  # replacing stands in for adding there
    plan = {TruncatedGaussian(rate, multiplier, most, population): steps}
    ours = epsilon(plan, DELTA)
    assert 0.9 * theirs < ours <= theirs * 1.0001
    assert epsilon({SampledGaussian(rate, multiplier): steps}, DELTA) < ours < epsilon(plan, DELTA, "rdp")


def test_room_for_everybody_is_poisson():
    plain = {SampledGaussian(0.05, 0.8): 50}
    for most in (1000, 2000):
        assert epsilon({TruncatedGaussian(0.05, 0.8, most, 1000): 50}, DELTA) == epsilon(plain, DELTA)
    six = TruncatedGaussian(0.05, 0.8, 50 + 7 * 8, 1000)
    assert epsilon({six: 50}, DELTA) == pytest.approx(epsilon(plain, DELTA), rel=1e-3)


def test_how_often_a_batch_is_full_and_the_example_kept():
    draw = np.random.default_rng(3)
    question = TruncatedGaussian(0.3, 1.0, 5, 20)
    joined = draw.random((400_000, 20)) < 0.3
    full = joined[:, 1:].sum(axis=1) >= 5
    kept = joined[:, 0] & full & (draw.random(400_000) < 5 / np.maximum(joined.sum(axis=1), 1))
    found = full.mean(), kept.sum() / full.sum()
    assert crowding(question) == pytest.approx(found, abs=4e-3)
