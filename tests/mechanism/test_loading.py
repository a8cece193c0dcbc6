"""Are rows read as they are, each by itself, ahead of time, and is nothing changed by who reads them?"""

import multiprocessing
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

import vestige
from conftest import make_toy
from vestige.accounting.ledger import Ledger
from vestige.mechanism.examples import Examples
from vestige.mechanism.loading import Ahead, Loading, Rows

LOSS = nn.functional.cross_entropy
CPU = torch.device("cpu")
BASE = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 6, "lr": 0.1, "method": "dp-sgd"}


class Pairs(Dataset):
    """The rows of some tensors, shaken by torch's random numbers."""

    def __init__(self, tensors, shaken=0.0):
        self.tensors, self.shaken = tensors, shaken

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        x, y = (part[index] for part in self.tensors)
        return x + self.shaken * torch.randn(x.shape), y


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def trained(shaken=0.0, **changes):
    model, data = make_toy()
    training = vestige.train(model, LOSS, Pairs(data, shaken), reproducible=1, **{**BASE, **changes})
    list(training)
    return flat(model)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_physical_batch_size": 3},
        {"sample_rate": 0.01},
        {"method": "dp-sam", "lr": 0.01},
        {"method": "dpsur", "epsilon": 8.0, "noise_multiplier": None},
    ],
    ids=["whole", "in parts", "empty samples", "two samples", "comparisons"],
)
@pytest.mark.nightly("in parts", "two samples")
def test_a_run_is_the_same_whoever_reads_its_rows(changes):
    assert torch.equal(trained(**changes), trained(num_workers=2, **changes))


def test_an_interrupted_run_with_workers_and_random_rows_continues_exactly(tmp_path):
    whole = trained(shaken=1.0, num_workers=2)
    model, data = make_toy()
    start = {"reproducible": 1, "num_workers": 2, "out": tmp_path / "run", **BASE}
    training = vestige.train(model, LOSS, Pairs(data, 1.0), **start)
    for record in training:
        if record.step == 2:
            break
    training.ledger.close()
    assert not torch.equal(flat(model), whole)
    model, data = make_toy()
    list(vestige.train(model, LOSS, Pairs(data, 1.0), resume=True, **start))
    assert torch.equal(flat(model), whole)


def reading(workers=1, draw=None):
    rows = Rows([(float(i), i) for i in range(40)], None, None)
    drawn = []

    def draws(index):
        drawn.append(index)
        return (draw or (lambda i: [torch.tensor([i, i + 1]), torch.tensor([i + 2])]))(index), None

    return Ahead(rows, Loading(num_workers=workers), draws), drawn


def test_the_next_samples_are_drawn_before_they_are_asked_for():
    ahead, drawn = reading()
    assert ahead.take(3, torch.tensor([3, 4]))[0][1].tolist() == [3, 4]
    assert drawn[0] == 3
    assert max(drawn) > 3
    ahead.close()


def test_what_was_not_foreseen_is_read_all_the_same_and_what_is_not_asked_for_is_dropped():
    ahead, _ = reading()
    ahead.take(0, torch.tensor([0, 1]))  # its second part is never asked for
    assert ahead.take(1, torch.tensor([7]))[0][1].tolist() == [7]
    assert ahead.take(4, torch.tensor([4, 5]))[0][1].tolist() == [4, 5]
    assert ahead.take(4, torch.tensor([6]))[0][1].tolist() == [6]
    assert ahead.take(2, torch.tensor([2, 3]))[0][1].tolist() == [2, 3]
    ahead.close()


def test_workers_end_with_the_run_and_leave_an_interruption_to_it():
    model, data = make_toy()
    others = set(multiprocessing.active_children())
    training = vestige.train(model, LOSS, Pairs(data), num_workers=2, **BASE)
    records = iter(training)
    next(records)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
    for _ in range(4):
        next(records)
    assert all(worker.is_alive() for worker in workers)
    records.close()
    assert set(multiprocessing.active_children()) <= others


def test_a_worker_does_not_hold_the_ledger_of_a_killed_run(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open({})
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    ledger.close()  # as the system does for a killed process
    again = Ledger(tmp_path / "ledger.jsonl")
    again.hold()
    again.close()
    os.write(done[1], b"x")
    os.waitpid(child, 0)


# --- one example by itself --------------------------------------------------------------------------------------------


def padded(rows):
    """As any collate function pads: to the longest of what it is given."""
    longest = max(len(x) for x, _ in rows)
    return default_collate([(torch.cat([x, torch.full((longest - len(x),), -1.0)]), y) for x, y in rows])


SENTENCES = [(torch.arange(1.0, 2 + i % 4), i) for i in range(12)]


@pytest.mark.parametrize("collate", [None, padded])
def test_an_example_is_never_padded_by_others(collate):
    batches = Examples(SENTENCES, CPU, Loading(collate_fn=collate)).fetch(torch.arange(12))
    assert sorted(batch[0].shape[1] for batch in batches) == [1, 2, 3, 4]
    for values, places in batches:
        for row, place in zip(values, places.tolist(), strict=True):
            assert row.tolist() == SENTENCES[place][0].tolist()


def test_one_long_example_moves_a_sum_by_no_more_than_its_own_gradient():
    """A mean over positions, which a companion's padding would change for everybody."""
    loss, sums = nn.functional.mse_loss, []
    for rows in (SENTENCES, [*SENTENCES, (torch.arange(1.0, 40.0), 3)]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Linear(1, 1), nn.Flatten())
        data = [(x / 40, x / 50) for x, _ in rows]
        training = vestige.train(
            model, loss, data, collate_fn=lambda r: tuple(p for p in map(torch.stack, zip(*r, strict=True))),
            **{**BASE, "sample_rate": 1.0, "noise_multiplier": 1e-9, "steps": 1, "lr": 1.0},
        )  # fmt: skip
        before = flat(model)
        list(training)
        sums.append((flat(model) - before) * len(rows))
    assert float((sums[0] - sums[1]).norm()) <= 1.001


def test_no_rows_are_tensors_without_rows_and_cost_no_reading():
    rows = Rows([({"x": [1.0, 2.0], "label": 1})], None, None)
    rows.dataset = None
    ((x, y),) = rows.groups([])
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 2), torch.float32, (0,), torch.int64)


@pytest.mark.parametrize("workers", [-1, 1.5, "two"])
def test_a_number_of_workers_that_is_none_is_refused(workers):
    with pytest.raises(ValueError, match="num_workers="):
        Loading(num_workers=workers)
