"""What is a step on users with several rows? In float64, one user at a time."""

import copy

import numpy as np
import torch
from torch import nn

from conftest import make_toy

LOSS = nn.functional.cross_entropy
OWNERS = np.repeat(np.arange(17), [1, 7, 4, 3, 5, 2, 6, 1, 4, 3, 7, 2, 1, 6, 4, 3, 1])


class Words(nn.Module):
    """A table that is read and multiplied by, as in a language model, and an output in another order of axes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, x):
        words = self.table((10 * x).long().abs() % 11).tanh()
        return (words @ self.table.weight.t()).mean(dim=1)


def convolutions():
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


MODELS = {"mlp": lambda: make_toy()[0], "words": Words, "convolutions": convolutions}


def one_by_one(model, data, rows, bound, owners=OWNERS):
    """In float64, each user's mean gradient alone: their clipped sum."""
    inputs, targets = data
    net, total = copy.deepcopy(model).double(), 0.0
    for user in np.unique(owners[rows]):
        mine = torch.from_numpy(rows[owners[rows] == user])
        x = inputs[mine].double()
        gradients = torch.autograd.grad(LOSS(net(x), targets[mine]), list(net.parameters()))
        vector = torch.cat([each.flatten() for each in gradients])
        total = total + vector * min(1.0, bound / float(vector.norm()))
    return total
