"""Which methods have no memory? DP-SGD itself."""

from __future__ import annotations

from vestige.clipping import Flat
from vestige.method import Method, register
from vestige.methods.options import Bound, Momentum
from vestige.rules import sgd


@register("dp-sgd", "Abadi et al., Deep Learning with Differential Privacy, CCS 2016")
def dp_sgd(*, clip: Bound = 1.0, momentum: Momentum = 0.0) -> Method:
    """Plain DP-SGD: clip, sum, add noise, step."""
    return Method(name="dp-sgd", clip=Flat(clip), rule=sgd(momentum))
