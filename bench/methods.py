"""How much slower and larger than DP-SGD is each method? Step time and extra state, one run, beside the papers' tables.

    python bench/methods.py --steps 30 --out bench/results/methods

Random data of CIFAR-10's shape; the FO-DP-SGD paper's MLP and a small CNN. A ratio is the median step time over that
of our DP-SGD on the same model, measured in the same run: the methods take turns, so that a slow moment of the
machine hits all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vestige
from vestige.methods.registry import METHODS, make_method
from vestige.tasks.models import mlp

PUBLISHED = {
    "FO-DP-SGD paper, table 2": {
        "dp-sgd": 1.0, "dp-adam": 1.29, "dp-adamw": 1.11, "dp-is": 1.11, "dp-sam": 1.57, "dp-sat": 1.5,
        "dp-adam-ac": 1.03, "fo-dp-sgd": 1.02,
    },
    "SMA-DP-SGD paper, table 4": {
        "dp-sgd": 1.0, "dp-adam": 1.0, "dp-adamw": 0.99, "dp-is": 1.07, "dp-sam": 1.86, "dp-sat": 1.81,
        "sma-dp-sgd": 2.94,
    },
}  # fmt: skip


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def subjects(examples: int) -> dict[str, tuple[Any, tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (examples,), generator=generator)
    return {"mlp": (lambda: mlp(3072, 10), (images.flatten(1), labels)), "cnn": (small_cnn, (images, labels))}


TIMED: dict[str, dict[str, Any]] = {"sma-dp-sgd": {"beta": 0.55, "alpha": 0.9, "window": 8}}
"""What a method's own paper measured the time of, where that is not what it measured the accuracy of."""


def made(name: str) -> vestige.Method:
    """With its defaults, but for a decay that needs a budget to follow."""
    still = {"progress": "none"} if "progress" in METHODS[name].options else {}
    return make_method(name, **still, **TIMED.get(name, {}))


def prepared(name: str, model: nn.Module, data: Any, steps: int, rate: float, device: str) -> vestige.Training:
    return vestige.train(
        model.to(device),
        nn.functional.cross_entropy,
        data,
        method=made(name),
        sample_rate=rate,
        steps=steps,
        noise_multiplier=1.1,
        delta=1e-6,
        lr=0.01,
    )


def timed(records: Iterator[Any], device: str) -> float:
    begin = time.perf_counter()
    next(records)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(names: list[str], steps: int, examples: int, rate: float, device: str) -> list[dict[str, Any]]:
    rows = []
    for subject, (make, data) in subjects(examples).items():
        torch.manual_seed(0)
        runs = {name: prepared(name, make(), data, steps + 3, rate, device) for name in names}
        streams = {name: iter(run) for name, run in runs.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(steps + 3):
            for name in names:
                seconds = timed(streams[name], device)
                if turn >= 3:  # the first steps pay for lazy imports and allocations
                    times[name].append(seconds)
        base = statistics.median(times["dp-sgd"])
        for name in names:
            median = statistics.median(times[name])
            rows.append(
                {
                    "model": subject,
                    "method": name,
                    "step_ms": 1000 * median,
                    "ratio": median / base,
                    "copies": made(name).copies(rate, steps + 3),
                    "published": {table: values.get(name) for table, values in PUBLISHED.items()},
                }
            )
    return rows


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    tables = list(PUBLISHED)
    lines = [
        f"Measured on {facts['device']} with torch {facts['torch']}, {facts['threads']} thread(s): expected batch "
        f"{facts['expected_batch']:g}, median of {facts['steps']} steps, the default engine.",
        "",
        "| model | method | step (ms) | over DP-SGD | extra copies | " + " | ".join(tables) + " |",
        "|---|---|---:|---:|---:|" + "---:|" * len(tables),
    ]
    for row in rows:
        claims = " | ".join("" if row["published"][t] is None else f"{row['published'][t]:.2f}" for t in tables)
        lines.append(
            f"| {row['model']} | {row['method']} | {row['step_ms']:.1f} | {row['ratio']:.2f} | {row['copies']:g} "
            f"| {claims} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--sample-rate", type=float, default=0.1)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="write PATH.json and PATH.md")
    options = parser.parse_args()
    names = list(dict.fromkeys(["dp-sgd", *options.methods]))
    rows = measure(names, options.steps, options.examples, options.sample_rate, options.device)
    facts = {
        "device": options.device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "steps": options.steps,
        "expected_batch": options.examples * options.sample_rate,
    }
    text = markdown(rows, facts)
    print(text, end="")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")
        options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
