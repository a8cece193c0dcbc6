"""What do the tests of engines share? Small models, and the oracle: gradients in float64, one example at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.reference import Reference
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

property_test = settings(max_examples=15, deadline=None, derandomize=True)


@dataclass(frozen=True)
class PerGroup:
    """Each group of parameters scaled to a bound of its own."""

    bounds: tuple[float, ...]

    def factors(self, norms: Tensor) -> Tensor:
        return (torch.tensor(self.bounds, dtype=norms.dtype, device=norms.device) / norms).clamp(max=1.0)

    def sensitivity(self, layout: Layout) -> float:
        return sum(bound**2 for bound in self.bounds) ** 0.5


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def alternating(model: nn.Module) -> list[list[str]]:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [names[::2], names[1::2]] if len(names) > 1 else [names]


def one_at_a_time(model: nn.Module, loss: Callable[..., Tensor], layout: Layout, batch, parameters) -> Tensor:
    """Every example's flat gradient in float64, by ordinary autograd on batches of one: [examples, size]."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, parameter in layout.parameters(exact).items():
            parameter.copy_(parameters[name])
    leaves, rows = layout.parameters(exact), []
    for example in zip(*batch, strict=True):
        *inputs, target = (part[None].double() if part.is_floating_point() else part[None] for part in example)
        grads = torch.autograd.grad(loss(exact(*inputs), target), list(leaves.values()), allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
        rows.append(torch.cat([g.reshape(-1) for g in filled]))
    return torch.stack(rows) if rows else torch.zeros(0, layout.size, dtype=torch.float64)


def clipped(rows: Tensor, clip, layout: Layout) -> tuple[Tensor, Tensor]:
    members = [[rows[:, s.start : s.stop] for s in layout.segments if s.group == g] for g in range(layout.groups)]
    norms = torch.stack([torch.cat(group, dim=1).norm(dim=1) for group in members], dim=1)
    factors = clip.factors(norms)
    total = torch.cat([factors[:, s.group] @ rows[:, s.start : s.stop] for s in layout.segments])
    return total, norms


def ask(engine, batch, parameters, clip, layout) -> tuple[Tensor, Tensor]:
    into = torch.full((layout.size,), 0.25)  # what is there stays there
    norms = engine(batch, parameters, clip, into)
    return into - 0.25, norms


def close(got: Tensor, want: Tensor, tolerance: float = 2e-4) -> None:
    scale = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * scale + 1e-7)


def check(
    model, batch, loss=square, clip=None, grouping=None, tolerance=2e-4, shift=False, reference=True, quiet=False
):
    """The engine, the reference and one-at-a-time float64 gradients agree on sum and norms."""
    layout = Layout.of(model, grouping)
    parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    if shift:
        parameters = {name: p + 0.1 * torch.randn_like(p) for name, p in parameters.items()}
    before = {name: p.detach().clone() for name, p in model.state_dict().items()}
    rows = one_at_a_time(model, loss, layout, batch, parameters)
    clip = clip or Flat(0.5 * (rows.norm(dim=1).median().item() if len(rows) else 1.0) + 1e-3)
    total, norms = clipped(rows, clip, layout)
    engine = BookKeeping(model, loss, layout)
    for _ in range(2):  # with a fresh plan, and with a kept one
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("error")
            got, got_norms = ask(engine, batch, parameters, clip, layout)
        close(got, total, tolerance)
        close(got_norms, norms, tolerance)
    if reference:
        same, same_norms = ask(Reference(model, loss, layout), batch, parameters, clip, layout)
        close(same, got, tolerance)
        close(same_norms, got_norms, tolerance)
    assert got_norms.dtype == torch.float64
    assert got_norms.shape == (len(batch[0]), layout.groups)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    return engine


def silent(*args, **kwargs):
    """Check, and insist that no fallback was needed."""
    return check(*args, quiet=True, **kwargs)


class Out(nn.Module):
    """A model around a layer: any output becomes a vector per example, through a nonlinearity and a linear head."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(input)).flatten(1))


def targets(examples: int, width: int = 2) -> Tensor:
    return torch.randn(examples, width)


clips = st.sampled_from([None, Flat(1e-3), Flat(1e6), "groups"])
sizes = st.integers(0, 5)


def run(model: nn.Module, batch, clip, **options):
    if clip == "groups":
        clip = PerGroup((0.05, 0.3)) if len(list(model.parameters())) > 1 else None
        return silent(model, batch, clip=clip, grouping=alternating, **options)
    return silent(model, batch, clip=clip, **options)


class Positions(nn.Module):
    """A small language model with everything: tokens, positions without a batch axis, tied or separate head."""

    def __init__(self, tied: bool, leading: bool = False, words: int = 6, width: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(8, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.leading = leading
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places[None] if self.leading else places)
        return self.head(self.norm(torch.tanh(x.cumsum(1))))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Tokens(nn.Module):
    """A vision transformer's habits: a class token, a table of positions, a scale per channel, all bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.place = nn.Parameter(torch.randn(1, 5, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        x = self.patch(input).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        return self.head(self.block(x)[:, 0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, lambda n: torch.randn(n, 5), F.cross_entropy, lambda n: torch.randint(0, 3, (n,))),
    "cnn": (cnn, lambda n: torch.randn(n, 2, 4, 4), F.cross_entropy, lambda n: torch.randint(0, 3, (n,))),
    "tokens": (Tokens, lambda n: torch.randn(n, 1, 4, 4), square, targets),
    "language": (lambda: Positions(tied=True), lambda n: sentences(n), token_loss, lambda n: sentences(n)),
}


def sentences(examples: int) -> Tensor:
    return torch.randint(0, 6, (examples, 5))


def sample(name: str, examples: int, seed: int = 0):
    torch.manual_seed(seed)
    model, inputs, loss, labels = MODELS[name]
    return model(), (inputs(examples), labels(examples)), loss
