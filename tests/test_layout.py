"""Is every trainable parameter in the flat vector exactly once?"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.utils import parametrize

import vestige
from vestige.layout import Layout, call_with, device_of


def test_segments_cover_the_vector_without_gaps(toy):
    model, _ = toy
    layout = Layout.of(model)
    assert layout.size == sum(p.numel() for p in model.parameters())
    assert [s.start for s in layout.segments][1:] == [s.stop for s in layout.segments][:-1]
    packed = layout.pack(dict(model.named_parameters()))
    for name, view in layout.views(packed).items():
        assert torch.equal(view, model.get_parameter(name))


def test_views_share_memory_and_carry_leading_axes(toy):
    layout = Layout.of(toy[0])
    stack = torch.zeros(4, layout.size)
    layout.views(stack)["0.weight"][2].fill_(1)
    assert stack.sum() == 35
    assert stack[2, :35].sum() == 35


def test_tied_weights_count_once_and_frozen_ones_never():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    assert [s.name for s in Layout.of(model).segments] == ["0.weight", "0.bias"]


def test_expand_repeats_a_group_value_over_its_coordinates():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    layout = Layout.of(model, lambda m: [["1.weight", "1.bias"], ["0.weight", "0.bias"]])
    assert layout.group_sizes == (3, 6)
    assert layout.expand(torch.tensor([5.0, 7.0])).tolist() == [7.0] * 6 + [5.0] * 3


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["0.weight"]], "'0.bias' is in no group"),
        ([["0.weight", "0.bias"], ["0.bias"]], "groups 0 and 1"),
        ([["0.weight", "0.bias", "nothing"]], "not a trainable parameter"),
    ],
)
def test_a_grouping_must_be_a_partition(groups, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(nn.Sequential(nn.Linear(2, 2)), lambda m: groups)


def test_nothing_to_train_or_the_wrong_precision_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        Layout.of(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="'weight' is torch.float64"):
        Layout.of(nn.Linear(2, 2).double())


def test_a_model_on_mps_is_refused_by_name():
    """Nobody's machine here has one: a parameter that says so stands in."""

    class Apple(torch.nn.Module):
        def named_parameters(self, *_, **__):
            yield "weight", SimpleNamespace(requires_grad=True, dtype=torch.float32, device=torch.device("mps"))

    with pytest.raises(ValueError, match=r"parameter 'weight' is on mps, .* call model.cpu\(\) first"):
        Layout.of(Apple())


def test_the_device_of_a_model_is_its_first_parameters():
    inner = nn.Sequential(nn.Tanh(), nn.Linear(2, 2, bias=False, device="meta"))
    for model in (nn.Sequential(nn.Identity(), inner, nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), inner)):
        assert device_of(model) == next(model.parameters()).device
    bare = nn.Linear(2, 2)
    bare.register_parameter("weight", None)
    assert device_of(bare) == torch.device("cpu")
    with pytest.raises(ValueError, match="no parameter"):
        device_of(nn.Tanh())


class TwoNames(nn.Module):
    """One layer under two names, and one weight of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = self.again = nn.Linear(3, 3)
        self.head, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.head.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.other(self.head(self.again(self.inner(x).tanh()) + self.shift))


class ParametrisedMeanwhile(nn.Module):
    """As peft's adapters of the experts of a mixture, which are no modules."""

    def __init__(self):
        super().__init__()
        self.inner, self.own = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        class Scaled(nn.Module):
            def forward(inner, weight):
                return weight * self.own

        parametrize.register_parametrization(self.inner, "weight", Scaled())
        try:
            return self.inner(x)
        finally:
            parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)


def test_a_call_with_other_values_of_a_model_that_parametrises_them_meanwhile():
    model, x = ParametrisedMeanwhile(), torch.randn(2, 3)
    expected, names = model(x), [*dict(model.named_parameters()), *dict(model.named_buffers())]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        torch.testing.assert_close(call_with(model, values, (x,)), expected)
        assert names == [*dict(model.named_parameters()), *dict(model.named_buffers())]
        assert isinstance(model.inner.weight, nn.Parameter)


def test_a_call_with_other_values_leaves_the_model_its_own():
    model, other, x = TwoNames(), TwoNames(), torch.randn(2, 3)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(0.1)
    held = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    values = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(call_with(model, values, (x,)), other(x))
    assert torch.equal(call_with(model, {"shift": values["shift"]}, (), {"x": x}) - model(x), call_with(
        model, {"shift": values["shift"]}, (x,)) - model(x))  # fmt: skip
    with pytest.raises(RuntimeError):
        call_with(model, values, (torch.randn(2, 4),))
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == held

    def of_one(parameters, row):
        return call_with(model, parameters, (row[None],)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(of_one), in_dims=(None, 0))(parameters, x)
    model(x[:1]).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(each[name][0], p.grad)


def test_a_layer_with_two_names_is_trained():
    """`torch.func.functional_call` would leave copies of its parameters in the model."""
    model, x = TwoNames(), torch.randn(8, 3)
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    vestige.train(
        model, nn.MSELoss(), (x, x), noise_multiplier=1e-6, delta=1e-5, steps=2, sample_rate=1.0, reproducible=1
    ).run()
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert all(p.requires_grad and not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
