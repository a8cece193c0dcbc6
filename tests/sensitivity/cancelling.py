"""Whose gradients are small sums of large terms? Differences of layers, words and positions far from zero."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensitivity.examples import Made, numbers
from sensitivity.measuring import Case


class Wave(nn.Module):
    """Differences of neighbouring positions after a convolution."""

    def __init__(self, convolution):
        super().__init__()
        self.conv = convolution

    def forward(self, x):
        return self.conv(x).flatten(2).diff(dim=-1).tanh().mean(-1)


class Steps(nn.Module):
    """Differences of neighbouring positions after a linear layer, which has few positions and many weights, or not."""

    def __init__(self, width, out):
        super().__init__()
        self.inner, self.head = nn.Linear(width, out), nn.Linear(out, 3)

    def forward(self, x):
        return self.head(self.inner(x).diff(dim=1).tanh().mean(1))


class Twins(nn.Module):
    """One layer at two inputs, subtracted."""

    def __init__(self, width, out, bias=True):
        super().__init__()
        self.inner, self.head = nn.Linear(width, out, bias=bias), nn.Linear(out, 3)

    def forward(self, x, y):
        return self.head((self.inner(x) - self.inner(y)).tanh())


class WeighedWords(nn.Module):
    """Words with weights that sum to zero."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, width), nn.Linear(width, 3)

    def forward(self, ids, weights):
        weights = weights - weights.mean(1, keepdim=True)
        return self.fc((weights.unsqueeze(-1) * self.embed(ids)).sum(1).tanh())


class Contrast(nn.Module):
    """Two recurrent passes, subtracted."""

    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, y):
        return self.fc(self.rnn(x)[0][:, -1] - self.rnn(y)[0][:, -1])


class Scaled(nn.Module):
    """A scale, at two inputs, subtracted."""

    def __init__(self):
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x, y):
        return self.fc((x * self.scale - y * self.scale).tanh())


def raised(made: Made, by: float) -> Made:
    """Inputs far from zero, as unnormalised measurements are."""

    def make(n: int) -> tuple[Tensor, ...]:
        x, *rest = made(n)
        return x + by, *rest

    return make


def twins(*shape: int, by: float = 0.0, apart: float = 1.0) -> Made:
    """Two inputs that are nearly the same."""

    def make(n: int) -> tuple[Tensor, ...]:
        x = by + torch.randn(n, *shape)
        return x, x + apart * torch.randn(n, *shape), torch.randint(3, (n,))

    return make


def one_word(by: float, length: int = 8) -> Made:
    """The same word over and over, with large weights."""

    def make(n: int) -> tuple[Tensor, ...]:
        return torch.randint(5, (n, 1)).repeat(1, length), by * torch.randn(n, length), torch.randint(3, (n,))

    return make


def wave(n: int) -> tuple[Tensor, ...]:
    return 1e6 + torch.randn(n, 1, 4, 4, 4), torch.rand(
        n, 16
    )  # whole vectors: torch rounds a sigmoid otherwise at the end of a tensor


REDUCED = {
    "squared": F.mse_loss,
    "huber": F.huber_loss,
    "smooth": partial(F.smooth_l1_loss, beta=0.5),
    "soft margin": lambda out, y: F.soft_margin_loss(out, 2 * y - 1),
    "logits": F.binary_cross_entropy_with_logits,
    "mean by hand": lambda out, y: (out - y).square().mean(),
    "sum over rows": lambda out, y: (out - y).square().sum() / len(y),
    "scaled": lambda out, y: 0.3 * (out - y).square().sum() / len(y) + 0.1 * F.mse_loss(out, y),
    "mean of rows": lambda out, y: (out - y).square().sum(1).mean(0),
}
"""The same loss, or nearly, reduced in the ways there are."""
CASES = [
    Case(
        name="conv1d differences, raised",
        model=lambda: Wave(nn.Conv1d(2, 3, 3)),
        data=raised(numbers(2, 12), 1e6),
    ),
    Case(name="conv2d differences, raised", model=lambda: Wave(nn.Conv2d(2, 3, 3)), data=raised(numbers(2, 6, 6), 1e4)),
    Case(
        name="wide conv2d differences, raised",
        model=lambda: Wave(nn.Conv2d(16, 32, 3)),
        data=raised(numbers(16, 4, 4), 1e5),
    ),
    Case(
        name="conv3d differences, raised",
        model=lambda: Wave(nn.Conv3d(1, 3, 2)),
        data=raised(numbers(1, 4, 4, 4), 1e6),
    ),
    Case(
        name="transposed conv differences, raised",
        model=lambda: Wave(nn.ConvTranspose2d(2, 3, 2)),
        data=raised(numbers(2, 5, 5), 1e6),
    ),
    Case(name="linear differences, raised", model=lambda: Steps(4, 3), data=raised(numbers(12, 4), 1e5)),
    Case(
        name="wide linear differences, raised",
        model=lambda: Steps(64, 48),
        data=raised(numbers(3, 64), 1e5),
    ),
    Case(name="linear twins", model=lambda: Twins(5, 4), data=twins(5, apart=1e-4)),
    Case(name="linear twins without bias, raised", model=lambda: Twins(5, 4, False), data=twins(5, by=1e5)),
    Case(name="wide linear twins, raised", model=lambda: Twins(64, 48), data=twins(64, by=1e5)),
    Case(
        name="one word with weights that sum to zero",
        model=lambda: WeighedWords(4),
        data=one_word(1e5),
    ),
    Case(
        name="wide word with weights that sum to zero",
        model=lambda: WeighedWords(64),
        data=one_word(1e5, 3),
    ),
    *(
        Case(name=f"differences, {name}", model=lambda: Wave(nn.Conv3d(1, 16, 2)), data=wave, loss=loss)
        for name, loss in REDUCED.items()
    ),
    Case(name="recurrent twins", model=Contrast, data=twins(4, 3, apart=1e-4)),
    Case(name="scaled twins, raised", model=Scaled, data=twins(5, by=1e5)),
]
