"""Which losses do people take? torch's, with their options, and means by hand."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from sensitivity.examples import numbers, regression
from sensitivity.measuring import ODD, Case


def mlp(out=3):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, out))


def scalar():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def ignoring(n):
    y = torch.randint(3, (n,))
    y[::3] = -100
    return torch.randn(n, 5), y


def per_token(n):
    y = torch.randint(3, (n, 4))
    y[torch.rand(n, 4) < 0.4] = -100
    return torch.randn(n, 2, 4), y


class PerToken(nn.Module):
    """Scores [examples, classes, time]."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv1d(2, 3, 3, padding=1)
        self.own = nn.Parameter(torch.zeros(3, 1))

    def forward(self, x):
        return self.net(x) + self.own


def multi_label(n):
    return torch.randn(n, 5), torch.randint(2, (n, 3)).float()


def soft_targets(n):
    return torch.randn(n, 5), torch.randn(n, 3).softmax(-1)


def kl(out, y):
    return F.kl_div(out.log_softmax(-1), y, reduction="batchmean")


def nll(out, y):
    return F.nll_loss(F.log_softmax(out, dim=-1), y)


def focal(out, y):
    ce = F.cross_entropy(out, y, reduction="none")
    return ((1 - (-ce).exp()) ** 2 * ce).mean()


def dice(out, y):
    p = out.sigmoid()
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


def mean_of_masked(out, y):
    """The divisor counts everyone's targets."""
    mask = (y >= 0).float()
    return (F.cross_entropy(out, y.clamp(min=0), reduction="none") * mask).sum() / mask.sum()


def uneven(n):
    """One example has all its targets, the others have one each."""
    x, y = torch.randn(n, 2, 12), torch.full((n, 12), -100)
    y[:, 0], y[ODD] = torch.randint(3, (n,)), torch.randint(3, (12,))
    return x, y


def svm(out, y):
    return F.multi_margin_loss(out, y)


def binary_hinge(out, y):
    return F.relu(1 - (2 * y - 1) * out).mean()


def gaussian_nll(out, y):
    return F.gaussian_nll_loss(out[:, 0], y, F.softplus(out[:, 1]) + 1e-3)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4)

    def forward(self, *parts):
        return tuple(self.net(part) for part in parts)


def triplets(n):
    return torch.randn(n, 5), torch.randn(n, 5), torch.randn(n, 5), torch.zeros(n)


def triplet(out, _):
    return F.triplet_margin_loss(*out, margin=1.0)


def same(n):
    return torch.randn(n, 5), torch.randn(n, 5), torch.randint(2, (n,)).float() * 2 - 1


def cosine(out, y):
    return F.cosine_embedding_loss(*out, y, margin=0.1)


def ranking(out, y):
    return F.margin_ranking_loss(out[0].mean(1), out[1].mean(1), y, margin=0.3)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.rnn(x)[0]).log_softmax(-1)


def spoken(n):
    return torch.randn(n, 8, 4), torch.randint(1, 5, (n, 3))


def ctc(out, y):
    n = len(out)
    return F.ctc_loss(out.transpose(0, 1), y, torch.full((n,), 8), torch.full((n,), 3))


def ctc_of_rows(out, y):
    """A loss for each row, averaged by hand."""
    n = len(out)
    return F.ctc_loss(out.transpose(0, 1), y, torch.full((n,), 8), torch.full((n,), 3), reduction="none").mean()


def counts(n):
    return torch.randn(n, 5), torch.randint(6, (n,)).float()


def signs(n):
    return torch.randn(n, 5), torch.randint(2, (n,)).float()


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
CASES = [
    Case(
        name="cross entropy, class weights",
        model=mlp,
        data=numbers(5),
        loss=nn.CrossEntropyLoss(weight=WEIGHTS),
        daily=True,
    ),
    Case(
        name="cross entropy, a class without weight",
        model=mlp,
        data=numbers(5),
        loss=partial(F.cross_entropy, weight=torch.tensor([0.0, 1.0, 3.0])),
    ),
    Case(name="cross entropy, ignored targets", model=mlp, data=ignoring, loss=nn.CrossEntropyLoss(ignore_index=-100)),
    Case(
        name="cross entropy, label smoothing", model=mlp, data=numbers(5), loss=nn.CrossEntropyLoss(label_smoothing=0.1)
    ),
    Case(
        name="cross entropy, smoothing and weights",
        model=mlp,
        data=numbers(5),
        loss=nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    ),
    Case(
        name="cross entropy, smoothing and weights, by criterion",
        model=mlp,
        data=numbers(5),
        loss=nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        criterion=True,
    ),
    Case(
        name="cross entropy, smoothing and ignored targets",
        model=mlp,
        data=ignoring,
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
    ),
    Case(name="cross entropy of probabilities", model=mlp, data=soft_targets, loss=F.cross_entropy, outlying=(0,)),
    Case(
        name="cross entropy of probabilities, weighted",
        model=mlp,
        data=soft_targets,
        loss=nn.CrossEntropyLoss(weight=WEIGHTS),
        outlying=(0,),
    ),
    Case(name="cross entropy over time", model=PerToken, data=per_token, loss=nn.CrossEntropyLoss(ignore_index=-100)),
    Case(
        name="cross entropy over time, weighted",
        model=PerToken,
        data=per_token,
        loss=nn.CrossEntropyLoss(weight=WEIGHTS),
    ),
    Case(name="nll", model=mlp, data=numbers(5), loss=nll),
    Case(name="focal loss", model=mlp, data=numbers(5), loss=focal),
    Case(
        name="mean of masked losses by hand",
        refused={"loop": "is a reduction over the batch"},
        model=mlp,
        data=ignoring,
        loss=mean_of_masked,
    ),
    Case(name="mean of masked losses, by criterion", model=mlp, data=ignoring, loss=mean_of_masked, criterion=True),
    Case(
        name="mean of masked tokens by hand",
        model=PerToken,
        data=uneven,
        loss=mean_of_masked,
        assumed=True,
    ),
    Case(name="mean of uneven tokens", model=PerToken, data=uneven, loss=F.cross_entropy),
    Case(name="mse, one number", model=scalar, data=regression(5, to=()), loss=nn.MSELoss()),
    Case(name="huber", model=scalar, data=regression(5, to=()), loss=nn.HuberLoss(delta=0.5)),
    Case(name="poisson nll", model=scalar, data=counts, loss=nn.PoissonNLLLoss(), outlying=(0,)),
    Case(name="gaussian nll", model=lambda: mlp(2), data=regression(5, to=()), loss=gaussian_nll),
    Case(
        name="bce with logits, positive weights",
        model=mlp,
        data=multi_label,
        loss=nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        outlying=(0,),
    ),
    Case(
        name="bce of sigmoids",
        model=mlp,
        data=multi_label,
        loss=lambda out, y: F.binary_cross_entropy(out.sigmoid(), y),
        outlying=(0,),
        raises=("nan",),
    ),
    Case(
        name="soft margin of many labels",
        model=mlp,
        data=multi_label,
        loss=nn.MultiLabelSoftMarginLoss(),
        outlying=(0,),
    ),
    Case(name="dice of rows", model=mlp, data=multi_label, loss=dice, outlying=(0,)),
    Case(name="kl divergence", model=mlp, data=soft_targets, loss=kl),
    Case(name="multi-class margin", model=mlp, data=numbers(5), loss=svm),
    Case(name="hinge", model=scalar, data=signs, loss=binary_hinge, outlying=(0,)),
    Case(name="triplets", model=Towers, data=triplets, loss=triplet, outlying=(0, 1)),
    Case(name="cosine embedding", model=Towers, data=same, loss=cosine, outlying=(0, 1)),
    Case(name="margin ranking", model=Towers, data=same, loss=ranking, outlying=(0, 1)),
    Case(name="ctc", model=Speech, data=spoken, loss=ctc),
    Case(name="ctc of rows", model=Speech, data=spoken, loss=ctc_of_rows),
]
