"""How are the papers' runs kept in a small file? What runs of one setting have in common stands once.

A file has `times`, `paths`, and `settings`: of each what its runs share, among it the steps and epsilons at which they
were evaluated, and a line for each run with its own numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SETTING = ("task", "label", "method", "options", "budget", "stage", "steps", "lr")


def read(path: Path) -> Row:
    """`times`, `paths` and `rows` of a file, of results too, where every row stands whole."""
    found: Row = json.loads(path.read_text())
    if "settings" in found:
        found["rows"] = [whole(each["shared"], run) for each in found.pop("settings") for run in each["runs"]]
    return found


def whole(shared: Row, run: Row) -> Row:
    row = shared | run
    at = row.pop("curve_at", None)
    if at is not None:
        row["curve"] = [
            [step, accuracy, epsilon, loss]
            for (step, epsilon), (accuracy, loss) in zip(
                zip(*at, strict=True), zip(*row["curve"], strict=True), strict=True
            )
        ]
    return row


def write(path: Path, rows: list[Row], times: Any, paths: Any) -> None:
    settings: dict[str, list[Row]] = {}
    for row in rows:
        key = json.dumps([row.get(name) for name in SETTING], sort_keys=True)
        settings.setdefault(key, []).append(short(row))
    lines = []
    for runs in settings.values():
        shared = {name: value for name, value in runs[0].items() if all(run.get(name) == value for run in runs)}
        own = [{name: value for name, value in run.items() if name not in shared} for run in runs]
        inside = ",\n".join(map(compact, own))
        lines.append(f'{{"shared": {compact(shared)}, "runs": [\n{inside}]}}')
    whole_file = ",\n".join(lines)
    path.write_text(
        f'{{"times": {json.dumps(times)},\n"paths": {json.dumps(paths)},\n"settings": [\n{whole_file}\n]}}\n'
    )


def short(row: Row) -> Row:
    """A row whose curve, of steps, accuracies, epsilons and losses, has what is the same for all seeds apart."""
    if not row["curve"]:
        return row
    steps, accuracies, epsilons, losses = zip(*row["curve"], strict=True)
    return row | {"curve_at": [steps, epsilons], "curve": [accuracies, losses]}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
