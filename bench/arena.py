"""What must be shown? Every comparison and reproduction that docs/ reports, by one command that can be started again.

    python bench/arena.py --data DATA --out bench/results/arena --device cuda [--only cifar10 ...] [--small]

`cifar10`: the FO-DP-SGD paper's protocol at epsilon 1, 3, 8 and at its own budget of 17.4, every method there is,
seven learning rates. `svhn`, `cifar100`: the same at 17.4, nine rates. `layers`, `layers-mnist`: is it better to
clip layer by layer, and does SMA-DP-SGD's memory add to that? `balance...`: four methods with and
without balanced steps, five datasets, at the automatic rate (`-auto`) and tuned (`-tuned`); `bench/balance.py pairs`
makes their table. `presets`: every preset whose methods exist. `stack`: how fast 600 stacked runs are. Every final seed
has a choice of its own, and there are as many as a test of all rows takes (docs/results was made before, of rates
chosen once). Reports are written beside the records; docs/results has those of `cifar10`, `svhn` and `cifar100`
(`vestige report OUT/cifar10 --out docs/results/cifar10-report.html`).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vestige import tasks
from vestige.cli.report import write_report
from vestige.compare import paper_presets, runner, stacked
from vestige.compare.arguments import contenders
from vestige.compare.execute_run import Machine
from vestige.compare.specification import FACTORS, Contender, Problem, Rate, Specification
from vestige.compare.statistics import seeds_to_tell
from vestige.compare.summary import summarised
from vestige.methods.registry import METHODS, make_method
from vestige.run_records import PrivacyTarget

OWN_BUDGET = 17.4
"""What the FO-DP-SGD paper's own settings cost, by loss distributions; the paper does not say it."""
FIELD = ["dp-sgd", "dp-sgd:momentum=0.9", "fo-dp-sgd", "post-fm", "uniform-memory", "exponential-memory"]
BY_LAYERS = "dp-sgd:groups=layers"
"""What SMA-DP-SGD is without its memory."""
EVERY = [*FIELD, *(name for name in METHODS if name not in (*FIELD, "sa-dp-sgd")), BY_LAYERS]
"""The paper's field first, then every further method there is; sa-dp-sgd is another name of dp-sam."""
WIDE = (*FACTORS, 16.0, 32.0)
LEAST_SEEDS = 20
BALANCED = [
    method
    for each in ("dp-sgd", BY_LAYERS, "dp-adamw", "fo-dp-sgd")
    for method in (each, f"{each}{',' if ':' in each else ':'}balance=relative")
]
"""Methods without and with balanced steps."""


@dataclass(frozen=True)
class Shown:
    """One comparison that docs/ reports."""

    tasks: tuple[str, ...]
    epsilons: tuple[float, ...]
    methods: list[str]
    factors: tuple[float, ...] = WIDE
    evaluations: int = 0
    sample_rate: float = 0.04
    rates: tuple[Rate, ...] = ("tuned", "auto")

    def specification(self, data: str | None, small: bool) -> Specification:
        rows = len(self.tasks) * len(self.epsilons) * (len(self.methods) - 1) * len(self.rates)
        return Specification(
            problems=tuple(Problem(task, data) for task in self.tasks),
            contenders=tuple(Contender(label, name, options) for label, name, options in contenders(self.methods)),
            budgets=tuple(PrivacyTarget("epsilon", value) for value in self.epsilons),
            seeds=tuple(range(2 if small else max(LEAST_SEEDS, seeds_to_tell(rows) + 1))),
            steps=40 if small else 6250,
            sample_rate=self.sample_rate,
            rates=self.rates,
            factors=(0.5, 1.0, 2.0) if small else self.factors,
            evaluations=self.evaluations,
        )


LOW = (1.0, 3.0, 8.0)
CLIPS = ["dp-sgd", BY_LAYERS, "sma-dp-sgd"]
SHOWN = {
    "cifar10": Shown(("cifar10-mlp",), (*LOW, OWN_BUDGET), EVERY, FACTORS, evaluations=25),
    "svhn": Shown(("svhn-mlp",), (OWN_BUDGET,), EVERY),
    "cifar100": Shown(("cifar100-mlp",), (OWN_BUDGET,), EVERY),
    "layers": Shown(("svhn-mlp",), LOW, CLIPS),
    "layers-mnist": Shown(("mnist-mlp", "fmnist-mlp"), LOW, CLIPS, sample_rate=0.0033333),
}
USUAL, HIGHER = (0.5, 1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)
"""Multiples of the automatic rate that are tried; on SVHN the best have always been above it."""
for data, rate, where, multiples in (
    ("svhn", 0.04, ("svhn-mlp",), HIGHER),
    ("cifar10", 0.04, ("cifar10-mlp",), USUAL),
    ("cifar100", 0.04, ("cifar100-mlp",), USUAL),
    ("mnist", 0.0033333, ("mnist-mlp", "fmnist-mlp"), USUAL),
):
    every = (*LOW, OWN_BUDGET)
    SHOWN[f"balance-{data}-auto"] = Shown(where, every, BALANCED, sample_rate=rate, rates=("auto",))
    SHOWN[f"balance-{data}-tuned"] = Shown(where, every, BALANCED, multiples, 0, rate, ("tuned",))


def compare(name: str, specification: Specification, arguments: argparse.Namespace) -> None:
    folder = arguments.out / name
    begin = time.perf_counter()
    shown = [0.0]

    def on_progress(status: runner.Status) -> None:
        if time.perf_counter() - shown[0] > 20:
            shown[0] = time.perf_counter()
            left = "?" if status.seconds_left is None else f"{status.seconds_left:.0f} s"
            print(
                f"{name}: {status.done}/{status.total}, {status.failed} failed, {left} left; {status.best}", flush=True
            )

    machine, workers = Machine(arguments.device), arguments.workers
    home = runner.compare(folder, specification, machine=machine, workers=workers, on_progress=on_progress)
    (folder / "summary.json").write_text(json.dumps(summarised(home), indent=1))
    write_report(folder, None, None, f"{name}: private optimizers at one budget")
    print(f"{name}: {len(home.records())} runs in {time.perf_counter() - begin:.0f} s", flush=True)


def reproduce(arguments: argparse.Namespace) -> None:
    printed: dict[str, Any] = {}
    for name, preset in paper_presets.PRESETS.items():
        if arguments.preset and name not in arguments.preset:
            continue
        try:
            specification = preset.specification(arguments.data, small=arguments.small)
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        compare(name, specification, arguments)
        home = runner.ComparisonFolder(arguments.out / name)
        printed[name] = paper_presets.beside(preset, home.records().values())
        (arguments.out / "beside.json").write_text(json.dumps(printed, indent=1))


def stack(arguments: argparse.Namespace) -> None:
    """The goal: 600 runs of the paper's protocol in three minutes on one H200."""
    runs, steps = (8, 20) if arguments.small else (600, 6250)
    device = torch.device(arguments.device)
    task = tasks.load("cifar10-mlp", arguments.data, 0)
    method = make_method("fo-dp-sgd")
    starts = [tasks.load("cifar10-mlp", arguments.data, seed).model for seed in range(5)]
    chosen = [
        stacked.StackedRun(copy.deepcopy(starts[i % 5]), method, (1.2222, 2.0, 4.5)[i % 3], 0.05 * 1.5 ** (i % 8))
        for i in range(runs)
    ]
    begin = time.perf_counter()
    together = stacked.Stack(chosen, task.train, sample_rate=0.04, steps=steps, device=device)
    for done in together.train():
        if done % max(1, steps // 10) == 0:
            print(f"stack: {done}/{steps} steps, {time.perf_counter() - begin:.1f} s", flush=True)
    shares = together.accuracies(task.test)
    seconds = time.perf_counter() - begin
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    row = {"runs": runs, "steps": steps, "seconds": seconds, "best": max(shares), "device": str(device), "gib": memory}
    (arguments.out / "stack.json").write_text(json.dumps(row))
    print(f"stack: {runs} runs of {steps} steps in {seconds:.1f} s; best accuracy {max(shares):.4f}; {memory} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, help="folder with the datasets")
    parser.add_argument("--out", type=Path, default=Path("bench/results/arena"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tf32", action="store_true", help="products in TF32 on a GPU")
    parser.add_argument("--only", nargs="*", default=["stack", *SHOWN, "presets"])
    parser.add_argument("--preset", nargs="*", help="with presets: only these")
    parser.add_argument("--small", action="store_true", help="a rehearsal of everything, with next to no steps")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    print(f"{len(METHODS)} methods: {', '.join(METHODS)}")
    for part in arguments.only:
        if part == "stack":
            stack(arguments)
        elif part == "presets":
            reproduce(arguments)
        elif part in SHOWN:
            compare(part, SHOWN[part].specification(arguments.data, arguments.small), arguments)
        else:
            raise SystemExit(f"--only {part}: choose from stack, {', '.join(SHOWN)} and presets")


if __name__ == "__main__":
    main()
