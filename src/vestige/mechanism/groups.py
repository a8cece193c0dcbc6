"""Which parameters are clipped together, and how do groups share one bound and one noise level?"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vestige.checks import check_bound
from vestige.layout import Grouping, Layout
from vestige.mechanism.clipping import Clip, ClipState, FixedClip, Flat, within
from vestige.randomness.sum_and_release_types import Release

NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Norm layers whose weights may have several dimensions without being matrices."""

Share = Literal["equal", "isotropic", "least-noise"]


@dataclass(frozen=True)
class Layers:
    """One group for each layer: a module with a weight of two or more dimensions, and its bias.

    What belongs to no such module (norm layers' parameters, scales) joins the layer before it, or the first layer if
    there is none before. A tied weight is counted once, where it first appears.
    """

    def __call__(self, model: nn.Module) -> list[list[str]]:
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        layer_of = dict(_layers(model))
        groups: dict[str, list[str]] = {}
        early: list[str] = []
        last: list[str] | None = None
        for name in trainable:
            layer = layer_of.get(name.rpartition(".")[0])
            if layer is not None:
                last = groups.setdefault(layer, [])
            (early if last is None else last).append(name)
        if not groups:
            return [early]
        first, *others = groups.values()
        return [early + first, *others]


def _layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each module that is a layer, with the module where its weight first appears: another one if it is tied."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, NORMS):
            continue
        weight = next((p for p in module.parameters(recurse=False) if p.requires_grad and p.dim() >= 2), None)
        if weight is not None:
            yield path, first_names[id(weight)].rpartition(".")[0]


@dataclass(frozen=True)
class Patterns:
    """One group for each glob pattern over parameter names; a name goes to the first pattern that matches it."""

    globs: tuple[str, ...]

    def __call__(self, model: nn.Module) -> list[list[str]]:
        groups: list[list[str]] = [[] for _ in self.globs]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for group, glob in zip(groups, self.globs, strict=True):
                    if fnmatchcase(name, glob):
                        group.append(name)
                        break  # a name that no pattern matches is left out, and Layout refuses it
        for group, glob in zip(groups, self.globs, strict=True):
            if not group:
                raise ValueError(
                    f"groups={glob!r}: the pattern {glob!r} matches no trainable parameter that is still free; the "
                    f"first pattern that matches a name takes it"
                )
        return groups


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """The last linear layer, which gives the answers, and its name."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ValueError("the model has no linear layer that could be its head: give one that ends in nn.Linear")
    return found[-1]


@dataclass(frozen=True)
class HeadLast:
    """Two groups: everything but the last linear layer, and that layer."""

    def __call__(self, model: nn.Module) -> list[list[str]]:
        head, layer = head_of(model)
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        own = [f"{head}.{name}" if head else name for name, _ in layer.named_parameters()]
        body = [name for name in trainable if name not in own]
        if not body or set(own) - set(trainable):
            raise ValueError("head_steps: the model has no trainable parameters beside a trainable head; leave it out")
        return [body, own]


def named_grouping(text: str) -> Grouping | None:
    """A grouping as written on the command line: layers, flat (one group), or patterns separated by semicolons."""
    if text == "flat":
        return None
    if text == "layers":
        return Layers()
    globs = tuple(part.strip() for part in text.split(";") if part.strip())
    if not globs:
        raise ValueError(f"groups={text!r} must be layers, flat, or patterns of parameter names: 'conv*;*'")
    return Patterns(globs)


def named_split(text: str) -> tuple[float, ...] | None:
    """How the bound is split, as written on the command line: even, or one relative bound for each group."""
    if text == "even":
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"split={text!r} must be even, or numbers with commas between: 1,1,2") from None


@dataclass(frozen=True)
class PerGroup(FixedClip):
    """Each group of an example's gradient is scaled to norm at most C_g; the squares of the C_g sum to that of `bound`.

    `split` gives the C_g up to a factor (default: all equal, `bound` / sqrt(groups)). With `each`, every C_g is `bound`
    itself, and the whole gradient is bounded by sqrt(groups) times it. `share` decides where the noise
    goes: "equal" gives every group the same ratio of noise to C_g, "isotropic" every coordinate the same noise (that of
    flat clipping at `bound`), "least-noise" the least total noise.

    Formal guarantees: group g gets noise of standard deviation z * C_g / s_g with the squares of the shares s_g summing
    to one. One example is in all groups or in none, and shifts the whitened sum by at most
    sqrt(sum of (s_g / z)^2) = 1 / z: the whole step is one Gaussian mechanism with noise multiplier z, exactly and
    tightly, since one example can meet the bound in every group at once.
    """

    bound: float = 1.0
    split: tuple[float, ...] | None = None
    share: Share = "equal"
    each: bool = False

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if self.each and self.split is not None:
            raise ValueError(f"split={self.split} splits one bound, and each=True gives every group its own: leave one")
        if self.split is not None and not all(part > 0 for part in self.split):
            raise ValueError(f"split={self.split} must be positive: each part bounds one group's influence")
        if self.share not in get_args(Share):
            raise ValueError(f"share={self.share!r} is unknown; choose from {', '.join(get_args(Share))}")

    def bounds(self, groups: int) -> Tensor:
        """C_g of each group, float64."""
        if self.split is not None and len(self.split) != groups:
            raise ValueError(f"split={self.split} has {len(self.split)} parts for {groups} groups; give one for each")
        parts = torch.tensor(self.split or (1.0,) * groups, dtype=torch.float64)
        found = self.whole(groups) * parts / torch.linalg.vector_norm(parts)
        check_bound(float(found.min()), "split: the smallest group's bound")
        return found

    def whole(self, groups: int) -> float:
        """The bound of the whole gradient."""
        return self.bound * groups**0.5 if self.each else self.bound

    def factors(self, norms: Tensor) -> Tensor:
        groups = norms.shape[-1]
        if self.each:
            return (self.bound / norms).clamp(max=1.0)
        bounds = self.bound / groups**0.5 if self.split is None else self.bounds(groups).to(norms.device)
        return (bounds / norms).clamp(max=1.0)

    def scales(self, sizes: Sequence[int]) -> Tensor:
        """Noise per unit of the whole step's noise multiplier, C_g / s_g, from the groups' sizes; float64."""
        bounds = self.bounds(len(sizes))
        if self.share == "isotropic":
            return torch.full_like(bounds, self.whole(len(sizes)))
        if self.share == "equal":
            return bounds * len(sizes) ** 0.5
        # Minimising the sum of d_g * std_g^2 under the constraint gives s_g^2 proportional to sqrt(d_g) * C_g.
        pull = torch.tensor(sizes, dtype=torch.float64).sqrt() * bounds
        return bounds / (pull / pull.sum()).sqrt()

    def sensitivity(self, layout: Layout) -> float | Tensor:
        if self.share == "isotropic" or (self.share == "equal" and self.split is None):
            return self.whole(layout.groups)  # the same noise on every coordinate: that of flat clipping
        return layout.expand(self.scales(layout.group_sizes)).float()

    def with_bound(self, bound: float) -> PerGroup:
        return replace(self, bound=bound)

    def noise_ratios(self, layout: Layout) -> Tensor:
        return self.scales(layout.group_sizes) / self.bounds(layout.groups)

    @property
    def recording(self) -> Hashable | None:
        return self if self.split is None else None  # bounds given one by one are copied to the device at every step


# --- the head first --------------------------------------------------------------------------------------------------

STILL = 2.0**-30
"""The noise of what is not asked, over that of what is: enough for a lattice to have a spacing, too little to move a
weight by a float32's last digit."""


@dataclass(frozen=True)
class HeadAlone(FixedClip):
    """The gradient of the last of two groups is scaled to norm at most `bound`; the other group's is dropped.

    Formal guarantees: one example moves the last group by at most `bound` and the other by nothing at all, so noise in
    proportion to `bound` on the last group alone is one Gaussian mechanism; that of the other has no part in it.
    """

    bound: float = 1.0
    stackable = shardable = False

    def factors(self, norms: Tensor) -> Tensor:
        assert norms.shape[-1] == 2
        return torch.cat([torch.zeros_like(norms[..., :1]), within(self.bound, norms[..., 1:])], dim=-1)

    def sensitivity(self, layout: Layout) -> Tensor:
        return layout.expand(torch.tensor([STILL, 1.0], dtype=torch.float64) * self.bound).float()


@dataclass(frozen=True)
class HeadFirst(FixedClip):
    """For `steps` steps the head alone, at `pace` times the learning rate; then the whole gradient, as `Flat` clips it.

    A pretrained body would be shaken by the gradients of a head that is not trained yet (DP-RandP). It is combined with
    the grouping `HeadLast`.

    Formal guarantees: every step is one Gaussian mechanism of the same noise multiplier: `HeadAlone`, or `Flat`. Which
    one follows from the step's number.
    """

    bound: float = 1.0
    steps: int = 0
    head_pace: float = 1.0
    stackable = shardable = False

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if not (isinstance(self.steps, int) and self.steps >= 0):
            raise ValueError(f"steps={self.steps} must be a whole number of steps, 0 or more")
        if not self.head_pace > 0:
            raise ValueError(f"head_pace={self.head_pace} must be positive: it multiplies the learning rate")

    def factors(self, norms: Tensor) -> Tensor:
        raise ValueError("HeadFirst changes with the steps of vestige.train: a loop of your own has another clip")

    def sensitivity(self, layout: Layout) -> float:
        """That of the steps after the first."""
        return self.bound

    def init(self) -> ClipState:
        return {"step": 0}

    def now(self, state: ClipState) -> Clip:
        return HeadAlone(self.bound) if state["step"] < self.steps else Flat(self.bound)

    def pace(self, state: ClipState) -> float:
        return self.head_pace if state["step"] < self.steps else 1.0

    def heard(self, release: Release, layout: Layout, state: ClipState) -> ClipState:
        return {"step": state["step"] + 1}

    def with_bound(self, bound: float) -> HeadFirst:
        return replace(self, bound=bound)
