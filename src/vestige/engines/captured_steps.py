"""How does a step shed its launches on a GPU, and its Python on a CPU? It is captured once as a graph, and replayed.

Capturing runs the step's Python once more, with every operator followed: what is replayed is what was proved. A graph
has a fixed shape, but a Poisson sample has none. On a GPU, where captures take time and memory, a batch is padded to
one of a few sizes by rows of weight zero, copies of its first row, and texts are padded to one of a few lengths. On a
CPU every size that comes again has a graph of its own, whose numbers are those of the step itself, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vestige.engines.bookkeeping import BookKeeping, add_weighted
from vestige.engines.captures.capture_costs import (
    MOST_GRAPHS,
    CaptureCosts,
    Recurring,
    Timer,
    ahead,
    exact,
    padded_size,
    sizes_of,
    with_room,
)
from vestige.engines.captures.capture_guards import (
    KnownModules,
    NamesRead,
    NotCapturable,
    state_fingerprint,
)
from vestige.engines.captures.cuda_graphs import (
    as_captured,
    capturable,
    capture_proved,
    captured,
    fill_rows,
    give_back,
    is_full,
    new_pool,
    precision,
    require_unexposed,
)
from vestige.engines.captures.operator_graph import GraphMemory, GuardFailed, OperatorGraph, Outside
from vestige.engines.example_axis.labels import NotApart
from vestige.engines.example_axis.tracked_model import gradients
from vestige.engines.per_example.sums_of_users import RowCounts
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform
from vestige.mechanism.gradient_transforms import Term, only_mean, terms_of
from vestige.mechanism.losses.criteria import BY_PLACE, Form
from vestige.randomness.generator_states import draws_kept


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
        self._captures, self._ran, self._padded, self._pool = True, False, False, None
        self._total: Tensor | None = None
        self._again, self._outside, self._names, self._named = Recurring(), Outside(), NamesRead(), 0

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
        if step.exact:
            try:
                return step(mean, clip, into)
            except GuardFailed:
                pass
            except (ValueError, NotCapturable, RuntimeError):  # if it is the program's own error, it comes again
                self._captures = False
                self._graphs.clear()
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
            if not exact(into.device):
                self._run_first(mean, full)
            held = state_fingerprint(self.model, self.engine.loss, known=self._known)
            state = precision(into.device), held, self._names.numbers()
            stays, self._state = state == self._state, state
            shapes = tuple((part.shape[1:], part.dtype) for part in mean.batch)
            views = mean.views if mean.counts is None else 1
            key = (views, mean.counts is None), shapes, places, clip.recording, full, state
            known = self._graphs.get(key, {})
            rows = len(mean.batch[0]) // views
            if exact(into.device):
                return self._of_this_size(key, rows, mean, clip, into, full)
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
                best = with_room(rows, best, expected)
            self._graphs[key] = known
            capture = partial(self._capture, known, mean=mean, clip=clip, into=into, full=full)
            self._costs.capture(ahead(expected) if first else [best], capture)
            return known[min(size for size in known if size >= min(rows, best))]
        except (NotApart, NotCapturable, RuntimeError) as problem:
            line = (str(problem) or type(problem).__name__).splitlines()[0]
            warnings.warn(f"the step cannot be captured as a CUDA graph ({line}); it runs as it is", stacklevel=4)
            self._captures = False
            self._graphs.clear()
            return None

    def _of_this_size(
        self, key: Hashable, rows: int, mean: Term, clip: Clip, into: Tensor, full: bool
    ) -> CapturedStep | None:
        """The graph of batches of so many rows, which is recorded by the step itself."""
        if len(self._names) > self._named:  # graphs are known by what these hold, too: the old ones are never asked for
            self._graphs.clear()
            self._named = len(self._names)
        known = self._graphs.get(key, {})
        step, possible = known.get(rows), mean.counts is None and rows > 1
        if step is None and possible and self._again.comes_again((key, rows)):
            self._graphs[key] = known
            if self._total is None:
                self._total = torch.zeros(self.layout.size)
            largest = known[max(known)] if known and max(known) >= rows else None
            step = known[rows] = CapturedStep(self.engine, mean, clip, rows, self._total, largest, full)
            step.memory = GraphMemory(
                self._outside, [*step.batch, step.norms, step.total], self.engine.labels, self._names
            )
            step.graph = OperatorGraph(step.memory)
        if step is None or step.memory is None or not step.memory.usable:
            return None
        return step

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
        self.exact = exact(device)
        examples = rows if self.counts is None else len(self.counts)
        self.norms = torch.zeros(examples, engine.layout.groups, dtype=torch.float64, device=device)
        self.timer = Timer(device)
        self.graph: torch.cuda.CUDAGraph | OperatorGraph | None = None
        self.memory: GraphMemory | None = None

    def __call__(self, mean: Term, clip: Clip, into: Tensor) -> Tensor:
        assert self.graph is not None
        self._load(mean.batch, mean.counts)
        if self.bound is not None and clip.flat_bound is not None:
            wanted = clip.flat_bound
            if type(wanted) is not float or wanted != self.holds[0]:
                self.bound.fill_(wanted)
                self.holds[0] = float(wanted)
        self.total.copy_(into)
        self.timer.start()
        if isinstance(self.graph, OperatorGraph):
            assert self.memory is not None
            self.graph.replay(self._run, {})
            self.memory.complete()
        else:
            self.graph.replay()
        self.timer.stop()
        into.copy_(self.total)
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
        views = self.views if self.counts is None else self.most
        term = Term(self.mean.weight, self.mean.point, tuple(self.batch), views, self.counts)
        with as_captured(self.engine.proved.tracker, self.full):
            found = gradients([self.engine.gradients_of(term)], self.total)
            require_unexposed(self.engine.proved.tracker, self.total.device)
        self.engine.labels.let_go(self.engine.proved.tracker)
        users = self.engine.users_of(term)
        real = None if self.exact else self.place < self.count if users is None else users.counts > 0
        self.norms.copy_(add_weighted(found, self.clip, self.engine.layout, self.total, len(self.norms), real, users))
