"""Is correlated noise its matrix, priced by its theorem, in no checkpoint, and refused where there is no theorem?"""

import numpy as np
import pytest
import torch

import vestige
from conftest import make_toy
from method_runs import LOSS, Spy
from vestige import accounting
from vestige.mechanism.adaptive_clipping import Quantile
from vestige.methods.base import Method
from vestige.methods.registry import build
from vestige.questions import CyclicGaussian, SampledGaussian
from vestige.randomness import correlated, schedules
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import CyclicPoisson, Poisson


def dense(noise, rate, steps):
    """The matrix from fresh noise to the noise of each step, column by column."""
    columns = []
    for k in range(steps):
        stream = noise.start(rate, steps)
        columns.append(
            [float(stream.next(torch.tensor([1.0 if t == k else 0.0], dtype=torch.float64))) for t in range(steps)]
        )
    return np.array(columns).T


@pytest.mark.parametrize("noise", [correlated.Banded(4), correlated.Buffered(2), correlated.Tree(2)])
def test_correlated_noise_is_its_matrix_and_its_errors_and_gains_are_as_computed(noise):
    steps, rate = 48, 0.25
    matrix = dense(noise, rate, steps)
    stream = noise.start(rate, steps)
    np.testing.assert_allclose([stream.gain(t) for t in range(steps)], np.linalg.norm(matrix, axis=1), rtol=1e-6)
    prefix = np.linalg.norm(np.tril(np.ones((steps, steps))) @ matrix, axis=1) ** 2
    assert noise.walk(rate, steps) > 0
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
        np.testing.assert_allclose(prefix, correlated.tree_variances(8, steps))


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
        model, LOSS, data, method="dp-bandmf", sample_rate=0.2, steps=10, noise_multiplier=2.0, delta=1e-5, lr=0.1
    )
    list(training)
    assert training.ledger.spent == {CyclicGaussian(0.8, 2.0, 4): 10}
    expected = accounting.epsilon({SampledGaussian(0.8, 2.0): 3}, 1e-5)
    assert training.guarantee().epsilon == pytest.approx(expected, rel=1e-6)


def test_past_noise_is_in_no_checkpoint_and_a_secret_correlated_run_does_not_resume(tmp_path):
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
    with pytest.raises(ValueError, match="past noise would uncover past sums"):
        vestige.train(make_toy()[0], LOSS, data, method="dp-blt", out=tmp_path / "run", resume=True, **changes)


@pytest.mark.parametrize(
    "parts",
    [
        {"clip": Quantile()},
        {"schedule": schedules.ExponentialDecay()},
        {"probe": build("dp-sam").probe},
        {"probe": build("dp-is").probe},
    ],
)
def test_correlated_noise_without_a_theorem_is_refused(parts):
    with pytest.raises(ValueError, match="correlated noise has a theorem"):
        Method(name="x", noise=correlated.Banded(), **parts)
