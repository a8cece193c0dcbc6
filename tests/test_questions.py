"""Is a question the same after it was written down?"""

from vestige.priced_questions import CyclicGaussian, Gaussian, Question, SampledGaussian


def test_questions_survive_json():
    for question in (SampledGaussian(0.1, 1.5), Gaussian(2.0), CyclicGaussian(0.1, 2.0, 3)):
        assert Question.from_json(question.to_json()) == question
