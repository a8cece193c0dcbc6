"""How does a user's own training loop become private? `PrivacyEngine`, with the names that Opacus users know."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, default_collate

from vestige import accounting
from vestige.adaptive import Adaptive
from vestige.clipping import BoundedSum, Flat, Parameters, Transform
from vestige.curator import BudgetSpent
from vestige.engines import engine_by_name
from vestige.files import read_tensors, write_tensors
from vestige.fitting import PhysicalBatch, check_physical_batch, part_of_a_run
from vestige.groups import PerGroup
from vestige.independence import require_independent
from vestige.layout import Grouping, Layout
from vestige.ledger import Ledger
from vestige.loaders import CollateEmpty, Part, PrivateLoader, private_loader
from vestige.method import Method, build
from vestige.noise import Randomness, Release, draw_noise
from vestige.planning import check_multiplier
from vestige.probes import AgainstLastRelease, AlongLastStep, Here
from vestige.questions import Question, SampledGaussian

Closure = Callable[[], Any]


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, in place: `loss.backward(); optimizer.step()` as ever.

    The model keeps its class, its state_dict and its methods; the optimizer stays the same object; the loader draws
    Poisson samples. Every step charges a ledger (in the file `ledger`, if given) before its release exists.

    Formal guarantees: after any number of steps, everything the optimizer did is (get_epsilon(delta), delta)-private
    for adding or removing one example, provided that the loss of a batch is a sum or mean of losses of its examples.
    """

    def __init__(self, *, ledger: str | Path | None = None, reproducible: int | None = None) -> None:
        self._randomness = Randomness.secret() if reproducible is None else Randomness.reproducible(reproducible)
        self._ledger = Ledger(Path(ledger) if ledger is not None else None)
        self._facts = accounting.Facts(noise="secret" if reproducible is None else "seeded")
        self._steps: _PrivateSteps | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        method: str | Method = "dp-sgd",
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        max_physical_batch_size: PhysicalBatch = None,
        engine: str = "bookkeeping",
    ) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
        """Private training with a given noise multiplier; the memory of any method, the moves of your own optimizer.

        `max_physical_batch_size` splits each sampled batch: keep calling `optimizer.step()` after every part, and only
        the last one moves; "auto" finds the largest that fits (`fitting`), for batches (inputs..., targets). A method
        that asks somewhere else than at the parameters takes a closure: `optimizer.step(closure)`.
        """
        if self._steps is not None:
            raise ValueError("make_private was called before: use a new PrivacyEngine for each model")
        check_multiplier(noise_multiplier)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction={loss_reduction!r} must be 'mean' or 'sum'")
        require_independent(module)
        _require_covered(module, optimizer)
        check_physical_batch(max_physical_batch_size, "max_physical_batch_size")
        chosen = _fit_for_a_loop(build(method) if isinstance(method, str) else method)
        if max_physical_batch_size == "auto":
            max_physical_batch_size = _largest_part(module, data_loader, chosen, engine)
        rate, loader = self._loader(data_loader, poisson_sampling, max_physical_batch_size)
        if isinstance(chosen.clip, Flat | PerGroup):
            chosen = replace(chosen, clip=replace(chosen.clip, bound=max_grad_norm))
        self._ledger.open({"noise": self._facts.noise, "sampling": self._facts.sampling, "method": repr(chosen)})
        self._steps = _PrivateSteps(
            module, optimizer, chosen, noise_multiplier, rate, rate * len(data_loader.dataset), loss_reduction,  # type: ignore[arg-type]
            engine, self._ledger, self._randomness,
        )  # fmt: skip
        if isinstance(loader, PrivateLoader):
            loader.on_part = self._steps.enter
        return module, optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        method: str | Method = "dp-sgd",
        **options: Any,
    ) -> tuple[nn.Module, Optimizer, DataLoader[Any]]:
        """As `make_private`, with the noise that spends `target_epsilon` in `epochs` passes over the loader.

        A step that would exceed the target raises `BudgetSpent` and does not happen.
        """
        if epochs < 1:
            raise ValueError(f"epochs={epochs} must be a whole number from 1 up")
        rate = _rate(data_loader)
        steps = epochs * max(1, round(1 / rate))
        chosen = _fit_for_a_loop(build(method) if isinstance(method, str) else method)

        def asked(multiplier: float) -> dict[Question, int]:
            return {question: steps for question in chosen.probe.questions(rate, multiplier)}

        noise_multiplier = accounting.calibrate(asked, target_epsilon, target_delta)
        self._ledger.budget = accounting.Budget(target_epsilon, target_delta, asked(noise_multiplier))
        return self.make_private(
            module=module, optimizer=optimizer, data_loader=data_loader, noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm, method=chosen, **options,
        )  # fmt: skip

    def get_epsilon(self, delta: float) -> float:
        """What has been spent so far; an error, with the reason, where no epsilon holds."""
        promise = accounting.guarantee(self._ledger.spent, delta, self._facts)
        if promise.epsilon is None:
            raise ValueError(f"no epsilon holds for this run: {'; '.join(promise.reasons)}")
        return promise.epsilon

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, number of steps), as Opacus's accountants keep it."""
        return [(q.multiplier, q.rate, n) for q, n in self._ledger.spent.items() if isinstance(q, SampledGaussian)]

    def save_checkpoint(self, *, path: str | Path, module: nn.Module, optimizer: Optimizer) -> None:
        """Weights, optimizer, memory and what was spent, all at once; no random state."""
        steps = self._private_steps()
        spent = [(question.to_json(), count) for question, count in self._ledger.spent.items()]
        write_tensors(
            Path(path),
            {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, **steps.state_dict()},
        )

    def load_checkpoint(self, *, path: str | Path, module: nn.Module, optimizer: Optimizer) -> None:
        """Continue after `make_private` with the same arguments; what was spent by then is added."""
        saved = read_tensors(Path(path))
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        self._private_steps().load_state_dict(saved)
        for row, count in saved["spent"]:
            self._ledger.spent[Question.from_json(row)] += count

    def _private_steps(self) -> _PrivateSteps:
        if self._steps is None:
            raise ValueError("call make_private first")
        return self._steps

    def _loader(
        self, loader: DataLoader[Any], poisson: bool, physical_batch: int | None
    ) -> tuple[float, DataLoader[Any]]:
        rate = _rate(loader)
        if not poisson:
            self._facts = replace(self._facts, sampling="shuffled")
            return rate, loader
        return rate, private_loader(loader, rate, self._randomness, physical_batch, lambda part: None)


def _fit_for_a_loop(method: Method) -> Method:
    """Refuse what a user's own loop cannot answer as priced: it has one batch per step, and asks about it once."""
    plain = Method(name=method.name)
    neutral = ("schedule", "noise", "average", "augment", "gate")
    wrong = [part for part in neutral if getattr(method, part) != getattr(plain, part)]
    if isinstance(method.clip, Adaptive):
        wrong.append("clip")
    if not isinstance(method.probe, Here | AgainstLastRelease | AlongLastStep):
        wrong.append("probe")  # a second answer about the same batch would be priced as one about a fresh batch
    if wrong:
        raise ValueError(
            f"method={method.name!r} has a {wrong[0]} that a training loop of your own cannot answer as it is priced: "
            "use vestige.train"
        )
    return method


def _rate(loader: DataLoader[Any]) -> float:
    """Expected batch over dataset, exactly; not one over the number of batches."""
    if loader.batch_size is None:
        raise ValueError("data_loader has no batch_size: the sampling rate is batch_size / len(dataset)")
    return min(1.0, loader.batch_size / len(loader.dataset))  # type: ignore[arg-type]


def _largest_part(module: nn.Module, loader: DataLoader[Any], method: Method, engine: str) -> int:
    collate = CollateEmpty(loader.dataset, loader.collate_fn or default_collate)
    blank = collate([])
    if not (isinstance(blank, list | tuple) and len(blank) > 1 and all(isinstance(part, Tensor) for part in blank)):
        raise ValueError("max_physical_batch_size='auto' tries out batches (inputs..., targets): give a number")
    population = len(loader.dataset)  # type: ignore[arg-type]
    layout = Layout.of(module, method.grouping)
    return part_of_a_run(
        module, engine_by_name(engine), _stand_in, layout, method, blank, population, _rate(loader), steps=1
    )


def _stand_in(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that takes about as much memory as the user's, which is not known yet: as much as a cross-entropy."""
    floating = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.flatten(1).log_softmax(dim=1).square().sum() for leaf in floating]).sum()


def _require_covered(module: nn.Module, optimizer: Optimizer) -> None:
    trainable = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in trainable and parameter.requires_grad:
                raise ValueError("optimizer holds a parameter that is not the module's: it would move without noise")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, name in trainable.items():
        if key not in held:
            raise ValueError(f"parameter {name!r} is trainable but not in the optimizer: add it, or freeze it")


class _Signal(torch.autograd.Function):
    """The model's outputs as leaves of the user's graph: what reaches them going back is handed to `receive`."""

    @staticmethod
    def forward(ctx: Any, receive: Callable[[Sequence[Tensor]], None], anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.receive = receive
        ctx.save_for_backward(*outputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        ctx.receive(signals)
        return (None, None, *[None] * len(signals))


class _Adapter(nn.Module):
    """The user's model as the engines call it: tensors with examples first, one flat answer per example."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.leaves: list[Any] = []
        self.batched: list[int] = []
        self.call: TreeSpec | None = None
        self.outputs: list[int] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        assert self.call is not None
        leaves = list(self.leaves)
        for place, tensor in zip(self.batched, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.call)
        found = tree_flatten(self.module(*args, **kwargs))[0]
        return torch.cat(
            [found[i].flatten(1) if found[i].dim() > 1 else found[i][:, None] for i in self.outputs], dim=1
        )


def _along(outputs: Tensor, signals: Tensor) -> Tensor:
    """The loss whose gradient at the outputs is the signal: its gradients in the parameters are the user's."""
    return (outputs * signals).sum()


class _Pass:
    """One forward pass of the user's, with the signal that came back to its outputs."""

    def __init__(self, leaves: list[Any], call: TreeSpec, rows: int, random_state: Tensor) -> None:
        self.leaves, self.call, self.rows, self.random_state = leaves, call, rows, random_state
        self.outputs: list[int] = []
        self.signals: list[Tensor] = []


def _inside(grouping: Grouping) -> Grouping:
    """A grouping of the user's module, in the names that its parameters have inside the adapter."""
    return lambda adapter: [[f"module.{name}" for name in group] for group in grouping(cast(_Adapter, adapter).module)]


class _PrivateSteps:
    """What happens between the user's forward pass and the optimizer's move."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        method: Method,
        multiplier: float,
        rate: float,
        expected_batch: float,
        reduction: str,
        engine: str,
        ledger: Ledger,
        randomness: Randomness,
    ) -> None:
        self.module, self.optimizer, self.method = module, optimizer, method
        self.multiplier, self.rate, self.expected_batch = multiplier, rate, expected_batch
        self.reduction, self.ledger, self.randomness = reduction, ledger, randomness
        self.adapter = _Adapter(module)
        self.layout = Layout.of(self.adapter, method.grouping and _inside(method.grouping))
        self.engine = engine_by_name(engine)(self.adapter, _along, self.layout)
        self.step_number, self.asked = 0, 0
        self.memory: dict[str, Any] | None = None
        self.probe: dict[str, Any] | None = None
        self.part: Part | None = None
        self.passes: list[tuple[Part | None, _Pass]] = []
        self.total: Tensor | None = None
        self.uses: dict[tuple[int, int], int] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._open: list[tuple[list[Any], TreeSpec, Tensor]] = []
        self._busy = False
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
        self._patch()

    def _patch(self) -> None:
        original = self.optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            return self.step(original, closure)

        # A bound method, because learning-rate schedulers wrap the function inside it.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]
        public: dict[str, Any] = {
            "noise_multiplier": self.multiplier,
            "max_grad_norm": getattr(self.method.clip, "bound", None),
            "expected_batch_size": self.expected_batch,
            "original_optimizer": self.optimizer,
        }
        for name, value in public.items():
            setattr(self.optimizer, name, value)

    # --- what the loader and the model tell ---

    def enter(self, part: Part) -> None:
        """A new physical batch is handed out. What an abandoned draw left behind was never released: it is dropped."""
        if self.part is not None and part.draw != self.part.draw and not self.part.last:
            self._forget()
        self.part = part

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._busy or not (module.training and torch.is_grad_enabled()):
            return
        leaves, call = tree_flatten((args, kwargs))
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._open.append((kept, call, torch.random.get_rng_state()))
        torch.set_grad_enabled(False)  # this pass only finds the outputs; the engine runs its own for the gradients

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if self._busy or not self._open:
            return outputs
        leaves, call, random_state = self._open.pop()
        torch.set_grad_enabled(True)
        found, shape = tree_flatten(outputs)
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not places:
            return outputs
        if any(found[i].dim() == 0 for i in places):
            raise ValueError("the model returned a loss of the whole batch: compute the loss outside, from its outputs")
        one = _Pass(leaves, call, len(found[places[0]]), random_state)
        part = self.part

        def receive(signals: Sequence[Tensor]) -> None:
            one.outputs, one.signals = places, [s.detach() for s in signals]
            self.passes.append((part, one))

        for place, tensor in zip(
            places, _Signal.apply(receive, self._anchor, *(found[i] for i in places)), strict=True
        ):
            found[place] = tensor
        return tree_unflatten(found, shape)

    # --- one step ---

    def step(self, original: Callable[..., Any], closure: Closure | None) -> Any:
        """Move, if the draw is complete; else only bound and add what this part brought."""
        if self.part is not None and not self.part.last:
            self._gather()
            return None
        value: Any = None
        if isinstance(self.method.probe, Here):
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            gradient: Any = self._answer
        else:
            if closure is None:
                raise ValueError(
                    f"{self.method.name} asks elsewhere than at the parameters: call optimizer.step(closure)"
                )
            self._forget()
            gradient = self._answer_by(closure)
        device = next(self.module.parameters()).device
        if self.memory is None or self.probe is None:
            self.memory = self.method.memory.init(self.layout, device)
            self.probe = self.method.probe.init(self.layout, device)
        point = self._point()
        release, self.probe = self.method.probe.ask(gradient, point, self.probe)
        direction, self.memory, _ = self.method.memory.step(release, self.memory, point)
        mean = direction / release.expected_batch
        for name, view in self.layout.views(mean).items():
            self.layout.parameters(self.adapter)[name].grad = view
        self.step_number += 1
        original()
        return value

    def _answer(self, point: Parameters, *, part: int = 0, transform: Transform | None = None) -> Release:
        """Bound what was gathered, charge for it, add noise."""
        if transform is not None:
            raise ValueError(f"{self.method.name} changes each example's gradient: use vestige.train for it")
        self._gather()
        assert self.total is not None
        # An example that entered a sum k times (accumulated draws, several losses) may move it by k bounds, and is
        # there with probability at most 1 - (1 - rate)^draws: a larger rate and a smaller multiplier than planned.
        draws = max(1, len({draw for draw, _ in self.uses}))
        often = max(1, sum(self._most(draw) for draw in {draw for draw, _ in self.uses}))
        rate = self.rate if draws == 1 else 1 - (1 - self.rate) ** draws
        if often > 1:
            warnings.warn(
                f"an example may enter this step {often} times, so it is charged as noise multiplier "
                f"{self.multiplier / often:.4g}: for large batches use max_physical_batch_size instead",
                stacklevel=3,
            )
        sensitivity = self.method.clip.sensitivity(self.layout)
        if isinstance(sensitivity, Tensor):
            sensitivity = sensitivity.to(self.total.device)
        ceiling = float(sensitivity.max()) if isinstance(sensitivity, Tensor) else float(sensitivity)
        question = SampledGaussian(rate, self.multiplier / often)
        self.ledger.ask(question, step=self.step_number, part=part, sensitivity=ceiling)
        index, self.asked = self.asked, self.asked + 1
        noise, std = draw_noise(
            BoundedSum(self.total, sensitivity), self.multiplier, self.randomness.stream("noise", index)
        )
        release = Release(self.total.add_(noise), std, self.expected_batch * draws, sample_rate=rate)
        self._forget()
        return release

    def _answer_by(self, closure: Closure) -> Callable[..., Any]:
        """Answers anywhere: the parameters go there, the user's closure runs, the parameters come back."""

        def answer(point: Parameters, *, part: int = 0, transform: Transform | None = None) -> Release:
            parameters = self.layout.parameters(self.adapter)
            home = {name: p.detach().clone() for name, p in parameters.items()}
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(point[name])
            with torch.enable_grad():
                closure()
            release = self._answer(point, part=part, transform=transform)
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(home[name])
            return release

        return answer

    def _most(self, draw: int) -> int:
        return max(count for (d, _), count in self.uses.items() if d == draw)

    def _gather(self) -> None:
        """Run the engine on every finished pass and add its clipped sum; the passes are then forgotten."""
        point = self._point()
        device = next(iter(point.values())).device
        if self.total is None:
            self.total = torch.zeros(self.layout.size, device=device)
        passes, self.passes = self.passes, []
        for part, one in passes:
            key = (part.draw, part.number) if part is not None else (-1, 0)
            self.uses[key] = self.uses.get(key, 0) + 1
            if one.rows == 0:
                continue
            adapter = self.adapter
            adapter.leaves, adapter.call, adapter.outputs = one.leaves, one.call, one.outputs
            adapter.batched = [
                i
                for i, leaf in enumerate(one.leaves)
                if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == one.rows
            ]
            signals = torch.cat([s.reshape(one.rows, -1) for s in one.signals], dim=1)
            if self.reduction == "mean":
                signals = signals * one.rows
            batch = [*(one.leaves[i] for i in adapter.batched), signals]
            self._busy = True  # the engine calls the model too, and that is no pass of the user's
            try:
                with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                    torch.random.set_rng_state(one.random_state)
                    self.engine(batch, point, self.method.clip, self.total)
            finally:
                self._busy, adapter.leaves = False, []

    def _forget(self) -> None:
        self.total, self.uses, self.passes = None, {}, []

    def _point(self) -> Parameters:
        return {name: p.detach() for name, p in self.layout.parameters(self.adapter).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory, "probe": self.probe, "step_number": self.step_number, "asked": self.asked}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        device = next(self.module.parameters()).device
        here: Callable[[Any], Any] = lambda part: (  # noqa: E731
            part and {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}
        )
        self.memory, self.probe = here(saved["memory"]), here(saved["probe"])
        self.step_number, self.asked = saved["step_number"], saved["asked"]


__all__ = ["BudgetSpent", "PrivacyEngine"]
