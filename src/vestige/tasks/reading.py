"""What do all readers of data share? What they return, and how they refuse files that do not exist."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

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


def first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def require_public(test: str | Path | None, data: str | Path) -> None:
    """Refuse to judge by the training data themselves: an accuracy on them is computed without noise."""
    there = test is not None and Path(test).exists() and Path(data).exists()
    if there and Path(data).samefile(test):  # type: ignore[arg-type]
        raise ValueError(
            f"test={str(test)!r} is the training data: an accuracy on them is no release; give public rows"
        )
