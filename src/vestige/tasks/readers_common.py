"""What do all readers of data share? What they return, and how they refuse files that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Refuse to judge by the training data themselves: an accuracy on them is computed without noise."""
    there = test is not None and Path(test).exists() and Path(data).exists()
    if there and Path(data).samefile(test):  # type: ignore[arg-type]
        raise ValueError(
            f"test={str(test)!r} is the training data: an accuracy on them is no release; give public rows"
        )
