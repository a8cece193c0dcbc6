"""Is a spectral memory that is replayed the memory itself, bit for bit, wherever its state goes meanwhile?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vestige.layout import Layout
from vestige.mechanism.groups import Layers
from vestige.optim import spectral, spectrum
from vestige.optim.spectral import PATIENCE, Spectral
from vestige.randomness.release import Release
from vestige.training.loop import copied

RATE, STEPS = 0.25, 30
OUTSIDE = (2.0, 2.1)


class Rerun:
    """Stands for a recording: a replay runs the work, or nothing of it once all are `still`."""

    replays, still = 0, False

    def __init__(self, work, pool, device):
        self.work = work  # nothing is run while it is recorded

    def replay(self):
        Rerun.replays += 1
        if not Rerun.still:
            self.work()


@pytest.fixture
def replayed(monkeypatch):
    monkeypatch.setattr(spectral, "recorded", Rerun)
    monkeypatch.setattr(spectral, "can_record", lambda into: True)
    monkeypatch.setattr(Rerun, "replays", 0)
    monkeypatch.setattr(Rerun, "still", False)


def made(groups="layers", device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(14, 20), nn.LayerNorm(20), nn.Linear(20, 12)).to(device)
    points = [{name: p.detach() + 0.5 * torch.randn_like(p) for name, p in model.named_parameters()}] * STEPS
    points = [{name: p + 0.1 * torch.randn_like(p) for name, p in point.items()} for point in points]
    names = [name for name, _ in model.named_parameters()]
    grouping = Layers() if groups == "layers" else lambda _: [names[::2], names[1::2]]  # which lie apart
    layout = Layout.of(model, grouping)
    return layout, torch.randn(STEPS, layout.size).to(device), points


def filtered(memory, walk, between=lambda state: state):
    """Directions as they were, and all diagnostics as they are after the last step."""
    layout, releases, points = walk
    state, directions, shown = memory.init(layout, releases.device), [], []
    for release, point in zip(releases, points, strict=True):
        direction, state, seen = memory.step(Release(release.clone(), 1.0, 10.0, RATE), state, point)
        directions.append(direction.clone())
        shown.append(seen)
        state = between(state)
    return torch.stack(directions), shown, state


def same(one, other):
    (directions, shown, state), (others, other_shown, other_state) = one, other
    assert torch.equal(directions, others)
    for seen, wanted in zip(shown, other_shown, strict=True):
        assert seen.keys() == wanted.keys()
        for name, value in seen.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, equal_nan=True)
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, other_state[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert value == other_state[name]


CASES = [
    {},
    {"refresh": 1, "lag": 0},
    {"refresh": 1, "lag": 4},
    {"refresh": 3, "lag": 2, "window": 6},
    {"gate": "disjoint", "window": 5},
    {"gate": "open", "largest_scale": None, "warm_up": 0},
    {"window": 2},
    {"window": 1},
]


@pytest.mark.parametrize("groups", ["layers", "apart"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_steps_are_the_steps_bit_for_bit(case, groups, request):
    memory, walk = Spectral(interval=OUTSIDE, **case), made(groups)
    plain = filtered(memory, walk)
    request.getfixturevalue("replayed")
    same(filtered(memory, walk), plain)
    depth = memory.window - 1
    assert Rerun.replays == (STEPS - depth - 1 - PATIENCE - 1 if depth else 0)


def test_a_state_that_is_copied_or_rolled_back_is_met_anew(request):
    memory, walk = Spectral(interval=OUTSIDE, refresh=2, lag=1), made()
    plain = filtered(memory, walk)
    request.getfixturevalue("replayed")

    def at_times(state):
        return copied(state) if state["count"] == 20 else state

    same(filtered(memory, walk, at_times), plain)
    assert 0 < Rerun.replays < 20
    Rerun.replays = 0
    same(filtered(memory, walk, copied), plain)
    assert Rerun.replays == 0


def test_what_cannot_be_recorded_runs_as_it_is(request, monkeypatch):
    memory, walk = Spectral(interval=OUTSIDE, refresh=2, lag=1), made()
    plain = filtered(memory, walk)
    request.getfixturevalue("replayed")

    def refused(work, pool, device):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(spectral, "recorded", refused)
    with pytest.warns(UserWarning, match="cannot be recorded") as said:
        same(filtered(memory, walk), plain)
    assert len(said) == 1


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten.detach.default:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_replayed_step_launches_three_kernels_besides_the_recording(replayed):
    """The fresh release in, the warmth in, the diagnostics out; however many groups there are."""
    layout, releases, points = made()
    memory, device = Spectral(interval=OUTSIDE, refresh=1000), torch.device("cpu")
    state = memory.init(layout, device)
    for number, (release, point) in enumerate(zip(releases, points, strict=True)):
        Rerun.still = number == STEPS - 1
        with Counting() as counting:
            memory.step(Release(release, 1.0, 10.0, RATE), state, point)
    assert len(counting.seen) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_too(case, monkeypatch):
    memory, walk = Spectral(interval=OUTSIDE, **case), made(device="cuda")
    monkeypatch.setattr(spectral, "can_record", lambda into: False)
    plain = filtered(memory, walk)
    monkeypatch.undo()
    same(filtered(memory, walk), plain)
    assert memory.window == 1 or any(len(each._graphs) for each in spectral._replayed.values())


def test_the_script_finds_what_the_functions_find():
    """Bit for bit: the training waits less, and that is all."""
    script = spectrum._script()
    assert script is not None, "TorchScript does not read the functions any more"
    generator = torch.Generator().manual_seed(3)
    for trial in range(6):
        shapes = [(24, 12 + trial), (16, 40), (40, 16), (8, 3, 3, 3), (16, 3, 2, 2)]
        weights = [torch.randn(shape, generator=generator) ** 3 for shape in shapes]
        weights[trial % 5].fill_(torch.nan if trial % 2 else 0.0)
        for convention in ("flatten", "per-position"):
            grams = spectrum._grams(weights, convention)
            for _ in range(3):  # it is compiled anew after the first runs
                found = script(grams, spectrum._by_size(grams), 1e-5)
            wanted = spectrum._fitted(grams, spectrum._by_size(grams), 1e-5)
            divided = spectrum._fit(spectrum._aligned(spectrum._spectra(grams, map, 2)), 1e-5)
            torch.testing.assert_close(divided, wanted, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert found.isfinite().any()
            assert found.isnan().any()


def test_exponents_by_group_are_the_same_in_numbers_and_in_tensors():
    generator = torch.Generator().manual_seed(2)
    owners = [0, 2, 0, 1, 2, 0, 4]
    found = torch.randn(len(owners), 1, generator=generator, dtype=torch.float64)
    found[3] = torch.nan  # group 1 has no other, group 3 none at all
    found[4] = torch.nan
    one = spectral._by_group(found.flatten(), owners, 5, ())
    stacked = spectral._by_group(found.flatten(), owners, 5, (1,))
    torch.testing.assert_close(one, stacked[0], rtol=0, atol=0, equal_nan=True)
    assert one.isnan().tolist() == [False, True, False, True, False]
