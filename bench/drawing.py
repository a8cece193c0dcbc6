"""What does a draw cost as the dataset grows? The draw alone, a step of `vestige.train`, and one of a private loop.

Rows are made when they are asked for, so only drawing can depend on how many there are. With --workers the same step is
measured where reading a row takes as long as a small image's.

usage: python bench/drawing.py [--batch B] [--rounds N] [--steps N] [--workers N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import vestige
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson

ROWS = (20_000, 1_000_000, 10_000_000)
GOAL = 1.1
READING = 3e-4
"""Seconds that a row takes to read, in the comparison of workers."""


class Made(Dataset[tuple[torch.Tensor, int]]):
    """Rows that exist only once they are asked for."""

    def __init__(self, rows: int, seconds: float = 0.0) -> None:
        self.rows, self.seconds, self.inputs = rows, seconds, torch.randn(64, 20)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index % 64], index % 2


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))


def draws(rows: int, batch: int) -> Iterator[object]:
    key, index = Randomness.secret(), 0
    while True:
        yield Poisson(batch / rows).draw(rows, index, key)
        index += 1


def trained(rows: int, batch: int, workers: int = 0, seconds: float = 0.0) -> Iterator[object]:
    yield from vestige.train(
        model(),
        F.cross_entropy,
        Made(rows, seconds),
        method="dp-sgd",
        sample_rate=batch / rows,
        steps=10**6,
        noise_multiplier=1.0,
        delta=1e-9,
        lr=0.1,
        num_workers=workers,
    ).steps()


def looped(rows: int, batch: int) -> Iterator[object]:
    net = model()
    net, optimizer, loader = vestige.PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(Made(rows), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            yield optimizer.step()


def medians(steps: dict[Any, Iterator[object]], rounds: int, count: int) -> dict[Any, float]:
    """Milliseconds of a step of each, measured in turn, round after round."""
    for each in steps.values():
        next(each), next(each)
    seen: dict[Any, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, each in steps.items():
            begin = time.perf_counter()
            for _ in range(count):
                next(each)
            seen[name].append((time.perf_counter() - begin) / count * 1e3)
    return {name: statistics.median(times) for name, times in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    ways: dict[str, Callable[[int, int], Iterator[object]]] = {
        "draw alone": draws,
        "vestige.train": trained,
        "PrivacyEngine": looped,
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        times = medians({rows: way(rows, asked.batch) for rows in ROWS}, asked.rounds, asked.steps)
        ratio = times[ROWS[-1]] / times[ROWS[0]]
        found[name] = {"milliseconds": times, "ratio": ratio}
        shown = ", ".join(f"{rows:,} rows {each:.3f} ms" for rows, each in times.items())
        print(f"{name}: {shown}; ratio {ratio:.2f} (goal {GOAL})")
    slow = {n: trained(ROWS[0], asked.batch, n, READING) for n in (0, asked.workers)}
    times = medians(slow, max(1, asked.rounds // 5), asked.steps)
    found["workers"] = times
    print("reading rows: " + ", ".join(f"{workers} workers {each:.1f} ms" for workers, each in times.items()))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
