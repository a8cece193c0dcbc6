"""The named methods, one file per family. Importing the package registers them all."""

from vestige.methods.adam import adp_adamw, dp_adam, dp_adam_ac, dp_adambc, dp_adamw, dp_micro_adam
from vestige.methods.correlated import dp_bandmf, dp_blt, dp_ftrl
from vestige.methods.filtered import disk, doppler, kalman_memory
from vestige.methods.fractional import exponential_memory, fo_dp_sgd, post_fm, uniform_memory
from vestige.methods.probing import dp_is, dp_sam, dp_sat, least_squares
from vestige.methods.selective import dpsgd_br, dpsgd_br_stepped, dpsur
from vestige.methods.spectral_memory import sma_dp_sgd, sma_dp_sgd_epoch
from vestige.methods.without_memory import dp_auto_clip, dp_muon, dp_quantile, dp_sgd, geoclip

sa_dp_sgd = dp_sam
"""Its name in the tables of some papers."""

__all__ = [
    "adp_adamw",
    "disk",
    "doppler",
    "dp_adam",
    "dp_adam_ac",
    "dp_adambc",
    "dp_adamw",
    "dp_auto_clip",
    "dp_bandmf",
    "dp_blt",
    "dp_ftrl",
    "dp_is",
    "dp_micro_adam",
    "dp_muon",
    "dp_quantile",
    "dp_sam",
    "dp_sat",
    "dp_sgd",
    "dpsgd_br",
    "dpsgd_br_stepped",
    "dpsur",
    "exponential_memory",
    "fo_dp_sgd",
    "geoclip",
    "kalman_memory",
    "least_squares",
    "post_fm",
    "sa_dp_sgd",
    "sma_dp_sgd",
    "sma_dp_sgd_epoch",
    "uniform_memory",
]
