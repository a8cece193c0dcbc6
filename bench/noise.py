"""What does lattice noise cost? A whole step with it over one with float32 noise, and the noise alone; in one process.

usage: python bench/noise.py [--device cpu|cuda] [--rounds N] [--seconds S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import vestige
from engines import CASES
from vestige.compare.stacked import Stack, StackedRun
from vestige.engines.registry import engine_by_name
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat
from vestige.methods.registry import make_method
from vestige.randomness.correlated import ARITHMETICS
from vestige.randomness.keys import Randomness
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tasks import models

GOALS = {"CIFAR MLP": 2.0, "ResNet-18 GN": 1.03, "ViT-S": 1.03}


def timed(step: Callable[[], object], device: str, seconds: float) -> float:
    """Milliseconds of a call, over as many as fit."""
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(5):
            step()
        count += 5
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def ratio(steps: dict[str, Callable[[], object]], device: str, rounds: int, seconds: float) -> dict[str, float]:
    """Every way in turn, round after round: its median time, and the median of the rounds' ratios to float32."""
    for step in steps.values():
        step(), step()
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seen[name].append(timed(step, device, seconds))
    over = [one / other for one, other in zip(seen["lattice"], seen["float32"], strict=True)]
    return {**{name: statistics.median(times) for name, times in seen.items()}, "ratio": statistics.median(over)}


def whole_step(name: str, device: str, noise: str) -> Callable[[], object]:
    case = CASES[name]
    batch = case.batch if device == "cuda" else case.cpu_batch or 8
    torch.manual_seed(0)
    model = case.build().to(device)
    inputs = case.inputs(batch).to(device)
    outputs = model(inputs[:1])
    targets = torch.randint(outputs.shape[-1], (batch,), device=device)
    options: dict[str, Any] = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-6, "lr": 1e-3}
    training = vestige.train(
        model, F.cross_entropy, (inputs, targets), sample_rate=1.0, steps=10**6, noise=noise, **options
    )
    records = iter(training)
    return lambda: next(records)


def noise_alone(size: int, device: str, noise: str) -> Callable[[], object]:
    total, randomness = torch.zeros(size, device=device), Randomness.secret()

    def step() -> None:
        ARITHMETICS[noise](BoundedSum(total, 1.0), 1.0, randomness.stream("noise", 0))

    return step


def stacked(runs: int, device: str, noise: str) -> Callable[[], object]:
    torch.manual_seed(0)
    data = torch.rand(1000, 64), torch.randint(10, (1000,))
    members = [
        StackedRun(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), make_method("dp-sgd"), 1.0, 0.1, None
        )
        for _ in range(runs)
    ]
    stack = Stack(members, data, sample_rate=0.1, steps=10**6, device=torch.device(device))
    for curator, _ in stack.parts:
        curator.sequence = curator.noise.start(0.1, 10**6, noise)
        if noise == "float32":
            curator.draws.noise = lambda purpose, index, into: torch.randn(into.shape, device=into.device, out=into)
    steps = stack.train()
    return lambda: next(steps)


def rounding(name: str, device: str) -> dict[str, float]:
    """What stays outside the theorem: how far companions move an example's outputs, relative to their norm; and by how
    much more than an example's own clipped gradient the sum moves without it, over the bound."""
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.build().to(device), case.inputs(257).to(device)
    targets = torch.randint(10, (257,), device=device)
    layout = Layout.of(model)
    engine, parameters = engine_by_name("unrecorded")(model, F.cross_entropy, layout), dict(model.named_parameters())

    def total(rows: torch.Tensor) -> torch.Tensor:
        into = torch.zeros(layout.size, device=device)
        engine((inputs[rows], targets[rows]), parameters, Flat(1.0), into)
        return into.double()

    with torch.no_grad():
        seen = [model(inputs[:count])[0].double() for count in (1, 2, 3, 8, 17, 100, 257)]
    everyone = torch.arange(257, device=device)
    whole, more = total(everyone), 0.0
    for one in range(0, 257, 16):
        moved = whole - total(everyone[everyone != one])
        more = max(more, float(moved.norm() - total(everyone[one : one + 1]).norm()))
    return {"outputs": max(float((each - seen[0]).norm() / seen[0].norm()) for each in seen), "sum": more}


def timing(device: str, rounds: int, seconds: float) -> float:
    """A step on other data over one on these, both of the same shapes: the median of the rounds' ratios."""
    steps = {}
    for name, scale in (("float32", 1.0), ("lattice", 0.0)):
        torch.manual_seed(0)
        data = scale * torch.randn(256, 3072, device=device), torch.randint(10, (256,), device=device)
        options: dict[str, Any] = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-6, "lr": 1e-3}
        model = models.mlp(3072, 10).to(device)
        steps[name] = iter(vestige.train(model, F.cross_entropy, data, sample_rate=1.0, steps=10**6, **options))
    return ratio({name: partial(next, records) for name, records in steps.items()}, device, rounds, seconds)["ratio"]


def bandwidth(device: str) -> float:
    """Bytes per millisecond of a copy."""
    block = torch.zeros(2**28 if device == "cuda" else 2**24, device=device)
    other = torch.empty_like(block)
    return 8 * block.numel() / timed(lambda: other.copy_(block), device, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, found = options.device, []
    print(f"torch {torch.__version__}, {device}; milliseconds, lattice over float32\n")
    print("| what | float32 | lattice | ratio | goal |\n|---|---|---|---|---|")
    cases: dict[str, tuple[Callable[[str], Callable[[], object]], float | None]] = {}
    for name in ("CIFAR MLP", *(["tanh CNN", "ResNet-18 GN", "ViT-S"] if device == "cuda" else [])):
        cases[f"step of {name}"] = (lambda noise, name=name: whole_step(name, device, noise)), GOALS.get(name)
    runs = 600 if device == "cuda" else 60
    cases[f"step of {runs} stacked runs"] = (lambda noise: stacked(runs, device, noise)), 1.2
    size = sum(parameter.numel() for parameter in models.mlp(3072, 10).parameters())
    for count in (size, *([11_000_000, 124_000_000] if device == "cuda" else [])):
        cases[f"noise of {count:,} numbers"] = (lambda noise, count=count: noise_alone(count, device, noise)), None
    for what, (make, goal) in cases.items():
        row = ratio({noise: make(noise) for noise in ("float32", "lattice")}, device, options.rounds, options.seconds)
        found.append({"what": what, **row, "goal": goal})
        print(
            f"| {what} | {row['float32']:.3f} | {row['lattice']:.3f} | {row['ratio']:.3f} | {goal or ''} |", flush=True
        )
    if device == "cuda":
        speed, last = bandwidth(device), found[-1]
        print(
            f"\nthe kernel's time over its bytes, at the speed of a copy: {last['lattice'] * speed / (8 * count):.2f}"
        )
    for name in ("CIFAR MLP", "tanh CNN"):
        seen = rounding(name, device)
        print(
            f"\n{name}: companions move an example's outputs by {seen['outputs']:.1e} of their norm; without an example"
        )
        print(
            f"the sum moves by its own clipped gradient and {max(0.0, seen['sum']):.1e} of the bound; 9.8e-4 is charged"
        )
    print(
        f"\nthe time of a step on zeros over one on random data: {timing(device, options.rounds, options.seconds):.3f}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
