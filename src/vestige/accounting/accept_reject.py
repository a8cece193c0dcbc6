"""What does one accept-or-reject trial cost, whether or not it accepts? Its dominating pair (docs/theorems.md 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log, log1p

import numpy as np
from scipy.special import log_ndtr, ndtr

from vestige.accounting.profiles import DEEPEST, Profile, call, excess_moments, put, reaches
from vestige.accounting.rdp import ORDERS, Array
from vestige.accounting.rdp import curves as renyi_curves
from vestige.priced_questions import Trial

MOMENT_CELLS = 50_000
MOMENT_DEEPEST = 20.0
"""Moments need deeper tails than deltas do; beyond these they are bounded in closed form."""
CERTAIN = 1e-9
"""A statistic that may be rejected with less probability than this is priced as if it were always released."""


@dataclass(frozen=True)
class Payoff:
    """A convex function of the candidate's likelihood ratio, as a sum of options: sum weight (ratio - strike)_+ for
    calls, sum weight (strike - ratio)_+ for puts, plus `floor`, which bounds the tails left out."""

    log_strikes: Array
    weights: Array
    missing: float
    """One minus the sum of the weights (puts) or of the weights times strikes (calls), kept apart for its precision."""
    floor: float = 0.0


@dataclass(frozen=True)
class Pair:
    """The worst trial: what an adversary can gain from accepted answers, per unit of the other side's probability.

    calls(u) is the sup of u Pr[accept, with] - Pr[accept, without] given the candidate, puts(u) that of the reverse.
    """

    calls: Payoff
    puts: Payoff
    never: float
    """The least probability of rejection, one minus the largest of acceptance."""
    always: bool = False
    """Whether rejection is excluded, so that it is no event to bet on."""


def profile(trial: Trial, deepest: float = DEEPEST) -> Profile:
    """The hockey-stick profile of a trial.

    Formal guarantees: dominates the trial for adding or removing an example from the pool of both samples, provided
    that both samples are fresh, independent and Poisson, both losses are measured on the same one, and rejection
    restores the whole state. The sup over events is taken point by point in the candidate, because a trial's output is
    not conditioned on acceptance; it is convex in the candidate's likelihood ratio, which the largest shift maximises.
    """
    candidate = reaches(trial.rate, trial.multiplier, deepest)
    test = reaches(trial.validation_rate, trial.validation_multiplier, deepest) if trial.validation_rate else (0.0, 0.0)
    low, high = acceptance(trial)
    if trial.releases == "yz":
        threshold = trial.threshold * trial.half_range if ndtr(-_top(trial)) > CERTAIN else inf

        def pair(step: float) -> Pair:
            return _with_statistic(trial.validation_rate, trial.validation_multiplier, threshold, test, step)
    else:
        known = _candidate_only(trial.validation_rate, low, high, ndtr(-_top(trial)), ndtr(-_bottom(trial)))
        jump = log1p(trial.validation_rate * (high / low - 1))
        fall = -log1p(-trial.validation_rate * (1 - low / high))
        test = jump, max(fall, -log1p(-trial.validation_rate) if trial.validation_rate < 1 else fall)

        def pair(step: float) -> Pair:
            return known

    return _against_candidate(trial.rate, trial.multiplier, pair, candidate, test)


def _top(trial: Trial) -> float:
    return (trial.threshold + 1) * trial.half_range / trial.validation_multiplier


def _bottom(trial: Trial) -> float:
    return (trial.threshold - 1) * trial.half_range / trial.validation_multiplier


def acceptance(trial: Trial) -> tuple[float, float]:
    """The smallest and largest probability of acceptance, over all data: clipping bounds the statistic."""
    low, high = float(ndtr(_bottom(trial))), float(ndtr(_top(trial)))
    if low == 0:
        raise ValueError(f"threshold={trial.threshold} never accepts a bad candidate, so no loss bounds it; raise it")
    return low, high


def _candidate_only(rate: float, low: float, high: float, never: float, perhaps: float) -> Pair:
    """Only an accepted candidate is released: the adversary picks acceptance probabilities in [low, high], exactly."""
    better, worse = (1 - rate) * low + rate * high, (1 - rate) * high + rate * low
    strikes, weights = [log(low / better)], [better]
    if rate < 1:
        strikes, weights = [*strikes, -log1p(-rate)], [*weights, (1 - rate) * (high - low)]
    calls = Payoff(np.array(strikes), np.array(weights), never)
    puts = Payoff(np.array([log(high / worse)]), np.array([worse]), (1 - rate) * never + rate * perhaps)
    return Pair(calls, puts, never)


def _with_statistic(rate: float, multiplier: float, threshold: float, reach: tuple[float, float], step: float) -> Pair:
    """The accepted statistic is released too: chords of both payoffs between strikes on the grid lie above them."""
    index = _dots(reach, rate / multiplier / 10, step)
    strikes = np.exp(index * step)
    calls, puts = _statistic_payoffs(strikes, rate, multiplier, threshold)
    highest = float(ndtr((threshold + 0.5) / multiplier))
    first = calls[0] / strikes[0]  # a convex function that is zero at zero lies below this line up to the first dot
    last = (puts[0] - highest) / strikes[0]
    call_slopes = np.concatenate([[first], np.diff(calls) / np.diff(strikes), [highest]])
    put_slopes = np.concatenate([[last], np.diff(puts) / np.diff(strikes), [0.0]])
    call_weights, put_weights = (np.maximum(np.diff(slopes), 0.0) for slopes in (call_slopes, put_slopes))
    return Pair(
        Payoff(index * step, call_weights, 1 - float(call_weights @ strikes), float(first)),
        Payoff(index * step, put_weights, 1 - float(put_weights.sum()), float(puts[-1])),
        float(ndtr(-(threshold + 0.5) / multiplier)),
        always=threshold == inf,
    )


def _dots(reach: tuple[float, float], gap: float, step: float) -> Array:
    """Multiples of the step, dense around zero and thinning out geometrically by 3% a dot."""
    sides = []
    for sign, end in ((-1, reach[0]), (1, reach[1])):
        count = np.ceil(np.arcsinh(0.03 * (end + step) / max(gap, step)) / 0.03)
        sides.append(sign * np.ceil(np.sinh(0.03 * np.arange(count + 1)) * max(gap, step) / 0.03 / step))
    return np.unique(np.concatenate(sides))


def _statistic_payoffs(strike: Array, rate: float, multiplier: float, threshold: float) -> tuple[Array, Array]:
    """The sup over the values of the statistic without (e0) and with the example (e1), both at an end of the range.

    The integral over z < threshold of the positive part of c0 phi(z - e0) + c1 phi(z - e1), and of the negative part.
    """
    c0, c1 = strike * (1 - rate) - 1, strike * rate
    with np.errstate(divide="ignore"):
        cut = multiplier**2 * np.log(np.maximum(-c0, 0.0) / c1)  # positive where +-z > cut

    def mass(left: Array | float, right: Array | float, middle: float) -> Array:
        a, b = (np.asarray(left) - middle) / multiplier, (np.asarray(right) - middle) / multiplier
        flip = a > 0  # the smaller tail keeps its precision
        return np.maximum(ndtr(np.where(flip, -a, b)) - ndtr(np.where(flip, -b, a)), 0.0)

    def gain(left: Array | float, right: Array | float, without: float) -> Array:
        return c0 * mass(left, right, without) + c1 * mass(left, right, -without)

    highest = ndtr((threshold + 0.5) / multiplier)
    split_down, split_up = np.minimum(-cut, threshold), np.minimum(cut, threshold)
    calls = [highest * np.maximum(strike - 1, 0.0), gain(-inf, split_down, 0.5), gain(split_up, threshold, -0.5)]
    puts = [highest * np.maximum(1 - strike, 0.0), -gain(split_down, threshold, 0.5), -gain(-inf, split_up, -0.5)]
    return np.maximum.reduce(calls), np.maximum.reduce(puts)


def _against_candidate(
    rate: float,
    multiplier: float,
    pair: Callable[[float], Pair],
    candidate: tuple[float, float],
    test: tuple[float, float],
) -> Profile:
    """Average the payoffs over the candidate, and let the adversary bet on acceptance alone or on rejection as well."""

    def remove(loss: Array) -> Array:
        worst, price = pair(loss[1]), np.exp(loss)
        accept = worst.calls.floor + _options(call, rate, multiplier, worst.calls, loss, 1)
        if worst.always:
            return accept
        # 1 - c + puts; E (k - T)_+ = k - 1 + E (T - k)_+ turns puts into calls, so that large terms cancel first
        rest = worst.puts.missing - price * worst.never
        return np.maximum(accept, rest + _options(call, rate, multiplier, worst.puts, loss, 1))

    def add(loss: Array) -> Array:
        worst, price = pair(loss[1]), np.exp(loss)
        accept = worst.puts.floor + price * _options(put, rate, multiplier, worst.puts, loss, -1)
        if worst.always:
            return accept
        rest = worst.calls.missing - price * worst.never
        return np.maximum(accept, rest + price * _options(put, rate, multiplier, worst.calls, loss, -1))

    return Profile(remove, add, candidate[0] + test[0], candidate[1] + test[1])


def _options(
    option: Callable[[float, float, Array], Array],
    rate: float,
    multiplier: float,
    payoff: Payoff,
    loss: Array,
    sign: int,
) -> Array:
    """sum_j weight_j E option(strike_j e^(sign loss)). Many strikes are multiples of the step, so one table serves."""
    if len(payoff.weights) <= 2:
        terms = zip(payoff.weights, payoff.log_strikes, strict=True)
        return np.asarray(sum(weight * option(rate, multiplier, sign * loss + strike) for weight, strike in terms))
    step, count = loss[1], len(loss)
    index = np.round(payoff.log_strikes / step).astype(int)
    lowest = index[0] - (count - 1 if sign < 0 else 0)
    table = option(rate, multiplier, np.arange(lowest, lowest + count + index[-1] - index[0]) * step)
    total = np.zeros(count)
    for weight, start in zip(payoff.weights, index - index[0], strict=True):
        total += weight * table[start : start + count]
    return total if sign > 0 else total[::-1]


def curves(trials: Sequence[Trial]) -> Array:
    """Renyi curves of trials: moments of the dominating pair, or the full charge of both samples where that is less.

    Formal guarantees: an upper bound at every order, for adding and removing an example; rejected or not, a trial is a
    function of a sampled Gaussian candidate and a sampled Gaussian statistic.
    """
    candidates = renyi_curves([t.rate for t in trials], [t.multiplier for t in trials])
    tests = renyi_curves([t.validation_rate for t in trials], [t.validation_multiplier for t in trials])
    result = candidates + tests
    for i, trial in enumerate(trials):
        if trial.rate > 0 and np.isfinite(result[i]).all() and trial.validation_multiplier < inf:
            # With next to no noise moments overflow; fmin leaves the full charge where they are not a number.
            with np.errstate(over="ignore", invalid="ignore"):
                log_moments = np.log1p(_moments(trial) + np.exp(_log_tails(trial, candidates[i], tests[i])))
            result[i] = np.fmin(result[i], log_moments / (ORDERS - 1))
    return result


def _moments(trial: Trial) -> Array:
    worst = profile(trial, MOMENT_DEEPEST)
    step = max(worst.remove_reach, worst.add_reach) / MOMENT_CELLS
    return np.maximum(excess_moments(worst, step), excess_moments(worst.reversed, step))


def _log_tails(trial: Trial, candidate: Array, test: Array) -> Array:
    """log of the part of the moments beyond the profile's reach, from above.

    There the likelihood ratio of both releases exceeds the product of their reaches, so that one exceeds its own.
    """
    candidate_tail = _log_tail(trial.rate, trial.multiplier)
    if trial.releases == "y":  # the statistic's ratio is at most that of the acceptance probabilities
        low, high = acceptance(trial)
        return candidate_tail + ORDERS * log1p(trial.validation_rate * (high / low - 1))
    test_tail = _log_tail(trial.validation_rate, trial.validation_multiplier)
    return np.logaddexp(candidate_tail + (ORDERS - 1) * test, test_tail + (ORDERS - 1) * candidate)


def _log_tail(rate: float, multiplier: float) -> Array:
    """log E[T^a; noise beyond MOMENT_DEEPEST], from T = 1 - q + q e^w <= e^w (q + (1 - q) e^-w0) for w >= w0 >= 0."""
    if rate == 0:
        return np.full(len(ORDERS), -inf)
    shift = 1 / multiplier
    start = MOMENT_DEEPEST * shift - shift**2 / 2
    scale = np.log(rate + (1 - rate) * np.exp(-max(start, 0.0)))
    normal = (ORDERS**2 - ORDERS) * shift**2 / 2 + log_ndtr(ORDERS * shift - MOMENT_DEEPEST)
    return np.asarray(ORDERS * scale + normal)
