"""What do all readers of data share? What they return, and how they refuse files that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from torch import Tensor

from vestige.tasks.read_csv_jsonl_parquet import read_columns

LabelledTensors = tuple[Tensor, Tensor]
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def where(path: Path | None) -> str:
    return f"--data={path}"


def existing(path: Path | None) -> Path:
    if path is None or not path.exists():
        raise ValueError(
            f"{where(path)}: no such file or folder; give a FILE.npz holding {', '.join(ARRAYS)}, or a folder"
        )
    return path


def users_of(data: str | Path | None, name: str, rows: int | None = None) -> Sequence[object]:
    """Whose each training row is: a column of a table, or an array of a FILE.npz, with an id for each of its `rows`."""
    path = existing(None if data is None else Path(data))
    if path.suffix != ".npz":
        return read_columns(path, {"user_column": name})["user_column"]
    with np.load(path, allow_pickle=False) as arrays:
        if name not in arrays:
            raise ValueError(f"user_column={name!r} is no array of {where(path)}, which holds {', '.join(arrays)}")
        found = arrays[name]
    if found.ndim != 1 or rows not in (None, len(found)):
        raise ValueError(
            f"user_column={name!r} has the shape {list(found.shape)}, where there are {rows} training rows; give an "
            "array with an id for each of them"
        )
    return found


def first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def require_public(test: str | Path | None, data: str | Path) -> None:
    """Refuse to judge by the training data themselves: an accuracy on them is computed without noise.

    A copy of the file, or its lines in another order, are the same data; a part of them is not found."""
    if test is not None and same_rows(data, test):
        raise ValueError(
            f"test={str(test)!r} is the training data: an accuracy on them is no release; give public rows"
        )


def same_rows(data: str | Path, other: str | Path) -> bool:
    """Whether two paths are one, or two files of the same lines in any order."""
    first, second = Path(data), Path(other)
    if first.exists() and second.exists() and first.samefile(second):
        return True
    if not (first.is_file() and second.is_file()):
        return False
    sizes = sorted(path.stat().st_size for path in (first, second))
    return 0 < sizes[1] <= 2 * sizes[0] + 2 and _sum_of_lines(first) == _sum_of_lines(second)  # ends may be "\r\n"


def _sum_of_lines(path: Path) -> int:
    """The sum of the lines' hashes, blank ones and their ends left out."""
    with path.open("rb") as file:
        lines = (line.rstrip(b"\r\n") for line in file)
        return sum(int.from_bytes(sha256(line).digest()) for line in lines if line)
