"""Which norms and random layers do people write? And what is computed again, or in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from sensitivity.examples import copied, numbers
from sensitivity.measuring import Case


class HandRMS(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class HandLayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * self.g + self.b


def between(norm):
    return nn.Sequential(nn.Linear(5, 8), norm, nn.ReLU(), nn.Linear(8, 3))


def over_images(norm):
    return nn.Sequential(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


class StandardConv(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def weight_normed():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 8)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 3))
    )


def spectrally_normed():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 8)), nn.LeakyReLU(), nn.Linear(8, 3))


def old_weight_normed():
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))


def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3))


class DropInside(nn.Module):
    """F.dropout in a module that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.fc = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(F.dropout(x * self.scale, 0.5, self.training))


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1)) >= self.p
        return x * keep / (1 - self.p)


class StochasticDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop, self.head = nn.Linear(5, 5), nn.Linear(5, 5), DropPath(0.4), nn.Linear(5, 3)

    def forward(self, x):
        x = x + self.drop(torch.relu(self.a(x)))
        return self.head(x + self.drop(torch.relu(self.b(x))))


class SkippedLayers(nn.Module):
    """One coin for the whole batch: the layer is used, or not."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        for layer in (self.a, self.b):
            if torch.rand(()) < 0.7:
                x = x + torch.relu(layer(x))
        return self.head(x)


class DropConnect(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(F.linear(x, F.dropout(self.fc.weight, 0.3, self.training), self.fc.bias)))


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mu, self.log_var, self.decoder = (
            nn.Linear(6, 8),
            nn.Linear(8, 2),
            nn.Linear(8, 2),
            nn.Linear(2, 6),
        )

    def forward(self, x):
        h = torch.relu(self.encoder(x))
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        return self.decoder(z), mu, log_var


def elbo(outputs, x):
    recon, mu, log_var = outputs
    kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1)
    return (F.mse_loss(recon, x, reduction="none").sum(1) + kl).mean()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.head, self.reentrant = nn.Linear(5, 6), nn.Linear(6, 3), reentrant
        self.block = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, x):
        h = self.first(x)
        return self.head(h + checkpoint(self.block, h, use_reentrant=self.reentrant))


class Autocast(nn.Module):
    """bfloat16 inside the forward pass."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.net(x)
        return out.float()


def mlp():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


IMAGES = numbers(2, 6, 6)
CASES = [
    Case(name="layer norm", model=lambda: between(nn.LayerNorm(8)), data=numbers(5)),
    Case(name="rms norm", model=lambda: between(nn.RMSNorm(8)), data=numbers(5)),
    Case(name="rms norm by hand", model=lambda: between(HandRMS(8)), data=numbers(5)),
    Case(name="layer norm by hand", model=lambda: between(HandLayerNorm(8)), data=numbers(5)),
    Case(
        name="layer norm of the input", model=lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)), data=numbers(5)
    ),
    Case(name="layer norm over an image", model=lambda: over_images(nn.LayerNorm([6, 4, 4])), data=IMAGES),
    Case(name="group norm", model=lambda: over_images(nn.GroupNorm(2, 6)), data=IMAGES),
    Case(name="instance norm", model=lambda: over_images(nn.InstanceNorm2d(6, affine=True)), data=IMAGES),
    Case(name="local response norm", model=lambda: over_images(nn.LocalResponseNorm(3)), data=IMAGES),
    Case(
        name="standardised weights",
        model=lambda: nn.Sequential(StandardConv(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        data=IMAGES,
    ),
    Case(name="weight norm", model=weight_normed, data=numbers(5)),
    Case(name="weight norm of old", model=old_weight_normed, data=numbers(5)),
    Case(
        name="spectral norm",
        model=spectrally_normed,
        data=numbers(5),
    ),
    Case(name="orthogonal matrix", model=orthogonal, data=numbers(5)),
    Case(name="prelu", model=lambda: between(nn.PReLU(8)), data=numbers(5)),
    Case(name="dropout", model=lambda: between(nn.Dropout(0.3)), data=numbers(5), random=True),
    Case(name="dropout of channels", model=lambda: over_images(nn.Dropout2d(0.3)), data=IMAGES, random=True),
    Case(name="alpha dropout", model=lambda: between(nn.AlphaDropout(0.2)), data=numbers(5), random=True),
    Case(
        name="random leaky relu",  # torch draws a slope for each negative value: how many it draws tells of the examples
        model=lambda: between(nn.RReLU()),
        data=numbers(5),
        random=True,
        refused={"loop": "looks at a value of the examples"},
    ),
    Case(name="dropout in a module with a parameter", model=DropInside, data=numbers(5), random=True),
    Case(name="stochastic depth", model=StochasticDepth, data=numbers(5), random=True),
    Case(
        name="layers skipped by a coin",
        model=SkippedLayers,
        data=numbers(5),
        random=True,
    ),
    Case(
        name="dropout of weights",
        model=DropConnect,
        data=numbers(5),
        random=True,
    ),
    Case(name="variational autoencoder", model=Variational, data=copied(6), loss=elbo, random=True),
    Case(name="checkpoint", model=lambda: Checkpointed(False), data=numbers(5)),
    Case(
        name="checkpoint, reentrant",
        model=lambda: Checkpointed(True),
        data=numbers(5),
        refused="use_reentrant=True",
    ),
    Case(name="bfloat16 inside the model", model=lambda: Autocast(mlp()), data=numbers(5)),
    Case(name="bfloat16 inside a convolutional model", model=lambda: Autocast(convolutional()), data=IMAGES),
    Case(name="bfloat16 around the loop's passes", model=mlp, data=numbers(5), around=bfloat16),
    Case(name="bfloat16 around convolutions", model=convolutional, data=IMAGES, around=bfloat16),
]
