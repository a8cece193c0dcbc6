"""Does a user's own loop get the same private step, and survive what loops really do?"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from vestige import BudgetSpent, PrivacyEngine, accounting
from vestige.questions import SampledGaussian
from vestige.training.doctor import examine

LOSS = nn.functional.cross_entropy


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def private(
    model=None, data=None, *, batch_size=12, reproducible=None, optimizer=torch.optim.SGD, lr=0.1, workers=0, **options
):
    toy, toy_data = make_toy()
    model, data = model or toy, data or toy_data
    engine = PrivacyEngine(reproducible=reproducible)
    loader = DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=True, num_workers=workers)
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    return engine, *engine.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=lr), data_loader=loader, **common
    )


def epoch(model, optimizer, loader, loss=LOSS):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "method", ["dp-sgd", "fo-dp-sgd", "post-fm", "uniform-memory", "exponential-memory", "sma-dp-sgd"]
)
@pytest.mark.parametrize("engine", ["bookkeeping", "reference"])
def test_the_loop_equals_vestige_train(method, engine):
    alone, data = make_toy()
    list(
        vestige.train(
            alone,
            LOSS,
            data,
            method=method,
            noise_multiplier=1.0,
            delta=1e-5,
            sample_rate=0.2,
            steps=10,
            lr=0.1,
            reproducible=5,
        )
    )
    _, model, optimizer, loader = private(reproducible=5, method=method, engine=engine)
    for _ in range(2):
        epoch(model, optimizer, loader)
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("physical", [1, 2, 5])
def test_physical_parts_change_nothing(physical):
    _, whole, *rest = private(reproducible=3)
    epoch(whole, *rest)
    engine, split, *rest = private(reproducible=3, max_physical_batch_size=physical)
    epoch(split, *rest)
    torch.testing.assert_close(flat(split), flat(whole), rtol=1e-4, atol=1e-6)
    assert sum(n for _, _, n in engine.history) == 5


def test_sum_reduction_is_the_same_loss():
    _, mean, *rest = private(reproducible=3)
    epoch(mean, *rest)
    _, total, *rest = private(reproducible=3, loss_reduction="sum")
    epoch(total, *rest, loss=nn.CrossEntropyLoss(reduction="sum"))
    torch.testing.assert_close(flat(total), flat(mean), rtol=1e-4, atol=1e-6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)

    def forward(self, x, *, scale=1.0):
        return self.body(x) * scale

    def greet(self):
        return "hello"


def test_the_model_keeps_its_class_keys_and_methods():
    model = Named()
    keys, cls = list(model.state_dict()), type(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(*make_toy()[1]), batch_size=6)
    same, same_optimizer, private_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert same is model
    assert same_optimizer is optimizer
    assert type(same) is cls
    assert list(same.state_dict()) == keys
    assert same.greet() == "hello"
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.max_grad_norm == 1.0
    for x, y in private_loader:
        LOSS(model(x, scale=2.0), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.eval()(torch.zeros(1, 5)).shape == (1, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_the_rate_is_exact_and_the_price_is_that_of_the_steps():
    engine, model, optimizer, loader = private(batch_size=7)
    epoch(model, optimizer, loader)
    assert len(loader) == 9
    assert engine.history == [(1.0, 7 / 60, 9)]
    assert engine.get_epsilon(1e-5) == accounting.epsilon({SampledGaussian(7 / 60, 1.0): 9}, 1e-5)


def test_a_target_epsilon_is_met_and_the_step_beyond_it_refused():
    model, data = make_toy()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(TensorDataset(*data), batch_size=12),
        target_epsilon=3.0, target_delta=1e-5, epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(2):
        epoch(model, optimizer, loader)
    assert 2.99 < engine.get_epsilon(1e-5) <= 3.0
    with pytest.raises(BudgetSpent):
        for _ in range(5):
            epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) <= 3.0
    after = flat(model)
    with pytest.raises(BudgetSpent):
        optimizer.step()
    assert torch.equal(flat(model), after)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_the_loop_between_parts_forgets_the_unfinished_draw(workers):
    engine, model, optimizer, loader = private(max_physical_batch_size=2, workers=workers)
    steps = engine._steps
    for x, y in loader:
        LOSS(model(x), y).backward()
        optimizer.step()
        if steps.gathered.uses and not steps.passes.part.last:
            break
    assert steps.gathered.total is not None
    charged = sum(n for _, _, n in engine.history)
    seen = []
    honest = steps._answer

    def watched(at):
        seen.append(dict(steps.gathered.uses) | {(one.part.draw, one.part.number): 1 for one in steps.gathered.waiting})
        return honest(at)

    steps._answer = watched
    epoch(model, optimizer, loader)
    assert sum(n for _, _, n in engine.history) == charged + 5
    assert all(len({draw for draw, _ in uses}) == 1 for uses in seen), "parts of two draws in one step"
    assert all(multiplier == 1.0 for multiplier, _, _ in engine.history)


def test_an_empty_draw_moves_by_noise_and_is_charged():
    engine, model, optimizer, loader = private(batch_size=1, data=(torch.randn(400, 5), torch.randint(3, (400,))))
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        before = flat(model)
        LOSS(model(x), y).backward()
        optimizer.step()
        assert not torch.equal(flat(model), before)
        assert flat(model).isfinite().all()
    assert 0 in sizes
    assert sum(n for _, _, n in engine.history) == 400


def test_accumulated_draws_are_charged_for_what_they_are():
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    for _ in range(3):
        x, y = next(batches)
        LOSS(model(x), y).backward()
    with pytest.warns(UserWarning, match="may enter this step 3 times"):
        optimizer.step()
    assert engine.history == [(1 / 3, 1 - 0.8**3, 1)]


def test_two_losses_on_one_batch_double_the_sensitivity_and_the_charge():
    engine, model, optimizer, loader = private()
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    model(x).square().sum(1).mean().backward()
    with pytest.warns(UserWarning, match="2 times"):
        optimizer.step()
    assert engine.history == [(0.5, 0.2, 1)]


def test_a_step_without_a_backward_is_noise_and_is_charged():
    engine, model, optimizer, loader = private()
    next(iter(loader))
    before = flat(model)
    optimizer.step()
    assert not torch.equal(flat(model), before)
    assert sum(n for _, _, n in engine.history) == 1


def test_poisoned_examples_do_not_infect_the_model():
    model, (x, y) = make_toy()
    x[3] = float("nan")
    _, model, optimizer, loader = private(model, (x, y), batch_size=60)
    epoch(model, optimizer, loader)
    assert flat(model).isfinite().all()


def test_evaluation_between_steps_is_left_alone():
    engine, model, optimizer, loader = private(reproducible=2)
    twin_engine, twin, twin_optimizer, twin_loader = private(reproducible=2)
    for (x, y), (u, v) in zip(loader, twin_loader, strict=True):
        LOSS(model(x), y).backward()
        model.eval()
        model(torch.randn(4, 5)).sum().backward()
        model.train()
        with torch.no_grad():
            model(torch.randn(4, 5))
        optimizer.step()
        LOSS(twin(u), v).backward()
        twin_optimizer.step()
    assert torch.equal(flat(model), flat(twin))


def test_without_poisson_sampling_there_is_no_epsilon():
    engine, model, optimizer, loader = private(poisson_sampling=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(model, optimizer, loader)
    with pytest.raises(ValueError, match="no epsilon holds"):
        engine.get_epsilon(1e-5)


def test_predictable_noise_has_no_epsilon():
    engine, model, optimizer, loader = private(reproducible=1)
    epoch(model, optimizer, loader)
    with pytest.raises(ValueError, match="no epsilon holds"):
        engine.get_epsilon(1e-5)


def test_the_doctor_is_content_with_the_private_loader():
    _, model, _, loader = private()
    assert not [f for f in examine(model, LOSS, loader) if f.where == "loader"]


def test_a_checkpoint_carries_memory_and_what_was_spent(tmp_path):
    engine, model, optimizer, loader = private(method="fo-dp-sgd", reproducible=4)
    epoch(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    epoch(model, optimizer, loader)
    again, other, other_optimizer, other_loader = private(method="fo-dp-sgd", reproducible=4)
    for _ in other_loader:
        pass  # the draws of the first epoch
    again.load_checkpoint(path=tmp_path / "c.pt", module=other, optimizer=other_optimizer)
    epoch(other, other_optimizer, other_loader)
    assert torch.equal(flat(other), flat(model))
    assert again.history == engine.history


def test_dictionaries_and_keyword_arguments_reach_the_model():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(5, 3)

        def forward(self, features, mask=None):
            return {"logits": self.map(features["x"]) * mask}

    data = TensorDataset(*make_toy()[1])
    model = Both()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=12), noise_multiplier=1e-9, max_grad_norm=1e3
    )  # fmt: skip
    x, y = next(iter(loader))
    twin = nn.Linear(5, 3)
    twin.load_state_dict(model.map.state_dict())
    LOSS(model({"x": x}, mask=torch.ones(3))["logits"], y).backward()
    optimizer.step()
    LOSS(twin(x), y, reduction="sum").div(12).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().ravel() for p in twin.parameters()])
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


def test_dropout_masks_of_the_two_passes_agree():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    twin = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    twin.load_state_dict(model.state_dict())
    _, model, optimizer, loader = private(model, noise_multiplier=1e-9, max_grad_norm=1e3)
    x, y = next(iter(loader))
    torch.manual_seed(7)
    LOSS(model(x), y).backward()
    optimizer.step()
    torch.manual_seed(7)
    LOSS(twin(x), y, reduction="sum").div(12).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().ravel() for p in twin.parameters()])
    torch.testing.assert_close(flat(model), expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_private_is_refused():
    model, data = make_toy()
    loader = DataLoader(TensorDataset(*data), batch_size=6)
    stranger = nn.Parameter(torch.zeros(3))
    make = lambda **o: PrivacyEngine().make_private(
        **{"module": model, "data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **o}
    )
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(ValueError, match="not the module's"):
        make(optimizer=sgd([*model.parameters(), stranger]))
    with pytest.raises(ValueError, match=r"'2.weight' is trainable but not in the optimizer"):
        make(optimizer=sgd(model[0].parameters()))
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        make(optimizer=sgd(model.parameters()), noise_multiplier=0)
    with pytest.raises(ValueError, match="BatchNorm"):
        normed = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        make(module=normed, optimizer=sgd(normed.parameters()))
    with pytest.raises(ValueError, match="no batch_size"):
        make(optimizer=sgd(model.parameters()), data_loader=DataLoader(TensorDataset(*data), batch_size=None))
