"""Is a recorded step the step, for every batch size, bound and accident, and is what cannot be recorded left alone?"""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.per_example import kernels, taps
from vestige.engines.recorded import cuda_graphs, recording
from vestige.engines.recorded.cuda_graphs import LITTLE, Captured, Padded, padded_size
from vestige.engines.recorded.steady import Unsteady, require_steady, standing
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.adaptive_clipping import Automatic, Counted
from vestige.mechanism.clipping import Flat
from vestige.mechanism.groups import Layers, PerGroup

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 6, 6),
    ),
    "sequence": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(15, 3)), (3, 4)),
}
CLIPS = [Flat(0.3), Counted(0.3), Automatic(0.3), PerGroup(0.3)]


def build(name: str, device: str = "cpu") -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(1)
    make, shape = MODELS[name]
    return make().to(device), shape


def draw(shape: tuple[int, ...], count: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, *shape, generator=generator)
    return [inputs.to(device), torch.randint(3, (count,), generator=generator).to(device)]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * float(want.abs().max()))


def test_sizes_are_few_and_at_most_a_quarter_larger():
    sizes = [padded_size(count) for count in range(1, 5000)]
    assert all(count <= size <= max(count + 7, 1.25 * count) for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 45
    assert padded_size(256) == 256
    fine = [padded_size(count, LITTLE) for count in range(256, 5000)]
    assert all(count <= size <= 1.04 * count for count, size in enumerate(fine, 256))


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_padding_adds_nothing(name, clip):
    model, shape = build(name)
    layout = Layout.of(model, Layers() if isinstance(clip, PerGroup) else None)
    parameters = layout.parameters(model)
    first = draw(shape, 16)
    engine = BookKeeping(model, F.cross_entropy, layout)
    taps = engine.taps(first)
    padded = Padded(engine, taps, first, parameters, clip, 16)
    for count, seed in ((16, 0), (9, 1), (13, 2)):  # the rows of the batch before stay behind as padding
        batch = draw(shape, count, seed=seed)
        got, want = torch.full((layout.size,), 0.5), torch.zeros(layout.size)
        norms = padded(batch, clip, got)
        want_norms = Reference(model, F.cross_entropy, layout)(batch, parameters, clip, want)
        close(got - 0.5, want)
        close(norms, want_norms)


def test_not_even_what_is_not_finite_passes_from_the_padding():
    model, shape = build("cnn")
    layout = Layout.of(model)
    parameters, clip = layout.parameters(model), Flat(0.3)
    batch = draw(shape, 12)
    batch[0][10:] = torch.nan
    engine = BookKeeping(model, F.cross_entropy, layout)
    taps = engine.taps(batch)
    padded, into = Padded(engine, taps, batch, parameters, clip, 16), torch.zeros(layout.size)
    assert padded(batch, clip, into).isinf().squeeze(1).tolist() == [False] * 10 + [True] * 2
    for count in (12, 10):  # the broken rows, then the same rows as padding
        into, want = torch.zeros(layout.size), torch.zeros(layout.size)
        padded([part[:count] for part in batch], clip, into)
        Reference(model, F.cross_entropy, layout)([part[:count] for part in batch], parameters, clip, want)
        close(into, want)


def test_a_bound_may_change_from_step_to_step():
    model, shape = build("mlp")
    layout = Layout.of(model)
    parameters, batch = layout.parameters(model), draw(shape, 8)
    engine = BookKeeping(model, F.cross_entropy, layout)
    taps = engine.taps(batch)
    padded = Padded(engine, taps, batch, parameters, Flat(1.0), 8)
    for bound in (0.5, 0.01, 100.0):
        into, want = torch.zeros(layout.size), torch.zeros(layout.size)
        padded(batch, Flat(bound), into)
        Reference(model, F.cross_entropy, layout)(batch, parameters, Flat(bound), want)
        close(into, want)


def test_a_model_that_draws_random_numbers_is_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    layout = Layout.of(model)
    parameters, batch = layout.parameters(model), draw((6,), 8)
    engine = BookKeeping(model, F.cross_entropy, layout)
    taps = engine.taps(batch)
    for training in (True, False):
        model.train(training)
        padded, state = Padded(engine, taps, batch, parameters, Flat(1.0), 8), torch.get_rng_state()
        with pytest.raises(Unsteady) if training else nullcontext():
            padded(batch, Flat(1.0), torch.zeros(layout.size))
        assert torch.equal(torch.get_rng_state(), state)  # as if it had not been tried


class Own(nn.Module):
    """A frozen layer, a buffer, numbers and a function of its own, all of which may be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5).eval())
        self.head = nn.Linear(8, 3)
        self.body.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(8))
        self.loose = torch.ones(8)
        self.temperature, self.activation, self.calls = 1.0, torch.tanh, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.body(x) + self.shift) * self.loose.to(x.device)) / self.temperature


class Smoothed:
    """A loss with a number of its own."""

    def __init__(self) -> None:
        self.smoothing = 0.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=self.smoothing)

    def method(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def replaced(model: Own) -> None:
    model.body[0].weight = nn.Parameter(2 * model.body[0].weight.detach(), requires_grad=False)


def hooked(model: Own) -> None:
    model.body.register_forward_hook(lambda module, inputs, output: 2 * output)


CHANGES = {
    "number": lambda model: setattr(model, "temperature", 2.0),
    "function": lambda model: setattr(model, "activation", torch.sigmoid),
    "buffer": lambda model: setattr(model, "shift", torch.ones_like(model.shift)),
    "loose tensor": lambda model: setattr(model, "loose", 2 * model.loose),
    "frozen parameter": replaced,
    "module": lambda model: model.body.__setitem__(1, nn.ReLU()),
    "mode of a part": lambda model: model.body[1].train(False),
    "hook": hooked,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_recording_takes_for_granted_of_a_model(change):
    model, loss = Own(), F.cross_entropy
    before = standing(model, loss)
    with torch.no_grad():
        model.head.weight.add_(1.0)  # replays follow what changes in place
        model.shift.add_(1.0)
    assert standing(model, loss) == before
    CHANGES[change](model)
    assert standing(model, loss) != before


LEVEL = 0.0


def named(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=LEVEL)


@pytest.mark.parametrize("kind", ["object", "method", "closure", "partial", "cell", "module", "weight", "global"])
def test_what_a_recording_takes_for_granted_of_a_loss(kind, monkeypatch):
    model, held, level = nn.Linear(6, 3), Smoothed(), 0.0
    module = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss = {
        "object": held,
        "method": held.method,
        "closure": lambda outputs, targets: held(outputs, targets),
        "partial": partial(lambda outputs, targets, inner: inner(outputs, targets), inner=held),
        "cell": lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=level),
        "module": module,
        "weight": module,
        "global": named,
    }[kind]
    before = standing(model, loss)
    assert standing(model, loss) == before
    held.smoothing = level = 0.1
    if kind in ("module", "weight"):
        setattr(module, *(("label_smoothing", 0.1) if kind == "module" else ("weight", torch.rand(3))))
    monkeypatch.setitem(globals(), "LEVEL", 0.1)
    assert standing(model, loss) != before


def test_a_model_that_changes_itself_is_noticed():
    model = Own()
    model.register_forward_hook(lambda module, inputs, output: setattr(module, "calls", module.calls + 1))
    layout = Layout.of(model)
    parameters, batch = layout.parameters(model), draw((6,), 8)
    engine = BookKeeping(model, F.cross_entropy, layout)
    taps = engine.taps(batch)
    with pytest.raises(Unsteady):
        Padded(engine, taps, batch, parameters, Flat(1.0), 8)(batch, Flat(1.0), torch.zeros(layout.size))


def test_a_bound_that_changes_is_that_of_every_recording_in_one_memory():
    """It is written where it changes: by whichever of them was at work, for all of them."""
    model, shape = build("mlp", "cpu")
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, F.cross_entropy, layout), layout.parameters(model)
    batch = draw(shape, 6, "cpu")
    taps = engine.taps(batch)
    large = Padded(engine, taps, batch, parameters, Flat(1.0), 8)
    small = Padded(engine, taps, batch, parameters, Flat(1.0), 6, within=large)
    for each, bound in [(large, 1.0), (small, 0.5), (large, 0.5), (large, 0.1), (small, 0.1), (small, 1.0)]:
        got, want = torch.zeros(layout.size), torch.zeros(layout.size)
        each(batch, Flat(bound), got)
        Reference(model, F.cross_entropy, layout)(batch, parameters, Flat(bound), want)
        close(got, want, 1e-4)


# --- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_replays_follow_the_data_the_parameters_and_the_size(name, clip):
    model, shape = build(name, "cuda")
    layout = Layout.of(model, Layers() if isinstance(clip, PerGroup) else None)
    engine, parameters = Captured(model, F.cross_entropy, layout), layout.parameters(model)
    for step, count in enumerate([16, 9, 13, 16, 12, 40, 33, 40, 0, 1, 2, 1]):
        batch = draw(shape, count, "cuda", seed=step)
        if step == 6:
            batch[0][3] = torch.nan
        got, want = torch.zeros(layout.size, device="cuda"), torch.zeros(layout.size, device="cuda")
        norms = engine(batch, parameters, clip, got)
        want_norms = Reference(model, F.cross_entropy, layout)(batch, parameters, clip, want)
        assert norms.isinf().equal(want_norms.isinf())
        if count:
            close(got, want, 5e-3)
            close(norms.nan_to_num(posinf=1.0), want_norms.nan_to_num(posinf=1.0), 5e-3)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    assert sum(padded.graph is not None for padded in engine._padded.values()) == 3


class Draws(nn.Module):
    """Drops numbers by chance: on the GPU itself, or by a mask that the host draws."""

    def __init__(self, host: bool) -> None:
        super().__init__()
        self.first, self.last, self.host = nn.Linear(6, 8), nn.Linear(8, 3), host

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        kept = (torch.rand(8) > 0.5).to(x.device) if self.host else torch.rand_like(hidden) > 0.5
        return self.last(hidden * kept)


@gpu
@pytest.mark.parametrize("host", [False, True])
def test_what_is_drawn_on_the_host_runs_unrecorded_and_what_is_drawn_on_the_gpu_is_drawn_anew(host):
    torch.manual_seed(0)
    model = Draws(host).cuda()
    layout = Layout.of(model)
    engine, batch = Captured(model, F.cross_entropy, layout), draw((6,), 8, "cuda")
    results = []
    for _ in range(5):
        into = torch.zeros(layout.size, device="cuda")
        engine(batch, layout.parameters(model), Flat(0.1), into)
        results.append(into)
    assert bool(engine._padded) == (not host)
    assert any(padded.graph is not None for padded in engine._padded.values()) == (not host)
    assert not torch.equal(results[3], results[4])  # another mask each time


class Checkpointed(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(chance)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.second(torch.tanh(self.first(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


@gpu
@pytest.mark.filterwarnings("ignore:the step cannot be recorded")
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_what_is_drawn_is_drawn_again_where_activations_are_recomputed(chance):
    torch.manual_seed(0)
    model = Checkpointed(chance).cuda()
    layout = Layout.of(model)
    engine, parameters = Captured(model, F.cross_entropy, layout), layout.parameters(model)
    for step in range(4):
        batch = draw((6,), 8, "cuda", seed=step)
        got, want = torch.zeros(layout.size, device="cuda"), torch.zeros(layout.size, device="cuda")
        torch.cuda.manual_seed(step)
        engine(batch, parameters, Flat(0.1), got)
        torch.cuda.manual_seed(step)
        BookKeeping(model, F.cross_entropy, layout)(batch, parameters, Flat(0.1), want)
        if step or not chance:  # the first is also tried out and recorded, and draws for that
            close(got, want, 5e-3)
    assert chance or any(padded.graph is not None for padded in engine._padded.values())


def rehearsed(model, broken=0):
    device = next(model.parameters()).device.type
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, F.cross_entropy, layout), layout.parameters(model)
    batch = draw((6,), 7, device)
    batch[0][:broken] = torch.nan
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    padded = Padded(engine, engine.taps(batch), batch, parameters, Flat(0.1), 8, pool)
    padded.rehearse(batch)
    return padded, batch


@gpu
def test_a_replay_that_draws_others_where_it_recomputes_is_found_out():
    torch.manual_seed(0)
    padded, batch = rehearsed(Checkpointed(0.5).cuda())
    assert padded.draws
    padded.draws = False  # then it is not asked what was drawn
    with pytest.raises(Unsteady, match="what the step itself gave"):
        padded.record(batch)


class Rerun:
    """A recording that is run again."""

    def __init__(self, work):
        self.replay = work


@pytest.mark.parametrize("another", [False, True])
def test_what_goes_another_way_while_it_is_recorded_is_found_out(another, monkeypatch):
    class Other(nn.Linear):
        recorded = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / x.abs().amax() if Other.recorded else x)

    def record(work, pool, device):
        Other.recorded = another
        return Rerun(work)

    monkeypatch.setattr(cuda_graphs, "recorded", record)
    padded, batch = rehearsed(Other(6, 3))
    if another:
        with pytest.raises(Unsteady, match="what the step itself gave"):
            padded.record(batch)
    else:
        padded.record(batch)
    assert int(padded.count) == 7


def test_a_row_of_no_use_that_a_step_blanked_is_there_again_when_replays_are_compared(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "recorded", lambda work, pool, device: Rerun(work))
    monkeypatch.setattr(
        kernels, "blanked", lambda tensor, rows, in_place: tensor.index_fill_(0, rows.nonzero()[:, 0], 0)
    )
    padded, batch = rehearsed(build("mlp")[0], broken=2)
    assert not padded.batch[0].isnan().any()
    padded.record(batch)
    assert padded.norms[:7].isinf().squeeze(1).tolist() == [True] * 2 + [False] * 5


def test_a_draw_that_decides_which_operations_run_is_not_idle():
    left = torch.ones(3)

    def run(same):
        left.copy_(left.new_ones(3) * 2 if torch.rand([]) < (2.0 if same else 0.5) else left.new_ones(3) + 1)

    require_steady(lambda: run(True), nn.Identity(), left)
    with pytest.raises(Unsteady):
        require_steady(lambda: run(False), nn.Identity(), left)


def test_another_hook_in_the_place_of_one_is_another_model():
    model = nn.Sequential(nn.Linear(2, 2))
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model[0], register)(lambda *_: None)
        before = standing(model)
        assert standing(model) == before
        handle.remove()
        getattr(model[0], register)(lambda *_: None)
        assert standing(model) != before


def test_what_is_put_in_the_place_of_a_forward_pass_is_another_model():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(2, 2))
    model[0].scale, model[0].table = torch.tensor(1.0), torch.eye(3).to_sparse()
    forward = Own.forward
    global_hooks = [nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook]
    changes = [
        lambda: setattr(model[0], "forward", MethodType(lambda self, x: x, model[0])),
        lambda: setattr(model[0], "forward", partial(lambda x: x)),
        lambda: setattr(Own, "forward", lambda self, x: -forward(self, x)),
        lambda: model[0].scale.mul_(0.99),
        *(lambda register=register: handles.append(register(lambda *_: None)) for register in global_hooks),
    ]
    handles = []
    for change in changes:
        before = standing(model)
        assert standing(model) == before
        change()
        assert standing(model) != before
    for handle in handles:
        handle.remove()


TEMPERATURE = 1.0


def test_other_numbers_that_a_module_holds_or_names_make_it_another_model(monkeypatch):
    class Annealed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.config, self.options, self.steps = SimpleNamespace(t=1.0), {"t": 1.0}, [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * TEMPERATURE

    model = nn.Sequential(Annealed())
    changes = [
        lambda: setattr(model[0].config, "t", 2.0),
        lambda: model[0].options.update(t=2.0),
        lambda: model[0].steps.append(2.0),
        lambda: monkeypatch.setitem(globals(), "TEMPERATURE", 2.0),
    ]
    for change in changes:
        before = standing(model)
        assert standing(model) == before
        change()
        assert standing(model) != before


def test_activations_that_are_kept_elsewhere_are_not_recorded(monkeypatch):
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    model = Keeps(6, 3)
    layout = Layout.of(model)
    watched = BookKeeping(model, F.cross_entropy, layout).taps(draw((6,), 8, "cpu"))
    batch = draw((6,), 8, "cpu")
    sweep = taps.Sweep(lambda: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), layout.parameters(model))
    taps.gradients(watched, [sweep], 8)
    monkeypatch.setattr(taps, "recording", lambda: True)
    with pytest.raises(taps.Doubt, match="kept elsewhere"):
        taps.gradients(watched, [sweep], 8)


def test_checkpointing_of_another_thread_asks_as_it_always_does(monkeypatch):
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", lambda *given: "asked")
    seen, inside, go_on = [], threading.Event(), threading.Event()

    def beside():
        seen.append(torch.utils.checkpoint.get_device_states())
        with recording.nothing_to_draw_again():
            inside.set()
            go_on.wait(10)
        seen.append(torch.utils.checkpoint.get_device_states())

    other = threading.Thread(target=beside)
    with recording.nothing_to_draw_again():
        other.start()
        inside.wait(10)
        assert torch.utils.checkpoint.get_device_states(torch.zeros(1)) == ([], [])
    assert torch.utils.checkpoint.get_device_states() == "asked"
    go_on.set()
    other.join()
    assert torch.utils.checkpoint.get_device_states() == "asked"
    assert seen == ["asked", "asked"]


@gpu
def test_another_point_than_the_models_own_runs_unrecorded():
    model, shape = build("mlp", "cuda")
    layout = Layout.of(model)
    engine, batch = Captured(model, F.cross_entropy, layout), draw(shape, 8, "cuda")
    for step in range(3):
        point = {name: p.detach() + 0.1 * step for name, p in layout.parameters(model).items()}
        got, want = torch.zeros(layout.size, device="cuda"), torch.zeros(layout.size, device="cuda")
        engine(batch, point, Flat(0.1), got)
        Reference(model, F.cross_entropy, layout)(batch, point, Flat(0.1), want)
        close(got, want, 5e-3)
    assert not engine._padded


@gpu
def test_a_model_that_looks_at_its_data_runs_unrecorded():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            assert float(x.detach().abs().max()) >= 0 or bool(x.isnan().any())  # waits for the device
            return self.linear(x)

    model = Looks().cuda()
    layout = Layout.of(model)
    engine, batch = Captured(model, F.cross_entropy, layout), draw((6,), 8, "cuda")
    results = []
    for step in range(3):
        got = torch.zeros(layout.size, device="cuda")
        if step == 0:
            with pytest.warns(UserWarning, match="cannot be recorded"):
                engine(batch, layout.parameters(model), Flat(0.1), got)
        else:
            engine(batch, layout.parameters(model), Flat(0.1), got)
        results.append(got)
    close(results[1], results[0])
    close(results[2], results[0])
    assert torch.randn(3, device="cuda").isfinite().all()  # the generator survived the attempt
    held = torch.cuda.memory_reserved()
    torch.empty(2**28, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held  # and so did the allocator, which can give memory back


@gpu
@pytest.mark.parametrize("change", CHANGES)
def test_replays_follow_what_is_replaced(change):
    torch.manual_seed(0)
    model = Own().cuda()
    model.loose = model.loose.cuda()
    layout = Layout.of(model)
    engine, parameters = Captured(model, F.cross_entropy, layout), layout.parameters(model)
    for step in range(6):
        if step == 3:
            CHANGES[change](model)
        batch = draw((6,), 8, "cuda", seed=step)
        got, want = torch.zeros(layout.size, device="cuda"), torch.zeros(layout.size, device="cuda")
        engine(batch, parameters, Flat(0.3), got)
        Reference(model, F.cross_entropy, layout)(batch, parameters, Flat(0.3), want)
        close(got, want, 5e-3)
    assert sum(padded.graph is not None for padded in engine._padded.values()) == 2


@gpu
def test_replays_follow_a_loss_that_changes():
    model, shape = build("mlp", "cuda")
    layout, loss = Layout.of(model), Smoothed()
    engine, parameters = Captured(model, loss, layout), layout.parameters(model)
    for step in range(9):
        loss.smoothing = 0.3 * (step // 3)
        batch = draw(shape, 8, "cuda", seed=step)
        got, want = torch.zeros(layout.size, device="cuda"), torch.zeros(layout.size, device="cuda")
        engine(batch, parameters, Flat(0.3), got)
        Reference(model, loss, layout)(batch, parameters, Flat(0.3), want)
        close(got, want, 5e-3)
    assert sum(padded.graph is not None for padded in engine._padded.values()) == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_on_another_device_than_the_current_one_are_recorded_there():
    model, shape = build("cnn", "cuda:1")
    layout = Layout.of(model)
    engine, parameters = Captured(model, F.cross_entropy, layout), layout.parameters(model)
    for step in range(4):
        batch = draw(shape, 8, "cuda:1", seed=step)
        got, want = torch.zeros(layout.size, device="cuda:1"), torch.zeros(layout.size, device="cuda:1")
        engine(batch, parameters, Flat(0.3), got)
        Reference(model, F.cross_entropy, layout)(batch, parameters, Flat(0.3), want)
        close(got, want, 5e-3)
    assert any(padded.graph is not None for padded in engine._padded.values())


def test_nothing_is_collected_while_a_step_is_recorded():
    assert gc.isenabled()
    with pytest.raises(KeyError), recording._no_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with recording._no_collection():
            pass
        assert not gc.isenabled(), "whoever turned it off has his reasons"
    finally:
        gc.enable()
