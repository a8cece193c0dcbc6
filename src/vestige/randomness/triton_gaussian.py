"""How is Gaussian noise added in one pass on a GPU? In Triton; imported by `gaussian` alone, where both are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 512
"""Pairs of coordinates to a program. It decides which coordinate meets which number: reproducible runs depend on it."""


def add_normal(total: Tensor, std: float | Tensor, seed: int, keep: bool) -> Tensor | None:
    """Add std * standard normal to `total` in place; the noise itself comes back only if it is to be kept."""
    noise = torch.empty_like(total) if keep else None
    _launch(total, std, seed, noise)
    return noise


def _launch(total: Tensor, std: float | Tensor, seed: int, noise: Tensor | None) -> None:
    deviations = std.to(torch.float32).expand_as(total).contiguous() if isinstance(std, Tensor) else total
    with torch.cuda.device_of(total):
        _add_normal[(triton.cdiv(total.numel(), 2 * PAIRS),)](
            total, deviations, total if noise is None else noise, 1.0 if isinstance(std, Tensor) else float(std), seed,
            total.numel(), PAIRS=PAIRS, EACH=isinstance(std, Tensor), KEEPS=noise is not None, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed"])
def _add_normal(
    total, deviations, noise, std, seed, size,
    PAIRS: tl.constexpr, EACH: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Philox 4x32-10, keyed with the seed and counting pairs; then Box-Muller.

    The radius comes of 64 bits, so it reaches sqrt(130 log 2) = 9.49; with 32 bits it would stop at 6.7, and in
    single precision at 5.8, while a Gaussian mechanism's own delta may ask for more.
    """
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAIRS)
    pair = block * PAIRS + lane
    low, high = pair.to(tl.uint32), (pair >> 32).to(tl.uint32)
    first, second, third, _ = tl.philox(seed, low, high, low * 0, low * 0)
    uniform = (first.to(tl.float64) + (second.to(tl.float64) + 0.5) * 2.0**-32) * 2.0**-32
    radius = tl.sqrt(tl.maximum(-2 * tl.log(uniform), 0.0)).to(tl.float32)
    angle = third.to(tl.int32, bitcast=True).to(tl.float32) * (3.141592653589793 * 2.0**-31)
    place = block * (2 * PAIRS) + lane
    _add(total, deviations, noise, std, radius * tl.cos(angle), place, size, EACH, KEEPS)
    _add(total, deviations, noise, std, radius * tl.sin(angle), place + PAIRS, size, EACH, KEEPS)


@triton.jit
def _add(
    total, deviations, noise, std, normal, place, size,
    EACH: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    inside = place < size
    scale = tl.load(deviations + place, mask=inside, other=0.0) if EACH else std
    scaled = scale * normal
    tl.store(total + place, tl.load(total + place, mask=inside, other=0.0) + scaled, mask=inside)
    if KEEPS:
        tl.store(noise + place, scaled, mask=inside)
