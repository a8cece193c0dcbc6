"""What is a private optimizer? One part per decision: probe, clip, memory, rule... The named ones are in `methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite

from torch import nn

from vestige.layerwise_scaling import Balance, Constants
from vestige.layout import Grouping, Layout
from vestige.mechanism.augmentation import Augment
from vestige.mechanism.clipping import Clip, Flat
from vestige.mechanism.groups import PerGroup, Share
from vestige.optim.averaging import Average, Last
from vestige.optim.gates import AlwaysAccept, Gate
from vestige.optim.gradient_query_points import Here, Probe
from vestige.optim.memory import Identity, Memory
from vestige.optim.rules import Rule, sgd
from vestige.priced_questions import Question, SampledGaussian
from vestige.randomness.correlated import Noise, White
from vestige.randomness.noise_schedules import Constant, Schedule


@dataclass(frozen=True)
class Origin:
    """How a method was built by name: with which options, and how these name the fields of its parts."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Every option with its value, defaults included: a later version may have other defaults."""
    letters: Mapping[str, str] = field(default_factory=dict)
    made: Method | None = None
    """The method as it was built, before any of its parts was replaced."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A private optimizer: take gradients where the probe says, clip each example, filter the releases by a memory,
    update by a rule, and keep the update if the gate accepts it.

    Formal guarantees: each step asks exactly `gate.questions(questions(rate, multiplier, step))` (a gate with a decay:
    those, with parameters that follow from releases). Probe, memory, rule and average see releases only:
    post-processing, whatever they do with them.
    """

    name: str = "unnamed"
    clip: Clip = field(default_factory=Flat)
    probe: Probe = field(default_factory=Here)
    memory: Memory = field(default_factory=Identity)
    rule: Rule = field(default_factory=sgd)
    schedule: Schedule = field(default_factory=Constant)
    noise: Noise = field(default_factory=White)
    average: Average = field(default_factory=Last)
    augment: Augment | None = None
    grouping: Grouping | None = None
    """Which parameters form a group, for parts that work group by group; None: all of them form one."""
    balance: Balance | None = None
    """How large the steps of each parameter are next to those of the others; None: all alike, as in DP-SGD."""
    gate: Gate = field(default_factory=AlwaysAccept)
    noise_multiplier: float | None = None
    """The accounted noise multiplier, where the method's own options fix it; None leaves it to the plan."""
    origin: Origin = field(default_factory=lambda: Origin(), compare=False, repr=False)
    """How it was built, if by name."""

    def __post_init__(self) -> None:
        if self.rule.hears_noise and not self.memory.knows_noise:
            raise ValueError(
                f"optimizer {self.rule.name} must know the noise it steps on, and the memory of {self.name} does not "
                "say how much it leaves; use another optimizer"
            )
        if self.balance is not None and not self.rule.balances:
            raise ValueError(
                f"balance: the optimizer {self.rule.name} is not known to move in proportion to its learning rate, so "
                "its steps cannot be balanced; use SGD, Adam or another of torch.optim's, or balance='plain'"
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
        if self.probe.solves:
            self._check_solving()
        if not self.noise.one_fixed_question:
            return
        if changing:
            raise ValueError(
                f"method={self.name!r}: correlated noise has a theorem for one clip and one noise level only; "
                "leave the adaptive clip or the schedule out"
            )
        if self.probe.questions(0.5, 1.0) != (SampledGaussian(0.5, 1.0),):
            raise ValueError(f"method={self.name!r}: correlated noise has a theorem for one question per step only")

    def _check_solving(self) -> None:
        """Refuse parts that a method of one solved step has no use for."""
        for part, value in self.parts(Method()).items():
            fits = part in ("probe", "noise_multiplier") or (part == "clip" and isinstance(value, Flat))
            if not fits:
                raise ValueError(
                    f"method={self.name!r} solves for its weights by one answer, and has no use for {part}={value!r}: "
                    "leave it out"
                )

    def layout(self, model: nn.Module, constants: Constants | None = None) -> Layout:
        """The layout of its releases about a model; `constants` are those of a run that began earlier, if it did."""
        if self.balance is None:
            return Layout.of(model, self.grouping)
        return Layout.of(model, self.grouping, self.balance(model) if constants is None else constants)

    def questions(self, rate: float, multiplier: float, step: int = 0) -> tuple[Question, ...]:
        """What one step asks, at its own noise multiplier."""
        return tuple(self.noise.question(asked) for asked in self.probe.questions(rate, multiplier, step))

    def copies(self, rate: float, steps: int) -> float | None:
        """Extra state, in copies of the parameters, besides model and one gradient; None if the rule's is unknown."""
        if self.rule.copies is None:
            return None
        parts = (self.memory.copies, self.probe.copies, self.rule.copies, self.average.copies)
        return sum(parts) + self.noise.copies(rate, steps)

    @property
    def identity(self) -> dict[str, object]:
        """How ledgers and run folders identify it: its registered name and options, and any parts replaced since.

        It contains no path of a class, so that renaming a module invalidates no folder.
        """
        made = self.origin.made or Method(name=self.name)
        other = {part: _described(value) for part, value in self.parts(made).items()}
        options = {name: written(value) for name, value in self.origin.options.items()}
        return {"name": self.name, "options": options, **({"parts": other} if other else {})}

    def parts(self, unlike: Method) -> dict[str, object]:
        """Each part that differs from the other method's."""
        names = [each.name for each in fields(Method) if each.compare and each.name != "name"]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(unlike, name)}


def require_shardable(method: Method) -> None:
    """Refuse, for a sharded model, what needs whole tensors."""
    parts = {"memory": method.memory, "probe": method.probe, "rule": method.rule, "clip": method.clip}
    wrong = [name for name, part in parts.items() if not getattr(part, "shardable", False)]
    if method.augment is not None:
        wrong.append("augment")
    if wrong:
        what = getattr(parts.get(wrong[0]), "name", None) or type(parts.get(wrong[0], method.augment)).__name__
        raise ValueError(
            f"method={method.name!r}: its {wrong[0]} ({what}) needs whole tensors, and of a sharded model each process "
            "has some rows: train replicas (without fully_shard), or choose another method"
        )


def _described(part: object) -> str:
    """A part as text that is the same in every process: a function is shown by its name, not its address."""
    name = getattr(part, "__qualname__", None)
    return repr(part) if name is None else f"{part.__module__}.{name}"


def written(value: object) -> object:
    """An option as JSON stores it, which has no infinity and no tuple."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def by_group(
    method: Method,
    grouping: Grouping | None,
    split: tuple[float, ...] | None = None,
    share: Share = "equal",
) -> Method:
    """The same method, clipping each group of parameters separately; `grouping=None` makes all of them one group."""
    if not isinstance(method.clip, Flat | PerGroup):
        raise ValueError(
            f"groups: {method.name} clips by {type(method.clip).__name__}, which cannot be split in groups"
        )
    if isinstance(method.clip, PerGroup) and method.clip.each:
        raise ValueError(
            f"groups: every group of {method.name} has a bound of its own: leave groups or that option out"
        )
    bound = method.clip.bound
    clip = Flat(bound) if grouping is None else PerGroup(bound, split, share)
    return replace(method, clip=clip, grouping=grouping)
