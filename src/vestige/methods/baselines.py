"""Which methods have no memory? DP-SGD itself, and DP-SGD with adaptive clipping."""

from __future__ import annotations

from typing import Annotated

from vestige.mechanism.adaptive_clipping import Automatic, Quantile
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, ClipSpeed, Momentum, QuantileNoise, Target, quantile_noise_of
from vestige.methods.registry import Neutral, register
from vestige.optim.rules import sgd

QUANTILE_REFERENCE = "Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021"


@register("Abadi et al., Deep Learning with Differential Privacy, CCS 2016", "abadi2016deep", neutral=Neutral({}))
def dp_sgd(*, clip: Bound = 1.0, momentum: Momentum = 0.0) -> Method:
    """Plain DP-SGD: clip, sum, add noise, step."""
    return Method(clip=Flat(clip), rule=sgd(momentum))


@register(
    QUANTILE_REFERENCE,
    "andrew2021differentially",
    "extra release",
    releases="per step a noised sum and, on the same sample, a noised count of unclipped examples",
    price="T x SGM(q, z), z^-2 = z_gradient^-2 + (2 quantile_noise)^-2: both answers are one question",
    neutral=Neutral({"clip_speed": 0.0, "quantile_noise": "inf", "clip": 1.0}),
    letters={"start": "clip", "target": "quantile", "speed": "clip_speed", "count_noise": "quantile_noise"},
)
def dp_quantile(
    *,
    clip: Bound = 0.1,
    momentum: Momentum = 0.0,
    quantile: Target = 0.5,
    clip_speed: ClipSpeed = 0.2,
    quantile_noise: QuantileNoise = "auto",
    steady_steps: Annotated[
        bool, "divide the learning rate by the bound's growth, so that steps keep their length"
    ] = True,
) -> Method:
    """Quantile clipping: the bound follows a noised count of the examples it leaves unclipped."""
    bound = Quantile(clip, quantile, clip_speed, quantile_noise_of(quantile_noise), steady_steps=steady_steps)
    return Method(clip=bound, rule=sgd(momentum))


@register(
    "Bu et al., Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, NeurIPS 2023",
    "bu2023automatic",
    neutral=Neutral({"stability": 0.0, "clip": 1e-6}, like_options={"clip": 1e-6}),
)
def dp_auto_clip(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    stability: Annotated[float, "added to the norm before dividing by it (gamma)"] = 0.01,
) -> Method:
    """Automatic clipping (AUTO-S): every example's gradient is normalised instead of clipped."""
    return Method(clip=Automatic(clip, stability), rule=sgd(momentum))
