"""How does a pass of the user's shed its launches? On a GPU it is captured at a few sizes, ahead, and replayed.

The model's forward pass, its backward pass and the clipping that follows are a CUDA graph each, because what lies
between them is the user's. Capturing runs the model's Python with every operator followed, so what is replayed is what
was proved. All graphs of a module work in the same memory, so only one pass at a time can be in it; while one is,
others run as they are.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.bookkeeping import add_weighted
from vestige.engines.capture_guards import (
    HOOKS,
    NUMBERS,
    KnownModules,
    NamesRead,
    NotCapturable,
    state_fingerprint,
)
from vestige.engines.cuda_graphs import (
    MOST_CHANGES,
    MOST_GRAPHS,
    CaptureCosts,
    Timer,
    ahead,
    as_captured,
    capturable,
    capture_proved,
    captured,
    fill_rows,
    give_back,
    is_full,
    new_pool,
    padded_size,
    precision,
)
from vestige.engines.example_axis.labels import Mixed, NotApart, Rows, Summed, top_hooks, without_modes
from vestige.engines.example_axis.tracked_model import ANCHOR, EVERYWHERE, TrackedModel, require_unwritten
from vestige.engines.module_snapshot import buffers_kept
from vestige.engines.per_example.execution import full_precision, unseen, unseen_by_functions
from vestige.engines.per_example.gradient_forms import Gradient, change, combine
from vestige.engines.per_example.kernels import blanked
from vestige.engines.per_example.sums_of_users import RowCounts, UserRows
from vestige.layout import Layout, device_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip, RunningSum
from vestige.mechanism.text_padding import MASK, TextPadding, alike, ignored_for_certain
from vestige.privacy_engine.forward_call_arguments import Call
from vestige.privacy_engine.microbatch_queue import Microbatch
from vestige.privacy_engine.output_autograd_functions import Signals
from vestige.privacy_engine.row_labels import Tracking
from vestige.randomness.generator_states import device_draws, draws_kept, restore_device_draws
from vestige.tf32 import without_tf32

Uses = dict[str, list[Gradient]]
Lengths = Mapping[str, int]
"""Of texts among the arguments, by name."""
PLAIN = (*NUMBERS, type(None))


class NotReturned:
    """Stands for an output that is neither a tensor nor plain, such as a cache: a replayed pass has none of its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of an output that is no tensor: a captured pass does not keep it. Say "
            "PrivacyEngine(cuda_graphs=False) to train without CUDA graphs"
        )


@dataclass(frozen=True)
class Ending:
    """An output with a row for each example: which buffer it is in, its label (none if it is public, as drawn noise
    is), how a loss was to be reduced, and the name of the argument whose length its second axis has, if any."""

    buffer: int
    label: Rows | None
    reduction: str | None
    along: str | None


@dataclass
class Graphs:
    """The graphs of one size."""

    rows: int
    timer: Timer
    forward: Any
    backward: Any
    clip: Any
    outputs: list[Any]
    """What the pass gave, flat; an `Ending` where examples are."""
    tree: TreeSpec
    used: Collection[int]
    """The numbers of the buffers to which gradients come back."""


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
    came: Collection[int] = ()
    """The numbers of the buffers that hold what came back last."""
    read: Sequence[tuple[Tensor, int]] = ()
    """What the forward pass may have read, and how often it had been written to. It stays as long as the pass."""

    def outputs(self) -> tuple[list[Any], TreeSpec]:
        """What the forward pass gives, flat, of the examples alone and in memory of their own; beside each `Ending`."""
        self.graphs.timer.start()
        self.graphs.forward.replay()
        leaves = self.graphs.outputs
        found = [self._own(leaf).clone() if isinstance(leaf, Ending) else leaf for leaf in leaves]
        return found, self.graphs.tree

    def endings(self) -> list[tuple[int, Ending, Rows]]:
        """The outputs that depend on the examples, with their places and labels."""
        outputs = enumerate(self.graphs.outputs)
        return [(place, leaf, leaf.label) for place, leaf in outputs if isinstance(leaf, Ending) and leaf.label]

    def _own(self, ending: Ending) -> Tensor:
        end = self.owner.ends[ending.buffer][: self.rows]
        return end if ending.along is None else end[:, : self.lengths[ending.along]]

    def back(self, signals: Signals) -> Uses | None:
        """Take on what came back to the outputs; None if the gradients stay in the graphs' memory."""
        if self.owner.room.within is not self:
            raise ValueError("this backward pass goes through a forward pass of the model that is over")
        if any(each._version != version for each, version in self.read) or self.owner.owner.holds_examples():
            raise ValueError(
                "a parameter, or a tensor that the model reads, was written to between a forward pass and its backward "
                "pass, which are one: write to it after the step"
            )
        buffers, expected = [ending.buffer for _, ending, _ in self.endings()], self.graphs.used
        came = {buffer for buffer, signal in zip(buffers, signals, strict=True) if signal is not None}
        self.came, again = came, self.went_back or not came.issubset(expected)
        for (_, ending, _), signal in zip(self.endings(), signals, strict=True):
            if ending.buffer in came or ending.buffer in expected:
                self.owner.ends[ending.buffer][: self.graphs.rows].zero_()
                if signal is not None:
                    self._own(ending).copy_(signal)
        if not came.issubset(expected):
            self.owner.owner.forget()
        if again:
            return self.again()
        self.went_back = True
        self.graphs.backward.replay()
        return None

    def again(self) -> Uses:
        """The same pass, run again as it is: its gradients in factored form, of the examples alone."""
        return self.owner.again(self)

    def has_room(self, part: Microbatch) -> bool:
        """Whether all users of a part, if it is one of users, can be clipped here."""
        return sum(users for users, _ in part.users) <= self.owner.places(self.graphs.rows)

    def clip(self, part: Microbatch, into: RunningSum) -> None:
        if self.owner.room.within is not self:
            raise ValueError("this step is about a forward pass of the model that is over: run it again")
        into.settle()
        self.owner.weigh(part)
        self.graphs.clip.replay()
        self.graphs.timer.stop()
        into.lend(part.size, self.owner.total)

    def over(self) -> None:
        if self.owner.room.within is self:
            self.owner.room.within = None


class GraphMemoryPool:
    """The memory in which all graphs of a module work, one pass at a time."""

    def __init__(self) -> None:
        self.pool = new_pool()
        self._within: weakref.ref[Replay] | None = None
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, number: int, rows: int, like: Tensor) -> Tensor:
        """Room for as many rows of an output, whatever graph the pass is in."""
        size, held = rows * like[:1].numel() * like.element_size(), self._buffers.get(number)
        if held is None or held.numel() < size:
            held = self._buffers[number] = torch.zeros(size, dtype=torch.uint8, device=like.device)
        return held[:size].view(like.dtype).view(rows, *like.shape[1:])

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
    model: TrackedModel
    total: Callable[[], Tensor]
    """Where passes leave their clipped sums, each until the next."""
    users: RowCounts | None = None
    """Where users with several rows are clipped."""
    _forms: dict[Hashable, list[CapturedForm]] = field(default_factory=dict)
    """By what a form of call takes for granted, for several lengths of its texts."""
    _state: Hashable = None
    """In which state the module was met last: one that changes all the time is not captured."""
    _known: KnownModules = field(default_factory=dict)
    _costs: CaptureCosts = field(default_factory=CaptureCosts)
    _room: GraphMemoryPool | None = None
    _refused: set[Hashable] = field(default_factory=set)
    """Forms of calls that could not be captured."""
    _used: dict[int, set[int]] = field(default_factory=dict)
    """Of so many outputs, the places of those to which losses have sent gradients back."""
    _ran: bool = False
    _changes: int = 0
    """How often the module was another one after a capture."""
    _names: NamesRead = field(default_factory=NamesRead)
    _held: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Tensors that Python holds beside parameters and buffers, as the last pass has found them."""

    def __post_init__(self) -> None:
        certain = ignored_for_certain(self.module)
        self._padding = TextPadding.of(self.module) if certain else TextPadding(token=0, longest=0)
        self._pads: bool | None = True if certain else None
        """Whether texts may be padded further, which rests on what padding rests on anyway; None if not known yet."""

    def met(self, signals: Signals) -> None:
        """A backward pass has come to a pass of the model."""
        came = {place for place, signal in enumerate(signals) if signal is not None}
        self._used.setdefault(len(signals), set()).update(came)

    def used(self, reductions: Sequence[str | None]) -> Collection[int]:
        """The places of the outputs that losses use: as they did before; else the model's own loss, if there is one. Of
        logits beside a loss the gradient is as large as they are, and as much work."""
        places = range(len(reductions))
        return self._used.get(len(reductions)) or [at for at in places if reductions[at] is not None] or places

    def forget(self) -> None:
        """Losses use another output now: later passes are captured anew."""
        self._forms.clear()
        self._costs = CaptureCosts()

    def begin(
        self, forward: Callable[..., Any], call: Call, label: Rows, modules: Sequence[nn.Module]
    ) -> Replay | None:
        """This pass in the memory of graphs, captured if need be; None if it is to run as it is."""
        with unseen_by_functions():
            asked = self._asked(forward, call, label)
            if asked is None:
                return None
            device, size, kinds = device_of(self.module), self._size(label.count), self._kinds(asked, ())
        if kinds in self._refused:
            return None
        try:
            return self._begin(asked, modules, size)
        except (NotApart, NotCapturable, RuntimeError) as problem:
            give_back(device)
            self._refused.add(kinds)
            why = (str(problem) or type(problem).__name__).splitlines()[0]
            warnings.warn(f"the model's passes cannot be captured ({why}): they run launch by launch", stacklevel=4)
            return None

    def _asked(self, forward: Callable[..., Any], call: Call, label: Rows) -> Asked | None:
        """The call, if graphs can answer it."""
        device = device_of(self.module)
        if not self.sizes or not capturable(device) or self._size(label.count) > LARGEST_SUM or _hooked(self.module):
            return None
        if self._room is not None and self._room.within is not None:
            return None
        if top_hooks(True) is not None:
            return None  # what is saved of the call is kept elsewhere, or computed again (checkpointing)
        if any(not isinstance(leaf, (Tensor, *PLAIN)) for leaf in call.leaves):
            return None
        tensors = {place: leaf for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
        if any(leaf.device != device for leaf in tensors.values()):
            return None  # what lies on the host is read there when a pass is captured, and not again
        if not all(self._rows_first(leaf, label.count) for leaf in tensors.values()):
            return None
        names = {name: place for place, name in call.names(forward).items() if place in tensors}
        return Asked(forward, call, label, names)

    def _rows_first(self, leaf: Tensor, rows: int) -> bool:
        """Whether an argument has either nothing of the examples, or each of them once, in order, along its first axis:
        a graph's buffers are filled and padded along that. Steps of time, or copies of an example, that lay there would
        be clipped as if they were examples."""
        own = self.tracking.label(leaf)
        return not isinstance(own, Rows) or ((own.axis, own.inner, own.first) == (0, 1, 0) and len(leaf) == rows)

    def _begin(self, asked: Asked, modules: Sequence[nn.Module], size: int) -> Replay | None:
        self._room = self._room or GraphMemoryPool()
        if not self._ran:  # models may keep at their first pass that they had one: graphs are known by their state then
            self._ran = True
            with self._names.watched():
                CapturedForm(self, asked, {}, asked.rows).run()
        if self._pads is None and MASK in asked.names:
            self._pads = self._same_when_padded(asked)
        to = self._padding.lengths(asked.texts) if self._pads else {}
        with unseen_by_functions():
            self._meet(asked)
            full = asked.without_padding(to)
            state = self._state_of(modules)
        if self.holds_examples():
            return None
        stays, self._state = state == self._state, state
        key = self._kinds(asked, [asked.names[name] for name in to]), state, full
        forms = self._forms.get(key, [])
        fitting = [form for form in forms if form.fits(asked.rows, to)]
        form = min(fitting, key=lambda each: each.work(asked.rows), default=None)
        if form is not None:
            share = size * max(1, sum(to.values())) / form.work(asked.rows)
            capture = self._costs.worth((key, *to.values(), size), form.seconds(asked.rows), share)
        else:
            capture = not self._costs.count or (self._costs.count < MOST_GRAPHS and stays)
        if capture:
            form = next((each for each in forms if each.to == to and each.most >= size), None)
            if form is None:
                form = CapturedForm(self, asked.padded(self._padding, to), to, max(size, self.sizes[0]), full)
                self._forms[key] = [*forms, form]
                size = max(size, self.sizes[1] if len(self.sizes) > 1 else size)  # for most batches of this length
            first = not self._costs.count and size <= self.sizes[0]
            with buffers_kept(self.module):
                self._costs.capture(ahead(self.sizes) if first else [size], form.capture)
            with unseen_by_functions():
                if self._state_of(modules) != state:  # of a cache that is being filled it is another one once more
                    del self._forms[key]
                    self._changes += 1
                    if self._changes > MOST_CHANGES:
                        raise NotCapturable("the model changes what it holds in each of its passes")
                    return None
        return None if form is None else form.begin(asked, asked.padded(self._padding, form.to).call.leaves)

    def _state_of(self, modules: Sequence[nn.Module]) -> Hashable:
        """What graphs are known by, of all that is no argument."""
        tensors: list[Tensor] = []
        own = state_fingerprint(self.module, modules=modules, known=self._known, tensors=tensors)
        state = precision(), own, self._names.state(tensors)
        self._held = [weakref.ref(tensor) for tensor in tensors]
        return state

    def holds_examples(self) -> bool:
        """Whether examples are in a tensor that a graph may read, and that is no part of the model."""
        held = (each() for each in self._held)
        return any(tensor is not None and self.tracking.label(tensor) is not None for tensor in held)

    def read(self) -> list[tuple[Tensor, int]]:
        """Parameters, and tensors beside them, with how often they have been written to."""
        held = (each() for each in self._held)
        tensors = [*self.module.parameters(), *(each for each in held if each is not None)]
        return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def _size(self, rows: int) -> int:
        """Of the graph that suits so many rows: one of those that were announced, or more."""
        size = next((size for size in reversed(self.sizes) if size >= rows), padded_size(rows))
        return size if self.users is None else self.users.whole(size)

    def _meet(self, asked: Asked) -> None:
        """A model of the user's own has taken texts of this length; how long they may be is not known otherwise."""
        if not ignored_for_certain(self.module) and MASK in asked.names:
            longest = max(self._padding.longest, asked.texts[MASK].shape[-1])
            self._padding = replace(self._padding, longest=longest)

    def _same_when_padded(self, asked: Asked) -> bool | None:
        """Whether the texts of these rows, padded further, give the same outputs, nothing being drawn; None if they are
        no shorter than those before."""
        lengths, to = self._padding.lengths(asked.texts), self._padding.further(asked.texts)
        if not to:
            return None
        own = {name: asked.texts[name].shape[1] for name in lengths}
        outputs = []
        modes = [(module, module.training) for module in self.module.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with without_tf32():
                for each in (own, to):
                    form = CapturedForm(self, asked.padded(self._padding, each), each, asked.rows)
                    outputs.append(form.outputs())
        finally:
            for module, training in modes:
                module.training = training
        return all(alike(a, b[tuple(map(slice, a.shape))]) for a, b in zip(*outputs, strict=True))

    def _kinds(self, asked: Asked, texts: Collection[int]) -> Hashable:
        """What a graph takes for granted of a call: all but the length of texts and the number of rows."""
        kinds = list[Hashable]()
        for place, leaf in enumerate(asked.call.leaves):
            if isinstance(leaf, Tensor):
                rows = isinstance(self.tracking.label(leaf), Rows)
                kinds.append((() if place in texts else leaf.shape[rows:], leaf.dtype, rows))
            else:
                kinds.append((type(leaf), leaf))
        return asked.call.tree, tuple(kinds)


@dataclass(frozen=True, eq=False)
class Asked:
    """SENSITIVE: a call of the user's, which graphs are to answer."""

    forward: Callable[..., Any]
    call: Call
    label: Rows
    names: Mapping[str, int]
    """Where its tensors are, by the names of the arguments."""

    @property
    def rows(self) -> int:
        return self.label.count

    @property
    def texts(self) -> dict[str, Tensor]:
        return {name: self.call.leaves[place] for name, place in self.names.items()}

    def padded(self, padding: TextPadding, to: Lengths) -> Asked:
        if not to:
            return self
        leaves = list(self.call.leaves)
        with unseen():
            for name, leaf in padding.pad(self.texts, to).items():
                leaves[self.names[name]] = leaf
        return replace(self, call=Call(leaves, self.call.tree))

    def without_padding(self, to: Lengths) -> bool:
        """Whether no mask leaves anything out, at these lengths."""
        masks = [leaf for name, leaf in self.texts.items() if name.endswith(MASK)]
        longer = any(self.texts[name].shape[1] != length for name, length in to.items())
        return bool(masks) and not longer and all(map(is_full, masks))


class CapturedForm:
    """The graphs of one form of call."""

    def __init__(self, owner: CapturedPasses, asked: Asked, to: Lengths, most: int, full: bool = False) -> None:
        """For texts of the lengths `to` and at most so many rows; `full`: no mask leaves anything out."""
        assert owner._room is not None
        self.owner, self.room, self.to, self.most = owner, owner._room, dict(to), most
        self._forward, self._full, call, label = asked.forward, full, asked.call, asked.label
        self.total, self.device = owner.total(), device_of(owner.module)
        tensors = [(place, leaf) for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        padded = {asked.names[name] for name in to}
        self._rows = [p for p, leaf in tensors if p in padded or isinstance(owner.tracking.label(leaf), Rows)]
        self._leaves = list(call.leaves)
        for place, leaf in tensors:
            shape = (most, *leaf.shape[1:]) if place in self._rows else leaf.shape
            self._leaves[place] = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        self._tree, self._batch, self._first = call.tree, label.batch, label.count
        self._load(call.leaves)
        self.ends: list[Tensor] = []
        self._count, self._places = torch.zeros((), device=self.device), torch.arange(most, device=self.device)
        self._rows_of_users = torch.zeros(self.places(most), dtype=torch.long, device=self.device)
        self._graphs: list[Graphs] = []
        self._public = False
        """Whether an output with a row for each example depends on none."""
        self._point = {name: p.detach() for name, p in owner.layout.parameters(owner.module).items()}
        self._live: tuple[list[tuple[Tensor | GradientEdge | None, torch.dtype]], Uses] | None = None

    def fits(self, rows: int, lengths: Lengths) -> bool:
        return any(graphs.rows >= rows for graphs in self._graphs) and all(
            self.to[name] >= length for name, length in lengths.items()
        )

    def _smallest(self, rows: int) -> Graphs:
        return min((graphs for graphs in self._graphs if graphs.rows >= rows), key=lambda graphs: graphs.rows)

    def work(self, rows: int) -> int:
        """Positions, or rows where there are no texts, that a pass of so many rows goes through."""
        return self._smallest(rows).rows * max(1, sum(self.to.values()))

    def seconds(self, rows: int) -> float:
        """What such a pass takes; zero if that is not known yet."""
        return self._smallest(rows).timer.seconds

    def begin(self, asked: Asked, leaves: Sequence[Any]) -> Replay:
        """`leaves` are the call's, padded to the lengths of this form."""
        self._load(leaves)
        with unseen():
            self._count.fill_(asked.rows)
        draws = device_draws(self.device)
        lengths = {name: leaf.shape[1] for name, leaf in asked.texts.items() if leaf.dim() > 1}
        replay = Replay(self, self._smallest(asked.rows), asked.rows, lengths, draws)
        replay.read = self.owner.read()
        self.room.within = replay
        return replay

    def _load(self, leaves: Sequence[Any]) -> None:
        with unseen():
            for place, leaf in enumerate(leaves):
                if place in self._rows:
                    fill_rows(self._leaves[place], leaf)
                elif isinstance(leaf, Tensor):
                    self._leaves[place].copy_(leaf)

    # --- capturing ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """The first rows alone, proved; nothing is left of it. Raises `NotCapturable` if the model keeps something."""
        with self._nothing_kept(), without_modes(), draws_kept(self.device):  # those of the loop
            self._run_all(self._first)
        give_back(self.device)

    def outputs(self) -> list[Tensor]:
        """What the forward pass gives of the first rows, proved."""
        with without_modes():
            self._run_forward(self._first)
        self._live = None
        return [end.clone() for end in self.ends]

    def capture(self, rows: int) -> None:
        """Raises where that cannot be."""
        self._count.fill_(rows)
        with self._nothing_kept(), without_modes(), draws_kept(self.device):
            tracker = self.owner.tracking.tracker
            capture_proved(lambda: self._capture(rows), lambda: self._run_all(rows), self.device, tracker)
            if self._public and rows > 1:  # Is it as long as the batch by chance? Raises if so.
                self._run_forward(rows - 1)
                self._live = None

    def _nothing_kept(self) -> AbstractContextManager[None]:
        """What the loop takes from the model beside its outputs would be that of the pass that was captured."""
        return self.owner.tracking.labels.nothing_kept(NotCapturable("the model keeps activations of its passes"))

    def _capture(self, rows: int) -> None:
        shown: list[tuple[list[Any], TreeSpec]] = []
        try:
            forward = captured(lambda: shown.append(self._run_forward(rows)), self.room.pool, self.device)
            kept, tree = shown[0]
            used = self._used(kept)
            backward = captured(lambda: self._run_backward(rows, used), self.room.pool, self.device)
            clip = captured(lambda: self._run_clip(rows), self.room.pool, self.device)
        finally:  # activations of a capture that broke off would lie beside those of the next one
            self._live = None
        self._graphs.append(Graphs(rows, Timer(self.device), forward, backward, clip, kept, tree, used))

    def _run_all(self, rows: int) -> None:
        try:
            kept, _ = self._run_forward(rows)
            for end in self.ends:
                end[:rows].fill_(1 / rows)
            self._run_backward(rows, self._used(kept))
            self._run_clip(rows)
        finally:
            self._live = None

    def _run_forward(self, rows: int) -> tuple[list[Any], TreeSpec]:
        """The forward pass on the rows in the buffers; its outputs are copied into `ends`."""
        tracking, uses = self.owner.tracking, Uses()
        leaves = [leaf[:rows] if place in self._rows else leaf for place, leaf in enumerate(self._leaves)]
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for place in self._rows:
            tracking.tracker.label_rows(leaves[place], rows, self._batch)

        def deliver(name: str, found: Sequence[Gradient]) -> None:
            uses.setdefault(name, []).extend(found)

        args, kwargs = tree_unflatten(leaves, self._tree)
        with as_captured(tracking.tracker, self._full), tracking.model(fresh=True) as tracker:
            tracked = self.owner.model.tracked(tracker, self._point, self._batch, deliver)
            versions = [leaves[place]._version for place in self._rows]
            with tracked, torch.enable_grad(), _without_cache(self.device):
                outputs = self._forward(*args, **kwargs)
            if versions != [leaves[place]._version for place in self._rows]:
                raise NotCapturable("the model writes to its arguments")
            require_unwritten(self.owner.module, tracker.labels, self._point)
            if tracker.kept_elsewhere:
                raise NotCapturable("activations are kept elsewhere")
            found, tree = tree_flatten(outputs)
            with unseen_by_functions():
                kept = self._kept(found, rows)
        held = [found[place] for place, leaf in enumerate(kept) if isinstance(leaf, Ending)]
        most = len(self._places)
        self.ends = self.ends or [self.room.buffer(number, most, each) for number, each in enumerate(held)]
        for end, output in zip(self.ends, held, strict=True):
            end[:rows].copy_(output.detach())
        edges = [_edge(output) if output.requires_grad else None for output in held]
        self._live = list(zip(edges, (output.dtype for output in held), strict=True)), uses
        return kept, tree

    def _used(self, kept: Sequence[Any]) -> Collection[int]:
        """The numbers of the buffers to which losses are expected to send gradients back."""
        labelled = [leaf for leaf in kept if isinstance(leaf, Ending) and leaf.label]
        return {labelled[place].buffer for place in self.owner.used([each.reduction for each in labelled])}

    def _kept(self, found: Sequence[Any], rows: int) -> list[Any]:
        """What a replay gives of the outputs. Raises `NotCapturable` if one is a tensor without rows: padding would be
        a part of it."""
        kept: list[Any] = []
        tracker, buffers = self.owner.tracking.tracker, 0
        for leaf in found:
            if not isinstance(leaf, Tensor):
                kept.append(leaf if isinstance(leaf, PLAIN) else NotReturned())
                continue
            label = tracker.labels.get(leaf)
            public = label is None and not leaf.requires_grad  # noise that was drawn, say
            first = isinstance(label, Rows) and (*label[:2], *label[3:]) == (0, 1, self._batch, 0)
            if not (public or first) or not leaf.dim() or len(leaf) != rows or not leaf.is_floating_point():
                raise NotCapturable("an output of the model has no row for each example")
            assert not isinstance(label, Mixed | Summed)
            self._public = self._public or public
            along = next((name for name, own in self.to.items() if leaf.dim() > 1 and leaf.shape[1] == own), None)
            kept.append(Ending(buffers, label, tracker.reduction(leaf), along))
            buffers += 1
        if not any(isinstance(each, Ending) and each.label for each in kept):
            raise NotCapturable("no output of the model has a row for each example")
        return kept

    def _run_backward(self, rows: int, used: Collection[int]) -> Uses:
        """From the outputs in the buffers `used`, in which is what came back to them."""
        assert self._live is not None
        held, uses = self._live
        tracker = self.owner.tracking.tracker
        padding = self._places[:rows] >= self._count
        outputs: list[Any] = []
        back: list[Tensor] = []
        for number, (end, (edge, dtype)) in enumerate(zip(self.ends, held, strict=True)):
            if edge is None or number not in used:
                continue
            # Copied: gradients of the last layers are made of it, and are still there when others come back.
            signal = blanked(end[:rows], padding, in_place=True).to(dtype, copy=True)
            outputs.append(edge)
            back.append(signal)
            tracker.label_rows(signal, rows, self._batch)
        labels, factors = self.owner.tracking.labels, dict(self.owner.tracking.labels.held)
        with self.owner.tracking.model(fresh=True), self.owner.model.installed({}):
            tracker.spans.append(EVERYWHERE)
            torch.autograd.grad(outputs, [ANCHOR], back, allow_unused=True)
            tracker.spans.clear()
        labels.held = factors  # nobody's code runs before these are clipped
        labels.prune()  # what is known of sums is large, and would lie beside the next capture's
        return uses

    def _run_clip(self, rows: int) -> None:
        assert self._live is not None
        self.total.zero_()
        with torch.no_grad(), full_precision(self.total):
            gradients = {name: combine(parts) for name, parts in self._live[1].items()}
        clip, layout, users = self.owner.clip, self.owner.layout, self.owner.users
        if users is None:
            add_weighted(gradients, clip, layout, self.total, rows, self._places[:rows] < self._count)
            return
        counts = self._rows_of_users[: self.places(rows)]
        own = UserRows(counts, rows, users.most, users.equal)
        add_weighted(gradients, clip, layout, self.total, len(counts), counts > 0, own)

    def places(self, rows: int) -> int:
        """How many users can be clipped in a graph of so many rows; none where rows are."""
        return 0 if self.owner.users is None else self.owner.users.places(rows)

    def weigh(self, part: Microbatch) -> None:
        """Rows beyond the part's own have no weight: they fill up one that has fewer than two, or are nobody's."""
        self._count.fill_(part.size)
        if self.owner.users is None:
            return
        counts = part.rows_of_each()
        self._rows_of_users.zero_()[: len(counts)].copy_(counts, non_blocking=True)

    def again(self, replay: Replay) -> Uses:
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), without_modes():
            restore_device_draws(replay.draws, self.device)
            signals = [end.clone() for end in self.ends]
            with buffers_kept(self.owner.module):
                self._run_forward(replay.graphs.rows)
                for end, signal in zip(self.ends, signals, strict=True):
                    end.copy_(signal)
                found = self._run_backward(replay.graphs.rows, replay.came)
            self._live = None
        few = itemgetter(slice(replay.rows))
        return {name: [change(gradient, few) for gradient in uses] for name, uses in found.items()}


def _edge(output: Tensor) -> Tensor | GradientEdge:
    """Where a backward pass begins: of logits, nothing but what the loss saved is needed any more. The edges of older
    versions of torch do not keep the graph of an autograd.Function."""
    return get_gradient_edge(output) if "ownership_token" in GradientEdge._fields else output


def _hooked(module: nn.Module) -> bool:
    """Whether submodules have hooks, which a replay would skip."""
    inner = (each for each in module.modules() if each is not module)
    return any(not _harmless(hook) for each in inner for store in HOOKS for hook in getattr(each, store).values())


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
