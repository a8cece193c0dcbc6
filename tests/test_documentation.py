"""Does what the documentation shows really run?"""

import re
import subprocess
import sys
import textwrap
import types
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import vestige
from test_architecture import ABOVE
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
    # Annotations are read by name, so the page needs a module of its own.
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    exec(code, page.__dict__)

    def final(method):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        data = torch.randn(60, 3), torch.randint(2, (60,))
        given = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 6, "lr": 0.5, "delta": 1e-5, "reproducible": 3}
        list(vestige.train(model, torch.nn.functional.cross_entropy, data, method=method, **given))
        return model.weight.detach()

    assert torch.equal(final(page.half_life(half_life=0.0)), final(vestige.dp_sgd()))
    assert not torch.equal(final("half-life"), final(vestige.dp_sgd()))
    with pytest.raises(ValueError, match="half_life=-1.0 must be at least 0"):
        vestige.build("half-life", half_life=-1.0)

    memory = page.HalfLife(2.0)
    releases = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state = {"total": torch.zeros(4, dtype=torch.float64), "weight": 0.0}
    for past in range(7):
        filtered = memory.step(page.Release(releases[past], 1.0, 1.0, 0.1), state, {})
        weights = 0.5 ** (torch.arange(past, -1, -1, dtype=torch.float64) / 2)
        torch.testing.assert_close(filtered.direction, weights @ releases[: past + 1] / weights.sum())


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" not in target:
                there = page.parent / target if target else page
                assert there.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def test_every_table_of_results_begins_with_the_command_that_makes_it():
    for page in set((ROOT / "docs" / "results").glob("*.md")) - {ROOT / "docs" / "results" / "README.md"}:
        head = page.read_text().split("```")[:2]
        scripts = re.findall(r"python (bench/\w+\.py)", head[1])
        assert "|" not in head[0], page.name
        assert scripts, page.name
        assert all((ROOT / script).exists() for script in scripts), page.name


def closure(imports):
    """Everything that each package imports, directly or not."""
    reached = {name: set(found) for name, found in imports.items()}
    for middle in reached:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    return reached


def test_the_map_of_packages_is_true():
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert set(ABOVE) - {""} <= set(re.findall(r"`([\w.]+)`", page))

    allowed = {name: set() for name in ABOVE if name and "." not in name}
    for name, above in ABOVE.items():
        if name:  # the packages inside one are drawn as that one
            allowed[name.split(".")[0]] |= {other.split(".")[0] for other in above.split()} - {name.split(".")[0]}
    drawn = {name: set() for name in allowed}
    for line in re.findall(r"```mermaid\n.*?\n(.*?)```", page, flags=re.S)[0].splitlines():
        stops = [stop.replace("&", " ").split() for stop in line.split("-->")]
        for importers, imported in pairwise(stops):
            for importer in importers:
                drawn[importer] |= set(imported)
    assert all(drawn[name] <= allowed[name] for name in drawn)
    assert closure(drawn) == closure(allowed)
