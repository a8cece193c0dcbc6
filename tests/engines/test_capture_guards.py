"""Is a captured pass known by everything in its module that may make it another pass?"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vestige.engines.capture_guards import NamesRead, state_fingerprint


def twice(x, factor=2):
    return factor * x


class Slotted:
    __slots__ = ("width",)

    def __init__(self):
        self.width = 1


def method_replaced(model):
    Model.helped = lambda self, x: 2 * x


def class_attribute(model):
    Model.shared = 2.0


class Model(nn.Module):
    shared = 1.0

    def helped(self, x):
        return x

    def __init__(self):
        super().__init__()
        self.layer, self.count, self.rate, self.name = nn.Linear(2, 2), 1000, 0.5, "a"
        self.config, self.sizes = SimpleNamespace(width=2000, depth=3), [1, 2]
        self.change, self.table = partial(twice, factor=3), torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("square", torch.zeros(2, 2))
        self.held = {
            "deep": {"a": [1, {"b": [2.0, {"c": 3}]}]}, "array": np.zeros(2), "queue": deque([1, 2]), "slots": Slotted(),
            "many": list(range(100)), "tensors": [torch.zeros(2)], "modules": [nn.Dropout(0.5)],
            "draws": np.random.default_rng(1), "host": random.Random(1), "function": twice,
        }  # fmt: skip
        self.scale = np.float64(1.0)

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
    "a number deep inside": lambda model: model.held["deep"]["a"][1]["b"][1].update(c=4),
    "NumPy's array": lambda model: model.held["array"].fill(1),
    "NumPy's number": lambda model: setattr(model, "scale", np.float64(2.0)),
    "NumPy's generator": lambda model: model.held["draws"].random(),
    "Python's generator": lambda model: model.held["host"].random(),
    "a queue": lambda model: model.held["queue"].append(3),
    "an object with slots": lambda model: setattr(model.held["slots"], "width", 2),
    "one of many": lambda model: model.held["many"].__setitem__(77, -1),
    "a tensor in a list": lambda model: model.held["tensors"].__setitem__(0, torch.zeros(2)),
    "what a tensor in a list holds": lambda model: model.held["tensors"][0].add_(1),
    "the mode of a module in a list": lambda model: model.held["modules"][0].eval(),
    "a function in a dictionary": lambda model: model.held.update(function=hooked),
    "a class's number": class_attribute,
    "a class's method": method_replaced,
    "a kind of number": lambda model: setattr(model, "count", 1000.0),
    "a mode for a number": lambda model: setattr(model.layer, "training", 1),
    "a buffer's shape": lambda model: setattr(model, "mean", model.mean[:1]),
    "a buffer's strides": lambda model: setattr(model, "square", model.square.t()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_module_is_seen(name, monkeypatch):
    for each in ("forward", "helped", "shared"):
        monkeypatch.setattr(Model, each, vars(Model)[each])  # as it was, after the test
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


# --- what functions name ----------------------------------------------------------------------------------------------


class Schedule:
    """As a user's own object that a model asks."""

    shared = 1.0

    def __init__(self):
        self.factor, self.inner, self.rows = 1.0, SimpleNamespace(factor=1.0), [1.0, [1.0]]

    def value(self):
        return self.factor * self.shared * self.inner.factor * self.rows[1][0]


FACTOR, TABLE, SCHEDULE, BANK = 1.0, {"a": {"b": 1.0}}, Schedule(), [torch.ones(1)]


def by_global(x):
    return x * FACTOR * SCHEDULE.value() * TABLE["a"]["b"] * BANK[0]


def around():
    held, cell = [1.0], 1.0

    def by_closure(x):
        return by_global(x) * held[0] * cell

    def change(list_too):
        nonlocal cell
        if list_too:
            held[0] = 2.0
        else:
            cell = 1.5

    return by_closure, change


NAMED = {
    "a global": lambda change: globals().update(FACTOR=3.0),
    "its kind": lambda change: globals().update(FACTOR=1),
    "a global object": lambda change: setattr(SCHEDULE, "factor", 3.0),
    "its object": lambda change: setattr(SCHEDULE.inner, "factor", 3.0),
    "its list": lambda change: SCHEDULE.rows[1].__setitem__(0, 3.0),
    "a global table": lambda change: TABLE["a"].update(b=3.0),
    "a global tensor": lambda change: BANK.__setitem__(0, torch.full((1,), 3.0)),
    "a function's list": lambda change: change(True),
    "a function's number": lambda change: change(False),
}


@pytest.fixture
def _as_before(monkeypatch):
    again = {"FACTOR": 1.0, "TABLE": {"a": {"b": 1.0}}, "SCHEDULE": Schedule(), "BANK": [torch.ones(1)]}
    for name, value in again.items():
        monkeypatch.setitem(globals(), name, value)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("name", NAMED)
def test_a_change_of_what_functions_name_is_seen(name):
    names, (function, change) = NamesRead(), around()
    for _ in range(2):
        with names.watched():
            function(torch.ones(1))
    before = names.state()
    assert names.state() == before
    NAMED[name](change)
    assert names.state() != before


def test_a_pass_that_changes_what_it_names_is_another_one_afterwards():
    passes = [0]

    def counted():
        passes[0] += 1

    names = NamesRead()
    with names.watched():
        counted()
    before = names.state()
    counted()
    assert names.state() != before


def passed():
    held = torch.ones(3)

    def inner():
        return held * 2

    inner()
    return weakref.ref(held)


def test_functions_of_a_pass_are_not_kept():
    names = NamesRead()
    with names.watched():
        seen = passed()
    assert seen() is None


def test_a_profiler_at_work_stays_there():
    before = sys.getprofile()
    sys.setprofile(lambda *_: None)
    own = sys.getprofile()
    try:
        names = NamesRead()
        with names.watched():
            by_global(torch.ones(1))
        assert sys.getprofile() is own
    finally:
        sys.setprofile(before)
