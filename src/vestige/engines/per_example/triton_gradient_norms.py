"""How are norms of gradients written in Triton? Imported by `kernels` alone, where a GPU and Triton are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vestige.tf32 import tf32_convolutions, tf32_products

# Triton launches on the current device, which need not be the one where the tensors lie.

BLOCK, SLICE, PROGRAMS, WIDEST = 2048, 512, 4096, 4096
"""Numbers that a program reads at once; of what width one takes inner products of a few positions; and how many
programs, of one warp, keep a GPU busy; and the widest row that one program keeps in its registers."""
Pair = tuple[int, int]
ConvolutionShape = tuple[Pair, Pair, Pair, Pair, int]
"""Kernel, stride, padding and dilation, each (height, width), and groups."""


def outer_norms(
    left: Tensor,
    right: Tensor,
    steps: Pair,
    hidden: float,
    unit: float,
    margin: float,
    segments: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.outer_norms`: inner products between positions, tile by tile, never written to memory; and what
    rounding hides, `hidden` in the squares, added in the same kernel that adds up the tiles. Their rows lie at
    these distances."""
    examples, positions, _ = left.shape
    starts = counts = None
    most = positions
    if segments is not None:
        starts, counts, rows = segments
        examples, most = len(starts), rows * positions
    if examples == 0 or positions == 0:
        return left.new_zeros(examples, dtype=torch.float32), left.new_zeros(examples, dtype=torch.float32)
    tile = _tile(most)
    splits = min(triton.cdiv(max(left.shape[2], right.shape[2]), SLICE), triton.cdiv(PROGRAMS, examples))
    if most <= tile == 16 and splits > 1:
        return _sliced_norms(left, right, steps, hidden, unit, margin, (starts, counts), examples, splits)
    tiles = triton.cdiv(most, tile)
    pairs = tiles * (tiles + 1) // 2  # the matrix is symmetric: off the diagonal every tile counts twice
    squares, lengths = (torch.empty(examples, size, device=left.device) for size in (pairs, tiles))
    norms, sums = torch.empty(2, examples, device=left.device)
    with torch.cuda.device_of(left):
        _outer_squares[(pairs, examples)](
            left, right, squares, lengths, starts, counts, positions, left.shape[2], steps[0], right.shape[2], steps[1],
            pairs, tiles,
            TILE=tile, DEPTH=min(64, 2 * tile), PRECISION=_precision(left, tf32_products()),
            num_warps=max(1, tile // 16), num_stages=_stages(left.device.index or 0),
        )  # fmt: skip
        _bounded[(examples,)](
            squares, lengths, norms, sums, pairs, tiles, hidden, 32 * unit, margin, MARGIN=margin > 0, BLOCK=256,
            num_warps=1,
        )  # fmt: skip
    return norms, sums


@cache
def _stages(device: int) -> int:
    """How many tiles are under way at once: three of them take 96 KiB of a multiprocessor's own memory."""
    if not torch.cuda.is_available():
        return 2
    found = torch.cuda.get_device_properties(device)
    return 3 if getattr(found, "shared_memory_per_block_optin", 0) >= 2**17 else 2


def _precision(tensor: Tensor, allowed: bool) -> str:
    """What the user allows such products elsewhere."""
    return "tf32" if allowed or tensor.dtype != torch.float32 else "tf32x3"


def _tile(positions: int) -> int:
    """The side of a tile: large ones are read less often, small ones waste less on the last, partial tile."""
    padded = {side: -(-positions // side) * side for side in (16, 32, 64)}
    return min(padded, key=lambda side: padded[side] ** 2 * (1 + 32 / side))


@triton.jit
def _gram(
    matrix, first, rows, columns, positions, width, step,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Inner products of two tiles of so many positions from the first on, over the whole width."""
    product = tl.zeros((TILE, TILE), dtype=tl.float32)
    ones = matrix + (first + rows.to(tl.int64))[:, None] * step
    others = matrix + (first + columns.to(tl.int64))[:, None] * step
    left, right = (rows < positions)[:, None], (columns < positions)[:, None]
    whole = width // DEPTH * DEPTH
    for start in range(0, whole, DEPTH):  # without a mask across, numbers are read four at a time
        depth = start + tl.arange(0, DEPTH)[None, :]
        one = tl.load(ones + depth, mask=left, other=0.0)
        other = tl.load(others + depth, mask=right, other=0.0)
        product = tl.dot(one, tl.trans(other), product, input_precision=PRECISION)
    if whole < width:
        depth = whole + tl.arange(0, DEPTH)[None, :]
        one = tl.load(ones + depth, mask=left & (depth < width), other=0.0)
        other = tl.load(others + depth, mask=right & (depth < width), other=0.0)
        product = tl.dot(one, tl.trans(other), product, input_precision=PRECISION)
    return product


@triton.jit
def _length(one, other, rows):
    """The sum of the norms of a tile's terms, by `kernels.where_held`: see there (`SEEN / UNSEEN`, `UNSEEN`)."""
    held = (tl.maximum(one, other) < 1e12) | (tl.minimum(one, other) > 1e-32)
    squares = tl.where(held, tl.maximum(one * other, 0.0), float("inf"))
    return tl.sum(tl.sqrt(tl.where(rows[:, None] == rows[None, :], squares, 0.0)))


@triton.jit
def _outer_squares(
    left, right, squares, lengths, starts, counts, positions, out_width, out_step, in_width, in_step, pairs, tiles,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = 0, pair
    while column > row:  # row by row up to the diagonal
        row += 1
        column -= row
    start, own = example * positions, positions
    if starts is not None:  # the rows of an example lie from a first one on, in any number
        start = tl.load(starts + example).to(tl.int64) * positions
        own = tl.load(counts + example).to(tl.int32) * positions
        if row * TILE >= own:  # beyond its last position
            if column == row:
                tl.store(lengths + example * tiles + row, 0.0)
            tl.store(squares + example * pairs + pair, 0.0)
            return
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    one = _gram(left, start, rows, columns, own, out_width, out_step, TILE, DEPTH, PRECISION)
    other = _gram(right, start, rows, columns, own, in_width, in_step, TILE, DEPTH, PRECISION)
    total = tl.sum(one * other)
    if column == row:
        tl.store(lengths + example * tiles + row, _length(one, other, rows))
    else:
        total = 2 * total
    tl.store(squares + example * pairs + pair, total)


@triton.jit
def _sum(numbers, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(numbers + place, mask=place < count, other=0.0)
    return tl.sum(total)


@triton.jit
def _bounded(
    squares, lengths, norms, sums, pairs, tiles, hidden, unit, margin, MARGIN: tl.constexpr, BLOCK: tl.constexpr
):
    """`kernels.bounded` of the sums over an example's tiles."""
    example = tl.program_id(0).to(tl.int64)
    square = _sum(squares + example * pairs, pairs, BLOCK)
    length = _sum(lengths + example * tiles, tiles, BLOCK)
    _store_norm(norms + example, sums + example, square, length, hidden, unit, margin, MARGIN)


@triton.jit
def _store_norm(norm_at, length_at, square, length, hidden, unit, margin, MARGIN: tl.constexpr):
    lost = hidden * (length * length)
    norm = tl.sqrt(tl.where(square < 1e3 * lost, tl.maximum(square, 0.0) + lost, square))
    more = unit * length
    norm += tl.where(more > 1e-4 * norm, more, 0.0)
    if MARGIN:
        norm += margin * length
    tl.store(norm_at, norm)
    tl.store(length_at, length)


def _sliced_norms(
    left: Tensor,
    right: Tensor,
    steps: Pair,
    hidden: float,
    unit: float,
    margin: float,
    segments: tuple[Tensor | None, Tensor | None],
    examples: int,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """The same of few positions that are wide, such as the rows of a user of a linear layer: one tile has all inner
    products, and would be too little work at once. Several programs take a slice of the width each."""
    grams = torch.empty(examples, splits, 2, 16, 16, device=left.device)
    norms, sums = torch.empty(2, examples, device=left.device)
    slices = [triton.cdiv(triton.cdiv(each.shape[2], splits), 32) * 32 for each in (left, right)]
    with torch.cuda.device_of(left):
        _sliced_grams[(splits, examples)](
            left, right, grams, *segments, left.shape[1], left.shape[2], steps[0], slices[0],
            right.shape[2], steps[1], slices[1], splits, TILE=16, DEPTH=32,
            PRECISION=_precision(left, tf32_products()), num_warps=1, num_stages=_stages(left.device.index or 0),
        )  # fmt: skip
        _bounded_grams[(examples,)](
            grams, norms, sums, splits, hidden, 32 * unit, margin, MARGIN=margin > 0, TILE=16, num_warps=1
        )
    return norms, sums


@triton.jit
def _sliced_grams(
    left, right, grams, starts, counts, positions, out_width, out_step, out_slice, in_width, in_step, in_slice, splits,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, example = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, own = example * positions, positions
    if starts is not None:
        start = tl.load(starts + example).to(tl.int64) * positions
        own = tl.load(counts + example).to(tl.int32) * positions
    rows = tl.arange(0, TILE)
    out_here = tl.maximum(tl.minimum(out_slice, out_width - split * out_slice), 0)
    in_here = tl.maximum(tl.minimum(in_slice, in_width - split * in_slice), 0)
    one = _gram(left + split * out_slice, start, rows, rows, own, out_here, out_step, TILE, DEPTH, PRECISION)
    other = _gram(right + split * in_slice, start, rows, rows, own, in_here, in_step, TILE, DEPTH, PRECISION)
    place = grams + (example * splits + split) * 2 * TILE * TILE + rows[:, None] * TILE + rows[None, :]
    tl.store(place, one)
    tl.store(place + TILE * TILE, other)


@triton.jit
def _bounded_grams(grams, norms, sums, splits, hidden, unit, margin, MARGIN: tl.constexpr, TILE: tl.constexpr):
    """`kernels.bounded` of inner products that were added up over slices of the width."""
    example = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, TILE)
    place = grams + example * splits * 2 * TILE * TILE + rows[:, None] * TILE + rows[None, :]
    one = tl.zeros((TILE, TILE), dtype=tl.float32)
    other = tl.zeros((TILE, TILE), dtype=tl.float32)
    for _ in range(0, splits):
        one += tl.load(place)
        other += tl.load(place + TILE * TILE)
        place += 2 * TILE * TILE
    length = _length(one, other, rows)
    _store_norm(norms + example, sums + example, tl.sum(one * other), length, hidden, unit, margin, MARGIN)


def convolution_gradients(
    image: Tensor,
    signal: Tensor,
    shape: ConvolutionShape,
    keep: bool,
    views: int = 1,
    segments: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.convolution_gradients`: patches are read where they lie in the image, never written out.

    The tiles of one example are neighbours in time, so that they read it from the cache. In half precision channels lie
    side by side, or are laid so: only then are several numbers read at once. Those of the gradient then do, too.
    """
    last = image.element_size() < 4
    form = torch.channels_last if last else torch.contiguous_format
    image, signal = (each.contiguous(memory_format=form) for each in (image, signal))
    (_, channels, *space), (_, outputs, *positions) = image.shape, signal.shape
    examples = len(image) // views if segments is None else len(segments[0])
    starts, counts = (None, None) if segments is None else segments
    kernel, stride, padding, dilation, groups = shape
    columns = channels // groups * kernel[0] * kernel[1]
    rows = outputs // groups
    row_tile, column_tile = _side(rows, 128), _side(columns, 128 if last else 64)
    column_tiles = triton.cdiv(columns, column_tile)
    tiles = triton.cdiv(rows, row_tile) * column_tiles
    gradients = torch.empty((examples, outputs, columns) if keep else 1, device=image.device)
    squares = torch.empty(examples, groups * tiles, device=image.device)
    if examples == 0:
        return gradients.view(0, outputs, channels // groups, *kernel) if keep else gradients, squares.sum(dim=1)
    with torch.cuda.device_of(image):
        _convolution_gradients[(examples * groups * tiles,)](
            image, signal, gradients, squares, starts, counts,
            channels, space[0], space[1], outputs, positions[1], positions[0] * positions[1],
            columns, column_tiles, tiles, views * positions[0] * positions[1],
            stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1],
            GROUPS=groups, HEIGHT=kernel[0], WIDTH=kernel[1], KEEP=keep, ALIKE=stride == (1, 1) and space == positions,
            VIEWED=views > 1 or segments is not None, LAST=last,
            ROWS=row_tile, COLUMNS=column_tile, DEPTH=32 if image.element_size() == 4 else 64,
            PRECISION=_precision(image, tf32_convolutions()), num_warps=8 if row_tile == 128 else 4,
        )  # fmt: skip
    if keep and last:
        gradients = gradients.view(examples, outputs, *kernel, channels // groups).permute(0, 1, 4, 2, 3)
    elif keep:
        gradients = gradients.view(examples, outputs, channels // groups, *kernel)
    return gradients, squares.sum(dim=1)


def _side(size: int, largest: int) -> int:
    return min(largest, max(16, triton.next_power_of_2(size)))


@triton.jit
def _convolution_gradients(
    image, signal, gradients, squares, starts, counts,
    channels, height, width, outputs, position_width, positions, columns, column_tiles, tiles, all_positions,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    GROUPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr, ALIKE: tl.constexpr,
    VIEWED: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    example, group = (block // GROUPS).to(tl.int64), block % GROUPS
    row = (tile // column_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tile % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    rows = outputs // GROUPS
    first, end = example * (all_positions // positions), all_positions
    if starts is not None:  # the rows of an example lie from a first one on, in any number
        first = tl.load(starts + example).to(tl.int64)
        end = tl.load(counts + example).to(tl.int32) * positions
    if LAST:  # the columns of one place of the kernel are channels, side by side
        place_in_kernel = column // (channels // GROUPS)
        channel = group * (channels // GROUPS) + column % (channels // GROUPS)
        signal_rows = signal + first * positions * outputs + group * rows + row
        image_columns = image + first * height * width * channels + channel
    else:
        place_in_kernel = column % (HEIGHT * WIDTH)
        channel = group * (channels // GROUPS) + column // (HEIGHT * WIDTH)
        signal_rows = signal + (first * outputs + group * rows + row) * positions
        image_columns = image + (first * channels + channel) * height * width
    offset_h = place_in_kernel // WIDTH * dilation_h - padding_h
    offset_w = place_in_kernel % WIDTH * dilation_w - padding_w
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, end, DEPTH):
        everywhere = start + tl.arange(0, DEPTH)
        inside = everywhere < end
        place = everywhere
        if VIEWED:  # the positions of an example's views are one long row
            view, place = everywhere // positions, everywhere % positions
        h = (place // position_width * stride_h)[:, None] + offset_h[None, :]
        w = (place % position_width * stride_w)[:, None] + offset_w[None, :]
        real = inside[:, None] & (column < columns)[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        # The first form is the second where it applies, and shows the compiler that neighbours lie side by side.
        offset = place[:, None] + (offset_h * width + offset_w)[None, :] if ALIKE else h * width + w
        if LAST:
            offset = offset * channels
            coming = tl.load(
                signal_rows[None, :] + everywhere[:, None] * outputs,
                mask=inside[:, None] & (row < rows)[None, :],
                other=0.0,
            )
            coming = tl.trans(coming)
        else:
            spot = place
            if VIEWED:
                spot = place + view * outputs * positions
            coming = tl.load(
                signal_rows[:, None] + spot[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
            )
        if VIEWED:
            offset = offset + (view * channels * height * width)[:, None]
        patch = tl.load(image_columns[None, :] + offset, mask=real, other=0.0)
        total = tl.dot(coming, patch, total, input_precision=PRECISION)
    tl.store(squares + example * GROUPS * tiles + group * tiles + tile, tl.sum(total * total))
    if KEEP:
        place = (example * outputs + group * rows + row) * columns
        tl.store(
            gradients + place[:, None] + column[None, :],
            total,
            mask=(row < rows)[:, None] & (column < columns)[None, :],
        )


def segment_sums(value: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """See `kernels.segment_sums`: every number is read once; of [rows, width] that lie one after the other."""
    width, users = value.shape[1], len(starts)
    found = torch.empty(users, width, device=value.device)
    block = triton.next_power_of_2(max(1, width)) if width <= WIDEST else 1024
    norms = torch.empty(users, device=value.device) if width <= block else None
    if users:
        with torch.cuda.device_of(value):
            _segment_sums[(users, triton.cdiv(max(1, width), block))](
                value, found, norms, starts, counts, width, value.stride(0),
                BLOCK=block, num_warps=min(8, max(1, block // 256)),
            )  # fmt: skip
    return found, norms


@triton.jit
def _segment_sums(value, found, norms, starts, counts, width, step, BLOCK: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = value + tl.load(starts + example).to(tl.int64) * step + place
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(0, tl.load(counts + example).to(tl.int32)):
        total += tl.load(numbers, mask=place < width, other=0.0).to(tl.float32)
        numbers += step
    tl.store(found + example * width + place, total, mask=place < width)
    if norms is not None:
        tl.store(norms + example, tl.sqrt(tl.sum(total * total)))


def filter_products(dense: Tensor, against: Tensor) -> Tensor:
    """See `kernels.filter_products`: every number of a gradient is read once."""
    examples, filters, size = dense.shape
    against = torch.cat([against[:1], torch.ones_like(against[:1]), against[1:]])
    count = len(against)
    found = torch.empty(examples, filters, count, device=dense.device)
    with torch.cuda.device_of(dense):
        _filter_products[(filters * triton.cdiv(examples, 16),)](
            dense, against, found, examples, filters, size, count,
            COUNT=triton.next_power_of_2(count), EXAMPLES=16, BLOCK=64, num_warps=4,
        )  # fmt: skip
    return found


@triton.jit
def _filter_products(
    dense, against, found, examples, filters, size, count,
    COUNT: tl.constexpr, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    filter = tl.program_id(0) % filters
    example = (tl.program_id(0) // filters).to(tl.int64) * EXAMPLES + tl.arange(0, EXAMPLES)
    factor = tl.arange(0, COUNT)
    total = tl.zeros((COUNT, EXAMPLES, BLOCK), dtype=tl.float32)  # threads add up by themselves as long as they can
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < size
        numbers = tl.load(
            dense + ((example * filters + filter) * size)[:, None] + place[None, :],
            mask=(example < examples)[:, None] & inside[None, :],
            other=0.0,
        )
        others = tl.load(
            against + ((factor * filters + filter) * size)[:, None] + place[None, :],
            mask=(factor < count)[:, None] & inside[None, :],
            other=0.0,
        )
        terms = numbers[None, :, :] * others[:, None, :]
        total += tl.where((factor < 2)[:, None, None], terms * terms, terms)
    where = ((example * filters + filter) * count)[None, :] + factor[:, None]
    tl.store(found + where, tl.sum(total, axis=2), mask=(factor < count)[:, None] & (example < examples)[None, :])


def blank_rows(tensor: Tensor, rows: Tensor, pieces: int, width: int, step: int) -> None:
    """Fill rows of a tensor with zeros, in place, where each lies in so many pieces of this width, at these distances;
    those that stay are not even read."""
    with torch.cuda.device_of(tensor):
        _blank_rows[(len(tensor) * pieces, triton.cdiv(width, 4 * BLOCK))](
            tensor, rows, pieces, width, step, BLOCK=4 * BLOCK
        )


@triton.jit
def _blank_rows(tensor, rows, pieces, width, step, BLOCK: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    if tl.load(rows + piece // pieces):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=tensor.dtype.element_ty)
        tl.store(tensor + piece * step + place, zeros, mask=place < width)
