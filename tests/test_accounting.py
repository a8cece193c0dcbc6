"""Is what was asked priced by its theorem, never too low, and is a budget never exceeded?"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, inf
from typing import ClassVar

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import ndtr

from vestige import accounting
from vestige.accounting import (
    Budget,
    Facts,
    Odometer,
    RenyiFilter,
    budgets,
    calibrate,
    calibration,
    composition,
    epsilon,
    guarantee,
    published_claim_epsilon,
    rdp,
    theorems,
    tuned_epsilon,
    tuning,
)
from vestige.checks import accounted_multiplier
from vestige.mechanism.adaptive_clipping import Counted
from vestige.questions import CyclicGaussian, Gaussian, Question, SampledGaussian

DELTA = 1e-5


def steps(multiplier: float, count: int = 6250, rate: float = 0.04) -> dict[Question, int]:
    return {SampledGaussian(rate, multiplier): count}


# --- epsilon against published values and other accountants ---


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


@pytest.mark.parametrize(("groups", "memory", "published"), [(3, 1.0, 77.8), (21, 0.9, 1246.0)])
def test_groups_on_one_sample_are_whitened(groups, memory, published):
    multiplier = accounted_multiplier(1.1, memory, groups)
    assert multiplier == pytest.approx(1.1 / memory / groups**0.5)
    assert accounted_multiplier(2.0) == 2.0
    assert epsilon(steps(multiplier), DELTA) == pytest.approx(published, rel=1.5e-3)


def test_one_sample_for_two_answers_costs_more_than_two_samples():
    one, both = SampledGaussian(0.04, 1.1), SampledGaussian(0.04, accounted_multiplier(1.1, groups=2))
    assert epsilon({one: 2500}, DELTA) == pytest.approx(12.0, abs=0.05)
    assert epsilon({both: 2500}, DELTA) == pytest.approx(24.9, abs=0.05)
    assert epsilon({one: 5000}, DELTA) == pytest.approx(18.3, abs=0.05)


def test_a_whitened_quantile_costs_little():
    joint = (1.1**-2 + 20.0**-2) ** -0.5
    assert Counted(1.0, count_noise=10.0).gradient_multiplier(joint, 200.0) == pytest.approx(1.1)
    assert Counted(1.0, count_noise=inf).gradient_multiplier(3.0, 200.0) == 3.0
    assert epsilon(steps(joint), DELTA) == pytest.approx(21.19, abs=0.01)


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


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (1.0, 10), (30.0, 500), (0.2, 1)])
def test_without_sampling_the_closed_form(multiplier, count):
    mu = count**0.5 / multiplier

    def delta_at(loss: float) -> float:  # Balle & Wang 2018
        return float(ndtr(mu / 2 - loss / mu) - exp(loss) * ndtr(-mu / 2 - loss / mu))

    exact = brentq(lambda loss: delta_at(loss) - DELTA, 0, 100)
    for question in (Gaussian(multiplier), SampledGaussian(1.0, multiplier)):
        assert exact * (1 - 1e-9) <= epsilon({question: count}, DELTA) <= exact * 1.0005


def test_correlated_noise_charges_an_example_once_per_cycle():
    for count in (1, 7, 8, 9):
        cyclic = {CyclicGaussian(0.2, 1.5, 4): count}
        assert epsilon(cyclic, DELTA, "rdp") == epsilon({SampledGaussian(0.2, 1.5): ceil(count / 4)}, DELTA, "rdp")
    plain = {SampledGaussian(0.2, 1.5): 50}
    assert epsilon({CyclicGaussian(0.2, 1.5, 1): 50}, DELTA) == epsilon(plain, DELTA)


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


@dataclass(frozen=True)
class Unheard(Question):
    kind: ClassVar[str] = "unheard"
    rate: float


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: epsilon({Unheard(0.1): 1}, DELTA), "Unheard"),
        (lambda: epsilon({}, 0.0), "delta=0.0"),
        (lambda: epsilon({}, 1.0), "delta=1.0"),
        (lambda: epsilon({}, DELTA, "moments"), "accountant='moments'"),
        (lambda: epsilon(steps(1.0, -1), DELTA), "count=-1"),
        (lambda: SampledGaussian(1.5, 1.0), "rate=1.5"),
        (lambda: SampledGaussian(0.5, -1.0), "multiplier=-1.0"),
        (lambda: Gaussian(float("nan")), "multiplier=nan"),
        (lambda: CyclicGaussian(0.1, 1.0, 0), "bands=0"),
        (lambda: calibrate(lambda z: steps(z), -1.0, DELTA), "epsilon=-1.0"),
        (lambda: tuned_epsilon({}, DELTA, 0.5), "expected_runs=0.5"),
        (lambda: tuned_epsilon({}, DELTA, 5, -1), "shape=-1"),
        (lambda: tuned_epsilon({}, DELTA, 5, repeats=0), "repeats=0"),
        (lambda: tuned_epsilon({}, DELTA, 5, final_runs=-1), "final_runs=-1"),
        (lambda: tuned_epsilon([], DELTA, 5), "history="),
        (lambda: Budget(-1.0, DELTA, {}), "epsilon=-1.0"),
        (lambda: RenyiFilter(1.0, DELTA, {}), "planned"),
        (lambda: RenyiFilter(1.0, DELTA, steps(1.0), weight=1.0), "weight=1.0"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()


# --- laws ---

sampled = st.builds(SampledGaussian, st.floats(0.001, 1.0), st.floats(0.4, 20.0))


@settings(deadline=None, max_examples=60)
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


# --- calibration ---


@pytest.mark.parametrize(("target", "published"), [(1.0, 11.86), (3.0, 4.473), (8.0, 2.034)])
def test_calibration_reaches_its_target_from_below(target, published):
    start = time.process_time()
    multiplier = calibrate(steps, target, DELTA)
    assert time.process_time() - start < 5
    assert multiplier == pytest.approx(published, rel=2e-3)
    assert 0.999 * target <= epsilon(steps(multiplier), DELTA) <= target
    assert Budget(target, DELTA, steps(multiplier)).fits


@settings(deadline=None, max_examples=3)
@given(st.floats(0.002, 1.0), st.integers(1, 2000), st.floats(0.05, 30.0))
def test_calibration_never_exceeds(rate, count, target):
    multiplier = calibrate(lambda z: steps(z, count, rate), target, DELTA)
    assert 0.999 * target <= epsilon(steps(multiplier, count, rate), DELTA) <= target


@pytest.mark.parametrize("start", [0.9995, 0.5, 1.5, 1.0005])
def test_a_search_never_returns_a_multiplier_above_the_target(start):
    search = calibration._Calibration(steps, 1.0, DELTA)
    assert 0.999 <= 1 / search.solve(lambda multiplier: 1 / multiplier, 0.1, 10.0, start=start) <= 1


def test_calibration_by_renyi_needs_more_noise():
    by_renyi = calibrate(steps, 3.0, DELTA, "rdp")
    assert 0.999 * 3 <= epsilon(steps(by_renyi), DELTA, "rdp") <= 3
    assert by_renyi > calibrate(steps, 3.0, DELTA)


def test_calibration_beside_a_fixed_cost():
    fixed = {SampledGaussian(0.04, 1.0): 10}
    multiplier = calibrate(lambda z: {**fixed, **steps(z, 100)}, 2.0, DELTA)
    assert 1.998 <= epsilon({**fixed, **steps(multiplier, 100)}, DELTA) <= 2.0
    with pytest.raises(ValueError, match=r"epsilon=0.5 cannot be reached.*larger epsilon"):
        calibrate(lambda z: {**fixed, **steps(z, 100)}, 0.5, DELTA)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate(lambda z: {}, 0.5, DELTA)


# --- while training ---


def test_the_odometer_is_the_renyi_accountant():
    odometer, history = Odometer({SampledGaussian(0.04, 2.0): 3}), Counter({SampledGaussian(0.04, 2.0): 3})
    for i in range(30):
        question = CyclicGaussian(0.1, 3.0, 7) if i % 2 else SampledGaussian(0.04, 1.0 + i / 10)
        odometer.add(question)
        history[question] += 1
        if i % 3 == 0:
            assert odometer.epsilon(DELTA) == pytest.approx(epsilon(history, DELTA, "rdp"), rel=1e-12)
    odometer.add_many({Gaussian(5.0): 2})
    assert odometer.epsilon(DELTA) == pytest.approx(epsilon(history + Counter({Gaussian(5.0): 2}), DELTA, "rdp"))
    assert Odometer().epsilon(DELTA) == 0


def test_the_odometer_is_cheap():
    theorems._CURVES.clear()
    odometer, start = Odometer(), time.process_time()
    for i in range(1000):
        odometer.add(SampledGaussian(0.04, 1 + i / 500))
        odometer.epsilon(DELTA)
    assert time.process_time() - start < 1.0
    start = time.process_time()
    for _ in range(1000):
        odometer.add(SampledGaussian(0.04, 1.0))
        odometer.epsilon(DELTA)
    assert time.process_time() - start < 0.2


def test_a_budget_certifies_the_longest_prefix():
    first, second = SampledGaussian(0.04, 2.0), SampledGaussian(0.04, 1.0)
    budget = Budget(3.0, DELTA, [(first, 200), (second, 2000)])
    assert not budget.fits
    assert budget.certified[first] == 200
    assert epsilon(budget.certified, DELTA) <= 3.0
    more = {first: 200, second: budget.certified[second] + 1}
    assert epsilon(more, DELTA) > 3.0
    assert budget.allows({first: 200, second: budget.certified[second] - 1}, second)
    assert not budget.allows(budget.certified, second)
    assert not budget.allows(budget.certified, first) or epsilon({**budget.certified, first: 201}, DELTA) <= 3.0


def test_a_certified_plan_is_allowed_without_work(monkeypatch):
    question = SampledGaussian(0.04, 2.0)
    budget = Budget(8.0, DELTA, {question: 500})
    monkeypatch.setattr(accounting, "epsilon", None)
    monkeypatch.setattr(budgets, "epsilon_by_distribution", None)
    spent: Counter[Question] = Counter()
    while spent[question] < 500:
        assert budget.allows(spent, question)
        spent[question] += 1


def test_a_budget_is_never_exceeded_outside_its_plan():
    budget, spent = Budget(1.0, DELTA, []), Counter()
    pattern = [SampledGaussian(0.1, 2.0), SampledGaussian(0.1, 1.5), SampledGaussian(0.02, 0.9)]
    for i in range(400):
        question = pattern[i % 3]
        if not budget.allows(spent, question):
            break
        spent[question] += 1
    assert 5 < sum(spent.values()) < 400
    assert epsilon(spent, DELTA) <= 1.0 < epsilon(spent + Counter([question]), DELTA)


def test_more_budget_allows_more_steps():
    question = SampledGaussian(1024 / 60_000, 3.0)
    counts = [Budget(target, DELTA, {question: 2500}).certified[question] for target in (0.3, 1.0)]
    assert counts == sorted(set(counts))
    assert counts[1] == pytest.approx(2045, abs=5)
    assert Budget(0.0, DELTA, {question: 5}).certified.get(question, 0) == 0
    assert Budget(inf, DELTA, {SampledGaussian(0.1, 0.0): 5}).fits


def test_a_filter_spends_nearly_a_plan():
    question = SampledGaussian(0.04, 2.5)
    target = epsilon({question: 3000}, DELTA, "rdp")
    door = RenyiFilter(target, DELTA, {question: 3000})
    count = 0
    while door.allows(question):
        door.spend(question)
        count += 1
    assert count == pytest.approx(2865, abs=5)  # the rest buys an order that bears noise which shrinks on the way
    assert door.history == {question: count}
    with pytest.raises(ValueError, match="stop here"):
        door.spend(question)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0.7, 1.0, 1.5, 3.0, 8.0]), min_size=1, max_size=400), st.floats(0.3, 6.0))
def test_a_filter_never_allows_beyond(multipliers, target):
    """At the end some order is within its budget, and the shares of delta add up to delta."""
    door = RenyiFilter(target, DELTA, steps(1.5, 100))
    for multiplier in multipliers:
        question = SampledGaussian(0.04, multiplier)
        if door.allows(question):
            door.spend(question)
    curve = theorems.total_curve(door.history)
    shares = [
        (weight, budget)
        for order, weight, budget, spent in zip(rdp.ORDERS, door.weights, door.budgets, curve, strict=True)
        if spent <= budget + 1e-12
    ]
    assert shares
    assert door.weights.sum() == pytest.approx(1)
    assert epsilon(door.history, DELTA, "rdp") <= target
    # The order's budget turns weight * delta into epsilon exactly: curve + conversion = epsilon.
    at = int(np.argmax(door.weights))
    single = door.budgets[at] + rdp.CONVERSION[at] - np.log(door.weights[at] * DELTA) / (rdp.ORDERS[at] - 1)
    assert single == pytest.approx(target)


def test_a_filter_refuses_questions_whose_price_supposes_a_fixed_strategy():
    with pytest.raises(ValueError, match="Budget"):
        RenyiFilter(1.0, DELTA, steps(1.0)).allows(CyclicGaussian(0.1, 1.0, 4))


# --- what may be said ---


def test_a_guarantee_carries_its_assumptions():
    said = guarantee(steps(2.0, 100), DELTA, Facts())
    assert said.epsilon == epsilon(steps(2.0, 100), DELTA)
    assert said.epsilon_rdp == epsilon(steps(2.0, 100), DELTA, "rdp")
    assert said.accountant == "pld"
    assert said.adjacency == "add/remove one example"
    assert said.reasons == ()
    assert any("secret" in assumption for assumption in said.assumptions)
    assert guarantee({}, DELTA, Facts()).epsilon == 0


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (Facts(sampling="shuffled"), "shuffled"),
        (Facts(sampling="cyclic-poisson"), "SampledGaussian"),
        (Facts(sampling="every-example"), "SampledGaussian"),
        (Facts(examples_independent=False), "clipping"),
        (Facts(schedule="data-dependent"), "filter"),
        (Facts(schedule="filtered"), "filter"),
        (Facts(schedule="annealed"), "annealed"),
        (Facts(nonprivate_outputs=True), "without noise"),
        (Facts(noise="seeded"), "seed"),
        (Facts(noise="borrowed"), "borrowed"),
    ],
)
def test_without_a_theorem_there_is_no_epsilon(facts, word):
    said = guarantee(steps(2.0, 100), DELTA, facts)
    assert said.epsilon is None
    assert len(said.reasons) == 1
    assert word in said.reasons[0]


def test_seeded_noise_is_priced_as_if_it_were_secret():
    said = guarantee(steps(2.0, 100), DELTA, Facts(noise="seeded"))
    assert said.epsilon is None
    assert said.epsilon_if_noise_were_secret == epsilon(steps(2.0, 100), DELTA)
    shuffled = guarantee(steps(2.0, 100), DELTA, Facts(noise="seeded", sampling="shuffled"))
    assert shuffled.epsilon_if_noise_were_secret is None
    assert len(shuffled.reasons) == 2


def test_no_noise_no_epsilon():
    said = guarantee(steps(0.0, 1), DELTA, Facts())
    assert said.epsilon is None
    assert "without noise" in said.reasons[0]


def test_a_filtered_run_is_promised_the_filters_epsilon():
    said = guarantee(steps(2.0, 100), DELTA, Facts(schedule="filtered", filter_epsilon=5.0))
    assert (said.epsilon, said.accountant) == (5.0, "renyi filter")
    cheat = guarantee(steps(0.5, 1000), DELTA, Facts(schedule="filtered", filter_epsilon=5.0))
    assert cheat.epsilon is None
    assert "filter" in cheat.reasons[0]
    assert cheat.epsilon_rdp > 5
    assert cheat.epsilon_if_noise_were_secret is None


# --- other prices ---


@pytest.mark.parametrize(
    ("base", "geometric", "logarithmic", "hundred"),
    [(1.0, 2.31, 1.91, 2.28), (3.0, 6.18, 5.29, 6.27), (8.0, 13.8, 12.5, 14.8)],
)
def test_price_of_a_search(base, geometric, logarithmic, hundred):
    history = steps({1.0: 11.844, 3.0: 4.4728, 8.0: 2.0338}[base])
    assert tuned_epsilon(history, DELTA, 10, 1) == pytest.approx(geometric, rel=5e-3)
    assert tuned_epsilon(history, DELTA, 10, 0) == pytest.approx(logarithmic, rel=5e-3)
    assert tuned_epsilon(history, DELTA, 100, 0) == pytest.approx(hundred, rel=5e-3)


def test_price_of_a_search_equals_dp_accounting():
    history, orders = steps(4.0), rdp.INTEGER_ORDERS  # its fractional orders are looser than ours
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.04, GaussianDpEvent(4.0)), 6250)
    for mean, shape in [(10, 1), (10, 0), (7.5, 0.5)]:
        accountant = RdpAccountant(orders=list(orders))
        accountant.compose(RepeatAndSelectDpEvent(run, mean, shape))
        curve = theorems.total_curve(history)[len(rdp.FRACTIONAL_ORDERS) :]
        stop = tuning.stopping_probability(mean, shape)
        selection = (1 + shape) * np.min((1 - 1 / orders) * curve - np.log(stop) / orders)
        ours = curve + selection + np.log(mean) / (orders - 1)
        np.testing.assert_allclose(accountant.rdp, np.minimum.accumulate(ours[::-1])[::-1], rtol=1e-6)
        assert tuned_epsilon(history, DELTA, mean, shape) <= accountant.get_epsilon(DELTA) + 1e-9


def test_a_trial_of_several_runs_costs_what_the_search_over_so_long_a_run_costs():
    single, triple = steps(4.0), {question: 3 * count for question, count in steps(4.0).items()}
    assert tuned_epsilon(single, DELTA, 7, repeats=3) == pytest.approx(tuned_epsilon(triple, DELTA, 7), rel=1e-9)
    # A cycle that a run leaves unfinished is not finished by the next run: both pay for it.
    cycle = {CyclicGaussian(1.0, 4.0, 25): 30}
    joined = {question: 2 * count for question, count in cycle.items()}
    assert tuned_epsilon(cycle, DELTA, 7, repeats=2) > tuned_epsilon(joined, DELTA, 7)
    run = SelfComposedDpEvent(PoissonSampledDpEvent(0.04, GaussianDpEvent(4.0)), 3 * 6250)
    accountant = RdpAccountant()
    accountant.compose(RepeatAndSelectDpEvent(run, 7, 1))
    ours, theirs = tuned_epsilon(single, DELTA, 7, repeats=3), accountant.get_epsilon(DELTA)
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours <= theirs + 1e-9
    assert ours > 1.5 * tuned_epsilon(single, DELTA, 7)


def test_a_search_of_one_run_by_the_geometric_law_still_costs_and_more_runs_cost_more():
    history = steps(4.0)
    prices = [tuned_epsilon(history, DELTA, mean) for mean in (1, 2, 10, 100)]
    assert prices == sorted(prices)
    assert prices[0] >= epsilon(history, DELTA, "rdp")
    assert tuned_epsilon({}, DELTA, 10) == 0


def test_the_published_claim_for_selective_updates():
    claim = published_claim_epsilon(1246, 1024 / 60_000, 3.0, 256 / 60_000, 1.37, DELTA)
    assert claim == pytest.approx(1.0, abs=0.001)


def test_questions_survive_json():
    for question in (SampledGaussian(0.1, 1.5), Gaussian(2.0), CyclicGaussian(0.1, 2.0, 3)):
        assert Question.from_json(question.to_json()) == question
