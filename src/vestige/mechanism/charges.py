"""When is a question charged? Before its answer exists; the questions of a trial are charged as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from vestige.priced_questions import Question, SampledGaussian, Trial


class Ask(Protocol):
    def __call__(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        """Record a question, durably, before its answer exists; or raise `BudgetSpent` and record nothing."""
        ...


class Charges:
    """Charges questions one by one, or those inside `trial` together."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._trial: Trial | None = None
        self._due: list[Question] = []

    def charge(self, question: Question, *, step: int, part: int, sensitivity: float) -> None:
        if self._trial is None:
            self._ask(question, step=step, part=part, sensitivity=sensitivity)
            return
        if question != self._due.pop(0):
            raise AssertionError(f"{question} is not what is due in {self._trial}")
        if len(self._due) == 1:
            self._ask(self._trial, step=step, part=0, sensitivity=sensitivity)

    @contextlib.contextmanager
    def trial(self, question: Trial | None) -> Iterator[None]:
        """Charge the questions asked inside as one trial, at the first of them and before it is answered.

        None charges each separately. A question that is not part of the trial is refused.
        """
        self._trial, self._due = question, _questions_of(question) if question is not None else []
        try:
            yield
        finally:
            self._trial, self._due = None, []


def _questions_of(trial: Trial) -> list[Question]:
    candidate = SampledGaussian(trial.rate, trial.multiplier)
    return [candidate, SampledGaussian(trial.validation_rate, trial.validation_multiplier)]
