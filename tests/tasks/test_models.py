"""Does every architecture have the published size, and does every example keep its gradient to itself?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from vestige.mechanism import feature_moments
from vestige.tasks import models

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
MODELS = {
    "mlp": (lambda: models.mlp(3072, 10), (3072,), 199_082),
    "cnn grey": (lambda: models.cnn(1, 28, 10), GREY, 61_834),
    "cnn colour": (lambda: models.cnn(3, 32, 10), COLOUR, 66_890),
    "ts grey": (lambda: models.tanh_cnn_28(10), GREY, 26_010),
    "ts colour": (lambda: models.tanh_cnn_32(10), COLOUR, 550_570),
    "scattering linear": (lambda: models.scattering_linear(81, 7, 10), (81, 7, 7), 39_700),
    "scattering grey": (lambda: models.scattering_cnn_7(81, 10), (81, 7, 7), 33_066),
    "scattering colour": (lambda: models.scattering_cnn_8(243, 10), (243, 8, 8), 187_210),
    "resnet18": (lambda: models.resnet18(10), COLOUR, 11_173_962),
    "wide resnet": (lambda: models.wide_resnet(10), COLOUR, 2_753_818),
    "text": (lambda: models.TextClassifier(2), None, 2_021_202),
}
TINY = {**MODELS, "text": (lambda: models.TextClassifier(2, vocabulary=50), None, 0)}


def built(build):
    torch.manual_seed(0)
    return build()


def examples(shape: tuple[int, ...] | None, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if shape is None:
        return torch.randint(0, 50, (count, 12), generator=generator)
    return torch.randn(count, *shape, generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    build, _, parameters = MODELS[name]
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", TINY)
@pytest.mark.everyday("mlp", "ts grey", "scattering linear", "scattering grey")
def test_per_example_gradients_equal_one_at_a_time(name):
    build, shape, _ = TINY[name]
    # In double precision: where rounding carries a unit across the kink of a ReLU, float32 gradients differ by more.
    model, inputs = built(build).double(), examples(shape)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    targets = torch.tensor([1, 0, 1])
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for index in range(3):
        model.zero_grad()
        functional.cross_entropy(model(inputs[index : index + 1]), targets[index : index + 1]).backward()
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(together[parameter_name][index], parameter.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.nightly("resnet18", "wide resnet")
def test_examples_never_meet(name):
    build, shape, _ = TINY[name]
    model, inputs = built(build), examples(shape)
    other = torch.cat([inputs[:1], examples(shape, 4)[2:]])
    with torch.no_grad():
        torch.testing.assert_close(model(inputs)[0], model(other)[0], rtol=1e-4, atol=1e-5)
    for module in model.modules():
        assert not isinstance(module, nn.modules.batchnorm._BatchNorm)
        assert not getattr(module, "inplace", False)


def test_resnet18_has_21_weight_matrices():
    with torch.device("meta"):
        model = models.resnet18(100)
    matrices = [m for m in model.modules() if getattr(m, "weight", None) is not None and m.weight.ndim >= 2]
    assert len(matrices) == 21


def test_standardised_filters_ignore_shift_and_scale_of_their_weights():
    layer = built(lambda: models.StandardisedConv2d(4, 8, 3))
    x = examples((4, 6, 6))
    expected = layer(x)
    with torch.no_grad():
        layer.weight.mul_(3).add_(0.7)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_the_lstm_equals_torch():
    theirs = built(lambda: nn.LSTM(5, 7, batch_first=True, bidirectional=True))
    ours = models.LSTM(5, 7), models.LSTM(5, 7, backward=True)
    with torch.no_grad():
        for layer, suffix in zip(ours, ("l0", "l0_reverse"), strict=True):
            layer.from_input.weight.copy_(getattr(theirs, f"weight_ih_{suffix}"))
            layer.from_hidden.weight.copy_(getattr(theirs, f"weight_hh_{suffix}"))
            layer.from_input.bias.copy_(getattr(theirs, f"bias_ih_{suffix}"))
            layer.from_hidden.bias.copy_(getattr(theirs, f"bias_hh_{suffix}"))
    x = examples((9, 5))
    torch.testing.assert_close(torch.cat([layer(x) for layer in ours], dim=-1), theirs(x)[0])


def test_channel_moments_are_bounded_per_example():
    features = examples((6, 4, 4), 20)
    everyone, sensitivities = feature_moments.channel_moments(features, (0.3, 2.0))
    assert sensitivities == (0.3, 2.0)
    for index in range(20):
        without = torch.cat([features[:index], features[index + 1 :]])
        moved = everyone - feature_moments.channel_moments(without, (0.3, 2.0))[0]
        assert (torch.linalg.vector_norm(moved, dim=-1) <= torch.tensor([0.3, 2.0]).double() * (1 + 1e-6)).all()


def test_broken_examples_add_nothing_to_channel_moments():
    features = examples((6, 4, 4), 5)
    expected, _ = feature_moments.channel_moments(features, (1.0, 1.0))
    broken = torch.stack([torch.full((6, 4, 4), value) for value in (torch.nan, torch.inf)])
    found, _ = feature_moments.channel_moments(torch.cat([features, broken]), (1.0, 1.0))
    torch.testing.assert_close(found, expected)
    huge, _ = feature_moments.channel_moments(torch.cat([features, torch.full((1, 6, 4, 4), 1e38)]), (1.0, 1.0))
    assert (torch.linalg.vector_norm(huge - expected, dim=-1) <= 1 + 1e-9).all()
    assert not feature_moments.channel_moments(torch.zeros(3, 6, 4, 4), (1.0, 1.0))[0].any()
    with pytest.raises(ValueError, match="bounds"):
        feature_moments.channel_moments(features, (0.0, 1.0))


def test_standardise_uses_the_moments_it_is_given():
    features = examples((6, 8, 8), 50) * 3 + 1
    totals, _ = feature_moments.channel_moments(features, (1e9, 1e9))
    normalised = feature_moments.Standardise.from_moments(totals, 50)(features)
    torch.testing.assert_close(normalised.mean((0, 2, 3)), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(normalised.var((0, 2, 3), correction=0), torch.ones(6), atol=1e-3, rtol=0)
    totals[1] = 0.0  # noise may leave a variance below zero
    assert not feature_moments.Standardise.from_moments(totals, 50)(features).any()
