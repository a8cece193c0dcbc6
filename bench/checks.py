"""What do the checks of every step cost? A step with them over one without, in turn, in one process.

usage: python bench/checks.py [--device cpu|cuda] [--rounds N] [--seconds S]

Left out are the checks that could be left out and the step would still be the same: that buffers stay as they are, that
no layer mixes examples, that there is one process, and that the optimizer holds the model's own parameters.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch

from engines import CASES, Step, privacy_engine, whole_step
from noise import timed

PATCHED = {
    "vestige.engines.writes.Writes.versions": dict,
    "vestige.engines.writes.Writes.require_unchanged": lambda *arguments: None,
    "vestige.engines.bookkeeping.require_independent": lambda model: None,
    "vestige.privacy_engine.passes.require_independent": lambda model: None,
    "vestige.privacy_engine.passes.require_noised": lambda *arguments: None,
    "vestige.privacy_engine.optimizer_step.require_same_group": lambda group: None,
    "vestige.privacy_engine.optimizer_step.require_own": lambda *arguments: None,
    "vestige.training.run.require_same_group": lambda group: None,
}


def unchecked(step: Step, steps: int) -> Step:
    def run() -> object:
        with ExitStack() as stack:
            for name, nothing in PATCHED.items():
                stack.enter_context(mock.patch(name, nothing if nothing is not dict else lambda self: {}))
            return [step() for _ in range(steps)]

    return run


def cost(make: Callable[[], Step], steps: int, device: str, rounds: int, seconds: float) -> tuple[float, float]:
    """Milliseconds of a step, and the median ratio of steps with checks to steps without."""
    step = make()
    ways = {"with": lambda: [step() for _ in range(steps)], "without": unchecked(step, steps)}
    for way in ways.values():
        way()
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seen[name].append(timed(way, device, seconds))
    ratios = [one / other for one, other in zip(seen["with"], seen["without"], strict=True)]
    return statistics.median(seen["with"]) / steps, statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    print("| model | way | ms | with checks over without | goal |\n|---|---|---|---|---|")
    for name in ("CIFAR MLP", "tanh CNN"):
        case = CASES[name]
        count = case.batch if options.device == "cuda" else case.cpu_batch or case.batch
        steps = 20 if name == "CIFAR MLP" else 1
        for way, make in (("loop", privacy_engine), ("vestige.train", whole_step)):
            torch.manual_seed(0)
            model = case.build().to(options.device)
            batch = case.inputs(count).to(options.device), torch.randint(10, (count,), device=options.device)
            spent, over = cost(lambda: make(model, batch), steps, options.device, options.rounds, options.seconds)  # noqa: B023
            print(f"| {name} [{count}] | {way} | {spent:.2f} | {over:.3f} | 1.02 |", flush=True)


if __name__ == "__main__":
    main()
