"""What do tests of other people's models share? The models, as they are called, and what replays one example at a time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from engine_checks import clipped, one_at_a_time
from vestige.engines.bookkeeping import BookKeeping
from vestige.engines.example_axis import linear_operators
from vestige.engines.per_example.gradient_forms import Dense
from vestige.layout import Layout
from vestige.mechanism.clipping import Flat

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from others import OTHERS, called

sys.path.pop(0)
__all__ = ["OTHERS", "Positional", "built", "called", "exact", "nothing_replayed", "positional"]


def built(name: str) -> nn.Module:
    """A small one, in training mode, with nothing left to chance."""
    torch.manual_seed(0)
    model = calm(OTHERS[name].build(True).train())
    if hasattr(model, "config"):
        model.config._experts_implementation = "eager"  # the others have no float64
    return model


def calm(model: nn.Module) -> nn.Module:
    """Without dropout and stochastic depth, whatever they are called."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


class Positional(nn.Module):
    """Somebody's model as `vestige.train` calls it: by position, and of its outputs the one with the loss's numbers."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs = called(self.model, dict(zip(self.names, inputs, strict=True)))
        return outputs if isinstance(outputs, Tensor) else outputs.logits


def positional(name: str, examples: int):
    """(model, batch, loss) as engines take them."""
    model, other = built(name), OTHERS[name]
    batch = other.examples(examples, True)
    names = tuple(key for key in batch if key != "labels")
    targets = batch.get("labels", batch.get("decoder_input_ids", batch.get("input_ids")))
    key = "labels" if "labels" in batch else "input_ids"

    class Outputs:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return other.loss(Outputs(outputs), {key: target})

    return Positional(model, names), (*(batch[each] for each in names), targets), loss


@contextmanager
def nothing_replayed() -> Iterator[None]:
    """Fails where an operator is applied to each example's part of a sum by itself, which had to be materialised."""
    found: list[str] = []
    by_vmap = linear_operators._one_by_one

    def noted(call):
        if not isinstance(call.parts, Dense):
            found.append(f"{call.op.name} of {type(call.parts).__name__}")
        return by_vmap(call)

    linear_operators._one_by_one = noted
    try:
        yield
    finally:
        linear_operators._one_by_one = by_vmap
    assert not found, found


def exact(model: nn.Module, batch, loss, tolerance: float = 1e-5, replayed: bool = False) -> None:
    """Norms and clipped sum of the fast engine, without a word and without replaying anything, against float64."""
    layout = Layout.of(model)
    parameters = {name: p.detach() for name, p in layout.parameters(model).items()}
    rows = one_at_a_time(model, loss, layout, batch, parameters)
    clip = Flat(float(rows.norm(dim=1).median()))
    want, norms = clipped(rows, clip, layout)
    into = torch.zeros(layout.size)
    with warnings.catch_warnings(), nullcontext() if replayed else nothing_replayed():
        warnings.simplefilter("error")
        got = BookKeeping(model, loss, layout)(batch, parameters, clip, into)
    assert ((got - norms).abs() <= tolerance * norms).all(), ((got - norms) / norms).abs().max()
    off = (into.double() - want).norm() / want.norm()
    assert off <= tolerance, off
    for name, view in layout.views(into.double()).items():
        whole = layout.views(want)[name]
        assert (view - whole).norm() <= tolerance * (whole.norm() + 1e-2 * want.norm()), name
