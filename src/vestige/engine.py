"""How does a user's own training loop become private? `PrivacyEngine`, with the names that Opacus users know."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
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
from vestige.bookkeeping import BookKeeping
from vestige.clipping import BoundedSum, Engine, Flat, Loss, Parameters, Transform
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
from vestige.noise import Randomness, Release, add_noise
from vestige.planning import check_multiplier
from vestige.probes import AgainstLastRelease, AlongLastStep, Here
from vestige.questions import Question, SampledGaussian
from vestige.taps import Plan, eagerly
from vestige.watching import Scaled, Uses, Watch, add_watched, unwatchable

Closure = Callable[[], Any]


class PrivacyEngine:
    """Makes a model, an optimizer and a loader private, in place: `loss.backward(); optimizer.step()` as ever.

    The model keeps its class, its state_dict and its methods; the optimizer stays the same object; the loader draws
    Poisson samples. `loss.backward()` leaves each example's gradient in factored form and `p.grad` empty; the step
    clips, sums and adds noise. Where the model's own passes cannot be watched, it is run a second time, and that is
    said (docs/loop.md). Every step charges a ledger (in the file `ledger`, if given) before its release exists.

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
    return part_of_a_run(module, _engine(engine), _stand_in, layout, method, blank, population, _rate(loader), steps=1)


def _engine(name: str) -> Callable[[nn.Module, Loss, Layout], Engine]:
    """Never recorded as a CUDA graph: what a user's call has beside its examples would be frozen in the recording."""
    return engine_by_name("unrecorded" if name == "bookkeeping" else name)


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


@dataclass
class _Pass:
    """One forward pass of the user's, with what came back: signals at its outputs, or gradients if it was watched."""

    leaves: list[Any]
    call: TreeSpec
    random_state: list[Tensor]
    watch: Watch | None = None
    rows: int = 0
    outputs: list[int] = field(default_factory=list)
    signals: list[Tensor] = field(default_factory=list)
    uses: Uses | None = None


@dataclass(frozen=True)
class _Form:
    """How the model was called when it was rehearsed; a pass of another form is not watched."""

    call: TreeSpec
    tensors: list[int]
    batched: frozenset[int]
    outputs: list[int]

    def examples(self, leaves: Sequence[Any], call: TreeSpec) -> int:
        """How many examples a call of this form is about; 0 if it has another form, or none."""
        if call != self.call or _tensors(leaves) != self.tensors:
            return 0
        rows = {len(leaves[place]) for place in self.batched if leaves[place].dim()}
        return rows.pop() if len(rows) == 1 else 0


def _tensors(leaves: Sequence[Any]) -> list[int]:
    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.random.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _inside(grouping: Grouping) -> Grouping:
    """A grouping of the user's module, in the names that its parameters have inside the adapter."""
    return lambda adapter: [[f"module.{name}" for name in group] for group in grouping(cast(_Adapter, adapter).module)]


@dataclass(frozen=True)
class _Uncompiled:
    """Calls a module as it is where gradients are asked of it, and its compiled form elsewhere."""

    module: nn.Module
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        private = self.module.training and torch.is_grad_enabled()
        return self.module._call_impl(*args, **kwargs) if private else self.compiled(*args, **kwargs)


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
        self.engine = _engine(engine)(self.adapter, _along, self.layout)
        self.plan: Plan | None = None
        self.form: _Form | None = None
        self.second_passes: str | None = None
        """Why the model is run twice, once that is known to be needed."""
        self.step_number, self.asked = 0, 0
        self.memory: dict[str, Any] | None = None
        self.probe: dict[str, Any] | None = None
        self.part: Part | None = None
        self.largest = inf
        """The most examples that the loader has handed out at once; the last part will not do, for a loop that takes
        its batches before it uses them."""
        self.passes: list[tuple[Part | None, _Pass]] = []
        self.total: Tensor | None = None
        self.uses: dict[tuple[int, int], int] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self._open: list[_Pass] = []
        self._busy = False
        self._run_eagerly()
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
        self._abandon()
        self._run_eagerly()
        self.largest = part.size if self.part is None else max(self.largest, part.size)
        self.part = part

    def _run_eagerly(self) -> None:
        """`module.compile()` puts a compiled graph around our hooks too; private passes go past it, others do not."""
        compiled: Any = self.module._compiled_call_impl
        if compiled is None or isinstance(compiled, _Uncompiled):
            return
        self.module._compiled_call_impl = _Uncompiled(self.module, compiled)  # type: ignore[assignment]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        asks = module.training and torch.is_grad_enabled()
        if module is not self.module and asks:
            raise ValueError("module is a copy of a private model: load its state_dict into a new one to train it")
        if self._busy or module is not self.module:
            return None
        if self._open:
            self._abandon()
            if module.training:
                raise ValueError("a forward pass of the model began inside another, or after one that was interrupted")
        if not asks:
            return None
        require_independent(module)  # as it is now: its modes may have changed
        self._require_noised()
        if self.passes:
            self._gather(watched=True)  # what several passes have left need not be held at once
        leaves, call = tree_flatten((args, kwargs))
        # Detached: what is before the model gets no gradients, which would be of examples and without noise.
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        one = _Pass(kept, call, _random_state(self._device))
        if self.form is None and self.second_passes is None and isinstance(self.engine, BookKeeping):
            self._rehearse(one)
        self._open.append(one)
        if not self._watches(one):
            torch.set_grad_enabled(False)  # this pass only finds the outputs; the engine runs another for the gradients
        return tree_unflatten(kept, call)

    def _watches(self, one: _Pass) -> bool:
        """Start to watch a pass of the form that was rehearsed, if nothing speaks against it."""
        if self.plan is None or self.form is None or self.second_passes is not None:
            return False
        examples = self.form.examples(one.leaves, one.call)
        kind = self._device.type
        if examples == 0 or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16):
            return False  # the gradients of a mean are small: half precision would lose them
        part = self.part

        def finished(uses: Uses) -> None:
            self.passes.append((part, replace(one, leaves=[], watch=None, uses=uses)))

        one.watch = Watch(self.plan, examples, self._point(), finished)
        one.watch.open()
        return True

    def _abandon(self) -> None:
        """Close passes that were interrupted before their end."""
        while self._open:
            one = self._open.pop()
            self._close(one)
            if one.watch is not None:
                one.watch.drop()

    def _close(self, one: _Pass) -> None:
        if one.watch is None:
            torch.set_grad_enabled(True)
        else:
            one.watch.close()

    def _twice(self, reason: str) -> None:
        self.second_passes = reason
        warnings.warn(f"{reason}: every step runs the model a second time, which is exact but slower", stacklevel=2)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if self._busy or not self._open or module is not self.module:
            return outputs
        one = self._open.pop()
        self._close(one)
        found, shape = tree_flatten(outputs)
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not places:
            return outputs
        if any(found[i].dim() == 0 for i in places):
            raise ValueError("the model returned a loss of the whole batch: compute the loss outside, from its outputs")
        one.outputs, one.rows = places, len(found[places[0]])
        self._require_rows(one)
        for place, tensor in zip(places, self._leading(one, [found[i] for i in places]), strict=True):
            found[place] = tensor
        return tree_unflatten(found, shape)

    def _require_noised(self) -> None:
        """A parameter that has no place in the release would get its gradient, and move, without noise."""
        names = {segment.name for segment in self.layout.segments}
        for name, parameter in self.adapter.named_parameters():
            if parameter.requires_grad and name not in names:
                raise ValueError(
                    f"parameter {name.removeprefix('module.')!r} became trainable after make_private and would move "
                    "without noise: let it require gradients when make_private is called, and freeze it afterwards"
                )

    def _require_own(self) -> None:
        """The same of what was added to the optimizer since."""
        own = {id(parameter) for parameter in self.layout.parameters(self.adapter).values()}
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if id(parameter) not in own and parameter.requires_grad and parameter.grad is not None:
                raise ValueError("optimizer holds a parameter that is not the module's: it would move without noise")

    def _require_rows(self, one: _Pass) -> None:
        """A row is an example, at most once: each is bounded by itself, so one in several rows would move the sum by
        several bounds."""
        problem = None
        if not any(one.leaves[i].dim() and len(one.leaves[i]) == one.rows for i in _tensors(one.leaves)):
            problem = f"none of the tensors that it was called with has {one.rows} rows"
        elif one.rows > self.largest:
            problem = f"the loader handed out {self.largest:.0f} examples at once"
        if problem is not None:
            if one.watch is not None:
                one.watch.drop()
            raise ValueError(
                f"the model returned {one.rows} rows, but {problem}: every example must be one row of the model's "
                "inputs and outputs, and of one batch of the loader"
            )

    def _leading(self, one: _Pass, outputs: list[Tensor]) -> Sequence[Tensor]:
        """The outputs as the user gets them: with the model behind them if it was watched, else as ends of a graph."""
        if one.watch is not None:
            assert self.form is not None
            doubt, usual = one.watch.doubt, one.outputs == self.form.outputs  # else only this pass is run again
            if doubt is not None:
                self._twice(doubt)
            elif usual and all(len(output) == one.watch.examples for output in outputs):
                return one.watch.rooted(outputs)
            one.watch.drop()
            one.watch = None
        part = self.part

        def receive(signals: Sequence[Tensor]) -> None:
            self.passes.append((part, replace(one, signals=[s.detach() for s in signals])))

        cut = [output.detach() for output in outputs]  # a graph that is not used must not be run either
        return _Signal.apply(receive, self._anchor, *cut)  # type: ignore[no-any-return]

    # --- one step ---

    def step(self, original: Callable[..., Any], closure: Closure | None) -> Any:
        """Move, if the draw is complete; else only bound and add what this part brought."""
        self._abandon()
        self._run_eagerly()
        self._require_own()
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
        if self.memory is None or self.probe is None:
            self.memory = self.method.memory.init(self.layout, self._device)
            self.probe = self.method.probe.init(self.layout, self._device)
        point = self._point()
        release, self.probe = self.method.probe.ask(gradient, point, self.probe)
        direction, self.memory, _ = self.method.memory.step(release, self.memory, point)
        mean = direction / release.expected_batch
        parameters = self.layout.parameters(self.adapter)
        for name, view in self.layout.views(mean).items():
            parameters[name].grad = view if parameters[name].requires_grad else None  # what was frozen since stays
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
        stream = self.randomness.stream("noise", index)
        std, _ = add_noise(BoundedSum(self.total, sensitivity), self.multiplier, stream)
        release = Release(self.total, std, self.expected_batch * draws, sample_rate=rate)
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

    def _gather(self, watched: bool = False) -> None:
        """Add the clipped sum of every finished pass, or of the `watched` ones; these passes are then forgotten."""
        if self.total is None:
            self.total = torch.zeros(self.layout.size, device=self._device)
        passes = [(part, one) for part, one in self.passes if one.uses is not None or not watched]
        self.passes = [(part, one) for part, one in self.passes if one.uses is None and watched]
        for part, one in passes:
            key = (part.draw, part.number) if part is not None else (-1, 0)
            self.uses[key] = self.uses.get(key, 0) + 1
            scale = one.rows if self.reduction == "mean" else 1
            if one.uses is not None:
                add_watched(one.uses, Scaled(self.method.clip, scale), self.layout, self.total, one.rows)
            elif one.rows:
                self._run_again(one, scale)

    def _run_again(self, one: _Pass, scale: int) -> None:
        """The engine's own pass, with the random numbers of the user's."""
        assert self.total is not None
        signals = torch.cat([s.reshape(one.rows, -1) for s in one.signals], dim=1) * scale
        with self._as_called(one) as batch, torch.random.fork_rng(self._cuda):
            torch.random.set_rng_state(one.random_state[0])
            for state in one.random_state[1:]:
                torch.cuda.set_rng_state(state, self._device)
            self.engine([*batch, signals], self._point(), self.method.clip, self.total)
            if self.form is not None and one.call == self.form.call:
                # Two batches of different sizes tell what has examples on its first axis.
                self.form = replace(self.form, batched=self.form.batched & frozenset(self.adapter.batched))

    @contextmanager
    def _as_called(self, one: _Pass) -> Iterator[list[Tensor]]:
        """The adapter as the user's call has it, for calls that are no pass of the user's; the tensors of examples."""
        adapter = self.adapter
        adapter.leaves, adapter.call, adapter.outputs = one.leaves, one.call, one.outputs
        adapter.batched = [i for i in _tensors(one.leaves) if one.leaves[i].dim() and len(one.leaves[i]) == one.rows]
        self._busy = True
        try:
            yield [one.leaves[i] for i in adapter.batched]
        finally:
            self._busy, adapter.leaves = False, []

    def _rehearse(self, one: _Pass) -> None:
        """Before the first pass: can the user's passes be watched? With made-up signals, in place of a loss's."""
        assert isinstance(self.engine, BookKeeping)
        with torch.random.fork_rng(self._cuda):
            with self._as_called(one), torch.no_grad(), eagerly():
                args, kwargs = tree_unflatten(one.leaves, one.call)
                found = tree_flatten(self.module(*args, **kwargs))[0]
            places = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            rows = {len(found[i]) if found[i].dim() else 0 for i in places}
            if len(rows) > 1 and 0 not in rows:
                self._twice("the model's outputs have different numbers of rows")
            if len(rows) != 1 or 0 in rows:
                return
            first = replace(one, outputs=places, rows=rows.pop())
            width = sum(found[i][0].numel() for i in places)
            random = torch.Generator().manual_seed(0)
            signals = 0.5 + torch.rand(first.rows, width, generator=random).to(self._device)
            with self._as_called(first) as batch, torch.enable_grad():
                self.plan = self.engine.plan([*batch, signals], self._point())
                batched = frozenset(self.adapter.batched)
        if self.engine.rehearsed:
            self.form = _Form(one.call, _tensors(one.leaves), batched, places)
            self.second_passes = unwatchable(self.plan)
            if self.second_passes is not None:
                self._twice(self.second_passes)

    def __deepcopy__(self, memo: Any) -> _PrivateSteps:
        """A copy of the model, to be averaged or evaluated, does not copy the books: its hooks lead here."""
        return self

    def _forget(self) -> None:
        self.total, self.uses, self.passes = None, {}, []

    @property
    def _cuda(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else []

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _point(self) -> Parameters:
        return {name: p.detach() for name, p in self.layout.parameters(self.adapter).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory, "probe": self.probe, "step_number": self.step_number, "asked": self.asked}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        device = self._device
        here: Callable[[Any], Any] = lambda part: (  # noqa: E731
            part and {k: v.to(device) if isinstance(v, Tensor) else v for k, v in part.items()}
        )
        self.memory, self.probe = here(saved["memory"]), here(saved["probe"])
        self.step_number, self.asked = saved["step_number"], saved["asked"]


__all__ = ["BudgetSpent", "PrivacyEngine"]
