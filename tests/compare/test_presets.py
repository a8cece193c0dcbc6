"""Are the papers' tables and figures there, and do ours stand beside the right printed numbers?"""

import json
from dataclasses import replace

import numpy as np
import pytest

from comparisons import AUTO, fake
from vestige import accounting, tasks
from vestige.cli.reproduce import reproduce
from vestige.cli.run_comparison import Execution
from vestige.compare import paper_presets, run_grid, runner
from vestige.compare.execute_run import Machine, perform, stackable
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Problem
from vestige.methods.registry import METHODS, as_given, make_method
from vestige.priced_questions import SampledGaussian
from vestige.run_records import PrivacyTarget


def test_every_table_and_figure_is_there_and_its_methods_take_its_options():
    names = set(paper_presets.PRESETS)
    assert {f"fo-table{i}" for i in (1, 2, 3)} | {f"fo-fig{i}" for i in range(1, 9)} <= names
    assert {"sma-table2", "sma-table3", "sma-table4", "sma-fig2", "sma-fig3", "sma-fig4", "sma-fig5"} <= names
    assert {"br-table2", "br-table4", "br-fig4", "br-fig5", "br-fig6", "br-fig7", "br-fig8"} <= names
    for preset in paper_presets.PRESETS.values():
        assert preset.notes
        whole = preset.full
        labels = {contender.label for contender in whole.contenders}
        assert {printed.label for printed in preset.printed} <= labels
        for contender in whole.contenders:
            if contender.method in METHODS:
                make_method(contender.method, **contender.options)
        if all(contender.method not in METHODS for contender in whole.contenders):
            with pytest.raises(ValueError, match="no such method"):
                preset.specification(None)
            continue
        full, small = preset.specification(None), preset.specification(None, small=True)
        assert small.problems[0].settings["steps"] < full.steps
        assert full.baseline in {contender.label for contender in full.contenders}


def test_the_printed_figures_are_the_papers():
    finals = {printed.label: printed.value for printed in paper_presets.find("fo-table3").printed}
    assert finals["fo beta 0.90"] == 0.3654
    assert finals["fo beta 1.00"] == 0.3241
    br = {printed.name: printed.value for printed in paper_presets.find("br-table2").printed}
    assert br["cifar10, epsilon 3, dpsgd-br"] == 71.52
    with pytest.raises(ValueError, match="did you mean 'fo-table3'"):
        paper_presets.find("fo-tabel3")


def test_ours_stands_beside_the_printed(folder):
    budget = PrivacyTarget("noise_multiplier", 1.0)
    preset = replace(
        paper_presets.find("fo-table3"),
        printed=(
            paper_presets.Printed("a", 0.5, "dp-sgd"),
            paper_presets.Printed("b", 50.0, "dp-sgd", "accuracy in percent", "digits-mlp", budget),
            paper_presets.Printed("c", 1.0, "nobody"),
        ),
    )
    everything = ComparisonFolder(folder).records().values()
    records = [record for record in everything if record.run.stage == "auto" and record.run.label == "dp-sgd"]
    rows = paper_presets.beside(preset, everything)
    mean = sum(record.accuracy for record in records) / len(records)
    assert rows[0]["ours_at_auto"] == pytest.approx(mean)
    assert rows[0]["ours"] is None
    loud = [100 * record.accuracy for record in records if record.run.budget.value == 1.0]
    assert rows[1]["ours_at_auto"] == pytest.approx(sum(loud) / 3)
    assert rows[2]["ours_at_auto"] is None
    ratio = replace(
        preset,
        printed=(
            paper_presets.Printed("x", 1.0, "dp-sgd", "relative seconds"),
            paper_presets.Printed("y", 1.02, "fo", "relative seconds"),
        ),
    )
    assert paper_presets.beside(ratio, everything)[0]["ours_at_auto"] == pytest.approx(1.0)


def test_the_papers_terms_and_one_epsilon_are_never_mixed():
    """Accuracy 0.1 at the paper's sigma and rate, 0.2 there at auto, 0.3 at the one epsilon: each in its own column."""
    preset = paper_presets.find("fo-table3")

    pattern = replace(run_grid.due(AUTO, run_grid.grid_of(AUTO), {})[0], task="cifar10-mlp")

    def records(label):
        sigma, epsilon = PrivacyTarget("paper_sigma", 1.1), PrivacyTarget("epsilon", 17.4)
        rows = ((sigma, "given", 0.1), (sigma, "auto", 0.2), (epsilon, "auto", 0.3), (epsilon, "given", 0.4))
        return [
            fake(replace(pattern, label=label, budget=budget, stage=stage), accuracy)
            for budget, stage, accuracy in rows
        ]

    row = next(row for row in paper_presets.beside(preset, records("fo beta 0.90")) if row["printed"] == 0.3654)
    assert (row["ours"], row["ours_at_auto"], row["ours_at_equal_epsilon"]) == (0.1, 0.2, 0.3)
    row = next(row for row in paper_presets.beside(preset, records("dp-adam")) if row["printed"] == 0.2438)
    assert row["ours"] == 0.2  # the paper gives no rate for dp-adam


@pytest.mark.parametrize("name", [f"fo-fig{i}" for i in (1, 2, 3, 4, 5, 6, 8)] + ["fo-table3", "fo-alpha"])
def test_accuracies_are_compared_at_one_sigma_and_at_one_epsilon(name):
    budgets = paper_presets.find(name).full.budgets
    assert [budget.kind for budget in budgets] == ["paper_sigma", "epsilon"]
    spent = accounting.epsilon({SampledGaussian(0.04, budgets[0].value / 0.9): 6250}, 1e-5)
    assert budgets[1].value == pytest.approx(spent, abs=0.05)


def images(path, each, shape=(32, 32, 3), seed=0):
    """A dataset of so many training and test images of each class, in no order."""
    rng, arrays = np.random.default_rng(seed), {}
    for split, count in zip(("train", "test"), each, strict=True):
        labels = rng.permutation(np.repeat(np.arange(10), count)).astype(np.uint8)
        arrays[f"y_{split}"] = labels
        arrays[f"x_{split}"] = rng.integers(0, 256, (len(labels), *shape), np.uint8)
    np.savez(path, **arrays)
    return str(path)


PROTOCOLS = [name for name, preset in paper_presets.PRESETS.items() if preset.full.subset is not None]


def test_a_preset_is_its_protocol_whatever_file_it_is_given(tmp_path, monkeypatch):
    """The first 500 and 200 of each class, batch 200, cut from a larger dataset; what is smaller is refused."""
    assert all(name.startswith(("fo-", "sma-", "balance-")) for name in PROTOCOLS)
    assert all(preset.name in PROTOCOLS or preset.whole for preset in paper_presets.PRESETS.values())
    data = images(tmp_path / "cifar10.npz", (530, 210))
    preset = paper_presets.find("fo-table1")
    specification = preset.specification(data)
    assert all(run.subset == (5000, 2000) for run in run_grid.due(specification, run_grid.grid_of(specification), {}))
    (found,) = paper_presets.taken(preset, specification).values()
    assert found["expected_batch"] == 200
    assert len(found["train"]) == 5000
    assert len(found["test"]) == 2000
    assert found["line"].startswith("cifar10-mlp: 5,000 of 5,300 training rows (")
    assert found["line"].endswith(
        "the first 500 and 200 of each class, in the file's order; expected batch 200 at rate 0.04"
    )
    few = images(tmp_path / "few.npz", (499, 210))
    with pytest.raises(ValueError, match="training rows hold 499 of class 0, and the protocol takes the first 500"):
        paper_presets.taken(preset, preset.specification(few))


@pytest.mark.slow
def test_a_cut_dataset_and_the_whole_one_give_the_same_records(tmp_path):
    """Bit for bit, alone and stacked: the same command on the whole dataset and on what the protocol takes of it."""
    whole = images(tmp_path / "whole.npz", (530, 210))
    task = tasks.load("cifar10-mlp", whole, subset=(5000, 2000))
    with np.load(whole) as file:
        np.savez(tmp_path / "cut.npz", **{k: file[k][getattr(task.rows, k.split("_")[1]).numpy()] for k in file})
    preset = paper_presets.find("fo-fig4")
    specification = replace(
        preset.specification(None, small=True, seeds=2, reproducible=True),
        budgets=preset.full.budgets[:1],
        contenders=preset.full.contenders[1:3],
        baseline="fo K 2",
        rates=("given",),
    )
    specification = replace(specification, problems=(Problem("cifar10-mlp", None, {"steps": 3}),))
    due = run_grid.due(specification, run_grid.grid_of(specification), {})
    made = []
    for data, stack in ((whole, True), (str(tmp_path / "cut.npz"), True), (whole, False)):
        machine = Machine("cpu", {"cifar10-mlp": data}, stack)
        assert (stackable(due[0], machine) is not None) == stack
        made.append({record.id: record for record in perform(due if stack else due[:2], machine)})
    assert {key: (each.accuracy, each.diagnostics) for key, each in made[0].items()} == {
        key: (each.accuracy, each.diagnostics) for key, each in made[1].items()
    }
    for key, each in made[2].items():
        assert each.accuracy == made[0][key].accuracy
        assert each.statement.expected_batch == 200


def test_whole_datasets_are_asked_for_where_the_paper_has_them(tmp_path):
    data = images(tmp_path / "mnist.npz", (2, 1), (28, 28))
    preset = paper_presets.find("br-fig4")
    assert preset.whole == {"mnist-hf": (60_000, 10_000), "fmnist-hf": (60_000, 10_000)}
    with pytest.raises(
        ValueError, match="holds 20 training and 10 test examples of mnist-hf, and br-fig4 takes all 60,000"
    ):
        paper_presets.taken(preset, preset.specification(data))
    found = paper_presets.taken(preset, preset.specification(data, small=True), small=True)
    assert (
        "20 training and 10 test examples of mnist-hf, where the paper has 60,000 and 10,000"
        in found["mnist-hf"]["line"]
    )


def test_at_epsilon_1_selective_methods_have_the_settings_that_their_papers_print():
    """Table 4 for DPSGD-BR in whatever shape, DPSUR's own for DPSUR; Adam on IMDb, where SGD at rate 0.03 stands still;
    and trials until the budget ends."""
    printed = paper_presets.published()
    for name in ("br-table4", "br-fig4", "br-fig5", "br-fig7", "br-fig8", "br-decay"):
        specification = paper_presets.find(name).specification(None, seeds=1)
        assert specification.steps == 3000
        for run in run_grid.due(specification, run_grid.grid_of(specification), {}):
            dataset = run.task.partition("-")[0]
            own = run.method != "dpsur"
            paper, table = (
                ("dpsgd_br", "table4_initial_parameters_epsilon_1") if own else ("dpsur", "parameters_epsilon_1")
            )
            row = printed[paper][table][dataset]
            assert run.sample_rate == min(1.0, row["batch"] / printed["dpsgd_br"]["examples"][dataset])
            assert run.lr == (row["lr"] if run.stage == "given" else None)
            for option, letter in (("sigma_t", "sigma_t"), ("sigma_v", "sigma_v"), ("threshold", "beta")):
                assert run.options[option] == row[letter]
            assert run.options.get("optimizer") == ("adam" if dataset == "imdb" else None)
            assert make_method(run.method, **as_given(run.options)).noise_multiplier == row["sigma_t"]
    assert all("sigma_t" not in run.options for run in _runs("br-table2"))


def _runs(name):
    specification = paper_presets.find(name).specification(None, seeds=1)
    return run_grid.due(specification, run_grid.grid_of(specification), {})


def test_a_setting_of_one_method_leaves_the_others_as_they_are():
    own = {"lr": 3.0, "steps": 7, "options": {"window": 5}}
    problem = Problem("digits-mlp", None, {"lr": 2.0, "options": {"momentum": 0.5}, "by_method": {"fo-dp-sgd": own}})
    specification = replace(AUTO, problems=(problem,), rates=("given",), lr=1.0)
    runs = {run.label: run for run in run_grid.due(specification, run_grid.grid_of(specification), {})}
    assert {label: (run.lr, run.steps, run.options) for label, run in runs.items()} == {
        "dp-sgd": (2.0, 2, {"momentum": 0.5}),
        "fo": (3.0, 7, {"beta": 0.8, "momentum": 0.5, "window": 5}),
    }


def test_every_deviation_that_was_asked_for_is_said():
    preset = paper_presets.find("fo-table3")
    assert preset.assumed(preset.specification(None)) == list(preset.notes)
    other = preset.specification(None, small=True, seeds=13, reproducible=True)
    assert other.seeds == tuple(range(13))
    said = preset.assumed(other, small=True)[len(preset.notes) :]
    assert [line.split()[0] for line in said] == ["13", "--small:", "--reproducible:"]
    with pytest.raises(ValueError, match="seeds=0 must be"):
        preset.specification(None, seeds=0)


def test_runs_that_are_timed_are_made_alone(tmp_path, monkeypatch):
    seen, data = {}, images(tmp_path / "cifar10.npz", (500, 200))

    def compare(path, specification, *, machine, workers, **_):
        seen[path.name] = (machine.stack, workers)
        raise ValueError("enough seen")

    monkeypatch.setattr(runner, "compare", compare)
    for name in ("fo-table2", "fo-fig8"):
        with pytest.raises(ValueError, match="enough seen"):
            reproduce(None, name, data=data, small=True, device="cpu", out=tmp_path / name)
    assert seen["fo-table2"] == (False, 1)
    assert seen["fo-fig8"][0] is True


def test_a_preset_about_seconds_is_continued_one_run_after_another(tmp_path):
    assert not paper_presets.timed_in(tmp_path)
    for name, timed in (("fo-table1", True), ("fo-table3", False)):
        (tmp_path / "preset.json").write_text(json.dumps({"preset": name, "small": True}))
        assert paper_presets.timed_in(tmp_path) is timed
    for nothing in ([], {}, {"preset": 3, "small": True}):
        (tmp_path / "preset.json").write_text(json.dumps(nothing))
        with pytest.raises(ValueError, match="names no preset"):
            paper_presets.timed_in(tmp_path)
    with pytest.raises(ValueError, match="leave --workers"):
        Execution(workers=2, alone=True).check()
    Execution(workers=1, alone=True).check()
