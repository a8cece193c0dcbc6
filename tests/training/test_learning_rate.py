"""Is `lr auto` the rule that was measured, for every memory and rule, and free of data?"""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import nn

import vestige
from conftest import make_toy
from vestige.optim.rules import Rule, sgd

COMMON = {"noise_multiplier": 2.0, "delta": 1e-5, "sample_rate": 0.25, "steps": 50}


def chosen(method, model=None, **changes):
    toy, data = make_toy()
    return vestige.train(model or toy, nn.functional.cross_entropy, data, method=method, **{**COMMON, **changes}).plan


def by_hand(clip=1.0):
    model, _ = make_toy()
    weights = sqrt(sum(float(p.detach().square().sum()) for p in model.parameters() if p.dim() >= 2))
    size = sum(p.numel() for p in model.parameters())
    noise = 2.0 * clip / (0.25 * 60)
    return weights, size, 3 * weights / (noise * sqrt(size * 50))


def test_plain_dp_sgd():
    assert chosen(vestige.dp_sgd()).lr == pytest.approx(by_hand()[2], rel=1e-5)
    assert chosen(vestige.dp_sgd(max_grad_norm=0.1)).lr == pytest.approx(by_hand(0.1)[2], rel=1e-5)


@pytest.mark.parametrize("method", ["fo-dp-sgd", "post-fm", "uniform-memory", "exponential-memory"])
def test_a_memory_of_unit_gain_changes_nothing(method):
    assert chosen(vestige.make_method(method)).lr == pytest.approx(by_hand()[2], rel=1e-5)


def test_momentum_divides_and_window_one_makes_up_for_its_gain():
    assert chosen(vestige.dp_sgd(momentum=0.9)).lr == pytest.approx(0.1 * by_hand()[2], rel=1e-5)
    assert chosen(vestige.fo_dp_sgd(window=1, beta=0.5)).lr == pytest.approx(2 * by_hand()[2], rel=1e-5)


def test_adam_moves_by_the_rate_itself():
    weights, size, _ = by_hand()
    plan = chosen(replace(vestige.dp_sgd(), rule=Rule(torch.optim.Adam)))
    assert plan.lr == pytest.approx(3 * weights / sqrt(size * 50), rel=1e-5)


def test_frozen_parameters_do_not_count():
    model, _ = make_toy()
    model[0].requires_grad_(False)
    weights = float(model[2].weight.detach().norm())
    size = sum(p.numel() for p in model[2].parameters())
    expected = 3 * weights / (2.0 / 15 * sqrt(size * 50))
    assert chosen(vestige.dp_sgd(), model).lr == pytest.approx(expected, rel=1e-5)


def test_the_data_does_not_matter_and_the_reason_is_told():
    model, (x, y) = make_toy()
    one = vestige.train(model, nn.functional.cross_entropy, (x, y), method="dp-sgd", **COMMON).plan
    two = vestige.train(model, nn.functional.cross_entropy, (100 * x, 0 * y), method="dp-sgd", **COMMON).plan
    assert one == two
    assert f"{one.lr:.4g}" in one.lr_reason
    assert "|W0|" in one.lr_reason


def test_a_number_always_wins():
    assert chosen(vestige.dp_sgd(), lr=0.7).lr == 0.7


def test_what_the_rule_cannot_know_is_refused():
    with pytest.raises(ValueError, match="no rule for the optimizer Adadelta"):
        chosen(replace(vestige.dp_sgd(), rule=Rule(torch.optim.Adadelta)))
    zero, _ = make_toy()
    for p in zero.parameters():
        nn.init.zeros_(p)
    with pytest.raises(ValueError, match="all zero"):
        chosen(vestige.dp_sgd(), zero)
    large, _ = make_toy()
    usual = chosen(vestige.dp_sgd(), large).lr
    for p in large.parameters():
        p.data *= 2.0**40
    assert chosen(vestige.dp_sgd(), large).lr == pytest.approx(usual * 2.0**40, rel=1e-6)
    for p in large.parameters():
        p.data *= 2.0**40
    with pytest.raises(ValueError, match="more than float32 can train"):
        chosen(vestige.dp_sgd(), large)


def test_momentum_out_of_range_is_refused():
    with pytest.raises(ValueError, match="momentum=1"):
        sgd(1.0)
