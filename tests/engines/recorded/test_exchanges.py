"""Is what a pass and the host tell each other kept when it is tried out, and said again in a recording?"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from vestige import devices
from vestige.engines.per_example.recorded_ways import recording, told
from vestige.engines.recorded import exchanges
from vestige.engines.recorded.exchanges import Exchanged, Exchanges, tried
from vestige.engines.recorded.steady import Unsteady

gpu = pytest.mark.skipif(not devices.triton_available(), reason="needs a GPU and Triton")
META, CPU = torch.device("meta"), torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU


def sends(number: float = 3.0, count: int = 4, device: torch.device = META) -> list[Tensor]:
    """Whatever a model sends to its device, in every way."""
    table, place = torch.zeros(5, 3, device=device), torch.arange(count) % 5
    moved = torch.tensor(number).type_as(table)
    table[1] = torch.full((3,), number)  # a copy
    table[place] = moved  # by numbers on the host
    return [moved, table[place], torch.full((3,), number).to(device), table]


def kept(**options):
    exchanged = Exchanged()
    with Exchanges(META, exchanged):
        sends(**options)
    return exchanged


def test_what_is_sent_is_kept_in_its_order():
    assert [tuple(before.shape) for before, _ in kept().sent] == [(), (3,), (4,), (4,), (3,)]
    assert all(before.device.type == "cpu" and there.device == META for before, there in kept().sent)


def test_nothing_is_sent_where_it_is_given(monkeypatch):
    exchanged = kept()
    monkeypatch.setattr(Tensor, "to", None)  # whatever goes over
    with Exchanges(META, exchanged, given=True):
        torch.zeros(2, device=META).copy_(torch.tensor(3.0))


@pytest.mark.parametrize("other", [{"number": 4.0}, {"count": 3}])
def test_something_else_is_not_taken_for_the_same(other):
    with Exchanges(META, kept(), given=True):
        sends()
    with pytest.raises(Unsteady), Exchanges(META, kept(), given=True):
        sends(**other)


def test_more_than_was_kept_is_not_given():
    with pytest.raises(Unsteady), Exchanges(META, kept(), given=True):
        sends(), sends()


def test_on_a_host_nothing_goes_over_and_nothing_comes_back():
    exchanged, given = Exchanged(), torch.ones(3)
    with Exchanges(CPU, exchanged):
        sends(device=CPU)
        assert given.sum().item() == 3
    assert not exchanged.sent


@gpu
def test_a_recording_of_what_is_sent():
    device, exchanged = torch.device("cuda"), Exchanged()
    with Exchanges(device, exchanged):
        want = [each.clone() for each in sends(device=device)]
    graph, found = torch.cuda.CUDAGraph(), []
    with Exchanges(device, exchanged, given=True), torch.cuda.graph(graph):
        found += sends(device=device)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))


@pytest.fixture
def elsewhere(monkeypatch):
    """What lies here is taken for a device's, where there is none."""
    if DEVICE is CPU:
        monkeypatch.setattr(exchanges, "HOST", "elsewhere")


LOOKS = {
    "item": lambda found: found.sum().item(),
    "if": lambda found: bool(found.all()),
    "nonzero": lambda found: found.nonzero(),
    "equal": lambda found: torch.equal(found, found),
    **({"cpu": Tensor.cpu, "list": Tensor.tolist} if torch.cuda.is_available() else {}),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_looked_at(look):
    with pytest.raises(Unsteady, match="waits for numbers"), Exchanges(DEVICE, Exchanged()):
        LOOKS[look](torch.arange(6, device=DEVICE) + 1)


@pytest.mark.usefixtures("elsewhere")
def test_who_swallows_what_is_raised_is_found_out():
    with pytest.raises(Unsteady), Exchanges(DEVICE, Exchanged()):  # noqa: SIM117
        with contextlib.suppress(Exception):
            torch.ones(3, device=DEVICE).add_(torch.rand(3, device=DEVICE)).sum().item()


@pytest.mark.usefixtures("elsewhere")
def test_a_model_is_told_only_if_it_has_to_look():
    ways = []

    def run(number):
        ways.append((recording(), told(), torch.cuda.is_current_stream_capturing()))
        return bool(number.sum() > 0) if not torch.cuda.is_current_stream_capturing() else None

    given = torch.ones(3, device=DEVICE)
    assert tried(lambda: ways.append("no look"), DEVICE) == (None, Exchanged(False, []))
    assert tried(lambda: run(given), DEVICE) == (None, Exchanged(True, []))
    assert ways == ["no look", (True, False, False), (True, True, True)]
    assert tried(lambda: run(given), DEVICE, told=True) == (None, Exchanged(True, []))
    with pytest.raises(Unsteady):
        tried(given.sum().item, DEVICE)
    assert not recording()
    assert not told()
