"""Do imports go downward only, and does data stay in its room?"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vestige
from vestige.registry import METHODS

ROOT = Path(vestige.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def named(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("vestige", *(part for part in parts if part != "__init__")))


KNOWN = {named(path): path for path in FILES if path != ROOT / "__init__.py"}
"""By the name it is imported by; the package itself names its rooms without importing them."""


def rooms(path: Path) -> set[str]:
    """The package's own modules that a file imports directly."""
    return imports(path) & KNOWN.keys()


def reach(path: Path) -> set[str]:
    """Everything of the package that a file imports, directly or not."""
    seen: set[str] = set()
    queue = [path]
    while queue:
        for name in rooms(queue.pop()) - seen:
            seen.add(name)
            queue.append(KNOWN[name])
    return seen


def test_training_and_accounting_never_meet():
    assert "vestige.accounting" not in reach(ROOT / "training.py")
    assert "vestige.training" not in reach(ROOT / "accounting.py")


def test_only_accounting_knows_dp_accounting():
    users = {p.stem for p in FILES if any(name.split(".")[0] == "dp_accounting" for name in imports(p))}
    assert "accounting" in users
    assert users <= {"accounting", "profiles", "trials"}


@pytest.mark.parametrize(
    "room", ["memory", "spectral", "groups", "probes", "rules", "learning_rate", "layout", "method", "moving"]
)
def test_what_remembers_and_moves_never_sees_data(room):
    seen = reach(ROOT / f"{room}.py")
    assert not {"vestige.curator", "vestige.asking", "vestige.tasks", *(f"vestige.{each}" for each in DATA)} & seen


@pytest.mark.parametrize(
    "room", ["questions", "accounting", "profiles", "trials", "trial_prices", "ledger", "planning"]
)
def test_what_prices_never_sees_data(room):
    assert not {"vestige.curator", "vestige.asking", "vestige.tasks"} & reach(ROOT / f"{room}.py")


DATA = {"images", "reviews", "features", "datasets", "recipes", "reading"}


def test_only_the_rooms_behind_tasks_know_files_of_data():
    for path in FILES:
        if path.stem not in DATA:
            text = path.read_text()
            assert "np.load(" not in text, path
            assert "load_digits" not in text, path
        if path.stem not in {*DATA, "tasks"}:
            assert not {f"vestige.{each}" for each in DATA} & rooms(path), path


REPORT = {"report", "report_words", "report_privacy", "pictures", "drawing", "looks", "markup"}


@pytest.mark.parametrize("room", sorted(REPORT))
def test_the_report_reads_records_and_knows_nothing_else_of_the_package(room):
    assert reach(ROOT / f"{room}.py") <= {f"vestige.{each}" for each in REPORT}
    assert not any(name.split(".")[0] == "torch" for name in imports(ROOT / f"{room}.py"))


def test_there_is_no_circle():
    for name, path in KNOWN.items():
        assert name not in reach(path), name


def test_the_package_is_imported_without_torch_and_has_all_its_names():
    code = (
        "import sys, vestige\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(vestige.__all__) <= set(dir(vestige))\n"
        "assert vestige.accounting.epsilon and 'torch' not in sys.modules\n"
        "assert all(getattr(vestige, name) is not None for name in vestige.__all__)\n"
        "assert not hasattr(vestige, 'no_such_room') and not hasattr(vestige, '__path_to_nothing__')\n"
        "from vestige import *\n"
        "assert train is vestige.api.train\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("room", ["method", "methods.adam", "jobs", "engine"])
def test_whoever_looks_a_method_up_finds_them_all(room):
    code = f"import vestige.{room}\nfrom vestige.registry import METHODS\nprint(*METHODS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == list(METHODS)
    assert len(METHODS) > 20
    users = {path.stem for path in FILES if "vestige.method.METHODS" in imports(path)}
    assert users == {"registry"}, "elsewhere it may not be full"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_says_which_question_it_answers(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
