"""What do the tests of accounting share? The history of a usual run, and a usual delta."""

from vestige.priced_questions import Question, SampledGaussian

DELTA = 1e-5


def steps(multiplier: float, count: int = 6250, rate: float = 0.04) -> dict[Question, int]:
    return {SampledGaussian(rate, multiplier): count}
