"""Does a GPU draw what a CPU would draw from the same bits, and are the bits those of ChaCha20?"""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from vestige.randomness import rounded_gaussian as law
from vestige.randomness.keys import Randomness
from vestige.randomness.lattice import STEPS, add_noise, charged
from vestige.randomness.streams import SecretStream
from vestige.randomness.sum_and_release_types import BoundedSum
from vestige.tf32 import triton_available

pytestmark = pytest.mark.skipif(not triton_available(), reason="needs a GPU and Triton")
KEY, LANES = bytes(range(100, 132)), 64


def device_key():
    return SecretStream(KEY).words(4).tobytes()


def chacha(lanes, attempt, purpose):
    """The words of every lane's block, [lanes, 8], by OpenSSL."""
    rows = []
    for lane in range(lanes):
        nonce = b"".join(word.to_bytes(4, "little") for word in (lane, 0, attempt, purpose))
        stream = Cipher(algorithms.ChaCha20(device_key(), nonce), mode=None).encryptor().update(bytes(64))
        rows.append(np.frombuffer(stream, dtype=np.uint64))
    return np.stack(rows)


class Silent:
    """A stream that is never needed: 64 bits decide."""

    def words(self, count):
        raise AssertionError("these bits do not decide")


def expected(count):
    """As the kernel lays its numbers out: four to a lane, LANES apart."""
    lanes = -(-count // (4 * LANES)) * LANES
    words = chacha(lanes, 0, 0)
    steps, left = np.empty((4, lanes), dtype=np.int64), np.ones((4, lanes), dtype=bool)
    bins = [law._bins(np.ascontiguousarray(words[:, 2 * q]), Silent()) for q in range(4)]
    tosses, attempt = [np.ascontiguousarray(words[:, 2 * q + 1]) for q in range(4)], 0
    while left.any():
        for q in range(4):
            found, kept = law._places(bins[q], tosses[q], Silent())
            steps[q] = np.where(left[q], found, steps[q])
            left[q] &= ~kept
        attempt += 1
        more = chacha(lanes, attempt, 0)
        tosses = [np.ascontiguousarray(more[:, q]) for q in range(4)]
    return steps.reshape(4, -1, LANES).transpose(1, 0, 2).ravel()[:count]


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000, 20_000])
def test_the_kernel_draws_what_the_same_bits_give_on_a_cpu(count, always):
    """Decided by floating point, or always by integers of 128 bits."""
    from vestige.randomness import triton_lattice

    got = triton_lattice.draw(count, SecretStream(KEY), torch.device("cuda"), always)
    assert np.array_equal(got.long().cpu().numpy(), expected(count))


def test_uniform_numbers_are_the_ciphers():
    from vestige.randomness import triton_lattice

    got = triton_lattice.uniform(3000, SecretStream(KEY), torch.device("cuda")).cpu().numpy()
    want = chacha(6 * LANES, 0, 3).reshape(-1, LANES, 8).transpose(0, 2, 1).ravel()[:3000]
    assert np.array_equal(got, (want >> np.uint64(11)) * 2.0**-53)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["all", "coordinate", "row"])
@pytest.mark.parametrize("more", [0, 7])
def test_a_sum_leaves_as_whole_steps(kind, dtype, more):
    from vestige.randomness import triton_lattice

    torch.manual_seed(0)
    total = (3 * torch.randn(5, 300, device="cuda")).to(dtype)
    total = total if kind == "row" else total.flatten()
    spacing = {
        "all": 2.0**-30,
        "coordinate": torch.linspace(1, 2, 1500, device="cuda") * 2.0**-30,
        "row": torch.linspace(1, 2, 5, device="cuda", dtype=torch.float64)[:, None] * 2.0**-30,
    }[kind]
    start = total.clone()
    noise = triton_lattice.add(total, spacing, SecretStream(KEY), more, keep=True)
    steps = expected(1500)
    steps = torch.from_numpy((steps + (1 << (more - 1))) >> more if more else steps).cuda().view_as(total)
    size = torch.as_tensor(spacing, dtype=torch.float64, device="cuda")
    whole = torch.floor(start.double() / size + 0.5).long()
    torch.testing.assert_close(total, ((whole + steps).double() * size).to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(noise, (steps.double() * size).to(dtype), rtol=0, atol=0)


def test_the_noise_of_a_gpu_has_the_promised_size():
    total = torch.zeros(2_000_000, device="cuda")
    std, _ = add_noise(BoundedSum(total, 0.3), 2.0, Randomness.secret().stream("noise", 0))
    assert std == pytest.approx(0.3 * charged(2.0, 2_000_000))
    assert float(total.double().std()) == pytest.approx(std, rel=5e-3)
    wide = torch.zeros(1000, dtype=torch.float64, device="cuda")
    add_noise(BoundedSum(wide, 0.3), 2.0, Randomness.secret().stream("noise", 1))
    spacing = 0.3 * charged(2.0, 1000) * 2.0**-STEPS
    torch.testing.assert_close(wide / spacing, (wide / spacing).round(), rtol=0, atol=1e-4)
