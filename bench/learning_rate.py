"""How much does the automatic learning rate lose against the best tuned one? Over tasks, methods, budgets and lengths.

    python bench/learning_rate.py --data DATA --out bench/results/learning-rate [--device cuda] [--small]

Every setting trains a grid of multiples of the automatic rate, as stacks, three seeds each, judged on a fifth of the
training data held out. It can be killed and started again. It writes table.md, table.json and plot.svg: per setting
the best multiple, the accuracy there and at 1, and the loss between them (which flatters the best: it was chosen by the
same runs).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vestige import experiments, report
from vestige.cli_compare import contenders
from vestige.comparison import VALIDATION, Budget, Contender, Problem, Specification
from vestige.performing import Place

FACTORS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.5, 5.0, 10.0)
METHODS = ["dp-sgd", "dp-sgd:momentum=0.9", "fo-dp-sgd", "fo-dp-sgd:beta=0.5", "post-fm", "exponential-memory"]
TASKS = ["digits-mlp", "mnist-mlp", "fmnist-mlp", "cifar10-mlp", "svhn-mlp", "cifar100-mlp"]


def settings(small: bool) -> list[tuple[str, int, float]]:
    """Task, steps and sampling rate of each comparison."""
    tasks = TASKS[:1] if small else TASKS
    lengths = ((60, 0.05),) if small else ((300, 0.04), (1000, 0.04), (3000, 0.04), (300, 0.2))
    return [(task, steps, rate) for task in tasks for steps, rate in lengths]


def study(task: str, steps: int, rate: float, methods: list[str], data: str | None, small: bool) -> Specification:
    """A comparison whose tuning runs are the study; its one final run per row costs little."""
    return Specification(
        problems=(Problem(task, data if task != "digits-mlp" else None),),
        contenders=tuple(Contender(label, name, options) for label, name, options in contenders(methods)),
        budgets=tuple(Budget("epsilon", value) for value in ((3.0,) if small else (1.0, 3.0, 8.0))),
        seeds=(0,),
        tuning_seeds=(1000, 1001) if small else (1000, 1001, 1002),
        steps=steps,
        sample_rate=rate,
        rates=("tuned",),
        factors=(0.4, 1.0, 2.5) if small else FACTORS,
        validation=0.2,
    )


def losses(folder: Path) -> list[dict[str, Any]]:
    """One row per setting of a finished comparison: how far auto is from the best of the grid."""
    from vestige.comparison_folder import ComparisonFolder

    home = ComparisonFolder(folder)
    specification = home.specification()
    cells: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    failed = 0
    for record in home.records().values():
        run = record["run"]
        if run["stage"] != "tuning":
            continue
        if record["status"] != "done":
            failed += 1
            continue
        key = (run["task"], f"{run['budget']['value']:g}", run["label"])
        cells.setdefault(key, {}).setdefault(run["factor"], []).append(record[VALIDATION])
    rows = []
    for (task, epsilon, method), found in sorted(cells.items()):
        means = {factor: sum(values) / len(values) for factor, values in found.items()}
        best = max(means, key=lambda factor: means[factor])
        rows.append(
            {
                "task": task,
                "epsilon": float(epsilon),
                "steps": specification.steps,
                "sample_rate": specification.sample_rate,
                "method": method,
                "best_factor": best,
                "best": means[best],
                "auto": means.get(1.0),
                "loss": means[best] - means[1.0],
                "accuracy_by_factor": {f"{factor:g}": value for factor, value in sorted(means.items())},
            }
        )
    if failed:
        print(f"{folder}: {failed} runs failed")
    return rows


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """The table, the data and the plot."""
    (out / "table.json").write_text(json.dumps(rows, indent=1))
    worst = sorted(rows, key=lambda row: -row["loss"])
    mean = sum(row["loss"] for row in rows) / len(rows)
    lines = [
        f"{len(rows)} settings; the automatic rate loses {mean:.4f} on average, {worst[0]['loss']:.4f} at worst "
        f"({worst[0]['method']} on {worst[0]['task']}, epsilon {worst[0]['epsilon']:g}, {worst[0]['steps']} steps).",
        "",
        "| task | epsilon | steps | rate | method | best multiple | best | auto | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['task']} | {r['epsilon']:g} | {r['steps']} | {r['sample_rate']:g} | {r['method']} | "
        f"{r['best_factor']:g} | {r['best']:.4f} | {r['auto']:.4f} | {r['loss']:.4f} |"
        for r in worst
    ]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    names = list(dict.fromkeys(row["method"] for row in rows))
    series = []
    for name in names:
        by_factor: dict[float, list[float]] = {}
        for row in rows:
            if row["method"] == name:
                for factor, value in row["accuracy_by_factor"].items():
                    by_factor.setdefault(float(factor), []).append(row["best"] - value)
        points = tuple((factor, sum(v) / len(v), None, None) for factor, v in sorted(by_factor.items()))
        series.append(report.Series(name, points))
    figure = report.Figure(
        "learning-rate",
        "accuracy lost against the best rate of the grid, mean over settings",
        "learning rate, as a multiple of the automatic one",
        "accuracy lost",
        tuple(series),
        log_x=True,
        percent=True,
    )
    (out / "plot.svg").write_text(report.svg(figure, names, standalone=True))
    print(lines[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", help="folder with the datasets")
    parser.add_argument("--out", type=Path, default=Path("bench/results/learning-rate"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", action="append", help="NAME or NAME:option=value,... (default: the stackable ones)")
    parser.add_argument("--small", action="store_true", help="digits only, in a minute")
    arguments = parser.parse_args()
    rows = []
    for task, steps, rate in settings(arguments.small):
        folder = arguments.out / f"{task}-{steps}-{rate:g}"
        specification = study(task, steps, rate, arguments.method or METHODS, arguments.data, arguments.small)
        place = Place(device=arguments.device)
        try:
            experiments.compare(folder, specification, place=place)
        except ValueError as error:
            print(f"{task}: {error}")
            continue
        rows += losses(folder)
    if not rows:
        raise SystemExit("no setting could be run")
    write(rows, arguments.out)


if __name__ == "__main__":
    main()
