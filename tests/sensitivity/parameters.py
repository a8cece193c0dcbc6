"""Which parameters do people make themselves? Scales, tokens, temperatures, low ranks, and parts that stay frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from sensitivity.examples import numbers, regression
from sensitivity.measuring import Case


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(5)), nn.Parameter(torch.zeros(5))
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(torch.tanh(x * self.scale + self.shift))


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.log_temperature = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.fc(x) / self.log_temperature.exp()


class OneNumber(nn.Module):
    """Nothing but a number."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.a * x.sum(1)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.gamma1, self.gamma2 = nn.Parameter(1e-4 * torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = x + self.gamma1 * F.gelu(self.fc1(x))
        return self.head(x + self.gamma2 * F.gelu(self.fc2(x)))


class FrozenBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 3)
        self.body.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.body(x)
        return self.head(features)


class FrozenTop(nn.Module):
    """Prompt tuning: the model is frozen, what is put before it is learned."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x):
        x = torch.cat([self.prompt.expand(len(x), -1, -1), x], 1)
        return self.head(self.layer(x)[:, 0])


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)


class MergedLoRA(nn.Module):
    """The matrices multiplied before they are used."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(6, 2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(F.linear(x, self.w + self.b @ self.a)))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def symmetric():
    return nn.Sequential(
        parametrize.register_parametrization(nn.Linear(5, 5), "weight", Symmetric()), nn.Tanh(), nn.Linear(5, 3)
    )


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.centres = nn.Linear(5, 4), nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return -torch.cdist(self.net(x), self.centres)


class Cosine(nn.Module):
    """A classifier of directions, with a learned scale."""

    def __init__(self):
        super().__init__()
        self.net, self.w, self.s = nn.Linear(5, 4), nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(()) * 5)

    def forward(self, x):
        return self.s * F.linear(F.normalize(self.net(x)), F.normalize(self.w))


class Monotone(nn.Module):
    """Positive weights by exp and softplus."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(8, 5) * 0.5), nn.Parameter(torch.zeros(8))
        self.w2 = nn.Parameter(torch.randn(1, 8) * 0.5)

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.w1.exp(), self.b1)), F.softplus(self.w2)).squeeze(1)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(5, 5) * 0.4) for _ in range(3)])
        self.mix, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(5, 3)

    def forward(self, x):
        weights = self.mix.softmax(0)
        return self.head(sum(weights[i] * torch.tanh(x @ w) for i, w in enumerate(self.ws)))


class Stacked(nn.Module):
    """A matrix made of a list of parameters."""

    def __init__(self):
        super().__init__()
        self.rows, self.bias = nn.ParameterList([torch.randn(5) for _ in range(3)]), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ torch.stack(list(self.rows)).T + self.bias


class Fourier(nn.Module):
    """A filter of frequencies, as two real parameters."""

    def __init__(self):
        super().__init__()
        self.real, self.imaginary, self.fc = (
            nn.Parameter(torch.randn(2, 5)),
            nn.Parameter(torch.randn(2, 5)),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * torch.complex(self.real, self.imaginary)
        return self.fc(torch.fft.irfft(spectrum, n=8).flatten(1))


class Gaussians(nn.Module):
    """Soft assignment to components: log densities with learned means and widths."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_std, self.logit = (
            nn.Parameter(torch.randn(4, 2)),
            nn.Parameter(torch.zeros(4, 2)),
            nn.Parameter(torch.zeros(4)),
        )

    def forward(self, x):
        z = (x.unsqueeze(1) - self.mean) / self.log_std.exp()
        density = -0.5 * z.square().sum(-1) - self.log_std.sum(-1)
        return torch.logsumexp(density + self.logit.log_softmax(0), dim=1)


class Places(nn.Module):
    """Learned positions, sliced and added."""

    def __init__(self):
        super().__init__()
        self.pos, self.fc = nn.Parameter(torch.zeros(10, 4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(torch.relu(x + self.pos[: x.size(1)]).mean(1))


class OnlyBias(nn.Module):
    """BitFit: everything is frozen but the biases."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3))
        for name, p in self.net.named_parameters():
            p.requires_grad = name.endswith("bias")

    def forward(self, x):
        return self.net(x)


def lora():
    return nn.Sequential(LoRALinear(nn.Linear(5, 6)), nn.ReLU(), LoRALinear(nn.Linear(6, 3)))


CASES = [
    Case(name="scale and shift", model=Affine, data=numbers(5)),
    Case(name="temperature", model=Temperature, data=numbers(5)),
    Case(name="nothing but a number", model=OneNumber, data=regression(5, to=()), loss=F.mse_loss),
    Case(name="layer scale", model=LayerScale, data=numbers(6)),
    Case(name="frozen body with batch norm", model=FrozenBody, data=numbers(1, 6, 6)),
    Case(name="prompt before a frozen model", model=FrozenTop, data=numbers(4, 4)),
    Case(name="lora", model=lora, data=numbers(5)),
    Case(name="lora, merged", model=MergedLoRA, data=numbers(5)),
    Case(name="symmetric parametrisation", model=symmetric, data=numbers(5)),
    Case(name="distances to prototypes", model=Prototypes, data=numbers(5), daily=True),
    Case(name="cosine classifier", model=Cosine, data=numbers(5)),
    Case(name="monotone network", model=Monotone, data=regression(5, to=()), loss=F.mse_loss),
    Case(name="a list of matrices", model=Listed, data=numbers(5)),
    Case(name="a matrix of a list", model=Stacked, data=numbers(5)),
    Case(
        name="filter of frequencies",
        model=Fourier,
        data=numbers(2, 8),
    ),
    Case(name="mixture of gaussians", model=Gaussians, data=regression(2, to=()), loss=lambda out, y: -out.mean()),
    Case(name="learned positions", model=Places, data=numbers(6, 4)),
    Case(name="nothing but biases", model=OnlyBias, data=numbers(5)),
]
