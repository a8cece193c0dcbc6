"""Does a release know how much noise is in it?"""

import pytest
import torch

from vestige.randomness.sum_and_release_types import Release


def test_the_norm_of_the_noise():
    assert Release(torch.zeros(100), 0.5, 1.0).noise_norm == pytest.approx(5.0)
    assert Release(torch.zeros(2), torch.tensor([3.0, 4.0]), 1.0).noise_norm == pytest.approx(5.0)
