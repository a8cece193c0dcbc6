"""How is a model run so that a backward pass leaves every example's gradient in factored form, and no weight's?

For the length of a pass its trainable parameters are proxies (`uses`), and modules that torch runs as one operation are
spelled out (`composite_layers`). Because a tap saves through autograd, activation checkpointing drops and recomputes
what it saved like anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import vestige.engines.example_axis.rules  # noqa: F401  (installs the rules)
from vestige.checks import RowsNotApart
from vestige.engines.example_axis.before_dispatch import TrackedFunctions
from vestige.engines.example_axis.labels import Labels, NotApart, Tracker, unseen, unseen_by_functions
from vestige.engines.per_example.composite_layers import composite_of, registered
from vestige.engines.per_example.gradient_forms import Gradient, combine
from vestige.engines.per_example.parameter_expressions import ANCHOR, Environment, Pass, Whole, full_precision
from vestige.engines.per_example.uses import TrackedParameter, UnsupportedUse
from vestige.layout import Layout, modules_of

Holder = tuple[dict[str, Any], str]
"""Where a module keeps a parameter: its dictionary, and the key there."""
Rows = Sequence[Tensor]


class Taps:
    """A model whose uses of trainable parameters can be watched."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout
        names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
        self._holders: dict[str, list[Holder]] = {name: [] for name in names.values()}
        """Every place that holds a parameter of the layout: several, where weights are tied."""
        self.ruled: dict[str, str] = {}
        """Parameters whose gradients a rule of the user's makes: by name, the class that has it."""
        self._spelled: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if id(parameter) in names:
                    self._holders[names[id(parameter)]].append((module._parameters, key))
            if registered(module):
                own = (names.get(id(parameter)) for parameter in module.parameters())
                self.ruled |= {name: type(module).__name__ for name in own if name is not None}
            forward = composite_of(module)
            if forward is not None:
                self._spelled.append((vars(module), partial(forward, module)))

    @contextmanager
    def watching(self, now: Pass) -> Iterator[None]:
        """The model with proxies of the pass's parameters. Open for the forward pass; and for a backward pass that
        recomputes activations."""
        with unseen():
            tensors = {
                name: TrackedParameter.of(Whole(name, now.environment[name].detach()), now) for name in self._holders
            }
        with self.installed(tensors):
            yield

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with these tensors in place of its trainable parameters."""
        places = [(*place, tensor) for name, tensor in tensors.items() for place in self._holders[name]]
        before = [(holder, key, holder[key]) for holder, key, _ in places]
        forwards = [(attributes, attributes.get("forward")) for attributes, _ in self._spelled]
        try:
            for holder, key, tensor in places:
                holder[key] = tensor
            for attributes, forward in self._spelled:
                attributes["forward"] = forward
            with eagerly():
                yield
        finally:
            for holder, key, parameter in before:
                holder[key] = parameter
            for attributes, own in forwards:
                if own is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = own


class Proved:
    """Runs a model and its losses with every operator followed, and takes each example's gradients.

    Formal guarantees: what is returned for an example is a function of that example, of public values and of random
    draws; otherwise `NotApart` or `UnsupportedUse` is raised, whatever the examples are.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.taps, self.labels = model, Taps(model, layout), Labels()
        self.tracker = Tracker(self.labels)
        self._functions = TrackedFunctions(self.tracker, inside=True)
        self._batches = 0
        """Labels of earlier batches stay: what a model keeps of them is not this batch's own."""

    def gradients(
        self,
        losses: Callable[[Rows, Tracker], Tensor],
        rows: Rows,
        environment: Environment,
        views: int,
        weight: float | Tensor,
    ) -> dict[str, list[Gradient]]:
        """The gradients of `weight` times each example's losses, which has `views` rows side by side; or of each row's
        own weight."""
        try:
            return self._gradients(losses, rows, environment, views, weight, promoting=True)
        except (NotApart, UnsupportedUse, TypeError):
            if not self.tracker.promoted:
                raise
        return self._gradients(losses, rows, environment, views, weight, promoting=False)

    def _gradients(
        self,
        losses: Callable[[Rows, Tracker], Tensor],
        rows: Rows,
        environment: Environment,
        views: int,
        weight: float | Tensor,
        promoting: bool,
    ) -> dict[str, list[Gradient]]:
        found: dict[str, list[Gradient]] = {}

        def deliver(uses: Mapping[str, Gradient]) -> None:
            for name, gradient in uses.items():
                found.setdefault(name, []).append(gradient)

        self._batches += 1
        tracker, examples = self.tracker, len(rows[0]) // views
        rows = [part.clone() if part.untyped_storage().nbytes() != part.nbytes else part for part in rows]
        for part in rows:
            tracker.label_rows(part, examples, self._batches, views)
        tracker.expected, tracker.promoted = (examples, self._batches) if promoting else None, 0
        now = Pass(examples, environment, tracker, deliver)
        try:
            with self.taps.watching(now), torch.enable_grad(), tracker, self._functions:
                outputs = losses(rows, tracker)
                label = tracker.rows(outputs)
                if label is not None and (label.axis, label.inner, label.first) != (0, views, 0):
                    raise NotApart("the losses are not in the order of the examples")
                require_unwritten(self.model, tracker, environment)
                if outputs.requires_grad:
                    seed = torch.full_like(outputs, 1.0 if isinstance(weight, Tensor) else weight)
                    seed = seed * weight if isinstance(weight, Tensor) else seed
                    torch.autograd.grad(outputs, [ANCHOR], seed, allow_unused=True)
                    now.settle()
                require_unwritten(self.model, tracker, environment)
        finally:
            self.labels.prune()
        return found


def require_unwritten(model: nn.Module, tracker: Tracker, environment: Environment) -> None:
    """Raise ValueError if a pass has left something of its examples in a parameter or buffer, or in what a module adds
    to the model's state by `get_extra_state`."""
    modules = modules_of(model)
    held = [tensor for module in modules for tensor in (*module._buffers.values(), *module._parameters.values())]
    written = tracker.labels.among([*held, *environment.values()], {})
    if not written:
        for module in modules:
            if type(module).get_extra_state is nn.Module.get_extra_state:
                continue
            with unseen_by_functions():
                held_too = any(map(tracker.labels.holds, tree_leaves(module.get_extra_state())))
            if held_too:
                raise RowsNotApart(
                    f"get_extra_state of a {type(module).__name__} gives something of the examples, without noise: it "
                    "would be saved with the model. Leave it out"
                )
        return
    found = [("buffer", *each) for each in model.named_buffers()]
    found += [("parameter", *each) for each in (*model.named_parameters(), *environment.items())]
    kind, name = next((kind, name) for kind, name, tensor in found if tensor is written[0][0])
    raise RowsNotApart(
        f"{kind} {name!r} was changed by the forward pass: it holds something of the examples without noise "
        "(as max_norm of an embedding does). Keep it out of the model, or do not change it while training"
    )


def gradients(each: Sequence[dict[str, list[Gradient]]], like: Tensor) -> dict[str, Gradient]:
    """Each parameter's per-example gradients, added up over several passes."""
    uses: dict[str, list[Gradient]] = {}
    for found in each:
        for name, parts in found.items():
            uses.setdefault(name, []).extend(parts)
    with torch.no_grad(), full_precision(like):
        return {name: combine(parts) for name, parts in uses.items()}


def eagerly() -> AbstractContextManager[object]:
    """Per-example gradients need eager mode; torch.compile is ignored."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {0: dynamo})  # who has ever called torch.compile
    compiling = any(backend is not None for backend in backends.values())
    return torch.compiler.set_stance("force_eager") if compiling else nullcontext()


def floating(leaves: Sequence[Any]) -> list[int]:
    """Which leaves are tensors that gradients can come back to."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
