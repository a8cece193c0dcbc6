"""What is attacked where no private data should be used? Made-up examples and a small linear model, by default."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vestige.tasks.task import Task

NAME = "stand-in"
WIDTH, USED, CLASSES = 16, 12, 4
"""Inputs of the model, how many of them the examples use, and classes: the rest is left to the canary's direction."""


def stand_in(examples: int, seed: int = 0) -> Task:
    """Normal inputs around a centre for each class, and a linear model with random weights."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.arange(2 * examples) % CLASSES
    inputs = torch.zeros(2 * examples, WIDTH)
    centres = torch.randn(CLASSES, USED, generator=random)
    inputs[:, :USED] = centres[targets] + torch.randn(2 * examples, USED, generator=random)
    model = nn.Sequential(nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / WIDTH**0.5)
    halves = [(inputs[:examples], targets[:examples]), (inputs[examples:], targets[examples:])]
    about = "Made-up examples and a linear model, for audits: nobody's data."
    return Task(NAME, model, functional.cross_entropy, halves[0], halves[1], CLASSES, about)
