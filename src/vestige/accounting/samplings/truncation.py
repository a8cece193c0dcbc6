"""What does a Poisson sample cost of which at most so many examples are kept? A mixture of two sampled Gaussians.

Whether the others alone fill the batch is as likely with the example as without it, and may be public. Where they do
not, the example joins with the sampling's rate and replaces no other. Where they do, it is kept with a smaller
probability, and takes the place of another: one contribution comes and one goes, so the sum moves by twice the bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vestige.accounting import rdp
from vestige.accounting.profiles import Profile, sampled_gaussian
from vestige.accounting.rdp import ORDERS, Array
from vestige.accounting.samplings.binomial import ROUNDING, tail
from vestige.priced_questions import TruncatedGaussian


def crowding(question: TruncatedGaussian) -> tuple[float, float, float]:
    """The probabilities that the others leave room, that they fill the batch, and that the example is then kept: each
    is not less than it is."""
    rate, most, population = question.rate, question.most, question.population
    full = tail(most - 1, population - 1, rate) if most < population else 0.0
    if full == 0:
        return 1.0, 0.0, 0.0
    kept = tail(most, population, rate) * most / population / full
    return 1 - full * (1 - ROUNDING), full * (1 + ROUNDING), min(rate, kept * (1 + 3 * ROUNDING))


def profile(question: TruncatedGaussian) -> Profile:
    """The hockey-stick profile of a truncated sample.

    Formal guarantees: dominates the release for adding or removing one of `population` rows, if which rows are kept of
    too many is drawn uniformly: given that the others fill the batch, those kept of them are a uniform set, however
    many had joined, and the example takes the place of one of them with a probability that does not depend on which
    they are (Ganesh 2025, 2508.15089; the mixture of two public cases is jointly convex).
    """
    room, full, kept = crowding(question)
    free = sampled_gaussian(question.rate, question.multiplier)
    if full == 0:
        return free
    taken = sampled_gaussian(kept, question.multiplier / 2)

    def remove(loss: Array) -> Array:
        return room * free.remove(loss) + full * taken.remove(loss)

    def add(loss: Array) -> Array:
        return room * free.add(loss) + full * taken.add(loss)

    reach = max(free.remove_reach, taken.remove_reach), max(free.add_reach, taken.add_reach)
    return Profile(remove, add, *reach)


def curves(questions: Sequence[TruncatedGaussian]) -> Array:
    """Renyi curves: the moments of a mixture of two public cases are mixed.

    Formal guarantees: an upper bound at every order, for adding and removing an example.
    """
    result = []
    for question in questions:
        room, full, kept = crowding(question)
        rates, multipliers = [question.rate, kept], [question.multiplier, question.multiplier / 2]
        free, taken = rdp.curves(rates, multipliers)
        with np.errstate(divide="ignore"):
            logs = np.log(room) + (ORDERS - 1) * free, np.log(full) + (ORDERS - 1) * taken
        result.append(free if full == 0 else np.logaddexp(*logs) / (ORDERS - 1))
    assert not any(np.isnan(curve).any() for curve in result)
    return np.stack(result)
