"""Is training in several processes refused, by every way in?"""

import pytest
import torch
import torch.distributed
from torch import nn

import vestige
from loops import LOSS, private

DATA = torch.randn(40, 6), torch.randint(3, (40,))


def train(model):
    return vestige.train(
        model, nn.functional.cross_entropy, DATA, method="dp-sgd", noise_multiplier=1.0, delta=1e-3, sample_rate=0.5,
        steps=4,
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """As torchrun leaves the environment of one of two processes."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def grouped(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


@pytest.mark.parametrize("several", ["launched", "grouped"])
@pytest.mark.parametrize("way", [train, lambda model: private(model, DATA)])
def test_one_of_several_processes_is_refused(several, way, request):
    request.getfixturevalue(several)
    with pytest.raises(ValueError, match="runs in one process here"):
        way(nn.Linear(6, 3))


@pytest.mark.parametrize("way", [train, lambda model: private(model, DATA)])
def test_a_wrapped_model_is_refused(way):
    with pytest.raises(ValueError, match="runs in one process here"):
        way(nn.DataParallel(nn.Linear(6, 3)))


def test_processes_that_join_later_are_refused_at_the_next_step(request):
    records = iter(train(nn.Linear(6, 3)))
    next(records)
    model = nn.Linear(6, 3)
    optimizer, loader = private(model, DATA)[2:]
    x, y = next(iter(loader))
    request.getfixturevalue("grouped")
    with pytest.raises(ValueError, match="runs in one process here"):
        next(records)
    LOSS(model(x), y).backward()
    with pytest.raises(ValueError, match="runs in one process here"):
        optimizer.step()


def test_a_group_of_one_process_trains(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(list(train(nn.Linear(6, 3)))) == 4
