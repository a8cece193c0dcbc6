"""Do the commands say what a plan, or a finished run, means for a person with several rows?"""

from pathlib import Path

import pytest

from commands import as_json, vestige

PLAN = ("account", "--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5")
FINISHED = Path(__file__).parent.parent / "fixtures" / "written-by-0.1.0" / "run-finished"


def test_account_prices_users():
    rows = as_json(*PLAN, "--unit", "user", "--rows-per-user", "4", "--noise-multiplier", "2")
    assert rows["epsilon"] == pytest.approx(2.8934, abs=1e-3)
    assert (rows["unit"], rows["rows_per_user"], rows["cap"], rows["sample"]) == ("user", 4, None, "rows")
    assert rows["adjacency"] == "zero-out all rows of one user (at most 4)"
    capped = as_json(*PLAN, "--unit", "user", "--rows-per-user", "4", "--cap", "1", "--noise-multiplier", "2")
    users = as_json(*PLAN, "--unit", "user", "--sample", "users", "--noise-multiplier", "2")
    plain = as_json(*PLAN, "--noise-multiplier", "2")
    assert plain["epsilon"] == users["epsilon"] < capped["epsilon"] < rows["epsilon"]
    assert plain["unit"] == "row"


def test_account_prices_other_samplings_by_group_privacy():
    epochs = ("account", "--sampling", "allocation", "--epochs", "1", "--steps-per-epoch", "10")
    group = as_json(*epochs, "--noise-multiplier", "2", "--unit", "user", "--rows-per-user", "2")
    assert group["accountant"] == "group privacy"
    assert group["epsilon"] > 2 * as_json(*epochs, "--noise-multiplier", "2")["epsilon"]
    code, out, _ = vestige(*epochs, "--noise-multiplier", "2", "--unit", "user", "--rows-per-user", "2")
    assert code == 0
    assert "(group privacy)" in out
    assert "all rows of one user (at most 2)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unit", "usr"], "--unit='usr'"),
        (["--unit", "user"], "--rows-per-user is missing"),
        (["--unit", "user", "--rows-per-user", "0"], "--rows-per-user=0"),
        (["--unit", "user", "--sample", "row", "--rows-per-user", "2"], "--sample='row'"),
        (["--cap", "3"], "--cap=3 belongs to --unit user"),
        (["--rows-per-user", "3"], "--rows-per-user=3 belongs to --unit user"),
    ],
)
def test_mistakes_are_one_line(words, message):
    code, _, error = vestige(*PLAN, "--noise-multiplier", "2", *words)
    assert code == 2
    assert error.count("\n") == 1
    assert message in error


def test_verify_says_what_a_run_means_for_a_person():
    plain = as_json("verify", FINISHED)
    found = as_json("verify", FINISHED, "--rows-per-user", "4")
    assert found["epsilon"] == plain["epsilon"]
    assert found["user"]["epsilon"] > 4 * found["epsilon"]
    assert "at most 4" in found["user"]["adjacency"]
    _, out, _ = vestige("verify", FINISHED, "--rows-per-user", "4")
    assert "one user's presence" in out
    code, _, error = vestige("verify", FINISHED.parent / "run-filtered", "--rows-per-user", "4")
    assert (code, error.count("\n")) == (2, 1)
    assert "filter" in error
