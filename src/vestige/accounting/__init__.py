"""What a run costs: questions, theorems, budgets and guarantees. It sees no data, and it needs no torch."""

from vestige.accounting.calibration import calibrate
from vestige.accounting.composition import epsilon
from vestige.accounting.guarantees import Facts, Guarantee, guarantee
from vestige.accounting.meaning.meaning import Meaning, meaning
from vestige.accounting.meaning.tradeoff import Tradeoff, tradeoff
from vestige.accounting.meaning.users import group_epsilon, guarantee_of_user, history_of_user
from vestige.accounting.odometers_and_filters import Budget, Odometer, RenyiFilter, history_of_runs, within
from vestige.accounting.selective import published_claim_epsilon
from vestige.accounting.theorems import History
from vestige.accounting.tuning import composed_epsilon, tuned_epsilon

__all__ = [
    "Budget",
    "Facts",
    "Guarantee",
    "History",
    "Meaning",
    "Odometer",
    "RenyiFilter",
    "Tradeoff",
    "calibrate",
    "composed_epsilon",
    "epsilon",
    "group_epsilon",
    "guarantee",
    "guarantee_of_user",
    "history_of_runs",
    "history_of_user",
    "meaning",
    "published_claim_epsilon",
    "tradeoff",
    "tuned_epsilon",
    "within",
]
