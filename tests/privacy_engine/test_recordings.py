"""Is a replayed pass the pass? Which passes are, which run as they are, and what is left behind in between?"""

import copy
import random
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from conftest import make_toy
from loops import LOSS, flat, moved, oracle, plain, private, same_step, same_step_of
from vestige import PrivacyEngine
from vestige.engines.per_example import kernels, recorded_ways
from vestige.engines.recorded import exchanges, recording
from vestige.engines.recorded.recording import sizes_of
from vestige.engines.rehearsal import rehearsing
from vestige.mechanism import clipping
from vestige.privacy_engine.recorded import padding, recorder, recordings
from vestige.privacy_engine.recorded.recordings import Recordings, Withheld

pytestmark = pytest.mark.parametrize("replayed", [True], ids=[""], indirect=True)
CAN_RECORD = recorder.can_record
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def replays(steps):
    """How many forward passes were replayed, of every size; the smallest is replayed once when it is tried."""
    counts = {}
    for known in steps.passes._recorder._known.values():
        for tape in [] if known is None else known._tapes:
            counts[tape.rows] = counts.get(tape.rows, 0) + tape.forward.replays - (tape is known._tapes[-1])
    return {rows: count for rows, count in counts.items() if count}


def test_sizes_cover_a_sample_and_are_few(monkeypatch):
    monkeypatch.setattr(recording, "MOST_SIZES", 16)
    sizes = sizes_of(1280, 0.05)
    assert sizes[0] == 88
    assert sizes[-1] <= 42
    assert len(sizes) <= 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes_of(50, 1.0) == [50]
    assert sizes_of(10**6, 0.001, 64)[0] == 64
    assert sizes_of(10**6, 0.001, 64)[-1] <= 4


def test_a_replay_is_padded_and_another_step_is_another_batch():
    steps, model, optimizer, loader = private(make_toy()[0])
    seen = set()
    for x, y in loader:
        same_step(model, optimizer, x, y)
        seen.add(len(x))
    assert sum(replays(steps).values()) == len(loader)
    assert len(seen) > 2
    assert set(replays(steps)) <= set(steps.passes._recorder.sizes)


def test_a_batch_larger_than_foreseen_runs_as_it_is():
    steps, model, optimizer, loader = private(make_toy()[0])
    steps.passes._recorder.sizes = [4]
    x, y = next(iter(loader))
    assert len(x) > 4
    same_step(model, optimizer, x, y)
    assert not replays(steps)


def test_what_the_user_keeps_is_the_users():
    steps, model, optimizer, loader = private(make_toy()[0])
    kept = []
    for x, y in loader:
        outputs = model(x)
        kept.append((outputs, outputs.detach().clone()))
        LOSS(outputs, y).backward()
        optimizer.step()
    assert len(replays(steps)) > 0
    assert all(torch.equal(now, then) for now, then in kept)


def test_a_pass_that_was_left_does_not_hinder_the_next():
    """A forward pass without a backward pass is in the memory as long as somebody may come back to it."""
    steps, model, optimizer, loader = private(make_toy()[0])
    batches = iter(loader)
    x, y = next(batches)
    held = model(x)  # looked at, and kept
    same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == 1  # the second one ran as it was
    del held
    same_step(model, optimizer, *next(batches))
    assert sum(replays(steps).values()) == 2


def test_a_backward_pass_comes_back_to_its_own_forward_pass():
    steps, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    first = LOSS(model(x), y)
    second = LOSS(model(x.flip(0)), y)  # a second view of the same examples, run as it is
    before, twin = flat(model), copy.deepcopy(model.state_dict())
    (first + second).backward()
    optimizer.step()
    moved = flat(model) - before
    other = private(make_toy()[0])
    other[1].load_state_dict(twin)
    other[0].passes._recorder.sizes = ()
    x2, _ = next(iter(other[3]))
    assert torch.equal(x2, x)
    (LOSS(other[1](x), y) + LOSS(other[1](x.flip(0)), y)).backward()
    before = flat(other[1])
    other[2].step()
    torch.testing.assert_close(moved, flat(other[1]) - before, rtol=1e-4, atol=1e-6)


def test_what_changes_in_the_model_is_not_replayed_as_it_was():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = make_toy()[0], 1.0

        def forward(self, x):
            return self.body(x) * self.scale

    steps, model, optimizer, loader = private(Scaled())
    for step, (x, y) in enumerate(loader):
        model.scale = 1.0 + (step > 2)
        same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == 3


def test_a_model_with_somebody_inside_runs_as_it_is():
    steps, model, optimizer, loader = private(make_toy()[0])
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    sizes = [len(x) for x, y in loader if same_step(model, optimizer, x, y) is None]
    assert not replays(steps)
    assert set(sizes) <= set(seen)


class Drawing(nn.Module):
    """A model that draws numbers on the host, or counts, as it is told."""

    def __init__(self, way):
        super().__init__()
        self.body, self.way, self.calls = make_toy()[0], way, 0

    def forward(self, x):
        output = self.body(x)
        if self.way.startswith("skips"):  # as layers are, with a chance of so many percent
            output = output * 1.5 if torch.rand([]) < float(self.way.split()[1]) / 100 else output
        elif self.way == "hardly moves":  # by less than rounding may
            output = output * 1.001 if torch.rand([]) < 0.5 else output
        elif self.way == "scales":
            output = output * torch.rand(1)
        elif self.way == "normal":
            torch.randn(1)
        elif self.way == "numpy":
            np.random.rand()  # noqa: NPY002
        elif self.way == "python":
            random.random()
        else:
            self.calls += 1
        return output


@pytest.mark.parametrize(
    "way", ["skips 1", "skips 99", "hardly moves", "scales", "normal", "numpy", "python", "counts"]
)
def test_a_model_that_draws_on_the_host_or_counts_runs_as_it_is(way):
    torch.manual_seed(3)
    steps, model, optimizer, loader = private(Drawing(way))
    model(next(iter(loader))[0])
    assert steps.passes._recorder._known
    assert not replays(steps)
    assert all(each is None for each in steps.passes._recorder._known.values())


@pytest.mark.parametrize("way", ["skips 0", "skips 100"])
def test_a_model_that_draws_on_the_host_to_no_purpose_is_recorded(way, monkeypatch):
    made, states = recorder.Recorder._recordings, []

    def watched(*args):
        states.append(torch.get_rng_state())
        found = made(*args)
        states.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(recorder.Recorder, "_recordings", watched)
    steps, model, optimizer, loader = private(Drawing(way))
    same_step(model, optimizer, *next(iter(loader)))
    assert replays(steps)
    assert torch.equal(*states), "what is tried and recorded draws nothing"


@pytest.mark.parametrize(("owner", "recorded"), [("transformers.utils.output_capturing", True), ("mine", False)])
def test_hooks_that_only_hand_out_activations_do_not_stop_a_recording(owner, recorded):
    def hook(module, inputs, output):
        return None

    hook.__module__ = owner
    steps, model, optimizer, loader = private(make_toy()[0])
    model[0].register_forward_hook(hook)
    same_step(model, optimizer, *next(iter(loader)))
    assert bool(replays(steps)) == recorded


def test_an_output_that_is_no_tensor_is_withheld():
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    class WithCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_toy()[0]

        def forward(self, x):
            return {"logits": self.body(x), "cache": Cache(x), "kind": "plain", "none": None}

    steps, model, optimizer, loader = private(WithCache())
    for x, y in loader:
        outputs = model(x)
        assert (outputs["kind"], outputs["none"]) == ("plain", None)
        assert isinstance(outputs["cache"], Withheld)
        with pytest.raises(AttributeError, match=r"record=False"):
            outputs["cache"].keys  # noqa: B018
        LOSS(outputs["logits"], y).backward()
        optimizer.step()
    assert sum(replays(steps).values()) == len(loader)


def test_a_wrong_recording_is_found_out(monkeypatch):
    """What a replay gives is compared with the pass itself, on made-up rows, before it is used."""

    class Stale:
        def __init__(self, work):
            self.replays = 0
            work()

        def replay(self):
            """Nothing is run again."""

    monkeypatch.setattr(recordings, "recorded", lambda work, pool, device: Stale(work))
    steps, model, optimizer, loader = private(make_toy()[0])
    same_step(model, optimizer, *next(iter(loader)))
    assert list(steps.passes._recorder._known.values()) == [None]


def test_nothing_is_recorded_where_that_was_said():
    from torch.utils.data import DataLoader, TensorDataset

    from vestige import PrivacyEngine

    model, data = make_toy()
    engine = PrivacyEngine(record=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(*data), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    optimizer.step()
    assert not engine._steps.passes._recorder._known


def test_sums_are_not_made_where_others_may_hold_on_to_a_gradient():
    steps, model, optimizer, loader = private(make_toy()[0])
    kept = []
    optimizer.register_step_pre_hook(lambda *_: kept.extend(p.grad for p in model.parameters()))
    for x, y in loader:
        LOSS(model(x), y).backward()
        optimizer.step()
    assert sum(replays(steps).values()) == len(loader)
    places = {each.untyped_storage().data_ptr() for each in kept}
    assert len(places) == 1
    assert steps.passes._vector.untyped_storage().data_ptr() not in places


@pytest.mark.parametrize("recorded", [True, False])
def test_nobody_is_twice_in_a_step_that_failed_and_was_tried_again(recorded):
    """The memory of a GPU may be full while a part is added up; whoever goes on then has lost some, and doubled none."""
    steps, model, optimizer, loader = private(make_toy()[0])
    steps.passes._recorder.sizes = steps.passes._recorder.sizes if recorded else ()
    x, y = next(iter(loader))
    before, want = flat(model), oracle(model, lambda m, x, y: LOSS(m(x), y), [*zip(x, y, strict=True)])
    LOSS(model(x), y).backward()
    add = clipping.RunningSum.lend if recorded else clipping.RunningSum.place

    def added(self, rows, *rest):
        found = add(self, rows, *rest)
        if not recorded:
            found.add_(1.0)  # as if half of it was there
        raise torch.OutOfMemoryError

    with mock.patch.object(clipping.RunningSum, add.__name__, added), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not steps.passes._pending
    LOSS(model(x), y).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)


def test_a_pass_whose_memory_another_has_is_not_clipped():
    steps, model, _, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    LOSS(model(x), y).backward()
    (waiting,) = steps.passes._pending
    waiting.replay.over()
    with pytest.raises(ValueError, match="is over"):
        waiting.replay.clip(len(x), steps.passes.start_sum())


def test_what_was_added_up_is_forgotten_with_the_state():
    steps, model, optimizer, loader = private(make_toy()[0])
    x, y = next(iter(loader))
    want = oracle(model, lambda m, x, y: LOSS(m(x), y), [*zip(x, y, strict=True)])
    saved = copy.deepcopy(steps.state_dict())
    LOSS(model(x), y).backward()
    steps.load_state_dict(saved)
    again, y = next(iter(loader))
    assert torch.equal(again, x)
    before = flat(model)
    LOSS(model(x), y).backward()
    optimizer.step()
    np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)


@pytest.mark.parametrize("together", [True, False])
def test_sums_of_several_forms_of_call_are_added_up(together, monkeypatch):
    """All of them are left in one place: in one step, or in several, between which another form is recorded."""
    monkeypatch.setattr(recorder, "PATIENCE", 1)
    steps, model, optimizer, loader = private(make_toy()[0], max_physical_batch_size=4)
    before, examples, draws = flat(model), [], 0
    forms = [lambda x: model(x), lambda x: model(input=x)]
    for number, (x, y) in enumerate(loader):
        examples += [*zip(x, y, strict=True)]
        LOSS(forms[number % 2](x), y).backward()
        last = steps.passes._pending[-1].part.last
        if draws and together and not last and number % 2:
            continue
        want = oracle(model, lambda m, x, y: LOSS(m(x), y), examples) if last else None
        optimizer.step()
        if last:
            np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)
            before, examples, draws = flat(model), [], draws + 1
    assert len(steps.passes._recorder._known) == 2


def test_a_model_may_take_notice_from_some_length_on(monkeypatch):
    """Of ten words the first ten are all; of five they are not, with five more behind them."""
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    steps, model, optimizer, loader = private(Reader("some"), (torch.arange(120), torch.randint(3, (120,))))
    for length, (rows, y) in zip([40, 32, 6, 6, 6, 30], loader, strict=False):
        ids, mask = texts_of_a_batch(len(rows), length)
        before = flat(model)
        examples = [*zip(ids, mask, y, strict=True)]
        want = oracle(model, lambda m, *each: LOSS(m(*(part.long() for part in each[:2])), each[2].long()), examples)
        optimizer.zero_grad()
        LOSS(model(ids, mask), y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)
    (texts,) = steps.passes._recorder._texts.values()
    assert texts.stretch is not None
    assert texts.unnoticed[(32, 0), (40, 0)]
    assert not all(texts.unnoticed.values())


@pytest.mark.parametrize("positions", [156, None])
def test_lengths_that_grow_do_not_use_up_the_recordings(positions, monkeypatch):
    """Where a model says how long texts may be, they are padded beyond the longest that was met."""
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    reader = Reader("mask")
    reader.words_by_pos = nn.Embedding(positions or 1, 1)  # a table that says how many positions there are
    reader.words_by_pos.requires_grad_(False)
    if positions:
        reader.config = SimpleNamespace(max_position_embeddings=positions)
    steps, model, _, loader = private(reader, (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for length in (length for length in range(20, 80) for _ in range(2)):
        model(*texts_of_a_batch(len(rows), length))
    (texts,) = steps.passes._recorder._texts.values()
    if not positions:
        assert texts.grown == recorder.MOST_LENGTHS  # no more than that
        return
    assert [*texts.lengths] == [(92, 0)]  # a few positions may be taken by something else
    assert texts.grown == 4  # 32, 48, 64, 92
    made = sum(replays(steps).values())
    for length in (75, 33, 40, 33, 20):
        model(*texts_of_a_batch(len(rows), length))
    assert sum(replays(steps).values()) == made + 5
    assert set(texts.lengths) == {(92, 0), (48, 0), (32, 0)}
    assert len({id(each.room) for each in texts.lengths.values()}) == 1


def test_where_longer_ones_cannot_be_recorded_shorter_ones_still_are(monkeypatch):
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    made = recorder.Recorder._recordings

    def no_longer(own, asked, sizes, room, stretch, long):
        return None if long[0] > 150 else made(own, asked, sizes, room, stretch, long)

    monkeypatch.setattr(recorder.Recorder, "_recordings", no_longer)
    steps, model, _, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for length in (20, 30, 30, 60, 60, 140, 140, 180, 180, 170, 170, 160, 160, 175, 175):
        model(*texts_of_a_batch(len(rows), length))
    (texts,) = steps.passes._recorder._texts.values()
    assert texts.refused == 160
    for length in (140, 60, 140, 30, 30, 175, 30):
        model(*texts_of_a_batch(len(rows), length))
    assert max(texts.lengths) == (140, 0)
    made_before = sum(replays(steps).values())
    for length in (140, 60, 130, 30):
        model(*texts_of_a_batch(len(rows), length))
    assert sum(replays(steps).values()) == made_before + 4


def test_texts_are_not_padded_beyond_what_a_model_is_known_to_take():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    roberta = transformers.RobertaConfig(**small, vocab_size=40, max_position_embeddings=200, pad_token_id=20)
    assert padding.most_positions(transformers.RobertaModel(roberta)) == 200 - 20 - padding.SPARE
    gpt = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=200)
    assert padding.most_positions(transformers.GPT2LMHeadModel(gpt)) == 200 - padding.SPARE
    prompts = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20)
    assert padding.most_positions(peft.get_peft_model(transformers.GPT2LMHeadModel(gpt), prompts)) == 0
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(transformers.GPT2LMHeadModel(gpt), adapters)
    assert padding.most_positions(adapted) == 200 - padding.SPARE
    distances = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40)
    assert padding.most_positions(transformers.T5ForConditionalGeneration(distances)) == padding.ANY_LENGTH
    assert padding.most_positions(nn.Linear(2, 2)) == 0


def test_a_trial_leaves_buffers_as_they_were(monkeypatch):
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    reader = Reader("mask")
    reader.register_buffer("seen", torch.zeros(3))
    forward = Reader.forward

    def counting(self, ids, mask):
        if not self.training:
            self.seen.add_(1)
        return forward(self, ids, mask)

    monkeypatch.setattr(Reader, "forward", counting)
    steps, model, _, loader = private(reader, (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    place = reader.seen.data_ptr()
    for length in (30, 24, 24, 12, 12, 11):
        model(*texts_of_a_batch(len(rows), length))
    (texts,) = steps.passes._recorder._texts.values()
    assert len(texts.lengths) > 1
    assert not reader.seen.any()
    assert reader.seen.data_ptr() == place


def test_where_there_is_no_room_to_try_texts_stay_as_they_are(monkeypatch):
    def full(module):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    monkeypatch.setattr(padding, "_beside", full)
    steps, model, _, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for length in (30, 24):
        model(*texts_of_a_batch(len(rows), length))
    (texts,) = steps.passes._recorder._texts.values()
    assert texts.tried
    assert texts.stretch is None


def test_models_that_nobody_knows_are_not_padded_further():
    steps, model, _, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for length in (30, 24, 24, 24):
        model(*texts_of_a_batch(len(rows), length))
    (texts,) = steps.passes._recorder._texts.values()
    assert texts.tried
    assert texts.stretch is None


def test_nothing_is_recorded_in_memory_that_a_pass_is_in(monkeypatch):
    monkeypatch.setattr(recorder, "PATIENCE", 1)
    steps, model, optimizer, loader = private(Reader("last"), (torch.arange(120), torch.randint(3, (120,))))
    rows, y = next(iter(loader))
    held = model(*texts_of_a_batch(len(rows), 30))
    (texts,) = steps.passes._recorder._texts.values()
    model(*texts_of_a_batch(len(rows), 24))
    assert [*texts.lengths] == [(30, 0)]
    del held
    model(*texts_of_a_batch(len(rows), 24))
    assert [*texts.lengths] == [(30, 0), (24, 0)]


class Asks(nn.Module):
    """Spreads a bias over all examples where it is told that it is recorded, and looks at numbers where it is not, as
    masks of transformers' do."""

    def __init__(self, at):
        super().__init__()
        self.linear, self.bias, self.at = nn.Linear(5, 3), nn.Parameter(torch.zeros(1, 3)), at

    def forward(self, x):
        told = recorded_ways.told() and torch.cuda.is_current_stream_capturing()
        ASKED.append(told)
        if not told:
            assert self.at == "nothing" or bool((x.detach() < 1e6).all())
        bias = self.bias + torch.zeros(len(x) if told else 1, 1)
        return torch.tanh(self.linear(x)) + bias


ASKED = []


@pytest.mark.parametrize("at", ["nothing", "examples"])
def test_a_model_goes_another_way_in_a_recording_only_if_it_has_to(at, monkeypatch):
    rerun = recordings.recorded

    def as_recorded(work, pool, device):
        told = recorded_ways.told()
        assert recorded_ways.recording()

        def again():
            with recorded_ways.as_if_recorded(told):
                work()

        return rerun(again, pool, device)

    monkeypatch.setattr(exchanges, "HOST", "elsewhere")
    monkeypatch.setattr(recordings, "recorded", as_recorded)
    monkeypatch.setattr(rehearsing, "_on_a_gpu", lambda environment: True)
    steps, model, optimizer, loader = private(Asks(at))
    for x, y in loader:
        same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == len(loader)
    model(x)
    assert ASKED[-1] is (at == "examples")


class Masked(nn.Module):
    """A mean over the numbers that a mask shows, or over all where it leaves nothing out, if that may be asked."""

    frozen = None
    ways: ClassVar = []

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x, mask):
        whole = Masked.frozen
        if whole is None:
            whole = not torch.cuda.is_current_stream_capturing() and bool(mask.all())
        Masked.ways.append(whole)
        x, shown = torch.tanh(self.first(x[..., None])), mask[..., None].to(x.dtype)
        return self.last(x.mean(1) if whole else (x * shown).sum(1) / shown.sum(1).clamp(min=1))


@pytest.mark.parametrize("masked", [0, 1, 11])
def test_a_batch_that_looks_otherwise_is_not_replayed_as_others(masked, monkeypatch):
    """Masks leave out something from some example on: of none, of some in a later batch, of many at once."""

    def record(work, pool, device):
        told, made = recorded_ways.told(), []

        def again():
            Masked.frozen = made[0] if made else None
            with recorded_ways.as_if_recorded(told):
                work()
            Masked.frozen = None
            made.append(Masked.ways[-1])

        return rerun(again, pool, device)

    rerun = recordings.recorded
    monkeypatch.setattr(exchanges, "HOST", "elsewhere")
    monkeypatch.setattr(recordings, "recorded", record)
    monkeypatch.setattr(rehearsing, "_on_a_gpu", lambda environment: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    (x, y), mask = make_toy()[1], torch.ones(len(make_toy()[1][0]), 5, dtype=torch.long)
    model = Masked()
    steps, model, optimizer, loader = private(model, (x, mask, y))
    for number, (x, mask, y) in enumerate(chain(loader, loader)):
        if masked == 11 or (masked and number >= 3):
            mask[:masked, 3:] = 0
        same_step_of(lambda m, x, mask, y: LOSS(m(x, mask), y), model, optimizer, x, mask, y)
        told = masked == 11 or bool(masked and number >= 3)
        assert {each._exchanged[tape.rows].told for each in known(steps) for tape in each._tapes} == {told}
    assert sum(replays(steps).values()) > 2


def known(steps):
    return [each for each in steps.passes._recorder._known.values() if each is not None]


class WithLosses(nn.Module):
    """Losses of its examples, and a number that is nobody's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, labels):
        logits = self.linear(x)
        losses = {"loss": nn.functional.cross_entropy(logits, labels, reduction="none"), "seen": labels[:, None] / 2}
        return {**losses, "logits": logits, "number": self.linear.weight.detach().sum()}


def test_a_number_beside_losses_of_rows_is_not_taken_for_the_loss():
    steps, model, optimizer, loader = private(WithLosses())
    for x, y in loader:
        outputs = model(x, labels=y)
        assert outputs["number"].item() == pytest.approx(float(model.linear.weight.detach().sum()), abs=1e-5)
        outputs["loss"].backward()
        optimizer.step()
    assert not replays(steps)


class Reader(nn.Module):
    """Says something of each token, or of the whole text: of what the mask shows, of the last state, of everything, of
    the last word wherever that is, of everything but what was long to begin with, of more once it was trained."""

    def __init__(self, way):
        super().__init__()
        self.way, self.words, self.head = way, nn.Embedding(20, 6), nn.Linear(6, 3)
        self.recurrent, self.gate = nn.GRU(6, 6, batch_first=True), nn.Parameter(torch.zeros(()))
        self.merged = 0

    def train(self, mode=True):
        self.merged += not mode  # as adapters do that are put into the weights then
        return super().train(mode)

    def forward(self, input_ids, attention_mask):
        x, mask = self.words(input_ids), attention_mask[..., None].float()
        if self.way == "side":
            length = input_ids.shape[1]
            at = torch.where(attention_mask[:, -1] == 1, length - 1, attention_mask.sum(1) - 1).clamp(min=0)
            return self.head(torch.tanh(x)[torch.arange(len(x), device=x.device), at])
        if self.way == "gate":
            return self.head(torch.tanh((x * mask).sum(1) / mask.sum(1).clamp(min=1) + self.gate * x.mean(1)))
        if self.way == "some":
            return self.head(torch.tanh(x[:, :10].mean(1)))
        if self.way == "tokens":
            return self.head(torch.tanh(self.recurrent(x)[0]))
        if self.way == "mask":
            return self.head(torch.tanh((x * mask).sum(1) / mask.sum(1).clamp(min=1)))
        return self.head(self.recurrent(x)[0][:, -1] if self.way == "last" else torch.tanh(x.mean(1)))


def texts_of_a_batch(rows, longest):
    """Padded to the longest of them, as tokenizers' collators do."""
    ids = torch.randint(1, 20, (rows, longest))
    words = torch.randint(1, longest + 1, (rows, 1)).index_fill_(0, torch.tensor([0]), longest)
    mask = (torch.arange(longest) < words).long()
    return ids * mask, mask


@pytest.mark.parametrize(
    ("way", "padded"),
    [("tokens", True), ("mask", True), ("last", False), ("all", False), ("side", False), ("gate", False)],
)
def test_texts_of_other_lengths_are_padded_where_the_model_takes_no_notice(way, padded, monkeypatch):
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    torch.manual_seed(4)
    data = torch.arange(120), torch.randint(3, (120,))
    steps, model, optimizer, loader = private(Reader(way), data)
    seen, longest = [], [30, 24, 12, 30, 24, 12, 29, 11, 23, 7, 30, 40, 40, 39, 33, 13, 10]
    batches = (batch for _ in range(3) for batch in loader)
    for length, (rows, y) in zip(longest, batches, strict=False):
        ids, mask = texts_of_a_batch(len(rows), length)
        targets = y if way != "tokens" else torch.where(mask > 0, ids % 3, -100)
        before, made = flat(model), sum(replays(steps).values())

        def loss(m, ids, mask, y):
            outputs = m(ids, mask)
            return LOSS(outputs, y) if way != "tokens" else LOSS(outputs.flatten(0, 1), y.flatten(), ignore_index=-100)

        want = oracle(
            model, lambda m, *each: loss(m, *(part.long() for part in each)), [*zip(ids, mask, targets, strict=True)]
        )
        out = model(ids, mask)
        assert out.shape[: 2 if way == "tokens" else 1] == ids.shape[: 2 if way == "tokens" else 1]
        del out
        optimizer.zero_grad()
        loss(model, ids, mask, targets).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)
        seen.append((length, sum(replays(steps).values()) - made))
    texts = next(iter(steps.passes._recorder._texts.values()))
    assert (texts.stretch is not None) is padded
    assert model.merged == 0
    if padded:
        assert {long[0] for long in texts.lengths} == {48, 16}  # rounded, and the shorter ones made anew
        assert all(count for length, count in seen[6:11])
        assert len({id(each.room) for each in texts.lengths.values()}) == 1
    else:
        assert set(texts.lengths) == {(30, 0)}
        assert all(bool(count) is (length == 30) for length, count in seen)


def test_what_cannot_be_recorded_at_one_length_is_not_tried_at_others(monkeypatch):
    tried = []

    def refused(*given):
        tried.append(given)
        raise recorder.Unsteady

    monkeypatch.setattr(recorder, "PATIENCE", 1)
    monkeypatch.setattr(recorder, "Recordings", refused)
    _, model, _, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for length in (30, 24, 12, 24, 30):
        model(*texts_of_a_batch(len(rows), length))
    assert len(tried) == 1


def test_of_a_model_that_is_another_at_every_pass_little_is_kept(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_MET", 3)
    steps, model, _, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    rows, _ = next(iter(loader))
    for number in range(8):
        model.number = number
        model(*texts_of_a_batch(len(rows), 20))
    own = steps.passes._recorder
    assert len(own._texts) <= 3
    assert len(own._met) <= 3


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tiny |= {"vocab_size": 40, "max_position_embeddings": 96}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 96, "eos_token_id": 0}
    gpt |= {"bos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40, "dropout_rate": 0.0}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    kind, config, options = {
        "BERT": ("BertForSequenceClassification", "BertConfig", tiny | still),
        "BERT without a mask": ("BertForSequenceClassification", "BertConfig", tiny | still),
        "RoBERTa": ("RobertaForTokenClassification", "RobertaConfig", tiny | still),
        "DeBERTa": ("DebertaV2ForSequenceClassification", "DebertaV2Config", tiny | still | relative),
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", gpt),
        "T5": ("T5ForConditionalGeneration", "T5Config", {**t5, "decoder_start_token_id": 0}),
    }[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def padded_to_the_longest(name):
    """A collate function as tokenizers have it."""

    def collate(rows):
        longest, written = max(len(ids) for ids, _ in rows), max(len(ids) for ids, _ in rows) // 2 + 2
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
        labels = torch.full((len(rows), written if name == "T5" else longest), -100)
        for place, (row, _) in enumerate(rows):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
            said = row[: len(row) // 2 + 2] if name == "T5" else row if name == "GPT-2" else row % 2
            labels[place, : len(said)] = said
        if name not in ("RoBERTa", "GPT-2", "T5"):
            labels = torch.stack([label for _, label in rows])
        shown = {} if name == "BERT without a mask" else {"attention_mask": mask}
        return {"input_ids": ids, **shown, "labels": labels}

    return collate


TEXTS = ["BERT", "RoBERTa", "GPT-2", "T5"]


def trained_on_texts(name, record, device="cpu"):
    """The engine, how many steps it took, and how far the parameters have come."""
    generator = torch.Generator().manual_seed(3)
    words = (6 + 60 * torch.rand(80, generator=generator) ** 4).long()
    data = [(torch.randint(3, 40, (int(n),), generator=generator), n % 2) for n in words]
    model, engine = hugging_face(name).to(device).train(), PrivacyEngine(reproducible=3, record=record)
    before = flat(model)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1e-6, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=8, collate_fn=padded_to_the_longest(name)),
    )  # fmt: skip
    for batch in loader:
        optimizer.zero_grad()
        model(**{key: part.to(device) for key, part in batch.items()}).loss.backward()
        optimizer.step()
    return engine, len(loader), flat(model) - before


@pytest.mark.parametrize("name", [*TEXTS, "DeBERTa", "BERT without a mask"])
def test_texts_padded_to_the_longest_are_replayed_and_train_as_they_are(name):
    engine, steps, padded = trained_on_texts(name, record=True)
    (texts,) = engine._steps.passes._recorder._texts.values()
    assert (texts.stretch is not None) is (name in TEXTS)  # DeBERTa takes notice where a text begins with padding
    assert name not in TEXTS or sum(replays(engine._steps).values()) >= steps - 2
    _, _, exact = trained_on_texts(name, record=False)
    assert (padded - exact).norm() <= 1e-4 * exact.norm()


def test_outputs_whose_rows_are_laid_apart_are_the_users_as_they_always_are(monkeypatch):
    monkeypatch.setattr(kernels, "ALIGNED", {"cpu"})
    monkeypatch.setattr(kernels, "LONG", 2)
    monkeypatch.setattr(kernels, "LARGE", 1)
    steps, model, optimizer, loader = private(make_toy()[0])
    for x, y in loader:
        same_step(model, optimizer, x, y)
        assert model(x).is_contiguous()
    assert sum(replays(steps).values()) >= len(loader)
    (known,) = steps.passes._recorder._known.values()
    assert [end.stride() for end in known.ends] == [(32, 1)]


@gpu
@pytest.mark.parametrize("name", TEXTS)
def test_on_a_gpu_too(name, monkeypatch):
    monkeypatch.setattr(recordings, "recorded", recording.recorded)
    monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    begun, begin = [], Recordings.begin
    monkeypatch.setattr(Recordings, "begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    engine, steps, padded = trained_on_texts(name, record=True, device="cuda")
    (texts,) = engine._steps.passes._recorder._texts.values()
    assert texts.stretch is not None
    assert sum(each is not None for each in begun) >= steps - 3
    _, _, exact = trained_on_texts(name, record=False, device="cuda")
    assert (padded - exact).norm() <= 1e-2 * exact.norm()


class Warm(nn.Module):
    """Divides by a temperature that comes with every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, temperature):
        return self.linear(x) / temperature


@gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_temperature_that_falls_falls_in_replays_too(where, monkeypatch):
    monkeypatch.setattr(recordings, "recorded", recording.recorded)
    monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    data = torch.randn(120, 5).cuda(), torch.randint(3, (120,)).cuda()
    steps, model, optimizer, loader = private(Warm().cuda(), data)
    for number, (x, y) in enumerate(loader):

        def loss(model, x, y, temperature=1 / (1 + number)):
            return LOSS(model(x, torch.tensor(temperature, dtype=x.dtype, device=where if x.is_cuda else "cpu")), y)

        same_step_of(loss, model, optimizer, x, y, rtol=5e-3, atol=5e-4)
    assert bool(known(steps)) is (where == "cuda")


@gpu
def test_on_a_gpu_a_mask_is_asked_before_every_replay(monkeypatch):
    monkeypatch.setattr(recordings, "recorded", recording.recorded)
    monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    data = torch.randn(120, 5).cuda(), torch.ones(120, 5, dtype=torch.long).cuda(), torch.randint(3, (120,)).cuda()
    steps, model, optimizer, loader = private(Masked().cuda(), data)
    for number, (x, mask, y) in enumerate(chain(loader, loader)):
        if number >= 4:
            mask[: number % 3, 3:] = 0
        same_step_of(
            lambda m, x, mask, y: LOSS(m(x, mask), y), model, optimizer, x, mask, y, rtol=5e-3, atol=5e-4
        )  # fmt: skip
        assert {each._exchanged[tape.rows].told for each in known(steps) for tape in each._tapes} == {number >= 4}


class Keeping(nn.Module):
    """Keeps a table for each length, or for each shape, beside the module: nobody is told of it."""

    TABLES: ClassVar = {}

    def __init__(self, by_shape):
        super().__init__()
        self.by_shape, self.words, self.head = by_shape, nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        key = input_ids.shape if self.by_shape else input_ids.shape[1:], input_ids.device.type
        if key not in self.TABLES:
            self.TABLES[key] = torch.ones(1 << 19, device=input_ids.device)
        x, mask = self.words(input_ids), attention_mask[..., None] * self.TABLES[key][0]
        return self.head(torch.tanh((x * mask).sum(1) / mask.sum(1).clamp(min=1)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("by_shape", [False, True])
def test_what_a_model_keeps_for_itself_is_not_written_over(by_shape, device, monkeypatch):
    if device == "cuda":
        monkeypatch.setattr(recordings, "recorded", recording.recorded)
        monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    torch.manual_seed(4)
    data = torch.arange(120).to(device), torch.randint(3, (120,)).to(device)
    steps, model, optimizer, loader = private(Keeping(by_shape).to(device), data)
    batches = (batch for _ in range(3) for batch in loader)
    for length, (rows, y) in zip([40, 12, 12, 40, 13, 24, 23, 40, 10, 33], batches, strict=False):
        ids, mask = texts_of_a_batch(len(rows), length)
        before, alone = flat(model).cpu(), plain(model).cpu()
        want = oracle(
            alone, lambda m, i, k, t: LOSS(m(i.long(), k.long()), t.long()), [*zip(ids, mask, y.cpu(), strict=True)]
        )
        optimizer.zero_grad()
        LOSS(model(ids.to(device), mask.to(device)), y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model).cpu()), want, rtol=1e-2, atol=1e-4)
        assert all(bool((table == 1).all()) for table in Keeping.TABLES.values())
    (texts,) = steps.passes._recorder._texts.values()
    assert len(texts.lengths) > 1
    assert texts.room.lends is not (by_shape and device == "cuda")


def test_where_something_stays_in_the_memory_of_recordings_all_are_made_again_elsewhere(monkeypatch):
    monkeypatch.setattr(padding, "of_transformers", lambda module: True)
    steps, model, optimizer, loader = private(Reader("mask"), (torch.arange(120), torch.randint(3, (120,))))
    held, rooms = [0], []
    monkeypatch.setattr(recordings, "allocated", lambda device: held[0])
    tried = Recordings._tried

    def leaving(own, rows):
        held[0] += own.room.used  # only what is tried beside others leaves something
        rooms.append((own.long, own.room.used, own.room.lends))
        return tried(own, rows)

    monkeypatch.setattr(Recordings, "_tried", leaving)
    begin = Recordings.begin

    def begun(own, *given):
        replay = begin(own, *given)
        assert replay is None or not own.room.spoiled
        return replay

    monkeypatch.setattr(Recordings, "begin", begun)
    batches = (batch for _ in range(3) for batch in loader)
    for length, (rows, y) in zip([40, 12, 12, 40, 12, 40, 12, 12, 40], batches, strict=False):
        ids, mask = texts_of_a_batch(len(rows), length)
        before = flat(model)
        want = oracle(
            model, lambda m, i, k, t: LOSS(m(i.long(), k.long()), t.long()), [*zip(ids, mask, y, strict=True)]
        )
        optimizer.zero_grad()
        LOSS(model(ids, mask), y).backward()
        optimizer.step()
        np.testing.assert_allclose(moved(before, flat(model)), want, rtol=1e-3, atol=3e-5)
    (texts,) = steps.passes._recorder._texts.values()
    assert set(texts.lengths) == {(48, 0), (16, 0)}
    assert not texts.room.lends
    assert rooms[:2] == [((40, 0), False, True), ((16, 0), True, True)]  # the second spoils it
    assert all(not lends for _, _, lends in rooms[2:])


@gpu
def test_large_outputs_of_batches_of_any_size_need_no_more_memory_than_the_largest(monkeypatch):
    monkeypatch.setattr(recordings, "recorded", recording.recorded)
    monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    data = torch.randn(400, 8).cuda(), torch.randint(3, (400,)).cuda()
    _, model, optimizer, loader = private(nn.Linear(8, 1 << 19).cuda(), data, batch=40)
    seen = []
    for x, y in (batch for _ in range(3) for batch in loader):
        optimizer.zero_grad()
        LOSS(model(x) * 2, y).backward()
        optimizer.step()
        seen.append(torch.cuda.memory_reserved())
    assert max(seen) <= 1.05 * seen[1]


class Checkpointed(nn.Module):
    """Its blocks recompute their activations, or keep them elsewhere."""

    def __init__(self, how="checkpoint"):
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head, self.dropout = nn.Linear(5, 3), nn.Dropout(0.5 if how == "dropout" else 0.0)

    def block(self, block, x):
        return torch.tanh(self.dropout(block(x)))

    def forward(self, x):
        for block in self.blocks:
            if self.how == "elsewhere":
                with torch.autograd.graph.save_on_cpu():
                    x = self.block(block, x)
            elif self.how in {"large", "small"} and (len(x) < 12) is (self.how == "large"):
                x = self.block(block, x)
            else:
                x = checkpoint(self.block, block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("how", ["checkpoint", "large", "small", "elsewhere"])
def test_activations_may_be_recomputed_in_a_recording_but_not_kept_elsewhere(how):
    steps, model, optimizer, loader = private(Checkpointed(how))
    for x, y in loader:
        same_step(model, optimizer, x, y)
    assert sum(replays(steps).values()) == (0 if how == "elsewhere" else len(loader))
    (known,) = steps.passes._recorder._known.values()
    assert known is None or known._recomputes  # even if the last that was tried did not


def test_a_second_backward_pass_may_keep_its_activations_elsewhere():
    def trained(record):
        engine, model = PrivacyEngine(reproducible=3, record=record), make_toy()[0]
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1e-6,
            data_loader=DataLoader(TensorDataset(*make_toy()[1]), batch_size=8), max_grad_norm=1.0,
        )  # fmt: skip
        for x, y in loader:
            loss = LOSS(model(x), y)
            loss.backward(retain_graph=True)
            with torch.autograd.graph.save_on_cpu():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine, flat(model)

    engine, twice = trained(record=True)
    assert sum(replays(engine._steps).values())
    torch.testing.assert_close(twice, trained(record=False)[1], rtol=1e-4, atol=1e-6)


KEPT = {"mode": None, "rows": {}}


class Offloading(nn.Module):
    """What it keeps on the host is, in a recording, what it kept when it was tried out."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if KEPT["mode"] == "tried":
            KEPT["rows"][len(x)] = x.detach().clone()
        elif KEPT["mode"] == "replayed":
            x = x + (KEPT["rows"][len(x)] - x).detach()
        return self.head(x)


def test_what_was_made_up_is_not_taken_for_a_constant(monkeypatch):
    """A replay is compared on other rows than the pass was tried with."""

    @contextmanager
    def mode(name):
        KEPT["mode"] = name
        yield
        KEPT["mode"] = None

    rerun = recordings.recorded

    def frozen(work, pool, device):
        made = rerun(work, pool, device)
        made.work = mode("replayed")(work)
        return made

    tried = recordings.tried
    monkeypatch.setattr(recordings, "tried", lambda *given: mode("tried")(tried)(*given))
    monkeypatch.setattr(recordings, "recorded", frozen)
    steps, model, optimizer, loader = private(Offloading())
    for x, y in loader:
        same_step(model, optimizer, x, y)
    assert [*steps.passes._recorder._known.values()] == [None]


@gpu
@pytest.mark.parametrize("how", ["checkpoint", "dropout"])
def test_on_a_gpu_activations_are_recomputed_in_a_recording_if_nothing_is_drawn(how, monkeypatch):
    monkeypatch.setattr(recordings, "recorded", recording.recorded)
    monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    data = torch.randn(120, 5).cuda(), torch.randint(3, (120,)).cuda()
    steps, model, optimizer, loader = private(Checkpointed(how).cuda(), data)
    for x, y in loader:
        before, alone = flat(model).cpu(), plain(model).cpu()
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
        if how == "checkpoint":
            want = oracle(alone, lambda m, x, y: LOSS(m(x), y), [*zip(x.cpu(), y.cpu(), strict=True)])
            np.testing.assert_allclose(moved(before, flat(model).cpu()), want, rtol=1e-2, atol=1e-4)
    (known,) = steps.passes._recorder._known.values()
    assert (known is not None) is (how == "checkpoint")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_language_models_with_checkpointing_and_adapters_are_recorded(device, monkeypatch):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    if device == "cuda":
        monkeypatch.setattr(recordings, "recorded", recording.recorded)
        monkeypatch.setattr(recorder, "can_record", CAN_RECORD)
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=40,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(40, (60, 10))]

    def trained(record):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"])).to(device).train()
        engine, before = PrivacyEngine(reproducible=3, record=record), flat(model)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
            data_loader=DataLoader(rows, batch_size=6), noise_multiplier=1e-6, max_grad_norm=1.0,
        )  # fmt: skip
        for batch in loader:
            optimizer.zero_grad()
            model(**{key: part.to(device) for key, part in batch.items()}).loss.backward()
            optimizer.step()
        return engine._steps.passes._recorder, flat(model) - before

    own, replayed = trained(record=True)
    assert any(each is not None for each in own._known.values())
    _, exact = trained(record=False)
    assert (replayed - exact).norm() <= 1e-2 * exact.norm()
