"""Does one run with canaries bound its own epsilon from below, and change nothing for the people in the data?"""

import numpy as np
import pytest
import torch
from torch import nn

import faults
import vestige
from vestige.audit.read_one_run_audit import read
from vestige.engines.audit_canaries import Canaries, CanaryBatch, PlantedEngine, PlantedExamples
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat
from vestige.mechanism.examples import Examples
from vestige.priced_questions import SampledGaussian
from vestige.run_records import RunResult
from vestige.training.verify import verify

LOSS = nn.functional.cross_entropy
ASKED = {"method": "dp-sgd", "sample_rate": 0.5, "steps": 20, "delta": 1e-5, "lr": 0.01}


def started(**changes):
    torch.manual_seed(0)
    model = nn.Linear(100, 10)
    data = (torch.randn(40, 100), torch.randint(10, (40,)))
    return vestige.train(model, LOSS, data, **{**ASKED, **changes})


def finished(**changes):
    training = started(**changes)
    for _ in training:
        pass
    return training


def test_a_run_states_at_least_and_at_most(tmp_path):
    training = finished(noise_multiplier=1.0, audit=200, out=tmp_path / "run")
    result = training.result()
    found, most = result.audit, result.statement.epsilon
    assert found.canaries == 200
    assert 0 < found.epsilon_lower_bound < most
    assert found.right <= found.guesses <= 200
    assert RunResult.from_json(result.to_json()) == result
    verdict = verify(tmp_path / "run")
    assert verdict.guarantee.epsilon == most
    seen = read(tmp_path / "run")
    assert seen.audited == found
    assert not seen.contradicts
    assert f"at most {most:.4g}" in " ".join(seen.lines())


def test_a_run_with_less_noise_than_priced_is_caught(monkeypatch):
    honest = finished(noise_multiplier=8.0, audit=200).result()
    assert honest.audit.epsilon_lower_bound < honest.statement.epsilon
    faults.less_noise(monkeypatch, 0.02)
    broken = finished(noise_multiplier=8.0, audit=200).result()
    assert broken.audit.epsilon_lower_bound > broken.statement.epsilon


def test_an_interrupted_run_goes_on_with_its_canaries(tmp_path):
    training = started(noise_multiplier=1.0, audit=64, out=tmp_path / "run")
    records = training.steps()
    for _ in range(7):
        next(records)
    records.close()
    training.ledger.close()
    key, summed = training.canaries.key, training.canaries.summed.clone()
    again = started(noise_multiplier=1.0, audit=64, out=tmp_path / "run", resume=True)
    assert again.canaries.key == key
    assert torch.equal(again.canaries.summed, summed)
    assert torch.equal(again.canaries.included, training.canaries.included)
    for _ in again:
        pass
    assert not read(tmp_path / "run").contradicts
    with pytest.raises(ValueError, match="population"):
        started(noise_multiplier=1.0, audit=65, out=tmp_path / "run", resume=True)


def test_a_canary_that_is_there_adds_its_bound_and_one_that_is_not_adds_nothing():
    model = nn.Linear(100, 10)
    layout = Layout.of(model)
    canaries = Canaries(20, layout, torch.device("cpu"))
    engine = PlantedEngine(Reference(model, LOSS, layout), canaries)
    point = {name: p.detach() for name, p in model.named_parameters()}
    for number in range(20):
        into = torch.zeros(layout.size)
        norms = engine(CanaryBatch([torch.tensor([number])]), point, Flat(0.5), into)
        there = bool(canaries.included[number])
        assert len(norms) == there
        assert float(into.norm()) == pytest.approx(0.5 * there, rel=1e-5)
    assert 2 < int(canaries.included.sum()) < 18


def test_nobodys_row_is_copied_or_left_out():
    canaries = Canaries(8, Layout.of(nn.Linear(3, 2)), torch.device("cpu"))
    data = (torch.randn(5, 3), torch.arange(5) % 2)
    both = PlantedExamples(Examples(data, torch.device("cpu")), canaries)
    assert both.population == 13
    fetch = both.ahead(lambda index: ([torch.arange(13)], None))
    people, planted = fetch(0, torch.tensor([4, 0, 7, 12]))
    assert torch.equal(people[0], data[0][[4, 0]])
    assert planted[0].tolist() == [2, 7]


def test_directions_follow_from_the_key_and_touch_few_coordinates():
    canaries = Canaries(8, Layout.of(nn.Linear(999, 10)), torch.device("cpu"))
    touched, unit = canaries.direction(3)
    again, same = canaries.direction(3)
    assert torch.equal(touched, again)
    assert torch.equal(unit, same)
    assert float(unit.norm()) == pytest.approx(1.0, rel=1e-5)
    assert len(touched) < 4097
    other = canaries.direction(4)[0]
    assert not np.array_equal(touched.numpy(), other.numpy())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"audit": 3, "noise_multiplier": 1.0}, "audit=3"),
        ({"audit": 100, "method": vestige.make_method("dpsur", validation_batch=4), "noise_multiplier": 1.0}, "dpsur"),
    ],
)
def test_what_cannot_be_audited_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        started(**changes)


def test_a_run_without_canaries_says_how_to_plant_some(tmp_path):
    finished(noise_multiplier=1.0, out=tmp_path / "run")
    with pytest.raises(ValueError, match="--audit 1000"):
        read(tmp_path / "run")
    with pytest.raises(ValueError, match="no finished run"):
        read(tmp_path)


@pytest.mark.slow
def test_canary_users_have_as_many_rows_as_a_user_may_and_show_it():
    """Priced as if rows were people, eight rows of one are caught; priced for users they are not."""
    owners = np.repeat(np.arange(5), 8)
    asked = {"users": owners, "noise_multiplier": 4.0, "audit": 200, "steps": 2, "sample_rate": 1.0}
    rows = finished(**asked)
    assert rows._population == 40 + 200 * 8
    found, most = rows.result().audit.epsilon_lower_bound, rows.guarantee().epsilon
    as_rows = vestige.accounting.epsilon({SampledGaussian(1.0, 4.0): 2}, 1e-5)
    assert as_rows < found < most
    users = finished(**asked, sample="users")
    assert users._population == 5 + 200
    assert users.result().audit.epsilon_lower_bound < users.guarantee().epsilon
    capped = finished(**asked, cap=1)
    assert capped.result().audit.epsilon_lower_bound < capped.guarantee().epsilon


def test_users_whose_rows_are_clipped_apart_are_caught(monkeypatch):
    """A sampler that splits a user: the canary's rows are clipped one by one where one vector was priced."""
    owners = np.repeat(np.arange(5), 8)
    asked = {"users": owners, "noise_multiplier": 4.0, "audit": 200, "steps": 2, "sample_rate": 1.0, "sample": "users"}
    whole = Canaries.add

    def split(self, numbers, *how):
        return whole(self, numbers.repeat_interleave(8), *how)

    monkeypatch.setattr(Canaries, "add", split)
    broken = finished(**asked)
    assert broken.result().audit.epsilon_lower_bound > broken.guarantee().epsilon
