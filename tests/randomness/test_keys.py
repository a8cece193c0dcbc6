"""Has every purpose a stream of its own, and is a secret key secret?"""

import multiprocessing
import os

import numpy as np
import pytest
import torch

from vestige.randomness.keys import Randomness


def test_secret_keys_differ_and_reproducible_ones_do_not():
    draws = [Randomness.secret().stream("noise", 0).words(8) for _ in range(3)]
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[1], draws[2])
    same = [Randomness.reproducible(5).stream("noise", 3).words(8) for _ in range(2)]
    assert np.array_equal(*same)


def test_every_purpose_and_index_has_its_own_stream():
    key = Randomness.reproducible(5)
    streams = [key.stream(purpose, index).integers(2**62) for purpose in ("noise", "sample") for index in range(50)]
    assert len(set(streams)) == 100


def test_the_noise_is_independent_of_torchs_global_generator():
    torch.manual_seed(1)
    first = Randomness.secret().stream("noise", 0).words(4)
    torch.manual_seed(1)
    assert not np.array_equal(first, Randomness.secret().stream("noise", 0).words(4))


def test_the_key_is_not_printed():
    key = Randomness.secret()
    assert str(key.entropy) not in repr(key)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_draws_from_another_key():
    """As do two children of one parent; what goes on from earlier draws is refused there."""
    key, fixed = Randomness.secret(), Randomness.reproducible(7)
    mine = key.stream("noise", 3).integers(2**62)

    def child(report):
        drawn = key.stream("noise", 3).integers(2**62), fixed.stream("noise", 3).integers(2**62)
        try:
            key.stream("noise", 4, continues=True)
        except ValueError:
            report.put((*map(int, drawn), True))
        else:
            report.put((*map(int, drawn), False))

    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    children = [context.Process(target=child, args=(report,)) for _ in range(2)]
    for each in children:
        each.start()
    seen = [report.get() for _ in children]
    for each in children:
        each.join()
    assert len({int(mine), *(drawn for drawn, _, _ in seen)}) == 3
    assert {same for _, same, _ in seen} == {int(fixed.stream("noise", 3).integers(2**62))}
    assert all(refused for _, _, refused in seen)
    assert key.stream("noise", 3).integers(2**62) == mine
