"""How is lattice noise drawn and added in one pass on a GPU? In Triton; imported by `lattice` alone, where both are.

ChaCha20 in counter mode gives the bits; what is made of them is `rounded_gaussian`, word for word. Where 64 bits do not
decide, 64 more are drawn and compared in 128-bit integers.
"""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vestige.randomness import rounded_gaussian as law
from vestige.randomness.streams import Stream

TERMS = 18
"""Of the exponential series."""
LANES = 64
"""So many blocks of ChaCha20 stand side by side; each serves four coordinates, so many places apart. Reproducible runs
depend on it."""
WARP = 32
"""Blocks to a program. A coordinate in six hundred is drawn again, and its whole program waits for it: so a small one,
whose threads need not wait for those of others either."""


def add(total: Tensor, spacing: float | Tensor, stream: Stream, more: int, keep: bool) -> Tensor | None:
    """Round `total` to the lattice and add noise, in place; the noise itself comes back only if it is to be kept.

    `spacing` is one number, one for each coordinate, or one for each row of `total`.
    """
    noise = torch.empty_like(total) if keep else None
    rows = isinstance(spacing, Tensor) and total.dim() == 2 and spacing.shape[-1] == 1
    if not isinstance(spacing, Tensor):
        spacings = _number(float(spacing), total.device)
    else:
        spacings = spacing.to(torch.float64).contiguous() if rows else _wide(spacing, total)
    each = "row" if rows else "coordinate" if isinstance(spacing, Tensor) else "all"
    _launch(total, spacings, each, noise, stream, more)
    return noise


@lru_cache(maxsize=16)
def _number(spacing: float, device: torch.device) -> Tensor:
    """A number that is only read, kept from step to step: as an argument of a kernel it would pass as float32."""
    return torch.full((1,), spacing, dtype=torch.float64, device=device)


def draw(count: int, stream: Stream, device: torch.device, always: bool = False) -> Tensor:
    """The numbers of steps that `add` would add: float64. With `always`, every toss is decided in 128 bits."""
    steps = torch.zeros(count, dtype=torch.float64, device=device)
    _launch(steps, torch.ones_like(steps[:1]), "all", None, stream, 0, always)
    return steps


def uniform(count: int, stream: Stream, device: torch.device) -> Tensor:
    """Numbers in [0, 1), multiples of 2^-53."""
    drawn = torch.empty(count, dtype=torch.float64, device=device)
    with torch.cuda.device_of(drawn):
        _uniform[(triton.cdiv(count, 8 * LANES),)](drawn, *_key(stream), count, LANES=LANES, num_warps=2)
    return drawn


def _key(stream: Stream) -> list[int]:
    return [int(word) for word in stream.words(4).view(np.int32)]


def _launch(
    total: Tensor, spacings: Tensor, each: str, noise: Tensor | None, stream: Stream, more: int, always: bool = False
) -> None:
    with torch.cuda.device_of(total):
        _add[(triton.cdiv(total.numel(), 4 * LANES) * (LANES // WARP),)](
            total, spacings, total if noise is None else noise, *_table(total.device), *_key(stream), total.numel(),
            total.shape[-1], min(more, 62), LANES=LANES, WARP=WARP, EACH=each, KEEPS=noise is not None, WIDTH=law.WIDTH,
            COLUMN=law.COLUMN, ALWAYS=always, TERMS=TERMS, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _wide(spacing: Tensor, total: Tensor) -> Tensor:
    return spacing.to(torch.float64).expand_as(total).contiguous()


@cache
def _table(device: torch.device) -> tuple[Tensor, ...]:
    """The law's table, and the shares 1/18, 1/17, ... 1/2 in two words each."""
    made = law.table()
    shares = np.array([half for n in range(TERMS, 1, -1) for half in divmod(2**128 // n, 2**64)], dtype=np.uint64)
    words = (
        made.threshold.view(np.int64),
        made.rest.view(np.int64),
        made.alias.astype(np.int32),
        shares.view(np.int64),
    )
    return tuple(torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in words)


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, attempt, purpose):
    """One block for each lane: eight words of 64 bits. The nonce is the counter's upper half, which attempt, and what
    for: to draw, to toss on, to choose on, or for uniform numbers."""
    zero = counter * 0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = zero + k0, zero + k1, zero + k2, zero + k3
    k4, k5, k6, k7 = zero + k4, zero + k5, zero + k6, zero + k7
    n0, n1, n2 = zero + high, zero + attempt, zero + purpose
    x0, x1, x2, x3 = c0, c1, c2, c3
    x4, x5, x6, x7 = k0, k1, k2, k3
    x8, x9, x10, x11 = k4, k5, k6, k7
    x12, x13, x14, x15 = counter, n0, n1, n2
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    w0, w1, w2, w3 = _join(x0 + c0, x1 + c1), _join(x2 + c2, x3 + c3), _join(x4 + k0, x5 + k1), _join(x6 + k2, x7 + k3)
    w4, w5 = _join(x8 + k4, x9 + k5), _join(x10 + k6, x11 + k7)
    w6, w7 = _join(x12 + counter, x13 + n0), _join(x14 + n1, x15 + n2)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _join(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _product(a1, a0, b1, b0):
    """The upper 128 bits of the product of two numbers of 128 bits, but for the last of them."""
    first, second = tl.umulhi(a1, b0), a1 * b0
    third, fourth = tl.umulhi(a0, b1), a0 * b1
    low = second + tl.umulhi(a0, b0)
    carry = (low < second).to(tl.uint64)
    total = low + fourth
    carry += (total < low).to(tl.uint64)
    base = a1 * b1
    result = base + first
    top = tl.umulhi(a1, b1) + (result < base).to(tl.uint64)
    more = result + third
    top += (more < result).to(tl.uint64)
    last = more + carry
    top += (last < more).to(tl.uint64)
    return top, last


@triton.jit
def _likely(gain, shares, TERMS: tl.constexpr):
    """exp(-t) in 128 bits, for t = gain 2^-61 (1 - 2^-60 / 12): the law of `rounded_gaussian`.

    A loop that stays one: written out, it took the compiler half a minute.
    """
    correction = (gain * 128) // 12
    t1, t0 = (gain << 3) - (correction > 0).to(tl.uint64), 0 - correction
    one = ~(gain * 0)
    e1, e0 = one, one
    for k in tl.range(0, TERMS - 1, loop_unroll_factor=1):  # 1 - t (1 - t / 2 (1 - t / 3 ...)), from the inside
        e1, e0 = _product(t1, t0, e1, e0)
        high, low = tl.load(shares + 2 * k), tl.load(shares + 2 * k + 1)
        e1, e0 = _product(
            e1, e0, gain * 0 + high.to(tl.uint64, bitcast=True), gain * 0 + low.to(tl.uint64, bitcast=True)
        )
        e1, e0 = one - e1, one - e0
    e1, e0 = _product(t1, t0, e1, e0)
    return one - e1, one - e0


@triton.jit
def _bin(word, threshold, rest, alias, COLUMN: tl.constexpr):
    """The bin that a word chooses, and where it does not decide: there the column itself, and the threshold's rest."""
    column = (word >> COLUMN).to(tl.int64)
    own = word & ((1 << COLUMN) - 1)
    limit = tl.load(threshold + column).to(tl.uint64)
    chosen = tl.where(own < limit, column, tl.load(alias + column).to(tl.int64))
    return chosen, own == limit, column, tl.load(rest + column).to(tl.uint64, bitcast=True)


@triton.jit
def _place(word, chosen, WIDTH: tl.constexpr, ALWAYS: tl.constexpr):
    """A signed magnitude in a bin; whether it is kept, and whether 64 bits decide that."""
    place = (word & ((1 << WIDTH) - 1)).to(tl.int64)
    negative = ((word >> WIDTH) & 1) != 0
    toss = word >> (WIDTH + 1)
    start = chosen << WIDTH
    gain = place * (2 * start + place)
    limit = tl.exp(-(gain.to(tl.float64) * 2.0**-61)) * 2.0**41
    tossed = toss.to(tl.float64)
    kept = tossed + 1.0625 <= limit
    unclear = tl.abs(tossed + 0.5 - limit) < 0.5625
    magnitude = start + place
    allowed = (magnitude != 0) | (negative == 0)
    if ALWAYS:
        unclear = toss == toss
    return tl.where(negative, -magnitude, magnitude), kept, unclear, allowed, toss, gain.to(tl.uint64)


@triton.jit
def _decided(kept, unclear, toss, gain, word, shares, TERMS: tl.constexpr):
    """The same toss with 64 more bits."""
    e1, e0 = _likely(gain, shares, TERMS)
    high, low = e1 >> 23, (e1 << 41) | (e0 >> 23)
    return tl.where(unclear, (toss < high) | ((toss == high) & (word < low)), kept)


@triton.jit
def _tossed(
    w0, w1, w2, w3, b0, b1, b2, b3, k0, k1, k2, k3, k4, k5, k6, k7, counter, high, attempt, shares,
    WIDTH: tl.constexpr, ALWAYS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One attempt at all four coordinates of every lane."""
    x0, y0, u0, a0, t0, g0 = _place(w0, b0, WIDTH, ALWAYS)
    x1, y1, u1, a1, t1, g1 = _place(w1, b1, WIDTH, ALWAYS)
    x2, y2, u2, a2, t2, g2 = _place(w2, b2, WIDTH, ALWAYS)
    x3, y3, u3, a3, t3, g3 = _place(w3, b3, WIDTH, ALWAYS)
    if tl.max((u0 | u1 | u2 | u3).to(tl.int32), axis=0) > 0:  # once in 2^39 numbers
        m0, m1, m2, m3, _, _, _, _ = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, attempt, 1)
        y0, y1 = _decided(y0, u0, t0, g0, m0, shares, TERMS), _decided(y1, u1, t1, g1, m1, shares, TERMS)
        y2, y3 = _decided(y2, u2, t2, g2, m2, shares, TERMS), _decided(y3, u3, t3, g3, m3, shares, TERMS)
    return x0, x1, x2, x3, y0 & a0, y1 & a1, y2 & a2, y3 & a3


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "size", "width", "more"])
def _add(
    total, spacings, noise, threshold, rest, alias, shares, k0, k1, k2, k3, k4, k5, k6, k7, size, width, more,
    LANES: tl.constexpr, WARP: tl.constexpr, EACH: tl.constexpr, KEEPS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMN: tl.constexpr, ALWAYS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * WARP + tl.arange(0, WARP)
    counter, high = lane.to(tl.uint32), (lane >> 32).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, 0, 0)
    b0, e0, c0, r0 = _bin(w0, threshold, rest, alias, COLUMN)
    b1, e1, c1, r1 = _bin(w2, threshold, rest, alias, COLUMN)
    b2, e2, c2, r2 = _bin(w4, threshold, rest, alias, COLUMN)
    b3, e3, c3, r3 = _bin(w6, threshold, rest, alias, COLUMN)
    if tl.max((e0 | e1 | e2 | e3).to(tl.int32), axis=0) > 0:  # once in 2^50 numbers
        m0, m1, m2, m3, _, _, _, _ = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, 0, 2)
        b0, b1 = tl.where(e0 & (m0 < r0), c0, b0), tl.where(e1 & (m1 < r1), c1, b1)
        b2, b3 = tl.where(e2 & (m2 < r2), c2, b2), tl.where(e3 & (m3 < r3), c3, b3)
    x0, x1, x2, x3, y0, y1, y2, y3 = _tossed(
        w1, w3, w5, w7, b0, b1, b2, b3, k0, k1, k2, k3, k4, k5, k6, k7, counter, high, 0, shares, WIDTH, ALWAYS, TERMS
    )
    attempt = 1
    left = tl.max((~(y0 & y1 & y2 & y3)).to(tl.int32), axis=0)
    while left > 0:  # one lane in a hundred and fifty
        v0, v1, v2, v3, _, _, _, _ = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, attempt, 0)
        n0, n1, n2, n3, z0, z1, z2, z3 = _tossed(
            v0,
            v1,
            v2,
            v3,
            b0,
            b1,
            b2,
            b3,
            k0,
            k1,
            k2,
            k3,
            k4,
            k5,
            k6,
            k7,
            counter,
            high,
            attempt,
            shares,
            WIDTH,
            ALWAYS,
            TERMS,
        )
        x0, x1 = tl.where(y0, x0, n0), tl.where(y1, x1, n1)
        x2, x3 = tl.where(y2, x2, n2), tl.where(y3, x3, n3)
        y0, y1, y2, y3 = y0 | z0, y1 | z1, y2 | z2, y3 | z3
        left = tl.max((~(y0 & y1 & y2 & y3)).to(tl.int32), axis=0)
        attempt += 1
    place = lane // LANES * (4 * LANES) + lane % LANES
    _store(total, spacings, noise, x0, place, size, width, more, EACH, KEEPS)
    _store(total, spacings, noise, x1, place + LANES, size, width, more, EACH, KEEPS)
    _store(total, spacings, noise, x2, place + 2 * LANES, size, width, more, EACH, KEEPS)
    _store(total, spacings, noise, x3, place + 3 * LANES, size, width, more, EACH, KEEPS)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "size"])
def _uniform(drawn, k0, k1, k2, k3, k4, k5, k6, k7, size, LANES: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    lane = block * LANES + tl.arange(0, LANES)
    counter, high = lane.to(tl.uint32), (lane >> 32).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = _chacha(k0, k1, k2, k3, k4, k5, k6, k7, counter, high, 0, 3)
    place = block * (8 * LANES) + tl.arange(0, LANES)
    _scale(drawn, w0, place, size)
    _scale(drawn, w1, place + LANES, size)
    _scale(drawn, w2, place + 2 * LANES, size)
    _scale(drawn, w3, place + 3 * LANES, size)
    _scale(drawn, w4, place + 4 * LANES, size)
    _scale(drawn, w5, place + 5 * LANES, size)
    _scale(drawn, w6, place + 6 * LANES, size)
    _scale(drawn, w7, place + 7 * LANES, size)


@triton.jit
def _scale(drawn, word, place, size):
    tl.store(drawn + place, (word >> 11).to(tl.float64) * 2.0**-53, mask=place < size)


@triton.jit
def _store(total, spacings, noise, steps, place, size, width, more, EACH: tl.constexpr, KEEPS: tl.constexpr):
    inside = place < size
    if EACH == "all":
        spacing = tl.load(spacings)
    elif EACH == "row":
        spacing = tl.load(spacings + place // width, mask=inside, other=1.0)
    else:
        spacing = tl.load(spacings + place, mask=inside, other=1.0)
    if more > 0:
        steps = ((steps >> (more - 1)) + 1) >> 1
    whole = tl.floor(tl.load(total + place, mask=inside, other=0.0).to(tl.float64) / spacing + 0.5).to(tl.int64)
    tl.store(total + place, (whole + steps).to(tl.float64) * spacing, mask=inside)
    if KEEPS:
        tl.store(noise + place, steps.to(tl.float64) * spacing, mask=inside)
