"""Is a comparison that version 0.1.0 wrote still verified, reported and continued?"""

import json
import shutil
from pathlib import Path

import pytest

from commands import vestige
from comparisons import files
from vestige.compare import run_grid
from vestige.compare.folder import ComparisonFolder
from vestige.compare.summary import summarised

FIXTURE = Path(__file__).parents[1] / "fixtures" / "written-by-0.1.0" / "comparison"


@pytest.fixture
def before(tmp_path):
    return ComparisonFolder(shutil.copytree(FIXTURE, tmp_path / "c"))


def test_it_is_read_and_verified(before):
    assert len(before.records()) == len(files(before)) == 14
    assert before.unreadable == {}
    specification = before.specification()
    grid = run_grid.grid_of(specification)
    assert run_grid.total(specification, grid) == 14
    assert run_grid.due(specification, grid, before.records()) == []
    code, out, error = vestige("verify", before.path)
    assert (code, error) == (0, "")
    assert out.startswith("verified: 14 runs cost what their records state\n")


def test_it_is_reported(before):
    code, out, error = vestige("report", before.path)
    assert (code, error) == (0, "")
    page = (before.path / "report.html").read_text()
    assert "14 of 14 runs" in page
    assert all(name[:8] in page for name in files(before))
    assert "The choice of the rate is not in the tuned rows' intervals" in page
    tuned = [row for row in summarised(before)["rows"] if row["rate"] == "tuned" and row["method"] != "dp-sgd"]
    assert tuned
    assert all("; not tested: one choice of the rate" in row["sentence"] for row in tuned)


@pytest.mark.parametrize("stage", ["auto", "tuning"])
@pytest.mark.everyday("tuning")
def test_it_is_continued_by_making_the_missing_run_only(before, stage):
    lost = next(record for record in files(before).values() if record["run"]["stage"] == stage)
    path = before.runs / f"{lost['id']}.json"
    path.unlink()
    kept = {each.name: each.read_bytes() for each in before.runs.iterdir()}
    code, _, error = vestige("compare", "--resume", before.path, "--workers", 1)
    assert code == 0, error
    again = json.loads(path.read_text())
    assert again["run"] == lost["run"]
    for key in ("delta", "reasons", "asked", "steps", "lr_reason", "sampling"):
        assert again[key] == lost[key], key
    for key in ("epsilon", "noise_multiplier", "expected_batch"):  # the last digits depend on BLAS's threads
        assert again[key] == pytest.approx(lost[key], rel=1e-9), key
    assert again["lr"] == pytest.approx(lost["lr"], rel=1e-6), "norms of the weights were in float32 then"
    assert again.keys() >= lost.keys()
    assert {name: (before.runs / name).read_bytes() for name in kept} == kept
    made = set(files(before)) - {name.removesuffix(".json") for name in kept} - {lost["id"]}
    # Another score in the grid may choose another rate, whose final runs are then made too.
    assert stage == "tuning" or not made
    assert vestige("verify", before.path)[0] == 0
