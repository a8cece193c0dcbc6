"""How does a model train on releases? One step, and the loop as a generator of records."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from vestige.layout import Layout
from vestige.mechanism.clipping import Clip, Loss, Parameters
from vestige.mechanism.curator import Curator
from vestige.mechanism.gradient_transforms import one_after
from vestige.methods.base import Method
from vestige.optim.gates import Attempt
from vestige.optim.gradient_query_points import At, ask
from vestige.optim.learner import Learner, OptimizerMover
from vestige.optim.rules import Scheduling, scheduled
from vestige.priced_questions import BudgetSpent, Question, SampledGaussian
from vestige.processes.parameter_shards import Shards
from vestige.randomness.noise_schedules import level
from vestige.randomness.sum_and_release_types import Release


@dataclass(frozen=True)
class Record:
    """What may be shown of one step: all of it computed from releases and public facts."""

    step: int
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    epsilon: float | None = None
    accepted: bool = True

    def keys(self) -> list[str]:
        """With `[]`, what `dict(record)` is made of: plain numbers and lists, as JSON has them."""
        return list(self.to_json())

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def to_json(self) -> dict[str, object]:
        seen = {name: _plain(value.tolist()) for name, value in self.diagnostics.items()}
        row = {"step": self.step, "epsilon": self.epsilon, **seen}
        return row if self.accepted else {**row, "accepted": False}


def _plain(value: Any) -> object:
    """Numbers and lists for JSON, which has no infinity and no NaN: both become null."""
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value if isfinite(value) else None


@dataclass(frozen=True)
class Public:
    """What a schedule may use besides releases: epsilon so far, and accuracy on public validation data."""

    spent: Callable[[], float] = lambda: 0.0
    accuracy: Callable[[], float] | None = None


NOTHING_PUBLIC = Public()
Snapshot = dict[str, Any]


def copied(part: object) -> Any:
    """A deep copy of a state (dicts, lists and tuples of tensors and plain values), faster than deepcopy."""
    if isinstance(part, Tensor):
        return part.detach().clone()
    if isinstance(part, dict):
        return {key: copied(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(copied(value) for value in part)
    return copy.deepcopy(part)


class TrainingState:
    """Everything that a step changes: parameters, optimizer, memory, and the count of steps and questions."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        layout: Layout,
        lr: float,
        *,
        groups: list[dict[str, object]] | None = None,
        scheduling: Scheduling | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Of a sharded model all of it is about this process's rows: `layout` is theirs."""
        self.model, self.layout = model if shards is None else shards, layout
        if shards is None:
            self.parameters = layout.parameters(model)
        else:
            self.parameters = {segment.name: shards.parameters[segment.name] for segment in layout.segments}
        self.optimizer = method.rule.build(groups or self.parameters.values(), lr)
        self.scheduler = scheduled(self.optimizer, scheduling)
        mover = OptimizerMover(layout, self.parameters, self.optimizer, self.scheduler)
        self.learner = Learner(method.memory, method.rule, method.average, layout, self.parameters, mover)
        self.gradient = mover.gradient
        self.probe = method.probe.init(layout, self.gradient.device)
        self.gate, self.clip = method.gate.init(), method.clip.init()
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        """Releases and what was computed from them: nothing else, and no key of any random stream."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {} if self.scheduler is None else self.scheduler.state_dict(),
            "memory": self.learner.memory,
            "probe": self.probe,
            "gate": self.gate,
            "clip": self.clip,
            "average": self.learner.average,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        saved = copied(saved)
        self._load_moved(saved)
        self.gate, self.step = saved["gate"], saved["step"]

    def _load_moved(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self.learner.memory, self.learner.average = self._here(saved["memory"]), self._here(saved["average"])
        self.probe, self.clip = self._here(saved["probe"]), dict(saved["clip"])

    def snapshot(self) -> Snapshot:
        """A copy of all that an update changes. Counts, and what the gate learned from releases, are not part of it."""
        moved = {key: part for key, part in self.state_dict().items() if key not in ("step", "gate")}
        return copied({**moved, "gradient": self.gradient})

    def restore(self, snapshot: Snapshot) -> None:
        """Undo, bit for bit, every update since the snapshot, which is used up. Noise and charges are never undone."""
        self.gradient.copy_(snapshot["gradient"])
        self._load_moved(snapshot)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model holds the average of its parameters, where the method keeps one."""
        if not self.learner.average:
            yield
            return
        before = self.layout.pack(self.parameters)
        self._put(self.learner.average["mean"])
        try:
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, vector: Tensor) -> None:
        for name, values in self.layout.views(vector).items():
            self.parameters[name].copy_(values)

    def _here(self, part: dict[str, object]) -> dict[str, object]:
        return {k: v.to(self.gradient.device) if isinstance(v, Tensor) else v for k, v in part.items()}


@dataclass(frozen=True)
class Asking:
    """Asks the questions of one step, filling in everything that a probe does not choose."""

    curator: Curator
    method: Method
    clip: Clip
    multiplier: float
    step: int

    @property
    def population(self) -> int:
        return self.curator.population

    @property
    def rate(self) -> float:
        return self.curator.rate

    def __call__(self, at: At) -> Release:
        rate = min(1.0, self.rate * at.boost)
        return self.curator.gradient(
            at.point,
            at.clip or self.clip,
            self.multiplier,
            step=self.step,
            part=at.part,
            transform=one_after(self.method.augment, at.transform),
            then=at.then,
            boost=at.boost,
            question=self.method.noise.question(SampledGaussian(rate, self.multiplier)),
        )

    def norms(self, point: Parameters, bound: float, *, part: int = 0, boost: float = 1.0) -> float:
        return self.curator.norms(point, bound, self.multiplier * boost, step=self.step, part=part)


def step(
    state: TrainingState, method: Method, curator: Curator, multiplier: float, public: Public = NOTHING_PUBLIC
) -> Record:
    """One candidate update, kept or undone by the gate. A record shows nothing of a candidate that was undone."""

    def move(noise: float, lr: float) -> dict[str, Tensor]:
        return advance(state, method, curator, multiplier * noise, lr)

    def asks(noise: float) -> tuple[Question, ...]:
        return method.questions(curator.rate, multiplier * noise, state.step)

    outcome = method.gate.settle(Attempt(state, curator.comparisons, move, asks, public.spent, public.accuracy))
    record = Record(state.step, outcome.diagnostics, accepted=outcome.accepted)
    state.step += 1
    return record


def advance(
    state: TrainingState, method: Method, curator: Curator, multiplier: float, pace: float = 1.0
) -> dict[str, Tensor]:
    """Ask for a release and update on it, whatever the gate decides later."""
    point = {name: p.detach() for name, p in state.parameters.items()}
    clip, pace = method.clip.now(state.clip), pace * float(method.clip.pace(state.clip))
    now = level(method.schedule, multiplier, state.step, curator.rate)
    asking = Asking(curator, method, clip, now, state.step)
    if isinstance(state.model, nn.Module):  # a process that has rows of the parameters cannot begin alone
        state.learner.prepare(point, curator.rate)
    release, state.probe = ask(method.probe, asking, point, state.probe, state.layout.constants)
    seen = state.learner.step(release, point, pace, state.step)
    seen |= {name: torch.tensor(value) for name, value in method.clip.shown(state.clip).items()}
    state.clip = method.clip.heard(release, state.layout, method.clip.learn(release.unclipped, state.clip))
    return seen


def run(
    state: TrainingState,
    method: Method,
    curator: Curator,
    multiplier: float,
    steps: int,
    public: Public = NOTHING_PUBLIC,
) -> Iterator[Record]:
    """Steps until `steps` are done or the budget refuses the next one."""
    while state.step < steps:
        try:
            yield step(state, method, curator, multiplier, public)
        except BudgetSpent:
            return


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor], batch: int = 2048) -> float:
    """Accuracy on PUBLIC data: it is not noised."""
    return evaluate(model, data, None, batch)[0]


@torch.no_grad()
def evaluate(
    model: nn.Module, data: tuple[Tensor, Tensor], loss: Loss | None, batch: int = 2048
) -> tuple[float, float]:
    """Accuracy and mean loss (NaN without one) on PUBLIC data: neither is noised."""
    inputs, targets = data
    device = next(model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    model.eval()
    right, total = 0, 0.0
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        outputs, labels = model(x.to(device)), y.to(device)
        right += int((outputs.argmax(-1) == labels).sum())
        total += nan if loss is None else len(y) * float(loss(outputs, labels).mean())
    for module, mode in modes.items():
        module.training = mode
    return right / len(targets), total / len(targets)
