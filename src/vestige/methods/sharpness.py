"""Which methods look uphill before they step? DP-SAM and the free form of it, DP-SAT."""

from __future__ import annotations

from typing import Annotated, Any

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method, Neutral, register
from vestige.methods.options import Bound, Momentum, Radius
from vestige.optim.probes import AgainstLastRelease, Ascent
from vestige.optim.rules import sgd

SAM_REFERENCE = "Foret et al., Sharpness-Aware Minimization, ICLR 2021, privately as in Park et al., ICML 2023"
SAT_REFERENCE = "Park, Kim, Choi and Lee, Differentially Private Sharpness-Aware Training, ICML 2023"
SAM_PRICE = "fresh: 2T x SGM(q, z); same: T x SGM(q, z) with sqrt(2) z on both sums; own: T x SGM(q, z)"
SAM_RELEASES = "per step two noised sums (ascent and descent); with ascent 'own', one"
SAM_NEUTRAL = Neutral({"rho": 0.0, "ascent": "own"})
Who = Annotated[str, "whose gradient is climbed: fresh (another sample), same (the step's), own (each example's)"]


@register("dp-sam", SAM_REFERENCE, "extra release", releases=SAM_RELEASES, price=SAM_PRICE, neutral=SAM_NEUTRAL)
def dp_sam(*, clip: Bound = 1.0, momentum: Momentum = 0.0, rho: Radius = 0.05, ascent: Who = "fresh") -> Method:
    """Sharpness-aware steps: the gradient is asked at the top of a noised ascent step."""
    probe: Any = Ascent(rho, ascent)  # type: ignore[arg-type]
    return Method(name="dp-sam", clip=Flat(clip), probe=probe, rule=sgd(momentum))


@register("sa-dp-sgd", SAM_REFERENCE, "extra release", releases=SAM_RELEASES, price=SAM_PRICE, neutral=SAM_NEUTRAL)
def sa_dp_sgd(*, clip: Bound = 1.0, momentum: Momentum = 0.0, rho: Radius = 0.05, ascent: Who = "fresh") -> Method:
    """The same as dp-sam, under the name that some tables give it."""
    return dp_sam(clip=clip, momentum=momentum, rho=rho, ascent=ascent)


@register("dp-sat", SAT_REFERENCE, neutral=Neutral({"rho": 0.0}))
def dp_sat(
    *,
    clip: Bound = 1.0,
    momentum: Momentum = 0.0,
    rho: Radius = 0.03,
    along: Annotated[str, "what is climbed: the last release, or the last move (the momentum form)"] = "release",
) -> Method:
    """Sharpness-aware steps that climb along the last release: one gradient per step, at no extra price."""
    probe: Any = AgainstLastRelease(rho, along)  # type: ignore[arg-type]
    return Method(name="dp-sat", clip=Flat(clip), probe=probe, rule=sgd(momentum))
