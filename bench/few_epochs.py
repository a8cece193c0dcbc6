"""Where can correlated noise win? Few epochs and a large budget: 300 steps of 3 epochs at epsilon 8, small networks.

    python bench/few_epochs.py --out bench/results/few-epochs [--data DATA --task mnist-mlp] [--seeds 5] [--small]

The rule of thumb of arXiv:2405.15913 gives 46 bands there, and one band (white noise) in the long runs that
`bench/arena.py` compares. Every method is run at the best of a grid of rates, chosen on held-out training data, and at
the automatic rate; the table is written beside the records, and docs/results/few-epochs.md holds one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

from vestige.compare import runner
from vestige.compare.arguments import contenders
from vestige.compare.execute_run import Machine
from vestige.compare.specification import Contender, Problem, Specification
from vestige.run_records import PrivacyTarget, RunRecord, completed, failed

FIELD = ["dp-sgd", "dp-bandmf", "dp-bandmf:bands=4", "dp-blt", "dp-ftrl"]
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
STEPS, EPOCHS, EPSILON = 300, 3, 8.0


def specification(
    tasks: Sequence[str], methods: Sequence[str], data: str | None, seeds: int, small: bool = False
) -> Specification:
    steps = 30 if small else STEPS
    return Specification(
        problems=tuple(Problem(task, data if task != "digits-mlp" else None) for task in tasks),
        contenders=tuple(Contender(label, name, options) for label, name, options in contenders(methods)),
        budgets=(PrivacyTarget("epsilon", EPSILON),),
        seeds=tuple(range(seeds)),
        tuning_seeds=(1000,) if small else (1000, 1001),
        steps=steps,
        sample_rate=EPOCHS / steps,
        factors=(0.5, 1.0, 2.0) if small else FACTORS,
        baseline=contenders(methods)[0][0],
    )


def table(records: Iterable[RunRecord]) -> str:
    """Accuracy on the test set by task and method, and the multiple of the automatic rate that tuning chose."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    factors: dict[tuple[str, str], set[float]] = {}
    for record in completed(records):
        place = (record.run.task, record.run.label)
        if record.run.stage != "tuning":
            cells.setdefault(place, {}).setdefault(record.run.stage, []).append(100 * record.score)
        if record.run.stage == "tuned":
            factors.setdefault(place, set()).add(record.run.factor)
    lines = ["| task | method | tuned | at the multiple | automatic |", "|---|---|---|---|---|"]
    for place, stages in sorted(cells.items()):
        chosen = ", ".join(f"{each:g}" for each in sorted(factors.get(place, set())))
        tuned, auto = (_spread(stages.get(stage, [])) for stage in ("tuned", "auto"))
        lines.append(f"| {place[0]} | {place[1]} | {tuned} | {chosen} | {auto} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/few-epochs"))
    parser.add_argument("--data", help="folder with the datasets of other tasks than digits-mlp")
    parser.add_argument("--task", nargs="*", default=["digits-mlp"])
    parser.add_argument("--method", nargs="*", default=FIELD, help="the first is the baseline")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="a rehearsal: 30 steps, three rates")
    arguments = parser.parse_args()
    wanted = specification(arguments.task, arguments.method, arguments.data, arguments.seeds, arguments.small)
    home = runner.compare(arguments.out, wanted, machine=Machine(arguments.device))
    records = list(home.records().values())
    for record in failed(records)[:5]:
        print(f"failed: {record.run.label}: {record.error}")
    text = table(records)
    (arguments.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
