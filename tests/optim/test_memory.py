"""Is the memory the filter of the paper, in every special case, and nothing but a filter?"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vestige
from conftest import clip_and_sum, example_gradients, make_toy
from recursions import paper_recursion, paper_weights
from vestige.layout import Layout, Segment
from vestige.optim.memory import Blend, ExponentialWeights, FractionalWeights, Identity, UniformWeights
from vestige.randomness.sum_and_release_types import Release

SIZE = 40


def run(memory, releases, noise_std=1.0):
    layout = Layout((Segment("w", 0, (releases.shape[1],)),))
    state, outputs, seen = memory.init(layout, torch.device("cpu")), [], []
    for row in releases:
        out, state, diagnostics = memory.step(Release(row.clone(), noise_std, 1.0), state, {})
        outputs.append(out.clone())
        seen.append({k: v.clone() for k, v in diagnostics.items()})
    return torch.stack(outputs), seen


@settings(max_examples=20, deadline=None)
@given(
    beta=st.floats(0.05, 1), window=st.integers(1, 9), alpha=st.floats(0.05, 1), lam=st.floats(0, 2), tau=st.floats(0, 2),
    gamma=st.floats(0.05, 1), zeta=st.floats(0.01, 100), post=st.booleans(), drift=st.floats(0, 3),
)  # fmt: skip
def test_the_blend_is_the_papers_recursion(beta, window, alpha, lam, tau, gamma, zeta, post, drift):
    fresh = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(3)) + drift
    memory = Blend(FractionalWeights(alpha, lam, tau, 1e-6, zeta, gamma), beta, window, "fresh" if post else "blend")
    expected = paper_recursion(
        fresh, beta=beta, window=window, alpha=alpha, lam=lam, tau=tau, gamma=gamma, zeta=zeta, post=post
    )
    np.testing.assert_allclose(run(memory, fresh)[0].numpy(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("post", [True, False])
def test_post_fm_compares_means_and_fo_dp_sgd_sums(post):
    """Equation 13 divides before the memory: kappa and zeta are lengths of mean gradients there, and of sums in FO."""
    fresh, batch = 50 * torch.randn(20, SIZE, generator=torch.Generator().manual_seed(3)) + 20, 50.0
    given = {"tau": 1.0, "kappa": 20.0, "zeta": 2.0}
    memory = Blend(FractionalWeights(0.8, 0.01, 1.0, 20.0, 2.0, 0.2), 0.7, 6, "fresh" if post else "blend")
    unit = batch if post else 1.0
    expected = unit * paper_recursion(fresh / unit, beta=0.7, window=6, post=post, **given)
    layout = Layout((Segment("w", 0, (SIZE,)),))
    state, outputs = memory.init(layout, torch.device("cpu")), []
    for row in fresh:
        out, state, _ = memory.step(Release(row.clone(), 1.0, batch), state, {})
        outputs.append(out.clone())
    np.testing.assert_allclose(torch.stack(outputs).numpy(), expected, rtol=2e-3, atol=1e-2)
    if post:
        other = paper_recursion(fresh, beta=0.7, window=6, post=True, **given)
        assert not np.allclose(expected, other, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("kernel", [FractionalWeights(), UniformWeights(), ExponentialWeights(0.6)])
def test_share_one_is_dp_sgd_bit_for_bit(kernel):
    fresh = torch.randn(30, SIZE)
    for remembers in ("blend", "fresh"):
        assert torch.equal(run(Blend(kernel, 1.0, 8, remembers), fresh)[0], run(Identity(), fresh)[0])


def test_window_one_only_scales_the_fresh_release():
    fresh = torch.randn(10, SIZE)
    assert torch.equal(run(Blend(FractionalWeights(), 0.7, 1), fresh)[0], 0.7 * fresh)
    assert Blend(FractionalWeights(), 0.7, 1).steady_gain == 0.7


def weights(kernel, window=8, steps=12, drift=0.0):
    _, seen = run(Blend(kernel, 0.9, window), torch.randn(steps, SIZE) + drift)
    return seen[-1]["weights"].numpy()


def normalised(raw):
    return raw / raw.sum()


LAGS = np.arange(1, 8)


def test_without_inconsistency_the_kernel_is_a_tempered_power_law():
    expected = normalised((LAGS + 1.0) ** -0.5 * np.exp(-0.3 * LAGS))
    np.testing.assert_allclose(weights(FractionalWeights(0.5, 0.3, 0.0)), expected, rtol=1e-12)


def test_without_any_tempering_the_kernel_is_the_raw_power_law():
    np.testing.assert_allclose(weights(FractionalWeights(0.5, 0.0, 0.0)), normalised((LAGS + 1.0) ** -0.5), rtol=1e-12)


def test_order_one_leaves_only_the_tempering():
    np.testing.assert_allclose(weights(FractionalWeights(1.0, 0.3, 0.0)), normalised(np.exp(-0.3 * LAGS)), rtol=1e-12)


def test_vanishing_confidence_switches_inconsistency_off():
    expected = normalised((LAGS + 1.0) ** -0.2 * np.exp(-0.01 * LAGS))
    np.testing.assert_allclose(weights(FractionalWeights(0.8, 0.01, 0.5, floor=1e12)), expected, rtol=1e-6)


def test_full_confidence_is_approached_when_the_floor_vanishes():
    _, seen = run(Blend(FractionalWeights(floor=1e-12), 0.9, 8), torch.randn(12, SIZE))
    assert seen[-1]["confidence"] == pytest.approx(1, abs=1e-9)
    _, seen = run(Blend(FractionalWeights(floor=1e12), 0.9, 8), torch.randn(12, SIZE))
    assert seen[-1]["confidence"] == pytest.approx(0, abs=1e-9)


def test_inconsistency_shortens_the_memory_when_it_is_on():
    depth = lambda tau: run(Blend(FractionalWeights(inconsistency=tau), 0.9, 8), torch.randn(20, SIZE))[1][-1][
        "effective_depth"
    ]
    torch.manual_seed(0)
    calm = depth(0.0)
    torch.manual_seed(0)
    assert depth(1.0) < calm - 0.5


@pytest.mark.parametrize("kernel", [FractionalWeights(), UniformWeights(), ExponentialWeights(0.6)])
def test_weights_are_convex_and_the_diagnostics_describe_them(kernel):
    releases = torch.randn(20, SIZE) * 5 + 1
    outputs, seen = run(Blend(kernel, 0.8, 6), releases)
    assert seen[0] == {}
    for t, row in enumerate(seen[1:], start=1):
        w = row["weights"].numpy()
        assert len(w) == min(5, t)
        assert (w > 0).all()
        assert w.sum() == pytest.approx(1, abs=1e-12)
        assert row["effective_depth"] == pytest.approx((w * np.arange(1, len(w) + 1)).sum())
        recalled = w @ outputs[max(0, t - 5) : t].flip(0).double().numpy()
        share = 0.2 * np.linalg.norm(recalled) / np.linalg.norm(outputs[t].double().numpy())
        assert row["memory_share"] == pytest.approx(share, rel=1e-3)


def test_uniform_and_exponential_weights():
    np.testing.assert_allclose(weights(UniformWeights()), np.full(7, 1 / 7))
    np.testing.assert_allclose(weights(ExponentialWeights(0.6)), normalised(0.6 ** (LAGS - 1.0)), rtol=1e-12)


def test_a_constant_input_comes_out_unchanged_in_the_end():
    for remembers in ("blend", "fresh"):
        outputs, _ = run(Blend(FractionalWeights(), 0.5, 8, remembers), torch.ones(60, SIZE))
        torch.testing.assert_close(outputs[-1], torch.ones(SIZE), rtol=1e-5, atol=1e-5)


def test_two_step_memory_is_torchs_damped_momentum():
    fresh = torch.randn(30, SIZE)
    outputs, _ = run(Blend(FractionalWeights(), 0.8, 2), fresh)
    buffer, expected = torch.zeros(SIZE), []
    for row in fresh:
        buffer = 0.2 * buffer + 0.8 * row
        expected.append(buffer)
    torch.testing.assert_close(outputs, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_auto_floor_is_the_norm_that_noise_alone_gives_the_trend():
    size, std = 20_000, 3.0
    noise = torch.randn(400, size, generator=torch.Generator().manual_seed(1)) * std
    _, seen = run(Blend(FractionalWeights(inconsistency=0.0), 0.999, 2), noise, noise_std=std)
    assert seen[-1]["confidence"] == pytest.approx(0.5, abs=0.01)


def test_the_bijection_with_dp_sgd_on_whole_trajectories():
    """FO-DP-SGD with the paper's sigma, written out in float64, walks where we walk with noise sigma / beta."""
    beta, steps, rate, bound, sigma, lr, seed = 0.8, 25, 0.3, 0.5, 0.7, 0.4, 11
    model, data = make_toy()
    twin, _ = make_toy()
    method = vestige.fo_dp_sgd(beta=beta, window=4, clip=bound, zeta=2.0)
    training = vestige.train(
        model, nn.functional.cross_entropy, data, method=method, noise_multiplier=sigma / beta, delta=1e-5,
        sample_rate=rate, steps=steps, lr=lr, reproducible=seed,
    )  # fmt: skip
    from vestige.randomness.gaussian import normal
    from vestige.randomness.keys import Randomness
    from vestige.randomness.lattice import charged
    from vestige.randomness.sampling import Poisson

    key, kept, trend = Randomness.reproducible(seed), [], None
    theta = np.concatenate([p.detach().numpy().ravel() for p in twin.parameters()]).astype(np.float64)
    for t, _ in enumerate(training):
        rows = Poisson(rate).draw(len(data[0]), t, key)
        nn.utils.vector_to_parameters(torch.tensor(theta, dtype=torch.float32), twin.parameters())
        s = clip_and_sum(example_gradients(twin, data[0][rows], data[1][rows]), bound)
        unit = normal(len(theta), key.stream("noise", t), torch.device("cpu")).numpy().astype(np.float64)
        z = beta * charged(sigma / beta, len(theta)) * bound * unit
        past = kept[::-1][:3]
        u = 0 * s
        if past:
            u = paper_weights(past, trend, alpha=0.8, lam=0.01, tau=0.1, kappa=1e-6, zeta=2.0) @ np.stack(past)
        release = beta * s + (1 - beta) * u + z
        trend = release if trend is None else 0.2 * release + 0.8 * trend
        kept.append(release)
        theta = theta - lr * release / (rate * len(data[0]))
        ours = torch.cat([p.detach().ravel() for p in model.parameters()])
        np.testing.assert_allclose(ours.numpy(), theta, rtol=2e-4, atol=2e-5)


def test_state_survives_a_copy():
    memory = Blend(FractionalWeights(), 0.8, 4)
    layout = Layout((Segment("w", 0, (SIZE,)),))
    releases = torch.randn(12, SIZE)
    state = memory.init(layout, torch.device("cpu"))
    for row in releases[:6]:
        state = memory.step(Release(row, 1.0, 1.0), state, {}).state
    copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    for row in releases[6:]:
        one, state, _ = memory.step(Release(row, 1.0, 1.0), state, {})
        two, copy, _ = memory.step(Release(row, 1.0, 1.0), copy, {})
        assert torch.equal(one, two)


def test_declared_copies_are_what_is_held():
    layout = Layout((Segment("w", 0, (SIZE,)),))
    for memory in (
        Identity(),
        Blend(FractionalWeights(), 0.9, 8),
        Blend(UniformWeights(), 0.9, 5),
        Blend(FractionalWeights(), 0.9, 1),
    ):
        held = sum(
            v.numel()
            for v in memory.init(layout, torch.device("cpu")).values()
            if isinstance(v, torch.Tensor) and v.shape[-1:] == (SIZE,)
        )
        assert held == memory.copies * SIZE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta=0.0"), ({"beta": 1.2}, "beta=1.2"), ({"window": 0}, "window=0"), ({"window": -3}, "window=-3"),
        ({"alpha": 0.0}, "alpha=0.0"), ({"alpha": 1.5}, "alpha=1.5"), ({"lam": -1}, "lam=-1"), ({"tau": -0.1}, "tau=-0.1"),
        ({"gamma": 0.0}, "gamma=0.0"), ({"kappa": 0.0}, "kappa=0.0"), ({"zeta": 0.0}, "zeta=0.0"), ({"zeta": "soon"}, "zeta='soon'"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        vestige.fo_dp_sgd(**options)


def test_a_method_is_a_value():
    assert vestige.fo_dp_sgd() == vestige.make_method("fo-dp-sgd")
    assert replace(vestige.fo_dp_sgd(), name="x") != vestige.fo_dp_sgd()
    with pytest.raises(ValueError, match="did you mean 'fo-dp-sgd'"):
        vestige.make_method("fo-dpsgd")
    with pytest.raises(ValueError, match="gamma=1 is not an option of dp-sgd"):
        vestige.make_method("dp-sgd", gamma=1)
