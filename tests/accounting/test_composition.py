"""Is a history's epsilon that of the papers and of other accountants, monotone, and never too low?"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import ceil, inf

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from histories import DELTA, steps
from vestige.accounting import composition, epsilon, rdp, theorems
from vestige.priced_questions import CyclicGaussian, Gaussian, Question, SampledGaussian


@pytest.mark.parametrize(
    ("multiplier", "classic", "tight", "pld"),
    [
        (1.1, 23.90, 22.64, 21.13),
        pytest.param(1.1 / 0.95, 21.80, 20.59, 19.21, marks=pytest.mark.slow),
        (1.1 / 0.9, 19.86, 18.70, 17.44),
        pytest.param(1.1 / 0.8, 16.39, 15.35, 14.29, marks=pytest.mark.slow),
        (1.1 / 0.65, 12.06, 11.16, 10.37),
    ],
)
def test_published_table(multiplier, classic, tight, pld):
    history = steps(multiplier)
    assert epsilon(history, DELTA) == pytest.approx(pld, abs=0.006)
    assert tight - 0.012 < epsilon(history, DELTA, "rdp") < tight + 0.006  # our orders are finer
    assert rdp.classic_epsilon(theorems.total_curve(history), DELTA) == pytest.approx(classic, abs=0.012)


def test_dp_accounting_agrees_on_a_mixed_history():
    history: dict[Question, int] = {
        SampledGaussian(0.04, 1.2): 300,
        SampledGaussian(0.01, 0.8): 500,
        Gaussian(9.0): 2,
        CyclicGaussian(0.1, 2.0, 5): 101,
    }
    reference = PLDAccountant(value_discretization_interval=2e-3)
    for rate, multiplier, count in [(0.04, 1.2, 300), (0.01, 0.8, 500), (1.0, 9.0, 2), (0.1, 2.0, 21)]:
        reference.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), count)
    assert epsilon(history, DELTA) == pytest.approx(reference.get_epsilon(DELTA), rel=1e-3)
    assert epsilon(history, DELTA) <= reference.get_epsilon(DELTA) + 1e-9  # ours is on a finer grid


def test_opacus_prv_agrees():
    prv = pytest.importorskip("opacus.accountants").PRVAccountant()
    prv.history = [(1.1 / 0.9, 0.04, 6250)]
    assert epsilon(steps(1.1 / 0.9), DELTA) == pytest.approx(prv.get_epsilon(DELTA), abs=0.02)


def test_degenerate_histories():
    assert epsilon({}, DELTA) == 0
    assert epsilon({SampledGaussian(0.1, 1.0): 0}, DELTA) == 0
    assert epsilon({SampledGaussian(0.0, 0.0): 10, SampledGaussian(0.5, inf): 10}, DELTA) == 0
    assert epsilon({SampledGaussian(0.1, 0.0): 1}, DELTA) == inf
    assert epsilon({SampledGaussian(0.1, 0.0): 1}, DELTA, "rdp") == inf
    free = {**steps(1.5, 100), SampledGaussian(0.5, inf): 10}
    assert epsilon(free, DELTA) == epsilon(steps(1.5, 100), DELTA)


@pytest.mark.parametrize(
    ("rate", "multiplier", "count"), [(0.04, 0.1, 6250), (0.04, 0.01, 10), (1.0, 1e-4, 1), (1e-4, 0.2919, 1)]
)
def test_absurd_noise_is_priced_from_above_without_failing(rate, multiplier, count):
    spent = epsilon(steps(multiplier, count, rate), DELTA)
    assert 0 < spent <= epsilon(steps(multiplier, count, rate), DELTA, "rdp") < inf


def test_an_overflow_in_one_order_hides_no_cost():
    assert epsilon(steps(0.2919, 1, 1e-4), DELTA) == pytest.approx(0.80333, abs=1e-4)  # dp_accounting


sampled = st.builds(SampledGaussian, st.floats(0.001, 1.0), st.floats(0.4, 20.0))


@settings(deadline=None, max_examples=30)
@given(sampled, st.integers(1, 5000), st.floats(1.0, 4.0), st.floats(1e-9, 1e-2))
def test_renyi_epsilon_is_monotone(question, count, factor, delta):
    def spent(question: Question, count: int) -> float:
        return epsilon({question: count}, delta, "rdp")

    base = spent(question, count) * (1 + 1e-9)
    assert spent(question, ceil(count / factor)) <= base
    assert spent(replace(question, multiplier=question.multiplier * factor), count) <= base
    assert spent(replace(question, rate=question.rate / factor), count) <= base
    assert epsilon({question: count}, delta * factor, "rdp") <= base


@settings(deadline=None, max_examples=3)
@given(sampled, st.integers(1, 3000), st.floats(1.05, 2.0))
def test_distribution_epsilon_is_monotone_and_below_renyi(question, count, factor):
    spent = epsilon({question: count}, DELTA)
    assert epsilon({replace(question, multiplier=question.multiplier * factor): count}, DELTA) <= spent * 1.0002 + 1e-6
    assert epsilon({question: ceil(count / factor)}, DELTA) <= spent * 1.0002 + 1e-6
    assert spent <= epsilon({question: count}, DELTA, "rdp") * 1.0002 + 1e-6


def test_grids_nest_so_that_finer_is_never_above():
    values = [
        composition.epsilon_by_distribution(steps(1.3, 500), DELTA, fineness) for fineness in (64e-5, 16e-5, 4e-5, 1e-5)
    ]
    assert all(finer <= coarser + 1e-9 for coarser, finer in pairwise(values))
    assert values[0] < values[-1] * 1.005
    assert values[-1] == pytest.approx(values[-2], rel=1e-4)


def test_many_distinct_multipliers_are_rounded_down_together():
    history = Counter({SampledGaussian(0.04, 1 + i / 100): 5 for i in range(100)})
    fewer = composition._fewer(history)
    assert len(fewer) == composition.DISTINCT
    assert sum(fewer.values()) == sum(history.values())
    assert min(q.multiplier for q in fewer) == 1.0
    rounded, exact = theorems.total_curve(fewer), theorems.total_curve(history)
    assert np.all(rounded >= exact)
    assert np.all((rounded <= exact * 1.02)[rdp.ORDERS < 4])
    assert 0.8 * epsilon(history, DELTA, "rdp") < epsilon(history, DELTA) < epsilon(history, DELTA, "rdp")
