"""Is a release a whole number of public steps, whatever the sum, and is what rounding adds paid for?"""

import numpy as np
import pytest
import torch

from vestige.randomness import lattice, rounded_gaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import STEPS, add_noise, add_steps, charged, coarseness, noised
from vestige.randomness.sum_and_release_types import BoundedSum

STREAM = Randomness.reproducible(2).stream


def released(total, sensitivity=1.0, multiplier=1.0, index=0, **options):
    total = total.clone()
    std, noise = add_noise(BoundedSum(total, sensitivity), multiplier, STREAM("noise", index), **options)
    return total, std, noise


def test_a_release_is_whole_steps_of_the_sum_and_of_the_noise():
    total = torch.randn(1000, dtype=torch.float64)
    found, std, noise = released(total, 0.3, 2.0, nonprivate_keep=True)
    spacing = std * 2.0**-STEPS
    drawn = rounded_gaussian.draw(1000, STREAM("noise", 0))
    steps = found / spacing
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    want = np.rint(total.numpy() / spacing).astype(np.int64) + drawn
    assert np.array_equal(steps.round().long().numpy(), want)
    torch.testing.assert_close(noise, torch.from_numpy(drawn * spacing))
    assert released(total)[2] is None


def test_what_leaves_does_not_depend_on_the_sums_last_bits():
    """Two sums that round to the same steps leave as the same numbers, bit for bit."""
    spacing = charged(1.0, 100) * 2.0**-STEPS
    whole = torch.randint(-(2**31), 2**31, (100,)).double() * spacing
    off = whole + 0.4 * spacing * torch.rand(100, dtype=torch.float64)
    assert not torch.equal(whole, off)
    assert torch.equal(released(whole)[0], released(off)[0])


@pytest.mark.parametrize("size", [10, 10**5])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 20.0])
def test_the_noise_pays_for_rounding(size, multiplier):
    """Sums of `size` coordinates at distance 1, rounded, are at most `charged / multiplier` apart."""
    torch.manual_seed(0)
    std = charged(multiplier, size)
    spacing = std * 2.0**-STEPS
    for _ in range(5):
        one, way = torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
        other = one + way / way.norm()
        apart = ((one / spacing).round() - (other / spacing).round()).norm() * spacing
        assert apart <= std / multiplier / (1 + lattice.ROUNDING) * (1 + 1e-9)
    worst = 1 + spacing * size**0.5  # every coordinate rounded apart by a whole step
    assert worst * (1 + lattice.ROUNDING / 2) <= std / multiplier
    assert std / multiplier < 1 + 2.0**-9


def test_each_coordinate_and_each_row_has_its_own_steps():
    total, sensitivity = torch.zeros(2000), torch.linspace(0.5, 2.0, 2000)
    found, std, _ = released(total, sensitivity, 3.0)
    torch.testing.assert_close(std, sensitivity * charged(3.0, 2000))
    assert float((found / std).std()) == pytest.approx(1.0, abs=0.1)
    rows = torch.zeros(3, 2000)
    add_steps(rows, torch.tensor([[1.0], [2.0], [4.0]]).double() * 2.0**-STEPS, STREAM("rows", 0))
    assert rows.std(dim=1).tolist() == pytest.approx([1.0, 2.0, 4.0], rel=0.1)


@pytest.mark.parametrize("multiplier", [0.5, 1e-3, 1e-9, 1e-100])
def test_next_to_no_noise_is_next_to_no_change(multiplier):
    total = torch.randn(1000).double() * 1e6  # a million examples
    found, std, _ = released(total, 1.0, multiplier)
    assert coarseness(multiplier) > 0
    assert (found - total).abs().max() <= 6 * std + 2.0**-STEPS
    if multiplier == 0.5:
        assert float((found - total).std()) == pytest.approx(std, rel=0.1)


def test_a_number_is_noised_the_same_way():
    found = np.array([noised(3.0, 0.5, STREAM("scalar", index)) for index in range(3000)])
    spacing = 0.5 * (1 + lattice.ROUNDING) * 2.0**-STEPS
    assert np.allclose(found / spacing, np.rint(found / spacing), rtol=0, atol=1e-5)
    assert found.mean() == pytest.approx(3.0, abs=0.05)
    assert found.std() == pytest.approx(0.5, rel=0.06)
