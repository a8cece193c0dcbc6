"""Are samples exactly Poisson, and can the tests tell that from other laws?"""

from fractions import Fraction
from itertools import pairwise
from math import comb

import numpy as np
import pytest
from scipy import stats

from vestige.randomness import binomial, sampling
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import DENSE, CyclicPoisson, Poisson, Shuffled, joined, places, tossed
from vestige.randomness.streams import SecretStream

POPULATION, STEPS = 400, 1000
RATES = [0.1, 0.02]
"""Above and below the rate from which on every row is tossed for."""


def draw(sampling):
    key = Randomness.secret()
    return [sampling.draw(POPULATION, t, key).numpy() for t in range(STEPS)]


def looks_poisson(draws, rate) -> bool:
    """Batch sizes like Binomial(N, q), inclusion counts like Binomial(T, q), each in mean and variance."""
    sizes = np.array([len(d) for d in draws])
    counts = np.bincount(np.concatenate(draws), minlength=POPULATION)
    return _like_binomial(sizes, POPULATION, rate) and _like_binomial(counts, STEPS, rate)


def _like_binomial(sample, trials, rate) -> bool:
    variance = trials * rate * (1 - rate)
    mean_p = stats.norm.sf(abs(sample.mean() - trials * rate) / np.sqrt(variance / len(sample)))
    spread = ((sample - trials * rate) ** 2).sum() / variance
    return mean_p > 1e-5 and 1e-5 < stats.chi2(len(sample)).cdf(spread) < 1 - 1e-5


@pytest.mark.parametrize("rate", RATES)
def test_poisson_samples_are_poisson_and_shuffled_ones_are_not(rate):
    assert looks_poisson(draw(Poisson(rate)), rate)
    assert not looks_poisson(draw(Shuffled(rate)), rate)
    assert not looks_poisson(draw(Poisson(1.1 * rate)), rate)


@pytest.mark.parametrize("rate", RATES)
def test_no_example_is_drawn_twice_in_a_step_and_rows_are_in_order(rate):
    for sample in draw(Poisson(rate))[:50]:
        assert all(a < b for a, b in pairwise(sample))


def gap_test(draws, rate) -> float:
    """The p-value of the gaps between members against the geometric law, in fifty classes of equal probability."""
    gaps = np.concatenate([np.diff(d, prepend=-1)[: len(d) // 2] for d in draws])
    edges = np.unique(stats.geom.ppf(np.linspace(0, 1, 51)[1:-1], rate))
    expected = np.diff(np.concatenate([[0.0], stats.geom.cdf(edges, rate), [1.0]]))
    seen = np.bincount(np.searchsorted(edges, gaps), minlength=len(expected))
    return float(stats.chisquare(seen, expected * seen.sum()).pvalue)


def test_gaps_between_members_are_geometric_and_other_gaps_are_seen():
    rate, rows, key = 0.01, 40_000, Randomness.secret()
    draws = [Poisson(rate).draw(rows, t, key).numpy() for t in range(200)]
    assert gap_test(draws, rate) > 1e-6
    assert gap_test([d // 2 * 2 for d in draws], rate) < 1e-6
    even = [np.sort(np.random.default_rng(t).choice(rows, 400, replace=False)) // 100 * 100 for t in range(200)]
    assert gap_test(even, rate) < 1e-6


@pytest.mark.parametrize("rate", [RATES[0], *(pytest.param(rate, marks=pytest.mark.slow) for rate in RATES[1:])])
@pytest.mark.slow
def test_the_first_the_last_and_any_two_rows_join_as_the_rest_do(rate):
    rows, times = 30, 20_000
    key = Randomness.secret()
    seen = np.zeros((times, rows), dtype=bool)
    for t in range(times):
        seen[t, Poisson(rate).draw(rows, t, key)] = True
    assert (
        stats.chisquare(np.append(seen.sum(0), times * rows - seen.sum()), _expected(rows, rate, times)).pvalue > 1e-6
    )
    pairs = (seen[:, :-1] & seen[:, 1:]).sum() + (seen[:, 0] & seen[:, -1]).sum()
    assert stats.binomtest(int(pairs), times * rows, rate**2).pvalue > 1e-6
    assert stats.binomtest(int(pairs), times * rows, 2 * rate**2).pvalue < 1e-6


def _expected(rows, rate, times):
    return [times * rate] * rows + [times * rows * (1 - rate)]


class Scripted:
    """A stream whose words are given."""

    def __init__(self, words):
        self._words = list(words)

    def words(self, count):
        taken, self._words = self._words[:count], self._words[count:]
        return np.array(taken, dtype=np.uint64)


@pytest.mark.parametrize(("trials", "rate"), [(1, 0.3), (3, 0.01), (7, 0.5), (40, 0.999), (200, 1e-3), (12, 1e-300)])
def test_the_table_bounds_the_exact_distribution_function(trials, rate):
    q = Fraction(rate)
    made = binomial.table(trials, rate)
    exact, so_far = {-1: Fraction(0)}, Fraction(0)
    for j in range(trials + 1):
        so_far += comb(trials, j) * q**j * (1 - q) ** (trials - j)
        exact[j] = so_far
    assert so_far == 1
    for place, step in enumerate(made.steps):
        at = exact[made.first - 1 + place]
        assert Fraction(step, made.total + made.slack) <= at <= Fraction(step + made.slack, made.total)
    assert made.slack < made.total >> 150


@pytest.mark.parametrize(("trials", "rate"), [(7, 0.25), (40, 0.01), (3, 0.999)])
def test_numbers_are_those_of_the_exact_inverse_at_every_edge(trials, rate):
    """Numbers of 513 bits just below and above every step of the distribution function: no first word decides there."""
    q, below = Fraction(rate), Fraction(0)
    for j in range(trials):
        below += comb(trials, j) * q**j * (1 - q) ** (trials - j)
        for toss in (int(below * 2**512) - 1, int(below * 2**512), int(below * 2**512) + 1):
            if 0 <= toss < 2**512:
                words = [(toss >> (448 - 64 * k)) & (2**64 - 1) for k in range(8)]
                number = Fraction(toss, 2**512) + Fraction(1, 2**513)
                assert binomial.draw(trials, rate, Scripted([*words, 2**63])) == (j if number < below else j + 1)


def test_binomial_numbers_fit_their_law_and_not_a_neighbouring_one():
    stream = SecretStream(bytes(range(32)))
    drawn = np.array([binomial.draw(10**7, 2e-5, stream) for _ in range(20_000)])
    assert _fits(drawn, 2e-5) > 1e-6
    assert _fits(drawn, 2.02e-5) < 1e-6


def _fits(drawn, rate) -> float:
    edges = np.arange(170, 231)
    expected = np.diff(np.concatenate([[0.0], stats.binom.cdf(edges, 10**7, rate), [1.0]]))
    seen = np.bincount(np.searchsorted(edges, drawn), minlength=len(expected))
    return float(stats.chisquare(seen, expected * len(drawn)).pvalue)


@pytest.mark.parametrize("rate", [pytest.param(0.03, marks=pytest.mark.slow), 0.4])
def test_every_set_of_four_rows_has_its_probability(rate):
    """Against the enumerated law, by both ways of drawing; the sets of another rate are rejected."""
    assert (rate > DENSE) == (rate == 0.4)
    key, times = Randomness.secret(), 15_000
    seen = np.zeros(16)
    for t in range(times):
        seen[int((1 << Poisson(rate).draw(4, t, key).numpy()).sum())] += 1
    assert _sets(seen, rate, times) > 1e-6
    assert _sets(seen, 1.1 * rate, times) < 1e-6


def _sets(seen, rate, times) -> float:
    """Sets that are expected less than five times count as one."""
    sizes = np.array([s.bit_count() for s in range(16)])
    expected = times * rate**sizes * (1 - rate) ** (4 - sizes)
    rare = expected < 5
    if rare.any():
        seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(seen, expected).pvalue)


def test_places_are_uniform_sets():
    stream = SecretStream(bytes(32))
    seen = np.zeros(64)
    for _ in range(6_000):
        seen[int((1 << places(6, 3, stream)).sum())] += 1
    assert stats.chisquare(seen[seen > 0]).pvalue > 1e-6
    assert int((seen > 0).sum()) == comb(6, 3)
    assert places(0, 0, stream).tolist() == []


@pytest.mark.parametrize("rate", [0.5, 0.3, 2.0**-11, 2.0**-12 * 1.3, 1e-5, 1 - 2.0**-53])
def test_a_toss_is_decided_at_exactly_the_rate(rate):
    """The words just below and at the threshold."""
    whole = Fraction(rate) * 2**64
    if whole.denominator == 1:
        assert tossed((2,), rate, Scripted([int(whole) - 1, int(whole)])).tolist() == [True, False]
        return
    counted = _probability_of_tosses(rate)
    assert counted == Fraction(rate)


def _probability_of_tosses(rate) -> Fraction:
    """The product of the thresholds that numbers of 53 bits are compared with."""
    thresholds = []

    class Number:
        def __lt__(self, other):
            thresholds.append(Fraction(other))
            return np.ones(1, dtype=bool)

    class TrackedParameter:
        def random(self, shape):
            return Number()

    tossed((1,), rate, TrackedParameter())
    assert all((each * 2**53).denominator == 1 for each in thresholds)
    return Fraction(np.prod(thresholds))


def test_shuffled_shows_each_example_once_an_epoch():
    draws = draw(Shuffled(0.1))[:10]
    assert sorted(np.concatenate(draws)) == list(range(POPULATION))


def test_rate_one_takes_everybody():
    assert len(Poisson(1.0).draw(50, 0, Randomness.secret())) == 50
    assert tossed((50,), 1.0, SecretStream(bytes(32))).all()


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate="):
        Poisson(rate)


def test_a_draw_touches_no_more_words_than_its_sample(monkeypatch):
    """However many rows there are."""
    drawn = []
    real = SecretStream.words
    monkeypatch.setattr(SecretStream, "words", lambda self, count: drawn.append(count) or real(self, count))
    for rows in (10**4, 10**12):
        drawn.clear()
        sample = joined(rows, 100 / rows, SecretStream(bytes(range(32))))
        assert sum(drawn) <= 2 + 2 * len(sample)


def test_parts_of_the_data_stay_as_they_are_and_may_be_empty():
    key = Randomness.secret()
    first, again = (CyclicPoisson(0.02, 50) for _ in range(2))
    assert first.draw(30, 3, key).tolist() == again.draw(30, 53, key).tolist()  # rate 1 within a part
    assert sum(len(first.draw(30, t, key)) for t in range(50)) == 30
    assert sampling.parts(30, 50, key, False) is sampling.parts(30, 50, key, False)
