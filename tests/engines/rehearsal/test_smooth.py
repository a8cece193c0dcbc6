"""Are kinks taken out, in every spelling, and nothing else?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vestige.engines.per_example.recorded_ways import as_if_recorded
from vestige.engines.rehearsal.smooth import Smooth

KINKED = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
    torch.relu, torch.Tensor.relu, lambda x: x.clone().relu_(), F.relu,
]  # fmt: skip


@pytest.mark.parametrize("function", KINKED)
def test_kinks_are_smooth(function):
    x = torch.linspace(-8, 8, 33, dtype=torch.float64)
    with Smooth():
        found = function(x.clone())
    torch.testing.assert_close(found, F.softplus(x))


def test_the_rest_is_as_it_was():
    x = torch.linspace(-8, 8, 33)
    with Smooth():
        found = F.gelu(torch.tanh(x))
    assert torch.equal(found, F.gelu(torch.tanh(x)))


def test_a_model_that_asks_is_told_that_it_is_recorded():
    before = torch.cuda.is_current_stream_capturing
    with pytest.raises(KeyError), as_if_recorded():
        assert torch.cuda.is_current_stream_capturing()
        raise KeyError
    assert torch.cuda.is_current_stream_capturing is before
