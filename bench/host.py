"""What does a private step cost the host? Small models, and CUDA graphs whose replays cost nothing.

On a GPU a small model's step is Python and launches. What is a launch there, a graph or the noise, is one here that
does nothing: what is left is what the host does at every step. The numbers that come out are meaningless, and nothing
is checked on them. The time is the processor's, the best of some rounds, the ways taken in turn.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from vestige.engines import cuda_graphs
from vestige.privacy_engine import captured_passes
from vestige.randomness import lattice
from vestige.randomness.streams import Stream

Step = Callable[[], object]
Build = Callable[[nn.Module, tuple[Tensor, Tensor]], Step]
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "8-8-2 [4]": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), (8,), 2, 4),
    "digits MLP [37]": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), (64,), 10, 37),
}


class Still:
    """Stands for a CUDA graph: a replay runs the work until all are `still`, and leaves what is there from then on."""

    still = False

    def __init__(self, work: Callable[[], object], pool: Any, device: torch.device) -> None:
        self.work = work
        work()

    def replay(self) -> None:
        if not Still.still:
            self.work()


def launched(total: Tensor, spacing: float, stream: Stream, more: int = 0, *, nonprivate_keep: bool = False) -> None:
    """What `lattice.add_steps` does on the host of a GPU, without the launch of its kernel."""
    [int(word) for word in stream.words(4).view(np.int32)]


def always(*_: object) -> bool:
    return True


@contextmanager
def captured_still() -> Iterator[None]:
    """Inside, steps are captured as they are on a GPU, by `Still`."""
    with ExitStack() as stack:
        for place in (captured_passes, cuda_graphs):
            stack.enter_context(mock.patch.object(place, "captured", Still))
            stack.enter_context(mock.patch.object(place, "capturable", always))
        stack.enter_context(mock.patch.object(lattice, "add_steps", launched))
        stack.enter_context(mock.patch.object(Still, "still", False))
        yield


def table(
    ways: dict[str, Build], models: Sequence[str] = tuple(MODELS), rounds: int = 12, steps: int = 100
) -> list[dict[str, Any]]:
    """Microseconds a step of each way, and over the first of them."""
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    print("| model [batch] | step | host us | over plain |\n|---|---|---|---|")
    try:
        for model in models:
            best = {name: min(times) for name, times in measured(ways, model, rounds, steps).items()}
            base = next(iter(best.values()))
            for name, value in best.items():
                print(f"| {model} | {name} | {value:.0f} | {value / base:.2f}x |", flush=True)
                found.append({"model": model, "step": name, "host us": value, "over": value / base})
    finally:
        torch.set_num_threads(threads)
    return found


def measured(ways: dict[str, Build], model: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Each way's microseconds a step, round by round."""
    build, shape, classes, batch = MODELS[model]
    with captured_still(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: dict[str, Step] = {}
        for name, way in ways.items():
            torch.manual_seed(0)
            rows = torch.randn(batch, *shape), torch.randint(classes, (batch,))
            made[name] = way(build(), rows)
            spent(made[name], 20)
        Still.still = True
        taken: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(rounds):
            for name, step in made.items():
                taken[name].append(spent(step, steps))
    return taken


def spent(step: Step, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return 1e6 * (time.process_time() - start) / count
