"""What is the right answer? One gradient per example, materialised: slow, simple, and the oracle of the fast engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vestige.checks import RowsNotApart
from vestige.engines.example_axis.labels import Rows, Tracker
from vestige.engines.per_example.parameter_expressions import quietly
from vestige.engines.per_example.taps import require_unwritten
from vestige.layout import Layout, Segment
from vestige.mechanism.clipping import Batch, Clip, Loss, Parameters, Transform, usable_norms, weights
from vestige.mechanism.losses.criteria import BY_PLACE, Form, example_losses
from vestige.processes.parameter_shards import ShardedSum


class Reference:
    """The oracle: one gradient per example, by vmap or in turn, materialised, clipped and summed."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.model, self.loss, self.layout, self.form = model, loss, layout, form
        self._in_turn = False
        """Whether the model cannot be run for all examples at once."""

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
        if transform is not None:
            return add_clipped(
                self._at_once(transform(grad(self.example_loss)), batch, parameters), clip, self.layout, into
            )
        if not self._in_turn:
            try:
                return add_clipped(self._at_once(grad(self.example_loss), batch, parameters), clip, self.layout, into)
            except RuntimeError:  # a model that looks at its numbers, an autograd.Function, rows of different lengths
                self._in_turn = True
        return add_clipped(self._one_by_one(batch, parameters), clip, self.layout, into)

    def _at_once(self, field: Callable[..., Parameters], batch: Batch, parameters: Parameters) -> Parameters:
        with quietly():
            return vmap(field, in_dims=(None, *(0 for _ in batch)), randomness="different")(parameters, *batch)

    def _one_by_one(self, batch: Batch, parameters: Parameters) -> Parameters:
        """Each example by itself; what is left of one afterwards, in the model or anywhere else, is refused: the next
        one could see it."""
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        rows = []
        for place, example in enumerate(zip(*batch, strict=True)):
            tracker = Tracker(strict=False)
            own = [part.clone() for part in example]
            for part in own:
                tracker.labels.set(part, Rows(-1, 1, len(batch[0]), 0, place))
            with torch.enable_grad(), tracker:
                loss = self.example_loss(leaves, *own)
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            require_unwritten(self.model, tracker, leaves)
            rows.append([each.clone() for each in found])
            del loss, found, own, part
            if tracker.labels.alive():
                gc.collect()
                if tracker.labels.alive():
                    raise RowsNotApart(
                        "the model or its loss keeps something of an example for later passes: no noise covers what "
                        "others learn from it. Keep no tensors of a forward pass"
                    )
        return {name: torch.stack(each) for name, each in zip(leaves, zip(*rows, strict=True), strict=True)}

    def example_loss(self, parameters: Parameters, *example: Tensor) -> Tensor:
        args, named, target = self.form.split([part.unsqueeze(0) for part in example])
        return example_losses(self.loss, functional_call(self.model, parameters, args, named), target).sum()


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
