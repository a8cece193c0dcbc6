"""Do the kernels for users with unequal numbers of rows compute what plain torch does, and read nobody's rows?"""

from __future__ import annotations

import os
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from vestige import tf32
from vestige.engines.per_example import kernels
from vestige.engines.per_example.gradient_forms import Dense, Geometry, Gradient, Outer, Patches, change
from vestige.engines.per_example.sums_of_users import RowsOfUsers, UserRows
from vestige.tf32 import products_in_tf32, without_tf32

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = "cuda" if tf32.triton_available() else "cpu"
fused = pytest.mark.skipif(
    not (tf32.triton_available() or INTERPRETED), reason="needs a GPU and Triton, or Triton with TRITON_INTERPRET=1"
)
COUNTS = {
    "equal": [3, 3, 3, 3],
    "unequal": [1, 4, 2, 3, 1],
    "absent": [2, 0, 1, 4, 0, 0],
    "nobody": [0, 0],
    "one": [1, 1, 1],
    "none": [],
}


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())


def segments_of(counts: list[int], extra: int = 3) -> kernels.Segments:
    own = torch.tensor(counts, dtype=torch.long, device=DEVICE)
    return kernels.Segments(own.cumsum(0) - own, own, max(counts, default=1) + 1, sum(counts) + extra)


def spoiled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """With nobody's rows, after the last user's, that are no numbers."""
    tensor[rows:] = torch.nan
    tensor[rows + 1 :] = torch.inf
    return tensor


def of_each(tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return list(tensor[: sum(counts)].double().cpu().split(counts))


@fused
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "shape", [(1, 5, 7), (1, 1100, 64), (2, 33, 590), (7, 64, 33), (16, 20, 96), (40, 8, 10), (64, 4, 65)]
)
@pytest.mark.parametrize("tf32", [False, True])
def test_norms_of_products(name, shape, tf32, monkeypatch):
    from vestige.engines.per_example import triton_gradient_norms

    torch.manual_seed(0)
    counts, (positions, out, width) = COUNTS[name], shape
    segments = segments_of(counts)
    left = spoiled(torch.randn(segments.rows, positions, out, device=DEVICE), sum(counts))
    right = spoiled(torch.randn(segments.rows, positions, width, device=DEVICE), sum(counts))
    apart = left.new_full((segments.rows, positions, out + 3), torch.nan)[..., :out].copy_(left)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, torch.nan, **options))
    hidden, unit, margin = 2.0**-20, 2.0**-25, 2.0**-8 if tf32 else 0.0
    places = (segments.starts, segments.counts, segments.most)
    with products_in_tf32(tf32):
        norms, lengths = triton_gradient_norms.outer_norms(apart, right, (out + 3, width), hidden, unit, margin, places)
    pairs = [*zip(of_each(left, counts), of_each(right, counts), strict=True)]
    want = torch.tensor([float(torch.einsum("bto,bti->oi", *pair).norm()) for pair in pairs])
    long = torch.tensor([float((one.norm(dim=2) * other.norm(dim=2)).sum()) for one, other in pairs])
    tolerance = 1e-2 if tf32 else 1e-4
    torch.testing.assert_close(lengths.cpu(), long, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(norms.cpu(), want + margin * long, rtol=tolerance, atol=1e-6)


@fused
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "kernel", "stride", "padding", "space"),
    [(3, 24, 1, (3, 3), (1, 1), (1, 1), (6, 6)), (8, 40, 2, (3, 2), (2, 1), (0, 1), (9, 5))],
)
@pytest.mark.parametrize("views", [1, 2])
def test_convolutions(name, keep, dtype, channels, outputs, groups, kernel, stride, padding, space, views):
    torch.manual_seed(1)
    counts, geometry = COUNTS[name], Geometry(kernel, stride, padding, (1, 1), groups)
    segments = segments_of(counts)
    rows, own = segments.rows * views, sum(counts) * views
    image = torch.randn(rows, channels, *space).to(dtype)
    weight = torch.zeros(outputs, channels // groups, *kernel)
    signal = torch.randn_like(torch.nn.functional.conv2d(image.float(), weight, None, stride, padding, 1, groups))
    image, signal = (spoiled(each.to(DEVICE), own) for each in (image, signal.to(dtype)))
    with without_tf32():
        shape = (kernel, stride, padding, (1, 1), groups)
        found, squares = kernels.convolution_gradients(image, signal, shape, keep, views, segments)
    several = [each * views for each in counts]
    pairs = zip(of_each(image, several), of_each(signal, several), strict=True)
    want = [
        Patches(one[None], other[None], geometry).dense()[0] if len(one) else weight.double() for one, other in pairs
    ]
    want = torch.stack(want) if want else weight.double().new_zeros(0, *weight.shape)
    torch.testing.assert_close(squares.cpu().double(), want.flatten(1).square().sum(dim=1), rtol=1e-4, atol=1e-4)
    if keep:
        torch.testing.assert_close(found.cpu().double(), want, rtol=1e-4, atol=1e-3)


@fused
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 700), (3, 1400)])
def test_sums(name, shape):
    from vestige.engines.per_example import triton_gradient_norms

    torch.manual_seed(2)
    counts = COUNTS[name]
    segments = segments_of(counts)
    value = spoiled(torch.randn(segments.rows, *shape, device=DEVICE), sum(counts))
    wide = torch.cat([value, value], dim=-1)[..., : shape[-1]] if shape else value.repeat_interleave(2)[::2]
    want = [each.sum(dim=0) for each in of_each(value, counts)]
    found, norms = triton_gradient_norms.segment_sums(
        wide.reshape(segments.rows, value[0].numel()), segments.starts, segments.counts
    )
    plain = segments.padded(value).sum(dim=1)
    if norms is None:
        assert value[0].numel() > triton_gradient_norms.WIDEST
    else:
        torch.testing.assert_close(norms, found.norm(dim=1))
    for each, user, other in zip(found.cpu(), want, plain.cpu(), strict=True):
        torch.testing.assert_close(each.double(), user.flatten(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other.double(), user, rtol=1e-5, atol=1e-6)


def forms(rows: int) -> dict[str, tuple[Gradient, tuple[int, ...]]]:
    image, signal = torch.randn(rows, 8, 6, 6), torch.randn(rows, 24, 6, 6)
    long = Outer(torch.randn(rows, 20, 48), torch.randn(rows, 20, 64))
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    return {
        "dense": (Dense(torch.randn(rows, 70)), (70,)),
        "turned": (Dense(torch.randn(rows, 5, 7).mT), (7, 5)),
        "outer": (Outer(torch.randn(rows, 1, 300), torch.randn(rows, 1, 100)), (300, 100)),
        "narrow": (Outer(torch.randn(rows, 9, 6), torch.randn(rows, 9, 12)), (6, 12)),
        "long": (long, (48, 64)),
        "strided": (Outer(torch.randn(rows, 20, 50)[..., :48], long.right), (48, 64)),
        "patches": (Patches(image, signal, geometry), (24, 8, 3, 3)),
        "small": (Patches(image[..., :2, :2], signal[..., :2, :2], geometry), (24, 8, 3, 3)),
    }


@fused
@pytest.mark.parametrize("name", ["equal", "unequal", "absent", "nobody", "one"])
@pytest.mark.parametrize("kind", forms(0))
@pytest.mark.parametrize("allowed", [False, True])
def test_users_are_as_long_as_in_float64_and_nothing_longer_is_added(name, kind, allowed, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "can_fuse", lambda tensor: tensor.dtype == torch.float32)
        monkeypatch.setattr(kernels, "can_fuse_convolution", lambda image, *_: image.dtype == torch.float32)
    torch.manual_seed(3)
    counts = COUNTS[name]
    rows = sum(counts) + 3
    users = UserRows(torch.tensor(counts, device=DEVICE), rows, max(max(counts), 1), equal=name == "equal")
    form, shape = forms(rows)[kind]
    exact = change(form, torch.Tensor.double)
    change(form, lambda tensor: spoiled(tensor, sum(counts)))
    with products_in_tf32(True) if allowed else without_tf32():
        found = users.summed(change(form, lambda tensor: tensor.to(DEVICE)))
        norms = found.norms(torch.finfo(torch.float32).eps).cpu().double()
    by_rows = isinstance(found, RowsOfUsers)
    clean = change(found.of, lambda tensor: tensor.nan_to_num(0.0, 0.0, 0.0)) if by_rows else found
    for user, count in enumerate(counts):
        weights = torch.zeros(rows, dtype=torch.float64)
        weights[sum(counts[:user]) :][:count] = 1.0
        total, added = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, device=DEVICE)
        exact.add(total, weights)
        long = float(total.norm())
        assert 0.99 * long <= float(norms[user]) <= 1.2 * long + 1e-6
        assert allowed or float(norms[user]) == pytest.approx(long, rel=1e-4, abs=1e-6)
        mine = torch.eye(len(counts), device=DEVICE)[user]
        with products_in_tf32(True) if allowed else without_tf32():
            clean.add(added, users.of_rows(mine, 0.0) if by_rows else mine)
        torch.testing.assert_close(added.cpu().double(), total, rtol=3e-2, atol=1e-1 if allowed else 1e-3)
        assert float(added.double().norm()) <= (1 + 1e-5) * float(norms[user]) + 1e-6
