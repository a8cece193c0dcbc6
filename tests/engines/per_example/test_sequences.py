"""Do recurrent layers and attention, written in parts that have rules, give the layers' own gradients?"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from engine_checks import Out, ask, check, clips, property_test, run, silent, sizes, square, targets
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis.composite_layers import recurrent
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat


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


class Packed(nn.Module):
    """Sequences of unequal length, the states given: by parameters, by each example, or not at all."""

    def __init__(self, layer: nn.Module, start: str) -> None:
        super().__init__()
        self.layer, self.start = layer, start
        rows = layer.num_layers * (2 if layer.bidirectional else 1)
        widths = [layer.proj_size or 3, 3][: 2 if isinstance(layer, nn.LSTM) else 1]
        self.first = nn.ParameterList([torch.randn(rows, 1, width) for width in widths])
        self.made = nn.ModuleList([nn.Linear(2, width) for width in widths])

    def forward(self, input: Tensor) -> Tensor:
        state = None
        if self.start == "learned":
            state = tuple(each.expand(-1, len(input), -1).contiguous() for each in self.first)
        elif self.start == "made":
            many = len(self.first[0])
            state = tuple(each(input[:, 0]).tanh().expand(many, -1, -1) * 2 for each in self.made)
        lengths = 1 + (input.abs().sum((1, 2)) * 10).long() % input.shape[1]
        packed = pack_padded_sequence(input, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, final = self.layer(packed, state if state is None or len(state) > 1 else state[0])
        output = pad_packed_sequence(output, batch_first=True, total_length=input.shape[1])[0]
        finals = final if isinstance(final, tuple) else (final,)
        return torch.cat([output.flatten(1), *(each.transpose(0, 1).flatten(1) for each in finals)], dim=1)


@property_test
@given(st.data())
def test_packed_sequences_and_states_of_their_own(data):
    torch.manual_seed(12)
    kind = data.draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]))
    options = {"num_layers": data.draw(st.integers(1, 2)), "bidirectional": data.draw(st.booleans())}
    if kind is nn.LSTM:
        options["proj_size"] = data.draw(st.integers(0, 2))
    if kind is nn.RNN:
        options["nonlinearity"] = data.draw(st.sampled_from(["tanh", "relu"]))
    layer = Packed(kind(2, 3, batch_first=True, **options), data.draw(st.sampled_from(["", "learned", "made"])))
    width = layer(torch.randn(1, 4, 2)).numel()
    examples = data.draw(st.integers(1, 5))
    silent(Out(layer, width=width), (torch.randn(examples, 4, 2), targets(examples)), reference=False)


class Uses(nn.Module):
    """A recurrent layer as models have it: see the cases."""

    def __init__(self, case: str, layer: nn.Module) -> None:
        super().__init__()
        self.case, self.layer = case, layer
        self.word = nn.Parameter(torch.randn(4, 2, 2))
        if case == "normed":
            parametrizations.weight_norm(layer, "weight_hh_l0")
            parametrizations.weight_norm(layer, "weight_ih_l0")
        if case == "frozen":
            layer.requires_grad_(False)
        if case == "half frozen":
            layer.weight_hh_l0.requires_grad_(False)
            layer.bias_ih_l0.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        input = input * self.word[0, 0]
        if self.case == "checkpointed":
            return checkpoint(self.layer, input, use_reentrant=False)[0]
        if self.case == "twice":
            return self.layer(self.layer(input)[0][..., :2])[0]
        if self.case == "public":  # a function of parameters alone, given to all
            return self.layer(input)[0] + self.layer(self.word)[1].sum()
        if self.case.startswith("states are rows"):
            hidden = input.sum(1)[None, :, :1].expand(1, -1, 3)
            words = torch.full((len(input), 2, 2), 0.5, dtype=input.dtype)
            if self.case.endswith("words spread"):
                words = self.word[:1].expand(len(input), -1, -1)
            elif self.case.endswith("words joined"):
                words = torch.cat([self.word[:1]] * len(input))
            return self.layer(words, hidden)[0]
        if self.case == "without gradients":
            with torch.no_grad():
                first = self.layer(input)[0]
            return self.layer(input * first.mean(-1, keepdim=True))[0]
        return self.layer(input)[0]


STARTS = ("states are rows", "states are rows, words spread", "states are rows, words joined")
CASES = ("normed", "frozen", "half frozen", "checkpointed", "twice", "public", *STARTS, "without gradients")


@pytest.mark.parametrize("case", CASES)
def test_uses_of_recurrent_layers(case):
    torch.manual_seed(13)
    model = Out(Uses(case, nn.GRU(2, 3, batch_first=True)), width=6 if case in STARTS else 12)
    silent(model, (torch.randn(4, 4, 2), targets(4)), reference=False)


@pytest.mark.parametrize("layer", [nn.LSTM(2, 3, 2, bidirectional=True, proj_size=2), nn.GRU(2, 3), nn.RNN(2, 3)])
def test_outside_a_pass_the_layer_gives_what_torch_gives_and_twice(layer):
    layer, input = layer.double(), torch.randn(5, 4, 2, dtype=torch.float64, requires_grad=True)
    frozen = copy.deepcopy(layer).requires_grad_(False)

    def flat(found):
        return torch.cat([each.flatten() for each in tree_leaves(found)])

    want, got = flat(layer(input)), flat(recurrent(frozen, input))
    torch.testing.assert_close(got, want)
    seed = torch.randn_like(want)
    (wanted,) = torch.autograd.grad(want, input, seed)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(got, input, seed, retain_graph=True)[0], wanted)
    with pytest.raises(ValueError, match="is given states of shapes"):
        recurrent(frozen, input, (torch.zeros(1, 1, 3),) * 2 if isinstance(layer, nn.LSTM) else torch.zeros(1, 1, 3))


class Starts(nn.Module):
    """States that are not each row's own."""

    def __init__(self, start) -> None:
        super().__init__()
        self.start, self.layer = start, nn.GRU(2, 3, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input, self.start(input).expand(1, len(input), 3))[0]


@pytest.mark.parametrize(
    "start", [lambda x: x[:, :1, :1].roll(1, 0).transpose(0, 1), lambda x: x[:1, :1, :1], lambda x: x.mean()]
)
def test_states_of_other_rows_are_refused(start):
    model = Out(Starts(start), width=12)
    layout = Layout.of(model)
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        ask(
            BookKeeping(model, square, layout),
            (torch.randn(4, 4, 2), targets(4)),
            layout.parameters(model),
            Flat(1.0),
            layout,
        )


class HalfPrecision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(2, 3, 2, bidirectional=True, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == torch.float64:
            return self.layer(input)[0]
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(input)[0].float()


def test_recurrent_layers_in_half_precision():
    torch.manual_seed(14)
    silent(Out(HalfPrecision(), width=24), (torch.randn(4, 4, 2), targets(4)), reference=False, tolerance=0.05)


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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for mismatched")
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
