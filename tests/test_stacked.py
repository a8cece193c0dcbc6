"""A run in a stack against the same run alone, and what padding, clipping and noise do in a stack."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from vestige import models, train
from vestige.layout import Layout
from vestige.method import METHODS, build
from vestige.noise import Randomness
from vestige.questions import SampledGaussian
from vestige.sampling import Poisson
from vestige.stacked import Draws, Network, Stack, StackedRun, why_not

CPU = torch.device("cpu")
MIXTURE = [
    ("dp-sgd", {}, 1.0, 0.5, 3),
    ("fo-dp-sgd", {}, 1.3, 0.5, 3),
    ("fo-dp-sgd", {"beta": 0.6, "window": 4, "clip": 0.3}, 0.7, 1.0, 4),
    ("fo-dp-sgd", {}, 2.0, 0.25, 5),
    ("post-fm", {"tau": 0.5}, 1.1, 0.7, 6),
    ("uniform-memory", {"window": 3}, 1.0, 0.4, 7),
    ("exponential-memory", {"beta": 0.5}, 1.0, 0.6, 8),
    ("dp-sgd", {"momentum": 0.9, "clip": 0.5}, 1.0, 0.05, 9),
    ("fo-dp-sgd", {"window": 1, "beta": 0.8}, 1.0, 0.5, 10),
    ("fo-dp-sgd", {"momentum": 0.5, "zeta": 2.0}, 1.0, 0.2, 11),
]


def data(examples=120, width=12, classes=4):
    generator = np.random.default_rng(0)
    inputs = torch.from_numpy(generator.normal(size=(examples, width)).astype(np.float32))
    return inputs, torch.from_numpy(generator.integers(0, classes, examples))


def network(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.mlp(12, 4, (8, 6))


def stack(mixture, seeded=True, examples=None, rate=0.2):
    runs = [
        StackedRun(network(seed), build(name, **options), z, lr, seed if seeded else None)
        for name, options, z, lr, seed in mixture
    ]
    return runs, Stack(runs, examples or data(), sample_rate=rate, device=CPU)


def test_each_run_of_a_stack_equals_the_same_run_alone():
    runs, together = stack(MIXTURE)
    for _ in together.train(25):
        pass
    for run, (name, options, z, lr, seed), progress in zip(runs, MIXTURE, together.progress(), strict=True):
        model = network(seed)
        alone = train(
            model,
            functional.cross_entropy,
            data(),
            method=build(name, **options),
            sample_rate=0.2,
            steps=25,
            delta=1e-3,
            noise_multiplier=z,
            lr=lr,
            reproducible=seed,
        )
        records = list(alone)
        for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
        assert progress.asked == alone.ledger.spent
        for key in progress.diagnostics:
            torch.testing.assert_close(
                progress.diagnostics[key].double(), records[-1].diagnostics[key].double(), rtol=1e-3, atol=1e-4
            )


def test_the_stack_does_not_depend_on_its_company():
    runs, together = stack(MIXTURE)
    for _ in together.train(10):
        pass
    one, alone = stack(MIXTURE[2:3])
    for _ in alone.train(10):
        pass
    for ours, theirs in zip(runs[2].model.parameters(), one[0].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clipped_sums_against_one_example_at_a_time_in_float64():
    runs, together = stack(MIXTURE[:3])
    inputs, targets = data()
    rows = torch.tensor([[0, 5, 9, 0], [1, 2, 3, 4], [7, 0, 0, 0]])
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        together._clipped_sums(rows, real)
    layout = Layout.of(runs[0].model)
    for place, run in enumerate(together.runs):
        expected = np.zeros(layout.size)
        for row, counts in zip(rows[place].tolist(), real[place].tolist(), strict=True):
            if not counts:
                continue
            model = network(run.seed).double()
            functional.cross_entropy(model(inputs[row : row + 1].double()), targets[row : row + 1]).backward()
            gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
            expected += gradient * min(1.0, run.method.clip.bound / np.linalg.norm(gradient))
        np.testing.assert_allclose(together.fresh[place].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_samples_keep_every_row_and_pad_with_nothing():
    draws = Draws([1, 2, 3], 50, 0.3, CPU)
    for step, (rows, real) in enumerate(draws.samples(4, 5)):
        for run, seed in enumerate((1, 2, 3)):
            expected = Poisson(0.3).draw(50, 4 + step, Randomness.reproducible(seed))
            assert rows[run][real[run]].tolist() == expected.tolist()


def test_secret_samples_are_poisson_and_independent_between_runs():
    draws = Draws([None] * 40, 500, 0.1, CPU)
    counts = torch.stack([real.sum(1) for _, real in draws.samples(0, 20)]).double()
    assert abs(float(counts.mean()) - 50) < 1
    assert 0.8 < float(counts.var()) / 45 < 1.2
    (first, real_first), (second, real_second) = draws.samples(100, 2)
    a, b = set(first[0][real_first[0]].tolist()), set(second[0][real_second[0]].tolist())
    c = set(first[1][real_first[1]].tolist())
    assert a != b
    assert a != c


@pytest.mark.parametrize("multiplier", [0.7, 3.0])
def test_secret_noise_has_its_multiplier_and_no_other(multiplier):
    """Accepts the right standard deviation, and would reject two thirds or three halves of it."""
    silent = (torch.zeros(40, 12), torch.zeros(40, dtype=torch.long))
    runs = [StackedRun(network(0), build("dp-sgd", clip=0.5), multiplier, 1e-9) for _ in range(30)]
    together = Stack(runs, silent, sample_rate=1e-9, device=CPU)
    for _ in together.train(1):
        pass
    std = float((together.fresh * together.expected_batch).std())
    assert std == pytest.approx(0.5 * multiplier, rel=0.05)
    rows = together.fresh
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.5
    assert not torch.equal(rows[0], rows[1])


def test_non_finite_examples_add_exactly_zero_and_empty_samples_are_charged():
    inputs, targets = data()
    broken = inputs.clone()
    broken[::2] = torch.nan
    broken[1::4] = torch.inf
    zeroed = torch.where(broken.isfinite(), broken, 0.0)
    runs, together = stack(MIXTURE[:2], examples=(broken, targets), rate=0.9)
    for _ in together.train(5):
        pass
    assert all(p.isfinite().all() for run in runs for p in run.model.parameters())
    assert not torch.equal(zeroed, inputs)
    _, empty = stack(MIXTURE[:1], rate=1e-9)
    for _ in empty.train(3):
        pass
    assert empty.progress()[0].asked == Counter({SampledGaussian(1e-9, 1.0): 3})


def test_a_diverged_run_does_not_spoil_its_neighbours():
    wild = [("dp-sgd", {}, 1.0, 1e30, 3), MIXTURE[1]]
    runs, together = stack(wild)
    for _ in together.train(8):
        pass
    alone, single = stack(MIXTURE[1:2])
    for _ in single.train(8):
        pass
    for ours, theirs in zip(runs[1].model.parameters(), alone[0].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_accuracies_come_in_the_order_given():
    runs, together = stack(MIXTURE)
    for _ in together.train(3):
        pass
    inputs, targets = data()
    found = together.accuracies((inputs, targets), chunk=50)
    for run, share in zip(runs, found, strict=True):
        assert share == pytest.approx(float((run.model(inputs).argmax(1) == targets).double().mean()))


def test_coverage_is_said_and_refused():
    loss = functional.cross_entropy
    good = network(0)
    assert why_not(good, loss, build("fo-dp-sgd")) is None
    assert "chain" in why_not(nn.Sequential(nn.Conv2d(1, 2, 3)), loss, build("dp-sgd"))
    assert "chain" in why_not(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2)), loss, build("dp-sgd"))
    assert "cross_entropy" in why_not(good, functional.mse_loss, build("dp-sgd"))
    assert "sampling" in why_not(good, loss, build("dp-sgd"), "shuffled")
    with pytest.raises(ValueError, match="cannot be stacked"):
        Stack(
            [StackedRun(nn.Sequential(nn.Conv2d(1, 2, 3)), build("dp-sgd"), 1.0, 1.0)],
            data(),
            sample_rate=0.1,
            device=CPU,
        )
    runs = [StackedRun(network(0), build("dp-sgd"), 1.0, 1.0, seed) for seed in (1, None)]
    with pytest.raises(ValueError, match="every run"):
        Stack(runs, data(), sample_rate=0.1, device=CPU)
    assert all(isinstance(why_not(good, loss, entry.make()), str | None) for entry in METHODS.values())


def test_relu_and_sigmoid_slopes():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 4)
    )
    layout = Layout.of(model)
    inputs, targets = data()
    stacked = layout.pack(dict(model.named_parameters())).unsqueeze(0)
    chain = Network(model, layout)
    values = chain.forward(layout.views(stacked), inputs.unsqueeze(0))
    errors = chain.backward(layout.views(stacked), values, targets.unsqueeze(0))
    total = torch.zeros_like(stacked)
    chain.add_weighted(values, errors, torch.ones(1, len(inputs)), total)
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(total[0], expected, rtol=1e-4, atol=1e-4)
