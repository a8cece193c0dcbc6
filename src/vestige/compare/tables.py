"""What do the records of a comparison say? Rows of accuracies, the points that won, and what tuning costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from vestige import accounting
from vestige.compare.runs import Cell, Grid, Records, cells, choose, superseded
from vestige.compare.specification import Rate, Specification
from vestige.compare.statistics import Difference, holm, least_step, paired, sentence, summarise
from vestige.records import CompletedRun, RunRecord, completed, failed


class RowKey(NamedTuple):
    """What one row is about."""

    task: str
    budget: str
    rate: str
    label: str


Rows = Mapping[RowKey, Sequence[RunRecord]]


def rows(records: Iterable[RunRecord], baseline: str) -> list[dict[str, Any]]:
    """The table of a comparison, from its records alone: one row per task, budget, rate and contender.

    Differences are paired by seed with the baseline under the same kind of rate, and corrected by Holm over all rows of
    one task and kind of rate. Superseded runs are to be left out of `records`.
    """
    found = _by_row(records)
    steps = {task: least_step(_accuracies(found, task)) for task in {key.task for key in found}}
    differences = {key: _difference(key, found, baseline, steps[key.task]) for key in found}
    adjusted: dict[RowKey, float] = {}
    for family in {(key.task, key.rate) for key in found}:
        mine = {key: each.p for key, each in differences.items() if each and (key.task, key.rate) == family}
        tested = {key: p for key, p in mine.items() if p is not None}
        adjusted.update(zip(tested, holm(list(tested.values())), strict=True))
    made = [_row(key, runs, differences[key], adjusted.get(key), baseline) for key, runs in found.items()]
    return sorted(made, key=lambda row: (row["task"], row["budget_value"], row["rate"], -(row["mean"] or 0)))


def _by_row(records: Iterable[RunRecord]) -> Rows:
    finals: dict[RowKey, list[RunRecord]] = {}
    tuning: dict[RowKey, list[RunRecord]] = {}
    # Sorted, whatever order the files were read in: the same records give the same table, to the last digit.
    for record in sorted(records, key=lambda each: (each.run.seed, each.id)):
        task, budget, label = record.run.cell
        if record.run.stage in get_args(Rate):
            finals.setdefault(RowKey(task, budget, record.run.stage, label), []).append(record)
        else:
            tuning.setdefault(RowKey(task, budget, "tuned", label), []).append(record)
    # A contender whose every tuning run failed has a row that says why nothing could be tuned.
    hopeless = {key: found for key, found in tuning.items() if key not in finals and not completed(found)}
    return {**finals, **hopeless}


def _one_per_seed(found: Iterable[RunRecord]) -> dict[int, CompletedRun]:
    """The completed runs by seed; of two that differ in how often they were evaluated, the one evaluated least."""
    ordered = sorted(completed(found), key=lambda record: (record.run.seed, -record.run.evaluations, record.id))
    return {record.run.seed: record for record in ordered}


def _accuracies(found: Rows, task: str) -> list[float]:
    """The accuracies of all final runs of a task."""
    return [record.score for key, runs in found.items() if key.task == task for record in completed(runs)]


def _difference(key: RowKey, found: Rows, baseline: str, resolution: float) -> Difference | None:
    if key.label == baseline:
        return None
    ours, base = (
        {seed: record.score for seed, record in _one_per_seed(runs).items()}
        for runs in (found[key], found.get(key._replace(label=baseline), ()))
    )
    return paired(ours, base, resolution)


def _row(
    key: RowKey, found: Sequence[RunRecord], difference: Difference | None, adjusted: float | None, baseline: str
) -> dict[str, Any]:
    done = list(_one_per_seed(found).values())
    summary = summarise([record.score for record in done]) if done else None
    spent = [record.statement.epsilon for record in done if record.statement.epsilon is not None]
    broken = failed(found)
    if summary is None:
        words = f"every run failed: {broken[0].error}"
    elif key.label == baseline:
        words = "the baseline"
    else:
        words = sentence(baseline, key.budget, difference, adjusted)
    return {
        "task": key.task,
        "budget": key.budget,
        "budget_value": found[0].run.budget.value,
        "rate": key.rate,
        "method": key.label,
        "runs": [record.id for record in done],
        "failed": [{"id": record.id, "error": record.error} for record in broken],
        "count": len(done),
        "mean": summary.mean if summary else None,
        "sd": summary.sd if summary else None,
        "low": summary.low if summary else None,
        "high": summary.high if summary else None,
        "epsilon": max(spent) if spent and len(spent) == len(done) else None,
        "epsilon_if_secret": _mean(record.statement.epsilon_if_noise_were_secret for record in done),
        "lr": _mean(record.statement.lr for record in done),
        "noise_multiplier": _mean(record.statement.noise_multiplier for record in done),
        "seconds": _mean(record.seconds for record in done),
        "memory_mb": _mean(record.memory_mb for record in done),
        "stacked": max((record.stacked for record in done), default=1),
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "p": difference.p if difference else None,
        "p_holm": adjusted,
        "sentence": words,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def choices(specification: Specification, grid: Grid, records: Records) -> list[dict[str, Any]]:
    """Which tuning point won where, and with what validation accuracy."""
    if "tuned" not in specification.rates:
        return []
    best = [(cell, choose(specification, cell, grid, records)) for cell in cells(specification)]
    return [
        {
            **_named(cell),
            "lr": choice.point.lr,
            "factor": choice.point.factor if choice.point.lr is None else None,
            "options": dict(choice.point.options),
            "validation_accuracy": choice.nonprivate_validation_accuracy,
            "at_edge": choice.at_edge,
            "trials": choice.trials,
        }
        for cell, choice in best
        if choice is not None
    ]


def _named(cell: Cell) -> dict[str, Any]:
    return {"task": cell.problem.task, "budget": str(cell.budget), "method": cell.contender.label}


# --- the price of tuning ---------------------------------------------------------------------------------------------


def tuning_prices(specification: Specification, grid: Grid, records: Records) -> list[dict[str, Any]]:
    """What tuning costs compared with one run: one row per task, budget and contender with a final run.

    The bound (Papernot and Steinke 2022) covers choosing the best of a random number of trials with that mean, and one
    final run. There is none where a run has no epsilon, or where its questions follow from earlier answers: the theorem
    is about fixed questions.
    """
    if "tuned" not in specification.rates:
        return []
    gone = superseded(specification, grid, records)
    finals: dict[tuple[str, str, str], list[CompletedRun]] = {}
    for record in completed(records.values()):
        if record.run.stage == "tuned" and record.id not in gone:
            finals.setdefault(record.run.cell, []).append(record)
    made = []
    for cell in cells(specification):
        points = grid[cell.contender.label]
        runs = cell.tuning_runs(specification, points)
        tuned = finals.get(runs[0].cell, [])
        if not tuned or any(run.id not in records for run in runs):
            continue
        found = [*tuned, *completed(records[run.id] for run in runs)]
        spent = [record.statement.epsilon for record in tuned if record.statement.epsilon is not None]
        known = all(record.statement.epsilon is not None for record in found)
        covered = known and all(record.terms.schedule == "fixed" for record in found)
        repeats = len(specification.tuning_seeds)
        priced = _tuned_price(found, runs[0].delta, len(points), repeats) if covered else None
        made.append(
            {
                **_named(cell),
                "trials": len(points),
                "runs_per_trial": repeats,
                "epsilon_one_run": max(spent) if known else None,
                "epsilon_with_tuning": priced,
            }
        )
    return made


def _tuned_price(found: Iterable[CompletedRun], delta: float, trials: int, repeats: int) -> float | None:
    """The epsilon of choosing a rate by `trials` trials of `repeats` runs each, and of one final run with it."""
    histories = {frozenset(record.history.items()): record.history for record in found}
    try:
        return accounting.tuned_epsilon(list(histories.values()), delta, trials, repeats=repeats, final_runs=1)
    except ValueError:
        return None  # a question without a Renyi curve has no such bound
