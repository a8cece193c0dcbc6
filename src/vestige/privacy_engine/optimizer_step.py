"""What happens when the user's optimizer steps? It asks, remembers and moves as the method says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vestige.accounting.ledger import Ledger
from vestige.checks import NOT_CALLED
from vestige.engines.example_axis.before_dispatch import ReadCount, ReadNumber
from vestige.engines.per_example.execution import unseen, unseen_by_functions
from vestige.layout import Layout
from vestige.mechanism.clipping import Parameters, Value, sensitivity_on
from vestige.methods.base import Method
from vestige.optim.gradient_query_points import At, ask
from vestige.optim.learner import Learner, scales_of
from vestige.optim.optimizers.foreach_step import Moves, balanced
from vestige.priced_questions import SampledGaussian
from vestige.privacy_engine.optimizer_parameter_checks import FOREIGN, FirstMove, follows, require_public
from vestige.privacy_engine.passes import Passes, PrivateCall
from vestige.processes.distributed_setup import require_same_group, require_same_model
from vestige.processes.parameter_shards import ShardedSum
from vestige.processes.sums import BY_ITSELF, ShardedSums, Sums
from vestige.randomness.correlated import Independent
from vestige.randomness.keys import HoldsKey, Randomness
from vestige.randomness.sampling import Sampling
from vestige.randomness.sum_and_release_types import Release

Closure = Callable[[], Any]
READ = (ReadNumber, ReadCount)
CHECKED_EVERY = 256
"""Steps between two comparisons of the replicas of a model; the first steps are compared more often."""
SCALED = (
    "the loss is scaled by a GradScaler (mixed precision in float16): a private step bounds each example's gradient as "
    "it is. Use autocast with dtype=torch.bfloat16 and leave the GradScaler out"
)


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer that moves, inside what Accelerate has put around it."""
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(SCALED)
    held = getattr(optimizer, "optimizer", None)
    return inner(held) if isinstance(held, Optimizer) else optimizer


def require_ordinary(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse to make private what is private already, as where a cell of a notebook runs again: the model has learned
    from steps that the new engine's epsilon would not count."""
    private = [name for name, each in module.named_modules() if isinstance(each._compiled_call_impl, PrivateCall)]
    if private or isinstance(vars(inner(optimizer)).get("zero_grad"), Discarding):
        what = "optimizer" if not private else "module" if private[0] == "" else f"module: its part {private[0]!r}"
        raise ValueError(
            f"{what} was made private before, and a new engine would not count what its earlier steps cost: make the "
            "model and the optimizer anew (in a notebook, run the cells that make them again), or go on with the "
            "engine, optimizer and loader that it has. To train its weights further, load its state_dict into a new "
            "model, and add both epsilons"
        )


class Held:
    """What the user's optimizer holds: the module's parameters, or of a sharded module this process's rows of them."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._sharded = passes, passes.sharded
        self.module = passes.module if self._sharded is None else self._sharded.model
        self.layout = passes.layout if self._sharded is None else self._sharded.shards.local
        self.now: dict[str, nn.Parameter] | None = None
        """The parameters, while a step of ours runs: they are looked up once."""

    @property
    def device(self) -> torch.device:
        return self._passes.device

    def parameters(self) -> dict[str, nn.Parameter]:
        if self.now is not None:
            return self.now
        return self._passes.parameters() if self._sharded is None else self._sharded.parameters()

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Also those of the twin in which the passes of a sharded module run."""
        found = self.parameters()
        if self._sharded is None:
            return found
        return {**found, **{f"{name} (whole)": p for name, p in self._passes.parameters().items()}}

    def point(self, parameters: Mapping[str, nn.Parameter]) -> Parameters:
        return self._passes.point(parameters) if self._sharded is None else self._sharded.point()

    def gradients(self, views: dict[str, Tensor]) -> dict[str, Any]:
        """Views of a gradient, as its parameters take them."""
        return views if self._sharded is None else self._sharded.gradients(views)

    def together(self, check: Callable[[], None]) -> None:
        """One process may have found in its rows what another has not."""
        (check if self._sharded is None else partial(self._sharded.group.together, check))()


class LoopMover:
    """Moves by the user's own optimizer: every parameter gets its part of the gradient, and `original` steps."""

    def __init__(self, held: Held, optimizer: Optimizer, original: Callable[..., Any]) -> None:
        self.gradient = torch.zeros(held.layout.size, device=held.device)
        self._views = held.layout.views(self.gradient)
        self._gradients = held.gradients(self._views)
        self._held, self._optimizer, self._moves = held, optimizer, Moves(optimizer, original)
        self._checked = False

    def step(self, pace: Value) -> None:
        parameters = self._held.parameters()
        for name, gradient in self._gradients.items():
            parameter = parameters[name]
            parameter.grad = gradient if parameter.requires_grad else None  # what was frozen since stays
        first = None
        try:
            scales = scales_of(self._held.layout, parameters)
            if not self._checked and FirstMove.due(self._optimizer):
                with balanced(self._optimizer, scales):
                    first, self._checked = FirstMove(self._held.module, self._views, self._optimizer), True
            self._moves.step(scales)
            if first is not None:
                self._held.together(first.check)
        finally:
            for parameter in parameters.values():
                parameter.grad = None  # whatever is there at the next step did not come through us

    def hear(self, noise_std: float | Tensor) -> None:
        self._optimizer.hear(noise_std)  # type: ignore[attr-defined]


class PrivateSteps(HoldsKey):
    """Takes the place of `optimizer.step`, in place; every step asks the `planned` question, about one draw."""

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer,
        method: Method,
        planned: SampledGaussian,
        sampling: Sampling,
        expected_batch: float,
        steps_per_batch: int,
        ledger: Ledger,
        randomness: Randomness,
        arithmetic: str,
        sums: Sums = BY_ITSELF,
    ) -> None:
        self._sums = sums
        self._noise = Independent(arithmetic)
        self.passes, self.optimizer, self.method = passes, optimizer, method
        self.held = Held(passes)
        if isinstance(sums, ShardedSums):
            passes.start_sum = partial(self._sharded_sum, sums)
        if passes.sharded is not None:
            passes.sharded.settings = partial(settings_of, optimizer, passes.sharded.model)
        self.canaries = passes.canaries
        """Made-up rows, for an audit of the loop."""
        self.planned, self.expected_batch = planned, expected_batch
        self.question = sampling.question(replace(planned, multiplier=planned.multiplier / sqrt(steps_per_batch)))
        """What is asked about a draw, or about an epoch: all the answers that its steps take, as one."""
        self._period = sampling.period
        self._paid: int | None = None
        """The draw, or the epoch, that was charged last."""
        self._latest = -1
        self._priced: tuple[torch.device, Any, float | Tensor, float] | None = None
        self.ledger, self.randomness = ledger, randomness
        self.before_asking: Callable[[], None] = lambda: None
        """Called before every charge: writes down what the passes have shown of the assumptions."""
        self.step_number, self.asked, self.draws = 0, 0, 0
        self._told_of_hooks = False
        self._learner: Learner | None = None
        self.probe: dict[str, Any] = {}
        self._patch()

    def _patch(self) -> None:
        self._original = self.optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            return self.step(closure)

        if hasattr(self._original, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler counts our steps already

        # A bound method, because learning-rate schedulers wrap the function inside it.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]
        for owner in (self.optimizer, self.held.module):
            owner.zero_grad = Discarding(owner, self.passes)  # type: ignore[method-assign]
        public: dict[str, Any] = {
            "noise_multiplier": self.planned.multiplier,
            "max_grad_norm": getattr(self.method.clip, "bound", None),
            "expected_batch_size": self.expected_batch,
            "original_optimizer": self.optimizer,
            # A GradScaler then hands its scale to the step, where it can be refused in words.
            "_step_supports_amp_scaling": True,
        }
        for name, value in public.items():
            setattr(self.optimizer, name, value)

    def step(self, closure: Closure | None) -> Any:
        """Move, if the draw is complete; else only bound and add what this part brought."""
        require_same_group(self._sums.group)
        self.passes.settle()
        if self.passes.sharded is not None:
            self.passes.sharded.require_same()  # nothing was replaced, or is gathered that would outlast the step
        parameters, value = self.held.parameters(), None
        self._check(parameters)
        self.require_public()
        if closure is not None:
            self.passes.parts.go_on()
            if self.method.probe.at_parameters:
                with torch.enable_grad():
                    value = closure()
            else:
                self.passes.discard()
                value = self._elsewhere(closure)
            self.passes.settle()  # its passes are over too
            parameters = self.held.parameters()
        elif not self.method.probe.at_parameters:
            raise ValueError(f"{self.method.name} asks elsewhere than at the parameters: call optimizer.step(closure)")
        self.held.now = parameters
        try:
            self._finish()
        finally:
            self.held.now = None
            self.passes.parts.go_on()
        return value

    def _finish(self) -> None:
        parameters = self.held.parameters()
        self._check_gradients(self.held.all_parameters())
        if not self.passes.close_part():
            return
        learner, point = self.learner(), self.held.point(parameters)
        scales = self.passes.layout.constants
        with unseen():  # another loop's tracker may still be on, and a release is public
            release, self.probe = ask(self.method.probe, cast(Any, self._answer), point, self.probe, scales)
        number = self.step_number
        if self.passes.sharded is None and follows(self.optimizer):
            with self.passes.tracking.followed():
                learner.step(release, point, 1.0, number)
            self.require_public()
        else:
            learner.step(release, point, 1.0, number)
        self.passes.step_ended()
        if self.passes.sharded is not None:
            self.passes.sharded.stepped()
        elif number & (number + 1) == 0 or number % CHECKED_EVERY == 0:
            # Together, now and then: replicas that have come apart would each train a model of its own.
            require_same_model(self._sums.group, parameters.values(), number)
        self.step_number += 1

    def require_public(self) -> None:
        """Nothing of an example may be in the model, nor in what the optimizer holds, outside of a pass."""
        if self.passes.sharded is None:
            require_public(self.passes.tracking.labels, self.held.module, self.optimizer)

    def _check(self, parameters: Mapping[str, Tensor]) -> None:
        own = set(map(id, parameters.values()))
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.requires_grad and id(parameter) not in own:
                    raise ValueError(FOREIGN)  # it was added to the optimizer since
            for name, value in group.items():
                if isinstance(value, READ):
                    raise ValueError(
                        f"the optimizer's {name} follows from a value of the examples that was read at {value.where}: "
                        "no noise covers it. Set it by the number of the step, or by public data"
                    )
        if getattr(self.optimizer, "grad_scale", None) is not None:
            raise ValueError(SCALED)

    def _check_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Whatever autograd itself has left on a parameter did not come through the private model's call."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad = None
                self.passes.discard()
                raise ValueError(
                    f"parameter {name!r} has a gradient that did not come through a call of the private model: from a "
                    "part of it that was called by itself, from a pass in eval mode, from a penalty on its weights, or "
                    "from activations that are checkpointed with use_reentrant=True. Call the model itself in training "
                    "mode, give penalties on weights to the optimizer (weight_decay), and checkpoint with "
                    "use_reentrant=False; clear what is not meant for this step with zero_grad()"
                )
            hooked = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooked and not self._told_of_hooks and self.passes.sharded is None:
                self._told_of_hooks = True
                warnings.warn(NOT_CALLED.format(name), stacklevel=5)

    def learner(self) -> Learner:
        """Made with the first step, when the model is where it is trained."""
        if self._learner is None:
            layout, method = self.held.layout, self.method
            self.probe = method.probe.init(layout, self.held.device)
            mover = LoopMover(self.held, self.optimizer, self._original)
            self._learner = Learner(method.memory, method.rule, method.average, layout, self.held.parameters(), mover)
        return self._learner

    def _sharded_sum(self, sums: ShardedSums) -> ShardedSum:
        """Where the clipped gradients of a draw are put, parameter by parameter."""
        device = self.passes.device
        sensitivity, _ = sensitivity_on(device, self.method.clip, self.passes.layout)
        return sums.sum(self._noise, sensitivity, self.planned.multiplier, device)

    def _answer(self, at: At) -> Release:
        """Charge for the draw, and add noise to its clipped sum."""
        if at.transform is not None:
            raise ValueError(f"{self.method.name} changes each example's gradient: use vestige.train for it")
        assert (at.then, at.clip, at.boost) == (None, None, 1), "the engine refuses such probes"
        draw, total = self.passes.taken()
        sensitivity, ceiling = self._sensitivity(total.device)
        if draw // self._period != self._paid:
            self.before_asking()
            self.ledger.ask(self.question, step=self.draws, part=0, sensitivity=float(ceiling))
            self._paid, self.draws = draw // self._period, self.draws + self._period
        self._latest = draw
        index, self.asked = self.asked, self.asked + 1
        multiplier, randomness = self.planned.multiplier, self.randomness
        released, std, _ = self._sums.noised(total, sensitivity, self._noise, multiplier, randomness, "noise", index)
        divided = self._sums if isinstance(self._sums, ShardedSums) else None
        release = Release(released, std, self.expected_batch, sample_rate=self.planned.rate, divided=divided)
        if self.canaries is not None:
            self.canaries.to(total.device)
            self.canaries.observe(release.total, std)
        return release

    def _sensitivity(self, device: torch.device) -> tuple[float | Tensor, float]:
        """As `sensitivity_on`; one for each coordinate is looked through, and sent to a device, once."""
        clip, known = self.method.clip, self._priced
        if known is None or known[0] != device or known[1] is not clip:
            known = self._priced = device, clip, *sensitivity_on(device, clip, self.passes.layout)
        return known[2:]

    @property
    def paid_ahead(self) -> bool:
        """Whether the next draw is charged already: the one that was handed out, or the next of an unfinished pass."""
        parts = self.passes.parts
        handed_out = next((part.draw for part in parts.waiting() if part.draw > self._latest), None)
        if handed_out is None and parts.over:
            return False
        return self._paid is not None and (handed_out or self._latest + 1) // self._period == self._paid

    def _elsewhere(self, closure: Closure) -> Any:
        """Set the parameters to the query point of the method, run the user's closure there, and restore them."""
        self.learner()
        home = {name: p.clone() for name, p in self.passes.point().items()}
        self._go(_asked_at(self.method, self.passes.layout, self.passes.point(), self.probe))
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._go(home)

    def _go(self, point: Parameters) -> None:
        with torch.no_grad():
            for name, parameter in self.passes.parameters().items():
                parameter.copy_(point[name])

    def state_dict(self) -> dict[str, Any]:
        memory = self.learner().memory
        counts = {"step_number": self.step_number, "asked": self.asked, "draws": self.draws, "next": self._latest + 1}
        planted = {} if self.canaries is None else {"canaries": self.canaries.state_dict()}
        return {"memory": memory, "probe": self.probe, **counts, **planted}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        device = self.passes.device
        self.passes.forget()  # of a draw that may come again

        def here(part: Mapping[str, Any]) -> dict[str, Any]:
            return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in part.items()}

        self.learner().memory, self.probe = here(saved["memory"]), here(saved["probe"])
        self.step_number, self.asked, self.draws = saved["step_number"], saved["asked"], saved["draws"]
        if self.randomness.predictable:  # the loader resumes at that draw; a secret sample is never drawn twice
            self._latest, self._paid = saved.get("next", self.draws) - 1, None
            self.passes.parts.draws = self._latest + 1
        if self.canaries is not None:
            self.canaries.load_state_dict(saved["canaries"])


def settings_of(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """What decides how an optimizer moves, but for gradients and its state: the public numbers of its groups and which
    parameters are in them, and which parameters are trained. Written alike in every process."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [
        {key: _public(value) for key, value in group.items() if key != "params"}
        | {"params": [names.get(id(parameter), "unknown") for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return {"the optimizer": groups, "the list of frozen parameters": frozen}


def _public(value: Any) -> Any:
    """An option of an optimizer as text that has no address in it; a tensor is a learning rate."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


class _Found(Exception):
    """Ends a question before it is asked: where it would be asked is all that was wanted."""


def _asked_at(method: Method, layout: Layout, point: Parameters, state: dict[str, Any]) -> Parameters:
    """Where a method will ask its one question; the parts of a draw are all asked there."""
    found: list[At] = []

    def listen(at: At) -> Release:
        found.append(at)
        raise _Found

    try:
        ask(method.probe, cast(Any, listen), point, state, layout.constants)
    except _Found:
        return {name: value.clone() for name, value in found[0].point.items()}
    raise AssertionError("a probe must ask")


class Discarding:
    """`zero_grad` of a private model or its optimizer: it also discards what backward passes have left since the last
    step, as in ordinary training. A copy, or a model saved whole, has the ordinary one."""

    def __init__(self, owner: Any, passes: Passes) -> None:
        self._owner, self._passes, self._original = owner, passes, owner.zero_grad
        self._torchs_own = getattr(self._original, "__func__", None) is Optimizer.zero_grad

    def __call__(self, set_to_none: bool = True) -> None:
        self._passes.discard()
        with unseen_by_functions():
            if self._torchs_own and all(p.grad is None for group in self._owner.param_groups for p in group["params"]):
                return  # nothing to clear, as always after a private step
        self._original(set_to_none=set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return ordinary_zero_grad(memo.get(id(self._owner), self._owner))

    def __reduce__(self) -> Any:
        return ordinary_zero_grad, (self._owner,)


def ordinary_zero_grad(owner: Any) -> Any:
    return partial(type(owner).zero_grad, owner)
