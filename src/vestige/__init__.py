"""Differentially private training for PyTorch, with a guarantee that can be checked."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vestige.renaming import RenamedModules

if TYPE_CHECKING:
    from vestige.engines.own_rules import register_rule
    from vestige.engines.replacements import fix
    from vestige.integrations.model_card import model_card
    from vestige.mechanism.groups import Layers, Patterns, PerGroup
    from vestige.mechanism.private_evaluation import PrivateEvaluation
    from vestige.methods import dp_sgd, exponential_memory, fo_dp_sgd, post_fm, sma_dp_sgd, uniform_memory
    from vestige.methods.base import Method, by_group
    from vestige.methods.registry import make_method
    from vestige.priced_questions import BudgetSpent
    from vestige.privacy_engine.engine import PrivacyEngine
    from vestige.recipes.train_by_recipe import prepared, recipe
    from vestige.synthesis.api import synthesize
    from vestige.training.loop import Record, accuracy
    from vestige.training.private_statistics import PrivateStatistics, Vocabulary, private_bound, private_statistics
    from vestige.training.run import Training, train

__version__ = "0.3.0"

__all__ = [
    "BudgetSpent",
    "Layers",
    "Method",
    "Patterns",
    "PerGroup",
    "PrivacyEngine",
    "PrivateEvaluation",
    "PrivateStatistics",
    "Record",
    "Training",
    "Vocabulary",
    "accuracy",
    "by_group",
    "dp_sgd",
    "exponential_memory",
    "fix",
    "fo_dp_sgd",
    "make_method",
    "model_card",
    "post_fm",
    "prepared",
    "private_bound",
    "private_statistics",
    "recipe",
    "register_rule",
    "sma_dp_sgd",
    "synthesize",
    "train",
    "uniform_memory",
]

_MODULES = {
    "training.run": ("Training", "train"),
    "training.private_statistics": ("PrivateStatistics", "Vocabulary", "private_bound", "private_statistics"),
    "privacy_engine.engine": ("PrivacyEngine",),
    "engines.replacements": ("fix",),
    "engines.own_rules": ("register_rule",),
    "integrations.model_card": ("model_card",),
    "mechanism.private_evaluation": ("PrivateEvaluation",),
    "mechanism.groups": ("Layers", "Patterns", "PerGroup"),
    "methods.base": ("Method", "by_group"),
    "methods": ("dp_sgd", "exponential_memory", "fo_dp_sgd", "post_fm", "sma_dp_sgd", "uniform_memory"),
    "priced_questions": ("BudgetSpent",),
    "recipes.train_by_recipe": ("prepared", "recipe"),
    "methods.registry": ("make_method",),
    "synthesis.api": ("synthesize",),
    "training.loop": ("Record", "accuracy"),
}


_EARLIER = {"build": "make_method", "card": "model_card"}
sys.meta_path.append(RenamedModules())


def __getattr__(name: str) -> object:
    """Import a public name or a submodule on first access: torch takes seconds to import, and many commands of the
    command line do without it."""
    if name in _EARLIER:
        now = _EARLIER[name]
        message = f"vestige.{name} is called vestige.{now} now; the earlier name goes with 0.4"
        import_module("warnings").warn(message, FutureWarning, stacklevel=2)
        return __getattr__(now)
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"vestige.{module}"), name)
            return globals()[name]
    if name.startswith("_") or find_spec(f"vestige.{name}") is None:
        raise AttributeError(f"module 'vestige' has no attribute {name!r}")
    return import_module(f"vestige.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
