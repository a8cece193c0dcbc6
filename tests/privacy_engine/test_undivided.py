"""Does what comes back to a row stay the same, to the last bit, when another row joins? And what others see?"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loops import private
from vestige.privacy_engine import outputs
from vestige.privacy_engine.outputs import End, of_rows

ROWS = 12
"""By which a float is not divided exactly. These and four fill whole registers: torch's own kernels round what is left
over otherwise."""
torch.manual_seed(5)
OUT, TARGETS, CLASSES = torch.randn(ROWS, 16), torch.rand(ROWS, 16), torch.randint(16, (ROWS,))
LOSSES = {
    "mse": F.mse_loss,
    "both ways": lambda out, y: F.mse_loss(y, out),
    "huber": F.huber_loss,
    "smooth": partial(F.smooth_l1_loss, beta=0.5),
    "soft margin": lambda out, y: F.soft_margin_loss(out, 2 * y - 1),
    "logits": partial(F.binary_cross_entropy_with_logits, pos_weight=torch.arange(16.0)),
    "probabilities": lambda out, y: F.binary_cross_entropy(out.sigmoid(), y, weight=torch.arange(16.0)),
    "mean": lambda out, y: (out - y).square().mean(),
    "divided by hand": lambda out, y: (out - y).square().sum() / len(y) / 3,
    "rows": lambda out, y: (out - y).square().sum(1).mean(0),
    "two": lambda out, y: 0.3 * F.l1_loss(out, y) + 0.7 * (out - y).square().sum() / len(y),
    "classes": F.cross_entropy,
    "weighted": partial(F.cross_entropy, weight=torch.arange(1.0, 17.0)),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "over time": lambda out, y: F.cross_entropy(out.view(-1, 4, 4), y.view(-1, 4)),
    "time first": lambda out, y: F.cross_entropy(out.view(-1, 4, 4).permute(2, 0, 1).flatten(0, 1), y.t().flatten()),
}


def come_back(loss, rows):
    """What comes back to the rows of a private model's outputs."""
    inside = OUT[rows].clone().requires_grad_()
    (out,) = End.apply(lambda reduction: None, torch.zeros((), requires_grad=True), len(rows), "mean", inside)
    loss(out, targets_of(loss)[rows]).backward()
    return inside.grad


def targets_of(loss):
    if loss in (LOSSES["over time"], LOSSES["time first"]):
        return torch.arange(4 * ROWS).view(ROWS, 4) % 4
    return CLASSES if getattr(loss, "func", loss) is F.cross_entropy else TARGETS


@pytest.fixture(autouse=True)
def watched():
    private(nn.Linear(6, 3))


@pytest.mark.parametrize("name", LOSSES)
def test_another_row_changes_no_bit(name):
    everyone, first = come_back(LOSSES[name], list(range(ROWS))), come_back(LOSSES[name], [0, 1, 2, 3])
    assert torch.equal(everyone[:4], first)


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_gradient_of_the_rows_own_loss(name):
    loss, targets = LOSSES[name], targets_of(LOSSES[name])
    for row in range(2):
        out = OUT[row : row + 1].double().requires_grad_()
        named = {
            key: value.double() for key, value in getattr(loss, "keywords", {}).items() if hasattr(value, "double")
        }
        target = targets[row : row + 1]
        value = partial(loss, **named)(out, target.double() if target.is_floating_point() else target)
        if name == "weighted":  # a single target's weight cancels; a private step divides by the mean weight instead
            value = value * named["weight"][target] / named["weight"].mean()
        elif name == "probabilities":
            value = F.binary_cross_entropy(out.sigmoid(), target.double(), weight=torch.arange(16.0).double())
        value.sum().backward()
        torch.testing.assert_close(come_back(loss, list(range(ROWS)))[row], out.grad[0].float(), rtol=2e-5, atol=1e-7)


def test_where_a_row_has_one_target_the_gradient_is_that_of_the_sum():
    ignored = int(CLASSES[1])
    for index in (ignored, -100):
        inside = OUT.clone().requires_grad_()
        F.cross_entropy(inside, CLASSES, ignore_index=index, reduction="sum").backward()
        got = come_back(partial(F.cross_entropy, ignore_index=index), list(range(ROWS)))
        assert torch.equal(got, inside.grad)
    assert not come_back(partial(F.cross_entropy, ignore_index=ignored), list(range(ROWS)))[1].any()


def test_others_get_the_gradient_that_they_asked_for():
    inside = OUT.clone().requires_grad_()
    (out,) = End.apply(lambda reduction: None, torch.zeros((), requires_grad=True), ROWS, "mean", inside)
    (asked,) = torch.autograd.grad(F.mse_loss(out, TARGETS), out, retain_graph=True)
    torch.testing.assert_close(asked, 2 * (OUT - TARGETS) / OUT.numel())
    scale = torch.tensor(2.0, requires_grad=True)  # a parameter outside the model
    F.mse_loss(scale * out, TARGETS).backward()
    want = torch.tensor(2.0, requires_grad=True)
    F.mse_loss(want * OUT, TARGETS).backward()
    torch.testing.assert_close(scale.grad, want.grad)
    torch.testing.assert_close(inside.grad, 2 * 2.0 * (2.0 * OUT - TARGETS) / 16)


@pytest.mark.parametrize(
    ("loss", "assumed"),
    [
        (F.cross_entropy, False),
        (lambda out, y: F.cross_entropy(out.view(-1, 3), y), False),
        (lambda out, y: F.nll_loss(out.log_softmax(1), y), False),
        (of_rows(lambda out, y: (out * y[:, None]).square().mean()), False),
        (lambda out, y: F.cross_entropy(out @ out.t(), torch.arange(len(y))), True),
        (lambda out, y: F.cross_entropy(out.t(), torch.zeros(3, dtype=torch.long)), True),
        (lambda out, y: F.cross_entropy(out.view(1, -1), y[:1]), True),
        (lambda out, y: F.nll_loss(out.log_softmax(0), y), True),
        (lambda out, y: F.nll_loss(out.log_softmax(-2), y), True),
        (lambda out, y: F.nll_loss(out.transpose(-1, -2).log_softmax(0).transpose(-2, -1), y), True),
        (lambda out, y: F.nll_loss(out.log_softmax(-1), y), False),
        (lambda out, y: (out - out.mean(0)).square().mean(), True),
    ],
)
def test_what_is_not_seen_of_a_loss_is_said(loss, assumed):
    steps, model, _, loader = private(nn.Linear(6, 3), (torch.randn(12, 6), torch.randint(3, (12,))))
    x, y = next(iter(loader))
    loss(model(x), y).backward()
    assert steps.passes.assumed is assumed


@pytest.mark.parametrize("alone", [True, False])
def test_a_cross_entropy_is_known_at_a_glance_for_what_walks_find(alone):
    found = []
    for glance in (outputs._of_classes, lambda top: None):
        with mock.patch.object(outputs, "_of_classes", glance):
            (out,) = End.apply(lambda reduction: None, torch.zeros((), requires_grad=True), ROWS, "mean", OUT)
            top = F.cross_entropy(out, CLASSES).grad_fn
            handles = outputs.mark(top, alone)
            found.append((top.next_functions[0][0].next_functions[0][0].reduction, len(handles)))
    assert found[0] == found[1]
    assert found[0][0].undivided is alone


def test_private_passes_go_back_in_the_thread_that_asks():
    threads = []
    inside = OUT.clone().requires_grad_()
    (out,) = End.apply(lambda reduction: None, torch.zeros((), requires_grad=True), ROWS, "mean", inside)
    for each in (out, inside * 1):
        each.register_hook(lambda signal: threads.append(torch.autograd.is_multithreading_enabled()))
        F.cross_entropy(each, CLASSES).backward()
    assert threads == [False, True]
    assert torch.autograd.is_multithreading_enabled()
