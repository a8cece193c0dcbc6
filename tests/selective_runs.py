"""What do the tests of selective methods share? Short runs with a gate, losses made to measure, and scripted trials."""

import torch
from torch import nn

import vestige
from conftest import make_toy
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.charges import Charges
from vestige.mechanism.comparisons import Comparisons
from vestige.mechanism.curator import Curator
from vestige.mechanism.examples import Examples
from vestige.mechanism.losses.loss_difference import losses_of, right_answers
from vestige.optim.gates import Attempt, NoisyLossTest
from vestige.priced_questions import SampledGaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson

LOSS = nn.functional.cross_entropy
COMMON = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 40, "lr": 0.5, "reproducible": 3}
TEST = {"validation_batch": 20, "sigma_v": 1.0, "threshold": -0.5}


def start(method, **changes):
    model, data = make_toy()
    return vestige.train(model, LOSS, data, method=method, **{**COMMON, **changes})


def weights(training):
    return torch.cat([p.detach().ravel() for p in training.model.parameters()])


def finished(method, **changes):
    training = start(method, **changes)
    records = list(training)
    return training, records


class Slope(nn.Module):
    """One weight w; `staircase` makes of it what a test needs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.w.expand(len(inputs), 1)


def staircase(outputs, targets):
    """Rises with the weight where the target is positive, falls where negative, and has no gradient anywhere."""
    return (targets * torch.floor(outputs[:, 0] * 1e6)).mean()


def curator_of(targets, *, seed=0, ask=lambda *a, **k: None, loss=staircase, model=None):
    model = model or Slope()
    targets = torch.as_tensor(targets, dtype=torch.float32)
    data = (torch.zeros(len(targets), 1), targets)
    layout = Layout.of(model)
    examples, key, charges = Examples(data, torch.device("cpu")), Randomness.reproducible(seed), Charges(ask)
    comparisons = Comparisons(examples, key, charges, losses_of(model, loss), right_answers(model))
    engine = Reference(model, loss, layout)
    return Curator(examples, engine, layout, Poisson(0.5), key, charges, comparisons=comparisons)


def at(value):
    return {"w": torch.tensor([float(value)])}


class Script:
    """A state and a curator that replay: each move adds one to `at`, and the loss changes come from a list."""

    def __init__(self, changes, coins=()):
        self.changes, self.coins = list(changes), list(coins)
        self.at, self.made, self.step, self.gate = 0, 0, 0, {}
        self.asked = []

    @property
    def parameters(self):
        return {"at": torch.tensor(float(self.at))}

    def snapshot(self):
        return {"at": self.at, "model": {"at": torch.tensor(float(self.at))}}

    def restore(self, snapshot):
        self.at = snapshot["at"]

    def trial(self, question):
        self.asked.append(question)
        return torch.no_grad()

    def loss_difference(self, before, after, change, *, step, part):
        return self.changes.pop(0)

    def coin(self, sides):
        side = self.coins.pop(0)
        assert side < sides
        return side

    def play(self, gate):
        """Every trial's candidate gets the next number; the sequence of where the state is after each."""
        gate = gate.at(1000)
        self.gate = gate.init()
        path = []

        def move(noise, lr):
            self.made += 1
            self.at = self.made
            return {}

        while self.changes:
            gate.settle(Attempt(self, self, move, lambda f: (SampledGaussian(0.1, f),), lambda: 0.0))
            self.step += 1
            path.append(self.at)
        return path


UNIT = NoisyLossTest(1.0, 1.0, -1.0, 100)
