"""What do layers see and get back in one backward pass, and how is it written down without any weight's gradient?

A `TapPlan` knows every module that uses trainable parameters. For the length of one pass it runs those modules through
taps: identities whose backward receives the gradient of a layer's output, beside what the layer saved. Because a tap
saves through autograd, activation checkpointing drops and recomputes what it saved like anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.gradients import Dense, Gradient, combine
from vestige.engines.layers import LayerRule, Saved, Uses, layer_of, linear
from vestige.engines.reference import Reference
from vestige.engines.sequences import Block, composite_of
from vestige.layout import Layout
from vestige.mechanism.clipping import Loss, Parameters

Forward = Callable[..., Any]
Signals = tuple[Tensor, ...]
Recorder = Callable[["Pass", Saved, Signals], None]
Settle = Callable[[Saved, Tensor], Tensor]
Holder = tuple[dict[str, Any], str]
"""Where a module keeps a parameter: its dictionary, and the key there."""


class Misfit(Exception):
    """A module cannot be watched in the way it is, at least on this batch."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(f"module {site!r} {reason}")
        self.site = site


class Tap(torch.autograd.Function):
    """An identity that hands what was saved and the gradients of its outputs to `record`."""

    @staticmethod
    def forward(
        ctx: Any, record: Callable[[Saved, Signals], None], anchor: Tensor, count: int, *tensors: Tensor
    ) -> Any:
        # The anchor requires a gradient and never gets one: it only makes the outputs part of the graph.
        ctx.record = record
        ctx.save_for_backward(*tensors[count:])
        # Detached, the outputs are no views in autograd's eyes: an in-place activation may follow.
        return tensors[0].detach() if count == 1 else tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        ctx.record(saved, signals)
        return (None, None, None, *signals, *[None] * len(saved))


class Whole(torch.autograd.Function):
    """A layer run with its tap as one: `settle` records its gradients and returns that of its input."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], tuple[Tensor, Saved]], settle: Settle, anchor: Tensor, input: Tensor
    ) -> Tensor:
        output, saved = run(input)
        ctx.settle, ctx.dtype = settle, input.dtype
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        return None, None, None, ctx.settle(ctx.saved_tensors, signals[0]).to(ctx.dtype)


@dataclass(frozen=True)
class Sketch:
    """What a rehearsal has found out about a model, beyond the types of its modules."""

    expanded: frozenset[str] = frozenset()
    """Parameters with a leading axis of one that are given one row per example instead (a class token)."""
    shared: frozenset[str] = frozenset()
    """Modules called without examples whose output is repeated for each example (an embedding of positions)."""
    whole: frozenset[str] = frozenset()
    """Parameters whose gradient only the whole model can tell, run on one example at a time."""
    batched: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """Which of the tensors that a module without a rule is called with have examples on their first axis."""


@dataclass
class Notes:
    """What a rehearsal looks at: how many rows each call had, and the gradients that reached it."""

    outputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    inputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    signals: list[tuple[str, Tensor]] = field(default_factory=list)

    def call(self, site: Site, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.outputs.setdefault(site.name, []).append(_rows(outputs))
        if site.layer is None and site.composite is None:
            self.inputs.setdefault(site.name, []).append(_rows(inputs))

    def record(self, site: Site, now: Pass, saved: Saved, signals: Signals) -> None:
        self.signals += [(site.name, signal) for signal in signals]


@dataclass
class Pass:
    """One forward and backward pass over some examples: what it has recorded, and what it must still replay.

    `deliver` takes what is recorded instead, in a pass that the user runs (`watching`); `doubt` says why it cannot be.
    """

    examples: int = 0
    parameters: Parameters = field(default_factory=dict)
    notes: Notes | None = None
    uses: dict[str, list[Gradient]] = field(default_factory=dict)
    replays: list[Callable[[], Parameters]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    deliver: Callable[[Mapping[str, Gradient]], None] | None = None
    doubt: str | None = None

    def add(self, uses: Mapping[str, Gradient]) -> None:
        if self.deliver is not None:
            self.deliver(uses)
            return
        for name, gradient in uses.items():
            self.uses.setdefault(name, []).append(gradient)


@dataclass(frozen=True)
class Site:
    """A module to watch: `owned` maps the names of parameters within it to their names in the layout."""

    name: str
    module: nn.Module
    owned: Mapping[str, str]
    layer: LayerRule | None
    composite: Forward | None


def sites_of(model: nn.Module, layout: Layout) -> Iterator[Site]:
    """Every module with trainable parameters of its own; attention counts those of its output projection as its own."""
    names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside):
            continue
        composite = composite_of(module)
        members: Any = module._parameters
        if composite is not None or isinstance(module, nn.MultiheadAttention):
            members = dict(module.named_parameters(remove_duplicate=False))
            inside = (*inside, path + "." if path else "")
        owned = {attribute: names[id(p)] for attribute, p in members.items() if id(p) in names}
        if owned:
            yield Site(path, module, owned, layer_of(module), composite)


def _without(sites: Iterable[Site], names: frozenset[str]) -> Iterator[Site]:
    for site in sites:
        yield replace(site, owned={a: name for a, name in site.owned.items() if name not in names})


class TapPlan:
    """How every use of a trainable parameter is watched."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, sketch: Sketch) -> None:
        self.model, self.loss, self.layout, self.sketch = model, loss, layout, sketch
        self.reference = Reference(model, loss, layout)
        self.anchor = torch.zeros((), requires_grad=True)
        self.holders = _holders(model, layout)
        self.sites = [site for site in _without(sites_of(model, layout), sketch.expanded | sketch.whole) if site.owned]
        self.forwards = [(vars(site.module), self._forward(site)) for site in self.sites]
        self.inner = {s.name: self._inner(s.module) for s in self.sites if s.layer is None and s.composite is None}
        self.now = Pass()
        self.called: frozenset[str] = frozenset()
        """The sites that a rehearsal has met."""

    def gradients(self, batch: Sequence[Tensor], parameters: Parameters) -> dict[str, Gradient]:
        """One forward and one backward pass: every parameter's per-example gradients, where it has any."""
        self.now = now = Pass(len(batch[0]), parameters)
        try:
            expanded = self.expanded(parameters, now.examples)
            with self.installed({**tracked(parameters), **expanded}):
                losses = self.losses(batch)
                if losses.requires_grad:
                    leaves = [self.anchor, *expanded.values()]
                    _, *rows = torch.autograd.grad(losses, leaves, torch.ones_like(losses), allow_unused=True)
                    now.add({n: Dense(r) for n, r in zip(expanded, rows, strict=True) if r is not None})
            with torch.no_grad():
                slow: list[Callable[[], Parameters]] = [*now.replays, partial(self._whole, batch, parameters)]
                for one_at_a_time in slow:
                    now.add({name: Dense(value) for name, value in one_at_a_time().items()})
                with full_precision(losses):
                    return {name: combine(uses) for name, uses in now.uses.items()}
        finally:
            self.now = Pass()  # nothing of the data outlives the pass

    def losses(self, batch: Sequence[Tensor]) -> Tensor:
        *inputs, targets = batch
        with torch.enable_grad():
            return example_losses(self.loss, self.model(*inputs), targets)

    def expanded(self, parameters: Parameters, examples: int) -> Parameters:
        rows = {name: parameters[name].detach() for name in sorted(self.sketch.expanded)}
        return {name: p.expand(examples, *p.shape[1:]).requires_grad_() for name, p in rows.items()}

    @contextmanager
    def installed(self, tensors: Parameters) -> Iterator[None]:
        """The model with these parameters and with taps. Open until the backward pass is over: it may recompute."""
        places = [(*place, tensor) for name, tensor in tensors.items() for place in self.holders[name]]
        parameters = [(holder, key, holder[key], tensor) for holder, key, tensor in places]
        before = [(attributes, attributes.get("forward")) for attributes, _ in self.forwards]
        try:
            for holder, key, _, tensor in parameters:
                holder[key] = tensor
            for attributes, forward in self.forwards:
                attributes["forward"] = forward
            with eagerly():
                yield
        finally:
            for holder, key, parameter, _ in parameters:
                holder[key] = parameter
            for attributes, own in before:
                if own is None:
                    attributes.pop("forward", None)
                else:
                    attributes["forward"] = own

    def _whole(self, batch: Sequence[Tensor], parameters: Parameters) -> Parameters:
        """The reference engine, for some of the parameters."""
        if not self.sketch.whole:
            return {}
        some = {name: parameters[name] for name in sorted(self.sketch.whole)}
        rest = {name: p for name, p in parameters.items() if name not in some}

        def example_loss(some: Parameters, *example: Tensor) -> Tensor:
            return self.reference.example_loss({**rest, **some}, *example)

        each = vmap(grad(example_loss), in_dims=(None, *(0 for _ in batch)), randomness="different")
        return dict(each(some, *batch))

    def _forward(self, site: Site) -> Forward:
        if site.layer is not None:
            return self._layer_forward(site, site.layer)
        return self._composite_forward(site, site.composite) if site.composite else self._custom_forward(site)

    def _layer_forward(self, site: Site, layer: LayerRule) -> Forward:
        """A layer with a rule: run as it is, its output tapped."""
        original, module, owned = site.module.forward, site.module, site.owned
        saves = "weight" in owned

        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
            (input,) = (*args, *kwargs.values())
            if self._settles_whole(site, layer, input):
                assert layer.run is not None
                self._note(site, [input])
                whole: Tensor = Whole.apply(partial(layer.run, module), partial(settle, self.now), self.anchor, input)
                return whole
            with self._constants(site):
                output, saved = layer.run(module, input) if layer.run else (original(input), (input,))
            return self._tap(site, record, [output], saved if saves else ())[0]

        def record(now: Pass, saved: Saved, signals: Signals) -> None:
            examples = now.examples
            if site.name in self.sketch.shared:
                saved = tuple(repeated(tensor, examples) for tensor in saved)
            with full_precision(signals[0]):
                now.add(_renamed(layer.gradients(module, owned, saved, signals[0], examples), owned))

        def settle(now: Pass, saved: Saved, signal: Tensor) -> Tensor:
            assert layer.whole is not None
            with full_precision(signal):
                back, uses = layer.whole(module, owned, saved, signal, now.examples)
            now.add(_renamed(uses, owned))
            return back

        return forward

    def _settles_whole(self, site: Site, layer: LayerRule, input: Tensor) -> bool:
        plain = self.now.notes is None and site.name not in self.sketch.shared and len(input) % self.now.examples == 0
        return plain and layer.whole is not None and layer.fuses(site.module, input)

    def _composite_forward(self, site: Site, composite: Forward) -> Forward:
        """A module spelled out in `sequences`: each of its linear maps is tapped."""
        holders = {name: _holder(site.module, name) for name, _ in site.module.named_parameters(remove_duplicate=False)}

        def read(name: str, block: Block | None) -> Tensor:
            holder, key = holders[name]
            parameter: Tensor = holder[key]
            return parameter if block is None else parameter[block[0] : block[1]]

        def watched(input: Tensor, weight: str, bias: str | None, block: Block | None = None) -> Tensor:
            with self._constants(site):
                output = F.linear(input, read(weight, block), None if bias is None else read(bias, block))
            start, stop = block or (0, 0)
            rows = len(read(weight, None))
            names = {"weight": weight, "bias": bias or ""}
            owned = {kind: site.owned[name] for kind, name in names.items() if name in site.owned}

            def record(now: Pass, saved: Saved, signals: Signals) -> None:
                signal = F.pad(signals[0], (start, rows - stop)) if block else signals[0]
                with full_precision(signal):
                    now.add(_renamed(linear(None, owned, saved, signal, now.examples), owned))

            return self._tap(site, record, [output], (input,) if "weight" in owned else ())[0] if owned else output

        return partial(composite, site.module, watched)

    def _custom_forward(self, site: Site) -> Forward:
        """Any other module: run as it is, to be replayed one example at a time when the pass is over."""
        original = site.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._constants(site):
                result = original(*args, **kwargs)
            leaves, call = tree_flatten((args, kwargs))
            outputs, shape = tree_flatten(result)
            if self.now.notes and not all(isinstance(leaf, Tensor | int | float | str | None) for leaf in outputs):
                raise Misfit(site.name, f"returns {type(result).__name__}, which is not made of tensors")
            floating = [i for i, leaf in enumerate(outputs) if _floating(leaf)]
            inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            places = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            record = partial(self._replay_later, site, call, places)
            tapped = self._tap(site, record, [outputs[i].clone() for i in floating], inputs)
            for i, output in zip(floating, tapped, strict=True):
                outputs[i] = output
            return tree_unflatten(outputs, shape)

        return forward

    def _replay_later(
        self, site: Site, call: TreeSpec, places: list[Any], now: Pass, saved: Saved, signals: Signals
    ) -> None:
        now.replays.append(partial(self._replay, site, call, places, now, saved, signals))

    def _replay(
        self, site: Site, call: TreeSpec, places: list[Any], now: Pass, saved: Saved, signals: Signals
    ) -> Parameters:
        """The gradients of a module's own parameters, one example at a time, from what went in and what came back."""
        parameters, examples = now.parameters, now.examples
        own = {attribute: parameters[name] for attribute, name in site.owned.items()}
        others = {a: parameters[n] for a, n in self.inner[site.name].items() if n not in site.owned.values()}
        batched = self.sketch.batched[site.name]

        def outputs(own: Parameters, inputs: Sequence[Tensor]) -> Signals:
            remaining = iter(inputs)
            filled = [next(remaining) if place is _TENSOR else place for place in places]
            args, kwargs = tree_unflatten(filled, call)
            result = functional_call(site.module, {**others, **own}, args, kwargs)
            return tuple(leaf for leaf in tree_flatten(result)[0] if _floating(leaf))

        def pulled(inputs: Sequence[Tensor], signals: Signals) -> Parameters:
            pull = vjp(lambda own: outputs(own, inputs), own)[1]
            return dict(pull(signals)[0])

        inputs = [t.unflatten(0, (examples, -1)) if each else t for t, each in zip(saved, batched, strict=True)]
        signals = tuple(signal.unflatten(0, (examples, -1)) for signal in signals)
        axes = [0 if each else None for each in batched]
        try:
            found = vmap(pulled, in_dims=(axes, 0), randomness="different")(inputs, signals)
        except Exception as problem:
            raise Misfit(site.name, f"cannot be run one example at a time ({problem})") from problem
        return {site.owned[attribute]: value for attribute, value in found.items()}

    def _inner(self, module: nn.Module) -> dict[str, str]:
        names = {id(holder[key]): name for name, holders in self.holders.items() for holder, key in holders}
        return {path: names[id(p)] for path, p in module.named_parameters() if id(p) in names}

    def _tap(self, site: Site, record: Recorder, outputs: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor]:
        now = self.now
        if not self._note(site, outputs):
            return outputs
        if now.notes is not None:
            now.notes.call(site, outputs, saved)
            record = partial(now.notes.record, site)
        if site.name in self.sketch.shared:
            outputs = [repeated(output, now.examples).clone() for output in outputs]
        elif now.notes is None and any(len(output) % now.examples for output in outputs):
            raise Misfit(site.name, f"returned {len(outputs[0])} rows for {now.examples} examples")
        if not outputs:
            return ()
        tapped = Tap.apply(partial(record, now), self.anchor, len(outputs), *outputs, *saved)
        return (tapped,) if len(outputs) == 1 else tapped

    def _note(self, site: Site, rows: Sequence[Tensor]) -> bool:
        """A site was called. False if that was in a pass of the user's and cannot be watched."""
        now = self.now
        now.called.add(site.name)
        if now.deliver is None:
            return True
        doubt = _doubt(rows, now.examples, site.name in self.sketch.shared)
        if doubt is not None:
            now.doubt = f"module {site.name!r} {doubt}"
        return doubt is None

    def _constants(self, site: Site) -> AbstractContextManager[object]:
        """In a rehearsal, a watched module's own parameters are constants: any gradient that still reaches one comes
        from a use that nobody watches."""
        return _UNCHANGED if self.now.notes is None else _detached(site)


def _doubt(tensors: Sequence[Tensor], examples: int, shared: bool) -> str | None:
    """Why a module cannot be watched in a pass of the user's, whose backward pass runs out of our sight."""
    if not shared and any(len(tensor) % examples for tensor in tensors):
        return f"has {len(tensors[0])} rows for {examples} examples"
    if not torch.is_grad_enabled():
        return "ran without gradients"
    # Activation checkpointing would run the module again, unwatched, in the backward pass.
    hooked = hooks_on_saved_tensors is None or hooks_on_saved_tensors(True)
    return "ran under hooks on saved tensors" if hooked else None


hooks_on_saved_tensors: Callable[[bool], object] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
"""Tells, from torch 2.8 on, whether anybody has such hooks."""

_TENSOR = object()
_UNCHANGED = nullcontext()


@contextmanager
def _detached(site: Site) -> Iterator[None]:
    holders = [_holder(site.module, attribute) for attribute in site.owned]
    before = [holder[key] for holder, key in holders]
    try:
        for (holder, key), parameter in zip(holders, before, strict=True):
            holder[key] = parameter.detach()
        yield
    finally:
        for (holder, key), parameter in zip(holders, before, strict=True):
            holder[key] = parameter


def _holder(module: nn.Module, path: str) -> Holder:
    parent, _, key = path.rpartition(".")
    return module.get_submodule(parent)._parameters, key  # type: ignore[return-value]


def _holders(model: nn.Module, layout: Layout) -> dict[str, list[Holder]]:
    """Every place that holds a parameter of the layout: several, where weights are tied."""
    names = {id(parameter): name for name, parameter in layout.parameters(model).items()}
    holders: dict[str, list[Holder]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in names:
                holders[names[id(parameter)]].append((module._parameters, key))
    return holders


def tracked(parameters: Parameters) -> Parameters:
    """As leaves of the graph, as in ordinary training: some modules take short cuts past their layers without one."""
    return {n: p if p.requires_grad and p.is_leaf else p.detach().requires_grad_() for n, p in parameters.items()}


def repeated(tensor: Tensor, examples: int) -> Tensor:
    """One copy per example of what no example influences: along an axis of one, or a new one."""
    return (tensor if len(tensor) == 1 else tensor[None]).expand(examples, *[-1] * (tensor.dim() - (len(tensor) == 1)))


def example_losses(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """The loss of each example as a batch of one: [examples]."""
    if _is_cross_entropy(loss) and isinstance(outputs, Tensor) and outputs.dim() == 2 and targets.dim() == 1:
        return F.cross_entropy(outputs, targets, reduction="none")  # the same, without vmap's overhead

    def one(output: Any, target: Tensor) -> Tensor:
        leaves, shape = tree_flatten(output)
        return loss(tree_unflatten([leaf.unsqueeze(0) for leaf in leaves], shape), target.unsqueeze(0)).sum()

    return vmap(one, randomness="different")(outputs, targets)


def _is_cross_entropy(loss: Loss) -> bool:
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and loss.ignore_index == -100 and not loss.label_smoothing
        return plain and loss.reduction != "none"
    return loss is F.cross_entropy


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Norms and sums are float32 whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _UNCHANGED


def eagerly() -> AbstractContextManager[object]:
    """Compiled models run uncompiled here: a compiled graph would run past the layers that are watched."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(dynamo, "cached_backends", {0: dynamo})  # who has ever called torch.compile
    compiling = any(backend is not None for backend in backends.values())
    return torch.compiler.set_stance("force_eager") if compiling else nullcontext()


def _renamed(uses: Uses, owned: Mapping[str, str]) -> Uses:
    return {owned[attribute]: gradient for attribute, gradient in uses.items()}


def _rows(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(len(tensor) if tensor.dim() else 0 for tensor in tensors)


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
