"""Private optimizers that remember: differentially private training for PyTorch."""

from vestige.api import Training, train
from vestige.curator import BudgetSpent
from vestige.engine import PrivacyEngine
from vestige.method import Method, build
from vestige.methods import dp_sgd, exponential_memory, fo_dp_sgd, post_fm, uniform_memory
from vestige.training import Record, accuracy

__version__ = "0.1.0"

__all__ = [
    "BudgetSpent",
    "Method",
    "PrivacyEngine",
    "Record",
    "Training",
    "accuracy",
    "build",
    "dp_sgd",
    "exponential_memory",
    "fo_dp_sgd",
    "post_fm",
    "train",
    "uniform_memory",
]
