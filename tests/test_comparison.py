"""A comparison as a value and as a folder: what it needs, what it survives, and that its tables come from records."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from vestige import accounting, tasks
from vestige.cli.progress import _marks, check_place, check_tasks
from vestige.compare import comparison, execute, folder, presets, runner
from vestige.compare.arguments import contenders
from vestige.compare.comparison import Budget, Contender, Problem, Run, Specification
from vestige.compare.execute import Place
from vestige.compare.folder import ATTEMPTS, ComparisonFolder
from vestige.compare.summary import summarised
from vestige.compare.verify import verify_comparison
from vestige.layout import Layout
from vestige.methods.registry import METHODS, build
from vestige.questions import Question, SampledGaussian
from vestige.training import planning

TINY = Specification(
    problems=(Problem("digits-mlp"),),
    contenders=(Contender("dp-sgd", "dp-sgd"), Contender("fo", "fo-dp-sgd", {"beta": 0.8})),
    budgets=(Budget("epsilon", 3.0), Budget("epsilon", 8.0)),
    seeds=(0, 1, 2),
    steps=6,
    factors=(0.5, 1.0, 2.0),
)


def known():
    return {"dp-sgd": ["clip", "momentum"], "fo-dp-sgd": ["beta", "window"]}


def fake(run: Run, accuracy: float, **more):
    """A record as performing writes it, without training anything."""
    return {
        "version": comparison.VERSION,
        "id": run.id,
        "run": run.to_json(),
        "status": "done",
        ("nonprivate_validation_accuracy" if run.stage == "tuning" else "accuracy"): accuracy,
        "epsilon": run.budget.value,
        "lr": 0.1,
        "noise_multiplier": 1.0,
        "seconds": 1.0,
        "memory_mb": 1.0,
        "stacked": 1,
        "noise": "secret",
        "sampling": "poisson",
        "expected_batch": 71.85,
        ("nonprivate_validation_curve" if run.stage == "tuning" else "curve"): [],
        "pictures": {},
        "charged": [],
        **more,
    }


# --- what is needed --------------------------------------------------------------------------------------------------


def test_every_contender_has_the_same_number_of_trials_over_the_same_range():
    free = (TINY.contenders[0], Contender("fo", "fo-dp-sgd"))
    tuned = replace(TINY, contenders=free, tune={"beta": (0.8, 0.9), "window": (4, 8)})
    grid = comparison.trials(tuned, known())
    assert {label: len(points) for label, points in grid.items()} == {"dp-sgd": 12, "fo": 12}
    for points in grid.values():
        rates = [trial.factor for trial in points]
        assert (min(rates), max(rates)) == pytest.approx((0.5, 2.0))
    assert {tuple(trial.options.items()) for trial in grid["dp-sgd"]} == {()}
    assert len({tuple(trial.options.items()) for trial in grid["fo"]}) == 4
    fixed = comparison.trials(replace(tuned, contenders=TINY.contenders), known())["fo"]  # whose name says its beta
    assert {tuple(trial.options) for trial in fixed} == {("window",)}
    assert len(fixed) == 6
    absolute = comparison.trials(replace(TINY, learning_rates=(0.1, 0.3)), known())
    assert [(trial.lr, trial.factor) for trial in absolute["fo"]] == [(0.1, 1.0), (0.3, 1.0)]


def test_final_runs_wait_for_the_whole_grid_and_use_the_best_of_it():
    grid = comparison.trials(TINY, known())
    records = {}
    first = comparison.due(TINY, grid, records)
    assert sum(run.stage == "tuning" for run in first) == 2 * 2 * 3
    assert {run.stage for run in first} == {"tuning", "auto"}
    assert all(run.holdout == 0.2 for run in first if run.stage == "tuning")
    assert all(run.holdout == 0 and run.evaluations == 0 for run in first if run.stage == "auto")
    for run in first:
        if run.stage == "tuning" and run.label == "fo":
            records[run.id] = fake(run, {0.5: 0.6, 1.0: 0.7, 2.0: 0.9}[run.factor])
    second = [run for run in comparison.due(TINY, grid, records) if run.stage == "tuned"]
    assert {(run.label, run.factor) for run in second} == {("fo", 2.0)}
    assert {run.seed for run in second} == {0, 1, 2}
    edge = comparison.choices(TINY, grid, records)
    assert all(choice["at_edge"] for choice in edge)


def test_a_failed_trial_loses_and_a_grid_that_failed_whole_gives_no_final_run():
    grid = comparison.trials(TINY, known())
    tuning = list(comparison.tuning_runs(TINY, grid))
    records = {run.id: execute.failure(run, "broke") for run in tuning}
    assert not [run for run in comparison.due(TINY, grid, records) if run.stage == "tuned"]
    one = next(run for run in tuning if run.factor == 0.5)
    records[one.id] = fake(one, 0.4)
    assert {run.factor for run in comparison.due(TINY, grid, records) if run.stage == "tuned"} == {0.5}


def test_a_trial_tried_again_that_wins_supersedes_the_final_runs_of_the_one_that_won_before(tmp_path):
    spec = replace(TINY, budgets=TINY.budgets[:1], contenders=TINY.contenders[:1], rates=("tuned",), evaluations=1)
    grid = comparison.trials(spec, known())
    tuning = {run.factor: run for run in comparison.tuning_runs(spec, grid)}
    scores = {0.5: 0.6, 1.0: 0.7}
    records = {tuning[factor].id: fake(tuning[factor], score) for factor, score in scores.items()}
    records[tuning[2.0].id] = execute.failure(tuning[2.0], "broke")
    for run in comparison.due(spec, grid, records):
        records[run.id] = fake(run, 0.5 + run.seed / 100, curve=[[3, 0.4, 1.0]])
    assert comparison.settled(spec, grid, records) == list(records.values())
    records[tuning[2.0].id] = fake(tuning[2.0], 0.9)
    after = comparison.settled(spec, grid, records)
    assert [each["run"]["stage"] for each in after] == ["tuning"] * 3 + ["superseded"] * 3
    assert comparison.rows(after, "dp-sgd") == []
    fresh = comparison.due(spec, grid, records)
    assert {(run.factor, run.seed) for run in fresh} == {(2.0, 0), (2.0, 1), (2.0, 2)}
    records |= {run.id: fake(run, 0.8) for run in fresh}
    (row,) = comparison.rows(comparison.settled(spec, grid, records), "dp-sgd")
    assert (row["count"], row["mean"]) == (3, pytest.approx(0.8))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    for record in records.values():
        home.keep(record)
    seen = []
    runner.Meter(home, seen.append).show()
    assert summarised(home)["done"] == seen[0].done == summarised(home)["total"] == 6
    assert set(row["runs"]) == {run.id for run in fresh}


def test_identity_is_the_job_not_the_machine():
    grid = comparison.trials(TINY, known())
    moved = replace(TINY, problems=(Problem("digits-mlp", "/elsewhere"),))
    ids = [run.id for run in comparison.tuning_runs(TINY, grid)]
    assert ids == [run.id for run in comparison.tuning_runs(moved, grid)]
    assert len(set(ids)) == len(ids)
    longer = [run.id for run in comparison.tuning_runs(replace(TINY, steps=7), grid)]
    assert not set(ids) & set(longer)


def test_specification_survives_json():
    content = json.loads(json.dumps(replace(TINY, tune={"beta": (0.8,)}).to_json()))
    assert Specification.from_json(content) == replace(TINY, tune={"beta": (0.8,)})
    with pytest.raises(ValueError, match="another version"):
        Specification.from_json({**content, "colour": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budgets": ()}, "budgets=.* is empty"),
        ({"seeds": ()}, "seeds=.* is empty"),
        ({"contenders": ()}, "contenders=.* is empty"),
        ({"factors": ()}, "grid of learning rates"),
        ({"factors": (-1.0,)}, "must all be positive"),
        ({"tune": {"beta": ()}}, "empty grid"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"tuning_seeds": (2,)}, "fresh"),
        ({"rates": ("given",)}, "lr=None"),
        ({"rates": ("best",)}, "unknown"),
        ({"contenders": (Contender("a", "dp-sgd"), Contender("a", "dp-sgd"))}, "twice"),
    ],
)
def test_bad_specifications_are_refused_with_a_line(change, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **change)


def test_a_budget_must_be_positive_and_known():
    with pytest.raises(ValueError, match="epsilon=-1"):
        Budget("epsilon", -1)
    with pytest.raises(ValueError, match="unknown"):
        Budget("gold", 1)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables_come_from_raw_records_alone():
    """Regenerated by hand, with scipy, from the records of two methods and one budget."""
    grid = comparison.trials(TINY, known())
    finals = [run for run in comparison.final_runs(TINY, grid, {}) if run.stage == "auto"]
    generator = np.random.default_rng(3)
    records = [fake(run, float(generator.normal(0.8 + 0.1 * (run.label == "fo"), 0.01))) for run in finals]
    rows = comparison.rows(records, "dp-sgd")
    tests = {}
    for row in rows:
        mine = [
            r
            for r in records
            if r["run"]["label"] == row["method"] and r["run"]["budget"]["value"] == row["budget_value"]
        ]
        values = [r["accuracy"] for r in sorted(mine, key=lambda r: r["run"]["seed"])]
        assert row["mean"] == pytest.approx(np.mean(values))
        assert row["sd"] == pytest.approx(np.std(values, ddof=1))
        assert sorted(row["runs"]) == sorted(r["id"] for r in mine)
        tests[row["method"], row["budget_value"]] = (values, row)
    for budget in (3.0, 8.0):
        ours, row = tests["fo", budget]
        base, base_row = tests["dp-sgd", budget]
        assert row["p"] == pytest.approx(stats.ttest_rel(ours, base).pvalue)
        assert base_row["sentence"] == "the baseline"
        assert row["difference"] == pytest.approx(np.mean(ours) - np.mean(base))
    ps = sorted(tests["fo", budget][1]["p"] for budget in (3.0, 8.0))
    adjusted = sorted(tests["fo", budget][1]["p_holm"] for budget in (3.0, 8.0))
    assert adjusted == pytest.approx([2 * ps[0], max(2 * ps[0], ps[1])])
    assert comparison.rows(list(reversed(records)), "dp-sgd") == rows


def test_rows_without_runs_or_epsilon_say_so():
    grid = comparison.trials(TINY, known())
    finals = [run for run in comparison.final_runs(TINY, grid, {}) if run.stage == "auto"]
    records = [fake(run, 0.5, epsilon=None) for run in finals if run.label == "dp-sgd"]
    records += [execute.failure(run, "no valid accountant") for run in finals if run.label == "fo"]
    rows = {row["method"]: row for row in comparison.rows(records, "dp-sgd")}
    assert rows["dp-sgd"]["epsilon"] is None
    assert rows["fo"]["sentence"] == "every run failed: no valid accountant"
    assert len(rows["fo"]["failed"]) == 3


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_whole_comparison_and_its_continuation(tmp_path):
    seen = []
    home = runner.compare(tmp_path / "c", TINY, watch=seen.append)
    records = home.records()
    assert len(records) == comparison.total(TINY, runner.grid_of(TINY)) == 12 + 2 * 2 * 2 * 3
    assert all(record["status"] == "done" for record in records.values())
    assert seen[-1].done == seen[-1].total
    assert "at epsilon" in seen[-1].best
    for record in records.values():
        budget = record["run"]["budget"]["value"]
        assert 0.99 * budget < record["epsilon"] <= budget
        assert record["charged"][0]["count"] == record["asked"] == 6
    before = {path: path.stat().st_mtime_ns for path in home.runs.iterdir()}
    runner.compare(tmp_path / "c")
    assert before == {path: path.stat().st_mtime_ns for path in home.runs.iterdir()}
    lost = next(iter(before))
    lost.unlink()
    runner.compare(tmp_path / "c", TINY)
    assert set(home.runs.iterdir()) == set(before)
    assert sum(path.stat().st_mtime_ns != stamp for path, stamp in before.items()) == 1
    priced = runner.prices(home)
    assert all(row["epsilon_with_tuning"] > row["epsilon_one_run"] for row in priced)
    assert not list(home.claims.iterdir())


def test_stacked_and_alone_agree_in_reproducible_mode(tmp_path):
    plain = replace(TINY, reproducible=True, rates=("auto",), budgets=(Budget("paper_sigma", 1.1),), evaluations=2)
    stacked = runner.compare(tmp_path / "a", plain, place=Place(stack=True)).records()
    alone = runner.compare(tmp_path / "b", plain, place=Place(stack=False)).records()
    assert stacked.keys() == alone.keys()
    for key, record in stacked.items():
        other = alone[key]
        assert record["stacked"] == 6
        assert other["stacked"] == 1
        assert record["accuracy"] == pytest.approx(other["accuracy"], abs=0.01)
        assert [point[:2] for point in record["curve"]] == [
            pytest.approx(point[:2], abs=0.01) for point in other["curve"]
        ]
        for field in ("lr", "noise_multiplier", "epsilon_if_noise_were_secret", "expected_batch"):
            assert record[field] == pytest.approx(other[field], rel=2e-3), field
        for field in (
            "epsilon",
            "charged",
            "asked",
            "adjacency",
            "sampling",
            "noise",
            "assumptions",
            "reasons",
            "steps",
        ):
            if field == "charged":
                assert record[field][0]["count"] == other[field][0]["count"]
            else:
                assert record[field] == other[field], field


def test_any_contender_may_clip_by_layers(tmp_path):
    """DP-SGD by layers is SMA-DP-SGD without its memory; flat clipping is another method."""
    words = ("dp-sgd", "dp-sgd:groups=layers", "sma-dp-sgd:beta=1")
    field = tuple(Contender(label, name, options) for label, name, options in contenders(words))
    spec = replace(TINY, contenders=field, reproducible=True, rates=("auto",), budgets=TINY.budgets[:1], steps=60)
    for stack in (True, False):
        home = runner.compare(tmp_path / str(stack), spec, place=Place(stack=stack))
        found = {(record["run"]["label"], record["run"]["seed"]): record for record in home.records().values()}
        for seed in spec.seeds:
            flat, layers, spectral = (found[label, seed] for label in words)
            assert (flat["groups"], layers["groups"], spectral["groups"]) == (1, 3, 3)
            assert layers["accuracy"] == spectral["accuracy"]
            assert layers["lr"] == spectral["lr"]
            assert layers["charged"] == flat["charged"]
        assert any(found[words[0], seed]["accuracy"] != found[words[1], seed]["accuracy"] for seed in spec.seeds)


def test_every_run_of_a_trial_is_in_the_price_of_tuning(tmp_path):
    spec = replace(TINY, budgets=TINY.budgets[:1], contenders=TINY.contenders[:1], seeds=(0,), tuning_seeds=(10, 11))
    home = runner.compare(tmp_path / "c", spec)
    (row,) = runner.prices(home)
    record = next(each for each in home.records().values() if each["run"]["stage"] == "tuning")
    twice = {Question.from_json(each): 2 * each["count"] for each in record["charged"]}
    assert (row["trials"], row["runs_per_trial"]) == (3, 2)
    once = {question: count // 2 for question, count in twice.items()}
    whole = accounting.tuned_epsilon(once, spec.delta, 3, repeats=2, final_runs=1)
    assert row["epsilon_with_tuning"] == pytest.approx(whole, rel=1e-9)
    assert whole > accounting.tuned_epsilon(twice, spec.delta, 3) > 1.1 * accounting.tuned_epsilon(once, spec.delta, 3)


def test_the_price_of_tuning_is_that_of_the_dearest_trial_and_none_without_a_theorem():
    spec = replace(TINY, budgets=TINY.budgets[:1], contenders=TINY.contenders[:1], rates=("tuned",))
    grid = comparison.trials(spec, known())
    cheap, dear = ([{**SampledGaussian(0.1, z).to_json(), "count": 9}] for z in (9.0, 2.0))
    runs = list(comparison.tuning_runs(spec, grid))
    records = {run.id: fake(run, 0.5, charged=cheap, epsilon=0.1) for run in runs}
    assert comparison.tuning_prices(spec, grid, records, runner._tuned_price) == []  # no final run yet
    records |= {run.id: fake(run, 0.5, charged=cheap, epsilon=0.7) for run in comparison.due(spec, grid, records)}
    records[runs[1].id] |= {"charged": dear, "epsilon": 0.9}

    def priced(**change):
        changed = {key: {**record, **change} for key, record in records.items()}
        (row,) = comparison.tuning_prices(spec, grid, changed, runner._tuned_price)
        return row["epsilon_one_run"], row["epsilon_with_tuning"]

    dearest = {SampledGaussian(0.1, 2.0): 9}
    assert priced() == (0.7, pytest.approx(accounting.tuned_epsilon(dearest, spec.delta, 3, final_runs=1)))
    assert priced(schedule="filtered") == (0.7, None)
    assert priced(epsilon=None, epsilon_if_noise_were_secret=0.7)[1] is None
    final = next(key for key, record in records.items() if record["run"]["stage"] == "tuned")
    records[final]["charged"] = [{**SampledGaussian(0.1, 1.0).to_json(), "count": 9}]
    dearer = accounting.tuned_epsilon({SampledGaussian(0.1, 1.0): 9}, spec.delta, 3, final_runs=1)
    assert priced()[1] == pytest.approx(dearer)


def test_a_run_made_with_its_curve_stands_for_the_same_run_without():
    spec = replace(TINY, rates=("auto",), contenders=TINY.contenders[:1], budgets=TINY.budgets[:1])
    grid = comparison.trials(spec, known())
    plain = comparison.due(spec, grid, {})
    watched = [replace(run, evaluations=9) for run in plain]
    records = {run.id: fake(run, 0.6) for run in watched}
    assert comparison.due(spec, grid, records) == []
    records |= {run.id: fake(run, 0.5) for run in plain}
    other = [replace(run, label="fo", method="fo-dp-sgd") for run in plain]
    records |= {run.id: fake(run, 0.7) for run in other}
    better, row = comparison.rows(records.values(), "dp-sgd")
    assert (row["count"], row["mean"], set(row["runs"])) == (3, 0.5, {run.id for run in plain})
    assert better["difference"] == pytest.approx(0.2)


def test_a_contender_whose_every_trial_failed_has_a_row_that_says_why():
    grid = comparison.trials(TINY, known())
    runs = [run for run in comparison.tuning_runs(TINY, grid) if run.label == "fo"]
    records = [execute.failure(run, "no such budget") for run in runs]
    first, second = comparison.rows(records, "dp-sgd")
    assert first["sentence"] == second["sentence"] == "every run failed: no such budget"
    assert (first["method"], first["rate"], first["mean"]) == ("fo", "tuned", None)
    assert comparison.rows([*records[:-1], fake(runs[-1], 0.5)], "dp-sgd") == [first]


def test_what_a_failed_stack_held_is_given_back_before_smaller_ones_are_made(monkeypatch):
    spec = replace(TINY, rates=("auto",))
    runs = list(comparison.final_runs(spec, runner.grid_of(spec), {}))[:8]
    held = []

    class Held:
        pass

    def together(runs, place):
        mine = Held()
        held.append(weakref.ref(mine))
        alive.append(sum(each() is not None for each in held))
        raise MemoryError
        yield mine

    alive: list[int] = []
    monkeypatch.setattr(execute, "_together", together)
    monkeypatch.setattr(execute, "_guarded", lambda run, place: {"id": run.id})
    assert len(list(execute.perform(runs, Place()))) == 8
    assert max(alive) == 1


def test_what_breaks_a_stack_is_recorded_with_the_run_it_belongs_to(tmp_path, monkeypatch):
    broken = replace(
        TINY, rates=("auto",), contenders=(TINY.contenders[0], Contender("odd", "fo-dp-sgd", {"beta": "x"}))
    )
    records = runner.compare(tmp_path / "c", broken).records().values()
    assert {record["status"] for record in records if record["run"]["label"] == "dp-sgd"} == {"done"}
    assert all("TypeError" in record["error"] for record in records if record["run"]["label"] == "odd")

    banded = (TINY.contenders[0], Contender("dp-bandmf", "dp-bandmf"))
    fixed = (Budget("noise_multiplier", 1.0), Budget("noise_multiplier", 2.0))  # nothing is calibrated, and refused so
    rare = replace(TINY, rates=("auto",), contenders=banded, budgets=fixed, sample_rate=0.3, seeds=(0,))
    records = runner.compare(tmp_path / "b", rare).records().values()
    assert {(r["run"]["label"], r["status"]) for r in records} == {("dp-sgd", "done"), ("dp-bandmf", "failed")}
    assert {r["stacked"] for r in records if r["status"] == "done"} == {2}, "what cannot be served breaks no stack"

    def breaks(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(execute.stacked, "Stack", breaks)
    whole = runner.compare(tmp_path / "d", replace(TINY, rates=("auto",))).records().values()
    assert {(record["status"], record["stacked"]) for record in whole} == {("done", 1)}
    monkeypatch.setattr(execute, "start", breaks)
    failed = runner.compare(tmp_path / "e", replace(TINY, rates=("auto",))).records().values()
    assert all("does not fit in memory" in record["error"] for record in failed)


def test_a_helper_with_wrong_data_is_refused_before_it_fails_anything(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        check_tasks(replace(TINY, problems=(Problem("mnist-mlp", str(tmp_path)),)), str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="--data is missing"):
        check_tasks(replace(TINY, problems=(Problem("mnist-mlp", None),)))


def test_a_preset_about_seconds_is_continued_one_run_after_another(tmp_path):
    assert not presets.timed_in(tmp_path)
    for name, timed in (("fo-table1", True), ("fo-table3", False)):
        (tmp_path / "preset.json").write_text(json.dumps({"preset": name, "small": True}))
        assert presets.timed_in(tmp_path) is timed
    for nothing in ([], {}, {"preset": 3, "small": True}):
        (tmp_path / "preset.json").write_text(json.dumps(nothing))
        with pytest.raises(ValueError, match="names no preset"):
            presets.timed_in(tmp_path)
    with pytest.raises(ValueError, match="leave --workers"):
        check_place("local", None, 2, "auto", alone=True)
    check_place("local", None, 1, "auto", alone=True)


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(("steps", "asked", "looks"), [(6, 4, 3), (6, 6, 6), (5, 100, 5), (6, 0, 0)])
def test_the_test_set_is_never_looked_at_more_often_than_was_asked(tmp_path, stack, steps, asked, looks):
    spec = replace(TINY, rates=("auto",), steps=steps, seeds=(0,), evaluations=asked)
    records = runner.compare(tmp_path / "c", spec, place=Place(stack=stack)).records().values()
    assert {len(record["curve"]) for record in records} == {looks}


def test_memory_that_runs_out_while_a_stack_is_prepared_makes_it_smaller(monkeypatch):
    spec = replace(TINY, rates=("auto",))
    runs = list(comparison.final_runs(spec, runner.grid_of(spec), {}))[:4]

    def prepared(run, place):
        raise MemoryError

    monkeypatch.setattr(execute, "_prepared", prepared)
    monkeypatch.setattr(execute, "_guarded", lambda run, place: {"id": run.id, "status": "done"})
    assert [record["status"] for record in execute.perform(runs, Place())] == ["done"] * 4


def test_the_same_comparison_reads_its_data_where_this_process_has_them(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",), seeds=(0,))
    runner.compare(tmp_path / "c", spec)
    met = []
    monkeypatch.setattr(runner, "examples", lambda task, place: met.append(place.data))
    here = replace(spec, problems=(replace(spec.problems[0], data="here"),))
    runner.compare(tmp_path / "c", here)
    runner.compare(tmp_path / "c", here, place=Place(data={"digits-mlp": "there"}))
    runner.compare(tmp_path / "c")
    assert met == [{"digits-mlp": "here"}, {"digits-mlp": "there"}, {}]


def row_of(method, p, mean=0.5):
    return {"method": method, "p_holm": p, "mean": mean}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row_of("dp-sgd", None), row_of("a", 0.5)], "unmarked: not distinguishable"),
        ([row_of("dp-sgd", None), row_of("a", 0.5), row_of("b", None)], "not distinguishable; ?: not tested"),
        ([row_of("a", None), row_of("b", None)], "no run of the baseline dp-sgd is here; --baseline names another"),
        ([row_of("dp-sgd", None), row_of("a", None)], "two seeds of each or more"),
    ],
)
def test_what_was_not_tested_is_not_called_indistinguishable(rows, words):
    said = _marks({"baseline": "dp-sgd", "rows": rows})
    assert said.endswith(words)


def test_other_data_are_not_mixed_in(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",), seeds=(0,))
    home = runner.compare(tmp_path / "c", spec)
    next(home.runs.iterdir()).unlink()
    monkeypatch.setattr(runner, "examples", lambda task, place: 77)
    with pytest.raises(ValueError, match=r"77 training examples of digits-mlp.*on record.*1437"):
        runner.compare(tmp_path / "c")
    assert len(list(home.runs.iterdir())) == 3


def test_each_worker_takes_a_stack_of_as_few_methods_as_can_be(tmp_path):
    home = ComparisonFolder(tmp_path / "c")
    home.create(replace(TINY, rates=("auto",)))
    due = comparison.due(home.specification(), runner.grid_of(TINY), {})
    assert [run.method for run in due[:6]] == ["dp-sgd"] * 3 + ["fo-dp-sgd"] * 3, "by budget, as they are planned"
    first, second = (runner._claimed(home, due, Place(), workers=2) for _ in range(2))
    assert [{run.method for run in batch} for batch in (first, second)] == [{"dp-sgd"}, {"fo-dp-sgd"}]
    assert {run.id for run in (*first, *second)} == {run.id for run in due}


def test_a_stack_of_all_methods_says_of_each_what_it_says_alone(tmp_path):
    named = [name for name in METHODS if execute._covered("digits-mlp", None, name, "{}")]
    assert len(named) >= len(METHODS) - 3
    everything = replace(
        TINY,
        reproducible=True,
        rates=("auto",),
        contenders=tuple(Contender(name, name) for name in named),
        budgets=(Budget("noise_multiplier", 1.1),),
        seeds=(0,),
        evaluations=1,
    )
    stacked = runner.compare(tmp_path / "a", everything, place=Place(stack=True)).records()
    alone = runner.compare(tmp_path / "b", everything, place=Place(stack=False)).records()
    assert len(stacked) == len(named)
    timed = ("curve", "pictures", "seconds", "stacked", "memory_mb")
    for key, record in stacked.items():
        other, name = alone[key], record["run"]["label"]
        assert record["stacked"] == len(named)
        assert other.keys() - record.keys() <= {"memory_share"}, name
        for field in record.keys() - timed:
            expected = other[field]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-4, abs=0.01 if field == "accuracy" else 1e-6)
            elif isinstance(expected, list) and expected and isinstance(expected[0], float):
                expected = pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert record[field] == expected, f"{name}: {field}"
        assert record["pictures"].keys() <= other["pictures"].keys(), name


@pytest.mark.parametrize("name", ["dp-sgd", "dp-sat", "dp-sam", "dp-bandmf", "dp-ftrl", "adp-adamw", "sma-dp-sgd"])
def test_methods_that_share_a_search_get_the_noise_they_would_get_alone(name):
    method, loaded = build(name), tasks.load("digits-mlp", None, 0)
    layout = Layout.of(loaded.model, method.grouping)
    alone = planning.plan(
        loaded.model, layout, method, 1000, sample_rate=0.05, steps=40, delta=1e-5, epsilon=3.0, lr=1.0
    )
    assert execute._calibrated(execute._asking(method), 3.0, 0.05, 40, 1e-5) == alone.noise_multiplier


def test_a_failing_run_is_recorded_and_the_rest_go_on(tmp_path):
    mixed = replace(
        TINY,
        rates=("auto",),
        contenders=(
            Contender("dp-sgd", "dp-sgd"),
            Contender("broken", "fo-dp-sgd", {"beta": 7}),
            Contender("odd", "dp-sgd", {"colour": 1}),
        ),
    )
    records = runner.compare(tmp_path / "c", mixed).records().values()
    errors = {record["run"]["label"]: record["error"] for record in records if record["status"] == "failed"}
    assert "beta=7" in errors["broken"]
    assert "colour" in errors["odd"]
    assert all(record["status"] == "done" for record in records if record["run"]["label"] == "dp-sgd")
    home = ComparisonFolder(tmp_path / "c")
    assert home.forget_failures() == 12
    assert len(home.records()) == 6


def test_a_budget_without_a_valid_accountant_is_one_line(tmp_path, monkeypatch):
    from vestige import accounting

    def refuse(*arguments, **options):
        raise ValueError("epsilon=3.0 cannot be reached: no theorem prices this")

    monkeypatch.setattr(accounting, "calibrate", refuse)
    execute._calibrated.cache_clear()
    records = runner.compare(tmp_path / "c", replace(TINY, rates=("auto",))).records().values()
    assert {record["error"] for record in records} == {"epsilon=3.0 cannot be reached: no theorem prices this"}


def test_a_task_too_big_for_memory_says_so_and_a_stack_is_halved(tmp_path, monkeypatch):
    sizes = []
    real = execute.stacked.Stack

    def small(runs, *arguments, **options):
        sizes.append(len(runs))
        if len(runs) > 2:
            raise MemoryError
        return real(runs, *arguments, **options)

    monkeypatch.setattr(execute.stacked, "Stack", small)
    records = runner.compare(tmp_path / "c", replace(TINY, rates=("auto",))).records()
    assert len(records) == 12
    assert max(sizes) == 12
    assert all(record["status"] == "done" for record in records.values())

    def never(*arguments, **options):
        raise MemoryError("cannot allocate 10 GiB")

    monkeypatch.setattr(execute, "start", never)
    failed = runner.compare(tmp_path / "d", replace(TINY, rates=("auto",)), place=Place(stack=False)).records()
    assert all("does not fit in memory" in record["error"] for record in failed.values())


def test_a_stack_that_ends_half_way_tells_nothing_twice(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",))
    runs = list(comparison.final_runs(spec, runner.grid_of(spec), {}))[:4]

    def together(runs, place):
        yield {"id": runs[0].id, "stack": len(runs)}
        if len(runs) > 2:
            raise MemoryError
        yield from ({"id": run.id, "stack": len(runs)} for run in runs[1:])

    monkeypatch.setattr(execute, "_together", together)
    monkeypatch.setattr(execute, "_guarded", lambda run, place: {"id": run.id, "stack": 1})
    records = list(execute.perform(runs, Place()))
    assert sorted(record["id"] for record in records) == sorted(run.id for run in runs)


def test_torn_and_foreign_records_are_left_out_named_and_made_again(tmp_path):
    spec = replace(TINY, rates=("auto",))
    home = runner.compare(tmp_path / "c", spec)
    torn, foreign, *_ = sorted(home.runs.iterdir())
    torn.write_text(torn.read_text()[:100])
    content = json.loads(foreign.read_text())
    foreign.write_text(json.dumps({**content, "version": 99}))
    again = ComparisonFolder(tmp_path / "c")
    assert len(again.records()) == 10
    assert set(again.unreadable) == {torn.name, foreign.name}
    assert "99" in again.unreadable[foreign.name]
    runner.compare(tmp_path / "c", spec)
    assert len(ComparisonFolder(tmp_path / "c").records()) == 12


def test_folders_of_another_version_or_purpose_are_refused(tmp_path):
    home = ComparisonFolder(tmp_path / "c")
    home.create(TINY)
    home.create(TINY)
    elsewhere = replace(TINY, problems=(replace(TINY.problems[0], data=str(tmp_path)),))
    ComparisonFolder(tmp_path / "c").create(elsewhere)  # the same comparison, with its data in another place
    with pytest.raises(ValueError, match="another comparison"):
        home.create(replace(TINY, steps=7))
    (tmp_path / "c" / "spec.json").write_text(json.dumps({"version": 0, "specification": {}}))
    with pytest.raises(ValueError, match="another version of vestige"):
        ComparisonFolder(tmp_path / "c").specification()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        ComparisonFolder(tmp_path / "d").create(TINY)
    with pytest.raises(ValueError, match="holds no comparison"):
        ComparisonFolder(tmp_path / "e").specification()


def test_an_unknown_method_or_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'nosuch' is unknown"):
        runner.compare(tmp_path / "a", replace(TINY, contenders=(Contender("x", "nosuch"),)))
    with pytest.raises(ValueError, match="engine='moon'"):
        runner.compare(tmp_path / "b", TINY, engine="moon")
    with pytest.raises(ValueError, match="workers=0"):
        runner.compare(tmp_path / "c", TINY, workers=0)


def _ended():
    """The number of a process that is no more."""
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    return dead.pid


def _kill(home, run, **more):
    """Make the last claim of a run that of a process that is no more."""
    claim = max(home.claims.glob(f"{run.id}*"), key=lambda path: int(path.suffix[1:] or 1))
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "pid": _ended(), **more}))
    return claim


def test_claims_are_exclusive_and_dead_ones_are_taken_over(tmp_path):
    home = ComparisonFolder(tmp_path / "c")
    home.create(TINY)
    run = next(comparison.tuning_runs(TINY, runner.grid_of(TINY)))
    assert home.claim(run) == 0
    assert ComparisonFolder(home.path).claim(run) is None
    for deaths in range(1, ATTEMPTS + 1):
        home.begin([run])
        _kill(home, run)
        assert home.claim(run) == deaths
        assert ComparisonFolder(home.path).claim(run) is None
    claim = _kill(home, run, host="elsewhere")
    assert home.claim(run) is None
    os.utime(claim, (time.time() - 10_000, time.time() - 10_000))
    assert home.claim(run) == ATTEMPTS
    home.release(run)
    assert not list(home.claims.iterdir())
    (home.claims / run.id).write_text("")  # a claim torn at birth is judged by its age alone
    assert home.claim(run) is None


def test_a_run_whose_process_keeps_dying_is_recorded_as_failed(tmp_path):
    spec = replace(TINY, rates=("auto",), seeds=(0,), budgets=(Budget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    run = comparison.due(spec, runner.grid_of(spec), {})[0]
    home.claim(run)
    home.begin([run])
    _kill(home, run, deaths=ATTEMPTS - 1)
    runner.compare(home.path)
    records = ComparisonFolder(home.path).records()
    assert "died 3 times while making it alone (killed, or out of memory)" in records[run.id]["error"]
    assert "--retry" in records[run.id]["error"]
    assert len(records) == 2
    assert not list(home.claims.iterdir())


SCRIPT = """
import sys
from vestige.compare import runner
from vestige.layout import Layout
from vestige.methods.registry import METHODS, build
from vestige.compare.execute import Place
if __name__ == "__main__":
    runner.compare(sys.argv[1], place=Place(stack=False), workers=int(sys.argv[2]))
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_in_mid_run_and_started_again_nothing_is_lost_or_repeated(tmp_path, workers):
    spec = replace(TINY, rates=("auto",), seeds=tuple(range(8)), budgets=(Budget("noise_multiplier", 1.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    source = str(Path(execute.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(home.path), str(workers)], env=environment, start_new_session=True
    )
    deadline = time.time() + 120
    while len(list(home.runs.glob("[!.]*.json"))) < 3 and time.time() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = {path: path.read_bytes() for path in home.runs.glob("[!.]*.json")}
    assert 3 <= len(done) < 16
    runner.compare(home.path)
    assert len(home.records()) == 16
    assert all(path.read_bytes() == content for path, content in done.items() if path.stem in home.records())
    assert not [path for path in home.runs.iterdir() if path.name.startswith(".") and path.suffix == ".json"]


@pytest.mark.slow
def test_ray_on_two_nodes_with_one_killed_in_mid_run(tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        spec = replace(TINY, rates=("auto",), steps=60, seeds=tuple(range(6)))
        killed = []

        def watch(status):
            if status.done >= 2 and not killed:
                killed.append(status.done)
                cluster.remove_node(node, allow_graceful=False)

        home = runner.compare(tmp_path / "c", spec, engine="ray", workers=2, place=Place(stack=False), watch=watch)
        assert killed
        records = home.records()
        assert len(records) == 24
        assert all(record["status"] == "done" for record in records.values())
    finally:
        ray.shutdown()
        cluster.shutdown()


# --- believed --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison with stacked runs, runs made alone, a filtered one among them, and one that cannot be afforded."""
    specification = replace(
        TINY,
        contenders=(Contender("dp-sgd", "dp-sgd"), Contender("dp-is", "dp-is"), Contender("br", "dpsgd-br")),
        budgets=(Budget("epsilon", 3.0), Budget("epsilon", 90.0)),
        rates=("auto",),
        seeds=(0,),
    )
    return runner.compare(tmp_path_factory.mktemp("compared") / "c", specification)


def test_every_epsilon_of_a_comparison_is_what_its_charges_cost(compared):
    records = compared.records().values()
    failed = sum(record["status"] == "failed" for record in records)
    assert any(record.get("schedule") == "filtered" for record in records)
    verdict = verify_comparison(compared.path)
    assert (verdict.verified, verdict.failed_runs, verdict.wrong) == (len(records) - failed, failed, {})
    assert verdict.largest_epsilon == max(record["epsilon"] for record in records if record["status"] == "done")


FORGERIES = {
    "a smaller epsilon": (lambda record: record.update(epsilon=record["epsilon"] * 0.99), "states epsilon"),
    "no epsilon": (lambda record: record.update(epsilon=None), "states epsilon"),
    "a question less": (lambda record: record["charged"][0].update(count=5), "lists 5"),
    "more noise": (lambda record: record["charged"][0].update(multiplier=99.0), "states epsilon"),
    "another run": (lambda record: record["run"].update(seed=77), "hash"),
    "noise that was known": (lambda record: record.update(noise="seeded"), "noise was seeded"),
    "shuffled data": (lambda record: record.update(sampling="shuffled"), "states epsilon"),
    "no charges": (lambda record: record.pop("charged"), "'charged'"),
    "half a file": (None, "JSONDecodeError"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_record_is_found(compared, tmp_path, forgery):
    forge, told = FORGERIES[forgery]
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    victim = next(key for key, each in copy.records().items() if each["run"]["method"] == "dp-sgd")
    path = copy.runs / f"{victim}.json"
    if forge is None:
        path.write_text(path.read_text()[:100])
    else:
        record = json.loads(path.read_text())
        forge(record)
        path.write_text(json.dumps(record))
    wrong = verify_comparison(copy.path).wrong
    assert [told in fault for fault in wrong.values()] == [True]


def test_a_record_that_states_honestly_more_than_its_budget_is_found(compared, tmp_path):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in copy.records().values() if each["run"]["method"] == "dp-sgd")
    record["charged"][0]["multiplier"] *= 0.8
    asked = {Question.from_json(row): row["count"] for row in record["charged"]}
    record["epsilon"] = accounting.epsilon(asked, record["run"]["delta"])
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    assert "more than its budget" in verify_comparison(copy.path).wrong[record["id"]]


def test_a_filtered_record_that_spent_more_than_its_filter_is_found(compared, tmp_path):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in copy.records().values() if each.get("schedule") == "filtered")
    for row in record["charged"]:
        record["asked"] += 10**4 * row["count"] - row["count"]
        row["count"] *= 10**4
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    assert "filter refuses" in verify_comparison(copy.path).wrong[record["id"]]


def test_verify_knows_a_comparison_from_a_run(compared, tmp_path):
    def command(*words):
        done = subprocess.run([sys.executable, "-m", "vestige.cli.main", *words], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = command("verify", str(compared.path))
    assert code == 0
    assert "runs cost what their records state" in out
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    path = next(path for path in copy.runs.iterdir() if json.loads(path.read_text())["status"] == "done")
    path.write_text(json.dumps({**json.loads(path.read_text()), "epsilon": 0.1}))
    code, out, errors = command("verify", str(copy.path), "--json")
    assert code == 1
    assert json.loads(out)["wrong"] == {path.stem: json.loads(out)["wrong"][path.stem]}
    assert f"runs/{path.name}: states epsilon 0.1" in errors
    assert "NOT VERIFIED: 1 records do not hold" in errors


# --- what is no part of a comparison ---------------------------------------------------------------------------------

AUTO = replace(TINY, rates=("auto",), seeds=(0,), budgets=(Budget("epsilon", 3.0),), steps=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two final runs of two steps."""
    return runner.compare(tmp_path_factory.mktemp("small") / "c", AUTO)


def _command(*words):
    done = subprocess.run([sys.executable, "-m", "vestige.cli.main", *words], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _specified(change):
    content = json.loads(json.dumps({"version": comparison.VERSION, "specification": AUTO.to_json()}))
    change(content["specification"])
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"version": 2}, "the specification is None"),
        ({"version": 2, "specification": {}}, "lacks its part 'problems'"),
        (
            _specified(lambda spec: spec["problems"][0].update(colour="red")),
            r"problems\[0\] has an unknown part 'colour'",
        ),
        (_specified(lambda spec: spec["budgets"][0].update(value="3")), r"budgets\[0\]: value is '3', not a number"),
        (_specified(lambda spec: spec.update(seeds="012")), "seeds is '012', not a list"),
        (_specified(lambda spec: spec.update(steps=True)), "steps is True, not a whole number"),
        (_specified(lambda spec: spec.update(tune=[])), r"tune is \[\], not an object"),
        (_specified(lambda spec: spec.update(reproducible="no")), "reproducible is 'no', not true or false"),
        (_specified(lambda spec: spec.update(baseline=None)), "baseline is None, not text"),
    ],
)
def test_a_specification_that_is_none_is_refused_in_a_line(tmp_path, content, words):
    (tmp_path / "spec.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as told:
        ComparisonFolder(tmp_path).specification()
    assert str(tmp_path / "spec.json") in str(told.value)


def test_every_command_says_in_a_line_that_a_specification_is_none(tmp_path):
    (tmp_path / "spec.json").write_text('{"version": 2}')
    for words in (["compare", "--resume"], ["report"], ["verify"]):
        code, _, errors = _command(*words, str(tmp_path))
        assert (code, errors.count("\n")) == (2, 1), errors
        assert "spec.json cannot be read" in errors


UNMADE = {
    "nothing but a name": (
        lambda record: [record.pop(key) for key in list(record) if key not in ("version", "id")],
        "run",
    ),
    "no accuracy": (lambda record: record.update(accuracy=None), "'accuracy' is None"),
    "no curve": (lambda record: record.pop("curve"), "'curve' is 'missing'"),
    "no sampler": (lambda record: record.pop("sampling"), "'sampling' is 'missing'"),
    "no batch": (lambda record: record.pop("expected_batch"), "'expected_batch' is 'missing'"),
    "no learning rate": (lambda record: record.pop("lr"), "'lr' is 'missing'"),
    "half a run": (lambda record: record["run"].pop("steps"), "lacks its part 'steps'"),
    "no run": (lambda record: record.update(run=None), "its run is None"),
    "the run of another": (lambda record: record["run"].update(seed=77), "not the hash"),
    "another name": (lambda record: record.update(id="0" * 20), "not the hash"),
    "another end": (lambda record: record.update(status="superseded"), "neither done nor failed"),
    "a failure without a line": (lambda record: record.update(status="failed"), "'error' is 'missing'"),
    "no question": (lambda record: record.update(charged=[{"count": 2}]), "unknown kind of question"),
    "half a question": (lambda record: record["charged"][0].pop("rate"), "no question with its count"),
    "a question never asked": (lambda record: record["charged"][0].update(count=0), "count=0"),
}


@pytest.mark.parametrize("damage", UNMADE)
def test_a_record_that_no_table_can_be_made_of_is_left_out_and_made_again(small, tmp_path, damage):
    copy = ComparisonFolder(shutil.copytree(small.path, tmp_path / "c"))
    change, told = UNMADE[damage]
    victim = min(copy.runs.iterdir())
    record = json.loads(victim.read_text())
    change(record)
    victim.write_text(json.dumps(record))
    assert victim.stem not in copy.records()
    assert told in copy.unreadable[victim.name]
    assert told in verify_comparison(copy.path).wrong[victim.name]
    again = runner.compare(copy.path)
    assert (len(again.records()), again.unreadable) == (2, {})


def test_a_report_leaves_out_what_it_cannot_read_and_refuses_a_preset_that_is_none(small, tmp_path):
    copy = ComparisonFolder(shutil.copytree(small.path, tmp_path / "c"))
    victim = min(copy.runs.iterdir())
    victim.write_text(json.dumps({"version": 2, "id": victim.stem, "status": "done"}))
    assert _command("report", str(copy.path))[0] == 0
    assert victim.name in (copy.path / "report.html").read_text()
    (copy.path / "preset.json").write_text("{}")
    code, _, errors = _command("report", str(copy.path))
    assert (code, errors.count("\n")) == (2, 1)
    assert "preset.json names no preset" in errors


STRANGERS = {
    "longer": {"steps": 3},
    "of another label": {"contenders": (Contender("stranger", "dp-sgd"),)},
    "with other options": {"contenders": (Contender("fo", "fo-dp-sgd", {"beta": 0.5}),)},
    "on another seed": {"seeds": (5,)},
    "at another budget": {"budgets": (Budget("epsilon", 4.0),)},
    "at a given rate": {"rates": ("given",), "lr": 1.0},
    "with known noise": {"reproducible": True},
    "in parts": {"physical_batch": 8},
    "at another delta": {"delta": 1e-6},
    "on another task": {"problems": (Problem("mnist-mlp"),)},
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_records_of_another_comparison_are_left_out_and_named(small, tmp_path, stranger):
    copy = ComparisonFolder(shutil.copytree(small.path, tmp_path / "c"))
    other = replace(AUTO, **STRANGERS[stranger])
    run = comparison.due(other, runner.grid_of(other), {})[0]
    copy.keep(fake(run, 0.5))
    assert len(copy.records()) == 2
    assert "no run of this comparison" in copy.unreadable[f"{run.id}.json"]
    assert "foreign" in verify_comparison(copy.path).wrong[f"{run.id}.json"]


def test_runs_with_their_curve_and_at_rates_that_lost_are_no_strangers(tmp_path):
    spec = replace(TINY, seeds=(0,), budgets=(Budget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    grid = runner.grid_of(spec)
    tuning = {run.id: fake(run, run.factor) for run in comparison.tuning_runs(spec, grid)}
    finals = [run for run in comparison.final_runs(spec, grid, tuning) if run.stage == "tuned"]
    kept = [
        replace(finals[0], evaluations=20),
        replace(finals[1], factor=0.5),  # of a trial that won before
        *comparison.tuning_runs(spec, grid),
    ]
    for run in kept:
        home.keep(fake(run, 0.5))
    home.keep(fake(replace(finals[1], factor=0.3), 0.5))
    assert set(home.records()) == {run.id for run in kept}
    assert len(home.unreadable) == 1


def test_a_folder_without_a_specification_takes_every_record(tmp_path):
    pool = ComparisonFolder(tmp_path)
    pool.runs.mkdir()
    runs = [comparison.due(each, runner.grid_of(each), {})[0] for each in (AUTO, replace(AUTO, steps=3))]
    for run in runs:
        pool.keep(fake(run, 0.5))
    assert set(pool.records()) == {run.id for run in runs}


# --- deaths ----------------------------------------------------------------------------------------------------------


def _claiming(tmp_path, count=2):
    home = ComparisonFolder(tmp_path / "c")
    home.create(TINY)
    return home, list(comparison.tuning_runs(TINY, runner.grid_of(TINY)))[:count]


def test_of_two_that_take_over_one_dead_claim_at_the_same_moment_one_succeeds(tmp_path, monkeypatch):
    home, (run, _) = _claiming(tmp_path)
    home.claim(run)
    _kill(home, run)
    rival, taken = ComparisonFolder(home.path), []
    read = folder._read_claim

    def slow(path, number):
        found = read(path, number)
        if not taken:
            taken.append(None)
            taken.append(rival.claim(run))  # between the first one's look and its own claim
        return found

    monkeypatch.setattr(folder, "_read_claim", slow)
    assert (home.claim(run), taken[1]) == (None, 0)
    rival.release(run)
    assert not list(home.claims.iterdir())


@pytest.mark.parametrize("then", ["released", "released and claimed", "signed"])
def test_who_follows_a_dead_claim_withdraws_if_it_is_no_longer_there(tmp_path, monkeypatch, then):
    home, (run, _) = _claiming(tmp_path)
    home.claim(run)
    old = _kill(home, run)
    rival, third, seen = ComparisonFolder(home.path), ComparisonFolder(home.path), []
    read = folder._read_claim

    def slow(path, number):
        found = read(path, number)
        if not seen:
            seen.append(path)
            if then == "signed":
                os.utime(old)
            else:
                assert rival.claim(run) == 0
                rival.release(run)
            if then == "released and claimed":
                assert third.claim(run) == 0
        return found

    monkeypatch.setattr(folder, "_read_claim", slow)
    assert home.claim(run) is None
    assert [path.name for path in home.claims.iterdir()] == ([] if then == "released" else [run.id])


def test_a_claim_that_was_taken_over_is_not_released_by_who_lost_it(tmp_path):
    home, (run, _) = _claiming(tmp_path)
    home.claim(run)
    os.utime(home.claims / run.id, (time.time() - 10_000, time.time() - 10_000))  # asleep
    rival = ComparisonFolder(home.path)
    assert rival.claim(run) == 0
    home.release(run)
    assert ComparisonFolder(home.path).claim(run) is None


def test_only_a_death_that_can_be_a_runs_own_fault_counts_against_it(tmp_path, monkeypatch):
    home, (run, other) = _claiming(tmp_path)
    home.claim(run)
    _kill(home, run)  # before it was begun
    assert home.claim(run) == 0
    home.claim(other)
    home.begin([run, other])
    _kill(home, run)
    assert home.claim(run) == 0
    home.begin([run])
    monkeypatch.setattr(folder, "_boot", lambda: "a new start")
    assert home.claim(run) is None  # another machine of the same name, alive
    for path in home.claims.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))
    assert home.claim(run) == 0  # the machine was started again, whoever has that process number now
    home.begin([run])
    _kill(home, run)
    assert home.claim(run) == 1


def test_a_stack_that_died_is_made_in_smaller_ones_and_in_the_end_alone(tmp_path):
    spec = replace(TINY, rates=("auto",), seeds=tuple(range(20)), budgets=(Budget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    due = comparison.due(spec, runner.grid_of(spec), {})
    sizes = []
    for _ in range(4):
        batch = runner._claimed(home, due, Place(), workers=1)
        sizes.append(len(batch))
        home.begin(batch)
        for run in batch:
            _kill(home, run)
    assert sizes == [40, 10, 3, 1]
    records = runner.compare(home.path).records()
    assert [record["status"] for record in records.values()] == ["done"] * 40
    assert max(record["stacked"] for record in records.values()) == 10
    assert not list(home.claims.iterdir())


def test_after_a_death_the_other_runs_come_first(tmp_path):
    home, _ = _claiming(tmp_path)
    due = comparison.due(TINY, runner.grid_of(TINY), {})
    first = runner._claimed(home, due, Place(stack=False), workers=1)
    home.begin(first)
    _kill(home, first[0])
    second = runner._claimed(home, due, Place(stack=False), workers=1)
    assert first == due[:1]
    assert second == due[1:2]
    assert runner._claimed(home, due[:2], Place(stack=False), workers=1) == first


def test_ray_keeps_its_claims_alive_and_gives_them_back(tmp_path, monkeypatch):
    home = ComparisonFolder(tmp_path / "c")
    home.create(AUTO)
    ages, rounds = [], 12

    def wait(references, timeout):
        time.sleep(0.1)
        ages.append(max(time.time() - path.stat().st_mtime for path in home.claims.iterdir()))
        if len(ages) == 2 * rounds:
            raise KeyboardInterrupt
        return (references, []) if len(ages) == rounds else ([], references)

    ray = SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda **needs: lambda make: SimpleNamespace(remote=lambda runs, place: f"of {runs[0].id}"),
        wait=wait,
        get=lambda reference: [],
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(folder, "BEAT", 0.2)
    with pytest.raises(KeyboardInterrupt):
        runner.compare(home.path, engine="ray")
    assert max(ages) < 0.6
    assert not list(home.claims.iterdir())


# --- held against the run --------------------------------------------------------------------------------------------


def _cheaper(record, **change):
    """Charges that were edited, with the epsilon that they cost."""
    record["charged"][0].update(change)
    asked = {Question.from_json(row): row["count"] for row in record["charged"]}
    record["epsilon"] = accounting.epsilon(asked, record["run"]["delta"])
    record["asked"] = sum(asked.values())


CONTRADICTIONS = {
    "fewer questions": (lambda record: _cheaper(record, count=1), "lists other questions than 6 steps"),
    "a smaller rate": (lambda record: _cheaper(record, rate=0.0497), "lists other questions than 6 steps"),
    "more noise in the charges": (
        lambda record: _cheaper(record, multiplier=1.001 * record["noise_multiplier"]),
        "lists other questions than 6 steps",
    ),
    "more noise": (lambda record: record.update(noise_multiplier=99.0), "lists other questions than 6 steps"),
    "more noise throughout": (
        lambda record: (record.update(noise_multiplier=5.0), _cheaper(record, multiplier=5.0)),
        "less than noise that was fitted to its budget",
    ),
    "another delta": (lambda record: record.update(delta=1e-12), "states delta 1e-12"),
    "another budget": (lambda record: record.update(budget=1.0), "states budget 1.0"),
    "another epsilon of secret noise": (
        lambda record: record.update(epsilon_if_noise_were_secret=0.1),
        "states epsilon if noise were secret 0.1",
    ),
    "fewer steps": (lambda record: record.update(steps=3), "finished after 3 steps"),
    "an early stop": (
        lambda record: (_cheaper(record, count=3), record.update(steps=3, stopped="budget")),
        "would have paid for step 4",
    ),
    "a filter": (lambda record: record.update(schedule="filtered", filter_epsilon=3.0), "cannot be priced"),
}


def _forged(compared, tmp_path, chosen, forge):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in copy.records().values() if each["status"] == "done" and chosen(each))
    forge(record)
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    return verify_comparison(copy.path).wrong[record["id"]]


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_record_that_contradicts_its_run_is_found(compared, tmp_path, contradiction):
    forge, told = CONTRADICTIONS[contradiction]
    assert told in _forged(compared, tmp_path, lambda each: each["run"]["method"] == "dp-sgd", forge)


def _with_one_charge(record):
    record["charged"] = [{**record["charged"][0], "count": 1}]
    record["asked"] = 1


def _with_a_smaller_filter(record):
    _with_one_charge(record)
    record["epsilon"] = record["filter_epsilon"] = 0.9 * record["filter_epsilon"]


FILTERED = {
    "a smaller filter": (_with_a_smaller_filter, "states a filter of epsilon"),
    "other expectations": (
        lambda record: record["filter_expects"][0].update(rate=0.04),
        "expects other questions than dpsgd-br asks",
    ),
    "no filter": (lambda record: _cheaper(record) or record.update(schedule="fixed"), "are filtered"),
    "more steps": (lambda record: record.update(steps=99), "after 99 steps"),
    "fewer questions": (_with_one_charge, "lists 1 questions"),
}


@pytest.mark.parametrize("contradiction", FILTERED)
def test_a_filtered_record_that_contradicts_its_run_is_found(compared, tmp_path, contradiction):
    forge, told = FILTERED[contradiction]
    assert told in _forged(compared, tmp_path, lambda each: each.get("schedule") == "filtered", forge)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Noise that is given, a paper's, or of a known seed; in parts; and some that stop when their budget is spent."""
    folder = tmp_path_factory.mktemp("odd")
    field = (
        Contender("dp-sgd", "dp-sgd"),
        Contender("fo", "fo-dp-sgd", {"groups": "layers"}),
        Contender("is", "dp-is"),
    )
    early = {"sigma_t": 0.8, "sigma_v": 0.5, "accounting": "every-trial"}
    made = {
        "noise": replace(AUTO, contenders=field, budgets=(Budget("noise_multiplier", 1.3), Budget("paper_sigma", 1.3))),
        "seeded": replace(AUTO, contenders=field, reproducible=True),
        "parts": replace(AUTO, contenders=field, physical_batch=16),
        "early": replace(
            AUTO,
            contenders=(Contender("dpsur", "dpsur", early), Contender("br", "dpsgd-br", {**early, "progress": "none"})),
            budgets=(Budget("epsilon", 14.0),),
            steps=60,
        ),
    }
    return {name: runner.compare(folder / name, each) for name, each in made.items()}


@pytest.mark.parametrize("name", ["noise", "seeded", "parts", "early"])
def test_real_records_raise_no_alarm(odd, name):
    records = odd[name].records().values()
    assert all(record["status"] == "done" for record in records)
    assert name != "early" or all(record["stopped"] == "budget" for record in records)
    verdict = verify_comparison(odd[name].path)
    assert (verdict.verified, verdict.wrong) == (len(records), {})


@pytest.mark.parametrize("kind", ["noise_multiplier", "paper_sigma"])
def test_noise_other_than_the_run_was_given_is_found(odd, tmp_path, kind):
    def forge(record):
        record["noise_multiplier"] *= 1.1
        for row in record["charged"]:
            row["multiplier"] *= 1.1
        _cheaper(record)

    told = _forged(odd["noise"], tmp_path, lambda each: each["run"]["budget"]["kind"] == kind, forge)
    assert "states noise multiplier" in told


def test_a_smaller_epsilon_of_noise_from_a_known_seed_is_found(odd, tmp_path):
    told = _forged(odd["seeded"], tmp_path, bool, lambda record: record.update(epsilon_if_noise_were_secret=0.5))
    assert "states epsilon if noise were secret 0.5" in told


EARLY = {
    "fewer steps": (lambda record: record.update(steps=2), "lists other questions than 2 of the 60 steps"),
    "earlier": (
        lambda record: ([row.update(count=2) for row in record["charged"]], _cheaper(record), record.update(steps=2)),
        "would have paid for step 3",
    ),
}


@pytest.mark.parametrize("contradiction", EARLY)
def test_a_stop_that_the_budget_does_not_explain_is_found(odd, tmp_path, contradiction):
    forge, told = EARLY[contradiction]
    assert told in _forged(odd["early"], tmp_path, bool, forge)
