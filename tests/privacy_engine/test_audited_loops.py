"""Do a loop's canaries join as rows do, add their bound before the noise, and change nothing for the people?"""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import faults
from loops import LOSS, oracle
from vestige import PrivacyEngine
from vestige.accounting.ledger import read
from vestige.audit.one_run import OneRun
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import sampling_by_name

PEOPLE, PLANTED, BOUND = 60, 30, 0.3


def private(engine, *, batch=12, multiplier=1e-9, **options):
    torch.manual_seed(0)
    model = nn.Linear(40, 10)
    data = TensorDataset(torch.randn(PEOPLE, 40), torch.randint(10, (PEOPLE,)), torch.arange(PEOPLE))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), max_grad_norm=BOUND,
        data_loader=DataLoader(data, batch_size=batch), noise_multiplier=multiplier, **options,
    )  # fmt: skip
    return model, optimizer, loader


def epochs(model, optimizer, loader, count=1, steps=1):
    for _ in range(count):
        for x, y, _ in loader:
            for _ in range(steps):
                optimizer.zero_grad()
                LOSS(model(x), y).backward()
                optimizer.step()


def releases(engine):
    """Every release from here on, as it is scored."""
    seen, canaries = [], engine._steps.canaries
    observe = canaries.observe
    canaries.observe = lambda total, std: (seen.append(total.double()), observe(total, std))
    return seen


def directions(canaries):
    rows = torch.zeros(canaries.count, canaries._layout.size, dtype=torch.float64)
    for number, row in enumerate(rows):
        touched, unit = canaries.direction(number)
        row[touched] = unit.double()
    return rows


CASES = {
    "poisson": {},
    "parts": {"max_physical_batch_size": 4},
    "empty draws": {"batch": 1},
    "allocation": {"sampling": "allocation"},
    "truncated": {"sampling": "truncated", "max_batch": 14},
    "two steps a batch": {"steps_per_batch": 2},
}


@pytest.mark.parametrize("replayed", [False, True], ids=["", "replayed"], indirect=True)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_without_noise_a_release_says_which_canaries_took_part(options, replayed):
    engine = PrivacyEngine(audit=PLANTED, reproducible=3)
    model, optimizer, loader = private(engine, **options)
    seen, canaries, steps = releases(engine), engine._steps.canaries, options.get("steps_per_batch", 1)
    drawn = sampling_by_name(
        options.get("sampling", "poisson"),
        options.get("batch", 12) / PEOPLE,
        PEOPLE + PLANTED,
        options.get("max_batch"),
    )
    every, rows, draw = directions(canaries), [], 0
    took_part = set()
    for x, y, index in loader:
        before, count = {name: p.detach().clone() for name, p in model.named_parameters()}, len(seen)
        rows += dict.fromkeys(index.tolist())  # beyond a part's own, rows of weight zero
        for _ in range(steps):
            here = nn.Linear(40, 10)
            here.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()
        if len(seen) == count:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
            continue
        everyone = drawn.draw(PEOPLE + PLANTED, draw, Randomness.reproducible(3))
        people = everyone[everyone < PEOPLE]
        assert sorted(rows) == (sorted(people.tolist()) or [0]), "the rows of the batch are the people of the draw"
        there = torch.zeros(PLANTED, dtype=torch.float64)
        there[everyone[everyone >= PEOPLE] - PEOPLE] = 1.0
        there *= canaries.included
        data = loader.dataset
        sum_of_people = (
            oracle(here, lambda m, x, y: LOSS(m(x), y), [data[int(i)][:2] for i in people], BOUND)
            if len(people)
            else 0.0
        )
        found = (seen[-1] - torch.as_tensor(sum_of_people)) / BOUND
        shares = torch.linalg.lstsq(every.T, found[:, None]).solution[:, 0]
        np.testing.assert_allclose(shares.numpy(), there.numpy(), atol=1e-3)
        np.testing.assert_allclose(found.numpy(), (there @ every).numpy(), atol=1e-3)
        took_part |= set(there.nonzero()[:, 0].tolist())
        rows, draw = [], draw + 1
    assert len(seen) == draw * steps
    assert took_part, "canaries were there"
    assert took_part <= set(canaries.included.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("sampling", ["poisson", "allocation"])
def test_the_people_pay_the_same_and_all_rows_are_counted(sampling, tmp_path):
    file, spent = tmp_path / "ledger.jsonl", []
    for engine in (PrivacyEngine(), PrivacyEngine(audit=PLANTED, ledger=file)):
        epochs(*private(engine, multiplier=1.0, sampling=sampling, target_delta=1e-5))
        spent.append(engine.get_epsilon(1e-5))
    assert spent[0] == spent[1]
    facts = read(file).facts
    assert facts["population"] == PEOPLE + PLANTED
    assert facts["canaries"] == PLANTED
    assert facts["sample_rate"] == 12 / PEOPLE
    assert engine._steps.expected_batch == pytest.approx(0.2 * (PEOPLE + PLANTED))
    found = engine.audit()
    assert isinstance(found, OneRun)
    assert (found.epsilon, found.delta, found.run) == (spent[1], 1e-5, str(file))
    assert json.loads(json.dumps(found.to_json()))["canaries"] == PLANTED
    assert f"at most {spent[1]:.4g}" in " ".join(found.lines())
    assert "nobody's row was copied" in " ".join(found.lines())


def test_a_truncated_sample_is_priced_for_all_rows():
    engine = PrivacyEngine(audit=PLANTED)
    epochs(*private(engine, multiplier=1.0, sampling="truncated", max_batch=20))
    (question,) = engine._ledger.spent
    assert question.population == PEOPLE + PLANTED


def test_a_budget_is_planned_with_canaries_as_without():
    noise = []
    for engine in (PrivacyEngine(), PrivacyEngine(audit=PLANTED)):
        model = nn.Linear(4, 2)
        data = TensorDataset(torch.randn(PEOPLE, 4), torch.randint(2, (PEOPLE,)))
        _, optimizer, _ = engine.make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            data_loader=DataLoader(data, batch_size=12), target_epsilon=3, target_delta=1e-5, epochs=2,
        )  # fmt: skip
        noise.append(optimizer.noise_multiplier)
    assert noise[0] == noise[1]


def test_an_honest_loop_stands_and_one_with_less_noise_is_caught(monkeypatch):
    honest = PrivacyEngine(audit=200)
    epochs(*private(honest, batch=30, multiplier=1.0), count=6)
    found = honest.audit(delta=1e-5)
    assert 0 < found.audited.epsilon_lower_bound < found.epsilon
    assert not found.contradicts
    faults.less_noise(monkeypatch, 0.02)
    broken = PrivacyEngine(audit=200)
    epochs(*private(broken, batch=30, multiplier=8.0), count=6)
    assert broken.audit(delta=1e-5).contradicts


def test_a_loop_goes_on_with_its_canaries(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine = PrivacyEngine(audit=PLANTED, ledger=file)
    model, optimizer, loader = private(engine, multiplier=1.0)
    epochs(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "saved", module=model, optimizer=optimizer)
    kept = engine._steps.canaries
    engine._ledger.close()
    with pytest.raises(ValueError, match="canaries is 31 now but was 30"):
        private(PrivacyEngine(audit=PLANTED + 1, ledger=file, resume=True), multiplier=1.0)
    again = PrivacyEngine(audit=PLANTED, ledger=file, resume=True)
    model, optimizer, loader = private(again, multiplier=1.0)
    assert again._steps.canaries.key != kept.key
    again.load_checkpoint(path=tmp_path / "saved", module=model, optimizer=optimizer)
    assert again._steps.canaries.key == kept.key
    assert torch.equal(again._steps.canaries.summed, kept.summed)
    assert torch.equal(again._steps.canaries.included, kept.included)
    held = again.state_dict()
    epochs(model, optimizer, loader)
    assert torch.equal(held["canaries"]["summed"], kept.summed), "what is held stays as it was"
    assert not torch.equal(again._steps.canaries.summed, kept.summed)
    assert again.audit(1e-5).audited.canaries == PLANTED


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ValueError, match="audit=3"):
        PrivacyEngine(audit=3)
    with pytest.raises(ValueError, match="poisson_sampling=False"):
        private(PrivacyEngine(audit=PLANTED), poisson_sampling=False)
    engine = PrivacyEngine()
    private(engine)
    with pytest.raises(ValueError, match=r"PrivacyEngine\(audit=1000\)"):
        engine.audit(1e-5)
    engine = PrivacyEngine(audit=PLANTED)
    private(engine)
    with pytest.raises(ValueError, match="delta"):
        engine.audit()
