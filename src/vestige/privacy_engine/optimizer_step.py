"""What happens when the user's optimizer steps? It asks, remembers and moves as the method says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from vestige.accounting.ledger import Ledger
from vestige.mechanism.clipping import Parameters, Value, sensitivity_on
from vestige.methods.base import Method
from vestige.optim.learner import Learner
from vestige.optim.probes import At
from vestige.privacy_engine.accumulator import Gathered
from vestige.privacy_engine.coverage import require_own
from vestige.privacy_engine.passes import Passes
from vestige.privacy_engine.replayed import Caller
from vestige.questions import SampledGaussian
from vestige.randomness.gaussian import add_noise
from vestige.randomness.keys import Randomness
from vestige.randomness.release import BoundedSum, Release

Closure = Callable[[], Any]


class LoopMover:
    """Moves by the user's own optimizer: every parameter gets its part of the gradient, and `original` steps."""

    def __init__(self, caller: Caller, optimizer: Optimizer) -> None:
        self.gradient, self._caller, self._optimizer = caller.zeros(), caller, optimizer
        self.original: Callable[..., Any] = optimizer.step

    def step(self, pace: Value) -> None:
        parameters = self._caller.parameters()
        for name, view in self._caller.layout.views(self.gradient).items():
            parameters[name].grad = view if parameters[name].requires_grad else None  # what was frozen since stays
        self.original()

    def hear(self, noise_std: float | Tensor) -> None:
        self._optimizer.hear(noise_std)  # type: ignore[attr-defined]


class PrivateSteps:
    """Takes the place of `optimizer.step`, in place; `planned` is the question that every step asks if it is used as
    meant, once for each draw of the loader."""

    def __init__(
        self,
        caller: Caller,
        optimizer: Optimizer,
        method: Method,
        planned: SampledGaussian,
        expected_batch: float,
        reduction: str,
        ledger: Ledger,
        randomness: Randomness,
    ) -> None:
        self.caller, self.optimizer, self.method = caller, optimizer, method
        self.planned, self.expected_batch = planned, expected_batch
        self.ledger, self.randomness = ledger, randomness
        self.gathered = Gathered(caller.zeros, reduction)
        self.passes = Passes(caller, method.clip, self.gathered)
        self.step_number, self.asked = 0, 0
        self._learner: Learner | None = None
        self.probe: dict[str, Any] = {}
        self._patch()

    def _patch(self) -> None:
        original = self.optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            return self.step(original, closure)

        # A bound method, because learning-rate schedulers wrap the function inside it.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]
        public: dict[str, Any] = {
            "noise_multiplier": self.planned.multiplier,
            "max_grad_norm": getattr(self.method.clip, "bound", None),
            "expected_batch_size": self.expected_batch,
            "original_optimizer": self.optimizer,
        }
        for name, value in public.items():
            setattr(self.optimizer, name, value)

    def step(self, original: Callable[..., Any], closure: Closure | None) -> Any:
        """Move, if the draw is complete; else only bound and add what this part brought."""
        self.passes.settle()
        require_own(self.optimizer, self.caller.parameters().values())
        if self.passes.part is not None and not self.passes.part.last:
            self.gathered.gather()
            return None
        value: Any = None
        if self.method.probe.at_parameters:
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            gradient: Any = self._answer
        else:
            if closure is None:
                raise ValueError(
                    f"{self.method.name} asks elsewhere than at the parameters: call optimizer.step(closure)"
                )
            self.gathered.forget()
            gradient = self._answer_by(closure)
        learner, point = self.learner(original), self.caller.point()
        release, self.probe = self.method.probe.ask(gradient, point, self.probe)
        learner.step(release, point, 1.0, self.step_number)
        self.step_number += 1
        return value

    def learner(self, original: Callable[..., Any] | None = None) -> Learner:
        """Made with the first step, when the model is where it is trained."""
        if self._learner is None:
            layout, method, device = self.caller.layout, self.method, self.caller.device
            self.probe = method.probe.init(layout, device)
            mover = LoopMover(self.caller, self.optimizer)
            self._learner = Learner(method.memory, method.rule, method.average, layout, self.caller.parameters(), mover)
        if original is not None:
            cast(LoopMover, self._learner.mover).original = original
        return self._learner

    def _answer(self, at: At) -> Release:
        """Bound what was gathered, charge for it, add noise."""
        if at.transform is not None:
            raise ValueError(f"{self.method.name} changes each example's gradient: use vestige.train for it")
        assert (at.then, at.clip, at.boost) == (None, None, 1), "the engine refuses such probes"
        total = self.gathered.gather()
        question = self._question()
        sensitivity, ceiling = sensitivity_on(total.device, self.method.clip, self.caller.layout)
        self.ledger.ask(question, step=self.step_number, part=at.part, sensitivity=float(ceiling))
        index, self.asked = self.asked, self.asked + 1
        stream = self.randomness.stream("noise", index)
        std, _ = add_noise(BoundedSum(total, sensitivity), self.planned.multiplier, stream)
        release = Release(total, std, self.expected_batch * self.gathered.draws, sample_rate=question.rate)
        self.gathered.forget()
        return release

    def _question(self) -> SampledGaussian:
        """What was really asked: an example that entered the sum k times (accumulated draws, several losses) may move
        it by k bounds, and is there with probability at most 1 - (1 - rate)^draws: a larger rate and a smaller
        multiplier than planned."""
        draws, often = self.gathered.draws, self.gathered.often
        multiplier = self.planned.multiplier / often
        if often > 1:
            warnings.warn(
                f"an example may enter this step {often} times, so it is charged as noise multiplier "
                f"{multiplier:.4g}: for large batches use max_physical_batch_size instead",
                stacklevel=4,
            )
        return SampledGaussian(self.planned.rate if draws == 1 else 1 - (1 - self.planned.rate) ** draws, multiplier)

    def _answer_by(self, closure: Closure) -> Callable[..., Any]:
        """Answers anywhere: the parameters go there, the user's closure runs, the parameters come back."""

        def answer(at: At) -> Release:
            home = {name: p.clone() for name, p in self.caller.point().items()}
            self._go(at.point)
            with torch.enable_grad():
                closure()
            release = self._answer(at)
            self._go(home)
            return release

        return answer

    def _go(self, point: Parameters) -> None:
        with torch.no_grad():
            for name, parameter in self.caller.parameters().items():
                parameter.copy_(point[name])

    def state_dict(self) -> dict[str, Any]:
        memory = self.learner().memory
        return {"memory": memory, "probe": self.probe, "step_number": self.step_number, "asked": self.asked}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        device = self.caller.device
        here: Callable[[Any], Any] = lambda part: (  # noqa: E731
            part and {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}
        )
        self.learner().memory, self.probe = here(saved["memory"]), here(saved["probe"])
        self.step_number, self.asked = saved["step_number"], saved["asked"]
