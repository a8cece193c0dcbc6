"""How many of n rows join? A binomial number, exactly: random bits are compared with the exact distribution function.

A table bounds the distribution function by integers, made by exact ratios from the most likely number outward.
64 random bits nearly always fall between two of its steps; where they do not, more bits and a finer table decide.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from vestige.randomness.streams import Stream

PRECISION = 192
"""Bits of the first table, which with 64 random bits decides all but one in 2^50 draws."""


@dataclass(frozen=True)
class Table:
    """Bounds of P(X <= j) for j = first - 1, first, ...

    P(X <= j) lies between steps[j] / (total + slack) and (steps[j] + slack) / total.
    """

    first: int
    steps: list[int]
    total: int
    slack: int

    def decided(self, toss: int, bits: int) -> int | None:
        """How many j have P(X <= j) <= u, shifted to be the number itself, for every u whose first bits are `toss`;
        None where such u differ."""
        surely = bisect_right(self.steps, (toss * self.total >> bits) - self.slack)
        perhaps = bisect_left(self.steps, -(-(toss + 1) * (self.total + self.slack) >> bits))
        return self.first - 1 + surely if surely == perhaps else None


@lru_cache(maxsize=64)
def table(trials: int, rate: float, precision: int = PRECISION) -> Table:
    """The most likely number weighs 2^precision; its neighbours follow by exact ratios, rounded down at every step."""
    odds = Fraction(rate) / (1 - Fraction(rate))
    mode = min(trials, int((trials + 1) * Fraction(rate)))

    def outward(ratio: tuple[int, int], change: tuple[int, int], most: int) -> tuple[list[int], int]:
        """Weights away from the mode, and how much of them rounding and the end of the table leave out.

        The ratio is below one and falls, so an error never grows: after k steps a weight is short by at most k. Where
        it is rounded to nothing, at most k is left, and all that follows is below a geometric series.
        """
        found: list[int] = []
        (over, under), weight, short = ratio, 1 << precision, 0
        for k in range(1, most + 1):
            weight = weight * over // under
            short += k
            if weight == 0:
                return found, short + k * under // (under - over) + 1
            found.append(weight)
            over, under = over + change[0], under + change[1]
        return found, short

    p, r = odds.numerator, odds.denominator
    up, missed_above = outward(((trials - mode) * p, (mode + 1) * r), (-p, r), trials - mode)
    down, missed_below = outward((mode * r, (trials - mode + 1) * p), (-r, p), mode)
    steps, so_far = [0], 0
    for weight in [*reversed(down), 1 << precision, *up]:
        so_far += weight
        steps.append(so_far)
    return Table(mode - len(down), steps, so_far, missed_above + missed_below)


def draw(trials: int, rate: float, stream: Stream) -> int:
    """A number of successes in so many trials, each with probability `rate` below one.

    Formal guarantees: if the words of the stream are uniform and independent, exactly Binomial(trials, rate), for the
    rate as float64 holds it. Nothing is rounded: the number is that of the j with P(X <= j) <= u, for u uniform of as
    many bits as it takes, and every comparison is between integers that bound P(X <= j).
    """
    toss, bits = 0, 0
    while True:
        toss, bits = (toss << 64) + int(stream.words(1)[0]), bits + 64
        found = table(trials, rate, max(PRECISION, bits + 128)).decided(toss, bits)
        if found is not None:
            return found
