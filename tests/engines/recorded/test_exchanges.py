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
KINDS = [torch.device("cuda")] if torch.cuda.is_available() else [CPU]


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
    assert not exchanged.any


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


def positions(device: torch.device) -> Tensor:
    """Made of what Python gave, in several operations, in place and through a view."""
    found = torch.arange(6, device=device).expand(2, -1) + 1
    wide = torch.zeros(2, 6, dtype=torch.long, device=device)
    wide[:, 1:].add_(found[:, :-1])
    return wide


@pytest.fixture
def elsewhere(monkeypatch):
    """What lies here is taken for a device's, where there is none."""
    if CPU in KINDS:
        monkeypatch.setattr(exchanges, "HOST", "elsewhere")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("device", KINDS)
def test_what_the_host_sees_of_its_own_numbers_is_kept_and_said_again(device):
    exchanged = Exchanged()
    with Exchanges(device, exchanged):
        seen = [bool((torch.diff(positions(device)) == 1).all()), positions(device).sum().item()]
    assert seen == exchanged.seen == [True, 30]
    said = Exchanged(seen=[31, False])
    with Exchanges(device, said, given=True):
        assert [positions(device).sum().item(), bool(positions(device).all())] == [31, False]
        with pytest.raises(Unsteady):
            positions(device).sum().item()


OTHERS = {
    "given": lambda own, other: other,
    "made of it": lambda own, other: own + other,
    "copied there": lambda own, other: own.copy_(other),
    "copied to a view": lambda own, other: (own[:1].copy_(other[:1]), own)[1],
    "many at once": lambda own, other: (torch._foreach_add_([own], [other]), own)[1],
    "written there": lambda own, other: (torch.add(other, 1, out=own), own)[1],
    "drawn": lambda own, other: torch.randint_like(own, 2),
    "drawn there": lambda own, other: own.random_(2),
    "memory as it was": lambda own, other: torch.empty_like(own).fill_(3),
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("how", OTHERS)
def test_what_others_have_a_say_in_is_not_looked_at(how, device):
    other = torch.ones(2, 6, dtype=torch.long, device=device)
    looked = {
        "item": lambda found: found.sum().item(),
        "if": lambda found: bool(found.all()),
        "nonzero": lambda found: found.nonzero(),
        "equal": lambda found: torch.equal(found, found),
        **({"cpu": Tensor.cpu, "list": Tensor.tolist} if device.type == "cuda" else {}),
    }
    for look in looked.values():
        with pytest.raises(Unsteady), Exchanges(device, Exchanged()):
            look(OTHERS[how](positions(device), other))


@pytest.mark.usefixtures("elsewhere")
def test_who_swallows_what_is_raised_is_found_out():
    with pytest.raises(Unsteady), Exchanges(KINDS[0], Exchanged()):  # noqa: SIM117
        with contextlib.suppress(Exception):
            torch.ones(3, device=KINDS[0]).add_(torch.rand(3, device=KINDS[0])).sum().item()


@pytest.mark.usefixtures("elsewhere")
def test_a_model_is_told_only_if_it_has_to_look():
    ways = []

    def run(number):
        ways.append((recording(), told(), torch.cuda.is_current_stream_capturing()))
        return bool(number.sum() > 0) if not torch.cuda.is_current_stream_capturing() else None

    assert tried(lambda: run(torch.ones(3, device=KINDS[0])), KINDS[0]) == (True, Exchanged(False, [], [True]))
    assert ways == [(True, False, False)]
    given = torch.ones(3, device=KINDS[0])
    assert tried(lambda: run(given), KINDS[0]) == (None, Exchanged(True, [], []))
    assert ways[1:] == [(True, False, False), (True, True, True)]
    assert tried(lambda: run(torch.ones(3, device=KINDS[0])), KINDS[0], told=True) == (None, Exchanged(True, [], []))
    with pytest.raises(Unsteady):
        tried(given.sum().item, KINDS[0])
    assert not recording()
    assert not told()
