"""Which sizes of batches, and which further ones, are worth a graph?

A graph has a fixed shape, but a Poisson sample has none. On a GPU, where captures take time and memory, a batch is
padded to one of a few sizes; on a CPU every size that comes again has a graph of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from math import ceil, inf, sqrt

import torch

SECONDS = 2.0
"""How long sizes are captured ahead, after the first; a size that was not reached is padded to the next one."""
MOST_SIZES, DEVIATIONS = 8, (2.5, 1.6, 1.0, 0.6, 0.2, -0.2, -0.6, -1.0, -1.6)
"""Sizes of batches that are parts of samples; and of whole samples, how far from the mean, in standard deviations."""
MOST_GRAPHS, FEW = 64, 8
"""Graphs that are kept; and rows that a GPU takes in hardly more time than one."""
MOST_ON_CPU, MOST_REMEMBERED = 256, 4096
"""The same on a CPU; and forms of steps of which is remembered that they came."""


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


def exact(device: torch.device) -> bool:
    """Whether batches of each size have a graph of their own there, and nothing is padded."""
    return device.type == "cpu"


def padded_size(examples: int) -> int:
    """Few sizes: powers of two up to eight, then multiples of a power of two that is at most an eighth."""
    if examples <= 8:
        return 1 << max(1, (examples - 1).bit_length())
    step = max(8, 1 << max(0, examples.bit_length() - 4))
    return -(-examples // step) * step


def with_room(rows: int, size: int, announced: Sequence[int]) -> int:
    """The first graph of batches that are part of a sample, such as its texts of one length: large enough for most
    later ones, which would else be taken in two parts."""
    most = max(announced, default=size)
    return max(size, FEW, min(padded_size(ceil(rows + 3 * sqrt(rows))), most))


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


class Recurring:
    """Which steps on a CPU are recorded? Those of a form that has come before: to record a step takes about as long as
    all later ones of its form save, until it has come again."""

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._recorded = 0

    def comes_again(self, form: Hashable) -> bool:
        """Of a form that is not recorded: whether to do so."""
        seen = hash(form)  # forms are long
        if seen in self._met and self._recorded < MOST_ON_CPU:
            self._recorded += 1
            return True
        if len(self._met) < MOST_REMEMBERED:
            self._met.add(seen)
        return False
