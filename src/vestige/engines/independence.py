"""Does each example have a gradient of its own? Layers that mix examples, and weights that leave none, are refused by
name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    """Whether the layer is a norm of torch's own in what it computes, with plain parameters, or followed by layers.

    A subclass with a forward pass of its own may compute more; a parametrised or pruned weight is no parameter.
    """
    if not isinstance(module, Norm) or module._parameters.keys() != {"weight", "bias"}:
        return False
    return getattr(module.forward, "__func__", None) in FORWARDS or followed(module)


def followed(module: nn.Module) -> TypeGuard[Norm]:
    """Whether a batch norm with a forward pass of its own is torch's, then its own layers one after the other (timm's
    with an activation): tried out on made-up numbers, at rest and in training."""
    if not isinstance(module, BatchNorm) or "forward" in vars(module) or not module.num_features:
        return False
    if not any(True for _ in module.children()) or getattr(module.forward, "__func__", None) in FORWARDS:
        return False
    size = (4,) * (3 if isinstance(module, nn.BatchNorm3d) else 0 if isinstance(module, nn.BatchNorm1d) else 2)
    try:
        made = copy.deepcopy(module).cpu().float()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            input = torch.randn(5, module.num_features, *size)
            for training in (False, True):
                made.train(training)
                mean, variance = (None, None) if training else (made.running_mean, made.running_var)
                normed = F.batch_norm(
                    input, mean, variance, made.weight, made.bias, training or mean is None, eps=made.eps
                )
                torch.manual_seed(0)
                for layer in made.children():
                    normed = layer(normed)
                torch.manual_seed(0)
                if not torch.allclose(made.forward(input.clone()), normed, rtol=1e-4, atol=1e-5):
                    return False
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # whatever it is, it is not that
        return False
    return True


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
    for module in modules_of(model) if modules is None else modules:
        if refused(module):
            where, what = mixing(model)[0]
            raise ValueError(f"{where} {what}")
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            name = next(name for name, each in model.named_modules() if each is module)
            raise ValueError(
                f"layer {name!r} was made by torch.jit, where its weights cannot be followed: give the module that it "
                "was made of (torch.jit.script afterwards, of the trained model)"
            )


def broken(model: nn.Module) -> list[tuple[str, str]]:
    """Parameters that no example has a gradient of, each with why and the way out."""
    each = ((name, _unusable(parameter)) for name, parameter in model.named_parameters())
    return [(f"parameter {name!r}", what) for name, what in each if what is not None]


def require_finite(model: nn.Module) -> None:
    """Before the first step; what training makes of weights is not looked at."""
    for where, what in broken(model):
        raise ValueError(f"{where} {what}")


def _unusable(parameter: Tensor) -> str | None:
    if is_lazy(parameter):
        return "has no shape yet: call the model on an input that is nobody's before it is trained"
    values = parameter.detach()
    if type(values) is not Tensor or values.is_meta or not (values.is_floating_point() and values.numel()):
        return None  # parts that several processes have among them, and numbers that cannot be odd
    if torch.stack(torch.aminmax(values)).isfinite().all():
        return None
    return "holds numbers that are not finite, so no example has a gradient: initialise it, or load it again"
