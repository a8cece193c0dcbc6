"""Does the doctor name the part at fault, and only then?"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from vestige.methods.registry import make_method
from vestige.training.doctor import examine

LOSS = nn.functional.cross_entropy


def findings(model, data=None):
    return [(f.level, f"{f.where}: {f.what}") for f in examine(model, LOSS, data or make_toy()[1])]


def test_a_healthy_model_has_no_finding():
    assert findings(make_toy()[0]) == []


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("balance", ["plain", "relative"])
def test_weights_that_are_not_finite_are_named_and_nothing_is_asked(odd, balance):
    model, data = make_toy()
    first, weight = next(iter(model.named_parameters()))
    weight.data[0, 0] = odd
    assert any(f"parameter {first!r}: holds numbers that are not finite" in what for _, what in findings(model))
    method = make_method("dp-sgd", balance=balance)
    with pytest.raises(ValueError, match=f"parameter '{first}' holds numbers that are not finite"):
        vestige.train(model, LOSS, data, method=method, epsilon=3, delta=1e-4, sample_rate=0.1, steps=2)
    loader = DataLoader(TensorDataset(*data), batch_size=5)
    with pytest.raises(ValueError, match=f"parameter '{first}' holds numbers that are not finite"):
        vestige.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=method,
        )


def test_weights_without_a_shape_are_named():
    model, data = nn.Sequential(nn.LazyLinear(3)), make_toy()[1]
    assert [what for _, what in findings(model)] == [
        "parameter '0.weight', parameter '0.bias': has no shape yet: call the model on an input that is nobody's before it "
        "is trained"
    ]
    with pytest.raises(ValueError, match="parameter '0.weight' has no shape yet"):
        vestige.train(model, LOSS, data, method="dp-sgd", epsilon=3, delta=1e-4, sample_rate=0.1, steps=2)


class CentredBatch(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(x.sum().detach())
        return x


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


def tied():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "level", "words"),
    [
        (
            nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)),
            "error",
            ["'1' (BatchNorm1d)", "GroupNorm"],
        ),
        (nn.Sequential(nn.Linear(5, 7), CentredBatch(), nn.Linear(7, 3)), "error", ["parameter '0.", "mixes examples"]),
        (nn.Sequential(nn.Linear(5, 7), Counts(), nn.Linear(7, 3)), "error", ["buffer '1.seen'", "un-noised"]),
        (
            nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
            "warning",
            ["'1' (ReLU)", "inplace=False"],
        ),
        (Unused(), "warning", ["parameter 'left.weight'", "unused"]),
        (tied(), "warning", ["'0.weight'", "tied with '1.weight'"]),
        (nn.Linear(5, 3).requires_grad_(False), "error", ["no parameter is trainable"]),
        (nn.Linear(5, 3).double(), "error", ["'weight'", "float64"]),
        (nn.Linear(4, 3), "error", ["no gradient of one example"]),
    ],
)
def test_each_fault_is_named(model, level, words):
    found = findings(model)
    assert any(got == level and all(word in line for word in words) for got, line in found), found


def test_a_cause_is_said_once_however_many_layers_have_it():
    layers = [each for _ in range(48) for each in (nn.Linear(5, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5))]
    found = findings(nn.Sequential(*layers, nn.Linear(5, 3)))
    assert len(found) == 2, found
    assert (
        "layer '2' (BatchNorm1d), layer '5' (BatchNorm1d) and 46 others like these: mixes the examples" in found[0][1]
    )
    assert "layer '1' (ReLU), layer '4' (ReLU) and 46 others like these: works in place" in found[1][1]


def test_loaders_that_are_not_poisson_are_named():
    _, data = make_toy()
    for shuffle in (True, False):
        loader = DataLoader(TensorDataset(*data), batch_size=8, shuffle=shuffle)
        assert any("not Poisson-sampled" in line for _, line in findings(make_toy()[0], loader))


def test_non_finite_inputs_are_found_wherever_they_are():
    model, (x, y) = make_toy()
    x[47, 2] = float("nan")
    assert any("1 examples hold NaN" in line and "first: 47" in line for _, line in findings(model, (x, y)))


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(5, 7), Counts(), nn.Linear(7, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    findings(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
