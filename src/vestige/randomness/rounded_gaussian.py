"""How is a Gaussian of a billion steps, rounded to whole steps, drawn without a visible grid? By tables and rejection.

A magnitude's bin comes from an alias table of exact integers, made in high precision; its place inside the bin is
uniform, and kept with probability exp(-t) for a rational t. Both are decided by the random bits drawn so far, and where
those do not decide, by more of them. Floating point only sorts out the cases that are clear.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import factorial

import mpmath
import numpy as np

from vestige.randomness.streams import Stream

STEPS = 30
"""The standard deviation is 2^STEPS steps."""
BINS, WIDTH = 12, 22
"""There are 2^BINS bins of 2^WIDTH magnitudes each: together they reach 16 standard deviations."""
COLUMN = 52
"""Bits of the first word that choose between a column's two bins; BINS others choose the column."""
PRECISION, TERMS = 256, 28
"""Bits in which the table is made, and terms of its series."""
SHARE = COLUMN + 64
"""Bits of a column's threshold: those of the first word, and 64 more where the first are equal to its own."""
TOSS = 63 - WIDTH
"""Bits of the second word that toss for the place; WIDTH others are the place, and one is the sign."""
DISTANCE = 2.0**-96
"""The total variation between what is drawn and the rounded Gaussian, at most: `distance` sums it up."""
CHUNK = 1 << 14
"""Numbers drawn at once, few enough to stay near the processor. Reproducible runs depend on it."""

# P(X = x) of the rounded Gaussian is the mass of [x - 1/2, x + 1/2]. Its ratio to P(X = a) is exp(-t (1 - s^2 / 12)) to
# within s^4, for t = (x^2 - a^2) s^2 / 2 and s = 2^-STEPS: the rounding adds 1/12 to the variance.
SLOPE = (1 - 2.0 ** (-2 * STEPS) / 12) * 2.0 ** (-2 * STEPS - 1)
MARGIN = 2.0**-4
"""How far a comparison in float64, of numbers up to 2^TOSS, may be wrong: 2^9 times what its rounding can do."""


@dataclass(frozen=True)
class Table:
    """An alias table: column j is bin j below its threshold, and bin `alias[j]` from there on."""

    threshold: np.ndarray
    """The first COLUMN bits of each threshold."""
    rest: np.ndarray
    """The 64 bits that follow."""
    alias: np.ndarray

    def weights(self) -> list[int]:
        """The exact probability of every bin, times 2^(BINS + SHARE)."""
        found = [0] * len(self.alias)
        for column, (high, low, other) in enumerate(zip(self.threshold, self.rest, self.alias, strict=True)):
            own = (int(high) << 64) + int(low)
            found[column] += own
            found[int(other)] += 2**SHARE - own
        return found


@cache
def table() -> Table:
    """Made once a process, in a tenth of a second."""
    more = PRECISION - BINS - SHARE
    weights = [(mass + (1 << (more - 1))) >> more for mass in masses()]
    weights[0] += 2 ** (BINS + SHARE) - sum(weights)
    return _alias(weights)


def masses() -> list[int]:
    """How likely the magnitude of a rounded Gaussian lies in each bin, times 2^PRECISION.

    With He_n the Hermite polynomials and h half a bin's width, the integral of exp(-(c + y)^2 / 2) over |y| < h is
    exp(-c^2 / 2) times the sum over even n of 2 He_n(c) h^(n + 1) / (n + 1)!. From one bin to the next, c grows by 2h.
    """
    half = 1 << (PRECISION + WIDTH - STEPS - 1)
    first = 3 * half - (1 << (PRECISION - STEPS - 1))  # bins lie between half steps, and the one at zero comes last
    with mpmath.workprec(PRECISION + 64):
        one = mpmath.mpf(2) ** PRECISION
        height = int(mpmath.nint(one * mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-((first / one) ** 2) / 2)))
        ratio = int(mpmath.nint(one * mpmath.exp(-(2 * half / one) * (first + half) / one)))
        change = int(mpmath.nint(one * mpmath.exp(-((2 * half / one) ** 2))))
        beyond = int(mpmath.nint(one * mpmath.erfc(mpmath.mpf(2) ** (BINS + WIDTH - STEPS) / mpmath.sqrt(2))))
    powers = [2 * half * half**n // (factorial(n + 1) << (n * PRECISION)) for n in range(0, TERMS, 2)]
    found = [0]
    for bin in range(1, 2**BINS):
        centre = first + 2 * half * (bin - 1)
        before, hermite, total = 0, 1 << PRECISION, powers[0]
        for n in range(1, TERMS):
            before, hermite = hermite, (centre * hermite >> PRECISION) - (n - 1) * before
            if n % 2 == 0:
                total += hermite * powers[n // 2] >> PRECISION
        found.append(height * total >> PRECISION)
        height, ratio = height * ratio >> PRECISION, ratio * change >> PRECISION
    found[0] = 2**PRECISION - sum(found) - beyond
    return found


def _alias(weights: list[int]) -> Table:
    """Vose's method, in integers: nothing is rounded."""
    full, left = 2**SHARE, list(weights)
    own, alias = [full] * len(left), list(range(len(left)))
    small = [bin for bin, weight in enumerate(left) if weight < full]
    large = [bin for bin, weight in enumerate(left) if weight >= full]
    while small and large:
        short, long = small.pop(), large[-1]
        own[short], alias[short] = left[short], long
        left[long] -= full - left[short]
        if left[long] < full:
            small.append(large.pop())
    # A full column has its own bin on both sides, so its threshold may be anything.
    parts = [(weight >> 64, weight % 2**64) if weight < full else (0, 0) for weight in own]
    high, low = zip(*parts, strict=True)
    return Table(np.array(high, dtype=np.uint64), np.array(low, dtype=np.uint64), np.array(alias, dtype=np.int64))


def distance(drawn: Table) -> float:
    """An upper bound on the total variation between what is drawn by this table and the rounded Gaussian.

    Summed exactly over the bins; what the shape inside a bin can differ by, and what lies beyond the last, is added.
    """
    more = PRECISION - BINS - SHARE
    off = sum(abs((weight << more) - mass) for weight, mass in zip(drawn.weights(), masses(), strict=True))
    furthest = 2.0 ** (BINS + WIDTH - STEPS)
    inside = 2 * (furthest * 2.0**-STEPS) ** 4
    return off / 2 ** (PRECISION + 1) + inside + float(mpmath.erfc(furthest / mpmath.sqrt(2)))


def draw(count: int, stream: Stream) -> np.ndarray:
    """Rounded Gaussians of standard deviation 2^STEPS: int64."""
    drawn = np.empty(count, dtype=np.int64)
    for first in range(0, count, CHUNK):
        _fill(drawn[first : first + CHUNK], stream)
    return drawn


def _fill(drawn: np.ndarray, stream: Stream) -> None:
    bins = _bins(stream.words(len(drawn)), stream)
    found, kept = _places(bins, stream.words(len(drawn)), stream)
    drawn[:] = found
    again = np.nonzero(~kept)[0]
    while len(again):  # one in five hundred
        found, kept = _places(bins[again], stream.words(len(again)), stream)
        drawn[again] = found
        again = again[~kept]


def _bins(words: np.ndarray, stream: Stream) -> np.ndarray:
    made = table()
    column = (words >> np.uint64(COLUMN)).view(np.int64)
    rest, threshold, bins = words & np.uint64(2**COLUMN - 1), made.threshold[column], made.alias[column]
    np.copyto(bins, column, where=rest < threshold)
    for place in np.nonzero(rest == threshold)[0]:
        if stream.words(1)[0] < made.rest[column[place]]:
            bins[place] = column[place]
    return bins


def _places(bins: np.ndarray, words: np.ndarray, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """Signed magnitudes inside these bins, and which of them are kept."""
    bits = words.view(np.int64)
    place, toss = bits & (2**WIDTH - 1), words >> np.uint64(WIDTH + 1)
    magnitude = bins << WIDTH
    gain = magnitude << 1
    gain += place
    gain *= place  # x^2 - a^2, below 2^57
    magnitude += place
    kept = _tossed(toss.view(np.int64), gain, stream)
    sign = bits << (63 - WIDTH)
    sign >>= 63  # -1 or 0
    kept &= (magnitude != 0) | (sign == 0)  # there is one zero, not two
    magnitude ^= sign
    magnitude -= sign
    return magnitude, kept


def _tossed(toss: np.ndarray, gain: np.ndarray, stream: Stream) -> np.ndarray:
    """Whether each uniform number, whose first bits are `toss`, is below exp(-t)."""
    least = gain * (-SLOPE * 2.0**TOSS)
    least += 2.0**TOSS  # exp(-t) >= 1 - t settles nearly all of them
    kept = toss + (1 + MARGIN) <= least
    unclear = np.nonzero(~kept)[0]
    likely = np.exp(-SLOPE * gain[unclear]) * 2.0**TOSS
    kept[unclear] = toss[unclear] + (1 + MARGIN) <= likely
    for place in unclear[np.abs(toss[unclear] + 0.5 - likely) < 0.5 + MARGIN]:
        kept[place] = decided(int(toss[place]), TOSS, int(gain[place]), stream)
    return kept


def decided(toss: int, bits: int, gain: int, stream: Stream) -> bool:
    """The same by as many more bits as it takes, in high precision."""
    while True:
        with mpmath.workprec(bits + 64):
            scale = mpmath.mpf(2) ** (-2 * STEPS)
            likely = mpmath.exp(-gain * scale / 2 * (1 - scale / 12)) * 2**bits
            if toss + 1 <= likely:
                return True
            if toss >= likely:
                return False
        toss, bits = (toss << 64) + int(stream.words(1)[0]), bits + 64
