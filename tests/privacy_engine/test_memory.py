"""Does a private pass need little more memory than a plain one? The peak of live tensors, counted on a CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import vestige
from captured_on_cpu import captured_on_cpu
from vestige.engines.capture_guards import NotCapturable
from vestige.engines.per_example.kernels import blanked
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


def passes(private, attention="sdpa"):
    """A pass, forward and backward, and a step, to be called again and again."""
    data = TensorDataset(torch.randn(ROWS, 3, 32, 32), torch.randint(4, (ROWS,)))
    model = windows(attention).train()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=ROWS)
    if private:
        model, optimizer, loader = vestige.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    for x, y in loader:
        yield lambda x=x, y=y: cross_entropy(model(x).logits, y).backward()
        optimizer.step()


def in_place(tensor, rows, in_place=False):
    """As a GPU does it: on a CPU, blanked rows are a copy."""
    overlaps = 0 in tensor.stride()
    return tensor.masked_fill_(rows.view(-1, *[1] * (tensor.dim() - 1)), 0) if not overlaps else blanked(tensor, rows)


@pytest.mark.parametrize(("attention", "captures"), [("sdpa", False), ("eager", False), ("sdpa", True)])
def test_a_private_pass_takes_little_more_memory_than_a_plain_one(attention, captures, monkeypatch):
    (plain,) = (peak(one) for one in passes(False, attention))
    if not captures:
        (ours,) = (peak(one) for one in passes(True, attention))
    else:
        monkeypatch.setattr("vestige.engines.per_example.kernels.blanked", in_place)
        with captured_on_cpu():
            gc.disable()  # as it is in a capture: what only a collection frees stays
            try:
                (ours,) = (peak(one) for one in passes(True, attention))
            finally:
                gc.enable()
    assert ours < 1.25 * plain


def test_a_capture_that_breaks_off_leaves_no_activations(monkeypatch):
    """They would lie beside those of the next attempt, or stay for good."""
    forms, capture = [], captured_passes.CapturedForm._capture_graphs

    def broken(work, pool, device):
        work()
        raise NotCapturable("broken off")

    def noted(form, *args):
        forms.append(form)
        capture(form, *args)

    with captured_on_cpu():
        monkeypatch.setattr(captured_passes, "captured", broken)
        monkeypatch.setattr(captured_passes.CapturedForm, "_capture_graphs", noted)
        for one in passes(private=True):
            with pytest.warns(UserWarning, match="cannot be captured"):
                one()
    assert forms
    assert all(form._live is None for form in forms)
