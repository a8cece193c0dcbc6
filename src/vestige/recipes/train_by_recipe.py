"""How is a recipe applied to a user's data? A model for them is built, and trained as the recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.mechanism.feature_moments import with_moments
from vestige.recipes.catalogue import find
from vestige.renaming import PARTS, current
from vestige.tasks import bag_of_words, bounded
from vestige.tasks.features import starting_weights
from vestige.tasks.models import bag_linear, network
from vestige.training.job import Job, method_of
from vestige.training.run import Training, train

JOB = {each.name for each in fields(Job)}
PASSED = ("sample_rate", "steps", "lr", "sampling")
CHANGES = (
    *PASSED,
    "max_physical_batch_size",
    "method",
    "options",
    "average",
    "augment",
    "balance",
    "head_steps",
    "head_lr",
    "optimizer",
)
"""Settings of a recipe that a call may change."""


def recipe(
    name: str,
    *,
    data: tuple[object, object],
    epsilon: float,
    delta: float,
    model: nn.Module | str | None = None,
    classes: int | None = None,
    loss: Any = functional.cross_entropy,
    bounds: Sequence[tuple[float, float]] | None = None,
    prior: str | Path | None = None,
    seed: int = 0,
    device: str = "cpu",
    train_with: dict[str, object] | None = None,
    **changes: object,
) -> Training:
    """Train a model on your own data by a recipe of `vestige recipes`; iterate over the result, as of `train`.

    - `data` are (inputs, labels): images [rows, channels, height, width], features [rows, numbers], a table [rows,
      columns] with `bounds`, one (low, high) for each column, or a list of texts.
    - `model` is a module, or the name of a network; by default that of the recipe. It is trained in place, and is
      `training.model`. A model that is built here needs `classes`, how many there are: a public number.
    - `prior` is a file of `vestige prior make`, for the recipes that start from one.
    - `changes` replace settings of the recipe: steps=200, lr=1.0, augment=4. `train_with` goes to `vestige.train` as it
      is: out="my-run", resume=True, evaluate="private".

    Inputs are made by functions of one row (`prepared` makes a test set alike): nothing is asked of the data before the
    first step.

    >>> import torch, vestige
    >>> rows, labels = torch.rand(300, 3) * torch.tensor([100.0, 2.0, 1.0]), torch.randint(2, (300,))
    >>> training = vestige.recipe("tabular", data=(rows, labels), classes=2, bounds=[(0, 100), (0, 2), (0, 1)],
    ...                           epsilon=3, delta=1e-4, steps=3)
    >>> len(list(training)), training.guarantee().epsilon <= 3
    (3, True)

    Formal guarantees: those of `train`.
    """
    wanted, changes = find(name), current(changes, PARTS)
    for key in changes:
        if key not in CHANGES:
            raise ValueError(f"{key}={changes[key]!r} is no setting of a recipe; these are: {', '.join(CHANGES)}")
    inputs, labels = prepared(name, data[0], bounds=bounds), torch.as_tensor(data[1])
    part = changes.pop("max_physical_batch_size", None)
    settings = {**wanted.settings(epsilon), **changes}
    job = Job(**{**{key: value for key, value in settings.items() if key in JOB}, "task": "one's own"})
    made = _model(wanted.network, model, tuple(inputs.shape[1:]), classes, seed)
    if wanted.needs == "prior" and prior is None:
        raise ValueError(f"prior=None: {name} starts from one; make it with `vestige prior make`")
    method = method_of(job)
    if method.augment is not None:
        method.augment.check(tuple(inputs.shape[1:]))
    if prior is not None and not (train_with or {}).get("resume"):
        starting_weights.start_from(made, starting_weights.read(prior))
    passed = {key: getattr(job, key) for key in PASSED}
    passed["max_physical_batch_size"] = part or job.physical_batch
    moments = wanted.moments(epsilon)
    if moments is not None:
        made, passed["normalise"] = with_moments(made), moments
    return train(
        made.to(device),
        loss,
        (inputs, labels),
        method=method,
        epsilon=epsilon,
        delta=delta,
        **{**passed, "request": {"recipe": name}, **(train_with or {})},
    )


def prepared(name: str, inputs: Any, *, bounds: Sequence[tuple[float, float]] | None = None) -> Tensor:
    """Inputs as a recipe's model takes them; of each row, a function of that row and of public bounds."""
    kind = find(name).kind
    if (bounds is not None) != (kind == "tabular"):
        raise ValueError(
            f"bounds=None: {name} scales columns by public bounds; give one (low, high) for each column"
            if bounds is None
            else f"bounds={list(bounds)} is for tables, and {name} is a recipe for {kind}; leave it out"
        )
    if kind == "text":
        if isinstance(inputs, str) or not all(isinstance(text, str) for text in inputs):
            raise ValueError(f"data: {name} takes a list of texts")
        return torch.stack([bag_of_words(text) for text in inputs])
    try:
        found = torch.as_tensor(inputs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"data: {name} takes numbers, as a tensor or an array ({type(inputs).__name__} given)"
        ) from error
    dimensions = {"images": 4, "features": 2, "tabular": 2}[kind]
    if find(name).task is None and found.dim() != dimensions:
        shape = "[rows, channels, height, width]" if kind == "images" else "[rows, numbers]"
        raise ValueError(f"data: {name} takes {shape}, not a tensor of shape {tuple(found.shape)}")
    return found.float() if bounds is None else bounded(found, bounds)


def _model(
    usual: str | None, given: nn.Module | str | None, shape: tuple[int, ...], classes: int | None, seed: int
) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    name = given or usual
    if name is None:
        raise ValueError("model=None: this recipe is for one dataset; give a model for yours")
    if classes is None:
        raise ValueError("classes=None: give the number of classes, which is public, or a model")
    if classes < 2:
        raise ValueError(f"classes={classes} must be 2 or more: there is nothing to tell apart")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return bag_linear(shape, classes) if name == "words" else network(name, shape, classes)
