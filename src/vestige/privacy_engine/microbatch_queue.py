"""Which examples may a pass be about? Each draw of the loader is handed out in parts, each for one step.

The sampler announces every part that it draws. A pass of the model takes the next part of its number of rows; a pass
for which there is none is about examples that did not come through the sampler, and is refused.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vestige.privacy_engine.row_labels import Tracking


@dataclass(frozen=True)
class Microbatch:
    """Which part of which draw a physical batch is. An empty draw is one part of no examples."""

    draw: int
    number: int
    last: bool
    size: int
    planted: tuple[int, ...] = ()
    """The canaries among its rows: the last ones that count."""
    joined: int = 0
    """How many canaries joined the draw in all processes, there or not by their coins."""
    users: tuple[tuple[int, int], ...] = ()
    """Where users are sampled: so many users with so many rows each, one after another, in the order of the rows."""

    @property
    def rows(self) -> int:
        """How many rows are handed out: at least two, so that an axis of examples differs from one of a single
        entry. Rows beyond the part's own are real ones of weight zero."""
        return max(2, self.size)

    def rows_of_each(self) -> Tensor:
        """The number of rows of each of its users, in the order of the rows."""
        users, rows = np.array(self.users, dtype=np.int64).reshape(-1, 2).T
        return torch.from_numpy(rows.repeat(users))


class MicrobatchQueue:
    """The parts that were drawn and may still be used, and the one in use.

    A part is used in one step; in `steps` of them, where that was planned and priced.
    """

    def __init__(self, tracking: Tracking, drawn: Callable[[], None], steps: int = 1) -> None:
        """`tracking` follows what is made of the batches that are handed out; `drawn` is called whenever a part is
        drawn."""
        self.tracking, self._on_draw = tracking, drawn
        self.draws = 0
        """How many draws there were; a resumed loader begins there."""
        self._drawn: deque[Microbatch] = deque()
        self._ahead: deque[Microbatch] | None = None
        """Drawn, but not yet handed to the user; None outside a pass, or if the loader does not tell."""
        self.over = False
        """Whether the last pass is known to be over: it ended, or was left early."""
        self._taken: Microbatch | None = None
        self.current: Microbatch | None = None
        self._steps, self._left = steps, steps
        self._batches: WeakKeyDictionary[Microbatch, int] = WeakKeyDictionary()
        """The number of the batch that was handed out for each part, which its rows are labelled with."""

    def announce(self, part: Microbatch) -> None:
        (self._drawn if self._ahead is None else self._ahead).append(part)
        self._on_draw()

    @contextmanager
    def handed_out(self, ending: Callable[[], bool] = sys.is_finalizing) -> Iterator[Callable[[Any], None]]:
        """Inside, parts are drawn ahead of their use: they wait until they are handed to the user, one by one. Where a
        program is `ending`, its modules may be gone, and nothing is computed any more."""
        self._ahead, self.over = deque(), False
        try:
            yield self._hand_out
        finally:
            self._ahead, self.over = None, True
            if not ending():
                self.pause()

    def _hand_out(self, batch: Any) -> None:
        if self._ahead:
            self._drawn.append(self._ahead.popleft())
            self._label(batch)

    def collated(self, batch: Any) -> None:
        """A loader that another library has built around the sampler has just made a batch of the last draw."""
        if self._ahead is None and self._drawn:
            self._label(batch)

    def _label(self, batch: Any) -> None:
        part = self._drawn[-1]
        self._batches[part] = self.tracking.hand_out(batch, part.rows)

    def pause(self) -> None:
        """Nothing of a batch is computed now, unless one that was handed out waits to be used."""
        if not self._drawn:
            self.tracking.rest()

    def go_on(self) -> None:
        """A step is over, or its closure begins: follow what is made of its batch, and of others fetched before it."""
        if self._ahead is not None or self.waiting():
            self.tracking.start()
        else:
            self.tracking.rest()

    def forget(self) -> None:
        """The loader starts anew: what was drawn and not used never will be."""
        self._drawn.clear()
        self._ahead = None if self._ahead is None else deque()
        self.current = self._taken = None

    def take(self, rows: int, batch: int) -> Microbatch | None:
        """The part that a pass over so many rows is about: the next one handed out that no pass was about yet, or the
        last one that one was about. The rows are those of this `batch`: others of an earlier one are not in the draw.

        A loop may fetch several before it uses the first, but it uses them in order and leaves none out: whether a
        batch is used could depend on what is in it, and no noise would cover that.
        """
        fresh = None
        for part in reversed(self._drawn):
            if part is self._taken:
                break
            fresh = part
        if fresh is not None and self._is_about(fresh, rows, batch):
            self._taken = fresh
            return fresh
        return self._taken if self._taken is not None and self._is_about(self._taken, rows, batch) else None

    def _is_about(self, part: Microbatch, rows: int, batch: int) -> bool:
        """Rows that came from no labelled batch have a negative number."""
        return part.rows == rows and (batch < 0 or self._batches.get(part) == batch)

    def waiting(self) -> list[Microbatch]:
        """The parts that a pass may be about."""
        return ([self.current] if self.current is not None else []) + list(self._drawn)

    def usable(self, part: Microbatch) -> bool:
        """Whether a backward pass may be about it: it is in use, or the next in order."""
        return part is self.current or (bool(self._drawn) and part is self._drawn[0])

    def use(self, part: Microbatch) -> None:
        """A backward pass has come about a usable part: it is in use, and the one before it is over."""
        if part is not self.current:
            self._left = self._steps
        if self._drawn and part is self._drawn[0]:
            self._drawn.popleft()
        self.current = part

    def stepped(self) -> None:
        """Of the steps that may be about the part in use one is taken; after the last it is spent."""
        self._left -= 1
        if self._left <= 0:
            self._taken = None if self._taken is self.current else self._taken
            self.current = None

    def expected(self, rows: int) -> str:
        """What passes could be about, instead of one about these rows; in words for an error."""
        sizes = [part.rows for part in self.waiting()]
        if rows in sizes:
            return "they are not those of the batch that the private loader handed out for this step"
        if not sizes:
            return "no batch of the private loader is waiting to be used"
        return f"the private loader handed out {', '.join(map(str, sizes[:4]))}{' ...' if len(sizes) > 4 else ''} rows"


def require_no_accumulation() -> None:
    """Accelerate divides losses, and leaves steps out, where it accumulates the gradients of several batches."""
    accelerate = sys.modules.get("accelerate.state")
    steps = 1 if accelerate is None else accelerate.GradientState().num_steps
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps}: each batch of the private loader is priced as one step. Draw larger "
            "ones (batch_size), let max_physical_batch_size split them, and step after every part"
        )


REPLICAS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""What Accelerate calls processes that have a whole model each."""


def require_known_processes() -> None:
    """Accelerate's processes are those of torch's group, and each has a whole model: such a group trains as one."""
    accelerate = sys.modules.get("accelerate.state")
    state: dict[str, Any] = {} if accelerate is None else accelerate.PartialState._shared_state
    several = state.get("num_processes", 1)
    if several == 1:
        return
    together = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if several != together:
        raise ValueError(
            f"Accelerate runs {several} processes, and {together} train together: each would train on its own. Make "
            "the Accelerator first, in processes that torchrun or accelerate launch has started"
        )
    kind = {**state, **accelerate.AcceleratorState._shared_state}.get("distributed_type")  # type: ignore[union-attr]
    name = str(getattr(kind, "value", kind))
    if name not in REPLICAS:
        raise ValueError(
            f"Accelerate runs {several} processes by {name}: a private loop with it trains replicas. Leave the plugin "
            "out, so that it is DistributedDataParallel, or shard the module by fully_shard, without Accelerate"
        )


def require_own_reading(loader: Any) -> None:
    """Of several processes each reads its own examples: none reads for the others."""
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise ValueError(
            "dispatch_batches=True lets process 0 read for all, and here each process reads its own examples of one "
            "sample: leave it out"
        )


class UserBatches(MicrobatchQueue):
    """Batches that are the user's own: whatever rows a pass is about are one more draw. No epsilon holds for them."""

    def take(self, rows: int, batch: int) -> Microbatch:
        if self.current is None or self.current.size != rows:
            self.draws += 1
            self.announce(Microbatch(self.draws, 0, True, rows))
        found = super().take(rows, batch)
        assert found is not None
        return found

    def _is_about(self, part: Microbatch, rows: int, batch: int) -> bool:
        return part.size == rows
