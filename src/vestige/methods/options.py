"""What do the methods' common options mean? Their types, with the words that `--help` shows."""

from typing import Annotated, Literal

Bound = Annotated[float, "largest norm of one example's gradient (C)"]
Momentum = Annotated[float, "heavy-ball momentum of the optimizer"]
Beta1 = Annotated[float, "decay of Adam's first moment"]
Beta2 = Annotated[float, "decay of Adam's second moment"]
WeightDecay = Annotated[float, "decoupled weight decay"]
Target = Annotated[float, "fraction of examples to leave unclipped"]
ClipSpeed = Annotated[float, "how fast the bound follows the released fraction (eta_C)"]
QuantileNoise = Annotated[str | float, "noise of the count, in examples; auto: a twentieth of the expected batch"]
Radius = Annotated[float, "length of the ascent step (rho)"]


def quantile_noise_of(text: str | float) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"quantile_noise={text!r} must be a positive number or 'auto'") from None
