"""What does a comparison's folder survive? Torn, foreign and damaged records, and other versions."""

import json
import shutil
from dataclasses import replace

import pytest

from commands import finished
from comparisons import AUTO, TINY, fake
from vestige.compare import run_grid, runner
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender, Problem
from vestige.compare.verify import verify_comparison
from vestige.run_records import PrivacyTarget


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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two final runs of two steps."""
    return runner.compare(tmp_path_factory.mktemp("small") / "c", AUTO)


UNMADE = {
    "nothing but a name": (
        lambda record: [record.pop(key) for key in list(record) if key not in ("version", "id")],
        "run",
    ),
    "no accuracy": (lambda record: record.update(accuracy=None), "lacks the field 'accuracy'"),
    "no curve": (lambda record: record.pop("curve"), "lacks the field 'curve'"),
    "no sampler": (lambda record: record.pop("sampling"), "lacks the field 'sampling'"),
    "no batch": (lambda record: record.pop("expected_batch"), "lacks the field 'expected_batch'"),
    "no learning rate": (lambda record: record.pop("lr"), "lacks the field 'lr'"),
    "half a run": (lambda record: record["run"].pop("steps"), "lacks the field 'steps'"),
    "no run": (lambda record: record.update(run=None), "its run is None"),
    "the run of another": (lambda record: record["run"].update(seed=77), "not the hash"),
    "another name": (lambda record: record.update(id="0" * 20), "not the hash"),
    "another end": (lambda record: record.update(status="superseded"), "neither done nor failed"),
    "a failure without a line": (
        lambda record: [
            record.update(status="failed"),
            *(record.pop(key) for key in list(record) if key not in ("version", "id", "run", "status")),
        ],
        "lacks the field 'error'",
    ),
    "a failure with a result": (
        lambda record: record.update(status="failed", error="broke"),
        "has an unknown field 'accuracy'",
    ),
    "no question": (lambda record: record.update(charged=[{"count": 2}]), "unknown kind of question"),
    "half a question": (lambda record: record["charged"][0].pop("rate"), "'rate' is missing"),
    "a question never asked": (lambda record: record["charged"][0].update(count=0), "count=0"),
}


def damaged(small, tmp_path, damage):
    """A copy of a comparison with a record that was changed, its file, and what is told of it."""
    copy = ComparisonFolder(shutil.copytree(small.path, tmp_path / "c"))
    change, told = UNMADE[damage]
    victim = min(copy.runs.iterdir())
    record = json.loads(victim.read_text())
    change(record)
    victim.write_text(json.dumps(record))
    return copy, victim, told


@pytest.mark.parametrize("damage", UNMADE)
def test_a_record_that_no_table_can_be_made_of_is_left_out(small, tmp_path, damage):
    copy, victim, told = damaged(small, tmp_path, damage)
    assert victim.stem not in copy.records()
    assert told in copy.unreadable[victim.name]
    assert told in verify_comparison(copy.path).wrong[victim.name]


@pytest.mark.parametrize("damage", ["no run", "the run of another", "half a question"])
def test_and_it_is_made_again(small, tmp_path, damage):
    copy, _, _ = damaged(small, tmp_path, damage)
    again = runner.compare(copy.path)
    assert (len(again.records()), again.unreadable) == (2, {})


@pytest.mark.slow
def test_a_report_leaves_out_what_it_cannot_read_and_refuses_a_preset_that_is_none(small, tmp_path):
    copy = ComparisonFolder(shutil.copytree(small.path, tmp_path / "c"))
    victim = min(copy.runs.iterdir())
    victim.write_text(json.dumps({"version": 2, "id": victim.stem, "status": "done"}))
    assert finished("report", str(copy.path))[0] == 0
    assert victim.name in (copy.path / "report.html").read_text()
    (copy.path / "preset.json").write_text("{}")
    code, _, errors = finished("report", str(copy.path))
    assert (code, errors.count("\n")) == (2, 1)
    assert "preset.json names no preset" in errors


STRANGERS = {
    "longer": {"steps": 3},
    "of another label": {"contenders": (Contender("stranger", "dp-sgd"),)},
    "with other options": {"contenders": (Contender("fo", "fo-dp-sgd", {"beta": 0.5}),)},
    "on another seed": {"seeds": (5,)},
    "at another budget": {"budgets": (PrivacyTarget("epsilon", 4.0),)},
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
    run = run_grid.due(other, run_grid.grid_of(other), {})[0]
    copy.write(fake(run, 0.5))
    assert len(copy.records()) == 2
    assert "no run of this comparison" in copy.unreadable[f"{run.id}.json"]
    assert "foreign" in verify_comparison(copy.path).wrong[f"{run.id}.json"]


def test_runs_with_their_curve_and_at_rates_that_lost_are_no_strangers(tmp_path):
    spec = replace(TINY, seeds=(0,), budgets=(PrivacyTarget("epsilon", 3.0),))
    home = ComparisonFolder(tmp_path / "c")
    home.create(spec)
    grid = run_grid.grid_of(spec)
    tuning = {run.id: fake(run, run.factor) for run in run_grid.tuning_runs(spec, grid)}
    finals = [run for run in run_grid.final_runs(spec, grid, tuning) if run.stage == "tuned"]
    kept = [
        replace(finals[0], evaluations=20),
        replace(finals[1], factor=0.5),  # of a trial that won before
        *run_grid.tuning_runs(spec, grid),
    ]
    for run in kept:
        home.write(fake(run, 0.5))
    home.write(fake(replace(finals[1], factor=0.3), 0.5))
    assert set(home.records()) == {run.id for run in kept}
    assert len(home.unreadable) == 1


def test_a_folder_without_a_specification_takes_every_record(tmp_path):
    pool = ComparisonFolder(tmp_path)
    pool.runs.mkdir()
    two = [run_grid.due(each, run_grid.grid_of(each), {})[0] for each in (AUTO, replace(AUTO, steps=3))]
    for run in two:
        pool.write(fake(run, 0.5))
    assert set(pool.records()) == {run.id for run in two}
