"""How does a user's own training loop become private? `PrivacyEngine`, with the names that Opacus users know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, default_collate

from vestige import accounting
from vestige.accounting.ledger import Ledger
from vestige.checks import check_multiplier, renamed
from vestige.engines.independence import require_independent
from vestige.engines.registry import engine_by_name
from vestige.files import read_tensors, write_tensors
from vestige.layout import Layout
from vestige.mechanism.clipping import GradientEngine, Loss
from vestige.methods.base import Method
from vestige.methods.registry import build
from vestige.optim.rules import Rule
from vestige.privacy_engine.coverage import require_covered
from vestige.privacy_engine.loaders import CollateEmpty, PrivateLoader, private_loader
from vestige.privacy_engine.optimizer_step import PrivateSteps
from vestige.privacy_engine.replayed import Caller, floating
from vestige.questions import BudgetSpent, Question, SampledGaussian
from vestige.randomness.keys import Randomness
from vestige.training.physical_batch import PhysicalBatch, check_physical_batch, part_of_a_run


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
        self._steps: PrivateSteps | None = None

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
        require_covered(module, optimizer)
        check_physical_batch(max_physical_batch_size, "max_physical_batch_size")
        chosen = _fit_for_a_loop(build(method) if isinstance(method, str) else method)
        if max_physical_batch_size == "auto":
            max_physical_batch_size = _largest_part(module, data_loader, chosen, engine)
        rate, loader = self._loader(data_loader, poisson_sampling, max_physical_batch_size)
        with renamed({"bound": "max_grad_norm"}):
            chosen = replace(chosen, clip=chosen.clip.with_bound(max_grad_norm), rule=Rule(type(optimizer)))
        self._ledger.open({"noise": self._facts.noise, "sampling": self._facts.sampling, "method": repr(chosen)})
        expected_batch = rate * len(data_loader.dataset)  # type: ignore[arg-type]
        self._steps = PrivateSteps(
            Caller(module, chosen.grouping, _engine(engine)), optimizer, chosen,
            SampledGaussian(rate, noise_multiplier), expected_batch, loss_reduction, self._ledger, self._randomness,
        )  # fmt: skip
        if isinstance(loader, PrivateLoader):
            loader.on_part = self._steps.passes.enter
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

    def _private_steps(self) -> PrivateSteps:
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
    if method.clip.adaptive:
        wrong.append("clip")
    if not method.probe.one_question:
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


def _engine(name: str) -> Callable[[nn.Module, Loss, Layout], GradientEngine]:
    """Never recorded as a CUDA graph: what a user's call has beside its examples would be frozen in the recording."""
    return engine_by_name("unrecorded" if name == "bookkeeping" else name)


def _stand_in(outputs: Any, targets: Tensor) -> Tensor:
    """A loss that takes about as much memory as the user's, which is not known yet: as much as a cross-entropy."""
    leaves = tree_flatten(outputs)[0]
    return torch.stack([leaves[i].flatten(1).log_softmax(dim=1).square().sum() for i in floating(leaves)]).sum()


__all__ = ["BudgetSpent", "PrivacyEngine"]
