"""What does a Poisson sample of rows cost a person who has several of them? A mixture of Gaussians.

Each of a person's `group` rows joins by its own toss, and of those that joined at most `cap` are kept, so k vectors of
at most one clip each come and go together: k is binomial, cut at the cap. Whatever they are, the worst case is that
they all point the same way (Choquette-Choo et al. 2023, 2310.15526, Corollary 4.7): N(0, s^2) against a mixture of
N(k, s^2). The likelihood ratio T rises with the place, which makes both profiles one crossing each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr, xlog1py

from vestige.accounting import rdp
from vestige.accounting.profiles import DEEPEST, Profile, sampled_gaussian
from vestige.accounting.rdp import ORDERS, Array, log_sum
from vestige.accounting.samplings.binomial import log_probabilities, tail
from vestige.lazy_scipy import brentq
from vestige.priced_questions import GroupedGaussian

NEGLIGIBLE = 1e-24
"""Chance that so many rows of a person join that they are not followed one by one: charged to delta."""
BLOCK = 1 << 20
"""Numbers held at once."""


def contributions(question: GroupedGaussian, negligible: float) -> tuple[Array, Array, float]:
    """How many rows of a person are in a sample, from 1 up, the logarithm of each number's chance, and the chance of
    more than those; the latter is 0 where all are listed."""
    group, rate, most = question.group, question.rate, question.most
    counts = np.arange(1.0, most + 1)
    logs = log_probabilities(counts, group, rate)
    if most < group:
        with np.errstate(divide="ignore"):
            logs[-1] = np.logaddexp(logs[-1], np.log(tail(most, group, rate)))  # at least so many joined
    beyond = np.concatenate([np.cumsum(np.exp(logs)[::-1])[::-1][1:], [0.0]])
    kept = int(np.argmax(beyond <= negligible)) + 1 if negligible else most
    return counts[:kept], logs[:kept], float(beyond[kept - 1])


def profile(question: GroupedGaussian) -> Profile:
    """The hockey-stick profile of a sample of rows, for blanking all rows of one person.

    Formal guarantees: dominates the release for adding or removing the contributions of a person who has at most
    `group` rows, if each row joins independently with probability `rate`, and of those that joined at most `cap` are
    kept by coins that do not depend on other people's rows.
    """
    simple = _without_mixture(question)
    if simple is not None:
        return sampled_gaussian(*simple)
    counts, logs, lost = contributions(question, NEGLIGIBLE)
    scale, weights, none_joins = question.multiplier, np.exp(logs), xlog1py(question.group, -question.rate)
    joins = -np.expm1(none_joins)
    crossing = _crossings(counts, logs, scale)

    def parts(loss: Array) -> tuple[Array, Array]:
        """strike - Pr[no row joins], without cancellation, and where T is the strike."""
        held = np.where(loss > -0.5, np.expm1(loss) + joins, np.exp(loss) - (1 - joins))
        return held, crossing(held)

    def remove(loss: Array) -> Array:
        held, place = parts(loss)
        above = _weighted(lambda x: ndtr((counts - x) / scale) @ weights, place, len(counts))
        return np.maximum(above - held * ndtr(-place / scale), 0.0) + lost

    def add(loss: Array) -> Array:
        held, place = parts(-loss)
        below = _weighted(lambda x: ndtr((x - counts) / scale) @ weights, place, len(counts))
        return np.asarray(np.exp(loss) * np.maximum(held * ndtr(place / scale) - below, 0.0))

    rare = float(ndtr(-DEEPEST))
    end = counts[-1] + (DEEPEST + 1) * scale  # less lies beyond, also where the largest number is nearly certain
    highest = brentq(lambda x: ndtr((counts - x) / scale) @ weights + ndtr(-x / scale) - rare, 0.0, end)
    reach = np.logaddexp(none_joins, _ratio(np.array([highest]), counts, logs, scale)[0])[0]
    fallen = np.logaddexp(none_joins, _ratio(np.array([-DEEPEST * scale]), counts, logs, scale)[0])[0]
    return Profile(remove, add, max(float(reach), 0.0), max(-float(fallen), 0.0))


def _without_mixture(question: GroupedGaussian) -> tuple[float, float] | None:
    """The rate and multiplier of a sampled Gaussian that is the same pair: one contribution at most, or always all."""
    if question.most == 1:
        if question.group == 1 or question.rate == 1:
            return question.rate, question.multiplier
        return float(-np.expm1(question.group * np.log1p(-question.rate))), question.multiplier
    if question.rate in (0, 1):
        return question.rate, question.multiplier / question.most
    return None


def _ratio(place: Array, counts: Array, logs: Array, scale: float) -> tuple[Array, Array]:
    """log of the likelihood ratio less that of no contribution, and its slope."""
    exponents = logs + (2 * place[:, None] - counts) * counts / (2 * scale**2)
    largest = exponents.max(axis=1)
    terms = np.exp(exponents - largest[:, None])
    total = terms.sum(axis=1)
    return largest + np.log(total), terms @ counts / total / scale**2


def _crossings(counts: Array, logs: Array, scale: float) -> Callable[[Array], Array]:
    """Where the ratio less Pr[no row joins] has a value; -inf where that is not positive. log of it is convex and rises
    with a slope from 1/s^2 to counts/s^2, so Newton's steps from a table converge from above within a few."""
    table = np.linspace(-2 * DEEPEST * scale, counts[-1] + 2 * DEEPEST * scale, 4096)
    heights = _ratio(table, counts, logs, scale)[0]

    def crossing(held: Array) -> Array:
        there = held > 0
        with np.errstate(divide="ignore"):
            wanted = np.log(np.maximum(held, 0.0))
        start = np.interp(wanted, heights, table)

        def newton(places: Array, goals: Array) -> Array:
            for _ in range(60):
                height, slope = _ratio(places, counts, logs, scale)
                move = (goals - height) / slope
                places = places + move
                if np.all(np.abs(move) <= 1e-13 * (np.abs(places) + scale)):
                    break
            return places

        size = max(1, BLOCK // len(counts))
        pieces = [newton(start[there][i : i + size], wanted[there][i : i + size]) for i in range(0, there.sum(), size)]
        found = np.full(held.shape, -np.inf)
        found[there] = np.concatenate(pieces) if pieces else 0.0
        return found

    return crossing


def _weighted(of: Callable[[Array], Array], places: Array, width: int) -> Array:
    size = max(1, BLOCK // width)
    return np.concatenate([of(places[i : i + size, None]) for i in range(0, len(places), size)])


def curves(questions: Sequence[GroupedGaussian]) -> Array:
    """Renyi curves, the larger of both directions at every order.

    The logarithm of T is convex in the place. So T is at most its chord on each cell of a grid, and at least its
    tangent anywhere: with either, a moment is a sum of normal integrals in closed form.

    Formal guarantees: an upper bound at every order, for adding and removing the contributions of a person.
    """
    return np.stack([_curve(question) for question in questions])


@lru_cache(maxsize=256)
def _curve(question: GroupedGaussian) -> Array:
    simple = _without_mixture(question)
    if simple is not None:
        return np.asarray(rdp.curves([simple[0]], [simple[1]])[0])
    if question.multiplier == 0:
        return np.full(len(ORDERS), np.inf)
    scale, most = question.multiplier, question.most
    known = ORDERS * most**2 / (2 * scale**2)  # no rows are left out
    counts, logs, _ = contributions(question, 0.0)
    counts, logs = np.append(0.0, counts), np.append(xlog1py(question.group, -question.rate), logs)
    nodes = _nodes(counts, logs, scale)
    pieces = np.array_split(nodes * scale, 1 + len(nodes) * len(counts) // BLOCK)
    heights, slopes = np.concatenate([_ratio(piece, counts, logs, scale) for piece in pieces], axis=1)
    slopes = slopes * scale
    moment = np.maximum(_removing(nodes, heights, most / scale), _adding(nodes, heights, slopes))
    return np.asarray(np.clip((moment + 1e-12) / (ORDERS - 1), 0.0, known))


def _nodes(counts: Array, logs: Array, scale: float) -> Array:
    """A grid of places in deviations, to where the largest number of rows outweighs all others by e^8."""
    top, others = counts[-1], counts[:-1]
    far = float(np.max((8 + logs[:-1] - logs[-1]) * scale / (top - others) + (top + others) / (2 * scale)))
    centre = np.linspace(-12.0, 12.0, 2401)
    return centre if far <= 12.1 else np.concatenate([centre, np.geomspace(12.0, far, 600)[1:]])


def _removing(nodes: Array, heights: Array, steepest: float) -> Array:
    """log E T^a, T at most its chord on each cell, flat before the first and as steep as it gets after the last."""
    slopes = np.concatenate([[0.0], np.diff(heights) / np.diff(nodes), [steepest]])
    anchors = np.concatenate([[0], np.arange(len(nodes))])
    left, right = np.append(-np.inf, nodes), np.append(nodes, np.inf)
    levels = heights[anchors] - slopes * nodes[anchors]
    return np.array([log_sum(_integrals(order * levels, order * slopes, left, right)) for order in ORDERS])


def _adding(nodes: Array, heights: Array, slopes: Array) -> Array:
    """log E T^(1-a), T at least its tangent at the node in the middle of each cell."""
    ends = np.concatenate([[-np.inf], (nodes[1:] + nodes[:-1]) / 2, [np.inf]])
    levels = heights - slopes * nodes
    return np.array([log_sum(_integrals(-p * levels, -p * slopes, ends[:-1], ends[1:])) for p in ORDERS - 1])


def _integrals(level: Array, slope: Array, left: Array, right: Array) -> Array:
    """log of the integral of e^(level + slope u) from left to right, u standard normal."""
    low, high = left - slope, right - slope
    flip = low + high > 0  # on this side of zero the complement is small, and known to full precision
    low, high = np.where(flip, -high, low), np.where(flip, -low, high)
    upper = log_ndtr(high)
    with np.errstate(divide="ignore"):
        return np.asarray(level + slope**2 / 2 + upper + np.log(-np.expm1(log_ndtr(low) - upper)))
