"""Does calibration reach its target from below, and say when it cannot?"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from histories import DELTA, steps
from vestige.accounting import Budget, calibrate, calibration, epsilon
from vestige.priced_questions import SampledGaussian


@pytest.mark.parametrize(("target", "published"), [(1.0, 11.86), (3.0, 4.473), (8.0, 2.034)])
def test_calibration_reaches_its_target_from_below(target, published):
    start = time.process_time()
    multiplier = calibrate(steps, target, DELTA)
    assert time.process_time() - start < 5
    assert multiplier == pytest.approx(published, rel=2e-3)
    assert 0.999 * target <= epsilon(steps(multiplier), DELTA) <= target
    assert Budget(target, DELTA, steps(multiplier)).fits


@settings(deadline=None, max_examples=3)
@given(st.floats(0.002, 1.0), st.integers(1, 2000), st.floats(0.05, 30.0))
def test_calibration_never_exceeds(rate, count, target):
    multiplier = calibrate(lambda z: steps(z, count, rate), target, DELTA)
    assert 0.999 * target <= epsilon(steps(multiplier, count, rate), DELTA) <= target


@pytest.mark.parametrize("start", [0.9995, 0.5, 1.5, 1.0005])
def test_a_search_never_returns_a_multiplier_above_the_target(start):
    search = calibration._Calibration(steps, 1.0, DELTA)
    assert 0.999 <= 1 / search.solve(lambda multiplier: 1 / multiplier, 0.1, 10.0, start=start) <= 1


def test_calibration_by_renyi_needs_more_noise():
    by_renyi = calibrate(steps, 3.0, DELTA, "rdp")
    assert 0.999 * 3 <= epsilon(steps(by_renyi), DELTA, "rdp") <= 3
    assert by_renyi > calibrate(steps, 3.0, DELTA)


def test_calibration_beside_a_fixed_cost():
    fixed = {SampledGaussian(0.04, 1.0): 10}
    multiplier = calibrate(lambda z: {**fixed, **steps(z, 100)}, 2.0, DELTA)
    assert 1.998 <= epsilon({**fixed, **steps(multiplier, 100)}, DELTA) <= 2.0
    with pytest.raises(ValueError, match=r"epsilon=0.5 cannot be reached.*larger epsilon"):
        calibrate(lambda z: {**fixed, **steps(z, 100)}, 0.5, DELTA)
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate(lambda z: {}, 0.5, DELTA)
