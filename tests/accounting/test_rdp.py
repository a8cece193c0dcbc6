"""Are the Renyi curves of the sampled Gaussian right at every order, rate and multiplier?"""

import time

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from vestige.accounting import rdp
from vestige.accounting.rdp import FRACTIONAL_ORDERS, INTEGER_ORDERS, ORDERS, curves

FRACTIONAL = len(FRACTIONAL_ORDERS)
RATES = [1e-4, 0.004, 0.04, 0.3, 0.9]
MULTIPLIERS = [0.05, 0.1, 0.29, 0.3, 0.7, 1.2222, 4.0, 30.0]

# By adaptive quadrature in 30 digits (mpmath): rate, multiplier, order, divergence.
REFERENCE = [
    (1e-6, 1.0, 1.01, 8.67730001849975e-13),
    (1e-4, 0.3, 1.5, 7.17207792511847e-5),
    (1e-4, 50.0, 2.05, 4.10082011753962e-12),
    (0.04, 0.1, 1.5, 65.3433725253954),
    (0.04, 1.2222, 2.2, 0.0016916161859168),
    (0.3, 3.0, 1.5, 0.0077951933633183),
    (0.5, 0.5, 3.3, 5.60563050082786),
    (0.9, 10.0, 1.5, 0.00607803382129233),
]


def theirs(rate: float, multiplier: float, orders: np.ndarray) -> np.ndarray:
    accountant = RdpAccountant(orders=list(orders))
    return np.array(accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))).rdp)


@pytest.mark.parametrize(("rate", "multiplier", "order", "divergence"), REFERENCE)
def test_fractional_orders_equal_quadrature_in_thirty_digits(rate, multiplier, order, divergence):
    at = int(np.argmin(np.abs(ORDERS - order)))
    assert ORDERS[at] == pytest.approx(order, abs=1e-9)
    assert curves([rate], [multiplier])[0, at] == pytest.approx(divergence, rel=1e-8)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.everyday("0.0001")
def test_integer_orders_equal_dp_accounting(rate):
    ours = curves([rate] * len(MULTIPLIERS), MULTIPLIERS)[:, FRACTIONAL:]
    for row, multiplier in zip(ours, MULTIPLIERS, strict=True):
        np.testing.assert_allclose(row, theirs(rate, multiplier, INTEGER_ORDERS), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.004, 0.04, 0.3])
def test_fractional_orders_never_exceed_dp_accounting_which_drops_the_signs_of_its_series(rate):
    some = FRACTIONAL_ORDERS[::12]
    for multiplier in (0.1, 0.7, 1.2222):
        reference = theirs(rate, multiplier, some)  # infinite where the series did not converge
        ours = curves([rate], [multiplier])[0, :FRACTIONAL:12]
        assert np.all(ours <= reference * (1 + 1e-7))


def test_fractional_orders_equal_opacus_which_keeps_the_signs():
    opacus = pytest.importorskip("opacus.accountants.analysis.rdp")
    some = FRACTIONAL_ORDERS[24:90:6]
    for rate, multiplier in [(0.004, 1.1), (0.04, 0.7), (0.04, 1.2222), (0.04, 4.0)]:
        reference = opacus.compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=list(some))
        np.testing.assert_allclose(curves([rate], [multiplier])[0, 24:90:6], reference, rtol=1e-6)


def test_without_sampling_the_curve_is_a_line():
    for multiplier in (1e-3, 0.5, 1.0, 700.0):
        np.testing.assert_allclose(curves([1.0], [multiplier])[0], ORDERS / (2 * multiplier**2), rtol=1e-14)


def test_degenerate_questions():
    assert np.all(curves([0.0, 0.3, 0.0], [1.0, np.inf, 0.0]) == 0)
    assert np.all(np.isinf(curves([1e-9], [0.0])))
    assert curves([], []).shape == (0, len(ORDERS))


@pytest.mark.parametrize("multiplier", [1e-3, 0.019, 0.021])
@pytest.mark.everyday("0.001", "0.019")
def test_tiny_multipliers_are_bounded_by_chords(multiplier):
    rate, curve = 0.04, curves([0.04], [multiplier])[0]
    # At such noise the mixture's moment is that of its rarer half, to all digits: q^a exp(a (a-1) / 2 s^2).
    exact = ORDERS / (2 * multiplier**2) + ORDERS / (ORDERS - 1) * np.log(rate)
    high = ORDERS > 2
    np.testing.assert_array_less(exact[high] * (1 - 1e-9), curve[high])
    np.testing.assert_allclose(curve[FRACTIONAL:], exact[FRACTIONAL:], rtol=1e-9)
    assert np.all(curve <= ORDERS / (2 * multiplier**2))
    assert np.all(curve[ORDERS < 2] <= curve[ORDERS >= 2].min())


def test_a_block_equals_its_rows():
    rates, multipliers = [0.04, 1e-4, 0.3, 1.0, 0.04] * 60, list(np.geomspace(0.2, 50, 300))
    whole = curves(rates, multipliers)
    for i in range(0, 300, 37):
        np.testing.assert_allclose(curves([rates[i]], [multipliers[i]])[0], whole[i], rtol=1e-9)


questions = st.tuples(st.floats(1e-7, 1.0), st.floats(0.05, 100.0))


@settings(deadline=None, max_examples=20)
@given(questions, st.floats(1.0, 3.0))
def test_laws(question, factor):
    """More noise or less sampling never costs more; the curve rises, and its moments are log-convex in the order."""
    rate, multiplier = question
    curve, calmer, rarer = curves([rate, rate, rate / factor], [multiplier, multiplier * factor, multiplier])
    slack = 1 + 1e-8
    assert np.all(calmer <= curve * slack)
    assert np.all(rarer <= curve * slack)
    assert np.all(np.diff(curve) >= -1e-8 * curve[1:])
    slopes = np.diff((ORDERS - 1) * curve) / np.diff(ORDERS)
    assert np.all(np.diff(slopes) >= -1e-6 * np.abs(slopes[1:]))


@settings(deadline=None, max_examples=15)
@given(questions, st.integers(1, 10_000), st.floats(1e-12, 0.1))
def test_conversion_equals_dp_accounting_and_beats_the_classic(question, count, delta):
    curve = count * curves([question[0]], [question[1]])[0]
    curve[0] = np.inf  # dp_accounting leaves the conversion out at orders up to 1.01
    tight = rdp.tight_epsilon(curve, delta)
    assert tight == pytest.approx(compute_epsilon(ORDERS, curve, delta)[0], rel=1e-12)
    assert tight <= rdp.classic_epsilon(curve, delta)


@pytest.mark.parametrize("size", [1, 2, 37, 4000])
def test_a_sum_of_exponentials_is_scipys_to_the_last_digit(size):
    random = np.random.default_rng(size)
    for logs in (random.normal(size=size), 300 * random.normal(size=size), np.zeros(size)):
        assert rdp.log_sum(logs) == logsumexp(logs)
    for rare in (-np.inf, np.inf):
        logs = np.append(random.normal(size=size).round(), [rare, rare])
        assert rdp.log_sum(logs) == logsumexp(logs)
    assert rdp.log_sum(np.array([-np.inf])) == -np.inf


def test_nan_is_never_taken_for_privacy():
    assert np.isnan(rdp.tight_epsilon(np.full(len(ORDERS), np.nan), 1e-5))


def test_a_thousand_multipliers_take_less_than_a_second():
    start = time.process_time()
    curves([0.04] * 1000, np.linspace(0.8, 3.0, 1000))
    assert time.process_time() - start < 1.0
