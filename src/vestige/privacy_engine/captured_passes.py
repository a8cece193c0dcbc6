"""How does a pass of the user's shed its launches? On a GPU it is captured at a few sizes, ahead, and replayed.

The model's forward pass, its backward pass and the clipping that follows are a CUDA graph each, because what lies
between them is the user's. Capturing runs the model's Python with every operator followed, so what is replayed is what
was proved. All graphs of a module work in the same memory, so only one pass at a time can be in it; while one is,
others run as they are.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.bookkeeping import add_weighted
from vestige.engines.capture_guards import (
    NotCapturable,
    host_draws,
    require_same_on_any_draw,
    restore_host_draws,
    state_fingerprint,
)
from vestige.engines.cuda_graphs import (
    MOST_GRAPHS,
    OFTEN,
    SECONDS,
    ahead,
    capturable,
    captured,
    device_draws,
    fill_rows,
    give_back,
    is_full,
    lengthened,
    mask_is_full,
    new_pool,
    padded_lengths,
    precision,
    restore_device_draws,
)
from vestige.engines.example_axis.labels import NotApart, Rows, untracked
from vestige.engines.host_transfers import HostTransfers, Sent
from vestige.engines.per_example.expressions import ANCHOR, Pass, full_precision
from vestige.engines.per_example.gradients import Gradient, change, combine
from vestige.engines.per_example.kernels import blanked
from vestige.engines.per_example.taps import Taps, require_unwritten
from vestige.engines.per_example.uses import TrackedParameter, UnsupportedUse
from vestige.layout import Layout, device_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip, RunningSum
from vestige.privacy_engine.calls import Call
from vestige.privacy_engine.tracking import Tracking

Uses = dict[str, list[Gradient]]
Lengths = tuple[int, ...]
SHARE = 0.1
"""Of a loop's time, for capturing sizes and lengths that are served by larger graphs meanwhile."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class NotReturned:
    """Stands for an output that is neither a tensor nor plain, such as a cache: a replayed pass has none of its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of an output that is no tensor: a captured pass does not keep it. Say "
            "PrivacyEngine(cuda_graphs=False) to train without CUDA graphs"
        )


@dataclass(frozen=True)
class Ending:
    """An output that holds the examples: which buffer it is in, its label, how a loss was to be reduced, and the name
    of the argument whose length its second axis has, if any."""

    buffer: int
    label: Rows
    reduction: str | None
    along: str | None


@dataclass
class Graphs:
    """The graphs of one size."""

    rows: int
    forward: Any
    backward: Any
    clip: Any
    outputs: list[Any]
    """What the pass gave, flat; an `Ending` where examples are."""
    tree: TreeSpec


@dataclass(eq=False)
class Replay:
    """SENSITIVE: one pass of the user's in the memory of the graphs, from its forward pass until it is clipped."""

    owner: CapturedForm
    graphs: Graphs
    rows: int
    lengths: Mapping[str, int]
    draws: Tensor
    """The state of the GPU's generator before it."""
    went_back: bool = False

    def outputs(self) -> tuple[list[Any], TreeSpec]:
        """What the forward pass gives, flat, of the examples alone and in memory of their own; beside each `Ending`."""
        self.graphs.forward.replay()
        leaves = self.graphs.outputs
        found = [self._own(leaf).clone() if isinstance(leaf, Ending) else leaf for leaf in leaves]
        return found, self.graphs.tree

    def endings(self) -> list[tuple[int, Ending]]:
        return [(place, leaf) for place, leaf in enumerate(self.graphs.outputs) if isinstance(leaf, Ending)]

    def _own(self, ending: Ending) -> Tensor:
        end = self.owner.ends[ending.buffer][: self.rows]
        return end if ending.along is None else end[:, : self.lengths[ending.along]]

    def back(self, signals: Sequence[Tensor]) -> Uses | None:
        """Take on what came back to the outputs; None if the gradients stay in the graphs' memory."""
        if self.owner.room.within is not self:
            raise ValueError("this backward pass goes through a forward pass of the model that is over")
        for (_, ending), signal in zip(self.endings(), signals, strict=True):
            self.owner.ends[ending.buffer][: self.graphs.rows].zero_()
            self._own(ending).copy_(signal)
        if self.went_back:
            return self.again()
        self.went_back = True
        self.graphs.backward.replay()
        return None

    def again(self) -> Uses:
        """The same pass, run again as it is: its gradients in factored form, of the examples alone."""
        return self.owner.again(self)

    def clip(self, examples: int, into: RunningSum) -> None:
        if self.owner.room.within is not self:
            raise ValueError("this step is about a forward pass of the model that is over: run it again")
        into.settle()
        self.owner.weigh(examples)
        self.graphs.clip.replay()
        into.lend(examples, self.owner.total)

    def over(self) -> None:
        if self.owner.room.within is self:
            self.owner.room.within = None


class GraphMemoryPool:
    """The memory in which all graphs of a module work, one pass at a time."""

    def __init__(self) -> None:
        self.pool = new_pool()
        self._within: weakref.ref[Replay] | None = None

    @property
    def within(self) -> Replay | None:
        """The pass that is in the memory, as long as somebody can come back to it."""
        return None if self._within is None else self._within()

    @within.setter
    def within(self, replay: Replay | None) -> None:
        self._within = None if replay is None else weakref.ref(replay)


@dataclass
class CapturedPasses:
    """Which passes of a module are captured: none on a CPU, none where something speaks against it."""

    module: nn.Module
    layout: Layout
    clip: Clip
    sizes: Sequence[int]
    """Of batches, largest first; none if nothing is to be captured."""
    tracking: Tracking
    taps: Taps
    total: Callable[[], Tensor]
    """Where passes leave their clipped sums, each until the next."""
    warm: bool = False
    """Whether a pass was captured."""
    _forms: dict[Hashable, dict[Lengths, CapturedForm | None]] = field(default_factory=dict)
    """By what a form of call takes for granted, and the lengths of its texts; None if it could not be captured."""
    _met: Counter[Hashable] = field(default_factory=Counter)
    _room: GraphMemoryPool | None = None
    _begun, _spent = inf, 0.0
    """When the first passes had been captured, and seconds that capturing took since."""

    def begin(
        self, forward: Callable[..., Any], call: Call, label: Rows, modules: Sequence[nn.Module]
    ) -> Replay | None:
        """This pass in the memory of graphs, captured if need be; None if it is to run as it is."""
        device = device_of(self.module)
        if not self.sizes or label.count > self.sizes[0] or not capturable(device) or self.sizes[0] > LARGEST_SUM:
            return None
        if self._room is not None and self._room.within is not None:
            return None
        names = {name: place for place, name in call.names.items() if isinstance(call.leaves[place], Tensor)}
        named = {name: call.leaves[place] for name, place in names.items()}
        to = padded_lengths(self.module, named)
        own = {name: named[name].shape[1] for name in to}
        masks = [leaf for name, leaf in named.items() if name.endswith("attention_mask")]
        full = own == to and bool(masks) and all(map(is_full, masks))
        key = self._key(call, modules, {names[name] for name in to})
        if key is None:
            return None
        known = self._forms.setdefault((key, full), {})
        lengths = self._lengths(known, tuple(to.values()))
        to = dict(zip(to, lengths, strict=True))
        leaves = list(call.leaves)
        for name, leaf in lengthened(self.module, named, to).items():
            leaves[names[name]] = leaf
        longer = Call(leaves, call.tree)
        if lengths not in known:
            self._met[key] += 1
            first = self._begun == inf
            if sum(map(len, self._forms.values())) >= MOST_GRAPHS or (not first and self._met[key] < 2 and not to):
                return None
            self._room = self._room or GraphMemoryPool()
            form = CapturedForm(self, forward, longer, label, names, to, full, self._room)
            enough = self.sizes[1] if len(self.sizes) > 1 and label.count <= self.sizes[1] else self.sizes[0]
            known[lengths] = form if self._captured(form, ahead(self.sizes) if first else (enough,)) else None
        form = known[lengths]  # type: ignore[assignment]
        if form is None:
            return None
        best = next(size for size in reversed(self.sizes) if size >= label.count)
        self._met[key, lengths, best] += 1
        often = self._met[key, lengths, best] >= OFTEN and self._may_capture() and not form.has(best)
        if (often or not form.reaches(label.count)) and not self._captured(form, (best,)):
            known[lengths] = None
            return None
        return form.begin(leaves, label.count, {name: leaf.shape[1] for name, leaf in named.items() if leaf.dim() > 1})

    def _lengths(self, known: Mapping[Lengths, CapturedForm | None], wanted: Lengths) -> Lengths:
        """To which lengths texts are padded: to those of graphs that are there, as long as capturing has to wait."""
        if wanted in known or self._may_capture():
            return wanted
        longer = [
            each for each, form in known.items() if form and all(a >= b for a, b in zip(each, wanted, strict=True))
        ]
        return min(longer, key=sum, default=wanted)

    def _may_capture(self) -> bool:
        """Whether further graphs are worth their time: all of them together take a share of what the loop takes."""
        return self._begun == inf or self._spent <= SHARE * (time.monotonic() - self._begun)

    def _captured(self, form: CapturedForm, sizes: Sequence[int]) -> bool:
        """Whether a form could be captured at these sizes, as far as there is time."""
        start, begun = inf, time.monotonic()
        try:
            for rows in sizes:
                if time.monotonic() - start > SECONDS:
                    break
                form.capture(rows)
                start = min(start, time.monotonic())  # the first one loads and compiles kernels
        except (NotApart, UnsupportedUse, NotCapturable, RuntimeError) as problem:
            give_back(device_of(self.module))
            why = (str(problem) or type(problem).__name__).splitlines()[0]
            warnings.warn(f"the model's passes cannot be captured ({why}): they run launch by launch", stacklevel=2)
            return False
        finally:
            if self._begun == inf:
                self._begun = time.monotonic()
            else:
                self._spent += time.monotonic() - begun
        return True

    def _key(self, call: Call, modules: Sequence[nn.Module], texts: Collection[int]) -> Hashable | None:
        """What a graph takes for granted, but for the length of texts; None if that cannot be told."""
        device, kinds = device_of(self.module), list[Hashable]()
        for place, leaf in enumerate(call.leaves):
            if isinstance(leaf, Tensor):
                if leaf.device != device:
                    return None  # what lies on the host is read there when a pass is captured, and not again
                rows = isinstance(self.tracking.label(leaf), Rows)
                shape = () if place in texts else leaf.shape[rows:]
                kinds.append((shape, leaf.dtype, rows))
            elif isinstance(leaf, PLAIN):
                kinds.append(leaf)
            else:
                return None
        if _hooked(self.module):
            return None
        return call.tree, tuple(kinds), precision(), state_fingerprint(self.module, modules=modules)


class CapturedForm:
    """The graphs of one form of call."""

    def __init__(
        self,
        owner: CapturedPasses,
        forward: Callable[..., Any],
        call: Call,
        label: Rows,
        names: Mapping[str, int],
        to: Mapping[str, int],
        full: bool,
        room: GraphMemoryPool,
    ) -> None:
        """`full`: no mask leaves anything out."""
        self.owner, self.room, self._forward, self._to = owner, room, forward, to
        self.total, self.device = owner.total(), device_of(owner.module)
        most = owner.sizes[0]
        tensors = [(place, leaf) for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        padded = {names[name] for name in to}
        self._rows = [p for p, leaf in tensors if p in padded or isinstance(owner.tracking.label(leaf), Rows)]
        self._leaves = list(call.leaves)
        for place, leaf in enumerate(call.leaves):
            if isinstance(leaf, Tensor):
                shape = (most, *leaf.shape[1:]) if place in self._rows else leaf.shape
                self._leaves[place] = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        self._tree, self._batch = call.tree, label.batch
        self._full = full
        self._load(call.leaves, label.count)
        self.ends: list[Tensor] = []
        self._count, self._places = torch.zeros((), device=self.device), torch.arange(most, device=self.device)
        self._graphs: list[Graphs] = []
        self._point = {name: p.detach() for name, p in owner.layout.parameters(owner.module).items()}
        self._live: tuple[Pass, list[Tensor], Uses] | None = None

    def has(self, rows: int) -> bool:
        return any(graphs.rows == rows for graphs in self._graphs)

    def reaches(self, rows: int) -> bool:
        return any(graphs.rows >= rows for graphs in self._graphs)

    def begin(self, leaves: Sequence[Any], rows: int, lengths: Mapping[str, int]) -> Replay | None:
        fitting = [graphs for graphs in self._graphs if graphs.rows >= rows]
        if not fitting or self.room.within is not None:
            return None
        self._load(leaves, rows)
        self._count.fill_(rows)
        draws = device_draws(self.device)
        replay = Replay(self, min(fitting, key=lambda graphs: graphs.rows), rows, lengths, draws)
        self.room.within = replay
        return replay

    def _load(self, leaves: Sequence[Any], rows: int) -> None:
        with untracked():
            for place, leaf in enumerate(leaves):
                if place in self._rows:
                    fill_rows(self._leaves[place], leaf)
                elif isinstance(leaf, Tensor):
                    self._leaves[place].copy_(leaf)

    # --- capturing ----------------------------------------------------------------------------------------------------

    def capture(self, rows: int) -> None:
        """Run once, proved; then captured, proved again. Raises where that cannot be."""
        with _disable_current_modes():  # those of the loop
            self._capture(rows)

    def _capture(self, rows: int) -> None:
        sent, before, draws = Sent(), host_draws(), device_draws(self.device)
        self._count.fill_(rows)
        if self.owner.warm:  # kernels are loaded: capturing mostly works at once
            with suppress(NotCapturable, RuntimeError):
                self._capture_graphs(rows, sent)
                restore_host_draws(before)
                restore_device_draws(draws, self.device)
                return
        with HostTransfers(self.device, sent):
            self._run_all(rows)
        if self.device.type == "cuda" and host_draws() != before:
            restore_host_draws(before)
            require_same_on_any_draw(lambda: self._run_all(rows), self.owner.tracking.tracker)
        give_back(self.device)
        self._capture_graphs(rows, sent)
        self.owner.warm = True
        restore_host_draws(before)
        restore_device_draws(draws, self.device)

    def _capture_graphs(self, rows: int, sent: Sent) -> None:
        shown: list[tuple[list[Any], TreeSpec]] = []
        with HostTransfers(self.device, sent, given=True):
            forward = captured(lambda: shown.append(self._run_forward(rows)), self.room.pool, self.device)
            backward = captured(lambda: self._run_backward(rows), self.room.pool, self.device)
            clip = captured(lambda: self._run_clip(rows), self.room.pool, self.device)
        self._live = None
        self._graphs.append(Graphs(rows, forward, backward, clip, *shown[0]))

    def _run_all(self, rows: int) -> None:
        self._run_forward(rows)
        for end in self.ends:
            end[:rows].fill_(1 / rows)
        self._run_backward(rows)
        self._run_clip(rows)
        self._live = None

    def _run_forward(self, rows: int) -> tuple[list[Any], TreeSpec]:
        """The forward pass on the rows in the buffers; its outputs are copied into `ends`."""
        tracking, uses = self.owner.tracking, Uses()
        leaves = [leaf[:rows] if place in self._rows else leaf for place, leaf in enumerate(self._leaves)]
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for place in self._rows:
            tracking.tracker.label_rows(leaves[place], rows, self._batch)

        def deliver(found: Mapping[str, Gradient]) -> None:
            for name, gradient in found.items():
                uses.setdefault(name, []).append(gradient)

        args, kwargs = tree_unflatten(leaves, self._tree)
        tracking.tracker.answer, tracking.tracker.captured = self._full, True
        try:
            with tracking.model(rows, self._batch, True, fresh=True) as tracker:
                now = Pass(rows, self._point, tracker, deliver, inside=False)
                with (
                    self.owner.taps.watching(now),
                    torch.enable_grad(),
                    _without_cache(self.device),
                    mask_is_full(self._full),
                ):
                    outputs = self._forward(*args, **kwargs)
                require_unwritten(self.owner.module, tracker, now.environment)
                found, tree = tree_flatten(outputs)
                kept = self._kept(found, now)
        finally:
            tracking.tracker.answer, tracking.tracker.captured = None, False
        held = [found[place] for place, leaf in enumerate(kept) if isinstance(leaf, Ending)]
        most = len(self._places)
        self.ends = self.ends or [each.new_zeros(most, *each.shape[1:]) for each in held]
        for end, output in zip(self.ends, held, strict=True):
            end[:rows].copy_(output.detach())
        if now.kept_elsewhere:
            raise NotCapturable("activations are kept elsewhere")
        self._live = now, held, uses
        return kept, tree

    def _kept(self, found: Sequence[Any], now: Pass) -> list[Any]:
        """What a replay gives of the outputs. Raises `NotCapturable` if one is a tensor without rows: padding would be
        a part of it."""
        kept: list[Any] = []
        buffers = 0
        for leaf in found:
            if not isinstance(leaf, Tensor):
                kept.append(leaf if isinstance(leaf, PLAIN) else NotReturned())
                continue
            label = now.tracker.labels.get(leaf)
            first = isinstance(label, Rows) and (label.axis, label.inner, label.first) == (0, 1, 0)
            if isinstance(leaf, TrackedParameter) or not first or not leaf.is_floating_point():
                raise NotCapturable("an output of the model has no row for each example")
            assert isinstance(label, Rows)
            along = next((name for name, own in self._to.items() if leaf.dim() > 1 and leaf.shape[1] == own), None)
            kept.append(Ending(buffers, label, now.tracker.scalar(leaf), along))
            buffers += 1
        if not buffers:
            raise NotCapturable("no output of the model has a row for each example")
        return kept

    def _run_backward(self, rows: int) -> Uses:
        assert self._live is not None
        now, held, uses = self._live
        padding = self._places[:rows] >= self._count
        signals = [blanked(end[:rows], padding, in_place=True) for end in self.ends]
        signals = [signal.to(output.dtype, copy=True) for output, signal in zip(held, signals, strict=True)]
        for signal in signals:
            now.tracker.label_rows(signal, rows, self._batch)
        reached = [place for place, output in enumerate(held) if output.requires_grad]
        outputs, back = [held[place] for place in reached], [signals[place] for place in reached]
        recomputing = self.owner.taps.watching(now) if now.recomputes else nullcontext()
        with self.owner.tracking.model(rows, self._batch, True, fresh=True), recomputing:
            torch.autograd.grad(outputs, [ANCHOR], back, allow_unused=True)
            now.settle()
        return uses

    def _run_clip(self, rows: int) -> None:
        assert self._live is not None
        self.total.zero_()
        with torch.no_grad(), full_precision(self.total):
            gradients = {name: combine(parts) for name, parts in self._live[2].items()}
        real = self._places[:rows] < self._count
        add_weighted(gradients, self.owner.clip, self.owner.layout, self.total, rows, real)

    def weigh(self, examples: int) -> None:
        """Rows beyond these have no weight: they fill up a part that has fewer than two of its own."""
        self._count.fill_(examples)

    def again(self, replay: Replay) -> Uses:
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), _disable_current_modes():
            restore_device_draws(replay.draws, self.device)
            signals = [end.clone() for end in self.ends]
            self._run_forward(replay.graphs.rows)
            for end, signal in zip(self.ends, signals, strict=True):
                end.copy_(signal)
            found = self._run_backward(replay.graphs.rows)
            self._live = None
        few = itemgetter(slice(replay.rows))
        return {name: [change(gradient, few) for gradient in uses] for name, uses in found.items()}


def _hooked(module: nn.Module) -> bool:
    """Whether submodules have hooks, which a replay would skip."""
    stores = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    inner = (each for each in module.modules() if each is not module)
    return any(not _harmless(hook) for each in inner for store in stores for hook in getattr(each, store).values())


def _harmless(hook: Any) -> bool:
    """transformers' own hooks hand activations to the outputs, where those are asked for, and make what frozen
    embeddings give part of the graph, for checkpointing; so do peft's."""
    module, name = getattr(hook, "__module__", None) or "", getattr(hook, "__name__", "")
    requires = name.startswith("make_inputs_require_grad") and module.split(".")[0] in ("transformers", "peft")
    return requires or module == "transformers.utils.output_capturing"


def _without_cache(device: torch.device) -> Any:
    """Autocast as it is, but no copy of a weight made before the capture is read in it."""
    stack = ExitStack()
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=False))
    return stack
