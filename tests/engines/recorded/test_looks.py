"""Does the host see before a replay what it saw when the pass was recorded, and is it noticed if it does not?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vestige.engines.recorded import cuda_graphs, exchanges
from vestige.engines.recorded.cuda_graphs import Captured
from vestige.engines.recorded.exchanges import Exchanged, Exchanges, tried
from vestige.engines.recorded.looks import Otherwise, pad
from vestige.engines.recorded.steady import Unsteady
from vestige.engines.reference import Reference
from vestige.engines.rehearsal import rehearsing
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """What lies here is taken for a device's."""
    monkeypatch.setattr(exchanges, "HOST", "elsewhere")


def looked(run, *inputs: Tensor) -> Exchanged:
    kept = Exchanged()
    with Exchanges(CPU, kept, inputs=inputs):
        run(*inputs)
    return kept


MASK, TOKENS = torch.ones(3, 4, dtype=torch.long), torch.arange(12).view(3, 4)
LESS = MASK.clone().index_fill_(1, torch.tensor([3]), 0)


def test_what_follows_from_whole_numbers_is_seen_and_looked_at_again():
    kept = looked(lambda mask, tokens: bool((mask[:2].bool() & (tokens[:2] < 9)).all()), MASK, TOKENS)
    assert [look.value for look in kept.looks] == [True]
    assert kept.looked
    assert kept.holds([MASK, TOKENS])
    assert not kept.holds([LESS, TOKENS])
    assert not kept.holds([MASK, TOKENS + 5])
    assert kept.holds([MASK, TOKENS.index_fill(0, torch.tensor([2]), 99)])  # which was not looked at


def test_several_looks_must_all_hold():
    kept = looked(lambda mask, tokens: (bool(mask.all()), int(tokens.max()), bool(mask.all())), MASK, TOKENS)
    assert [look.value for look in kept.looks] == [True, 11, True]
    assert kept.holds([MASK, TOKENS])
    assert not kept.holds([MASK, TOKENS + 1])
    assert not kept.holds([LESS, TOKENS])


def test_what_no_input_has_a_say_in_need_not_be_looked_at_again():
    kept = looked(lambda mask: bool((torch.arange(4).diff() == 1).all()), MASK)
    assert [(look.value, look.at) for look in kept.looks] == [(True, None)]
    assert not kept.looked
    assert kept.holds([LESS])


NOT_FOLLOWED = {
    "numbers": lambda mask: bool((mask.float().mean() > 0.5).long()),
    "by chance": lambda mask: bool((mask * torch.randint(5, (3, 4))).sum() >= 0),
    "of chance": lambda mask: bool((torch.randint_like(mask, 5) >= 0).all()),
    "written": lambda mask: bool(mask.mul_(1).all()),
    "written later": lambda mask: bool((mask.add_(0), mask)[1].all()),
    "written elsewhere": lambda mask: bool((mask[0].add_(0), mask)[1].all()),
    "written otherwise": lambda mask: bool((mask.view(torch.float64).mul_(1), mask)[1].all()),
    "written in parts": lambda mask: bool((kept := mask.clone(), kept.split([1, 3], 1)[1].mul_(1))[0].all()),
    "written in slices": lambda mask: bool((kept := mask.clone(), kept.unbind(0)[1].zero_())[0].any()),
    "other places": lambda mask: bool(TOKENS.max() > 3),
    "beside other places": lambda mask: bool((mask + TOKENS).all() >= 0),
}


@pytest.mark.parametrize("way", NOT_FOLLOWED)
def test_what_does_not_follow_from_whole_numbers_of_inputs_alone_is_not_seen(way):
    with pytest.raises(Unsteady, match="waits for numbers"):
        looked(NOT_FOLLOWED[way], MASK.clone())


def test_in_a_recording_the_host_sees_what_it_saw():
    kept = looked(lambda mask: bool(mask.all()), MASK)
    with Exchanges(CPU, kept, given=True):
        assert bool(LESS.all()) is True  # it did not look
    with pytest.raises(Unsteady), Exchanges(CPU, kept, given=True):
        assert bool(LESS.all()) == bool(LESS.all())  # once more than before


def test_a_model_is_told_where_what_it_asks_does_not_hold():
    def run(mask):
        return "told" if torch.cuda.is_current_stream_capturing() else bool(mask.all())

    for mask, found in ((MASK, True), (LESS, "told")):
        given, kept = tried(lambda mask=mask: run(mask), CPU, inputs=[mask])
        assert given == found
        assert kept.told is (found == "told")


def test_inputs_are_loaded_before_each_try():
    mask, loads = MASK.clone(), []

    def load():
        loads.append(mask.sum().item())
        mask.copy_(LESS)

    def run():
        if not torch.cuda.is_current_stream_capturing():
            bool(mask.all())
        mask.zero_()

    tried(run, CPU, inputs=[mask], load=load)
    assert loads == [12, 0]


@pytest.mark.parametrize("count", [0, 2, 3])
def test_padding_is_the_first_row(count):
    mask, numbers = TOKENS + 1, torch.rand(3, 4)
    before = mask.clone(), numbers.clone()
    pad([mask, numbers], count)
    assert torch.equal(mask[:count], before[0][:count])
    assert torch.equal(mask[2:], before[0][:1] if count == 2 else before[0][2:])
    assert torch.equal(numbers, before[1])


# --- a step -----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A mean over tokens that a mask shows, or over all where it leaves nothing out, if that may be asked."""

    frozen: bool | None = None
    ways: tuple[bool, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        whole = Masked.frozen
        if whole is None:
            whole = not torch.cuda.is_current_stream_capturing() and bool(mask.all())
        Masked.ways += (whole,)
        words = self.words(tokens)
        shown = mask[..., None].to(words.dtype)
        return self.head(torch.tanh(words.mean(1) if whole else (words * shown).sum(1) / shown.sum(1).clamp(min=1)))


class Frozen:
    """Stands for a recording: goes the way again that it went then, whatever the batch is now."""

    def __init__(self, work):
        self.work = work
        work()
        self.way = Masked.ways[-1]

    def replay(self):
        Masked.frozen = self.way
        self.work()
        Masked.frozen = None


@pytest.fixture
def frozen(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "recorded", lambda work, pool, device: Frozen(work))
    monkeypatch.setattr(cuda_graphs, "can_record", lambda into: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(rehearsing, "_on_a_gpu", lambda environment: True)


def batch(count: int, masked: int = 0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(count, 4, dtype=torch.long)
    mask[:masked, 2:] = 0
    return [torch.randint(12, (count, 4), generator=generator), mask, torch.randint(3, (count,), generator=generator)]


def step_like_the_reference(engine: Captured, data: list[Tensor]) -> None:
    layout = engine.layout
    point = layout.parameters(engine.model)
    got, want = torch.zeros(layout.size), torch.zeros(layout.size)
    norms = engine(data, point, Flat(0.3), got)
    wanted = Reference(engine.model, F.cross_entropy, layout, engine.engine.form)(data, point, Flat(0.3), want)
    torch.testing.assert_close(norms, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_that_looks_otherwise_is_not_replayed_as_others(ahead):
    torch.manual_seed(0)
    model = Masked()
    engine = Captured(model, F.cross_entropy, Layout.of(model))
    if ahead:
        engine.expect([8, 4])
    for seed, count in enumerate((8, 7, 8, 3, 2, 4, 9, 21)):  # the last two are more than was expected
        step_like_the_reference(engine, batch(count, seed=seed))
    assert engine._padded
    assert all(not padded.exchanged.told for padded in engine._padded.values())
    assert any(padded.exchanged.looked for padded in engine._padded.values())
    assert Masked.ways[-1]
    for seed, (count, masked) in enumerate(((8, 1), (8, 0), (7, 7), (5, 1), (8, 2), (8, 0), (19, 5))):
        step_like_the_reference(engine, batch(count, masked, seed=seed))
        assert engine._told
    assert engine._padded
    assert all(padded.exchanged.told for padded in engine._padded.values())


@pytest.mark.usefixtures("frozen")
def test_a_batch_that_looks_otherwise_is_noticed_by_its_recording():
    torch.manual_seed(0)
    model = Masked()
    engine = Captured(model, F.cross_entropy, Layout.of(model))
    engine.expect([8])
    step_like_the_reference(engine, batch(8))
    (padded,) = engine._padded.values()
    with pytest.raises(Otherwise):
        padded(batch(6, 1), Flat(0.3), torch.zeros(engine.layout.size))


@pytest.mark.usefixtures("frozen")
def test_a_sample_larger_than_expected_is_taken_in_parts():
    torch.manual_seed(0)
    model = Masked()
    engine = Captured(model, F.cross_entropy, Layout.of(model))
    engine.expect([8, 4])
    for count in (8, 9, 25):
        step_like_the_reference(engine, batch(count, seed=count))
    assert {rows for rows, _ in engine._padded} == {8, 4}
