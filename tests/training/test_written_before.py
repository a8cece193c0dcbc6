"""Are runs that version 0.1.0 wrote still verified and continued?"""

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
