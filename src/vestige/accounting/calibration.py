"""How much noise does a budget need? The smallest multiplier whose plan costs no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, log, sqrt

from vestige.accounting.composition import COARSE, FINE, epsilon, epsilon_by_distribution
from vestige.accounting.theorems import History
from vestige.checks import check_delta, check_epsilon

LARGEST_MULTIPLIER = 1e6


def calibrate(history_of: Callable[[float], History], epsilon: float, delta: float, accountant: str = "pld") -> float:
    """The smallest noise multiplier for which `history_of(multiplier)` costs at most `epsilon`, to 0.1% of epsilon.

    Formal guarantees: the history at the returned multiplier was priced, and costs at most `epsilon`.
    """
    check_delta(delta)
    check_epsilon(epsilon)
    search = _Calibration(history_of, epsilon, delta)
    if accountant == "rdp":
        return search.solve(search.by_renyi, *search.bracket(search.by_renyi))
    if accountant != "pld":
        raise ValueError(f'accountant={accountant!r} must be "pld" or "rdp"')
    coarse = search.by_distribution(COARSE)
    low, high = search.bracket(coarse)
    near = search.solve(coarse, low, high)
    # The coarse grid is never below the fine one and at most about 0.02% above it, so this is usually one evaluation.
    return search.solve(search.by_distribution(FINE), low, high, start=near)


@dataclass(frozen=True)
class _Calibration:
    """One search: cost falls with the multiplier, nearly as a power law, so secants in log-log coordinates converge."""

    history_of: Callable[[float], History]
    target: float
    delta: float

    def by_renyi(self, multiplier: float) -> float:
        return epsilon(self.history_of(multiplier), self.delta, "rdp")

    def by_distribution(self, fineness: float) -> Callable[[float], float]:
        def cost(multiplier: float) -> float:
            return epsilon_by_distribution(self.history_of(multiplier), self.delta, fineness)

        return cost

    def bracket(self, cost: Callable[[float], float]) -> tuple[float, float]:
        """Multipliers between which the target lies, found by the Renyi accountant and held against `cost`."""
        high = 1.0
        while self.by_renyi(high) > self.target and high < LARGEST_MULTIPLIER:
            high *= 2
        if high >= LARGEST_MULTIPLIER and (floor_cost := cost(high)) > self.target:
            raise ValueError(
                f"epsilon={self.target} cannot be reached: with a noise multiplier of {high:.0f} the plan still costs "
                f"{floor_cost:.4g}; ask fewer questions whose noise is fixed, or allow a larger epsilon"
            )
        low = high / 2
        while self.by_renyi(low) <= self.target or cost(low) <= self.target:
            low /= 2
            if low < 1 / LARGEST_MULTIPLIER:
                raise ValueError(
                    f"epsilon={self.target} is met with next to no noise: the plan asks nothing, or its cost does not "
                    "depend on the multiplier; there is nothing to calibrate"
                )
        return low, high

    def solve(self, cost: Callable[[float], float], low: float, high: float, start: float | None = None) -> float:
        """A multiplier in (low, high] with cost within [0.999, 1] of the target; `cost` must fall below it at high."""
        least, most = 0.999 * self.target, self.target
        known: list[tuple[float, float]] = []
        trial = start or sqrt(low * high)
        for _ in range(100):
            price = cost(trial)
            if least <= price <= most:
                return trial
            low, high = (trial, high) if price > most else (low, trial)
            known = [*known, (trial, price)][-2:]
            trial = self._next(known, low, high)
            if high / low < 1 + 1e-9:  # a fixed cost makes the curve flat just below the target
                return high
        raise AssertionError(f"no multiplier found between {low} and {high}")

    def _next(self, known: list[tuple[float, float]], low: float, high: float) -> float:
        aim, middle = log(0.9996 * self.target), sqrt(low * high)
        slope = -1.0
        if len(known) == 2 and all(0 < price < inf for _, price in known):
            (x0, y0), (x1, y1) = ((log(x), log(y)) for x, y in known)
            slope = (y1 - y0) / (x1 - x0) if x1 != x0 else -1.0
        multiplier, price = known[-1]
        if not 0 < price < inf or slope >= 0:
            return middle
        guess = exp(min(log(multiplier) + (aim - log(price)) / slope, log(high)))
        return guess if low < guess < high else middle
