"""How does a private step cost little more than an ordinary one? One backward pass, and norms from what it saved.

The reference engine's answer, by the book-keeping of Bu et al. (arXiv 2210.00038): the backward pass computes the
gradients of activations only. From a layer's input and the gradient of its output follow each example's norm and then,
once the clip has weighed the examples, one weighted sum per parameter. No example's gradient is materialised unless
that is the cheaper way, and a frozen parameter costs nothing.

Whether a model can be watched so is not assumed but rehearsed, once, on made-up examples (`rehearsal`). One that cannot
is left to the reference engine, and that is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from vestige.devices import slack
from vestige.engines.independence import require_independent
from vestige.engines.per_example import kernels
from vestige.engines.per_example.expressions import full_precision
from vestige.engines.per_example.gradients import Gradient, change
from vestige.engines.per_example.taps import Doubt, Sweep, Taps, eagerly, gradients, shapes_of
from vestige.engines.reference import Reference, placed
from vestige.engines.rehearsal.rehearsing import (
    Dependent,
    Rehearsal,
    Rows,
    Unclear,
    Unwatchable,
    WrongRule,
    first_line,
    left_as_found,
    made_up,
    raisings,
    rehearsed,
    single_axes,
)
from vestige.engines.writes import Writes
from vestige.layout import Layout, compiled_in
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform, usable_norms, weights
from vestige.mechanism.losses.criteria import BY_PLACE, Form, example_losses
from vestige.mechanism.transforms import Term, terms_of
from vestige.processes.shards import ShardedSum


class BookKeeping:
    """The fast engine: the signature and, to rounding, the results of `reference.Reference`."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.model, self.loss, self.layout, self.form = model, loss, layout, form
        self.reference = Reference(model, loss, layout, form)
        self._taps: dict[Hashable, Taps | None] = {}
        self._writes, self._changing = Writes(model), frozenset[str]()
        self._doubted = self._said_compiled = False
        """What was said is not said again: a doubt is met at every step, and in every layer."""

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
        with eagerly():
            taps = None if terms is None else self.taps(terms[0].batch, max(term.views for term in terms))
            if taps is None or terms is None:
                return self.reference(batch, parameters, clip, into, transform)
            try:
                found = self._added_up(taps, terms)
            except Doubt as doubt:
                self._require_reference(batch, str(doubt))
                if not self._doubted:
                    warnings.warn(f"{doubt}; such batches are left to the reference engine", stacklevel=2)
                self._doubted = True
                return self.reference(batch, parameters, clip, into, transform)
        return add_weighted(found, clip, self.layout, into, len(batch[0]))

    def taps(self, blank: Batch, views: int = 1) -> Taps | None:
        """How this model is watched in its present mode, rehearsed on made-up examples of the first shapes met; None if
        it cannot be."""
        require_independent(self.model)  # at every step: a mode may have changed, of a frozen batch norm above all
        mode = self.model.training, views > 1, single_axes(blank)
        if mode not in self._taps:
            self._taps[mode] = self._rehearsed(blank, views)
        return self._taps[mode]

    def gradients(self, taps: Taps, batch: Batch, parameters: Parameters, views: int = 1) -> dict[str, Gradient]:
        """SENSITIVE: every parameter's per-example gradients at this point, each the mean over an example's views."""
        return self._added_up(taps, [Term(1.0, parameters, batch, views)])

    def _added_up(self, taps: Taps, terms: Sequence[Term]) -> dict[str, Gradient]:
        before = self._writes.versions()
        found = gradients(taps, [self._sweep(term) for term in terms], len(terms[0].batch[0]) // terms[0].views)
        self._writes.require_unchanged(before, self._changing)
        return found

    def _sweep(self, term: Term) -> Sweep:
        values = {name: value.detach() for name, value in term.point.items()}
        shapes, weight = shapes_of(term.batch), term.weight / term.views
        return Sweep(partial(self._losses, term.batch), values, shapes, term.views, weight)

    def _losses(self, batch: Rows) -> Tensor:
        args, named, targets = self.form.split(batch)
        return example_losses(self.loss, self.model(*args, **named), targets)

    def _rehearsed(self, blank: Batch, views: int) -> Taps | None:
        taps = Taps(self.model, self.layout)
        if compiled_in(self.model) and not self._said_compiled:
            self._said_compiled = True
            warnings.warn(
                "the model is compiled, but private steps run it uncompiled: a compiled graph would run past the uses "
                "that are watched",
                stacklevel=4,
            )
        try:
            found = self._tried(taps, blank, views)
        except (Unwatchable, Unclear) as problem:
            self._require_reference(blank, str(problem))
            warnings.warn(
                f"the model cannot be watched ({problem}): every step is left to the reference engine, which is exact "
                "but slow",
                stacklevel=4,
            )
            return None
        taps.kinds, taps.recorded, taps.shapes = dict(found.kinds), found.recorded, shapes_of(blank)
        self._changing |= found.changing
        return taps

    def _tried(self, taps: Taps, blank: Batch, views: int) -> Rehearsal:
        """A rehearsal with whole numbers that the model takes."""
        problems: list[Exception] = []
        for raised in raisings(blank):
            try:
                made = partial(made_up, blank, device=blank[0].device, raised=raised)
                return rehearsed(taps, self._losses, made, views)
            except (Dependent, Unwatchable, WrongRule):
                raise
            except Exception as problem:
                problems.append(problem)
        if isinstance(problems[0], Unclear):
            raise problems[0]
        raise ValueError(
            f"the model or its loss cannot be run on made-up examples of the data's shapes: {first_line(problems[0])}"
        ) from problems[0]

    def _require_reference(self, blank: Batch, unwatched: str) -> None:
        """What cannot be watched must at least run one example at a time: tried on made-up ones, so that a refusal
        tells nothing of the data."""
        point = {name: p.detach() for name, p in self.layout.parameters(self.model).items()}
        into, problems = blank[0].new_zeros(self.layout.size, dtype=torch.float32), []
        for raised in raisings(blank):
            rows = made_up(blank, 2, 0, blank[0].device, raised)
            try:
                with left_as_found(self.model), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.reference(rows, point, Flat(1.0), into)
                return
            except Exception as problem:
                problems.append(problem)
        alone = first_line(problems[0]).split(". ")[0]
        raise ValueError(
            f"the model cannot be made private: {unwatched}; nor can it be run one example at a time ({alone}). Write "
            "what is named here in another way"
        ) from problems[0]


def add_weighted(
    gradients: Mapping[str, Gradient],
    clip: Clip,
    layout: Layout,
    into: Tensor | ShardedSum,
    examples: int,
    real: Tensor | None = None,
) -> Tensor:
    """Clip gradients in factored form and add their sum to `into`; return the norms, as an `Engine` does.

    `real` says which examples are there; the others count as unusable. It is given by who owns the batch: what the pass
    saved is then changed in place.
    """
    kept, into = into, into if isinstance(into, Tensor) else into.like
    with torch.no_grad(), full_precision(into):
        norms = _norms(gradients, layout, into, examples)
        if real is not None:
            norms = torch.where(real[:, None], norms, torch.inf)
        suspect = ~norms.isfinite().all(dim=1)
        # Zero times infinity is NaN, so what an unusable example saved must be blanked. To look whether there is one
        # would end the capture of a CUDA graph; there every example is blanked or kept, at the price of a copy.
        blank = real is not None or (into.is_cuda and torch.cuda.is_current_stream_capturing())
        if not blank and bool(suspect.any()):
            norms[suspect] = _norms(_selected(gradients, suspect), layout, into, int(suspect.sum()))
            suspect, blank = ~norms.isfinite().all(dim=1), True
        if blank:
            gradients = _blanked(gradients, suspect, in_place=real is not None)
        exact = weights(clip, norms) * slack(into)
        constants, place = layout.distinct_constants
        # One constant or several, the kernels are as many; multiplied before it is rounded.
        scaled = exact * constants[0] if len(constants) == 1 else exact * _scales(constants, into.device)[:, None, None]
        factors = scaled.to(into.dtype).mT.contiguous().view(len(constants), *exact.t().shape)
        for s in layout.segments:
            if s.name in gradients or kept is not into:
                with placed(kept, s) as where:
                    if s.name in gradients:
                        gradients[s.name].add(where, factors[place[s.scale], s.group])
    return norms


def _norms(gradients: Mapping[str, Gradient], layout: Layout, into: Tensor, examples: int) -> Tensor:
    present = [s for s in layout.segments if s.name in gradients]
    if not present:
        return into.new_zeros(examples, layout.groups, dtype=torch.float64)
    unit = torch.finfo(into.dtype).eps
    each = torch.stack([gradients[s.name].norms(unit) for s in present], dim=1)
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


def _selected(gradients: Mapping[str, Gradient], rows: Tensor) -> dict[str, Gradient]:
    """Some examples' gradients, in float64: norms that overflow float32 are still norms."""

    def select(tensor: Tensor) -> Tensor:
        return tensor[rows].double() if tensor.is_floating_point() else tensor[rows]

    return {name: change(gradient, select) for name, gradient in gradients.items()}


def _blanked(gradients: Mapping[str, Gradient], rows: Tensor, in_place: bool) -> dict[str, Gradient]:
    def blank(tensor: Tensor) -> Tensor:
        return kernels.blanked(tensor, rows, in_place)

    return {name: change(gradient, blank) for name, gradient in gradients.items()}
