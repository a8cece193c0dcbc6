"""Does what the documentation shows really run?"""

import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import vestige
from vestige.methods.registry import METHODS

ROOT = Path(__file__).parent.parent


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


def test_the_readmes_ten_lines_train_privately(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks((ROOT / "README.md").read_text())[0].replace("steps=500", "steps=12")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    exec(code, {})
    assert "Guarantee(epsilon=2.99" in capsys.readouterr().out
    assert (tmp_path / "my-run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("library", ["vestige", "opacus"])
def test_the_example_runs_with_either_library(library):
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "opacus_or_vestige.py"), library],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    accuracy, epsilon = map(float, re.search(r"accuracy ([\d.]+)% at epsilon ([\d.]+)", done.stdout).groups())
    assert 2.9 < epsilon <= 3.0
    assert accuracy > 50


@mock.patch.dict(METHODS)
def test_the_method_of_the_page_on_adding_one_trains_and_filters_as_it_says(monkeypatch):
    code = "".join(textwrap.dedent(block) for block in blocks((ROOT / "docs" / "adding-a-method.md").read_text()))
    preamble = """
from __future__ import annotations
import torch
from dataclasses import dataclass
from typing import Annotated
from vestige.mechanism.clipping import Flat, Parameters
from vestige.layout import Layout
from vestige.optim.memory import Filtered, State
from vestige.methods.base import Method, Neutral, register
from vestige.methods.options import Bound, Momentum
from vestige.randomness.gaussian import Release
from vestige.optim.rules import sgd
"""
    # Annotations are read by name, so the page needs a module of its own.
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    exec(preamble + code, page.__dict__)

    def final(method):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        data = torch.randn(60, 3), torch.randint(2, (60,))
        given = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 6, "lr": 0.5, "delta": 1e-5, "reproducible": 3}
        list(vestige.train(model, torch.nn.functional.cross_entropy, data, method=method, **given))
        return model.weight.detach()

    assert torch.equal(final(page.half_life(half_life=0.0)), final(vestige.dp_sgd()))
    assert not torch.equal(final("half-life"), final(vestige.dp_sgd()))

    memory = page.HalfLife(2.0)
    releases = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = {"total": torch.zeros(4, dtype=torch.float64), "weight": 0.0}
    for past in range(7):
        filtered = memory.step(page.Release(releases[past], 1.0, 1.0, 0.1), state, {})
        weights = 0.5 ** (torch.arange(past, -1, -1, dtype=torch.float64) / 2)
        torch.testing.assert_close(filtered.direction, weights @ releases[: past + 1] / weights.sum())


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_room_of_the_code_is_on_the_map():
    words = set(re.findall(r"`(\w+)/?`", (ROOT / "docs" / "concepts.md").read_text()))
    rooms = {path.stem for path in Path(vestige.__file__).parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "data"} <= words
