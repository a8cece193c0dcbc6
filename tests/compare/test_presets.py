"""Are the papers' tables and figures there, and do ours stand beside the right printed numbers?"""

import json
from dataclasses import replace

import pytest

from comparisons import AUTO, fake
from vestige import accounting
from vestige.cli.progress import Execution
from vestige.cli.reproduce import reproduce
from vestige.compare import presets, runner, runs
from vestige.compare.folder import ComparisonFolder
from vestige.methods.registry import METHODS, build
from vestige.questions import SampledGaussian
from vestige.records import PrivacyTarget


def test_every_table_and_figure_is_there_and_its_methods_take_its_options():
    names = set(presets.PRESETS)
    assert {f"fo-table{i}" for i in (1, 2, 3)} | {f"fo-fig{i}" for i in range(1, 9)} <= names
    assert {"sma-table2", "sma-table3", "sma-table4", "sma-fig2", "sma-fig3", "sma-fig4", "sma-fig5"} <= names
    assert {"br-table2", "br-table4", "br-fig4", "br-fig5", "br-fig6", "br-fig7", "br-fig8"} <= names
    for preset in presets.PRESETS.values():
        assert preset.notes
        whole = preset.full
        labels = {contender.label for contender in whole.contenders}
        assert {printed.label for printed in preset.printed} <= labels
        for contender in whole.contenders:
            if contender.method in METHODS:
                build(contender.method, **contender.options)
        if all(contender.method not in METHODS for contender in whole.contenders):
            with pytest.raises(ValueError, match="no such method"):
                preset.specification(None)
            continue
        full, small = preset.specification(None), preset.specification(None, small=True)
        assert small.problems[0].settings["steps"] < full.steps
        assert full.baseline in {contender.label for contender in full.contenders}


def test_the_printed_figures_are_the_papers():
    finals = {printed.label: printed.value for printed in presets.find("fo-table3").printed}
    assert finals["fo beta 0.90"] == 0.3654
    assert finals["fo beta 1.00"] == 0.3241
    br = {printed.name: printed.value for printed in presets.find("br-table2").printed}
    assert br["cifar10, epsilon 3, dpsgd-br"] == 71.52
    with pytest.raises(ValueError, match="did you mean 'fo-table3'"):
        presets.find("fo-tabel3")


def test_ours_stands_beside_the_printed(folder):
    budget = PrivacyTarget("noise_multiplier", 1.0)
    preset = replace(
        presets.find("fo-table3"),
        printed=(
            presets.Printed("a", 0.5, "dp-sgd"),
            presets.Printed("b", 50.0, "dp-sgd", "accuracy in percent", "digits-mlp", budget),
            presets.Printed("c", 1.0, "nobody"),
        ),
    )
    everything = ComparisonFolder(folder).records().values()
    records = [record for record in everything if record.run.stage == "auto" and record.run.label == "dp-sgd"]
    rows = presets.beside(preset, everything)
    mean = sum(record.accuracy for record in records) / len(records)
    assert rows[0]["ours_at_auto"] == pytest.approx(mean)
    assert rows[0]["ours"] is None
    loud = [100 * record.accuracy for record in records if record.run.budget.value == 1.0]
    assert rows[1]["ours_at_auto"] == pytest.approx(sum(loud) / 3)
    assert rows[2]["ours_at_auto"] is None
    ratio = replace(
        preset,
        printed=(
            presets.Printed("x", 1.0, "dp-sgd", "relative seconds"),
            presets.Printed("y", 1.02, "fo", "relative seconds"),
        ),
    )
    assert presets.beside(ratio, everything)[0]["ours_at_auto"] == pytest.approx(1.0)


def test_the_papers_terms_and_one_epsilon_are_never_mixed():
    """Accuracy 0.1 at the paper's sigma and rate, 0.2 there at auto, 0.3 at the one epsilon: each in its own column."""
    preset = presets.find("fo-table3")

    pattern = replace(runs.due(AUTO, runs.grid_of(AUTO), {})[0], task="cifar10-mlp")

    def records(label):
        sigma, epsilon = PrivacyTarget("paper_sigma", 1.1), PrivacyTarget("epsilon", 17.4)
        rows = ((sigma, "given", 0.1), (sigma, "auto", 0.2), (epsilon, "auto", 0.3), (epsilon, "given", 0.4))
        return [
            fake(replace(pattern, label=label, budget=budget, stage=stage), accuracy)
            for budget, stage, accuracy in rows
        ]

    row = next(row for row in presets.beside(preset, records("fo beta 0.90")) if row["printed"] == 0.3654)
    assert (row["ours"], row["ours_at_auto"], row["ours_at_equal_epsilon"]) == (0.1, 0.2, 0.3)
    row = next(row for row in presets.beside(preset, records("dp-adam")) if row["printed"] == 0.2438)
    assert row["ours"] == 0.2  # the paper gives no rate for dp-adam


@pytest.mark.parametrize("name", [f"fo-fig{i}" for i in (1, 2, 3, 4, 5, 6, 8)] + ["fo-table3", "fo-alpha"])
def test_accuracies_are_compared_at_one_sigma_and_at_one_epsilon(name):
    budgets = presets.find(name).full.budgets
    assert [budget.kind for budget in budgets] == ["paper_sigma", "epsilon"]
    spent = accounting.epsilon({SampledGaussian(0.04, budgets[0].value / 0.9): 6250}, 1e-5)
    assert budgets[1].value == pytest.approx(spent, abs=0.05)


def test_runs_that_are_timed_are_made_alone(tmp_path, monkeypatch):
    seen = {}

    def compare(path, specification, *, machine, workers, **_):
        seen[path.name] = (machine.stack, workers)
        raise ValueError("enough seen")

    monkeypatch.setattr(runner, "compare", compare)
    for name in ("fo-table2", "fo-fig8"):
        with pytest.raises(ValueError, match="enough seen"):
            reproduce(None, name, data=str(tmp_path), small=True, device="cpu", out=tmp_path / name)
    assert seen["fo-table2"] == (False, 1)
    assert seen["fo-fig8"][0] is True


def test_a_preset_about_seconds_is_continued_one_run_after_another(tmp_path):
    assert not presets.timed_in(tmp_path)
    for name, timed in (("fo-table1", True), ("fo-table3", False)):
        (tmp_path / "preset.json").write_text(json.dumps({"preset": name, "small": True}))
        assert presets.timed_in(tmp_path) is timed
    for nothing in ([], {}, {"preset": 3, "small": True}):
        (tmp_path / "preset.json").write_text(json.dumps(nothing))
        with pytest.raises(ValueError, match="names no preset"):
            presets.timed_in(tmp_path)
    with pytest.raises(ValueError, match="leave --workers"):
        Execution(workers=2, alone=True).check()
    Execution(workers=1, alone=True).check()
