"""Which networks can be trained privately? Small ones whose examples never meet: no BatchNorm, nothing in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (64, 32)) -> nn.Sequential:
    """The tanh classifier of the FO-DP-SGD paper, on flat inputs."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise((inputs, *hidden)):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear((inputs, *hidden)[-1], classes))
