"""How does a pass of the user's shed its launches? On a GPU it is recorded at a few sizes, ahead, and replayed.

The model's forward pass, its backward pass and the clipping that follows are a recording each, because what lies
between them is the user's. All recordings of a form of call work in the same memory, so only one pass at a time can be
in it; while one is, others run as they are, and so does whatever was not foreseen: a second backward pass through a
recorded forward pass, or a second pass about the same examples. Texts that differ in length from batch to batch are
padded to one of a few lengths, if the model takes no notice of that (`lengths.stretched`).
"""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.devices import tf32_convolutions, tf32_products
from vestige.engines.bookkeeping import add_weighted
from vestige.engines.per_example.expressions import ANCHOR, Pass, full_precision
from vestige.engines.per_example.gradients import Gradient, change, combine
from vestige.engines.per_example.kernels import blanked
from vestige.engines.recorded.host_copies import HostCopies, Sent
from vestige.engines.recorded.recording import MOST_FORMS, PATIENCE, SECONDS, lent, pool_for, recorded
from vestige.engines.recorded.steady import Unsteady, host_draws, require_steady, restore_host_draws, standing
from vestige.engines.rehearsal.recorded_ways import as_if_recorded
from vestige.layout import Layout, device_of
from vestige.mechanism.clipping import LARGEST_SUM, Clip, RunningSum
from vestige.privacy_engine.calls import Call, CallForm
from vestige.privacy_engine.lengths import (
    SHORTEST,
    Long,
    Stretch,
    most_positions,
    positions,
    rounded_up,
    stretched,
    takes_no_notice,
)

Uses = dict[str, list[Gradient]]
MOST_MET = 1000
"""Forms and lengths of calls that are remembered: a model that is another at every pass has no end of them."""
MOST_LENGTHS, NEAR, AGAIN, FEWER = 8, 16, 2, 2
"""Lengths to which texts are padded, and how often the longest may become longer; how many positions more than they
have, or a quarter; how often a length is met before it is recorded, and every which size then is."""
FEW = 2
"""Rows that take hardly any memory."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Withheld:
    """Stands for an output that is neither a tensor nor plain, such as a cache: a replayed pass has none of its own."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of an output that is no tensor: a recorded pass does not keep it. Say "
            "PrivacyEngine(record=False) to train without recordings"
        )


@dataclass(frozen=True)
class End:
    """Stands for an output that holds the examples: which of `Recordings.ends` it is."""

    index: int


class Room:
    """The memory in which the recordings of a form of call work, one pass at a time."""

    def __init__(self, device: torch.device) -> None:
        self.pool = pool_for(self, device) if device.type == "cuda" else None
        self.used = False
        """Whether there are recordings in it."""
        self._device = device
        self._within: weakref.ref[Replay] | None = None
        self._shelves: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def within(self) -> Replay | None:
        """The pass that is in the memory, as long as somebody can come back to it."""
        return None if self._within is None else self._within()

    @within.setter
    def within(self, replay: Replay | None) -> None:
        self._within = None if replay is None else weakref.ref(replay)

    def lent(self) -> AbstractContextManager[None]:
        """Inside, work is done in this memory, though it is not recorded."""
        return nullcontext() if self.pool is None else lent(self.pool, self._device)

    def shelf(self, number: int, like: Tensor, rows: int) -> Tensor:
        """For so many rows of an output: memory that recordings of other lengths use too, if they are not longer."""
        size, key = rows * like[:1].numel(), (number, like.dtype)
        if key not in self._shelves or len(self._shelves[key]) < size:
            self._shelves[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self._shelves[key][:size].view(rows, *like.shape[1:])


@dataclass
class Tape:
    """The recordings of one size."""

    rows: int
    forward: Any
    backward: Any
    clip: Any
    outputs: list[Any]
    """What the pass gave, flat."""
    tree: TreeSpec


@dataclass(eq=False)
class Replay:
    """SENSITIVE: one pass of the user's in the memory of the recordings, from its forward pass until it is clipped."""

    recordings: Recordings
    tape: Tape
    rows: int
    long: Long | None
    """How long its texts are, where they are padded further."""
    draws: Tensor | None
    """The state of the GPU's generator before it."""
    went_back: bool = False

    def back(self, signals: Sequence[Tensor]) -> Uses | None:
        """What came back to the outputs; None if it stays in the recordings' memory, else the gradients."""
        if self.recordings.room.within is not self:
            raise ValueError("this backward pass goes through a forward pass of the model that is over")
        self.recordings.load_signals(signals, self.rows, self.long)
        if self.went_back:
            return self.unrolled()
        self.went_back = True
        self.tape.backward.replay()
        return None

    def outputs(self) -> Any:
        return self.recordings.outputs(self)

    def clip(self, examples: int, into: RunningSum) -> None:
        if self.recordings.room.within is not self:
            raise ValueError("this step is about a forward pass of the model that is over: run it again")
        into.settle()
        self.tape.clip.replay()
        into.lend(examples, self.recordings.total)

    def unrolled(self) -> Uses:
        """The same pass, run again as it is: its gradients in factored form, of the examples alone."""
        return self.recordings.again(self)

    def over(self) -> None:
        if self.recordings.room.within is self:
            self.recordings.room.within = None


class Recordings:
    """The recordings of one form of call, for batches of up to `sizes[0]` rows; and of one length, to which texts are
    padded where that makes no difference."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        layout: Layout,
        clip: Clip,
        form: CallForm,
        call: Call,
        sizes: Sequence[int],
        total: Tensor,
        room: Room,
        stretch: Stretch | None,
        long: Long | None,
        replaced: bool,
    ) -> None:
        """`total` is where a pass leaves its clipped sum. Where the model's own loss is `replaced`, nobody needs it."""
        self._replaced = replaced
        self.total, self.room, self.stretch, self.long = total, room, stretch, long
        self.module, self.layout, self._clip, self.form = module, layout, clip, form
        self._device = next(module.parameters()).device
        self._forward, self._tapes = forward, list[Tape]()
        self._inputs = [self._input(call, place, sizes[0]) for place in form.batched]
        self._fixed = [p for p, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and p not in form.batched]
        leaves = list(call.leaves)
        for place in self._fixed:
            leaves[place] = leaves[place].clone()
        self._call = Call(leaves, call.tree)
        self.ends: list[Tensor] = []
        self._places, self._count = torch.arange(sizes[0], device=self._device), torch.zeros((), device=self._device)
        self._live: tuple[Pass, list[Tensor], Uses] | None = None
        self.draws, self._sent = False, dict[int, Sent]()
        self._point = {name: p.detach() for name, p in layout.parameters(module).items()}
        self._record(sizes)

    # --- replaying ----------------------------------------------------------------------------------------------------

    def begin(self, call: Call, rows: int, long: Long | None) -> Replay | None:
        """The pass over this call, with texts so long, if it fits and the memory is free."""
        tape = next((tape for tape in reversed(self._tapes) if tape.rows >= rows), None)
        if tape is None or self.room.within is not None:
            return None
        long = None if long == self.long else long
        for mine, place in zip(self._inputs, self.form.batched, strict=True):
            leaf = call.leaves[place]
            if leaf.shape[1:] == mine.shape[1:]:
                mine[:rows].copy_(leaf)
            else:
                assert self.stretch is not None
                length = leaf.shape[1]
                mine[:rows, :length].copy_(leaf)
                mine[:rows, length:].fill_(self.stretch.values[place])
        for place in self._fixed:
            self._call.leaves[place].copy_(call.leaves[place])
        self._count.fill_(rows)
        draws = torch.cuda.get_rng_state(self._device) if self.draws else None
        replay = Replay(self, tape, rows, long, draws)
        self.room.within = replay
        return replay

    def _input(self, call: Call, place: int, rows: int) -> Tensor:
        """Where an argument of passes is put."""
        leaf = call.leaves[place]
        if self.stretch is not None and self.long is not None and place in self.stretch.sides:
            length = self.long[self.stretch.sides[place]]
            return torch.zeros(rows, length, dtype=leaf.dtype, device=leaf.device)
        return _buffer(leaf, rows)

    def _own(self, number: int, rows: int, long: Long | None) -> Tensor:
        """The part of an output that is the examples' own."""
        end, length = self.ends[number][:rows], self._length(number, long)
        return end if length is None else end[:, :length]

    def _length(self, number: int, long: Long | None) -> int | None:
        """How many positions of an output are the texts' own, where it has more."""
        side = None if long is None or self.stretch is None else self.stretch.outputs[number]
        return None if side is None or long is None else long[side]

    def outputs(self, replay: Replay) -> Any:
        """The outputs of the forward pass as the user gets them: of the examples alone, and in memory of their own."""
        replay.tape.forward.replay()
        leaves = replay.tape.outputs
        rows, long = replay.rows, replay.long
        found = [self._own(leaf.index, rows, long).clone() if isinstance(leaf, End) else leaf for leaf in leaves]
        return found[0] if replay.tape.tree.is_leaf() else tree_unflatten(found, replay.tape.tree)

    def load_signals(self, signals: Sequence[Tensor], rows: int, long: Long | None = None) -> None:
        for number, signal in enumerate(signals):
            self._own(number, rows, long).copy_(signal)
            if (length := self._length(number, long)) is not None:
                self.ends[number][:rows, length:].zero_()

    def again(self, replay: Replay) -> Uses:
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            if replay.draws is not None:
                torch.cuda.set_rng_state(replay.draws, self._device)
            rows = replay.tape.rows
            signals = [blanked(end[:rows], self._padding(rows)) for end in self.ends]
            self._run_forward(rows)
            found = self._run_backward(signals)
            self._live = None
            self.load_signals(signals, rows)
        few = itemgetter(slice(replay.rows))
        return {name: [change(gradient, few) for gradient in uses] for name, uses in found.items()}

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(self, sizes: Sequence[int]) -> None:
        """At every size, largest first, as long as there is time: what is smaller finds room in the memory of what is
        larger. Raises where the pass cannot be recorded."""
        start, host = time.monotonic(), host_draws()
        self._free()
        want = torch.zeros_like(self.total)
        with self._beside_others():
            self.draws = self._tried(sizes[0])
            tried = [sizes[0]]
            for rows in sizes[1:]:  # kernels are chosen, compiled and loaded before anything is recorded
                if time.monotonic() - start > SECONDS / 2:
                    break
                self._run_all(rows)
                tried.append(rows)
            draws = _device_draws(self._device)
            self._load_wanted(want, tried[-1], draws)
        self._free()
        self._tapes = [self._recorded(rows) for rows in tried]
        self.room.used = True
        self._require_alike(self._tapes[-1], draws, want)
        self._free()
        restore_host_draws(host)

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        """Where others are recorded, this is tried out in their memory. Whatever it leaves there, they would write
        over: what is made once is made before, elsewhere, and `Unsteady` is raised if more is left."""
        if not self.room.used or self._device.type != "cuda":
            yield
            return
        few = min(FEW, len(self._places))
        self._load_made_up(few)
        self._run_all(few)
        self._free()
        before = torch.cuda.memory_allocated(self._device)
        with self.room.lent():
            yield
        sent = {rows: [(host, there.cpu()) for host, there in each] for rows, each in self._sent.items()}
        self._sent.clear()
        self._free()
        if torch.cuda.memory_allocated(self._device) > before:
            raise Unsteady
        self._sent = {rows: [(host, there.to(self._device)) for host, there in each] for rows, each in sent.items()}

    def _tried(self, rows: int) -> bool:
        """Run once on made-up rows, unrecorded; whether the model draws numbers on the GPU. Raises `Unsteady`."""
        before = _device_draws(self._device)
        self._load_made_up(rows)
        require_steady(lambda: self._run_all(rows), self.module, self.total)
        drawn = not torch.equal(before, _device_draws(self._device))
        _restore_device_draws(before, self._device)
        return drawn

    def _load_made_up(self, rows: int) -> None:
        for mine, made in zip(self._inputs, self.form.made(rows, 5, self._inputs), strict=True):
            mine[:rows].copy_(made)
        self._count.fill_(rows)

    def _recorded(self, rows: int) -> Tape:
        shown: list[Any] = []
        sent = self._sent[rows]
        with HostCopies(self._device, sent, given=True) if sent else nullcontext():
            forward = recorded(lambda: shown.append(self._run_forward(rows)), self.room.pool, self._device)
            backward = recorded(lambda: self._run_padded_backward(rows), self.room.pool, self._device)
            clip = recorded(lambda: self._run_clip(rows), self.room.pool, self._device)
        self._live = None
        leaves, tree = tree_flatten(shown[0])
        places = {place: End(index) for index, place in enumerate(self.form.outputs)}
        kept = [places.get(place, leaf if isinstance(leaf, PLAIN) else Withheld()) for place, leaf in enumerate(leaves)]
        return Tape(rows, forward, backward, clip, kept, tree)

    def _load_wanted(self, want: Tensor, rows: int, draws: Tensor) -> None:
        """The clipped sum of made-up rows as the pass itself gives it, from such draws on."""
        self._load_made_up(rows)
        with as_if_recorded():
            self._run_forward(rows)
        self._load_made_up_signals(rows)
        uses = self._run_backward([end[:rows] for end in self.ends])
        add_weighted({name: combine(parts) for name, parts in uses.items()}, self._clip, self.layout, want, rows)
        self._live = None
        _restore_device_draws(draws, self._device)

    def _require_alike(self, tape: Tape, draws: Tensor, want: Tensor) -> None:
        """A replay gives what the pass itself gives, on made-up rows."""
        self._load_made_up(tape.rows)
        _restore_device_draws(draws, self._device)
        tape.forward.replay()
        self._load_made_up_signals(tape.rows)
        tape.backward.replay()
        tape.clip.replay()
        _restore_device_draws(draws, self._device)
        got = self.total
        if not bool(torch.linalg.vector_norm(got - want) <= 1e-2 * torch.linalg.vector_norm(want) + 1e-12):
            raise Unsteady

    def _load_made_up_signals(self, rows: int) -> None:
        """What comes back to the outputs of made-up rows: other numbers for each."""
        for end in self.ends:
            row, column = (
                torch.arange(1, size + 1, device=end.device) * 0.7548776662 for size in (rows, end.shape[-1])
            )
            mine = end[:rows].copy_(row.frac().reshape(-1, *[1] * (end.dim() - 1)) / end[0].numel())
            if end.dim() > 1:
                mine.mul_(column.frac())

    def _run_all(self, rows: int) -> None:
        self._sent[rows] = []
        with as_if_recorded(), HostCopies(self._device, self._sent[rows]):
            self._run_forward(rows)
            for end in self.ends:
                end[:rows].fill_(1 / rows)
            self._run_padded_backward(rows)
            self._run_clip(rows)
        self._live = None

    def _run_forward(self, rows: int) -> Any:
        uses: Uses = {}

        def deliver(found: Any) -> None:
            for name, gradient in found.items():
                uses.setdefault(name, []).append(gradient)

        now = self.form.taps.start(rows, self._point, deliver)
        args, kwargs = self._call.with_rows([each[:rows] for each in self._inputs], self.form.batched)
        with self.form.taps.watching(now), torch.enable_grad(), _without_cache(self._device):
            outputs = self._forward(*args, **kwargs)
        if now.doubt is not None or now.recomputes:
            raise Unsteady(now.doubt)
        found = tree_flatten(outputs)[0]
        held = [found[place] for place in self.form.outputs]
        own = outputs.get("loss") if self._replaced and isinstance(outputs, Mapping) else None
        needless = isinstance(own, Tensor) and not own.dim()
        if len(held) + needless < sum(isinstance(leaf, Tensor) for leaf in found):
            raise Unsteady  # of an output that has no row for each example, padding would be a part
        most = len(self._places)
        self.ends = self.ends or [self.room.shelf(number, each, most) for number, each in enumerate(held)]
        for end, output in zip(self.ends, held, strict=True):
            end[:rows].copy_(output.detach())
        self._live = now, held, uses
        return outputs

    def _run_backward(self, signals: Sequence[Tensor]) -> Uses:
        assert self._live is not None
        now, held, uses = self._live
        now.going_back = True
        reached = [(output, signal) for output, signal in zip(held, signals, strict=True) if output.requires_grad]
        outputs, back = zip(*reached, strict=True)
        torch.autograd.grad(outputs, [ANCHOR], back, allow_unused=True)
        return uses

    def _run_padded_backward(self, rows: int) -> None:
        """Nothing comes back to the rows after the examples."""
        padding = self._padding(rows)
        self._run_backward([blanked(end[:rows], padding, in_place=True) for end in self.ends])

    def _padding(self, rows: int) -> Tensor:
        return self._places[:rows] >= self._count

    def _run_clip(self, rows: int) -> None:
        assert self._live is not None
        uses = self._live[2]
        self.total.zero_()
        with torch.no_grad(), full_precision(self.total):
            gradients = {name: combine(parts) for name, parts in uses.items()}
        add_weighted(gradients, self._clip, self.layout, self.total, rows, ~self._padding(rows))

    def _free(self) -> None:
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


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
    """How often longer ones were made than all before."""
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
        return None if found is None else found.begin(call, rows, long)

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
        if texts.failed or long in texts.lengths:
            return texts.lengths.get(long)
        if texts.lengths and not texts.tried and min(filter(None, long), default=0) >= SHORTEST:
            labelled = "labels" in asked.call.names.values()
            if asked.replaced or not labelled:  # a label that is ignored is known to be
                texts.stretch = stretched(self.module, asked.forward, asked.form, asked.call)
            texts.tried, texts.most = True, most_positions(self.module)
        if texts.stretch is None:
            found = self._exactly((key, long), asked, texts.room, long)
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
        return read, written

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
        too_many = (texts.grown if longest else len(texts.lengths)) >= MOST_LENGTHS
        if mine in self._known or self._met[mine] < AGAIN or too_many:
            return None
        if longest:
            for each in texts.lengths:
                del self._known[key, each]
            texts.lengths, texts.room, texts.grown = {}, self._room(), texts.grown + 1
        found = self._known[mine] = self._recordings(asked, self.sizes[::FEWER], texts.room, texts.stretch, long)
        if found is not None:
            texts.lengths[long] = found
        return found

    def _room(self) -> Room:
        return Room(device_of(self.module))

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
        elsewhere = any(call.leaves[place].device != device_of(self.module) for place in form.batched)
        if form.rehearsal.changing or elsewhere or _hooked(self.module):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = self.module, forward, self.layout, self.clip, form, call, sizes, self.total()
                return Recordings(*made, room, stretch, long, asked.replaced)
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
    """Whether somebody waits inside the model, and would wait in vain in a replay. transformers' own hooks only hand
    activations to the outputs, where those are asked for."""
    stores = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    inner = (each for each in module.modules() if each is not module)
    hooks = (hook for each in inner for store in stores for hook in getattr(each, store).values())
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def _buffer(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:], requires_grad=False)


def _device_draws(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore_device_draws(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _without_cache(device: torch.device) -> Any:
    """Autocast as it is, but no copy of a weight made before the recording is read in it."""
    stack = ExitStack()
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=False))
    return stack
