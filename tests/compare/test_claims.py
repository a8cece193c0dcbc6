"""Is every run made by one process at a time, and taken over when that process dies?"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from comparisons import AUTO, TINY
from vestige.compare import claims, runner, runs
from vestige.compare.claims import ATTEMPTS
from vestige.compare.execute import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.records import PrivacyTarget, completed


def _ended():
    """The number of a process that is no more."""
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    return dead.pid


def _kill(home, run, **more):
    """Make the last claim of a run that of a process that is no more."""
    claim = max(home.claims.path.glob(f"{run.id}*"), key=lambda path: int(path.suffix[1:] or 1))
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "pid": _ended(), **more}))
    return claim


def _claiming(tmp_path, count=2):
    home = ComparisonFolder(tmp_path / "c")
    home.create(TINY)
    return home, list(runs.tuning_runs(TINY, runs.grid_of(TINY)))[:count]


def test_claims_are_exclusive_and_dead_ones_are_taken_over(tmp_path):
    home = ComparisonFolder(tmp_path / "c")
    home.create(TINY)
    run = next(runs.tuning_runs(TINY, runs.grid_of(TINY)))
    assert home.claims.claim(run) == 0
    assert ComparisonFolder(home.path).claims.claim(run) is None
    for deaths in range(1, ATTEMPTS + 1):
        home.claims.begin([run])
        _kill(home, run)
        assert home.claims.claim(run) == deaths
        assert ComparisonFolder(home.path).claims.claim(run) is None
    claim = _kill(home, run, host="elsewhere")
    assert home.claims.claim(run) is None
    os.utime(claim, (time.time() - 10_000, time.time() - 10_000))
    assert home.claims.claim(run) == ATTEMPTS
    home.claims.release(run)
    assert not list(home.claims.path.iterdir())
    (home.claims.path / run.id).write_text("")  # a claim torn at birth is judged by its age alone
    assert home.claims.claim(run) is None


def test_a_run_whose_process_keeps_dying_is_recorded_as_failed(tmp_path):
    spec = replace(TINY, rates=("auto",), seeds=(0,), budgets=(PrivacyTarget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    run = runs.due(spec, runs.grid_of(spec), {})[0]
    home.claims.claim(run)
    home.claims.begin([run])
    _kill(home, run, deaths=ATTEMPTS - 1)
    runner.compare(home.path)
    records = ComparisonFolder(home.path).records()
    assert "died 3 times while making it alone (killed, or out of memory)" in records[run.id].error
    assert "--retry" in records[run.id].error
    assert len(records) == 2
    assert not list(home.claims.path.iterdir())


def test_of_two_that_take_over_one_dead_claim_at_the_same_moment_one_succeeds(tmp_path, monkeypatch):
    home, (run, _) = _claiming(tmp_path)
    home.claims.claim(run)
    _kill(home, run)
    rival, taken = ComparisonFolder(home.path), []
    read = claims._read_claim

    def slow(path, number):
        found = read(path, number)
        if not taken:
            taken.append(None)
            taken.append(rival.claims.claim(run))  # between the first one's reading and its own claim
        return found

    monkeypatch.setattr(claims, "_read_claim", slow)
    assert (home.claims.claim(run), taken[1]) == (None, 0)
    rival.claims.release(run)
    assert not list(home.claims.path.iterdir())


@pytest.mark.parametrize("then", ["released", "released and claimed", "alive"])
def test_who_follows_a_dead_claim_withdraws_if_it_is_no_longer_there(tmp_path, monkeypatch, then):
    home, (run, _) = _claiming(tmp_path)
    home.claims.claim(run)
    old = _kill(home, run)
    rival, third, seen = ComparisonFolder(home.path), ComparisonFolder(home.path), []
    read = claims._read_claim

    def slow(path, number):
        found = read(path, number)
        if not seen:
            seen.append(path)
            if then == "alive":
                os.utime(old)
            else:
                assert rival.claims.claim(run) == 0
                rival.claims.release(run)
            if then == "released and claimed":
                assert third.claims.claim(run) == 0
        return found

    monkeypatch.setattr(claims, "_read_claim", slow)
    assert home.claims.claim(run) is None
    assert [path.name for path in home.claims.path.iterdir()] == ([] if then == "released" else [run.id])


def test_a_claim_that_was_taken_over_is_not_released_by_who_lost_it(tmp_path):
    home, (run, _) = _claiming(tmp_path)
    home.claims.claim(run)
    os.utime(home.claims.path / run.id, (time.time() - 10_000, time.time() - 10_000))  # asleep
    rival = ComparisonFolder(home.path)
    assert rival.claims.claim(run) == 0
    home.claims.release(run)
    assert ComparisonFolder(home.path).claims.claim(run) is None


def test_only_a_death_that_can_be_a_runs_own_fault_counts_against_it(tmp_path, monkeypatch):
    home, (run, other) = _claiming(tmp_path)
    home.claims.claim(run)
    _kill(home, run)  # before it was begun
    assert home.claims.claim(run) == 0
    home.claims.claim(other)
    home.claims.begin([run, other])
    _kill(home, run)
    assert home.claims.claim(run) == 0
    home.claims.begin([run])
    monkeypatch.setattr(claims, "_boot", lambda: "a new start")
    assert home.claims.claim(run) is None  # another machine of the same name, alive
    for path in home.claims.path.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))
    assert home.claims.claim(run) == 0  # the machine was started again, whoever has that process number now
    home.claims.begin([run])
    _kill(home, run)
    assert home.claims.claim(run) == 1


@pytest.mark.slow
def test_a_stack_that_died_is_made_in_smaller_ones_and_in_the_end_alone(tmp_path):
    spec = replace(TINY, rates=("auto",), seeds=tuple(range(20)), budgets=(PrivacyTarget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    due = runs.due(spec, runs.grid_of(spec), {})
    sizes = []
    for _ in range(4):
        batch = runner._claim_batch(home, due, Machine(), workers=1)
        sizes.append(len(batch))
        home.claims.begin(batch)
        for run in batch:
            _kill(home, run)
    assert sizes == [40, 10, 3, 1]
    records = runner.compare(home.path).records()
    assert len(completed(records.values())) == len(records) == 40
    assert max(record.stacked for record in records.values()) == 10
    assert not list(home.claims.path.iterdir())


def test_after_a_death_the_other_runs_come_first(tmp_path):
    home, _ = _claiming(tmp_path)
    due = runs.due(TINY, runs.grid_of(TINY), {})
    first = runner._claim_batch(home, due, Machine(stack=False), workers=1)
    home.claims.begin(first)
    _kill(home, first[0])
    second = runner._claim_batch(home, due, Machine(stack=False), workers=1)
    assert first == due[:1]
    assert second == due[1:2]
    assert runner._claim_batch(home, due[:2], Machine(stack=False), workers=1) == first


def test_ray_keeps_its_claims_alive_and_gives_them_back(tmp_path, monkeypatch):
    home = ComparisonFolder(tmp_path / "c")
    home.create(AUTO)
    ages, rounds = [], 12

    def wait(references, timeout):
        time.sleep(0.1)
        ages.append(max(time.time() - path.stat().st_mtime for path in home.claims.path.iterdir()))
        if len(ages) == 2 * rounds:
            raise KeyboardInterrupt
        return (references, []) if len(ages) == rounds else ([], references)

    ray = SimpleNamespace(
        is_initialized=lambda: True,
        remote=lambda **needs: lambda make: SimpleNamespace(remote=lambda batch, machine: f"of {batch[0].id}"),
        wait=wait,
        get=lambda reference: [],
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(claims, "HEARTBEAT", 0.2)
    with pytest.raises(KeyboardInterrupt):
        runner.compare(home.path, engine="ray")
    assert max(ages) < 0.6
    assert not list(home.claims.path.iterdir())
