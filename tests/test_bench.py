"""Do the studies of bench/ say what their runs say? On made-up records whose answer is known."""

import importlib
import sys
from pathlib import Path

import pytest

from vestige.comparison import VALIDATION

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """Imports a script of bench/ by name."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def study(bench):
    return bench("learning_rate")


def records(table):
    """Tuning runs of one setting: {factor: {seed: accuracy}}."""
    common = {"task": "t", "steps": 10, "sample_rate": 0.1, "budget": {"kind": "epsilon", "value": 3.0}, "label": "m"}
    return [
        {"status": "done", "run": {**common, "stage": "tuning", "lr": None, "factor": f, "seed": s}, VALIDATION: a}
        for f, by_seed in table.items()
        for s, a in by_seed.items()
    ]


def test_a_failure_that_both_seeds_show_is_named(study):
    (row,) = study.losses(records({0.5: {1: 0.50, 2: 0.54}, 1.0: {1: 0.40, 2: 0.42}, 2.0: {1: 0.30, 2: 0.30}}))
    assert row["best_factor"] == 0.5
    assert row["at_edge"]
    assert row["loss"] == pytest.approx(0.52 - 0.41)
    assert row["honest"] == pytest.approx(((0.50 - 0.40) + (0.54 - 0.42)) / 2)
    page = study.render([row])
    assert "m on t, epsilon 3, 10 steps at q 0.1: too large by 2 or more; 41.0 where 52.0 was to be had" in page


def test_a_gain_that_only_the_choosing_seed_shows_is_not(study):
    """Each seed has a lucky rate of its own: the best mean beats 1, but neither seed's choice helps the other."""
    table = {0.5: {1: 0.50, 2: 0.30}, 1.0: {1: 0.39, 2: 0.39}, 2.0: {1: 0.30, 2: 0.50}}
    (row,) = study.losses(records(table))
    assert row["loss"] == pytest.approx(0.01)
    assert row["honest"] == pytest.approx(-0.09)
    assert "No setting loses a point that a second seed confirms" in study.render([row])


def test_failed_runs_and_given_rates_are_no_evidence(study):
    made = records({0.5: {1: 0.5}, 1.0: {1: 0.4}, 2.0: {1: 0.3}})
    made.append({"status": "failed", "run": {**made[0]["run"], "factor": 4.0}, "error": "?"})
    made.append({**made[0], "run": {**made[0]["run"], "lr": 7.0, "factor": 1.0}, VALIDATION: 0.9})
    (row,) = study.losses(made)
    assert set(row["accuracy_by_factor"]) == {"0.5", "1", "2"}
    assert row["auto"] == 0.4
    assert row["honest"] is None


def test_the_pool_names_each_run_once_and_everything_that_its_parts_want(bench):
    reproduction = bench("reproduction")
    plan = reproduction.parts("nowhere", small=False)
    wanted = reproduction.due(plan, {})
    assert set(wanted) == {key for part in plan for key in part.wanted({})}
    assert len(wanted) < sum(len(part.wanted({})) for part in plan)  # presets share runs
    shared = {part.name: set(part.wanted({})) for part in plan}
    assert shared["fo-fig3"] < shared["fo-fig2"]
    assert shared["fo-fig6"] == shared["fo-fig5"]
    done = {key: None for key in shared["fo-fig2"]}
    assert not set(reproduction.due(plan, {**done})) & shared["fo-fig3"]
