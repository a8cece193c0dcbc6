"""How are files written so that a crash leaves them whole, and how does JSON become a value again?

Atomic writes, an exclusive lock, and dataclasses read from JSON and checked against their type hints.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import types
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a temporary file beside `path`, sync it, then rename it: a crash or full disk leaves the old file whole."""
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
    """Remove the temporary files of processes that were killed inside `write_atomically`."""
    for beside in folder.glob(".*.new"):
        beside.unlink()


def make_folder(path: Path, name: str = "out") -> None:
    """Create the folder that the user gave as the argument `name`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r} cannot be made: {error.strerror}; choose another folder") from error


def lock(handle: int, path: Path) -> None:
    """Lock an open file until it is closed or the process ends; ValueError if another process holds the lock."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # a byte far beyond the content
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise ValueError(f"{path} is in use: another process continues this run; wait for it, or stop it") from None
        raise OSError(f"cannot lock {path}: {error.strerror}; keep it on a file system that can lock") from error


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda beside: _write_bytes(beside, text.encode()))


def write_tensors(path: Path, content: object) -> None:
    """A torch file that loads with `weights_only=True` on any machine: tensors on the CPU, numbers and strings, no
    code."""
    import torch  # here, so that records can be read without torch

    buffer = io.BytesIO()
    torch.save(_on_cpu(content), buffer)
    write_atomically(path, lambda beside: _write_bytes(beside, buffer.getbuffer()))


def _on_cpu(content: Any) -> object:
    """The same with its tensors on the CPU; a state_dict keeps what it says about its modules."""
    if isinstance(content, dict):
        moved = copy(content)  # of its own kind: a scheduler's milestones are a Counter
        for key, value in content.items():
            moved[key] = _on_cpu(value)
        if hasattr(content, "_metadata"):
            moved._metadata = content._metadata  # type: ignore[attr-defined]
        return moved
    if type(content) in (list, tuple):
        return type(content)(map(_on_cpu, content))
    return content.cpu() if hasattr(content, "cpu") else content


def read_tensors(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # torch raises many kinds of error on a torn file
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


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_bytes(path: Path, content: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


T = TypeVar("T")


def read_value(kind: type[T], content: object, name: str) -> T:
    """The dataclass that was written as `content`; ValueError names the field of `name` that is wrong."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_shown(content)}, not an object with named fields")
    hints, needed = _parts(kind)  # type: ignore[arg-type]
    for key in content:
        if key not in hints:
            raise ValueError(f"{name} has an unknown field {key!r}: another version wrote it")
    for key in needed:
        if key not in content:
            raise ValueError(f"{name} lacks the field {key!r}")
    return kind(**{key: _read(hints[key], value, f"{name}: {key}") for key, value in content.items()})


@lru_cache(maxsize=64)
def _parts(kind: Any) -> tuple[dict[str, object], tuple[str, ...]]:
    """The types of a dataclass's fields, and which of them have no default."""
    needed = (each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING)
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}, tuple(needed)


def _read(hint: Any, value: object, name: str) -> object:
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return read_value(hint, value, name)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], each, f"{name}[{place}]") for place, each in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(inner[1], each, f"{name}.{key}") for key, each in value.items()}
    if hint in (Any, object) or _is(hint, value):
        return value
    words = {tuple: "a list", Mapping: "an object", int: "a whole number", float: "a number", bool: "true or false"}
    raise ValueError(f"{name} is {_shown(value)}, not {words.get(origin or hint, 'text')}")


def _is(hint: object, value: object) -> bool:
    """Whether a plain value has its type: an int is a float too, and a bool is neither."""
    if get_origin(hint) is Literal or hint is str:
        return isinstance(value, str)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int) if hint is int else hint is float and isinstance(value, int | float)


def _shown(value: object) -> str:
    line = repr(value)
    return line if len(line) <= 40 else f"{line[:40]}..."
