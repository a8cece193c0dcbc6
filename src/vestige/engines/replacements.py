"""What takes the place of a layer that cannot be trained privately? `vestige.fix`, and what it would change."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from vestige.engines.independence import BatchNorm, InstanceNorm, Norm, followed, refused, replaceable

MOST_GROUPS = 32

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
OF_BATCH_NORM = (*STATISTICS, "num_features", "momentum", "track_running_stats", "process_group")
"""What a batch norm holds and a group norm does not."""


class GroupNormAndLayers(nn.GroupNorm):
    """A group norm, and after it the layers it has inside, such as an activation."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        for layer in self.children():
            output = layer(output)
        return output


M = TypeVar("M", bound=nn.Module)


def fix(model: M) -> M:
    """Replace, in place, the layers that cannot be trained privately and have a counterpart that can; returns `model`.

    BatchNorm becomes GroupNorm. Its number of groups is the largest divisor of the channels that is at most 32 and
    leaves at least four channels to a group; after BatchNorm1d it is one, because a channel may be a single number
    there, and groups of one or two numbers would be normalised to constants. SyncBatchNorm is taken for a norm of
    images. Layers that a batch norm has inside and calls after it, as timm's do an activation, stay. InstanceNorm stops
    tracking statistics.

    A layer frozen by `.eval()` and `requires_grad_(False)` is left alone. So is any other subclass with a forward pass
    of its own, or a parametrised weight: it stays refused by name.

    Weights and biases stay the parameters they were: tied ones tied, frozen ones frozen, and an optimizer that was made
    before still holds them. Running statistics are dropped: they were computed from data without noise. A GroupNorm is
    another function than the BatchNorm was, so a pretrained model has to be trained further; to keep what a layer
    computes, freeze it instead. `vestige.engines.replacements.replacements(model)` says beforehand what will change.
    """
    for module in _to_replace(model).values():
        if isinstance(module, BatchNorm):
            _become_group_norm(module)
        else:
            _forget_statistics(module)
    return model


def replacements(model: nn.Module) -> list[str]:
    """What `fix` would change in `model`, one line for each layer."""
    return [
        f"layer {name!r} ({type(module).__name__}): {_becomes(module)}" for name, module in _to_replace(model).items()
    ]


def _to_replace(model: nn.Module) -> dict[str, Norm]:
    """The layers to replace by name, each once, however many places it has."""
    found = {name: module for name, module in model.named_modules() if replaceable(module) and _faulty(module)}
    for name, module in found.items():
        if not module.num_features:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) does not know its channels yet: run the model once on "
                "made-up inputs before vestige.fix(model), or build the layer with their number"
            )
    return found


def _faulty(module: Norm) -> bool:
    """Whether the layer is refused, or would be in training mode and is not frozen."""
    if isinstance(module, InstanceNorm) and not module.track_running_stats:
        return False
    return refused(module) or any(parameter.requires_grad for parameter in module.parameters())


def _becomes(module: Norm) -> str:
    if isinstance(module, InstanceNorm):
        return "its running statistics are dropped, and none are kept"
    then = ", and what followed it inside stays" if followed(module) else ""
    return f"nn.GroupNorm({_groups(module)}, {module.num_features}) takes its place{then}"


def _groups(module: Norm) -> int:
    if isinstance(module, nn.BatchNorm1d):  # a channel may be a single number, as after a linear layer
        return 1
    most = max(1, min(MOST_GROUPS, module.num_features // 4))
    return max(groups for groups in range(1, most + 1) if module.num_features % groups == 0)


def _become_group_norm(module: Norm) -> None:
    """As torch's lazy layers become others: references to the layer and its hooks stay valid."""
    groups, channels = _groups(module), module.num_features
    becomes = GroupNormAndLayers if followed(module) else nn.GroupNorm
    for name in OF_BATCH_NORM:
        if hasattr(module, name):
            delattr(module, name)
    norm: nn.Module = module
    norm.__class__ = becomes
    vars(norm).update(num_groups=groups, num_channels=channels)


def _forget_statistics(module: Norm) -> None:
    module.track_running_stats = False
    for name in STATISTICS:
        setattr(module, name, None)
