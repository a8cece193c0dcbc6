"""Is the better of two lower bounds still a lower bound, and does it see what the other misses?"""

import numpy as np
import pytest

from vestige.accounting.lower_bounds.bounds_from_scores import (
    area_lower_bound,
    best_lower_bound,
    epsilon_lower_bound,
    epsilon_of_mu,
)


def normal(random, mu, runs):
    return random.normal(mu, 1, runs // 2), random.normal(0, 1, runs // 2)


def response(random, epsilon, runs):
    """Scores by randomized response: no pair of distributions with this epsilon has an ROC of more area."""
    keep = np.exp(epsilon) / (1 + np.exp(epsilon))
    sides = [random.random(runs // 2) < keep, random.random(runs // 2) >= keep]
    return [side + 1e-9 * random.random(len(side)) for side in sides]  # ties are told apart by a coin


@pytest.mark.parametrize("kind", ["normal", "response"])
@pytest.mark.everyday("response")
def test_it_exceeds_epsilon_as_rarely_as_it_says(kind):
    """Of 1,000 audits at 80% confidence, about 200 at most; each bound at the whole error would exceed it more often."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(1000):
        if kind == "normal":
            scores, truth = normal(random, 1.5, 100), epsilon_of_mu(1.5, 1e-5)
        else:
            scores, truth = response(random, 1.0, 100), 1.0
        wrong += best_lower_bound(*scores, 1e-5, 0.8)[0] > truth
    assert wrong <= 200 + 3 * np.sqrt(160)


def test_each_bound_is_taken_with_half_the_error():
    scores = normal(np.random.default_rng(3), 2.0, 400)
    best, _, threshold = best_lower_bound(*scores, 1e-5, 0.9)
    assert threshold == epsilon_lower_bound(*scores, 1e-5, 0.95)
    assert best == max(threshold.epsilon, area_lower_bound(*scores, 1e-5, 0.95))
    assert threshold.epsilon < epsilon_lower_bound(*scores, 1e-5, 0.9).epsilon


def test_the_area_alone_is_tight_for_randomized_response():
    random = np.random.default_rng(1)
    found = [area_lower_bound(*response(random, 2.0, 200_000), 1e-6, 0.95) for _ in range(5)]
    assert all(1.9 < each < 2.02 for each in found)


def test_few_runs_at_a_large_epsilon_show_something():
    """400 runs at epsilon 4: a threshold has to pay for two rates at a small delta, a pair for one."""
    mu = 0.92  # epsilon 4 at delta 1e-5, about
    assert epsilon_of_mu(mu, 1e-5) == pytest.approx(4.0, abs=0.2)
    scores = [normal(np.random.default_rng(seed), mu, 400) for seed in range(20)]
    threshold = np.mean([epsilon_lower_bound(*each, 1e-5, 0.95).epsilon for each in scores])
    best = [best_lower_bound(*each, 1e-5, 0.95) for each in scores]
    assert np.mean([each[0] for each in best]) > max(0.4, threshold - 0.1)
    assert "area" in {each[1] for each in best}


def test_a_weaker_direction_shows_nothing():
    random = np.random.default_rng(2)
    inside, outside = normal(random, -2.0, 400)
    assert area_lower_bound(inside, outside, 1e-5) == 0
    assert area_lower_bound([1.0] * 50, [1.0] * 50, 1e-5) == 0
