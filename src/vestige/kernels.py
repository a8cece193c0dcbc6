"""Where does PyTorch lack a kernel? Per-example norms: fused on a GPU, else plain."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

Pair = tuple[int, int]


@cache
def fused_available() -> bool:
    """Whether the Triton kernels in `fused` can run here."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def outer_squares(left: Tensor, right: Tensor) -> Tensor:
    """Squared norms of sum_t outer(left[i, t], right[i, t]), from [examples, positions, width] each: [examples]."""
    if left.is_cuda and left.dtype != torch.float64 and fused_available():
        from vestige import fused

        return fused.outer_squares(left, right, rounding(left))
    return plain_outer_squares(left, right)


def plain_outer_squares(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    left, right = left.to(wide), right.to(wide)
    return gram_squares(torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2)))


def gram_squares(first: Tensor, second: Tensor) -> Tensor:
    """The same from the two matrices of inner products between positions, [examples, positions, positions] each.

    Terms of either sign may cancel down to their own rounding errors, and a norm that rounding made too small would
    let an example through unclipped. So the result is never below what rounding can hide.
    """
    squares = torch.linalg.vecdot(first.flatten(1), second.flatten(1))
    diagonals = first.diagonal(dim1=1, dim2=2) * second.diagonal(dim1=1, dim2=2)
    ceiling = diagonals.clamp(min=0.0).sqrt().sum(dim=1).square()
    return torch.maximum(squares, rounding(first) * ceiling)


def rounding(tensor: Tensor) -> float:
    """What rounding can hide of a sum of products of such numbers, relative to the sum of their sizes, generously.

    TF32 rounds each number to 11 bits, but in no common direction: over a layer's width most of it averages out.
    """
    if tensor.is_cuda and tensor.dtype != torch.float64 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-14
    return 8 * torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps


def can_fuse_convolution(image: Tensor, signal: Tensor, groups: int) -> bool:
    """Whether `convolution_gradients` is there and worth it: two axes, not float64, several channels to a group."""
    plain = image.dim() != 4 or torch.float64 in (image.dtype, signal.dtype) or signal.shape[1] // groups < 8
    return image.is_cuda and not plain and fused_available()


def convolution_gradients(
    image: Tensor, signal: Tensor, shape: tuple[Pair, Pair, Pair, Pair, int], keep: bool
) -> tuple[Tensor, Tensor]:
    """Per-example weight gradients [examples, out, in / groups * kernel] (if kept), and their squared norms.

    From image [examples, in, height, width] and the gradient of the output. `shape` is kernel, stride, padding and
    dilation, each (height, width), and groups.
    """
    from vestige import fused

    return fused.convolution_gradients(image.float(), signal.float(), shape, keep)
