"""Do the kernels compute what they say, and the fused ones what the plain ones do?"""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vestige import tf32
from vestige.engines.example_axis import rules  # noqa: F401  (installed where they are imported)
from vestige.engines.example_axis.labels import Tracker
from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import Geometry, Outer, Patches
from vestige.tf32 import products_in_tf32, tf32_products

gpu = pytest.mark.skipif(not tf32.triton_available(), reason="needs a GPU and Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
fused = pytest.mark.skipif(
    not (tf32.triton_available() or INTERPRETED),
    reason="needs a GPU and Triton, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cuda" if tf32.triton_available() else "cpu"
lengths = st.integers(1, 70)


@given(st.integers(0, 4), lengths, lengths, lengths)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_norms_from_inner_products(examples, positions, out, width):
    torch.manual_seed(positions)
    left, right = torch.randn(examples, positions, out), torch.randn(examples, positions, width)
    want = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).square().sum(dim=1)
    squares, lengths = kernels.outer_squares(left, right)
    torch.testing.assert_close(squares.double(), want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lengths, (left.norm(dim=2) * right.norm(dim=2)).sum(dim=1))


def test_half_precision_numbers_are_not_added_in_half_precision():
    torch.manual_seed(0)
    left, right = torch.randn(3, 50, 8).bfloat16(), torch.randn(3, 50, 8).bfloat16()
    want = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).square().sum(dim=1)
    got, _ = kernels.outer_squares(left, right)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0.0)


def test_a_norm_is_never_below_what_rounding_hides():
    """Opposite terms of size 1e8 leave rounding errors of either sign: the result may be too large, never too small."""
    torch.manual_seed(1)
    base, direction = torch.randn(200, 1, 40), torch.randn(200, 1, 40)
    signs = torch.tensor([1.0, -1.0] * 4)[None, :, None]
    left, right = 300 * direction * signs, 30 * base.repeat(1, 8, 1)
    right[:, 0] += 1e-4 * torch.randn(200, 40)
    exact = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).square().sum(dim=1)
    assert (kernels.norms_of(*kernels.outer_squares(left, right)).double().square() >= exact).all()
    grams = [torch.bmm(m, m.transpose(1, 2)) for m in (left, right)]
    assert ((grams[0] * grams[1]).sum(dim=(1, 2)).double() < 0.9 * exact).any(), "rounding never mattered here"


UNHELD = [(4e18, 2.5e-23), (1e15, 1e-18), (3e19, 1.0), (1.0, 1e-25), (1e3, 1e-25), (1e15, 1e-10)]
"""Sizes of two factors; of the first three float32 does not hold the squares of both as exactly as their product."""


def unheld(positions, out, width, device="cpu"):
    """Examples of which one position has such sizes, beside usual ones."""
    left, right = (torch.ones(len(UNHELD), positions, size, device=device) for size in (out, width))
    for place, (one, other) in enumerate(UNHELD):
        left[place, -1], right[place, -1] = other, one
    return left, right


@pytest.mark.parametrize("positions", [1, 3])
def test_a_norm_that_float32_does_not_hold_is_infinite_until_it_is_taken_in_float64(positions):
    left, right = unheld(positions, 5, 7)
    assert Outer(left, right).norms(2.0**-24).isinf().tolist() == [True] * 3 + [False] * 3
    exact = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(Outer(left.double(), right.double()).norms(2.0**-24), exact, rtol=1e-4, atol=0.0)


def norm_gradients(layer, inputs, signals):
    """One example at a time, in float64, by autograd: the gradients of input, weight and bias."""
    exact, found = layer.double(), []
    for x, signal in zip(inputs.double(), signals.double(), strict=True):
        x = x[None].requires_grad_()
        found.append(torch.autograd.grad(exact(x), [x, exact.weight, exact.bias], signal[None]))
    layer.float()
    return torch.cat([x for x, _, _ in found]), *(torch.stack(parts) for parts in list(zip(*found, strict=True))[1:])


def layer_norm_case(examples, positions, width, device="cpu"):
    torch.manual_seed(positions)
    layer = torch.nn.LayerNorm(width)
    torch.nn.init.normal_(layer.weight)
    inputs, signals = 3 + 2 * torch.randn(examples, positions, width), torch.randn(examples, positions, width)
    _, *statistics = torch.native_layer_norm(inputs, (width,), layer.weight, layer.bias, layer.eps)
    _, *want = norm_gradients(layer, inputs, signals)
    return [tensor.to(device) for tensor in (inputs, signals, *statistics)], [part.to(device) for part in want]


@given(st.integers(1, 4), lengths, lengths)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_layer_norm_sums_one_example_at_a_time(examples, positions, width):
    case, want = layer_norm_case(examples, positions, width + 1)
    for got, exact in zip(kernels.layer_norm_sums(*case), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * positions)


@gpu
@pytest.mark.parametrize("shape", [(3, 1, 5), (5, 70, 768), (2, 256, 100), (700, 3, 384), (32, 256, 64)])
def test_fused_layer_norm_sums(shape):
    case, want = layer_norm_case(*shape, device="cuda")
    for got, exact in zip(kernels.layer_norm_sums(*case), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * shape[1])


LAID = pytest.mark.parametrize(
    ("last", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float16)]
)
"""Channels side by side or not, and whether numbers are halved: Triton's interpreter has no bfloat16."""


def laid(tensor, last, dtype=None):
    """Where the kernels are, with channels side by side or not."""
    form = torch.channels_last if last else torch.contiguous_format
    return tensor.to(DEVICE, dtype).contiguous(memory_format=form)


@fused
@LAID
@pytest.mark.parametrize("shape", [(3, 4, 2, 7, 7), (5, 64, 32, 32, 32), (2, 8, 1, 16, 16), (2, 16, 16, 3, 1)])
@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", "nothing"])
def test_fused_group_norm(shape, given, last, dtype):
    from vestige.engines.per_example import triton_norm_layers

    examples, channels, groups, *space = shape
    torch.manual_seed(0)
    inputs = (100 + torch.randn(examples, channels, *space)).to(dtype)
    # of every other number of a longer vector: whoever takes neighbours takes wrong ones
    weight, bias = (torch.randn(2 * channels)[::2] if name in given else None for name in ("weight", "bias"))
    exact = (None if each is None else each.double() for each in (weight, bias))
    want = torch.native_group_norm(inputs.double(), *exact, examples, channels, space[0] * space[1], groups, 1e-5)
    there = [None if each is None else each.to(DEVICE) for each in (weight, bias)]
    got = triton_norm_layers.group_norm(laid(inputs, last), *there, groups, 1e-5, torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-4, atol=1e-4)


@fused
@LAID
@pytest.mark.parametrize("shape", [(3, 4, 2, 7, 7), (5, 64, 32, 32, 32), (2, 8, 1, 16, 16), (2, 16, 16, 3, 1)])
@pytest.mark.parametrize("affine", [True, False])
def test_fused_group_norm_backward(shape, affine, last, dtype):
    from vestige.engines.per_example import triton_norm_layers

    examples, channels, groups, *space = shape
    torch.manual_seed(0)
    layer = torch.nn.GroupNorm(groups, channels)
    if affine:
        torch.nn.init.normal_(layer.weight)
    inputs, signals = (1 + torch.randn(examples, channels, *space)).to(dtype), torch.randn(examples, channels, *space)
    sizes = (examples, channels, space[0] * space[1], groups, layer.eps)
    _, *statistics = torch.native_group_norm(inputs.float(), layer.weight, layer.bias, *sizes)
    want = norm_gradients(layer, inputs, signals)
    weight = layer.weight.detach().repeat_interleave(2)[::2].to(DEVICE)
    assert DEVICE == "cpu" or kernels.can_fuse_group_norm(laid(inputs, last), groups)
    arguments = [laid(inputs, last), signals.to(DEVICE), *(each.to(DEVICE) for each in statistics)]
    got = triton_norm_layers.group_norm_backward(*arguments, weight, groups)
    assert got[0].dtype == dtype
    for ours, exact, tolerance in zip(got, want, (1e-3 if dtype == torch.float16 else 1e-4, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=tolerance, atol=2e-3)


@fused
@pytest.mark.parametrize("shape", [(4, 6, 6, 5, 3), (3, 12, 3, 8, 8)])
def test_fused_group_norms_of_channels_that_are_no_power_of_two(shape):
    from vestige.engines.per_example import triton_norm_layers

    examples, channels, groups, *space = shape
    torch.manual_seed(0)
    inputs, weight, signals = (
        torch.randn(examples, channels, *space),
        torch.randn(channels),
        torch.randn(examples, channels, *space),
    )
    layer = torch.nn.GroupNorm(groups, channels)
    layer.weight.data.copy_(weight)
    output, *statistics = triton_norm_layers.group_norm(
        laid(inputs, False), weight.to(DEVICE), None, groups, 1e-5, torch.float32
    )
    torch.testing.assert_close(output.cpu(), layer(inputs).detach(), rtol=1e-4, atol=1e-4)
    got = triton_norm_layers.group_norm_backward(
        laid(inputs, False), signals.to(DEVICE), *statistics, weight.to(DEVICE), groups
    )
    for ours, exact in zip(got, norm_gradients(layer, inputs, signals), strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-4, atol=2e-3)
    assert not kernels.can_fuse_group_norm(laid(inputs, True), groups)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (5, 7, 300, 5), (9, 3, 2304, 3), (4, 6, 27, 8), (0, 3, 4, 3)])
def test_products_of_filters(shape, device):
    check_filter_products(kernels.filter_products, *shape, device)


@fused
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (5, 7, 300, 5), (9, 3, 600, 3), (4, 6, 27, 8)])
def test_fused_products_of_filters(shape):
    from vestige.engines.per_example import triton_gradient_norms

    check_filter_products(triton_gradient_norms.filter_products, *shape, DEVICE)


def check_filter_products(function, examples, filters, numbers, factors, device):
    torch.manual_seed(5)
    dense, against = torch.randn(examples, filters, numbers), torch.randn(factors, filters, numbers)
    got = function(dense.to(device), against.to(device)).cpu().double()
    exact, others = dense.double(), against.double()
    squares = torch.stack([(exact * others[0]).square().sum(dim=2), exact.square().sum(dim=2)], dim=2)
    want = torch.cat([squares, torch.einsum("efn,kfn->efk", exact, others[1:])], dim=2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long, torch.double])
def test_blanked_rows(device, dtype):
    tensor = torch.arange(1, 6 * 10001).to(dtype)[: 6 * 10000].view(6, 100, 100).to(device)
    rows = torch.tensor([True, False, False, True, False, True], device=device)
    want = tensor.clone()
    want[rows] = 0
    assert torch.equal(kernels.blanked(tensor, rows), want)
    assert not torch.equal(tensor, want)
    turned = tensor.clone().movedim(1, 2)  # in one piece, in another order
    assert torch.equal(kernels.blanked(turned, rows, in_place=True), want.movedim(1, 2))
    apart = tensor.repeat_interleave(2, dim=0)[::2]  # something else lies between
    assert torch.equal(kernels.blanked(apart, rows, in_place=True), want)
    assert torch.equal(kernels.blanked(tensor, rows, in_place=True), want)


def test_rows_in_one_piece():
    whole, piece = torch.zeros(4, 3, 5, 2), kernels._rows_in_one_piece
    assert piece(whole)
    assert piece(whole.permute(0, 2, 3, 1))
    assert piece(whole.contiguous(memory_format=torch.channels_last))
    assert piece(torch.zeros(1, 5)[:, :, None])
    assert not piece(whole.transpose(0, 1))
    assert not piece(whole[:, :2])
    assert not piece(whole[::2])
    assert not piece(whole[:, :1].expand(4, 3, 5, 2))


def test_pieces_of_rows():
    whole = torch.zeros(4, 3, 40)
    assert kernels._pieces(whole) == (1, 120, 120)
    assert kernels._pieces(whole[..., :37]) == (3, 37, 40)
    assert kernels._pieces(whole[:, 0, :37]) == (1, 37, 120)
    assert kernels._pieces(whole[:, :2, :37]) is None
    assert kernels._pieces(whole[..., ::2]) is None
    assert kernels._pieces(whole[:, :1, :37].expand(4, 3, 37)) is None
    assert kernels._pieces(whole[:, None, :2, :37]) is None
    assert kernels._pieces(whole[:, None, :, :37]) == (3, 37, 40)
    assert kernels._pieces(whole.view(12, 1, 40)[:, :, :37]) == (1, 37, 40)
    assert kernels.in_rows(whole[..., :37]).stride() == (120, 40, 1)
    assert kernels.in_rows(whole.mT).is_contiguous()


@fused
@pytest.mark.parametrize("cut", [(slice(None), slice(0, 37)), (0, slice(0, 37)), (slice(None), slice(None))])
def test_what_lies_between_rows_is_nobody_elses_to_blank(cut, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    from vestige.engines.per_example import triton_gradient_norms

    whole = torch.ones(4, 3, 40, device=DEVICE)
    rows = torch.tensor([True, False, True, False], device=DEVICE)
    want = whole.clone()
    want[(rows, *cut)] = 0
    tensor = whole[(slice(None), *cut)]
    triton_gradient_norms.blank_rows(tensor, rows, *kernels._pieces(tensor))
    assert torch.equal(whole, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_of_odd_width_are_laid_apart(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "LARGE", 2**14)
    tensor = torch.arange(2 * 5 * 2049).view(2, 5, 2049).to(dtype)
    assert kernels.aligned(tensor) is tensor or DEVICE == "cuda"
    monkeypatch.setattr(kernels, "ALIGNED", {"cpu"})
    apart = kernels.aligned(tensor)
    assert torch.equal(apart, tensor)
    assert apart.stride() == (5 * 2080, 2080, 1)
    assert kernels.aligned(apart) is apart
    for fits in (tensor[:1], tensor[..., :2047].contiguous(), tensor[..., :2048].contiguous(), tensor.flatten()):
        assert kernels.aligned(fits) is fits


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6), (0, 4, 6)])
def test_a_layer_of_odd_width_is_computed_in_parts(shape, biased, autocast, monkeypatch):
    monkeypatch.setattr(kernels, "ALIGNED", {DEVICE})
    monkeypatch.setattr(kernels, "LARGE", 0)
    monkeypatch.setattr(kernels, "LONG", 5)
    torch.manual_seed(2)
    input, weight = torch.randn(shape, device=DEVICE, requires_grad=True), torch.randn(23, 6, device=DEVICE)
    bias = torch.randn(23, device=DEVICE) if biased else None
    signal, parts, multiply = torch.randn(*shape[:-1], 23, device=DEVICE), [], kernels.multiply

    def counted(left, right):
        parts.append(multiply(left, right))
        return parts[-1]

    monkeypatch.setattr(kernels, "multiply", counted)
    found, tracker = [], Tracker()
    if len(shape) > 1 and shape[0]:
        tracker.label_rows(input, shape[0], 1)
        tracker.label_rows(signal, shape[0], 1)
    for followed in (nullcontext(), tracker):
        with followed, torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            output = F.linear(input, weight, bias)
            found.append((output, *torch.autograd.grad(output, input, signal.to(output.dtype))))
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=2e-2 if autocast else 1e-5, atol=5e-2 if autocast else 1e-5)
    assert len(parts) == (2 if len(shape) > 1 and shape[0] else 0)
    assert all(each is not None for each in parts)


def test_a_product_of_odd_width_is_added_in_parts(monkeypatch):
    monkeypatch.setattr(kernels, "ALIGNED", {DEVICE})
    monkeypatch.setattr(kernels, "LONG", 5)
    left, right = torch.randn(9, 23, device=DEVICE), torch.randn(9, 6, device=DEVICE)
    for large in (0, 2**20):
        monkeypatch.setattr(kernels, "LARGE", large)
        into = torch.ones(23, 6, device=DEVICE)
        kernels.add_product(into, left, right)
        torch.testing.assert_close(into, 1 + left.t() @ right)


SHAPES = [
    (3, 1, 5, 7),
    (4, 16, 64, 48),
    (5, 65, 40, 33),
    (2, 197, 96, 130),
    (0, 5, 6, 7),
    (1, 1100, 4, 3),
    (4, 3, 600, 33),
]


@fused
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
@pytest.mark.parametrize("tf32", [False, True])
def test_fused_norms(shape, dtype, tf32, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    from vestige.engines.per_example import triton_gradient_norms

    torch.manual_seed(3)
    examples, positions, out, width = shape
    left = torch.randn(examples, positions, out, device=DEVICE).to(dtype)
    right = torch.randn(examples, positions, width, device=DEVICE).to(dtype)
    if examples > 2:  # what cancels, what is nothing at all, and what is no number
        left[0], right[0] = left[0, 0].clone(), right[0, 0].clone()
        left[0, ::2] *= -1
        left[1], left[2, 0, 0] = 0.0, torch.nan
    hidden, unit, margin = 2.0**-14, 2.0**-12, 2.0**-8 if tf32 else 0.0
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, torch.nan, **options))
    squares, lengths = kernels.outer_squares(left.double(), right.double())
    tolerance = 1e-2 if tf32 or dtype == torch.bfloat16 else 1e-4
    apart = left.new_full((examples, positions, out + 3), torch.nan)[..., :out].copy_(left)
    with products_in_tf32(tf32):
        norms, sums = triton_gradient_norms.outer_norms(apart, right, (out + 3, width), hidden, unit, margin)
    with mock.patch.object(kernels, "rounding", return_value=hidden):
        want = kernels.bounded(squares, lengths, unit, margin)
    finite = lengths.isfinite()
    torch.testing.assert_close(sums.double()[finite], lengths[finite], rtol=tolerance, atol=1e-6)
    usual = (squares > 1e3 * hidden * lengths.square()) | (lengths == 0) | ~finite
    torch.testing.assert_close(norms.double()[usual], want[usual], rtol=tolerance, atol=1e-6, equal_nan=True)
    assert bool(usual.all()) is (positions < 10)
    least = (hidden**0.5 + 32 * unit) * lengths
    assert (norms.double() >= (1 - tolerance) * least)[~usual].all()


@fused
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tf32", "last"),
    [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.float32, False, True),
        (torch.float16, True, False),
        (torch.float16, True, True),
        pytest.param(torch.bfloat16, True, True, marks=gpu),
    ],
)
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "kernel", "stride", "padding", "dilation", "space"),
    [
        (3, 32, 1, (3, 3), (1, 1), (1, 1), (1, 1), (32, 32)),
        (8, 40, 2, (3, 2), (2, 1), (0, 1), (1, 2), (17, 9)),
        (16, 70, 1, (1, 1), (2, 2), (0, 0), (1, 1), (8, 8)),
        (64, 64, 1, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)),
        (48, 24, 1, (3, 3), (2, 2), (1, 1), (1, 1), (9, 9)),
    ],
)
def test_fused_convolution(
    channels, outputs, groups, kernel, stride, padding, dilation, space, views, dtype, tf32, last, keep, monkeypatch
):
    from vestige.engines.per_example import triton_gradient_norms

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    torch.manual_seed(4)
    image = torch.randn(2 * views, channels, *space).to(dtype)
    weight = torch.randn(outputs, channels // groups, *kernel)
    signal = torch.nn.functional.conv2d(image.float(), weight, None, stride, padding, dilation, groups)
    signal = torch.randn_like(signal).to(dtype)
    rows = (each.double().unflatten(0, (2, views)) for each in (image, signal))
    want = Patches(*rows, Geometry(kernel, stride, padding, dilation, groups)).dense()
    assert DEVICE == "cpu" or kernels.can_fuse_convolution(image.cuda(), signal.cuda(), groups)
    shape = (kernel, stride, padding, dilation, groups)
    got, squares = triton_gradient_norms.convolution_gradients(
        laid(image, last), laid(signal, False), shape, keep, views
    )
    tolerance = 1e-2 if tf32 and dtype == torch.float32 else 1e-4
    if keep:
        assert got.shape == want.shape
        close = torch.testing.assert_close
        close(got.double().cpu(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    want_squares = want.flatten(1).square().sum(dim=1)
    torch.testing.assert_close(squares.double().cpu(), want_squares, rtol=tolerance, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 has two interfaces")
def test_the_precision_of_products_is_read_whichever_interface_set_it():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for name, value, want in (
            ("fp32_precision", "tf32", True),  # now allow_tf32 cannot be read
            ("fp32_precision", "ieee", False),
            ("allow_tf32", True, True),
            ("allow_tf32", False, False),
        ):
            setattr(matmul, name, value)
            assert tf32_products() is want
            for allowed in (True, False):
                with products_in_tf32(allowed):
                    assert tf32_products() is allowed
            assert tf32_products() is want
    finally:
        matmul.fp32_precision = before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 has two interfaces")
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("conv", ["tf32", "ieee", "none"])
def test_without_tf32_either_interface_may_be_asked_and_is_left_as_it_was(legacy, conv):
    cudnn, read, write = torch.backends.cudnn, torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    before = cudnn.allow_tf32, read("cuda", "conv"), read("cuda", "rnn")

    def now():
        try:
            return cudnn.allow_tf32, read("cuda", "conv"), read("cuda", "rnn")
        except RuntimeError:  # they contradict each other
            return None, read("cuda", "conv"), read("cuda", "rnn")

    try:
        cudnn.allow_tf32 = legacy
        write("cuda", "conv", conv)
        mine = now()
        with tf32.without_tf32():
            assert not tf32.tf32_convolutions()
            if mine[0] is not None:
                assert not cudnn.allow_tf32
                with cudnn.flags(enabled=False):
                    pass
        assert now() == mine
    finally:
        cudnn.allow_tf32 = before[0]
        write("cuda", "conv", before[1]), write("cuda", "rnn", before[2])


@fused
@pytest.mark.parametrize("shape", [(3, 5, 7), (40, 16, 32), (3, 1200, 600)])
def test_fused_norms_that_float32_does_not_hold_are_infinite(shape):
    from vestige.engines.per_example import triton_gradient_norms

    left, right = unheld(*shape, DEVICE)
    norms, _ = triton_gradient_norms.outer_norms(left, right, shape[1:], 2.0**-20, 2.0**-24, 0.0)
    assert norms.isfinite().tolist() == [False] * 3 + [True] * 3
