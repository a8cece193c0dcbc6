"""How does a candidate compare with the model it would replace? A bounded loss difference on one fresh sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vestige.layout import call_with
from vestige.mechanism.clipping import Loss, Parameters
from vestige.mechanism.losses.criteria import BY_PLACE, Form, example_losses
from vestige.priced_questions import SampledGaussian

Scores = Callable[[Sequence[Tensor], Parameters], Tensor]
"""One number per example of a batch, at given parameters."""


@dataclass(frozen=True)
class LossDifference:
    """The change of the mean loss over a Poisson sample, clipped to [-bound, bound].

    With `each` unset, the mean over the sampled examples is clipped: one outlier can carry it from one end to the
    other. With `each`, every example's difference is clipped to [-each, each] first and the sum is divided by the
    constant `expected_batch`, so one example moves it less.

    Formal guarantees: with noise of standard deviation `multiplier * sensitivity`, one Poisson-subsampled Gaussian
    mechanism with this rate and multiplier.
    """

    rate: float
    multiplier: float
    bound: float
    expected_batch: float
    each: float | None = None

    @property
    def sensitivity(self) -> float:
        across = 2 * self.bound
        return across if self.each is None else min(across, self.each / self.expected_batch)

    @property
    def noise_std(self) -> float:
        return self.multiplier * self.sensitivity

    @property
    def question(self) -> SampledGaussian:
        return SampledGaussian(self.rate, self.multiplier)

    def of(self, before: Tensor, after: Tensor) -> float:
        """SENSITIVE: the bounded change between two vectors of losses of the same examples; 0 for an empty sample.

        A loss that is not finite leaves the change undefined; it then counts as the worst one, +bound.
        """
        return self.within(*(float(each) for each in self.sums(before, after)))

    def sums(self, before: Tensor, after: Tensor) -> Tensor:
        """SENSITIVE: what the bounded change is made of, for the given examples: sums of it over parts of a sample
        are those of the sample."""
        before, after = before.double(), after.double()
        if self.each is None:
            parts = [after.sum(), before.sum(), torch.tensor(float(len(before)), dtype=torch.float64)]
        else:
            worst = self.each
            changes = (after - before).nan_to_num(nan=worst, posinf=worst, neginf=-worst)
            parts = [changes.clamp(-worst, worst).sum()]
        return torch.stack([part.to(before.device) for part in parts])

    def within(self, *sums: float) -> float:
        """SENSITIVE: the bounded change, from the sums over the sample."""
        if self.each is None:
            after, before, count = sums
            change = after / count - before / count if count else 0.0
        else:
            change = sums[0] / self.expected_batch
        return min(self.bound, max(-self.bound, change)) if change == change else self.bound


def losses_of(model: nn.Module, loss: Loss, form: Form = BY_PLACE) -> Scores:
    """The loss of each example, as a function of the batch and the parameters."""

    @torch.no_grad()
    def losses(batch: Sequence[Tensor], parameters: Parameters) -> Tensor:
        args, named, targets = form.split(batch)
        with _evaluating(model):
            return example_losses(loss, call_with(model, parameters, args, named), targets)

    return losses


def right_answers(model: nn.Module, form: Form = BY_PLACE) -> Scores:
    """1 where a classifier is correct, 0 where not."""

    @torch.no_grad()
    def right(batch: Sequence[Tensor], parameters: Parameters) -> Tensor:
        args, named, targets = form.split(batch)
        with _evaluating(model):
            outputs = call_with(model, parameters, args, named)
            right = targets[0] if isinstance(targets, tuple) else targets
            return (getattr(outputs, "logits", outputs).argmax(-1) == right).double()

    return right


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and the like: two models are compared, not two draws of their masks."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
