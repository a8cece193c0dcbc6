"""At which sizes of a batch is a step recorded?

A recording has a fixed shape, but a Poisson sample has none: a batch is padded to one of a few sizes, and a padding row
is treated as what the engine already knows how to leave out, an example without a usable gradient.
"""

from __future__ import annotations

from math import ceil, floor, sqrt

SECONDS = 40.0
"""How long recording ahead may take; a size that was not reached is padded to the next one."""
MOST_SIZES = 16
"""Sizes at which a step is recorded ahead."""
MOST_FORMS, PATIENCE = 4, 8
"""Forms of batches for which sizes are recorded ahead, and how often a further one is met before it is: sequences may
have any length."""
DEVIATIONS = 3
"""So far from its mean, in standard deviations, a sample is still of a recorded size; one in a thousand is not."""


def sizes_of(population: int, rate: float, part: int | None = None) -> list[int]:
    """The sizes to record for Poisson samples that are taken whole, or in parts of at most so many: largest first."""
    mean, deviation = population * rate, sqrt(population * rate * (1 - rate))
    low, high = max(1, floor(mean - DEVIATIONS * deviation)), min(population, ceil(mean + DEVIATIONS * deviation))
    if part is not None and part < high:
        low, high = 1, part  # what is left over of a sample is as likely to be small as large
    step = ceil((high - low + 1) / MOST_SIZES)
    return list(range(high, low - 1, -step))
