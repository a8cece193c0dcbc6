"""Does the fast engine give the reference engine's answer, for every layer, shape, clip and accident?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from vestige import devices
from vestige.engines import bookkeeping, gradients
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.cuda_graphs import Captured
from vestige.engines.gradients import Geometry, Patches
from vestige.engines.reference import Reference
from vestige.engines.rehearsal import Dependent
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

property_test = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class PerGroup:
    """Each group of parameters scaled to a bound of its own."""

    bounds: tuple[float, ...]

    def factors(self, norms: Tensor) -> Tensor:
        return (torch.tensor(self.bounds, dtype=norms.dtype, device=norms.device) / norms).clamp(max=1.0)

    def sensitivity(self, layout: Layout) -> float:
        return sum(bound**2 for bound in self.bounds) ** 0.5


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def alternating(model: nn.Module) -> list[list[str]]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [names[::2], names[1::2]] if len(names) > 1 else [names]


def one_at_a_time(model: nn.Module, loss: Callable[..., Tensor], layout: Layout, batch, parameters) -> Tensor:
    """Every example's flat gradient in float64, by ordinary autograd on batches of one: [examples, size]."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, parameter in layout.parameters(exact).items():
            parameter.copy_(parameters[name])
    leaves, rows = layout.parameters(exact), []
    for example in zip(*batch, strict=True):
        *inputs, target = (part[None].double() if part.is_floating_point() else part[None] for part in example)
        grads = torch.autograd.grad(loss(exact(*inputs), target), list(leaves.values()), allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
        rows.append(torch.cat([g.reshape(-1) for g in filled]))
    return torch.stack(rows) if rows else torch.zeros(0, layout.size, dtype=torch.float64)


def clipped(rows: Tensor, clip, layout: Layout) -> tuple[Tensor, Tensor]:
    members = [[rows[:, s.start : s.stop] for s in layout.segments if s.group == g] for g in range(layout.groups)]
    norms = torch.stack([torch.cat(group, dim=1).norm(dim=1) for group in members], dim=1)
    factors = clip.factors(norms)
    total = torch.cat([factors[:, s.group] @ rows[:, s.start : s.stop] for s in layout.segments])
    return total, norms


def ask(engine, batch, parameters, clip, layout) -> tuple[Tensor, Tensor]:
    into = torch.full((layout.size,), 0.25)  # what is there stays there
    norms = engine(batch, parameters, clip, into)
    return into - 0.25, norms


def close(got: Tensor, want: Tensor, tolerance: float = 2e-4) -> None:
    scale = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * scale + 1e-7)


def check(
    model, batch, loss=square, clip=None, grouping=None, tolerance=2e-4, shift=False, reference=True, quiet=False
):
    """The engine, the reference and one-at-a-time float64 gradients agree on sum and norms."""
    layout = Layout.of(model, grouping)
    parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    if shift:
        parameters = {name: p + 0.1 * torch.randn_like(p) for name, p in parameters.items()}
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    rows = one_at_a_time(model, loss, layout, batch, parameters)
    clip = clip or Flat(0.5 * (rows.norm(dim=1).median().item() if len(rows) else 1.0) + 1e-3)
    total, norms = clipped(rows, clip, layout)
    engine = BookKeeping(model, loss, layout)
    for _ in range(2):  # with a fresh plan, and with a kept one
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("error")
            got, got_norms = ask(engine, batch, parameters, clip, layout)
        close(got, total, tolerance)
        close(got_norms, norms, tolerance)
    if reference:
        same, same_norms = ask(Reference(model, loss, layout), batch, parameters, clip, layout)
        close(same, got, tolerance)
        close(same_norms, got_norms, tolerance)
    assert got_norms.dtype == torch.float64
    assert got_norms.shape == (len(batch[0]), layout.groups)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    return engine


def silent(*args, **kwargs):
    """Check, and insist that no fallback was needed."""
    return check(*args, quiet=True, **kwargs)


class Out(nn.Module):
    """A model around a layer: any output becomes a vector per example, through a nonlinearity and a linear head."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(input)).flatten(1))


def targets(examples: int, width: int = 2) -> Tensor:
    return torch.randn(examples, width)


clips = st.sampled_from([None, Flat(1e-3), Flat(1e6), "groups"])
sizes = st.integers(0, 5)


def run(model: nn.Module, batch, clip, **options):
    if clip == "groups":
        clip = PerGroup((0.05, 0.3)) if len(list(model.parameters())) > 1 else None
        return silent(model, batch, clip=clip, grouping=alternating, **options)
    return silent(model, batch, clip=clip, **options)


@property_test
@given(sizes, st.lists(st.integers(1, 6), max_size=3), st.integers(1, 7), st.integers(1, 7), st.booleans(), clips)
def test_linear_of_any_rank(examples, axes, width, out, bias, clip):
    torch.manual_seed(0)
    axes = tuple(axes)
    model = Out(nn.Linear(width, out, bias=bias), width=torch.Size(axes).numel() * out)
    run(model, (torch.randn(examples, *axes, width), targets(examples)), clip)


@property_test
@given(sizes, st.integers(2, 40), st.integers(1, 30), st.integers(1, 30))
def test_linear_over_long_and_short_sequences(examples, positions, width, out):
    """Both ways to a norm: from inner products, and from gradients."""
    torch.manual_seed(1)
    model = Out(nn.Linear(width, out), nn.Tanh(), nn.Linear(out, 3), width=3 * positions)
    run(model, (torch.randn(examples, positions, width), targets(examples)), None)


@property_test
@given(st.data())
def test_convolutions(data):
    torch.manual_seed(2)
    rank = data.draw(st.integers(1, 3))
    examples, groups = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))
    channels, outputs = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 4))

    def per_axis(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    kernel, dilation, stride = per_axis(1, 3), per_axis(1, 2), per_axis(1, 3)
    padding = data.draw(st.sampled_from(["same", "valid", per_axis(0, 2)]))
    if padding == "same":
        stride = (1,) * rank
    mode = data.draw(st.sampled_from(["zeros", "circular", "replicate"])) if padding != "valid" else "zeros"
    extra = per_axis(2, 5 if rank < 3 else 3)
    space = tuple(d * (k - 1) + 1 + more for k, d, more in zip(kernel, dilation, extra, strict=True))
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](
        channels, outputs, kernel, stride, padding, dilation, groups, data.draw(st.booleans()), mode
    )
    width = layer(torch.zeros(1, channels, *space)).numel()
    run(Out(layer, width=width), (torch.randn(examples, channels, *space), targets(examples)), data.draw(clips))


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"groups": 4, "dilation": 2}])
@pytest.mark.parametrize(("size", "by_pixels"), [(3, True), (4, True), (12, False)])
def test_convolution_norms_by_either_way(size, by_pixels, options):
    """Few positions and many channels: by inner products of pixels; many positions: by gradients."""
    torch.manual_seed(3)
    layer = nn.Conv2d(32, 64, 3, padding=1, **options)
    image = torch.randn(4, 32, size, size)
    signal = torch.randn_like(layer(image))
    pairs = [(n, n) for n in (3, options.get("stride", 1), 1, options.get("dilation", 1))]
    patches = Patches(image.double(), signal.double(), Geometry(*pairs, layer.groups))
    want = patches.dense().flatten(1).norm(dim=1)
    close(patches._ghost_squares().sqrt(), want, 1e-10)
    close(patches.norms(), want, 1e-10)
    if not options:
        assert (patches._ghost_cost() < patches._direct_cost()) == by_pixels
    silent(Out(layer, width=signal[0].numel()), (image, targets(4)))


@property_test
@given(sizes, st.lists(st.integers(1, 6), max_size=2), st.booleans(), clips)
def test_embedding(examples, axes, padded, clip):
    torch.manual_seed(4)
    axes = tuple(axes)
    model = Out(nn.Embedding(5, 4, padding_idx=1 if padded else None), width=4 * torch.Size(axes).numel())
    run(model, (torch.randint(0, 5, (examples, *axes)), targets(examples)), clip)


@property_test
@given(sizes, st.lists(st.integers(1, 5), max_size=2), st.sampled_from(["layer", "layer2", "rms", "nobias"]), clips)
def test_layer_norms(examples, axes, kind, clip):
    torch.manual_seed(5)
    shape = (*axes, 3, 4)
    layer = {
        "layer": lambda: nn.LayerNorm(4),
        "layer2": lambda: nn.LayerNorm((3, 4)),
        "rms": lambda: nn.RMSNorm(4),
        "nobias": lambda: nn.LayerNorm(4, bias=False),
    }[kind]()
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn_like(layer.weight))
    run(Out(layer, width=torch.Size(shape).numel()), (torch.randn(examples, *shape) + 1, targets(examples)), clip)


@property_test
@given(sizes, st.integers(1, 3), st.sampled_from(["group", "one", "instance"]), clips)
def test_group_and_instance_norms(examples, rank, kind, clip):
    torch.manual_seed(6)
    layer = {
        "group": lambda: nn.GroupNorm(2, 4),
        "one": lambda: nn.GroupNorm(1, 4),
        "instance": lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1](4, affine=True),
    }[kind]()
    with torch.no_grad():
        layer.weight.add_(0.3 * torch.randn(4))
    shape = (4, *[3] * rank)
    run(Out(layer, width=4 * 3**rank), (torch.randn(examples, *shape) + 1, targets(examples)), clip)


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


class Positions(nn.Module):
    """A small language model with everything: tokens, positions without a batch axis, tied or separate head."""

    def __init__(self, tied: bool, leading: bool = False, words: int = 6, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.leading = leading
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places[None] if self.leading else places)
        return self.head(self.norm(torch.tanh(x.cumsum(1))))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("examples", [1, 3, 5])  # as many as positions: the axes must not be confused
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("width", [4, 24])  # narrow: gradients are materialised; wide: they stay factored
def test_language_model(examples, tied, leading, width):
    torch.manual_seed(12)
    model = Positions(tied, leading, words=30, width=width)
    batch = (torch.randint(0, 30, (examples, 5)), torch.randint(0, 30, (examples, 5)))
    batch[0][:, 2:] = batch[1][:, :3]  # the words read are the words predicted: the two gradients overlap
    silent(model, batch, loss=token_loss)


def test_cross_entropy_with_an_ignored_target():
    torch.manual_seed(13)
    model, inputs, labels = nn.Linear(3, 4), torch.randn(4, 3), torch.tensor([1, -100, 3, 0])
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        silent(model, (inputs[[0, 2, 3]], labels[[0, 2, 3]]), loss=loss)
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    got = ask(BookKeeping(model, F.cross_entropy, layout), (inputs, labels), parameters, Flat(0.1), layout)
    want = ask(Reference(model, F.cross_entropy, layout), (inputs, labels), parameters, Flat(0.1), layout)
    close(got[0], want[0])
    close(got[1], want[1])


class Twice(nn.Module):
    """A layer used twice, on inputs of different shapes, around another."""

    def __init__(self, layer: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.between(torch.tanh(self.layer(input))))).flatten(1)


@pytest.mark.parametrize(
    ("layer", "between", "shape"),
    [
        (nn.Linear(4, 4), nn.Identity(), (4,)),
        (nn.Linear(4, 4), nn.Linear(4, 4), (9, 4)),
        (nn.Linear(16, 16), nn.Identity(), (3, 16)),
        (nn.Conv1d(6, 6, 3, padding=1), nn.AvgPool1d(2), (6, 8)),
        (nn.Conv2d(12, 12, 3, padding=1), nn.MaxPool2d(2), (12, 4, 4)),
        (nn.LayerNorm(4), nn.Linear(4, 4), (2, 4)),
        (nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1), (4, 5)),
    ],
)
def test_layer_used_twice(layer, between, shape):
    """Its two gradients add up before the norm is taken: norms of the sum, not sums of the norms."""
    torch.manual_seed(14)
    model = Twice(layer, between)
    inputs = torch.randn(5, *shape)
    silent(model, (inputs, torch.randn_like(model(inputs))))


class Shuffled(nn.Module):
    """Folds positions into the batch axis, as window attention does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input.flatten(0, 1)).reshape(len(input), -1)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(3, 5, 2), nn.GroupNorm(3, 3), nn.LayerNorm(4)])
@pytest.mark.parametrize("examples", [1, 4])
def test_positions_folded_into_the_batch_axis(layer, examples):
    torch.manual_seed(15)
    shape = (4,) if isinstance(layer, nn.Linear) else (3, 4)
    inputs = torch.randn(examples, 2, *shape)
    model = Shuffled(layer)
    silent(model, (inputs, torch.randn_like(model(inputs))))


class Tokens(nn.Module):
    """A vision transformer's habits: a class token, a table of positions, a scale per channel, all bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.place = nn.Parameter(torch.randn(1, 5, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.patch(input).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        return self.head(self.block(x)[:, 0])


@pytest.mark.parametrize("examples", [1, 4, 5])
def test_class_token_and_positions_need_no_fallback(examples):
    torch.manual_seed(16)
    silent(Tokens(), (torch.randn(examples, 1, 4, 4), targets(examples)))


class Biased(nn.Module):
    """A class token that may be expanded, beside a table of scores without examples whose output may not be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scores = nn.Parameter(torch.randn(1, 1, 4)), nn.Embedding(5, 2)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.first(torch.cat([self.token.expand(len(input), -1, -1), input], dim=1))
        distance = (torch.arange(3)[:, None] - torch.arange(3)).abs()
        scores = self.scores(distance).permute(2, 0, 1)[None]  # [1, heads, queries, keys], as T5 has them
        mixed = torch.softmax(scores, dim=-1) @ x[:, None]
        return self.head(torch.tanh(mixed.mean(dim=(1, 2))))


def test_a_table_without_examples_goes_through_functions_of_its_own():
    torch.manual_seed(16)
    silent(Biased(), (torch.randn(4, 2, 4), targets(4)))


class Scale(nn.Module):
    """A module without a rule, called with a tensor that has no examples besides one that has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, input: Tensor, *, offset: Tensor, power: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
        return self.scale**power * input + offset, {"other": self.scale.sum() * input.mean(dim=1)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(3, 4), Scale(4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        offset = torch.linspace(0, 1, 4, dtype=input.dtype).expand(4, 4)[0]
        output, extra = self.scale(self.first(input), offset=offset, power=2)
        output, extra = self.scale(output + extra["other"][:, None], offset=offset)
        return self.head(torch.tanh(output))


@pytest.mark.parametrize("examples", [0, 1, 4])
def test_a_module_of_the_users_own_needs_no_rule(examples):
    torch.manual_seed(17)
    silent(Scaled(), (torch.randn(examples, 3), targets(examples)))


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer: no hook on the layer can see that."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.tokens(tokens))), self.tokens.weight)


def test_a_parameter_used_outside_its_module_is_not_missed():
    torch.manual_seed(18)
    batch = (torch.randint(0, 6, (4, 3)), torch.randint(0, 6, (4, 3)))
    silent(Borrowed(), batch, loss=token_loss)


class Bare(nn.Module):
    """Bare parameters of every awkward kind in the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.gain = nn.Parameter(torch.rand(4))
        self.row = nn.Parameter(torch.randn(1, 4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, input: Tensor) -> Tensor:
        x = torch.tanh(self.first(input)) * self.gain
        return x + self.row[0]  # the first row only: it may not be given one row per example


def test_bare_parameters_of_the_outermost_module():
    torch.manual_seed(19)
    silent(Bare(), (torch.randn(4, 3), targets(4, 4)))


class TimeMajor(nn.Module):
    """Works with time first; with as many steps as examples the axes look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(2, 3), nn.LSTM(3, 3), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.first(input.transpose(0, 1))
        return self.head(self.lstm(x)[0][-1])


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_time_first_models_are_not_misread(steps):
    torch.manual_seed(20)
    model = TimeMajor()
    batch = (torch.randn(4, steps, 2), targets(4))
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    rows = one_at_a_time(model, square, layout, batch, parameters)
    want, norms = clipped(rows, Flat(0.1), layout)
    got, got_norms = ask(BookKeeping(model, square, layout), batch, parameters, Flat(0.1), layout)
    close(got, want)
    close(got_norms, norms)


class Mixing(nn.Module):
    """Subtracts the batch's mean, with or without letting the gradient through."""

    def __init__(self, detached: bool, first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.detached, self.first, self.drop = nn.Linear(3, 2), detached, first, nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        x = self.drop(input) if self.first else self.layer(self.drop(input))
        mean = x.mean(dim=0, keepdim=True)
        x = x - 0.5 * (mean.detach() if self.detached else mean)
        return self.layer(x) if self.first else x


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("tokens", [False, True])
def test_models_that_mix_examples_are_refused(detached, first, dropout, tokens):
    torch.manual_seed(21)
    model, inputs = Mixing(detached, first, dropout), torch.randn(4, 3)
    if tokens:
        model, inputs = nn.Sequential(nn.Embedding(5, 3), model), torch.arange(4)
    layout = Layout.of(model)
    with pytest.raises(Dependent, match="changes with the examples beside it"):
        BookKeeping(model, square, layout)(
            (inputs, targets(4)), layout.parameters(model), Flat(1.0), torch.zeros(layout.size)
        )


def test_running_statistics_are_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout.of(model)
    engine = BookKeeping(model, square, layout)
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\).*GroupNorm"):
        engine((torch.randn(4, 3), targets(4)), layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    silent(model.eval(), (torch.randn(4, 3), targets(4)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, lambda n: torch.randn(n, 5), F.cross_entropy, lambda n: torch.randint(0, 3, (n,))),
    "cnn": (cnn, lambda n: torch.randn(n, 2, 4, 4), F.cross_entropy, lambda n: torch.randint(0, 3, (n,))),
    "tokens": (Tokens, lambda n: torch.randn(n, 1, 4, 4), square, targets),
    "language": (lambda: Positions(tied=True), lambda n: sentences(n), token_loss, lambda n: sentences(n)),
}


def sentences(examples: int) -> Tensor:
    return torch.randint(0, 6, (examples, 5))


def sample(name: str, examples: int, seed: int = 0):
    torch.manual_seed(seed)
    model, inputs, loss, labels = MODELS[name]
    return model(), (inputs(examples), labels(examples)), loss


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("examples", [0, 1, 7])
def test_models_at_shifted_parameters(name, examples):
    """The gradient is asked where `parameters` says, not where the model happens to be."""
    model, batch, loss = sample(name, examples)
    silent(model, batch, loss=loss, shift=True)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_moves_the_sum_by_at_most_the_bound(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    engine, clip = BookKeeping(model, loss, layout), Flat(0.02)
    parameters = layout.parameters(model)
    everyone, norms = ask(engine, batch, parameters, clip, layout)
    assert (norms > clip.bound).all(), "the bound must bind for this test to mean anything"
    for left_out in range(6):
        rest = [torch.cat([part[:left_out], part[left_out + 1 :]]) for part in batch]
        without, _ = ask(engine, rest, parameters, clip, layout)
        moved = (everyone - without).norm().item()
        assert 0.99 * clip.bound <= moved <= clip.bound * (1 + 1e-4)


def test_cancelling_positions_do_not_hide_a_gradient():
    """Inner products of 1e8 cancel to a gradient of norm 8; by rounding it could look small, and pass unclipped."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(40, 40, bias=False)

        def forward(self, input: Tensor, weight: Tensor) -> Tensor:
            return (self.layer(input) * weight).flatten(1).sum(dim=1)

    torch.manual_seed(22)
    layout = Layout.of(model := Weighted())
    worst = 0.0
    for _ in range(20):
        base, direction = torch.randn(1, 1, 40), torch.randn(1, 1, 40)
        inputs = 300 * base + torch.zeros(1, 8, 40)
        weight = 50 * direction * torch.tensor([1.0, -1.0] * 4)[None, :, None]
        inputs[0, 0] += 0.02 * torch.randn(40)
        engine = BookKeeping(model, lambda output, target: output.sum() + 0 * target.sum(), layout)
        into = torch.zeros(layout.size)
        engine((inputs, weight, torch.zeros(1)), layout.parameters(model), Flat(1.0), into)
        worst = max(worst, into.norm().item())
    assert worst <= 1.0 + 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_any_physical_batch_gives_the_same_sum(name, chunk):
    model, batch, loss = sample(name, 7)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    want, want_norms = ask(engine, batch, parameters, Flat(0.1), layout)
    into, norms = torch.full((layout.size,), 0.25), []
    for parts in zip(*(part.split(chunk) for part in batch), strict=True):
        norms.append(engine(parts, parameters, Flat(0.1), into))
    close(into - 0.25, want)
    close(torch.cat(norms), want_norms)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_broken_example_counts_for_nothing_and_disturbs_nobody(name, value, at):
    model, batch, loss = sample(name, 5)
    model = nn.Sequential(nn.Linear(batch[0].shape[-1], batch[0].shape[-1]), model)
    batch[0][at].view(-1)[0] = value
    layout = Layout.of(model)
    parameters, engine = layout.parameters(model), BookKeeping(model, loss, layout)
    healthy = [torch.cat([part[:at], part[at + 1 :]]) for part in batch]
    want, want_norms = ask(engine, healthy, parameters, Flat(0.1), layout)
    got, norms = ask(engine, batch, parameters, Flat(0.1), layout)
    close(got, want)
    assert norms[at].isinf().all()
    close(torch.cat([norms[:at], norms[at + 1 :]]), want_norms)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
@pytest.mark.parametrize("size", [1e12, 1e25, 1e38])
def test_an_absurd_example_is_judged_as_the_reference_judges_it(name, size):
    model, batch, loss = sample(name, 5)
    batch[0][1] *= size
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    engine = BookKeeping(model, loss, layout)
    others = [torch.cat([part[:1], part[2:]]) for part in batch]
    for asked in (engine, Reference(model, loss, layout)):
        got, norms = ask(asked, batch, parameters, Flat(0.1), layout)
        rest, rest_norms = ask(asked, others, parameters, Flat(0.1), layout)
        # Its direction is a matter of rounding, where a softmax saturates; its share of the sum is not.
        share = float((got - rest).norm())
        assert share <= (1e-6 if norms[1].isinf() else 0.1 * (1 + 1e-4))
        close(torch.cat([norms[:1], norms[2:]]), rest_norms)
    want, want_norms = ask(Reference(model, loss, layout), others, parameters, Flat(0.1), layout)
    close(rest := ask(engine, others, parameters, Flat(0.1), layout)[0], want)
    whole = ask(Reference(model, loss, layout), batch, parameters, Flat(0.1), layout)[1]
    assert torch.equal(ask(engine, batch, parameters, Flat(0.1), layout)[1].isinf(), whole.isinf())
    assert rest.isfinite().all()
    assert engine.taps([part[2:] for part in batch]) is not None, "the next batch must not suffer for it"


@pytest.mark.parametrize("shape", [(5,), (4, 5), (40, 5)])
@pytest.mark.parametrize("size", [1e-25, 1e22])
def test_norms_beyond_the_squares_of_float32(shape, size):
    """Clipped like any other, as the reference does: only their squares overflow."""
    torch.manual_seed(23)
    model = nn.Linear(5, 3)
    inputs = torch.randn(4, *shape)
    inputs[2] *= size
    layout = Layout.of(model)
    batch = (inputs, torch.zeros(4, *shape[:-1], 3))

    def flat(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    got = ask(BookKeeping(model, flat, layout), batch, layout.parameters(model), Flat(0.1), layout)
    want = ask(Reference(model, flat, layout), batch, layout.parameters(model), Flat(0.1), layout)
    close(got[0], want[0])
    close(got[1].log(), want[1].log())


def test_a_batch_without_a_finite_example():
    model, batch, loss = sample("mlp", 3)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    total, norms = ask(engine, (torch.full_like(batch[0], torch.nan), batch[1]), parameters, Flat(0.1), layout)
    assert norms.isinf().all()
    assert not total.any()
    close(*(ask(e, batch, parameters, Flat(0.1), layout)[0] for e in (engine, Reference(model, loss, layout))))


class Products(TorchDispatchMode):
    """Writes down the shape of every matrix product and convolution gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.masks: list[list[bool]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::bmm", "aten::addmm_", "aten::addmm"):
            self.shapes.append(tuple(result.shape))
        if function._schema.name == "aten::convolution_backward":
            self.masks.append(list(args[-1]))
        return result


def test_frozen_parameters_cost_nothing():
    torch.manual_seed(24)
    model = nn.Sequential(
        nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 19), nn.Linear(19, 2)
    )
    for frozen in (model[0], model[4]):
        frozen.requires_grad_(False)
    batch = (torch.randn(3, 11), targets(3))
    engine = silent(model, batch)
    layout = Layout.of(model)
    with Products() as products:
        ask(engine, batch, layout.parameters(model), Flat(0.1), layout)
    assert (19, 17) not in products.shapes, "the weight gradient of a frozen layer"
    assert (13, 11) not in products.shapes
    assert (17, 13) in products.shapes
    assert products.shapes.count((3, 13)) == 1, "forward only: nothing trainable lies below"
    assert products.shapes.count((3, 17)) == 2, "forward, and the way down to the trainable layer"


def test_no_weight_gradient_is_formed_by_the_backward_pass():
    model, batch, loss = sample("cnn", 4)
    layout = Layout.of(model)
    engine = BookKeeping(model, loss, layout)
    parameters = layout.parameters(model)
    taps = engine.taps(batch)
    with Products() as products:
        engine.gradients(taps, batch, parameters)
    assert all(mask[1:] == [False, False] for mask in products.masks)
    assert products.masks
    assert all(parameter.grad is None for parameter in model.parameters())


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + 2 * self.up(self.down(input))


@pytest.mark.parametrize("shape", [(6,), (9, 6)])
def test_adapters_beside_frozen_layers(shape):
    torch.manual_seed(25)
    model = nn.Sequential(Adapter(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    inputs = torch.randn(4, *shape)
    model(inputs)
    silent(model, (inputs, targets(4)))


@pytest.mark.parametrize("name", MODELS)
def test_only_biases(name):
    model, batch, loss = sample(name, 4)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.endswith("bias"))
    silent(model, batch, loss=loss)


class Checkpointed(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = checkpoint(block, input, use_reentrant=False)
        return self.head(input.flatten(1))


def test_activation_checkpointing():
    torch.manual_seed(26)
    blocks = [
        nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4), nn.Dropout(0.0)) for _ in range(3)
    ]
    silent(Checkpointed(*blocks), (torch.randn(4, 4), targets(4)), reference=False)


def test_checkpointed_activations_are_not_kept():
    """What a tap saves goes through autograd, so it is dropped in the forward pass like everything else."""
    torch.manual_seed(27)
    model = Checkpointed(*[nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(3)])
    batch = (torch.randn(5, 4), targets(5))
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, square, layout), layout.parameters(model)
    taps = engine.taps(batch)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    now = taps.start(5, {name: p.detach() for name, p in parameters.items()}, lambda uses: None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), taps.watching(now):
        engine._losses(batch)
    assert (5, 9) not in saved
    assert (5, 4) in saved


@pytest.mark.parametrize("name", MODELS)
def test_autocast_keeps_norms_and_sums_in_float32(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    want, want_norms = ask(engine, batch, parameters, Flat(0.1), layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, norms = ask(engine, batch, parameters, Flat(0.1), layout)
    assert not torch.equal(got, want), "autocast had no effect"
    close(got, want, 0.1)
    close(norms, want_norms, 0.05)
    into = torch.zeros(layout.size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = engine([part[:1] for part in batch], parameters, Flat(1e-3), into)
    assert one.item() > 1e-3
    assert abs(into.norm().item() / 1e-3 - 1) < 1e-4, "one clipped example lies on the sphere, to float32"


class Regularised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.first(input))))


def test_dropout_differs_by_example_and_the_rehearsal_draws_nothing():
    torch.manual_seed(28)
    model = Regularised()
    batch = (torch.randn(1, 5).repeat(6, 1), torch.zeros(6, 2))
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    engine, answers = BookKeeping(model, square, layout), []
    for _ in range(2):  # a resumed run rehearses again, and must see the same dropout
        torch.manual_seed(5)
        answers.append(ask(engine, batch, parameters, Flat(0.1), layout))
    assert torch.equal(answers[0][0], answers[1][0])
    assert len(answers[0][1].unique()) == 6
    model.eval()
    norms = ask(engine, batch, parameters, Flat(0.1), layout)[1]
    close(norms, norms[:1].expand_as(norms))


class Ragged(nn.Module):
    """Runs a layer on the positive examples only: the number of rows is no multiple of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        output = self.first(input)
        chosen = (input[:, 0] > 0).nonzero()[:, 0]
        return output.index_add(0, chosen, self.some(input[chosen]))


def test_rows_that_do_not_fit_later_are_noticed():
    torch.manual_seed(29)
    model = Ragged()
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, square, layout), layout.parameters(model)
    inputs = torch.randn(5, 3)
    inputs[:3, 0], inputs[3:, 0] = 1.0, -1.0
    assert engine.taps((inputs[:3], targets(3))) is not None  # made-up numbers are all positive
    with (
        pytest.raises(Exception),
        pytest.warns(UserWarning, match="linear of some.*gave .3, 2. numbers for 5 examples"),
    ):
        engine((inputs, targets(5)), parameters, Flat(0.1), torch.zeros(layout.size))  # nor can vmap run it


def test_a_transform_is_left_to_the_reference():
    model, batch, loss = sample("mlp", 4)
    layout = Layout.of(model)
    parameters = layout.parameters(model)

    def doubled(field):
        return lambda p, *example: {name: 2 * g for name, g in field(p, *example).items()}

    into = torch.zeros(layout.size)
    norms = BookKeeping(model, loss, layout)(batch, parameters, Flat(1e6), into, doubled)
    want, want_norms = ask(Reference(model, loss, layout), batch, parameters, Flat(1e6), layout)
    close(into, 2 * want)
    close(norms, 2 * want_norms)


def test_the_model_is_left_as_it_was():
    model, batch, loss = sample("cnn", 4)
    layout = Layout.of(model)
    engine = BookKeeping(model, loss, layout)
    with torch.no_grad():  # callers need not allow gradients
        ask(engine, batch, layout.parameters(model), Flat(0.1), layout)
    assert copy.deepcopy(model)(batch[0]).equal(model(batch[0]))
    assert all(isinstance(parameter, nn.Parameter) and parameter.grad is None for parameter in model.parameters())
    wrong = (batch[0][:, :1], batch[1])
    with pytest.raises(RuntimeError, match="channels"):
        engine(wrong, layout.parameters(model), Flat(0.1), torch.zeros(layout.size))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place", "inner"])
def test_compiled_models(how):
    model, batch, loss = sample("cnn", 4)
    layout = Layout.of(model)
    want, want_norms = ask(BookKeeping(model, loss, layout), batch, layout.parameters(model), Flat(0.1), layout)
    compiled = model
    if how == "wrapped":
        compiled = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model[4].compile(backend="aot_eager")
    compiled(batch[0]).sum().backward()  # compiled before the engine sees it
    layout = Layout.of(compiled)
    got, norms = ask(BookKeeping(compiled, loss, layout), batch, layout.parameters(compiled), Flat(0.1), layout)
    close(got, want)
    close(norms, want_norms)
    assert compiled(batch[0]).shape == (4, 3)


def test_the_slack_for_tf32_tightens_every_share(monkeypatch):
    model, batch, loss = sample("mlp", 6)
    layout = Layout.of(model)
    arguments = (batch, layout.parameters(model), Flat(0.1), layout)
    want, _ = ask(BookKeeping(model, loss, layout), *arguments)
    monkeypatch.setattr(bookkeeping, "slack", lambda into: 0.5)
    got, _ = ask(BookKeeping(model, loss, layout), *arguments)
    close(got, 0.5 * want)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("convolutions", [False, True])
def test_there_is_slack_where_tf32_may_round_up(products, convolutions, monkeypatch):
    monkeypatch.setattr(devices, "tf32_products", lambda: products)
    monkeypatch.setattr(devices, "tf32_convolutions", lambda: convolutions)
    rounded = 1 + 2**-10  # each factor of a product, at most
    share = rounded**2 * devices.slack(SimpleNamespace(is_cuda=True))
    assert share == pytest.approx(1.0 if products or convolutions else rounded**2, abs=1e-12)
    assert devices.slack(torch.zeros(1)) == 1.0  # a CPU does not round so


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2, "padding": 1}, {"groups": 4}])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_norms_of_the_terms_of_a_convolution_add_up(rank, options):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](8, 12, 2, **options).double()
    image = torch.randn(3, 8, *[6] * rank).double()
    signal = torch.randn_like(layer(image))
    geometry = Geometry(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    want = torch.zeros(3).double()
    for place in range(signal[0, 0].numel()):  # one term at a time: the signal of one position
        for group in range(layer.groups):
            one = torch.zeros_like(signal).flatten(2)
            rows = slice(group * 12 // layer.groups, (group + 1) * 12 // layer.groups)
            one[:, rows, place] = signal.flatten(2)[:, rows, place]
            want += Patches(image, one.view_as(signal), geometry).dense().flatten(1).norm(dim=1)
    close(Patches(image, signal, geometry)._lengths(), want, 1e-10)


def rounded(tensor: Tensor, nearest: bool) -> Tensor:
    """As TF32 keeps it: ten bits after the leading one, the rest rounded or cut."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (0x1000 if nearest else 0)) & ~0x1FFF).view(torch.float32)


def cancelling(nearest: bool, device: str = "cpu") -> Patches:
    """Neighbours of a chequered image cancel in the gradient, all but a little that TF32 makes five times as much."""
    half = 2**-11 if nearest else 2**-10
    white = (torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0
    image = torch.where(white, 1 + 0.9 * half, 1 + 1.1 * half).expand(2, 48, 8, 8).contiguous()
    signal = torch.where(white, 1.0, -1.0) * (1 + torch.rand(2, 64, 1, 1))
    pairs = [(n, n) for n in (1, 1, 0, 1)]
    return Patches(image.to(device), signal.to(device), Geometry(*pairs, 1))


@pytest.mark.parametrize("measured", ["exactly", "in tf32"])
@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("kind", ["cancelling", "random"])
def test_however_terms_cancel_tf32_lifts_no_share_over_the_bound(kind, nearest, measured, monkeypatch):
    patches = cancelling(nearest)
    if kind == "random":
        patches = replace(patches, image=torch.randn_like(patches.image), signal=torch.randn_like(patches.signal))

    def in_tf32(image: Tensor, signal: Tensor) -> Patches:
        return replace(patches, image=rounded(image, nearest).double(), signal=rounded(signal, nearest).double())

    looked_at = in_tf32(patches.image, patches.signal) if measured == "in tf32" else patches
    bare = looked_at.norms()
    monkeypatch.setattr(gradients, "convolves_in_tf32", lambda tensor: True)
    norms = looked_at.norms()
    close(norms, bare + devices.MARGIN * looked_at._lengths())
    bound = 0.3 * bare.min().item()

    def shares(norms: Tensor) -> Tensor:
        factors = (bound / norms).float().view(-1, 1, 1, 1)
        return in_tf32(patches.image, factors * patches.signal).dense().flatten(1).norm(dim=1)

    assert (shares(norms) <= bound).all()
    if kind == "cancelling" and measured == "exactly":
        assert (shares(bare) > 4 * bound).all(), "nothing to guard against here"
    if kind == "random":
        assert (norms < 1.1 * bare).all(), "a dear margin"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nearest", [True, False])
def test_on_a_gpu_no_convolution_in_tf32_lifts_a_share_over_the_bound(nearest, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    patches = cancelling(nearest, "cuda")
    norms = patches.norms()
    for one in range(2):
        factors, share = torch.zeros(2, device="cuda"), torch.zeros(patches.shape, device="cuda")
        factors[one] = 0.01 / norms[one]
        patches.add(share, factors)
        assert share.norm() <= 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
def test_on_a_gpu_as_on_the_cpu(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    want, want_norms = ask(BookKeeping(model, loss, layout), batch, layout.parameters(model), Flat(0.1), layout)
    model, batch = model.cuda(), [part.cuda() for part in batch]
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size, device="cuda")
    norms = engine(batch, layout.parameters(model), Flat(0.1), into)
    close(into.cpu(), want, 5e-3)
    close(norms.cpu(), want_norms, 5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("broken", [False, True])
def test_a_step_can_be_captured_in_a_cuda_graph(broken):
    model, batch, loss = sample("cnn", 6)
    model, batch = model.cuda(), [part.cuda() for part in batch]
    if broken:
        batch[0][2].view(-1)[0] = torch.nan
    layout = Layout.of(model)
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size, device="cuda")
    parameters = layout.parameters(model)
    want_norms = engine(batch, parameters, Flat(0.1), into)
    want = into.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        engine(batch, parameters, Flat(0.1), into)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = engine(batch, parameters, Flat(0.1), into)
    into.zero_()
    graph.replay()
    close(into, want)
    close(norms[norms.isfinite()], want_norms[want_norms.isfinite()])
    assert bool(norms.isinf().any()) == broken


@pytest.mark.parametrize("kind", [BookKeeping, Captured])
def test_a_frozen_batch_norm_that_is_set_to_train_later_is_refused_before_it_sees_anything(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[1].requires_grad_(False).eval()
    layout = Layout.of(model)
    engine, batch = kind(model, F.cross_entropy, layout), [torch.randn(8, 5), torch.randint(3, (8,))]
    engine(batch, layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    model.train()
    with pytest.raises(ValueError, match="mixes the examples"):
        engine(batch, layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    assert not model[1].running_mean.any()
