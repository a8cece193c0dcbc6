"""Can this model be taken apart, and how? Tried out on three examples before anything depends on it.

A plan rests on three assumptions, and each is tested rather than trusted: every watched module has each example on rows
of its own, no example's loss depends on another's rows, and no parameter is used where nobody watches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vestige.engines.taps import Misfit, Notes, Pass, Site, Sketch, TapPlan, sites_of
from vestige.layout import Layout
from vestige.mechanism.clipping import Loss, Parameters


class Mixed(Exception):
    """One example's loss depends on another example."""


class Unclear(Exception):
    """These examples do not tell: their losses are not finite."""


def rehearsed(
    model: nn.Module, loss: Loss, layout: Layout, examples: Sequence[Tensor], parameters: Parameters
) -> TapPlan | None:
    """A plan that held on these three examples, or None where only the reference engine will do; raises `Unclear`."""
    sites = list(sites_of(model, layout))
    sketch, reason = _first_sketch(sites, parameters), "its calls keep changing"
    for _ in range(10 + 3 * len(sites)):  # every round but the last gives something up
        plan = TapPlan(model, loss, layout, sketch)
        try:
            devices = sorted({p.device.index for p in parameters.values() if p.is_cuda})
            # A resumed run rehearses again: that must not draw from anybody's random numbers.
            with torch.enable_grad(), torch.random.fork_rng(devices):
                revised = _revised(plan, examples, parameters)
        except Unclear:
            raise
        except Misfit as misfit:
            revised = _without(sketch, sites, {misfit.site})
        except Exception as problem:
            revised, reason = _cautious(sketch, sites), str(problem)
            if revised == sketch:
                break
        else:
            if revised == sketch:
                _say(plan)
                return plan
        sketch = revised
    warnings.warn(
        f"the model cannot be taken apart into examples ({reason}): every step is left to the reference engine, which "
        "is exact but slow",
        stacklevel=4,
    )
    return None


def _first_sketch(sites: Sequence[Site], parameters: Parameters) -> Sketch:
    """Hope for the best of parameters that look as if they were broadcast over the examples."""
    loose = [name for site in sites if _custom(site) for name in site.owned.values()]
    broadcast = {name for name in loose if parameters[name].dim() > 1 and len(parameters[name]) == 1}
    return _rooted(Sketch(expanded=frozenset(broadcast)), sites)


def _rooted(sketch: Sketch, sites: Sequence[Site]) -> Sketch:
    """To replay the outermost module is to run the whole model."""
    root = {name for site in sites if _custom(site) and not site.name for name in site.owned.values()}
    return replace(sketch, whole=sketch.whole | (root - sketch.expanded))


def _cautious(sketch: Sketch, sites: Sequence[Site]) -> Sketch:
    """The same without its latest hope."""
    if sketch.shared:
        return _without(sketch, sites, sketch.shared)
    return _rooted(replace(sketch, expanded=frozenset()), sites)


def _without(sketch: Sketch, sites: Sequence[Site], names: set[str] | frozenset[str]) -> Sketch:
    given_up = {name for site in sites if site.name in names for name in site.owned.values()} - sketch.expanded
    changed = replace(sketch, shared=sketch.shared - set(names), whole=sketch.whole | given_up)
    return _rooted(changed, sites)


def _custom(site: Site) -> bool:
    return site.layer is None and site.composite is None


def _revised(plan: TapPlan, examples: Sequence[Tensor], parameters: Parameters) -> Sketch:
    """The plan's sketch, corrected by the first thing that turns out otherwise; unchanged if nothing does."""
    two = _observed(plan, [part[:2] for part in examples], parameters)
    three = _observed(plan, examples, parameters)
    again = _observed(plan, examples, parameters)
    if not bool(three.losses.isfinite().all()):
        raise Unclear
    steady = torch.equal(three.losses, again.losses)  # no dropout
    if steady and not torch.allclose(three.losses[:2], two.losses, rtol=0.05, atol=1e-4):
        raise Mixed("an example's loss changes with the examples beside it")
    sketch = _by_rows(plan, two.notes, three.notes)
    if sketch == plan.sketch:
        sketch = _by_gradients(plan, examples, parameters)
    if sketch == plan.sketch:
        plan.called = frozenset(three.notes.outputs)
        plan.gradients(examples, parameters)  # as it will be run; whatever this raises is a finding, too
    return sketch


@dataclass
class Observed:
    """A forward pass with notes, and what its backward may be asked about."""

    losses: Tensor
    notes: Notes
    leaves: Parameters
    expanded: Parameters
    inputs: list[Tensor]


def _observed(plan: TapPlan, examples: Sequence[Tensor], parameters: Parameters) -> Observed:
    with _observing(plan, examples, parameters) as observed:
        return observed


@contextmanager
def _observing(plan: TapPlan, examples: Sequence[Tensor], parameters: Parameters) -> Iterator[Observed]:
    plan.now = Pass(len(examples[0]), parameters, Notes())
    assert plan.now.notes is not None
    expanded = plan.expanded(parameters, len(examples[0]))
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items() if name not in expanded}
    inputs = [part.detach().requires_grad_() if part.is_floating_point() else part for part in examples[:-1]]
    try:
        with plan.installed({**leaves, **expanded}):
            losses = plan.losses([*(part.clone() for part in inputs), examples[-1]])
            floating = [part for part in inputs if part.requires_grad]
            yield Observed(losses, plan.now.notes, leaves, expanded, floating)
    finally:
        plan.now = Pass()


Calls = Sequence[tuple[int, ...]]


def _by_rows(plan: TapPlan, two: Notes, three: Notes) -> Sketch:
    """Rows that grow with the batch are examples; rows that do not are shared by all of them."""
    sketch = plan.sketch
    for site in plan.sites:
        outputs = _growth(two.outputs.get(site.name, ()), three.outputs.get(site.name, ()))
        inputs = set(_growth(two.inputs.get(site.name, ()), three.inputs.get(site.name, ())))
        kinds = {kind for call in outputs for kind in call}
        if kinds == {False} and site.layer is not None:
            sketch = replace(sketch, shared=sketch.shared | {site.name})
        elif not kinds <= {True} or len(inputs) > 1 or any(None in call for call in inputs):
            sketch = _without(sketch, plan.sites, {site.name})
        elif inputs:
            flags = tuple(kind is True for kind in next(iter(inputs)))
            sketch = replace(sketch, batched={**sketch.batched, site.name: flags})
    return sketch


def _growth(two: Calls, three: Calls) -> list[tuple[bool | None, ...]]:
    """Per call and tensor: do its rows grow with the batch? None where they do something else."""
    if [len(call) for call in two] != [len(call) for call in three]:
        return [(None,)]
    pairs = [zip(*calls, strict=True) for calls in zip(two, three, strict=True)]
    return [tuple(False if a == b else True if 3 * a == 2 * b else None for a, b in call) for call in pairs]


def _by_gradients(plan: TapPlan, examples: Sequence[Tensor], parameters: Parameters) -> Sketch:
    """The middle example's loss may reach its own rows and no others, and no parameter where nobody watches."""
    with _observing(plan, examples, parameters) as seen:
        if not seen.losses.requires_grad:
            return plan.sketch
        roots = [plan.anchor, *seen.expanded.values(), *seen.inputs]
        _, *reached = torch.autograd.grad(seen.losses[1], roots, retain_graph=True, allow_unused=True)
        leaking = {name for name, signal in seen.notes.signals if _leaks(signal)}
        names = list(seen.expanded)
        spread = {name for name, rows in zip(names, reached[: len(names)], strict=True) if _leaks(rows)}
        if any(_leaks(rows) for rows in reached[len(names) :]):
            raise Mixed("an example's loss depends on another example's input")
        leaves = list(seen.leaves.values())
        loose = torch.autograd.grad(seen.losses.sum(), leaves, allow_unused=True) if leaves else ()
    if leaking - plan.sketch.shared and not spread:
        raise Mixed(f"in module {min(leaking - plan.sketch.shared)!r} an example's loss depends on another's rows")
    unseen = {name for name, reached in zip(seen.leaves, loose, strict=True) if reached is not None}
    sketch = replace(plan.sketch, expanded=plan.sketch.expanded - spread, whole=plan.sketch.whole | unseen)
    return _without(sketch, plan.sites, leaking & plan.sketch.shared)


def _leaks(rows: Tensor | None) -> bool:
    return rows is not None and bool(rows.detach().unflatten(0, (3, -1))[[0, 2]].count_nonzero())


def _compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _say(plan: TapPlan) -> None:
    if any(_compiled(module) for module in plan.model.modules()):
        warnings.warn(
            "the model is compiled, but private steps run it uncompiled: a compiled graph would run past the layers "
            "that are watched",
            stacklevel=5,
        )
    for site in plan.sites:
        if _custom(site):
            warnings.warn(
                f"module {site.name!r} ({type(site.module).__name__}) has no rule of its own: per-example gradients of "
                f"{', '.join(site.owned)} come from replaying it one example at a time",
                stacklevel=5,
            )
    if plan.sketch.whole:
        warnings.warn(
            f"per-example gradients of {', '.join(sorted(plan.sketch.whole))} come from the reference engine, which "
            "runs the whole model again: they are used outside the module that holds them, or by one that cannot be",
            stacklevel=5,
        )
