"""Does a run give the same record alone and in a stack, and does a failure harm nothing else?"""

import weakref
from dataclasses import replace

import pytest

from comparisons import TINY, files
from vestige import accounting, tasks
from vestige.compare import execute_run, run_grid, runner
from vestige.compare.arguments import contenders
from vestige.compare.execute_run import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender
from vestige.layout import Layout
from vestige.methods.registry import METHODS, make_method
from vestige.run_records import FailedRun, PrivacyTarget
from vestige.training import planning


@pytest.mark.slow
def test_stacked_and_alone_agree_in_reproducible_mode(tmp_path):
    plain = replace(
        TINY, reproducible=True, rates=("auto",), budgets=(PrivacyTarget("paper_sigma", 1.1),), evaluations=2
    )
    stacked = files(runner.compare(tmp_path / "a", plain, machine=Machine(stack=True)))
    alone = files(runner.compare(tmp_path / "b", plain, machine=Machine(stack=False)))
    assert stacked.keys() == alone.keys()
    for key, record in stacked.items():
        other = alone[key]
        assert record["stacked"] == 6
        assert other["stacked"] == 1
        assert record["accuracy"] == pytest.approx(other["accuracy"], abs=0.01)
        assert [[*point[:2], point[3]] for point in record["curve"]] == [
            pytest.approx([*point[:2], point[3]], abs=0.01) for point in other["curve"]
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


@pytest.mark.slow
def test_any_contender_may_clip_by_layers(tmp_path):
    """DP-SGD by layers is SMA-DP-SGD without its memory; flat clipping is another method."""
    words = ("dp-sgd", "dp-sgd:groups=layers", "sma-dp-sgd:beta=1")
    field = tuple(Contender(label, name, options) for label, name, options in contenders(words))
    spec = replace(TINY, contenders=field, reproducible=True, rates=("auto",), budgets=TINY.budgets[:1], steps=20)
    for stack in (True, False):
        home = runner.compare(tmp_path / str(stack), spec, machine=Machine(stack=stack))
        found = {(record["run"]["label"], record["run"]["seed"]): record for record in files(home).values()}
        for seed in spec.seeds:
            flat, layers, spectral = (found[label, seed] for label in words)
            assert (flat["groups"], layers["groups"], spectral["groups"]) == (1, 3, 3)
            assert layers["accuracy"] == spectral["accuracy"]
            assert layers["lr"] == spectral["lr"]
            assert layers["charged"] == flat["charged"]
        assert any(found[words[0], seed]["accuracy"] != found[words[1], seed]["accuracy"] for seed in spec.seeds)


@pytest.mark.slow
def test_a_stack_of_all_methods_says_of_each_what_it_says_alone(tmp_path):
    named = [name for name in METHODS if execute_run._can_stack("digits-mlp", None, name, "{}", 0.1)]
    alone = {"dp-is", "dpsur", "dpsgd-br", "dp-micro-adam", "dp-muon", "geoclip"}
    assert set(named) == set(METHODS) - alone
    everything = replace(
        TINY,
        reproducible=True,
        rates=("auto",),
        contenders=tuple(Contender(name, name) for name in named),
        budgets=(PrivacyTarget("noise_multiplier", 1.1),),
        seeds=(0,),
        evaluations=1,
    )
    stacked = files(runner.compare(tmp_path / "a", everything, machine=Machine(stack=True)))
    alone = files(runner.compare(tmp_path / "b", everything, machine=Machine(stack=False)))
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
@pytest.mark.everyday("dp-sgd", "dp-sat", "sma-dp-sgd")
def test_methods_that_share_a_search_get_the_noise_they_would_get_alone(name):
    loaded = tasks.load("digits-mlp", None, 0)
    request = planning.Request(sample_rate=0.05, steps=40, delta=1e-5, epsilon=3.0, lr=1.0)
    method = planning.settled(make_method(name), request)
    layout = Layout.of(loaded.model, method.grouping)
    alone = planning.plan(loaded.model, layout, method, 1000, request)
    assert execute_run._calibrated(execute_run._asking(method), 3.0, 0.05, 40, 1e-5) == alone.noise_multiplier


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(
    ("steps", "asked", "evaluations"),
    [(6, 4, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((6, 6, 6), (5, 100, 5), (6, 0, 0)))],
)
@pytest.mark.everyday("6-4-3-False")
def test_the_test_set_is_never_looked_at_more_often_than_was_asked(tmp_path, stack, steps, asked, evaluations):
    spec = replace(TINY, rates=("auto",), steps=steps, seeds=(0,), evaluations=asked)
    records = runner.compare(tmp_path / "c", spec, machine=Machine(stack=stack)).records().values()
    assert {len(record.curve) for record in records} == {evaluations}
    for record in records:
        assert all(0 < loss < 10 for *_, loss in record.curve)
        highest = max((accuracy for _, accuracy, *_ in record.curve), default=None)
        assert record.best == (None if highest is None else max(highest, record.accuracy))


def test_what_a_failed_stack_held_is_given_back_before_smaller_ones_are_made(monkeypatch):
    spec = replace(TINY, rates=("auto",))
    batch = list(run_grid.final_runs(spec, run_grid.grid_of(spec), {}))[:8]
    held = []

    class Held:
        pass

    def stacked(batch, machine):
        mine = Held()
        held.append(weakref.ref(mine))
        alive.append(sum(each() is not None for each in held))
        raise MemoryError
        yield mine

    alive: list[int] = []
    monkeypatch.setattr(execute_run, "_stacked", stacked)
    monkeypatch.setattr(execute_run, "_alone_or_failed", lambda run, machine: FailedRun(run, ""))
    assert len(list(execute_run.perform(batch, Machine()))) == 8
    assert max(alive) == 1


@pytest.mark.slow
def test_what_breaks_a_stack_is_recorded_with_the_run_it_belongs_to(tmp_path, monkeypatch):
    broken = replace(
        TINY, rates=("auto",), contenders=(TINY.contenders[0], Contender("odd", "fo-dp-sgd", {"beta": "x"}))
    )
    records = files(runner.compare(tmp_path / "c", broken)).values()
    assert {record["status"] for record in records if record["run"]["label"] == "dp-sgd"} == {"done"}
    assert all("TypeError" in record["error"] for record in records if record["run"]["label"] == "odd")

    banded = (TINY.contenders[0], Contender("dp-bandmf", "dp-bandmf", {"bands": 4}))
    fixed = tuple(PrivacyTarget("noise_multiplier", z) for z in (1.0, 2.0))  # nothing is calibrated, and refused so
    rare = replace(TINY, rates=("auto",), contenders=banded, budgets=fixed, sample_rate=0.3, seeds=(0,))
    records = files(runner.compare(tmp_path / "b", rare)).values()
    assert {(r["run"]["label"], r["status"]) for r in records} == {("dp-sgd", "done"), ("dp-bandmf", "failed")}
    assert {r["stacked"] for r in records if r["status"] == "done"} == {2}, "what cannot be served breaks no stack"

    def breaks(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(execute_run.stacked, "Stack", breaks)
    whole = files(runner.compare(tmp_path / "d", replace(TINY, rates=("auto",)))).values()
    assert {(record["status"], record["stacked"]) for record in whole} == {("done", 1)}
    monkeypatch.setattr(execute_run, "start", breaks)
    failed = runner.compare(tmp_path / "e", replace(TINY, rates=("auto",))).records().values()
    assert all("does not fit in memory" in record.error for record in failed)


def test_memory_that_runs_out_while_a_stack_is_prepared_makes_it_smaller(monkeypatch):
    spec = replace(TINY, rates=("auto",))
    batch = list(run_grid.final_runs(spec, run_grid.grid_of(spec), {}))[:4]

    def prepared(run, machine):
        raise MemoryError

    monkeypatch.setattr(execute_run, "_prepared", prepared)
    monkeypatch.setattr(execute_run, "_alone_or_failed", lambda run, machine: FailedRun(run, "made alone"))
    assert [record.error for record in execute_run.perform(batch, Machine())] == ["made alone"] * 4


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
    records = files(runner.compare(tmp_path / "c", mixed)).values()
    errors = {record["run"]["label"]: record["error"] for record in records if record["status"] == "failed"}
    assert "beta=7" in errors["broken"]
    assert "colour" in errors["odd"]
    assert all(record["status"] == "done" for record in records if record["run"]["label"] == "dp-sgd")
    home = ComparisonFolder(tmp_path / "c")
    assert len(home.remove_failures()) == 12
    assert len(home.records()) == 6


def test_a_budget_without_a_valid_accountant_is_one_line(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError("epsilon=3.0 cannot be reached: no theorem prices this")

    monkeypatch.setattr(accounting, "calibrate", refuse)
    execute_run._calibrated.cache_clear()
    records = runner.compare(tmp_path / "c", replace(TINY, rates=("auto",))).records().values()
    assert {record.error for record in records} == {"epsilon=3.0 cannot be reached: no theorem prices this"}


@pytest.mark.slow
def test_a_task_too_big_for_memory_says_so_and_a_stack_is_halved(tmp_path, monkeypatch):
    sizes = []
    real = execute_run.stacked.Stack

    def small(members, *arguments, **options):
        sizes.append(len(members))
        if len(members) > 2:
            raise MemoryError
        return real(members, *arguments, **options)

    monkeypatch.setattr(execute_run.stacked, "Stack", small)
    records = files(runner.compare(tmp_path / "c", replace(TINY, rates=("auto",))))
    assert len(records) == 12
    assert max(sizes) == 12
    assert all(record["status"] == "done" for record in records.values())

    def never(*arguments, **options):
        raise MemoryError("cannot allocate 10 GiB")

    monkeypatch.setattr(execute_run, "start", never)
    failed = runner.compare(tmp_path / "d", replace(TINY, rates=("auto",)), machine=Machine(stack=False)).records()
    assert all("does not fit in memory" in record.error for record in failed.values())


def test_a_stack_that_ends_half_way_tells_nothing_twice(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",))
    batch = list(run_grid.final_runs(spec, run_grid.grid_of(spec), {}))[:4]

    def stacked(batch, machine):
        yield FailedRun(batch[0], f"in a stack of {len(batch)}")
        if len(batch) > 2:
            raise MemoryError
        yield from (FailedRun(run, f"in a stack of {len(batch)}") for run in batch[1:])

    monkeypatch.setattr(execute_run, "_stacked", stacked)
    monkeypatch.setattr(execute_run, "_alone_or_failed", lambda run, machine: FailedRun(run, "alone"))
    records = list(execute_run.perform(batch, Machine()))
    assert sorted(record.id for record in records) == sorted(run.id for run in batch)
