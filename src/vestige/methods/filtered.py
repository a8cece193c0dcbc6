"""Which methods filter the releases? DOPPLER, DiSK, and a Kalman memory of our own."""

from __future__ import annotations

from typing import Annotated, Any

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, Momentum
from vestige.methods.registry import Neutral, register
from vestige.optim.filters import SECOND_ORDER, LowPass, SelfTuning, Smoothed
from vestige.optim.gradient_query_points import AlongLastStep, Here, Probe
from vestige.optim.rules import sgd


@register(
    "Zhang et al., DOPPLER: Differentially Private Optimizers with Low-pass Filter, NeurIPS 2024",
    "zhang2024doppler",
    neutral=Neutral({"order": 0}),
)
def doppler(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    order: Annotated[int, "of the low-pass filter: 1 (averages about 10 steps), 2 (about 100), 0 (none)"] = 1,
) -> Method:
    """A low-pass filter over the releases, corrected so that a constant passes unchanged."""
    filters = {0: LowPass((), (1.0,)), 1: LowPass(), 2: SECOND_ORDER}
    if order not in filters:
        raise ValueError(f"order={order} must be 0, 1 or 2")
    return Method(clip=Flat(max_grad_norm), memory=filters[order], rule=sgd(momentum))


@register(
    "Zhang et al., DiSK: Differentially Private Optimizer with Simplified Kalman Filter for Noise Reduction, ICLR 2025",
    "zhang2025disk",
    neutral=Neutral({"kappa": 1.0}),
    letters={"gain": "kappa", "reach": "extrapolation"},
)
def disk(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    kappa: Annotated[float, "gain of the filter: share of the fresh release"] = 0.7,
    extrapolation: Annotated[
        str | float, "how far along the last move to look (the paper's gamma); auto: where one gradient is enough"
    ] = "auto",
) -> Method:
    """A simplified Kalman filter: each example's gradient is forecast along the last move, and releases are smoothed.

    The two gradients are combined before they are clipped, so the price is DP-SGD's. At extrapolation
    (1 - kappa) / kappa the forecast needs one gradient only, further along, which is the default here; the paper's own
    settings (kappa 0.7 with 0.5, or 0.5 with 0.7) take two.
    """
    memory = Smoothed(kappa)
    probe: Probe = _forecast(kappa, extrapolation) if kappa < 1 else Here()
    return Method(clip=Flat(max_grad_norm), probe=probe, memory=memory, rule=sgd(momentum))


@register(
    "Vestige's own: the noise-aware memory that Partohaghighi and Marcia 2026 name as future work",
    "vestige_kalman_memory",
    neutral=Neutral({"memory": "off"}),
)
def kalman_memory(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    memory: Annotated[str, "one gain for the whole vector, one per parameter tensor, or off"] = "whole",
) -> Method:
    """A memory that knows its noise and finds from releases alone how long to remember.

    A Kalman filter whose only unknown, how fast the gradient moves, is estimated from its own errors of prediction. No
    weight, order or window is to be tuned.
    """
    if memory not in ("whole", "tensor", "off"):
        raise ValueError(f"memory={memory!r} must be whole, tensor or off")
    kept: dict[str, Any] = {} if memory == "off" else {"memory": SelfTuning(memory)}  # type: ignore[arg-type]
    return Method(clip=Flat(max_grad_norm), probe=Here(), rule=sgd(momentum), **kept)


def _forecast(kappa: float, extrapolation: str | float) -> AlongLastStep:
    if extrapolation == "auto":
        return AlongLastStep((1 - kappa) / kappa, 1.0)
    try:
        reach = float(extrapolation)
    except ValueError:
        raise ValueError(f"extrapolation={extrapolation!r} must be a positive number or 'auto'") from None
    if not reach > 0:
        raise ValueError(f"extrapolation={reach} must be positive: how far along the last move to look")
    return AlongLastStep(reach, (1 - kappa) / (kappa * reach))
