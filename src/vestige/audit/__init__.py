"""How much does a run give away, measured? Attacks with canaries, and lower bounds on epsilon with their confidence.

The statistics take scores from any library's runs:

>>> import numpy as np
>>> from vestige.audit import epsilon_lower_bound
>>> random = np.random.default_rng(0)
>>> bound = epsilon_lower_bound(random.normal(2, 1, 4000), random.normal(0, 1, 4000), delta=1e-5)
>>> 1 < bound.epsilon < 6 and bound.confidence == 0.95
True
"""

from vestige.accounting.lower_bounds.bounds_from_scores import (
    GaussianFit,
    OneRunBound,
    ThresholdBound,
    epsilon_lower_bound,
    epsilon_of_mu,
    gaussian_fit,
    one_run_bound,
    one_run_epsilon,
)
from vestige.accounting.lower_bounds.roc_and_confidence_intervals import (
    Interval,
    area_under_curve,
    clopper_pearson,
    rate_of_detection,
)
from vestige.audit.membership import (
    Success,
    by_shadow_models,
    lira,
    logit_confidence,
    losses,
    output_features,
    success,
)

__all__ = [
    "GaussianFit",
    "Interval",
    "OneRunBound",
    "Success",
    "ThresholdBound",
    "area_under_curve",
    "by_shadow_models",
    "clopper_pearson",
    "epsilon_lower_bound",
    "epsilon_of_mu",
    "gaussian_fit",
    "lira",
    "logit_confidence",
    "losses",
    "one_run_bound",
    "one_run_epsilon",
    "output_features",
    "rate_of_detection",
    "success",
]
