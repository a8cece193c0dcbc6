"""What do the records of a comparison say? Rows of accuracies, the points that won, and what tuning costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from vestige import accounting
from vestige.compare.run_grid import Cell, Grid, Records, TuningPoint, cells, choose, superseded
from vestige.compare.specification import Rate, Specification
from vestige.compare.statistics import Difference, holm, paired, sentence, summarise, untested
from vestige.run_records import CompletedRun, RunRecord, completed, failed


class RowKey(NamedTuple):
    """What one row is about."""

    task: str
    budget: str
    rate: str
    label: str


Rows = Mapping[RowKey, Sequence[RunRecord]]


def rows(records: Iterable[RunRecord], baseline: str, *, chosen_once: bool = False) -> list[dict[str, Any]]:
    """The table of a comparison, from its records alone: one row per task, budget, rate and contender.

    Differences are paired by seed with the baseline under the same kind of rate, and corrected by Holm over all rows.
    Where the rate of a tuned row was `chosen_once` for all its seeds, the row is not tested. Superseded runs are to be
    left out of `records`.
    """
    found = _by_row(records)
    scores = {key: {seed: each.score for seed, each in _one_per_seed(runs).items()} for key, runs in found.items()}
    verdicts = judge(scores, baseline, chosen_once=chosen_once)
    made = [_row(key, runs, verdicts.get(key)) for key, runs in found.items()]
    return sorted(made, key=lambda row: (row["task"], row["budget_value"], row["rate"], -(row["mean"] or 0)))


@dataclass(frozen=True)
class Verdict:
    """The verdict about one row against the baseline."""

    difference: Difference | None
    """None where they share no seed."""
    adjusted: float | None
    """Its p after Holm; None where it is not tested."""
    words: str


def judge(
    scores: Mapping[RowKey, Mapping[int, float]], baseline: str, *, chosen_once: bool = False
) -> dict[RowKey, Verdict]:
    """The verdict of every row but the baseline's own, from its accuracies by seed.

    Formal guarantees: if the rows that are told apart are no different, in that the accuracies of a seed could be
    exchanged with the baseline's, the probability of any such sentence is at most 5%, at any number of seeds and
    whatever the distribution. For tuned rows that takes a choice of the rate for every seed.
    """
    others = [key for key in scores if key.label != baseline]
    differences = {key: paired(scores[key], scores.get(key._replace(label=baseline), {})) for key in others}
    excluded = {key for key in others if chosen_once and key.rate == "tuned"}
    tested = {key: each.p for key, each in differences.items() if each and each.p is not None and key not in excluded}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    made = {}
    for key, difference in differences.items():
        if key in excluded and difference is not None:
            words = untested(baseline, key.budget, difference)
        else:
            words = sentence(baseline, key.budget, difference, adjusted.get(key), len(tested))
        made[key] = Verdict(difference, adjusted.get(key), words)
    return made


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


def _row(key: RowKey, found: Sequence[RunRecord], verdict: Verdict | None) -> dict[str, object]:
    done = list(_one_per_seed(found).values())
    summary = summarise([record.score for record in done]) if done else None
    difference = verdict.difference if verdict else None
    spent = [record.statement.epsilon for record in done if record.statement.epsilon is not None]
    broken = failed(found)
    words = verdict.words if verdict else "the baseline"
    if summary is None:
        words = f"every run failed: {broken[0].error}"
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
        "best": _mean(record.best for record in done),
        "test_loss": _mean(record.curve[-1][3] for record in done if record.curve and len(record.curve[-1]) > 3),
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
        "p": difference.p if difference and verdict and verdict.adjusted is not None else None,
        "p_holm": verdict.adjusted if verdict else None,
        "sentence": words,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def choices(specification: Specification, grid: Grid, records: Records) -> list[dict[str, object]]:
    """Which tuning point won where, for which final seed (None: for all), and with what validation accuracy."""
    if "tuned" not in specification.rates:
        return []
    seeds = specification.seeds if specification.choose == "each seed" else specification.seeds[:1]
    best = [
        (cell, seed, choose(specification, cell, grid, records, seed))
        for cell in cells(specification)
        for seed in seeds
    ]
    return [
        {
            **_named(cell),
            "seed": seed if specification.choose == "each seed" else None,
            "tuning_seeds": list(specification.trial_seeds(seed)),
            "lr": choice.point.lr,
            "factor": choice.point.factor if choice.point.lr is None else None,
            "options": dict(choice.point.options),
            "validation_accuracy": choice.nonprivate_validation_accuracy,
            "at_edge": choice.at_edge,
            "trials": choice.trials,
        }
        for cell, seed, choice in best
        if choice is not None
    ]


def _named(cell: Cell) -> dict[str, object]:
    return {"task": cell.problem.task, "budget": str(cell.budget), "method": cell.contender.label}


# --- the price of tuning ---------------------------------------------------------------------------------------------


def tuning_prices(specification: Specification, grid: Grid, records: Records) -> list[dict[str, object]]:
    """What one tuned run costs with the trials that its rate was chosen by: one row per task, budget and contender.

    All of these runs were made, so all are composed; the dearest seed counts. There is no price where a run has no
    epsilon, or where its questions follow from earlier answers: composition is about fixed questions. Nor is there one
    where a trial failed and no other shows what it may have asked.
    """
    if "tuned" not in specification.rates:
        return []
    gone = superseded(specification, grid, records)
    finals: dict[tuple[str, str, str], list[CompletedRun]] = {}
    for record in completed(records.values()):
        if record.run.stage == "tuned" and record.id not in gone:
            finals.setdefault(record.run.cell, []).append(record)
    made = []
    known_prices: dict[object, float] = {}
    for cell in cells(specification):
        points = grid[cell.contender.label]
        tuned = finals.get(cell.run(specification, "tuned", points[0], 0).cell, [])
        searches = [(each, _trials(specification, cell, points, records, each)) for each in tuned]
        whole = [(final, trials) for final, trials in searches if trials is not None]
        if not whole:
            continue
        spent = [final.statement.epsilon for final, _ in whole]
        prices = [_search_price(final, trials, known_prices) for final, trials in whole]
        made.append(
            {
                **_named(cell),
                "trials": len(points),
                "runs_per_trial": len(specification.tuning_seeds),
                "epsilon_one_run": None if None in spent else max(each for each in spent if each is not None),
                "epsilon_with_tuning": None if None in prices else max(each for each in prices if each is not None),
            }
        )
    return made


def _trials(
    specification: Specification, cell: Cell, points: Sequence[TuningPoint], records: Records, final: CompletedRun
) -> list[RunRecord] | None:
    """The records of the trials that the rate of a final run was chosen by; None while one is missing."""
    if final.run.seed not in specification.seeds:
        return None
    found = [records.get(run.id) for run in cell.trials(specification, points, final.run.seed)]
    return None if None in found else [record for record in found if record is not None]


def _search_price(final: CompletedRun, trials: Sequence[RunRecord], known: dict[object, float]) -> float | None:
    """The epsilon of all trials and of the run that followed; `known` are prices by what was asked."""
    done = [final, *completed(trials)]
    if any(record.statement.epsilon is None or record.terms.schedule != "fixed" for record in done):
        return None
    histories = [record.history for record in done]
    for record in failed(trials):  # how far it came is not on record: it is charged like one that came to its end
        alike = next((each for each in done if each.run.options == record.run.options), None)
        if alike is None:
            return None
        histories.append(alike.history)
    key = tuple(
        sorted(tuple(sorted((repr(question), count) for question, count in each.items())) for each in histories)
    )
    if (key, final.run.delta) not in known:
        known[key, final.run.delta] = accounting.composed_epsilon(histories, final.run.delta)
    return known[key, final.run.delta]
