"""Is a captured pass known by everything in its module that may make it another pass?"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vestige.engines.capture_guards import state_fingerprint


def twice(x, factor=2):
    return factor * x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.count, self.rate, self.name = nn.Linear(2, 2), 1000, 0.5, "a"
        self.config, self.sizes = SimpleNamespace(width=2000, depth=3), [1, 2]
        self.change, self.table = partial(twice, factor=3), torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        return self.layer(x)


class Other(Model):
    pass


def renamed(model):
    model.number = vars(model).pop("count")


def hooked(model):
    model.layer.register_forward_hook(lambda *_: None)


def moved(model):
    model.layer.weight.data = model.layer.weight.data.clone()


def written(model):
    model.table.add_(1)


def patched(model):
    type(model).forward = lambda self, x: 2 * self.layer(x)


CHANGES = {
    "a number": lambda model: setattr(model, "count", model.count + 1),
    "a rate": lambda model: setattr(model, "rate", 0.25),
    "a string": lambda model: setattr(model, "name", "b"),
    "a mode": lambda model: model.layer.eval(),
    "a number of a configuration": lambda model: setattr(model.config, "width", 1),
    "another configuration": lambda model: setattr(model, "config", SimpleNamespace(width=2001, depth=3)),
    "a list": lambda model: model.sizes.append(3),
    "a function's argument": lambda model: setattr(model, "change", partial(twice, factor=4)),
    "a new attribute": lambda model: setattr(model, "more", 1),
    "an attribute less": lambda model: delattr(model, "rate"),
    "another name": renamed,
    "another class": lambda model: setattr(model, "__class__", Other),
    "a forward pass of its own": lambda model: setattr(model, "forward", twice),
    "a hook": hooked,
    "a moved parameter": moved,
    "another parameter": lambda model: setattr(model.layer, "bias", nn.Parameter(torch.zeros(2))),
    "another buffer": lambda model: setattr(model, "mean", torch.zeros(2)),
    "another layer": lambda model: setattr(model, "layer", nn.Linear(2, 2)),
    "a tensor that is written to": written,
    "a class's forward pass": patched,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_module_is_seen(name, monkeypatch):
    monkeypatch.setattr(Model, "forward", Model.forward)  # as it was, after the test
    model = Model()
    seen = {}
    before = state_fingerprint(model, known=seen)
    assert state_fingerprint(model, known=seen) == before
    kept = dict(vars(model)), dict(vars(model.layer))  # no object's place is used again
    CHANGES[name](model)
    after = state_fingerprint(model, known=seen)
    assert after != before, kept
    assert state_fingerprint(model, known=seen) == after
    hash(after)


def test_what_is_equal_again_is_known_again():
    model, seen = Model(), {}
    before = state_fingerprint(model, known=seen)
    model.count, model.config.width = 7, 8
    assert state_fingerprint(model, known=seen) != before
    model.count, model.config.width = int("1000"), int("2000")
    assert state_fingerprint(model, known=seen) == before


@pytest.mark.parametrize("keep", [lambda each: each, lambda each: [each]], ids=["alone", "in a list"])
def test_an_activation_that_a_module_kept_is_gone_with_it(keep):
    model, seen = Model(), {}
    activation = torch.zeros(3)
    model.last, gone = keep(activation), weakref.ref(activation)
    state_fingerprint(model, known=seen)
    model.last = activation = None
    assert gone() is None


def test_a_model_that_leads_back_to_itself_is_collected():
    model = Model()
    model.call, model.layer.above = model.forward, [model]
    state_fingerprint(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
