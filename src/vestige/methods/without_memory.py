"""Which methods have no memory? DP-SGD itself, with adaptive clipping, in a learned geometry, or orthogonalised."""

from __future__ import annotations

from typing import Annotated

import torch

from vestige.mechanism.adaptive_clipping import Automatic, Geometric, Quantile
from vestige.mechanism.clipping import Flat
from vestige.mechanism.groups import Layers
from vestige.methods.base import Method
from vestige.methods.options import Bound, ClipSpeed, Momentum, QuantileNoise, Target, quantile_noise_of
from vestige.methods.registry import Neutral, register
from vestige.optim.optimizers.muon import HybridMuon
from vestige.optim.rules import Rule, sgd

QUANTILE_REFERENCE = "Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021"


@register("Abadi et al., Deep Learning with Differential Privacy, CCS 2016", "abadi2016deep", neutral=Neutral({}))
def dp_sgd(*, max_grad_norm: Bound = 1.0, momentum: Momentum = 0.0) -> Method:
    """Plain DP-SGD: clip, sum, add noise, step."""
    return Method(clip=Flat(max_grad_norm), rule=sgd(momentum))


@register(
    QUANTILE_REFERENCE,
    "andrew2021differentially",
    "extra release",
    releases="per step a noised sum and, on the same sample, a noised count of unclipped examples",
    price="T x SGM(q, z), z^-2 = z_gradient^-2 + (2 quantile_noise)^-2: both answers are one question",
    neutral=Neutral({"clip_speed": 0.0, "quantile_noise": "inf", "max_grad_norm": 1.0}),
    letters={"start": "max_grad_norm", "target": "quantile", "speed": "clip_speed", "count_noise": "quantile_noise"},
)
def dp_quantile(
    *,
    max_grad_norm: Bound = 0.1,
    momentum: Momentum = 0.0,
    quantile: Target = 0.5,
    clip_speed: ClipSpeed = 0.2,
    quantile_noise: QuantileNoise = "auto",
    steady_steps: Annotated[
        bool, "divide the learning rate by the bound's growth, so that steps keep their length"
    ] = True,
) -> Method:
    """Quantile clipping: the bound follows a noised count of the examples it leaves unclipped."""
    bound = Quantile(max_grad_norm, quantile, clip_speed, quantile_noise_of(quantile_noise), steady_steps=steady_steps)
    return Method(clip=bound, rule=sgd(momentum))


@register(
    "Bu et al., Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, NeurIPS 2023",
    "bu2023automatic",
    neutral=Neutral({"stability": 0.0, "max_grad_norm": 1e-6}, like_options={"max_grad_norm": 1e-6}),
)
def dp_auto_clip(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    stability: Annotated[float, "added to the norm before dividing by it (gamma)"] = 0.01,
) -> Method:
    """Automatic clipping (AUTO-S): every example's gradient is normalised instead of clipped."""
    return Method(clip=Automatic(max_grad_norm, stability), rule=sgd(momentum))


@register(
    "Gilani, Tasnim, Sankar and Kosut, GeoClip: Geometry-Aware Clipping, NeurIPS 2025, arXiv:2506.06549, by layers",
    "gilani2025geoclip",
    neutral=Neutral({"speed": 0.0}, norms="layers"),
    letters={"smoothing": "speed"},
)
def geoclip(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    speed: Annotated[float, "weight of the newest release in the layers' second moments; 0: no geometry"] = 0.1,
    spread: Annotated[float, "largest ratio of a layer's scale to the common one, and of that to a layer's"] = 10.0,
) -> Method:
    """Clips in a geometry learned from past releases: each layer has a scale, and the scaled gradient is clipped.

    The paper clips and noises M (g - a). Here M is diagonal with one number per layer, 1 / s, and a = 0: a norm of the
    scaled gradient then follows from the layers' norms, which every engine has, where a general M or a would need each
    example's gradient written out. The scales are the paper's optimum for such an M, s proportional to the fourth root
    of a coordinate's second moment, which is taken from the releases less the noise's own. Their size is fixed so that
    the noise has as much energy as DP-SGD's at the same clip; the paper lets it follow the estimate. With a = 0 the
    moment is taken about zero, not about a running mean.
    """
    return Method(clip=Geometric(max_grad_norm, speed, spread), rule=sgd(momentum), grouping=Layers())


@register(
    "Kim and Fan, DP-Muon: Differentially Private Optimization via Matrix-Orthogonalized Momentum, arXiv:2605.12994",
    "kim2026dpmuon",
    neutral=Neutral({"momentum": 0.0, "iterations": 0, "rest": "sgd"}),
)
def dp_muon(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.95,
    iterations: Annotated[int, "Newton-Schulz iterations; 0: the momentum itself, not orthogonalised"] = 5,
    rest: Annotated[str, "how parameters that are no matrices move: adam or sgd"] = "adam",
) -> Method:
    """Muon on private gradients: every weight matrix moves along its orthogonalised momentum.

    Resolved where the paper leaves it open, or otherwise than there: the whole gradient is clipped at once (the paper
    clips matrix by matrix: --groups layers); the momentum is divided by its norm before the iteration also where that
    is below 1, so that a step does not depend on the size of the gradients; a step is scaled to about the learning rate
    per coordinate; convolutions are flattened to matrices; the others take Adam. The bias-corrected DP-MuonBC is not
    offered.
    """
    rule = Rule(HybridMuon, {"momentum": momentum, "iterations": iterations, "rest": rest})
    rule.build([torch.nn.Parameter(torch.zeros(1))], 1.0)  # refuses wrong options now, not when a run starts
    return Method(clip=Flat(max_grad_norm), rule=rule)
