"""What do the tests of methods share? A short run, a curator of toy data, and a witness that keeps what no user sees."""

import torch
from torch import nn

import vestige
from conftest import example_gradients, make_toy
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.charges import Charges
from vestige.mechanism.curator import Curator
from vestige.mechanism.examples import Examples
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson

LOSS = nn.functional.cross_entropy


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def run(method, *, steps=5, rate=0.3, noise=1.0, lr=0.3, data=None, **changes):
    model, toy = make_toy()
    limits = {"sample_rate": rate, "steps": steps, "noise_multiplier": noise, "delta": 1e-5, "lr": lr}
    return vestige.train(model, LOSS, data or toy, method=method, reproducible=4, **limits, **changes)


class Spy:
    """A witness that keeps every un-noised sum and every noise vector."""

    def __init__(self):
        self.sums, self.noises = [], []

    def __call__(self, total, noise):
        self.sums.append(total.double().numpy())
        self.noises.append(noise.double().numpy().copy())


def curator_of(model, data, *, rate=1.0, spy=None, asked=None, sampling=None, seed=1):
    layout = Layout.of(model)
    return Curator(
        Examples(data, torch.device("cpu")),
        Reference(model, LOSS, layout),
        layout,
        sampling or Poisson(rate),
        Randomness.reproducible(seed),
        Charges((lambda question, **_: asked.append(question)) if asked is not None else (lambda *_, **__: None)),
        nonprivate_witness=spy,
    )


def gradients_at(model, vector, data):
    """Per-example gradients in float64 at a flat parameter vector."""
    clone = make_toy()[0]
    nn.utils.vector_to_parameters(torch.as_tensor(vector, dtype=torch.float32), clone.parameters())
    return example_gradients(clone, *data)
