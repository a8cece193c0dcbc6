"""Is the noise Gaussian, of the promised size, from a key of its own, and never drawn twice?"""

import numpy as np
import pytest
import torch
from scipy import stats

from vestige.clipping import BoundedSum
from vestige.noise import Randomness, Release, draw_noise

SIZE = 200_000


def accepts_std(sample: np.ndarray, std: float) -> bool:
    """A chi-squared test of the variance at level 1e-6."""
    statistic = float((sample.astype(np.float64) ** 2).sum() / std**2)
    return 1e-6 < stats.chi2(len(sample)).cdf(statistic) < 1 - 1e-6


def test_the_noise_has_the_promised_size_and_no_other():
    sensitive = BoundedSum(torch.zeros(SIZE), 0.3)
    noise, std = draw_noise(sensitive, 1.7, Randomness.secret().stream("noise", 0))
    assert std == pytest.approx(0.51)
    assert accepts_std(noise.numpy(), 0.51)
    assert not accepts_std(noise.numpy(), 0.51 * 2 / 3)
    assert not accepts_std(noise.numpy(), 0.51 * 3 / 2)
    assert stats.kstest(noise.numpy() / 0.51, "norm").pvalue > 1e-6
    assert stats.kstest(noise.numpy() / 0.51 * 1.05, "norm").pvalue < 1e-6


def test_noise_per_coordinate_follows_a_vector_of_sensitivities():
    sensitivity = torch.cat([torch.full((SIZE // 2,), 1.0), torch.full((SIZE // 2,), 3.0)])
    noise, _ = draw_noise(BoundedSum(torch.zeros(SIZE), sensitivity), 2.0, Randomness.secret().stream("noise", 0))
    assert accepts_std(noise[: SIZE // 2].numpy(), 2.0)
    assert accepts_std(noise[SIZE // 2 :].numpy(), 6.0)


def test_secret_keys_differ_and_reproducible_ones_do_not():
    draws = [Randomness.secret().stream("noise", 0).standard_normal(8) for _ in range(3)]
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[1], draws[2])
    same = [Randomness.reproducible(5).stream("noise", 3).standard_normal(8) for _ in range(2)]
    assert np.array_equal(*same)


def test_every_purpose_and_index_has_its_own_stream():
    key = Randomness.reproducible(5)
    streams = [key.stream(purpose, index).integers(2**62) for purpose in ("noise", "sample") for index in range(50)]
    assert len(set(streams)) == 100


def test_the_noise_is_independent_of_torchs_global_generator():
    torch.manual_seed(1)
    first = Randomness.secret().stream("noise", 0).standard_normal(4)
    torch.manual_seed(1)
    assert not np.array_equal(first, Randomness.secret().stream("noise", 0).standard_normal(4))


def test_the_key_is_not_printed():
    key = Randomness.secret()
    assert str(key.entropy) not in repr(key)


def test_the_norm_of_the_noise():
    assert Release(torch.zeros(100), 0.5, 1.0).noise_norm == pytest.approx(5.0)
    assert Release(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0).noise_norm == pytest.approx(5.0)
