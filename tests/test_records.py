"""Does what is written about a run have one schema? Round trips of what version 0.1.0 wrote, and refusals by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from comparisons import AUTO, fake
from vestige.compare import run_grid
from vestige.run_records import FailedRun, RunResult, read_record
from vestige.training.verify import verify

WRITTEN = Path(__file__).parent / "fixtures" / "written-by-0.1.0"
RECORDS = sorted((WRITTEN / "comparison" / "runs").glob("*.json"))
RUN = run_grid.due(AUTO, run_grid.grid_of(AUTO), {})[0]
MISSING = object()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_comparison_survives_a_round_trip(path):
    content = json.loads(path.read_text())
    assert read_record(content).to_json() == content


@pytest.mark.parametrize("name", ["run-finished", "run-filtered"])
def test_the_result_of_a_run_survives_a_round_trip(name):
    content = json.loads((WRITTEN / name / "result.json").read_text())
    result = RunResult.from_json(content)
    assert result.nonprivate_seconds == content.pop("seconds")
    assert result.to_json() == content
    with pytest.warns(FutureWarning, match="seconds is called nonprivate_seconds now"):
        assert result.seconds == result.nonprivate_seconds
    assert result.statement.epsilon == pytest.approx(verify(WRITTEN / name).guarantee.epsilon, rel=1e-8)
    assert (result.selection is not None) == (name == "run-filtered")


def test_what_earlier_versions_left_out_is_added_and_nothing_else_changes():
    """They wrote neither the groups nor the schedule of a stacked run, and no empty reasons of one made alone."""
    content = fake(RUN, 0.5).to_json()
    old = {key: part for key, part in content.items() if key not in ("reasons", "schedule", "nonprivate_outputs")}
    record = read_record(old)
    assert record.statement.groups is None
    assert record.to_json() == content == {**old, "reasons": [], "schedule": "fixed", "nonprivate_outputs": False}


def test_a_failure_survives_a_round_trip():
    record = FailedRun(RUN, "broke")
    assert read_record(record.to_json()) == record
    assert record.to_json() == {"version": 2, "id": RUN.id, "run": RUN.to_json(), "status": "failed", "error": "broke"}


@pytest.mark.parametrize(
    ("key", "part", "words"),
    [
        ("colour", "red", "unknown field 'colour'"),
        ("colour", {"red": 1}, "unknown field 'colour'"),
        ("statement", {"epsilon": 1.0}, "unknown field 'statement'"),
        (
            "nonprivate_validation_accuracy",
            0.5,
            "a field 'nonprivate_validation_accuracy', which no run of stage auto has",
        ),
        ("accuracy", MISSING, "lacks the field 'accuracy'"),
        ("curve", MISSING, "lacks the field 'curve'"),
        ("delta", MISSING, "lacks the field 'delta'"),
        ("sampling", MISSING, "lacks the field 'sampling'"),
        ("stacked", MISSING, "lacks the field 'stacked'"),
        ("charged", MISSING, "lacks the field 'charged'"),
        ("accuracy", "0.5", "accuracy is '0.5', not a number"),
        ("epsilon", "3", "epsilon is '3', not a number"),
        ("asked", 2.5, "asked is 2.5, not a whole number"),
        ("steps", True, "steps is True, not a whole number"),
        ("noise", None, "noise is None, not text"),
        ("curve", [[1, "half"]], "not a number"),
        ("charged", {}, "charged is {}, not a list"),
        ("pictures", [], "pictures is [], not an object"),
        ("trials", 3, "selection lacks the field 'accepted'"),
        ("version", 1, "format 1, this version reads 2"),
        ("status", "ended", "status is 'ended', neither done nor failed"),
        ("id", "0" * 20, "not the hash of the run"),
    ],
)
def test_a_record_with_a_part_that_is_unknown_missing_or_of_another_type_is_refused_by_name(key, part, words):
    content = fake(RUN, 0.5).to_json()
    content = {**content, key: part} if part is not MISSING else {k: v for k, v in content.items() if k != key}
    with pytest.raises(ValueError) as refused:
        read_record(content)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["method", "steps", "stopped", "epsilon", "asked"])
def test_a_result_without_one_of_its_parts_is_refused_by_name(key):
    content = json.loads((WRITTEN / "run-finished" / "result.json").read_text())
    del content[key]
    with pytest.raises(ValueError, match=f"lacks the field '{key}'"):
        RunResult.from_json(content)


def test_diagnostics_are_numbers_and_lists_of_them():
    shown = {"confidence": 0.5, "weights": [0.5, None], "exponents": [[1, 2.0]], "undefined": None}
    record = read_record({**fake(RUN, 0.5).to_json(), **shown})
    assert record.diagnostics == shown
    assert {key: record.to_json()[key] for key in shown} == shown


def test_records_are_read_without_torch():
    code = "import sys, vestige.run_records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_not_finite_is_written_as_null():
    record = read_record(fake(RUN, 0.5).to_json())
    object.__setattr__(record.statement, "lr", float("inf"))
    assert record.to_json()["lr"] is None
    json.dumps(record.to_json(), allow_nan=False)
