"""Which method is most accurate at equal privacy? Every method, one grid of learning rates, several seeds, as found.

    python bench/methods_accuracy.py --data cifar10_7k.npz --out bench/results/accuracy.json --device cuda --workers 4

Every run of every method is calibrated to the same epsilon. Learning rates are multiples of what `auto` chooses for
that method, the same multiples for all; 1 is `auto` itself. The table gives `auto` (no tuning, so the epsilon holds as
it is) and the best of the grid (chosen on the test set: flattered, and not a private choice). Results are appended to
PATH.jsonl as they come; run again with the same options to continue where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student

import vestige
from vestige import tasks
from vestige.method import METHODS, build

GRID = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
LIMITS = ("sample_rate", "steps", "delta")
_NOISE: dict[Any, float] = {}


def one(cell: dict[str, Any]) -> dict[str, Any]:
    """Train once; the calibrated noise and the automatic rate are kept between cells of one worker."""
    torch.set_num_threads(1)
    task = tasks.load(cell["task"], cell["data"], cell["seed"])
    method = build(cell["method"])
    fixed: dict[str, Any] = {"method": method, **{key: cell[key] for key in LIMITS}}
    if method.gate.adaptive:  # only a filter that knows the budget bounds questions that follow from answers
        fixed["epsilon"] = cell["epsilon"]
    key = tuple(cell[name] for name in ("task", "method", "epsilon", *LIMITS))
    prepare = partial(vestige.train, task.model.to(cell["device"]), task.loss, task.train)
    if key not in _NOISE:
        _NOISE[key] = prepare(**{**fixed, "epsilon": cell["epsilon"]}).plan.noise_multiplier
    fixed["noise_multiplier"] = _NOISE[key]
    rate = prepare(**fixed).plan.lr * cell["multiple"]
    begin = time.perf_counter()
    training = prepare(**fixed, lr=rate)
    for _ in training:
        pass
    with training.averaged():
        found = vestige.accuracy(task.model, task.test)
    seconds = time.perf_counter() - begin
    return {**cell, "accuracy": found, "lr": rate, "noise_multiplier": _NOISE[key], "seconds": round(seconds, 2)}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of Student's 95% interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| epsilon | method | auto | best of grid | best multiple | runs |", "|---:|---|---:|---:|---:|---:|"]
    cells: dict[tuple[float, str], dict[float, list[float]]] = {}
    for row in rows:
        group = cells.setdefault((row["epsilon"], row["method"]), {})
        group.setdefault(row["multiple"], []).append(row["accuracy"])

    def shown(values: list[float]) -> str:
        mean, half = interval(values)
        return f"{mean:.4f}" + ("" if math.isnan(half) else f" ± {half:.4f}")

    for (epsilon, method), by_rate in sorted(
        cells.items(), key=lambda item: (item[0][0], -max(map(_mean, item[1].values())))
    ):
        best = max(by_rate, key=lambda multiple: _mean(by_rate[multiple]))
        auto = shown(by_rate[1.0]) if 1.0 in by_rate else ""
        runs = sum(map(len, by_rate.values()))
        lines.append(f"| {epsilon:g} | {method} | {auto} | {shown(by_rate[best])} | {best:g} | {runs} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar10-mlp")
    parser.add_argument("--data", default=None)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=[3.0, 8.0])
    parser.add_argument("--multiples", nargs="*", type=float, default=list(GRID))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sample-rate", type=float, default=0.04)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = options.out.with_suffix(".jsonl")
    lines.parent.mkdir(parents=True, exist_ok=True)
    cells = [
        {
            "task": options.task, "data": options.data, "method": method, "epsilon": epsilon, "multiple": multiple,
            "seed": seed, "sample_rate": options.sample_rate, "steps": options.steps, "delta": options.delta,
            "device": options.device,
        }
        for epsilon in options.epsilons
        for method in options.methods
        for seed in range(options.seeds)
        for multiple in options.multiples
    ]  # fmt: skip
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {json.dumps({key: row[key] for key in cells[0]}, sort_keys=True) for row in rows}
    left = [cell for cell in cells if json.dumps(cell, sort_keys=True) not in done]
    print(f"{len(cells) - len(left)} of {len(cells)} runs were already there", flush=True)
    with ProcessPoolExecutor(options.workers, mp_context=torch.multiprocessing.get_context("spawn")) as pool, open(
        lines, "a", buffering=1
    ) as file:  # fmt: skip
        waiting = {pool.submit(one, cell): cell for cell in left}
        for number, future in enumerate(as_completed(waiting), start=1):
            cell = waiting[future]
            try:
                row = future.result()
            except ValueError as error:
                print(f"{cell['method']} at {cell['epsilon']}: {error}", flush=True)
                continue
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            where = f"{row['method']} eps {row['epsilon']:g} x{row['multiple']:g}"
            print(f"{number}/{len(left)} {where}: {row['accuracy']:.4f}", flush=True)
    wanted = {json.dumps(cell, sort_keys=True) for cell in cells}
    rows = [r for r in rows if json.dumps({key: r[key] for key in cells[0]}, sort_keys=True) in wanted]
    text = table(rows)
    print(text, end="")
    options.out.with_suffix(".json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
