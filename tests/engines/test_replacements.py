"""Does `vestige.fix` put in a layer's place what can be trained privately, and keep everything else?"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from loops import LOSS, private, same_step
from vestige.engines.independence import mixing
from vestige.engines.replacements import replacements

OPTIONS = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 4, "lr": 0.1, "reproducible": 5}


def grouped(x, groups, weight, bias, eps):
    """Group norm by its definition, in float64."""
    rows = x.reshape(len(x), groups, -1)
    rows = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + eps)
    per_channel = (1, -1) + (1,) * (x.ndim - 2)
    return rows.reshape(x.shape) * weight.reshape(per_channel) + bias.reshape(per_channel)


def with_values(norm):
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


@pytest.mark.parametrize(
    ("norm", "shape", "groups"),
    [
        (nn.BatchNorm1d(6, eps=0.3), (5, 6), 1),
        (nn.BatchNorm1d(6), (5, 6, 4), 1),
        (nn.BatchNorm2d(6, eps=0.3), (5, 6, 3, 4), 1),
        (nn.BatchNorm2d(64), (5, 64, 3, 4), 16),
        (nn.BatchNorm2d(256), (5, 256, 3, 4), 32),
        (nn.BatchNorm2d(48), (5, 48, 3, 4), 12),
        (nn.BatchNorm2d(37), (5, 37, 3, 4), 1),
        (nn.BatchNorm3d(66, momentum=None), (5, 66, 2, 3, 2), 11),
        (nn.SyncBatchNorm(40), (5, 40, 3, 4), 10),
        (nn.BatchNorm2d(40, track_running_stats=False).eval(), (5, 40, 3, 4), 10),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_becomes_a_group_norm_with_its_weights(norm, shape, groups, training):
    norm = with_values(copy.deepcopy(norm).double()).train(training)
    eps, weight, bias = norm.eps, norm.weight.detach().numpy().copy(), norm.bias.detach().numpy().copy()
    fixed = vestige.fix(norm)
    assert type(fixed) is nn.GroupNorm
    assert fixed.training is training
    assert list(fixed.state_dict()) == ["weight", "bias"]
    assert vars(fixed).keys() == vars(nn.GroupNorm(1, 1)).keys()
    assert repr(fixed) == repr(nn.GroupNorm(groups, shape[1], eps))
    x = torch.randn(shape, dtype=torch.float64)
    np.testing.assert_allclose(fixed(x).detach(), grouped(x.numpy(), groups, weight, bias, eps), rtol=1e-9, atol=1e-9)
    assert torch.equal(pickle.loads(pickle.dumps(fixed))(x), fixed(x))


def test_a_batch_norm_without_weights_becomes_a_group_norm_without():
    fixed = vestige.fix(nn.BatchNorm2d(8, affine=False))
    assert type(fixed) is nn.GroupNorm
    assert not list(fixed.parameters())
    assert fixed.affine is False
    x = torch.randn(3, 8, 4, 4)
    torch.testing.assert_close(fixed(x), nn.GroupNorm(2, 8, affine=False)(x))


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_an_instance_norm_forgets_its_statistics(kind):
    norm = with_values(kind(3, affine=True, track_running_stats=True).double())
    x = torch.randn(4, 3, *[5] * int(kind.__name__[-2]), dtype=torch.float64)
    norm(x)
    expected = grouped(x.numpy(), 3, norm.weight.detach().numpy(), norm.bias.detach().numpy(), norm.eps)
    model = nn.Sequential(norm)
    assert replacements(model) == [
        f"layer '0' ({kind.__name__}): its running statistics are dropped, and none are kept"
    ]
    assert vestige.fix(model)[0] is norm
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert repr(norm) == repr(kind(3, affine=True))
    for mode in (True, False):
        np.testing.assert_allclose(norm.train(mode)(x).detach(), expected, rtol=1e-9, atol=1e-9)
    assert not mixing(model.train())
    assert not replacements(model)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (torch.float32, "meta")]
)
def test_parameters_stay_the_ones_they_were(dtype, device):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device, dtype)
    model[1].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert vestige.fix(model) is model
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert [p.requires_grad for p in model[1].parameters()] == [False, True]
    assert {(p.dtype, p.device.type) for p in after.values()} == {(dtype, device)}
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in after.values()}


class Twice(nn.Module):
    """One norm at two places, and once more behind the back of `named_modules`; a second norm shares its weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
        self.second = nn.ModuleDict({"norm": self.first[1], "other": nn.BatchNorm2d(8)})
        self.second["other"].weight = self.first[1].weight
        self.unregistered = [self.first[1]]
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.second["other"](self.unregistered[0](self.second["norm"](self.first(x)).tanh()))
        return self.head(x.square().mean((2, 3)))


def test_what_is_shared_stays_shared_wherever_it_is_held():
    model = Twice()
    seen = []
    model.first[1].register_forward_hook(lambda module, *_: seen.append(type(module)))
    assert replacements(model) == [
        "layer 'first.1' (BatchNorm2d): nn.GroupNorm(2, 8) takes its place",
        "layer 'second.other' (BatchNorm2d): nn.GroupNorm(2, 8) takes its place",
    ]
    vestige.fix(model)
    assert not replacements(model)
    assert model.first[1] is model.second["norm"] is model.unregistered[0]
    assert model.second["other"].weight is model.first[1].weight
    assert model.second["other"] is not model.first[1]
    model(torch.randn(4, 1, 6, 6))
    assert seen == [nn.GroupNorm] * 3
    assert not any("running" in name for name in model.state_dict())


def test_a_frozen_layer_is_left_and_one_that_only_rests_is_not():
    frozen = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    frozen[1].eval().requires_grad_(False)
    assert replacements(frozen) == []
    assert type(vestige.fix(frozen)[1]) is nn.BatchNorm1d
    assert "1.running_mean" in frozen.state_dict()
    resting = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval()
    assert type(vestige.fix(resting)[1]) is nn.GroupNorm
    assert not mixing(resting.train())


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class Renamed(nn.BatchNorm1d):
    """Computes what its parent does."""


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrised():
    norm = nn.BatchNorm1d(7)
    parametrize.register_parametrization(norm, "weight", Doubled())
    return norm


def patched():
    norm = nn.BatchNorm1d(7)
    norm.forward = lambda x: 2 * x
    return norm


@pytest.mark.parametrize("norm", [Activated(7), parametrised(), patched()])
def test_what_has_no_faithful_replacement_stays_refused(norm):
    model, kind = nn.Sequential(nn.Linear(5, 7), norm, nn.Linear(7, 3)), type(norm)
    assert replacements(model) == []
    assert type(vestige.fix(model)[1]) is kind
    with pytest.raises(ValueError, match=r"layer '1' \(.*mixes.*: replace it by nn.GroupNorm, or freeze") as error:
        vestige.train(model, LOSS, make_toy()[1], **OPTIONS)
    assert "vestige.fix" not in str(error.value)


def test_a_subclass_that_computes_the_same_is_replaced():
    assert type(vestige.fix(nn.Sequential(Renamed(7)))[0]) is nn.GroupNorm


class ThenActivated(nn.BatchNorm2d):
    """As timm has it: what follows a norm is inside it, so that its weights keep their names."""

    def __init__(self, channels: int, then: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(0.5), then

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class BackToFront(ThenActivated):
    def forward(self, x):
        return self.drop(super(ThenActivated, self).forward(self.act(x)))


def test_a_batch_norm_with_an_activation_inside_becomes_a_group_norm_with_it():
    norm = with_values(ThenActivated(8, nn.SiLU(inplace=True)))
    before = {name: parameter for name, parameter in norm.named_parameters()}
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm)
    assert replacements(model) == [
        "layer '1' (ThenActivated): nn.GroupNorm(2, 8) takes its place, and what followed it inside stays"
    ]
    fixed = vestige.fix(model)[1]
    assert all(parameter is before[name] for name, parameter in fixed.named_parameters())
    assert not mixing(model)
    x = torch.randn(5, 8, 6, 6)
    want = torch.from_numpy(
        grouped(x.double().numpy(), 2, norm.weight.detach().double().numpy(), norm.bias.detach().double().numpy(), 1e-5)
    )
    torch.testing.assert_close(fixed.eval()(x).double(), want * want.sigmoid(), rtol=1e-5, atol=1e-6)
    assert float((fixed.train()(x) == 0).float().mean()) > 0.3  # its dropout is still there


def test_what_a_batch_norm_does_otherwise_with_its_layers_stays_refused():
    model = nn.Sequential(BackToFront(8, nn.Tanh()))
    assert replacements(model) == []
    assert "vestige.fix" not in mixing(model.train())[0][1]


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm2d, nn.LazyInstanceNorm2d])
def test_lazy_layers_are_refused_by_name_before_anything_changes(lazy):
    model = nn.Sequential(nn.BatchNorm2d(4), lazy(affine=True, track_running_stats=True))
    with pytest.raises(
        ValueError, match=rf"layer '1' \({lazy.__name__}\) does not know its channels.*run the model once"
    ):
        vestige.fix(model)
    assert type(model[0]) is nn.BatchNorm2d
    model(torch.zeros(2, 4, 3, 3))
    assert not mixing(vestige.fix(model))


def test_refusals_name_the_way_out():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True))
    assert len(mixing(model)) == 2
    assert all("call model = vestige.fix(model), or" in line for _, line in mixing(model))


def of_vectors():
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def of_images():
    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
    last = [nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, track_running_stats=True), nn.Tanh()]
    return nn.Sequential(nn.Sequential(block), *last, nn.Flatten(), nn.Linear(24, 3))


CASES = [(of_vectors, (5,)), (of_images, (1, 6, 6))]


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_fixed_model_trains(make, shape):
    model, data = make(), (torch.randn(60, *shape), torch.randint(3, (60,)))
    with pytest.raises(ValueError, match=r"vestige\.fix\(model\)"):
        vestige.train(model, LOSS, data, **OPTIONS)
    model = vestige.fix(model)
    before = copy.deepcopy(model.state_dict())
    assert len(list(vestige.train(model, LOSS, data, **OPTIONS))) == 4
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_fixed_model_takes_private_steps_in_a_loop(make, shape):
    data = torch.randn(60, *shape), torch.randint(3, (60,))
    _, model, optimizer, loader = private(vestige.fix(make()), data)
    for x, y in loader:
        same_step(model, optimizer, x, y)


@pytest.mark.parametrize(
    ("of_another", "message"),
    [
        (True, "holds a parameter that is not the module's .*: make it from module.parameters()"),
        (False, "parameter '0.weight' is trainable but not in the optimizer"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(of_another, message):
    model = of_vectors()
    optimizer = torch.optim.SGD(model.parameters() if of_another else model[3:].parameters(), lr=0.1)
    model = vestige.fix(copy.deepcopy(model) if of_another else model)
    loader = DataLoader(TensorDataset(*make_toy()[1]), batch_size=6)
    with pytest.raises(ValueError, match=message):
        vestige.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
