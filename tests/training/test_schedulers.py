"""Do torch's schedulers and parameter groups do here what they do in torch, and do they survive a resume?"""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import vestige
from conftest import make_toy

LOSS = nn.functional.cross_entropy
STEPS = 8
BASE = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": STEPS, "lr": 0.1, "method": "dp-sgd"}


def warmed_up(optimizer):
    warm = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.CosineAnnealingLR(optimizer, 5)], milestones=[3])


SCHEDULES = {
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, STEPS),
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5], gamma=0.5),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.3, total_steps=STEPS, cycle_momentum=False),
    "warm-up": warmed_up,
}


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def rates_of_torch(schedule, lr=0.1):
    """The learning rates of the steps of an ordinary loop."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, found = schedule(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def watched(training):
    """The learning rates with which the optimizer stepped."""
    found = []
    training.state.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.append([group["lr"] for group in optimizer.param_groups])
    )
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_gives_the_rates_it_gives_in_torch(name):
    model, data = make_toy()
    training = vestige.train(model, LOSS, data, lr_scheduler=SCHEDULES[name], **BASE)
    found = watched(training)
    list(training)
    assert [rates[0] for rates in found] == pytest.approx(rates_of_torch(SCHEDULES[name]), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.everyday("lambda")
def test_a_resumed_run_goes_on_where_its_scheduler_was(tmp_path, name):
    start = {"reproducible": 1, "lr_scheduler": SCHEDULES[name], **BASE}
    whole, data = make_toy()
    list(vestige.train(whole, LOSS, data, **start))
    model, _ = make_toy()
    training = vestige.train(model, LOSS, data, out=tmp_path / "run", **start)
    for record in training:
        if record.step == 3:
            break
    training.ledger.close()
    model, _ = make_toy()
    list(vestige.train(model, LOSS, data, out=tmp_path / "run", resume=True, **start))
    assert torch.equal(flat(model), flat(whole))


def test_a_run_is_not_resumed_with_another_scheduler(tmp_path):
    model, data = make_toy()
    training = vestige.train(model, LOSS, data, out=tmp_path / "run", lr_scheduler=SCHEDULES["cosine"], **BASE)
    next(iter(training))
    training.ledger.close()
    with pytest.raises(ValueError, match="lr_scheduler is None now but was 'CosineAnnealingLR'"):
        vestige.train(model, LOSS, data, out=tmp_path / "run", resume=True, **BASE)


def test_a_rejected_candidate_takes_its_step_of_the_scheduler_back():
    model, data = make_toy()
    terms = {**BASE, "method": "dpsur", "steps": 20, "lr": 3.0}
    training = vestige.train(model, LOSS, data, lr_scheduler=SCHEDULES["cosine"], reproducible=2, **terms)
    accepted = [record.accepted for record in training]
    assert 0 < sum(accepted) < len(accepted)
    assert training.state.scheduler.last_epoch == sum(accepted)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (schedulers.ConstantLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)), "is a ConstantLR: give a fun"),
        (lambda optimizer: schedulers.ReduceLROnPlateau(optimizer), "a loss of the data is not released"),
        (lambda optimizer: optimizer, "makes a SGD: it must make a scheduler"),
    ],
)
def test_what_is_no_scheduler_of_the_optimizer_is_refused(wrong, message):
    model, data = make_toy()
    with pytest.raises(ValueError, match=message):
        vestige.train(model, LOSS, data, lr_scheduler=wrong, **BASE)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_have_options_of_their_own_as_in_torch():
    """Without noise, clip and sampling, a run is an ordinary one."""
    model, data = make_toy()
    twin, _ = make_toy()

    def groups(net):
        first, *rest = net.parameters()
        return [{"params": [first], "lr": 0.3, "weight_decay": 0.1}, {"params": rest}]

    plain = {**BASE, "method": vestige.dp_sgd(max_grad_norm=100.0), "noise_multiplier": 1e-15, "sample_rate": 1.0}
    training = vestige.train(model, LOSS, data, param_groups=groups(model), lr_scheduler=SCHEDULES["cosine"], **plain)
    found = watched(training)
    list(training)
    optimizer = torch.optim.SGD(groups(twin), lr=0.1)
    scheduler = SCHEDULES["cosine"](optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        LOSS(twin(data[0]), data[1]).backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-4, atol=1e-5)
    assert found[0] == [0.3, 0.1]


def test_a_parameter_that_the_model_has_not_is_refused():
    model, data = make_toy()
    groups = [{"params": [*model.parameters(), torch.nn.Parameter(torch.zeros(3))]}]
    with pytest.raises(ValueError, match=r"param_groups\[0\] has a parameter of shape \(3,\) that the model has not"):
        vestige.train(model, LOSS, data, param_groups=groups, **BASE)


def test_groups_are_part_of_what_a_resumed_run_must_repeat(tmp_path):
    model, data = make_toy()
    groups = [{"params": model.parameters(), "weight_decay": 0.1}]
    training = vestige.train(model, LOSS, data, out=tmp_path / "run", param_groups=groups, **BASE)
    next(iter(training))
    training.ledger.close()
    groups = [{"params": model.parameters(), "weight_decay": 0.2}]
    with pytest.raises(ValueError, match="param_groups is"):
        vestige.train(model, LOSS, data, out=tmp_path / "run", resume=True, param_groups=groups, **BASE)
    groups = [{"params": model.parameters(), "weight_decay": 0.1}]
    assert len(list(vestige.train(model, LOSS, data, out=tmp_path / "run", resume=True, param_groups=groups, **BASE)))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (lambda first, rest: [{"params": rest}], "leave out parameter '0.weight'"),
        (lambda first, rest: [{"params": [first, *rest]}, {"params": first}], r"param_groups\[1\] has .* once more"),
        (lambda first, rest: [[first, *rest]], r"param_groups\[0\] must be a dictionary with 'params'"),
        (lambda first, rest: [{"params": [first, *rest], "speed": 1}], None),
    ],
)
def test_groups_that_are_none_are_refused(groups, message):
    model, data = make_toy()
    first, *rest = model.parameters()
    if message is None:  # torch takes options that it does not know
        vestige.train(model, LOSS, data, param_groups=groups(first, rest), **BASE)
        return
    with pytest.raises(ValueError, match=message):
        vestige.train(model, LOSS, data, param_groups=groups(first, rest), **BASE)
