"""Is delta an upper bound wherever it is asked, and tight? Against closed forms and integrals in high precision."""

from math import sqrt

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.optimize import brentq

from vestige.accounting import composition, epsilon, pld
from vestige.accounting.pld import Composed, LossMasses
from vestige.priced_questions import SampledGaussian, Trial

DELTAS = [1e-5, 1e-9, 1e-12, 1e-15]


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Of N(shift, 1) against N(0, 1), in closed form (Balle & Wang 2018)."""

    def off(loss: float) -> float:
        with mpmath.workdps(60):
            kept = mpmath.ncdf(shift / 2 - loss / shift) - mpmath.e**loss * mpmath.ncdf(-shift / 2 - loss / shift)
            return float(kept / delta - 1)

    return float(brentq(off, 0, shift**2 / 2 + 20 * shift, xtol=1e-13))


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (5.0, 30), (30.0, 1000), (1000.0, 100_000)])
@pytest.mark.everyday("1.0-1-1e-05", "30.0-1000-1e-09")
def test_composed_gaussians_cost_their_closed_form_from_above(multiplier, count, delta):
    priced = epsilon({SampledGaussian(1.0, multiplier): count}, delta)
    exact = gaussian_epsilon(sqrt(count) / multiplier, delta)
    assert exact <= priced * (1 + 1e-12)
    assert priced == pytest.approx(exact, rel=1e-4)


def two_questions(rate: float, multiplier: float, loss: float) -> float:
    """The hockey stick of two sampled Gaussians, removing: an integral over the first answer of the second's."""
    rate, s = mpmath.mpf(rate), mpmath.mpf(multiplier)

    def second(log_strike):
        strike = mpmath.e**log_strike
        held = strike - (1 - rate)
        if held <= 0:
            return 1 - strike
        crossing = s**2 * mpmath.log(held / rate) + mpmath.mpf(1) / 2
        return rate * mpmath.ncdf((1 - crossing) / s) - held * mpmath.ncdf(-crossing / s)

    def answered(x):
        ratio = 1 - rate + rate * mpmath.e ** ((2 * x - 1) / (2 * s**2))
        return ratio * mpmath.npdf(x, 0, s) * second(loss - mpmath.log(ratio))

    with mpmath.workdps(40):
        return mpmath.quad(answered, mpmath.linspace(-16 * s, 1 + 16 * s, 24))


@pytest.mark.parametrize("delta", [1e-6, pytest.param(1e-15, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rate", "multiplier"), [(0.04, 0.7), (0.3, 1.5)])
@pytest.mark.everyday("0.3-1.5-1e-06")
def test_two_sampled_gaussians_cost_their_integral_from_above(rate, multiplier, delta):
    priced = epsilon({SampledGaussian(rate, multiplier): 2}, delta)
    assert two_questions(rate, multiplier, priced) <= delta * (1 + 1e-9)
    assert two_questions(rate, multiplier, priced * (1 - 1e-4)) > delta


@pytest.mark.parametrize(("rate", "multiplier"), [(0.04, 1.2222), (0.5, 0.4), (1.0, 2.0), (1e-4, 0.7)])
@pytest.mark.everyday("0.04-1.2222")
def test_one_sampled_gaussian_equals_dp_accounting(rate, multiplier):
    step = 2.0**-9
    theirs = from_gaussian_mechanism(multiplier, sampling_prob=rate, value_discretization_interval=step)
    for loss in (0.003, 0.1, 1.0, 5.0):
        ours = composition.loss_distribution({SampledGaussian(rate, multiplier): 1}, step, target=loss)
        reference = [getattr(theirs, way).get_delta_for_epsilon(loss) for way in ("_pmf_remove", "_pmf_add")]
        np.testing.assert_allclose([each.delta(loss) for each in ours], reference, rtol=1e-6, atol=1e-12)


def dense(parts, step: float, loss: float) -> float:
    """Delta by convolving masses in 40 digits, without a transform."""
    with mpmath.workdps(40):
        lowest, masses, finite = 0, [mpmath.mpf(1)], mpmath.mpf(1)
        for part, count in parts:
            for _ in range(count):
                lowest += part.lowest
                longer = [mpmath.mpf(0)] * (len(masses) + len(part.masses) - 1)
                for i, a in enumerate(masses):
                    for j, b in enumerate(part.masses):
                        longer[i + j] += a * mpmath.mpf(float(b))
                masses, finite = longer, finite * (1 - mpmath.mpf(part.infinite))
        gained = sum(
            (
                m * (1 - mpmath.e ** (loss - (lowest + k) * step))
                for k, m in enumerate(masses)
                if (lowest + k) * step > loss
            ),
            mpmath.mpf(0),
        )
        return float(gained + 1 - finite)


PARTS = [
    (LossMasses(-3, np.array([1e-14, 0.2, 0.5, 0.2, 0.1 - 1e-9, 1e-9, 1e-200]), 1e-17), 3),
    (LossMasses(-1, np.array([0.25, 0.0, 0.75]), 0.0), 2),
]


@pytest.mark.parametrize("target", [0.1, 2.0, 4.0])
@pytest.mark.parametrize("loss", [0.0, 0.7, 1.5, 3.9, 5.2])
def test_composed_masses_equal_a_dense_convolution_from_above(loss, target):
    composed = Composed(PARTS, 0.5, target)
    exact, found = dense(PARTS, 0.5, loss), composed.delta(loss)
    assert exact <= found
    assert found - exact <= 2 * composed.slack(loss) + 1e-12 * exact


def test_the_allowance_is_what_keeps_delta_from_below(monkeypatch):
    """Which losses rounding takes from below depends on the processor: some are, without it."""
    aimed_low, losses = (PARTS, 0.5, 0.1), [0.1 * k for k in range(5, 60)]
    exact = [dense(PARTS, 0.5, loss) for loss in losses]
    below = lambda: [Composed(*aimed_low).delta(a) < b for a, b in zip(losses, exact, strict=True)]
    assert not any(below())
    monkeypatch.setattr(pld.Composed, "_hidden", lambda self, epsilon: 1e-300)
    monkeypatch.setattr(pld, "FOLDED", 1e-3)
    assert any(below())


def test_what_is_left_out_of_a_spectrum_is_allowed_for(monkeypatch):
    losses = [0.1 * k for k in range(5, 40)]
    usual = Composed(PARTS, 0.5, 0.1)
    monkeypatch.setattr(pld, "NEGLIGIBLE", 0.02)
    found = Composed(PARTS, 0.5, 0.1)
    assert found._above[0] != usual._above[0]
    assert all(
        dense(PARTS, 0.5, loss) <= found.delta(loss) <= usual.delta(loss) + found.slack(loss) * 2 for loss in losses
    )


@pytest.mark.parametrize(
    "question", [SampledGaussian(0.04, 128.0), SampledGaussian(0.3, 8.0), Trial(0.04, 32.0, 0.0533, 1.3, -1.0)]
)
def test_masses_that_are_next_to_nothing_disturb_nobody(question):
    with np.errstate(all="raise", under="ignore", divide="ignore"):
        assert 0 < composition.epsilon_by_distribution({question: 50}, 1e-5, composition.COARSE) < 10


def test_a_sharp_tail_is_met_by_aiming_again():
    """Renyi's epsilon is where a distribution is first aimed; far above the truth its allowance would show."""
    priced = epsilon({SampledGaussian(1e-4, 0.4): 1}, 1e-9)
    loss = brentq(lambda x: float(one_question(1e-4, 0.4, x) / 1e-9 - 1), 1e-3, 30)
    assert loss <= priced * (1 + 1e-9)
    assert priced == pytest.approx(loss, rel=1e-4)


def one_question(rate, multiplier, loss):
    with mpmath.workdps(40):
        held = mpmath.e**loss - (1 - mpmath.mpf(rate))
        crossing = mpmath.mpf(multiplier) ** 2 * mpmath.log(held / rate) + mpmath.mpf(1) / 2
        return rate * mpmath.ncdf((1 - crossing) / multiplier) - held * mpmath.ncdf(-crossing / multiplier)


def test_losses_that_are_rare_and_large_leave_no_window_that_memory_cannot_hold():
    """Its usual window had 8e9 losses."""
    question = SampledGaussian(4e-8, 0.5)
    priced = epsilon({question: 100_000}, 1e-6)
    assert epsilon({question: 1}, 1e-6) <= priced < 0.01
    assert epsilon({question: 100_000}, 1e-6, "rdp") > 1.4


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "delta", "exact"),
    [
        (4e-5, 0.7, 100_000, 1e-9, 0.443393),
        (4e-5, 1.0, 100_000, 1e-9, 0.0840),
        (1.75e-4, 0.93, 77_000, 2.6e-10, 0.40788),
    ],
)
@pytest.mark.nightly("4e-05-1.0-100000-1e-09-0.084", "0.000175-0.93-77000-2.6e-10-0.40788")
def test_rounding_of_rare_and_large_losses_costs_little(rate, multiplier, steps, delta, exact):
    """Found by quadrature over the outcomes, put on a grid of losses with three moments kept. Where rounding was bounded
    without regard to how fast the spectrum's powers fall, the first was 0.667."""
    assert exact <= epsilon({SampledGaussian(rate, multiplier): steps}, delta) <= 1.03 * exact


def test_a_window_that_is_too_long_in_spite_of_that_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(pld, "LONGEST", 100)
    part = LossMasses(-500, np.full(1001, 1 / 1001), 0.0)
    with pytest.raises(OverflowError, match="a loss distribution of"):
        Composed([(part, 10)], 1e-3, 0.5)
    history = {SampledGaussian(0.011, 0.9): 300}
    assert epsilon(history, 1e-6) == epsilon(history, 1e-6, "rdp")
