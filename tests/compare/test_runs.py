"""Which runs does a comparison need? The same chances for all, final runs at what won, and each run by its hash."""

from dataclasses import replace

import pytest

from comparisons import TINY, fake, known
from vestige.compare import aggregate_results, run_grid, runner
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender, Problem
from vestige.compare.summary import reported_records, summarised
from vestige.run_records import FailedRun


def test_every_contender_has_the_same_number_of_trials_over_the_same_range():
    free = (TINY.contenders[0], Contender("fo", "fo-dp-sgd"))
    tuned = replace(TINY, contenders=free, tune={"beta": (0.8, 0.9), "window": (4, 8)})
    grid = run_grid.tuning_grid(tuned, known())
    assert {label: len(points) for label, points in grid.items()} == {"dp-sgd": 12, "fo": 12}
    for points in grid.values():
        rates = [trial.factor for trial in points]
        assert (min(rates), max(rates)) == pytest.approx((0.5, 2.0))
    assert {tuple(trial.options.items()) for trial in grid["dp-sgd"]} == {()}
    assert len({tuple(trial.options.items()) for trial in grid["fo"]}) == 4
    fixed = run_grid.tuning_grid(replace(tuned, contenders=TINY.contenders), known())["fo"]  # whose name says its beta
    assert {tuple(trial.options) for trial in fixed} == {("window",)}
    assert len(fixed) == 6
    absolute = run_grid.tuning_grid(replace(TINY, learning_rates=(0.1, 0.3)), known())
    assert [(trial.lr, trial.factor) for trial in absolute["fo"]] == [(0.1, 1.0), (0.3, 1.0)]


def test_a_method_by_its_other_name_has_the_same_grid():
    two = tuple(Contender(name, name) for name in ("dp-sam", "sa-dp-sgd"))
    spec = replace(TINY, contenders=two, tune={"rho": (0.05, 0.1)})
    grid = run_grid.grid_of(spec)
    assert len(grid["dp-sam"]) == 6
    assert grid["sa-dp-sgd"] == grid["dp-sam"]
    assert {run.method for run in run_grid.due(spec, grid, {})} == {"dp-sam", "sa-dp-sgd"}


def test_final_runs_wait_for_the_whole_grid_and_use_the_best_of_it():
    grid = run_grid.tuning_grid(TINY, known())
    records = {}
    first = run_grid.due(TINY, grid, records)
    assert sum(run.stage == "tuning" for run in first) == 2 * 2 * 3 * 3, "every final seed has trials of its own"
    assert {run.stage for run in first} == {"tuning", "auto"}
    assert all(run.holdout == 0.2 for run in first if run.stage == "tuning")
    assert all(run.holdout == 0 and run.evaluations == 0 for run in first if run.stage == "auto")
    for run in first:
        if run.stage == "tuning" and run.label == "fo":
            records[run.id] = fake(run, {0.5: 0.6, 1.0: 0.7, 2.0: 0.9}[run.factor])
    second = [run for run in run_grid.due(TINY, grid, records) if run.stage == "tuned"]
    assert {(run.label, run.factor) for run in second} == {("fo", 2.0)}
    assert {run.seed for run in second} == {0, 1, 2}
    edge = aggregate_results.choices(TINY, grid, records)
    assert all(choice["at_edge"] for choice in edge)
    assert [(choice["seed"], choice["tuning_seeds"]) for choice in edge[:3]] == [(0, [1000]), (1, [1001]), (2, [1002])]


def test_every_final_seed_runs_at_the_rate_that_won_its_own_trials():
    spec = replace(TINY, rates=("tuned",), tuning_seeds=(1000, 1002))
    grid = run_grid.tuning_grid(spec, known())
    assert spec.all_tuning_seeds == (1000, 1002, 1003, 1005, 1006, 1008)
    assert run_grid.total(spec, grid) == 2 * 2 * (3 * 6 + 3)
    best = {1000: 0.5, 1002: 1.0, 1003: 1.0, 1005: 1.0, 1006: 2.0, 1008: 2.0}  # by tuning seed; a trial has two
    tuning = list(run_grid.tuning_runs(spec, grid))
    belongs = run_grid.membership(spec)
    assert all(map(belongs, tuning))
    assert not belongs(replace(tuning[0], seed=1001))
    records = {run.id: fake(run, 0.5 + 0.1 * (run.factor == best[run.seed])) for run in tuning if run.seed != 1003}
    finals = {(run.seed, run.factor) for run in run_grid.due(spec, grid, records) if run.stage == "tuned"}
    assert finals == {(0, 0.5), (2, 2.0)}, (
        "0.5 and 1 are level in the trials of seed 0; those of seed 1 are not all here"
    )
    once = replace(spec, choose="once")
    chosen = run_grid.due(once, grid, records)
    assert {(run.seed, run.stage) for run in chosen} == {(seed, "tuned") for seed in (0, 1, 2)}
    assert len({run.factor for run in chosen}) == 1
    assert run_grid.total(once, grid) == 2 * 2 * (3 * 2 + 3)


def test_a_failed_trial_loses_and_a_grid_that_failed_whole_gives_no_final_run():
    grid = run_grid.tuning_grid(TINY, known())
    tuning = list(run_grid.tuning_runs(TINY, grid))
    records = {run.id: FailedRun(run, "broke") for run in tuning}
    assert not [run for run in run_grid.due(TINY, grid, records) if run.stage == "tuned"]
    one = next(run for run in tuning if run.factor == 0.5)
    records[one.id] = fake(one, 0.4)
    assert {run.factor for run in run_grid.due(TINY, grid, records) if run.stage == "tuned"} == {0.5}


def test_a_trial_tried_again_that_wins_supersedes_the_final_runs_of_the_one_that_won_before(tmp_path):
    whole = replace(TINY, budgets=TINY.budgets[:1], contenders=TINY.contenders[:1], rates=("tuned",), evaluations=1)
    spec = replace(whole, choose="once")
    grid = run_grid.tuning_grid(spec, known())
    tuning = {run.factor: run for run in run_grid.tuning_runs(spec, grid)}
    scores = {0.5: 0.6, 1.0: 0.7}
    records = {tuning[factor].id: fake(tuning[factor], score) for factor, score in scores.items()}
    records[tuning[2.0].id] = FailedRun(tuning[2.0], "broke")
    for run in run_grid.due(spec, grid, records):
        records[run.id] = fake(run, 0.5 + run.seed / 100, curve=[[3, 0.4, 1.0]])
    assert run_grid.superseded(spec, grid, records) == set()
    records[tuning[2.0].id] = fake(tuning[2.0], 0.9)
    gone = run_grid.superseded(spec, grid, records)
    assert [each.run.stage for each in records.values() if each.id not in gone] == ["tuning"] * 3
    assert [each.run.stage for each in records.values() if each.id in gone] == ["tuned"] * 3
    assert aggregate_results.rows([each for each in records.values() if each.id not in gone], "dp-sgd") == []
    fresh = run_grid.due(spec, grid, records)
    assert {(run.factor, run.seed) for run in fresh} == {(2.0, 0), (2.0, 1), (2.0, 2)}
    records |= {run.id: fake(run, 0.8) for run in fresh}
    assert run_grid.superseded(spec, grid, records) == gone
    (row,) = aggregate_results.rows([each for each in records.values() if each.id not in gone], "dp-sgd")
    assert (row["count"], row["mean"]) == (3, pytest.approx(0.8))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    for record in records.values():
        home.write(record)
    seen = []
    runner.Meter(home, seen.append).show()
    assert summarised(home)["done"] == seen[0].done == summarised(home)["total"] == 6
    assert set(row["runs"]) == {run.id for run in fresh}
    stages = {each["id"]: each["run"]["stage"] for each in reported_records(home)}
    assert sorted(stages.values()) == ["superseded"] * 3 + ["tuned"] * 3 + ["tuning"] * 3
    assert {name for name, stage in stages.items() if stage == "superseded"} == gone


def test_a_trial_tried_again_supersedes_the_final_run_of_its_own_seed_only():
    spec = replace(TINY, budgets=TINY.budgets[:1], contenders=TINY.contenders[:1], rates=("tuned",))
    grid = run_grid.tuning_grid(spec, known())
    records = {run.id: fake(run, 0.5 + 0.1 * (run.factor == 1.0)) for run in run_grid.tuning_runs(spec, grid)}
    records |= {run.id: fake(run, 0.5) for run in run_grid.due(spec, grid, records)}
    assert run_grid.superseded(spec, grid, records) == set()
    again = next(run for run in run_grid.tuning_runs(spec, grid) if (run.factor, run.seed) == (2.0, 1001))
    records[again.id] = fake(again, 0.9)
    gone = run_grid.superseded(spec, grid, records)
    assert [records[name].run.seed for name in gone] == [1]
    assert [(run.seed, run.factor) for run in run_grid.due(spec, grid, records)] == [(1, 2.0)]


def test_identity_is_the_job_not_the_machine():
    grid = run_grid.tuning_grid(TINY, known())
    moved = replace(TINY, problems=(Problem("digits-mlp", "/elsewhere"),))
    ids = [run.id for run in run_grid.tuning_runs(TINY, grid)]
    assert ids == [run.id for run in run_grid.tuning_runs(moved, grid)]
    assert len(set(ids)) == len(ids)
    longer = [run.id for run in run_grid.tuning_runs(replace(TINY, steps=7), grid)]
    assert not set(ids) & set(longer)


def test_a_run_made_with_its_curve_stands_for_the_same_run_without():
    spec = replace(TINY, rates=("auto",), contenders=TINY.contenders[:1], budgets=TINY.budgets[:1])
    grid = run_grid.tuning_grid(spec, known())
    plain = run_grid.due(spec, grid, {})
    watched = [replace(run, evaluations=9) for run in plain]
    records = {run.id: fake(run, 0.6) for run in watched}
    assert run_grid.due(spec, grid, records) == []
    records |= {run.id: fake(run, 0.5) for run in plain}
    other = [replace(run, label="fo", method="fo-dp-sgd") for run in plain]
    records |= {run.id: fake(run, 0.7) for run in other}
    better, row = aggregate_results.rows(records.values(), "dp-sgd")
    assert (row["count"], row["mean"], set(row["runs"])) == (3, 0.5, {run.id for run in plain})
    assert better["difference"] == pytest.approx(0.2)
