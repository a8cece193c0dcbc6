"""Does the parity check tell engines that agree from engines that don't?"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from commands import vestige as command
from conftest import make_toy
from vestige.engines import parity
from vestige.engines.bookkeeping import BookKeeping

LOSS = nn.functional.cross_entropy


def test_the_engines_agree_and_every_parameter_is_named():
    model, batch = make_toy()
    found = parity.compare_engines(model, LOSS, batch)
    assert found.agrees
    assert set(found.errors) == {name for name, _ in model.named_parameters()}
    assert max(found.errors.values()) < 1e-5
    assert all(cost.seconds > 0 for cost in found.costs.values())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="nobody counts a CPU's memory here")
def test_the_reference_engine_takes_the_memory_of_its_gradients():
    model = nn.Sequential(nn.Linear(500, 400), nn.Tanh(), nn.Linear(400, 10))
    batch = torch.randn(128, 500), torch.randint(10, (128,))
    costs = parity.compare_engines(model, LOSS, batch).costs
    gradients = 128 * 204_410 * 4 / 2**20  # about 100 MiB: one per example
    assert costs["reference"].peak_mib > 0.8 * gradients
    assert costs["unrecorded"].peak_mib < 0.3 * gradients


class Wrong(BookKeeping):
    def __call__(self, batch, parameters, clip, into, transform=None):
        norms = super().__call__(batch, parameters, clip, into, transform)
        into[:35] *= 1.01
        return norms


def test_an_engine_that_errs_in_one_layer_is_caught_there(monkeypatch):
    monkeypatch.setitem(parity.ENGINES, "bookkeeping", Wrong)
    found = parity.compare_engines(*(lambda toy: (toy[0], LOSS, toy[1]))(make_toy()))
    assert not found.agrees
    assert [name for name, error in found.errors.items() if error > parity.TOLERANCE] == ["0.weight"]


def test_a_non_finite_example_does_not_hide_a_difference():
    model, (x, y) = make_toy()
    x[0] = torch.nan
    assert parity.compare_engines(model, LOSS, (x, y)).agrees


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_command(words):
    code, out, _ = command("doctor", "digits-mlp", "--parity", "--batch", "16", *words)
    assert code == 0
    if words:
        assert json.loads(out)["parity"]["agrees"]
    else:
        assert "the engines agree on 16 examples" in out
