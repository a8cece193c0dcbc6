"""Is a model without chance the same for two examples and for three, and are models that count them still refused?"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vestige
from vestige.engines.rehearsal.calm import Calm


class Drawing(nn.Module):
    """Draws by functions, and may count its examples."""

    def __init__(self, counts):
        super().__init__()
        self.fc, self.counts = nn.Linear(6, 3), counts

    def forward(self, x):
        x = F.dropout(x, 0.3, self.training) + 0.1 * torch.randn_like(x)
        x = x * (torch.rand_like(x) < 0.8) * torch.bernoulli(torch.full_like(x, 0.9))
        return self.fc(x * len(x) if self.counts else x)


MODELS = {
    "functions": lambda: Drawing(False),
    "encoder": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True).self_attn,
    "rnn": lambda: nn.LSTM(6, 3, 2, dropout=0.5, batch_first=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_first_examples_stay_the_same(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(37, 5, 6)
    wanted = (lambda x: model(x, x, x)[0]) if name == "attention" else (lambda x: model(x))

    def first(x):
        found = wanted(x)
        return found[0] if isinstance(found, tuple) else found

    with Calm():
        torch.testing.assert_close(first(x)[:11], first(x[:11]))
    assert not torch.equal(first(x), first(x))  # there was chance


def trained(model):
    x, y = torch.randn(20, 6), torch.randint(3, (20,))
    for _ in vestige.train(
        model, F.cross_entropy, (x, y), method="dp-sgd", noise_multiplier=1.0, delta=1e-3, sample_rate=0.5, steps=1
    ):
        pass


def test_a_model_that_draws_is_trained_but_not_one_that_counts_its_examples():
    trained(Drawing(False))
    with pytest.raises(ValueError, match="the number of examples beside it"):
        trained(Drawing(True))


@pytest.mark.parametrize("tags", [(), (torch.Tag.nondeterministic_seeded,)])
def test_attention_drops_nothing_on_its_way_back_either(tags):
    """Of some kinds torch does not say that they draw again there."""
    given = []
    arguments = [SimpleNamespace(name=name) for name in ("grad_out", "dropout_p")]
    backward = mock.Mock(side_effect=lambda *args, **named: given.append((args, named)), tags=tags)
    backward._schema = SimpleNamespace(name="aten::_scaled_dot_product_flash_attention_backward", arguments=arguments)
    Calm().__torch_dispatch__(backward, (), (1.0, 0.1))
    Calm().__torch_dispatch__(backward, (), (1.0,), {"dropout_p": 0.1})
    assert given == [((1.0, 0.0), {}), ((1.0,), {"dropout_p": 0.0})]
