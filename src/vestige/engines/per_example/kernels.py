"""Where does PyTorch lack a kernel? Norms of gradients, and gradients of norms: fused on a GPU, else plain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from vestige.tf32 import tf32_products, triton_available

Pair = tuple[int, int]
ALIGNED, LONG, LARGE = {"cuda"}, 2048, 2**22
"""Where rows should begin at certain addresses, if they are so long, and are copied for that, in a tensor so large."""
UNSEEN, SEEN = 1e-32, 1e-20
"""What a sum of squares in float32 may miss, of a million numbers, and the square of a norm that need not be exact
(`clipping.SMALLEST_NORM`)."""


@dataclass(frozen=True)
class Segments:
    """Which rows of a batch belong together: `counts` [segments] of them side by side from `starts` [segments] on, and
    at most `most`. A row that is in no segment is not read: it may hold anything."""

    starts: Tensor
    counts: Tensor
    most: int
    rows: int

    def padded(self, tensor: Tensor) -> Tensor:
        """A copy [segments, most, ...] of [rows, ...], zero where a segment has fewer."""
        index, absent = self._index
        found = tensor.index_select(0, index).unflatten(0, absent.shape)
        return found.masked_fill_(absent.view(*absent.shape, *[1] * (tensor.dim() - 1)), 0)

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor]:
        turn = torch.arange(self.most, device=self.starts.device)
        index = (self.starts[:, None] + turn).clamp_(max=self.rows - 1)
        return index.flatten(), turn >= self.counts[:, None]


def outer_norms(
    left: Tensor, right: Tensor, unit: float, margin: float = 0.0, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Norms of sum_t outer(left[i, t], right[i, t]), `bounded`, and the sums of the norms of its terms: [examples]
    each, from [examples, positions, width] each. With segments, an example is the rows of one."""
    if can_fuse(left):
        from vestige.engines.per_example import triton_gradient_norms

        left, right = in_rows(left), in_rows(right)
        steps = row_step(left) or 0, row_step(right) or 0
        places = None if segments is None else (segments.starts, segments.counts, segments.most)
        return triton_gradient_norms.outer_norms(left, right, steps, rounding(left), unit, margin, places)
    if segments is not None:
        left, right = (segments.padded(each).flatten(1, 2) for each in (left, right))
    squares, lengths = outer_squares(left, right)
    return bounded(squares, lengths, unit, margin), lengths


def can_fuse(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and triton_available()


def segment_sums(value: Tensor, segments: Segments) -> tuple[Tensor, Tensor | None]:
    """The sums of each segment's rows, [segments, ...] of [rows, ...]; and their norms, where these cost nothing."""
    if can_fuse(value):
        from vestige.engines.per_example import triton_gradient_norms

        rows = value.reshape(len(value), prod(value.shape[1:]))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        found, norms = triton_gradient_norms.segment_sums(rows, segments.starts, segments.counts)
        return found.view(-1, *value.shape[1:]), norms
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return segments.padded(wide).sum(dim=1), None


def outer_squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of sum_t outer(left[i, t], right[i, t]), as they were rounded, and the sums of the norms of its
    terms."""
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    left, right = left.to(wide), right.to(wide)
    return gram_squares(torch.bmm(left, left.transpose(1, 2)), torch.bmm(right, right.transpose(1, 2)))


def gram_squares(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the two matrices of inner products between positions, [examples, positions, positions] each."""
    squares = torch.linalg.vecdot(first.flatten(1), second.flatten(1))
    left, right = first.diagonal(dim1=1, dim2=2), second.diagonal(dim1=1, dim2=2)
    return squares, where_held((left * right).clamp(min=0.0).sqrt(), left, right).sum(dim=1)


def where_held(products: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Products of two norms, infinite where float32 does not hold their squares, `left` and `right`: one overflows, or
    one is nearly zero and the other so large that what was lost is not. Such an example is taken in float64."""
    if products.dtype == torch.float64:
        return products
    smaller, larger = torch.minimum(left, right), torch.maximum(left, right)
    held = (larger < torch.inf) & ((larger < SEEN / UNSEEN) | (smaller > UNSEEN))
    return torch.where(held, products, torch.inf)


# Terms of either sign may cancel down to their own rounding errors, and a norm that rounding made too small would let
# an example through unclipped. So to a norm is added what rounding can hide, in proportion to `lengths`: the sum of the
# norms of the terms. Where that is next to nothing the norm stays as it is.


def bounded(squares: Tensor, lengths: Tensor, unit: float, margin: float = 0.0) -> Tensor:
    """Norms that nothing passes by rounding: of squares that were summed from terms of either sign, and of the same
    terms summed again in numbers of this `unit`, with so much of their lengths added."""
    norms = at_most_hidden(norms_of(squares, lengths), lengths, unit)
    return norms + margin * lengths if margin else norms


def norms_of(squares: Tensor, lengths: Tensor, unit: float | None = None) -> Tensor:
    """Norms from squares that were themselves summed from terms of either sign, in numbers of this rounding."""
    hidden = (rounding(squares) if unit is None else unit) * lengths.square()
    return torch.where(squares < 1e3 * hidden, squares.clamp(min=0.0) + hidden, squares).sqrt()


def at_most_hidden(norms: Tensor, lengths: Tensor, unit: float) -> Tensor:
    """Norms with what rounding can hide when the same terms are summed again, in numbers of this `unit`."""
    hidden = 32 * unit * lengths
    return norms + torch.where(hidden > 1e-4 * norms, hidden, 0.0)


def rounding(tensor: Tensor) -> float:
    """What rounding can hide of a sum of products of such numbers, relative to the sum of their sizes, generously.

    TF32 rounds each number to 11 bits, but in no common direction: over a layer's width most of it averages out.
    """
    if tensor.is_cuda and tensor.dtype != torch.float64 and tf32_products():
        return 2.0**-14
    return 8 * torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps


def can_fuse_convolution(image: Tensor, signal: Tensor, groups: int) -> bool:
    """Whether `convolution_gradients` is there and worth it: two axes, not float64, several channels to a group."""
    plain = image.dim() != 4 or torch.float64 in (image.dtype, signal.dtype) or signal.shape[1] // groups < 8
    return image.is_cuda and not plain and triton_available()


def convolution_gradients(
    image: Tensor,
    signal: Tensor,
    shape: tuple[Pair, Pair, Pair, Pair, int],
    keep: bool,
    rows: int = 1,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-example weight gradients [examples, out, in / groups, *kernel] (if kept), and their squared norms.

    From image [examples * rows, in, height, width] and the gradient of the output; the rows of an example, side by
    side, add up; with segments, those of one. `shape` is kernel, stride, padding and dilation, each (height, width),
    and groups. Products of numbers in half precision are exact, and added up in float32.
    """
    from vestige.engines.per_example import triton_gradient_norms

    if image.dtype != signal.dtype:
        image, signal = image.float(), signal.float()
    places = None if segments is None else (segments.starts * rows, segments.counts * rows)
    return triton_gradient_norms.convolution_gradients(image, signal, shape, keep, rows, places)


def filter_products(dense: Tensor, against: Tensor) -> Tensor:
    """Of every filter of every gradient [examples, filters, numbers] the square of its norm once it was multiplied by
    the first of `against` [factors, filters, numbers], that of its norm as it is, and its inner product with each other
    one: [examples, filters, factors + 1]."""
    if dense.is_cuda and dense.dtype == torch.float32 and dense.numel() and triton_available():
        from vestige.engines.per_example import triton_gradient_norms

        return triton_gradient_norms.filter_products(dense.contiguous(), against.contiguous())
    norms = torch.stack([torch.linalg.vector_norm(each, dim=2) for each in (dense * against[0], dense)], dim=2)
    inner = torch.bmm(dense.transpose(0, 1), against[1:].permute(1, 2, 0)).transpose(0, 1)
    return torch.cat([norms.square(), inner], dim=2)


def blanked(tensor: Tensor, rows: Tensor, in_place: bool = False) -> Tensor:
    """The tensor with some rows zero. A tensor that is not needed elsewhere may be changed in place, which costs
    nothing where no row is blanked."""
    pieces = _pieces(tensor) if in_place and tensor.is_cuda and tensor.numel() and triton_available() else None
    if pieces is not None:
        from vestige.engines.per_example import triton_gradient_norms

        triton_gradient_norms.blank_rows(tensor, rows, *pieces)
        return tensor
    return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


def _pieces(tensor: Tensor) -> tuple[int, int, int] | None:
    """In how many pieces of memory a row lies, how long and how far apart they are; None where they are not alike."""
    if _rows_in_one_piece(tensor):
        width = tensor[0].numel()
        return 1, width, width
    step = row_step(tensor)
    return None if step is None else (tensor[0].numel() // tensor.shape[-1], tensor.shape[-1], step)


def row_step(tensor: Tensor) -> int | None:
    """How far apart rows along the last axis lie, one after the other, if all do; None if not."""
    if tensor.dim() < 2 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
        return None
    axes = [(n, s) for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n != 1]
    step = reach = axes[-1][1] if axes else tensor.shape[-1]
    for size, stride in reversed(axes):
        if stride != reach:
            return None
        reach *= size
    return step if step >= tensor.shape[-1] else None


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, as matrix products read it without another copy."""
    return tensor.contiguous() if row_step(tensor) is None else tensor


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it in rows that begin where a GPU's matrix products read fastest: a vocabulary need not
    be a multiple of four."""
    width = padded_width(tensor)
    if width == tensor.shape[-1] or tensor.stride(-2) * tensor.element_size() % 16 == 0 or tensor.numel() < LARGE:
        return tensor
    return tensor.new_empty(*tensor.shape[:-1], width)[..., : tensor.shape[-1]].copy_(tensor)


def padded_width(tensor: Tensor) -> int:
    """How far apart the rows of such a tensor should lie: more than their width only if they are long."""
    width = tensor.shape[-1]
    fits = width < LONG or tensor.dim() < 2 or width * tensor.element_size() % 16 == 0
    return width if fits or tensor.device.type not in ALIGNED else -(-width // 32) * 32


def whole_pieces(tensor: Tensor) -> int:
    """How many numbers of a row lie in pieces that a GPU's matrix products read at once; all of them where the few that
    are left over do not matter. With those set apart, a product is nearly three times as fast."""
    width = tensor.shape[-1]
    return width if padded_width(tensor) == width else width - width % (16 // tensor.element_size())


def multiply(left: Tensor, right: Tensor) -> Tensor | None:
    """left @ right in two parts, where rows of the product or of `left` are long and of odd width; None where that is
    not so."""
    width, inner = right.shape[1], left.shape[1]
    if padded_width(right) != width and len(left) * width >= LARGE:
        whole, laid = whole_pieces(right), left.new_empty(len(left), padded_width(right))
        for part in (slice(whole), slice(whole, width)):
            torch.mm(left, right[:, part], out=laid[:, part])
        return laid[:, :width]
    if padded_width(left) != inner and left.numel() >= LARGE:
        whole = whole_pieces(left)
        return torch.mm(left[:, :whole], right[:whole]).addmm_(left[:, whole:], right[whole:])
    return None


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right."""
    whole = left.shape[1] if left.numel() < LARGE else whole_pieces(left)
    for part in (slice(whole), slice(whole, left.shape[1])):
        if part.start is None or part.start < part.stop:
            into[part].addmm_(left[:, part].t(), right)


def _rows_in_one_piece(tensor: Tensor) -> bool:
    """Whether each row fills a piece of memory, one after the other, whatever the order within a row."""
    reach = 1
    axes = [*zip(tensor.stride()[1:], tensor.shape[1:], strict=True)]
    for step, size in (*sorted(each for each in axes if each[1] > 1), (tensor.stride(0), len(tensor))):
        if size > 1 and step != reach:
            return False
        reach *= size
    return True


def layer_norm_sums(input: Tensor, signal: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Per-example gradients of a layer norm's weight and bias, [examples, width] each.

    From input and the gradient of the output, [examples, positions, width] each, and the statistics of every position.
    """
    if input.is_cuda and torch.float64 not in (input.dtype, signal.dtype) and triton_available():
        from vestige.engines.per_example import triton_norm_layers

        return triton_norm_layers.layer_norm_sums(input, signal, mean, scale)
    wide = torch.promote_types(signal.dtype, torch.float32)
    shape = (*input.shape[:2], 1)
    standard = (input.to(wide) - mean.view(shape)) * scale.view(shape)
    return (standard * signal).sum(dim=1), signal.to(wide).sum(dim=1)


def can_fuse_group_norm(input: Tensor, groups: int) -> bool:
    """Whether the fused kernels are there. A group of one example must fit into registers, or channels lie side by
    side and be as many as a power of two."""
    if not input.is_cuda or input.dim() < 3 or input.dtype == torch.float64 or not input.numel():
        return False
    if input.is_contiguous():
        numbers = _power(input.shape[1] // groups) * _power(input.shape[2:].numel())
        return numbers <= 8192 and triton_available()
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    powers = all(_power(each) == each for each in (input.shape[1], groups))
    return last and powers and input.shape[1] <= 4096 and triton_available()


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """A group norm in this precision, and the mean and inverse deviation of each row's groups; on a GPU in one pass."""
    if input.is_cuda:
        from vestige.engines.per_example import triton_norm_layers

        return triton_norm_layers.group_norm(input, weight, bias, groups, eps, dtype)
    sizes = (len(input), input.shape[1], input.shape[2:].numel(), groups)
    output, mean, scale = torch.native_group_norm(input.to(dtype).contiguous(), weight, bias, *sizes, eps)
    return output, mean, scale


def group_norm_backward(
    input: Tensor, signal: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a group norm's input, and per row those of its weight and bias: one pass for all three."""
    from vestige.engines.per_example import triton_norm_layers

    return triton_norm_layers.group_norm_backward(input, signal, mean, scale, weight, groups)
