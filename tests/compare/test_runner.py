"""Are all runs of a comparison made, once each, whatever is killed meanwhile?"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import vestige
from comparisons import TINY
from vestige.compare import runner, runs, tables
from vestige.compare.execute import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender
from vestige.records import PrivacyTarget, completed


def test_a_whole_comparison_and_its_continuation(tmp_path):
    seen = []
    home = runner.compare(tmp_path / "c", TINY, on_progress=seen.append)
    records = home.records()
    assert len(records) == runs.total(TINY, runs.grid_of(TINY)) == 12 * 3 + 2 * 2 * 2 * 3
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
    priced = tables.tuning_prices(TINY, runs.grid_of(TINY), home.records())
    assert all(row["epsilon_with_tuning"] > row["epsilon_one_run"] for row in priced)
    assert not list(home.claims.path.iterdir())


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
    home = ComparisonFolder(tmp_path / "c")
    home.create(replace(TINY, rates=("auto",)))
    due = runs.due(home.specification(), runs.grid_of(TINY), {})
    assert [run.method for run in due[:6]] == ["dp-sgd"] * 3 + ["fo-dp-sgd"] * 3, "by budget, as they are planned"
    first, second = (runner._claim_batch(home, due, Machine(), workers=2) for _ in range(2))
    assert [{run.method for run in batch} for batch in (first, second)] == [{"dp-sgd"}, {"fo-dp-sgd"}]
    assert {run.id for run in (*first, *second)} == {run.id for run in due}


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
from vestige.compare.execute import Machine
if __name__ == "__main__":
    runner.compare(sys.argv[1], machine=Machine(stack=False), workers=int(sys.argv[2]))
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
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
