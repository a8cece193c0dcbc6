"""What is trained on what? A model, a loss and examples, by the name of a task or from a user's own file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.tasks import models
from vestige.tasks.definitions import DEFINITIONS, Definition
from vestige.tasks.encode_tables import columns_of, read_table
from vestige.tasks.features.encoders import check_encoder, encoded
from vestige.tasks.protocol_subsets import Rows, cut
from vestige.tasks.read_images import STANDARDISED, standardised
from vestige.tasks.readers_common import LabelledTensors, existing, require_public, where
from vestige.tasks.user_code import blame, call, function_of, python_file

__all__ = [
    "LabelledTensors",
    "Loss",
    "Task",
    "check",
    "describe",
    "load",
    "load_table",
    "names",
    "reinitialised",
    "subject",
]

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """What `vestige train --task NAME` needs: `loss(model(inputs), targets)` over `train`, evaluated on `test`."""

    name: str
    model: nn.Module
    loss: Loss
    train: LabelledTensors
    test: LabelledTensors
    classes: int
    notes: str
    rows: Rows | None = None
    """Which rows of the dataset these are, where a subset was cut."""


def load(
    name: str,
    data: str | Path | None = None,
    seed: int = 0,
    *,
    standardise: bool = False,
    features: str | Path | None = None,
    subset: tuple[int, int] | None = None,
) -> Task:
    """The task called `name`, its initial weights drawn from `seed` alone.

    `data` is a file or folder for the tasks that need one. `name` may also be `path/to/file.py:function`: that function
    is called, with `data` and `seed` where it takes them, and returns a `Task` or `(model, loss, train, test)`.
    `standardise` scales each image by its own mean and deviation. `features` is the public checkpoint of a frozen
    encoder, for the tasks `*-features`: a file of `vestige prior make`, or the folder of a Hugging Face vision model.
    `subset` takes that many training and test examples of a named task: the first of each class, in the file's order.
    """
    path = None if data is None else Path(data)
    if standardise and (".py:" in name or not known(name).dataset.images):
        raise ValueError(
            f"standardise=True is for the image tasks of `vestige tasks`, and {name} is none; leave it out"
        )
    if ".py:" in name:
        if subset is not None:
            raise ValueError(f"subset={subset} is for the tasks of `vestige tasks`, and {name} is none; leave it out")
        check(name, data, features)
        made = _made_by_file(name, path, seed)
        return made if isinstance(made, Task) else _task_of(name, made)
    check(name, data, features)
    definition = DEFINITIONS[name]
    (x_train, y_train), (x_test, y_test), rows = *definition.dataset.read(path), None
    if subset is not None:
        classes, place = definition.dataset.classes, where(path)
        (x_train, y_train), (x_test, y_test), rows = cut((x_train, y_train), (x_test, y_test), subset, classes, place)
    if standardise:
        x_train, x_test = standardised(x_train), standardised(x_test)
    if features is not None:
        x_train, x_test = encoded(x_train, features), encoded(x_test, features)
    x_train, x_test = definition.prepare(x_train), definition.prepare(x_test)
    with _public_randomness(seed):
        model = definition.build(tuple(x_train.shape[1:]), definition.dataset.classes)
    notes = " ".join(
        part for part in (definition.dataset.notes, definition.notes, STANDARDISED if standardise else "") if part
    )
    train, test = (x_train, y_train), (x_test, y_test)
    return Task(name, model, functional.cross_entropy, train, test, definition.dataset.classes, notes, rows)


def reinitialised(task: Task, seed: int) -> Task:
    """A named task with the initial weights of another seed, and the same examples."""
    with _public_randomness(seed):
        model = DEFINITIONS[task.name].build(tuple(task.train[0].shape[1:]), task.classes)
    return replace(task, model=model)


def load_table(
    data: str | Path,
    columns: str,
    label_column: str,
    labels: Sequence[str],
    test: str | Path | None = None,
    seed: int = 0,
) -> Task:
    """A task from a table: an MLP on columns with public bounds, or categories ('age=0..100;work=office|field').

    `test` is a table of the same columns that needs no protection; without it the test set is empty.
    """
    require_public(test, data)
    named = columns_of(columns)
    train = read_table(data, named, label_column, labels)
    empty = train[0][:0], train[1][:0]
    judged = empty if test is None else read_table(test, named, label_column, labels)
    with _public_randomness(seed):
        model = models.mlp(train[0].shape[1], len(labels))
    notes = "Columns are scaled by bounds that were given; categories and labels were given, too: nothing was asked."
    return Task("table", model, functional.cross_entropy, train, judged, len(labels), notes)


def check(name: str, data: str | Path | None = None, features: str | Path | None = None) -> None:
    """Refuse, before anything is read, a task that cannot be loaded: no such name, or no data where it needs some."""
    frozen = ".py:" not in name and known(name).encoded
    if features is None and frozen:
        raise ValueError(
            f"features=None: task {name!r} is trained on features of a frozen encoder; give the checkpoint of one"
        )
    if features is not None and not frozen:
        raise ValueError(f"features={str(features)!r} is for the tasks *-features, and {name} is none; leave it out")
    if ".py:" in name:
        python_file(name)
        return
    dataset = known(name).dataset
    if data is None and dataset.needs_data:
        raise ValueError(f"--data is missing: task {name!r} reads {dataset.title}; give --data FILE.npz or a folder")
    if data is not None and dataset.needs_data:
        existing(Path(data))
    if features is not None:
        check_encoder(Path(features))


def subject(name: str, data: str | Path | None = None, seed: int = 0) -> tuple[nn.Module, Loss, object]:
    """The model, loss and training data of a task, unchecked: a user's function may give a loader or a dataset."""
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
    return list(DEFINITIONS)


def describe() -> list[dict[str, str | bool]]:
    """One row per task: `name`, `dataset`, `model`, `needs_data`."""
    return [
        {"name": name, "dataset": r.dataset.title, "model": r.model, "needs_data": r.dataset.needs_data}
        for name, r in DEFINITIONS.items()
    ]


def known(name: str) -> Definition:
    """The task of this name; ValueError suggests one that is near."""
    if name in DEFINITIONS:
        return DEFINITIONS[name]
    close = get_close_matches(name, DEFINITIONS, n=1)
    hint = (
        f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(DEFINITIONS)}, or give file.py:function"
    )
    raise ValueError(f"--task={name}: no such task; {hint}")


@contextmanager
def _public_randomness(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that one reaches the accelerators too
        yield


# --- a user's own task -----------------------------------------------------------------------------------------------


def _made_by_file(name: str, data: Path | None, seed: int) -> object:
    with _public_randomness(seed):
        function = function_of(name)
    with _public_randomness(seed):
        return call(name, function, data, seed)


def _task_of(name: str, made: object) -> Task:
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
    # the number of outputs: a public fact of the model
    with torch.no_grad(), blame(name, f"the model cannot take a test example of shape {shape}"):
        classes = copy.deepcopy(model).eval()(test[0][:1]).shape[-1]
    return Task(name, model, loss, tuple(train), tuple(test), classes, f"The user's own task, from {name}.")
