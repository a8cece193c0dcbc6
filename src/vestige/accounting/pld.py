"""How are the losses of many questions distributed together? Composition by tilted Fourier transforms, from above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, expm1, floor, log, sqrt

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from vestige.accounting.rdp import Array, log_sum
from vestige.lazy_scipy import minimize_scalar

FOLDED = 1e-18
"""Tilted mass that may lie outside the window of a composed distribution; what it is worth is added to delta."""
MACHINE = 2.0**-52
"""What one operation of complex numbers may be wrong by, relative to its result, is a few of these."""
ROUNDING = 2.0**-48
"""What a fast Fourier transform may be wrong by, relative to its 2-norm: more than what is proved for such lengths."""
NEGLIGIBLE = 1e-30
"""Powers of a spectrum that are no larger are left out. A mass is a mean over the spectrum: it loses no more."""
LONGEST = 1 << 23
"""Masses of a composed distribution: more are not held."""
ANY_SLOPE = np.geomspace(1e-3, 1e4, 36)
"""Tilts beside the usual at which the ends of a window are bounded, where the usual ones leave it too long."""
STEEPEST = 300.0
"""The largest tilt times the target: its exponential is still a number."""


@dataclass(frozen=True)
class LossMasses:
    """One direction of a loss distribution: masses at `lowest`, `lowest` + 1, ... steps, and at infinity."""

    lowest: int
    masses: Array
    infinite: float

    @cached_property
    def places(self) -> Array:
        return self.lowest + np.arange(len(self.masses), dtype=np.float64)

    @cached_property
    def logs(self) -> Array:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)

    def log_moment(self, tilt: float, step: float) -> float:
        """log E e^(tilt loss), of the finite losses."""
        logs = tilt * step * self.places
        logs += self.logs
        return log_sum(logs)

    def tilted(self, tilt: float, step: float) -> Array:
        return np.asarray(np.exp(self.logs + tilt * step * self.places - self.log_moment(tilt, step)))


class Composed:
    """The loss distribution of questions asked several times each, by a Fourier transform of tilted masses.

    Each distribution is multiplied by e^(tilt loss) first, with the tilt that makes losses near `target` usual: the
    transform's rounding errors are then small beside the tail that delta is made of, however small delta is. What
    rounding and the window's ends can hide is added to delta.

    Formal guarantees: `delta(epsilon)` is an upper bound on the hockey-stick divergence at every epsilon.
    """

    def __init__(self, parts: Sequence[tuple[LossMasses, int]], step: float, target: float) -> None:
        self._parts, self._step = parts, step
        self._infinite = sum(count * part.infinite for part, count in parts)
        self._tilt = self._best_tilt(target)
        self._log_mass = self._log_moment(self._tilt)
        first, last = self._window()
        self._losses = (first + np.arange(last - first + 1)) * step
        self._pivot = target
        self._scale = self._log_mass - self._tilt * target
        masses, self._off = self._transformed(first, last)
        asked = self._losses >= max(0.0, target - STEEPEST)  # no epsilon is asked below
        masses, self._losses = masses[asked], self._losses[asked]
        weighted = masses * np.exp(np.minimum(-self._tilt * (self._losses - target), STEEPEST))
        self._above = _from_the_end(weighted)
        self._discounted = _from_the_end(weighted * np.exp(target - self._losses))
        self._beyond = FOLDED * exp(-self._tilt * (last * step - target))

    def delta(self, epsilon: float) -> float:
        if epsilon < self._pivot - STEEPEST:
            return 1.0
        place = int(np.searchsorted(self._losses, epsilon, side="right"))
        inside = self._hidden(epsilon)
        if place < len(self._losses):
            inside += max(0.0, self._above[place] - exp(epsilon - self._pivot) * self._discounted[place])
        return min(1.0, self._infinite + exp(min(0.0, self._scale + log(inside))))

    def slack(self, epsilon: float) -> float:
        """The part of `delta` that covers for rounding and the window's ends; large far below the target."""
        return exp(min(0.0, self._scale + log(self._hidden(epsilon))))

    def _hidden(self, epsilon: float) -> float:
        # Entries may each be wrong by `off`: so much over all losses above epsilon.
        steep = exp(min(-self._tilt * (epsilon - self._pivot), 2 * STEEPEST))
        return self._beyond + self._off * steep / -expm1(-self._tilt * self._step)

    def _log_moment(self, tilt: float) -> float:
        return sum(count * part.log_moment(tilt, self._step) for part, count in self._parts)

    def _best_tilt(self, target: float) -> float:
        """The tilt of the tightest Chernoff bound at the target."""
        found = minimize_scalar(
            lambda log_tilt: self._log_moment(exp(log_tilt)) - exp(log_tilt) * target,
            bounds=(log(1e-3), log(min(1e4, STEEPEST / target))),
            method="bounded",
            options={"xatol": 1e-3},
        )
        return exp(found.x)

    def _window(self) -> tuple[int, int]:
        """Between which losses all tilted mass lies, but for `FOLDED` on either side (Chernoff again)."""
        lowest = sum(count * part.lowest for part, count in self._parts)
        highest = sum(count * (part.lowest + len(part.masses) - 1) for part, count in self._parts)
        # A normal distribution would end there; the bound is asked at a few slopes around that one's.
        usual = np.sqrt(-2 * log(FOLDED)) / max(self._deviation(), 1e-300) * np.array([0.1, 0.3, 0.6, 1.0, 1.5])
        for slopes in (usual, ANY_SLOPE):  # where a loss is rare and large, the distribution is far from a normal one
            ends = []
            for sign in (-1, 1):
                reach = [(self._log_moment(self._tilt + s) - self._log_mass - log(FOLDED)) / s for s in sign * slopes]
                ends.append(max(reach) if sign < 0 else min(reach))
            first, last = max(lowest, floor(ends[0] / self._step)), min(highest, ceil(ends[1] / self._step))
            if last - first < LONGEST:
                return first, max(first, last)
        raise OverflowError(f"a loss distribution of {last - first + 1} masses")

    def _deviation(self) -> float:
        """Of the tilted losses."""
        variance = 0.0
        for part, count in self._parts:
            weights, losses = part.tilted(self._tilt, self._step), self._step * part.places
            variance += count * float(weights @ (losses - weights @ losses) ** 2)
        return sqrt(variance)

    def _transformed(self, first: int, last: int) -> tuple[Array, float]:
        """The composed tilted masses in the window, and what each may be wrong by."""
        length = next_fast_len(last - first + 1, real=True)
        spectra, sizes, norms, counts = [], [], [], []
        for part, count in self._parts:
            tilted = part.tilted(self._tilt, self._step)
            circle = np.bincount((part.lowest + np.arange(len(tilted))) % length, tilted, length)
            each, norm = rfft(circle), float(np.linalg.norm(circle))
            spectra.append(each)
            sizes.append(np.abs(each) + ROUNDING * sqrt(length) * norm)
            norms.append(norm)
            counts.append(count)
        # Where losses are spread over many steps, all powers but a few are next to nothing.
        logs = sum(count * np.log(size) for size, count in zip(sizes, counts, strict=True))
        held = np.flatnonzero(logs > log(NEGLIGIBLE))
        powers: object = 1.0
        for each, count in zip(spectra, counts, strict=True):
            powers = powers * each[held] ** count
        spectrum = np.zeros(length // 2 + 1, dtype=np.complex128)
        spectrum[held] = powers
        masses = np.roll(irfft(spectrum, length), -(first % length))[: last - first + 1]
        wrong = _rounding([size[held] for size in sizes], norms, counts, length)
        return np.maximum(masses, 0.0), wrong + NEGLIGIBLE + 2 * FOLDED


def _rounding(sizes: Sequence[Array], norms: Sequence[float], counts: Sequence[int], length: int) -> float:
    """What each composed mass may be wrong by: of parts with spectra of at most these sizes, and masses of these norms.

    A transform is wrong by `ROUNDING` in the 2-norm. A mass is a mean over the spectrum: of the spectra's errors it
    gets no more than their 2-norm times that of the powers that multiply them (Cauchy and Schwarz), which are small
    where losses are spread over many steps.
    """
    powers = np.prod([size**count for size, count in zip(sizes, counts, strict=True)], axis=0)
    wrong = ROUNDING * sqrt(_mean(powers**2, length))  # of the way back
    # Of the powers themselves: their logarithms are multiplied, -x log x <= sqrt(x), and angles are at most pi.
    wrong += 8 * MACHINE * (_mean(np.sqrt(powers), length) + 4 * sum(counts) * _mean(powers, length))
    for size, norm, count in zip(sizes, norms, counts, strict=True):
        others = np.divide(powers, size, out=np.zeros_like(powers), where=size > 0)
        wrong += count * ROUNDING * norm * sqrt(_mean(others**2, length))
    return wrong


def _mean(spectrum: Array, length: int) -> float:
    """Over the whole spectrum, of which this is a half, its first entry and those that are not left out; not less than
    it is."""
    return (2 * float(spectrum.sum()) - float(spectrum[0])) / length


def _from_the_end(values: Array) -> Array:
    return np.asarray(np.cumsum(values[::-1])[::-1])
