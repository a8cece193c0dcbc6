"""What does a bfloat16 history cost? The error of the direction, and the accuracy of runs paired by seed.

usage: python bench/history.py [--data DATA] [--seeds N] [--steps N] [--json FILE]

Both histories see the same samples and the same noise (reproducible runs), so that a pair differs by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import vestige
from vestige import tasks
from vestige.layout import Layout, Segment
from vestige.optim.memory import Blend
from vestige.randomness.sum_and_release_types import Release
from vestige.training.loop import accuracy

HISTORIES: tuple[Any, Any] = ("float32", "bfloat16")


def direction_errors(share: float, window: int, steps: int = 1000, size: int = 20_000) -> tuple[float, float]:
    """The relative error of a bfloat16 history's direction against float32's: root mean square and largest over steps.

    The releases are noise about a slowly turning signal of a tenth of its norm, which a memory is there to find.
    """
    generator = torch.Generator().manual_seed(0)
    memories = [Blend(fresh_weight=share, window=window, history=history) for history in HISTORIES]
    layout = Layout((Segment("w", 0, (size,)),))
    states = [memory.init(layout, torch.device("cpu")) for memory in memories]
    signal, errors = torch.randn(size, generator=generator), []
    for _ in range(steps):
        signal = 0.995**0.5 * signal + 0.005**0.5 * torch.randn(size, generator=generator)
        release = Release(0.1 * signal + torch.randn(size, generator=generator), 1.0, 1.0)
        whole, half = (m.step(release, s, {}).direction for m, s in zip(memories, states, strict=True))
        errors.append(float((half - whole).norm() / whole.norm()))
    return statistics.fmean(error**2 for error in errors) ** 0.5, max(errors)


def accuracies(name: str, data: str | None, seed: int, steps: int, beta: float) -> list[float]:
    """Test accuracy with each history, at epsilon 8 were the noise secret."""
    found = []
    for history in HISTORIES:
        task = tasks.load(name, data, seed)
        method = vestige.fo_dp_sgd(beta=beta, history=history)
        training = vestige.train(
            task.model, task.loss, task.train, method=method, epsilon=8.0, delta=1e-5, sample_rate=0.04, steps=steps,
            lr="auto", reproducible=seed,
        )  # fmt: skip
        for _ in training:
            pass
        found.append(100 * accuracy(task.model, task.test))
    return found


def compared(name: str, data: str | None, seeds: int, steps: int, beta: float) -> dict[str, Any]:
    pairs = [accuracies(name, data, seed, steps, beta) for seed in range(seeds)]
    gains = [half - whole for whole, half in pairs]
    return {
        "task": name,
        "beta": beta,
        "float32": statistics.fmean(whole for whole, _ in pairs),
        "bfloat16": statistics.fmean(half for _, half in pairs),
        "difference": statistics.fmean(gains),
        "error": statistics.stdev(gains) / len(gains) ** 0.5,
        "pairs": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10, for cifar10-mlp; without it only digits-mlp is trained")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("| beta, window | direction: error over 1,000 steps, rms | largest |\n|---|---|---|")
    errors = []
    for share, window in ((0.9, 8), (0.5, 8), (0.5, 32)):
        rms, largest = direction_errors(share, window)
        errors.append({"beta": share, "window": window, "rms": rms, "largest": largest})
        print(f"| {share}, {window} | {rms:.1e} | {largest:.1e} |", flush=True)
    print("\n| task, beta | float32 | bfloat16 | difference, its standard error |\n|---|---|---|---|")
    rows = []
    for name, data in (("digits-mlp", None), ("cifar10-mlp", options.data)):
        if name == "digits-mlp" or data is not None:
            for beta in (0.9, 0.5):
                row = compared(name, data, options.seeds, options.steps, beta)
                rows.append(row)
                means = f"{row['float32']:.2f} | {row['bfloat16']:.2f} | {row['difference']:+.3f} ({row['error']:.3f})"
                print(f"| {name}, {beta} | {means} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"direction": errors, "accuracy": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
