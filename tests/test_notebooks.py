"""Do the notebooks run, from their first cell to their last?"""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def cells(name, kind="code"):
    page = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == kind]


def executed(name):
    """The names that a notebook leaves behind."""
    found = {"__name__": "notebook"}
    for cell in cells(name):
        exec(compile(cell, name, "exec"), found)
    return found


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])], ids=str
)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capsys):
    if name.startswith("2_"):
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    found = executed(name)
    said = capsys.readouterr().out
    if name.startswith("1_"):
        assert found["verified"] == found["training"].guarantee().epsilon <= 3
    elif name.startswith("2_"):
        assert "## Differential privacy" in said
        assert found["trainer"].guarantee().epsilon <= 3
    elif name.startswith("3_"):
        assert 2.9 < found["engine"].get_epsilon(delta=1e-5) <= 3
    elif name.startswith("4_"):
        assert {row["method"] for row in found["found"]} == {"dp-sgd", "fo-dp-sgd"}
    else:
        assert found["result"].audit.epsilon_lower_bound <= found["training"].guarantee().epsilon


def test_there_are_five_of_them_without_outputs_and_a_page_names_each():
    assert len(NAMES) == 5
    page = (FOLDER.parent.parent / "docs" / "getting-started.md").read_text()
    for name in NAMES:
        assert f"../examples/notebooks/{name}.ipynb" in page
        assert all(not cell.get("outputs") for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"])
        assert cells(name, "markdown")[0].startswith("# ")
