"""How is the loss of a token written in Triton? Imported by `token_losses` alone, where a GPU and Triton are there."""

# mypy: ignore-errors
# (a Triton kernel is Python in form only: its names are pointers and tiles)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096

# Triton launches on the current device, which need not be the tensors' device.


def log_totals(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, [rows, classes] -> [rows], and the logarithm of the sum of the exponentials of what each
    is more than that: apart, because their sum, rounded, would be too coarse for large scores."""
    most, rest = (torch.empty(len(scores), device=scores.device) for _ in range(2))
    if len(scores):
        with torch.cuda.device_of(scores):
            _log_totals[(len(scores),)](scores, most, rest, scores.shape[1], BLOCK=BLOCK, num_warps=8)
    return most, rest


def gradients(scores: Tensor, targets: Tensor, most: Tensor, rest: Tensor, signal: Tensor) -> Tensor:
    """(probabilities - the target's own) times what came back to the row's loss; a target of -1 has none."""
    found = torch.empty_like(scores)
    if found.numel():
        grid = len(scores), triton.cdiv(scores.shape[1], BLOCK)
        with torch.cuda.device_of(scores):
            _gradients[grid](
                scores, targets, most, rest, signal.contiguous(), found, scores.shape[1], BLOCK=BLOCK, num_warps=8
            )
    return found


@triton.jit
def _log_totals(scores, largest, rest, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = -float("inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        part = tl.load(scores + row * width + place, mask=place < width, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(part, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(part - base), axis=0)
        most = higher
    tl.store(largest + row, most)
    tl.store(rest + row, tl.log(total))


@triton.jit
def _gradients(scores, targets, largest, rest, signal, found, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    target = tl.load(targets + row)
    part = tl.load(scores + row * width + place, mask=inside, other=0.0).to(tl.float32)
    own = tl.where(place == target, 1.0, 0.0)
    share = tl.exp((part - tl.load(largest + row)) - tl.load(rest + row))
    back = (share - own) * tl.load(signal + row)
    back = tl.where(target < 0, 0.0, back)
    tl.store(found + row * width + place, back.to(found.dtype.element_ty), mask=inside)
