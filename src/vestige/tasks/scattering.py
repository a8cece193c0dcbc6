"""Which features need no training? Scattering coefficients of images, computed once and cached."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def scattered_grey(images: Tensor) -> Tensor:
    return _scattered(images, _unit)


def scattered_colour(images: Tensor) -> Tensor:
    return _scattered(images, _imagenet)


def _scattered(images: Tensor, rescale: Callable[[Tensor], Tensor]) -> Tensor:
    """Scattering features [N, 81 * channels, height / 4, width / 4], computed once and kept in the user's cache.

    The cache holds private data in another form, so only its owner may read it.
    """
    folder = Path(os.environ.get("VESTIGE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vestige")
    folder = folder.expanduser()
    kept = folder / f"scattering-{_fingerprint(images, rescale.__name__)}.npy"
    if not kept.exists():
        scattering = _scattering(images.shape[-2:])
        logging.getLogger("vestige").warning("computing scattering features of %d images into %s", len(images), kept)
        _keep(kept, len(images), (scattering(rescale(part)).flatten(1, 2) for part in images.split(500)))
    return torch.from_numpy(np.load(kept, mmap_mode="c", allow_pickle=False))


def _fingerprint(images: Tensor, how: str) -> str:
    digest = hashlib.sha256(f"kymatio J=2 L=8 {how} {tuple(images.shape)}".encode())
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()[:32]


def _scattering(size: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    try:
        # not kymatio.torch: that one also imports the 3-D transform, which scipy 1.17 no longer supports
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise ValueError("scattering features need kymatio: pip install 'vestige[scattering]'") from error
    return ScatteringTorch2D(J=2, shape=tuple(size))  # type: ignore[no-any-return]


def _keep(path: Path, rows: int, parts: Iterator[Tensor]) -> None:
    """Write an .npy part by part, whole or not at all, readable by its owner only."""
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
        raise ValueError(f"cannot write {path} ({error.strerror}): set VESTIGE_CACHE to a folder with room") from error


def _unit(images: Tensor) -> Tensor:
    """Back to pixels in [0, 1], as Tramer and Boneh use them for grey images."""
    return images / 2 + 0.5


def _imagenet(images: Tensor) -> Tensor:
    """Standardised by ImageNet's public mean and deviation, as they do for colour images."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (_unit(images) - mean[:, None, None]) / deviation[:, None, None]
