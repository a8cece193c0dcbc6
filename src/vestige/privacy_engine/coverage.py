"""Does everything that moves get noise? What the optimizer holds against what the release covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from vestige.layout import modules_of

FOREIGN = (
    "optimizer holds a parameter that is not the module's and would move without noise: make it from "
    "module.parameters(), once the module is as it will be trained"
)


def require_covered(module: nn.Module, optimizer: Optimizer) -> None:
    """Before training: the optimizer holds the module's trainable parameters, all of them and no others."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if _foreign(optimizer, trainable.values()):
        raise ValueError(FOREIGN)
    held = {id(p) for p in _held(optimizer)}
    for name, parameter in trainable.items():
        if id(parameter) not in held:
            raise ValueError(f"parameter {name!r} is trainable but not in the optimizer: add it, or freeze it")


def require_own(optimizer: Optimizer, own: Iterable[Tensor]) -> None:
    """Before a move: nothing that was added to the optimizer since would move."""
    if any(parameter.grad is not None for parameter in _foreign(optimizer, own)):
        raise ValueError(FOREIGN)


def require_noised(module: nn.Module, released: Mapping[str, Tensor]) -> None:
    """Before a pass: a parameter that has no place in the release would get its gradient, and move, without noise."""
    known = {id(parameter) for parameter in released.values()}
    held = (p for each in modules_of(module) for p in each._parameters.values() if p is not None and p.requires_grad)
    if all(id(parameter) in known for parameter in held):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"parameter {name!r} became trainable after make_private and would move without noise: let it "
                "require gradients when make_private is called, and freeze it afterwards"
            )


def _foreign(optimizer: Optimizer, own: Iterable[Tensor]) -> list[Tensor]:
    known = {id(parameter) for parameter in own}
    return [p for p in _held(optimizer) if id(p) not in known and p.requires_grad]


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
