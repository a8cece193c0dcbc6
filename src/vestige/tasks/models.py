"""Which networks can be trained privately? Small ones that never mix examples: no BatchNorm, nothing in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (64, 32)) -> nn.Sequential:
    """The tanh classifier of the FO-DP-SGD paper, on flat inputs."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise((inputs, *hidden)):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))


def cnn(channels: int, size: int, classes: int, widths: Sequence[int] = (32, 64, 64)) -> nn.Sequential:
    """A small convolutional network: each width is a 3x3 convolution, GroupNorm, tanh and a pooling that halves."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise((channels, *widths)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.GroupNorm(8, fan_out), nn.Tanh(), nn.MaxPool2d(2)]
        size //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear((channels, *widths)[-1] * size * size, classes))


# --- DPSGD-TS (Papernot et al. 2021) ----------------------------------------------------------------------------------
# Their tempered sigmoid s / (1 + exp(-T x)) - o at its best, (s, T, o) = (2, 2, 1), is tanh.


def tanh_cnn_28(classes: int) -> nn.Sequential:
    """The network of DPSGD-TS for 28x28 grey images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def tanh_cnn_32(classes: int) -> nn.Sequential:
    """The network of DPSGD-TS for 32x32 colour images."""
    layers: list[nn.Module] = []
    for fan_in, width in pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(fan_in, width, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, classes))


# --- DPSGD-HF (Tramer and Boneh 2021): heads on scattering features [channels, size, size] ----------------------------


def scattering_linear(channels: int, size: int, classes: int, normalise: nn.Module | None = None) -> nn.Sequential:
    """A linear classifier of normalised scattering features."""
    return nn.Sequential(
        normalise or scattering_norm(channels), nn.Flatten(), nn.Linear(channels * size * size, classes)
    )


def scattering_cnn_7(channels: int, classes: int, normalise: nn.Module | None = None) -> nn.Sequential:
    """Their CNN on the 7x7 scattering features of 28x28 images."""
    return nn.Sequential(
        normalise or scattering_norm(channels),
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def scattering_cnn_8(channels: int, classes: int, normalise: nn.Module | None = None) -> nn.Sequential:
    """Their CNN on the 8x8 scattering features of 32x32 images."""
    return nn.Sequential(
        normalise or scattering_norm(channels),
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, classes),
    )


def scattering_projected(channels: int, size: int, classes: int) -> nn.Sequential:
    """The same for least squares: features are projected to few dimensions and to length 1, and there is no bias."""
    narrow = Projection(channels * size * size, NARROW)
    return nn.Sequential(
        scattering_norm(channels), nn.Flatten(), narrow, Unit(), nn.Linear(NARROW, classes, bias=False)
    )


def scattering_norm(channels: int, groups: int = 27) -> nn.GroupNorm:
    """The normalisation that asks the data nothing: each example by itself, without parameters."""
    return nn.GroupNorm(groups, channels, affine=False)


# --- residual networks ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """`branch(x) + shortcut(x)`, then `after`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.branch(x) + self.shortcut(x))
        return out


def resnet18(classes: int, channels: int = 3, groups: int = 32) -> nn.Sequential:
    """ResNet-18 for 32x32 images: a 3x3 stem without pooling, GroupNorm in BatchNorm's place; 21 weight matrices."""

    def convolution(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False)
        return [conv, nn.GroupNorm(groups, fan_out)]

    def block(fan_in: int, fan_out: int, stride: int) -> nn.Module:
        branch = [*convolution(fan_in, fan_out, 3, stride), nn.ReLU(), *convolution(fan_out, fan_out, 3)]
        changes = stride != 1 or fan_in != fan_out
        shortcut = nn.Sequential(*convolution(fan_in, fan_out, 1, stride)) if changes else nn.Identity()
        return Residual(nn.Sequential(*branch), shortcut, nn.ReLU())

    stages = []
    for fan_in, fan_out in pairwise((64, 64, 128, 256, 512)):
        stride = 1 if fan_in == fan_out else 2
        stages.append(nn.Sequential(block(fan_in, fan_out, stride), block(fan_out, fan_out, 1)))
    stem = nn.Sequential(*convolution(channels, 64, 3), nn.ReLU())
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class StandardisedConv2d(nn.Module):
    """A convolution whose filters are standardised and given a learned gain before use (scaled weight standardisation).

    It is not an `nn.Conv2d`: the gradient of its weight is not the outer product that fast engines assume for one.
    """

    def __init__(self, fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in, kernel, kernel))
        self.gain = nn.Parameter(torch.ones(fan_out))
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.stride = stride
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")

    def forward(self, x: Tensor) -> Tensor:
        spread, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        scale = (spread * self.weight[0].numel()).clamp(min=1e-4).rsqrt() * self.gain[:, None, None, None]
        padding = self.weight.shape[-1] // 2
        return functional.conv2d(x, (self.weight - mean) * scale, self.bias, stride=self.stride, padding=padding)


def wide_resnet(classes: int, depth: int = 16, width: int = 4, groups: int = 16, channels: int = 3) -> nn.Sequential:
    """The Wide ResNet of De et al. (2022): standardised weights, activation before GroupNorm before convolution.

    Their activations carry a constant factor; a normalisation follows each of them, so it would change nothing.
    """

    def convolution(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        return [nn.ReLU(), nn.GroupNorm(groups, fan_in), StandardisedConv2d(fan_in, fan_out, kernel, stride)]

    def block(fan_in: int, fan_out: int, stride: int) -> nn.Module:
        branch = nn.Sequential(*convolution(fan_in, fan_out, 3, stride), *convolution(fan_out, fan_out, 3))
        shortcut = nn.Sequential(*convolution(fan_in, fan_out, 1, stride)) if fan_in != fan_out else nn.Identity()
        return Residual(branch, shortcut, nn.Identity())

    widths = (16, 16 * width, 32 * width, 64 * width)
    stages = []
    for (fan_in, fan_out), stride in zip(pairwise(widths), (1, 2, 2), strict=True):
        rest = [block(fan_out, fan_out, 1) for _ in range((depth - 4) // 6 - 1)]
        stages.append(nn.Sequential(block(fan_in, fan_out, stride), *rest))
    head = [nn.ReLU(), nn.GroupNorm(groups, widths[-1]), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(StandardisedConv2d(channels, 16, 3), *stages, *head, nn.Linear(widths[-1], classes))


# --- text -------------------------------------------------------------------------------------------------------------


class LSTM(nn.Module):
    """One direction of an `nn.LSTM`, written with linear layers: per-example gradients need no special kernel then."""

    def __init__(self, inputs: int, hidden: int, backward: bool = False) -> None:
        super().__init__()
        self.hidden, self.backward = hidden, backward
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_hidden = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[examples, time, inputs] -> [examples, time, hidden]."""
        steps = self.from_input(x).unbind(dim=1)
        state = cell = x.new_zeros(len(x), self.hidden)
        states = []
        for step in reversed(steps) if self.backward else steps:
            enter, forget, new, leave = (step + self.from_hidden(state)).chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states[::-1] if self.backward else states, dim=1)


class TextClassifier(nn.Module):
    """DPSUR's classifier of reviews: embedding, linear 32, bidirectional LSTM, mean over time, linear 16, linear."""

    def __init__(self, classes: int, vocabulary: int = 20_000, embedding: int = 100, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.enter = nn.Sequential(nn.Linear(embedding, 32), nn.Tanh())
        self.ahead, self.back = LSTM(32, hidden), LSTM(32, hidden, backward=True)
        self.leave = nn.Sequential(nn.Linear(2 * hidden, 16), nn.Tanh(), nn.Linear(16, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        """[examples, time] of token numbers -> [examples, classes]."""
        x = self.enter(self.embedding(tokens))
        out: Tensor = self.leave(torch.cat([self.ahead(x), self.back(x)], dim=-1).mean(dim=1))
        return out


# --- features ---------------------------------------------------------------------------------------------------------


def linear_head(inputs: int, classes: int) -> nn.Sequential:
    """A linear classifier of features, each example's standardised by themselves, which asks nothing."""
    return nn.Sequential(nn.LayerNorm(inputs, elementwise_affine=False), nn.Linear(inputs, classes))


NARROW = 1024
"""Dimensions to which features are projected for least squares. The largest eigenvalue of the noise grows with their
root and what they leave out falls: of 512, 768 and 1,024, MNIST had the same within 0.3 points at epsilon 1, and
CIFAR-10 had most from the last."""


class Projection(nn.Module):
    """A product with random signs that are the same for every example: a public function of each example."""

    signs: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        drawn = hashlib.shake_256(f"projection {inputs} {outputs}".encode()).digest(-(-inputs * outputs // 8))
        bits = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8), count=inputs * outputs)
        signs = torch.from_numpy(bits).float().mul_(2).sub_(1).view(inputs, outputs)
        self.register_buffer("signs", signs * inputs**-0.5, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.signs


class Unit(nn.Module):
    """Each example scaled to length 1; a constant among its numbers, if there is one, takes an intercept's place."""

    def __init__(self, constant: float = 0.0) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        x = functional.normalize(x, dim=-1)
        if not self.constant:
            return x
        return functional.normalize(functional.pad(x, (0, 1), value=self.constant), dim=-1)


def least_squares_head(inputs: int, classes: int) -> nn.Sequential:
    """A linear classifier of features for least squares: rows of length 1, with a constant, at most `NARROW` wide."""
    narrow = [Projection(inputs, NARROW)] if inputs > NARROW else []
    rows = [nn.LayerNorm(inputs, elementwise_affine=False), *narrow, Unit(CONSTANT)]
    return nn.Sequential(*rows, nn.Linear(min(inputs, NARROW) + 1, classes, bias=False))


CONSTANT = 0.3
"""Of a row of length 1 before the constant joins: an intercept for a twelfth of the row's square."""


def bag_linear(shape: tuple[int, ...], classes: int) -> nn.Linear:
    """A linear classifier of features of a known norm, which starts at zero: without an answer, and without a bias
    towards one."""
    layer = nn.Linear(prod(shape), classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


# --- by name ----------------------------------------------------------------------------------------------------------


def _wide(depth: int) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: wide_resnet(classes, depth, channels=shape[0])


NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": lambda shape, classes: nn.Sequential(nn.Flatten(), *mlp(prod(shape), classes)),
    "linear": lambda shape, classes: nn.Sequential(nn.Flatten(), *linear_head(prod(shape), classes)),
    "least-squares": lambda shape, classes: nn.Sequential(nn.Flatten(), *least_squares_head(prod(shape), classes)),
    "cnn": lambda shape, classes: cnn(shape[0], shape[1], classes),
    "resnet18": lambda shape, classes: resnet18(classes, shape[0]),
    "wrn10-1": lambda shape, classes: wide_resnet(classes, 10, 1, channels=shape[0]),
    "wrn16-4": _wide(16),
    "wrn40-4": _wide(40),
}
"""Networks for examples of any shape that they can take: [channels, height, width], or [numbers]."""


def lay_out(model: nn.Module, device: str, beside: bool) -> None:
    """Move one of these networks to a device, with channels side by side in memory if asked: a GPU that convolves in
    bfloat16 wants them so. (A user's own network may have a `view` that would fail.)"""
    model.to(device, memory_format=torch.channels_last if beside else torch.preserve_format)  # type: ignore[call-overload]


def network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network by its name, for examples of this shape."""
    if name not in NETWORKS:
        close = get_close_matches(name, NETWORKS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(NETWORKS)}"
        raise ValueError(f"model={name!r}: no such network; {hint}")
    if name not in ("mlp", "linear", "least-squares") and len(shape) != 3:
        raise ValueError(
            f"model={name!r} takes images [channels, height, width], but these examples have shape {shape}; give "
            "another model"
        )
    return NETWORKS[name](shape, classes)
