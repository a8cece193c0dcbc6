"""Do the examples that the documentation shows run, and say what the pages say they say?"""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORTER = {
    "own_loop.py": ("EPOCHS = 20", "EPOCHS = 3"),
    "one_call.py": ("STEPS = 200", "STEPS = 60"),
    "resume.py": ("STEPS = 100", "STEPS = 20"),
    "loop_checkpoint.py": ("EPOCHS = 4", "EPOCHS = 2"),
    "prices.py": ("STEPS, DELTA = 0.04, 1000", "STEPS, DELTA = 0.04, 100"),
    "compare_methods.py": ("SEEDS, STEPS = 5, 60", "SEEDS, STEPS = 2, 8"),
}
"""What is shortened in each example, and how."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def run(name):
        long, short = SHORTER[name]
        text = (EXAMPLES / name).read_text()
        assert text.count(long) == 1
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).write_text(text.replace(long, short))
        runpy.run_path(str(tmp_path / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def epsilons(said):
    return [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", said)]


def test_every_example_is_run():
    elsewhere = "".join(path.read_text() for path in (EXAMPLES.parent / "tests").rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in SHORTER or path.name in elsewhere or f'"{path.stem}"' in elsewhere, path.name


def test_ones_own_loop_spends_what_was_given(run):
    said = run("own_loop.py")
    spent = epsilons(said)
    *each_epoch, whole = spent
    assert len(each_epoch) == 3
    assert each_epoch == sorted(each_epoch)
    assert 2.99 <= whole <= each_epoch[-1] <= 3.0
    assert "assumed: whose privacy: " in said
    assert re.search("^checked: .*the loss is per example", said, re.M)  # nothing was read


def test_one_call_is_verified_from_its_ledger(run):
    said = run("one_call.py")
    assert "noise multiplier" in said
    assert epsilons(said)[-1] == 3.0
    assert float(re.search(r"accuracy ([\d.]+)%", said)[1]) > 30


def test_a_run_goes_on_where_it_was(run):
    said = run("resume.py")
    assert "interrupted after step 10" in said
    assert "continued from step 11 to 19" in said
    before, after = epsilons(said)
    assert before < after <= 3.0


def test_a_loop_goes_on_in_another_engine_and_forgets_nothing(run):
    before, after = epsilons(run("loop_checkpoint.py"))
    assert 0 < before < after <= 3.0


def test_prices_need_no_training(run):
    said = run("prices.py")
    assert epsilons(said)[1] > 3.0  # choosing costs more than one run
    assert 10 < int(re.search(r"3: (\d+) steps", said)[1]) < 100


def test_a_comparison_from_python_names_the_baseline(run):
    lines = run("compare_methods.py").splitlines()
    assert {line.split()[0] for line in lines} == {"dp-sgd", "fo-dp-sgd", "kalman-memory"}
    assert next(line for line in lines if "the baseline" in line).startswith("dp-sgd ")
