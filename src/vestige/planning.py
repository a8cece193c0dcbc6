"""What will a run cost, before it starts? From a request to a noise multiplier, a learning rate and a budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, Literal

from torch import nn

from vestige import accounting
from vestige.groups import PerGroup
from vestige.layout import Layout
from vestige.learning_rate import auto_rate, initial_weight_norm
from vestige.method import Method
from vestige.questions import Question
from vestige.sampling import check_rate
from vestige.schedules import Constant, level


@dataclass(frozen=True)
class Plan:
    """The public facts of a run, all fixed before any data is touched."""

    sample_rate: float
    steps: int
    delta: float
    noise_multiplier: float
    epsilon: float | None
    """The budget; None if only the noise multiplier was given."""
    lr: float
    lr_reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def questions(method: Method, sample_rate: float, noise_multiplier: float, steps: int) -> dict[Question, int]:
    """What a whole run will ask: each question with how often."""
    period = method.probe.period(sample_rate)
    kinds: Counter[tuple[float, int]] = Counter()
    if method.schedule == Constant():
        kinds.update({(noise_multiplier, phase): -(-(steps - phase) // period) for phase in range(min(period, steps))})
    else:
        for step in range(steps):
            kinds[level(method.schedule, noise_multiplier, step, sample_rate), step % period] += 1
    history: Counter[Question] = Counter()
    for (multiplier, phase), count in kinds.items():
        for question in method.questions(sample_rate, multiplier, phase):
            history[question] += count
    return history


def plan(
    model: nn.Module,
    layout: Layout,
    method: Method,
    population: int,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    lr: float | Literal["auto"] = "auto",
) -> Plan:
    """Calibrate the noise to the budget (or take it as given), then choose the learning rate."""
    check_rate(sample_rate)
    check_steps(steps)
    check_delta(delta, population)
    if epsilon is None and noise_multiplier is None:
        raise ValueError("epsilon and noise_multiplier are both missing: give the budget, or the noise")
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = accounting.calibrate(lambda z: questions(method, sample_rate, z, steps), epsilon, delta)
    check_multiplier(noise_multiplier)
    rate, reason = choose_rate(model, layout, method, population, sample_rate, noise_multiplier, steps, lr)
    return Plan(sample_rate, steps, delta, noise_multiplier, epsilon, rate, reason)


def choose_rate(
    model: nn.Module,
    layout: Layout,
    method: Method,
    population: int,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    lr: float | Literal["auto"],
) -> tuple[float, str]:
    """The learning rate and where it came from."""
    if lr != "auto":
        if not lr > 0:
            raise ValueError(f"lr={lr} must be positive, or 'auto'")
        return float(lr), "lr: as given"
    gain = method.rule.gain
    if gain is None:
        raise ValueError(f"lr='auto' has no rule for the optimizer {method.rule.name}; give lr a number")
    sensitivity = method.clip.sensitivity(layout)
    expected_batch = sample_rate * population
    per_unit = sensitivity * layout.size**0.5 if isinstance(sensitivity, int | float) else float(sensitivity.norm())
    chosen = auto_rate(
        weight_norm=initial_weight_norm(model, layout),
        noise_norm=noise_multiplier * per_unit / expected_batch,
        size=layout.size,
        walk=noise_walk(method, sample_rate, steps),
        steps=steps,
        gain=gain if method.rule.scale_free else gain * method.memory.steady_gain,
        scale_free=method.rule.scale_free,
    )
    return chosen.lr, str(chosen)


def noise_walk(method: Method, sample_rate: float, steps: int) -> float:
    """How far unit noise carries a sum of releases over a run: sqrt(steps), unless it is scheduled or correlated."""
    if not method.noise.white:
        return method.noise.walk(sample_rate, steps)
    if method.schedule == Constant():
        return sqrt(steps)
    return sqrt(sum(level(method.schedule, 1.0, step, sample_rate) ** 2 for step in range(steps)))


def accounted_multiplier(paper_sigma: float, fresh_share: float = 1.0, groups: int = 1) -> float:
    """The noise multiplier of a whole step, from a memory method's own sigma.

    The paper noises `fresh_share` times the sum with sigma times each group's bound. Dividing by `fresh_share` is a
    bijection of the release given the earlier ones, and `groups` equal ratios on one sample are one Gaussian mechanism
    with their ratio over sqrt(groups).
    """
    if not paper_sigma > 0:
        raise ValueError(f"paper_sigma={paper_sigma} must be positive")
    return paper_sigma / (fresh_share * groups**0.5)


def paper_groups(method: Method, layout: Layout) -> int:
    """How many groups share the sigma of a paper; refused where the groups' own ratios differ."""
    if not isinstance(method.clip, PerGroup):
        return 1
    ratios = method.clip.scales(layout.group_sizes) / method.clip.bounds(layout.groups)
    if not bool(((ratios / ratios[0] - 1).abs() < 1e-9).all()):
        raise ValueError(
            f"paper_sigma: with share={method.clip.share!r} every group has its own ratio of noise to bound, "
            f"and a paper's sigma is one number; give noise_multiplier or epsilon"
        )
    return layout.groups


def check_steps(steps: int) -> None:
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"steps={steps} must be a whole number from 1 up")


def check_delta(delta: float, population: int | None = None) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta={delta} must lie in (0, 1)")
    if population is not None and delta >= 1 / population:
        raise ValueError(
            f"delta={delta} is not below 1/N = {1 / population:.3g} for {population} examples: it would allow "
            f"publishing a whole example; choose a smaller delta, such as {0.1 / population:.0e}"
        )


def check_multiplier(noise_multiplier: float) -> None:
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} must be positive: without noise there is no privacy")
