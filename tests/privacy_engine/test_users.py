"""In a loop of one's own: are a user's rows bounded, capped and priced, and does a step move by as many bounds?"""

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from conftest import make_toy
from users_one_by_one import LOSS, MODELS, OWNERS, one_by_one
from vestige import PrivacyEngine
from vestige.integrations.model_card import model_card
from vestige.mechanism.users.ownership import RowsOfEach
from vestige.priced_questions import AllocatedGaussian, GroupedGaussian, SampledGaussian, TruncatedGaussian

BOUND, LR, BATCH = 1.0, 0.5, 30


def private(engine=None, *, model=None, data=None, noise=1.0, target=None, **options):
    toy, (inputs, targets) = make_toy()
    model = toy if model is None else model
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
        ({"sample": "users"}, SampledGaussian(0.5, 1.0)),
        ({"sample": "users", "cap": 2}, SampledGaussian(0.5, 1.0)),
        ({"sample": "users", "sampling": "allocation"}, AllocatedGaussian(2, 1.0)),
        ({"sample": "users", "sampling": "truncated", "max_batch": 5}, TruncatedGaussian(0.5, 1.0, 5, 17)),
    ],
)
@pytest.mark.everyday("options0-expected0", "options4-expected4")
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


# --- users are sampled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("part", "cap"), [(None, None), (6, None), (None, 2)])
def test_a_step_is_the_clipped_sum_of_users_one_by_one(name, part, cap, reduction):
    torch.manual_seed(0)
    model = MODELS[name]()
    inputs, targets = make_toy()[1]
    plain = copy.deepcopy(model)
    size = 0.6  # some are clipped, some are not
    options = {"sample": "users", "cap": cap, "max_physical_batch_size": part, "max_grad_norm": size}
    options |= {"model": model, "noise": 1e-9, "loss_reduction": reduction}
    engine, model, optimizer, loader = private(PrivacyEngine(reproducible=3), **options)
    drawn = []
    for x, y, index in loader:
        assert len(index) <= 7 or part is None
        optimizer.zero_grad()
        LOSS(model(x), y, reduction=reduction).backward()
        drawn += index.tolist()
        optimizer.step()
        if engine.asked:
            break
    rows = np.unique(drawn)  # a part of one row has it twice, once with weight zero
    assert (np.bincount(OWNERS[rows]) <= (cap or 7)).all()
    if cap is None:
        assert all((OWNERS[rows] == user).sum() == (user == OWNERS).sum() for user in set(OWNERS[rows]))
    moved = [
        (b - a).detach().double().flatten() / LR for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    wanted = one_by_one(plain, (inputs, targets), rows, size) / (0.5 * 17)
    torch.testing.assert_close(torch.cat(moved), wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("part", [None, 4])
def test_blanking_a_sampled_user_moves_a_step_by_the_bound_at_most(part):
    inputs = 30 * make_toy()[1][0]
    for user in (0, 1, 10):
        blank = inputs.clone()
        blank[torch.from_numpy(user == OWNERS)] = torch.nan
        moved = []
        for data in (inputs, blank):
            options = {"sample": "users", "data": data, "noise": 1e-9, "max_physical_batch_size": part}
            engine, *loop = private(PrivacyEngine(reproducible=3), **options)
            moved.append(one_step(engine, *loop))
        (there, one), (_, other) = moved
        assert float((one - other).norm()) * 0.5 * 17 == pytest.approx(BOUND * (user in there), abs=1e-3)


def one_step(engine, model, optimizer, loader):
    """The users of the first draw, and where it left the model."""
    before, drawn = torch.cat([p.detach().flatten() for p in model.parameters()]).clone(), set()
    for x, y, index in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        drawn |= set(OWNERS[index.numpy()])
        if engine.asked:
            break
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return drawn, (before - after).double() / LR


def test_a_sampler_that_splits_users_is_seen(monkeypatch):
    """What the test above is for."""
    together = RowsOfEach.together
    alone = lambda rows, _: (rows, [(len(rows), 1)])
    monkeypatch.setattr(RowsOfEach, "together", lambda *args: alone(*together(*args)))
    inputs, moved = 30 * make_toy()[1][0], []
    for user in (None, 6):
        data = inputs.clone()
        data[torch.from_numpy(user == OWNERS)] = torch.nan
        engine, *loop = private(PrivacyEngine(reproducible=4), sample="users", data=data, noise=1e-9)
        moved.append(one_step(engine, *loop))
    assert 6 in moved[0][0]
    assert float((moved[0][1] - moved[1][1]).norm()) * 0.5 * 17 > 1.5 * BOUND


def test_one_row_per_user_is_the_loop_without_users_bit_for_bit():
    found = []
    for options in ({"users": None}, {"users": np.arange(60), "sample": "users"}):
        engine, *loop = private(PrivacyEngine(reproducible=3), **options)
        found.append(torch.cat([moved for _, moved in steps(*loop, most=2)]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "copies", [lambda x: torch.cat([x, x]), lambda x: x.repeat_interleave(2, dim=0)], ids=["cat", "interleave"]
)
def test_two_copies_of_each_row_are_their_users(copies):
    found = []
    for use in (copies, lambda x: x):
        _, model, optimizer, loader = private(PrivacyEngine(reproducible=3), sample="users", noise=1e-9)
        x, y, _ = next(iter(loader))
        LOSS(model(use(x)), use(y)).backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)


def test_rows_in_another_order_are_refused():
    _, model, optimizer, loader = private(sample="users")
    with pytest.raises(ValueError, match="row"):
        for x, y, _ in loader:
            order = torch.randperm(len(x))
            optimizer.zero_grad()
            LOSS(model(x[order]), y[order]).backward()
            optimizer.step()


def sorted_rows(rows):
    return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_that_sorts_rows_is_assumed_not_to(workers):
    model, (inputs, targets) = make_toy()
    data = TensorDataset(inputs, targets, torch.arange(60))
    loader = DataLoader(data, batch_size=BATCH, collate_fn=sorted_rows, num_workers=workers)
    engine = PrivacyEngine()
    loop = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), data_loader=loader, users=OWNERS,
        sample="users", max_grad_norm=BOUND, noise_multiplier=1.0,
    )  # fmt: skip
    if workers == 0:  # it is followed
        with pytest.raises(ValueError, match="not a row's own"):
            steps(*loop, most=1)
        return
    steps(*loop, most=1)
    said = engine.guarantee(1e-5).assumption("one_example_per_row")
    assert said.status == "assumed"
    assert "keeps the order of rows" in said.detail


def test_a_loop_goes_on_with_the_same_users_only(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine, *loop = private(PrivacyEngine(ledger=file), sample="users", target_delta=1e-5)
    steps(*loop, most=1)
    engine.close()
    others = np.roll(OWNERS, 1)
    with pytest.raises(ValueError, match="resume: owners"):
        private(PrivacyEngine(ledger=file, resume=True), sample="users", target_delta=1e-5, users=others)


def test_a_loop_about_users_does_not_go_on_about_rows(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine, *loop = private(PrivacyEngine(ledger=file), rows_per_user=60, target_delta=1e-5)
    steps(*loop, most=1)
    engine.close()
    with pytest.raises(ValueError, match="resume: users is None now but was"):
        private(PrivacyEngine(ledger=file, resume=True), users=None, target_delta=1e-5)


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
        ({"sample": "user"}, "sample='user' is unknown"),
        ({"sample": "users", "rows_per_user": 3}, "rows_per_user=3: not with sample='users'"),
        ({"sample": "users", "users": [[0, 1]] + [[owner] for owner in OWNERS[1:]]}, "several owners"),
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
