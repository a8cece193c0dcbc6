"""Do noise, threshold and rate decay by what was released alone, and does the filter stop them in time?"""

from functools import cache
from math import exp, inf

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm, truncnorm

from conftest import make_toy
from selective_runs import TEST, Script, start
from vestige import accounting
from vestige.accounting import rdp
from vestige.accounting.ledger import read
from vestige.methods.registry import make_method
from vestige.optim.progress_driven_decay import NoisyLosses, PhasedDecay, mean_above, uncensored_mean
from vestige.priced_questions import SampledGaussian, Trial
from vestige.training.verify import reprice, verify

# --- phases and their signals ----------------------------------------------------------------------------------------


def test_fast_and_slow_phases_scale_what_the_paper_says():
    decay = PhasedDecay(fast=0.9, slow=0.98)
    fast, slow = decay.factors({"fast": 10, "slow": 0}), decay.factors({"fast": 0, "slow": 10})
    assert fast.noise == fast.validation == fast.lr < 1
    assert fast.threshold == 1
    assert slow.noise == slow.threshold == slow.lr < 1
    assert slow.validation == 1
    assert fast.noise == pytest.approx(0.9**10, rel=1e-12)
    assert slow.noise == pytest.approx(0.98**10, rel=1e-12)
    assert PhasedDecay(fast=0.99).factors({"fast": 1, "slow": 0}).noise == pytest.approx(0.99, rel=1e-12)


def test_our_variant_decays_in_steps_that_are_never_below_the_exact_factor():
    decay = make_method("dpsgd-br-stepped", decay_fast=0.9, decay_slow=0.98).gate.decay
    for exact, rounded in (
        (0.9**10, decay.factors({"fast": 10, "slow": 0}).noise),
        (0.98**10, decay.factors({"fast": 0, "slow": 10}).noise),
        (0.98, decay.factors({"fast": 0, "slow": 1}).threshold),
    ):
        assert exact <= rounded * (1 + 1e-9)
        assert rounded <= exact * exp(0.02) * (1 + 1e-9)
    with pytest.raises(ValueError, match="grid=0 must be positive"):
        PhasedDecay(grid=0)


def test_the_epsilon_boundary_stops_the_decay():
    from vestige.optim.progress_driven_decay import Update

    decay = PhasedDecay(NoisyLosses(), until=2.0)
    heard = {**decay.init(), "below": -1.0, "passed": 0.4, "bound": 1.0}
    update = Update(Script([]), {}, {}, 0, 1, None, noise_std=2.0, threshold=-1.0)
    decay.after(heard, update, lambda: 1.9)
    assert heard["fast"] + heard["slow"] == 1
    decay.after(heard, update, lambda: 2.0)
    assert heard["fast"] + heard["slow"] == 1


@pytest.mark.parametrize("mean", [-1.0, -0.3, 0.0, 0.8])
def test_selection_is_corrected_for(mean):
    scale, threshold = 2.74, -1.5
    edge = (threshold - mean) / scale
    seen, passed = truncnorm.mean(-inf, edge, mean, scale), norm.cdf(edge)
    assert mean_above(mean, scale, threshold) == pytest.approx(truncnorm.mean(edge, inf, mean, scale), rel=1e-9)
    assert uncensored_mean(passed * seen, passed, scale, threshold, 1.0) == pytest.approx(mean, abs=1e-9)
    assert mean_above(-30.0, 1.0, -1.5) == pytest.approx(truncnorm.mean(28.5, inf, -30.0, 1.0), rel=1e-3)


def test_the_progress_signal_is_the_maximum_of_the_censored_likelihood():
    generator = np.random.default_rng(5)
    changes = generator.normal(-0.4, 2.74, size=400)
    threshold, decay = -1.5, PhasedDecay(NoisyLosses(weight=1e-6))
    heard = decay.init()
    for change in changes:
        decay.hear(heard, change if change < threshold else None, 1.0)
    seen = changes[changes < threshold]

    def surprise(mean):
        unseen = (len(changes) - len(seen)) * norm.logsf(threshold, mean, 2.74)
        return -norm.logpdf(seen, mean, 2.74).sum() - unseen

    likeliest = minimize_scalar(surprise, bounds=(-1, 1), method="bounded", options={"xatol": 1e-9}).x
    found = uncensored_mean(heard["below"], heard["passed"], 2.74, threshold, 1.0)
    assert found == pytest.approx(likeliest, abs=1e-5)
    assert -1 < found < 0


def test_rejections_alone_slow_the_decay_down():
    from vestige.optim.progress_driven_decay import Update

    decay = PhasedDecay(NoisyLosses())
    update = Update(Script([]), {}, {}, 0, 1, None, noise_std=2.74, threshold=-1.5)
    for shares, phase in ((("accept", "reject"), "fast"), (("reject",) * 9 + ("accept",), "slow")):
        heard = decay.init()
        for _ in range(20):
            for outcome in shares:
                decay.hear(heard, -4.0 if outcome == "accept" else None, 1.0)
        decay.after(heard, update, lambda: 0.0)
        assert heard[phase] == 1


@pytest.mark.slow
def test_default_decay_is_of_the_size_of_the_printed_number_of_updates():
    """Figure 4: 1,119 updates at a claimed epsilon of 1 (MNIST, one candidate), from the noise of Table 4.

    If twenty of them are fast, which is ours to suppose.
    """
    rates = (1024 / 60000, 256 / 60000)

    def claim(decay, updates, fast):
        total = np.zeros(len(rdp.ORDERS))
        for done in range(updates):
            now = decay.factors({"fast": min(done, fast), "slow": max(0, done - fast)})
            total += prices(3.0 * now.noise, 1.37 * now.validation)
        return rdp.tight_epsilon(total, 1e-5)

    @cache
    def prices(sigma_t, sigma_v):
        return rdp.curves(rates, [sigma_t, sigma_v]).sum(0)

    assert claim(PhasedDecay(), 1119, fast=20) == pytest.approx(1.0, abs=0.02)
    assert claim(PhasedDecay(fast=0.99, slow=0.999), 444, fast=20) == pytest.approx(1.0, abs=0.02)


def test_un_noised_accuracy_may_not_steer():
    for name in ("accuracy", "validation-accuracy"):
        with pytest.raises(ValueError, match=r"un-noised accuracy of private data may not steer"):
            make_method("dpsgd-br", progress=name)
    with pytest.raises(ValueError, match=r"progress='weather' must be noisy-loss, public:FILE, noisy-count or none"):
        make_method("dpsgd-br", progress="weather")


# --- what a schedule that depends on the data costs ------------------------------------------------------------------


def test_a_data_dependent_schedule_without_the_filter_is_refused():
    with pytest.raises(ValueError, match="only a filter that knows the budget in advance"):
        start(make_method("dpsgd-br", **TEST))
    start(make_method("dpsgd-br", progress="none", **TEST))
    facts = accounting.Facts(schedule="data-dependent")
    assert accounting.guarantee({SampledGaussian(0.1, 1.0): 3}, 1e-5, facts).epsilon is None


GENTLE = {"validation_batch": 20, "sigma_v": 4.0, "sigma_t": 4.0, "threshold": -0.1}


def filtered(tmp_path, **options):
    method = make_method("dpsgd-br", **{**GENTLE, "decay_fast": 0.8, "decay_slow": 0.9, **options})
    changes = {"noise_multiplier": None, "steps": None, "reproducible": None}
    training = start(method, out=tmp_path / "run", epsilon=6.0, **changes)
    allows, answers = training.ledger.budget.allows, []
    training.ledger.budget.allows = lambda *asked: answers.append(allows(*asked)) or answers[-1]
    list(training)
    training.refusals = answers.count(False)
    training.finish()
    return training


def test_the_filter_stops_a_schedule_that_decays(tmp_path):
    training = filtered(tmp_path)
    promise = training.guarantee()
    assert promise.epsilon == training.spent() == 6.0
    assert promise.accountant == "renyi filter"
    assert training.state.step < training.plan.steps, "a plan at the initial noise must be out of reach once it decays"
    multipliers = {question.multiplier for question in training.ledger.spent}
    assert len(multipliers) > 2
    assert max(multipliers) == 4.0
    assert promise.epsilon_rdp <= 6.0
    assert training.refusals == 1
    assert verify(tmp_path / "run").guarantee.epsilon == 6.0


def test_verify_holds_every_question_against_the_filter(tmp_path):
    training = filtered(tmp_path)
    history = read(training.folder.ledger)
    spent = history.spent(False)
    assert reprice(spent, history.facts["delta"], history.facts).epsilon == 6.0
    spent[list(spent)[-1]] += 3
    with pytest.raises(ValueError, match="asks what its filter refuses"):
        reprice(spent, history.facts["delta"], history.facts)


def test_a_noisy_count_is_asked_and_charged(tmp_path):
    training = filtered(tmp_path, progress="noisy-count", count_rate=0.5, count_noise=20.0)
    count = SampledGaussian(0.5, 20.0)
    applied = sum(row[2] for row in training.state.gate["updates"])
    assert 0 < training.ledger.spent[count] <= applied
    assert verify(tmp_path / "run").guarantee.epsilon == 6.0


def test_public_accuracy_steers_for_free(tmp_path):
    _, public = make_toy(seed=1)
    method = make_method("dpsgd-br", progress="public:elsewhere.npz", **GENTLE)
    training = start(method, noise_multiplier=None, epsilon=6.0, validation_data=public)
    list(training)
    heard = training.state.gate
    assert heard["fast"] + heard["slow"] == sum(row[2] for row in heard["updates"]) > 0
    assert heard["public"] is not None
    assert {type(question) for question in training.ledger.spent} == {Trial}
    with pytest.raises(ValueError, match="no public examples were given"):
        list(start(method, noise_multiplier=None, epsilon=6.0))
