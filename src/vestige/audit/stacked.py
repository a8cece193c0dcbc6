"""How are thousands of runs attacked at once? A stack whose curator also holds a canary, present in every other run.

Nothing of the mechanism is written again here: samples, clips, sums, noise and charges are those of
`vestige.compare.stacked`. The canary is one more example; where it is absent its gradient counts as unusable, which
adds exactly zero to a sum, as if there were no such row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vestige.audit.canaries import Canary
from vestige.audit.canary_likelihood_ratio import Evidence
from vestige.compare.stacked.curator import StackedCurator
from vestige.compare.stacked.mlp import MLP, StackedScales
from vestige.compare.stacked.stack import Stack
from vestige.mechanism.clipping import Parameters
from vestige.optim.learner import Learner
from vestige.randomness.sum_and_release_types import Release


class PlantedMLP(MLP):
    """The network of a stack in which the examples that `mark` names are the canary."""

    def __init__(self, network: MLP, gradient: Tensor | None, present: Tensor) -> None:
        self.layers, self.layout = network.layers, network.layout
        self.present = present
        self._gradient = None if gradient is None else self.layout.views(gradient)
        self._canary = present[:, None]

    def mark(self, canary: Tensor, present: Tensor | None = None) -> None:
        """Which rows of the next sum are the canary, [runs, batch], and in which runs it is there."""
        self._canary, self._absent = canary, canary & ~(self.present if present is None else present)[:, None]

    def squares(
        self, values: list[Tensor], errors: list[Tensor], input_squares: Tensor, scales: StackedScales = None
    ) -> Tensor:
        found = super().squares(values, errors, input_squares, scales)
        if self._gradient is not None:
            found = torch.where(self._canary.unsqueeze(-1), self._planted_squares(found), found)
        return found.masked_fill(self._absent.unsqueeze(-1), torch.inf)

    def _planted_squares(self, like: Tensor) -> Tensor:
        assert self._gradient is not None
        names = [[name for name in (layer.weight, layer.bias) if name is not None] for layer in self.layers]
        return like.new_tensor([sum(float(self._gradient[n].double().square().sum()) for n in each) for each in names])

    def add_weighted(
        self,
        values: list[Tensor],
        errors: list[Tensor],
        weights: Tensor,
        into: Tensor,
        scales: StackedScales = None,
    ) -> None:
        """A planted gradient is what is clipped and released: where steps are balanced, it is scaled already."""
        if self._gradient is None:
            super().add_weighted(values, errors, weights, into, scales)
            return
        planted = self._canary.unsqueeze(-1)
        super().add_weighted(values, errors, weights.masked_fill(planted, 0.0), into, scales)
        share = torch.where(planted, weights, 0.0).sum(dim=1)  # [runs, layers]
        views = self.layout.views(into)
        for index, layer in enumerate(self.layers):
            for name in (layer.weight, layer.bias):
                if name is not None:
                    part = self._gradient[name]
                    views[name].add_(share[:, index].view(-1, *(1 for _ in part.shape)) * part)


class AuditedCurator(StackedCurator):
    """A curator whose last example is the canary, and an attacker who sees every release and knows all but the coin."""

    evidence: Evidence | None = None

    def plant(self, canary: Canary, present: Tensor, watched: bool) -> None:
        gradient = None if canary.gradient is None else canary.gradient.to(self.fresh.device)
        self.network = self._planted = PlantedMLP(self.network, gradient, present)
        self._row = self.population - 1
        self._everywhere = torch.full((len(self.runs), 1), self._row, device=self.fresh.device)
        self._scratch = torch.zeros_like(self.fresh)
        self._fixed = canary.gradient is not None and not any(clip.clip.adaptive for clip in self.clips)
        self._share: Tensor | None = None
        if watched:
            self.evidence = Evidence(self.rate)

    def sum(self, rows: Tensor, real: Tensor, point: Parameters) -> None:
        self._planted.mark(rows == self._row)
        super().sum(rows, real, point)

    def _answer(
        self, rows: Tensor, real: Tensor, point: Parameters, index: int, more: float = 1.0, again: str = ""
    ) -> Release:
        if self.evidence is None:
            return super()._answer(rows, real, point, index, more, again)
        share = self.share(point)
        release = super()._answer(rows, real, point, index, more, again)
        self.evidence.add(index, release.total, share, release.noise_std)
        return release

    def share(self, point: Parameters) -> Tensor:
        """What the canary adds to a sum if it is there and sampled, [runs, size]: the attacker computes it as the
        mechanism would."""
        if self._share is None or not self._fixed:
            kept, self.fresh = self.fresh, self._scratch
            self._planted.mark(
                torch.ones_like(self._everywhere, dtype=torch.bool), torch.ones_like(self._planted.present)
            )
            super().sum(self._everywhere, torch.ones_like(self._everywhere, dtype=torch.bool), point)
            self.fresh, self._share = kept, self._scratch
        return self._share


def kept_vectors(learner: Learner, probe: Mapping[str, object], size: int) -> Iterator[tuple[str, Tensor]]:
    """Every vector of the parameters' size that a learner keeps between steps, [runs, size]."""
    optimizer = getattr(learner.mover, "optimizer", None)
    moments = optimizer.state_dict()["state"] if optimizer is not None else {}
    kept: dict[str, object] = {
        "memory": learner.memory,
        "average": learner.average,
        "probe": probe,
        "optimizer": moments,
    }
    queue = list(kept.items())
    while queue:
        name, value = queue.pop(0)
        if isinstance(value, Mapping):
            queue += [(f"{name} {key}", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            queue += [(f"{name} {index}", part) for index, part in enumerate(value)]
        elif isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == size and value.is_floating_point():
            rows = value.flatten(1, -2).unbind(1) if value.dim() > 2 else [value]
            yield from ((name if len(rows) == 1 else f"{name} {index}", row) for index, row in enumerate(rows))


class AuditedStack(Stack):
    """A stack with a canary as its last example, in the runs that `present` names."""

    curator = AuditedCurator

    def plant(self, canary: Canary, present: Sequence[bool], watched: bool = True) -> None:
        here = torch.tensor([present[i] for i in self._order], device=self.device)
        self.present, self._canary = here, canary
        self._start = self.parameters.clone()
        for curator, _ in self.parts:
            assert isinstance(curator, AuditedCurator)
            curator.plant(canary, here[curator.part], watched)

    def by_releases(self) -> np.ndarray:
        """Each run's log-likelihood ratio of the canary's presence, from all releases; in the stack's order."""
        found = []
        for curator, _ in self.parts:
            evidence = self._audited(curator).evidence
            assert evidence is not None
            found.append(evidence.scores(curator.noise, self.steps, curator.sequence.keeps))
        return np.concatenate(found)

    @torch.no_grad()
    def by_model(self) -> np.ndarray:
        """How far each final model moved against the canary's first share: the releases are not seen."""
        moved = self.evaluated() - self._start
        shares = torch.cat([self._audited(curator).share(curator._point) for curator, _ in self.parts])
        return (-(moved * shares).sum(-1).double()).cpu().numpy()

    @torch.no_grad()
    def by_loss(self) -> np.ndarray:
        """Minus the canary's loss at each final model."""
        views = self.layout.views(self.evaluated())
        inputs = self._canary.inputs.flatten(1).to(self.device)
        outputs = self.network.forward(views, inputs)[-1][:, 0]
        target = self._canary.target.to(self.device).expand(len(outputs))
        return (-functional.cross_entropy(outputs.double(), target, reduction="none")).cpu().numpy()

    @torch.no_grad()
    def by_state(self) -> dict[str, np.ndarray]:
        """Each run's product of the canary's first share with every vector that the runs keep after their last step:
        buffers of the memory, moments of the optimizer, an average; and of its squares, for buffers of squares."""
        found: dict[str, np.ndarray] = {}
        ((planted, (learner,)),) = self.parts  # an audit has runs of one method
        curator = self._audited(planted)
        share = curator.share(curator._point).double()
        unit = share / share.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        for name, value in kept_vectors(learner.learner, curator.state, self.layout.size):
            found[name] = (value.double() * unit).sum(-1).cpu().numpy()
            found[f"{name}, squared"] = (value.double() * unit.square()).sum(-1).cpu().numpy()
        return found

    @staticmethod
    def _audited(curator: StackedCurator) -> AuditedCurator:
        assert isinstance(curator, AuditedCurator)
        return curator
