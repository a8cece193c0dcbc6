"""What does `vestige compare` take at the terminal, and what does it refuse in one line?"""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from commands import vestige
from comparisons import TINY
from vestige.cli import compare, main
from vestige.cli.run_comparison import _cell, _marks, check_tasks
from vestige.compare.arguments import contenders
from vestige.compare.specification import Problem
from vestige.compare.statistics import seeds_to_tell
from vestige.methods.registry import METHODS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "dp-sdg"], "did you mean 'dp-sgd'"),
        (["--method", "dp-sgd:clip"], "option=value"),
        (["--lrs", ""], "empty grid"),
        (["--factors", "1,two"], "must be numbers"),
        (["--tune", "beta="], "empty grid"),
        (["--seeds", "0"], "seeds=0"),
        (["--epsilon", "-3"], "epsilon=-3"),
        (["--stack", "high"], "stack='high'"),
        (["--engine", "moon"], "engine='moon'"),
        (["--rates", "given"], "lr is missing"),
        (["--resume", "/nonexistent"], "holds no comparison"),
        (["--retry"], "--retry goes with --resume"),
        (["--method", "dp-sgd:foo=1"], "foo=1 is not an option of dp-sgd"),
        (["--method", "dp-quantile:groups=layers"], "dp-quantile clips by Quantile, which cannot be split in groups"),
        (["--method", "dp-sgd:groups=;"], "must be layers, flat, or patterns"),
        (["--steps", "0"], "--steps=0"),
        (["--sample-rate", "2"], "--sample-rate=2.0"),
        (["--delta", "-1"], "--delta=-1.0"),
        (["--factors", "0,1"], "--factors=0,1 must all be positive"),
        (["--lrs", "-0.1"], "--lrs=-0.1 must all be positive"),
        (["--lr", "-1"], "--lr=-1.0"),
        (["--evaluations", "-1"], "--evaluations=-1"),
        (["--max-physical-batch-size", "0"], "--max-physical-batch-size=0"),
        (["--tune", "beeta=1,2"], "--tune='beeta' is an option of none of the methods (did you mean 'beta'?)"),
        (["--baseline", "dp-sdg"], "--baseline='dp-sdg' is not compared (did you mean 'dp-sgd'?)"),
        (["--device", "moon"], "--device='moon' cannot be used"),
        (["--ray-address", "here"], "--ray-address='here' goes with --engine ray"),
        (["--epsilon", "much", "--epsilon", "1"], "'--epsilon': 'much', '1'"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, words, tmp_path):
    options = [] if "--resume" in arguments else ["--out", str(tmp_path / "c"), "--workers", "1"]
    made = CliRunner().invoke(main.app, ["compare", *options, *arguments])
    assert made.exit_code == 2
    assert words in made.stderr
    assert made.stderr.count("\n") == 1
    assert not list((tmp_path / "c" / "runs").glob("*")) if (tmp_path / "c").exists() else True


def test_contenders_on_the_command_line():
    found = contenders(["fo-dp-sgd:beta=0.8,window=4", "dp-sgd"])
    assert found == [("fo-dp-sgd:beta=0.8,window=4", "fo-dp-sgd", {"beta": 0.8, "window": 4}), ("dp-sgd", "dp-sgd", {})]
    everything = contenders(["all"])
    assert {name for _, name, _ in everything} == set(METHODS)
    assert len({label for label, _, _ in everything}) == len(everything)
    assert contenders(["sa-dp-sgd"]) == [("sa-dp-sgd", "sa-dp-sgd", {})]  # dp-sam, by another paper's name


def test_a_helper_with_wrong_data_is_refused_before_it_fails_anything(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        check_tasks(replace(TINY, problems=(Problem("mnist-mlp", str(tmp_path)),)), str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="--data is missing"):
        check_tasks(replace(TINY, problems=(Problem("mnist-mlp", None),)))


def row_of(method, sentence, mean=0.5):
    return {"method": method, "sentence": sentence, "mean": mean}


BASE, SAME = row_of("dp-sgd", "the baseline"), row_of("a", "not distinguishable from dp-sgd at epsilon 3")
FEW, ONE = (
    row_of("b", "too few seeds to tell it from dp-sgd"),
    row_of("c", "+1.00 points against dp-sgd, from one seed"),
)


@pytest.mark.parametrize(
    ("rows", "tested", "words"),
    [
        ([BASE, SAME], 1, "Holm over 1 rows); unmarked: not distinguishable"),
        ([BASE, SAME, ONE], 1, "not distinguishable; ?: not tested"),
        ([BASE, SAME, FEW], 2, "not distinguishable; ?: not tested"),
        ([BASE, FEW], 30, "too few seeds to tell anything apart: 30 rows take 11 (exact paired test, Holm)"),
        ([SAME, FEW], 0, "no run of the baseline dp-sgd is here; --baseline names another"),
        ([BASE, ONE], 0, "another method and several seeds of each, with a choice for each seed"),
    ],
)
def test_what_was_not_tested_is_not_called_indistinguishable(rows, tested, words):
    needed = seeds_to_tell(tested) if tested else None
    said = _marks({"baseline": "dp-sgd", "rows": rows, "tested": tested, "seeds_to_tell": needed})
    assert said.endswith(words)
    marks = {
        each["method"]: _cell({**each, "high": None, "epsilon": 3.0, "budget": "epsilon 3"}, True) for each in rows
    }
    assert all(mark.endswith(" ?") == (name in "bc") for name, mark in marks.items())


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["--method", "dp-sgd", "--method", "fo-dp-sgd"], 7),
        (["--method", "dp-sgd", "--method", "fo-dp-sgd", "--choose-once"], 6),
        (["--method", "dp-sgd", "--method", "fo-dp-sgd", "--rates", "auto"], 6),
        (["--method", "dp-sgd"], 6),
        (["--method", "dp-sgd", "--method", "fo-dp-sgd", *["--epsilon", "1", "--epsilon", "3"], "--lr", "0.1"], 8),
        (["--method", "dp-sgd", "--method", "fo-dp-sgd", "--seeds", "3"], 3),
        (["--quick"], 9),
    ],
)
def test_there_are_as_many_seeds_as_a_test_of_all_rows_takes(words, seeds, monkeypatch):
    def seen(path, specification, *arguments, **more):
        made.append(specification)
        raise ValueError("enough")

    made = []
    monkeypatch.setattr(compare, "make_runs", seen)
    assert "enough" in CliRunner().invoke(main.app, ["compare", *words]).stderr
    assert len(made[0].seeds) == seeds
    assert made[0].choose == ("once" if "--choose-once" in words else "each seed")
    if "--quick" in words:
        others = len(made[0].contenders) - 1
        assert seeds == seeds_to_tell(others * len(made[0].budgets) * len(made[0].rates))


def test_a_helper_without_the_task_or_with_several_hands_at_a_stopwatch_changes_nothing(tmp_path):
    (tmp_path / "my.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(data, seed):\n"
        "    x, y = torch.randn(60, 3), torch.randint(2, (60,))\n"
        "    return nn.Linear(3, 2), nn.functional.cross_entropy, (x, y), (x.clone(), y)\n"
    )
    task, folder = tmp_path / "my.py", tmp_path / "c"
    words = ["--method", "dp-sgd", "--steps", 2, "--seeds", 1, "--rates", "auto", "--workers", 1, "--out", folder]
    made = vestige("compare", "--task", f"{task}:make", "--sample-rate", 0.2, *words)
    assert made[0] == 0, made
    (record,) = (folder / "runs").iterdir()
    record.unlink()
    (folder / "preset.json").write_text(json.dumps({"preset": "fo-table1", "small": True}))
    code, _, error = vestige("compare", "--resume", folder, "--workers", 2, "--trust")
    assert (code, "one after another" in error) == (2, True)
    task.unlink()
    code, _, error = vestige("compare", "--resume", folder)
    assert (code, "my.py" in error) == (2, True)
    assert not list((folder / "runs").iterdir()), "a run that cannot be made here is no failed run"
