"""Can an adversary tell two neighbouring sums apart by the last bits of one release?

Each attack knows both sums, the noise's size and how it is drawn, and guesses which of the two left. At a noise
multiplier of 20 no guess may be right more often than 51 times in a hundred; on floating-point noise all three are
right nearly always.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from vestige.randomness import gaussian, lattice
from vestige.randomness.keys import Randomness
from vestige.randomness.sum_and_release_types import BoundedSum

SIZE, MULTIPLIER = 10_000, 20.0
ALLOWED = 0.51
ONE = (0.3 + 0.4 * np.random.default_rng(0).random(SIZE)).astype(np.float32)
OTHER = ONE + np.float32(0.99 * SIZE**-0.5)  # at distance 0.99


def on_lattice(total, index):
    return _left(lattice.add_noise, total, index)


def in_float32(total, index):
    return _left(gaussian.add_noise, total, index)


def _left(add, total, index):
    answer = torch.from_numpy(total.copy())
    add(BoundedSum(answer, 1.0), MULTIPLIER, Randomness.reproducible(9).stream("noise", index))
    return answer.numpy()


def by_coarse_angles(total, index):
    """Box-Muller as it was: a float32 angle of 24 bits."""
    random = np.random.default_rng(index)
    radius = np.sqrt(-2 * np.log(1 - random.random(SIZE // 2))).astype(np.float32)
    angle = random.random(SIZE // 2, dtype=np.float32) * np.float32(2 * np.pi)
    noise = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return total + noise * np.float32(MULTIPLIER)


def grid(answer, total):
    """How well the pairs of noise that this sum would leave lie on a grid of angles."""
    noise = (answer.astype(np.float64) - total) / MULTIPLIER
    turns = np.arctan2(noise[SIZE // 2 :], noise[: SIZE // 2]) / (2 * np.pi) % 1.0 * 2.0**24
    return np.mean(np.cos(2 * np.pi * turns))


def reachable(answer, total):
    """How many coordinates some float32 noise could have brought from this sum to this answer."""
    noise = (answer.astype(np.float64) - total).astype(np.float32)
    near = [noise, np.nextafter(noise, np.float32(np.inf)), np.nextafter(noise, np.float32(-np.inf))]
    return np.mean(np.any([total + each == answer for each in near], axis=0))


def spaced(answer, total):
    """How many coordinates are a float32 number times the noise's size, of those whose noise is seen exactly."""
    noise = (answer.astype(np.float64) - total).astype(np.float32)
    exact = noise.astype(np.float64) == answer.astype(np.float64) - total
    unit = (noise / np.float64(MULTIPLIER)).astype(np.float32)
    near = [unit, np.nextafter(unit, np.float32(np.inf)), np.nextafter(unit, np.float32(-np.inf))]
    hit = np.any([each * np.float32(MULTIPLIER) == noise for each in near], axis=0)
    return np.mean(hit[exact]) if exact.any() else 0.5


ATTACKS = {"grid": (grid, by_coarse_angles), "addition": (reachable, in_float32), "spacing": (spaced, in_float32)}


def right(attack, release, trials):
    """How many of so many guesses are right; each sum leaves as often."""
    count = 0.0
    for index in range(trials):
        truth = index % 2
        answer = release((ONE, OTHER)[truth], index)
        scores = attack(answer, ONE), attack(answer, OTHER)
        count += 0.5 if scores[0] == scores[1] else (scores[1] > scores[0]) == truth
    return count


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_succeeds_on_noise_in_floating_point(name):
    attack, release = ATTACKS[name]
    assert right(attack, release, 20) >= 19


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.everyday("addition")
def test_and_does_no_better_on_the_lattice_than_the_guarantee_allows(name):
    attack, _ = ATTACKS[name]
    assert stats.binomtest(int(right(attack, on_lattice, 300)), 300, ALLOWED, "greater").pvalue > 1e-4


def test_a_finer_angle_ends_the_attack_on_the_grid_and_no_other():
    assert stats.binomtest(int(right(grid, in_float32, 300)), 300, ALLOWED, "greater").pvalue > 1e-4


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_large_and_small_coordinates_leave_on_the_same_lattice(scale):
    """In floating point a large sum swallows the noise's last bits, and how many are left tells its size."""
    sums = np.full(SIZE, scale)
    last = on_lattice(sums, 3) / (float(lattice.charged(MULTIPLIER, SIZE)) * 2.0**-lattice.STEPS)
    bits = np.rint(last).astype(np.int64) & 255
    assert stats.chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-6
