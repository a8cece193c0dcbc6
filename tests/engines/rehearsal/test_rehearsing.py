"""Does a rehearsal find what mixes examples, and is what it could not know noticed later?"""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from engine_checks import ask, clipped, close, one_at_a_time, silent, square, targets
from vestige import PrivacyEngine
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.per_example.recorded_ways import as_if_recorded
from vestige.engines.per_example.taps import Taps
from vestige.engines.recorded.cuda_graphs import Captured
from vestige.engines.rehearsal import rehearsing
from vestige.engines.rehearsal.rehearsing import Dependent, made_up
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat


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


PLACED = {
    "the first is another": lambda x: torch.cat([2 * x[:1], x[1:]]),
    "by their number": lambda x: x * (1 + torch.arange(len(x))[:, None] / 4),
    "by turns": lambda x: x * (1 - 2.0 * (torch.arange(len(x)) % 2))[:, None],
}


class Placed(nn.Module):
    def __init__(self, way: str, dropout: float) -> None:
        super().__init__()
        self.layer, self.way, self.drop = nn.Linear(3, 2), way, nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(PLACED[self.way](self.drop(input)))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("way", PLACED)
def test_models_that_look_at_the_place_of_an_example_are_refused(way, dropout):
    model = Placed(way, dropout)
    layout = Layout.of(model)
    batch = torch.randn(4, 3), targets(4)
    with pytest.raises(Dependent, match="its place in the batch"):
        ask(BookKeeping(model, square, layout), batch, layout.parameters(model), Flat(1.0), layout)


def rolled(input: Tensor) -> Tensor:
    return 0.5 * input + 0.5 * input.roll(1, 0)


def shuffled(input: Tensor, order: Tensor) -> Tensor:
    return 0.5 * input + 0.5 * input[order]


BY_CHANCE = {
    "shuffled, by place": lambda x: shuffled(x, torch.rand(len(x)).argsort()),
    "shuffled, by name": lambda x: shuffled(x, torch.rand(size=(len(x),)).argsort()),
    "shuffled, by a list": lambda x: shuffled(x, torch.rand([len(x)]).argsort()),
    "a coin of Python's": lambda x: rolled(x) if random.random() < 0.5 else x,
    "a coin of NumPy's": lambda x: rolled(x) if np.random.rand() < 0.5 else x,  # noqa: NPY002
    "a coin of torch's": lambda x: rolled(x) if torch.rand(1) < 0.5 else x,
    "a draw in the middle": lambda x: rolled(x) if 0.3 < torch.rand([]) < 0.7 else x,
}


def mixed(x: Tensor) -> Tensor:
    return x - x.mean(dim=0, keepdim=True)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


FULL, NONE = torch.ones(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)
OTHER_WAYS = {
    "mixed": (lambda x, mask: mixed(x.mean(1)) if mask.all() else masked(x, mask), [FULL]),
    "mixed on the way back": (
        lambda x, mask: through("looks").apply(x.mean(1)) if mask.all() else masked(x, mask),
        [FULL],
    ),
    "mixed where gradients are asked for": (
        lambda x, mask: mixed(x.mean(1)) if mask.all() and torch.is_grad_enabled() else masked(x, mask),
        [FULL],
    ),
    "mixed, seen otherwise": (
        lambda x, mask: mixed(x.mean(1)) if min(mask.sum(1).tolist()) == 6 else masked(x, mask),
        [FULL],
    ),
    "mixed, not seen at all": (
        lambda x, mask: mixed(x.mean(1)) if len(x[mask.bool()]) == mask.numel() else masked(x, mask),
        [FULL],
    ),
    "another sum": (lambda x, mask: x.sum(1) if mask.all() else masked(x, mask), [FULL]),
    "another sum where nothing is padded": (lambda x, pad: masked(x, 1 - pad) if pad.any() else x.sum(1), [NONE]),
    "another sum, of a mask of numbers": (lambda x, mask: x.sum(1) if mask.min() == 1 else masked(x, mask), [FULL / 1]),
    "mixed where two masks are full": (
        lambda x, mask, other: mixed(x.mean(1)) if mask.all() and other.all() else masked(x, mask * other),
        [FULL, FULL],
    ),
    "mixed where numbers are bytes": (
        lambda x, image: mixed(x.mean(1)) if image.max() > 1 else x.mean(1) * image.float().mean(),
        [FULL.to(torch.uint8)],
    ),
    "smaller beside a byte": (
        lambda x, image: x.mean(1) * (image / 255 if image.max() > 1 else image / 1).mean(1, keepdim=True),
        [FULL.to(torch.uint8)],
    ),
    "apart": (lambda x, mask: x.mean(1) if mask.all() else masked(x, mask), [FULL]),
    "apart where nothing is padded": (lambda x, pad: masked(x, 1 - pad) if pad.any() else x.mean(1), [NONE]),
    "apart, and no number where all is shown": (
        lambda x, mask: x.mean(1) * torch.nan if mask.all() else masked(x, mask),
        [NONE],
    ),
}


class Looks(nn.Module):
    """Goes another way by what it is given beside the tokens."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.layer, self.way = nn.Embedding(5, 3), nn.Linear(3, 2), way

    def forward(self, tokens: Tensor, *masks: Tensor) -> Tensor:
        return self.layer(torch.tanh(OTHER_WAYS[self.way][0](self.words(tokens), *masks)))


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_another_way_by_what_is_given_keeps_examples_apart_too(way):
    torch.manual_seed(3)
    model = Looks(way)
    layout, engine = Layout.of(model), BookKeeping(model, square, Layout.of(model))
    batch = torch.randint(5, (4, 6)), *OTHER_WAYS[way][1], targets(4)
    if way.startswith("apart"):
        point = layout.parameters(model)
        got, _ = ask(engine, batch, point, Flat(1.0), layout)
        close(got, clipped(one_at_a_time(model, square, layout, batch, point), Flat(1.0), layout)[0])
        return
    with pytest.raises(Dependent, match="changes with the examples beside it"):
        ask(engine, batch, layout.parameters(model), Flat(1.0), layout)


class Halved(torch.autograd.Function):
    """Halves what comes back where something huge does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, signal):
        return signal / (2 if signal.abs().max() > 100 else 1)


FULL_OR_NOT, BYTES = (lambda given: given.all()), (lambda given: given.max() > 1)
SLIGHT_WAYS = {
    "an output where a mask is full": (FULL, FULL_OR_NOT, lambda x: x, lambda y, x: y + 1.0),
    "a gradient where a mask is full": (FULL, FULL_OR_NOT, torch.detach, lambda y, x: y),
    "an output beside a byte": (FULL.to(torch.uint8), BYTES, lambda x: x, lambda y, x: y + 1.0),
    "a gradient beside a byte": (FULL.to(torch.uint8), BYTES, torch.detach, lambda y, x: y),
    "an output beside huge ones where a mask is full": (
        *(FULL, FULL_OR_NOT, lambda x: x),
        lambda y, x: y + (x.detach().abs().max() > 10),
    ),
    "a gradient beside huge ones where a mask is full": (FULL, FULL_OR_NOT, Halved.apply, lambda y, x: y),
}


class Slight(nn.Module):
    """On another way its outputs or its gradients alone are others."""

    def __init__(self, way: str) -> None:
        super().__init__()
        _, self.looks, self.inside, self.after = SLIGHT_WAYS[way]
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        other, hidden = bool(self.looks(given)), torch.tanh(self.first(x))
        return self.after(self.last(self.inside(hidden)), x) if other else self.last(hidden)


@pytest.mark.parametrize("way", SLIGHT_WAYS)
def test_neither_outputs_nor_gradients_alone_are_others_on_another_way(way):
    torch.manual_seed(0)
    model, given = Slight(way), SLIGHT_WAYS[way][0]
    data = TensorDataset(torch.randn(4, 3), given, torch.randint(2, (4,)))
    model, _, loader = PrivacyEngine(reproducible=1).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    with pytest.raises(Dependent, match="changes with the examples beside it"):
        for x, mask, _ in loader:
            model(x, mask)


def test_another_way_by_a_layer_that_is_used_nowhere_else_keeps_examples_apart_too():
    class Seldom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer, self.seldom = nn.Embedding(5, 3), nn.Linear(3, 2), nn.Linear(3, 3)

        def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
            x = self.words(tokens).mean(1)
            return self.layer(torch.tanh(x if padding.any() else self.seldom(mixed(x))))

    model = Seldom()
    layout = Layout.of(model)
    with pytest.raises(Dependent, match="changes with the examples beside it"):
        ask(
            BookKeeping(model, square, layout), (torch.randint(5, (4, 6)), NONE, targets(4)),
            layout.parameters(model), Flat(1.0), layout,
        )  # fmt: skip


def test_a_rehearsal_counts_for_nothing_but_what_is_set_once_stays():
    class Counts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.seen += 1
            if not hasattr(self, "ready"):
                self.ready = self.register_forward_hook(lambda *_: None) is not None
            return super().forward(input)

    model = Counts(3, 2)
    model.seen = 0
    layout = Layout.of(model)
    engine = BookKeeping(model, square, layout)
    for passes in (1, 2):  # over the examples themselves
        ask(engine, (torch.randn(4, 3), targets(4)), layout.parameters(model), Flat(1.0), layout)
        assert model.seen == passes
        assert len(model._forward_hooks) == 1


class MixedByChance(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 2), way

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(BY_CHANCE[self.way](input))


@pytest.mark.parametrize("way", BY_CHANCE)
def test_examples_that_are_mixed_by_chance_are_refused(way):
    model = MixedByChance(way)
    layout, batch = Layout.of(model), (torch.randn(4, 3), targets(4))
    with pytest.raises(Dependent):
        ask(BookKeeping(model, square, layout), batch, layout.parameters(model), Flat(1.0), layout)


def test_running_statistics_are_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout.of(model)
    engine = BookKeeping(model, square, layout)
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\).*GroupNorm"):
        engine((torch.randn(4, 3), targets(4)), layout.parameters(model), Flat(1.0), torch.zeros(layout.size))
    silent(model.eval(), (torch.randn(4, 3), targets(4)))


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
    batch, into = (inputs, targets(5)), torch.zeros(layout.size)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        norms = engine(batch, parameters, Flat(0.1), into)
        for _ in range(3):
            engine(batch, parameters, Flat(0.1), torch.zeros(layout.size))
    (once,) = said
    assert "linear of some" in str(once.message)
    assert "did not give every example as many rows" in str(once.message)
    total, expected = clipped(one_at_a_time(model, square, layout, batch, parameters), Flat(0.1), layout)
    close(into, total)
    close(norms, expected)


class Chosen(nn.Module):
    """Runs a layer on the positive positions only, of all examples together."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, 1)
        chosen = (rows[:, 0] > 0).nonzero()[:, 0]
        return self.head(torch.tanh(rows.index_add(0, chosen, self.some(rows[chosen]))).view_as(input).mean(dim=1))


def test_rows_that_fit_by_accident_are_nobodys():
    """Twelve positions for four examples, but not three for each."""
    torch.manual_seed(30)
    inputs = torch.rand(4, 6, 3)
    inputs[:2, :, 0] *= -1
    model = Chosen()
    layout = Layout.of(model)
    batch, parameters, into = (inputs, targets(4)), layout.parameters(model), torch.zeros(layout.size)
    with pytest.warns(UserWarning, match="did not give every example as many rows"):
        norms = BookKeeping(model, square, layout)(batch, parameters, Flat(0.1), into)
    total, expected = clipped(one_at_a_time(model, square, layout, batch, parameters), Flat(0.1), layout)
    close(into, total)
    close(norms, expected)


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


def test_frozen_weights_in_bfloat16_round_more_and_mix_nothing():
    torch.manual_seed(0)
    frozen = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).bfloat16().requires_grad_(False)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = frozen, nn.Linear(64, 3)

        def forward(self, x):
            return self.head(self.frozen(x.bfloat16()).float())

    tolerances = []
    original = rehearsing._Rehearsing._check_independent

    def seen(self, three):
        tolerances.append(self.tolerance)
        return original(self, three)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsing._Rehearsing, "_check_independent", seen)
        model = Adapted()
        layout = Layout.of(model)
        batch = torch.randn(5, 64), torch.randint(3, (5,))
        BookKeeping(model, nn.functional.cross_entropy, layout)(
            batch, layout.parameters(model), Flat(1.0), torch.zeros(layout.size)
        )
    assert tolerances == [8 * torch.finfo(torch.bfloat16).eps]


def guarded(signal):
    """As many write it: where any number is not finite, nobody's gradient counts."""
    return torch.where(signal.isfinite().all(), signal, torch.zeros_like(signal))


def bounded(signal):
    return signal * (100 / signal.norm()).clamp(max=1.0)


def place(signal):
    return torch.arange(len(signal)).view(-1, 1)


BACKWARD = {
    "guards": lambda signal, saved: guarded(signal),
    "bounds": lambda signal, saved: bounded(signal),
    "bounds what is finite": lambda signal, saved: torch.where(signal.norm().isfinite(), bounded(signal), signal),
    "looks": lambda signal, saved: signal * (1 + saved.mean(dim=0, keepdim=True)),
    "flips": lambda signal, saved: signal * saved.flip(0).sign(),
    "counts": lambda signal, saved: signal if len(signal) % 2 else -signal,
    "divides": lambda signal, saved: signal / len(signal),
    "alternates": lambda signal, saved: torch.where(place(signal) % 2 == 0, signal, -signal),
    "reverses": lambda signal, saved: -signal,
    "guards each": lambda signal, saved: torch.where(signal.isfinite().all(1, keepdim=True), signal, 0.0),
}
APART = {"reverses", "guards each"}


def through(how):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, signal):
            return BACKWARD[how](signal, *ctx.saved_tensors)

    return Through


class Behind(nn.Module):
    """Each output is that of its example alone; but not what the backward pass makes of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(3, 4), nn.Linear(4, 2)
        self.again = False

    def block(self, x: Tensor) -> Tensor:
        if self.again:
            with torch.no_grad():
                x = x * x[:1].sum().sign() * 1e3
        return self.first(x)

    def __enter__(self) -> None:
        self.again = True

    def __exit__(self, *_: object) -> None:
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "recomputed":
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), self))
            return self.last(torch.tanh(x))
        if self.how == "unpacked":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * (1 + t[:1].mean())):
                return self.last(torch.tanh(self.block(x)))
        if self.how == "function":
            return self.last(torch.tanh(through("looks").apply(self.first(x))))
        return self.last(torch.tanh(checkpoint(self.block, x, use_reentrant=False)))


@pytest.mark.parametrize("how", ["recomputed", "unpacked", "function", "right"])
def test_what_looks_at_others_on_the_way_back_alone_is_found(how):
    model, batch = Behind(how), (torch.randn(6, 3), targets(6))
    layout = Layout.of(model)
    engine = BookKeeping(model, square, layout)
    if how == "right":
        ask(engine, batch, layout.parameters(model), Flat(1.0), layout)
        return
    with pytest.raises(Dependent, match="changes with the examples beside it"):
        ask(engine, batch, layout.parameters(model), Flat(1.0), layout)


class Backward(nn.Module):
    def __init__(self, how: str, hook: bool) -> None:
        super().__init__()
        self.how, self.hook, self.first, self.last = how, hook, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        if not self.hook:
            found = through(self.how).apply(found)
        elif found.requires_grad:
            saved = found.detach().clone()
            found.register_hook(lambda signal: BACKWARD[self.how](signal, saved))
        return self.last(torch.tanh(found))


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("how", BACKWARD)
def test_company_number_and_place_have_no_say_on_the_way_back(how, hook):
    torch.manual_seed(0)
    model, batch = Backward(how, hook), (torch.randn(6, 3), targets(6))
    layout = Layout.of(model)
    with nullcontext() if how in APART else pytest.raises(Dependent, match="changes with the examples beside it"):
        ask(BookKeeping(model, square, layout), batch, layout.parameters(model), Flat(1.0), layout)


class Jittering(Backward):
    """Rounds otherwise every time, as sums on a GPU do."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Jittering.calls += 1
        return super().forward(x) * (1 + 2e-7 * (Jittering.calls % 3))


@pytest.mark.parametrize("how", ["divides", "alternates", "reverses"])
def test_rounding_does_not_hide_what_number_and_place_say(how):
    torch.manual_seed(0)
    model, batch = Jittering(how, hook=False), (torch.randn(6, 3), targets(6))
    layout = Layout.of(model)
    with nullcontext() if how in APART else pytest.raises(Dependent, match="changes with the examples beside it"):
        ask(BookKeeping(model, square, layout), batch, layout.parameters(model), Flat(1.0), layout)


class Numbered(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Jittering.calls += 1
        return super().forward(x) * (1 + 2e-7 * (Jittering.calls % 3)) + place(x) % 2


def test_rounding_does_not_hide_a_place_in_the_outputs():
    model, batch = Numbered(3, 2), (torch.randn(6, 3), targets(6))
    layout = Layout.of(model)
    with pytest.raises(Dependent, match="its place in the batch"):
        ask(BookKeeping(model, square, layout), batch, layout.parameters(model), Flat(1.0), layout)


@pytest.mark.parametrize("how", ["guards", "bounds", "bounds what is finite", "reverses"])
def test_what_comes_back_to_others_has_no_say_where_their_numbers_are_tokens(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), Backward(how, hook=True))
    tokens = torch.randint(5, (6, 1))
    model, _, loader = PrivacyEngine().make_private(  # which does not know what its loop makes of the outputs
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(tokens), batch_size=6),
    )  # fmt: skip
    (batch,) = next(iter(loader))
    with nullcontext() if how in APART else pytest.raises(Dependent, match="changes with the examples beside it"):
        model(batch)


class Told(nn.Module):
    """Takes another way where it is told that it is recorded."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        told = torch.cuda.is_current_stream_capturing()
        if told and self.way == "mixes":
            return self.linear(x) + (x.abs().amax() > 1e6)
        if told and self.way == "mixes on the way back":
            return through("guards").apply(self.linear(x))
        if told and self.way == "ends elsewhere":
            return -self.linear(x)
        return self.linear(x)


@pytest.mark.parametrize("way", ["mixes", "mixes on the way back", "ends elsewhere", "the same"])
def test_a_told_way_is_tried_like_any_other(way, monkeypatch):
    monkeypatch.setattr(rehearsing, "_on_a_gpu", lambda environment: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = Told(way)
    taps = Taps(model, Layout.of(model))
    blank = [torch.zeros(1, 3)]
    found = rehearsing.rehearsed(taps, lambda rows: model(rows[0]), partial(made_up, blank, device=blank[0].device))
    taps.kinds, taps.recorded = found.kinds, found.recorded
    assert (taps.recorded is not None) is (way == "the same")
    with as_if_recorded():
        assert (taps.start(6, {}, lambda found: None).doubt is None) is (way == "the same")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"eos_token_id": 5, "vocab_size": 6}, 5),
        ({"eos_token_id": 6, "vocab_size": 6}, None),
        ({"eos_token_id": 6}, 6),
        ({}, None),
    ],
)
def test_sequences_end_with_a_token_of_the_vocabulary(config, found):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**config)
    assert rehearsing.endings(model)[-1] == found
