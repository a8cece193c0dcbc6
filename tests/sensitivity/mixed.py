"""Which models mix the examples of a batch? All of them must be refused, whatever the examples are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensitivity.examples import numbers
from sensitivity.measuring import Case


def batch_normed():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch_normed_images():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(64, 3)
    )


def instance_normed():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(64, 3)
    )


class Mixing(nn.Module):
    """A function of the whole batch, between two layers."""

    def __init__(self, mix):
        super().__init__()
        self.one, self.two, self.mix = nn.Linear(5, 6), nn.Linear(6, 3), mix

    def forward(self, x):
        return self.two(torch.tanh(self.mix(self.one(x))))


def line(function):
    """Of the only line of a function."""
    return function.__code__.co_firstlineno + 1


def over_largest(x):
    return x / x.abs().max()


def over_largest_if_large(x):
    return x / x.abs().max() if x.abs().max() > 50 else x


def nothing_if_not_finite(x):
    return x if torch.isfinite(x).all() else torch.zeros_like(x)


def nothing_if_infinite(x):
    return torch.zeros_like(x) if torch.isinf(x).any() else x


def with_deviation(x):
    """Minibatch discrimination: how much the batch varies, beside every example."""
    return torch.cat([x[:, :5], x.std(0).mean().expand(len(x), 1)], dim=1)


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.fc(x - self.mean)


class RunningMeanUnused(nn.Module):
    """Kept for later: the outputs of this step do not depend on it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.fc(x)


class FrozenCentre(nn.Module):
    """The same, in a parameter without gradients."""

    def __init__(self):
        super().__init__()
        self.fc, self.centre = nn.Linear(5, 3), nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        self.centre.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.fc(x)


class Codebook(nn.Module):
    """Vector quantisation, with a codebook that follows the examples."""

    def __init__(self):
        super().__init__()
        self.encoder, self.fc = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(6, 4))

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        self.codes[nearest] = 0.99 * self.codes[nearest] + 0.01 * z.detach()
        return self.fc(z + (self.codes[nearest] - z).detach())


class AcrossBatch(nn.Module):
    """[examples, time, width] given to attention that wants time first."""

    def __init__(self):
        super().__init__()
        self.attend, self.fc = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.attend(x, x, x)[0].mean(1))


class RecurrentAcrossBatch(nn.Module):
    """The same with an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


class Remembering(nn.Module):
    """Keeps the last batch in a list, and looks at it."""

    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(5, 3), []

    def forward(self, x):
        self.seen.append(x.detach().mean())
        return self.fc(x - sum(self.seen) / len(self.seen))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, a, b):
        return F.normalize(self.left(a)), F.normalize(self.right(b))


class Similarities(TwoTowers):
    """The matrix of everyone with everyone, inside the model."""

    def forward(self, a, b):
        left, right = super().forward(a, b)
        return left @ right.t() / 0.1


def contrastive(out, _):
    left, right = out
    return F.cross_entropy(left @ right.t() / 0.1, torch.arange(len(left)))


def diagonal(out, _):
    return F.cross_entropy(out, torch.arange(len(out)))


def pairs(n):
    return torch.randn(n, 5), torch.randn(n, 5), torch.zeros(n)


def correlation(out, y):
    """Minus Pearson's correlation over the batch."""
    out, y = out.squeeze(1) - out.mean(), y - y.mean()
    return -(out * y).sum() / (out.norm() * y.norm() + 1e-6)


REDUCES, LOOKS = "is a reduction over the batch", "looks at a value of the examples"
MIXES: dict[str, tuple[Callable[[Tensor], Tensor], str | dict[str, str]]] = {
    "over the batch's largest": (over_largest, f"max at sensitivity/mixed.py:{line(over_largest)} {REDUCES}"),
    "over the largest, where it is large": (over_largest_if_large, {"loop": LOOKS}),
    "less the batch's mean": (lambda x: x - x.mean(0), REDUCES),
    "normalised over the batch": (lambda x: F.normalize(x, dim=0), REDUCES),
    "softmax over the batch": (lambda x: x.softmax(0), "mixes examples"),
    "summed over the batch": (lambda x: x.cumsum(0), "mixes examples"),
    "mixed with the neighbour": (lambda x: 0.7 * x + 0.3 * x.roll(1, 0), "mixes examples"),
    "beside the batch's deviation": (with_deviation, REDUCES),
    "nothing if one is not finite": (nothing_if_not_finite, {"loop": LOOKS}),
}
"""Each with the message of its refusal. What only looks at everyone is run one by one by `vestige.train`."""
CASES = [
    Case(name="batch norm", model=batch_normed, data=numbers(5), refused="mixes the examples of a batch", daily=True),
    Case(
        name="batch norm without statistics",
        model=batch_normed_images,
        data=numbers(2, 6, 6),
        refused="mixes the examples of a batch",
    ),
    Case(
        name="instance norm with statistics",
        model=instance_normed,
        data=numbers(2, 6, 6),
        refused="keeps running statistics",
    ),
    *(
        Case(
            name=name,
            model=lambda mix=mix: Mixing(mix),
            data=numbers(5),
            refused=refused,
            daily=name == "less the batch's mean",
        )
        for name, (mix, refused) in MIXES.items()
    ),
    Case(
        name="nothing if one is infinite",
        model=lambda: Mixing(nothing_if_infinite),
        data=numbers(5),
        refused={"loop": LOOKS},
    ),
    Case(
        name="running mean in a buffer",
        model=RunningMean,
        data=numbers(5),
        refused="is a reduction over the batch",
        daily=True,
    ),
    Case(
        name="running mean for later",
        model=RunningMeanUnused,
        data=numbers(5),
        refused="buffer 'mean' was changed by the forward pass",
    ),
    Case(
        name="running mean in a frozen parameter",
        model=FrozenCentre,
        data=numbers(5),
        refused="parameter 'centre' was changed by the forward pass",
        daily=True,
    ),
    Case(
        name="codebook that follows",
        model=Codebook,
        data=numbers(5),
        refused="puts rows in places that are not their own",
    ),
    Case(
        name="attention across the batch",
        model=AcrossBatch,
        data=numbers(5, 4),
        refused="combines rows of different examples",
        daily=True,
    ),
    Case(
        name="lstm across the batch",
        model=RecurrentAcrossBatch,
        data=numbers(5, 4),
        refused="recurrence",
    ),
    Case(name="memory in a list", model=Remembering, data=numbers(5), refused="is a reduction over the batch"),
    Case(
        name="similarities of everyone",
        model=Similarities,
        data=pairs,
        loss=diagonal,
        outlying=(0, 1),
        refused="combines rows of different examples",
    ),
    Case(
        name="contrastive loss",
        model=TwoTowers,
        data=pairs,
        loss=contrastive,
        outlying=(0, 1),
        assumed=True,
    ),
    Case(
        name="correlation over the batch",
        model=lambda: nn.Linear(5, 1),
        data=lambda n: (torch.randn(n, 5), torch.randn(n)),
        loss=correlation,
        outlying=(0,),
        assumed=True,
    ),
]
