"""What does a guarantee for a photograph cost, where one has several crops? SVHN, by mechanism, at one epsilon.

    python bench/users.py run --data DATA/svhn_7k.npz --out bench/results/users [--seeds 20] [--steps 300]
    python bench/users.py table --out bench/results/users

5,000 crops of 2,777 photographs (`image_train` of the file says which), an MLP, epsilon 8 for a photograph. Each run is
one of `vestige.train(users=...)`; about 200 crops a step for each mechanism. `auto` is the automatic learning rate;
`tuned` the best of four multiples of it, chosen by three other seeds on half of the test images (unpaid, and public),
and judged, as all rows are, on the other half. One line of runs.jsonl for each run: it can be killed and started again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import vestige
from vestige import accounting, tasks
from vestige.methods.registry import make_method

EPSILON, DELTA, CROPS = 8.0, 1e-5, 200
MECHANISMS: dict[str, dict[str, Any]] = {
    "a crop's guarantee (no users)": {"users": None},
    "rows, all": {},
    "rows, at most 2": {"rows_per_user": 2},
    "rows, at most 1": {"rows_per_user": 1},
    "rows, cap 1": {"cap": 1},
    "users, mean of all": {"sample": "users"},
    "users, cap 1": {"sample": "users", "cap": 1},
}
FACTORS = (0.5, 1.0, 2.0, 4.0)
TUNING_SEEDS = (100, 101, 102)


def rate_of(options: dict[str, Any], owners: np.ndarray) -> float:
    """The rate at which a step has about as many crops as any other mechanism's."""
    counts = np.unique(owners, return_counts=True)[1]
    if options.get("sample") == "users":
        return CROPS / np.minimum(counts, options.get("cap") or counts.max()).sum()
    return CROPS / np.minimum(counts, options.get("rows_per_user") or counts.max()).sum()


def trained(name: str, seed: int, factor: float, data: Path, steps: int) -> dict[str, Any]:
    """One run, and its accuracy on either half of the test images."""
    task = tasks.load("svhn-mlp", data, seed)
    owners = np.load(data)["image_train"]
    options = {"users": owners} | MECHANISMS[name]
    rate = rate_of(options, owners)
    settings: dict[str, Any] = {"sample_rate": rate, "steps": steps, "delta": DELTA}
    settings |= {"method": make_method("dp-sgd", balance="relative"), "secure_mode": False} | options
    settings |= priced(name, task, settings)
    if factor != 1.0:
        settings["lr"] = factor * planned(task, settings).plan.lr
    training = planned(task, settings)
    for _ in training:
        pass
    with torch.no_grad():
        right = (task.model(task.test[0]).argmax(-1) == task.test[1]).double()
    half = len(right) // 2
    assert accounting.within(training.ledger.spent, CERTIFIED[name].spent)
    return {
        "mechanism": name,
        "seed": seed,
        "factor": factor,
        "steps": steps,
        "sample_rate": rate,
        "noise_multiplier": training.plan.noise_multiplier,
        "noise_of_mean": training.plan.noise_multiplier / training.expected_batch,
        "lr": training.plan.lr,
        "epsilon": CERTIFIED[name].epsilon,
        "adjacency": CERTIFIED[name].adjacency,
        "choosing": float(right[:half].mean()),
        "judging": float(right[half:].mean()),
    }


@dataclass(frozen=True)
class Certified:
    """What all runs of a mechanism may ask, and what that costs."""

    noise_multiplier: float
    epsilon: float
    adjacency: str
    spent: accounting.History


CERTIFIED: dict[str, Certified] = {}
"""By mechanism: a plan is priced once, and every run is held against it."""


def priced(name: str, task: tasks.Task, settings: dict[str, Any]) -> dict[str, float]:
    """The noise of a mechanism at this epsilon."""
    if name not in CERTIFIED:
        plan = planned(task, settings | {"epsilon": EPSILON})
        history = plan.ledger.budget.planned  # type: ignore[union-attr]
        said = accounting.guarantee(history, DELTA, plan.facts)
        assert said.epsilon is not None
        CERTIFIED[name] = Certified(plan.plan.noise_multiplier, said.epsilon, said.adjacency, history)
    return {"noise_multiplier": CERTIFIED[name].noise_multiplier}


def planned(task: tasks.Task, settings: dict[str, Any]) -> Any:
    """A run before its first question."""
    return vestige.train(task.model, nn.functional.cross_entropy, task.train, **settings)


def due(done: list[dict[str, Any]], seeds: int) -> Iterator[tuple[str, int, float]]:
    """Automatic runs seed by seed, then tuning, then the tuned runs."""
    have = {(row["mechanism"], row["seed"], row["factor"]) for row in done}
    wanted = [(name, seed, 1.0) for seed in range(seeds) for name in MECHANISMS]
    wanted += [(name, seed, factor) for seed in TUNING_SEEDS for factor in FACTORS for name in MECHANISMS]
    if not [each for each in wanted if each not in have]:
        best = {name: best_factor(done, name) for name in MECHANISMS}
        wanted = [(name, seed, best[name]) for seed in range(seeds) for name in MECHANISMS]
    yield from (each for each in wanted if each not in have)


def best_factor(done: list[dict[str, Any]], name: str) -> float:
    def mean(factor: float) -> float:
        found = [r["choosing"] for r in done if (r["mechanism"], r["factor"]) == (name, factor) and r["seed"] >= 100]
        return statistics.mean(found)

    return max(FACTORS, key=mean)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "runs.jsonl"
    while waiting := list(due(read(path), arguments.seeds)):
        for name, seed, factor in waiting:
            row = trained(name, seed, factor, arguments.data, arguments.steps)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name:30s} seed {seed:3d} x{factor:g}: {row['judging']:.3f}", flush=True)
    print(table(read(path)))


def table(done: list[dict[str, Any]]) -> str:
    lines = [
        "| mechanism | epsilon, for | noise z | noise of a mean | auto | tuned (x auto) |",
        "|---|---|---|---|---|---|",
    ]
    for name in MECHANISMS:
        auto = [row for row in done if (row["mechanism"], row["factor"]) == (name, 1.0) and row["seed"] < 100]
        if not auto:
            continue
        tuned = "not run"
        if all(any((r["mechanism"], r["factor"]) == (name, f) and r["seed"] >= 100 for r in done) for f in FACTORS):
            best = best_factor(done, name)
            found = [r for r in done if (r["mechanism"], r["factor"]) == (name, best) and r["seed"] < 100]
            tuned = f"{spread(found)} (x{best:g})" if found else "not run"
        one = auto[0]
        lines.append(
            f"| {name} | {one['epsilon']:.2f}, {one['adjacency']} | {one['noise_multiplier']:.2f} | "
            f"{one['noise_of_mean']:.4f} | {spread(auto)} | {tuned} |"
        )
    return "\n".join(lines)


def spread(rows: list[dict[str, Any]]) -> str:
    """Percent right, and the deviation of the mean's estimate."""
    found = [100 * row["judging"] for row in rows]
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.1f} ± {error:.1f} ({len(found)} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running, showing = commands.add_parser("run"), commands.add_parser("table")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--seeds", type=int, default=20)
    running.add_argument("--steps", type=int, default=300)
    for each in (running, showing):
        each.add_argument("--out", type=Path, required=True)
    running.set_defaults(call=run)
    showing.set_defaults(call=lambda arguments: print(table(read(arguments.out / "runs.jsonl"))))
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
