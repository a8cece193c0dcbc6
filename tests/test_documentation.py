"""Does what the documentation shows really run?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_link_of_the_documentation_leads_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
