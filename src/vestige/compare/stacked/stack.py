"""How do many runs of one task train at once? Stacked along a leading axis, each with its own sample and noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vestige.checks import check_rate, renamed
from vestige.compare.stacked.curator import StackedCurator, StackedExamples
from vestige.compare.stacked.learner import StackedLearner, StackedRun, alike
from vestige.compare.stacked.mlp import MLP, chain
from vestige.layout import Layout
from vestige.mechanism.clipping import LARGEST_SUM, Loss
from vestige.methods.base import Method
from vestige.priced_questions import Question
from vestige.tf32 import products_in_tf32

__all__ = ["RunProgress", "Stack", "StackedRun", "check_noise", "footprint", "why_not"]


@dataclass(frozen=True)
class RunProgress:
    """The questions that one run has asked, and its diagnostics: all from releases and public facts."""

    asked: Counter[Question]
    diagnostics: dict[str, Tensor]


def why_not(
    model: nn.Module, loss: Loss, method: Method, sampling: str = "poisson", expected_batch: float = 0.0
) -> str | None:
    """Why a run cannot be stacked, or None if it can."""
    if chain(model) is None:
        return "the model is not a chain of linear layers and activations"
    if loss is not functional.cross_entropy:
        return "the loss is not cross_entropy"
    if sampling != "poisson":
        return f"sampling is {sampling}"
    if expected_batch > LARGEST_SUM / 2:
        return f"samples of {expected_batch:g} examples are too large to be summed in float32"
    if method.gate.tests or method.augment is not None or method.noise_multiplier is not None:
        return f"{method.name} gates, augments or fixes its noise in a way of its own"
    for part in ("clip", "probe", "memory", "rule"):
        if not getattr(method, part).stackable:
            return f"the {part} of {method.name} works on one run at a time: {getattr(method, part)}"
    layout = method.layout(model)
    if MLP(model, layout).owners(layout) is None:
        return f"{method.name} clips the weight and the bias of a layer apart"
    if isinstance(method.clip.sensitivity(layout), Tensor):
        return f"{method.name} gives each group noise of its own"
    return None


LEAST_NOISE = 2.0**-18
"""Below this, sums in steps of the noise would not fit 64 bits."""


def check_noise(run: StackedRun, expected_batch: float) -> None:
    """Refuse a run whose count of unclipped examples would cost more than its whole step."""
    if run.noise_multiplier < LEAST_NOISE:
        raise ValueError(f"noise_multiplier={run.noise_multiplier} is too small for a stack: make the run alone")
    clip = run.method.clip
    with renamed(run.method.origin.letters):
        clip.now(clip.init()).gradient_multiplier(run.noise_multiplier, expected_batch)


def footprint(model: nn.Module, method: Method, rate: float, population: int, steps: int) -> int:
    """A rough upper bound on the bytes that one run of a stack takes."""
    layout = Layout.of(model)
    layers = chain(model) or []
    width = sum(layer.linear.in_features + 2 * layer.linear.out_features for layer in layers)
    expected = rate * population
    batch = expected + 8 * expected**0.5 + 8
    vectors = 8 if method.balance is None else 10
    return int(4 * (layout.size * ((method.copies(rate, steps) or 0) + vectors) + 2 * batch * width))


# --- the stack -------------------------------------------------------------------------------------------------------


def _asks(run: StackedRun) -> object:
    return run.method.probe, run.method.noise


def _moves(run: StackedRun) -> object:
    return run.method.memory, run.method.rule, run.method.average, run.method.grouping


class Stack:
    """Runs of one task trained together: same data, same length, same rate; everything else may differ.

    Formal guarantees: each run asks what it would ask alone, with its own multiplier, sample and noise;
    `progress()[i].asked` counts it, each question before its answer exists.
    """

    curator: ClassVar[type[StackedCurator]] = StackedCurator
    """Who answers; an audit plants a canary there."""

    def __init__(
        self,
        runs: Sequence[StackedRun],
        data: tuple[Tensor, Tensor],
        *,
        sample_rate: float,
        steps: int,
        device: torch.device,
    ) -> None:
        check_rate(sample_rate)
        if not runs:
            raise ValueError("runs=[] must hold at least one run")
        for run in {(id(run.model), id(run.method)): run for run in runs}.values():
            reason = why_not(run.model, functional.cross_entropy, run.method)
            if reason:
                raise ValueError(f"runs: {reason}, so it cannot be stacked; train it alone")
        # Runs with the same questions are adjacent, and among them those with the same updates: each kind is a slice.
        places = {kind: _place(run) for kind, run in {_kind(run): run for run in runs}.items()}
        self._order = sorted(range(len(runs)), key=lambda i: places[_kind(runs[i])])
        self.runs = [runs[i] for i in self._order]
        self.device, self.steps, self.step = device, steps, 0
        self.layout = Layout.of(runs[0].model)
        self.network = MLP(runs[0].model, self.layout)
        packed = [self.layout.pack(dict(run.model.named_parameters())) for run in self.runs]
        self.parameters = torch.stack(packed).to(device)
        # Sums in tf32 are faster on a GPU; the slack keeps every example's share within the clip all the same.
        self._fast = device.type == "cuda" and not any(run.seed is not None for run in self.runs)
        examples = StackedExamples.of(data, device)
        self.expected_batch = sample_rate * len(examples.targets)
        self.parts: list[tuple[StackedCurator, list[StackedLearner]]] = []
        for part in alike([_asks(run) for run in self.runs]):
            mine, rows = self.runs[part], self.parameters[part]
            curator = self.curator(
                mine, part, rows, examples, self.network, sample_rate=sample_rate, steps=steps, fast=self._fast
            )
            learners = [StackedLearner(mine[same], same, rows[same]) for same in alike([_moves(run) for run in mine])]
            self.parts.append((curator, learners))

    def train(self) -> Iterator[int]:
        """Yield the number of steps done after each step, until all are done."""
        while self.step < self.steps:
            # Where the slack is for exact products, TF32 is forbidden whatever the user's settings are.
            with torch.no_grad(), products_in_tf32(self._fast):
                for curator, learners in self.parts:
                    self._advance(curator, learners)
            self.step += 1
            yield self.step
        self.settle()

    def progress(self) -> list[RunProgress]:
        """In the order in which the runs were given."""
        shown: list[RunProgress] = []
        for curator, learners in self.parts:
            mine = [RunProgress(curator.spent(run), {}) for run in range(len(curator.runs))]
            kept = [(each.part, each.seen) for each in learners] + [(each.part, each.seen) for each in curator.clips]
            for part, seen in kept:
                here = {name: values.cpu() for name, values in seen.items()}
                for row, progress in enumerate(mine[part]):
                    progress.diagnostics.update({name: values[row] for name, values in here.items()})
            shown += mine
        return [shown[i] for i in self._given()]

    @torch.no_grad()
    def evaluate(self, test: tuple[Tensor, Tensor], chunk: int = 512) -> list[tuple[float, float]]:
        """Each run's accuracy and mean loss on PUBLIC data, in the order given; of its averaged parameters, where it
        keeps them."""
        views = self.layout.views(self.evaluated())
        sums = torch.zeros(len(self.runs), 2, dtype=torch.float64, device=self.device)
        for inputs, targets in zip(test[0].flatten(1).split(chunk), test[1].split(chunk), strict=True):
            outputs, labels = self.network.forward(views, inputs.to(self.device))[-1], targets.to(self.device)
            sums[:, 0] += (outputs.argmax(-1) == labels).sum(-1)
            truth = outputs.log_softmax(-1).gather(-1, labels.expand(outputs.shape[:-1])[..., None])
            sums[:, 1] -= truth.double().sum((-2, -1))
        found = (sums / len(test[1])).tolist()
        return [(found[i][0], found[i][1]) for i in self._given()]

    @torch.no_grad()
    def settle(self) -> None:
        """Write the parameters back into the runs' models."""
        for run, vector in zip(self.runs, self.parameters, strict=True):
            views = self.layout.views(vector)
            for name, parameter in self.layout.parameters(run.model).items():
                parameter.copy_(views[name])

    def _given(self) -> list[int]:
        return sorted(range(len(self._order)), key=lambda i: self._order[i])

    def evaluated(self) -> Tensor:
        """What is judged and published of every run, in the stack's own order: averages, where they are kept."""
        averages = [
            (curator.part.start + each.part.start, each.learner.average["mean"])
            for curator, learners in self.parts
            for each in learners
            if each.learner.average
        ]
        if not averages:
            return self.parameters
        shown = self.parameters.clone()
        for start, mean in averages:
            shown[start : start + len(mean)] = mean
        return shown

    def _advance(self, curator: StackedCurator, learners: Sequence[StackedLearner]) -> None:
        pace = curator.pace()
        for each in learners:
            each.prepare(curator.rate)
        release = curator.ask(self.step)
        for each in learners:
            std = cast(Tensor, release.noise_std)[each.part]
            mine = replace(release, total=release.total[each.part], noise_std=std)
            each.step(mine, pace[each.part], self.step)
        for clip in curator.clips:
            clip.learn()


def _kind(run: StackedRun) -> tuple[int, float]:
    return id(run.method), run.noise_multiplier


def _place(run: StackedRun) -> tuple[str, str, str]:
    method = run.method
    return repr(_asks(run)), repr(_moves(run)), repr((method.clip, method.schedule, run.noise_multiplier))
