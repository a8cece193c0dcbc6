"""Which methods correlate the noise, so that steps cancel part of each other's? DP-FTRL, BandMF and BLT."""

from __future__ import annotations

from typing import Annotated, Literal

from vestige.mechanism.clipping import Flat
from vestige.methods.base import Method
from vestige.methods.options import Bound, Momentum
from vestige.methods.registry import Neutral, register
from vestige.optim.rules import sgd
from vestige.randomness.correlated import Banded, Buffered, Tree

TURNS = "ceil(T / b) x Gaussian(z), b = floor(1 / q) parts of the data taking turns; no amplification"


@register(
    "Kairouz et al., Practical and Private (Deep) Learning without Sampling or Shuffling, ICML 2021",
    "kairouz2021practical",
    "correlated noise",
    price=TURNS + "; node noise is z times the tree's sensitivity per square root of a visit",
    neutral=Neutral({"restart": 1}, sample_rate=1.0),
)
def dp_ftrl(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    restart: Annotated[int, "epochs per tree; 0: the number with the least error"] = 0,
) -> Method:
    """Tree aggregation: the sum of all releases carries the noise of few nodes, and nothing is sampled."""
    return Method(clip=Flat(max_grad_norm), noise=Tree(restart), rule=sgd(momentum))


@register(
    "Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023",
    "choquettechoo2023amplified",
    "correlated noise",
    price="ceil(T / b) x SGM(b q, z): cyclic Poisson sampling over b bands, in every process that continues the run",
    neutral=Neutral({"bands": 1}),
)
def dp_bandmf(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    bands: Annotated[
        str | int,
        "over how many steps the noise is correlated (b), at most 1 / sample rate; auto: epsilon sqrt(steps) / epochs",
    ] = "auto",
) -> Method:
    """Banded matrix factorization: noise that cancels over steps, with cyclic Poisson sampling.

    The number of bands is a rule of thumb unless it is given: epsilon sqrt(n) / k for n steps and k epochs, between 1
    and what the sampling allows. It sees public facts only, and the ledger records it. Many bands keep as many vectors
    of past noise, less one.
    """
    return Method(clip=Flat(max_grad_norm), noise=Banded(_bands(bands)), rule=sgd(momentum))


@register(
    "Dvijotham et al., Efficient and Near-Optimal Noise Generation for Streaming Differential Privacy, FOCS 2024",
    "dvijotham2024efficient",
    "correlated noise",
    price=TURNS + "; fresh noise is z times the strategy's sensitivity per square root of a visit",
    neutral=Neutral({"buffers": 0}, sample_rate=1.0),
)
def dp_blt(
    *,
    max_grad_norm: Bound = 1.0,
    momentum: Momentum = 0.0,
    buffers: Annotated[int, "vectors of past noise that are kept"] = 2,
) -> Method:
    """Buffered linear Toeplitz noise: nearly optimal correlations from a few buffers, and nothing is sampled."""
    return Method(clip=Flat(max_grad_norm), noise=Buffered(buffers), rule=sgd(momentum))


def _bands(bands: str | int) -> int | Literal["auto"]:
    if bands == "auto" or isinstance(bands, int):
        return bands  # type: ignore[return-value]
    try:
        return int(bands)
    except ValueError:
        raise ValueError(f"bands={bands!r} must be a whole number from 1 up, or 'auto'") from None
