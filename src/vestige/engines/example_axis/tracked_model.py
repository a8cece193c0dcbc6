"""How do the gradients of examples reach their parameters? A stand-in for each parameter hands over what comes back.

That is a sum over the examples, of which each one's part is known (`sums`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import vestige.engines.example_axis.rules  # noqa: F401  (installs the rules)
from vestige.checks import ExampleKept, RowsNotApart
from vestige.engines.example_axis.before_dispatch import TrackedFunctions
from vestige.engines.example_axis.composite_layers import composite_of
from vestige.engines.example_axis.labels import Labels, Mixed, NotApart, Rows, SumCell, Summed, Tracker
from vestige.engines.example_axis.linear_operators import uses_of
from vestige.engines.example_axis.sums import own_rows
from vestige.engines.per_example.execution import full_precision, unseen, unseen_by_functions
from vestige.engines.per_example.filter_maps import FilterMap
from vestige.engines.per_example.gradient_forms import Dense, Gradient, change, combine
from vestige.layout import Layout, device_of, modules_of

Environment = Mapping[str, Tensor]
"""The parameters' values by name."""
Holder = tuple[dict[str, Any], str]
"""Where a module keeps a parameter: its dictionary, and the key there."""
Deliver = Callable[[str, Sequence[Gradient]], None]
"""Takes the gradients of a parameter by its name, all of which add up."""
Batch = Sequence[Tensor]
EVERYWHERE = (0, inf)
"""All nodes of autograd's graph."""
ANCHOR = torch.zeros((), requires_grad=True)
"""It requires a gradient and never gets one: it makes what is computed from parameters part of autograd's graph."""


class OldestNode:
    """A node of autograd's graph that is older than those of any pass on its device. A backward pass that fails leaves
    what it had not come to in the device's queue, with the activations that belong to it, until a later pass has taken
    it out: the newest nodes first."""

    of: ClassVar[dict[torch.device, OldestNode]] = {}

    def __init__(self, device: torch.device) -> None:
        with unseen(), torch.enable_grad(), torch.inference_mode(False):
            self._leaf = torch.zeros((), device=device, requires_grad=True)
            self._node = self._leaf.clone()

    @classmethod
    def require(cls, device: torch.device) -> None:
        if device not in cls.of:
            cls.of[device] = cls(device)

    @classmethod
    def empty_queues(cls) -> None:
        with unseen():
            for each in cls.of.values():
                torch.autograd.grad(each._node, each._leaf, retain_graph=True)


class ParameterUse(torch.autograd.Function):
    """A parameter inside a pass. What comes back to it is handed to `arrived`, and goes no further."""

    @staticmethod
    def forward(ctx: Any, arrived: Callable[[Tensor], None], anchor: Tensor, value: Tensor) -> Tensor:
        ctx.arrived = arrived
        return value.detach()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.arrived(signal)
        return None, None, None


class TrackedModel:
    """A model whose trainable parameters can be told apart in a backward pass."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.in_forward = False
        """Whether a forward pass is running: gradients that are taken inside it are not those of the losses."""
        names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
        self._holders: dict[str, list[Holder]] = {name: [] for name in names.values()}
        """Every place that holds a parameter of the layout: several, where weights are tied."""
        self.spelled: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if id(parameter) in names:
                    self._holders[names[id(parameter)]].append((module._parameters, key))
            forward = composite_of(module)
            if forward is not None:
                self.spelled.append((vars(module), partial(forward, module)))

    @contextmanager
    def tracked(self, tracker: Tracker, environment: Environment, batch: int, deliver: Deliver) -> Iterator[None]:
        """The model with parameters of this environment, whose gradients are delivered; for the forward pass on the
        batch of this number."""
        tensors = {}
        with unseen(), torch.enable_grad():
            for name in self._holders:
                value = environment[name].detach()
                arrived = partial(self._arrived, tracker, batch, deliver, name)
                tensors[name] = ParameterUse.apply(arrived, ANCHOR, value)
        self.in_forward = True
        try:
            with self.installed(tensors):
                yield
        finally:
            self.in_forward = False

    def _arrived(self, tracker: Tracker, batch: int, deliver: Deliver, name: str, signal: Tensor) -> None:
        """The gradient of a parameter, as a sum over the examples. Raises `NotApart`."""
        if self.in_forward:
            raise NotApart("the model takes gradients inside its forward pass", unknown=True)
        label = tracker.labels.get(signal)
        about = label.cell if isinstance(label, Summed) else label
        if isinstance(about, Rows | SumCell) and about.batch != batch:
            raise NotApart(f"the gradient of {name!r} is about rows of another batch")
        if isinstance(label, Rows):
            with unseen():
                deliver(name, own_rows(label, signal))
            return
        if isinstance(label, Mixed):
            raise NotApart(f"the gradient of {name!r} is not one example's: {label}", label.unknown)
        if label is None:
            if not tracker.labels.zero(signal):
                raise NotApart(f"the gradient of {name!r} depends on no example", unknown=True)
            return
        with unseen():
            deliver(name, [_as_given(use, signal.dtype) for use in uses_of(label)])

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with these tensors in place of its trainable parameters."""
        places = [(*place, tensor) for name, tensor in tensors.items() for place in self._holders[name]]
        before = [(holder, key, holder[key]) for holder, key, _ in places]
        forwards = [(attributes, attributes.get("forward")) for attributes, _ in self.spelled]
        try:
            for holder, key, tensor in places:
                holder[key] = tensor
            for attributes, forward in self.spelled:
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


def _as_given(gradient: Gradient, dtype: torch.dtype) -> Gradient:
    """Of sums over filters, the sums; no wider than the parameter."""
    if isinstance(gradient, FilterMap) and not gradient.own:
        gradient = Dense(gradient.dense())
    found: list[torch.dtype] = []

    def narrow(tensor: Tensor) -> Tensor:
        found.append(tensor.dtype)
        return tensor.to(dtype) if tensor.dtype == torch.float64 else tensor

    narrowed = change(gradient, narrow)
    return narrowed if torch.float64 in found and dtype != torch.float64 else gradient


class Proved:
    """Runs a model and its losses with every operator followed, and takes each example's gradients.

    Formal guarantees: what is returned for an example is a function of that example, of public values and of random
    draws; otherwise `NotApart` is raised, whatever the examples are.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.tracked_model, self.labels = model, TrackedModel(model, layout), Labels()
        self.tracker = Tracker(self.labels)
        self.tracker.spans = [EVERYWHERE]
        OldestNode.require(device_of(model))
        self._functions = TrackedFunctions(self.tracker, inside=True)
        self._batches = 0
        """Labels of earlier batches stay: what a model keeps of them is not this batch's own."""

    def gradients(
        self,
        losses: Callable[[Batch, Tracker], Tensor],
        batch: Batch,
        environment: Environment,
        views: int,
        weight: float | Tensor,
    ) -> dict[str, list[Gradient]]:
        """The gradients of `weight` times each example's losses, which has `views` rows side by side; or of each row's
        own weight."""
        found: dict[str, list[Gradient]] = {}

        def deliver(name: str, uses: Sequence[Gradient]) -> None:
            found.setdefault(name, []).extend(uses)

        self._batches += 1
        tracker, examples = self.tracker, len(batch[0]) // views
        tracker.reduced = False
        batch = [part.clone() for part in batch]  # so that what the model keeps of them is not the caller's memory
        for part in batch:
            tracker.label_rows(part, examples, self._batches, views)
        try:
            with (
                self.tracked_model.tracked(tracker, environment, self._batches, deliver),
                torch.enable_grad(),
                tracker,
                self._functions,
            ):
                outputs = losses(batch, tracker)
                tracker.require_rows(outputs, examples, self._batches, views)
                require_unwritten(self.model, self.labels, environment)
                if outputs.requires_grad:
                    seed = torch.full_like(outputs, 1.0 if isinstance(weight, Tensor) else weight)
                    seed = seed * weight if isinstance(weight, Tensor) else seed
                    tracker.label_rows(seed, examples, self._batches, views)
                    self.tracked_model.in_forward = False
                    torch.autograd.grad(outputs, [ANCHOR], seed, allow_unused=True)
                require_unwritten(self.model, self.labels, environment)
        finally:
            self.labels.prune()
        return found


def require_forgotten(labels: Labels, problem: type[RowsNotApart] = ExampleKept, besides: Batch = ()) -> None:
    """After a pass: raise ValueError if memory of examples is still referenced, besides that of these tensors."""
    if labels.alive(besides):
        OldestNode.empty_queues()
        gc.collect()
        if labels.alive(besides):
            raise problem(
                "the model or its loss keeps something of an example for later passes: no noise covers what others "
                "learn from it. Keep no tensors of a forward pass"
            )


def require_unwritten(model: nn.Module, labels: Labels, environment: Environment, restored: bool = False) -> None:
    """Raise ValueError if a pass has left something of its examples in a parameter or buffer, or in what a module adds
    to the model's state by `get_extra_state`; where buffers are `restored`, no longer than the pass."""
    modules = modules_of(model)
    held = [tensor for module in modules for tensor in (*module._buffers.values(), *module._parameters.values())]
    written = labels.among([*held, *environment.values()], {})
    if not written:
        for module in modules:
            if type(module).get_extra_state is nn.Module.get_extra_state:
                continue
            with unseen_by_functions():
                state = tree_leaves(module.get_extra_state())
            if labels.any_of(state):
                raise ExampleKept(
                    f"get_extra_state of a {type(module).__name__} gives something of the examples, without noise: it "
                    "would be saved with the model. Leave it out"
                )
        return
    found = [("buffer", *each) for each in model.named_buffers()]
    found += [("parameter", *each) for each in (*model.named_parameters(), *environment.items())]
    kind, name = next((kind, name) for kind, name, tensor in found if tensor is written[0][0])
    problem = RowsNotApart if restored and kind == "buffer" else ExampleKept
    raise problem(
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
