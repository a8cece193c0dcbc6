"""Does every layer with a rule give each example's own gradient, for every shape, option and clip?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine_checks import Out, clips, property_test, run, sizes, targets
from vestige.engines.per_example import kernels
from vestige.mechanism.clipping import Flat


@property_test
@given(sizes, st.lists(st.integers(1, 6), max_size=3), st.integers(1, 7), st.integers(1, 7), st.booleans(), clips)
def test_linear_of_any_rank(examples, axes, width, out, bias, clip):
    torch.manual_seed(0)
    axes = tuple(axes)
    model = Out(nn.Linear(width, out, bias=bias), width=torch.Size(axes).numel() * out)
    run(model, (torch.randn(examples, *axes, width), targets(examples)), clip)


@property_test
@given(sizes, st.integers(2, 40), st.integers(1, 30), st.integers(1, 30))
def test_linear_over_long_and_short_sequences(examples, positions, width, out):
    """Both ways to a norm: from inner products, and from gradients."""
    torch.manual_seed(1)
    model = Out(nn.Linear(width, out), nn.Tanh(), nn.Linear(out, 3), width=3 * positions)
    run(model, (torch.randn(examples, positions, width), targets(examples)), None)


@property_test
@given(st.data())
def test_convolutions(data):
    torch.manual_seed(2)
    rank = data.draw(st.integers(1, 3))
    examples, groups = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))
    channels, outputs = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 4))

    def per_axis(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    kernel, dilation, stride = per_axis(1, 3), per_axis(1, 2), per_axis(1, 3)
    padding = data.draw(st.sampled_from(["same", "valid", per_axis(0, 2)]))
    if padding == "same":
        stride = (1,) * rank
    mode = data.draw(st.sampled_from(["zeros", "circular", "replicate"])) if padding != "valid" else "zeros"
    extra = per_axis(2, 5 if rank < 3 else 3)
    space = tuple(d * (k - 1) + 1 + more for k, d, more in zip(kernel, dilation, extra, strict=True))
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](
        channels, outputs, kernel, stride, padding, dilation, groups, data.draw(st.booleans()), mode
    )
    width = layer(torch.zeros(1, channels, *space)).numel()
    run(Out(layer, width=width), (torch.randn(examples, channels, *space), targets(examples)), data.draw(clips))


@property_test
@given(sizes, st.lists(st.integers(1, 6), max_size=2), st.booleans(), clips)
def test_embedding(examples, axes, padded, clip):
    torch.manual_seed(4)
    axes = tuple(axes)
    model = Out(nn.Embedding(5, 4, padding_idx=1 if padded else None), width=4 * torch.Size(axes).numel())
    run(model, (torch.randint(0, 5, (examples, *axes)), targets(examples)), clip)


@property_test
@given(sizes, st.lists(st.integers(1, 5), max_size=2), st.sampled_from(["layer", "layer2", "rms", "nobias"]), clips)
def test_layer_norms(examples, axes, kind, clip):
    torch.manual_seed(5)
    shape = (*axes, 3, 4)
    layer = {
        "layer": lambda: nn.LayerNorm(4),
        "layer2": lambda: nn.LayerNorm((3, 4)),
        "rms": lambda: nn.RMSNorm(4),
        "nobias": lambda: nn.LayerNorm(4, bias=False),
    }[kind]()
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn_like(layer.weight))
    run(Out(layer, width=torch.Size(shape).numel()), (torch.randn(examples, *shape) + 1, targets(examples)), clip)


@property_test
@given(sizes, st.integers(0, 3), st.sampled_from(["group", "one", "instance"]), clips)
def test_group_and_instance_norms(examples, rank, kind, clip):
    torch.manual_seed(6)
    rank = max(1, rank) if kind == "instance" else rank  # one number per channel is nothing to normalise
    layer = {
        "group": lambda: nn.GroupNorm(2, 4),
        "one": lambda: nn.GroupNorm(1, 4),
        "instance": lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1](4, affine=True),
    }[kind]()
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(4))
    shape = (4, *[3] * rank)
    run(Out(layer, width=4 * 3**rank), (torch.randn(examples, *shape) + 1, targets(examples)), clip)


def plain_group_norm_backward(input, signal, mean, scale, weight, groups):
    """What the fused kernel computes, in torch."""
    rows, channels, *space = input.shape
    shape = (rows, groups, channels // groups, -1)
    standard = (input.reshape(shape) - mean.view(rows, groups, 1, 1)) * scale.view(rows, groups, 1, 1)
    coming = signal.reshape(shape)
    gain = weight.view(1, groups, -1, 1)
    inner = gain * coming
    back = inner - inner.mean(dim=(2, 3), keepdim=True) - standard * (inner * standard).mean(dim=(2, 3), keepdim=True)
    sums = ((coming * standard).sum(dim=3), coming.sum(dim=3))
    return (scale.view(rows, groups, 1, 1) * back).view_as(input), *(each.reshape(rows, channels) for each in sums)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("affine", ["weight and bias", "weight"])
def test_a_fused_group_norm_passes_back_what_torch_passes_back(monkeypatch, several, affine):
    monkeypatch.setattr(kernels, "can_fuse_group_norm", lambda input, groups: True)
    calls = []

    def kernel(*tensors):
        calls.append(1)
        return plain_group_norm_backward(*tensors)

    monkeypatch.setattr(kernels, "group_norm_backward", kernel)
    torch.manual_seed(7)
    layer = nn.GroupNorm(2, 4)
    layer.bias.requires_grad_(affine == "weight and bias")
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(4))
    folded = [nn.Flatten(0, 1), nn.Conv2d(4, 4, 2), layer, nn.Unflatten(0, (-1, 2)), nn.Flatten()]
    plain = [nn.Conv2d(4, 4, 2), layer, nn.Flatten()]
    model = nn.Sequential(*(folded if several else plain), nn.Linear(4 * 4 * (2 if several else 1), 2))
    inputs = torch.randn(5, *([2] if several else []), 4, 3, 3)
    run(model, (inputs, targets(5)), Flat(0.5))
    assert calls
