"""Which methods are Adam? DP-Adam; with weight decay, bias correction, a noise schedule, adaptive clipping; sparse."""

from __future__ import annotations

from typing import Annotated

import torch

from vestige.mechanism.adaptive_clipping import Paced, Quantile
from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import (
    Beta1,
    Beta2,
    Bound,
    ClipSpeed,
    QuantileNoise,
    Target,
    WeightDecay,
    quantile_noise_of,
)
from vestige.methods.registry import Neutral, register
from vestige.optim import averaging
from vestige.optim.optimizers.micro_adam import MicroAdam
from vestige.optim.rules import AdamBC, Rule
from vestige.randomness import noise_schedules

Floor = Annotated[
    str | float, "least second moment after the noise is taken out (gamma'); auto: a tenth of the noise's"
]


@register(
    "Kingma and Ba, Adam, ICLR 2015, on the releases of Abadi et al. 2016",
    "kingma2015adam",
    neutral=Neutral({}, optimizer="adam"),
)
def dp_adam(*, max_grad_norm: Bound = 1.0, beta1: Beta1 = 0.9, beta2: Beta2 = 0.999) -> Method:
    """Adam on private gradients."""
    return Method(clip=Flat(max_grad_norm), rule=Rule(torch.optim.Adam, {"betas": (beta1, beta2)}))


@register(
    "Tang, Shpilevskiy and Lecuyer, DP-AdamBC: Your DP-Adam Is Actually DP-SGD, AAAI 2024",
    "tang2024dpadambc",
    neutral=Neutral({"beta1": 0.0, "floor": 1.0}),
)
def dp_adambc(
    *,
    max_grad_norm: Bound = 1.0,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    floor: Floor = "auto",
    weight_decay: WeightDecay = 0.0,
) -> Method:
    """Adam whose second moment has the noise's variance taken out; with weight decay, DP-AdamW-BC.

    theta -= lr * m / sqrt(max(v - Phi, floor)), with no other constant in the denominator. Where the gradient is far
    below the noise, the denominator is the square root of the floor, and the best learning rate scales with it.
    """
    return Method(clip=Flat(max_grad_norm), rule=_adam_bc(beta1, beta2, floor, weight_decay))


@register(
    "Chooi et al., DP-AdamW, 2025, arXiv:2511.07843 (Loshchilov and Hutter, AdamW, ICLR 2019, on private gradients)",
    "chooi2025dpadamw",
    neutral=Neutral({"weight_decay": 0.0}, like="dp-adam"),
)
def dp_adamw(
    *, max_grad_norm: Bound = 1.0, beta1: Beta1 = 0.9, beta2: Beta2 = 0.999, weight_decay: WeightDecay = 0.01
) -> Method:
    """Adam with decoupled weight decay on private gradients."""
    return Method(clip=Flat(max_grad_norm), rule=_adamw(beta1, beta2, weight_decay))


@register(
    "Chilukoti et al., Differentially Private Fine-tuned NF-Net to Predict GI Cancer Type, 2025, arXiv:2502.11329",
    "chilukoti2025adaptive",
    price="sum over steps of SGM(q, z_t): every step pays its own level; z is the first",
    neutral=Neutral({"noise_decay": 1.0}, like="dp-adamw"),
    letters={"drop": "noise_decay", "ratio": "noise_decay"},
)
def adp_adamw(
    *,
    max_grad_norm: Bound = 1.0,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    weight_decay: WeightDecay = 0.01,
    schedule: Annotated[
        str, "how the noise falls from epoch to epoch: exponential, linear, time or step"
    ] = "exponential",
    noise_decay: Annotated[float, "exponential, step: ratio; linear, time: loss per epoch"] = 0.99,
) -> Method:
    """DP-AdamW with a public noise schedule: the noise falls from epoch to epoch."""
    kinds = {
        "exponential": noise_schedules.ExponentialDecay,
        "linear": noise_schedules.LinearDecay,
        "time": noise_schedules.TimeDecay,
        "step": noise_schedules.StepDecay,
    }
    if schedule not in kinds:
        raise ValueError(f"schedule={schedule!r} is unknown; choose from {', '.join(kinds)}")
    return Method(
        clip=Flat(max_grad_norm),
        rule=_adamw(beta1, beta2, weight_decay),
        schedule=kinds[schedule](noise_decay),
    )


@register(
    "Yang, DP-Adam-AC, 2025, arXiv:2510.05288, in a valid form: the quantile of Andrew et al. 2021 for raw norms",
    "yang2025dpadamac",
    "extra release",
    releases="per step a noised sum and, on the same sample, a noised count of unclipped examples",
    price="T x SGM(q, z), z^-2 = z_gradient^-2 + (2 quantile_noise)^-2: both answers are one question",
    neutral=Neutral({"clip_speed": 0.0, "quantile_noise": "inf"}, like="dp-adam", like_options={"max_grad_norm": 3.0}),
    letters={"start": "max_grad_norm", "target": "quantile", "speed": "clip_speed", "count_noise": "quantile_noise"},
)
def dp_adam_ac(
    *,
    max_grad_norm: Bound = 3.0,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    quantile: Target = 0.8,
    clip_speed: ClipSpeed = 0.2,
    quantile_noise: QuantileNoise = "auto",
) -> Method:
    """Adam with a clip and a learning rate that follow a noised quantile, and an average for evaluation.

    The published rule reads raw norms and clips micro-batches: no epsilon holds for it, so it is not offered. Here
    every example is clipped, the bound follows the noised fraction of unclipped examples, and so does the rate.
    """
    bound = Quantile(max_grad_norm, quantile, clip_speed, quantile_noise_of(quantile_noise), lowest=0.1, highest=10.0)
    return Method(
        clip=Paced(bound),
        rule=Rule(torch.optim.Adam, {"betas": (beta1, beta2)}),
        average=averaging.ExponentialAverage(0.999),
    )


@register(
    "Hudisteanu, Kalinin and Cyffers, DP-MicroAdam, 2025, arXiv:2511.20509 (Modoranu et al., MicroAdam, NeurIPS 2024)",
    "hudisteanu2025dpmicroadam",
    neutral=Neutral({"density": 1.0}, like="dp-adam"),
    aliases=("dp-microadam",),
)
def dp_micro_adam(
    *,
    max_grad_norm: Bound = 1.0,
    beta1: Beta1 = 0.9,
    beta2: Beta2 = 0.999,
    density: Annotated[float, "share of a private gradient that enters the window, largest entries first"] = 0.01,
    window: Annotated[int, "how many sparse gradients the moments are rebuilt from"] = 10,
) -> Method:
    """Adam from the largest entries of the last few private gradients; what was left out waits as error feedback.

    Resolved where the paper leaves it open, or otherwise than there: entries are chosen in each parameter by itself;
    the error is kept in float32, not in 4 bits; bias correction counts all steps, not those of the window. At density
    1, in the first `window` steps, it is Adam.
    """
    options = {"betas": (beta1, beta2), "density": density, "window": window}
    return Method(clip=Flat(max_grad_norm), rule=_checked(Rule(MicroAdam, options)))


def _checked(rule: Rule) -> Rule:
    """Refuse options that the optimizer would refuse only when a run starts."""
    rule.build([torch.nn.Parameter(torch.zeros(1))], 1.0)
    return rule


def _adamw(beta1: float, beta2: float, weight_decay: float) -> Rule:
    return Rule(torch.optim.AdamW, {"betas": (beta1, beta2), "weight_decay": weight_decay})


def _adam_bc(beta1: float, beta2: float, floor: str | float, weight_decay: float) -> Rule:
    try:
        least = floor if floor == "auto" else float(floor)
    except ValueError:
        raise ValueError(f"floor={floor!r} must be a positive number or 'auto'") from None
    return Rule(AdamBC, {"betas": (beta1, beta2), "floor": least, "weight_decay": weight_decay})
