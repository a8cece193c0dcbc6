"""Is a number that is none refused by its name, by every way in?"""

import pytest
import torch
from torch import nn

import vestige
from conftest import make_toy
from loops import private


@pytest.mark.parametrize(
    "change", [{"epsilon": "3"}, {"lr": "fast"}, {"lr": float("inf")}, {"delta": True}, {"method": 3}]
)
def test_train_names_the_argument(change):
    model, data = make_toy()
    options = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 3, **change}
    with pytest.raises(ValueError, match=f"{next(iter(change))}="):
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


def test_the_rate_of_a_private_loader_cannot_be_set():
    loader = private(make_toy()[0])[3]
    with pytest.raises(AttributeError):
        loader.batch_sampler.rate = 1.0
