"""Is every use of a parameter watched: twice, tied, bare, borrowed, folded, beside frozen ones?"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine_checks import (
    MODELS,
    Positions,
    Tokens,
    ask,
    clipped,
    close,
    one_at_a_time,
    sample,
    silent,
    square,
    targets,
    token_loss,
)
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat


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


GIVEN = {
    "with heads": lambda table, rows: table.repeat(rows, 1, 1),
    "with heads, wider": lambda table, rows: table.repeat([rows, 1, 2])[..., 2:6],
    "several times": lambda table, rows: table.repeat(2 * rows, 1, 1).unflatten(0, (rows, 2, 2)).sum(dim=1).flatten(0, 1),
}  # fmt: skip
"""How a table [2 heads, positions, width] is given to each example: [examples x heads, positions, width]."""


class GivenToEach(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.way, self.through = nn.Parameter(torch.randn(2, 3, 4)), way, nn.Linear(4, 4)
        self.head = nn.Linear(30, 2)

    def forward(self, input: Tensor) -> Tensor:
        given = GIVEN[self.way](self.through(self.table), len(input))
        return self.head(torch.tanh(input.flatten(0, 1) @ given.transpose(1, 2)).reshape(len(input), -1))


@pytest.mark.parametrize("examples", [0, 1, 4])
@pytest.mark.parametrize("way", GIVEN)
def test_a_table_is_given_to_each_example(way, examples):
    torch.manual_seed(17)
    silent(GivenToEach(way), (torch.randn(examples, 2, 5, 4), targets(examples)))


class DroppedTable(nn.Module):
    """A table of which some numbers are left out, the same for all, as DeBERTa's relative positions are."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.table, self.inplace, self.head = nn.Parameter(torch.randn(3, 4)), inplace, nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.head(torch.tanh(input @ F.dropout(self.table * 1.0, 0.4, True, self.inplace).t()))


@pytest.mark.parametrize("inplace", [False, True])
def test_numbers_of_a_parameter_are_left_out_for_all_examples_alike(inplace):
    """Against ordinary gradients of one example at a time, in float32: torch draws other numbers in float64."""
    torch.manual_seed(18)
    model, inputs, wanted = DroppedTable(inplace), torch.randn(4, 4), targets(4)
    layout, into = Layout.of(model), torch.zeros(Layout.of(model).size)
    parameters = layout.parameters(model)
    rows = []
    for x, y in zip(inputs, wanted, strict=True):
        loss = F.mse_loss(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(parameters.values()))]))
    expected = torch.stack(rows)
    assert (expected[:, : 4 * 3] == 0).all(dim=0).any(), "some numbers are left out"
    norms = BookKeeping(model, F.mse_loss, layout)((inputs, wanted), parameters, Flat(1e6), into)
    torch.testing.assert_close(norms[:, 0].float(), expected.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(into, expected.sum(dim=0), rtol=1e-5, atol=1e-6)


def zeroed(table):
    table[1:, 2].zero_()
    return table


def filled(table):
    table[0][1:3].fill_(0.5)
    return table


def written(table):
    table[:, 1] = table[:, 2] * 2
    table[2, ...] = 0.0
    return table


def several(table):
    part = table[1]
    part *= 3.0
    part[:2] += 1.0
    return table


def before(table):
    """A part that was taken before the whole is changed, and one that is changed before."""
    first, second = table[0], table[1]
    inner = second[1:]
    second *= 2.0
    table *= 3.0
    inner += 1.0
    return torch.stack([first, second, torch.cat([table[2, :1], inner])])


CHANGES = {
    "divided": lambda table: table.__itruediv__(torch.tensor(3.0)),
    "div_": lambda table: table.div_(3.0),
    "added to": lambda table: table.__iadd__(0.5),
    "activated": lambda table: table.tanh_(),
    "masked": lambda table: table.masked_fill_(torch.eye(3, 4, dtype=torch.bool), 0.0),
    **{each.__name__: each for each in (zeroed, filled, written, several, before)},
}


class Changed(nn.Module):
    """A function of parameters that is changed in place: DeBERTa divides its queries of positions so, and torchvision's
    Swin V2 has no biases of keys."""

    def __init__(self, way: str, copy: str = "product", old: bool = False) -> None:
        super().__init__()
        self.table, self.way, self.head = nn.Parameter(torch.randn(3, 4)), way, nn.Linear(3, 2)
        self.copy, self.old = copy, old

    def forward(self, input: Tensor) -> Tensor:
        table = self.table * 2.0 if self.copy == "product" else self.table.clone()
        changed = CHANGES[self.way](table)
        return self.head(torch.tanh(input @ (table if self.old else changed).t()))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("copy", ["product", "clone"])
@pytest.mark.parametrize("way", CHANGES)
def test_a_function_of_parameters_is_changed_in_place(way, copy, old):
    torch.manual_seed(19)
    silent(Changed(way, copy, old), (torch.randn(4, 4), targets(4)))


class Overwritten(Changed):
    def forward(self, input: Tensor) -> Tensor:
        table = self.table * 2.0
        if self.way == "by examples":
            table[0] = input.mean(dim=0)
        else:  # through a view that is not followed
            table.view(-1)[:3].zero_()
        return self.head(torch.tanh(input @ table.t()))


@pytest.mark.parametrize(("way", "why"), [("by examples", "is a reduction over the batch"), ("through a view", None)])
def test_what_is_written_elsewhere_is_not_taken_for_the_same(way, why):
    torch.manual_seed(19)
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        silent(Overwritten(way), (torch.randn(4, 4), targets(4)))


class Masked(nn.Module):
    """Stretches of each example are replaced by a parameter, as sounds are for wav2vec 2.0."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.first, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.first(input)
        x[input[..., 0] > 0] = self.mask  # other places for each example, of some more and of some none
        return self.head(torch.tanh(x).mean(dim=1))


@pytest.mark.parametrize("examples", [0, 1, 5])
def test_a_parameter_is_written_into_places_of_the_examples(examples):
    torch.manual_seed(20)
    inputs = torch.randn(examples, 6, 4)
    inputs[:1, :, 0] = -1.0
    silent(Masked(), (inputs, targets(examples)))


class Skipping(nn.Module):
    """A layer that is skipped by chance, drawn on the host; the other way round it is one that is seldom used."""

    def __init__(self, seldom: bool) -> None:
        super().__init__()
        self.layer, self.head, self.seldom = nn.Linear(4, 4), nn.Linear(4, 2), seldom
        self.used: list[bool] = []

    def forward(self, input: Tensor) -> Tensor:
        drawn = float(torch.rand([]))
        self.used.append(drawn < 0.3 if self.seldom else drawn >= 0.3)
        x = F.dropout(input, 0.1, self.training)  # draws more for more examples
        return self.head(torch.tanh(self.layer(x) if self.used[-1] else x))


@pytest.mark.parametrize("seldom", [False, True])
def test_a_layer_that_is_skipped_by_chance(seldom):
    torch.manual_seed(21)
    model, batch = Skipping(seldom), (torch.randn(4, 4), targets(4))
    layout, parameters = Layout.of(model), Layout.of(model).parameters(model)
    engine = BookKeeping(model, F.mse_loss, layout)
    for _ in range(20):
        into = torch.zeros(layout.size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine(batch, parameters, Flat(1e6), into)
        assert bool(layout.views(into)["layer.weight"].any()) == model.used[-1]
    assert {*model.used[-20:]} == {True, False}


class Laid(nn.Module):
    """Numbers are left out of activations whose layout the fast engine does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.Linear(36, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.norm(self.first(input.to(memory_format=torch.channels_last)))
        return self.head(F.dropout(x, 0.5, self.training).flatten(1))


def test_numbers_are_left_out_in_another_layout():
    torch.manual_seed(22)
    model = Laid()
    engine, layout = BookKeeping(model.train(), F.mse_loss, Layout.of(model)), Layout.of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = torch.randn(4, 4, 3, 3), targets(4)
        engine(batch, layout.parameters(model), Flat(1.0), torch.zeros(layout.size))


class Kinked(nn.Module):
    """Numbers at the kink of a ReLU, rounded up in every other pass: gradients differ, and outputs do not."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.head, self.calls, self.share = nn.Linear(4, 8), nn.Linear(8, 2), 0, share

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(input)
        return self.head(self.share * F.relu(x - x.detach() + 1e-8 * (-1) ** self.calls) + torch.tanh(x))


class Attending(nn.Module):
    """Attention with weights of its own, as WavLM calls it, which drops out inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attend, self.dropout, self.head = nn.MultiheadAttention(4, 2), dropout, nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        own, x = self.attend, input.transpose(0, 1)
        weights = own.in_proj_weight, own.in_proj_bias, None, None, False, self.dropout
        out = F.multi_head_attention_forward(x, x, x, 4, 2, *weights, own.out_proj.weight, own.out_proj.bias)[0]
        return self.head(out.mean(dim=0))


def test_a_function_that_draws_inside_is_not_run_again(recwarn):
    torch.manual_seed(22)
    inputs = torch.randn(4, 3, 4), targets(4)
    silent(Attending(0.0), inputs)
    model = Attending(0.5).train()
    layout, before = Layout.of(model), len(recwarn)
    found, want = torch.zeros(layout.size), torch.zeros(layout.size)
    torch.manual_seed(3)
    BookKeeping(model, F.mse_loss, layout)(inputs, layout.parameters(model), Flat(1e9), found)
    torch.manual_seed(3)
    losses = F.mse_loss(model(inputs[0]), inputs[1], reduction="none").flatten(1).mean(dim=1)
    parameters = list(layout.parameters(model).values())
    torch.cat([each.flatten() for each in torch.autograd.grad(losses.sum(), parameters)], out=want)
    torch.testing.assert_close(found, want)
    assert len(recwarn) == before


HIDDEN = {
    "filled": lambda x, b: x.masked_fill_(x < 0, b),
    "clamped": lambda x, b: x.clamp_(min=b.abs() - 1.5),
    "copied": lambda x, b: x[:, 0].copy_(b.expand(len(x))),
    "written": lambda x, b: x.__setitem__((slice(None), slice(1, 3)), b),
    "written by a mask": lambda x, b: x.__setitem__(x < 0, b),
}
"""Where made-up examples, which are not negative, do not show it."""


class Hidden(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.b, self.way, self.head = nn.Parameter(torch.tensor(0.3)), way, nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = input.clone()
        HIDDEN[self.way](x, self.b)
        return self.head(x)


@pytest.mark.parametrize("examples", [1, 5])
@pytest.mark.parametrize("way", HIDDEN)
def test_a_parameter_that_is_written_in_place_is_not_missed(way, examples):
    torch.manual_seed(24)
    silent(Hidden(way), (torch.randn(examples, 4) * 3, targets(examples)))


class Pruned(nn.Module):
    """A weight that is changed through a view by numbers that change nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(2, 4)), torch.ones(2, 4)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.clone()
        weight.view(-1).mul_(self.mask.view(-1))
        return input @ weight.t()


def test_a_change_through_a_view_is_seen():
    torch.manual_seed(25)
    silent(Pruned(), (torch.randn(4, 4), targets(4)))


class Optional(nn.Module):
    """One weight on sequences with the examples second, if asked to, and then on others with them first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.randn(3, 3)), True

    def forward(self, input: Tensor) -> Tensor:
        x = input
        if self.more:
            x = (x.transpose(0, 1) @ self.weight).transpose(0, 1)
        return torch.tanh(x @ self.weight).sum(dim=1)


def test_a_use_that_is_left_out_does_not_lend_its_place():
    torch.manual_seed(26)
    model, batch = Optional(), (torch.randn(4, 4, 3), targets(4, 3))
    layout = Layout.of(model)
    engine = BookKeeping(model, F.mse_loss, layout)
    engine(batch, layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    model.more = False
    rows = one_at_a_time(model, F.mse_loss, layout, batch, layout.parameters(model))
    want, into = clipped(rows, Flat(1.0), layout)[0], torch.zeros(layout.size)
    engine(batch, layout.parameters(model), Flat(1.0), into)
    torch.testing.assert_close(into.double(), want, rtol=1e-4, atol=1e-6)


class Recurring(nn.Module):
    """A function of parameters that is made of itself over and over: there are 2**40 ways back."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        state = self.start
        for _ in range(40):
            state = torch.tanh(state) * torch.sigmoid(state)
        return self.head(input * state)


def test_a_function_with_many_ways_back_is_pulled_back_once():
    torch.manual_seed(23)
    silent(Recurring(), (torch.randn(4, 4), targets(4)))


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
    engine(batch, parameters, Flat(1.0), torch.zeros(layout.size))
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


class PaddedPositions(nn.Module):
    """Positions that no example chooses, one of them a padding row: it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.head = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(input + self.positions(torch.tensor([0, 1, 1, 2]))).sum(dim=1))


def test_a_padding_row_of_public_positions_has_no_gradient():
    torch.manual_seed(41)
    silent(PaddedPositions(), (torch.randn(6, 4, 3), torch.randn(6, 2)), loss=square)


class ChangedInPlace(nn.Module):
    """An activation is changed in place by a parameter, and used by another name."""

    def __init__(self, change) -> None:
        super().__init__()
        self.head, self.scale, self.change = nn.Linear(3, 2), nn.Parameter(torch.tensor([2.0, 3.0])), change

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.sin(self.head(input)) * 1.0
        before = hidden
        self.change(hidden, self.scale)
        return before


def augmented(hidden: Tensor, scale: Tensor) -> None:
    hidden *= scale


@pytest.mark.parametrize(
    "change", [Tensor.mul_, Tensor.add_, Tensor.sub_, Tensor.div_, augmented, lambda h, s: h.add_(s, alpha=3)]
)
def test_an_activation_is_changed_in_place(change):
    torch.manual_seed(42)
    silent(ChangedInPlace(change), (torch.randn(6, 3), torch.randn(6, 2)), loss=square)


class Windowed(nn.Module):
    """A function of parameters and of public numbers that are spread over the rows of all examples, met by rows: a bias
    with a mask for each window of each image."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.bias, self.way, self.head = nn.Parameter(torch.randn(1, 3, 4)), way, nn.Linear(12, 2)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.view(-1, 2, 3, 4).flatten(0, 1)  # two windows of each example
        public = torch.arange(24, dtype=input.dtype).view(1, 2, 3, 4).expand(len(input), -1, -1, -1).reshape(-1, 3, 4)
        if self.way == "attention":
            scores = (self.bias @ torch.ones(4, 3, dtype=input.dtype))[:, None] + public[:, None, :, :3]
            found = F.scaled_dot_product_attention(rows[:, None], rows[:, None], rows[:, None], scores)[:, 0]
        elif self.way == "two":  # of two parameters, by a function that is not linear
            found = torch.tanh(rows) * torch.lerp(self.bias, public, self.bias)
        else:
            found = torch.tanh(rows) + (self.bias + public if self.way == "sum" else torch.exp(self.bias * public / 24))
        return self.head(torch.tanh(found).flatten(1).unflatten(0, (-1, 2)).sum(dim=1))


@pytest.mark.parametrize("examples", [1, 2, 3])
@pytest.mark.parametrize("way", ["attention", "two", "sum", "exponential"])
def test_a_bias_with_entries_for_every_row_is_met_row_by_row(way, examples):
    torch.manual_seed(21)
    silent(Windowed(way), (torch.randn(examples, 24), targets(examples)))
