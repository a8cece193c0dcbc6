"""How much does the automatic learning rate lose against the best tuned one? Over tasks, methods, budgets and lengths.

    python bench/learning_rate.py --data DATA --out bench/results/learning-rate [--device cuda] [--small] [--balance]
    python bench/learning_rate.py --out bench/results/learning-rate --render docs/results [--also FOLDER ...]

Every setting trains a grid of multiples of the automatic rate, stacked where it can be, two seeds each, judged on a
fifth of the training data held out. It can be killed and started again. `--render` writes learning-rate.md and .svg
from what is there, and takes in the tuning trials of further comparisons (`--also`). `--balance` gives every method
balanced steps (a folder of its own, please).

Two losses are stated. `loss`: the best mean of the grid less the mean at 1, which flatters the best, chosen by the very
runs that judge it. `honest`: the best by the other seeds, judged on the seed left out; it can be negative.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vestige.compare import run_grid, runner
from vestige.compare.arguments import contenders
from vestige.compare.execute_run import Machine
from vestige.compare.folder import ComparisonFolder
from vestige.compare.report import drawing
from vestige.compare.specification import Contender, Problem, Specification
from vestige.methods.registry import METHODS
from vestige.run_records import PrivacyTarget, Run, RunRecord, completed, failed

FACTORS = (0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
COARSE = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
FIELD = ["dp-sgd", "dp-sgd:momentum=0.9", "fo-dp-sgd", "fo-dp-sgd:beta=0.5", "post-fm", "exponential-memory"]
SMALL_IMAGES = ["cifar10-mlp", "svhn-mlp", "cifar100-mlp"]
SELECTIVE = ("dpsur", "dpsgd-br")
"""Their loss tests alone cost more than these budgets on these data."""
UNBALANCED = ("dp-micro-adam", "dp-muon")
WORST = 10
FEW = 6
"""Methods, up to which a setting is a row and not a column."""
WORTH_NAMING = 0.01


def balanced(methods: Sequence[str]) -> list[str]:
    """The same methods with balanced steps, but for those that refuse them."""
    return [f"{each}{',' if ':' in each else ':'}balance=relative" for each in methods if each not in UNBALANCED]


def studies(data: str | None, small: bool = False) -> dict[str, Specification]:
    """The settings by name, the most telling first; only their tuning runs are made."""
    if small:
        return {"digits": _study(["digits-mlp"], FIELD, None, 60, 0.05, (3.0,), (0.4, 1.0, 2.5))}
    made = {}
    for steps, rate, budgets, methods in (
        (300, 0.04, (1.0, 3.0, 8.0), FIELD),
        (1000, 0.04, (1.0, 8.0), FIELD),
        (50, 0.04, (3.0,), FIELD),
        (300, 0.2, (3.0,), FIELD[:3]),
        (3000, 0.04, (3.0,), FIELD[:3]),
    ):
        name = f"images-{steps}-{rate:g}"
        made[name] = _study(["digits-mlp", *SMALL_IMAGES], methods, data, steps, rate, budgets, FACTORS)
    made["mnist"] = _study(["mnist-mlp", "fmnist-mlp"], FIELD, data, 1000, 0.004, (1.0, 8.0), FACTORS)
    others = [name for name in METHODS if name not in SELECTIVE and name not in {word.split(":")[0] for word in FIELD}]
    made["others"] = _study(["digits-mlp", "cifar10-mlp"], others, data, 300, 0.04, (3.0,), COARSE)
    made["cnn"] = _study(["cifar10-cnn", "svhn-cnn"], ["dp-sgd", "dp-adam"], data, 300, 0.04, (1.0, 8.0), COARSE)
    return made


def with_balance(specification: Specification) -> Specification:
    made = [
        Contender(label, name, options)
        for label, name, options in contenders(balanced([each.label for each in specification.contenders]))
    ]
    return replace(specification, contenders=tuple(made), baseline=made[0].label)


def _study(
    tasks: Sequence[str],
    methods: Sequence[str],
    data: str | None,
    steps: int,
    rate: float,
    budgets: Sequence[float],
    factors: tuple[float, ...],
) -> Specification:
    return Specification(
        problems=tuple(Problem(task, data if task != "digits-mlp" else None) for task in tasks),
        contenders=tuple(Contender(label, name, options) for label, name, options in contenders(methods)),
        budgets=tuple(PrivacyTarget("epsilon", value) for value in budgets),
        tuning_seeds=(1000, 1001),
        choose="once",
        steps=steps,
        sample_rate=rate,
        rates=("tuned",),
        factors=factors,
        baseline=contenders(methods)[0][0],
    )


def wanted(specification: Specification) -> list[Run]:
    """The study's runs: those that would tune the rate, and no final ones."""
    return list(run_grid.tuning_runs(specification, run_grid.grid_of(specification)))


# --- what they say ---------------------------------------------------------------------------------------------------


def losses(records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """One row per setting: how far the automatic rate is from the best of the grid."""
    cells: dict[tuple[Any, ...], dict[float, dict[int, float]]] = {}
    for record in completed(records):
        run = record.run
        if run.stage == "tuning" and run.lr is None:
            key = (run.task, run.steps, run.sample_rate, run.budget.value, run.label)
            cells.setdefault(key, {}).setdefault(run.factor, {})[run.seed] = record.score
    return [_loss(key, found) for key, found in sorted(cells.items()) if 1.0 in found and len(found) > 2]


def _loss(key: tuple[Any, ...], found: Mapping[float, Mapping[int, float]]) -> dict[str, Any]:
    means = {factor: sum(values.values()) / len(values) for factor, values in found.items()}
    best = max(means, key=lambda factor: means[factor])
    task, steps, rate, epsilon, method = key
    return {
        "task": task,
        "steps": steps,
        "sample_rate": rate,
        "epsilon": epsilon,
        "method": method,
        "best_factor": best,
        "at_edge": best in (min(means), max(means)),
        "best": means[best],
        "auto": means[1.0],
        "loss": means[best] - means[1.0],
        "honest": _honest(found),
        "accuracy_by_factor": {f"{factor:g}": value for factor, value in sorted(means.items())},
    }


def _honest(found: Mapping[float, Mapping[int, float]]) -> float | None:
    """What the best by the other seeds gains over 1 on the seed left out, on average; None with a single seed."""
    seeds = set.intersection(*(set(values) for values in found.values()))
    if len(seeds) < 2:
        return None
    gains = []
    for left in seeds:
        scores = {factor: sum(v for seed, v in values.items() if seed != left) for factor, values in found.items()}
        best = max(scores, key=lambda factor: scores[factor])
        gains.append(found[best][left] - found[1.0][left])
    return sum(gains) / len(gains)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The whole page: conclusion, one table, and the settings where the rule fails."""
    settings: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = (row["task"], row["steps"], row["sample_rate"], row["epsilon"])
        settings.setdefault(place, {})[row["method"]] = row
    names = [name for name in (*FIELD, *balanced(FIELD)) if any(name in found for found in settings.values())]
    lines = [
        "# The automatic learning rate, setting by setting",
        "",
        "```",
        "python bench/learning_rate.py --out bench/results/learning-rate --render docs/results [--also FOLDER ...]",
        "```",
        "",
        "What `lr auto` loses against the best rate of a grid around it, in points of accuracy on held-out training",
        "data, over two seeds (the rows with 6,250 steps: three, from `bench/arena.py`). In brackets the best multiple",
        "of the automatic rate; * at the end of the grid. The best is chosen by the runs that judge it, which flatters",
        "it.",
        "",
        _summary(rows),
        "",
        "![accuracy lost by multiple of the automatic rate](learning-rate.svg)",
        "",
        "| task | steps | q | epsilon | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    rest = []
    for (task, steps, rate, epsilon), found in sorted(settings.items()):
        if any(name in found for name in names):
            cells = " | ".join(_cell(found.get(name)) for name in names)
            lines.append(f"| {task} | {steps} | {rate:g} | {epsilon:g} | {cells} |")
        rest += [row for name, row in found.items() if name not in names]
    if rest:
        lines += ["", "Every other method, where its grid was run:", "", *_others(rest)]
    lines += ["", "## Where it fails", "", *_failures(rows), "", "## Would another constant be better?", ""]
    return "\n".join([*lines, *_constants(rows)]) + "\n"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    mean = sum(row["loss"] for row in rows) / len(rows)
    judged = [row["honest"] for row in rows if row["honest"] is not None]
    worst = max(rows, key=lambda row: row["loss"])
    inside = sum(row["loss"] < WORTH_NAMING for row in rows)
    honest = f"; judged on a seed that did not choose, {100 * sum(judged) / len(judged):.2f}" if judged else ""
    return (
        f"**{len(rows)} settings: the automatic rate loses {100 * mean:.2f} points on average{honest}; less than "
        f"{100 * WORTH_NAMING:.0f} point in {inside} of them. At worst {100 * worst['loss']:.1f} ({_words(worst)}).**"
    )


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{100 * row['loss']:.1f} ({row['best_factor']:g}{'*' if row['at_edge'] else ''})"


def _others(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Methods by settings; settings where few methods were run by methods, in a table of their own."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda each: (each["task"], each["steps"], each["epsilon"])):
        place = f"{row['task']}, {row['steps']} steps, epsilon {row['epsilon']:g}"
        found.setdefault(place, {})[row["method"]] = row
    order = list(dict.fromkeys(row["method"] for row in rows))
    most = {place: cells for place, cells in found.items() if len(cells) > FEW}
    few = {place: cells for place, cells in found.items() if len(cells) <= FEW}
    lines = []
    if most:
        lines += ["| method | " + " | ".join(most) + " |", "|---" * (1 + len(most)) + "|"]
        names = [name for name in order if any(name in cells for cells in most.values())]
        lines += [f"| {m} | " + " | ".join(_cell(cells.get(m)) for cells in most.values()) + " |" for m in names]
    if few:
        names = [name for name in order if any(name in cells for cells in few.values())]
        lines += ["", "| setting | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
        lines += [f"| {p} | " + " | ".join(_cell(cells.get(m)) for m in names) + " |" for p, cells in few.items()]
    return lines


def _failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    bad = sorted((row for row in rows if row["loss"] >= WORTH_NAMING), key=lambda row: -row["loss"])
    real = [row for row in bad if row["honest"] is not None and row["honest"] > WORTH_NAMING / 2]
    doubtful = f"{len(bad) - len(real)} of {len(rows)} settings lose a point or more that no second seed confirms."
    if not real:
        return ["No setting loses a point that a second seed confirms. " + doubtful]
    small = sum(row["best_factor"] > 1 for row in real)
    lines = [
        f"A point or more, confirmed by a seed that did not choose, in {len(real)} of {len(rows)} settings: too small "
        f"a rate in {small} of them, too large in {len(real) - small}. {doubtful}",
        "",
        *_by_task(rows, real),
        "",
        f"The worst {min(WORST, len(real))} of those confirmed:",
        "",
    ]
    for row in real[:WORST]:
        side = "too small" if row["best_factor"] > 1 else "too large"
        by = f"{row['best_factor']:g}" if row["best_factor"] > 1 else f"{1 / row['best_factor']:g}"
        more = " or more" if row["at_edge"] else ""
        had = f"{100 * row['auto']:.1f} where {100 * row['best']:.1f} was to be had"
        lines.append(f"- {_words(row)}: {side} by {by}{more}; {had}.")
    return lines


def _constants(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What one multiple of the automatic rate for everyone would lose: everywhere, and where the grid is finest."""
    lines = [
        "Points lost against the best if everyone took that multiple of the automatic rate, on average / at worst. The",
        "rule's own constant was fixed before this study and is left as it was: every automatic row of these documents",
        "is made with it.",
    ]
    for chosen in (rows, of_one_grid(rows)):
        common = set.intersection(*(set(row["accuracy_by_factor"]) for row in chosen))
        multiples = sorted((each for each in common if 0.5 <= float(each) <= 4), key=float)
        lost = {m: [100 * (row["best"] - row["accuracy_by_factor"][m]) for row in chosen] for m in multiples}
        cells = [f"{sum(values) / len(values):.2f} / {max(values):.1f}" for values in lost.values()]
        lines += [
            "",
            f"| {len(chosen)} settings | " + " | ".join(multiples) + " |",
            "|---" * (1 + len(multiples)) + "|",
        ]
        lines += ["| | " + " | ".join(cells) + " |"]
    return lines


def _by_task(rows: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| task | settings | confirmed failures | mean loss | median best multiple |", "|---" * 5 + "|"]
    for task in sorted({row["task"] for row in rows}):
        mine = [row for row in rows if row["task"] == task]
        failed = sum(row["task"] == task for row in real)
        mean = 100 * sum(row["loss"] for row in mine) / len(mine)
        middle = sorted(row["best_factor"] for row in mine)[len(mine) // 2]
        lines.append(f"| {task} | {len(mine)} | {failed} | {mean:.1f} | {middle:g} |")
    return lines


def _words(row: dict[str, Any]) -> str:
    length = f"{row['steps']} steps at q {row['sample_rate']:g}"
    return f"{row['method']} on {row['task']}, epsilon {row['epsilon']:g}, {length}"


def of_one_grid(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings with the largest grid; of several such grids, the commonest."""
    grids = Counter(tuple(row["accuracy_by_factor"]) for row in rows)
    largest = max(grids, key=lambda grid: (len(grid), grids[grid]))
    return [row for row in rows if tuple(row["accuracy_by_factor"]) == largest]


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy lost against the best, by multiple: a mean over settings for each of the field's methods.

    Only settings of one grid count, so that every point of a line is a mean over the same settings.
    """
    rows = of_one_grid(rows)
    series = []
    names = [name for name in (*FIELD, *balanced(FIELD)) if any(row["method"] == name for row in rows)]
    for name in names:
        by_factor: dict[float, list[float]] = {}
        for row in rows:
            for factor, value in row["accuracy_by_factor"].items() if row["method"] == name else ():
                by_factor.setdefault(float(factor), []).append(row["best"] - value)
        points = tuple((factor, sum(v) / len(v), None, None) for factor, v in sorted(by_factor.items()))
        series.append(drawing.Series(name, points))
    worst: dict[float, list[float]] = {}
    for row in rows:
        for factor, value in row["accuracy_by_factor"].items() if row["method"] in names else ():
            worst.setdefault(float(factor), []).append(row["best"] - value)
    series.append(drawing.Series("worst of all", tuple((f, max(v), None, None) for f, v in sorted(worst.items()))))
    figure = drawing.Figure(
        "learning-rate",
        "accuracy lost against the best rate: mean over settings, and the worst",
        "learning rate, as a multiple of the automatic one",
        "accuracy lost",
        tuple(series),
        log_x=True,
        percent=True,
    )
    return drawing.svg(figure, names, standalone=True)


def write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "learning-rate.md").write_text(render(rows))
    (out / "learning-rate.svg").write_text(plot(rows))
    print(_summary(rows))


def pooled(folder: Path) -> ComparisonFolder:
    """A folder of records that belong to no one comparison."""
    home = ComparisonFolder(folder)
    home.create_pool()
    return home


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", help="folder with the datasets")
    parser.add_argument("--out", type=Path, default=Path("bench/results/learning-rate"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="digits only, in a minute")
    parser.add_argument("--balance", action="store_true", help="with balanced steps")
    parser.add_argument("--only", nargs="*", help="only these studies")
    parser.add_argument("--render", type=Path, help="run nothing: write the page and the plot there")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="further folders of comparisons to take in")
    arguments = parser.parse_args()
    home = pooled(arguments.out)
    if arguments.render is None:
        for name, specification in studies(arguments.data, arguments.small).items():
            if arguments.only and name not in arguments.only:
                continue
            if arguments.balance:
                specification = with_balance(specification)
            data = {problem.task: problem.data for problem in specification.problems}
            study = wanted(specification)

            def due(records: Mapping[str, RunRecord], study: list[Run] = study) -> list[Run]:
                return [run for run in study if run.id not in records]

            runner.make(home, Machine(arguments.device, data), 1, due)
            print(f"{name}: {len(study)} runs", flush=True)
    records = [
        record for folder in (home, *map(ComparisonFolder, arguments.also)) for record in folder.records().values()
    ]
    broken = failed(records)
    for record in broken[:5]:
        print(f"{len(broken)} runs failed, such as {record.run.label}: {record.error}", file=sys.stderr)
    rows = losses(records)
    if not rows:
        raise SystemExit("no setting could be run")
    (arguments.out / "table.json").write_text(json.dumps(rows, indent=1))
    write(rows, arguments.render or arguments.out)


if __name__ == "__main__":
    main()
