"""The named methods, one file per family. Importing this package registers them all."""

from vestige.methods.fractional import exponential_memory, fo_dp_sgd, post_fm, uniform_memory
from vestige.methods.plain import dp_sgd
from vestige.methods.selective import dpsgd_br, dpsur
from vestige.methods.spectral import sma_dp_sgd

__all__ = [
    "dp_sgd",
    "dpsgd_br",
    "dpsur",
    "exponential_memory",
    "fo_dp_sgd",
    "post_fm",
    "sma_dp_sgd",
    "uniform_memory",
]
