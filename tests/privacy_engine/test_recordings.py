"""Is a replayed pass the pass? Which passes are, which run as they are, and what is left behind in between?"""

import copy
import random
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from conftest import make_toy
from loops import LOSS, flat, private, same_step
from vestige.engines.recorded.recording import sizes_of
from vestige.privacy_engine import recordings
from vestige.privacy_engine.recordings import Withheld
from vestige.questions import BudgetSpent

pytestmark = pytest.mark.parametrize("replayed", [True], ids=[""], indirect=True)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def replays(steps):
    """How many forward passes were replayed, of every size; the smallest is replayed once when it is tried."""
    counts = {}
    for known in steps.passes._recorder._known.values():
        for tape in [] if known is None else known._tapes:
            counts[tape.rows] = counts.get(tape.rows, 0) + tape.forward.replays - (tape is known._tapes[-1])
    return {rows: count for rows, count in counts.items() if count}


def test_sizes_cover_a_sample_and_are_few():
    sizes = sizes_of(1280, 0.05)
    assert sizes[0] == 88
    assert sizes[-1] <= 42
    assert len(sizes) <= 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes_of(50, 1.0) == [50]
    assert sizes_of(10**6, 0.001, 64)[0] == 64
    assert sizes_of(10**6, 0.001, 64)[-1] <= 4


def test_a_replay_is_padded_and_another_step_is_another_batch():
    steps, model, optimizer, loader = private(make_toy()[0])
    seen = set()
    for x, y in loader:
        same_step(model, optimizer, x, y)
        seen.add(len(x))
    assert sum(replays(steps).values()) == len(loader)
    assert len(seen) > 2
    assert set(replays(steps)) <= set(steps.passes._recorder.sizes)


def test_a_batch_larger_than_foreseen_runs_as_it_is():
    steps, model, optimizer, loader = private(make_toy()[0])
    steps.passes._recorder.sizes = [4]
    x, y = next(iter(loader))
    assert len(x) > 4
    same_step(model, optimizer, x, y)
    assert not replays(steps)


def test_what_the_user_keeps_is_the_users():
    steps, model, optimizer, loader = private(make_toy()[0])
    kept = []
    for x, y in loader:
        outputs = model(x)
        kept.append((outputs, outputs.detach().clone()))
        LOSS(outputs, y).backward()
        optimizer.step()
    assert len(replays(steps)) > 0
    assert all(torch.equal(now, then) for now, then in kept)


def test_a_pass_that_was_left_does_not_hinder_the_next():
    """A forward pass without a backward pass is in the memory as long as somebody may come back to it."""
    steps, model, optimizer, loader = private(make_toy()[0])
    batches = iter(loader)
    x, y = next(batches)
    held = model(x)  # looked at, and kept
    same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == 1  # the second one ran as it was
    del held
    same_step(model, optimizer, *next(batches))
    assert sum(replays(steps).values()) == 2


def test_a_backward_pass_comes_back_to_its_own_forward_pass():
    steps, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    first = LOSS(model(x), y)
    second = LOSS(model(x.flip(0)), y)  # a second view of the same examples, run as it is
    before, twin = flat(model), copy.deepcopy(model.state_dict())
    (first + second).backward()
    optimizer.step()
    moved = flat(model) - before
    other = private(make_toy()[0])
    other[1].load_state_dict(twin)
    other[0].passes._recorder.sizes = ()
    x2, _ = next(iter(other[3]))
    assert torch.equal(x2, x)
    (LOSS(other[1](x), y) + LOSS(other[1](x.flip(0)), y)).backward()
    before = flat(other[1])
    other[2].step()
    torch.testing.assert_close(moved, flat(other[1]) - before, rtol=1e-4, atol=1e-6)


def test_what_changes_in_the_model_is_not_replayed_as_it_was():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = make_toy()[0], 1.0

        def forward(self, x):
            return self.body(x) * self.scale

    steps, model, optimizer, loader = private(Scaled())
    for step, (x, y) in enumerate(loader):
        model.scale = 1.0 + (step > 2)
        same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == 3


def test_a_model_with_somebody_inside_runs_as_it_is():
    steps, model, optimizer, loader = private(make_toy()[0])
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    sizes = [len(x) for x, y in loader if same_step(model, optimizer, x, y) is None]
    assert not replays(steps)
    assert set(sizes) <= set(seen)


class Drawing(nn.Module):
    """A model that draws numbers on the host, or counts, as it is told."""

    def __init__(self, way):
        super().__init__()
        self.body, self.way, self.calls = make_toy()[0], way, 0

    def forward(self, x):
        output = self.body(x)
        if self.way.startswith("skips"):  # as layers are, with a chance of so many percent
            output = output * 1.5 if torch.rand([]) < float(self.way.split()[1]) / 100 else output
        elif self.way == "hardly moves":  # by less than rounding may
            output = output * 1.001 if torch.rand([]) < 0.5 else output
        elif self.way == "scales":
            output = output * torch.rand(1)
        elif self.way == "normal":
            torch.randn(1)
        elif self.way == "numpy":
            np.random.rand()  # noqa: NPY002
        elif self.way == "python":
            random.random()
        else:
            self.calls += 1
        return output


@pytest.mark.parametrize(
    "way", ["skips 1", "skips 99", "hardly moves", "scales", "normal", "numpy", "python", "counts"]
)
def test_a_model_that_draws_on_the_host_or_counts_runs_as_it_is(way):
    torch.manual_seed(3)
    steps, model, optimizer, loader = private(Drawing(way))
    model(next(iter(loader))[0])
    assert steps.passes._recorder._known
    assert not replays(steps)
    assert all(each is None for each in steps.passes._recorder._known.values())


@pytest.mark.parametrize("way", ["skips 0", "skips 100"])
def test_a_model_that_draws_on_the_host_to_no_purpose_is_recorded(way, monkeypatch):
    made, states = recordings.Recorder._recordings, []

    def watched(*args):
        states.append(torch.get_rng_state())
        found = made(*args)
        states.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(recordings.Recorder, "_recordings", watched)
    steps, model, optimizer, loader = private(Drawing(way))
    same_step(model, optimizer, *next(iter(loader)))
    assert replays(steps)
    assert torch.equal(*states), "what is tried and recorded draws nothing"


@pytest.mark.parametrize(("owner", "recorded"), [("transformers.utils.output_capturing", True), ("mine", False)])
def test_hooks_that_only_hand_out_activations_do_not_stop_a_recording(owner, recorded):
    def hook(module, inputs, output):
        return None

    hook.__module__ = owner
    steps, model, optimizer, loader = private(make_toy()[0])
    model[0].register_forward_hook(hook)
    same_step(model, optimizer, *next(iter(loader)))
    assert bool(replays(steps)) == recorded


def test_an_output_that_is_no_tensor_is_withheld():
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_toy()[0]

        def forward(self, x):
            return {"logits": self.body(x), "cache": Cache(x), "kind": "plain", "none": None}

    steps, model, optimizer, loader = private(WithCache())
    for x, y in loader:
        outputs = model(x)
        assert (outputs["kind"], outputs["none"]) == ("plain", None)
        assert isinstance(outputs["cache"], Withheld)
        with pytest.raises(AttributeError, match=r"record=False"):
            outputs["cache"].keys  # noqa: B018
        LOSS(outputs["logits"], y).backward()
        optimizer.step()
    assert sum(replays(steps).values()) == len(loader)


def test_a_wrong_recording_is_found_out(monkeypatch):
    """What a replay gives is compared with the pass itself, on made-up rows, before it is used."""

    class Stale:
        def __init__(self, work):
            self.replays = 0
            work()

        def replay(self):
            """Nothing is run again."""

    monkeypatch.setattr(recordings, "recorded", lambda work, pool, device: Stale(work))
    steps, model, optimizer, loader = private(make_toy()[0])
    same_step(model, optimizer, *next(iter(loader)))
    assert list(steps.passes._recorder._known.values()) == [None]


def test_nothing_is_recorded_where_that_was_said():
    from torch.utils.data import DataLoader, TensorDataset

    from vestige import PrivacyEngine

    model, data = make_toy()
    engine = PrivacyEngine(record=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(*data), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert not engine._steps.passes._recorder._known


def test_a_sum_without_its_noise_is_never_left_where_a_gradient_was():
    """The sum is made where the optimizer finds its gradient: whoever keeps one of those must not see the other."""
    steps, model, optimizer, loader = private(make_toy()[0], max_physical_batch_size=4)
    batches, kept = iter(loader), []
    optimizer.register_step_pre_hook(lambda *_: kept.extend(p.grad for p in model.parameters()))
    for _ in range(2):
        while True:
            LOSS(model(x := next(batches)[0]), torch.zeros(len(x), dtype=torch.long)).backward()
            last = steps.passes._pending[-1].part.last
            optimizer.step()
            if last:
                break
            assert not steps.passes._vector.any()
    assert sum(replays(steps).values()) > 3
    assert kept
    assert any(each.any() for each in kept)  # of the last step, with its noise
    LOSS(model(x := next(batches)[0]), torch.zeros(len(x), dtype=torch.long)).backward()

    def spent(*_, **__):
        raise BudgetSpent

    while steps.passes._pending[-1].part.last is False:
        optimizer.step()
        LOSS(model(x := next(batches)[0]), torch.zeros(len(x), dtype=torch.long)).backward()
    with mock.patch.object(steps.ledger, "ask", spent), pytest.raises(BudgetSpent):
        optimizer.step()
    assert not any(each.any() for each in kept)
