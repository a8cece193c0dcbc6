"""Does a task's name give the right data, model and loss, and does a bad file give one clear line?"""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from vestige import tasks
from vestige.tasks import models
from vestige.tasks.definitions import DEFINITIONS
from vestige.tasks.features import cached_scattering_features
from vestige.tasks.features.starting_weights import Prior, body

SHARED = Path(os.environ.get("VESTIGE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set VESTIGE_DATA to the folder of shared data")
    return path


def arrays(
    shape: tuple[int, ...] = (28, 28), classes: int = 10, train: int = 6, test: int = 4
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(0, 256, (train, *shape), dtype=np.uint8),
        "y_train": random.integers(0, classes, train, dtype=np.uint8),
        "x_test": random.integers(0, 256, (test, *shape), dtype=np.uint8),
        "y_test": random.integers(0, classes, test, dtype=np.uint8),
    }


def saved(folder: Path, **changes: np.ndarray) -> Path:
    path = folder / "images.npz"
    np.savez(path, **{**arrays(), **changes})
    return path


def test_digits_come_without_a_file():
    task = tasks.load("digits-mlp")
    assert (len(task.train[0]), len(task.test[0])) == (1437, 360)
    assert task.train[0].shape[1:] == (64,)
    assert task.train[0].dtype == torch.float32
    assert task.train[1].dtype == torch.int64
    assert task.train[0].min() == 0
    assert task.train[0].max() == 1
    assert task.classes == 10
    assert task.loss(task.model(task.test[0]), task.test[1]).isfinite()


def test_the_split_is_fixed_and_only_the_weights_follow_the_seed():
    zero, again, one = (tasks.load("digits-mlp", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(zero.train[0], one.train[0])
    assert torch.equal(zero.test[1], one.test[1])
    assert torch.equal(zero.model[0].weight, again.model[0].weight)
    assert not torch.equal(zero.model[0].weight, one.model[0].weight)


def test_loading_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tasks.load("digits-mlp", seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_images_are_scaled_by_public_constants(tmp_path):
    images = np.zeros((6, 28, 28), dtype=np.uint8)
    images[0] = 255
    task = tasks.load("mnist-mlp", saved(tmp_path, x_train=images))
    assert torch.equal(task.train[0][0], torch.ones(784))
    assert torch.equal(task.train[0][1], -torch.ones(784))
    assert "public constants" in task.notes


def test_float_images_are_taken_as_they_are_and_may_hold_anything(tmp_path):
    images = np.full((6, 28, 28), 0.25, dtype=np.float64)
    images[0, 0, 0], images[1, 0, 0], images[2, 0, 0] = np.nan, np.inf, 1e300
    task = tasks.load("mnist-mlp", saved(tmp_path, x_train=images, x_test=np.zeros((4, 28, 28))))
    assert task.train[0][0, 0].isnan()
    assert task.train[0][1:3, 0].isinf().all()
    assert torch.equal(task.train[0][3], torch.full((784,), 0.25))


@pytest.mark.parametrize(("name", "classes"), [("cifar10-mlp", 10), ("cifar100-mlp", 100), ("svhn-mlp", 10)])
def test_colour_images(tmp_path, name, classes):
    np.savez(tmp_path / "images.npz", **arrays((32, 32, 3), classes))
    task = tasks.load(name, tmp_path / "images.npz")
    assert task.train[0].shape == (6, 3072)
    assert task.model(task.test[0]).shape == (4, classes)


def test_a_folder_may_hold_the_named_archive_the_only_archive_or_four_arrays(tmp_path):
    expected = tasks.load("fmnist-mlp", saved(tmp_path)).train[0]
    assert torch.equal(tasks.load("fmnist-mlp", tmp_path).train[0], expected)
    other = arrays()
    other["x_train"] = np.zeros_like(other["x_train"])
    np.savez(tmp_path / "fashion_mnist.npz", **other)
    assert torch.equal(tasks.load("fmnist-mlp", tmp_path).train[0], -torch.ones(6, 784))
    (tmp_path / "four").mkdir()
    for name, array in arrays().items():
        np.save(tmp_path / "four" / f"{name}.npy", array)
    assert torch.equal(tasks.load("fmnist-mlp", tmp_path / "four").train[0], expected)


@pytest.mark.parametrize("zipped", [False, True])
def test_original_idx_files(tmp_path, zipped):
    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    for stem, array in zip(stems, arrays().values(), strict=True):
        content = struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.tobytes()
        if zipped:
            (tmp_path / f"{stem}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / stem).write_bytes(content)
    (tmp_path / "npz").mkdir()
    expected = tasks.load("mnist-mlp", saved(tmp_path / "npz"))
    found = tasks.load("mnist-mlp", tmp_path)
    assert torch.equal(found.train[0], expected.train[0])
    assert torch.equal(found.test[1], expected.test[1])


@pytest.mark.parametrize(
    ("name", "classes", "files", "label_bytes"),
    [
        ("cifar10-mlp", 10, ("data_batch_1.bin", "test_batch.bin"), 1),
        ("cifar100-mlp", 100, ("train.bin", "test.bin"), 2),
    ],
)
def test_original_cifar_files(tmp_path, name, classes, files, label_bytes):
    given = arrays((32, 32, 3), classes)
    np.savez(tmp_path / "expected.npz", **given)
    folder = tmp_path / "binary"
    folder.mkdir()
    for file, split in zip(files, ("train", "test"), strict=True):
        images, labels = given[f"x_{split}"].transpose(0, 3, 1, 2), given[f"y_{split}"]
        coarse = [np.full(len(labels), 7, dtype=np.uint8)] * (label_bytes - 1)
        records = np.concatenate([np.stack([*coarse, labels], axis=1), images.reshape(len(labels), -1)], axis=1)
        (folder / file).write_bytes(records.tobytes())
    expected, found = tasks.load(name, tmp_path / "expected.npz"), tasks.load(name, folder)
    assert torch.equal(found.train[0], expected.train[0])
    assert torch.equal(found.train[1], expected.train[1])
    (folder / files[1]).write_bytes(b"torn")
    refused(name, folder, "whole records")


def refused(name: str, data: Path | None, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        tasks.load(name, data)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("--data", *([str(data)] if data else []), *words):
        assert word in message, message


def test_missing_files_and_data(tmp_path):
    refused("mnist-mlp", None, "MNIST", "FILE.npz")
    refused("mnist-mlp", tmp_path / "absent.npz", "no such file")
    refused("mnist-mlp", tmp_path, "mnist.npz", "original files")


def test_files_that_are_not_archives(tmp_path):
    for name, content in (
        ("text.npz", b"hello"),
        ("empty.npz", b""),
        ("torn.npz", saved(tmp_path).read_bytes()[:3000]),
    ):
        (tmp_path / name).write_bytes(content)
        refused("mnist-mlp", tmp_path / name, "not a readable .npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    refused("mnist-mlp", tmp_path / "array.npy", "not a readable .npz")


def test_pickles_are_never_opened(tmp_path):
    images = np.empty(6, dtype=object)
    np.savez(tmp_path / "pickled.npz", **{**arrays(), "x_train": images})
    refused("mnist-mlp", tmp_path / "pickled.npz", "plain arrays")


def test_a_missing_array(tmp_path):
    given = arrays()
    del given["y_test"]
    np.savez(tmp_path / "partial.npz", **given)
    refused("mnist-mlp", tmp_path / "partial.npz", "y_test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": np.zeros((6, 27, 28), np.uint8)}, ("x_train", "(6, 27, 28)", "(N, 28, 28)")),
        ({"x_test": np.zeros((4, 28, 28, 3), np.uint8)}, ("x_test", "(N, 28, 28)")),
        ({"x_train": np.zeros((6, 28, 28), np.int32)}, ("x_train", "int32", "uint8")),
        ({"x_train": np.zeros((6, 28, 28), np.float32)}, ("x_train", "x_test", "one dtype")),
        ({"y_train": np.zeros((6, 1), np.uint8)}, ("y_train", "(6, 1)")),
        ({"y_train": np.zeros(6, np.float32)}, ("y_train", "float32", "integers")),
        ({"y_train": np.zeros(5, np.uint8)}, ("6 images", "5 labels")),
        ({"y_test": np.full(4, 10, np.uint8)}, ("y_test", "label 10", "0 to 9")),
        ({"y_train": np.full(6, -1, np.int64)}, ("y_train", "label -1")),
        ({"x_train": np.zeros((0, 28, 28), np.uint8), "y_train": np.zeros(0, np.uint8)}, ("x_train", "empty")),
        ({"x_train": np.array(3, np.uint8)}, ("x_train", "shape ()")),
    ],
)
def test_malformed_arrays(tmp_path, changes, words):
    refused("mnist-mlp", saved(tmp_path, **changes), *words)


def test_torn_idx_files(tmp_path):
    for stem in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (tmp_path / stem).write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(ValueError, match="whole idx file"):
        tasks.load("mnist-mlp", tmp_path)


def test_unknown_tasks_suggest_the_closest():
    with pytest.raises(ValueError, match=r"--task=minst-mlp.*'mnist-mlp'"):
        tasks.load("minst-mlp")
    with pytest.raises(ValueError, match=r"--task=zzz.*digits-mlp"):
        tasks.load("zzz")


def test_names_and_descriptions():
    rows = tasks.describe()
    assert [row["name"] for row in rows] == tasks.names()
    assert [row["name"] for row in rows if not row["needs_data"]] == ["digits-mlp"]


USER_TASK = """
import torch
from vestige.tasks.task import Task

def four(seed=0):
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    return torch.nn.Linear(5, 3), torch.nn.functional.cross_entropy, (x[2:], y[2:]), (x[:2], y[:2])

def whole(data=None):
    model, loss, train, test = four()
    return Task("mine", model, loss, train, test, 3, str(data))

def wrong():
    return 3

def unpaired():
    model, loss, (x, y), test = four()
    return model, loss, (x[1:], y), test
"""


def test_a_users_own_task(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USER_TASK)
    task, again = tasks.load(f"{file}:four"), tasks.load(f"{file}:four")
    assert task.classes == 3
    assert torch.equal(task.train[0], again.train[0])
    assert torch.equal(task.model.weight, again.model.weight)
    assert tasks.load(f"{file}:whole", tmp_path).notes == str(tmp_path)
    refused(f"{file}:four", tmp_path, "takes no argument 'data'")
    for function, words in (
        ("wrong", "must return"),
        ("unpaired", "5 inputs and 6 targets"),
        ("absent", "no function"),
    ):
        with pytest.raises(ValueError, match=words):
            tasks.load(f"{file}:{function}")
    with pytest.raises(ValueError, match="no such file"):
        tasks.load(f"{tmp_path}/other.py:four")


@pytest.mark.parametrize(
    ("name", "file", "train", "parameters"),
    [
        ("mnist-mlp", "mnist.npz", 60000, 52650),
        ("cifar10-mlp", "cifar10_7k.npz", 5000, 199082),
        ("cifar100-mlp", "cifar100_7k.npz", 5000, 202052),
        ("svhn-mlp", "svhn_7k.npz", 5000, 199082),
    ],
)
@pytest.mark.nightly("cifar10-mlp-cifar10_7k.npz-5000-199082", "svhn-mlp-svhn_7k.npz-5000-199082")
def test_shared_files(name, file, train, parameters):
    task = tasks.load(name, shared(file))
    assert len(task.train[0]) == len(task.train[1]) == train
    assert sum(p.numel() for p in task.model.parameters()) == parameters
    assert torch.equal(tasks.load(name, SHARED).train[1], task.train[1])


def saved_for(name: str, folder: Path) -> Path | None:
    """A tiny file of data for any task."""
    dataset = DEFINITIONS[name].dataset.name
    if dataset == "imdb":
        return reviews(folder)
    if dataset != "digits":
        shape = (28, 28) if dataset in ("mnist", "fmnist") else (32, 32, 3)
        np.savez(folder / "images.npz", **arrays(shape, 100 if dataset == "cifar100" else 10))
        return folder / "images.npz"
    return None


def small_prior(folder):
    """An encoder for images of any size and one or three channels is another one for each: made here."""
    path = folder / "prior.pt"
    with np.load(folder / "images.npz") as found:
        channels = 3 if found["x_train"].ndim == 4 else 1
    model = models.network("wrn10-1", (channels, 8, 8), 2)
    Prior("wrn10-1", channels, body(model), {"made of": "nothing: initial weights"}).save(path)
    return path


def repeats(name):
    """Whether the task is a large network that is there for other images of the same shape too."""
    return name.startswith(("svhn", "cifar100")) and name.endswith(("wrn40-4", "wrn16-4", "resnet18", "least-squares"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if repeats(name) else []) for name in tasks.names()]
)
@pytest.mark.everyday(
    "digits-mlp",
    "mnist-mlp",
    "fmnist-mlp",
    "cifar10-mlp",
    "cifar100-mlp",
    "svhn-mlp",
    "mnist-cnn",
    "fmnist-cnn",
    "cifar10-cnn",
    "cifar100-cnn",
    "svhn-cnn",
    "mnist-ts",
    "fmnist-ts",
    "cifar10-ts",
    "cifar10-hf-least-squares",
    "fmnist-features",
    "imdb-words",
)
def test_every_task_trains_on_its_own_examples(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    data = saved_for(name, tmp_path)
    task = tasks.load(name, data, features=small_prior(tmp_path) if name.endswith("-features") else None)
    inputs, targets = task.train[0][:2], task.train[1][:2]
    answers = task.model(inputs)
    assert answers.shape == (2, task.classes)
    loss = task.loss(answers, targets)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.model.parameters())
    assert task.notes


def test_scattering_features_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    first = tasks.load("mnist-hf", saved(tmp_path))
    assert first.train[0].shape == (6, 81, 7, 7)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".npy"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "cache").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(cached_scattering_features, "Scattering", None)
        again = tasks.load("mnist-hf-linear", saved(tmp_path))
    assert torch.equal(first.train[0], again.train[0])
    other = saved(tmp_path, x_train=np.zeros((6, 28, 28), np.uint8))
    monkeypatch.setattr(cached_scattering_features, "Scattering", None)
    with pytest.raises(TypeError):  # other pixels are other features
        tasks.load("mnist-hf", other)


def test_scattering_says_where_to_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="VESTIGE_CACHE"):
        tasks.load("mnist-hf", saved(tmp_path))


def reviews(folder: Path, *lines: str) -> Path:
    path = folder / "imdb.jsonl.gz"
    given = [{"split": split, "text": f"A {word} film.<br />Truly", "label": label} for split, word, label in REVIEWS]
    path.write_bytes(gzip.compress("\n".join([*map(json.dumps, given), *lines]).encode()))
    return path


REVIEWS = [("train", "fine", 1), ("train", "dull", 0), ("test", "fine", 1), ("test", "dull", 0)]


def test_reviews_are_hashed_by_a_fixed_public_function(tmp_path):
    task = tasks.load("imdb-lstm", reviews(tmp_path))
    assert task.train[0].shape == (2, 80)
    assert task.train[0][0, 0] == 1 + 0xE8B7BE43 % 19_999  # the CRC-32 of "a"
    assert task.train[0][0, :5].tolist() == [11135, 8221, 12485, 13557, 0]  # no later version may number words anew
    assert torch.equal(task.train[0], task.test[0])
    assert task.train[1].tolist() == [1, 0]
    assert task.train[0].max() < 20_000
    assert torch.equal(tasks.load("imdb-lstm", tmp_path).train[0], task.train[0])


def test_reviews_in_their_original_folders(tmp_path):
    for split, word, label in REVIEWS:
        folder = tmp_path / "acl" / split / ("pos" if label else "neg")
        folder.mkdir(parents=True)
        (folder / "0_7.txt").write_text(f"A {word} film.<br />Truly")
    found, expected = tasks.load("imdb-lstm", tmp_path / "acl"), tasks.load("imdb-lstm", reviews(tmp_path))
    assert torch.equal(found.train[0].flip(0), expected.train[0])
    assert found.train[1].tolist() == [0, 1]


def test_malformed_reviews(tmp_path):
    refused("imdb-lstm", None, "IMDb")
    refused("imdb-lstm", tmp_path, "imdb.jsonl.gz")
    refused("imdb-lstm", reviews(tmp_path, "{"), "line 5", "JSON")
    refused("imdb-lstm", reviews(tmp_path, '{"split": "train", "text": "x"}'), "line 5", "label")
    refused("imdb-lstm", reviews(tmp_path, '{"split": "dev", "text": "x", "label": 1}'), "line 5", "'dev'")
    refused("imdb-lstm", reviews(tmp_path, '{"split": "train", "text": "x", "label": 2}'), "line 5", "label 2")
    (tmp_path / "plain.gz").write_bytes(b"not gzip")
    refused("imdb-lstm", tmp_path / "plain.gz", "readable")
    (tmp_path / "one.jsonl").write_text('{"split": "train", "text": "x", "label": 1}')
    refused("imdb-lstm", tmp_path / "one.jsonl", "'test'")


@pytest.mark.slow
def test_shared_reviews():
    task = tasks.load("imdb-lstm", shared("imdb.jsonl.gz"))
    assert task.train[0].shape == task.test[0].shape == (25_000, 80)
    assert task.train[1].float().mean() == 0.5


def test_images_standardised_by_themselves(tmp_path):
    """Against numpy in float64; a flat image is not magnified, and no image depends on another."""
    images = arrays((32, 32, 3))["x_train"]
    images[2] = 7
    path = saved(tmp_path, **arrays((32, 32, 3)) | {"x_train": images})
    found = tasks.load("svhn-mlp", path, standardise=True).train[0].view(6, 3, 32, 32)
    pixels = images.astype(np.float64).transpose(0, 3, 1, 2) / 127.5 - 1
    for index in (0, 1, 3, 4, 5):
        np.testing.assert_allclose(
            found[index], (pixels[index] - pixels[index].mean()) / pixels[index].std(), atol=1e-4
        )
    assert found[2].abs().max() < 1e-3
    alone = saved(tmp_path, **arrays((32, 32, 3)) | {"x_train": images[:1], "y_train": np.zeros(1, np.uint8)})
    assert torch.equal(tasks.load("svhn-mlp", alone, standardise=True).train[0][0], found[0].flatten())
    task = tasks.load("digits-mlp", standardise=True)
    assert "standardised by its own mean" in task.notes
    assert task.test[0].std(dim=1).sub(1).abs().max() < 0.02


def test_only_images_can_be_standardised():
    for name in ("imdb-lstm", "mine.py:task"):
        with pytest.raises(ValueError, match="standardise=True is for the image tasks"):
            tasks.load(name, standardise=True)


def test_the_digits_are_scikit_learns_own():
    from sklearn.datasets import load_digits

    from vestige.tasks.read_images import bundled_digits

    theirs, ours = load_digits(), bundled_digits()
    test = np.arange(len(theirs.target)) % 5 == 0
    assert (ours["x_train"] == theirs.images[~test]).all()
    assert (ours["y_test"] == theirs.target[test]).all()
    assert ours["x_test"].dtype == np.uint8
