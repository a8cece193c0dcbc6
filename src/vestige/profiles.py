"""By how much can one question's answers differ with and without an example? Hockey-stick profiles of Gaussians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from vestige.renyi import Array

DEEPEST = 10.0
"""Standard deviations of noise followed into the tails: 8e-24 of the mass lies beyond and is charged to delta."""


@dataclass(frozen=True)
class Profile:
    """sup over pairs of sup over events of Pr[with] - e^loss Pr[without] (`remove`), and the reverse (`add`).

    Both take losses >= 0 and give upper bounds that fall to a negligible mass at `remove_reach` and `add_reach`. The
    profiles at negative losses follow: E_c(P, Q) = 1 - c + c E_{1/c}(Q, P).
    """

    remove: Callable[[Array], Array]
    add: Callable[[Array], Array]
    remove_reach: float
    add_reach: float


def sampled_gaussian(rate: float, multiplier: float) -> Profile:
    """The sampled Gaussian: N(0, s^2) against (1 - q) N(0, s^2) + q N(1, s^2) (Zhu, Dong & Wang 2022, Theorem 11)."""

    def crossing(loss: Array) -> Array:
        """Where the likelihood ratio of with to without is e^loss; -inf where it is always above."""
        with np.errstate(divide="ignore"):
            above = np.log(np.maximum(1 + np.expm1(loss) / rate, 0.0))  # (e^loss - (1 - q)) / q
        return np.asarray(multiplier**2 * above + 0.5)

    def remove(loss: Array) -> Array:
        x = crossing(loss)
        present, absent = ndtr((1 - x) / multiplier), ndtr(-x / multiplier)
        return np.maximum(rate * (present - absent) - np.expm1(loss) * absent, 0.0)

    def add(loss: Array) -> Array:
        x = crossing(-loss)
        present, absent = ndtr((x - 1) / multiplier), ndtr(x / multiplier)
        # 1 - e^loss (1 - q) is the part of `absent` that sampling cannot hide; it is negative beyond -log(1 - q).
        return np.maximum(absent * (rate * np.exp(loss) - np.expm1(loss)) - np.exp(loss) * rate * present, 0.0)

    deepest = DEEPEST / multiplier + 1 / (2 * multiplier**2)
    remove_reach = float(np.logaddexp(np.log1p(-rate), np.log(rate) + deepest)) if rate < 1 else deepest
    add_reach = min(deepest, -float(np.log1p(-rate))) if rate < 1 else deepest
    return Profile(remove, add, remove_reach, add_reach)
