"""Does one pass over the window leave behind what the next step needs, on a CPU and fused on a GPU, for thousands of steps?"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from recursions import paper_weights
from vestige.layout import Layout, Segment
from vestige.optim import window as room
from vestige.optim.memory import Blend, ExponentialWeights, FractionalWeights, UniformWeights
from vestige.optim.window import Ring, plain_recall
from vestige.randomness.sum_and_release_types import Release
from vestige.tf32 import triton_available

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if triton_available() else "cpu")
gpu = pytest.mark.skipif(not triton_available(), reason="needs a GPU and Triton")
fused = pytest.mark.skipif(
    not (triton_available() or INTERPRETED), reason="needs a GPU and Triton, or Triton with TRITON_INTERPRET=1"
)
PATHS = ["plain", pytest.param("fused", marks=fused)]


def layout(size):
    return Layout((Segment("w", 0, (size,)),))


def made(depth, size, count, dtype, follows, device=DEVICE):
    """A ring in the middle of a run; its numbers are exact. Rows may begin on a boundary, and need not."""
    generator = torch.Generator().manual_seed(depth * size + count)
    past = torch.zeros(depth, size)
    past[: min(count, depth)] = torch.randn(min(count, depth), size, generator=generator)
    wide = torch.zeros(depth, -(-size // 64) * 64, device=device, dtype=dtype)[:, :size]
    past = wide.copy_(past) if count % 2 else past.to(device, dtype)
    if not follows:
        return Ring(past, count)
    trend = (torch.randn(size, generator=generator) if count else torch.zeros(size)).to(device)
    return Ring(past, count, trend, *numbers(past, trend))


def numbers(past, trend):
    rows, middle = past.double(), trend.double()
    return rows.square().sum(1), torch.cat([rows @ middle, (middle @ middle)[None]])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keeps", ["blend", "fresh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("depth", "size", "count"),
    [
        (1, 5, 0),
        (1, 5, 3),
        (7, 3001, 0),
        (7, 3001, 4),
        (7, 3001, 9),
        (7, 40_000, 9),
        (7, 16, 8),
        (31, 1030, 5),
        (128, 300, 140),
    ],
)
@pytest.mark.parametrize("follows", [True, False])
def test_one_pass_against_float64(path, keeps, dtype, depth, size, count, follows, monkeypatch):
    monkeypatch.setattr(room, "CACHED", 2**10)
    ring, share, pace = made(depth, size, count, dtype, follows), 0.8, 0.2 if count else 1.0
    before, trend = ring.past.double().clone(), ring.trend.double().clone() if follows else None
    generator = torch.Generator().manual_seed(1)
    fresh = torch.randn(size, generator=generator).to(DEVICE)
    weights = torch.rand(ring.filled, generator=generator, dtype=torch.float64).to(DEVICE) + 0.1
    weights = weights / weights.sum()
    own_row = keeps == "blend" and dtype == torch.float32
    blend = ring.past[ring.slot] if own_row else torch.empty(size, device=DEVICE)
    kept = fresh if keeps == "fresh" else blend
    if path == "fused":
        from vestige.optim import triton_recall

        memory_share = triton_recall.recall(ring, fresh, weights, blend, share, pace, keeps == "fresh")
    else:
        memory_share = plain_recall(ring, fresh, weights, blend, share, pace, kept)

    by_lag = before[[(count - lag) % depth for lag in range(1, ring.filled + 1)]]
    recalled = weights @ by_lag
    want = share * fresh.double() + (1 - share) * recalled
    close = torch.testing.assert_close
    close(blend.double(), want, rtol=1e-5, atol=1e-5)
    close(memory_share, (1 - share) * recalled.norm() / want.norm(), rtol=1e-4, atol=1e-7)
    others = [row for row in range(depth) if row != ring.slot]
    assert torch.equal(ring.past[others].double(), before[others])
    close(ring.past[ring.slot].float(), kept.float(), rtol=0 if dtype == torch.float32 else 2**-7, atol=0)
    if follows:
        close(ring.trend.double(), trend + pace * (kept.double() - trend), rtol=1e-5, atol=1e-5)
        squares, products = numbers(ring.past, ring.trend)
        close(ring.squares, squares, rtol=1e-5, atol=1e-5)
        close(ring.products, products, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("count", [1, 4, 7, 9])
@pytest.mark.parametrize(
    "kernel", [FractionalWeights(), FractionalWeights(0.3, 0.0, 2.0, 1e-6, 5.0, 1.0), FractionalWeights(1, 0, 0)]
)
def test_the_weights_of_a_single_run_at_once_are_the_kernels_own(kernel, count):
    ring = made(7, 400, count, torch.float32, True)
    trend_norm, distances = ring.compared()
    weights, confidence = kernel.weigh(ring.lags, distances, trend_norm, 30.0)
    got = kernel.weigh_fused(ring, 30.0)
    for one, other in zip(got, (weights, weights @ ring.lags, confidence, trend_norm), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_slots_walk_back_from_the_newest():
    for depth in (1, 3, 7):
        for count in range(3 * depth):
            ring = Ring(torch.zeros(depth, 1), count)
            lags = range(1, min(count, depth) + 1)
            assert ring.slots.tolist() == [(count - lag) % depth for lag in lags]
            assert ring.lags.tolist() == list(lags)


@pytest.mark.slow
@pytest.mark.parametrize("remembers", ["blend", "fresh"])
@pytest.mark.parametrize("share", [0.9, 0.3])
def test_five_thousand_steps_beside_float64(remembers, share):
    """The oracle forms every weight from the raw history; no error of ours may add up, nor any number drift."""
    steps, size, window = 5000, 24, 8
    generator = np.random.default_rng(4)
    drift = np.cumsum(generator.normal(size=(steps, size)) * 0.05, axis=0)
    releases = (drift + generator.normal(size=(steps, size))).astype(np.float32)
    memory = Blend(FractionalWeights(0.6, 0.01, 0.5, 1e-6, 2.0, 0.1), share, window, remembers)
    state = memory.init(layout(size), torch.device("cpu"))
    kept, trend, worst, apart = [], None, 0.0, 0.0
    for fresh in releases:
        direction, state, _ = memory.step(Release(torch.from_numpy(fresh), 1.0, 1.0), state, {})
        past, recalled = kept[::-1][: window - 1], 0.0
        if past:
            weights = paper_weights(past, trend, alpha=0.6, lam=0.01, tau=0.5, kappa=1e-6, zeta=2.0)
            recalled = weights @ np.stack(past)
        want = share * fresh.astype(np.float64) + (1 - share) * recalled
        keep = want if remembers == "blend" else fresh.astype(np.float64)
        trend = keep if trend is None else 0.1 * keep + 0.9 * trend
        kept.append(keep)
        worst = max(worst, np.abs(direction.numpy() - want).max() / np.linalg.norm(want))
        squares, products = numbers(state["past"], state["trend"])
        apart = max(apart, ((state["squares"] - squares).abs() / squares.max()).max().item())
        apart = max(apart, ((state["products"] - products).abs() / squares.max()).max().item())
    assert worst < 2e-6
    assert apart < 2e-6


@pytest.mark.parametrize("kernel", [UniformWeights(), ExponentialWeights(0.7)])
def test_a_kernel_without_a_trend_keeps_no_numbers(kernel):
    state = Blend(kernel, 0.9, 5).init(layout(9), torch.device("cpu"))
    assert set(state) == {"count", "past"}


def test_what_is_stepped_on_is_the_row_that_is_remembered():
    memory = Blend(window=4)
    state = memory.init(layout(9), torch.device("cpu"))
    for step in range(6):
        direction, state, _ = memory.step(Release(torch.randn(9), 1.0, 1.0), state, {})
        assert direction.data_ptr() == state["past"][step % 3].data_ptr()


@pytest.mark.parametrize("remembers", ["blend", "fresh"])
def test_a_bfloat16_history_is_the_same_filter_over_rounded_rows(remembers):
    torch.manual_seed(6)
    size, share, window = 50, 0.7, 5
    memory = Blend(FractionalWeights(floor=2.0), share, window, remembers, "bfloat16")
    state = memory.init(layout(size), torch.device("cpu"))
    assert state["past"].dtype == torch.bfloat16
    kept, trend = [], None
    for _ in range(40):
        fresh = torch.randn(size) + 1
        direction, state, _ = memory.step(Release(fresh, 1.0, 1.0), state, {})
        past, recalled = kept[::-1][: window - 1], 0.0
        if past:
            weights = paper_weights(past, trend, alpha=0.8, lam=0.01, tau=0.1, kappa=1e-6, zeta=2.0)
            recalled = weights @ np.stack(past)
        want = share * fresh.double().numpy() + (1 - share) * recalled
        keep = want if remembers == "blend" else fresh.double().numpy()
        trend = keep if trend is None else 0.2 * keep + 0.8 * trend
        kept.append(torch.from_numpy(keep).float().bfloat16().double().numpy())
        # A number that falls beside the boundary between two bfloat16 may round either way, here and in the oracle.
        np.testing.assert_allclose(direction.numpy(), want, rtol=1e-5, atol=3e-3)
        assert np.median(np.abs(direction.numpy() - want)) < 1e-5


def test_bfloat16_halves_the_window_and_unknown_types_are_refused():
    half, whole = Blend(history="bfloat16"), Blend()
    assert whole.copies == 7 + 1
    assert half.copies == 3.5 + 1 + 1  # the direction is no longer a row of the window
    with pytest.raises(ValueError, match="history=float16 must be float32 or bfloat16"):
        Blend(history="float16")


@gpu
@pytest.mark.parametrize("history", ["float32", "bfloat16"])
@pytest.mark.parametrize("remembers", ["blend", "fresh"])
@pytest.mark.parametrize("kernel", [FractionalWeights(), UniformWeights(), ExponentialWeights(0.7)])
def test_a_gpu_remembers_as_a_cpu_does_and_never_waits(kernel, remembers, history):
    size, memory = 5003, Blend(kernel, 0.6, 6, remembers, history)
    releases = torch.randn(30, size, generator=torch.Generator().manual_seed(2)) + 0.3
    states = [memory.init(layout(size), torch.device(name)) for name in ("cpu", "cuda")]
    on_gpu = releases.cuda()
    for step in range(30):
        want, states[0], shown = memory.step(Release(releases[step], 1.0, 1.0), states[0], {})
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step compiles
        try:
            got, states[1], seen = memory.step(Release(on_gpu[step], 1.0, 1.0), states[1], {})
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tolerance = 1e-4 if history == "float32" else 1e-2
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
        assert seen.keys() == shown.keys()
        for name in seen:
            torch.testing.assert_close(seen[name].cpu(), shown[name], rtol=tolerance, atol=tolerance)


@gpu
def test_a_gpu_repeats_to_the_last_bit():
    memory, size = Blend(window=8), 300_000
    releases = torch.randn(20, size, device="cuda")
    ends = []
    for _ in range(2):
        state = memory.init(layout(size), torch.device("cuda"))
        for release in releases:
            direction, state, _ = memory.step(Release(release, 1.0, 1.0), state, {})
        ends.append((direction.clone(), state["products"].clone()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
