"""Which passes are recorded, and when? The first form of call at once, others when they come again and again; texts of
other lengths are padded to one of a few.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from vestige.devices import tf32_convolutions, tf32_products
from vestige.engines.recorded.looks import Otherwise
from vestige.engines.recorded.recording import MOST_FORMS, PATIENCE
from vestige.engines.recorded.steady import Unsteady, standing
from vestige.layout import Layout, device_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip
from vestige.privacy_engine.calls import Call, CallForm
from vestige.privacy_engine.recorded.padding import (
    SHORTEST,
    Long,
    Stretch,
    most_positions,
    positions,
    rounded_up,
    stretched,
    takes_no_notice,
)
from vestige.privacy_engine.recorded.recordings import PLAIN, Recordings, Replay, Room

MOST_MET = 1000
"""Forms and lengths of calls that are remembered: a model that is another at every pass has no end of them."""
MOST_LENGTHS, NEAR, AGAIN, FEWER = 8, 16, 2, 2
"""Lengths to which texts are padded, and how often the longest may become longer; how many positions more than they
have, or a quarter; how often a length is met before it is recorded, and every which size then is."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A pass that somebody asks for."""

    forward: Callable[..., Any]
    form: CallForm
    call: Call
    replaced: bool
    """Whether the model's own loss is replaced by another."""


@dataclass
class Texts:
    """What is known of calls that differ in the length of their texts alone."""

    room: Room
    longest: Long = (0, 0)
    """Of all that were met."""
    most: int = 0
    """How long they may be at least, as far as the model tells: to pad further might be more than it takes."""
    lengths: dict[Long, Recordings] = field(default_factory=dict)
    tried: bool = False
    unnoticed: dict[tuple[Long, Long], bool] = field(default_factory=dict)
    """Whether the model takes no notice of texts of one length that are padded to another."""
    grown: int = 0
    """How often longer ones were made, or tried, than all before."""
    refused: float = inf
    """Positions, from which on they could not be recorded."""
    failed: bool = False
    """Whether one length could not be recorded: then no other is tried."""
    _stretch: Stretch | None = None

    @property
    def stretch(self) -> Stretch | None:
        return self._stretch

    @stretch.setter
    def stretch(self, found: Stretch | None) -> None:
        self._stretch = found
        for each in self.lengths.values():
            each.stretch = found

    def at_least(self, long: Long, near: bool = False) -> Recordings | None:
        """The shortest recordings that are long enough; `near` ones, that are not much longer."""

        def fits(own: int, mine: int) -> bool:
            return own <= mine and (not near or mine <= own + max(own // 4, NEAR))

        fitting = [each for each in self.lengths if all(map(fits, long, each))]
        return self.lengths[min(fitting, key=sum)] if fitting else None


@dataclass
class Recorder:
    """Which passes of a module are recorded: none on a CPU, none where something speaks against it."""

    module: nn.Module
    layout: Layout
    clip: Clip
    sizes: Sequence[int]
    """Of batches, largest first; none if nothing is to be recorded."""
    total: Callable[[], Tensor]
    """Where passes leave their clipped sums, each until the next."""
    _known: dict[Hashable, Recordings | None] = field(default_factory=dict)
    _met: dict[Hashable, int] = field(default_factory=dict)
    _texts: dict[Hashable, Texts] = field(default_factory=dict)
    _forms: int = 0
    """How many were recorded as they came, not padded to some length."""
    _told: bool = False
    """Whether the model hears that it is recorded, rather than looking at what differs from batch to batch."""

    def begin(self, asked: Asked, rows: int, modules: Sequence[nn.Module]) -> Replay | None:
        """This pass in the memory of recordings, made if need be; None if it is to run as it is. `modules` are all of
        the module, as it is now."""
        form, call = asked.form, asked.call
        if not self.sizes or rows > self.sizes[0] or not can_record(self.module, self.sizes[0]):
            return None
        texts, long = positions(form, call) or ((), None)
        key = self._key(asked, modules, texts)
        if key is None:
            return None
        found = self._exactly(key, asked) if long is None else self._as_long(key, asked, long)
        try:
            return None if found is None else found.begin(call, rows, long)
        except Otherwise:  # batches are not all alike in that: from now on the model goes a way for all
            del found
            self._told, self._forms = True, 0
            self._known.clear()
            self._texts.clear()
        return self.begin(asked, rows, modules)

    def _exactly(
        self, key: Hashable, asked: Asked, room: Room | None = None, long: Long | None = None
    ) -> Recordings | None:
        """The recordings of these shapes; the first are made at once, others when they are met again and again."""
        if key not in self._known:
            if room is not None and room.within is not None:
                return None  # whose memory recording would use
            if key not in self._met and len(self._met) >= MOST_MET:
                return None
            self._met[key] = self._met.get(key, 0) + 1
            if self._forms and (self._met[key] < PATIENCE or self._forms >= MOST_FORMS):
                return None
            self._forms += 1
            self._known[key] = self._recordings(asked, self.sizes, room or self._room(), None, long)
        return self._known[key]

    def _as_long(self, key: Hashable, asked: Asked, long: Long) -> Recordings | None:
        """Recordings for texts that are so long: just so, or longer, if the model takes no notice of padding."""
        if key not in self._texts and len(self._texts) >= MOST_MET:
            return None
        texts = self._texts.get(key) or self._texts.setdefault(key, Texts(self._room()))
        texts.longest = max(texts.longest[0], long[0]), max(texts.longest[1], long[1])
        if texts.room.spoiled:  # they are made again, and what is tried out beside them lies elsewhere
            self._let_go(key, texts)
            texts.room = self._room(lends=False)
        if texts.failed or long in texts.lengths:
            return texts.lengths.get(long)
        if texts.lengths and not texts.tried and min(filter(None, long), default=0) >= SHORTEST:
            labelled = "labels" in asked.call.names.values()
            if asked.replaced or not labelled:  # a label that is ignored is known to be
                texts.stretch = stretched(self.module, asked.forward, asked.form, asked.call)
            texts.tried, texts.most = True, most_positions(self.module)
        if texts.stretch is None:
            found = self._exactly((key, long), asked, texts.room, long)
            self._retry_if_spoiled((key, long), texts)
            texts.failed = found is None and (key, long) in self._known
            if found is not None:
                texts.lengths[long] = found
            return found
        near, longer = texts.at_least(long, near=True), texts.at_least(long)
        if near is None and texts.room.within is None:
            near = self._padded(key, asked, texts, self._rounded(texts, long, longer is None), longer is None)
        found = near or longer
        return found if found is not None and self._unnoticed(asked, texts, long, found) else None

    def _rounded(self, texts: Texts, long: Long, longest: bool) -> Long:
        """To how many positions texts are padded: no more than the model is known to take, and if they are the longest,
        enough for all."""
        enough = [max(lengths) if longest else 0 for lengths in zip(*texts.lengths, (0, 0), strict=True)]
        rounded = (min(rounded_up(own), max(met, texts.most)) for own, met in zip(long, texts.longest, strict=True))
        read, written = map(max, rounded, enough)
        return (read, written) if read + written < texts.refused else long

    def _unnoticed(self, asked: Asked, texts: Texts, long: Long, found: Recordings) -> bool:
        """Whether texts of this length may be padded to that of the recordings: tried once for each two."""
        assert texts.stretch is not None
        assert found.long is not None
        two = long, found.long
        if two not in texts.unnoticed:
            given = self.module, asked.forward, asked.form, asked.call, texts.stretch, *two
            texts.unnoticed[two] = long == found.long or takes_no_notice(*given)
        return texts.unnoticed[two]

    def _padded(self, key: Hashable, asked: Asked, texts: Texts, long: Long, longest: bool) -> Recordings | None:
        """Recordings of fewer sizes, to which texts are padded. What is shorter finds room in the memory of what is
        longer, but not the other way round: before the longest are made, all are let go of, to be made again when they
        are needed."""
        mine = (key, long)
        self._met[mine] = self._met.get(mine, 0) + 1
        too_many = bool(texts.lengths) and (texts.grown if longest else len(texts.lengths)) >= MOST_LENGTHS
        if mine in self._known or self._met[mine] < AGAIN or too_many or sum(long) >= texts.refused:
            return None
        if longest:
            self._let_go(key, texts)
            texts.room, texts.grown = self._room(texts.room.lends), texts.grown + 1
        found = self._known[mine] = self._recordings(asked, self.sizes[::FEWER], texts.room, texts.stretch, long)
        if found is not None:
            texts.lengths[long] = found
        elif longest:
            texts.refused, texts.most = sum(long), 0  # and none beyond what was met
        self._retry_if_spoiled(mine, texts)
        return found

    def _retry_if_spoiled(self, mine: Hashable, texts: Texts) -> None:
        """What could not be recorded because something stayed in the memory of others may be recorded elsewhere."""
        if texts.room.spoiled:
            self._known.pop(mine, None)

    def _let_go(self, key: Hashable, texts: Texts) -> None:
        for each in texts.lengths:
            del self._known[key, each]
        texts.lengths.clear()

    def _room(self, lends: bool = True) -> Room:
        return Room(device_of(self.module), lends)

    def _key(self, asked: Asked, modules: Sequence[nn.Module], texts: Collection[int] = ()) -> Hashable | None:
        """What a recording takes for granted, but for the length of texts; None if it cannot be told."""
        form, call = asked.form, asked.call
        kinds: list[Hashable] = []
        for place, leaf in enumerate(call.leaves):
            if place in texts:
                kinds.append((leaf.dtype, leaf.device))
            elif isinstance(leaf, Tensor):
                kinds.append((leaf.shape[1:] if place in form.batched else leaf.shape, leaf.dtype, leaf.device))
            elif isinstance(leaf, PLAIN):
                kinds.append(leaf)
            else:
                return None
        kind = device_of(self.module).type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        kept = standing(self.module, modules=modules)
        return id(form), asked.replaced, tuple(kinds), autocast, tf32_products(), tf32_convolutions(), kept

    def _recordings(
        self, asked: Asked, sizes: Sequence[int], room: Room, stretch: Stretch | None, long: Long | None
    ) -> Recordings | None:
        forward, form, call = asked.forward, asked.form, asked.call
        # What lies on the host is read there when a pass is recorded, and not again.
        elsewhere = any(isinstance(leaf, Tensor) and leaf.device != device_of(self.module) for leaf in call.leaves)
        if form.rehearsal.changing or elsewhere or _hooked(self.module):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = self.module, forward, self.layout, self.clip, form, call, sizes, self.total()
                return Recordings(*made, room, stretch, long, asked.replaced, self._told)
        except Exception as problem:  # of somebody else's model, anything
            gc.collect()
            if not isinstance(problem, Unsteady):
                why = str(problem).splitlines()[0]
                warnings.warn(f"the model's passes cannot be recorded ({why}): they run launch by launch", stacklevel=2)
            return None


def can_record(module: nn.Module, rows: int) -> bool:
    here = device_of(module).type == "cuda"
    return here and rows <= LARGEST_SUM and not torch.cuda.is_current_stream_capturing()


def _hooked(module: nn.Module) -> bool:
    """Whether somebody waits inside the model, and would wait in vain in a replay."""
    stores = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    inner = (each for each in module.modules() if each is not module)
    hooks = (hook for each in inner for store in stores for hook in getattr(each, store).values())
    return any(not _harmless(hook) for hook in hooks)


def _harmless(hook: Any) -> bool:
    """transformers' own hooks hand activations to the outputs, where those are asked for, and make what frozen
    embeddings give part of the graph, for checkpointing; so do peft's."""
    module, name = getattr(hook, "__module__", None) or "", getattr(hook, "__name__", "")
    requires = name.startswith("make_inputs_require_grad") and module.split(".")[0] in ("transformers", "peft")
    return requires or module == "transformers.utils.output_capturing"
