"""Do the statistics of an audit keep their confidence, where the truth is known?"""

from math import log

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binomtest

from vestige import audit
from vestige.accounting.lower_bounds.bounds_from_scores import mu_bounds, one_run_p_value, threshold_bounds
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import roc

REPETITIONS = 1000
DELTA = 1e-3


def normals(mu, runs, repetitions=REPETITIONS, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(mu, 1, (repetitions, runs)), random.normal(0, 1, (repetitions, runs))


def keeps(wrong, confidence):
    """Whether so many bounds may be wrong: not significantly (1e-4) more than the confidence allows."""
    wrong = np.asarray(wrong)
    return binomtest(int(wrong.sum()), wrong.size, 1 - confidence, alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
@pytest.mark.everyday("0.0-0.8", "2.0-0.8")
def test_threshold_bounds_cover(mu, confidence):
    truth = audit.epsilon_of_mu(mu, DELTA)
    found, _, _ = threshold_bounds(*normals(mu, 400), DELTA, confidence)
    assert keeps(found > truth, confidence)
    if mu == 2:
        assert np.median(found) > 2  # and it says something


@pytest.mark.parametrize("mu", [0.3, 1.5])
@pytest.mark.everyday("1.5")
def test_a_true_promise_is_not_broken_and_a_false_one_is(mu):
    def curve(alarms):
        return ndtr(ndtri(alarms) + mu)

    promise = curve, curve
    _, margin, _ = threshold_bounds(*normals(mu, 2000), DELTA, 0.9, promise)
    assert keeps(margin > 0, 0.9)
    _, margin, _ = threshold_bounds(*normals(mu / 0.7, 4000, 100), DELTA, 0.95, promise)
    assert (margin > 0).mean() > 0.5


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("mu", "runs"), [(0.2, 50), (1.0, 50), (3.0, 50), (1.0, 1000), (3.0, 400)])
def test_gaussian_bounds_cover_and_are_tight(mu, runs, confidence):
    _, low = mu_bounds(*normals(mu, runs), confidence)
    wrong = low > mu
    assert keeps(wrong, confidence)
    assert binomtest(int(wrong.sum()), wrong.size, 1 - confidence, alternative="less").pvalue > 1e-5


def test_a_gaussian_fit_finds_mu_and_epsilon():
    fit = audit.gaussian_fit(*(each[0] for each in normals(1.0, 20_000)), 1e-5)
    assert abs(fit.mu - 1) < 0.03
    assert fit.mu_low < 1 < fit.mu + 0.03
    assert fit.epsilon_low < audit.epsilon_of_mu(1.0, 1e-5) < 4.5


def test_epsilon_of_mu_is_the_accountants():
    from vestige.accounting import epsilon
    from vestige.priced_questions import Gaussian

    for mu in (0.1, 1.0, 3.0):
        assert audit.epsilon_of_mu(mu, 1e-5) == pytest.approx(epsilon({Gaussian(1 / mu): 1}, 1e-5), rel=1e-4)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_detection_rates_cover(mu, confidence):
    truth = ndtr(ndtri(0.05) + mu)
    inside, outside = normals(mu, 300)
    found = [audit.rate_of_detection(a, b, 0.05, confidence) for a, b in zip(inside, outside, strict=True)]
    assert keeps([not each.low <= truth <= each.high for each in found], confidence)
    assert np.median([each.high - each.low for each in found]) < 0.5


def test_detection_at_few_false_alarms_needs_scores():
    inside, outside = (each[0] for each in normals(3.0, 100))
    rare = audit.rate_of_detection(inside, outside, 1e-4)
    assert rare.low == 0.0
    assert rare.high > 0.9


@pytest.mark.parametrize("mu", [0.0, 1.0, 2.5])
@pytest.mark.everyday("1.0")
def test_areas_cover(mu):
    inside, outside = normals(mu, 200)
    found = [audit.area_under_curve(a, b) for a, b in zip(inside, outside, strict=True)]
    truth = ndtr(mu / 2**0.5)
    assert keeps([not each.low <= truth <= each.high for each in found], 0.94)  # approximate: DeLong
    few = audit.area_under_curve(inside[0][:30], outside[0][:30])
    pairs = (inside[0][:30, None] > outside[0][:30]).mean()
    assert few.estimate == pytest.approx(pairs)


def test_a_perfect_attack_has_an_area_of_one_from_below():
    found = audit.area_under_curve(np.arange(50) + 100.0, np.arange(50))
    assert found.estimate == found.high == 1
    assert 0.9 < found.low < 1


def test_clopper_pearson_is_scipys():
    for hits, tries in ((0, 10), (3, 100), (7, 7)):
        expected = binomtest(hits, tries).proportion_ci(0.99, method="exact")
        found = audit.clopper_pearson(hits, tries, 0.99)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


# --- one run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.everyday("0.5-0.8")
def test_one_run_covers_randomised_response(epsilon, confidence):
    """Its worst case: every canary's coin is released by randomised response."""
    random = np.random.default_rng(1)
    coins = random.integers(0, 2, (REPETITIONS, 200)).astype(bool)
    flipped = random.random(coins.shape) > 1 / (1 + np.exp(-epsilon))
    scores = (coins ^ flipped) + 1e-3 * random.random(coins.shape)
    found = [audit.one_run_bound(s, c, 1e-6, confidence).epsilon for s, c in zip(scores, coins, strict=True)]
    assert keeps(np.array(found) > epsilon, confidence)
    assert np.median(found) > epsilon / 4


def test_one_run_covers_a_gaussian_mechanism():
    """Canaries in directions of their own: each is one Gaussian mechanism, and delta counts."""
    mu, delta = 1.0, 1e-4
    random = np.random.default_rng(2)
    coins = random.integers(0, 2, (REPETITIONS, 500)).astype(bool)
    scores = random.normal(mu * coins)
    truth = audit.epsilon_of_mu(mu, delta)
    found = np.array([audit.one_run_bound(s, c, delta).epsilon for s, c in zip(scores, coins, strict=True)])
    assert keeps(found > truth, 0.95)
    assert np.median(found) > 0.5


def test_one_run_has_the_published_ceilings():
    """All of m guesses right: about 5.8, 8.1 and 10.4 at 1e3, 1e4 and 1e5 canaries."""
    for canaries, ceiling in ((1000, 5.8), (10_000, 8.1), (100_000, 10.4)):
        assert audit.one_run_epsilon(canaries, canaries, canaries, 0.0, 0.95) == pytest.approx(ceiling, abs=0.06)


def test_one_run_p_value_is_the_authors():
    """The loop of the authors' published code, line by line."""
    from scipy.stats import binom

    def published(m, r, v, eps, delta):
        q = 1 / (1 + np.exp(-eps))
        beta, alpha, total = binom.sf(v - 1, r, q), 0.0, 0.0
        for i in range(1, v + 1):
            total += binom.pmf(v - i, r, q)
            if total > i * alpha:
                alpha = total / i
        return min(beta + alpha * delta * 2 * m, 1)

    for v in (30, 60, 100):
        for delta in (0.0, 1e-5, 1e-3):
            assert one_run_p_value(1000, 100, v, 0.7, delta) == pytest.approx(published(1000, 100, v, 0.7, delta))


def test_delta_lowers_every_bound():
    inside, outside = (each[0] for each in normals(2.0, 1000))
    assert (
        audit.epsilon_lower_bound(inside, outside, 0.1).epsilon < audit.epsilon_lower_bound(inside, outside, 0).epsilon
    )
    assert audit.one_run_epsilon(100, 100, 90, 1e-3, 0.95) < audit.one_run_epsilon(100, 100, 90, 0.0, 0.95)


def test_separated_scores_reach_the_most_that_so_many_runs_can_show():
    bound = audit.epsilon_lower_bound(np.ones(1000), np.zeros(1000), 0.0)
    assert bound.epsilon == pytest.approx(log((0.025 ** (1 / 500)) / (1 - 0.025 ** (1 / 500))), rel=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: audit.epsilon_lower_bound([1.0], [0.0] * 9, 1e-5), "inside"),
        (lambda: audit.epsilon_lower_bound([1.0] * 9, [0.0, float("nan")] * 5, 1e-5), "outside"),
        (lambda: audit.gaussian_fit([1.0] * 9, [0.0] * 9, 1e-5, 1.5), "confidence=1.5"),
        (lambda: audit.one_run_bound([1.0] * 9, [True] * 8, 1e-5), "included"),
        (lambda: audit.one_run_bound([1.0] * 9, [True] * 9, 1e-5, guesses=10), "guesses=10"),
        (lambda: audit.rate_of_detection([1.0] * 9, [0.0] * 9, 0), "false_alarms=0"),
    ],
)
def test_mistakes_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.everyday("True")
def test_a_promise_that_differs_by_direction_is_kept_in_both(swapped):
    """Scores of a sampled Gaussian mechanism, exactly drawn, against its own curve: tight, and not symmetric."""
    from vestige.accounting import tradeoff
    from vestige.priced_questions import SampledGaussian

    rate, noise, steps = 0.05, 0.7, 20
    random = np.random.default_rng(5)
    curve = tradeoff({SampledGaussian(rate, noise): steps}, 1e-5)

    def scores(present):
        joined = random.random((100, 2000, steps)) < (rate if present else 0.0)
        x = joined + noise * random.standard_normal(joined.shape)
        return np.log(1 - rate + rate * np.exp((2 * x - 1) / (2 * noise**2))).sum(-1)

    promise = curve.promise[::-1] if swapped else curve.promise
    _, margin, _ = threshold_bounds(scores(True), scores(False), 1e-5, 0.95, promise)
    assert keeps(margin > 0, 0.95) != swapped


def test_a_thinned_roc_lies_on_the_whole_one_and_has_its_area():
    random = np.random.default_rng(0)
    inside, outside = random.normal(1, 1, 5000), random.normal(0, 1, 4000)
    found = roc(inside, outside)
    assert found[0] == (0, 0)
    assert found[-1] == (1, 1)
    assert len(found) <= 102
    for alarms, detected in found[1:-1]:
        threshold = np.sort(outside)[::-1][round(alarms * 4000)]
        assert detected == pytest.approx((inside > threshold).mean(), abs=1e-6)
    x, y = np.array(found).T
    area = float(((y[1:] + y[:-1]) / 2) @ np.diff(x))
    assert area == pytest.approx(audit.area_under_curve(inside, outside).estimate, abs=2e-3)
    assert roc([1.0, 1.0], [0.0, 0.0]) == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(("runs", "mu"), [(4, 6.0), (20, 6.0), (100, 3.0)])
def test_the_bound_on_mu_holds_for_few_runs_too(runs, mu):
    _, low = mu_bounds(*normals(mu, runs, repetitions=8000), 0.99)
    assert keeps(low > mu, 0.99)
    assert np.mean(low > mu) > 0.005, "nor is it loose"


def test_equal_scores_say_nothing_in_whatever_order_they_are_given():
    for coins in (np.arange(1000) < 500, np.arange(1000) >= 500, np.arange(1000) % 2 == 0):
        assert audit.one_run_bound(np.zeros(1000), coins, 1e-5).epsilon == 0


def test_coins_and_guesses_that_are_none_are_refused():
    scores, coins = np.arange(20.0), np.arange(20) < 10
    assert audit.one_run_bound(scores, coins.astype(int), 1e-5, guesses=np.int64(10)).guesses == 10
    with pytest.raises(ValueError, match="coins must be True or False"):
        audit.one_run_bound(scores, ["no"] * 20, 1e-5)
    for guesses in (3.5, [], [40]):
        with pytest.raises(ValueError, match="guesses="):
            audit.one_run_bound(scores, coins, 1e-5, guesses=guesses)
