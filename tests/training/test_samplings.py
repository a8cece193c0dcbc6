"""Is what was drawn what was priced? Random allocation and truncated samples in training, resumed and budgeted."""

import pytest
import torch
from torch import nn

import vestige
from conftest import make_toy
from vestige import accounting
from vestige.accounting.ledger import read
from vestige.mechanism.private_evaluation import PrivateEvaluation
from vestige.priced_questions import AllocatedGaussian, Gaussian, TruncatedGaussian
from vestige.training.persistence import saver
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
PERIOD = 5
EPOCH = AllocatedGaussian(PERIOD, 1.0)
COMMON = {"noise_multiplier": 1.0, "delta": 1e-5, "sample_rate": 0.2, "lr": 0.05, "method": "dp-sgd"}


def start(steps=15, sampling="allocation", **changes):
    model, data = make_toy()
    return vestige.train(model, LOSS, data, steps=steps, sampling=sampling, **{**COMMON, **changes})


def watched(training):
    """The rows that each step's sum is over, as they are fetched."""
    seen, fetch = [], training.curator._fetch

    def fetching(index, rows):
        seen.append((index, rows.tolist()))
        return fetch(index, rows)

    training.curator._fetch = fetching
    return seen


def test_every_example_is_summed_once_an_epoch_and_an_epoch_is_charged_once(tmp_path):
    training = start(out=tmp_path / "run")
    seen = watched(training)
    for record in training:
        assert training.ledger.spent == {EPOCH: record.step // PERIOD + 1}
    rows = [[row for index, part in seen if index // PERIOD == epoch for row in part] for epoch in range(3)]
    assert [sorted(each) for each in rows] == [list(range(60))] * 3
    assert [index for index, _ in seen] == list(range(15))
    history = read(tmp_path / "run" / "ledger.jsonl")
    assert history.asks == {EPOCH: 3}
    assert list(history.paid) == [(0, 0), (5, 0), (10, 0)]
    assert training.guarantee().epsilon == pytest.approx(accounting.epsilon({EPOCH: 3}, 1e-5), rel=1e-6)
    assert verify(tmp_path / "run").guarantee.epsilon == training.guarantee().epsilon


def test_it_costs_less_than_poisson_sampling():
    assert start().guarantee().epsilon == 0.0
    cheap, dear = start(), start(sampling="poisson")
    for training in (cheap, dear):
        list(training)
    assert cheap.guarantee().epsilon < 0.95 * dear.guarantee().epsilon


def test_a_run_that_is_continued_inside_an_epoch_pays_for_it_again(tmp_path):
    training = start(out=tmp_path / "run")
    for record in training:
        if record.step == 6:
            saver(training, training.folder)()
            break
    training.ledger.close()
    again = start(out=tmp_path / "run", resume=True)
    assert again.state.step == 7
    seen = watched(again)
    list(again)
    assert again.ledger.spent == {EPOCH: 4}, "epochs 0 and 1, epoch 1 again, and epoch 2"
    assert len(seen) == 8
    assert verify(tmp_path / "run").asked == 4


def test_the_checkpoint_holds_no_allocation(tmp_path):
    training = start(out=tmp_path / "run", steps=10)
    for record in training:
        if record.step == 2:
            saver(training, training.folder)()
            break
    saved = training.folder.load_checkpoint()
    assert set(saved) == {"state", "asked", "compared", "normalised", "ledger_rows", "ledger_head"}
    first, second = (start(steps=10).curator for _ in range(2))
    assert not torch.equal(*(c._sampling.draw(60, 3, c._randomness) for c in (first, second)))


def test_a_reproducible_run_replays_its_epoch_for_free(tmp_path):
    alone = start(reproducible=3)
    list(alone)
    training = start(out=tmp_path / "run", reproducible=3)
    for record in training:
        if record.step == 6:
            saver(training, training.folder)()
            break
    training.ledger.close()
    again = start(out=tmp_path / "run", resume=True, reproducible=3)
    list(again)
    assert again.ledger.spent == {EPOCH: 3}
    for one, other in zip(alone.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_budget_stops_between_epochs_only():
    two = accounting.epsilon({EPOCH: 2}, 1e-5)
    training = start(steps=30, epsilon=1.001 * two)
    assert len(list(training)) == 2 * PERIOD
    assert training.result().stopped == "budget"
    assert training.guarantee().epsilon <= 1.001 * two
    planned = start(steps=None, epsilon=1.001 * two)
    assert planned.plan.steps == 2 * PERIOD
    begun = start(steps=7)
    list(begun)
    assert begun.ledger.spent == {EPOCH: 2}, "an epoch that was begun is charged whole"


def test_noise_is_calibrated_to_epochs():
    training = start(noise_multiplier=None, epsilon=3.0, evaluate=PrivateEvaluation(error=0.5))
    (question,) = (q for q in training.planned if isinstance(q, AllocatedGaussian))
    assert training.planned[question] == 3
    assert any(isinstance(q, Gaussian) for q in training.planned)
    list(training)
    assert 2.9 < training.guarantee().epsilon <= 3.0
    assert training.private_accuracy is not None


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("dp-bandmf", "correlated noise"),
        ("dpsur", "gate"),
        ("dp-is", "importance"),
        ("dp-quantile", "adaptive clip"),
        ("adp-adamw", "noise schedule"),
    ],
)
def test_what_has_no_theorem_is_refused(method, said):
    for sampling, most in (("allocation", None), ("truncated", 30)):
        with pytest.raises(ValueError, match=said):
            start(method=method, sampling=sampling, max_batch=most, epsilon=3.0, noise_multiplier=None)


def test_a_truncated_sample_never_exceeds_its_bound_and_is_priced_so(tmp_path):
    training = start(sampling="truncated", max_batch=12, out=tmp_path / "run")
    seen = watched(training)
    list(training)
    assert max(len(rows) for _, rows in seen) <= 12
    question = TruncatedGaussian(0.2, 1.0, 12, 60)
    assert training.ledger.spent == {question: 15}
    assert verify(tmp_path / "run").guarantee.epsilon == pytest.approx(
        accounting.epsilon({question: 15}, 1e-5), rel=1e-6
    )
    with pytest.raises(ValueError, match="max_batch"):
        start(sampling="truncated")
    with pytest.raises(ValueError, match="max_batch is 13 now but was 12"):
        start(sampling="truncated", max_batch=13, out=tmp_path / "run", resume=True)


def test_room_for_everybody_is_poisson_bit_for_bit():
    models = []
    for sampling, most in (("truncated", 60), ("poisson", None)):
        training = start(sampling=sampling, max_batch=most, reproducible=1)
        list(training)
        models.append(training.model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
