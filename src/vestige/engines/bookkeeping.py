"""How does a private step cost little more than an ordinary one? One backward pass, and norms from what it saved.

The reference engine's answer, by the book-keeping of Bu et al. (arXiv 2210.00038): the backward pass computes the
gradients of activations only. From a layer's input and the gradient of its output follow each example's norm and then,
once the clip has weighed the examples, one weighted sum per parameter. No example's gradient is materialised unless
that is the cheaper way, and a frozen parameter costs nothing.

That examples stay apart is proved at every pass, operator by operator (`example_axis`). A model that cannot be proved
is left to the reference engine, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from vestige.checks import RowsNotApart
from vestige.engines.example_axis.labels import NotApart, Rows, Tracker
from vestige.engines.example_axis.tracked_model import Proved, eagerly, gradients
from vestige.engines.independence import require_independent
from vestige.engines.per_example import kernels
from vestige.engines.per_example.execution import full_precision
from vestige.engines.per_example.gradient_forms import Gradient, change
from vestige.engines.per_example.sums_of_users import RowsOfUsers, UserRows, summable
from vestige.engines.reference import Reference, placed
from vestige.layout import Layout, Segment, compiled_in
from vestige.mechanism.clipping import Batch, Clip, Loss, Parameters, Transform, usable_norms, weights
from vestige.mechanism.gradient_transforms import Term, UnequalMean, terms_of
from vestige.mechanism.losses.criteria import (
    BY_PLACE,
    Form,
    NotByExample,
    Targets,
    counts_targets,
    example_losses,
    has_rows,
    of_torch,
    scored,
)
from vestige.processes.parameter_shards import ShardedSum
from vestige.tf32 import slack


class BookKeeping:
    """The fast engine: the signature and, to rounding, the results of `reference.Reference`."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.model, self.loss, self.layout, self.form = model, loss, layout, form
        self.proved = Proved(model, layout)
        self.labels = self.proved.labels
        self.reference = Reference(model, loss, layout, form, self.labels)
        self._left: set[str] = set()
        """Reasons for leaving a step to the reference engine; each is warned of once."""
        self._said_compiled = self._settled = False

    @property
    def reads(self) -> set[str]:
        """Where the model or the loss looks at values of an example, which then runs alone."""
        return self.reference.reads

    def settle(self) -> None:
        """Made-up rows have shown what the program does: what is met from now on is a row's doing, and no message says
        so. A row of which values are read only now is refused: what Python keeps of it could reach others."""
        self._settled = self.reference.settled = True

    def __call__(
        self,
        batch: Batch,
        parameters: Parameters,
        clip: Clip,
        into: Tensor | ShardedSum,
        transform: Transform | None = None,
        terms: Sequence[Term] | None = None,
    ) -> Tensor:
        """As any engine; `terms` are those of the transform, where they are drawn already."""
        if terms is None and len(batch[0]):
            terms = terms_of(transform, parameters, batch)
        if terms is None:
            return self.reference(batch, parameters, clip, into, transform)
        users = self.users_of(terms[0])
        examples, alone = len(batch[0]) if users is None else len(users.counts), len(batch[0]) == 1
        if alone:  # beside itself, with weight zero: an axis of one entry cannot be distinguished from others
            terms = [replace(term, batch=tuple(torch.cat([part, part]) for part in term.batch)) for term in terms]
        require_independent(self.model)  # at every step: a mode may have changed, of a frozen batch norm above all
        self.say_compiled()
        found = self._proved(terms)
        if found is None:
            if isinstance(transform, UnequalMean):
                parts = transform.alike(batch)
                return torch.cat([self(part, parameters, clip, into, mean) for part, mean in parts])
            with eagerly():
                return self.reference(batch, parameters, clip, into, transform)
        if alone:
            found = {name: change(gradient, itemgetter(slice(1))) for name, gradient in found.items()}
        return add_weighted(found, clip, self.layout, into, examples, users=users)

    def _proved(self, terms: Sequence[Term]) -> dict[str, Gradient] | None:
        """Every parameter's per-example gradients; None where it cannot be proved that they are each example's own."""
        with eagerly():
            try:
                return gradients([self.gradients_of(term) for term in terms], terms[0].batch[0])
            except NotApart as problem:
                if not (problem.unknown or self._settled):
                    raise RowsNotApart(
                        f"the model or its loss mixes the examples of a batch: {problem}. No example's influence can "
                        "be bounded: compute it of each example by itself"
                    ) from None
                self._say_left(str(problem))
            finally:
                self.labels.let_go(self.proved.tracker)
        return None

    def users_of(self, term: Term) -> UserRows | None:
        """Which rows add up where examples have unequal numbers of them."""
        return None if term.counts is None else UserRows(term.counts, len(term.batch[0]), term.views, equal=False)

    def gradients_of(self, term: Term) -> dict[str, list[Gradient]]:
        """SENSITIVE: every parameter's per-example gradients at a point, each the mean over an example's views."""
        values = {name: value.detach() for name, value in term.point.items()}
        users = self.users_of(term)
        if users is not None:
            weights = users.of_rows(term.weight / users.counts.clamp(min=1), 0.0)
            return self.proved.gradients(self._losses, term.batch, values, 1, weights)
        return self.proved.gradients(self._losses, term.batch, values, term.views, term.weight / term.views)

    def _losses(self, batch: Sequence[Tensor], tracker: Tracker) -> Tensor:
        """Each example's own: by the rules, where the loss is made of torch's own, or taken apart."""
        args, named, targets = self.form.split(batch)
        outputs = self.model(*args, **named)
        tracker.reduced = False  # what is a number to the model has a row for each example here
        label = tracker.labels.get(batch[0])
        if of_torch(self.loss) and not counts_targets(self.loss) and isinstance(label, Rows) and label.inner == 1:
            found = self._rowwise(outputs, targets)
            tracker.reduced = False
            if isinstance(found, Tensor) and found.dim() == 1 and isinstance(tracker.labels.get(found), Rows):
                return found
        outputs = tree_map(partial(_by_example, len(batch[0])), outputs)
        leaves = tree_leaves(outputs)
        if not any(map(has_rows, leaves)):
            for leaf in leaves:
                if isinstance(leaf, NotByExample):
                    raise leaf.problem
        return example_losses(self.loss, outputs, targets)

    def _rowwise(self, outputs: Any, targets: Targets) -> Any:
        """What the loss makes of the whole batch, where reductions are taken of each example; None if it cannot be
        called so, as a loss that expects one number."""
        try:
            if isinstance(targets, tuple):
                return self.loss(outputs, *targets)
            return self.loss(scored(self.loss, outputs, targets), targets)
        except (NotApart, RuntimeError, ValueError, TypeError, IndexError):
            return None

    def say_compiled(self) -> None:
        if compiled_in(self.model) and not self._said_compiled:
            self._said_compiled = True
            warnings.warn("per-example gradients need eager mode: torch.compile is ignored", stacklevel=4)

    def _say_left(self, problem: str) -> None:
        if problem not in self._left and not self._settled:
            self._left.add(problem)
            warnings.warn(
                f"examples cannot be proved to stay apart ({problem}): such steps are left to the reference engine, "
                "which runs them one by one, exact but slow",
                stacklevel=4,
            )


def add_weighted(
    gradients: Mapping[str, Gradient],
    clip: Clip,
    layout: Layout,
    into: Tensor | ShardedSum,
    examples: int,
    real: Tensor | None = None,
    users: UserRows | None = None,
) -> Tensor:
    """Clip gradients in factored form and add their sum to `into`; return the norms, as an `Engine` does.

    `real` says which examples are there; the others count as unusable. It is given by who owns the batch: what the pass
    saved is then changed in place. Where the gradients are those of rows of `users`, an example is a user.
    """
    kept, into = into, into if isinstance(into, Tensor) else into.like
    with torch.no_grad(), full_precision(into):
        if users is not None:
            gradients = {name: users.summed(summable(gradient)) for name, gradient in gradients.items()}
        norms = _norms(gradients, layout, into, examples)
        if real is not None:
            norms = torch.where(real[:, None], norms, torch.inf)
        suspect = ~norms.isfinite().all(dim=1)
        # Zero times infinity is NaN, so what an unusable example saved must be blanked. To look whether there is one
        # would end the capture of a CUDA graph; there every example is blanked or kept, at the price of a copy.
        blank = real is not None or (into.is_cuda and torch.cuda.is_current_stream_capturing())
        wide: dict[str, Gradient] = {}
        if not blank and bool(suspect.any()):
            wide, blank = _selected(gradients, suspect), True
            norms[suspect] = _norms(wide, layout, into, int(suspect.sum()))
            unusable = ~norms[suspect].isfinite().all(dim=1)
            rows = unusable if users is None else users.among(suspect).of_rows(unusable, True)
            wide = _blanked(wide, unusable, rows, in_place=False)
        if blank:
            unusable = suspect if users is None else users.of_rows(suspect, True)
            gradients = _blanked(gradients, suspect, unusable, in_place=real is not None)
        exact = weights(clip, norms) * slack(into)
        constants, place = layout.distinct_constants
        # One constant or several, the kernels are as many; multiplied before it is rounded.
        scaled = exact * constants[0] if len(constants) == 1 else exact * _scales(constants, into.device)[:, None, None]
        whole = scaled.mT.contiguous().view(len(constants), *exact.t().shape)
        added = [(gradients, *_factors(whole.to(into.dtype), users))]
        if wide:  # in float32 a factor times the smaller numbers of an example with a huge one would underflow
            added.append((wide, *_factors(whole[..., suspect], None if users is None else users.among(suspect))))
        for s in layout.segments:
            with placed(kept, s) as where:
                _add(added, s, place[s.scale], where)
    return norms


def _by_example(examples: int, output: Any) -> Any:
    """An output as a loss is given it that is called for each example."""
    if not isinstance(output, Tensor) or (output.dim() and len(output) == examples):
        return output
    shape = tuple(output.shape)
    return NotByExample.of(
        NotApart(f"the model gives a tensor of shape {shape}, not a row for each example", unknown=True)
    )


def _factors(of_examples: Tensor, users: UserRows | None) -> tuple[Tensor, Tensor]:
    """Factors [constants, groups, examples] of examples, and of the rows of those that are users."""
    return of_examples, of_examples if users is None else users.of_rows(of_examples, 0.0)


def _add(
    added: Sequence[tuple[Mapping[str, Gradient], Tensor, Tensor]], segment: Segment, scale: int, into: Tensor
) -> None:
    """Add a parameter's gradients, weighted by their factors: those in float64 by themselves, before they are
    rounded."""
    for found_by_name, of_examples, of_rows in added:
        found = found_by_name.get(segment.name)
        if found is None:
            continue
        share = (of_rows if isinstance(found, RowsOfUsers) else of_examples)[scale, segment.group]
        if share.dtype == into.dtype:
            found.add(into, share)
        else:
            alone = into.new_zeros(into.shape, dtype=share.dtype)
            found.add(alone, share)
            into.add_(alone)


def _norms(gradients: Mapping[str, Gradient], layout: Layout, into: Tensor, examples: int) -> Tensor:
    present = [s for s in layout.segments if s.name in gradients]
    if not present:
        return into.new_zeros(examples, layout.groups, dtype=torch.float64)
    unit = torch.finfo(into.dtype).eps
    found = [gradients[s.name] for s in present]
    each = torch.stack([gradient.norms(unit) for gradient in found], dim=1)
    # The constants are in float64, so that the product is: one kernel, balanced or not.
    scales = None if layout.constants is None else _scales(tuple(s.scale for s in present), into.device)
    squares = (each.double() if scales is None else each * scales).square()
    if layout.groups == 1:
        return usable_norms(squares.sum(dim=1, keepdim=True))
    return usable_norms(squares @ _membership(tuple(s.group for s in present), layout.groups, into.device))


@lru_cache(maxsize=64)
def _scales(scales: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(scales, dtype=torch.float64, device=device)


@lru_cache(maxsize=64)
def _membership(owners: tuple[int, ...], groups: int, device: torch.device) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(owners, device=device), groups).double()


def _selected(gradients: Mapping[str, Gradient], examples: Tensor) -> dict[str, Gradient]:
    """Some examples' gradients, in float64: norms that overflow float32 are still norms."""

    def select(tensor: Tensor, rows: Tensor = examples) -> Tensor:
        return tensor[rows].double() if tensor.is_floating_point() else tensor[rows]

    found: dict[str, Gradient] = {}
    for name, gradient in gradients.items():
        if isinstance(gradient, RowsOfUsers):
            rows = gradient.users.of_rows(examples, False)
            few = change(gradient.of, partial(select, rows=rows))
            found[name] = RowsOfUsers(few, gradient.users.among(examples))
        else:
            found[name] = change(gradient, select)
    return found


def _blanked(gradients: Mapping[str, Gradient], examples: Tensor, rows: Tensor, in_place: bool) -> dict[str, Gradient]:
    """Without these examples, which are these rows."""

    def blank(tensor: Tensor, those: Tensor = examples) -> Tensor:
        return kernels.blanked(tensor, those, in_place)

    return {
        name: RowsOfUsers(change(gradient.of, partial(blank, those=rows)), gradient.users)
        if isinstance(gradient, RowsOfUsers)
        else change(gradient, blank)
        for name, gradient in gradients.items()
    }
