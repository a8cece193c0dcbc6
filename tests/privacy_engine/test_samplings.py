"""Does a user's loop draw what it is charged for, where samples are not plain Poisson ones?"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from conftest import make_toy
from vestige import PrivacyEngine, accounting
from vestige.accounting.ledger import read
from vestige.priced_questions import AllocatedGaussian, TruncatedGaussian

LOSS = nn.functional.cross_entropy


def private(engine=None, *, batch=12, target=None, **options):
    model, (inputs, targets) = make_toy()
    loader = DataLoader(TensorDataset(inputs, targets, torch.arange(60)), batch_size=batch)
    engine = engine or PrivacyEngine()
    common = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": loader}
    if target is None:
        made = engine.make_private(**common, noise_multiplier=1.0, max_grad_norm=1.0, **options)
    else:
        made = engine.make_private_with_epsilon(
            **common, target_epsilon=target, target_delta=1e-5, max_grad_norm=1.0, **options
        )
    return (engine, *made)


def epoch(model, optimizer, loader, most=None):
    """One pass over the loader, of at most so many steps: the rows of each batch."""
    rows = []
    for x, y, index in loader:
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        rows.append(index.tolist())
        if most is not None and len(rows) == most:
            break
    return rows


@pytest.mark.parametrize("part", [None, 4])
def test_each_example_once_an_epoch_and_an_epoch_is_one_question(part):
    engine, *loop = private(sampling="allocation", max_physical_batch_size=part)
    assert part or len(loop[2]) == 5
    for count in (1, 2):
        rows = epoch(*loop)
        found = sorted(row for batch in rows for row in (set(batch) if len(batch) == 2 else batch))
        assert [row for row in found if row] == list(range(1, 60)), "rows beyond a part's own are ones it has, or row 0"
        assert engine.spent == {AllocatedGaussian(5, 1.0): count}
    assert engine.get_epsilon(1e-5) == pytest.approx(accounting.epsilon({AllocatedGaussian(5, 1.0): 2}, 1e-5), rel=1e-6)


def test_a_pass_that_was_left_is_over_and_the_next_one_is_charged(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine, *loop = private(PrivacyEngine(ledger=file), sampling="allocation")
    first, second = epoch(*loop, most=2), epoch(*loop)
    assert len(first) == 2
    assert len({row for batch in second for row in batch}) == 60
    assert engine.spent == {AllocatedGaussian(5, 1.0): 2}
    engine.close()
    engine, *loop = private(PrivacyEngine(ledger=file, resume=True), sampling="allocation")
    epoch(*loop)
    assert read(file).asks == {AllocatedGaussian(5, 1.0): 3}
    engine.close()
    with pytest.raises(ValueError, match="sampling is 'poisson' now"):
        private(PrivacyEngine(ledger=file, resume=True))


def test_going_back_to_a_checkpoint_keeps_the_charge(tmp_path):
    engine, *loop = private(PrivacyEngine(ledger=tmp_path / "ledger.jsonl"), sampling="allocation")
    epoch(*loop, most=3)
    engine.save_checkpoint(path=tmp_path / "saved", module=loop[0], optimizer=loop[1])
    epoch(*loop, most=1)
    engine.load_checkpoint(path=tmp_path / "saved", module=loop[0], optimizer=loop[1])
    epoch(*loop)
    assert read(tmp_path / "ledger.jsonl").asks == {AllocatedGaussian(5, 1.0): 3} == engine.spent


def test_the_budget_stops_between_epochs():
    engine, *loop = private(target=3.0, epochs=2, sampling="allocation")
    for _ in range(2):
        assert engine.may_step
        assert len(epoch(*loop)) == 5
    assert not engine.may_step
    with pytest.raises(vestige.BudgetSpent):
        epoch(*loop)
    assert 2.9 < engine.get_epsilon(1e-5) <= 3.0
    engine, *loop = private(target=3.0, epochs=1, sampling="allocation")
    going_on = iter(loop[2])
    epoch(*loop[:2], going_on, most=2)
    assert engine.may_step, "the rest of the epoch is paid"
    del going_on
    assert not engine.may_step, "the pass was left: the next one begins another epoch"
    next(iter(loop[2]))
    assert not engine.may_step, "what was handed out begins another epoch"
    with pytest.raises(ValueError, match="cannot price AllocatedGaussian; take guarantee"):
        _ = engine.history


def test_truncated_batches_never_exceed_their_bound():
    engine, *loop = private(sampling="truncated", max_batch=13)
    sizes = [len(batch) for _ in range(6) for batch in epoch(*loop)]
    assert max(sizes) == 13
    assert engine.spent == {TruncatedGaussian(0.2, 1.0, 13, 60): 30}
    assert engine.get_epsilon(1e-5) > 0


def test_what_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="poisson_sampling=False keeps"):
        private(sampling="shuffled")
    with pytest.raises(ValueError, match="leave sampling='allocation'"):
        private(sampling="allocation", poisson_sampling=False)
    with pytest.raises(ValueError, match="max_batch=5"):
        private(max_batch=5)
