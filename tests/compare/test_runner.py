"""Are all runs of a comparison made, once each, whatever is killed meanwhile?"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import vestige
from comparisons import AUTO, TINY, fake
from vestige.compare import aggregate_results, run_grid, runner
from vestige.compare.execute_run import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender
from vestige.run_records import PrivacyTarget, completed, failed


def test_a_whole_comparison_and_its_continuation(tmp_path):
    seen = []
    home = runner.compare(tmp_path / "c", TINY, on_progress=seen.append)
    records = home.records()
    assert len(records) == run_grid.total(TINY, run_grid.grid_of(TINY)) == 12 * 3 + 2 * 2 * 2 * 3
    assert len(completed(records.values())) == len(records)
    assert seen[-1].done == seen[-1].total
    assert "at epsilon" in seen[-1].best
    for record in records.values():
        budget = record.run.budget.value
        assert 0.99 * budget < record.statement.epsilon <= budget
        assert record.charged[0]["count"] == record.statement.asked == 6
    before = {path: path.stat().st_mtime_ns for path in home.runs.iterdir()}
    runner.compare(tmp_path / "c")
    assert before == {path: path.stat().st_mtime_ns for path in home.runs.iterdir()}
    lost = next(key for key, record in records.items() if not record.run.holdout)  # nothing is chosen by a final run
    (home.runs / f"{lost}.json").unlink()
    runner.compare(tmp_path / "c", TINY)
    assert set(home.runs.iterdir()) == set(before)
    assert sum(path.stat().st_mtime_ns != stamp for path, stamp in before.items()) == 1
    priced = aggregate_results.tuning_prices(TINY, run_grid.grid_of(TINY), home.records())
    assert all(row["epsilon_with_tuning"] > row["epsilon_one_run"] for row in priced)


def test_the_same_comparison_reads_its_data_where_this_process_has_them(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",), seeds=(0,))
    runner.compare(tmp_path / "c", spec)
    met = []
    monkeypatch.setattr(runner, "examples", lambda task, machine, subset: met.append(machine.data))
    here = replace(spec, problems=(replace(spec.problems[0], data="here"),))
    runner.compare(tmp_path / "c", here)
    runner.compare(tmp_path / "c", here, machine=Machine(data={"digits-mlp": "there"}))
    runner.compare(tmp_path / "c")
    assert met == [{"digits-mlp": "here"}, {"digits-mlp": "there"}, {}]


def test_other_data_are_not_mixed_in(tmp_path, monkeypatch):
    spec = replace(TINY, rates=("auto",), seeds=(0,))
    home = runner.compare(tmp_path / "c", spec)
    next(home.runs.iterdir()).unlink()
    monkeypatch.setattr(runner, "examples", lambda task, machine, subset: 77)
    with pytest.raises(ValueError, match=r"77 training examples of digits-mlp.*on record.*1437"):
        runner.compare(tmp_path / "c")
    assert len(list(home.runs.iterdir())) == 3


def test_each_worker_takes_a_stack_of_as_few_methods_as_can_be(tmp_path):
    due = run_grid.due(replace(TINY, rates=("auto",)), run_grid.grid_of(TINY), {})
    assert [run.method for run in due[:6]] == ["dp-sgd"] * 3 + ["fo-dp-sgd"] * 3, "by budget, as they are planned"
    first = runner.next_batch(due, Machine(), 2)
    second = runner.next_batch([run for run in due if run not in first], Machine(), 1)
    assert [{run.method for run in batch} for batch in (first, second)] == [{"dp-sgd"}, {"fo-dp-sgd"}]
    assert {run.id for run in (*first, *second)} == {run.id for run in due}


# --- workers that die -------------------------------------------------------------------------------------------------


def dispatch(home, machine, count, submit, after=None):
    spec = home.specification()
    due = lambda known: run_grid.due(spec, run_grid.grid_of(spec), known)
    runner._dispatch(home, machine, runner.Slots(count, count, submit), due, after)


def dispatched(home, kills, count=2, stack=False):
    """Fill a folder by slots in this process, whose worker dies with the runs that `kills` says; batches in order."""
    made = []

    def submit(batch):
        made.append([run.id for run in batch])
        future = Future()
        if kills(batch):
            future.set_exception(BrokenProcessPool("died"))
        else:
            future.set_result([fake(run, 0.5) for run in batch])
        return future

    dispatch(home, Machine(stack=stack), count, submit)
    return made


@pytest.fixture
def home(tmp_path):
    found = ComparisonFolder(tmp_path / "c")
    found.create(replace(TINY, rates=("auto",), seeds=tuple(range(4)), budgets=(PrivacyTarget("epsilon", 3.0),)))
    return found


def test_a_run_whose_process_keeps_dying_is_recorded_as_failed_and_takes_no_other_with_it(home):
    deadly = run_grid.due(home.specification(), run_grid.grid_of(TINY), {})[2].id
    made = dispatched(home, lambda batch: deadly in [run.id for run in batch])
    records = home.records()
    assert [record.id for record in failed(records.values())] == [deadly]
    assert (
        "died 3 times while making it alone (killed, or out of memory); --resume FOLDER --retry"
        in records[deadly].error
    )
    assert len(completed(records.values())) == 7
    assert made.count([deadly]) == runner.ATTEMPTS
    assert made[-2:] == [[deadly]] * 2, "after the others"


def test_of_runs_that_were_lost_together_each_is_made_again_with_nothing_else_under_way(home):
    first, second, third, *_ = run_grid.due(home.specification(), run_grid.grid_of(TINY), {})
    deaths = runner._Deaths()
    assert not list(deaths.note([[first], [second]]))
    assert not deaths.alone, "either may have been the cause"
    assert runner.next_batch([first, second, third], Machine(stack=False), 1, deaths) == [third]
    assert not list(deaths.note([[first]]))
    assert deaths.alone == {first.id: 1}


def test_what_may_have_ended_a_worker_is_made_with_nothing_else_under_way(home, monkeypatch):
    monkeypatch.setattr(runner, "SHOWN_EVERY", 0.01)
    under_way, at_once = [], []

    def submit(batch):
        future = Future()
        under_way.append((future, batch))
        at_once.append(len(under_way))
        if len(at_once) == 2:  # the pool breaks, and both are lost
            for each, _ in under_way:
                each.set_exception(BrokenProcessPool("died"))
            under_way.clear()
        return future

    def after():
        for future, batch in under_way:
            future.set_result([fake(run, 0.5) for run in batch])
        under_way.clear()

    dispatch(home, Machine(stack=False), 2, submit, after)
    assert at_once == [1, 2, 1, 2, 1, 2, 1, 2, 1, 1]
    assert len(completed(home.records().values())) == 8


def test_a_stack_that_died_is_made_in_smaller_ones_and_in_the_end_alone(home):
    sizes = []

    def kills(batch):
        sizes.append(len(batch))
        return len(batch) > 1

    dispatched(home, kills, count=1, stack=True)
    assert sizes[:2] == [8, 2]
    assert sizes[-1] == 1
    assert len(completed(home.records().values())) == 8


def test_workers_that_always_die_are_given_up(home, monkeypatch):
    monkeypatch.setattr(runner, "ATTEMPTS", 1000)
    with pytest.raises(OSError, match="keep dying; what they finished is on record"):
        dispatched(home, lambda batch: True)


def test_a_batch_that_cannot_be_run_at_all_is_recorded_as_failed(home):
    def submit(batch):
        future = Future()
        future.set_exception(RuntimeError("no such node"))
        return future

    dispatch(home, Machine(stack=False), 1, submit)
    assert {record.error for record in home.records().values()} == {"RuntimeError: no such node"}


def test_one_process_fills_a_folder(home):
    with home.locked(), pytest.raises(ValueError, match=r"is being filled by another process.*--workers.*--engine ray"):
        runner.compare(home.path)


def test_an_unknown_method_or_engine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'nosuch' is unknown"):
        runner.compare(tmp_path / "a", replace(TINY, contenders=(Contender("x", "nosuch"),)))
    with pytest.raises(ValueError, match="engine='moon'"):
        runner.compare(tmp_path / "b", TINY, engine="moon")
    with pytest.raises(ValueError, match="workers=0"):
        runner.compare(tmp_path / "c", TINY, workers=0)


SCRIPT = """
import sys
from vestige.compare import runner
from vestige.compare.execute_run import Machine
if __name__ == "__main__":
    runner.compare(sys.argv[1], machine=Machine(stack=False), workers=int(sys.argv[2]))
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_killed_in_mid_run_and_started_again_nothing_is_lost_or_repeated(tmp_path, workers):
    spec = replace(TINY, rates=("auto",), seeds=tuple(range(8)), budgets=(PrivacyTarget("noise_multiplier", 1.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    source = str(Path(vestige.__file__).parents[1])
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


def test_ray_gets_the_batches_and_only_this_process_writes(tmp_path, monkeypatch):
    def made(batch, machine):
        future = Future()
        future.set_result([fake(run, 0.5) for run in batch])
        return SimpleNamespace(future=lambda: future)

    needs = []
    remote = lambda **given: lambda make: (needs.append(given), SimpleNamespace(remote=made))[1]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, remote=remote))
    records = runner.compare(tmp_path / "c", AUTO, engine="ray", workers=2).records()
    assert len(completed(records.values())) == len(records) == 2
    assert needs == [{"num_cpus": 1, "num_gpus": 0, "max_retries": runner.ATTEMPTS}]


@pytest.mark.slow
def test_a_pool_of_workers_makes_all_runs_although_one_is_killed(tmp_path):
    spec = replace(TINY, rates=("auto",), steps=400, seeds=tuple(range(3)))
    killed = []

    def watch(status):
        if not killed and multiprocessing.active_children():
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    home = runner.compare(tmp_path / "c", spec, machine=Machine(stack=False), workers=2, on_progress=watch)
    assert killed
    assert not killed[0].is_alive()
    assert len(completed(home.records().values())) == len(home.records()) == 12
    assert not multiprocessing.active_children()


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

        machine = Machine(stack=False)
        home = runner.compare(tmp_path / "c", spec, engine="ray", workers=2, machine=machine, on_progress=watch)
        assert killed
        records = home.records()
        assert len(completed(records.values())) == len(records) == 24
    finally:
        ray.shutdown()
        cluster.shutdown()
