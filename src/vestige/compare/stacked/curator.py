"""What does the curator do for many runs at once? Each run's question, sample, clip and noise, along a leading axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import cast

import torch
from torch import Tensor, nn

from vestige.compare.stacked.draws import Draws
from vestige.compare.stacked.learner import StackedRun, alike, layout_of, scales_of
from vestige.compare.stacked.mlp import MLP, square
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import centred_count, unclipped_fraction
from vestige.mechanism.clipping import Clip, Parameters, Value, usable_norms, weights
from vestige.optim.gradient_query_points import At, ask
from vestige.optim.learner import for_each
from vestige.priced_questions import Question, SampledGaussian
from vestige.randomness import lattice
from vestige.randomness.noise_schedules import Schedule, level
from vestige.randomness.rounded_gaussian import STEPS
from vestige.randomness.sum_and_release_types import Release
from vestige.tf32 import SLACK


@dataclass(frozen=True)
class StackedExamples:
    """The examples of all runs of a stack; an input with NaN or infinity is zeroed and has an infinite squared norm."""

    inputs: Tensor
    targets: Tensor
    squares: Tensor

    @classmethod
    def of(cls, data: tuple[Tensor, Tensor], device: torch.device) -> StackedExamples:
        inputs, targets = data[0].flatten(1).to(device), data[1].to(device)
        finite = inputs.isfinite().all(dim=1)
        # Such an input has no usable gradient: it is sampled and counted, and adds exactly zero.
        inputs = torch.where(finite.unsqueeze(1), inputs, 0.0)
        return cls(inputs, targets, torch.where(finite, square(inputs), torch.inf))


class StackedClip:
    """One clip for the runs `part` of a curator; an adaptive one has a bound for each of them."""

    def __init__(self, clip: Clip, part: slice, layout: Layout, network: MLP, device: torch.device) -> None:
        self.clip, self.part = clip, part
        column = partial(torch.full, (part.stop - part.start, 1), dtype=torch.float64, device=device)
        self.state = {name: column(value) for name, value in clip.init().items()}
        self._ones = column(1.0)
        self._layout = layout
        owners = network.owners(layout)
        assert owners is not None, "why_not refuses such groups"
        members = [[i for i, owner in enumerate(owners) if owner == group] for group in range(layout.groups)]
        self._members = [torch.tensor(layers, device=device) for layers in members]
        self._owners = torch.tensor(owners, device=device)
        self._counts = False
        self._count: Tensor | None = None
        self._fraction: Value | None = None
        self.seen: dict[str, Tensor] = {}

    @property
    def sensitivity(self) -> Tensor:
        return self._ones * self.clip.now(self.state).sensitivity(self._layout)

    def factors(self, squares: Tensor) -> Tensor:
        """SENSITIVE: each layer's factor, [runs, batch, layers], from squared norms by layer."""
        if len(self._members) == 1:
            squares = squares.sum(-1, keepdim=True)
        else:
            squares = torch.stack([squares.index_select(-1, layers).sum(-1) for layers in self._members], dim=-1)
        norms = usable_norms(squares)
        clip = self.clip.now({name: value.unsqueeze(-1) for name, value in self.state.items()})
        if self._counts:
            assert clip.flat_bound is not None
            self._count = centred_count(clip.flat_bound, norms).unsqueeze(-1)
        found = weights(clip, norms)
        if len(self._members) == 1:
            return found.expand(*found.shape[:-1], len(self._owners))
        return found.index_select(-1, self._owners)

    def multipliers(self, levels: Sequence[float], expected_batch: float) -> list[float]:
        """Each run's noise multiplier for the gradient; the rest of its budget is for the count."""
        now = self.clip.now(self.clip.init())
        deviations = [now.count_deviation(each, expected_batch) for each in levels]
        self._deviation = self._ones.new_tensor(deviations).unsqueeze(1)
        self._counts = all(each < inf for each in deviations)
        return [now.gradient_multiplier(each, expected_batch) for each in levels]

    def release_count(self, draw: Callable[[], Tensor], expected_batch: float) -> None:
        """Release the noised fraction of unclipped examples, for `learn`."""
        if self._counts:
            assert self._count is not None
            spacing = self._deviation * (1 + lattice.ROUNDING) * 2.0**-STEPS
            noised = ((self._count / spacing).round() + draw()[self.part]) * spacing
            self._fraction = unclipped_fraction(noised, expected_batch)

    def pace(self) -> Tensor:
        return self._ones * self.clip.pace(self.state)

    def learn(self) -> None:
        self.seen = {name: cast(Tensor, value).squeeze(1) for name, value in self.clip.shown(self.state).items()}
        self.state = self.clip.learn(self._fraction, self.state)


class StackedCurator:
    """A curator for the runs `part` of a stack at once, which share a probe and a kind of noise.

    Formal guarantees: each call is one question of each run, the one that `curator.gradient` would ask of it alone,
    charged before its answer exists.
    """

    def __init__(
        self,
        runs: Sequence[StackedRun],
        part: slice,
        parameters: Tensor,
        examples: StackedExamples,
        network: MLP,
        *,
        sample_rate: float,
        steps: int,
        fast: bool,
    ) -> None:
        self.runs, self.part, self.examples, self.network = runs, part, examples, network
        method, device = runs[0].method, examples.inputs.device
        self.probe, self.noise = method.probe, method.noise
        sampling = self.noise.sampling(sample_rate)
        self.rate, self.population = sampling.rate, len(examples.targets)
        self.expected_batch = self.rate * self.population
        questions = steps * len(self.probe.questions(sample_rate, 1.0))
        self.draws = Draws([run.seed for run in runs], self.population, sampling, device, questions)
        self.sequence = self.noise.start(sample_rate, steps)
        layout = network.layout
        self._point = layout.views(parameters)
        self.scales = scales_of(runs, device)
        self.state = for_each(self.probe.init(layout, device), (len(runs),))
        self.clips = [
            StackedClip(runs[same.start].method.clip, same, layout_of(runs[same.start]), network, device)
            for same in alike([(run.method.clip, run.method.grouping) for run in runs])
        ]
        self.asked = self.step = 0
        # Runs with the same schedule and multiplier ask the same questions: they share one account.
        self._kinds = [(run.method.schedule, run.noise_multiplier) for run in runs]
        self.accounts: dict[tuple[Schedule, float], Counter[Question]] = {kind: Counter() for kind in self._kinds}
        self._levels: dict[tuple[Schedule, float], float] = {}
        self.fresh = torch.zeros(len(runs), layout.size, device=device)
        self._unit = torch.zeros_like(self.fresh)
        self._slack = SLACK if fast else 1.0

    def ask(self, step: int) -> Release:
        """The probe's release of this step."""
        self.step = step
        self._set_levels()
        release, self.state = ask(self.probe, self, self._point, self.state, self.scales)
        return release

    def pace(self) -> Tensor:
        """The factors of the learning rates at this step, [runs, 1]."""
        return torch.cat([clip.pace() for clip in self.clips])

    def __call__(self, at: At) -> Release:
        """Answer a probe's question: `probes.AskGradient` for every run at once."""
        assert (at.transform, at.clip, at.boost) == (None, None, 1), "why_not refuses such probes"
        for kind, question in self._questions.items():
            self.accounts[kind][question] += 1
        index, self.asked = self.asked, self.asked + 1
        rows, real = self.draws.sample(index)
        if at.then is None:
            return self._answer(rows, real, at.point, index)
        first = self._answer(rows, real, at.point, index, more=sqrt(2))
        return self._answer(rows, real, at.then(first), index, more=sqrt(2), again="-again")

    def norms(self, point: Parameters, bound: float, *, part: int = 0, boost: float = 1.0) -> float:
        raise AssertionError("why_not refuses such probes")

    def spent(self, run: int) -> Counter[Question]:
        return Counter(self.accounts[self._kinds[run]])

    def _set_levels(self) -> None:
        """This step's multipliers; they change with public schedules only."""
        levels = {kind: level(*kind, self.step, self.rate) for kind in self.accounts}
        if levels == self._levels:
            return
        self._levels = levels
        self._questions = {kind: self.noise.question(SampledGaussian(self.rate, each)) for kind, each in levels.items()}
        mine = [levels[kind] for kind in self._kinds]
        found = [each for clip in self.clips for each in clip.multipliers(mine[clip.part], self.expected_batch)]
        self._multipliers = torch.tensor(found, dtype=torch.float64, device=self.fresh.device).unsqueeze(1)

    def _answer(
        self, rows: Tensor, real: Tensor, point: Parameters, index: int, more: float = 1.0, again: str = ""
    ) -> Release:
        self.sum(rows, real, point)
        for clip in self.clips:
            clip.release_count(partial(self.draws.steps, "count", index), self.expected_batch)
        sensitivity = torch.cat([clip.sensitivity for clip in self.clips])
        if self.sequence.arithmetic == "lattice":
            std = sensitivity * lattice.charged(self._multipliers * more, self.fresh.shape[-1])
            self.draws.add_noise("noise" + again, index, self.fresh, std * 2.0**-STEPS)
            return Release(self.fresh, std, self.expected_batch, self.rate)
        std = self._multipliers * sensitivity * more
        # A noise sequence with memory keeps the tensor it is given, so it needs a new one each time.
        into = torch.empty_like(self.fresh) if self.sequence.keeps else self._unit
        noise = self.sequence.next(self.draws.noise("noise" + again, index, into))
        std = std * self.sequence.scale
        self.fresh.addcmul_(noise, std.float())
        std = std * self.sequence.gain(index)
        return Release(self.fresh, std, self.expected_batch, self.rate)

    def sum(self, rows: Tensor, real: Tensor, point: Parameters) -> None:
        """SENSITIVE: the clipped sums over the samples, written into `fresh`."""
        values = self.network.forward(point, _taken(self.examples.inputs, rows))
        errors = self.network.backward(point, values, self.examples.targets[rows])
        squares = self.network.squares(values, errors, self.examples.squares[rows], self.scales)
        squares.masked_fill_(~real.unsqueeze(-1), torch.inf)  # padding is an example without a usable gradient
        factors = [clip.factors(squares[clip.part]) for clip in self.clips]
        factor = factors[0] if len(factors) == 1 else torch.cat(factors)
        self.network.add_weighted(values, errors, (factor * self._slack).float(), self.fresh, self.scales)


def _taken(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows], which on a CPU copies number by number; as an embedding it copies row by row."""
    return table[rows] if table.is_cuda else nn.functional.embedding(rows, table)
