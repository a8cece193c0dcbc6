"""What did an audit find? Numbers with their confidence, and whether they contradict the accountant."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vestige.audit.rates import Interval


@dataclass(frozen=True, kw_only=True)
class InAndOut:
    """The result of runs with and without a canary."""

    task: str
    method: str
    canary: str
    sees: str
    runs: int
    wanted: int
    stacked: bool
    seconds: float
    examples: int
    steps: int
    sample_rate: float
    noise_multiplier: float
    delta: float
    confidence: float
    epsilon: float
    """The accountant's: an upper bound for the same charges."""
    epsilon_lower_bound: float
    """Epsilon is at least this, with `confidence`, whatever the scores' distributions."""
    epsilon_estimate: float
    """An estimate: the epsilon of two normal distributions fitted to the scores."""
    epsilon_estimate_low: float
    """The estimate from below, with `confidence` if the scores are normal."""
    mu: float
    mu_low: float
    detected: float
    false_alarms: float
    guesses: str
    area: Interval
    detection_at_1_percent: Interval
    curve_broken_by: float | None
    """By how much detections exceed what the accountant's whole curve allows, with `confidence`; None for a filter,
    which promises one epsilon only."""
    curve_detected: float
    curve_false_alarms: float

    @property
    def contradicts(self) -> bool:
        """Whether the accountant is wrong, with `confidence` in each of two distribution-free tests."""
        curve = self.curve_broken_by is not None and self.curve_broken_by > 0
        return self.epsilon_lower_bound > self.epsilon or curve

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "contradicts": self.contradicts}
