"""Private optimizers that remember: differentially private training for PyTorch."""

from vestige.api import Training, train
from vestige.engine import PrivacyEngine
from vestige.groups import Layers, Patterns, PerGroup
from vestige.method import Method, build, by_group
from vestige.methods import dp_sgd, exponential_memory, fo_dp_sgd, post_fm, sma_dp_sgd, uniform_memory
from vestige.questions import BudgetSpent
from vestige.training import Record, accuracy

__version__ = "0.1.0"

__all__ = [
    "BudgetSpent",
    "Layers",
    "Method",
    "Patterns",
    "PerGroup",
    "PrivacyEngine",
    "Record",
    "Training",
    "accuracy",
    "build",
    "by_group",
    "dp_sgd",
    "exponential_memory",
    "fo_dp_sgd",
    "post_fm",
    "sma_dp_sgd",
    "train",
    "uniform_memory",
]
