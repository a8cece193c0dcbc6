"""Which rows does a file hold, as they stand? All columns of a table, or a dataset's own arrays, for a book to know.

Nothing is scaled, tokenised or left out, so that the same rows in another file have the same hashes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vestige.budget.identity import Hashes, hashes_of
from vestige.budget.spending import Candidates, Provenance
from vestige.tasks.definitions import DEFINITIONS
from vestige.tasks.read_csv_jsonl_parquet import READERS, read_all
from vestige.tasks.task import known, load

SPLITS = (("x_train", "y_train"), ("train_x", "train_y"), ("x", "y"))
"""Names of the private part of an archive; what is called test is public."""


MOST_PARTS = 1000
"""A column with more values names rows, not parts."""


def source_of(task: str | None, data: str | None) -> Provenance | None:
    """What a run of a task on a file asks about; None where a user's own function gave it: then the tensors tell."""
    if task is not None and ".py:" in task:
        return None
    return Provenance(read=lambda key: of_task(task, data, key), of_file=of_file)


def of_task(task: str | None, data: str | None, key: bytes) -> Candidates:
    """The training rows of a task, as its dataset keeps them; and those of the file, if it is a table."""
    found: list[tuple[str, Hashes]] = []
    files = READERS if task is not None else (*READERS, ".npz")  # a task reads an archive as it stands, too
    if data is not None and Path(data).is_file() and Path(data).suffix in files:
        found += of_file(data, key)
    if task is not None and ".py:" in task:
        found.append((task, hashes_of(load(task, data).train, key)))
    elif task is not None:
        known(task)
        rows = DEFINITIONS[task].dataset.rows(None if data is None else Path(data))
        found.append((task, hashes_of(rows, key)))
    if not found:
        raise ValueError(f"data={data!r}: a book is about the rows of a .csv, .jsonl, .parquet or .npz, or of a task")
    return found


def of_file(data: str, key: bytes) -> Candidates:
    """All rows of a table, or the training part of an archive of arrays."""
    path = Path(data)
    if path.suffix == ".npz":
        return [(path.name, hashes_of(_archive(path), key))]
    return [(path.name, hashes_of(read_all(path), key))]


def _archive(path: Path) -> tuple[object, ...]:
    if not path.is_file():
        raise ValueError(f"data={str(path)!r}: there is no such file")
    with np.load(path, allow_pickle=False) as archive:
        names = next((pair for pair in SPLITS if set(pair) <= set(archive.files)), tuple(sorted(archive.files)))
        return tuple(archive[name] for name in names)


def parts_of(data: str | None, task: str | None, column: str) -> list[str]:
    """The part of each row of a table: its value in a column, as text."""
    if task is not None or data is None or Path(data).suffix not in READERS:
        raise ValueError(
            f"part_by={column!r} is a column of a table: give data=FILE ({', '.join(READERS)}) and no task"
        )
    columns = read_all(Path(data))
    if column not in columns:
        raise ValueError(f"part_by={column!r} is no column of {data!r}")
    found = ["" if value is None else str(value).strip() for value in columns[column]]
    if not all(found):
        raise ValueError(
            f"part_by={column!r}: {sum(not each for each in found)} rows have nothing there; name each part"
        )
    if len(set(found)) > MOST_PARTS:
        raise ValueError(
            f"part_by={column!r} has {len(set(found))} values, more than {MOST_PARTS}: choose a coarser one"
        )
    return found
