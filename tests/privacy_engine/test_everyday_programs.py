"""Do ordinary models and losses, in their libraries' defaults, step as one example at a time, proved and at once?"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

import vestige
from engine_checks import check
from loops import flat, oracle
from vestige.privacy_engine.microbatch_queue import MicrobatchQueue
from vestige.privacy_engine.row_labels import Tracking

ROWS, BOUND = 9, 0.5


def probabilities(x):
    return torch.softmax(x[:, :3] * 3, 1)


class Expanded(nn.Module):
    """Relative positions as XLNet has them: a parameter times positions that were expanded over the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.relative, self.head = nn.Parameter(torch.randn(6, 2, 3)), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.stack([x, x.flip(1), x * 2], 1)
        positions = torch.arange(3.0, dtype=x.dtype)[:, None, None].expand(-1, len(x), 6)
        keys = torch.einsum("jbh,hnd->jbnd", positions, self.relative.to(x.dtype))
        scores = torch.einsum("bind,jbnd->bnij", x.view(len(x), 3, 2, 3), keys)
        return self.head((x * scores.sum((1, 2, 3))[:, None, None] / 100).tanh().mean(1))


class Prefixed(nn.Module):
    """A cache that begins empty, as those of transformers do, with a prefix that is a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.prefix, self.head = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 3)

    def forward(self, x):
        kept = torch.cat([torch.tensor([], dtype=x.dtype), (self.prefix * 1)[None]], dim=-2)
        return self.head(x + kept.mean((0, 1)))


class Prompted(nn.Module):
    """The same words before every example, as peft's prefix tuning has them: numbers that are expanded over the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        prefix = self.words(torch.arange(4).unsqueeze(0).expand(len(x), -1)).view(len(x), 4, 2, 3).permute(0, 2, 1, 3)
        return self.head(torch.cat([prefix, x.view(-1, 2, 1, 3)], dim=2).tanh().sum(2).flatten(1))


class Inverted(nn.Module):
    """Of matrices that are inverted, which torch checks."""

    def __init__(self, invert):
        super().__init__()
        torch.manual_seed(3)
        self.map, self.head, self.invert = nn.Linear(6, 4), nn.Linear(2, 3), invert

    def forward(self, x):
        made = self.map(x).view(-1, 2, 2)
        return self.head(self.invert(torch.eye(2, dtype=x.dtype) + made.mT @ made).mean(1))


class Spectral(nn.Module):
    """Of functions of parameters that are complex numbers: a filter by frequency, and a long convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.filter, self.kernel = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(6))
        self.gain, self.head = nn.Parameter(torch.randn(4)), nn.Linear(6, 3)

    def forward(self, x):
        found = torch.fft.rfft(x) * torch.view_as_complex(self.filter) * torch.fft.rfft(self.kernel) * self.gain
        return self.head(torch.fft.irfft(found + torch.polar(self.gain, self.gain), n=6))


class Forces(nn.Module):
    """An energy and its derivative."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Ensemble(nn.Module):
    """Several layers at once, by `torch.func.vmap` over their weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weights, self.head = nn.Parameter(torch.randn(2, 6, 6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.func.vmap(lambda weight: (x @ weight).tanh())(self.weights).mean(0))


class Solved(nn.Module):
    """A system of equations of which all examples have the matrix; torch's vmap takes the solution for another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.matrix, self.head = nn.Parameter(torch.randn(6, 6) + 5 * torch.eye(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.linalg.solve(self.matrix, x[..., None])[..., 0])


class InParts(nn.Module):
    """Few examples at a time, to spare memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.head = nn.Conv1d(2, 4, 2), nn.Linear(8, 3)

    def forward(self, x):
        return torch.cat([self.head(self.layer(part.view(-1, 2, 3)).tanh().flatten(1)) for part in x.split(2)])


def linear():
    torch.manual_seed(3)
    return nn.Linear(6, 3)


def ctc(outputs, targets):
    steps = outputs.view(len(outputs), 6, 5).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(steps, targets % 4 + 1, torch.full((len(outputs),), 6), torch.full((len(outputs),), 2))


def wide():
    torch.manual_seed(3)
    return nn.Linear(6, 30)


def three(outputs, x):
    return F.mse_loss(outputs[:, :3], x[:, :3])


PROGRAMS = {
    "kl_div": (linear, lambda o, x: F.kl_div(o.log_softmax(1), probabilities(x), reduction="batchmean")),
    "kl_div by hand": (
        linear,
        lambda o, x: F.kl_div(o.log_softmax(1), probabilities(x), reduction="none").sum(1).mean(),
    ),
    "triplet": (linear, lambda o, x: F.triplet_margin_loss(o, x[:, :3], x[:, 3:])),
    "multi-margin": (linear, lambda o, x: F.multi_margin_loss(o, (x[:, 0] > 0).long())),
    "ctc": (wide, lambda o, x: ctc(o, (x[:, :2] * 7).long().abs())),
    "gaussian_nll": (linear, lambda o, x: F.gaussian_nll_loss(o[:, 0], x[:, 0], F.softplus(o[:, 1]))),
    "log_prob": (linear, lambda o, x: -Normal(o[:, 0], F.softplus(o[:, 1])).log_prob(x[:, 0]).mean()),
    "divergence": (linear, lambda o, x: kl_divergence(Normal(o[:, 0], o[:, 1].exp()), Normal(0.0, 1.0)).mean()),
    "inverse": (lambda: Inverted(torch.linalg.inv), lambda o, x: F.mse_loss(o, x[:, :3])),
    "cholesky": (lambda: Inverted(torch.linalg.cholesky), lambda o, x: F.mse_loss(o, x[:, :3])),
    "complex": (Spectral, lambda o, x: F.mse_loss(o, x[:, :3])),
    "expanded": (Expanded, lambda o, x: F.mse_loss(o, x[:, :3])),
    "prompt": (Prompted, lambda o, x: F.mse_loss(o, x[:, :3])),
    "prefix": (Prefixed, lambda o, x: F.mse_loss(o, x[:, :3])),
    "solved": (Solved, three),
    "derivatives": (Forces, three),
    "vmap over weights": (Ensemble, three),
    "in parts": (InParts, three),
}


def inputs():
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_proved_and_steps_as_one_example_at_a_time(name):
    make, loss = PROGRAMS[name]
    x = inputs()
    expected = oracle(make(), lambda model, row, target: loss(model(row), target), [(each, each) for each in x], BOUND)
    model = make()
    before = flat(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="examples cannot be proved")
        training = vestige.train(
            model, loss, (x, x), noise_multiplier=1e-6, delta=1e-5, steps=1, sample_rate=1.0, max_grad_norm=BOUND,
            lr=1.0, reproducible=7,
        )  # fmt: skip
        list(training)
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)
    assert not [
        each for each in training.guarantee().assumptions if each.status == "assumed" and each.name == "rows_apart"
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_its_loss_by_the_engines_criterion(name):
    make, loss = PROGRAMS[name]
    x, model, engine = inputs(), make(), vestige.PrivacyEngine(reproducible=3)
    expected = oracle(make(), lambda model, row, target: loss(model(row), target), [(each, each) for each in x], BOUND)
    before = flat(model)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=ROWS),
        noise_multiplier=1e-6, max_grad_norm=BOUND,
    )  # fmt: skip
    criterion = engine.criterion(loss)
    for row, target in loader:
        criterion(model(row), target).backward()
        optimizer.step()
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)


class ByRow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.map, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.stack([self.map(row) for row in x]))


class OwnLoss(nn.Module):
    """A model with a loss of its own, of which Python sees a value."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return {"loss": F.mse_loss(self.head(x), x[:, :3]) * (1.0 if float(x.sum()) < 1e9 else 0.0)}


@pytest.mark.parametrize(
    ("make", "loss"),
    [(ByRow, three), (OwnLoss, lambda o, _: o["loss"])],
    ids=["rows in turn", "a loss of the model's own"],
)
def test_examples_in_turn_and_what_is_not_proved(make, loss, recwarn):
    x = inputs()
    expected = oracle(make(), lambda model, row, target: loss(model(row), target), [(each, each) for each in x], BOUND)
    model = make()
    before = flat(model)
    list(
        vestige.train(
            model,
            loss,
            (x, x),
            noise_multiplier=1e-6,
            delta=1e-5,
            steps=1,
            sample_rate=1.0,
            max_grad_norm=BOUND,
            lr=1.0,
            reproducible=7,
        )
    )
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)
    assert any("examples cannot be proved" in str(each.message) for each in recwarn) is (make is OwnLoss)


def test_the_reference_takes_one_by_one_what_vmap_cannot():
    x = inputs()
    check(Solved(), (x, x[:, :3]))


LOSSES = {
    "several targets": (lambda o, x, w: (w[:, :1] * (o - x[:, :3]) ** 2).mean(), lambda x: (x, x)),
    "targets by name": (lambda o, targets: F.mse_loss(o, targets["x"][:, :3]), lambda x: ({"x": x},)),
    "a mask": (lambda o, x: F.mse_loss(o[x[:, :3] > -1], x[:, :3][x[:, :3] > -1]), lambda x: (x,)),
    "places": (lambda o, x: (o[torch.where(x[:, :3] > -1)] ** 2).sum(), lambda x: (x,)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_of_rows_is_taken_by_the_engines_criterion(name):
    loss, targets = LOSSES[name]
    x, model, engine = inputs(), linear(), vestige.PrivacyEngine(reproducible=3)
    expected = oracle(linear(), lambda model, row: loss(model(row), *targets(row)), [(each,) for each in x], BOUND)
    before = flat(model)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS),
        noise_multiplier=1e-6, max_grad_norm=BOUND,
    )  # fmt: skip
    criterion = engine.criterion(loss)
    for (row,) in loader:
        criterion(model(row), *targets(row)).backward()
        optimizer.step()
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)
    read = any("decides nothing of a loss" in each.detail for each in engine.guarantee(1e-5).assumptions)
    assert read == (name in ("a mask", "places"))


def stepped_once(make, loss, x):
    """The clipped sum of a loop's step, and that of one example at a time."""
    expected = oracle(make(), lambda model, row: loss(model, row), [(each,) for each in x], BOUND)
    model = make()
    before = flat(model)
    model, optimizer, loader = vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS),
        noise_multiplier=1e-6, max_grad_norm=BOUND,
    )  # fmt: skip
    for (row,) in loader:
        loss(model, row).backward()
        optimizer.step()
    return (before - flat(model)).double().numpy() * ROWS, expected


class Summed(nn.Module):
    """A model whose own loss is a sum over the batch."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return F.mse_loss(self.layer(x), x[:, :3], reduction="sum")


class Speech(nn.Module):
    """A model with a CTC loss as transformers' have it: targets are padded, and joined by what is not padding."""

    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = wide(), reduction

    def forward(self, x):
        targets = torch.where(x[:, :3] > -0.5, 1 + (x[:, :3].abs() * 7).long() % 4, -100)
        mask = targets >= 0
        likelihoods = self.layer(x).view(len(x), 6, 5).log_softmax(-1).transpose(0, 1)
        lengths = 4 + (x[:, 0] > 0).long()
        joined = targets.masked_select(mask)
        return F.ctc_loss(likelihoods, joined, lengths, mask.sum(-1), reduction=self.reduction, zero_infinity=True)


OWN_LOSSES = {
    "a sum inside": (Summed, lambda model, x: model(x)),
    "a sum over rows, divided": (
        linear,
        lambda m, x: (F.mse_loss(m(x), x[:, :3], reduction="sum") + m(x).square().sum()) / len(x),
    ),
    "ctc, mean": (lambda: Speech("mean"), lambda model, x: model(x)),
    "ctc, sum": (lambda: Speech("sum"), lambda model, x: model(x)),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_each_row_has_the_gradient_of_its_own_loss(name):
    found, expected = stepped_once(*OWN_LOSSES[name], inputs())
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=5e-5)


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_sum_that_is_not_divided_is_refused_where_a_mean_was_said(scale):
    with pytest.raises(ValueError, match="the loss is a sum over the batch: say loss_reduction='sum'"):
        stepped_once(linear, lambda m, x: scale * F.mse_loss(m(x), x[:, :3], reduction="sum"), inputs())


def test_what_a_mask_joins_is_for_a_ctc_loss_alone():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            chosen = (x[:, :3] * 7).long().masked_select(x[:, :3] > 0)
            assert chosen.shape == (3 * len(x),)  # the number of those that were chosen is not shown
            return self.layer(x) * chosen[: len(x), None]

    model, x = Joined(), inputs()
    model, _, loader = vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS),
        noise_multiplier=1e-6, max_grad_norm=BOUND,
    )  # fmt: skip
    with pytest.raises(ValueError, match="masked_select at .* joins what is chosen of several examples"):
        model(next(iter(loader))[0])


class Logits:
    def __init__(self, logits):
        self.logits = logits


class WithLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return Logits(self.layer(x))


@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()])
def test_torchs_losses_are_given_the_logits(loss):
    x, model = inputs(), WithLogits()
    chances = probabilities(x)
    expected = oracle(WithLogits(), lambda m, r, t: loss(m(r).logits, t), list(zip(x, chances, strict=True)), BOUND)
    before = flat(model)
    vestige.train(
        model, loss, (x, chances), noise_multiplier=1e-6, delta=1e-5, steps=1, sample_rate=1.0, max_grad_norm=BOUND,
        lr=1.0, reproducible=7,
    ).run()  # fmt: skip
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)


class OwnRate(torch.optim.SGD):
    """An optimizer that makes its own learning rate and has none to show, as transformers' Adafactor."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


def one_batch(model, optimizer=torch.optim.SGD):
    x = inputs()
    return vestige.PrivacyEngine(reproducible=3).make_private(
        module=model, optimizer=optimizer(model.parameters()),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS),
        noise_multiplier=1.0, max_grad_norm=BOUND,
    )  # fmt: skip


def test_an_optimizer_may_have_no_learning_rate():
    model, optimizer, loader = one_batch(linear(), OwnRate)
    before = flat(model)
    for (x,) in loader:
        three(model(x), x).backward()
        optimizer.step()
    assert not torch.equal(flat(model), before)


def test_anomaly_detection_is_refused_in_words():
    model, _, loader = one_batch(linear())
    for (x,) in loader:
        with torch.autograd.set_detect_anomaly(True), pytest.raises(ValueError, match="detect_anomaly looks at every"):
            model(x)
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            three(model(x), x).backward()


def test_an_optimizer_that_needs_several_gradients_is_refused():
    model = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="a step of LBFGS calls its closure for several gradients"):
        vestige.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.LBFGS(model.parameters()),
            data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs()), batch_size=3),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("rows", [2, ROWS])
def test_what_has_no_numbers_is_nobodys(rows):
    """As the part of a head that is not turned by its position, where all of it is."""
    x = inputs()[:rows]

    def change(x):
        heads = x[:, None, None]
        return torch.cat([heads[..., :-6], heads], dim=-1).sum((1, 2))

    torch.testing.assert_close(stepped(change, x).detach(), stepped(lambda x: x, x).detach())


# --- errors of libraries ----------------------------------------------------------------------------------------------


CHECKS = """
import torch

def simple(x):
    if (x < 0).any():
        raise ValueError("negative")
    return x * 2

def denied(x):
    if not (x > 0).all():
        said = "negative"
        raise ValueError(said)
    return x * 2

def several(x):
    if (x < 0).any() or x.isnan().any():
        raise ValueError("negative")
    return x * 2

def asserted(x):
    assert (x > 0).all() and x.isfinite().all(), "negative"
    return x * 2

def other_way(x):
    if (x < 0).any():
        x = -x
    return x * 2

def by_number(x):
    if x.min().item() < 0:
        raise ValueError("negative")
    return x * 2

def undecided(x):
    if (x < 0).any() or not (x < 5).all():
        raise ValueError("negative")
    return x * 2

def nested(x):
    if len([1] if (x < 0).any() else []) > 0:
        raise ValueError("negative")
    return x * 2

def handled(x):
    if (x < 0).any():
        return x
        raise ValueError("never")
    return x * 2

def torch_compilable_check(condition, message):
    torch._check_tensor_all_with(ValueError, condition, lambda: message)

def called(x):
    torch_compilable_check(
        x.min() > 0,
        f"negative: {x.min()}, {x.sum():.3f}",
    )
    return x * 2

def formatted(x):
    return x * len(f"{x.min()}")

def converted(x):
    torch_compilable_check(x[x > 0].numel() == x.numel(), "negative")
    return x * 2
"""
"""Of an installed library: those that only raise come first, `undecided` needs both answers."""


@pytest.fixture
def library(tmp_path, monkeypatch):
    from vestige.engines.example_axis import argument_checks

    path = tmp_path / "library.py"
    path.write_text(CHECKS)
    names = {}
    exec(compile(CHECKS, str(path), "exec"), names)
    monkeypatch.setattr(argument_checks, "LIBRARIES", str(tmp_path))
    return names


def stepped(change, x):
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(change(x))

    model, engine = Changed(), vestige.PrivacyEngine(reproducible=3)
    model, _, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=len(x)),
        noise_multiplier=1e-6, max_grad_norm=BOUND,
    )  # fmt: skip
    return model(next(iter(loader))[0])


@pytest.mark.parametrize("name", ["simple", "denied", "several", "asserted", "called"])
def test_a_check_of_a_library_that_only_raises_sees_nothing(name, library):
    for x in (inputs().abs() + 0.1, -inputs().abs() - 0.1):
        assert stepped(library[name], x).shape == (ROWS, 3)


@pytest.mark.parametrize("name", ["other_way", "by_number", "undecided", "nested", "handled", "formatted", "converted"])
def test_a_look_that_decides_anything_else_is_a_look(name, library):
    for x in (inputs().abs() + 0.1, -inputs().abs() - 0.1):
        with pytest.raises(ValueError, match="looks at a value of the examples"):
            stepped(library[name], x)


def raised(x):
    if (x < 0).any():
        raise ValueError("negative")
    return x


def called_by_the_user(x):
    torch._check_tensor_all_with(ValueError, x >= 0, lambda: "negative")
    return x


def named_like_a_check(x):
    def torch_compilable_check(condition, message):
        return condition

    torch_compilable_check(True, f"negative: {x.min()}")
    return x


@pytest.mark.parametrize("checked", [raised, called_by_the_user, named_like_a_check])
def test_a_check_of_the_users_own_is_a_look(checked):
    with pytest.raises(ValueError, match="looks at a value of the examples"):
        stepped(checked, inputs().abs())


@pytest.mark.parametrize("ending", [True, False])
def test_a_program_that_ends_with_an_iterator_of_the_loader_computes_nothing(ending, monkeypatch):
    queue, paused = MicrobatchQueue(Tracking(monkeypatch), lambda: None), []
    monkeypatch.setattr(queue, "pause", lambda: paused.append(True))
    with queue.handed_out(lambda: ending):
        pass
    assert bool(paused) != ending
