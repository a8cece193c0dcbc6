"""What is compared with what? A comparison as a value: the runs it needs, the rate that won, the tables they make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import exp, inf, log
from typing import Any, Literal, get_args

from vestige.checks import check_delta, check_rate, check_steps
from vestige.compare.statistics import Difference, holm, least_step, paired, sentence, summarise
from vestige.files import read_value

VERSION = 2
"""Of the folder's format: a record or specification of another version is refused."""
VALIDATION = "nonprivate_validation_accuracy"
"""A tuning trial's score: measured on held-out private examples without noise, so never called accuracy."""
VALIDATION_CURVE = "nonprivate_validation_curve"

Rate = Literal["tuned", "auto", "given"]
SUPERSEDED = "superseded"
Record = dict[str, Any]
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The default grid: multiples of the rate that `lr auto` would take, which sees no data."""
BUDGETS = ("epsilon", "paper_sigma", "noise_multiplier")


@dataclass(frozen=True)
class Contender:
    """A method with its options; `label` is its name in every table."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float | None = None
    """The rate of the "given" rows; the specification's if None."""


@dataclass(frozen=True)
class Budget:
    """What a run may spend (`epsilon`), or the noise it gets (`noise_multiplier`, or a paper's own sigma)."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind not in BUDGETS:
            raise ValueError(f"budget={self.kind!r} is unknown; choose from {', '.join(BUDGETS)}")
        if not 0 < self.value < inf:
            raise ValueError(f"{self.kind}={self.value} must be positive and finite")

    def __str__(self) -> str:
        names = {"epsilon": "epsilon", "paper_sigma": "the paper's sigma", "noise_multiplier": "noise multiplier"}
        return f"{names[self.kind]} {self.value:g}"


@dataclass(frozen=True)
class Problem:
    """A task, where its data are on this machine, and settings of its own (steps, sample_rate, delta, lr, options)."""

    task: str
    data: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Everything that decides which runs a comparison needs."""

    problems: tuple[Problem, ...]
    contenders: tuple[Contender, ...]
    budgets: tuple[Budget, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 200
    sample_rate: float = 0.05
    delta: float = 1e-5
    rates: tuple[Rate, ...] = ("tuned", "auto")
    factors: tuple[float, ...] = FACTORS
    learning_rates: tuple[float, ...] = ()
    """Rates to try, in place of multiples of auto's."""
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further options to tune, for the methods that have them."""
    tuning_seeds: tuple[int, ...] = (1000,)
    validation: float = 0.2
    """Share of the training data held out while tuning."""
    lr: float | None = None
    baseline: str = "dp-sgd"
    evaluations: int = 0
    """How often a final run is judged on the test set before its end; a comparison needs none."""
    reproducible: bool = False
    physical_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("problems", "contenders", "budgets", "seeds", "rates"):
            if not getattr(self, name):
                raise ValueError(f"{name}=[] is empty: a comparison needs at least one of them")
        check_steps(self.steps)
        check_rate(self.sample_rate)
        check_delta(self.delta)
        if self.physical_batch is not None:
            check_steps(self.physical_batch, "physical_batch")
        if self.evaluations < 0:
            raise ValueError(f"evaluations={self.evaluations} must be a whole number from 0 up")
        if self.lr is not None and not 0 < self.lr < inf:
            raise ValueError(f"lr={self.lr} must be positive and finite")
        each: dict[str, list[Any]] = {
            "tasks": [problem.task for problem in self.problems],
            "methods": [contender.label for contender in self.contenders],
            "budgets": [str(budget) for budget in self.budgets],
            "rates": list(self.rates),
            "seeds": list(self.seeds),
            "tuning_seeds": list(self.tuning_seeds),
        }
        for name, values in each.items():
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"{name}: {twice[0]!r} is there twice; give each once")
        unknown = [rate for rate in self.rates if rate not in get_args(Rate)]
        if unknown:
            raise ValueError(f"rates={unknown[0]!r} is unknown; choose from {', '.join(get_args(Rate))}")
        if "tuned" in self.rates:
            self._check_tuning()
        if "given" in self.rates and not all(c.lr or self.lr for c in self.contenders):
            raise ValueError("lr=None: the rate 'given' needs a number")

    def _check_tuning(self) -> None:
        if not (self.factors or self.learning_rates):
            raise ValueError("factors=[] is empty: tuning needs a grid of learning rates; give lrs or factors")
        for name, grid in (("lrs", self.learning_rates), ("factors", self.factors)):
            if not all(0 < rate < inf for rate in grid):
                raise ValueError(f"{name}={','.join(f'{rate:g}' for rate in grid)} must all be positive and finite")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation={self.validation} must lie in (0, 1): it is the share held out for tuning")
        if set(self.seeds) & set(self.tuning_seeds):
            raise ValueError(f"seeds={list(self.seeds)} were used for tuning too; final runs need fresh ones")
        empty = [name for name, values in self.tune.items() if not values]
        if empty:
            raise ValueError(f"tune: {empty[0]}=[] is an empty grid; give it values or leave it out")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Specification:
        """The specification that was written so; ValueError names the part that cannot be one."""
        return read_value(cls, content, "the specification")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to be made. Where its data and device are is no part of its identity."""

    task: str
    label: str
    method: str
    options: Mapping[str, Any]
    budget: Budget
    sample_rate: float
    steps: int
    delta: float
    stage: Literal["tuning", "tuned", "auto", "given"]
    lr: float | None
    """None: `factor` times the automatic rate."""
    factor: float
    seed: int
    holdout: float
    """Share of the training data on which the run is judged instead of the test set; 0 for final runs."""
    evaluations: int
    reproducible: bool
    physical_batch: int | None

    @property
    def id(self) -> str:
        content = json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:20]

    @property
    def unwatched(self) -> Run:
        """The same run, judged at its end only: one made with its curve stands for it."""
        return replace(self, evaluations=0)

    @property
    def kind(self) -> str:
        """What runs have in common that differ in nothing but their seed and how often they were judged."""
        return replace(self.unwatched, seed=0).id

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.task, str(self.budget), self.label

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Run:
        """The run that a record describes; ValueError names the part that cannot be one."""
        return read_value(cls, content, "its run")


# --- which runs are needed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One point of the grid that every contender of a comparison is tuned over."""

    lr: float | None
    factor: float
    options: Mapping[str, Any]


def trials(specification: Specification, known: Mapping[str, Iterable[str]]) -> dict[str, list[Trial]]:
    """Each contender's grid: the same range of rates for all, and as nearly the same number of points as can be.

    A contender without one of the tuned options, or that fixes it in its name, gets a denser grid of rates instead, so
    that nobody has more chances. `known` names every method's options.
    """
    grids = {}
    counts = {}
    for contender in specification.contenders:
        free = set(known.get(contender.method, ())) - set(contender.options)
        own = {key: values for key, values in specification.tune.items() if key in free}
        grids[contender.label] = [dict(zip(own, values, strict=True)) for values in product(*own.values())]
        counts[contender.label] = len(grids[contender.label])
    base = specification.learning_rates or specification.factors
    most = len(base) * max(counts.values())
    made = {}
    for contender in specification.contenders:
        rates = _denser(base, most // counts[contender.label])
        made[contender.label] = [
            Trial(rate if specification.learning_rates else None, 1.0 if specification.learning_rates else rate, each)
            for each in grids[contender.label]
            for rate in rates
        ]
    return made


def _denser(rates: Sequence[float], count: int) -> list[float]:
    """`count` rates over the same range: the given ones if so many, else spaced evenly in the logarithm."""
    if count <= len(rates) or len(set(rates)) < 2:
        return list(rates)
    low, high = log(min(rates)), log(max(rates))
    return [exp(low + (high - low) * index / (count - 1)) for index in range(count)]


def tuning_runs(specification: Specification, grid: Mapping[str, list[Trial]]) -> Iterator[Run]:
    if "tuned" not in specification.rates:
        return
    for problem, contender, budget in _cells(specification):
        for trial in grid[contender.label]:
            for seed in specification.tuning_seeds:
                yield _run(specification, problem, contender, budget, "tuning", trial, seed)


def final_runs(
    specification: Specification, grid: Mapping[str, list[Trial]], records: Mapping[str, Record]
) -> Iterator[Run]:
    """The final runs that can be made now: those of a tuned row once its whole grid is on record."""
    for problem, contender, budget in _cells(specification):
        for rate in specification.rates:
            if rate == "tuned":
                best = choose(specification, problem, contender, budget, grid[contender.label], records)
                chosen = best.trial if best else None
            else:
                chosen = _untuned(specification, problem, contender, rate)
            if chosen is not None:
                for seed in specification.seeds:
                    yield _run(specification, problem, contender, budget, rate, chosen, seed)


def _untuned(specification: Specification, problem: Problem, contender: Contender, rate: str) -> Trial:
    given = problem.settings.get("lr") or contender.lr or specification.lr
    return Trial(given if rate == "given" else None, 1.0, {})


def due(specification: Specification, grid: Mapping[str, list[Trial]], records: Mapping[str, Record]) -> list[Run]:
    """The runs that can be made now and are not on record, tuning first."""
    wanted = [*tuning_runs(specification, grid), *final_runs(specification, grid, records)]
    missing = [run for run in wanted if run.id not in records]
    finals = {run.stage for run in missing} - {"tuning"}
    told = [record["run"] for record in records.values() if record["run"]["stage"] in finals]
    made = {Run.from_json(each).unwatched.id for each in told}
    return [run for run in missing if run.stage == "tuning" or run.unwatched.id not in made]


def kinds(specification: Specification, grid: Mapping[str, list[Trial]]) -> frozenset[str]:
    """The `kind` of every run that a specification can come to need: a tuned row may be won by any trial."""
    made: set[str] = set()
    for problem, contender, budget in _cells(specification):
        ways: list[tuple[Any, Trial]] = []
        for rate in specification.rates:
            if rate == "tuned":
                ways += ((stage, trial) for stage in ("tuning", "tuned") for trial in grid[contender.label])
            else:
                ways.append((rate, _untuned(specification, problem, contender, rate)))
        made.update(_run(specification, problem, contender, budget, *way, seed=0).kind for way in ways)
    return frozenset(made)


def belongs(run: Run, specification: Specification, known: frozenset[str]) -> bool:
    """Whether a specification with these known `kinds` can come to need this run, however often it was judged."""
    seeds = specification.tuning_seeds if run.stage == "tuning" else specification.seeds
    return run.seed in seeds and run.kind in known


def total(specification: Specification, grid: Mapping[str, list[Trial]]) -> int:
    """How many runs there will be in the end, if none of a grid fails whole."""
    cells = len(specification.problems) * len(specification.budgets)
    tuning = sum(len(points) for points in grid.values()) * cells * len(specification.tuning_seeds)
    finals = cells * len(specification.contenders) * len(specification.rates) * len(specification.seeds)
    return finals + (tuning if "tuned" in specification.rates else 0)


@dataclass(frozen=True)
class Choice:
    """The trial that won, its validation accuracy, and whether it lies at an end of the grid of rates."""

    trial: Trial
    accuracy: float
    at_edge: bool
    trials: int


def choose(
    specification: Specification,
    problem: Problem,
    contender: Contender,
    budget: Budget,
    grid: Sequence[Trial],
    records: Mapping[str, Record],
) -> Choice | None:
    """The trial with the best mean validation accuracy; None while any is missing or if all failed."""
    scores: list[tuple[float, Trial]] = []
    for trial in grid:
        runs = [_run(specification, problem, contender, budget, "tuning", trial, s) for s in specification.tuning_seeds]
        found = [records.get(run.id) for run in runs]
        if any(record is None for record in found):
            return None
        values = [record[VALIDATION] for record in found if record and record["status"] == "done"]
        if values:
            scores.append((sum(values) / len(values), trial))
    if not scores:
        return None
    accuracy, best = max(scores, key=lambda pair: pair[0])
    rates = [trial.lr or trial.factor for trial in grid]
    return Choice(best, accuracy, (best.lr or best.factor) in (min(rates), max(rates)) and len(rates) > 1, len(grid))


def settled(
    specification: Specification, grid: Mapping[str, list[Trial]], records: Mapping[str, Record]
) -> list[Record]:
    """The records, with final runs at a rate that no longer wins marked as superseded.

    A trial that failed and was tried again may win after others ran their final seeds: those are no rows any more.
    """
    winners: dict[tuple[str, str, str], Any] = {}
    for problem, contender, budget in _cells(specification):
        best = choose(specification, problem, contender, budget, grid[contender.label], records)
        if best is not None:
            run = _run(specification, problem, contender, budget, "tuned", best.trial, 0)
            winners[run.cell] = _tried(run.to_json())
    told = []
    for record in records.values():
        run = record["run"]
        if run["stage"] == "tuned" and winners.get(_cell_of(run), _tried(run)) != _tried(run):
            record = {**record, "run": {**run, "stage": SUPERSEDED}}
        told.append(record)
    return told


def _cell_of(run: Mapping[str, Any]) -> tuple[str, str, str]:
    return run["task"], str(Budget(**run["budget"])), run["label"]


def _tried(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["lr"], run["factor"], dict(run["options"])


def _cells(specification: Specification) -> Iterator[tuple[Problem, Contender, Budget]]:
    for problem in specification.problems:
        for budget in specification.budgets:
            for contender in specification.contenders:
                yield problem, contender, budget


def _run(
    specification: Specification,
    problem: Problem,
    contender: Contender,
    budget: Budget,
    stage: Literal["tuning", "tuned", "auto", "given"],
    trial: Trial,
    seed: int,
) -> Run:
    tuning = stage == "tuning"
    run = Run(
        task=problem.task,
        label=contender.label,
        method=contender.method,
        options={**contender.options, **problem.settings.get("options", {}), **trial.options},
        budget=budget,
        sample_rate=specification.sample_rate,
        steps=specification.steps,
        delta=specification.delta,
        stage=stage,
        lr=trial.lr,
        factor=trial.factor,
        seed=seed,
        holdout=specification.validation if tuning else 0.0,
        evaluations=20 if tuning else specification.evaluations,
        reproducible=specification.reproducible,
        physical_batch=specification.physical_batch,
    )
    own = {key: value for key, value in problem.settings.items() if key in ("sample_rate", "steps", "delta")}
    return replace(run, **own)


# --- what they say ---------------------------------------------------------------------------------------------------


def rows(records: Iterable[Record], baseline: str) -> list[dict[str, Any]]:
    """The table of a comparison, from its records alone: one row per task, budget, rate and contender.

    Differences are paired by seed with the baseline under the same kind of rate, and corrected by Holm over all rows of
    one task and kind of rate.
    """
    cells: dict[tuple[str, str, str, str], list[Record]] = {}
    trials: dict[tuple[str, str, str, str], list[Record]] = {}
    # In one order, whatever order the files were read in: the same records give the same table, to the last digit.
    for record in sorted(records, key=lambda each: (each["run"]["seed"], each["id"])):
        run = record["run"]
        task, budget, label = _cell_of(run)
        if run["stage"] in get_args(Rate):
            cells.setdefault((task, budget, run["stage"], label), []).append(record)
        elif run["stage"] == "tuning":
            trials.setdefault((task, budget, "tuned", label), []).append(record)
    for key, found in trials.items():
        if key not in cells and all(record["status"] == "failed" for record in found):
            cells[key] = found  # a row that says why nothing could be tuned
    steps = {task: least_step(_accuracies(cells, task)) for task in {key[0] for key in cells}}
    made = [_row(key, found, cells.get((*key[:3], baseline), []), steps[key[0]]) for key, found in cells.items()]
    for family in {(row["task"], row["rate"]) for row in made}:
        tested = [row for row in made if (row["task"], row["rate"]) == family and row["p"] is not None]
        for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p_holm"] = adjusted
    for row in made:
        row["sentence"] = _words(row, baseline)
        del row["comparison"]
    return sorted(made, key=lambda row: (row["task"], row["budget_value"], row["rate"], -(row["mean"] or 0)))


def _one_per_seed(found: Sequence[Record]) -> list[Record]:
    """The finished runs; of two that differ in how often they were judged, the one judged least."""
    done = [record for record in found if record["status"] == "done"]
    ordered = sorted(done, key=lambda record: (record["run"]["seed"], -record["run"]["evaluations"], record["id"]))
    return list({record["run"]["seed"]: record for record in ordered}.values())


def _accuracies(cells: Mapping[tuple[str, str, str, str], list[Record]], task: str) -> list[float]:
    """Of every final run of a task."""
    runs = [record for key, found in cells.items() if key[0] == task for record in found]
    return [record["accuracy"] for record in runs if record["status"] == "done"]


def _row(key: tuple[str, str, str, str], found: list[Record], base: list[Record], resolution: float) -> dict[str, Any]:
    task, budget, rate, label = key
    done = _one_per_seed(found)
    values = {record["run"]["seed"]: record["accuracy"] for record in done}
    against = {record["run"]["seed"]: record["accuracy"] for record in _one_per_seed(base)}
    summary = summarise(list(values.values())) if values else None
    difference = paired(values, against, resolution) if base is not found else None
    spent = [record["epsilon"] for record in done if record["epsilon"] is not None]
    return {
        "task": task,
        "budget": budget,
        "budget_value": found[0]["run"]["budget"]["value"],
        "rate": rate,
        "method": label,
        "runs": [record["id"] for record in done],
        "failed": [{"id": r["id"], "error": r["error"]} for r in found if r["status"] != "done"],
        "count": len(done),
        "mean": summary.mean if summary else None,
        "sd": summary.sd if summary else None,
        "low": summary.low if summary else None,
        "high": summary.high if summary else None,
        "epsilon": max(spent) if spent and len(spent) == len(done) else None,
        "epsilon_if_secret": _mean([r.get("epsilon_if_noise_were_secret") for r in done]),
        "lr": _mean([record["lr"] for record in done]),
        "noise_multiplier": _mean([record["noise_multiplier"] for record in done]),
        "seconds": _mean([record["seconds"] for record in done]),
        "memory_mb": _mean([record["memory_mb"] for record in done]),
        "stacked": max((record["stacked"] for record in done), default=1),
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "p": difference.p if difference else None,
        "p_holm": None,
        "comparison": difference,
    }


def _words(row: dict[str, Any], baseline: str) -> str:
    if row["mean"] is None:
        return "every run failed: " + row["failed"][0]["error"]
    if row["method"] == baseline:
        return "the baseline"
    difference: Difference | None = row["comparison"]
    return sentence(baseline, row["budget"], difference, row["p_holm"])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def tuning_prices(
    specification: Specification, grid: Mapping[str, list[Trial]], records: Mapping[str, Record], price: Any
) -> list[dict[str, Any]]:
    """What tuning costs beside what one run costs: one row per task, budget and contender with a final run.

    `price(charged, delta, trials, repeats)` is the epsilon of choosing by the best of a random number of trials with
    that mean, of `repeats` runs each, and of one final run; `charged` holds what each run asked. There is none where a
    run has no epsilon, or where what it asks follows from earlier answers: the theorem is about fixed questions.
    """
    repeats = len(specification.tuning_seeds)
    finals: dict[tuple[str, str, str], list[Record]] = {}
    for record in settled(specification, grid, records):
        if record["run"]["stage"] == "tuned" and record["status"] == "done":
            finals.setdefault(_cell_of(record["run"]), []).append(record)
    made = []
    for problem, contender, budget in _cells(specification):
        trials = grid[contender.label]
        runs = [
            _run(specification, problem, contender, budget, "tuning", trial, seed)
            for trial in trials
            for seed in specification.tuning_seeds
        ]
        tuned = finals.get(runs[0].cell, [])
        if not tuned or any(run.id not in records for run in runs):
            continue
        found = [*tuned, *(records[run.id] for run in runs if records[run.id]["status"] == "done")]
        spent = [record["epsilon"] for record in tuned]
        known = all(record["epsilon"] is not None for record in found)
        covered = known and all(record.get("schedule", "fixed") == "fixed" for record in found)
        charged = [record["charged"] for record in found]
        made.append(
            {
                "task": problem.task,
                "budget": str(budget),
                "method": contender.label,
                "trials": len(trials),
                "runs_per_trial": repeats,
                "epsilon_one_run": max(spent) if known else None,
                "epsilon_with_tuning": price(charged, runs[0].delta, len(trials), repeats) if covered else None,
            }
        )
    return made


def choices(
    specification: Specification, grid: Mapping[str, list[Trial]], records: Mapping[str, Record]
) -> list[dict[str, Any]]:
    """Which trial won where, and with what validation accuracy."""
    if "tuned" not in specification.rates:
        return []
    made = []
    for problem, contender, budget in _cells(specification):
        best = choose(specification, problem, contender, budget, grid[contender.label], records)
        if best is not None:
            made.append(
                {
                    "task": problem.task,
                    "budget": str(budget),
                    "method": contender.label,
                    "lr": best.trial.lr,
                    "factor": best.trial.factor if best.trial.lr is None else None,
                    "options": dict(best.trial.options),
                    "validation_accuracy": best.accuracy,
                    "at_edge": best.at_edge,
                    "trials": best.trials,
                }
            )
    return made
