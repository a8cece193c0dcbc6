"""How is a step of spectral memory fused? Triton kernels, imported only where there are a GPU and Triton.

Three launches take the place of sixty: inner products by blocks of columns, each group's gate and scale from these, and
the move of direction, window and trend. A block lies in one group. Its sums are added up in a fixed order, without
atomics, so that runs repeat to the last bit.
"""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""The most columns of a block; fewer where the window is long, so that a program holds TILE numbers of it."""
TILE = 16384
GATES = {"open": 0, "paper": 1, "disjoint": 2}
SUMS = 8
"""Inner products of a block: rr, tr, tt, ff, fr; and eo, ee, oo for the disjoint gate."""


def weigh(memory, state) -> None:
    """Set the tempering and the weights of the state by its exponents and its count."""
    exponent, depth = state["exponent"], len(state["past"])
    state["tempering"], state["weights"] = torch.empty_like(exponent), torch.empty_like(state["weights"])
    low, high = memory.interval
    with torch.cuda.device_of(exponent):
        _weigh[(len(exponent),)](
            exponent, state["tempering"], state["weights"], float(memory.order - 1), float(low), float(high),
            float(memory.strictness), state["count"], DEPTH=depth, ROWS=triton.next_power_of_2(depth), num_warps=1,
        )  # fmt: skip


def step(memory, fresh: Tensor, state, pull: float) -> tuple[Tensor, Tensor]:
    """The direction of a step that has something to recall, and its gate, scale, ratio and depth, [4, groups].

    The window and the trend of the state have the direction too; the count is the caller's to advance. `pull` is the
    share of the memory before gate and scale.
    """
    past, trend, weights = state["past"], state["trend"], state["weights"]
    (depth, size), groups, count = past.shape, len(weights), state["count"]
    rows = triton.next_power_of_2(depth)
    width = max(16, min(COLUMNS, TILE // rows))
    blocks, bounds = _table(tuple(state["lengths"]), tuple(state["groups"]), groups, width, fresh.device)
    cap = float("inf") if memory.largest_scale is None else float(memory.largest_scale)
    partial = torch.empty(len(blocks), SUMS, device=fresh.device)
    shown = torch.empty(4, groups, dtype=torch.float64, device=fresh.device)
    direction = torch.empty(size, device=fresh.device)
    gate = GATES[memory.gate]
    with torch.cuda.device_of(fresh):
        _compare[(len(blocks),)](
            past, trend, fresh, weights, blocks, direction, partial, _log(1 - memory.smoothing), count,
            past.stride(0), DEPTH=depth, ROWS=rows, WIDTH=width, DISJOINT=gate == 2, SUMS=SUMS, num_warps=4,
        )  # fmt: skip
        _judge[(groups,)](
            partial, bounds, weights, shown, float(pull), float(memory.fresh_weight), cap, groups,
            DEPTH=depth, ROWS=rows, GATE=gate, SCALED=memory.largest_scale is not None, SUMS=SUMS, num_warps=4,
        )  # fmt: skip
        _move[(len(blocks),)](
            past, trend, fresh, blocks, direction, shown, float(memory.fresh_weight), float(pull),
            float(memory.smoothing), count % depth, past.stride(0), groups, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return direction, shown


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


@lru_cache(maxsize=16)
def _table(
    lengths: tuple[int, ...], owners: tuple[int, ...], groups: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Blocks of columns as (start, stop, group), those of a group together, and where each group's begin."""
    found, stop = [], 0
    for length, group in zip(lengths, owners, strict=True):
        start, stop = stop, stop + length
        found += [(group, first, min(first + width, stop)) for first in range(start, stop, width)]
    found.sort()
    bounds = [sum(group < each for group, _, _ in found) for each in range(groups + 1)]
    blocks = torch.tensor([(start, stop, group) for group, start, stop in found], dtype=torch.int64)
    return blocks.to(device), torch.tensor(bounds, dtype=torch.int64).to(device)


@triton.jit(do_not_specialize=["count"])
def _weigh(
    exponent, tempering, weights, order, low, high, strictness, count, DEPTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`Spectral.tempering` and `Spectral.weigh` of a group."""
    group = tl.program_id(0)
    found = tl.load(exponent + group)
    distance = tl.maximum(tl.maximum(low - found, found - high), 0.0)
    tempered = tl.where(found == found, 1 - tl.exp(-strictness * distance), 0.0)
    tl.store(tempering + group, tempered)
    index = tl.arange(0, ROWS)
    lag = (index + 1).to(tl.float64)
    there = index < tl.minimum(count, DEPTH)
    score = tl.where(there, order * tl.log(1 + lag) - tempered * lag, float("-inf"))
    raw = tl.where(there, tl.exp(score - tl.max(score)), 0.0)
    tl.store(weights + group * DEPTH + index, raw / tl.sum(raw), mask=index < DEPTH)


@triton.jit(do_not_specialize=["count"])
def _compare(
    past, trend, fresh, weights, blocks, recalled, partial, log_fading, count, stride,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DISJOINT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """What a block recalls, and its inner products."""
    block = tl.program_id(0).to(tl.int64)
    start, stop, group = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    row = tl.arange(0, ROWS)
    index = (count - 1 - row + ROWS * DEPTH) % DEPTH  # of the lag that a row of the ring is at, less one
    weight = tl.load(weights + group * DEPTH + index, mask=row < DEPTH, other=0.0)
    place = start + tl.arange(0, WIDTH)
    inside = place < stop
    there = (row < DEPTH)[:, None] & inside[None, :]
    window = tl.load(past + row[:, None].to(tl.int64) * stride + place[None, :], mask=there, other=0.0)
    mean = tl.load(trend + place, mask=inside, other=0.0)
    new = tl.load(fresh + place, mask=inside, other=0.0)
    memory = tl.sum(window * weight.to(tl.float32)[:, None], axis=0)
    tl.store(recalled + place, memory, mask=inside)
    mine = partial + block * SUMS
    tl.store(mine, tl.sum(memory * memory))
    tl.store(mine + 1, tl.sum(mean * memory))
    tl.store(mine + 2, tl.sum(mean * mean))
    tl.store(mine + 3, tl.sum(new * new))
    tl.store(mine + 4, tl.sum(new * memory))
    if DISJOINT:
        odd_lag = index % 2 == 0
        fades = tl.exp((index + 1).to(tl.float64) * log_fading)
        odd = tl.sum(window * tl.where(odd_lag, weight, 0.0).to(tl.float32)[:, None], axis=0)
        even = tl.sum(window * tl.where(odd_lag, 0.0, fades).to(tl.float32)[:, None], axis=0)
        tl.store(mine + 5, tl.sum(even * odd))
        tl.store(mine + 6, tl.sum(even * even))
        tl.store(mine + 7, tl.sum(odd * odd))


@triton.jit(do_not_specialize=["groups"])
def _judge(
    partial, bounds, weights, shown, pull, fresh_weight, cap, groups,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """A group's gate and scale, its memory's share of the blend, and how far back its weights reach."""
    group = tl.program_id(0)
    first, last = tl.load(bounds + group), tl.load(bounds + group + 1)
    column = tl.arange(0, SUMS)
    total = tl.zeros((SUMS,), dtype=tl.float64)
    for begin in range(first, last, 256):
        block = begin + tl.arange(0, 256)
        used = (block < last)[:, None] & (column < (8 if GATE == 2 else 5))[None, :]
        part = tl.load(partial + block[:, None] * SUMS + column[None, :], mask=used, other=0.0)
        total += tl.sum(part.to(tl.float64), axis=0)
    rr, tr = tl.sum(tl.where(column == 0, total, 0.0)), tl.sum(tl.where(column == 1, total, 0.0))
    tt, ff = tl.sum(tl.where(column == 2, total, 0.0)), tl.sum(tl.where(column == 3, total, 0.0))
    fr = tl.sum(tl.where(column == 4, total, 0.0))
    gate = tl.full((), 1.0, tl.float64)
    if GATE == 1:
        gate = tl.minimum(tl.maximum(tr / (tl.sqrt(tt) * tl.sqrt(rr) + 1e-12), 0.0), 1.0)
    if GATE == 2:
        eo, ee = tl.sum(tl.where(column == 5, total, 0.0)), tl.sum(tl.where(column == 6, total, 0.0))
        oo = tl.sum(tl.where(column == 7, total, 0.0))
        gate = tl.minimum(tl.maximum(eo / (tl.sqrt(ee) * tl.sqrt(oo) + 1e-12), 0.0), 1.0)
    scale = tl.full((), 1.0, tl.float64)
    if SCALED:
        scale = tl.minimum(tl.sqrt(tt) / (tl.sqrt(rr) + 1e-12), cap)
    share = gate * scale * pull
    branch = share * tl.sqrt(rr)
    blend = tl.maximum(ff * fresh_weight * fresh_weight + 2 * share * fr * fresh_weight + branch * branch, 0.0)
    index = tl.arange(0, ROWS)
    weight = tl.load(weights + group * DEPTH + index, mask=index < DEPTH, other=0.0)
    tl.store(shown + group, gate)
    tl.store(shown + groups + group, scale)
    tl.store(shown + 2 * groups + group, branch / tl.maximum(tl.sqrt(blend), 1e-300))
    tl.store(shown + 3 * groups + group, tl.sum(weight * (index + 1)))


@triton.jit(do_not_specialize=["slot", "groups"])
def _move(
    past, trend, fresh, blocks, direction, shown, fresh_weight, pull, smoothing, slot, stride, groups,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The direction, where what was recalled lay; the window and the trend then have it too."""
    block = tl.program_id(0).to(tl.int64)
    start, stop, group = tl.load(blocks + 3 * block), tl.load(blocks + 3 * block + 1), tl.load(blocks + 3 * block + 2)
    share = (tl.load(shown + group) * tl.load(shown + groups + group) * pull).to(tl.float32)
    place = start + tl.arange(0, WIDTH)
    inside = place < stop
    memory = tl.load(direction + place, mask=inside, other=0.0)
    blend = fresh_weight * tl.load(fresh + place, mask=inside, other=0.0) + share * memory
    tl.store(direction + place, blend, mask=inside)
    tl.store(past + slot.to(tl.int64) * stride + place, blend, mask=inside)
    old = tl.load(trend + place, mask=inside, other=0.0)
    tl.store(trend + place, old + smoothing * (blend - old), mask=inside)
