"""Where are features kept? In the user's cache, by what they were computed from, so that they are computed once."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def cached(images: Tensor, kind: str, how: str, compute: Callable[[Tensor], Tensor], rows: int = 500) -> Tensor:
    """`compute` of these images, so many rows at a time; read from the cache if it was computed before.

    `how` says all that decides the features besides the images. The cache holds private data in another form, so only
    its owner may read it.
    """
    folder = Path(os.environ.get("VESTIGE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vestige")
    kept = folder.expanduser() / f"{kind}-{_fingerprint(images, how)}.npy"
    _check_own(kept.parent)
    found = _read(kept, len(images))
    if found is None:
        logging.getLogger("vestige").warning(
            "computing %s features of %d images into %s", kind, len(images), kept.parent
        )
        with torch.no_grad():
            _keep(kept, len(images), (compute(part).cpu() for part in images.split(rows)))
        found = _read(kept, len(images))
        assert found is not None
    return torch.from_numpy(found)


def _check_own(folder: Path) -> None:
    """Refuse a folder that other users may write to: they could replace the features."""
    if folder.exists() and folder.stat().st_mode & stat.S_IWOTH:
        raise ValueError(f"VESTIGE_CACHE={str(folder)!r} can be written by anybody: chmod 700, or take another folder")


def _read(path: Path, rows: int) -> object:
    """What was kept; None if there is nothing, or a file that was damaged."""
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = found.dtype == np.float32 and found.ndim >= 2 and len(found) == rows
    return found if whole else None


def _fingerprint(images: Tensor, how: str) -> str:
    digest = hashlib.sha256(f"{how} {tuple(images.shape)}".encode())
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()[:32]


def _keep(path: Path, rows: int, parts: Iterator[Tensor]) -> None:
    """Write an .npy part by part, whole or not at all, readable by its owner only.

    Its name is a hash of the images, so no message has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as unfinished:
            try:
                for index, part in enumerate(parts):
                    if index == 0:
                        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, *part.shape[1:])}
                        np.lib.format.write_array_header_1_0(unfinished, header)
                    unfinished.write(part.numpy().astype("<f4").tobytes())
                unfinished.flush()
                os.fsync(unfinished.fileno())
                os.replace(unfinished.name, path)
            except BaseException:
                os.unlink(unfinished.name)
                raise
    except OSError as error:
        raise ValueError(
            f"cannot write into {path.parent} ({error.strerror}): set VESTIGE_CACHE to a folder with room"
        ) from error


def fastest() -> str:
    """Where features are computed: a GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
