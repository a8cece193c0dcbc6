"""The statistics against scipy's own, closed forms and enumeration."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from vestige.compare import statistics
from vestige.compare.statistics import (
    COUNTED,
    DRAWN,
    exchange_p,
    holm,
    paired,
    seeds_to_tell,
    sentence,
    summarise,
    untested,
)

GENERATOR = np.random.default_rng(7)


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_summary_is_scipys(count):
    values = GENERATOR.normal(0.4, 0.02, count)
    ours = summarise(values.tolist())
    low, high = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    assert ours.mean == pytest.approx(values.mean(), rel=1e-12)
    assert ours.sd == pytest.approx(values.std(ddof=1), rel=1e-12)
    assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-12)


def test_one_value_has_no_interval_and_none_is_refused():
    assert summarise([0.5]).low is None
    with pytest.raises(ValueError, match="at least one"):
        summarise([])


def test_paired_is_scipys_and_pairs_by_seed():
    ours = {seed: value for seed, value in enumerate(GENERATOR.normal(0.41, 0.01, 6))}
    theirs = {seed: value for seed, value in enumerate(GENERATOR.normal(0.40, 0.01, 6))}
    found = paired(ours, dict(reversed(theirs.items())))
    expected = stats.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-10)
    assert found.p == exchange_p([ours[seed] - theirs[seed] for seed in range(6)])
    partial = paired({0: 0.5, 1: 0.6, 9: 0.0}, {0: 0.4, 1: 0.4})
    assert partial.pairs == 2
    assert partial.mean == pytest.approx(0.15)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 11])
def test_the_exchange_test_counts_what_scipy_counts(count):
    """Continuous gaps, and gaps of whole examples, of which many exchanges have equal means."""
    for gaps in (GENERATOR.normal(0.3, 1, count), GENERATOR.integers(-2, 4, count) / 360):
        expected = stats.permutation_test(
            (gaps,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
        )
        by_hand = np.mean(
            [abs(np.dot(signs, gaps)) >= abs(gaps.sum()) - 1e-9 for signs in product([1, -1], repeat=count)]
        )
        assert exchange_p(gaps.tolist()) == pytest.approx(by_hand, abs=1e-12)
        assert by_hand == pytest.approx(min(1.0, expected.pvalue), abs=1e-9)


def test_the_least_p_and_the_seeds_that_it_takes():
    for count in (2, 5, 20, COUNTED):
        assert exchange_p([0.1] * count) == pytest.approx(2.0 ** (1 - count), rel=1e-12)
    assert exchange_p([0.1] * (COUNTED + 8)) == 1 / (DRAWN + 1)
    assert exchange_p([0.0] * 5) == exchange_p([0.0] * 50) == 1.0
    for rows in (1, 2, 12, 30, 184):
        seeds = seeds_to_tell(rows)
        assert holm([2.0 ** (1 - seeds)] * rows)[0] < 0.05 <= holm([2.0 ** (2 - seeds)] * rows)[0]


def test_drawn_exchanges_agree_with_counted_ones(monkeypatch):
    gaps = GENERATOR.normal(0.25, 1, 30)
    counted = exchange_p(gaps)
    monkeypatch.setattr(statistics, "COUNTED", 10)
    drawn = exchange_p(gaps)
    assert drawn == exchange_p(gaps)
    assert abs(drawn - counted) < 5 * np.sqrt(counted * (1 - counted) / DRAWN)


def test_degenerate_pairs():
    assert paired({0: 0.5}, {1: 0.5}) is None
    assert paired({0: 0.5}, {0: 0.4}).p is None
    assert paired({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.25}).p == 1.0
    assert paired({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}).p == 0.5


def test_holm_by_hand_and_against_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    p = GENERATOR.uniform(size=40)
    adjusted = np.array(holm(p.tolist()))
    for alpha in (0.05, 0.3, 0.9):  # the step-down procedure itself
        rejected = np.zeros(40, bool)
        for rank, index in enumerate(np.argsort(p)):
            if p[index] > alpha / (40 - rank):
                break
            rejected[index] = True
        assert (rejected == (adjusted <= alpha)).all()


def test_sentences():
    seven, base = range(7), dict.fromkeys(range(7), 0.5)
    close = paired({seed: 0.5 + 0.01 * (-1) ** seed for seed in seven}, base)
    assert sentence("dp-sgd", "epsilon 3", close, 1.0, 2) == "not distinguishable from dp-sgd at epsilon 3"
    far = paired({seed: 0.6 + 0.01 * (-1) ** seed for seed in seven}, base)
    words = sentence("dp-sgd", "epsilon 3", far, 0.03, 2)
    assert words.startswith(
        "better than dp-sgd at epsilon 3 by 10.14 points (95% interval +9.15 to +11.13, p = 0.03 af"
    )
    assert "worse" in sentence("dp-sgd", "epsilon 3", paired(dict.fromkeys(seven, 0.1), base), 0.02, 2)
    few = sentence("dp-sgd", "epsilon 3", far, 0.05, 4)
    assert few.startswith("too few seeds to tell it from dp-sgd at epsilon 3: 7, and 4 rows need 8 (+10.14 points, 95%")
    assert "and 1 row needs 6" in sentence("dp-sgd", "epsilon 3", paired({0: 0.1, 1: 0.2}, base), 0.5, 1)
    assert "one seed" in sentence("dp-sgd", "epsilon 3", paired({0: 0.1}, {0: 0.5}), None, 1)
    assert "no run of dp-sgd" in sentence("dp-sgd", "epsilon 3", None, None, 1)
    words = untested("dp-sgd", "epsilon 3", far)
    assert words.startswith("+10.14 points against dp-sgd at epsilon 3 (95% interval +9.15 to +11.13 at the rates that")
    assert words.endswith("not tested: one choice of the rate serves every seed, and its luck is in no interval")
    assert "interval " not in untested("dp-sgd", "epsilon 3", paired({0: 0.1}, {0: 0.5})).partition(";")[0]
