"""What is the right answer? One gradient per example, materialised: slow, simple, and the oracle of the fast engine."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Loss, Parameters, Transform, usable_norms, weights
from vestige.mechanism.criteria import BY_PLACE, Form, example_losses


class Reference:
    """The oracle: one gradient per example by vmap, materialised, clipped and summed."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.model, self.loss, self.layout, self.form = model, loss, layout, form

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if len(batch[0]) == 0:
            return into.new_zeros(0, self.layout.groups, dtype=torch.float64)
        field = grad(self.example_loss)
        if transform is not None:
            field = transform(field)
        gradients = vmap(field, in_dims=(None, *(0 for _ in batch)), randomness="different")(parameters, *batch)
        return add_clipped(gradients, clip, self.layout, into)

    def example_loss(self, parameters: Parameters, *example: Tensor) -> Tensor:
        args, named, target = self.form.split([part.unsqueeze(0) for part in example])
        return example_losses(self.loss, functional_call(self.model, parameters, args, named), target).sum()


def add_clipped(gradients: Parameters, clip: Clip, layout: Layout, into: Tensor) -> Tensor:
    """Clip materialised per-example gradients (name -> [examples, ...]) and add their sum to `into`."""
    rows = {s.name: gradients[s.name].detach().reshape(-1, prod(s.shape)) for s in layout.segments}
    squares = into.new_zeros(len(next(iter(rows.values()))), layout.groups, dtype=torch.float64)
    for s in layout.segments:
        squares[:, s.group] += torch.linalg.vector_norm(rows[s.name], dim=1, dtype=torch.float64).square()
    norms = usable_norms(squares)
    factors = weights(clip, norms).to(into.dtype)
    broken = ~norms.isfinite().all(dim=1)
    for s in layout.segments:
        row = rows[s.name]
        if broken.any():
            row = torch.where(broken[:, None], 0.0, row)
        into[s.start : s.stop].addmv_(row.t(), factors[:, s.group])
    return norms
