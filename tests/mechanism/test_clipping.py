"""Does one example move the sum by at most the bound, whatever it holds?"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from vestige.engines.reference import Reference
from vestige.engines.registry import engine_by_name
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import Automatic
from vestige.mechanism.clipping import MOST_PARTS, Flat, RunningSum


def ask(model, batch, bound=1.0, loss=nn.functional.cross_entropy):
    layout = Layout.of(model)
    total = torch.zeros(layout.size)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    norms = Reference(model, loss, layout)(batch, parameters, Flat(bound), total)
    return total, norms


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1e6])
@pytest.mark.parametrize("examples", [0, 1, 7])
def test_the_sum_equals_one_example_at_a_time_in_float64(bound, examples):
    model, (x, y) = make_toy(examples=examples)
    rows = example_gradients(model, x, y)
    total, norms = ask(model, (x, y), bound)
    np.testing.assert_allclose(total.numpy(), clip_and_sum(rows, bound), rtol=1e-4, atol=1e-6 * min(bound, 1))
    np.testing.assert_allclose(norms.numpy()[:, 0], np.linalg.norm(rows, axis=1), rtol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_reduction_of_the_loss_does_not_matter(toy, reduction):
    model, batch = toy
    plain, _ = ask(model, batch)
    other, _ = ask(model, batch, loss=nn.CrossEntropyLoss(reduction=reduction))
    assert torch.equal(plain, other)


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-6, 1e6), bound=st.floats(1e-3, 1e3), leaving=st.integers(0, 9))
def test_a_neighbouring_batch_moves_the_sum_by_at_most_the_bound(scale, bound, leaving):
    model, (x, y) = make_toy(examples=10)
    x = x.clone()
    x[leaving] *= scale
    stay = torch.arange(10) != leaving
    moved = ask(model, (x, y), bound)[0] - ask(model, (x[stay], y[stay]), bound)[0]
    assert moved.norm() <= bound * (1 + 1e-4)


def test_a_huge_example_moves_the_sum_by_exactly_the_bound():
    model, (x, y) = make_toy(examples=5)
    huge = torch.cat([x, 1e3 * torch.ones(1, 5)]), torch.cat([y, y[:1]])
    moved = ask(model, huge, 0.01)[0] - ask(model, (x, y), 0.01)[0]
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e38, 3e38])
def test_a_poisoned_example_contributes_a_finite_bounded_vector_and_leaves_the_others_alone(poison):
    model, (x, y) = make_toy(examples=6)
    clean, _ = ask(model, (torch.cat([x[:2], x[3:]]), torch.cat([y[:2], y[3:]])))
    x[2] = poison
    total, norms = ask(model, (x, y))
    assert total.isfinite().all()
    assert (total - clean).norm() <= 1 + 1e-5
    if not np.isfinite(poison):
        assert norms[2].isinf().all()
        torch.testing.assert_close(total, clean, rtol=1e-6, atol=1e-7)


def test_a_gradient_too_large_for_float32_arithmetic_is_zeroed():
    model = nn.Linear(3, 1, bias=False)
    x = torch.full((1, 3), 1e35)
    total, norms = ask(model, (x, torch.zeros(1, 1)), loss=lambda out, target: (out - target).sum())
    assert total.tolist() == [0, 0, 0]
    assert norms.isinf().all()


class Remembers(nn.Module):
    """Looks at its numbers, so that its examples run one by one, and adds the example before to each."""

    def __init__(self, keeps):
        super().__init__()
        self.layer, self.keeps, self.before = nn.Linear(5, 3), keeps, 0.0

    def forward(self, x):
        found = self.layer(x + self.before) * (1.0 if float(x.detach().sum()) < 1e9 else 0.0)
        self.before = x if self.keeps else 0.0
        return found


def test_a_model_that_keeps_an_example_for_the_next_one_is_refused():
    _, batch = make_toy(examples=4)
    ask(Remembers(keeps=False), batch)
    with pytest.raises(ValueError, match="keeps something of an example for later passes"):
        ask(Remembers(keeps=True), batch)


def test_an_unusable_bound_is_refused():
    for bound in (0.0, -1.0, float("nan"), "1", 1e-11, 1e31, 10**400):
        with pytest.raises(ValueError, match="bound"):
            Flat(bound)


@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
@pytest.mark.parametrize("scale", [1e-20, 1e-38, 1e-42])
def test_a_clip_that_divides_by_the_norm_magnifies_no_gradient_that_underflows(engine, scale):
    """With stability 0, and gradients whose squares, or whose last bits, float32 cannot hold."""
    model = nn.Linear(5, 1, bias=False)
    layout, parameters = Layout.of(model), dict(model.named_parameters())
    for seed in range(20):
        torch.manual_seed(seed)
        into = torch.zeros(layout.size)
        batch = torch.randn(1, 5) * scale, torch.zeros(1, 1)
        engine_by_name(engine)(model, lambda out, target: (out - target).sum(), layout)(
            batch, parameters, Automatic(1.0, stability=0.0), into
        )
        assert into.norm() <= 1 + 1e-6


def test_what_many_examples_add_up_to_is_rounded_as_little_as_what_few_do():
    """A million aligned gradients: in float32 alone, the last one would move the sum by more than the bound."""
    rows, each = 10**6, torch.rand(3) + 0.5
    each /= each.norm()
    running, plain = RunningSum(3, torch.device("cpu")), torch.zeros(3)
    for _ in range(rows // 1000):
        running.place(1000).add_(each * 1000)
    for _ in range(1000):
        plain.add_(each * 1000)
    before, plainly = running.total().clone(), plain.clone()
    running.place(1).add_(each)
    assert (running.total() - before).norm() == pytest.approx(1.0, abs=1e-4)
    assert abs(float((plain.add_(each) - plainly).norm()) - 1) > 1e-3, "nothing to guard against here"


def test_what_many_parts_add_up_to_is_rounded_as_little_as_what_few_do():
    """Four thousand gradients in parts of two: in float32 each part is rounded once more, here mostly down."""
    each = torch.tensor([1.0 + 3 * 2.0**-16])
    running, plain = RunningSum(1, torch.device("cpu")), torch.zeros(1)
    for _ in range(2000):
        running.place(2).add_(2 * each)
        plain.add_(2 * each)
    exact = 4000 * each.double()
    assert abs(float(running.total() - exact)) < 2e-3
    assert abs(float(plain - exact)) > 0.05, "nothing to guard against here"


@pytest.mark.slow
def test_large_samples_are_summed_in_parts_that_add_up_in_float64(toy):
    model, _ = toy
    torch.manual_seed(0)
    data = torch.randn(10_000, 5), torch.randint(3, (10_000,))
    training = vestige.train(
        model, nn.functional.cross_entropy, data, method="dp-sgd", noise_multiplier=1.0, sample_rate=1.0, steps=1,
        delta=1e-6,
    )  # fmt: skip
    curator = training.curator
    parameters = dict(model.named_parameters())
    total, norms = curator._sum(torch.arange(10_000), parameters, Flat(1.0), None, 0)
    assert total.dtype == torch.float64
    assert len(norms) == 10_000
    rows = example_gradients(model, *data)
    want = torch.from_numpy(clip_and_sum(rows, 1.0))
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-3)
    few, _ = curator._sum(torch.arange(100), parameters, Flat(1.0), None, 1)
    assert few.dtype == torch.float32


def test_sums_are_added_up_wherever_they_were_made():
    """In place, or in memory that is lent and used again: from the first on, and beyond what float32 is trusted with."""
    torch.manual_seed(8)
    parts, lent = torch.randn(MOST_PARTS + 3, 5), torch.zeros(5)
    placed, added, mixed = (RunningSum(5, torch.device("cpu")) for _ in range(3))
    for running in (placed, added, mixed):
        for number, part in enumerate(parts):
            if running is placed or (running is mixed and number % 3 == 2):
                running.place(7).add_(part)
            else:
                running.settle()
                running.lend(7, lent.copy_(part))
        torch.testing.assert_close(running.total().double(), parts.double().sum(dim=0), rtol=1e-5, atol=1e-5)


def test_a_sum_that_is_alone_stays_where_it_was_lent():
    lent = torch.ones(5)
    alone = RunningSum(5, torch.device("cpu"))
    alone.lend(7, lent)
    assert alone.total() is lent
    alone.settle()
    lent.zero_()
    assert torch.equal(alone.total(), torch.ones(5))
