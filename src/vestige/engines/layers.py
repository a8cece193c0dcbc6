"""Which form do the gradients of a layer take? One rule per type of layer, from what it saved and what came back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.engines import kernels
from vestige.engines.gradients import Dense, Geometry, Gradient, Lookup, Outer, Patches, wide

Uses = dict[str, Gradient]
Saved = tuple[Tensor, ...]


def linear(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    left = signal.reshape(examples, -1, signal.shape[-1]).contiguous()  # once, for norms and sums
    uses: Uses = {}
    if "weight" in wanted:
        outer = Outer(left, saved[0].reshape(examples, -1, saved[0].shape[-1]))
        uses["weight"] = Dense(outer.dense()) if _worth_materialising(outer) else outer
    if "bias" in wanted:
        uses["bias"] = Dense(left[:, 0] if left.shape[1] == 1 else wide(left).sum(dim=1))
    return uses


def _worth_materialising(outer: Outer) -> bool:
    """Per-example gradients no larger than what is saved anyway cost least in both time and memory: with T positions,
    T*out*in multiplications in all, against as many for the sum alone and T*T*(out+in) more for the ghost norm."""
    positions, out, width = outer.left.shape[1], outer.left.shape[2], outer.right.shape[2]
    return positions > 1 and out * width <= positions * (out + width)


def convolution(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    uses: Uses = {}
    if "weight" in wanted:
        patches = _patches(module, saved[0], signal)
        several = len(signal) != examples  # the model folded another axis into the batch axis
        if several or 4 * prod(patches.shape) * examples <= 5 * (saved[0].numel() + signal.numel()):
            uses["weight"] = Dense(patches.dense().view(examples, -1, *patches.shape).sum(dim=1))
        else:
            uses["weight"] = patches
    if "bias" in wanted:
        uses["bias"] = Dense(wide(signal).flatten(2).sum(dim=2).view(examples, -1, signal.shape[1]).sum(dim=1))
    return uses


def _patches(module: Any, image: Tensor, signal: Tensor) -> Patches:
    if module.padding_mode != "zeros":
        image = F.pad(image, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = (0,) * len(module.kernel_size)
    elif module.padding == "same":
        image = F.pad(image, module._reversed_padding_repeated_twice)  # may be uneven
        padding = (0,) * len(module.kernel_size)
    else:
        padding = (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding
    return Patches(image, signal, Geometry(module.kernel_size, module.stride, padding, module.dilation, module.groups))


def embedding(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    index = saved[0].reshape(examples, -1)
    rows = signal.reshape(examples, -1, signal.shape[-1])
    if module.padding_idx is not None:
        rows = rows.masked_fill((index == module.padding_idx)[:, :, None], 0.0)
    return {"weight": Lookup(index, rows, module.num_embeddings)}


def layer_norm(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    width = prod(module.normalized_shape)
    signal = signal.reshape(examples, -1, width)
    if "weight" not in wanted:
        return {"bias": Dense(wide(signal).sum(dim=1).view(examples, *module.normalized_shape))}
    weights, biases = kernels.layer_norm_sums(saved[0].reshape(examples, -1, width), signal, *saved[1:])
    found = {"weight": weights, "bias": biases}
    return {name: Dense(found[name].view(examples, *module.normalized_shape)) for name in wanted}


def run_layer_norm(module: Any, input: Tensor) -> tuple[Tensor, Saved]:
    """The layer itself, keeping the means and scales that its gradient needs."""
    input = wide(input)
    output, *statistics = torch.native_layer_norm(
        input, module.normalized_shape, module.weight, module.bias, module.eps
    )
    return output, (input, *statistics)


def rms_norm(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    standard = F.rms_norm(wide(saved[0]), module.normalized_shape, eps=module.eps)
    return {"weight": Dense((standard * signal).view(examples, -1, *module.normalized_shape).sum(dim=1))}


def group_norm(module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int) -> Uses:
    """With the batch axis folded into the channels, torch's own backward gives one gradient per example."""
    signal = wide(signal).contiguous()
    channels, size = signal.shape[1], signal.shape[2:].numel()
    uses: Uses = {}
    if "weight" in wanted:
        input, mean, scale = saved
        folded, ones = len(signal) * channels, input.new_ones(len(signal) * channels)
        shape = (1, folded, size)
        tensors = (signal.view(shape), input.view(shape), mean.view(1, -1), scale.view(1, -1), ones)
        sizes = (1, folded, size, mean.numel())
        weight = torch.ops.aten.native_group_norm_backward(*tensors, *sizes, [False, True, False])[1]
        uses["weight"] = Dense(weight.view(examples, -1, channels).sum(dim=1))
    if "bias" in wanted:
        uses["bias"] = Dense(signal.flatten(2).sum(dim=2).view(examples, -1, channels).sum(dim=1))
    return uses


def run_group_norm(module: Any, input: Tensor) -> tuple[Tensor, Saved]:
    """The layer itself, keeping the means and scales that its gradient needs."""
    input = wide(input).contiguous()
    examples, channels, *space = input.shape
    sizes = (examples, channels, prod(space), _groups(module, input), module.eps)
    output, mean, scale = torch.native_group_norm(input, module.weight, module.bias, *sizes)
    return output, (input, mean, scale)


def whole_group_norm(
    module: Any, wanted: Collection[str], saved: Saved, signal: Tensor, examples: int
) -> tuple[Tensor, Uses]:
    """Both at once, where there is a kernel for it: what the layer passes back, and its own gradients."""
    input, mean, scale = saved
    weight = None if module.weight is None else module.weight.detach()
    groups = _groups(module, input)
    back, weights, biases = kernels.group_norm_backward(input, wide(signal), mean, scale, weight, groups)
    rows = {"weight": weights, "bias": biases}
    return back, {name: Dense(rows[name].view(examples, -1, signal.shape[1]).sum(dim=1)) for name in wanted}


def _groups(module: Any, input: Tensor) -> int:
    return int(module.num_groups) if isinstance(module, nn.GroupNorm) else input.shape[1]


def _fuses_group_norm(module: Any, input: Tensor) -> bool:
    return input.dim() > 2 and kernels.can_fuse_group_norm(wide(input), _groups(module, input))


@dataclass(frozen=True)
class LayerRule:
    """How one type of layer is taken apart: its gradients, the variants that covers, and how to run it if not as is.

    Where `fuses`, one kernel does the layer's whole way back: `whole` returns the gradient of its input, too.
    """

    gradients: Callable[[Any, Collection[str], Saved, Tensor, int], Uses]
    accepts: Callable[[Any], bool] = lambda module: True
    run: Callable[[Any, Tensor], tuple[Tensor, Saved]] | None = None
    whole: Callable[[Any, Collection[str], Saved, Tensor, int], tuple[Tensor, Uses]] | None = None
    fuses: Callable[[Any, Tensor], bool] = lambda module, input: False


_GROUP_NORM = LayerRule(group_norm, run=run_group_norm, whole=whole_group_norm, fuses=_fuses_group_norm)
_INSTANCE_NORM = replace(_GROUP_NORM, accepts=lambda module: not module.track_running_stats)

LAYERS: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LayerRule(linear),
    nn.Conv1d: LayerRule(convolution),
    nn.Conv2d: LayerRule(convolution),
    nn.Conv3d: LayerRule(convolution),
    nn.Embedding: LayerRule(embedding, lambda module: module.max_norm is None and not module.scale_grad_by_freq),
    nn.LayerNorm: LayerRule(layer_norm, run=run_layer_norm),
    nn.RMSNorm: LayerRule(rms_norm),
    nn.GroupNorm: _GROUP_NORM,
    nn.InstanceNorm1d: _INSTANCE_NORM,
    nn.InstanceNorm2d: _INSTANCE_NORM,
    nn.InstanceNorm3d: _INSTANCE_NORM,
}


def layer_of(module: nn.Module) -> LayerRule | None:
    """The rule for a module, if it runs the forward that the rule describes and holds no other parameters."""
    found = next((kind for kind in type(module).__mro__ if kind in LAYERS), None)
    if found is None or type(module).forward is not found.forward or "forward" in vars(module):
        return None
    known = set(module._parameters) <= {"weight", "bias"}
    return LAYERS[found] if known and LAYERS[found].accepts(module) else None
