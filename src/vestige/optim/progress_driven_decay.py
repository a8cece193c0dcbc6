"""How do noise, rate and threshold change as training progresses? Phased decay, and the signals that may drive it.

The un-noised accuracy on private data is no such signal: a schedule that follows it reveals it (delta is 1 at every
epsilon). Each signal here is already released, public, or asked with noise and charged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import ceil, erfc, exp, inf, log, pi, sqrt
from typing import Any, NamedTuple, Protocol

from vestige.mechanism.clipping import Parameters
from vestige.mechanism.losses.loss_difference import LossDifference
from vestige.priced_questions import BudgetSpent, Trial

DecayState = dict[str, Any]


class Factors(NamedTuple):
    """The factors on the initial noise, test noise, learning rate and threshold."""

    noise: float = 1.0
    validation: float = 1.0
    lr: float = 1.0
    threshold: float = 1.0


class Comparer(Protocol):
    """The comparisons of two models that a gate may ask the curator for, all of them noised and charged."""

    def trial(self, question: Trial | None) -> AbstractContextManager[None]: ...

    def loss_difference(
        self, before: Parameters, after: Parameters, change: LossDifference, *, step: int, part: int
    ) -> float: ...

    def count_difference(
        self, before: Parameters, after: Parameters, *, rate: float, multiplier: float, step: int, part: int
    ) -> float: ...

    def coin(self, sides: int) -> int: ...


@dataclass(frozen=True)
class Update:
    """An applied update, as a progress signal sees it."""

    comparer: Comparer
    old: Parameters
    new: Parameters
    step: int
    part: int
    """The number of the next question of this step."""
    public_accuracy: Callable[[], float] | None
    noise_std: float
    threshold: float
    """Noisy losses have noise of `noise_std`, and were released where they lay below `threshold`."""


class ProgressSignal(Protocol):
    @property
    def file(self) -> str | None:
        """The file of public examples that it uses, if any."""
        ...

    @property
    def uses_losses(self) -> bool:
        """Whether accepted candidates' noisy losses are used, so that they must be charged as released."""
        ...

    @property
    def usual(self) -> float:
        """The gain that separates fast from slow progress unless the user gives one, in this signal's own unit."""
        ...

    def hear(self, heard: DecayState, change: float | None, bound: float) -> None:
        """Record a trial: the noisy loss change of an accepted candidate, or None for a rejected one."""
        ...

    def gain(self, heard: DecayState, update: Update) -> float | None:
        """How fast the model improves now; None if the budget left no room to ask."""
        ...


def _hears_nothing(self: object, heard: DecayState, change: float | None, bound: float) -> None:
    """For a signal that does not use trials."""


@dataclass(frozen=True)
class NoisyLosses:
    """How often candidates lower the loss, from what their tests released: reject bits, and accepted noisy changes.

    They are already charged ("yz" trials), so this is free. The gain is the mean improvement before noise, in units of
    its clipping bound: 1 if every candidate lowers the loss, -1 if every one raises it.
    """

    weight: float = 0.02
    """The weight of the newest trial in the running mean; the first 1/weight trials all weigh the same."""
    file = None
    uses_losses = True
    usual = 0.5
    """Three candidates in four lower the loss."""

    def hear(self, heard: DecayState, change: float | None, bound: float) -> None:
        heard["heard"] += 1
        newest = max(self.weight, 1 / heard["heard"])
        heard["passed"] += newest * ((change is not None) - heard["passed"])
        heard["below"] += newest * ((change or 0.0) - heard["below"])
        heard["bound"] = bound

    def gain(self, heard: DecayState, update: Update) -> float:
        bound = heard["bound"]
        return -uncensored_mean(heard["below"], heard["passed"], update.noise_std, update.threshold, bound) / bound


@dataclass(frozen=True)
class PublicAccuracy:
    """The gain in accuracy on public examples: the test part of `file`, in the task's own format."""

    file: str
    uses_losses = False
    usual = 0.005
    hear = _hears_nothing

    def gain(self, heard: DecayState, update: Update) -> float:
        if update.public_accuracy is None:
            raise ValueError("progress='public:FILE' was chosen, but no public examples were given")
        now = update.public_accuracy()
        gain: float = now - heard["public"]
        heard["public"] = now
        return gain


@dataclass(frozen=True)
class NoisyCount:
    """The noised gain in accuracy on a sample of the private data: one more charged question per update."""

    rate: float = 0.1
    multiplier: float = 25.0
    file = None
    uses_losses = False
    usual = 0.005
    hear = _hears_nothing

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate={self.rate} must lie in (0, 1]")
        if not self.multiplier > 0:
            raise ValueError(f"multiplier={self.multiplier} must be positive")

    def gain(self, heard: DecayState, update: Update) -> float | None:
        place = {"step": update.step, "part": update.part}
        try:
            return update.comparer.count_difference(
                update.old, update.new, rate=self.rate, multiplier=self.multiplier, **place
            )
        except BudgetSpent:
            return None


@dataclass(frozen=True)
class NoDecay:
    """Parameters fixed in advance."""

    adaptive = False
    uses_losses = False
    public_file = None

    def init(self) -> DecayState:
        return {}

    def factors(self, heard: DecayState) -> Factors:
        return Factors()

    def begin(self, heard: DecayState, public_accuracy: Callable[[], float] | None) -> None:
        pass

    def hear(self, heard: DecayState, change: float | None, bound: float) -> None:
        pass

    def after(self, heard: DecayState, update: Update, spent: Callable[[], float]) -> None:
        pass


@dataclass(frozen=True)
class PhasedDecay:
    """After each update: if the gain exceeds `threshold`, noise, test noise and rate shrink by `fast`; if not, noise,
    acceptance threshold and rate shrink by `slow`. Once epsilon reaches `until`, nothing changes any more.

    With a `grid` (0.02: two percent) factors are rounded up to its powers, so that there are few distinct trials and
    few prices to compute; without one they are exact, and every update changes the price of a trial.

    Formal guarantees: none of its own. The parameters of a question follow from earlier releases, so only a Renyi
    filter bounds the total.
    """

    progress: ProgressSignal = field(default_factory=NoisyLosses)
    fast: float = 0.999
    slow: float = 0.9999
    threshold: float | None = None
    """None: the signal's usual gain."""
    until: float = inf
    grid: float | None = None
    adaptive = True

    def __post_init__(self) -> None:
        for name, value in (("fast", self.fast), ("slow", self.slow)):
            if not 0 < value <= 1:
                raise ValueError(f"{name}={value} must lie in (0, 1]")
        if self.grid is not None and not self.grid > 0:
            raise ValueError(f"grid={self.grid} must be positive, or None: exact factors")

    @property
    def uses_losses(self) -> bool:
        return self.progress.uses_losses

    @property
    def public_file(self) -> str | None:
        return self.progress.file

    def init(self) -> DecayState:
        return {"fast": 0, "slow": 0, "heard": 0, "passed": 0.0, "below": 0.0, "bound": None, "public": None}

    def factors(self, heard: DecayState) -> Factors:
        fast, slow = heard["fast"] * log(self.fast), heard["slow"] * log(self.slow)
        return Factors(*(self._factor(each) for each in (fast + slow, fast, fast + slow, slow)))

    def _factor(self, logarithm: float) -> float:
        if self.grid is None:
            return exp(logarithm)
        # 1e-9 absorbs rounding, so that a factor on the grid stays where it is
        return exp(ceil(logarithm / self.grid - 1e-9) * self.grid)

    def begin(self, heard: DecayState, public_accuracy: Callable[[], float] | None) -> None:
        """Before a trial: the accuracy of the model that the first update changes is the one to compare with."""
        if self.progress.file is not None and heard["public"] is None and public_accuracy is not None:
            heard["public"] = public_accuracy()

    def hear(self, heard: DecayState, change: float | None, bound: float) -> None:
        self.progress.hear(heard, change, bound)

    def after(self, heard: DecayState, update: Update, spent: Callable[[], float]) -> None:
        """Count an applied update as fast or slow progress."""
        if self.until < inf and spent() >= self.until:
            return
        gain = self.progress.gain(heard, update)
        if gain is not None:
            fast = gain > (self.progress.usual if self.threshold is None else self.threshold)
            heard["fast" if fast else "slow"] += 1


Decay = NoDecay | PhasedDecay


def uncensored_mean(below: float, passed: float, noise_std: float, threshold: float, bound: float) -> float:
    """The maximum likelihood mean in [-bound, bound] of normal values of which only those below the threshold are seen.

    `passed` is the share that was seen, `below` the sum of those divided by the number of all. The likelihood is
    greatest where the mean equals that of the seen values and the expected unseen ones together.
    """
    low, high = -bound, bound
    for _ in range(60):
        middle = (low + high) / 2
        if below + (1 - passed) * mean_above(middle, noise_std, threshold) > middle:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_above(mean: float, noise_std: float, threshold: float) -> float:
    """The mean of a normal variable given that it exceeds the threshold."""
    edge = (threshold - mean) / noise_std
    if edge > 8:  # where the tail is tiny, the mean lies just above the threshold
        return threshold + noise_std / edge
    return mean + noise_std * exp(-(edge**2) / 2) / sqrt(2 * pi) / (erfc(edge / sqrt(2)) / 2)
