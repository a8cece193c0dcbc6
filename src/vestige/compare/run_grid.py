"""Which runs does a comparison need? Tuning runs over one grid for all, then final runs at the rates that won."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from typing import Any, Literal, TypeVar

from vestige.compare.specification import Contender, Problem, Specification
from vestige.methods.registry import ALIASES, METHODS, as_written, find
from vestige.run_records import PrivacyTarget, Run, RunRecord, completed

TUNING_EVALUATIONS = 20
"""How often a tuning run is evaluated on the held-out examples."""


@dataclass(frozen=True)
class TuningPoint:
    """One point of the grid that every contender of a comparison is tuned over."""

    lr: float | None
    factor: float
    options: Mapping[str, object]


Grid = Mapping[str, list[TuningPoint]]
"""The points of each contender, by its label."""
Records = Mapping[str, RunRecord]
"""What is on record, by the run's id."""


@dataclass(frozen=True)
class Cell:
    """One task, contender and budget: its runs differ in their stage, tuning point and seed."""

    problem: Problem
    contender: Contender
    budget: PrivacyTarget

    @property
    def settings(self) -> dict[str, Any]:
        """The problem's settings, and over them those that it has for this method alone."""
        whole = dict(self.problem.settings)
        own = whole.pop("by_method", {}).get(self.contender.method, {})
        return {**whole, **own, "options": {**whole.get("options", {}), **own.get("options", {})}}

    def run(
        self,
        specification: Specification,
        stage: Literal["tuning", "tuned", "auto", "given"],
        point: TuningPoint,
        seed: int,
    ) -> Run:
        tuning, settings = stage == "tuning", self.settings
        run = Run(
            task=self.problem.task,
            label=self.contender.label,
            method=self.contender.method,
            options={**self.contender.options, **settings["options"], **point.options},
            budget=self.budget,
            sample_rate=specification.sample_rate,
            steps=specification.steps,
            delta=specification.delta,
            stage=stage,
            lr=point.lr,
            factor=point.factor,
            seed=seed,
            holdout=specification.validation if tuning else 0.0,
            evaluations=TUNING_EVALUATIONS if tuning else specification.evaluations,
            reproducible=specification.reproducible,
            physical_batch=specification.physical_batch,
            sampling=specification.sampling,
            subset=specification.subset,
        )
        return replace(run, **{key: settings[key] for key in ("sample_rate", "steps", "delta") if key in settings})

    def tuning_runs(
        self, specification: Specification, points: Iterable[TuningPoint], seeds: Iterable[int]
    ) -> list[Run]:
        return [self.run(specification, "tuning", each, seed) for each in points for seed in seeds]

    def trials(self, specification: Specification, points: Iterable[TuningPoint], seed: int) -> list[Run]:
        """The tuning runs by which the rate of the final run of `seed` is chosen."""
        return self.tuning_runs(specification, points, specification.trial_seeds(seed))

    def untuned(self, specification: Specification, rate: str) -> TuningPoint:
        """The point of a row that is not tuned: at the given rate, or at the automatic one."""
        given = self.settings.get("lr") or self.contender.lr or specification.lr
        return TuningPoint(given if rate == "given" else None, 1.0, {})


def cells(specification: Specification) -> Iterator[Cell]:
    for problem in specification.problems:
        for budget in specification.budgets:
            for contender in specification.contenders:
                yield Cell(problem, contender, budget)


# --- the grid --------------------------------------------------------------------------------------------------------


def grid_of(specification: Specification) -> Grid:
    return tuning_grid(specification, {name: as_written(find(name).options) for name in (*METHODS, *ALIASES)})


def tuning_grid(specification: Specification, known: Mapping[str, Iterable[str]]) -> Grid:
    """Each contender's grid: the same range of rates for all, and as nearly as possible the same number of points.

    A contender without one of the tuned options, or that fixes it in its name, gets a denser grid of rates instead, so
    that no contender has more trials. `known` lists every method's options.
    """
    combinations: dict[str, list[dict[str, object]]] = {}
    for contender in specification.contenders:
        free = set(known.get(contender.method, ())) - set(contender.options)
        own = {key: values for key, values in specification.tune.items() if key in free}
        combinations[contender.label] = [dict(zip(own, values, strict=True)) for values in product(*own.values())]
    absolute, base = bool(specification.learning_rates), specification.learning_rates or specification.factors
    most = len(base) * max(map(len, combinations.values()))
    return {
        label: [
            TuningPoint(rate, 1.0, options) if absolute else TuningPoint(None, rate, options)
            for options in mine
            for rate in _denser(base, most // len(mine))
        ]
        for label, mine in combinations.items()
    }


def _denser(rates: Sequence[float], count: int) -> list[float]:
    """`count` rates over the same range: the given ones if they are enough, otherwise log-spaced."""
    if count <= len(rates) or len(set(rates)) < 2:
        return list(rates)
    low, high = log(min(rates)), log(max(rates))
    return [exp(low + (high - low) * index / (count - 1)) for index in range(count)]


# --- the runs --------------------------------------------------------------------------------------------------------


def tuning_runs(specification: Specification, grid: Grid) -> Iterator[Run]:
    if "tuned" in specification.rates:
        for cell in cells(specification):
            yield from cell.tuning_runs(specification, grid[cell.contender.label], specification.all_tuning_seeds)


def final_runs(specification: Specification, grid: Grid, records: Records) -> Iterator[Run]:
    """The final runs that can be made now: those of a tuned row once the trials of their seed are on record."""
    for cell in cells(specification):
        for rate in specification.rates:
            for seed in specification.seeds:
                if rate == "tuned":
                    best = choose(specification, cell, grid, records, seed)
                    point = best.point if best else None
                else:
                    point = cell.untuned(specification, rate)
                if point is not None:
                    yield cell.run(specification, rate, point, seed)


def due(specification: Specification, grid: Grid, records: Records) -> list[Run]:
    """The runs that can be made now and are not on record, tuning first."""
    wanted = [*tuning_runs(specification, grid), *final_runs(specification, grid, records)]
    missing = [run for run in wanted if run.id not in records]
    finals = {run.stage for run in missing} - {"tuning"}
    made = {record.run.without_curve.id for record in records.values() if record.run.stage in finals}
    return [run for run in missing if run.stage == "tuning" or run.without_curve.id not in made]


def total(specification: Specification, grid: Grid) -> int:
    """How many runs there will be in the end, unless all runs of some grid fail."""
    pairs = len(specification.problems) * len(specification.budgets)
    tuning = sum(len(points) for points in grid.values()) * pairs * len(specification.all_tuning_seeds)
    finals = pairs * len(specification.contenders) * len(specification.rates) * len(specification.seeds)
    return finals + (tuning if "tuned" in specification.rates else 0)


Asked = TypeVar("Asked", bound=Hashable)


def all_runs(specification: Specification, records: Records, asked: Callable[[Run], Asked]) -> Counter[Asked]:
    """What all runs ask that are not on record, and how many ask it. Which point wins a tuned row is not known yet:
    every point must ask the same, or the row cannot be charged beforehand."""
    grid, found = grid_of(specification), Counter[Asked]()
    known: dict[str, Asked] = {}

    def of(run: Run) -> Asked:
        alike = repr((run.task, run.method, dict(run.options), run.budget, run.sample_rate, run.steps, run.holdout > 0))
        if alike not in known:
            known[alike] = asked(replace(run, lr=None, factor=1.0) if run.lr is None else run)
        return known[alike]

    if "tuned" in specification.rates:
        found.update(of(run) for run in tuning_runs(specification, grid) if run.id not in records)
    for cell in cells(specification):
        for rate in specification.rates:
            points = grid[cell.contender.label] if rate == "tuned" else [cell.untuned(specification, rate)]
            for seed in specification.seeds:
                final = [cell.run(specification, rate, point, seed) for point in points]
                each = {of(run) for run in final}
                if len(each) > 1:
                    raise ValueError(
                        f"tune: {cell.contender.label} asks other questions at other points of the grid, so its final "
                        "runs cannot be charged before one is chosen; tune another option, or leave budget out"
                    )
                if not any(run.id in records for run in final):
                    found.update(each)
    return found


def membership(specification: Specification) -> Callable[[Run], bool]:
    """A function that decides whether a specification may need a run, however often it was evaluated.

    Any point of the grid may win a tuned row, so final runs at each of them belong to it.
    """
    grid, kinds, trial_seeds = grid_of(specification), set(), set(specification.all_tuning_seeds)
    for cell in cells(specification):
        for rate in specification.rates:
            if rate == "tuned":
                points = grid[cell.contender.label]
                kinds |= {cell.run(specification, "tuning", point, 0).kind for point in points}
            else:
                points = [cell.untuned(specification, rate)]
            kinds |= {cell.run(specification, rate, point, 0).kind for point in points}

    def belongs(run: Run) -> bool:
        seeds = trial_seeds if run.stage == "tuning" else specification.seeds
        return run.seed in seeds and run.kind in kinds

    return belongs


# --- the choice of a rate --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The tuning point that won, its mean score, and whether it lies at an end of the grid of rates."""

    point: TuningPoint
    nonprivate_validation_accuracy: float
    at_edge: bool
    trials: int


def choose(specification: Specification, cell: Cell, grid: Grid, records: Records, seed: int) -> Choice | None:
    """The point with the best mean validation accuracy in the trials of a final run's seed; None while any is missing
    or if all failed."""
    points = grid[cell.contender.label]
    scores: list[tuple[float, TuningPoint]] = []
    for point in points:
        found = [records.get(run.id) for run in cell.trials(specification, [point], seed)]
        if any(record is None for record in found):
            return None
        values = [record.score for record in completed(record for record in found if record is not None)]
        if values:
            scores.append((sum(values) / len(values), point))
    if not scores:
        return None
    score, best = max(scores, key=lambda pair: pair[0])
    rates = [point.lr or point.factor for point in points]
    at_edge = len(rates) > 1 and (best.lr or best.factor) in (min(rates), max(rates))
    return Choice(best, score, at_edge, len(points))


def superseded(specification: Specification, grid: Grid, records: Records) -> frozenset[str]:
    """The ids of final runs at a rate that no longer wins; no row includes them.

    A tuning run that failed and was tried again may win after final runs were made at another rate.
    """
    winners: dict[tuple[object, ...], object] = {}
    tuned = [record.run for record in records.values() if record.run.stage == "tuned"]
    seeds = {run.seed for run in tuned} & set(specification.seeds)
    for cell in cells(specification):
        for seed in seeds:
            best = choose(specification, cell, grid, records, seed)
            if best is not None:
                run = cell.run(specification, "tuned", best.point, seed)
                winners[*run.cell, seed] = _tuned_parts(run)
    return frozenset(
        run.id for run in tuned if winners.get((*run.cell, run.seed), _tuned_parts(run)) != _tuned_parts(run)
    )


def _tuned_parts(run: Run) -> tuple[object, ...]:
    return run.lr, run.factor, dict(run.options)
