"""Is an update kept or undone? Gates: always kept, one noisy loss test (DPSUR), or buffered rejection (DPSGD-BR).

A trial is one candidate update and one noisy comparison of the model after it with the model before it. A rejected
candidate is undone as a whole (`restore`, in one place), so it leaves nothing behind but the reject bit; noise and
charges are never undone, and every trial is charged before its first answer exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from vestige.mechanism.clipping import Parameters
from vestige.mechanism.losses.loss_difference import LossDifference
from vestige.optim.progress_driven_decay import Comparer, Decay, NoDecay, Update
from vestige.priced_questions import Question, SampledGaussian, Trial

Diagnostics = dict[str, Tensor]
GateState = dict[str, Any]
"""Numbers, lists and tensors only, so that it can be checkpointed. Never rewound: it holds what was released."""

ACCOUNTING = {
    "trial-level": "each trial is one question whose accepted candidate and reject bit are released",
    "every-trial": "each trial is one gradient and one loss question, both charged in full",
}


class Rewindable(Protocol):
    """The training state, as far as a gate uses it."""

    gate: GateState
    step: int
    parameters: Any

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, snapshot: dict[str, object]) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """What a gate is given: the state before an update, how to make the candidate, and how to test it."""

    state: Rewindable
    comparer: Comparer | None
    """Answers the gate's questions about the candidate; None for a gate that keeps every update."""
    move: Callable[[float, float], Diagnostics]
    """Make the candidate, with the noise and the learning rate scaled by these factors."""
    asks: Callable[[float], tuple[Question, ...]]
    """The questions that making the candidate asks, with the noise scaled by this factor."""
    spent: Callable[[], float]
    """An upper bound on epsilon so far."""
    public_accuracy: Callable[[], float] | None = None
    """The model's accuracy on public validation data, if there are any."""


class Outcome(NamedTuple):
    """Whether the candidate was accepted, and the diagnostics that may be shown: none, if it was not."""

    accepted: bool
    diagnostics: Diagnostics


class Gate(Protocol):
    @property
    def tests(self) -> NoisyLossTest | None:
        """The test of its candidates; None if it keeps them all."""
        ...

    @property
    def public_file(self) -> str | None:
        """The file of public examples that it uses, if any."""
        ...

    @property
    def adaptive(self) -> bool:
        """Whether the questions' parameters follow from earlier answers, so that only a filter can bound them."""
        ...

    def at(self, population: int) -> Gate:
        """The same gate for a dataset of this public size."""
        ...

    def init(self) -> GateState: ...

    def questions(self, gradient: tuple[Question, ...]) -> tuple[Question, ...]:
        """What `settle` is charged for one trial, before any decay, given the questions of its candidate."""
        ...

    def settle(self, attempt: Attempt) -> Outcome:
        """Make a candidate; keep it, or undo all of it."""
        ...


@dataclass(frozen=True)
class AlwaysAccept:
    """Every update is kept, and no further question is asked."""

    tests = public_file = None
    adaptive = False

    def at(self, population: int) -> AlwaysAccept:
        return self

    def init(self) -> GateState:
        return {}

    def questions(self, gradient: tuple[Question, ...]) -> tuple[Question, ...]:
        return gradient

    def settle(self, attempt: Attempt) -> Outcome:
        return Outcome(True, attempt.move(1.0, 1.0))


@dataclass(frozen=True)
class NoisyLossTest:
    """A candidate is kept if the noised change of the loss lies below `threshold * bound`.

    Formal guarantees: a trial is one `Trial` question (dominating pair of the released candidate and reject bit), or,
    with `accounting="every-trial"`, its gradient questions and one sampled Gaussian. Both charge every trial, accepted
    or not; the published claim that rejected candidates cost nothing is false.
    """

    multiplier: float = 1.3
    bound: float = 1e-3
    threshold: float = -1.0
    expected_batch: float = 256
    each: float | None = None
    accounting: str = "trial-level"
    rate: float | None = None
    """Inclusion probability of the comparison's sample; None until the size of the dataset is known."""

    adaptive = False
    public_file = None
    releases = "y"

    def __post_init__(self) -> None:
        for name, value in (("multiplier", self.multiplier), ("bound", self.bound)):
            if not 0 < value < inf:
                raise ValueError(f"{name}={value} must be positive")
        if self.each is not None and not self.each > 0:
            raise ValueError(f"each={self.each} must be positive: it bounds one example's loss difference")
        if not self.threshold > -inf:
            raise ValueError(f"threshold={self.threshold} never accepts: give a number, in units of the bound")
        if not self.expected_batch > 0:
            raise ValueError(f"expected_batch={self.expected_batch} must be positive")
        if self.accounting not in ACCOUNTING:
            raise ValueError(f"accounting={self.accounting!r} must be one of {', '.join(ACCOUNTING)}")

    @property
    def tests(self) -> NoisyLossTest:
        return self

    def at(self, population: int) -> NoisyLossTest:
        return replace(self, rate=min(1.0, self.expected_batch / population))

    def init(self) -> GateState:
        return {"accepted": 0, "rejected": 0, "updates": [], "degraded": 0}

    def questions(self, gradient: tuple[Question, ...]) -> tuple[Question, ...]:
        return self.asked(gradient, self.releases)

    def settle(self, attempt: Attempt) -> Outcome:
        trial = run_trial(self, attempt, self.releases)
        counts = attempt.state.gate
        if not trial.accepted:
            attempt.state.restore(trial.before)
            counts["rejected"] += 1
            return Outcome(False, {})
        counts["accepted"] += 1
        note_update(counts, attempt, self, 1.0)
        return Outcome(True, trial.diagnostics)

    @property
    def change(self) -> LossDifference:
        assert self.rate is not None, "call at(population) first"
        return LossDifference(self.rate, self.multiplier, self.bound, self.expected_batch, self.each)

    def asked(self, gradient: tuple[Question, ...], releases: str) -> tuple[Question, ...]:
        """The questions of one trial, given those of its candidate."""
        trial = self.as_one(gradient, releases)
        return (*gradient, self.change.question) if trial is None else (trial,)

    def as_one(self, gradient: tuple[Question, ...], releases: str) -> Trial | None:
        """The whole trial as one question; None if its questions are charged one by one."""
        if self.accounting == "every-trial":
            return None
        candidate = gradient[0]
        if len(gradient) != 1 or not isinstance(candidate, SampledGaussian):
            raise ValueError(
                f"accounting='trial-level' prices one gradient question per trial, and this method asks "
                f"{len(gradient)} of {type(candidate).__name__}; use accounting='every-trial'"
            )
        change = self.change
        half = self.bound / change.sensitivity
        if releases == "yz" and half != 0.5:
            raise ValueError(
                f"each={self.each} has no trial-level price where the noisy losses are used too (a buffer, or "
                "progress='noisy-loss'); leave it out or use accounting='every-trial'"
            )
        tested = (change.rate, change.multiplier, self.threshold)
        return Trial(candidate.rate, candidate.multiplier, *tested, releases=releases, half_range=half)


class Tried(NamedTuple):
    """One trial: the state before it, and its noised loss change, which only "yz" trials may use beyond acceptance."""

    accepted: bool
    change: float
    before: dict[str, object]
    diagnostics: Diagnostics


def run_trial(test: NoisyLossTest, attempt: Attempt, releases: str, noise: float = 1.0, lr: float = 1.0) -> Tried:
    """Make one candidate and compare it with the model it would replace. The caller keeps it or restores `before`."""
    state, comparer, asks = attempt.state, attempt.comparer, attempt.asks(noise)
    assert comparer is not None
    before = state.snapshot()
    old = {name: before["model"][name] for name in state.parameters}
    try:
        with comparer.trial(test.as_one(asks, releases)):
            diagnostics = attempt.move(noise, lr)
            new: Parameters = {name: value.detach() for name, value in state.parameters.items()}
            change = comparer.loss_difference(old, new, test.change, step=state.step, part=len(asks))
    except BaseException:
        state.restore(before)  # a candidate whose test was refused or failed was never accepted
        raise
    return Tried(change < test.threshold * test.bound, change, before, diagnostics)


def note_update(counts: GateState, attempt: Attempt, test: NoisyLossTest, noise: float) -> None:
    """Count an applied update by the noise it was made with, as the published claim charges it."""
    candidate = attempt.asks(noise)[0]
    row = [getattr(candidate, "multiplier", 0.0), test.multiplier]
    if counts["updates"] and counts["updates"][-1][:2] == row:
        counts["updates"][-1][2] += 1
    else:
        counts["updates"].append([*row, 1])


@dataclass(frozen=True)
class BufferedRejection:
    """Candidates that pass the test wait in a buffer; when it is full, the one with the least loss change is applied.

    Candidates whose changes lie within `tie * bound` of the best count as equally good: one of them is drawn uniformly.
    After `max_rejects` rejections in a row one candidate is enough (degraded mode); an acceptance ends the row, an
    update does not: as in the paper's algorithm, the candidates that the next update takes follow from the rejections
    counted when it begins. With `refill` every update begins with a whole buffer to fill, whatever was rejected before.
    `worst_first` prefers the larger change, as the paper prints it.

    Formal guarantees: as `NoisyLossTest`, with the noisy change of accepted candidates released too ("yz") wherever it
    is used: selection, degraded mode and decay are then post-processing. With a decay, the parameters of a trial follow
    from earlier releases, so only a Renyi filter bounds the total.
    """

    test: NoisyLossTest = field(default_factory=NoisyLossTest)
    buffer: int = 2
    tie: float = 1.0
    max_rejects: int = 5
    worst_first: bool = False
    decay: Decay = field(default_factory=NoDecay)
    refill: bool = False

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"buffer={self.buffer} must be at least 1: the candidates to choose among")
        if self.max_rejects < 1:
            raise ValueError(f"max_rejects={self.max_rejects} must be at least 1")
        if not self.tie >= 0:
            raise ValueError(f"tie={self.tie} must not be negative")

    @property
    def tests(self) -> NoisyLossTest:
        return self.test

    @property
    def public_file(self) -> str | None:
        return self.decay.public_file

    @property
    def adaptive(self) -> bool:
        return self.decay.adaptive

    @property
    def releases(self) -> str:
        return "yz" if self.buffer > 1 or self.decay.uses_losses else "y"

    def at(self, population: int) -> BufferedRejection:
        return replace(self, test=self.test.at(population))

    def init(self) -> GateState:
        return {**self.test.init(), "rejects": 0, "wanted": self.buffer, "buffer": [], **self.decay.init()}

    def questions(self, gradient: tuple[Question, ...]) -> tuple[Question, ...]:
        return self.test.asked(gradient, self.releases)

    def settle(self, attempt: Attempt) -> Outcome:
        state, memory = attempt.state, attempt.state.gate
        self.decay.begin(memory, attempt.public_accuracy)
        factors = self.decay.factors(memory)
        test = replace(
            self.test,
            multiplier=self.test.multiplier * factors.validation,
            threshold=self.test.threshold * factors.threshold,
        )
        trial = run_trial(test, attempt, self.releases, factors.noise, factors.lr)
        if trial.accepted:
            self._keep(memory, trial.change, test.bound, state.snapshot())
        else:
            self._reject(memory, test.bound)
        if len(memory["buffer"]) >= memory["wanted"]:
            state.restore(self._select(memory, attempt.comparer, test.bound))
            self._applied(attempt, test, factors.noise, trial.before)
        else:
            state.restore(trial.before)
        return Outcome(trial.accepted, trial.diagnostics if trial.accepted else {})

    def _keep(self, memory: GateState, change: float, bound: float, candidate: dict[str, object]) -> None:
        memory["accepted"] += 1
        memory["rejects"] = 0
        released = change if self.releases == "yz" else 0.0
        memory["buffer"].append([released, candidate])
        self.decay.hear(memory, released, bound)

    def _reject(self, memory: GateState, bound: float) -> None:
        self.decay.hear(memory, None, bound)
        memory["rejected"] += 1
        memory["rejects"] += 1
        if memory["rejects"] >= self.max_rejects:  # checked at each rejection: once per update, it would never hold
            memory["wanted"] = 1

    def _select(self, memory: GateState, comparer: Comparer | None, bound: float) -> dict[str, object]:
        """Draw one of the candidates within `tie * bound` of the best, uniformly, and empty the buffer."""
        sign = -1 if self.worst_first else 1
        best = min(sign * change for change, _ in memory["buffer"])
        good = [candidate for change, candidate in memory["buffer"] if sign * change - best <= self.tie * bound]
        chosen: dict[str, object] = good[comparer.coin(len(good)) if comparer and len(good) > 1 else 0]
        memory["degraded"] += memory["wanted"] < self.buffer
        degraded = memory["rejects"] >= self.max_rejects and not self.refill
        memory["buffer"], memory["wanted"] = [], 1 if degraded else self.buffer
        return chosen

    def _applied(self, attempt: Attempt, test: NoisyLossTest, noise: float, before: dict[str, Any]) -> None:
        note_update(attempt.state.gate, attempt, test, noise)
        asked = len(test.asked(attempt.asks(noise), self.releases))
        names = attempt.state.parameters
        assert attempt.comparer is not None
        update = Update(
            attempt.comparer,
            old={name: before["model"][name] for name in names},
            new={name: value.detach() for name, value in names.items()},
            step=attempt.state.step,
            part=asked,
            public_accuracy=attempt.public_accuracy,
            noise_std=test.change.noise_std,
            threshold=test.threshold * test.bound,
        )
        self.decay.after(attempt.state.gate, update, attempt.spent)
