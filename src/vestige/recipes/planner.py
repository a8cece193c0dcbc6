"""Which batch and how many steps does a budget of privacy and time buy? A plan, before any data is touched.

At one epsilon every pair of a batch B and a number of steps T has its noise multiplier sigma. A step's mean gradient
carries noise sigma / B, and over T steps a constant gradient adds up T times, the noise sqrt(T) times: `signal` is
their ratio, B sqrt(T) / sigma, for a gradient as long as the clip. It grows with the batch and with the steps, ever
more slowly, and time is spent on both. Of the pairs that the time allows, the plan takes those with nearly the largest
signal, and of these the one nearest to the recipe's own batch, where it was tried out. How well a model learns from a
signal is not known before it is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import ceil, log, sqrt
from typing import Any

from vestige import accounting
from vestige.assumptions import PRICE_ALONE
from vestige.checks import check_delta, check_number, check_steps
from vestige.priced_questions import Question, SampledGaussian
from vestige.recipes.catalogue import find
from vestige.recipes.recipe import KINDS, Recipe

LEAST_BATCH = 64
LEAST_STEPS = {"images": 250, "features": 60, "text": 60, "tabular": 100}
"""Fewer steps than these train no model, whatever their noise."""
MOST_STEPS = 20_000
NEARLY, ENOUGH = 0.97, 0.99
"""How much of the largest signal a batch must have, and of its own largest a number of steps: what is above is noise in
the choice of a batch, and time lost on steps."""
PER_OCTAVE = 2
"""How many batches are tried between one and twice as many; as many numbers of steps."""
USUAL = {"images": "images-scratch", "features": "features-linear", "text": "text-words", "tabular": "tabular"}
SHORTER = {"images-scratch": "images-scratch-short", "cifar10-wrn16-4": "cifar10-wrn16-4-short"}
"""What is planned instead where time affords less than half of a recipe's own steps."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is given: all of it public."""

    examples: int
    epsilon: float
    delta: float
    seconds: float
    views_per_second: float
    """How many rows, augmented views counted one by one, the machine trains on in a second."""

    def __post_init__(self) -> None:
        check_steps(self.examples, "examples")
        for name in ("epsilon", "seconds", "views_per_second"):
            check_number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        check_delta(self.delta, self.examples)


@dataclass(frozen=True)
class Choice:
    """A batch and a number of steps, with the noise that the budget asks of them."""

    batch: int
    steps: int
    sample_rate: float
    noise_multiplier: float
    signal: float
    seconds: float


@dataclass(frozen=True)
class TrainingPlan:
    """The choice, what else there was, and how to run it."""

    recipe: Recipe
    budget: Budget
    best: Choice
    lr: float | str
    epsilon: float
    """Of the plan, by loss distributions; the choices are compared by Renyi, which is fast and a little larger."""
    by_batch: tuple[Choice, ...]
    """The best number of steps for each batch."""
    own: Choice
    """The recipe at its own rate and steps, however long that takes."""
    other_times: tuple[tuple[float, tuple[Choice, ...]], ...] = ()
    """The same for a quarter of the time and for four times as much."""

    @property
    def command(self) -> str:
        data = " --data ..." if self.recipe.task is not None or self.recipe.needs == "columns" else " --task ..."
        rate = "" if self.lr == "auto" else f" --lr {self.lr:.3g}"
        data += f" --{self.recipe.needs} FILE" if self.recipe.needs in ("prior", "features") else ""
        return (
            f"vestige train --recipe {self.recipe.name} --epsilon {self.budget.epsilon:g} --delta "
            f"{self.budget.delta:g} --sample-rate {self.best.sample_rate:.5g} --steps {self.best.steps}{rate}{data}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "summary": self.recipe.summary,
            "source": self.recipe.source,
            "budget": asdict(self.budget),
            "choice": asdict(self.best),
            "lr": self.lr,
            "augment": self.recipe.augment,
            "epsilon": self.epsilon,
            "by_batch": [asdict(each) for each in self.by_batch],
            "recipes_own": asdict(self.own),
            "other_times": [[seconds, [asdict(each) for each in found]] for seconds, found in self.other_times],
            "command": self.command,
            "assumptions": list(PRICE_ALONE),
        }


def plan(budget: Budget, recipe: str | None = None, kind: str = "images") -> TrainingPlan:
    """The batch and steps that the time allows, with nearly the largest signal, for a recipe or for a kind of data.

    Formal guarantees: computed from public numbers alone. The price of what is planned is that of as many sampled
    Gaussian questions, and is charged when they are asked, not here.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    wanted = find(recipe or USUAL[kind])
    if wanted.solves:
        raise ValueError(
            f"recipe={wanted.name!r} asks once, about every example: there is no batch and no number of steps to plan; "
            "run it, or plan another recipe"
        )
    own = _own(budget, wanted)
    if recipe is None and own.seconds > 2 * budget.seconds and wanted.name in SHORTER:
        wanted = find(SHORTER[wanted.name])
        own = _own(budget, wanted)
    tried = tuple(_by_batch(budget, wanted, budget.seconds))
    if not tried:
        least = LEAST_STEPS[wanted.kind] * LEAST_BATCH * (wanted.augment or 1) / budget.views_per_second
        raise ValueError(
            f"time={budget.seconds:g} s is too short for {wanted.name}: {LEAST_STEPS[wanted.kind]} steps of "
            f"{LEAST_BATCH} take {ceil(least)} s at {budget.views_per_second:,.0f} views a second; allow "
            "more, or take a recipe with fewer views"
        )
    enough = NEARLY * max(each.signal for each in tried)
    near = [each for each in tried if each.signal >= enough]
    tested = min(near, key=lambda each: _apart(each.batch, own.batch))
    best = _choice(budget, wanted, tested.batch, tested.steps, "pld")
    asked = _asked(best.sample_rate, best.noise_multiplier, best.steps, _before(wanted, budget))
    times = (budget.seconds / 4, budget.seconds * 4)
    others = tuple((seconds, tuple(_by_batch(budget, wanted, seconds))) for seconds in times)
    return TrainingPlan(
        wanted,
        budget,
        best,
        _rate(wanted, budget, own, best),
        accounting.epsilon(asked, budget.delta),
        tried,
        own,
        others,
    )


def _by_batch(budget: Budget, recipe: Recipe, seconds: float) -> Iterator[Choice]:
    for batch in _octaves(min(LEAST_BATCH, budget.examples), budget.examples // 2 or 1):
        most = int(seconds * budget.views_per_second / (batch * (recipe.augment or 1)))
        least = LEAST_STEPS[recipe.kind]
        if most >= least:
            choices = (_choice(budget, recipe, batch, steps) for steps in _octaves(least, min(most, MOST_STEPS)))
            # More steps than the signal has use for are time that is lost.
            found = list(choices)
            enough = ENOUGH * max(each.signal for each in found)
            yield next(each for each in found if each.signal >= enough)


def _octaves(low: int, high: int) -> Sequence[int]:
    """From low to high, in equal ratios."""
    if high <= low:
        return [high] if high == low else [low]
    count = 0
    found = []
    while (value := round(low * 2 ** (count / PER_OCTAVE))) < high:
        found.append(value)
        count += 1
    return [*found, high]


def _apart(batch: int, own: int) -> float:
    return abs(log(batch / own))


def _choice(budget: Budget, recipe: Recipe, batch: int, steps: int, accountant: str = "rdp") -> Choice:
    rate = min(1.0, batch / budget.examples)
    sigma = _noise(rate, steps, _before(recipe, budget), budget.epsilon, budget.delta, accountant)
    seconds = steps * batch * (recipe.augment or 1) / budget.views_per_second
    return Choice(batch, steps, rate, sigma, batch * sqrt(steps) / sigma, seconds)


@cache
def _noise(
    rate: float, steps: int, before: tuple[Question, ...], epsilon: float, delta: float, accountant: str
) -> float:
    return accounting.calibrate(lambda sigma: _asked(rate, sigma, steps, before), epsilon, delta, accountant)


def _before(recipe: Recipe, budget: Budget) -> tuple[Question, ...]:
    moments = recipe.moments(budget.epsilon)
    return () if moments is None else moments.questions


def _asked(rate: float, sigma: float, steps: int, before: tuple[Question, ...]) -> dict[Question, int]:
    """Everything that a plan pays for."""
    return {SampledGaussian(rate, sigma): steps, **Counter(before)}


def _own(budget: Budget, recipe: Recipe) -> Choice:
    settings = recipe.settings(budget.epsilon)
    return _choice(budget, recipe, max(1, round(settings["sample_rate"] * budget.examples)), settings["steps"], "pld")


def _rate(recipe: Recipe, budget: Budget, own: Choice, best: Choice) -> float | str:
    """The recipe's learning rate, scaled so that the noise alone walks as far as at the recipe's own settings."""
    lr = recipe.settings(budget.epsilon)["lr"]
    if isinstance(lr, str):
        return lr
    walks = [each.noise_multiplier / each.batch * sqrt(each.steps) for each in (own, best)]
    return float(lr * walks[0] / walks[1])


def seconds_of(text: str) -> float:
    """A time as people write it.

    >>> [seconds_of(text) for text in ("90", "90s", "15m", "1.5h", "2d")]
    [90.0, 90.0, 900.0, 5400.0, 172800.0]
    """
    units = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
    number, unit = (text[:-1], text[-1]) if text and text[-1] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        raise ValueError(f"time={text!r} must be a number of seconds, or 30m, 1.5h, 2d") from None
    if not 0 < seconds < float("inf"):
        raise ValueError(f"time={text!r} must be positive")
    return seconds
