"""Is every pitfall of docs/pitfalls.md met as the page says? Each is walked into, as a person would."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import vestige
from vestige import accounting
from vestige.priced_questions import SampledGaussian

LOSS = nn.functional.cross_entropy


def data(rows=60):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=draw), torch.randint(2, (rows,), generator=draw)


def network(*between):
    return nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 2))


def private(model=None, loader=None, engine=None, lr=0.1, weight_decay=0.0, **options):
    """A private loop as in the guide."""
    model = network(nn.Tanh()) if model is None else model
    engine = engine or vestige.PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=20) if loader is None else loader,
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip
    return engine, *made


def fixed():
    """Draws of different sizes, the same ones every time: batches are told apart by their numbers of rows."""
    return vestige.PrivacyEngine(reproducible=3)


def epoch(model, optimizer, loader, loss=LOSS):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def batch_norm():
    private(network(nn.BatchNorm1d(6)))


def mixing():
    class Largest(nn.Module):
        def forward(self, x):
            return x / x.abs().max()

    _, *loop = private(network(Largest()))
    epoch(*loop)


def running_buffer():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean += x.detach().mean(0)
            return x

    _, *loop = private(network(Counts()))
    epoch(*loop)


def weighted_sampler():
    rows = TensorDataset(*data())
    private(loader=DataLoader(rows, 20, sampler=WeightedRandomSampler([1.0] * 60, 60)))


def stream():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(*data(), strict=True)

    private(loader=DataLoader(Stream(), 20))


def other_loader():
    _, model, optimizer, _ = private()
    epoch(model, optimizer, DataLoader(TensorDataset(*data()), batch_size=20, shuffle=True))


def accumulation():
    _, model, optimizer, loader = private(engine=fixed())
    for number, (x, y) in enumerate(loader):
        (LOSS(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()


def several_steps():
    _, model, optimizer, loader = private()
    for x, y in loader:
        for _ in range(2):
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()


def left_out_batch():
    _, model, optimizer, loader = private(engine=fixed())
    draws = iter(loader)
    next(draws)
    for x, y in draws:
        LOSS(model(x), y).backward()
        optimizer.step()


def weight_penalty():
    _, *loop = private()
    penalty = sum(p.square().sum() for p in loop[0].parameters())
    epoch(*loop, loss=lambda out, y: LOSS(out, y) + 0.01 * penalty)


def part_of_the_model():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    LOSS(model(x) + model[2](torch.zeros(len(x), 6)), y).backward()
    optimizer.step()


def grad_scaler():
    _, model, optimizer, loader = private()
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        scaler.scale(LOSS(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def float16_autocast():
    _, model, optimizer, loader = private()
    with torch.autocast("cpu", dtype=torch.float16):
        epoch(model, optimizer, loader)


def unfrozen_later():
    model = network(nn.Tanh())
    model[0].requires_grad_(False)
    _, *loop = private(model)
    model[0].requires_grad_(True)
    epoch(*loop)


def copy_trained():
    _, model, _, loader = private()
    twin = copy.deepcopy(model)
    epoch(twin, torch.optim.SGD(twin.parameters(), lr=0.1), loader)


def large_delta():
    vestige.train(network(), LOSS, data(), epsilon=3, delta=0.1, sample_rate=0.2, steps=2)


def trained_generator():
    _, model, _, loader = private()
    x, y = next(iter(loader))
    LOSS(model(x.requires_grad_()), y).backward()


def plateau():
    make = torch.optim.lr_scheduler.ReduceLROnPlateau
    vestige.train(network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2, lr_scheduler=make)


REFUSED = {
    batch_norm: "vestige.fix",
    mixing: "is a reduction over the batch. No example's influence can be bounded",
    running_buffer: "was changed by the forward pass",
    weighted_sampler: "has a WeightedRandomSampler",
    stream: "has an IterableDataset",
    other_loader: "train on the batches of the loader that make_private returned",
    accumulation: "draws of the private loader: each is priced as one step",
    several_steps: "train on the batches of the loader that make_private returned, each in one step",
    left_out_batch: "in order and leaving none out",
    weight_penalty: "a gradient that did not come through a call of the private model",
    part_of_the_model: "a gradient that did not come through a call of the private model",
    grad_scaler: "scaled by a GradScaler",
    float16_autocast: "autocast in float16",
    unfrozen_later: "became trainable after make_private",
    copy_trained: "is a copy of a private model",
    large_delta: "is not below 1/N",
    trained_generator: "an input of the private model requires a gradient",
    plateau: "a loss of the data is not released",
}


@pytest.mark.parametrize("pitfall", REFUSED, ids=lambda pitfall: pitfall.__name__)
def test_refused(pitfall):
    with pytest.raises(ValueError) as refused:
        pitfall()
    assert REFUSED[pitfall] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_shuffled():
    engine, *loop = private(poisson_sampling=False)
    epoch(*loop)
    with pytest.raises(ValueError, match="shuffled sampling, for which the Poisson price is not an upper bound"):
        engine.get_epsilon(delta=1e-5)
    shuffled = vestige.train(
        network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2, sampling="shuffled"
    )
    assert [record.epsilon for record in shuffled] == [None, None]
    assert shuffled.guarantee().epsilon is None


def test_seeds():
    """A seed of torch decides neither noise nor samples; a seed that does leaves no epsilon."""

    def weights():
        torch.manual_seed(0)
        _, model, *loop = private()
        torch.manual_seed(1)
        epoch(model, *loop)
        return model[0].weight.detach().clone()

    assert not torch.equal(weights(), weights())
    engine, *loop = private(engine=vestige.PrivacyEngine(reproducible=0))
    epoch(*loop)
    with pytest.raises(ValueError, match="drawn from a known seed"):
        engine.get_epsilon(delta=1e-5)


def test_weight_decay():
    """What the penalty should have been: the optimizer's own, which is public."""
    engine, *loop = private(weight_decay=0.01)
    epoch(*loop)
    assert engine.get_epsilon(delta=1e-5) > 0


def test_gradients_are_not_left_to_be_looked_at():
    _, model, optimizer, loader = private()
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()


def test_rate():
    """The rate is batch_size over the examples, not rounded to one over a whole number of batches."""
    engine, *loop = private(loader=DataLoader(TensorDataset(*data(70)), batch_size=20))
    epoch(*loop)
    ((_, rate, _),) = engine.history
    assert rate == pytest.approx(20 / 70)


def test_budget_spent():
    model = network(nn.Tanh())
    engine = vestige.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=20),
        target_epsilon=3, target_delta=1e-5, epochs=1, max_grad_norm=1.0,
    )  # fmt: skip
    with pytest.raises(vestige.BudgetSpent):
        for _ in range(3):
            epoch(model, optimizer, loader)
    assert engine.get_epsilon(delta=1e-5) <= 3


def test_opaque_loss():
    engine, *loop = private()
    with pytest.raises(ValueError, match=r"the loss is not each row's own: sum at .*test_pitfalls.py:\d+"):
        epoch(*loop, loss=lambda out, y: (LOSS(out, y, reduction="none") * (y + 1)).sum() / (y + 1).sum())
    engine, *loop = private()
    epoch(*loop, loss=engine.criterion(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))))
    assert engine.guarantee(1e-5).assumption("loss_per_example").status == "checked"


def test_float_noise():
    engine, *loop = private(engine=vestige.PrivacyEngine(secure_mode=False))
    epoch(*loop)
    assert engine.guarantee(1e-5).assumption("noise").status == "assumed"


def test_tuning():
    """Choosing the best of ten runs costs more than one, and nobody adds it unasked."""
    run = {SampledGaussian(0.04, 2.0): 1000}
    assert accounting.tuned_epsilon(run, 1e-5, expected_runs=10) > 1.5 * accounting.epsilon(run, 1e-5)
    training = vestige.train(network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2)
    assert training.guarantee().assumption("public_settings").status == "assumed"


def test_processes(monkeypatch):
    """Processes that know nothing of the run: others of a group that appear while it goes on."""
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="began in one process"):
        optimizer.step()


def test_two_rows_of_a_person():
    """What is not seen is said: with every guarantee."""
    training = vestige.train(network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2)
    assert training.guarantee().assumption("unit").status == "assumed"
    assert "a person with k rows" in training.guarantee().assumption("unit").if_false


def test_training_loss(tmp_path):
    """A loop's own print is not seen; what Vestige writes of a run holds no loss, and asking for one ends epsilon."""
    engine, *loop = private()
    seen = []

    def shown(out, y):
        loss = LOSS(out, y)
        seen.append(loss.item())
        return loss

    epoch(*loop, loss=shown)
    assert engine.get_epsilon(delta=1e-5) > 0
    assert seen
    training = vestige.train(
        network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2, out=tmp_path / "run"
    )
    assert all("loss" not in key for record in training for key in record.to_json())
    told = {"nonprivate_transcript": tmp_path / "raw.npz"}
    training = vestige.train(network(), LOSS, data(), epsilon=3, delta=1e-5, sample_rate=0.2, steps=2, **told)
    with contextlib.suppress(StopIteration):
        next(iter(training))
    assert training.guarantee().epsilon is None


def test_a_checkpoint_without_its_ledger(tmp_path):
    engine, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    engine, model, optimizer, _ = private()
    with pytest.raises(ValueError, match="what was asked after this checkpoint was saved is known to its ledger alone"):
        engine.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)


def test_weights_saved_by_hand_forget_what_they_cost():
    """What no library sees."""
    first, *loop = private()
    epoch(*loop)
    model = network(nn.Tanh())
    model.load_state_dict(loop[0].state_dict())
    second, *_ = private(model)
    assert first.get_epsilon(delta=1e-5) > second.get_epsilon(delta=1e-5) == 0
