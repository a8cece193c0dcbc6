"""Do the table, the command line and a user's own loop take each method as the registry has it?"""

import json
import subprocess
import sys

import pytest
import torch

import vestige
from commands import as_json
from commands import vestige as command
from conftest import make_toy
from vestige.methods.registry import METHODS


@pytest.mark.parametrize("name", ["dp-sam", "dp-is", "dp-quantile", "adp-adamw", "dp-blt", "dp-adam-ac"])
def test_a_loop_of_ones_own_refuses_what_it_cannot_answer_as_priced(name):
    from torch.utils.data import DataLoader, TensorDataset

    model, data = make_toy()
    with pytest.raises(ValueError, match=r"use vestige\.train"):
        vestige.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), method=name, noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(*data), batch_size=6), max_grad_norm=1.0,
        )  # fmt: skip


def vestige_command(*words):
    return subprocess.run(
        [sys.executable, "-m", "vestige.cli.main", *words], capture_output=True, text=True, check=False
    )


def test_the_table_and_the_pages_say_what_the_registry_knows():
    table = as_json("methods")["methods"]
    assert [row["name"] for row in table] == list(METHODS)
    for row in table:
        assert row["bibtex"].startswith("@"), row["name"]
        assert {"parts", "defaults", "releases", "price", "privacy", "copies", "neutral", "reference"} <= row.keys()
    _, page, _ = command("methods", "dp-is")
    for words in ("importance", "SGM(boost q, z)", "@inproceedings", "--boost"):
        assert words.lower() in page.lower()
    code, _, error = command("methods", "dp-satt")
    assert code == 2
    assert "did you mean 'dp-sat'" in error


def test_one_option_has_one_type_whichever_method_takes_it():
    types = {}
    for entry in METHODS.values():
        for name, option in entry.options.items():
            kind = option.annotation.__origin__ if hasattr(option.annotation, "__metadata__") else option.annotation
            assert types.setdefault(name, kind) == kind, f"{entry.name}: --{name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_trains_from_the_command_line_with_its_defaults(name, tmp_path):
    words = f"train --task digits-mlp --method {name} --epsilon 8 --delta 1e-5 --sample-rate 0.1 --steps 30 --json"
    done = vestige_command(*words.split(), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["epsilon"] <= 8
    assert result["accuracy"] > 0.15
    verdict = json.loads(vestige_command("verify", str(tmp_path / "run"), "--json").stdout)
    assert verdict["verified"]
    assert verdict["epsilon"] == pytest.approx(result["epsilon"])


@pytest.mark.parametrize("name", ["dp-sgd", "fo-dp-sgd", "dpsgd-br"])
def test_any_method_may_move_by_another_optimizer(name):
    """The step is that optimizer's, on the method's own releases; momentum stays with SGD."""
    adam, plain = vestige.make_method(name, optimizer="adam"), vestige.make_method(name)
    assert adam.rule.optimizer is torch.optim.Adam
    assert (adam.memory, adam.gate, adam.clip) == (plain.memory, plain.gate, plain.clip)
    assert vestige.make_method(name, momentum=0.3, optimizer="SGD").rule == vestige.make_method(name, momentum=0.3).rule
    with pytest.raises(ValueError, match=r"momentum=0\.9 belongs to sgd, not to the optimizer adam"):
        vestige.make_method(name, momentum=0.9, optimizer="adam")
    with pytest.raises(ValueError, match="optimizer='adamm' is unknown; choose from .*adam, "):
        vestige.make_method(name, optimizer="adamm")
