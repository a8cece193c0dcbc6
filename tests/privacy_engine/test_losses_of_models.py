"""Is a loss that a model reduces over the batch by itself taken of each example, and is it one number to the model?"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import vestige
from loops import flat, oracle, private, same_step_of

ROWS = 12


def masked_by_row(h, x):
    counted = (x[:, :3] > 0).to(h.dtype)
    return ((h.square() * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def in_place(h, x):
    loss = h.square().mean()
    loss += h.abs().mean()
    loss *= 0.5
    return loss


def of_time_first(h, x):
    return torch.stack([h, h * 2]).square().mean()


def penalty(h):
    inner = h.detach().requires_grad_()
    return (
        torch.autograd.grad(inner.tanh().square().mean(), inner, create_graph=True)[0].square().sum() + h.square().sum()
    )


ACCEPTED = {
    "mean": lambda h, x: (h - 0.3).square().mean(),
    "torch.mean of both axes": lambda h, x: torch.mean((h - 0.3).abs(), dim=(0, 1)),
    "sum": lambda h, x: h.square().sum(),
    "a penalty on gradients": lambda h, x: penalty(h),
    "by row, then mean": lambda h, x: -(h.log_softmax(-1) * x[:, :3].softmax(-1)).sum(-1).mean(0),
    "picked": lambda h, x: -h.log_softmax(-1).gather(1, (x[:, :1] > 0).long()).mean(),
    "beside torch's": lambda h, x: F.mse_loss(h, x[:, :3]) + 0.5 * torch.mean(-0.5 * (1 + h - h.exp()).sum(1), dim=0),
    "torch's, reduced again": lambda h, x: F.mse_loss(h, x[:, :3]).mean(),
    "several, stacked": lambda h, x: torch.stack([h.square().mean(), F.l1_loss(h, x[:, :3])]).mean(),
    "several, summed": lambda h, x: sum([h.square().mean(), h.abs().mean()]),
    "in place": in_place,
    "a root": lambda h, x: (h - 0.3).square().mean().sqrt(),
    "masked by row": masked_by_row,
    "masked": lambda h, x: (h.square() * (x[:, :3] > 0)).sum() / (x[:, :3] > 0).sum().clamp(min=1),
    "merged": lambda h, x: h.view(-1).square().mean(),
    "time first": of_time_first,
}
NUMBERS = {
    "scales rows": lambda h, x: (h * h.abs().mean()).sum(),
    "centres rows": lambda h, x: (h.sum(1) - h.sum(1).mean()).square().mean(),
    "sum over rows": lambda h, x: h.square().sum() / len(h),
    "torch's sum, over rows": lambda h, x: F.mse_loss(h, x[:, :3], reduction="sum") / len(h),
    "sum over numbers": lambda h, x: (1 / h.numel()) * h.square().sum(),
    "stacked with one number": lambda h, x: torch.stack([h.square().mean(), torch.zeros((), dtype=h.dtype)]).sum(),
    "in a checkpoint": lambda h, x: checkpoint(lambda z: (z.square().mean() + 0.1).sqrt(), h, use_reentrant=False),
    "weights": lambda h, x: (h.square().mean() * torch.ones(ROWS, dtype=h.dtype)).sum(),
    "over the largest count": lambda h, x: h.square().sum() / (x > 0).sum(0).max(),
    "added to one number": lambda h, x: h.new_zeros(()).add_(h.square().mean()),
    "read": lambda h, x: h.square().mean() * (2 if h.square().mean().item() > 0 else 1),
    "asked": lambda h, x: h.square().mean() * (2 if h.square().mean() > 0 else 1),
    "as a float": lambda h, x: h.square().mean() * float(h.square().mean().detach()),
    "in a list": lambda h, x: h.square().mean() * torch.tensor([h.square().mean()]),
    "changed in place": lambda h, x: h.square().mean().clamp_(min=0),
}
"""Where the reduction is used as one number: it is everybody's."""


class OwnLoss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.loss = nn.Linear(5, 3), loss

    def forward(self, x):
        hidden = self.layer(x)
        loss = self.loss(hidden, x)
        return {"loss": loss, "logged": loss.detach(), "half": hidden.square().sum(), "logits": hidden}


def inputs():
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))


def own(model, x):
    return model(x)["loss"]


@pytest.mark.parametrize("scale", [1.0, 1e-2], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_loop_takes_the_loss_of_each_example(name, scale):
    _, model, optimizer, loader = private(OwnLoss(lambda h, x: ACCEPTED[name](scale * h, x)), (inputs(),))
    for (x,) in loader:
        same_step_of(own, model, optimizer, x, atol=3e-5 * scale)


def trains_as_one_at_a_time(model):
    x = inputs()
    expected, before = oracle(model, own, [(row,) for row in x], 0.5), flat(model)
    training = vestige.train(
        model, lambda o, _: o["loss"], (x, x), noise_multiplier=1e-9, delta=1e-5, steps=1, sample_rate=1.0,
        max_grad_norm=0.5, lr=1.0, reproducible=7,
    )  # fmt: skip
    list(training)
    np.testing.assert_allclose((before - flat(model)).double().numpy() * ROWS, expected, rtol=2e-3, atol=5e-5)


@pytest.mark.parametrize("name", ACCEPTED)
def test_training_proves_it(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="examples cannot be proved")
        trains_as_one_at_a_time(OwnLoss(ACCEPTED[name]))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_loop_refuses_one_that_the_model_uses_as_a_number(name):
    _, model, _, loader = private(OwnLoss(NUMBERS[name]), (inputs(),))
    for (x,) in loader:
        with pytest.raises(
            ValueError, match=r"is a reduction over the batch|looks at a value|reduction over the batch in"
        ):
            own(model, x).backward()


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_user_gets_the_numbers_that_the_model_would_have_made(name):
    """Of roots and other functions of a mean, the mean of each example's own."""
    plain, (_, model, _, loader) = OwnLoss(ACCEPTED[name]), private(OwnLoss(ACCEPTED[name]), (inputs(),))
    for (x,) in loader:
        outputs = model(x)
        expected = torch.stack([own(plain, row[None]) for row in x])
        expected = expected.sum() if name in ("sum", "a penalty on gradients") else expected.mean()
        for key in ("loss", "logged"):
            assert outputs[key].shape == ()
            torch.testing.assert_close(outputs[key].detach(), expected.detach(), check_dtype=False)
        torch.testing.assert_close(outputs["half"].detach(), plain(x)["half"].detach())


class Keeping(nn.Module):
    """Keeps its loss, to be looked at outside or used in the next pass."""

    def __init__(self, use=lambda loss, before: loss):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.use, self.kept = nn.Linear(5, 3), use, []

    def forward(self, x):
        loss = (self.layer(x) - x[:, :3]).square().mean()
        used = self.use(loss, self.kept[-1]) if self.kept else loss
        self.kept.append(loss.detach())
        return used


def test_a_loss_that_a_model_keeps_is_a_number_outside():
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    _, model, optimizer, loader = private(Keeping(), (x,))
    expected = []
    for (x,) in loader:
        with torch.no_grad():
            expected.append((model.layer(x) - x[:, :3]).square().mean())
        optimizer.zero_grad()
        loss = model(x)
        assert model.kept[-1].shape == expected[-1].shape
        loss.backward()
        assert f"{model.kept[-1]:.4f}" == f"{expected[-1]:.4f}"
        optimizer.step()
        assert float(model.kept[-1]) == pytest.approx(float(expected[-1]))
    torch.testing.assert_close(torch.stack(model.kept), torch.stack(expected))
    assert sum(model.kept).item() == pytest.approx(sum(expected).item())


@pytest.mark.parametrize(
    "use",
    [
        lambda loss, before: loss * (1 + before),
        lambda loss, before: loss / (0.1 + before),
        lambda loss, before: torch.stack([loss, before]).mean(),
    ],
    ids=["weight", "divisor", "mean"],
)
def test_a_loss_of_an_earlier_batch_is_everybodys_in_the_next(use):
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    _, model, optimizer, loader = private(Keeping(use), (x,))
    batches = iter(loader)
    model(next(batches)[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"mean at .*test_losses_of_models.py:\d+ is a reduction over the batch"):
        model(next(batches)[0]).backward()


def test_a_number_that_is_only_looked_at_hinders_no_training():
    """A statistic of the batch beside the logits."""

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            hidden = self.layer(x)
            spread = (hidden - hidden.mean()).abs().mean()
            assert hidden.mean().shape == ()
            return hidden, spread

    _, model, optimizer, loader = private(Watched(), (inputs(),))
    for (x,) in loader:
        same_step_of(lambda m, row: m(row)[0].square().mean(), model, optimizer, x)


@pytest.mark.parametrize("where", ["in the loss", "in the model"])
def test_a_loss_that_only_compares_examples_is_said_to_train_on_noise(where):
    def compared(h, x):
        h = F.normalize(h, dim=1)
        return F.cross_entropy(h @ h.mT / 0.1, torch.arange(len(h)))

    x = inputs()
    model = OwnLoss(compared) if where == "in the model" else nn.Linear(5, 3)
    loss = (lambda o, _: o["loss"]) if where == "in the model" else compared
    with pytest.warns(UserWarning, match="would move by noise alone"):
        vestige.train(model, loss, (x, x), noise_multiplier=1.0, delta=1e-5, steps=1, sample_rate=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*by noise alone")
        vestige.train(
            nn.Linear(5, 3), nn.MSELoss(), (x, x[:, :3]), noise_multiplier=1.0, delta=1e-5, steps=1, sample_rate=1.0
        )


@pytest.mark.parametrize("name", ["sum over rows", "sum over numbers", "stacked with one number", "in a checkpoint"])
def test_training_runs_such_a_model_one_example_at_a_time(name):
    """A sum may be scaled by the number of rows, which nobody can tell from other numbers."""
    with pytest.warns(UserWarning, match="one by one, exact but slow"):
        trains_as_one_at_a_time(OwnLoss(NUMBERS[name]))


def test_a_model_that_calls_itself_is_still_asked_what_it_reads():
    held = {}

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.inner = nn.Linear(5, 3), False

        def forward(self, x):
            hidden = self.layer(x)
            if self.inner:
                return hidden
            self.inner = True
            held["model"](x * 2)
            self.inner = False
            return hidden * (1.0 if x[3, 0].item() > 0 else -1.0)

    _, model, _, loader = private(Nested(), (inputs(),))
    held["model"] = model
    for (x,) in loader:
        with pytest.raises(ValueError, match="looks at a value of the examples"):
            model(x)
        break
