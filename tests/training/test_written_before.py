"""Are runs that version 0.1.0 wrote still verified and continued?"""

import json
import shutil
from pathlib import Path

import pytest

from commands import vestige
from vestige.training.verify import verify

FIXTURES = Path(__file__).parents[1] / "fixtures" / "written-by-0.1.0"


@pytest.mark.parametrize("name", ["run-finished", "run-filtered"])
def test_a_finished_run_is_verified_and_what_it_did_not_seal_is_named(name):
    verdict = verify(FIXTURES / name)
    assert verdict.finished
    assert set(verdict.unchecked) == {path.name for path in (FIXTURES / name).iterdir()} - {"ledger.jsonl"}


def test_an_interrupted_run_is_continued_with_the_noise_it_was_planned_with(tmp_path):
    run = shutil.copytree(FIXTURES / "run-interrupted", tmp_path / "run")
    assert vestige("verify", run)[0] == 1
    code, _, error = vestige("train", "--resume", run)
    assert code == 0, error
    verdict = verify(run)
    assert (verdict.finished, verdict.unchecked, verdict.asked) == (True, (), 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: request["job"].update(banana=1), "the job has banana, which this version does not know"),
        (lambda request: request.pop("public"), "does not say what the run was begun with"),
        (lambda request: request["public"].update(lr=5.0), "lr is 5.0, but the ledger was opened with 13.2"),
    ],
)
def test_a_file_that_was_changed_is_refused_in_a_line(tmp_path, change, words):
    run = shutil.copytree(FIXTURES / "run-interrupted", tmp_path / "run")
    request = json.loads((run / "run.json").read_text())
    change(request)
    (run / "run.json").write_text(json.dumps(request))
    code, _, error = vestige("train", "--resume", run)
    assert code == 2
    assert words in " ".join(error.split())
