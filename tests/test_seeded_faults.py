"""Is the list of seeded faults up to date? `make faults` shows that the everyday tests catch each of them."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def seeded(bench):
    return bench("seeded_faults")


@cache
def everyday(path: str) -> set[str]:
    """The tests of a file that are not slow as a whole, by name; one of its parameters may be."""
    if not (ROOT / path).is_file():
        return set()
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    marks = [ast.unparse(each) for each in body if isinstance(each, ast.Assign)]
    if any(mark.startswith("pytestmark") and "slow" in mark for mark in marks):
        return set()
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    return {each.name for each in functions if "pytest.mark.slow" not in map(ast.unparse, each.decorator_list)}


@cache
def left_to_the_night(path: str, test: str, case: str) -> bool:
    """Whether the marks `everyday` and `nightly` of a test make one of its cases slow."""
    for each in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(each, ast.FunctionDef) and each.name == test:
            for mark in each.decorator_list:
                kind = ast.unparse(mark).removeprefix("pytest.mark.").partition("(")[0]
                if isinstance(mark, ast.Call) and kind in ("everyday", "nightly"):
                    return (case in [ast.literal_eval(given) for given in mark.args]) == (kind == "nightly")
    return False


def test_there_are_fifty_faults_of_different_names(seeded):
    names = [fault.name for fault in seeded.faults()]
    assert len(names) >= 50
    assert len(set(names)) == len(names)


def test_every_fault_still_applies_to_the_source(seeded):
    for fault in seeded.faults():
        path = ROOT / "src" / "vestige" / fault.file
        assert path.is_file(), f"{fault.name}: there is no {path}"
        assert fault.applied(path.read_text(encoding="utf-8")), fault.name


def test_every_fault_names_everyday_tests_that_are_there(seeded):
    for fault in seeded.faults():
        assert fault.tests, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            function, _, case = name.rstrip("]").partition("[")
            assert function in everyday(path), f"{fault.name}: there is no everyday test {test}"
            assert not case or not left_to_the_night(path, function, case), f"{fault.name}: {test} is not everyday"


def test_a_fault_that_has_no_place_or_several_is_refused(seeded):
    fault = seeded.Fault("name", "file.py", "old", "new", ())
    assert fault.applied("an old line") == "an new line"
    for text in ("another line", "old and old"):
        with pytest.raises(ValueError, match="not once"):
            fault.applied(text)
