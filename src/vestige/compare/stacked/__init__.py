"""Many runs of one task trained at once, stacked along a leading axis."""

from vestige.compare.stacked.learner import StackedRun
from vestige.compare.stacked.stack import RunProgress, Stack, check_noise, footprint, why_not

__all__ = ["RunProgress", "Stack", "StackedRun", "check_noise", "footprint", "why_not"]
