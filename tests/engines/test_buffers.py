"""Is nothing of the examples left in a model's buffers, at the first pass or at a later one?"""

import itertools

import pytest
import torch
from torch import nn

import vestige
from loops import LOSS, private

DATA = torch.randn(40, 6), torch.randint(3, (40,))


class Remembers(nn.Module):
    """A linear layer that writes to a buffer from its pass number `first` on."""

    def __init__(self, what, first=0):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.passes, self.first, self.what = 0, first, what
        self.register_buffer("kept", torch.zeros(6))

    def forward(self, x):
        self.passes += 1
        if self.passes > self.first:
            getattr(self, self.what)(x.detach())
        return self.linear(x)

    def written(self, x):
        self.kept.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)

    def replaced(self, x):
        self.kept = x.mean(dim=0)

    def counted(self, x):
        self.kept += len(x)

    def added(self, x):
        self.register_buffer("other", x[:1].clone())

    def harmless(self, x):
        self.kept += 1


def trained(model):
    for _ in vestige.train(
        model, nn.functional.cross_entropy, DATA, method="dp-sgd", noise_multiplier=1.0, delta=1e-3, sample_rate=0.5,
        steps=100,
    ):  # fmt: skip
        pass


def looped(model):
    optimizer, loader = private(model, DATA)[2:]
    for x, y in itertools.chain.from_iterable(itertools.repeat(loader, 30)):
        LOSS(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("way", [trained, looped])
@pytest.mark.parametrize("first", [0, 60])
@pytest.mark.parametrize("what", ["written", "replaced", "counted", "added"])
def test_a_buffer_that_takes_something_of_the_examples_is_refused(way, first, what):
    with pytest.raises(ValueError, match="buffer '(kept|other)' (is|was) changed by the forward pass"):
        way(Remembers(what, first))


@pytest.mark.parametrize("way", [trained, looped])
def test_a_count_of_passes_is_allowed(way):
    way(Remembers("harmless"))
