"""What is compared with what? A specification as a value: tasks, methods, budgets, seeds, and how rates are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal, get_args

from vestige.checks import check_delta, check_rate, check_steps
from vestige.files import read_value
from vestige.run_records import PrivacyTarget

Rate = Literal["tuned", "auto", "given"]
Chosen = Literal["each seed", "once"]
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""The default grid: multiples of the automatic rate, which is chosen without data."""


@dataclass(frozen=True)
class Contender:
    """A method with its options; `label` is its name in every table."""

    label: str
    method: str
    options: Mapping[str, object] = field(default_factory=dict)
    lr: float | None = None
    """The rate of the "given" rows; the specification's if None."""


@dataclass(frozen=True)
class Problem:
    """A task, where its data are on this machine, and settings of its own (steps, sample_rate, delta, lr, options;
    `by_method` has such settings for one method each)."""

    task: str
    data: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Specification:
    """Everything that decides which runs a comparison needs."""

    problems: tuple[Problem, ...]
    contenders: tuple[Contender, ...]
    budgets: tuple[PrivacyTarget, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    steps: int = 200
    sample_rate: float = 0.05
    delta: float = 1e-5
    rates: tuple[Rate, ...] = ("tuned", "auto")
    factors: tuple[float, ...] = FACTORS
    learning_rates: tuple[float, ...] = ()
    """Rates to try, instead of multiples of the automatic one."""
    tune: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Further options to tune, for the methods that have them."""
    tuning_seeds: tuple[int, ...] = (1000,)
    """The seeds of one trial's runs: as they are for the first final seed, and shifted past each other for the rest."""
    choose: Chosen = "each seed"
    """Whether every final seed has trials of its own. If one choice serves all ("once"), its luck is in no interval,
    and tuned rows are not tested."""
    validation: float = 0.2
    """Share of the training data held out while tuning."""
    lr: float | None = None
    baseline: str = "dp-sgd"
    evaluations: int = 0
    """How often a final run is evaluated on the test set before its end; a comparison needs none."""
    reproducible: bool = False
    physical_batch: int | None = None
    sampling: Literal["poisson", "allocation"] = "poisson"
    """How every run draws its samples: as its method's theorem assumes, or by random allocation, one by one."""
    subset: tuple[int, int] | None = None
    """How many training and test examples every run takes of its dataset, the first of each class; None: all."""

    def __post_init__(self) -> None:
        for name in ("problems", "contenders", "budgets", "seeds", "rates"):
            if not getattr(self, name):
                raise ValueError(f"{name}=[] is empty: a comparison needs at least one of them")
        check_steps(self.steps)
        check_rate(self.sample_rate)
        check_delta(self.delta)
        if self.physical_batch is not None:
            check_steps(self.physical_batch, "max_physical_batch_size")
        if self.sampling not in ("poisson", "allocation"):
            raise ValueError(f"sampling={self.sampling!r} is not compared; choose from poisson, allocation")
        for size in self.subset or ():
            check_steps(size, "subset")
        if self.evaluations < 0:
            raise ValueError(f"evaluations={self.evaluations} must be a whole number from 0 up")
        if self.lr is not None and not 0 < self.lr < inf:
            raise ValueError(f"lr={self.lr} must be positive and finite")
        each: dict[str, list[object]] = {
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
        if self.choose not in get_args(Chosen):
            raise ValueError(f"choose={self.choose!r} is unknown; choose from {', '.join(get_args(Chosen))}")
        if not self.tuning_seeds:
            raise ValueError("tuning_seeds=[] is empty: a trial needs one run at least")
        if set(self.seeds) & set(self.all_tuning_seeds):
            raise ValueError(f"seeds={list(self.seeds)} were used for tuning too; final runs need fresh ones")
        empty = [name for name, values in self.tune.items() if not values]
        if empty:
            raise ValueError(f"tune: {empty[0]}=[] is an empty grid; give it values or leave it out")

    def trial_seeds(self, seed: int) -> tuple[int, ...]:
        """The seeds of the runs that each trial has where the rate of the final run of `seed` is chosen."""
        if self.choose == "once":
            return self.tuning_seeds
        span = max(self.tuning_seeds) - min(self.tuning_seeds) + 1
        return tuple(each + span * self.seeds.index(seed) for each in self.tuning_seeds)

    @property
    def all_tuning_seeds(self) -> tuple[int, ...]:
        if self.choose == "once":
            return self.tuning_seeds
        return tuple(each for seed in self.seeds for each in self.trial_seeds(seed))

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Specification:
        """The specification that a file describes; ValueError names the field that is wrong."""
        return read_value(cls, content, "the specification")
