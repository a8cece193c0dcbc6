"""Are tensors that are no memory of their own taken for public? Nested and sparse ones, and those that wrap others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vestige.engines.example_axis import rules  # noqa: F401  (installed where they are imported)
from vestige.engines.example_axis.before_dispatch import TrackedFunctions
from vestige.engines.example_axis.labels import Labels, Mixed, NotApart, Rows, Tracker


class Wrapped(Tensor):
    """A tensor that passes operators on to another one, as libraries of quantisation or of devices have them."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))


class Flattened(Wrapped):
    def __tensor_flatten__(self):
        return ["inner"], None


MAKERS = {
    "jagged": lambda x: torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged).to_padded_tensor(0.0),
    "nested": lambda x: torch.nested.as_nested_tensor(list(x.unbind())).to_padded_tensor(0.0),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "compressed": lambda x: x.to_sparse_csr().to_dense(),
    "sparse from its values": lambda x: torch.sparse_coo_tensor(torch.arange(4)[None], x[:, 0], (4,)).to_dense(),
    "wrapped": lambda x: torch.mean(Wrapped(x), 0),
    "wrapped, with parts": lambda x: torch.mean(Flattened(x), 0),
    "given by name": lambda x: torch.searchsorted(torch.arange(4.0), torch.ones(4), sorter=x.long()[:, 0]),
}


def tracked() -> tuple[Tracker, Tensor]:
    tracker, rows = Tracker(Labels()), torch.zeros(4, 3)
    tracker.label_rows(rows, 4, 1)
    return tracker, rows


@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_made_of_examples_is_never_public(maker):
    tracker, rows = tracked()
    try:
        with tracker:
            found = MAKERS[maker](rows)
    except NotApart as problem:
        assert problem.unknown
        return
    assert isinstance(tracker.labels.get(found), Mixed)


@pytest.mark.parametrize("maker", ["jagged", "sparse", "wrapped, with parts"])
def test_what_is_made_of_nothing_of_them_is_public(maker):
    tracker, _ = tracked()
    with tracker:
        found = MAKERS[maker](torch.ones(4, 3))
    assert tracker.labels.get(found) is None


@pytest.mark.parametrize("read", [Tensor.untyped_storage, Tensor.storage, Tensor.tolist, Tensor.numpy])
def test_the_memory_of_examples_is_read(read):
    tracker, rows = tracked()
    tracker.strict = True
    with tracker, TrackedFunctions(tracker, inside=True), pytest.raises(NotApart, match="looks at a value"):
        read(rows)
    with tracker, TrackedFunctions(tracker, inside=True):
        read(torch.ones(3))


def test_single_examples_in_a_part_of_memory_are_known_by_the_byte():
    """What nothing was written to is public, what shows one example is its own, and several out of order are mixed."""
    labels, memory = Labels(), torch.zeros(4, 3, 2)
    for place in range(3):
        labels.write(memory[1, place], Rows(-1, 1, 3, 9, place))
    assert labels.get(memory[0]) is None
    assert labels.get(memory[2:]) is None
    assert labels.get(memory[1]) == Rows(0, 1, 3, 9)
    assert labels.get(memory[1, 1]) == labels.get(memory[1, 1, 1:]) == Rows(-1, 1, 3, 9, 1)
    assert labels.get(memory.flatten()[:4]) is None
    read = memory.view(torch.uint8).flatten()
    ends = memory[1, 0].data_ptr() + 8 - memory.data_ptr()
    assert labels.get(read[ends - 1 : ends]) == Rows(-1, 1, 3, 9, 0)
    assert labels.get(read[ends - 8 * 1 - 1 : ends - 8]) is None
    for several in (memory, memory[1].T, memory[1].flatten(), memory[1, 1:]):
        assert isinstance(labels.get(several), Mixed)
    labels.write(memory[1, 0, :1], Rows(-1, 1, 3, 9, 2))
    assert isinstance(labels.get(memory[1]), Mixed)
    assert labels.get(memory[1, 1]) == Rows(-1, 1, 3, 9, 1)
