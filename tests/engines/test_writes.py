"""Is nothing of the examples left in what a model holds, at the first pass or at a later one?"""

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


class Follows(nn.Module):
    """A linear layer, and a parameter, frozen or not, that follows the examples."""

    def __init__(self, what, trainable, first=0):
        super().__init__()
        self.linear, self.what, self.first, self.passes = nn.Linear(6, 3), what, first, 0
        self.centre = nn.Parameter(torch.ones(6), requires_grad=trainable)

    def forward(self, x):
        self.passes += 1
        if self.passes > self.first:
            getattr(self, self.what)(x.detach())
        return self.linear(x * self.centre)

    def data(self, x):
        self.centre.data.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)

    def written(self, x):
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)

    def replaced(self, x):
        self.centre = nn.Parameter(x.mean(dim=0), requires_grad=False)

    def harmless(self, x):
        self.centre.data.mul_(0.5)


@pytest.mark.parametrize("way", [trained, looped])
@pytest.mark.parametrize(
    ("what", "trainable", "first"),
    [("data", False, 0), ("data", True, 0), ("written", False, 0), ("written", False, 60), ("replaced", False, 60)],
)
def test_a_parameter_that_takes_something_of_the_examples_is_refused(way, what, trainable, first):
    model = Follows(what, trainable, first)
    held = model.centre
    with pytest.raises(ValueError, match="parameter 'centre' (is|was) changed by the forward pass"):
        way(model)
    if not first:
        assert model.centre is held
        assert torch.equal(held, torch.ones(6))


def test_a_parameter_that_changes_by_itself_is_allowed_and_the_rehearsal_leaves_it():
    model = Follows("harmless", False)
    _, model, _, loader = private(model, DATA)
    model(next(iter(loader))[0])
    assert torch.equal(model.centre, torch.full((6,), 0.5))
