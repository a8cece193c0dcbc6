"""Is every gradient of a loop public, released, or that row's own? Labels travel with a batch from loader to backward.

The private loader labels each batch that it hands out, and every operator that runs until the step is followed
(`engines.example_axis`): through other modules, losses, weights and hooks, forward and backward. What a loop reads of
its examples is returned, and noted with file and line.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from vestige.engines.example_axis.before_dispatch import TrackedFunctions
from vestige.engines.example_axis.labels import OUTSIDE, Label, Labels, Mixed, Read, Rows, Tracker, mixed


class Tracking:
    """The labels of a loop's batches, and the modes that carry them; on from a batch until its step, or until the
    `owner` is gone: a loop may end in an error."""

    labels: ClassVar[Labels] = Labels()
    """Of all loops: a batch of one is other rows to another."""
    _numbers: ClassVar[Iterator[int]] = count(1)
    _several: ClassVar[dict[int, bool]] = {}
    """Of each thread in which modes are on: whether autograd had threads of its own before."""
    _over: ClassVar[list[Tracking]] = []
    """Those whose owner was lost while a mode was at work: the next ones take their modes off."""

    def __init__(self, owner: object, tokens: int | None = None) -> None:
        weakref.finalize(owner, self._owner_lost).atexit = False
        self.label: Callable[[Tensor], Label | None] = self.labels.get
        self.tracker = Tracker(self.labels, strict=False)
        self.reads: list[Read] = self.tracker.reads
        self._functions = TrackedFunctions(self.tracker, inside=False, tokens=tokens)
        self.batches = 0
        """The number of the last batch, among those of all loops."""
        self.unproved = False
        """Whether a collate_fn has made batches in ways that are not followed."""
        self.handed_out = False
        """Whether the batch in use came labelled from the loader."""
        self._on: int | None = None
        """The thread in which modes are on."""

    def collate(self, collate: Callable[[Any], Any], examples: Any) -> Any:
        """A batch of examples, made by a `collate_fn` of the user's: each tensor that it is given is one example's, and
        what it makes of them is followed. What it makes in other ways (lists, NumPy), or reads, is noted in
        `unproved`."""
        if not isinstance(examples, list):
            return collate(examples)
        self.batches = next(self._numbers)
        rows, number, seen = len(examples), self.batches, len(self.reads)

        def own(place: int, value: Any) -> Any:
            copy = value.clone()
            self.labels.set(copy, Rows(-1, 1, rows, number, place))
            return copy

        taken = [tree_map_only(Tensor, partial(own, place), each) for place, each in enumerate(examples)]
        off = self._on is None
        self.start()
        try:
            batch = collate(taken)
        finally:
            self.unproved = self.unproved or len(self.reads) > seen
            del self.reads[seen:]
            if off:
                self._off()
        for leaf in tree_leaves(_open(batch)):
            label = self.labels.get(leaf) if isinstance(leaf, Tensor) else None
            if label is None or (isinstance(label, Mixed) and label.unknown):
                self.unproved = True
        return batch

    def hand_out(self, batch: Any, rows: int) -> None:
        """Label a batch of the private loader, and follow what is made of it. A tensor without a row for each example
        was made by a collate_fn that saw all of them."""
        self.handed_out = True
        leaves = [leaf for leaf in tree_leaves(_open(batch)) if isinstance(leaf, Tensor)]
        known = [label.batch for label in map(self.labels.get, leaves) if isinstance(label, Rows)]
        if not known:
            self.batches = next(self._numbers)
        for leaf in leaves:
            label = self.labels.get(leaf)
            if isinstance(label, Rows) or (isinstance(label, Mixed) and not label.unknown):
                continue
            if leaf.dim() and len(leaf) == rows:
                self.tracker.label_rows(leaf, rows, known[0] if known else self.batches)
            elif leaf.numel():
                self.labels.set(leaf, mixed("collate_fn", "made a tensor that has no row for each example"))
        self._forget_losses()
        self.start()

    def label_arguments(self, leaves: list[Any], rows: int) -> None:
        """Label the arguments of a model's call that came from no labelled batch."""
        self.batches = next(self._numbers)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows and self.labels.get(leaf) is None:
                self.tracker.label_rows(leaf, rows, self.batches)

    def start(self) -> None:
        if self._on is None:
            self.clean_up()
            self._on = threading.get_ident()
            self._functions.__enter__()
            self.tracker.__enter__()
            self.labels.trackers.append(self.tracker)
            self._several.setdefault(self._on, torch.autograd.is_multithreading_enabled())
            torch._C._set_multithreading_enabled(False)  # type: ignore[attr-defined]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, what code of the user's does is followed, as between a batch and its step."""
        self.start()
        try:
            yield
        finally:
            self._off()

    def stop(self) -> None:
        """A step begins, or the loader is left."""
        self._off()
        self.tracker.strict = False  # of a backward pass that failed
        self.tracker.spans.clear()
        self.clean_up()
        self._forget_losses()
        self.labels.let_go(self.tracker)
        self.labels.prune()

    def _off(self) -> bool:
        """Take our modes off, from below those of others that were put on since. False if they are at work now, or on
        in another thread."""
        here = threading.get_ident()
        dispatched, called = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
        if self._on is None:
            return True
        if self._on != here or self.tracker not in dispatched or self._functions not in called:
            return False
        _leave(TorchDispatchMode, dispatched, self.tracker)
        _leave(TorchFunctionMode, called, self._functions)
        self.labels.trackers.remove(self.tracker)
        self._on = None
        if not any(isinstance(mode, Tracker) for mode in _get_current_dispatch_mode_stack()):
            torch._C._set_multithreading_enabled(self._several.pop(here))  # type: ignore[attr-defined]
        return True

    def _owner_lost(self) -> None:
        """Called by a garbage collection, which may run at any time. Where torch or we are at work, modes may be about
        to be put on or taken off: then that is left to the next loop."""
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(OUTSIDE):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None or not self._off():
            self._over.append(self)

    @classmethod
    def clean_up(cls) -> None:
        """Take off the modes of loops that are over: a garbage collection in another thread, or inside an operator,
        could not."""
        if cls._over:
            cls._over[:] = [each for each in cls._over if not each._off()]

    def _forget_losses(self) -> None:
        self.tracker.reductions.clear()
        self.tracker.averaged.clear()

    @contextmanager
    def model(self, fresh: bool = False) -> Iterator[Tracker]:
        """Inside a private model: a look at a value is refused, and its losses are taken of each example. `fresh`:
        whatever modes the loop has on are off here."""
        tracker, functions = self.tracker, self._functions
        with ExitStack() as entered:
            if self._on != threading.get_ident() or fresh:
                entered.enter_context(tracker)
                entered.enter_context(functions)
            tracker.strict = True
            tracker.scalars.clear()
            functions.inside, turn, self.labels.turn = True, self.labels.turn, tracker
            try:
                yield tracker
            finally:
                self.labels.turn, self.labels.laid = turn, None
                functions.inside = tracker.strict = False


Modes = type[TorchDispatchMode] | type[TorchFunctionMode]


def _leave(kind: Modes, stack: list[Any], mode: Any) -> None:
    """Take a mode off the stack of its kind; those above it stay."""
    above = stack[len(stack) - stack[::-1].index(mode) :]
    for each in (*reversed(above), mode):
        kind.__exit__(each, None, None, None)
    for each in above:
        kind.__enter__(each)


def _open(batch: Any) -> Any:
    """A batch whose tensors `tree_leaves` finds: mappings and objects of other libraries opened."""
    if isinstance(batch, dict | list | tuple | Tensor):
        return batch
    if hasattr(batch, "items"):
        return dict(batch.items())
    return vars(batch) if hasattr(batch, "__dict__") else batch
