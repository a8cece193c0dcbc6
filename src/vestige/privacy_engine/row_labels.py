"""Is every gradient of a loop public, released, or that row's own? Labels travel with a batch from loader to backward.

The private loader labels each batch that it hands out, and every operator that runs until the step is followed
(`engines.example_axis`): through other modules, losses, weights and hooks, forward and backward. Between steps and
after an epoch, calls that are given memory of the examples still are (`Remaining`). What a loop reads of its examples
is returned, and noted with file and line.
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
from vestige.engines.example_axis.labels import (
    OUTSIDE,
    WITHOUT_TENSORS,
    Label,
    Labels,
    Mixed,
    Read,
    Rows,
    Tracker,
    mixed,
)
from vestige.engines.per_example.execution import unseen_by_functions


class Remaining(TorchFunctionMode):
    """While no batch is in use: of what is left of the examples, what is made is followed; other calls run as they
    are."""

    def __init__(self, tracking: Tracking) -> None:
        super().__init__()
        self._tracking = tracking

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values()) if kwargs else args
        if not self._tracking.labels.any_of(given) or threading.get_ident() in self._tracking._several:
            return function(*args, **kwargs)  # public, or all operators of this thread are followed by some loop
        with self._tracking.remaining_followed():
            return function(*args, **kwargs)


class Tracking:
    """The labels of a loop's batches, and the modes that carry them; on from a batch until its step, or until the
    `owner` is freed: a loop may end in an error."""

    labels: ClassVar[Labels] = Labels()
    """Of all loops: a batch of one is other rows to another."""
    _numbers: ClassVar[Iterator[int]] = count(1)
    _several: ClassVar[dict[int, bool]] = {}
    """Of each thread in which modes are on: whether autograd had threads of its own before."""
    _at_rest: ClassVar[list[Tracking]] = []
    """Loops that follow what remains of the examples, whose loop they may be: all note what is read of it."""
    _over: ClassVar[list[Tracking]] = []
    """Those whose owner was freed while a mode was handling a call: the next ones take their modes off."""

    def __init__(self, owner: object, tokens: int | None = None) -> None:
        weakref.finalize(owner, self._owner_lost).atexit = False
        self.label: Callable[[Tensor], Label | None] = self.labels.get
        self.tracker = Tracker(self.labels, strict=False)
        self.reads: list[Read] = self.tracker.reads
        self.functions = TrackedFunctions(self.tracker, inside=False, tokens=tokens)
        self.batches = 0
        """The number of the last batch, among those of all loops."""
        self.unproved = False
        """Whether a collate_fn has made batches in ways that are not followed."""
        self._on: int | None = None
        """The thread in which modes are on."""
        self._remaining = Remaining(self)
        self._resting = False
        """Whether no more than that one is on."""
        self._collated: int | None = None
        """The number of the batch that a collate_fn has made and that is not handed out yet."""

    def collate(self, collate: Callable[[Any], Any], examples: Any) -> Any:
        """A batch of examples, made by a `collate_fn` of the user's: each tensor that it is given is one example's, and
        what it makes of them is followed. What it makes in other ways (lists, NumPy), or reads, is noted in
        `unproved`: of examples that are tensors alone, what it makes of none of them follows from their sizes."""
        if not isinstance(examples, list):
            return collate(examples)
        self.batches = self._collated = next(self._numbers)
        rows, number, seen = len(examples), self.batches, len(self.reads)

        def own(place: int, value: Any) -> Any:
            copy = value.clone()
            kept = self.labels.get(value) is not None
            self.labels.set(copy, mixed("dataset", KEPT) if kept else Rows(-1, 1, rows, number, place))
            return copy

        others: list[object] = []
        taken = [_each_tensor(partial(own, place), each, others) for place, each in enumerate(examples)]
        tensors_alone = not others
        off = self._on is None or self._resting
        self.start()
        try:
            batch = collate(taken)
        finally:
            self.unproved = self.unproved or len(self.reads) > seen
            del self.reads[seen:]
            if off:
                self.rest()
        for leaf in tree_leaves(_open(batch)):
            label = self.labels.get(leaf) if isinstance(leaf, Tensor) else None
            made_elsewhere = label is None and not (tensors_alone and isinstance(leaf, Tensor))
            if made_elsewhere or (isinstance(label, Mixed) and label.unknown):
                self.unproved = True
        return batch

    def hand_out(self, batch: Any, rows: int) -> int:
        """Label a batch of the private loader, and follow what is made of it; its number. A tensor without a row for
        each example was made by a collate_fn that saw all of them; one of another batch was kept."""
        number, self._collated = self._collated, None
        self.batches = number = next(self._numbers) if number is None else number
        with unseen_by_functions():
            for leaf in tree_leaves(_open(batch)):
                if isinstance(leaf, Tensor):
                    self._label(leaf, rows, number)
        self._forget_losses()
        self.start()
        return number

    def _label(self, leaf: Tensor, rows: int, number: int) -> None:
        """Label a tensor of a batch."""
        label = self.labels.get(leaf)
        if isinstance(label, Rows) and label.batch != number:
            self.labels.set(leaf, mixed("the private loader", KEPT))
        elif isinstance(label, Rows) or (isinstance(label, Mixed) and not label.unknown):
            return
        elif not leaf.dim() or len(leaf) != rows:
            if leaf.numel():
                self.labels.set(leaf, mixed("collate_fn", "made a tensor that has no row for each example"))
        elif label is None and self.labels.any_of((leaf,)):
            for place in range(rows):  # beside others in the same memory
                self.labels.write(leaf[place], Rows(-1, 1, rows, number, place))
        else:
            self.tracker.label_rows(leaf, rows, number)

    def label_arguments(self, leaves: list[Tensor], rows: int) -> None:
        """Label the arguments of a model's call that came from no labelled batch, by a negative number."""
        self.batches = -next(self._numbers)
        for leaf in leaves:
            if leaf.dim() and len(leaf) == rows and self.labels.get(leaf) is None:
                self.tracker.label_rows(leaf, rows, self.batches)

    def start(self) -> None:
        if self._resting and not self._off():
            self._rested()  # it is on in another thread, or handling a call
        if self._on is None:
            self.clean_up()
            self._on = threading.get_ident()
            self.functions.__enter__()
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
        """A step begins, or the loop is over."""
        self._pause()
        self.labels.let_go(self.tracker)
        self.labels.prune()

    def rest(self) -> None:
        """No batch is in use now: what was kept of the examples is followed where it is used."""
        self._pause()
        if self._on is None and self.labels.alive():
            self._on, self._resting = threading.get_ident(), True
            self._at_rest.append(self)
            self._remaining.__enter__()

    def _rested(self) -> None:
        self._at_rest.remove(self)
        self._on, self._resting = None, False

    @contextmanager
    def remaining_followed(self) -> Iterator[None]:
        """Inside, all operators are followed, for all loops at rest."""
        here, before = threading.get_ident(), self.labels.trackers[:]
        self._several[here] = torch.autograd.is_multithreading_enabled()
        self.labels.trackers += [each.tracker for each in self._at_rest]
        try:
            with torch.autograd.set_multithreading_enabled(False), self.tracker, self.functions:
                yield
        finally:
            self.labels.trackers[:] = before
            self._several.pop(here, None)

    def _pause(self) -> None:
        self._off()
        self.tracker.strict = False  # of a backward pass that failed
        self.tracker.spans.clear()
        self.clean_up()
        self._forget_losses()

    def _off(self) -> bool:
        """Take our modes off, from below those of others that were put on since. False if they are handling a call now,
        or on in another thread."""
        here = threading.get_ident()
        dispatched, called = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
        if self._on is None:
            return True
        if self._resting:
            if self._on != here or self._remaining not in called:
                return False
            _leave(TorchFunctionMode, called, self._remaining)
            self._rested()
            return True
        if self._on != here or self.tracker not in dispatched or self.functions not in called:
            return False
        _leave(TorchDispatchMode, dispatched, self.tracker)
        _leave(TorchFunctionMode, called, self.functions)
        self.labels.trackers.remove(self.tracker)
        self._on = None
        if not following():
            torch._C._set_multithreading_enabled(self._several.pop(here))  # type: ignore[attr-defined]
        return True

    def _owner_lost(self) -> None:
        """Called by a garbage collection, which may run at any time. Inside a call of torch or Vestige, modes may
        be about to be put on or taken off: then that is left to the next loop."""
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
        tracker, functions = self.tracker, self.functions
        with ExitStack() as entered:
            if self._on != threading.get_ident() or fresh:
                entered.enter_context(tracker)
                entered.enter_context(functions)
            before = functions.inside, tracker.strict, tracker.reduced  # a model may call itself
            tracker.strict = True
            tracker.reduced = (before[0] and before[2]) or tracker.keeps_reductions()
            functions.inside, turn, self.labels.turn = True, self.labels.turn, tracker
            try:
                yield tracker
            finally:
                self.labels.turn, self.labels.laid = turn, None
                functions.inside, tracker.strict, tracker.reduced = before


def following() -> bool:
    """Whether the operators that run here now are followed: modes belong to a thread."""
    return any(isinstance(mode, Tracker) for mode in _get_current_dispatch_mode_stack())


KEPT = "gives what was kept of an earlier batch"


def _each_tensor(of: Callable[[Tensor], Tensor], example: Any, others: list[object]) -> Any:
    """What a function makes of each tensor of an example, in its form; what else an example has is noted in `others`.
    Quicker than a tree for dictionaries and lists, which most examples are."""
    kind = type(example)
    if kind is Tensor:
        return of(example)
    if kind is dict:
        return {name: _each_tensor(of, each, others) for name, each in example.items()}
    if kind is list or kind is tuple:
        return kind([_each_tensor(of, each, others) for each in example])
    if kind not in WITHOUT_TENSORS:
        others += [leaf for leaf in tree_leaves(example) if not isinstance(leaf, Tensor | None)]
        return tree_map_only(Tensor, of, example)
    others += [] if example is None else [example]
    return example


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
