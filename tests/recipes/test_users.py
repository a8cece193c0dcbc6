"""Does the planner compare mechanisms for users as their prices say?"""

import pytest

from commands import as_json, vestige
from vestige.accounting import epsilon
from vestige.priced_questions import GroupedGaussian, SampledGaussian
from vestige.recipes.compare_user_level_mechanisms import mechanisms

SIZES = {"users": 10_000, "rows_per_user": 16, "batch": 1024, "steps": 1000, "epsilon": 4.0, "delta": 1e-6}
# sample, rows_per_user, cap: noise multiplier, noise of a mean
KNOWN = {
    ("rows", 16, None): (4.00, 0.00391),
    ("rows", 4, None): (4.00, 0.00391),
    ("users", 16, 16): (0.688, 0.01075),
    ("users", 16, 4): (1.231, 0.00481),
    ("users", 16, 1): (3.98, 0.00389),
}


def by_name(found):
    return {(each.sample, each.rows_per_user, each.cap): each for each in found}


@pytest.mark.slow
def test_every_mechanism_is_within_its_budget_and_near_what_is_known():
    found = by_name(mechanisms(**SIZES))
    assert set(KNOWN) < set(found)
    for name, (noise, of_mean) in KNOWN.items():
        assert noise <= found[name].noise_multiplier <= 1.12 * noise  # by Renyi, a little above
        assert of_mean <= found[name].noise_of_mean <= 1.12 * of_mean
    rows = found["rows", 16, None]
    assert epsilon({GroupedGaussian(rows.sample_rate, rows.noise_multiplier, 16): 1000}, 1e-6, "rdp") <= 4.0
    users = found["users", 16, 16]
    assert epsilon({SampledGaussian(users.sample_rate, users.noise_multiplier): 1000}, 1e-6, "rdp") <= 4.0


@pytest.mark.slow
def test_by_loss_distributions_it_is_what_is_known():
    found = by_name(mechanisms(**SIZES, accountant="pld"))
    for name, (noise, of_mean) in KNOWN.items():
        assert found[name].noise_multiplier == pytest.approx(noise, rel=4e-3)
        assert found[name].noise_of_mean == pytest.approx(of_mean, rel=4e-3)


def test_a_rate_above_one_is_left_out_and_delta_is_for_users():
    few = by_name(mechanisms(users=500, rows_per_user=2, batch=600, steps=50, epsilon=8.0, delta=1e-4))
    assert set(few) == {("rows", 2, None), ("rows", 2, 1), ("users", 2, 2)}
    assert few["users", 2, 2].noise_of_mean == few["users", 2, 2].noise_multiplier / 300
    with pytest.raises(ValueError, match="delta"):
        mechanisms(**{**SIZES, "delta": 1e-3})


def test_vestige_plan_compares_them():
    words = ["plan", "--examples", "4000", "--epsilon", "8", "--time", "60s", "--kind", "tabular"]
    words += ["--views-per-second", "50000", "--users", "1000", "--rows-per-user", "4"]
    found = as_json(*words)
    assert {each["sample"] for each in found["users"]} == {"rows", "users"}
    _, out, _ = vestige(*words)
    assert "to hide all rows of one user" in out
    code, _, error = vestige(*words[:-2])
    assert (code, error.count("\n")) == (2, 1)
    assert "--rows-per-user" in error
