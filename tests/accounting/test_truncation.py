"""Is a truncated Poisson sample priced from above? Against the worst case itself, and another library."""

from itertools import product
from math import comb, exp, pi, sqrt

import dp_accounting
import mpmath
import numpy as np
import pytest

from histories import DELTA
from vestige.accounting import epsilon
from vestige.accounting.samplings.binomial import tail
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
    assert crowding(question) == pytest.approx((1 - found[0], *found), abs=4e-3)


def exact_tail(most, trials, rate):
    """Pr[X > most], to forty digits."""
    with mpmath.workdps(60):
        n, p = mpmath.mpf(trials), mpmath.mpf(rate)
        term = mpmath.binomial(n, most + 1) * p ** (most + 1) * mpmath.exp((n - most - 1) * mpmath.log1p(-p))
        total, at = term, most + 1
        while at < trials and term > total * mpmath.mpf(10) ** -40:
            term *= (n - at) / (at + 1) * p / (1 - p)
            total, at = total + term, at + 1
        return float(total)


@pytest.mark.parametrize("trials", [6, 1000, 2**31 - 1, 2**31, 5 * 10**9, 10**12])
def test_tails_of_any_number_of_rows(trials):
    for mean, most in ((1e-3, 0), (2.0, 1), (2.0, 4), (200.0, 150), (200.0, 201), (200.0, 300)):
        if most < trials and mean < trials:
            found = exact_tail(most, trials, mean / trials)
            assert tail(most, trials, mean / trials) == pytest.approx(found, rel=1e-11)


@pytest.mark.parametrize("population", [10**6, 2**31 + 1, 5 * 10**9, 10**12])
@pytest.mark.parametrize("most", [200, 230])
def test_few_of_very_many_rows_fill_a_batch_as_often_as_they_do(population, most):
    rate = 200 / population
    full = exact_tail(most - 1, population - 1, rate)
    kept = exact_tail(most, population, rate) * most / population / full
    found = crowding(TruncatedGaussian(rate, 0.5, most, population))
    for bound, value in zip(found, (1 - full, full, min(rate, kept)), strict=True):
        assert value <= bound <= value * (1 + 1e-7)


def test_the_price_falls_with_the_number_of_rows_whatever_it_is():
    numbers = [10**6, 10**9, 2**31 - 1, 2**31 + 1, 5 * 10**9, 10**12]
    priced = [epsilon({TruncatedGaussian(1000 / n, 0.5, 1000, n): 300}, 1e-8, "rdp") for n in numbers]
    assert priced == sorted(priced, reverse=True)
    with pytest.raises(ValueError, match="population=1000000000001 must be at most 1e\\+12"):
        TruncatedGaussian(1e-9, 0.5, 1000, 10**12 + 1)
