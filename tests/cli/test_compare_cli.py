"""What does `vestige compare` take at the terminal, and what does it refuse in one line?"""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from commands import vestige
from comparisons import TINY
from vestige.cli import main
from vestige.cli.progress import _marks, check_tasks
from vestige.compare.arguments import contenders
from vestige.compare.specification import Problem
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
        (["--physical-batch", "0"], "--physical-batch=0"),
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


def row_of(method, p, mean=0.5):
    return {"method": method, "p_holm": p, "mean": mean}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row_of("dp-sgd", None), row_of("a", 0.5)], "unmarked: not distinguishable"),
        ([row_of("dp-sgd", None), row_of("a", 0.5), row_of("b", None)], "not distinguishable; ?: not tested"),
        ([row_of("a", None), row_of("b", None)], "no run of the baseline dp-sgd is here; --baseline names another"),
        ([row_of("dp-sgd", None), row_of("a", None)], "two seeds of each or more"),
    ],
)
def test_what_was_not_tested_is_not_called_indistinguishable(rows, words):
    said = _marks({"baseline": "dp-sgd", "rows": rows})
    assert said.endswith(words)


def test_a_helper_without_the_task_or_with_several_hands_at_a_stopwatch_changes_nothing(tmp_path):
    (tmp_path / "my.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make(data, seed):\n"
        "    x, y = torch.randn(60, 3), torch.randint(2, (60,))\n"
        "    return nn.Linear(3, 2), nn.functional.cross_entropy, (x, y), (x, y)\n"
    )
    task, folder = tmp_path / "my.py", tmp_path / "c"
    words = ["--method", "dp-sgd", "--steps", 2, "--seeds", 1, "--rates", "auto", "--workers", 1, "--out", folder]
    made = vestige("compare", "--task", f"{task}:make", "--sample-rate", 0.2, *words)
    assert made[0] == 0, made
    (record,) = (folder / "runs").iterdir()
    record.unlink()
    (folder / "preset.json").write_text(json.dumps({"preset": "fo-table1", "small": True}))
    code, _, error = vestige("compare", "--resume", folder, "--workers", 2)
    assert (code, "one after another" in error) == (2, True)
    task.unlink()
    code, _, error = vestige("compare", "--resume", folder)
    assert (code, "my.py" in error) == (2, True)
    assert not list((folder / "runs").iterdir()), "a run that cannot be made here is no failed run"
