"""How do selective methods move over the loss? DPSGD-BR's Figure 1 again: paths on the plane that holds most of them.

The paper draws paths of DP-SGD and of its own method and says neither of which task nor with which settings. Here all
methods have the same network, initial weights, gradient noise, rate and number of trials.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vestige import tasks
from vestige.compare.statistics import paired
from vestige.methods.registry import make_method
from vestige.training.loop import evaluate
from vestige.training.run import train

NAME = "br-fig1"
PAPER = "DPSGD-BR (Sci Rep 2026)"
WHAT = "paths of DP-SGD, DPSUR and DPSGD-BR over the loss, at one noise"
LABELS = ("dp-sgd", "dpsur", "dpsgd-br")
NOTES = (
    "the paper names neither task, noise, rate nor length: digits and a tanh MLP, sigma_t 3, rate 0.1, 100 trials each,"
    " the learning rate of DP-SGD for all (a tenth of it with momentum 0.9)",
    "the loss is that of the public test set; the plane is spanned by the first two principal components of all paths",
    "winding is the length of a path over the distance it covers: 1 is straight, and a noisy path winds more the longer"
    " it is, so that paths of as many updates are compared, too",
)
GRID = 21
"""Points of the plane in each direction at which the loss is measured."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Study:
    """How long and how often."""

    steps: int = 100
    seeds: int = 13
    sample_rate: float = 0.1
    sigma_t: float = 3.0
    validation_batch: int = 128
    epsilon: float = 50.0
    """More than the trials cost: DPSGD-BR's noise follows from answers, so a filter must know its end."""


def walk(study: Study, label: str, seed: int) -> tuple[Array, dict[str, object]]:
    """The weights before the first and after every trial, and where the run ended."""
    task = tasks.load("digits-mlp", None, seed)
    model, selective = copy.deepcopy(task.model), label != "dp-sgd"
    options: dict[str, Any] = {"momentum": 0.9, "max_grad_norm": 1.0}
    if selective:
        options |= {"sigma_t": study.sigma_t, "validation_batch": study.validation_batch}
    method = make_method(label, **options)
    training = train(
        model,
        task.loss,
        task.train,
        method=method,
        sample_rate=study.sample_rate,
        steps=study.steps,
        delta=1e-5,
        epsilon=study.epsilon if label == "dpsgd-br" else None,
        noise_multiplier=None if selective else study.sigma_t,
        budget=False,
    )
    path = [_weights(model)]
    path += [_weights(model) for _ in training]
    accuracy, loss = evaluate(model, task.test, task.loss)
    trials = np.stack(path)
    steps = np.linalg.norm(np.diff(trials, axis=0), axis=1)
    moved = trials[1:][steps > 0]
    losses = [_loss_at(task, weights) for weights in moved]
    lengths, covered = np.cumsum(steps[steps > 0]), np.linalg.norm(moved - trials[0], axis=1)
    windings = [float(length / far) if far else None for length, far in zip(lengths, covered, strict=True)]
    facts = {"label": label, "seed": seed, "accuracy": accuracy, "loss": loss, "updates": len(losses), "losses": losses}
    return trials, {**facts, "winding": windings[-1] if windings else None, "windings": windings}


def _weights(model: nn.Module) -> Array:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().cpu().numpy()


def plane(paths: Mapping[str, Array]) -> tuple[Array, Array]:
    """A point and two orthonormal directions, [2, size]: the plane that holds most of the paths."""
    points = np.concatenate(list(paths.values()))
    centre = points.mean(0)
    return centre, np.linalg.svd(points - centre, full_matrices=False)[2][:2]


def drawn(paths: Mapping[str, Array], seed: int = 0) -> dict[str, object]:
    """The paths of one seed as coordinates on their plane, and the test loss on a grid around them."""
    task = tasks.load("digits-mlp", None, seed)
    centre, axes = plane(paths)
    flat = {label: (path - centre) @ axes.T for label, path in paths.items()}
    everything = np.concatenate(list(flat.values()))
    low, high = everything.min(0), everything.max(0)
    margin = 0.15 * (high - low) + 1e-9
    sides = [np.linspace(low[k] - margin[k], high[k] + margin[k], GRID) for k in range(2)]
    losses = [[_loss_at(task, centre + x * axes[0] + y * axes[1]) for x in sides[0]] for y in sides[1]]
    return {
        "paths": {k: v.tolist() for k, v in flat.items()},
        "x": sides[0].tolist(),
        "y": sides[1].tolist(),
        "loss": losses,
    }


def _loss_at(task: tasks.Task, weights: Array) -> float:
    model = copy.deepcopy(task.model)
    vector: Tensor = torch.from_numpy(weights).float()
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    return evaluate(model, task.test, task.loss)[1]


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the paper says of its own method against DP-SGD: a smoother path, and a lower loss; paired by seed. DP-SGD
    makes an update of every trial, so its path and loss after as many updates as the other made are compared, too."""
    plain = {row["seed"]: row for row in rows if row["label"] == "dp-sgd"}
    found = []
    for label in LABELS[1:]:
        mine = {row["seed"]: row for row in rows if row["label"] == label and row["seed"] in plain and row["updates"]}
        fewer = {seed: min(row["updates"], plain[seed]["updates"]) for seed, row in mine.items()}
        pairs = {
            name: {seed: (row[name], plain[seed][name]) for seed, row in mine.items()} for name in ("winding", "loss")
        }
        for name, every in (("winding", "windings"), ("loss", "losses")):
            pairs[f"{name} after as many updates"] = {
                seed: (mine[seed][every][count - 1], plain[seed][every][count - 1]) for seed, count in fewer.items()
            }
        for key, both in pairs.items():
            both = {seed: values for seed, values in both.items() if None not in values}
            between = paired(*({seed: values[k] for seed, values in both.items()} for k in range(2)))
            if between is not None:
                interval = {"difference": between.mean, "low": between.low, "high": between.high, "p": between.p}
                means = [sum(values[k] for values in both.values()) / len(both) for k in range(2)]
                found.append({"label": label, "quantity": key, "seeds": len(both), "means": means, **interval})
    return found


def svg(picture: Mapping[str, Any], size: int = 480) -> str:
    """The loss as shades (darker is lower), and a line for each path from its common start."""
    xs, ys, losses = (np.array(picture[key]) for key in ("x", "y", "loss"))
    depth = (losses - losses.min()) / max(float(np.ptp(losses)), 1e-12)
    cell, colours = size / GRID, dict(zip(LABELS, ("#d55e00", "#e69f00", "#0072b2"), strict=True))

    def place(x: float, y: float) -> str:
        return f"{(x - xs[0]) / (xs[-1] - xs[0]) * size:.1f},{size - (y - ys[0]) / (ys[-1] - ys[0]) * size:.1f}"

    cells = "".join(
        f'<rect x="{j * cell:.1f}" y="{size - (i + 1) * cell:.1f}" width="{cell + 0.5:.1f}" height="{cell + 0.5:.1f}" '
        f'fill="#444" fill-opacity="{0.6 * (1 - depth[i, j]):.3f}"/>'
        for i in range(GRID)
        for j in range(GRID)
    )
    joined = {label: " ".join(place(*point) for point in path) for label, path in picture["paths"].items()}
    lines = "".join(
        f'<polyline fill="none" stroke="{colours[label]}" stroke-width="1.6" points="{points}"/>'
        for label, points in joined.items()
    )
    words = "".join(
        f'<text x="8" y="{18 + 16 * k}" font-size="13" font-family="sans-serif" fill="{colours[label]}">{label}</text>'
        for k, label in enumerate(picture["paths"])
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}">{cells}{lines}{words}</svg>\n'
