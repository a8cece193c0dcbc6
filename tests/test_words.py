"""Do identifiers use the field's words? Names that were replaced do not come back."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vestige"
REPLACED = {
    "Rehearsal": "Tracker", "rehearsal": "independence", "Holdings": "ModuleSnapshot", "Calm": "Tracker",
    "Doubt": "NotApart", "Misfit": "UnsupportedUse", "Tape": "Graphs", "Room": "GraphMemoryPool",
    "Part": "Microbatch", "standing": "capture_guards", "Unsteady": "NotCapturable", "Rowless": "NotPerExample",
    "undivided": "outputs", "looks": "host_transfers", "Otherwise": "NotCapturable", "Company": "Rows",
    "entrances": "call_interception", "stand_at": "install_interceptor", "Watched": "TrackedParameter",
    "planted": "canaries", "recorded_ways": "captured_passes",
}  # fmt: skip
"""What was replaced, and by what."""


@cache
def defined() -> dict[str, list[str]]:
    """Where each class, function and module is defined."""
    kinds, found = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef), dict[str, list[str]]()
    for path in SOURCE.rglob("*.py"):
        names = {path.stem} | {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
        for name in names:
            found.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    return found


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_name_does_not_come_back(word):
    assert word not in defined(), f"say {REPLACED[word]}, not {word}, in {defined()[word]}"
