"""Which methods let a layer's spectrum decide how far back its memory reaches? SMA-DP-SGD."""

from __future__ import annotations

from typing import Annotated

from vestige.mechanism.groups import Layers, PerGroup
from vestige.methods.base import Method
from vestige.methods.fractional import Alpha, Beta, Window
from vestige.methods.options import Bound, Momentum
from vestige.methods.registry import Neutral, options_of, register
from vestige.optim.rules import sgd
from vestige.optim.spectral.memory_by_tail_exponent import Spectral

Interval = Annotated[tuple[float, float], "exponents that need no tempering: two numbers"]
CLambda = Annotated[float, "how fast tempering grows with the distance from the interval"]
GammaEma = Annotated[float, "weight of the newest release in the running mean"]
WarmUp = Annotated[int | None, "steps over which the memory sets in; 0: at once (default: one epoch)"]
NormCap = Annotated[str | float, "largest factor when the memory is matched to the running mean's norm; off: factor 1"]
Refresh = Annotated[
    int | None, "steps between two spectra of the weights; 1: one at every step (none given: one an epoch)"
]
SpectrumLag = Annotated[int, "steps after which a spectrum is used, found meanwhile; 0: in the step of its own weights"]
Reading = Annotated[str, "a convolution as one matrix (flatten) or one per kernel position (per-position)"]
GateName = Annotated[str, "paper; disjoint: even lags against odd ones, no noise in common; open: none"]
Shuffled = Annotated[bool, "the paper's ablation: layers get each other's exponents, in an order of each step's own"]
ClipPerLayer = Annotated[
    bool, "--max-grad-norm bounds each layer's gradient, not the whole one (which has sqrt(layers) times it)"
]

REFERENCE = "Partohaghighi and Marcia, SMA-DP: Spectral Memory-Aware Differential Privacy, arXiv:2605.20450"
CITE = "partohaghighi2026spectral"
PRICE = "T x SGM(q, z): groups on one sample are one question, z^-2 = sum of the groups' own"
NEUTRAL = Neutral({"beta": 1.0}, groups="layers")
LETTERS = {
    "fresh_weight": "beta",
    "order": "alpha",
    "strictness": "c_lambda",
    "smoothing": "gamma_ema",
    "largest_scale": "norm_cap",
    "refresh": "refresh_spectrum",
    "lag": "spectrum_lag",
}


@register(REFERENCE, CITE, price=PRICE, neutral=NEUTRAL, letters=LETTERS)
def sma_dp_sgd(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    beta: Beta = 0.95,
    window: Window = 4,
    alpha: Alpha = 0.7,
    interval: Interval = (2.0, 6.0),
    c_lambda: CLambda = 1.0,
    gamma_ema: GammaEma = 0.1,
    warm_up: WarmUp = None,
    norm_cap: NormCap = 1.0,
    refresh_spectrum: Refresh = 1,
    spectrum_lag: SpectrumLag = 0,
    convention: Reading = "flatten",
    gate: GateName = "paper",
    shuffled: Shuffled = False,
    clip_per_layer: ClipPerLayer = False,
) -> Method:
    """Layer by layer: a fractional memory whose depth follows the spectrum of the layer's weights at every step."""
    low, high = interval
    memory = Spectral(
        beta,
        alpha,
        window,
        (float(low), float(high)),
        c_lambda,
        gamma_ema,
        warm_up,
        _cap(norm_cap),
        refresh_spectrum,
        convention,  # type: ignore[arg-type]
        gate,  # type: ignore[arg-type]
        spectrum_lag,
        shuffled,
    )
    clips = PerGroup(max_grad_norm, each=clip_per_layer)
    return Method(clip=clips, memory=memory, rule=sgd(momentum), grouping=Layers())


@register(REFERENCE, CITE, price=PRICE, neutral=NEUTRAL, letters=LETTERS)
@options_of(sma_dp_sgd, refresh_spectrum=None, spectrum_lag=4)
def sma_dp_sgd_epoch(**options: object) -> Method:
    """Our variant of SMA-DP-SGD: one spectrum an epoch, found beside the training and used four steps later."""
    return sma_dp_sgd(**{"refresh_spectrum": None, "spectrum_lag": 4, **options})


def _cap(norm_cap: str | float) -> float | None:
    try:
        return None if norm_cap == "off" else float(norm_cap)
    except ValueError:
        raise ValueError(f"norm_cap={norm_cap!r} must be a number or 'off'") from None
