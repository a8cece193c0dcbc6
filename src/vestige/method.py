"""What is a private optimizer? One part per question. The named ones are short compositions, in `methods`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vestige.clipping import Clip, Flat
from vestige.gates import AlwaysAccept, Gate
from vestige.groups import PerGroup, Share
from vestige.layout import Grouping
from vestige.memory import Identity, Memory
from vestige.probes import Here, Probe
from vestige.rules import Rule, sgd

PrivacyClass = Literal["post-processing", "extra release", "selection", "correlated noise"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A private optimizer: ask where the probe says, clip each example, remember releases, move by a rule, keep the
    move if the gate lets it pass.

    Formal guarantees: with Poisson sampling, each step asks exactly `gate.questions(probe.questions(rate, multiplier))`
    (a gate with a decay: those, with parameters that follow from releases). Probe, memory and rule see releases only:
    post-processing, whatever they do with them.
    """

    name: str
    clip: Clip = field(default_factory=Flat)
    probe: Probe = field(default_factory=Here)
    memory: Memory = field(default_factory=Identity)
    rule: Rule = field(default_factory=sgd)
    grouping: Grouping | None = None
    """Which parameters form a group, for parts that work group by group; None: all of them are one."""
    gate: Gate = field(default_factory=AlwaysAccept)
    noise_multiplier: float | None = None
    """The accounted noise, where the method's own options fix it; None leaves it to the plan."""


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

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make, eval_str=True).parameters)


METHODS: dict[str, Entry] = {}


def register(
    name: str, reference: str, privacy_class: PrivacyClass = "post-processing"
) -> Callable[..., Callable[..., Method]]:
    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        METHODS[name] = Entry(name, make, (make.__doc__ or "").strip().split("\n")[0], reference, privacy_class)
        return make

    return add


def build(name: str, **options: Any) -> Method:
    """A method by name, with its options; an unknown name or option is refused with the nearest known one."""
    entry = METHODS.get(name)
    if entry is None:
        raise ValueError(f"method={name!r} is unknown{nearest(name, METHODS)}; choose from {', '.join(METHODS)}")
    unknown = [key for key in options if key not in entry.options]
    if unknown:
        known = ", ".join(entry.options)
        raise ValueError(f"{unknown[0]}={options[unknown[0]]} is not an option of {name}; its options are {known}")
    return entry.make(**options)


def nearest(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
