"""How does a pass of the user's shed its launches? On a GPU it is recorded at a few sizes, ahead, and replayed.

The model's forward pass, its backward pass and the clipping that follows are a recording each, because what lies
between them is the user's. All recordings of a form of call work in the same memory, so only one pass at a time can be
in it; while one is, others run as they are, and so does whatever was not foreseen: a second backward pass through a
recorded forward pass, or a second pass about the same examples.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from vestige.engines.bookkeeping import add_weighted
from vestige.engines.per_example.expressions import ANCHOR, Pass, full_precision
from vestige.engines.per_example.gradients import Gradient, change, combine
from vestige.engines.per_example.kernels import blanked, padded_width
from vestige.engines.per_example.recorded_ways import as_if_recorded
from vestige.engines.recorded.exchanges import Exchanged, Exchanges, tried
from vestige.engines.recorded.looks import Otherwise
from vestige.engines.recorded.pools import allocated, give_back, lent, pool_for
from vestige.engines.recorded.recording import (
    SECONDS,
    device_draws,
    nothing_to_draw_again,
    recorded,
    restore_device_draws,
)
from vestige.engines.recorded.steady import Unsteady, host_draws, require_steady, restore_host_draws
from vestige.layout import Layout
from vestige.mechanism.clipping import Clip, RunningSum
from vestige.privacy_engine.calls import Call, CallForm
from vestige.privacy_engine.recorded.padding import Long, Stretch

Uses = dict[str, list[Gradient]]
FEW, OTHERS = 2, 6
"""Rows that take hardly any memory; and the seed of other made-up ones."""
OF_OUTPUTS, LARGE = 4, 1 << 28
"""How much room a loop needs, in outputs; and from how many bytes on it is looked after."""
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

    def __init__(self, device: torch.device, lends: bool = True) -> None:
        self.lends = lends
        """Whether others may be tried out in it."""
        self.pool = pool_for(self, device) if device.type == "cuda" else None
        self.used = False
        """Whether there are recordings in it."""
        self.spoiled = False
        """Whether somebody keeps something in it, which no recording must write over."""
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

    def prepare(self) -> None:
        """Have the allocator keep one piece of memory for what a loop makes of large outputs (they themselves, their
        gradients, what a loss keeps): otherwise each size of a batch leaves pieces behind that no other fits into."""
        size = OF_OUTPUTS * sum(shelf.numel() * shelf.element_size() for shelf in self._shelves.values())
        if self._device.type == "cuda" and size >= LARGE:
            with suppress(torch.OutOfMemoryError):
                torch.empty(size, dtype=torch.uint8, device=self._device)

    def shelf(self, number: int, like: Tensor, rows: int) -> Tensor:
        """For so many rows of an output: memory that recordings of other lengths use too, if they are not longer."""
        shape = (rows, *like.shape[1:-1], padded_width(like)) if like.dim() > 1 else (rows,)
        size, key = prod(shape), (number, like.dtype)
        if key not in self._shelves or len(self._shelves[key]) < size:
            self._shelves[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
        shelf = self._shelves[key][:size].view(shape)
        return shelf if like.dim() == 1 else shelf[..., : like.shape[-1]]


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
        told: bool = False,
    ) -> None:
        """`total` is where a pass leaves its clipped sum. Where the model's own loss is `replaced`, nobody needs it.
        The model may be `told` that it is recorded."""
        self._replaced, self._told = replaced, told or stretch is not None
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
        self._ones = {number for number, place in enumerate(form.batched) if _all_ones(call.leaves[place])}
        """SENSITIVE: inputs that are one everywhere in the first batch, as a mask is that leaves nothing out."""
        self.ends: list[Tensor] = []
        self._places, self._count = torch.arange(sizes[0], device=self._device), torch.zeros((), device=self._device)
        self._live: tuple[Pass, list[Tensor], Uses] | None = None
        self.draws, self._recomputes, self._exchanged = False, False, dict[int, Exchanged]()
        self._point = {name: p.detach() for name, p in layout.parameters(module).items()}
        self._record(sizes)

    # --- replaying ----------------------------------------------------------------------------------------------------

    def begin(self, call: Call, rows: int, long: Long | None) -> Replay | None:
        """The pass over this call, with texts so long, if it fits and the memory is free. Raises `Otherwise` if the
        host would not see of it what it saw before."""
        tape = next((tape for tape in reversed(self._tapes) if tape.rows >= rows), None)
        if tape is None or self.room.within is not None or self.room.spoiled:
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
        exchanged = self._exchanged[tape.rows]
        if exchanged.looked and not exchanged.holds(self._inputs):  # padding holds made-up rows, or those of before
            raise Otherwise
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
            self._run_forward(rows, recorded=False)
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
            draws = device_draws(self._device)
            self._load_wanted(want, tried[-1], draws)
        self._free()
        self._tapes = [self._recorded(rows) for rows in tried]
        self.room.used = True
        self._require_alike(self._tapes[-1], draws, want)
        self._free()
        self.room.prepare()
        restore_host_draws(host)

    @contextmanager
    def _beside_others(self) -> Iterator[None]:
        """Where others are recorded, this is tried out in their memory. Whatever it leaves there, they would write
        over: what is made once is made before, elsewhere, and if more is left, the room is spoiled."""
        if not self.room.used or not self.room.lends:
            yield
            return
        few = min(FEW, len(self._places))
        self._load_made_up(few)
        self._run_all(few)
        self._exchanged.clear()
        self._free()
        before = allocated(self._device)
        self.room.spoiled = True  # until it is known not to be
        with self.room.lent():
            yield
        exchanged = {rows: each.on("cpu") for rows, each in self._exchanged.items()}
        self._exchanged.clear()
        self._free()
        if allocated(self._device) > before:
            raise Unsteady
        self.room.spoiled = False
        self._exchanged = {rows: each.on(self._device) for rows, each in exchanged.items()}

    def _tried(self, rows: int) -> bool:
        """Run once on made-up rows, unrecorded; whether the model draws numbers on the GPU. Raises `Unsteady`."""
        before = device_draws(self._device)
        self._load_made_up(rows)
        require_steady(lambda: self._run_all(rows), self.module, self.total)
        drawn = not torch.equal(before, device_draws(self._device))
        restore_device_draws(before, self._device)
        if drawn and self._recomputes:
            raise Unsteady  # the same numbers cannot be drawn again in a recording
        return drawn

    def _load_made_up(self, rows: int, seed: int = 5) -> None:
        for number, made in enumerate(self.form.made(rows, seed, self._inputs)):
            self._inputs[number][:rows].copy_(torch.ones_like(made) if number in self._ones else made)
        self._count.fill_(rows)

    def _recorded(self, rows: int) -> Tape:
        shown: list[Any] = []
        exchanged = self._exchanged[rows]
        with as_if_recorded(exchanged.told), ExitStack() as stack:
            if exchanged.sent or exchanged.looks:
                stack.enter_context(Exchanges(self._device, exchanged, given=True))
            if self._recomputes:
                stack.enter_context(nothing_to_draw_again())
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
        self._load_made_up(rows, OTHERS)
        with as_if_recorded(self._exchanged[rows].told):
            self._run_forward(rows)
        self._load_made_up_signals(rows)
        uses = self._run_backward([end[:rows] for end in self.ends])
        add_weighted({name: combine(parts) for name, parts in uses.items()}, self._clip, self.layout, want, rows)
        self._live = None
        restore_device_draws(draws, self._device)

    def _require_alike(self, tape: Tape, draws: Tensor, want: Tensor) -> None:
        """A replay gives what the pass itself gives, on other made-up rows than those that it was recorded with."""
        self._load_made_up(tape.rows, OTHERS)
        restore_device_draws(draws, self._device)
        tape.forward.replay()
        self._load_made_up_signals(tape.rows)
        tape.backward.replay()
        tape.clip.replay()
        restore_device_draws(draws, self._device)
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
        told = self._told or any(each.told for each in self._exchanged.values())
        self._exchanged[rows] = tried(partial(self._run_once, rows), self._device, told, self._inputs)[1]

    def _run_once(self, rows: int) -> None:
        self._run_forward(rows)
        for end in self.ends:
            end[:rows].fill_(1 / rows)
        self._run_padded_backward(rows)
        self._run_clip(rows)
        self._live = None

    def _run_forward(self, rows: int, recorded: bool = True) -> Any:
        uses: Uses = {}

        def deliver(found: Any) -> None:
            for name, gradient in found.items():
                uses.setdefault(name, []).append(gradient)

        now = self.form.taps.start(rows, self._point, deliver)
        args, kwargs = self._call.with_rows([each[:rows] for each in self._inputs], self.form.batched)
        with self.form.taps.watching(now), torch.enable_grad(), _without_cache(self._device):
            outputs = self._forward(*args, **kwargs)
        if now.doubt is not None or (recorded and now.kept_elsewhere):
            raise Unsteady(now.doubt)
        self._recomputes = self._recomputes or now.recomputes
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
        with self.form.taps.watching(now) if now.recomputes else nullcontext():
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
        give_back(self._device)


def _all_ones(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() and bool((leaf == 1).all())


def _buffer(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:], requires_grad=False)


def _without_cache(device: torch.device) -> Any:
    """Autocast as it is, but no copy of a weight made before the recording is read in it."""
    stack = ExitStack()
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=False))
    return stack
