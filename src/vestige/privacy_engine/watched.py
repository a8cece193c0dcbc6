"""Can the user's own forward and backward pass be the engine's? Watched through taps, where nothing is in doubt.

For the length of the user's forward pass the model's trainable parameters are constants and its layers are tapped, so
that `loss.backward()` computes the gradients of activations only and leaves every example's gradient in factored form.
What is found in doubt while the pass runs (a layer under activation checkpointing, say) is not used: the outputs are
cut off from their graph, and the engine runs the model a second time instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from vestige.engines import taps
from vestige.engines.bookkeeping import add_weighted
from vestige.engines.gradients import Dense, Gradient, combine
from vestige.engines.layers import Saved
from vestige.engines.taps import Pass, Signals, Tap, TapPlan
from vestige.layout import Layout
from vestige.mechanism.clipping import Clip, FixedClip, Parameters

Uses = dict[str, list[Gradient]]


def unwatchable(plan: TapPlan | None) -> str | None:
    """Why a model's passes cannot be watched while its user runs them; None if they can."""
    if plan is None:
        return "the model cannot be taken apart"
    if plan.sketch.whole:
        return f"the gradients of {min(plan.sketch.whole)!r} take the reference engine"
    if plan.inner:
        return f"module {min(plan.inner)!r} has no rule of its own"
    if taps.hooks_on_saved_tensors is None:
        return f"torch {torch.__version__} cannot tell whether a layer is checkpointed (2.8 can)"
    return None


class Root(torch.autograd.Function):
    """An identity on all outputs of a model; says when a backward pass comes through."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.reached = reached
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        ctx.reached()
        return (None, None, *signals)


class WatchedPass:
    """One forward pass of the user's under watch. `finished` gets what each completed backward pass through it left."""

    def __init__(self, plan: TapPlan, examples: int, point: Parameters, finished: Callable[[Uses], None]) -> None:
        self._plan, self._finished = plan, finished
        self._pass = Pass(examples, point, deliver=self._deliver)
        self._backwards: dict[int, Uses] = {}
        self._stack, self._dropped = ExitStack(), False

    @property
    def examples(self) -> int:
        return self._pass.examples

    def open(self) -> None:
        self._plan.now = self._pass
        self._stack.enter_context(self._plan.installed({**self._pass.parameters, **self._expanded()}))

    def drop(self) -> None:
        """Whatever a backward pass through it may still bring is ignored: the pass is run again, or was broken off."""
        self._dropped = True

    def close(self) -> None:
        """The model is as it was."""
        self._stack.close()
        self._plan.now = Pass()

    @property
    def doubt(self) -> str | None:
        """Why the pass, now that it is over, cannot be used."""
        if self._pass.doubt is None and self._pass.called != self._plan.called:
            return f"module {min(self._pass.called ^ self._plan.called)!r} was not called as in the rehearsal"
        return self._pass.doubt

    def rooted(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return Root.apply(partial(self._deliver, {}), self._plan.anchor, *outputs)  # type: ignore[no-any-return]

    def _expanded(self) -> Parameters:
        def record(name: str, saved: Saved, signals: Signals) -> None:
            self._deliver({name: Dense(signals[0])})

        rows = self._plan.expanded(self._pass.parameters, self.examples)
        return {n: Tap.apply(partial(record, n), self._plan.anchor, 1, p.detach()) for n, p in rows.items()}

    def _deliver(self, uses: Mapping[str, Gradient]) -> None:
        """Sorted by backward pass: two losses of one forward pass are clipped apart. One that fails leaves nothing."""
        if self._dropped:
            return
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            self._backwards[task] = {}
            Variable._execution_engine.queue_callback(partial(self._finish, task))  # type: ignore[attr-defined]
        for name, gradient in uses.items():
            self._backwards[task].setdefault(name, []).append(gradient)

    def _finish(self, task: int) -> None:
        self._finished(self._backwards.pop(task))


@dataclass(frozen=True)
class Scaled(FixedClip):
    """A clip of gradients that are `scale` times what is given: those of a mean over `scale` examples."""

    clip: Clip
    scale: float

    def factors(self, norms: Tensor) -> Tensor:
        return self.clip.factors(norms * self.scale) * self.scale

    def sensitivity(self, layout: Layout) -> float | Tensor:
        return self.clip.sensitivity(layout)


def add_watched(uses: Uses, clip: Clip, layout: Layout, into: Tensor, examples: int) -> None:
    """Clip what a backward pass left, and add its sum to `into`."""
    with torch.no_grad():
        add_weighted({name: combine(parts) for name, parts in uses.items()}, clip, layout, into, examples)
