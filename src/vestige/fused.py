"""How are those kernels written in Triton? Imported by `kernels` alone, and only where a GPU and Triton are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def outer_squares(left: Tensor, right: Tensor, rounding: float) -> Tensor:
    """See `kernels.outer_squares`: inner products between positions, tile by tile, never written to memory."""
    left, right = left.contiguous(), right.contiguous()
    examples, positions, _ = left.shape
    if examples == 0:
        return left.new_zeros(0, dtype=torch.float32)
    tile = _tile(positions)
    tiles = triton.cdiv(positions, tile)
    squares = torch.zeros(examples, tiles * tiles, device=left.device)
    ceilings = torch.zeros(examples, tiles, device=left.device)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 or left.dtype != torch.float32 else "ieee"
    _outer_squares[(tiles * tiles, examples)](
        left, right, squares, ceilings, positions, left.shape[2], right.shape[2], tiles, TILE=tile, PRECISION=precision
    )
    return torch.maximum(squares.sum(dim=1), rounding * ceilings.sum(dim=1).square())


def _tile(positions: int) -> int:
    """The side of a tile: large ones are read less often, small ones waste less on the last, partial tile."""
    padded = {side: -(-positions // side) * side for side in (16, 32, 64)}
    return min(padded, key=lambda side: (padded[side] ** 2 * (1 + 16 / side), -side))


@triton.jit
def _gram(
    matrix, base, rows, columns, positions, width, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Inner products of two tiles of positions, over the whole width."""
    product = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = depth[None, :] < width
        one = tl.load(
            matrix + base + rows[:, None] * width + depth[None, :], mask=(rows[:, None] < positions) & inside, other=0.0
        )
        other = tl.load(
            matrix + base + columns[:, None] * width + depth[None, :],
            mask=(columns[:, None] < positions) & inside,
            other=0.0,
        )
        product = tl.dot(one, tl.trans(other), product, input_precision=PRECISION)
    return product


@triton.jit
def _outer_squares(
    left, right, squares, ceilings, positions, out_width, in_width, tiles, TILE: tl.constexpr, PRECISION: tl.constexpr
):
    pair, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = pair // tiles, pair % tiles
    if column <= row:  # the matrix is symmetric: off the diagonal every tile counts twice
        rows = row * TILE + tl.arange(0, TILE)
        columns = column * TILE + tl.arange(0, TILE)
        first = _gram(left, example * positions * out_width, rows, columns, positions, out_width, TILE, 32, PRECISION)
        second = _gram(right, example * positions * in_width, rows, columns, positions, in_width, TILE, 32, PRECISION)
        total = tl.sum(first * second)
        if column == row:
            diagonal = tl.where(rows[:, None] == columns[None, :], first * second, 0.0)
            tl.store(ceilings + example * tiles + row, tl.sum(tl.sqrt(tl.maximum(diagonal, 0.0))))
        else:
            total = 2 * total
        tl.store(squares + example * tiles * tiles + pair, total)


def fractional_pass(
    history: Tensor, weights: Tensor, fresh: Tensor, beta: float, out_row: int | None
) -> tuple[Tensor, Tensor]:
    """See `kernels.fractional_pass`. Each program reads its columns of every row before it writes any."""
    rows, size = history.shape
    assert history.stride(1) == 1
    fresh, weights = fresh.contiguous(), weights.to(torch.float32).contiguous()
    release = torch.empty_like(fresh)
    blocks = triton.cdiv(size, BLOCK)
    partial = torch.empty(blocks, rows + 1, device=fresh.device)
    row = -1 if out_row is None else out_row % rows
    tensors = (history, weights, fresh, release, partial)
    _fractional_pass[(blocks,)](*tensors, beta, row, size, history.stride(0), ROWS=rows, BLOCK=BLOCK, num_warps=4)
    return release, partial.sum(dim=0, dtype=torch.float64)


@triton.jit
def _fractional_pass(
    history, weights, fresh, release, partial, beta, out_row, size, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    new = tl.load(fresh + place, mask=inside, other=0.0)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.static_range(ROWS):
        past = tl.load(history + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        mixed += tl.load(weights + row) * past
        tl.store(partial + block * (ROWS + 1) + row, tl.sum(past * new))
    tl.store(partial + block * (ROWS + 1) + ROWS, tl.sum(new * new))
    result = beta * new + (1 - beta) * mixed
    tl.store(release + place, result, mask=inside)
    if out_row >= 0:
        tl.store(history + out_row * stride + place, result.to(history.dtype.element_ty), mask=inside)
