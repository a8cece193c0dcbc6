"""Are the models people train exact, in the engine and in a loop of their own, and is none of their uses replayed?"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import SGD

from loops import flat, oracle, private
from other_models import OTHERS, built, called, exact, nothing_replayed, positional

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

FAR = 256.0
"""So large a step that the rounding of the weights does not hide what it was made of."""


@pytest.mark.parametrize("name", OTHERS)
def test_norms_and_clipped_sum_in_the_engine(name):
    exact(*positional(name, 4))


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_of_a_loop(name):
    torch.manual_seed(1)
    model, other = built(name), OTHERS[name]
    batch = other.examples(4, True)
    names = tuple(batch)
    expected = oracle(
        model,
        lambda model, *example: other.loss(called(model, given := dict(zip(names, example, strict=True))), given),
        list(zip(*batch.values(), strict=True)),
    )
    _, model, optimizer, loader = private(model, tuple(batch.values()), batch=4, optimizer=lambda p, lr: SGD(p, lr=FAR))
    before = flat(model)
    with nothing_replayed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in loader:
            given = dict(zip(names, rows, strict=True))
            other.loss(called(model, given), given).backward()
            optimizer.step()
    got = (before - flat(model)).double() * 4 / FAR
    off = (got - torch.from_numpy(expected)).norm() / torch.from_numpy(expected).norm()
    assert off < 1e-5
