"""How is one of several candidates drawn by its score? By whole numbers: no floating-point sum decides.

Scores are rounded to a public lattice; each candidate's weight is an exponential, computed to many more bits than are
kept, in whole steps; a uniform whole number below their total says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mpmath

from vestige.randomness.lattice import ROUNDING
from vestige.randomness.streams import Stream

BITS = 160
"""Of the largest weight. A weight is wrong by one step at most: among up to 2^32 candidates the total variation from
the exact mechanism is below 2^-127."""
FINE = 2.0**-20
"""The lattice of scores, in units of their sensitivity."""


def choose(scores: Sequence[float], sensitivity: float, epsilon: float, stream: Stream) -> int:
    """The place of a candidate, drawn with probability proportional to exp(epsilon score / (2 sensitivity)).

    Formal guarantees: the exponential mechanism with this epsilon, but for a total variation of 2^-127, if one example
    moves every score by at most `sensitivity`, and rounding in floating point by less than 1/2048 of that more: it is
    paid for by a slightly smaller epsilon.
    """
    steps = [round(score / (sensitivity * FINE)) for score in scores]
    most = max(steps)
    with mpmath.workprec(BITS + 64):
        slope = mpmath.mpf(epsilon) / (2 * (1 + ROUNDING)) * mpmath.mpf(FINE)
        weights = [int(mpmath.floor(mpmath.exp(slope * (step - most)) * 2**BITS)) for step in steps]
    sums = list(accumulate(weights))
    drawn = _below(sums[-1], stream)
    return next(place for place, total in enumerate(sums) if drawn < total)


def _below(total: int, stream: Stream) -> int:
    """A uniform whole number from 0 to total - 1."""
    words = -(-total.bit_length() // 64)
    surplus = 64 * words - total.bit_length()
    while True:
        drawn = 0
        for word in stream.words(words):
            drawn = (drawn << 64) + int(word)
        if (drawn >> surplus) < total:
            return drawn >> surplus
