"""Can a key of noise come to exist twice? Copying, pickling and spawning are refused; the model and loader travel."""

import copy
import io
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from vestige.randomness.keys import Randomness

LOSS = nn.functional.cross_entropy
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda each: torch.save(each, io.BytesIO()),
    "in a list": lambda each: copy.deepcopy([each]),
    "spawn": lambda each: multiprocessing.get_context("spawn").Process(target=print, args=(each,)).start(),
}


def private_loop(engine, **loading):
    model, data = make_toy()
    return engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=0.7,
        data_loader=DataLoader(TensorDataset(*data), batch_size=12, **loading),
    )  # fmt: skip


def made(name):
    if name == "key":
        return Randomness.secret()
    if name == "shared key":
        return Randomness.shared(5)
    if name == "training":
        model, data = make_toy()
        return vestige.train(
            model, LOSS, data, method="dp-sgd", noise_multiplier=1, delta=1e-3, sample_rate=0.2, steps=2
        )
    if name == "curator":
        return made("training").curator
    engine = vestige.PrivacyEngine()
    if name == "engine":
        return engine
    _, _, loader = private_loop(engine)
    return {"engine in use": engine, "steps": engine._steps, "samples": loader.batch_sampler}[name]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    "name", ["key", "shared key", "engine", "engine in use", "training", "curator", "steps", "samples"]
)
def test_what_holds_a_key_is_not_copied(name, way):
    with pytest.raises(ValueError, match="must not exist twice"):
        COPIES[way](made(name))


def test_a_predictable_key_may_be_copied():
    key = Randomness.reproducible(3)
    for again in (copy.copy(key), copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert np.array_equal(again.stream("noise", 1).words(4), key.stream("noise", 1).words(4))


def test_the_private_model_may_still_be_copied_and_saved():
    model, optimizer, loader = private_loop(vestige.PrivacyEngine())
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    again = copy.deepcopy(model)
    assert torch.equal(next(again.parameters()), next(model.parameters()))
    torch.save(model, io.BytesIO())
    torch.save(optimizer.state_dict(), io.BytesIO())


@pytest.mark.slow
def test_spawned_workers_of_the_loader_get_no_key():
    *_, loader = private_loop(vestige.PrivacyEngine(), num_workers=1, multiprocessing_context="spawn")
    assert len(next(iter(loader))) == 2
