"""What is a private optimizer? One part per question. The named ones are short compositions, in `methods`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from vestige.layout import Grouping
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Clip, Flat
from vestige.mechanism.correlated_noise import Noise, White
from vestige.mechanism.groups import PerGroup, Share
from vestige.mechanism.noise_schedules import Constant, Schedule
from vestige.optim.averaging import Average, Last
from vestige.optim.gates import AlwaysAccept, Gate
from vestige.optim.memory import Identity, Memory
from vestige.optim.probes import Here, Probe
from vestige.optim.rules import Rule, sgd
from vestige.questions import Question, SampledGaussian

PrivacyClass = Literal["post-processing", "extra release", "selection", "correlated noise"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A private optimizer: ask where the probe says, clip each example, remember releases, move by a rule, keep the
    move if the gate lets it pass.

    Formal guarantees: each step asks exactly `gate.questions(questions(rate, multiplier, step))` (a gate with a decay:
    those, with parameters that follow from releases). Probe, memory, rule and average see releases only:
    post-processing, whatever they do with them.
    """

    name: str
    clip: Clip = field(default_factory=Flat)
    probe: Probe = field(default_factory=Here)
    memory: Memory = field(default_factory=Identity)
    rule: Rule = field(default_factory=sgd)
    schedule: Schedule = field(default_factory=Constant)
    noise: Noise = field(default_factory=White)
    average: Average = field(default_factory=Last)
    augment: Augment | None = None
    grouping: Grouping | None = None
    """Which parameters form a group, for parts that work group by group; None: all of them are one."""
    gate: Gate = field(default_factory=AlwaysAccept)
    noise_multiplier: float | None = None
    """The accounted noise, where the method's own options fix it; None leaves it to the plan."""

    def __post_init__(self) -> None:
        if self.rule.hears_noise and not self.memory.knows_noise:
            raise ValueError(
                f"optimizer {self.rule.name} must know the noise it steps on, and the memory of {self.name} does not "
                "say how much it leaves; use another optimizer"
            )
        changing = self.clip.adaptive or self.schedule != Constant()
        if self.gate.tests and (changing or self.noise.one_fixed_question or self.probe.period(0.5) != 1):
            raise ValueError(
                f"method={self.name!r}: a gate has a theorem for one fixed question per candidate; leave out the "
                "gate, or the adaptive clip, schedule, correlated noise or importance sampling"
            )
        if self.clip.adaptive and self.probe.twice_on_one_sample:
            raise ValueError(
                f"method={self.name!r}: a clip that counts has no theorem for two answers on one sample: fix it"
            )
        if not self.noise.one_fixed_question:
            return
        if changing:
            raise ValueError(
                f"method={self.name!r}: correlated noise has a theorem for one clip and one noise level only; "
                "leave the adaptive clip or the schedule out"
            )
        if self.probe.questions(0.5, 1.0) != (SampledGaussian(0.5, 1.0),):
            raise ValueError(f"method={self.name!r}: correlated noise has a theorem for one question per step only")

    def questions(self, rate: float, multiplier: float, step: int = 0) -> tuple[Question, ...]:
        """What one step asks, at its own noise multiplier."""
        return tuple(self.noise.question(asked) for asked in self.probe.questions(rate, multiplier, step))

    def copies(self, rate: float, steps: int) -> float | None:
        """Extra state in copies of the parameters, beside the model and one gradient; None if the rule's is unknown."""
        if self.rule.copies is None:
            return None
        parts = (self.memory.copies, self.probe.copies, self.rule.copies, self.average.copies)
        return sum(parts) + self.noise.copies(rate, steps)


@dataclass(frozen=True)
class Neutral:
    """A setting at which a method must equal another one, bit for bit."""

    options: dict[str, Any]
    like: str = "dp-sgd"
    like_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    """The torch optimizer to give the other method, where the difference is the optimizer's."""
    groups: str | None = None
    """The groups by which the other method must clip, where this one does."""
    sample_rate: float | None = None
    """The sampling rate at which it holds; None if at any."""


ONE_SUM = "one noised sum of clipped gradients per step"
DP_SGD_PRICE = "T x SGM(q, z): the price of DP-SGD"


def by_group(
    method: Method,
    grouping: Grouping | None,
    split: tuple[float, ...] | None = None,
    share: Share = "equal",
) -> Method:
    """The same method, clipping each group of parameters by itself; `grouping=None` makes all of them one group."""
    if not isinstance(method.clip, Flat | PerGroup):
        raise ValueError(
            f"groups: {method.name} clips by {type(method.clip).__name__}, which cannot be split in groups"
        )
    bound = method.clip.bound
    clip = Flat(bound) if grouping is None else PerGroup(bound, split, share)
    return replace(method, clip=clip, grouping=grouping)


@dataclass(frozen=True)
class Entry:
    """A named method: how to make it, and what a reader should know."""

    name: str
    make: Callable[..., Method]
    summary: str
    reference: str
    privacy_class: PrivacyClass
    releases: str = ONE_SUM
    price: str = DP_SGD_PRICE
    neutral: Neutral | None = None

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make, eval_str=True).parameters)

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: option.default for name, option in self.options.items()}

    @property
    def parts(self) -> dict[str, Any]:
        """What the method is made of at its defaults: each part that is not plain DP-SGD's."""
        made, plain = self.make(), Method(name=self.name)
        return {
            f.name: getattr(made, f.name)
            for f in fields(Method)
            if f.name != "name" and getattr(made, f.name) != getattr(plain, f.name)
        }

    @property
    def description(self) -> str:
        """The whole docstring of the method, in lines."""
        return inspect.cleandoc(self.make.__doc__ or "")


METHODS: dict[str, Entry] = {}
"""Filled as the rooms of `methods` are imported; whoever looks a method up takes it from `registry`, where all are."""


def register(
    name: str,
    reference: str,
    privacy_class: PrivacyClass = "post-processing",
    *,
    releases: str = ONE_SUM,
    price: str = DP_SGD_PRICE,
    neutral: Neutral | None = None,
) -> Callable[..., Callable[..., Method]]:
    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        summary = (make.__doc__ or "").strip().split("\n")[0]
        METHODS[name] = Entry(name, make, summary, reference, privacy_class, releases, price, neutral)
        return make

    return add
