"""Does what a run remembers give away more than its releases? Not ours; and one that kept a raw sum would be found."""

import pytest

from vestige import accounting
from vestige.audit import area_under_curve
from vestige.audit.in_and_out import Subject, attack, audit
from vestige.audit.made_up_task import stand_in
from vestige.compare.stacked.curator import StackedCurator
from vestige.methods.registry import make_method
from vestige.optim.learner import Learner
from vestige.training.planning import Request, plan

CONFIDENCE, DELTA = 0.9999, 1e-3


def judged(name, sees, runs=1600):
    subject = Subject.of(stand_in(4), make_method(name), "gradient", 4, 0, "cpu")
    request = Request(sample_rate=0.5, steps=4, delta=DELTA, noise_multiplier=4.0, lr=0.01)
    planned = plan(subject.model, subject.layout, subject.method, subject.population, request)
    found = attack(subject, planned, runs, sees)
    area = area_under_curve(found.inside, found.outside, CONFIDENCE)
    return area, accounting.tradeoff(found.asked, DELTA).area()


@pytest.mark.parametrize("name", ["fo-dp-sgd", "dp-adam", "kalman-memory"])
def test_memories_and_moments_hold_releases_only(name):
    area, allowed = judged(name, "state")
    assert area.low <= allowed


def test_a_memory_that_keeps_a_raw_sum_is_caught(monkeypatch):
    kept = []
    summed, learned = StackedCurator.sum, Learner.step

    def keeping(self, rows, real, point):
        summed(self, rows, real, point)
        kept.append(self.fresh.clone())  # before the noise

    def hiding(self, *args):
        seen = learned(self, *args)
        self.memory["hidden"] = kept[-1]
        return seen

    monkeypatch.setattr(StackedCurator, "sum", keeping)
    monkeypatch.setattr(Learner, "step", hiding)
    area, allowed = judged("fo-dp-sgd", "state")
    assert area.low > allowed
    area, allowed = judged("fo-dp-sgd", "releases")
    assert area.low <= allowed  # the releases are innocent


def test_a_method_without_state_says_so():
    with pytest.raises(ValueError, match="keeps nothing"):
        audit("dp-sgd", epsilon=3, runs=16, steps=2, sees="state")


@pytest.mark.parametrize("sees", ["model", pytest.param("loss", marks=pytest.mark.slow)])
def test_the_last_model_alone_tells_less_than_all_releases(sees):
    found = audit(
        "dp-sgd", noise_multiplier=0.5, sample_rate=0.1, steps=20, runs=2000, examples=4, delta=DELTA, lr=0.5,
        canary="gradient" if sees == "model" else "mislabelled", sees=sees, confidence=CONFIDENCE,
    )  # fmt: skip
    assert not found.contradicts
    assert found.area.estimate > 0.55
    assert found.area.estimate < found.area_allowed  # by six standard errors
