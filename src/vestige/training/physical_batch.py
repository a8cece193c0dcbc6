"""How many examples fit in memory at once? Tried on made-up examples of the data's shapes, never on the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from vestige.engines.memory import DeviceMemory, memory_of, tried_out
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat, GradientEngine, Loss, Parameters, Transform
from vestige.mechanism.gradient_transforms import one_after
from vestige.methods.base import Method
from vestige.optim.gradient_query_points import At, ask
from vestige.priced_questions import SampledGaussian
from vestige.randomness.sum_and_release_types import Release

PhysicalBatch = int | Literal["auto"] | None
HEADROOM = 0.9
"""The share of the free memory that is used: allocators fragment it, and other programs need some too."""
WORKING_VECTORS = 6
"""Flat vectors that a step needs besides the engine's: the sum, its noise, the direction, the mean and two more."""


def check_physical_batch(value: object, name: str = "max_physical_batch_size") -> None:
    if value is None or value == "auto" or (isinstance(value, int) and value >= 1):
        return
    raise ValueError(f"{name}={value!r} must be a whole number from 1 up, or 'auto'")


def largest_part(
    model: nn.Module,
    engine: GradientEngine,
    layout: Layout,
    blank: Sequence[Tensor],
    *,
    most: int,
    transform: Transform | None = None,
    reserve: int = 0,
    memory: DeviceMemory | None = None,
) -> int:
    """The largest batch up to `most` (to one part in sixteen) whose clipped sum fits in the memory that is free now.

    `blank` are tensors without rows that give shapes and dtypes; `engine` must not be the run's own, because it
    rehearses on the made-up examples; `reserve` bytes are left free. The size returned was run once, in full.

    Formal guarantees: the size depends on shapes, dtypes, the model and the machine, not on the value of any example,
    so it costs nothing; and a sum is the same, up to rounding, however it is split.
    """
    point = {name: p.detach() for name, p in layout.parameters(model).items()}
    device = next(iter(point.values())).device
    memory = memory or memory_of(device)
    total = torch.zeros(layout.size, device=device)

    def run(size: int) -> None:
        engine(made_up(blank, size, device), point, Flat(1.0), total, transform)

    with tried_out(model, device):
        try:
            run(1)  # warm-up: kernels and workspaces
        except Exception as problem:
            line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise ValueError(
                f"max_physical_batch_size='auto': no made-up example could be run ({line}): give a number"
            ) from None
        limit = HEADROOM * memory.free() - reserve
        size = largest_that_fits(lambda size: memory.taken_by(lambda: run(size)), most, limit)
    if size == 0:
        raise ValueError(
            f"max_physical_batch_size='auto': not even one example fits in the {max(limit, 0) / 2**20:.0f} MiB that "
            "are left: free some memory, or use a smaller model"
        )
    return size


def largest_that_fits(takes: Callable[[int], float], most: int, limit: float) -> int:
    """The largest size up to `most`, to one part in sixteen, that takes at most `limit`; 0 if none does."""
    seen: dict[int, float] = {}
    fits, fails, size = 0, most + 1, 1
    while fits < size < fails:
        seen[size] = takes(size)
        fits, fails = (size, fails) if seen[size] <= limit else (fits, size)
        size = _next(seen, fits, fails, most, limit)
    return fits


def _next(seen: dict[int, float], fits: int, fails: int, most: int, limit: float) -> int:
    """The next size to try; `fits` itself when too little is left to gain.

    Memory is affine in the size, except for workspaces: try where the line through the last two sizes meets the limit,
    at most eight times as far; once a size did not fit, at most half way to it.
    """
    *_, before, last = [0, 0, *sorted(size for size in seen if size <= fits)]
    slope = (seen[last] - seen[before]) / (last - before) if before else 0.0
    guess = last + (limit - seen[last]) / slope if slope > 0 else inf
    farthest = (fits + fails) // 2 if fails <= most else min(8 * fits if before else 2 * fits, most)
    size = int(min(guess, farthest))
    return size if size == most or size - fits > fits // 16 else fits


def plausible_sample(population: int, rate: float) -> int:
    """The mean plus eight deviations: a Poisson sample that is not tiny exceeds it less than once in 10^13 draws, and
    is then split in two."""
    mean = population * rate
    return max(1, min(population, ceil(mean + 8 * sqrt(mean * (1 - rate)))))


def made_up(blank: Sequence[Tensor], size: int, device: torch.device) -> list[Tensor]:
    """Examples of these shapes: numbers between 0 and 1 from a fixed seed, and zeros for integers, since 0 is a valid
    token, class and index."""
    random = torch.Generator(device).manual_seed(0)
    rows = [(size, *part.shape[1:]) for part in blank]
    return [
        torch.rand(shape, generator=random, device=device).to(part.dtype)
        if part.is_floating_point()
        else torch.zeros(shape, dtype=part.dtype, device=device)
        for shape, part in zip(rows, blank, strict=True)
    ]


# --- what a method's step asks of an engine ---


def part_of_a_run(
    model: nn.Module,
    make: Callable[[nn.Module, Loss, Layout], GradientEngine],
    loss: Loss,
    layout: Layout,
    method: Method,
    blank: Sequence[Tensor],
    population: int,
    rate: float,
    steps: int,
) -> int:
    """`largest_part` for the steps of a method: its transforms of gradients, its state, its largest sample."""
    questions = method.probe.questions(rate, 1.0)
    rates = [rate, *(question.rate for question in questions if isinstance(question, SampledGaussian))]
    copies = method.copies(rate, steps)
    # State that the first step allocates, or that a gate copies; what exists already is counted twice.
    vectors = WORKING_VECTORS + (copies if copies is not None else 4 + method.memory.copies)
    return largest_part(
        model,
        make(model, loss, layout),
        layout,
        blank,
        most=plausible_sample(population, max(rates)),
        transform=transform_of(model, layout, method, population, rate),
        reserve=int(4 * layout.size * vectors),
    )


@dataclass
class _Listener:
    """Answers a probe's questions with zeros, and records its transforms of each example's gradient."""

    size: int
    device: torch.device
    population: int
    rate: float
    heard: list[Transform | None]

    def __call__(self, at: At) -> Release:
        self.heard.append(at.transform)
        return Release(torch.zeros(self.size, device=self.device), 1.0, 1.0, self.rate)

    def norms(self, point: Parameters, bound: float, *, part: int = 0, boost: float = 1.0) -> float:
        return bound * self.population


def transform_of(model: nn.Module, layout: Layout, method: Method, population: int, rate: float) -> Transform | None:
    """A step's transform of each example's gradient, if it has one: that takes the most memory."""
    point: Parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    device = next(iter(point.values())).device
    listener = _Listener(layout.size, device, population, rate, [])
    state = method.probe.init(layout, device)
    for _ in range(2):  # some probes ask more after their first step
        state = ask(method.probe, listener, point, state, layout.constants)[1]
    return one_after(method.augment, next((t for t in listener.heard if t is not None), None))
