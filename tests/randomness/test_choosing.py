"""Is a candidate drawn as often as its score says?"""

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import chisquare

from vestige.randomness.exponential_mechanism import choose
from vestige.randomness.keys import Randomness

SCORES = [0.0, 3.0, -2.0, 1.0]


def drawn(epsilon, times=4000):
    stream = Randomness.reproducible(1).stream("choices", 0)
    return np.bincount([choose(SCORES, 2.0, epsilon, stream) for _ in range(times)], minlength=4)


def test_candidates_are_drawn_by_the_exponentials_of_their_scores_and_by_no_others():
    found = drawn(1.5)
    wanted = softmax(1.5 * np.array(SCORES) / (2 * 2.0))
    assert chisquare(found, wanted * found.sum()).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        other = softmax(wrong * 1.5 * np.array(SCORES) / (2 * 2.0))
        assert chisquare(found, other * found.sum()).pvalue < 1e-6


def test_without_a_budget_all_are_alike_and_with_a_large_one_the_best_wins():
    assert chisquare(drawn(0.0)).pvalue > 1e-3
    assert drawn(200.0, 50)[1] == 50


@pytest.mark.parametrize("scores", [[5.0], [1e9, 1e9 - 1], [-1e12, 0.0]])
def test_far_scores_are_no_trouble(scores):
    assert choose(scores, 1.0, 1.0, Randomness.secret().stream("choices", 0)) in range(len(scores))
