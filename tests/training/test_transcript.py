"""Are the parts of a release what the papers' lemmas say? Against recursions that carry queries and noise apart."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import vestige
from recursions import paper_weights
from vestige.priced_questions import SampledGaussian
from vestige.training.job import Job, start
from vestige.training.nonprivate_transcript import PARTS, nonprivate_split


def trained(tmp_path, method, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 11))
    data = torch.randn(120, 12), torch.randint(11, (120,))
    training = vestige.train(
        model, cross_entropy, data, method=vestige.make_method(method, **options), sample_rate=0.5, steps=12,
        delta=1e-5, noise_multiplier=1.0, lr=0.2, nonprivate_transcript=tmp_path / "t.npz",
    )  # fmt: skip
    records = list(training)
    training.finish()
    return np.load(tmp_path / "t.npz"), training, records


def norms(parts):
    return [np.linalg.norm(part) for part in parts]


def test_the_parts_of_fo_dp_sgd_are_those_of_its_lemma(tmp_path):
    beta, window = 0.7, 4
    file, training, records = trained(tmp_path, "fo-dp-sgd", beta=beta, window=window, zeta=2.0)
    sums, noises = (file[key].astype(np.float64) for key in ("clipped_sum", "noise"))
    queries, trend = [], None
    for t, (s, z) in enumerate(zip(sums, noises, strict=True)):
        state = inherited = np.zeros_like(s)
        if t:
            lags = range(1, min(window - 1, t) + 1)
            past = [queries[t - j] + noises[t - j] for j in lags]
            a = paper_weights(past, trend, alpha=0.8, lam=0.01, tau=0.1, kappa=1e-6, zeta=2.0)
            state = (1 - beta) * sum(weight * queries[t - j] for weight, j in zip(a, lags, strict=True))
            inherited = (1 - beta) * sum(weight * noises[t - j] for weight, j in zip(a, lags, strict=True))
        queries.append(beta * s + state + inherited)
        release = queries[-1] + z
        trend = release if trend is None else 0.2 * release + 0.8 * trend
        expected = norms((beta * s, state, inherited, z))
        np.testing.assert_allclose(file["nonprivate_split"][t, 0], expected, rtol=1e-4, atol=1e-4)
    means = training.transcript.mean_split()
    assert list(means) == list(PARTS)
    assert means["signal"] == pytest.approx(file["nonprivate_split"][:, 0, 0].mean())
    assert not any(key.startswith("nonprivate") or key in PARTS for record in records for key in record.to_json())


@pytest.mark.parametrize(("first", "last"), [(0.7, 0.7), (1.0, 0.4), (0.5, 1.0)])
def test_a_schedule_of_beta_is_the_papers_recursion_with_the_beta_of_each_step(tmp_path, first, last):
    """Every step counts alike in the price; beta changes after each epoch (two steps here) and stays after three."""
    window = 4
    file, training, records = trained(
        tmp_path, "fo-dp-sgd", beta=first, beta_end=last, beta_epochs=3, window=window, zeta=2.0
    )
    sums, noises = (file[key].astype(np.float64) for key in ("clipped_sum", "noise"))
    releases, trend = [], None
    for t, (s, z) in enumerate(zip(sums, noises, strict=True)):
        beta = first + min(1.0, (t // 2) / 3) * (last - first)
        u = 0.0
        if t:
            past = releases[::-1][: window - 1]
            u = paper_weights(past, trend, alpha=0.8, lam=0.01, tau=0.1, kappa=1e-6, zeta=2.0) @ np.stack(past)
            assert records[t].to_json()["fresh_weight"] == pytest.approx(beta)
        releases.append(beta * s + (1 - beta) * u + z)
        trend = releases[-1] if trend is None else 0.2 * releases[-1] + 0.8 * trend
        assert z.std() == pytest.approx(beta, rel=0.2)  # the priced noise, 1, times beta: its own in each step
    np.testing.assert_allclose(file["release"], np.stack(releases), rtol=1e-4, atol=1e-4)
    assert training.ledger.spent == {SampledGaussian(0.5, 1.0): 12}
    if first == last:
        return
    with pytest.raises(ValueError, match=f"paper_sigma: with beta_end={last} every step has its own ratio"):
        start(Job(task="digits-mlp", method="fo-dp-sgd", options={"beta_end": last}, paper_sigma=1.1, steps=3), None)


def test_a_schedule_of_beta_is_refused_where_it_says_nothing():
    with pytest.raises(ValueError, match="beta_end=0.5 without a window only scales steps"):
        vestige.make_method("fo-dp-sgd", beta_end=0.5, window=1)
    with pytest.raises(ValueError, match=r"beta_end=0 must lie in \(0, 1\]"):
        vestige.make_method("fo-dp-sgd", beta_end=0)
    with pytest.raises(ValueError, match="beta_epochs=0 must be a whole number"):
        vestige.make_method("fo-dp-sgd", beta_end=0.5, beta_epochs=0)


def test_the_parts_of_sma_dp_sgd_are_those_of_its_lemma(tmp_path):
    beta, window, alpha, warm = 0.6, 5, 0.7, 6
    file, _, _ = trained(tmp_path, "sma-dp-sgd", beta=beta, window=window, warm_up=warm, interval=(2.0, 2.5))
    for g in range(2):
        mine = file["group"] == g
        sums, noises = (file[key][:, mine].astype(np.float64) for key in ("clipped_sum", "noise"))
        queries, trend = [], None
        for t, (s, z) in enumerate(zip(sums, noises, strict=True)):
            state = inherited = np.zeros_like(s)
            if t:
                rho = file["exponent"][t, g]
                distance = 0.0 if np.isnan(rho) else max(0.0, 2.0 - rho, rho - 2.5)
                lags = np.arange(1, min(window - 1, t) + 1)
                a = (lags + 1.0) ** (alpha - 1) * np.exp(-(1 - np.exp(-distance)) * lags)
                a /= a.sum()
                nu = sum(weight * (queries[t - j] + noises[t - j]) for weight, j in zip(a, lags, strict=True))
                gate = max(0.0, trend @ nu / (np.linalg.norm(trend) * np.linalg.norm(nu)))
                scale = min(1.0, np.linalg.norm(trend) / np.linalg.norm(nu))
                factor = (1 - beta) * (1 - np.exp(-t / warm)) * gate * scale
                state = factor * sum(weight * queries[t - j] for weight, j in zip(a, lags, strict=True))
                inherited = factor * sum(weight * noises[t - j] for weight, j in zip(a, lags, strict=True))
            queries.append(beta * s + state + inherited)
            release = queries[-1] + z
            trend = release if trend is None else 0.1 * release + 0.9 * trend
            expected = norms((beta * s, state, inherited, z))
            np.testing.assert_allclose(file["nonprivate_split"][t, g], expected, rtol=1e-4, atol=1e-4)


def test_releases_without_memory_are_not_split(tmp_path):
    file, training, _ = trained(tmp_path, "dp-sgd")
    assert "nonprivate_split" not in file
    assert training.transcript.mean_split() == {}


def test_the_parts_add_up_where_the_factor_is_known():
    """One group, weights of our own: the parts are the ones that the release was made of."""
    rng = np.random.default_rng(0)
    sums, noise, group = rng.normal(size=(3, 50)), rng.normal(size=(3, 50)), np.zeros(50, int)
    weights = np.array([[[0.0, 0.0]], [[1.0, 0.0]], [[0.25, 0.75]]])
    release = np.zeros((3, 50))
    for t in range(3):
        past = sum(weights[t, 0, j] * release[t - 1 - j] for j in range(min(2, t)))
        release[t] = 0.5 * sums[t] + 0.3 * past + noise[t]
    found = nonprivate_split(sums, noise, release, weights, group, 0.5)
    inherited = 0.3 * (0.25 * noise[1] + 0.75 * noise[0])
    memory = release[2] - 0.5 * sums[2] - noise[2]
    np.testing.assert_allclose(found[2, 0], norms((0.5 * sums[2], memory - inherited, inherited, noise[2])))
