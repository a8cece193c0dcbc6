"""How are layers that normalise written in Triton? Imported by `kernels` alone, where a GPU and Triton are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton launches on the current device, which need not be the one where the tensors lie.


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
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.group_norm`: a group of a row's channels is read once, and fits a program; where channels lie side
    by side, a program reads a whole row twice, from the cache the second time."""
    output = torch.empty_like(input, dtype=dtype)
    mean, scale = (torch.empty(len(input), groups, device=input.device) for _ in range(2))  # operators return no views
    gain, shift = (output if each is None else each.contiguous() for each in (weight, bias))
    given = {"GAIN": weight is not None, "SHIFT": bias is not None}
    tensors = (input, gain, shift, output, mean, scale)
    with torch.cuda.device_of(input):
        if input.is_contiguous():
            rows, size, tiles = _tiles(input, groups)
            _group_norm[(len(input) * groups,)](*tensors, rows, size, groups, float(eps), **given, **tiles)
        else:
            size, tiles = _tiles_last(input, groups)
            _group_norm_last[(len(input),)](*tensors, size, float(eps), **given, **tiles)
    return output, mean, scale


def _tiles(input: Tensor, groups: int) -> tuple[int, int, dict[str, int]]:
    """The channels of a group, the places of a channel, and what a program holds of them."""
    rows, size = input.shape[1] // groups, input.shape[2:].numel()
    tiles = {"ROWS": triton.next_power_of_2(rows), "COLUMNS": triton.next_power_of_2(size)}
    return rows, size, {**tiles, "num_warps": max(1, min(16, tiles["ROWS"] * tiles["COLUMNS"] // 512))}


def _tiles_last(input: Tensor, groups: int) -> tuple[int, dict[str, int]]:
    """The places of a channel, and what a program holds of them at once."""
    channels, size = input.shape[1], input.shape[2:].numel()
    places = min(triton.next_power_of_2(size), max(1, 8192 // channels))
    return size, {"CHANNELS": channels, "GROUPS": groups, "PLACES": places, "num_warps": 8}


@triton.jit
def _group_norm(
    input, weight, bias, output, mean, scale, rows, size, groups, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = block * rows * size + row[:, None] * size + column[None, :]
    value = tl.load(input + place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(tl.sum(value, axis=1)) / (rows * size)
    apart = tl.where(inside, value - middle, 0.0)
    stretch = 1 / tl.sqrt(tl.sum(tl.sum(apart * apart, axis=1)) / (rows * size) + eps)
    result = apart * stretch
    channel = (block % groups) * rows + row
    if GAIN:
        result = result * tl.load(weight + channel, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if SHIFT:
        result = result + tl.load(bias + channel, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(output + place, result, mask=inside)
    tl.store(mean + block, middle)
    tl.store(scale + block, stretch)


@triton.jit
def _group_norm_last(
    input, weight, bias, output, mean, scale, size, eps,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    # Sums about the mean of the first places: little cancels, and threads add up by themselves as long as they can.
    where, inside = _places(row, 0, size, CHANNELS, PLACES)
    value = tl.load(input + where, mask=inside, other=0.0).to(tl.float32)
    about = tl.sum(value, axis=0) / tl.minimum(size, PLACES)
    first = tl.where(inside, value - about[None, :], 0.0)
    second = first * first
    for start in range(PLACES, size, PLACES):
        where, inside = _places(row, start, size, CHANNELS, PLACES)
        value = tl.load(input + where, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, value - about[None, :], 0.0)
        first += apart
        second += apart * apart
    drift = tl.sum(first, axis=0) / size
    middle = about + drift
    spread = tl.maximum(tl.sum(second, axis=0) - size * drift * drift, 0.0)
    average = _over_groups(middle, CHANNELS, GROUPS) * (GROUPS / CHANNELS)
    total = _over_groups(spread + size * (middle - average) * (middle - average), CHANNELS, GROUPS)
    stretch = 1 / tl.sqrt(total / (size * (CHANNELS // GROUPS)) + eps)
    group = row * GROUPS + channel // (CHANNELS // GROUPS)  # its channels all store the same
    tl.store(mean + group, average)
    tl.store(scale + group, stretch)
    gain = stretch
    if GAIN:
        gain = stretch * tl.load(weight + channel).to(tl.float32)
    for start in range(0, size, PLACES):
        where, inside = _places(row, start, size, CHANNELS, PLACES)
        result = (tl.load(input + where, mask=inside, other=0.0).to(tl.float32) - average[None, :]) * gain[None, :]
        if SHIFT:
            result = result + tl.load(bias + channel).to(tl.float32)[None, :]
        tl.store(output + where, result, mask=inside)


@triton.jit
def _places(row, start, size, CHANNELS: tl.constexpr, PLACES: tl.constexpr):
    """Where the channels of a row's places from `start` on lie, and which of the places there are."""
    place = start + tl.arange(0, PLACES)
    return (row * size + place)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :], (place < size)[:, None]


@triton.jit
def _over_groups(numbers, CHANNELS: tl.constexpr, GROUPS: tl.constexpr):
    """The sum over each channel's group."""
    apart = tl.reshape(numbers, (GROUPS, CHANNELS // GROUPS))
    sums = tl.broadcast_to(tl.sum(apart, axis=1)[:, None], (GROUPS, CHANNELS // GROUPS))
    return tl.reshape(sums, (CHANNELS,))


def group_norm_backward(
    input: Tensor, signal: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.group_norm_backward`: rows and groups as on the way forward."""
    back = torch.empty_like(input)
    weights, biases = torch.empty(2, *input.shape[:2], device=input.device)
    tensors = (mean, scale, weight.contiguous(), back, weights, biases)
    with torch.cuda.device_of(input):
        if input.is_contiguous():
            rows, size, tiles = _tiles(input, groups)
            _group_norm_backward[(len(input) * groups,)](
                input, signal.contiguous(), *tensors, rows, size, groups, **tiles
            )
        else:
            size, tiles = _tiles_last(input, groups)
            signal = signal.contiguous(memory_format=torch.channels_last)
            _group_norm_backward_last[(len(input),)](input, signal, *tensors, size, **tiles)
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
    coming = tl.load(signal + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(input + place, mask=inside, other=0.0).to(tl.float32)
    stretch = tl.load(scale + block)
    standard = tl.where(inside, (value - tl.load(mean + block)) * stretch, 0.0)
    gain = tl.load(weight + (block % groups) * rows + row, mask=row < rows, other=0.0).to(tl.float32)
    by_weight, by_bias = tl.sum(coming * standard, axis=1), tl.sum(coming, axis=1)
    pull, drift = tl.sum(gain * by_weight) / (rows * size), tl.sum(gain * by_bias) / (rows * size)
    result = stretch * (gain[:, None] * coming - drift - standard * pull)
    tl.store(back + place, result, mask=inside)
    tl.store(weights + block * rows + row, by_weight, mask=row < rows)
    tl.store(biases + block * rows + row, by_bias, mask=row < rows)


@triton.jit
def _group_norm_backward_last(
    input, signal, mean, scale, weight, back, weights, biases, size,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    group = row * GROUPS + channel // (CHANNELS // GROUPS)
    middle, stretch = tl.load(mean + group), tl.load(scale + group)
    weighed = tl.zeros((PLACES, CHANNELS), dtype=tl.float32)
    plain = tl.zeros((PLACES, CHANNELS), dtype=tl.float32)
    for start in range(0, size, PLACES):
        where, inside = _places(row, start, size, CHANNELS, PLACES)
        coming = tl.load(signal + where, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(input + where, mask=inside, other=0.0).to(tl.float32)
        weighed += coming * (value - middle[None, :])
        plain += coming
    by_weight, by_bias = tl.sum(weighed, axis=0) * stretch, tl.sum(plain, axis=0)
    tl.store(weights + row * CHANNELS + channel, by_weight)
    tl.store(biases + row * CHANNELS + channel, by_bias)
    gain = tl.load(weight + channel).to(tl.float32)
    count = size * (CHANNELS // GROUPS)
    pull = _over_groups(gain * by_weight, CHANNELS, GROUPS) / count
    drift = _over_groups(gain * by_bias, CHANNELS, GROUPS) / count
    for start in range(0, size, PLACES):
        where, inside = _places(row, start, size, CHANNELS, PLACES)
        coming = tl.load(signal + where, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(input + where, mask=inside, other=0.0).to(tl.float32)
        standard = (value - middle[None, :]) * stretch[None, :]
        result = stretch[None, :] * (gain[None, :] * coming - drift[None, :] - standard * pull[None, :])
        tl.store(back + where, result, mask=inside)
