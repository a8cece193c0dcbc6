"""How are captured passes tested without a GPU? A graph that runs its work again stands in for a CUDA graph.

Everything around the graphs is the real thing: sizes, padding, buffers, guards, signals and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vestige.engines import cuda_graphs
from vestige.engines.example_axis.labels import without_modes
from vestige.engines.per_example import kernels
from vestige.privacy_engine import captured_passes


class Rerun:
    """Runs its work again, of which no mode sees anything, as of a CUDA graph's."""

    replays = 0

    def __init__(self, work) -> None:
        self._work = work

    def replay(self) -> None:
        Rerun.replays += 1
        with without_modes():
            self._work()


def _captured(work, pool, device) -> Rerun:
    work()
    return Rerun(work)


def _blanked(tensor, rows, in_place=False):
    """In place where a GPU does it; on a CPU, what is blanked is a copy."""
    if not in_place or not tensor.numel() or kernels._pieces(tensor) is None:
        return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)
    return tensor.masked_fill_(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


@contextmanager
def captured_on_cpu() -> Iterator[type[Rerun]]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_graphs, captured_passes):
            patch.setattr(module, "captured", _captured)
            patch.setattr(module, "capturable", lambda device: True)
        for module in (kernels, captured_passes):
            patch.setattr(module, "blanked", _blanked)
        Rerun.replays = 0
        yield Rerun
