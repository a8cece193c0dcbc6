"""Does a loop under Accelerate take the same private steps, whether `prepare` came before `make_private` or after?"""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_toy
from loops import BATCH, BOUND, LOSS, LR, flat, moved, oracle, same_step
from vestige import PrivacyEngine

accelerate = pytest.importorskip("accelerate")
PREPARED_FIRST, PRIVATE_FIRST = "prepare, make_private", "make_private, prepare"


@pytest.fixture(autouse=True)
def forgotten():
    """Accelerate keeps its state for the whole process."""
    forget()
    yield
    forget()


def forget():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def prepared(accelerator, order, *, engine=None, multiplier=1e-9, optimizer=None, data=None, **options):
    model, data = make_toy()[0], make_toy()[1] if data is None else data
    parts = (
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=LR),
        DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True),
    )
    engine = engine or PrivacyEngine(reproducible=3)

    def make_private(module, optimizer, loader):
        return engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=multiplier, max_grad_norm=BOUND,
            **options,
        )  # fmt: skip

    first, then = (accelerator.prepare, make_private), (make_private, accelerator.prepare)
    for each in first if order == PREPARED_FIRST else then:
        parts = each(*parts)
    return engine, *parts


CONFIGURATIONS = {
    "as it is": {},
    "split": {"split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "seedable": {"use_seedable_sampler": True},
    "uneven": {"even_batches": False},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
@pytest.mark.everyday("prepare, make_private-as it is", "make_private, prepare-uneven")
def test_each_step_is_that_of_a_plain_loop(order, configuration):
    config = accelerate.DataLoaderConfiguration(**CONFIGURATIONS[configuration])
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    engine, model, optimizer, loader = prepared(accelerator, order)
    taken = 0
    for x, y in loader:

        def step(x=x, y=y):
            with accelerator.accumulate(model):
                optimizer.zero_grad(set_to_none=True)
                accelerator.backward(LOSS(model(x), y))
                assert all(p.grad is None for p in model.parameters()), "a gradient without noise"
                assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0  # there is nothing to clip
                optimizer.step()

        same_step(model, optimizer, x, y, step=step)
        taken += 1
    assert taken == len(loader) == 5
    assert engine.asked == taken
    assert hasattr(loader, "base_dataloader")


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
def test_the_same_epsilon_as_a_plain_loop(order):
    engine, model, optimizer, loader = prepared(
        accelerate.Accelerator(cpu=True), order, engine=PrivacyEngine(), multiplier=1.3
    )
    for x, y in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    model, data = make_toy()
    plain = PrivacyEngine()
    model, optimizer, loader = plain.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        data_loader=DataLoader(TensorDataset(*data), batch_size=BATCH), noise_multiplier=1.3, max_grad_norm=BOUND,
    )  # fmt: skip
    for x, y in loader:
        LOSS(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-3) == plain.get_epsilon(1e-3)
    assert engine.guarantee(1e-3).assumptions == plain.guarantee(1e-3).assumptions


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
def test_parts_of_a_draw(order):
    """Stepping after every part, as anywhere; only the last one moves."""
    accelerator = accelerate.Accelerator(cpu=True)
    engine, model, optimizer, loader = prepared(accelerator, order, max_physical_batch_size=4)
    before, held = flat(model), []
    for x, y in loader:
        own = engine._steps.passes.parts.waiting()[0].size  # rows beyond them have no weight
        held.append(oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True))[:own]))
        accelerator.backward(LOSS(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if not torch.equal(flat(model), before):
            torch.testing.assert_close(
                torch.tensor(moved(before, flat(model))), torch.tensor(sum(held)), rtol=1e-3, atol=3e-5
            )
            before, held = flat(model), []
    assert held == []
    assert engine.asked == 5


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
def test_inputs_standardised_by_the_batch_are_refused(order):
    accelerator = accelerate.Accelerator(cpu=True)
    engine, model, optimizer, loader = prepared(accelerator, order)
    for x, y in loader:
        with pytest.raises(ValueError, match=r"not a row's own: mean at \S*test_accelerate.py:\d+"):
            accelerator.backward(LOSS(model((x - x.mean(0)) / x.std(0)), y))
        break
    assert not engine.spent


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
def test_bfloat16_is_autocast_inside_the_model(order):
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    engine, model, optimizer, loader = prepared(accelerator, order)
    x, y = next(iter(loader))
    before, expected = flat(model), oracle(model, lambda m, x, y: LOSS(m(x), y), list(zip(x, y, strict=True)))
    accelerator.backward(LOSS(model(x), y))
    optimizer.step()
    difference = abs(moved(before, flat(model)) - expected).max()
    assert 1e-5 < difference < 0.02 * abs(expected).max()


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
@pytest.mark.parametrize("parts", [None, 1])
def test_accumulation_is_refused(order, parts):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*max_physical_batch_size"):
        prepared(accelerator, order, max_physical_batch_size=parts)


def test_accumulation_that_begins_later_is_refused():
    engine, model, optimizer, loader = prepared(accelerate.Accelerator(cpu=True), PRIVATE_FIRST)
    accelerate.state.GradientState().plugin_kwargs["num_steps"] = 3
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
        model(next(iter(loader))[0])


def test_a_scaler_is_refused():
    """Accelerate makes one for fp16 where there is a GPU."""
    model, data = make_toy()
    accelerate.Accelerator(cpu=True)
    scaled = accelerate.optimizer.AcceleratedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), scaler=torch.amp.GradScaler("cpu")
    )
    with pytest.raises(ValueError, match="GradScaler"):
        PrivacyEngine().make_private(
            module=model, optimizer=scaled, data_loader=DataLoader(TensorDataset(*data), batch_size=BATCH),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip


def test_a_scaler_around_a_private_optimizer_is_refused():
    engine, model, optimizer, loader = prepared(accelerate.Accelerator(cpu=True), PRIVATE_FIRST)
    scaled = accelerate.optimizer.AcceleratedOptimizer(optimizer.optimizer, scaler=torch.amp.GradScaler("cpu"))
    x, y = next(iter(loader))
    scaled.scaler.scale(LOSS(model(x), y)).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaled.step()


def test_several_processes_are_refused(monkeypatch):
    engine, model, optimizer, loader = prepared(accelerate.Accelerator(cpu=True), PRIVATE_FIRST)
    LOSS(model((batch := next(iter(loader)))[0]), batch[1]).backward()
    monkeypatch.setitem(accelerate.state.PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ValueError, match="Accelerate runs 2 processes"):
        model(batch[0])


def test_batches_left_out_are_refused():
    """`skip_first_batches` would leave out draws that were announced."""
    accelerator = accelerate.Accelerator(cpu=True)
    engine, model, optimizer, loader = prepared(accelerator, PRIVATE_FIRST)
    x, y = next(iter(accelerator.skip_first_batches(loader, 1)))
    with pytest.raises(ValueError, match="leaving none out"):
        accelerator.backward(LOSS(model(x), y))


def test_a_schedule(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    engine, model, optimizer, loader = prepared(accelerator, PREPARED_FIRST)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for x, y in loader:
        accelerator.backward(LOSS(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [LR / 2**5]
    accelerator.save_state(str(tmp_path / "state"))
    assert (tmp_path / "state").is_dir()


@pytest.mark.parametrize("order", [PREPARED_FIRST, PRIVATE_FIRST])
def test_blanking_a_user_moves_a_step_by_the_bound(order):
    """A user's rows are one clipped vector, in parts of few rows too, whichever came first."""
    (inputs, targets), owners, states, user = make_toy()[1], np.repeat(np.arange(20), 3), [], None
    for blank in (False, True):
        large = 30 * inputs  # every gradient is clipped
        if blank:
            large[torch.from_numpy(owners == user)] = torch.nan  # these have none
        forget()
        accelerator = accelerate.Accelerator(cpu=True)
        options = {"users": owners, "sample": "users", "max_physical_batch_size": 4}
        engine, model, optimizer, loader = prepared(accelerator, order, data=(large, targets), **options)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(LOSS(model(x), y))
            optimizer.step()
            user = owners[int((large == x[0]).all(dim=1).nonzero())] if user is None else user  # who was drawn
            if engine.asked:
                break
        states.append(flat(model).double())
    assert float((states[0] - states[1]).norm()) / LR * (BATCH / 60 * 20) == pytest.approx(BOUND, rel=1e-3)
