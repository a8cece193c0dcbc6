"""Is correlated noise its matrix, priced by its theorem, in no checkpoint, and refused where there is no theorem?"""

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

import vestige
from conftest import make_toy
from method_runs import LOSS, Spy
from vestige import accounting
from vestige.accounting.ledger import read
from vestige.mechanism.adaptive_clipping import Quantile
from vestige.methods.base import Method
from vestige.methods.registry import make_method
from vestige.priced_questions import CyclicGaussian, SampledGaussian
from vestige.randomness import correlated, noise_schedules
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import CyclicPoisson, Poisson
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.training.verify import verify


def dense(noise, rate, steps):
    """The matrix from fresh noise to the noise of each step, column by column."""
    columns = []
    for k in range(steps):
        stream = noise.start(rate, steps)
        columns.append(
            [float(stream.next(torch.tensor([1.0 if t == k else 0.0], dtype=torch.float64))) for t in range(steps)]
        )
    return np.array(columns).T


@pytest.mark.parametrize(
    "noise", [correlated.Banded(4), correlated.Buffered(2), correlated.Tree(2), correlated.Tree(3)]
)
def test_correlated_noise_is_its_matrix_and_its_errors_and_gains_are_as_computed(noise):
    steps, rate = 48, 0.25
    matrix = dense(noise, rate, steps)
    stream = noise.start(rate, steps)
    np.testing.assert_allclose([stream.gain(t) for t in range(steps)], np.linalg.norm(matrix, axis=1), rtol=1e-6)
    prefix = np.linalg.norm(np.tril(np.ones((steps, steps))) @ matrix, axis=1) ** 2
    # The learning rate sees what parameters that forget slowly keep of the noise, in units of white noise's sqrt(steps).
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    forgetful = np.where(lags >= 0, np.exp(-correlated.FORGETS / steps * np.maximum(lags, 0)), 0)
    ratio = np.linalg.norm(forgetful @ matrix) / np.linalg.norm(forgetful)
    assert noise.walk(rate, steps) == pytest.approx(np.sqrt(steps) * ratio * stream.scale, rel=1e-6)
    if isinstance(noise, correlated.Banded):
        c = correlated.banded_coefficients(4, steps)
        strategy = sum(np.diag(np.full(steps - k, c[k]), -k) for k in range(4))
        np.testing.assert_allclose(strategy @ matrix, np.eye(steps), atol=1e-8)  # C (C^-1 Z) = Z
        np.testing.assert_allclose(prefix, correlated.prefix_variances(c, steps), rtol=1e-6)
        assert np.linalg.norm(c) == pytest.approx(1.0)
        assert prefix.mean() < np.arange(1, steps + 1).mean()  # better than white noise
    if isinstance(noise, correlated.Buffered):
        scales, decays = correlated.buffered_coefficients(2, steps, 4)
        column = np.array(
            [1.0] + [sum(s * d ** (k - 1) for s, d in zip(scales, decays, strict=True)) for k in range(1, steps)]
        )
        strategy = sum(np.diag(np.full(steps - k, column[k]), -k) for k in range(steps))
        np.testing.assert_allclose(strategy @ matrix, np.eye(steps), atol=1e-7)
        for visits in range(1, 13):  # every prefix of an example's visits, every part
            for first in range(4):
                touched = strategy[:, first : first + 4 * visits : 4].sum(1)
                assert touched @ touched <= visits * stream.scale**2 * (1 + 1e-9)
    if isinstance(noise, correlated.Tree):
        np.testing.assert_allclose(prefix, correlated.tree_variances(4 * noise.restart, steps))


@pytest.mark.parametrize("noise", [correlated.Banded(4), correlated.Buffered(2), correlated.Tree(2)])
def test_what_is_added_has_the_deviation_that_is_said(noise):
    stream, rows = noise.start(0.25, 8), dense(noise, 0.25, 8)
    for step in range(4):
        total = torch.zeros(20_000)
        said, _ = stream.add(BoundedSum(total, 2.0), 3.0, Randomness.reproducible(0).stream("noise", step))
        assert said == pytest.approx(2.0 * 3.0 * stream.scale * np.linalg.norm(rows[step]), rel=1e-6)
        assert float(total.std()) == pytest.approx(said, rel=0.03)


def test_the_noise_of_a_tree_is_one_node_per_binary_digit():
    stream = correlated.Tree(1).start(1 / 64, 64)
    total = 0.0
    for t in range(1, 64):
        total += float(stream.next(torch.ones(1)))
        assert total == t.bit_count()


def test_the_sensitivity_of_a_tree_counts_visits_in_nodes():
    assert correlated.tree_per_visit(64, 1) == 7  # one visit, at the first leaf: levels 0 to 6
    nodes = [(t - (t & -t), t) for t in range(1, 9)]
    for visits, expected in (((0,), 4), ((0, 4), None)):
        counts = [sum(a <= v < b for v in visits) for a, b in nodes]
        if expected:
            assert sum(c * c for c in counts) == expected
        assert sum(c * c for c in counts) / len(visits) <= correlated.tree_per_visit(4, 2)


def test_cyclic_sampling_takes_parts_in_turn_and_one_band_is_poisson():
    randomness = Randomness.reproducible(0)
    sampling = CyclicPoisson(0.2, 4)
    samples = [set(sampling.draw(2000, t, randomness).tolist()) for t in range(8)]
    for t in range(8):
        for s in range(t):
            assert bool(samples[t] & samples[s]) == (t % 4 == s % 4)
    assert np.mean([len(s) for s in samples]) == pytest.approx(400, rel=0.1)
    assert torch.equal(CyclicPoisson(0.3, 1).draw(500, 3, randomness), Poisson(0.3).draw(500, 3, randomness))
    with pytest.raises(ValueError, match="at most 3 bands"):
        CyclicPoisson(0.3, 4)


def test_a_correlated_run_has_an_epsilon_and_a_ledger_of_cyclic_questions():
    model, data = make_toy()
    training = vestige.train(
        model,
        LOSS,
        data,
        method=make_method("dp-bandmf", bands=4),
        sample_rate=0.2,
        steps=10,
        noise_multiplier=2.0,
        delta=1e-5,
        lr=0.1,
    )
    list(training)
    assert training.ledger.spent == {CyclicGaussian(0.8, 2.0, 4): 10}
    expected = accounting.epsilon({SampledGaussian(0.8, 2.0): 3}, 1e-5)
    assert training.guarantee().epsilon == pytest.approx(expected, rel=1e-6)


def test_white_noise_walks_as_the_rule_for_independent_noise_says():
    for noise in (correlated.White(), correlated.Banded(1), correlated.Buffered(0)):
        assert noise.walk(1.0, 75) == pytest.approx(np.sqrt(75), rel=1e-12)


@pytest.mark.parametrize(
    ("epsilon", "rate", "steps", "bands"),
    [
        (8.0, 0.01, 300, 46),  # 8 sqrt(300) / 3: the few-epoch regime of arXiv:2405.15913
        (1.0, 0.04, 6250, 1),  # 0.3
        (17.4, 0.04, 6250, 6),  # 5.5
        (8.0, 0.2, 20, 5),  # 8.9, but a sample of a fifth needs a part of the data that large
        (8.0, 0.001, 30, 30),  # no more bands than steps
        (float("inf"), 0.1, 50, 10),
    ],
)
def test_the_bands_follow_a_rule_of_thumb_from_public_facts(epsilon, rate, steps, bands):
    assert correlated.rule_of_thumb(epsilon, rate, steps) == bands
    assert correlated.Banded().settled(rate, steps, lambda: epsilon) == correlated.Banded(bands)
    assert correlated.Banded(7).settled(rate, steps, lambda: epsilon) == correlated.Banded(7)


def banded_run(**changes):
    model, data = make_toy()
    facts = {"sample_rate": 0.1, "steps": 25, "delta": 1e-5, "lr": 0.1, **changes}
    return vestige.train(model, LOSS, data, method=facts.pop("method", "dp-bandmf"), **facts)


def test_the_number_of_bands_is_planned_asked_and_written_down(tmp_path):
    given = banded_run(epsilon=2.0, out=tmp_path / "run")
    list(given)
    facts = read(tmp_path / "run" / "ledger.jsonl").facts
    assert facts["noise_strategy"] == "Banded(bands=4)"  # 2 sqrt(25) / 2.5
    assert facts["method"]["options"]["bands"] == "auto"
    assert {question.bands for question in given.ledger.spent} == {4}
    explicit = banded_run(epsilon=2.0, method=make_method("dp-bandmf", bands="3"))
    assert explicit.plan.noise_strategy == "Banded(bands=3)"
    priced = banded_run(noise_multiplier=given.plan.noise_multiplier)
    white = accounting.epsilon({SampledGaussian(0.1, given.plan.noise_multiplier): 25}, 1e-5)
    assert priced.method.noise.bands == correlated.rule_of_thumb(white, 0.1, 25)
    assert banded_run(epsilon=2.0, method="dp-sgd").plan.noise_strategy is None
    with pytest.raises(ValueError, match=r"steps.*bands: give steps, or bands"):
        banded_run(epsilon=2.0, noise_multiplier=1.0, steps=None)
    with pytest.raises(ValueError, match="neither a budget nor noise"):
        banded_run()
    with pytest.raises(ValueError, match="sample_rate=0 must lie in"):
        banded_run(epsilon=2.0, sample_rate=0)
    with pytest.raises(ValueError, match="bands='many' must be"):
        make_method("dp-bandmf", bands="many")


def spread(noise):
    return [noise.scale * noise.gain(step) for step in range(6)]


CORRELATED = [("dp-bandmf", {"bands": 4}, 4, 0.8), ("dp-blt", {}, 5, 1.0), ("dp-ftrl", {}, 5, 1.0)]


@pytest.mark.parametrize(("name", "options", "bands", "rate"), CORRELATED)
def test_a_resumed_run_is_two_mechanisms_and_is_charged_for_both(name, options, bands, rate, tmp_path):
    changes = {"method": make_method(name, **options), "sample_rate": 0.2, "steps": 12, "noise_multiplier": 2.0}
    first = banded_run(out=tmp_path / "run", **changes)
    for record in first:
        if record.step == 5:
            break
    first.ledger.close()
    resumed = banded_run(out=tmp_path / "run", resume=True, **changes)
    assert resumed.state.step == 6
    assert resumed.curator._randomness != first.curator._randomness  # fresh noise over fresh parts
    assert resumed.curator.held_noise == 0
    left, whole = (changes["method"].noise.start(0.2, steps) for steps in (6, 12))
    assert spread(resumed.curator._noise) == spread(left)  # the strategy of the steps that are left
    assert spread(left) != spread(whole)
    list(resumed)
    assert resumed.ledger.spent == {
        CyclicGaussian(rate, 2.0, bands): 6,
        CyclicGaussian(rate, 2.0, bands, mechanism=1): 6,
    }
    times = 2 * -(-6 // bands)
    assert times == 4 > -(-12 // bands)  # one mechanism of as many steps would cost less
    oracle = PLDAccountant(value_discretization_interval=1e-3)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(2.0))
    oracle.compose(dp_accounting.SelfComposedDpEvent(event, times))
    assert resumed.guarantee().epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)
    verdict = verify(tmp_path / "run")
    assert verdict.guarantee.epsilon == resumed.guarantee().epsilon
    assert verdict.attempts == 2


def test_the_budget_of_a_resumed_run_pays_for_the_second_mechanism(tmp_path):
    """Twelve steps of four bands are three occasions; after five steps, only four more fit into one."""
    changes = {"method": make_method("dp-bandmf", bands=4), "sample_rate": 0.2, "steps": 12, "epsilon": 3.0}
    for record in banded_run(out=tmp_path / "run", **changes):
        if record.step == 4:
            break
    resumed = banded_run(out=tmp_path / "run", resume=True, **changes)
    list(resumed)
    assert resumed.guarantee().epsilon <= 3.0
    assert resumed.state.step == 9
    assert verify(tmp_path / "run").guarantee.epsilon <= 3.0


def test_two_mechanisms_are_one_gaussian_of_their_joint_sensitivity():
    """The block-diagonal strategy of a run that was begun anew: every example's squared shift is at most its visits."""
    bands, before, after = 4, 6, 6
    blocks = [correlated.banded_coefficients(bands, steps) for steps in (before, after)]
    whole = np.zeros((12, 12))
    for start, steps, c in ((0, before, blocks[0]), (before, after, blocks[1])):
        for k in range(len(c)):
            whole[start : start + steps, start : start + steps] += np.diag(np.full(steps - k, c[k]), -k)
    worst = 0.0
    for p in range(bands):
        for r in range(bands):  # its part in the second mechanism is drawn anew
            visits = [t for t in range(12) if (t % bands) == (p if t < before else r)]
            worst = max(worst, float((whole[:, visits].sum(1) ** 2).sum()))
    charged = accounting.theorems.occasions({CyclicGaussian(1.0, 1.0, 4): 6, CyclicGaussian(1.0, 1.0, 4, 1): 6})
    as_one = accounting.theorems.occasions({CyclicGaussian(1.0, 1.0, 4): 12})
    assert sum(as_one.values()) < worst <= sum(charged.values()) + 1e-9


def test_a_loop_of_ones_own_refuses_correlated_noise():
    model, data = make_toy()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="has a noise that a training loop"):
        vestige.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=make_method("dp-bandmf", bands=2),
        )


def test_past_noise_is_in_no_checkpoint(tmp_path):
    spy = Spy()
    model, data = make_toy()
    changes = {"sample_rate": 0.2, "steps": 8, "noise_multiplier": 2.0, "delta": 1e-5, "lr": 0.1}
    training = vestige.train(model, LOSS, data, method="dp-blt", out=tmp_path / "run", **changes)
    training.curator._nonprivate_witness = spy
    for position, _ in enumerate(training):
        if position == 4:
            break
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)

    def tensors(part):
        if isinstance(part, torch.Tensor):
            yield part
        for value in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ():
            yield from tensors(value)

    kept = [t.double().ravel().numpy() for t in tensors(saved) if t.numel() >= 20]
    for secret in spy.noises + spy.sums:
        for tensor in kept:
            piece = secret[: len(tensor)] if len(tensor) <= len(secret) else None
            if piece is not None and np.linalg.norm(tensor) > 0:
                assert abs(piece @ tensor) < 0.98 * np.linalg.norm(piece) * np.linalg.norm(tensor)
    assert "entropy" not in str(saved.keys())


@pytest.mark.parametrize(
    "parts",
    [
        {"clip": Quantile()},
        {"schedule": noise_schedules.ExponentialDecay()},
        {"probe": make_method("dp-sam").probe},
        {"probe": make_method("dp-is").probe},
    ],
)
def test_correlated_noise_without_a_theorem_is_refused(parts):
    with pytest.raises(ValueError, match="correlated noise has a theorem"):
        Method(name="x", noise=correlated.Banded(), **parts)
