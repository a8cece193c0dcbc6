"""What do tests of users' loops share? A private loop almost without noise, and what its steps should have made."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, TensorDataset

from conftest import clip_and_sum, make_toy
from vestige import PrivacyEngine

LOSS = nn.functional.cross_entropy
BOUND, LR, BATCH = 0.3, 0.5, 12


def private(model, data=None, *, method="dp-sgd", multiplier=1e-9, optimizer=torch.optim.SGD, batch=BATCH, **options):
    """Almost without noise, so that a step shows its clipped sum."""
    engine = PrivacyEngine(reproducible=3)
    loader = DataLoader(TensorDataset(*(data or make_toy()[1])), batch_size=batch)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=LR), data_loader=loader,
        noise_multiplier=multiplier, max_grad_norm=BOUND, method=method, **options,
    )  # fmt: skip
    return engine._steps, model, optimizer, loader


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters() if p.requires_grad]).clone()


@contextmanager
def unwatched():
    """Inside, nothing of a loop is followed: what tests compute of its batches is no part of it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@unwatched()
def plain(model):
    """A copy that nobody watches."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return model


@unwatched()
def oracle(model, loss, examples, bound=BOUND):
    """The clipped sum, one example at a time in float64; `loss(model, *example)` of a batch of one."""
    model = plain(model).double()
    rows = []
    for example in examples:
        model.zero_grad()
        loss(model, *(part[None].double() if part.is_floating_point() else part[None] for part in example)).backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
        rows.append(np.concatenate([g.numpy().ravel() for g in grads]))
    return clip_and_sum(np.stack(rows), bound)


def moved(before, after, batch=BATCH):
    """The clipped sum that a step of plain SGD has made."""
    return ((before - after) * batch / LR).double().numpy()


def same_step_of(loss, model, optimizer, *batch, rtol=1e-3, atol=3e-5):
    """A step on a batch, wherever that lies, against one example at a time; `loss(model, *batch)`."""
    before, alone = flat(model).cpu(), plain(model).cpu()
    expected = oracle(alone, loss, list(zip(*(part.cpu() for part in batch), strict=True)))
    optimizer.zero_grad()
    loss(model, *batch).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model).cpu()), expected, rtol=rtol, atol=atol)


def same_step(model, optimizer, x, y, loss=lambda m, x, y: LOSS(m(x), y), step=None):
    """A step on a batch against one example at a time."""
    before = flat(model)
    expected = oracle(model, loss, list(zip(x, y, strict=True)))
    if step is None:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        assert all(p.grad is None for p in model.parameters()), "a gradient without noise"
        optimizer.step()
    else:
        step()
    np.testing.assert_allclose(moved(before, flat(model)), expected, rtol=1e-3, atol=3e-5)
