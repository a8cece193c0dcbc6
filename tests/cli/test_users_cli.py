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
        (["--unit", "user", "--rows-per-user", "1000000000"], "--rows-per-user=1000000000"),
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


def table(path, youngest=20):
    rows = ["age,who,rich"] + [f"{youngest + i % 50},p{i % 40},{'yes' if i % 3 else 'no'}" for i in range(200)]
    path.write_text("\n".join(rows) + "\n")
    return path


def columns(path):
    words = ["train", "--recipe", "tabular", "--data", path, "--columns", "age=0..100", "--label-column", "rich"]
    return [*words, "--labels", "no,yes", "--epsilon", "3", "--steps", "3", "--no-secure-mode"]


def test_train_with_a_user_column(tmp_path):
    data, test = table(tmp_path / "people.csv"), table(tmp_path / "public.csv", youngest=21)
    words = [*columns(data), "--test", test, "--user-column", "who"]
    found = as_json(*words, "--rows-per-user", "3", "--out", tmp_path / "rows")
    assert found["adjacency"] == "zero-out all rows of one user (at most 3)"
    assert found["expected_batch"] == pytest.approx(found["sample_rate"] * 120)
    users = as_json(*words, "--sample", "users", "--out", tmp_path / "users")
    assert users["expected_batch"] == pytest.approx(users["sample_rate"] * 40)
    for folder in ("rows", "users"):
        assert "all rows of one user" in as_json("verify", tmp_path / folder)["adjacency"]
    for more, message in (
        (["--user-column", "whom"], "whom"),
        (["--rows-per-user", "few"], "--rows-per-user='few'"),
        (["--delta", "0.03"], "--delta=0.03"),
    ):
        code, _, error = vestige(*words, *more, "--out", tmp_path / "wrong")
        assert (code, error.count("\n")) == (2, 1), error
        assert message in error
    code, _, error = vestige(*columns(data), "--test", test, "--cap", "2", "--out", tmp_path / "wrong")
    assert (code, "--cap=2 is about users: give --user-column" in error) == (2, True)


def test_an_array_of_a_file_names_users(tmp_path):
    import numpy as np

    draw = np.random.default_rng(0)
    arrays = {"x_train": draw.integers(256, size=(60, 28, 28), dtype=np.uint8), "y_train": draw.integers(10, size=60)}
    arrays |= {"x_test": arrays["x_train"][:9], "y_test": arrays["y_train"][:9], "who": np.arange(60) // 3}
    np.savez(tmp_path / "mnist.npz", **arrays)
    words = ["train", "--task", "mnist-mlp", "--data", tmp_path / "mnist.npz", "--epsilon", "3", "--steps", "2"]
    found = as_json(*words, "--user-column", "who", "--sample", "users", "--out", tmp_path / "run")
    assert found["expected_batch"] == pytest.approx(0.05 * 20)
    for name in ("whom", "y_test"):
        code, _, error = vestige(*words, "--user-column", name, "--out", tmp_path / "wrong")
        assert (code, error.count("\n")) == (2, 1)
        assert f"--user-column='{name}'" in error


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
