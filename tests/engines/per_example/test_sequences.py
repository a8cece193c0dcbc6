"""Do recurrent layers and attention, written in parts that have rules, give the layers' own gradients?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from engine_checks import Out, check, clips, property_test, run, silent, sizes, targets


class Last(nn.Module):
    """A recurrent layer, called batch first or not, with or without an initial state."""

    def __init__(self, layer: nn.Module, state: bool) -> None:
        super().__init__()
        self.layer, self.state = layer, state

    def forward(self, input: Tensor) -> Tensor:
        input = input if self.layer.batch_first else input.transpose(0, 1)
        hidden = None
        if self.state:
            rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            batch = input.shape[0 if self.layer.batch_first else 1]
            hidden = input.new_full((rows, batch, self.layer.proj_size or 3), 0.3)
            if isinstance(self.layer, nn.LSTM):
                hidden = (hidden, input.new_full((rows, batch, 3), -0.2))
        output, final = self.layer(input, hidden)
        finals = final if isinstance(final, tuple) else (final,)
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return torch.cat([output.flatten(1), *(state.transpose(0, 1).flatten(1) for state in finals)], dim=1)


@property_test
@given(st.data())
def test_recurrent_layers(data):
    torch.manual_seed(7)
    kind = data.draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    options = {"num_layers": data.draw(st.integers(1, 2)), "bidirectional": data.draw(st.booleans())}
    options |= {"bias": data.draw(st.booleans()), "batch_first": data.draw(st.booleans())}
    if kind is nn.LSTM:
        options["proj_size"] = data.draw(st.integers(0, 2))
    if kind is nn.RNN:
        options["nonlinearity"] = data.draw(st.sampled_from(["tanh", "relu"]))
    examples, steps = data.draw(sizes), data.draw(st.integers(1, 4))
    layer = Last(kind(2, 3, **options), data.draw(st.booleans()))
    width = layer(torch.zeros(1, steps, 2)).numel()
    run(
        Out(layer, width=width), (torch.randn(examples, steps, 2), targets(examples)), data.draw(clips), reference=False
    )


class Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, input: Tensor) -> Tensor:
        state = None
        for step in input.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, dim=1) if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind):
    torch.manual_seed(8)
    layer = Cell(kind(2, 3))
    width = layer(torch.zeros(1, 4, 2)).numel()
    silent(Out(layer, width=width), (torch.randn(4, 4, 2), targets(4)), reference=False)


class Attending(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention, kind: str, weights: bool, mask: str) -> None:
        super().__init__()
        self.layer, self.kind, self.weights, self.mask = layer, kind, weights, mask
        self.other = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        other, third = self.other(input)[:, :2], input[:, 1:3]
        triple = {"self": (input,) * 3, "cross": (input, other, other), "three": (input, other, third)}[self.kind]
        masks = {}
        keys = triple[1].shape[1]
        if "causal" in self.mask and self.kind == "self":
            masks = {"attn_mask": torch.ones(3, 3, dtype=torch.bool).triu(1), "is_causal": True}
        if "float" in self.mask:
            masks = {"attn_mask": torch.linspace(-1, 1, 3 * keys, dtype=input.dtype).view(3, keys)}
        if "padding" in self.mask:
            masks["key_padding_mask"] = (torch.arange(keys) == 1).expand(len(input), keys)
        if not self.layer.batch_first:
            first = {id(part): part.transpose(0, 1) for part in triple}
            triple = tuple(first[id(part)] for part in triple)
        output, scores = self.layer(*triple, need_weights=self.weights, **masks)
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return output.flatten(1) if scores is None else torch.cat([output.flatten(1), scores.flatten(1)], dim=1)


@property_test
@given(
    sizes, st.sampled_from(["self", "cross", "three"]), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["", "causal", "float", "padding", "float padding"]), clips,
)  # fmt: skip
def test_attention(examples, kind, batch_first, bias, weights, mask, clip):
    torch.manual_seed(9)
    layer = Attending(nn.MultiheadAttention(4, 2, bias=bias, batch_first=batch_first), kind, weights, mask)
    width = layer(torch.zeros(1, 3, 4)).numel()
    run(Out(layer, width=width), (torch.randn(examples, 3, 4), targets(examples)), clip)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_unusual_attention_is_differentiated_one_example_at_a_time():
    torch.manual_seed(10)
    layer = Attending(nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), "self", False, "")
    check(Out(layer, width=12), (torch.randn(4, 3, 4), targets(4)))


def test_transformer_layers_in_either_mode():
    torch.manual_seed(11)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    silent(Out(block, width=12), (torch.randn(4, 3, 4), targets(4)))
    silent(Out(block, width=12).eval(), (torch.randn(4, 3, 4), targets(4)))
