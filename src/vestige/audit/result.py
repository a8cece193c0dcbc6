"""What did an audit find? Numbers with their confidence, and whether they contradict the accountant."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vestige.accounting.lower_bounds.roc_and_confidence_intervals import Interval
from vestige.assumptions import PRICE_ALONE
from vestige.audit.made_up_task import NAME

ENOUGH = 400
"""Runs from which on the interval of a ROC's area is trusted."""


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
    """Epsilon is at least this, with `confidence`, whatever the scores' distributions: the better of the bounds by a
    threshold and by the ROC's area, each with half the error."""
    bounded_by: str
    """ "threshold" or "area"."""
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
    """Under the attacker's ROC (DeLong's interval)."""
    area_allowed: float | None
    """The largest area that the accountant's whole curve allows."""
    noise_factor: Interval | None
    """An estimate: the noise that the area looks like, over what was priced. 1 where a perfect attack meets a tight
    accountant; more for a weaker attack; less is a fault."""
    epsilon_by_area: float | None
    """An estimate: epsilon with the noise of `noise_factor`."""
    epsilon_by_area_low: float | None
    """The estimate from below, at the far end of `noise_factor`."""
    detection_at_1_percent: Interval
    curve_broken_by: float | None
    """By how much detections exceed what the accountant's whole curve allows, with `confidence`; None for a filter,
    which promises one epsilon only."""
    curve_detected: float
    curve_false_alarms: float
    roc: tuple[tuple[float, float], ...] = ()
    """The attacker's false alarms and detections, at about a hundred thresholds."""
    roc_allowed: tuple[tuple[float, float], ...] | None = None
    """The most detections that the accountant's whole curve allows."""

    @property
    def contradicts(self) -> bool:
        """Whether the accountant is wrong, with `confidence` in each of three tests that assume nothing about the
        scores: of its epsilon and of its curve at a threshold, and of its curve by the ROC's area, whose interval is
        approximate and counts from so many runs on."""
        curve = self.curve_broken_by is not None and self.curve_broken_by > 0
        area = self.area_allowed is not None and self.runs >= ENOUGH and self.area.low > self.area_allowed
        return self.epsilon_lower_bound > self.epsilon or curve or area

    @property
    def nonprivate(self) -> bool:
        """Whether all this was computed, without noise, from examples that may be private."""
        return self.task != NAME

    def to_json(self) -> dict[str, object]:
        said = {"contradicts": self.contradicts, "nonprivate": self.nonprivate}
        return {**asdict(self), **said, "assumptions": list(PRICE_ALONE)}
