"""How good is a model where no test set is public? One noised count of right answers, asked after the last step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.checks import check_number, require
from vestige.mechanism.bad_rows import lost_for_good
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import Parameters
from vestige.mechanism.examples import Examples
from vestige.mechanism.losses.loss_difference import Scores
from vestige.priced_questions import Gaussian
from vestige.processes.group import ALONE, Processes
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import noised


@dataclass(frozen=True)
class PrivateEvaluation:
    """The share of right answers among the training examples, or among private ones that were held out: `on`.

    `error` is the standard deviation of its noise, as a share of the examples: fewer examples need a larger part of the
    budget for the same error.

    Formal guarantees: one Gaussian mechanism. Adding or removing an example moves the count by at most 1, and the
    number of examples is public.
    """

    error: float = 0.01
    on: object = None

    def __post_init__(self) -> None:
        check_number("error", self.error)
        require("error", self.error, self.error > 0, "be positive: without noise there is no privacy")

    def question(self, population: int) -> Gaussian:
        return Gaussian(self.error * population)

    @property
    def identity(self) -> dict[str, object]:
        """What is public of it."""
        return {"error": self.error, "held_out": self.on is not None}


class Evaluator:
    """The curator's answer to how many examples a model gets right."""

    def __init__(
        self, examples: Examples, randomness: Randomness, charges: Charges, right: Scores, group: Processes = ALONE
    ) -> None:
        self._group = group
        self._examples, self._randomness, self._charges, self._right = examples, randomness, charges, right
        targets = examples.blank()[-1]
        if targets.is_floating_point() or targets.dim() != 1:
            raise ValueError("evaluate='private' counts right answers: each example's target must be one whole number")

    def accuracy(self, parameters: Parameters, question: Gaussian, *, step: int, rows: int) -> float:
        """The noised share of right answers, from 0 to 1, with so many examples at a time.

        Formal guarantees: one Gaussian mechanism with this question's multiplier.
        """
        self._charges.charge(question, step=step, part=0, sensitivity=1.0)
        population = self._examples.population
        own = self._group.own(torch.arange(population))
        parts = own.split(rows) if len(own) else ()
        count = sum(self._count(part, parameters) for part in parts)
        count = float(self._group.total(torch.tensor(count, dtype=torch.float64)))
        answer = noised(count, question.multiplier, self._randomness.stream("evaluation", 0))
        return min(1.0, max(0.0, answer / population))

    def _count(self, rows: Tensor, parameters: Parameters) -> float:
        """SENSITIVE: how many of these are right; one that cannot be computed is not."""
        try:
            batches = self._examples.fetch(rows)
            return sum(float(_each(self._right(batch, parameters), len(batch[-1])).sum()) for batch in batches)
        except Exception as error:  # whatever a user's model raises: one row must not decide whether there is an answer
            if not self._examples.shielded or lost_for_good(error):
                raise
        return 0.0 if len(rows) == 1 else sum(self._count(row, parameters) for row in rows.split(1))


def _each(right: Tensor, examples: int) -> Tensor:
    if right.shape != (examples,):
        raise ValueError("evaluate='private' counts right answers: the model must give each example one class")
    return right
