"""Does everything that moves get noise, and does what gets noise move? What the optimizer holds, against the release.

An optimizer that holds other tensors than the model's, as after a model was moved or adapters were put in, trains
nothing while losses and epsilon look normal. So the first step is checked: what was released must have moved, and
what is frozen must be as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from vestige.engines.example_axis.labels import Labels
from vestige.layout import modules_of

FOREIGN = (
    "optimizer holds a parameter that is not the module's and would move without noise: make it from "
    "module.parameters(), once the module is as it will be trained"
)
GATHERED = (
    "optimizer holds tensors that are no parameters of the sharded module: they are older than fully_shard, or were "
    "gathered by a pass in eval mode. Call fully_shard, after any pass module.reshard(), and only then make the "
    "optimizer from module.parameters()"
)


def require_covered(module: nn.Module, optimizer: Optimizer) -> None:
    """Before training: the optimizer steps by one gradient, and holds the module's trainable parameters, all of them
    and no others."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            f"optimizer: a step of {type(optimizer).__name__} calls its closure for several gradients of one batch, "
            "and each would be a release of its own. Take one that steps by one gradient, as torch.optim.SGD or AdamW"
        )
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    known = set(map(id, trainable.values()))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if id(parameter) not in known and parameter.requires_grad]
    if foreign and any(map(_divided, trainable.values())) and not all(map(_divided, foreign)):
        raise ValueError(GATHERED)
    if foreign:
        raise ValueError(FOREIGN)
    moved = set(map(id, held))
    for name, parameter in trainable.items():
        if id(parameter) not in moved:
            raise ValueError(f"parameter {name!r} is trainable but not in the optimizer: add it, or freeze it")


def require_inner_hooks(module: nn.Module) -> None:
    """Refuse a module whose weights its own hooks compute: they run before the pass that is followed. Those of inner
    modules run inside it."""
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ in ("SpectralNorm", "WeightNorm"):
            raise ValueError(
                f"module: torch.nn.utils.{'spectral' if 'Spec' in type(hook).__name__ else 'weight'}_norm computes its "
                "weight in a hook that runs before the private pass: use the function of that name in "
                "torch.nn.utils.parametrizations, which computes the same, or put the module into an nn.Sequential"
            )


def require_noised(module: nn.Module, released: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
    """Before a pass: a parameter that has no place in the release would get its gradient, and move, without noise.
    `modules` are the module's own and inner ones."""
    known = set(map(id, released.values()))
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                name = next(name for name, one in module.named_parameters() if one is parameter)
                raise ValueError(
                    f"parameter {name!r} became trainable after make_private and would move without noise: let it "
                    "require gradients when make_private is called (get_peft_model comes before), and freeze it "
                    "afterwards"
                )


def require_public(labels: Labels, module: nn.Module, optimizer: Optimizer) -> None:
    """Before and after a step: nothing of an example may be in a parameter, a buffer, or what the optimizer holds: no
    noise would cover it."""
    holders = [each for inner in modules_of(module) for each in (inner._parameters, inner._buffers)]
    if not any(labels.any_of(holder.values()) for holder in (*holders, vars(optimizer))):  # groups and state included
        return
    named: list[tuple[str, str, object]] = [("parameter", *each) for each in module.named_parameters()]
    named += [("buffer", *each) for each in module.named_buffers()]
    inside = (*optimizer.param_groups, *optimizer.state.values(), vars(optimizer))
    named += [("the optimizer's", *each) for held in inside for each in held.items()]
    kind, name = next((kind, name) for kind, name, value in named if labels.any_of((value,)))
    raise ValueError(
        f"{kind} {name!r} holds something of the examples, which no noise covers: compute it from releases (weights, "
        "epsilon), from the number of the step, or from public data"
    )


def follows(optimizer: Optimizer) -> bool:
    """Whether code of the user's runs as an optimizer steps: hooks, or an optimizer that is not torch's or ours."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # type: ignore[attr-defined]
    everywhere = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    own = not type(optimizer).__module__.startswith(("torch.optim.", "vestige."))
    return own or any(map(bool, (*hooks, *everywhere)))


def _divided(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")


FELT = 1e-6
"""Updates smaller than this, next to the parameter, may be lost to rounding."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate of a group of parameters; not a number where the optimizer makes its own."""
    rate = group.get("lr", 1.0)
    return math.nan if rate is None else float(rate)


class FirstMove:
    """What a module was before its first step, and what the step was to move."""

    def __init__(self, module: nn.Module, released: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """`released` has the gradient of every parameter, by its name; of a sharded one, of this process's rows."""
        parameters = dict(module.named_parameters())
        rates = {id(p): _rate(group) for group in optimizer.param_groups for p in group["params"]}
        self._frozen = {name: (p, _digest(_here(p))) for name, p in parameters.items() if not p.requires_grad}
        self._moving = {
            name: (parameters[name], _here(parameters[name]).clone())
            for name, gradient in released.items()
            if parameters[name].requires_grad
            and gradient.numel()  # of a sharded module a process may have no rows
            and _felt(_here(parameters[name]), gradient, rates.get(id(parameters[name])))
        }

    @staticmethod
    def due(optimizer: Optimizer) -> bool:
        """Whether anything is to move at all: a schedule may begin with a rate of zero."""
        return any(_rate(group) != 0 for group in optimizer.param_groups)

    def check(self) -> None:
        """After the step. Raises ValueError with the name of a parameter that is not as it should be."""
        for name, (parameter, before) in self._moving.items():
            if torch.equal(_here(parameter), before):
                raise ValueError(
                    f"parameter {name!r} did not move in the first step, although its gradient is not zero: the "
                    "optimizer holds another tensor in its place, or leaves it out. Make the optimizer when the model "
                    "is as it will be trained: adapters put in, on its device, in its precision"
                )
        for name, (parameter, digest) in self._frozen.items():
            if _digest(_here(parameter)) != digest:
                raise ValueError(
                    f"parameter {name!r} is frozen, but the first step changed it: something else than a private "
                    "release wrote to it, and no noise covers that"
                )


def _here(parameter: Tensor) -> Tensor:
    """The parameter, or this process's rows of it."""
    with torch.no_grad():
        return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def _felt(parameter: Tensor, gradient: Tensor, rate: float | None) -> bool:
    """Whether a step at this rate must be seen in a parameter; None is the rate of one that the optimizer has not."""
    largest = float(gradient.abs().max())
    if rate is None:
        return largest > 0
    return rate * largest > FELT * float(parameter.detach().abs().max())


def _digest(tensor: Tensor) -> tuple[int, int]:
    """The address and a checksum, which a single changed bit changes, at the cost of a sum."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        return tensor.data_ptr(), int(flat.view(BITS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64))
