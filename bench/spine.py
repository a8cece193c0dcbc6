"""What do memory, accounting, ledger and checkpoints cost? Ratios in one run, beside the copy speed of this machine.

usage: python bench/spine.py [--engine NAME] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import vestige
from vestige import accounting
from vestige.engines.registry import ENGINES
from vestige.priced_questions import SampledGaussian
from vestige.randomness.sum_and_release_types import Release
from vestige.tasks import models

BATCH, EXAMPLES = 200, 5000


def cifar_mlp_run(method: vestige.Method, engine: str, out: Path | None = None) -> vestige.Training:
    """The FO-DP-SGD paper's protocol on random images: the cost does not depend on what they show."""
    torch.manual_seed(0)
    data = torch.rand(EXAMPLES, 3072) * 2 - 1, torch.randint(10, (EXAMPLES,))
    return vestige.train(
        models.mlp(3072, 10),
        nn.functional.cross_entropy,
        data,
        method=method,
        noise_multiplier=1.2222,
        delta=1e-5,
        sample_rate=BATCH / EXAMPLES,
        steps=1_000_000,
        lr=0.1,
        engine=engine,
        out=out,
    )


def interleaved(rounds: int, **runs: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each call, taken in turn so that the machine's moods fall on all of them."""
    for call in runs.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, call in runs.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def step_ratios(engine: str, rounds: int) -> dict[str, float]:
    methods = {
        "dp-sgd": vestige.dp_sgd(),
        "fo K=8": vestige.fo_dp_sgd(window=8),
        "fo K=32": vestige.fo_dp_sgd(window=32),
    }
    steps = {name: iter(cifar_mlp_run(method, engine)) for name, method in methods.items()}
    for name in steps:
        for _ in range(34):  # fill the windows
            next(steps[name])
    return interleaved(rounds, **{name: (lambda records=records: next(records)) for name, records in steps.items()})


def memory_alone(rounds: int, window: int) -> dict[str, float]:
    """The memory's own step, beside a copy of as many bytes as one reading of its window."""
    method = vestige.fo_dp_sgd(window=window)
    from vestige.layout import Layout

    layout = Layout.of(models.mlp(3072, 10))
    state = method.memory.init(layout, torch.device("cpu"))
    fresh = Release(torch.randn(layout.size), 1.0, BATCH)
    for _ in range(window):
        state = method.memory.step(fresh, state, {}).state
    source = torch.randn((window - 1) // 2 + 1, layout.size)  # a copy reads and writes: half the bytes each way
    target = torch.empty_like(source)

    def step() -> None:
        nonlocal state
        state = method.memory.step(fresh, state, {}).state

    return interleaved(rounds, memory=step, copy=lambda: target.copy_(source))


def bookkeeping_overhead(engine: str, rounds: int) -> dict[str, float]:
    """A step with and without a run folder (ledger row made durable, record, checkpoints), averaged over many steps."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "in memory": iter(cifar_mlp_run(vestige.fo_dp_sgd(), engine)),
            "on disk": iter(cifar_mlp_run(vestige.fo_dp_sgd(), engine, Path(folder) / "run")),
        }
        seconds = {name: 0.0 for name in runs}
        for records in runs.values():
            for _ in range(10):
                next(records)
        for _ in range(rounds):
            for name, records in runs.items():
                begin = time.perf_counter()
                next(records)
                seconds[name] += time.perf_counter() - begin
        for records in runs.values():
            records.close()  # type: ignore[attr-defined]
        return {name: value / rounds for name, value in seconds.items()}


def accounting_times() -> dict[str, float]:
    begin = time.perf_counter()
    accounting.epsilon({SampledGaussian(0.04, 1.2222): 6250}, 1e-5)
    equal = time.perf_counter() - begin
    begin = time.perf_counter()
    odometer = accounting.Odometer()
    for step in range(1000):
        odometer.add(SampledGaussian(0.04, 1.0 + step / 1000))
    odometer.epsilon(1e-5)
    return {"6,250 equal steps by PLD": equal, "odometer, 1,000 distinct multipliers": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="bookkeeping", choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {
        "step": step_ratios(arguments.engine, arguments.rounds),
        "memory K=8": memory_alone(10 * arguments.rounds, 8),
        "memory K=32": memory_alone(10 * arguments.rounds, 32),
        "disk": bookkeeping_overhead(arguments.engine, 3 * arguments.rounds),
        "accounting": accounting_times(),
    }
    step, disk = results["step"], results["disk"]
    print(f"engine {arguments.engine}, CIFAR-10 MLP, expected batch {BATCH}, {torch.get_num_threads()} threads\n")
    print("| what | measured | goal |\n|---|---|---|")
    print(f"| DP-SGD step | {step['dp-sgd'] * 1e3:.1f} ms | |")
    print(f"| FO-DP-SGD step over it, K=8 | {step['fo K=8'] / step['dp-sgd']:.3f} | 1.05 |")
    print(f"| FO-DP-SGD step over it, K=32 | {step['fo K=32'] / step['dp-sgd']:.3f} | 1.15 |")
    for window in (8, 32):
        row = results[f"memory K={window}"]
        print(
            f"| memory alone over copying its window once, K={window} | "
            f"{row['memory'] * 1e3:.2f} ms, {row['memory'] / row['copy']:.2f} | |"
        )
    print(f"| ledger, records and checkpoints over a step | {disk['on disk'] / disk['in memory'] - 1:+.1%} | 2% |")
    for what, value in results["accounting"].items():
        print(f"| {what} | {value:.2f} s | {'1 s' if 'odometer' in what else ''} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
