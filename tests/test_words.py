"""Do identifiers use the field's words? Names that were replaced do not come back."""

from __future__ import annotations

import re
from pathlib import Path

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


def defined() -> dict[str, list[str]]:
    """Where each class, function and module is defined."""
    found: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in {path.stem, *re.findall(r"^ *(?:async )?(?:def|class) (\w+)", path.read_text(), flags=re.M)}:
            found.setdefault(name, []).append(path.relative_to(SOURCE).as_posix())
    return found


def test_a_replaced_name_does_not_come_back():
    found = defined()
    assert "train" in found
    assert not [f"say {REPLACED[word]}, not {word}, in {found[word]}" for word in REPLACED if word in found]
