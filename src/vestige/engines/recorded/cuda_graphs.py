"""How does a small model's step shed its launches? Recorded once as a CUDA graph, and replayed.

A small model's step is a hundred kernels, each of which takes less time than the host needs to launch one. What may be
recorded is said in `steady`, how in `recording`.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from vestige.devices import tf32_convolutions, tf32_products
from vestige.engines.bookkeeping import BookKeeping, add_weighted
from vestige.engines.per_example.gradients import change
from vestige.engines.per_example.recorded_ways import as_if_recorded
from vestige.engines.per_example.taps import Doubt, Taps
from vestige.engines.recorded.exchanges import Exchanged, Exchanges, tried
from vestige.engines.recorded.looks import Otherwise, pad
from vestige.engines.recorded.pools import give_back
from vestige.engines.recorded.recording import (
    MOST_FORMS,
    PATIENCE,
    SECONDS,
    device_draws,
    nothing_to_draw_again,
    recorded,
    restore_device_draws,
)
from vestige.engines.recorded.steady import Unsteady, require_steady, standing
from vestige.layout import Layout
from vestige.mechanism.clipping import Batch, Clip, Flat, Loss, Parameters, Transform
from vestige.mechanism.losses.criteria import BY_PLACE, Form
from vestige.mechanism.transforms import Term, only_mean, terms_of

SMALL = 1 << 25
"""How many numbers a step may save and still be all launches: to read them ten times takes a large GPU a third of a
millisecond, which is what launching the step takes. Such a step does not mind padding; a larger one gets little."""
MUCH, LITTLE = 3, 6
MOST = 64
"""Recordings kept; what is met after that runs unrecorded."""


class Captured:
    """The fast engine; on a GPU its steps are recorded and replayed.

    Batches of the sizes that were announced (`expect`) are recorded ahead, when the first of them comes; others when
    they come for the second time.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, form: Form = BY_PLACE) -> None:
        self.engine = BookKeeping(model, loss, layout, form)
        self.model, self.layout = model, layout
        self._sizes: tuple[int, ...] = ()
        self._padded: dict[tuple[int, Hashable], Padded] = {}
        self._padding, self._records, self._told = MUCH, True, False
        self._met: Counter[Hashable] = Counter()
        self._pool: Any = None

    def expect(self, sizes: Sequence[int]) -> None:
        """Batches will be at most of these sizes, mostly: record steps for them, largest first."""
        self._sizes = tuple(sizes)

    def __call__(
        self, batch: Batch, parameters: Parameters, clip: Clip, into: Tensor, transform: Transform | None = None
    ) -> Tensor:
        most = self._sizes[0] if self._sizes else 0
        if transform is None and self._records and 0 < most < batch[0].shape[0] and can_record(into):
            parts = zip(*(part.split(most) for part in batch), strict=True)  # more than was expected
            return torch.cat([self(part, parameters, clip, into) for part in parts])
        terms = terms_of(transform, parameters, batch) if batch[0].shape[0] else None
        mean = only_mean(terms or ())
        if self._records and mean is not None and can_record(into):
            try:
                with torch.cuda.device_of(into):  # a recording is one of the current device's stream
                    norms = self._replayed(mean, clip, into)
                if norms is not None:
                    return norms
            except (Doubt, Unsteady, RuntimeError) as problem:
                if problem.args:
                    warnings.warn(f"the step cannot be recorded ({problem}); it runs unrecorded", stacklevel=2)
                self._records = False
                self._padded.clear()
        return self.engine(batch, parameters, clip, into, transform, terms)

    def _replayed(self, mean: Term, clip: Clip, into: Tensor) -> Tensor | None:
        """Norms of a batch that is taken as others like it; None if it is to run unrecorded."""
        padded = self._like(mean.batch, mean.point, clip, mean.views)
        if padded is None:
            return None
        try:
            return padded(mean.batch, clip, into)
        except Otherwise:  # batches are not all alike in that: from now on the model goes a way for all
            del padded
            self._told, self._pool = True, None
            self._padded.clear()
        return self._replayed(mean, clip, into)

    def _like(self, batch: Batch, parameters: Parameters, clip: Clip, views: int) -> Padded | None:
        """What was met or recorded for a batch like this one; None if it is to run unrecorded."""
        bound = clip.recording
        own = self.layout.parameters(self.model)
        places = tuple(p.data_ptr() for p in parameters.values())
        # A point elsewhere than the model's own parameters lies at a new address every time.
        if bound is None or places != tuple(own[name].data_ptr() for name in parameters):
            return None
        shapes = tuple((part.shape[1:], part.dtype) for part in batch)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = tf32_products(), tf32_convolutions(), autocast
        kept = standing(self.model, self.engine.loss)
        key = views, shapes, places, bound, modes, kept
        rows = self._size(batch[0].shape[0] // views)
        known = self._padded.get((rows, key))
        if known is not None or len(self._padded) >= MOST or self._waits(key):
            return known
        return self._meet(key, batch, parameters, clip, views)

    def _waits(self, key: Hashable) -> bool:
        """Whether a further form of batches, of another length say, is not worth recording yet."""
        self._met[key] += 1
        forms = {form for _, form in self._padded} - {key}
        return bool(self._sizes and forms) and (self._met[key] < PATIENCE or len(forms) >= MOST_FORMS)

    def _size(self, count: int) -> int:
        """What a batch is padded to."""
        fits = [size for size in self._sizes if size >= count]
        return fits[-1] if fits else padded_size(count, self._padding)

    def _meet(self, key: Hashable, batch: Batch, parameters: Parameters, clip: Clip, views: int) -> Padded | None:
        taps, rows = self.engine.taps(batch, views), self._size(len(batch[0]) // views)
        self._records = taps is not None
        if taps is None:
            return None
        self._pool = self._pool or (torch.cuda.graph_pool_handle() if batch[0].is_cuda else None)
        if rows in self._sizes:
            self._record_ahead(key, taps, batch, parameters, clip, views)
            return self._padded[self._size(len(batch[0]) // views), key]
        padded = Padded(self.engine, taps, batch, parameters, clip, rows, self._pool, views, told=self._told)
        if not self._padded and self._padding == MUCH and padded.rehearse(batch) > SMALL:
            self._padding = LITTLE
            return self._like(batch, parameters, clip, views)
        self._padded[rows, key] = padded
        return padded

    def _record_ahead(
        self, key: Hashable, taps: Taps, batch: Batch, parameters: Parameters, clip: Clip, views: int
    ) -> None:
        """All expected sizes, in one memory, as long as there is time; the first batch stands in for what will come."""
        start, tried = time.monotonic(), list[Padded]()
        for rows in self._sizes:  # kernels are chosen, compiled and loaded before anything is recorded
            if time.monotonic() - start > SECONDS / 2:
                break
            largest = tried[0] if tried else None
            given = self.engine, taps, batch, parameters, clip, rows, self._pool, views
            each = Padded(*given, within=largest, told=self._told or (largest is not None and largest.exchanged.told))
            each.rehearse([part[: rows * views] for part in batch])
            tried.append(each)
        give_back(batch[0].device)  # what was only tried out makes room for what is kept
        for each in tried:
            each.record([part[: each.rows * views] for part in batch])
        self._sizes = tuple(each.rows for each in tried)
        self._padded |= {(each.rows, key): each for each in tried}


@dataclass(frozen=True)
class Met:
    """SENSITIVE: what a step gave when it was tried out."""

    draws: Tensor
    """The state of the GPU's generator before."""
    measured: Tensor


def _measured(norms: Tensor, total: Tensor) -> Tensor:
    """Every example's norms, and that of their sum."""
    return torch.cat([norms.flatten(), torch.linalg.vector_norm(total)[None].to(norms.dtype)])


class Padded:
    """SENSITIVE: it keeps its last batch, sum and norms.

    Steps on batches of up to so many examples, all at the same addresses: run once, then recorded, then replayed. Of
    several in one memory (`within` that of the largest) only one can be at work. Where an example has several views,
    they are drawn before, and are rows of the batch.

    What runs unrecorded is padded all the same, so that a resumed run meets the same shapes and rounds alike.
    """

    def __init__(
        self,
        engine: BookKeeping,
        taps: Taps,
        batch: Batch,
        parameters: Parameters,
        clip: Clip,
        rows: int,
        pool: Any = None,
        views: int = 1,
        within: Padded | None = None,
        told: bool = False,
    ) -> None:
        self.engine, self.taps, self.parameters, self.pool, self.views = engine, taps, parameters, pool, views
        device, self.rows = batch[0].device, rows
        self.batch: list[Tensor]
        self.place: Tensor
        self.count: Tensor
        self.total: Tensor
        self.clip: Clip
        self.bound: Tensor | None
        self.holds: list[float]
        """The number in `bound`, which all recordings of one memory share: it is written where it changes."""
        if within is not None:
            self.batch = [part[: rows * views] for part in within.batch]
            self.place, self.count, self.total = within.place[:rows], within.count, within.total
            self.clip, self.bound, self.holds = within.clip, within.bound, within.holds
        else:
            self.batch = [part.new_zeros(rows * views, *part.shape[1:]) for part in batch]
            self.place, self.count = torch.arange(rows, device=device), torch.zeros((), device=device)
            self.total = torch.zeros(engine.layout.size, device=device)
            self.clip, self.bound, self.holds = clip, None, [1.0]
            if clip.flat_bound is not None:
                self.bound = torch.ones((), dtype=torch.float64, device=device)
                self.clip = Flat(cast(float, self.bound))  # a number that may change between replays
        self.norms: Tensor | None = None
        self.exchanged = Exchanged(told)
        self.met: Met | None = None
        self.draws = True
        """Whether the model draws numbers on the GPU, as far as is known."""
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, clip: Clip, into: Tensor) -> Tensor:
        self._load(batch)
        if self.bound is not None:
            wanted = clip.flat_bound
            assert wanted is not None
            if type(wanted) is not float or wanted != self.holds[0]:
                self.bound.fill_(wanted)
                self.holds[0] = float(wanted)
        if self.graph is not None:
            if self.exchanged.looked and not self.exchanged.holds(self.batch):
                raise Otherwise
            self.graph.replay()
        elif self.norms is None or not can_record(into):
            self.rehearse(batch)
        else:
            self.rehearse(batch)
            self.record(batch)
            assert self.graph is not None
            self._load(batch)
            self.graph.replay()
        into.add_(self.total)
        assert self.norms is not None
        return self.norms[: batch[0].shape[0] // self.views].clone()

    def record(self, batch: Batch) -> None:
        """Records the step, which must then give for this batch what it gave when it was tried out with it."""
        with as_if_recorded(self.exchanged.told), ExitStack() as stack:
            if self.exchanged.sent or self.exchanged.looks:
                stack.enter_context(Exchanges(self.total.device, self.exchanged, given=True))
            if not self.draws:
                stack.enter_context(nothing_to_draw_again())
            self.graph = recorded(self._run, self.pool, self.total.device)
        self._require_alike(self.graph, batch)

    def _require_alike(self, graph: torch.cuda.CUDAGraph, batch: Batch) -> None:
        """A replay gives what the step gave when it was tried out, by the same draws; otherwise raises `Unsteady`: a
        model may go another way while it is recorded, and draw others where it recomputes activations."""
        assert self.met is not None
        assert self.norms is not None
        after = device_draws(self.total.device)
        restore_device_draws(self.met.draws, self.total.device)
        self._load(batch)  # a step blanks rows that are of no use
        graph.replay()
        restore_device_draws(after, self.total.device)
        got, want, self.met = _measured(self.norms, self.total), self.met.measured, None
        if not torch.allclose(got, want, rtol=1e-2, atol=1e-12, equal_nan=True):
            raise Unsteady("a replay does not give what the step itself gave")

    def rehearse(self, batch: Batch) -> int:
        """Run unrecorded; how many numbers the step saved. Raises `Unsteady` if the model is not steady."""
        before = device_draws(self.total.device)
        saved: int = require_steady(partial(self._run_kept, batch), self.engine.model, self.total, self.engine.loss)
        self.draws = not torch.equal(before, device_draws(self.total.device))
        return saved

    def _run_kept(self, batch: Batch) -> int:
        given = self.total.device, self.exchanged.told, self.batch, partial(self._load, batch)
        (saved, draws), self.exchanged = tried(self._run_drawing, *given)
        assert self.norms is not None
        self.met = Met(draws, _measured(self.norms, self.total))
        return int(saved)

    def _run_drawing(self) -> tuple[int, Tensor]:
        draws = device_draws(self.total.device)
        return self._run(), draws

    def _load(self, batch: Batch) -> None:
        count = batch[0].shape[0]
        for mine, part in zip(self.batch, batch, strict=True):
            (mine if count == mine.shape[0] else mine[:count]).copy_(part)
        pad(self.batch, count)
        self.count.fill_(count // self.views)

    def _run(self) -> int:
        self.total.zero_()
        gradients = self.engine.gradients(self.taps, self.batch, self.parameters, self.views)
        saved: list[int] = []
        for gradient in gradients.values():
            change(gradient, lambda tensor: saved.append(tensor.numel()) or tensor)  # type: ignore[func-returns-value]
        real = self.place < self.count
        self.norms = add_weighted(gradients, self.clip, self.engine.layout, self.total, self.rows, real)
        return sum(saved)


def padded_size(examples: int, padding: int = MUCH) -> int:
    """The next multiple of a power of two that is at most 2 / 2**padding of it, so that there are few sizes."""
    step = max(8, 1 << max(0, examples.bit_length() - padding))
    return -(-examples // step) * step


def can_record(into: Tensor) -> bool:
    return into.is_cuda and not torch.cuda.is_current_stream_capturing()
