"""Do a loop's canaries join as rows do, add their bound before the noise, and change nothing for the people?"""

import json

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import faults
from loops import LOSS, oracle
from vestige import PrivacyEngine, build
from vestige.accounting.ledger import read
from vestige.audit.read_one_run_audit import OneRun
from vestige.engines import bookkeeping
from vestige.processes.sums import Sums
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Poisson, sampling_by_name
from vestige.training.results import Joined

PEOPLE, PLANTED, BOUND = 60, 30, 0.3


def private(engine, *, batch=12, multiplier=1e-9, width=40, **options):
    torch.manual_seed(0)
    model = nn.Linear(width, 10)
    data = TensorDataset(torch.randn(PEOPLE, width), torch.randint(10, (PEOPLE,)), torch.arange(PEOPLE))
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


@pytest.mark.parametrize(
    ("options", "replayed"),
    [
        *(pytest.param(options, False, id=name) for name, options in CASES.items()),
        pytest.param({}, True, id="no graph"),
    ],
    indirect=["replayed"],
)
@pytest.mark.everyday("poisson", "allocation")
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
        rows += index.tolist()  # some twice: they carry canaries, or have weight zero
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
        assert sorted(set(rows)) == (sorted(people.tolist()) or [0]), "the rows of the batch are the people of the draw"
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
    assert "counted twice" in " ".join(found.lines())


def test_a_truncated_sample_is_priced_for_all_rows():
    engine = PrivacyEngine(audit=PLANTED)
    epochs(*private(engine, multiplier=1.0, sampling="truncated", max_batch=20))
    (question,) = engine.spent
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


def no_clip(monkeypatch, engine, loader):
    monkeypatch.setattr(bookkeeping, "weights", lambda clip, norms: torch.ones_like(norms))


def same_noise(monkeypatch, engine, loader):
    noised = Sums.noised
    monkeypatch.setattr(Sums, "noised", lambda *args: noised(*args[:-1], 0))


def less_noise(monkeypatch, engine, loader):
    faults.less_noise(monkeypatch, 0.02)


def twice_the_rate(monkeypatch, engine, loader):
    batches = loader.batch_sampler
    monkeypatch.setattr(batches, "_sampling", Poisson(2 * batches.rate))


FAULTS = {
    "no clip": (no_clip, 16.0),
    "the same noise at every step": (same_noise, 16.0),
    "less noise": (less_noise, 16.0),
    "twice the rate": (twice_the_rate, 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.everyday("less noise")
def test_a_loop_with_a_fault_is_caught(fault, monkeypatch):
    """Canaries go through the user's own passes: whatever is wrong between them and the release happens to them too."""
    break_it, multiplier = FAULTS[fault]
    engine = PrivacyEngine(audit=200)
    model, optimizer, loader = private(engine, batch=30, multiplier=multiplier, width=400)
    break_it(monkeypatch, engine, loader)
    epochs(model, optimizer, loader, count=10)
    found = engine.audit(delta=1e-5)
    assert found.contradicts, found.lines()
    assert found.oversampled == (fault == "twice the rate")
    assert "CONTRADICTION" in found.lines()[-1]


@pytest.mark.parametrize("sampling", [{}, {"sampling": "allocation"}, {"sampling": "truncated", "max_batch": 100}])
@pytest.mark.nightly("sampling1")
def test_an_honest_loop_stands(sampling):
    engine = PrivacyEngine(audit=200)
    epochs(*private(engine, batch=30, multiplier=1.0, **sampling), count=6)
    found = engine.audit(delta=1e-5)
    assert 0 < found.audited.epsilon_lower_bound < found.epsilon
    assert not found.contradicts
    assert found.joined.chances == 12 * 200
    assert found.to_json()["drawn"]["rate"] == 0.5
    if not sampling:
        assert found.joined.joined / found.joined.chances == pytest.approx(0.5, abs=0.06)


def test_how_often_canaries_are_drawn_is_judged_from_above():
    for rate, share in ((0.1, 0.17), (0.5, 0.6), (0.3, 1.0)):
        found = Joined(round(share * 400), 400, rate)
        assert binom.sf(found.joined - 1, 400, rate) <= found.p_value * (1 + 1e-9) < 0.05
    assert Joined(40, 400, 0.1).p_value == Joined(0, 0, 0.1).p_value == 1.0


def test_the_row_that_carries_a_canary_has_no_say():
    """Not even where its own gradient is NaN."""
    engine = PrivacyEngine(audit=PLANTED, reproducible=3)
    model, optimizer, loader = private(engine, batch=1)
    with torch.no_grad():
        loader.dataset.tensors[0][0] = torch.nan  # the carrier of draws without people
    seen, canaries = releases(engine), engine._steps.canaries
    epochs(model, optimizer, loader)
    assert all(bool(each.isfinite().all()) for each in seen)
    assert any(float(each.norm()) > 0.9 * BOUND for each in seen)
    assert canaries.joined > 0


def test_a_loop_goes_on_with_its_canaries(tmp_path):
    file = tmp_path / "ledger.jsonl"
    engine = PrivacyEngine(audit=PLANTED, ledger=file)
    model, optimizer, loader = private(engine, multiplier=1.0)
    epochs(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "saved", module=model, optimizer=optimizer)
    kept = engine._steps.canaries
    engine.close()
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


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, groups=2)
        self.last = nn.Linear(8, 10)

    def forward(self, images):
        return self.last(self.second(torch.relu(self.norm(self.first(images)))).mean((2, 3)))


class Words(nn.Module):
    """Of which a table is looked up and multiplied by."""

    def __init__(self):
        super().__init__()
        self.table, self.cell = nn.Embedding(30, 12), nn.LSTM(12, 12, batch_first=True)

    def forward(self, words):
        return self.cell(self.table(words))[0][:, -1] @ self.table.weight[:10].T


FORMS = {
    "convolutions": (Convolutions, torch.randn(PEOPLE, 3, 8, 8), {}),
    "words": (Words, torch.randint(30, (PEOPLE, 7)), {}),
    "by layers": (lambda: nn.Linear(40, 10), torch.randn(PEOPLE, 40), {"method": build("dp-sgd", groups="layers")}),
    "balanced": (lambda: nn.Linear(40, 10), torch.randn(PEOPLE, 40), {"method": build("dp-sgd", balance="relative")}),
}


@pytest.mark.parametrize("name", FORMS)
def test_canaries_take_the_place_of_gradients_in_every_form(name):
    """All rows are NaN, so people add nothing, and a release is the sum of the canaries alone."""
    make, inputs, options = FORMS[name]
    torch.manual_seed(0)
    model, engine = make(), PrivacyEngine(audit=PLANTED)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), max_grad_norm=BOUND,
        data_loader=DataLoader(TensorDataset(inputs, torch.randint(10, (PEOPLE,))), batch_size=12),
        noise_multiplier=1e-9, **options,
    )  # fmt: skip
    seen, canaries = releases(engine), engine._steps.canaries
    for x, y in loader:
        (LOSS(model(x), y) * torch.nan).backward()
        optimizer.step()
    layout = canaries._layout
    into = torch.zeros(PLANTED, layout.size)
    for number in canaries.included.nonzero()[:, 0]:
        canaries.add(number[None], engine._steps.method.clip, into[number])
    every = into[canaries.included].double()
    shares = torch.linalg.lstsq(every.T, torch.stack(seen).T).solution
    torch.testing.assert_close(shares, shares.round(), atol=2e-3, rtol=0)
    torch.testing.assert_close(every.T @ shares.round(), torch.stack(seen).T, atol=1e-4, rtol=1e-3)
    assert set(shares.round().unique().tolist()) == {0.0, 1.0}


def test_what_cannot_be_audited_is_refused():
    for count in (3, 10.5, "many"):
        with pytest.raises(ValueError, match=f"audit={count!r} must be a whole number"):
            PrivacyEngine(audit=count)
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
