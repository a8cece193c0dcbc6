"""Is a number that is none refused by its name, by every way in?"""

import numpy as np
import pytest
import torch
from torch import nn

import vestige
from conftest import make_toy
from loops import private
from vestige.accounting import epsilon
from vestige.priced_questions import SampledGaussian
from vestige.training.verify import verify


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "3"},
        {"epsilon": 10**400},
        {"lr": "fast"},
        {"lr": float("inf")},
        {"delta": True},
        {"delta": None},
        {"method": 3},
        {"max_grad_norm": "1"},
        {"max_grad_norm": 1e-45},
        {"reproducible": "x"},
        {"reproducible": -1},
        {"lr": "auto", "epsilon": None, "noise_multiplier": 1e-90},
    ],
)
def test_train_names_the_argument(change):
    model, data = make_toy()
    options = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 3, **change}
    with pytest.raises(ValueError, match=f"{next(iter(change))}(=| is)"):
        vestige.train(model, nn.functional.cross_entropy, data, **options)


@pytest.mark.parametrize("bound", ["1", float("inf"), float("nan")])
def test_make_private_names_the_argument(bound):
    from torch.utils.data import DataLoader, TensorDataset

    model, data = make_toy()
    with pytest.raises(ValueError, match="max_grad_norm="):
        vestige.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(*data), batch_size=12), max_grad_norm=bound,
        )  # fmt: skip
    private(model, data)  # nothing was left behind


NUMBERS = {
    "epsilon": np.float32(3),
    "delta": np.float32(1e-5),
    "sample_rate": np.float32(0.2),
    "steps": np.int64(3),
    "max_grad_norm": np.float32(0.5),
    "max_physical_batch_size": np.int64(7),
}


def test_numbers_of_numpy_are_numbers(tmp_path):
    """As Python's: they are written to files, and do not round what they are added to."""
    plain = {name: value.item() for name, value in NUMBERS.items()}
    found = []
    for number, options in enumerate((NUMBERS, plain)):
        model, data = make_toy()
        training = vestige.train(model, nn.functional.cross_entropy, data, out=tmp_path / str(number), **options)
        training.run()
        assert verify(tmp_path / str(number)).guarantee.epsilon == training.guarantee().epsilon
        found.append((training.plan, training.guarantee().epsilon))
    assert found[0] == found[1]
    questions = (SampledGaussian(np.float32(0.1), np.float32(1.5)), SampledGaussian(float(np.float32(0.1)), 1.5))
    assert epsilon({questions[0]: 10}, 1e-5) == epsilon({questions[1]: 10}, 1e-5)
    assert all(type(value) is float for value in vars(questions[0]).values())
    private(make_toy()[0], multiplier=np.float32(1.5), target_delta=np.float32(1e-5))


def test_the_rate_of_a_private_loader_cannot_be_set():
    loader = private(make_toy()[0])[3]
    with pytest.raises(AttributeError):
        loader.batch_sampler.rate = 1.0
