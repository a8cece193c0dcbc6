"""Are the secret numbers those of AES in counter mode, uniform, and unlike any others?"""

import copy
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from vestige.randomness.keys import Randomness
from vestige.randomness.streams import SecretStream

KEY = bytes(range(32))


def test_the_words_are_the_ciphers_blocks_of_a_counter():
    """Beside the cipher applied to one counter after the other, in a mode without a counter."""
    block = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    blocks = b"".join(block.update(counter.to_bytes(16)) for counter in range(50))
    want = np.frombuffer(blocks, dtype=np.uint64)
    stream = SecretStream(KEY)
    got = np.concatenate([stream.words(count) for count in (1, 2, 3, 64, 0, 30)])
    assert np.array_equal(got, want[:100])


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 3 * 2**61])
def test_integers_are_uniform_below_their_bound(high):
    drawn = SecretStream(KEY).integers(high, size=20_000)
    assert drawn.min() >= 0
    assert drawn.max() < high
    if 1 < high <= 1000:
        assert stats.chisquare(np.bincount(drawn, minlength=high)).pvalue > 1e-6
    assert isinstance(SecretStream(KEY).integers(5), int)


def test_integers_leave_out_what_would_favour_the_first_remainders():
    """Of 3 * 2^62, the numbers from there to 2^64 would make the lower third as likely again."""
    drawn = SecretStream(KEY).integers(3 * 2**61, size=40_000)
    assert stats.chisquare(np.bincount(drawn // 2**61)).pvalue > 1e-6


def test_other_numbers_are_in_range_and_spread():
    stream = SecretStream(KEY)
    uniform = stream.random((100, 200))
    assert uniform.shape == (100, 200)
    assert stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-6
    order = stream.permutation(1000)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.2


def test_every_key_purpose_and_index_has_a_key_of_its_own():
    keys = [Randomness.secret(), Randomness.secret()]
    drawn = [key.stream(purpose, index).words(1)[0] for key in keys for purpose in "ab" for index in range(20)]
    assert len(set(drawn)) == 80
    assert keys[0].stream("a", 0).words(1)[0] == drawn[0]


def test_a_stream_does_not_print_its_key():
    assert repr(SecretStream(KEY)) == "SecretStream()"


@pytest.mark.parametrize("drawn", [0, 3])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_is_neither_copied_nor_written(way, drawn):
    """Whether it has drawn anything yet or not: a copy would draw the same noise again."""
    stream = SecretStream(KEY)
    if drawn:
        stream.words(drawn)
    with pytest.raises(TypeError, match=r"neither copied nor written|cannot pickle"):
        way(stream)


def test_a_stream_keeps_no_key_once_it_draws():
    stream = SecretStream(KEY)
    stream.words(1)
    assert KEY not in vars(stream).values()


def test_the_first_words_of_a_stream_are_no_part_of_what_its_key_makes():
    seed = bytes(range(64))
    stream, cipher = SecretStream(seed), SecretStream(seed[:32])
    assert stream.words(4).tobytes() == seed[32:]
    assert np.array_equal(stream.words(6), cipher.words(6))
    assert np.array_equal(SecretStream(seed).words(5), SecretStream(seed[:32]).words(5)), "more than four: of the key"
    one, other = Randomness.secret(), Randomness.secret()
    firsts = {source.stream("noise", index).words(4).tobytes() for source in (one, other) for index in range(50)}
    assert len(firsts) == 100
