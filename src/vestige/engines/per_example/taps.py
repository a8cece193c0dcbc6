"""How is a model run so that a backward pass leaves every example's gradient in factored form, and no weight's?

For the length of a pass its trainable parameters are proxies (`uses`), and modules that torch runs as one operation are
spelled out (`sequences`). Because a tap saves through autograd, activation checkpointing drops and recomputes what it
saved like anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engines.per_example.expressions import ANCHOR, Environment, Kinds, Pass, Whole, full_precision
from vestige.engines.per_example.gradients import Gradient, combine
from vestige.engines.per_example.recorded_ways import recording, told
from vestige.engines.per_example.sequences import composite_of, registered
from vestige.engines.per_example.uses import Watched
from vestige.layout import Layout

Shapes = tuple[tuple[int, ...], ...]
"""Of inputs, without the axis of examples."""
Holder = tuple[dict[str, Any], str]
"""Where a module keeps a parameter: its dictionary, and the key there."""


class Taps:
    """A model whose uses of trainable parameters can be watched; `kinds` is what a rehearsal found out about them."""

    def __init__(self, model: nn.Module, layout: Layout, kinds: Kinds | None = None) -> None:
        self.model, self.layout, self.kinds = model, layout, dict(kinds or {})
        self.recorded: Kinds | None = self.kinds
        """The same where the model is told that it is recorded; None if it must not be."""
        self.shapes: Shapes | None = None
        """Of the inputs that were rehearsed."""
        self._holders = _holders(model, layout)
        found = ((module, composite_of(module)) for module in model.modules())
        self.ruled = _under_rules(model, layout)
        """Parameters whose gradients a rule of the user's makes: by name, the class that has it."""
        self._spelled = [(vars(module), partial(forward, module)) for module, forward in found if forward is not None]

    def start(
        self,
        examples: int,
        environment: Environment,
        deliver: Callable[[Mapping[str, Gradient]], None],
        shapes: Shapes | None = None,
        views: int = 1,
    ) -> Pass:
        usual = shapes is not None and shapes == self.shapes
        kinds = self.recorded if told() else self.kinds
        now = Pass(examples, environment, self.kinds if kinds is None else kinds, deliver, usual=usual, views=views)
        if kinds is None:
            now.doubt = "the model goes another way where it is told that it is recorded"
        return now

    @contextmanager
    def watching(self, now: Pass) -> Iterator[None]:
        """The model with proxies of the pass's parameters. Open for the forward pass; and for a backward pass that
        recomputes activations."""
        tensors = {name: Watched.of(Whole((name,)), now.environment[name], now) for name in self._holders}
        with self.installed(tensors):
            yield
        now.require_count()

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


@dataclass(frozen=True)
class Sweep:
    """A forward pass at some point, and a backward pass from its outputs times `weight`; each example has so many rows,
    side by side, whose gradients add up."""

    outputs: Callable[[], Tensor]
    environment: Environment
    shapes: Shapes | None = None
    """Of the batch, but for its rows."""
    views: int = 1
    weight: float = 1.0


def gradients(taps: Taps, sweeps: Sequence[Sweep], examples: int) -> dict[str, Gradient]:
    """Each parameter's per-example gradients, added up over the sweeps.

    Raises `Doubt` where a pass was not what the rehearsal said.
    """
    uses: dict[str, list[Gradient]] = {}

    def deliver(found: Mapping[str, Gradient]) -> None:
        for name, gradient in found.items():
            uses.setdefault(name, []).append(gradient)

    for sweep in sweeps:
        now = taps.start(examples, sweep.environment, deliver, sweep.shapes, sweep.views)
        with taps.watching(now), torch.enable_grad():
            outputs = sweep.outputs()
            now.require_count()
            if now.doubt is not None:
                raise Doubt(now.doubt)
            if now.kept_elsewhere and recording():
                raise Doubt("activations are kept elsewhere")
            now.going_back = True
            if outputs.requires_grad:
                seed = torch.full_like(outputs, sweep.weight)
                torch.autograd.grad(outputs, [ANCHOR], seed, allow_unused=True)
    with torch.no_grad(), full_precision(outputs):
        return {name: combine(parts) for name, parts in uses.items()}


def shapes_of(batch: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(part.shape[1:]) for part in batch)


class Doubt(Exception):
    """A pass was not what the rehearsal said it would be."""


def _holders(model: nn.Module, layout: Layout) -> dict[str, list[Holder]]:
    """Every place that holds a parameter of the layout: several, where weights are tied."""
    names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
    holders: dict[str, list[Holder]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in names:
                holders[names[id(parameter)]].append((module._parameters, key))  # type: ignore[arg-type]
    return holders


def _under_rules(model: nn.Module, layout: Layout) -> dict[str, str]:
    names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
    return {
        names[id(parameter)]: type(module).__name__
        for module in model.modules()
        if registered(module)
        for parameter in module.parameters()
        if id(parameter) in names
    }


def eagerly() -> AbstractContextManager[object]:
    """Compiled models run uncompiled here: a compiled graph would run past the uses that are watched."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {0: dynamo})  # who has ever called torch.compile
    compiling = any(backend is not None for backend in backends.values())
    return torch.compiler.set_stance("force_eager") if compiling else nullcontext()


def floating(leaves: Sequence[Any]) -> list[int]:
    """Which leaves are tensors that gradients can come back to."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
