"""Do the kernels compute what they say, and the fused ones what the plain ones do?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vestige import kernels
from vestige.layers import Geometry, Patches

gpu = pytest.mark.skipif(not kernels.fused_available(), reason="needs a GPU and Triton")
lengths = st.integers(1, 70)


@given(st.integers(0, 4), lengths, lengths, lengths)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_norms_from_inner_products(examples, positions, out, width):
    torch.manual_seed(positions)
    left, right = torch.randn(examples, positions, out), torch.randn(examples, positions, width)
    want = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).square().sum(dim=1)
    torch.testing.assert_close(kernels.outer_squares(left, right).double(), want, rtol=1e-4, atol=1e-6)


def test_half_precision_numbers_are_not_added_in_half_precision():
    torch.manual_seed(0)
    left, right = torch.randn(3, 50, 8).bfloat16(), torch.randn(3, 50, 8).bfloat16()
    want = torch.einsum("bto,bti->boi", left.double(), right.double()).flatten(1).square().sum(dim=1)
    got = kernels.outer_squares(left, right)
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
    assert (kernels.outer_squares(left, right).double() >= 0.9 * exact).all()
    grams = [torch.bmm(m, m.transpose(1, 2)) for m in (left, right)]
    assert ((grams[0] * grams[1]).sum(dim=(1, 2)).double() < 0.9 * exact).any(), "rounding never mattered here"


@gpu
@pytest.mark.parametrize("shape", [(3, 1, 5, 7), (4, 16, 64, 48), (5, 65, 40, 33), (2, 197, 96, 130), (0, 5, 6, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
def test_fused_norms(shape, dtype, tf32, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.manual_seed(3)
    examples, positions, out, width = shape
    left = torch.randn(examples, positions, out, device="cuda").to(dtype)
    right = torch.randn(examples, positions, width, device="cuda").to(dtype)
    want = kernels.plain_outer_squares(left.double(), right.double())
    tolerance = 1e-2 if tf32 or dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(kernels.outer_squares(left, right).double(), want, rtol=tolerance, atol=1e-6)


@gpu
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "kernel", "stride", "padding", "dilation", "space"),
    [
        (3, 32, 1, (3, 3), (1, 1), (1, 1), (1, 1), (32, 32)),
        (8, 40, 2, (3, 2), (2, 1), (0, 1), (1, 2), (17, 9)),
        (16, 70, 1, (1, 1), (2, 2), (0, 0), (1, 1), (8, 8)),
        (64, 64, 1, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)),
    ],
)
def test_fused_convolution(
    channels, outputs, groups, kernel, stride, padding, dilation, space, keep, tf32, monkeypatch
):
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.manual_seed(4)
    image = torch.randn(5, channels, *space)
    weight = torch.randn(outputs, channels // groups, *kernel)
    signal = torch.randn_like(torch.nn.functional.conv2d(image, weight, None, stride, padding, dilation, groups))
    patches = Patches(image.double(), signal.double(), Geometry(kernel, stride, padding, dilation, groups))
    want = patches.dense()
    assert kernels.can_fuse_convolution(image.cuda(), signal.cuda(), groups)
    shape = (kernel, stride, padding, dilation, groups)
    got, squares = kernels.convolution_gradients(image.cuda(), signal.cuda(), shape, keep)
    tolerance = 1e-2 if tf32 else 1e-4
    if keep:
        close = torch.testing.assert_close
        close(got.view(want.shape).double().cpu(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    want_squares = want.flatten(1).square().sum(dim=1)
    torch.testing.assert_close(squares.double().cpu(), want_squares, rtol=tolerance, atol=1e-6)
