"""Does a private pass need little more memory than a plain one? The peak of live tensors, counted on a CPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, layer_norm, mse_loss
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import vestige
from captured_on_cpu import captured_on_cpu
from vestige.engines.capture_guards import NotCapturable
from vestige.engines.per_example.execution import unseen_by_functions
from vestige.privacy_engine import captured_passes

ROWS = 16


def windows(attention):
    """Attention within windows of positions, every second layer with a mask for each window: Swin's."""
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    config = transformers.SwinConfig(num_labels=4, attn_implementation=attention, **sizes)
    return transformers.SwinForImageClassification(config)


def peak(work) -> int:
    """The most bytes of tensors that were alive at a time, beyond those before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    waiting, events = list(seen.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if hasattr(event.extra_fields, "alloc_size"):
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most


def private(model, loader):
    return vestige.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip


def passes(privately, attention="sdpa"):
    """A pass, forward and backward, and a step, to be called again and again."""
    data = TensorDataset(torch.randn(ROWS, 3, 32, 32), torch.randint(4, (ROWS,)))
    model, loader = windows(attention).train(), DataLoader(data, batch_size=ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if privately:
        model, optimizer, loader = private(model, loader)
    for x, y in loader:
        yield lambda x=x, y=y: cross_entropy(model(x).logits, y).backward()
        optimizer.step()


@pytest.mark.parametrize(("attention", "captures"), [("sdpa", False), ("eager", False), ("sdpa", True)])
def test_a_private_pass_takes_little_more_memory_than_a_plain_one(attention, captures):
    (plain,) = (peak(one) for one in passes(False, attention))
    if not captures:
        (ours,) = (peak(one) for one in passes(True, attention))
    else:
        with captured_on_cpu():
            gc.disable()  # as it is in a capture: what only a collection frees stays
            try:
                (ours,) = (peak(one) for one in passes(True, attention))
            finally:
                gc.enable()
    assert ours < 1.25 * plain


def test_a_capture_that_breaks_off_leaves_no_activations(monkeypatch):
    """They would lie beside those of the next attempt, or stay for good."""
    forms, capture = [], captured_passes.CapturedForm._capture

    def broken(work, pool, device):
        work()
        raise NotCapturable("broken off")

    def noted(form, *args):
        forms.append(form)
        capture(form, *args)

    with captured_on_cpu():
        monkeypatch.setattr(captured_passes, "captured", broken)
        monkeypatch.setattr(captured_passes.CapturedForm, "_capture", noted)
        for one in passes(True):
            with pytest.warns(UserWarning, match="cannot be captured"):
                one()
    assert forms
    assert all(form._live is None for form in forms)


class Kept(nn.Module):
    """An activation that meets a parameter, and a weak reference to it."""

    def __init__(self, way):
        super().__init__()
        self.first, self.scale, self.way = nn.Linear(3, 4), nn.Parameter(torch.ones(4) / 2), way

    def forward(self, x):
        hidden = torch.sigmoid(self.first(x) * 2)
        self.seen = weakref.ref(hidden)
        return WAYS[self.way](hidden, self.scale)


WAYS = {
    "product": lambda hidden, scale: hidden * scale,
    "elementwise": lambda hidden, scale: hidden**scale,
    "by name": lambda hidden, scale: torch.lerp(hidden, end=scale, weight=0.3),
    "einsum": lambda hidden, scale: torch.einsum("bi,i->b", hidden, scale)[:, None],
    "without a rule": lambda hidden, scale: torch.hypot(hidden, scale),
    "norm": lambda hidden, scale: layer_norm(hidden, (4,), scale),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_use_saved_is_free_after_the_backward_pass(way):
    """Although the loss, and with it the graph, is still there."""
    data = TensorDataset(torch.randn(4, 3))
    model, optimizer, loader = private(Kept(way), DataLoader(data, batch_size=4))
    for (x,) in loader:
        loss = model(x).sum(dim=1).mean()
        assert model.seen() is not None or way == "by name"  # whose backward pass needs no activation
        loss.backward()
        assert model.seen() is None
        optimizer.step()


class Noted(nn.Module):
    """Counts the hidden activations of earlier passes that are still there."""

    def __init__(self, kind):
        super().__init__()
        makes = (lambda: nn.Linear(16, 16)) if kind == "linear" else (lambda: nn.Conv2d(16, 16, 3, padding=1))
        self.first, self.second, self.kind, self.hidden, self.left = makes(), makes(), kind, [], []

    def forward(self, x):
        self.left.append(sum(not each.expired() for each in self.hidden))
        hidden = torch.sigmoid(self.first(x if self.kind == "linear" else x[:, :, None, None].expand(-1, -1, 4, 4)))
        with unseen_by_functions():
            self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        return self.second(hidden).flatten(1).sum(dim=1)


@pytest.mark.parametrize("way", ["captured", "loop", "train"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_passes_leave_nothing_to_the_next(kind, way):
    """What a graph's memory pool still holds would lie beside what the next graph needs."""
    data, model = TensorDataset(torch.randn(640, 16)), Noted(kind)
    gc.disable()  # as it is in a capture: what only a collection frees stays
    try:
        if way == "train":
            rows = (data.tensors[0], torch.randn(640))
            vestige.train(model, mse_loss, rows, batch_size=32, steps=4, delta=1e-5, noise_multiplier=1.0, lr=0.1).run()
        else:
            with captured_on_cpu() if way == "captured" else nullcontext():
                loop, optimizer, loader = private(model, DataLoader(data, batch_size=32))
                for _, (x,) in zip(range(1 if way == "captured" else 4), loader, strict=False):
                    loop(x).mean().backward()
                    optimizer.step()
    finally:
        gc.enable()
    assert len(model.left) > 3
    assert not any(model.left)


class Wide(nn.Module):
    """Gives its loss and its scores of many classes, as a language model does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 20_000)

    def forward(self, x, y):
        scores = self.layer(x)
        return cross_entropy(scores, y), scores


def test_a_captured_loss_beside_scores_needs_no_gradient_of_the_scores():
    """As large as they are, it would be zero."""
    data = TensorDataset(torch.randn(40, 4), torch.randint(20_000, (40,)))
    numbers = 4 * 40 * 20_000

    def step():
        model, optimizer, loader = private(Wide(), DataLoader(data, batch_size=40))
        for x, y in loader:
            model(x, y)[0].backward()
            optimizer.step()

    with captured_on_cpu() as graphs:
        assert peak(step) < 5.75 * numbers  # 5.25, and once more with that gradient
        assert graphs.replays
