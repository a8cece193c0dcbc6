"""Does the fast engine give the reference engine's answer, for every model, batch, bound, accident and precision?"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine_checks import MODELS, ask, close, sample, silent, square, targets
from vestige.engines import bookkeeping
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis import sums
from vestige.engines.example_axis.labels import Tracker
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("examples", [0, 1, 7])
def test_models_at_shifted_parameters(name, examples):
    """The gradient is asked where `parameters` says, not where the model happens to be."""
    model, batch, loss = sample(name, examples)
    silent(model, batch, loss=loss, shift=True)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_moves_the_sum_by_at_most_the_bound(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    engine, clip = BookKeeping(model, loss, layout), Flat(0.02)
    parameters = layout.parameters(model)
    everyone, norms = ask(engine, batch, parameters, clip, layout)
    assert (norms > clip.bound).all(), "the bound must bind for this test to mean anything"
    for left_out in range(6):
        rest = [torch.cat([part[:left_out], part[left_out + 1 :]]) for part in batch]
        without, _ = ask(engine, rest, parameters, clip, layout)
        moved = (everyone - without).norm().item()
        assert 0.99 * clip.bound <= moved <= clip.bound * (1 + 1e-4)


@pytest.mark.parametrize(("shape", "positions"), [((8,), 1), ((3, 8), 3), ((2, 6, 6), 16)])
@pytest.mark.parametrize(("size", "weight"), [(4e18, 2.5e-23), (2e38, 1e-12)])
@pytest.mark.parametrize("bound", [1e-6, 1.0])
def test_huge_inputs_beside_a_tiny_loss_stay_within_the_bound(shape, positions, size, weight, bound):
    """A weight of its own makes the gradient of a row's outputs so small that its square, or its product with the
    clip's factor, underflows, beside inputs whose squares overflow."""
    model: nn.Module = nn.Linear(8, 4, bias=False) if len(shape) < 3 else nn.Conv2d(2, 8, 3, bias=False)
    nn.init.zeros_(parameter := next(model.parameters()))
    layout = Layout.of(model)
    batch = (torch.full((2, *shape), size), torch.tensor([weight, 0.0]))

    def weighted(output: Tensor, weight: Tensor) -> Tensor:
        return (output.flatten(1).sum(dim=1) * weight).mean()

    got = torch.zeros(layout.size)
    norms = BookKeeping(model, weighted, layout)(batch, layout.parameters(model), Flat(bound), got)
    norm = weight * size * positions * parameter.numel() ** 0.5
    assert norms[0].item() == pytest.approx(norm, rel=1e-3)
    assert got.double().norm().item() == pytest.approx(min(bound, norm), rel=2**-10)


def test_cancelling_positions_do_not_hide_a_gradient():
    """Inner products of 1e8 cancel to a gradient of norm 8; by rounding it could look small, and pass unclipped."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(40, 40, bias=False)

        def forward(self, input: Tensor, weight: Tensor) -> Tensor:
            return (self.layer(input) * weight).flatten(1).sum(dim=1)

    torch.manual_seed(22)
    layout = Layout.of(model := Weighted())
    worst = 0.0
    for _ in range(20):
        base, direction = torch.randn(1, 1, 40), torch.randn(1, 1, 40)
        inputs = 300 * base + torch.zeros(1, 8, 40)
        weight = 50 * direction * torch.tensor([1.0, -1.0] * 4)[None, :, None]
        inputs[0, 0] += 0.02 * torch.randn(40)
        engine = BookKeeping(model, lambda output, target: output.sum() + 0 * target.sum(), layout)
        into = torch.zeros(layout.size)
        engine((inputs, weight, torch.zeros(1)), layout.parameters(model), Flat(1.0), into)
        worst = max(worst, into.norm().item())
    assert worst <= 1.0 + 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.everyday("1-mlp", "2-mlp", "3-mlp", "3-cnn", "3-language", "5-mlp", "5-cnn", "5-language")
def test_any_physical_batch_gives_the_same_sum(name, chunk):
    model, batch, loss = sample(name, 7)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    want, want_norms = ask(engine, batch, parameters, Flat(0.1), layout)
    into, norms = torch.full((layout.size,), 0.25), []
    for parts in zip(*(part.split(chunk) for part in batch), strict=True):
        norms.append(engine(parts, parameters, Flat(0.1), into))
    close(into - 0.25, want)
    close(torch.cat(norms), want_norms)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
def test_a_broken_example_counts_for_nothing_and_disturbs_nobody(name, value, at):
    model, batch, loss = sample(name, 5)
    model = nn.Sequential(nn.Linear(batch[0].shape[-1], batch[0].shape[-1]), model)
    batch[0][at].view(-1)[0] = value
    layout = Layout.of(model)
    parameters, engine = layout.parameters(model), BookKeeping(model, loss, layout)
    healthy = [torch.cat([part[:at], part[at + 1 :]]) for part in batch]
    want, want_norms = ask(engine, healthy, parameters, Flat(0.1), layout)
    got, norms = ask(engine, batch, parameters, Flat(0.1), layout)
    close(got, want)
    assert norms[at].isinf().all()
    close(torch.cat([norms[:at], norms[at + 1 :]]), want_norms)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
@pytest.mark.parametrize("size", [1e12, 1e25, 1e38])
@pytest.mark.everyday("1000000000000.0-mlp", "1e+25-mlp", "1e+38-mlp")
def test_an_absurd_example_is_judged_as_the_reference_judges_it(name, size):
    model, batch, loss = sample(name, 5)
    batch[0][1] *= size
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    engine = BookKeeping(model, loss, layout)
    others = [torch.cat([part[:1], part[2:]]) for part in batch]
    for asked in (engine, Reference(model, loss, layout)):
        got, norms = ask(asked, batch, parameters, Flat(0.1), layout)
        rest, rest_norms = ask(asked, others, parameters, Flat(0.1), layout)
        # Its direction is a matter of rounding, where a softmax saturates; its share of the sum is not.
        share = float((got - rest).norm())
        assert share <= (1e-6 if norms[1].isinf() else 0.1 * (1 + 1e-4))
        close(torch.cat([norms[:1], norms[2:]]), rest_norms)
    want, want_norms = ask(Reference(model, loss, layout), others, parameters, Flat(0.1), layout)
    close(rest := ask(engine, others, parameters, Flat(0.1), layout)[0], want)
    whole = ask(Reference(model, loss, layout), batch, parameters, Flat(0.1), layout)[1]
    assert torch.equal(ask(engine, batch, parameters, Flat(0.1), layout)[1].isinf(), whole.isinf())
    assert rest.isfinite().all()
    assert not engine._left, "nothing of it was left to the reference engine"


@pytest.mark.parametrize("shape", [(5,), (4, 5), (40, 5)])
@pytest.mark.parametrize("size", [1e-25, 1e22])
def test_norms_beyond_the_squares_of_float32(shape, size):
    """Clipped like any other, as the reference does: only their squares overflow."""
    torch.manual_seed(23)
    model = nn.Linear(5, 3)
    inputs = torch.randn(4, *shape)
    inputs[2] *= size
    layout = Layout.of(model)
    batch = (inputs, torch.zeros(4, *shape[:-1], 3))

    def flat(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    got = ask(BookKeeping(model, flat, layout), batch, layout.parameters(model), Flat(0.1), layout)
    want = ask(Reference(model, flat, layout), batch, layout.parameters(model), Flat(0.1), layout)
    close(got[0], want[0])
    close(got[1].log(), want[1].log())


def test_a_batch_without_a_finite_example():
    model, batch, loss = sample("mlp", 3)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    total, norms = ask(engine, (torch.full_like(batch[0], torch.nan), batch[1]), parameters, Flat(0.1), layout)
    assert norms.isinf().all()
    assert not total.any()
    close(*(ask(e, batch, parameters, Flat(0.1), layout)[0] for e in (engine, Reference(model, loss, layout))))


def test_a_transform_is_left_to_the_reference():
    model, batch, loss = sample("mlp", 4)
    layout = Layout.of(model)
    parameters = layout.parameters(model)

    def doubled(field):
        return lambda p, *example: {name: 2 * g for name, g in field(p, *example).items()}

    into = torch.zeros(layout.size)
    norms = BookKeeping(model, loss, layout)(batch, parameters, Flat(1e6), into, doubled)
    want, want_norms = ask(Reference(model, loss, layout), batch, parameters, Flat(1e6), layout)
    close(into, 2 * want)
    close(norms, 2 * want_norms)


def test_the_model_is_left_as_it_was():
    model, batch, loss = sample("cnn", 4)
    layout = Layout.of(model)
    engine = BookKeeping(model, loss, layout)
    with torch.no_grad():  # callers need not allow gradients
        ask(engine, batch, layout.parameters(model), Flat(0.1), layout)
    assert copy.deepcopy(model)(batch[0]).equal(model(batch[0]))
    assert all(isinstance(parameter, nn.Parameter) and parameter.grad is None for parameter in model.parameters())
    wrong = (batch[0].repeat(1, 2, 1, 1), batch[1])
    with pytest.raises(RuntimeError, match="channels"):
        engine(wrong, layout.parameters(model), Flat(0.1), torch.zeros(layout.size))
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_slack_for_tf32_tightens_every_share(monkeypatch):
    model, batch, loss = sample("mlp", 6)
    layout = Layout.of(model)
    arguments = (batch, layout.parameters(model), Flat(0.1), layout)
    want, _ = ask(BookKeeping(model, loss, layout), *arguments)
    monkeypatch.setattr(bookkeeping, "slack", lambda into: 0.5)
    got, _ = ask(BookKeeping(model, loss, layout), *arguments)
    close(got, 0.5 * want)


class Checkpointed(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = checkpoint(block, input, use_reentrant=False)
        return self.head(input.flatten(1))


def test_activation_checkpointing():
    torch.manual_seed(26)
    blocks = [
        nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4), nn.Dropout(0.0)) for _ in range(3)
    ]
    silent(Checkpointed(*blocks), (torch.randn(4, 4), targets(4)), reference=False)


def test_checkpointed_activations_are_not_kept():
    """What a tap saves goes through autograd, so it is dropped in the forward pass like everything else."""
    torch.manual_seed(27)
    model = Checkpointed(*[nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4)) for _ in range(3)])
    batch = (torch.randn(5, 4), targets(5))
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, square, layout), layout.parameters(model)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    losses = engine._losses

    def packed(batch: Sequence[Tensor], tracker: Tracker) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return losses(batch, tracker)

    engine._losses = packed
    ask(engine, batch, parameters, Flat(1.0), layout)
    assert (5, 9) not in saved
    assert (5, 4) in saved


@pytest.mark.parametrize("name", MODELS)
def test_autocast_keeps_norms_and_sums_in_float32(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    engine, parameters = BookKeeping(model, loss, layout), layout.parameters(model)
    want, want_norms = ask(engine, batch, parameters, Flat(0.1), layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, norms = ask(engine, batch, parameters, Flat(0.1), layout)
    assert not torch.equal(got, want), "autocast had no effect"
    close(got, want, 0.1)
    close(norms, want_norms, 0.05)
    into = torch.zeros(layout.size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = engine([part[:1] for part in batch], parameters, Flat(1e-3), into)
    assert one.item() > 1e-3
    assert abs(into.norm().item() / 1e-3 - 1) < 1e-4, "one clipped example lies on the sphere, to float32"


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_under_autocast_images_are_kept_as_they_were_convolved(layer, monkeypatch):
    model = nn.Sequential(layer(2, 3, 3, padding=1), nn.GroupNorm(1, 3), layer(3, 2, 3), nn.Flatten(), nn.LazyLinear(3))
    batch = [torch.randn(6, 2, 5, 5), torch.randint(3, (6,))]
    model(batch[0])
    layout, seen, original = Layout.of(model), set(), sums.patches

    def patches(image, signal, *others):
        seen.add((image.dtype, signal.dtype))
        return original(image, signal, *others)

    monkeypatch.setattr(sums, "patches", patches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ask(BookKeeping(model, nn.functional.cross_entropy, layout), batch, layout.parameters(model), Flat(0.1), layout)
    assert seen == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place", "inner"])
def test_compiled_models(how):
    model, batch, loss = sample("cnn", 4)
    layout = Layout.of(model)
    want, want_norms = ask(BookKeeping(model, loss, layout), batch, layout.parameters(model), Flat(0.1), layout)
    compiled = model
    if how == "wrapped":
        compiled = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model[4].compile(backend="aot_eager")
    compiled(batch[0]).sum().backward()  # compiled before the engine sees it
    layout = Layout.of(compiled)
    got, norms = ask(BookKeeping(compiled, loss, layout), batch, layout.parameters(compiled), Flat(0.1), layout)
    close(got, want)
    close(norms, want_norms)
    assert compiled(batch[0]).shape == (4, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
def test_on_a_gpu_as_on_the_cpu(name):
    model, batch, loss = sample(name, 6)
    layout = Layout.of(model)
    want, want_norms = ask(BookKeeping(model, loss, layout), batch, layout.parameters(model), Flat(0.1), layout)
    model, batch = model.cuda(), [part.cuda() for part in batch]
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size, device="cuda")
    norms = engine(batch, layout.parameters(model), Flat(0.1), into)
    close(into.cpu(), want, 5e-3)
    close(norms.cpu(), want_norms, 5e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("broken", [False, True])
def test_a_step_can_be_captured_in_a_cuda_graph(broken):
    model, batch, loss = sample("cnn", 6)
    model, batch = model.cuda(), [part.cuda() for part in batch]
    if broken:
        batch[0][2].view(-1)[0] = torch.nan
    layout = Layout.of(model)
    engine, into = BookKeeping(model, loss, layout), torch.zeros(layout.size, device="cuda")
    parameters = layout.parameters(model)
    want_norms = engine(batch, parameters, Flat(0.1), into)
    want = into.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        engine(batch, parameters, Flat(0.1), into)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norms = engine(batch, parameters, Flat(0.1), into)
    into.zero_()
    graph.replay()
    close(into, want)
    close(norms[norms.isfinite()], want_norms[want_norms.isfinite()])
    assert bool(norms.isinf().any()) == broken


class ByPosition(nn.Module):
    """Puts positions before examples in one axis."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(3, 4)

    def forward(self, x):
        by_position = torch.tanh(self.map(x.transpose(0, 1).reshape(-1, 3)))
        return by_position.reshape(x.shape[1], len(x), 4).mean(0)


def test_batches_of_other_lengths_are_read_right_whichever_came_first():
    """Of one position, examples and positions in one axis look alike; of four, they do not."""
    model, loss = ByPosition(), nn.functional.cross_entropy
    layout = Layout.of(model)
    parameters = layout.parameters(model)
    engine, oracle = BookKeeping(model, loss, layout), Reference(model, loss, layout)
    for positions in (1, 4, 1, 3):
        batch = [torch.randn(5, positions, 3), torch.randint(4, (5,))]
        found, norms = ask(engine, batch, parameters, Flat(0.05), layout)
        wanted, wanted_norms = ask(oracle, batch, parameters, Flat(0.05), layout)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-4, atol=1e-6)
