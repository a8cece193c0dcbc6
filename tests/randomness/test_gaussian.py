"""Is the noise Gaussian, of the promised size and independent from number to number, however it is drawn?"""

import math
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy import stats

from vestige.randomness.gaussian import PAIRS, add_noise, fill_normal, normal
from vestige.randomness.keys import Randomness
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tf32 import triton_available

SIZE = 200_000


def accepts_std(sample: np.ndarray, std: float) -> bool:
    """A chi-squared test of the variance at level 1e-6."""
    statistic = float((sample.astype(np.float64) ** 2).sum() / std**2)
    return 1e-6 < stats.chi2(len(sample)).cdf(statistic) < 1 - 1e-6


def drawn(sensitivity: float | torch.Tensor, multiplier: float) -> tuple[np.ndarray, float | torch.Tensor]:
    total = torch.zeros(SIZE)
    std, _ = add_noise(BoundedSum(total, sensitivity), multiplier, Randomness.secret().stream("noise", 0))
    return total.numpy(), std


def test_the_noise_has_the_promised_size_and_no_other():
    noise, std = drawn(0.3, 1.7)
    assert std == pytest.approx(0.51)
    assert accepts_std(noise, 0.51)
    assert not accepts_std(noise, 0.51 * 2 / 3)
    assert not accepts_std(noise, 0.51 * 3 / 2)
    assert stats.kstest(noise / 0.51, "norm").pvalue > 1e-6
    assert stats.kstest(noise / 0.51 * 1.05, "norm").pvalue < 1e-6


def test_noise_per_coordinate_follows_a_vector_of_sensitivities():
    noise, _ = drawn(torch.cat([torch.full((SIZE // 2,), 1.0), torch.full((SIZE // 2,), 3.0)]), 2.0)
    assert accepts_std(noise[: SIZE // 2], 2.0)
    assert accepts_std(noise[SIZE // 2 :], 6.0)


def test_the_noise_that_is_kept_is_what_was_added():
    total = torch.full((1000,), 5.0)
    std, noise = add_noise(
        BoundedSum(total, 2.0), 1.5, Randomness.reproducible(1).stream("noise", 0), nonprivate_keep=True
    )
    alone = fill_normal(torch.empty(1000), Randomness.reproducible(1).stream("noise", 0))
    assert noise is not None
    assert torch.equal(noise, alone * std)
    assert torch.equal(total, 5.0 + noise)
    assert add_noise(BoundedSum(total, 2.0), 1.5, Randomness.secret().stream("noise", 0))[1] is None


# --- how it is drawn: on a CPU, and by the kernel that draws, scales and adds in one pass ----------------------------

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if triton_available() else "cpu")
fused = pytest.mark.skipif(
    not (triton_available() or INTERPRETED), reason="needs a GPU and Triton, or Triton with TRITON_INTERPRET=1"
)
sources = pytest.mark.parametrize("source", ["cpu", pytest.param("kernel", marks=fused), "rounded"])
MANY = 20_000_000 if triton_available() else 400_000


def kernel_noise(seed: int, size: int = MANY) -> np.ndarray:
    return unit_noise(seed, size).cpu().numpy()


def unit_noise(seed: int, size: int) -> torch.Tensor:
    from vestige.randomness import triton_gaussian

    noise = torch.zeros(size, device=DEVICE)
    triton_gaussian.add_normal(noise, 1.0, seed, keep=False)
    return noise


def cpu_noise(seed: int, size: int = MANY) -> np.ndarray:
    return fill_normal(torch.empty(size), Randomness.reproducible(seed).stream("noise", 0)).numpy()


def rounded(seed: int, size: int = MANY) -> np.ndarray:
    return normal(size, Randomness.reproducible(seed).stream("noise", 0), DEVICE).cpu().numpy()


SOURCES = {"cpu": (cpu_noise, PAIRS), "kernel": (kernel_noise, 512), "rounded": (rounded, 64)}
"""How each draws, and how far apart it writes numbers that come of one draw."""


@sources
@pytest.mark.everyday("kernel")
def test_the_numbers_are_standard_normal_and_a_wrong_size_is_seen(source):
    sample = SOURCES[source][0](2**62 + 12345)
    assert accepts_std(sample, 1.0)
    assert not accepts_std(sample, 1.02)
    assert abs(sample.astype(np.float64).mean()) < 5 / MANY**0.5
    some = sample[:: MANY // 200_000]
    assert stats.kstest(some, "norm").pvalue > 1e-6
    assert stats.kstest(1.05 * some, "norm").pvalue < 1e-6
    for order, moment in ((3, 0.0), (4, 3.0), (6, 15.0)):
        spread = (np.prod(np.arange(1, 2 * order, 2, dtype=np.float64)) / MANY) ** 0.5
        assert np.mean(sample.astype(np.float64) ** order) == pytest.approx(moment, abs=6 * spread)


@sources
def test_the_tails_are_those_of_a_gaussian(source):
    """Beyond each threshold as many as there should be, by an exact binomial test; and nothing there is missed."""
    sample = np.abs(SOURCES[source][0](77))
    for threshold in (2.0, 3.0, 4.0, 5.0):
        chance = 2 * stats.norm.sf(threshold)
        beyond = int((sample > threshold).sum())
        assert stats.binomtest(beyond, MANY, chance).pvalue > 1e-6, threshold
        if MANY * chance > 100:
            assert stats.binomtest(int((1.1 * sample > threshold).sum()), MANY, chance).pvalue < 1e-6, threshold


@sources
def test_the_numbers_are_independent(source):
    draw, apart = SOURCES[source]
    sample, other = draw(1), draw(2)
    halves = sample.reshape(-1, 2) if MANY % 2 == 0 else sample[:-1].reshape(-1, 2)
    pairs = {
        "next": (sample[:-1], sample[1:]),
        "partner": (sample[:-apart], sample[apart:]),
        "seed": (sample, other),
        "even and odd": (halves[:, 0], halves[:, 1]),
    }
    for name, (one, two) in pairs.items():
        for power in (1, 2):
            left, right = one.astype(np.float64) ** power, two.astype(np.float64) ** power
            correlation = np.corrcoef(left, right)[0, 1]
            assert abs(correlation) < 6 / len(one) ** 0.5, (name, power)
    mixed = sample + 0.05 * other
    assert abs(np.corrcoef(mixed.astype(np.float64), other.astype(np.float64))[0, 1]) > 6 / MANY**0.5


@fused
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("size", [1, 1023, 1024, 3001])
def test_the_kernel_adds_in_place_what_it_draws(size, each):
    from vestige.randomness import triton_gaussian

    std = torch.linspace(0.5, 2.0, size, device=DEVICE) if each else 1.7
    start = torch.linspace(-3.0, 3.0, size, device=DEVICE)
    total, silent = start.clone(), start.clone()
    noise = triton_gaussian.add_normal(total, std, 5, keep=True)
    torch.testing.assert_close(noise, std * unit_noise(5, size), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(total, start + noise, rtol=1e-6, atol=1e-6)
    assert triton_gaussian.add_normal(silent, std, 5, keep=False) is None
    assert torch.equal(total, silent)


def philox(key: int, pairs: np.ndarray) -> list[np.ndarray]:
    """Philox 4x32-10 (Salmon et al. 2011) in NumPy, counting pairs."""
    word = np.uint64(0xFFFFFFFF)
    state = [pairs & word, pairs >> np.uint64(32), 0 * pairs, 0 * pairs]
    keys = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    for _ in range(10):
        one, two = np.uint64(0xD2511F53) * state[0], np.uint64(0xCD9E8D57) * state[2]
        high = [one >> np.uint64(32), two >> np.uint64(32)]
        state = [high[1] ^ state[1] ^ keys[0], two & word, high[0] ^ state[3] ^ keys[1], one & word]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & word, (keys[1] + np.uint64(0xBB67AE85)) & word]
    return state


def test_the_philox_of_the_oracle_is_the_published_one():
    """The known answer of Random123 for an all-zero counter and key."""
    words = [int(word[0]) for word in philox(0, np.zeros(1, dtype=np.uint64))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@fused
@pytest.mark.parametrize("key", [3, 2**31 + 5, 2**62 + 12345, 2**63 - 1])
def test_the_kernel_is_box_muller_on_philox(key):
    size, half = 3000, 512
    block = np.arange(-(-size // (2 * half)), dtype=np.uint64)[:, None]
    first, second, third, _ = philox(key, (block * np.uint64(half) + np.arange(half, dtype=np.uint64)).ravel())
    uniform = first * 2.0**-32 + (second + 0.5) * 2.0**-64
    angle = np.pi * third.astype(np.uint32).view(np.int32) / 2.0**31
    radius = np.sqrt(-2 * np.log(uniform))
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(2, -1, half)
    np.testing.assert_allclose(kernel_noise(key, size), both.transpose(1, 0, 2).ravel()[:size], atol=5e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 2 * PAIRS - 1, 2 * PAIRS, 2 * PAIRS + 1, 5 * PAIRS + 7])
def test_a_cpu_draws_by_box_muller_too(size):
    """Beside the same uniforms one pair at a time, in double precision."""
    stream, expected = Randomness.reproducible(3).stream("noise", 0), np.empty(size)
    for first in range(0, size, 2 * PAIRS):
        here = min(2 * PAIRS, size - first)
        half = (here + 1) // 2
        radii, angles = stream.random(half), stream.random(half)
        for i in range(half):
            radius, angle = math.sqrt(-2 * math.log1p(-radii[i])), 2 * math.pi * float(angles[i])
            expected[first + i] = radius * math.cos(angle)
            if half + i < here:
                expected[first + half + i] = radius * math.sin(angle)
    np.testing.assert_allclose(cpu_noise(3, size), expected, atol=5e-6)


class Extreme:
    """The stream whose every uniform is the last (or the first) that there is."""

    def __init__(self, uniform: float) -> None:
        self.uniform = uniform

        self.calls = 0

    def random(self, size: int) -> np.ndarray:
        self.calls += 1
        return np.full(size, self.uniform if self.calls % 2 else 0.0)


def test_the_radius_reaches_further_than_any_delta_asks():
    """The kernel's smallest uniform is half of 2^-64: 9.49 standard deviations, beyond which a Gaussian has less than
    3e-21. On a CPU it is 2^-53: 8.57 and 2e-17. Neither is ever infinite."""
    assert np.sqrt(-2 * np.log(0.5 * 2.0**-64)) == pytest.approx(9.49, abs=0.01)
    assert 2 * stats.norm.sf(9.49) < 3e-21
    assert fill_normal(torch.empty(2), Extreme(1 - 2.0**-53)).tolist() == pytest.approx([8.5717, 0.0], abs=1e-4)
    assert 2 * stats.norm.sf(8.57) < 2e-17
    assert fill_normal(torch.empty(2), Extreme(0.0)).tolist() == [0.0, 0.0]
