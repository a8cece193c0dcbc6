"""What is the right answer? One gradient per example, materialised: slow, simple, and the oracle of the fast engine.

The scores of private evaluations and comparisons are one number per example in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from vestige.checks import ExampleKept, RowsNotApart
from vestige.engines.example_axis.before_dispatch import TrackedFunctions
from vestige.engines.example_axis.labels import Labels, NotApart, Rows, Tracker
from vestige.engines.example_axis.tracked_model import require_forgotten, require_unwritten
from vestige.engines.module_snapshot import left_as_found
from vestige.layout import Layout, Segment, call_with
from vestige.mechanism.clipping import Batch, Clip, Loss, Parameters, Transform, usable_norms, weights
from vestige.mechanism.losses.criteria import BY_PLACE, Form, example_losses
from vestige.mechanism.losses.loss_difference import Scores
from vestige.processes.parameter_shards import ShardedSum
from vestige.randomness.generator_states import draws_kept, seed_all_draws, seed_draws
from vestige.vmap_fallback import quietly

Field = Callable[..., Parameters]
"""From the parameters and one example to its gradient."""


class Reference:
    """The oracle: one gradient per example, by vmap or in turn, materialised, clipped and summed.

    vmap computes each example by itself as far as torch's own batching rules go. What they may not cover, operators
    that have no rule in `example_axis` either, is taken in turn.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE, labels: Labels | None = None
    ) -> None:
        """`labels` are those of passes that were given up, if there are any."""
        self.model, self.loss, self.layout, self.form = model, loss, layout, form
        self.labels = Labels() if labels is None else labels
        self.reads: set[str] = set()
        """Where the model or the loss has looked at values of an example that was run alone."""
        self.settled = False
        """Whether what read no values before may read none now: what Python keeps of them could reach others."""
        self._in_turn = False
        """Whether the model cannot be run for all examples at once."""

    def settle(self) -> None:
        self.settled = True

    def __call__(
        self,
        batch: Batch,
        parameters: Parameters,
        clip: Clip,
        into: Tensor | ShardedSum,
        transform: Transform | None = None,
    ) -> Tensor:
        if len(batch[0]) == 0:
            like = into if isinstance(into, Tensor) else into.like
            return like.new_zeros(0, self.layout.groups, dtype=torch.float64)
        require_unwritten(self.model, self.labels, parameters)
        field = grad(self.example_loss)
        field = field if transform is None else transform(field)
        if not self._in_turn:
            try:
                return add_clipped(self._at_once(field, batch, parameters), clip, self.layout, into)
            except RowsNotApart:
                raise
            except (RuntimeError, ValueError, LookupError):  # no rule, a look at numbers, what vmap cannot do
                self._in_turn = True
        rows = self._one_by_one(field if transform is not None else None, batch, parameters)
        return add_clipped(rows, clip, self.layout, into)

    def _at_once(self, field: Field, batch: Batch, parameters: Parameters) -> Parameters:
        """Raises `NotApart` where an operator has no rule, or Python looks at a value."""
        require_forgotten(self.labels, RowsNotApart)  # it would be taken for rows of this batch, or for public
        tracker, own = Tracker(self.labels), [part.clone() for part in batch]
        for part in own:
            tracker.label_rows(part, len(part), 0)
        parameters = {name: value.detach() for name, value in parameters.items()}  # no graph of theirs holds the pass
        with quietly(), tracker, TrackedFunctions(tracker, inside=True):
            found = vmap(field, in_dims=(None, *(0 for _ in batch)), randomness="different")(parameters, *own)
        if tracker.unknown is not None:
            raise NotApart(tracker.unknown)
        require_unwritten(self.model, self.labels, parameters)
        del own, part
        require_forgotten(self.labels, besides=tuple(found.values()))
        return found

    def _one_by_one(self, field: Field | None, batch: Batch, parameters: Parameters) -> Parameters:
        """Each example by itself, with random numbers of its own; what is left of one afterwards, in the model or
        anywhere else, is refused: the next one could see it."""
        require_forgotten(self.labels, RowsNotApart)
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        held, rows = copied(self.model), []
        try:
            with own_draws(batch[0].device) as begin:
                for place, example in enumerate(zip(*batch, strict=True)):
                    tracker = Tracker(self.labels, strict=self.settled and not self.reads)
                    own = [part.clone() for part in example]
                    for part in own:
                        self.labels.set(part, Rows(-1, 1, len(batch[0]), 0, place))
                    begin(place)
                    with torch.enable_grad(), tracker, TrackedFunctions(tracker, inside=True):
                        found = (
                            list(field(parameters, *own).values()) if field is not None else self._gradient(leaves, own)
                        )
                    require_unwritten(self.model, self.labels, leaves)
                    rows.append([each.detach().clone() for each in found])
                    self.reads.update(f"{read.operator} at {read.where}" for read in tracker.reads)
                    del found, own, part
                    require_forgotten(self.labels)
        finally:
            require_same(self.model, held)
        return {name: torch.stack(each) for name, each in zip(leaves, zip(*rows, strict=True), strict=True)}

    def _gradient(self, leaves: Parameters, example: Sequence[Tensor]) -> Sequence[Tensor]:
        loss = self.example_loss(leaves, *example)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [torch.zeros_like(p) if own is None else own for p, own in zip(leaves.values(), found, strict=True)]

    def example_loss(self, parameters: Parameters, *example: Tensor) -> Tensor:
        args, named, target = self.form.split([part.unsqueeze(0) for part in example])
        return example_losses(self.loss, call_with(self.model, parameters, args, named), target).sum()


class FollowedScores:
    """Scores of a batch, where its operators are proved to keep examples apart; otherwise of one example after the
    other. The model's buffers and attributes are left as they were.

    Formal guarantees: a score is a function of its example, of public values and of random draws, as long as Python
    keeps for others nothing of what it reads of an example (`reads`).
    """

    def __init__(self, model: nn.Module, scores: Scores, reads: set[str], labels: Labels | None = None) -> None:
        """`labels` are those of the passes that trained the model, which may have kept something of them."""
        self._model, self._scores, self._reads = model, scores, reads
        self._labels = Labels() if labels is None else labels

    def __call__(self, batch: Sequence[Tensor], parameters: Parameters) -> Tensor:
        with left_as_found(self._model, parameters=False):
            try:
                return self._at_once(batch, parameters)
            except NotApart:
                count = len(batch[0])
            each = ([part[place : place + 1] for part in batch] for place in range(count))
            return torch.cat([self._alone(example, parameters) for example in each])

    def _at_once(self, batch: Sequence[Tensor], parameters: Parameters) -> Tensor:
        tracker, own = Tracker(self._labels), [part.clone() for part in batch]
        for part in own:
            tracker.label_rows(part, len(part), 0)
        found = self._followed(tracker, own, parameters)
        tracker.require_rows(found, len(own[0]), 0)
        return found

    def _alone(self, example: Sequence[Tensor], parameters: Parameters) -> Tensor:
        require_forgotten(self._labels, RowsNotApart)
        tracker, own = Tracker(self._labels, strict=False), [part.clone() for part in example]
        for part in own:
            self._labels.set(part, Rows(0, 1, 1, 0))
        with left_as_found(self._model, parameters=False):
            found = self._followed(tracker, own, parameters)
        self._reads.update(f"{read.operator} at {read.where}" for read in tracker.reads)
        return found

    def _followed(self, tracker: Tracker, batch: Sequence[Tensor], parameters: Parameters) -> Tensor:
        with tracker, TrackedFunctions(tracker, inside=True):
            found = self._scores(batch, parameters)
        require_unwritten(self._model, self._labels, parameters, restored=True)
        return found


@contextmanager
def own_draws(device: torch.device) -> Iterator[Callable[[int], None]]:
    """What it gives is called before each example: its random numbers do not depend on how many others have drawn, in
    this pass or in one that was given up; nor do those of later passes."""
    first = _following(torch.initial_seed())
    try:
        with draws_kept():
            yield lambda place: seed_all_draws(device, first + place)
    finally:
        seed_draws(device, _following(first))


def _following(seed: int) -> int:
    """A seed that looks unrelated (Steele, Lea & Flood 2014)."""
    seed = (seed + 0x9E3779B97F4A7C15) % 2**64
    seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EB % 2**64
    return (seed ^ (seed >> 31)) >> 2


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model as they are now."""
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in held}


def require_same(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise ValueError if a pass about one example has changed the model, be it by numbers that Python has read."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        was = before.get(name)
        if was is None or tensor.shape != was.shape or not torch.equal(tensor.nan_to_num(), was.nan_to_num()):
            raise ExampleKept(
                f"{name!r} was changed by a pass about one example, and the next example sees it: keep it out of the "
                "model, or do not change it while training"
            )


@contextmanager
def placed(into: Tensor | ShardedSum, segment: Segment) -> Iterator[Tensor]:
    """Where the clipped sum of one parameter's gradients is added, in its shape."""
    if isinstance(into, Tensor):
        yield into[segment.start : segment.stop].view(segment.shape)
    else:
        with into.at(segment) as where:
            yield where


def add_clipped(gradients: Parameters, clip: Clip, layout: Layout, into: Tensor | ShardedSum) -> Tensor:
    """Clip materialised per-example gradients (name -> [examples, ...]) and add their sum to `into`."""
    rows = {s.name: gradients[s.name].detach().reshape(-1, prod(s.shape)) for s in layout.segments}
    # Gradients with respect to what a balanced step trains in a parameter's place are `scale` times its own.
    like = into if isinstance(into, Tensor) else into.like
    squares = like.new_zeros(len(next(iter(rows.values()))), layout.groups, dtype=torch.float64)
    for s in layout.segments:
        norm = torch.linalg.vector_norm(rows[s.name], dim=1, dtype=torch.float64)
        squares[:, s.group] += (norm * s.scale).square()
    norms = usable_norms(squares)
    factors = weights(clip, norms)
    broken = ~norms.isfinite().all(dim=1)
    for s in layout.segments:
        row = rows[s.name]
        if broken.any():
            row = torch.where(broken[:, None], 0.0, row)
        with placed(into, s) as where:
            where.view(-1).addmv_(row.t(), (factors[:, s.group] * s.scale).to(like.dtype))
    return norms
