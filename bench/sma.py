"""What does spectral memory cost? A step of SMA-DP-SGD over our own group-wise DP-SGD, side by side in one run.

usage: python bench/sma.py [--device cpu|cuda] [--models cnn resnet18] [--engine NAME] [--batch N] [--physical-batch N]
                           [--rounds N] [--threads N] [--json FILE]

The images are random: the cost does not depend on what they show. "Every step" is measured with the spectrum refreshed
at each step; "once an epoch" is a step without a refresh plus the spectrum's own time over the steps of an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import vestige
from vestige.engines.registry import ENGINES
from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.optim.spectral import Spectral, group_exponents
from vestige.tasks import models

RATE = 0.04
EPOCH = round(1 / RATE)
NEVER = 1_000_000
GOALS = {"every step": 1.25, "once an epoch": 1.05}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: models.cnn(3, 32, 10),
    "resnet18": lambda: models.resnet18(10),
}


def run(
    name: str, method: vestige.Method, device: str, engine: str, batch: int, physical: int | None
) -> vestige.Training:
    torch.manual_seed(0)
    examples = round(batch / RATE)
    data = torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))
    return vestige.train(
        MODELS[name]().to(device),
        nn.functional.cross_entropy,
        data,
        method=method,
        noise_multiplier=1.0,
        delta=1e-6,
        sample_rate=RATE,
        steps=NEVER,
        lr=1e-3,
        engine=engine,
        physical_batch=physical,
        reproducible=0,  # every method meets the same samples, so that their sizes do not differ
    )


def interleaved(rounds: int, wait: Callable[[], None], **calls: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn so that the machine's moods fall on all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for index in range(rounds + 1):
        # On a GPU whoever meets a new batch size first pays for it, so everyone goes first in turn.
        first = index % len(names)
        for name in names[first:] + names[:first]:
            call = calls[name]
            wait()
            begin = time.perf_counter()
            call()
            wait()
            if index:  # the first is a rehearsal
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float | int | str]:
    device = arguments.device
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    methods = {
        "dp-sgd": vestige.by_group(vestige.dp_sgd(), Layers()),
        "sma without refresh": vestige.sma_dp_sgd(refresh_spectrum=NEVER),
        "sma every step": vestige.sma_dp_sgd(refresh_spectrum=1),
    }
    trainings = {
        label: run(name, method, device, arguments.engine, arguments.batch, arguments.physical_batch)
        for label, method in methods.items()
    }
    steps = {label: iter(training) for label, training in trainings.items()}
    for label, training in trainings.items():
        fill(training)
        next(steps[label])
    calls: dict[str, Callable[[], object]] = {label: (lambda records=r: next(records)) for label, r in steps.items()}
    layout = Layout.of(trainings["dp-sgd"].model, Layers())
    weights = {n: p.detach() for n, p in trainings["dp-sgd"].model.named_parameters()}
    owners = [segment.group for segment in layout.segments]
    calls["spectrum"] = lambda: group_exponents(weights, owners, "flatten")
    seconds = interleaved(arguments.rounds, wait, **calls)
    # Ratios are of pairs taken in the same round, on the same sample sizes.
    base = seconds["dp-sgd"]
    spectrum = statistics.median(seconds["spectrum"])
    once = [(step + spectrum / EPOCH) / plain for step, plain in zip(seconds["sma without refresh"], base, strict=True)]
    every = [step / plain for step, plain in zip(seconds["sma every step"], base, strict=True)]
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "engine": arguments.engine,
        "expected_batch": arguments.batch,
        "parameters": layout.size,
        "groups": layout.groups,
        "dp_sgd_step_ms": 1e3 * statistics.median(base),
        "spectrum_ms": 1e3 * spectrum,
        "every step": statistics.median(every),
        "once an epoch": statistics.median(once),
    }


def fill(training: vestige.Training) -> None:
    """Fill the memory's window with noise, so that every measured step has a whole past."""
    memory = training.method.memory
    if isinstance(memory, Spectral):
        state = training.state.memory
        state["past"].normal_()
        state["trend"].normal_()
        state["count"] = memory.window
        state["exponent"].fill_(4.0)
        state["weights"] = memory.weigh(state["tempering"], memory.window - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engine", default="bookkeeping", choices=list(ENGINES))
    parser.add_argument("--batch", type=int, default=200, help="expected batch")
    parser.add_argument("--physical-batch", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments) for name in arguments.models]
    print("| model | device | engine | batch | parameters | groups | group-wise DP-SGD step | spectrum alone "
          "| SMA over it, refreshed every step (goal 1.25; paper 2.94) | once an epoch (goal 1.05) |")  # fmt: skip
    print("|---" * 10 + "|")
    for row in rows:
        print(
            f"| {row['model']} | {row['device']} | {row['engine']} | {row['expected_batch']} | {row['parameters']:,} "
            f"| {row['groups']} | {row['dp_sgd_step_ms']:.1f} ms | {row['spectrum_ms']:.1f} ms "
            f"| {row['every step']:.3f} | {row['once an epoch']:.3f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"goals": GOALS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
