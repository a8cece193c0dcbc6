"""By how much can one question's answers differ with and without an example? Hockey-stick profiles and their masses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, exp, expm1, log

import numpy as np
from scipy.special import ndtr

from vestige.accounting.rdp import ORDERS, Array

DEEPEST = 10.0
"""Standard deviations of noise followed into the tails: 8e-24 of the mass lies beyond and is charged to delta."""

BLOCK = 256

Heights = Callable[[Array], Array]


@dataclass(frozen=True)
class Profile:
    """sup over events of Pr[with] - e^loss Pr[without] (`remove`), and the reverse (`add`), for the worst pair.

    Both are asked at losses 0, step, 2 step, ... and give upper bounds, which fall to a negligible mass at the reach.
    The profiles at negative losses follow from them: E_c(P, Q) = 1 - c + c E_{1/c}(Q, P).
    """

    remove: Heights
    add: Heights
    remove_reach: float
    add_reach: float

    @property
    def reversed(self) -> Profile:
        return Profile(self.add, self.remove, self.add_reach, self.remove_reach)


def sampled_gaussian(rate: float, multiplier: float, deepest: float = DEEPEST) -> Profile:
    """The sampled Gaussian: N(0, s^2) against (1 - q) N(0, s^2) + q N(1, s^2) (Zhu, Dong & Wang 2022)."""

    def add(loss: Array) -> Array:
        return np.exp(loss) * put(rate, multiplier, -loss)

    return Profile(lambda loss: call(rate, multiplier, loss), add, *reaches(rate, multiplier, deepest))


def call(rate: float, multiplier: float, log_strike: Array) -> Array:
    """E (T - strike)_+ for the likelihood ratio T = 1 + q (e^w - 1), where w is normal and E e^w = 1."""
    x, held = _crossing(rate, multiplier, log_strike)
    return np.maximum(rate * ndtr((1 - x) / multiplier) - held * ndtr(-x / multiplier), 0.0)


def put(rate: float, multiplier: float, log_strike: Array) -> Array:
    """E (strike - T)_+ for the same T."""
    x, held = _crossing(rate, multiplier, log_strike)
    return np.maximum(held * ndtr(x / multiplier) - rate * ndtr((x - 1) / multiplier), 0.0)


def _crossing(rate: float, multiplier: float, log_strike: Array) -> tuple[Array, Array]:
    """Where T equals the strike (-inf where it is always above), and strike - (1 - q), without cancellation."""
    held = np.where(log_strike > -0.5, np.expm1(log_strike) + rate, np.exp(log_strike) - (1 - rate))
    with np.errstate(divide="ignore"):
        return np.asarray(multiplier**2 * np.log(np.maximum(held, 0.0) / rate) + 0.5), held


def reaches(rate: float, multiplier: float, deepest: float) -> tuple[float, float]:
    """The largest losses of the sampled Gaussian, removing and adding, with noise up to `deepest` deviations."""
    loss = deepest / multiplier + 1 / (2 * multiplier**2)
    if rate == 1:
        return loss, loss
    return float(np.logaddexp(np.log1p(-rate), np.log(rate) + loss)), min(loss, -float(np.log1p(-rate)))


def replaced_gaussian(rate: float, multiplier: float, deepest: float = DEEPEST) -> Profile:
    """The sampled Gaussian, one example replaced by another: (1 - q) N(0, s^2) + q N(1, s^2) against (1 - q) N(0, s^2)
    + q N(-1, s^2).

    Why this pair is the worst: whatever two vectors g and h of norm at most one the examples add, an event of
    probability a under N(0, s^2) has at most Phi(z + 1/s) under N(g, s^2) and at least Phi(z - 1/s) under N(h, s^2),
    where Phi(z) = a (Neyman & Pearson, twice); a half-line attains both where h = -g.
    """
    heights = partial(_replaced, rate, multiplier)
    loss = (1 / multiplier + deepest) / multiplier
    reach = 2 * loss
    if rate < 1:
        ends = np.logaddexp(np.log1p(-rate), np.log(rate) + np.array([1, -1]) * loss - 0.5 / multiplier**2)
        reach = float(ends[0] - ends[1])
    return Profile(heights, heights, reach, reach)


def _replaced(rate: float, multiplier: float, loss: Array) -> Array:
    """sup over events of P - e^loss Q for that pair: the event is a half-line, from where P = e^loss Q."""
    held = (1 - rate) * np.expm1(loss)
    with np.errstate(divide="ignore"):
        scaled = np.log(held) - log(2 * rate) + 0.5 / multiplier**2 - loss / 2
    crossing = np.where(scaled < 300, np.arcsinh(np.exp(np.minimum(scaled, 300))), scaled + log(2))
    start = multiplier**2 * (loss / 2 + crossing)
    low, high = ndtr((1 - start) / multiplier), np.exp(loss) * ndtr((-1 - start) / multiplier)
    return np.maximum(rate * (low - high) - held * ndtr(-start / multiplier), 0.0)


def randomized_response(epsilon: float) -> Profile:
    """A bit that is released unchanged with probability e^epsilon / (1 + e^epsilon): it dominates every epsilon-private
    answer (Kairouz, Oh & Viswanath 2015)."""
    truly = 1 / (1 + exp(-epsilon))

    def heights(loss: Array) -> Array:
        return np.maximum(-truly * np.expm1(loss - epsilon), 0.0)

    return Profile(heights, heights, epsilon, epsilon)


def exponential_mechanism(epsilon: float) -> Profile:
    """A choice whose losses, over all candidates, lie in an interval of length `epsilon` (bounded range).

    If the upper end is t, the worst case has two losses, t with probability (e^epsilon - e^t) / (e^epsilon - 1) and t -
    epsilon: an expectation of a convex function of the ratio, whose mean is one, is largest at the ends. The largest
    divergence over all t is (e^(epsilon/2) - e^(loss/2))^2 / (e^epsilon - 1), at t = (epsilon + loss) / 2. As a largest
    of convex functions of e^loss it is one, so some pair has this profile and dominates every such choice, also where
    the next question depends on what was chosen. Both directions are the same.
    """

    def heights(loss: Array) -> Array:
        if epsilon == 0:
            return np.zeros_like(loss)
        return np.asarray(np.expm1(np.minimum(loss - epsilon, 0.0) / 2) ** 2 / -expm1(-epsilon))

    return Profile(heights, heights, epsilon, epsilon)


def connect_dots(profile: Profile, step: float) -> tuple[int, Array, float]:
    """A loss distribution on multiples of `step` whose removal profile connects the dots of the given one.

    Returns the lowest multiple, the masses from there on, and the mass at infinity. The masses are second differences
    of the profile. They vanish on 1 - e^loss, so below zero only the distance from that curve is kept, which is
    e^loss add(-loss): small, and known to full relative precision.

    Formal guarantees: the result dominates every pair with this profile (Doroshenko et al. 2022).
    """
    zero, heights = _heights(profile, step)
    slopes = np.diff(heights) / expm1(step)
    masses = np.concatenate([[slopes[0] - heights[0]], slopes[1:] - exp(step) * slopes[:-1], [-exp(step) * slopes[-1]]])
    masses[zero] += 1.0
    return -zero, np.maximum(masses, 0.0), float(heights[-1])


def _heights(profile: Profile, step: float) -> tuple[int, Array]:
    """The removal profile less (1 - e^loss)_+ at multiples of `step`, and the position of loss zero among them."""
    below, above = ceil(profile.add_reach / step) + 1, ceil(profile.remove_reach / step) + 1
    falling = np.arange(below + 1.0) * step
    negative = np.exp(-falling) * profile.add(falling)
    return below, np.concatenate([negative[:0:-1], profile.remove(np.arange(above + 1.0) * step)])


def excess_moments(profile: Profile, step: float) -> Array:
    """E[ratio ** order] - 1 at `ORDERS`, from above, up to what lies beyond the reach.

    The moment is a (a-1) times the integral of e^((a-1) loss) (profile - (1 - e^loss)_+). Between the dots the profile
    is convex in e^loss, hence below its chords; their integral is a sum over the dots with one common factor.
    """
    zero, heights = _heights(profile, step)
    chords = np.expm1(ORDERS * step) * -np.expm1(-(ORDERS - 1) * step) / expm1(step)
    # e^((a-1) loss) is a product over blocks and places within them, so that few exponentials are needed.
    blocks = np.pad(heights, (0, -len(heights) % BLOCK)).reshape(-1, BLOCK)
    within = blocks @ np.exp(np.outer(np.arange(BLOCK) * step, ORDERS - 1))
    starts = (np.arange(len(blocks)) * BLOCK - zero) * step
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(np.exp(np.outer(starts, ORDERS - 1) + np.log(within)).sum(axis=0) * chords)
