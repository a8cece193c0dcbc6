"""Does a protocol's subset hold the first examples of each class, in the order of the file?"""

import numpy as np
import pytest
import torch

from vestige import tasks


@pytest.fixture
def whole(tmp_path):
    """A dataset of MNIST's shape whose pixels say which row they are; classes come in no order, and not as often."""
    rng = np.random.default_rng(0)
    y_train, y_test = (rng.choice(10, size, p=np.arange(10, 20) / 145) for size in (900, 500))
    arrays = {"y_train": y_train.astype(np.uint8), "y_test": y_test.astype(np.uint8)}
    for split, labels in (("train", y_train), ("test", y_test)):
        rows = np.arange(len(labels))
        pixels = np.zeros((len(labels), 28, 28), np.uint8)
        pixels[:, 0, 0], pixels[:, 0, 1] = rows // 256, rows % 256
        arrays[f"x_{split}"] = pixels
    np.savez(tmp_path / "mnist.npz", **arrays)
    return tmp_path / "mnist.npz", y_train, y_test


def test_the_first_of_each_class_are_taken_in_the_files_order(whole, tmp_path):
    path, y_train, y_test = whole
    task = tasks.load("mnist-mlp", path, subset=(300, 100))
    for rows, labels, count in ((task.rows.train, y_train, 30), (task.rows.test, y_test, 10)):
        wanted, seen = [], dict.fromkeys(range(10), 0)
        for row, label in enumerate(labels):
            seen[label] += 1
            if seen[label] <= count:
                wanted.append(row)
        assert rows.tolist() == wanted
    pixels = ((task.train[0] * 0.5 + 0.5) * 255).round().long()
    assert torch.equal(pixels[:, 0] * 256 + pixels[:, 1], task.rows.train)
    assert task.train[1].tolist() == y_train[task.rows.train.numpy()].tolist()
    assert str(task.rows).startswith("300 of 900 training rows (0 to ")
    # cut again from what was cut, it is the same
    with np.load(path) as file:
        kept = {key: file[key][getattr(task.rows, key.split("_")[1]).numpy()] for key in file}
    np.savez(tmp_path / "again.npz", **kept)
    again = tasks.load("mnist-mlp", tmp_path / "again.npz", subset=(300, 100))
    assert torch.equal(again.train[0], task.train[0])
    assert torch.equal(again.test[1], task.test[1])


def test_what_cannot_be_cut_is_refused_in_one_line(whole):
    path, *_ = whole
    with pytest.raises(
        ValueError, match="training rows hold .* of class 0, and the protocol takes the first 90 of each"
    ):
        tasks.load("mnist-mlp", path, subset=(900, 100))
    with pytest.raises(ValueError, match="subset=305 is no multiple of the 10 classes"):
        tasks.load("mnist-mlp", path, subset=(305, 100))
    with pytest.raises(ValueError, match="is for the tasks of `vestige tasks`"):
        tasks.load("mine.py:make", path, subset=(300, 100))


def test_another_seed_changes_the_weights_alone(whole):
    path, *_ = whole
    task = tasks.load("mnist-mlp", path, subset=(300, 100))
    other, loaded = tasks.reinitialised(task, 7), tasks.load("mnist-mlp", path, 7, subset=(300, 100))
    assert other.train[0] is task.train[0]
    for mine, theirs, first in zip(*(each.model.parameters() for each in (other, loaded, task)), strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, first)
