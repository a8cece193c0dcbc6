"""What does it cost? Prices without training anything, and without torch."""

from vestige import accounting
from vestige.priced_questions import SampledGaussian

RATE, STEPS, DELTA = 0.04, 1000, 1e-5


def plan(multiplier: float) -> accounting.History:
    """A history: which questions are asked, and how often."""
    return {SampledGaussian(RATE, multiplier): STEPS}


print(f"noise multiplier 1.2: epsilon {accounting.epsilon(plan(1.2), DELTA):.2f}")
multiplier = accounting.calibrate(plan, epsilon=3, delta=DELTA)
print(f"epsilon 3: noise multiplier {multiplier:.3f}")

# Choosing the best of about ten runs, whose number is drawn at random before the search (Papernot & Steinke 2022).
print(f"best of ten such runs: epsilon {accounting.tuned_epsilon(plan(multiplier), DELTA, expected_runs=10):.2f}")

# Noise that follows from earlier answers: a filter refuses the question that would exceed epsilon.
filtered = accounting.RenyiFilter(epsilon=3, delta=DELTA, planned=plan(multiplier))
asked, chosen = 0, multiplier
while filtered.allows(question := SampledGaussian(RATE, chosen)):
    filtered.spend(question)  # charge, then ask; here less noise after every hundred answers
    asked += 1
    chosen = multiplier * 0.97 ** (asked // 100)
print(f"filtered at epsilon 3: {asked} steps; one more with noise multiplier {chosen:.3f} is refused")
