"""Which methods blend past releases into the fresh one? FO-DP-SGD and the ablations of its paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, Momentum
from vestige.methods.registry import Neutral, options_of, register
from vestige.optim.memory import Blend, ExponentialWeights, FractionalWeights, UniformWeights
from vestige.optim.rules import sgd

Beta = Annotated[float, "share of the fresh gradient in the blend"]
BetaEnd = Annotated[float | None, "where beta goes, in equal steps by epoch (default: it stays)"]
BetaEpochs = Annotated[int, "epochs after which beta is there"]
Window = Annotated[int, "window K: the blend sees the K-1 newest past releases"]
Alpha = Annotated[float, "fractional order: (lag+1)^(alpha-1)"]
Lam = Annotated[float, "baseline tempering of old releases (lambda)"]
Tau = Annotated[float, "tempering of releases far from the trend"]
Gamma = Annotated[float, "weight of the newest release in the trend"]
Kappa = Annotated[float, "smallest scale by which distances are divided"]
Zeta = Annotated[str | float, "trend norm at which confidence is one half; auto: the noise's own"]

WindowType = Annotated[
    Literal["float32", "bfloat16"], "type in which the window is kept: bfloat16 halves its bytes and rounds each row"
]

FO_REFERENCE = "Partohaghighi and Marcia, Deep Learning under Fractional-Order Differential Privacy, arXiv:2605.09890"


CITE = "partohaghighi2026fractional"
NEUTRAL = Neutral({"beta": 1.0})
LETTERS = {
    "fresh_weight": "beta",
    "final_weight": "beta_end",
    "epochs": "beta_epochs",
    "order": "alpha",
    "baseline": "lam",
    "inconsistency": "tau",
    "smoothing": "gamma",
    "smallest_scale": "kappa",
    "floor": "zeta",
}
"""The paper's letters for the fields of our memory."""


@register(FO_REFERENCE, CITE, letters=LETTERS, neutral=NEUTRAL)
def fo_dp_sgd(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    alpha: Alpha = 0.8,
    lam: Lam = 0.01,
    tau: Tau = 0.1,
    gamma: Gamma = 0.2,
    kappa: Kappa = 1e-6,
    zeta: Zeta = "auto",
    history: WindowType = "float32",
    beta_end: BetaEnd = None,
    beta_epochs: BetaEpochs = 100,
) -> Method:
    """Fractional-order memory: each release blends in past ones by a tempered power law."""
    kernel = _fractional(alpha, lam, tau, gamma, kappa, zeta)
    memory = Blend(kernel, beta, window, history=history, final_weight=beta_end, epochs=beta_epochs)
    return Method(clip=Flat(max_grad_norm), memory=memory, rule=sgd(momentum))


@register(FO_REFERENCE, CITE, letters=LETTERS, neutral=NEUTRAL)
@options_of(fo_dp_sgd)
def post_fm(**options: object) -> Method:
    """The same fractional weights over plain DP-SGD releases (Post-FM): a finite filter, not a recursive one."""
    method = fo_dp_sgd(**options)
    return replace(method, memory=replace(cast(Blend, method.memory), remembers="fresh"))


@register(FO_REFERENCE, CITE, letters=LETTERS, neutral=NEUTRAL)
def uniform_memory(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    history: WindowType = "float32",
) -> Method:
    """Each release blends in the plain mean of the window: the ablation with equal weights."""
    memory = Blend(UniformWeights(), beta, window, history=history)
    return Method(clip=Flat(max_grad_norm), memory=memory, rule=sgd(momentum))


@register(FO_REFERENCE, CITE, letters=LETTERS, neutral=NEUTRAL)
def exponential_memory(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.9,
    window: Window = 8,
    decay: Annotated[float, "geometric decay of the weights per lag"] = 0.8,
    history: WindowType = "float32",
) -> Method:
    """Each release blends in the window with geometric weights: the ablation with short memory."""
    memory = Blend(ExponentialWeights(decay), beta, window, history=history)
    return Method(clip=Flat(max_grad_norm), memory=memory, rule=sgd(momentum))


def _fractional(
    alpha: float, lam: float, tau: float, gamma: float, kappa: float, zeta: str | float
) -> FractionalWeights:
    """The kernel, from the paper's letters."""
    try:
        floor: Any = zeta if zeta == "auto" else float(zeta)
    except ValueError:
        raise ValueError(f"zeta={zeta!r} must be a positive number or 'auto'") from None
    return FractionalWeights(alpha, lam, tau, kappa, floor, gamma)
