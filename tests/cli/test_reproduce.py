"""Are tables that are no plain comparison made as said: without privacy, on other networks, and listed by name?"""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from vestige.audit import inference
from vestige.cli.main import app
from vestige.cli.reproduce import _without_privacy
from vestige.compare import paper_presets


def test_the_column_without_privacy_stands_beside_the_printed_one(tmp_path, monkeypatch):
    labels = np.arange(300, dtype=np.uint8) % 10
    images = np.zeros((300, 28, 28), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 4] = 250  # a stripe says which
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    preset = paper_presets.find("br-table2")
    assert preset.nonprivate_epochs == 20
    preset = replace(preset, nonprivate_epochs=6)
    assert "non-private" not in {printed.label for printed in preset.printed}  # no run of a comparison has it
    whole = preset.specification(str(tmp_path))
    only = replace(whole, problems=whole.problems[:1])
    (row,) = _without_privacy(preset, only, False, "cpu", tmp_path)
    assert (row["quantity"], row["printed"]) == ("mnist, non-private", 99.11)
    assert row["ours"] > 90
    assert row["difference"] == pytest.approx(row["ours"] - 99.11)
    monkeypatch.setattr(inference, "nonprivate_fit", None)  # made once
    assert _without_privacy(preset, only, False, "cpu", tmp_path) == [row]


def test_table_2_has_every_method_of_the_paper_on_its_own_network():
    printed = {
        (each.task, each.label)
        for name in ("br-table2", "br-table2-hf", "br-table2-cnn")
        for each in paper_presets.find(name).printed
    }
    for dataset in ("mnist", "fmnist", "cifar10"):
        wanted = {(f"{dataset}-ts", "dpsgd-ts"), (f"{dataset}-hf", "dpsgd-hf"), (f"{dataset}-cnn", "dpsgd")}
        assert wanted | {(f"{dataset}-ts", "dpsgd-br"), (f"{dataset}-hf", "dpsur")} <= printed


def test_lists_name_every_paper_and_alias():
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["presets", "--json"]).stdout)["presets"]}
    assert {rows[name]["paper"] for name in ("br-table3", "br-table2", "br-readings")} == {"DPSGD-BR (Sci Rep 2026)"}
    assert all("(" in row["paper"] for row in rows.values())  # a paper's name, never a key of ours
    assert "dp-sam, sa-dp-sgd" in CliRunner().invoke(app, ["methods"]).stdout
