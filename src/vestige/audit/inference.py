"""Can a model's members be recognized? Attacks on target and shadow models trained on random halves of a task.

A target is trained on one half. Shadow models come in pairs, on a random half and on the other one, so that every
example is in exactly half of them. All start from the task's initial weights, which are public.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from vestige import tasks
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import Array, check_confidence
from vestige.assumptions import PRICE_ALONE
from vestige.audit import membership
from vestige.audit.made_up_task import NAME, stand_in
from vestige.audit.membership import Success
from vestige.budget.spending import Budget, account_of
from vestige.layout import call_with
from vestige.mechanism.clipping import Loss
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.processes.torchrun import require_alone
from vestige.training.planning import DEFAULT_STEPS
from vestige.training.run import train

NON_PRIVATE = "non-private"
"""The name of training without privacy, for comparison: Adam on shuffled batches."""
ADAM_RATE = 1e-3
ATTACKS = {
    "loss": "a threshold on the loss, the same for all examples",
    "shadow": "a classifier of outputs, trained on shadow models",
    "lira": "likelihood ratio of each example, by shadow models with and without it",
    "lira-offline": "the same by the shadow models without it alone",
    "gradients": "white-box: a classifier of outputs and of gradient norms in the last two layers",
}
LAYERS = 2
"""How many of the last layers with weights a white-box attack looks into."""
NUMBERS = 1 << 26
"""Numbers in the gradients that are held at once."""

OnModels = Callable[[int], bool]
"""Called with the number of models trained; False ends the inference with the targets that are done."""


class Fitted(NamedTuple):
    """What a trained model cost, its steps, and how to train another on equally many rows."""

    epsilon: float | None
    steps: int
    again: Training


@dataclass(frozen=True)
class Training:
    """How the models are trained, with or without privacy; all of it public."""

    method: Method | None
    sample_rate: float
    steps: int | None
    lr: float | Literal["auto"] = "auto"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5

    def fit(self, task: tasks.Task, model: nn.Module, rows: Array, seed: int) -> Fitted:
        """Train a model in place on these rows of the task."""
        chosen = torch.from_numpy(rows)
        data = (task.train[0][chosen], task.train[1][chosen])
        if self.method is None:
            steps = DEFAULT_STEPS if self.steps is None else self.steps
            nonprivate_fit(model, task.loss, data, self.sample_rate, steps, self.lr, seed)
            return Fitted(None, steps, self)
        run = train(
            model,
            task.loss,
            data,
            method=self.method,
            sample_rate=self.sample_rate,
            steps=self.steps,
            delta=self.delta,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            lr=self.lr,
            validation_data=task.test,
            budget=False,
        )
        for _ in run:
            pass
        # The noise that epsilon affords is found once: it is the same for every half.
        calibrated = self.steps is not None and self.noise_multiplier is None and not run.method.gate.adaptive
        noise = run.plan.noise_multiplier
        again = replace(self, noise_multiplier=noise, epsilon=None) if calibrated else self
        return Fitted(run.guarantee().epsilon, run.state.step, again)


@dataclass(frozen=True)
class Observed:
    """What an attacker may look at of one model: who was in, outputs of all examples, and features of gradients."""

    members: Array
    logits: Array
    gradients: Array | None


@dataclass(frozen=True, kw_only=True)
class Inference:
    """The result of attacks on targets by shadow models."""

    task: str
    method: str
    epsilon: float | None
    """Of each model, at `delta`; None without privacy. All together have seen the examples many times."""
    delta: float | None
    examples: int
    shadows: int
    targets: int
    wanted: int
    steps: int
    """Of the model that took most."""
    sample_rate: float
    confidence: float
    nonprivate_accuracy_of_members: float
    nonprivate_accuracy_of_others: float
    attacks: dict[str, Success]
    seconds: float

    @property
    def nonprivate(self) -> bool:
        """Whether all this was computed, without noise, from examples that may be private."""
        return self.task != NAME

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "nonprivate": self.nonprivate, "assumptions": list(PRICE_ALONE)}


def infer_membership(
    method: Method | str = "dp-sgd",
    *,
    task: tasks.Task | str = "digits-mlp",
    attacks: Sequence[str] = tuple(ATTACKS),
    shadows: int = 16,
    targets: int = 5,
    examples: int = 1000,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    sample_rate: float = 0.05,
    steps: int | None = 100,
    lr: float | Literal["auto"] = "auto",
    confidence: float = 0.95,
    device: str = "cpu",
    seed: int = 0,
    data: str | None = None,
    budget: Budget = None,
    on_models: OnModels | None = None,
) -> Inference:
    """Train targets and shadow models on random halves of a task's first examples, and attack the targets.

    The shadow models are trained as the targets are: the attacker knows method, budget and data, all but who was in.
    `method="non-private"` trains with Adam, `lr` 0.001 unless it is given; `steps=None` takes as many steps as epsilon
    affords at the method's own noise. On data of your own this changes whom models are trained on: every row is in
    half of them, and the result is not private.

    >>> found = infer_membership("non-private", task="stand-in", attacks=["loss"], shadows=2, targets=2, examples=40)
    >>> 0 <= found.attacks["loss"].area.estimate <= 1
    True

    Formal guarantees: none. It bounds no epsilon, and an attack that fails may be a weak one.
    """
    require_alone("an audit")
    _check(attacks, shadows, targets, examples, confidence)
    private = method != NON_PRIVATE
    if private and epsilon is None and noise_multiplier is None:
        raise ValueError(f"epsilon=None: give epsilon or noise_multiplier, or method={NON_PRIVATE!r}")
    if not private and (epsilon is not None or noise_multiplier is not None):
        raise ValueError(f"method={NON_PRIVATE!r} adds no noise: leave epsilon and noise_multiplier out")
    chosen = make_method(method) if private and isinstance(method, str) else method
    training = Training(
        chosen if isinstance(chosen, Method) else None, sample_rate, steps, lr, epsilon, noise_multiplier, delta
    )
    if task == NAME and data is not None:
        raise ValueError(f"data={data!r} with task={NAME!r}, which makes its examples up: name the task of the data")
    if task != NAME and account_of(budget) is not None:
        raise ValueError(
            "budget: what membership inference finds is computed from the rows without noise, which no book can count: "
            "leave the book out (budget=False, VESTIGE_BUDGET unset), and keep the result to those who may see the rows"
        )
    if isinstance(task, str):
        task = stand_in(examples, seed) if task == NAME else tasks.load(task, data, seed)
    examples = 2 * (min(examples, len(task.train[1])) // 2)
    begin = time.perf_counter()
    halves = np.random.default_rng(seed)
    seen: list[Observed] = []
    fitted: list[Fitted] = []
    while len(seen) < shadows + targets:
        paired = len(seen) < shadows and len(seen) % 2 == 1
        members = ~seen[-1].members if paired else _half(examples, halves)
        model = copy.deepcopy(task.model).to(device)
        fitted.append(training.fit(task, model, np.flatnonzero(members), seed + len(seen)))
        training = fitted[-1].again
        seen.append(observe(task, model, members, gradients="gradients" in attacks))
        if on_models is not None and not on_models(len(seen)):
            break
    attacked = seen[shadows:]
    if not attacked:
        raise KeyboardInterrupt  # stopped before there was a target
    labels = task.train[1][:examples].numpy()
    right = [each.logits.argmax(axis=1) == labels for each in attacked]
    inside = [each.members for each in attacked]
    spent = [each.epsilon for each in fitted if each.epsilon is not None]
    return Inference(
        task=task.name,
        method=training.method.name if training.method else NON_PRIVATE,
        epsilon=max(spent) if spent else None,
        delta=delta if spent else None,
        examples=examples,
        shadows=shadows,
        targets=len(attacked),
        wanted=targets,
        steps=max(each.steps for each in fitted),
        sample_rate=sample_rate,
        confidence=confidence,
        nonprivate_accuracy_of_members=float(np.mean([a[b].mean() for a, b in zip(right, inside, strict=True)])),
        nonprivate_accuracy_of_others=float(np.mean([a[~b].mean() for a, b in zip(right, inside, strict=True)])),
        attacks={
            name: membership.success(scores_by(name, attacked, seen[:shadows], labels), inside, confidence)
            for name in attacks
        },
        seconds=round(time.perf_counter() - begin, 1),
    )


def scores_by(attack: str, targets: Sequence[Observed], shadows: Sequence[Observed], labels: Array) -> list[Array]:
    """What an attack thinks of every example, for each target."""
    if attack == "loss":
        return [-membership.losses(each.logits, labels) for each in targets]
    members = np.stack([each.members for each in shadows])
    if attack in ("lira", "lira-offline"):
        known = np.stack([membership.logit_confidence(each.logits, labels) for each in shadows])
        return [
            membership.lira(membership.logit_confidence(each.logits, labels), known, members, online=attack == "lira")
            for each in targets
        ]

    def features(of: Observed) -> Array:
        outputs = membership.output_features(of.logits, labels)
        if attack == "shadow":
            return outputs
        assert of.gradients is not None
        return np.column_stack([outputs, of.gradients])

    known = np.stack([features(each) for each in shadows])
    return [membership.by_shadow_models(features(each), known, members) for each in targets]


def observe(task: tasks.Task, model: nn.Module, members: Array, *, gradients: bool, batch: int = 1024) -> Observed:
    """What an attacker sees of a model on the task's examples: outputs and, white-box, norms of gradients."""
    device = next(model.parameters()).device
    model = model.eval()
    inputs, targets = (part[: len(members)] for part in task.train)
    with torch.no_grad():
        logits = torch.cat([model(each.to(device)).float().cpu() for each in inputs.split(batch)]).numpy()
    norms = nonprivate_gradient_norms(model, task.loss, inputs, targets) if gradients else None
    found = None if norms is None else np.log(norms.double().numpy() + 1e-12)
    return Observed(members, logits, found)


def nonprivate_gradient_norms(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layers: int = LAYERS
) -> Tensor:
    """The norm of every example's gradient in each parameter of the last layers with weights, [examples, parameters].

    It is what Nasr et al. (2019) feed a network with, reduced to norms.
    """
    owners = [
        name
        for name, module in model.named_modules()
        if any(p.requires_grad and p.ndim >= 2 for p in module.parameters(recurse=False))
    ]
    named = dict(model.named_parameters())
    last = {name: named[name].detach() for name in named if name.rpartition(".")[0] in owners[-layers:]}
    rest = {name: value.detach() for name, value in (*named.items(), *model.named_buffers()) if name not in last}
    device = next(iter(named.values())).device

    def of_one(parameters: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        return loss(call_with(model, {**rest, **parameters}, (example[None],)), target[None])

    every = vmap(grad(of_one), in_dims=(None, 0, 0))
    batch = max(1, min(256, NUMBERS // sum(value.numel() for value in last.values())))
    found = []
    for some, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
        gradients = every(last, some.to(device), wanted.to(device))
        found.append(torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()], dim=1).cpu())
    return torch.cat(found)


def nonprivate_fit(
    model: nn.Module,
    loss: Loss,
    data: tuple[Tensor, Tensor],
    sample_rate: float,
    steps: int,
    lr: float | Literal["auto"] = "auto",
    seed: int = 0,
) -> None:
    """Train a model in place as people do without privacy: Adam, in batches of shuffled epochs."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in data)
    batch, random = max(1, round(sample_rate * len(targets))), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=ADAM_RATE if lr == "auto" else lr)
    model.train()
    order: list[Tensor] = []
    for _ in range(steps):
        order = order or list(torch.randperm(len(targets), generator=random).split(batch))
        rows = order.pop(0).to(device)
        optimizer.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()


def _half(examples: int, random: np.random.Generator) -> Array:
    members = np.zeros(examples, dtype=bool)
    members[random.permutation(examples)[: examples // 2]] = True
    return members


def _check(attacks: Sequence[str], shadows: int, targets: int, examples: int, confidence: float) -> None:
    check_confidence(confidence)
    for name in attacks:
        if name not in ATTACKS:
            raise ValueError(f"membership={name!r} is unknown; choose from {', '.join(ATTACKS)}, or all")
    if not attacks:
        raise ValueError(f"attacks={attacks!r} names none; choose from {', '.join(ATTACKS)}")
    least = 4 if {"lira", "lira-offline"} & set(attacks) else 2
    if shadows % 2 or shadows < least:
        raise ValueError(f"shadows={shadows} must be even, and {least} at least: they are trained in pairs")
    if targets < 1:
        raise ValueError(f"targets={targets} must be 1 at least: they are what is attacked")
    if examples < 8:
        raise ValueError(f"examples={examples} must be 8 at least: half of them are members")
