"""How are those kernels written in Triton? Imported by `kernels` alone, and only where a GPU and Triton are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vestige.devices import tf32_convolutions, tf32_products

# Triton launches on the current device, which need not be the one where the tensors lie.

BLOCK = 2048
Pair = tuple[int, int]
ConvolutionShape = tuple[Pair, Pair, Pair, Pair, int]
"""Kernel, stride, padding and dilation, each (height, width), and groups."""


def outer_squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.outer_squares`: inner products between positions, tile by tile, never written to memory."""
    left, right = left.contiguous(), right.contiguous()
    examples, positions, _ = left.shape
    if examples == 0:
        return left.new_zeros(0, dtype=torch.float32), left.new_zeros(0, dtype=torch.float32)
    tile = _tile(positions)
    tiles = triton.cdiv(positions, tile)
    squares = torch.zeros(examples, tiles * tiles, device=left.device)
    lengths = torch.zeros(examples, tiles, device=left.device)
    with torch.cuda.device_of(left):
        _outer_squares[(tiles * tiles, examples)](
            left,
            right,
            squares,
            lengths,
            positions,
            left.shape[2],
            right.shape[2],
            tiles,
            TILE=tile,
            PRECISION=_precision(left, tf32_products()),
            num_warps=max(1, tile // 16),
        )
    return squares.sum(dim=1), lengths.sum(dim=1)


def _precision(tensor: Tensor, allowed: bool) -> str:
    """What the user allows such products elsewhere."""
    return "tf32" if allowed or tensor.dtype != torch.float32 else "tf32x3"


def _tile(positions: int) -> int:
    """The side of a tile: large ones are read less often, small ones waste less on the last, partial tile."""
    padded = {side: -(-positions // side) * side for side in (16, 32, 64)}
    return min(padded, key=lambda side: padded[side] ** 2 * (1 + 32 / side))


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
    left, right, squares, lengths, positions, out_width, in_width, tiles, TILE: tl.constexpr, PRECISION: tl.constexpr
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
            tl.store(lengths + example * tiles + row, tl.sum(tl.sqrt(tl.maximum(diagonal, 0.0))))
        else:
            total = 2 * total
        tl.store(squares + example * tiles * tiles + pair, total)


def convolution_gradients(
    image: Tensor, signal: Tensor, shape: ConvolutionShape, keep: bool, views: int = 1
) -> tuple[Tensor, Tensor]:
    """See `kernels.convolution_gradients`: patches are read where they lie in the image, never written out."""
    image, signal = image.contiguous(), signal.contiguous()
    (_, channels, *space), (_, outputs, *positions) = image.shape, signal.shape
    examples = len(image) // views
    kernel, stride, padding, dilation, groups = shape
    columns = channels // groups * kernel[0] * kernel[1]
    rows = outputs // groups
    row_tile, column_tile = _side(rows, 128), _side(columns, 64)
    column_tiles = triton.cdiv(columns, column_tile)
    tiles = triton.cdiv(rows, row_tile) * column_tiles
    gradients = image.new_empty(examples, outputs, columns) if keep else image.new_empty(1)
    squares = torch.empty(examples, groups * tiles, device=image.device)
    with torch.cuda.device_of(image):
        _convolution_gradients[(examples * groups, tiles)](
            image, signal, gradients, squares,
            channels, space[0], space[1], outputs, positions[1], positions[0] * positions[1],
            columns, column_tiles, tiles, views * positions[0] * positions[1],
            stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1],
            GROUPS=groups, HEIGHT=kernel[0], WIDTH=kernel[1], KEEP=keep, ALIKE=stride == (1, 1) and space == positions,
            VIEWED=views > 1,
            ROWS=row_tile, COLUMNS=column_tile, DEPTH=32, PRECISION=_precision(image, tf32_convolutions()),
            num_warps=8 if row_tile == 128 else 4,
        )  # fmt: skip
    return gradients, squares.sum(dim=1)


def _side(size: int, largest: int) -> int:
    return min(largest, max(16, triton.next_power_of_2(size)))


@triton.jit
def _convolution_gradients(
    image, signal, gradients, squares,
    channels, height, width, outputs, position_width, positions, columns, column_tiles, tiles, all_positions,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    GROUPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr, ALIKE: tl.constexpr,
    VIEWED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    example, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    tile = tl.program_id(1)
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = outputs // GROUPS
    first = example * (all_positions // positions)
    signal_rows = signal + (first * outputs + group * rows + row) * positions
    channel = group * (channels // GROUPS) + column // (HEIGHT * WIDTH)
    image_columns = image + (first * channels + channel) * height * width
    offset_h = (column // WIDTH) % HEIGHT * dilation_h - padding_h
    offset_w = column % WIDTH * dilation_w - padding_w
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, all_positions, DEPTH):
        place = start + tl.arange(0, DEPTH)
        inside = place < all_positions
        signal_place, skipped = place, 0
        if VIEWED:  # the positions of an example's views are one long row
            view, place = place // positions, place % positions
            signal_place, skipped = place + view * outputs * positions, (view * channels * height * width)[:, None]
        real_signal = (row < rows)[:, None] & inside[None, :]
        coming = tl.load(signal_rows[:, None] + signal_place[None, :], mask=real_signal, other=0.0)
        h = (place // position_width * stride_h)[:, None] + offset_h[None, :]
        w = (place % position_width * stride_w)[:, None] + offset_w[None, :]
        real = inside[:, None] & (column < columns)[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        # The first form is the second where it applies, and shows the compiler that neighbours lie side by side.
        offset = place[:, None] + (offset_h * width + offset_w)[None, :] if ALIKE else h * width + w
        patch = tl.load(image_columns[None, :] + (offset + skipped), mask=real, other=0.0)
        total = tl.dot(coming, patch, total, input_precision=PRECISION)
    tl.store(squares + example * GROUPS * tiles + group * tiles + tile, tl.sum(total * total))
    if KEEP:
        place = (example * outputs + group * rows + row) * columns
        tl.store(
            gradients + place[:, None] + column[None, :],
            total,
            mask=(row < rows)[:, None] & (column < columns)[None, :],
        )


def blank_rows(tensor: Tensor, rows: Tensor) -> None:
    """Fill some rows of a contiguous tensor with zeros, in place; those that stay are not even read."""
    width = tensor[0].numel()
    with torch.cuda.device_of(tensor):
        _blank_rows[(len(tensor), triton.cdiv(width, 4 * BLOCK))](tensor, rows, width, BLOCK=4 * BLOCK)


@triton.jit
def _blank_rows(tensor, rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows + row):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=tensor.dtype.element_ty)
        tl.store(tensor + row * width + place, zeros, mask=place < width)


def layer_norm_sums(input: Tensor, signal: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.layer_norm_sums`."""
    input, signal = input.contiguous(), signal.contiguous()
    examples, positions, width = input.shape
    columns = min(64, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, columns)
    parts = max(1, min(triton.cdiv(positions, 32), 2048 // (examples * blocks + 1)))
    each = triton.cdiv(positions, parts)
    sums = torch.empty(2, examples, parts, width, device=input.device)
    tensors = (input, signal, mean.contiguous(), scale.contiguous(), sums[0], sums[1])
    with torch.cuda.device_of(input):
        _layer_norm_sums[(examples, blocks, parts)](
            *tensors, positions, width, each, parts, ROWS=16, COLUMNS=columns, num_warps=4
        )
    weights, biases = sums.sum(dim=2) if parts > 1 else sums[:, :, 0]
    return weights, biases


@triton.jit
def _layer_norm_sums(
    input, signal, mean, scale, weights, biases, positions, width, each, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight, bias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32), tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    last = tl.minimum(part * each + each, positions)
    for start in range(part * each, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < width)[None, :]
        place = (example * positions + row)[:, None] * width + column[None, :]
        coming = tl.load(signal + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(input + place, mask=inside, other=0.0).to(tl.float32)
        middle = tl.load(mean + example * positions + row, mask=row < last, other=0.0)
        stretch = tl.load(scale + example * positions + row, mask=row < last, other=0.0)
        weight += tl.where(inside, coming * (value - middle[:, None]) * stretch[:, None], 0.0)
        bias += coming
    place = (example * parts + part) * width + column
    tl.store(weights + place, tl.sum(weight, axis=0), mask=column < width)
    tl.store(biases + place, tl.sum(bias, axis=0), mask=column < width)


def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.group_norm`: a group of an example's channels is read once, and fits a program."""
    output = torch.empty_like(input)
    mean, scale = torch.empty(2, len(input), groups, device=input.device)
    gain, shift = (output if each is None else each.contiguous() for each in (weight, bias))
    rows, size, tiles = _tiles(input, groups)
    with torch.cuda.device_of(input):
        _group_norm[(len(input) * groups,)](
            input, gain, shift, output, mean, scale, rows, size, groups, float(eps),
            GAIN=weight is not None, SHIFT=bias is not None, **tiles,
        )  # fmt: skip
    return output, mean, scale


def _tiles(input: Tensor, groups: int) -> tuple[int, int, dict[str, int]]:
    """The channels of a group, the places of a channel, and what a program holds of them."""
    rows, size = input.shape[1] // groups, input.shape[2:].numel()
    tiles = {"ROWS": triton.next_power_of_2(rows), "COLUMNS": triton.next_power_of_2(size)}
    return rows, size, {**tiles, "num_warps": max(1, min(16, tiles["ROWS"] * tiles["COLUMNS"] // 512))}


@triton.jit
def _group_norm(
    input, weight, bias, output, mean, scale, rows, size, groups, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = block * rows * size + row[:, None] * size + column[None, :]
    value = tl.load(input + place, mask=inside, other=0.0)
    middle = tl.sum(tl.sum(value, axis=1)) / (rows * size)
    apart = tl.where(inside, value - middle, 0.0)
    stretch = 1 / tl.sqrt(tl.sum(tl.sum(apart * apart, axis=1)) / (rows * size) + eps)
    result = apart * stretch
    channel = (block % groups) * rows + row
    if GAIN:
        result = result * tl.load(weight + channel, mask=row < rows, other=0.0)[:, None]
    if SHIFT:
        result = result + tl.load(bias + channel, mask=row < rows, other=0.0)[:, None]
    tl.store(output + place, result, mask=inside)
    tl.store(mean + block, middle)
    tl.store(scale + block, stretch)


def group_norm_backward(
    input: Tensor, signal: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.group_norm_backward`: a group of an example's channels lies side by side, and fits a program."""
    back = torch.empty_like(input)
    weights, biases = torch.empty(2, *input.shape[:2], device=input.device)
    rows, size, tiles = _tiles(input, groups)
    with torch.cuda.device_of(input):
        _group_norm_backward[(len(input) * groups,)](
            input, signal, mean, scale, weight.contiguous(), back, weights, biases, rows, size, groups, **tiles,
        )  # fmt: skip
    return back, weights, biases


@triton.jit
def _group_norm_backward(
    input, signal, mean, scale, weight, back, weights, biases, rows, size, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = block * rows * size + row[:, None] * size + column[None, :]
    coming = tl.load(signal + place, mask=inside, other=0.0)
    value = tl.load(input + place, mask=inside, other=0.0)
    stretch = tl.load(scale + block)
    standard = tl.where(inside, (value - tl.load(mean + block)) * stretch, 0.0)
    gain = tl.load(weight + (block % groups) * rows + row, mask=row < rows, other=0.0)
    by_weight, by_bias = tl.sum(coming * standard, axis=1), tl.sum(coming, axis=1)
    pull, drift = tl.sum(gain * by_weight) / (rows * size), tl.sum(gain * by_bias) / (rows * size)
    result = stretch * (gain[:, None] * coming - drift - standard * pull)
    tl.store(back + place, result, mask=inside)
    tl.store(weights + block * rows + row, by_weight, mask=row < rows)
    tl.store(biases + block * rows + row, by_bias, mask=row < rows)
