"""Does what a book admits stay within its epsilon, whatever depends on the answers?"""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, inf, isclose, log

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad
from scipy.stats import norm

from vestige import accounting
from vestige.accounting import rdp
from vestige.accounting.theorems import THEOREMS, curves
from vestige.budget import Book, BookError, Slot, prices, slots_of, terms, usual
from vestige.budget.book import State
from vestige.budget.filters import RenyiFilter, Weights
from vestige.budget.storage import sealed
from vestige.budget.verify import verify
from vestige.priced_questions import (
    AllocatedGaussian,
    BudgetSpent,
    CyclicGaussian,
    ExponentialMechanism,
    Gaussian,
    GroupedGaussian,
    PureLoss,
    SampledGaussian,
    Trial,
    TruncatedGaussian,
)

RUN = usual(0.01, 1.2, 1000)

# --- an adversary who chooses by the answers, enumerated exactly ------------------------------------------------------

EPSILON, DELTA = 1.0, 0.05
FIRST, LATER, LEAK = (0.4, 0.0), (0.73, 0.0), (0.0, DELTA / 2)
"""Answers that the adversary may ask for, as (epsilon, delta): the worst answer of that price tells everything with
probability delta, and is a randomized response otherwise."""
MENU = (FIRST, LATER, LEAK)


def outcomes(answer):
    """(probability, privacy loss) of each outcome of the worst answer of a price."""
    epsilon, delta = answer
    truly = exp(epsilon) / (1 + exp(epsilon))
    return [(delta, inf), ((1 - delta) * truly, epsilon), ((1 - delta) * (1 - truly), -epsilon)]


def composed_delta(answers):
    """The hockey-stick divergence of answers that were fixed in advance: their loss distributions, composed."""
    whole = 0.0
    for path in product(*map(outcomes, answers)):
        probability, loss = np.prod([each for each, _ in path]), sum(each for _, each in path)
        whole += probability * max(0.0, 1 - exp(EPSILON - loss))
    return float(whole)


def worst(admits, most=4):
    """The hockey-stick divergence that the best adversary reaches against a filter: every strategy is enumerated.

    After each answer the adversary sees its loss, and asks for whatever the filter admits, or stops.
    """

    @cache
    def value(asked, loss):
        best = max(0.0, 1 - exp(EPSILON - loss))
        if len(asked) == most:
            return best
        for answer in MENU:
            following = tuple(sorted((*asked, answer)))
            if admits(following):
                best = max(
                    best, sum(p * value(following, round(loss + gained, 12)) for p, gained in outcomes(answer) if p)
                )
        return best

    return value((), 0.0)


def test_an_adaptive_adversary_breaks_a_filter_of_loss_distributions_and_not_ours(tmp_path):
    @cache
    def by_distributions(asked):
        return composed_delta(asked) <= DELTA * (1 + 1e-12)

    told = terms(EPSILON, DELTA, external_share=0.5)

    @cache
    def by_book(asked):
        path = tmp_path / "-".join(f"{MENU.index(each)}" for each in asked)
        book = Book.create(path, told)
        try:
            for epsilon, delta in asked:
                book.enter(epsilon, delta, "a query")
        except BudgetSpent:
            return False
        return True

    assert by_distributions((FIRST, LATER))
    assert by_distributions((FIRST, LEAK, LEAK))
    broken = worst(by_distributions)
    assert broken > 1.3 * DELTA, "every path is within the budget, and the adversary is not"

    held = worst(by_book)
    assert by_book((LEAK, FIRST)), "ours admits something, too"
    assert 0 < held <= DELTA
    assert worst(lambda asked: True) > broken, "without a filter the same adversary gets further"


def test_the_best_order_after_the_fact_without_weights_is_more_than_the_filter_admits():
    """The weights cost something: a filter that took the least over orders would admit more than is proved."""
    told = terms(3.341, 1e-5, expect=RUN, external_share=0.0)
    meter = RenyiFilter(told.weights, told.epsilon, told.delta)
    assert sum(told.weights.weights) == pytest.approx(1.0)
    for k in (1, 2, 5, 10):
        assert meter.reading(k * prices.total([RUN], "zero-out")) > accounting.epsilon(
            {q: k * n for q, n in RUN.items()}, 1e-5, "rdp"
        )


# --- the table of the specification -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "epsilon"), [(1, 1.467), (2, 2.063), (5, 3.341), (10, 4.890)])
def test_a_book_of_the_tables_epsilon_admits_exactly_so_many_runs(tmp_path, runs, epsilon):
    book = Book.create(tmp_path / "book", terms(epsilon, 1e-5, expect=RUN))
    assert book.affords(RUN) == runs
    for _ in range(runs):
        book.charge(book.reserve(RUN, purpose="run"), RUN)
    assert book.affords(RUN) == 0
    with pytest.raises(BudgetSpent, match=f"epsilon {epsilon:g} at delta 1e-05, .* spent or reserved by {runs} runs"):
        book.reserve(RUN, purpose="one more")
    assert epsilon - 0.01 < book.reading().epsilon_spent <= epsilon


@pytest.mark.parametrize(("runs", "epsilon"), [(1, 1.299), (2, 1.860), (5, 3.045), (10, 4.480)])
def test_slots_cost_what_loss_distributions_say(tmp_path, runs, epsilon):
    slots = tuple(
        slots_of([{"name": "run", "sample_rate": 0.01, "noise_multiplier": 1.2, "steps": 1000, "times": runs}])
    )
    with pytest.raises(ValueError, match="does not hold the slots: together they cost"):
        terms(epsilon - 0.01, 1e-5, slots=slots)
    book = Book.create(tmp_path / "book", terms(epsilon + 0.001, 1e-5, slots=slots))
    for _ in range(runs):
        book.charge(book.reserve(RUN, purpose="run"), RUN)
    assert book.reading().epsilon_spent == pytest.approx(epsilon, abs=1.5e-3)
    with pytest.raises(BudgetSpent, match="no free slot"):
        book.reserve(RUN, purpose="one more")


# --- weights ----------------------------------------------------------------------------------------------------------


def test_the_filter_is_the_one_that_the_theorem_states():
    from vestige.accounting import RenyiFilter as Theirs

    theirs = Theirs(3.0, 1e-5, {SampledGaussian(0.01, 1.2): 1000}, weight=0.9)
    weights = Weights(tuple(rdp.ORDERS), tuple(theirs.weights), theirs.planned_order)
    ours = RenyiFilter(weights, 3.0, 1e-5)
    for count in (100, 3000, 3800, 4200, 5000):
        curve = count * curves([SampledGaussian(0.01, 1.2)])[SampledGaussian(0.01, 1.2)]
        assert ours.admits(curve) == bool(np.any(curve <= theirs.budgets)), count


def test_weights_that_were_changed_are_refused():
    told = terms(3.0, 1e-5).weights.to_json()
    Weights.from_json(told)
    with pytest.raises(ValueError, match="do not add up"):
        Weights.from_json({**told, "weights": [2 * each for each in told["weights"]]})
    with pytest.raises(ValueError, match="orders that this version does not compute"):
        Weights.from_json({**told, "orders": [order + 1e-3 for order in told["orders"]]})


# --- prices -----------------------------------------------------------------------------------------------------------

QUESTIONS = [
    SampledGaussian(0.01, 1.2),
    Gaussian(5.0),
    CyclicGaussian(0.1, 2.0, 4),
    AllocatedGaussian(20, 1.5),
    TruncatedGaussian(0.02, 1.5, 20, 500),
    Trial(0.02, 1.5, 0.02, 1.3, -0.5),
    GroupedGaussian(0.01, 2.0, 3),
    ExponentialMechanism(0.1),
    PureLoss(0.1),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: each.kind)
def test_every_kind_of_question_has_a_price_in_a_book(tmp_path, question):
    assert set(THEOREMS) == {*map(type, QUESTIONS)}
    book = Book.create(tmp_path / "book", terms(3.0, 1e-5))
    name = book.reserve({question: 3}, purpose="run")
    book.charge(name, {question: 3})
    assert 0 < book.reading().epsilon_spent <= 3.0
    assert prices.from_json(prices.to_json({question: 3})) == Counter({question: 3})


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 5.0])
def test_an_entry_by_hand_costs_as_randomized_response_does(epsilon):
    [curve] = rdp.pure_curves([epsilon])
    p, few = 1 / (1 + exp(-epsilon)), rdp.ORDERS <= 32
    exact = np.log(
        p ** rdp.ORDERS[few] * (1 - p) ** (1 - rdp.ORDERS[few])
        + (1 - p) ** rdp.ORDERS[few] * p ** (1 - rdp.ORDERS[few])
    )
    assert curve[few] == pytest.approx(exact / (rdp.ORDERS[few] - 1), rel=1e-6, abs=1e-12)
    assert (curve <= epsilon).all()
    assert (curve >= 0).all()
    theirs = RdpAccountant([12.0, 32.0], dp_accounting.NeighboringRelation.REPLACE_ONE)
    theirs.compose(dp_accounting.RandomizedResponseDpEvent(2 * (1 - p), 2))
    assert curve[np.isin(rdp.ORDERS, (12.0, 32.0))] == pytest.approx(theirs._rdp, rel=1e-6, abs=1e-12)


def test_pure_answers_compose_by_their_loss_distribution():
    exact = 0.0
    answers = [(0.3, 0.0)] * 6
    for path in product(*([each for each in outcomes(answer) if each[0]] for answer in answers)):
        probability, loss = np.prod([each for each, _ in path]), sum(each for _, each in path)
        exact += probability * max(0.0, 1 - exp(1.0 - loss))
    epsilon = accounting.epsilon({PureLoss(0.3): 6}, float(exact))
    assert 1.0 <= epsilon < 1.0 + 1e-3


@pytest.mark.parametrize(("rate", "noise"), [(0.02, 1.0), (0.3, 2.0), (0.05, 0.6)])
def test_replacing_one_by_another_is_priced_by_its_own_pair(rate, noise):
    [curve] = rdp.replaced_curves([rate], [noise])
    for order in (float(rdp.ORDERS[30]), 12.0):

        def both(x, order=order):
            still = log(1 - rate) + norm.logpdf(x, 0, noise)
            up, down = (np.logaddexp(still, log(rate) + norm.logpdf(x, sign, noise)) for sign in (1, -1))
            return exp(order * up + (1 - order) * down)

        exact = np.log(quad(both, -12, 30, points=[0, 1, order, 2 * order - 1], limit=400, epsabs=0, epsrel=1e-11)[0])
        found = float(curve[order == rdp.ORDERS][0])
        assert isclose(found, exact / (order - 1), rel_tol=1e-6, abs_tol=1e-9)
    [added] = rdp.curves([rate], [noise])
    assert (curve >= added).all()
    assert (curve <= 2 * rdp.ORDERS / noise**2).all()


def test_a_book_of_replacements_is_dearer_and_refuses_what_has_no_price_there(tmp_path):
    added = Book.create(tmp_path / "added", terms(8.0, 1e-5, expect=RUN))
    replaced = Book.create(tmp_path / "replaced", terms(8.0, 1e-5, adjacency="replace", expect=RUN))
    assert 0 < replaced.affords(RUN) < added.affords(RUN)
    with pytest.raises(ValueError, match="no theorem prices TruncatedGaussian where one is replaced"):
        replaced.reserve({TruncatedGaussian(0.05, 1.5, 40, 500): 1}, purpose="run")
    slots = tuple(slots_of([{"sample_rate": 0.01, "noise_multiplier": 1.2, "steps": 1000}]))
    with pytest.raises(ValueError, match="does not hold the slots"):
        terms(1.3, 1e-5, adjacency="replace", slots=slots)


def test_strategies_of_two_runs_are_not_rounded_as_one():
    question = CyclicGaussian(0.1, 2.0, bands=4)
    one = prices.total([{question: 5}], "zero-out")
    assert prices.total([{question: 5}] * 3, "zero-out") == pytest.approx(3 * one)
    assert one == pytest.approx(2 * curves([question])[question])


def test_prices_agree_with_another_library():
    theirs = RdpAccountant(rdp.ORDERS.tolist())
    theirs.compose(dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.2)), 1000)
    ours = prices.total([RUN], "zero-out")
    integers = [order == int(order) for order in rdp.ORDERS]
    assert ours[integers] == pytest.approx(np.array(theirs._rdp)[integers], rel=1e-6)


# --- slots ------------------------------------------------------------------------------------------------------------


def test_a_run_fits_a_slot_that_dominates_it():
    slot = usual(0.01, 1.2, 1000)
    assert prices.fits(usual(0.01, 1.2, 1000), slot)
    assert prices.fits(usual(0.005, 1.5, 10), slot)
    for larger in (usual(0.011, 1.2, 10), usual(0.01, 1.19, 10), usual(0.01, 1.2, 1001), {PureLoss(0.1): 1}):
        assert not prices.fits(larger, slot)
    mixed = Counter({SampledGaussian(0.01, 1.2): 5, Gaussian(10.0): 1})
    assert prices.fits({Gaussian(12.0): 1, SampledGaussian(0.01, 2.0): 5}, mixed)
    assert not prices.fits({Gaussian(12.0): 2}, mixed)
    assert prices.fits({CyclicGaussian(0.01, 1.2, 4): 20}, slot)
    assert prices.fits(
        {SampledGaussian(0.01, 3.0): 1, SampledGaussian(0.01, 1.2): 1},
        {SampledGaussian(0.01, 1.2): 1, SampledGaussian(0.01, 2.5): 1},
    )
    assert prices.fits({AllocatedGaussian(20, 2.0): 1}, {AllocatedGaussian(20, 1.5): 2})
    assert not prices.fits({AllocatedGaussian(10, 2.0): 1}, {AllocatedGaussian(20, 1.5): 2})
    assert not prices.fits({Trial(0.02, 1.5, 0.02, 1.3, -0.4): 1}, {Trial(0.02, 1.5, 0.02, 1.3, -0.5): 1})


@pytest.mark.slow
def test_dominated_questions_cost_less_by_every_accountant():
    for larger, smaller in (
        (SampledGaussian(0.02, 1.2), SampledGaussian(0.01, 1.2)),
        (AllocatedGaussian(4, 1.5), AllocatedGaussian(4, 2.0)),
        (PureLoss(0.2), PureLoss(0.1)),
    ):
        assert prices.dominates(larger, smaller)
        assert not prices.dominates(smaller, larger)
        assert (curves([smaller])[smaller] <= curves([larger])[larger] * (1 + 1e-9)).all()
        assert accounting.epsilon({smaller: 3}, 1e-5) <= accounting.epsilon({larger: 3}, 1e-5)


def test_slots_are_spent_whole_and_come_back_only_where_nothing_was_asked(tmp_path):
    slots = tuple(
        slots_of(
            [
                {"name": "small", "sample_rate": 0.01, "noise_multiplier": 2.0, "steps": 100},
                {"name": "large", "sample_rate": 0.01, "noise_multiplier": 1.2, "steps": 1000},
                {"name": "elsewhere", "epsilon": 0.1, "delta": 1e-7},
            ]
        )
    )
    book = Book.create(tmp_path / "book", terms(3.0, 1e-5, slots=slots))
    small = usual(0.01, 2.0, 50)
    first = book.reserve(small, purpose="run")
    assert book.state.open[first].slot == 0, "the cheapest that fits"
    book.close(first)
    assert book.reading().slots_left == 3
    second = book.reserve(small, purpose="run")
    book.charge(second, usual(0.01, 2.0, 1))
    book.close(second, usual(0.01, 2.0, 1))
    assert book.reading().slots_left == 2
    third = book.reserve(small, purpose="run", slot="large")
    book.charge(third, usual(0.01, 1.3, 1000))
    with pytest.raises(BudgetSpent, match="more than its slot 'large'"):
        book.charge(third, usual(0.01, 1.3, 1))
    with pytest.raises(BudgetSpent, match=r"1 of 3 are free \(elsewhere\)"):
        book.reserve(small, purpose="run")
    with pytest.raises(BudgetSpent):
        book.enter(0.1, 1e-6, "too likely")
    book.enter(0.1, 1e-8, "a query elsewhere")
    assert book.reading().slots_left == 0
    assert Book(book.path).reading() == book.reading()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "list of slots"),
        ({"name": "x"}, "list of slots"),
        ([3], "number 1 is not an object"),
        ([{"name": "x", "steps": 3}], "'x': it has steps; give sample_rate, noise_multiplier and steps"),
        ([{"name": "x", "sample_rate": 2, "noise_multiplier": 1, "steps": 3}], "must be a probability"),
        ([{"name": "x", "epsilon": 1, "times": 0}], "times of 'x'=0 must be a whole number"),
        ([{"name": "x", "epsilon": 1}, {"name": "x", "epsilon": 1}], "same name"),
        ([{"name": "x", "epsilon": 1, "delta": -0.5}], r"delta of 'x'=-0.5 must lie in \[0, 1\)"),
        ([{"name": "x", "epsilon": 1, "delta": 1}], r"delta of 'x'=1 must lie in \[0, 1\)"),
        ([{"name": "x", "epsilon": 1, "delta": "0.1"}], "delta of 'x'=0.1 must be a number"),
        ([{"name": "x", "epsilon": "y"}], "'x': epsilon=y must be a number"),
        ([{"name": "x", "epsilon": float("nan")}], "epsilon=nan must be a number, zero or more"),
        ([{"name": "x", "sample_rate": "y", "noise_multiplier": 1, "steps": 5}], "'x': rate=y must be a number"),
        ([{"name": "x", "questions": [5]}], "'x': unknown kind of question None"),
        (
            [{"name": "x", "questions": [{"kind": "gaussian", "multiplier": float("inf")}]}],
            "'x': Gaussian.multiplier=inf. must have finite numbers",
        ),
        ([{"name": "x", "questions": [{"kind": ["y"]}]}], r"'x': unknown kind of question \['y'\]"),
        ([{"name": "x", "questions": [{"kind": "gaussian"}]}], "'x': 'multiplier' is missing"),
        (
            [{"name": "x", "questions": [{"kind": "gaussian", "multiplier": 1, "count": "2"}]}],
            "'x': count=2 must be a w",
        ),
        (
            [{"name": "x", "questions": [{"kind": "cyclic-gaussian", "rate": 0.1, "multiplier": 1, "bands": "4"}]}],
            "bands=4",
        ),
        ([{"name": ["x"], "epsilon": 1}], r"name=\['x'\] must be one line of printable text"),
    ],
)
def test_slots_that_are_wrong(content, problem):
    with pytest.raises(ValueError, match=problem) as error:
        slots_of(content)
    assert "\n" not in str(error.value)


def test_a_book_whose_slots_have_a_negative_delta_is_no_book(tmp_path):
    """One delta below zero would give the other slots more than the book's."""
    told = terms(8.0, 1e-5, slots=tuple(slots_of([{"epsilon": 0.1, "delta": 1e-7}, {"epsilon": 0.2}])))
    Book.create(tmp_path / "book", told)
    row = json.loads((tmp_path / "book").read_text())
    del row["hash"]
    row["slots"][0]["delta"] = -0.5
    (tmp_path / "forged").write_bytes(sealed(row)[0])
    for reading in (Book, verify):
        with pytest.raises(BookError, match=r"delta of 'slot 1'=-0.5 must lie in \[0, 1\)"):
            reading(tmp_path / "forged")


def test_a_book_that_has_spent_more_than_its_epsilon_fails_verification(tmp_path, monkeypatch):
    book = Book.create(tmp_path / "book", terms(1.0, 1e-5))
    verify(book.path)
    reading = book.reading()
    monkeypatch.setattr(State, "reading", lambda self: replace(reading, epsilon_spent=1.001))
    with pytest.raises(BookError, match=r"epsilon 1.0010 is spent, beyond the book's 1"):
        verify(book.path)


def test_slots_of_all_kinds():
    found = slots_of(
        [
            {"name": "a", "questions": [{"kind": "gaussian", "multiplier": 4.0, "count": 2}], "times": 2},
            {"epsilon": 0.5},
        ]
    )
    assert found == [
        Slot("a 1", Counter({Gaussian(4.0): 2})),
        Slot("a 2", Counter({Gaussian(4.0): 2})),
        Slot("slot 2", Counter({PureLoss(0.5): 1})),
    ]
    assert [Slot.from_json(each.to_json()) for each in found] == found


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"epsilon": 0}, "epsilon=0 must be positive"),
        ({"delta": 0}, "delta=0 must lie"),
        ({"unit": "household"}, "unit='household' must be one of row, user"),
        ({"adjacency": "add-remove"}, "adjacency='add-remove' must be one of"),
        ({"external_share": 1}, "external_share=1 must lie in"),
        ({"weight": 1.0}, "weight=1.0 must lie between"),
        ({"expect": {PureLoss(0.0): 1}}, "costs nothing"),
    ],
)
def test_terms_that_are_wrong(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        terms(**{"epsilon": 1.0, "delta": 1e-5, **arguments})


def test_what_is_set_aside_for_entries_by_hand_is_not_the_filters(tmp_path):
    """Half of delta is set aside: the filter has the other half, and both together are delta."""
    told = terms(3.0, 1e-5, expect=RUN, external_share=0.5)
    book = Book.create(tmp_path / "book", told)
    curve = prices.total([RUN], "zero-out")
    assert told.external_delta == pytest.approx(0.5e-5)
    assert book.state.filter().reading(curve) == RenyiFilter(told.weights, 3.0, 0.5e-5).reading(curve)
    assert book.state.filter().reading(curve) > RenyiFilter(told.weights, 3.0, 1e-5).reading(curve)
    book.enter(0.1, 0.4e-5, "most of it")
    with pytest.raises(BudgetSpent, match="is more than the 1e-06 that are left"):
        book.enter(0.1, 0.2e-5, "too much")
