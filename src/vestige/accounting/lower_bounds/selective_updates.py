"""What do selective updates reveal at least, at a paper's own settings? An adversary, and the epsilon that it proves.

Everything is computed, nothing is sampled. The adversary's data make one number of each candidate worth watching: the
coordinate along the canary's gradient, which is the only one that is not zero. Without the canary every candidate that
moved up along it raises the loss by the whole range of the test, and every other lowers it; where the canary is in the
sample of the test, its own loss turns that around. So a kept candidate depends on the canary twice: by the noisy
gradient, for which the papers charge, and by having been kept, for which they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

Array = NDArray[np.float64]
CELLS, DEEPEST = 2000, 8.0
"""The watched coordinate is rounded to so many cells, up to so many deviations of its noise."""
SPAN, FINE, COARSE = 20.0, 2**21, 2**17
"""Losses of whole runs lie within half of this; the number of steps of their grid, for the result and for a search."""
LOST = 1e-9
"""More probability than rounding and what lies beyond the span could add to delta."""


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A paper's own settings for selective updates. With `buffer` 2 the better of two kept candidates is released."""

    rate: float
    sigma_t: float
    validation_rate: float
    sigma_v: float
    threshold: float
    buffer: int = 1
    tie: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer not in (1, 2):
            raise ValueError(f"buffer={self.buffer}: the adversary is worked out for 1 or 2 candidates")


@dataclass(frozen=True)
class Certificate:
    """A lower bound on epsilon that the adversary proves about so many updates."""

    updates: int
    epsilon: float
    without_rejection: float
    """What the same adversary proves if every candidate is kept: the noisy gradients alone."""
    cut: float
    """Candidates count as having moved up beyond this, in units of the clipping bound."""


def certify(claimed: Claimed, updates: int, delta: float = 1e-5) -> Certificate:
    """The adversary's epsilon after so many updates.

    Formal guarantees: no algorithm with these settings whose kept updates are released is (e, delta)-differentially
    private for any e below the result, for adding or removing one example.
    """
    cuts = [step * claimed.sigma_t for step in (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5)]
    best = max(cuts, key=lambda cut: _proved(claimed, cut, updates, delta, COARSE))
    proved, kept = (_proved(claimed, cut, updates, delta, FINE) for cut in (best, None))
    return Certificate(updates, proved, kept, best)


def laws(claimed: Claimed, cut: float | None) -> tuple[Array, Array, Array]:
    """The cells' edges, and the law of a released candidate's cell with the canary and without it; `cut=None`: if every
    candidate were kept."""
    sigma = claimed.sigma_t
    edges = np.concatenate([[-inf], np.linspace(-DEEPEST * sigma, DEEPEST * sigma + 1, CELLS - 1), [inf]])
    quiet, moved = (np.diff(norm.cdf(edges, mean, sigma)) for mean in (0.0, 1.0))
    present = (1 - claimed.rate) * quiet + claimed.rate * moved
    if cut is None:
        return edges, present, quiet
    up = edges[:-1] >= cut
    turned = claimed.validation_rate
    return edges, _released(claimed, present, up, turned), _released(claimed, quiet, up, 0.0)


def _released(claimed: Claimed, candidates: Array, up: NDArray[np.bool_], turned: float) -> Array:
    """The law of the candidate that an update releases. A candidate that moved up raises the loss (+1, in units of the
    range), another one lowers it (-1); with probability `turned` it is the other way round."""
    raises = np.where(up, 1 - turned, turned)
    kept = {level: float(norm.cdf((claimed.threshold - level) / (2 * claimed.sigma_v))) for level in (1, -1)}
    weights = {1: candidates * raises * kept[1], -1: candidates * (1 - raises) * kept[-1]}
    total = sum(each.sum() for each in weights.values())
    weights = {level: each / total for level, each in weights.items()}
    if claimed.buffer == 1:
        return weights[1] + weights[-1]
    wins = _preferred(claimed)
    shares = {level: each.sum() for level, each in weights.items()}
    low = 2 * weights[-1] * (shares[-1] / 2 + shares[1] * wins)
    high = 2 * weights[1] * (shares[1] / 2 + shares[-1] * (1 - wins))
    return np.asarray(low + high)


def _preferred(claimed: Claimed) -> float:
    """How often a kept candidate that lowers the loss is preferred to a kept one that raises it: its noisy change is
    smaller by more than the tie, or a coin decides for it."""
    scale = 2 * claimed.sigma_v
    norms = {level: norm.cdf((claimed.threshold - level) / scale) for level in (-1, 1)}

    def above(start: float) -> float:
        """The probability that the other one's noisy change exceeds `start`, both below the threshold."""
        return float(max(0.0, norms[1] - norm.cdf((start - 1) / scale)) / norms[1])

    def wins(change: float) -> float:
        density = norm.pdf((change + 1) / scale) / scale / norms[-1]
        return float(density * (above(change + claimed.tie) + above(change - claimed.tie)) / 2)

    return float(quad(wins, claimed.threshold - 12 * scale, claimed.threshold, limit=200)[0])


def _proved(claimed: Claimed, cut: float | None, updates: int, delta: float, steps: int) -> float:
    _, present, absent = laws(claimed, cut)
    return max(_lower_bound(one, other, updates, delta, steps) for one, other in ((present, absent), (absent, present)))


def _lower_bound(one: Array, other: Array, times: int, delta: float, steps: int) -> float:
    """The largest epsilon at which `times` draws tell the laws apart by more than delta, from below: losses of cells
    are rounded down, and delta grows with every loss."""
    step = SPAN / steps
    there = (one > 1e-300) & (other > 1e-300)
    index = np.clip(np.floor(np.log(one[there] / other[there]) / step), -steps // 4, steps // 4).astype(int)
    masses = np.bincount(index % steps, weights=one[there], minlength=steps)
    total = np.fft.irfft(np.fft.rfft(masses) ** times, steps)
    losses = np.fft.fftfreq(steps, 1 / steps) * step

    def surplus(epsilon: float) -> float:
        beyond = losses > epsilon
        return float(total[beyond] @ -np.expm1(epsilon - losses[beyond])) - LOST - delta

    if surplus(0.0) <= 0:
        return 0.0
    return float(brentq(surplus, 0.0, SPAN / 2, xtol=1e-6))
