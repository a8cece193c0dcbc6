"""Which methods ask otherwise? Uphill: DP-SAM, and DP-SAT for free; by importance: DPIS; once: least squares."""

from __future__ import annotations

from typing import Annotated, Any

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, Momentum, Radius
from vestige.methods.registry import Neutral, register
from vestige.optim.gradient_query_points import AgainstLastRelease, Ascent, Importance, LeastSquares
from vestige.optim.rules import sgd

SAM_REFERENCE = "Foret et al., Sharpness-Aware Minimization, ICLR 2021, privately as in Park et al., ICML 2023"
SAT_REFERENCE = "Park, Kim, Choi and Lee, Differentially Private Sharpness-Aware Training, ICML 2023"
Who = Annotated[str, "whose gradient is climbed: fresh (another sample), same (the step's), own (each example's)"]


@register(
    SAM_REFERENCE,
    "foret2021sharpness",
    "extra release",
    letters={"radius": "rho", "sample": "ascent"},
    releases="per step two noised sums (ascent and descent); with ascent 'own', one",
    price="fresh: 2T x SGM(q, z); same: T x SGM(q, z) with sqrt(2) z on both sums; own: T x SGM(q, z)",
    neutral=Neutral({"rho": 0.0, "ascent": "own"}),
    aliases=("sa-dp-sgd",),
)
def dp_sam(
    *, max_grad_norm: Bound = 1.0, momentum: Momentum = 0.0, rho: Radius = 0.05, ascent: Who = "fresh"
) -> Method:
    """Sharpness-aware steps: the gradient is asked at the top of a noised ascent step."""
    probe: Any = Ascent(rho, ascent)  # type: ignore[arg-type]
    return Method(clip=Flat(max_grad_norm), probe=probe, rule=sgd(momentum))


@register(SAT_REFERENCE, "park2023sharpness", letters={"radius": "rho"}, neutral=Neutral({"rho": 0.0}))
def dp_sat(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    rho: Radius = 0.03,
    along: Annotated[str, "what is climbed: the last release, or the last move (the momentum form)"] = "release",
) -> Method:
    """Sharpness-aware steps that climb along the last release: one gradient per step, at no extra price."""
    probe: Any = AgainstLastRelease(rho, along)  # type: ignore[arg-type]
    return Method(clip=Flat(max_grad_norm), probe=probe, rule=sgd(momentum))


@register(
    "Wei, Bao, Xiao and Yang, DPIS: Differentially Private Importance Sampling for SGD, CCS 2022",
    "wei2022dpis",
    "extra release",
    releases="a noised sum of normalised gradients per step, and once per epoch a noised sum of clipped norms",
    price="T x SGM(boost q, z) + ceil(T / round(1/q)) x SGM(q, normaliser_noise z): boost q is the largest inclusion",
    neutral=Neutral({"boost": 1.0, "max_grad_norm": 1e-6}, like_options={"max_grad_norm": 1e-6}),
)
def dp_is(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    boost: Annotated[float, "candidates over expected batch: caps every inclusion probability"] = 2.0,
    normaliser_noise: Annotated[float, "noise multiplier of the sum of norms over the gradient's"] = 5.0,
) -> Method:
    """Importance sampling: examples join in proportion to their clipped gradient's norm, and all weigh the same.

    The size of the dataset is public, as everywhere here, so only the sum of norms is released.
    """
    return Method(
        clip=Flat(max_grad_norm), probe=Importance(max_grad_norm, boost, normaliser_noise), rule=sgd(momentum)
    )


@register(
    "Wang, Revisiting Differentially Private Linear Regression, UAI 2018 (AdaSSP, with a public ridge)",
    "wang2018revisiting",
    "extra release",
    releases="one noised sum of the second moments of all rows, and of rows with labels",
    price="one Gaussian question: SGM(1, z)",
    solver=True,
)
def least_squares(
    *,
    max_grad_norm: Bound = 1.0,
    ridge: Annotated[float, "the ridge, in largest eigenvalues of the noise: a public number"] = 0.3,
) -> Method:
    """Least squares for a linear head, by one noised matrix of second moments: one question, solved for.

    `max_grad_norm` bounds the norm of an example's moments, which is 1 for a row of norm 1: with such rows nothing is
    clipped.
    """
    return Method(clip=Flat(max_grad_norm), probe=LeastSquares(ridge))
