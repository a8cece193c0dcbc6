"""Is the norm of a convolution's gradient right by either way, and never too small in TF32?"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from engine_checks import Out, close, silent, targets
from vestige import tf32
from vestige.engines.per_example import gradient_forms
from vestige.engines.per_example.gradient_forms import Geometry, Gradient, Lookup, Outer, Patches, Routed, Tied, change


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"groups": 4, "dilation": 2}])
@pytest.mark.parametrize(("size", "by_pixels"), [(3, True), (4, True), (12, False)])
def test_convolution_norms_by_either_way(size, by_pixels, options):
    """Few positions and many channels: by inner products of pixels; many positions: by gradients."""
    torch.manual_seed(3)
    layer = nn.Conv2d(32, 64, 3, padding=1, **options)
    image = torch.randn(4, 32, size, size)
    signal = torch.randn_like(layer(image))
    pairs = [(n, n) for n in (3, options.get("stride", 1), 1, options.get("dilation", 1))]
    patches = Patches(image.double(), signal.double(), Geometry(*pairs, layer.groups))
    want = patches.dense().flatten(1).norm(dim=1)
    close(patches._ghost_squares().sqrt(), want, 1e-10)
    close(patches.norms(2.0**-52), want, 1e-10)
    if not options:
        assert (patches._ghost_cost() < patches._direct_cost()) == by_pixels
    silent(Out(layer, width=signal[0].numel()), (image, targets(4)))


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2, "padding": 1}, {"groups": 4}])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.everyday(
    "1-options0", "1-options1", "1-options2", "1-options3", "2-options0", "2-options1", "2-options2", "3-options1"
)
def test_the_norms_of_the_terms_of_a_convolution_add_up(rank, options):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](8, 12, 2, **options).double()
    image = torch.randn(3, 8, *[6] * rank).double()
    signal = torch.randn_like(layer(image))
    geometry = Geometry(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    want = torch.zeros(3).double()
    for place in range(signal[0, 0].numel()):  # one term at a time: the signal of one position
        for group in range(layer.groups):
            one = torch.zeros_like(signal).flatten(2)
            rows = slice(group * 12 // layer.groups, (group + 1) * 12 // layer.groups)
            one[:, rows, place] = signal.flatten(2)[:, rows, place]
            want += Patches(image, one.view_as(signal), geometry).dense().flatten(1).norm(dim=1)
    close(Patches(image, signal, geometry)._lengths(), want, 1e-10)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("convolutions", [False, True])
def test_there_is_slack_where_tf32_may_round_up(products, convolutions, monkeypatch):
    monkeypatch.setattr(tf32, "tf32_products", lambda: products)
    monkeypatch.setattr(tf32, "tf32_convolutions", lambda: convolutions)
    rounded = 1 + 2**-10  # each factor of a product, at most
    share = rounded**2 * tf32.slack(SimpleNamespace(is_cuda=True))
    assert share == pytest.approx(1.0 if products or convolutions else rounded**2, abs=1e-12)
    assert tf32.slack(torch.zeros(1)) == 1.0  # a CPU does not round so


def rounded(tensor: Tensor, nearest: bool) -> Tensor:
    """As TF32 keeps it: ten bits after the leading one, the rest rounded or cut."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + (0x1000 if nearest else 0)) & ~0x1FFF).view(torch.float32)


def cancelling(nearest: bool, device: str = "cpu") -> Patches:
    """Neighbours of a chequered image cancel in the gradient, all but a little that TF32 makes five times as much."""
    half = 2**-11 if nearest else 2**-10
    white = (torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0
    image = torch.where(white, 1 + 0.9 * half, 1 + 1.1 * half).expand(2, 48, 8, 8).contiguous()
    signal = torch.where(white, 1.0, -1.0) * (1 + torch.rand(2, 64, 1, 1))
    pairs = [(n, n) for n in (1, 1, 0, 1)]
    return Patches(image.to(device), signal.to(device), Geometry(*pairs, 1))


@pytest.mark.parametrize("measured", ["exactly", "in tf32"])
@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("kind", ["cancelling", "random"])
def test_however_terms_cancel_tf32_lifts_no_share_over_the_bound(kind, nearest, measured, monkeypatch):
    patches = cancelling(nearest)
    if kind == "random":
        patches = replace(patches, image=torch.randn_like(patches.image), signal=torch.randn_like(patches.signal))

    def in_tf32(image: Tensor, signal: Tensor) -> Patches:
        return replace(patches, image=rounded(image, nearest).double(), signal=rounded(signal, nearest).double())

    looked_at = in_tf32(patches.image, patches.signal) if measured == "in tf32" else patches
    bare = looked_at.norms(2.0**-23)
    monkeypatch.setattr(gradient_forms, "convolves_in_tf32", lambda tensor: True)
    norms = looked_at.norms(2.0**-23)
    close(norms, bare + tf32.MARGIN * looked_at._lengths())
    bound = 0.3 * bare.min().item()

    def shares(norms: Tensor) -> Tensor:
        factors = (bound / norms).float().view(-1, 1, 1, 1)
        return in_tf32(patches.image, factors * patches.signal).dense().flatten(1).norm(dim=1)

    assert (shares(norms) <= bound).all()
    if kind == "cancelling" and measured == "exactly":
        assert (shares(bare) > 4 * bound).all(), "nothing to guard against here"
    if kind == "random":
        assert (norms < 1.1 * bare).all(), "a dear margin"


def opposite(*shape: int) -> Tensor:
    """Positions in pairs of opposite sign, which cancel but for their last bits."""
    half = torch.randn(*shape)
    return torch.cat([half, -half * (1 + 1e-7 * torch.randn(*shape))], dim=1)


def cancelling_forms(form: str) -> Gradient:
    torch.manual_seed(4)
    same = torch.randn(30, 1, 20).repeat(1, 40, 1)
    if form == "outer":
        return Outer(opposite(30, 20, 10), same)
    index = torch.zeros(30, 40, dtype=torch.long)
    if form == "routed":
        return Routed(index + 1, opposite(30, 20, 10), same, 3)
    if form == "lookup":
        return Lookup(index, opposite(30, 20, 20), 3)
    if form == "tied":  # what is looked up is what is multiplied by, with the other sign
        rows = torch.randn(30, 5, 20)
        left = torch.zeros(30, 5, 3)
        left[..., 0] = -1
        return Tied(Lookup(index[:, :5], rows, 3), Outer(left, rows * (1 + 1e-7 * torch.randn(30, 5, 20))))
    size, channels, outputs = (4, 64, 256) if form == "pixels" else (20, 4, 3)
    checks = torch.where((torch.arange(size)[:, None] + torch.arange(size)) % 2 == 0, 1.0, -1.0)
    image = torch.randn(30, channels, 1, 1) * (1 + 1e-7 * torch.randn(30, channels, size, size))
    pairs = [(n, n) for n in (1, 1, 0, 1)]
    return Patches(image, torch.randn(30, outputs, 1, 1) * checks, Geometry(*pairs, 1))


@pytest.mark.parametrize("form", ["outer", "routed", "lookup", "tied", "pixels", "patches"])
def test_terms_that_cancel_in_float32_lift_no_share_over_the_bound(form):
    gradient = cancelling_forms(form)
    if isinstance(gradient, Patches):
        assert (gradient._ghost_cost() < gradient._direct_cost()) == (form == "pixels")
    norms, exact = gradient.norms(2.0**-23), change(gradient, doubled).dense().flatten(1).norm(dim=1)
    bound = 1e-9
    assert (norms > exact).all()
    for one, norm in enumerate(norms):
        factors, share = torch.zeros(30), torch.zeros(gradient.dense().shape[1:])
        factors[one] = bound / norm
        gradient.add(share, factors)
        assert share.double().norm() <= bound
    assert (norms.double() > 2 * exact).any(), "nothing cancelled here"


def test_products_in_tf32_carry_a_margin_too(monkeypatch):
    torch.manual_seed(5)
    outer = Outer(torch.randn(3, 7, 4), torch.randn(3, 7, 5))
    tied = Tied(Lookup(torch.zeros(3, 2, dtype=torch.long), torch.randn(3, 2, 5), 4), outer)
    lengths = (outer.left.norm(dim=2) * outer.right.norm(dim=2)).sum(dim=1)
    bare = outer.norms(2.0**-23), tied.norms(2.0**-23)
    monkeypatch.setattr(gradient_forms, "multiplies_in_tf32", lambda tensor: True)
    close(outer.norms(2.0**-23), bare[0] + tf32.MARGIN * lengths)
    assert (tied.norms(2.0**-23) >= bare[1] + tf32.MARGIN * lengths).all()


def doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("nearest", [True, False])
def test_on_a_gpu_no_convolution_in_tf32_lifts_a_share_over_the_bound(nearest, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    patches = cancelling(nearest, "cuda")
    norms = patches.norms(2.0**-23)
    for one in range(2):
        factors, share = torch.zeros(2, device="cuda"), torch.zeros(patches.shape, device="cuda")
        factors[one] = 0.01 / norms[one]
        patches.add(share, factors)
        assert share.norm() <= 0.01
