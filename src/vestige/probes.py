"""Where is the gradient asked? A probe sees parameters and releases, never data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vestige.clipping import Parameters, Transform
from vestige.layout import Layout
from vestige.noise import Release
from vestige.questions import Question, SampledGaussian

State = dict[str, Any]


class AskGradient(Protocol):
    def __call__(self, point: Parameters, *, part: int = 0, transform: Transform | None = None) -> Release:
        """Ask for a noised clipped sum at `point`; `part` numbers the questions of one step."""
        ...


class Probe(Protocol):
    def init(self, layout: Layout, device: torch.device) -> State: ...

    def ask(self, gradient: AskGradient, point: Parameters, state: State) -> tuple[Release, State]:
        """Ask what this method asks in one step, at or around the parameters, and return the release to step on."""
        ...

    def questions(self, rate: float, multiplier: float) -> tuple[Question, ...]:
        """What one step asks: the price list of `ask`, in order."""
        ...


@dataclass(frozen=True)
class Here:
    """At the parameters themselves, once."""

    def init(self, layout: Layout, device: torch.device) -> State:
        return {}

    def ask(self, gradient: AskGradient, point: Parameters, state: State) -> tuple[Release, State]:
        return gradient(point), state

    def questions(self, rate: float, multiplier: float) -> tuple[Question, ...]:
        return (SampledGaussian(rate, multiplier),)
