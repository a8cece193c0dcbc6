"""How is a step's one pass over the window fused? Triton kernels, imported only where there are a GPU and Triton."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 4096, 4
"""Numbers of the window that one program holds in registers, and its warps."""
PROGRAMS = 1024
"""The most programs, and so partial sums of each number; where there are more blocks, a program takes several."""


def recall(
    ring, fresh: Tensor, weights: Tensor, blend: Tensor, fresh_weight: float, pace: float, keeps_fresh: bool
) -> Tensor:
    """See `window.recall`. Each program holds its columns of every row, so a row is read once and may be overwritten.

    Partial sums are added up in a fixed order by a second, tiny kernel: no atomics, so runs repeat to the last bit.
    """
    depth, size = ring.past.shape
    rows = triton.next_power_of_2(depth)
    block = min(TILE // 8, TILE // rows)
    blocks = triton.cdiv(size, block)
    turns = triton.cdiv(blocks, PROGRAMS)
    programs = triton.cdiv(blocks, turns)
    follows = ring.trend is not None
    partial = torch.empty(programs, rows + 4 if follows else 2, device=fresh.device)
    with torch.cuda.device_of(fresh):
        _recall[(programs,)](
            ring.past, weights, fresh, blend, ring.trend if follows else fresh, partial,
            float(fresh_weight), float(pace), ring.count, size, size // 16 * 16, ring.past.stride(0), turns,
            DEPTH=depth, ROWS=rows, BLOCK=block, FOLLOWS=follows, FRESH=keeps_fresh,
            APART=keeps_fresh or ring.past.dtype != torch.float32, num_warps=WARPS,
        )  # fmt: skip
    memory_share = torch.empty((), dtype=torch.float64, device=fresh.device)
    squares, products = (ring.squares, ring.products) if follows else (memory_share, memory_share)
    with torch.cuda.device_of(fresh):
        _settle[(1,)](
            partial, squares, products, memory_share, float(1 - fresh_weight), ring.slot, programs,
            DEPTH=depth, ROWS=rows, WIDTH=triton.next_power_of_2(partial.shape[1]), FOLLOWS=follows, num_warps=8,
        )  # fmt: skip
    return memory_share


@triton.jit(do_not_specialize=["count", "size", "turns"])
def _recall(
    past, weights, fresh, blend, trend, partial, fresh_weight, pace, count, size, even, stride, turns,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FOLLOWS: tl.constexpr, FRESH: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """`even` is the size rounded down to a multiple of 16: a mask that ends there keeps loads vectorised."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    slot = count % DEPTH
    filled = row < tl.minimum(count, DEPTH)
    weight = tl.load(weights + (slot - 1 - row + DEPTH) % DEPTH, mask=filled, other=0.0).to(tl.float32)
    products = tl.zeros((ROWS,), dtype=tl.float32)
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    recalled_squares, blend_squares, kept_squares, trend_squares = zeros, zeros, zeros, zeros
    for turn in range(turns):
        recalled, mixed, held, mean, product = _columns(
            past, fresh, blend, trend, weight, row, filled, slot, fresh_weight, pace,
            (program * turns + turn) * BLOCK, even, stride, BLOCK, FOLLOWS, FRESH, APART,
        )  # fmt: skip
        recalled_squares += recalled * recalled
        blend_squares += mixed * mixed
        if FOLLOWS:
            kept_squares += held * held
            trend_squares += mean * mean
            products += product
    recalled_square, blend_square = tl.sum(recalled_squares), tl.sum(blend_squares)
    kept_square, trend_square = tl.sum(kept_squares), tl.sum(trend_squares)
    if program == tl.num_programs(0) - 1:
        recalled, mixed, held, mean, product = _columns(
            past, fresh, blend, trend, weight, row, filled, slot, fresh_weight, pace,
            even.to(tl.int64), size, stride, 16, FOLLOWS, FRESH, APART,
        )  # fmt: skip
        recalled_square += tl.sum(recalled * recalled)
        blend_square += tl.sum(mixed * mixed)
        if FOLLOWS:
            kept_square += tl.sum(held * held)
            trend_square += tl.sum(mean * mean)
            products += product
    numbers = partial + program * (ROWS + 4 if FOLLOWS else 2)
    tl.store(numbers, recalled_square)
    tl.store(numbers + 1, blend_square)
    if FOLLOWS:
        tl.store(numbers + 2, kept_square)
        tl.store(numbers + 3, trend_square)
        tl.store(numbers + 4 + row, products)


@triton.jit
def _columns(
    past, fresh, blend, trend, weight, row, filled, slot, fresh_weight, pace, first, size, stride,
    BLOCK: tl.constexpr, FOLLOWS: tl.constexpr, FRESH: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Mix, remember and compare one block of columns; those beyond the size count as zero."""
    place = first + tl.arange(0, BLOCK)
    inside = place < size
    there = filled[:, None] & inside[None, :]
    window = tl.load(past + row[:, None].to(tl.int64) * stride + place[None, :], mask=there, other=0.0).to(tl.float32)
    new = tl.load(fresh + place, mask=inside, other=0.0)
    recalled = tl.sum(window * weight[:, None], axis=0)
    mixed = fresh_weight * new + (1 - fresh_weight) * recalled
    kept = new if FRESH else mixed
    stored = kept.to(past.dtype.element_ty)
    tl.store(past + slot.to(tl.int64) * stride + place, stored, mask=inside)
    if APART:
        tl.store(blend + place, mixed, mask=inside)
    held, mean, product = kept, kept, weight
    if FOLLOWS:
        old = tl.load(trend + place, mask=inside, other=0.0)
        mean = old + pace * (kept - old)
        tl.store(trend + place, mean, mask=inside)
        held = stored.to(tl.float32)
        product = tl.sum(tl.where(row[:, None] == slot, held[None, :], window) * mean[None, :], axis=1)
    return recalled, mixed, held, mean, product


@triton.jit(do_not_specialize=["slot", "programs"])
def _settle(
    partial, squares, products, memory_share, rest, slot, programs,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums into the ring's numbers, and the share of the memory in the blend."""
    column = tl.arange(0, WIDTH)
    used = ROWS + 4 if FOLLOWS else 2
    total = tl.zeros((WIDTH,), dtype=tl.float64)
    for first in range(0, programs, 8192 // WIDTH):
        program = first + tl.arange(0, 8192 // WIDTH)
        inside = (program < programs)[:, None] & (column < used)[None, :]
        part = tl.load(partial + program[:, None] * used + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
    recalled = tl.sum(tl.where(column == 0, total, 0.0))
    blend = tl.sum(tl.where(column == 1, total, 0.0))
    tl.store(memory_share, rest * tl.sqrt(recalled / tl.maximum(blend, 1e-300)))
    if FOLLOWS:
        tl.store(squares + slot, tl.sum(tl.where(column == 2, total, 0.0)))
        tl.store(products + DEPTH, tl.sum(tl.where(column == 3, total, 0.0)))
        tl.store(products + column - 4, total, mask=(column >= 4) & (column < DEPTH + 4))


def tempered(ring, *constants: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`FractionalWeights.weigh` on the ring's inner products: weights by lag, mean lag, confidence, trend's norm."""
    shown = torch.empty(ring.filled + 3, dtype=torch.float64, device=ring.past.device)
    depth = len(ring.past)
    rows = triton.next_power_of_2(depth)
    with torch.cuda.device_of(ring.past):
        _tempered[(1,)](ring.squares, ring.products, shown, ring.count, *constants, DEPTH=depth, ROWS=rows, num_warps=1)
    return shown[: ring.filled], shown[-3], shown[-2], shown[-1]


@triton.jit(do_not_specialize=["count"])
def _tempered(
    squares, products, shown, count, order, baseline, inconsistency, smallest_scale, floor,
    DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, ROWS)
    filled = tl.minimum(count, DEPTH)
    there = index < filled
    lag = (index + 1).to(tl.float64)
    slot = (count % DEPTH - 1 - index + DEPTH) % DEPTH
    square = tl.maximum(tl.load(products + DEPTH), 0.0)
    apart = tl.load(squares + slot, mask=there, other=0.0) - 2 * tl.load(products + slot, mask=there, other=0.0)
    distance = tl.sqrt(tl.maximum(apart + square, 0.0))
    norm = tl.sqrt(square)
    confidence = norm / tl.maximum(norm + floor, 1e-300)
    pull = confidence * inconsistency / (tl.maximum(norm, smallest_scale) + 1e-12)
    logit = (order - 1) * tl.log(1 + lag) - baseline * lag - pull * distance * lag
    logit = tl.where(there, logit, float("-inf"))
    raw = tl.where(there, tl.exp(logit - tl.max(logit)), 0.0)
    weight = raw / tl.sum(raw)
    tl.store(shown + index, weight, mask=there)
    tl.store(shown + filled, tl.sum(weight * lag))
    tl.store(shown + filled + 1, confidence)
    tl.store(shown + filled + 2, norm)
