"""Do imports go downward only, and does data stay behind its wall?"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import vestige
from vestige.methods.registry import METHODS

ROOT = Path(vestige.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

ABOVE: dict[str, str] = {
    "": "",
    # Operators of our own, and losses that run as one.
    "fused": "",
    "accounting": "accounting.meaning accounting.samplings",
    "accounting.meaning": "accounting accounting.samplings accounting.lower_bounds",
    "accounting.samplings": "accounting",
    "accounting.lower_bounds": "",
    # What all runs on one dataset spend: it prices, and holds hashes of rows, never rows.
    "budget": "accounting accounting.meaning",
    "randomness": "",
    # What processes tell each other; of the ledger only what they share of it.
    "processes": "accounting randomness",
    "mechanism.losses": "fused mechanism",
    "mechanism": "randomness mechanism.losses processes",
    "mechanism.users": "randomness mechanism",
    "engines.per_example": "fused",
    # Labels follow what is made of examples, and of a sum over them each one's part.
    "engines.example_axis": "fused engines.per_example",
    "engines": "processes randomness mechanism mechanism.losses engines.per_example engines.example_axis",
    "optim.optimizers": "",
    "optim": "randomness mechanism mechanism.losses optim.optimizers",
    "optim.spectral": "randomness mechanism optim",
    "methods": "randomness mechanism optim optim.optimizers optim.spectral",
    # Features are made of examples by functions of one example, and kept beside the files that were read.
    "tasks": "budget mechanism mechanism.losses tasks.features",
    "tasks.features": "mechanism tasks",
    "training": "budget processes accounting randomness mechanism mechanism.losses engines optim "
    "methods tasks tasks.features accounting.lower_bounds mechanism.users",
    "privacy_engine": "budget processes accounting randomness mechanism mechanism.users mechanism.losses engines "
    "engines.per_example engines.example_axis optim optim.optimizers methods tasks training",
    "priors": "mechanism tasks tasks.features",
    # A recipe is a run's settings by name: it makes runs of the training loop, and plans them.
    "recipes": "accounting mechanism methods tasks tasks.features training",
    # Other libraries' wrappers around a model, and one voice of several processes.
    "integrations": "budget processes accounting mechanism mechanism.users training privacy_engine",
    "finetuning": "budget processes mechanism.losses methods tasks training integrations",
    "compare.stacked": "randomness mechanism mechanism.losses optim methods",
    "compare.report": "",
    "compare": "budget processes accounting randomness mechanism mechanism.losses optim methods tasks training compare.stacked compare.report",
    # It attacks what the others build: the curator and the stack themselves, and runs of the training loop.
    "audit": "budget processes accounting accounting.lower_bounds randomness mechanism mechanism.losses engines optim methods tasks training "
    "compare.stacked",
    # It holds private rows in its curator alone, attacks what it makes, and draws pages of releases.
    "synthesis": "budget accounting accounting.meaning accounting.lower_bounds randomness mechanism mechanism.losses mechanism.users "
    "methods "
    "tasks training "
    "integrations finetuning processes compare.report audit",
    "cli": "budget processes accounting mechanism mechanism.losses engines methods tasks training integrations compare compare.report "
    "cli.models audit recipes synthesis",
    "cli.books": "cli budget tasks compare.report",
    "cli.models": "cli accounting methods training integrations finetuning recipes priors synthesis tasks.features",
}
"""Which packages each package may import, beside itself and the modules of the root."""

SENSITIVE = {
    "vestige.mechanism.examples",
    "vestige.mechanism.curator",
    "vestige.compare.stacked.curator",
    "vestige.synthesis.curator",
}
"""The modules that hold examples."""


NAMES = {
    ".".join(("vestige", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__") for path in FILES
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in NAMES else node.module)
    return found


def named(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("vestige", *(part for part in parts if part != "__init__")))


def package(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


KNOWN = {named(path): path for path in FILES if path not in (ROOT / "__init__.py", ROOT / "__main__.py")}
"""By the name it is imported by; the root package names its modules without importing them, and runs the command."""


@cache
def modules(path: Path) -> set[str]:
    """The package's own modules that a file imports directly."""
    return imports(path) & KNOWN.keys()


@cache
def reach(name: str) -> set[str]:
    """Everything of Vestige that a module imports, directly or not."""
    seen: set[str] = set()
    queue = [KNOWN[f"vestige.{name}"]]
    while queue:
        for found in modules(queue.pop()) - seen:
            seen.add(found)
            queue.append(KNOWN[found])
    return seen


def inside(name: str) -> list[str]:
    """The modules of a package, without `vestige.` in front."""
    return [named(path).removeprefix("vestige.") for path in FILES if package(path) == name and path.stem != "__init__"]


def test_imports_go_downward():
    wrong = {
        f"{name} imports {found}"
        for name, path in KNOWN.items()
        for found in modules(path)
        if package(KNOWN[found]) not in {"", package(path), *ABOVE[package(path)].split()}
    }
    assert not wrong


def test_every_package_has_its_place_and_few_files():
    assert {package(path) for path in FILES} == ABOVE.keys()
    for name in ABOVE:
        assert len(inside(name)) <= 15, name


def test_there_is_no_circle():
    for name in KNOWN:
        assert name not in reach(name.removeprefix("vestige.")), name


def test_training_and_theorems_never_meet():
    assert not any(name.startswith("vestige.accounting") for name in reach("training.loop"))
    assert not any(name.startswith("vestige.training") for each in inside("accounting") for name in reach(each))


def test_other_libraries_of_privacy_are_oracles_of_the_tests_only():
    assert not {name for p in FILES for name in imports(p) if name.split(".")[0] in ("dp_accounting", "opacus")}


def seen_by(names: list[str], *packages: str) -> set[str]:
    """What of these reaches examples, or a module of such a package."""
    return {
        f"{name} reaches {found}"
        for name in names
        for found in reach(name)
        if found in SENSITIVE or found.startswith(packages)
    }


def test_what_remembers_and_moves_never_sees_data():
    packages = ("optim", "optim.optimizers", "optim.spectral", "methods")
    names = [*(name for each in packages for name in inside(each)), "layout", "training.automatic_rate"]
    assert not seen_by([*names, "compare.stacked.learner"], "vestige.tasks", "vestige.training.run")


def test_what_prices_never_sees_data():
    names = ["priced_questions", *inside("accounting"), *inside("budget"), "training.planning"]
    assert not seen_by(names, "vestige.tasks")


def test_only_tasks_knows_files_of_data():
    readers = {f"vestige.{each}" for each in inside("tasks")} - {"vestige.tasks.task", "vestige.tasks.models"}
    for path in FILES:
        if package(path) not in ("tasks", "tasks.features"):
            text = path.read_text()
            assert "np.load(" not in text, path
            assert "load_digits" not in text, path
            assert not readers & modules(path), path


def test_the_report_reads_records_and_imports_nothing_else():
    own = {f"vestige.{each}" for each in inside("compare.report")}
    for name in own:
        assert reach(name.removeprefix("vestige.")) <= {"vestige.compare.report", *own}, name
        assert not any(found.split(".")[0] == "torch" for found in imports(KNOWN[name])), name


def test_the_package_is_imported_without_torch_and_has_all_its_names():
    code = (
        "import sys, vestige\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(vestige.__all__) <= set(dir(vestige))\n"
        "assert vestige.accounting.epsilon and 'torch' not in sys.modules\n"
        "assert vestige.budget.Book and 'torch' not in sys.modules\n"
        "import vestige.privacy_engine.engine\n"  # whoever looks a method up finds them all
        "from vestige.methods.registry import METHODS\n"
        "print(*METHODS)\n"
        "assert all(getattr(vestige, name) is not None for name in vestige.__all__)\n"
        "assert not hasattr(vestige, 'no_such_module') and not hasattr(vestige, '__path_to_nothing__')\n"
        "from vestige import *\n"
        "assert train is vestige.training.run.train\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["methods.adam", "methods.base", "privacy_engine.engine", "training.job"])
def test_whoever_looks_a_method_up_finds_them_all(name):
    code = f"import vestige.{name}\nfrom vestige.methods.registry import METHODS\nprint(*METHODS)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == list(METHODS)
    assert len(METHODS) > 20


def test_every_file_says_which_question_it_answers():
    assert not [named(path) for path in FILES if not ast.get_docstring(parsed(path))]
