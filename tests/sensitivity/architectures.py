"""Which whole networks do people write? Residual, U-shaped, gated, of several inputs and outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensitivity.examples import numbers, regression
from sensitivity.measuring import Case


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, c), nn.GroupNorm(2, c)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


def resnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Block(4), Block(4), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, 3)
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        return self.out(torch.cat([a, self.up(b)], dim=1))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up, self.fc = nn.Conv2d(2, 6, 3), nn.Linear(6, 2), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.hardswish(self.conv(x))
        s = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return self.fc((x * s[:, :, None, None]).amax((2, 3)))


def super_resolution():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.out = nn.Linear(4, 1)

    def forward(self, a, b):
        return self.out((self.net(a) - self.net(b)).abs()).squeeze(1)


class SiameseAtOnce(nn.Module):
    """Both sides through the network as one batch of twice the size."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a, b):
        left, right = self.net(torch.cat([a, b])).chunk(2)
        return (left - right).pow(2).sum(1)


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Bilinear(4, 5, 3)

    def forward(self, a, b):
        return self.mix(a, b)


class Experts(nn.Module):
    """A mixture by softmax."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList([nn.Linear(5, 4) for _ in range(3)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        out = torch.stack([torch.tanh(expert(x)) for expert in self.experts], dim=1)
        return self.head((weights.unsqueeze(-1) * out).sum(1))


class Routed(nn.Module):
    """Each row is sent to its best expert: an expert gets as many rows as chose it."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 2), nn.ModuleList([nn.Linear(5, 3) for _ in range(2)])

    def forward(self, x):
        probability, best = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * probability[rows, None])
        return out


class Hyper(nn.Module):
    """A network that makes each example's matrix."""

    def __init__(self):
        super().__init__()
        self.make, self.head = nn.Linear(3, 4 * 5), nn.Linear(4, 3)

    def forward(self, x, context):
        w = self.make(context).view(-1, 4, 5)
        return self.head(torch.tanh(torch.bmm(w, x.unsqueeze(2)).squeeze(2)))


class DeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        b, k, d = x.shape
        return self.rho(self.phi(x.reshape(b * k, d)).view(b, k, -1).max(1).values)


class Graph(nn.Module):
    """A graph convolution over a dense adjacency matrix of each example."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x, edges):
        a = edges + torch.eye(edges.shape[-1])
        a = a / a.sum(-1, keepdim=True)
        return self.two(a @ F.relu(self.one(a @ x))).mean(1)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return {"kind": self.kind(h), "size": self.size(h).squeeze(-1), "scale": 2.0}


def of_two_heads(out, y):
    return F.cross_entropy(out["kind"], y[:, 0].long()) + 0.5 * F.mse_loss(out["size"], y[:, 1])


class Answer(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return Answer(self.out(h), h)


def of_named(out, y):
    return F.cross_entropy(out.logits, y) + 1e-2 * out.hidden.pow(2).mean()


class OwnLoss(nn.Module):
    """Computes its loss itself, of the whole batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.fc(x), y)


class Coupling(nn.Module):
    """A normalising flow: half of the input decides how the other half is moved."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)])

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        log_det = 0
        for net in self.nets:
            s, t = net(a).chunk(2, dim=1)
            a, b = b * torch.tanh(s).exp() + t, a
            log_det = log_det + torch.tanh(s).sum(1)
        return -0.5 * (a.pow(2) + b.pow(2)).sum(1) + log_det


def labelled(n):
    return torch.randn(n, 5), torch.stack([torch.randint(3, (n,)).float(), torch.randn(n)], 1)


def two_inputs(left, right, classes=3):
    return lambda n: (torch.randn(n, *left), torch.randn(n, *right), torch.randint(classes, (n,)))


def graphs(n):
    edges = (torch.rand(n, 4, 4) > 0.5).float()
    return torch.randn(n, 4, 3), edges, torch.randint(3, (n,))


def segmented(n):
    return torch.randn(n, 1, 6, 6), torch.randint(2, (n, 6, 6))


def same_or_not(n):
    return torch.randn(n, 5), torch.randn(n, 5), torch.randint(2, (n,)).float()


def margin(distance, same):
    return torch.where(same > 0.5, distance, F.relu(1 - distance)).mean()


def already_labelled(n):
    y = torch.randint(3, (n,))
    return torch.randn(n, 5), y, y.clone()


CASES = [
    Case(name="residual network", model=resnet, data=numbers(1, 6, 6)),
    Case(name="u-net", model=UNet, data=segmented),
    Case(name="squeeze and excite", model=SqueezeExcite, data=numbers(2, 6, 6)),
    Case(name="pixel shuffle", model=super_resolution, data=regression(1, 4, 4, to=(1, 8, 8)), loss=F.l1_loss),
    Case(name="siamese", model=Siamese, data=same_or_not, loss=nn.BCEWithLogitsLoss(), outlying=(0, 1)),
    Case(name="siamese, both at once", model=SiameseAtOnce, data=same_or_not, loss=margin, outlying=(0, 1)),
    Case(name="bilinear", model=Bilinear, data=two_inputs((4,), (5,))),
    Case(name="mixture of experts", model=Experts, data=numbers(5)),
    Case(
        name="routed experts",
        model=Routed,
        data=numbers(5),
        refused={"loop": "architectures.py:115 looks at a value of the examples"},
    ),
    Case(name="hypernetwork", model=Hyper, data=two_inputs((5,), (3,))),
    Case(name="deep sets", model=DeepSets, data=numbers(4, 3)),
    Case(name="graph convolution", model=Graph, data=graphs, outlying=(0,)),
    Case(
        name="two heads in a dictionary",
        model=TwoHeads,
        data=labelled,
        loss=of_two_heads,
        outlying=(0,),
    ),
    Case(name="a named tuple and a penalty", model=Named, data=numbers(5), loss=of_named),
    Case(
        name="a loss inside the model",
        model=OwnLoss,
        data=already_labelled,
        loss=lambda out, y: out,
        daily=True,
    ),
    Case(
        name="normalising flow",
        model=Coupling,
        data=regression(6, to=()),
        loss=lambda out, y: -out.mean(),
        outlying=(0,),
    ),
]
