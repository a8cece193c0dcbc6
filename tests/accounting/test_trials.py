"""Is an accept-or-reject trial priced as the worst that any adversary can make of it?"""

from dataclasses import replace
from math import exp, inf, log

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_randomized_response
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import norm

from vestige import accounting
from vestige.accounting import accept_reject, epsilon, rdp
from vestige.accounting.profiles import Profile, connect_dots, excess_moments, sampled_gaussian
from vestige.priced_questions import Question, SampledGaussian, Trial

DELTA = 1e-5
MNIST = Trial(1024 / 60_000, 3.0, 256 / 60_000, 1.37, -1.5, "y")
COARSE_TRIAL = Trial(0.2, 1.3, 0.1, 0.9, -0.7, "y")
"""Large rates, so that a mistake in any term shows."""


def both(profile: Profile, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return profile.remove(losses), profile.add(losses)


# --- the profiles of plain Gaussians ---


@pytest.mark.parametrize(("rate", "multiplier"), [(0.04, 1.2222), (0.5, 2.0), (1.0, 3.0)])
def test_moments_of_a_profile_equal_the_closed_form_from_above(rate, multiplier):
    moments = excess_moments(sampled_gaussian(rate, multiplier, 20.0), 1e-4)
    near = rdp.ORDERS < 8
    moments, closed = moments[near], np.expm1(((rdp.ORDERS - 1) * rdp.curves([rate], [multiplier])[0])[near])
    assert np.all(moments >= closed * (1 - 1e-10))
    np.testing.assert_allclose(moments, closed, rtol=1e-4)


def test_masses_are_a_distribution():
    for profile in (
        sampled_gaussian(0.04, 1.2),
        accept_reject.profile(MNIST),
        accept_reject.profile(replace(MNIST, releases="yz")),
    ):
        lowest, masses, infinite = connect_dots(profile, 1e-4)
        losses = (lowest + np.arange(len(masses))) * 1e-4
        assert masses.sum() + infinite == pytest.approx(1, abs=1e-9)
        assert masses @ np.exp(-losses) == pytest.approx(1, abs=1e-9)  # the other side is a distribution too
        assert infinite < 1e-18


# --- published values ---


@pytest.mark.parametrize(
    ("releases", "count", "published"),
    [
        ("y", 2914, 1.0467),
        pytest.param("y", 4097, 1.2605, marks=pytest.mark.slow),
        ("y", 6893, 1.6776),
        ("yz", 2914, 1.1254),
        pytest.param("yz", 4097, 1.3543, marks=pytest.mark.slow),
        pytest.param("yz", 6893, 1.8009, marks=pytest.mark.slow),
    ],
)
def test_certified_values_for_mnist(releases, count, published):
    assert epsilon({replace(MNIST, releases=releases): count}, DELTA) == pytest.approx(published, abs=5e-4)


@pytest.mark.parametrize(
    ("count", "published"),
    [
        (2914, 1.445),
        pytest.param(4097, 1.742, marks=pytest.mark.slow),
        pytest.param(6893, 2.324, marks=pytest.mark.slow),
    ],
)
def test_charging_both_samples_of_every_trial(count, published):
    full: dict[Question, int] = {
        SampledGaussian(MNIST.rate, 3.0): count,
        SampledGaussian(MNIST.validation_rate, 1.37): count,
    }
    assert epsilon(full, DELTA) == pytest.approx(published, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "accepted", "published"),
    [
        (Trial(2048 / 60_000, 6.0, 256 / 60_000, 1.3, -1.5), 1241, (1.056, 1.755)),
        (Trial(8192 / 50_000, 14.0, 256 / 50_000, 1.4, -1.5), 387, (1.007, 1.596)),
        (Trial(1024 / 25_000, 2.3, 128 / 25_000, 1.37, -1.5), 143, (0.953, 1.497)),
    ],
)
def test_values_for_other_data(trial, accepted, published):
    low, high = accept_reject.acceptance(trial)
    for chance, value in zip((high, low), published, strict=True):
        assert epsilon({trial: round(accepted / chance)}, DELTA) == pytest.approx(value, abs=4e-3)


def test_renyi_divergence_of_one_trial():
    curve = dict(zip(np.round(rdp.ORDERS, 6), accept_reject.curves([MNIST])[0], strict=True))
    assert np.interp(8.0, list(curve), list(curve.values())) == pytest.approx(1.06e-4, rel=0.01)
    assert curve[32.0] == pytest.approx(4.4e-4, rel=0.01)


# --- the formula of docs/theorems.md, integrated by brute force ---


def ratio(trial: Trial, points: np.ndarray) -> np.ndarray:
    shift = 1 / trial.multiplier
    return 1 + trial.rate * np.expm1(shift * points - shift**2 / 2)


def brute_candidate_only(trial: Trial, loss: float) -> tuple[float, float]:
    low, high = accept_reject.acceptance(trial)
    points = np.linspace(-12, 16, 100_001)
    weights, T, g, q = (
        norm.pdf(points) * (points[1] - points[0]),
        ratio(trial, points),
        exp(loss),
        trial.validation_rate,
    )

    def expect(best_of: list[np.ndarray]) -> float:
        return float(np.maximum(np.maximum(*best_of), 0) @ weights)

    ends = (low, high)
    remove = max(
        expect([T * ((1 - q) * a + q * high) - g * a for a in ends]),
        1 - g + expect([g * a - T * ((1 - q) * a + q * low) for a in ends]),
    )
    add = max(
        expect([a - g * T * ((1 - q) * a + q * low) for a in ends]),
        1 - g + expect([g * T * ((1 - q) * a + q * high) - a for a in ends]),
    )
    return remove, add


@pytest.mark.parametrize(
    "trial",
    [
        COARSE_TRIAL,
        MNIST,
        replace(COARSE_TRIAL, validation_rate=1.0),
        replace(COARSE_TRIAL, half_range=2.0),
        replace(COARSE_TRIAL, threshold=1.0),
        Trial(0.01, 3.0, 0.5, 0.4, 1.2),
    ],
)
def test_candidate_only_equals_the_formula(trial):
    losses = np.array([0.0, 0.004, 0.05, 0.3, 0.8])
    remove, add = both(accept_reject.profile(trial), losses)
    for i, loss in enumerate(losses):
        assert (remove[i], add[i]) == pytest.approx(brute_candidate_only(trial, loss), rel=1e-5, abs=1e-9)


def brute_with_statistic(trial: Trial, loss: float) -> tuple[float, float]:
    s, q, g = trial.validation_multiplier, trial.validation_rate, exp(loss)
    z = np.linspace(-9 * s, trial.threshold * trial.half_range, 2001)[None]
    dz, points = z[0, 1] - z[0, 0], np.linspace(-8, 11, 1201)
    weights, T = norm.pdf(points) * (points[1] - points[0]), ratio(trial, points)[:, None]

    def expect(sign: float, with_weight: float, without_weight: float) -> float:
        best = np.zeros(len(points))
        for e0 in (-0.5, 0.5):
            for e1 in (-0.5, 0.5):
                without, moved = norm.pdf(z, e0, s), norm.pdf(z, e1, s)
                bet = sign * (with_weight * T * ((1 - q) * without + q * moved) - without_weight * without)
                best = np.maximum(best, np.trapezoid(np.maximum(bet, 0), dx=dz, axis=1))
        return float(best @ weights)

    remove = max(expect(1, 1, g), 1 - g + expect(-1, 1, g))
    add = max(expect(-1, g, 1), 1 - g + expect(1, g, 1))
    return remove, add


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
@pytest.mark.everyday("0.3")
def test_statistic_too_equals_the_formula_from_above(loss):
    trial = replace(COARSE_TRIAL, releases="yz")
    grid = np.arange(3201) * 1e-4
    remove, add = both(accept_reject.profile(trial), grid)
    at = round(loss / 1e-4)
    brute = brute_with_statistic(trial, loss)
    assert (remove[at], add[at]) == pytest.approx(brute, rel=2e-3, abs=1e-6)
    assert remove[at] >= brute[0] * (1 - 1e-5)
    assert add[at] >= brute[1] * (1 - 1e-5)


# --- no adversary does better ---


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=3), st.floats(0, 1.5), st.floats(0, 1)
)
def test_no_adversary_exceeds_the_candidate_profile(acceptances, loss, shrink):
    """Acceptance probabilities, with and without the example, that depend on the candidate through three regions."""
    trial, g = COARSE_TRIAL, exp(loss)
    low, high = accept_reject.acceptance(trial)
    cuts, shift = np.array([-inf, -0.3, 1.1, inf]), shrink / trial.multiplier  # a smaller gradient is an adversary too
    rejected_with = rejected_without = 1.0
    gain_remove = gain_add = 0.0
    points = np.linspace(-9, 12, 4001)
    weights = norm.pdf(points) * (points[1] - points[0])
    T = 1 + trial.rate * np.expm1(shift * points - shift**2 / 2)
    for (x, y), left, right in zip(acceptances, cuts[:-1], cuts[1:], strict=True):
        without, moved = low + x * (high - low), low + y * (high - low)
        inside = (points > left) & (points <= right)
        accept_with = T * ((1 - trial.validation_rate) * without + trial.validation_rate * moved)
        gain_remove += float(np.maximum(accept_with - g * without, 0) @ (weights * inside))
        gain_add += float(np.maximum(without - g * accept_with, 0) @ (weights * inside))
        rejected_with -= float(accept_with @ (weights * inside))
        rejected_without -= without * float(weights @ inside)
    remove, add = both(accept_reject.profile(trial), np.array([loss, loss + 1]))
    assert gain_remove + max(rejected_with - g * rejected_without, 0) <= remove[0] + 1e-6
    assert gain_add + max(rejected_without - g * rejected_with, 0) <= add[0] + 1e-6


def test_the_published_total_fails_its_counterexample_and_ours_covers_it():
    """Candidates of pure noise; one record flips which half of them the test prefers (docs/theorems.md 3)."""
    accepted, noise, threshold = 100, 10.0, -40.0
    trial = Trial(1e-6, 1e3, 1.0, noise, threshold)
    low, high = accept_reject.acceptance(trial)
    claim = accounting.published_claim_epsilon(accepted, 0.0, 1.0, 1.0, noise, DELTA)
    assert claim == pytest.approx(4.729, abs=0.001)  # 4.377 by a loss distribution
    # What an accepted candidate's sign reveals is randomised response with epsilon log(high / low).
    response = from_randomized_response(2 * low / (low + high), 2, value_discretization_interval=1e-3)
    truth = response.self_compose(accepted).get_epsilon_for_delta(DELTA)
    assert truth == pytest.approx(12.0, abs=0.1)
    assert claim < truth < epsilon({trial: round(accepted / (low + high) * 2)}, DELTA)


# --- laws ---


def test_a_trial_that_always_accepts_costs_its_candidate():
    assert epsilon({replace(MNIST, threshold=inf): 2914}, DELTA) == pytest.approx(
        epsilon({SampledGaussian(MNIST.rate, 3.0): 2914}, DELTA), rel=1e-6
    )


def test_a_statistic_that_is_always_released_costs_the_full_charge_from_above():
    full = {SampledGaussian(MNIST.rate, 3.0): 2914, SampledGaussian(MNIST.validation_rate, 1.37): 2914}
    spent = epsilon({replace(MNIST, threshold=inf, releases="yz"): 2914}, DELTA)
    assert epsilon(full, DELTA) <= spent <= epsilon(full, DELTA) * 1.0005


@settings(deadline=None, max_examples=6)
@given(st.floats(0.001, 0.5), st.floats(0.8, 5), st.floats(0.001, 0.5), st.floats(0.5, 5), st.floats(-3, 3))
def test_candidate_costs_less_than_with_statistic_costs_less_than_both_samples(
    rate, multiplier, rate_v, multiplier_v, threshold
):
    alone = Trial(rate, multiplier, rate_v, multiplier_v, threshold, "y")
    told = replace(alone, releases="yz")
    full = rdp.curves([rate, rate_v], [multiplier, multiplier_v]).sum(axis=0)
    curve = accept_reject.curves([alone, told])
    assert np.all(curve <= full * (1 + 1e-12))
    grid = np.arange(2000) * 1e-3
    for lesser, greater in zip(
        both(accept_reject.profile(alone), grid), both(accept_reject.profile(told), grid), strict=True
    ):
        assert np.all(lesser <= greater + 1e-12)
        assert np.all(np.diff(greater) <= 1e-12)


@pytest.mark.parametrize("trial", [COARSE_TRIAL, MNIST, replace(COARSE_TRIAL, multiplier=0.6)])
def test_renyi_divergence_covers_the_adversary_who_always_flips_the_test(trial):
    """Accepted with probability `low` without the example and `high` with it: at every order, into the tails."""
    low, high = accept_reject.acceptance(trial)
    jump = 1 + trial.validation_rate * (high / low - 1)
    candidate = rdp.curves([trial.rate], [trial.multiplier])[0]
    log_moments = (rdp.ORDERS - 1) * candidate + rdp.ORDERS * log(jump) + log(low)
    assert np.all(accept_reject.curves([trial])[0] >= log_moments / (rdp.ORDERS - 1) * (1 - 1e-9))


def test_renyi_epsilon_is_above_the_distribution():
    for releases in ("y", "yz"):
        spent = {replace(MNIST, releases=releases): 3000}
        assert epsilon(spent, DELTA) < epsilon(spent, DELTA, "rdp") < 1.2 * epsilon(spent, DELTA)


def test_acceptance_probabilities():
    low, high = accept_reject.acceptance(Trial(0.1, 1.0, 0.1, 1.3, -1.0))
    assert (round(low, 3), round(high, 3)) == (0.221, 0.5)
    wide = accept_reject.acceptance(Trial(0.1, 1.0, 0.1, 1.3, -1.0, half_range=5.0))
    assert wide == pytest.approx((ndtr(-10 / 1.3), 0.5))


def test_without_validation_data_only_the_candidate_is_priced():
    free = replace(MNIST, validation_rate=0.0)
    assert epsilon({free: 1000}, DELTA) <= epsilon({SampledGaussian(MNIST.rate, 3.0): 1000}, DELTA) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"releases": "z"}, "releases"),
        ({"half_range": 0.2}, "half_range"),
        ({"releases": "yz", "half_range": 2.0}, "theorem"),
    ],
)
def test_trials_without_a_theorem_are_refused(change, word):
    with pytest.raises(ValueError, match=word):
        replace(MNIST, **change)


def test_a_threshold_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        epsilon({replace(MNIST, threshold=-1000.0): 1}, DELTA)


def test_trials_are_recorded_as_json():
    assert Question.from_json(MNIST.to_json()) == MNIST
    assert log(accept_reject.acceptance(MNIST)[1] / accept_reject.acceptance(MNIST)[0]) == pytest.approx(
        log(2.37), abs=0.01
    )


@pytest.mark.parametrize("multiplier", [0.3, 0.1, 0.05, 0.02, 0.003])
@pytest.mark.parametrize("test_multiplier", [1.0, 0.1])
@pytest.mark.everyday("1.0-0.3", "1.0-0.003")
def test_with_next_to_no_noise_a_trial_still_has_a_price_and_the_full_charge_bounds_it(multiplier, test_multiplier):
    trial = Trial(0.04, multiplier, 0.1, test_multiplier, -0.5)
    parts = {SampledGaussian(0.04, multiplier): 10, SampledGaussian(0.1, test_multiplier): 10}
    price, full = accounting.epsilon({trial: 10}, 1e-5, "rdp"), accounting.epsilon(parts, 1e-5, "rdp")
    assert 0 < price <= full * (1 + 1e-12)
    more = accounting.epsilon({replace(trial, multiplier=1.1 * multiplier): 10}, 1e-5, "rdp")
    assert more < price
