"""How far does the memory reach for each spectral interval? The depths and ratios of the paper's Table 3 beside ours.

usage: python bench/spectral_interval.py --data cifar10.npz [--task cifar10-mlp] [--steps N] [--seeds N] [--epsilon E]
                                         [--json FILE]

The paper names neither the order nor the window of its Table 3; alpha 0.9 and K 8 are what its depths imply. Means are
over groups, steps and seeds; the exponents of each group say where the depths come from.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from vestige.tf32 import default_device
from vestige.training.job import Job, complete, start

PAPER = {
    (1.0, 3.0): (2.7636, 0.0065),
    (2.0, 4.0): (3.0902, 0.0136),
    (2.0, 6.0): (3.2079, 0.0133),
    (3.0, 5.0): (2.7487, 0.0113),
    (4.0, 6.0): (1.9857, 0.0072),
    (5.0, 7.0): (1.6749, 0.0027),
}


def measure(interval: tuple[float, float], seed: int, arguments: argparse.Namespace) -> dict[str, object]:
    job = Job(
        task=arguments.task,
        method="sma-dp-sgd",
        options={"interval": interval, "alpha": 0.9, "window": 8, "beta": 0.95},
        data=arguments.data,
        sample_rate=0.04,
        steps=arguments.steps,
        epsilon=arguments.epsilon,
        engine=arguments.engine,
        seed=seed,
        evaluate_every=arguments.steps,
        device=default_device(),
    )
    task, training = start(job, None)
    records: list[dict[str, float]] = []
    exponents: list[list[float | None]] = []

    def watch(training: object, record: object, accuracy: float | None) -> bool:
        row = record.to_json()  # type: ignore[attr-defined]
        if row["step"] >= 7:  # from here on the window is full
            records.append(row)
            exponents.append(row["exponent"])
        return True

    result = complete(job, task, training, watch)
    groups = [[value for value in column if value is not None] for column in zip(*exponents, strict=True)]
    return {
        "interval": list(interval),
        "seed": seed,
        "depth": statistics.fmean(row["effective_depth"] for row in records),
        "ratio": statistics.fmean(row["memory_ratio"] for row in records),
        "accuracy": result.accuracy,
        "epsilon": result.statement.epsilon,
        "exponents": [statistics.fmean(group) if group else None for group in groups],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", default="cifar10-mlp")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--engine", default="bookkeeping")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(interval, seed, arguments) for interval in PAPER for seed in range(arguments.seeds)]
    print(f"{arguments.task}, joint epsilon {arguments.epsilon:g} at delta 1e-5, {arguments.steps} steps\n")
    print("| interval | depth, paper | depth, ours | memory ratio, paper | memory ratio, ours | accuracy | exponents |")
    print("|---" * 7 + "|")
    for interval, (depth, ratio) in PAPER.items():
        mine = [row for row in rows if tuple(row["interval"]) == interval]  # type: ignore[arg-type]
        mean = {key: statistics.fmean(row[key] for row in mine) for key in ("depth", "ratio", "accuracy")}  # type: ignore[misc]
        shown = ", ".join("-" if value is None else f"{value:.2f}" for value in mine[0]["exponents"])  # type: ignore[attr-defined]
        print(
            f"| [{interval[0]:g}, {interval[1]:g}] | {depth:.3f} | {mean['depth']:.3f} | {ratio:.4f} "
            f"| {mean['ratio']:.4f} | {mean['accuracy']:.1%} | {shown} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
