"""Does a run do what it says: same law as DP-SGD by hand, noise once, public divisor, budget before the step?"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from vestige.mechanism import curator
from vestige.randomness.gaussian import normal
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import charged
from vestige.randomness.sampling import Poisson

LOSS = nn.functional.cross_entropy
BASE = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "steps": 5, "lr": 0.1}


def flat(model):
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def finish(model, data, **changes):
    training = vestige.train(model, LOSS, data, **{**BASE, "method": "dp-sgd", **changes})
    return training, list(training)


def test_dp_sgd_is_the_textbook_one_in_float64():
    model, data = make_toy()
    twin, _ = make_toy()
    theta, key = flat(twin).double().numpy(), Randomness.reproducible(3)
    finish(model, data, reproducible=3, method=vestige.dp_sgd(max_grad_norm=0.4), noise_multiplier=0.8)
    for t in range(5):
        rows = Poisson(0.2).draw(60, t, key)
        nn.utils.vector_to_parameters(torch.tensor(theta, dtype=torch.float32), twin.parameters())
        s = clip_and_sum(example_gradients(twin, data[0][rows], data[1][rows]), 0.4)
        z = charged(0.8, len(theta)) * 0.4 * normal(len(theta), key.stream("noise", t), torch.device("cpu")).numpy()
        theta = theta - 0.1 * (s + z) / 12
    np.testing.assert_allclose(flat(model).numpy(), theta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("physical_batch", [1, 3, 1000])
@pytest.mark.everyday("1000")
def test_any_physical_batch_gives_the_same_run(physical_batch):
    whole, data = make_toy()
    split, _ = make_toy()
    finish(whole, data, reproducible=1)
    finish(split, data, reproducible=1, max_physical_batch_size=physical_batch)
    torch.testing.assert_close(flat(split), flat(whole), rtol=1e-5, atol=1e-6)


def test_an_empty_sample_is_noised_stepped_and_charged():
    model, data = make_toy(examples=3)
    before = flat(model)
    training, records = finish(model, data, sample_rate=1e-9, steps=4, lr=1e-9)
    assert len(records) == 4
    assert sum(training.ledger.spent.values()) == 4
    moved = (flat(model) - before) * 3e-9 / 1e-9
    assert moved.std().item() == pytest.approx(2.0, rel=0.35)


def test_large_noise_has_the_promised_size():
    model, data = make_toy()
    before = flat(model)
    finish(model, data, steps=1, noise_multiplier=1e6, lr=1.0, method=vestige.dp_sgd(max_grad_norm=2.0))
    std = ((flat(model) - before) * 12).std().item()
    assert std == pytest.approx(2e6, rel=0.3)


def test_share_one_equals_dp_sgd_bit_for_bit_through_the_whole_run():
    plain, data = make_toy()
    finish(plain, data, reproducible=2, steps=20)
    for method in (
        vestige.fo_dp_sgd(beta=1.0),
        vestige.post_fm(beta=1.0),
        vestige.uniform_memory(beta=1.0),
        vestige.exponential_memory(beta=1.0),
    ):
        other, _ = make_toy()
        finish(other, data, reproducible=2, steps=20, method=method)
        assert torch.equal(flat(other), flat(plain)), method.name


def test_without_noise_clip_or_sampling_it_is_ordinary_sgd():
    model, data = make_toy()
    twin = copy.deepcopy(model)
    finish(
        model,
        data,
        method=vestige.dp_sgd(max_grad_norm=100.0, momentum=0.5),
        noise_multiplier=1e-15,
        sample_rate=1.0,
        steps=10,
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    for _ in range(10):
        optimizer.zero_grad()
        LOSS(twin(data[0]), data[1]).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-4, atol=1e-5)


class Pairs(Dataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        return tuple(part[index] for part in self.tensors)


def test_tensors_tensor_datasets_and_map_datasets_are_the_same_data():
    runs = []
    for wrap in (tuple, lambda d: TensorDataset(*d), Pairs):
        model, data = make_toy()
        finish(model, wrap(data), reproducible=4, sample_rate=0.02, steps=15)
        runs.append(flat(model))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_the_budget_stops_the_step_that_would_exceed_it():
    model, data = make_toy()
    training, records = finish(model, data, epsilon=3.0, noise_multiplier=1.0, sample_rate=0.2, steps=10_000)
    assert 0 < len(records) < 10_000
    assert training.guarantee().epsilon <= 3.0
    from vestige import accounting

    one_more = {question: count + 1 for question, count in training.ledger.spent.items()}
    assert accounting.epsilon(one_more, 1e-5) > 3.0


def test_records_never_claim_more_than_the_budget_nor_less_than_before():
    _, records = finish(*make_toy(), epsilon=2.0, noise_multiplier=None, steps=20)
    spent = [record.epsilon for record in records]
    assert spent == sorted(spent)
    assert spent[-1] <= 2.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling": "shuffled"}, "shuffl"),
        ({"reproducible": 0}, "predict|seed|secret"),
        ({"nonprivate_transcript": "t.npz"}, "raw|noise|guarantee"),
    ],
)
def test_a_combination_without_a_theorem_has_no_epsilon_and_says_why(tmp_path, changes, reason):
    if "nonprivate_transcript" in changes:
        changes = {"nonprivate_transcript": tmp_path / "t.npz"}
    training, records = finish(*make_toy(), **changes)
    promise = training.guarantee()
    assert promise.epsilon is None
    assert records[-1].epsilon is None
    import re

    assert re.search(reason, " ".join(promise.reasons))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(7), nn.SyncBatchNorm(7)])
def test_layers_that_mix_examples_are_refused_by_name(layer):
    _, data = make_toy()
    model = nn.Sequential(nn.Linear(5, 7), layer, nn.Linear(7, 3))
    with pytest.raises(ValueError, match=r"layer '1' \(.*BatchNorm.*GroupNorm"):
        finish(model, data)
    model[1].eval()
    for p in model[1].parameters():
        p.requires_grad_(False)
    finish(model, data)


def test_poisoned_examples_do_not_stop_or_infect_a_run():
    model, (x, y) = make_toy()
    x[0], x[1], x[2] = float("nan"), float("inf"), 1e38
    training, records = finish(model, (x, y), sample_rate=1.0)
    assert flat(model).isfinite().all()
    assert training.nonprivate_broken_examples >= 10
    shown = str([record.to_json() for record in records]) + str(training.guarantee())
    assert "broken" not in shown


def test_broken_examples_are_counted_step_by_step_or_together(monkeypatch):
    counts = []
    for uncounted, looks in ((curator.UNCOUNTED, True), (curator.UNCOUNTED, False), (0, False), (60, False)):
        monkeypatch.setattr(curator, "UNCOUNTED", uncounted)
        model, (x, y) = make_toy()
        x[::5] = float("nan")
        training = vestige.train(model, LOSS, (x, y), **{**BASE, "sample_rate": 0.5, "reproducible": 3})
        seen = [training.nonprivate_broken_examples if looks else 0 for _ in training]
        counts.append([*seen, training.nonprivate_broken_examples])
    assert len({each[-1] for each in counts}) == 1
    assert counts[0] == sorted(counts[0])
    assert 0 < counts[0][0] < counts[0][-1]


def test_dropout_runs_and_reproduces():
    _, data = make_toy()
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
        torch.manual_seed(len(results))
        finish(model, data, reproducible=1)
        results.append(flat(model))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "AdamW", "NAdam"])
def test_any_torch_optimizer_moves_on_the_release(name):
    from dataclasses import replace

    from vestige.optim.rules import Rule

    model, data = make_toy()
    before = flat(model)
    finish(model, data, method=replace(vestige.fo_dp_sgd(), rule=Rule(getattr(torch.optim, name))))
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_rate": 0.0}, "sample_rate=0.0"), ({"sample_rate": 1.5}, "sample_rate=1.5"), ({"steps": 0}, "steps=0"),
        ({"delta": 0.5}, "delta=0.5"), ({"delta": 1 / 60}, "delta="), ({"delta": 0.0}, "delta=0.0"), ({"lr": -1.0}, "lr=-1.0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier=0.0"), ({"noise_multiplier": None}, "give epsilon=3, say, or noise_multiplier=1"),
        ({"noise_multiplier": None, "epsilon": -1.0}, "epsilon=-1.0"), ({"method": "sgd"}, "method='sgd'"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"), ({"sampling": "sorted"}, "sampling='sorted'"), ({"engine": "warp"}, "engine='warp'"),
    ],
)  # fmt: skip
def test_impossible_requests_are_refused_by_name(changes, message):
    model, data = make_toy()
    before = flat(model)
    with pytest.raises(ValueError, match=message):
        finish(model, data, **changes)
    assert torch.equal(flat(model), before)
