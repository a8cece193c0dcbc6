"""What is trained on what? A dataset, a model and a loss by name; the only room that knows about files of data."""

from __future__ import annotations

import copy
import gzip
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import tempfile
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vestige import models

Loss = Callable[[Tensor, Tensor], Tensor]
Arrays = dict[str, NDArray[Any]]
Examples = tuple[Tensor, Tensor]

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
PIXELS = "Images are scaled by public constants only: (pixel / 255 - 0.5) / 0.5; float images are taken as they are."


@dataclass(frozen=True)
class Task:
    """What `vestige train --task NAME` needs: `loss(model(inputs), targets)` over `train`, judged on `test`."""

    name: str
    model: nn.Module
    loss: Loss
    train: Examples
    test: Examples
    classes: int
    notes: str


@dataclass(frozen=True)
class Dataset:
    """A named collection: `read(path)` gives its training and test examples; the path is None where none is needed."""

    name: str
    title: str
    classes: int
    read: Callable[[Path | None], tuple[Examples, Examples]]
    needs_data: bool
    notes: str


@dataclass(frozen=True)
class Recipe:
    """A task before its data: what an example becomes, and the model for examples of that shape."""

    dataset: Dataset
    model: str
    build: Callable[[tuple[int, ...], int], nn.Module]
    prepare: Callable[[Tensor], Tensor]
    notes: str = ""


def load(name: str, data: str | Path | None = None, seed: int = 0) -> Task:
    """The task called `name`, its initial weights drawn from `seed` alone.

    `data` is a file or folder for the tasks that need one. `name` may also be `path/to/file.py:function`: that function
    is called, with `data` and `seed` where it takes them, and returns a `Task` or `(model, loss, train, test)`.
    """
    path = None if data is None else Path(data)
    if ".py:" in name:
        return _load_from_file(name, path, seed)
    check(name, data)
    recipe = RECIPES[name]
    (x_train, y_train), (x_test, y_test) = recipe.dataset.read(path)
    x_train, x_test = recipe.prepare(x_train), recipe.prepare(x_test)
    with _public_randomness(seed):
        model = recipe.build(tuple(x_train.shape[1:]), recipe.dataset.classes)
    notes = " ".join(part for part in (recipe.dataset.notes, recipe.notes) if part)
    train, test = (x_train, y_train), (x_test, y_test)
    return Task(name, model, functional.cross_entropy, train, test, recipe.dataset.classes, notes)


def check(name: str, data: str | Path | None = None) -> None:
    """Refuse, before anything is read, a task that cannot be loaded: no such name, or no data where it needs some."""
    if ".py:" in name:
        _python_file(name)
        return
    dataset = _find(name).dataset
    if data is None and dataset.needs_data:
        raise ValueError(f"--data is missing: task {name!r} reads {dataset.title}; give --data FILE.npz or a folder")
    if data is not None and dataset.needs_data:
        _existing(Path(data))


def subject(name: str, data: str | Path | None = None, seed: int = 0) -> tuple[nn.Module, Loss, Any]:
    """The model, loss and training data of a task, unexamined: a user's function may give a loader or a dataset."""
    if ".py:" not in name:
        task = load(name, data, seed)
        return task.model, task.loss, task.train
    made = _made_by_file(name, None if data is None else Path(data), seed)
    if isinstance(made, Task):
        return made.model, made.loss, made.train
    if not (isinstance(made, tuple) and len(made) >= 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"--task={name}: the function must return (model, loss, data, ...)")
    return made[0], made[1], made[2]


def names() -> list[str]:
    """Every task that `load` knows by name."""
    return list(RECIPES)


def describe() -> list[dict[str, str | bool]]:
    """One row per task: `name`, `dataset`, `model`, `needs_data`."""
    return [
        {"name": name, "dataset": r.dataset.title, "model": r.model, "needs_data": r.dataset.needs_data}
        for name, r in RECIPES.items()
    ]


def _find(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    close = get_close_matches(name, RECIPES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(RECIPES)}, or give file.py:function"
    raise ValueError(f"--task={name}: no such task; {hint}")


@contextmanager
def _public_randomness(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that one reaches the accelerators too
        yield


# --- images ----------------------------------------------------------------------------------------------------------


def _read_images(
    path: Path | None,
    *,
    shape: tuple[int, ...],
    classes: int,
    files: tuple[str, ...],
    originals: Callable[[Path], Arrays | None],
    bundled: Callable[[], Arrays] | None = None,
    scale: Callable[[Tensor], Tensor],
) -> tuple[Examples, Examples]:
    """Both splits as float images [N, channels, height, width] and integer labels."""
    arrays = bundled() if path is None and bundled else _find_arrays(_existing(path), files, originals)
    where = _where(path)
    _check_arrays(arrays, shape, classes, where)
    if (arrays["x_train"].dtype == np.uint8) != (arrays["x_test"].dtype == np.uint8):
        raise ValueError(
            f"{where}: x_train is {arrays['x_train'].dtype} and x_test {arrays['x_test'].dtype}; use one dtype"
        )
    train, test = (
        (_as_images(arrays[f"x_{split}"], scale), torch.from_numpy(arrays[f"y_{split}"].astype(np.int64)))
        for split in ("train", "test")
    )
    return train, test


def _as_images(array: NDArray[Any], scale: Callable[[Tensor], Tensor]) -> Tensor:
    with np.errstate(over="ignore"):  # beyond float32 is infinity: the engine zeroes such an example
        images = torch.from_numpy(array.astype(np.float32))
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return scale(images) if array.dtype == np.uint8 else images


def _check_arrays(arrays: Arrays, shape: tuple[int, ...], classes: int, where: str) -> None:
    for split in ("train", "test"):
        images, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if images.dtype != np.uint8 and images.dtype.kind != "f":
            raise ValueError(
                f"{where}: x_{split} is {images.dtype}; images are uint8 (0 to 255) or float (already scaled)"
            )
        if images.shape[1:] != shape:
            wanted = ", ".join(map(str, ("N", *shape)))
            raise ValueError(f"{where}: x_{split} has shape {images.shape}; this task reads images of shape ({wanted})")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(
                f"{where}: y_{split} is {labels.dtype} of shape {labels.shape}; labels are integers of shape (N,)"
            )
        if len(images) != len(labels):
            raise ValueError(
                f"{where}: x_{split} has {len(images)} images but y_{split} {len(labels)} labels; give one each"
            )
        if len(images) == 0:
            raise ValueError(f"{where}: x_{split} is empty; give at least one example")
        if labels.min() < 0 or labels.max() >= classes:
            wrong = labels[(labels < 0) | (labels >= classes)][0]
            raise ValueError(f"{where}: y_{split} holds label {wrong}; this task's labels are 0 to {classes - 1}")


def _where(path: Path | None) -> str:
    return f"--data={path}"


def _existing(path: Path | None) -> Path:
    if path is None or not path.exists():
        raise ValueError(
            f"{_where(path)}: no such file or folder; give a FILE.npz holding {', '.join(ARRAYS)}, or a folder"
        )
    return path


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
        f"{_where(path)}: the folder holds neither {files[0]}.npz, nor one single .npz, nor the four arrays as .npy, "
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
            f"{_where(path)}: not a readable .npz archive of plain arrays; save it with numpy.savez"
        ) from error
    raise ValueError(f"{_where(path)}: the archive has no {missing[0]!r}; it must hold {', '.join(ARRAYS)}")


def _from_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{_where(path)}: not a readable .npy of a plain array; save it with numpy.save") from error


# --- the datasets' original files ------------------------------------------------------------------------------------


def _mnist_files(folder: Path) -> Arrays | None:
    """The four idx files, gzipped or not, as published."""
    stems = {
        "x_train": "train-images-idx3-ubyte",
        "y_train": "train-labels-idx1-ubyte",
        "x_test": "t10k-images-idx3-ubyte",
        "y_test": "t10k-labels-idx1-ubyte",
    }
    paths = {key: _first(folder / stem, folder / f"{stem}.gz") for key, stem in stems.items()}
    found = {key: path for key, path in paths.items() if path is not None}
    return {key: _from_idx(path) for key, path in found.items()} if len(found) == len(stems) else None


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _from_idx(path: Path) -> NDArray[Any]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{_where(path)}: not a readable gzip file; download it again") from error
    dimensions = content[3] if len(content) > 3 else 0
    shape = tuple(int.from_bytes(content[4 * k : 4 * k + 4]) for k in range(1, 1 + dimensions))
    # idx: two zero bytes, the element type (8 is unsigned byte), the number of dimensions, each dimension, the bytes
    if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * dimensions + prod(shape):
        raise ValueError(f"{_where(path)}: not a whole idx file of unsigned bytes; download it again")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _cifar_files(folder: Path, *, train: str, test: str, label_bytes: int) -> Arrays | None:
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
            raise ValueError(f"{_where(path)}: not whole records of {size} bytes; download the binary version again")
    records = np.concatenate([np.fromfile(path, dtype=np.uint8).reshape(-1, size) for path in paths])
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, records[:, label_bytes - 1]


def _no_files(folder: Path) -> None:
    """A dataset whose original files we do not read."""
    return None


def _bundled_digits() -> Arrays:
    """scikit-learn's digits; every fifth example is the test set, whatever the seed."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    test = np.arange(len(digits.target)) % 5 == 0
    images = digits.images.astype(np.uint8)
    return {
        "x_train": images[~test],
        "y_train": digits.target[~test],
        "x_test": images[test],
        "y_test": digits.target[test],
    }


# --- reviews ---------------------------------------------------------------------------------------------------------

BUCKETS, LENGTH = 20_000, 80
LABELS = {"neg": 0, "pos": 1}


def _read_reviews(path: Path | None) -> tuple[Examples, Examples]:
    """Both splits as token numbers [N, LENGTH] and labels (1 is positive)."""
    reviews: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for split, text, label in _reviews(_existing(path)):
        reviews[split].append((text, label))
    for split, found in reviews.items():
        if not found:
            raise ValueError(f"{_where(path)}: no review has split {split!r}; give at least one")
    train, test = (
        (torch.tensor([_tokens(text) for text, _ in found]), torch.tensor([label for _, label in found]))
        for found in reviews.values()
    )
    return train, test


def _reviews(path: Path) -> Iterator[tuple[str, str, int]]:
    if path.is_file():
        return _from_lines(path)
    file = _first(path / "imdb.jsonl.gz", path / "imdb.jsonl")
    if file is not None:
        return _from_lines(file)
    if (path / "train" / "pos").is_dir():
        return _from_texts(path)
    raise ValueError(
        f"{_where(path)}: the folder holds neither imdb.jsonl.gz nor the original train/pos; give one of these"
    )


def _from_lines(path: Path) -> Iterator[tuple[str, str, int]]:
    """One JSON object per line, with `split`, `text` and `label`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _from_line(line, f"{_where(path)}: line {number}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{_where(path)}: not a readable .jsonl or .jsonl.gz file; give one review per line"
        ) from error


def _from_line(line: str, where: str) -> tuple[str, str, int]:
    try:
        review = json.loads(line)
        split, text, label = review["split"], review["text"], review["label"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is not a JSON object with 'split', 'text' and 'label'; give one per line") from error
    if split not in ("train", "test") or not isinstance(text, str):
        raise ValueError(f"{where} has split {split!r}; give 'train' or 'test', and a text")
    if label not in LABELS.values():
        raise ValueError(f"{where} has label {label!r}; this task's labels are 0 to 1")
    return split, text, int(label)


def _from_texts(folder: Path) -> Iterator[tuple[str, str, int]]:
    """The original folders: train/pos/*.txt and so on."""
    for split in ("train", "test"):
        for name, label in LABELS.items():
            for file in sorted((folder / split / name).glob("*.txt")):
                yield split, file.read_text(encoding="utf-8"), label


def _tokens(text: str) -> list[int]:
    """The review's first words as numbers, padded with zeros.

    A vocabulary learned from the reviews would itself be a release; a fixed hash of each word asks the data nothing.
    """
    words = re.finditer(r"[a-z0-9']+", text.replace("<br />", " ").lower())
    numbers = [_bucket(word.group()) for word in islice(words, LENGTH)]
    return numbers + [0] * (LENGTH - len(numbers))


@lru_cache(maxsize=1 << 18)
def _bucket(word: str) -> int:
    return 1 + zlib.crc32(word.encode()) % (BUCKETS - 1)


# --- scattering features ---------------------------------------------------------------------------------------------


def _scattered(images: Tensor, rescale: Callable[[Tensor], Tensor]) -> Tensor:
    """Scattering features [N, 81 * channels, height / 4, width / 4], computed once and kept in the user's cache.

    The cache holds private data in another form, so nobody else may read it.
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
    """Write an .npy part by part, whole or not at all, for its owner's eyes."""
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
    """Back to pixels in [0, 1], as Tramer and Boneh take grey images."""
    return images / 2 + 0.5


def _imagenet(images: Tensor) -> Tensor:
    """ImageNet's public mean and deviation, as they take colour images."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (_unit(images) - mean[:, None, None]) / deviation[:, None, None]


# --- a user's own task -----------------------------------------------------------------------------------------------


def _load_from_file(name: str, data: Path | None, seed: int) -> Task:
    made = _made_by_file(name, data, seed)
    return made if isinstance(made, Task) else _task_of(name, made)


def _made_by_file(name: str, data: Path | None, seed: int) -> Any:
    file, function_name = _python_file(name)
    with _public_randomness(seed), _blame(name, "the file cannot be run"):
        function = _function(file, function_name)
    accepted = inspect.signature(function).parameters
    if data is not None and "data" not in accepted:
        raise ValueError(f"--data={data}: {function_name}() takes no argument 'data'; add one or leave --data out")
    arguments: dict[str, Any] = {"data": data, "seed": seed}
    with _public_randomness(seed), _blame(name, f"{function_name}() failed"):
        return function(**{key: value for key, value in arguments.items() if key in accepted})


def _python_file(name: str) -> tuple[Path, str]:
    file, _, function_name = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"--task={name}: no such file; give path/to/file.py:function")
    return Path(file), function_name


@contextmanager
def _blame(name: str, what: str) -> Iterator[None]:
    """An error of the user's own code, in one line that says where in their file it came from."""
    file = Path(name.rpartition(":")[0]).resolve()
    try:
        yield
    except ValueError:
        raise  # already says what is wrong: ours, or the user's own words
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
        where = f" (line {lines[-1]})" if lines else ""
        raise ValueError(f"--task={name}: {what}{where}: {type(error).__name__}: {error}") from error


def _function(file: Path, function_name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"vestige_user_task_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"--task={file}:{function_name}: not a Python file; give path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"--task={file}:{function_name}: the file defines no function {function_name!r}; name one it has"
        )
    return function  # type: ignore[no-any-return]


def _task_of(name: str, made: Any) -> Task:
    if not (isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"--task={name}: the function must return a Task or (model, loss, train, test)")
    model, loss, train, test = made
    for split, pair in (("train", train), ("test", test)):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise ValueError(f"--task={name}: {split} must be a pair of tensors (inputs, targets)")
        if len(pair[0]) != len(pair[1]) or len(pair[0]) == 0:
            raise ValueError(
                f"--task={name}: {split} has {len(pair[0])} inputs and {len(pair[1])} targets; give one each"
            )
    shape = tuple(test[0].shape[1:])
    # the width of the answer: a public fact of the model
    with torch.no_grad(), _blame(name, f"the model cannot take a test example of shape {shape}"):
        classes = copy.deepcopy(model).eval()(test[0][:1]).shape[-1]
    return Task(name, model, loss, tuple(train), tuple(test), classes, f"The user's own task, from {name}.")


# --- the registry ----------------------------------------------------------------------------------------------------


def _from_bytes(images: Tensor) -> Tensor:
    return images.div_(255).sub_(0.5).div_(0.5)


def _from_sixteenths(images: Tensor) -> Tensor:
    return images.div_(16)


def _image_set(
    name: str,
    title: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    files: tuple[str, ...],
    originals: Callable[[Path], Arrays | None] = _no_files,
    notes: str = "",
) -> Dataset:
    read = partial(_read_images, shape=shape, classes=classes, files=files, originals=originals, scale=_from_bytes)
    return Dataset(name, title, classes, read, needs_data=True, notes=f"{PIXELS} {notes}".strip())


DIGITS = Dataset(
    "digits",
    "scikit-learn's digits (8x8)",
    10,
    partial(
        _read_images,
        shape=(8, 8),
        classes=10,
        files=("digits",),
        originals=_no_files,
        bundled=_bundled_digits,
        scale=_from_sixteenths,
    ),
    needs_data=False,
    notes="Pixels are divided by 16; every fifth example is the test set.",
)

MNIST = _image_set("mnist", "MNIST (28x28)", (28, 28), 10, files=("mnist",), originals=_mnist_files)
FMNIST = _image_set(
    "fmnist", "Fashion-MNIST (28x28)", (28, 28), 10, files=("fmnist", "fashion_mnist"), originals=_mnist_files
)
CIFAR10 = _image_set(
    "cifar10",
    "CIFAR-10 (32x32x3)",
    (32, 32, 3),
    10,
    files=("cifar10", "cifar10_7k"),
    originals=partial(_cifar_files, train="data_batch_*.bin", test="test_batch.bin", label_bytes=1),
)
CIFAR100 = _image_set(
    "cifar100",
    "CIFAR-100 (32x32x3)",
    (32, 32, 3),
    100,
    files=("cifar100", "cifar100_7k"),
    originals=partial(_cifar_files, train="train.bin", test="test.bin", label_bytes=2),
)
SVHN = _image_set(
    "svhn",
    "SVHN cropped digits (32x32x3)",
    (32, 32, 3),
    10,
    files=("svhn", "svhn_7k"),
    notes="Several digits come from one photograph: the guarantee is for a digit, not for a photograph.",
)
IMDB = Dataset(
    "imdb",
    "IMDb reviews",
    2,
    _read_reviews,
    needs_data=True,
    notes=f"The first {LENGTH} words, each hashed into {BUCKETS} buckets: no vocabulary is learned from the texts.",
)

GREY, COLOUR = (MNIST, FMNIST), (CIFAR10, CIFAR100, SVHN)
SCATTERING = "Features are normalised by GroupNorm(27), example by example: the data are asked nothing for it."


def _flat(images: Tensor) -> Tensor:
    return images.flatten(1)


def _as_is(examples: Tensor) -> Tensor:
    return examples


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.mlp(prod(shape), classes)


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.cnn(shape[0], shape[1], classes)


def _scattering_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    return (models.scattering_cnn_7 if shape[1] == 7 else models.scattering_cnn_8)(shape[0], classes)


def _scattering_linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.scattering_linear(shape[0], shape[1], classes)


def _recipes() -> Iterator[tuple[str, Recipe]]:
    for dataset in (DIGITS, *GREY, *COLOUR):
        yield f"{dataset.name}-mlp", Recipe(dataset, "tanh MLP, hidden layers 64 and 32", _mlp, _flat)
    for dataset in (*GREY, *COLOUR):
        yield f"{dataset.name}-cnn", Recipe(dataset, "small CNN: GroupNorm and tanh", _cnn, _as_is)
    for dataset in COLOUR:
        yield f"{dataset.name}-resnet18", Recipe(dataset, "ResNet-18, GroupNorm", _for_classes(models.resnet18), _as_is)
        wide = Recipe(dataset, "WRN-16-4, GroupNorm, standardised weights", _for_classes(models.wide_resnet), _as_is)
        yield f"{dataset.name}-wrn16-4", wide
    for dataset in (*GREY, CIFAR10):
        network = models.tanh_cnn_28 if dataset in GREY else models.tanh_cnn_32
        yield f"{dataset.name}-ts", Recipe(dataset, "DPSGD-TS's tanh CNN", _for_classes(network), _as_is)
    for dataset in (*GREY, CIFAR10):
        features = partial(_scattered, rescale=_unit if dataset in GREY else _imagenet)
        cnn = Recipe(dataset, "scattering features, CNN (DPSGD-HF)", _scattering_cnn, features, SCATTERING)
        linear = Recipe(dataset, "scattering features, linear (DPSGD-HF)", _scattering_linear, features, SCATTERING)
        yield from ((f"{dataset.name}-hf", cnn), (f"{dataset.name}-hf-linear", linear))
    yield "imdb-lstm", Recipe(IMDB, "embedding and bidirectional LSTM", _for_classes(models.TextClassifier), _as_is)


def _for_classes(network: Callable[[int], nn.Module]) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: network(classes)


RECIPES: dict[str, Recipe] = dict(_recipes())
