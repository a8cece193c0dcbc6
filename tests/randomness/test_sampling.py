"""Are samples Poisson, and can the tests tell Poisson from shuffled?"""

import numpy as np
import pytest
from scipy import stats

from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson, Shuffled

POPULATION, RATE, STEPS = 400, 0.1, 1000


def draw(sampling):
    key = Randomness.secret()
    return [sampling.draw(POPULATION, t, key).numpy() for t in range(STEPS)]


def looks_poisson(draws) -> bool:
    """Batch sizes like Binomial(N, q), inclusion counts like Binomial(T, q), each in mean and variance."""
    sizes = np.array([len(d) for d in draws])
    counts = np.bincount(np.concatenate(draws), minlength=POPULATION)
    return _like_binomial(sizes, POPULATION) and _like_binomial(counts, STEPS)


def _like_binomial(sample, trials) -> bool:
    variance = trials * RATE * (1 - RATE)
    mean_p = stats.norm.sf(abs(sample.mean() - trials * RATE) / np.sqrt(variance / len(sample)))
    spread = ((sample - trials * RATE) ** 2).sum() / variance
    return mean_p > 1e-5 and 1e-5 < stats.chi2(len(sample)).cdf(spread) < 1 - 1e-5


def test_poisson_samples_are_poisson_and_shuffled_ones_are_not():
    assert looks_poisson(draw(Poisson(RATE)))
    assert not looks_poisson(draw(Shuffled(RATE)))


def test_no_example_is_drawn_twice_in_a_step():
    for sample in draw(Poisson(RATE))[:50]:
        assert len(np.unique(sample)) == len(sample)


def test_shuffled_shows_each_example_once_an_epoch():
    draws = draw(Shuffled(RATE))[:10]
    assert sorted(np.concatenate(draws)) == list(range(POPULATION))


def test_rate_one_takes_everybody():
    assert len(Poisson(1.0).draw(50, 0, Randomness.secret())) == 50


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate="):
        Poisson(rate)
