"""Is what a pass sends from the host kept when it is tried out, and given in a recording? On a device without numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vestige import devices
from vestige.engines.recorded.host_copies import HostCopies
from vestige.engines.recorded.steady import Unsteady

META = torch.device("meta")
gpu = pytest.mark.skipif(not devices.triton_available(), reason="needs a GPU and Triton")


def sends(number: float = 3.0, count: int = 4, device: torch.device = META) -> list[Tensor]:
    """Whatever a model sends to its device, in every way."""
    table, place = torch.zeros(5, 3, device=device), torch.arange(count) % 5
    moved = torch.tensor(number).type_as(table)
    table[1] = torch.full((3,), number)  # a copy
    table[place] = moved  # by numbers on the host
    return [moved, table[place], torch.full((3,), number).to(device), table]


def kept(**options):
    sent = []
    with HostCopies(META, sent):
        sends(**options)
    return sent


def test_what_is_sent_is_kept_in_its_order():
    assert [tuple(before.shape) for before, _ in kept()] == [(), (3,), (4,), (4,), (3,)]
    assert all(before.device.type == "cpu" and there.device == META for before, there in kept())


def test_nothing_is_sent_where_it_is_given(monkeypatch):
    sent = kept()
    monkeypatch.setattr(Tensor, "to", None)  # whatever goes over
    with HostCopies(META, sent, given=True):
        torch.zeros(2, device=META).copy_(torch.tensor(3.0))


@pytest.mark.parametrize("other", [{"number": 4.0}, {"count": 3}])
def test_something_else_is_not_taken_for_the_same(other):
    with HostCopies(META, kept(), given=True):
        sends()
    with pytest.raises(Unsteady), HostCopies(META, kept(), given=True):
        sends(**other)


def test_more_than_was_kept_is_not_given():
    with pytest.raises(Unsteady), HostCopies(META, kept(), given=True):
        sends(), sends()


def test_on_a_host_nothing_goes_over():
    sent: list = []
    with HostCopies(torch.device("cpu"), sent):
        sends(device=torch.device("cpu"))
    assert not sent


@gpu
def test_a_recording_of_what_is_sent():
    device, sent = torch.device("cuda"), []
    with HostCopies(device, sent):
        want = [each.clone() for each in sends(device=device)]
    graph, found = torch.cuda.CUDAGraph(), []
    with HostCopies(device, sent, given=True), torch.cuda.graph(graph):
        found += sends(device=device)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
