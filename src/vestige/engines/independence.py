"""Does each example have a gradient of its own? Layers that mix examples, and weights that leave none, are refused by
name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from vestige.layout import modules_of

Norm = nn.modules.batchnorm._NormBase
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm

FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward, InstanceNorm.forward)


def refused(module: nn.Module) -> bool:
    """Whether the layer mixes the examples of a batch, or remembers them, in its present mode."""
    if not isinstance(module, Norm):
        return False
    if isinstance(module, BatchNorm):
        return module.training or not module.track_running_stats
    return isinstance(module, InstanceNorm) and module.training and module.track_running_stats


def replaceable(module: nn.Module) -> TypeGuard[Norm]:
    """Whether the layer is a norm of torch's own in what it computes, with plain parameters.

    A subclass with a forward pass of its own may compute more; a parametrised or pruned weight is no parameter.
    """
    if not isinstance(module, Norm) or getattr(module.forward, "__func__", None) not in FORWARDS:
        return False
    return module._parameters.keys() == {"weight", "bias"}


def mixing(model: nn.Module) -> list[tuple[str, str]]:
    """Layers whose output for one example depends on the others, each with what it does and the way out."""
    return [
        (f"layer {name!r} ({type(module).__name__})", _fault(module))
        for name, module in model.named_modules()
        if refused(module)
    ]


def _fault(module: nn.Module) -> str:
    call = "call model = vestige.fix(model), or " if replaceable(module) else ""
    if isinstance(module, InstanceNorm):
        return f"keeps running statistics of un-noised data: {call}build it with track_running_stats=False"
    return (
        f"mixes the examples of a batch, so no example's influence can be bounded: {call}replace it by nn.GroupNorm, "
        f"or freeze it with .eval() and requires_grad_(False)"
    )


def require_independent(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> None:
    """`modules` are the model's, where they are known already."""
    if any(map(refused, modules_of(model) if modules is None else modules)):
        where, what = next(iter(mixing(model)))
        raise ValueError(f"{where} {what}")


def broken(model: nn.Module) -> list[tuple[str, str]]:
    """Parameters that hold a number which is not finite, each with what that does and the way out."""
    return [
        (
            f"parameter {name!r}",
            "holds numbers that are not finite, so no example has a gradient: initialise it, or load it again",
        )
        for name, parameter in model.named_parameters()
        if _broken(parameter.detach())
    ]


def require_finite(model: nn.Module) -> None:
    """Before the first step; what training makes of weights is not looked at."""
    for where, what in broken(model):
        raise ValueError(f"{where} {what}")


def _broken(values: Tensor) -> bool:
    if type(values) is not Tensor or values.is_meta or not (values.is_floating_point() and values.numel()):
        return False  # parts that several processes have among them, and numbers that cannot be odd
    return not bool(torch.stack(torch.aminmax(values)).isfinite().all())
