"""The statistics against scipy's own, closed forms and simulation."""

import numpy as np
import pytest
from scipy import stats

from vestige.compare.statistics import holm, least_step, paired, sentence, summarise

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
    expected = stats.ttest_rel(list(ours.values()), list(theirs.values()))
    found = paired(ours, dict(reversed(theirs.items())))
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    partial = paired({0: 0.5, 1: 0.6, 9: 0.0}, {0: 0.4, 1: 0.4})
    assert partial.pairs == 2
    assert partial.mean == pytest.approx(0.15)


def test_degenerate_pairs():
    assert paired({0: 0.5}, {1: 0.5}) is None
    assert paired({0: 0.5}, {0: 0.4}).p is None
    assert paired({0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.25}).p == 1.0
    assert paired({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}).p == 0.0


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


def test_family_wise_error_is_held_and_real_differences_are_found():
    false, found = 0, 0
    for _ in range(400):
        base = dict(enumerate(GENERATOR.normal(0, 1, 5)))
        same = [paired(dict(enumerate(GENERATOR.normal(0, 1, 5))), base).p for _ in range(5)]
        false += min(holm(same)) < 0.05
        better = {seed: value + GENERATOR.normal(8, 1) for seed, value in base.items()}
        found += holm([*same, paired(better, base).p])[-1] < 0.05
    assert false / 400 < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    assert found > 380


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_accuracies_that_agree_by_chance_prove_nothing(seeds):
    """Accuracies of 360 test examples, no real difference, 24 methods: equal gaps are common, and once were certainty."""
    step, careless, careful = 1 / 360, 0, 0
    for _ in range(150):
        runs = np.round(GENERATOR.normal(0.9, 0.005, (25, seeds)) / step) * step
        base, *others = (dict(enumerate(each)) for each in runs)
        resolution = least_step(runs.ravel())
        assert resolution == pytest.approx(step)
        careless += min(holm([paired(other, base).p for other in others])) < 0.05
        careful += min(holm([paired(other, base, resolution).p for other in others])) < 0.05
    assert careful / 150 < 0.05 + 3 * (0.05 * 0.95 / 150) ** 0.5
    assert seeds > 3 or careless / 150 > 0.1


def test_the_least_step():
    assert least_step([0.5, 0.5, 0.25, 0.5 + 1e-12, 1.0]) == 0.25
    assert least_step([0.5, 0.5]) == least_step([]) == 0


def test_sentences():
    close = paired({0: 0.50, 1: 0.51, 2: 0.49}, {0: 0.50, 1: 0.50, 2: 0.50})
    assert sentence("dp-sgd", "epsilon 3", close, 1.0) == "not distinguishable from dp-sgd at epsilon 3"
    far = paired({0: 0.60, 1: 0.61, 2: 0.59}, {0: 0.50, 1: 0.50, 2: 0.50})
    words = sentence("dp-sgd", "epsilon 3", far, 0.01)
    assert words.startswith("better than dp-sgd at epsilon 3 by 10.00 points (95% interval +7.5")
    assert "worse" in sentence("dp-sgd", "epsilon 3", paired({0: 0.1, 1: 0.11}, {0: 0.5, 1: 0.5}), 0.02)
    assert "one seed" in sentence("dp-sgd", "epsilon 3", paired({0: 0.1}, {0: 0.5}), None)
    assert "no run of dp-sgd" in sentence("dp-sgd", "epsilon 3", None, None)
