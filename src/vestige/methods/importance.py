"""Which method samples examples by the size of their gradient? DPIS."""

from __future__ import annotations

from typing import Annotated

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method, Neutral, register
from vestige.methods.options import Bound, Momentum
from vestige.optim.probes import Importance
from vestige.optim.rules import sgd


@register(
    "dp-is",
    "Wei, Bao, Xiao and Yang, DPIS: Differentially Private Importance Sampling for SGD, CCS 2022",
    "extra release",
    releases="a noised sum of normalised gradients per step, and once per epoch a noised sum of clipped norms",
    price="T x SGM(boost q, z) + ceil(T / round(1/q)) x SGM(q, normaliser_noise z): boost q is the largest inclusion",
    neutral=Neutral({"boost": 1.0, "clip": 1e-6}, like_options={"clip": 1e-6}),
)
def dp_is(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    boost: Annotated[float, "candidates over expected batch: caps every inclusion probability"] = 2.0,
    normaliser_noise: Annotated[float, "noise multiplier of the sum of norms over the gradient's"] = 5.0,
) -> Method:
    """Importance sampling: examples join in proportion to their clipped gradient's norm, and all weigh the same.

    The size of the dataset is public, as everywhere here, so only the sum of norms is released.
    """
    return Method(name="dp-is", clip=Flat(clip), probe=Importance(clip, boost, normaliser_noise), rule=sgd(momentum))
