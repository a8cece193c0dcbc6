"""Does each example have a gradient of its own? Layers that mix examples are refused by name."""

from __future__ import annotations

from torch import nn

MIXING = (nn.modules.batchnorm._BatchNorm,)


def mixing_layers(model: nn.Module) -> list[str]:
    """Layers whose output for one example depends on the others, each with the way out."""
    found = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MIXING) and (module.training or not module.track_running_stats):
            found.append(
                f"layer {name!r} ({kind}) mixes the examples of a batch, so no example's influence can be bounded: "
                f"replace it by nn.GroupNorm, or freeze it with .eval() and requires_grad_(False)"
            )
        elif (
            isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats and module.training
        ):
            found.append(
                f"layer {name!r} ({kind}) keeps running statistics of un-noised data: "
                f"build it with track_running_stats=False"
            )
    return found


def require_independent(model: nn.Module) -> None:
    found = mixing_layers(model)
    if found:
        raise ValueError(found[0])
