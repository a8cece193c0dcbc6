"""How does a file become durable? All at once, or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside `path`, make it durable, then rename: a crash or a full disk leaves the old file whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(f"cannot write {path}: {error.strerror or error}; what was there before is intact") from error
    _sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed inside `write_atomically`."""
    for beside in folder.glob(".*.new"):
        beside.unlink()


def make_folder(path: Path, name: str = "out") -> None:
    """Make the folder that a user asked for in the argument `name`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r} cannot be made: {error.strerror}; choose another folder") from error


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda beside: _write_bytes(beside, text.encode()))


def write_tensors(path: Path, content: Any) -> None:
    """A torch file that loads with `weights_only=True`: tensors, numbers and strings, no code."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, lambda beside: _write_bytes(beside, buffer.getbuffer()))


def read_tensors(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # torch raises many kinds on a torn file
        raise ValueError(
            f"{path} is torn or not a checkpoint ({type(error).__name__}); remove it or restore a copy"
        ) from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _write_bytes(path: Path, content: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
