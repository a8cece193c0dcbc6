"""In a loop of one's own: are a user's rows bounded, capped and priced, and does a step move by as many bounds?"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_toy
from vestige import PrivacyEngine
from vestige.integrations.model_card import model_card
from vestige.questions import AllocatedGaussian, GroupedGaussian, SampledGaussian

LOSS = nn.functional.cross_entropy
OWNERS = np.repeat(np.arange(17), [1, 7, 4, 3, 5, 2, 6, 1, 4, 3, 7, 2, 1, 6, 4, 3, 1])
BOUND, LR, BATCH = 1.0, 0.5, 30


def private(engine=None, *, data=None, noise=1.0, target=None, **options):
    model, (inputs, targets) = make_toy()
    data = TensorDataset(inputs if data is None else data, targets, torch.arange(60))
    loader = DataLoader(data, batch_size=BATCH)
    engine = engine or PrivacyEngine()
    common = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=LR), "data_loader": loader}
    common |= {"users": OWNERS, "max_grad_norm": BOUND} | options
    if target is None:
        return (engine, *engine.make_private(**common, noise_multiplier=noise))
    return (engine, *engine.make_private_with_epsilon(**common, target_epsilon=target, target_delta=1e-5, epochs=2))


def steps(model, optimizer, loader, most):
    """The rows of each step, and where it left the model."""
    found = []
    for x, y, index in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        optimizer.step()
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        found.append((index.numpy(), (before - after).double() / LR))
        if len(found) == most:
            break
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GroupedGaussian(0.5, 1.0, 7)),
        ({"cap": 2}, GroupedGaussian(0.5, 1.0, 7, 2)),
        ({"rows_per_user": 3}, GroupedGaussian(BATCH / 41, 1.0, 3)),
        ({"rows_per_user": 1, "sampling": "allocation"}, AllocatedGaussian(1, 1.0)),
        ({"users": np.arange(60)}, SampledGaussian(0.5, 1.0)),
    ],
)
def test_what_is_drawn_and_charged(options, expected):
    engine, *loop = private(**options)
    users = np.array(options.get("users", OWNERS))
    bound = min(options.get("cap", 60), options.get("rows_per_user", 60))
    for rows, _ in steps(*loop, most=2):
        assert np.bincount(users[rows]).max() <= bound
    assert set(engine.spent) == {expected}
    said = engine.guarantee(1e-5)
    assert said.epsilon is not None
    assert said.unit == "user"


@pytest.mark.parametrize("options", [{}, {"cap": 1}])
def test_blanking_a_user_moves_a_step_by_as_many_bounds_as_rows_were_drawn(options):
    inputs = 30 * make_toy()[1][0]  # every gradient is clipped
    blank = inputs.clone()
    blank[torch.from_numpy(OWNERS == 1)] = torch.nan
    moved = []
    for data in (inputs, blank):
        _, *loop = private(PrivacyEngine(reproducible=3), data=data, noise=1e-9, **options)
        moved.append(steps(*loop, most=1)[0])
    drawn = int((OWNERS[moved[0][0]] == 1).sum())
    assert (drawn > 1) is (not options)
    assert float((moved[0][1] - moved[1][1]).norm()) * BATCH <= drawn * BOUND + 1e-3


def test_a_budget_is_kept_resumed_and_shown(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine, *loop = private(PrivacyEngine(ledger=file), target=4.0, rows_per_user=3)
    steps(*loop, most=2)
    assert engine.get_epsilon(1e-5) <= 4.0
    engine.close()
    assert "one user: all rows of one" in model_card(tmp_path)
    noise = engine._private_steps().planned.multiplier
    with pytest.raises(ValueError, match="users is"):
        again = {"noise": noise, "target_delta": 1e-5, "rows_per_user": 3, "cap": 2}
        private(PrivacyEngine(ledger=file, resume=True), **again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": "users"}, r"vestige.train\(users=..., sample='users'\)"),
        ({"sampling": "allocation"}, "sampling='allocation'"),
        ({"users": OWNERS[1:]}, "59 ids for 60 rows"),
        ({"users": None, "cap": 2}, "cap=2 is about users"),
        ({"target_delta": 0.2}, "delta=0.2"),
        ({"poisson_sampling": False}, "batches of your own"),
    ],
)
def test_mistakes_name_argument_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        private(**options)
