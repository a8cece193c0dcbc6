"""How is a run attacked that cannot be stacked? One by one, through the same curator and loop as `vestige.train`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vestige.accounting.ledger import Ledger
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import Array
from vestige.audit.canaries import Canary
from vestige.audit.canary_likelihood_ratio import Evidence
from vestige.engines.reference import Reference, add_clipped
from vestige.engines.registry import engine_by_name
from vestige.layout import Layout
from vestige.mechanism.charges import Charges
from vestige.mechanism.clipping import Batch, Clip, GradientEngine, Loss, Parameters, Transform
from vestige.mechanism.comparisons import Comparisons
from vestige.mechanism.curator import Answer, Curator
from vestige.mechanism.examples import Examples
from vestige.mechanism.losses.loss_difference import Scores, losses_of, right_answers
from vestige.methods.base import Method
from vestige.priced_questions import Question
from vestige.randomness.keys import Randomness
from vestige.training.loop import TrainingState, run, step
from vestige.training.planning import Plan


class PlantedEngine:
    """An engine for batches with canaries in them: of those that are absent it sees nothing, of gradient canaries it
    clips and adds the planted gradient, as the reference engine does with gradients that it computed."""

    def __init__(self, engine: GradientEngine, layout: Layout, canary: Canary, device: torch.device) -> None:
        self._engine, self._layout, self._input = engine, layout, canary.inputs.to(device)
        gradient = canary.gradient
        self._gradient = None if gradient is None else layout.views(gradient.to(device))
        self.present = True

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        planted = is_canary(self._input, batch)
        apart = planted if self._gradient is not None or not self.present else torch.zeros_like(planted)
        norms = self._engine([part[~apart] for part in batch], parameters, clip, into, transform)
        count = int(apart.sum()) if self.present else 0
        if count == 0 or self._gradient is None:
            return norms
        gradients = {name: part.expand(count, *part.shape) for name, part in self._gradient.items()}
        return torch.cat([norms, add_clipped(gradients, clip, self._layout, into)])


def is_canary(inputs: Tensor, batch: Batch) -> Tensor:
    """Which rows of a batch are the canary."""
    return (batch[0] == inputs).flatten(1).all(dim=1)


class LoneRuns:
    """Runs of one plan, made one after the other, each with the canary or without it."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: tuple[Tensor, Tensor],
        canary: Canary,
        method: Method,
        plan: Plan,
        engine: str = "bookkeeping",
    ) -> None:
        self._device = next(model.parameters()).device
        rows = [torch.cat([part, own]) for part, own in zip(data, (canary.inputs, canary.target), strict=True)]
        self._examples = Examples(tuple(rows), self._device)
        if bool(is_canary(canary.inputs, data).any()):
            raise ValueError("canary: the data hold its input already, so it cannot be told apart; choose another seed")
        self._start, self._model, self._loss, self._canary = copy.deepcopy(model.state_dict()), model, loss, canary
        self.method, self._plan = method, plan
        self._layout = method.layout(model)
        self._planted = PlantedEngine(
            engine_by_name(engine)(model, loss, self._layout), self._layout, canary, self._device
        )
        self._reference = Reference(model, loss, self._layout)

    def run(self, present: bool) -> tuple[float, Counter[Question]]:
        """The log-likelihood ratio of the canary's presence from what one run publishes, and what it was charged."""
        self._model.load_state_dict(self._start)
        self._planted.present = present
        plan, method, ledger = self._plan, self.method, Ledger(None)
        curator = self._curator(ledger, lambda: present)
        evidence, fresh = Evidence(plan.sample_rate), list[int]()
        curator.observer = partial(self._observe, evidence, fresh)
        state = TrainingState(self._model, method, self._layout, plan.lr)
        for record in run(state, method, curator, plan.noise_multiplier, plan.steps):
            if not record.accepted:  # of a candidate that was undone nothing is published
                for index in fresh:
                    evidence.forget(index)
            fresh.clear()
        sequence = method.noise.start(plan.sample_rate, plan.steps)
        found = evidence.scores(method.noise, plan.steps, sequence.keeps)
        return float(found) if np.ndim(found) == 0 else 0.0, Counter(ledger.spent)

    def steps_apart(self, present: Sequence[bool]) -> tuple[Array, Counter[Question]]:
        """One run in which the canary is there at the steps that `present` names: each step's own score, and what all
        of them were charged.

        Given what was released before, a step is a mechanism of its own, so that one run is as many runs of one step:
        for noise that is independent over steps. A candidate that was undone is one score for all: nothing is seen.
        """
        self._model.load_state_dict(self._start)
        plan, method, ledger = self._plan, self.method, Ledger(None)
        curator = self._curator(ledger, lambda: self._planted.present)
        state, scores = TrainingState(self._model, method, self._layout, plan.lr), []
        for there in present:
            self._planted.present = there
            evidence = Evidence(plan.sample_rate)
            curator.observer = partial(self._observe, evidence, [])
            record = step(state, method, curator, plan.noise_multiplier)
            scores.append(evidence.scores(method.noise, 1, correlated=False) if record.accepted else np.zeros(()))
        return np.array([float(each) for each in scores]), Counter(ledger.spent)

    def _curator(self, ledger: Ledger, present: Callable[[], bool]) -> Curator:
        key, charges, rate = Randomness.secret(), Charges(ledger.ask), self._plan.sample_rate
        scores = (losses_of(self._model, self._loss), right_answers(self._model))
        losses, right = (partial(self._without, each, present) for each in scores)
        return Curator(
            self._examples,
            self._planted,
            self._layout,
            self.method.noise.sampling(rate),
            key,
            charges,
            noise=self.method.noise.start(rate, self._plan.steps),
            comparisons=Comparisons(self._examples, key, charges, losses, right),
        )

    def _without(
        self, scores: Scores, present: Callable[[], bool], batch: Sequence[Tensor], parameters: Parameters
    ) -> Tensor:
        """The scores of those who are there."""
        if not present():
            stays = ~is_canary(self._canary.inputs.to(self._device), batch)
            batch = [part[stays] for part in batch]
        return scores(batch, parameters)

    def _observe(self, evidence: Evidence, fresh: list[int], answer: Answer) -> None:
        fresh.append(answer.index)
        share = torch.zeros(self._layout.size, device=self._device)
        own = [part.to(self._device) for part in (self._canary.inputs, self._canary.target)]
        clip = answer.clip.drawn(lambda: Randomness.reproducible(0).stream("thin", 0))
        if self._canary.gradient is None:
            self._reference(own, answer.parameters, clip, share, answer.transform)
        else:
            views = self._layout.views(self._canary.gradient.to(self._device))
            add_clipped({name: part.unsqueeze(0) for name, part in views.items()}, clip, self._layout, share)
        evidence.add(answer.index, answer.release.total, share, answer.release.noise_std, answer.rate)
