"""What is planted? An example made to be detected: a gradient of a chosen direction, a wrong label, a blank input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vestige.layout import Layout

KINDS = ("gradient", "mislabelled", "blank")
LARGE = 1e4
"""The norm of a planted gradient: far beyond every bound, so that the clip has to cut it."""
RANK = 1e-5
"""Singular values below this share of the largest count as zero."""


@dataclass(frozen=True)
class Canary:
    """One example that is in half of the runs. A gradient canary has a gradient in place of the model's own."""

    kind: str
    inputs: Tensor
    """Its one input: made up, or from public data with another label; never a second copy of a private row."""
    target: Tensor
    gradient: Tensor | None = None
    """The flat gradient of a gradient canary, norm `LARGE` in each of its groups."""


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"canary={kind!r} is unknown; choose from {', '.join(KINDS)}, selection")


def make_canary(
    kind: str, model: nn.Module, layout: Layout, data: tuple[Tensor, Tensor], public: tuple[Tensor, Tensor], seed: int
) -> Canary:
    """A canary beside `data`; `public` examples give a mislabelled one its input, and all of them their classes."""
    check_kind(kind)
    random = torch.Generator().manual_seed(seed)
    inputs, targets = public
    blank = torch.zeros_like(inputs[:1])
    if targets.dtype.is_floating_point and kind != "gradient":
        raise ValueError(f"canary={kind!r} needs labels that are classes: use canary='gradient'")
    if kind == "gradient":
        mark = blank + torch.rand(blank.shape, generator=random).to(blank.dtype) if blank.is_floating_point() else blank
        return Canary(kind, mark, targets[:1].clone(), planted_gradient(model, layout, data[0], random))
    classes = int(torch.cat([data[1], targets]).max()) + 1
    if kind == "blank":
        return Canary(kind, blank, torch.randint(classes, (1,), generator=random).to(targets.dtype))
    chosen = int(torch.randint(len(targets), (1,), generator=random))
    wrong = torch.randint(1, max(2, classes), (1,), generator=random)
    label = (targets[chosen : chosen + 1] + wrong.to(targets.dtype)) % classes
    return Canary(kind, inputs[chosen : chosen + 1].clone(), label)


def planted_gradient(model: nn.Module, layout: Layout, inputs: Tensor, random: torch.Generator) -> Tensor:
    """A random direction in every group, of norm `LARGE` each.

    Where the inputs of a first linear layer leave directions free, the group of its weight points along one of these:
    no other example's gradient has a part there, so that what is found is the canary and the noise. Elsewhere the
    direction is random among all, and the others' parts are small where there are many parameters.
    """
    vector = torch.zeros(layout.size)
    views = layout.views(vector)
    free = _free_directions(model, layout, inputs)
    for group in range(layout.groups):
        mine = [segment for segment in layout.segments if segment.group == group]
        if free is not None and any(segment.name == free[0] for segment in mine):
            name, basis = free
            units, space = views[name].shape[0], basis.shape[1]
            views[name].copy_(torch.randn(units, space, generator=random) @ basis.t())
        else:
            for segment in mine:
                views[segment.name].copy_(torch.randn(segment.shape, generator=random))
        norm = sum(float(views[segment.name].double().square().sum()) for segment in mine) ** 0.5
        for segment in mine:
            views[segment.name].mul_(LARGE / norm)
    return vector


def _free_directions(model: nn.Module, layout: Layout, inputs: Tensor) -> tuple[str, Tensor] | None:
    """The weight of a first linear layer and an orthonormal basis of what its inputs never touch; None without any."""
    rows = inputs.flatten(1)
    if not rows.is_floating_point():
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first = next(
        (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None), None
    )
    if not isinstance(first, nn.Linear) or first.in_features != rows.shape[1]:
        return None
    name = names[id(first.weight)]
    if name not in {segment.name for segment in layout.segments}:
        return None
    finite = rows[rows.isfinite().all(dim=1)].double()
    values, vectors = torch.linalg.eigh(finite.t() @ finite)
    untouched = vectors[:, values < (RANK**2) * values.max().clamp(min=1e-300)]
    return (name, untouched.float()) if untouched.shape[1] else None
