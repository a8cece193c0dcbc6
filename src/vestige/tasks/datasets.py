"""Which datasets are there, and how is each read?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from vestige.tasks.read_images import (
    Arrays,
    bundled_digits,
    cifar_files,
    mnist_files,
    no_files,
    read_images,
    whole_images,
)
from vestige.tasks.read_reviews import BAG, BUCKETS, LENGTH, read_bags, read_reviews, whole_reviews
from vestige.tasks.readers_common import LabelledTensors

PIXELS = "Images are scaled by public constants only: (pixel / 255 - 0.5) / 0.5; float images are taken as they are."


@dataclass(frozen=True)
class Dataset:
    """A named collection: `read(path)` gives its training and test examples; the path is None where none is needed."""

    name: str
    title: str
    classes: int
    read: Callable[[Path | None], tuple[LabelledTensors, LabelledTensors]]
    needs_data: bool
    notes: str
    rows: Callable[[Path | None], tuple[object, object]]
    """The training rows as read from the file, before anything is scaled or cut: inputs and labels."""
    images: bool = True


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
    originals: Callable[[Path], Arrays | None] = no_files,
    notes: str = "",
) -> Dataset:
    read = partial(read_images, shape=shape, classes=classes, files=files, originals=originals, scale=_from_bytes)
    rows = partial(whole_images, files=files, originals=originals)
    return Dataset(name, title, classes, read, needs_data=True, notes=f"{PIXELS} {notes}".strip(), rows=rows)


DIGITS = Dataset(
    "digits",
    "scikit-learn's digits (8x8)",
    10,
    partial(
        read_images,
        shape=(8, 8),
        classes=10,
        files=("digits",),
        originals=no_files,
        bundled=bundled_digits,
        scale=_from_sixteenths,
    ),
    needs_data=False,
    notes="Pixels are divided by 16; every fifth example is the test set.",
    rows=partial(whole_images, files=("digits",), originals=no_files, bundled=bundled_digits),
)

MNIST = _image_set("mnist", "MNIST (28x28)", (28, 28), 10, files=("mnist",), originals=mnist_files)
FMNIST = _image_set(
    "fmnist", "Fashion-MNIST (28x28)", (28, 28), 10, files=("fmnist", "fashion_mnist"), originals=mnist_files
)
CIFAR10 = _image_set(
    "cifar10",
    "CIFAR-10 (32x32x3)",
    (32, 32, 3),
    10,
    files=("cifar10", "cifar10_7k"),
    originals=partial(cifar_files, train="data_batch_*.bin", test="test_batch.bin", label_bytes=1),
)
CIFAR100 = _image_set(
    "cifar100",
    "CIFAR-100 (32x32x3)",
    (32, 32, 3),
    100,
    files=("cifar100", "cifar100_7k"),
    originals=partial(cifar_files, train="train.bin", test="test.bin", label_bytes=2),
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
    read_reviews,
    needs_data=True,
    notes=f"The first {LENGTH} words, each hashed into {BUCKETS} buckets: no vocabulary is learned from the texts.",
    rows=whole_reviews,
    images=False,
)
IMDB_BAGS = Dataset(
    "imdb",
    "IMDb reviews",
    2,
    read_bags,
    needs_data=True,
    notes=f"All words, hashed into {BAG} signed numbers of norm 1: neither a vocabulary nor frequencies are learned.",
    rows=whole_reviews,
    images=False,
)
