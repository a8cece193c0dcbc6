"""Is an epoch of random allocation priced from above, and closely? Quadrature, simulated adversaries, other bounds."""

from math import exp, log, sqrt

import numpy as np
import pytest
from scipy.special import ndtr

from histories import DELTA
from vestige.accounting import calibrate, epsilon
from vestige.accounting.composition import loss_distribution
from vestige.accounting.rdp import ORDERS
from vestige.accounting.samplings.allocation import FOR_DELTAS, Grid, Sum, curves, likelihood_ratio, profile
from vestige.priced_questions import AllocatedGaussian, Gaussian, SampledGaussian

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(160)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def options(strike, shift):
    """E (X - strike)_+ and E (strike - X)_+ for X = e^(shift Z - shift^2 / 2)."""
    positive = np.maximum(strike, 1e-300)
    far = np.log(1 / positive) / shift
    calls = ndtr(far + shift / 2) - positive * ndtr(far - shift / 2)
    puts = positive * ndtr(shift / 2 - far) - ndtr(-far - shift / 2)
    return np.where(strike > 0, calls, 1 - strike), np.where(strike > 0, puts, 0.0)


def options_of_two(price, shift):
    """E (T - price)_+ and E (price - T)_+ for the mean T of two, by integrating over the first of them."""
    z = np.linspace(-12, 12, 200_001)
    first = np.exp(shift * z - shift**2 / 2)
    density = np.exp(-(z**2) / 2) / sqrt(2 * np.pi) * (z[1] - z[0])
    return tuple(float(density @ each) / 2 for each in options(2 * price - first, shift))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
@pytest.mark.everyday("0.5")
def test_two_steps_against_quadrature(multiplier):
    found = profile(AllocatedGaussian(2, multiplier))
    for loss in (0.0, 0.05, 0.3, 1.0, 2.0):
        calls, _ = options_of_two(exp(loss), 1 / multiplier)
        _, puts = options_of_two(exp(-loss), 1 / multiplier)
        for exact, bound in ((calls, found.remove), (exp(loss) * puts, found.add)):
            priced = float(bound(np.array([loss]))[0])
            assert exact * (1 - 1e-8) - 1e-12 <= priced <= exact * 1.01 + 1e-6, (loss, exact, priced)


@pytest.mark.parametrize(("steps", "multiplier"), [(2, 1.0), (12, 1.684), (98, 0.5155), (500, 0.8)])
@pytest.mark.everyday("2-1.0")
def test_the_likelihood_ratio_has_its_mean_and_hardly_more_than_its_variance(steps, multiplier):
    found, wrong = likelihood_ratio(steps, multiplier, FOR_DELTAS)
    points, variance = np.exp(found.logs) / steps, (exp(multiplier**-2) - 1) / steps
    assert abs(found.masses.sum() + found.zero - 1) < wrong < 1e-7
    assert abs(found.masses @ points + found.lost / steps - 1) < wrong
    assert variance <= found.masses @ (points - 1) ** 2 <= 1.002 * variance


def test_a_coarser_grid_costs_more_and_a_finer_one_hardly_less():
    found = [likelihood_ratio(49, 0.7, Grid(fineness, 10.0, 1e-30, 1e-26))[0] for fineness in (0.4, 0.04, 0.02)]
    for strike in (1.5, 4.0, 20.0):
        coarse, usual, fine = (each.masses @ np.maximum(np.exp(each.logs) / 49 - strike, 0) for each in found)
        assert coarse > usual > fine > 0.9995 * usual


def simulated(steps, epochs, multiplier, count, losses, added):
    """The deltas of an adversary who knows everything but the example's steps, and their standard errors.

    The example's own coordinate is drawn half of the time from where large losses are, and weighted accordingly.
    """
    draw, shift = np.random.default_rng(7), 1 / multiplier
    total, weight = np.zeros(count), np.zeros(count)
    for _ in range(epochs):
        noise = shift * draw.standard_normal((count, steps)) - shift**2 / 2
        if not added:
            far = 2.0 * (draw.random(count) < 0.5)
            own = draw.standard_normal(count) + far
            weight -= np.log((1 + np.exp(2 * own - 2)) / 2)
            noise[:, 0] = shift * own + shift**2 / 2
        total += np.log(np.exp(noise).mean(axis=1))
    gain = -total if added else total
    worth = np.exp(weight)[:, None] * np.maximum(0, 1 - np.exp(np.asarray(losses) - gain[:, None]))
    return worth.mean(axis=0), worth.std(axis=0) / sqrt(count)


@pytest.mark.parametrize(("steps", "epochs", "multiplier", "near"), [(12, 2, 0.6, 5.0), (3, 6, 1.5, 1.5)])
@pytest.mark.everyday("3-6-1.5-1.5")
def test_a_simulated_adversary_gains_no_more_and_hardly_less(steps, epochs, multiplier, near):
    losses = [0.5 * near, near]
    priced = loss_distribution({AllocatedGaussian(steps, multiplier): epochs}, 2.0**-12, near)
    for added, composed in ((False, priced[0]), (True, priced[1])):
        found, error = simulated(steps, epochs, multiplier, 200_000, losses, added)
        bound = np.array([composed.delta(loss) for loss in losses])
        assert (bound >= found - 4 * error).all()
        assert (bound <= found + 4 * error + 0.01 * found)[found > 10 * error].all()


def test_between_the_bounds_of_another_accountant():
    """PLD_accounting 2.0 (Feldman & Shenfeld 2026) at its defaults says 6.9196 to 6.9868."""
    assert 6.9196 <= epsilon({AllocatedGaussian(98, 0.5155): 3}, DELTA) <= 6.9868
    assert epsilon({SampledGaussian(1 / 98, 0.5155): 294}, DELTA) == pytest.approx(7.98, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "epochs", "multiplier"), [(98, 3, 1.0334), (12, 75, 1.684)])
def test_the_other_accountant_agrees(steps, epochs, multiplier):
    other = pytest.importorskip("PLD_accounting", reason="PLD_accounting is not installed")
    high, low = other.gaussian_allocation_epsilon_range(
        delta=DELTA, sigma=multiplier, num_steps=steps, num_selected=1, num_epochs=epochs
    )
    assert low <= epsilon({AllocatedGaussian(steps, multiplier): epochs}, DELTA) <= 1.01 * high


def test_one_step_is_no_secret_and_more_steps_hide_more():
    assert epsilon({AllocatedGaussian(1, 2.0): 5}, DELTA) == epsilon({Gaussian(2.0): 5}, DELTA)
    costs = [epsilon({AllocatedGaussian(steps, 1.0): 2}, DELTA) for steps in (1, 2, 8)]
    assert costs == sorted(costs, reverse=True)
    assert epsilon({AllocatedGaussian(20, 0.01): 2}, DELTA, "rdp") > 1e3, "next to no noise hides nothing"


def test_renyi_curves_are_above_the_moments():
    second = int(np.argmin(abs(ORDERS - 2)))
    for steps, multiplier in ((2, 1.0), (98, 0.5155), (40, 5.0)):
        exact = log(1 + (exp(multiplier**-2) - 1) / steps)
        assert exact <= curves([AllocatedGaussian(steps, multiplier)])[0][second] <= exact * 1.02
    mean = (np.exp(NODES - 0.5)[:, None] + np.exp(NODES - 0.5)) / 2
    for place in range(second, int(np.argmin(abs(ORDERS - 8))), 7):
        added = log(WEIGHTS @ mean ** (1 - ORDERS[place]) @ WEIGHTS) / (ORDERS[place] - 1)
        assert curves([AllocatedGaussian(2, 1.0)])[0][place] >= added * (1 - 1e-6)
    plan = {AllocatedGaussian(49, 0.6582): 10}
    assert epsilon(plan, DELTA) < epsilon(plan, DELTA, "rdp") < 1.2 * epsilon(plan, DELTA)


def test_calibration_meets_the_budget():
    multiplier = calibrate(lambda noise: {AllocatedGaussian(12, noise): 4, Gaussian(20.0): 1}, 3.0, DELTA)
    assert 2.99 < epsilon({AllocatedGaussian(12, multiplier): 4, Gaussian(20.0): 1}, DELTA) <= 3.0


@pytest.mark.parametrize("multiplier", [300.0, 1e4])
def test_much_noise_takes_no_longer_grid(multiplier):
    """Sums of a number and of one that is nearly zero lie far below all others: they are charged, not followed."""
    found, _ = likelihood_ratio(20, multiplier, FOR_DELTAS)
    assert len(found.masses) < 3000
    assert found.lost < 1e-20
    assert float(found.masses @ np.exp(found.logs)) + found.lost == pytest.approx(20, rel=1e-9)
    question = AllocatedGaussian(20, multiplier)
    assert epsilon({question: 1}, 1e-5) <= epsilon({Gaussian(multiplier): 1}, 1e-5)


def test_what_is_not_followed_through_a_sum_is_charged():
    """A number that is zero with probability 1e-25: its sum with another keeps all mass, and all of its mean."""
    sure, rarely = Sum(0.5, 0, np.array([1.0])), Sum(0.5, 0, np.array([1.0]), zero=1e-25)
    found = sure.plus(rarely, 1e-30)
    assert found.lost == pytest.approx(1e-25, rel=1e-9, abs=0)
    assert found.zero == pytest.approx(1e-25, rel=1e-9, abs=0)
    assert float(found.masses.sum()) == pytest.approx(1.0, rel=1e-12)
