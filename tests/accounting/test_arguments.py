"""Does an error name the argument that is at fault?"""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from histories import DELTA, steps
from vestige.accounting import Budget, RenyiFilter, calibrate, epsilon, tuned_epsilon
from vestige.priced_questions import CyclicGaussian, Gaussian, Question, SampledGaussian


@dataclass(frozen=True)
class Unheard(Question):
    kind: ClassVar[str] = "unheard"
    rate: float


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: epsilon({Unheard(0.1): 1}, DELTA), "Unheard"),
        (lambda: epsilon({}, 0.0), "delta=0.0"),
        (lambda: epsilon({}, 1.0), "delta=1.0"),
        (lambda: epsilon({}, DELTA, "moments"), "accountant='moments'"),
        (lambda: epsilon(steps(1.0, -1), DELTA), "count=-1"),
        (lambda: SampledGaussian(1.5, 1.0), "rate=1.5"),
        (lambda: SampledGaussian(0.5, -1.0), "multiplier=-1.0"),
        (lambda: Gaussian(float("nan")), "multiplier=nan"),
        (lambda: CyclicGaussian(0.1, 1.0, 0), "bands=0"),
        (lambda: calibrate(lambda z: steps(z), -1.0, DELTA), "epsilon=-1.0"),
        (lambda: tuned_epsilon({}, DELTA, 0.5), "expected_runs=0.5"),
        (lambda: tuned_epsilon({}, DELTA, 5, -1), "shape=-1"),
        (lambda: tuned_epsilon({}, DELTA, 5, repeats=0), "repeats=0"),
        (lambda: tuned_epsilon({}, DELTA, 5, final_runs=-1), "final_runs=-1"),
        (lambda: tuned_epsilon([], DELTA, 5), "history="),
        (lambda: Budget(-1.0, DELTA, {}), "epsilon=-1.0"),
        (lambda: RenyiFilter(1.0, DELTA, {}), "planned"),
        (lambda: RenyiFilter(1.0, DELTA, steps(1.0), weight=1.0), "weight=1.0"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()
