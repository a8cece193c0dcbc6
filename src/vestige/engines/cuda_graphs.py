"""How does a step shed its launches on a GPU? It is captured once as a CUDA graph, and replayed.

Capturing runs the step's Python once more, with every operator followed: what is replayed is what was proved. A graph
has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes by rows of weight zero, copies
of its first row, and texts are padded to one of a few lengths.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil, inf, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from vestige.engines.bookkeeping import BookKeeping, add_weighted
from vestige.engines.capture_guards import (
    KnownModules,
    NamesRead,
    NotCapturable,
    require_same_on_any_draw,
    state_fingerprint,
)
from vestige.engines.example_axis.labels import NotApart, Tracker
from vestige.engines.example_axis.tracked_model import gradients
from vestige.engines.module_snapshot import buffers_kept
from vestige.engines.per_example.execution import unseen
from vestige.engines.per_example.sums_of_users import RowCounts
from vestige.engines.replayed_host_transfers import HostTransfers, Sent
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform
from vestige.mechanism.gradient_transforms import Term, only_mean, terms_of
from vestige.mechanism.losses.criteria import BY_PLACE, Form
from vestige.randomness.generator_states import draws_kept, host_draws, restore_host_draws
from vestige.tf32 import tf32_convolutions, tf32_products

SECONDS = 2.0
"""How long sizes are captured ahead, after the first; a size that was not reached is padded to the next one."""
MOST_SIZES, DEVIATIONS = 8, (2.5, 1.6, 1.0, 0.6, 0.2, -0.2, -0.6, -1.0, -1.6)
"""Sizes of batches that are parts of samples; and of whole samples, how far from the mean, in standard deviations."""
MOST_GRAPHS, FEW = 64, 8
"""Graphs that are kept; and rows that a GPU takes in hardly more time than one."""


def sizes_of(
    population: int, rate: float, part: int | None = None, mean: float = 1.0, square: float = 1.0
) -> list[int]:
    """The sizes to capture for Poisson samples that are taken whole, or in parts of at most so many: largest first.
    Where each of the population has several rows, with this `mean` and mean `square`, sizes are numbers of rows."""
    likely, deviation = population * rate * mean, sqrt(population * rate * (1 - rate) * square)
    most = round(population * mean)
    sizes = {min(most, max(2, ceil(likely + each * deviation))) for each in DEVIATIONS}
    if part is not None and part < max(sizes):  # what is left over of a sample is as likely to be small as large
        sizes = {max(2, ceil(part * place / MOST_SIZES)) for place in range(1, MOST_SIZES + 1)}
    return sorted(sizes, reverse=True)


def ahead(sizes: Sequence[int]) -> list[int]:
    """The order in which sizes are captured: the largest, in whose memory others find room, then every second one."""
    return [sizes[0], *sizes[2::2], *sizes[1::2]]


def capturable(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def captured(work: Callable[[], object], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """The GPU's part of some work, to be replayed; nothing is run."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    spare, stream = generator.clone_state(), torch.cuda.current_stream(device)
    # cuBLAS keeps a workspace for each stream. The graph's own must not outlive its memory pool, and the one that it
    # replaces would lie idle.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
    except BaseException:
        # A capture that breaks off leaves the generator unusable, its own stream the current one, and, before torch
        # 2.12, the allocator in the belief that it goes on, so that no cached memory is ever given back.
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(spare)
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    return graph


def capture_proved(
    capture: Callable[[], object], run: Callable[[], object], device: torch.device, tracker: Tracker
) -> None:
    """Capture work while it is proved. Where that does not work at once it is run before, proved too: kernels are then
    loaded, and what is sent to the device is known. Raises where that cannot be."""
    sent, before = Sent(), host_draws()
    with suppress(NotCapturable, RuntimeError), HostTransfers(device, sent, given=True):
        capture()
        return
    with HostTransfers(device, sent):
        run()
    if device.type == "cuda" and host_draws() != before:
        restore_host_draws(before)
        require_same_on_any_draw(run, tracker)
    give_back(device)
    with HostTransfers(device, sent, given=True):
        capture()


@contextmanager
def as_captured(tracker: Tracker, full: bool) -> Iterator[None]:
    """As a pass is followed that is to be captured. Where no mask leaves anything out (`full`), a model that asks
    whether it is captured hears that it is not: transformers' models then look at the mask, which is answered, and skip
    work."""
    asked = torch.cuda.is_current_stream_capturing
    tracker.answer, tracker.captured, tracker.kept_elsewhere = full, True, False
    if full:
        torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        tracker.answer, tracker.captured = None, False


def is_full(mask: Tensor) -> bool:
    """Whether a mask leaves nothing out: models then skip work, with the same result."""
    with unseen():
        return bool((mask == 1).all())


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees while a step is captured, an older graph above all, would break it off."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def new_pool() -> Any:
    """Memory for graphs."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


def give_back(device: torch.device) -> None:
    """What nobody needs any more; of cuBLAS too, whose workspaces would be missed where they are freed later."""
    if device.type == "cuda":
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def precision() -> tuple[Hashable, ...]:
    """What a graph takes for granted of torch's settings."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return tf32_products(), tf32_convolutions(), autocast, torch.get_default_dtype()


def fill_rows(buffer: Tensor, rows: Tensor) -> None:
    """Put rows into a buffer; further ones are copies of the first, so that predicates over all keep their value."""
    count = len(rows)
    buffer[:count].copy_(rows)
    if count < len(buffer):
        buffer[count:].copy_(buffer[:1].expand(len(buffer) - count, *buffer.shape[1:]))


# --- when a graph is worth its time -----------------------------------------------------------------------------------


class Timer:
    """How long the device takes for a piece of work; nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._begun, self._running, self._seconds = 0.0, False, 0.0

    def start(self) -> None:
        if self._events is None:
            self._begun = time.monotonic()
        elif not self._running:
            self._events[0].record()

    def stop(self) -> None:
        if self._events is None:
            self._seconds = time.monotonic() - self._begun
        elif not self._running:
            self._events[1].record()
            self._running = True

    @property
    def seconds(self) -> float:
        """The last time that is known; zero as long as none is."""
        if self._events is not None and self._running and self._events[1].query():
            self._seconds, self._running = self._events[0].elapsed_time(self._events[1]) / 1e3, False
        return self._seconds


class CaptureCosts:
    """Which further graphs are worth capturing? Those whose absence has cost as much as capturing does.

    A batch that no graph fits exactly is padded to a larger one, or taken in parts by a smaller one. What that takes
    beyond the work of a graph of its own is added up; so never more than twice the least possible is spent.
    """

    def __init__(self) -> None:
        self.count = 0
        """Graphs that there are."""
        self._seconds = 0.0
        """What the last one took."""
        self._lost: dict[Hashable, float] = {}

    def capture(self, sizes: Sequence[int], one: Callable[[int], object]) -> None:
        """Capture graphs of these sizes, as far as there is time."""
        start = inf
        for rows in sizes:
            begun = time.monotonic()
            if begun - start > SECONDS:
                break
            one(rows)
            start = min(start, time.monotonic())  # the first one loads and compiles kernels
            self.count, self._seconds = self.count + 1, time.monotonic() - begun

    def worth(self, wanted: Hashable, seconds: float, share: float) -> bool:
        """Whether to capture a graph that was done without once more, by one that takes so long, of which a `share`
        was needed."""
        self._lost[wanted] = self._lost.get(wanted, 0.0) + seconds * max(0.0, 1.0 - share)
        return self._lost[wanted] >= self._seconds > 0.0 and self.count < MOST_GRAPHS


# --- the engine -------------------------------------------------------------------------------------------------------


MOST_CHANGES = 3
"""After so many captures a model may be another one than before; one more, and it is not captured."""


class Captured:
    """The fast engine; on a GPU its steps are captured and replayed.

    Batches of the sizes that were announced (`expect`) are captured ahead, when the first of them comes; other forms
    when they come.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.engine = BookKeeping(model, loss, layout, form)
        self.model, self.layout = model, layout
        self._sizes: dict[int | None, tuple[int, ...]] = {}
        """By the number of an example's views, or None: of any other number. Of unequal numbers: rows."""
        self._users: RowCounts | None = None
        self._graphs: dict[Hashable, dict[int, CapturedStep]] = {}
        self._costs = CaptureCosts()
        self._state: Hashable = None
        """In which state the model was met last: one that changes all the time is not captured."""
        self._known: KnownModules = {}
        self._names, self._changes = NamesRead(), 0
        self._captures, self._ran, self._padded, self._pool = True, False, False, None
        self._total: Tensor | None = None

    @property
    def reads(self) -> set[str]:
        return self.engine.reads

    def settle(self) -> None:
        self.engine.settle()

    def close(self) -> None:
        """Give the memory of the graphs back; the next step captures others."""
        self._graphs.clear()
        self._costs, self._pool, self._total = CaptureCosts(), None, None
        give_back(next(self.model.parameters()).device)

    def expect(self, sizes: Sequence[int], padded: bool = False, views: int | None = None) -> None:
        """Batches, or those of examples with so many views, will be at most of these sizes, mostly: capture steps for
        them, largest first. Where texts are `padded`, no batch is asked whether its masks are full."""
        self._sizes[views], self._padded = tuple(sizes), padded

    def expect_users(self, numbers: Mapping[int, int], share: int, rate: float, most: int, padded: bool) -> bool:
        """Of `numbers`, how many users have so many rows each, one in `share` is sampled here at this rate, in parts of
        at most so many rows; whether batches may have users with unequal numbers of rows."""
        counts = RowCounts(numbers)
        sizes = sizes_of(max(1, sum(numbers.values()) // share), rate, most, counts.mean, counts.mean_square)
        if counts.equal or not counts.even(sizes[0]):  # a batch has users of one number of rows
            for views, users in numbers.items():
                sizes = sizes_of(max(2, users // share), rate, max(2, most // views))
                self.expect(sizes[:: 1 + len(numbers) // 5], padded, views)
            return False
        self._users = counts
        self.expect(sizes, padded)
        return True

    def _expected(self, views: int) -> tuple[int, ...]:
        return self._sizes.get(views, self._sizes.get(None, ()))

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        if not (self._captures and isinstance(into, Tensor) and capturable(into.device) and len(batch[0])):
            return self.engine(batch, parameters, clip, into, transform)
        self.engine.say_compiled()
        terms = terms_of(transform, parameters, batch)
        mean = only_mean(terms or ())
        step = None if mean is None else self._step(mean, clip, into, whole=transform is not None)
        if step is None or mean is None:
            return self.engine(batch, parameters, clip, into, transform, terms)
        if transform is None and step.rows < len(batch[0]):  # the batch is the term's: an example is a row
            parts = zip(*(part.split(step.rows) for part in batch), strict=True)
            return torch.cat([self(part, parameters, clip, into) for part in parts])
        return step(mean, clip, into)

    def _step(self, mean: Term, clip: Clip, into: Tensor, whole: bool) -> CapturedStep | None:
        """The captured step for a batch like this one, or for parts of it unless it is to be taken `whole`; None if it
        is to run as it is."""
        own = self.layout.parameters(self.model)
        places = tuple(p.data_ptr() for p in mean.point.values())
        if clip.recording is None or places != tuple(own[name].data_ptr() for name in mean.point):
            return None  # a point elsewhere than the model's own parameters lies at a new address every time
        names = self.engine.form.names or ()
        masks = [part for name, part in zip(names, mean.batch, strict=False) if name.endswith("attention_mask")]
        full = bool(masks) and not self._padded and all(map(is_full, masks))
        try:
            self._run_first(mean, full)
            state = self._state_now()
            stays, self._state = state == self._state, state
            shapes = tuple((part.shape[1:], part.dtype) for part in mean.batch)
            views = mean.views if mean.counts is None else 1
            key = (views, mean.counts is None), shapes, places, clip.recording, full, state
            known = self._graphs.get(key, {})
            rows = len(mean.batch[0]) // views
            best, expected = self._size(rows, views, whole), self._expected(views)
            if not self._has_room(mean, best):
                return None
            fitting = [size for size in known if size >= rows and self._has_room(mean, size)]
            chosen = min(fitting) if fitting else max(known, default=None) if not whole else None
            if chosen is not None:
                parts = -(-rows // chosen)
                seconds, needed = parts * known[chosen].timer.seconds, best / (parts * chosen)
                if chosen == best or not self._costs.worth((id(known), best), seconds, needed):
                    return known[chosen]
            elif self._costs.count and (self._costs.count >= MOST_GRAPHS or not stays):
                return None
            first = best in expected and not known and (views in self._sizes or not self._costs.count)
            if not known and best not in expected:
                best = _with_room(rows, best, expected)
            self._graphs[key] = known
            capture = partial(self._capture, known, mean=mean, clip=clip, into=into, full=full)
            with buffers_kept(self.model):
                self._costs.capture(ahead(expected) if first else [best], capture)
            if self._state_now() != state:  # of a cache that is being filled it is another one once more
                del self._graphs[key]
                self._changes += 1
                if self._changes > MOST_CHANGES:
                    raise NotCapturable("the model changes what it holds in each of its passes")
                return None
            return known[min(size for size in known if size >= min(rows, best))]
        except (NotApart, NotCapturable, RuntimeError) as problem:
            line = (str(problem) or type(problem).__name__).splitlines()[0]
            warnings.warn(f"the step cannot be captured as a CUDA graph ({line}); it runs as it is", stacklevel=4)
            self._captures = False
            self._graphs.clear()
            return None

    def _state_now(self) -> Hashable:
        """What graphs are known by, of all that is not the batch."""
        return precision(), state_fingerprint(self.model, self.engine.loss, known=self._known), self._names.state()

    def _has_room(self, mean: Term, rows: int) -> bool:
        """Whether a graph of so many rows has places for all users, if they have unequal numbers of rows."""
        if mean.counts is None:
            return True
        return self._users is not None and len(mean.counts) <= self._users.places(rows)

    def _run_first(self, mean: Term, full: bool) -> None:
        """Models may keep at their first pass that they had one: graphs are known by how they are after it."""
        if self._ran:
            return
        self._ran, device = True, mean.batch[0].device
        with draws_kept(device), self._names.watched(), as_captured(self.engine.proved.tracker, full):
            self.engine.gradients_of(mean)
        self.engine.labels.let_go(self.engine.proved.tracker)
        give_back(device)

    def _size(self, rows: int, views: int, whole: bool) -> int:
        """Of the graph that suits so many rows: of those that were announced, unless there are far fewer rows, such as
        texts of one length among others."""
        sizes = self._expected(views)
        if sizes and rows > sizes[-1] // 2 and (rows <= sizes[0] or not whole):
            return next((size for size in reversed(sizes) if size >= rows), sizes[0])
        return padded_size(rows)

    def _capture(
        self, known: dict[int, CapturedStep], rows: int, mean: Term, clip: Clip, into: Tensor, full: bool
    ) -> None:
        self._pool = self._pool or new_pool()
        largest = known[max(known)] if known and max(known) >= rows else None
        with torch.cuda.device_of(into):
            if self._total is None:
                self._total = torch.zeros(self.layout.size, device=into.device)
            users = None if mean.counts is None else self._users
            step = CapturedStep(self.engine, mean, clip, rows, self._total, largest, full, users)
            step.capture(mean.batch, self._pool)
        known[rows] = step


class CapturedStep:
    """SENSITIVE: it keeps its last batch, sum and norms. Steps on batches of up to so many examples, all at the same
    addresses; of several in one memory (`within` that of the largest) only one can be at work."""

    def __init__(
        self,
        engine: BookKeeping,
        mean: Term,
        clip: Clip,
        rows: int,
        total: Tensor,
        within: CapturedStep | None,
        full: bool = False,
        users: RowCounts | None = None,
    ) -> None:
        """`total` is where all steps leave their sums; `full`: no mask leaves anything out; of `users` with unequal
        numbers of rows, so many rows."""
        self.full, self.total, device = full, total, total.device
        self.engine, self.mean, self.rows, self.views = engine, mean, rows, mean.views if users is None else 1
        self.most = 1 if users is None else users.most
        count = rows * self.views
        self.counts: Tensor | None = None
        """Rows of each user, where they are unequal."""
        if users is not None:
            self.counts = torch.zeros(users.places(rows), dtype=torch.long, device=device)
        self.batch: list[Tensor]
        self.place: Tensor
        self.count: Tensor
        self.holds: list[float]
        """The number in `bound`, which all graphs of one memory share: it is written where it changes."""
        self.clip: Clip = clip
        self.bound: Tensor | None = None
        if within is not None:
            self.batch = [part[:count] for part in within.batch]
            self.place, self.count = within.place[:rows], within.count
            self.clip, self.bound, self.holds = within.clip, within.bound, within.holds
        else:
            self.batch = [part.new_zeros(count, *part.shape[1:]) for part in mean.batch]
            self.place, self.count = torch.arange(rows, device=device), torch.zeros((), device=device)
            self.holds = [1.0]
            if clip.flat_bound is not None:
                self.bound = torch.ones((), dtype=torch.float64, device=device)
                self.clip = Flat(cast(float, self.bound))  # a number that may change between replays
        self.norms: Tensor | None = None
        self.timer = Timer(device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, mean: Term, clip: Clip, into: Tensor) -> Tensor:
        assert self.graph is not None
        assert self.norms is not None
        self._load(mean.batch, mean.counts)
        if self.bound is not None and clip.flat_bound is not None:
            wanted = clip.flat_bound
            if type(wanted) is not float or wanted != self.holds[0]:
                self.bound.fill_(wanted)
                self.holds[0] = float(wanted)
        self.timer.start()
        self.graph.replay()
        self.timer.stop()
        into.add_(self.total)
        examples = len(mean.batch[0]) // self.views if mean.counts is None else len(mean.counts)
        return self.norms[:examples].clone()

    def capture(self, batch: Batch, pool: Any) -> None:
        """Raises where that cannot be."""
        self._load([part[: self.rows * self.views] for part in batch], None)

        def graph() -> None:
            self.graph = captured(self._run, pool, self.total.device)

        with draws_kept():
            capture_proved(graph, self._run, self.total.device, self.engine.proved.tracker)

    def _load(self, batch: Batch, counts: Tensor | None) -> None:
        """Without `counts`, of unequal users, nobody is there."""
        for mine, part in zip(self.batch, batch, strict=True):
            fill_rows(mine, part)
        self.count.fill_(len(batch[0]) // self.views)
        if self.counts is not None:
            self.counts.zero_()
            if counts is not None:
                self.counts[: len(counts)].copy_(counts)

    def _run(self) -> None:
        self.total.zero_()
        views = self.views if self.counts is None else self.most
        term = Term(self.mean.weight, self.mean.point, tuple(self.batch), views, self.counts)
        with as_captured(self.engine.proved.tracker, self.full):
            found = gradients([self.engine.gradients_of(term)], self.total)
        self.engine.labels.let_go(self.engine.proved.tracker)
        users = self.engine.users_of(term)
        real, examples = self.place < self.count, self.rows
        if users is not None:
            real, examples = users.counts > 0, len(users.counts)
        self.norms = add_weighted(found, self.clip, self.engine.layout, self.total, examples, real, users)


def _with_room(rows: int, size: int, announced: Sequence[int]) -> int:
    """The first graph of batches that are part of a sample, such as its texts of one length: large enough for most
    later ones, which would else be taken in two parts."""
    most = max(announced, default=size)
    return max(size, FEW, min(padded_size(ceil(rows + 3 * sqrt(rows))), most))


def padded_size(examples: int) -> int:
    """Few sizes: powers of two up to eight, then multiples of a power of two that is at most an eighth."""
    if examples <= 8:
        return 1 << max(1, (examples - 1).bit_length())
    step = max(8, 1 << max(0, examples.bit_length() - 4))
    return -(-examples // step) * step
