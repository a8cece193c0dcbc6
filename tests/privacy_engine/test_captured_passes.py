"""Do captured passes give what the passes themselves give? Beside uncaptured ones, without a GPU and with one."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import vestige
from captured_on_cpu import captured_on_cpu
from other_models import calm
from vestige.engines import cuda_graphs
from vestige.privacy_engine import captured_passes

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import defaults

sys.path.pop(0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def trained(name: str, device: str, captured: bool, steps: int = 4):
    torch.manual_seed(0)
    model = defaults.MODELS[name]
    module = calm(model.build(True)).to(device).train()
    module = module.float()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    engine = vestige.PrivacyEngine(reproducible=3, cuda_graphs=captured)
    module, optimizer, loader = engine.make_private(
        module=module, optimizer=optimizer, noise_multiplier=1e-6, max_grad_norm=1.0,
        data_loader=DataLoader(defaults.Rows(model, True), batch_size=6, collate_fn=defaults.collate),
    )  # fmt: skip
    with captured_on_cpu() if device == "cpu" and captured else nullcontext() as graphs:
        for number, batch in enumerate(defaults.batches(model, loader, torch.device(device))):
            optimizer.zero_grad()
            defaults.loss_of(model, module, batch).backward()
            optimizer.step()
            if number + 1 == steps:
                break
    return torch.cat([p.detach().cpu().double().flatten() for p in module.parameters() if p.requires_grad]), graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "GPT-2",
        *(pytest.param(each, marks=pytest.mark.slow) for each in defaults.MODELS if each not in ("GPT-2", "U-Net")),
    ],
)
def test_a_captured_loop_trains_as_the_loop_itself(name: str, device: str):
    plain, _ = trained(name, device, captured=False)
    replayed, graphs = trained(name, device, captured=True)
    if device == "cpu":
        assert graphs.replays > 0
    assert (plain - replayed).norm() <= 1e-4 * plain.norm()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loop(change=None, backward=lambda loss, model, x, y: loss.backward(), captured=True, model=Tiny):
    """A loop of six steps; `change(step, model)` comes before each."""
    torch.manual_seed(1)
    model = model()
    x, y = torch.randn(60, 5), torch.randint(3, (60,))
    engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6, max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
    )  # fmt: skip
    with captured_on_cpu() if captured else nullcontext() as graphs:
        for step, (inputs, targets) in enumerate(loader):
            if change is not None:
                change(step, model)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            backward(loss, model, inputs, targets)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), graphs


def test_two_backward_passes_about_one_batch_add_up_before_the_clip():
    def twice(loss, model, x, y):
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    plain, _ = loop(backward=twice, captured=False)
    replayed, graphs = loop(backward=twice)
    assert graphs.replays > 0
    assert torch.allclose(plain, replayed, atol=1e-6)


def test_two_forward_passes_about_one_batch_add_up():
    def again(loss, model, x, y):
        loss.backward()
        F.cross_entropy(model(x) * 2, y).backward()

    plain, _ = loop(backward=again, captured=False)
    assert torch.allclose(plain, loop(backward=again)[0], atol=1e-6)


@pytest.mark.parametrize("captured", [True, False])
def test_a_backward_pass_in_a_thread_that_is_not_followed_is_refused(captured):
    """A replay needs no mode, so that it would take whatever comes back, here of a hook that mixes the rows."""

    def elsewhere(loss, model, x, y):
        outputs = model(x)
        outputs.register_hook(lambda g: g / g.norm())
        with ThreadPoolExecutor(1) as thread:
            thread.submit(F.cross_entropy(outputs, y).backward).result()

    with pytest.raises(ValueError, match="this backward pass runs in another thread"):
        loop(backward=elsewhere, captured=captured)


def test_a_replay_ends_where_the_model_becomes_another():
    def scaled(step, model):
        model.second.register_forward_hook(lambda *given: given[2] * 3) if step == 3 else None

    plain, _ = loop(scaled, captured=False)
    replayed, _ = loop(scaled)
    assert torch.allclose(plain, replayed, atol=1e-6)


def test_batches_beyond_the_announced_sizes_are_captured_too(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "DEVIATIONS", (-1.6,))
    plain, _ = loop(captured=False)
    replayed, graphs = loop()
    assert graphs.replays == 3 * 6
    assert torch.allclose(plain, replayed, atol=1e-6)


class FirstCall(Tiny):
    """Keeps that it was called, as transformers' models do."""

    called = False

    def forward(self, x):
        self.called = True
        return super().forward(x)


class Counting(Tiny):
    """Is another model at every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / (1 + self.calls)


def captures(monkeypatch) -> list[int]:
    """The sizes of graphs, as they are captured."""
    found, capture = [], captured_passes.CapturedForm.capture
    monkeypatch.setattr(
        captured_passes.CapturedForm, "capture", lambda form, rows: found.append(rows) or capture(form, rows)
    )
    return found


def test_a_model_that_keeps_that_it_was_called_is_captured_once(monkeypatch):
    found = captures(monkeypatch)
    plain, _ = loop(captured=False, model=FirstCall)
    replayed, graphs = loop(model=FirstCall)
    assert torch.allclose(plain, replayed, atol=1e-6)
    assert graphs.replays == 3 * 6
    assert len(found) == len(set(found))


def test_a_model_that_is_another_at_every_call_is_not_captured_again_and_again(monkeypatch):
    found = captures(monkeypatch)
    loop(model=Counting)
    assert len(found) == len(set(found))


class Toggling(Tiny):
    """Is another model at every second call."""

    odd = False

    def forward(self, x):
        self.odd = not self.odd
        return super().forward(x) * (1 + self.odd)


def test_a_model_that_changes_in_its_own_pass_is_not_replayed():
    """By a graph it would be what it was at the capture, again and again."""
    plain, _ = loop(model=Toggling, captured=False)
    replayed, graphs = loop(model=Toggling)
    assert graphs.replays == 0
    assert plain.shape == replayed.shape


class Filling(Tiny):
    """Keeps a public table that it makes when it is first asked for."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def forward(self, x):
        scale = self.tables.setdefault(len(x), torch.ones(3) / 2)
        return super().forward(x) * scale


def test_a_model_whose_cache_is_full_is_captured():
    plain, _ = loop(model=Filling, captured=False)
    replayed, graphs = loop(model=Filling)
    assert graphs.replays > 0
    assert torch.allclose(plain, replayed, atol=1e-6)


class CountingBuffer(Tiny):
    """Counts its passes in public."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes.add_(1)
        return super().forward(x) / self.passes


@pytest.mark.parametrize("backward", [lambda loss, model, x, y: loss.backward(), None])
def test_captures_leave_no_trace_in_a_public_buffer(backward):
    """But for the first pass, which is made once beside the loop's own."""

    def twice(loss, model, x, y):
        loss.backward(retain_graph=True)
        (2 * loss).backward()

    counts = []

    def counted(loss, model, x, y):
        (backward or twice)(loss, model, x, y)
        counts.append(float(model.passes))

    _, graphs = loop(model=CountingBuffer, backward=counted)
    assert graphs.replays > 0
    assert [later - first for first, later in pairwise(counts)] == [1] * 5
    assert counts[0] == 2


class InPlace(Tiny):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


def test_a_model_that_writes_to_its_arguments_writes_to_the_users():
    """A loss may look at them afterwards."""

    def rebuilt(loss, model, x, y):
        (loss + model(x).square().sum(dim=1).mean() * x.square().sum(dim=1).mean()).backward()

    with pytest.warns(UserWarning, match="writes to its arguments"):
        replayed, graphs = loop(model=InPlace)
    assert graphs.replays == 0
    assert torch.equal(replayed, loop(model=InPlace, captured=False)[0])


class Held(Tiny):
    """Reads a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.held = {"scale": torch.ones(7)}

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.held["scale"])


def written(what, model, x):
    with torch.no_grad():
        if what == "examples":
            model.held["scale"].copy_(x.mean(0).repeat(2)[:7])
        elif what == "examples, unseen by autograd":
            model.held["scale"].data.copy_(x.mean(0).repeat(2)[:7])
        elif what == "public":
            model.held["scale"].mul_(2)
        else:
            model.second.weight.mul_(2)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("what", ["examples", "examples, unseen by autograd", "public", "a parameter"])
def test_what_a_pass_has_read_stays_until_it_went_back(what, captured):
    """A replayed backward pass would read the examples in it, with which it is nobody's own."""

    def between(loss, model, x, y):
        written(what, model, x)
        loss.backward()

    with pytest.raises((ValueError, RuntimeError), match="was written to between a forward" if captured else r"\S"):
        loop(backward=between, captured=captured, model=Held)


def test_examples_in_what_a_model_reads_are_not_replayed():
    def after(loss, model, x, y):
        loss.backward()
        model.held["scale"].data.copy_(x.detach().mean(0).repeat(2)[:7])

    with pytest.raises(ValueError, match=r"\S") as raised:
        loop(backward=after, model=Held)
    assert "was written to between" not in str(raised.value)  # the forward pass is followed, and refused


class Words(nn.Module):
    """A model of the user's own: a mean of its words, with or without what a mask leaves out."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.masks, self.table, self.head = masks, nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        words = torch.tanh(self.table(input_ids))
        if not self.masks:
            return self.head(words[:, -1])
        kept = attention_mask[:, :, None]
        return self.head((words * kept).sum(dim=1) / kept.sum(dim=1))


def texts_loop(masks: bool, captured: bool):
    torch.manual_seed(1)
    model, lengths = Words(masks), torch.randint(3, 14, (60,)).tolist()
    rows = [(torch.randint(1, 20, (length,)), torch.tensor(length % 3)) for length in lengths]

    def collate(batch):
        ids = nn.utils.rnn.pad_sequence([each for each, _ in batch], batch_first=True)
        return ids, (ids != 0).long(), torch.stack([label for _, label in batch])

    engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6, max_grad_norm=1.0,
        data_loader=DataLoader(rows, batch_size=6, collate_fn=collate),
    )  # fmt: skip
    with captured_on_cpu() if captured else nullcontext() as graphs:
        for ids, mask, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(ids, mask), labels).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), graphs


@pytest.mark.parametrize("masks", [True, False])
def test_texts_of_a_model_of_ones_own_are_padded_where_that_changes_nothing(masks, monkeypatch):
    plain, _ = texts_loop(masks, captured=False)
    lengths, capture = [], captured_passes.CapturedForm.capture

    def noted(form, rows):
        lengths.append(next(leaf.shape[1] for leaf in form._leaves if isinstance(leaf, torch.Tensor)))
        capture(form, rows)

    monkeypatch.setattr(captured_passes.CapturedForm, "capture", noted)
    replayed, graphs = texts_loop(masks, captured=True)
    assert graphs.replays > 0
    assert torch.allclose(plain, replayed, atol=1e-6)
    assert (lengths == sorted(lengths)) == masks  # never longer than what was met; each other length by itself


def other_axes(use, captured):
    """A loop whose first steps give the model rows, and later ones what `use` makes of them."""
    torch.manual_seed(1)
    model, rows = nn.Linear(5, 3), torch.randn(60, 3, 5)
    engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6, max_grad_norm=0.01,
        data_loader=DataLoader(TensorDataset(rows), batch_size=4),
    )  # fmt: skip
    with captured_on_cpu() if captured else nullcontext() as graphs:
        for step, (x,) in enumerate(loader):
            optimizer.zero_grad()
            given = use(x) if step > 3 else x
            outputs = model(given)
            assert outputs.shape[:2] == given.shape[:2]
            outputs.square().sum().div(len(x)).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), graphs


@pytest.mark.parametrize(
    "use",
    [lambda x: x.transpose(0, 1), lambda x: x.repeat_interleave(2, 0), lambda x: torch.cat([x, x])],
    ids=["time first", "copies side by side", "copies one after another"],
)
def test_what_has_no_row_for_each_example_first_is_not_captured(use):
    """Steps of time, or copies of an example, would be clipped as if they were examples."""
    plain, _ = other_axes(use, captured=False)
    replayed, graphs = other_axes(use, captured=True)
    assert graphs.replays == 3 * 4
    assert torch.allclose(plain, replayed, atol=1e-7)


def test_a_graph_is_worth_capturing_when_doing_without_has_cost_as_much():
    costs = cuda_graphs.CaptureCosts()
    assert not costs.worth("small", 1.0, 0.5)  # nobody knows yet what a graph costs
    costs.capture([4], lambda rows: None)
    costs._seconds = 2.0
    assert [costs.worth("other", 1.0, 0.5) for _ in range(4)] == [False, False, False, True]
    assert not any(costs.worth("exact", 1.0, 1.0) for _ in range(100))


class PublicTable(nn.Module):
    """A public table as long as the batch, along another axis than the rows, or along the first: neither is rows."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.inner = axis, nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = rows @ rows.transpose(1, 2)
        positions = rows.shape[1]
        table = torch.zeros(1, positions, positions) if self.axis else torch.zeros(positions, 1)
        return self.inner(torch.where(scores > 0, table, scores) @ rows).mean(dim=1)


class Noised(nn.Module):
    """Gives what is to be predicted beside what is predicted: of each row, or public numbers that are no rows'."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.shapes = nn.Linear(5, 3), kind, set()
        self.register_buffer("table", torch.linspace(0, 1, 5))

    def forward(self, x):
        noise = torch.arange(len(x)).sin()[:, None].expand(len(x), 3) * torch.ones_like(x[:, :3])
        return self.layer(x), noise if self.kind == "of rows" else self.table


@pytest.mark.parametrize("kind", ["of rows", "table"])
def test_public_outputs_are_no_examples_and_are_cut_where_they_have_rows(kind, monkeypatch):
    monkeypatch.setattr(captured_passes, "ahead", lambda sizes: [5])  # as many as the table has entries

    def run(captured: bool):
        torch.manual_seed(1)
        model, data = Noised(kind), TensorDataset(torch.randn(60, 5))
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6,
            max_grad_norm=0.1, data_loader=DataLoader(data, batch_size=8),
        )  # fmt: skip
        with captured_on_cpu() if captured else nullcontext() as graphs:
            for (x,) in loader:
                optimizer.zero_grad()
                predicted, public = model(x)
                assert public.shape == ((len(x), 3) if kind == "of rows" else (5,))
                target = public if kind == "of rows" else public[:3]
                (F.mse_loss(predicted, target.expand_as(predicted)) * (1 + public.mean())).backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before, graphs

    plain, _ = run(captured=False)
    replayed, graphs = run(captured=True)
    assert (graphs.replays > 0) == (kind == "of rows")
    assert plain.norm() > 0
    assert torch.allclose(plain, replayed, atol=1e-6)


def test_a_model_that_is_called_in_a_checkpoint_is_not_captured():
    def again(loss, model, x, y):
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()

    plain, _ = loop(backward=again, captured=False)
    assert torch.allclose(plain, loop(backward=again)[0], atol=1e-6)


class Gated(Tiny):
    """Keeps weights of the rows, or a loss, where no attribute changes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x):
        outputs = super().forward(x)
        self.kept.update(gate=outputs.detach().sigmoid()[:, 0], loss=outputs.square().mean())
        return outputs


@pytest.mark.parametrize("use", ["gate", "loss"])
def test_a_model_that_keeps_activations_for_the_loop_is_not_captured(use):
    def backward(loss, model, x, y):
        losses = F.cross_entropy(model(x), y, reduction="none")
        ((losses * model.kept["gate"]).mean() if use == "gate" else losses.mean() + model.kept["loss"]).backward()

    plain, _ = loop(backward=backward, captured=False, model=Gated)
    with pytest.warns(UserWarning, match="cannot be captured .the model keeps activations of its passes"):
        replayed, graphs = loop(backward=backward, model=Gated)
    assert not graphs.replays
    assert torch.allclose(plain, replayed, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_public_table_as_long_as_the_batch_is_captured(axis: int):
    def run(captured: bool):
        torch.manual_seed(0)
        module = PublicTable(axis)
        data = TensorDataset(torch.randn(8, 8, 3), torch.randint(2, (8,)))
        module, optimizer, loader = vestige.PrivacyEngine(reproducible=3, cuda_graphs=captured).make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), noise_multiplier=1e-6,
            max_grad_norm=1.0, data_loader=DataLoader(data, batch_size=8),
        )  # fmt: skip
        with captured_on_cpu() if captured else nullcontext() as graphs:
            for rows, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(module(rows), labels).backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()]), graphs

    plain, _ = run(captured=False)
    replayed, graphs = run(captured=True)
    assert graphs.replays
    assert torch.allclose(plain, replayed, atol=1e-5)


class Scored(nn.Module):
    """Gives its loss and its scores, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, y):
        scores = self.layer(x)
        return F.cross_entropy(scores, y), scores


def test_a_loss_may_use_some_of_the_outputs():
    def run(captured: bool, use: str):
        torch.manual_seed(1)
        model, data = Scored(), TensorDataset(torch.randn(60, 5), torch.randint(3, (60,)))
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6,
            max_grad_norm=0.5, data_loader=DataLoader(data, batch_size=8),
        )  # fmt: skip
        with captured_on_cpu() if captured else nullcontext() as graphs:
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss, scores = model(x, y)
                own = F.cross_entropy(scores, y)
                {"both": 0.5 * (loss + own), "loss": loss, "scores": own, "turns": own if step % 2 else loss}[
                    use
                ].backward()
                optimizer.step()
        assert not captured or graphs.replays > 0
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    first = run(False, "loss")
    assert first.norm() > 0
    for captured in (False, True):
        for use in ("loss", "scores", "both", "turns"):
            assert torch.allclose(run(captured, use), first, atol=1e-5), (captured, use)


def test_two_passes_about_one_batch_may_use_other_outputs():
    """A pass beside the captured one runs as it is, and its loss uses the scores."""

    def run(captured: bool):
        torch.manual_seed(1)
        model, data = Scored(), TensorDataset(torch.randn(60, 5), torch.randint(3, (60,)))
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        engine = vestige.PrivacyEngine(reproducible=5, cuda_graphs=captured)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), noise_multiplier=1e-6,
            max_grad_norm=0.5, data_loader=DataLoader(data, batch_size=8),
        )  # fmt: skip
        with captured_on_cpu() if captured else nullcontext() as graphs:
            for x, y in loader:
                optimizer.zero_grad()
                one, other = model(x, y), model(x + 1, y)
                (one[0] + F.cross_entropy(other[1], y)).backward()
                optimizer.step()
        assert not captured or graphs.replays > 0
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-5)
