"""Which convolutions do people write? Of every kind torch has, and some by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sensitivity.cancelling import raised
from sensitivity.examples import copied, numbers, regression
from sensitivity.measuring import Case


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(4, 6, k) for k in (2, 3, 4)])
        self.fc = nn.Linear(18, 3)

    def forward(self, x):
        feats = [F.relu(conv(x)).max(dim=2).values for conv in self.convs]
        return self.fc(torch.cat(feats, dim=1))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def c3d():
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 2), nn.Flatten(), nn.Linear(4, 3)
    )


def grouped():
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.GELU(), nn.Conv2d(8, 4, 1, groups=4), nn.Flatten(), nn.Linear(64, 3)
    )


class DepthwiseSeparable(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.depthwise = nn.Conv2d(cin, cin, 3, stride=stride, padding=1, groups=cin, bias=False)
        self.pointwise = nn.Conv2d(cin, cout, 1, bias=False)
        self.norm = nn.GroupNorm(1, cout)

    def forward(self, x):
        return F.relu6(self.norm(self.pointwise(self.depthwise(x))))


def mobilenet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), DepthwiseSeparable(4, 8), DepthwiseSeparable(8, 8, stride=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class CausalConv(nn.Conv1d):
    def __init__(self, cin, cout, k, dilation):
        super().__init__(cin, cout, k, dilation=dilation)
        self.left = (k - 1) * dilation

    def forward(self, x):
        return super().forward(F.pad(x, (self.left, 0)))


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([CausalConv(3 if i == 0 else 6, 6, 2, 2**i) for i in range(3)])
        self.out = nn.Conv1d(6, 1, 1)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            x = y if i == 0 else x + y
        return self.out(x).squeeze(1)


def strided():
    return nn.Sequential(
        nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.ELU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def made_lazy(build, *shape):
    model = build()
    model(torch.zeros(2, *shape))
    return model


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def upsampling():
    return nn.Sequential(
        nn.ConvTranspose1d(4, 8, 3, stride=2, groups=2, dilation=2),
        nn.Tanh(),
        nn.ConvTranspose1d(8, 2, 2),
        nn.Flatten(),
        nn.Linear(28, 3),
    )


def modes(mode):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode=mode),
        nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Flatten(),
        nn.Linear(100, 3),
    )


class OwnKernel(nn.Module):
    """A kernel as a bare parameter, used by two strides."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 2, 3, 3) * 0.2)
        self.fc = nn.Linear(10, 3)

    def forward(self, x):
        fine = F.conv2d(x, self.kernel, padding=1).amax((2, 3))
        coarse = F.conv2d(x, self.kernel, stride=2).mean((2, 3))
        return self.fc(torch.cat([fine, coarse], 1))


class Saliency(nn.Module):
    """Softmax over positions: what comes back to the scores sums to zero, and a shift of the input cancels."""

    def __init__(self):
        super().__init__()
        self.score, self.value = nn.Conv1d(3, 1, 3, padding=1), nn.Conv1d(3, 4, 1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        weights = self.score(x).softmax(dim=-1)
        return self.fc((weights * torch.tanh(self.value(x))).sum(-1))


CASES = [
    Case(name="text cnn, three widths", model=TextCNN, data=numbers(4, 9)),
    Case(name="lenet", model=lenet, data=numbers(1, 8, 8)),
    Case(name="conv3d", model=c3d, data=numbers(1, 4, 4, 4)),
    Case(name="grouped conv", model=grouped, data=numbers(4, 6, 6)),
    Case(name="mobilenet blocks", model=mobilenet, data=numbers(3, 8, 8)),
    Case(name="dilated causal tcn", model=TCN, data=regression(3, 10, to=(10,)), loss=F.mse_loss),
    Case(name="strided and lazy", model=lambda: made_lazy(strided, 2, 7, 6), data=numbers(2, 7, 6)),
    Case(name="conv autoencoder", model=Autoencoder, data=copied(1, 8, 8), loss=nn.MSELoss()),
    Case(
        name="conv autoencoder, mean by hand",
        model=Autoencoder,
        data=copied(1, 8, 8),
        loss=lambda out, x: ((out - x) ** 2).mean(),
    ),
    Case(name="grouped transposed conv1d", model=upsampling, data=numbers(4, 5)),
    *(
        Case(name=f"conv2d padded {mode}", model=lambda mode=mode: modes(mode), data=numbers(2, 5, 5))
        for mode in ("circular", "reflect", "replicate")
    ),
    Case(name="a kernel of one's own, twice", model=OwnKernel, data=numbers(2, 6, 6)),
    Case(name="softmax over positions", model=Saliency, data=numbers(3, 7)),
    Case(name="softmax over positions, raised", model=Saliency, data=raised(numbers(3, 7), 1000.0)),
    Case(name="softmax over positions, raised far", model=Saliency, data=raised(numbers(3, 7), 1e6)),
]
