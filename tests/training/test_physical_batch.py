"""Is the largest part that fits found, without looking at any example, and does it change nothing?"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import vestige as command
from conftest import make_toy
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.memory import DeviceMemory
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.augmentation import Augment
from vestige.methods.registry import make_method
from vestige.training import physical_batch as fitting
from vestige.training.physical_batch import largest_part, largest_that_fits, made_up, plausible_sample

LOSS = nn.functional.cross_entropy


@pytest.mark.parametrize("base", [0.0, 1000.0])
@pytest.mark.parametrize("limit", [900, 1003, 1017, 2_500, 100_000])
@pytest.mark.parametrize("each", [1.0, 7.5, 130.0])
@pytest.mark.parametrize("workspace", [0, 400])
def test_the_search_against_counting(base, limit, each, workspace):
    asked = []

    def takes(size):
        asked.append(size)
        cost = base + each * size + (workspace if size % 3 == 0 else 0)
        return cost if cost < 1.5 * limit else math.inf

    found = largest_that_fits(takes, 5000, limit)
    true = max([size for size in range(1, 5001) if takes(size) <= limit], default=0)
    del asked[-5000:]
    assert found == 0 or found in asked
    assert found == 0 or takes(found) <= limit
    assert found >= true * 15 / 16 - workspace / each - 1
    assert len(set(asked)) <= 25


def test_nothing_is_tried_far_beyond_the_limit():
    tried = []
    largest_that_fits(lambda size: tried.append(size) or 10 + 3.0 * size, 10**6, 5000)
    assert max(10 + 3 * size for size in tried) <= 1.01 * 5000


@pytest.mark.parametrize(("population", "rate"), [(60, 0.2), (60_000, 0.04), (10, 1.0), (5, 1e-9)])
def test_a_plausible_sample_is_rarely_exceeded(population, rate):
    most = plausible_sample(population, rate)
    assert 1 <= most <= population
    if rate == 0.04:
        from scipy.stats import binom

        assert binom.sf(most, population, rate) < 1e-13


def fake_memory(free, fixed, each, calls):
    """A machine on which an example takes `each` bytes."""

    def taken(call):
        before = len(calls)
        call()
        return fixed + each * calls[before]

    return DeviceMemory(lambda: free, taken)


class Counting(BookKeeping):
    calls: list

    def __call__(self, batch, *rest):
        self.calls.append(len(batch[0]))
        return super().__call__(batch, *rest)


def counting(model, layout):
    engine = Counting(model, LOSS, layout)
    engine.calls = []
    return engine


def test_the_largest_part_on_a_machine_of_known_size():
    model, (x, y) = make_toy()
    layout = Layout.of(model)
    engine = counting(model, layout)
    memory = fake_memory(1_000_000, 5_000, 1_000, engine.calls)
    found = largest_part(model, engine, layout, [x[:0], y[:0]], most=10_000, memory=memory, reserve=100_000)
    true = (fitting.HEADROOM * 1_000_000 - 100_000 - 5_000) // 1_000
    assert true * 15 / 16 <= found <= true
    assert found in engine.calls, "an answer that was never tried"
    assert largest_part(model, engine, layout, [x[:0], y[:0]], most=50, memory=memory) == 50
    with pytest.raises(ValueError, match="not even one example fits"):
        largest_part(model, engine, layout, [x[:0], y[:0]], most=50, memory=memory, reserve=10**6)


def test_made_up_examples_have_shapes_and_nothing_else():
    x, y, mask = torch.randn(9, 2, 3), torch.randint(7, (9,)), torch.ones(9, 4, dtype=torch.bool)
    one = made_up([x[:0], y[:0], mask[:0]], 5, x.device)
    other = made_up([x[:0] + 1, y[:0], mask[:0]], 5, x.device)
    assert [p.shape for p in one] == [(5, 2, 3), (5,), (5, 4)]
    assert [p.dtype for p in one] == [x.dtype, y.dtype, mask.dtype]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_looking_leaves_no_trace():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.drop(self.map(x))

    model, (x, y) = Counts(), make_toy()[1]
    layout, random = Layout.of(model), torch.random.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    largest_part(model, BookKeeping(model, LOSS, layout), layout, [x[:0], y[:0]], most=4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def run(physical_batch, data=None, **options):
    model, toy = make_toy()
    common = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.4, "steps": 4, "lr": 0.1}
    training = vestige.train(
        model, LOSS, data or toy, **{**common, **options}, reproducible=1, max_physical_batch_size=physical_batch
    )
    list(training)
    return training, torch.cat([p.detach().ravel() for p in model.parameters()])


@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd", "disk", "dp-is", "dp-sam"])
def test_a_run_in_parts_that_fit_is_the_same_run(method, monkeypatch):
    sizes = []

    def small(call):
        """A machine on which six examples fit, whatever is asked of them."""
        call()
        return float("inf") if sizes[-1] > 6 else 1.0

    original = fitting.made_up
    monkeypatch.setattr(
        fitting, "made_up", lambda blank, size, device: sizes.append(size) or original(blank, size, device)
    )
    monkeypatch.setattr(fitting, "memory_of", lambda device: DeviceMemory(lambda: 1e9, small))
    training, split = run("auto", method=method)
    assert training.physical_batch == 6
    _, whole = run(None, method=method)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def test_the_choice_sees_no_example(monkeypatch):
    """Data that would poison whatever reads it gives the same choice."""
    seen = []
    original = BookKeeping.__call__
    monkeypatch.setattr(
        BookKeeping, "__call__", lambda self, batch, *a: seen.append(batch) or original(self, batch, *a)
    )
    model, (x, y) = make_toy()
    options = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.4, "steps": 4}
    training = vestige.train(model, LOSS, (x * torch.nan, y), max_physical_batch_size="auto", **options)
    assert seen
    assert all(part.isfinite().all() for batch in seen for part in batch)
    assert training.physical_batch == plausible_sample(60, 0.4)


def test_the_transforms_of_a_method_are_tried_too(monkeypatch):
    heard = []

    class Listening(Reference):
        def __call__(self, batch, parameters, clip, into, transform=None):
            heard.append(transform)
            return super().__call__(batch, parameters, clip, into, transform)

    monkeypatch.setitem(vestige.engines.registry.ENGINES, "reference", Listening)
    model, data = make_toy()
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.4, "steps": 4}
    vestige.train(
        model,
        LOSS,
        data,
        method=make_method("disk", extrapolation="0.5"),
        engine="reference",
        max_physical_batch_size="auto",
        **options,
    )
    assert heard
    assert all(transform is not None for transform in heard)


def test_every_view_of_an_example_is_tried(monkeypatch):
    monkeypatch.setattr(fitting, "largest_that_fits", lambda takes, most, limit: max(5, takes(5) * 0))
    model, seen = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 3)), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    data = torch.rand(60, 1, 5, 5), torch.randint(3, (60,))
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.4, "steps": 4}
    method = replace(make_method("dp-sgd"), augment=Augment(7))
    training = vestige.train(model, LOSS, data, method=method, max_physical_batch_size="auto", **options)
    assert training.physical_batch == 5
    assert max(seen) == 5 * 7


def test_the_users_loop_in_parts_that_fit(monkeypatch):
    monkeypatch.setattr(fitting, "largest_that_fits", lambda takes, most, limit: max(5, takes(5) * 0))
    model, data = make_toy()
    loader = DataLoader(TensorDataset(*data), batch_size=12)
    common = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": loader}
    *_, private = vestige.PrivacyEngine().make_private(
        **common, noise_multiplier=1.0, max_grad_norm=1.0, max_physical_batch_size="auto"
    )
    assert max(len(x) for x, _ in private) == 5


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "most"])
def test_what_is_no_size_is_refused(wrong):
    with pytest.raises(ValueError, match=r"max_physical_batch_size=.* must be a whole number from 1 up, or 'auto'"):
        run(wrong)


def test_a_model_that_made_up_examples_cannot_run_is_refused():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 3)

        def forward(self, x):
            raise RuntimeError("only real data")

    model, data = Picky(), make_toy()[1]
    with pytest.raises(
        ValueError,
        match=r"max_physical_batch_size='auto': no made-up example could be run .*only real data.*give a number",
    ):
        vestige.train(model, LOSS, data, method="dp-sgd", noise_multiplier=1.0, delta=1e-5, sample_rate=0.4, steps=4, max_physical_batch_size="auto")  # fmt: skip


def test_the_commands():
    code, out, _ = command("doctor", "digits-mlp", "--max-physical-batch-size", "auto", "--sample-rate", "0.1", "--device", "cpu", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["physical_batch"] == plausible_sample(1437, 0.1)
    code, _, error = command("doctor", "digits-mlp", "--max-physical-batch-size", "12")
    assert code == 2
    assert "--max-physical-batch-size='12' must be 'auto' here" in error


def test_training_from_the_command_line(tmp_path):
    common = ("train", "--task", "digits-mlp", "--noise-multiplier", "1", "--steps", "2", "--device", "cpu")
    code, _, notes = command(*common, "--max-physical-batch-size", "auto", "--out", str(tmp_path / "run"))
    assert code == 0
    assert "physical batch 1" in notes
    assert json.loads((tmp_path / "run" / "run.json").read_text())["job"]["physical_batch"] == "auto"
    assert command(*common, "--max-physical-batch-size", "many")[0] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_answer_fits_and_twice_as_much_does_not():
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 10)).to(
        device
    )
    layout = Layout.of(model)
    blank = [torch.zeros(0, 4096), torch.zeros(0, dtype=torch.long)]
    ballast = torch.empty(int(torch.cuda.mem_get_info()[0]) - 2 * 2**30, dtype=torch.uint8, device=device)  # 2 GiB left
    engine = BookKeeping(model, LOSS, layout)
    found = largest_part(model, engine, layout, blank, most=10**7, memory=None)
    total, point = torch.zeros(layout.size, device=device), {n: p.detach() for n, p in layout.parameters(model).items()}
    engine(made_up(blank, found, device), point, fitting.Flat(1.0), total)
    with pytest.raises(torch.OutOfMemoryError):
        engine(made_up(blank, 2 * found, device), point, fitting.Flat(1.0), total)
    del ballast
    torch.cuda.empty_cache()  # or the next tensors would lie in that block, and nobody else could have the rest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the resident memory that Linux counts")
def test_resident_memory_is_what_a_call_takes():
    memory = fitting.memory_of(torch.device("cpu"))
    assert memory.free() > 0
    assert 0.9 * 2**27 < memory.taken_by(lambda: torch.ones(2**25)) < 1.2 * 2**27
    assert memory.taken_by(lambda: torch.ones(2**58)) == math.inf
