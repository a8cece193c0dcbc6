"""How are images read? From the four arrays as .npz or .npy, or from a dataset's original files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vestige.tasks.readers_common import ARRAYS, LabelledTensors, existing, first, where

Arrays = dict[str, NDArray[Any]]
STANDARDISED = "Each image is standardised by its own mean and deviation: the data are asked nothing for it."


def read_images(
    path: Path | None,
    *,
    shape: tuple[int, ...],
    classes: int,
    files: tuple[str, ...],
    originals: Callable[[Path], Arrays | None],
    bundled: Callable[[], Arrays] | None = None,
    scale: Callable[[Tensor], Tensor],
) -> tuple[LabelledTensors, LabelledTensors]:
    """Both splits as float images [N, channels, height, width] and integer labels."""
    arrays = bundled() if path is None and bundled else _find_arrays(existing(path), files, originals)
    place = where(path)
    _check_arrays(arrays, shape, classes, place)
    if (arrays["x_train"].dtype == np.uint8) != (arrays["x_test"].dtype == np.uint8):
        raise ValueError(
            f"{place}: x_train is {arrays['x_train'].dtype} and x_test {arrays['x_test'].dtype}; use one dtype"
        )
    train, test = (
        (_as_images(arrays[f"x_{split}"], scale), torch.from_numpy(arrays[f"y_{split}"].astype(np.int64)))
        for split in ("train", "test")
    )
    return train, test


def whole_images(
    path: Path | None,
    *,
    files: tuple[str, ...],
    originals: Callable[[Path], Arrays | None],
    bundled: Callable[[], Arrays] | None = None,
) -> tuple[object, object]:
    """The training images and labels as read from the file."""
    arrays = bundled() if path is None and bundled else _find_arrays(existing(path), files, originals)
    return arrays["x_train"], arrays["y_train"]


def standardised(images: Tensor) -> Tensor:
    """Each image, [N, channels, height, width], less its own mean and divided by its own deviation; an image without
    contrast is not magnified: the deviation counts as at least 1 / sqrt(its numbers).

    Formal guarantees: an image is a function of itself alone, so nothing is asked of the data.
    """
    rows = images.flatten(1)
    deviation = rows.std(dim=1, keepdim=True, correction=0).clamp(min=rows.shape[1] ** -0.5)
    return ((rows - rows.mean(dim=1, keepdim=True)) / deviation).view_as(images)


def _as_images(array: NDArray[Any], scale: Callable[[Tensor], Tensor]) -> Tensor:
    with np.errstate(over="ignore"):  # values beyond float32 become infinity: the engine zeroes such an example
        images = torch.from_numpy(array.astype(np.float32))
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return scale(images) if array.dtype == np.uint8 else images


def _check_arrays(arrays: Arrays, shape: tuple[int, ...], classes: int, place: str) -> None:
    for split in ("train", "test"):
        images, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise ValueError(
                f"{place}: x_{split} is {images.dtype}; images are uint8 (0 to 255) or float (already scaled)"
            )
        if images.shape[1:] != shape:
            wanted = ", ".join(map(str, ("N", *shape)))
            raise ValueError(f"{place}: x_{split} has shape {images.shape}; this task reads images of shape ({wanted})")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(
                f"{place}: y_{split} is {labels.dtype} of shape {labels.shape}; labels are integers of shape (N,)"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"{place}: x_{split} has {len(images)} images but y_{split} {len(labels)} labels; give one each"
            )
        if len(images) == 0:
            raise ValueError(f"{place}: x_{split} is empty; give at least one example")
        if labels.min() < 0 or labels.max() >= classes:
            wrong = labels[(labels < 0) | (labels >= classes)][0]
            raise ValueError(f"{place}: y_{split} holds label {wrong}; this task's labels are 0 to {classes - 1}")


def _find_arrays(path: Path, files: tuple[str, ...], originals: Callable[[Path], Arrays | None]) -> Arrays:
    if path.is_file():
        return _from_npz(path)
    named = [path / f"{name}.npz" for name in files if (path / f"{name}.npz").is_file()]
    archives = named or sorted(path.glob("*.npz"))
    if named or len(archives) == 1:
        return _from_npz(archives[0])
    if all((path / f"{name}.npy").is_file() for name in ARRAYS):
        return {name: _from_npy(path / f"{name}.npy") for name in ARRAYS}
    found = originals(path)
    if found is not None:
        return found
    raise ValueError(
        f"{where(path)}: the folder holds neither {files[0]}.npz, nor one single .npz, nor the four arrays as .npy, "
        f"nor the dataset's original files; give one of these"
    )


def _from_npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive]
            if not missing:
                return {name: archive[name] for name in ARRAYS}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{where(path)}: not a readable .npz archive of plain arrays; save it with numpy.savez"
        ) from error
    raise ValueError(f"{where(path)}: the archive has no {missing[0]!r}; it must hold {', '.join(ARRAYS)}")


def _from_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{where(path)}: not a readable .npy of a plain array; save it with numpy.save") from error


# --- the datasets' original files ------------------------------------------------------------------------------------


def mnist_files(folder: Path) -> Arrays | None:
    """The four idx files, gzipped or not, as published."""
    stems = {
        "x_train": "train-images-idx3-ubyte",
        "y_train": "train-labels-idx1-ubyte",
        "x_test": "t10k-images-idx3-ubyte",
        "y_test": "t10k-labels-idx1-ubyte",
    }
    paths = {key: first(folder / stem, folder / f"{stem}.gz") for key, stem in stems.items()}
    found = {key: path for key, path in paths.items() if path is not None}
    return {key: _from_idx(path) for key, path in found.items()} if len(found) == len(stems) else None


def _from_idx(path: Path) -> NDArray[Any]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where(path)}: not a readable gzip file; download it again") from error
    dimensions = content[3] if len(content) > 3 else 0
    shape = tuple(int.from_bytes(content[4 * k : 4 * k + 4]) for k in range(1, 1 + dimensions))
    # idx: two zero bytes, the element type (8 is unsigned byte), the number of dimensions, each dimension, the bytes
    if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * dimensions + prod(shape):
        raise ValueError(f"{where(path)}: not a whole idx file of unsigned bytes; download it again")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def cifar_files(folder: Path, *, train: str, test: str, label_bytes: int) -> Arrays | None:
    """The binary version: records of `label_bytes` labels, the finest last, and 3 x 32 x 32 pixels."""
    batches, tests = sorted(folder.glob(train)), sorted(folder.glob(test))
    if not batches or not tests:
        return None
    x_train, y_train = _from_records(batches, label_bytes)
    x_test, y_test = _from_records(tests, label_bytes)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _from_records(paths: list[Path], label_bytes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    size = label_bytes + 3 * 32 * 32
    for path in paths:
        if path.stat().st_size % size:
            raise ValueError(f"{where(path)}: not whole records of {size} bytes; download the binary version again")
    records = np.concatenate([np.fromfile(path, dtype=np.uint8).reshape(-1, size) for path in paths])
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, records[:, label_bytes - 1]


def no_files(folder: Path) -> None:
    """A dataset whose original files we do not read."""
    return None


def bundled_digits() -> Arrays:
    """scikit-learn's digits; every fifth example is the test set, whatever the seed. Its file is read without importing
    scikit-learn, which takes more than a second."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ValueError(
            "task='digits': scikit-learn, which holds the images, is not installed: pip install scikit-learn"
        )
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",").astype(np.int64)
    images, labels = rows[:, :-1].reshape(-1, 8, 8).astype(np.uint8), rows[:, -1]
    test = np.arange(len(labels)) % 5 == 0
    return {
        "x_train": images[~test],
        "y_train": labels[~test],
        "x_test": images[test],
        "y_test": labels[test],
    }
