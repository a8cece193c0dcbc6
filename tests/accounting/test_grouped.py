"""Is a sample of rows priced from above for a person who has several? Against vectors, the worst case, another library."""

from itertools import product
from math import comb, exp, sqrt

import numpy as np
import pytest
from dp_accounting import dp_event, pld
from scipy.special import logsumexp
from scipy.stats import norm, poisson

from vestige.accounting import Facts, calibrate, epsilon, group_epsilon, guarantee, guarantee_of_user, history_of_user
from vestige.accounting.composition import epsilon_of, grid_step, loss_distribution
from vestige.accounting.odometers_and_filters import RenyiFilter
from vestige.accounting.rdp import ORDERS
from vestige.accounting.samplings.rows_of_users import contributions, curves, profile
from vestige.accounting.theorems import theorem_for
from vestige.priced_questions import (
    AllocatedGaussian,
    ExponentialMechanism,
    Gaussian,
    GroupedGaussian,
    Question,
    SampledGaussian,
    Trial,
)
from vestige.units import Users

# group, rate, multiplier, steps, delta, epsilon of removing, epsilon of adding
VECTORS = [
    (1, 0.01, 1.0, 1000, 1e-5, 1.82826, 1.41670),
    (2, 0.01, 1.0, 1000, 1e-5, 3.97910, 3.03066),
    (4, 0.01, 2.0, 1000, 1e-5, 2.89341, 2.66054),
    (16, 0.01, 4.0, 1000, 1e-6, 6.65073, 6.34326),
    (8, 0.001, 1.0, 2000, 1e-6, 2.37750, 1.88910),
    (8, 0.04, 8.0, 2500, 1e-5, 10.10161, 9.95258),
    (32, 0.02, 6.0, 500, 1e-6, 14.03298, 13.32511),
    (4, 0.002, 0.8, 500, 1e-6, 2.95519, 1.12133),
    (4, 0.1, 2.0, 30, 1e-5, 6.29096, 4.05455),
    (3, 1.0, 5.0, 10, 1e-5, 9.37088, 9.37088),
]


@pytest.mark.parametrize(("group", "rate", "multiplier", "steps", "delta", "removing", "adding"), VECTORS)
@pytest.mark.everyday("1-0.01-1.0-1000-1e-05-1.82826-1.4167", "3-1.0-5.0-10-1e-05-9.37088-9.37088")
def test_vectors_in_both_directions(group, rate, multiplier, steps, delta, removing, adding):
    history = {GroupedGaussian(rate, multiplier, group): steps}
    assert epsilon(history, delta) == pytest.approx(removing, abs=1e-3)
    interval = grid_step(removing, 16e-5)
    remove, _ = loss_distribution(history, interval, 1.01 * removing)
    _, add = loss_distribution(history, interval, 1.01 * adding)
    assert epsilon_of([remove], delta, 1.1 * removing) == pytest.approx(removing, abs=1e-3)
    assert epsilon_of([add], delta, 1.1 * adding) == pytest.approx(adding, abs=1e-3)


@pytest.mark.parametrize(("cap", "expected"), [(4, 6.65075), (2, 6.62022), (1, 6.05446)])
def test_vectors_with_a_cap(cap, expected):
    assert epsilon({GroupedGaussian(0.01, 4.0, 16, cap): 1000}, 1e-6) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("group", "cap", "rate"), [(2000, 5, 0.05), (4, 2, 0.999999), (4, None, 1 - 1e-12)])
def test_a_number_of_rows_that_is_nearly_certain_costs_what_a_certain_one_does(group, cap, rate):
    multiplier = 2.0 * (cap or group)
    certain = epsilon({Gaussian(2.0): 10}, 1e-5)
    assert epsilon({GroupedGaussian(rate, multiplier, group, cap): 10}, 1e-5) == pytest.approx(certain, rel=1e-5)


def test_simple_cases_are_sampled_gaussians():
    joins = 1 - 0.97**5
    losses = np.linspace(0, 3, 7)
    for grouped, plain in (
        (GroupedGaussian(0.03, 0.9, 1), SampledGaussian(0.03, 0.9)),
        (GroupedGaussian(0.03, 0.9, 5, 1), SampledGaussian(joins, 0.9)),
        (GroupedGaussian(1.0, 6.0, 3), Gaussian(2.0)),
    ):
        for way in ("remove", "add"):
            ours, theirs = (getattr(theorem_for(each).profile(each), way)(losses) for each in (grouped, plain))
            assert ours == pytest.approx(theirs, rel=1e-9)
        assert theorem_for(grouped).curves([grouped]) == pytest.approx(theorem_for(plain).curves([plain]), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("which", [3, 8])
def test_another_library_agrees(which):
    group, rate, multiplier, steps, delta, *_ = VECTORS[which]
    chances = [comb(group, k) * rate**k * (1 - rate) ** (group - k) for k in range(group + 1)]
    event = dp_event.MixtureOfGaussiansDpEvent(multiplier, list(range(group + 1)), chances)
    theirs = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event, steps).get_epsilon(delta)
    assert epsilon({GroupedGaussian(rate, multiplier, group): steps}, delta) == pytest.approx(theirs, abs=2e-3)


def _mixture(question):
    """The two densities on a grid, by enumeration of the rows' tosses."""
    grid = np.linspace(-30, 40, 70_001)
    chances: dict[int, float] = {}
    for tosses in product((0, 1), repeat=question.group):
        k = min(sum(tosses), question.most)
        chance = question.rate ** sum(tosses) * (1 - question.rate) ** (question.group - sum(tosses))
        chances[k] = chances.get(k, 0.0) + chance
    with_user = sum(chance * norm.pdf(grid, k, question.multiplier) for k, chance in chances.items())
    return grid[1] - grid[0], with_user, norm.pdf(grid, 0, question.multiplier)


CASES = [
    GroupedGaussian(0.2, 1.3, 5),
    GroupedGaussian(0.2, 1.3, 5, 3),
    GroupedGaussian(0.02, 0.7, 3),
    GroupedGaussian(0.6, 3.0, 8, 6),
]


@pytest.mark.parametrize("question", CASES)
def test_profile_is_the_mixtures(question):
    step, p, q = _mixture(question)
    priced = profile(question)
    for loss in (0.0, 0.3, 1.0, 2.0):
        for one, other, bound in ((p, q, priced.remove), (q, p, priced.add)):
            exact = float(np.maximum(one - exp(loss) * other, 0).sum() * step)
            found = float(bound(np.array([loss]))[0])
            assert found == pytest.approx(exact, abs=2e-7)  # the grid misses the kink by so much


@pytest.mark.parametrize(("group", "mean"), [(2**31 + 1, 2.0), (10**10, 2.0), (10**12, 0.1)])
def test_very_many_rows_of_which_few_join(group, mean):
    """As often as Poisson's law says, whose numbers of rows these are."""
    question, chances = GroupedGaussian(mean / group, 1.0, group, 3), poisson.pmf([0, 1, 2], mean)
    weights = [*chances[1:], 1 - chances.sum()]
    counts, logs, lost = contributions(question, 0.0)
    assert (list(counts), lost) == ([1, 2, 3], 0)
    assert np.exp(logs) == pytest.approx(weights, rel=1e-8)
    grid = np.linspace(-10, 14, 24_001)
    with_user = sum(each * norm.pdf(grid, k, 1.0) for k, each in enumerate([chances[0], *weights]))
    for loss in (0.0, 0.5, 1.5):
        exact = float(np.maximum(with_user - exp(loss) * norm.pdf(grid), 0).sum() * (grid[1] - grid[0]))
        assert float(profile(question).remove(np.array([loss]))[0]) == pytest.approx(exact, abs=2e-7)
    with pytest.raises(ValueError, match="must be at most 1e"):
        GroupedGaussian(1e-15, 1.0, 10**15, 3)


@pytest.mark.parametrize("question", CASES)
def test_renyi_curves_are_the_mixtures_from_above(question):
    grid = np.linspace(-60, 120, 90_001)
    counts, logs, _ = contributions(question, 0.0)
    nothing = question.group * np.log1p(-question.rate)
    bells = norm.logpdf(grid[:, None], np.append(0, counts), question.multiplier)
    p, q = logsumexp(bells + np.append(nothing, logs), axis=1), norm.logpdf(grid, 0, question.multiplier)
    (found,) = curves([question])
    for wanted in (1.1, 1.5, 2.5, 4.0, 8.0):
        place = int(np.argmin(np.abs(ORDERS - wanted)))
        order = ORDERS[place]
        both = [
            (logsumexp(order * one + (1 - order) * other) + np.log(grid[1] - grid[0])) / (order - 1)
            for one, other in ((p, q), (q, p))
        ]
        assert max(both) <= found[place] * (1 + 1e-9) + 1e-12
        assert found[place] <= max(both) * 1.005 + 1e-9


def test_renyi_bounds_lie_above_loss_distributions_for_large_groups_too():
    for question in (GroupedGaussian(0.01, 4.0, 1000), GroupedGaussian(0.01, 2.0, 300, 9)):
        history = {question: 20}
        assert epsilon(history, 1e-6) <= epsilon(history, 1e-6, "rdp") < 3 * epsilon(history, 1e-6) + 0.5


def test_price_rises_with_rows_and_cap_and_falls_with_noise():
    def price(multiplier, group, cap=None):
        return epsilon({GroupedGaussian(0.05, multiplier, group, cap): 100}, 1e-5, "rdp")

    assert price(2.0, 2) < price(2.0, 4, 2) < price(2.0, 4, 3) < price(2.0, 4) < price(1.9, 4)
    assert price(2.0, 4, 9) == price(2.0, 4)


def test_calibration():
    found = calibrate(lambda z: {GroupedGaussian(0.1, z, 4): 50}, 8.0, 1e-5)
    assert 7.98 < epsilon({GroupedGaussian(0.1, found, 4): 50}, 1e-5) <= 8.0


def test_how_many_rows_join():
    counts, logs, lost = contributions(GroupedGaussian(0.3, 1.0, 6, 4), 0.0)
    assert list(counts) == [1, 2, 3, 4]
    assert lost == 0
    assert np.exp(logs).sum() == pytest.approx(1 - 0.7**6)
    assert np.exp(logs[-1]) == pytest.approx(sum(comb(6, k) * 0.3**k * 0.7 ** (6 - k) for k in (4, 5, 6)))
    counts, logs, lost = contributions(GroupedGaussian(0.001, 1.0, 50), 1e-24)
    assert len(counts) < 20
    assert 0 < lost < 1e-24


def test_questions_survive_json():
    for question in (GroupedGaussian(0.1, 1.5, 4), GroupedGaussian(0.1, 1.5, 4, 2)):
        assert Question.from_json(question.to_json()) == question


@pytest.mark.parametrize("wrong", [{"group": 0}, {"group": 2.5}, {"group": 3, "cap": 0}, {"group": 3, "rate": 1.5}])
def test_wrong_questions(wrong):
    with pytest.raises(ValueError, match=r"must be"):
        GroupedGaussian(**({"rate": 0.1, "multiplier": 1.0} | wrong))


# --- group privacy ------------------------------------------------------------------------------------------------------


def test_group_privacy_is_above_the_mixture_and_the_gaussian_closed_form():
    history = {SampledGaussian(0.1, 2.0): 50}
    alone = epsilon(history, 1e-5)
    assert group_epsilon(history, 1e-5, 1) == alone
    for rows in (2,):
        mixed = epsilon(history_of_user(history, Users(rows_per_user=rows)), 1e-5)
        assert rows * alone < group_epsilon(history, 1e-5, rows)
        assert mixed < group_epsilon(history, 1e-5, rows)
    # Of a Gaussian, k rows are one with k times the shift: group privacy must not lie below.
    assert epsilon({Gaussian(4.0 / 3): 1}, 1e-5) < group_epsilon({Gaussian(4.0): 1}, 1e-5, 3)


def test_group_privacy_by_the_definition():
    """delta of the group's pair at the returned epsilon, from the curve of one row."""
    from vestige.accounting.composition import epsilon_by_distribution

    history, delta, rows = {AllocatedGaussian(10, 1.5): 2}, 1e-5, 3
    found = group_epsilon(history, delta, rows) / rows
    part = delta / sum(exp(k * found) for k in range(rows))
    assert epsilon_by_distribution(history, part, 2e-5) <= found


@pytest.mark.parametrize(("rows", "expected"), [(2, 19.10), pytest.param(4, 49.75, marks=pytest.mark.slow)])
def test_what_a_run_about_rows_means_for_a_person(rows, expected):
    said = guarantee_of_user({SampledGaussian(0.04, 2.0355): 6250}, 1e-5, Facts(), rows)
    assert said.epsilon == pytest.approx(expected, abs=0.01)
    assert said.adjacency == f"zero-out all rows of one user (at most {rows})"
    assert said.unit == "user"
    assert "who owns which row" in said.assumption("unit").detail
    allocated = guarantee_of_user({AllocatedGaussian(98, 1.0): 3}, 1e-5, Facts(sampling="allocation"), 2)
    assert allocated.accountant == "group privacy of 2 rows"
    assert allocated.meaning is None
    trial = Trial(0.05, 3.0, 0.05, 3.0, -1.0)
    assert guarantee_of_user({trial: 3}, 1e-5, Facts(), 2).accountant == "group privacy of 2 rows"
    with pytest.raises(ValueError, match="filter"):
        guarantee_of_user({trial: 3}, 1e-5, Facts(schedule="filtered", filter_epsilon=9.0), 2)
    with pytest.raises(ValueError, match="a user already"):
        guarantee_of_user({}, 1e-5, Facts(users=Users(rows_per_user=3)), 2)
    assert guarantee_of_user({}, 1e-5, Facts(noise="seeded"), 2).epsilon is None


def test_a_user_is_in_a_question_about_everybody_with_all_rows():
    users = Users(rows_per_user=3)
    assert users.question(Gaussian(6.0)) == Gaussian(2.0)
    assert users.question(ExponentialMechanism(0.25)) == ExponentialMechanism(0.75)


def test_charges_must_be_those_of_users():
    users = Users(rows_per_user=3)
    grouped, plain = {GroupedGaussian(0.1, 2.0, 3): 5}, {SampledGaussian(0.1, 2.0): 5}
    assert guarantee(grouped, 1e-5, Facts(users=users)).epsilon is not None
    assert guarantee(plain, 1e-5, Facts(users=users)).epsilon is None
    assert guarantee(grouped, 1e-5, Facts()).epsilon is None
    assert guarantee(grouped, 1e-5, Facts(users=Users(rows_per_user=4))).epsilon is None
    assert guarantee(plain, 1e-5, Facts(users=Users(sample="users"))).epsilon is not None


def test_a_renyi_filter_takes_them():
    question = GroupedGaussian(0.02, 2.0, 4)
    allowed = RenyiFilter(2.0, 1e-5, {question: 100})
    count = 0
    while allowed.allows(question):
        allowed.spend(question)
        count += 1
    assert epsilon({question: count}, 1e-5) <= 2.0
    assert count > 50 * sqrt(2)
