"""What do thousands of short runs show, half of them with a canary? A lower bound beside the accountant's epsilon."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator
from torch import Tensor, nn

from vestige import accounting, tasks
from vestige.accounting.lower_bounds.bounds_from_scores import best_lower_bound, epsilon_lower_bound, gaussian_fit
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import (
    Array,
    Interval,
    area_under_curve,
    check_confidence,
    rate_of_detection,
    roc,
)
from vestige.audit.canaries import Canary, check_kind, make_canary
from vestige.audit.made_up_task import NAME, stand_in
from vestige.audit.result import InAndOut
from vestige.audit.stacked import AuditedStack
from vestige.audit.unstacked_runs import LoneRuns
from vestige.budget.spending import Budget, Provenance, account_of, pay
from vestige.compare.stacked import StackedRun, check_noise, footprint, why_not
from vestige.layout import Layout
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.priced_questions import CyclicGaussian, Gaussian, Question, SampledGaussian
from vestige.processes.torchrun import require_alone
from vestige.training.planning import Plan, Request, plan, questions, settled

VIEWS = {
    "releases": "every release is seen (white-box)",
    "model": "only the final model is seen, its parameters included",
    "state": "what the run keeps after its last step is seen: the buffers of its memory and its optimizer's moments",
    "loss": "only the canary's loss at the final model is seen (black-box)",
}
LARGEST_STACK, MEMORY = 2000, 1 << 29
"""Runs trained together at most, and bytes that they may take."""

OnRuns = Callable[[int], bool]
"""Called with the number of runs done; False ends the audit with those."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the attacker thought of each run, and what the runs were charged."""

    inside: Array
    outside: Array
    asked: Counter[Question]
    stacked: bool
    seconds: float


def audit(
    method: Method | str = "dp-sgd",
    *,
    task: tasks.Task | str = NAME,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    sample_rate: float = 0.05,
    steps: int = 100,
    canary: str = "gradient",
    sees: str | None = None,
    runs: int = 2000,
    examples: int = 100,
    confidence: float = 0.95,
    lr: Any = "auto",
    seconds: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    data: str | None = None,
    budget: Budget = None,
    on_runs: OnRuns | None = None,
) -> InAndOut:
    """Attack `runs` runs of a method, half of them with a canary among `examples` rows of a task, and bound epsilon.

    The task is made up, unless another is named: audits of private data change whom a model is trained on, and their
    results are not private.

    `canary` is "gradient" (one of norm beyond the bound along a fixed random direction: the mechanism's worst case),
    "mislabelled" or "blank"; the attacker `sees` "releases", the final "model" or the canary's "loss" at it. A method
    that cannot be stacked is run one by one, as often as `seconds` allow. On examples of a task all runs are charged
    to the book that `budget` or VESTIGE_BUDGET names, before the first of them.

    >>> found = audit("dp-sgd", epsilon=3, steps=10, runs=40, examples=20)
    >>> found.epsilon_lower_bound <= found.epsilon <= 3
    True

    Formal guarantees: the runs are independent, with samples and noise of their own; with probability `confidence` the
    lower bound is at most the truth. It proves no privacy, and its output is computed from the data without noise.
    """
    require_alone("an audit")
    check_kind(canary)
    check_confidence(confidence)
    sees = sees or ("releases" if canary == "gradient" else "loss")
    if sees not in VIEWS:
        raise ValueError(f"sees={sees!r} is unknown; choose from {', '.join(VIEWS)}")
    if sees == "loss" and canary == "gradient":
        raise ValueError(
            "sees='loss' with canary='gradient': a planted gradient has no input of its own, hence no loss"
        )
    least = 16 if sees == "state" else 8
    if runs < least:
        raise ValueError(
            f"runs={runs} must be {least} at least, half of them with the canary; thousands show something"
        )
    if examples < 1:
        raise ValueError(f"examples={examples} must be 1 at least: the canary is one more")
    chosen = make_method(method) if isinstance(method, str) else method
    if chosen.probe.solves:
        raise ValueError(f"method={chosen.name!r} asks for no gradients, and a canary is one; audit another method")
    if task == NAME and data is not None:
        raise ValueError(f"data={data!r} with task={NAME!r}, which makes its examples up: name the task of the data")
    made_up, source = task == NAME, Provenance(of_file=tasks.of_file)
    if isinstance(task, str):
        source = tasks.source_of(task, data) or source
        task = stand_in(examples, seed) if task == NAME else tasks.load(task, data, seed)
    request = Request(
        sample_rate=sample_rate, steps=steps, delta=delta, epsilon=epsilon, noise_multiplier=noise_multiplier, lr=lr
    )
    subject = Subject.of(task, settled(chosen, request), canary, examples, seed, device)
    planned = plan(subject.model, subject.layout, subject.method, subject.population, request)
    if not made_up:
        source = source if source.read is not None else replace(source, data=subject.data)
        _pay(budget, subject, planned, runs, source)
    found = attack(subject, planned, runs, sees, seconds=seconds, on_runs=on_runs)
    return judged(found, subject, planned, sees, confidence, runs)


def _pay(budget: Budget, subject: Subject, planned: Plan, runs: int, source: Provenance) -> None:
    """Charge all runs to the book of the examples, if there is one."""
    if account_of(budget) is not None and subject.method.gate.adaptive:
        raise ValueError(
            f"budget: what {subject.method.name} asks follows from earlier answers, so its runs cannot be charged "
            "before they are made; audit another method"
        )
    asks = questions(subject.method, planned.sample_rate, planned.noise_multiplier, planned.steps)
    pay(
        budget,
        [(asks, runs)],
        purpose=f"audit {subject.method.name}",
        source=source,
        facts={"assumes": "what the audit printed was kept to those who may see the rows"},
    )


@dataclass(frozen=True)
class Subject:
    """What is attacked: a model and its loss, a method, other examples and a canary."""

    name: str
    model: nn.Module
    loss: Any
    method: Method
    data: tuple[Tensor, Tensor]
    canary: Canary

    @classmethod
    def of(cls, task: tasks.Task, method: Method, kind: str, examples: int, seed: int, device: str) -> Subject:
        data = (task.train[0][:examples], task.train[1][:examples])
        model = copy.deepcopy(task.model).to(device)
        population = len(data[1]) + 1
        method = replace(method, gate=method.gate.at(population))
        canary = make_canary(kind, model, method.layout(model), data, task.test, seed)
        return cls(task.name, model, task.loss, method, data, canary)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.model, self.method.grouping)

    @property
    def population(self) -> int:
        return len(self.data[1]) + 1


def attack(
    subject: Subject,
    planned: Plan,
    runs: int,
    sees: str = "releases",
    *,
    seconds: float | None = None,
    on_runs: OnRuns | None = None,
) -> Scores:
    """Make the runs, half with the canary, and score each."""
    expected = planned.sample_rate * subject.population
    reason = why_not(subject.model, subject.loss, subject.method, expected_batch=expected)
    begin = time.perf_counter()

    def goes_on(done: int) -> bool:
        in_time = seconds is None or time.perf_counter() - begin < seconds
        return (on_runs is None or on_runs(done)) and in_time

    if reason is None:
        inside, outside, asked = _stacked(subject, planned, runs, sees, goes_on)
    elif sees == "releases":
        inside, outside, asked = _alone(subject, planned, runs, goes_on)
    else:
        raise ValueError(f"sees={sees!r} is for stacks, and {reason}: use sees='releases', one run at a time")
    took = time.perf_counter() - begin
    return Scores(inside=inside, outside=outside, asked=asked, stacked=reason is None, seconds=took)


def _stacked(
    subject: Subject, planned: Plan, runs: int, sees: str, goes_on: OnRuns
) -> tuple[Array, Array, Counter[Question]]:
    member = StackedRun(subject.model, subject.method, planned.noise_multiplier, planned.lr)
    check_noise(member, planned.sample_rate * subject.population)
    each = footprint(subject.model, subject.method, planned.sample_rate, subject.population, planned.steps)
    together = max(8, min(LARGEST_STACK, MEMORY // max(1, each)))
    start = copy.deepcopy(subject.model.state_dict())
    canary, device = subject.canary, next(subject.model.parameters()).device
    inputs = torch.cat([subject.data[0], canary.inputs])
    data = (inputs, torch.cat([subject.data[1], canary.target]))
    found: dict[bool, list[Array]] = {True: [], False: []}
    done, asked = 0, Counter[Question]()
    while done < runs:
        now = min(together, runs - done)
        present = [(done + i) % 2 == 0 for i in range(now)]
        stack = AuditedStack([member] * now, data, sample_rate=planned.sample_rate, steps=planned.steps, device=device)
        stack.plant(canary, present, watched=sees == "releases")
        for _ in stack.train():
            pass
        views = {"releases": stack.by_releases, "model": stack.by_model, "loss": stack.by_loss}
        scores = np.stack(list(_kept(stack).values()), axis=-1) if sees == "state" else views[sees]()
        there = stack.present.cpu().numpy()
        for side in (True, False):
            found[side].append(scores[there == side])
        asked = stack.progress()[0].asked
        subject.model.load_state_dict(start)
        done += now
        if not goes_on(done):
            break
    inside, outside = np.concatenate(found[True]), np.concatenate(found[False])
    return (*_most_telling(inside, outside), asked) if sees == "state" else (inside, outside, asked)


def _kept(stack: AuditedStack) -> dict[str, Array]:
    found = stack.by_state()
    if not found:
        raise ValueError("sees='state': this method keeps nothing between steps but its model; use sees='model'")
    return found


def _most_telling(inside: Array, outside: Array) -> tuple[Array, Array]:
    """The scores by the one buffer, [runs, buffers], that separates every other run best; of the remaining runs."""
    areas = [area_under_curve(a, b).estimate for a, b in zip(inside[::2].T, outside[::2].T, strict=True)]
    best = int(np.abs(np.array(areas) - 0.5).argmax())
    sign = 1 if areas[best] >= 0.5 else -1
    return sign * inside[1::2, best], sign * outside[1::2, best]


def _alone(subject: Subject, planned: Plan, runs: int, goes_on: OnRuns) -> tuple[Array, Array, Counter[Question]]:
    lone = LoneRuns(subject.model, subject.loss, subject.data, subject.canary, subject.method, planned)
    found: dict[bool, list[float]] = {True: [], False: []}
    most: Counter[Question] = Counter()
    for done in range(1, runs + 1):
        present = done % 2 == 1
        score, asked = lone.run(present)
        found[present].append(score)
        most |= asked
        if done >= 8 and not goes_on(done):
            break
    return np.array(found[True]), np.array(found[False]), most


def noise_factor(asked: accounting.History, delta: float, area: Interval) -> Interval | None:
    """How much noise the ROC's area looks like, over what was priced: 1 where the attack finds what the accountant
    allows. None for questions whose noise is not one number.

    It is an estimate: of the same questions with all noise multiplied by one factor, that whose largest area is the
    measured one. A weak attack looks like more noise than there is.
    """
    if not all(isinstance(question, SampledGaussian | Gaussian | CyclicGaussian) for question in asked):
        return None
    factors = np.linspace(-log(LARGEST_FACTOR), log(LARGEST_FACTOR), 9)
    areas = [accounting.tradeoff(_with_noise(asked, exp(each)), delta).area() for each in factors]
    rising, place = np.unique(areas, return_index=True)  # more noise, less area
    between = PchipInterpolator(rising, factors[place]) if len(rising) > 1 else lambda area: np.zeros_like(area)
    wanted = np.clip([area.high, area.estimate, area.low], rising[0], rising[-1])
    low, middle, high = np.exp(between(wanted)).tolist()
    return Interval(middle, low, high, area.confidence)


LARGEST_FACTOR = 4.0
"""More noise than this times what was priced looks like nothing to any attack."""


def _with_noise(asked: accounting.History, factor: float) -> accounting.History:
    return {replace(question, multiplier=question.multiplier * factor): n for question, n in asked.items()}  # type: ignore[call-arg, attr-defined]


def _ends(noise: Interval | None) -> tuple[float, float]:
    return (1.0, 1.0) if noise is None else (noise.estimate, noise.high)


def _epsilon_at(asked: accounting.History, delta: float, factor: float) -> float:
    """Epsilon of the same questions with so much more noise; none where no signal was found."""
    return 0.0 if factor > 0.999 * LARGEST_FACTOR else accounting.epsilon(_with_noise(asked, factor), delta)


def _allowed(detection: Callable[[Array], Array]) -> tuple[tuple[float, float], ...]:
    """A promise as a curve to draw: finer where false alarms are few."""
    alarms = np.concatenate([[0.0, 0.001, 0.002, 0.005], np.linspace(0.01, 1.0, 100)])
    return tuple((round(float(x), 6), round(float(y), 6)) for x, y in zip(alarms, detection(alarms), strict=True))


def judged(scores: Scores, subject: Subject, planned: Plan, sees: str, confidence: float, wanted: int) -> InAndOut:
    """What the scores prove, beside what the accountant says of the same charges."""
    delta, asked = planned.delta, scores.asked
    filtered = subject.method.gate.adaptive
    promise = planned.epsilon if filtered and planned.epsilon is not None else accounting.epsilon(asked, delta)
    curve = None if filtered else accounting.tradeoff(asked, delta).promise
    a, b = scores.inside, scores.outside
    lower, bounded_by, bound = best_lower_bound(a, b, delta, confidence)
    broken = bound if curve is None else epsilon_lower_bound(a, b, delta, confidence, curve)
    fit = gaussian_fit(a, b, delta, confidence)
    area = area_under_curve(a, b, confidence)
    noise = None if filtered else noise_factor(asked, delta, area)
    at = [None if noise is None else _epsilon_at(asked, delta, factor) for factor in _ends(noise)]
    return InAndOut(
        task=subject.name,
        method=subject.method.name,
        canary=subject.canary.kind,
        sees=sees,
        runs=len(a) + len(b),
        wanted=wanted,
        stacked=scores.stacked,
        seconds=round(scores.seconds, 1),
        examples=subject.population - 1,
        steps=planned.steps,
        sample_rate=planned.sample_rate,
        noise_multiplier=planned.noise_multiplier,
        delta=delta,
        confidence=confidence,
        epsilon=promise,
        epsilon_lower_bound=lower,
        bounded_by=bounded_by,
        epsilon_estimate=fit.epsilon,
        epsilon_estimate_low=fit.epsilon_low,
        mu=fit.mu,
        mu_low=fit.mu_low,
        detected=bound.detected,
        false_alarms=bound.false_alarms,
        guesses=bound.guesses,
        area=area,
        area_allowed=None if curve is None else accounting.tradeoff(asked, delta).area(),
        noise_factor=noise,
        epsilon_by_area=at[0],
        epsilon_by_area_low=at[1],
        detection_at_1_percent=rate_of_detection(a, b, 0.01, confidence),
        curve_broken_by=broken.broken_by,
        curve_detected=broken.detected,
        curve_false_alarms=broken.false_alarms,
        roc=tuple(roc(a, b)),
        roc_allowed=None if curve is None else _allowed(curve[0]),
    )
